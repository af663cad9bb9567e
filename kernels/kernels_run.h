/* The inner loops of kernels_host.c, one set per instruction set, chosen at run time.
 *
 * Each works on one contiguous run; no pointer needs alignment. Weights are those of fingerprint.h.
 * `ahead` is where the next run starts, which is prefetched meanwhile (hardware loses the thread at
 * the end of a row; measured: sums of strided rows 1.2 to 1.6 times as fast); it need not be
 * readable; NULL: none. Thread: any. */
#ifndef RS_KERNELS_KERNELS_RUN_H
#define RS_KERNELS_KERNELS_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

enum kernel_isa { KERNEL_ISA_PORTABLE, KERNEL_ISA_AVX2, KERNEL_ISA_AVX512, KERNEL_N_ISAS };

struct kernel_runs {
    /* Copies n bytes. streaming: non-temporal stores where the run is long enough for them. */
    void (*copy)(void *to, const void *from, size_t n_bytes, bool streaming, const void *ahead);
    /* Fills ret[i] = W(q + i); returns their sum. */
    uint64_t (*weights)(uint32_t *ret, uint64_t q, size_t n);
    /* Σ word_i · w[i], words in host order (little-endian). */
    uint64_t (*sum)(const void *words, const uint32_t *w, size_t n, const void *ahead);
    /* Both at once: one read. */
    uint64_t (*copy_sum)(void *to, const void *from, const uint32_t *w, size_t n, bool streaming,
                         const void *ahead);
    /* Asks for n bytes to be brought near. */
    void (*prefetch)(const void *p, size_t n_bytes);
    void (*bfloat16_of_float32)(uint16_t *to, const void *from, size_t n);
    void (*float16_of_float32)(uint16_t *to, const void *from, size_t n);
    void (*e4m3_of_bfloat16)(uint8_t *to, const void *from, size_t n);
    /* After streaming stores: orders them before what follows. */
    void (*fence)(void);
};

/* The best that this CPU has. */
enum kernel_isa kernel_isa_best(void);
/* NULL where this CPU (or build) has not got it. PORTABLE is always there. */
const struct kernel_runs *kernel_runs(enum kernel_isa isa);

/* For tests and benchmarks: the fast twins with a given instruction set. */
void kernel_copy_with(const struct kernel_copy *c, const struct kernel_runs *runs);
void kernel_fingerprint_with(const struct kernel_fingerprint *f, const struct kernel_runs *runs);

extern const struct kernel_runs kernel_runs_portable;
#if defined(__x86_64__)
extern const struct kernel_runs kernel_runs_avx2;
extern const struct kernel_runs kernel_runs_avx512;
#endif

#endif
