/* Branch-free casts that compilers turn into vector code; and the loops over them, which each
 * kernels_run_*.c instantiates with its own target attribute.
 *
 * Rounding to nearest even, infinity kept (float8 saturates), NaN canonical (config/FORMATS.md, `cast`).
 * Subnormal results are rounded by one float addition to a number whose last place is the result's:
 * this needs the default rounding mode, and is right with denormals-are-zero set, too. */
#ifndef RS_KERNELS_KERNELS_CAST_H
#define RS_KERNELS_KERNELS_CAST_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/fingerprint.h"

/* gcc vectorises at -O3 only; clang does at -O2. */
#if defined(__clang__)
#define KERNEL_VECTORISE
#else
#define KERNEL_VECTORISE __attribute__((optimize("O3")))
#endif
#if defined(__CUDACC__)
#define KERNEL_INLINE static __host__ __device__ __forceinline__
#else
#define KERNEL_INLINE static inline __attribute__((always_inline))
#endif

#define FLOAT32_ABS      UINT32_C(0x7FFFFFFF)
#define FLOAT32_INFINITY UINT32_C(0x7F800000)

KERNEL_INLINE float kernel_float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

KERNEL_INLINE uint32_t kernel_bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

KERNEL_INLINE uint16_t kernel_cast_bfloat16(uint32_t u)
{
    uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & FLOAT32_ABS) > FLOAT32_INFINITY ? 0x7FC0 : rounded);
}

KERNEL_INLINE uint16_t kernel_cast_float16(uint32_t u)
{
    uint32_t a = u & FLOAT32_ABS, sign = (u >> 16) & 0x8000;
    uint32_t normal = (a - (UINT32_C(112) << 23) + 0xFFF + ((a >> 13) & 1)) >> 13;
    uint32_t small = kernel_bits_of(kernel_float_of(a) + 0.5F) - kernel_bits_of(0.5F);
    uint32_t r = a < (UINT32_C(113) << 23) ? small : normal; /* below 2^-14: subnormal */
    r = a >= (UINT32_C(143) << 23) ? 0x7C00 : r;             /* from 65536 on: infinity */
    return (uint16_t)(a > FLOAT32_INFINITY ? 0x7E00 : (sign | r));
}

/* Of a float32's bits. */
KERNEL_INLINE uint8_t kernel_cast_e4m3_of_float32(uint32_t u)
{
    uint32_t a = u & FLOAT32_ABS, sign = (u >> 24) & 0x80;
    uint32_t normal = (a - (UINT32_C(120) << 23) + 0x7FFFF + ((a >> 20) & 1)) >> 20;
    uint32_t small = kernel_bits_of(kernel_float_of(a) + 16384.0F) - kernel_bits_of(16384.0F);
    uint32_t r = a < (UINT32_C(121) << 23) ? small : normal; /* below 2^-6: subnormal */
    r = r > 0x7E ? 0x7E : r;                                 /* 448 */
    return (uint8_t)(a > FLOAT32_INFINITY ? 0x7F : (sign | r));
}

KERNEL_INLINE uint8_t kernel_cast_e4m3(uint16_t b)
{
    return kernel_cast_e4m3_of_float32((uint32_t)b << 16);
}

#if !defined(__CUDACC__)
/* The casts as plain loops: all there is in portable C, the ends of runs elsewhere. `from` may be
 * unaligned: element loads by memcpy, which costs nothing. */
#define KERNEL_CAST_LOOPS(target)                                                                  \
    target KERNEL_VECTORISE static void bfloat16_of_float32(uint16_t *restrict to,                 \
                                                            const void *restrict from, size_t n)   \
    {                                                                                              \
        for (size_t i = 0; i < n; i++) {                                                           \
            uint32_t u;                                                                            \
            memcpy(&u, (const char *)from + 4 * i, sizeof u);                                      \
            to[i] = kernel_cast_bfloat16(u);                                                       \
        }                                                                                          \
    }                                                                                              \
    target KERNEL_VECTORISE static void float16_of_float32(uint16_t *restrict to,                  \
                                                           const void *restrict from, size_t n)    \
    {                                                                                              \
        for (size_t i = 0; i < n; i++) {                                                           \
            uint32_t u;                                                                            \
            memcpy(&u, (const char *)from + 4 * i, sizeof u);                                      \
            to[i] = kernel_cast_float16(u);                                                        \
        }                                                                                          \
    }                                                                                              \
    target KERNEL_VECTORISE static void e4m3_of_bfloat16(uint8_t *restrict to,                     \
                                                         const void *restrict from, size_t n)      \
    {                                                                                              \
        for (size_t i = 0; i < n; i++) {                                                           \
            uint16_t b;                                                                            \
            memcpy(&b, (const char *)from + 2 * i, sizeof b);                                      \
            to[i] = kernel_cast_e4m3(b);                                                           \
        }                                                                                          \
    }

/* weights() of struct kernel_runs. */
#define KERNEL_WEIGHT_LOOP(target)                                                                 \
    target KERNEL_VECTORISE static uint64_t weight_span(uint32_t *restrict ret, uint32_t base,     \
                                                        size_t n)                                  \
    {                                                                                              \
        uint64_t sum = 0;                                                                          \
        for (size_t i = 0; i < n; i++) {                                                           \
            ret[i] = fingerprint_word_mix(base + (uint32_t)i);                                     \
            sum += ret[i];                                                                         \
        }                                                                                          \
        return sum;                                                                                \
    }                                                                                              \
    static uint64_t weights(uint32_t *ret, uint64_t q, size_t n)                                   \
    {                                                                                              \
        uint64_t left = (UINT64_C(1) << 31) - (q & FINGERPRINT_WORD_MASK);                         \
        size_t first = n < left ? n : (size_t)left;                                                \
        uint64_t sum = weight_span(ret, fingerprint_word_base(q), first);                          \
        if (first < n)                                                                             \
            sum += weight_span(ret + first, fingerprint_word_base(q + first), n - first);          \
        return sum;                                                                                \
    }

#endif

#endif
