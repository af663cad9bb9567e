/* Do strided sets of elements share a byte? Exact, for any strides.
 *
 * Private to memory/. Finding out is a bounded knapsack: is there an index vector that brings two
 * elements close enough? Strides that nest, as tensors in real memory have them, need a few steps;
 * strange ones may need many, so each call draws on the caller's budget of steps. */
#ifndef RS_MEMORY_STRIDED_H
#define RS_MEMORY_STRIDED_H

#include <stdint.h>

#include "layout/box.h"

/* Elements at begin + Σ i_d · stride_bytes[d], 0 <= i_d < size[d]. Spans no more than
 * STRIDED_MAX_BYTES, begin included; sizes and element_bytes are at least 1. */
struct strided {
    uint64_t begin;
    uint64_t size[BOX_MAX_DIMS];
    uint64_t stride_bytes[BOX_MAX_DIMS];
    uint32_t n_dims;
    uint32_t element_bytes;
};

#define STRIDED_MAX_BYTES (UINT64_C(1) << 48)

/* The first byte after the last element; UINT64_MAX where that is beyond STRIDED_MAX_BYTES. */
uint64_t strided_end(const struct strided *s);
/* 1 where two elements share a byte, 0 where none do, RS_EEXHAUSTED where the budget ran out. */
int strided_self_overlap(const struct strided *s, int64_t *budget);
/* The same for an element of a and one of b. */
int strided_overlap(const struct strided *a, const struct strided *b, int64_t *budget);

#endif
