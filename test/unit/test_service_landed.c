/* What nodes said had landed: kept for one content, one plan and one attempt; what a node lost is dropped alone. And the ledger's
 * rows of what memory holds, merged. */
#include <check.h>
#include <string.h>

#include "base/mem.h"
#include "service/held.h"
#include "service/landed.h"

static const struct landed_key key = {.version = 5, .content = 77, .plan = {1, 2, 3}};
static uint8_t few[] = {0x81}, many[] = {0x01, 0x02};

static struct attempt_landed said(uint32_t node, uint64_t attempt)
{
    return node == 0 ? (struct attempt_landed){0, attempt, few, sizeof few}
                     : (struct attempt_landed){node, attempt, many, sizeof many};
}

static void note(struct landed_store *s, const struct landed_key *of, uint32_t node,
                 uint64_t attempt)
{
    const struct attempt_landed x = said(node, attempt);
    landed_note(s, of, &x);
}

static uint32_t found(const struct landed_store *s, const struct landed_key *of)
{
    uint32_t n;
    ck_assert_int_eq(landed_find(s, of, &n) == NULL, n == 0);
    return n;
}

START_TEST(bits_are_counted_from_the_lowest)
{
    const struct attempt_landed x = said(0, 1), y = said(3, 1);
    for (uint32_t i = 0; i < 8; i++)
        ck_assert_int_eq(landed_bit(&x, i), i == 0 || i == 7);
    for (uint32_t i = 0; i < 16; i++)
        ck_assert_int_eq(landed_bit(&y, i), i == 0 || i == 9);
    ck_assert_uint_eq(landed_bytes(0), 0);
    ck_assert_uint_eq(landed_bytes(8), 1);
    ck_assert_uint_eq(landed_bytes(9), 2);
    ck_assert_uint_eq(landed_bytes(UINT32_MAX), 536870912);
}
END_TEST

START_TEST(only_the_same_version_content_and_plan_find_it)
{
    struct landed_store s = {0};
    struct landed_key other = key;
    note(&s, &key, 0, 1);
    note(&s, &key, 3, 1);
    few[0] = 0; /* what was said is copied */
    uint32_t n;
    const struct attempt_landed *x = landed_find(&s, &key, &n);
    ck_assert_uint_eq(n, 2);
    ck_assert_uint_eq(landed_of(x, n, 0)->holds[0], 0x81);
    ck_assert_uint_eq(landed_of(x, n, 3)->n_bytes, 2);
    ck_assert_ptr_null(landed_of(x, n, 1));
    few[0] = 0x81;
    other.plan[15] ^= 1;
    ck_assert_uint_eq(found(&s, &other), 0);
    other = key;
    other.content++;
    ck_assert_uint_eq(found(&s, &other), 0);
    other = key;
    other.version++;
    ck_assert_uint_eq(found(&s, &other), 0);
    landed_clear(&s);
    ck_assert_uint_eq(found(&s, &key), 0);
}
END_TEST

START_TEST(a_newer_attempt_or_another_plan_replaces_all_of_it)
{
    struct landed_store s = {0};
    struct landed_key other = key;
    other.plan[0]++;
    note(&s, &key, 0, 1);
    note(&s, &key, 3, 2); /* node 0 said nothing of attempt 2: its memory is another by now */
    uint32_t n;
    const struct attempt_landed *x = landed_find(&s, &key, &n);
    ck_assert_uint_eq(n, 1);
    ck_assert_uint_eq(x[0].node, 3);
    note(&s, &other, 0, 2);
    ck_assert_uint_eq(found(&s, &key), 0);
    ck_assert_uint_eq(found(&s, &other), 1);
    landed_clear(&s);
}
END_TEST

START_TEST(what_one_node_lost_the_others_keep)
{
    struct landed_store s = {0};
    uint32_t n;
    note(&s, &key, 0, 1);
    note(&s, &key, 3, 1);
    landed_drop(&s, 2);
    ck_assert_uint_eq(found(&s, &key), 2);
    landed_drop(&s, 0);
    ck_assert_uint_eq(landed_find(&s, &key, &n)->node, 3);
    landed_drop(&s, 3);
    ck_assert_uint_eq(found(&s, &key), 0);
}
END_TEST

START_TEST(without_memory_all_is_let_go_and_moved_again)
{
    bool failed = true;
    for (long i = 1; failed; i++) {
        struct landed_store s = {0};
        note(&s, &key, 0, 1);
        mem_fail_at(i);
        note(&s, &key, 3, 1);
        failed = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_uint_eq(found(&s, &key), failed ? 0 : 2);
        landed_clear(&s);
        ck_assert_int_lt(i, 10);
    }
}
END_TEST

START_TEST(copies_survive_every_failed_allocation)
{
    const struct attempt_landed both[] = {said(0, 1), said(3, 1)};
    bool failed = true;
    for (long i = 1; failed; i++) {
        mem_fail_at(i);
        struct attempt_landed *copy = landed_copy(both, 2);
        failed = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(copy == NULL, failed);
        landed_free(copy, 2);
        ck_assert_int_lt(i, 10);
    }
}
END_TEST

START_TEST(a_row_keeps_the_ranks_of_which_nothing_newer_is_known)
{
    static const uint8_t rollout[16] = {1}, judge[16] = {2};
    struct held_store *h = held_new();
    struct buf row, newer;
    uint64_t fold = 0;
    buf_init(&row);
    buf_init(&newer);
    held_put(&row, rollout, 0, 10);
    held_put(&row, rollout, 1, 11);
    held_put(&row, judge, 1, 12);
    ck_assert_int_eq(held_load(h, 5, row.data, row.n_bytes), 0);
    held_put(&newer, rollout, 1, 21);
    held_put(&newer, rollout, 2, 22);
    held_merge(h, 5, &newer);
    ck_assert_int_eq(held_load(h, 5, newer.data, newer.n_bytes), 0);
    ck_assert(held_is(h, 5, rollout, 0, 10) && held_is(h, 5, judge, 1, 12));
    ck_assert(held_is(h, 5, rollout, 1, 21) && !held_is(h, 5, rollout, 1, 11));
    ck_assert(held_find(h, 5, rollout, 2, &fold) && fold == 22);
    ck_assert(!held_find(h, 5, judge, 0, &fold) && !held_find(h, 6, rollout, 0, &fold));
    buf_close(&row);
    buf_close(&newer);
    held_free(h);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(bits_are_counted_from_the_lowest)                                                            \
    X(only_the_same_version_content_and_plan_find_it)                                              \
    X(a_newer_attempt_or_another_plan_replaces_all_of_it)                                          \
    X(what_one_node_lost_the_others_keep)                                                          \
    X(without_memory_all_is_let_go_and_moved_again)                                                \
    X(copies_survive_every_failed_allocation)                                                      \
    X(a_row_keeps_the_ranks_of_which_nothing_newer_is_known)
#include "test/lib/main.h"
