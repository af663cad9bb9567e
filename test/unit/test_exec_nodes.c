/* Refits across nodes: what lands, and what is held already and left alone. */
#include "exec/skips.h"
#include "test/lib/rig_nodes.h"

/* --- what lands --- */

START_TEST(every_element_lands_across_nodes_and_connections_serve_all_versions)
{
    uint64_t network = 0;
    for (uint64_t seed = 1; seed <= 24; seed++) {
        struct cluster c;
        random_cluster(&c, seed);
        cluster_open(&c);
        uint64_t expected = 0, connected = 0;
        for (uint64_t version = 1; version <= 3; version++) {
            refit(&c, version, (enum wire_verify)(seed % 3));
            expected += plan_totals(c.n[0].plan)->network_bytes;
            struct wire_stats s = stats_of_all(&c);
            ck_assert_uint_eq(s.network_received_bytes, expected);
            ck_assert_uint_eq(s.network_sent_bytes, expected);
            ck_assert_uint_eq(s.refused, 0);
            ck_assert_uint_eq(s.stale_frames, 0);
            if (version > 1)
                ck_assert_uint_eq(s.connected, connected);
            connected = s.connected;
        }
        network += expected;
        cluster_close(&c);
    }
    ck_assert_uint_gt(network, 1 << 20);
}
END_TEST

START_TEST(every_element_lands_across_nodes_under_delays_and_poison)
{
    for (uint64_t seed = 100; seed < 108; seed++) {
        struct cluster c;
        random_cluster(&c, seed);
        cluster_foreach(&c, r)
        {
            r->o.hello.host_seed = seed;
            r->o.hello.host_max_delay_us = 100;
        }
        cluster_open(&c);
        refit(&c, 1, WIRE_VERIFY_FULL);
        refit(&c, 2, WIRE_VERIFY_FULL);
        cluster_close(&c);
    }
}
END_TEST

/* One source, two domains that need all of it: half of what each takes comes from the other. */
START_TEST(a_relay_sends_on_from_its_destination_memory)
{
    struct cluster c;
    plain_cluster(&c, 1, 2, "Replicate", 256);
    cluster_open(&c);
    uint64_t all = 256 * (64 * 4 + 24 * 2);
    ck_assert_uint_ge(plan_totals(c.n[0].plan)->max_relay_depth, 1);
    for (uint64_t version = 1; version <= 2; version++) {
        refit(&c, version, WIRE_VERIFY_FULL);
        struct wire_stats s = rig_stats(&c.n[0]), b = rig_stats(&c.n[1]), d = rig_stats(&c.n[2]);
        ck_assert_uint_eq(b.network_received_bytes, version * all);
        ck_assert_uint_eq(d.network_received_bytes, version * all);
        ck_assert_uint_gt(b.network_sent_bytes + d.network_sent_bytes, 0);
        ck_assert_uint_eq(s.network_sent_bytes + b.network_sent_bytes + d.network_sent_bytes,
                          2 * version * all);
    }
    cluster_close(&c);
}
END_TEST

/* --- what is held already --- */

/* What node i's PREPARE tells of the others: all of their records, its own too. */
static void tell_skips(struct cluster *c, uint8_t *const *held)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        c->n[i].skips.n_bytes = 0;
        for (uint32_t k = 0; k < c->n_nodes; k++)
            ck_assert_int_eq(skips_encode(&c->n[k].program, held[k], &c->n[i].skips), 0);
    }
}

static void free_held(struct cluster *c, uint8_t **held)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        free(held[i]);
        c->n[i].skips.n_bytes = 0;
    }
}

START_TEST(random_held_cells_of_all_nodes_are_left_alone_at_both_ends)
{
    uint64_t saved = 0;
    for (uint64_t seed = 300; seed < 324; seed++) {
        struct cluster c;
        uint64_t requests[MAX_NODES], state = seed;
        uint8_t *held[MAX_NODES];
        random_cluster(&c, seed);
        cluster_open(&c);
        refit(&c, 1, WIRE_VERIFY_FULL);
        uint64_t before = stats_of_all(&c).network_received_bytes;
        for (uint32_t i = 0; i < c.n_nodes; i++) {
            held[i] = malloc(c.n[i].program.n_holds + 1);
            for (uint32_t k = 0; k < c.n[i].program.n_holds; k++)
                held[i][k] = random_next(&state) % 4 != 0;
        }
        tell_skips(&c, held);
        prepare_all(&c, WIRE_VERIFY_FULL, held);
        start_all(&c, requests);
        finish_all(&c, requests, true);
        ck_assert_uint_eq(wrong_at(&c, 1), 0);
        uint64_t moved = stats_of_all(&c).network_received_bytes - before;
        ck_assert_uint_le(moved, before);
        saved += before - moved;
        /* All of it held: nothing moves. */
        for (uint32_t i = 0; i < c.n_nodes; i++)
            memset(held[i], 1, c.n[i].program.n_holds);
        tell_skips(&c, held);
        prepare_all(&c, WIRE_VERIFY_FULL, held);
        start_all(&c, requests);
        finish_all(&c, requests, true);
        if (c.n[0].o.plan.strategy != PLAN_GATHER_BROADCAST) /* which passes through scratch */
            ck_assert_uint_eq(stats_of_all(&c).network_received_bytes, before + moved);
        free_held(&c, held);
        refit(&c, 2, WIRE_VERIFY_FULL);
        cluster_close(&c);
    }
    ck_assert_uint_gt(saved, 50000);
}
END_TEST

/* By QUIESCED's table, what of each hold has been read back; counts those, and of destinations those that are missing. Where
 * it had staged already there is no table: nothing. */
static uint8_t *read_back(struct rig *r, uint64_t *n_read, uint64_t *n_missing)
{
    const void *data;
    size_t bytes, n = r->program.n_holds;
    struct wire_quiesced q;
    uint8_t *held = calloc(1, n + 1);
    if (r->packet->n_fds == 0)
        return held;
    ck_assert_uint_eq(r->packet->header.body_bytes, sizeof(q));
    memcpy(&q, r->packet->body, sizeof(q));
    ck_assert_uint_eq(q.n_holds, n);
    ck_assert_int_eq(wire_map_fd(r->packet->fds[0], &data, &bytes, NULL), 0);
    ck_assert_uint_eq(bytes, n * 9);
    const uint64_t *prints = data;
    const uint8_t *landed = (const uint8_t *)data + n * 8;
    for (size_t k = 0; k < n; k++) {
        bool dest = r->program.places[program_hold(&r->program, (uint32_t)k).place].side ==
                    PROGRAM_DESTINATION;
        held[k] = landed[k] == WIRE_READ;
        ck_assert_int_eq(prints[k] != 0, held[k]);
        *n_read += held[k];
        *n_missing += dest && landed[k] == WIRE_MISSING;
    }
    wire_unmap(data, bytes);
    return held;
}

/* Aborts once node 1 has got a quarter. Whether something had been read back then, and something was missing: on a busy machine
 * it may be too early or too late. */
static bool aborted_in_the_middle(struct cluster *c, uint8_t **ret_held)
{
    uint64_t requests[MAX_NODES], n_read = 0, n_missing = 0;
    const struct wire_progress *p = &c->n[1].progress;
    prepare_all(c, WIRE_VERIFY_FULL, NULL);
    start_all(c, requests);
    while (p->total_bytes == 0 || p->done_bytes < p->total_bytes / 4) {
        ck_assert(rig_receive(&c->n[1], 20000));
        ck_assert(c->n[1].packet->header.type == WIRE_PROGRESS ||
                  c->n[1].packet->header.type == WIRE_STAGED);
        rig_take_progress(&c->n[1]);
    }
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        rig_abort(&c->n[i]);
        ret_held[i] = read_back(&c->n[i], &n_read, &n_missing);
    }
    return n_read > 0 && n_missing > 0;
}

/* Bytes of destination holds that are not held. */
static uint64_t missing_bytes(const struct rig *r, const uint8_t *held)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < r->program.n_holds; i++)
        if (r->program.places[program_hold(&r->program, i).place].side == PROGRAM_DESTINATION &&
            held[i] == 0)
            bytes += program_cell_bytes(&r->program, program_hold(&r->program, i).cell);
    return bytes;
}

/* Aborted in the middle; the retry is told what each node had read back, and moves the rest. */
START_TEST(a_retry_moves_only_what_is_still_missing)
{
    struct cluster c;
    uint64_t requests[3], version = 1;
    uint8_t *held[MAX_NODES];
    plain_cluster(&c, 1, 2, "Shard(1)", 512);
    cluster_foreach(&c, r)
    {
        r->o.hello.network_bytes_per_s = 250e3;
        r->o.plan.least_piece_bytes = 4096;
    }
    cluster_open(&c);
    for (new_version(&c, version); !aborted_in_the_middle(&c, held); new_version(&c, ++version))
        free_held(&c, held);
    uint64_t before = stats_of_all(&c).network_received_bytes;
    tell_skips(&c, held);
    prepare_all(&c, WIRE_VERIFY_FULL, held);
    start_all(&c, requests);
    finish_all(&c, requests, true);
    ck_assert_uint_eq(wrong_at(&c, version), 0);
    uint64_t missing = 0, moved = stats_of_all(&c).network_received_bytes - before;
    cluster_foreach(&c, r)
    {
        missing += missing_bytes(r, held[r - c.n]);
        ck_assert_uint_eq(r->progress.total_bytes, missing_bytes(r, held[r - c.n]));
    }
    ck_assert_uint_eq(moved, missing);
    free_held(&c, held);
    cluster_close(&c);
}
END_TEST

/* The sender was not told: its messages are others than the receiver waits for. */
START_TEST(nodes_that_were_told_differently_fail_and_nothing_lands_where_it_should_not)
{
    struct cluster c;
    uint64_t requests[2];
    uint8_t *held[MAX_NODES];
    plain_cluster(&c, 1, 1, "Replicate", 512);
    c.n[0].o.plan.chunk_bytes = c.n[1].o.plan.chunk_bytes = 4096;
    cluster_open(&c);
    refit(&c, 1, WIRE_VERIFY_FULL);
    for (uint32_t i = 0; i < 2; i++)
        held[i] = calloc(1, c.n[i].program.n_holds + 1);
    for (uint32_t k = 0; k < c.n[1].program.n_holds; k += 2)
        held[1][k] = 1;
    prepare_all(&c, WIRE_VERIFY_OFF, held);
    start_all(&c, requests);
    ck_assert_uint_eq(end_of(&c.n[1], requests[1]), WIRE_FAILED);
    ck_assert_int_eq(c.n[1].packet->header.code, RS_EPROTO);
    abort_all(&c);
    ck_assert_uint_eq(wrong_at(&c, 1), 0); /* the same version: what has landed is right */
    /* A blob that is none. */
    next_attempt(&c);
    buf_put_u32(&c.n[0].skips, 7);
    rig_expect(&c.n[0], rig_send_prepare(&c.n[0], WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
    ck_assert_int_eq(c.n[0].packet->header.code, RS_EPROTO);
    free_held(&c, held);
    refit(&c, 2, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_element_lands_across_nodes_and_connections_serve_all_versions)                         \
    X(every_element_lands_across_nodes_under_delays_and_poison)                                    \
    X(a_relay_sends_on_from_its_destination_memory)                                                \
    X(random_held_cells_of_all_nodes_are_left_alone_at_both_ends)                                  \
    X(a_retry_moves_only_what_is_still_missing)                                                    \
    X(nodes_that_were_told_differently_fail_and_nothing_lands_where_it_should_not)
#include "test/lib/main.h"
