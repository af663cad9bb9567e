/* What one thread of the kernel for casts with scales does: the same text for nvcc and for a C
 * compiler, as kernels_body.h.
 *
 * A block of threads takes one block of elements at a time: reads it and finds the greatest finite
 * magnitude, all its threads together; then writes it by the scale of that. What fits into
 * registers between the two (a bfloat16 block of 128 × 128 does) is read once, and anything larger
 * again, from a cache. */
#ifndef RS_KERNELS_KERNELS_QUANTISE_BODY_H
#define RS_KERNELS_KERNELS_QUANTISE_BODY_H

#include "kernels/kernels_body.h"
#include "kernels/kernels_quantise.h"

enum {
    KERNEL_QUANTISE_UNIT = 8, /* elements of a row: 16 or 32 bytes read, 8 written */
    KERNEL_QUANTISE_KEEP = 8, /* units that a thread has in registers, at most */
};

/* So many registers of elements; units of a block of threads. */
KERNEL_INLINE uint32_t kernel_quantise_keep(const uint32_t n_bytes)
{
    return KERNEL_QUANTISE_KEEP * 2 / n_bytes;
}

KERNEL_INLINE uint32_t kernel_quantise_pass_units(const uint32_t n_bytes)
{
    return kernel_quantise_keep(n_bytes) * KERNEL_THREADS;
}

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

/* Of a float32's bits; 0 where it is not finite. */
KERNEL_INLINE uint32_t kernel_finite_magnitude(uint32_t u)
{
    uint32_t a = u & FLOAT32_ABS;
    return a < FLOAT32_INFINITY ? a : 0;
}

KERNEL_INLINE uint8_t kernel_scaled(uint32_t u, float scale)
{
    return kernel_cast_e4m3_of_float32(kernel_bits_of(kernel_over(kernel_float_of(u), scale)));
}

/* --- one block of elements ---------------------------------------------------------------------- */

struct kernel_quantise_block {
    uint32_t row, column; /* of its first element, within what is read */
    uint32_t rows, columns;
    uint32_t number; /* within the task */
};

KERNEL_INLINE uint32_t kernel_least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

KERNEL_INLINE struct kernel_quantise_block
kernel_quantise_block_of(const struct kernel_quantise_task *t, uint32_t number)
{
    struct kernel_quantise_block b;
    uint32_t above = kernel_divide(number, &t->across);
    b.number = number;
    b.row = above * t->block_rows;
    b.column = (number - above * t->across.by) * t->block_columns;
    b.rows = kernel_least(t->block_rows, t->rows - b.row);
    b.columns = kernel_least(t->block_columns, t->columns - b.column);
    return b;
}

KERNEL_INLINE uint32_t kernel_quantise_units(const struct kernel_quantise_task *t,
                                             const struct kernel_quantise_block *b)
{
    return b->rows * t->units.by;
}

/* Eight elements of a row, as they lie in memory. */
struct kernel_eight {
    uint32_t w[KERNEL_QUANTISE_UNIT];
};

/* n of them, at any address of an element; the rest zero. */
KERNEL_INLINE struct kernel_eight kernel_load_eight(const char *p, uint32_t n,
                                                    const uint32_t n_bytes)
{
    struct kernel_eight x = {{0, 0, 0, 0, 0, 0, 0, 0}};
    if (n == KERNEL_QUANTISE_UNIT && ((uintptr_t)p & 15) == 0) {
        KERNEL_UNROLL
        for (uint32_t i = 0; i < n_bytes / 2; i++) {
            struct kernel_words part = kernel_load(p + 16 * i, 16);
            KERNEL_UNROLL
            for (uint32_t k = 0; k < 4; k++)
                x.w[4 * i + k] = part.w[k];
        }
        return x;
    }
    KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_QUANTISE_UNIT; i++)
        if (i < n) {
            uint32_t u = (uint32_t)kernel_load_element(p + n_bytes * i, n_bytes);
            x.w[n_bytes == 4 ? i : i / 2] |= n_bytes == 4 ? u : u << (16 * (i % 2));
        }
    return x;
}

/* Element i as a float32's bits. */
KERNEL_INLINE uint32_t kernel_of_eight(const struct kernel_eight *x, const uint32_t i,
                                       const uint32_t n_bytes)
{
    return n_bytes == 4 ? x->w[i] : (x->w[i / 2] >> (16 * (i % 2))) << 16;
}

/* Where unit `unit` of a block lies, and how much of it there is. */
struct kernel_quantise_unit {
    uint32_t row, column; /* within what is read */
    uint32_t n;           /* 0: nothing, it lies behind the block's last column */
};

KERNEL_INLINE struct kernel_quantise_unit
kernel_quantise_unit_of(const struct kernel_quantise_task *t, const struct kernel_quantise_block *b,
                        uint32_t unit)
{
    struct kernel_quantise_unit u;
    uint32_t row = kernel_divide(unit, &t->units);
    uint32_t column = (unit - row * t->units.by) * KERNEL_QUANTISE_UNIT;
    u.row = b->row + row;
    u.column = b->column + column;
    u.n = column >= b->columns ? 0 : kernel_least(b->columns - column, KERNEL_QUANTISE_UNIT);
    return u;
}

/* One pass over part of a block: the units that a thread holds. */
struct kernel_quantise_pass {
    struct kernel_eight x[KERNEL_QUANTISE_KEEP];
};

/* Loads units first, first + KERNEL_THREADS, …; returns the greatest finite magnitude in them. */
KERNEL_INLINE uint32_t kernel_quantise_read(const struct kernel_quantise_task *t,
                                            const struct kernel_quantise_block *b, uint32_t first,
                                            struct kernel_quantise_pass *pass,
                                            const uint32_t n_bytes)
{
    uint32_t n_units = kernel_quantise_units(t, b), amax = 0;
    KERNEL_UNROLL
    for (uint32_t k = 0; k < kernel_quantise_keep(n_bytes); k++) {
        uint32_t unit = first + k * KERNEL_THREADS;
        struct kernel_quantise_unit u = kernel_quantise_unit_of(t, b, unit < n_units ? unit : 0);
        const char *p = t->from + u.row * t->from_stride + (uint64_t)u.column * n_bytes;
        pass->x[k] = kernel_load_eight(p, unit < n_units ? u.n : 0, n_bytes);
    }
    KERNEL_UNROLL
    for (uint32_t k = 0; k < kernel_quantise_keep(n_bytes); k++)
        KERNEL_UNROLL
    for (uint32_t i = 0; i < KERNEL_QUANTISE_UNIT; i++) {
        uint32_t a = kernel_finite_magnitude(kernel_of_eight(&pass->x[k], i, n_bytes));
        amax = a > amax ? a : amax;
    }
    return amax;
}

/* A unit in float8 to where it goes: elements [begin, end) of it. */
KERNEL_INLINE void kernel_quantise_put(const struct kernel_quantise_task *t,
                                       const struct kernel_quantise_unit *u,
                                       const struct kernel_words *y, uint32_t begin, uint32_t end)
{
    KERNEL_ROLLED
    for (uint32_t i = 0; i < t->n_targets; i++) {
        char *to = t->to[i] + (int64_t)(u->row - t->row) * t->to_stride[i] +
                   ((int64_t)u->column - (int64_t)t->column);
        if (begin == 0 && end == KERNEL_QUANTISE_UNIT && ((uintptr_t)to & 7) == 0) {
            kernel_store(to, y, 8);
        } else {
            KERNEL_UNROLL
            for (uint32_t k = 0; k < KERNEL_QUANTISE_UNIT; k++)
                if (begin <= k && k < end)
                    to[k] = (char)(y->w[k / 4] >> (8 * (k % 4)));
        }
    }
}

/* What elements [begin, end) of a unit in float8 add. */
KERNEL_INLINE uint64_t kernel_quantise_sum(const struct kernel_quantise_task *t,
                                           const struct kernel_quantise_unit *u,
                                           const struct kernel_words *y, uint32_t begin,
                                           uint32_t end)
{
    uint64_t at = t->offset[1] + u->column, sum = 0;
    if (begin == 0 && end == KERNEL_QUANTISE_UNIT && at % 4 == 0) {
        KERNEL_UNROLL
        for (uint32_t w = 0; w < 2; w++)
            sum += ((uint64_t)y->w[w] + UINT32_C(0x01010101)) * fingerprint_word_weight(at / 4 + w);
    } else {
        KERNEL_UNROLL
        for (uint32_t k = 0; k < KERNEL_QUANTISE_UNIT; k++)
            if (begin <= k && k < end)
                sum += kernel_element_sum(y->w[k / 4] >> (8 * (k % 4)) & 0xFF, 1, at + k);
    }
    return sum * fingerprint_dim_weight(0, t->offset[0] + u->row);
}

/* Writes what kernel_quantise_read has loaded, as far as it lies in the window; returns what it adds
 * to the fingerprint. */
KERNEL_INLINE uint64_t kernel_quantise_write(const struct kernel_quantise_task *t,
                                             const struct kernel_quantise_block *b, uint32_t first,
                                             const struct kernel_quantise_pass *pass, float scale,
                                             const uint32_t n_bytes)
{
    uint32_t n_units = kernel_quantise_units(t, b);
    uint64_t sum = 0;
    KERNEL_UNROLL
    for (uint32_t k = 0; k < kernel_quantise_keep(n_bytes); k++) {
        uint32_t unit = first + k * KERNEL_THREADS;
        if (unit >= n_units)
            break;
        struct kernel_quantise_unit u = kernel_quantise_unit_of(t, b, unit);
        uint32_t begin = u.column < t->column ? t->column - u.column : 0;
        uint32_t end = u.column >= t->column_end ? 0 : kernel_least(t->column_end - u.column, u.n);
        if (u.row < t->row || u.row >= t->row_end || begin >= end)
            continue;
        struct kernel_words y = {{0, 0, 0, 0}};
        KERNEL_UNROLL
        for (uint32_t i = 0; i < KERNEL_QUANTISE_UNIT; i++)
            y.w[i / 4] |= (uint32_t)kernel_scaled(kernel_of_eight(&pass->x[k], i, n_bytes), scale)
                          << (8 * (i % 4));
        kernel_quantise_put(t, &u, &y, begin, end);
        if (t->sum != NULL)
            sum += kernel_quantise_sum(t, &u, &y, begin, end);
    }
    return sum;
}

/* True where nothing is made of the block but its magnitude or its scale. */
KERNEL_INLINE int kernel_quantise_outside(const struct kernel_quantise_task *t,
                                          const struct kernel_quantise_block *b)
{
    return b->row >= t->row_end || b->row + b->rows <= t->row || b->column >= t->column_end ||
           b->column + b->columns <= t->column;
}

/* The task that block `block` of a batch belongs to, looked for from task `from` on. */
KERNEL_INLINE uint32_t kernel_quantise_task_of_block(const struct kernel_quantise_task *tasks,
                                                     uint32_t from, uint32_t block)
{
    while (block - tasks[from].first_block >= tasks[from].n_blocks)
        from++;
    return from;
}

#endif
