/* Workers whose engine has let the memory of its weights go: a sleep mode. They keep their lease and hold nothing. */
#include <string.h>

#include "refit/private.h"

#include "base/banned.h"

/* What is not there any more. Its verdict on an attempt that is over stays. */
static void forget_memory(struct refit_worker *w)
{
    w->published = w->publication = w->published_ns = w->claimed = 0;
    w->released = false;
    worker_holds_nothing(w);
    w->applied = 0;
    w->blamed = w->blamed_in = 0;
    w->unsaid = w->torn = false;
    w->ready = 0;
}

void sleep_begin(struct step *s, struct refit_worker *w)
{
    if (w->asleep)
        return;
    w->asleep = true;
    workers_applying_ends(s, w, "the worker has gone to sleep");
    forget_memory(w);
    s->r->epoch_stale = true;
    attempt_worker_lost(s, w, "has gone to sleep");
}

void sleep_event(struct step *s)
{
    struct refit_worker *w = refit_find_worker(s->r, s->ev->left.worker);
    if (w == NULL || w->gone) {
        step_reply(s, s->ev->cookie, RS_ENOTFOUND, "no such worker");
        return;
    }
    sleep_begin(s, w);
    step_reply(s, s->ev->cookie, 0, "");
}

/* --- who is needed ------------------------------------------------------------------------------ */

/* The first of an instance's workers that sleeps; NULL: none does. */
static const struct refit_worker *sleeper_of(const struct refit_layout *l, uint32_t instance)
{
    const struct refit_instance *of = &l->instances[instance];
    for (uint32_t i = 0; i < of->n_ranks; i++) {
        const struct refit_worker *w = l->worker_of_rank[of->ranks[i]];
        if (w != NULL && !w->gone && w->asleep)
            return w;
    }
    return NULL;
}

static uint32_t least(const struct refit_policy *policies, uint32_t n, const struct refit_layout *l)
{
    for (uint32_t i = 0; i < n; i++)
        if (strcmp(policies[i].layout_name, l->name) == 0)
            return policies[i].min_instances;
    return l->n_instances;
}

/* The first sleeper of a layout; NULL: none. ret_awake: instances without one, whoever else they may lack. */
static const struct refit_worker *first_sleeper(const struct refit_layout *l, uint32_t *ret_awake)
{
    const struct refit_worker *first = NULL;
    uint32_t awake = 0;
    for (uint32_t i = 0; i < l->n_instances; i++) {
        const struct refit_worker *w = sleeper_of(l, i);
        first = first != NULL ? first : w;
        awake += w == NULL;
    }
    *ret_awake = awake;
    return first;
}

const char *sleep_forbids(struct step *s, const struct refit_policy *policies, uint32_t n_policies,
                          bool fed)
{
    const struct refit_worker *needed = NULL, *any = NULL;
    uint32_t n_awake = 0;
    foreach_layout (l, s->r) {
        uint32_t awake = 0;
        const struct refit_worker *w = l->wanted ? first_sleeper(l, &awake) : NULL;
        if (l->side == REFIT_SOURCE && w != NULL && !fed)
            return step_text(s, "%s is asleep, and its weights are needed: wake it up",
                             worker_name(s, w));
        if (l->side == REFIT_SOURCE)
            continue;
        n_awake += awake;
        any = any != NULL ? any : w;
        if (needed == NULL && awake < least(policies, n_policies, l))
            needed = w;
    }
    if (n_awake == 0)
        needed = any; /* all may be optional, but somebody must receive */
    return needed == NULL ? NULL
                          : step_text(s,
                                      "%s is asleep, and the policy needs its instance: wake it "
                                      "up, or submit with a policy that can do without",
                                      worker_name(s, needed));
}
