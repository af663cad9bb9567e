/* Refits whose messages go over TCP: what test_exec.c claims of the in-memory transport. */
#include <check.h>

#include "test/lib/rig.h"

/* Source on devices 0 … s-1, destination behind them, each device in one of some domains. */
static void random_rig(struct rig *r, uint64_t seed)
{
    uint64_t state = seed;
    uint32_t n_source = 1 + (uint32_t)(random_next(&state) % 4);
    uint32_t n_dest = 1 + (uint32_t)(random_next(&state) % 4);
    uint32_t n_domains = 1 + (uint32_t)(random_next(&state) % 4);
    memset(r, 0, sizeof(*r));
    r->o.n_devices = n_source + n_dest;
    for (uint32_t i = 0; i < r->o.n_devices; i++)
        r->o.domain[i] = i % n_domains;
    r->o.plan = plan_options_default();
    r->o.plan.strategy = (enum plan_strategy)(seed % 3);
    r->o.plan.ring_slots = 1 + (uint32_t)(random_next(&state) % 4);
    r->o.plan.chunk_bytes = 64U << (random_next(&state) % 8);
    r->o.plan.least_piece_bytes = 64;
    r->o.fused = random_next(&state) % 2 == 0;
    r->o.seed = seed;
    memcpy(r->o.hello.transport, "tcp", 4);
    r->o.hello.local_pairs = WIRE_LOCAL_TRANSPORT;
    char *source = rig_random_json(seed, seed + 1, "s", n_source, 6, false);
    char *dest = rig_random_json(seed, seed + 2, "d", n_dest, 6, seed % 4 == 0);
    rig_side(r, 0, source, 0, n_source);
    rig_side(r, 1, dest, n_source, n_dest);
    mem_free(source);
    mem_free(dest);
}

/* Versions share an epoch, and so their connections. */
static uint64_t three_versions(struct rig *r)
{
    uint64_t moved = 0;
    rig_open(r);
    for (uint64_t version = 1; version <= 3; version++) {
        r->version = version;
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
        free(rig_refit(r, WIRE_VERIFY_FULL));
        ck_assert_uint_eq(rig_wrong(r, rig_target(r), version), 0);
        ck_assert_uint_eq(r->progress.network_bytes, plan_totals(r->plan)->network_bytes);
        moved += r->progress.network_bytes;
    }
    rig_close(r);
    return moved;
}

START_TEST(every_element_lands_for_random_layouts)
{
    uint64_t moved = 0;
    for (uint64_t seed = 1000; seed < 1030; seed++) {
        struct rig r;
        random_rig(&r, seed);
        moved += three_versions(&r);
    }
    ck_assert_uint_gt(moved, 1 << 20);
}
END_TEST

START_TEST(every_element_lands_under_delays_and_poison)
{
    for (uint64_t seed = 1100; seed < 1110; seed++) {
        struct rig r;
        random_rig(&r, seed);
        r.o.hello.host_seed = seed;
        r.o.hello.host_max_delay_us = 100;
        (void)three_versions(&r);
    }
}
END_TEST

/* Tensors of 3 to 30 KB: a message has several, each in a run of its own, or (fused) in rows. */
static char *medium_json(const char *name, uint32_t ranks, const char *placement)
{
    struct buf b;
    size_t n;
    buf_init(&b);
    buf_printf(&b,
               "{\"name\":\"%s\",\"ranks\":%u,\"meshes\":[{\"name\":\"m\",\"shape\":[%u],"
               "\"ranks\":[",
               name, ranks, ranks);
    for (uint32_t i = 0; i < ranks; i++)
        buf_printf(&b, "%s%u", i > 0 ? "," : "", i);
    buf_printf(&b, "]}],\"tensors\":[");
    for (uint32_t t = 0; t < 24; t++)
        buf_printf(&b,
                   "%s{\"name\":\"t%02u\",\"shape\":[%u,64],\"dtype\":\"bfloat16\","
                   "\"mesh\":\"m\",\"placements\":[\"%s\"]}",
                   t > 0 ? "," : "", t, 24 + 17 * (t % 13), placement);
    buf_printf(&b, "]}");
    return (char *)buf_steal(&b, &n);
}

/* Two domains that need all of it, with two ranks each: relays and fan-out from where a message has
 * landed. */
START_TEST(messages_of_many_runs_go_without_a_slot_and_land_whole)
{
    for (uint64_t seed = 0; seed < 8; seed++) {
        struct rig r;
        memset(&r, 0, sizeof(r));
        r.o.n_devices = 6;
        for (uint32_t i = 2; i < 6; i++)
            r.o.domain[i] = 1 + (i - 2) / 2;
        r.o.plan = plan_options_default();
        r.o.plan.chunk_bytes = 128 << 10;
        r.o.plan.ring_slots = 2;
        r.o.plan.least_piece_bytes = 4096;
        r.o.fused = seed % 2 == 1;
        r.o.seed = seed;
        r.o.hello.host_seed = seed / 4;
        r.o.hello.host_max_delay_us = 50;
        r.o.hello.local_pairs = WIRE_LOCAL_TRANSPORT;
        if (seed % 4 < 2)
            memcpy(r.o.hello.transport, "tcp", 4);
        char *source = medium_json("s", 2, "Shard(0)");
        char *dest = medium_json("d", 4, seed % 3 == 0 ? "Shard(0)" : "Replicate");
        rig_side(&r, 0, source, 0, 2);
        rig_side(&r, 1, dest, 2, 4);
        mem_free(source);
        mem_free(dest);
        (void)three_versions(&r);
    }
}
END_TEST

static void pause_us(uint64_t us)
{
    struct pollfd none;
    (void)poll(&none, 0, (int)(us / 1000));
    uint64_t until = clock_mono_ns() + us % 1000 * 1000;
    while (clock_mono_ns() < until)
        ;
}

START_TEST(after_quiesced_no_byte_lands_and_the_next_attempt_is_clean)
{
    for (uint64_t seed = 1200; seed < 1225; seed++) {
        struct rig r;
        uint64_t state = seed;
        random_rig(&r, seed);
        r.o.hello.network_bytes_per_s = 4e6; /* so that it is in the middle when it is aborted */
        rig_open(&r);
        rig_fill_sources(&r, 1);
        rig_prepare(&r, WIRE_VERIFY_FULL);
        (void)rig_send_start(&r);
        pause_us(random_next(&state) % 4000);
        rig_abort(&r);
        uint64_t sum = rig_checksum(&r);
        rig_fill_sources(&r, 2);
        pause_us(2000);
        rig_fill_sources(&r, 1);
        ck_assert_uint_eq(rig_checksum(&r), sum);

        r.version = 2;
        rig_fill_sources(&r, 2);
        rig_poison_destinations(&r);
        free(rig_refit(&r, WIRE_VERIFY_FULL));
        ck_assert_uint_eq(rig_wrong(&r, rig_target(&r), 2), 0);
        rig_close(&r);
    }
}
END_TEST

START_TEST(an_unknown_transport_is_refused)
{
    struct rig r;
    random_rig(&r, 1);
    r.o.lenient = true;
    memcpy(r.o.hello.transport, "carrier pigeon", 15);
    rig_open(&r);
    ck_assert(r.refused);
    rig_end(&r, false);
    rig_free(&r);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_element_lands_for_random_layouts)                                                      \
    X(every_element_lands_under_delays_and_poison)                                                 \
    X(messages_of_many_runs_go_without_a_slot_and_land_whole)                                      \
    X(after_quiesced_no_byte_lands_and_the_next_attempt_is_clean)                                  \
    X(an_unknown_transport_is_refused)

#include "test/lib/main.h"
