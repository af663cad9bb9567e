#include "layout/coordinates.h"

#include <stdbool.h>
#include <string.h>

#include "base/banned.h"

static uint32_t mix(uint32_t h)
{
    h ^= h >> 16;
    h *= UINT32_C(0x7FEB352D);
    h ^= h >> 15;
    h *= UINT32_C(0x846CA68B);
    return h ^ (h >> 16);
}

uint32_t coordinates_seed(const char *tensor)
{
    uint32_t h = UINT32_C(0x811C9DC5);
    for (; *tensor != '\0'; tensor++)
        h = (h ^ (uint8_t)*tensor) * UINT32_C(0x01000193);
    return mix(h);
}

uint32_t coordinates_row(uint32_t seed, unsigned n_dims, const uint64_t *at)
{
    uint32_t h = seed;
    for (unsigned d = 0; d + 1 < n_dims; d++)
        h = mix(h ^ mix((uint32_t)at[d] + UINT32_C(0x9E3779B9))) + (uint32_t)(at[d] >> 32);
    return h;
}

static inline uint32_t element(uint32_t row, uint32_t low)
{
    uint32_t h = row + low * UINT32_C(0x9E3779B1);
    h ^= h >> 15;
    h *= UINT32_C(0x85EBCA77);
    return h ^ (h >> 13);
}

/* Where a float dtype has its sign, exponent and mantissa. */
struct format {
    unsigned sign, mantissa_bits, bias; /* sign 0: no float */
};

static struct format format_of(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_FLOAT64:
        return (struct format){63, 52, 1023};
    case DTYPE_FLOAT32:
        return (struct format){31, 23, 127};
    case DTYPE_FLOAT16:
        return (struct format){15, 10, 15};
    case DTYPE_BFLOAT16:
        return (struct format){15, 7, 127};
    case DTYPE_FLOAT8_E4M3FN:
        return (struct format){7, 3, 7};
    case DTYPE_FLOAT8_E5M2:
        return (struct format){7, 2, 15};
    default:
        return (struct format){0};
    }
}

static inline uint64_t float_bits(struct format f, uint32_t h)
{
    uint64_t sign = h >> 31, k = (h >> 28) & 7, m = (h >> 26) & 3;
    return sign << f.sign | (k + f.bias) << f.mantissa_bits | m << (f.mantissa_bits - 2);
}

/* The same for what has at most 32 bits. */
static inline uint32_t float_bits_32(struct format f, uint32_t h)
{
    return (h >> 31) << f.sign | ((h >> 28 & 7) + f.bias) << f.mantissa_bits |
           (h >> 26 & 3) << (f.mantissa_bits - 2);
}

static inline uint64_t integer_bits(enum dtype dtype, uint32_t h)
{
    switch (dtype_bytes(dtype)) {
    case 1:
        return h >> (dtype == DTYPE_BOOL ? 31 : 24);
    case 2:
        return h >> 16;
    case 4:
        return h;
    default:
        return (uint64_t)h << 32 | (uint32_t)(h * UINT32_C(0x2545F491));
    }
}

uint64_t coordinates_bits(enum dtype dtype, uint32_t row, uint64_t last)
{
    struct format f = format_of(dtype);
    uint32_t h = element(row + mix((uint32_t)(last >> 32)), (uint32_t)last);
    return f.sign != 0 ? float_bits(f, h) : integer_bits(dtype, h);
}

/* One loop per width and kind, so that the compiler can take many elements at a time; within one upper half of `last`. */
#define RUN(type, bits)                                                                            \
    for (uint64_t i = 0; i < n; i++) {                                                             \
        uint32_t h = element(row, low + (uint32_t)i);                                              \
        type x = (type)(bits);                                                                     \
        memcpy((char *)to + i * sizeof x, &x, sizeof x);                                           \
    }

static void run(enum dtype dtype, uint32_t row, uint32_t low, uint64_t n, void *to)
{
    struct format f = format_of(dtype);
    switch (dtype_bytes(dtype)) {
    case 1:
        if (f.sign != 0)
            RUN(uint8_t, float_bits_32(f, h))
        else
            RUN(uint8_t, h >> (dtype == DTYPE_BOOL ? 31 : 24))
        break;
    case 2:
        if (f.sign != 0)
            RUN(uint16_t, float_bits_32(f, h))
        else
            RUN(uint16_t, h >> 16)
        break;
    case 4:
        if (f.sign != 0)
            RUN(uint32_t, float_bits_32(f, h))
        else
            RUN(uint32_t, h)
        break;
    default:
        if (f.sign != 0)
            RUN(uint64_t, float_bits(f, h))
        else
            RUN(uint64_t, integer_bits(dtype, h))
    }
}

void coordinates_run(enum dtype dtype, uint32_t row, uint64_t last, uint64_t n, void *to)
{
    while (n > 0) {
        uint64_t room = (UINT64_C(1) << 32) - (uint32_t)last, part = n < room ? n : room;
        run(dtype, row + mix((uint32_t)(last >> 32)), (uint32_t)last, part, to);
        to = (char *)to + part * dtype_bytes(dtype);
        last += part;
        n -= part;
    }
}
