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

KERNEL_CAST_LOOPS()
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

/* --- casts: kernels_cast.h, sixteen lanes at a time ------------------------------------------- */

TARGET KERNEL_INLINE __mmask16 is_above(__m512i a, uint32_t limit)
{
    return _mm512_cmpgt_epi32_mask(a, _mm512_set1_epi32((int)limit));
}

TARGET static void wide_bfloat16_of_float32(uint16_t *to, const void *from, size_t n)
{
    const char *p = from;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i u = _mm512_loadu_si512(p + 4 * i);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
        __m512i a = _mm512_and_si512(u, _mm512_set1_epi32(FLOAT32_ABS));
        r = _mm512_mask_mov_epi32(_mm512_srli_epi32(r, 16), is_above(a, FLOAT32_INFINITY),
                                  _mm512_set1_epi32(0x7FC0));
        _mm256_storeu_si256((__m256i *)(void *)(to + i), _mm512_cvtepi32_epi16(r));
    }
    bfloat16_of_float32(to + i, p + 4 * i, n - i);
}

TARGET static void wide_float16_of_float32(uint16_t *to, const void *from, size_t n)
{
    const char *p = from;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 x = _mm512_castsi512_ps(_mm512_loadu_si512(p + 4 * i));
        /* the CPU would keep a NaN's sign and payload: make it the one that becomes 0x7E00 */
        __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
        x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
        _mm256_storeu_si256((__m256i *)(void *)(to + i),
                            _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    float16_of_float32(to + i, p + 4 * i, n - i);
}

/* Sixteen bfloat16 as sixteen float8. */
TARGET KERNEL_INLINE __m128i e4m3_lanes(const char *p)
{
    __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)p);
    __m512i u = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
    __m512i a = _mm512_and_si512(u, _mm512_set1_epi32(FLOAT32_ABS));
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x80));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(a, 20), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_sub_epi32(a, _mm512_set1_epi32(120 << 23)),
                                 _mm512_add_epi32(_mm512_set1_epi32(0x7FFFF), odd));
    __m512 magic = _mm512_set1_ps(16384.0F);
    __m512i small =
        _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), magic)),
                         _mm512_castps_si512(magic));
    r = _mm512_mask_mov_epi32(small, is_above(a, (121U << 23) - 1), _mm512_srli_epi32(r, 20));
    r = _mm512_or_si512(_mm512_min_epi32(r, _mm512_set1_epi32(0x7E)), sign);
    r = _mm512_mask_mov_epi32(r, is_above(a, FLOAT32_INFINITY), _mm512_set1_epi32(0x7F));
    return _mm512_cvtepi32_epi8(r);
}

TARGET static void wide_e4m3_of_bfloat16(uint8_t *to, const void *from, size_t n)
{
    const char *p = from;
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm_storeu_si128((__m128i *)(void *)(to + i), e4m3_lanes(p + 2 * i));
    e4m3_of_bfloat16(to + i, p + 2 * i, n - i);
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
    .bfloat16_of_float32 = wide_bfloat16_of_float32,
    .float16_of_float32 = wide_float16_of_float32,
    .e4m3_of_bfloat16 = wide_e4m3_of_bfloat16,
    .fence = fence,
};

#else
typedef int kernels_run_avx512_is_empty_here;
#endif
