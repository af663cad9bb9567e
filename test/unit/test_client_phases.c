/* Where the time of versions went, from marks made by hand. */
#include <check.h>
#include <stdbool.h>
#include <string.h>

#include <jansson.h>

#include "client/ctl_api.c" /* these belong to reshardctl, not to the library that tests link */
#include "client/ctl_compare.c"
#include "client/ctl_phases.c"

/* --- two sets of versions ------------------------------------------------------------------------ */

/* Newest first: 20 … 1; epoch 2 from 11 on; even ones by direct, odd ones by reshard. */
static json_t *twenty_versions(void)
{
    json_t *list = json_array();
    for (json_int_t v = 20; v >= 1; v--)
        (void)json_array_append_new(
            list,
            json_pack("{sIsssIsIsIsIssss}", "version", v, "phase", "committed", "epoch",
                      (json_int_t)(v > 10 ? 2 : 1), "total_ns", v, "wire_ns", v, "stall_ns",
                      (json_int_t)0, "strategy", v % 2 ? "reshard" : "direct", "plan_digest", "p"));
    return list;
}

static bool changed_has(const json_t *comparison, const char *what)
{
    size_t i;
    json_t *s;
    json_array_foreach(json_object_get(comparison, "changed"), i,
                       s) if (strcmp(json_string_value(s), what) == 0) return true;
    return false;
}

START_TEST(a_comparison_says_what_else_changed_between_its_sets)
{
    json_t *versions = twenty_versions();
    const struct compare_set both[] = {{2, 2}, {13, 13}}, strategy[] = {{2, 2}, {3, 3}},
                             none[] = {{2, 5}, {6, 9}};
    json_t *c = compare_records(versions, both);
    ck_assert(changed_has(c, "strategy") && changed_has(c, "epoch") && !changed_has(c, "plan"));
    json_decref(c);
    c = compare_records(versions, strategy);
    ck_assert(changed_has(c, "strategy") && !changed_has(c, "epoch"));
    json_decref(c);
    c = compare_records(versions, none);
    ck_assert_uint_eq(json_array_size(json_object_get(c, "changed")), 0);
    json_decref(c);
    (void)json_object_set_new(json_array_get(versions, 20 - 4), "plan_digest", json_string("q"));
    c = compare_records(versions, none);
    ck_assert(changed_has(c, "plan"));
    ck_assert_uint_eq(json_array_size(json_object_get(c, "changed")), 1);
    json_decref(c);
    /* Versions 6 … 9 with other settings; those of before have none that are known. */
    for (int v = 6; v <= 9; v++)
        (void)json_object_set_new(json_array_get(versions, (size_t)(20 - v)), "config_digest",
                                  json_string("k"));
    c = compare_records(versions, none);
    ck_assert(!changed_has(c, "config"));
    json_decref(c);
    for (int v = 2; v <= 5; v++)
        (void)json_object_set_new(json_array_get(versions, (size_t)(20 - v)), "config_digest",
                                  json_string("l"));
    c = compare_records(versions, none);
    ck_assert(changed_has(c, "config") && changed_has(c, "plan"));
    json_decref(c);
    json_decref(versions);
}
END_TEST

/* --- phases --------------------------------------------------------------------------------------- */

static void add_mark(json_t *marks, const char *name, const char *who, json_int_t at, int attempt)
{
    (void)json_array_append_new(
        marks, json_pack("{sssssIsi}", "name", name, "who", who, "at_ns", at, "attempt", attempt));
}

/* A version whose attempt 7 failed at 50 and whose attempt 8 committed at 1000 + `extra`. */
static json_t *version_with_marks(json_int_t version, json_int_t epoch, json_int_t extra)
{
    json_t *marks = json_array();
    add_mark(marks, "pause", "rollout/rank 1", -5, 0);
    add_mark(marks, "submitted", "", 0, 7);
    add_mark(marks, "planned", "", 10, 7);
    add_mark(marks, "planned", "", 60, 8);
    add_mark(marks, "prepared", "", 100, 8);
    add_mark(marks, "first_byte", "", 120, 8);
    add_mark(marks, "last_byte", "", 620 + extra, 8);
    add_mark(marks, "verified", "", 700 + extra, 8);
    add_mark(marks, "accepted", "rollout/instance 1", 750 + extra, 8);
    add_mark(marks, "accepted", "rollout/instance 0", 990 + extra, 8);
    add_mark(marks, "committed", "", 1000 + extra, 8);
    add_mark(marks, "applied", "rollout/rank 1", 1050 + extra, 8);
    add_mark(marks, "applied", "rollout/rank 0", 1100 + extra, 8);
    add_mark(marks, "resume", "rollout/rank 1", 1200 + extra, 0);
    return json_pack("{s{sIsIsssI}so}", "record", "version", version, "epoch", epoch, "phase",
                     "committed", "total_ns", 1000 + extra, "marks", marks);
}

static void same_row(const json_t *array, size_t i, const char *phase, const char *who,
                     json_int_t took)
{
    const json_t *row = json_array_get(array, i);
    ck_assert_str_eq(jstr(row, "phase"), phase);
    ck_assert_str_eq(jstr(row, "who"), who);
    ck_assert_int_eq(json_integer_value(json_object_get(row, "took_ns")), took);
}

START_TEST(phases_are_of_the_newest_attempt_and_come_slowest_first)
{
    json_t *v = version_with_marks(1, 1, 0), *phases = phases_of(v);
    ck_assert_uint_eq(json_array_size(phases), 8);
    same_row(phases, 0, "wire", "", 500);
    same_row(phases, 1, "accept", "", 290);
    for (size_t i = 1; i < 8; i++)
        ck_assert_uint_le(jnum(json_array_get(phases, i), "took_ns"),
                          jnum(json_array_get(phases, i - 1), "took_ns"));
    same_row(phases, 7, "commit", "", 10);
    json_decref(phases);
    json_decref(v);
}
END_TEST

START_TEST(a_phase_without_its_mark_is_part_of_the_next_one)
{
    json_t *v = version_with_marks(1, 1, 0), *marks = json_object_get(v, "marks");
    for (size_t i = json_array_size(marks); i-- > 0;)
        if (strstr(jstr(json_array_get(marks, i), "name"), "_byte") != NULL)
            (void)json_array_remove(marks, i);
    json_t *phases = phases_of(v);
    same_row(phases, 0, "verify", "", 600); /* prepared at 100, verified at 700 */
    ck_assert_uint_eq(json_array_size(phases), 6);
    json_decref(phases);
    json_decref(v);
}
END_TEST

/* Submitted, queued until 400; attempt 3 failed at 500, attempt 4 had begun at 520 and committed at 1000. An earlier
 * submission's attempt 1 was aborted. */
static json_t *queued_and_retried(void)
{
    json_t *marks = json_array();
    add_mark(marks, "submitted", "", 0, 1);
    add_mark(marks, "submitted", "", 0, 3);
    add_mark(marks, "begun", "", 2, 1);
    add_mark(marks, "aborted", "", 90, 1);
    add_mark(marks, "begun", "", 400, 3);
    add_mark(marks, "gathered", "", 450, 3);
    add_mark(marks, "begun", "", 520, 4);
    add_mark(marks, "gathered", "", 600, 4);
    add_mark(marks, "planned", "", 610, 4);
    add_mark(marks, "prepared", "", 650, 4);
    add_mark(marks, "started", "", 740, 4);
    add_mark(marks, "first_byte", "", 739, 4); /* of another node's clock */
    add_mark(marks, "last_byte", "", 900, 4);
    add_mark(marks, "verified", "", 940, 4);
    add_mark(marks, "accepted", "rollout/instance 0", 990, 4);
    add_mark(marks, "committed", "", 1000, 4);
    return json_pack("{s{sIsIsssi}so}", "record", "version", (json_int_t)1, "epoch", (json_int_t)1,
                     "phase", "committed", "total_ns", 1000, "marks", marks);
}

static json_int_t took(const json_t *phases, const char *phase)
{
    size_t i;
    json_t *p;
    json_array_foreach(phases, i,
                       p) if (strcmp(jstr(p, "phase"), phase) ==
                              0) return json_integer_value(json_object_get(p, "took_ns"));
    return -1;
}

START_TEST(time_in_the_queue_and_in_earlier_attempts_is_apart_and_all_add_up)
{
    static const struct {
        const char *phase;
        json_int_t took;
    } want[] = {{"queue", 400},  {"retry", 120}, {"gather", 80}, {"plan", 10},
                {"prepare", 40}, {"ready", 90},  {"start", -1},  {"wire", 160},
                {"verify", 40},  {"accept", 50}, {"commit", 10}};
    json_t *v = queued_and_retried(), *phases = phases_of(v);
    json_int_t sum = 0;
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        ck_assert_msg(took(phases, want[i].phase) == want[i].took, "%s took %lld", want[i].phase,
                      (long long)took(phases, want[i].phase));
        sum += want[i].took < 0 ? 0 : want[i].took;
    }
    ck_assert_int_eq(sum, 1000);
    ck_assert_uint_eq(json_array_size(phases), 10);
    json_decref(phases);
    json_decref(v);
}
END_TEST

START_TEST(a_version_that_ended_otherwise_spent_the_rest_in_the_phase_that_it_was_in)
{
    json_t *marks = json_array(), *v = json_pack("{s{}so}", "record", "marks", marks);
    add_mark(marks, "submitted", "", 0, 0);
    add_mark(marks, "superseded", "", 70, 0);
    json_t *phases = phases_of(v);
    ck_assert_uint_eq(json_array_size(phases), 1);
    ck_assert_int_eq(took(phases, "queue"), 70);
    json_decref(phases);
    (void)json_array_clear(marks);
    add_mark(marks, "submitted", "", 0, 1);
    add_mark(marks, "begun", "", 5, 1);
    add_mark(marks, "aborted", "", 105, 1);
    phases = phases_of(v);
    ck_assert_int_eq(took(phases, "queue"), 5);
    ck_assert_int_eq(took(phases, "gather"), 100); /* nobody published */
    json_decref(phases);
    (void)json_array_clear(marks);
    add_mark(marks, "submitted", "", 0, 1);
    add_mark(marks, "begun", "", 5, 1);
    add_mark(marks, "verified", "", 50, 1);
    add_mark(marks, "accepted", "rollout/instance 0", 60, 1);
    add_mark(marks, "aborted", "", 105, 1);
    phases = phases_of(v);
    ck_assert_int_eq(took(phases, "accept"), 55); /* instance 1 never did */
    ck_assert_int_eq(took(phases, "commit"), -1);
    json_decref(phases);
    json_decref(v);
}
END_TEST

START_TEST(who_was_slowest_is_named_by_instance_and_worker)
{
    json_t *v = version_with_marks(1, 1, 0), *slowest = phases_slowest(v);
    ck_assert_uint_eq(json_array_size(slowest), 5);
    same_row(slowest, 0, "pause", "rollout/rank 1", 1205);
    same_row(slowest, 1, "accept", "rollout/instance 0", 290);
    same_row(slowest, 2, "apply", "rollout/rank 0", 100);
    json_decref(slowest);
    json_decref(v);
}
END_TEST

START_TEST(distributions_keep_the_first_of_an_epoch_apart)
{
    json_t *versions = json_array();
    for (json_int_t v = 12; v >= 1; v--) /* 1 … 4 in epoch 1, 5 … 12 in epoch 2 */
        (void)json_array_append_new(versions, version_with_marks(v, v > 4 ? 2 : 1, 10 * v));
    json_t *over = phases_over(versions);
    const json_t *first = json_object_get(over, "first_of_epoch"),
                 *steady = json_object_get(over, "steady");
    ck_assert_uint_eq(jnum(first, "n"), 2);
    ck_assert_uint_eq(jnum(steady, "n"), 10);
    /* wire is the fourth phase in time: 500 + 10 v. Steady: 2 3 4 6 … 12: median the 5th, 7. */
    const json_t *wire = json_array_get(json_object_get(steady, "phases"), 3);
    ck_assert_str_eq(jstr(wire, "phase"), "wire");
    ck_assert_uint_eq(jnum(wire, "least_ns"), 520);
    ck_assert_uint_eq(jnum(wire, "median_ns"), 570);
    ck_assert_uint_eq(jnum(wire, "p90_ns"), 610);
    ck_assert_uint_eq(jnum(wire, "p99_ns"), 620);
    wire = json_array_get(json_object_get(first, "phases"), 3);
    ck_assert_uint_eq(jnum(wire, "least_ns"), 510);
    ck_assert_uint_eq(jnum(wire, "most_ns"), 550);
    json_decref(over);
    json_decref(versions);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_comparison_says_what_else_changed_between_its_sets)                                        \
    X(phases_are_of_the_newest_attempt_and_come_slowest_first)                                     \
    X(a_phase_without_its_mark_is_part_of_the_next_one)                                            \
    X(time_in_the_queue_and_in_earlier_attempts_is_apart_and_all_add_up)                           \
    X(a_version_that_ended_otherwise_spent_the_rest_in_the_phase_that_it_was_in)                   \
    X(who_was_slowest_is_named_by_instance_and_worker)                                             \
    X(distributions_keep_the_first_of_an_epoch_apart)

#include "test/lib/main.h"
