#include "kernels/kernels_quantise.h"

#include <stdbool.h>

#include "base/err.h"
#include "kernels/kernels_body.h"
#include "kernels/kernels_dtype.h"

#include "base/banned.h"

/* Runs of elements: one loop per dtype, so that compilers make vector code of each. Signed numbers,
 * which every vector unit compares: magnitudes have no sign bit. */

KERNEL_VECTORISE static int32_t amax_bfloat16(const uint16_t *x, uint64_t n, int32_t amax)
{
    for (uint64_t i = 0; i < n; i++) {
        int32_t a = (int32_t)(x[i] & 0x7FFFU) << 16;
        a = a < (int32_t)FLOAT32_INFINITY ? a : 0;
        amax = a > amax ? a : amax;
    }
    return amax;
}

KERNEL_VECTORISE static int32_t amax_float32(const uint32_t *x, uint64_t n, int32_t amax)
{
    for (uint64_t i = 0; i < n; i++) {
        int32_t a = (int32_t)(x[i] & FLOAT32_ABS);
        a = a < (int32_t)FLOAT32_INFINITY ? a : 0;
        amax = a > amax ? a : amax;
    }
    return amax;
}

KERNEL_VECTORISE static void scale_bfloat16(uint8_t *restrict to, const uint16_t *restrict x,
                                            uint64_t n, float scale)
{
    for (uint64_t i = 0; i < n; i++)
        to[i] = kernel_cast_e4m3_of_float32(
            kernel_bits_of(kernel_over(kernel_float_of((uint32_t)x[i] << 16), scale)));
}

KERNEL_VECTORISE static void scale_float32(uint8_t *restrict to, const uint32_t *restrict x,
                                           uint64_t n, float scale)
{
    for (uint64_t i = 0; i < n; i++)
        to[i] =
            kernel_cast_e4m3_of_float32(kernel_bits_of(kernel_over(kernel_float_of(x[i]), scale)));
}

/* A part of the rows: rows [row, row_end), columns [column, column_end). */
struct part {
    uint64_t row, row_end, column, column_end;
};

static const void *row_at(const struct kernel_quantise *q, uint64_t row)
{
    return (const char *)q->from + (int64_t)row * q->from_stride;
}

static uint32_t part_amax(const struct kernel_quantise *q, const struct part *p, uint32_t amax)
{
    uint64_t n = p->column_end - p->column;
    int32_t most = (int32_t)amax;
    for (uint64_t i = p->row; i < p->row_end; i++) {
        const void *row = row_at(q, i);
        most = q->from_dtype == KERNEL_BFLOAT16
                   ? amax_bfloat16((const uint16_t *)row + p->column, n, most)
                   : amax_float32((const uint32_t *)row + p->column, n, most);
    }
    return (uint32_t)most;
}

static void part_scale(const struct kernel_quantise *q, const struct part *p, uint32_t scale)
{
    uint64_t n = p->column_end - p->column;
    float by = kernel_float_of(scale);
    for (uint64_t i = p->row; q->to != NULL && i < p->row_end; i++) {
        uint8_t *to = q->to + i * q->columns + p->column;
        const void *row = row_at(q, i);
        if (q->from_dtype == KERNEL_BFLOAT16)
            scale_bfloat16(to, (const uint16_t *)row + p->column, n, by);
        else
            scale_float32(to, (const uint32_t *)row + p->column, n, by);
    }
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void quantise_blocks(const struct kernel_quantise *q)
{
    uint32_t *scale_at = q->scales;
    for (uint64_t row = 0; row < q->rows; row += q->block_rows)
        for (uint64_t column = 0; column < q->columns; column += q->block_columns) {
            struct part p = {row, row + least(q->block_rows, q->rows - row), column,
                             column + least(q->block_columns, q->columns - column)};
            uint32_t scale = kernel_scale_of(part_amax(q, &p, 0));
            if (scale_at != NULL)
                *scale_at++ = scale;
            part_scale(q, &p, scale);
        }
}

void kernel_quantise_host(const struct kernel_quantise *q)
{
    struct part all = {0, q->rows, 0, q->columns};
    rs_assert(q->from_dtype == KERNEL_BFLOAT16 || q->from_dtype == KERNEL_FLOAT32);
    if (q->step == KERNEL_QUANTISE_BLOCKS) {
        rs_assert(q->block_rows > 0 && q->block_columns > 0);
        quantise_blocks(q);
        return;
    }
    if (q->step == KERNEL_QUANTISE_AMAX) {
        uint32_t amax = part_amax(q, &all, 0);
        uint32_t seen = __atomic_load_n(q->amax_bits, __ATOMIC_RELAXED);
        while (amax > seen && !__atomic_compare_exchange_n(q->amax_bits, &seen, amax, true,
                                                           __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        return;
    }
    uint32_t scale = kernel_scale_of(__atomic_load_n(q->amax_bits, __ATOMIC_RELAXED));
    if (q->scales != NULL)
        *q->scales = scale;
    part_scale(q, &all, scale);
}
