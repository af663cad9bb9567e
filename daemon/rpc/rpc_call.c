#include "rpc/rpc_call.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

/* --- messages --------------------------------------------------------------------------------- */

struct rpc_message *rpc_message_new(const void *data, size_t n_bytes)
{
    struct rpc_message *m = mem_alloc(sizeof *m + n_bytes);
    if (m == NULL)
        return NULL;
    atomic_init(&m->refs, 1);
    m->n_bytes = n_bytes;
    if (n_bytes > 0)
        memcpy(m->data, data, n_bytes);
    return m;
}

struct rpc_message *rpc_message_ref(struct rpc_message *m)
{
    atomic_fetch_add_explicit(&m->refs, 1, memory_order_relaxed);
    return m;
}

void rpc_message_unref(struct rpc_message *m)
{
    if (m != NULL && atomic_fetch_sub_explicit(&m->refs, 1, memory_order_acq_rel) == 1)
        mem_free(m);
}

/* --- the handler's side ----------------------------------------------------------------------- */

void rpc_call_set_arg(struct rpc_call *call, void *arg)
{
    call->arg = arg;
}

void *rpc_call_arg(const struct rpc_call *call)
{
    return call->arg;
}

void *rpc_call_context(const struct rpc_call *call)
{
    return call->context;
}

const struct rpc_identity *rpc_call_identity(const struct rpc_call *call)
{
    return &call->identity;
}

void rpc_call_set_identity(struct rpc_call *call, const struct rpc_identity *who)
{
    call->identity = *who;
}

void rpc_call_set_queue(struct rpc_call *call, uint32_t max_messages, uint32_t max_bytes)
{
    call->max_queued_messages = max_messages;
    call->max_queued_bytes = max_bytes;
}

const char *rpc_call_path(const struct rpc_call *call)
{
    return call->method->path;
}

uint64_t rpc_call_deadline_ns(const struct rpc_call *call)
{
    return call->deadline_ns;
}

const char *rpc_call_metadata(const struct rpc_call *call, const char *key)
{
    const char *p = call->metadata;
    while (p != NULL && *p != '\0') {
        const char *value = p + strlen(p) + 1;
        if (strcmp(p, key) == 0)
            return value;
        p = value + strlen(value) + 1;
    }
    return NULL;
}

/* Where it is packed as one of the call's pairs. */
static bool is_kept(const struct rpc_metadata *pair)
{
    return strncmp(pair->key, RPC_METADATA_PREFIX, sizeof RPC_METADATA_PREFIX - 1) == 0;
}

static size_t packed_bytes(const struct rpc_metadata *pairs, size_t n)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n && bytes <= RPC_METADATA_MAX_BYTES; i++)
        if (is_kept(&pairs[i]))
            bytes += strlen(pairs[i].key) + strlen(pairs[i].value) + 2;
    return bytes;
}

static char *put(char *at, const char *text)
{
    size_t n = strlen(text) + 1;
    memcpy(at, text, n);
    return at + n;
}

int rpc_metadata_pack(const struct rpc_metadata *pairs, size_t n, char **ret)
{
    size_t bytes = packed_bytes(pairs, n);
    *ret = NULL;
    if (bytes > RPC_METADATA_MAX_BYTES)
        return RS_EEXHAUSTED;
    if (bytes == 0)
        return 0;
    char *packed = mem_alloc(bytes + 1), *at = packed;
    if (packed == NULL)
        return RS_ENOMEM;
    for (size_t i = 0; i < n; i++)
        if (is_kept(&pairs[i]))
            at = put(put(at, pairs[i].key), pairs[i].value);
    *at = '\0';
    *ret = packed;
    return 0;
}

struct rpc_message *rpc_call_next_out(struct rpc_call *call)
{
    struct queue *q = queue_pop(&call->out);
    if (q == NULL)
        return NULL;
    struct rpc_out *out = container_of(q, struct rpc_out, link);
    struct rpc_message *m = out->message;
    call->n_out--;
    call->out_bytes -= m->n_bytes;
    mem_free(out);
    return m;
}

static void drop_queue(struct rpc_call *call)
{
    for (struct rpc_message *m = rpc_call_next_out(call); m != NULL; m = rpc_call_next_out(call))
        rpc_message_unref(m);
}

static int cut_slow_reader(struct rpc_call *call)
{
    char text[128];
    (void)snprintf(text, sizeof text,
                   "the reader is too slow: %" PRIu32 " messages of %zu bytes are waiting",
                   call->n_out, call->out_bytes);
    drop_queue(call);
    call->state = RPC_CALL_FINISHING;
    call->was_cut = true;
    call->code = RS_EEXHAUSTED;
    call->carrier->cut(call, RS_EEXHAUSTED, text);
    return RS_EEXHAUSTED;
}

/* One message may always wait, however large, else it could never be sent. */
static bool queue_full(const struct rpc_call *call, size_t n_bytes)
{
    return call->n_out > 0 && (call->n_out >= call->max_queued_messages ||
                               call->out_bytes + n_bytes > call->max_queued_bytes);
}

int rpc_call_send_shared(struct rpc_call *call, struct rpc_message *m)
{
    if (call->state != RPC_CALL_OPEN)
        return RS_ECANCELED;
    if (queue_full(call, m->n_bytes))
        return cut_slow_reader(call);
    struct rpc_out *out = mem_alloc(sizeof *out);
    if (out == NULL)
        return RS_ENOMEM;
    out->message = rpc_message_ref(m);
    queue_push(&call->out, &out->link);
    call->n_out++;
    call->out_bytes += m->n_bytes;
    call->carrier->pump(call);
    return 0;
}

int rpc_call_send(struct rpc_call *call, const void *data, size_t n_bytes)
{
    if (call->state != RPC_CALL_OPEN)
        return RS_ECANCELED;
    struct rpc_message *m = rpc_message_new(data, n_bytes);
    if (m == NULL)
        return RS_ENOMEM;
    int r = rpc_call_send_shared(call, m);
    rpc_message_unref(m);
    return r;
}

void rpc_call_finish_details(struct rpc_call *call, int code, const char *text, const void *details,
                             size_t n_bytes)
{
    if (call->state != RPC_CALL_OPEN)
        return;
    call->state = RPC_CALL_FINISHING;
    call->code = code;
    /* Where memory is out the status goes without its text: better than not at all. */
    call->text = text == NULL ? NULL : mem_strdup(text);
    call->details = details == NULL ? NULL : rpc_message_new(details, n_bytes);
    if (code != 0 && call->method->kind == RPC_UNARY)
        drop_queue(call);
    call->carrier->pump(call);
}

void rpc_call_finish(struct rpc_call *call, int code, const char *text)
{
    rpc_call_finish_details(call, code, text, NULL, 0);
}

/* --- the carrier's side ----------------------------------------------------------------------- */

void rpc_call_init(struct rpc_call *call, const struct rpc_carrier *carrier,
                   const struct rpc_entry *entry, const struct rpc_server_options *options)
{
    *call = (struct rpc_call){.carrier = carrier,
                              .method = entry->method,
                              .context = entry->context,
                              .deadline_ns = UINT64_MAX,
                              .max_queued_messages = options->max_queued_messages,
                              .max_queued_bytes = options->max_queued_bytes};
    queue_init(&call->out);
    queue_init(&call->link);
}

void rpc_call_close(struct rpc_call *call)
{
    drop_queue(call);
    mem_free(call->text);
    mem_free(call->metadata);
    rpc_message_unref(call->details);
    queue_remove(&call->link);
}

void rpc_call_opened(struct rpc_call *call)
{
    if (call->method->on_open != NULL)
        call->method->on_open(call);
}

static void refuse_oversize(struct rpc_call *call, size_t n_bytes)
{
    char text[128];
    (void)snprintf(text, sizeof text, "message of %zu bytes, at most %" PRIu32 " here", n_bytes,
                   call->method->max_request_bytes);
    rpc_call_finish(call, RS_EEXHAUSTED, text);
}

void rpc_call_received(struct rpc_call *call, const void *data, size_t n_bytes)
{
    if (call->state != RPC_CALL_OPEN)
        return;
    if (n_bytes > call->method->max_request_bytes) {
        refuse_oversize(call, n_bytes);
        return;
    }
    if (call->got_message && !rpc_kind_streams_in(call->method->kind)) {
        rpc_call_finish(call, RS_EINVAL, "a second request message");
        return;
    }
    call->got_message = true;
    if (call->method->on_message != NULL)
        call->method->on_message(call, data, n_bytes);
}

void rpc_call_half_closed(struct rpc_call *call)
{
    if (call->state != RPC_CALL_OPEN)
        return;
    if (!call->got_message && !rpc_kind_streams_in(call->method->kind))
        rpc_call_finish(call, RS_EINVAL, "no request message");
    else if (call->method->on_half_close != NULL)
        call->method->on_half_close(call);
}

void rpc_call_ended(struct rpc_call *call, int reason)
{
    rs_assert(call->state != RPC_CALL_ENDED);
    call->state = RPC_CALL_ENDED;
    drop_queue(call);
    if (call->method->on_end != NULL)
        call->method->on_end(call, call->was_cut ? RS_EPEER : reason);
}

void rpc_identify(const struct rpc_server_options *options, const char *token,
                  struct rpc_identity *ret)
{
    *ret = (struct rpc_identity){.kind = RPC_ANONYMOUS};
    if (token == NULL || options->identify == NULL)
        return;
    if (!options->identify(options->context, token, ret))
        *ret = (struct rpc_identity){.kind = RPC_ANONYMOUS};
}

struct rpc_server_options rpc_options_with_defaults(const struct rpc_server_options *options)
{
    struct rpc_server_options o = *options;
    if (o.unix_mode == 0)
        o.unix_mode = 0660;
    if (o.keepalive_ms == 0)
        o.keepalive_ms = 1000;
    if (o.keepalive_timeout_ms == 0)
        o.keepalive_timeout_ms = 2000;
    if (o.handshake_timeout_ms == 0)
        o.handshake_timeout_ms = 5000;
    if (o.max_queued_messages == 0)
        o.max_queued_messages = 1024;
    if (o.max_queued_bytes == 0)
        o.max_queued_bytes = 16U << 20;
    return o;
}
