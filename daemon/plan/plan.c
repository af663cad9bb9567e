#include "plan/plan.h"

#include <string.h>

#include "plan/plan_private.h"

#include "base/banned.h"

static const char *const STRATEGIES[] = {[PLAN_RESHARD] = "reshard",
                                         [PLAN_DIRECT] = "direct",
                                         [PLAN_GATHER_BROADCAST] = "gather-broadcast"};

const char *plan_strategy_name(enum plan_strategy s)
{
    return STRATEGIES[s];
}

int plan_strategy_parse(const char *name, enum plan_strategy *ret)
{
    for (unsigned i = 0; i < sizeof STRATEGIES / sizeof STRATEGIES[0]; i++)
        if (strcmp(name, STRATEGIES[i]) == 0) {
            *ret = (enum plan_strategy)i;
            return 0;
        }
    return RS_EINVAL;
}

struct plan_options plan_options_default(void)
{
    return (struct plan_options){.strategy = PLAN_RESHARD,
                                 .relay = true,
                                 .staging_ingest = true,
                                 .least_piece_bytes = 256 * 1024,
                                 .chunk_bytes = 8 * 1024 * 1024,
                                 .ring_slots = 8};
}

void plan_free(struct plan *p)
{
    if (p == NULL)
        return;
    for (uint32_t i = 0; p->options.rules != NULL && i < p->options.n_rules; i++)
        mem_free((char *)(uintptr_t)p->options.rules[i].glob);
    mem_free((void *)(uintptr_t)p->options.rules);
    mem_free(p->destinations);
    mem_free(p->device_site);
    mem_free(p->egress);
    mem_free(p->ingress);
    mem_free(p->ends.at);
    mem_free(p->sets.at);
    mem_free(p->structures.at);
    mem_free(p->boxes.at);
    mem_free(p->classes.at);
    mem_free(p->shapes.at);
    mem_free(p->class_shapes.at);
    mem_free(p->cuts.at);
    mem_free(p->pieces.at);
    mem_free(p->units.at);
    mem_free(p->members.at);
    mem_free(p->groups.at);
    mem_free(p->runs.at);
    mem_free(p->batches.at);
    mem_free(p->batch_runs.at);
    mem_free(p->bundles.at);
    mem_free(p->edges.at);
    mem_free(p->leg_edges.at);
    mem_free(p->legs.at);
    mem_free(p->streams.at);
    mem_free(p->casts.at);
    mem_free(p->chain.at);
    mem_free(p->derived.at);
    mem_free(p->derived_of.at);
    mem_free(p);
}

const struct plan_totals *plan_totals(const struct plan *p)
{
    return &p->totals;
}

const struct plan_options *plan_options(const struct plan *p)
{
    return &p->options;
}

uint64_t plan_device_egress(const struct plan *p, uint32_t device)
{
    return p->egress[device];
}

uint64_t plan_device_ingress(const struct plan *p, uint32_t device)
{
    return p->ingress[device];
}
