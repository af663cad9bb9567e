/* Opening the ledger's file: whose it is, whether it is whole, its schema. */
#include "ledger/ledger_sqlite.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"

#include "base/banned.h"

enum {
    APPLICATION_ID = 0x72736864, /* "rshd" */
    SCHEMA_VERSION = 3,
    LOCK_WAIT_MS = 5000 /* for SQLite's own locks: a checkpoint or a reader of the file */
};

static int take_lock(struct ledger_sqlite *l, struct err *e)
{
    char *lock = mem_printf("%s.lock", l->path);
    if (lock == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    int rc = 0;
    l->lock_fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (l->lock_fd < 0)
        rc = err_set(e, err_from_errno(errno), "ledger lock %s: %s", lock, strerror(errno));
    else if (flock(l->lock_fd, LOCK_EX | LOCK_NB) != 0)
        rc = err_set(
            e, RS_EUNAVAIL,
            "ledger %s is in use by another daemon (it holds %s); stop it or set another path",
            l->path, lock);
    mem_free(lock);
    return rc;
}

/* With a mode of our own; SQLite would go by the umask. */
static int make_file(struct ledger_sqlite *l, struct err *e)
{
    struct stat st;
    int fd = open(l->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return err_set(e, errno == ENOSPC ? RS_EFULL : RS_EPERM, "ledger %s: %s", l->path,
                       strerror(errno));
    int rc = fstat(fd, &st);
    (void)close(fd);
    if (rc != 0 || !S_ISREG(st.st_mode))
        return err_set(e, RS_EDISK, "ledger %s: not a regular file", l->path);
    return 0;
}

static int connect_to(struct ledger_sqlite *l, int flags, sqlite3 **ret, struct err *e)
{
    int rc = sqlite3_open_v2(l->path, ret, flags | SQLITE_OPEN_NOMUTEX, NULL);
    if (rc == SQLITE_OK)
        rc = sqlite3_busy_timeout(*ret, LOCK_WAIT_MS);
    return rc == SQLITE_OK ? 0 : db_fail(e, l->path, *ret, rc, "opening");
}

/* The end of a transaction that changed the schema, in which rc has come of it so far: stamped and durable, or nothing. */
static int end_of_schema(struct ledger_sqlite *l, int rc, const char *doing, struct err *e)
{
    if (rc == SQLITE_OK)
        rc = stamps_put(l);
    if (rc == SQLITE_OK)
        rc = stamps_commit(l);
    if (rc == SQLITE_OK)
        return 0;
    int code = db_fail(e, l->path, l->writer, rc, doing);
    (void)db_run(l->writer, "ROLLBACK");
    return code;
}

static int create_schema(struct ledger_sqlite *l, struct err *e)
{
    char first[320];
    (void)snprintf(first, sizeof first,
                   "PRAGMA application_id = %d; PRAGMA user_version = %d;"
                   "CREATE TABLE store (id INTEGER NOT NULL, stamp INTEGER NOT NULL, file_stamp "
                   "INTEGER NOT NULL); INSERT INTO store VALUES (%lld, 0, 0);",
                   APPLICATION_ID, SCHEMA_VERSION, (long long)(random_id() >> 1));
    int rc = db_run(l->writer, "BEGIN IMMEDIATE");
    for (size_t k = 0; rc == SQLITE_OK && k <= LEDGER_MARK; k++)
        if (ledger_tables[k].create != NULL)
            rc = db_run(l->writer, ledger_tables[k].create);
    if (rc == SQLITE_OK)
        rc = db_run(l->writer, "CREATE INDEX marks_of_version ON marks (model, version, at_ns)");
    if (rc == SQLITE_OK)
        rc = db_run(l->writer, first);
    return end_of_schema(l, rc, "creating", e);
}

/* The first fault that SQLite finds in the file, or "ok". */
static int find_damage(struct ledger_sqlite *l, struct err *e)
{
    sqlite3_stmt *st = NULL;
    int rc = sqlite3_prepare_v2(l->writer, "PRAGMA quick_check(1)", -1, &st, NULL);
    if (rc == SQLITE_OK)
        rc = sqlite3_step(st);
    const char *found = rc == SQLITE_ROW ? (const char *)sqlite3_column_text(st, 0) : NULL;
    int code = 0;
    if (found == NULL)
        code = err_set(
            e, RS_EDISK,
            "ledger %s is damaged (%s): put a good copy in its place, or move it away to start "
            "anew",
            l->path, sqlite3_errmsg(l->writer));
    else if (strcmp(found, "ok") != 0)
        code = err_set(
            e, RS_EDISK,
            "ledger %s is damaged (%.300s): put a good copy in its place, or move it away to "
            "start anew",
            l->path, found);
    (void)sqlite3_finalize(st);
    return code;
}

static int check_schema(struct ledger_sqlite *l, struct err *e)
{
    int64_t application = 0, schema = 0, n_objects = 0;
    int rc = db_number(l->writer, "PRAGMA application_id", &application);
    if (rc == SQLITE_OK)
        rc = db_number(l->writer, "PRAGMA user_version", &schema);
    if (rc == SQLITE_OK)
        rc = db_number(l->writer, "SELECT count(*) FROM sqlite_master", &n_objects);
    if ((rc & 0xFF) == SQLITE_NOTADB || (rc & 0xFF) == SQLITE_CORRUPT)
        return err_set(
            e, RS_EDISK,
            "ledger %s is damaged or no SQLite file (%s): put a good copy in its place, or move "
            "it away to start anew",
            l->path, sqlite3_errmsg(l->writer));
    if (rc != SQLITE_OK)
        return db_fail(e, l->path, l->writer, rc, "reading its header");
    if (application == 0 && schema == 0 && n_objects == 0) {
        l->base.created = true; /* empty, or a creation that did not come to its end */
        return 0;
    }
    if (application != APPLICATION_ID)
        return err_set(e, RS_EDISK,
                       "%s is a database, but not a ledger of reshardd: set another path", l->path);
    l->schema = schema;
    if (schema < 1 || schema > SCHEMA_VERSION)
        return err_set(
            e, RS_EDISK,
            "ledger %s has schema %lld, this release knows %d: run the release that made it, or "
            "move it away to start anew",
            l->path, (long long)schema, SCHEMA_VERSION);
    int code = stamps_check(l, e);
    return code != 0 ? code : find_damage(l, e);
}

static int upgrade_to_2(struct ledger_sqlite *l)
{
    return db_run(l->writer, "ALTER TABLE versions ADD COLUMN config_digest BLOB");
}

/* A table's key can't be changed: its rows move to a new one. */
static int upgrade_to_3(struct ledger_sqlite *l)
{
    int rc = db_run(l->writer, "ALTER TABLE acceptances RENAME TO acceptances_2");
    if (rc == SQLITE_OK)
        rc = db_run(l->writer, ledger_tables[LEDGER_ACCEPTANCE].create);
    if (rc == SQLITE_OK)
        rc = db_run(l->writer,
                    "INSERT INTO acceptances SELECT model, version, layout, instance, attempt, "
                    "accepted, reason FROM acceptances_2 ORDER BY rowid;"
                    "DROP TABLE acceptances_2;"
                    "ALTER TABLE attempts ADD COLUMN kind INTEGER NOT NULL DEFAULT 0;"
                    "ALTER TABLE store ADD COLUMN stamp INTEGER NOT NULL DEFAULT 0;"
                    "ALTER TABLE store ADD COLUMN file_stamp INTEGER NOT NULL DEFAULT 0");
    return rc == SQLITE_OK ? db_run(l->writer, ledger_tables[LEDGER_DRAIN].create) : rc;
}

/* Older files are brought up to this schema, in one transaction: an older release refuses them afterwards. */
static int upgrade_schema(struct ledger_sqlite *l, struct err *e)
{
    char version[48];
    (void)snprintf(version, sizeof version, "PRAGMA user_version = %d", SCHEMA_VERSION);
    int rc = db_run(l->writer, "BEGIN IMMEDIATE");
    if (rc == SQLITE_OK && l->schema < 2)
        rc = upgrade_to_2(l);
    if (rc == SQLITE_OK && l->schema < 3)
        rc = upgrade_to_3(l);
    if (rc == SQLITE_OK)
        rc = db_run(l->writer, version);
    return end_of_schema(l, rc, "bringing it up to this release's schema", e);
}

static int set_up_writer(struct ledger_sqlite *l, struct err *e)
{
    int rc = connect_to(l, SQLITE_OPEN_READWRITE, &l->writer, e);
    if (rc != 0)
        return rc;
    if (sqlite3_db_readonly(l->writer, "main") == 1)
        return err_set(e, RS_EPERM,
                       "ledger %s can't be written: check its mode and its file system", l->path);
    /* A log that is not believed must not come into the file by our closing it. */
    (void)sqlite3_db_config(l->writer, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
    rc = check_schema(l, e);
    if (rc != 0)
        return rc;
    (void)sqlite3_db_config(l->writer, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0, NULL);
    stamps_watch_log(l);
    rc = db_run(l->writer, "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL");
    if (rc != SQLITE_OK)
        return db_fail(e, l->path, l->writer, rc, "turning the write-ahead log on");
    if (l->base.created)
        return create_schema(l, e);
    return l->schema < SCHEMA_VERSION ? upgrade_schema(l, e) : 0;
}

static int prepare_upserts(struct ledger_sqlite *l, struct err *e)
{
    for (size_t k = 0; k <= LEDGER_MARK; k++) {
        if (ledger_tables[k].upsert == NULL)
            continue;
        int rc = sqlite3_prepare_v3(l->writer, ledger_tables[k].upsert, -1,
                                    SQLITE_PREPARE_PERSISTENT, &l->upserts[k], NULL);
        if (rc != SQLITE_OK)
            return db_fail(e, l->path, l->writer, rc, ledger_tables[k].name);
    }
    return 0;
}

static int read_identity(struct ledger_sqlite *l, struct err *e)
{
    int64_t id = 0, marks = 0;
    int rc = db_number(l->reader, "SELECT id FROM store", &id);
    if (rc == SQLITE_OK)
        rc = db_number(l->reader, "SELECT coalesce(max(number), 0) FROM marks", &marks);
    if (rc != SQLITE_OK)
        return db_fail(e, l->path, l->reader, rc, "reading its id");
    l->base.store_id = (uint64_t)id;
    l->next_mark = (uint64_t)marks + 1;
    return 0;
}

int ledger_file_open(struct ledger_sqlite *l, struct err *e)
{
    int rc = stamps_init(l, e);
    if (rc == 0)
        rc = take_lock(l, e);
    if (rc == 0)
        rc = make_file(l, e);
    if (rc == 0)
        rc = set_up_writer(l, e);
    if (rc == 0)
        rc = connect_to(l, SQLITE_OPEN_READONLY, &l->reader, e);
    if (rc == 0)
        rc = read_identity(l, e);
    if (rc == 0)
        rc = prepare_upserts(l, e);
    if (rc == 0)
        stamps_checkpoint(l);
    return rc;
}
