/* Copies and fingerprints of strided boxes: the fast twins, with every instruction set that this
 * CPU has, against the scalar ones bit for bit. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "kernels/kernels.h"
#include "kernels/kernels_dtype.h"
#include "kernels/kernels_run.h"
#include "layout/dtype.h"
#include "test/lib/kernel_cases.h"

enum { CASES = 1500 };

static void compare_copy(struct kernel_copy *c, struct arenas *a, const struct kernel_runs *runs,
                         bool fingerprint)
{
    uint64_t sums[2] = {77, 77};
    memset(a->to[0], POISON, ARENA_BYTES);
    memset(a->to[1], POISON, ARENA_BYTES);
    c->fingerprint = fingerprint ? &sums[0] : NULL;
    kernel_copy_with(c, runs);
    struct kernel_copy reference = *c;
    reference.fingerprint = fingerprint ? &sums[1] : NULL;
    for (uint32_t t = 0; t < c->n_targets; t++)
        reference.to[t].base = a->to[1] + ((uint8_t *)c->to[t].base - a->to[0]);
    kernel_copy_reference(&reference);
    ck_assert_uint_eq(sums[0], sums[1]);
    ck_assert_mem_eq(a->to[0], a->to[1], ARENA_BYTES);
}

START_TEST(fast_copies_equal_the_reference_for_random_shapes_strides_and_dtypes)
{
    uint64_t seed = 1;
    struct arenas a = arenas_new(&seed);
    for (unsigned i = 0; i < CASES; i++) {
        struct kernel_copy c = random_copy(&seed, &a);
        for (enum kernel_isa isa = 0; isa < KERNEL_N_ISAS; isa++)
            if (kernel_runs(isa) != NULL)
                compare_copy(&c, &a, kernel_runs(isa), below(&seed, 3) != 0);
    }
    arenas_free(&a);
}
END_TEST

START_TEST(fast_fingerprints_equal_the_reference_for_random_boxes)
{
    uint64_t seed = 2;
    struct arenas a = arenas_new(&seed);
    for (unsigned i = 0; i < CASES; i++) {
        struct kernel_copy c = random_copy(&seed, &a);
        uint64_t sums[2];
        struct kernel_fingerprint f = {
            .from = c.from, .n_dims = c.n_dims, .dtype = c.from_dtype, .fingerprint = &sums[1]};
        memcpy(f.size, c.size, sizeof f.size);
        memcpy(f.offset, c.offset, sizeof f.offset);
        sums[1] = i;
        kernel_fingerprint_reference(&f);
        for (enum kernel_isa isa = 0; isa < KERNEL_N_ISAS; isa++) {
            if (kernel_runs(isa) == NULL)
                continue;
            sums[0] = i;
            f.fingerprint = &sums[0];
            kernel_fingerprint_with(&f, kernel_runs(isa));
            ck_assert_uint_eq(sums[0], sums[1]);
        }
    }
    arenas_free(&a);
}
END_TEST

/* Rows of 1 … 700 bytes at every alignment of either side: edges of lines, masks and chunks. */
START_TEST(every_row_length_and_alignment_is_copied_and_summed_exactly)
{
    uint64_t seed = 3;
    struct arenas a = arenas_new(&seed);
    for (uint64_t n = 1; n <= 700; n += 1 + n / 40) {
        struct kernel_copy c = {.size = {3, n},
                                .offset = {5, n % 7},
                                .from = {a.from + below(&seed, 64), {997, 1}},
                                .to = {{a.to[0] + below(&seed, 64), {1009, 1}}},
                                .n_targets = 1,
                                .n_dims = 2,
                                .from_dtype = KERNEL_UINT8,
                                .to_dtype = KERNEL_UINT8,
                                .streaming = n % 4 != 0};
        for (enum kernel_isa isa = 0; isa < KERNEL_N_ISAS; isa++)
            if (kernel_runs(isa) != NULL)
                compare_copy(&c, &a, kernel_runs(isa), n % 3 != 0);
    }
    arenas_free(&a);
}
END_TEST

/* Rows longer than a chunk (8 KiB of weights), with phases that cut words. */
START_TEST(rows_longer_than_a_chunk_are_summed_without_a_seam)
{
    uint64_t seed = 4;
    struct arenas a = arenas_new(&seed);
    static const uint8_t dtypes[] = {KERNEL_UINT8, KERNEL_BFLOAT16, KERNEL_FLOAT32, KERNEL_INT64};
    for (unsigned i = 0; i < 40; i++) {
        uint8_t dtype = dtypes[i % 4];
        uint32_t e = kernel_dtype_bytes(dtype);
        uint64_t columns = (8100 + below(&seed, 20000)) / e;
        struct kernel_copy c = {.size = {2, columns},
                                .offset = {i, below(&seed, 9)},
                                .from = {a.from + below(&seed, 9), {(int64_t)(columns * e), e}},
                                .to = {{a.to[0] + below(&seed, 9), {(int64_t)(columns * e), e}}},
                                .n_targets = 1,
                                .n_dims = 2,
                                .from_dtype = dtype,
                                .to_dtype = dtype,
                                .streaming = i % 2};
        for (enum kernel_isa isa = 0; isa < KERNEL_N_ISAS; isa++)
            if (kernel_runs(isa) != NULL)
                compare_copy(&c, &a, kernel_runs(isa), true);
    }
    arenas_free(&a);
}
END_TEST

/* [4, 16, 8], the middle dim cut in two; 4 runs of 64 elements, source stride 128. */
START_TEST(a_middle_dim_slice_is_not_taken_for_one_run)
{
    int32_t from[512], to[256];
    for (int i = 0; i < 512; i++)
        from[i] = i;
    struct kernel_copy c = {.size = {4, 8, 8},
                            .from = {from, {512, 32, 4}},
                            .to = {{to, {256, 32, 4}}},
                            .n_targets = 1,
                            .n_dims = 3,
                            .from_dtype = KERNEL_INT32,
                            .to_dtype = KERNEL_INT32};
    kernel_copy_host(&c);
    for (int i = 0; i < 256; i++)
        ck_assert_int_eq(to[i], i / 64 * 128 + i % 64);
}
END_TEST

START_TEST(a_copy_of_many_targets_writes_each)
{
    uint8_t from[100], to[KERNEL_MAX_TARGETS][100];
    for (unsigned i = 0; i < 100; i++)
        from[i] = (uint8_t)i;
    struct kernel_copy c = {.size = {100},
                            .from = {from, {1}},
                            .n_targets = KERNEL_MAX_TARGETS,
                            .n_dims = 1,
                            .from_dtype = KERNEL_UINT8,
                            .to_dtype = KERNEL_UINT8,
                            .streaming = 1};
    for (unsigned t = 0; t < KERNEL_MAX_TARGETS; t++)
        c.to[t] = (struct kernel_view){to[t], {1}};
    kernel_copy_host(&c);
    for (unsigned t = 0; t < KERNEL_MAX_TARGETS; t++)
        ck_assert_mem_eq(to[t], from, sizeof from);
}
END_TEST

START_TEST(dtype_numbers_and_sizes_are_those_of_the_layout)
{
#define X(name, value, text, bytes)                                                                \
    ck_assert_uint_eq(kernel_dtype_bytes(value), bytes);                                           \
    ck_assert_int_eq((int)name, value);
    DTYPES(X)
#undef X
    ck_assert_int_eq(KERNEL_BFLOAT16, (int)DTYPE_BFLOAT16);
    ck_assert_int_eq(KERNEL_FLOAT16, (int)DTYPE_FLOAT16);
    ck_assert_int_eq(KERNEL_FLOAT32, (int)DTYPE_FLOAT32);
    ck_assert_int_eq(KERNEL_FLOAT8_E4M3FN, (int)DTYPE_FLOAT8_E4M3FN);
    ck_assert_int_eq(KERNEL_BOOL, (int)DTYPE_BOOL);
    ck_assert_uint_eq(kernel_dtype_bytes(0), 0);
    ck_assert_uint_eq(kernel_dtype_bytes(KERNEL_DTYPE_END), 0);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(fast_copies_equal_the_reference_for_random_shapes_strides_and_dtypes)                        \
    X(fast_fingerprints_equal_the_reference_for_random_boxes)                                      \
    X(every_row_length_and_alignment_is_copied_and_summed_exactly)                                 \
    X(rows_longer_than_a_chunk_are_summed_without_a_seam)                                          \
    X(a_middle_dim_slice_is_not_taken_for_one_run)                                                 \
    X(a_copy_of_many_targets_writes_each)                                                          \
    X(dtype_numbers_and_sizes_are_those_of_the_layout)
#include "test/lib/main.h"
