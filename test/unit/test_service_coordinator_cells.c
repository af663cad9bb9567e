/* What nodes tell the coordinator of cells that they sent and received: who is compared, believed, blamed and proven. */
#include "test/lib/coordinator_bed.h"

START_TEST(nodes_that_saw_different_content_end_it_and_the_destination_is_blamed)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    cells_say(ROLLOUT, attempt, 6);
    staged_say(attempt); /* not believed: it is known by now that they differ */
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    const char *reason = version_of(1)->reason;
    ck_assert_msg(strstr(reason, "tensor 'w' [") != NULL &&
                      strstr(reason, "layout 'rollout' rank 0") != NULL &&
                      strstr(reason, "layout 'train' rank 0 sent") != NULL,
                  "%s", reason);
    ck_assert_int_ne(expect(ROLLOUT, NODE_ORDER_END)->o.code, 0);
    world_close();
}
END_TEST

START_TEST(what_a_node_received_is_believed_in_short_where_it_is_what_the_sources_told)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    sum_say(attempt, 5);
    staged_say(attempt);
    until_phase(1, REFIT_COMMITTED);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_CELLS), 0);
    world_close();
}
END_TEST

START_TEST(a_node_that_received_something_else_is_asked_for_each_cell_and_blamed_by_it)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    sum_say(attempt, 6);
    staged_say(attempt);
    ck_assert_uint_eq(expect(ROLLOUT, NODE_ORDER_CELLS)->o.attempt, attempt);
    ck_assert_int_ne(version_of(1)->phase.state, REFIT_STAGED); /* it is not staged before that */
    cells_say(ROLLOUT, attempt, 6);
    staged_say(attempt);
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(version_of(1)->reason, "layout 'rollout' rank 0"));
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_CELLS), 1);
    world_close();
}
END_TEST

START_TEST(a_node_that_is_sooner_than_the_sources_words_is_asked_for_each_cell)
{
    for (uint64_t told = 5; told <= 6; told++) {
        world_open();
        uint64_t attempt = until_started();
        sum_say(attempt, 5);
        staged_say(attempt);
        (void)expect(ROLLOUT, NODE_ORDER_CELLS);
        cells_say(ROLLOUT, attempt, 5);
        staged_say(attempt);
        cells_say(TRAINER, attempt, told);
        say(TRAINER, REFIT_EV_STAGED, attempt);
        if (told == 5)
            until_phase(1, REFIT_COMMITTED);
        else
            (void)expect(ROLLOUT, NODE_ORDER_ABORT);
        world_close();
    }
}
END_TEST

START_TEST(who_is_in_doubt_when_another_has_differed_is_not_believed)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(TRAINER, attempt, 5);
    sum_say(attempt, 6);
    cells_say(TRAINER, attempt, 4); /* its sources differ */
    staged_say(attempt);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_CELLS), 0);
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    world_close();
}
END_TEST

START_TEST(sums_of_cells_that_the_plan_has_not_end_the_attempt)
{
    static const struct cell_run far[][2] = {
        {{UINT64_MAX, 1}, {0, 1}}, {{0, UINT32_MAX}, {0, 1}}, {{1, 1}, {1U << 20, 1}}};
    for (unsigned i = 0; i < sizeof far / sizeof *far; i++) {
        world_open();
        uint64_t attempt = until_started();
        const struct node_report r = {.type = NODE_REPORT_CELL_SUM,
                                      .model = "m",
                                      .attempt = attempt,
                                      .runs = far[i],
                                      .n_runs = 2};
        coordinator_report(w.c, ROLLOUT, &r);
        (void)expect(ROLLOUT, NODE_ORDER_ABORT);
        ck_assert_ptr_nonnull(strstr(version_of(1)->reason, "cells that the plan has not"));
        world_close();
    }
}
END_TEST

/* The last word to both of ROLLOUT's workers: what they hold, and of which version they have got wrong bytes. */
static void check_told(uint64_t held, uint64_t wrong)
{
    for (uint32_t rank = 0; rank < 2; rank++) {
        const struct got *last = NULL;
        for (unsigned i = 0; i < w.n_orders; i++)
            if (w.orders[i].node == ROLLOUT && w.orders[i].o.type == NODE_ORDER_WORKER &&
                w.orders[i].o.worker == 100 * ROLLOUT + rank)
                last = &w.orders[i];
        ck_assert_ptr_nonnull(last);
        ck_assert_uint_eq(last->o.held, held);
        ck_assert_uint_eq(last->o.version, wrong);
    }
}

START_TEST(all_workers_of_a_node_that_had_staged_wrong_bytes_are_not_believed_any_more)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(ROLLOUT, attempt, 6);
    staged_say(attempt);
    check_told(1, 0); /* by then nothing speaks against it */
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    check_told(0, 1);
    staged_say(attempt); /* once more, late */
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    check_told(0, 1);
    world_close();
}
END_TEST

/* Both of ROLLOUT's workers have the version, which they will not apply: the next may be written over it. */
static void commit_and_skip(uint64_t attempt)
{
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    cells_say(ROLLOUT, attempt, 5);
    staged_say(attempt);
    until_phase(1, REFIT_COMMITTED);
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct node_report r = event_of(REFIT_EV_APPLY);
        r.event.apply.worker = 100 * ROLLOUT + rank;
        r.event.apply.version = 1;
        r.event.apply.skip = true;
        coordinator_report(w.c, ROLLOUT, &r);
    }
}

START_TEST(sources_that_differ_before_anything_was_written_take_nothing_from_who_receives)
{
    world_open();
    commit_and_skip(until_started());
    check_told(1, 0);
    submit(2);
    (void)expect(TRAINER, NODE_ORDER_TELL);
    publish(0, 2);
    publish(1, 2);
    uint64_t attempt = expect(TRAINER, NODE_ORDER_PREPARE)->o.attempt;
    (void)expect(ROLLOUT, NODE_ORDER_PREPARE);
    struct node_report r = event_of(REFIT_EV_FAILED);
    r.event.node.attempt = attempt;
    r.event.node.code = RS_EDATALOSS;
    r.event.node.text = "the source changed since it was published";
    coordinator_report(w.c, TRAINER, &r);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(2, REFIT_ABORTED);
    check_told(1, 0);
    world_close();
}
END_TEST

static void known_say(uint64_t attempt)
{
    struct node_report r = event_of(REFIT_EV_PROGRESS);
    r.event.node.attempt = attempt;
    r.event.node.text = "";
    r.event.node.sources_known = true;
    coordinator_report(w.c, TRAINER, &r);
}

static bool are_proven(void)
{
    const struct refit *refit = decider_find(w.c, "m")->refit;
    bool first = refit_find_worker(refit, 100 * ROLLOUT)->proven;
    ck_assert_int_eq(first, refit_find_worker(refit, 100 * ROLLOUT + 1)->proven);
    return first;
}

START_TEST(what_is_staged_is_proven_by_what_the_sources_node_told_before_it_staged)
{
    for (int sources_first = 0; sources_first < 2; sources_first++) {
        world_open();
        uint64_t attempt = until_started();
        for (int turn = 0; turn < 2; turn++) {
            ck_assert(!are_proven());
            if ((turn == 0) == (sources_first != 0)) {
                cells_say(TRAINER, attempt, 5);
                known_say(attempt);
            } else {
                cells_say(ROLLOUT, attempt, 5);
                staged_say(attempt);
            }
        }
        ck_assert(are_proven());
        check_told(1, 0);
        world_close();
    }
}
END_TEST

START_TEST(wrong_bytes_are_found_by_it_and_never_proven)
{
    for (int sources_first = 0; sources_first < 2; sources_first++) {
        world_open();
        uint64_t attempt = until_started();
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == (sources_first != 0)) {
                cells_say(TRAINER, attempt, 5);
                known_say(attempt);
            } else {
                cells_say(ROLLOUT, attempt, 6);
                staged_say(attempt);
            }
            ck_assert(!are_proven()); /* also while the words to it are looked for */
        }
        (void)expect(TRAINER, NODE_ORDER_ABORT);
        (void)expect(ROLLOUT, NODE_ORDER_ABORT);
        known_say(attempt); /* once more, late */
        ck_assert(!are_proven());
        check_told(0, 1);
        world_close();
    }
}
END_TEST

/* The attempt ends, and says who has kept its cells to itself; nothing that has landed is proven. */
static void check_untold(uint64_t attempt)
{
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    ck_assert(!are_proven());
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    const char *reason = version_of(1)->reason;
    ck_assert_msg(strstr(reason, "node n1: it says that it has told what its sources send, but not "
                                 "of tensor 'w' [") != NULL &&
                      strstr(reason, "layout 'rollout' rank 0 holds") != NULL,
                  "%s", reason);
}

START_TEST(a_node_that_keeps_cells_of_its_sources_to_itself_is_named)
{
    for (int order = 0; order < 3; order++) {
        world_open();
        uint64_t attempt = until_started();
        if (order == 0)
            known_say(attempt); /* without a word about any cell */
        cells_say(ROLLOUT, attempt, 5);
        if (order == 1)
            known_say(attempt);
        if (order == 2) {
            staged_say(attempt);
            say(TRAINER, REFIT_EV_STAGED, attempt);
        }
        check_untold(attempt);
        world_close();
    }
}
END_TEST

START_TEST(cells_that_a_node_keeps_to_itself_are_missed_where_another_tells_in_short)
{
    world_open();
    uint64_t attempt = until_started();
    known_say(attempt); /* without a word about any cell */
    sum_say(attempt, 5);
    staged_say(attempt);
    (void)expect(ROLLOUT, NODE_ORDER_CELLS);
    ck_assert(!are_proven());
    cells_say(ROLLOUT, attempt, 5);
    check_untold(attempt);
    world_close();
}
END_TEST

START_TEST(nobody_speaks_for_ranks_of_another_node)
{
    world_open();
    uint64_t attempt = until_started();
    const struct cell_print print = {.cell = 0, .fingerprint = 5, .layout = 0, .rank = 0};
    struct node_report r = {
        .type = NODE_REPORT_CELLS, .model = "m", .attempt = attempt, .cells = &print, .n_cells = 1};
    coordinator_report(w.c, ROLLOUT, &r); /* as if it were the source, which is believed */
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    ck_assert_msg(
        strstr(version_of(1)->reason, "node n2: it reports cells of ranks that it has not") != NULL,
        "%s", version_of(1)->reason);
    world_close();
}
END_TEST

START_TEST(who_was_compared_is_believed_though_the_sources_node_fails_afterwards)
{
    for (int known = 0; known < 2; known++) {
        world_open();
        uint64_t attempt = until_started();
        cells_say(TRAINER, attempt, 5);
        if (known)
            known_say(attempt);
        cells_say(ROLLOUT, attempt, 5);
        staged_say(attempt);
        struct node_report r = event_of(REFIT_EV_FAILED);
        r.event.node.attempt = attempt;
        r.event.node.code = RS_EDATALOSS;
        r.event.node.text = "the source changed while it was being sent";
        coordinator_report(w.c, TRAINER, &r);
        check_told(known ? 1 : 0, known ? 0 : 1);
        ck_assert_int_eq(are_proven(), known);
        world_close();
    }
}
END_TEST

START_TEST(
    what_has_staged_is_not_believed_where_another_node_found_wrong_bytes_before_the_sources_told)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(ROLLOUT, attempt, 6);
    staged_say(attempt);
    struct node_report r = event_of(REFIT_EV_FAILED);
    r.event.node.attempt = attempt;
    r.event.node.code = RS_EDATALOSS;
    r.event.node.text = "what has landed differs";
    coordinator_report(w.c, TRAINER, &r);
    ck_assert_int_eq(version_of(1)->phase.state, REFIT_ABORTING);
    check_told(0, 1);
    staged_say(attempt);
    check_told(0, 1);
    world_close();
}
END_TEST

#define TESTS(X)                                                                                   \
    X(nodes_that_saw_different_content_end_it_and_the_destination_is_blamed)                       \
    X(what_a_node_received_is_believed_in_short_where_it_is_what_the_sources_told)                 \
    X(a_node_that_received_something_else_is_asked_for_each_cell_and_blamed_by_it)                 \
    X(a_node_that_is_sooner_than_the_sources_words_is_asked_for_each_cell)                         \
    X(who_is_in_doubt_when_another_has_differed_is_not_believed)                                   \
    X(sums_of_cells_that_the_plan_has_not_end_the_attempt)                                         \
    X(all_workers_of_a_node_that_had_staged_wrong_bytes_are_not_believed_any_more)                 \
    X(sources_that_differ_before_anything_was_written_take_nothing_from_who_receives)              \
    X(what_is_staged_is_proven_by_what_the_sources_node_told_before_it_staged)                     \
    X(wrong_bytes_are_found_by_it_and_never_proven)                                                \
    X(a_node_that_keeps_cells_of_its_sources_to_itself_is_named)                                   \
    X(cells_that_a_node_keeps_to_itself_are_missed_where_another_tells_in_short)                   \
    X(nobody_speaks_for_ranks_of_another_node)                                                     \
    X(who_was_compared_is_believed_though_the_sources_node_fails_afterwards)                       \
    X(what_has_staged_is_not_believed_where_another_node_found_wrong_bytes_before_the_sources_told)

#include "test/lib/main.h"
