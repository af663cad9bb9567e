/* What a refit asks of GPUs and of NCCL, by the stand-in's counters: inside a node nothing of NCCL where the
 * devices reach each other, and NCCL where they don't. */
#include <check.h>
#include <dlfcn.h>

#include "test/lib/rig.h"
#include "test/standin/standin.h"

enum { MOST = 4 };

/* Counts of all devices since the process began, by a symbol that the real runtime has not. */
static struct standin_device_counters counted(void)
{
    struct standin_device_counters *(*count)(int) = NULL;
    struct standin_device_counters all = {0};
    void *at = dlsym(RTLD_DEFAULT, "standin_count");
    ck_assert_ptr_nonnull(at);
    memcpy(&count, &at, sizeof count);
    for (int d = 0; d < MOST; d++) {
        all.launches += count(d)->launches;
        all.copies += count(d)->copies;
        all.copied_bytes += count(d)->copied_bytes;
        all.groups_begun += count(d)->groups_begun;
        all.messages += count(d)->messages;
        all.received_bytes += count(d)->received_bytes;
    }
    return all;
}

/* Each test is a process of its own; peers: STANDIN_PEER. */
static void cuda_rig(struct rig *r, uint32_t n_devices, const char *peers)
{
    ck_assert_int_eq(setenv("STANDIN_DEVICES", "4", 1), 0);
    ck_assert_int_eq(setenv("STANDIN_PEER", peers, 1), 0);
    memset(r, 0, sizeof(*r));
    r->o.n_devices = n_devices;
    r->o.plan = plan_options_default();
    r->o.plan.ring_slots = 4;
    r->o.plan.chunk_bytes = 2 << 20;
    r->o.seed = 3;
    (void)snprintf(r->o.hello.backend, sizeof(r->o.hello.backend), "cuda");
    (void)snprintf(r->o.hello.transport, sizeof(r->o.hello.transport), "nccl");
}

/* One tensor of 4 MiB and one of 6000 bytes, cut in `ranks` parts along dim 0, or whole on each. */
static void side(struct rig *r, uint32_t number, uint32_t first, uint32_t ranks, bool sharded)
{
    char text[600], list[64] = "";
    for (uint32_t i = 0; i < ranks; i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%u", i > 0 ? "," : "", i);
    const char *placement = sharded ? "Shard(0)" : "Replicate";
    snprintf(text, sizeof text,
             "{\"name\":\"l%u\",\"ranks\":%u,\"meshes\":[{\"name\":\"m\",\"shape\":[%u],"
             "\"ranks\":[%s]}],\"tensors\":["
             "{\"name\":\"big\",\"shape\":[1024,2048],\"dtype\":\"bfloat16\",\"mesh\":\"m\","
             "\"placements\":[\"%s\"]},"
             "{\"name\":\"small\",\"shape\":[60,50],\"dtype\":\"bfloat16\",\"mesh\":\"m\","
             "\"placements\":[\"%s\"]}]}",
             number, ranks, ranks, list, placement, placement);
    rig_side(r, number, text, first, ranks);
}

enum { BYTES = 1024 * 2048 * 2 + 60 * 50 * 2 };

/* What the second of two refits took. */
static struct standin_device_counters refit(struct rig *r, enum wire_verify verify)
{
    rig_open(r);
    struct standin_device_counters before = {0};
    for (uint64_t version = 1; version <= 2; version++) {
        r->version = version;
        before = counted();
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
        free(rig_refit(r, verify));
        ck_assert_uint_eq(rig_wrong(r, rig_target(r), version), 0);
        ck_assert_uint_eq(r->progress.network_bytes, plan_totals(r->plan)->network_bytes);
        ck_assert_uint_eq(r->progress.domain_bytes, plan_totals(r->plan)->domain_bytes);
        ck_assert_uint_eq(r->progress.device_bytes, plan_totals(r->plan)->device_bytes);
    }
    struct standin_device_counters after = counted();
    rig_close(r);
    return (struct standin_device_counters){
        .launches = after.launches - before.launches,
        .copies = after.copies - before.copies,
        .copied_bytes = after.copied_bytes - before.copied_bytes,
        .groups_begun = after.groups_begun,
        .messages = after.messages - before.messages,
        .received_bytes = after.received_bytes - before.received_bytes};
}

START_TEST(a_worker_on_its_sources_device_is_served_by_device_copies)
{
    struct rig r;
    cuda_rig(&r, 2, "1");
    side(&r, 0, 0, 2, true);
    side(&r, 1, 0, 2, true);
    struct standin_device_counters c = refit(&r, WIRE_VERIFY_OFF);
    ck_assert_uint_eq(c.groups_begun, 0);
    ck_assert_uint_eq(c.copied_bytes, 1024 * 2048 * 2); /* of the big tensor: long runs */
    ck_assert_uint_le(c.copies, 1024 * 2048 * 2 / r.o.plan.least_piece_bytes);
    ck_assert_uint_eq(c.launches, 2); /* the small halves */
}
END_TEST

/* Two devices of one domain hold a half each, all four take all. */
START_TEST(fan_out_inside_a_domain_of_the_node_takes_nothing_of_nccl)
{
    struct rig r;
    cuda_rig(&r, 4, "1");
    side(&r, 0, 0, 2, true);
    side(&r, 1, 0, 4, false);
    struct standin_device_counters c = refit(&r, WIRE_VERIFY_FULL);
    ck_assert_uint_eq(c.groups_begun, 0);
}
END_TEST

/* Three further takers of each half: one copy of the engine for each long run and taker. */
START_TEST(fan_out_of_long_runs_is_the_copy_engines)
{
    struct rig r;
    cuda_rig(&r, 4, "1");
    side(&r, 0, 0, 2, true);
    side(&r, 1, 0, 4, false);
    struct standin_device_counters c = refit(&r, WIRE_VERIFY_OFF);
    ck_assert_uint_eq(c.groups_begun, 0);
    ck_assert_uint_eq(c.copied_bytes, 4 * 1024 * 2048 * 2);
    ck_assert_uint_eq(c.launches, 2); /* the small halves, each read once for all takers */
}
END_TEST

/* Each device is a domain: what is a message to the plan is copies here, each byte once into each domain. */
START_TEST(messages_between_domains_of_the_node_are_copies_where_devices_reach_each_other)
{
    for (int k = 0; k < 2; k++) {
        struct rig r;
        cuda_rig(&r, 4, "1");
        for (uint32_t i = 0; i < 4; i++)
            r.o.domain[i] = i;
        side(&r, 0, 0, 2, true);
        side(&r, 1, 2, 2, false);
        struct standin_device_counters c = refit(&r, k == 0 ? WIRE_VERIFY_OFF : WIRE_VERIFY_FULL);
        ck_assert_str_eq(r.local, "device copies");
        ck_assert_uint_eq(r.progress.network_bytes, 2 * BYTES);
        ck_assert_uint_eq(c.groups_begun, 0);
        /* The big tensor's bytes by the engine, twice; with fingerprints their 8 bytes a sum, too. */
        if (k == 0)
            ck_assert_uint_eq(c.copied_bytes, 2 * 1024 * 2048 * 2);
        else
            ck_assert_uint_ge(c.copied_bytes, 2 * 1024 * 2048 * 2);
    }
}
END_TEST

START_TEST(without_peer_access_messages_go_by_nccl_and_that_is_said)
{
    struct rig r;
    cuda_rig(&r, 4, "0");
    for (uint32_t i = 0; i < 4; i++)
        r.o.domain[i] = i;
    side(&r, 0, 0, 2, true);
    side(&r, 1, 2, 2, false);
    struct standin_device_counters c = refit(&r, WIRE_VERIFY_FULL);
    ck_assert_msg(
        strstr(r.local, "without peer access by the transport: 0-1, 0-2, 0-3, 1-2 and 2") != NULL,
        "%s", r.local);
    ck_assert_uint_eq(c.received_bytes, 2 * BYTES);
    ck_assert_uint_eq(c.messages, 2 * r.progress.messages);
}
END_TEST

/* 0 and 1 reach each other, and 2 and 3: half of the bytes come from a device that does. */
START_TEST(each_pair_goes_its_own_way)
{
    struct rig r;
    cuda_rig(&r, 4, "2");
    for (uint32_t i = 0; i < 4; i++)
        r.o.domain[i] = i;
    r.o.plan.relay = false;
    side(&r, 0, 0, 2, true);
    side(&r, 1, 1, 2, false); /* on 1 and 2: 1 has a half itself */
    struct standin_device_counters c = refit(&r, WIRE_VERIFY_FULL);
    ck_assert_msg(strstr(r.local, "without peer access by the transport: 0-2, 0-3, 1-2, 1-3") !=
                      NULL,
                  "%s", r.local);
    ck_assert_uint_eq(r.progress.network_bytes, BYTES + BYTES / 2);
    ck_assert_uint_eq(c.received_bytes, BYTES); /* device 2's; 0 to 1 is copied */
}
END_TEST

START_TEST(every_element_lands_whoever_reaches_whom)
{
    static const char *const peers[] = {"0", "1", "2"};
    for (uint64_t seed = 31; seed < 43; seed++) {
        struct rig r;
        cuda_rig(&r, 4, peers[seed % 3]);
        for (uint32_t i = 0; i < 4; i++)
            r.o.domain[i] = seed % 3 == 0 ? i : i / 2;
        r.o.plan.chunk_bytes = 64U << (seed % 8);
        r.o.plan.least_piece_bytes = 64;
        r.o.fused = seed % 2 == 0;
        r.o.seed = seed;
        char *source = rig_random_json(seed, seed + 1, "s", 4, 6, false);
        char *dest = rig_random_json(seed, seed + 2, "d", 4, 6, seed % 4 == 0);
        rig_side(&r, 0, source, 0, 4);
        rig_side(&r, 1, dest, 0, 4);
        mem_free(source);
        mem_free(dest);
        for (uint32_t side_ = 0; side_ < 2; side_++)
            for (uint32_t i = 0; i < 4; i++)
                r.rank_device[side_][i] = (int32_t)((i + side_ * (seed % 4)) % 4);
        (void)refit(&r, WIRE_VERIFY_FULL);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_worker_on_its_sources_device_is_served_by_device_copies)                                   \
    X(fan_out_of_long_runs_is_the_copy_engines)                                                    \
    X(fan_out_inside_a_domain_of_the_node_takes_nothing_of_nccl)                                   \
    X(messages_between_domains_of_the_node_are_copies_where_devices_reach_each_other)              \
    X(without_peer_access_messages_go_by_nccl_and_that_is_said)                                    \
    X(each_pair_goes_its_own_way)                                                                  \
    X(every_element_lands_whoever_reaches_whom)
#include "test/lib/main.h"
