/* Ranks that take no part now: they hold and take nothing, and the rest of the plan is whole. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "plan/planner.h"

static const char source_text[] =
    "{\"name\": \"train\", \"ranks\": 4, \"meshes\": [{\"name\": \"m\", \"shape\": [2, 2], "
    "\"ranks\": [0, 1, 2, 3]}],"
    " \"tensors\": [{\"name\": \"w\", \"shape\": [8, 8], \"dtype\": \"int8\", \"mesh\": \"m\","
    " \"placements\": [\"Replicate\", \"Shard(0)\"]}]}";
static const char regions_text[] = "{\"name\": \"rollout\", \"ranks\": 2, \"tensors\": [{\"name\": "
                                   "\"w\", \"shape\": [8, 8], \"dtype\": \"int8\","
                                   " \"regions\": [{\"rank\": 0, \"offset\": [0, 0], \"size\": [8, "
                                   "8]}, {\"rank\": 1, \"offset\": [0, 0], \"size\": [8, 8]}]}]}";
static const char mesh_text[] =
    "{\"name\": \"rollout\", \"ranks\": 2, \"meshes\": [{\"name\": \"m\", \"shape\": [2], "
    "\"ranks\": [0, 1]}],"
    " \"tensors\": [{\"name\": \"w\", \"shape\": [8, 8], \"dtype\": \"int8\", \"mesh\": \"m\","
    " \"placements\": [\"Replicate\"]}]}";

static struct layout *parse(const char *text)
{
    struct layout *l = NULL;
    struct err e = {0};
    ck_assert_msg(layout_from_json(text, strlen(text), &l, &e) == 0, "%s", e.text);
    ck_assert_int_eq(layout_digest(l), 0);
    return l;
}

struct seen {
    uint64_t bytes;
    unsigned from[4], to[2]; /* transfers that touch each rank */
};

static int see(const struct plan_transfer *t, void *arg)
{
    struct seen *s = arg;
    if (t->from.side == SIDE_SOURCE)
        s->from[t->from.rank]++;
    if (t->to.side == SIDE_DESTINATION) {
        s->to[t->to.rank]++;
        s->bytes += t->bytes;
    }
    return 0;
}

/* Six devices, all in one domain but the last two. */
static int plan_with(const char *destination_text, const int32_t *source_device,
                     const int32_t *destination_device, struct seen *ret, struct err *e)
{
    char node[] = "n0", a[] = "a", b[] = "b";
    char *nodes[] = {node}, *domains[] = {a, b};
    struct device_place places[6];
    for (uint32_t i = 0; i < 6; i++)
        places[i] = (struct device_place){.node = 0, .local = i, .domain = i >= 4};
    struct topology t = {.nodes = nodes,
                         .n_nodes = 1,
                         .domains = domains,
                         .n_domains = 2,
                         .devices = places,
                         .n_devices = 6};
    struct layout *source = parse(source_text), *destination = parse(destination_text);
    const struct layout *destinations[] = {destination};
    const int32_t *devices[] = {destination_device};
    struct plan_input input = {.source = source,
                               .source_device = source_device,
                               .n_destinations = 1,
                               .destinations = destinations,
                               .destination_device = devices,
                               .topology = &t,
                               .options = plan_options_default()};
    struct plan *p = NULL;
    int r = plan_make(&input, &p, e);
    if (r == 0) {
        ck_assert_msg(plan_check(p, &input, true, e) == 0, "%s", e->text);
        ck_assert_int_eq(plan_transfers(p, -1, see, ret), 0);
        plan_free(p);
    }
    layout_free(source);
    layout_free(destination);
    return r;
}

static void check_absent(const char *destination_text)
{
    struct err e = {0};
    struct seen s = {0};
    const int32_t source[4] = {0, TOPOLOGY_ABSENT, 2, 3}, destination[2] = {TOPOLOGY_ABSENT, 5};
    ck_assert_msg(plan_with(destination_text, source, destination, &s, &e) == 0, "%s", e.text);
    ck_assert_uint_eq(s.bytes, 64); /* 8 × 8 int8, once */
    ck_assert_uint_eq(s.from[1], 0);
    ck_assert_uint_gt(s.from[3], 0); /* the only one left with the lower half */
    ck_assert_uint_eq(s.to[0], 0);
    ck_assert_uint_gt(s.to[1], 0);
}

START_TEST(absent_ranks_of_meshes_neither_send_nor_receive)
{
    check_absent(mesh_text);
}
END_TEST

START_TEST(absent_ranks_of_regions_neither_send_nor_receive)
{
    check_absent(regions_text);
}
END_TEST

START_TEST(a_part_whose_holders_are_all_absent_is_refused)
{
    const int32_t source[4] = {0, TOPOLOGY_ABSENT, 2, TOPOLOGY_ABSENT}, destination[2] = {4, 5};
    struct err e = {0};
    struct seen s = {0};
    ck_assert_int_eq(plan_with(mesh_text, source, destination, &s, &e), RS_EPRECOND);
    ck_assert_int_eq(plan_with(regions_text, source, destination, &s, &e), RS_EPRECOND);
}
END_TEST

START_TEST(a_rank_without_a_device_is_still_an_error)
{
    const int32_t source[4] = {0, TOPOLOGY_NONE, 2, 3}, destination[2] = {4, 5};
    struct err e = {0};
    struct seen s = {0};
    ck_assert_int_eq(plan_with(mesh_text, source, destination, &s, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "rank 1"));
}
END_TEST

#define TESTS(X)                                                                                   \
    X(absent_ranks_of_meshes_neither_send_nor_receive)                                             \
    X(absent_ranks_of_regions_neither_send_nor_receive)                                            \
    X(a_part_whose_holders_are_all_absent_is_refused)                                              \
    X(a_rank_without_a_device_is_still_an_error)
#include "test/lib/main.h"
