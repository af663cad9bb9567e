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
    char *stamp_path, *fresh_stamp_path, *folder;
    /* See ledger_sqlite_stamp.c; the writer's. */
    int64_t stamp;      /* of the newest transaction */
    int64_t next_stamp; /* of the one that is being written */
    int64_t file_stamp; /* up to here everything is in the file itself */
    bool stamp_is_kept; /* NAME.stamp says file_stamp */
    int log_pages; /* in the log after the newest transaction; 0: since the last checkpoint there is none */
    /* Under the mutex: */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    struct queue transactions;
    struct queue marks;   /* struct waiting_mark */
    struct queue writing; /* those that the writer has in hand: it alone changes the list */
    size_t n_marks;
    bool ended; /* among the marks are times of a version that has ended: not to wait */
    uint64_t next_mark;
    bool stop;
};

/* --- ledger_sqlite_open.c; the loop thread, before the writer's begins --- */

/* Takes the lock, makes or checks the file, brings it up to this release's schema, opens both
 * connections and prepares the writer's statements. What it has opened is closed by the caller,
 * also when it fails. */
int ledger_file_open(struct ledger_sqlite *l, struct err *e);

/* --- ledger_sqlite_stamp.c; while the writer's thread runs, on it --- */

int stamps_init(struct ledger_sqlite *l, struct err *e); /* RS_ENOMEM */
void stamps_close(struct ledger_sqlite *l);              /* safe where init failed, or never was */
/* Before anything is changed: RS_EDISK where the file, its log and NAME.stamp do not belong together, or NAME.stamp is not as
 * it was written. Reads the store's id and stamps. */
int stamps_check(struct ledger_sqlite *l, struct err *e);
/* Transactions begin and end by these (SQLite codes; the store's table must be there). */
int stamps_begin(struct ledger_sqlite *l);
int stamps_put(struct ledger_sqlite *l); /* what stamps_begin does inside one */
int stamps_commit(struct ledger_sqlite *l);
/* From now on the log is brought into the file by stamps_checkpoint alone. */
void stamps_watch_log(struct ledger_sqlite *l);
/* Not inside a transaction. Never fails: see there. */
void stamps_checkpoint(struct ledger_sqlite *l);
void stamps_checkpoint_if_due(struct ledger_sqlite *l);

/* --- ledger_sqlite_db.c; the thread of the connection --- */

int db_translate(int rc); /* RS_E… of an SQLite code */
/* Sets e, with the file's name, what was being done and SQLite's words (of db; NULL: of rc). Returns its code. */
int db_fail(struct err *e, const char *path, sqlite3 *db, int rc, const char *doing);
/* SQLite codes. */
int db_run(sqlite3 *db, const char *sql);
int db_number(sqlite3 *db, const char *sql,
              int64_t *ret); /* *ret stays as it is where there is no row */

#endif
