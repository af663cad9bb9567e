/* Questions: how fit an instance is, what a phase waits for, how a worker stands. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "refit/private.h"

#include "base/banned.h"

enum { WHO_BYTES = 700 };

struct refit_worker *refit_find_worker(const struct refit *r, uint64_t worker)
{
    foreach_worker (w, r)
        if (w->id == worker)
            return w;
    return NULL;
}

struct refit_layout *refit_find_layout(const struct refit *r, enum refit_side side,
                                       const char *name)
{
    foreach_layout (l, r)
        if (l->side == side && strcmp(l->name, name) == 0)
            return l;
    return NULL;
}

const char *worker_name(struct step *s, const struct refit_worker *w)
{
    return step_text(s, "%.512s/rank %u", w->layout->name, w->rank);
}

const char *node_called(const struct refit *r, uint32_t node, char ret_number[NODE_NUMBER_BYTES])
{
    const struct refit_config *c = &r->config;
    const char *name = c->node_name != NULL ? c->node_name(c->node_name_arg, node) : NULL;
    if (name != NULL && name[0] != '\0')
        return name;
    (void)snprintf(ret_number, NODE_NUMBER_BYTES, "%u", node);
    return ret_number;
}

/* --- fitness --- */

/* A committed version in the shadow that is neither applied nor skipped: not to be written over. One of which its client
 * has not heard is nobody's to apply. */
static bool shadow_waits(const struct refit *r, const struct refit_version *v,
                         const struct refit_worker *w)
{
    return w->receive == REFIT_STAGED_RECEIVE && w->held != 0 && !w->unsaid &&
           w->held <= r->committed && w->held != v->version && w->applied < w->held &&
           w->skipped < w->held;
}

static const char *rank_absent(const struct refit_layout *l, uint32_t rank)
{
    return l->left_of_rank[rank] ? "has left for good, and nobody has attached in its place"
                                 : "has not attached";
}

/* NULL, or what this destination rank lacks; *ret_later: it is attached and will come round. */
static const char *rank_lacks(const struct refit *r, const struct refit_version *v,
                              const struct refit_layout *l, uint32_t rank, bool *ret_later)
{
    const struct refit_worker *w = l->worker_of_rank[rank];
    *ret_later = false;
    if (w == NULL)
        return rank_absent(l, rank);
    if (w->gone)
        return w->gone_reason[0] == '\0' ? "gone" : w->gone_reason;
    if (w->asleep)
        return "asleep: wake it up";
    const struct refit_node *n = refit_node(r, w->node);
    *ret_later = !n->expelled;
    if (n->expelled)
        return "its node is not in the cluster";
    if (n->silent)
        return "its node is silent";
    if (n->broken[0] != '\0') { /* nobody waits for that */
        *ret_later = false;
        return n->broken;
    }
    if (!n->up)
        return "its data plane is not ready";
    if (w->applying != 0)
        return "applying";
    if (shadow_waits(r, v, w))
        return "holds a committed version that is neither applied nor skipped";
    return NULL;
}

enum instance_fitness instance_fitness(const struct refit *r, const struct refit_version *v,
                                       const struct refit_layout *l, uint32_t instance)
{
    enum instance_fitness worst = INSTANCE_FIT;
    const struct refit_instance *of = &l->instances[instance];
    if (of->excluded)
        return INSTANCE_MISSING;
    for (uint32_t i = 0; i < of->n_ranks; i++) {
        bool later;
        if (rank_lacks(r, v, l, of->ranks[i], &later) == NULL)
            continue;
        if (!later)
            return INSTANCE_MISSING;
        worst = INSTANCE_LATER;
    }
    return worst;
}

/* --- what is missing --- */

struct walk {
    size_t n, max;
    missing_fn fn;
    void *arg;
};

__attribute__((format(printf, 2, 3))) static void missing(struct walk *k, const char *format, ...)
{
    if (k->n++ >= k->max || k->fn == NULL)
        return;
    char who[WHO_BYTES];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(who, sizeof who, format, args);
    va_end(args);
    k->fn(who, k->arg);
}

static const char *source_lacks(const struct refit *r, const struct refit_version *v,
                                const struct refit_layout *l, uint32_t rank)
{
    const struct refit_worker *w = l->worker_of_rank[rank];
    if (w == NULL)
        return rank_absent(l, rank);
    if (w->gone)
        return w->gone_reason[0] == '\0' ? "gone" : w->gone_reason;
    if (w->asleep)
        return "asleep: wake it up";
    if (w->published != v->version)
        return "has not published this version";
    if (w->released)
        return "was released and has not published this version again";
    const struct refit_node *n = refit_node(r, w->node);
    if (n->silent)
        return "its node is silent";
    if (n->broken[0] != '\0')
        return n->broken;
    return n->up ? NULL : "its data plane is not ready";
}

static void missing_sources(struct walk *k, const struct refit *r, const struct refit_version *v)
{
    bool any = false;
    foreach_layout (l, r) {
        if (l->side != REFIT_SOURCE || !l->wanted)
            continue;
        any = true;
        for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
            const char *lacks =
                l->instance_of_rank[rank] == UINT32_MAX ? NULL : source_lacks(r, v, l, rank);
            if (lacks != NULL)
                missing(k, "%.512s/rank %u (%s)", l->name, rank, lacks);
        }
    }
    if (!any)
        missing(k, "a trainer: no source worker has attached");
}

static void missing_ranks(struct walk *k, const struct refit *r, const struct refit_version *v,
                          const struct refit_layout *l)
{
    for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
        uint32_t instance = l->instance_of_rank[rank];
        if (instance == UINT32_MAX)
            continue;
        if (l->instances[instance].excluded) {
            missing(k, "%.512s/rank %u (left out: %s)", l->name, rank,
                    l->instances[instance].reason);
            continue;
        }
        bool later;
        const char *lacks = rank_lacks(r, v, l, rank, &later);
        if (lacks != NULL)
            missing(k, "%.512s/rank %u (%s)", l->name, rank, lacks);
    }
}

static void missing_destinations(struct walk *k, const struct refit *r,
                                 const struct refit_version *v)
{
    bool any = false;
    foreach_layout (l, r) {
        if (l->side != REFIT_DESTINATION || !l->wanted)
            continue;
        any = true;
        missing_ranks(k, r, v, l);
    }
    if (!any)
        missing(k, "an inference worker: none has attached");
}

/* First, for a misspelt one is waited for in vain: it must not drown in ranks that will come. */
static void missing_policy_layouts(struct walk *k, const struct refit *r,
                                   const struct refit_version *v)
{
    for (uint32_t i = 0; i < v->n_policies; i++) {
        const struct refit_layout *l =
            refit_find_layout(r, REFIT_DESTINATION, v->policies[i].layout_name);
        if (v->policies[i].min_instances > 0 && (l == NULL || !l->wanted))
            missing(k, "layout '%.512s', which the policy names and no worker has",
                    v->policies[i].layout_name);
    }
}

/* Those of whose workers nothing is known: they would be missed by their ranks. */
static void missing_broken_nodes(struct walk *k, const struct refit *r)
{
    for (size_t i = 0; i < r->n_nodes; i++) {
        bool known = r->nodes[i].broken[0] == '\0';
        foreach_worker (w, r)
            known |= w->node == r->nodes[i].node && !w->gone;
        if (!known)
            missing(k, "node %.64s (%s)", NODE_NAME(r, r->nodes[i].node), r->nodes[i].broken);
    }
}

static void missing_nodes(struct walk *k, const struct refit *r, bool (*waits)(int part))
{
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].taking_part && waits(r->nodes[i].part))
            missing(k, "node %s", NODE_NAME(r, r->nodes[i].node));
}

static bool not_prepared(int part)
{
    return part != REFIT_NODE_PREPARED;
}
static bool not_staged(int part)
{
    return part != REFIT_NODE_STAGED;
}
static bool not_quiesced(int part)
{
    return part == REFIT_NODE_ABORTING;
}

static void missing_words_of_workers(struct walk *k, const struct refit *r,
                                     const struct refit_version *v)
{
    foreach_worker (w, r) {
        if (!w->taking_part || !worker_accepts(w))
            continue;
        if (v->phase.state == REFIT_PREPARED && w->receive == REFIT_IN_PLACE &&
            w->ready != v->version)
            missing(k, "%.512s/rank %u (Ready)", w->layout->name, w->rank);
        if (v->phase.state == REFIT_ACCEPTING && w->verdict == REFIT_WORKER_NO_VERDICT)
            missing(k, "%.512s/rank %u (Accept)", w->layout->name, w->rank);
    }
}

static void missing_in_flight(struct walk *k, const struct refit *r, const struct refit_version *v)
{
    switch (v->phase.state) {
    case REFIT_SUBMITTED:
        if (r->planning)
            missing(k, "the plan");
        else if (!r->begun || r->epoch_writing)
            missing(k, "the ledger");
        else if (!nodes_settled(r))
            missing(k, "nodes that may still move bytes for the coordinator before this one");
        else if (v->kind != REFIT_KIND_CATCH_UP) {
            missing_policy_layouts(k, r, v);
            missing_sources(k, r, v);
            missing_destinations(k, r, v);
            missing_broken_nodes(k, r);
        }
        break;
    case REFIT_PLANNED:
        missing_nodes(k, r, not_prepared);
        break;
    case REFIT_TRANSFERRING:
        missing_nodes(k, r, not_staged);
        break;
    case REFIT_ABORTING:
        missing_nodes(k, r, not_quiesced);
        if (v->ending != REFIT_NONE)
            missing(k, "the ledger");
        break;
    default:
        if (r->committing)
            missing(k, "the ledger");
        else
            missing_words_of_workers(k, r, v);
    }
}

size_t missing_walk(const struct refit *r, const struct refit_version *v, size_t max, missing_fn fn,
                    void *arg)
{
    struct walk k = {0, max, fn, arg};
    if (v == r->in_flight)
        missing_in_flight(&k, r, v);
    else if (!refit_phase_final(v->phase.state) && !v->durable)
        missing(&k, "the ledger");
    else if (v == r->queued && r->in_flight != NULL)
        missing(&k, "version %llu, which is in flight", (unsigned long long)r->in_flight->version);
    return k.n;
}

size_t refit_waiting_for(const struct refit *r, const struct refit_version *v, size_t max,
                         void (*fn)(const char *who, void *arg), void *arg)
{
    return missing_walk(r, v, max, fn, arg);
}

/* --- in vain --- */

/* The worker of this rank is there, but its node's data plane does not start. */
static bool on_broken_node(const struct refit *r, const struct refit_worker *w)
{
    return w != NULL && !w->gone && refit_node(r, w->node)->broken[0] != '\0';
}

/* The first of an instance's; NULL: none. */
static const struct refit_worker *broken_of(const struct refit *r, const struct refit_layout *l,
                                            uint32_t instance)
{
    const struct refit_instance *of = &l->instances[instance];
    for (uint32_t i = 0; i < of->n_ranks; i++)
        if (on_broken_node(r, l->worker_of_rank[of->ranks[i]]))
            return l->worker_of_rank[of->ranks[i]];
    return NULL;
}

/* Without which the policy can't hold, whoever else may still come; NULL: it can. */
static const struct refit_worker *broken_receiver(const struct refit *r,
                                                  const struct refit_version *v)
{
    const struct refit_worker *first = NULL;
    uint32_t total = 0;
    foreach_layout (l, r) {
        if (l->side != REFIT_DESTINATION || !l->wanted)
            continue;
        const struct refit_worker *broken = NULL;
        uint32_t left = 0;
        for (uint32_t i = 0; i < l->n_instances; i++) {
            const struct refit_worker *w = broken_of(r, l, i);
            broken = broken == NULL ? w : broken;
            left += w == NULL && !l->instances[i].excluded;
        }
        if (broken != NULL && left < version_min_instances(v, l))
            return broken;
        first = first == NULL ? broken : first;
        total += left;
    }
    return total == 0 ? first : NULL;
}

static const struct refit_worker *broken_source(const struct refit *r)
{
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++)
            if (l->side == REFIT_SOURCE && l->wanted && broken_of(r, l, i) != NULL)
                return broken_of(r, l, i);
    return NULL;
}

/* Whoever would come, there is no node for it. */
static const char *none_works(struct step *s)
{
    const struct refit *r = s->r;
    const struct refit_node *n = NULL;
    size_t n_broken = 0;
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].broken[0] != '\0') {
            n = &r->nodes[i];
            n_broken++;
        }
    if (n == NULL || n_broken < r->n_nodes || n_broken < r->config.n_nodes)
        return NULL;
    return step_text(s, "node %.64s can't take part: %.600s; mend that", NODE_NAME(r, n->node),
                     n->broken);
}

const char *gather_in_vain(struct step *s, const struct refit_version *v)
{
    const struct refit *r = s->r;
    const struct refit_worker *w = r->feed_layout == NULL ? broken_source(r) : NULL;
    if (w == NULL)
        w = broken_receiver(r, v);
    if (w == NULL)
        return none_works(s);
    return step_text(s, "node %.64s, which has %s, can't take part: %.600s; mend that, or drain it",
                     NODE_NAME(r, w->node), worker_name(s, w), refit_node(r, w->node)->broken);
}

struct joined {
    char text[ERR_TEXT_BYTES];
    size_t at;
};

static void join(const char *who, void *arg)
{
    struct joined *j = arg;
    if (j->at >= sizeof j->text)
        return;
    int n = snprintf(j->text + j->at, sizeof j->text - j->at, "%s%s", j->at == 0 ? "" : ", ", who);
    j->at += n < 0 ? 0 : (size_t)n;
}

const char *missing_text(struct step *s, const struct refit_version *v)
{
    enum { NAMED = 8 };
    struct joined j = {.at = 0};
    j.text[0] = '\0';
    size_t n = missing_walk(s->r, v, NAMED, join, &j);
    if (n <= NAMED)
        return step_text(s, "%s", j.text);
    return step_text(s, "%.900s and %zu more", j.text, n - NAMED);
}

/* --- states --- */

const char *refit_worker_state_name(int state)
{
    static const char *const names[] = {"empty",       "current", "stale", "torn",
                                        "uncommitted", "gone",    "asleep"};
    return state >= 0 && state <= REFIT_WORKER_ASLEEP ? names[state] : "unknown";
}

enum refit_worker_state refit_worker_state(const struct refit *r, const struct refit_worker *w)
{
    if (w->gone)
        return REFIT_WORKER_GONE;
    if (w->asleep)
        return REFIT_WORKER_ASLEEP;
    if (w->torn)
        return REFIT_WORKER_TORN;
    if (w->receive == REFIT_IN_PLACE && w->held != 0 && w->applied != w->held)
        return REFIT_WORKER_UNCOMMITTED;
    if (w->applied == 0)
        return REFIT_WORKER_EMPTY;
    return w->applied == r->committed ? REFIT_WORKER_CURRENT : REFIT_WORKER_STALE;
}

const char *refit_worker_doing(const struct refit *r, const struct refit_worker *w)
{
    const struct refit_version *v = r->in_flight;
    if (w->asleep && w->taking_part && v != NULL && !w->gone)
        return "letting go when the version is decided";
    if (w->gone || w->asleep)
        return "";
    if (w->applying != 0)
        return "applying";
    if (v == NULL)
        return "";
    if (w->layout->side == REFIT_SOURCE) {
        bool asked = w->asked_publish && v->phase.state == REFIT_SUBMITTED;
        if (asked && (w->published != v->version || w->released))
            return "waiting for Publish";
        return w->taking_part && v->phase.state == REFIT_TRANSFERRING ? "sending" : "";
    }
    if (v->phase.state == REFIT_SUBMITTED && shadow_waits(r, v, w))
        return "waiting for Apply";
    if (!w->taking_part)
        return "";
    if (w->feeding != REFIT_FEED_NONE && v->phase.state == REFIT_TRANSFERRING)
        return "feeding";
    if (!worker_accepts(w))
        return "";
    if (v->phase.state == REFIT_PREPARED && w->receive == REFIT_IN_PLACE && w->ready != v->version)
        return "waiting for Ready";
    if (v->phase.state == REFIT_TRANSFERRING)
        return "receiving";
    if (v->phase.state == REFIT_ACCEPTING && w->verdict == REFIT_WORKER_NO_VERDICT)
        return "waiting for Accept";
    return "";
}

const struct refit_version *refit_attempt(const struct refit *r, uint64_t attempt)
{
    return r->in_flight != NULL && attempt != 0 && r->in_flight->attempt == attempt ? r->in_flight
                                                                                    : NULL;
}

enum refit_role refit_worker_role(const struct refit *r, const struct refit_worker *w)
{
    if (r->in_flight == NULL || !w->taking_part || !refit_node(r, w->node)->taking_part)
        return REFIT_ROLE_NONE;
    return w->layout->side == REFIT_SOURCE || w->feeding != REFIT_FEED_NONE ? REFIT_ROLE_SENDS
                                                                            : REFIT_ROLE_RECEIVES;
}

bool refit_ledger_behind(const struct refit *r)
{
    return r->known_committed > r->committed;
}

bool refit_worker_busy(const struct refit *r, const struct refit_worker *w)
{
    if (w->applying != 0)
        return true;
    if (!w->taking_part || r->in_flight == NULL)
        return false;
    int phase = r->in_flight->phase.state;
    if (phase == REFIT_ABORTING)
        return refit_node(r, w->node)->part == REFIT_NODE_ABORTING;
    return phase >= REFIT_PLANNED && phase < REFIT_STAGED;
}

/* Which of two states is worse to serve from: gone, asleep, torn, uncommitted, empty, stale, current. */
static int badness(enum refit_worker_state state)
{
    static const int of[] = {
        [REFIT_WORKER_CURRENT] = 0,     [REFIT_WORKER_STALE] = 1, [REFIT_WORKER_EMPTY] = 2,
        [REFIT_WORKER_UNCOMMITTED] = 3, [REFIT_WORKER_TORN] = 4,  [REFIT_WORKER_ASLEEP] = 5,
        [REFIT_WORKER_GONE] = 6};
    return of[state];
}

enum refit_worker_state refit_instance_state(const struct refit *r, const struct refit_layout *l,
                                             uint32_t instance, uint64_t *ret_applied)
{
    enum refit_worker_state worst = REFIT_WORKER_CURRENT;
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < l->instances[instance].n_ranks; i++) {
        const struct refit_worker *w = l->worker_of_rank[l->instances[instance].ranks[i]];
        enum refit_worker_state state = w == NULL ? REFIT_WORKER_GONE : refit_worker_state(r, w);
        uint64_t applied = w == NULL || w->gone ? 0 : w->applied;
        worst = badness(state) > badness(worst) ? state : worst;
        least = applied < least ? applied : least;
    }
    *ret_applied = least == UINT64_MAX ? 0 : least;
    return worst;
}

struct refit_bytes refit_version_bytes(const struct refit *r, const struct refit_version *v)
{
    struct refit_bytes sum = v->bytes;
    if (v != r->in_flight)
        return sum;
    for (size_t i = 0; i < r->n_nodes; i++) {
        const struct refit_bytes *b = &r->nodes[i].bytes;
        sum.landed += b->landed;
        sum.network += b->network;
        sum.domain += b->domain;
        sum.device += b->device;
        sum.skipped += b->skipped;
    }
    return sum;
}
