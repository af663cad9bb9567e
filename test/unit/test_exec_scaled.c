/* Refits into float8 with block scales (test/lib/scaled_cases.h). */
#include "test/lib/scaled_cases.h"

/* A public fault report: a scale tile lay over two shards. */
START_TEST(a30_each_of_three_ranks_gets_the_scales_of_its_rows)
{
    struct rig r;
    const struct side_case sides[] = {{3, "3", ROWS, NULL, false, false},
                                      {3, "3", ROWS, ROWS, false, false}};
    model_add("w", 384, 256, 128, 128, DTYPE_BFLOAT16);
    scaled_rig(&r, sides, 2);
    refit_scaled(&r);
    refit_close(&r);
}
END_TEST

START_TEST(a_shard_edge_inside_a_block_gives_both_ranks_its_scale)
{
    const struct side_case sides[] = {{1, "1", REPLICATE, NULL, false, false},
                                      {2, "2", ROWS, REPLICATE, false, false}};
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct rig r;
        model_add("w", 200, 300, 128, 128, seed % 2 == 0 ? DTYPE_FLOAT32 : DTYPE_BFLOAT16);
        scaled_rig(&r, sides, 2);
        odd_sizes(&r, seed);
        refit_scaled(&r);
        refit_close(&r);
    }
}
END_TEST

/* One source, two domains of two ranks: values and scales enter each once, by a chain. */
START_TEST(relays_pass_on_what_was_made_and_each_domain_takes_it_in_once)
{
    struct rig r;
    const struct side_case sides[] = {
        {1, "1", REPLICATE, NULL, false, false},
        {6, "3, 2", "'mesh': 'm', 'placements': ['Replicate', 'Shard(1)']",
         "'mesh': 'm', 'placements': ['Replicate', 'Shard(1)']", false, false}};
    model_add("v", 256, 512, 128, 128, DTYPE_BFLOAT16);
    model_add("w", 384, 256, 128, 128, DTYPE_BFLOAT16);
    scaled_rig(&r, sides, 2);
    r.o.plan.chunk_bytes = 16384;
    r.o.plan.least_piece_bytes = 4096;
    refit_scaled(&r);
    const struct plan_totals *t = plan_totals(r.plan);
    uint64_t once = 256 * 512 + 384 * 256 + 4 * (2 * 4 + 3 * 2);
    ck_assert_uint_eq(t->network_bytes_minimum, 3 * once);
    ck_assert_uint_eq(t->network_bytes, 3 * once);
    ck_assert_uint_eq(t->logical_bytes, once);
    ck_assert_uint_gt(t->max_relay_depth, 1);
    ck_assert_uint_lt(plan_device_egress(r.plan, 0), 3 * once);
    refit_close(&r);
}
END_TEST

START_TEST(blocks_of_every_size_are_made_from_any_binding)
{
    static const uint64_t blocks[][2] = {{128, 128}, {64, 32}, {1, 1000}, {1000, 1},
                                         {7, 13},    {1, 1},   {300, 300}};
    const struct side_case sides[] = {
        {2, "2", REPLICATE, NULL, false, false},
        {4, "2, 2", "'mesh': 'm', 'placements': ['Shard(1)', 'Shard(0)']",
         "'mesh': 'm', 'placements': ['Replicate', 'Replicate']", false, false}};
    for (uint64_t seed = 1; seed <= 28; seed++) {
        struct rig r;
        const uint64_t *block = blocks[seed % 7];
        model_add("w", 130 + seed * 3, 141 + seed, block[0], block[1],
                  seed % 2 == 0 ? DTYPE_FLOAT32 : DTYPE_BFLOAT16);
        scaled_rig(&r, sides, 2);
        odd_sizes(&r, seed);
        refit_scaled(&r);
        refit_close(&r);
    }
}
END_TEST

/* Greater than what is worked on at once, so that its scale is found before its values are made. */
START_TEST(one_scale_of_a_great_tensor_is_that_of_all_of_it)
{
    const struct side_case sides[] = {{2, "2", REPLICATE, NULL, false, false},
                                      {4, "4", COLUMNS, REPLICATE, false, false}};
    for (uint64_t seed = 1; seed <= 4; seed++) {
        struct rig r;
        model_add("w", 700, 502, 4096, 4096, seed % 2 == 0 ? DTYPE_FLOAT32 : DTYPE_BFLOAT16);
        scaled_rig(&r, sides, 2);
        odd_sizes(&r, seed);
        r.o.plan.chunk_bytes = 1 << 15;
        refit_scaled(&r);
        refit_close(&r);
    }
}
END_TEST

START_TEST(destinations_that_want_it_scaled_plain_and_as_it_is_get_each_their_own)
{
    const struct side_case sides[] = {{2, "2", ROWS, NULL, false, false},
                                      {2, "2", ROWS, ROWS, false, false},
                                      {2, "2", COLUMNS, NULL, true, false},
                                      {2, "2", ROWS, NULL, false, true}};
    for (uint64_t seed = 1; seed <= 4; seed++) {
        struct rig r;
        model_add("w", 256, 200, 128, 128, DTYPE_BFLOAT16);
        scaled_rig(&r, sides, 4);
        odd_sizes(&r, seed);
        refit_scaled(&r);
        refit_close(&r);
    }
}
END_TEST

START_TEST(the_other_strategies_make_the_same)
{
    const struct side_case sides[] = {{2, "2", ROWS, NULL, false, false},
                                      {4, "4", COLUMNS, REPLICATE, false, false}};
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct rig r;
        model_add("v", 128, 90, 64, 64, DTYPE_BFLOAT16);
        model_add("w", 256, 200, 128, 128, DTYPE_FLOAT32);
        scaled_rig(&r, sides, 2);
        odd_sizes(&r, seed);
        r.o.plan.strategy = seed % 2 == 0 ? PLAN_DIRECT : PLAN_GATHER_BROADCAST;
        refit_scaled(&r);
        refit_close(&r);
    }
}
END_TEST

/* More takers in one domain than one cast has targets. */
START_TEST(nine_takers_in_the_sources_domain_get_what_is_made_once)
{
    const struct side_case sides[] = {{1, "1", REPLICATE, NULL, false, false},
                                      {9, "9", REPLICATE, REPLICATE, false, false}};
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct rig r;
        model_add("w", 256, 160, seed == 3 ? 4096 : 128, seed == 3 ? 4096 : 128, DTYPE_BFLOAT16);
        if (seed == 3) /* one scale, and more than is worked on at once */
            model_add("v", 600, 500, 4096, 4096, DTYPE_FLOAT32);
        scaled_rig(&r, sides, 2);
        r.o.fused = seed == 2;
        memset(r.o.domain, 0, sizeof(r.o.domain));
        refit_scaled(&r);
        refit_close(&r);
    }
}
END_TEST

/* Copies inside one device and one domain, delays and poison: a missing wait would show. */
START_TEST(local_copies_make_them_under_delays)
{
    const struct side_case sides[] = {{2, "2", ROWS, NULL, false, false},
                                      {2, "2", ROWS, REPLICATE, false, false}};
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct rig r;
        model_add("w", 256, 96, 128, 32, seed % 2 == 0 ? DTYPE_FLOAT32 : DTYPE_BFLOAT16);
        scaled_rig(&r, sides, 2);
        odd_sizes(&r, seed);
        r.o.hello.host_seed = seed;
        r.o.hello.host_max_delay_us = 200;
        memset(r.o.domain, 0, sizeof(r.o.domain));
        if (seed % 3 == 0)
            for (uint32_t i = 0; i < 2; i++)
                r.rank_device[1][i] = r.rank_device[0][i];
        refit_scaled(&r);
        refit_close(&r);
    }
}
END_TEST

/* The edge between the ranks is one between blocks, of 100 rows. */
START_TEST(regions_serve_the_blocks_that_they_hold_whole)
{
    struct rig r;
    struct side_case sides[] = {{2, "2",
                                 "'regions': [{'rank': 0, 'offset': [0, 0], 'size': [200, 256]}, "
                                 "{'rank': 1, 'offset': [200, 0], 'size': [184, 256]}]",
                                 NULL, false, false},
                                {2, "2", COLUMNS, COLUMNS, false, false}};
    model_add("w", 384, 256, 100, 64, DTYPE_BFLOAT16);
    scaled_rig(&r, sides, 2);
    refit_scaled(&r);
    refit_close(&r);
}
END_TEST

START_TEST(a_source_that_changes_between_prepare_and_sending_is_blamed)
{
    struct rig r;
    const struct side_case sides[] = {{1, "1", REPLICATE, NULL, false, false},
                                      {2, "2", ROWS, ROWS, false, false}};
    model_add("w", 256, 128, 128, 128, DTYPE_BFLOAT16);
    scaled_rig(&r, sides, 2);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    rig_prepare(&r, WIRE_VERIFY_FULL);
    uint16_t huge = 0x7E00; /* raises the first block's scale, and with it all of its values */
    memcpy(r.workers[0].memory[WIRE_LIVE].data + r.workers[0].memory[WIRE_LIVE].pieces[0].offset,
           &huge, sizeof(huge));
    rig_expect(&r, rig_send_start(&r), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EDATALOSS);
    ck_assert_uint_eq(rig_failure(&r)->tensor, 0);
    rig_abort(&r);
    refit_close(&r);
}
END_TEST

static uint64_t send_publish_program(struct rig *r, uint32_t worker)
{
    struct wire_publish m = {.has_program = 1};
    while (r->program.places[m.place].side != PROGRAM_SOURCE ||
           r->program.places[m.place].rank != r->workers[worker].rank)
        m.place++;
    return rig_send(r, WIRE_PUBLISH, r->workers[worker].id, &m, sizeof(m), NULL, 0, &r->program_fd,
                    1);
}

START_TEST(a_publication_by_the_programs_cells_serves_prepare)
{
    for (uint64_t seed = 1; seed <= 2; seed++) {
        struct rig r;
        const struct side_case sides[] = {{1, "1", REPLICATE, NULL, false, false},
                                          {2, "2", ROWS, REPLICATE, false, false}};
        model_add("v", 700, 502, 4096, 4096, DTYPE_BFLOAT16);
        model_add("w", 200, 150, 128, 128, DTYPE_FLOAT32);
        scaled_rig(&r, sides, 2);
        rig_open(&r);
        rig_fill_sources(&r, 1);
        rig_expect(&r, send_publish_program(&r, 0), WIRE_PUBLISHED);
        ck_assert_int_eq(r.packet->header.code, 0);
        if (seed == 2)
            r.workers[0].memory[WIRE_LIVE].data[100] ^= 0x40;
        rig_prepare(&r, WIRE_VERIFY_FULL);
        rig_expect(&r, rig_send_start(&r), seed == 1 ? WIRE_STAGED : WIRE_FAILED);
        if (seed == 1)
            ck_assert_uint_eq(rig_wrong(&r, WIRE_LIVE, 1), 0);
        else
            rig_abort(&r);
        refit_close(&r);
    }
}
END_TEST

/* With its n-th allocation failing, a node says so, or does all the same. */
static bool run_out(long n)
{
    struct rig r;
    const struct side_case sides[] = {{1, "1", REPLICATE, NULL, false, false},
                                      {2, "2", ROWS, REPLICATE, false, false}};
    model_add("v", 700, 502, 4096, 4096, DTYPE_BFLOAT16);
    model_add("w", 60, 50, 16, 16, DTYPE_FLOAT32);
    scaled_rig(&r, sides, 2);
    r.o.process = true;
    r.o.lenient = true;
    r.o.fail_at = n;
    rig_open(&r);
    if (!r.refused && !r.gone) {
        rig_fill_sources(&r, 1);
        r.attempt++;
        rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_PREPARED);
    }
    if (!r.refused && !r.gone)
        rig_expect(&r, rig_send_start(&r), WIRE_STAGED);
    bool whole = !r.refused && !r.gone;
    if (whole)
        ck_assert_uint_eq(rig_wrong(&r, WIRE_LIVE, 1), 0);
    int status = rig_end(&r, !r.gone);
    ck_assert_msg(status == EXIT_SUCCESS || status == EXIT_FAILURE, "exit %d at %ld", status, n);
    rig_free(&r);
    model_close();
    return whole;
}

START_TEST(without_memory_a_refit_fails_and_nothing_crashes)
{
    long n = 1;
    for (int quiet = 0; quiet < 3 && n < 1000000; n += 1 + n / 5)
        quiet = run_out(n) ? quiet + 1 : 0;
    ck_assert_int_gt(n, 50);
    ck_assert_int_lt(n, 1000000); /* else even one that never runs out fails */
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a30_each_of_three_ranks_gets_the_scales_of_its_rows)                                         \
    X(a_shard_edge_inside_a_block_gives_both_ranks_its_scale)                                      \
    X(relays_pass_on_what_was_made_and_each_domain_takes_it_in_once)                               \
    X(blocks_of_every_size_are_made_from_any_binding)                                              \
    X(one_scale_of_a_great_tensor_is_that_of_all_of_it)                                            \
    X(destinations_that_want_it_scaled_plain_and_as_it_is_get_each_their_own)                      \
    X(the_other_strategies_make_the_same)                                                          \
    X(nine_takers_in_the_sources_domain_get_what_is_made_once)                                     \
    X(local_copies_make_them_under_delays)                                                         \
    X(regions_serve_the_blocks_that_they_hold_whole)                                               \
    X(a_source_that_changes_between_prepare_and_sending_is_blamed)                                 \
    X(a_publication_by_the_programs_cells_serves_prepare)                                          \
    X(without_memory_a_refit_fails_and_nothing_crashes)

#include "test/lib/main.h"
