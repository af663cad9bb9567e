/* What tests of the decider share: a bed to lay one in, which answers PERSIST by DURABLE and remembers all actions, and
 * events in short. */
#ifndef RS_TEST_REFIT_BED_H
#define RS_TEST_REFIT_BED_H

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "refit/refit.h"

#define MS UINT64_C(1000000)

/* --- a bed to lay a decider in --- */

enum { MAX_ACTIONS = 4096, TEXT = 1100 };

struct seen {
    struct refit_action a;
    char text[TEXT], who[128];
    enum ledger_kind kinds[32]; /* PERSIST */
    struct ledger_version version;
    uint64_t model_attempt, model_committed;
    uint32_t n_acceptances;
    struct ledger_attempt attempt; /* without its reason */
};

struct bed {
    struct refit *r;
    struct refit_update u;
    struct seen *seen;   /* everything since the bed was made */
    size_t n_seen, from; /* `from`: where the last step begins */
    uint64_t now_ns;
    bool hold;    /* don't answer PERSIST by DURABLE */
    long fail_at; /* > 0: this allocation fails, then the event is given again */
    bool struck;
    uint64_t next_cookie;
    bool torn; /* what the next attach says beside its arguments */
    uint64_t waits_for;
    uint32_t waits_push;
    bool again;
    uint64_t published;
};

static inline void note(struct bed *b, const struct refit_action *a)
{
    ck_assert_uint_lt(b->n_seen, MAX_ACTIONS);
    struct seen *s = &b->seen[b->n_seen++];
    *s = (struct seen){.a = *a};
    (void)snprintf(s->text, sizeof s->text, "%s", a->text);
    (void)snprintf(s->who, sizeof s->who, "%s", a->who);
    for (size_t i = 0; i < a->n_records && i < 32; i++) {
        const struct ledger_record *row = &a->records[i];
        s->kinds[i] = row->kind;
        if (row->kind == LEDGER_VERSION)
            s->version = row->version;
        if (row->kind == LEDGER_MODEL) {
            s->model_attempt = row->as_model.attempt;
            s->model_committed = row->as_model.committed;
        }
        s->n_acceptances += row->kind == LEDGER_ACCEPTANCE;
        if (row->kind == LEDGER_ATTEMPT)
            s->attempt = row->attempt;
        s->attempt.reason = NULL;
    }
}

static inline void step(struct bed *b, struct refit_event ev);

static inline void give(struct bed *b, struct refit_event *ev)
{
    ev->now_ns = b->now_ns;
    ev->wall_ns = UINT64_C(1700000000000000000) + b->now_ns;
    if (b->fail_at > 0) {
        mem_fail_at(b->fail_at);
        int rc = refit_step(b->r, ev, &b->u);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        b->struck |= struck;
        ck_assert_int_eq(rc, struck ? RS_ENOMEM : 0);
        if (rc == 0)
            return;
        ck_assert_uint_eq(b->u.n_actions, 0);
    }
    ck_assert_int_eq(refit_step(b->r, ev, &b->u), 0);
}

static inline void step(struct bed *b, struct refit_event ev)
{
    uint64_t durable[8];
    size_t n = 0, from = b->n_seen;
    b->now_ns += MS;
    give(b, &ev);
    refit_check(b->r);
    for (size_t i = 0; i < b->u.n_actions; i++) {
        note(b, &b->u.actions[i]);
        if (b->u.actions[i].type == REFIT_DO_PERSIST)
            durable[n++] = b->u.actions[i].sequence;
    }
    if (!b->hold)
        for (size_t i = 0; i < n; i++)
            step(b, (struct refit_event){.type = REFIT_EV_DURABLE,
                                         .durable = {.sequence = durable[i]}});
    b->from = from;
}

static inline void bed_init(struct bed *b)
{
    *b = (struct bed){.now_ns = 1000 * MS};
    b->seen = calloc(MAX_ACTIONS, sizeof *b->seen);
    b->r = refit_new("m", NULL);
    ck_assert(b->seen != NULL && b->r != NULL);
    refit_update_init(&b->u);
}

static inline void bed_close(struct bed *b)
{
    refit_free(b->r);
    refit_update_close(&b->u);
    free(b->seen);
}

/* The last action of this type in the last step; NULL: none. */
static inline const struct seen *did(const struct bed *b, enum refit_action_type type)
{
    for (size_t i = b->n_seen; i > b->from; i--)
        if (b->seen[i - 1].a.type == type)
            return &b->seen[i - 1];
    return NULL;
}

/* The first one that concerns this node. */
static inline const struct refit_action *did_on(const struct bed *b, enum refit_action_type type,
                                                uint32_t node)
{
    for (size_t i = b->from; i < b->n_seen; i++)
        if (b->seen[i].a.type == type && b->seen[i].a.node == node)
            return &b->seen[i].a;
    return NULL;
}

static inline unsigned count(const struct bed *b, enum refit_action_type type)
{
    unsigned n = 0;
    for (size_t i = b->from; i < b->n_seen; i++)
        n += b->seen[i].a.type == type;
    return n;
}

static inline unsigned told(const struct bed *b, enum refit_tell tell)
{
    unsigned n = 0;
    for (size_t i = b->from; i < b->n_seen; i++)
        n += b->seen[i].a.type == REFIT_DO_TELL && b->seen[i].a.tell == tell;
    return n;
}

static inline int phase(const struct bed *b, uint64_t version)
{
    const struct refit_version *v = refit_find_version(b->r, version);
    return v == NULL ? REFIT_NONE : v->phase.state;
}

static inline const char *reason(const struct bed *b, uint64_t version)
{
    return refit_find_version(b->r, version)->reason;
}

static inline const struct refit_worker *worker(const struct bed *b, uint64_t id)
{
    return refit_find_worker(b->r, id);
}

/* The answer to this cookie, ever; NULL: none yet. Asserts that there is at most one. */
static inline const struct seen *answer(const struct bed *b, uint64_t cookie)
{
    const struct seen *found = NULL;
    for (size_t i = 0; i < b->n_seen; i++)
        if (b->seen[i].a.type == REFIT_DO_REPLY && b->seen[i].a.cookie == cookie) {
            ck_assert_ptr_null(found);
            found = &b->seen[i];
        }
    return found;
}

static inline int code(const struct bed *b, uint64_t cookie)
{
    const struct seen *s = answer(b, cookie);
    ck_assert_ptr_nonnull(s);
    return s->a.code;
}

/* The answer has this code, and the word stands in its text. */
static inline void says(const struct bed *b, uint64_t cookie, int expected, const char *word)
{
    const struct seen *s = answer(b, cookie);
    ck_assert_ptr_nonnull(s);
    ck_assert_int_eq(s->a.code, expected);
    ck_assert_msg(strstr(s->text, word) != NULL, "'%s' is not in: %s", word, s->text);
}

/* --- events --- */

static inline void layout(struct bed *b, enum refit_side side, const char *name, uint32_t n_ranks,
                          uint32_t n_instances)
{
    uint32_t of[16];
    for (uint32_t i = 0; i < n_ranks; i++)
        of[i] = i / (n_ranks / n_instances);
    uint8_t digest[16] = {(uint8_t)n_ranks, (uint8_t)name[0]};
    step(b, (struct refit_event){.type = REFIT_EV_LAYOUT,
                                 .layout = {.side = side,
                                            .name = name,
                                            .digest = digest,
                                            .instance_of_rank = of,
                                            .n_ranks = n_ranks,
                                            .n_instances = n_instances}});
}

static inline void node_up(struct bed *b, uint32_t node)
{
    step(b, (struct refit_event){.type = REFIT_EV_NODE_UP, .node = {.node = node}});
}

static inline void silent(struct bed *b, uint32_t node)
{
    step(b, (struct refit_event){.type = REFIT_EV_NODE_SILENT, .node = {.node = node}});
}

static inline void lost(struct bed *b, uint32_t node, bool expelled)
{
    step(b, (struct refit_event){.type = REFIT_EV_NODE_LOST,
                                 .node = {.node = node, .expelled = expelled}});
}

struct attach {
    uint64_t id;
    uint32_t node;
    enum refit_side side;
    const char *name;
    uint32_t rank;
    enum refit_receive receive;
    bool automatic;
    uint64_t live, shadow;
};

static inline uint64_t attach(struct bed *b, struct attach a)
{
    uint64_t cookie = ++b->next_cookie;
    step(b, (struct refit_event){.type = REFIT_EV_ATTACHED,
                                 .cookie = cookie,
                                 .attached = {.worker = a.id,
                                              .node = a.node,
                                              .side = a.side,
                                              .layout_name = a.name,
                                              .rank = a.rank,
                                              .receive = a.receive,
                                              .accept_automatically = a.automatic,
                                              .live = a.live,
                                              .shadow = a.shadow,
                                              .torn = b->torn,
                                              .waits_for = b->waits_for,
                                              .push = b->waits_push,
                                              .again = b->again,
                                              .published = b->published}});
    b->torn = false;
    b->waits_for = 0;
    b->waits_push = 0;
    b->again = false;
    b->published = 0;
    return cookie;
}

static inline void leave(struct bed *b, uint64_t worker, bool for_good)
{
    step(b,
         (struct refit_event){.type = REFIT_EV_LEFT, .left = {worker, for_good, "process ended"}});
}

static inline struct refit_event submit_event(uint64_t version, const char *id,
                                              const uint8_t *content)
{
    return (struct refit_event){.type = REFIT_EV_SUBMIT,
                                .submit = {.version = version,
                                           .request_id = id,
                                           .content = content,
                                           .options = "opt",
                                           .n_options_bytes = 3}};
}

static inline uint64_t submit(struct bed *b, uint64_t version, const char *id, uint8_t digit)
{
    uint8_t content[16] = {digit};
    struct refit_event ev = submit_event(version, id, content);
    ev.cookie = ++b->next_cookie;
    step(b, ev);
    return ev.cookie;
}

/* So many instances of that layout must accept. */
static inline uint64_t submit_with(struct bed *b, uint64_t version, const char *id,
                                   const char *layout_name, uint32_t min)
{
    struct refit_policy policy = {.layout_name = (char *)(uintptr_t)layout_name,
                                  .min_instances = min};
    uint8_t content[16] = {1};
    struct refit_event ev = submit_event(version, id, content);
    ev.submit.policies = &policy;
    ev.submit.n_policies = 1;
    ev.cookie = ++b->next_cookie;
    step(b, ev);
    return ev.cookie;
}

static inline void submit_min(struct bed *b, uint64_t version, const char *id, uint32_t min)
{
    ck_assert_int_eq(code(b, submit_with(b, version, id, "rollout", min)), 0);
}

static inline void publish(struct bed *b, uint64_t worker, uint64_t version, uint64_t publication)
{
    step(b, (struct refit_event){.type = REFIT_EV_PUBLISHED,
                                 .published = {worker, version, publication, 0}});
}

static inline void planned(struct bed *b)
{
    static const uint8_t digest[16] = {0xD1};
    step(b, (struct refit_event){.type = REFIT_EV_PLANNED,
                                 .planned = {.attempt = b->r->attempt_high,
                                             .digest = digest,
                                             .totals = {.total = 100, .network_minimum = 50},
                                             .strategy = "reshard"}});
}

static inline void node_event(struct bed *b, enum refit_event_type type, uint32_t node)
{
    step(b, (struct refit_event){
                .type = type,
                .node = {.node = node, .attempt = b->r->attempt_high, .bytes = {.landed = 10}}});
}

static inline void node_failed(struct bed *b, uint32_t node, uint64_t worker)
{
    step(b, (struct refit_event){.type = REFIT_EV_FAILED,
                                 .node = {.node = node,
                                          .attempt = b->r->attempt_high,
                                          .code = RS_EDATALOSS,
                                          .text = "w, [0, 4): differs",
                                          .worker = worker}});
}

static inline uint64_t verdict(struct bed *b, uint64_t worker, uint64_t version, bool accept)
{
    uint64_t cookie = ++b->next_cookie;
    step(b, (struct refit_event){.type = REFIT_EV_VERDICT,
                                 .cookie = cookie,
                                 .verdict = {worker, version, 0, accept, "perplexity rose"}});
    return cookie;
}

static inline uint64_t apply(struct bed *b, uint64_t worker, uint64_t version, bool skip)
{
    uint64_t cookie = ++b->next_cookie;
    step(b, (struct refit_event){
                .type = REFIT_EV_APPLY, .cookie = cookie, .apply = {worker, version, skip}});
    return cookie;
}

static inline void applied(struct bed *b, uint64_t worker, uint64_t version, int rc)
{
    step(b, (struct refit_event){.type = REFIT_EV_APPLIED,
                                 .applied = {worker, version, rc, rc == 0 ? NULL : "differs"}});
}

static inline void ready(struct bed *b, uint64_t worker, uint64_t version)
{
    step(b, (struct refit_event){.type = REFIT_EV_READY, .ready = {worker, version}});
}

static inline uint64_t abort_version(struct bed *b, uint64_t version)
{
    uint64_t cookie = ++b->next_cookie;
    step(b, (struct refit_event){
                .type = REFIT_EV_ABORT, .cookie = cookie, .abort = {version, "by hand"}});
    return cookie;
}

static inline uint64_t drain(struct bed *b, uint32_t node, bool on)
{
    uint64_t cookie = ++b->next_cookie;
    step(b, (struct refit_event){
                .type = REFIT_EV_DRAIN, .cookie = cookie, .drain = {.node = node, .on = on}});
    return cookie;
}

static inline void tick(struct bed *b, uint64_t ms)
{
    b->now_ns += ms * MS;
    step(b, (struct refit_event){.type = REFIT_EV_TICK});
}

static inline void written(struct bed *b, uint64_t sequence, int rc)
{
    step(b, (struct refit_event){.type = rc == 0 ? REFIT_EV_DURABLE : REFIT_EV_NOT_DURABLE,
                                 .durable = {sequence, rc, rc == 0 ? NULL : "disk full"}});
}

/* A trainer of two ranks (workers 1, 2) and a rollout of two instances of one rank each (11, 12): the trainer and
 * instance 0 on node 0, instance 1 on node 1. */
static inline void usual(struct bed *b, enum refit_receive receive, bool automatic)
{
    bed_init(b);
    layout(b, REFIT_SOURCE, "train", 2, 1);
    layout(b, REFIT_DESTINATION, "rollout", 2, 2);
    node_up(b, 0);
    node_up(b, 1);
    (void)attach(b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    (void)attach(b,
                 (struct attach){2, 0, REFIT_SOURCE, "train", 1, REFIT_RECEIVE_NONE, false, 0, 0});
    (void)attach(b,
                 (struct attach){11, 0, REFIT_DESTINATION, "rollout", 0, receive, automatic, 0, 0});
    (void)attach(b,
                 (struct attach){12, 1, REFIT_DESTINATION, "rollout", 1, receive, automatic, 0, 0});
}

static inline void publish_all(struct bed *b, uint64_t version)
{
    publish(b, 1, version, version * 10 + 1);
    publish(b, 2, version, version * 10 + 2);
}

static inline void both_say(struct bed *b, enum refit_event_type type)
{
    node_event(b, type, 0);
    node_event(b, type, 1);
}

static inline void plan_and_prepare(struct bed *b)
{
    planned(b);
    both_say(b, REFIT_EV_PREPARED);
}

static inline void both_ready(struct bed *b, uint64_t version)
{
    ready(b, 11, version);
    ready(b, 12, version);
}

/* Submitted, published, planned and prepared: where engines are not waited for both nodes move bytes now. */
static inline void to_transfer(struct bed *b, uint64_t version, const char *id)
{
    (void)submit(b, version, id, 1);
    publish_all(b, version);
    plan_and_prepare(b);
}

/* The same where bytes move when both engines have paused. */
static inline void to_transfer_in_place(struct bed *b, uint64_t version, const char *id)
{
    to_transfer(b, version, id);
    both_ready(b, version);
}

static inline void to_accepting(struct bed *b, uint64_t version, const char *id)
{
    to_transfer(b, version, id);
    both_say(b, REFIT_EV_STAGED);
}

static inline void quiesce(struct bed *b)
{
    both_say(b, REFIT_EV_QUIESCED);
}

/* A whole version, accepted by both and applied where it is staged. */
static inline void whole(struct bed *b, uint64_t version, const char *id)
{
    to_accepting(b, version, id);
    (void)verdict(b, 11, version, true);
    (void)verdict(b, 12, version, true);
    for (uint64_t w = 11; w <= 12; w++)
        if (refit_find_worker(b->r, w)->receive == REFIT_STAGED_RECEIVE) {
            (void)apply(b, w, version, false);
            applied(b, w, version, 0);
        }
}

static inline void waiting(const char *who, void *arg)
{
    char *text = arg;
    (void)snprintf(text + strlen(text), (size_t)TEXT - strlen(text), "%s; ", who);
}

static inline const char *waiting_for(const struct bed *b, uint64_t version)
{
    static char text[TEXT];
    text[0] = '\0';
    (void)refit_waiting_for(b->r, refit_find_version(b->r, version), 16, waiting, text);
    return text;
}

#endif
