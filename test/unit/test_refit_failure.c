/* The decider when something fails: receivers, sources, nodes, deadlines, the ledger; aborts, and the attempt after one. */
#include "test/unit/test_refit_bed.h"

/* --- attempts that fail --- */

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
    plan_and_prepare(&b);
    step(&b, (struct refit_event){
                 .type = REFIT_EV_PROGRESS,
                 .node = {.node = 0, .attempt = 1, .sources_read_ns = 1, .sources_known = true}});
    leave(&b, 12, false);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
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

/* --- deadlines --- */

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

/* --- aborts --- */

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

/* --- a ledger that is slow, or fails --- */

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

#define TESTS(X)                                                                                   \
    X(one_receivers_failure_reaches_all_and_the_next_version_is_fine)                              \
    X(a_failed_attempt_can_not_be_accepted_and_needs_no_reset)                                     \
    X(an_aborted_version_is_tried_again_under_a_new_attempt_id)                                    \
    X(a_retry_with_other_published_content_is_refused)                                             \
    X(events_of_an_older_attempt_change_nothing)                                                   \
    X(no_next_attempt_before_every_node_is_quiet_or_dead)                                          \
    X(a_destination_that_dies_in_the_transfer_ends_the_attempt)                                    \
    X(a_source_that_dies_matters_only_until_it_is_read)                                            \
    X(there_is_no_other_attempt_once_the_source_was_released)                                      \
    X(a_lost_data_plane_matters_until_everything_is_staged)                                        \
    X(the_prepare_deadline_names_who_has_not_published)                                            \
    X(the_accept_deadline_names_who_has_not_answered)                                              \
    X(every_deadline_names_the_silent_node)                                                        \
    X(a_tick_that_comes_too_early_sets_the_deadline_anew)                                          \
    X(abort_answers_when_the_version_has_ended)                                                    \
    X(two_aborts_make_one_end_and_both_are_answered)                                               \
    X(a_write_that_was_never_handed_over_fails_before_those_on_their_way)                          \
    X(a_failed_ledger_says_nothing_of_the_commit_and_refuses_everything)                           \
    X(a_version_that_was_overtaken_while_the_ledger_wrote_is_superseded)
#include "test/lib/main.h"
