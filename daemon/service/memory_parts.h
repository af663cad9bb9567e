/* GPU memory of a client that is several VMM allocations (memory/memory_socket.h): what it says of them, and which of its
 * segments share some.
 *
 * Two segments of one client may have allocations in common: a tensor ends in the middle of one, where the next begins.
 * Such segments are places in one memory, whose addresses are counted from a common origin. Loop thread only. */
#ifndef RS_SERVICE_MEMORY_PARTS_H
#define RS_SERVICE_MEMORY_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "memory/memory_socket.h"

/* Reads the table: n parts, which are so many bytes together; mem_free it. RS_EINVAL: it is no sealed memfd, not of this
 * many parts, a part of 0 bytes, or another sum. */
int memory_parts_read(int table, uint32_t n, uint64_t allocation_bytes, struct memory_part **ret,
                      struct err *e);

/* Where a segment's allocations lie: the first one's beginning is at `base` of `memory`. */
struct memory_place {
    const struct memory_part *parts;
    uint32_t n_parts;
    uint64_t memory, base;
};

/* Gives `one` a place that agrees with the others' (of the same client): in the memory of those that have an allocation of its
 * own, else in `fresh`, which none has. Others may get another place, with it. RS_EINVAL: they say of an allocation what can't be true
 * together. */
int memory_place_find(struct memory_place *one, struct memory_place *const *others, size_t n_others,
                      uint64_t fresh, struct err *e);

#endif
