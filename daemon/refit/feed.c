/* Who feeds whom where the trainer can't: destination workers that hold a version whole.
 *
 * An instance is whole by itself (its ranks serve together), so whoever feeds is a set of instances of
 * one layout of which every rank holds the content, proven. That layout is the plan's source side: what its workers hold is
 * what the receivers are compared with, so wrong bytes among it would be committed.
 *
 * One, though replicas of another layout hold the version, too. A plan has one source layout: ranks, dtypes
 * and cuts of a source are that layout's in the planner's input and digest, in its geometry (once per shape,
 * mesh and placements), in the program's places and in who is blamed. A second one would add bandwidth, which
 * a newcomer is rarely short of: its own links take what one instance sends. And no newcomer waits for it:
 * where a layout has not the dtypes (feed_refused) or its workers hold something else (they are blamed), the
 * next attempt is fed by another. */
#include "refit/private.h"

#include "base/banned.h"

static bool same_content(const struct refit *r, const struct refit_version *v,
                         const struct refit_worker *w)
{
    if (v->version <= r->committed)
        return true; /* of a committed version there is one content, and what is told as held was verified */
    return v->publication != 0 && w->held_content == v->publication;
}

enum refit_feed feed_holds(const struct refit *r, const struct refit_version *v,
                           const struct refit_worker *w)
{
    if (w == NULL || w->gone || w->applying != 0 || !node_usable(r, w->node))
        return REFIT_FEED_NONE;
    bool torn = w->receive == REFIT_IN_PLACE && w->torn;
    if (w->held == v->version && w->proven && !torn && same_content(r, v, w))
        return REFIT_FEED_RECEIVING;
    if (v->version <= r->committed && w->applied == v->version && !w->torn)
        return REFIT_FEED_LIVE;
    return REFIT_FEED_NONE;
}

/* A retry is fed by those that take part themselves; a newcomer by anybody. */
static bool instance_feeds(const struct refit *r, const struct refit_version *v,
                           const struct refit_layout *l, uint32_t index)
{
    const struct refit_instance *instance = &l->instances[index];
    if (instance->n_ranks == 0)
        return false;
    for (uint32_t i = 0; i < instance->n_ranks; i++)
        if (feed_holds(r, v, l->worker_of_rank[instance->ranks[i]]) == REFIT_FEED_NONE)
            return false;
    return v->version <= r->committed || instance_fitness(r, v, l, index) == INSTANCE_FIT;
}

static uint32_t count_feeding(const struct refit *r, const struct refit_version *v,
                              const struct refit_layout *l)
{
    uint32_t n = 0;
    if (l->side != REFIT_DESTINATION || l->feed_refused == v->version)
        return 0;
    for (uint32_t i = 0; i < l->n_instances; i++)
        n += instance_feeds(r, v, l, i);
    return n;
}

struct refit_layout *feed_find(const struct refit *r, const struct refit_version *v,
                               struct refit_layout *prefer)
{
    struct refit_layout *best = NULL;
    uint32_t most = 0;
    if (!r->config.feed || (v->kind == REFIT_KIND_REFIT && v->publication == 0))
        return NULL;
    if (prefer != NULL && count_feeding(r, v, prefer) > 0)
        return prefer;
    foreach_layout (l, r) {
        uint32_t n = count_feeding(r, v, l);
        if (n > most) {
            most = n;
            best = l;
        }
    }
    return best;
}

void feed_choose(struct refit *r, const struct refit_version *v, struct refit_layout *l)
{
    for (uint32_t i = 0; i < l->n_instances; i++) {
        if (!instance_feeds(r, v, l, i))
            continue;
        for (uint32_t k = 0; k < l->instances[i].n_ranks; k++) {
            struct refit_worker *w = l->worker_of_rank[l->instances[i].ranks[k]];
            w->feeding = feed_holds(r, v, w);
            attempt_take_part(r, w);
        }
    }
}

bool feed_nothing(const struct refit *r)
{
    if (r->feed_layout == NULL)
        return false;
    foreach_worker (w, r)
        if (w->taking_part && worker_accepts(w) && w->feeding == REFIT_FEED_NONE &&
            !(refit_holds_already(r, w) && w->proven))
            return false;
    return true;
}
