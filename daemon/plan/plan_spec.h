/* How one side cuts and places tensors, interned: leaf boxes as products of per-dim intervals, and
 * the ranks of each leaf as sets of the plan. Independent of sizes.
 *
 * Along one tensor dim the mesh dims that shard it cut one after another, each what the former
 * left; so the leaves of a dim are numbered by mixed radix in the order of cutting, and tile the
 * dim in that order (nested chunks are monotone). A leaf of the tensor is one leaf per dim, again
 * by mixed radix. */
#ifndef RS_PLAN_SPEC_H
#define RS_PLAN_SPEC_H

#include "plan/plan_private.h"

/* What makes two specs equal; compared as bytes, so it is zeroed first. */
struct spec_key {
    uint32_t side; /* 0: the source, else 1 + destination layout */
    uint32_t mesh; /* interned */
    int8_t placements[LAYOUT_MAX_MESH_DIMS];
    uint8_t order[LAYOUT_MAX_MESH_DIMS];
};

struct spec {
    struct spec_key key;
    uint32_t first_set; /* + leaf */
    uint32_t n_leaves;
    uint32_t leaves[BOX_MAX_DIMS]; /* per tensor dim; 1 where it is not cut */
    uint8_t n_factors[BOX_MAX_DIMS];
    uint32_t factors[BOX_MAX_DIMS][LAYOUT_MAX_MESH_DIMS];
};

struct side {
    const struct layout *layout;
    const int32_t *device;
    uint32_t *mesh_id; /* interned: equal meshes have one id */
    bool destination;
};

struct specs {
    struct side *sides; /* the source first */
    uint32_t n_sides;
    VEC(struct spec) v;
    uint32_t *table; /* open addressing; index + 1 */
    uint32_t table_size;
};

int specs_init(struct specs *s, const struct plan_input *input, struct err *e);
void specs_close(struct specs *s);
/* The interned key of tensor t on a side. */
struct spec_key specs_key(const struct specs *s, uint32_t side, const struct tensor *t);
/* RS_EPRECOND: a rank without a device. */
int specs_get(struct specs *s, struct plan *p, const struct spec_key *key, uint32_t *ret_spec,
              struct err *e);
/* The n_leaves + 1 cut points of a dim of that length. */
void spec_cuts(const struct spec *s, uint8_t dim, uint64_t length, uint64_t *ret_cuts);
/* True where the rank takes no part (TOPOLOGY_ABSENT). */
bool side_absent(const struct side *s, uint32_t rank);
/* The device of a rank, checked. */
int side_device(const struct side *s, const struct topology *t, uint32_t rank, uint32_t *ret_device,
                struct err *e);
struct end side_end(const struct plan *p, const struct specs *s, uint32_t side, uint32_t device,
                    uint32_t rank);

uint64_t hash_words(const void *data, size_t n_bytes);

#endif
