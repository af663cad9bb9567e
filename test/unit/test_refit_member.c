/* The node's part of an attempt, order by order. Its rules stand in refit/member.c. */
#include "refit/member.h"

#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"

#define MS UINT64_C(1000000)

static const uint8_t PLAN[16] = {0xD1}, OTHER[16] = {0xD2};

struct bed {
    struct member m;
    struct member_update u;
    uint64_t now_ns;
    char did[256]; /* the last step's actions in short */
};

static const char *const NAMES[] = {
    [MEMBER_DO_PLAN] = "plan",    [MEMBER_DO_PREPARE] = "prepare", [MEMBER_DO_START] = "start",
    [MEMBER_DO_ABORT] = "abort",  [MEMBER_DO_KILL] = "kill",       [MEMBER_DO_END] = "end",
    [MEMBER_DO_SET_DEADLINE] = ""};
static const char *const REPORTS[] = {[MEMBER_REPORT_PREPARED] = "PREPARED",
                                      [MEMBER_REPORT_PROGRESS] = "PROGRESS",
                                      [MEMBER_REPORT_STAGED] = "STAGED",
                                      [MEMBER_REPORT_FAILED] = "FAILED",
                                      [MEMBER_REPORT_QUIESCED] = "QUIESCED"};

/* "abort 3; FAILED 3" … */
static const char *step(struct bed *b, struct member_event ev)
{
    ev.now_ns = b->now_ns += MS;
    ev.digest = ev.digest == NULL ? PLAN : ev.digest;
    member_step(&b->m, &ev, &b->u);
    member_check(&b->m);
    b->did[0] = '\0';
    for (size_t i = 0; i < b->u.n_actions; i++) {
        const struct member_action *a = &b->u.actions[i];
        const char *name = a->type == MEMBER_DO_REPORT ? REPORTS[a->report] : NAMES[a->type];
        size_t at = strlen(b->did);
        if (name[0] != '\0')
            (void)snprintf(b->did + at, sizeof b->did - at, "%s%s %llu", at == 0 ? "" : "; ", name,
                           (unsigned long long)a->attempt);
    }
    return b->did;
}

static const char *order(struct bed *b, enum member_event_type type, uint64_t attempt)
{
    return step(b, (struct member_event){
                       .type = type, .session = 1, .attempt = attempt, .version = 7, .epoch = 5});
}

static const char *answer(struct bed *b, enum member_event_type type, uint64_t attempt, int code)
{
    return step(
        b, (struct member_event){.type = type, .attempt = attempt, .code = code, .text = "why"});
}

static const char *event(struct bed *b, enum member_event_type type)
{
    return step(b, (struct member_event){.type = type, .text = "why"});
}

static const char *joined(struct bed *b, uint64_t session, uint64_t coordinator)
{
    return step(b, (struct member_event){
                       .type = MEMBER_EV_JOINED, .session = session, .coordinator = coordinator});
}

static const char *failed_text(const struct bed *b)
{
    for (size_t i = 0; i < b->u.n_actions; i++)
        if (b->u.actions[i].type == MEMBER_DO_REPORT &&
            b->u.actions[i].report == MEMBER_REPORT_FAILED)
            return b->u.actions[i].text;
    return "";
}

/* Joined to coordinator 100 by session 1, its attempt 3 in that state. */
static void bed_init(struct bed *b, enum member_state state)
{
    *b = (struct bed){.now_ns = 1000 * MS};
    member_init(&b->m, "m", 3000);
    (void)event(b, MEMBER_EV_DATA_PLANE_UP);
    (void)joined(b, 1, 100);
    if (state == MEMBER_IDLE)
        return;
    ck_assert_str_eq(order(b, MEMBER_EV_PREPARE, 3), "plan 3");
    if (state == MEMBER_PREPARING)
        return;
    if (state == MEMBER_ABORTING) {
        ck_assert_str_eq(order(b, MEMBER_EV_ABORT, 3), "abort 3");
        return;
    }
    ck_assert_str_eq(answer(b, MEMBER_EV_PLANNED, 3, 0), "prepare 3");
    ck_assert_str_eq(answer(b, MEMBER_EV_MADE_READY, 3, 0), "PREPARED 3");
    if (state == MEMBER_PREPARED)
        return;
    ck_assert_str_eq(order(b, MEMBER_EV_START, 3), "start 3");
    if (state == MEMBER_STARTED)
        return;
    ck_assert_str_eq(answer(b, MEMBER_EV_LANDED, 3, 0), "STAGED 3");
}

static const enum member_state ACTIVE[] = {MEMBER_PREPARING, MEMBER_PREPARED, MEMBER_STARTED};

START_TEST(a_prepare_for_a_data_plane_that_has_died_since_is_refused)
{
    struct bed b;
    bed_init(&b, MEMBER_IDLE);
    (void)event(&b, MEMBER_EV_DATA_PLANE_DEAD);
    (void)step(&b, (struct member_event){.type = MEMBER_EV_DATA_PLANE_UP, .data_plane = 2});
    struct member_event prepare = {.type = MEMBER_EV_PREPARE,
                                   .session = 1,
                                   .attempt = 3,
                                   .version = 7,
                                   .epoch = 5,
                                   .data_plane = 1};
    ck_assert_str_eq(step(&b, prepare), "FAILED 3");
    ck_assert_ptr_nonnull(strstr(failed_text(&b), "replaced"));
    prepare.attempt = 4;
    prepare.data_plane = 2;
    ck_assert_str_eq(step(&b, prepare), "plan 4");
}
END_TEST

START_TEST(an_attempt_goes_through_every_state_and_ends_idle)
{
    struct bed b;
    bed_init(&b, MEMBER_STARTED);
    ck_assert_str_eq(answer(&b, MEMBER_EV_PROGRESS, 3, 0), "PROGRESS 3");
    ck_assert_str_eq(answer(&b, MEMBER_EV_LANDED, 3, 0), "STAGED 3");
    ck_assert(!member_quiet(&b.m) && !member_moves(&b.m));
    ck_assert_str_eq(order(&b, MEMBER_EV_END, 3), "end 3");
    ck_assert(member_quiet(&b.m));
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 4), "plan 4");
}
END_TEST

START_TEST(an_abort_is_answered_when_the_data_plane_is_quiet_in_every_state)
{
    for (size_t i = 0; i < 3; i++) {
        struct bed b;
        bed_init(&b, ACTIVE[i]);
        ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 3), "abort 3");
        ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 3), "");
        ck_assert_str_eq(answer(&b, MEMBER_EV_QUIET, 3, 0), "end 3; QUIESCED 3");
        ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 3), "QUIESCED 3");
    }
    struct bed b;
    bed_init(&b, MEMBER_STAGED);
    ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 3), "abort 3");
    ck_assert_str_eq(answer(&b, MEMBER_EV_QUIET, 3, 0), "end 3; QUIESCED 3");
}
END_TEST

START_TEST(orders_of_another_session_do_nothing)
{
    static const enum member_event_type orders[] = {
        MEMBER_EV_PREPARE, MEMBER_EV_START, MEMBER_EV_ABORT, MEMBER_EV_END, MEMBER_EV_EXPEL};
    struct bed b;
    bed_init(&b, MEMBER_PREPARED);
    for (size_t i = 0; i < 5; i++)
        for (uint64_t attempt = 2; attempt <= 4; attempt++) {
            ck_assert_str_eq(step(&b, (struct member_event){.type = orders[i],
                                                            .session = 9,
                                                            .attempt = attempt,
                                                            .epoch = 5}),
                             "");
            ck_assert_int_eq(b.m.state.state, MEMBER_PREPARED);
        }
}
END_TEST

START_TEST(what_is_over_here_is_not_begun_again)
{
    struct bed b;
    bed_init(&b, MEMBER_ABORTING);
    (void)answer(&b, MEMBER_EV_QUIET, 3, 0);
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 3), "");
    ck_assert_str_eq(order(&b, MEMBER_EV_START, 3), "");
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 2), "");
    /* An abort that overtook its PREPARE. */
    ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 4), "QUIESCED 4");
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 4), "");
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 5), "plan 5");
}
END_TEST

START_TEST(repeated_orders_are_answered_again_only_where_the_answer_was_given)
{
    struct bed b;
    bed_init(&b, MEMBER_PREPARING);
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 3), "");
    ck_assert_str_eq(order(&b, MEMBER_EV_START, 3), "");
    bed_init(&b, MEMBER_PREPARED);
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 3), "PREPARED 3");
    bed_init(&b, MEMBER_STARTED);
    ck_assert_str_eq(order(&b, MEMBER_EV_START, 3), "");
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 3), "");
    bed_init(&b, MEMBER_STAGED);
    ck_assert_str_eq(order(&b, MEMBER_EV_START, 3), "STAGED 3");
}
END_TEST

START_TEST(an_older_epoch_is_refused_with_both_numbers)
{
    struct bed b;
    bed_init(&b, MEMBER_STAGED);
    (void)order(&b, MEMBER_EV_END, 3);
    struct member_event old = {
        .type = MEMBER_EV_PREPARE, .session = 1, .attempt = 4, .epoch = 4, .version = 8};
    ck_assert_str_eq(step(&b, old), "FAILED 4");
    ck_assert_str_eq(failed_text(&b), "epoch 4 is over: this node is in epoch 5");
    ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 4), "QUIESCED 4");
}
END_TEST

START_TEST(another_plan_than_the_coordinators_is_told_with_both_digests_before_anything_is_prepared)
{
    struct bed b;
    bed_init(&b, MEMBER_PREPARING);
    ck_assert_str_eq(step(&b, (struct member_event){.type = MEMBER_EV_PLANNED,
                                                    .attempt = 3,
                                                    .digest = OTHER,
                                                    .text = "device 1 of node n1"}),
                     "FAILED 3; abort 3");
    ck_assert_str_eq(failed_text(&b),
                     "this node's plan is d2000000000000000000000000000000, the coordinator's is "
                     "d1000000000000000000000000000000: device 1 of node n1");
    ck_assert_str_eq(answer(&b, MEMBER_EV_QUIET, 3, 0), "end 3");
    ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 3), "QUIESCED 3");
}
END_TEST

START_TEST(a_failure_is_reported_once_and_the_node_lets_go_by_itself)
{
    static const struct {
        enum member_state in;
        enum member_event_type by;
    } cases[] = {{MEMBER_PREPARING, MEMBER_EV_PLANNED}, {MEMBER_STARTED, MEMBER_EV_LANDED}};
    for (size_t i = 0; i < 2; i++) {
        struct bed b;
        bed_init(&b, cases[i].in);
        ck_assert_str_eq(answer(&b, cases[i].by, 3, RS_EDATALOSS), "FAILED 3; abort 3");
        ck_assert_str_eq(answer(&b, cases[i].by, 3, RS_EDATALOSS), "");
        ck_assert_str_eq(order(&b, MEMBER_EV_START, 3), "");
        ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 3), "");
        ck_assert_str_eq(answer(&b, MEMBER_EV_QUIET, 3, 0), "end 3; QUIESCED 3");
    }
    struct bed b;
    bed_init(&b, MEMBER_PREPARING);
    (void)answer(&b, MEMBER_EV_PLANNED, 3, 0);
    ck_assert_str_eq(answer(&b, MEMBER_EV_MADE_READY, 3, RS_EPEER), "FAILED 3; abort 3");
}
END_TEST

START_TEST(a_broken_session_aborts_everything_and_what_was_asked_is_said_at_the_next_join)
{
    static const enum member_event_type ends[] = {MEMBER_EV_BROKEN, MEMBER_EV_LEASE_OVER};
    for (size_t e = 0; e < 2; e++)
        for (size_t i = 0; i < 3; i++) {
            struct bed b;
            bed_init(&b, ACTIVE[i]);
            ck_assert_str_eq(event(&b, ends[e]), "abort 3");
            ck_assert(!member_quiet(&b.m)); /* it may not join yet */
            ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 3), "");
            ck_assert_str_eq(answer(&b, MEMBER_EV_QUIET, 3, 0), "end 3");
            ck_assert(member_quiet(&b.m));
            ck_assert_str_eq(joined(&b, 2, 100), "QUIESCED 3");
            ck_assert_str_eq(joined(&b, 3, 100), "");
            ck_assert_str_eq(step(&b, (struct member_event){.type = MEMBER_EV_PREPARE,
                                                            .session = 3,
                                                            .attempt = 3,
                                                            .epoch = 6}),
                             "");
        }
    struct bed b;
    bed_init(&b, MEMBER_STAGED); /* nothing moves: there is nothing to wait for */
    ck_assert_str_eq(event(&b, MEMBER_EV_BROKEN), "end 3");
    ck_assert(member_quiet(&b.m));
}
END_TEST

START_TEST(a_session_that_breaks_while_aborting_keeps_what_it_owes)
{
    struct bed b;
    bed_init(&b, MEMBER_ABORTING);
    ck_assert_str_eq(event(&b, MEMBER_EV_BROKEN), "");
    ck_assert_str_eq(joined(&b, 2, 100), ""); /* too early, but no harm is done */
    ck_assert_str_eq(answer(&b, MEMBER_EV_QUIET, 3, 0), "end 3; QUIESCED 3");
    ck_assert_uint_eq(b.u.actions[b.u.n_actions - 1].session, 2);
}
END_TEST

START_TEST(another_coordinator_counts_attempts_anew)
{
    struct bed b;
    bed_init(&b, MEMBER_STAGED);
    (void)event(&b, MEMBER_EV_BROKEN);
    ck_assert_str_eq(joined(&b, 2, 200), "");
    ck_assert_str_eq(step(&b,
                          (struct member_event){
                              .type = MEMBER_EV_PREPARE, .session = 2, .attempt = 1, .epoch = 1}),
                     "plan 1");
}
END_TEST

START_TEST(the_death_of_the_data_plane_ends_all_but_what_is_staged)
{
    struct bed b;
    for (size_t i = 0; i < 3; i++) {
        bed_init(&b, ACTIVE[i]);
        ck_assert_str_eq(event(&b, MEMBER_EV_DATA_PLANE_DEAD), "end 3");
        ck_assert(member_quiet(&b.m));
        ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 4), "FAILED 4");
        (void)event(&b, MEMBER_EV_DATA_PLANE_UP);
        ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 4), ""); /* it has been refused */
        ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 5), "plan 5");
    }
    bed_init(&b, MEMBER_ABORTING);
    ck_assert_str_eq(event(&b, MEMBER_EV_DATA_PLANE_DEAD), "end 3");
    bed_init(&b, MEMBER_STAGED);
    ck_assert_str_eq(event(&b, MEMBER_EV_DATA_PLANE_DEAD), "");
    ck_assert_str_eq(order(&b, MEMBER_EV_END, 3), "end 3");
    bed_init(&b, MEMBER_STAGED);
    (void)event(&b, MEMBER_EV_DATA_PLANE_DEAD);
    ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 3), "end 3; QUIESCED 3");
}
END_TEST

START_TEST(a_data_plane_that_does_not_let_go_is_ended)
{
    struct bed b;
    bed_init(&b, MEMBER_ABORTING);
    b.now_ns += 1000 * MS;
    ck_assert_str_eq(event(&b, MEMBER_EV_TICK), "");
    b.now_ns += 2000 * MS;
    ck_assert_str_eq(event(&b, MEMBER_EV_TICK), "kill 3");
    bed_init(&b, MEMBER_ABORTING);
    ck_assert_str_eq(order(&b, MEMBER_EV_EXPEL, 3), "kill 3");
    bed_init(&b, MEMBER_ABORTING);
    ck_assert_str_eq(answer(&b, MEMBER_EV_QUIET, 3, RS_EDEADLINE), "kill 3");
    bed_init(&b, MEMBER_STARTED);
    ck_assert_str_eq(order(&b, MEMBER_EV_EXPEL, 3), "abort 3; kill 3");
    ck_assert_str_eq(event(&b, MEMBER_EV_DATA_PLANE_DEAD), "end 3");
    ck_assert_str_eq(order(&b, MEMBER_EV_EXPEL, 3), "QUIESCED 3");
}
END_TEST

START_TEST(a_newer_attempt_waits_for_the_older_one_to_let_go)
{
    struct bed b;
    bed_init(&b, MEMBER_STAGED); /* the coordinator goes on: it has ended */
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 4), "end 3; plan 4");
    bed_init(&b, MEMBER_STARTED);
    ck_assert_str_eq(order(&b, MEMBER_EV_PREPARE, 4), "FAILED 4; abort 3");
    ck_assert_str_eq(order(&b, MEMBER_EV_ABORT, 4), "");
    ck_assert_str_eq(answer(&b, MEMBER_EV_QUIET, 3, 0), "end 3; QUIESCED 4");
    bed_init(&b, MEMBER_STARTED);
    ck_assert_str_eq(order(&b, MEMBER_EV_END, 3), "abort 3");
}
END_TEST

START_TEST(start_of_what_was_not_prepared_is_refused)
{
    struct bed b;
    bed_init(&b, MEMBER_IDLE);
    ck_assert_str_eq(order(&b, MEMBER_EV_START, 3), "FAILED 3");
}
END_TEST

START_TEST(late_answers_change_nothing)
{
    static const enum member_event_type answers[] = {MEMBER_EV_PLANNED, MEMBER_EV_MADE_READY,
                                                     MEMBER_EV_PROGRESS, MEMBER_EV_LANDED,
                                                     MEMBER_EV_QUIET};
    for (int state = MEMBER_IDLE; state <= MEMBER_ABORTING; state++)
        for (size_t i = 0; i < 5; i++) {
            struct bed b;
            bed_init(&b, (enum member_state)state);
            ck_assert_str_eq(answer(&b, answers[i], 2, 0), "");
            ck_assert_str_eq(answer(&b, answers[i], 2, RS_EPEER), "");
            ck_assert_int_eq(b.m.state.state, state);
        }
}
END_TEST

/* Any events in any order: the invariants hold, and what is reported is true. */
START_TEST(whatever_comes_the_invariants_hold)
{
    uint64_t random = 1;
    struct bed b;
    bed_init(&b, MEMBER_IDLE);
    uint64_t session = 1, started = 0, quiet_up_to = 0;
    for (int i = 0; i < 300000; i++) {
        struct member_event ev = {.type = (enum member_event_type)(1 + random_next(&random) % 16),
                                  .session = session - random_next(&random) % 2,
                                  .coordinator = 100,
                                  .attempt = b.m.fence + random_next(&random) % 3,
                                  .epoch = 5 + random_next(&random) % 2,
                                  .code = random_next(&random) % 6 == 0 ? RS_EPEER : 0,
                                  .digest = random_next(&random) % 8 == 0 ? OTHER : PLAN};
        if (random_next(&random) % 2 == 0) { /* what would come next if all went well */
            static const enum member_event_type next[] = {
                [MEMBER_IDLE] = MEMBER_EV_PREPARE,   [MEMBER_PREPARING] = MEMBER_EV_PLANNED,
                [MEMBER_PREPARED] = MEMBER_EV_START, [MEMBER_STARTED] = MEMBER_EV_LANDED,
                [MEMBER_STAGED] = MEMBER_EV_END,     [MEMBER_ABORTING] = MEMBER_EV_QUIET};
            ev.type = b.m.planned && b.m.state.state == MEMBER_PREPARING ? MEMBER_EV_MADE_READY
                                                                         : next[b.m.state.state];
            ev.attempt = b.m.attempt != 0 ? b.m.attempt : b.m.fence + 1;
            ev.session = session;
            ev.epoch = b.m.newest_epoch;
        }
        if (ev.type == MEMBER_EV_JOINED)
            ev.session = ++session;
        if (random_next(&random) % 3 == 0)
            b.now_ns += 2000 * MS;
        int before = b.m.state.state;
        uint64_t attempt = b.m.attempt;
        (void)step(&b, ev);
        for (size_t k = 0; k < b.u.n_actions; k++) {
            const struct member_action *a = &b.u.actions[k];
            if (a->type == MEMBER_DO_START) {
                ck_assert_uint_gt(a->attempt, quiet_up_to); /* never again once it was quiet */
                started = a->attempt;
            }
            if (a->type != MEMBER_DO_REPORT)
                continue;
            ck_assert_uint_eq(a->session, b.m.session);
            ck_assert_uint_ne(a->session, 0);
            if (a->report == MEMBER_REPORT_STAGED)
                ck_assert_int_eq(b.m.state.state, MEMBER_STAGED);
            if (a->report != MEMBER_REPORT_QUIESCED)
                continue;
            ck_assert(b.m.state.state == MEMBER_IDLE || b.m.attempt > a->attempt);
            quiet_up_to = a->attempt > quiet_up_to ? a->attempt : quiet_up_to;
            ck_assert(
                !(before == MEMBER_STARTED && attempt == a->attempt)); /* by way of ABORTING */
        }
    }
    ck_assert_uint_gt(started, 100); /* it got somewhere */
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_prepare_for_a_data_plane_that_has_died_since_is_refused)                                   \
    X(an_attempt_goes_through_every_state_and_ends_idle)                                           \
    X(an_abort_is_answered_when_the_data_plane_is_quiet_in_every_state)                            \
    X(orders_of_another_session_do_nothing)                                                        \
    X(what_is_over_here_is_not_begun_again)                                                        \
    X(repeated_orders_are_answered_again_only_where_the_answer_was_given)                          \
    X(an_older_epoch_is_refused_with_both_numbers)                                                 \
    X(another_plan_than_the_coordinators_is_told_with_both_digests_before_anything_is_prepared)    \
    X(a_failure_is_reported_once_and_the_node_lets_go_by_itself)                                   \
    X(a_broken_session_aborts_everything_and_what_was_asked_is_said_at_the_next_join)              \
    X(a_session_that_breaks_while_aborting_keeps_what_it_owes)                                     \
    X(another_coordinator_counts_attempts_anew)                                                    \
    X(the_death_of_the_data_plane_ends_all_but_what_is_staged)                                     \
    X(a_data_plane_that_does_not_let_go_is_ended)                                                  \
    X(a_newer_attempt_waits_for_the_older_one_to_let_go)                                           \
    X(start_of_what_was_not_prepared_is_refused)                                                   \
    X(late_answers_change_nothing)                                                                 \
    X(whatever_comes_the_invariants_hold)
#include "test/lib/main.h"
