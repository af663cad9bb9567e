/* Host memory near a GPU: which NUMA node that is, and asking the kernel for it. Private to device/.
 *
 * Hints all of them: where the kernel can't or may not, memory stays where it is. By syscall: libnuma
 * is not needed. */
#ifndef RS_DEVICE_NUMA_H
#define RS_DEVICE_NUMA_H

#include <stddef.h>

/* The node of the PCI device ("0000:3b:00.0", any case); -1: the machine has one node, or does not say.
 * sys: "/sys". */
int numa_node_of(const char *sys, const char *bus_id);
/* Pages of the mapping that are not there yet come from `node` where it has some, and those that are
 * there move, as far as nobody else has them mapped. Nothing for node -1. */
void numa_prefer(void *p, size_t bytes, int node);
/* What the calling thread allocates from now on prefers `node`; -1: as the kernel likes (the default). */
void numa_thread_prefers(int node);

#endif
