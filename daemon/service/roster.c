/* The workers of all nodes, as far as the decider does not know them: where they are, what they published. */
#include <string.h>

#include "base/mem.h"
#include "service/coordinator.h"

#include "base/banned.h"

struct roster_entry *roster_find(const struct decider *d, uint64_t worker)
{
    queue_foreach (q, &d->roster) {
        struct roster_entry *r = container_of(q, struct roster_entry, in);
        if (r->worker == worker)
            return r;
    }
    return NULL;
}

struct roster_entry *roster_add(struct decider *d, uint64_t worker)
{
    struct roster_entry *r = mem_zalloc(sizeof *r);
    if (r == NULL)
        return NULL;
    r->worker = worker;
    queue_push(&d->roster, &r->in);
    return r;
}

void roster_remove(struct roster_entry *r)
{
    queue_remove(&r->in);
    layout_entry_unref(r->layout);
    publication_unref(r->published);
    mem_free(r);
}

enum refit_role roster_role(const struct decider *d, const struct roster_entry *r)
{
    const struct refit_worker *w = refit_find_worker(d->refit, r->worker);
    return w != NULL && !w->gone ? refit_worker_role(d->refit, w) : REFIT_ROLE_NONE;
}

static uint64_t fold_of(const struct roster_entry *r, const struct memory_fold *folds, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (folds[i].rank == r->rank && memcmp(folds[i].layout, r->layout->layout->digest, 16) == 0)
            return folds[i].fold;
    return 0;
}

void roster_staged(struct decider *d, uint32_t node, const struct memory_fold *folds, uint32_t n)
{
    queue_foreach (q, &d->roster) {
        struct roster_entry *r = container_of(q, struct roster_entry, in);
        if (r->node != node || roster_role(d, r) != REFIT_ROLE_RECEIVES)
            continue;
        r->fold_version = d->run.version;
        r->fold = fold_of(r, folds, n);
    }
}

void roster_tell(struct decider *d)
{
    queue_foreach (q, &d->roster) {
        struct roster_entry *r = container_of(q, struct roster_entry, in);
        const struct refit_worker *w = refit_find_worker(d->refit, r->worker);
        if (w == NULL || (w->held == r->told_held && w->applied == r->told_applied &&
                          w->blamed == r->told_blamed))
            continue;
        struct node_order o = {.type = NODE_ORDER_WORKER,
                               .model = d->model,
                               .worker = r->worker,
                               .held = w->held,
                               .applied = w->applied,
                               .version = w->blamed,
                               .text = ""};
        r->told_held = w->held;
        r->told_applied = w->applied;
        r->told_blamed = w->blamed;
        (void)coordinator_order(d->coordinator, r->node,
                                &o); /* a node that is away is told when it is back */
    }
}
