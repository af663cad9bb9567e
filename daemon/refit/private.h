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
    WAITER_APPLY   /* for `worker` to have applied */
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
    WRITE_END, /* ABORTED or SUPERSEDED */
    WRITE_NOTE /* nothing waits for it */
};

struct refit_write {
    uint64_t sequence;
    enum write_kind kind;
    uint64_t version; /* 0: none */
    uint64_t attempt;
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
void version_free(struct refit *r, struct refit_version *v);
struct refit_version *version_new(struct refit *r, uint64_t version);
uint32_t version_min_instances(const struct refit_version *v, const struct refit_layout *l);

/* --- attempt.c --- */
void attempt_begin(struct step *s);
/* What the source workers have published as this version, as one number; 0: some have not, or it is not known. */
uint64_t attempt_content(const struct refit *r, uint64_t version);
/* Does whatever has become possible: asks, PLAN, PREPARE, START, accept, commit. */
void attempt_advance(struct step *s);
void attempt_planned(struct step *s);
void attempt_prepared(struct step *s);
void attempt_progress(struct step *s);
void attempt_staged(struct step *s);
void attempt_failed(struct step *s);
void attempt_quiesced(struct step *s);
void attempt_deadline(struct step *s);
void attempt_node_lost(struct step *s);
void attempt_worker_lost(struct step *s, struct refit_worker *w);
void attempt_begun_written(struct step *s, const struct refit_write *w, int code);
void attempt_epoch_written(struct step *s, const struct refit_write *w, int code);
void attempt_commit_written(struct step *s, const struct refit_write *w, int code);
/* Ends the attempt in flight; `text` is copied. Not while committing. */
void attempt_call_off(struct step *s, int code, const char *text);
void attempt_clear(struct refit *r);
/* True while workers and nodes have been chosen: from PLAN on. */
bool attempt_chosen(const struct refit *r);
/* While ACCEPTING: an instance whose workers have all accepted has; one rejection rejects it. */
void attempt_settled(struct step *s, struct refit_layout *l, uint32_t instance, const char *why);
struct refit_node *refit_node(const struct refit *r, uint32_t node);
struct refit_node *refit_node_get(struct refit *r, uint32_t node);
/* Tells the sources that have published this version that they may write again; once per
 * submission. */
void attempt_release_sources(struct step *s, struct refit_version *v);

/* --- workers.c --- */
int workers_layout(struct step *s);
void refit_layout_free(struct refit_layout *l);
int workers_attached(struct step *s);
void workers_left(struct step *s);
void workers_published(struct step *s);
void workers_ready(struct step *s);
void workers_verdict(struct step *s);
void workers_apply(struct step *s);
void workers_applied(struct step *s);
void workers_node_lost(struct step *s, uint32_t node);
void workers_sweep(struct refit *r); /* frees those that were only kept for an attempt */
void workers_mark(struct step *s);

/* --- words.c --- */
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
/* "rollout/rank 3" into the update's text. */
const char *worker_name(struct step *s, const struct refit_worker *w);

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

#endif
