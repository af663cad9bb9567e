/* Kernel copies as a stream's queue keeps them: without the room for targets that are not there.
 *
 * A struct kernel_copy has room for KERNEL_MAX_TARGETS, five times what the usual copy needs.
 * Private to device/. */
#ifndef RS_DEVICE_PACKED_H
#define RS_DEVICE_PACKED_H

#include <string.h>

#include "kernels/kernels.h"

/* n_targets views follow. */
struct packed_copy {
    uint64_t size[KERNEL_MAX_DIMS], offset[KERNEL_MAX_DIMS];
    uint64_t *fingerprint;
    struct kernel_view from;
    uint32_t n_targets;
    uint8_t n_dims, from_dtype, to_dtype, streaming;
};

_Static_assert(sizeof(struct packed_copy) % sizeof(uint64_t) == 0, "packed copies stay aligned");
_Static_assert(sizeof(struct kernel_view) % sizeof(uint64_t) == 0, "packed views stay aligned");

static inline size_t packed_bytes(const struct kernel_copy *c)
{
    return sizeof(struct packed_copy) + c->n_targets * sizeof *c->to;
}

static inline char *pack_copy(char *at, const struct kernel_copy *c)
{
    struct packed_copy p = {.fingerprint = c->fingerprint,
                            .from = c->from,
                            .n_targets = c->n_targets,
                            .n_dims = c->n_dims,
                            .from_dtype = c->from_dtype,
                            .to_dtype = c->to_dtype,
                            .streaming = c->streaming};
    memcpy(p.size, c->size, sizeof p.size);
    memcpy(p.offset, c->offset, sizeof p.offset);
    memcpy(at, &p, sizeof p);
    memcpy(at + sizeof p, c->to, c->n_targets * sizeof *c->to);
    return at + packed_bytes(c);
}

static inline const char *unpack_copy(const char *at, struct kernel_copy *c)
{
    struct packed_copy p;
    memcpy(&p, at, sizeof p);
    c->fingerprint = p.fingerprint;
    c->from = p.from;
    c->n_targets = p.n_targets;
    c->n_dims = p.n_dims;
    c->from_dtype = p.from_dtype;
    c->to_dtype = p.to_dtype;
    c->streaming = p.streaming;
    memcpy(c->size, p.size, sizeof p.size);
    memcpy(c->offset, p.offset, sizeof p.offset);
    memcpy(c->to, at + sizeof p, p.n_targets * sizeof *c->to);
    return at + packed_bytes(c);
}

#endif
