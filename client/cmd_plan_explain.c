/* A plan in words: where the parts of one tensor come from, by which hops, and why. */
#include "client/cmd_plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

/* The transfers of one tensor, by id, with their own copies of `after`. */
struct story {
    const struct plan_run *run;
    struct plan_transfer *all;
    size_t n, capacity;
};

static int keep(const struct plan_transfer *t, void *arg)
{
    struct story *s = arg;
    void *all = s->all;
    int r = mem_grow(&all, &s->capacity, s->n + 1, sizeof *s->all);
    if (r != 0)
        return r;
    s->all = all;
    uint64_t *after = mem_calloc(t->n_after, sizeof *after);
    if (after == NULL)
        return RS_ENOMEM;
    if (t->n_after > 0)
        memcpy(after, t->after, t->n_after * sizeof *after);
    s->all[s->n] = *t;
    s->all[s->n++].after = after;
    return 0;
}

static void story_close(struct story *s)
{
    for (size_t i = 0; i < s->n; i++)
        mem_free((void *)s->all[i].after);
    mem_free(s->all);
}

static int compare_id(const void *id, const void *transfer)
{
    uint64_t x = *(const uint64_t *)id, y = ((const struct plan_transfer *)transfer)->id;
    return (x > y) - (x < y);
}

static const struct plan_transfer *find(const struct story *s, uint64_t id)
{
    return bsearch(&id, s->all, s->n, sizeof *s->all, compare_id);
}

/* --- words --------------------------------------------------------------- */

/* "source rank 3 on n0:3", "rank 1 of 'rollout' on n1:1", "the staging memory of n1:2". */
static const char *end_text(const struct story *s, const struct plan_end *end, char *text,
                            size_t capacity)
{
    char device[600];
    (void)topology_device_text(&s->run->file->topology, end->device, device, sizeof device);
    if (end->side == SIDE_SOURCE)
        (void)snprintf(text, capacity, "source rank %" PRIu32 " on %s", end->rank, device);
    else if (end->side == SIDE_DESTINATION)
        (void)snprintf(text, capacity, "rank %" PRIu32 " of '%s' on %s", end->rank,
                       s->run->destinations[end->layout]->name, device);
    else
        (void)snprintf(text, capacity, "the staging memory of %s", device);
    return text;
}

static const char *domain_of(const struct story *s, uint32_t device)
{
    const struct topology *t = &s->run->file->topology;
    return t->domains[t->devices[device].domain];
}

static uint32_t domain_index(const struct story *s, uint32_t device)
{
    return s->run->file->topology.devices[device].domain;
}

/* Why a hop is as it is. */
static void say_why(const struct story *s, const struct plan_transfer *t)
{
    const char *domain = domain_of(s, t->to.device);
    if (t->strategy == PLAN_GATHER_BROADCAST) {
        (void)printf("gather-broadcast moves whole tensors along a chain of devices");
    } else if (t->tier == TIER_DEVICE) {
        (void)printf(
            "both lie on one device: a local copy, or nothing where the memory is the same");
    } else if (t->strategy == PLAN_DIRECT) {
        (void)printf("direct: each taker is sent its part by itself");
    } else if (t->tier == TIER_DOMAIN) {
        (void)printf(t->from.side == SIDE_SOURCE
                         ? "domain '%s' holds it already, so nothing crosses the network"
                         : "it entered domain '%s' once and is fanned out inside",
                     domain);
    } else {
        (void)printf("no device of domain '%s' holds it, so it enters the domain once, here",
                     domain);
        if (t->from.side == SIDE_DESTINATION)
            (void)printf(
                "; a relay: '%s' has been fed already, so the source need not send it again",
                domain_of(s, t->from.device));
        if (t->to.side == SIDE_STAGING)
            (void)printf("; this device does not need it but has room on its link");
    }
}

static void say_hop(const struct story *s, const struct plan_transfer *t, unsigned indent)
{
    char from[1200], to[1200], box[256], bytes[24];
    static const char *const tiers[] = {"on the device", "inside the domain", "over the network"};
    (void)printf("%*s%s (%s) from %s to %s, %s: ", (int)indent, "",
                 box_text(&t->box, box, sizeof box), cmd_bytes_text(t->bytes, bytes, sizeof bytes),
                 end_text(s, &t->from, from, sizeof from), end_text(s, &t->to, to, sizeof to),
                 tiers[t->tier]);
    say_why(s, t);
    (void)printf("\n");
}

enum { MAX_HOPS = 64 };

/* A hop, and below it the hops that brought the bytes to its sender. */
static void say_chain(const struct story *s, const struct plan_transfer *t, unsigned depth)
{
    say_hop(s, t, 2 + 4 * depth);
    if (t->n_after > 0 && depth < MAX_HOPS)
        (void)printf("%*safter\n", (int)(4 + 4 * depth), "");
    for (uint32_t i = 0; i < t->n_after && depth < MAX_HOPS; i++) {
        const struct plan_transfer *before = find(s, t->after[i]);
        if (before != NULL)
            say_chain(s, before, depth + 1);
    }
}

/* --- one rank ------------------------------------------------------------ */

static bool arrives_at(const struct plan_transfer *t, uint32_t layout, uint32_t rank)
{
    return t->to.side == SIDE_DESTINATION && t->to.layout == layout && t->to.rank == rank;
}

static void say_rank(const struct story *s, uint32_t layout, uint32_t tensor, uint32_t rank)
{
    const struct layout *l = s->run->destinations[layout];
    const struct tensor *t = &l->tensors[tensor];
    uint32_t n = layout_shards(l, tensor, rank, NULL, 0), domain = 0;
    int32_t device = s->run->destination_device[layout][rank];
    char text[1024], bytes[24];
    (void)printf("rank %" PRIu32 " of '%s'", rank, l->name);
    if (device != TOPOLOGY_NONE) {
        domain = domain_index(s, (uint32_t)device);
        (void)printf(
            " on %s (domain '%s')",
            topology_device_text(&s->run->file->topology, (uint32_t)device, text, sizeof text),
            s->run->file->topology.domains[domain]);
    }
    if (n == 0) {
        (void)printf(" holds no part of '%s'%s\n", t->name,
                     t->mesh >= 0 ? " (it is not in its mesh, or its piece is empty)" : "");
        return;
    }
    (void)printf(" holds %s of '%s':\n",
                 cmd_bytes_text(layout_shard_bytes(l, tensor, rank), bytes, sizeof bytes), t->name);
    for (size_t i = 0; i < s->n; i++)
        if (arrives_at(&s->all[i], layout, rank))
            say_chain(s, &s->all[i], 0);
}

static void say_layout(const struct story *s, uint32_t layout, const char *name, int64_t rank,
                       uint32_t *said)
{
    const struct layout *l = s->run->destinations[layout];
    int64_t tensor = layout_find(l, name);
    if (tensor < 0 || rank >= (int64_t)l->n_ranks)
        return;
    for (uint32_t r = 0; r < l->n_ranks; r++) {
        bool wanted =
            rank < 0 ? layout_shards(l, (uint32_t)tensor, r, NULL, 0) > 0 : r == (uint32_t)rank;
        if (!wanted)
            continue;
        if ((*said)++ > 0)
            (void)printf("\n");
        say_rank(s, layout, (uint32_t)tensor, r);
    }
}

int cmd_plan_explain(const struct plan_run *run, const char *tensor, int64_t rank, struct err *e)
{
    struct story s = {.run = run};
    int64_t index = layout_find(run->source, tensor);
    uint32_t said = 0;
    if (index < 0)
        return err_set(e, RS_ENOTFOUND, "source layout '%s' has no tensor '%s'", run->source->name,
                       tensor);
    int r = plan_transfers(run->plan, index, keep, &s);
    for (uint32_t i = 0; r == 0 && i < run->n_destinations; i++)
        say_layout(&s, i, tensor, rank, &said);
    story_close(&s);
    if (r != 0)
        return err_set(e, r, "out of memory");
    if (said == 0)
        return err_set(e, RS_ENOTFOUND, "no destination rank%s needs '%s'",
                       rank >= 0 ? " of that number" : "", tensor);
    return 0;
}
