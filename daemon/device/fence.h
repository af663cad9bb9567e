/* A fence that time shuts: who moves bytes looks at it before each chunk.
 *
 * The data plane's lease as its threads see it. Once somebody found it over it stays shut, also
 * where the lease is prolonged meanwhile: what was left out must not be followed by more. The owner
 * opens it again when nothing of before is in flight.
 *
 * What may still land once it is shut: of a host device what a thread was about to store when it was
 * stopped behind its look (one copy, or small ones of 16 KiB together); of a GPU all that its streams were given before, since only the
 * handing over looks here. Both are bounded by what callers keep in flight, and over when that has
 * come back: device_call behind it, device_event_done. Nothing else says so, a device's error not
 * either. A data plane with GPUs that has something in flight FENCE_DRAIN_MS after the fence shut ends
 * itself (exec/watchdog.h), and with the process what its streams had. Who gives up a node for silent
 * must wait that long beyond its lease. */
#ifndef RS_DEVICE_FENCE_H
#define RS_DEVICE_FENCE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"

enum { FENCE_DRAIN_MS = 500 };

struct fence {
    _Atomic uint64_t until_ns; /* monotonic; 0: no end */
    atomic_bool shut;
};

/* Any thread. NULL: there is no fence. */
static inline bool fence_holds(struct fence *f)
{
    if (f == NULL)
        return true;
    uint64_t until = atomic_load_explicit(&f->until_ns, memory_order_relaxed);
    if (until != 0 && clock_mono_ns() >= until)
        atomic_store(&f->shut, true);
    return !atomic_load(&f->shut);
}

/* The owner's thread. */
static inline void fence_prolong(struct fence *f, uint64_t until_ns)
{
    (void)fence_holds(f); /* an end that nobody has noticed yet counts all the same */
    atomic_store(&f->until_ns, until_ns);
}

/* The owner's thread, with nothing in flight: open again, where the lease is not over now. */
static inline void fence_reopen(struct fence *f)
{
    atomic_store(&f->shut, false);
    (void)fence_holds(f);
}

#endif
