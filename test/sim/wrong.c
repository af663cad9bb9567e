/* Wrong bytes: in some attempts all that one worker sends is wrong, to several receivers, which may pass it on. What the data
 * planes see by themselves, and what the coordinator makes of what all have seen (daemon/service/run_verify.c).
 *
 * Where receivers feed others in the trainer's place, what they hold is what the rest is compared with: so nobody may who was not
 * compared with the trainer himself, though the attempt that brought it ended for another reason (check_wrong). */
#include <string.h>

#include "test/sim/world.h"

#define ULL(x) ((unsigned long long)(x))

/* A trainer's fingerprints are of what it has published, a feeder's of what it holds. */
static void senders_print(struct world *w, struct trial *t)
{
    memcpy(t->sent, t->expected, sizeof t->sent);
    for (uint32_t i = w->n_workers; i-- > 0;) {
        const struct refit_worker *r = refit_find_worker(w->refit, t->worker[i]);
        struct worker *worker = &w->workers[i];
        if (t->role[i] != REFIT_ROLE_SENDS || r == NULL || r->feeding == REFIT_FEED_NONE)
            continue;
        const struct memory *m =
            r->feeding == REFIT_FEED_LIVE ? &worker->live : worker_receiving(worker);
        for (uint32_t e = 0; e < w->n_elements; e++)
            if ((worker_owned(w, worker) >> e & 1) != 0)
                t->sent[e] = m->element[e];
    }
}

void wrong_plan(struct world *w, struct trial *t)
{
    t->harm = MAX_WORKERS;
    senders_print(w, t);
    if (t->kind == REFIT_KIND_REHEARSAL || t->n_moves == 0 || !world_fault(w, 0.08))
        return;
    t->harm = t->moves[world_random(w, t->n_moves)].from;
    w->n_harmed++;
}

void wrong_land(struct trial *t, const struct move *m, uint32_t element, struct memory *at)
{
    if (t->harm == m->from)
        at->element[element] ^= 0x80000000U;
    if (at->element[element] != t->expected[element])
        at->wrong_of = t->attempt;
}

/* What a coordinator knew dies with it. */
static bool is_told(const struct world *w, const struct trial *t)
{
    return t->told_life != 0 && t->told_life == w->coordinator_life;
}

bool wrong_told(struct world *w, const struct memory *m)
{
    const struct trial *t = trial_find(w, m->wrong_of);
    return t != NULL && is_told(w, t);
}

static bool receives(const struct world *w, const struct trial *t, uint32_t worker)
{
    return t->role[worker] == REFIT_ROLE_RECEIVES && w->workers[worker].attached &&
           w->workers[worker].id == t->worker[worker];
}

static uint64_t wrong_elements(struct world *w, const struct trial *t, uint32_t worker)
{
    const struct memory *m = worker_receiving(&w->workers[worker]);
    uint64_t wrong = 0;
    for (uint32_t e = 0; e < w->n_elements; e++)
        if ((worker_owned(w, &w->workers[worker]) >> e & 1) != 0 && m->element[e] != t->sent[e])
            wrong |= UINT64_C(1) << e;
    return wrong;
}

/* Elements of which these nodes' sources have fingerprints. */
static uint64_t known_elements(const struct world *w, const struct trial *t, const bool nodes[])
{
    uint64_t known = 0;
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (t->role[i] == REFIT_ROLE_SENDS && nodes[w->workers[i].node])
            known |= worker_owned(w, &w->workers[i]);
    return known;
}

uint64_t wrong_seen(struct world *w, const struct trial *t, uint32_t node)
{
    bool here[MAX_NODES] = {false};
    here[node] = true;
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].node == node && receives(w, t, i) &&
            (wrong_elements(w, t, i) & known_elements(w, t, here)) != 0)
            return t->worker[i];
    return 0;
}

void wrong_note(struct world *w, struct trial *t, uint32_t node)
{
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].node == node && receives(w, t, i)) {
            t->wrong[i] = wrong_elements(w, t, i);
            worker_receiving(&w->workers[i])->vouched = true;
        }
}

/* --- the coordinator ---------------------------------------------------------------------------- */

struct list {
    uint64_t ids[MAX_WORKERS];
    uint32_t n;
};

static void list_add(struct list *l, uint64_t id)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (l->ids[i] == id)
            return;
    l->ids[l->n++] = id;
}

static bool sources_told(const struct world *w, const struct trial *t)
{
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (t->role[i] == REFIT_ROLE_SENDS && !t->told[w->workers[i].node])
            return false;
    return true;
}

/* Who is known to have wrong bytes by what has been reported. */
static void differing(struct world *w, const struct trial *t, struct list *l)
{
    uint64_t known = known_elements(w, t, t->told);
    for (uint32_t i = 0; i < w->n_workers; i++) {
        const struct memory *m = worker_receiving(&w->workers[i]);
        if (!t->staged[w->workers[i].node] || (t->wrong[i] & known) == 0)
            continue;
        list_add(l, t->worker[i]);
        if (m->wrong_of != t->attempt && w->workers[i].id == t->worker[i] && wrong_told(w, m))
            world_fail(w, "attempt %llu finds once more what attempt %llu has brought to worker %u",
                       ULL(t->attempt), ULL(m->wrong_of), i);
    }
}

/* Whose bytes have not been compared with the sources'. */
static void unproven_add(const struct world *w, const struct trial *t, struct list *l)
{
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (t->role[i] == REFIT_ROLE_RECEIVES && !t->held[i] &&
            !(sources_told(w, t) && t->staged[w->workers[i].node]))
            list_add(l, t->worker[i]);
}

static void tell(struct world *w, struct trial *t, uint32_t node, uint64_t worker,
                 const struct list *l)
{
    struct refit_event ev = {.type = REFIT_EV_FAILED,
                             .node = {.node = node,
                                      .attempt = t->attempt,
                                      .code = RS_EDATALOSS,
                                      .text = "what has landed differs",
                                      .worker = worker,
                                      .wrong = l->ids,
                                      .n_wrong = l->n}};
    t->told_life = w->coordinator_life;
    w->n_wrong += l->n;
    world_step(w, &ev);
}

static struct trial *in_flight(struct world *w, uint64_t attempt)
{
    return w->refit != NULL && refit_attempt(w->refit, attempt) != NULL ? trial_find(w, attempt)
                                                                        : NULL;
}

void wrong_known(struct world *w, struct refit_event *ev)
{
    struct trial *t = in_flight(w, ev->node.attempt);
    struct list l = {.n = 0};
    if (t == NULL || !ev->node.sources_known)
        return;
    t->told[ev->node.node] = true;
    differing(w, t, &l);
    ev->node.sources_known = !is_told(w, t) && l.n == 0;
    if (is_told(w, t) || l.n == 0)
        return;
    uint64_t first = l.ids[0];
    unproven_add(w, t, &l);
    tell(w, t, ev->node.node, first, &l);
}

bool wrong_staged(struct world *w, const struct refit_event *ev)
{
    struct trial *t = in_flight(w, ev->node.attempt);
    struct list l = {.n = 0};
    if (t == NULL)
        return true;
    t->staged[ev->node.node] = t->told[ev->node.node] = true;
    differing(w, t, &l);
    if (is_told(w, t))
        return false;
    if (l.n == 0)
        return true;
    uint64_t first = l.ids[0];
    unproven_add(w, t, &l);
    tell(w, t, ev->node.node, first, &l);
    return false;
}

bool wrong_failed(struct world *w, const struct refit_event *ev)
{
    struct trial *t = in_flight(w, ev->node.attempt);
    struct list l = {.n = 0};
    if (t == NULL || ev->node.code != RS_EDATALOSS)
        return true;
    unproven_add(w, t, &l);
    tell(w, t, ev->node.node, ev->node.worker, &l);
    return false;
}

void wrong_attached(struct world *w, struct refit_event *ev)
{
    struct worker *truth = world_worker(w, ev->attached.worker);
    const struct refit_worker *r = refit_find_worker(w->refit, ev->attached.worker);
    const struct refit_version *v = refit_find_version(w->refit, ev->attached.uncommitted);
    if (truth == NULL || v == NULL || v->phase.state != REFIT_COMMITTED ||
        (r != NULL && r->held == v->version && r->proven) ||
        memory_is_committed(w, truth, worker_receiving(truth)))
        return;
    ev->attached.uncommitted = ev->attached.uncommitted_content = 0;
    ev->attached.torn |= ev->attached.receive == REFIT_IN_PLACE;
}

/* --- the invariants ----------------------------------------------------------------------------- */

static bool is_content(const struct world *w, const struct worker *worker, const struct memory *m,
                       const uint32_t *expected)
{
    for (uint32_t e = 0; e < w->n_elements; e++)
        if ((worker_owned(w, worker) >> e & 1) != 0 && m->element[e] != expected[e])
            return false;
    return true;
}

/* What is believed to be proven is, by the element. */
static bool is_right(struct world *w, const struct worker *worker, const struct refit_worker *r,
                     const struct memory *m)
{
    const struct version_truth *v = world_version(w, r->held);
    for (uint32_t i = 0; i < v->n_contents; i++)
        if (v->contents[i].number == r->held_content)
            return is_content(w, worker, m, v->contents[i].expected);
    return true; /* of before this world began to look */
}

void check_wrong(struct world *w)
{
    for (uint32_t i = 0; i < w->n_workers; i++) {
        struct worker *truth = &w->workers[i];
        const struct refit_worker *r = refit_find_worker(w->refit, truth->id);
        const struct memory *m = worker_receiving(truth);
        if (!truth->attached || r == NULL || r->gone || r->layout->side != REFIT_DESTINATION ||
            r->held == 0 || m->version != r->held)
            continue;
        if (m->wrong_of != 0 && wrong_told(w, m))
            world_fail(w, "worker %u is believed, but attempt %llu has brought it wrong bytes", i,
                       ULL(m->wrong_of));
        if (r->proven && !is_right(w, truth, r, m))
            world_fail(w, "worker %u is taken for proven with version %llu, but holds other bytes",
                       i, ULL(r->held));
    }
}
