/* Refits whose messages go over TCP: what test_exec.c claims of the in-memory transport. */
#include <check.h>

#include "test/lib/rig_runs.h"

static void random_rig(struct rig *r, uint64_t seed)
{
    rig_random(r, seed, 1, 4, false);
    r->o.hello.local_pairs = WIRE_LOCAL_TRANSPORT;
}

static uint64_t three_versions(struct rig *r)
{
    rig_open(r);
    uint64_t moved = rig_three_versions(r);
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

START_TEST(after_quiesced_no_byte_lands_and_the_next_attempt_is_clean)
{
    for (uint64_t seed = 1200; seed < 1225; seed++) {
        struct rig r;
        uint64_t state = seed;
        random_rig(&r, seed);
        r.o.hello.network_bytes_per_s = 4e6; /* so that it is in the middle when it is aborted */
        (void)rig_cut(&r, random_next(&state) % 4000);
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
