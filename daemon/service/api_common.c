#include "service/api_common.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "layout/layout.h"
#include "service/api.h"

#include "base/banned.h"

static const struct pb_field_limit field_limits[] = {
    {"reshard.v1.PutLayoutRequest.tensors", 200000}, {"reshard.v1.LayoutHeader.meshes", 65536},
    {"reshard.v1.LayoutHeader.instances", 1 << 18},  {"reshard.v1.Mesh.ranks", 1 << 20},
    {"reshard.v1.Instance.ranks", 1 << 20},          {"reshard.v1.Tensor.regions", 1 << 18},
    {"reshard.v1.BindingPage.pieces", 200000},       {"reshard.v1.PublishRequest.expected", 200000},
};
/* Names have a limit of their own, which api_name tells as such. */
static const struct pb_limits limits = {.max_depth = 6,
                                        .max_repeated = 1024,
                                        .max_memory_bytes = (size_t)192 << 20,
                                        .max_string_bytes = 1 << 17,
                                        .fields = field_limits,
                                        .n_fields = sizeof field_limits / sizeof *field_limits};

int api_decode(const ProtobufCMessageDescriptor *type, const void *data, size_t n_bytes, void **ret,
               struct err *e)
{
    return pb_unpack(type, data, n_bytes, &limits, ret, e);
}

int api_identity(struct rpc_call *call, bool identified, uint64_t *ret_client, struct err *e)
{
    const struct rpc_identity *who = rpc_call_identity(call);
    *ret_client = who->kind == RPC_LOCAL ? who->client : 0;
    if (*ret_client == 0 && who->name[0] != '\0' && who->kind == RPC_ANONYMOUS)
        return err_set(
            e, RS_EUNAUTH,
            "the token is not known to this start of the daemon; say hello and attach again");
    if (*ret_client == 0 && identified)
        return err_set(
            e, RS_EUNAUTH,
            "no token; say hello on the memory socket and send its token as reshard-token");
    return 0;
}

int api_name(const char *field, const char *value, struct err *e)
{
    if (layout_name_valid(value, strlen(value)))
        return 0;
    return err_set(e, RS_EINVAL, "%s: must be printable UTF-8 of 1 … %d bytes", field,
                   LAYOUT_MAX_NAME_BYTES);
}

int api_text(const char *field, const char *value, struct err *e)
{
    return value[0] == '\0' ? 0 : api_name(field, value, e);
}

int api_decider(struct api_call *c, const char *name, struct decider **ret, struct err *e)
{
    struct service *s = c->service;
    int r = api_name("model", name, e);
    if (r != 0)
        return r;
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    if (s->coordinator == NULL)
        return err_set(e, RS_EUNAVAIL, "only the coordinator, node %s, knows that",
                       s->config->coordinator);
    *ret = decider_find(s->coordinator, name);
    return *ret != NULL ? 0 : err_set(e, RS_ENOTFOUND, "no model '%s'", name);
}

/* --- replies ------------------------------------------------------------------------------------ */

void api_send(struct rpc_call *call, const ProtobufCMessage *m)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = mem_alloc(n);
    if (bytes == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for the answer");
        return;
    }
    (void)protobuf_c_message_pack(m, bytes);
    (void)rpc_call_send(call, bytes, n); /* a call that has ended meanwhile takes nothing more */
    mem_free(bytes);
}

void api_finish(struct rpc_call *call, const ProtobufCMessage *m)
{
    api_send(call, m);
    rpc_call_finish(call, 0, NULL);
}

void api_finish_error(struct rpc_call *call, int code, const struct err *e)
{
    rpc_call_finish(call, code, err_text(e, code));
}

/* --- unary calls -------------------------------------------------------------------------------- */

void api_unary_open(struct rpc_call *call)
{
    struct api_call *c = mem_zalloc(sizeof *c);
    if (c == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for the call");
        return;
    }
    c->call = call;
    c->service = rpc_call_context(call);
    c->begin_ns = clock_mono_ns();
    rpc_call_set_arg(call, c);
}

void api_unary_end(struct rpc_call *call, int reason)
{
    struct api_call *c = rpc_call_arg(call);
    (void)reason;
    if (c == NULL)
        return;
    waiter_forget(&c->waiter);
    mem_free(c);
}

void api_unary(struct rpc_call *call, const void *data, size_t n_bytes,
               const ProtobufCMessageDescriptor *type, bool identified, api_unary_fn fn)
{
    struct api_call *c = rpc_call_arg(call);
    struct err e = {0};
    void *request = NULL;
    if (c == NULL)
        return;
    int r = api_identity(call, identified, &c->client, &e);
    if (r == 0)
        r = api_decode(type, data, n_bytes, &request, &e);
    if (r == 0)
        r = fn(c, request, &e);
    pb_free(request);
    if (r != 0)
        api_finish_error(call, r, &e);
}

/* --- the table ---------------------------------------------------------------------------------- */

#define UNARY(service, method, name, bytes)                                                        \
    {                                                                                              \
        .path = "/reshard.v1." service "/" method, .kind = RPC_UNARY, .max_request_bytes = bytes,  \
        .on_open = api_unary_open, .on_message = name, .on_end = api_unary_end                     \
    }

static const struct rpc_method methods[] = {
    {.path = "/reshard.v1.Refit/PutLayout",
     .kind = RPC_CLIENT_STREAM,
     .max_request_bytes = API_MAX_REQUEST_BYTES,
     .on_open = api_put_layout_open,
     .on_message = api_put_layout_message,
     .on_half_close = api_put_layout_half_close,
     .on_end = api_put_layout_end},
    {.path = "/reshard.v1.Refit/Attach",
     .kind = RPC_BIDI,
     .max_request_bytes = API_MAX_REQUEST_BYTES,
     .on_open = api_attach_open,
     .on_message = api_attach_message,
     .on_half_close = api_attach_half_close,
     .on_end = api_attach_end},
    UNARY("Refit", "Publish", api_publish, API_MAX_REQUEST_BYTES),
    UNARY("Refit", "Withdraw", api_withdraw, API_SMALL_REQUEST_BYTES),
    UNARY("Refit", "Submit", api_submit, API_SMALL_REQUEST_BYTES * 8),
    {.path = "/reshard.v1.Refit/WatchRefit",
     .kind = RPC_SERVER_STREAM,
     .max_request_bytes = API_SMALL_REQUEST_BYTES,
     .on_open = api_watch_refit_open,
     .on_message = api_watch_refit,
     .on_end = api_watch_refit_end},
    UNARY("Refit", "Ready", api_ready, API_SMALL_REQUEST_BYTES),
    UNARY("Refit", "Accept", api_accept, API_SMALL_REQUEST_BYTES),
    UNARY("Refit", "Apply", api_apply, API_SMALL_REQUEST_BYTES),
    UNARY("Refit", "Sleep", api_sleep, API_SMALL_REQUEST_BYTES),
    UNARY("Refit", "Mark", api_mark, API_SMALL_REQUEST_BYTES),
    {.path = "/reshard.v1.Refit/GetCommitted",
     .kind = RPC_UNARY,
     .max_request_bytes = API_SMALL_REQUEST_BYTES,
     .on_open = api_poll_open,
     .on_message = api_get_committed,
     .on_end = api_poll_end},
    {.path = "/reshard.v1.Refit/WatchCommitted",
     .kind = RPC_SERVER_STREAM,
     .max_request_bytes = API_SMALL_REQUEST_BYTES,
     .on_open = api_poll_open,
     .on_message = api_watch_committed,
     .on_end = api_poll_end},
    UNARY("Admin", "Status", api_status, API_SMALL_REQUEST_BYTES),
    UNARY("Admin", "Versions", api_versions, API_SMALL_REQUEST_BYTES),
    UNARY("Admin", "Timeline", api_timeline, API_SMALL_REQUEST_BYTES),
    UNARY("Admin", "Abort", api_abort, API_SMALL_REQUEST_BYTES),
    UNARY("Admin", "Evict", api_evict, API_SMALL_REQUEST_BYTES),
    UNARY("Admin", "Drain", api_drain, API_SMALL_REQUEST_BYTES),
};

const struct rpc_method *api_methods(size_t *ret_n)
{
    *ret_n = sizeof methods / sizeof *methods;
    return methods;
}
