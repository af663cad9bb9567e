/* Random small plan inputs from a seed: meshes and orders of all kinds, regions, casts, several
 * destinations, overlapping roles, domains that are nodes, span nodes or divide a node. */
#ifndef RS_TEST_PLAN_RANDOM_H
#define RS_TEST_PLAN_RANDOM_H

#include "test/lib/plan_zoo.h"

static inline uint32_t dice(uint64_t *seed, uint32_t n)
{
    *seed = *seed * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(*seed >> 33) % n;
}

/* A mesh over some of the ranks, shuffled; 1 to 3 dims. */
static inline int32_t random_mesh(uint64_t *seed, struct layout *l)
{
    uint32_t shape[3], ranks[64], n = 1, n_dims = 1 + dice(seed, 3);
    for (uint32_t i = 0; i < n_dims; i++) {
        shape[i] = 1 + dice(seed, 4);
        while (n * shape[i] > l->n_ranks)
            shape[i] = 1;
        n *= shape[i];
    }
    for (uint32_t i = 0; i < l->n_ranks; i++)
        ranks[i] = i;
    for (uint32_t i = l->n_ranks - 1; i > 0; i--) {
        uint32_t k = dice(seed, i + 1), r = ranks[i];
        ranks[i] = ranks[k];
        ranks[k] = r;
    }
    return case_mesh(l, (uint8_t)n_dims, shape, ranks, 0, 0);
}

static inline void random_placement(uint64_t *seed, const struct mesh *m, struct tensor *t)
{
    for (uint8_t i = 0; i < m->n_dims; i++) {
        uint32_t d = dice(seed, t->n_dims + 1U);
        t->placements[i] = d == t->n_dims ? LAYOUT_REPLICATE : (int8_t)d;
    }
    for (uint8_t i = m->n_dims; i-- > 1;) {
        uint8_t k = (uint8_t)dice(seed, i + 1U), o = t->shard_order[i];
        t->shard_order[i] = t->shard_order[k];
        t->shard_order[k] = o;
    }
}

/* Cuts dim 0 into pieces of random length, each held by one or two ranks. */
static inline void random_regions(uint64_t *seed, const struct layout *l, struct tensor *t)
{
    uint64_t offset[BOX_MAX_DIMS] = {0}, size[BOX_MAX_DIMS];
    memcpy(size, t->shape, sizeof size);
    for (uint64_t at = 0; at < t->shape[0]; at += size[0]) {
        offset[0] = at;
        size[0] = 1 + dice(seed, (uint32_t)(t->shape[0] - at));
        uint32_t rank = dice(seed, l->n_ranks), other = dice(seed, l->n_ranks);
        case_region(t, rank, offset, size);
        if (other != rank)
            case_region(t, other, offset, size);
    }
}

static inline void random_side(uint64_t *seed, struct layout *l, struct tensor *t)
{
    if (t->n_dims > 0 && t->shape[0] > 0 && dice(seed, 6) == 0) {
        random_regions(seed, l, t);
        return;
    }
    t->mesh = (int32_t)dice(seed, l->n_meshes);
    random_placement(seed, &l->meshes[t->mesh], t);
}

static inline void random_tensors(uint64_t *seed, struct zoo_case *c, uint32_t n_destinations)
{
    static const enum dtype dtypes[] = {DTYPE_FLOAT32, DTYPE_BFLOAT16, DTYPE_INT8, DTYPE_FLOAT64};
    uint32_t n = 1 + dice(seed, 6);
    for (uint32_t i = 0; i < n; i++) {
        char name[16];
        uint64_t shape[BOX_MAX_DIMS] = {0};
        uint8_t n_dims = (uint8_t)dice(seed, 5);
        for (uint8_t d = 0; d < n_dims; d++)
            shape[d] = dice(seed, 20) == 0 ? 0 : 1 + dice(seed, 13);
        enum dtype dtype = dtypes[dice(seed, 4)];
        snprintf(name, sizeof name, "t%u", dice(seed, 2) * 100 + i);
        random_side(seed, c->source, case_tensor(c->source, name, dtype, n_dims, shape, 0, NULL));
        for (uint32_t k = 0; k < n_destinations; k++) {
            if (n_destinations > 1 && dice(seed, 4) == 0)
                continue;
            enum dtype wire = dtype;
            if (dtype == DTYPE_FLOAT32 && dice(seed, 2) == 0)
                wire = dice(seed, 2) == 0 ? DTYPE_BFLOAT16 : DTYPE_FLOAT16;
            struct tensor *t = case_tensor(c->destinations[k], name, wire, n_dims, shape, 0, NULL);
            t->cast = wire != dtype;
            random_side(seed, c->destinations[k], t);
        }
    }
}

static inline void random_domains(uint64_t *seed, struct topology *t)
{
    if (dice(seed, 3) != 0)
        return;
    for (uint32_t d = 0; d < t->n_devices; d++) /* several domains in a node */
        t->devices[d].domain = dice(seed, t->n_domains);
}

static inline void random_options(uint64_t *seed, struct plan_options *o)
{
    static const uint64_t chunks[] = {16, 24, 64, 256, 4096, 8 << 20};
    o->chunk_bytes = chunks[dice(seed, 6)];
    o->least_piece_bytes = (uint64_t)1 << dice(seed, 12);
    o->ring_slots = 1 + dice(seed, 4);
    o->relay = dice(seed, 4) != 0;
    o->staging_ingest = dice(seed, 4) != 0;
    o->strategy = (enum plan_strategy)(dice(seed, 2) == 0 ? 0 : dice(seed, 3));
}

static inline void random_case(uint64_t seed, struct zoo_case *c)
{
    uint32_t n_nodes = 1 + dice(&seed, 6), per_node = 1 + dice(&seed, 4);
    uint32_t n_devices = n_nodes * per_node, n_destinations = dice(&seed, 4) == 0 ? 2 : 1;
    uint32_t first[CASE_MAX_DESTINATIONS] = {0};
    memset(c, 0, sizeof *c);
    case_topology(c, n_nodes, per_node, 1 + dice(&seed, 2));
    random_domains(&seed, &c->topology);
    c->source = case_layout("source", 1 + dice(&seed, 8));
    for (uint32_t i = 1 + dice(&seed, 2); i > 0; i--)
        random_mesh(&seed, c->source);
    for (uint32_t k = 0; k < n_destinations; k++) {
        c->destinations[k] = case_layout(k == 0 ? "rollout" : "eval", 1 + dice(&seed, 12));
        for (uint32_t i = 1 + dice(&seed, 2); i > 0; i--)
            random_mesh(&seed, c->destinations[k]);
    }
    random_tensors(&seed, c, n_destinations);
    case_finish(c, 0, first);
    for (uint32_t r = 0; r < c->source->n_ranks; r++)
        c->source_device[r] = (int32_t)dice(&seed, n_devices);
    for (uint32_t k = 0; k < n_destinations; k++)
        for (uint32_t r = 0; r < c->destinations[k]->n_ranks; r++)
            c->destination_device[k][r] =
                dice(&seed, 16) == 0 ? TOPOLOGY_ABSENT : (int32_t)dice(&seed, n_devices);
    random_options(&seed, &c->input.options);
}

#endif
