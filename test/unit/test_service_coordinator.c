/* What the coordinator tells its nodes in answer to what they report: attempts, who watches
 * them, nodes that fall silent and come back, and what is believed of their memory then. */
#include "service/held.h"
#include "test/lib/coordinator_bed.h"

START_TEST(both_nodes_get_the_same_input_and_each_the_way_to_the_other)
{
    world_open();
    (void)until_started();
    const struct got *a = NULL, *b = NULL;
    for (unsigned i = 0; i < w.n_orders; i++)
        if (w.orders[i].o.type == NODE_ORDER_PREPARE)
            *(w.orders[i].node == TRAINER ? &a : &b) = &w.orders[i];
    ck_assert_mem_eq(a->o.plan_digest, b->o.plan_digest, 16);
    ck_assert_mem_eq(a->o.input_digests, b->o.input_digests, sizeof a->o.input_digests);
    ck_assert_uint_eq(a->n_participants, 4);
    ck_assert_uint_eq(a->o.data_plane, 90 + TRAINER);
    ck_assert_uint_eq(b->o.data_plane, 90 + ROLLOUT);
    ck_assert_uint_eq(a->peer.node, ROLLOUT);
    ck_assert_str_eq(a->peer.address, "192.0.2.2");
    ck_assert_uint_eq(a->peer.port, 7000 + ROLLOUT);
    ck_assert_str_eq(b->peer.address, "192.0.2.1");
    ck_assert_mem_eq(a->peer.token, b->peer.token, NODE_TOKEN_BYTES);
    static const uint8_t zero[NODE_TOKEN_BYTES];
    ck_assert_mem_ne(a->peer.token, zero, sizeof zero);
    world_close();
}
END_TEST

static int row_find(const struct ledger_record *row, void *arg)
{
    return row->kind != LEDGER_VERSION
               ? 0
               : held_load(arg, row->version.version, row->version.fingerprints,
                           row->version.n_fingerprints_bytes);
}

START_TEST(what_all_nodes_staged_commits_and_the_ledger_keeps_what_memory_holds)
{
    struct err e = {0};
    struct held_store *held = held_new();
    world_open();
    uint64_t attempt = until_started();
    cells_say(ROLLOUT, attempt, 5);
    staged_say(attempt);
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    until_phase(1, REFIT_COMMITTED);
    for (uint32_t node = TRAINER; node <= ROLLOUT; node++) {
        ck_assert_int_eq(expect(node, NODE_ORDER_END)->o.code, 0);
        while (expect(node, NODE_ORDER_COMMITTED)->o.version !=
               1) /* 0 when the model was announced */
            ;
    }
    const struct got *worker = expect(ROLLOUT, NODE_ORDER_WORKER);
    ck_assert_uint_eq(worker->o.held, 1);
    ck_assert_uint_eq(worker->o.applied, 0);
    ck_assert(w.submitted && w.submit_code == 0);
    const uint8_t *digest = w.destination->layout->digest;
    ck_assert_int_eq(ledger_versions(w.service->ledger, "m", 1, 1, row_find, held, &e), 0);
    ck_assert(held_is(held, 1, digest, 0, 900) && held_is(held, 1, digest, 1, 901));
    ck_assert(!held_is(held, 1, digest, 0, 901));
    world_close();
    held_free(held);
}
END_TEST

static void landed_say(uint64_t attempt, uint64_t landed)
{
    struct node_report r = event_of(REFIT_EV_PROGRESS);
    r.event.node.attempt = attempt;
    r.event.node.text = "";
    r.event.node.bytes.landed = landed;
    coordinator_report(w.c, ROLLOUT, &r);
}

static uint64_t landed_seen;

static void on_watched(struct watcher *x, int code, const char *text)
{
    const struct refit *r = x->decider->refit;
    (void)text;
    ck_assert_int_eq(code, 0);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].node == ROLLOUT)
            landed_seen = r->nodes[i].bytes.landed;
}

/* Who watches is not told of each step, but always of the last, though nothing follows. */
START_TEST(a_watcher_hears_of_the_last_bytes_that_landed)
{
    struct watcher x = {.changed = on_watched};
    struct err e = {0};
    world_open();
    uint64_t attempt = until_started();
    ck_assert_int_eq(op_watch_refit(w.service, "m", 1, &x, &e), 0);
    landed_seen = 0;
    for (uint64_t landed = 1; landed <= 100; landed++)
        landed_say(attempt, landed);
    while (landed_seen < 100) {
        int wait_ms = uv_backend_timeout(&w.loop);
        ck_assert_msg(0 <= wait_ms && wait_ms <= 101, "nobody is told within %d ms", wait_ms);
        (void)uv_run(&w.loop, UV_RUN_ONCE);
    }
    landed_say(attempt, 101);
    landed_say(attempt, 102); /* and this one is due when the attempt has ended */
    struct node_report r = event_of(REFIT_EV_FAILED);
    r.event.node.attempt = attempt;
    r.event.node.code = RS_EUNAVAIL;
    r.event.node.text = "it went away";
    coordinator_report(w.c, ROLLOUT, &r);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    ck_assert(!uv_is_active((uv_handle_t *)&decider_find(w.c, "m")->progress));
    watcher_close(&x);
    world_close();
}
END_TEST

START_TEST(a_silent_node_ends_the_attempt_only_when_nothing_of_it_moves)
{
    world_open();
    uint64_t attempt = until_started();
    w.deaf[ROLLOUT] = true;
    coordinator_node_silent(w.c, ROLLOUT, "its stream broke");
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    for (unsigned i = 0; i < 20; i++)
        (void)uv_run(&w.loop, UV_RUN_NOWAIT);
    ck_assert_int_eq(version_of(1)->phase.state, REFIT_ABORTING);
    coordinator_node_gone(w.c, ROLLOUT, true, "its lease is over");
    until_phase(1, REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(version_of(1)->reason, "n2"));
    world_close();
}
END_TEST

START_TEST(a_node_that_comes_back_without_a_worker_has_lost_it_and_keeps_the_others)
{
    world_open();
    (void)until_started();
    const struct decider *d = decider_find(w.c, "m");
    w.deaf[ROLLOUT] = true;
    coordinator_node_silent(w.c, ROLLOUT, "its stream broke");
    coordinator_node_gone(w.c, ROLLOUT, false, "it joins anew");
    w.deaf[ROLLOUT] = false;
    struct node_report again = attached_of(ROLLOUT, 1);
    again.event.attached.tells_memory = true;
    coordinator_report(w.c, ROLLOUT, &again);
    const struct got *g;
    do
        g = expect(ROLLOUT, NODE_ORDER_REPLY);
    while (g->o.cookie != again.event.cookie || g < &w.orders[8]);
    ck_assert_int_eq(g->o.code, 0);
    node_comes(ROLLOUT);
    ck_assert_ptr_null(roster_find(d, 100 * ROLLOUT));
    ck_assert_ptr_nonnull(roster_find(d, 100 * ROLLOUT + 1));
    ck_assert(!refit_find_worker(d->refit, 100 * ROLLOUT + 1)->gone);
    const struct refit_worker *lost = refit_find_worker(d->refit, 100 * ROLLOUT);
    ck_assert(lost == NULL || lost->gone);
    world_close();
}
END_TEST

/* Its process is there all the same, and may go on: what its peers have published is not given up. */
START_TEST(a_source_whose_daemon_was_restarted_does_not_end_the_push_of_its_peers)
{
    world_open();
    for (uint32_t node = TRAINER; node <= ROLLOUT; node++)
        node_comes(node);
    attach(TRAINER, 0);
    attach(TRAINER, 1);
    push(0, 1);
    push(1, 1);
    const struct decider *d = decider_find(w.c, "m");
    ck_assert_uint_eq(refit_find_worker(d->refit, 100 * TRAINER + 1)->push, 1);
    coordinator_node_gone(w.c, TRAINER, false, "its daemon was started anew");
    struct node_report again = attached_of(TRAINER, 1);
    again.event.attached.tells_memory = true;
    coordinator_report(w.c, TRAINER, &again);
    node_comes(TRAINER);
    ck_assert_ptr_null(roster_find(d, 100 * TRAINER));
    const struct refit_worker *peer = refit_find_worker(d->refit, 100 * TRAINER + 1);
    ck_assert(peer->published == 1 && !peer->withdrawn && !peer->released);
    world_close();
}
END_TEST

START_TEST(a_withdrawal_that_comes_within_a_step_keeps_its_reason)
{
    char reason[] = "its options are wrong";
    world_open();
    for (uint32_t node = TRAINER; node <= ROLLOUT; node++)
        node_comes(node);
    attach(TRAINER, 0);
    attach(TRAINER, 1);
    push(1, 1);
    struct decider *d = decider_find(w.c, "m");
    struct refit_event ev = {
        .type = REFIT_EV_WITHDRAW,
        .withdraw = {.worker = 100 * TRAINER, .version = 1, .push = 1, .reason = reason}};
    d->stepping = true;
    ck_assert_int_eq(decider_event(d, &ev), 0);
    d->stepping = false;
    memset(reason, 'x', sizeof reason - 1); /* it was the call's */
    ev = (struct refit_event){.type = REFIT_EV_TICK};
    ck_assert_int_eq(decider_event(d, &ev), 0);
    const struct got *g = expect(TRAINER, NODE_ORDER_TELL);
    ck_assert_int_eq((int)g->o.tell, REFIT_TELL_WITHDRAWN);
    ck_assert_msg(strstr(g->text, "its options are wrong") != NULL, "%s", g->text);
    world_close();
}
END_TEST

/* The answer to a wake is lost with the session: the node has not got the new worker, and tells of the sleeper. */
START_TEST(a_sleeper_whose_wake_nobody_heard_of_sleeps_on)
{
    world_open();
    (void)until_started();
    const struct decider *d = decider_find(w.c, "m");
    struct node_report slept = event_of(REFIT_EV_SLEPT), woken = attached_of(ROLLOUT, 1);
    slept.event.left.worker = 100 * ROLLOUT + 1;
    coordinator_report(w.c, ROLLOUT, &slept);
    say(TRAINER, REFIT_EV_QUIESCED, version_of(1)->attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, version_of(1)->attempt);
    until_phase(1, REFIT_ABORTED);
    w.deaf[ROLLOUT] = true;
    woken.event.attached.worker = 250;
    coordinator_report(w.c, ROLLOUT, &woken);
    ck_assert(!refit_find_worker(d->refit, 250)->gone);
    coordinator_node_silent(w.c, ROLLOUT, "its stream broke");
    coordinator_node_gone(w.c, ROLLOUT, false, "it joins anew");
    w.deaf[ROLLOUT] = false;
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct node_report again = attached_of(ROLLOUT, rank);
        again.event.cookie = 7000 + rank;
        again.event.attached.tells_memory = true;
        again.event.attached.asleep = rank == 1;
        coordinator_report(w.c, ROLLOUT, &again);
        const struct got *g;
        do
            g = expect(ROLLOUT, NODE_ORDER_REPLY);
        while (g->o.cookie != again.event.cookie);
        ck_assert_msg(g->o.code == 0, "%s", g->text);
    }
    node_comes(ROLLOUT);
    const struct refit_worker *sleeper = refit_find_worker(d->refit, 100 * ROLLOUT + 1);
    ck_assert(sleeper != NULL && !sleeper->gone && sleeper->asleep);
    ck_assert_ptr_null(refit_find_worker(d->refit, 250));
    ck_assert_ptr_null(roster_find(d, 250));
    world_close();
}
END_TEST

/* A new lease of that rank, whose node says: it got version 1 whole, and heard of no commit. What is believed of it. */
static uint64_t held_after_claim(uint32_t rank, uint64_t fold)
{
    const struct decider *d = decider_find(w.c, "m");
    struct node_report left = event_of(REFIT_EV_LEFT), r = attached_of(ROLLOUT, rank);
    left.event.left.worker = 100 * ROLLOUT + rank;
    left.event.left.reason = "its process ended";
    coordinator_report(w.c, ROLLOUT, &left);
    r.event.cookie = 7000 + rank;
    r.event.attached.worker = 100 * ROLLOUT + 50 + rank;
    r.event.attached.uncommitted = 1;
    r.event.attached.uncommitted_content = version_of(1)->publication;
    r.shadow_fold = fold;
    coordinator_report(w.c, ROLLOUT, &r);
    while (expect(ROLLOUT, NODE_ORDER_REPLY)->o.cookie != r.event.cookie)
        ;
    return refit_find_worker(d->refit, r.event.attached.worker)->held;
}

START_TEST(what_a_node_holds_whole_is_taken_for_a_committed_version_only_by_its_fold)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(ROLLOUT, attempt, 5);
    staged_say(attempt);
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    until_phase(1, REFIT_COMMITTED);
    ck_assert_uint_eq(held_after_claim(0, 900), 1); /* as staged_say told */
    ck_assert_uint_eq(held_after_claim(1, 900), 0); /* of another rank: wrong bytes, here */
    world_close();
}
END_TEST

/* Its node joins again and says the same of a worker that is known to hold version 1; `proven`: as that is known. */
static const struct refit_worker *told_again(uint32_t rank, bool proven, uint64_t fold,
                                             bool as_shadow)
{
    const struct decider *d = decider_find(w.c, "m");
    struct refit_worker *worker = refit_find_worker(d->refit, 100 * ROLLOUT + rank);
    struct node_report r = attached_of(ROLLOUT, rank);
    ck_assert(worker->held == 1 && worker->proven);
    worker->proven = proven; /* false: as a catch-up leaves it that ends before it is compared */
    r.event.cookie = 7000 + 100 * fold + rank;
    r.event.attached.tells_memory = true;
    r.event.attached.shadow = as_shadow ? 1 : 0;
    r.event.attached.uncommitted = as_shadow ? 0 : 1;
    r.event.attached.uncommitted_content = as_shadow ? 0 : version_of(1)->publication;
    r.shadow_fold = fold;
    coordinator_report(w.c, ROLLOUT, &r);
    while (expect(ROLLOUT, NODE_ORDER_REPLY)->o.cookie != r.event.cookie)
        ;
    return worker;
}

START_TEST(what_was_never_compared_is_compared_when_its_node_tells_of_it_again)
{
    for (int as_shadow = 0; as_shadow < 2; as_shadow++) {
        world_open();
        uint64_t attempt = until_started();
        cells_say(ROLLOUT, attempt, 5);
        staged_say(attempt);
        cells_say(TRAINER, attempt, 5);
        say(TRAINER, REFIT_EV_STAGED, attempt);
        until_phase(1, REFIT_COMMITTED);
        ck_assert_uint_eq(told_again(0, true, 4, as_shadow)->held, 1); /* known anyway */
        ck_assert_uint_eq(told_again(0, false, 900, as_shadow)->held, 1);
        ck_assert(told_again(0, false, 900, as_shadow)->proven);
        ck_assert_uint_eq(told_again(1, false, 900, as_shadow)->held, 0);
        world_close();
    }
}
END_TEST

START_TEST(workers_of_other_nodes_cells_of_other_plans_and_layouts_unheard_of_are_refused)
{
    world_open();
    uint64_t attempt = until_started();
    struct node_report r = event_of(REFIT_EV_READY);
    r.event.cookie = 9;
    r.event.ready.worker = 100 * ROLLOUT;
    r.event.ready.version = 1;
    coordinator_report(w.c, TRAINER, &r); /* not its worker */
    const struct got *g = expect(TRAINER, NODE_ORDER_REPLY);
    ck_assert_uint_eq(g->o.cookie, 9);
    ck_assert_int_eq(g->o.code, RS_ENOTFOUND);
    r = attached_of(TRAINER, 0);
    r.event.cookie = 10;
    r.event.attached.worker = 5;
    r.layout[0] ^= 1;
    coordinator_report(w.c, TRAINER, &r);
    g = expect(TRAINER, NODE_ORDER_REPLY);
    ck_assert_uint_eq(g->o.cookie, 10);
    ck_assert_int_eq(g->o.code, RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(g->text, "PutLayout"));
    const struct cell_print far = {.cell = UINT64_MAX};
    struct node_report cells = {
        .type = NODE_REPORT_CELLS, .model = "m", .attempt = attempt, .cells = &far, .n_cells = 1};
    coordinator_report(w.c, ROLLOUT, &cells);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    ck_assert_ptr_nonnull(strstr(version_of(1)->reason, "cells that the plan has not"));
    world_close();
}
END_TEST

START_TEST(who_asked_before_its_node_fell_silent_gets_no_answer_in_the_next_session)
{
    world_open();
    (void)until_started();
    unsigned before = count(ROLLOUT, NODE_ORDER_REPLY);
    struct node_report r = event_of(REFIT_EV_APPLY);
    r.event.cookie = 9;
    r.event.apply.worker = 100 * ROLLOUT;
    r.event.apply.version = 1;
    r.event.apply.skip = true;
    coordinator_report(w.c, ROLLOUT, &r);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_REPLY), before + 1);
    /* Submit's answer waits for the ledger; a node's Apply waits likewise for APPLIED. Here: nothing is left behind. */
    coordinator_node_silent(w.c, ROLLOUT, "its stream broke");
    ck_assert(queue_empty(&w.c->asked));
    world_close();
}
END_TEST

#define TESTS(X)                                                                                   \
    X(both_nodes_get_the_same_input_and_each_the_way_to_the_other)                                 \
    X(what_all_nodes_staged_commits_and_the_ledger_keeps_what_memory_holds)                        \
    X(a_watcher_hears_of_the_last_bytes_that_landed)                                               \
    X(a_silent_node_ends_the_attempt_only_when_nothing_of_it_moves)                                \
    X(a_node_that_comes_back_without_a_worker_has_lost_it_and_keeps_the_others)                    \
    X(a_source_whose_daemon_was_restarted_does_not_end_the_push_of_its_peers)                      \
    X(a_withdrawal_that_comes_within_a_step_keeps_its_reason)                                      \
    X(a_sleeper_whose_wake_nobody_heard_of_sleeps_on)                                              \
    X(what_a_node_holds_whole_is_taken_for_a_committed_version_only_by_its_fold)                   \
    X(what_was_never_compared_is_compared_when_its_node_tells_of_it_again)                         \
    X(workers_of_other_nodes_cells_of_other_plans_and_layouts_unheard_of_are_refused)              \
    X(who_asked_before_its_node_fell_silent_gets_no_answer_in_the_next_session)

#include "test/lib/main.h"
