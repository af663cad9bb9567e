/* The workers of all nodes, as far as the decider does not know them: where they are, what they published. */
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

bool roster_takes_part(const struct decider *d, const struct roster_entry *r)
{
    const struct refit_worker *w = refit_find_worker(d->refit, r->worker);
    return w != NULL && w->taking_part && !w->gone;
}

void roster_tell(struct decider *d)
{
    queue_foreach (q, &d->roster) {
        struct roster_entry *r = container_of(q, struct roster_entry, in);
        const struct refit_worker *w = refit_find_worker(d->refit, r->worker);
        if (w == NULL || (w->held == r->told_held && w->applied == r->told_applied))
            continue;
        struct node_order o = {.type = NODE_ORDER_WORKER,
                               .model = d->model,
                               .worker = r->worker,
                               .held = w->held,
                               .applied = w->applied,
                               .text = ""};
        r->told_held = w->held;
        r->told_applied = w->applied;
        (void)coordinator_order(d->coordinator, r->node,
                                &o); /* a node that is away is told when it is back */
    }
}
