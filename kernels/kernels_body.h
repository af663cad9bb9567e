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

/* What a GPU would fault on shows on a CPU, too. */
KERNEL_INLINE void kernel_must_align(const char *p, const uint32_t n_bytes)
{
    if (((uintptr_t)p & (n_bytes - 1)) != 0)
        __builtin_trap();
}

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
    kernel_must_align(p, n_bytes);
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
    kernel_must_align(p, n_bytes);
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

#endif
