/* The decider's attempts that commit nothing new: newcomers that catch up, rehearsals. */
#include "test/unit/test_refit_bed.h"

/* --- catching up --- */

/* Version 1 is committed and applied on instance 0 (worker 11, node 0); instance 1 has a new worker, 22 on node 1. */
static void newcomer(struct bed *b, enum refit_receive receive, bool feed)
{
    usual(b, receive, true);
    b->r->config.feed = feed;
    b->r->config.catch_up = true;
    to_transfer(b, 1, "a");
    for (uint64_t w = 11; w <= 12 && receive == REFIT_IN_PLACE; w++)
        ready(b, w, 1);
    both_say(b, REFIT_EV_STAGED);
    ck_assert_int_eq(phase(b, 1), REFIT_COMMITTED);
    if (receive == REFIT_STAGED_RECEIVE) {
        (void)apply(b, 11, 1, false);
        applied(b, 11, 1, 0);
    }
    leave(b, 12, false);
    (void)attach(b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1, receive, true, 0, 0});
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
    plan_and_prepare(&b);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 11)), REFIT_WORKER_CURRENT); /* it serves */
    size_t before = b.n_seen;
    both_say(&b, REFIT_EV_STAGED);
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
    plan_and_prepare(&b);
    ck_assert_uint_eq(told(&b, REFIT_TELL_READY_REQUESTED), 1);
    ck_assert_int_eq(b.r->in_flight->phase.state, REFIT_PREPARED);
    ready(&b, 22, 1);
    ck_assert_int_eq(b.r->in_flight->phase.state, REFIT_TRANSFERRING);
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_uint_eq(told(&b, REFIT_TELL_COMMITTED), 1);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 22)), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

START_TEST(a_catch_up_gives_way_to_a_newer_version)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    plan_and_prepare(&b);
    uint64_t cookie = submit(&b, 2, "b", 1);
    ck_assert_int_eq(code(&b, cookie), 0);
    ck_assert_int_eq(b.r->in_flight->phase.state, REFIT_ABORTING);
    publish_all(&b, 2);
    quiesce(&b);
    ck_assert_uint_eq(b.r->in_flight->version, 2);
    ck_assert_int_eq(b.r->in_flight->kind, REFIT_KIND_REFIT);
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_int_eq(phase(&b, 2), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(what_a_newcomer_holds_of_a_catch_up_that_gave_way_holds_up_nobody)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, true);
    refit_find_worker(b.r, 22)->accept_automatically = false;
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED); /* it is asked, and does not answer */
    ck_assert_uint_eq(worker(&b, 22)->held, 1);
    (void)submit(&b, 2, "b", 1);
    quiesce(&b);
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
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
    (void)submit(&b, 2, "b", 1);
    quiesce(&b);
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
    plan_and_prepare(&b);
    struct err e = {0};
    ck_assert_int_eq(refit_publish_check(b.r, 1, 2, &e), RS_EUNAVAIL); /* it is read just now */
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    ck_assert(worker(&b, 1)->released && worker(&b, 2)->released);
    ck_assert_int_eq(refit_publish_check(b.r, 1, 2, &e), 0);
    bed_close(&b);
}
END_TEST

/* A push of what is committed already, by one that has restarted or lost count: what it waits for is its memory. */
START_TEST(a_trainer_that_publishes_and_submits_the_committed_version_again_has_its_memory_back)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    publish_all(&b, 1);
    ck_assert(!worker(&b, 1)->released && !worker(&b, 2)->released); /* it stands by to feed */
    ck_assert_int_eq(code(&b, submit(&b, 1, "b", 1)), 0);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    ck_assert(worker(&b, 1)->released && worker(&b, 2)->released);
    for (uint64_t w = 1; w <= 2; w++) { /* and again, each when it comes */
        publish(&b, w, 1, 10 + w);
        ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 1);
        ck_assert_uint_eq(told(&b, REFIT_TELL_ABORTED), 0);
        ck_assert(worker(&b, w)->released);
    }
    bed_close(&b);
}
END_TEST

static void trainer_restarts(struct bed *b)
{
    for (uint32_t rank = 0; rank < 2; rank++) {
        leave(b, 1 + rank, false);
        (void)attach(b, (struct attach){31 + rank, 0, REFIT_SOURCE, "train", rank,
                                        REFIT_RECEIVE_NONE, false, 0, 0});
    }
}

START_TEST(a_trainer_that_restarts_and_submits_the_committed_version_again_feeds_first)
{
    struct bed b;
    newcomer(&b, REFIT_STAGED_RECEIVE, false);
    trainer_restarts(&b);
    publish(&b, 31, 1, 11);
    ck_assert_int_eq(code(&b, submit(&b, 1, "b", 1)), 0);
    ck_assert_ptr_null(b.r->in_flight);
    ck_assert(!worker(&b, 31)->released); /* the other has not published yet */
    publish(&b, 32, 1, 12);
    ck_assert_ptr_nonnull(b.r->in_flight);
    ck_assert_int_eq(b.r->in_flight->kind, REFIT_KIND_CATCH_UP);
    plan_and_prepare(&b);
    ck_assert(!worker(&b, 31)->released && !worker(&b, 32)->released); /* it is read */
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_uint_eq(worker(&b, 22)->held, 1);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    bed_close(&b);
}
END_TEST

START_TEST(a_trainer_that_submits_the_committed_version_again_with_other_weights_is_told_so)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    trainer_restarts(&b);
    publish(&b, 31, 1, 11);
    ck_assert_int_eq(code(&b, submit(&b, 1, "b", 1)), 0); /* nobody can tell yet */
    ck_assert(!worker(&b, 31)->released);
    publish(&b, 32, 1, 99);
    ck_assert_uint_eq(told(&b, REFIT_TELL_ABORTED), 2);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    publish(&b, 31, 1, 11);
    says(&b, submit(&b, 1, "c", 1), RS_EEXIST, "with other weights");
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
        plan_and_prepare(&b);
        node_failed(&b, 1, 22);
        quiesce(&b);
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
    quiesce(&b);
    (void)attach(&b, (struct attach){23, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     false, 0, 0});
    tick(&b, 1000);
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
    (void)verdict(&b, 23, 1, false);
    quiesce(&b);
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
    quiesce(&b);
    ck_assert_ptr_nonnull(b.r->in_flight); /* nobody is put off: it was not the newcomer */
    ck_assert_uint_eq(b.r->in_flight->attempt, 3);
    ck_assert_int_eq(worker(&b, 11)->feeding, REFIT_FEED_LIVE);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 11)), REFIT_WORKER_CURRENT);
    planned(&b);
    node_failed(&b, 0, 11); /* that is wrong, too */
    quiesce(&b);
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
    quiesce(&b);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 11)), REFIT_WORKER_TORN);
    ck_assert_ptr_null(b.r->in_flight);
    publish_all(&b, 1); /* the trainer has it */
    ck_assert_ptr_nonnull(b.r->in_flight);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 11)), REFIT_ROLE_RECEIVES);
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 22)), REFIT_ROLE_RECEIVES);
    plan_and_prepare(&b);
    ready(&b, 11, 1);
    ready(&b, 22, 1);
    both_say(&b, REFIT_EV_STAGED);
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
    plan_and_prepare(&b);
    both_ready(&b, 1);
    ck_assert_int_eq(code(&b, submit(&b, 1, "real", 1)), RS_EPRECOND);
    both_say(&b, REFIT_EV_STAGED);
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
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
    (void)verdict(&b, 11, 4, true);
    (void)verdict(&b, 12, 4, false);
    quiesce(&b);
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
        to_accepting(&b, 1, "a");
        leave(&b, 12, false);
        (void)attach(&b, (struct attach){22, 1, REFIT_DESTINATION, "rollout", 1,
                                         REFIT_STAGED_RECEIVE, true, 0, 0});
        plan_and_prepare(&b);
        both_say(&b, REFIT_EV_STAGED);
        (void)drain(&b, 1, true);
        ck_assert_uint_eq(b.r->n_caught_up, 1);
        struck = b.struck;
        bed_close(&b);
        ck_assert_int_lt(i, 100);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_newcomer_gets_the_newest_committed_version_from_a_replica_by_itself)                       \
    X(nobody_feeds_a_newcomer_while_it_applies)                                                    \
    X(a_newcomer_in_place_is_asked_to_pause_and_told_that_it_may_serve)                            \
    X(a_catch_up_gives_way_to_a_newer_version)                                                     \
    X(what_a_newcomer_holds_of_a_catch_up_that_gave_way_holds_up_nobody)                           \
    X(a_newcomer_that_has_the_bytes_already_is_asked_again_without_any)                            \
    X(a_trainer_that_has_published_the_committed_version_again_feeds_a_newcomer)                   \
    X(a_trainer_that_publishes_and_submits_the_committed_version_again_has_its_memory_back)        \
    X(a_trainer_that_restarts_and_submits_the_committed_version_again_feeds_first)                 \
    X(a_trainer_that_submits_the_committed_version_again_with_other_weights_is_told_so)            \
    X(a_trainer_that_is_about_to_publish_something_else_feeds_nobody)                              \
    X(a_trainer_with_other_weights_feeds_nobody)                                                   \
    X(a_catch_up_that_fails_is_tried_again_each_time_later)                                        \
    X(what_a_newcomer_rejects_it_is_not_given_again)                                               \
    X(a_feeder_whose_shadow_is_wrong_feeds_from_live_memory_at_once)                               \
    X(a_feeder_in_place_that_is_wrong_is_torn_and_brought_up_with_the_newcomer)                    \
    X(without_the_setting_nobody_catches_up)                                                       \
    X(a_rehearsal_commits_nothing_and_gives_its_number_back)                                       \
    X(a_rehearsal_that_one_rejects_ends_with_its_reason)                                           \
    X(a_rehearsal_is_refused_while_anything_is_on_its_way_and_on_a_number_that_is_taken)           \
    X(a_destination_hears_that_what_it_waits_for_is_over_after_a_restart)                          \
    X(rehearsal_catch_up_and_feeding_survive_every_failed_allocation)
#include "test/lib/main.h"
