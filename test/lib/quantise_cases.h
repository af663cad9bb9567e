/* Random casts with scales: shapes, blocks, windows, strides, alignments, dtypes and odd values. */
#ifndef RS_TEST_QUANTISE_CASES_H
#define RS_TEST_QUANTISE_CASES_H

#include "kernels/kernels_quantise.h"
#include "test/lib/kernel_cases.h"

enum {
    QUANTISE_FROM = 1 << 18,   /* bytes */
    QUANTISE_TO = 9 << 16,     /* bytes */
    QUANTISE_SCALES = 1 << 10, /* numbers */
    QUANTISE_ELEMENTS = 1 << 15
};

/* What one twin writes. */
struct quantise_out {
    uint8_t *to;
    uint32_t *scales;
    uint32_t *amax;
    uint64_t *sum;
};

/* Bits of a float32 of many magnitudes: now and then NaN, infinity, zero, subnormal, the greatest. */
static inline uint32_t odd_float32(uint64_t *seed)
{
    uint64_t r = random_next(seed);
    uint32_t sign = (uint32_t)(r >> 32) & 0x80000000;
    switch (r % 83) {
    case 0:
        return sign | 0x7FC00001;
    case 1:
        return sign | 0x7F800000;
    case 2:
        return sign;
    case 3:
        return sign | ((uint32_t)(r >> 32) & 0x007FFFFF);
    case 4:
        return sign | (r % 5 == 0 ? 0x7F7FFFFF : 0x00000001);
    default:
        return sign | ((uint32_t)(r >> 32) & 0x7FFFFF) | (uint32_t)(100 + (r >> 8) % 40) << 23;
    }
}

static inline void odd_values(uint64_t *seed, uint8_t *at, size_t n_bytes, uint8_t dtype)
{
    uint32_t bytes = kernel_dtype_bytes(dtype);
    unsigned kind = (unsigned)below(seed, 8); /* 0: zeros of both signs; 1: nothing finite */
    for (size_t i = 0; i + bytes <= n_bytes; i += bytes) {
        uint32_t bits = odd_float32(seed);
        bits = kind == 0 ? bits & 0x80000000 : kind == 1 ? bits | 0x7F800000 : bits;
        bits = dtype == KERNEL_BFLOAT16 ? bits >> 16 : bits;
        memcpy(at + i, &bits, bytes);
    }
}

static inline void random_blocks(uint64_t *seed, struct kernel_quantise *q)
{
    switch (below(seed, 4)) {
    case 0:
        q->block_rows = q->block_columns = 128;
        break;
    case 1:
        q->block_rows = q->rows + below(seed, 2);
        q->block_columns = q->columns + below(seed, 500);
        break;
    case 2:
        q->block_rows = 1 + below(seed, 40);
        q->block_columns = 8 * (1 + below(seed, 40));
        break;
    default:
        q->block_rows = 1 + below(seed, q->rows);
        q->block_columns = 1 + below(seed, q->columns);
    }
    while (((q->rows - 1) / q->block_rows + 1) * ((q->columns - 1) / q->block_columns + 1) > 200) {
        q->block_rows *= 2;
        q->block_columns *= 2;
    }
}

static inline void random_window(uint64_t *seed, struct kernel_quantise *q)
{
    q->window_rows = q->rows;
    q->window_columns = q->columns;
    if (below(seed, 3) == 0)
        return;
    q->window_row = below(seed, q->rows);
    q->window_column = below(seed, q->columns);
    q->window_rows = 1 + below(seed, q->rows - q->window_row);
    q->window_columns = 1 + below(seed, q->columns - q->window_column);
    if (below(seed, 4) == 0)
        q->window_rows = 1;
}

/* From values at `from` (QUANTISE_FROM bytes, 64-byte aligned), which it fills, to `out`. */
static inline struct kernel_quantise random_quantise(uint64_t *seed, uint8_t *from,
                                                     const struct quantise_out *out)
{
    struct kernel_quantise q = {.from_dtype =
                                    below(seed, 2) == 0 ? KERNEL_FLOAT32 : KERNEL_BFLOAT16,
                                .streaming = (uint8_t)below(seed, 2),
                                .n_targets = (uint8_t)below(seed, KERNEL_QUANTISE_TARGETS + 1)};
    uint64_t bytes = kernel_dtype_bytes(q.from_dtype), wide = below(seed, 2) == 0 ? 16 : 1;
    q.columns = wide * (1 + below(seed, below(seed, 3) == 0 ? 400 : 20));
    q.rows = 1 + below(seed, below(seed, 3) == 0 ? 300 : 40);
    q.rows = q.rows * q.columns > QUANTISE_ELEMENTS ? 1 + QUANTISE_ELEMENTS / q.columns : q.rows;
    uint64_t pitch = (q.columns + wide * below(seed, 3)) * bytes;
    q.rows = pitch * q.rows > QUANTISE_FROM - 128 ? (QUANTISE_FROM - 128) / pitch : q.rows;
    odd_values(seed, from, QUANTISE_FROM, q.from_dtype);
    uint8_t *first = from + (wide == 16 ? 0 : bytes * below(seed, 16));
    bool upwards = below(seed, 8) == 0; /* rows in falling order */
    q.from = upwards ? first + (q.rows - 1) * pitch : first;
    q.from_stride = upwards ? -(int64_t)pitch : (int64_t)pitch;
    random_blocks(seed, &q);
    random_window(seed, &q);
    uint8_t *to = out->to + (wide == 16 ? 0 : below(seed, 16));
    for (unsigned i = 0; i < q.n_targets; i++) {
        uint64_t stride = q.window_columns + wide * below(seed, 3);
        q.to[i] = (struct kernel_quantise_target){to, (int64_t)stride};
        to += stride * q.window_rows + wide * below(seed, 9);
    }
    q.offset[0] = random_offset(seed);
    q.offset[1] = below(seed, 3) == 0 ? random_offset(seed) : 128 * below(seed, 1000);
    q.fingerprint = below(seed, 3) == 0 ? NULL : out->sum;
    static const uint8_t steps[] = {KERNEL_QUANTISE_BLOCKS, KERNEL_QUANTISE_BLOCKS,
                                    KERNEL_QUANTISE_AMAX, KERNEL_QUANTISE_BY_AMAX};
    q.step = steps[below(seed, sizeof steps)];
    q.amax_bits = q.step == KERNEL_QUANTISE_BLOCKS ? NULL : out->amax;
    q.scales = q.step == KERNEL_QUANTISE_AMAX || below(seed, 4) == 0 ? NULL : out->scales;
    return q;
}

/* The same with its results elsewhere. */
static inline struct kernel_quantise quantise_into(const struct kernel_quantise *q,
                                                   const struct quantise_out *old,
                                                   const struct quantise_out *out)
{
    struct kernel_quantise r = *q;
    for (unsigned i = 0; i < q->n_targets; i++)
        r.to[i].base = out->to + (q->to[i].base - old->to);
    r.scales = q->scales == NULL ? NULL : out->scales;
    r.amax_bits = q->amax_bits == NULL ? NULL : out->amax;
    r.fingerprint = q->fingerprint == NULL ? NULL : out->sum;
    return r;
}

/* `amax`: what is known of a maximum before. */
static inline void quantise_out_reset(const struct quantise_out *out, uint32_t amax)
{
    memset(out->to, POISON, QUANTISE_TO);
    memset(out->scales, POISON, QUANTISE_SCALES * sizeof *out->scales);
    *out->amax = amax;
    *out->sum = 77;
}

static inline bool quantise_out_equal(const struct quantise_out *a, const struct quantise_out *b)
{
    return memcmp(a->to, b->to, QUANTISE_TO) == 0 &&
           memcmp(a->scales, b->scales, QUANTISE_SCALES * sizeof *a->scales) == 0 &&
           *a->amax == *b->amax && *a->sum == *b->sum;
}

/* Of a maximum that may have been found before: zero, or any finite number. */
static inline uint32_t random_amax(uint64_t *seed)
{
    uint32_t bits = odd_float32(seed) & 0x7FFFFFFF;
    return below(seed, 4) == 0 || bits >= 0x7F800000 ? 0 : bits;
}

#endif
