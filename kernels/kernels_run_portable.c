/* Inner loops in plain C, for any CPU. */
#include <string.h>

#include "kernels/kernels_cast.h"
#include "kernels/kernels_run.h"

#include "base/banned.h"

KERNEL_CAST_LOOPS()
KERNEL_WEIGHT_LOOP()

static void copy(void *to, const void *from, size_t n_bytes, bool streaming, const void *ahead)
{
    (void)streaming;
    (void)ahead;
    memcpy(to, from, n_bytes);
}

/* Words are little-endian by definition (fingerprint.h). */
static uint32_t word_at(const void *words, size_t i)
{
    uint32_t word;
    memcpy(&word, (const char *)words + 4 * i, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

static uint64_t sum(const void *words, const uint32_t *w, size_t n, const void *ahead)
{
    (void)ahead;
    uint64_t s = 0;
    for (size_t i = 0; i < n; i++)
        s += (uint64_t)word_at(words, i) * w[i];
    return s;
}

static uint64_t copy_sum(void *to, const void *from, const uint32_t *w, size_t n, bool streaming,
                         const void *ahead)
{
    copy(to, from, 4 * n, streaming, ahead);
    return sum(from, w, n, ahead);
}

static void prefetch(const void *p, size_t n_bytes)
{
    (void)p;
    (void)n_bytes;
}

static void fence(void)
{
}

const struct kernel_runs kernel_runs_portable = {
    .copy = copy,
    .weights = weights,
    .sum = sum,
    .copy_sum = copy_sum,
    .prefetch = prefetch,
    .bfloat16_of_float32 = bfloat16_of_float32,
    .float16_of_float32 = float16_of_float32,
    .e4m3_of_bfloat16 = e4m3_of_bfloat16,
    .fence = fence,
};
