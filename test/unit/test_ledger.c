/* The ledger's contract on both implementations, and what only a file can do. */
#include "ledger/ledger.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "test/unit/test_ledger_bed.h"

/* --- both --- */

static void check_every_kind_of_record_survives_reopening(struct bench *b)
{
    static const uint8_t options[3] = {1, 0, 255};
    uint8_t fingerprints[16] = {9, 8, 7};
    struct ledger_record all[] = {
        {.kind = LEDGER_LAYOUT,
         .layout = {.digest = {0xAA, 0, 0xBB}, .name = "rollout", .json = "{\"ranks\": 4}\n"}},
        model_row(5, 7, 3),
        {.kind = LEDGER_MEMBER,
         .model = "m",
         .member = {.side = 2, .name = "rollout", .digest = {0xAA}, .active = true}},
        {.kind = LEDGER_EPOCH, .model = "m", .epoch = {.epoch = 3, .members = "rollout/rank 0"}},
        {.kind = LEDGER_VERSION,
         .model = "m",
         .version = {.version = 5,
                     .phase = 7,
                     .attempt = 7,
                     .n_attempts = 2,
                     .epoch = 3,
                     .content = {1, 2},
                     .publication = UINT64_MAX,
                     .options = options,
                     .n_options_bytes = 3,
                     .reason = "",
                     .submitted_wall_ns = 11,
                     .committed_wall_ns = 12,
                     .total_ns = 13,
                     .wire_ns = 14,
                     .stall_ns = 15,
                     .landed = 16,
                     .network = 17,
                     .domain = 18,
                     .device = 19,
                     .skipped = 20,
                     .total = 21,
                     .network_minimum = 22,
                     .plan_digest = {0xCC},
                     .strategy = "reshard",
                     .fingerprints = fingerprints,
                     .n_fingerprints_bytes = sizeof fingerprints}},
        {.kind = LEDGER_REQUEST,
         .model = "m",
         .request = {.id = "r-1", .version = 5, .attempt = 6, .phase = 1}},
        {.kind = LEDGER_ATTEMPT,
         .model = "m",
         .attempt =
             {.attempt = 6, .version = 5, .epoch = 2, .phase = 9, .reason = "why", .kind = 2}},
        {.kind = LEDGER_ACCEPTANCE,
         .model = "m",
         .acceptance = {.version = 5,
                        .layout_name = "rollout",
                        .instance = 1,
                        .attempt = 7,
                        .accepted = true,
                        .reason = ""}},
        {.kind = LEDGER_DRAIN, .drain = {.node = "n2", .since_wall_ns = 23}}};
    ck_assert_int_eq(write_all(b, all, sizeof all / sizeof *all), 0);
    ledger_close(b->l);
    open_again(b);
    struct rows k = load(b);
    static const enum ledger_kind order[] = {LEDGER_LAYOUT,     LEDGER_MODEL,   LEDGER_MEMBER,
                                             LEDGER_VERSION,    LEDGER_REQUEST, LEDGER_ATTEMPT,
                                             LEDGER_ACCEPTANCE, LEDGER_DRAIN};
    ck_assert_uint_eq(k.n, 8);
    for (size_t i = 0; i < 8; i++)
        ck_assert_int_eq((int)k.kinds[i], (int)order[i]);
    ck_assert_uint_eq(k.digest[2], 0xBB);
    ck_assert_str_eq(k.json, "{\"ranks\": 4}\n");
    ck_assert(k.member.active && k.member.side == 2);
    ck_assert(k.model.committed == 5 && k.model.attempt == 7 && k.model.epoch == 3);
    ck_assert(k.version.version == 5 && k.version.phase == 7 && k.version.attempt == 7 &&
              k.version.n_attempts == 2 && k.version.epoch == 3);
    ck_assert(k.version.publication == UINT64_MAX && k.version.content[1] == 2 &&
              k.version.plan_digest[0] == 0xCC);
    ck_assert(k.version.submitted_wall_ns == 11 && k.version.committed_wall_ns == 12 &&
              k.version.total_ns == 13 && k.version.wire_ns == 14 && k.version.stall_ns == 15);
    ck_assert(k.version.landed == 16 && k.version.network == 17 && k.version.domain == 18 &&
              k.version.device == 19 && k.version.skipped == 20 && k.version.total == 21 &&
              k.version.network_minimum == 22);
    ck_assert_uint_eq(k.version.n_options_bytes, 3);
    ck_assert_mem_eq(k.options, options, 3);
    ck_assert_mem_eq(k.fingerprints, fingerprints, 16);
    ck_assert_str_eq(k.strategy, "reshard");
    ck_assert_str_eq(k.id, "r-1");
    ck_assert(k.request.version == 5 && k.request.attempt == 6 && k.request.phase == 1);
    ck_assert(k.attempt.attempt == 6 && k.attempt.epoch == 2 && k.attempt.phase == 9 &&
              k.attempt.kind == 2);
    ck_assert_str_eq(k.reason, "why");
    ck_assert(k.acceptance.instance == 1 && k.acceptance.accepted && k.acceptance.attempt == 7);
    ck_assert_str_eq(k.layout, "rollout");
    ck_assert_str_eq(k.node, "n2");
    ck_assert_uint_eq(k.since_wall_ns, 23);
}
ON_BOTH(every_kind_of_record_survives_reopening)

static void check_high_water_marks_never_go_back(struct bench *b)
{
    struct ledger_record high = model_row(5, 9, 4), low = model_row(6, 2, 1);
    ck_assert_int_eq(write_all(b, &high, 1), 0);
    ck_assert_int_eq(write_all(b, &low, 1), 0);
    struct rows k = load(b);
    ck_assert(k.model.committed == 6 && k.model.attempt == 9 && k.model.epoch == 4);
}
ON_BOTH(high_water_marks_never_go_back)

static void check_a_row_keeps_its_fingerprints_and_its_config_when_written_without(struct bench *b)
{
    uint8_t fingerprints[16] = {3}, config[16] = {4};
    struct ledger_record r = version_row(1, 7);
    r.version.fingerprints = fingerprints;
    r.version.n_fingerprints_bytes = sizeof fingerprints;
    r.version.config_digest = config;
    r.version.n_config_digest_bytes = sizeof config;
    ck_assert_int_eq(write_all(b, &r, 1), 0);
    r = version_row(1, 7);
    r.version.total_ns = 1;
    ck_assert_int_eq(write_all(b, &r, 1), 0);
    struct rows k = load(b);
    ck_assert_uint_eq(k.version.total_ns, 1);
    ck_assert_uint_eq(k.fingerprints[0], 3);
    ck_assert(k.has_config && k.config[0] == 4);
}
ON_BOTH(a_row_keeps_its_fingerprints_and_its_config_when_written_without)

/* Nothing is closed, and no second passes: what comes before the next transaction is there with it. */
static void
check_times_of_an_ended_version_are_in_its_row_before_the_next_transaction(struct bench *b)
{
    struct ledger_record r[] = {version_row(1, 7), version_row(2, 7)};
    struct ledger_ended ended[] = {{.version = 1, .attempt = 3, .total_ns = 25, .stall_ns = 24},
                                   {.version = 2, .attempt = 3, .total_ns = 99, .stall_ns = 98}};
    for (size_t i = 0; i < 2; i++) {
        r[i].version.attempt = 3 + i; /* the second has been tried again since */
        r[i].version.total_ns = 13;
        r[i].version.stall_ns = 12;
        r[i].version.wire_ns = 11;
    }
    ck_assert_int_eq(write_all(b, r, 2), 0);
    for (size_t i = 0; i < 2; i++)
        ck_assert_int_eq(ledger_ended(b->l, "m", &ended[i]), 0);
    struct ledger_record next = model_row(1, 4, 1);
    ck_assert_int_eq(write_all(b, &next, 1), 0);
    for (uint64_t v = 1; v <= 2; v++) {
        struct rows k = {0};
        ck_assert_int_eq(ledger_versions(b->l, "m", v, 0, keep, &k, NULL), 0);
        ck_assert_uint_eq(k.version.total_ns, v == 1 ? 25 : 13);
        ck_assert_uint_eq(k.version.stall_ns, v == 1 ? 24 : 12);
        ck_assert_uint_eq(k.version.wire_ns, 11);
        ck_assert_uint_eq(k.version.attempt, v + 2);
    }
    struct rows marks = {0};
    ck_assert_int_eq(ledger_timeline(b->l, "m", 1, keep, &marks, NULL), 0);
    ck_assert_uint_eq(marks.n, 0); /* they are no marks */
}
ON_BOTH(times_of_an_ended_version_are_in_its_row_before_the_next_transaction)

static struct ledger_record acceptance_row(uint32_t instance, uint64_t attempt, bool accepted)
{
    return (struct ledger_record){.kind = LEDGER_ACCEPTANCE,
                                  .model = "m",
                                  .acceptance = {.version = 5,
                                                 .layout_name = "rollout",
                                                 .instance = instance,
                                                 .attempt = attempt,
                                                 .accepted = accepted,
                                                 .reason = ""}};
}

static int keep_said(const struct ledger_record *row, void *arg)
{
    char *text = arg;
    size_t n = strlen(text);
    if (row->kind == LEDGER_ACCEPTANCE)
        (void)snprintf(text + n, 96 - n, "%u in %llu %s;", row->acceptance.instance,
                       (unsigned long long)row->acceptance.attempt,
                       row->acceptance.accepted ? "yes" : "no");
    return 0;
}

/* The commit was attempt 3; instance 0, then 1, were brought up to it later, 0 twice. Writing one again is no other. */
static void check_what_an_instance_said_in_each_attempt_is_kept(struct bench *b)
{
    struct ledger_record commit[] = {acceptance_row(0, 3, true), acceptance_row(1, 3, false)};
    struct ledger_record later[] = {acceptance_row(0, 4, true), acceptance_row(1, 6, true),
                                    acceptance_row(0, 7, true), acceptance_row(0, 7, true)};
    char all[96] = "", loaded[96] = "";
    ck_assert_int_eq(write_all(b, commit, 2), 0);
    for (size_t i = 0; i < 4; i++)
        ck_assert_int_eq(write_all(b, &later[i], 1), 0);
    ledger_close(b->l);
    open_again(b);
    ck_assert_int_eq(ledger_timeline(b->l, "m", 5, keep_said, all, NULL), 0);
    ck_assert_int_eq(ledger_load(b->l, keep_said, loaded, NULL), 0);
    if (b->file) /* the twin has them as they came */
        ck_assert_str_eq(all, "0 in 3 yes;0 in 4 yes;0 in 7 yes;1 in 3 no;1 in 6 yes;");
    ck_assert_str_eq(loaded, "0 in 3 yes;1 in 3 no;0 in 4 yes;1 in 6 yes;0 in 7 yes;");
}
ON_BOTH(what_an_instance_said_in_each_attempt_is_kept)

static void check_a_drain_is_kept_by_the_name_of_the_node(struct bench *b)
{
    struct ledger_record r[] = {{.kind = LEDGER_DRAIN, .drain = {.node = "a", .since_wall_ns = 1}},
                                {.kind = LEDGER_DRAIN, .drain = {.node = "b", .since_wall_ns = 2}},
                                {.kind = LEDGER_DRAIN, .drain = {.node = "b", .since_wall_ns = 0}}};
    ck_assert_int_eq(write_all(b, r, 3), 0);
    struct rows k = load(b);
    ck_assert_uint_eq(k.n, 2);
    ck_assert_str_eq(k.node, "b"); /* the last that was told */
    ck_assert_uint_eq(k.since_wall_ns, 0);
}
ON_BOTH(a_drain_is_kept_by_the_name_of_the_node)

static void check_done_comes_once_each_and_in_order(struct bench *b)
{
    enum { N = 40 };
    static struct waited w[N];
    uint64_t next = 0;
    memset(w, 0, sizeof w);
    for (uint64_t i = 0; i < N; i++) {
        struct ledger_record r = version_row(i + 1, 1);
        w[i].number = i;
        w[i].next = &next;
        submit(b, &w[i], &r, 1);
    }
    await(b, &w[N - 1]);
    ck_assert_uint_eq(next, N);
}
ON_BOTH(done_comes_once_each_and_in_order)

static void check_closing_waits_for_what_was_submitted(struct bench *b)
{
    struct waited w = {.done = false};
    struct ledger_record r = version_row(1, 1);
    submit(b, &w, &r, 1);
    if (!b->file)
        (void)mailbox_drain(&b->loop);
    ledger_close(b->l);
    ck_assert(w.done && w.code == 0);
    open_again(b);
    ck_assert_uint_eq(load(b).n, 1);
}
ON_BOTH(closing_waits_for_what_was_submitted)

static void check_versions_are_told_newest_first_and_limited(struct bench *b)
{
    struct ledger_record r[4];
    for (uint64_t i = 0; i < 3; i++)
        r[i] = version_row(i * 10 + 1, 7);
    r[3] = version_row(99, 7);
    r[3].model = "other";
    ck_assert_int_eq(write_all(b, r, 4), 0);
    struct rows k = {0};
    ck_assert_int_eq(ledger_versions(b->l, "m", 0, 2, keep, &k, NULL), 0);
    ck_assert(k.n == 2 && k.versions[0] == 21 && k.versions[1] == 11);
    k = (struct rows){0};
    ck_assert_int_eq(ledger_versions(b->l, "m", 11, 0, keep, &k, NULL), 0);
    ck_assert(k.n == 1 && k.versions[0] == 11);
    k = (struct rows){0};
    ck_assert_int_eq(ledger_versions(b->l, "m", 12, 0, keep, &k, NULL), 0);
    ck_assert_uint_eq(k.n, 0);
}
ON_BOTH(versions_are_told_newest_first_and_limited)

static void mark(struct bench *b, uint64_t version, int64_t at_ns)
{
    struct ledger_mark m = {
        .version = version, .name = "first_byte", .who = "rollout/rank 1", .at_ns = at_ns};
    ck_assert_int_eq(ledger_mark(b->l, "m", &m), 0);
}

static void check_timeline_has_waiting_and_written_marks_in_order(struct bench *b)
{
    mark(b, 1, 30);
    mark(b, 1, 10);
    mark(b, 2, 1);
    ledger_close(b->l); /* writes them */
    open_again(b);
    mark(b, 1, 20); /* waits */
    mark(b, 1, 40);
    struct ledger_record more[] = {
        {.kind = LEDGER_ATTEMPT,
         .model = "m",
         .attempt = {.attempt = 1, .version = 1, .reason = ""}},
        {.kind = LEDGER_ACCEPTANCE,
         .model = "m",
         .acceptance = {.version = 1, .layout_name = "rollout", .reason = ""}}};
    ck_assert_int_eq(write_all(b, more, 2), 0);
    struct rows k = {0};
    ck_assert_int_eq(ledger_timeline(b->l, "m", 1, keep, &k, NULL), 0);
    ck_assert_uint_eq(k.n, 6);
    for (int i = 0; i < 4; i++) {
        ck_assert_int_eq((int)k.kinds[i], (int)LEDGER_MARK);
        ck_assert_int_eq(k.at_ns[i], (i + 1) * 10);
    }
    ck_assert_int_eq((int)k.kinds[4], (int)LEDGER_ACCEPTANCE);
    ck_assert_int_eq((int)k.kinds[5], (int)LEDGER_ATTEMPT);
    ck_assert_str_eq(k.who, "rollout/rank 1");
}
ON_BOTH(timeline_has_waiting_and_written_marks_in_order)

/* --- the twin's faults --- */

START_TEST(a_failed_transaction_leaves_nothing)
{
    struct bench b;
    bench_init(&b, false);
    open_again(&b);
    struct ledger_mem_faults f = {.fail_at = 2};
    ledger_mem_set_faults(b.l, &f);
    struct ledger_record r[2] = {version_row(1, 1), model_row(1, 1, 1)};
    ck_assert_int_eq(write_all(&b, r, 1), 0);
    r[0] = version_row(2, 1);
    ck_assert_int_eq(write_all(&b, r, 2), RS_EFULL);
    struct rows k = load(&b);
    ck_assert(k.n == 1 && k.versions[0] == 1);
    ck_assert_int_eq(write_all(&b, r, 2), 0); /* once */
    bench_close(&b);
}
END_TEST

START_TEST(a_crash_keeps_what_was_durable_and_drops_the_rest)
{
    struct bench b;
    bench_init(&b, false);
    open_again(&b);
    ledger_mem_set_faults(b.l, &(struct ledger_mem_faults){.hold = true});
    struct waited w[3] = {{.done = false}};
    for (uint64_t i = 0; i < 3; i++) {
        struct ledger_record r = version_row(i + 1, 1);
        submit(&b, &w[i], &r, 1);
    }
    ck_assert_uint_eq(ledger_mem_release(b.l, 2), 2);
    ck_assert(w[0].done && w[1].done && !w[2].done);
    ck_assert_uint_eq(ledger_mem_waiting(b.l), 1);
    ledger_mem_crash(b.l);
    ledger_transaction_close(&w[2].t);
    ck_assert(!w[2].done);
    open_again(&b);
    struct rows k = load(&b);
    ck_assert(k.n == 2 && k.versions[0] == 1 && k.versions[1] == 2);
    bench_close(&b);
}
END_TEST

/* --- the file --- */

START_TEST(the_file_is_in_wal_mode_with_id_and_schema)
{
    struct bench b;
    bench_init(&b, true);
    open_again(&b);
    uint64_t id = b.l->store_id;
    ck_assert(b.l->created && id != 0);
    sqlite3 *db = NULL;
    sqlite3_stmt *st = NULL;
    ck_assert_int_eq(sqlite3_open(b.path, &db), SQLITE_OK);
    ck_assert_int_eq(sqlite3_prepare_v2(db, "PRAGMA journal_mode", -1, &st, NULL), SQLITE_OK);
    ck_assert_int_eq(sqlite3_step(st), SQLITE_ROW);
    ck_assert_str_eq((const char *)sqlite3_column_text(st, 0), "wal");
    (void)sqlite3_finalize(st);
    ck_assert_int_eq(sqlite3_prepare_v2(db, "PRAGMA application_id", -1, &st, NULL), SQLITE_OK);
    ck_assert_int_eq(sqlite3_step(st), SQLITE_ROW);
    ck_assert_int_eq(sqlite3_column_int(st, 0), 0x72736864);
    (void)sqlite3_finalize(st);
    (void)sqlite3_close(db);
    ledger_close(b.l);
    open_again(&b);
    ck_assert(!b.l->created && b.l->store_id == id);
    struct stat mode;
    ck_assert_int_eq(stat(b.path, &mode), 0);
    ck_assert_int_eq((int)(mode.st_mode & 0777), 0600);
    bench_close(&b);
}
END_TEST

START_TEST(a_second_daemon_is_refused)
{
    struct bench b;
    bench_init(&b, true);
    open_again(&b);
    refused(&b, RS_EUNAVAIL, "in use by another daemon");
    bench_close(&b);
}
END_TEST

START_TEST(a_file_that_is_no_database_is_refused)
{
    struct bench b;
    bench_init(&b, true);
    FILE *f = fopen(b.path, "w");
    for (int i = 0; i < 1000; i++)
        (void)fprintf(f, "not a ledger ");
    (void)fclose(f);
    refused(&b, RS_EDISK, "no SQLite file");
    bench_close(&b);
}
END_TEST

START_TEST(another_programs_database_is_refused)
{
    struct bench b;
    bench_init(&b, true);
    poke(b.path, "CREATE TABLE t (x)");
    refused(&b, RS_EDISK, "not a ledger of reshardd");
    bench_close(&b);
}
END_TEST

START_TEST(another_schema_is_refused)
{
    struct bench b;
    bench_init(&b, true);
    open_again(&b);
    ledger_close(b.l);
    b.l = NULL;
    poke(b.path, "PRAGMA user_version = 99");
    refused(&b, RS_EDISK, "schema 99");
    bench_close(&b);
}
END_TEST

START_TEST(a_creation_that_stopped_half_way_is_begun_anew)
{
    struct bench b;
    bench_init(&b, true);
    poke(b.path, "PRAGMA journal_mode = WAL");
    open_again(&b);
    ck_assert(b.l->created);
    struct ledger_record r = version_row(1, 1);
    ck_assert_int_eq(write_all(&b, &r, 1), 0);
    bench_close(&b);
}
END_TEST

START_TEST(a_damaged_file_is_refused)
{
    struct bench b;
    bench_init(&b, true);
    open_again(&b);
    for (uint64_t i = 1; i < 200; i++) {
        struct ledger_record r = version_row(i, 7);
        ck_assert_int_eq(write_all(&b, &r, 1), 0);
    }
    ledger_close(b.l); /* everything is in the main file now */
    b.l = NULL;
    int fd = open(b.path, O_RDWR);
    struct stat st;
    ck_assert_int_eq(fstat(fd, &st), 0);
    ck_assert_int_gt((int)st.st_size, 3 * 4096);
    char junk[4096];
    memset(junk, 0x5A, sizeof junk);
    for (off_t at = 2 * 4096; at + 4096 <= st.st_size; at += 4096)
        ck_assert_int_eq((int)pwrite(fd, junk, sizeof junk, at), 4096);
    (void)close(fd);
    refused(&b, RS_EDISK, "damaged");
    bench_close(&b);
}
END_TEST

START_TEST(a_path_that_can_not_be_opened_is_refused_by_name)
{
    struct bench b;
    bench_init(&b, true);
    (void)snprintf(b.path, sizeof b.path, "%s/none/ledger", b.dir);
    struct err e = {0};
    struct ledger *l = NULL;
    ck_assert_int_ne(ledger_sqlite_open(b.path, &b.loop, &l, &e), 0);
    ck_assert_ptr_nonnull(strstr(e.text, b.path));
    (void)snprintf(b.path, sizeof b.path, "%s/dir", b.dir);
    ck_assert_int_eq(mkdir(b.path, 0700), 0);
    ck_assert_int_ne(ledger_sqlite_open(b.path, &b.loop, &l, &e), 0);
    ck_assert_ptr_nonnull(strstr(e.text, b.path));
    bench_close(&b);
}
END_TEST

/* The child is killed with one transaction durable and others on their way. */
START_TEST(after_kill_9_a_transaction_is_whole_or_not_there)
{
    for (int round = 0; round < 5; round++) {
        struct bench b;
        bench_init(&b, true);
        pid_t child = fork();
        if (child == 0) {
            enum { N = 30 };
            static struct waited w[N];
            open_again(&b);
            for (uint64_t i = 0; i < N; i++) {
                struct ledger_record r[2] = {version_row(i + 1, 7), model_row(i + 1, i + 1, 1)};
                submit(&b, &w[i], r, 2);
            }
            await(&b, &w[round * 5]);
            (void)raise(SIGKILL);
        }
        int status;
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert(WIFSIGNALED(status));
        open_again(&b);
        struct rows k = load(&b);
        ck_assert_uint_ge(k.model.committed, (uint64_t)round * 5 + 1);
        ck_assert_uint_eq(k.n, k.model.committed + 1); /* its versions, and the model's row */
        bench_close(&b);
    }
}
END_TEST

/* True where a file system of 256 KiB could be mounted at b->dir. */
static bool small_disk(struct bench *b)
{
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
        return false;
    (void)mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL);
    return mount("tmpfs", b->dir, "tmpfs", 0, "size=256k") == 0;
}

START_TEST(a_full_disk_is_said_and_leaves_nothing_of_the_transaction)
{
    struct bench b;
    bench_init(&b, true);
    if (!small_disk(&b)) {
        (void)fprintf(stderr, "UNTESTED here: a full disk (no right to mount a tmpfs)\n");
        bench_close(&b);
        return;
    }
    open_again(&b);
    char *big = malloc(60001);
    memset(big, 'x', 60000);
    big[60000] = '\0';
    uint64_t written = 0;
    int rc = 0;
    for (uint64_t i = 1; i < 20 && rc == 0; i++) {
        struct ledger_record r[2] = {version_row(i, 7), model_row(i, i, 1)};
        r[0].version.reason = big;
        rc = write_all(&b, r, 2);
        written = rc == 0 ? i : written;
    }
    ck_assert_int_eq(rc, RS_EFULL);
    ck_assert_uint_gt(written, 0);
    free(big);
    ledger_close(b.l);
    open_again(&b);
    struct ledger_model m = {0};
    struct rows k = {0};
    ck_assert_int_eq(ledger_versions(b.l, "m", written + 1, 0, keep, &k, NULL), 0);
    ck_assert_uint_eq(k.n, 0);
    m = load(&b).model;
    ck_assert_uint_eq(m.committed, written);
    ledger_close(b.l);
    b.l = NULL;
    ck_assert_int_eq(umount2(b.dir, MNT_DETACH), 0);
    bench_close(&b);
}
END_TEST

/* --- memory --- */

START_TEST(copying_records_survives_every_failed_allocation)
{
    struct ledger_record r[2] = {version_row(1, 1), model_row(1, 1, 1)};
    struct ledger_transaction t;
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int rc = ledger_transaction_init(&t, r, 2);
        bool struck = mem_failed();
        mem_fail_at(0);
        if (!struck) {
            ck_assert_int_eq(rc, 0);
            break;
        }
        ck_assert_int_eq(rc, RS_ENOMEM);
        ck_assert_uint_eq(t.n_records, 0);
        ledger_transaction_close(&t);
    }
    ledger_transaction_close(&t);
}
END_TEST

START_TEST(the_twin_keeps_all_or_nothing_at_every_failed_allocation)
{
    struct bench b;
    bench_init(&b, false);
    open_again(&b);
    struct ledger_record first = version_row(1, 1);
    ck_assert_int_eq(write_all(&b, &first, 1), 0);
    struct ledger_record r[2] = {version_row(2, 1), model_row(2, 2, 2)};
    for (long i = 1;; i++) {
        struct waited w = {.done = false};
        ck_assert_int_eq(ledger_transaction_init(&w.t, r, 2), 0);
        w.t.done = on_done;
        mem_fail_at(i);
        ledger_submit(b.l, &w.t);
        bool struck = mem_failed();
        mem_fail_at(0);
        await(&b, &w);
        ck_assert_int_eq(w.code, struck ? RS_ENOMEM : 0);
        ck_assert_uint_eq(load(&b).n, struck ? 1 : 3);
        if (!struck)
            break;
    }
    bench_close(&b);
}
END_TEST

START_TEST(opening_the_file_survives_every_failed_allocation)
{
    struct bench b;
    bench_init(&b, true);
    for (long i = 1;; i++) {
        struct err e = {0};
        mem_fail_at(i);
        int rc = ledger_sqlite_open(b.path, &b.loop, &b.l, &e);
        bool struck = mem_failed();
        mem_fail_at(0);
        if (!struck) {
            ck_assert_msg(rc == 0, "%s", e.text);
            break;
        }
        ck_assert_int_eq(rc, RS_ENOMEM);
    }
    bench_close(&b);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_kind_of_record_survives_reopening)                                                     \
    X(high_water_marks_never_go_back)                                                              \
    X(times_of_an_ended_version_are_in_its_row_before_the_next_transaction)                        \
    X(a_row_keeps_its_fingerprints_and_its_config_when_written_without)                            \
    X(what_an_instance_said_in_each_attempt_is_kept)                                               \
    X(a_drain_is_kept_by_the_name_of_the_node)                                                     \
    X(done_comes_once_each_and_in_order)                                                           \
    X(closing_waits_for_what_was_submitted)                                                        \
    X(versions_are_told_newest_first_and_limited)                                                  \
    X(timeline_has_waiting_and_written_marks_in_order)                                             \
    X(a_failed_transaction_leaves_nothing)                                                         \
    X(a_crash_keeps_what_was_durable_and_drops_the_rest)                                           \
    X(the_file_is_in_wal_mode_with_id_and_schema)                                                  \
    X(a_second_daemon_is_refused)                                                                  \
    X(a_file_that_is_no_database_is_refused)                                                       \
    X(another_programs_database_is_refused)                                                        \
    X(another_schema_is_refused)                                                                   \
    X(a_creation_that_stopped_half_way_is_begun_anew)                                              \
    X(a_damaged_file_is_refused)                                                                   \
    X(a_path_that_can_not_be_opened_is_refused_by_name)                                            \
    X(after_kill_9_a_transaction_is_whole_or_not_there)                                            \
    X(a_full_disk_is_said_and_leaves_nothing_of_the_transaction)                                   \
    X(copying_records_survives_every_failed_allocation)                                            \
    X(the_twin_keeps_all_or_nothing_at_every_failed_allocation)                                    \
    X(opening_the_file_survives_every_failed_allocation)
#include "test/lib/main.h"
