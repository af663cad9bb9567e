/* The ground: errors, allocation that fails on demand, buffers, lists, mailbox. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/crash.h"
#include "base/err.h"
#include "base/mailbox.h"
#include "base/mem.h"
#include "base/size.h"

START_TEST(err_prefix_builds_a_path_of_what_was_done)
{
    struct err e = {0};
    int r = err_set(&e, RS_EINVAL, "rank %d stands in two cells", 1);
    r = err_prefix(&e, r, "mesh '%s'", "tp");
    ck_assert_int_eq(r, RS_EINVAL);
    ck_assert_str_eq(e.text, "mesh 'tp': rank 1 stands in two cells");
}
END_TEST

START_TEST(err_prefix_does_not_say_the_same_twice)
{
    struct err e = {0};
    int r = err_set(&e, RS_EINVAL, "layout 'a': it has no ranks");
    r = err_prefix(&e, r, "layout '%s'", "a");
    ck_assert_str_eq(e.text, "layout 'a': it has no ranks");
    r = err_prefix(&e, RS_EPROTO, "layout '%s'", "b");
    r = err_prefix(&e, r, "layout");
    ck_assert_str_eq(e.text, "layout: layout 'b': layout 'a': it has no ranks");
    ck_assert_int_eq(e.code, RS_EPROTO);
}
END_TEST

START_TEST(err_text_is_cut_at_a_whole_character)
{
    struct err e = {0};
    char text[ERR_TEXT_BYTES + 8];
    memset(text, 'a', sizeof text);
    text[ERR_TEXT_BYTES - 3] = '\xe2'; /* a three-byte character over the edge */
    text[ERR_TEXT_BYTES - 2] = '\x82';
    text[ERR_TEXT_BYTES - 1] = '\xac';
    text[ERR_TEXT_BYTES + 7] = '\0';
    (void)err_set(&e, RS_EINVAL, "%s", text);
    ck_assert_uint_eq(strlen(e.text), ERR_TEXT_BYTES - 3);
}
END_TEST

START_TEST(err_status_round_trips_for_every_code)
{
    for (int code = -21; code < 0; code++) {
        int status = err_status(code);
        ck_assert_int_gt(status, 0);
        ck_assert_int_eq(err_status(err_from_status(status)), status);
    }
    ck_assert_int_eq(err_from_status(0), 0);
}
END_TEST

START_TEST(a_size_is_bytes_or_a_number_of_binary_units)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},
                {"8388608", 8388608},
                {"8 MiB", 8388608},
                {"8MiB", 8388608},
                {"3KiB", 3072},
                {"2  GiB", UINT64_C(2147483648)},
                {"1TiB", UINT64_C(1099511627776)},
                {"18446744073709551615", UINT64_MAX}};
    static const char *const bad[] = {"",
                                      "MiB",
                                      "-1",
                                      "+1",
                                      " 1",
                                      "1MB",
                                      "1mib",
                                      "1 MiB ",
                                      "1.5MiB",
                                      "0x10",
                                      "8MiBs",
                                      "16777216TiB",
                                      "18446744073709551616"};
    uint64_t bytes;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        ck_assert_int_eq(size_parse(good[i].text, &bytes), 0);
        ck_assert_uint_eq(bytes, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        bytes = 7;
        ck_assert_msg(size_parse(bad[i], &bytes) == RS_EINVAL && bytes == 7, "'%s'", bad[i]);
    }
}
END_TEST

START_TEST(mem_fails_at_the_armed_call_and_only_there)
{
    mem_fail_at(2);
    void *a = mem_alloc(1);
    void *b = mem_alloc(1);
    void *c = mem_alloc(1);
    ck_assert_ptr_nonnull(a);
    ck_assert_ptr_null(b);
    ck_assert_ptr_nonnull(c);
    ck_assert_int_eq(mem_failed(), 1);
    mem_free(a);
    mem_free(c);
}
END_TEST

START_TEST(buf_reader_gives_back_what_was_put_and_marks_a_short_read)
{
    struct buf b;
    struct reader r;
    buf_init(&b);
    buf_put_u8(&b, 7);
    buf_put_u32(&b, 0x01020304U);
    buf_put_u64(&b, 0x1122334455667788U);
    buf_put_str(&b, "xyz");
    reader_init(&r, b.data, b.n_bytes);
    ck_assert_uint_eq(reader_u8(&r), 7);
    ck_assert_uint_eq(reader_u32(&r), 0x01020304U);
    ck_assert_uint_eq(reader_u64(&r), 0x1122334455667788U);
    ck_assert_uint_eq(reader_u32(&r), 3);
    ck_assert_mem_eq(reader_bytes(&r, 3), "xyz", 3);
    ck_assert(!r.short_read);
    ck_assert_uint_eq(reader_u64(&r), 0);
    ck_assert(r.short_read);
    buf_close(&b);
}
END_TEST

START_TEST(buf_survives_every_failed_allocation)
{
    for (long i = 1;; i++) {
        struct buf b;
        buf_init(&b);
        mem_fail_at(i);
        for (unsigned k = 0; k < 100; k++)
            buf_printf(&b, "line %u\n", k);
        int failed = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(buf_error(&b), failed ? RS_ENOMEM : 0);
        buf_close(&b);
        if (!failed)
            break;
    }
}
END_TEST

struct note {
    struct mailbox_item item;
    unsigned *count;
};

static void note_fn(struct mailbox_item *item)
{
    (*container_of(item, struct note, item)->count)++;
}

static void wake_count(void *arg)
{
    (*(unsigned *)arg)++;
}

enum { POSTERS = 4, POSTS = 25000 };

struct poster {
    struct mailbox *box;
    struct note *notes;
};

static void *post_all(void *arg)
{
    struct poster *p = arg;
    for (unsigned i = 0; i < POSTS; i++)
        ck_assert(mailbox_post(p->box, &p->notes[i].item));
    return NULL;
}

START_TEST(mailbox_hands_over_every_item_of_four_threads)
{
    unsigned wakes = 0, count = 0;
    struct mailbox box;
    struct note *notes = calloc((size_t)POSTERS * POSTS, sizeof *notes);
    pthread_t threads[POSTERS];
    struct poster posters[POSTERS];
    mailbox_init(&box, wake_count, &wakes);
    for (unsigned i = 0; i < POSTERS * POSTS; i++)
        notes[i] = (struct note){.item.fn = note_fn, .count = &count};
    for (unsigned t = 0; t < POSTERS; t++) {
        posters[t] = (struct poster){&box, notes + (size_t)t * POSTS};
        ck_assert_int_eq(pthread_create(&threads[t], NULL, post_all, &posters[t]), 0);
    }
    while (count < POSTERS * POSTS)
        (void)mailbox_drain(&box);
    for (unsigned t = 0; t < POSTERS; t++)
        ck_assert_int_eq(pthread_join(threads[t], NULL), 0);
    mailbox_shut(&box);
    ck_assert(!mailbox_post(&box, &notes[0].item));
    mailbox_close(&box);
    free(notes);
}
END_TEST

START_TEST(damage_is_done_at_the_passages_that_were_asked_for)
{
    const char *variable = NULL;
    static const char *const bad[] = {"nowhere",
                                      "lost-chunk:0",
                                      "lost-chunk:2:0",
                                      "lost-chunk:x",
                                      "lost-chunk:",
                                      "lost-chunk:1:2:3",
                                      "",
                                      "lost"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ck_assert_int_eq(setenv("RESHARD_DAMAGE", bad[i], 1), 0);
        ck_assert_int_eq(crash_init(&variable), RS_EINVAL);
        ck_assert_str_eq(variable, "RESHARD_DAMAGE");
    }
    ck_assert(!damage_due(DAMAGE_LOST_CHUNK));
    ck_assert_int_eq(setenv("RESHARD_DAMAGE", "lost-chunk:3:2", 1), 0);
    ck_assert_int_eq(crash_init(&variable), 0);
    for (int passage = 1; passage <= 6; passage++) {
        ck_assert(!damage_due(DAMAGE_FLIPPED_BIT));
        ck_assert_int_eq(damage_due(DAMAGE_LOST_CHUNK), passage == 3 || passage == 4);
    }
    crash_spent();
    ck_assert_ptr_null(getenv("RESHARD_DAMAGE"));
}
END_TEST

#define TESTS(X)                                                                                   \
    X(err_prefix_builds_a_path_of_what_was_done)                                                   \
    X(err_prefix_does_not_say_the_same_twice)                                                      \
    X(err_text_is_cut_at_a_whole_character)                                                        \
    X(err_status_round_trips_for_every_code)                                                       \
    X(a_size_is_bytes_or_a_number_of_binary_units)                                                 \
    X(mem_fails_at_the_armed_call_and_only_there)                                                  \
    X(buf_reader_gives_back_what_was_put_and_marks_a_short_read)                                   \
    X(buf_survives_every_failed_allocation)                                                        \
    X(mailbox_hands_over_every_item_of_four_threads)                                               \
    X(damage_is_done_at_the_passages_that_were_asked_for)
#include "test/lib/main.h"
