/* The decider and many nodes: silent, lost, back, broken, drained; new layouts. Cases of public fault reports are named at their
 * tests. */
#include "test/unit/test_refit_bed.h"

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

/* --- members that come and go --- */

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

/* CASES E12: the end of an old registration comes after its successor's beginning. */
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
    both_say(&b, REFIT_EV_PREPARED);
    both_say(&b, REFIT_EV_STAGED);
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
    both_say(&b, REFIT_EV_STAGED);
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
    X(workers_of_a_drained_node_leave_after_the_attempt_in_flight)
#include "test/lib/main.h"
