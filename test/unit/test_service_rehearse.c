/* What sources of a rehearsal must have published, against fingerprints of whole shards that were filled element by element. */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "kernels/kernels.h"
#include "layout/coordinates.h"
#include "service/rehearse.h"
#include "service/state.h"

enum { MOST_RANKS = 4, MOST_TENSORS = 8 };

struct bed {
    struct layout *layout;
    struct publication publications[MOST_RANKS];
    struct publication *of[MOST_RANKS];
    uint64_t prints[MOST_RANKS][MOST_TENSORS];
};

/* All dims from 0 to 4, rows longer than a tile, rows of one element, several boxes, replicas. */
static const char layout_text[] =
    "{\"name\": \"train\", \"ranks\": 4, \"meshes\": [{\"name\": \"m\", \"shape\": [4], \"ranks\": "
    "[0, 1, 2, 3]}],"
    "\"tensors\": ["
    "{\"name\": \"a\", \"shape\": [], \"dtype\": \"float64\", \"mesh\": \"m\", \"placements\": "
    "[\"Replicate\"]},"
    "{\"name\": \"b\", \"shape\": [70001], \"dtype\": \"bfloat16\", \"mesh\": \"m\", "
    "\"placements\": [\"Shard(0)\"]},"
    "{\"name\": \"c\", \"shape\": [3, 140000], \"dtype\": \"uint8\", \"mesh\": \"m\", "
    "\"placements\": [\"Shard(1)\"]},"
    "{\"name\": \"d\", \"shape\": [5, 7, 8], \"dtype\": \"int64\", \"mesh\": \"m\", "
    "\"placements\": [\"Shard(2)\"]},"
    "{\"name\": \"e\", \"shape\": [3, 5, 9, 6], \"dtype\": \"float32\", \"mesh\": \"m\", "
    "\"placements\": [\"Shard(1)\"]},"
    "{\"name\": \"f\", \"shape\": [40000, 1], \"dtype\": \"float8_e4m3fn\", \"mesh\": \"m\", "
    "\"placements\": [\"Shard(0)\"]},"
    "{\"name\": \"g\", \"shape\": [8, 4], \"dtype\": \"bool\", \"regions\": ["
    "{\"rank\": 0, \"offset\": [0, 0], \"size\": [4, 2]}, {\"rank\": 0, \"offset\": [4, 2], "
    "\"size\": [4, 2]},"
    "{\"rank\": 1, \"offset\": [0, 2], \"size\": [4, 2]}, {\"rank\": 2, \"offset\": [4, 0], "
    "\"size\": [4, 2]}]}]}";

/* Element by element, dense. */
static uint64_t box_print(const struct tensor *t, const struct box *b)
{
    uint64_t n = box_elements(b), sum = 0, bytes = dtype_bytes(t->dtype);
    char *data = calloc(n, bytes);
    struct kernel_fingerprint f = {
        .fingerprint = &sum, .n_dims = t->n_dims, .dtype = (uint8_t)t->dtype};
    uint64_t stride = bytes;
    for (unsigned d = t->n_dims; d-- > 0; stride *= b->size[d]) {
        f.size[d] = b->size[d];
        f.offset[d] = b->offset[d];
        f.from.stride_bytes[d] = (int64_t)stride;
    }
    for (uint64_t i = 0; i < n; i++) {
        uint64_t at[BOX_MAX_DIMS] = {0}, rest = i;
        for (unsigned d = t->n_dims; d-- > 0; rest /= b->size[d])
            at[d] = b->offset[d] + rest % b->size[d];
        uint32_t row = coordinates_row(coordinates_seed(t->name), t->n_dims, at);
        uint64_t bits = coordinates_bits(t->dtype, row, t->n_dims > 0 ? at[t->n_dims - 1] : 0);
        memcpy(data + i * bytes, &bits, bytes);
    }
    f.from.base = data;
    kernel_fingerprint_reference(&f);
    free(data);
    return sum;
}

static void bed_open(struct bed *b)
{
    struct err e = {0};
    *b = (struct bed){0};
    ck_assert_msg(layout_from_json(layout_text, sizeof layout_text - 1, &b->layout, &e) == 0, "%s",
                  e.text);
    for (uint32_t rank = 0; rank < MOST_RANKS; rank++) {
        b->publications[rank] = (struct publication){.fingerprints = b->prints[rank],
                                                     .n_tensors = b->layout->n_tensors};
        b->of[rank] = &b->publications[rank];
        for (uint32_t t = 0; t < b->layout->n_tensors; t++) {
            struct box boxes[4];
            uint32_t n = layout_shards(b->layout, t, rank, boxes, 4);
            for (uint32_t i = 0; i < n; i++)
                b->prints[rank][t] += box_print(&b->layout->tensors[t], &boxes[i]);
        }
    }
}

static int check(const struct bed *b, uint64_t most, struct rehearse_extent *x, struct err *e)
{
    *e = (struct err){0};
    return rehearse_check(b->layout, b->of, most, x, e);
}

START_TEST(memory_that_holds_its_coordinates_passes_and_replicas_are_computed_once)
{
    struct bed b;
    struct err e;
    struct rehearse_extent x = {0};
    bed_open(&b);
    ck_assert_msg(check(&b, REHEARSE_MOST_ELEMENTS, &x, &e) == 0, "%s", e.text);
    /* a once; b, c, d, f four; e by chunks of 2 of 5: three; g three (rank 3 holds none). */
    ck_assert_uint_eq(x.shards, 1 + 4 + 4 + 4 + 3 + 4 + 3);
    ck_assert_uint_eq(x.checked, x.shards);
    layout_free(b.layout);
}
END_TEST

START_TEST(each_part_that_holds_something_else_is_named)
{
    struct bed b;
    struct err e;
    struct rehearse_extent x;
    bed_open(&b);
    for (uint32_t t = 0; t < b.layout->n_tensors; t++)
        for (uint32_t rank = 0; rank < MOST_RANKS; rank++) {
            struct box box;
            char words[64];
            if (layout_shards(b.layout, t, rank, &box, 1) == 0 || (t == 0 && rank > 0))
                continue; /* compare_sources sees replicas that differ */
            b.prints[rank][t] ^= 1;
            ck_assert_int_eq(check(&b, REHEARSE_MOST_ELEMENTS, &x, &e), RS_EDATALOSS);
            (void)snprintf(words, sizeof words, "tensor '%s'", b.layout->tensors[t].name);
            ck_assert_ptr_nonnull(strstr(e.text, words));
            (void)snprintf(words, sizeof words, "source rank %u", rank);
            ck_assert_ptr_nonnull(strstr(e.text, words));
            b.prints[rank][t] ^= 1;
        }
    b.prints[1][1] ^= 1;
    b.prints[2][3] ^= 1;
    b.prints[3][5] ^= 1;
    ck_assert_int_eq(check(&b, REHEARSE_MOST_ELEMENTS, &x, &e), RS_EDATALOSS);
    ck_assert_ptr_nonnull(strstr(e.text, "tensor 'b' [17501:35002] of source rank 1"));
    ck_assert_ptr_nonnull(strstr(e.text, "and 2 more"));
    layout_free(b.layout);
}
END_TEST

START_TEST(ranks_that_take_no_part_and_ranks_without_fingerprints)
{
    struct bed b;
    struct err e = {0};
    struct rehearse_extent x;
    bed_open(&b);
    b.of[0] = NULL; /* then a is rank 1's */
    ck_assert_int_eq(rehearse_fingerprinted(b.layout, b.of, &e), 0);
    ck_assert_int_eq(check(&b, REHEARSE_MOST_ELEMENTS, &x, &e), 0);
    b.publications[2].fingerprints = NULL;
    ck_assert_int_eq(rehearse_fingerprinted(b.layout, b.of, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "source rank 2"));
    layout_free(b.layout);
}
END_TEST

/* Large shards of 2^20 elements; prints of zero are wrong for whatever is computed. */
START_TEST(of_a_large_model_a_sample_is_computed)
{
    static const char text[] = "{\"name\": \"t\", \"ranks\": 4, \"meshes\": [{\"name\": \"m\", "
                               "\"shape\": [4], \"ranks\": [0, 1, 2, 3]}],"
                               "\"tensors\": [{\"name\": \"a\", \"shape\": [4096, 1024], "
                               "\"dtype\": \"bfloat16\", \"mesh\": \"m\","
                               "\"placements\": [\"Shard(0)\"]},"
                               "{\"name\": \"b\", \"shape\": [4, 3], \"dtype\": \"bfloat16\", "
                               "\"mesh\": \"m\", \"placements\": [\"Shard(0)\"]}]}";
    struct bed b = {0};
    struct err e = {0};
    struct rehearse_extent x = {0};
    struct timespec from, to;
    ck_assert_int_eq(layout_from_json(text, sizeof text - 1, &b.layout, &e), 0);
    for (uint32_t rank = 0; rank < MOST_RANKS; rank++) {
        struct box box;
        b.publications[rank] = (struct publication){.fingerprints = b.prints[rank], .n_tensors = 2};
        b.of[rank] = &b.publications[rank];
        for (uint32_t t = 0; t < 2; t++) {
            (void)layout_shards(b.layout, t, rank, &box, 1);
            b.prints[rank][t] = box_print(&b.layout->tensors[t], &box);
        }
    }
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    ck_assert_int_eq(check(&b, 0, &x, &e), 0);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    ck_assert_uint_eq(x.checked, 8);
    (void)printf("# %.2f ns an element\n",
                 ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec)) /
                     (4096.0 * 1024));
    ck_assert_int_eq(check(&b, 2 << 20, &x, &e), 0);
    ck_assert_uint_eq(x.shards, 8);
    ck_assert_uint_eq(x.checked, 4 + 2); /* every small one; each third of the large ones */
    layout_free(b.layout);
}
END_TEST

START_TEST(without_memory_it_says_so)
{
    struct bed b;
    struct err e;
    struct rehearse_extent x;
    bed_open(&b);
    for (unsigned i = 1;; i++) {
        mem_fail_at(i);
        int r = check(&b, REHEARSE_MOST_ELEMENTS, &x, &e);
        mem_fail_at(0);
        if (r == 0)
            break;
        ck_assert_int_eq(r, RS_ENOMEM);
        ck_assert_uint_lt(i, 100);
    }
    layout_free(b.layout);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(memory_that_holds_its_coordinates_passes_and_replicas_are_computed_once)                     \
    X(each_part_that_holds_something_else_is_named)                                                \
    X(ranks_that_take_no_part_and_ranks_without_fingerprints)                                      \
    X(of_a_large_model_a_sample_is_computed)                                                       \
    X(without_memory_it_says_so)

#include "test/lib/main.h"
