/* The scalar twins: one element at a time, nothing merged, nothing fused. The oracle of the fast
 * ones, so they share no code with them. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "kernels/fingerprint.h"
#include "kernels/kernels.h"
#include "kernels/kernels_dtype.h"
#include "kernels/kernels_quantise.h"

#include "base/banned.h"

/* Coordinates within a box, row-major. */
struct walk {
    uint64_t at[KERNEL_MAX_DIMS];
    const uint64_t *size;
    uint8_t n_dims;
};

static bool box_is_empty(const uint64_t *size, uint8_t n_dims)
{
    for (unsigned d = 0; d < n_dims; d++)
        if (size[d] == 0)
            return true;
    return false;
}

/* False after the last element. */
static bool walk_next(struct walk *w)
{
    for (unsigned d = w->n_dims; d-- > 0;) {
        if (++w->at[d] < w->size[d])
            return true;
        w->at[d] = 0;
    }
    return false;
}

static uint8_t *element(const struct kernel_view *v, const struct walk *w)
{
    uint8_t *p = v->base;
    for (unsigned d = 0; d < w->n_dims; d++)
        p += (ptrdiff_t)w->at[d] * v->stride_bytes[d];
    return p;
}

static uint64_t load(const uint8_t *p, uint32_t n_bytes)
{
    uint64_t bits = 0;
    for (uint32_t i = 0; i < n_bytes; i++)
        bits |= (uint64_t)p[i] << (8 * i);
    return bits;
}

static void store(uint8_t *p, uint32_t n_bytes, uint64_t bits)
{
    for (uint32_t i = 0; i < n_bytes; i++)
        p[i] = (uint8_t)(bits >> (8 * i));
}

/* Of all elements that have these coordinates in all dims but the last. */
static uint64_t row_weight(const uint64_t *offset, const struct walk *w)
{
    uint64_t row = 1;
    for (unsigned d = 0; d + 1U < w->n_dims; d++)
        row *= fingerprint_dim_weight(d, offset[d] + w->at[d]);
    return row;
}

static bool row_begins(const struct walk *w)
{
    return w->n_dims == 0 || w->at[w->n_dims - 1] == 0;
}

/* What one element of a row of that weight adds, at the coordinates offset + w. */
static uint64_t contribution(uint64_t bits, uint32_t n_bytes, uint64_t row, const uint64_t *offset,
                             const struct walk *w)
{
    uint64_t column = w->n_dims == 0 ? 0 : offset[w->n_dims - 1] + w->at[w->n_dims - 1];
    if (n_bytes == 8)
        return row * (((bits & UINT32_MAX) + 1) * fingerprint_word_weight(2 * column) +
                      ((bits >> 32) + 1) * fingerprint_word_weight(2 * column + 1));
    uint32_t per_word = 4 / n_bytes;
    uint64_t shift = 8 * n_bytes * (column % per_word);
    return row * ((bits + 1) << shift) * fingerprint_word_weight(column / per_word);
}

/* Value of a float32's or bfloat16's bits (the latter are the upper half of a float32). */
static double value_of(uint64_t bits, uint8_t dtype)
{
    uint32_t raw = (uint32_t)(dtype == KERNEL_BFLOAT16 ? bits << 16 : bits);
    float f;
    memcpy(&f, &raw, sizeof f);
    return (double)f;
}

/* Rounds a finite |value| to a float with `fraction` bits and least exponent `least`, by scaling so
 * that one unit in the last place is 1 (rint: to nearest even); gives the bits without sign. Values
 * beyond the greatest exponent come out as bits beyond it. */
static uint32_t round_bits(double value, int fraction, int least)
{
    int exponent = value == 0 ? least : ilogb(value);
    if (exponent < least)
        exponent = least;
    double units = rint(ldexp(value, fraction - exponent));
    uint32_t base = (uint32_t)(exponent - least) << fraction;
    return base + (uint32_t)units;
}

static uint64_t cast(uint64_t bits, uint8_t from, uint8_t to)
{
    if (from == to)
        return bits;
    double value = value_of(bits, from);
    uint32_t sign = signbit(value) ? 1 : 0;
    double magnitude = fabs(value);
    if (to == KERNEL_BFLOAT16) {
        uint32_t r = isinf(value) ? 0x7F80 : isnan(value) ? 0 : round_bits(magnitude, 7, -126);
        return isnan(value) ? 0x7FC0 : (sign << 15) | r;
    }
    if (to == KERNEL_FLOAT16) {
        uint32_t r = isinf(value) || magnitude >= 65536 ? 0x7C00
                     : isnan(value)                     ? 0
                                                        : round_bits(magnitude, 10, -14);
        return isnan(value) ? 0x7E00 : (sign << 15) | r;
    }
    uint32_t r = isnan(value) ? 0 : magnitude >= 448 ? 0x7E : round_bits(magnitude, 3, -6);
    return isnan(value) ? 0x7F : (sign << 7) | (r > 0x7E ? 0x7E : r);
}

void kernel_copy_reference(const struct kernel_copy *c)
{
    struct walk w = {.size = c->size, .n_dims = c->n_dims};
    uint32_t from_bytes = kernel_dtype_bytes(c->from_dtype);
    uint32_t to_bytes = kernel_dtype_bytes(c->to_dtype);
    uint64_t sum = 0, row = 1;
    if (box_is_empty(c->size, c->n_dims))
        return;
    do {
        uint64_t bits = cast(load(element(&c->from, &w), from_bytes), c->from_dtype, c->to_dtype);
        for (uint32_t t = 0; t < c->n_targets; t++)
            store(element(&c->to[t], &w), to_bytes, bits);
        if (c->fingerprint == NULL)
            continue;
        if (row_begins(&w))
            row = row_weight(c->offset, &w);
        sum += contribution(bits, to_bytes, row, c->offset, &w);
    } while (walk_next(&w));
    if (c->fingerprint != NULL)
        (void)__atomic_fetch_add(c->fingerprint, sum, __ATOMIC_RELAXED);
}

void kernel_fingerprint_reference(const struct kernel_fingerprint *f)
{
    struct walk w = {.size = f->size, .n_dims = f->n_dims};
    uint32_t n_bytes = kernel_dtype_bytes(f->dtype);
    uint64_t sum = 0, row = 1;
    if (box_is_empty(f->size, f->n_dims))
        return;
    do {
        if (row_begins(&w))
            row = row_weight(f->offset, &w);
        sum += contribution(load(element(&f->from, &w), n_bytes), n_bytes, row, f->offset, &w);
    } while (walk_next(&w));
    (void)__atomic_fetch_add(f->fingerprint, sum, __ATOMIC_RELAXED);
}

/* --- float8 with scales: element by element, in double -------------------------------------------- */

/* The correctly rounded float32 quotient: a double has more than twice its bits, so that rounding
 * twice is rounding once. */
static float quotient(double a, double b)
{
    return (float)(a / b);
}

static double source_at(const struct kernel_quantise *q, uint64_t row, uint64_t column)
{
    uint32_t n_bytes = kernel_dtype_bytes(q->from_dtype);
    const uint8_t *p =
        (const uint8_t *)q->from + (ptrdiff_t)row * q->from_stride + column * n_bytes;
    return value_of(load(p, n_bytes), q->from_dtype);
}

/* Rows and columns of what is read. */
struct rectangle {
    uint64_t row, row_end, column, column_end;
};

static float greatest(const struct kernel_quantise *q, const struct rectangle *r)
{
    double amax = 0;
    for (uint64_t i = r->row; i < r->row_end; i++)
        for (uint64_t k = r->column; k < r->column_end; k++) {
            double here = fabs(source_at(q, i, k));
            amax = isfinite(here) && here > amax ? here : amax;
        }
    return (float)amax;
}

static float scale_of(float amax)
{
    const float least = 0x1p-126F;
    float scale = quotient((double)amax, 448);
    return amax == 0 ? 1 : scale < least ? least : scale;
}

static uint64_t scaled(double value, float scale)
{
    double v = (double)quotient(value, (double)scale);
    uint64_t sign = signbit(v) ? 0x80 : 0;
    if (isnan(v))
        return 0x7F;
    return sign | (fabs(v) >= 448.0 ? 0x7E : round_bits(fabs(v), 3, -6));
}

/* What of the rectangle lies in the window. */
static void write_scaled(const struct kernel_quantise *q, const struct rectangle *r, float scale)
{
    struct walk w = {.n_dims = 2};
    for (w.at[0] = r->row; w.at[0] < r->row_end; w.at[0]++)
        for (w.at[1] = r->column; w.at[1] < r->column_end; w.at[1]++) {
            uint64_t row = w.at[0] - q->window_row, column = w.at[1] - q->window_column;
            if (w.at[0] < q->window_row || row >= q->window_rows || w.at[1] < q->window_column ||
                column >= q->window_columns)
                continue;
            uint64_t bits = scaled(source_at(q, w.at[0], w.at[1]), scale);
            for (uint32_t t = 0; t < q->n_targets; t++)
                store(q->to[t].base + (ptrdiff_t)row * q->to[t].stride + column, 1, bits);
            if (q->fingerprint != NULL)
                *q->fingerprint += contribution(bits, 1, row_weight(q->offset, &w), q->offset, &w);
        }
}

static uint64_t end_of(uint64_t begin, uint64_t n, uint64_t most)
{
    return begin + n < most ? begin + n : most;
}

static void blocks_reference(const struct kernel_quantise *q)
{
    uint64_t number = 0;
    for (uint64_t row = 0; row < q->rows; row += q->block_rows)
        for (uint64_t column = 0; column < q->columns; column += q->block_columns) {
            struct rectangle r = {row, end_of(row, q->block_rows, q->rows), column,
                                  end_of(column, q->block_columns, q->columns)};
            float scale = scale_of(greatest(q, &r));
            if (q->scales != NULL)
                memcpy(&q->scales[number], &scale, sizeof scale);
            number++;
            write_scaled(q, &r, scale);
        }
}

void kernel_quantise_reference(const struct kernel_quantise *q)
{
    struct rectangle all = {0, q->rows, 0, q->columns};
    float amax = 0, here;
    if (q->step == KERNEL_QUANTISE_BLOCKS) {
        blocks_reference(q);
        return;
    }
    if (q->step != KERNEL_QUANTISE_CLEAR)
        memcpy(&amax, q->amax_bits, sizeof amax);
    if (q->step == KERNEL_QUANTISE_AMAX) {
        here = greatest(q, &all);
        amax = here > amax ? here : amax;
    }
    if (q->step != KERNEL_QUANTISE_BY_AMAX) {
        memcpy(q->amax_bits, &amax, sizeof amax);
        return;
    }
    float scale = scale_of(amax);
    if (q->scales != NULL)
        memcpy(q->scales, &scale, sizeof scale);
    write_scaled(q, &all, scale);
}
