/* The decider's retries: what has landed is kept where it was compared, and only what is missing moves. */
#include "test/unit/test_refit_bed.h"

/* --- partial success --- */

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
    to_transfer_in_place(&b, 1, "a");
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)), REFIT_WORKER_UNCOMMITTED);
    node_failed(&b, 1, 12); /* the cells of two nodes were compared */
    ck_assert_int_eq(refit_worker_state(b.r, worker(&b, 12)), REFIT_WORKER_TORN);
    bed_close(&b);
}
END_TEST

START_TEST(what_differs_before_anything_was_written_tears_nobody)
{
    static const enum refit_receive kinds[] = {REFIT_IN_PLACE, REFIT_STAGED_RECEIVE};
    for (unsigned k = 0; k < 2; k++)
        for (int n_prepared = 0; n_prepared < 2; n_prepared++) {
            struct bed b;
            usual(&b, kinds[k], true);
            to_transfer(&b, 1, "a");
            for (uint64_t w = 11; w <= 12 && k == 0; w++)
                ready(&b, w, 1);
            both_say(&b, REFIT_EV_STAGED);
            ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
            for (uint64_t w = 11; w <= 12 && k == 1; w++) {
                (void)apply(&b, w, 1, false);
                applied(&b, w, 1, 0);
            }
            (void)submit(&b, 2, "b", 2);
            publish_all(&b, 2);
            planned(&b);
            if (n_prepared > 0)
                node_event(&b, REFIT_EV_PREPARED, 1);
            node_failed(&b, 0, 0); /* replicas of the source differ */
            quiesce(&b);
            ck_assert_int_eq(phase(&b, 2), REFIT_ABORTED);
            for (uint64_t w = 11; w <= 12; w++) {
                ck_assert_int_eq(refit_worker_state(b.r, worker(&b, w)), REFIT_WORKER_CURRENT);
                ck_assert_uint_eq(worker(&b, w)->held, 1);
            }
            bed_close(&b);
        }
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
    both_say(&b, REFIT_EV_STAGED);
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

/* --- what nodes that join again say they hold --- */

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

START_TEST(a_node_that_joins_again_is_not_believed_about_memory_that_got_wrong_bytes)
{
    static const uint64_t one[] = {12};
    struct bed b;
    usual(&b, REFIT_IN_PLACE, true);
    to_transfer_in_place(&b, 1, "a");
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
    to_transfer_in_place(&b, 1, "a");
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
        to_transfer_in_place(&b, 1, "a");
        uint64_t content = did_on(&b, REFIT_DO_START, 1)->content;
        both_say(&b, REFIT_EV_STAGED);
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
    to_transfer(&b, 1, "a");
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
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_uint_eq(worker(&b, 12)->held, 1);
    ck_assert_uint_eq(worker(&b, 21)->held, 0);
    bed_close(&b);
}
END_TEST

/* --- after the sources were released --- */

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
    plan_and_prepare(b);
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
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
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
    plan_and_prepare(&b);
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
    to_transfer_in_place(&b, 1, "a");
    both_say(&b, REFIT_EV_STAGED);
    (void)verdict(&b, 12, 1, false);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    (void)submit(&b, 1, "b", 1);
    ck_assert_uint_eq(count(&b, REFIT_DO_PLAN), 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_PREPARED); /* they have to pause for it once more */
    both_ready(&b, 1);
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

#define TESTS(X)                                                                                   \
    X(a_receiver_that_finished_early_keeps_its_result_and_a_retry_says_it_is_the_same_content)     \
    X(what_staged_before_it_heard_of_the_abort_is_kept_but_not_what_was_blamed)                    \
    X(what_was_found_to_differ_after_it_had_staged_is_not_held)                                    \
    X(what_differs_before_anything_was_written_tears_nobody)                                       \
    X(everybody_who_has_got_wrong_bytes_is_known_by_one_failure_and_one_retry_is_enough)           \
    X(who_was_named_before_its_node_staged_is_not_believed_when_it_has)                            \
    X(who_is_found_to_have_wrong_bytes_while_the_attempt_is_called_off_is_not_believed)            \
    X(a_node_that_joins_again_is_not_believed_about_memory_that_got_wrong_bytes)                   \
    X(a_node_that_joins_again_tells_what_landed_there_and_a_retry_commits_it)                      \
    X(an_uncommitted_claim_counts_as_committed_only_with_the_committed_content)                    \
    X(who_is_blamed_for_a_version_is_not_believed_to_hold_an_older_one)                            \
    X(a_claim_that_no_attempt_has_compared_does_not_outlive_the_commit)                            \
    X(a_retry_after_the_release_is_fed_by_who_holds_the_version_whole)                             \
    X(who_holds_other_content_under_the_number_feeds_no_retry)                                     \
    X(a_retry_after_the_release_without_a_holder_ends_as_source_gone)                              \
    X(where_nobody_lacks_anything_a_retry_commits_without_a_plan)                                  \
    X(a_layout_that_cannot_feed_is_not_asked_again_for_that_version)                               \
    X(no_fleet_is_left_mixed)
#include "test/lib/main.h"
