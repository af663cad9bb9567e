/* What the GPU kernels compute, block by block and thread by thread on the CPU, against the scalar
 * twins bit for bit: the text of kernels_body.h is the one that nvcc compiles. */
#include <check.h>
#include <math.h>

#include "base/err.h"
#include "kernels/kernels_task.h"
#include "test/lib/kernel_cases.h"

enum { CASES = 1200 };

static int add_task(const struct kernel_task *t, void *arg)
{
    struct kernel_batch *b = arg;
    ck_assert_uint_lt(b->n_tasks, KERNEL_BATCH_TASKS);
    kernel_batch_add(b, t);
    return 0;
}

static int keep_sums(const struct kernel_task *t, void *arg)
{
    return t->sum != NULL ? add_task(t, arg) : 0;
}

static int keep_copies(const struct kernel_task *t, void *arg)
{
    return t->sum == NULL ? add_task(t, arg) : 0;
}

/* The copy as one launch of each sort. */
static void launch(const struct kernel_copy *c, uint64_t *sum, uint32_t n_blocks)
{
    static struct kernel_batch b;
    b.n_tasks = b.n_tiles = 0;
    ck_assert_int_eq(kernel_tasks_of_copy(c, sum, keep_sums, &b), 0);
    kernel_batch_run_host(&b, n_blocks);
    b.n_tasks = b.n_tiles = 0;
    ck_assert_int_eq(kernel_tasks_of_copy(c, sum, keep_copies, &b), 0);
    kernel_batch_run_host(&b, n_blocks);
}

static void compare(struct kernel_copy *c, struct arenas *a, bool fingerprint, uint32_t n_blocks)
{
    uint64_t sums[2] = {77, 77};
    memset(a->to[0], POISON, ARENA_BYTES);
    memset(a->to[1], POISON, ARENA_BYTES);
    c->fingerprint = fingerprint ? &sums[0] : NULL;
    launch(c, &sums[0], n_blocks);
    struct kernel_copy reference = *c;
    reference.fingerprint = fingerprint ? &sums[1] : NULL;
    for (uint32_t t = 0; t < c->n_targets; t++)
        reference.to[t].base = a->to[1] + ((uint8_t *)c->to[t].base - a->to[0]);
    kernel_copy_reference(&reference);
    ck_assert_uint_eq(sums[0], sums[1]);
    ck_assert_mem_eq(a->to[0], a->to[1], ARENA_BYTES);
}

START_TEST(threads_of_a_gpu_copy_cast_and_sum_what_the_scalar_twin_does)
{
    uint64_t seed = 11;
    struct arenas a = arenas_new(&seed);
    for (unsigned i = 0; i < CASES; i++) {
        struct kernel_copy c = random_copy(&seed, &a);
        compare(&c, &a, below(&seed, 2) == 0, 1 + (uint32_t)below(&seed, 9));
    }
    arenas_free(&a);
}
END_TEST

/* Aligned rows take the wide accesses, which random addresses seldom do. */
START_TEST(aligned_rows_of_every_length_and_cast_are_the_scalar_twins)
{
    static const uint8_t dtypes[][2] = {
        {KERNEL_BFLOAT16, KERNEL_BFLOAT16},     {KERNEL_FLOAT32, KERNEL_FLOAT32},
        {KERNEL_INT64, KERNEL_INT64},           {KERNEL_UINT8, KERNEL_UINT8},
        {KERNEL_FLOAT32, KERNEL_BFLOAT16},      {KERNEL_FLOAT32, KERNEL_FLOAT16},
        {KERNEL_BFLOAT16, KERNEL_FLOAT8_E4M3FN}};
    uint64_t seed = 12;
    struct arenas a = arenas_new(&seed);
    uint8_t *from = a.from + (64 - (uintptr_t)a.from % 64) % 64;
    for (unsigned i = 0; i < 1500; i++) {
        uint32_t in = kernel_dtype_bytes(dtypes[i % 7][0]),
                 out = kernel_dtype_bytes(dtypes[i % 7][1]);
        uint64_t wide = UINT64_C(1) << below(&seed, 5); /* alignment in elements */
        uint64_t columns = wide * (1 + below(&seed, 40)), rows = 1 + below(&seed, 21);
        uint64_t pitch = columns + wide * below(&seed, 3), outer = 1 + below(&seed, 3);
        struct kernel_copy c = {
            .size = {outer, rows, columns},
            .offset = {below(&seed, 9), below(&seed, 1000), wide * below(&seed, 1000)},
            .from = {from, {(int64_t)(rows * pitch * in), (int64_t)(pitch * in), in}},
            .to = {{a.to[0], {(int64_t)(rows * pitch * out), (int64_t)(pitch * out), out}}},
            .n_targets = 1,
            .n_dims = 3,
            .from_dtype = dtypes[i % 7][0],
            .to_dtype = dtypes[i % 7][1]};
        if (outer * rows * pitch * in > ARENA_BYTES - 64)
            continue;
        compare(&c, &a, i % 3 != 0, 1 + (uint32_t)below(&seed, 5));
    }
    arenas_free(&a);
}
END_TEST

/* The shards of a down projection under TP8: runs of 384 bytes out of rows of 3072. */
START_TEST(runs_of_384_bytes_go_by_16_bytes)
{
    static struct kernel_batch b;
    static _Alignas(16) uint16_t from[64 * 1536], to[64 * 192], expected[64 * 192];
    for (unsigned i = 0; i < 64 * 1536; i++)
        from[i] = (uint16_t)(i * 40503U);
    uint64_t sums[2] = {0, 0};
    struct kernel_copy c = {.size = {64, 192},
                            .offset = {0, 192},
                            .from = {from + 192, {3072, 2}},
                            .to = {{to, {384, 2}}},
                            .fingerprint = &sums[0],
                            .n_targets = 1,
                            .n_dims = 2,
                            .from_dtype = KERNEL_BFLOAT16,
                            .to_dtype = KERNEL_BFLOAT16};
    b.n_tasks = b.n_tiles = 0;
    ck_assert_int_eq(kernel_tasks_of_copy(&c, sums, add_task, &b), 0);
    ck_assert_uint_eq(b.n_tasks, 1);
    ck_assert_uint_eq(b.tasks[0].unit, KERNEL_UNIT_16);
    ck_assert_uint_eq(b.tasks[0].units.by, 24);
    kernel_batch_run_host(&b, 3);
    c.to[0].base = expected;
    c.fingerprint = &sums[1];
    kernel_copy_reference(&c);
    ck_assert_mem_eq(to, expected, sizeof to);
    ck_assert_uint_eq(sums[0], sums[1]);
}
END_TEST

/* Rows of 1000 bytes and 6 more, at multiples of 16: an end that is not of 16 bytes costs nothing but
 * itself. */
START_TEST(rows_with_ragged_ends_go_by_16_bytes_but_for_the_end)
{
    enum { ROWS = 9, COLUMNS = 503, PITCH = 512 };
    static struct kernel_batch b;
    static _Alignas(64) uint16_t from[ROWS * PITCH];
    static _Alignas(64) uint16_t to[ROWS * PITCH], expected[ROWS * PITCH];
    for (unsigned i = 0; i < ROWS * PITCH; i++)
        from[i] = (uint16_t)(i * 40503U);
    for (unsigned sum = 0; sum < 2; sum++) {
        uint64_t sums[2] = {0, 0};
        struct kernel_copy c = {.size = {ROWS, COLUMNS},
                                .offset = {5, 64},
                                .from = {from, {2 * PITCH, 2}},
                                .to = {{to, {2 * PITCH, 2}}},
                                .fingerprint = sum != 0 ? &sums[0] : NULL,
                                .n_targets = 1,
                                .n_dims = 2,
                                .from_dtype = KERNEL_BFLOAT16,
                                .to_dtype = KERNEL_BFLOAT16};
        b.n_tasks = b.n_tiles = 0;
        ck_assert_int_eq(kernel_tasks_of_copy(&c, &sums[0], add_task, &b), 0);
        ck_assert_uint_eq(b.n_tasks, 2);
        ck_assert_uint_eq(b.tasks[0].unit, KERNEL_UNIT_16);
        ck_assert_uint_eq(b.tasks[0].units.by, COLUMNS / 8);
        memset(to, POISON, sizeof to);
        memset(expected, POISON, sizeof expected);
        kernel_batch_run_host(&b, 3);
        c.to[0].base = expected;
        c.fingerprint = sum != 0 ? &sums[1] : NULL;
        kernel_copy_reference(&c);
        ck_assert_mem_eq(to, expected, sizeof to);
        ck_assert_uint_eq(sums[0], sums[1]);
    }
}
END_TEST

START_TEST(a_copy_to_more_targets_than_a_task_has_writes_each_and_sums_once)
{
    uint64_t seed = 13;
    struct arenas a = arenas_new(&seed);
    struct kernel_copy c = {.size = {7, 40},
                            .from = {a.from, {80, 2}},
                            .n_targets = KERNEL_MAX_TARGETS,
                            .n_dims = 2,
                            .from_dtype = KERNEL_BFLOAT16,
                            .to_dtype = KERNEL_BFLOAT16};
    for (unsigned t = 0; t < KERNEL_MAX_TARGETS; t++)
        c.to[t] = (struct kernel_view){a.to[0] + t * 1000, {80 + 16 * (int64_t)(t % 3), 2}};
    compare(&c, &a, true, 2);
    compare(&c, &a, false, 2);
    arenas_free(&a);
}
END_TEST

/* Many tasks of all sizes in one launch: each tile finds its task from whatever block comes to it. */
START_TEST(a_batch_of_many_tasks_is_what_they_are_one_by_one)
{
    enum { COPIES = KERNEL_BATCH_TASKS / 2 }; /* of at most two tasks each */
    uint64_t seed = 14;
    struct arenas a = arenas_new(&seed);
    uint8_t *all = calloc(1, ARENA_BYTES);
    for (unsigned round = 0; round < 40; round++) {
        static struct kernel_batch b;
        uint64_t sums[COPIES] = {0}, expected[COPIES] = {0};
        bool sum = round % 2 == 0;
        uint8_t *at = a.to[0];
        memset(a.to[0], POISON, ARENA_BYTES);
        memset(all, POISON, ARENA_BYTES);
        b.n_tasks = b.n_tiles = 0;
        for (unsigned i = 0; i < COPIES; i++) {
            uint64_t rows = 1 + below(&seed, 30), columns = 1 + below(&seed, 60);
            struct kernel_copy c = {.size = {rows, columns},
                                    .offset = {i, 3 * i},
                                    .from = {a.from + below(&seed, 1000), {(int64_t)columns, 1}},
                                    .to = {{at, {(int64_t)columns, 1}}},
                                    .fingerprint = sum ? &sums[i] : NULL,
                                    .n_targets = 1,
                                    .n_dims = 2,
                                    .from_dtype = KERNEL_UINT8,
                                    .to_dtype = KERNEL_UINT8};
            ck_assert_int_eq(kernel_tasks_of_copy(&c, &sums[i], add_task, &b), 0);
            c.to[0].base = all + (at - a.to[0]);
            c.fingerprint = &expected[i];
            kernel_copy_reference(&c);
            at += rows * columns;
            if (!sum)
                expected[i] = 0;
        }
        kernel_batch_run_host(&b, 1 + (uint32_t)below(&seed, 70));
        ck_assert_mem_eq(a.to[0], all, ARENA_BYTES);
        ck_assert_mem_eq(sums, expected, sizeof sums);
    }
    free(all);
    arenas_free(&a);
}
END_TEST

START_TEST(division_by_a_constant_is_exact_below_2_31)
{
    static const uint32_t at[] = {1, 2, 3, 5, 7, 24, 25, 641, 65535, 65536, 65537, 0x7FFFFFFF};
    uint64_t seed = 15;
    for (unsigned i = 0; i < sizeof at / sizeof *at + 300; i++) {
        uint32_t by = i < sizeof at / sizeof *at ? at[i] : 1 + (uint32_t)below(&seed, INT32_MAX);
        struct kernel_divisor d = kernel_divisor_of(by);
        for (unsigned k = 0; k < 3000; k++) {
            uint64_t multiple = below(&seed, INT32_MAX / by + 1) * by;
            uint64_t n = k % 3 == 0   ? below(&seed, INT32_MAX)
                         : k % 3 == 1 ? multiple
                                      : multiple - (multiple > 0);
            uint32_t q = d.by == 1 ? (uint32_t)n : (uint32_t)((n * d.multiplier) >> 32) >> d.shift;
            ck_assert_uint_eq(q, n / by);
        }
    }
}
END_TEST

struct tally {
    uint64_t units;
    uint32_t n;
};

static int tally_task(const struct kernel_task *t, void *arg)
{
    struct tally *y = arg;
    y->units += (uint64_t)t->n_units * (t->sum == NULL ? 1 : KERNEL_SUM_ROWS);
    y->n++;
    ck_assert_uint_lt(t->n_units, UINT32_C(1) << 31);
    return 0;
}

/* Nothing is touched: only the arithmetic. */
START_TEST(a_huge_box_is_cut_into_tasks_that_32_bits_can_count)
{
    uint64_t sum = 0;
    char *nowhere = (char *)(uintptr_t)(1 << 20);
    struct kernel_copy c = {.size = {UINT64_C(1) << 14, UINT64_C(1) << 21},
                            .from = {nowhere, {(int64_t)1 << 22, 2}},
                            .to = {{nowhere, {(int64_t)1 << 23, 2}}},
                            .n_targets = 1,
                            .n_dims = 2,
                            .from_dtype = KERNEL_BFLOAT16,
                            .to_dtype = KERNEL_BFLOAT16};
    struct tally y = {0};
    ck_assert_int_eq(kernel_tasks_of_copy(&c, NULL, tally_task, &y), 0);
    ck_assert_uint_eq(y.n, 32);
    ck_assert_uint_eq(y.units, UINT64_C(1) << (14 + 21 + 1 - 4));
    c.fingerprint = &sum;
    y = (struct tally){0};
    ck_assert_int_eq(kernel_tasks_of_copy(&c, &sum, tally_task, &y), 0);
    ck_assert_uint_eq(y.n, 32);
    ck_assert_uint_eq(y.units, UINT64_C(1) << (14 + 21 + 1 - 4));
}
END_TEST

#define TESTS(X)                                                                                   \
    X(threads_of_a_gpu_copy_cast_and_sum_what_the_scalar_twin_does)                                \
    X(aligned_rows_of_every_length_and_cast_are_the_scalar_twins)                                  \
    X(runs_of_384_bytes_go_by_16_bytes)                                                            \
    X(rows_with_ragged_ends_go_by_16_bytes_but_for_the_end)                                        \
    X(a_copy_to_more_targets_than_a_task_has_writes_each_and_sums_once)                            \
    X(a_batch_of_many_tasks_is_what_they_are_one_by_one)                                           \
    X(division_by_a_constant_is_exact_below_2_31)                                                  \
    X(a_huge_box_is_cut_into_tasks_that_32_bits_can_count)
#include "test/lib/main.h"
