/* What the decider leaves on record, marks and times, and what a restart makes of the ledger. */
#include "test/unit/test_refit_bed.h"

/* --- marks and times --- */

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

START_TEST(total_is_from_submitted_to_durably_ended)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "x", 1);
    publish(&b, 1, 1, 5);
    publish(&b, 2, 1, 6);
    plan_and_prepare(&b);
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
    publish(&b, 1, 2, 7); /* else nobody waits for its end */
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

/* Version 1 is published after its submission, by one source a second before the other; 2 before it; 3 by nobody. */
START_TEST(the_stall_is_from_the_first_publication_to_the_release)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)submit(&b, 1, "a", 1);
    tick(&b, 4000);
    publish(&b, 1, 1, 5);
    uint64_t published = b.now_ns;
    tick(&b, 1000);
    publish(&b, 2, 1, 6);
    plan_and_prepare(&b);
    tick(&b, 300);
    both_say(&b, REFIT_EV_STAGED);
    const struct refit_version *v = refit_find_version(b.r, 1);
    ck_assert_int_eq(v->phase.state, REFIT_COMMITTED);
    uint64_t released = v->submitted_ns + (uint64_t)mark_of(&b, 1, "source_released")->since_ns;
    ck_assert_uint_eq(v->stall_ns, released - published);
    ck_assert(v->stall_ns >= 1300 * MS && v->stall_ns < 4000 * MS);
    publish(&b, 1, 2, 7);
    published = b.now_ns;
    tick(&b, 2000);
    (void)submit(&b, 2, "b", 1);
    (void)abort_version(&b, 2);
    v = refit_find_version(b.r, 2);
    ck_assert(v->stall_ns >= 2000 * MS && v->stall_ns <= b.now_ns - published);
    (void)submit(&b, 3, "c", 1);
    tick(&b, 1000);
    (void)abort_version(&b, 3);
    v = refit_find_version(b.r, 3);
    ck_assert(v->stall_ns == 0 && v->total_ns >= 1000 * MS);
    bed_close(&b);
}
END_TEST

/* --- the ledger --- */

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

/* --- a restart --- */

static void restored(struct bed *b, const struct ledger_record *rows, size_t n)
{
    bed_init(b);
    for (size_t i = 0; i < n; i++)
        ck_assert_int_eq(refit_restore(b->r, &rows[i], NULL), 0);
    step(b, (struct refit_event){.type = REFIT_EV_RESTORED});
}

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

/* Each end counts, be it of the same version; what had ended before the start does not, in either count. */
START_TEST(aborted_and_superseded_count_ends_since_the_start)
{
    struct ledger_record rows[] = {
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 1, .phase = REFIT_ABORTED, .attempt = 1, .content = {1}}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 2, .phase = REFIT_SUPERSEDED, .content = {1}}}};
    struct bed b;
    restored(&b, rows, 2);
    ck_assert(b.r->n_aborted == 0 && b.r->n_superseded == 0);
    bed_close(&b);
    usual(&b, REFIT_STAGED_RECEIVE, true);
    for (unsigned i = 0; i < 3; i++) {
        (void)submit(&b, 1, i == 0 ? "a" : i == 1 ? "b" : "c", 1);
        (void)abort_version(&b, 1);
    }
    ck_assert_uint_eq(b.r->n_aborted, 3);
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

/* --- what workers hear after one --- */

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
    both_ready(&b, 8);
    planned(&b);
    node_event(&b, REFIT_EV_PREPARED, 0);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert_int_eq(phase(&b, 8), REFIT_COMMITTED);
    ck_assert_int_eq((int)refit_worker_state(b.r, torn), REFIT_WORKER_CURRENT);
    bed_close(&b);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(marks_name_what_happened_and_to_whom)                                                        \
    X(nobody_else_sets_the_marks_that_the_decider_sets)                                            \
    X(a_version_that_waits_in_the_queue_begins_when_it_has_its_turn)                               \
    X(a_version_that_never_had_its_turn_has_a_mark_of_its_submission)                              \
    X(each_source_has_its_mark_when_it_has_published)                                              \
    X(the_stall_is_from_the_first_publication_to_the_release)                                      \
    X(total_is_from_submitted_to_durably_ended)                                                    \
    X(a_source_of_another_name_takes_the_old_ones_place_in_the_ledger)                             \
    X(a_ledger_that_is_behind_is_said)                                                             \
    X(ended_versions_are_forgotten_beyond_the_limit_but_not_the_committed_one)                     \
    X(after_a_restart_a_version_is_committed_or_aborted)                                           \
    X(aborted_and_superseded_count_ends_since_the_start)                                           \
    X(the_attempt_mark_comes_from_whichever_row_is_highest)                                        \
    X(how_the_newest_rehearsal_ended_is_known_after_a_restart)                                     \
    X(a_row_that_makes_no_sense_is_refused)                                                        \
    X(restoring_survives_every_failed_allocation)                                                  \
    X(after_a_restart_a_worker_hears_how_what_it_waits_for_ended)                                  \
    X(after_a_restart_a_staged_worker_hears_of_the_commit_unless_it_has_applied_it)                \
    X(a_source_whose_submit_was_lost_with_the_coordinator_hears_of_the_release_in_the_end)         \
    X(a_source_that_was_asked_to_publish_hears_of_the_abort_before_it_has)                         \
    X(what_a_restart_ended_is_not_told_once_it_is_submitted_again)                                 \
    X(a_worker_whose_stream_broke_hears_what_it_missed)                                            \
    X(memory_that_was_being_written_when_the_coordinator_died_is_torn_until_a_refit)
#include "test/lib/main.h"
