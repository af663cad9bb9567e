/* The decider and many nodes: silent, lost, back, drained; retries that move only what is missing; newcomers that catch
 * up; rehearsals. Cases of public fault reports are named at their tests. */
#include "refit/refit.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "test/unit/test_refit_bed.h"

static void silent(struct bed *b, uint32_t node)
{
    step(b, (struct refit_event){.type = REFIT_EV_NODE_SILENT, .node = {.node = node}});
}

static void lost(struct bed *b, uint32_t node, bool expelled)
{
    step(b, (struct refit_event){.type = REFIT_EV_NODE_LOST,
                                 .node = {.node = node, .expelled = expelled}});
}

static uint64_t drain(struct bed *b, uint32_t node, bool on)
{
    uint64_t cookie = ++b->next_cookie;
    step(b, (struct refit_event){
                .type = REFIT_EV_DRAIN, .cookie = cookie, .drain = {.node = node, .on = on}});
    return cookie;
}

/* What a node that has joined again tells of a worker that is known. */
static void tells(struct bed *b, uint64_t worker, uint64_t uncommitted, uint64_t content)
{
    const struct refit_worker *w = refit_find_worker(b->r, worker);
    step(b, (struct refit_event){.type = REFIT_EV_ATTACHED,
                                 .cookie = ++b->next_cookie,
                                 .attached = {.worker = worker,
                                              .node = w->node,
                                              .side = REFIT_DESTINATION,
                                              .layout_name = "rollout",
                                              .rank = w->rank,
                                              .receive = w->receive,
                                              .uncommitted = uncommitted,
                                              .uncommitted_content = content,
                                              .torn = uncommitted == 0,
                                              .tells_memory = true}});
}

static const struct refit_worker *worker(const struct bed *b, uint64_t id)
{
    return refit_find_worker(b->r, id);
}

static const struct refit_action *did_on(const struct bed *b, enum refit_action_type type,
                                         uint32_t node)
{
    for (size_t i = b->from; i < b->n_seen; i++)
        if (b->seen[i].a.type == type && b->seen[i].a.node == node)
            return &b->seen[i].a;
    return NULL;
}

static const char *reason(const struct bed *b, uint64_t version)
{
    return refit_find_version(b->r, version)->reason;
}

/* --- silent, lost, expelled --- */

START_TEST(what_a_silent_node_takes_part_in_ends_only_when_it_is_surely_lost)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    silent(&b, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    node_event(&b, REFIT_EV_QUIESCED, 0);
    (void)submit(&b, 2, "b", 1);
    publish_all(&b, 2);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING); /* its data plane may still write */
    tick(&b, 3000);
    ck_assert_ptr_nonnull(did_on(&b, REFIT_DO_EXPEL, 1));
    ck_assert_ptr_null(did_on(&b, REFIT_DO_EXPEL, 0));
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    lost(&b, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_uint_eq(b.r->in_flight->version, 2);
    bed_close(&b);
}
END_TEST

START_TEST(a_node_that_falls_silent_ends_the_attempt_in_each_phase_until_all_is_staged)
{
    static const enum refit_phase in[] = {REFIT_SUBMITTED, REFIT_PLANNED, REFIT_PREPARED,
                                          REFIT_TRANSFERRING};
    for (int by_loss = 0; by_loss < 2; by_loss++)
        for (size_t i = 0; i < 4; i++) {
            struct bed b;
            usual(&b, REFIT_IN_PLACE, true);
            (void)submit(&b, 1, "a", 1);
            publish_all(&b, 1); /* the plan is asked for: nodes have been chosen */
            if (in[i] >= REFIT_PLANNED)
                planned(&b);
            for (uint32_t n = 0; n < 2 && in[i] >= REFIT_PREPARED; n++)
                node_event(&b, REFIT_EV_PREPARED, n);
            for (uint64_t w = 11; w <= 12 && in[i] >= REFIT_TRANSFERRING; w++)
                ready(&b, w, 1);
            ck_assert_int_eq(phase(&b, 1), in[i]);
            if (by_loss == 1)
                lost(&b, 1, false);
            else
                silent(&b, 1);
            bool asked = in[i] >= REFIT_PLANNED;
            ck_assert_int_eq(phase(&b, 1), asked ? REFIT_ABORTING : REFIT_ABORTED);
            if (asked) {
                node_event(&b, REFIT_EV_QUIESCED, 0);
                ck_assert_int_eq(phase(&b, 1), by_loss == 1 ? REFIT_ABORTED : REFIT_ABORTING);
                lost(&b, 1, false);
            }
            ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
            bed_close(&b);
        }
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    (void)verdict(&b, 12, 1, true);
    silent(&b, 1);
    lost(&b, 1, false);
    ck_assert_int_eq(phase(&b, 1), REFIT_ACCEPTING); /* its bytes are there, and it has said yes */
    (void)verdict(&b, 11, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(an_expelled_node_that_had_still_to_accept_rejects)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    silent(&b, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_ACCEPTING);
    lost(&b, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    ck_assert_ptr_nonnull(strstr(reason(&b, 1), "node 1 was expelled"));
    bed_close(&b);
}
END_TEST

START_TEST(an_expelled_node_is_not_waited_for_where_the_policy_can_do_without)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    struct refit_policy policy = {.layout_name = (char *)(uintptr_t) "rollout", .min_instances = 1};
    uint8_t content[16] = {1};
    for (int expelled = 0; expelled < 2; expelled++) {
        lost(&b, 1, expelled == 1);
        struct refit_event ev =
            submit_event(1 + (uint64_t)expelled, expelled == 1 ? "b" : "a", content);
        ev.submit.policies = &policy;
        ev.submit.n_policies = 1;
        step(&b, ev);
        publish_all(&b, 1 + (uint64_t)expelled);
        ck_assert_int_eq(did(&b, REFIT_DO_PLAN) != NULL, expelled == 1); /* else it may come back */
        (void)abort_version(&b, 0);
    }
    bed_close(&b);
}
END_TEST

/* CASES B25: four daemons, number 2 is killed in the transfer and restarted. */
START_TEST(a_dead_node_is_done_without_and_comes_back_and_numbers_stay)
{
    struct bed b;
    bed_init(&b);
    layout(&b, REFIT_SOURCE, "train", 1, 1);
    layout(&b, REFIT_DESTINATION, "rollout", 3, 3);
    for (uint32_t n = 0; n < 4; n++)
        node_up(&b, n);
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    for (uint32_t n = 1; n < 4; n++)
        (void)attach(&b, (struct attach){10 + n, n, REFIT_DESTINATION, "rollout", n - 1,
                                         REFIT_STAGED_RECEIVE, true, 0, 0});
    struct refit_policy policy = {.layout_name = (char *)(uintptr_t) "rollout", .min_instances = 2};
    uint8_t content[16] = {1};
    struct refit_event ev = submit_event(1, "a", content);
    ev.submit.policies = &policy;
    ev.submit.n_policies = 1;
    step(&b, ev);
    publish(&b, 1, 1, 11);
    planned(&b);
    for (uint32_t n = 0; n < 4; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    uint64_t first_epoch = b.r->in_flight->epoch;
    silent(&b, 2);
    for (uint32_t n = 0; n < 4; n++)
        if (n != 2)
            node_event(&b, REFIT_EV_QUIESCED, n);
    lost(&b, 2, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED); /* again, by itself, in another epoch */
    planned(&b);
    ck_assert_uint_gt(b.r->in_flight->epoch, first_epoch);
    for (uint32_t n = 0; n < 4; n++)
        ck_assert_int_eq(did_on(&b, REFIT_DO_PREPARE, n) != NULL, n != 2);
    for (uint32_t n = 0; n < 4; n++)
        if (n != 2)
            node_event(&b, REFIT_EV_PREPARED, n);
    for (uint32_t n = 0; n < 4; n++)
        if (n != 2)
            node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    /* Its daemon is another: its worker is gone, another attaches; all take part in the next. */
    step(&b, (struct refit_event){.type = REFIT_EV_LEFT, .left = {12, false, "restarted"}});
    node_up(&b, 2);
    (void)attach(&b, (struct attach){22, 2, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    for (uint64_t w = 11; w <= 13; w += 2)
        (void)apply(&b, w, 1, true);
    (void)submit(&b, 2, "b", 1);
    publish(&b, 1, 2, 21);
    planned(&b);
    ck_assert_uint_eq(count(&b, REFIT_DO_PREPARE), 4);
    ck_assert_ptr_nonnull(did_on(&b, REFIT_DO_PREPARE, 2));
    ck_assert_uint_eq(worker(&b, 11)->rank, 0);
    ck_assert_uint_eq(worker(&b, 13)->rank, 2);
    bed_close(&b);
}
END_TEST

/* CASES E12: the end of an old registration comes after its successor's beginning. */
/* --- a data plane that does not start --- */

static void broken(struct bed *b, uint32_t node)
{
    step(b, (struct refit_event){.type = REFIT_EV_NODE_LOST,
                                 .node = {.node = node,
                                          .code = RS_EDEVICE,
                                          .text = "its data plane does not start: no GPU"}});
}

START_TEST(who_needs_a_node_that_does_not_start_is_told_at_once_and_goes_on_when_it_does)
{
    for (uint32_t node = 0; node < 2; node++) { /* the trainer's, the second instance's */
        struct bed b;
        usual(&b, REFIT_STAGED_RECEIVE, true);
        lost(&b, node, false); /* once is chance, and waited for */
        (void)submit(&b, 1, "a", 1);
        publish_all(&b, 1);
        ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED);
        broken(&b, node);
        ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
        ck_assert_ptr_nonnull(strstr(reason(&b, 1), node == 0 ? "node 0" : "node 1"));
        ck_assert_ptr_nonnull(strstr(reason(&b, 1), "does not start: no GPU"));
        ck_assert_ptr_nonnull(strstr(reason(&b, 1), node == 0 ? "train/rank 0" : "rollout/rank 1"));
        (void)submit(&b, 2, "b", 1);
        ck_assert_int_eq(phase(&b, 2), REFIT_ABORTED);
        ck_assert_str_eq(refit_node_lacks(&b.r->nodes[node]),
                         "its data plane does not start: no GPU");
        node_up(&b, node);
        ck_assert_str_eq(refit_node_lacks(&b.r->nodes[node]), "");
        to_accepting(&b, 3, "c");
        ck_assert_int_eq(phase(&b, 3), REFIT_COMMITTED);
        bed_close(&b);
    }
}
END_TEST

START_TEST(nobody_waits_for_a_node_that_does_not_start_where_the_policy_can_do_without)
{
    struct bed b;
    uint8_t content[16] = {2};
    char name[] = "rollout";
    struct refit_policy policy = {name, 1};
    usual(&b, REFIT_STAGED_RECEIVE, true);
    broken(&b, 1);
    struct refit_event ev = submit_event(1, "a", content);
    ev.submit.policies = &policy;
    ev.submit.n_policies = 1;
    step(&b, ev);
    publish_all(&b, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN)); /* not after the prepare deadline */
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

/* The coordinator was restarted meanwhile: nobody knows who is there. */
START_TEST(a_node_that_does_not_start_is_named_before_its_workers_are_known)
{
    struct bed b;
    bed_init(&b);
    b.r->config.n_nodes = 2;
    broken(&b, 1);
    (void)submit(&b, 1, "a", 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED);
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "node 1 (its data plane does not start"));
    broken(&b, 0); /* and there is no other */
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    bed_close(&b);
}
END_TEST

START_TEST(who_has_left_for_good_is_not_said_never_to_have_come)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    leave(&b, 12, true);
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    ck_assert_str_eq(waiting_for(&b, 1),
                     "rollout/rank 1 (has left for good, and nobody has attached in its place); ");
    (void)attach(&b, (struct attach){13, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
    bed_init(&b);
    layout(&b, REFIT_SOURCE, "train", 2, 1);
    node_up(&b, 0);
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    (void)submit(&b, 1, "a", 1);
    publish(&b, 1, 1, 5);
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "train/rank 1 (has not attached); "));
    bed_close(&b);
}
END_TEST

START_TEST(a_late_end_of_an_old_lease_leaves_the_new_one_alone)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    leave(&b, 12, false);
    (void)attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    leave(&b, 12, true);
    ck_assert(!worker(&b, 22)->gone);
    uint64_t again = attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1,
                                                REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, again), 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_member_that_knows_of_a_newer_commit_ends_what_is_below_it)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 5, "a");
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_UP, .node = {.node = 2, .committed = 9}});
    ck_assert_int_eq(phase(&b, 5), REFIT_ABORTING);
    ck_assert_ptr_nonnull(strstr(reason(&b, 5), "node 2 knows version 9"));
    ck_assert(refit_ledger_behind(b.r));
    quiesce(&b);
    uint64_t refused = submit(&b, 9, "b", 1);
    ck_assert_int_eq(code(&b, refused), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(answer(&b, refused)->text, "ledger is behind"));
    ck_assert_int_eq(code(&b, submit(&b, 10, "c", 1)), 0);
    bed_close(&b);
}
END_TEST

static void after_a_restart(struct bed *b)
{
    struct refit_config config;
    refit_config_default(&config);
    config.n_nodes = 2;
    config.settle_ms = 3500;
    refit_free(b->r);
    b->r = refit_new("m", &config);
    ck_assert_ptr_nonnull(b->r);
    struct ledger_record row = {
        .kind = LEDGER_MODEL, .model = "m", .as_model = {.committed = 3, .attempt = 8, .epoch = 2}};
    ck_assert_int_eq(refit_restore(b->r, &row, NULL), 0);
    step(b, (struct refit_event){.type = REFIT_EV_RESTORED});
    layout(b, REFIT_SOURCE, "train", 1, 1);
    layout(b, REFIT_DESTINATION, "rollout", 1, 1);
    node_up(b, 0);
    (void)attach(b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    (void)attach(b, (struct attach){11, 0, REFIT_DESTINATION, "rollout", 0, REFIT_STAGED_RECEIVE,
                                    true, 0, 0});
    (void)submit(b, 4, "a", 1);
    publish(b, 1, 4, 41);
}

START_TEST(after_a_restart_nothing_begins_before_all_nodes_have_joined_or_their_leases_are_over)
{
    for (int joins = 0; joins < 2; joins++) {
        struct bed b;
        bed_init(&b);
        after_a_restart(&b);
        ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
        ck_assert_str_eq(waiting_for(&b, 4),
                         "nodes that may still move bytes for the coordinator before this one; ");
        if (joins == 1)
            node_up(&b, 1);
        else
            tick(&b, 3500);
        ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
        bed_close(&b);
    }
}
END_TEST

START_TEST(orders_name_the_data_plane_that_is_meant)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_UP, .node = {.node = 1, .data_plane = 77}});
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    ck_assert_uint_eq(did_on(&b, REFIT_DO_PREPARE, 1)->data_plane, 77);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    (void)apply(&b, 12, 1, false);
    ck_assert_uint_eq(did_on(&b, REFIT_DO_APPLY, 1)->data_plane, 77);
    bed_close(&b);
}
END_TEST

/* --- new layouts for a new epoch --- */

static void one_epoch(struct bed *b, uint32_t sources, uint32_t destinations, uint64_t version,
                      uint64_t id)
{
    char request[8];
    (void)snprintf(request, sizeof request, "r%u", (unsigned)version);
    layout(b, REFIT_SOURCE, "train", sources, 1);
    layout(b, REFIT_DESTINATION, "rollout", destinations, 1);
    for (uint32_t i = 0; i < sources; i++)
        (void)attach(b, (struct attach){id + i, 0, REFIT_SOURCE, "train", i, REFIT_RECEIVE_NONE,
                                        false, 0, 0});
    for (uint32_t i = 0; i < destinations; i++)
        (void)attach(b, (struct attach){id + 50 + i, 0, REFIT_DESTINATION, "rollout", i,
                                        REFIT_STAGED_RECEIVE, true, 0, 0});
    (void)submit(b, version, request, (uint8_t)version);
    for (uint32_t i = 0; i < sources; i++)
        publish(b, id + i, version, version * 100 + i);
    planned(b);
    for (uint32_t i = 0; i < sources; i++)
        ck_assert_int_eq(refit_worker_role(b->r, worker(b, id + i)), REFIT_ROLE_SENDS);
    for (uint32_t i = 0; i < destinations; i++)
        ck_assert_int_eq(refit_worker_role(b->r, worker(b, id + 50 + i)), REFIT_ROLE_RECEIVES);
    node_event(b, REFIT_EV_PREPARED, 0);
    node_event(b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(b, version), REFIT_COMMITTED);
    for (uint32_t i = 0; i < sources; i++)
        leave(b, id + i, true);
    for (uint32_t i = 0; i < destinations; i++)
        leave(b, id + 50 + i, true);
}

/* CASES A32 (more ranks on one side than on the other, 6:2 then 2:6, 3:1, 1:3) and A35 (another layout of the same name
 * from version to version). */
START_TEST(new_layouts_take_the_old_ones_place_in_a_new_epoch)
{
    static const uint32_t sides[][2] = {{6, 2}, {2, 6}, {3, 1}, {1, 3}};
    struct bed b;
    bed_init(&b);
    node_up(&b, 0);
    uint64_t epoch = 0;
    for (uint64_t i = 0; i < 4; i++) {
        one_epoch(&b, sides[i][0], sides[i][1], i + 1, (i + 1) * 100);
        uint64_t now = refit_find_version(b.r, i + 1)->epoch;
        ck_assert_uint_gt(now, epoch);
        epoch = now;
    }
    bed_close(&b);
}
END_TEST

/* --- retry and partial success --- */

START_TEST(a_receiver_that_finished_early_keeps_its_result_and_a_retry_says_it_is_the_same_content)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    const struct refit_action *start = did_on(&b, REFIT_DO_START, 1);
    uint64_t content = start->content;
    ck_assert_uint_ne(content, 0);
    node_event(&b, REFIT_EV_STAGED, 1);
    node_failed(&b, 0, 0);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    (void)submit(&b, 1, "b", 1);
    publish_all(&b, 1);
    ck_assert(refit_holds_already(b.r, worker(&b, 12)));
    ck_assert(!refit_holds_already(b.r, worker(&b, 11)));
    planned(&b);
    ck_assert_uint_eq(did_on(&b, REFIT_DO_PREPARE, 0)->content, content);
    bed_close(&b);
}
END_TEST

START_TEST(what_staged_before_it_heard_of_the_abort_is_kept_but_not_what_was_blamed)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    node_failed(&b, 0, 11); /* worker 11 on node 0 differs */
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    node_event(&b, REFIT_EV_STAGED, 1);
    node_event(&b, REFIT_EV_STAGED, 0); /* a stray */
    quiesce(&b);
    ck_assert_uint_eq(worker(&b, 12)->held, 1);
    ck_assert_uint_eq(worker(&b, 11)->held, 0);
    bed_close(&b);
}
END_TEST

START_TEST(what_was_found_to_differ_after_it_had_staged_is_not_held)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, true);
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint64_t w = 11; w <= 12; w++)
        ready(&b, w, 1);
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)), REFIT_WORKER_UNCOMMITTED);
    node_failed(&b, 1, 12); /* the cells of two nodes were compared */
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)), REFIT_WORKER_TORN);
    bed_close(&b);
}
END_TEST

static void found_wrong(struct bed *b, uint32_t node, uint64_t attempt, const uint64_t *wrong,
                        size_t n)
{
    step(b, (struct refit_event){.type = REFIT_EV_FAILED,
                                 .node = {.node = node,
                                          .attempt = attempt,
                                          .code = RS_EDATALOSS,
                                          .text = "w, [0, 4): differs",
                                          .worker = wrong[0],
                                          .wrong = wrong,
                                          .n_wrong = n}});
}

START_TEST(everybody_who_has_got_wrong_bytes_is_known_by_one_failure_and_one_retry_is_enough)
{
    static const uint64_t both[] = {11, 12};
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_uint_eq(worker(&b, 12)->held, 1);
    found_wrong(&b, 0, b.r->attempt_high, both, 2);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    node_event(&b, REFIT_EV_STAGED, 0); /* a stray */
    node_event(&b, REFIT_EV_STAGED, 1);
    quiesce(&b);
    ck_assert_uint_eq(worker(&b, 11)->held, 0);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    to_transfer(&b, 1, "b"); /* all of it is moved, and staged as ever */
    ck_assert(!refit_holds_already(b.r, worker(&b, 11)));
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_uint_eq(worker(&b, 11)->held, 1);
    ck_assert_uint_eq(worker(&b, 12)->held, 1);
    bed_close(&b);
}
END_TEST

START_TEST(who_was_named_before_its_node_staged_is_not_believed_when_it_has)
{
    static const uint64_t both[] = {11, 12};
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    found_wrong(&b, 0, b.r->attempt_high, both, 2);
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    bed_close(&b);
}
END_TEST

START_TEST(who_is_found_to_have_wrong_bytes_while_the_attempt_is_called_off_is_not_believed)
{
    static const uint64_t one[] = {12};
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    node_event(&b, REFIT_EV_STAGED, 1);
    node_failed(&b, 0, 11);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    found_wrong(&b, 1, b.r->attempt_high - 1, one, 1); /* of an earlier attempt: nothing */
    ck_assert_uint_eq(worker(&b, 12)->held, 1);
    found_wrong(&b, 1, b.r->attempt_high, one, 1);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    node_event(&b, REFIT_EV_STAGED, 1); /* a stray */
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_node_that_joins_again_is_not_believed_about_memory_that_got_wrong_bytes)
{
    static const uint64_t one[] = {12};
    struct bed b;
    usual(&b, REFIT_IN_PLACE, true);
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint64_t w = 11; w <= 12; w++)
        ready(&b, w, 1);
    uint64_t content = did_on(&b, REFIT_DO_START, 1)->content;
    found_wrong(&b, 0, b.r->attempt_high, one, 1);
    silent(&b, 1);
    node_event(&b, REFIT_EV_QUIESCED, 0);
    lost(&b, 1, false);
    node_up(&b, 1);
    tells(&b, 12, 1, content);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)), REFIT_WORKER_TORN);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_node_that_joins_again_tells_what_landed_there_and_a_retry_commits_it)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, true);
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint64_t w = 11; w <= 12; w++)
        ready(&b, w, 1);
    uint64_t content = did_on(&b, REFIT_DO_START, 1)->content;
    silent(&b, 1); /* its STAGED is lost with the session */
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)), REFIT_WORKER_TORN);
    node_event(&b, REFIT_EV_QUIESCED, 0);
    lost(&b, 1, false);
    node_up(&b, 1);
    tells(&b, 12, 1, content);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)), REFIT_WORKER_UNCOMMITTED);
    (void)submit(&b, 1, "b", 1);
    publish_all(&b, 1);
    ck_assert(refit_holds_already(b.r, worker(&b, 12)));
    bed_close(&b);
}
END_TEST

START_TEST(an_uncommitted_claim_counts_as_committed_only_with_the_committed_content)
{
    for (uint64_t other = 0; other < 2; other++) {
        struct bed b;
        usual(&b, REFIT_IN_PLACE, true);
        (void)submit(&b, 1, "a", 1);
        publish_all(&b, 1);
        planned(&b);
        for (uint32_t n = 0; n < 2; n++)
            node_event(&b, REFIT_EV_PREPARED, n);
        for (uint64_t w = 11; w <= 12; w++)
            ready(&b, w, 1);
        uint64_t content = did_on(&b, REFIT_DO_START, 1)->content;
        for (uint32_t n = 0; n < 2; n++)
            node_event(&b, REFIT_EV_STAGED, n);
        ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
        tells(&b, 12, 1, content + other); /* it had not heard of the commit */
        ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)),
                         other == 0 ? REFIT_WORKER_CURRENT : REFIT_WORKER_TORN);
        bed_close(&b);
    }
}
END_TEST

/* The START of version 2 has not come to the node: its memory has what version 1 brought. */
START_TEST(who_is_blamed_for_a_version_is_not_believed_to_hold_an_older_one)
{
    struct bed b;
    uint64_t one[] = {12};
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    uint64_t content = b.r->publication;
    found_wrong(&b, 0, b.r->attempt_high, one, 1);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    to_transfer(&b, 2, "b");
    found_wrong(&b, 0, b.r->attempt_high, one, 1);
    silent(&b, 1);
    node_event(&b, REFIT_EV_QUIESCED, 0);
    lost(&b, 1, false);
    node_up(&b, 1);
    tells(&b, 12, 1, content);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_claim_that_no_attempt_has_compared_does_not_outlive_the_commit)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    uint64_t content = did_on(&b, REFIT_DO_START, 1)->content;
    layout(&b, REFIT_DESTINATION, "eval", 1, 1); /* too late for this attempt */
    step(&b, (struct refit_event){.type = REFIT_EV_ATTACHED,
                                  .cookie = ++b.next_cookie,
                                  .attached = {.worker = 21,
                                               .node = 1,
                                               .side = REFIT_DESTINATION,
                                               .layout_name = "eval",
                                               .receive = REFIT_STAGED_RECEIVE,
                                               .accept_automatically = true,
                                               .uncommitted = 1,
                                               .uncommitted_content = content}});
    ck_assert_uint_eq(worker(&b, 21)->held, 1);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_uint_eq(worker(&b, 12)->held, 1);
    ck_assert_uint_eq(worker(&b, 21)->held, 0);
    bed_close(&b);
}
END_TEST

static void submit_read(struct bed *b, uint64_t version, const char *id, uint32_t min)
{
    struct refit_policy policy = {.layout_name = (char *)(uintptr_t) "rollout",
                                  .min_instances = min};
    uint8_t content[16] = {1};
    struct refit_event ev = submit_event(version, id, content);
    ev.submit.release_at = REFIT_RELEASE_READ;
    ev.submit.policies = &policy;
    ev.submit.n_policies = 1;
    step(b, ev);
}

static void sources_are_read(struct bed *b)
{
    step(b, (struct refit_event){.type = REFIT_EV_PROGRESS,
                                 .node = {.node = 0,
                                          .attempt = b->r->attempt_high,
                                          .sources_read_ns = 5,
                                          .sources_known = true}});
}

/* Both sides move; the sources have been read and released; node `done` has staged, the other one fails. */
static void read_then_failed(struct bed *b, bool feed, uint32_t done)
{
    usual(b, REFIT_STAGED_RECEIVE, true);
    b->r->config.feed = feed;
    submit_read(b, 1, "a", 2);
    publish_all(b, 1);
    planned(b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(b, REFIT_EV_PREPARED, n);
    sources_are_read(b);
    ck_assert_uint_eq(told(b, REFIT_TELL_SOURCE_RELEASED), 2);
    node_event(b, REFIT_EV_STAGED, done);
    node_failed(b, 1 - done, 0);
    quiesce(b);
    ck_assert_int_eq(phase(b, 1), REFIT_ABORTED);
}

START_TEST(a_retry_after_the_release_is_fed_by_who_holds_the_version_whole)
{
    struct bed b;
    read_then_failed(&b, true, 1);
    submit_read(&b, 1, "b", 2); /* the trainer has gone on: it does not publish */
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 0);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert_str_eq(b.r->feed_layout->name, "rollout");
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 12)), REFIT_ROLE_SENDS);
    ck_assert_int_eq(worker(&b, 12)->feeding, REFIT_FEED_RECEIVING);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 11)), REFIT_ROLE_RECEIVES);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 1)), REFIT_ROLE_NONE);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    for (uint64_t w = 11; w <= 12; w++)
        ck_assert_uint_eq(worker(&b, w)->held, 1);
    bed_close(&b);
}
END_TEST

START_TEST(who_holds_other_content_under_the_number_feeds_no_retry)
{
    struct bed b;
    read_then_failed(&b, true, 1);
    tells(&b, 12, 1, 4711); /* its node is another now, and knows of other bytes there */
    ck_assert_uint_eq(worker(&b, 12)->held, 1);
    submit_read(&b, 1, "b", 2);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 2);
    bed_close(&b);
}
END_TEST

START_TEST(a_retry_after_the_release_without_a_holder_ends_as_source_gone)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.feed = true;
    submit_read(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    sources_are_read(&b);
    leave(&b, 12, false); /* the policy could do without it, but who feeds the other? */
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_int_eq(strncmp(reason(&b, 1), "SOURCE_GONE", 11), 0);
    (void)submit(&b, 1, "b", 1);
    tick(&b, 60000);
    ck_assert_int_eq(strncmp(reason(&b, 1), "SOURCE_GONE", 11), 0); /* nobody published again */
    bed_close(&b);
}
END_TEST

START_TEST(where_nobody_lacks_anything_a_retry_commits_without_a_plan)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, false);
    b.r->config.feed = true;
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint64_t w = 11; w <= 12; w++)
        ready(&b, w, 1);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    (void)verdict(&b, 12, 1, false);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    (void)submit(&b, 1, "b", 1);
    ck_assert_uint_eq(count(&b, REFIT_DO_PLAN), 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_PREPARED); /* they have to pause for it once more */
    for (uint64_t w = 11; w <= 12; w++)
        ready(&b, w, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_ACCEPTING);
    for (uint64_t w = 11; w <= 12; w++)
        (void)verdict(&b, w, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

START_TEST(a_layout_that_cannot_feed_is_not_asked_again_for_that_version)
{
    struct bed b;
    read_then_failed(&b, true, 1);
    submit_read(&b, 1, "b", 2);
    step(&b, (struct refit_event){.type = REFIT_EV_PLANNED,
                                  .planned = {.attempt = b.r->attempt_high,
                                              .code = RS_EPRECOND,
                                              .text = "w: bfloat16 there, float32 here"}});
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    submit_read(&b, 1, "c", 2);
    ck_assert_uint_eq(count(&b, REFIT_DO_PLAN), 0);
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 2);
    bed_close(&b);
}
END_TEST

/* CASES B17: four receivers, the third fails between prepare and commit; the answer of a commit is lost; an abort comes
 * after it. */
START_TEST(no_fleet_is_left_mixed)
{
    struct bed b;
    bed_init(&b);
    layout(&b, REFIT_SOURCE, "train", 1, 1);
    layout(&b, REFIT_DESTINATION, "rollout", 4, 4);
    for (uint32_t n = 0; n < 4; n++)
        node_up(&b, n);
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    for (uint32_t n = 0; n < 4; n++)
        (void)attach(&b, (struct attach){11 + n, n, REFIT_DESTINATION, "rollout", n, REFIT_IN_PLACE,
                                         true, 0, 0});
    for (uint64_t version = 1; version <= 2; version++) {
        (void)submit(&b, version, version == 1 ? "a" : "b", 1);
        publish(&b, 1, version, version * 10);
        planned(&b);
        for (uint32_t n = 0; n < 4; n++)
            node_event(&b, REFIT_EV_PREPARED, n);
        for (uint64_t w = 11; w < 15; w++)
            ready(&b, w, version);
        for (uint32_t n = 0; n < 4; n++)
            if (version == 1 || n < 2)
                node_event(&b, REFIT_EV_STAGED, n);
    }
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    node_failed(&b, 2, 13);
    for (uint32_t n = 0; n < 4; n++)
        node_event(&b, REFIT_EV_QUIESCED, n);
    ck_assert_int_eq(phase(&b, 2), REFIT_ABORTED);
    for (uint64_t w = 11; w < 15; w++) { /* told apart, and nobody serves 2 */
        ck_assert_int_eq(refit_worker_state(b.r, worker(&b, w)),
                         w < 13 ? REFIT_WORKER_UNCOMMITTED : REFIT_WORKER_TORN);
        ck_assert_uint_ne(worker(&b, w)->applied, 2);
    }
    ck_assert_int_eq(code(&b, abort_version(&b, 1)), RS_EPRECOND);
    uint64_t again = submit(&b, 1, "a", 1); /* the same question gets the same answer */
    ck_assert_int_eq(code(&b, again), 0);
    ck_assert_int_eq(code(&b, submit(&b, 1, "z", 1)), 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

/* --- catching up --- */

/* Version 1 is committed and applied on instance 0 (worker 11, node 0); instance 1 has a new worker, 22 on node 1. */
static void newcomer(struct bed *b, enum refit_receive receive, bool feed)
{
    usual(b, receive, true);
    b->r->config.feed = feed;
    b->r->config.catch_up = true;
    (void)submit(b, 1, "a", 1);
    publish_all(b, 1);
    planned(b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(b, REFIT_EV_PREPARED, n);
    for (uint64_t w = 11; w <= 12 && receive == REFIT_IN_PLACE; w++)
        ready(b, w, 1);
    for (uint32_t n = 0; n < 2; n++)
        node_event(b, REFIT_EV_STAGED, n);
    ck_assert_int_eq(phase(b, 1), REFIT_COMMITTED);
    if (receive == REFIT_STAGED_RECEIVE) {
        (void)apply(b, 11, 1, false);
        applied(b, 11, 1, 0);
    }
    leave(b, 12, false);
    (void)attach(b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1, receive, true, 0, 0});
}

static void carried_out(struct bed *b, enum refit_event_type type)
{
    for (uint32_t n = 0; n < 2; n++)
        node_event(b, type, n);
}

START_TEST(a_newcomer_gets_the_newest_committed_version_from_a_replica_by_itself)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    const struct seen *plan = did(&b, REFIT_DO_PLAN);
    ck_assert_ptr_nonnull(plan);
    ck_assert_int_eq(plan->a.kind, REFIT_KIND_CATCH_UP);
    ck_assert_uint_eq(plan->a.attempt, 2);
    ck_assert_uint_eq(plan->a.version, 1);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 11)), REFIT_ROLE_SENDS);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 22)), REFIT_ROLE_RECEIVES);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 1)), REFIT_ROLE_NONE);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 11)), REFIT_WORKER_CURRENT); /* it serves */
    size_t before = b.n_seen;
    carried_out(&b, REFIT_EV_STAGED);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_ptr_null(b.r->in_flight);
    ck_assert_uint_eq(worker(&b, 22)->held, 1);
    (void)apply(&b, 22, 1, false);
    applied(&b, 22, 1, 0);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 22)), REFIT_WORKER_CURRENT);
    for (size_t i = before; i < b.n_seen; i++) /* nothing new was committed */
        ck_assert_int_ne(b.seen[i].a.type, REFIT_DO_COMMITTED);
    ck_assert_uint_eq(b.r->n_caught_up, 1);
    ck_assert_uint_eq(b.r->catch_up_bytes.landed,
                      20); /* 10 of each node, apart from the version's */
    ck_assert_uint_eq(refit_find_version(b.r, 1)->bytes.landed, 20);
    ck_assert_uint_eq(refit_find_version(b.r, 1)->attempt, 1);
    bed_close(&b);
}
END_TEST

START_TEST(nobody_feeds_a_newcomer_while_it_applies)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.feed = b.r->config.catch_up = true;
    to_accepting(&b, 1, "a");
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    (void)apply(&b, 11, 1, false);
    leave(&b, 12, false);
    (void)attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    ck_assert_ptr_null(b.r->in_flight);
    applied(&b, 11, 1, 0);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 11)), REFIT_ROLE_SENDS);
    bed_close(&b);
}
END_TEST

START_TEST(a_newcomer_in_place_is_asked_to_pause_and_told_that_it_may_serve)
{
    struct bed b;
    newcomer(&b, REFIT_IN_PLACE, true);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    ck_assert_uint_eq(told(&b, REFIT_TELL_READY_REQUESTED), 1);
    ck_assert_int_eq(b.r->in_flight->phase.state, REFIT_PREPARED);
    ready(&b, 22, 1);
    ck_assert_int_eq(b.r->in_flight->phase.state, REFIT_TRANSFERRING);
    carried_out(&b, REFIT_EV_STAGED);
    ck_assert_uint_eq(told(&b, REFIT_TELL_COMMITTED), 1);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 22)), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

START_TEST(a_catch_up_gives_way_to_a_newer_version)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    uint64_t cookie = submit(&b, 2, "b", 1);
    ck_assert_int_eq(code(&b, cookie), 0);
    ck_assert_int_eq(b.r->in_flight->phase.state, REFIT_ABORTING);
    publish_all(&b, 2);
    carried_out(&b, REFIT_EV_QUIESCED);
    ck_assert_uint_eq(b.r->in_flight->version, 2);
    ck_assert_int_eq(b.r->in_flight->kind, REFIT_KIND_REFIT);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    carried_out(&b, REFIT_EV_STAGED);
    ck_assert_int_eq(phase(&b, 2), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(what_a_newcomer_holds_of_a_catch_up_that_gave_way_holds_up_nobody)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    refit_find_worker(b.r, 22)->accept_automatically = false;
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    carried_out(&b, REFIT_EV_STAGED); /* it is asked, and does not answer */
    ck_assert_uint_eq(worker(&b, 22)->held, 1);
    (void)submit(&b, 2, "b", 1);
    carried_out(&b, REFIT_EV_QUIESCED);
    publish_all(&b, 2);
    ck_assert_uint_eq(b.r->in_flight->version, 2);
    ck_assert_int_eq(b.r->planning, true); /* and is waited for by nobody */
    bed_close(&b);
}
END_TEST

START_TEST(a_newcomer_that_has_the_bytes_already_is_asked_again_without_any)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    refit_find_worker(b.r, 22)->accept_automatically = false;
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    carried_out(&b, REFIT_EV_STAGED);
    (void)submit(&b, 2, "b", 1);
    carried_out(&b, REFIT_EV_QUIESCED);
    (void)abort_version(&b, 2);
    ck_assert_int_eq(phase(&b, 2), REFIT_ABORTED);
    ck_assert_int_eq(b.r->in_flight->kind, REFIT_KIND_CATCH_UP);
    ck_assert_int_eq(b.r->in_flight->phase.state,
                     REFIT_ACCEPTING); /* nothing was planned or moved */
    verdict(&b, 22, 1, true);
    ck_assert_ptr_null(b.r->in_flight);
    ck_assert_uint_eq(told(&b, REFIT_TELL_COMMITTED), 1);
    bed_close(&b);
}
END_TEST

START_TEST(a_trainer_that_has_published_the_committed_version_again_feeds_a_newcomer)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, false);
    ck_assert_ptr_null(b.r->in_flight); /* nobody can feed */
    publish_all(&b, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert_ptr_null(b.r->feed_layout);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 1)), REFIT_ROLE_SENDS);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 11)), REFIT_ROLE_NONE);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    struct err e = {0};
    ck_assert_int_eq(refit_publish_check(b.r, 1, 2, &e), RS_EUNAVAIL); /* it is read just now */
    carried_out(&b, REFIT_EV_STAGED);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    ck_assert(worker(&b, 1)->released && worker(&b, 2)->released);
    ck_assert_int_eq(refit_publish_check(b.r, 1, 2, &e), 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_trainer_that_is_about_to_publish_something_else_feeds_nobody)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, false);
    publish(&b, 1, 1, 11);
    step(&b, (struct refit_event){.type = REFIT_EV_PUBLISHING, .published = {1, 2, 0}});
    publish(&b, 2, 1, 12);
    ck_assert_uint_eq(count(&b, REFIT_DO_PLAN), 0);
    ck_assert_ptr_null(b.r->in_flight);
    bed_close(&b);
}
END_TEST

START_TEST(a_trainer_with_other_weights_feeds_nobody)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, false);
    publish(&b, 1, 1, 99);
    publish(&b, 2, 1, 12);
    ck_assert_ptr_null(b.r->in_flight);
    bed_close(&b);
}
END_TEST

START_TEST(a_catch_up_that_fails_is_tried_again_each_time_later)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    uint64_t wait_ms = 1000;
    for (int i = 0; i < 3; i++, wait_ms *= 2) {
        planned(&b);
        carried_out(&b, REFIT_EV_PREPARED);
        node_failed(&b, 1, 22);
        carried_out(&b, REFIT_EV_QUIESCED);
        ck_assert_ptr_null(b.r->in_flight);
        ck_assert_uint_ge(did(&b, REFIT_DO_SET_DEADLINE)->a.at_ns, b.now_ns + (wait_ms - 5) * MS);
        tick(&b, wait_ms - 10);
        ck_assert_ptr_null(b.r->in_flight);
        tick(&b, 20);
        ck_assert_ptr_nonnull(b.r->in_flight);
    }
    bed_close(&b);
}
END_TEST

START_TEST(what_a_newcomer_rejects_it_is_not_given_again)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    leave(&b, 22, false);
    carried_out(&b, REFIT_EV_QUIESCED);
    (void)attach(&b, (struct attach){23, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     false, 0, 0});
    tick(&b, 1000);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    carried_out(&b, REFIT_EV_STAGED);
    (void)verdict(&b, 23, 1, false);
    carried_out(&b, REFIT_EV_QUIESCED);
    tick(&b, 60000);
    ck_assert_ptr_null(b.r->in_flight);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(a_feeder_whose_shadow_is_wrong_feeds_from_live_memory_at_once)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(worker(&b, 11)->feeding, REFIT_FEED_RECEIVING);
    planned(&b);
    node_failed(&b, 0, 11);
    ck_assert_uint_eq(worker(&b, 11)->held, 0);
    carried_out(&b, REFIT_EV_QUIESCED);
    ck_assert_ptr_nonnull(b.r->in_flight); /* nobody is put off: it was not the newcomer */
    ck_assert_uint_eq(b.r->in_flight->attempt, 3);
    ck_assert_int_eq(worker(&b, 11)->feeding, REFIT_FEED_LIVE);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 11)), REFIT_WORKER_CURRENT);
    planned(&b);
    node_failed(&b, 0, 11); /* that is wrong, too */
    carried_out(&b, REFIT_EV_QUIESCED);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 11)), REFIT_WORKER_TORN);
    ck_assert_ptr_null(b.r->in_flight); /* nobody has it any more */
    bed_close(&b);
}
END_TEST

START_TEST(a_feeder_in_place_that_is_wrong_is_torn_and_brought_up_with_the_newcomer)
{
    struct bed b;
    newcomer(&b, REFIT_IN_PLACE, true);
    planned(&b);
    node_failed(&b, 0, 11);
    carried_out(&b, REFIT_EV_QUIESCED);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 11)), REFIT_WORKER_TORN);
    ck_assert_ptr_null(b.r->in_flight);
    publish_all(&b, 1); /* the trainer has it */
    ck_assert_ptr_nonnull(b.r->in_flight);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 11)), REFIT_ROLE_RECEIVES);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 22)), REFIT_ROLE_RECEIVES);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    ready(&b, 11, 1);
    ready(&b, 22, 1);
    carried_out(&b, REFIT_EV_STAGED);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 11)), REFIT_WORKER_CURRENT);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 22)), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

START_TEST(without_the_setting_nobody_catches_up)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    leave(&b, 12, false);
    (void)attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    publish_all(&b, 1);
    ck_assert_ptr_null(b.r->in_flight);
    bed_close(&b);
}
END_TEST

/* --- drain --- */

START_TEST(workers_of_a_drained_node_leave_after_the_attempt_in_flight)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    uint64_t cookie = drain(&b, 1, true);
    ck_assert_ptr_null(answer(&b, cookie));
    uint64_t refused = attach(&b, (struct attach){30, 1, REFIT_DESTINATION, "rollout", 1,
                                                  REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, refused), RS_EEXIST); /* its rank is still there */
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_ptr_null(worker(&b, 12));
    ck_assert_int_eq(code(&b, cookie), 0);
    ck_assert_uint_eq(answer(&b, cookie)->a.value, 1);
    refused = attach(&b, (struct attach){31, 1, REFIT_DESTINATION, "rollout", 1,
                                         REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, refused), RS_EUNAVAIL);
    ck_assert_ptr_nonnull(strstr(answer(&b, refused)->text, "node 1 is drained"));
    ck_assert_int_eq(code(&b, drain(&b, 1, false)), 0);
    uint64_t taken = attach(&b, (struct attach){32, 1, REFIT_DESTINATION, "rollout", 1,
                                                REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, taken), 0);
    ck_assert_int_eq(code(&b, drain(&b, 9, true)), RS_ENOTFOUND);
    bed_close(&b);
}
END_TEST

/* --- rehearsal --- */

static uint64_t rehearse(struct bed *b, uint64_t version)
{
    uint8_t content[16] = {1};
    struct refit_event ev = submit_event(version, "rehearsal", content);
    ev.submit.rehearsal = true;
    ev.cookie = ++b->next_cookie;
    step(b, ev);
    return ev.cookie;
}

START_TEST(a_rehearsal_commits_nothing_and_gives_its_number_back)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, false);
    uint64_t cookie = rehearse(&b, 1);
    ck_assert_int_eq(code(&b, cookie), 0);
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 2);
    publish_all(&b, 1);
    ck_assert_int_eq(did(&b, REFIT_DO_PLAN)->a.kind, REFIT_KIND_REHEARSAL);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    for (uint64_t w = 11; w <= 12; w++)
        ready(&b, w, 1);
    ck_assert_int_eq(code(&b, submit(&b, 1, "real", 1)), RS_EPRECOND);
    carried_out(&b, REFIT_EV_STAGED);
    for (uint64_t w = 11; w <= 12; w++)
        (void)verdict(&b, w, 1, true);
    ck_assert_ptr_null(b.r->in_flight);
    const struct ledger_attempt *row = &did(&b, REFIT_DO_PERSIST)->attempt;
    ck_assert(row->kind == REFIT_KIND_REHEARSAL && row->phase == REFIT_REHEARSED &&
              row->version == 1);
    ck_assert_int_eq(b.r->rehearsed.phase, REFIT_REHEARSED);
    ck_assert_uint_eq(b.r->committed, 0);
    ck_assert_ptr_null(refit_find_version(b.r, 1));
    ck_assert_uint_eq(told(&b, REFIT_TELL_COMMITTED), 0);
    ck_assert_uint_ge(told(&b, REFIT_TELL_ABORTED), 2);
    for (uint64_t w = 11; w <= 12; w++)
        ck_assert_int_eq(refit_worker_state(b.r, worker(&b, w)), REFIT_WORKER_TORN);
    ck_assert_int_eq(code(&b, submit(&b, 1, "real", 1)), 0);
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 2); /* coordinates are no weights */
    bed_close(&b);
}
END_TEST

START_TEST(a_rehearsal_that_one_rejects_ends_with_its_reason)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    const uint64_t begin_ns = b.now_ns, took_ns = 5000 * MS;
    (void)rehearse(&b, 4);
    b.now_ns += took_ns;
    publish_all(&b, 4);
    planned(&b);
    carried_out(&b, REFIT_EV_PREPARED);
    carried_out(&b, REFIT_EV_STAGED);
    (void)verdict(&b, 11, 4, true);
    (void)verdict(&b, 12, 4, false);
    carried_out(&b, REFIT_EV_QUIESCED);
    ck_assert_int_eq(b.r->rehearsed.phase, REFIT_ABORTED);
    ck_assert_str_eq(b.r->rehearsed.reason, "rollout/instance 1 rejected: rank 1: perplexity rose");
    ck_assert_uint_gt(b.r->rehearsed.total_ns, took_ns); /* and the steps', of a millisecond each */
    ck_assert_uint_lt(b.r->rehearsed.total_ns, b.now_ns - begin_ns);
    ck_assert_uint_eq(worker(&b, 11)->held, 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_rehearsal_is_refused_while_anything_is_on_its_way_and_on_a_number_that_is_taken)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 5, "a", 1);
    ck_assert_int_eq(code(&b, rehearse(&b, 6)), RS_EPRECOND);
    (void)abort_version(&b, 5);
    ck_assert_int_eq(code(&b, rehearse(&b, 5)), RS_EPRECOND);
    ck_assert_int_eq(code(&b, rehearse(&b, 0)), RS_EINVAL);
    ck_assert_int_eq(code(&b, rehearse(&b, 6)), 0);
    ck_assert_int_eq(code(&b, rehearse(&b, 7)), RS_EUNAVAIL);
    (void)abort_version(&b, 0);
    ck_assert_int_eq(b.r->rehearsed.phase, REFIT_ABORTED);
    bed_close(&b);
}
END_TEST

START_TEST(a_destination_hears_that_what_it_waits_for_is_over_after_a_restart)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    leave(&b, 12, false);
    b.waits_for = 7; /* a rehearsal of an earlier start: the ledger has no such version */
    (void)attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    ck_assert_uint_eq(told(&b, REFIT_TELL_ABORTED), 1);
    bed_close(&b);
}
END_TEST

/* --- memory that runs out --- */

START_TEST(rehearsal_catch_up_and_feeding_survive_every_failed_allocation)
{
    bool struck = true;
    for (long i = 1; struck; i++) {
        struct bed b;
        usual(&b, REFIT_STAGED_RECEIVE, true);
        b.r->config.feed = b.r->config.catch_up = true;
        b.fail_at = i;
        b.struck = false;
        (void)rehearse(&b, 9);
        (void)abort_version(&b, 0);
        to_transfer(&b, 1, "a");
        carried_out(&b, REFIT_EV_STAGED);
        leave(&b, 12, false);
        (void)attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1,
                                         REFIT_STAGED_RECEIVE, true, 0, 0});
        planned(&b);
        carried_out(&b, REFIT_EV_PREPARED);
        carried_out(&b, REFIT_EV_STAGED);
        (void)drain(&b, 1, true);
        ck_assert_uint_eq(b.r->n_caught_up, 1);
        struck = b.struck;
        bed_close(&b);
        ck_assert_int_lt(i, 100);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(what_a_silent_node_takes_part_in_ends_only_when_it_is_surely_lost)                           \
    X(a_node_that_falls_silent_ends_the_attempt_in_each_phase_until_all_is_staged)                 \
    X(an_expelled_node_that_had_still_to_accept_rejects)                                           \
    X(an_expelled_node_is_not_waited_for_where_the_policy_can_do_without)                          \
    X(a_dead_node_is_done_without_and_comes_back_and_numbers_stay)                                 \
    X(who_needs_a_node_that_does_not_start_is_told_at_once_and_goes_on_when_it_does)               \
    X(nobody_waits_for_a_node_that_does_not_start_where_the_policy_can_do_without)                 \
    X(a_node_that_does_not_start_is_named_before_its_workers_are_known)                            \
    X(who_has_left_for_good_is_not_said_never_to_have_come)                                        \
    X(a_late_end_of_an_old_lease_leaves_the_new_one_alone)                                         \
    X(a_member_that_knows_of_a_newer_commit_ends_what_is_below_it)                                 \
    X(after_a_restart_nothing_begins_before_all_nodes_have_joined_or_their_leases_are_over)        \
    X(orders_name_the_data_plane_that_is_meant)                                                    \
    X(new_layouts_take_the_old_ones_place_in_a_new_epoch)                                          \
    X(a_receiver_that_finished_early_keeps_its_result_and_a_retry_says_it_is_the_same_content)     \
    X(what_staged_before_it_heard_of_the_abort_is_kept_but_not_what_was_blamed)                    \
    X(everybody_who_has_got_wrong_bytes_is_known_by_one_failure_and_one_retry_is_enough)           \
    X(who_was_named_before_its_node_staged_is_not_believed_when_it_has)                            \
    X(who_is_found_to_have_wrong_bytes_while_the_attempt_is_called_off_is_not_believed)            \
    X(a_node_that_joins_again_is_not_believed_about_memory_that_got_wrong_bytes)                   \
    X(what_was_found_to_differ_after_it_had_staged_is_not_held)                                    \
    X(a_node_that_joins_again_tells_what_landed_there_and_a_retry_commits_it)                      \
    X(an_uncommitted_claim_counts_as_committed_only_with_the_committed_content)                    \
    X(who_is_blamed_for_a_version_is_not_believed_to_hold_an_older_one)                            \
    X(a_claim_that_no_attempt_has_compared_does_not_outlive_the_commit)                            \
    X(a_retry_after_the_release_is_fed_by_who_holds_the_version_whole)                             \
    X(who_holds_other_content_under_the_number_feeds_no_retry)                                     \
    X(nobody_feeds_a_newcomer_while_it_applies)                                                    \
    X(a_retry_after_the_release_without_a_holder_ends_as_source_gone)                              \
    X(where_nobody_lacks_anything_a_retry_commits_without_a_plan)                                  \
    X(a_layout_that_cannot_feed_is_not_asked_again_for_that_version)                               \
    X(no_fleet_is_left_mixed)                                                                      \
    X(a_newcomer_gets_the_newest_committed_version_from_a_replica_by_itself)                       \
    X(a_newcomer_in_place_is_asked_to_pause_and_told_that_it_may_serve)                            \
    X(a_catch_up_gives_way_to_a_newer_version)                                                     \
    X(what_a_newcomer_holds_of_a_catch_up_that_gave_way_holds_up_nobody)                           \
    X(a_newcomer_that_has_the_bytes_already_is_asked_again_without_any)                            \
    X(a_trainer_that_has_published_the_committed_version_again_feeds_a_newcomer)                   \
    X(a_trainer_that_is_about_to_publish_something_else_feeds_nobody)                              \
    X(a_trainer_with_other_weights_feeds_nobody)                                                   \
    X(a_catch_up_that_fails_is_tried_again_each_time_later)                                        \
    X(what_a_newcomer_rejects_it_is_not_given_again)                                               \
    X(a_feeder_whose_shadow_is_wrong_feeds_from_live_memory_at_once)                               \
    X(a_feeder_in_place_that_is_wrong_is_torn_and_brought_up_with_the_newcomer)                    \
    X(without_the_setting_nobody_catches_up)                                                       \
    X(workers_of_a_drained_node_leave_after_the_attempt_in_flight)                                 \
    X(a_rehearsal_commits_nothing_and_gives_its_number_back)                                       \
    X(a_rehearsal_that_one_rejects_ends_with_its_reason)                                           \
    X(a_rehearsal_is_refused_while_anything_is_on_its_way_and_on_a_number_that_is_taken)           \
    X(a_destination_hears_that_what_it_waits_for_is_over_after_a_restart)                          \
    X(rehearsal_catch_up_and_feeding_survive_every_failed_allocation)
#include "test/lib/main.h"
