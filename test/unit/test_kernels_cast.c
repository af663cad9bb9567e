/* Casts against two independent ways: the nearest of all values of the target type, found by
 * comparing doubles, and (float16) the compiler's own conversion. */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "kernels/kernels.h"
#include "kernels/kernels_dtype.h"
#include "kernels/kernels_quantise.h"
#include "kernels/kernels_run.h"

/* --- the target types, from their definitions ------------------------------------------------- */

/* Value of a small float's bits without sign: IEEE rules, no infinity or NaN among them. */
static double small_float(uint32_t bits, int fraction_bits, int bias)
{
    int exponent = (int)(bits >> fraction_bits);
    double fraction = (double)(bits & ((1U << fraction_bits) - 1)) / (double)(1U << fraction_bits);
    return exponent == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, exponent - bias);
}

struct format {
    uint32_t most_finite; /* bits of the greatest finite value */
    uint32_t above;       /* what is beyond it becomes: infinity, or the greatest again */
    uint32_t nan;
    uint32_t sign;
    int fraction_bits, bias;
};

static const struct format BFLOAT16 = {0x7F7F, 0x7F80, 0x7FC0, 0x8000, 7, 127};
static const struct format FLOAT16 = {0x7BFF, 0x7C00, 0x7E00, 0x8000, 10, 15};
static const struct format E4M3 = {0x7E, 0x7E, 0x7F, 0x80, 3, 7};

/* Nearest, ties to even, by bisection over the ordered finite values. The first value that does not
 * exist any more (one step beyond the greatest) stands for `above`. */
static uint32_t nearest(double value, const struct format *f)
{
    if (isnan(value))
        return f->nan;
    uint32_t sign = signbit(value) ? f->sign : 0, low = 0, high = f->most_finite + 1;
    double a = fabs(value);
    if (a >= small_float(high, f->fraction_bits, f->bias))
        return sign | f->above;
    while (high - low > 1) { /* low <= a < high */
        uint32_t middle = (low + high) / 2;
        if (small_float(middle, f->fraction_bits, f->bias) <= a)
            low = middle;
        else
            high = middle;
    }
    double down = a - small_float(low, f->fraction_bits, f->bias);
    double up = small_float(high, f->fraction_bits, f->bias) - a;
    uint32_t r = down < up || (down == up && low % 2 == 0) ? low : high;
    return sign | (r > f->most_finite ? f->above : r);
}

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* --- running the kernels ---------------------------------------------------------------------- */

static void cast_all(const void *from, void *to, uint64_t n, uint8_t from_dtype, uint8_t to_dtype,
                     const struct kernel_runs *runs)
{
    struct kernel_copy c = {.size = {n},
                            .from = {(void *)(uintptr_t)from, {kernel_dtype_bytes(from_dtype)}},
                            .to = {{to, {kernel_dtype_bytes(to_dtype)}}},
                            .n_targets = 1,
                            .n_dims = 1,
                            .from_dtype = from_dtype,
                            .to_dtype = to_dtype};
    if (runs == NULL)
        kernel_copy_reference(&c);
    else
        kernel_copy_with(&c, runs);
}

/* -1 stands for the reference. */
static const struct kernel_runs *twin(int i)
{
    return i < 0 ? NULL : kernel_runs((enum kernel_isa)i);
}

static bool has_twin(int i)
{
    return i < 0 || kernel_runs((enum kernel_isa)i) != NULL;
}

START_TEST(every_bfloat16_becomes_the_nearest_float8)
{
    static uint16_t from[1 << 16];
    static uint8_t to[1 << 16];
    for (uint32_t i = 0; i < 1 << 16; i++)
        from[i] = (uint16_t)i;
    for (int t = -1; t < KERNEL_N_ISAS; t++) {
        if (!has_twin(t))
            continue;
        cast_all(from, to, 1 << 16, KERNEL_BFLOAT16, KERNEL_FLOAT8_E4M3FN, twin(t));
        for (uint32_t i = 0; i < 1 << 16; i++)
            if (to[i] != nearest((double)float_of(i << 16), &E4M3))
                ck_abort_msg("twin %d: %04x gave %02x", t, i, to[i]);
    }
}
END_TEST

enum { N_SAMPLES = 1 << 18 };

/* Every exponent and sign, with fractions around each rounding point; then random bits. */
static uint32_t *float32_samples(void)
{
    static const uint32_t fractions[] = {
        0,        1,        0x7FFFFF, 0x7FFFFE, 0x8000,   0x7FFF,   0x8001,   0x18000,
        0x17FFF,  0x18001,  0x1000,   0xFFF,    0x1001,   0x3000,   0x2FFF,   0x3001,
        0x7F8000, 0x7F7FFF, 0x7F8001, 0x7FF000, 0x7FEFFF, 0x7FF001, 0x400000, 0x3FFFFF};
    uint32_t *s = malloc(N_SAMPLES * sizeof *s), n = 0;
    uint64_t seed = 11;
    for (uint32_t high = 0; high < 512; high++)
        for (unsigned f = 0; f < sizeof fractions / sizeof *fractions; f++)
            s[n++] = high << 23 | fractions[f];
    for (uint32_t bit = 0; bit < 23; bit++) /* halves of the last places of subnormal results */
        for (uint32_t high = 96; high < 120; high++) {
            s[n++] = high << 23 | UINT32_C(1) << bit;
            s[n++] = high << 23 | ((UINT32_C(1) << bit) - 1);
        }
    for (; n < N_SAMPLES; n++) {
        uint32_t bits = (uint32_t)random_next(&seed);
        /* half of them where float16 has values */
        s[n] = n % 2 == 0 ? bits : (bits & 0x807FFFFF) | (0x65U + bits % 43) << 23;
    }
    return s;
}

static void check_float32(uint8_t dtype, const struct format *format)
{
    uint32_t *from = float32_samples();
    uint16_t *to = malloc(N_SAMPLES * sizeof *to);
    for (int t = -1; t < KERNEL_N_ISAS; t++) {
        if (!has_twin(t))
            continue;
        cast_all(from, to, N_SAMPLES, KERNEL_FLOAT32, dtype, twin(t));
        for (uint32_t i = 0; i < N_SAMPLES; i++)
            if (to[i] != nearest((double)float_of(from[i]), format))
                ck_abort_msg("twin %d: %08x gave %04x", t, from[i], to[i]);
    }
    free(from);
    free(to);
}

START_TEST(float32_becomes_the_nearest_bfloat16)
{
    check_float32(KERNEL_BFLOAT16, &BFLOAT16);
}
END_TEST

START_TEST(float32_becomes_the_nearest_float16)
{
    check_float32(KERNEL_FLOAT16, &FLOAT16);
}
END_TEST

#ifdef __FLT16_MAX__
__extension__ typedef _Float16 half;

START_TEST(float16_is_what_the_compiler_converts_to)
{
    uint32_t *from = float32_samples();
    uint16_t *to = malloc(N_SAMPLES * sizeof *to);
    cast_all(from, to, N_SAMPLES, KERNEL_FLOAT32, KERNEL_FLOAT16, kernel_runs(kernel_isa_best()));
    for (uint32_t i = 0; i < N_SAMPLES; i++) {
        half h = (half)float_of(from[i]);
        uint16_t bits;
        memcpy(&bits, &h, sizeof bits);
        if (!isnan(float_of(from[i])) && to[i] != bits)
            ck_abort_msg("%08x gave %04x, not %04x", from[i], to[i], bits);
    }
    free(from);
    free(to);
}
END_TEST
#else
START_TEST(float16_is_what_the_compiler_converts_to)
{
}
END_TEST
#endif

/* The values of a public fault report: float32 into a bfloat16 buffer. */
START_TEST(published_float32_values_round_as_published)
{
    static const float from[6] = {1.00390625F, 1.01171875F, 3.4e38F, -0.0F, 65504.0F, NAN};
    static const uint16_t expected[6] = {0x3F80, 0x3F82, 0x7F80, 0x8000, 0x4780, 0x7FC0};
    uint16_t to[6];
    cast_all(from, to, 6, KERNEL_FLOAT32, KERNEL_BFLOAT16, kernel_runs(kernel_isa_best()));
    ck_assert_mem_eq(to, expected, sizeof to);
}
END_TEST

/* The casts as `first, then added`: the fingerprint is that of what was written. */
START_TEST(a_casts_fingerprint_is_that_of_the_written_elements)
{
    uint32_t *from = float32_samples();
    static uint16_t to[37 * 501];
    uint64_t sums[2] = {0};
    struct kernel_copy c = {.size = {37, 501},
                            .offset = {3, 5},
                            .from = {from, {501 * 4, 4}},
                            .to = {{to, {501 * 2, 2}}},
                            .fingerprint = &sums[0],
                            .n_targets = 1,
                            .n_dims = 2,
                            .from_dtype = KERNEL_FLOAT32,
                            .to_dtype = KERNEL_BFLOAT16};
    struct kernel_fingerprint f = {.size = {37, 501},
                                   .offset = {3, 5},
                                   .from = {to, {501 * 2, 2}},
                                   .fingerprint = &sums[1],
                                   .n_dims = 2,
                                   .dtype = KERNEL_BFLOAT16};
    kernel_copy_host(&c);
    kernel_fingerprint_reference(&f);
    ck_assert_uint_eq(sums[0], sums[1]);
    free(from);
}
END_TEST

/* --- float8 with scales ------------------------------------------------------------------------ */

enum { Q_MOST = 300 * 300 };

struct quantised {
    uint64_t rows, columns, block_rows, block_columns;
    uint8_t dtype;
    float value[Q_MOST];
    uint16_t bfloat16[Q_MOST];
    uint8_t to[Q_MOST];
    uint32_t scales[Q_MOST];
};

/* Values of many magnitudes; NaN, infinities and zeros of both signs; one block all zero, one with
 * nothing finite, one so small that its scale would be subnormal. */
static void fill_quantised(struct quantised *q, uint64_t *seed)
{
    for (uint64_t i = 0; i < q->rows * q->columns; i++) {
        uint64_t r = random_next(seed), block = i / q->columns / q->block_rows;
        float v = float_of((uint32_t)(r >> 32 & 0x807FFFFF) | (uint32_t)(110 + r % 30) << 23);
        v = r % 97 == 1 ? NAN : r % 97 == 2 ? -INFINITY : r % 97 == 3 ? -0.0F : v;
        v = block == 1 ? 0.0F : block == 2 ? INFINITY : block == 3 ? ldexpf(v, -120) : v;
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        q->bfloat16[i] = (uint16_t)(bits >> 16 | (isnan(v) ? 0x40 : 0));
        q->value[i] = q->dtype == KERNEL_FLOAT32 ? v : float_of((uint32_t)q->bfloat16[i] << 16);
    }
}

/* By definition, in doubles: a float32 quotient by way of a double is the nearest one. */
static float scale_by_definition(const struct quantised *q, uint64_t row, uint64_t column)
{
    double amax = 0;
    for (uint64_t i = row; i < row + q->block_rows && i < q->rows; i++)
        for (uint64_t k = column; k < column + q->block_columns && k < q->columns; k++) {
            double a = fabs((double)q->value[i * q->columns + k]);
            amax = isfinite(a) && a > amax ? a : amax;
        }
    float scale = (float)(amax / 448.0);
    return amax == 0 ? 1.0F : scale < 0x1p-126F ? 0x1p-126F : scale;
}

static void check_quantised(const struct quantised *q)
{
    uint64_t across = (q->columns + q->block_columns - 1) / q->block_columns;
    for (uint64_t i = 0; i < q->rows; i++)
        for (uint64_t k = 0; k < q->columns; k++) {
            uint64_t row = i / q->block_rows, column = k / q->block_columns;
            float scale = scale_by_definition(q, row * q->block_rows, column * q->block_columns);
            double v = (double)(float)((double)q->value[i * q->columns + k] / (double)scale);
            ck_assert(float_of(q->scales[row * across + column]) == scale);
            if (q->to[i * q->columns + k] != nearest(v, &E4M3))
                ck_abort_msg("%g by %g gave %02x", (double)q->value[i * q->columns + k],
                             (double)scale, q->to[i * q->columns + k]);
        }
}

static struct kernel_quantise quantise_of(struct quantised *q)
{
    return (struct kernel_quantise){
        .from = q->dtype == KERNEL_FLOAT32 ? (const void *)q->value : q->bfloat16,
        .from_stride = (int64_t)(q->columns * kernel_dtype_bytes(q->dtype)),
        .window_rows = q->rows,
        .window_columns = q->columns,
        .to = {{q->to, (int64_t)q->columns}},
        .n_targets = 1,
        .scales = q->scales,
        .rows = q->rows,
        .columns = q->columns,
        .block_rows = q->block_rows,
        .block_columns = q->block_columns,
        .from_dtype = q->dtype};
}

START_TEST(each_block_has_its_scale_and_each_element_is_the_nearest_float8)
{
    static struct quantised q;
    static const uint64_t shapes[][4] = {{40, 30, 8, 8}, {40, 33, 7, 10}, {1, 300, 1, 16},
                                         {5, 9, 1, 9},   {9, 5, 9, 1},    {130, 20, 128, 128},
                                         {12, 12, 1, 1}};
    uint64_t seed = 5;
    for (unsigned i = 0; i < 2 * sizeof shapes / sizeof *shapes; i++) {
        const uint64_t *s = shapes[i / 2];
        q.rows = s[0], q.columns = s[1], q.block_rows = s[2], q.block_columns = s[3];
        q.dtype = i % 2 == 0 ? KERNEL_FLOAT32 : KERNEL_BFLOAT16;
        fill_quantised(&q, &seed);
        struct kernel_quantise k = quantise_of(&q);
        kernel_quantise_host(&k);
        check_quantised(&q);
    }
}
END_TEST

START_TEST(a_scale_of_the_whole_is_found_part_by_part)
{
    static struct quantised q;
    uint64_t seed = 6;
    q.rows = 20, q.columns = 17, q.block_rows = 20, q.block_columns = 17;
    for (int i = 0; i < 2; i++) {
        uint32_t amax = 0;
        q.dtype = i == 0 ? KERNEL_FLOAT32 : KERNEL_BFLOAT16;
        fill_quantised(&q, &seed);
        struct kernel_quantise k = quantise_of(&q);
        k.amax_bits = &amax;
        k.step = KERNEL_QUANTISE_AMAX;
        k.rows = 5;
        for (int part = 0; part < 4; part++) {
            kernel_quantise_host(&k);
            k.from = (const char *)k.from + 5 * q.columns * kernel_dtype_bytes(q.dtype);
        }
        k = quantise_of(&q);
        k.amax_bits = &amax;
        k.step = KERNEL_QUANTISE_BY_AMAX;
        kernel_quantise_host(&k);
        check_quantised(&q);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_bfloat16_becomes_the_nearest_float8)                                                   \
    X(float32_becomes_the_nearest_bfloat16)                                                        \
    X(float32_becomes_the_nearest_float16)                                                         \
    X(float16_is_what_the_compiler_converts_to)                                                    \
    X(published_float32_values_round_as_published)                                                 \
    X(a_casts_fingerprint_is_that_of_the_written_elements)                                         \
    X(each_block_has_its_scale_and_each_element_is_the_nearest_float8)                             \
    X(a_scale_of_the_whole_is_found_part_by_part)
#include "test/lib/main.h"
