/* Casts to float8_e4m3fn with scales over dense rows, for a data plane that brings blocks together
 * first.
 *
 * One float32 scale per block: kernel_scale_of (kernels_body.h) of the greatest finite magnitude in
 * it, that is amax / 448, at least 2^-126, and 1 where all are zero (or none is finite). An element
 * becomes cast(value / scale): one rounding to float32 and one to float8, which saturates at 448;
 * NaN becomes 0x7F. The same values as kernel_scaled_cast (kernels_task.h), which works on strided
 * bfloat16 and 128 x 128 blocks only: this one takes blocks of any size, and float32. Thread: any. */
#ifndef RS_KERNELS_KERNELS_QUANTISE_H
#define RS_KERNELS_KERNELS_QUANTISE_H

#include <stdint.h>

enum kernel_quantise_step {
    KERNEL_QUANTISE_BLOCKS,  /* each block by its own scale; the last ones may be cut */
    KERNEL_QUANTISE_AMAX,    /* raises *amax_bits to the greatest finite magnitude of all */
    KERNEL_QUANTISE_BY_AMAX, /* all by one scale, that of *amax_bits */
};

struct kernel_quantise {
    const void *from;    /* rows × columns; a row is dense, and aligned as its elements are */
    int64_t from_stride; /* bytes from row to row */
    uint8_t *to;         /* the same in float8, rows dense behind one another; NULL: scales only */
    uint32_t *scales;    /* bits of float32: one per block, row-major, dense; BY_AMAX: one. NULL */
    uint32_t *amax_bits; /* of a float32 that is not negative; AMAX, BY_AMAX */
    uint64_t rows, columns;
    uint64_t block_rows, block_columns; /* BLOCKS: at least 1 */
    uint8_t from_dtype;                 /* float32 or bfloat16, as kernels_dtype.h numbers them */
    uint8_t step;                       /* enum kernel_quantise_step */
};

void kernel_quantise_host(const struct kernel_quantise *q);

#endif
