/* Blocks that a source place makes, by the device's kernels and by the scalar twin (exec/sample_scaled.h): equal, unless the kernels
 * do it wrong. */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/crash.h"
#include "base/mem.h"
#include "base/random.h"
#include "exec/sample_scaled.h"
#include "layout/dtype.h"

enum { ROWS = 100, COLUMNS = 70, ELEMENTS = ROWS * COLUMNS };

static struct {
    struct program_tensor tensor;
    struct sample_scaled block;
    float *values;
    uint16_t *halves;
    uint8_t made[ELEMENTS + 64] __attribute__((aligned(64)));
} w;

/* `great`: a tensor with one scale, beyond what is worked on at once. */
static void open_block(uint8_t value, uint8_t dtype, bool great)
{
    uint64_t state = 7, side = great ? 4096 : 128;
    w.values = mem_alloc(ELEMENTS * sizeof(*w.values));
    w.halves = mem_alloc(ELEMENTS * sizeof(*w.halves));
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        uint32_t bits = (uint32_t)random_next(&state) & 0x807F0000;
        bits |= (uint32_t)(115 + random_next(&state) % 20) << 23;
        bits = i % 97 == 5 ? 0x7FC00000 : i % 97 == 6 ? 0xFF800000 : i % 97 == 7 ? 0 : bits;
        memcpy(&w.values[i], &bits, sizeof(bits));
        w.halves[i] = (uint16_t)(bits >> 16);
    }
    w.tensor = (struct program_tensor){.origin = {side, side},
                                       .block = {(uint32_t)side, (uint32_t)side},
                                       .n_dims = 2,
                                       .source_dtype = dtype,
                                       .value = value};
    w.block = (struct sample_scaled){
        .tensor = &w.tensor,
        .elements = {.n_dims = 2, .offset = {128, 256}, .size = {ROWS, COLUMNS}},
        .scale = {1, 2},
        .from = dtype == DTYPE_FLOAT32 ? (const uint8_t *)w.values : (const uint8_t *)w.halves,
        .made = w.made,
        .from_dtype = dtype};
}

static uint64_t fast(void)
{
    struct device *d = NULL;
    struct device_stream *s = NULL;
    struct plane_work work = {0};
    struct batch b;
    struct err e;
    uint64_t sum = 0;
    struct device_host_options o = {0};
    ck_assert_int_eq(device_host_open(0, &o, &d, &e), 0);
    ck_assert_int_eq(device_stream_new(d, "check", &s, &e), 0);
    batch_init(&b, s, &work);
    ck_assert_int_eq(sample_scaled_fast(&b, &w.block, &sum), 0);
    ck_assert_int_eq(batch_flush(&b), 0);
    device_stream_free(s);
    if (work.memory != NULL)
        device_free(d, work.memory, PLANE_WORK_BYTES);
    device_close(d);
    return sum;
}

static uint64_t reference(void)
{
    uint64_t sum = 0;
    sample_scaled_reference(&w.block, &sum);
    return sum;
}

static float greatest(void)
{
    float most = 0;
    for (uint32_t i = 0; i < ELEMENTS; i++)
        if (isfinite(w.values[i]) && fabsf(w.values[i]) > most)
            most = fabsf(w.values[i]);
    return most;
}

static void close_block(void)
{
    mem_free(w.values);
    mem_free(w.halves);
}

static const uint8_t dtypes[] = {DTYPE_FLOAT32, DTYPE_BFLOAT16};

START_TEST(kernels_and_scalar_twin_agree_on_values_and_scales)
{
    for (uint32_t i = 0; i < 8; i++) {
        open_block(i & 1 ? PROGRAM_SCALES : PROGRAM_QUANTISED, dtypes[i >> 1 & 1], i >= 4);
        uint64_t sum = reference();
        ck_assert_uint_ne(sum, 0);
        ck_assert_uint_eq(fast(), sum);
        close_block();
    }
}
END_TEST

/* What is compared are the values and the scale that the definition gives. */
START_TEST(what_is_made_is_by_the_definition)
{
    float scale;
    open_block(PROGRAM_SCALES, DTYPE_FLOAT32, false);
    (void)fast();
    memcpy(&scale, w.made, sizeof(scale));
    ck_assert(scale == (float)((double)greatest() / 448));
    close_block();
    open_block(PROGRAM_QUANTISED, DTYPE_FLOAT32, false);
    (void)fast();
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        double is = (double)w.values[i] / (double)scale;
        uint8_t bits = w.made[i];
        int exponent = bits >> 3 & 15, fraction = bits & 7;
        double got = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, exponent - 10);
        got = bits >> 7 ? -got : got;
        if (isnan(is))
            ck_assert_uint_eq(bits & 0x7F, 0x7F);
        else if (isinf(is))
            ck_assert_uint_eq(bits, is < 0 ? 0xFE : 0x7E);
        else /* half a unit: 2^-4 of the value, or of the least normal one */
            ck_assert(fabs(got - is) <= fmax(fabs(is), ldexp(1, -6)) / 16);
    }
    close_block();
}
END_TEST

START_TEST(kernels_that_do_it_wrong_each_time_differ_in_values_and_in_scales)
{
    const char *variable;
    (void)setenv("RESHARD_DAMAGE", "wrong-scale:1:1000", 1);
    ck_assert_int_eq(crash_init(&variable), 0);
    for (uint32_t i = 0; i < 8; i++) {
        open_block(i & 1 ? PROGRAM_SCALES : PROGRAM_QUANTISED, dtypes[i >> 1 & 1], i >= 4);
        ck_assert_uint_ne(fast(), reference());
        ck_assert_uint_eq(fast(), fast());
        close_block();
    }
}
END_TEST

static bool fails_without_memory(long n)
{
    struct device *d = NULL;
    struct device_stream *s = NULL;
    struct plane_work work = {0};
    struct batch b;
    struct err e;
    uint64_t sum = 0;
    struct device_host_options o = {0};
    ck_assert_int_eq(device_host_open(0, &o, &d, &e), 0);
    ck_assert_int_eq(device_stream_new(d, "check", &s, &e), 0);
    batch_init(&b, s, &work);
    mem_fail_at(n);
    int r = sample_scaled_fast(&b, &w.block, &sum);
    r = r == 0 ? batch_flush(&b) : r;
    mem_fail_at(0);
    device_stream_free(s);
    if (work.memory != NULL)
        device_free(d, work.memory, PLANE_WORK_BYTES);
    device_close(d);
    ck_assert(r == 0 || r == RS_ENOMEM || r == RS_EEXHAUSTED);
    if (r == 0)
        ck_assert_uint_eq(sum, reference());
    return r != 0;
}

START_TEST(without_memory_it_says_so)
{
    long n = 1;
    open_block(PROGRAM_SCALES, DTYPE_FLOAT32, true);
    while (fails_without_memory(n))
        n++;
    ck_assert_int_gt(n, 1);
    close_block();
}
END_TEST

#define TESTS(X)                                                                                   \
    X(kernels_and_scalar_twin_agree_on_values_and_scales)                                          \
    X(what_is_made_is_by_the_definition)                                                           \
    X(kernels_that_do_it_wrong_each_time_differ_in_values_and_in_scales)                           \
    X(without_memory_it_says_so)

#include "test/lib/main.h"
