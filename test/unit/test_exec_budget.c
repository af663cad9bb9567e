/* What is taken of a GPU's memory: the sums, the limit, what is said. Numbers by hand. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "exec/budget.h"

#define MIB (UINT64_C(1) << 20)

/* Two devices of one node, 8 channels: 16 MiB, and per channel one peer with 4 MiB, 512 KiB (LL) and
 * 4.6875 MiB (LL128). Streams, one way: 3 work buffers of 1.3125 MiB and 256 bytes, a bounce buffer of
 * 1 MiB, 5 streams of 64 KiB. */
static const uint64_t communicator = 16 * MIB + 8 * (4 * MIB + MIB / 2 + 4915200);
static const uint64_t streams = 3 * (5 * MIB / 4 + 65536 + 256) + MIB + 5 * 65536;
static const struct budget_settings two = {
    .n_devices = 2, .ring_slots = 4, .slot_bytes = 8 * MIB, .n_threads = 2, .max_ctas = 8};

START_TEST(communicators_are_estimated_by_channels_peers_and_the_network)
{
    ck_assert_uint_eq(budget_communicator_bytes(1, false, 8), 16 * MIB);
    ck_assert_uint_eq(budget_communicator_bytes(2, false, 8), communicator);
    ck_assert_uint_eq(budget_communicator_bytes(2, false, 0), communicator);
    ck_assert_uint_eq(budget_communicator_bytes(8, false, 1),
                      16 * MIB + 7 * (9 * MIB / 2 + 4915200));
    ck_assert_uint_eq(budget_communicator_bytes(1, true, 4), 16 * MIB + 4 * 16 * MIB);
    ck_assert_int_eq(setenv("NCCL_BUFFSIZE", "1048576", 1), 0);
    ck_assert_uint_eq(budget_communicator_bytes(2, false, 8), communicator - 8 * 3 * MIB);
    ck_assert_int_eq(unsetenv("NCCL_BUFFSIZE"), 0);
}
END_TEST

START_TEST(what_does_not_fit_is_refused_with_the_parts_and_the_remedy)
{
    struct budget_settings s = two;
    struct err e = {0};
    uint64_t need = 512 * MIB + communicator + streams + 32 * MIB;
    s.limit_bytes = need;
    ck_assert_msg(budget_check(&s, &e) == 0, "%s", e.text);
    s.limit_bytes = 0;
    ck_assert_int_eq(budget_check(&s, &e), 0);
    s.limit_bytes = need - 1;
    ck_assert_int_eq(budget_check(&s, &e), RS_EEXHAUSTED);
    static const char *const words[] = {
        "max_gpu_memory_bytes",
        "context 512 MiB (estimated)",
        "communicators 90 MiB",
        "streams 6 MiB",
        "staging ring 32 MiB",
        "639 MiB needed",
        "lower ring_slots, chunk_bytes, threads or [nccl] max_ctas"};
    for (unsigned i = 0; i < sizeof words / sizeof *words; i++)
        ck_assert_msg(strstr(e.text, words[i]) != NULL, "no '%s' in: %s", words[i], e.text);
    ck_assert_ptr_null(strstr(e.text, "scratch"));
}
END_TEST

START_TEST(parts_are_taken_and_given_back_and_a_measured_context_counts_as_it_is)
{
    struct budget_settings s = two;
    struct budget b;
    struct err e = {0};
    s.limit_bytes = 1024 * MIB;
    ck_assert_int_eq(budget_open(&s, &b, &e), 0);
    ck_assert_uint_eq(budget_total(&b), 512 * MIB + streams);
    ck_assert_int_eq(budget_measured(&b, BUDGET_CONTEXT, 300 * MIB, &e), 0);
    ck_assert_uint_eq(budget_total(&b), 300 * MIB + streams);
    ck_assert_uint_eq(b.peak_bytes, 300 * MIB + streams);
    ck_assert_int_eq(budget_measured(&b, BUDGET_CONTEXT, 0, &e), 0); /* not known: stays */
    uint64_t left = 1024 * MIB - budget_total(&b);
    ck_assert_int_eq(budget_take(&b, BUDGET_SCRATCH, left, &e), 0);
    ck_assert_int_eq(budget_take(&b, BUDGET_RING, 1, &e), RS_EEXHAUSTED);
    ck_assert_ptr_nonnull(strstr(e.text, "context 300 MiB (measured)"));
    ck_assert_uint_eq(budget_total(&b), 1024 * MIB); /* what was refused was not taken */
    budget_give(&b, BUDGET_SCRATCH, left);
    ck_assert_uint_eq(b.peak_bytes, 1024 * MIB); /* though it has been given back */
    ck_assert_int_eq(budget_take(&b, BUDGET_RING, left, &e), 0);
    ck_assert_int_eq(budget_measured(&b, BUDGET_CONTEXT, 301 * MIB, &e), RS_EEXHAUSTED);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(communicators_are_estimated_by_channels_peers_and_the_network)                               \
    X(what_does_not_fit_is_refused_with_the_parts_and_the_remedy)                                  \
    X(parts_are_taken_and_given_back_and_a_measured_context_counts_as_it_is)
#include "test/lib/main.h"
