/* Workers whose engine has let the memory of its weights go. CASES B29. */
#include "test/unit/test_refit_bed.h"

static int state(const struct bed *b, uint64_t id)
{
    return refit_worker_state(b->r, worker(b, id));
}

static uint64_t falls_asleep(struct bed *b, uint64_t id)
{
    uint64_t cookie = ++b->next_cookie;
    step(b, (struct refit_event){.type = REFIT_EV_SLEPT, .cookie = cookie, .left = {.worker = id}});
    return cookie;
}

static uint64_t wakes(struct bed *b, uint64_t id, uint32_t node, enum refit_receive receive)
{
    return attach(b,
                  (struct attach){id, node, REFIT_DESTINATION, "rollout", 1, receive, true, 0, 0});
}

START_TEST(a_version_that_needs_a_sleeper_is_refused_by_its_name_and_not_recorded)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(code(&b, falls_asleep(&b, 12)), 0);
    ck_assert_int_eq(code(&b, falls_asleep(&b, 12)), 0);
    ck_assert_int_eq(state(&b, 12), REFIT_WORKER_ASLEEP);
    uint64_t cookie = submit(&b, 1, "a", 1);
    says(&b, cookie, RS_EPRECOND, "rollout/rank 1 is asleep");
    says(&b, cookie, RS_EPRECOND, "wake it up");
    ck_assert_ptr_null(did(&b, REFIT_DO_PERSIST));
    ck_assert_int_eq(phase(&b, 1), REFIT_NONE);
    /* None may be left over of those whom the policy counts, either. */
    says(&b, submit_with(&b, 1, "b", "rollout", 2), RS_EPRECOND, "rollout/rank 1 is asleep");
    (void)falls_asleep(&b, 11);
    says(&b, submit_with(&b, 1, "c", "rollout", 0), RS_EPRECOND, "rollout/rank 0 is asleep");
    bed_close(&b);
}
END_TEST

START_TEST(a_version_that_can_do_without_the_sleeper_commits_without_waiting_for_it)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)falls_asleep(&b, 12);
    ck_assert_int_eq(code(&b, submit_with(&b, 1, "a", "rollout", 1)), 0);
    publish_all(&b, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert(worker(&b, 11)->taking_part && !worker(&b, 12)->taking_part);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_int_eq(state(&b, 12), REFIT_WORKER_ASLEEP);
    bed_close(&b);
}
END_TEST

START_TEST(a_rehearsal_that_needs_a_sleeper_is_refused_too)
{
    struct bed b;
    uint8_t content[16] = {1};
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)falls_asleep(&b, 12);
    struct refit_event ev = submit_event(1, "a", content);
    ev.cookie = ++b.next_cookie;
    ev.submit.rehearsal = true;
    step(&b, ev);
    says(&b, ev.cookie, RS_EPRECOND, "rollout/rank 1 is asleep");
    ck_assert_ptr_null(b.r->in_flight);
    bed_close(&b);
}
END_TEST

START_TEST(a_source_that_sleeps_is_needed_by_every_policy)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    publish_all(&b, 1);
    (void)falls_asleep(&b, 2);
    uint64_t cookie = submit_with(&b, 1, "a", "rollout", 0);
    says(&b, cookie, RS_EPRECOND, "train/rank 1 is asleep");
    ck_assert_uint_eq(worker(&b, 2)->published, 0);
    ck_assert_int_eq(refit_publish_check(b.r, 2, 1, NULL), RS_EPRECOND);
    bed_close(&b);
}
END_TEST

START_TEST(who_falls_asleep_while_workers_gather_ends_the_attempt_at_once)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(code(&b, submit(&b, 1, "a", 1)), 0);
    (void)falls_asleep(&b, 12);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    const struct refit_version *v = refit_find_version(b.r, 1);
    ck_assert_int_eq(v->code, RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(v->reason, "rollout/rank 1 is asleep"));
    ck_assert_ptr_nonnull(strstr(v->reason, "wake it up"));
    bed_close(&b);
}
END_TEST

START_TEST(who_falls_asleep_in_a_transfer_ends_it_as_if_it_had_died)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    (void)falls_asleep(&b, 12);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    ck_assert_uint_eq(count(&b, REFIT_DO_ABORT), 2);
    /* What its node still says of the attempt is not what the worker holds. */
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(refit_find_version(b.r, 1)->reason, "has gone to sleep"));
    bed_close(&b);
}
END_TEST

START_TEST(who_falls_asleep_while_an_attempt_ends_holds_nothing_of_it)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    to_transfer(&b, 1, "a");
    step(&b, (struct refit_event){.type = REFIT_EV_ABORT, .abort = {.version = 1, .reason = "x"}});
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
    (void)falls_asleep(&b, 12);
    node_event(&b, REFIT_EV_STAGED, 1); /* said before it heard of either */
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    quiesce(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    ck_assert_int_eq(state(&b, 12), REFIT_WORKER_ASLEEP);
    bed_close(&b);
}
END_TEST

START_TEST(an_attempt_whose_policy_can_do_without_goes_on_without_who_fell_asleep)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit_with(&b, 1, "a", "rollout", 1);
    publish_all(&b, 1);
    plan_and_prepare(&b);
    uint64_t first = b.r->attempt_high;
    (void)falls_asleep(&b, 12);
    quiesce(&b);
    ck_assert_uint_gt(b.r->attempt_high, first);
    publish_all(&b, 1);
    planned(&b);
    ck_assert(worker(&b, 11)->taking_part && !worker(&b, 12)->taking_part);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(who_falls_asleep_while_the_commit_is_written_has_applied_nothing)
{
    struct bed b;
    usual(&b, REFIT_IN_PLACE, true);
    to_transfer_in_place(&b, 1, "a");
    node_event(&b, REFIT_EV_STAGED, 0);
    b.hold = true;
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert(b.r->committing);
    (void)falls_asleep(&b, 12);
    b.hold = false;
    written(&b, b.r->sequence, 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_int_eq(state(&b, 11), REFIT_WORKER_CURRENT);
    ck_assert_int_eq(state(&b, 12), REFIT_WORKER_ASLEEP);
    ck_assert_uint_eq(worker(&b, 12)->applied, 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_sleeper_holds_nothing_and_can_say_nothing_about_memory)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    ck_assert_int_eq(state(&b, 12), REFIT_WORKER_CURRENT);
    (void)falls_asleep(&b, 12);
    ck_assert(worker(&b, 12)->held == 0 && worker(&b, 12)->applied == 0);
    uint64_t applied_here;
    ck_assert_int_eq(refit_instance_state(b.r, refit_find_layout(b.r, REFIT_DESTINATION, "rollout"),
                                          1, &applied_here),
                     REFIT_WORKER_ASLEEP);
    says(&b, apply(&b, 12, 1, false), RS_EPRECOND, "wake it up");
    says(&b, verdict(&b, 12, 1, true), RS_EPRECOND, "wake it up");
    bed_close(&b);
}
END_TEST

START_TEST(an_apply_that_sleep_overtakes_is_answered)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 1, "a");
    (void)verdict(&b, 11, 1, true);
    (void)verdict(&b, 12, 1, true);
    uint64_t cookie = apply(&b, 12, 1, false);
    (void)falls_asleep(&b, 12);
    says(&b, cookie, RS_ECANCELED, "sleep");
    applied(&b, 12, 1, 0);
    ck_assert_uint_eq(worker(&b, 12)->applied, 0);
    bed_close(&b);
}
END_TEST

START_TEST(a_sleeper_wakes_empty_on_its_own_node_and_catches_up)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.feed = b.r->config.catch_up = true;
    whole(&b, 1, "a");
    (void)falls_asleep(&b, 12);
    says(&b, wakes(&b, 13, 0, REFIT_STAGED_RECEIVE), RS_EEXIST, "rollout/rank 1 is attached");
    uint64_t cookie = wakes(&b, 14, 1, REFIT_STAGED_RECEIVE);
    const struct seen *s = answer(&b, cookie);
    ck_assert(s->a.code == 0 && s->a.attempt == 0 && s->a.value == 0); /* held, applied */
    ck_assert_ptr_null(worker(&b, 12));
    ck_assert_int_eq(state(&b, 14), REFIT_WORKER_EMPTY);
    ck_assert_ptr_nonnull(b.r->in_flight); /* by the ordinary path */
    ck_assert_int_eq(b.r->in_flight->kind, REFIT_KIND_CATCH_UP);
    ck_assert_int_eq(worker(&b, 14)->taking_part, true);
    leave(&b, 12, false); /* the end of the old lease, which comes after */
    ck_assert_int_eq(state(&b, 14), REFIT_WORKER_EMPTY);
    bed_close(&b);
}
END_TEST

static const char *why_not(const struct bed *b)
{
    static char text[400];
    return refit_newcomers_wait(b->r, text, sizeof text);
}

START_TEST(who_wakes_when_nobody_can_feed_it_is_explained_until_somebody_can)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.feed = b.r->config.catch_up = true;
    ck_assert_str_eq(why_not(&b), ""); /* nothing is committed */
    whole(&b, 1, "a");
    ck_assert_str_eq(why_not(&b), ""); /* all have it */
    (void)falls_asleep(&b, 11);
    (void)falls_asleep(&b, 12);
    ck_assert_str_eq(why_not(&b), ""); /* sleepers want nothing */
    (void)wakes(&b, 14, 1, REFIT_STAGED_RECEIVE);
    ck_assert_ptr_null(b.r->in_flight);
    ck_assert_str_eq(
        why_not(&b),
        "rollout/instance 1: version 1 is not there, and nobody who could feed it holds "
        "it any more: publish it again with the same content, or submit the next version");
    b.r->config.feed = false;
    ck_assert_ptr_nonnull(strstr(why_not(&b), "[refit] feed is off): publish it again"));
    b.r->config.catch_up = false;
    ck_assert_ptr_nonnull(strstr(why_not(&b), "[refit] catch_up is off): submit the next version"));
    b.r->config.feed = b.r->config.catch_up = true;
    b.r->known_committed = 2;
    ck_assert_str_eq(why_not(&b), ""); /* the ledger is behind: another line says so */
    b.r->known_committed = 1;
    uint64_t content = refit_find_version(b.r, 1)->publication;
    refit_find_version(b.r, 1)->publication = 0; /* then nothing that is published is the same */
    ck_assert_ptr_nonnull(strstr(why_not(&b), "(verify was off): submit the next version"));
    publish_all(&b, 1);
    ck_assert_ptr_null(b.r->in_flight);
    ck_assert_ptr_nonnull(strstr(why_not(&b), "(verify was off): submit the next version"));
    refit_find_version(b.r, 1)->publication = content;
    publish_all(&b, 1); /* the remedy */
    ck_assert_int_eq(b.r->in_flight->kind, REFIT_KIND_CATCH_UP);
    ck_assert_str_eq(why_not(&b), "");
    bed_close(&b);
}
END_TEST

/* max_workers counts who is there at most: who comes for the rank of a sleeper, or of one that is gone, is not one more. */
START_TEST(in_a_full_model_a_rank_is_taken_again)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.max_workers = b.r->n_workers;
    (void)falls_asleep(&b, 12);
    ck_assert_int_eq(code(&b, wakes(&b, 14, 1, REFIT_STAGED_RECEIVE)), 0);
    leave(&b, 14, false);
    ck_assert_int_eq(code(&b, wakes(&b, 15, 1, REFIT_STAGED_RECEIVE)), 0);
    leave(&b, 15, true);
    b.r->config.max_workers = b.r->n_workers;
    says(&b, wakes(&b, 16, 1, REFIT_STAGED_RECEIVE), RS_EEXHAUSTED, "more than");
    bed_close(&b);
}
END_TEST

/* The coordinator has restarted, or the session had been broken while the worker said Sleep. */
START_TEST(who_is_told_as_asleep_is_asleep)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    struct refit_event ev = {.type = REFIT_EV_ATTACHED,
                             .cookie = ++b.next_cookie,
                             .attached = {.worker = 12,
                                          .node = 1,
                                          .side = REFIT_DESTINATION,
                                          .layout_name = "rollout",
                                          .rank = 1,
                                          .receive = REFIT_STAGED_RECEIVE,
                                          .tells_memory = true,
                                          .asleep = true}};
    step(&b, ev);
    ck_assert_int_eq(state(&b, 12), REFIT_WORKER_ASLEEP);
    leave(&b, 12, false);
    ck_assert_int_eq(state(&b, 12), REFIT_WORKER_GONE);
    ev.attached.worker = 21;
    ev.cookie = ++b.next_cookie;
    step(&b, ev);
    ck_assert_int_eq(state(&b, 21), REFIT_WORKER_ASLEEP);
    says(&b, submit(&b, 2, "b", 1), RS_EPRECOND, "wake it up");
    bed_close(&b);
}
END_TEST

START_TEST(failing_memory_changes_nothing_of_a_sleep)
{
    for (long at = 1;; at++) {
        struct bed b;
        usual(&b, REFIT_STAGED_RECEIVE, true);
        to_transfer(&b, 1, "a");
        b.fail_at = at;
        (void)falls_asleep(&b, 12);
        b.fail_at = 0;
        ck_assert_int_eq(phase(&b, 1), REFIT_ABORTING);
        bool struck = b.struck;
        bed_close(&b);
        if (!struck)
            return;
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_version_that_needs_a_sleeper_is_refused_by_its_name_and_not_recorded)                      \
    X(a_version_that_can_do_without_the_sleeper_commits_without_waiting_for_it)                    \
    X(a_rehearsal_that_needs_a_sleeper_is_refused_too)                                             \
    X(a_source_that_sleeps_is_needed_by_every_policy)                                              \
    X(who_falls_asleep_while_workers_gather_ends_the_attempt_at_once)                              \
    X(who_falls_asleep_in_a_transfer_ends_it_as_if_it_had_died)                                    \
    X(who_falls_asleep_while_an_attempt_ends_holds_nothing_of_it)                                  \
    X(an_attempt_whose_policy_can_do_without_goes_on_without_who_fell_asleep)                      \
    X(who_falls_asleep_while_the_commit_is_written_has_applied_nothing)                            \
    X(a_sleeper_holds_nothing_and_can_say_nothing_about_memory)                                    \
    X(an_apply_that_sleep_overtakes_is_answered)                                                   \
    X(a_sleeper_wakes_empty_on_its_own_node_and_catches_up)                                        \
    X(who_wakes_when_nobody_can_feed_it_is_explained_until_somebody_can)                           \
    X(in_a_full_model_a_rank_is_taken_again)                                                       \
    X(who_is_told_as_asleep_is_asleep)                                                             \
    X(failing_memory_changes_nothing_of_a_sleep)
#include "test/lib/main.h"
