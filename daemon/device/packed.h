/* Kernel copies and fingerprints as a stream's queue keeps them: without the room for dims and targets that are not there.
 *
 * A struct kernel_copy has room for KERNEL_MAX_TARGETS views of KERNEL_MAX_DIMS strides, fifteen times what the usual copy
 * needs. What is queued is written by one thread and read by another, so its size is time where boxes are small. Private to
 * device/. */
#ifndef RS_DEVICE_PACKED_H
#define RS_DEVICE_PACKED_H

#include <string.h>

#include "kernels/kernels.h"

/* Then size and offset, and the strides of `from`; and of each target its base and strides: packed_numbers each. */
struct packed_copy {
    uint64_t *fingerprint;
    void *from;
    uint32_t n_targets;
    uint8_t n_dims, from_dtype, to_dtype, streaming;
};

/* Then size, offset and strides. */
struct packed_fingerprint {
    uint64_t *fingerprint;
    void *from;
    uint32_t n_dims, dtype;
};

_Static_assert(sizeof(struct packed_copy) % sizeof(uint64_t) == 0, "packed copies stay aligned");
_Static_assert(sizeof(struct packed_fingerprint) % sizeof(uint64_t) == 0, "and fingerprints, too");

/* How many numbers are kept for n dims: of few sizes, so that they are copied in a step. */
static inline unsigned packed_numbers(unsigned n_dims)
{
    return n_dims <= 2 ? 2 : n_dims <= 4 ? 4 : KERNEL_MAX_DIMS;
}

/* n of packed_numbers, of 8 bytes each. */
static inline void packed_move(void *to, const void *from, unsigned n)
{
    if (n == 2)
        memcpy(to, from, 2 * sizeof(uint64_t));
    else if (n == 4)
        memcpy(to, from, 4 * sizeof(uint64_t));
    else
        memcpy(to, from, KERNEL_MAX_DIMS * sizeof(uint64_t));
}

static inline char *packed_put(char *at, const void *from, unsigned n)
{
    packed_move(at, from, n);
    return at + n * sizeof(uint64_t);
}

static inline const char *packed_take(const char *at, void *to, unsigned n)
{
    packed_move(to, at, n);
    return at + n * sizeof(uint64_t);
}

static inline size_t packed_bytes(const struct kernel_copy *c)
{
    unsigned n = packed_numbers(c->n_dims);
    return sizeof(struct packed_copy) + (3U * n + c->n_targets * (1U + n)) * sizeof(uint64_t);
}

static inline char *pack_copy(char *at, const struct kernel_copy *c)
{
    const struct packed_copy p = {.fingerprint = c->fingerprint,
                                  .from = c->from.base,
                                  .n_targets = c->n_targets,
                                  .n_dims = c->n_dims,
                                  .from_dtype = c->from_dtype,
                                  .to_dtype = c->to_dtype,
                                  .streaming = c->streaming};
    unsigned n = packed_numbers(c->n_dims);
    memcpy(at, &p, sizeof p);
    at += sizeof p;
    at = packed_put(at, c->size, n);
    at = packed_put(at, c->offset, n);
    at = packed_put(at, c->from.stride_bytes, n);
    for (uint32_t i = 0; i < c->n_targets; i++) {
        memcpy(at, &c->to[i].base, sizeof c->to[i].base);
        at += sizeof c->to[i].base;
        at = packed_put(at, c->to[i].stride_bytes, n);
    }
    return at;
}

/* Of *c's arrays what is far beyond the dims and targets that there are is not written. */
static inline const char *unpack_copy(const char *at, struct kernel_copy *c)
{
    struct packed_copy p;
    memcpy(&p, at, sizeof p);
    at += sizeof p;
    unsigned n = packed_numbers(p.n_dims);
    c->fingerprint = p.fingerprint;
    c->from.base = p.from;
    c->n_targets = p.n_targets;
    c->n_dims = p.n_dims;
    c->from_dtype = p.from_dtype;
    c->to_dtype = p.to_dtype;
    c->streaming = p.streaming;
    at = packed_take(at, c->size, n);
    at = packed_take(at, c->offset, n);
    at = packed_take(at, c->from.stride_bytes, n);
    for (uint32_t i = 0; i < p.n_targets; i++) {
        memcpy(&c->to[i].base, at, sizeof c->to[i].base);
        at += sizeof c->to[i].base;
        at = packed_take(at, c->to[i].stride_bytes, n);
    }
    return at;
}

static inline size_t packed_fingerprint_bytes(const struct kernel_fingerprint *f)
{
    return sizeof(struct packed_fingerprint) + 3U * packed_numbers(f->n_dims) * sizeof(uint64_t);
}

static inline char *pack_fingerprint(char *at, const struct kernel_fingerprint *f)
{
    const struct packed_fingerprint p = {.fingerprint = f->fingerprint,
                                         .from = f->from.base,
                                         .n_dims = f->n_dims,
                                         .dtype = f->dtype};
    unsigned n = packed_numbers(f->n_dims);
    memcpy(at, &p, sizeof p);
    at += sizeof p;
    at = packed_put(at, f->size, n);
    at = packed_put(at, f->offset, n);
    return packed_put(at, f->from.stride_bytes, n);
}

/* As unpack_copy. */
static inline const char *unpack_fingerprint(const char *at, struct kernel_fingerprint *f)
{
    struct packed_fingerprint p;
    memcpy(&p, at, sizeof p);
    at += sizeof p;
    unsigned n = packed_numbers(p.n_dims);
    f->fingerprint = p.fingerprint;
    f->from.base = p.from;
    f->n_dims = (uint8_t)p.n_dims;
    f->dtype = (uint8_t)p.dtype;
    at = packed_take(at, f->size, n);
    at = packed_take(at, f->offset, n);
    return packed_take(at, f->from.stride_bytes, n);
}

#endif
