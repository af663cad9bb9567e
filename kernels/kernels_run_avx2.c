/* Inner loops for AVX2: 32 bytes at a time. The file is built for the baseline; only the functions
 * marked TARGET use AVX2, and only after kernel_runs has asked the CPU. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "kernels/kernels_cast.h"
#include "kernels/kernels_run.h"

#include "base/banned.h"

#define TARGET __attribute__((target("avx2,f16c")))

KERNEL_CAST_LOOPS()
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

/* --- casts: kernels_cast.h, eight lanes at a time --------------------------------------------- */

TARGET KERNEL_INLINE __m256i load256(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

TARGET KERNEL_INLINE __m256i bfloat16_lanes(__m256i u)
{
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i is_nan = _mm256_cmpgt_epi32(_mm256_and_si256(u, _mm256_set1_epi32(FLOAT32_ABS)),
                                        _mm256_set1_epi32(FLOAT32_INFINITY));
    return _mm256_blendv_epi8(_mm256_srli_epi32(r, 16), _mm256_set1_epi32(0x7FC0), is_nan);
}

TARGET static void wide_bfloat16_of_float32(uint16_t *to, const void *from, size_t n)
{
    const char *p = from;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i r = _mm256_packus_epi32(bfloat16_lanes(load256(p + 4 * i)),
                                        bfloat16_lanes(load256(p + 4 * i + 32)));
        /* packing works on halves: put the quarters back in order */
        _mm256_storeu_si256((__m256i *)(void *)(to + i), _mm256_permute4x64_epi64(r, 0xD8));
    }
    bfloat16_of_float32(to + i, p + 4 * i, n - i);
}

TARGET static void wide_float16_of_float32(uint16_t *to, const void *from, size_t n)
{
    const char *p = from;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_castsi256_ps(load256(p + 4 * i));
        /* the CPU would keep a NaN's sign and payload: make it the one that becomes 0x7E00 */
        __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
        x = _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        _mm_storeu_si128((__m128i *)(void *)(to + i),
                         _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    float16_of_float32(to + i, p + 4 * i, n - i);
}

/* Eight bfloat16 as 32-bit lanes that hold float8. */
TARGET KERNEL_INLINE __m256i e4m3_lanes(const char *p)
{
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)p);
    __m256i u = _mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16);
    __m256i a = _mm256_and_si256(u, _mm256_set1_epi32(FLOAT32_ABS));
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(a, 20), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_sub_epi32(a, _mm256_set1_epi32(120 << 23)),
                                 _mm256_add_epi32(_mm256_set1_epi32(0x7FFFF), odd));
    __m256 magic = _mm256_set1_ps(16384.0F);
    __m256i small =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), magic)),
                         _mm256_castps_si256(magic));
    __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), a);
    __m256i is_nan = _mm256_cmpgt_epi32(a, _mm256_set1_epi32(FLOAT32_INFINITY));
    r = _mm256_blendv_epi8(_mm256_srli_epi32(r, 20), small, is_small);
    r = _mm256_or_si256(_mm256_min_epi32(r, _mm256_set1_epi32(0x7E)), sign);
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7F), is_nan);
}

TARGET static void wide_e4m3_of_bfloat16(uint8_t *to, const void *from, size_t n)
{
    const char *p = from;
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i low = _mm256_packus_epi32(e4m3_lanes(p + 2 * i), e4m3_lanes(p + 2 * i + 16));
        __m256i high = _mm256_packus_epi32(e4m3_lanes(p + 2 * i + 32), e4m3_lanes(p + 2 * i + 48));
        __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        __m256i r = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(void *)(to + i), r);
    }
    e4m3_of_bfloat16(to + i, p + 2 * i, n - i);
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
    .bfloat16_of_float32 = wide_bfloat16_of_float32,
    .float16_of_float32 = wide_float16_of_float32,
    .e4m3_of_bfloat16 = wide_e4m3_of_bfloat16,
    .fence = fence,
};

#else
typedef int kernels_run_avx2_is_empty_here;
#endif
