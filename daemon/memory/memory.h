/* Workers' memory: segments that are mapped once and counted, and bindings that say where shards
 * lie.
 *
 * segment: one allocation of a client, passed by descriptor or CUDA IPC handle over the memory socket
 * (memory_socket.h). The control process keeps either and has checked it (segment_check);
 * each data plane maps it once per device that uses it and counts. binding: a worker's table from
 * tensor to strided pieces. A piece places a box of the tensor (global coordinates) at a byte
 * offset of a segment with a byte stride per dim, so that a tensor may live inside a fused one
 * (qkv, gate_up) or with gaps. Two tables per worker: live, and shadow where it receives staged.
 *
 * The encoded table (binding_encode) travels in a sealed memfd; binding_open checks it, since it
 * comes from a client. libc alone. */
#ifndef RS_MEMORY_MEMORY_H
#define RS_MEMORY_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "device/device.h"
#include "kernels/kernels.h"
#include "layout/layout.h"

enum {
    SEGMENT_MAX_PER_WORKER = 1024,
    SEGMENT_MAX_BINDING_PIECES = 1 << 22 /* per worker */
};

/* A memfd that can be trusted not to vanish under us: RS_EINVAL (with the remedy) unless it is a
 * regular shared-memory file, sealed against shrinking (F_SEAL_SHRINK), at least `bytes` long, all
 * pages allocated (it allocates what is missing: RS_EEXHAUSTED where that fails, since a later
 * fault could kill us). 0 bytes need no memory and no descriptor. */
int segment_check(int fd, uint64_t bytes, struct err *e);

/* Where one box of one tensor lies. */
struct binding_piece {
    uint32_t tensor;  /* index in the worker's layout (canonical order) */
    uint32_t segment; /* the worker's own number of it, 0 … n-1 */
    struct box box;   /* global coordinates, within the worker's shard */
    uint64_t offset;  /* bytes from the start of the segment to the box's first element */
    int64_t stride_bytes[BOX_MAX_DIMS]; /* >= 0 */
};

/* A piece as a table keeps it: its dims lie apart, so that a matrix's piece takes 72 bytes, not 216.
 * A node may hold half a million of them for as long as its workers are attached. */
struct binding_row {
    uint64_t offset;
    uint32_t tensor, segment;
    uint32_t dims; /* index of its first in binding.dims */
    uint8_t n_dims;
};

struct binding_dim {
    uint64_t offset, size; /* of the box */
    int64_t stride_bytes;
};

struct binding {
    struct binding_row *rows; /* ascending (tensor, box offset); read with binding_at */
    struct binding_dim *dims;
    uint32_t n_pieces;
    uint32_t *first; /* [n_tensors + 1]: slice of each tensor */
    uint64_t *reach; /* [n_pieces]: greatest end in dim 0 of the tensor's pieces up to this one */
    uint32_t n_tensors;
};

/* Takes the pieces on success (an array of mem_alloc, or NULL where there are none): sorts them,
 * drops those without an element, packs the rest and frees the array. RS_ENOMEM; RS_EINVAL: a tensor
 * index or dims out of range. */
int binding_new(struct binding_piece *pieces, uint32_t n_pieces, uint32_t n_tensors,
                struct binding **ret);
void binding_free(struct binding *b);
/* Piece i of n_pieces; what lies beyond its dims is zero. */
struct binding_piece binding_at(const struct binding *b, uint32_t i);
/* Elements of the tensor's pieces. */
uint64_t binding_elements(const struct binding *b, uint32_t tensor);
/* Proves, for `rank` of `layout`: the pieces of each tensor tile its shards exactly; each stays
 * within its segment (segment_bytes[i]); no byte belongs to two elements of one tensor, nor of two
 * tensors unless `aliases` (source side: tied weights may share memory). Two tensors that share
 * memory through different segment numbers are not noticed. RS_EINVAL names tensor, piece and
 * remedy; RS_EEXHAUSTED where too many strided pieces are interlaced to tell in a second. */
int binding_check(const struct binding *b, const struct layout *layout, uint32_t rank,
                  const uint64_t *segment_bytes, uint32_t n_segments, bool aliases, struct err *e);

/* A binding beside others. Equal numbers in memory_of_segment stand for the same memory, whoever
 * handed it over. `written`: a refit (or an Apply) writes it; else it is only read. */
struct binding_user {
    const struct binding *binding; /* checked by binding_check */
    const struct layout *layout;
    const uint64_t *memory_of_segment; /* per segment number of the binding */
    bool written;
    const char *who; /* for people: "layout 'rollout' rank 3" */
    /* where in that memory the segment begins; NULL: all at its start */
    const uint64_t *offset_of_segment;
};
/* Proves that no byte that one of the users writes belongs to another one. One exception: a written
 * piece may be a read one, whole: same tensor name, box, place and strides, so that nothing moves.
 * RS_EINVAL names both tensors and users; RS_EEXHAUSTED: too entangled to tell. */
int bindings_disjoint(const struct binding_user *users, uint32_t n_users, struct err *e);

int binding_encode(const struct binding *b, struct buf *out);
int binding_decode(const void *data, size_t n_bytes, struct binding **ret, struct err *e);

/* Parts of `box` of `tensor` as views: fn is called for each piece that `box` touches, with the
 * common part (global coordinates) and its view; base addresses come from segment_base[piece's
 * segment]. A non-zero return of fn stops and is returned. RS_ENOTFOUND: some of the box is not
 * bound. */
int binding_views(const struct binding *b, uint32_t tensor, const struct box *box,
                  void *const *segment_base,
                  int (*fn)(const struct box *part, const struct kernel_view *view, void *arg),
                  void *arg);
/* True, and the address, where `box` lies within one piece as one contiguous row-major run. */
bool binding_contiguous(const struct binding *b, uint32_t tensor, const struct box *box,
                        uint32_t element_bytes, void *const *segment_base, void **ret_address);

/* Mapped segments of one data plane, by (worker, segment number). */
struct segment_table;
struct segment_table *segment_table_new(void);
void segment_table_free(struct segment_table *t); /* unmaps all */
/* Takes fd on success. RS_EEXIST: already there. A segment of 0 bytes counts, and its base is NULL.
 * The device must outlive the mapping. */
int segment_table_map(struct segment_table *t, struct device *d, uint64_t worker, uint32_t segment,
                      int fd, uint64_t bytes, bool writable, struct err *e);
/* The same for `bytes` from `offset` on of memory of the device that `from` exports (its fd is taken
 * on success). Errors of device_import too. RS_EINVAL: they leave the allocation. */
int segment_table_import(struct segment_table *t, struct device *d, uint64_t worker,
                         uint32_t segment, const struct device_import *from, uint64_t offset,
                         uint64_t bytes, struct err *e);
/* Bases of worker's segments 0 … n-1 (NULL holes); valid until one is mapped or unmapped. */
void *const *segment_table_bases(const struct segment_table *t, uint64_t worker, uint32_t *ret_n);
/* Bytes of imported segments on the device. */
uint64_t segment_table_imported_bytes(const struct segment_table *t, const struct device *d);
/* Unmaps all of a worker's; the caller has made sure that nothing is in flight. Returns how many.
 */
uint32_t segment_table_unmap(struct segment_table *t, uint64_t worker);

#endif
