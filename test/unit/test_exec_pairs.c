/* Refits whose messages between devices of the node are device copies (transport_local.h), in front of TCP
 * connections that nothing goes over. What test_exec.c claims of the in-memory transport. */
#include <check.h>

#include "test/lib/rig_runs.h"

static void random_rig(struct rig *r, uint64_t seed)
{
    rig_random(r, seed, 2, 4, true);
}

/* Bytes between domains that were moved; what is counted is what the plan says. */
static uint64_t three_versions(struct rig *r, bool by_copies)
{
    rig_open(r);
    uint64_t moved = rig_three_versions(r);
    struct wire_stats s = rig_stats(r);
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

START_TEST(after_quiesced_no_byte_lands_and_the_next_attempt_is_clean)
{
    uint32_t n_cut = 0;
    /* More of them where the machine is so busy that most have landed before. */
    for (uint64_t seed = 2200; seed < 2230 || (n_cut <= 5 && seed < 2500); seed++) {
        struct rig r;
        uint64_t state = seed;
        random_rig(&r, seed);
        r.o.hello.host_seed = seed; /* so that it is in the middle when it is aborted */
        r.o.hello.host_max_delay_us = 400;
        n_cut += rig_cut(&r, random_next(&state) % 6000);
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

static bool run_out(long n)
{
    struct rig r;
    random_rig(&r, 2003);
    return rig_runs_out(&r, n, false);
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
