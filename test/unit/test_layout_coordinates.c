/* Coordinates of a rehearsal: values that an own reading of the text in layout/coordinates.h gives (Python), runs against
 * single elements, and floats that no cast changes. */
#include <check.h>
#include <math.h>
#include <string.h>

#include "layout/coordinates.h"

static uint32_t row_of(const char *tensor, unsigned n_dims, const uint64_t *at)
{
    return coordinates_row(coordinates_seed(tensor), n_dims, at);
}

START_TEST(single_elements_are_those_of_the_text)
{
    const uint64_t at[] = {3, UINT64_C(5000000000)};
    ck_assert_uint_eq(coordinates_bits(DTYPE_BFLOAT16, row_of("model.layers.0.w", 2, at), at[1]),
                      UINT64_C(0xC1E0));
    ck_assert_uint_eq(coordinates_bits(DTYPE_FLOAT32, row_of("model.layers.0.w", 2, at), at[1]),
                      UINT64_C(0xC1E00000));
    ck_assert_uint_eq(coordinates_bits(DTYPE_UINT8, row_of("model.layers.0.w", 2, at), at[1]),
                      UINT64_C(0xCE));
    ck_assert_uint_eq(coordinates_bits(DTYPE_INT64, row_of("model.layers.0.w", 2, at), at[1]),
                      UINT64_C(0xCE1567B53DC14185));
    ck_assert_uint_eq(coordinates_bits(DTYPE_INT32, row_of("model.layers.0.w", 2, at), at[1]),
                      UINT64_C(0xCE1567B5));
    ck_assert_uint_eq(coordinates_bits(DTYPE_INT32, row_of("s", 0, NULL), 0), UINT64_C(0xF89DB2CA));
}
END_TEST

START_TEST(a_run_is_its_elements_also_over_the_upper_half_of_a_coordinate)
{
    const uint64_t firsts[] = {0, 7, UINT64_C(0xFFFFFFF0), UINT64_C(0x1FFFFFFFE)};
    for (unsigned d = DTYPE_FLOAT64; d <= DTYPE_BOOL; d++)
        for (unsigned f = 0; f < 4; f++) {
            unsigned char run[64 * 8 + 8];
            memset(run, 0xEE, sizeof run);
            uint32_t bytes = dtype_bytes((enum dtype)d), row = row_of("w", 1, NULL);
            coordinates_run((enum dtype)d, row, firsts[f], 64, run);
            for (unsigned i = 0; i < 64; i++) {
                uint64_t bits = coordinates_bits((enum dtype)d, row, firsts[f] + i);
                ck_assert_mem_eq(run + i * bytes, &bits, bytes); /* little-endian */
            }
            ck_assert_uint_eq(run[64 * bytes], 0xEE);
        }
}
END_TEST

/* The number of float bits with this format; infinities and NaN would show by their exponent. */
static double value(uint64_t bits, unsigned sign, unsigned mantissa, int bias)
{
    int exponent = (int)(bits >> mantissa & ((UINT64_C(1) << (sign - mantissa)) - 1));
    double m = 1 + (double)(bits & ((UINT64_C(1) << mantissa) - 1)) / ldexp(1, (int)mantissa);
    return (bits >> sign & 1 ? -1 : 1) * ldexp(m, exponent - bias);
}

START_TEST(every_float_dtype_has_the_same_number)
{
    unsigned seen = 0;
    for (uint64_t i = 0; i < 4096; i++) {
        uint32_t row = row_of("w", 2, &i);
        float f;
        uint32_t bits = (uint32_t)coordinates_bits(DTYPE_FLOAT32, row, i);
        memcpy(&f, &bits, sizeof f);
        seen |= 1U << (unsigned)(log2(fabs((double)f)));
        ck_assert(fabs((double)f) >= 1 && fabs((double)f) <= 1.75 * 128);
        ck_assert(value(coordinates_bits(DTYPE_FLOAT64, row, i), 63, 52, 1023) == (double)f);
        ck_assert(value(coordinates_bits(DTYPE_FLOAT16, row, i), 15, 10, 15) == (double)f);
        ck_assert(value(coordinates_bits(DTYPE_BFLOAT16, row, i), 15, 7, 127) == (double)f);
        ck_assert(value(coordinates_bits(DTYPE_FLOAT8_E4M3FN, row, i), 7, 3, 7) == (double)f);
        ck_assert(value(coordinates_bits(DTYPE_FLOAT8_E5M2, row, i), 7, 2, 15) == (double)f);
    }
    ck_assert_uint_eq(seen, 0xFF);
}
END_TEST

START_TEST(an_exchange_of_columns_shows_and_so_does_another_tensor_or_dim)
{
    unsigned alike = 0, transposed = 0, other = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t swapped = i + 1;
        uint64_t here = coordinates_bits(DTYPE_BFLOAT16, row_of("w", 2, &i), 17);
        alike += here == coordinates_bits(DTYPE_BFLOAT16, row_of("w", 2, &i), 18);
        transposed += here == coordinates_bits(DTYPE_BFLOAT16, row_of("w", 2, &swapped), 17);
        other += here == coordinates_bits(DTYPE_BFLOAT16, row_of("v", 2, &i), 17);
    }
    /* One in 64 by chance: 15.6 of 1000, more than 50 of them once in 10^11. */
    ck_assert_uint_lt(alike, 50);
    ck_assert_uint_lt(transposed, 50);
    ck_assert_uint_lt(other, 50);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(single_elements_are_those_of_the_text)                                                       \
    X(a_run_is_its_elements_also_over_the_upper_half_of_a_coordinate)                              \
    X(every_float_dtype_has_the_same_number)                                                       \
    X(an_exchange_of_columns_shows_and_so_does_another_tensor_or_dim)

#include "test/lib/main.h"
