/* Refits whose messages between devices of the node are device copies (transport_local.h), in front of TCP
 * connections that nothing goes over. What test_exec.c claims of the in-memory transport. */
#include <check.h>

#include "test/lib/rig.h"

/* Source on devices 0 … s-1, destination behind them, each device in one of some domains. */
static void random_rig(struct rig *r, uint64_t seed)
{
    uint64_t state = seed;
    uint32_t n_source = 1 + (uint32_t)(random_next(&state) % 4);
    uint32_t n_dest = 1 + (uint32_t)(random_next(&state) % 4);
    uint32_t n_domains = 2 + (uint32_t)(random_next(&state) % 3);
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
    r->o.shadow = random_next(&state) % 2 == 0;
    r->o.seed = seed;
    memcpy(r->o.hello.transport, "tcp", 4);
    char *source = rig_random_json(seed, seed + 1, "s", n_source, 6, false);
    char *dest = rig_random_json(seed, seed + 2, "d", n_dest, 6, seed % 4 == 0);
    rig_side(r, 0, source, 0, n_source);
    rig_side(r, 1, dest, n_source, n_dest);
    mem_free(source);
    mem_free(dest);
}

static struct wire_stats stats_of(struct rig *r)
{
    struct wire_stats s;
    rig_expect(r, rig_send(r, WIRE_STATS, 0, NULL, 0, NULL, 0, NULL, 0), WIRE_COUNTED);
    ck_assert_uint_eq(r->packet->header.body_bytes, sizeof(s));
    memcpy(&s, r->packet->body, sizeof(s));
    return s;
}

/* Bytes between domains that were moved; what is counted is what the plan says. */
static uint64_t three_versions(struct rig *r, bool by_copies)
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
    struct wire_stats s = stats_of(r);
    if (by_copies)
        ck_assert_uint_eq(s.connected, 0);
    else
        ck_assert(moved == 0 || s.connected > 0);
    ck_assert_uint_eq(s.network_received_bytes, moved);
    ck_assert_uint_eq(s.network_sent_bytes, moved);
    rig_close(r);
    return moved;
}

START_TEST(every_element_lands_for_random_layouts_and_no_connection_is_made)
{
    uint64_t moved = 0;
    for (uint64_t seed = 2000; seed < 2040; seed++) {
        struct rig r;
        random_rig(&r, seed);
        moved += three_versions(&r, true);
    }
    ck_assert_uint_gt(moved, 1 << 20);
}
END_TEST

START_TEST(every_element_lands_under_delays_and_poison)
{
    for (uint64_t seed = 2100; seed < 2130; seed++) {
        struct rig r;
        random_rig(&r, seed);
        r.o.hello.host_seed = seed;
        r.o.hello.host_max_delay_us = 150;
        (void)three_versions(&r, true);
    }
}
END_TEST

START_TEST(rates_and_the_setting_keep_them_on_the_transport_and_that_is_said)
{
    for (int k = 0; k < 3; k++) {
        static const char *const said[] = {"device copies", "local_pairs = transport", "rates"};
        struct rig r;
        random_rig(&r, 2000);
        if (k == 1)
            r.o.hello.local_pairs = WIRE_LOCAL_TRANSPORT;
        if (k == 2)
            r.o.hello.network_bytes_per_s = 1e9;
        uint64_t moved = three_versions(&r, k == 0);
        ck_assert_uint_gt(moved, 0);
        ck_assert_msg(strstr(r.local, said[k]) != NULL, "%s", r.local);
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
    uint32_t n_cut = 0;
    for (uint64_t seed = 2200; seed < 2230; seed++) {
        struct rig r;
        uint64_t state = seed;
        random_rig(&r, seed);
        r.o.hello.host_seed = seed; /* so that it is in the middle when it is aborted */
        r.o.hello.host_max_delay_us = 400;
        rig_open(&r);
        rig_fill_sources(&r, 1);
        rig_prepare(&r, WIRE_VERIFY_FULL);
        (void)rig_send_start(&r);
        pause_us(random_next(&state) % 6000);
        rig_abort(&r);
        n_cut += r.progress.total_bytes == 0 || r.progress.done_bytes < r.progress.total_bytes;
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
    ck_assert_uint_gt(n_cut, 5);
}
END_TEST

START_TEST(a_device_that_fails_ends_the_attempt)
{
    uint32_t n_failed = 0;
    for (uint32_t item = 1; item < 60; item += 2) {
        struct rig r;
        enum wire_verify verify = item % 4 == 1 ? WIRE_VERIFY_FULL : WIRE_VERIFY_OFF;
        random_rig(&r, 2003 + item % 5);
        r.o.hello.host_fail_device = item % r.o.n_devices;
        r.o.hello.host_fail_at_item = item;
        rig_open(&r);
        rig_fill_sources(&r, 1);
        r.attempt++;
        uint32_t got = rig_answer(&r, rig_send_prepare(&r, verify, NULL));
        if (got == WIRE_PREPARED)
            got = rig_answer(&r, rig_send_start(&r));
        if (got == WIRE_STAGED) { /* it had less to do than that */
            ck_assert_uint_eq(rig_wrong(&r, rig_target(&r), 1), 0);
            rig_close(&r);
            continue;
        }
        n_failed++;
        ck_assert_uint_eq(got, WIRE_FAILED);
        ck_assert_msg(r.packet->header.code == RS_EDEVICE, "item %u: %s", item,
                      rig_failure(&r)->text);
        rig_abort(&r);
        rig_close(&r);
    }
    ck_assert_uint_ge(n_failed, 10);
}
END_TEST

/* True where the failing allocation struck. */
static bool run_out(long n)
{
    struct rig r;
    random_rig(&r, 2003);
    r.o.process = true;
    r.o.shadow = true;
    r.o.fail_at = n;
    r.o.lenient = true;
    rig_open(&r);
    rig_fill_sources(&r, 1);
    bool failed = r.refused;
    for (int attempt = 0; attempt < 2 && !r.gone; attempt++) {
        r.attempt++;
        if (rig_try(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL)) == WIRE_PREPARED &&
            rig_try(&r, rig_send_start(&r)) == WIRE_STAGED) {
            ck_assert_uint_eq(rig_wrong(&r, WIRE_SHADOW, 1), 0);
            break;
        }
        failed = true;
        (void)rig_try(&r, rig_send(&r, WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0));
    }
    failed = failed || r.gone || r.packet->header.code != 0;
    int status = rig_end(&r, !r.gone);
    ck_assert_msg(status == EXIT_SUCCESS || (r.gone && status == EXIT_FAILURE), "status %d",
                  status);
    rig_free(&r);
    return failed;
}

START_TEST(without_memory_requests_fail_and_nothing_crashes)
{
    long quiet = 0;
    for (long n = 1; quiet < 3; n += 1 + n / 40)
        quiet = run_out(n) ? 0 : quiet + 1;
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_element_lands_for_random_layouts_and_no_connection_is_made)                            \
    X(every_element_lands_under_delays_and_poison)                                                 \
    X(rates_and_the_setting_keep_them_on_the_transport_and_that_is_said)                           \
    X(after_quiesced_no_byte_lands_and_the_next_attempt_is_clean)                                  \
    X(a_device_that_fails_ends_the_attempt)                                                        \
    X(without_memory_requests_fail_and_nothing_crashes)

#include "test/lib/main.h"
