/* One side's description of a model: meshes, tensors, placements; who holds which box.
 *
 * Pure: no clock, no I/O. A layout is immutable once layout_check has passed. layout.c, dtype.c and
 * box.c need libc alone (the data plane uses them); JSON and the digest stand in files of their
 * own. Rules: config/FORMATS.md. Thread: any, for reading. */
#ifndef RS_LAYOUT_LAYOUT_H
#define RS_LAYOUT_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "layout/box.h"
#include "layout/dtype.h"

/* Limits, checked before memory is spent (layout_check and both decoders). */
enum {
    LAYOUT_MAX_MESH_DIMS = 6,
    LAYOUT_MAX_NAME_BYTES = 512,
    LAYOUT_MAX_RANKS = 1 << 20,
    LAYOUT_MAX_MESHES = 1 << 16,
    LAYOUT_MAX_TENSORS = 1 << 20,
    LAYOUT_MAX_REGIONS = 1 << 20, /* of all tensors together */
    LAYOUT_MAX_JSON_BYTES = 1 << 28,
    LAYOUT_MAX_JSON_VALUES = 1 << 24
};

#define LAYOUT_REPLICATE (-1) /* placements[i]: else the tensor dim that mesh dim i shards */

struct mesh {
    char *name;
    uint8_t n_dims;                        /* 1 … LAYOUT_MAX_MESH_DIMS */
    uint32_t shape[LAYOUT_MAX_MESH_DIMS];  /* each > 0 */
    char *dim_names[LAYOUT_MAX_MESH_DIMS]; /* NULL where not named */
    uint32_t *ranks;                       /* row-major, n_ranks of them, no repeats */
    uint32_t n_ranks;                      /* product of shape */
};

/* What one rank holds of a tensor that is declared by explicit regions. */
struct region {
    uint32_t rank;
    struct box box;
};

struct tensor {
    char *name;
    enum dtype dtype;
    uint8_t n_dims; /* 0 … BOX_MAX_DIMS */
    uint64_t shape[BOX_MAX_DIMS];
    int32_t mesh;                            /* index into layout.meshes; -1: explicit regions */
    int8_t placements[LAYOUT_MAX_MESH_DIMS]; /* normalised: no negative dims but LAYOUT_REPLICATE */
    uint8_t shard_order[LAYOUT_MAX_MESH_DIMS]; /* mesh dims in the order in which they cut; identity
                                                  by default */
    struct region *regions;                    /* mesh == -1: n_regions of them, else NULL */
    uint32_t n_regions;
    bool cast; /* destination side: its dtype may differ from the source's */
    /* Computed from another tensor of this layout: {"from", "rule": "block_scale", "block"}. NULL:
     * no. */
    char *derived_from;
    uint32_t derived_block[2];
    /* Index + 1 of the tensor that is derived from this one: its scales. 0: none (layout_check) */
    uint32_t scaled_by;
};

struct instance {
    uint32_t *ranks; /* ascending */
    uint32_t n_ranks;
};

struct layout {
    char *name;
    uint32_t n_ranks; /* greatest rank id + 1 */
    struct mesh *meshes;
    uint32_t n_meshes;
    struct tensor *tensors; /* canonical order: by name, bytewise (layout_check sorts) */
    uint32_t n_tensors;
    struct instance *instances; /* at least one; default: one with all ranks that hold something */
    uint32_t n_instances;
    uint8_t digest[16]; /* of the canonical bytes; filled by layout_digest */
};

/* An empty layout / frees all that it owns; layout_free(NULL) is fine. */
struct layout *layout_new(void);
void layout_free(struct layout *l);

/* Proves every rule of config/FORMATS.md that needs one side only, and brings the layout into
 * canonical form (tensors sorted by name, instances filled in). RS_EINVAL, text names tensor and
 * cause and remedy: "tensor 'w': placement Shard(3) of mesh dim 'tp': the tensor has 3 dims; use 0
 * … 2". */
int layout_check(struct layout *l, struct err *e);

/* Source and destination together: every destination tensor has a source (or is derived), equal
 * global shapes, equal dtypes unless a cast is declared and known. RS_EPRECOND; the text lists the
 * first few offending names and how many there are: missing, unexpected (in the source only, which
 * is no fault), shape, dtype. */
int layout_check_pair(const struct layout *source, const struct layout *destination, struct err *e);

/* True where what the source has can become what the destination declares: equal dtypes, or a cast
 * that is declared and known. With block scales: bfloat16 or float32 to float8_e4m3fn. */
bool layout_dtypes_agree(const struct tensor *source, const struct tensor *destination);

/* For decoders: the tensor dim that Shard(d) means, negative d counted from the end. RS_EINVAL where the
 * tensor has no such dim. */
int layout_shard_dim(int64_t d, uint8_t n_dims, int8_t *ret_dim);

/* True for names that a layout may carry: UTF-8, 1 … LAYOUT_MAX_NAME_BYTES bytes, printable (no control,
 * line or direction characters). */
bool layout_name_valid(const char *name, size_t n_bytes);

/* Whether the regions of a tensor leave a part of it to nobody: 1 and such a part, 0, or RS_ENOMEM.
 * Mesh tensors have no gaps. A gap is a fault only where a destination needs it (layout_check_pair). */
int layout_gap(const struct tensor *t, struct box *ret_missing);

/* Index of the tensor of that name (binary search; canonical order), or -1. */
int64_t layout_find(const struct layout *l, const char *name);

/* The boxes that `rank` holds of tensor t: writes at most `capacity` and returns how many there are
 * in all. Mesh tensors have 0 or 1 box per rank (nested chunks are one interval per dim); empty
 * pieces are left out; tensors by regions may have several. A 0-d tensor has one box with no dims.
 */
uint32_t layout_shards(const struct layout *l, uint32_t t, uint32_t rank, struct box *ret_boxes,
                       uint32_t capacity);
/* As layout_shards for mesh tensors, empty pieces included: true and the box where rank is in the
 * mesh. An empty piece has size 0 and offset = the global length of the dim that ran out. */
bool layout_mesh_shard(const struct layout *l, uint32_t t, uint32_t rank, struct box *ret_box);

/* As layout_mesh_shard, by the position in the mesh's ranks (t must be a mesh tensor). */
struct box layout_position_shard(const struct layout *l, const struct tensor *t, uint32_t position);

/* The interval [*ret_begin, *ret_end) of piece i of n of a length (torch.chunk): c = ceil(L/n). */
void layout_chunk(uint64_t length, uint32_t n, uint32_t i, uint64_t *ret_begin, uint64_t *ret_end);

/* Bytes that `rank` holds of tensor t and over all tensors, and of one tensor over its global shape. */
uint64_t layout_shard_bytes(const struct layout *l, uint32_t t, uint32_t rank);
uint64_t layout_rank_bytes(const struct layout *l, uint32_t rank);
uint64_t layout_tensor_bytes(const struct tensor *t);

/* --- layout_json.c (jansson) --------------------------------------------- */

/* Parses and checks a layout; *ret_layout is the caller's. `text` need not be NUL-terminated.
 * RS_EINVAL with line and column for syntax, tensor and key for the rest; unknown keys and
 * duplicate keys are errors that say which keys there are; numbers beyond 2^63-1, too.
 * RS_EEXHAUSTED over a limit. */
int layout_from_json(const char *text, size_t n_bytes, struct layout **ret_layout, struct err *e);
/* The canonical JSON text (ends with a newline), the caller's to mem_free. NULL when memory is out.
 */
char *layout_to_json(const struct layout *l);

/* --- layout_digest.c (xxHash) -------------------------------------------- */

/* Fills l->digest (XXH3, 128 bits, big endian) from the canonical bytes: everything but names of
 * meshes and their dims, and with meshes in canonical order, so that equal layouts are equal. 0 or
 * RS_ENOMEM. */
int layout_digest(struct layout *l);
/* 32 hex digits and NUL. */
void layout_digest_text(const uint8_t digest[16], char ret_text[33]);

#endif
