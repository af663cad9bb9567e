/* Casts to float8_e4m3fn with scales, of one matrix: one float32 scale per block, or one for all.
 *
 * A scale is kernel_scale_of (kernels_quantise_body.h) of the greatest finite magnitude in its
 * block, that is amax / 448, at least 2^-126, and 1 where all are zero (or none is finite). An
 * element becomes cast(value / scale): one rounding to float32 and one to float8, which saturates at
 * 448; NaN becomes 0x7F. What is read is whole blocks; what is written may be a part of them, a
 * window, so that a part of a tensor that is cut inside blocks is made of the whole blocks that it
 * touches. Three twins of one function: kernel_quantise_host on a CPU, kernel_quantise_reference
 * for tests, and tasks for a GPU (kernels_gpu.cu), which kernel_quantise_batch_run_host computes
 * thread by thread. Thread: any. */
#ifndef RS_KERNELS_KERNELS_QUANTISE_H
#define RS_KERNELS_KERNELS_QUANTISE_H

#include <stdint.h>

#include "kernels/kernels_task.h"

enum kernel_quantise_step {
    KERNEL_QUANTISE_BLOCKS,  /* each block by its own scale; the last ones may be cut */
    KERNEL_QUANTISE_CLEAR,   /* *amax_bits = 0, and nothing else */
    KERNEL_QUANTISE_AMAX,    /* raises *amax_bits to the greatest finite magnitude of all */
    KERNEL_QUANTISE_BY_AMAX, /* all by one scale, that of *amax_bits */
};

enum { KERNEL_QUANTISE_TARGETS = 4 };

/* Rows of bytes that are dense, `stride` bytes apart. */
struct kernel_quantise_target {
    uint8_t *base;
    int64_t stride;
};

struct kernel_quantise {
    const void *from;       /* rows × columns; a row is dense, and aligned as its elements are */
    int64_t from_stride;    /* bytes from row to row */
    uint64_t rows, columns; /* their product is below 2^31 */
    uint64_t block_rows, block_columns; /* BLOCKS: at least 1 */
    uint32_t *scales;    /* bits of float32: one per block, row-major, dense; BY_AMAX: one. NULL */
    uint32_t *amax_bits; /* of a float32 that is not negative; not with BLOCKS */
    /* What is written in float8, to each target: rows [window_row, window_row + window_rows) and
     * columns likewise of what is read. Its first element goes to a target's base. */
    uint64_t window_row, window_column, window_rows, window_columns;
    struct kernel_quantise_target to[KERNEL_QUANTISE_TARGETS];
    uint64_t *fingerprint; /* of the window in float8: added to (atomically, relaxed). NULL: none */
    uint64_t offset[2];    /* global coordinates of from's first element: for the fingerprint */
    uint8_t n_targets;     /* 0: nothing is written, but for the scales */
    uint8_t from_dtype;    /* float32 or bfloat16, as kernels_dtype.h numbers them */
    uint8_t step;          /* enum kernel_quantise_step */
    uint8_t streaming;     /* as struct kernel_copy's */
};

void kernel_quantise_host(const struct kernel_quantise *q);
/* The straightforward one, which shares no code with the others; for tests. */
void kernel_quantise_reference(const struct kernel_quantise *q);

/* --- for a GPU (as kernels_task.h) ------------------------------------------------------------- */

struct kernel_quantise_task {
    const char *from;
    int64_t from_stride;
    char *to[KERNEL_QUANTISE_TARGETS];
    int64_t to_stride[KERNEL_QUANTISE_TARGETS];
    uint32_t *scales, *amax_bits;
    uint64_t *sum; /* of the device: added to (atomically). NULL: no fingerprint */
    uint64_t offset[2];
    uint32_t rows, columns, row, column, row_end, column_end; /* what is read; the window */
    uint32_t block_rows, block_columns; /* at most as many as there are; AMAX, BY_AMAX: tiles */
    struct kernel_divisor across;       /* blocks of a row of blocks */
    struct kernel_divisor units;        /* KERNEL_QUANTISE_UNIT elements each, of a block's row */
    uint32_t first_block, n_blocks;     /* first_block is set by kernel_quantise_batch_add */
    uint8_t n_targets, from_dtype, step;
};

/* One launch: fits the 4 KiB of parameters of old drivers. */
enum { KERNEL_QUANTISE_BATCH_TASKS = 16 };

struct kernel_quantise_batch {
    uint32_t n_tasks, n_blocks;
    struct kernel_quantise_task tasks[KERNEL_QUANTISE_BATCH_TASKS];
};

/* `sum`: where its fingerprint is to be added; q->fingerprint itself is only compared with NULL. Not
 * for CLEAR, which is a memset. n_blocks 0: nothing to do. */
struct kernel_quantise_task kernel_quantise_task_of(const struct kernel_quantise *q, uint64_t *sum);
/* Tasks of one launch run at once: none may need what another one finds (AMAX and BY_AMAX of one
 * number). The caller looks at n_tasks before; a full batch is a bug. */
void kernel_quantise_batch_add(struct kernel_quantise_batch *b,
                               const struct kernel_quantise_task *task);
/* What the kernel of kernels_gpu.cu computes, with the same arithmetic, block by block and thread by
 * thread. */
void kernel_quantise_batch_run_host(const struct kernel_quantise_batch *b, uint32_t n_blocks);

#endif
