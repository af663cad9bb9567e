/* What the fingerprint promises: the numbers of an independent program, the same sum for any
 * decomposition, a change for each kind of fault. */
#include <check.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "kernels/fingerprint.h"
#include "kernels/kernels.h"
#include "kernels/kernels_dtype.h"

static uint64_t below(uint64_t *seed, uint64_t n)
{
    return random_next(seed) % n;
}

/* A dense row-major tensor. */
struct dense {
    uint8_t *data;
    uint64_t size[KERNEL_MAX_DIMS];
    uint8_t n_dims;
    uint8_t dtype;
};

static void dense_strides(const struct dense *t, int64_t *ret_stride)
{
    int64_t stride = kernel_dtype_bytes(t->dtype);
    for (unsigned d = t->n_dims; d-- > 0;) {
        ret_stride[d] = stride;
        stride *= (int64_t)t->size[d];
    }
}

/* Of the box at `begin` of that size; the tensor's element 0 has the coordinates `origin`. */
static uint64_t box_sum(const struct dense *t, const uint64_t *origin, const uint64_t *begin,
                        const uint64_t *size)
{
    uint64_t sum = 0;
    struct kernel_fingerprint f = {.fingerprint = &sum, .n_dims = t->n_dims, .dtype = t->dtype};
    uint8_t *base = t->data;
    dense_strides(t, f.from.stride_bytes);
    for (unsigned d = 0; d < t->n_dims; d++) {
        f.size[d] = size[d];
        f.offset[d] = origin[d] + begin[d];
        base += (int64_t)begin[d] * f.from.stride_bytes[d];
    }
    f.from.base = base;
    kernel_fingerprint_host(&f);
    return sum;
}

static const uint64_t ZERO[KERNEL_MAX_DIMS];

static uint64_t whole_sum(const struct dense *t)
{
    return box_sum(t, ZERO, ZERO, t->size);
}

/* test/lib/fingerprint.py prints these. */
START_TEST(weights_and_fingerprints_are_those_of_the_independent_program)
{
    static const struct {
        uint64_t q;
        uint32_t weight;
    } words[] = {{0, 0xd21f7249},          {1, 0x9493a811},          {2, 0xbfab0e23},
                 {12345, 0x898359bb},      {0x7FFFFFFF, 0xae8dce51}, {0x80000000, 0x30c1bc7b},
                 {0x200000005, 0xae1cefd7}};
    static const struct {
        uint64_t fingerprint;
        uint64_t size[KERNEL_MAX_DIMS], offset[KERNEL_MAX_DIMS];
        uint8_t n_dims, dtype;
    } boxes[] = {
        {0x5803a68dd8b8ceb6, {0}, {0}, 0, KERNEL_FLOAT32},
        {0x4ecbcadb6, {0}, {0}, 0, KERNEL_UINT8},
        {0xc2698731a6ba6c4a, {5}, {0}, 1, KERNEL_BFLOAT16},
        {0xc48f03def511f114, {3, 5}, {0}, 2, KERNEL_BFLOAT16},
        {0x9cd225d7caa50c30, {3, 5}, {7, 3}, 2, KERNEL_FLOAT16},
        {0x30da4575aa863148, {2, 3, 7}, {1, 2, 1}, 3, KERNEL_FLOAT8_E4M3FN},
        {0xf71257fca34657a8, {4}, {0}, 1, KERNEL_FLOAT64},
        {0x69e3a6486ca09ab0, {2, 2}, {0, 0x7FFFFFFF}, 2, KERNEL_FLOAT32},
        {0x37a73b3fdebe6810, {1, 2, 1, 2, 1, 2, 1, 3}, {8, 7, 6, 5, 4, 3, 2, 1}, 8, KERNEL_INT16}};
    for (unsigned i = 0; i < sizeof words / sizeof *words; i++)
        ck_assert_uint_eq(fingerprint_word_weight(words[i].q), words[i].weight);
    ck_assert_uint_eq(fingerprint_dim_weight(0, 0), 0x8209b480faed1b11);
    ck_assert_uint_eq(fingerprint_dim_weight(0, 1), 0x2d0f28c7e7e786b3);
    ck_assert_uint_eq(fingerprint_dim_weight(1, 0), 0x6c23aacca1387409);
    ck_assert_uint_eq(fingerprint_dim_weight(6, UINT64_C(1) << 40), 0xb493b2a12c92873f);
    uint8_t data[128];
    for (unsigned i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(7 * i * i + 13 * i + 5);
    for (unsigned i = 0; i < sizeof boxes / sizeof *boxes; i++) {
        struct dense t = {.data = data, .n_dims = boxes[i].n_dims, .dtype = boxes[i].dtype};
        memcpy(t.size, boxes[i].size, sizeof t.size);
        ck_assert_uint_eq(box_sum(&t, boxes[i].offset, ZERO, t.size), boxes[i].fingerprint);
    }
}
END_TEST

static struct dense random_dense(uint64_t *seed)
{
    struct dense t = {.n_dims = (uint8_t)(1 + below(seed, 4)),
                      .dtype = (uint8_t)(1 + below(seed, KERNEL_DTYPE_END - 1))};
    uint64_t bytes = kernel_dtype_bytes(t.dtype);
    for (unsigned d = 0; d < t.n_dims; d++)
        bytes *= t.size[d] = 2 + below(seed, 9);
    t.data = malloc(bytes);
    for (uint64_t i = 0; i < bytes; i++)
        t.data[i] = (uint8_t)random_next(seed);
    return t;
}

/* Sums of the parts of a box that is cut at random until `depth` is used up. */
static uint64_t cut_sum(uint64_t *seed, const struct dense *t, const uint64_t *origin,
                        const uint64_t *begin, const uint64_t *size, unsigned depth)
{
    unsigned d = (unsigned)below(seed, t->n_dims);
    if (depth == 0 || size[d] < 2)
        return box_sum(t, origin, begin, size);
    uint64_t at = 1 + below(seed, size[d] - 1), part_begin[KERNEL_MAX_DIMS],
             part_size[KERNEL_MAX_DIMS];
    memcpy(part_begin, begin, sizeof part_begin);
    memcpy(part_size, size, sizeof part_size);
    part_size[d] = at;
    uint64_t sum = cut_sum(seed, t, origin, part_begin, part_size, depth - 1);
    part_begin[d] += at;
    part_size[d] = size[d] - at;
    return sum + cut_sum(seed, t, origin, part_begin, part_size, depth - 1);
}

START_TEST(the_sum_over_boxes_does_not_depend_on_how_the_tensor_is_cut)
{
    uint64_t seed = 1;
    for (unsigned i = 0; i < 500; i++) {
        struct dense t = random_dense(&seed);
        uint64_t origin[KERNEL_MAX_DIMS];
        for (unsigned d = 0; d < KERNEL_MAX_DIMS; d++)
            origin[d] = below(&seed, 1000);
        uint64_t whole = box_sum(&t, origin, ZERO, t.size);
        ck_assert_uint_eq(cut_sum(&seed, &t, origin, ZERO, t.size, 6), whole);
        free(t.data);
    }
}
END_TEST

START_TEST(every_flipped_bit_changes_it)
{
    uint64_t seed = 2;
    for (unsigned i = 0; i < 40; i++) {
        struct dense t = random_dense(&seed);
        uint64_t bits = 8 * kernel_dtype_bytes(t.dtype), whole = whole_sum(&t);
        for (unsigned d = 0; d < t.n_dims; d++)
            bits *= t.size[d];
        for (uint64_t b = 0; b < bits; b += 1 + bits / 400) {
            t.data[b / 8] ^= (uint8_t)(1U << b % 8);
            ck_assert_uint_ne(whole_sum(&t), whole);
            t.data[b / 8] ^= (uint8_t)(1U << b % 8);
        }
        free(t.data);
    }
}
END_TEST

/* The sign bits of all float64 of a row, whose weights in one 64-bit limb would be 2^63. */
START_TEST(flipped_signs_of_64_bit_elements_do_not_cancel)
{
    double values[64], negated[64];
    for (unsigned i = 0; i < 64; i++) {
        values[i] = 1.5 * i + 1;
        negated[i] = i < 2 ? -values[i] : values[i];
    }
    struct dense a = {(uint8_t *)values, {64}, 1, KERNEL_FLOAT64};
    struct dense b = {(uint8_t *)negated, {64}, 1, KERNEL_FLOAT64};
    ck_assert_uint_ne(whole_sum(&a), whole_sum(&b));
}
END_TEST

START_TEST(zeros_that_are_left_out_or_taken_twice_show)
{
    static uint8_t zeros[8 * 64];
    for (uint8_t dtype = 1; dtype < KERNEL_DTYPE_END; dtype++) {
        struct dense t = {zeros, {8, 8}, 2, dtype};
        uint64_t whole = whole_sum(&t), part[KERNEL_MAX_DIMS] = {8, 7},
                 one[KERNEL_MAX_DIMS] = {1, 1};
        ck_assert_uint_ne(whole, 0);
        ck_assert_uint_ne(box_sum(&t, ZERO, ZERO, part), whole);
        ck_assert_uint_ne(box_sum(&t, ZERO, ZERO, one), 0);
        uint64_t elsewhere[KERNEL_MAX_DIMS] = {0, 1};
        ck_assert_uint_ne(box_sum(&t, elsewhere, ZERO, part), box_sum(&t, ZERO, ZERO, part));
    }
}
END_TEST

/* Element (i, j) of a matrix of `columns` columns. */
static uint8_t *at(const struct dense *t, uint64_t i, uint64_t j)
{
    return t->data + (i * t->size[1] + j) * kernel_dtype_bytes(t->dtype);
}

static void exchange(uint8_t *a, uint8_t *b, uint32_t n_bytes)
{
    uint8_t kept[8];
    memcpy(kept, a, n_bytes);
    memcpy(a, b, n_bytes);
    memcpy(b, kept, n_bytes);
}

static void exchange_columns(struct dense *t, uint64_t j, uint64_t k)
{
    for (uint64_t i = 0; i < t->size[0]; i++)
        exchange(at(t, i, j), at(t, i, k), kernel_dtype_bytes(t->dtype));
}

static void exchange_rows(struct dense *t, uint64_t i, uint64_t k)
{
    for (uint64_t j = 0; j < t->size[1]; j++)
        exchange(at(t, i, j), at(t, k, j), kernel_dtype_bytes(t->dtype));
}

static struct dense matrix(uint64_t *seed, uint64_t rows, uint64_t columns, uint8_t dtype)
{
    struct dense t = {.size = {rows, columns}, .n_dims = 2, .dtype = dtype};
    uint64_t bytes = rows * columns * kernel_dtype_bytes(dtype);
    t.data = malloc(bytes);
    for (uint64_t i = 0; i < bytes; i++)
        t.data[i] = (uint8_t)random_next(seed);
    return t;
}

START_TEST(any_two_different_elements_exchanged_change_it)
{
    uint64_t seed = 3;
    static const uint8_t dtypes[] = {KERNEL_UINT8, KERNEL_BFLOAT16, KERNEL_FLOAT32, KERNEL_INT64};
    for (unsigned n = 0; n < 4; n++) {
        struct dense t = matrix(&seed, 5, 9, dtypes[n]);
        uint32_t e = kernel_dtype_bytes(dtypes[n]);
        uint64_t whole = whole_sum(&t);
        for (uint64_t a = 0; a < 45; a++)
            for (uint64_t b = a + 1; b < 45; b++) {
                bool same = memcmp(t.data + a * e, t.data + b * e, e) == 0;
                exchange(t.data + a * e, t.data + b * e, e);
                ck_assert((whole_sum(&t) == whole) == same);
                exchange(t.data + a * e, t.data + b * e, e);
            }
        free(t.data);
    }
}
END_TEST

START_TEST(exchanged_rows_and_columns_change_it)
{
    uint64_t seed = 4;
    static const uint8_t dtypes[] = {KERNEL_INT8, KERNEL_FLOAT16, KERNEL_INT32, KERNEL_FLOAT64};
    for (unsigned n = 0; n < 4; n++) {
        struct dense t = matrix(&seed, 16, 16, dtypes[n]);
        uint64_t whole = whole_sum(&t);
        for (uint64_t a = 0; a < 16; a++)
            for (uint64_t b = a + 1; b < 16; b++) {
                exchange_rows(&t, a, b);
                ck_assert_uint_ne(whole_sum(&t), whole);
                exchange_rows(&t, a, b);
                exchange_columns(&t, a, b);
                ck_assert_uint_ne(whole_sum(&t), whole);
                exchange_columns(&t, a, b);
            }
        ck_assert_uint_eq(whole_sum(&t), whole);
        free(t.data);
    }
}
END_TEST

/* The same bytes at other coordinates: shifted along each dim, transposed, dims exchanged. */
START_TEST(a_box_at_other_coordinates_has_another_fingerprint)
{
    uint64_t seed = 5;
    for (unsigned i = 0; i < 200; i++) {
        struct dense t = random_dense(&seed);
        uint64_t origin[KERNEL_MAX_DIMS] = {3, 5, 8, 13}, whole = box_sum(&t, origin, ZERO, t.size);
        for (unsigned d = 0; d < t.n_dims; d++) {
            uint64_t kept = origin[d];
            for (uint64_t shift = 1; shift < 5; shift++) {
                origin[d] = kept + shift;
                ck_assert_uint_ne(box_sum(&t, origin, ZERO, t.size), whole);
            }
            origin[d] = kept;
            for (unsigned k = d + 1; k < t.n_dims; k++) {
                uint64_t other[KERNEL_MAX_DIMS];
                memcpy(other, origin, sizeof other);
                other[d] = origin[k];
                other[k] = origin[d];
                ck_assert_uint_ne(box_sum(&t, other, ZERO, t.size), whole);
            }
        }
        free(t.data);
    }
}
END_TEST

/* Contents with structure, in which weak weights would cancel: a constant added everywhere, a
 * checkerboard exchanged, contents moved by one column, two experts of a stack exchanged. */
START_TEST(structured_faults_of_structured_contents_change_it)
{
    enum { N = 64 };
    static uint16_t a[4][N][N], b[4][N][N];
    struct dense x = {(uint8_t *)a, {4, N, N}, 3, KERNEL_BFLOAT16};
    struct dense y = {(uint8_t *)b, {4, N, N}, 3, KERNEL_BFLOAT16};
    for (unsigned e = 0; e < 4; e++)
        for (unsigned i = 0; i < N; i++)
            for (unsigned j = 0; j < N; j++)
                a[e][i][j] = (uint16_t)(e << 12 | (i + j) << 4);
    for (unsigned fault = 0; fault < 5; fault++) {
        for (unsigned e = 0; e < 4; e++)
            for (unsigned i = 0; i < N; i++)
                for (unsigned j = 0; j < N; j++)
                    b[e][i][j] = fault == 0   ? (uint16_t)(a[e][i][j] + 0x80)
                                 : fault == 1 ? (uint16_t)(a[e][i][j] ^ ((i + j) % 2 << 15))
                                 : fault == 2 ? a[e][i][(j + 1) % N]
                                 : fault == 3 ? a[e ^ 1][i][j]
                                              : a[e][j ^ 1][i];
        ck_assert_uint_ne(whole_sum(&x), whole_sum(&y));
    }
}
END_TEST

/* --- the weights ------------------------------------------------------------------------------ */

/* The mixer undone, step by step. */
static uint32_t inverse(uint32_t odd)
{
    uint32_t x = odd;
    for (unsigned i = 0; i < 5; i++)
        x *= 2 - odd * x;
    return x;
}

static uint32_t unmix(uint32_t weight)
{
    uint32_t x = weight >> 1;
    x ^= x >> 16;
    x = (x * inverse(FINGERPRINT_WORD_MUL_B)) & FINGERPRINT_WORD_MASK;
    x ^= x >> 15 ^ x >> 30;
    x = (x * inverse(FINGERPRINT_WORD_MUL_A)) & FINGERPRINT_WORD_MASK;
    return x ^ x >> 16;
}

START_TEST(the_mixer_can_be_undone_so_no_two_words_of_a_row_share_a_weight)
{
    uint64_t seed = 6;
    for (unsigned i = 0; i < 200000; i++) {
        uint32_t x = (uint32_t)random_next(&seed) & FINGERPRINT_WORD_MASK;
        ck_assert(unmix(fingerprint_word_mix(x)) == x);
    }
}
END_TEST

/* Sums of W over aligned blocks are 2^k plus twice a sum: how many have how many factors of two is
 * geometric if the weights are random to each other. 4096 blocks, so about 16 with nine or more. */
START_TEST(sums_of_weights_over_blocks_have_no_more_factors_of_two_than_chance)
{
    for (unsigned k = 1; k <= 10; k++) {
        unsigned many = 0;
        for (uint64_t block = 0; block < 4096; block++) {
            uint64_t sum = 0;
            for (uint64_t i = 0; i < UINT64_C(1) << k; i++)
                sum += fingerprint_word_weight((block << k) + i);
            many += sum % 512 == 0;
        }
        ck_assert_uint_ge(many, 3);
        ck_assert_uint_le(many, 40);
    }
}
END_TEST

/* Each bit of the weight of q+1 differs from that of q half of the time: 100,000 pairs, 6 sigma. */
START_TEST(weights_of_neighbours_are_not_related)
{
    unsigned differ[32] = {0}, row_differ[64] = {0};
    for (uint64_t q = 0; q < 100000; q++) {
        uint32_t x = fingerprint_word_weight(q) ^ fingerprint_word_weight(q + 1);
        uint64_t y = fingerprint_dim_weight(1, q) ^ fingerprint_dim_weight(1, q + 1);
        for (unsigned b = 0; b < 32; b++)
            differ[b] += x >> b & 1;
        for (unsigned b = 0; b < 64; b++)
            row_differ[b] += (unsigned)(y >> b & 1);
    }
    for (unsigned b = 1; b < 64; b++) {
        ck_assert_uint_ge(row_differ[b], 49050);
        ck_assert_uint_le(row_differ[b], 50950);
        ck_assert_uint_ge(b < 32 ? differ[b] : 50000, 49050);
        ck_assert_uint_le(b < 32 ? differ[b] : 50000, 50950);
    }
    ck_assert_uint_eq(differ[0] + row_differ[0], 0); /* odd */
}
END_TEST

#define TESTS(X)                                                                                   \
    X(weights_and_fingerprints_are_those_of_the_independent_program)                               \
    X(the_sum_over_boxes_does_not_depend_on_how_the_tensor_is_cut)                                 \
    X(every_flipped_bit_changes_it)                                                                \
    X(flipped_signs_of_64_bit_elements_do_not_cancel)                                              \
    X(zeros_that_are_left_out_or_taken_twice_show)                                                 \
    X(any_two_different_elements_exchanged_change_it)                                              \
    X(exchanged_rows_and_columns_change_it)                                                        \
    X(a_box_at_other_coordinates_has_another_fingerprint)                                          \
    X(structured_faults_of_structured_contents_change_it)                                          \
    X(the_mixer_can_be_undone_so_no_two_words_of_a_row_share_a_weight)                             \
    X(sums_of_weights_over_blocks_have_no_more_factors_of_two_than_chance)                         \
    X(weights_of_neighbours_are_not_related)
#include "test/lib/main.h"
