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
    uint32_t memory; /* enum wire_memory */
    uint32_t device; /* local */
};

/* One end of a copy: a place, or a box laid out row-major at `compact`. */
struct move_end {
    const struct place *place;
    uint8_t *compact;
};

/* Collects kernels for one stream and enqueues several as one item. */
struct batch {
    struct device_stream *stream;
    uint32_t n_copies, n_prints;
    struct kernel_copy copies[8];
    struct kernel_fingerprint prints[8];
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

void batch_init(struct batch *b, struct device_stream *stream);
/* Targets that are the same memory as the source are left out; the fingerprint is still taken. */
int batch_move(struct batch *b, const struct move *m);
int batch_print(struct batch *b, const struct place *place, uint32_t tensor, const struct box *box,
                uint8_t dtype, uint64_t *fingerprint);
int batch_flush(struct batch *b);

/* 0 where all of `box` is bound; for targets also writable. */
int place_covers(const struct place *place, uint32_t tensor, const struct box *box,
                 uint32_t element_bytes, bool writable, struct err *e);
/* True, and the address, where the box is one contiguous row-major run. */
bool place_contiguous(const struct place *place, uint32_t tensor, const struct box *box,
                      uint32_t element_bytes, uint8_t **ret_address);
/* The dtype that the place's worker declares for program tensor t; DTYPE_NONE: it has no such
 * tensor. Scratch has every dtype: `wire`. */
uint8_t place_dtype(const struct place *place, uint32_t tensor, uint8_t wire);

#endif
