/* Pushes: who waits for a version that will not come hears it, with the reason, and soon. */
#include "test/unit/test_refit_bed.h"

/* --- events of pushes --- */

static void pushes(struct bed *b, uint64_t worker_id, uint64_t version, uint32_t push)
{
    step(b,
         (struct refit_event){.type = REFIT_EV_PUBLISHED,
                              .published = {worker_id, version, version * 10 + worker_id, push}});
}

static uint64_t withdraws(struct bed *b, uint64_t worker_id, uint64_t version, uint32_t push,
                          bool again)
{
    uint64_t cookie = ++b->next_cookie;
    step(b, (struct refit_event){
                .type = REFIT_EV_WITHDRAW,
                .cookie = cookie,
                .withdraw = {worker_id, version, push, again, "its options are wrong"}});
    return cookie;
}

/* How the last step's news of this kind for the worker reads; NULL: there was none. */
static const char *hears(const struct bed *b, uint64_t worker_id, enum refit_tell tell)
{
    for (size_t i = b->from; i < b->n_seen; i++)
        if (b->seen[i].a.type == REFIT_DO_TELL && b->seen[i].a.tell == tell &&
            b->seen[i].a.worker == worker_id)
            return b->seen[i].text;
    return NULL;
}

/* Withdrawn with this in its reason, and its memory is its own again. */
static void hears_the_end(const struct bed *b, uint64_t worker_id, const char *why)
{
    const char *text = hears(b, worker_id, REFIT_TELL_WITHDRAWN);
    ck_assert_ptr_nonnull(text);
    ck_assert_msg(strstr(text, why) != NULL, "'%s' is not in: %s", why, text);
    ck_assert_ptr_nonnull(hears(b, worker_id, REFIT_TELL_SOURCE_RELEASED));
    ck_assert(worker(b, worker_id)->released || worker(b, worker_id)->published == 0);
}

static void hears_nothing(const struct bed *b, uint64_t worker_id)
{
    for (int t = REFIT_TELL_PUBLISH_REQUESTED; t <= REFIT_TELL_WITHDRAWN; t++)
        ck_assert_ptr_null(hears(b, worker_id, (enum refit_tell)t));
}

static void attach_source(struct bed *b, uint64_t id, uint32_t rank)
{
    (void)attach(
        b, (struct attach){id, 0, REFIT_SOURCE, "train", rank, REFIT_RECEIVE_NONE, false, 0, 0});
}

/* --- withdrawn --- */

START_TEST(the_others_hear_at_once_that_the_version_is_withdrawn_and_why)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 1, 1, 1);
    pushes(&b, 2, 1, 1);
    ck_assert_int_eq(code(&b, withdraws(&b, 1, 1, 1, false)), 0);
    hears_the_end(&b, 2, "train/rank 0 has given it up: its options are wrong");
    ck_assert_ptr_null(hears(&b, 1, REFIT_TELL_WITHDRAWN)); /* it knows */
    ck_assert_ptr_nonnull(hears(&b, 1, REFIT_TELL_SOURCE_RELEASED));
    (void)withdraws(&b, 1, 1, 1, false); /* once is enough */
    hears_nothing(&b, 2);
    bed_close(&b);
}
END_TEST

START_TEST(who_publishes_after_the_withdrawal_hears_of_it_too_once)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 1, 1, 1);
    (void)withdraws(&b, 1, 1, 1, false);
    pushes(&b, 2, 1, 1);
    hears_the_end(&b, 2, "its options are wrong");
    pushes(&b, 2, 1, 2); /* the next push: the other is going to submit it */
    hears_nothing(&b, 2);
    pushes(&b, 1, 1, 2);
    hears_nothing(&b, 1);
    ck_assert_int_eq(code(&b, submit(&b, 1, "a", 1)), 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(who_has_begun_its_next_push_first_hears_of_that_one)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 2, 1, 2); /* it gave up its first by itself */
    (void)withdraws(&b, 1, 1, 1, true);
    hears_nothing(&b, 2); /* said again to a new coordinator: that was of the first */
    (void)withdraws(&b, 1, 1, 1, false);
    hears_the_end(&b, 2,
                  "its options are wrong"); /* by one that has started again, and counts anew */
    pushes(&b, 1, 1, 2);
    hears_nothing(&b, 1); /* … whose own next is not withdrawn by its word */
    bed_close(&b);
}
END_TEST

/* Version 1 is aborted, having been published by both. */
static void aborted_once(struct bed *b, uint32_t push_of_1, uint32_t push_of_2)
{
    usual(b, REFIT_STAGED_RECEIVE, true);
    pushes(b, 1, 1, push_of_1);
    ck_assert_int_eq(code(b, submit(b, 1, "a", 1)), 0);
    pushes(b, 2, 1, push_of_2);
    (void)abort_version(b, 1);
    ck_assert(worker(b, 1)->released && worker(b, 2)->released);
    tick(b, 1);
}

START_TEST(a_withdrawal_that_comes_late_is_of_the_push_that_was_aborted_and_not_of_the_next)
{
    struct bed b;
    aborted_once(&b, 1, 1);
    pushes(&b, 2, 1, 2); /* it has given up its first by itself, and pushes again */
    (void)withdraws(&b, 1, 1, 1, false);
    hears_nothing(&b, 2);
    pushes(&b, 1, 1, 2);
    hears_nothing(&b, 1);
    ck_assert_int_eq(code(&b, submit(&b, 1, "b", 1)), 0);
    ck_assert_int_eq(phase(&b, 1), REFIT_SUBMITTED);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(a_withdrawal_of_who_counts_anew_reaches_a_peer_that_has_published_for_a_retry)
{
    struct bed b;
    aborted_once(&b, 1, 2);
    pushes(&b, 2, 1, 2); /* the same push, once more */
    hears_nothing(&b, 2);
    (void)withdraws(&b, 1, 1, 1, false);
    hears_the_end(&b, 2, "its options are wrong");
    bed_close(&b);
}
END_TEST

START_TEST(a_trainer_that_has_started_again_hears_nothing_of_its_life_before)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 1, 1, 1);
    (void)withdraws(&b, 1, 1, 1, false);
    leave(&b, 1, false);
    leave(&b, 2, false);
    attach_source(&b, 31, 0);
    attach_source(&b, 32, 1);
    pushes(&b, 32, 1, 1);
    hears_nothing(&b, 32);
    pushes(&b, 31, 1, 1);
    hears_nothing(&b, 31);
    ck_assert_int_eq(code(&b, submit(&b, 1, "a", 1)), 0);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(a_refused_submit_says_nothing_of_the_push)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 2, 1, 1);
    ck_assert_int_eq(code(&b, submit_with(&b, 1, "a", "rollout", 3)), RS_EINVAL);
    hears_nothing(&b, 2);
    ck_assert(!worker(&b, 2)->released);
    bed_close(&b);
}
END_TEST

START_TEST(what_is_not_of_a_push_is_not_withdrawn)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    publish(&b, 2, 1, 12);
    (void)withdraws(&b, 1, 1, 1, false);
    hears_nothing(&b, 2);
    leave(&b, 1, false);
    tick(&b, 120000);
    hears_nothing(&b, 2);
    ck_assert(!worker(&b, 2)->released);
    bed_close(&b);
}
END_TEST

START_TEST(a_withdrawal_is_refused_where_it_makes_no_sense)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    says(&b, withdraws(&b, 77, 1, 1, false), RS_ENOTFOUND, "no such worker");
    says(&b, withdraws(&b, 11, 1, 1, false), RS_EPRECOND, "only sources");
    says(&b, withdraws(&b, 1, 0, 1, false), RS_EINVAL, "versions are");
    says(&b, withdraws(&b, 1, UINT64_C(1) << 63, 1, false), RS_EINVAL, "versions are");
    bed_close(&b);
}
END_TEST

/* Another has submitted it, with other options than the trainer wanted. */
START_TEST(what_is_on_its_way_goes_on_and_is_released_at_its_end)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(code(&b, submit(&b, 1, "operator", 1)), 0);
    pushes(&b, 1, 1, 1);
    ck_assert_int_eq(code(&b, submit(&b, 1, "trainer", 2)), RS_EEXIST);
    (void)withdraws(&b, 1, 1, 1, false);
    hears_nothing(&b, 1);
    pushes(&b, 2, 1, 1); /* late, and needed */
    ck_assert_ptr_nonnull(hears(&b, 2, REFIT_TELL_WITHDRAWN));
    ck_assert_ptr_null(hears(&b, 2, REFIT_TELL_SOURCE_RELEASED));
    ck_assert(!worker(&b, 1)->released && !worker(&b, 2)->released);
    planned(&b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    node_event(&b, REFIT_EV_STAGED, 0);
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    ck_assert(worker(&b, 1)->released && worker(&b, 2)->released);
    bed_close(&b);
}
END_TEST

START_TEST(who_waits_for_what_another_submitted_hears_of_the_withdrawal_where_that_is_aborted)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(code(&b, submit(&b, 1, "operator", 1)), 0);
    pushes(&b, 2, 1, 1);
    (void)withdraws(&b, 1, 1, 1, false);
    ck_assert_ptr_nonnull(hears(&b, 2, REFIT_TELL_WITHDRAWN));
    (void)abort_version(&b, 1);
    ck_assert_ptr_nonnull(hears(&b, 2, REFIT_TELL_ABORTED));
    ck_assert_ptr_nonnull(hears(&b, 2, REFIT_TELL_SOURCE_RELEASED));
    pushes(&b, 2, 1, 1); /* it had not seen the news yet, and tries again */
    hears_the_end(&b, 2, "its options are wrong");
    bed_close(&b);
}
END_TEST

START_TEST(a_submit_of_the_committed_version_with_other_options_gives_no_push_its_memory)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    whole(&b, 1, "a");
    pushes(&b, 2, 1, 1);
    pushes(&b, 1, 1, 1);
    ck_assert_int_eq(code(&b, submit(&b, 1, "b", 2)), RS_EEXIST);
    hears_nothing(&b, 2);
    (void)withdraws(&b, 1, 1, 1, false);
    hears_the_end(&b, 2, "its options are wrong");
    pushes(&b, 2, 1, 2);
    pushes(&b, 1, 1, 2);
    ck_assert_int_eq(code(&b, submit(&b, 1, "c", 1)), 0);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    bed_close(&b);
}
END_TEST

/* --- left, missing, overtaken --- */

START_TEST(a_worker_that_leaves_before_the_submit_ends_the_push_of_its_peers)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 2, 1, 1);
    leave(&b, 1, false);
    hears_the_end(&b, 2, "train/rank 0 left before it was submitted: process ended");
    bed_close(&b);
}
END_TEST

static void loses_its_daemon(struct bed *b, uint64_t worker_id)
{
    step(b, (struct refit_event){.type = REFIT_EV_LEFT,
                                 .left = {.worker = worker_id,
                                          .may_return = true,
                                          .reason = "its node came back without it"}});
}

START_TEST(a_worker_whose_daemon_was_restarted_attaches_anew_and_the_push_goes_on)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 1, 1, 1);
    pushes(&b, 2, 1, 1);
    loses_its_daemon(&b, 1);
    hears_nothing(&b, 2);
    b.again = true;
    b.waits_for = 1;
    b.waits_push = 1;
    attach_source(&b, 31, 0);
    hears_nothing(&b, 2);
    ck_assert_int_eq(code(&b, submit(&b, 1, "a", 1)), 0);
    ck_assert_ptr_nonnull(hears(&b, 31, REFIT_TELL_PUBLISH_REQUESTED));
    pushes(&b, 31, 1, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(
    a_worker_whose_daemon_was_restarted_and_that_stays_away_is_missed_at_the_prepare_deadline)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 2, 1, 1);
    loses_its_daemon(&b, 1);
    tick(&b, 59990);
    hears_nothing(&b, 2);
    tick(&b, 10);
    hears_the_end(&b, 2, "train/rank 0 left: its node came back without it");
    bed_close(&b);
}
END_TEST

START_TEST(a_worker_that_leaves_after_the_submit_ends_nothing_but_the_attempt)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    ck_assert_int_eq(code(&b, submit(&b, 1, "a", 1)), 0);
    pushes(&b, 2, 1, 1);
    leave(&b, 1, false);
    hears_nothing(&b, 2); /* it may be back before the prepare deadline */
    attach_source(&b, 31, 0);
    pushes(&b, 31, 1, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    bed_close(&b);
}
END_TEST

START_TEST(who_is_not_there_is_waited_for_until_the_prepare_deadline)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    leave(&b, 1, false); /* before anybody published */
    pushes(&b, 2, 1, 1);
    const struct seen *d = did(&b, REFIT_DO_SET_DEADLINE);
    ck_assert_ptr_nonnull(d);
    ck_assert_uint_eq(d->a.at_ns, b.now_ns + 60000 * MS);
    tick(&b, 59990);
    hears_nothing(&b, 2);
    tick(&b, 10);
    hears_the_end(&b, 2, "nobody has submitted it, and train/rank 0 left: process ended");
    bed_close(&b);
}
END_TEST

START_TEST(who_comes_back_in_time_is_not_missed)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    leave(&b, 1, true);
    pushes(&b, 2, 1, 1);
    attach_source(&b, 31, 0);
    tick(&b, 200000); /* it is slow to submit: that is the trainer's business */
    hears_nothing(&b, 2);
    ck_assert(!worker(&b, 2)->released);
    bed_close(&b);
}
END_TEST

START_TEST(a_worker_on_a_node_that_was_expelled_is_missing)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    leave(&b, 1, true);
    (void)attach(&b,
                 (struct attach){31, 1, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    pushes(&b, 2, 1, 1);
    silent(&b, 1);
    lost(&b, 1, true);
    hears_nothing(&b, 2);
    tick(&b, 60000);
    hears_the_end(&b, 2, "train/rank 0 is on node 1, which is not in the cluster");
    bed_close(&b);
}
END_TEST

START_TEST(who_waits_for_less_than_what_is_committed_hears_so)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, false);
    to_accepting(&b, 2, "b"); /* released: received everywhere */
    pushes(&b, 2, 1, 1);      /* it has lost count */
    hears_nothing(&b, 2);
    (void)verdict(&b, 11, 2, true);
    (void)verdict(&b, 12, 2, true);
    ck_assert_uint_eq(b.r->committed, 2);
    hears_the_end(&b, 2, "version 2 is committed");
    bed_close(&b);
}
END_TEST

START_TEST(who_hears_of_one_withdrawal_as_another_is_found_hears_its_own_reason)
{
    struct bed b;
    bed_init(&b);
    layout(&b, REFIT_SOURCE, "train", 4, 1);
    node_up(&b, 0);
    for (uint32_t rank = 0; rank < 4; rank++)
        attach_source(&b, 1 + rank, rank);
    leave(&b, 4, false);
    pushes(&b, 2, 1, 1);
    pushes(&b, 3, 2, 1);    /* it counts otherwise */
    b.now_ns += 60000 * MS; /* since they have waited for rank 3 */
    (void)withdraws(&b, 1, 1, 1, false);
    hears_the_end(&b, 2, "train/rank 0 has given it up: its options are wrong");
    hears_the_end(&b, 3, "train/rank 3 left: process ended");
    bed_close(&b);
}
END_TEST

/* --- a publication in the moment in which a retry ends --- */

/* Version 1 is in a second attempt that needs no trainer: one instance holds it whole. */
static void fed_retry(struct bed *b)
{
    usual(b, REFIT_STAGED_RECEIVE, true);
    b->r->config.feed = true;
    ck_assert_int_eq(code(b, submit(b, 1, "a", 1)), 0);
    pushes(b, 1, 1, 1);
    pushes(b, 2, 1, 1);
    planned(b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(b, REFIT_EV_PREPARED, n);
    step(b, (struct refit_event){
                .type = REFIT_EV_PROGRESS,
                .node = {.node = 0, .attempt = b->r->attempt_high, .sources_known = true}});
    node_event(b, REFIT_EV_STAGED, 0);
    (void)abort_version(b, 1);
    for (uint32_t n = 0; n < 2; n++)
        node_event(b, REFIT_EV_QUIESCED, n);
    ck_assert_int_eq(phase(b, 1), REFIT_ABORTED);
    ck_assert_uint_eq(worker(b, 11)->held, 1);
    pushes(b, 1, 1, 1);
    ck_assert_int_eq(code(b, submit(b, 1, "b", 1)), 0);
    ck_assert_ptr_nonnull(did(b, REFIT_DO_PLAN));
    ck_assert_ptr_nonnull(b->r->feed_layout);
    planned(b);
    for (uint32_t n = 0; n < 2; n++)
        node_event(b, REFIT_EV_PREPARED, n);
}

START_TEST(who_publishes_for_a_retry_that_was_committed_without_it_has_nothing_to_wait_for)
{
    struct bed b;
    fed_retry(&b);
    node_event(&b, REFIT_EV_STAGED, 0);
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    pushes(&b, 2, 1, 1); /* it heard of the abort alone */
    ck_assert_ptr_nonnull(hears(&b, 2, REFIT_TELL_SOURCE_RELEASED));
    ck_assert_uint_eq(told(&b, REFIT_TELL_WITHDRAWN) + told(&b, REFIT_TELL_ABORTED), 0);
    pushes(&b, 2, 1, 2); /* the next push of the same is another matter: somebody submits it */
    hears_nothing(&b, 2);
    ck_assert(!worker(&b, 2)->released);
    bed_close(&b);
}
END_TEST

START_TEST(a_trainer_that_has_started_since_waits_for_the_submit_of_its_own_push)
{
    struct bed b;
    fed_retry(&b);
    node_event(&b, REFIT_EV_STAGED, 0);
    node_event(&b, REFIT_EV_STAGED, 1);
    leave(&b, 2, false);
    attach_source(&b, 32, 1);
    pushes(&b, 32, 1, 1);
    hears_nothing(&b, 32);
    ck_assert(!worker(&b, 32)->released);
    bed_close(&b);
}
END_TEST

START_TEST(a_withdrawal_counts_that_comes_after_one_of_another_number_or_life)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    (void)withdraws(&b, 1, 9, 1, false); /* a slip */
    (void)withdraws(&b, 1, 1, 2, false);
    pushes(&b, 2, 1, 2);
    hears_the_end(&b, 2, "its options are wrong");
    leave(&b, 1, true);
    leave(&b, 2, true);
    attach_source(&b, 31, 0);
    attach_source(&b, 32, 1);
    (void)withdraws(&b, 31, 1, 1, false); /* counts anew */
    pushes(&b, 32, 1, 1);
    hears_the_end(&b, 32, "its options are wrong");
    bed_close(&b);
}
END_TEST

START_TEST(who_publishes_for_a_retry_that_was_aborted_without_it_is_told_with_its_peers)
{
    struct bed b;
    fed_retry(&b);
    (void)abort_version(&b, 1);
    for (uint32_t n = 0; n < 2; n++)
        node_event(&b, REFIT_EV_QUIESCED, n);
    ck_assert_int_eq(phase(&b, 1), REFIT_ABORTED);
    pushes(&b, 2, 1, 1);                 /* its Publish was on its way */
    hears_nothing(&b, 2);                /* there may be another try */
    (void)withdraws(&b, 1, 1, 1, false); /* there is none */
    hears_the_end(&b, 2, "train/rank 0 has given it up");
    bed_close(&b);
}
END_TEST

/* --- a restart of the coordinator --- */

static void restarts(struct bed *b, bool submitted_again)
{
    struct ledger_record rows[] = {
        {.kind = LEDGER_MODEL, .model = "m", .as_model = {.committed = 1, .attempt = 1}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 1,
                     .phase = REFIT_COMMITTED,
                     .attempt = 1,
                     .n_attempts = 1,
                     .content = {1},
                     .options = "opt",
                     .n_options_bytes = 3}},
        {.kind = LEDGER_REQUEST,
         .model = "m",
         .request = {.id = "a", .version = 1, .attempt = 1, .phase = REFIT_SUBMITTED}},
        {.kind = LEDGER_REQUEST,
         .model = "m",
         .request = {.id = "b", .version = 1, .attempt = 1, .phase = REFIT_COMMITTED}}};
    bed_init(b);
    for (size_t i = 0; i < (submitted_again ? 4 : 3); i++)
        ck_assert_int_eq(refit_restore(b->r, &rows[i], NULL), 0);
    step(b, (struct refit_event){.type = REFIT_EV_RESTORED});
    layout(b, REFIT_SOURCE, "train", 2, 1);
    layout(b, REFIT_DESTINATION, "rollout", 2, 2);
    node_up(b, 0);
    node_up(b, 1);
}

START_TEST(a_committed_version_that_was_submitted_again_is_known_as_such_after_a_restart)
{
    struct bed b;
    for (uint64_t released = 0; released < 2; released++) {
        restarts(&b, true);
        b.published = 1;
        b.waits_for = 1 - released;
        b.waits_push = 1;
        attach_source(&b, 1, 0); /* it had published, and submitted */
        ck_assert(released == 1 || hears(&b, 1, REFIT_TELL_SOURCE_RELEASED) != NULL);
        attach_source(&b, 2, 1);
        pushes(&b, 2, 1, 1); /* had not yet */
        ck_assert_ptr_nonnull(hears(&b, 2, REFIT_TELL_SOURCE_RELEASED));
        ck_assert_uint_eq(told(&b, REFIT_TELL_WITHDRAWN) + told(&b, REFIT_TELL_ABORTED), 0);
        bed_close(&b);
    }
}
END_TEST

START_TEST(one_that_was_not_waits_for_its_submit_after_a_restart_as_before)
{
    struct bed b;
    restarts(&b, false);
    attach_source(&b, 1, 0);
    attach_source(&b, 2, 1);
    pushes(&b, 1, 1, 1);
    pushes(&b, 2, 1, 1);
    hears_nothing(&b, 2);
    ck_assert_int_eq(code(&b, submit(&b, 1, "c", 1)), 0);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    bed_close(&b);
}
END_TEST

START_TEST(what_was_withdrawn_before_a_restart_is_told_again_whoever_comes_first)
{
    for (int first = 0; first < 2; first++) {
        struct bed b;
        restarts(&b, false);
        if (first == 1) {
            attach_source(&b, 1, 0);
            (void)withdraws(&b, 1, 2, 1, true);
        }
        b.waits_for = 2;
        b.waits_push = 1;
        attach_source(&b, 2, 1);
        if (first == 0) {
            hears_nothing(&b, 2);
            attach_source(&b, 1, 0);
            (void)withdraws(&b, 1, 2, 1, true);
        }
        hears_the_end(&b, 2, "its options are wrong");
        bed_close(&b);
    }
}
END_TEST

START_TEST(who_publishes_after_a_restart_what_was_withdrawn_before_hears_so_whoever_comes_first)
{
    for (int first = 0; first < 2; first++) {
        struct bed b;
        restarts(&b, false);
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t rank = first == 0 ? i : 1 - i;
            b.again = true;
            attach_source(&b, 1 + rank, rank);
            if (rank == 0)
                (void)withdraws(&b, 1, 2, 1, true);
        }
        pushes(&b, 2, 2, 1);
        hears_the_end(&b, 2, "its options are wrong");
        bed_close(&b);
    }
}
END_TEST

START_TEST(who_waited_before_a_restart_and_whose_peer_does_not_come_back_hears_so)
{
    struct bed b;
    restarts(&b, false);
    b.waits_for = 2;
    b.waits_push = 1;
    attach_source(&b, 2, 1);
    hears_nothing(&b, 2);
    tick(&b, 60000);
    hears_the_end(&b, 2, "train/rank 0 is not attached");
    bed_close(&b);
}
END_TEST

START_TEST(news_that_was_lost_with_a_broken_stream_is_told_again)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    pushes(&b, 2, 1, 1);
    (void)withdraws(&b, 1, 1, 1, false);
    b.waits_for = 1; /* it has not heard */
    b.waits_push = 1;
    attach_source(&b, 2, 1); /* resumes */
    hears_the_end(&b, 2, "its options are wrong");
    bed_close(&b);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(the_others_hear_at_once_that_the_version_is_withdrawn_and_why)                               \
    X(who_publishes_after_the_withdrawal_hears_of_it_too_once)                                     \
    X(who_has_begun_its_next_push_first_hears_of_that_one)                                         \
    X(a_withdrawal_that_comes_late_is_of_the_push_that_was_aborted_and_not_of_the_next)            \
    X(a_withdrawal_of_who_counts_anew_reaches_a_peer_that_has_published_for_a_retry)               \
    X(a_trainer_that_has_started_again_hears_nothing_of_its_life_before)                           \
    X(a_refused_submit_says_nothing_of_the_push)                                                   \
    X(what_is_not_of_a_push_is_not_withdrawn)                                                      \
    X(a_withdrawal_is_refused_where_it_makes_no_sense)                                             \
    X(what_is_on_its_way_goes_on_and_is_released_at_its_end)                                       \
    X(who_waits_for_what_another_submitted_hears_of_the_withdrawal_where_that_is_aborted)          \
    X(a_submit_of_the_committed_version_with_other_options_gives_no_push_its_memory)               \
    X(a_worker_that_leaves_before_the_submit_ends_the_push_of_its_peers)                           \
    X(a_worker_whose_daemon_was_restarted_attaches_anew_and_the_push_goes_on)                      \
    X(a_worker_whose_daemon_was_restarted_and_that_stays_away_is_missed_at_the_prepare_deadline)   \
    X(a_worker_that_leaves_after_the_submit_ends_nothing_but_the_attempt)                          \
    X(who_is_not_there_is_waited_for_until_the_prepare_deadline)                                   \
    X(who_comes_back_in_time_is_not_missed)                                                        \
    X(a_worker_on_a_node_that_was_expelled_is_missing)                                             \
    X(who_waits_for_less_than_what_is_committed_hears_so)                                          \
    X(who_hears_of_one_withdrawal_as_another_is_found_hears_its_own_reason)                        \
    X(who_publishes_for_a_retry_that_was_committed_without_it_has_nothing_to_wait_for)             \
    X(a_trainer_that_has_started_since_waits_for_the_submit_of_its_own_push)                       \
    X(a_withdrawal_counts_that_comes_after_one_of_another_number_or_life)                          \
    X(who_publishes_for_a_retry_that_was_aborted_without_it_is_told_with_its_peers)                \
    X(a_committed_version_that_was_submitted_again_is_known_as_such_after_a_restart)               \
    X(one_that_was_not_waits_for_its_submit_after_a_restart_as_before)                             \
    X(what_was_withdrawn_before_a_restart_is_told_again_whoever_comes_first)                       \
    X(who_publishes_after_a_restart_what_was_withdrawn_before_hears_so_whoever_comes_first)        \
    X(who_waited_before_a_restart_and_whose_peer_does_not_come_back_hears_so)                      \
    X(news_that_was_lost_with_a_broken_stream_is_told_again)
#include "test/lib/main.h"
