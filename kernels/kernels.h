/* Copies of strided boxes, casts and fingerprints: the work of a device, as plain data.
 *
 * kernels_host.c runs it on a CPU thread; kernels_reference.c is the plain twin that tests hold it
 * against. No allocation, no clock, no hidden synchronisation. Base
 * addresses are of the device's address space. Thread: any.
 *
 * Fingerprint: a sum mod 2^64 over elements of (bits of the element, global
 * coordinates), so it may be taken per box, in any order, and added up. The exact function is
 * written in kernels/fingerprint.h, which a client in another language can work from. */
#ifndef RS_KERNELS_KERNELS_H
#define RS_KERNELS_KERNELS_H

#include <stdint.h>

enum { KERNEL_MAX_DIMS = 8, KERNEL_MAX_TARGETS = 16 };

/* One strided piece of memory: element (i_0 … i_n-1) lies at base + Σ i_d · stride_bytes[d]. */
struct kernel_view {
    void *base;
    int64_t stride_bytes[KERNEL_MAX_DIMS];
};

/* Copies one box from one view to one or more (one read, several writes), casting on the way where
 * the dtypes differ, and adding the fingerprint of what is written to *fingerprint where that is
 * not NULL. Views of different targets do not overlap each other or the source. No address needs
 * alignment, no stride an order; casts other than those of dtype_can_cast (layout/dtype.h) are bugs
 * and abort. With n_targets 0 it reads only. */
struct kernel_copy {
    uint64_t size[KERNEL_MAX_DIMS]; /* the box */
    /* global coordinates of its first element: for the fingerprint */
    uint64_t offset[KERNEL_MAX_DIMS];
    struct kernel_view from;
    struct kernel_view to[KERNEL_MAX_TARGETS];
    uint64_t *fingerprint; /* added to (atomically, relaxed), in the written dtype; NULL: none */
    uint32_t n_targets;
    uint8_t n_dims;
    uint8_t from_dtype; /* enum dtype values (layout/dtype.h), known here as numbers */
    uint8_t to_dtype;
    uint8_t streaming; /* 1: the targets are not read again soon (non-temporal stores may pay) */
};

/* Reads one box and adds its fingerprint to *fingerprint (atomically, relaxed). */
struct kernel_fingerprint {
    uint64_t size[KERNEL_MAX_DIMS];
    uint64_t offset[KERNEL_MAX_DIMS];
    struct kernel_view from;
    uint64_t *fingerprint;
    uint8_t n_dims;
    uint8_t dtype;
};

void kernel_copy_host(const struct kernel_copy *c);
void kernel_fingerprint_host(const struct kernel_fingerprint *f);
/* Which instructions they use here: "avx512", "avx2" or "portable". */
const char *kernel_host_name(void);
/* The straightforward scalar twins: what the fast ones are tested against. */
void kernel_copy_reference(const struct kernel_copy *c);
void kernel_fingerprint_reference(const struct kernel_fingerprint *f);

#endif
