/* The decider, event by event. What it must do stands in refit.h, and the phases' invariants in phase.c. */
#include "refit/refit.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "test/unit/test_refit_bed.h"

/* --- submit --- */

START_TEST(submit_is_answered_only_when_it_is_durable)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.hold = true;
    uint64_t cookie = submit(&b, 1, "a", 1);
    const struct seen *p = did(&b, REFIT_DO_PERSIST);
    ck_assert_ptr_nonnull(p);
    ck_assert_ptr_null(answer(&b, cookie));
    ck_assert_ptr_null(did(&b, REFIT_DO_NOTIFY));
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 0);
    written(&b, p->a.sequence, 0);
    ck_assert_int_eq(code(&b, cookie), 0);
    ck_assert_uint_eq(answer(&b, cookie)->a.attempt, 1);
    ck_assert_uint_eq(told(&b, REFIT_TELL_PUBLISH_REQUESTED), 2);
    bed_close(&b);
}
END_TEST

START_TEST(submit_on_a_full_disk_is_refused_and_leaves_nothing)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.hold = true;
    uint64_t cookie = submit(&b, 1, "a", 1);
    written(&b, did(&b, REFIT_DO_PERSIST)->a.sequence, RS_EFULL);
    ck_assert_int_eq(code(&b, cookie), RS_EFULL);
    ck_assert_ptr_nonnull(strstr(answer(&b, cookie)->text, "disk full"));
    ck_assert_int_eq(phase(&b, 1), REFIT_NONE);
    b.hold = false;
    ck_assert_int_eq(code(&b, submit(&b, 1, "a", 2)), 0); /* even with other content */
    bed_close(&b);
}
END_TEST

/* The same version twice, again after its commit, two at the same instant; then other content. CASES E07. */
START_TEST(same_content_gets_the_same_answer_and_other_content_is_refused)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.hold = true; /* two at the same instant */
    uint64_t first = submit(&b, 5, "a", 1);
    uint64_t one = did(&b, REFIT_DO_PERSIST)->a.sequence;
    uint64_t racer = submit(&b, 5, "b", 1);
    uint64_t two = did(&b, REFIT_DO_PERSIST)->a.sequence;
    uint64_t again = submit(&b, 5, "a", 1);
    b.hold = false;
    written(&b, one, 0);
    written(&b, two, 0);
    ck_assert(code(&b, first) == 0 && code(&b, racer) == 0 && code(&b, again) == 0);
    ck_assert_uint_eq(answer(&b, first)->a.attempt, 1);
    ck_assert_uint_eq(answer(&b, racer)->a.attempt, 1);
    ck_assert_uint_eq(answer(&b, again)->a.attempt, 1);
    ck_assert_int_eq(code(&b, submit(&b, 5, "c", 2)), RS_EEXIST);
    ck_assert_int_eq(code(&b, submit(&b, 5, "a", 2)), RS_EEXIST);
    ck_assert_int_eq(code(&b, submit(&b, 6, "a", 1)), RS_EEXIST); /* the id is of version 5 */
    publish_all(&b, 5);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_int_eq(phase(&b, 5), REFIT_COMMITTED);
    uint64_t late = submit(&b, 5, "a", 1), other = submit(&b, 5, "d", 1);
    ck_assert_uint_eq(answer(&b, late)->a.attempt, 1);
    ck_assert_int_eq((int)answer(&b, late)->a.phase, (int)answer(&b, first)->a.phase);
    ck_assert_int_eq(code(&b, other), 0);
    ck_assert_int_eq((int)answer(&b, other)->a.phase, REFIT_COMMITTED);
    ck_assert_int_eq(code(&b, submit(&b, 5, "e", 3)), RS_EEXIST);
    ck_assert_uint_eq(b.r->attempt_high, 1);
    publish(&b, 1, 5, 99); /* other weights under the same number */
    publish(&b, 2, 5, 52);
    ck_assert_int_eq(code(&b, submit(&b, 5, "f", 1)), RS_EEXIST);
    ck_assert_int_eq(code(&b, submit(&b, 5, "d", 1)), 0);
    bed_close(&b);
}
END_TEST

START_TEST(content_that_is_not_known_may_be_tried_again)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 5, "a", 1);
    publish(&b, 1, 5, 0);
    publish(&b, 2, 5, 0);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    node_failed(&b, 1, 0);
    quiesce(&b);
    ck_assert_int_eq(code(&b, submit(&b, 5, "b", 1)), 0);
    publish(&b, 1, 5, 0);
    publish(&b, 2, 5, 0);
    planned(&b);
    ck_assert_int_ne(phase(&b, 5), REFIT_ABORTED);
    bed_close(&b);
}
END_TEST

/* 5, 7, then 6. CASES E08. */
START_TEST(versions_grow_with_gaps_and_a_refusal_names_the_newest)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(code(&b, submit(&b, 0, "z", 1)), RS_EINVAL);
    ck_assert_int_eq(code(&b, submit(&b, UINT64_C(1) << 63, "z", 1)), RS_EINVAL);
    whole(&b, 5, "a");
    whole(&b, 7, "b");
    uint64_t six = submit(&b, 6, "c", 1), five = submit(&b, 5, "d", 1);
    ck_assert_int_eq(code(&b, six), RS_EPRECOND);
    ck_assert_str_eq(answer(&b, six)->text, "version 6 is not above 7, which is committed");
    ck_assert_int_eq(code(&b, five), RS_EPRECOND);
    ck_assert_uint_eq(b.r->committed, 7);
    ck_assert_int_eq(code(&b, submit(&b, REFIT_VERSION_MAX, "e", 1)), 0);
    uint64_t low = submit(&b, 9, "f", 1); /* the greatest is in flight */
    ck_assert_int_eq(code(&b, low), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(answer(&b, low)->text, "in flight"));
    bed_close(&b);
}
END_TEST

START_TEST(a_queued_version_is_superseded_by_a_newer_one)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    uint64_t queued = submit(&b, 2, "b", 1);
    ck_assert_uint_eq(answer(&b, queued)->a.attempt, 0);
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 2), "version 1"));
    (void)submit(&b, 3, "c", 1);
    ck_assert_int_eq(phase(&b, 2), REFIT_SUPERSEDED);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 2)->reason, "3"));
    ck_assert_uint_eq(b.r->n_superseded, 1);
    ck_assert_ptr_eq(b.r->queued, refit_find_version(b.r, 3));
    (void)abort_version(&b, 1);
    ck_assert_ptr_eq(b.r->in_flight, refit_find_version(b.r, 3));
    bed_close(&b);
}
END_TEST

/* --- the way to the commit --- */

START_TEST(a_refit_goes_through_every_phase_in_order)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    (void)verdict(&b, 11, 1, true);
    ck_assert_int_eq(phase(&b, 1), REFIT_ACCEPTING);
    (void)verdict(&b, 12, 1, true);
    static const enum refit_phase order[] = {REFIT_SUBMITTED,    REFIT_PLANNED, REFIT_PREPARED,
                                             REFIT_TRANSFERRING, REFIT_STAGED,  REFIT_ACCEPTING,
                                             REFIT_COMMITTED};
    size_t at = 0;
    for (size_t i = 0; i < b.n_seen; i++)
        if (b.seen[i].a.type == REFIT_DO_NOTIFY) {
            ck_assert_uint_lt(at, 7);
            ck_assert_int_eq((int)b.seen[i].a.phase, (int)order[at++]);
        }
    ck_assert_uint_eq(at, 7);
    ck_assert_uint_eq(refit_find_version(b.r, 1)->bytes.landed, 20); /* both nodes */
    ck_assert_uint_eq(refit_find_version(b.r, 1)->bytes.total, 100);
    bed_close(&b);
}
END_TEST

START_TEST(nothing_is_planned_before_attempt_and_epoch_are_durable)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    publish_all(&b, 1);
    b.hold = true;
    (void)submit(&b, 1, "a", 1);
    const struct seen *p = did(&b, REFIT_DO_PERSIST);
    ck_assert_uint_eq(p->model_attempt, 1);
    written(&b, p->a.sequence, 0);
    ck_assert_ptr_null(did(&b, REFIT_DO_PLAN));
    p = did(&b, REFIT_DO_PERSIST); /* the epoch */
    ck_assert_ptr_nonnull(p);
    written(&b, p->a.sequence, 0);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert_uint_eq(did(&b, REFIT_DO_PLAN)->a.epoch, 1);
    bed_close(&b);
}
END_TEST

START_TEST(a_second_version_of_the_same_membership_keeps_its_epoch)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    whole(&b, 2, "b");
    ck_assert_uint_eq(refit_find_version(b.r, 2)->epoch, 1);
    leave(&b, 12, false);
    (void)attach(&b, (struct attach){13, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                     true, 0, 0});
    to_accepting(&b, 3, "c"); /* workers 11 and 13 accept by themselves */
    ck_assert_int_eq(phase(&b, 3), REFIT_COMMITTED);
    ck_assert_uint_eq(refit_find_version(b.r, 3)->epoch, 2);
    bed_close(&b);
}
END_TEST

/* The decision is durable, with its acceptances, before anyone hears of it. CASES E06. */
START_TEST(a_commit_is_told_only_after_it_is_durable)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    (void)verdict(&b, 11, 1, true);
    b.hold = true;
    (void)verdict(&b, 12, 1, true);
    const struct seen *p = did(&b, REFIT_DO_PERSIST);
    ck_assert_ptr_nonnull(p);
    ck_assert_uint_eq(p->version.phase, REFIT_COMMITTED);
    ck_assert_uint_eq(p->model_committed, 1);
    ck_assert_uint_eq(p->n_acceptances, 2);
    ck_assert_ptr_null(did(&b, REFIT_DO_COMMITTED));
    ck_assert_uint_eq(told(&b, REFIT_TELL_COMMITTED), 0);
    ck_assert_uint_eq(b.r->committed, 0);
    uint64_t abort = abort_version(&b, 1); /* too late or not: the ledger says */
    leave(&b, 12, false);
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_LOST, .node = {.node = 1}});
    tick(&b, 1000000);
    ck_assert_ptr_null(answer(&b, abort));
    written(&b, p->a.sequence, 0);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_COMMITTED));
    ck_assert_uint_eq(told(&b, REFIT_TELL_COMMITTED), 3); /* all that live */
    ck_assert_int_eq(code(&b, abort), RS_EPRECOND);
    ck_assert_uint_eq(b.r->committed, 1);
    bed_close(&b);
}
END_TEST

START_TEST(a_commit_that_can_not_be_written_aborts_and_the_version_stays_what_it_was)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    to_transfer(&b, 2, "b");
    node_event(&b, REFIT_EV_STAGED, 0);
    b.hold = true;
    node_event(&b, REFIT_EV_STAGED, 1);
    uint64_t sequence = did(&b, REFIT_DO_PERSIST)->a.sequence;
    b.hold = false;
    written(&b, sequence, RS_EFULL);
    ck_assert_int_eq(phase(&b, 2), REFIT_ABORTING);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 2), REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 2)->reason, "disk full"));
    ck_assert_uint_eq(b.r->committed, 1);
    to_transfer(&b, 3, "c");
    ck_assert_int_eq(phase(&b, 3), REFIT_TRANSFERRING);
    bed_close(&b);
}
END_TEST

/* v1 to both, v2 to one, v3 to both: a barrier of one version must not hold up the next. CASES B13. */
START_TEST(versions_to_changing_sets_of_receivers_all_commit)
{
    struct bed b;
    bed_init(&b);
    layout(&b, REFIT_SOURCE, "train", 1, 1);
    layout(&b, REFIT_DESTINATION, "a", 1, 1);
    layout(&b, REFIT_DESTINATION, "b", 1, 1);
    node_up(&b, 0);
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    for (uint64_t version = 1; version <= 3; version++) {
        char id[8];
        (void)snprintf(id, sizeof id, "r%u", (unsigned)version);
        if (version == 1)
            (void)attach(
                &b, (struct attach){11, 0, REFIT_DESTINATION, "a", 0, REFIT_IN_PLACE, true, 0, 0});
        if (version != 2)
            (void)attach(&b, (struct attach){20 + version, 0, REFIT_DESTINATION, "b", 0,
                                             REFIT_IN_PLACE, true, 0, 0});
        else
            leave(&b, 21, true);
        (void)submit(&b, version, id, 1);
        publish(&b, 1, version, version);
        planned(&b);
        node_event(&b, REFIT_EV_PREPARED, 0);
        ready(&b, 11, version);
        if (version != 2)
            ready(&b, 20 + version, version);
        node_event(&b, REFIT_EV_STAGED, 0);
        ck_assert_int_eq(phase(&b, version), REFIT_COMMITTED);
    }
    bed_close(&b);
}
END_TEST

/* --- failure --- */

/* Four receivers on four nodes, one fails in the middle. CASES B14. */
START_TEST(one_receivers_failure_reaches_all_and_the_next_version_is_fine)
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
        (void)attach(&b, (struct attach){11 + n, n, REFIT_DESTINATION, "rollout", n,
                                         REFIT_STAGED_RECEIVE, true, 0, 0});
    for (uint64_t version = 1; version <= 2; version++) {
        (void)submit(&b, version, version == 1 ? "a" : "b", 1);
        publish(&b, 1, version, version);
        planned(&b);
        for (uint32_t n = 0; n < 4; n++)
            node_event(&b, REFIT_EV_PREPARED, n);
        ck_assert_int_eq(phase(&b, version), REFIT_TRANSFERRING);
        if (version == 2)
            break;
        node_event(&b, REFIT_EV_STAGED, 0);
        node_failed(&b, 2, 0);
        ck_assert_uint_eq(count(&b, REFIT_DO_ABORT), 4);
        for (uint32_t n = 0; n < 4; n++) {
            ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
            node_event(&b, REFIT_EV_QUIESCED, n);
        }
        ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
        ck_assert_uint_eq(told(&b, REFIT_TELL_ABORTED), 5);
        ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 1);
        ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 1)->reason, "[0, 4): differs"));
        ck_assert_uint_eq(b.r->committed, 0);
    }
    for (uint32_t n = 0; n < 4; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_uint_eq(b.r->committed, 2);
    bed_close(&b);
}
END_TEST

/* The aborted attempt can't be committed; a new one may. CASES B16. */
START_TEST(a_failed_attempt_can_not_be_accepted_and_needs_no_reset)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    whole(&b, 4, "a");
    to_transfer(&b, 5, "b");
    node_failed(&b, 1, 0);
    quiesce(&b);
    uint64_t cookie = verdict(&b, 11, 5, true);
    ck_assert_int_eq(code(&b, cookie), RS_EABORTED);
    ck_assert_ptr_nonnull(strstr(answer(&b, cookie)->text, "differs"));
    ck_assert_uint_eq(b.r->committed, 4);
    whole(&b, 6, "c");
    ck_assert_uint_eq(b.r->committed, 6);
    ck_assert_int_eq(code(&b, submit(&b, 5, "d", 1)), RS_EPRECOND); /* can't be committed later */
    bed_close(&b);
}
END_TEST

START_TEST(an_aborted_version_is_tried_again_under_a_new_attempt_id)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_transfer(&b, 5, "a");
    node_failed(&b, 1, 0);
    quiesce(&b);
    ck_assert_uint_eq(answer(&b, submit(&b, 5, "a", 1))->a.attempt, 1); /* the old answer */
    ck_assert_ptr_null(b.r->in_flight);
    whole(&b, 5, "b");
    ck_assert_uint_eq(b.r->committed, 5);
    ck_assert_uint_eq(refit_find_version(b.r, 5)->attempt, 2);
    ck_assert_uint_eq(refit_find_version(b.r, 5)->n_attempts, 2);
    bed_close(&b);
}
END_TEST

START_TEST(a_retry_with_other_published_content_is_refused)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_transfer(&b, 5, "a");
    node_failed(&b, 1, 0);
    quiesce(&b);
    (void)submit(&b, 5, "b", 1);
    publish(&b, 1, 5, 51);
    publish(&b, 2, 5, 99);
    ck_assert_int_eq(phase(&b, 5), REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 5)->reason, "other content"));
    bed_close(&b);
}
END_TEST

START_TEST(events_of_an_older_attempt_change_nothing)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_transfer(&b, 1, "a");
    node_failed(&b, 1, 0);
    quiesce(&b);
    to_transfer(&b, 1, "b");
    static const enum refit_event_type late[] = {
        REFIT_EV_PREPARED, REFIT_EV_STAGED, REFIT_EV_FAILED, REFIT_EV_QUIESCED, REFIT_EV_PROGRESS};
    for (size_t i = 0; i < sizeof late / sizeof *late; i++) {
        step(&b,
             (struct refit_event){.type = late[i], .node = {.node = 0, .attempt = 1, .code = -1}});
        ck_assert_uint_eq(b.u.n_actions, 0);
        ck_assert_int_eq(phase(&b, 1), REFIT_TRANSFERRING);
    }
    bed_close(&b);
}
END_TEST

START_TEST(no_next_attempt_before_every_node_is_quiet_or_dead)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    (void)submit(&b, 2, "b", 1);
    node_failed(&b, 0, 0);
    node_event(&b, REFIT_EV_QUIESCED, 0);
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "node 1"));
    ck_assert_ptr_eq(b.r->queued, refit_find_version(b.r, 2));
    tick(&b, 5000);
    ck_assert_uint_eq(count(&b, REFIT_DO_EXPEL), 1);
    ck_assert_uint_eq(did(&b, REFIT_DO_EXPEL)->a.node, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING); /* not before it is known to be dead */
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_LOST, .node = {.node = 1}});
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_ptr_eq(b.r->in_flight, refit_find_version(b.r, 2));
    bed_close(&b);
}
END_TEST

/* CASES B19: no deadline. */
START_TEST(the_prepare_deadline_names_who_has_not_published)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    publish(&b, 1, 1, 11);
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "train/rank 1"));
    ck_assert_ptr_null(strstr(waiting_for(&b, 1), "train/rank 0"));
    const struct refit_version *v = refit_find_version(b.r, 1);
    ck_assert_uint_le(b.r->deadline_ns, b.now_ns + 60000 * MS);
    tick(&b, 60000);
    ck_assert_int_eq(v->phase.state, REFIT_ABORTED);
    ck_assert_int_eq(v->code, RS_EDEADLINE);
    ck_assert_ptr_nonnull(strstr(v->reason, "train/rank 1 (has not published"));
    ck_assert_ptr_null(strstr(v->reason, "train/rank 0"));
    bed_close(&b);
}
END_TEST

START_TEST(a_tick_that_comes_too_early_sets_the_deadline_anew)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    publish(&b, 1, 1, 11);
    uint64_t due_ns = b.r->deadline_ns;
    b.now_ns = due_ns - 100 * MS;
    tick(&b, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_SET_DEADLINE));
    ck_assert_uint_eq(did(&b, REFIT_DO_SET_DEADLINE)->a.at_ns, due_ns);
    b.now_ns = due_ns;
    tick(&b, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    bed_close(&b);
}
END_TEST

START_TEST(the_accept_deadline_names_who_has_not_answered)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    (void)verdict(&b, 11, 1, true);
    tick(&b, 60000);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 1)->reason, "rollout/rank 1 (Accept)"));
    ck_assert_ptr_null(strstr(refit_find_version(b.r, 1)->reason, "rank 0"));
    bed_close(&b);
}
END_TEST

START_TEST(a_destination_that_dies_in_the_transfer_ends_the_attempt)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    leave(&b, 12, false);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    ck_assert(refit_worker_busy(b.r, refit_find_worker(b.r, 12)));
    uint64_t back = attach(&b, (struct attach){13, 1, REFIT_DESTINATION, "rollout", 1,
                                               REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_int_eq(code(&b, back), RS_EUNAVAIL); /* its memory is still written to */
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_ptr_nonnull(
        strstr(refit_find_version(b.r, 1)->reason, "rollout/rank 1 left: process ended"));
    bed_close(&b);
}
END_TEST

START_TEST(a_source_that_dies_matters_only_until_it_is_read)
{
    for (int read = 0; read < 2; read++) {
        struct bed b;
        usual(&b, REFIT_STAGED_RECEIVE, true);
        to_transfer(&b, 1, "a");
        if (read == 1)
            step(&b, (struct refit_event){.type = REFIT_EV_PROGRESS,
                                          .node = {.node = 0,
                                                   .attempt = 1,
                                                   .sources_read_ns = b.now_ns,
                                                   .sources_known = true}});
        leave(&b, 2, false);
        ck_assert_int_eq(phase(&b, 1), read == 1 ? REFIT_TRANSFERRING : REFIT_ABORTING);
        bed_close(&b);
    }
}
END_TEST

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

static void submit_min(struct bed *b, uint64_t version, const char *id, uint32_t min)
{
    struct refit_policy policy = {.layout_name = (char *)(uintptr_t) "rollout",
                                  .min_instances = min};
    uint8_t content[16] = {1};
    struct refit_event ev = submit_event(version, id, content);
    ev.submit.policies = &policy;
    ev.submit.n_policies = 1;
    ev.cookie = ++b->next_cookie;
    step(b, ev);
    ck_assert_int_eq(code(b, ev.cookie), 0);
}

START_TEST(the_policy_may_do_without_an_instance_that_rejects)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    submit_min(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
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
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
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
    (void)submit(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_PREPARED, 1);
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
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_PREPARED, 1);
    ready(&b, 11, 1);
    ready(&b, 12, 1);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_UNCOMMITTED);
    node_event(&b, REFIT_EV_STAGED, 0);
    node_event(&b, REFIT_EV_STAGED, 1);
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
        planned(&b);
        node_event(&b, REFIT_EV_PREPARED, 0);
        node_event(&b, REFIT_EV_PREPARED, 1);
        ck_assert_int_eq(refit_publish_check(b.r, 1, 2, &e), RS_EPRECOND);
        ck_assert_int_eq(refit_publish_check(b.r, 1, 1, &e), 1);
        step(&b,
             (struct refit_event){
                 .type = REFIT_EV_PROGRESS,
                 .node = {.node = 0, .attempt = 1, .sources_read_ns = 1, .sources_known = true}});
        ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), at == REFIT_RELEASE_READ ? 2 : 0);
        node_event(&b, REFIT_EV_STAGED, 0);
        node_event(&b, REFIT_EV_STAGED, 1);
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

/* --- operator, restart --- */

START_TEST(abort_answers_when_the_version_has_ended)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(code(&b, abort_version(&b, 0)), RS_EPRECOND);
    ck_assert_int_eq(code(&b, abort_version(&b, 3)), RS_ENOTFOUND);
    whole(&b, 1, "a");
    ck_assert_int_eq(code(&b, abort_version(&b, 1)), RS_EPRECOND); /* committed */
    to_transfer(&b, 2, "b");
    (void)submit(&b, 3, "c", 1);
    uint64_t queued = abort_version(&b, 3);
    ck_assert_int_eq(code(&b, queued), 0);
    ck_assert_int_eq(phase(&b, 3), REFIT_ABORTED);
    uint64_t flying = abort_version(&b, 0);
    ck_assert_ptr_null(answer(&b, flying));
    quiesce(&b);
    ck_assert_int_eq(code(&b, flying), 0);
    ck_assert_uint_eq(answer(&b, flying)->a.version, 2);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 2)->reason, "by hand"));
    ck_assert_int_eq(code(&b, abort_version(&b, 2)), 0); /* it is aborted */
    bed_close(&b);
}
END_TEST

static void restored(struct bed *b, const struct ledger_record *rows, size_t n)
{
    bed_init(b);
    for (size_t i = 0; i < n; i++)
        ck_assert_int_eq(refit_restore(b->r, &rows[i], NULL), 0);
    step(b, (struct refit_event){.type = REFIT_EV_RESTORED});
}

static const char *submit_words(struct bed *b, uint64_t version, const char *id, uint8_t digit,
                                const char *words)
{
    uint8_t content[16] = {digit};
    struct refit_event ev = submit_event(version, id, content);
    ev.cookie = ++b->next_cookie;
    ev.submit.words = words;
    step(b, ev);
    return answer(b, ev.cookie)->text;
}

/* An operator asks for a version while only receivers are there; then the trainer comes, and submits it as well. */
START_TEST(a_version_that_was_submitted_before_its_trainer_came_is_the_trainers)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_str_eq(submit_words(&b, 3, "a", 1, "destination layout 'd' (02)\nverify off\n"), "");
    const char *full = "source layout 't' (01)\ndestination layout 'd' (02)\nverify off\n";
    ck_assert_ptr_nonnull(
        strstr(submit_words(&b, 3, "b", 2, "source layout 't' (01)\ndestination layout 'd' (03)\n"),
               "other content")); /* what was known then has changed */
    ck_assert_str_eq(submit_words(&b, 3, "c", 3, full), "");
    ck_assert_ptr_nonnull(
        strstr(submit_words(&b, 3, "g", 5,
                            "source layout 't' (01)\ndestination layout 'd' (02)\n"
                            "destination layout 'e' (05)\nverify off\n"),
               "other content")); /* once its source is known it stays what it is */
    ck_assert_str_eq(submit_words(&b, 3, "a", 3, full), ""); /* the operator's again */
    ck_assert_str_eq(
        submit_words(&b, 3, "d", 4,
                     "source layout 'u' (04)\ndestination layout 'd' (02)\nverify off\n"),
        "version 3 was submitted and is SUBMITTED, with other content (then source "
        "layout 't' (01); now source layout 'u' (04)); use a new version");
    publish(&b, 1, 3, 5);
    publish(&b, 2, 3, 6);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_int_eq(phase(&b, 3), REFIT_COMMITTED);
    ck_assert_str_eq(submit_words(&b, 3, "e", 3, full), "");
    ck_assert_ptr_nonnull(strstr(
        submit_words(&b, 3, "f", 1, "destination layout 'd' (02)\nverify off\n"), "other content"));
    bed_close(&b);
}
END_TEST

START_TEST(other_content_is_refused_by_what_differs)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_str_eq(submit_words(&b, 3, "a", 1, "source layout 't' (01)\nverify off\n"), "");
    ck_assert_str_eq(submit_words(&b, 3, "b", 2, "source layout 't' (01)\nrelease at read\n"),
                     "version 3 was submitted and is SUBMITTED, with other content (then verify "
                     "off; now release at read); use a new version");
    (void)abort_version(&b, 3);
    ck_assert_str_eq(submit_words(&b, 3, "c", 3, "verify off\n"),
                     "version 3 was submitted and is ABORTED, with other content (then source "
                     "layout 't' (01)); use a new version");
    publish(&b, 1, 3, 5);
    publish(&b, 2, 3, 6);
    ck_assert_str_eq(submit_words(&b, 3, "d", 1, "source layout 't' (01)\nverify off\n"), "");
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_STAGED, n);
    ck_assert_int_eq(phase(&b, 3), REFIT_COMMITTED);
    ck_assert_str_eq(submit_words(&b, 3, "e", 3, "verify off\n"),
                     "version 3 is committed already, with other content (then source layout 't' "
                     "(01)); use a new version");
    bed_close(&b);
}
END_TEST

START_TEST(how_the_newest_rehearsal_ended_is_known_after_a_restart)
{
    struct ledger_record rows[] = {
        {.kind = LEDGER_ATTEMPT,
         .model = "m",
         .attempt = {3, 7, 1, REFIT_REHEARSED, "the rehearsal has ended well",
                     REFIT_KIND_REHEARSAL}},
        {.kind = LEDGER_ATTEMPT,
         .model = "m",
         .attempt = {4, 7, 1, REFIT_ABORTED, "rank 1: perplexity rose", REFIT_KIND_REHEARSAL}},
        {.kind = LEDGER_ATTEMPT, .model = "m", .attempt = {5, 7, 1, REFIT_ABORTED, "a refit", 0}},
        {.kind = LEDGER_ATTEMPT,
         .model = "m",
         .attempt = {6, 8, 1, REFIT_SUBMITTED, "", REFIT_KIND_REHEARSAL}}};
    struct bed b;
    for (size_t n = 0; n <= 4; n++) {
        restored(&b, rows, n);
        const struct refit_outcome *o = &b.r->rehearsed;
        ck_assert_int_eq(o->phase, n == 0 ? REFIT_NONE : n == 1 ? REFIT_REHEARSED : REFIT_ABORTED);
        ck_assert_uint_eq(o->version, n == 0 ? 0 : n < 4 ? 7 : 8);
        ck_assert_str_eq(o->reason, n == 0   ? ""
                                    : n == 1 ? "the rehearsal has ended well"
                                    : n < 4  ? "rank 1: perplexity rose"
                                             : "the coordinator was restarted before the rehearsal "
                                               "had ended");
        bed_close(&b);
    }
}
END_TEST

/* CASES E06, after the crash: committed or not, no third state. */
START_TEST(after_a_restart_a_version_is_committed_or_aborted)
{
    uint8_t one[16] = {1};
    struct ledger_record rows[] = {
        {.kind = LEDGER_MODEL, .model = "m", .as_model = {5, 8, 3}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 5, .phase = REFIT_COMMITTED, .attempt = 6, .content = {1}}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 6, .phase = REFIT_SUBMITTED, .attempt = 8, .content = {1}}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 7, .phase = REFIT_SUBMITTED, .content = {1}}},
        {.kind = LEDGER_REQUEST, .model = "m", .request = {"x", 5, 6, REFIT_SUBMITTED}},
        {.kind = LEDGER_VERSION, .model = "other", .version = {.version = 99, .phase = 7}}};
    struct bed b;
    restored(&b, rows, sizeof rows / sizeof *rows);
    ck_assert_uint_eq(b.r->committed, 5);
    ck_assert_int_eq(phase(&b, 5), REFIT_COMMITTED);
    ck_assert_int_eq(phase(&b, 6), REFIT_ABORTED);
    ck_assert_int_eq(phase(&b, 7), REFIT_ABORTED);
    ck_assert_int_eq(phase(&b, 99), REFIT_NONE);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 6)->reason, "restarted"));
    for (uint64_t v = 5; v <= 7; v++) /* of what has ended nothing is read any more */
        ck_assert(refit_find_version(b.r, v)->source_released);
    ck_assert_uint_eq(count(&b, REFIT_DO_PERSIST), 1);
    ck_assert(b.r->n_aborted == 2 && b.r->n_committed == 1);
    ck_assert_uint_eq(answer(&b, submit(&b, 5, "x", 1))->a.attempt, 6); /* the same answer */
    struct refit_event ev = submit_event(7, "y", one);
    ev.cookie = 900;
    step(&b, ev);
    ck_assert_uint_eq(answer(&b, 900)->a.attempt, 9); /* never used before */
    bed_close(&b);
}
END_TEST

/* Version 5 committed, 6 in flight and 7 queued when the coordinator died. */
static void restored_in_flight(struct bed *b)
{
    const struct ledger_record rows[] = {
        {.kind = LEDGER_MODEL, .model = "m", .as_model = {5, 8, 3}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 5, .phase = REFIT_COMMITTED, .attempt = 6, .content = {1}}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 6, .phase = REFIT_SUBMITTED, .attempt = 8, .content = {1}}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 7, .phase = REFIT_SUBMITTED, .content = {1}}}};
    restored(b, rows, sizeof rows / sizeof *rows);
    layout(b, REFIT_SOURCE, "train", 2, 1);
    layout(b, REFIT_DESTINATION, "rollout", 2, 2);
    node_up(b, 0);
}

/* What the last step told, as "ABORTED 6 …" in order. */
static const char *tells(const struct bed *b)
{
    static char text[256];
    static const char *const names[] = {"",          "PUBLISH", "READY",   "ACCEPT",
                                        "COMMITTED", "ABORTED", "RELEASED"};
    size_t at = 0;
    text[0] = '\0';
    for (size_t i = b->from; i < b->n_seen; i++)
        if (b->seen[i].a.type == REFIT_DO_TELL)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%s %d", at == 0 ? "" : " ",
                                   names[b->seen[i].a.tell], (int)b->seen[i].a.version);
    return text;
}

START_TEST(after_a_restart_a_worker_hears_how_what_it_waits_for_ended)
{
    struct bed b;
    struct attach source = {1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0};
    struct attach engine = {11, 0, REFIT_DESTINATION, "rollout", 0, REFIT_IN_PLACE, false, 0, 0};
    restored_in_flight(&b);
    b.waits_for = 6; /* published it */
    (void)attach(&b, source);
    ck_assert_str_eq(tells(&b), "ABORTED 6 ABORTED 7 RELEASED 6");
    source.id = 2;
    source.rank = 1;
    b.waits_for = 5; /* committed, which its daemon had no time to say */
    (void)attach(&b, source);
    ck_assert_str_eq(tells(&b), "ABORTED 6 ABORTED 7 COMMITTED 5 RELEASED 5");
    b.waits_for = 6;
    (void)attach(&b, engine);
    ck_assert_str_eq(tells(&b), "ABORTED 6 ABORTED 7");
    bed_close(&b);
}
END_TEST

/* An engine that hears of COMMITTED pauses and applies. */
START_TEST(after_a_restart_a_staged_worker_hears_of_the_commit_unless_it_has_applied_it)
{
    struct bed b;
    struct attach engine = {11, 0, REFIT_DESTINATION, "rollout", 0, REFIT_STAGED_RECEIVE, false,
                            5,  5};
    restored_in_flight(&b);
    b.waits_for = 5;
    (void)attach(&b, engine);
    ck_assert_str_eq(tells(&b), "ABORTED 6 ABORTED 7");
    engine.id = 12;
    engine.rank = 1;
    engine.live = 4; /* what it serves with */
    b.waits_for = 5;
    (void)attach(&b, engine);
    ck_assert_str_eq(tells(&b), "ABORTED 6 ABORTED 7 COMMITTED 5");
    bed_close(&b);
}
END_TEST

START_TEST(a_source_whose_submit_was_lost_with_the_coordinator_hears_of_the_release_in_the_end)
{
    struct bed b;
    restored_in_flight(&b);
    b.waits_for = 8; /* not known here: its Submit may come again */
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    ck_assert_str_eq(tells(&b), "ABORTED 6 ABORTED 7");
    (void)submit(&b, 8, "again", 1);
    ck_assert_str_eq(tells(&b), "PUBLISH 8");
    (void)abort_version(&b, 8); /* before it is published again */
    ck_assert_str_eq(tells(&b), "ABORTED 8 RELEASED 8");
    bed_close(&b);
}
END_TEST

START_TEST(a_source_that_was_asked_to_publish_hears_of_the_abort_before_it_has)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    publish(&b, 1, 1, 5);
    (void)submit(&b, 1, "x", 1);
    ck_assert_str_eq(tells(&b), "PUBLISH 1"); /* the other rank */
    (void)abort_version(&b, 1);
    ck_assert_str_eq(tells(&b), "ABORTED 1 ABORTED 1 ABORTED 1 ABORTED 1 RELEASED 1");
    bed_close(&b);
}
END_TEST

START_TEST(what_a_restart_ended_is_not_told_once_it_is_submitted_again)
{
    struct bed b;
    restored_in_flight(&b);
    (void)submit(&b, 7, "y", 1);
    b.waits_for = 7;
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    ck_assert_str_eq(tells(&b), "ABORTED 6 PUBLISH 7");
    bed_close(&b);
}
END_TEST

START_TEST(a_worker_whose_stream_broke_hears_what_it_missed)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    publish(&b, 1, 1, 5);
    (void)submit(&b, 1, "x", 1);
    (void)abort_version(&b, 1);
    b.waits_for = 1;
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    ck_assert_str_eq(tells(&b), "ABORTED 1 RELEASED 1");
    publish(&b, 1, 1, 5); /* published again: it is not released */
    b.waits_for = 1;
    (void)attach(&b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    ck_assert_str_eq(tells(&b), "ABORTED 1");
    bed_close(&b);
}
END_TEST

START_TEST(memory_that_was_being_written_when_the_coordinator_died_is_torn_until_a_refit)
{
    struct bed b;
    struct attach engine = {11, 0, REFIT_DESTINATION, "rollout", 0, REFIT_IN_PLACE, true, 0, 0};
    struct attach source = {1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0};
    restored_in_flight(&b);
    b.torn = true;
    b.waits_for = 6;
    (void)attach(&b, engine);
    engine.id = 12;
    engine.rank = 1;
    (void)attach(&b, engine);
    const struct refit_worker *torn = refit_find_worker(b.r, 11);
    ck_assert_int_eq((int)refit_worker_state(b.r, torn), REFIT_WORKER_TORN);
    ck_assert_int_eq((int)refit_worker_state(b.r, refit_find_worker(b.r, 12)), REFIT_WORKER_EMPTY);
    for (; source.rank < 2; source.rank++, source.id++) {
        (void)attach(&b, source);
        publish(&b, source.id, 8, 7);
    }
    (void)submit(&b, 8, "z", 1);
    ready(&b, 11, 8);
    ready(&b, 12, 8);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(&b, 8), REFIT_COMMITTED);
    ck_assert_int_eq((int)refit_worker_state(b.r, torn), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

START_TEST(total_is_from_submitted_to_durably_ended)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "x", 1);
    publish(&b, 1, 1, 5);
    publish(&b, 2, 1, 6);
    planned(&b);
    for (uint32_t node = 0; node < 2; node++)
        node_event(&b, REFIT_EV_PREPARED, node);
    node_event(&b, REFIT_EV_STAGED, 0);
    b.hold = true;
    node_event(&b, REFIT_EV_STAGED, 1);
    const struct refit_version *v = refit_find_version(b.r, 1);
    b.now_ns += 70 * MS; /* a slow disk */
    written(&b, b.r->sequence, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_uint_eq(v->total_ns, b.now_ns - v->submitted_ns);
    const struct seen *ended =
        did(&b, REFIT_DO_ENDED); /* for the ledger: the commit's row has less */
    ck_assert_ptr_nonnull(ended);
    ck_assert(ended->a.version == 1 && ended->a.attempt == v->attempt);
    ck_assert(ended->a.total_ns == v->total_ns && ended->a.stall_ns == v->stall_ns);
    (void)submit(&b, 2, "y", 1);
    (void)abort_version(&b, 2);
    uint64_t last = b.r->sequence;
    for (uint64_t s = last - 1; s <= last; s++) { /* the submission's record, then the end's */
        b.now_ns += 30 * MS;
        written(&b, s, 0);
    }
    v = refit_find_version(b.r, 2);
    ck_assert_int_eq(v->phase.state, REFIT_ABORTED);
    ck_assert_uint_eq(v->total_ns, b.now_ns - v->submitted_ns);
    ck_assert_uint_eq(did(&b, REFIT_DO_ENDED)->a.total_ns, v->total_ns);
    ck_assert_uint_eq(did(&b, REFIT_DO_ENDED)->a.stall_ns, v->stall_ns); /* released by its end */
    ck_assert_uint_gt(v->stall_ns, 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_row_that_makes_no_sense_is_refused)
{
    struct refit *r = refit_new("m", NULL);
    struct err e = {0};
    struct ledger_record row = {
        .kind = LEDGER_VERSION, .model = "m", .version = {.version = 1, .phase = 42}};
    ck_assert_int_eq(refit_restore(r, &row, &e), RS_EDISK);
    row.version = (struct ledger_version){.version = 0, .phase = REFIT_COMMITTED};
    ck_assert_int_eq(refit_restore(r, &row, &e), RS_EDISK);
    refit_free(r);
}
END_TEST

START_TEST(a_ledger_that_is_behind_is_said)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    step(&b, (struct refit_event){.type = REFIT_EV_NODE_UP, .node = {.node = 1, .committed = 9}});
    uint64_t cookie = submit(&b, 5, "b", 1);
    ck_assert_int_eq(code(&b, cookie), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(answer(&b, cookie)->text, "ledger is behind"));
    ck_assert_int_eq(code(&b, submit(&b, 10, "c", 1)), 0);
    bed_close(&b);
}
END_TEST

START_TEST(ended_versions_are_forgotten_beyond_the_limit_but_not_the_committed_one)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.max_versions = 3;
    whole(&b, 1, "a");
    for (uint64_t v = 2; v < 12; v++) {
        char id[8];
        (void)snprintf(id, sizeof id, "r%u", (unsigned)v);
        (void)submit(&b, v, id, 1);
        (void)abort_version(&b, v);
    }
    tick(&b, 1);
    ck_assert_uint_eq(b.r->n_versions, 3);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_int_eq(phase(&b, 11), REFIT_ABORTED);
    bed_close(&b);
}
END_TEST

START_TEST(marks_name_what_happened_and_to_whom)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    static const char *const names[] = {"submitted", "planned",   "prepared",
                                        "started",   "verified",  "source_released",
                                        "accepted",  "committed", "applied"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        bool found = false;
        for (size_t i = 0; i < b.n_seen; i++)
            found |= b.seen[i].a.type == REFIT_DO_MARK && strcmp(b.seen[i].text, names[n]) == 0 &&
                     b.seen[i].a.version == 1 && b.seen[i].a.since_ns >= 0;
        ck_assert_msg(found, "no mark %s", names[n]);
    }
    step(&b, (struct refit_event){
                 .type = REFIT_EV_MARK, .cookie = 800, .mark = {1, "generation_begin", 11}});
    ck_assert_int_eq(code(&b, 800), 0);
    ck_assert_str_eq(did(&b, REFIT_DO_MARK)->who, "rollout/rank 0");
    step(&b, (struct refit_event){.type = REFIT_EV_MARK, .cookie = 801, .mark = {2, "x", 0}});
    ck_assert_int_eq(code(&b, 801), RS_ENOTFOUND);
    bed_close(&b);
}
END_TEST

/* Else a timeline's phases would be made of what a client says. */
START_TEST(nobody_else_sets_the_marks_that_the_decider_sets)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    submit(&b, 9, "aborted", 9);
    step(&b, (struct refit_event){.type = REFIT_EV_ABORT, .abort = {.version = 9, .reason = "x"}});
    whole(&b, 1, "a");
    unsigned n = 0;
    for (size_t i = 0, end = b.n_seen; i < end; i++) {
        if (b.seen[i].a.type != REFIT_DO_MARK)
            continue;
        uint64_t cookie = ++b.next_cookie;
        step(&b, (struct refit_event){.type = REFIT_EV_MARK,
                                      .cookie = cookie,
                                      .mark = {1, b.seen[i].text, n % 2 == 0 ? 0 : 11}});
        ck_assert_msg(code(&b, cookie) == RS_EINVAL, "mark %s", b.seen[i].text);
        ck_assert_ptr_null(did(&b, REFIT_DO_MARK));
        n++;
    }
    ck_assert_uint_ge(n, 12);
    bed_close(&b);
}
END_TEST

/* The only mark of that name that a version has had so far. */
static const struct refit_action *mark_of(const struct bed *b, uint64_t version, const char *name)
{
    const struct refit_action *found = NULL;
    for (size_t i = 0; i < b->n_seen; i++)
        if (b->seen[i].a.type == REFIT_DO_MARK && b->seen[i].a.version == version &&
            strcmp(b->seen[i].text, name) == 0) {
            ck_assert_msg(found == NULL, "two marks %s", name);
            found = &b->seen[i].a;
        }
    ck_assert_msg(found != NULL, "no mark %s", name);
    return found;
}

START_TEST(a_version_that_waits_in_the_queue_begins_when_it_has_its_turn)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1); /* nobody publishes it */
    (void)submit(&b, 2, "b", 1);
    uint64_t submitted = refit_find_version(b.r, 2)->submitted_ns;
    tick(&b, 5000);
    (void)abort_version(&b, 1);
    uint64_t turn = b.now_ns - submitted;
    tick(&b, 3000);
    publish(&b, 1, 2, 5);
    publish(&b, 2, 2, 6);
    uint64_t there = b.now_ns - submitted;
    ck_assert_int_eq(mark_of(&b, 2, "submitted")->since_ns, 0);
    ck_assert_int_eq(mark_of(&b, 2, "begun")->since_ns, (int64_t)turn);
    ck_assert_uint_gt(turn, 5000 * MS);
    ck_assert_int_eq(mark_of(&b, 2, "gathered")->since_ns, (int64_t)there);
    ck_assert_uint_gt(there, 8000 * MS);
    bed_close(&b);
}
END_TEST

/* One that is superseded has waited and nothing else. */
START_TEST(a_version_that_never_had_its_turn_has_a_mark_of_its_submission)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    for (uint64_t v = 1; v <= 3; v++) {
        static const char *const ids[] = {"a", "b", "c"};
        (void)submit(&b, v, ids[v - 1], 1);
        tick(&b, 1000);
    }
    ck_assert_int_eq(phase(&b, 2), REFIT_SUPERSEDED);
    ck_assert_int_eq(mark_of(&b, 2, "submitted")->since_ns, 0);
    ck_assert_int_eq(mark_of(&b, 2, "superseded")->since_ns,
                     (int64_t)refit_find_version(b.r, 2)->total_ns);
    bed_close(&b);
}
END_TEST

/* One source publishes before the version is submitted, the other a second after. */
START_TEST(each_source_has_its_mark_when_it_has_published)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    publish(&b, 1, 1, 77);
    ck_assert_int_eq(code(&b, submit(&b, 1, "a", 1)), 0);
    ck_assert_str_eq(did(&b, REFIT_DO_MARK)->text, "published");
    ck_assert_str_eq(did(&b, REFIT_DO_MARK)->who, "train/rank 0");
    ck_assert_int_eq(did(&b, REFIT_DO_MARK)->a.since_ns, 0);
    tick(&b, 1000);
    publish(&b, 2, 1, 78);
    unsigned n = 0;
    for (size_t i = 0; i < b.n_seen; i++)
        n += b.seen[i].a.type == REFIT_DO_MARK && strcmp(b.seen[i].text, "published") == 0;
    ck_assert_uint_eq(n, 2);
    bed_close(&b);
}
END_TEST

/* --- what only shows in odd orders --- */

/* The record of a version that is being committed must not be written over by a second request for it. */
START_TEST(a_request_during_the_commit_leaves_the_versions_record_alone)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    node_event(&b, REFIT_EV_STAGED, 0);
    b.hold = true;
    node_event(&b, REFIT_EV_STAGED, 1);
    uint64_t commit = did(&b, REFIT_DO_PERSIST)->a.sequence;
    uint64_t cookie = submit(&b, 1, "b", 1);
    const struct seen *p = did(&b, REFIT_DO_PERSIST);
    ck_assert_uint_eq(p->a.n_records, 1);
    ck_assert_int_eq((int)p->kinds[0], (int)LEDGER_REQUEST);
    uint64_t request = p->a.sequence;
    written(&b, commit, 0);
    written(&b, request, 0);
    ck_assert_int_eq(code(&b, cookie), 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(two_aborts_make_one_end_and_both_are_answered)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    b.hold = true;
    uint64_t one = abort_version(&b, 1);
    const struct seen *p = did(&b, REFIT_DO_PERSIST);
    ck_assert_uint_eq(p->version.phase, REFIT_ABORTED);
    uint64_t sequence = p->a.sequence;
    uint64_t two = abort_version(&b, 1);
    ck_assert_ptr_null(did(&b, REFIT_DO_PERSIST));
    ck_assert(answer(&b, one) == NULL && answer(&b, two) == NULL);
    written(&b, sequence, 0);
    ck_assert(code(&b, one) == 0 && code(&b, two) == 0);
    b.hold = false; /* and of a queued version */
    (void)submit(&b, 2, "b", 1);
    (void)submit(&b, 3, "c", 1);
    b.hold = true;
    one = abort_version(&b, 3);
    sequence = did(&b, REFIT_DO_PERSIST)->a.sequence;
    two = abort_version(&b, 3);
    written(&b, sequence, 0);
    ck_assert(code(&b, one) == 0 && code(&b, two) == 0);
    bed_close(&b);
}
END_TEST

START_TEST(content_that_is_not_known_is_never_taken_for_held)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    publish(&b, 1, 1, 0); /* not fingerprinted */
    publish(&b, 2, 1, 0);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_PREPARED, 1);
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

START_TEST(the_policy_may_do_without_an_instance_that_is_never_ready)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, true);
    submit_min(&b, 1, "a", 1);
    publish_all(&b, 1);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_PREPARED, 1);
    ready(&b, 12, 1);
    tick(&b, 60000);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0); /* the trainer's */
    node_event(&b, REFIT_EV_PREPARED, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_TRANSFERRING); /* its Ready still holds */
    node_event(&b, REFIT_EV_STAGED, 0);
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 11)), REFIT_WORKER_EMPTY);
    ck_assert_int_eq(refit_worker_state(b.r, refit_find_worker(b.r, 12)), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

START_TEST(there_is_no_other_attempt_once_the_source_was_released)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    struct refit_policy policy = {.layout_name = (char *)(uintptr_t) "rollout", .min_instances = 1};
    uint8_t content[16] = {1};
    struct refit_event ev = submit_event(1, "a", content);
    ev.submit.policies = &policy;
    ev.submit.n_policies = 1;
    ev.submit.release_at = REFIT_RELEASE_READ;
    step(&b, ev);
    publish_all(&b, 1);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_PREPARED, 1);
    step(&b, (struct refit_event){
                 .type = REFIT_EV_PROGRESS,
                 .node = {.node = 0, .attempt = 1, .sources_read_ns = 1, .sources_known = true}});
    leave(&b, 12, false);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    bed_close(&b);
}
END_TEST

START_TEST(the_attempt_mark_comes_from_whichever_row_is_highest)
{
    struct ledger_record of_model = {.kind = LEDGER_MODEL, .model = "m", .as_model = {0, 8, 0}};
    struct ledger_record of_attempt = {
        .kind = LEDGER_ATTEMPT, .model = "m", .attempt = {.attempt = 9, .version = 1}};
    struct bed b;
    restored(&b, &of_model, 1);
    ck_assert_uint_eq(b.r->attempt_high, 8);
    bed_close(&b);
    restored(&b, &of_attempt, 1);
    ck_assert_uint_eq(b.r->attempt_high, 9);
    bed_close(&b);
}
END_TEST

START_TEST(a_write_that_was_never_handed_over_fails_before_those_on_their_way)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.hold = true;
    uint64_t first = submit(&b, 1, "a", 1);
    uint64_t one = did(&b, REFIT_DO_PERSIST)->a.sequence;
    uint64_t second = submit(&b, 2, "b", 1);
    uint64_t two = did(&b, REFIT_DO_PERSIST)->a.sequence;
    written(&b, two, RS_ENOMEM);
    ck_assert_int_eq(code(&b, second), RS_ENOMEM);
    ck_assert_int_eq(phase(&b, 2), REFIT_NONE);
    written(&b, one, 0);
    written(&b, one, 0); /* repeated: nothing */
    ck_assert_int_eq(code(&b, first), 0);
    bed_close(&b);
}
END_TEST

/* Whether the commit is in the file is not known: neither committed nor aborted may be said. */
START_TEST(a_failed_ledger_says_nothing_of_the_commit_and_refuses_everything)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    node_event(&b, REFIT_EV_STAGED, 0);
    b.hold = true;
    node_event(&b, REFIT_EV_STAGED, 1);
    uint64_t commit = did(&b, REFIT_DO_PERSIST)->a.sequence;
    uint64_t abort = abort_version(&b, 1);
    written(&b, commit, RS_EDISK);
    ck_assert_int_eq(code(&b, abort), RS_EDISK);
    ck_assert_uint_eq(count(&b, REFIT_DO_NOTIFY) + count(&b, REFIT_DO_COMMITTED) +
                          count(&b, REFIT_DO_TELL) + count(&b, REFIT_DO_ABORT),
                      0);
    ck_assert_int_eq(code(&b, submit(&b, 2, "b", 1)), RS_EDISK);
    tick(&b, 1000000);
    ck_assert_uint_eq(b.u.n_actions, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_ACCEPTING);
    bed_close(&b);
}
END_TEST

START_TEST(a_version_that_was_overtaken_while_the_ledger_wrote_is_superseded)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 5, "a", 1);
    b.hold = true;
    (void)abort_version(&b, 5);
    uint64_t end = did(&b, REFIT_DO_PERSIST)->a.sequence;
    uint64_t six = submit(&b, 6, "b", 1); /* waits behind version 5 */
    uint64_t first = did(&b, REFIT_DO_PERSIST)->a.sequence;
    written(&b, end, 0);
    (void)submit(&b, 7, "c", 1); /* nothing is in flight: begins at once */
    ck_assert_ptr_eq(b.r->in_flight, refit_find_version(b.r, 7));
    b.hold = false;
    written(&b, first, 0);
    ck_assert_int_eq(code(&b, six), 0);
    ck_assert_int_eq(phase(&b, 6), REFIT_SUPERSEDED);
    bed_close(&b);
}
END_TEST

/* A daemon fails between prepare and commit. */
START_TEST(a_lost_data_plane_matters_until_everything_is_staged)
{
    for (int at = REFIT_PLANNED; at <= REFIT_ACCEPTING; at++) {
        struct bed b;
        usual(&b, REFIT_IN_PLACE, false);
        (void)submit(&b, 1, "a", 1);
        publish_all(&b, 1);
        planned(&b);
        for (uint32_t n = 0; n < 2 && at >= REFIT_PREPARED; n++)
            node_event(&b, REFIT_EV_PREPARED, n);
        for (uint64_t w = 11; w <= 12 && at >= REFIT_TRANSFERRING; w++)
            ready(&b, w, 1);
        for (uint32_t n = 0; n < 2 && at >= REFIT_STAGED; n++)
            node_event(&b, REFIT_EV_STAGED, n);
        ck_assert_int_eq(phase(&b, 1), at == REFIT_STAGED ? REFIT_ACCEPTING : at);
        step(&b, (struct refit_event){.type = REFIT_EV_NODE_LOST, .node = {.node = 1}});
        if (at >= REFIT_STAGED) {
            (void)verdict(&b, 11, 1, true);
            (void)verdict(&b, 12, 1, true);
            ck_assert_uint_eq(b.r->committed, 1);
        } else {
            ck_assert_uint_eq(count(&b, REFIT_DO_ABORT), 1); /* not to the dead one */
            node_event(&b, REFIT_EV_QUIESCED, 0);
            ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
            ck_assert_int_eq(refit_find_version(b.r, 1)->code, RS_EPEER);
            ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 1)->reason, "node 1"));
        }
        bed_close(&b);
    }
}
END_TEST

START_TEST(every_deadline_names_the_silent_node)
{
    for (int at = REFIT_PLANNED; at <= REFIT_TRANSFERRING; at += 2) {
        struct bed b;
        usual(&b, REFIT_STAGED_RECEIVE, true);
        (void)submit(&b, 1, "a", 1);
        publish_all(&b, 1);
        planned(&b);
        node_event(&b, REFIT_EV_PREPARED, 0);
        if (at == REFIT_TRANSFERRING) {
            node_event(&b, REFIT_EV_PREPARED, 1);
            node_event(&b, REFIT_EV_STAGED, 0);
        }
        ck_assert_str_eq(waiting_for(&b, 1), "node 1; ");
        tick(&b, at == REFIT_TRANSFERRING ? 600000 : 60000);
        ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
        ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 1)->reason, "waiting for: node 1"));
        bed_close(&b);
    }
}
END_TEST

static void refused(struct bed *b, struct refit_event ev, int rc, const char *says)
{
    ev.cookie = ++b->next_cookie;
    step(b, ev);
    ck_assert_int_eq(code(b, ev.cookie), rc);
    ck_assert_msg(strstr(answer(b, ev.cookie)->text, says) != NULL, "%s",
                  answer(b, ev.cookie)->text);
}

START_TEST(what_does_not_fit_the_state_is_refused_with_its_reason)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    whole(&b, 3, "a");
    uint8_t content[16] = {1};
    refused(&b, submit_event(4, "", content), RS_EINVAL, "request_id");
    refused(&b, (struct refit_event){.type = REFIT_EV_LEFT, .left = {77, false, ""}}, RS_ENOTFOUND,
            "no such worker");
    refused(&b, (struct refit_event){.type = REFIT_EV_PUBLISHED, .published = {11, 4, 1}},
            RS_EPRECOND, "only sources publish");
    refused(&b, (struct refit_event){.type = REFIT_EV_PUBLISHED, .published = {1, 2, 1}},
            RS_EPRECOND, "not above 3");
    refused(&b, (struct refit_event){.type = REFIT_EV_PUBLISHED, .published = {1, 0, 1}}, RS_EINVAL,
            "versions are 1");
    refused(&b, (struct refit_event){.type = REFIT_EV_READY, .ready = {11, 4}}, RS_EPRECOND,
            "Ready is for in_place");
    refused(&b, (struct refit_event){.type = REFIT_EV_READY, .ready = {1, 4}}, RS_EPRECOND,
            "is a source");
    refused(&b, (struct refit_event){.type = REFIT_EV_VERDICT, .verdict = {11, 9, 0, true, ""}},
            RS_ENOTFOUND, "never submitted");
    refused(&b, (struct refit_event){.type = REFIT_EV_VERDICT, .verdict = {11, 3, 0, false, ""}},
            RS_EPRECOND, "skip it with Apply");
    refused(&b, (struct refit_event){.type = REFIT_EV_APPLY, .apply = {11, 4, false}}, RS_EPRECOND,
            "not committed (the newest is 3)");
    refused(&b,
            (struct refit_event){.type = REFIT_EV_ATTACHED,
                                 .attached = {.worker = 50,
                                              .side = REFIT_DESTINATION,
                                              .layout_name = "rollout",
                                              .rank = 1}},
            RS_EINVAL, "receive is staged or in_place");
    leave(&b, 12, false);
    refused(&b,
            (struct refit_event){.type = REFIT_EV_ATTACHED,
                                 .attached = {.worker = 12,
                                              .side = REFIT_DESTINATION,
                                              .layout_name = "rollout",
                                              .rank = 1,
                                              .receive = REFIT_STAGED_RECEIVE}},
            RS_EPRECOND, "lease is over");
    (void)attach(
        &b, (struct attach){13, 1, REFIT_DESTINATION, "rollout", 1, REFIT_IN_PLACE, false, 0, 0});
    refused(&b, (struct refit_event){.type = REFIT_EV_APPLY, .apply = {13, 3, false}}, RS_EPRECOND,
            "receives in_place");
    bed_close(&b);
}
END_TEST

START_TEST(what_is_waited_for_is_said_in_words)
{
    struct bed b;
    bed_init(&b);
    (void)submit(&b, 1, "a", 1);
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "a trainer: no source worker"));
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "an inference worker"));
    bed_close(&b);
    usual(&b, REFIT_IN_PLACE, false);
    const struct refit_worker *source = refit_find_worker(b.r, 1), *w = refit_find_worker(b.r, 11);
    (void)submit(&b, 1, "a", 1);
    ck_assert_str_eq(refit_worker_doing(b.r, source), "waiting for Publish");
    publish_all(&b, 1);
    ck_assert_str_eq(waiting_for(&b, 1), "the plan; ");
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_PREPARED, 1);
    ck_assert_str_eq(refit_worker_doing(b.r, w), "waiting for Ready");
    ready(&b, 11, 1);
    ready(&b, 12, 1);
    ck_assert_str_eq(refit_worker_doing(b.r, w), "receiving");
    ck_assert_str_eq(refit_worker_doing(b.r, source), "sending");
    node_event(&b, REFIT_EV_STAGED, 0);
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_str_eq(refit_worker_doing(b.r, w), "waiting for Accept");
    (void)verdict(&b, 11, 1, true);
    b.hold = true;
    (void)verdict(&b, 12, 1, true);
    ck_assert_str_eq(waiting_for(&b, 1), "the ledger; ");
    bed_close(&b);
}
END_TEST

/* Else a restart would bring two sources back. */
START_TEST(a_source_of_another_name_takes_the_old_ones_place_in_the_ledger)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a"); /* "train" is a durable member now */
    leave(&b, 1, false);
    leave(&b, 2, false);
    layout(&b, REFIT_SOURCE, "other", 1, 1);
    const struct seen *p = did(&b, REFIT_DO_PERSIST);
    ck_assert_ptr_nonnull(p);
    ck_assert_int_eq((int)p->kinds[0], (int)LEDGER_MEMBER);
    ck_assert_ptr_null(refit_find_layout(b.r, REFIT_SOURCE, "train"));
    ck_assert_ptr_nonnull(refit_find_layout(b.r, REFIT_SOURCE, "other"));
    bed_close(&b);
}
END_TEST

START_TEST(restoring_survives_every_failed_allocation)
{
    struct ledger_record version = {.kind = LEDGER_VERSION,
                                    .model = "m",
                                    .version = {.version = 1,
                                                .phase = REFIT_COMMITTED,
                                                .attempt = 1,
                                                .options = "opt",
                                                .n_options_bytes = 3}};
    struct ledger_record request = {
        .kind = LEDGER_REQUEST, .model = "m", .request = {"x", 1, 1, REFIT_SUBMITTED}};
    for (long i = 1;; i++) {
        struct refit *r = refit_new("m", NULL);
        mem_fail_at(i);
        int rc = refit_restore(r, &version, NULL);
        rc = rc != 0 ? rc : refit_restore(r, &request, NULL);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(rc, struck ? RS_ENOMEM : 0);
        refit_check(r);
        if (!struck) {
            const struct refit_version *v = refit_find_version(r, 1);
            ck_assert_uint_eq(v->n_options_bytes, 3);
            ck_assert_mem_eq(v->options, "opt", 3);
            ck_assert_uint_eq(v->n_requests, 1);
            refit_free(r);
            break;
        }
        refit_free(r);
    }
}
END_TEST

/* Every event fails at its i-th allocation, then is given again: nothing may have changed in between. */
START_TEST(a_refit_survives_every_failed_allocation)
{
    for (long i = 1;; i++) {
        struct bed b;
        bed_init(&b);
        b.fail_at = i;
        layout(&b, REFIT_SOURCE, "train", 2, 1);
        layout(&b, REFIT_DESTINATION, "rollout", 2, 2);
        node_up(&b, 0);
        node_up(&b, 1);
        for (uint32_t rank = 0; rank < 2; rank++) {
            (void)attach(&b, (struct attach){1 + rank, 0, REFIT_SOURCE, "train", rank,
                                             REFIT_RECEIVE_NONE, false, 0, 0});
            (void)attach(&b, (struct attach){11 + rank, rank, REFIT_DESTINATION, "rollout", rank,
                                             REFIT_STAGED_RECEIVE, false, 0, 0});
        }
        submit_min(&b, 1, "a", 2);
        publish_all(&b, 1);
        planned(&b);
        for (uint32_t n = 0; n < 2; n++)
            node_event(&b, REFIT_EV_PREPARED, n);
        for (uint32_t n = 0; n < 2; n++)
            node_event(&b, REFIT_EV_STAGED, n);
        (void)verdict(&b, 11, 1, true);
        (void)verdict(&b, 12, 1, true);
        ck_assert_uint_eq(b.r->committed, 1);
        ck_assert_uint_eq(b.r->attempt_high, 1);
        bool struck = b.struck;
        bed_close(&b);
        if (!struck)
            break;
        ck_assert_int_lt(i, 100);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(submit_is_answered_only_when_it_is_durable)                                                  \
    X(submit_on_a_full_disk_is_refused_and_leaves_nothing)                                         \
    X(content_that_is_not_known_may_be_tried_again)                                                \
    X(same_content_gets_the_same_answer_and_other_content_is_refused)                              \
    X(versions_grow_with_gaps_and_a_refusal_names_the_newest)                                      \
    X(a_queued_version_is_superseded_by_a_newer_one)                                               \
    X(a_refit_goes_through_every_phase_in_order)                                                   \
    X(nothing_is_planned_before_attempt_and_epoch_are_durable)                                     \
    X(a_second_version_of_the_same_membership_keeps_its_epoch)                                     \
    X(a_commit_is_told_only_after_it_is_durable)                                                   \
    X(a_commit_that_can_not_be_written_aborts_and_the_version_stays_what_it_was)                   \
    X(versions_to_changing_sets_of_receivers_all_commit)                                           \
    X(one_receivers_failure_reaches_all_and_the_next_version_is_fine)                              \
    X(a_failed_attempt_can_not_be_accepted_and_needs_no_reset)                                     \
    X(an_aborted_version_is_tried_again_under_a_new_attempt_id)                                    \
    X(a_retry_with_other_published_content_is_refused)                                             \
    X(events_of_an_older_attempt_change_nothing)                                                   \
    X(no_next_attempt_before_every_node_is_quiet_or_dead)                                          \
    X(the_prepare_deadline_names_who_has_not_published)                                            \
    X(a_tick_that_comes_too_early_sets_the_deadline_anew)                                          \
    X(the_accept_deadline_names_who_has_not_answered)                                              \
    X(a_destination_that_dies_in_the_transfer_ends_the_attempt)                                    \
    X(a_source_that_dies_matters_only_until_it_is_read)                                            \
    X(a_rank_attaches_once)                                                                        \
    X(another_layout_is_refused_while_workers_hold_the_old_one)                                    \
    X(a_rejection_aborts_with_its_reason_where_every_instance_must_accept)                         \
    X(a_second_verdict_may_not_differ)                                                             \
    X(the_policy_may_do_without_an_instance_that_rejects)                                          \
    X(the_policy_may_do_without_an_instance_that_dies_in_the_transfer)                             \
    X(a_policy_beyond_the_layouts_instances_is_refused)                                            \
    X(a_version_is_not_prepared_over_one_that_waits_to_be_applied)                                 \
    X(apply_is_answered_when_done_and_may_be_repeated)                                             \
    X(in_place_memory_is_written_only_after_ready)                                                 \
    X(the_prepare_deadline_names_who_is_not_ready)                                                 \
    X(a_new_worker_is_empty_until_a_commit_in_its_own_life)                                        \
    X(sources_are_released_when_the_options_say)                                                   \
    X(abort_answers_when_the_version_has_ended)                                                    \
    X(a_version_that_was_submitted_before_its_trainer_came_is_the_trainers)                        \
    X(a_version_that_was_submitted_before_its_trainer_came_is_the_trainers)                        \
    X(other_content_is_refused_by_what_differs)                                                    \
    X(after_a_restart_a_version_is_committed_or_aborted)                                           \
    X(after_a_restart_a_staged_worker_hears_of_the_commit_unless_it_has_applied_it)                \
    X(after_a_restart_a_worker_hears_how_what_it_waits_for_ended)                                  \
    X(a_source_whose_submit_was_lost_with_the_coordinator_hears_of_the_release_in_the_end)         \
    X(a_source_that_was_asked_to_publish_hears_of_the_abort_before_it_has)                         \
    X(what_a_restart_ended_is_not_told_once_it_is_submitted_again)                                 \
    X(a_worker_whose_stream_broke_hears_what_it_missed)                                            \
    X(memory_that_was_being_written_when_the_coordinator_died_is_torn_until_a_refit)               \
    X(a_version_that_waits_in_the_queue_begins_when_it_has_its_turn)                               \
    X(a_version_that_never_had_its_turn_has_a_mark_of_its_submission)                              \
    X(total_is_from_submitted_to_durably_ended)                                                    \
    X(a_row_that_makes_no_sense_is_refused)                                                        \
    X(a_ledger_that_is_behind_is_said)                                                             \
    X(ended_versions_are_forgotten_beyond_the_limit_but_not_the_committed_one)                     \
    X(each_source_has_its_mark_when_it_has_published)                                              \
    X(marks_name_what_happened_and_to_whom)                                                        \
    X(nobody_else_sets_the_marks_that_the_decider_sets)                                            \
    X(a_request_during_the_commit_leaves_the_versions_record_alone)                                \
    X(two_aborts_make_one_end_and_both_are_answered)                                               \
    X(content_that_is_not_known_is_never_taken_for_held)                                           \
    X(an_instance_that_needs_longer_is_waited_for_until_the_deadline)                              \
    X(the_policy_may_do_without_an_instance_that_is_never_ready)                                   \
    X(there_is_no_other_attempt_once_the_source_was_released)                                      \
    X(how_the_newest_rehearsal_ended_is_known_after_a_restart)                                     \
    X(the_attempt_mark_comes_from_whichever_row_is_highest)                                        \
    X(a_write_that_was_never_handed_over_fails_before_those_on_their_way)                          \
    X(a_failed_ledger_says_nothing_of_the_commit_and_refuses_everything)                           \
    X(a_version_that_was_overtaken_while_the_ledger_wrote_is_superseded)                           \
    X(a_lost_data_plane_matters_until_everything_is_staged)                                        \
    X(every_deadline_names_the_silent_node)                                                        \
    X(what_does_not_fit_the_state_is_refused_with_its_reason)                                      \
    X(what_is_waited_for_is_said_in_words)                                                         \
    X(a_source_of_another_name_takes_the_old_ones_place_in_the_ledger)                             \
    X(restoring_survives_every_failed_allocation)                                                  \
    X(a_refit_survives_every_failed_allocation)
#include "test/lib/main.h"
