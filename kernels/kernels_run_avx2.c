/* Inner loops for AVX2: 32 bytes at a time. The file is built for the baseline; only the functions
 * marked TARGET use AVX2, and only after kernel_runs has asked the CPU. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "kernels/kernels_cast.h"
#include "kernels/kernels_run.h"

#include "base/banned.h"

#define TARGET __attribute__((target("avx2")))

KERNEL_CAST_LOOPS(TARGET)
KERNEL_WEIGHT_LOOP(TARGET)

/* Below this a run's ends, which can't be streamed, weigh more than what streaming saves. */
enum { STREAM_LEAST_BYTES = 192, LINE_BYTES = 64 };

/* Bytes up to the next cache line of `p`. */
static size_t to_line(const void *p)
{
    return (size_t)(-(uintptr_t)p & (LINE_BYTES - 1));
}

TARGET static void stream_lines(char *to, const char *from, size_t n_lines, const char *ahead)
{
    for (size_t i = 0; i < n_lines; i++) {
        _mm_prefetch(ahead + 64 * i, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(from + 64 * i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from + 64 * i + 32));
        _mm256_stream_si256((__m256i *)(void *)(to + 64 * i), a);
        _mm256_stream_si256((__m256i *)(void *)(to + 64 * i + 32), b);
    }
}

static void copy(void *to, const void *from, size_t n_bytes, bool streaming, const void *ahead)
{
    if (!streaming || n_bytes < STREAM_LEAST_BYTES) {
        memcpy(to, from, n_bytes);
        return;
    }
    size_t head = to_line(to), n_lines = (n_bytes - head) / LINE_BYTES;
    size_t tail = head + n_lines * LINE_BYTES;
    memcpy(to, from, head);
    stream_lines((char *)to + head, (const char *)from + head, n_lines,
                 ahead == NULL ? from : ahead);
    memcpy((char *)to + tail, (const char *)from + tail, n_bytes - tail);
}

struct sums {
    __m256i even, odd;
};

TARGET KERNEL_INLINE void add_words(struct sums *s, __m256i x, const uint32_t *w)
{
    __m256i weight = _mm256_loadu_si256((const __m256i *)(const void *)w);
    s->even = _mm256_add_epi64(s->even, _mm256_mul_epu32(x, weight));
    s->odd = _mm256_add_epi64(
        s->odd, _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(weight, 32)));
}

TARGET KERNEL_INLINE uint64_t total(const struct sums *s)
{
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)(void *)lanes, _mm256_add_epi64(s->even, s->odd));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

KERNEL_INLINE uint64_t scalar_sum(const char *words, const uint32_t *w, size_t n)
{
    uint64_t s = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t word;
        memcpy(&word, words + 4 * i, sizeof word);
        s += (uint64_t)word * w[i];
    }
    return s;
}

TARGET static uint64_t sum(const void *words, const uint32_t *w, size_t n, const void *ahead)
{
    const char *p = words, *next = ahead == NULL ? words : ahead;
    struct sums s = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_prefetch(next + 4 * i, _MM_HINT_T0);
        add_words(&s, _mm256_loadu_si256((const __m256i *)(const void *)(p + 4 * i)), w + i);
    }
    return total(&s) + scalar_sum(p + 4 * i, w + i, n - i);
}

/* Whole lines to an aligned target. */
TARGET static uint64_t stream_sum(char *to, const char *from, const uint32_t *w, size_t n_lines,
                                  const char *ahead)
{
    struct sums s = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (size_t i = 0; i < n_lines; i++) {
        _mm_prefetch(ahead + 64 * i, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(from + 64 * i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from + 64 * i + 32));
        _mm256_stream_si256((__m256i *)(void *)(to + 64 * i), a);
        _mm256_stream_si256((__m256i *)(void *)(to + 64 * i + 32), b);
        add_words(&s, a, w + 16 * i);
        add_words(&s, b, w + 16 * i + 8);
    }
    return total(&s);
}

static uint64_t copy_sum(void *to, const void *from, const uint32_t *w, size_t n, bool streaming,
                         const void *ahead)
{
    size_t head = to_line(to);
    if (!streaming || 4 * n < STREAM_LEAST_BYTES || head % 4 != 0) {
        copy(to, from, 4 * n, streaming, ahead);
        return sum(from, w, n, NULL);
    }
    char *out = to;
    const char *in = from;
    size_t n_lines = (4 * n - head) / LINE_BYTES, tail = head + n_lines * LINE_BYTES;
    memcpy(out, in, head);
    memcpy(out + tail, in + tail, 4 * n - tail);
    return scalar_sum(in, w, head / 4) +
           stream_sum(out + head, in + head, w + head / 4, n_lines, ahead == NULL ? from : ahead) +
           scalar_sum(in + tail, w + tail / 4, n - tail / 4);
}

static void prefetch(const void *p, size_t n_bytes)
{
    for (size_t at = 0; at < n_bytes; at += LINE_BYTES)
        _mm_prefetch((const char *)p + at, _MM_HINT_T0);
}

static void fence(void)
{
    _mm_sfence();
}

const struct kernel_runs kernel_runs_avx2 = {
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

#else
typedef int kernels_run_avx2_is_empty_here;
#endif
