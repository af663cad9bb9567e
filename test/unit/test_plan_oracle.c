/* Random plans, simulated element by element. ORACLE_ROUNDS sets how many. */
#include <check.h>
#include <inttypes.h>

#include "test/lib/plan_judge.h"

/* --- random plans -------------------------------------------------------- */

static unsigned random_rounds(unsigned fallback)
{
    const char *text = getenv("ORACLE_ROUNDS");
    return text == NULL ? fallback : (unsigned)strtoul(text, NULL, 10);
}

/* What the random plans have shown so far: a judge that never sees a relay proves nothing about relays. */
struct seen {
    unsigned relays, staged, local, direct, broadcast, cast;
};

static void look(struct seen *seen, const struct sim *m)
{
    for (size_t i = 0; i < m->s.n; i++) {
        const struct plan_transfer *t = &m->s.all[i];
        bool reshard = t->strategy == PLAN_RESHARD;
        seen->relays += reshard && t->tier == TIER_NETWORK && t->from.side == SIDE_DESTINATION;
        seen->staged += reshard && t->to.side == SIDE_STAGING;
        seen->local += t->tier == TIER_DEVICE;
        seen->direct += t->strategy == PLAN_DIRECT;
        seen->broadcast += t->strategy == PLAN_GATHER_BROADCAST;
        seen->cast += t->wire == DTYPE_BFLOAT16;
    }
}

START_TEST(random_plans_write_each_needed_element_once_and_enter_each_domain_once)
{
    struct seen seen = {0};
    unsigned rounds = random_rounds(250);
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t seed = 1000 + round;
        struct plan_case c;
        case_random(&c, &seed);
        struct plan *p = case_plan(&c), *again = case_plan(&c);
        struct sim m = judge(&c, p);
        ck_assert_mem_eq(plan_totals(p)->digest, plan_totals(again)->digest, 16);
        look(&seen, &m);
        sim_close(&m);
        plan_free(p);
        plan_free(again);
        case_close(&c);
    }
    ck_assert_uint_ge(seen.relays, rounds / 10);
    ck_assert_uint_ge(seen.staged, rounds / 20);
    ck_assert_uint_ge(seen.local, rounds / 10);
    ck_assert_uint_ge(seen.direct, rounds / 10);
    ck_assert_uint_ge(seen.broadcast, rounds / 10);
    ck_assert_uint_ge(seen.cast, rounds / 10);
}
END_TEST

START_TEST(random_plans_know_the_lower_bound_of_the_busiest_device)
{
    unsigned rounds = random_rounds(40);
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t seed = 90000 + round;
        struct plan_case c;
        case_random(&c, &seed);
        c.input.options.strategy = PLAN_RESHARD;
        c.input.options.n_rules = 0;
        struct plan *p = case_plan(&c);
        const struct plan_totals *t = plan_totals(p);
        struct sim m = judge(&c, p);
        if (t->network_bytes_minimum > 0) {
            ck_assert_msg(t->lower_bound == bound_by_hand(&m),
                          "round %u: %" PRIu64 ", not %" PRIu64, round, t->lower_bound,
                          bound_by_hand(&m));
            ck_assert_uint_ge(t->busiest_bytes, t->lower_bound);
        }
        sim_close(&m);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

START_TEST(one_source_feeds_many_domains_by_relays)
{
    struct plan_case c = {.n_destinations = 1};
    uint32_t sizes[9], domains[9];
    for (uint32_t i = 0; i < 9; i++) {
        sizes[i] = 1;
        domains[i] = i;
    }
    case_topology(&c.topology, 9, sizes, domains);
    c.source = layouts_one("512", 1, "1", "0", "'Replicate'", "");
    c.destinations[0] = layouts_one("512", 8, "8", "0, 1, 2, 3, 4, 5, 6, 7", "'Replicate'", "");
    c.source_device = calloc(1, sizeof(int32_t));
    c.destination_device[0] = calloc(8, sizeof(int32_t));
    for (int32_t r = 0; r < 8; r++)
        c.destination_device[0][r] = r + 1;
    c.input.options = plan_options_default();
    c.input.options.least_piece_bytes = 16;
    c.input.options.chunk_bytes = 64;
    case_finish(&c);
    struct plan *p = case_plan(&c);
    struct sim m = judge(&c, p);
    const struct plan_totals *t = plan_totals(p);
    ck_assert_uint_eq(t->lower_bound,
                      2048); /* the source alone holds it; each domain needs it all */
    ck_assert_uint_eq(t->network_bytes, 8 * 2048);
    ck_assert_uint_le(t->busiest_bytes, 2048 + 2048 / 8);
    sim_close(&m);
    plan_free(p);
    case_close(&c);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(random_plans_write_each_needed_element_once_and_enter_each_domain_once)                      \
    X(random_plans_know_the_lower_bound_of_the_busiest_device)                                     \
    X(one_source_feeds_many_domains_by_relays)
#include "test/lib/main.h"
