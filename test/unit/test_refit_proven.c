/* Who may feed others in the trainer's place: only who was compared with what the trainer sent. */
#include "test/unit/test_refit_bed.h"

static void known(struct bed *b, uint32_t node)
{
    step(b, (struct refit_event){
                .type = REFIT_EV_PROGRESS,
                .node = {.node = node, .attempt = b->r->attempt_high, .sources_known = true}});
}

static void read_but_not_known(struct bed *b, uint32_t node)
{
    step(b, (struct refit_event){
                .type = REFIT_EV_PROGRESS,
                .node = {.node = node, .attempt = b->r->attempt_high, .sources_read_ns = 5}});
}

/* A node has joined again, or another coordinator hears of it: what it says is in that worker's memory. */
static void says_it_holds(struct bed *b, uint64_t id, uint32_t node, uint32_t rank,
                          uint64_t version, uint64_t content)
{
    step(b, (struct refit_event){.type = REFIT_EV_ATTACHED,
                                 .cookie = ++b->next_cookie,
                                 .attached = {.worker = id,
                                              .node = node,
                                              .side = REFIT_DESTINATION,
                                              .layout_name = "rollout",
                                              .rank = rank,
                                              .receive = REFIT_STAGED_RECEIVE,
                                              .accept_automatically = true,
                                              .uncommitted = version,
                                              .uncommitted_content = content,
                                              .tells_memory = true}});
}

/* As `usual`, but the trainer's rank 1 is on a node of its own. Version 1 moves. */
static void moving(struct bed *b)
{
    bed_init(b);
    b->r->config.feed = true;
    layout(b, REFIT_SOURCE, "train", 2, 1);
    layout(b, REFIT_DESTINATION, "rollout", 2, 2);
    for (uint32_t n = 0; n < 3; n++)
        node_up(b, n);
    (void)attach(b,
                 (struct attach){1, 0, REFIT_SOURCE, "train", 0, REFIT_RECEIVE_NONE, false, 0, 0});
    (void)attach(b,
                 (struct attach){2, 2, REFIT_SOURCE, "train", 1, REFIT_RECEIVE_NONE, false, 0, 0});
    (void)attach(b, (struct attach){11, 0, REFIT_DESTINATION, "rollout", 0, REFIT_STAGED_RECEIVE,
                                    true, 0, 0});
    (void)attach(b, (struct attach){12, 1, REFIT_DESTINATION, "rollout", 1, REFIT_STAGED_RECEIVE,
                                    true, 0, 0});
    (void)submit(b, 1, "a", 1);
    publish_all(b, 1);
    planned(b);
    for (uint32_t n = 0; n < 3; n++)
        node_event(b, REFIT_EV_PREPARED, n);
    ck_assert_int_eq(phase(b, 1), REFIT_TRANSFERRING);
}

static void quiet(struct bed *b)
{
    for (uint32_t n = 0; n < 3; n++)
        node_event(b, REFIT_EV_QUIESCED, n);
    ck_assert_int_eq(phase(b, 1), REFIT_ABORTED);
}

/* The trainer is no more: who feeds the version's next attempt? */
static void without_the_trainer(struct bed *b)
{
    leave(b, 1, false);
    leave(b, 2, false);
    (void)submit(b, 1, "b", 1);
}

static void feeds(struct bed *b, uint64_t id)
{
    ck_assert(worker(b, id)->proven);
    without_the_trainer(b);
    ck_assert_ptr_nonnull(did(b, REFIT_DO_PLAN));
    ck_assert_int_eq(refit_worker_role(b->r, worker(b, id)), REFIT_ROLE_SENDS);
}

static void nobody_feeds(struct bed *b)
{
    without_the_trainer(b);
    ck_assert_uint_eq(count(b, REFIT_DO_PLAN), 0);
    ck_assert_int_eq(phase(b, 1), REFIT_SUBMITTED); /* and not committed without a plan */
    tick(b, 60000);
    ck_assert_int_eq(phase(b, 1), REFIT_ABORTED);
}

START_TEST(who_was_not_compared_with_all_that_the_sources_sent_feeds_nobody)
{
    for (int half = 0; half < 2; half++) {
        struct bed b;
        moving(&b);
        if (half)
            known(&b, 2);
        node_event(&b, REFIT_EV_STAGED, 1);
        (void)abort_version(&b, 1);
        quiet(&b);
        ck_assert_uint_eq(worker(&b, 12)->held, 1);
        ck_assert(!worker(&b, 12)->proven);
        nobody_feeds(&b);
        bed_close(&b);
    }
}
END_TEST

START_TEST(it_is_compared_when_the_trainer_publishes_again_and_nothing_of_it_moves)
{
    struct bed b;
    moving(&b);
    node_event(&b, REFIT_EV_STAGED, 1);
    (void)abort_version(&b, 1);
    quiet(&b);
    (void)submit(&b, 1, "b", 1);
    publish_all(&b, 1);
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    ck_assert_ptr_null(b.r->feed_layout);
    ck_assert(refit_holds_already(b.r, worker(&b, 12)));
    planned(&b);
    for (uint32_t n = 0; n < 3; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    known(&b, 0);
    known(&b, 2);
    ck_assert(!worker(&b, 12)->proven); /* held from before, and not read yet */
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert(worker(&b, 12)->proven);
    ck_assert(!worker(&b, 11)->proven);
    bed_close(&b);
}
END_TEST

START_TEST(what_the_sources_send_proves_what_stages_afterwards)
{
    struct bed b;
    moving(&b);
    known(&b, 0);
    known(&b, 2);
    node_event(&b, REFIT_EV_STAGED, 1);
    (void)abort_version(&b, 1);
    quiet(&b);
    feeds(&b, 12);
    bed_close(&b);
}
END_TEST

START_TEST(what_the_sources_send_proves_what_has_staged_before)
{
    struct bed b;
    moving(&b);
    node_event(&b, REFIT_EV_STAGED, 1);
    known(&b, 0);
    ck_assert(!worker(&b, 12)->proven);
    known(&b, 2);
    (void)abort_version(&b, 1);
    quiet(&b);
    feeds(&b, 12);
    bed_close(&b);
}
END_TEST

START_TEST(what_was_on_its_way_when_the_attempt_was_called_off_proves_too)
{
    for (int staged_last = 0; staged_last < 2; staged_last++) {
        struct bed b;
        moving(&b);
        known(&b, 0);
        (void)abort_version(&b, 1);
        if (!staged_last)
            node_event(&b, REFIT_EV_STAGED, 1);
        known(&b, 2);
        if (staged_last)
            node_event(&b, REFIT_EV_STAGED, 1);
        quiet(&b);
        feeds(&b, 12);
        bed_close(&b);
    }
}
END_TEST

START_TEST(a_source_node_that_has_staged_has_told_what_it_sent)
{
    struct bed b;
    moving(&b);
    node_event(&b, REFIT_EV_STAGED, 1);
    node_event(&b, REFIT_EV_STAGED, 2);
    ck_assert(!worker(&b, 12)->proven);
    (void)abort_version(&b, 1);
    node_event(&b, REFIT_EV_STAGED, 0); /* it was through before it heard */
    ck_assert(worker(&b, 11)->proven && worker(&b, 12)->proven);
    quiet(&b);
    without_the_trainer(&b);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED); /* nobody lacks anything, and it is right */
    bed_close(&b);
}
END_TEST

START_TEST(who_is_blamed_is_not_proven_whatever_comes_later)
{
    struct bed b;
    moving(&b);
    node_event(&b, REFIT_EV_STAGED, 1);
    node_failed(&b, 1, 12);
    known(&b, 0);
    known(&b, 2);
    ck_assert_uint_eq(worker(&b, 12)->held, 0);
    ck_assert(!worker(&b, 12)->proven);
    quiet(&b);
    nobody_feeds(&b);
    bed_close(&b);
}
END_TEST

START_TEST(sources_are_not_released_before_it_is_known_what_they_sent)
{
    struct bed b;
    uint8_t content[16] = {1};
    usual(&b, REFIT_STAGED_RECEIVE, true);
    struct refit_event ev = submit_event(1, "a", content);
    ev.submit.release_at = REFIT_RELEASE_READ;
    step(&b, ev);
    publish_all(&b, 1);
    plan_and_prepare(&b);
    read_but_not_known(&b, 0);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 0);
    ck_assert(!refit_find_version(b.r, 1)->source_released);
    known(&b, 0);
    ck_assert_uint_eq(told(&b, REFIT_TELL_SOURCE_RELEASED), 2);
    bed_close(&b);
}
END_TEST

/* As after a restart: nothing but what nodes say, of a version that attempts have moved before. */
START_TEST(what_only_its_node_has_seen_feeds_nobody_and_is_not_committed_uncompared)
{
    struct bed b;
    moving(&b);
    uint64_t content = b.r->publication;
    node_event(&b, REFIT_EV_STAGED, 1);
    (void)abort_version(&b, 1);
    quiet(&b);
    leave(&b, 11, false);
    leave(&b, 12, false);
    says_it_holds(&b, 21, 0, 0, 1, content);
    says_it_holds(&b, 22, 1, 1, 1, content);
    for (uint64_t w = 21; w <= 22; w++) {
        ck_assert_uint_eq(worker(&b, w)->held, 1);
        ck_assert(!worker(&b, w)->proven);
    }
    nobody_feeds(&b);
    bed_close(&b);
}
END_TEST

START_TEST(who_holds_it_unproven_is_compared_with_who_is_proven)
{
    struct bed b;
    moving(&b);
    uint64_t content = b.r->publication;
    known(&b, 0);
    known(&b, 2);
    node_event(&b, REFIT_EV_STAGED, 1);
    (void)abort_version(&b, 1);
    quiet(&b);
    leave(&b, 11, false);
    says_it_holds(&b, 21, 0, 0, 1, content);
    feeds(&b, 12); /* a plan, though nobody lacks anything */
    ck_assert(refit_holds_already(b.r, worker(&b, 21)));
    ck_assert_int_eq(refit_worker_role(b.r, worker(&b, 21)), REFIT_ROLE_RECEIVES);
    plan_and_prepare(&b);
    node_event(&b, REFIT_EV_STAGED, 0);
    ck_assert(!worker(&b, 21)->proven); /* what the feeder holds is not known yet */
    known(&b, 1);
    ck_assert(worker(&b, 21)->proven);
    node_event(&b, REFIT_EV_STAGED, 1);
    ck_assert_int_eq(phase(&b, 1), REFIT_COMMITTED);
    bed_close(&b);
}
END_TEST

START_TEST(who_is_proven_is_so_when_its_node_has_joined_again_with_the_same_content)
{
    for (int other = 0; other < 2; other++) {
        struct bed b;
        moving(&b);
        uint64_t content = b.r->publication;
        known(&b, 0);
        known(&b, 2);
        node_event(&b, REFIT_EV_STAGED, 1);
        (void)abort_version(&b, 1);
        quiet(&b);
        says_it_holds(&b, 12, 1, 1, 1, content + (uint64_t)other);
        ck_assert_uint_eq(worker(&b, 12)->held, 1);
        ck_assert_int_eq(worker(&b, 12)->proven, !other);
        if (other)
            nobody_feeds(&b);
        else
            feeds(&b, 12);
        bed_close(&b);
    }
}
END_TEST

/* An aborted number may come again with other weights, which who took no part then has not got. */
START_TEST(who_is_proven_with_other_content_under_the_number_feeds_nobody)
{
    struct bed b;
    moving(&b);
    known(&b, 0);
    known(&b, 2);
    node_event(&b, REFIT_EV_STAGED, 1);
    (void)abort_version(&b, 1);
    quiet(&b);
    ck_assert(worker(&b, 12)->proven);
    refit_find_version(b.r, 1)->publication ^= 1; /* what has been moved since */
    nobody_feeds(&b);
    bed_close(&b);
}
END_TEST

/* A newcomer's layout, of which no fingerprint is known from the commit: what half a catch-up left there feeds no other. */
START_TEST(what_a_catch_up_left_uncompared_feeds_no_newcomer)
{
    struct bed b;
    usual(&b, REFIT_STAGED_RECEIVE, true);
    b.r->config.feed = b.r->config.catch_up = true;
    whole(&b, 1, "a");
    layout(&b, REFIT_DESTINATION, "eval", 2, 2);
    node_up(&b, 2);
    (void)attach(
        &b, (struct attach){31, 2, REFIT_DESTINATION, "eval", 0, REFIT_STAGED_RECEIVE, true, 0, 0});
    ck_assert_ptr_nonnull(did(&b, REFIT_DO_PLAN));
    planned(&b);
    for (uint32_t n = 0; n < 3; n++)
        node_event(&b, REFIT_EV_PREPARED, n);
    node_event(&b, REFIT_EV_STAGED, 2);
    ck_assert_uint_eq(worker(&b, 31)->held, 1);
    ck_assert(!worker(&b, 31)->proven);
    node_failed(&b, 1, 0);
    for (uint32_t n = 0; n < 3; n++)
        node_event(&b, REFIT_EV_QUIESCED, n);
    ck_assert_ptr_null(b.r->in_flight);
    leave(&b, 11, true); /* who could feed is gone */
    leave(&b, 12, true);
    (void)attach(
        &b, (struct attach){32, 2, REFIT_DESTINATION, "eval", 1, REFIT_STAGED_RECEIVE, true, 0, 0});
    tick(&b, 600000);
    ck_assert_ptr_null(b.r->in_flight);
    ck_assert_uint_eq(worker(&b, 32)->held, 0);
    bed_close(&b);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(who_was_not_compared_with_all_that_the_sources_sent_feeds_nobody)                            \
    X(it_is_compared_when_the_trainer_publishes_again_and_nothing_of_it_moves)                     \
    X(what_the_sources_send_proves_what_stages_afterwards)                                         \
    X(what_the_sources_send_proves_what_has_staged_before)                                         \
    X(what_was_on_its_way_when_the_attempt_was_called_off_proves_too)                              \
    X(a_source_node_that_has_staged_has_told_what_it_sent)                                         \
    X(who_is_blamed_is_not_proven_whatever_comes_later)                                            \
    X(sources_are_not_released_before_it_is_known_what_they_sent)                                  \
    X(what_only_its_node_has_seen_feeds_nobody_and_is_not_committed_uncompared)                    \
    X(who_holds_it_unproven_is_compared_with_who_is_proven)                                        \
    X(who_is_proven_is_so_when_its_node_has_joined_again_with_the_same_content)                    \
    X(who_is_proven_with_other_content_under_the_number_feeds_nobody)                              \
    X(what_a_catch_up_left_uncompared_feeds_no_newcomer)
#include "test/lib/main.h"
