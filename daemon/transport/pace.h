/* Holds a device's traffic to a set rate: each port (one direction of one tier) is reserved for the
 * time that a chunk takes, and the chunk may go when its port has passed it. Pure. */
#ifndef RS_TRANSPORT_PACE_H
#define RS_TRANSPORT_PACE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    PACE_LEAST_BYTES = 16 << 10,
    PACE_CHUNK_US = 500, /* of a paced port's time: how finely messages share it */
    PACE_BURST_US = 1000 /* an idle port may catch up this much: a late wake-up costs no rate */
};

enum pace_direction { PACE_EGRESS, PACE_INGRESS };

struct pace {
    uint64_t free_ns[2][2]; /* [direction][network]: reserved up to here, monotonic */
};

/* How many of `left` bytes go at once: at most `most`; rate 0: not limited. */
static inline uint64_t pace_chunk(double bytes_per_s, uint64_t left, uint64_t most)
{
    uint64_t chunk = most;
    if (bytes_per_s > 0 && bytes_per_s * PACE_CHUNK_US / 1e6 < (double)chunk)
        chunk = (uint64_t)(bytes_per_s * PACE_CHUNK_US / 1e6);
    if (chunk < PACE_LEAST_BYTES)
        chunk = PACE_LEAST_BYTES;
    return left < chunk ? left : chunk;
}

/* Takes the port for `bytes` from its first free time on; returns when it has passed them. */
static inline uint64_t pace_reserve(struct pace *p, enum pace_direction direction, bool network,
                                    double bytes_per_s, uint64_t bytes, uint64_t now_ns)
{
    uint64_t *free_ns = &p->free_ns[direction][network];
    uint64_t earliest = now_ns - PACE_BURST_US * UINT64_C(1000);
    if (bytes_per_s <= 0)
        return now_ns;
    *free_ns =
        (*free_ns > earliest ? *free_ns : earliest) + (uint64_t)((double)bytes / bytes_per_s * 1e9);
    return *free_ns;
}

#endif
