/* Notices an older copy of the ledger that was put in its place.
 *
 * SQLite takes any write-ahead log beside a file as that file's, and any file as the newest. So each transaction stamps the
 * store's row: `stamp` grows with every transaction. When a checkpoint has brought the whole log into the file and the disk has
 * it, the stamp of the newest transaction is the file's: up to there the file itself, without its log, holds everything. That
 * is remembered in two places, which do not go with a copy of the file: in the log, as `file_stamp` of the next transaction's
 * row, and in a small file beside the ledger, NAME.stamp. At an opening, wherever a crash has cut things off,
 *
 *   the file's own stamp    >= file_stamp of its log, and of NAME.stamp    else it is an older copy
 *   the stamp with the log  >= the file's own stamp                        else its log is an older one
 *
 * What is not noticed: a copy made since the last checkpoint or opening, without its log (it is the present file, and the log
 * was lost); an older copy where neither a log nor NAME.stamp is left, or NAME.stamp is as old. A log that is damaged or cut off
 * is none of this: SQLite ends it there.
 *
 * Stamps are wall times where the clock goes forward, so that a person can read them; only their order counts. The row's
 * integers have the same width always, so that it never moves in its page: it can be read even where a crash has torn that page
 * (the log then mends it). */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "ledger/ledger_sqlite.h"

#include "base/banned.h"

enum {
    LOG_PAGES = 1000, /* of the log, from which a checkpoint is made: SQLite's own default */
    STAMP_BYTES = 128 /* of the file NAME.stamp, at most */
};
#define NEVER INT64_MIN /* a file_stamp that says nothing */

/* --- in transactions --- */

int stamps_put(struct ledger_sqlite *l)
{
    char sql[128];
    int64_t now = (int64_t)clock_wall_ns();
    l->next_stamp = now > l->stamp ? now : l->stamp + 1;
    (void)snprintf(sql, sizeof sql, "UPDATE store SET stamp = %" PRId64 ", file_stamp = %" PRId64,
                   l->next_stamp, l->file_stamp);
    return db_run(l->writer, sql);
}

int stamps_begin(struct ledger_sqlite *l)
{
    int rc = db_run(l->writer, "BEGIN IMMEDIATE");
    return rc == SQLITE_OK ? stamps_put(l) : rc;
}

int stamps_commit(struct ledger_sqlite *l)
{
    int rc = db_run(l->writer, "COMMIT");
    if (rc == SQLITE_OK)
        l->stamp = l->next_stamp;
    return rc;
}

/* --- NAME.stamp --- */

int stamps_init(struct ledger_sqlite *l, struct err *e)
{
    char *path = mem_strdup(l->path);
    l->stamp = 0;
    l->file_stamp = NEVER;
    l->stamp_path = mem_printf("%s.stamp", l->path);
    l->fresh_stamp_path = mem_printf("%s.stamp.new", l->path);
    l->folder = path == NULL ? NULL : mem_strdup(dirname(path));
    mem_free(path);
    return l->stamp_path != NULL && l->fresh_stamp_path != NULL && l->folder != NULL
               ? 0
               : err_set(e, RS_ENOMEM, "ledger %s: out of memory", l->path);
}

void stamps_close(struct ledger_sqlite *l)
{
    mem_free(l->stamp_path);
    mem_free(l->fresh_stamp_path);
    mem_free(l->folder);
}

static int write_whole(const char *path, const char *text)
{
    size_t n = strlen(text);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    bool good = write(fd, text, n) == (ssize_t)n && fsync(fd) == 0;
    return close(fd) == 0 && good ? 0 : -1;
}

static int sync_folder(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 ? -1 : fsync(fd);
    if (fd >= 0)
        (void)close(fd);
    return rc;
}

/* Whole or not at all. What can't be written stays as it was, which says less and nothing wrong. */
static bool stamp_write(const struct ledger_sqlite *l)
{
    char text[STAMP_BYTES];
    (void)snprintf(text, sizeof text, "store %016" PRIx64 " stamp %" PRId64 "\n",
                   (uint64_t)l->base.store_id, l->file_stamp);
    if (write_whole(l->fresh_stamp_path, text) == 0 &&
        rename(l->fresh_stamp_path, l->stamp_path) == 0)
        return sync_folder(l->folder) == 0;
    (void)unlink(l->fresh_stamp_path);
    return false;
}

/* *ret NEVER: it says nothing of this store. */
static int stamp_parse(const struct ledger_sqlite *l, const char *text, int64_t *ret, struct err *e)
{
    uint64_t id;
    int64_t stamp;
    int end = 0;
    if (sscanf(text, "store %16" SCNx64 " stamp %" SCNd64 "%n", &id, &stamp, &end) != 2 ||
        strcmp(text + end, "\n") != 0)
        return err_set(e, RS_EDISK,
                       "%s is not as it was written: remove it, if the ledger beside it is the "
                       "newest there is",
                       l->stamp_path);
    *ret = id == l->base.store_id ? stamp : NEVER;
    return 0;
}

static int stamp_read(const struct ledger_sqlite *l, int64_t *ret, struct err *e)
{
    char text[STAMP_BYTES] = "";
    int rc = 0, fd = open(l->stamp_path, O_RDONLY | O_CLOEXEC);
    *ret = NEVER;
    if (fd < 0)
        return errno == ENOENT
                   ? 0
                   : err_set(e, err_from_errno(errno), "%s: %s", l->stamp_path, strerror(errno));
    if (read(fd, text, sizeof text - 1) < 0)
        rc = err_set(e, err_from_errno(errno), "reading %s: %s", l->stamp_path, strerror(errno));
    else
        rc = stamp_parse(l, text, ret, e);
    (void)close(fd);
    return rc;
}

/* --- checkpoints --- */

static int on_log(void *arg, sqlite3 *db, const char *name, int n_pages)
{
    struct ledger_sqlite *l = arg;
    (void)db;
    (void)name;
    l->log_pages = n_pages;
    return SQLITE_OK;
}

/* A reader may keep some of the log out of the file for now, and an error all of it: the log has it still, and the next
 * checkpoint begins where this one ended. */
void stamps_checkpoint(struct ledger_sqlite *l)
{
    int n_log = 0, n_done = 0;
    l->log_pages = 0;
    int rc =
        sqlite3_wal_checkpoint_v2(l->writer, "main", SQLITE_CHECKPOINT_PASSIVE, &n_log, &n_done);
    if (rc != SQLITE_OK || n_log != n_done)
        return;
    l->stamp_is_kept &= l->file_stamp == l->stamp;
    l->file_stamp = l->stamp;
    if (!l->stamp_is_kept)
        l->stamp_is_kept = stamp_write(l);
}

void stamps_checkpoint_if_due(struct ledger_sqlite *l)
{
    if (l->log_pages >= LOG_PAGES)
        stamps_checkpoint(l);
}

void stamps_watch_log(struct ledger_sqlite *l)
{
    (void)sqlite3_wal_hook(l->writer, on_log, l); /* in place of SQLite's own, which checkpoints */
}

/* --- the check --- */

struct store_row {
    int64_t id, stamp, file_stamp;
};

/* A column that older schemas lack: *ret stays. */
static int read_if_there(sqlite3 *db, const char *sql, int64_t *ret)
{
    int rc = db_number(db, sql, ret);
    return rc == SQLITE_ERROR ? SQLITE_OK : rc;
}

static int store_read(sqlite3 *db, struct store_row *ret)
{
    *ret = (struct store_row){.stamp = 0, .file_stamp = NEVER};
    int rc = db_number(db, "SELECT id FROM store", &ret->id);
    if (rc == SQLITE_OK)
        rc = read_if_there(db, "SELECT stamp FROM store", &ret->stamp);
    return rc == SQLITE_OK ? read_if_there(db, "SELECT file_stamp FROM store", &ret->file_stamp)
                           : rc;
}

/* SQLite's way to open a file and nothing beside it. sqlite3_free'd by the caller; NULL when memory is out. */
static char *uri_without_log(const char *path)
{
    sqlite3_str *uri = sqlite3_str_new(NULL);
    sqlite3_str_appendall(uri, "file:");
    for (; *path != '\0'; path++)
        sqlite3_str_appendf(uri, strchr("%?#", *path) == NULL ? "%c" : "%%%02x", *path);
    sqlite3_str_appendall(uri, "?immutable=1");
    return sqlite3_str_finish(uri);
}

/* What the file itself says. false: nothing yet, or it can't be told (a page is torn; the log may mend it). */
static bool store_read_without_log(const struct ledger_sqlite *l, struct store_row *ret)
{
    sqlite3 *db = NULL;
    char *uri = uri_without_log(l->path);
    bool good =
        uri != NULL &&
        sqlite3_open_v2(uri, &db, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, NULL) == SQLITE_OK &&
        store_read(db, ret) == SQLITE_OK;
    (void)sqlite3_close(db);
    sqlite3_free(uri);
    return good;
}

enum { TIME_BYTES = 48 };

static const char *time_text(int64_t stamp, char text[TIME_BYTES])
{
    struct tm t;
    time_t seconds = (time_t)(stamp / 1000000000);
    char date[24];
    if (stamp <= 0 || gmtime_r(&seconds, &t) == NULL)
        return "an unknown time, by an older release";
    (void)strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &t);
    (void)snprintf(text, TIME_BYTES, "%s.%09dZ", date, (int)(stamp % 1000000000));
    return text;
}

static int refuse_log_of_other(const struct ledger_sqlite *l, int64_t id, int64_t log_id,
                               struct err *e)
{
    return err_set(e, RS_EDISK,
                   "ledger %s is store %016" PRIx64
                   ", the log %s-wal beside it is of store %016" PRIx64
                   ": put together what belongs together, or move the log away",
                   l->path, (uint64_t)id, l->path, (uint64_t)log_id);
}

static int refuse_older_log(const struct ledger_sqlite *l, int64_t file, int64_t log, struct err *e)
{
    char a[TIME_BYTES], b[TIME_BYTES];
    return err_set(e, RS_EDISK,
                   "the log %s-wal ends at %s, the ledger %s has all up to %s: the log is an older "
                   "one; move it away",
                   l->path, time_text(log, a), l->path, time_text(file, b));
}

static int refuse_older_copy(const struct ledger_sqlite *l, int64_t file, int64_t known,
                             const char *where, struct err *e)
{
    char a[TIME_BYTES], b[TIME_BYTES];
    return err_set(
        e, RS_EDISK,
        "ledger %s has all up to %s, and by %s%s it had all up to %s: an older copy is in "
        "its place. Put the newest back; or, to go on with this one and without what was "
        "written since, move %s-wal and %s.stamp away",
        l->path, time_text(file, a), l->path, where, time_text(known, b), l->path, l->path);
}

int stamps_check(struct ledger_sqlite *l, struct err *e)
{
    struct store_row file, now;
    int64_t known;
    if (store_read(l->writer, &now) != SQLITE_OK)
        return 0; /* what is wrong is found by looking at all of it */
    l->base.store_id = (uint64_t)now.id;
    l->stamp = now.stamp;
    l->file_stamp = now.file_stamp;
    if (!store_read_without_log(l, &file))
        return 0;
    if (file.id != now.id)
        return refuse_log_of_other(l, file.id, now.id, e);
    if (now.stamp < file.stamp)
        return refuse_older_log(l, file.stamp, now.stamp, e);
    if (file.stamp < now.file_stamp)
        return refuse_older_copy(l, file.stamp, now.file_stamp, "-wal", e);
    int rc = stamp_read(l, &known, e);
    if (rc == 0 && file.stamp < known)
        rc = refuse_older_copy(l, file.stamp, known, ".stamp", e);
    l->stamp_is_kept = rc == 0 && known == l->file_stamp;
    return rc;
}
