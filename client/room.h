/* How much memory can still be had, before a segment's pages are taken: a tmpfs page that does not
 * fit ends in the OOM killer, of this process or of another one, never in an error.
 *
 * For segment.c; any thread, no state. */
#ifndef RS_CLIENT_ROOM_H
#define RS_CLIENT_ROOM_H

#include <stdint.h>

#include "base/err.h"

/* Whether `bytes` more can be had: MemAvailable of the machine, and what is left below the memory
 * limit of this process's cgroup and of each one above it (v1 and v2; page cache counts as left:
 * the kernel drops it first). A 32nd stays free for everything else. 0 also where the kernel tells
 * none of this. RS_EEXHAUSTED names the limit and what is left of it. `root` is put before /proc
 * and /sys: "" but in tests. */
int room_check(const char *root, uint64_t bytes, struct err *e);

#endif
