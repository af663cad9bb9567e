#include "service/proxy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "peer/layout_pages.h"
#include "peer/peer.h"
#include "service/api_common.h"

#include "base/banned.h"

/* Of one call, on its way to the coordinator: more than the largest layout. */
enum { MOST_QUEUED_BYTES = 64 << 20 };
/* Then a coordinator that does not answer is said to be so, and the operator gets what is known here. */
enum { STATUS_MS = 2000 };
#define STATUS_PATH "/reshard.v1.Admin/Status"

struct proxy {
    struct rpc_call *call;     /* NULL: it has ended */
    struct rpc_link_call *out; /* NULL: it has ended */
    struct service *service;
    /* PutLayout: kept here too, once the coordinator has it */
    bool keeps;
    struct layout_builder builder;
    struct buf reply; /* the coordinator's: PutLayout's and Status's */
    /* Status: answered in any case, by the coordinator's word and ours, or by ours alone */
    bool status, asked;
    char *model;              /* of the request, once asked */
    char why[ERR_TEXT_BYTES]; /* there is no word of the coordinator */
    struct waiter waiter;
    uint8_t digest[16];
};

static const char *const wanted[] = {
    "/reshard.v1.Refit/PutLayout", "/reshard.v1.Refit/Submit",   "/reshard.v1.Refit/WatchRefit",
    "/reshard.v1.Admin/Versions",  "/reshard.v1.Admin/Timeline", "/reshard.v1.Admin/Abort",
    "/reshard.v1.Admin/Evict",     "/reshard.v1.Admin/Drain",    STATUS_PATH,
};

bool proxy_wanted(const char *path)
{
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (strcmp(wanted[i], path) == 0)
            return true;
    return false;
}

static void maybe_gone(struct proxy *p)
{
    if (p->call != NULL || p->out != NULL)
        return;
    layout_builder_close(&p->builder);
    buf_close(&p->reply);
    mem_free(p->model);
    mem_free(p);
}

/* --- ends ---------------------------------------------------------------------------------------- */

static void unreachable(struct service *s, const char *why, char *ret, size_t capacity)
{
    const struct config *c = s->config;
    (void)snprintf(ret, capacity, "the coordinator %s at %s is not reachable: %s", c->coordinator,
                   c->nodes[c->coordinator_index].address, why);
}

/* The caller gets what the coordinator said; where there was none to say it, what is wrong. */
static void finish(struct proxy *p, int code, const char *text, const void *details,
                   size_t n_details)
{
    char why[ERR_TEXT_BYTES];
    if (p->call == NULL)
        return;
    if (code == RS_EUNAVAIL && details == NULL) {
        unreachable(p->service, text, why, sizeof why);
        text = why;
    }
    rpc_call_finish_details(p->call, code, text, details, n_details);
}

static void kept(struct waiter *w, const struct op_reply *reply)
{
    struct proxy *p = container_of(w, struct proxy, waiter);
    if (reply->code == 0)
        (void)rpc_call_send(p->call, p->reply.data, p->reply.n_bytes);
    rpc_call_finish(p->call, reply->code, reply->code != 0 ? reply->text : NULL);
}

/* The coordinator has the layout; now this node keeps it too. */
static void keep(struct proxy *p)
{
    struct layout *l = NULL;
    struct err e = {0};
    p->waiter.done = kept;
    int r = layout_builder_take(&p->builder, &l, &e);
    if (r == 0 && buf_error(&p->reply) != 0)
        r = err_set(&e, RS_ENOMEM, "no memory for the coordinator's answer");
    if (r != 0)
        layout_free(l);
    else
        r = op_put_layout(p->service, l, p->digest, &p->waiter, &e);
    if (r != 0)
        api_finish_error(p->call, r, &e);
}

/* --- Status -------------------------------------------------------------------------------------- */

/* Without a word of the coordinator, once it is known what was asked. */
static void status_alone(struct proxy *p)
{
    if (p->call != NULL && p->asked)
        api_status_member(p->call, NULL, 0, p->model != NULL ? p->model : "", p->why);
}

static void status_end(struct proxy *p, int code, const char *text, const void *details,
                       size_t n_details)
{
    bool reached = code != RS_EUNAVAIL && code != RS_EDEADLINE && code != RS_EPEER;
    if (code == 0 && buf_error(&p->reply) == 0) {
        api_status_member(p->call, p->reply.data, p->reply.n_bytes,
                          p->model != NULL ? p->model : "", "");
        return;
    }
    if (code != 0 && reached) {
        finish(p, code, text, details, n_details);
        return;
    }
    unreachable(p->service, code == 0 ? "no memory for its answer" : text, p->why, sizeof p->why);
    status_alone(p);
}

static int status_asked(struct proxy *p, const void *data, size_t n_bytes, struct err *e)
{
    void *request = NULL;
    int r = api_decode(&reshard__v1__status_request__descriptor, data, n_bytes, &request, e);
    if (r != 0)
        return r;
    p->asked = true;
    p->model = mem_strdup(((const Reshard__V1__StatusRequest *)request)->model);
    pb_free(request);
    if (p->model == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the call");
    if (p->out == NULL)
        status_alone(p);
    return 0;
}

/* --- what comes back ----------------------------------------------------------------------------- */

static void on_end(struct rpc_link_call *out, void *arg, int code, const char *text,
                   const void *details, size_t n_details)
{
    struct proxy *p = arg;
    (void)out;
    p->out = NULL;
    if (p->call != NULL && p->status)
        status_end(p, code, text, details, n_details);
    else if (p->call != NULL && code == 0 && p->keeps)
        keep(p);
    else
        finish(p, code, text, details, n_details);
    maybe_gone(p);
}

static void on_message(struct rpc_link_call *out, void *arg, const void *data, size_t n_bytes)
{
    struct proxy *p = arg;
    (void)out;
    if (p->call == NULL)
        return;
    if (p->keeps || p->status)
        buf_put(&p->reply, data, n_bytes);
    else
        (void)rpc_call_send(p->call, data,
                            n_bytes); /* one that does not read is cut off: proxy_end */
}

static const struct rpc_link_call_events events = {.on_message = on_message, .on_end = on_end};

/* --- opening ------------------------------------------------------------------------------------- */

static void origin_text(const struct rpc_identity *who, char *ret, size_t capacity)
{
    if (who->kind == RPC_LOCAL && who->name[0] == '\0')
        (void)snprintf(ret, capacity, "local %" PRIu32 " %" PRId32, who->uid, who->pid);
    else if (who->name[0] != '\0' && who->kind != RPC_ANONYMOUS)
        (void)snprintf(ret, capacity, "tls %s", who->name);
    else
        (void)snprintf(ret, capacity, "anonymous");
}

/* What is left, in ms, at least 1; 0: no deadline. */
static uint32_t deadline_left_ms(const struct rpc_call *call)
{
    uint64_t deadline = rpc_call_deadline_ns(call), now = clock_mono_ns();
    if (deadline == UINT64_MAX)
        return 0;
    uint64_t ms = deadline > now ? (deadline - now) / 1000000 : 0;
    return ms == 0 ? 1 : ms > UINT32_MAX ? 0 : (uint32_t)ms;
}

static int open_out(struct proxy *p, struct err *e)
{
    struct peer *peer = peer_of(p->service);
    struct rpc_link *link = peer != NULL && peer_joined(peer) ? peer_channel(peer) : NULL;
    char token[PEER_TOKEN_TEXT], origin[300], why[512];
    uint32_t deadline_ms = deadline_left_ms(p->call);
    if (p->status && (deadline_ms == 0 || deadline_ms > STATUS_MS))
        deadline_ms = STATUS_MS;
    if (link == NULL) {
        unreachable(p->service, peer != NULL ? peer_text(peer) : "this daemon is stopping", why,
                    sizeof why);
        return err_set(e, RS_EUNAVAIL, "%s", why);
    }
    peer_token(peer, token);
    origin_text(rpc_call_identity(p->call), origin, sizeof origin);
    const struct rpc_metadata metadata[] = {{PROXY_PEER, token}, {PROXY_ORIGIN, origin}};
    const struct rpc_link_call_options o = {.path = rpc_call_path(p->call),
                                            .deadline_ms = deadline_ms,
                                            .metadata = metadata,
                                            .n_metadata = 2};
    return rpc_link_call_open(link, &o, &events, p, &p->out, e);
}

void proxy_open(struct rpc_call *call)
{
    struct err e = {0};
    struct proxy *p = mem_zalloc(sizeof *p);
    if (p == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for the call");
        return;
    }
    p->call = call;
    p->service = rpc_call_context(call);
    p->keeps = strcmp(rpc_call_path(call), wanted[0]) == 0;
    p->status = strcmp(rpc_call_path(call), STATUS_PATH) == 0;
    buf_init(&p->reply);
    rpc_call_set_arg(call, p);
    int r = open_out(p, &e);
    if (r == RS_EUNAVAIL && p->status) /* when it is known what is asked */
        (void)snprintf(p->why, sizeof p->why, "%s", e.text);
    else if (r != 0)
        api_finish_error(call, r, &e);
}

/* --- the caller's side --------------------------------------------------------------------------- */

static void give_up(struct proxy *p, int code, const struct err *e)
{
    api_finish_error(p->call, code, e);
    if (p->out != NULL)
        rpc_link_call_cancel(p->out);
}

void proxy_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct proxy *p = rpc_call_arg(call);
    struct err e = {0};
    int r = p != NULL && p->status && !p->asked ? status_asked(p, data, n_bytes, &e) : 0;
    if (p != NULL && r != 0)
        give_up(p, r, &e);
    if (p == NULL || p->out == NULL || r != 0)
        return;
    r = p->keeps ? layout_builder_page(&p->builder, data, n_bytes, false, &e) : 0;
    if (r == 0 && rpc_link_call_queued_bytes(p->out) > MOST_QUEUED_BYTES)
        r = RS_EEXHAUSTED;
    if (r == 0)
        r = rpc_link_call_send(p->out, data, n_bytes);
    if (r == RS_EEXHAUSTED && e.code == 0)
        (void)err_set(&e, r, "the coordinator does not take so much at once");
    if (r != 0 && r != RS_ECANCELED) /* it has ended the call already: on_end tells how */
        give_up(p, r, &e);
}

void proxy_half_close(struct rpc_call *call)
{
    struct proxy *p = rpc_call_arg(call);
    if (p != NULL && p->out != NULL)
        rpc_link_call_half_close(p->out);
}

void proxy_end(struct rpc_call *call, int reason)
{
    struct proxy *p = rpc_call_arg(call);
    (void)reason;
    if (p == NULL)
        return;
    waiter_forget(&p->waiter);
    p->call = NULL;
    if (p->out != NULL)
        rpc_link_call_cancel(p->out);
    maybe_gone(p);
}

/* --- at the coordinator -------------------------------------------------------------------------- */

static int origin_parse(const char *text, struct rpc_identity *ret, struct err *e)
{
    struct rpc_identity who = {.kind = RPC_ANONYMOUS};
    char rest;
    if (strncmp(text, "tls ", 4) == 0 && text[4] != '\0' && strlen(text + 4) < sizeof who.name) {
        who.kind = RPC_TLS;
        (void)snprintf(who.name, sizeof who.name, "%s", text + 4);
    } else if (sscanf(text, "local %" SCNu32 " %" SCNd32 "%c", &who.uid, &who.pid, &rest) == 2) {
        who.kind = RPC_LOCAL;
        who.client = PROXY_CLIENT;
    } else if (strcmp(text, "anonymous") != 0) {
        return err_set(e, RS_EINVAL, PROXY_ORIGIN ": '%.80s' makes no sense", text);
    }
    *ret = who;
    return 0;
}

int proxy_origin(const struct rpc_call *call, struct rpc_identity *ret, struct err *e)
{
    const char *token = rpc_call_metadata(call, PROXY_PEER);
    const char *origin = rpc_call_metadata(call, PROXY_ORIGIN);
    struct peer *peer = peer_of(rpc_call_context(call));
    uint32_t node;
    if (token == NULL)
        return 1;
    if (peer == NULL || !peer_vouches(peer, token, &node))
        return err_set(e, RS_EUNAVAIL,
                       "the session of the node that passed this call on is over; try again");
    return origin_parse(origin != NULL ? origin : "", ret, e);
}
