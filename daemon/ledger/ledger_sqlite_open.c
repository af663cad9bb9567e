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
    SCHEMA_VERSION = 2,
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

static int create_schema(struct ledger_sqlite *l, struct err *e)
{
    char pragmas[256];
    (void)snprintf(pragmas, sizeof pragmas,
                   "PRAGMA application_id = %d; PRAGMA user_version = %d;"
                   "CREATE TABLE store (id INTEGER NOT NULL);"
                   "INSERT INTO store VALUES (%lld);",
                   APPLICATION_ID, SCHEMA_VERSION, (long long)(random_id() >> 1));
    int rc = db_run(l->writer, "BEGIN IMMEDIATE");
    for (size_t k = 0; rc == SQLITE_OK && k <= LEDGER_MARK; k++)
        if (ledger_tables[k].create != NULL)
            rc = db_run(l->writer, ledger_tables[k].create);
    if (rc == SQLITE_OK)
        rc = db_run(l->writer, "CREATE INDEX marks_of_version ON marks (model, version, at_ns)");
    if (rc == SQLITE_OK)
        rc = db_run(l->writer, pragmas);
    if (rc == SQLITE_OK)
        rc = db_run(l->writer, "COMMIT");
    if (rc == SQLITE_OK)
        return 0;
    int code = db_fail(e, l->path, l->writer, rc, "creating");
    (void)db_run(l->writer, "ROLLBACK");
    return code;
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

/* The id in the file itself, without what its log says; 0: none yet, or it can't be told. */
static int64_t id_without_log(const struct ledger_sqlite *l)
{
    int64_t id = 0;
    sqlite3 *db = NULL;
    char *uri = uri_without_log(l->path);
    if (uri != NULL &&
        sqlite3_open_v2(uri, &db, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, NULL) == SQLITE_OK)
        (void)db_number(db, "SELECT id FROM store", &id);
    (void)sqlite3_close(db);
    sqlite3_free(uri);
    return id;
}

/* SQLite takes any log that lies beside the file as its own. */
static int check_log(struct ledger_sqlite *l, struct err *e)
{
    int64_t id = 0, file_id = id_without_log(l);
    if (file_id == 0 || db_number(l->writer, "SELECT id FROM store", &id) != SQLITE_OK ||
        id == file_id)
        return 0;
    return err_set(e, RS_EDISK,
                   "ledger %s is store %016llx, the log %s-wal beside it is of store %016llx: put "
                   "together what belongs together, or move the log away",
                   l->path, (unsigned long long)file_id, l->path, (unsigned long long)id);
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
    int code = check_log(l, e);
    return code != 0 ? code : find_damage(l, e);
}

/* Older files are brought up to this schema, in one transaction: an older release refuses them afterwards. */
static int upgrade_schema(struct ledger_sqlite *l, struct err *e)
{
    int rc = db_run(l->writer, "BEGIN IMMEDIATE");
    if (rc == SQLITE_OK && l->schema < 2)
        rc = db_run(l->writer, "ALTER TABLE versions ADD COLUMN config_digest BLOB;"
                               "UPDATE store SET rowid = 3 - rowid; PRAGMA user_version = 2");
    if (rc == SQLITE_OK)
        rc = db_run(l->writer, "COMMIT");
    if (rc == SQLITE_OK)
        return 0;
    int code = db_fail(e, l->path, l->writer, rc, "bringing it up to this release's schema");
    (void)db_run(l->writer, "ROLLBACK");
    return code;
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
    int rc = take_lock(l, e);
    if (rc == 0)
        rc = make_file(l, e);
    if (rc == 0)
        rc = set_up_writer(l, e);
    if (rc == 0)
        rc = connect_to(l, SQLITE_OPEN_READONLY, &l->reader, e);
    if (rc == 0)
        rc = read_identity(l, e);
    return rc == 0 ? prepare_upserts(l, e) : rc;
}
