/* What the decider's files share and nobody else may include.
 *
 * Each handler gets the step: the state, the event, the update. step_reserve has made room for
 * every action, record and text that a step can need, so nothing below it can run out of memory but
 * the handlers of LAYOUT, SUBMIT and ATTACHED, which allocate before they change anything. */
#ifndef RS_REFIT_PRIVATE_H
#define RS_REFIT_PRIVATE_H

#include "base/err.h"
#include "refit/refit.h"

struct refit_request {
    struct queue link;
    char *id;
    uint64_t attempt; /* the answer */
    enum refit_phase phase;
    uint64_t sequence; /* of the transaction that carries it; 0: durable */
};

enum waiter_kind {
    WAITER_SUBMIT, /* for `sequence` to be durable */
    WAITER_ABORT,  /* for `version` to end */
    WAITER_APPLY,  /* for `worker` to have applied */
    WAITER_DRAIN,  /* for node `worker` to be empty */
    WAITER_BEGIN   /* for the rehearsal of `sequence` to have begun */
};

struct refit_waiter {
    enum waiter_kind kind;
    uint64_t cookie;
    uint64_t sequence, version, worker;
    uint64_t attempt; /* WAITER_SUBMIT: the answer */
    enum refit_phase phase;
};

enum write_kind {
    WRITE_SUBMIT, /* a version, its request id and, where nothing is in flight, its attempt */
    WRITE_BEGIN,  /* an attempt of a version that waited */
    WRITE_EPOCH,
    WRITE_COMMIT,
    WRITE_END,  /* ABORTED or SUPERSEDED */
    WRITE_SIDE, /* how a catch-up or rehearsal ended well */
    WRITE_NOTE  /* nothing waits for it */
};

struct refit_write {
    uint64_t sequence;
    enum write_kind kind;
    uint64_t version; /* 0: none */
    uint64_t attempt;
    bool side; /* of the catch-up or rehearsal with this attempt */
};

struct step {
    struct refit *r;
    const struct refit_event *ev;
    struct refit_update *u;
};

/* --- phase.c --- */
extern const struct sm_state refit_phase_table[REFIT_N_PHASES];
/* The one function that changes a version's phase. */
void phase_move(const struct refit *r, struct refit_version *v, enum refit_phase next);

/* --- refit.c: putting things into the update --- */
struct refit_action *step_put(struct step *s, enum refit_action_type type);
/* Formats into the update's text; truncated to ERR_TEXT_BYTES. */
const char *step_text(struct step *s, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* No-op for cookie 0. */
void step_reply(struct step *s, uint64_t cookie, int code, const char *text);
void step_reply_values(struct step *s, uint64_t cookie, uint64_t version, uint64_t attempt,
                       enum refit_phase phase, uint64_t value);
void step_notify(struct step *s, const struct refit_version *v);
void step_tell(struct step *s, const struct refit_worker *w, enum refit_tell tell,
               const struct refit_version *v, const char *reason);
void step_mark(struct step *s, const struct refit_version *v, const char *name, const char *who,
               uint64_t at_ns);
/* The version's last times, once its end is durable. */
void step_ended(struct step *s, const struct refit_version *v);
/* Records are put first, then step_persist gathers those since the last one. */
struct ledger_record *step_record(struct step *s, enum ledger_kind kind);
void step_record_model(struct step *s, uint64_t committed);
void step_record_version(struct step *s, const struct refit_version *v, enum refit_phase phase);
void step_record_attempt(struct step *s, const struct refit_version *v, enum refit_phase phase);
uint64_t step_persist(struct step *s, enum write_kind kind, struct refit_version *v);
void step_wait(struct step *s, const struct refit_waiter *w);
/* Answers and forgets the waiters of `kind` about `id` (sequence, version or worker). */
void step_answer(struct step *s, enum waiter_kind kind, uint64_t id, int code, const char *text,
                 uint64_t value);
uint64_t deadline_after(const struct step *s, uint32_t ms);
uint64_t since_submitted(const struct step *s, const struct refit_version *v);

/* --- queue.c --- */
int queue_submit(struct step *s);
void queue_submit_written(struct step *s, const struct refit_write *w, int code);
void queue_abort(struct step *s);
/* Gives the way free: the queued version's turn. */
void queue_next(struct step *s);
/* Starts the end record that brings a version to ABORTED or SUPERSEDED. */
void queue_end(struct step *s, struct refit_version *v, enum refit_phase end);
void queue_end_written(struct step *s, const struct refit_write *w);
void queue_prune(struct refit *r);
void queue_unexclude(const struct refit *r);
/* NULL, or why nothing can be submitted as this version (in words); by rules that need nothing else. */
const char *queue_submit_fault(struct step *s);
/* A version that is on its way, queued or being written; NULL: none. */
const struct refit_version *queue_newest_open(const struct refit *r);
/* A trainer that has lost count publishes other weights under a number that is committed. Its refusal, in words. */
bool published_differs(const struct refit *r, const struct refit_version *v);
const char *published_differs_text(struct step *s, const struct refit_version *v);
void queue_fill(struct refit_version *v, const struct refit *r, const struct refit_event *ev);
/* What SUBMIT allocates, all before anything is changed. */
struct parcel {
    struct refit_request *request;
    struct refit_policy *policies;
    void *options;
    char *words;
};
int parcel_make(const struct refit_event *ev, struct parcel *ret);
void parcel_free(struct parcel *p, uint32_t n_policies);
void queue_policies_free(struct refit_policy *policies, uint32_t n);
void version_free(struct refit *r, struct refit_version *v);
struct refit_version *version_new(struct refit *r, uint64_t version);
uint32_t version_min_instances(const struct refit_version *v, const struct refit_layout *l);

/* --- content.c --- */

/* SUBMIT asks for what `v` is; of a committed one also where its source layout has left since. */
bool content_same(const struct refit *r, const struct refit_version *v,
                  const struct refit_event *ev);
/* In words, how a version's content differs from what is submitted now. */
const char *content_difference(struct step *s, const struct refit_version *v);
/* Where `v` (NULL: nothing to do) waits, submitted before any trainer had attached, and is submitted again now that its
 * source is known, and with all that was known then: that is its content from here on. RS_ENOMEM: nothing has changed. */
int content_complete(struct refit_version *v, const struct refit_event *ev);

/* --- attempt.c --- */
void attempt_begin(struct step *s);
/* Where it is what the attempt in flight waits for: when this source had it. */
void attempt_mark_published(struct step *s, const struct refit_worker *w);
/* What the source workers have published as this version, as one number; 0: some have not, or it is not known. */
uint64_t attempt_content(const struct refit *r, uint64_t version);
/* Does whatever has become possible: asks, PLAN, PREPARE, START, accept, commit. */
void attempt_advance(struct step *s);
void attempt_planned(struct step *s);
void attempt_prepared(struct step *s);
void attempt_progress(struct step *s);
void attempt_staged(struct step *s);
void attempt_begun_written(struct step *s, const struct refit_write *w, int code);
void attempt_epoch_written(struct step *s, const struct refit_write *w, int code);
void attempt_commit_written(struct step *s, const struct refit_write *w, int code);
void attempt_clear(struct refit *r);
/* Every source worker has published this version, and holds it still. */
bool attempt_sources_ready(const struct refit *r, const struct refit_version *v);
void attempt_take_part(struct refit *r, struct refit_worker *w);
/* True while workers and nodes have been chosen: from PLAN on. */
bool attempt_chosen(const struct refit *r);
/* While ACCEPTING: commits as soon as the policy holds; aborts as soon as it can't hold any more. */
void attempt_judge(struct step *s);
/* While ACCEPTING: an instance whose workers have all accepted has; one rejection rejects it. */
void attempt_settled(struct step *s, struct refit_layout *l, uint32_t instance, const char *why);
/* Tells the sources that have published this version that they may write again; once per
 * submission. */
void attempt_release_sources(struct step *s, struct refit_version *v);
/* The node that an answer about the attempt in flight comes from; NULL: it is of another attempt. */
struct refit_node *attempt_answering_node(const struct step *s);
struct refit_action *attempt_put_node(struct step *s, enum refit_action_type type,
                                      const struct refit_node *n);
/* The prepare deadline passed: true where it is set anew, for a refit without those that need still
 * longer. */
bool attempt_close_gathering(struct step *s);
const char *attempt_rejections_text(struct step *s);
void attempt_record_acceptances(struct step *s);
/* What a commit makes of a destination's memory. */
void attempt_memory_committed(struct step *s, struct refit_worker *w,
                              const struct refit_version *v);

/* --- abort.c --- */
/* Ends the attempt in flight; `text` is copied. Not while committing. */
void attempt_call_off(struct step *s, int code, const char *text);
/* Everything may have let go: then the version ends, or is tried again. */
void attempt_finish(struct step *s);
void attempt_failed(struct step *s);
void attempt_quiesced(struct step *s);
void attempt_deadline(struct step *s);
void attempt_node_silent(struct step *s, struct refit_node *n);
void attempt_node_lost(struct step *s, struct refit_node *n);
void attempt_node_expelled(struct step *s, const struct refit_node *n);
/* `how`: what has become of it, after its name. */
void attempt_worker_lost(struct step *s, struct refit_worker *w, const char *how);

/* --- feed.c --- */
/* The destination layout with most instances that hold this version whole and can feed others;
 * `prefer`, where it has any. NULL: none, or refit_config.feed is off. */
struct refit_layout *feed_find(const struct refit *r, const struct refit_version *v,
                               struct refit_layout *prefer);
/* Those of the layout's workers that feed take part. */
void feed_choose(struct refit *r, const struct refit_version *v, struct refit_layout *l);
/* Chosen, and no worker lacks anything: there is nothing to plan. */
bool feed_nothing(const struct refit *r);
/* It holds this version's content whole in memory that may be read: in which. */
enum refit_feed feed_holds(const struct refit *r, const struct refit_version *v,
                           const struct refit_worker *w);

/* --- side.c --- */
/* Begins a catch-up where one is due. */
void side_consider(struct step *s);
/* Catch-up: chooses feeders and receivers; false: there are none (any more). */
bool side_choose(struct step *s);
int side_rehearse(struct step *s);
void side_begun_written(struct step *s, const struct refit_write *w, int code);
/* ACCEPTING: ends it once all have said what they think. */
void side_judge(struct step *s);
void side_written(struct step *s, const struct refit_write *w, int code);
void side_aborted(struct step *s);
/* A newer version comes: a catch-up is called off. */
void side_make_way(struct step *s);
void side_free(struct refit *r);

/* --- push.c --- */
void push_withdraw(struct step *s);
/* A worker of the source has left: what its peers wait for, and is not submitted, will not come. */
void push_worker_left(struct step *s, const struct refit_worker *left);
/* Each step: tells and releases those who wait in vain. */
void push_settle(struct step *s);
/* A source has published (or says that it had) as part of its push of that number; 0: of none. */
void push_begins(struct refit_worker *w, uint64_t version, uint32_t push, uint64_t now_ns);
/* This version is going to be tried: for the pushes that stand. */
void push_submitted(const struct refit *r, struct refit_version *v);
/* Withdrawn, and not released though nothing reads it any more: never, after a step. */
bool push_is_stuck(const struct refit *r, const struct refit_worker *w);

/* --- nodes.c --- */
struct refit_node *refit_node(const struct refit *r, uint32_t node);
struct refit_node *refit_node_get(struct refit *r, uint32_t node);
void nodes_up(struct step *s);
void nodes_silent(struct step *s);
void nodes_lost(struct step *s);
void nodes_drain(struct step *s);
void nodes_restored(struct step *s);
void nodes_settle_down(struct step *s);
/* False: an attempt of before this start may still move on a node that has not joined yet. */
bool nodes_settled(const struct refit *r);
/* Whoever is on a drained node leaves as soon as it can. */
void nodes_settle(struct step *s);
static inline bool node_usable(const struct refit *r, uint32_t node)
{
    const struct refit_node *n = refit_node(r, node);
    return n->up && !n->silent;
}

/* --- workers.c --- */
int workers_layout(struct step *s);
void refit_layout_free(struct refit_layout *l);
int workers_attached(struct step *s);
void workers_left(struct step *s);
void workers_applying_ends(struct step *s, struct refit_worker *w, const char *text);
void workers_published(struct step *s);
void workers_publishing(struct step *s);
void workers_ready(struct step *s);
void workers_verdict(struct step *s);
void workers_apply(struct step *s);
void workers_applied(struct step *s);
void workers_node_lost(struct step *s, uint32_t node);
void workers_unwant(struct refit *r, struct refit_layout *l);
void workers_sweep(struct refit *r); /* frees those that were only kept for an attempt */
void workers_mark(struct step *s);

/* --- words.c --- */
/* What people call a node; the number is written into ret_number where it has no name. */
enum { NODE_NUMBER_BYTES = 12 };
const char *node_called(const struct refit *r, uint32_t node, char ret_number[NODE_NUMBER_BYTES]);
#define NODE_NAME(r, node) node_called((r), (node), (char[NODE_NUMBER_BYTES]){0})
enum instance_fitness {
    INSTANCE_FIT,    /* every rank is attached, its node up, its memory free */
    INSTANCE_LATER,  /* all attached, but something has to happen first: waited for */
    INSTANCE_MISSING /* a rank is not attached, or it is excluded: left out where the policy allows
                      */
};
enum instance_fitness instance_fitness(const struct refit *r, const struct refit_version *v,
                                       const struct refit_layout *l, uint32_t instance);
/* Calls fn for each thing that the version's phase waits for. */
typedef void (*missing_fn)(const char *who, void *arg);
size_t missing_walk(const struct refit *r, const struct refit_version *v, size_t max, missing_fn fn,
                    void *arg);
/* "rollout/rank 3, rollout/rank 4 and 7 more" into the update's text. */
const char *missing_text(struct step *s, const struct refit_version *v);
/* While gathering: NULL, or why waiting is in vain: a node that is needed has a data plane that does not start. */
const char *gather_in_vain(struct step *s, const struct refit_version *v);
/* "rollout/rank 3" into the update's text. */
const char *worker_name(struct step *s, const struct refit_worker *w);

static inline struct refit_instance *worker_instance(const struct refit_worker *w)
{
    return &w->layout->instances[w->layout->instance_of_rank[w->rank]];
}
/* A destination worker whose instance takes part: it receives or holds already, and accepts. Not so one
 * that only feeds. */
static inline bool worker_accepts(const struct refit_worker *w)
{
    return w->layout->side == REFIT_DESTINATION && worker_instance(w)->taking_part;
}

static inline void worker_holds_nothing(struct refit_worker *w)
{
    w->held = w->held_content = 0;
    w->proven = false;
}

static inline struct refit_worker *worker_of(struct queue *q)
{
    return container_of(q, struct refit_worker, link);
}
static inline struct refit_layout *layout_of(struct queue *q)
{
    return container_of(q, struct refit_layout, link);
}
static inline struct refit_version *version_of(struct queue *q)
{
    return container_of(q, struct refit_version, link);
}

#define foreach_worker(w, r)                                                                       \
    for (struct refit_worker *w = worker_of((r)->workers.next); &w->link != &(r)->workers;         \
         w = worker_of(w->link.next))
#define foreach_layout(l, r)                                                                       \
    for (struct refit_layout *l = layout_of((r)->layouts.next); &l->link != &(r)->layouts;         \
         l = layout_of(l->link.next))
#define foreach_version(v, r)                                                                      \
    for (struct refit_version *v = version_of((r)->versions.next); &v->link != &(r)->versions;     \
         v = version_of(v->link.next))

/* --- sleep.c --- */

void sleep_begin(struct step *s, struct refit_worker *w);
void sleep_event(struct step *s);
/* NULL, or why a version can't be committed while workers sleep: names one that it needs, and the remedy. With an attempt's
 * policies; `fed`: destination workers feed, no source is needed. */
const char *sleep_forbids(struct step *s, const struct refit_policy *policies, uint32_t n_policies,
                          bool fed);

#endif
