/* The stored dtype numbers (layout/dtype.h), for this folder alone: it stands on floor 0 and knows
 * them as numbers. test_kernels_copy compares the two lists. */
#ifndef RS_KERNELS_KERNELS_DTYPE_H
#define RS_KERNELS_KERNELS_DTYPE_H

#include <stdint.h>

enum kernel_dtype {
    KERNEL_FLOAT64 = 1,
    KERNEL_FLOAT32,
    KERNEL_FLOAT16,
    KERNEL_BFLOAT16,
    KERNEL_FLOAT8_E4M3FN,
    KERNEL_FLOAT8_E5M2,
    KERNEL_INT64,
    KERNEL_INT32,
    KERNEL_INT16,
    KERNEL_INT8,
    KERNEL_UINT8,
    KERNEL_BOOL,
    KERNEL_DTYPE_END
};

#if !defined(__cplusplus) /* kernels_body.h has what kernels need */
/* Bytes of one element; 0 for what is no dtype. */
static inline uint32_t kernel_dtype_bytes(uint8_t dtype)
{
    static const uint8_t bytes[KERNEL_DTYPE_END] = {
        [KERNEL_FLOAT64] = 8,  [KERNEL_FLOAT32] = 4,       [KERNEL_FLOAT16] = 2,
        [KERNEL_BFLOAT16] = 2, [KERNEL_FLOAT8_E4M3FN] = 1, [KERNEL_FLOAT8_E5M2] = 1,
        [KERNEL_INT64] = 8,    [KERNEL_INT32] = 4,         [KERNEL_INT16] = 2,
        [KERNEL_INT8] = 1,     [KERNEL_UINT8] = 1,         [KERNEL_BOOL] = 1};
    return dtype < KERNEL_DTYPE_END ? bytes[dtype] : 0;
}
#endif

#endif
