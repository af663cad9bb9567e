/* Random inputs for the planner, and the stream of a plan's transfers kept in memory. For tests
 * that judge plans on their own, without plan_check. */
#ifndef RS_TEST_PLAN_CASES_H
#define RS_TEST_PLAN_CASES_H

#include "base/mem.h"
#include "plan/planner.h"
#include "test/lib/layouts.h"

enum { CASE_MAX_LAYOUTS = 3 };

struct plan_case {
    struct layout *source;
    struct layout *destinations[CASE_MAX_LAYOUTS];
    uint32_t n_destinations;
    struct topology topology;
    int32_t *source_device;
    int32_t *destination_device[CASE_MAX_LAYOUTS];
    struct plan_rule rules[2];
    struct plan_input input;
};

/* Nodes of the sizes given; domain_of[node] is the number of its domain. */
static inline void case_topology(struct topology *t, uint32_t n_nodes, const uint32_t *sizes,
                                 const uint32_t *domain_of)
{
    *t = (struct topology){.n_nodes = n_nodes};
    t->nodes = mem_calloc(n_nodes, sizeof *t->nodes);
    t->domains = mem_calloc(n_nodes, sizeof *t->domains);
    for (uint32_t i = 0; i < n_nodes; i++) {
        t->nodes[i] = mem_printf("n%u", i);
        t->n_devices += sizes[i];
        if (domain_of[i] == t->n_domains)
            t->domains[t->n_domains++] = mem_printf("d%u", i);
    }
    t->devices = mem_calloc(t->n_devices, sizeof *t->devices);
    for (uint32_t i = 0, d = 0; i < n_nodes; i++)
        for (uint32_t k = 0; k < sizes[i]; k++)
            t->devices[d++] = (struct device_place){i, k, domain_of[i]};
    t->network_bytes_per_s = 1e9;
    t->domain_bytes_per_s = 8e9;
}

static inline void case_random_topology(struct topology *t, uint64_t *seed)
{
    uint32_t n = 1 + layouts_below(seed, 6), sizes[6], domain_of[6], n_domains = 0;
    for (uint32_t i = 0; i < n; i++) {
        sizes[i] = 1 + layouts_below(seed, 4);
        domain_of[i] = n_domains > 0 && layouts_below(seed, 3) == 0 ? layouts_below(seed, n_domains)
                                                                    : n_domains++;
    }
    case_topology(t, n, sizes, domain_of);
}

/* Each rank on a device of its own; now and then one shares the device of the rank before. */
static inline int32_t *case_random_devices(const struct topology *t, uint32_t n_ranks,
                                           uint64_t *seed)
{
    int32_t *device = calloc(n_ranks, sizeof *device);
    uint32_t *all = calloc(t->n_devices, sizeof *all);
    for (uint32_t i = 0; i < t->n_devices; i++)
        all[i] = i;
    for (uint32_t r = 0; r < n_ranks; r++) {
        uint32_t k = r + layouts_below(seed, t->n_devices - r), swap = all[r];
        all[r] = all[k];
        all[k] = swap;
        bool shares = r > 0 && layouts_below(seed, 12) == 0;
        device[r] = shares ? device[r - 1] : (int32_t)all[r];
    }
    free(all);
    return device;
}

static inline void case_close(struct plan_case *c)
{
    layout_free(c->source);
    free(c->source_device);
    for (uint32_t i = 0; i < c->n_destinations; i++) {
        layout_free(c->destinations[i]);
        free(c->destination_device[i]);
    }
    topology_close(&c->topology);
}

/* Fills c->input from the rest; options as they stand in it. */
static inline void case_finish(struct plan_case *c)
{
    c->input.source = c->source;
    c->input.source_device = c->source_device;
    c->input.n_destinations = c->n_destinations;
    c->input.destinations = (const struct layout *const *)c->destinations;
    c->input.destination_device = (const int32_t *const *)c->destination_device;
    c->input.topology = &c->topology;
}

static inline void case_random_options(struct plan_case *c, uint64_t *seed)
{
    struct plan_options *o = &c->input.options;
    *o = plan_options_default();
    o->strategy = (enum plan_strategy)layouts_below(seed, 3);
    if (layouts_below(seed, 2) == 0)
        o->strategy = PLAN_RESHARD;
    if (layouts_below(seed, 4) == 0) {
        c->rules[0] = (struct plan_rule){"t1*", (enum plan_strategy)layouts_below(seed, 3)};
        c->rules[1] = (struct plan_rule){"*", (enum plan_strategy)layouts_below(seed, 3)};
        o->rules = c->rules;
        o->n_rules = 1 + layouts_below(seed, 2);
    }
    o->relay = layouts_below(seed, 4) != 0;
    o->staging_ingest = layouts_below(seed, 4) != 0;
    o->ring_slots = 1 + layouts_below(seed, 3);
    o->least_piece_bytes = 16U << layouts_below(seed, 8);
    o->chunk_bytes = 16U << layouts_below(seed, 10);
}

/* Casts some float32 tensors of a destination layout to bfloat16. */
static inline void case_random_casts(struct layout *l, uint64_t *seed)
{
    for (uint32_t i = 0; i < l->n_tensors; i++)
        if (layouts_below(seed, 4) == 0) {
            l->tensors[i].cast = true;
            l->tensors[i].dtype = DTYPE_BFLOAT16;
        }
    ck_assert_int_eq(layout_digest(l), 0);
}

static inline uint32_t case_ranks(const struct topology *t, uint64_t *seed)
{
    uint32_t most = t->n_devices < 8 ? t->n_devices : 8;
    return 1 + layouts_below(seed, most);
}

static inline void case_random(struct plan_case *c, uint64_t *seed)
{
    *c = (struct plan_case){.n_destinations = 1 + layouts_below(seed, CASE_MAX_LAYOUTS)};
    case_random_topology(&c->topology, seed);
    c->source = layouts_random(seed, "source", case_ranks(&c->topology, seed),
                               1 + layouts_below(seed, 5), NULL);
    c->source_device = case_random_devices(&c->topology, c->source->n_ranks, seed);
    for (uint32_t i = 0; i < c->n_destinations; i++) {
        char name[8];
        (void)snprintf(name, sizeof name, "d%u", i);
        c->destinations[i] =
            layouts_random(seed, name, case_ranks(&c->topology, seed),
                           1 + layouts_below(seed, c->source->n_tensors), c->source);
        case_random_casts(c->destinations[i], seed);
        c->destination_device[i] =
            case_random_devices(&c->topology, c->destinations[i]->n_ranks, seed);
    }
    case_random_options(c, seed);
    case_finish(c);
}

/* --- the stream ---------------------------------------------------------- */

struct stream {
    struct plan_transfer *all; /* each with its own copy of `after` */
    size_t n, capacity;
};

static inline int stream_keep(const struct plan_transfer *t, void *arg)
{
    struct stream *s = arg;
    if (s->n == s->capacity) {
        s->capacity = s->capacity == 0 ? 64 : 2 * s->capacity;
        s->all = realloc(s->all, s->capacity * sizeof *s->all);
    }
    uint64_t *after = calloc(t->n_after + 1U, sizeof *after);
    if (t->n_after > 0)
        memcpy(after, t->after, t->n_after * sizeof *after);
    s->all[s->n] = *t;
    s->all[s->n++].after = after;
    return 0;
}

static inline void stream_read(struct stream *s, const struct plan *p)
{
    *s = (struct stream){0};
    ck_assert_int_eq(plan_transfers(p, -1, stream_keep, s), 0);
}

static inline void stream_close(struct stream *s)
{
    for (size_t i = 0; i < s->n; i++)
        free((void *)s->all[i].after);
    free(s->all);
}

static inline struct plan *case_plan(struct plan_case *c)
{
    struct plan *p;
    struct err e = {0};
    int r = plan_make(&c->input, &p, &e);
    ck_assert_msg(r == 0, "%s: %s", err_name(r), e.text);
    return p;
}

#endif
