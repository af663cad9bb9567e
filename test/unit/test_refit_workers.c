/* The decider and workers: who attaches, whom the policy can do without, what memory holds and who waits for it. */
#include "test/unit/test_refit_bed.h"

/* --- attaching --- */

START_TEST(a_rank_attaches_once)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    uint64_t twice = attach(&b, (struct attach){99, 1, REFIT_DESTINATION, "rollout", 1,
                                                REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, twice), RS_EEXIST);
    ck_assert_ptr_nonnull(strstr(answer(&b, twice)->text, "rollout/rank 1"));
    uint64_t resumed = attach(&b, (struct attach){12, 1, REFIT_DESTINATION, "rollout", 1,
                                                  REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, resumed), 0);
    uint64_t none = attach(&b, (struct attach){98, 1, REFIT_DESTINATION, "rollout", 2,
                                               REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, none), RS_EINVAL);
    ck_assert_int_eq(code(&b, attach(&b, (struct attach){97, 1, REFIT_DESTINATION, "eval", 0,
                                                         REFIT_STAGED_RECEIVE, true, 0, 0})),
                     RS_ENOTFOUND);
    bed_close(&b);
}
END_TEST

/* Worker 2 is a source's rank 1, worker 12 a destination's. */
static void resume(struct bed *b, uint64_t id, enum refit_receive receive)
{
    bool source = id < 10;
    ck_assert_int_eq(
        code(b, attach(b, (struct attach){id, !source, source ? REFIT_SOURCE : REFIT_DESTINATION,
                                          source ? "train" : "rollout", 1, receive, false, 0, 0})),
        0);
}

/* It is said once an attempt: to a stream that is broken just then, nobody hears it. */
START_TEST(who_resumes_is_asked_again_for_what_it_has_not_answered)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, false);
    (void)submit(&b, 1, "a", 1);
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 2);
    resume(&b, 2, REFIT_RECEIVE_NONE);
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 1);
    ck_assert_uint_eq(did(&b, REFIT_DO_TELL)->a.worker, 2);
    publish_all(&b, 1);
    resume(&b, 2, REFIT_RECEIVE_NONE);
    ck_assert_uint_eq(count(&b, REFIT_DO_TELL), 0);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    ck_assert_uint_eq(told(&b, REFIT_TELL_READY_REQUESTED), 2);
    resume(&b, 12, REFIT_IN_PLACE);
    ck_assert_uint_eq(told(&b, REFIT_TELL_READY_REQUESTED), 1);
    for (uint64_t id = 12; id >= 11; id--) {
        step(&b, (struct refit_event){.type = REFIT_EV_READY, .ready = {id, 1}});
        resume(&b, 12, REFIT_IN_PLACE);
        ck_assert_uint_eq(count(&b, REFIT_DO_TELL), 0);
    }
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_uint_eq(told(&b, REFIT_TELL_ACCEPT_REQUESTED), 2);
    resume(&b, 12, REFIT_IN_PLACE);
    ck_assert_uint_eq(told(&b, REFIT_TELL_ACCEPT_REQUESTED), 1);
    ck_assert_uint_eq(did(&b, REFIT_DO_TELL)->a.worker, 12);
    ck_assert_uint_eq(did(&b, REFIT_DO_TELL)->a.attempt, b.r->in_flight->attempt);
    (void)verdict(&b, 12, 1, true);
    resume(&b, 12, REFIT_IN_PLACE);
    ck_assert_uint_eq(count(&b, REFIT_DO_TELL), 0);
    (void)verdict(&b, 11, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(another_layout_is_refused_while_workers_hold_the_old_one)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    uint32_t of[3] = {0, 0, 0};
    uint8_t digest[16] = {77};
    struct refit_event ev = {.type = REFIT_EV_LAYOUT,
                             .cookie = 501,
                             .layout = {.side = REFIT_SOURCE,
                                        .name = "train",
                                        .digest = digest,
                                        .instance_of_rank = of,
                                        .n_ranks = 3,
                                        .n_instances = 1}};
    step(&b, ev);
    ck_assert_int_eq(code(&b, 501), RS_EPRECOND);
    leave(&b, 1, false);
    leave(&b, 2, false);
    ev.cookie = 502;
    step(&b, ev);
    ck_assert_int_eq(code(&b, 502), 0);
    ck_assert_uint_eq(refit_find_layout(b.r, REFIT_SOURCE, "train")->n_ranks, 3);
    bed_close(&b);
}
END_TEST

/* --- instances and policy --- */

START_TEST(a_rejection_aborts_with_its_reason_where_every_instance_must_accept)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    (void)verdict(&b, 11, 1, true);
    (void)verdict(&b, 12, 1, false);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_str_eq(refit_find_version(b.r, 1)->reason,
                     "rollout/instance 1 rejected: rank 1: perplexity rose");
    bed_close(&b);
}
END_TEST

START_TEST(a_second_verdict_may_not_differ)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    ck_assert_int_eq(code(&b, verdict(&b, 11, 1, true)), 0);
    ck_assert_int_eq(code(&b, verdict(&b, 11, 1, true)), 0);
    ck_assert_int_eq(code(&b, verdict(&b, 11, 1, false)), RS_EPRECOND);
    bed_close(&b);
}
END_TEST

START_TEST(the_policy_may_do_without_an_instance_that_rejects)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    submit_min(&b, 1, "a", 1);
    publish_all(&b, 1);
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
    (void)verdict(&b, 12, 1, false);
    ck_assert_int_eq(phase(&b, 1), REFIT_ACCEPTING);
    (void)verdict(&b, 11, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_int_eq(code(&b, apply(&b, 12, 1, false)), RS_EPRECOND);
    (void)apply(&b, 11, 1, false);
    applied(&b, 11, 1, 0);
    to_transfer(&b, 2, "b"); /* nobody waits for the one that rejected */
    ck_assert_int_eq(phase(&b, 2), REFIT_TRANSFERRING);
    bed_close(&b);
}
END_TEST

START_TEST(the_policy_may_do_without_an_instance_that_dies_in_the_transfer)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    submit_min(&b, 1, "a", 1);
    publish_all(&b, 1);
    plan_and_prepare(&b);
    leave(&b, 12, false);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED); /* by itself, without the trainer */
    ck_assert_uint_eq(b.r->attempt_high, 2);
    planned(&b);
    ck_assert_uint_eq(count(&b, REFIT_DO_PREPARE), 1);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(a_policy_beyond_the_layouts_instances_is_refused)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    struct refit_policy policy = {.layout_name = (char *)(uintptr_t) "rollout", .min_instances = 3};
    uint8_t content[16] = {1};
    struct refit_event ev = submit_event(1, "a", content);
    ev.submit.policies = &policy;
    ev.submit.n_policies = 1;
    ev.cookie = 77;
    step(&b, ev);
    ck_assert_int_eq(code(&b, 77), RS_EINVAL);
    bed_close(&b);
}
END_TEST

START_TEST(the_policy_may_do_without_an_instance_that_is_never_ready)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, true);
    submit_min(&b, 1, "a", 1);
    publish_all(&b, 1);
    plan_and_prepare(&b);
    ready(&b, 12, 1);
    tick(&b, 60000);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0); /* the trainer's */
    node_event(&b, REFIT_EV_PREPARED, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_TRANSFERRING); /* its Ready still holds */
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_EMPTY);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 12)), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

START_TEST(an_instance_that_needs_longer_is_waited_for_until_the_deadline)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_accepting(&b, 1, "a");
    (void)apply(&b, 11, 1, false);
    ck_assert_str_eq(refit_worker_doing(b.r, refit_find_worker(b.r, 11)), "applying");
    applied(&b, 11, 1, 0);
    submit_min(&b, 2, "b", 1); /* instance 1 has not applied version 1 */
    publish_all(&b, 2);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    tick(&b, 60000);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert(refit_find_worker(b.r, 11)->taking_part && !refit_find_worker(b.r, 12)->taking_part);
    bed_close(&b);
}
END_TEST

/* --- memory of workers --- */

START_TEST(a_version_is_not_prepared_over_one_that_waits_to_be_applied)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_accepting(&b, 1, "a");
    ck_assert_uint_eq(b.r->committed, 1);
    (void)submit(&b, 2, "b", 1);
    publish_all(&b, 2);
    ck_assert_int_eq(phase(&b, 2), REFIT_SUBMITTED);
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 2), "rollout/rank 0 (holds a committed version"));
    ck_assert_str_eq(refit_worker_doing(b.r, refit_find_worker(b.r, 11)), "waiting for Apply");
    (void)apply(&b, 11, 1, false);
    applied(&b, 11, 1, 0);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    ck_assert_int_eq(code(&b, apply(&b, 12, 1, true)), 0);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(apply_is_answered_when_done_and_may_be_repeated)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_accepting(&b, 1, "a");
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_EMPTY);
    uint64_t one = apply(&b, 11, 1, false), two = apply(&b, 11, 1, false);
    ck_assert_uint_eq(count(&b, REFIT_DO_APPLY), 0); /* the second asks for no second copy */
    ck_assert(answer(&b, one) == NULL && answer(&b, two) == NULL);
    applied(&b, 11, 1, RS_EDATALOSS);
    ck_assert(code(&b, one) == RS_EDATALOSS && code(&b, two) == RS_EDATALOSS);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_TORN);
    uint64_t three = apply(&b, 11, 1, false);
    applied(&b, 11, 1, 0);
    ck_assert_int_eq(code(&b, three), 0);
    ck_assert_uint_eq(answer(&b, three)->a.version, 1);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_CURRENT);
    ck_assert_int_eq(code(&b, apply(&b, 11, 1, false)), 0);
    ck_assert_int_eq(code(&b, apply(&b, 11, 2, false)), RS_EPRECOND);
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_LOST, .node = {.node = 1}});
    ck_assert_int_eq(code(&b, apply(&b, 12, 1, false)), RS_EUNAVAIL);
    node_up(&b, 1);
    uint64_t lost = apply(&b, 12, 1, false);
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_LOST, .node = {.node = 1}});
    ck_assert_int_eq(code(&b, lost), RS_EUNAVAIL);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 12)), REFIT_WORKER_TORN);
    node_up(&b, 1);
    uint64_t four = apply(&b, 12, 1, false);
    leave(&b, 12, false);
    ck_assert_int_eq(code(&b, four), RS_ECANCELED);
    bed_close(&b);
}
END_TEST

START_TEST(in_place_memory_is_written_only_after_ready)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, false);
    to_transfer(&b, 1, "a");
    ck_assert_int_eq(phase(&b, 1), REFIT_PREPARED);
    ck_assert_uint_eq(told(&b, REFIT_TELL_READY_REQUESTED), 2);
    ready(&b, 11, 1);
    ck_assert_ptr_null(did(&b, REFIT_DO_START));
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "rollout/rank 1 (Ready)"));
    ready(&b, 12, 1);
    ck_assert_uint_eq(count(&b, REFIT_DO_START), 2);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_TORN);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_UNCOMMITTED);
    node_failed(&b, 1, 0);
    quiesce(&b);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_UNCOMMITTED);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 12)), REFIT_WORKER_TORN);
    /* A retry moves nothing to the one that is whole and repairs the torn one. */
    (void)submit(&b, 1, "b", 1);
    publish_all(&b, 1);
    planned(&b);
    ck_assert(refit_holds_already(b.r, refit_find_worker(b.r, 11)));
    ck_assert(!refit_holds_already(b.r, refit_find_worker(b.r, 12)));
    both_say(&b, REFIT_EV_PREPARED);
    both_ready(&b, 1);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_UNCOMMITTED);
    both_say(&b, REFIT_EV_STAGED);
    (void)verdict(&b, 11, 1, true);
    (void)verdict(&b, 12, 1, true);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_CURRENT);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 12)), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

START_TEST(the_prepare_deadline_names_who_is_not_ready)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, true);
    to_transfer(&b, 1, "a");
    ready(&b, 11, 1);
    tick(&b, 60000);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 1)->reason, "rollout/rank 1 (Ready)"));
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_EMPTY);
    bed_close(&b);
}
END_TEST

/* A restarted engine is not to be taken for one that has weights. CASES B18. */
START_TEST(a_new_worker_is_empty_until_a_commit_in_its_own_life)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 7, "a");
    leave(&b, 12, false);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 12)), REFIT_WORKER_GONE);
    uint64_t cookie = attach(&b, (struct attach){13, 1, REFIT_DESTINATION, "rollout", 1,
                                                 REFIT_STAGED_RECEIVE, true, 0, 0});
    const struct seen *s = answer(&b, cookie);
    ck_assert_uint_eq(s->a.version, 7);              /* the model's */
    ck_assert(s->a.attempt == 0 && s->a.value == 0); /* held, applied: nothing */
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 13)), REFIT_WORKER_EMPTY);
    uint64_t applied_here;
    ck_assert_int_eq(refit_instance_state(b.r, refit_find_layout(b.r, REFIT_DESTINATION, "rollout"),
                                          1, &applied_here),
                     REFIT_WORKER_EMPTY);
    ck_assert_uint_eq(applied_here, 0);
    bed_close(&b);
}
END_TEST

START_TEST(sources_are_released_when_the_options_say)
{
    for (int at = REFIT_RELEASE_DEFAULT; at <= REFIT_RELEASE_COMMITTED; at++) {
        struct bed b;
        usual(&b, REFIT_STAGED_RECEIVE, false);
        uint8_t content[16] = {1};
        struct refit_event ev = submit_event(1, "a", content);
        ev.submit.release_at = (enum refit_release_at)at;
        step(&b, ev);
        struct err e;
        publish(&b, 1, 1, 11); /* its promise holds from here on, taking part or not */
        ck_assert_int_eq(refit_publish_check(b.r, 1, 2, &e), RS_EPRECOND);
        publish(&b, 2, 1, 12);
        plan_and_prepare(&b);
        ck_assert_int_eq(refit_publish_check(b.r, 1, 2, &e), RS_EPRECOND);
        ck_assert_int_eq(refit_publish_check(b.r, 1, 1, &e), 1);
        step(&b,
             (struct refit_event){
                 .type = REFIT_EV_PROGRESS,
                 .node = {.node = 0, .attempt = 1, .sources_read_ns = 1, .sources_known = true}});
        ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), at == REFIT_RELEASE_READ ? 2 : 0);
        both_say(&b, REFIT_EV_STAGED);
        bool staged = at == REFIT_RELEASE_DEFAULT || at == REFIT_RELEASE_STAGED;
        ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), staged ? 2 : 0);
        (void)verdict(&b, 11, 1, true);
        (void)verdict(&b, 12, 1, true);
        ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED),
                          at == REFIT_RELEASE_COMMITTED ? 2 : 0);
        ck_assert_int_eq(refit_publish_check(b.r, 1, 2, &e), 0);
        bed_close(&b);
    }
}
END_TEST

START_TEST(content_that_is_not_known_is_never_taken_for_held)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    publish(&b, 1, 1, 0); /* not fingerprinted */
    publish(&b, 2, 1, 0);
    plan_and_prepare(&b);
    node_event(&b, REFIT_EV_STAGED, 0);
    node_failed(&b, 1, 0);
    quiesce(&b);
    ck_assert_uint_eq(refit_find_worker(b.r, 11)->held, 1);
    (void)submit(&b, 1, "b", 1);
    publish_all(&b, 1);
    ck_assert_ptr_nonnull(b.r->in_flight);
    ck_assert_uint_ne(b.r->publication, 0);
    ck_assert(!refit_holds_already(b.r, refit_find_worker(b.r, 11)));
    bed_close(&b);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_rank_attaches_once)                                                                        \
    X(who_resumes_is_asked_again_for_what_it_has_not_answered)                                     \
    X(another_layout_is_refused_while_workers_hold_the_old_one)                                    \
    X(a_rejection_aborts_with_its_reason_where_every_instance_must_accept)                         \
    X(a_second_verdict_may_not_differ)                                                             \
    X(the_policy_may_do_without_an_instance_that_rejects)                                          \
    X(the_policy_may_do_without_an_instance_that_dies_in_the_transfer)                             \
    X(a_policy_beyond_the_layouts_instances_is_refused)                                            \
    X(the_policy_may_do_without_an_instance_that_is_never_ready)                                   \
    X(an_instance_that_needs_longer_is_waited_for_until_the_deadline)                              \
    X(a_version_is_not_prepared_over_one_that_waits_to_be_applied)                                 \
    X(apply_is_answered_when_done_and_may_be_repeated)                                             \
    X(in_place_memory_is_written_only_after_ready)                                                 \
    X(the_prepare_deadline_names_who_is_not_ready)                                                 \
    X(a_new_worker_is_empty_until_a_commit_in_its_own_life)                                        \
    X(sources_are_released_when_the_options_say)                                                   \
    X(content_that_is_not_known_is_never_taken_for_held)
#include "test/lib/main.h"
