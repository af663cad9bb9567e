/* What nodes saw of cells, merged: who is believed, who is blamed, in every order of coming. */
#include <check.h>
#include <stdlib.h>
#include <xxhash.h>

#include "base/mem.h"
#include "service/cells.h"
#include "service/cells_collect.h"
#include "service/cells_sum.h"
#include "test/lib/plan_random.h"

enum { SOURCE = 0, ROLLOUT = 1, EVAL = 2 };

static struct cell_print print_of(uint64_t cell, uint64_t fingerprint, uint32_t layout,
                                  uint32_t rank)
{
    return (struct cell_print){cell, fingerprint, layout, rank};
}

static int merge_one(struct cells *c, struct cell_print p, struct cells_difference *x)
{
    return cells_merge(c, &p, 1, x);
}

START_TEST(nodes_that_agree_pass_in_any_order)
{
    struct cells *c = cells_new();
    struct cells_difference x;
    for (uint64_t cell = 0; cell < 5000; cell++) { /* more than the first table holds */
        ck_assert_int_eq(merge_one(c, print_of(cell, cell * 7, cell % 2 ? ROLLOUT : SOURCE, 1), &x),
                         0);
        ck_assert_int_eq(merge_one(c, print_of(cell, cell * 7, cell % 2 ? SOURCE : EVAL, 2), &x),
                         0);
        ck_assert_int_eq(merge_one(c, print_of(cell, cell * 7, ROLLOUT, 3), &x), 0);
    }
    ck_assert_int_eq(cells_settle(c, &x), 0);
    cells_free(c);
}
END_TEST

/* Three prints of one cell, of which one destination's is wrong; all six orders blame that one. */
START_TEST(the_destination_that_differs_from_the_source_is_blamed_in_every_order)
{
    static const unsigned orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                          {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    const struct cell_print prints[3] = {print_of(9, 100, SOURCE, 4), print_of(9, 100, ROLLOUT, 5),
                                         print_of(9, 101, EVAL, 6)};
    for (unsigned i = 0; i < 6; i++) {
        struct cells *c = cells_new();
        struct cells_difference x = {0};
        int r = 0;
        for (unsigned k = 0; r == 0 && k < 3; k++)
            r = merge_one(c, prints[orders[i][k]], &x);
        ck_assert_int_eq(r, RS_EDATALOSS);
        ck_assert_uint_eq(x.bad.layout, EVAL);
        ck_assert_uint_eq(x.bad.rank, 6);
        ck_assert_uint_eq(x.bad.fingerprint, 101);
        ck_assert_uint_eq(x.good.layout, SOURCE);
        ck_assert_uint_eq(x.good.rank, 4);
        ck_assert_uint_eq(x.good.fingerprint, 100);
        cells_free(c);
    }
}
END_TEST

START_TEST(destinations_that_differ_wait_for_a_source_and_are_told_in_the_end)
{
    struct cells *c = cells_new();
    struct cells_difference x = {0};
    ck_assert_int_eq(merge_one(c, print_of(3, 1, ROLLOUT, 0), &x), 0);
    ck_assert_int_eq(merge_one(c, print_of(3, 2, ROLLOUT, 1), &x), 0);
    ck_assert_int_eq(merge_one(c, print_of(4, 2, SOURCE, 1), &x),
                     0); /* another cell's tells nothing */
    ck_assert_int_eq(cells_settle(c, &x), RS_EDATALOSS);
    ck_assert_uint_eq(x.bad.cell, 3);
    ck_assert_uint_eq(x.good.cell, 3);
    ck_assert_uint_ne(x.bad.fingerprint, x.good.fingerprint);
    cells_free(c);
}
END_TEST

START_TEST(sources_that_differ_are_told_at_once)
{
    struct cells *c = cells_new();
    struct cells_difference x = {0};
    ck_assert_int_eq(merge_one(c, print_of(1, 1, SOURCE, 0), &x), 0);
    ck_assert_int_eq(merge_one(c, print_of(1, 2, SOURCE, 3), &x), RS_EDATALOSS);
    ck_assert_uint_eq(x.bad.rank, 3);
    ck_assert_uint_eq(x.good.rank, 0);
    cells_free(c);
}
END_TEST

static bool is_wrong(const struct cells *c, uint64_t cell, uint32_t layout, uint32_t rank)
{
    size_t n;
    const struct cells_difference *x = cells_wrong(c, &n);
    unsigned found = 0;
    for (size_t i = 0; i < n; i++)
        found += x[i].bad.cell == cell && x[i].bad.layout == layout && x[i].bad.rank == rank;
    ck_assert_uint_le(found, 1);
    return found == 1;
}

START_TEST(merging_goes_on_after_a_difference_and_all_that_are_wrong_are_listed)
{
    const struct cell_print early[] = {print_of(1, 11, ROLLOUT, 0), print_of(2, 99, ROLLOUT, 0),
                                       print_of(3, 99, EVAL, 1), print_of(3, 33, ROLLOUT, 0),
                                       print_of(3, 98, EVAL, 2)};
    const struct cell_print sent[] = {print_of(1, 11, SOURCE, 7), print_of(2, 22, SOURCE, 7),
                                      print_of(3, 33, SOURCE, 7), print_of(4, 44, SOURCE, 7)};
    const struct cell_print late[] = {print_of(4, 97, ROLLOUT, 3), print_of(2, 22, EVAL, 1)};
    struct cells *c = cells_new();
    struct cells_difference x = {0};
    size_t n;
    ck_assert_int_eq(cells_merge(c, early, 5, &x), 0);
    ck_assert_int_eq(cells_merge(c, sent, 4, &x), RS_EDATALOSS);
    ck_assert_uint_eq(x.bad.cell, 2); /* the first in the order of coming */
    ck_assert_int_eq(cells_merge(c, late, 2, &x), RS_EDATALOSS);
    ck_assert_uint_eq(x.bad.rank, 3);
    (void)cells_wrong(c, &n);
    ck_assert_uint_eq(n, 4);
    ck_assert(is_wrong(c, 2, ROLLOUT, 0) && is_wrong(c, 3, EVAL, 1) && is_wrong(c, 3, EVAL, 2) &&
              is_wrong(c, 4, ROLLOUT, 3));
    ck_assert_int_eq(cells_settle(c, &x), 0); /* the source has settled all of it */
    cells_free(c);
}
END_TEST

START_TEST(where_no_source_tells_none_of_those_that_differ_is_believed)
{
    struct cells *c = cells_new();
    struct cells_difference x = {0};
    ck_assert_int_eq(merge_one(c, print_of(3, 1, ROLLOUT, 0), &x), 0);
    ck_assert_int_eq(merge_one(c, print_of(3, 2, ROLLOUT, 1), &x), 0);
    ck_assert_int_eq(merge_one(c, print_of(5, 2, ROLLOUT, 2), &x), 0);
    ck_assert_int_eq(cells_settle(c, &x), RS_EDATALOSS);
    ck_assert(is_wrong(c, 3, ROLLOUT, 0) && is_wrong(c, 3, ROLLOUT, 1));
    ck_assert(!is_wrong(c, 5, ROLLOUT, 2));
    cells_free(c);
}
END_TEST

START_TEST(a_cell_that_no_source_has_told_of_is_found_until_one_has)
{
    struct cells *c = cells_new();
    struct cells_difference x;
    struct cell_print p = {0};
    ck_assert(!cells_untold(c, &p));
    ck_assert_int_eq(merge_one(c, print_of(7, 70, SOURCE, 0), &x), 0);
    ck_assert_int_eq(merge_one(c, print_of(7, 70, ROLLOUT, 1), &x), 0);
    ck_assert(!cells_untold(c, &p));
    ck_assert_int_eq(merge_one(c, print_of(8, 80, ROLLOUT, 1), &x), 0);
    ck_assert_int_eq(merge_one(c, print_of(8, 81, EVAL, 2), &x), 0); /* in dispute */
    ck_assert_int_eq(merge_one(c, print_of(9, 90, EVAL, 2), &x), 0);
    ck_assert(cells_untold(c, &p) && (p.cell == 8 || p.cell == 9));
    ck_assert_int_eq(merge_one(c, print_of(8, 80, SOURCE, 0), &x), RS_EDATALOSS);
    ck_assert(cells_untold(c, &p));
    ck_assert_uint_eq(p.cell, 9);
    ck_assert_uint_eq(p.layout, EVAL);
    ck_assert_uint_eq(p.rank, 2);
    ck_assert_int_eq(merge_one(c, print_of(9, 90, SOURCE, 0), &x), 0);
    ck_assert_int_eq(merge_one(c, print_of(9, 90, SOURCE, 1), &x), 0); /* once more */
    ck_assert(!cells_untold(c, &p));
    cells_free(c);
}
END_TEST

/* What a node tells of a plan whose cells all have fingerprint 0; how many cells. */
static uint32_t node_tells(const struct plan *plan, struct topology *topology, uint32_t node,
                           enum compare_mode mode, enum cells_part which, struct cells *to)
{
    struct err e = {0};
    struct buf bytes;
    struct cells_difference x;
    struct plan_entry entry = {.topology = topology, .node = node};
    struct cell_print *prints = NULL;
    uint32_t n = 0;
    buf_init(&bytes);
    ck_assert_msg(plan_program(plan, node, &bytes, &e) == 0, "%s", e.text);
    ck_assert_msg(program_open(bytes.data, bytes.n_bytes, &entry.program, &e) == 0, "%s", e.text);
    uint64_t *holds = calloc(entry.program.n_holds + 1, sizeof *holds);
    ck_assert_int_eq(cells_collect(&entry, holds, mode, which, &prints, &n), 0);
    ck_assert_int_eq(cells_merge(to, prints, n, &x), 0);
    free(holds);
    mem_free(prints);
    buf_close(&bytes);
    return n;
}

/* Of plans of every strategy, with casts, relays, staging, domains across nodes: so nobody is accused who has told all. */
START_TEST(in_any_plan_nothing_is_untold_once_all_nodes_have_told_and_something_is_if_one_has_not)
{
    unsigned n_found = 0;
    for (unsigned seed = 1; seed <= 400; seed++) {
        struct zoo_case c;
        struct plan *p = NULL;
        struct err e = {0};
        enum compare_mode mode = seed % 3 == 0 ? COMPARE_SAMPLED : COMPARE_FULL;
        random_case(seed, &c);
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "seed %u: %s", seed, e.text);
        struct cells *all = cells_new(), *some = cells_new();
        struct cell_print untold;
        uint32_t silent = seed % c.topology.n_nodes, n_kept = 0;
        for (uint32_t i = 0; i < c.topology.n_nodes; i++) {
            (void)node_tells(p, &c.topology, i, mode, CELLS_OF_SOURCES, all);
            if (i != silent)
                (void)node_tells(p, &c.topology, i, mode, CELLS_OF_SOURCES, some);
        }
        for (uint32_t i = 0; i < c.topology.n_nodes; i++) {
            (void)node_tells(p, &c.topology, i, mode, CELLS_OF_THE_REST, all);
            n_kept += node_tells(p, &c.topology, i, mode, CELLS_OF_THE_REST, some);
        }
        ck_assert_msg(!cells_untold(all, &untold), "seed %u", seed);
        n_found += n_kept > 0 && cells_untold(some, &untold);
        cells_free(all);
        cells_free(some);
        plan_free(p);
        case_close(&c);
    }
    ck_assert_uint_gt(n_found, 50);
}
END_TEST

START_TEST(what_is_listed_is_bounded_and_it_is_said_that_there_is_more)
{
    struct cells *c = cells_new();
    struct cells_difference x;
    size_t n;
    for (uint64_t cell = 0; cell <= CELLS_MOST_WRONG; cell++) {
        ck_assert(!cells_wrong_more(c));
        ck_assert_int_eq(merge_one(c, print_of(cell, 1, SOURCE, 0), &x), 0);
        ck_assert_int_eq(merge_one(c, print_of(cell, 2, ROLLOUT, 0), &x),
                         cell < CELLS_MOST_WRONG ? RS_EDATALOSS : 0);
    }
    (void)cells_wrong(c, &n);
    ck_assert_uint_eq(n, CELLS_MOST_WRONG);
    ck_assert(cells_wrong_more(c));
    cells_free(c);
}
END_TEST

/* 3,000 prints with one dispute: every allocation fails once, and what was merged before stays. */
static int merge_many(struct cells *c)
{
    struct cells_difference x;
    int r = 0;
    for (uint64_t cell = 0; r == 0 && cell < 3000; cell++)
        r = merge_one(c, print_of(cell, cell, ROLLOUT, 0), &x);
    if (r == 0)
        r = merge_one(c, print_of(7, 8, ROLLOUT, 1), &x);
    if (r == 0)
        r = merge_one(c, print_of(7, 9, SOURCE, 1), &x);
    return r == RS_EDATALOSS ? 0 : r;
}

START_TEST(merging_survives_every_failed_allocation)
{
    int r = RS_ENOMEM;
    long i = 1;
    for (; r != 0; i++) {
        struct cells_difference x;
        mem_fail_at(i);
        struct cells *c = cells_new();
        r = c == NULL ? RS_ENOMEM : merge_many(c);
        mem_fail_at(0);
        if (c == NULL)
            continue;
        ck_assert(r == 0 || r == RS_ENOMEM);
        ck_assert_int_eq(merge_one(c, print_of(100000, 1, SOURCE, 0), &x), 0);
        cells_free(c);
    }
    ck_assert_int_gt(i, 4);
}
END_TEST

/* 1,000 cells in runs of 1, 2, 3, …, with gaps between them. */
static uint32_t many_prints(struct cell_print *prints, uint32_t layout)
{
    uint32_t n = 0;
    uint64_t cell = 100;
    for (uint32_t length = 1; n < 1000; length++, cell += 5)
        for (uint32_t i = 0; i < length && n < 1000; i++, n++)
            prints[n] = print_of(cell++, 3 * (uint64_t)n * n + 1, layout, 0);
    return n;
}

START_TEST(a_sum_has_the_runs_of_the_cells_and_one_digest)
{
    static struct cell_print prints[1000];
    static struct cell_run runs[1000];
    uint64_t fingerprints[1000];
    uint8_t digest[16];
    XXH128_canonical_t canonical;
    uint32_t n = many_prints(prints, ROLLOUT), n_runs, at = 0;
    ck_assert_uint_eq(cells_sum(prints, n, runs, 1000, &n_runs, digest), n);
    ck_assert_uint_eq(n_runs, 45); /* 1 + 2 + … + 44 is 990 */
    for (uint32_t i = 0; i < n_runs; i++)
        for (uint32_t k = 0; k < runs[i].n; k++, at++)
            ck_assert_uint_eq(runs[i].cell + k, prints[at].cell);
    ck_assert_uint_eq(at, n);
    for (uint32_t i = 0; i < n; i++)
        fingerprints[i] = prints[i].fingerprint;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(fingerprints, sizeof fingerprints));
    ck_assert_mem_eq(digest, canonical.digest, 16);
}
END_TEST

START_TEST(sorted_cells_make_the_fewest_runs)
{
    static struct cell_print prints[1000];
    static struct cell_run runs[1000];
    uint8_t digest[16];
    uint32_t n = many_prints(prints, ROLLOUT), n_runs;
    for (uint32_t i = 0; i < n; i++) { /* 7 and 1,000 have no common divisor */
        struct cell_print x = prints[i];
        prints[i] = prints[i * 7 % n];
        prints[i * 7 % n] = x;
    }
    (void)cells_sum(prints, n, runs, 1000, &n_runs, digest);
    ck_assert_uint_gt(n_runs, 500);
    mem_fail_at(1);
    ck_assert_int_eq(cells_sort(prints, n), RS_ENOMEM);
    mem_fail_at(0);
    ck_assert_int_eq(cells_sort(prints, n), 0);
    ck_assert_uint_eq(cells_sum(prints, n, runs, 1000, &n_runs, digest), n);
    ck_assert_uint_eq(n_runs, 45);
    for (uint32_t i = 1; i < n; i++)
        ck_assert_uint_lt(prints[i - 1].cell, prints[i].cell);
    static const uint64_t far[6] = {UINT64_MAX, 1, UINT64_C(1) << 62, 0, UINT64_C(1) << 33, 2048};
    for (uint32_t i = 0; i < 6; i++)
        prints[i] = print_of(far[i], i, ROLLOUT, i);
    ck_assert_int_eq(cells_sort(prints, 6), 0);
    static const uint32_t order[6] = {3, 1, 5, 4, 2, 0};
    for (uint32_t i = 0; i < 6; i++) {
        ck_assert_uint_eq(prints[i].cell, far[order[i]]);
        ck_assert_uint_eq(prints[i].rank, order[i]);
    }
    ck_assert_int_eq(cells_sort(prints, 0), 0);
}
END_TEST

START_TEST(a_sum_goes_no_further_than_there_is_room_for_runs)
{
    static struct cell_print prints[1000];
    struct cell_run runs[4];
    uint8_t digest[16];
    uint32_t n = many_prints(prints, ROLLOUT), n_runs, at = 0, rounds = 0;
    for (; at < n; rounds++) {
        at += cells_sum(prints + at, n - at, runs, 4, &n_runs, digest);
        ck_assert_uint_le(n_runs, 4);
    }
    ck_assert_uint_eq(rounds, 12); /* of 45 runs */
    ck_assert_uint_eq(cells_sum(prints, 0, runs, 4, &n_runs, digest), 0);
    ck_assert_uint_eq(n_runs, 0);
}
END_TEST

START_TEST(a_sum_agrees_where_sources_have_told_just_that)
{
    static struct cell_print sent[1000], taken[1000];
    static struct cell_run runs[1000];
    uint8_t digest[16];
    struct cells_difference x;
    uint32_t n = many_prints(sent, SOURCE), n_runs;
    (void)many_prints(taken, ROLLOUT);
    (void)cells_sum(taken, n, runs, 1000, &n_runs, digest);
    ck_assert(!cells_agree(NULL, runs, n_runs, digest));
    for (uint32_t wrong = 0; wrong < n; wrong += 111) {
        struct cells *c = cells_new(), *less = cells_new(), *other = cells_new();
        for (uint32_t i = 0; i < n; i++) {
            struct cell_print bad = sent[i];
            bad.fingerprint ^= i == wrong ? UINT64_C(1) << 63 : 0;
            ck_assert_int_eq(merge_one(c, sent[i], &x), 0);
            ck_assert_int_eq(merge_one(other, bad, &x), 0);
            ck_assert_int_eq(merge_one(less, i == wrong ? taken[i] : sent[i], &x), 0);
        }
        ck_assert(cells_agree(c, runs, n_runs, digest));
        ck_assert(!cells_agree(other, runs, n_runs, digest));
        ck_assert(
            !cells_agree(less, runs, n_runs, digest)); /* of one a destination has told alone */
        digest[wrong % 16] ^= 1;
        ck_assert(!cells_agree(c, runs, n_runs, digest));
        digest[wrong % 16] ^= 1;
        runs[n_runs - 1].n++;
        ck_assert(!cells_agree(c, runs, n_runs, digest)); /* nobody has told of that one */
        runs[n_runs - 1].n--;
        cells_free(c);
        cells_free(less);
        cells_free(other);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(nodes_that_agree_pass_in_any_order)                                                          \
    X(the_destination_that_differs_from_the_source_is_blamed_in_every_order)                       \
    X(destinations_that_differ_wait_for_a_source_and_are_told_in_the_end)                          \
    X(sources_that_differ_are_told_at_once)                                                        \
    X(merging_goes_on_after_a_difference_and_all_that_are_wrong_are_listed)                        \
    X(where_no_source_tells_none_of_those_that_differ_is_believed)                                 \
    X(a_cell_that_no_source_has_told_of_is_found_until_one_has)                                    \
    X(in_any_plan_nothing_is_untold_once_all_nodes_have_told_and_something_is_if_one_has_not)      \
    X(what_is_listed_is_bounded_and_it_is_said_that_there_is_more)                                 \
    X(merging_survives_every_failed_allocation)                                                    \
    X(a_sum_has_the_runs_of_the_cells_and_one_digest)                                              \
    X(sorted_cells_make_the_fewest_runs)                                                           \
    X(a_sum_goes_no_further_than_there_is_room_for_runs)                                           \
    X(a_sum_agrees_where_sources_have_told_just_that)
#include "test/lib/main.h"
