/* Casts with scales: the host twin, and what the GPU kernel computes (block by block and thread by
 * thread: the text that nvcc compiles), against the scalar twin bit for bit. What the scalar twin
 * computes is held against the definitions in test_kernels_cast.c. */
#include <check.h>
#include <stdio.h>

#include "test/lib/quantise_cases.h"

enum { CASES = 500, TWINS = 3 };

struct bed {
    uint8_t *from;
    struct quantise_out out[TWINS]; /* the scalar twin's first */
};

static void bed_open(struct bed *b)
{
    b->from = aligned_alloc(64, QUANTISE_FROM);
    for (unsigned i = 0; i < TWINS; i++) {
        b->out[i].to = aligned_alloc(64, QUANTISE_TO);
        b->out[i].scales = malloc(QUANTISE_SCALES * sizeof(uint32_t));
        b->out[i].amax = malloc(sizeof(uint32_t));
        b->out[i].sum = malloc(sizeof(uint64_t));
    }
}

static void bed_close(struct bed *b)
{
    free(b->from);
    for (unsigned i = 0; i < TWINS; i++) {
        free(b->out[i].to);
        free(b->out[i].scales);
        free(b->out[i].amax);
        free(b->out[i].sum);
    }
}

static void launch(const struct kernel_quantise *q, uint32_t n_blocks)
{
    static struct kernel_quantise_batch b;
    b.n_tasks = b.n_blocks = 0;
    struct kernel_quantise_task t = kernel_quantise_task_of(q, q->fingerprint);
    kernel_quantise_batch_add(&b, &t);
    kernel_quantise_batch_run_host(&b, n_blocks);
}

static void compare(struct bed *b, const struct kernel_quantise *q, uint32_t n_blocks,
                    const char *what)
{
    struct kernel_quantise host = quantise_into(q, &b->out[0], &b->out[1]);
    struct kernel_quantise threads = quantise_into(q, &b->out[0], &b->out[2]);
    kernel_quantise_reference(q);
    kernel_quantise_host(&host);
    launch(&threads, n_blocks);
    for (unsigned i = 1; i < TWINS; i++)
        if (!quantise_out_equal(&b->out[0], &b->out[i]))
            ck_abort_msg("%s: twin %u, step %u, dtype %u: %llu x %llu in blocks of %llu x %llu",
                         what, i, q->step, q->from_dtype, (unsigned long long)q->rows,
                         (unsigned long long)q->columns, (unsigned long long)q->block_rows,
                         (unsigned long long)q->block_columns);
}

START_TEST(both_twins_are_the_scalar_one_over_shapes_blocks_windows_and_odd_values)
{
    struct bed b;
    uint64_t seed = 31;
    char name[32];
    bed_open(&b);
    for (unsigned i = 0; i < CASES; i++) {
        struct kernel_quantise q = random_quantise(&seed, b.from, &b.out[0]);
        uint32_t amax = random_amax(&seed);
        for (unsigned k = 0; k < TWINS; k++)
            quantise_out_reset(&b.out[k], amax);
        (void)snprintf(name, sizeof name, "case %u", i);
        compare(&b, &q, 1 + (uint32_t)below(&seed, 7), name);
    }
    bed_close(&b);
}
END_TEST

/* The widest accesses, whole blocks and none: what weights look like. */
START_TEST(blocks_of_128_x_128_are_the_scalar_ones_at_their_edges_too)
{
    static const uint32_t sizes[][2] = {{128, 128}, {256, 384}, {300, 328}, {129, 136}, {1, 8}};
    struct bed b;
    uint64_t seed = 32;
    bed_open(&b);
    for (unsigned i = 0; i < 2 * sizeof sizes / sizeof *sizes; i++) {
        uint8_t dtype = i % 2 == 0 ? KERNEL_BFLOAT16 : KERNEL_FLOAT32;
        uint32_t rows = sizes[i / 2][0], columns = sizes[i / 2][1];
        rows = dtype == KERNEL_FLOAT32 && rows > 128 ? 128 : rows;
        odd_values(&seed, b.from, QUANTISE_FROM, dtype);
        for (unsigned k = 0; k < TWINS; k++)
            quantise_out_reset(&b.out[k], 0);
        struct kernel_quantise q = {.from = b.from,
                                    .from_stride = columns * kernel_dtype_bytes(dtype),
                                    .rows = rows,
                                    .columns = columns,
                                    .block_rows = 128,
                                    .block_columns = 128,
                                    .scales = b.out[0].scales,
                                    .window_rows = rows,
                                    .window_columns = columns,
                                    .to = {{b.out[0].to, columns}},
                                    .fingerprint = b.out[0].sum,
                                    .offset = {256, 512},
                                    .n_targets = 1,
                                    .from_dtype = dtype};
        compare(&b, &q, 3, "aligned");
    }
    bed_close(&b);
}
END_TEST

START_TEST(the_greatest_of_a_block_becomes_448_and_a_zero_block_has_scale_1)
{
    struct bed b;
    bed_open(&b);
    uint16_t *from = (uint16_t *)(void *)b.from;
    for (unsigned i = 0; i < 256 * 128; i++)
        from[i] = i < 128 * 128 ? 0x3F80 : 0; /* 1.0 */
    from[77] = 0xC0E0;                        /* -7.0 */
    struct kernel_quantise q = {.from = from,
                                .from_stride = 256,
                                .rows = 256,
                                .columns = 128,
                                .block_rows = 128,
                                .block_columns = 128,
                                .window_rows = 256,
                                .window_columns = 128,
                                .n_targets = 1,
                                .from_dtype = KERNEL_BFLOAT16};
    for (unsigned i = 0; i < TWINS; i++) {
        float scale[2];
        q.scales = b.out[i].scales;
        q.to[0] = (struct kernel_quantise_target){b.out[i].to, 128};
        if (i == 0)
            kernel_quantise_reference(&q);
        else if (i == 1)
            kernel_quantise_host(&q);
        else
            launch(&q, 1);
        memcpy(scale, q.scales, sizeof scale);
        ck_assert(scale[0] == 7.0F / 448.0F && scale[1] == 1.0F);
        ck_assert_uint_eq(b.out[i].to[77], 0xFE); /* -448 */
        ck_assert_uint_eq(b.out[i].to[0], 0x68);  /* 64 */
        ck_assert_uint_eq(b.out[i].to[128 * 128], 0);
    }
    bed_close(&b);
}
END_TEST

/* As the data plane takes it: cleared, found in parts, used. */
START_TEST(a_maximum_found_in_parts_is_that_of_the_whole)
{
    enum { ROWS = 60, COLUMNS = 96 };
    struct bed b;
    uint64_t seed = 33;
    bed_open(&b);
    for (unsigned round = 0; round < 20; round++) {
        odd_values(&seed, b.from, QUANTISE_FROM, KERNEL_FLOAT32);
        for (unsigned k = 0; k < TWINS; k++)
            quantise_out_reset(&b.out[k], 0x7F000000);
        struct kernel_quantise q = {.from_stride = COLUMNS * 4,
                                    .rows = 20,
                                    .columns = COLUMNS,
                                    .amax_bits = b.out[1].amax,
                                    .from_dtype = KERNEL_FLOAT32,
                                    .step = KERNEL_QUANTISE_CLEAR};
        kernel_quantise_host(&q);
        ck_assert_uint_eq(*b.out[1].amax, 0);
        q.step = KERNEL_QUANTISE_AMAX;
        for (unsigned part = 0; part < ROWS / 20; part++) {
            q.from = b.from + part * 20 * COLUMNS * 4;
            if (part == 1)
                launch(&q, 2);
            else
                kernel_quantise_host(&q);
        }
        q.from = b.from;
        q.rows = ROWS;
        q.amax_bits = b.out[0].amax;
        *q.amax_bits = 0;
        kernel_quantise_reference(&q);
        ck_assert_uint_eq(*b.out[1].amax, *b.out[0].amax);
    }
    bed_close(&b);
}
END_TEST

START_TEST(one_scale_alone_is_made_of_a_maximum)
{
    float scales[2] = {0, 0}, amax = 7;
    uint32_t bits;
    memcpy(&bits, &amax, sizeof bits);
    struct kernel_quantise q = {.scales = (uint32_t *)(void *)&scales[0],
                                .amax_bits = &bits,
                                .from_dtype = KERNEL_BFLOAT16,
                                .step = KERNEL_QUANTISE_BY_AMAX};
    kernel_quantise_host(&q);
    q.scales = (uint32_t *)(void *)&scales[1];
    launch(&q, 1);
    ck_assert(scales[0] == 7.0F / 448.0F && scales[1] == 7.0F / 448.0F);
}
END_TEST

/* Of all sizes, with sums and without: each block finds its task. */
START_TEST(a_launch_of_many_tasks_is_what_they_are_one_by_one)
{
    static struct kernel_quantise_batch b;
    struct bed bed;
    uint64_t seed = 34, sums[2][KERNEL_QUANTISE_BATCH_TASKS];
    uint8_t *at;
    bed_open(&bed);
    for (unsigned round = 0; round < 20; round++) {
        odd_values(&seed, bed.from, QUANTISE_FROM, KERNEL_BFLOAT16);
        memset(sums, 0, sizeof sums);
        for (unsigned k = 0; k < 2; k++)
            quantise_out_reset(&bed.out[k], 0);
        b.n_tasks = b.n_blocks = 0;
        at = bed.out[1].to;
        for (unsigned i = 0; i < KERNEL_QUANTISE_BATCH_TASKS; i++) {
            uint64_t rows = below(&seed, 40), columns = 1 + below(&seed, 60);
            struct kernel_quantise q = {.from = bed.from + 2 * below(&seed, 1000),
                                        .from_stride = (int64_t)columns * 2,
                                        .rows = rows,
                                        .columns = columns,
                                        .block_rows = 1 + below(&seed, 16),
                                        .block_columns = 1 + below(&seed, 64),
                                        .window_rows = rows,
                                        .window_columns = columns,
                                        .to = {{at, (int64_t)columns}},
                                        .fingerprint = i % 3 == 0 ? NULL : &sums[1][i],
                                        .offset = {i, 3 * i},
                                        .n_targets = 1,
                                        .from_dtype = KERNEL_BFLOAT16};
            struct kernel_quantise_task t = kernel_quantise_task_of(&q, &sums[1][i]);
            kernel_quantise_batch_add(&b, &t);
            q.to[0].base = bed.out[0].to + (at - bed.out[1].to);
            q.fingerprint = i % 3 == 0 ? NULL : &sums[0][i];
            kernel_quantise_reference(&q);
            at += rows * columns;
        }
        kernel_quantise_batch_run_host(&b, 1 + (uint32_t)below(&seed, 30));
        ck_assert_mem_eq(bed.out[1].to, bed.out[0].to, QUANTISE_TO);
        ck_assert_mem_eq(sums[1], sums[0], sizeof sums[0]);
    }
    bed_close(&bed);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(both_twins_are_the_scalar_one_over_shapes_blocks_windows_and_odd_values)                     \
    X(blocks_of_128_x_128_are_the_scalar_ones_at_their_edges_too)                                  \
    X(the_greatest_of_a_block_becomes_448_and_a_zero_block_has_scale_1)                            \
    X(a_maximum_found_in_parts_is_that_of_the_whole)                                               \
    X(one_scale_alone_is_made_of_a_maximum)                                                        \
    X(a_launch_of_many_tasks_is_what_they_are_one_by_one)
#include "test/lib/main.h"
