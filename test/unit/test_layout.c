/* Who holds what: tables that public fault reports state, or that follow from the chunk rule by hand. */
#include <check.h>

#include "base/mem.h"
#include "layout/scale.h"
#include "test/lib/layouts.h"

/* The box of rank r of the only tensor, as text; empty pieces included. */
static void check_shard(const struct layout *l, uint32_t rank, const char *expected)
{
    struct box b;
    char text[128];
    ck_assert_msg(layout_mesh_shard(l, 0, rank, &b), "rank %u is not in the mesh", rank);
    ck_assert_msg(strcmp(box_text(&b, text, sizeof text), expected) == 0, "rank %u: %s, not %s",
                  rank, text, expected);
    ck_assert_uint_eq(layout_shards(l, 0, rank, NULL, 0), box_empty(&b) ? 0 : 1);
}

static void check_shards(struct layout *l, const char *const *expected)
{
    for (uint32_t r = 0; expected[r] != NULL; r++)
        check_shard(l, r, expected[r]);
    layout_free(l);
}

#define SHARDS(...)                                                                                \
    (const char *const[])                                                                          \
    {                                                                                              \
        __VA_ARGS__, NULL                                                                          \
    }

START_TEST(a01_uneven_rows_leave_the_last_rank_empty)
{
    check_shards(layouts_one("5, 10", 4, "4", "0, 1, 2, 3", "'Shard(0)'", ""),
                 SHARDS("[0:2, 0:10]", "[2:4, 0:10]", "[4:5, 0:10]", "[5:5, 0:10]"));
    check_shards(layouts_one("5, 10", 3, "3", "0, 1, 2", "'Shard(1)'", ""),
                 SHARDS("[0:5, 0:4]", "[0:5, 4:8]", "[0:5, 8:10]"));
}
END_TEST

START_TEST(a02_empty_shard_lies_at_the_end_and_adds_no_bytes)
{
    char ranks[256] = "0";
    for (size_t i = 1, at = 1; i < 30; i++)
        at += (size_t)snprintf(ranks + at, sizeof ranks - at, ", %zu", i);
    struct layout *l = layouts_one("512", 30, "30", ranks, "'Shard(0)'", "");
    uint64_t bytes = 0;
    check_shard(l, 0, "[0:18]");
    check_shard(l, 27, "[486:504]");
    check_shard(l, 28, "[504:512]");
    check_shard(l, 29, "[512:512]");
    for (uint32_t r = 0; r < 30; r++)
        bytes += layout_rank_bytes(l, r);
    ck_assert_uint_eq(bytes, 512 * 4);
    layout_free(l);
}
END_TEST

START_TEST(a03_owners_of_a_short_dim_are_not_the_first_ranks)
{
    check_shards(
        layouts_one("2", 8, "2, 4", "0, 1, 2, 3, 4, 5, 6, 7", "'Shard(0)', 'Shard(0)'", ""),
        SHARDS("[0:1]", "[2:2]", "[2:2]", "[2:2]", "[1:2]", "[2:2]", "[2:2]", "[2:2]"));
    check_shards(layouts_one("3", 8, "2, 2, 2", "0, 1, 2, 3, 4, 5, 6, 7",
                             "'Shard(0)', 'Shard(0)', 'Shard(0)'", ""),
                 SHARDS("[0:1]", "[3:3]", "[1:2]", "[3:3]", "[2:3]", "[3:3]", "[3:3]", "[3:3]"));
}
END_TEST

START_TEST(a04_shard_with_zero_rows_is_a_member)
{
    struct layout *l = layouts_one("6, 256", 4, "4", "0, 1, 2, 3", "'Shard(0)'", "");
    static const uint64_t elements[] = {512, 512, 512, 0};
    for (uint32_t r = 0; r < 4; r++)
        ck_assert_uint_eq(layout_rank_bytes(l, r), elements[r] * 4);
    ck_assert_uint_eq(l->instances[0].n_ranks, 4); /* rank 3 takes part although it holds nothing */
    layout_free(l);
}
END_TEST

START_TEST(a05_shard_order_cuts_the_inner_mesh_dim_first)
{
    static const char order[] = ", 'shard_order': [1, 0]";
    static const char both[] = "'Shard(0)', 'Shard(0)'";
    check_shards(layouts_one("8, 8", 4, "2, 2", "0, 1, 2, 3", both, order),
                 SHARDS("[0:2, 0:8]", "[4:6, 0:8]", "[2:4, 0:8]", "[6:8, 0:8]"));
    check_shards(layouts_one("6", 4, "2, 2", "0, 1, 2, 3", both, order),
                 SHARDS("[0:2]", "[3:5]", "[2:3]", "[5:6]"));
    check_shards(layouts_one("5", 4, "2, 2", "0, 1, 2, 3", both, order),
                 SHARDS("[0:2]", "[3:4]", "[2:3]", "[4:5]"));
    check_shards(layouts_one("8, 8", 4, "2, 2", "0, 1, 2, 3", both, ""),
                 SHARDS("[0:2, 0:8]", "[2:4, 0:8]", "[4:6, 0:8]", "[6:8, 0:8]"));
}
END_TEST

START_TEST(a07_global_length_is_declared_not_guessed)
{
    check_shards(layouts_one("10, 2", 4, "2, 2", "0, 1, 2, 3", "'Shard(0)', 'Shard(0)'",
                             ", 'shard_order': [1, 0]"),
                 SHARDS("[0:3, 0:2]", "[5:8, 0:2]", "[3:5, 0:2]", "[8:10, 0:2]"));
    struct layout *ten = layouts_one("10, 2", 4, "4", "0, 1, 2, 3", "'Shard(0)'", "");
    struct layout *four = layouts_one("4, 2", 4, "4", "0, 1, 2, 3", "'Shard(0)'", "");
    ck_assert_mem_ne(ten->digest, four->digest, sizeof ten->digest);
    layout_free(ten);
    layout_free(four);
}
END_TEST

START_TEST(a09_offsets_are_not_floors)
{
    check_shards(layouts_one("7, 3", 3, "3", "0, 1, 2", "'Shard(0)'", ""),
                 SHARDS("[0:3, 0:3]", "[3:6, 0:3]", "[6:7, 0:3]"));
}
END_TEST

START_TEST(a10_middle_dim_splits_unevenly)
{
    check_shards(layouts_one("4, 31, 10", 2, "2", "0, 1", "'Shard(1)'", ""),
                 SHARDS("[0:4, 0:16, 0:10]", "[0:4, 16:31, 0:10]"));
}
END_TEST

START_TEST(a11_nested_split_is_not_the_flat_split)
{
    check_shards(layouts_one("5, 3", 4, "2, 2", "0, 1, 2, 3", "'Shard(0)', 'Shard(0)'", ""),
                 SHARDS("[0:2, 0:3]", "[2:3, 0:3]", "[3:4, 0:3]", "[4:5, 0:3]"));
    check_shards(layouts_one("10", 6, "2, 3", "0, 1, 2, 3, 4, 5", "'Shard(0)', 'Shard(0)'", ""),
                 SHARDS("[0:2]", "[2:4]", "[4:5]", "[5:7]", "[7:9]", "[9:10]"));
}
END_TEST

START_TEST(a12_ranks_are_looked_up_in_the_mesh)
{
    static const char ranks[] = "2, 5, 6, 1, 4, 7, 3, 0";
    check_shards(layouts_one("8", 8, "4, 2", ranks, "'Shard(0)', 'Replicate'", ""),
                 SHARDS("[6:8]", "[2:4]", "[0:2]", "[6:8]", "[4:6]", "[0:2]", "[2:4]", "[4:6]"));
    check_shards(layouts_one("8", 8, "4, 2", ranks, "'Shard(0)', 'Shard(0)'", ""),
                 SHARDS("[7:8]", "[3:4]", "[0:1]", "[6:7]", "[4:5]", "[1:2]", "[2:3]", "[5:6]"));
    check_shards(layouts_one("6, 4", 4, "2, 2", "0, 2, 1, 3", "'Shard(0)', 'Shard(1)'", ""),
                 SHARDS("[0:3, 0:2]", "[3:6, 0:2]", "[0:3, 2:4]", "[3:6, 2:4]"));
}
END_TEST

START_TEST(a15_negative_dims_are_the_same_layout)
{
    struct layout *a = layouts_one("4, 6, 8", 2, "2", "0, 1", "'Shard(2)'", "");
    struct layout *b = layouts_one("4, 6, 8", 2, "2", "0, 1", "'Shard(-1)'", "");
    ck_assert_mem_eq(a->digest, b->digest, sizeof a->digest);
    char *text = layout_to_json(b);
    ck_assert_ptr_nonnull(strstr(text, "Shard(2)"));
    mem_free(text);
    layout_free(a);
    layout_free(b);
}
END_TEST

START_TEST(a16_zero_size_tensors_have_empty_shards)
{
    check_shards(layouts_one("12, 0", 4, "4", "0, 1, 2, 3", "'Shard(0)'", ""),
                 SHARDS("[0:3, 0:0]", "[3:6, 0:0]", "[6:9, 0:0]", "[9:12, 0:0]"));
    check_shards(layouts_one("0, 4", 2, "2", "0, 1", "'Shard(1)'", ""),
                 SHARDS("[0:0, 0:2]", "[0:0, 2:4]"));
}
END_TEST

START_TEST(a17_scalars_are_held_whole)
{
    struct layout *l = layouts_one("", 4, "2", "2, 3", "'Replicate'", "");
    struct box b = {.n_dims = 7};
    ck_assert_uint_eq(layout_shards(l, 0, 2, &b, 1), 1);
    ck_assert_uint_eq(b.n_dims, 0);
    ck_assert_uint_eq(layout_shards(l, 0, 0, &b, 1), 0);
    ck_assert_uint_eq(layout_rank_bytes(l, 3), 4);
    layout_free(l);
    check_shards(layouts_one("1", 2, "2", "0, 1", "'Shard(0)'", ""), SHARDS("[0:1]", "[1:1]"));
}
END_TEST

START_TEST(a19_replicated_buffers_are_not_added_up)
{
    struct layout *l = layouts_one("1152", 8, "8", "0, 1, 2, 3, 4, 5, 6, 7", "'Replicate'", "");
    for (uint32_t r = 0; r < 8; r++)
        check_shard(l, r, "[0:1152]");
    ck_assert_uint_eq(layout_tensor_bytes(&l->tensors[0]), 1152 * 4);
    layout_free(l);
}
END_TEST

START_TEST(a22_kv_heads_replicated_over_tp)
{
    check_shards(layouts_one("8, 3", 4, "2, 2", "0, 1, 2, 3", "'Shard(0)', 'Replicate'", ""),
                 SHARDS("[0:4, 0:3]", "[0:4, 0:3]", "[4:8, 0:3]", "[4:8, 0:3]"));
    struct layout *l = layouts_one("16, 3", 8, "8", "0, 1, 2, 3, 4, 5, 6, 7", "'Shard(0)'", "");
    check_shard(l, 5, "[10:12, 0:3]");
    layout_free(l);
}
END_TEST

/* The first and the last two pieces of a length over n, as layout_chunk cuts it. */
static void check_chunks(uint64_t length, uint32_t n, uint64_t chunk, uint64_t last_begin)
{
    uint64_t begin, end, at = 0;
    for (uint32_t i = 0; i < n; i++) {
        layout_chunk(length, n, i, &begin, &end);
        ck_assert_uint_eq(begin, at);
        if (i + 1 < n)
            ck_assert_uint_eq(end - begin, chunk);
        at = end;
    }
    ck_assert_uint_eq(at, length);
    ck_assert_uint_eq(begin, last_begin);
}

START_TEST(a23_vocabulary_lengths_need_no_padding)
{
    check_chunks(151936, 2, 75968, 75968);
    check_chunks(151936, 256, 594, 151470);
    check_chunks(129280, 24, 5387, 123901);
}
END_TEST

START_TEST(a23_different_padding_is_refused_with_both_shapes)
{
    struct layout *s = layouts_one("32008, 4", 2, "2", "0, 1", "'Shard(0)'", "");
    struct layout *d = layouts_one("32064, 4", 2, "2", "0, 1", "'Shard(0)'", "");
    struct err e = {0};
    ck_assert_int_eq(layout_check_pair(s, d, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "'w' is [32008, 4] at the source and [32064, 4] here"));
    layout_free(s);
    layout_free(d);
}
END_TEST

START_TEST(a24_sizes_beyond_32_bits)
{
    struct layout *l = layouts_one("131072, 262144", 4, "4", "0, 1, 2, 3", "'Shard(1)'", "");
    check_shard(l, 3, "[0:131072, 196608:262144]");
    ck_assert_uint_eq(layout_rank_bytes(l, 3), UINT64_C(1) << 35);
    layout_free(l);
}
END_TEST

START_TEST(a25_eight_dims_are_the_limit)
{
    struct layout *l;
    struct err e = {0};
    check_shards(layouts_one("2, 3, 4, 5", 2, "2", "0, 1", "'Shard(3)'", ""),
                 SHARDS("[0:2, 0:3, 0:4, 0:3]", "[0:2, 0:3, 0:4, 3:5]"));
    check_shards(layouts_one("1, 1, 1, 1, 1, 1, 1, 4", 2, "2", "0, 1", "'Shard(7)'", ""),
                 SHARDS("[0:1, 0:1, 0:1, 0:1, 0:1, 0:1, 0:1, 0:2]"));
    ck_assert_int_eq(
        layouts_try_one("1, 1, 1, 1, 1, 1, 1, 1, 4", 2, "2", "0, 1", "'Shard(8)'", "", &l, &e),
        RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "tensor 'w'"));
    ck_assert_ptr_nonnull(strstr(e.text, "9 dims"));
}
END_TEST

START_TEST(a26_two_mesh_dims_on_both_sides)
{
    struct layout *l = layouts_one("8, 6, 4", 16, "2, 4", "8, 9, 10, 11, 12, 13, 14, 15",
                                   "'Shard(0)', 'Shard(1)'", "");
    check_shard(l, 8, "[0:4, 0:2, 0:4]");
    check_shard(l, 10, "[0:4, 4:6, 0:4]");
    check_shard(l, 11, "[0:4, 6:6, 0:4]");
    check_shard(l, 15, "[4:8, 6:6, 0:4]");
    layout_free(l);
}
END_TEST

#define REGIONS(shape, list)                                                                       \
    "{'name': 'l', 'ranks': 32, 'tensors': [{'name': 'w', 'shape': [" shape                        \
    "], 'dtype': 'uint8', 'regions': [" list "]}]}"
#define REGION1(rank, offset, size)                                                                \
    "{'rank': " #rank ", 'offset': [" #offset "], 'size': [" #size "]}"

START_TEST(a28_custom_uneven_columns_by_regions)
{
    struct layout *l = layouts_parse(
        REGIONS("4, 100, 64", "{'rank': 0, 'offset': [0, 0, 0], 'size': [4, 70, 32]},"
                              "{'rank': 1, 'offset': [0, 0, 32], 'size': [4, 70, 32]},"
                              "{'rank': 2, 'offset': [0, 70, 0], 'size': [4, 30, 32]},"
                              "{'rank': 3, 'offset': [0, 70, 32], 'size': [4, 30, 32]}"));
    struct box b;
    ck_assert_uint_eq(layout_shards(l, 0, 3, &b, 1), 1);
    ck_assert_uint_eq(box_elements(&b), 4 * 30 * 32);
    ck_assert_int_eq(layout_gap(&l->tensors[0], &b), 0);
    layout_free(l);
}
END_TEST

START_TEST(a08_explicit_uneven_widths_must_tile)
{
    struct layout *l;
    struct err e = {0};
    struct box b;
    l = layouts_parse(REGIONS(
        "14", REGION1(0, 0, 2) "," REGION1(1, 2, 3) "," REGION1(2, 5, 4) "," REGION1(3, 9, 5)));
    ck_assert_int_eq(layout_gap(&l->tensors[0], &b), 0);
    layout_free(l);
    ck_assert_int_eq(layouts_try(REGIONS("14", REGION1(0, 0, 4) "," REGION1(1, 3, 11)), &l, &e),
                     RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "tensor 'w'"));
    ck_assert_ptr_nonnull(strstr(e.text, "overlaps"));
}
END_TEST

START_TEST(a29_replicas_of_rows_and_empty_columns)
{
    check_shards(layouts_one("6, 4", 4, "2, 2", "0, 1, 2, 3", "'Replicate', 'Shard(0)'", ""),
                 SHARDS("[0:3, 0:4]", "[3:6, 0:4]", "[0:3, 0:4]", "[3:6, 0:4]"));
    check_shards(
        layouts_one("6, 4", 6, "3, 2", "0, 1, 2, 3, 4, 5", "'Shard(1)', 'Replicate'", ""),
        SHARDS("[0:6, 0:2]", "[0:6, 0:2]", "[0:6, 2:4]", "[0:6, 2:4]", "[0:6, 4:4]", "[0:6, 4:4]"));
}
END_TEST

#define WEIGHT_AND_SCALE(weight, scale, n, ranks)                                                  \
    "{'name': 'l', 'ranks': " n ", 'meshes': [{'name': 'm', 'shape': [" n "], 'ranks': [" ranks    \
    "]}], 'tensors': [{'name': 'w', 'shape': [" weight                                             \
    "], 'dtype': 'float8_e4m3fn', 'cast': true, 'mesh': 'm', 'placements': ['Shard(0)']}, "        \
    "{'name': 'w.scale', "                                                                         \
    "'shape': [" scale "], 'dtype': 'float32', 'mesh': 'm', 'placements': ['Shard(0)'], "          \
    "'derived': {'from': 'w', 'rule': 'block_scale', 'block': [128, 128]}}]}"

START_TEST(a30_scale_tile_over_two_shards_is_refused_with_the_edge)
{
    struct layout *l = layouts_parse(WEIGHT_AND_SCALE("384, 256", "3, 2", "3", "0, 1, 2"));
    struct box b;
    struct err e = {0};
    ck_assert_uint_eq(layout_shards(l, 1, 2, &b, 1), 1);
    ck_assert_uint_eq(b.offset[0], 2);
    layout_free(l);
    ck_assert_int_eq(layouts_try(WEIGHT_AND_SCALE("200, 300", "2, 3", "2", "0, 1"), &l, &e),
                     RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "tensor 'w.scale'"));
    ck_assert_ptr_nonnull(strstr(e.text, "shard edge 100 of its dim 0 lies inside a block"));
}
END_TEST

#define SCALED(weight, scale, n, ranks, block, more, scale_more)                                   \
    "{'name': 'l', 'ranks': " n ", 'meshes': [{'name': 'm', 'shape': [" n "], 'ranks': [" ranks    \
    "]}], 'tensors': [{'name': 'w', 'shape': [" weight "], " more "}, {'name': 'w.scale', "        \
    "'shape': [" scale "], 'derived': {'from': 'w', 'rule': 'block_scale', 'block': [" block       \
    "]}, " scale_more "}]}"
#define FP8       "'dtype': 'float8_e4m3fn', 'cast': true, "
#define FP32      "'dtype': 'float32', "
#define REPLICATE "'mesh': 'm', 'placements': ['Replicate']"
#define ROWS      "'mesh': 'm', 'placements': ['Shard(0)']"
#define COLUMNS   "'mesh': 'm', 'placements': ['Shard(1)']"

START_TEST(scales_may_lie_anywhere_where_each_rank_has_those_of_its_blocks)
{
    static const char *const good[] = {
        SCALED("200, 300", "2, 3", "2", "0, 1", "128, 128", FP8 ROWS, FP32 REPLICATE),
        SCALED("256, 300", "2, 3", "2", "0, 1", "128, 128", FP8 ROWS, FP32 ROWS),
        SCALED("200, 300", "1, 1", "2", "0, 1", "200, 300", FP8 ROWS, FP32 REPLICATE),
        SCALED("200, 300", "1, 1", "2", "0, 1", "4096, 4096", FP8 ROWS, FP32 REPLICATE),
        SCALED("200, 300", "200, 1", "2", "0, 1", "1, 300", FP8 ROWS, FP32 ROWS),
        /* Rank 1's rows begin inside the block of which it holds the scale in a second region. */
        SCALED("200, 64", "2, 1", "2", "0, 1", "128, 64", FP8 ROWS,
               FP32 "'regions': [{'rank': 0, 'offset': [0, 0], 'size': [1, 1]}, {'rank': 1, "
                    "'offset': [0, 0], 'size': [1, 1]}, {'rank': 1, 'offset': [1, 0], 'size': [1, "
                    "1]}]")};
    for (unsigned i = 0; i < sizeof good / sizeof *good; i++) {
        struct layout *l = layouts_parse(good[i]);
        ck_assert_uint_eq(l->tensors[0].scaled_by, 2);
        ck_assert_uint_eq(l->tensors[1].scaled_by, 0);
        layout_free(l);
    }
}
END_TEST

START_TEST(scales_that_a_rank_would_lack_or_that_nobody_can_make_are_refused)
{
    static const struct {
        const char *json, *text;
    } bad[] = {
        {SCALED("200, 300", "2, 3", "2", "0, 1", "128, 128", FP8 ROWS, FP32 ROWS),
         "shard edge 100 of its dim 0 lies inside a block of 128, and rank 1"},
        {SCALED("256, 300", "2, 3", "2", "0, 1", "128, 128", FP8 ROWS, FP32 COLUMNS),
         "rank 0 holds [0:128, 0:300] of it, but not all of the scales [0:1, 0:3]"},
        {SCALED("256, 256", "2, 2", "1", "0", "128, 128", FP8 REPLICATE,
                "'dtype': 'bfloat16', " REPLICATE),
         "gives float32, this is bfloat16"},
        {SCALED("256, 256", "2, 2", "1", "0", "128, 128", "'dtype': 'float8_e4m3fn', " REPLICATE,
                FP32 REPLICATE),
         "no cast to float8_e4m3fn"},
        {SCALED("256, 256", "2, 2", "1", "0", "128, 128",
                "'dtype': 'bfloat16', 'cast': true, " REPLICATE, FP32 REPLICATE),
         "no cast to float8_e4m3fn"},
        {SCALED("4096, 4096", "2, 2", "1", "0", "2048, 2048", FP8 REPLICATE, FP32 REPLICATE),
         "more than 262144 elements"},
        {SCALED("256, 256", "2, 1", "1", "0", "128, 128", FP8 REPLICATE, FP32 REPLICATE),
         "dim 1 has 2 blocks, the shape says 1"},
        {"{'name': 'l', 'ranks': 1, 'meshes': [{'name': 'm', 'shape': [1], 'ranks': [0]}], "
         "'tensors': [{'name': 'w', 'shape': [2, 2], " FP8 REPLICATE
         "}, {'name': 'x', 'shape': [1, 1], 'derived': {'from': 'w', 'rule': 'block_scale', "
         "'block': [2, 2]}, " FP32 REPLICATE
         "}, {'name': 'y', 'shape': [1, 1], 'derived': {'from': 'w', 'rule': 'block_scale', "
         "'block': [2, 2]}, " FP32 REPLICATE "}]}",
         "tensor 'y': derived from 'w', and so is 'x'"},
    };
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct layout *l;
        struct err e = {0};
        ck_assert_int_eq(layouts_try(bad[i].json, &l, &e), RS_EINVAL);
        ck_assert_msg(strstr(e.text, bad[i].text) != NULL, "'%s' lacks '%s'", e.text, bad[i].text);
    }
}
END_TEST

/* By counting elements one by one. */
START_TEST(blocks_of_a_part_are_those_that_its_elements_lie_in)
{
    static const uint32_t block[2] = {4, 7};
    static const uint64_t shape[2] = {14, 17};
    uint64_t seed = 3;
    for (int i = 0; i < 400; i++) {
        struct box part = {.n_dims = 2}, inside, touched;
        for (int d = 0; d < 2; d++) {
            part.offset[d] = layouts_below(&seed, (uint32_t)shape[d]);
            part.size[d] = 1 + layouts_below(&seed, (uint32_t)(shape[d] - part.offset[d]));
        }
        touched = scale_touched(block, &part);
        bool any = scale_inside(block, shape, &part, &inside), found = false;
        for (uint64_t a = 0; a < 4; a++)
            for (uint64_t b = 0; b < 3; b++) {
                uint64_t n = 0, all = 0;
                for (uint64_t r = a * 4; r < a * 4 + 4 && r < shape[0]; r++)
                    for (uint64_t c = b * 7; c < b * 7 + 7 && c < shape[1]; c++, all++)
                        n += r >= part.offset[0] && r < part.offset[0] + part.size[0] &&
                             c >= part.offset[1] && c < part.offset[1] + part.size[1];
                struct box one = {.n_dims = 2, .offset = {a, b}, .size = {1, 1}};
                struct box elements = scale_elements(block, shape, &one);
                ck_assert_int_eq(box_contains(&touched, &one), n > 0);
                ck_assert_int_eq(any && box_contains(&inside, &one), n == all);
                ck_assert_uint_eq(box_elements(&elements), all);
                found = found || n == all;
            }
        ck_assert_int_eq(any, found);
    }
}
END_TEST

START_TEST(a39_replicas_are_counted_once_and_a_missing_range_is_named)
{
    char full[4096] = "", hole[4096] = "";
    static const unsigned begin[] = {0, 4, 9, 15, 21, 30, 32};
    for (unsigned copy = 0; copy < 3; copy++)
        for (unsigned i = 0; i < 6; i++) {
            char one[96];
            (void)snprintf(one, sizeof one, "%s{'rank': %u, 'offset': [%u], 'size': [%u]}",
                           full[0] == '\0' ? "" : ",", copy * 6 + i, begin[i],
                           begin[i + 1] - begin[i]);
            (void)strncat(full, one, sizeof full - strlen(full) - 1);
            if (i != 3)
                (void)strncat(hole, one, sizeof hole - strlen(hole) - 1);
        }
    char text[8192], missing[64];
    struct box b;
    (void)snprintf(text, sizeof text, REGIONS("32", "%s"), full);
    struct layout *covered = layouts_parse(text);
    ck_assert_int_eq(layout_gap(&covered->tensors[0], &b), 0);
    (void)snprintf(text, sizeof text, REGIONS("32", "%s"), hole);
    struct layout *gap = layouts_parse(text);
    ck_assert_int_eq(layout_gap(&gap->tensors[0], &b), 1);
    ck_assert_str_eq(box_text(&b, missing, sizeof missing), "[15:21]");
    struct err e = {0};
    ck_assert_int_eq(layout_check_pair(gap, covered, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "[15:21]"));
    ck_assert_int_eq(layout_check_pair(covered, gap, &e), 0); /* nobody needs the rest */
    ck_assert_int_eq(layout_check_pair(gap, gap, &e), 0);
    layout_free(covered);
    layout_free(gap);
}
END_TEST

START_TEST(every_failed_allocation_of_a_check_is_reported)
{
    struct layout *gap = layouts_parse(REGIONS("14", REGION1(0, 0, 2) "," REGION1(1, 5, 9)));
    struct layout *part = layouts_parse(REGIONS("14", REGION1(0, 0, 1) "," REGION1(1, 6, 3)));
    bool struck = true;
    for (long i = 1; struck; i++) {
        struct err e = {0};
        struct box missing;
        mem_fail_at(i);
        int checked = layout_check(gap, &e);
        int paired = layout_check_pair(gap, part, &e);
        int gaps = layout_gap(&gap->tensors[0], &missing);
        int digest = layout_digest(gap);
        struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq((checked == RS_ENOMEM) + (paired == RS_ENOMEM) + (gaps == RS_ENOMEM) +
                             (digest == RS_ENOMEM),
                         struck);
        ck_assert(struck || (checked == 0 && paired == 0 && gaps == 1 && digest == 0));
        ck_assert(struck || i > 12);
    }
    layout_free(gap);
    layout_free(part);
}
END_TEST

START_TEST(b02_dtype_must_agree_unless_a_known_cast_is_declared)
{
    struct layout *s = layouts_one("6", 1, "1", "0", "'Replicate'", "");
    struct layout *d = layouts_one("6", 1, "1", "0", "'Replicate'", "");
    struct err e = {0};
    d->tensors[0].dtype = DTYPE_BFLOAT16;
    ck_assert_int_eq(layout_check_pair(s, d, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "'w' is float32 at the source and bfloat16 here"));
    d->tensors[0].cast = true;
    ck_assert_int_eq(layout_check_pair(s, d, &e), 0);
    d->tensors[0].dtype = DTYPE_INT8;
    ck_assert_int_eq(layout_check_pair(s, d, &e), RS_EPRECOND);
    layout_free(s);
    layout_free(d);
}
END_TEST

static struct layout *named(const char *a, const char *b, const char *c)
{
    char text[1024];
    (void)snprintf(
        text, sizeof text,
        "{'name': 'l', 'ranks': 1, 'meshes': [{'name': 'm', 'shape': [1], 'ranks': [0]}],"
        "'tensors': [{'name': '%s', 'shape': [2], 'dtype': 'int8', 'mesh': 'm',"
        "'placements': ['Replicate']}, {'name': '%s', 'shape': [2], 'dtype': 'int8',"
        "'mesh': 'm', 'placements': ['Replicate']}, {'name': '%s', 'shape': [2],"
        "'dtype': 'int8', 'mesh': 'm', 'placements': ['Replicate']}]}",
        a, b, c);
    return layouts_parse(text);
}

START_TEST(b08_missing_and_unexpected_names_are_listed)
{
    struct layout *s = named("blk.0.base_layer.weight", "a", "z");
    struct layout *d = named("z", "a", "blk.0.weight");
    struct err e = {0};
    ck_assert_int_eq(layout_check_pair(s, d, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "1 missing at the source: 'blk.0.weight'"));
    ck_assert_ptr_nonnull(
        strstr(e.text, "1 unexpected, in the source only: 'blk.0.base_layer.weight'"));
    ck_assert_int_eq(layout_find(d, "blk.0.weight"), 1);
    ck_assert_int_eq(layout_find(d, "blk"), -1);
    layout_free(s);
    layout_free(d);
}
END_TEST

START_TEST(box_range_gives_the_same_elements_in_row_major_order)
{
    uint64_t seed = 7;
    for (unsigned round = 0; round < 300; round++) {
        struct tensor t = {0};
        layouts_random_shape(&t, &seed);
        struct box whole = box_whole(t.n_dims, t.shape), parts[2 * BOX_MAX_DIMS];
        uint64_t n = box_elements(&whole);
        if (n == 0)
            continue;
        uint64_t begin = random_next(&seed) % n;
        uint64_t end = begin + 1 + random_next(&seed) % (n - begin);
        unsigned n_parts = box_range(&whole, begin, end, parts);
        ck_assert_uint_ge(n_parts, 1);
        ck_assert_uint_le(n_parts, t.n_dims < 1 ? 1 : 2U * t.n_dims - 1);
        uint64_t next = begin;
        for (unsigned i = 0; i < n_parts; i++) {
            struct tensor local = {.n_dims = t.n_dims};
            memcpy(local.shape, parts[i].size, sizeof local.shape);
            for (uint64_t k = 0; k < box_elements(&parts[i]); k++, next++) {
                uint64_t at[BOX_MAX_DIMS], global = 0;
                layouts_unravel(&local, k, at);
                for (unsigned d = 0; d < t.n_dims; d++)
                    global = global * t.shape[d] + parts[i].offset[d] + at[d];
                ck_assert_uint_eq(global, next);
            }
        }
        ck_assert_uint_eq(next, end);
    }
}
END_TEST

/* Every rank's boxes against who holds each element by index arithmetic. */
static void check_against_elements(const struct layout *l, uint32_t tensor)
{
    const struct tensor *t = &l->tensors[tensor];
    struct box boxes[64];
    for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
        uint32_t n = layout_shards(l, tensor, rank, boxes, 64);
        ck_assert_uint_le(n, 64);
        for (uint32_t i = 0; i < n; i++)
            ck_assert(!box_empty(&boxes[i]));
        for (uint64_t element = 0; element < layouts_elements(t); element++) {
            uint64_t at[BOX_MAX_DIMS];
            unsigned in = 0;
            layouts_unravel(t, element, at);
            for (uint32_t i = 0; i < n; i++)
                in += layouts_box_has(&boxes[i], at);
            ck_assert_uint_eq(in, layouts_holds(l, t, rank, at));
        }
    }
}

START_TEST(random_layouts_hold_what_index_arithmetic_says)
{
    uint64_t seed = 1;
    for (unsigned round = 0; round < 150; round++) {
        struct layout *l = layouts_random(&seed, "l", 1 + layouts_below(&seed, 9), 4, NULL);
        for (uint32_t t = 0; t < l->n_tensors; t++)
            check_against_elements(l, t);
        layout_free(l);
    }
}
END_TEST

START_TEST(random_regions_tile_until_one_is_taken_away)
{
    uint64_t seed = 5;
    unsigned gaps = 0;
    for (unsigned round = 0; round < 300; round++) {
        struct layout *l = layouts_random(&seed, "l", 6, 1, NULL);
        struct tensor *t = &l->tensors[0];
        struct box missing;
        ck_assert_int_eq(layout_gap(t, &missing), 0);
        if (t->mesh >= 0 || t->n_regions < 2) {
            layout_free(l);
            continue;
        }
        t->n_regions--;
        t->regions[layouts_below(&seed, t->n_regions + 1)] = t->regions[t->n_regions];
        bool gap = layout_gap(t, &missing) == 1;
        gaps += gap;
        bool found = false;
        for (uint64_t element = 0; element < layouts_elements(t); element++) {
            uint64_t at[BOX_MAX_DIMS];
            unsigned holders = 0;
            layouts_unravel(t, element, at);
            for (uint32_t r = 0; r < l->n_ranks; r++)
                holders += layouts_holds(l, t, r, at);
            found = found || holders == 0;
            if (gap && layouts_box_has(&missing, at))
                ck_assert_uint_eq(holders, 0);
        }
        ck_assert(found == gap);
        layout_free(l);
    }
    ck_assert_uint_gt(gaps, 20);
}
END_TEST

START_TEST(random_overlaps_are_found)
{
    uint64_t seed = 11;
    unsigned refused = 0, rounds = 0;
    for (unsigned round = 0; round < 400; round++) {
        struct layout *l = layouts_random(&seed, "l", 6, 1, NULL);
        struct tensor *t = &l->tensors[0];
        if (t->mesh < 0 && t->n_regions > 0 && t->n_dims > 0) {
            struct region *g = &t->regions[layouts_below(&seed, t->n_regions)];
            unsigned d = layouts_below(&seed, t->n_dims);
            struct region before = *g;
            g->box.offset[d] -= g->box.offset[d] > 0;
            g->box.size[d] += before.box.offset[d] - g->box.offset[d];
            bool overlap = false;
            for (uint32_t i = 0; i < t->n_regions; i++)
                for (uint32_t k = 0; k < i; k++) {
                    struct box common;
                    overlap = overlap ||
                              (box_intersect(&t->regions[i].box, &t->regions[k].box, &common) &&
                               (!box_equal(&t->regions[i].box, &t->regions[k].box) ||
                                t->regions[i].rank == t->regions[k].rank));
                }
            struct err e = {0};
            ck_assert_int_eq(layout_check(l, &e), overlap ? RS_EINVAL : 0);
            refused += overlap;
            rounds++;
        }
        layout_free(l);
    }
    ck_assert_uint_gt(refused, 20);
    ck_assert_uint_lt(refused, rounds);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a01_uneven_rows_leave_the_last_rank_empty)                                                   \
    X(a02_empty_shard_lies_at_the_end_and_adds_no_bytes)                                           \
    X(a03_owners_of_a_short_dim_are_not_the_first_ranks)                                           \
    X(a04_shard_with_zero_rows_is_a_member)                                                        \
    X(a05_shard_order_cuts_the_inner_mesh_dim_first)                                               \
    X(a07_global_length_is_declared_not_guessed)                                                   \
    X(a08_explicit_uneven_widths_must_tile)                                                        \
    X(a09_offsets_are_not_floors)                                                                  \
    X(a10_middle_dim_splits_unevenly)                                                              \
    X(a11_nested_split_is_not_the_flat_split)                                                      \
    X(a12_ranks_are_looked_up_in_the_mesh)                                                         \
    X(a15_negative_dims_are_the_same_layout)                                                       \
    X(a16_zero_size_tensors_have_empty_shards)                                                     \
    X(a17_scalars_are_held_whole)                                                                  \
    X(a19_replicated_buffers_are_not_added_up)                                                     \
    X(a22_kv_heads_replicated_over_tp)                                                             \
    X(a23_vocabulary_lengths_need_no_padding)                                                      \
    X(a23_different_padding_is_refused_with_both_shapes)                                           \
    X(a24_sizes_beyond_32_bits)                                                                    \
    X(a25_eight_dims_are_the_limit)                                                                \
    X(a26_two_mesh_dims_on_both_sides)                                                             \
    X(a28_custom_uneven_columns_by_regions)                                                        \
    X(a29_replicas_of_rows_and_empty_columns)                                                      \
    X(scales_may_lie_anywhere_where_each_rank_has_those_of_its_blocks)                             \
    X(scales_that_a_rank_would_lack_or_that_nobody_can_make_are_refused)                           \
    X(blocks_of_a_part_are_those_that_its_elements_lie_in)                                         \
    X(a30_scale_tile_over_two_shards_is_refused_with_the_edge)                                     \
    X(a39_replicas_are_counted_once_and_a_missing_range_is_named)                                  \
    X(every_failed_allocation_of_a_check_is_reported)                                              \
    X(b02_dtype_must_agree_unless_a_known_cast_is_declared)                                        \
    X(b08_missing_and_unexpected_names_are_listed)                                                 \
    X(box_range_gives_the_same_elements_in_row_major_order)                                        \
    X(random_layouts_hold_what_index_arithmetic_says)                                              \
    X(random_regions_tile_until_one_is_taken_away)                                                 \
    X(random_overlaps_are_found)
#include "test/lib/main.h"
