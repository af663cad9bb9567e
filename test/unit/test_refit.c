/* The decider, event by event: what is submitted, and its way to the commit. What it must do stands in refit.h, and the phases'
 * invariants in phase.c. */
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
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
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
    plan_and_prepare(&b);
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
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
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
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_int_eq(phase(&b, 3), REFIT_COMMITTED);
    ck_assert_str_eq(submit_words(&b, 3, "e", 3, "verify off\n"),
                     "version 3 is committed already, with other content (then source layout 't' "
                     "(01)); use a new version");
    bed_close(&b);
}
END_TEST

/* Nothing differs but that nobody is there to publish it any more. */
START_TEST(a_committed_version_stays_the_same_when_its_trainers_have_left_for_good)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    const char *full = "source layout 't' (01)\ndestination layout 'd' (02)\nverify off\n";
    ck_assert_str_eq(submit_words(&b, 3, "a", 1, full), "");
    publish_all(&b, 3);
    plan_and_prepare(&b);
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_int_eq(phase(&b, 3), REFIT_COMMITTED);
    leave(&b, 1, true);
    leave(&b, 2, true);
    ck_assert_str_eq(submit_words(&b, 3, "b", 2, "destination layout 'd' (02)\nverify off\n"), "");
    ck_assert_str_eq(submit_words(&b, 3, "a", 2, "destination layout 'd' (02)\nverify off\n"), "");
    ck_assert_ptr_nonnull(strstr(submit_words(&b, 3, "d", 4,
                                              "destination layout 'd' (02)\n"
                                              "destination layout 'e' (05)\nverify off\n"),
                                 "now destination layout 'e' (05)")); /* it has not got that */
    ck_assert_str_eq(submit_words(&b, 3, "c", 3, "destination layout 'd' (03)\nverify off\n"),
                     "version 3 is committed already, with other content (then source layout 't' "
                     "(01), destination layout 'd' (02); now destination layout 'd' (03)); use a "
                     "new version");
    bed_close(&b);
}
END_TEST

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

/* --- what is said --- */

static void refused(struct bed *b, struct refit_event ev, int rc, const char *word)
{
    ev.cookie = ++b->next_cookie;
    step(b, ev);
    says(b, ev.cookie, rc, word);
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
    plan_and_prepare(&b);
    ck_assert_str_eq(refit_worker_doing(b.r, w), "waiting for Ready");
    both_ready(&b, 1);
    ck_assert_str_eq(refit_worker_doing(b.r, w), "receiving");
    ck_assert_str_eq(refit_worker_doing(b.r, source), "sending");
    both_say(&b, REFIT_EV_STAGED);
    ck_assert_str_eq(refit_worker_doing(b.r, w), "waiting for Accept");
    (void)verdict(&b, 11, 1, true);
    b.hold = true;
    (void)verdict(&b, 12, 1, true);
    ck_assert_str_eq(waiting_for(&b, 1), "the ledger; ");
    bed_close(&b);
}
END_TEST

/* A misspelt one is said before the ranks that will come yet, of which there may be more than are told. */
START_TEST(a_layout_that_only_the_policy_knows_is_the_first_that_is_waited_for)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(code(&b, submit_with(&b, 1, "a", "roll-out", 1)), 0);
    const char *foremost = "layout 'roll-out', which the policy names and no worker has; ";
    ck_assert_int_eq(strncmp(waiting_for(&b, 1), foremost, strlen(foremost)), 0);
    ck_assert_ptr_nonnull(strstr(waiting_for(&b, 1), "train/rank 0 (has not published"));
    publish_all(&b, 1);
    ck_assert_str_eq(waiting_for(&b, 1), foremost);
    bed_close(&b);
}
END_TEST

/* --- memory that runs out --- */

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
        plan_and_prepare(&b);
        both_say(&b, REFIT_EV_STAGED);
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
    X(same_content_gets_the_same_answer_and_other_content_is_refused)                              \
    X(content_that_is_not_known_may_be_tried_again)                                                \
    X(versions_grow_with_gaps_and_a_refusal_names_the_newest)                                      \
    X(a_queued_version_is_superseded_by_a_newer_one)                                               \
    X(a_version_that_was_submitted_before_its_trainer_came_is_the_trainers)                        \
    X(other_content_is_refused_by_what_differs)                                                    \
    X(a_committed_version_stays_the_same_when_its_trainers_have_left_for_good)                     \
    X(a_request_during_the_commit_leaves_the_versions_record_alone)                                \
    X(a_refit_goes_through_every_phase_in_order)                                                   \
    X(nothing_is_planned_before_attempt_and_epoch_are_durable)                                     \
    X(a_second_version_of_the_same_membership_keeps_its_epoch)                                     \
    X(a_commit_is_told_only_after_it_is_durable)                                                   \
    X(a_commit_that_can_not_be_written_aborts_and_the_version_stays_what_it_was)                   \
    X(versions_to_changing_sets_of_receivers_all_commit)                                           \
    X(what_does_not_fit_the_state_is_refused_with_its_reason)                                      \
    X(what_is_waited_for_is_said_in_words)                                                         \
    X(a_layout_that_only_the_policy_knows_is_the_first_that_is_waited_for)                         \
    X(a_refit_survives_every_failed_allocation)
#include "test/lib/main.h"
