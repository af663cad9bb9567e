/* The planner on small cases whose values are worked out by hand or by CASES.md. */
#include <stdlib.h>

#include "plan/program.h"
#include "test/lib/plan_zoo.h"

#include <check.h>

/* DESIGN.md section 3: 8 x 8 bfloat16, two row shards on n0 to four column shards on n1. */
static void example(struct zoo_case *c, enum dtype dtype, uint64_t rows, uint64_t columns)
{
    uint32_t two = 2, four = 4, first = 8;
    uint64_t shape[] = {rows, columns};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", 2);
    c->destinations[0] = case_layout("rollout", 4);
    int32_t sm = case_mesh(c->source, 1, &two, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 1, &four, NULL, 0, 1);
    case_tensor(c->source, "w", dtype, 2, shape, sm, "0");
    case_tensor(c->destinations[0], "w", dtype, 2, shape, dm, "1");
    case_topology(c, 2, 8, 1);
    case_finish(c, 0, &first);
}

struct seen {
    struct plan_transfer t[64];
    uint32_t n;
};

static int remember(const struct plan_transfer *t, void *arg)
{
    struct seen *s = arg;
    ck_assert_uint_lt(s->n, 64);
    s->t[s->n] = *t;
    s->t[s->n++].after = NULL;
    return 0;
}

START_TEST(design_example_gives_the_documented_summary_and_first_transfer)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct err e = {0};
    struct seen s = {.n = 0};
    example(&c, DTYPE_BFLOAT16, 8, 8);
    ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
    const struct plan_totals *t = plan_totals(p);
    ck_assert_uint_eq(t->tensors, 1);
    ck_assert_uint_eq(t->logical_bytes, 128);
    ck_assert_uint_eq(t->destination_bytes, 128);
    ck_assert_uint_eq(t->network_bytes, 128);
    ck_assert_uint_eq(t->network_bytes_minimum, 128);
    ck_assert_uint_eq(t->domain_bytes, 0);
    ck_assert_uint_eq(t->device_bytes, 0);
    ck_assert_uint_eq(t->gather_bytes, 64);
    ck_assert_uint_eq(t->broadcast_bytes, 512);
    ck_assert_uint_eq(t->gather_broadcast_network_bytes, 128);
    ck_assert_uint_eq(t->busiest_device, 0);
    ck_assert(t->busiest_egress);
    ck_assert_uint_eq(t->busiest_bytes, 64);
    ck_assert_uint_eq(t->lower_bound, 64);
    ck_assert_int_eq(plan_transfers(p, -1, remember, &s), 0);
    ck_assert_uint_eq(s.n, 8);
    ck_assert_uint_eq(s.t[0].id, 0);
    ck_assert_uint_eq(s.t[0].bytes, 16);
    ck_assert_uint_eq(s.t[0].box.size[0], 4);
    ck_assert_uint_eq(s.t[0].box.size[1], 2);
    ck_assert_int_eq(s.t[0].tier, TIER_NETWORK);
    ck_assert_int_eq(s.t[0].from.side, SIDE_SOURCE);
    ck_assert_uint_eq(s.t[0].from.device, 0);
    ck_assert_uint_eq(s.t[0].to.device, 8);
    ck_assert_uint_eq(s.t[0].to.rank, 0);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(programs_of_all_nodes_open)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct err e = {0};
    example(&c, DTYPE_BFLOAT16, 1024, 8192);
    for (int strategy = PLAN_RESHARD; strategy <= PLAN_GATHER_BROADCAST; strategy++) {
        c.input.options.strategy = (enum plan_strategy)strategy;
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
        for (uint32_t node = 0; node < 2; node++) {
            struct buf b;
            struct program g;
            buf_init(&b);
            ck_assert_msg(plan_program(p, node, &b, &e) == 0, "%s", e.text);
            ck_assert_msg(program_open(b.data, b.n_bytes, &g, &e) == 0, "%s", e.text);
            ck_assert_uint_gt(g.n_messages, 0);
            buf_close(&b);
        }
        plan_free(p);
    }
    case_close(&c);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(design_example_gives_the_documented_summary_and_first_transfer)                              \
    X(programs_of_all_nodes_open)
#include "test/lib/main.h"
