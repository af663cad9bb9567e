/* Files of older releases, and files that do not belong together: older copies, logs of others. */
#include "ledger/ledger.h"

#include <check.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test/unit/test_ledger_bed.h"
#include "test/unit/test_ledger_old.h"

/* --- older schemas --- */

static void write_old(struct bench *b, const char *const *statements)
{
    sqlite3 *db = NULL;
    ck_assert_int_eq(sqlite3_open(b->path, &db), SQLITE_OK);
    for (; *statements != NULL; statements++)
        ck_assert_msg(sqlite3_exec(db, *statements, NULL, NULL, NULL) == SQLITE_OK, "%s: %s",
                      *statements, sqlite3_errmsg(db));
    ck_assert_int_eq(sqlite3_close(db), SQLITE_OK);
}

/* All that sqlite3 reads, in words. */
static void ask(struct bench *b, const char *sql, char *ret, size_t n)
{
    sqlite3 *db = NULL;
    sqlite3_stmt *st = NULL;
    size_t at = 0;
    ret[0] = '\0';
    ck_assert_int_eq(sqlite3_open(b->path, &db), SQLITE_OK);
    ck_assert_int_eq(sqlite3_prepare_v2(db, sql, -1, &st, NULL), SQLITE_OK);
    while (sqlite3_step(st) == SQLITE_ROW)
        for (int i = 0; i < sqlite3_column_count(st); i++)
            at +=
                (size_t)snprintf(ret + at, n - at, "%s%s", (const char *)sqlite3_column_text(st, i),
                                 i + 1 < sqlite3_column_count(st) ? "," : ";");
    (void)sqlite3_finalize(st);
    (void)sqlite3_close(db);
}

static void check_upgraded(struct bench *b)
{
    char text[256];
    struct rows k = load(b);
    ck_assert(k.model.committed == 2 && k.model.attempt == 5 && k.model.epoch == 3);
    ck_assert(k.version.version == 2 && k.version.attempt == 3 && k.version.landed == 16 &&
              k.version.publication == UINT64_MAX && k.version.n_options_bytes == 3);
    ck_assert_mem_eq(k.fingerprints, "0123456789abcdef", 16);
    ck_assert(k.attempt.attempt == 5 && k.attempt.kind == 0 && k.request.attempt == 2);
    ck_assert_uint_eq(b->l->store_id >> 63, 0);
    ask(b, "SELECT version, instance, attempt, accepted, reason FROM acceptances ORDER BY rowid",
        text, sizeof text);
    ck_assert_str_eq(text, "1,0,1,1,;1,1,1,0,no;2,1,3,1,;2,0,5,1,;");
    ask(b, "SELECT name, at_ns FROM marks", text, sizeof text);
    ck_assert_str_eq(text, "committed,5;");
    ask(b, "SELECT name FROM pragma_index_list('marks')", text, sizeof text);
    ck_assert_str_eq(text, "marks_of_version;");
}

/* Every table and column is as in a file that this release has made. */
static void check_schema_is_ours(struct bench *b)
{
    static const char *const sql =
        "SELECT m.name, c.name, c.type, c.pk FROM sqlite_master m, pragma_table_info(m.name) c "
        "WHERE m.type = 'table' ORDER BY m.name, c.cid";
    struct bench fresh;
    static char a[8192], c[8192];
    bench_init(&fresh, true);
    open_again(&fresh);
    ask(&fresh, sql, a, sizeof a);
    ask(b, sql, c, sizeof c);
    ck_assert_str_eq(a, c);
    ck_assert_ptr_nonnull(strstr(a, "acceptances,attempt,INTEGER,5;"));
    bench_close(&fresh);
}

START_TEST(files_of_older_releases_are_brought_up_to_this_one_and_keep_their_rows)
{
    static const char *const *const old[] = {ledger_schema_1, ledger_schema_2};
    for (size_t i = 0; i < 2; i++) {
        struct bench b;
        uint8_t config[16] = {5};
        bench_init(&b, true);
        write_old(&b, old[i]);
        for (int k = 0; k < 2; k++) { /* the second time there is nothing to do */
            open_again(&b);
            ck_assert(!b.l->created);
            check_upgraded(&b);
            check_schema_is_ours(&b);
            ledger_close(b.l);
        }
        open_again(&b);
        struct ledger_record r[] = {
            version_row(3, 7),
            {.kind = LEDGER_ACCEPTANCE,
             .model = "m",
             .acceptance = {.version = 2,
                            .layout_name = "rollout",
                            .attempt = 6,
                            .accepted = true,
                            .reason = ""}},
            {.kind = LEDGER_DRAIN, .drain = {.node = "n1", .since_wall_ns = 1}}};
        r[0].version.config_digest = config;
        r[0].version.n_config_digest_bytes = sizeof config;
        ck_assert_int_eq(write_all(&b, r, 3), 0);
        struct rows k = load(&b);
        ck_assert(k.has_config && k.config[0] == 5);
        char text[64];
        ask(&b, "SELECT attempt FROM acceptances WHERE version = 2 AND instance = 0", text,
            sizeof text);
        ck_assert_str_eq(text, "5;6;");
        bench_close(&b);
    }
}
END_TEST

/* Killed with the new schema in the log alone: the file is of the old one still. */
START_TEST(an_upgrade_that_has_not_come_into_the_file_yet_is_there_after_a_crash)
{
    struct bench b, after;
    char from[128], to[128];
    bench_init(&b, true);
    bench_init(&after, true);
    write_old(&b, ledger_schema_2);
    sqlite3 *reader = NULL; /* which keeps all of the log out of the file */
    ck_assert_int_eq(sqlite3_open(b.path, &reader), SQLITE_OK);
    ck_assert_int_eq(sqlite3_exec(reader, "BEGIN; SELECT count(*) FROM store", NULL, NULL, NULL),
                     SQLITE_OK);
    open_again(&b);
    struct ledger_record r = {.kind = LEDGER_DRAIN, .drain = {.node = "n1", .since_wall_ns = 1}};
    ck_assert_int_eq(write_all(&b, &r, 1), 0); /* which says up to where the file has everything */
    copy_file(b.path, after.path);
    (void)snprintf(from, sizeof from, "%s-wal", b.path);
    (void)snprintf(to, sizeof to, "%s-wal", after.path);
    copy_file(from, to);
    ck_assert_int_eq(sqlite3_close(reader), SQLITE_OK);
    char text[16];
    struct bench alone = after;
    (void)snprintf(alone.path, sizeof alone.path, "%s/alone", after.dir);
    copy_file(b.path, alone.path);
    ask(&alone, "PRAGMA user_version", text, sizeof text);
    ck_assert_str_eq(text, "2;");
    open_again(&after);
    check_upgraded(&after);
    bench_close(&after);
    bench_close(&b);
}
END_TEST

/* --- logs and copies --- */

/* Open, with one row in a log that has none of the pages of the store's creation. */
static void begin_log(struct bench *b)
{
    struct ledger_record r = version_row(1, 7);
    open_again(b);
    ledger_close(b->l);
    open_again(b);
    ck_assert_int_eq(write_all(b, &r, 1), 0);
}

START_TEST(the_log_of_another_store_is_refused_and_does_not_come_into_the_file)
{
    struct bench a, b;
    char log[128], other_log[128];
    bench_init(&a, true);
    bench_init(&b, true);
    (void)snprintf(b.path, sizeof b.path, "%s/a%%20#?b", b.dir); /* nothing but a name */
    (void)snprintf(log, sizeof log, "%s-wal", b.path);
    (void)snprintf(other_log, sizeof other_log, "%s-wal", a.path);
    begin_log(&b);
    ledger_close(b.l); /* its log has come into the file */
    b.l = NULL;
    begin_log(&a);
    copy_file(other_log, log);
    refused(&b, RS_EDISK, "is of store");
    refused(&b, RS_EDISK, "is of store"); /* the first time has changed nothing */
    ck_assert_int_eq(unlink(log), 0);
    open_again(&b);
    struct rows rows = load(&b);
    ck_assert_uint_eq(rows.n, 1);
    bench_close(&a);
    bench_close(&b);
}
END_TEST

static void beside(const struct bench *b, const char *more, char ret[160])
{
    (void)snprintf(ret, 160, "%s%s", b->path, more);
}

/* What a crash of everything would leave at this moment, or a copy for later; nothing is being written but what a checkpoint
 * brings into the file, so that this order is as good as one moment. */
static void copy_all(const struct bench *from, const struct bench *to)
{
    static const char *const names[] = {".stamp", "", "-wal"};
    for (size_t i = 0; i < 3; i++) {
        char a[160], b[160];
        beside(from, names[i], a);
        beside(to, names[i], b);
        (void)unlink(b);
        if (access(a, F_OK) == 0)
            copy_file(a, b);
    }
}

static void copy_one(const struct bench *from, const struct bench *to, const char *name)
{
    char a[160], b[160];
    beside(from, name, a);
    beside(to, name, b);
    copy_file(a, b);
}

static void remove_one(const struct bench *b, const char *name)
{
    char path[160];
    beside(b, name, path);
    ck_assert_int_eq(unlink(path), 0);
}

/* Versions `from` to `to`, one transaction each, of 16 pages or so: 70 of them fill a log. */
static void write_versions(struct bench *b, uint64_t from, uint64_t to)
{
    static char big[60001];
    memset(big, 'x', sizeof big - 1);
    for (uint64_t i = from; i <= to; i++) {
        struct ledger_record r[2] = {version_row(i, 7), model_row(i, i, 1)};
        r[0].version.strategy = "";
        r[0].version.reason = big;
        ck_assert_int_eq(write_all(b, r, 2), 0);
    }
}

static uint64_t committed(struct bench *b)
{
    char text[32];
    ask(b, "SELECT committed FROM models", text, sizeof text);
    return strtoull(text, NULL, 10);
}

/* More than two logs full: checkpoints and new beginnings of the log are among them. */
START_TEST(what_a_crash_leaves_is_never_called_an_older_copy)
{
    struct bench b, after;
    bench_init(&b, true);
    open_again(&b);
    for (uint64_t i = 1; i <= 170; i++) {
        write_versions(&b, i, i);
        if (i % 3 != 0 && i % 70 > 5)
            continue;
        bench_init(&after, true);
        copy_all(&b, &after);
        open_again(&after);
        ck_assert_uint_eq(committed(&after), i);
        bench_close(&after);
    }
    bench_close(&b);
}
END_TEST

START_TEST(an_older_copy_beside_a_newer_log_is_refused)
{
    struct bench b, old, mixed;
    bench_init(&b, true);
    bench_init(&old, true);
    bench_init(&mixed, true);
    open_again(&b);
    write_versions(&b, 1, 2);
    ledger_close(b.l);
    copy_all(&b, &old);
    open_again(&b);
    write_versions(&b, 3, 90); /* the log begins anew among them */
    copy_all(&b, &mixed);
    copy_one(&old, &mixed, "");
    remove_one(&mixed, ".stamp"); /* the log alone tells */
    refused(&mixed, RS_EDISK, "an older copy is in its place");
    refused(&mixed, RS_EDISK, "-wal it had all up to 20"); /* the first time has changed nothing */
    remove_one(&mixed, "-wal");                            /* knowingly */
    open_again(&mixed);
    ck_assert_uint_eq(committed(&mixed), 2);
    bench_close(&mixed);
    bench_close(&old);
    bench_close(&b);
}
END_TEST

/* The log has none of what came into the file between the copy and its own beginning. SQLite finds the mixture whole. */
START_TEST(an_older_copy_beside_a_newer_log_is_refused_where_no_page_is_malformed)
{
    struct bench b, old, mixed;
    struct ledger_record model = model_row(2, 2, 2), second = version_row(2, 7);
    bench_init(&b, true);
    bench_init(&old, true);
    bench_init(&mixed, true);
    open_again(&b);
    write_versions(&b, 1, 1);
    ledger_close(b.l);
    copy_all(&b, &old);
    open_again(&b);
    ck_assert_int_eq(write_all(&b, &second, 1), 0);
    ledger_close(b.l);
    open_again(&b);
    ck_assert_int_eq(write_all(&b, &model, 1), 0);
    copy_all(&b, &mixed);
    copy_one(&old, &mixed, "");
    char text[32];
    ask(&mixed, "PRAGMA integrity_check", text, sizeof text); /* and brings the log into the file */
    ck_assert_str_eq(text, "ok;");
    ask(&mixed, "SELECT max(version), max(committed) FROM versions, models", text, sizeof text);
    ck_assert_str_eq(text, "1,2;");
    copy_all(&b, &mixed);
    copy_one(&old, &mixed, "");
    remove_one(&mixed, ".stamp");
    refused(&mixed, RS_EDISK, "an older copy is in its place");
    bench_close(&mixed);
    bench_close(&old);
    bench_close(&b);
}
END_TEST

/* The log has not begun anew since: all is there. */
START_TEST(a_copy_that_the_log_completes_is_taken)
{
    struct bench b, old, mixed;
    bench_init(&b, true);
    bench_init(&old, true);
    bench_init(&mixed, true);
    open_again(&b);
    write_versions(&b, 1, 2);
    copy_all(&b, &old);
    write_versions(&b, 3, 20);
    copy_all(&b, &mixed);
    copy_one(&old, &mixed, "");
    open_again(&mixed);
    ck_assert_uint_eq(committed(&mixed), 20);
    bench_close(&mixed);
    bench_close(&old);
    bench_close(&b);
}
END_TEST

START_TEST(an_older_copy_without_a_log_is_refused_by_what_lies_beside_it)
{
    struct bench b, old;
    bench_init(&b, true);
    bench_init(&old, true);
    open_again(&b);
    write_versions(&b, 1, 2);
    copy_all(&b, &old); /* while it runs, with its log */
    write_versions(&b, 3, 4);
    ledger_close(b.l);
    b.l = NULL;
    copy_one(&old, &b, "");
    refused(&b, RS_EDISK, "an older copy is in its place");
    copy_one(&old, &b, "-wal"); /* its own log does not make it newer */
    refused(&b, RS_EDISK, ".stamp it had all up to 20");
    remove_one(&b, ".stamp"); /* knowingly */
    open_again(&b);
    ck_assert_uint_eq(committed(&b), 2);
    ledger_close(b.l);
    open_again(&b); /* from now on that is the newest */
    ck_assert_uint_eq(committed(&b), 2);
    bench_close(&old);
    bench_close(&b);
}
END_TEST

START_TEST(an_older_copy_is_refused_after_a_crash_too)
{
    struct bench b, old, crashed;
    bench_init(&b, true);
    bench_init(&old, true);
    bench_init(&crashed, true);
    open_again(&b);
    write_versions(&b, 1, 2);
    ledger_close(b.l);
    copy_all(&b, &old);
    open_again(&b);
    write_versions(&b, 3, 3);
    ledger_close(b.l);
    open_again(&b);
    write_versions(&b, 4, 4);
    copy_all(&b, &crashed);
    copy_one(&old, &crashed, "");
    remove_one(&crashed, "-wal");
    refused(&crashed, RS_EDISK, "an older copy is in its place");
    bench_close(&crashed);
    bench_close(&old);
    bench_close(&b);
}
END_TEST

START_TEST(an_older_log_beside_a_newer_file_is_refused)
{
    struct bench b, old;
    bench_init(&b, true);
    bench_init(&old, true);
    open_again(&b);
    write_versions(&b, 1, 2);
    copy_all(&b, &old);
    write_versions(&b, 3, 4);
    ledger_close(b.l);
    b.l = NULL;
    copy_one(&old, &b, "-wal");
    refused(&b, RS_EDISK, "the log is an older one");
    remove_one(&b, "-wal");
    open_again(&b);
    ck_assert_uint_eq(committed(&b), 4);
    bench_close(&old);
    bench_close(&b);
}
END_TEST

/* As after "move it away to start anew". */
START_TEST(a_stamp_of_another_store_says_nothing)
{
    struct bench b;
    bench_init(&b, true);
    open_again(&b);
    write_versions(&b, 1, 2);
    ledger_close(b.l);
    remove_one(&b, "");
    open_again(&b);
    ck_assert(b.l->created);
    write_versions(&b, 1, 1);
    ledger_close(b.l);
    open_again(&b);
    ck_assert_uint_eq(committed(&b), 1);
    bench_close(&b);
}
END_TEST

START_TEST(a_stamp_that_was_changed_is_refused)
{
    static const char *const texts[] = {"", "store\n", "store 12 stamp 12\nmore",
                                        "store x stamp 1\n"};
    struct bench b;
    char path[160];
    bench_init(&b, true);
    open_again(&b);
    ledger_close(b.l);
    b.l = NULL;
    beside(&b, ".stamp", path);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        FILE *f = fopen(path, "w");
        ck_assert_int_ge(fputs(texts[i], f), 0);
        ck_assert_int_eq(fclose(f), 0);
        refused(&b, RS_EDISK, "is not as it was written");
    }
    ck_assert_int_eq(unlink(path), 0);
    open_again(&b);
    bench_close(&b);
}
END_TEST

START_TEST(a_stamp_that_can_not_be_written_keeps_nobody_from_opening)
{
    struct bench b;
    char path[160];
    bench_init(&b, true);
    beside(&b, ".stamp.new", path);
    ck_assert_int_eq(mkdir(path, 0700), 0);
    for (uint64_t i = 1; i < 3; i++) {
        open_again(&b);
        write_versions(&b, i, i);
        ledger_close(b.l);
    }
    beside(&b, ".stamp", path);
    ck_assert_int_ne(access(path, F_OK), 0);
    open_again(&b);
    ck_assert_uint_eq(committed(&b), 2);
    bench_close(&b);
}
END_TEST

/* A clock that was set back makes no transaction older than the one before. */
START_TEST(stamps_grow_where_the_clock_does_not)
{
    struct bench b;
    char before[64], after[64];
    bench_init(&b, true);
    open_again(&b);
    ledger_close(b.l);
    poke(b.path, "UPDATE store SET stamp = 4000000000000000000");
    remove_one(&b, ".stamp");
    open_again(&b);
    ask(&b, "SELECT stamp FROM store", before, sizeof before);
    write_versions(&b, 1, 3);
    ask(&b, "SELECT stamp FROM store", after, sizeof after);
    ck_assert_str_eq(before, "4000000000000000000;");
    ck_assert_str_eq(after, "4000000000000000003;");
    ledger_close(b.l);
    open_again(&b);
    bench_close(&b);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(files_of_older_releases_are_brought_up_to_this_one_and_keep_their_rows)                      \
    X(an_upgrade_that_has_not_come_into_the_file_yet_is_there_after_a_crash)                       \
    X(the_log_of_another_store_is_refused_and_does_not_come_into_the_file)                         \
    X(what_a_crash_leaves_is_never_called_an_older_copy)                                           \
    X(an_older_copy_beside_a_newer_log_is_refused)                                                 \
    X(an_older_copy_beside_a_newer_log_is_refused_where_no_page_is_malformed)                      \
    X(a_copy_that_the_log_completes_is_taken)                                                      \
    X(an_older_copy_without_a_log_is_refused_by_what_lies_beside_it)                               \
    X(an_older_copy_is_refused_after_a_crash_too)                                                  \
    X(an_older_log_beside_a_newer_file_is_refused)                                                 \
    X(a_stamp_of_another_store_says_nothing)                                                       \
    X(a_stamp_that_was_changed_is_refused)                                                         \
    X(a_stamp_that_can_not_be_written_keeps_nobody_from_opening)                                   \
    X(stamps_grow_where_the_clock_does_not)
#include "test/lib/main.h"
