/* Refits through the data plane: what lands, what is caught, what stops. */
#include "test/lib/rig.h"

/* Source on devices 0 … s-1, destination behind them, domains as told. */
static void random_rig(struct rig *r, uint64_t seed, bool cast, enum plan_strategy strategy)
{
    static const uint32_t ranks[] = {1, 2, 3, 4};
    uint64_t state = seed;
    uint32_t n_source = ranks[random_next(&state) % 4], n_dest = ranks[random_next(&state) % 4];
    uint32_t n_domains = 1 + (uint32_t)(random_next(&state) % 4);
    memset(r, 0, sizeof(*r));
    r->o.n_devices = n_source + n_dest;
    for (uint32_t i = 0; i < r->o.n_devices; i++)
        r->o.domain[i] = i % n_domains;
    r->o.plan = plan_options_default();
    r->o.plan.strategy = strategy;
    r->o.plan.ring_slots = 1 + (uint32_t)(random_next(&state) % 4);
    r->o.plan.chunk_bytes = 64U << (random_next(&state) % 8);
    r->o.plan.least_piece_bytes = 64;
    r->o.fused = random_next(&state) % 2 == 0;
    r->o.shadow = random_next(&state) % 2 == 0;
    r->o.seed = seed;
    bool same_devices = random_next(&state) % 4 == 0;
    char *source = rig_random_json(seed, seed + 1, "s", n_source, 6, false);
    char *dest = rig_random_json(seed, seed + 2, "d", n_dest, 6, cast);
    char *second = rig_random_json(seed, seed + 3, "e", n_dest, 6, false);
    rig_side(r, 0, source, 0, n_source);
    rig_side(r, 1, dest, same_devices ? 0 : n_source, n_dest);
    if (random_next(&state) % 2 == 0)
        rig_side(r, 2, second, n_source, n_dest);
    mem_free(source);
    mem_free(dest);
    mem_free(second);
}

/* Holds of one cell must all have one fingerprint. */
static void check_holds(const struct rig *r, const uint64_t *table)
{
    for (uint32_t i = 0; i < r->program.n_holds; i++)
        for (uint32_t k = i + 1; k < r->program.n_holds; k++)
            if (r->program.holds[i].cell == r->program.holds[k].cell)
                ck_assert_uint_eq(table[i], table[k]);
}

static void two_versions(struct rig *r, enum wire_verify verify)
{
    rig_open(r);
    for (uint64_t version = 1; version <= 2; version++) {
        r->version = version;
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
        uint64_t *table = rig_refit(r, verify);
        ck_assert_uint_eq(rig_wrong(r, rig_target(r), version), 0);
        if (verify == WIRE_VERIFY_FULL)
            check_holds(r, table);
        free(table);
    }
    rig_close(r);
}

START_TEST(every_element_lands_for_random_layouts)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct rig r;
        random_rig(&r, seed, false, PLAN_RESHARD);
        two_versions(&r, (enum wire_verify)(seed % 3));
    }
}
END_TEST

START_TEST(every_element_lands_with_casts)
{
    for (uint64_t seed = 100; seed < 120; seed++) {
        struct rig r;
        random_rig(&r, seed, true, PLAN_RESHARD);
        two_versions(&r, WIRE_VERIFY_FULL);
    }
}
END_TEST

START_TEST(every_element_lands_directly_and_by_gather_broadcast)
{
    for (uint64_t seed = 200; seed < 220; seed++) {
        struct rig r;
        random_rig(&r, seed, seed % 4 < 2, seed % 2 == 0 ? PLAN_DIRECT : PLAN_GATHER_BROADCAST);
        two_versions(&r, WIRE_VERIFY_FULL);
    }
}
END_TEST

START_TEST(every_element_lands_under_delays_and_poison)
{
    for (uint64_t seed = 300; seed < 315; seed++) {
        struct rig r;
        random_rig(&r, seed, false, (enum plan_strategy)(seed % 3));
        r.o.hello.host_seed = seed;
        r.o.hello.host_max_delay_us = 200;
        two_versions(&r, WIRE_VERIFY_FULL);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_element_lands_for_random_layouts)                                                      \
    X(every_element_lands_with_casts)                                                              \
    X(every_element_lands_directly_and_by_gather_broadcast)                                        \
    X(every_element_lands_under_delays_and_poison)

#include "test/lib/main.h"
