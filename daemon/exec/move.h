/* Boxes of places, made into kernel copies and fingerprints on a stream.
 *
 * A place says where a worker's (or a scratch's) tensors lie. A box of it may be cut into several
 * views by bindings; a copy between two places is cut at the edges of both. Loop thread. */
#ifndef RS_EXEC_MOVE_H
#define RS_EXEC_MOVE_H

#include "exec/plane.h"
#include "plan/program.h"

struct place {
    struct plane *plane;
    const struct worker *worker; /* NULL: scratch */
    const uint32_t *index;       /* program tensor → tensor of the worker's layout; NULL: same */
    const struct program *program; /* scratch: shapes and offsets */
    uint8_t *scratch;
    uint64_t made;   /* scaled_open: which place that makes cells, ever; 0: it makes none */
    bool source;     /* of a program: cells may have to be made from what lies here */
    uint32_t memory; /* enum wire_memory */
    uint32_t device; /* local */
};

/* Calls fn for each part of the box that lies in one view. A return that is not 0 ends it and is returned. RS_ENOTFOUND: not all of
 * it is bound. */
typedef int view_fn(const struct box *part, const struct kernel_view *view, void *arg);
int place_views(const struct place *p, uint32_t tensor, const struct box *box,
                uint32_t element_bytes, view_fn *fn, void *arg);

/* One end of a copy: a place, or a box laid out row-major at `compact`: `box`, or where that is NULL
 * the move's own. */
struct move_end {
    const struct place *place;
    uint8_t *compact;
    const struct box *box;
};

/* An item is a launch, on a GPU: they are few where boxes are small and many. */
enum { BATCH_COPIES = 32 };

/* Collects kernels for one stream and enqueues several as one item. */
struct batch {
    struct device_stream *stream;
    struct plane_work *work; /* the stream's */
    uint32_t n_copies, n_casts, n_prints;
    struct kernel_copy copies[BATCH_COPIES];
    struct kernel_quantise casts[8];
    struct kernel_fingerprint prints[BATCH_COPIES];
};

struct move {
    uint32_t tensor;
    struct box box;
    struct move_end from;
    const struct move_end *to;
    uint32_t n_to;
    uint8_t from_dtype, to_dtype;
    bool streaming;
    uint64_t *fingerprint; /* of what is written; NULL: none */
};

/* work: the stream's, for moves out of source places; NULL where there are none. */
void batch_init(struct batch *b, struct device_stream *stream, struct plane_work *work);
/* What the tensor is at a place that makes it from what lies there (scaled.h); NULL: it lies there as
 * it goes out, but for a cast. */
static inline const struct program_tensor *place_makes(const struct place *p, uint32_t tensor)
{
    if (!p->source || p->program->tensors[tensor].value == PROGRAM_AS_SOURCE)
        return NULL;
    return &p->program->tensors[tensor];
}

/* Targets that are the same memory as the source are left out; the fingerprint is still taken. */
int batch_move(struct batch *b, const struct move *m);
int batch_print(struct batch *b, const struct place *place, uint32_t tensor, const struct box *box,
                uint8_t dtype, uint64_t *fingerprint);
/* batch_move of what lies at the place, whatever it may make of it. */
int batch_gather(struct batch *b, const struct move *m);
/* The fingerprint of m's box, which lies at m->from.compact. */
int batch_print_compact(struct batch *b, const struct move *m);
/* As device_quantise; moves of the same batch are neither waited for nor wait for it. */
int batch_cast(struct batch *b, const struct kernel_quantise *q);
int batch_flush(struct batch *b);

/* 0 where all of `box` is bound; for targets also writable. */
int place_covers(const struct place *place, uint32_t tensor, const struct box *box,
                 uint32_t element_bytes, bool writable, struct err *e);
/* True, and the address, where the box is one contiguous row-major run. */
bool place_contiguous(const struct place *place, uint32_t tensor, const struct box *box,
                      uint32_t element_bytes, uint8_t **ret_address);
/* True where the box (2 dims) lies in one view whose rows are dense and aligned: the first, and bytes
 * from row to row. */
bool place_rows(const struct place *place, uint32_t tensor, const struct box *box,
                uint32_t element_bytes, const void **ret_first, int64_t *ret_stride);
/* The dtype that the place's worker declares for program tensor t; DTYPE_NONE: it has no such
 * tensor. Scratch has every dtype: `wire`. */
uint8_t place_dtype(const struct place *place, uint32_t tensor, uint8_t wire);

#endif
