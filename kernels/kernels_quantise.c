/* The host twin of casts with scales. What is made goes by way of a buffer that a cache holds to its
 * targets, as an ordinary copy with a fingerprint. */
#include "kernels/kernels_quantise.h"

#include <stdbool.h>
#include <string.h>

#include "base/err.h"
#include "kernels/kernels_dtype.h"
#include "kernels/kernels_quantise_body.h"

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

/* Rows [row, row_end), columns [column, column_end) of what is read. */
struct part {
    uint64_t row, row_end, column, column_end;
};

/* Elements that are made at once: with what they are made of they fit into a core's own cache. */
enum { BUFFER_ELEMENTS = 1 << 14 };

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t part_elements(const struct part *p)
{
    return (p->row_end - p->row) * (p->column_end - p->column);
}

/* The part of p that is written. False: nothing. */
static bool in_window(const struct kernel_quantise *q, const struct part *p, struct part *ret)
{
    ret->row = most(p->row, q->window_row);
    ret->row_end = least(p->row_end, q->window_row + q->window_rows);
    ret->column = most(p->column, q->window_column);
    ret->column_end = least(p->column_end, q->window_column + q->window_columns);
    return ret->row < ret->row_end && ret->column < ret->column_end;
}

static const void *row_at(const struct kernel_quantise *q, uint64_t row)
{
    return (const char *)q->from + (int64_t)row * q->from_stride;
}

static uint32_t part_amax(const struct kernel_quantise *q, const struct part *p)
{
    uint64_t n = p->column_end - p->column;
    int32_t amax = 0;
    for (uint64_t i = p->row; i < p->row_end; i++) {
        const void *row = row_at(q, i);
        amax = q->from_dtype == KERNEL_BFLOAT16
                   ? amax_bfloat16((const uint16_t *)row + p->column, n, amax)
                   : amax_float32((const uint32_t *)row + p->column, n, amax);
    }
    return (uint32_t)amax;
}

/* A part in float8, its rows `stride` bytes apart. */
static void make(const struct kernel_quantise *q, const struct part *p, uint32_t scale, uint8_t *to,
                 uint64_t stride)
{
    uint64_t n = p->column_end - p->column;
    float by = kernel_float_of(scale);
    for (uint64_t i = p->row; i < p->row_end; i++, to += stride) {
        const void *row = row_at(q, i);
        if (q->from_dtype == KERNEL_BFLOAT16)
            scale_bfloat16(to, (const uint16_t *)row + p->column, n, by);
        else
            scale_float32(to, (const uint32_t *)row + p->column, n, by);
    }
}

/* From the buffer, where it lies in dense rows, to the targets. */
static void put(const struct kernel_quantise *q, const struct part *p, uint8_t *buffer)
{
    uint64_t columns = p->column_end - p->column;
    int64_t down = (int64_t)(p->row - q->window_row);
    int64_t right = (int64_t)(p->column - q->window_column);
    struct kernel_copy c = {.size = {p->row_end - p->row, columns},
                            .offset = {q->offset[0] + p->row, q->offset[1] + p->column},
                            .from = {buffer, {(int64_t)columns, 1}},
                            .fingerprint = q->fingerprint,
                            .n_targets = q->n_targets,
                            .n_dims = 2,
                            .from_dtype = KERNEL_FLOAT8_E4M3FN,
                            .to_dtype = KERNEL_FLOAT8_E4M3FN,
                            .streaming = q->streaming};
    for (uint32_t i = 0; i < q->n_targets; i++)
        c.to[i] = (struct kernel_view){q->to[i].base + down * q->to[i].stride + right,
                                       {q->to[i].stride, 1}};
    kernel_copy_host(&c);
}

static bool makes(const struct kernel_quantise *q)
{
    return q->n_targets > 0 || q->fingerprint != NULL;
}

/* All of it by one scale. */
static void put_part(const struct kernel_quantise *q, const struct part *p, uint32_t scale)
{
    uint8_t buffer[BUFFER_ELEMENTS];
    struct part all, t;
    if (!makes(q) || !in_window(q, p, &all))
        return;
    uint64_t columns = least(all.column_end - all.column, BUFFER_ELEMENTS);
    uint64_t rows = BUFFER_ELEMENTS / columns;
    for (t.row = all.row; t.row < all.row_end; t.row = t.row_end)
        for (t.column = all.column; t.column < all.column_end; t.column = t.column_end) {
            t.row_end = least(t.row + rows, all.row_end);
            t.column_end = least(t.column + columns, all.column_end);
            make(q, &t, scale, buffer, t.column_end - t.column);
            put(q, &t, buffer);
        }
}

static uint32_t block_scale(const struct kernel_quantise *q, const struct part *block,
                            uint32_t **scale_at)
{
    uint32_t scale = kernel_scale_of(part_amax(q, block));
    if (*scale_at != NULL)
        *(*scale_at)++ = scale;
    return scale;
}

/* Neighbours in a row of blocks that fit into the buffer together: small blocks one by one would
 * be mostly overhead. */
static void quantise_group(const struct kernel_quantise *q, const struct part *group,
                           uint32_t **scale_at)
{
    uint8_t buffer[BUFFER_ELEMENTS];
    struct part all, part, block = *group;
    bool any = in_window(q, group, &all) && makes(q);
    for (; block.column < group->column_end; block.column = block.column_end) {
        block.column_end = least(block.column + q->block_columns, group->column_end);
        uint32_t scale = block_scale(q, &block, scale_at);
        uint64_t stride = any ? all.column_end - all.column : 0;
        if (any && in_window(q, &block, &part))
            make(q, &part, scale,
                 buffer + (part.row - all.row) * stride + (part.column - all.column), stride);
    }
    if (any)
        put(q, &all, buffer);
}

static void quantise_blocks(const struct kernel_quantise *q)
{
    uint32_t *scale_at = q->scales;
    uint64_t rows = least(q->block_rows, q->rows), columns = least(q->block_columns, q->columns);
    uint64_t fit = rows * columns == 0 ? 0 : BUFFER_ELEMENTS / (rows * columns);
    struct part g;
    for (g.row = 0; g.row < q->rows; g.row = g.row_end)
        for (g.column = 0; g.column < q->columns; g.column = g.column_end) {
            g.row_end = least(g.row + rows, q->rows);
            g.column_end = least(g.column + columns * most(fit, 1), q->columns);
            if (part_elements(&g) <= BUFFER_ELEMENTS)
                quantise_group(q, &g, &scale_at);
            else
                put_part(q, &g, block_scale(q, &g, &scale_at));
        }
}

static void raise_to(uint32_t *to, uint32_t value)
{
    uint32_t seen = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (value > seen &&
           !__atomic_compare_exchange_n(to, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

void kernel_quantise_host(const struct kernel_quantise *q)
{
    struct part all = {0, q->rows, 0, q->columns};
    uint32_t scale;
    switch (q->step) {
    case KERNEL_QUANTISE_BLOCKS:
        rs_assert(q->block_rows > 0 && q->block_columns > 0);
        quantise_blocks(q);
        return;
    case KERNEL_QUANTISE_CLEAR:
        __atomic_store_n(q->amax_bits, 0, __ATOMIC_RELAXED);
        return;
    case KERNEL_QUANTISE_AMAX:
        raise_to(q->amax_bits, part_amax(q, &all));
        return;
    default:
        scale = kernel_scale_of(__atomic_load_n(q->amax_bits, __ATOMIC_RELAXED));
        if (q->scales != NULL)
            *q->scales = scale;
        put_part(q, &all, scale);
    }
}
