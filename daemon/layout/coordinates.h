/* What a rehearsal moves instead of weights: for each element, bits that follow from its tensor's name, its global
 * coordinates and its dtype. The trainer's framework writes them through its own views of its buffers, the daemon computes
 * from the layout alone what that must come to, and the inference engine looks whether it finds them through its own views.
 * A client in any language can compute them from this text; all arithmetic is unsigned.
 *
 *     mix(h):    h ^= h >> 16; h *= 0x7FEB352D; h ^= h >> 15; h *= 0x846CA68B; h ^= h >> 16            (32 bits)
 *     seed:      h = 0x811C9DC5; for each byte c of the name: h = (h ^ c) * 0x01000193; mix(h)
 *     row:       from the seed, for each dim but the last, from the first on, with coordinate i:
 *                h = mix(h ^ mix(low half of i + 0x9E3779B9)) + high half of i
 *     element:   h = row + (low half of the last coordinate) * 0x9E3779B1 + mix(high half of it);
 *                h ^= h >> 15; h *= 0x85EBCA77; h ^= h >> 13
 *     bits:      floating point: the number (1 + m / 4) * 2^k, negative where bit 31 of h is set, k = bits 28 … 30,
 *                m = bits 26 and 27. Every float dtype has it exactly, so a declared cast changes nothing.
 *                bool: bit 31. Integers of up to 32 bits: the upper bits of h; of 64: h * 2^32 + (h * 0x2545F491 mod 2^32).
 *
 * A tensor of 0 dims has one element with coordinate 0 of its only row. Two elements of floats are alike with a
 * probability of 1/64: an exchange of whole columns shows, that of two single elements nearly always. */
#ifndef RS_LAYOUT_COORDINATES_H
#define RS_LAYOUT_COORDINATES_H

#include <stdint.h>

#include "layout/dtype.h"

uint32_t coordinates_seed(const char *tensor);
/* at: of n_dims - 1 dims (none where n_dims is 0 or 1). */
uint32_t coordinates_row(uint32_t seed, unsigned n_dims, const uint64_t *at);
/* The low bytes are the element's, little-endian. */
uint64_t coordinates_bits(enum dtype dtype, uint32_t row, uint64_t last);
/* n elements of a row from `last` on, one after another. */
void coordinates_run(enum dtype dtype, uint32_t row, uint64_t last, uint64_t n, void *to);

#endif
