/* How reshardctl says whom a version waits for. */
#include <check.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"
#include "client/ctl_waiting.c" /* belongs to reshardctl, not to the library that tests link */

/* Compares what is said of the texts that follow, up to a NULL, with `expected`. */
static void says(const char *expected, ...)
{
    json_t *list = json_array();
    struct buf said;
    va_list args;
    va_start(args, expected);
    for (const char *text; (text = va_arg(args, const char *)) != NULL;)
        (void)json_array_append_new(list, json_string(text));
    va_end(args);
    buf_init(&said);
    waiting_put(&said, list);
    buf_put(&said, "", 1);
    ck_assert_int_eq(buf_error(&said), 0);
    ck_assert_str_eq((const char *)said.data, expected);
    buf_close(&said);
    json_decref(list);
}

START_TEST(a_reason_is_said_once_with_all_its_ranks)
{
    says("; waiting for train/ranks 0-2,5,7-8 (gone: why), eval/rank 3 (gone: why), train/rank 6 "
         "(late)",
         "train/rank 0 (gone: why)", "train/rank 1 (gone: why)", "eval/rank 3 (gone: why)",
         "train/rank 2 (gone: why)", "train/rank 5 (gone: why)", "train/rank 6 (late)",
         "train/rank 7 (gone: why)", "train/rank 8 (gone: why)", NULL);
}
END_TEST

START_TEST(other_texts_stay_as_they_are)
{
    says("", NULL);
    says("; waiting for the ledger", "the ledger", NULL);
    says("; waiting for node n1, node n1, a/rank of b", "node n1", "node n1", "a/rank of b", NULL);
    says("; waiting for m/ranks 1-2, and 7 more", "m/rank 1", "m/rank 2", "and 7 more", NULL);
}
END_TEST

START_TEST(after_eight_reasons_the_rest_is_counted)
{
    says("; waiting for a, b, c, d, e, f, g, m/ranks 1-2 and 2 more", "a", "b", "c", "d", "e", "f",
         "g", "m/rank 1", "i", "m/rank 2", "k", NULL);
}
END_TEST

START_TEST(out_of_memory_is_told)
{
    json_t *list = json_pack("[sss]", "m/rank 1 (why)", "m/rank 2 (why)", "the ledger");
    bool failed = true;
    for (long n = 1; failed; n++) {
        struct buf said;
        buf_init(&said);
        mem_fail_at(n);
        waiting_put(&said, list);
        mem_fail_at(0);
        failed = buf_error(&said) != 0;
        ck_assert(failed || n > 1);
        buf_close(&said);
    }
    json_decref(list);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_reason_is_said_once_with_all_its_ranks)                                                    \
    X(other_texts_stay_as_they_are)                                                                \
    X(after_eight_reasons_the_rest_is_counted)                                                     \
    X(out_of_memory_is_told)

#include "test/lib/main.h"
