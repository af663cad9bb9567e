/* What one thread of a kernel does: the same text for nvcc and for a C compiler.
 *
 * Everything is told by (block, thread), nothing is shared between threads here; sums are returned
 * and added up by whoever runs the threads. Inner functions take the unit's sizes as constants and
 * are always inlined, so that arrays become registers. */
#ifndef RS_KERNELS_KERNELS_BODY_H
#define RS_KERNELS_KERNELS_BODY_H

#include <string.h>

#include "kernels/fingerprint.h"
#include "kernels/kernels_cast.h"
#include "kernels/kernels_dtype.h"
#include "kernels/kernels_task.h"

#if defined(__CUDACC__)
#define KERNEL_UNROLL _Pragma("unroll")
#define KERNEL_ROLLED _Pragma("unroll 1") /* few rounds: registers are worth more than the branch */
#else
#define KERNEL_UNROLL
#define KERNEL_ROLLED
#endif

/* n < 2^31. */
KERNEL_INLINE uint32_t kernel_divide(uint32_t n, const struct kernel_divisor *d)
{
    if (d->by == 1)
        return n;
    return (uint32_t)(((uint64_t)n * d->multiplier) >> 32) >> d->shift;
}

/* Up to 16 bytes on their way through registers. */
struct kernel_words {
    uint32_t w[4];
};

KERNEL_INLINE struct kernel_words kernel_load(const char *p, const uint32_t n_bytes)
{
    struct kernel_words x = {{0, 0, 0, 0}};
#if defined(__CUDA_ARCH__)
    if (n_bytes == 16) {
        uint4 v = __ldcs((const uint4 *)p);
        x.w[0] = v.x;
        x.w[1] = v.y;
        x.w[2] = v.z;
        x.w[3] = v.w;
    } else if (n_bytes == 8) {
        uint2 v = __ldcs((const uint2 *)p);
        x.w[0] = v.x;
        x.w[1] = v.y;
    } else if (n_bytes == 4) {
        x.w[0] = __ldcs((const uint32_t *)p);
    } else if (n_bytes == 2) {
        x.w[0] = *(const uint16_t *)p;
    } else {
        x.w[0] = *(const uint8_t *)p;
    }
#else
    memcpy(x.w, p, n_bytes); /* little-endian hosts, as GPUs are: checked in kernels_task.c */
#endif
    return x;
}

KERNEL_INLINE void kernel_store(char *p, const struct kernel_words *x, const uint32_t n_bytes)
{
#if defined(__CUDA_ARCH__)
    if (n_bytes == 16)
        *(uint4 *)p = make_uint4(x->w[0], x->w[1], x->w[2], x->w[3]);
    else if (n_bytes == 8)
        *(uint2 *)p = make_uint2(x->w[0], x->w[1]);
    else if (n_bytes == 4)
        *(uint32_t *)p = x->w[0];
    else if (n_bytes == 2)
        *(uint16_t *)p = (uint16_t)x->w[0];
    else
        *(uint8_t *)p = (uint8_t)x->w[0];
#else
    memcpy(p, x->w, n_bytes);
#endif
}

KERNEL_INLINE struct kernel_words kernel_convert(const struct kernel_words *x, const int unit)
{
    struct kernel_words y = *x;
    if (unit == KERNEL_UNIT_BFLOAT16) {
        y.w[0] = kernel_cast_bfloat16(x->w[0]) | (uint32_t)kernel_cast_bfloat16(x->w[1]) << 16;
        y.w[1] = kernel_cast_bfloat16(x->w[2]) | (uint32_t)kernel_cast_bfloat16(x->w[3]) << 16;
    } else if (unit == KERNEL_UNIT_FLOAT16) {
        y.w[0] = kernel_cast_float16(x->w[0]) | (uint32_t)kernel_cast_float16(x->w[1]) << 16;
        y.w[1] = kernel_cast_float16(x->w[2]) | (uint32_t)kernel_cast_float16(x->w[3]) << 16;
    } else if (unit == KERNEL_UNIT_E4M3) {
        KERNEL_UNROLL
        for (int i = 0; i < 2; i++) {
            uint32_t a = x->w[2 * i], b = x->w[2 * i + 1];
            y.w[i] = kernel_cast_e4m3((uint16_t)a) |
                     (uint32_t)kernel_cast_e4m3((uint16_t)(a >> 16)) << 8 |
                     (uint32_t)kernel_cast_e4m3((uint16_t)b) << 16 |
                     (uint32_t)kernel_cast_e4m3((uint16_t)(b >> 16)) << 24;
        }
    }
    return y;
}

KERNEL_INLINE uint32_t kernel_unit_reads(const int unit)
{
    return unit <= KERNEL_UNIT_16 ? 1U << unit : 16;
}

KERNEL_INLINE uint32_t kernel_unit_writes(const int unit)
{
    return unit <= KERNEL_UNIT_16 ? 1U << unit : 8;
}

/* --- one element of any dtype at any address --------------------------------------------------- */

KERNEL_INLINE uint64_t kernel_load_element(const char *p, uint32_t n_bytes)
{
    uint64_t bits = 0;
    if (((uintptr_t)p & (n_bytes - 1)) != 0) {
        for (uint32_t i = 0; i < n_bytes; i++)
            bits |= (uint64_t)(uint8_t)p[i] << (8 * i);
        return bits;
    }
    if (n_bytes == 8)
        return *(const uint64_t *)(const void *)p;
    if (n_bytes == 4)
        return *(const uint32_t *)(const void *)p;
    if (n_bytes == 2)
        return *(const uint16_t *)(const void *)p;
    return *(const uint8_t *)p;
}

KERNEL_INLINE void kernel_store_element(char *p, uint32_t n_bytes, uint64_t bits)
{
    if (((uintptr_t)p & (n_bytes - 1)) != 0) {
        for (uint32_t i = 0; i < n_bytes; i++)
            p[i] = (char)(bits >> (8 * i));
        return;
    }
    if (n_bytes == 8)
        *(uint64_t *)(void *)p = bits;
    else if (n_bytes == 4)
        *(uint32_t *)(void *)p = (uint32_t)bits;
    else if (n_bytes == 2)
        *(uint16_t *)(void *)p = (uint16_t)bits;
    else
        *(uint8_t *)p = (uint8_t)bits;
}

KERNEL_INLINE uint64_t kernel_cast_element(uint64_t bits, uint8_t from, uint8_t to)
{
    if (from == to)
        return bits;
    if (to == KERNEL_BFLOAT16)
        return kernel_cast_bfloat16((uint32_t)bits);
    if (to == KERNEL_FLOAT16)
        return kernel_cast_float16((uint32_t)bits);
    return kernel_cast_e4m3((uint16_t)bits);
}

/* What an element whose first byte is byte `at` of its row adds, but for the row's weight. */
KERNEL_INLINE uint64_t kernel_element_sum(uint64_t bits, uint32_t n_bytes, uint64_t at)
{
    if (n_bytes == 8)
        return ((bits & UINT32_MAX) + 1) * fingerprint_word_weight(at / 4) +
               ((bits >> 32) + 1) * fingerprint_word_weight(at / 4 + 1);
    return ((bits + 1) << (8 * (at % 4))) * fingerprint_word_weight(at / 4);
}

KERNEL_INLINE uint32_t kernel_dtype_size(uint8_t dtype)
{
    return dtype == KERNEL_FLOAT64 || dtype == KERNEL_INT64                               ? 8
           : dtype == KERNEL_FLOAT32 || dtype == KERNEL_INT32                             ? 4
           : dtype == KERNEL_FLOAT16 || dtype == KERNEL_BFLOAT16 || dtype == KERNEL_INT16 ? 2
                                                                                          : 1;
}

/* --- plain copies ------------------------------------------------------------------------------ */

/* Where a unit lies in one view, in bytes from its base. Computed anew for each view: keeping all of
 * them for all units in flight would take more registers than there are. */
KERNEL_INLINE int64_t kernel_unit_offset(const struct kernel_task *t, uint32_t unit, int64_t step,
                                         const int64_t *stride)
{
    uint32_t row = kernel_divide(unit, &t->units), column = unit - row * t->units.by;
    int64_t at = column * step;
    KERNEL_ROLLED
    for (uint32_t d = t->n_outer; d-- > 0;) {
        uint32_t next = kernel_divide(row, &t->outer[d]);
        at += (row - next * t->outer[d].by) * stride[d];
        row = next;
    }
    return at;
}

/* All loads first: that many are in flight at once. */
KERNEL_INLINE void kernel_copy_units(const struct kernel_task *t, uint32_t tile, uint32_t thread,
                                     const int unit)
{
    struct kernel_words x[KERNEL_COPY_UNITS];
    uint32_t first = tile * (KERNEL_THREADS * KERNEL_COPY_UNITS) + thread;
    KERNEL_UNROLL
    for (uint32_t k = 0; k < KERNEL_COPY_UNITS; k++)
        if (first + k * KERNEL_THREADS < t->n_units)
            x[k] = kernel_load(t->from + kernel_unit_offset(t, first + k * KERNEL_THREADS,
                                                            t->from_step, t->from_stride),
                               kernel_unit_reads(unit));
    KERNEL_UNROLL
    for (uint32_t k = 0; k < KERNEL_COPY_UNITS; k++)
        x[k] = kernel_convert(&x[k], unit);
    KERNEL_ROLLED
    for (uint32_t i = 0; i < t->n_targets; i++)
        KERNEL_UNROLL
    for (uint32_t k = 0; k < KERNEL_COPY_UNITS; k++)
        if (first + k * KERNEL_THREADS < t->n_units)
            kernel_store(t->to[i] + kernel_unit_offset(t, first + k * KERNEL_THREADS, t->to_step[i],
                                                       t->to_stride[i]),
                         &x[k], kernel_unit_writes(unit));
}

KERNEL_INLINE void kernel_copy_elements(const struct kernel_task *t, uint32_t tile, uint32_t thread)
{
    uint32_t reads = kernel_dtype_size(t->from_dtype), writes = kernel_dtype_size(t->to_dtype);
    KERNEL_ROLLED
    for (uint32_t k = 0; k < KERNEL_COPY_UNITS; k++) {
        uint32_t unit = (tile * KERNEL_COPY_UNITS + k) * KERNEL_THREADS + thread;
        if (unit >= t->n_units)
            return;
        int64_t from = kernel_unit_offset(t, unit, t->from_step, t->from_stride);
        uint64_t bits = kernel_cast_element(kernel_load_element(t->from + from, reads),
                                            t->from_dtype, t->to_dtype);
        KERNEL_ROLLED
        for (uint32_t i = 0; i < t->n_targets; i++)
            kernel_store_element(t->to[i] +
                                     kernel_unit_offset(t, unit, t->to_step[i], t->to_stride[i]),
                                 writes, bits);
    }
}

#define KERNEL_EACH_UNIT(X)                                                                        \
    X(KERNEL_UNIT_16)                                                                              \
    X(KERNEL_UNIT_8)                                                                               \
    X(KERNEL_UNIT_4) X(KERNEL_UNIT_BFLOAT16) X(KERNEL_UNIT_FLOAT16) X(KERNEL_UNIT_E4M3)

KERNEL_INLINE void kernel_copy_thread(const struct kernel_task *t, uint32_t tile, uint32_t thread)
{
    switch (t->unit) {
#define X(unit)                                                                                    \
    case unit:                                                                                     \
        kernel_copy_units(t, tile, thread, unit);                                                  \
        return;
        KERNEL_EACH_UNIT(X)
        X(KERNEL_UNIT_2)
        X(KERNEL_UNIT_1)
#undef X
    default:
        kernel_copy_elements(t, tile, thread);
    }
}

/* --- with a fingerprint ------------------------------------------------------------------------ */

/* Rows of the last outer dim that a unit stands for. */
struct kernel_rows {
    uint64_t weight, first; /* of the dims before; global coordinate of the first row */
    uint32_t row, before;   /* within the last outer dim; index of the dims before */
    uint32_t n, column;
};

KERNEL_INLINE struct kernel_rows kernel_rows_of_unit(const struct kernel_task *t, uint32_t unit)
{
    struct kernel_rows r = {1, 0, 0, 0, 1, 0};
    uint32_t group = kernel_divide(unit, &t->units);
    r.column = unit - group * t->units.by;
    if (t->n_outer == 0)
        return r;
    uint32_t last = t->n_outer - 1U;
    r.before = kernel_divide(group, &t->groups);
    r.row = (group - r.before * t->groups.by) * KERNEL_SUM_ROWS;
    uint32_t left = t->outer[last].by - r.row, before = r.before;
    r.n = left < KERNEL_SUM_ROWS ? left : KERNEL_SUM_ROWS;
    r.first = t->offset[last] + r.row;
    KERNEL_ROLLED
    for (uint32_t d = last; d-- > 0;) {
        uint32_t next = kernel_divide(before, &t->outer[d]), i = before - next * t->outer[d].by;
        r.weight *= fingerprint_dim_weight(d, t->offset[d] + i);
        before = next;
    }
    return r;
}

/* Where its first row lies in one view, in bytes from the base. */
KERNEL_INLINE int64_t kernel_rows_offset(const struct kernel_task *t, const struct kernel_rows *r,
                                         int64_t step, const int64_t *stride)
{
    int64_t at = r->column * step;
    if (t->n_outer == 0)
        return at;
    uint32_t last = t->n_outer - 1U, before = r->before;
    at += r->row * stride[last];
    KERNEL_ROLLED
    for (uint32_t d = last; d-- > 0;) {
        uint32_t next = kernel_divide(before, &t->outer[d]);
        at += (before - next * t->outer[d].by) * stride[d];
        before = next;
    }
    return at;
}

/* From one row to the next. */
KERNEL_INLINE int64_t kernel_row_stride(const struct kernel_task *t, const int64_t *stride)
{
    return t->n_outer == 0 ? 0 : stride[t->n_outer - 1U];
}

KERNEL_INLINE uint64_t kernel_row_weight(const struct kernel_task *t, const struct kernel_rows *r,
                                         uint32_t i)
{
    return t->n_outer == 0 ? 1 : r->weight * fingerprint_dim_weight(t->n_outer - 1U, r->first + i);
}

/* Whole words at whole words' places: a unit's words share their weights over all its rows. */
KERNEL_INLINE uint64_t kernel_sum_units(const struct kernel_task *t, uint32_t tile, uint32_t thread,
                                        const int unit)
{
    const uint32_t n_words = kernel_unit_writes(unit) / 4;
    uint32_t number = tile * KERNEL_THREADS + thread;
    if (number >= t->n_units)
        return 0;
    struct kernel_rows r = kernel_rows_of_unit(t, number);
    struct kernel_words x[KERNEL_SUM_ROWS];
    const char *from = t->from + kernel_rows_offset(t, &r, t->from_step, t->from_stride);
    int64_t from_row = kernel_row_stride(t, t->from_stride);
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_SUM_ROWS; i++)
        if (i < r.n)
            x[i] = kernel_load(from + i * from_row, kernel_unit_reads(unit));
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_SUM_ROWS; i++)
        x[i] = kernel_convert(&x[i], unit);
    KERNEL_ROLLED
    for (uint32_t k = 0; k < t->n_targets; k++) {
        char *to = t->to[k] + kernel_rows_offset(t, &r, t->to_step[k], t->to_stride[k]);
        int64_t to_row = kernel_row_stride(t, t->to_stride[k]);
        KERNEL_UNROLL
        for (uint32_t i = 0; i < KERNEL_SUM_ROWS; i++)
            if (i < r.n)
                kernel_store(to + i * to_row, &x[i], kernel_unit_writes(unit));
    }
    uint32_t weights[4] = {0, 0, 0, 0}, ones = fingerprint_ones(kernel_dtype_size(t->to_dtype));
    uint64_t zeros = 0, word = t->first_byte / 4 + (uint64_t)r.column * n_words, sum = 0;
    KERNEL_UNROLL
    for (uint32_t w = 0; w < n_words; w++) {
        weights[w] = fingerprint_word_weight(word + w);
        zeros += (uint64_t)ones * weights[w];
    }
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_SUM_ROWS; i++)
        if (i < r.n) {
            uint64_t row = zeros;
            KERNEL_UNROLL
            for (uint32_t w = 0; w < n_words; w++)
                row += (uint64_t)x[i].w[w] * weights[w];
            sum += row * kernel_row_weight(t, &r, i);
        }
    return sum;
}

KERNEL_INLINE uint64_t kernel_sum_elements(const struct kernel_task *t, uint32_t tile,
                                           uint32_t thread)
{
    uint32_t number = tile * KERNEL_THREADS + thread;
    if (number >= t->n_units)
        return 0;
    uint32_t reads = kernel_dtype_size(t->from_dtype), writes = kernel_dtype_size(t->to_dtype);
    struct kernel_rows r = kernel_rows_of_unit(t, number);
    int64_t from = kernel_rows_offset(t, &r, t->from_step, t->from_stride);
    uint64_t at = t->first_byte + (uint64_t)r.column * writes, sum = 0;
    KERNEL_ROLLED
    for (uint32_t i = 0; i < r.n; i++) {
        const char *p = t->from + from + i * kernel_row_stride(t, t->from_stride);
        uint64_t bits =
            kernel_cast_element(kernel_load_element(p, reads), t->from_dtype, t->to_dtype);
        KERNEL_ROLLED
        for (uint32_t k = 0; k < t->n_targets; k++)
            kernel_store_element(t->to[k] +
                                     kernel_rows_offset(t, &r, t->to_step[k], t->to_stride[k]) +
                                     i * kernel_row_stride(t, t->to_stride[k]),
                                 writes, bits);
        sum += kernel_element_sum(bits, writes, at) * kernel_row_weight(t, &r, i);
    }
    return sum;
}

KERNEL_INLINE uint64_t kernel_sum_thread(const struct kernel_task *t, uint32_t tile,
                                         uint32_t thread)
{
    switch (t->unit) {
#define X(unit)                                                                                    \
    case unit:                                                                                     \
        return kernel_sum_units(t, tile, thread, unit);
        KERNEL_EACH_UNIT(X)
#undef X
    default:
        return kernel_sum_elements(t, tile, thread);
    }
}

/* The task that tile `tile` belongs to, looked for from task `from` on. */
KERNEL_INLINE uint32_t kernel_task_of_tile(const struct kernel_task *tasks, uint32_t from,
                                           uint32_t tile)
{
    while (tile - tasks[from].first_tile >= tasks[from].n_tiles)
        from++;
    return from;
}

/* --- float8 with scales ------------------------------------------------------------------------ */

enum {
    KERNEL_SCALE_UNIT = 8, /* elements that a thread takes of a row: 16 bytes read, 8 written */
    KERNEL_SCALE_COLUMNS = KERNEL_SCALE_BLOCK_SIZE / KERNEL_SCALE_UNIT, /* threads of a row */
    KERNEL_SCALE_STEP = KERNEL_THREADS / KERNEL_SCALE_COLUMNS,          /* rows at once */
    KERNEL_SCALE_ROWS = KERNEL_SCALE_BLOCK_SIZE / KERNEL_SCALE_STEP     /* rows of a thread */
};

#define KERNEL_E4M3_GREATEST 448.0F
#define KERNEL_LEAST_SCALE   UINT32_C(0x00800000) /* 2^-126: no scale is subnormal */

KERNEL_INLINE float kernel_over(float a, float b)
{
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

/* The scale of values up to `amax` (bits of a float32, finite): amax / 448, at least 2^-126; 1 where
 * all are zero. */
KERNEL_INLINE uint32_t kernel_scale_of(uint32_t amax)
{
    if (amax == 0)
        return UINT32_C(0x3F800000);
    uint32_t scale = kernel_bits_of(kernel_over(kernel_float_of(amax), KERNEL_E4M3_GREATEST));
    return scale < KERNEL_LEAST_SCALE ? KERNEL_LEAST_SCALE : scale;
}

KERNEL_INLINE uint32_t kernel_finite_magnitude(uint32_t bfloat16)
{
    uint32_t a = (bfloat16 << 16) & FLOAT32_ABS;
    return a < FLOAT32_INFINITY ? a : 0;
}

/* What a thread holds of one block: its rows' elements, and where they lie. */
struct kernel_scale_part {
    struct kernel_words x[KERNEL_SCALE_ROWS];
    int64_t from, to, scale; /* byte offsets of the thread's first element, and of the scale */
    uint64_t weight;         /* of the outer dims */
    uint64_t row, column;    /* of the thread's first element, within the box */
    uint32_t block_row, block_column;
    uint32_t n_elements; /* of each row: 0 … KERNEL_SCALE_UNIT */
};

KERNEL_INLINE struct kernel_scale_part kernel_scale_place(const struct kernel_scale_task *t,
                                                          uint32_t block, uint32_t thread)
{
    struct kernel_scale_part p;
    uint32_t above = kernel_divide(block, &t->block_columns);
    p.block_column = block - above * t->block_columns.by;
    uint32_t before = kernel_divide(above, &t->block_rows);
    p.block_row = above - before * t->block_rows.by;
    uint32_t n = t->n_outer;
    p.row = (uint64_t)p.block_row * KERNEL_SCALE_BLOCK_SIZE + thread / KERNEL_SCALE_COLUMNS;
    p.column = (uint64_t)p.block_column * KERNEL_SCALE_BLOCK_SIZE +
               thread % KERNEL_SCALE_COLUMNS * KERNEL_SCALE_UNIT;
    p.n_elements = p.column >= t->n_columns ? 0
                   : t->n_columns - p.column < KERNEL_SCALE_UNIT
                       ? (uint32_t)(t->n_columns - p.column)
                       : KERNEL_SCALE_UNIT;
    p.from = (int64_t)p.row * t->from_stride[n] + 2 * (int64_t)p.column;
    p.to = (int64_t)p.row * t->to_stride[n] + (int64_t)p.column;
    p.scale = p.block_row * t->scale_stride[n] + p.block_column * t->scale_stride[n + 1];
    p.weight = 1;
    for (uint32_t d = n; d-- > 0;) {
        uint32_t next = kernel_divide(before, &t->outer[d]), i = before - next * t->outer[d].by;
        p.from += i * t->from_stride[d];
        p.to += i * t->to_stride[d];
        p.scale += i * t->scale_stride[d];
        p.weight *= fingerprint_dim_weight(d, t->offset[d] + i);
        before = next;
    }
    return p;
}

/* n elements of 2 bytes, the rest zero. */
KERNEL_INLINE struct kernel_words kernel_load_some(const char *p, uint32_t n)
{
    struct kernel_words x = {{0, 0, 0, 0}};
    if (n == KERNEL_SCALE_UNIT && ((uintptr_t)p & 15) == 0)
        return kernel_load(p, 16);
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_SCALE_UNIT; i++)
        if (i < n)
            x.w[i / 2] |= (uint32_t)kernel_load_element(p + 2 * i, 2) << (16 * (i % 2));
    return x;
}

/* First half: the elements, and the greatest finite magnitude of the thread's part. */
KERNEL_INLINE uint32_t kernel_scale_read(const struct kernel_scale_task *t,
                                         struct kernel_scale_part *p)
{
    uint32_t amax = 0;
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_SCALE_ROWS; i++) {
        uint64_t row = p->row + i * KERNEL_SCALE_STEP;
        uint32_t n = row < t->n_rows ? p->n_elements : 0;
        p->x[i] = kernel_load_some(
            t->from + p->from + (int64_t)(i * KERNEL_SCALE_STEP) * t->from_stride[t->n_outer], n);
    }
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_SCALE_ROWS; i++)
        KERNEL_UNROLL
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t a = kernel_finite_magnitude(p->x[i].w[k] & 0xFFFF);
        uint32_t b = kernel_finite_magnitude(p->x[i].w[k] >> 16);
        amax = a > amax ? a : amax;
        amax = b > amax ? b : amax;
    }
    return amax;
}

KERNEL_INLINE uint32_t kernel_scaled(uint32_t bfloat16, float scale)
{
    return kernel_cast_e4m3_of_float32(
        kernel_bits_of(kernel_over(kernel_float_of(bfloat16 << 16), scale)));
}

/* Eight elements of one row, scaled: stores them, and returns what they add but for the row. */
KERNEL_INLINE uint64_t kernel_scale_row(const struct kernel_words *x, char *to, uint32_t n,
                                        float scale, uint64_t at)
{
    struct kernel_words y = {{0, 0, 0, 0}};
    uint64_t sum = 0;
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_SCALE_UNIT; i++) {
        uint32_t bits = kernel_scaled((x->w[i / 2] >> (16 * (i % 2))) & 0xFFFF, scale);
        y.w[i / 4] |= bits << (8 * (i % 4));
    }
    if (n == KERNEL_SCALE_UNIT && ((uintptr_t)to & 7) == 0) {
        kernel_store(to, &y, 8);
    } else {
        KERNEL_UNROLL
        for (uint32_t i = 0; i < KERNEL_SCALE_UNIT; i++)
            if (i < n)
                to[i] = (char)(y.w[i / 4] >> (8 * (i % 4)));
    }
    KERNEL_UNROLL
    for (uint32_t w = 0; w < 2; w++) { /* blocks begin at whole words; a row's end may cut one */
        uint32_t here = n < 4 * w ? 0 : n - 4 * w < 4 ? n - 4 * w : 4;
        uint32_t mask = here == 4 ? UINT32_MAX : (UINT32_C(1) << (8 * here)) - 1;
        sum += ((uint64_t)(y.w[w] & mask) + (UINT32_C(0x01010101) & mask)) *
               fingerprint_word_weight(at / 4 + w);
    }
    return sum;
}

/* Second half: writes what the first has read; returns what it adds to the fingerprint. */
KERNEL_INLINE uint64_t kernel_scale_write(const struct kernel_scale_task *t,
                                          const struct kernel_scale_part *p, uint32_t scale)
{
    uint32_t n = t->n_outer;
    uint64_t sum = 0;
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_SCALE_ROWS; i++) {
        uint64_t row = p->row + i * KERNEL_SCALE_STEP;
        if (row < t->n_rows && p->n_elements > 0) {
            char *to = t->to + p->to + (int64_t)(i * KERNEL_SCALE_STEP) * t->to_stride[n];
            uint64_t part = kernel_scale_row(&p->x[i], to, p->n_elements, kernel_float_of(scale),
                                             t->offset[n + 1] + p->column);
            sum += part * p->weight * fingerprint_dim_weight(n, t->offset[n] + row);
        }
    }
    return sum;
}

/* By one thread of the block: writes its scale; returns what that adds to the scales' fingerprint. */
KERNEL_INLINE uint64_t kernel_scale_put(const struct kernel_scale_task *t,
                                        const struct kernel_scale_part *p, uint32_t scale)
{
    uint32_t n = t->n_outer;
    uint64_t row = t->offset[n] / KERNEL_SCALE_BLOCK_SIZE + p->block_row;
    uint64_t column = t->offset[n + 1] / KERNEL_SCALE_BLOCK_SIZE + p->block_column;
    kernel_store_element(t->scale + p->scale, 4, scale);
    return ((uint64_t)scale + 1) * fingerprint_word_weight(column) * p->weight *
           fingerprint_dim_weight(n, row);
}

#endif
