/* Inner loops for AVX-512 (F and BW): 64 bytes at a time, ends by masks. The file is built for the
 * baseline; only the functions marked TARGET use AVX-512, and only after kernel_runs has asked the
 * CPU. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "kernels/kernels_cast.h"
#include "kernels/kernels_run.h"

#include "base/banned.h"

#define TARGET __attribute__((target("avx512f,avx512bw")))

KERNEL_CAST_LOOPS(TARGET)
KERNEL_WEIGHT_LOOP(TARGET)

/* Below this a run's ends, which can't be streamed, weigh more than what streaming saves. */
enum { STREAM_LEAST_BYTES = 192, LINE_BYTES = 64 };

/* Bytes up to the next cache line of `p`. */
static size_t to_line(const void *p)
{
    return (size_t)(-(uintptr_t)p & (LINE_BYTES - 1));
}

/* Copies n < 64 bytes. */
TARGET KERNEL_INLINE void copy_part(char *to, const char *from, size_t n)
{
    __mmask64 mask = (UINT64_C(1) << n) - 1;
    _mm512_mask_storeu_epi8(to, mask, _mm512_maskz_loadu_epi8(mask, from));
}

TARGET static void stream(char *to, const char *from, size_t n_bytes, const char *ahead)
{
    size_t at = to_line(to);
    copy_part(to, from, at);
    for (; at + 64 <= n_bytes; at += 64) {
        _mm_prefetch(ahead + at, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)(void *)(to + at), _mm512_loadu_si512(from + at));
    }
    copy_part(to + at, from + at, n_bytes - at);
}

static void copy(void *to, const void *from, size_t n_bytes, bool streaming, const void *ahead)
{
    if (streaming && n_bytes >= STREAM_LEAST_BYTES)
        stream(to, from, n_bytes, ahead == NULL ? from : ahead);
    else
        memcpy(to, from, n_bytes);
}

struct sums {
    __m512i even, odd;
};

TARGET KERNEL_INLINE void add_words(struct sums *s, __m512i x, __m512i weight)
{
    s->even = _mm512_add_epi64(s->even, _mm512_mul_epu32(x, weight));
    s->odd = _mm512_add_epi64(
        s->odd, _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(weight, 32)));
}

TARGET KERNEL_INLINE uint64_t total(const struct sums *s)
{
    uint64_t lanes[8], sum = 0; /* _mm512_reduce_add_epi64 adds signed numbers */
    _mm512_storeu_si512(lanes, _mm512_add_epi64(s->even, s->odd));
    for (unsigned i = 0; i < 8; i++)
        sum += lanes[i];
    return sum;
}

/* Adds n < 16 words; returns them, so that they can be stored. */
TARGET KERNEL_INLINE __m512i add_part(struct sums *s, const char *words, const uint32_t *w,
                                      size_t n)
{
    __mmask16 mask = (__mmask16)((1U << n) - 1);
    __m512i x = _mm512_maskz_loadu_epi32(mask, words);
    add_words(s, x, _mm512_maskz_loadu_epi32(mask, w));
    return x;
}

TARGET static uint64_t sum(const void *words, const uint32_t *w, size_t n, const void *ahead)
{
    const char *p = words, *next = ahead == NULL ? words : ahead;
    struct sums s = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        _mm_prefetch(next + 4 * i, _MM_HINT_T0);
        add_words(&s, _mm512_loadu_si512(p + 4 * i), _mm512_loadu_si512(w + i));
    }
    (void)add_part(&s, p + 4 * i, w + i, n - i);
    return total(&s);
}

/* `to` is a multiple of 4 away from a line. */
TARGET static uint64_t stream_sum(char *to, const char *from, const uint32_t *w, size_t n,
                                  const char *ahead)
{
    struct sums s = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    size_t i = to_line(to) / 4;
    _mm512_mask_storeu_epi32(to, (__mmask16)((1U << i) - 1), add_part(&s, from, w, i));
    for (; i + 16 <= n; i += 16) {
        __m512i x = _mm512_loadu_si512(from + 4 * i);
        _mm_prefetch(ahead + 4 * i, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)(void *)(to + 4 * i), x);
        add_words(&s, x, _mm512_loadu_si512(w + i));
    }
    _mm512_mask_storeu_epi32(to + 4 * i, (__mmask16)((1U << (n - i)) - 1),
                             add_part(&s, from + 4 * i, w + i, n - i));
    return total(&s);
}

static uint64_t copy_sum(void *to, const void *from, const uint32_t *w, size_t n, bool streaming,
                         const void *ahead)
{
    if (streaming && 4 * n >= STREAM_LEAST_BYTES && (uintptr_t)to % 4 == 0)
        return stream_sum(to, from, w, n, ahead == NULL ? from : ahead);
    copy(to, from, 4 * n, streaming, ahead);
    return sum(from, w, n, NULL);
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

const struct kernel_runs kernel_runs_avx512 = {
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
typedef int kernels_run_avx512_is_empty_here;
#endif
