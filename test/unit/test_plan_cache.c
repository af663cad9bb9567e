/* The plan cache: hits by input, the oldest out first, plans in use outlive the cache's interest. */
#include <stdlib.h>

#include "plan/plan_cache.h"
#include "test/lib/plan_random.h"

#include <check.h>

static struct plan *some_plan(struct zoo_case *c, uint8_t digest[16])
{
    struct plan *p = NULL;
    struct err e = {0};
    ck_assert_msg(plan_make(&c->input, &p, &e) == 0, "%s", e.text);
    ck_assert_int_eq(plan_input_digest(&c->input, digest), 0);
    return p;
}

static void note(void *arg)
{
    ++*(int *)arg;
}

START_TEST(the_same_input_is_a_hit_and_any_other_option_a_miss)
{
    struct zoo_case c;
    uint8_t d[16], other[16];
    int dropped = 0;
    const struct plan *p = NULL;
    random_case(7, &c);
    struct plan_cache *cache = plan_cache_new(4);
    struct plan *made = some_plan(&c, d);
    ck_assert_ptr_null(plan_cache_get(cache, d));
    ck_assert_int_eq(plan_cache_put(cache, d, made, note, &dropped, &p), 0);
    ck_assert_ptr_eq(p, made);
    ck_assert_ptr_eq(plan_cache_get(cache, d), made);
    c.input.options.ring_slots++;
    ck_assert_int_eq(plan_input_digest(&c.input, other), 0);
    ck_assert_ptr_null(plan_cache_get(cache, other));
    uint64_t hits, misses;
    plan_cache_counts(cache, &hits, &misses);
    ck_assert_uint_eq(hits, 1);
    ck_assert_uint_eq(misses, 2);
    plan_cache_release(cache, p);
    plan_cache_release(cache, p);
    ck_assert_int_eq(dropped, 0);
    plan_cache_free(cache);
    ck_assert_int_eq(dropped, 1);
    case_close(&c);
}
END_TEST

START_TEST(the_least_recently_used_falls_out_and_lives_on_while_in_use)
{
    struct zoo_case c;
    uint8_t d[3][16];
    int dropped[3] = {0};
    const struct plan *p[3];
    random_case(11, &c);
    struct plan_cache *cache = plan_cache_new(2);
    for (uint32_t i = 0; i < 3; i++) {
        c.input.options.ring_slots = i + 1;
        struct plan *made = some_plan(&c, d[i]);
        ck_assert_int_eq(plan_cache_put(cache, d[i], made, note, &dropped[i], &p[i]), 0);
        if (i == 1) { /* the first is used again, so the second is the oldest */
            ck_assert_ptr_eq(plan_cache_get(cache, d[0]), p[0]);
            plan_cache_release(cache, p[0]);
        }
    }
    ck_assert_uint_eq(plan_cache_size(cache), 2);
    ck_assert_ptr_null(plan_cache_get(cache, d[1]));
    ck_assert_int_eq(dropped[1], 0);
    ck_assert_uint_gt(plan_totals(p[1])->tensors, 0); /* still readable */
    plan_cache_release(cache, p[1]);
    ck_assert_int_eq(dropped[1], 1);
    plan_cache_release(cache, p[0]);
    plan_cache_release(cache, p[2]);
    plan_cache_free(cache);
    ck_assert_int_eq(dropped[0] + dropped[2], 2);
    case_close(&c);
}
END_TEST

START_TEST(a_second_plan_for_the_same_input_is_dropped)
{
    struct zoo_case c;
    uint8_t d[16];
    int first = 0, second = 0;
    const struct plan *p = NULL, *q = NULL;
    random_case(13, &c);
    struct plan_cache *cache = plan_cache_new(2);
    ck_assert_int_eq(plan_cache_put(cache, d, some_plan(&c, d), note, &first, &p), 0);
    struct plan *again = some_plan(&c, d);
    mem_fail_at(1); /* no memory is needed for it */
    ck_assert_int_eq(plan_cache_put(cache, d, again, note, &second, &q), 0);
    mem_fail_at(0);
    ck_assert_ptr_eq(p, q);
    ck_assert_int_eq(second, 1);
    plan_cache_release(cache, p);
    plan_cache_release(cache, q);
    plan_cache_free(cache);
    ck_assert_int_eq(first, 1);
    case_close(&c);
}
END_TEST

START_TEST(without_memory_the_plan_stays_the_callers)
{
    struct zoo_case c;
    uint8_t d[16];
    int dropped = 0;
    const struct plan *p = NULL;
    random_case(17, &c);
    mem_fail_at(1);
    ck_assert_ptr_null(plan_cache_new(2));
    struct plan_cache *cache = plan_cache_new(2);
    struct plan *made = some_plan(&c, d);
    mem_fail_at(1);
    ck_assert_int_eq(plan_cache_put(cache, d, made, note, &dropped, &p), RS_ENOMEM);
    ck_assert_int_eq(dropped, 0);
    ck_assert_uint_eq(plan_cache_size(cache), 0);
    plan_free(made);
    plan_cache_free(cache);
    case_close(&c);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(the_same_input_is_a_hit_and_any_other_option_a_miss)                                         \
    X(the_least_recently_used_falls_out_and_lives_on_while_in_use)                                 \
    X(a_second_plan_for_the_same_input_is_dropped)                                                 \
    X(without_memory_the_plan_stays_the_callers)
#include "test/lib/main.h"
