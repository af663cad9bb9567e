/* The ledger in one SQLite file: what its writer and reader (ledger_sqlite.c) share with its opening
 * (ledger_sqlite_open.c). Private to them. */
#ifndef RS_LEDGER_LEDGER_SQLITE_H
#define RS_LEDGER_LEDGER_SQLITE_H

#include <pthread.h>

#include <sqlite3.h>

#include "base/queue.h"
#include "ledger/columns.h"
#include "ledger/ledger.h"

struct ledger_sqlite {
    struct ledger base;
    struct mailbox *loop;
    char *path;
    int lock_fd;
    sqlite3 *reader; /* the loop's */
    sqlite3 *writer; /* the writer thread's, once it runs */
    sqlite3_stmt *upserts[LEDGER_MARK + 1];
    struct err failure; /* the writer's: set once the file can't be trusted */
    pthread_t thread;
    bool thread_runs;
    int64_t schema; /* of the file as it was found */
    /* Under the mutex: */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    struct queue transactions;
    struct queue marks;   /* struct waiting_mark */
    struct queue writing; /* those that the writer has in hand: it alone changes the list */
    size_t n_marks;
    uint64_t next_mark;
    bool stop;
};

/* --- ledger_sqlite_open.c; the loop thread, before the writer's begins --- */

/* Takes the lock, makes or checks the file, brings it up to this release's schema, opens both
 * connections and prepares the writer's statements. What it has opened is closed by the caller,
 * also when it fails. */
int ledger_file_open(struct ledger_sqlite *l, struct err *e);

/* --- ledger_sqlite_db.c; the thread of the connection --- */

int db_translate(int rc); /* RS_E… of an SQLite code */
/* Sets e, with the file's name, what was being done and SQLite's words (of db; NULL: of rc). Returns its code. */
int db_fail(struct err *e, const char *path, sqlite3 *db, int rc, const char *doing);
/* SQLite codes. */
int db_run(sqlite3 *db, const char *sql);
int db_number(sqlite3 *db, const char *sql,
              int64_t *ret); /* *ret stays as it is where there is no row */

#endif
