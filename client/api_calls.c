/* Unary calls and server streams of the service Refit. */
#include <string.h>

#include "client/api.h"
#include "client/api_pack.h"
#include "client/cuda.h"
#include "client/link.h"
#include "rpc/pb_budget.h"

#include "reshard.pb-c.h"

#include "base/banned.h"

/* The generated structs hold char * also where a message is only packed. */
static char *borrow(const char *s)
{
    return (char *)(uintptr_t)(s != NULL ? s : "");
}

/* A call whose reply has nothing to say. */
static int call_empty(struct rpc_channel *c, const char *path, const ProtobufCMessage *request,
                      const ProtobufCMessageDescriptor *type, uint64_t deadline_ns, struct err *e)
{
    void *reply;
    int r = api_unary(c, path, request, type, deadline_ns, &reply, e);
    if (r == 0)
        pb_free(reply);
    return r;
}

int api_publish(struct rpc_channel *c, uint64_t worker, uint64_t version, uint32_t push,
                const uint8_t *event, const struct reshard_expected *expected, size_t n_expected,
                uint64_t deadline_ns, struct err *e)
{
    struct api_arena arena = {0};
    Reshard__V1__PublishRequest m = RESHARD__V1__PUBLISH_REQUEST__INIT;
    m.worker = worker;
    m.version = version;
    m.push = push;
    if (event != NULL)
        m.cuda_event = (ProtobufCBinaryData){CUDA_HANDLE_BYTES, (uint8_t *)(uintptr_t)event};
    Reshard__V1__ExpectedFingerprint *items = arena_alloc(&arena, n_expected, sizeof *items);
    m.expected = arena_alloc(&arena, n_expected, sizeof(void *));
    for (size_t i = 0; !arena.failed && i < n_expected; i++) {
        reshard__v1__expected_fingerprint__init(&items[i]);
        items[i].tensor = borrow(expected[i].tensor);
        items[i].fingerprint = expected[i].fingerprint;
        m.expected[m.n_expected++] = &items[i];
    }
    int r = arena.failed ? err_set(e, RS_ENOMEM, "publish: out of memory")
                         : call_empty(c, "/reshard.v1.Refit/Publish", &m.base,
                                      &reshard__v1__publish_reply__descriptor, deadline_ns, e);
    arena_close(&arena);
    return r;
}

int api_withdraw(struct rpc_channel *c, uint64_t worker, uint64_t version, uint32_t push,
                 const char *reason, bool again, uint64_t deadline_ns, struct err *e)
{
    Reshard__V1__WithdrawRequest m = RESHARD__V1__WITHDRAW_REQUEST__INIT;
    m.worker = worker;
    m.version = version;
    m.push = push;
    m.reason = borrow(reason);
    m.again = again;
    return call_empty(c, "/reshard.v1.Refit/Withdraw", &m.base,
                      &reshard__v1__withdraw_reply__descriptor, deadline_ns, e);
}

/* ---- submit ---- */

static void put_rules(struct api_arena *a, const struct reshard_submit *o,
                      Reshard__V1__RefitOptions *m)
{
    Reshard__V1__StrategyRule *items = arena_alloc(a, o->n_rules, sizeof *items);
    m->rules = arena_alloc(a, o->n_rules, sizeof(void *));
    for (size_t i = 0; !a->failed && i < o->n_rules; i++) {
        reshard__v1__strategy_rule__init(&items[i]);
        items[i].glob = borrow(o->rules[i].glob);
        items[i].strategy = (Reshard__V1__Strategy)o->rules[i].strategy;
        m->rules[m->n_rules++] = &items[i];
    }
}

static void put_policy(struct api_arena *a, const struct reshard_submit *o,
                       Reshard__V1__RefitOptions *m)
{
    Reshard__V1__LayoutPolicy *items = arena_alloc(a, o->n_policy, sizeof *items);
    m->policy = arena_alloc(a, o->n_policy, sizeof(void *));
    for (size_t i = 0; !a->failed && i < o->n_policy; i++) {
        reshard__v1__layout_policy__init(&items[i]);
        items[i].layout_name = borrow(o->policy[i].layout_name);
        items[i].min_instances = o->policy[i].min_instances;
        m->policy[m->n_policy++] = &items[i];
    }
}

static void put_options(struct api_arena *a, const struct reshard_submit *o,
                        Reshard__V1__RefitOptions *m)
{
    m->release_at = (Reshard__V1__ReleaseAt)o->release_at;
    m->verify = (Reshard__V1__Verify)o->verify;
    m->strategy = (Reshard__V1__Strategy)o->strategy;
    m->prepare_timeout_ms = o->prepare_timeout_ms;
    m->transfer_timeout_ms = o->transfer_timeout_ms;
    m->accept_timeout_ms = o->accept_timeout_ms;
    m->rehearsal = o->rehearsal;
    put_rules(a, o, m);
    put_policy(a, o, m);
}

int api_submit(struct rpc_channel *c, const char *model, uint64_t version, const char *request_id,
               const struct reshard_submit *options, uint64_t deadline_ns, uint64_t *ret_attempt,
               enum reshard_phase *ret_phase, struct err *e)
{
    struct api_arena arena = {0};
    Reshard__V1__RefitOptions o = RESHARD__V1__REFIT_OPTIONS__INIT;
    Reshard__V1__SubmitRequest m = RESHARD__V1__SUBMIT_REQUEST__INIT;
    m.model = borrow(model);
    m.version = version;
    m.request_id = borrow(request_id);
    if (options != NULL)
        put_options(&arena, options, &o);
    m.options = &o;
    void *reply;
    int r = arena.failed
                ? err_set(e, RS_ENOMEM, "submit: out of memory")
                : api_unary(c, "/reshard.v1.Refit/Submit", &m.base,
                            &reshard__v1__submit_reply__descriptor, deadline_ns, &reply, e);
    arena_close(&arena);
    if (r != 0)
        return r;
    *ret_attempt = ((const Reshard__V1__SubmitReply *)reply)->attempt;
    *ret_phase = (enum reshard_phase)((const Reshard__V1__SubmitReply *)reply)->phase;
    pb_free(reply);
    return 0;
}

/* ---- destinations ---- */

int api_ready(struct rpc_channel *c, uint64_t worker, uint64_t version, uint64_t deadline_ns,
              struct err *e)
{
    Reshard__V1__ReadyRequest m = RESHARD__V1__READY_REQUEST__INIT;
    m.worker = worker;
    m.version = version;
    return call_empty(c, "/reshard.v1.Refit/Ready", &m.base, &reshard__v1__ready_reply__descriptor,
                      deadline_ns, e);
}

int api_sleep(struct rpc_channel *c, uint64_t worker, uint64_t deadline_ns, struct err *e)
{
    Reshard__V1__SleepRequest m = RESHARD__V1__SLEEP_REQUEST__INIT;
    m.worker = worker;
    return call_empty(c, "/reshard.v1.Refit/Sleep", &m.base, &reshard__v1__sleep_reply__descriptor,
                      deadline_ns, e);
}

int api_accept(struct rpc_channel *c, uint64_t worker, uint64_t version, uint64_t attempt,
               bool reject, const char *reason, uint64_t deadline_ns, struct err *e)
{
    Reshard__V1__AcceptRequest m = RESHARD__V1__ACCEPT_REQUEST__INIT;
    m.worker = worker;
    m.version = version;
    m.attempt = attempt;
    m.reject = reject;
    m.reason = borrow(reason);
    return call_empty(c, "/reshard.v1.Refit/Accept", &m.base,
                      &reshard__v1__accept_reply__descriptor, deadline_ns, e);
}

int api_apply(struct rpc_channel *c, uint64_t worker, uint64_t version, bool skip,
              uint64_t deadline_ns, uint64_t *ret_applied, uint64_t *ret_elapsed_ns, struct err *e)
{
    Reshard__V1__ApplyRequest m = RESHARD__V1__APPLY_REQUEST__INIT;
    m.worker = worker;
    m.version = version;
    m.skip = skip;
    void *message;
    int r = api_unary(c, "/reshard.v1.Refit/Apply", &m.base, &reshard__v1__apply_reply__descriptor,
                      deadline_ns, &message, e);
    if (r != 0)
        return r;
    const Reshard__V1__ApplyReply *reply = message;
    *ret_applied = reply->applied;
    *ret_elapsed_ns = reply->elapsed_ns;
    pb_free(message);
    return 0;
}

int api_mark(struct rpc_channel *c, const char *model, uint64_t version, const char *name,
             uint64_t worker, uint64_t deadline_ns, struct err *e)
{
    Reshard__V1__MarkRequest m = RESHARD__V1__MARK_REQUEST__INIT;
    m.model = borrow(model);
    m.version = version;
    m.name = borrow(name);
    m.worker = worker;
    return call_empty(c, "/reshard.v1.Refit/Mark", &m.base, &reshard__v1__mark_reply__descriptor,
                      deadline_ns, e);
}

/* ---- committed versions ---- */

static struct reshard_committed committed_of(const Reshard__V1__Committed *m)
{
    return (struct reshard_committed){.version = m->version,
                                      .committed_wall_ns = m->committed_wall_ns,
                                      .held = m->held,
                                      .applied = m->applied};
}

int api_get_committed(struct rpc_channel *c, const char *model, uint64_t newer_than,
                      uint32_t wait_ms, uint64_t worker, uint64_t deadline_ns,
                      struct reshard_committed *ret, struct err *e)
{
    Reshard__V1__GetCommittedRequest m = RESHARD__V1__GET_COMMITTED_REQUEST__INIT;
    m.model = borrow(model);
    m.newer_than = newer_than;
    m.wait_ms = wait_ms;
    m.worker = worker;
    void *reply;
    int r = api_unary(c, "/reshard.v1.Refit/GetCommitted", &m.base,
                      &reshard__v1__committed__descriptor, deadline_ns, &reply, e);
    if (r != 0)
        return r;
    *ret = committed_of(reply);
    pb_free(reply);
    return 0;
}

int api_watch_committed(struct rpc_channel *c, const char *model, uint64_t worker,
                        uint64_t deadline_ns, struct rpc_stream **ret, struct err *e)
{
    Reshard__V1__WatchCommittedRequest m = RESHARD__V1__WATCH_COMMITTED_REQUEST__INIT;
    m.model = borrow(model);
    m.worker = worker;
    return api_server_stream(c, "/reshard.v1.Refit/WatchCommitted", &m.base, deadline_ns, ret, e);
}

int api_next_committed(struct rpc_stream *s, uint32_t timeout_ms, struct reshard_committed *ret,
                       struct err *e)
{
    void *message;
    int r = api_receive(s, &reshard__v1__committed__descriptor, timeout_ms, &message, e);
    if (r != 0)
        return r;
    *ret = committed_of(message);
    pb_free(message);
    return 0;
}

/* ---- states of a refit ---- */

int api_watch_refit(struct rpc_channel *c, const char *model, uint64_t version,
                    uint64_t deadline_ns, struct rpc_stream **ret, struct err *e)
{
    Reshard__V1__WatchRefitRequest m = RESHARD__V1__WATCH_REFIT_REQUEST__INIT;
    m.model = borrow(model);
    m.version = version;
    return api_server_stream(c, "/reshard.v1.Refit/WatchRefit", &m.base, deadline_ns, ret, e);
}

static struct reshard_bytes bytes_of(const Reshard__V1__Bytes *m)
{
    if (m == NULL)
        return (struct reshard_bytes){0};
    return (struct reshard_bytes){.landed = m->landed,
                                  .total = m->total,
                                  .network = m->network,
                                  .domain = m->domain,
                                  .device = m->device,
                                  .skipped = m->skipped,
                                  .network_minimum = m->network_minimum};
}

/* Appends ", text" as far as it fits whole; the rest is told by what `waiting_for` ends with. */
static void text_append(char *to, const char *text)
{
    size_t at = strnlen(to, RESHARD_TEXT_BYTES), n = strlen(text);
    if (at + n + 3 > RESHARD_TEXT_BYTES)
        return;
    if (at > 0) {
        memcpy(to + at, ", ", 2);
        at += 2;
    }
    memcpy(to + at, text, n + 1);
}

static void state_of(const Reshard__V1__RefitState *m, struct reshard_state *ret)
{
    *ret = (struct reshard_state){.version = m->version,
                                  .attempt = m->attempt,
                                  .phase = (enum reshard_phase)m->phase,
                                  .bytes = bytes_of(m->bytes),
                                  .source_released = m->source_released,
                                  .elapsed_ns = m->elapsed_ns};
    text_append(ret->reason, m->reason);
    for (size_t i = 0; i < m->n_waiting_for; i++)
        text_append(ret->waiting_for, m->waiting_for[i]);
}

int api_refit_state(struct rpc_stream *s, uint32_t timeout_ms, struct reshard_state *ret,
                    struct err *e)
{
    void *message;
    int r = api_receive(s, &reshard__v1__refit_state__descriptor, timeout_ms, &message, e);
    if (r != 0)
        return r;
    state_of(message, ret);
    pb_free(message);
    return 0;
}
