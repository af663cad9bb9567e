/* Publish, Withdraw, Submit, Ready, Accept, Apply, Sleep, Mark, Abort, Evict, Drain. */
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "service/api_common.h"
#include "service/options.h"
#include "service/proxy.h"

#include "base/banned.h"

static struct api_call *call_of(struct waiter *w)
{
    return container_of(w, struct api_call, waiter);
}

/* Ends the call with the error in the reply; true where there was one. */
static bool failed(struct api_call *c, const struct op_reply *reply)
{
    if (reply->code == 0)
        return false;
    rpc_call_finish(c->call, reply->code, reply->text);
    return true;
}

/* --- Publish ------------------------------------------------------------------------------------ */

static void publish_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__PublishReply m = RESHARD__V1__PUBLISH_REPLY__INIT;
    m.publication = reply->value;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int publish(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__PublishRequest *q = request;
    struct op_expected *expected = mem_calloc(q->n_expected, sizeof *expected);
    if (expected == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the expected fingerprints");
    for (size_t i = 0; i < q->n_expected; i++)
        expected[i] = (struct op_expected){q->expected[i]->tensor, q->expected[i]->fingerprint};
    c->waiter.done = publish_done;
    int r = q->cuda_event.len == 0 || q->cuda_event.len == WIRE_HANDLE_BYTES
                ? 0
                : err_set(e, RS_EINVAL, "cuda_event has %zu bytes, a cudaIpcEventHandle_t has %d",
                          q->cuda_event.len, WIRE_HANDLE_BYTES);
    if (r == 0)
        r = op_publish(c->service, c->client, q->worker, q->version, q->push,
                       q->cuda_event.len > 0 ? q->cuda_event.data : NULL, expected, q->n_expected,
                       &c->waiter, e);
    mem_free(expected);
    return r;
}

void api_publish(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__publish_request__descriptor, true, publish);
}

/* --- Withdraw ----------------------------------------------------------------------------------- */

static void withdraw_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__WithdrawReply m = RESHARD__V1__WITHDRAW_REPLY__INIT;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int withdraw(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__WithdrawRequest *q = request;
    int r = api_text("reason", q->reason, e);
    c->waiter.done = withdraw_done;
    return r != 0 ? r
                  : op_withdraw(c->service, c->client, q->worker, q->version, q->push, q->again,
                                q->reason, &c->waiter, e);
}

void api_withdraw(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__withdraw_request__descriptor, true, withdraw);
}

/* --- Submit ------------------------------------------------------------------------------------- */

static void submit_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__SubmitReply m = RESHARD__V1__SUBMIT_REPLY__INIT;
    m.attempt = reply->attempt;
    m.phase = API_PHASE(reply->phase);
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

/* The canonical bytes of the options: packed anew, so that unknown fields and spellings do not make another content. */
static int options_pack(const Reshard__V1__RefitOptions *o, uint8_t **ret, size_t *ret_n,
                        struct err *e)
{
    Reshard__V1__RefitOptions none = RESHARD__V1__REFIT_OPTIONS__INIT;
    Reshard__V1__RefitOptions known = o != NULL ? *o : none;
    known.base.n_unknown_fields = 0;
    known.base.unknown_fields = NULL;
    *ret_n = protobuf_c_message_get_packed_size(&known.base);
    *ret = mem_alloc(*ret_n);
    if (*ret == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the options");
    (void)protobuf_c_message_pack(&known.base, *ret);
    return 0;
}

static int submit(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__SubmitRequest *q = request;
    struct options options = {0};
    struct op_submit o = {.model = q->model, .version = q->version, .request_id = q->request_id};
    uint8_t *packed = NULL;
    char *words = NULL;
    int r = api_name("model", q->model, e);
    if (r == 0)
        r = api_name("request_id", q->request_id, e);
    if (r == 0)
        r = options_pack(q->options, &packed, &o.n_options_bytes, e);
    if (r == 0)
        r = options_read(packed, o.n_options_bytes, &options, e);
    if (r == 0) {
        o.options = packed;
        o.rehearsal = options.rehearsal;
        o.release_at = options.release_at;
        o.policies = options.policies;
        o.n_policies = options.n_policies;
        o.prepare_timeout_ms = options.prepare_timeout_ms;
        o.transfer_timeout_ms = options.transfer_timeout_ms;
        o.accept_timeout_ms = options.accept_timeout_ms;
        c->waiter.done = submit_done;
        o.options_words = words = options_words(&options);
        r = words == NULL ? err_set(e, RS_ENOMEM, "no memory for the options")
                          : op_submit(c->service, &o, &c->waiter, e);
    }
    mem_free(words);
    options_close(&options);
    mem_free(packed);
    return r;
}

void api_submit(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__submit_request__descriptor, true, submit);
}

/* --- Sleep -------------------------------------------------------------------------------------- */

static void sleep_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__SleepReply m = RESHARD__V1__SLEEP_REPLY__INIT;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int put_to_sleep(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__SleepRequest *q = request;
    c->waiter.done = sleep_done;
    return op_sleep(c->service, c->client, q->worker, &c->waiter, e);
}

void api_sleep(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__sleep_request__descriptor, true, put_to_sleep);
}

/* --- Ready, Accept, Apply, Mark ------------------------------------------------------------------ */

static void ready_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__ReadyReply m = RESHARD__V1__READY_REPLY__INIT;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int ready(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__ReadyRequest *q = request;
    c->waiter.done = ready_done;
    return op_ready(c->service, c->client, q->worker, q->version, &c->waiter, e);
}

void api_ready(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__ready_request__descriptor, true, ready);
}

static void accept_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__AcceptReply m = RESHARD__V1__ACCEPT_REPLY__INIT;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int accept_verdict(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__AcceptRequest *q = request;
    int r = api_text("reason", q->reason, e);
    c->waiter.done = accept_done;
    return r != 0 ? r
                  : op_accept(c->service, c->client, q->worker, q->version, q->attempt, !q->reject,
                              q->reason, &c->waiter, e);
}

void api_accept(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__accept_request__descriptor, true, accept_verdict);
}

/* The time that the caller waited for: what Apply cost. */
static void apply_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__ApplyReply m = RESHARD__V1__APPLY_REPLY__INIT;
    m.applied = reply->version;
    m.elapsed_ns = clock_mono_ns() - call_of(w)->begin_ns;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int apply(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__ApplyRequest *q = request;
    c->waiter.done = apply_done;
    return op_apply(c->service, c->client, q->worker, q->version, q->skip, &c->waiter, e);
}

void api_apply(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__apply_request__descriptor, true, apply);
}

static void mark_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__MarkReply m = RESHARD__V1__MARK_REPLY__INIT;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int mark(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__MarkRequest *q = request;
    int r = api_name("model", q->model, e);
    if (r == 0)
        r = api_name("name", q->name, e);
    c->waiter.done = mark_done;
    return r != 0 ? r
                  : op_mark(c->service, c->client, q->model, q->version, q->name, q->worker,
                            &c->waiter, e);
}

void api_mark(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__mark_request__descriptor, true, mark);
}

/* --- Abort, Evict, Drain -------------------------------------------------------------------------------- */

static void abort_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__AbortReply m = RESHARD__V1__ABORT_REPLY__INIT;
    m.version = reply->version;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int abort_refit(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__AbortRequest *q = request;
    int r = api_name("model", q->model, e);
    if (r == 0)
        r = api_text("reason", q->reason, e);
    c->waiter.done = abort_done;
    return r != 0 ? r : op_abort(c->service, q->model, q->version, q->reason, &c->waiter, e);
}

void api_abort(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__abort_request__descriptor, true, abort_refit);
}

static void evict_done(struct waiter *w, const struct op_reply *reply)
{
    Reshard__V1__EvictReply m = RESHARD__V1__EVICT_REPLY__INIT;
    if (!failed(call_of(w), reply))
        api_finish(call_of(w)->call, &m.base);
}

static int evict(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__EvictRequest *q = request;
    int r = api_text("reason", q->reason, e);
    c->waiter.done = evict_done;
    return r != 0 ? r : op_evict(c->service, q->worker, q->reason, &c->waiter, e);
}

void api_evict(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__evict_request__descriptor, true, evict);
}

static void drain_done(struct waiter *w, const struct op_reply *reply)
{
    const struct service *s = call_of(w)->service;
    Reshard__V1__DrainReply m = RESHARD__V1__DRAIN_REPLY__INIT;
    m.workers_gone = reply->value;
    m.drained_before = call_of(w)->drained_before;
    if (failed(call_of(w), reply))
        return;
    m.node = (char *)(uintptr_t)coordinator_node_name(s->coordinator, call_of(w)->node);
    api_finish(call_of(w)->call, &m.base);
}

static int node_named(const struct api_call *c, const char *name, uint32_t *ret, struct err *e)
{
    const struct service *s = c->service;
    if (s->coordinator == NULL)
        return err_set(e, RS_EUNAVAIL, "only the coordinator, node %s, decides that",
                       s->config->coordinator);
    for (uint32_t i = 0; i < s->coordinator->n_nodes; i++)
        if (strcmp(coordinator_node_name(s->coordinator, i), name) == 0) {
            *ret = i;
            return 0;
        }
    return err_set(e, RS_ENOTFOUND, "no node '%s' ([cluster] nodes lists them)", name);
}

static int drain(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__DrainRequest *q = request;
    int r =
        q->node[0] == '\0'
            ? err_set(e, RS_EINVAL, "node: none is named; name one (reshardctl status lists them)")
            : api_name("node", q->node, e);
    if (r == 0)
        r = node_named(c, q->node, &c->node, e);
    c->waiter.done = drain_done;
    c->drained_before = r == 0 && c->service->coordinator->nodes[c->node].drained_wall_ns != 0;
    return r != 0 ? r : op_drain(c->service, c->node, q->undrain, &c->waiter, e);
}

void api_drain(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__drain_request__descriptor, true, drain);
}
