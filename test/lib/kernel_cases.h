/* Random copies of strided boxes: shapes, strides, alignments, dtypes and coordinates. */
#ifndef RS_TEST_KERNEL_CASES_H
#define RS_TEST_KERNEL_CASES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "kernels/kernels.h"
#include "kernels/kernels_dtype.h"

enum { ARENA_BYTES = 1 << 17, POISON = 0xA5 };

static inline uint64_t below(uint64_t *seed, uint64_t n)
{
    return random_next(seed) % n;
}

static inline void fill(uint64_t *seed, uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)random_next(seed);
}

/* Strides for a box of `size`: dims in a random memory order, with random gaps; returns the bytes
 * that it spans. */
static inline uint64_t random_strides(uint64_t *seed, const uint64_t *size, unsigned n_dims,
                                      uint32_t element_bytes, int64_t *ret_stride)
{
    unsigned order[KERNEL_MAX_DIMS];
    uint64_t span = element_bytes;
    bool shuffled = below(seed, 4) == 0, gaps = below(seed, 2) == 0;
    for (unsigned i = 0; i < n_dims; i++)
        order[i] = n_dims - 1 - i;
    for (unsigned i = n_dims; shuffled && i > 1; i--) {
        unsigned k = (unsigned)below(seed, i), o = order[i - 1];
        order[i - 1] = order[k];
        order[k] = o;
    }
    for (unsigned i = 0; i < n_dims; i++) {
        if (gaps && below(seed, 3) == 0)
            span += below(seed, 9);
        ret_stride[order[i]] = (int64_t)span;
        span *= size[order[i]];
    }
    return span + element_bytes;
}

static inline void random_size(uint64_t *seed, unsigned n_dims, uint64_t *ret_size)
{
    uint64_t budget = 1 + below(seed, 3000);
    for (unsigned d = n_dims; d-- > 0;) {
        ret_size[d] = 1 + below(seed, below(seed, 3) == 0 ? budget : budget < 9 ? budget : 9);
        budget /= ret_size[d];
        budget = budget == 0 ? 1 : budget;
    }
    if (n_dims > 0 && below(seed, 40) == 0)
        ret_size[below(seed, n_dims)] = 0;
}

static inline void random_dtypes(uint64_t *seed, uint8_t *ret_from, uint8_t *ret_to)
{
    static const uint8_t casts[][2] = {{KERNEL_FLOAT32, KERNEL_BFLOAT16},
                                       {KERNEL_FLOAT32, KERNEL_FLOAT16},
                                       {KERNEL_BFLOAT16, KERNEL_FLOAT8_E4M3FN}};
    if (below(seed, 3) == 0) {
        uint64_t i = below(seed, 3);
        *ret_from = casts[i][0];
        *ret_to = casts[i][1];
        return;
    }
    *ret_from = *ret_to = (uint8_t)(1 + below(seed, KERNEL_DTYPE_END - 1));
}

/* Coordinates small, large, and across the 2^31st word of a row. */
static inline uint64_t random_offset(uint64_t *seed)
{
    switch (below(seed, 4)) {
    case 0:
        return 0;
    case 1:
        return below(seed, 100);
    case 2:
        return (UINT64_C(1) << (31 + below(seed, 3))) - below(seed, 50);
    default:
        return below(seed, UINT64_C(1) << 40);
    }
}

struct arenas {
    uint8_t *from;
    uint8_t *to[2]; /* fast, reference */
};

/* A random copy whose views lie in `a`; targets one after another. */
static inline struct kernel_copy random_copy(uint64_t *seed, struct arenas *a)
{
    struct kernel_copy c = {.n_dims = (uint8_t)below(seed, KERNEL_MAX_DIMS + 1),
                            .n_targets = (uint32_t)(1 + below(seed, 3)),
                            .streaming = (uint8_t)below(seed, 2)};
    random_dtypes(seed, &c.from_dtype, &c.to_dtype);
    random_size(seed, c.n_dims, c.size);
    for (unsigned d = 0; d < c.n_dims; d++)
        c.offset[d] = random_offset(seed);
    uint64_t from_span = random_strides(seed, c.size, c.n_dims, kernel_dtype_bytes(c.from_dtype),
                                        c.from.stride_bytes);
    c.from.base = a->from + below(seed, 70);
    uint64_t at = below(seed, 70);
    for (uint32_t t = 0; t < c.n_targets; t++) {
        uint64_t span = random_strides(seed, c.size, c.n_dims, kernel_dtype_bytes(c.to_dtype),
                                       c.to[t].stride_bytes);
        c.to[t].base = a->to[0] + at;
        at += span + below(seed, 70);
    }
    if (at > ARENA_BYTES || from_span + 70 > ARENA_BYTES)
        c.size[0] = 0;
    return c;
}

static inline struct arenas arenas_new(uint64_t *seed)
{
    struct arenas a = {calloc(1, ARENA_BYTES),
                       {aligned_alloc(64, ARENA_BYTES), aligned_alloc(64, ARENA_BYTES)}};
    fill(seed, a.from, ARENA_BYTES);
    return a;
}

static inline void arenas_free(struct arenas *a)
{
    free(a->from);
    free(a->to[0]);
    free(a->to[1]);
}

#endif
