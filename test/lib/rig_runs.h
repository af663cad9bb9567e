/* What tests of one node's data plane do with a rig, whatever carries its messages: random layouts, versions one after the
 * other, an abort in the middle, memory that runs out. For tests with Check; include it in one .c only. */
#ifndef RS_TEST_RIG_RUNS_H
#define RS_TEST_RIG_RUNS_H

#include <check.h>

#include "test/lib/rig.h"

/* Source on devices 0 … s-1, destination behind them, each device in one of so many domains; over TCP. */
static inline void rig_random(struct rig *r, uint64_t seed, uint32_t least_domains,
                              uint32_t most_domains, bool may_shadow)
{
    uint64_t state = seed;
    uint32_t n_source = 1 + (uint32_t)(random_next(&state) % 4);
    uint32_t n_dest = 1 + (uint32_t)(random_next(&state) % 4);
    uint32_t n_domains =
        least_domains + (uint32_t)(random_next(&state) % (most_domains - least_domains + 1));
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
    r->o.shadow = may_shadow && random_next(&state) % 2 == 0;
    r->o.seed = seed;
    memcpy(r->o.hello.transport, "tcp", 4);
    char *source = rig_random_json(seed, seed + 1, "s", n_source, 6, false);
    char *dest = rig_random_json(seed, seed + 2, "d", n_dest, 6, seed % 4 == 0);
    rig_side(r, 0, source, 0, n_source);
    rig_side(r, 1, dest, n_source, n_dest);
    mem_free(source);
    mem_free(dest);
}

/* Versions 1 to 3, all of whose elements land; they share an epoch, and so their connections. Bytes between domains. */
static inline uint64_t rig_three_versions(struct rig *r)
{
    uint64_t moved = 0;
    for (uint64_t version = 1; version <= 3; version++) {
        r->version = version;
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
        free(rig_refit(r, WIRE_VERIFY_FULL));
        ck_assert_uint_eq(rig_wrong(r, rig_target(r), version), 0);
        ck_assert_uint_eq(r->progress.network_bytes, plan_totals(r->plan)->network_bytes);
        moved += r->progress.network_bytes;
    }
    return moved;
}

static inline struct wire_stats rig_stats(struct rig *r)
{
    struct wire_stats s;
    rig_expect(r, rig_send(r, WIRE_STATS, 0, NULL, 0, NULL, 0, NULL, 0), WIRE_COUNTED);
    ck_assert_uint_eq(r->packet->header.body_bytes, sizeof(s));
    memcpy(&s, r->packet->body, sizeof(s));
    return s;
}

/* More exact than poll: for an instant in the middle of a transfer, whichever that is. */
static inline void rig_pause_us(uint64_t us)
{
    struct pollfd none;
    (void)poll(&none, 0, (int)(us / 1000));
    uint64_t until = clock_mono_ns() + us % 1000 * 1000;
    while (clock_mono_ns() < until)
        ;
}

/* Aborts after so long: nothing lands any more, whatever becomes of the sources, and the next attempt is clean. Opens and closes
 * the rig. False: it had landed whole before. */
static inline bool rig_cut(struct rig *r, uint64_t after_us)
{
    rig_open(r);
    rig_fill_sources(r, 1);
    rig_prepare(r, WIRE_VERIFY_FULL);
    (void)rig_send_start(r);
    rig_pause_us(after_us);
    rig_abort(r);
    bool cut = r->progress.total_bytes == 0 || r->progress.done_bytes < r->progress.total_bytes;
    uint64_t sum = rig_checksum(r);
    rig_fill_sources(r, 2);
    rig_pause_us(2000);
    rig_fill_sources(r, 1);
    ck_assert_uint_eq(rig_checksum(r), sum);

    r->version = 2;
    rig_fill_sources(r, 2);
    rig_poison_destinations(r);
    free(rig_refit(r, WIRE_VERIFY_FULL));
    ck_assert_uint_eq(rig_wrong(r, rig_target(r), 2), 0);
    rig_close(r);
    return cut;
}

/* One run of a rig that was set up, as a process, with the n-th allocation failing: every request is answered, or the process
 * has gone in good order. then_apply: a destination applies what it has, too. False: nothing failed. */
static inline bool rig_runs_out(struct rig *r, long n, bool then_apply)
{
    r->o.process = true;
    r->o.shadow = true;
    r->o.fail_at = n;
    r->o.lenient = true;
    rig_open(r);
    rig_fill_sources(r, 1);
    bool failed = r->refused;
    for (int attempt = 0; attempt < 2 && !r->gone; attempt++) {
        r->attempt++;
        if (rig_try(r, rig_send_prepare(r, WIRE_VERIFY_FULL, NULL)) == WIRE_PREPARED &&
            rig_try(r, rig_send_start(r)) == WIRE_STAGED) {
            ck_assert_uint_eq(rig_wrong(r, WIRE_SHADOW, 1), 0);
            break;
        }
        failed = true;
        (void)rig_try(r, rig_send(r, WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0));
    }
    if (!r->gone && then_apply)
        (void)rig_try(r,
                      rig_send(r, WIRE_APPLY, rig_worker(r, 1, 0)->id, NULL, 0, NULL, 0, NULL, 0));
    failed = failed || r->gone || r->packet->header.code != 0;
    int status = rig_end(r, !r->gone);
    ck_assert_msg(status == EXIT_SUCCESS || (r->gone && status == EXIT_FAILURE), "status %d",
                  status);
    rig_free(r);
    return failed;
}

#endif
