/* Rules of the decider that nothing else notices the lack of (scripts/mutants). */
#include "test/unit/test_refit_bed.h"

/* --- what memory holds --- */

/* One rank of an instance that is not whole claims to hold the version that is committed without it, as other content. */
START_TEST(who_took_no_part_does_not_hold_what_was_committed_under_the_number)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        enum refit_receive receive = in_place ? REFIT_IN_PLACE : REFIT_STAGED_RECEIVE;
        struct bed b;
        bed_init(&b);
        layout(&b, REFIT_SOURCE, "train", 1, 1);
        layout(&b, REFIT_DESTINATION, "rollout", 4, 2);
        node_up(&b, 0);
        (void)attach(
            &b, (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
        for (uint32_t rank = 0; rank < 2; rank++)
            (void)attach(&b, (struct attach){11 + rank, 0, REFIT_DESTINATION, "rollout", rank,
                                             receive, true, 0, 0});
        step(&b, (struct refit_event){.type = REFIT_EV_ATTACHED,
                                      .cookie = ++b.next_cookie,
                                      .attached = {.worker = 13,
                                                   .side = REFIT_DESTINATION,
                                                   .layout_name = "rollout",
                                                   .rank = 2,
                                                   .receive = receive,
                                                   .uncommitted = 1,
                                                   .uncommitted_content = 4711}});
        ck_assert_uint_eq(worker(&b, 13)->held, 1);
        (void)submit_with(&b, 1, "a", "rollout", 1);
        publish(&b, 1, 1, 11);
        planned(&b);
        node_event(&b, REFIT_EV_PREPARED, 0);
        both_ready(&b, 1);
        node_event(&b, REFIT_EV_STAGED, 0);
        ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
        ck_assert_uint_eq(worker(&b, 11)->held, 1);
        ck_assert_uint_eq(worker(&b, 13)->held, 0);
        ck_assert_int_eq(worker(&b, 13)->torn, in_place);
        bed_close(&b);
    }
}
END_TEST

/* A retry finds that what a node holds from the first attempt differs, without saying of which worker. */
START_TEST(a_node_whose_memory_differs_holds_nothing_whoever_it_was)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    node_event(&b, REFIT_EV_STAGED, 1);
    (void)abort_version(&b, 1);
    quiesce(&b);
    ck_assert_uint_eq(worker(&b, 12)->held, 1);
    to_transfer(&b, 1, "b");
    ck_assert(refit_holds_already(b.r, worker(&b, 12)));
    node_failed(&b, 1, 0);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    bed_close(&b);
}
END_TEST

/* Two ranks of an instance feed it and take part in it: one by live memory, the other has not said yes to what it holds. */
START_TEST(who_feeds_from_live_memory_holds_nothing_new_by_it)
{
    struct bed b;
    bed_init(&b);
    b.r->config.feed = true;
    layout(&b, REFIT_SOURCE, "train", 1, 1);
    layout(&b, REFIT_DESTINATION, "rollout", 4, 2);
    node_up(&b, 0);
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    for (uint32_t rank = 0; rank < 4; rank++)
        (void)attach(&b, (struct attach){11 + rank, 0, REFIT_DESTINATION, "rollout", rank,
                                         REFIT_STAGED_RECEIVE, true, 0, 0});
    (void)submit(&b, 1, "a", 1);
    publish(&b, 1, 1, 11);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    leave(&b, 11, false);
    (void)attach(&b, (struct attach){21, 0, REFIT_DESTINATION, "rollout", 0, REFIT_STAGED_RECEIVE,
                                     true, 1, 0});
    refit_find_worker(b.r, 12)->unsaid = true;
    leave(&b, 13, false);
    (void)attach(&b, (struct attach){23, 0, REFIT_DESTINATION, "rollout", 2, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    b.r->config.catch_up = true;
    tick(&b, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert_int_eq(worker(&b, 21)->feeding, REFIT_FEED_LIVE);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_uint_eq(worker(&b, 23)->held, 1);
    ck_assert_uint_eq(worker(&b, 21)->held, 0);
    bed_close(&b);
}
END_TEST

/* --- who takes part --- */

START_TEST(an_instance_that_was_left_out_catches_up_after_the_commit)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.feed = b.r->config.catch_up = true;
    (void)submit_with(&b, 1, "a", "rollout", 1);
    publish_all(&b, 1);
    plan_and_prepare(&b);
    step(&b, (struct refit_event){.type = REFIT_EV_FAILED,
                                  .node = {.node = 1,
                                           .attempt = b.r->attempt_high,
                                           .code = RS_EIO,
                                           .text = "its disk",
                                           .worker = 12}});
    quiesce(&b);
    planned(&b); /* again, without instance 1 */
    ck_assert(!worker(&b, 12)->taking_part);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_ptr_nonnull(b.r->in_flight);
    ck_assert_int_eq(b.r->in_flight->kind, REFIT_KIND_CATCH_UP);
    ck_assert(worker(&b, 12)->taking_part);
    bed_close(&b);
}
END_TEST

START_TEST(a_layout_that_the_policy_names_is_waited_for)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit_with(&b, 1, "a", "eval", 1);
    publish_all(&b, 1);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "layout 'eval'"));
    layout(&b, REFIT_DESTINATION, "eval", 1, 1);
    (void)attach(
        &b, (struct attach){21, 0, REFIT_DESTINATION, "eval", 0, REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert(worker(&b, 21)->taking_part);
    bed_close(&b);
}
END_TEST

/* --- what ends an attempt --- */

START_TEST(no_nodes_failure_ends_what_has_been_staged)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    node_failed(&b, 1, 12);
    node_failed(&b, 0, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_ACCEPTING);
    (void)verdict(&b, 11, 1, true);
    (void)verdict(&b, 12, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(an_epoch_that_can_not_be_recorded_ends_the_attempt)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    publish_all(&b, 1);
    b.hold = true;
    (void)submit(&b, 1, "a", 1);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, 0);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, RS_EEXHAUSTED); /* the epoch */
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 1)->reason, "epoch"));
    bed_close(&b);
}
END_TEST

START_TEST(nothing_is_planned_while_the_epoch_is_being_written)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    publish_all(&b, 1);
    b.hold = true;
    (void)submit(&b, 1, "a", 1);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, 0);
    uint64_t epoch = did(&b, REFIT_DO_PERSIST)->a.sequence;
    tick(&b, 1);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    ck_assert_ptr_null(did(&b, REFIT_DO_PERSIST));
    written(&b, epoch, 0);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(a_turn_that_can_not_be_recorded_begins_nothing)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    (void)submit(&b, 2, "b", 2);
    publish_all(&b, 2);
    b.hold = true;
    (void)abort_version(&b, 1);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, 0); /* its end */
    ck_assert_uint_eq(b.r->in_flight->version, 2);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, RS_EEXHAUSTED);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    ck_assert_int_eq(phase(&b, 2), REFIT_ABORTING);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, 0);
    ck_assert_int_eq(phase(&b, 2), REFIT_ABORTED);
    bed_close(&b);
}
END_TEST

START_TEST(what_a_node_that_has_failed_says_of_staged_counts_for_nothing)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    step(&b, (struct refit_event){.type = REFIT_EV_FAILED,
                                  .node = {.node = 1,
                                           .attempt = b.r->attempt_high,
                                           .code = RS_EIO,
                                           .text = "its network"}});
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    bed_close(&b);
}
END_TEST

/* --- membership --- */

START_TEST(nobody_catches_up_with_what_a_member_knows_not_to_be_the_newest)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.feed = b.r->config.catch_up = true;
    whole(&b, 1, "a");
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_UP, .node = {.node = 1, .committed = 5}});
    leave(&b, 12, false);
    (void)attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    ck_assert_ptr_null(b.r->in_flight);
    bed_close(&b);
}
END_TEST

START_TEST(who_applies_is_waited_for_and_said_to_apply)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_accepting(&b, 1, "a");
    (void)apply(&b, 11, 1, false);
    (void)submit(&b, 2, "b", 2);
    publish_all(&b, 2);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 2), "rollout/rank 0 (applying)"));
    bed_close(&b);
}
END_TEST

START_TEST(a_node_that_is_lost_makes_a_new_epoch)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    ck_assert_uint_eq(refit_find_version(b.r, 1)->epoch, 1);
    step(&b,
         (struct refit_event){.type = REFIT_EV_NODE_LOST, .node = {.node = 1, .expelled = true}});
    (void)submit_with(&b, 2, "b", "rollout", 1);
    publish_all(&b, 2);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert_uint_eq(did(&b, REFIT_DO_PLAN)->a.epoch, 2);
    bed_close(&b);
}
END_TEST

START_TEST(no_attempt_goes_to_a_node_that_is_silent)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_SILENT, .node = {.node = 1}});
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "its node is silent"));
    node_up(&b, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(a_worker_of_a_drained_node_stays_while_it_applies)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_accepting(&b, 1, "a");
    uint64_t asked = apply(&b, 12, 1, false), drained = drain(&b, 1, true);
    ck_assert_ptr_null(answer(&b, drained));
    applied(&b, 12, 1, 0);
    ck_assert_int_eq(code(&b, asked), 0);
    ck_assert_int_eq(code(&b, drained), 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_layout_whose_workers_have_all_been_drained_is_not_waited_for)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    layout(&b, REFIT_DESTINATION, "eval", 1, 1);
    (void)attach(
        &b, (struct attach){21, 1, REFIT_DESTINATION, "eval", 0, REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, drain(&b, 1, true)), 0);
    (void)submit_with(&b, 1, "a", "rollout", 1);
    publish_all(&b, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

/* --- a version's turn --- */

/* In an epoch that is durable already, so that nothing else holds the plan up. */
START_TEST(a_turn_begins_once_its_attempt_is_durable)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    (void)submit(&b, 2, "b", 2);
    publish_all(&b, 2);
    (void)abort_version(&b, 1);
    node_event(&b, REFIT_EV_QUIESCED, 0);
    b.hold = true;
    node_event(&b, REFIT_EV_QUIESCED, 1);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, 0); /* the end of version 1 */
    publish_all(&b, 2);                                    /* it has let the sources go */
    ck_assert_uint_eq(b.r->in_flight->version, 2);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    written(&b, b.r->sequence, 0);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(a_verdict_counts_for_the_attempt_that_it_names)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    (void)abort_version(&b, 1);
    quiesce(&b);
    to_accepting(&b, 1, "b");
    ck_assert_int_eq(phase(&b, 1), REFIT_ACCEPTING);
    uint64_t late = ++b.next_cookie;
    step(&b, (struct refit_event){.type = REFIT_EV_VERDICT,
                                  .cookie = late,
                                  .verdict = {12, 1, 1, false, "of the first attempt"}});
    ck_assert_int_eq(code(&b, late), RS_EABORTED);
    (void)verdict(&b, 11, 1, true);
    (void)verdict(&b, 12, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(no_verdict_is_added_to_a_commit_that_is_being_written)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    (void)submit_with(&b, 1, "a", "rollout", 1);
    publish_all(&b, 1);
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
    b.hold = true;
    (void)verdict(&b, 11, 1, true);
    const struct seen *commit = did(&b, REFIT_DO_PERSIST);
    ck_assert_uint_eq(commit->n_acceptances, 1);
    uint64_t sequence = commit->a.sequence;
    ck_assert_int_eq(code(&b, verdict(&b, 12, 1, false)), RS_EABORTED);
    ck_assert_int_eq(worker(&b, 12)->verdict, REFIT_WORKER_NO_VERDICT);
    written(&b, sequence, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

/* Its node says that it has fingerprinted it; but nobody here knows of such a commit. */
START_TEST(live_memory_beyond_the_newest_commit_is_not_believed)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    leave(&b, 12, false);
    (void)attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 9, 9});
    ck_assert_uint_eq(worker(&b, 22)->applied, 0);
    ck_assert_uint_eq(worker(&b, 22)->held, 0);
    bed_close(&b);
}
END_TEST

START_TEST(an_instance_is_left_out_of_one_version_only)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit_with(&b, 1, "a", "rollout", 1);
    publish_all(&b, 1);
    plan_and_prepare(&b);
    step(&b, (struct refit_event){.type = REFIT_EV_FAILED,
                                  .node = {.node = 1,
                                           .attempt = b.r->attempt_high,
                                           .code = RS_EIO,
                                           .text = "its disk",
                                           .worker = 12}});
    (void)submit(&b, 2, "b", 2);
    quiesce(&b);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    (void)apply(&b, 11, 1, false);
    applied(&b, 11, 1, 0);
    publish_all(&b, 2);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert(worker(&b, 12)->taking_part);
    bed_close(&b);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(who_took_no_part_does_not_hold_what_was_committed_under_the_number)                          \
    X(a_node_whose_memory_differs_holds_nothing_whoever_it_was)                                    \
    X(who_feeds_from_live_memory_holds_nothing_new_by_it)                                          \
    X(an_instance_that_was_left_out_catches_up_after_the_commit)                                   \
    X(a_layout_that_the_policy_names_is_waited_for)                                                \
    X(no_nodes_failure_ends_what_has_been_staged)                                                  \
    X(an_epoch_that_can_not_be_recorded_ends_the_attempt)                                          \
    X(nothing_is_planned_while_the_epoch_is_being_written)                                         \
    X(a_turn_that_can_not_be_recorded_begins_nothing)                                              \
    X(what_a_node_that_has_failed_says_of_staged_counts_for_nothing)                               \
    X(nobody_catches_up_with_what_a_member_knows_not_to_be_the_newest)                             \
    X(who_applies_is_waited_for_and_said_to_apply)                                                 \
    X(a_node_that_is_lost_makes_a_new_epoch)                                                       \
    X(no_attempt_goes_to_a_node_that_is_silent)                                                    \
    X(a_worker_of_a_drained_node_stays_while_it_applies)                                           \
    X(a_layout_whose_workers_have_all_been_drained_is_not_waited_for)                              \
    X(a_turn_begins_once_its_attempt_is_durable)                                                   \
    X(a_verdict_counts_for_the_attempt_that_it_names)                                              \
    X(no_verdict_is_added_to_a_commit_that_is_being_written)                                       \
    X(live_memory_beyond_the_newest_commit_is_not_believed)                                        \
    X(an_instance_is_left_out_of_one_version_only)
#include "test/lib/main.h"
