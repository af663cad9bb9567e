/* The ledger's few ways to call SQLite, and its codes in ours. */
#include "ledger/ledger_sqlite.h"

#include "base/banned.h"

int db_translate(int rc)
{
    switch (rc & 0xFF) {
    case SQLITE_FULL:
        return RS_EFULL;
    case SQLITE_NOMEM:
        return RS_ENOMEM;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return RS_EUNAVAIL;
    case SQLITE_PERM:
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
    case SQLITE_AUTH:
        return RS_EPERM;
    default:
        return RS_EDISK;
    }
}

int db_fail(struct err *e, const char *path, sqlite3 *db, int rc, const char *doing)
{
    bool damaged = (rc & 0xFF) == SQLITE_CORRUPT;
    return err_set(e, db_translate(rc), "ledger %s: %s: %s%s", path, doing,
                   db == NULL ? sqlite3_errstr(rc) : sqlite3_errmsg(db),
                   damaged ? ": put a good copy in its place, or move it away to start anew" : "");
}

int db_run(sqlite3 *db, const char *sql)
{
    return sqlite3_exec(db, sql, NULL, NULL, NULL);
}

int db_number(sqlite3 *db, const char *sql, int64_t *ret)
{
    sqlite3_stmt *st = NULL;
    int rc = sqlite3_prepare_v2(db, sql, -1, &st, NULL);
    if (rc == SQLITE_OK && (rc = sqlite3_step(st)) == SQLITE_ROW) {
        *ret = sqlite3_column_int64(st, 0);
        rc = SQLITE_OK;
    }
    (void)sqlite3_finalize(st);
    return rc;
}
