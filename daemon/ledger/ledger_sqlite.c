/* The ledger in one SQLite file.
 *
 * Two connections: the writer thread's, which nobody else touches, and the loop's, which only
 * reads. The loop hands transactions and marks over in lists under one mutex, held for list moves
 * only; what is done goes back through the loop's mailbox, in order.
 *
 * What a failed write leaves: SQLITE_FULL comes from writing frames to the WAL, before the commit
 * frame is whole, so nothing of the transaction can come back. Any other failure (fsync above all)
 * leaves frames whose fate is not known; the writer then refuses everything with RS_EDISK, and the
 * daemon must stop: a new start reads what there is. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <sqlite3.h>

#include "base/mem.h"
#include "base/queue.h"
#include "base/random.h"
#include "ledger/columns.h"
#include "ledger/copy.h"
#include "ledger/ledger.h"

#include "base/banned.h"

enum {
    APPLICATION_ID = 0x72736864, /* "rshd" */
    SCHEMA_VERSION = 2,
    MAX_MARKS = 65536,  /* waiting to be written */
    MARK_BATCH = 1024,  /* written at once when as many wait */
    MARK_DELAY_S = 1,   /* else after this long */
    LOCK_WAIT_MS = 5000 /* for SQLite's own locks: a checkpoint or a reader of the file */
};

struct waiting_mark {
    struct queue link;
    uint64_t number; /* its key in the table: tells the reader which ones it has read already */
    struct ledger_record *record;
    void *bytes;
};

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

static struct ledger_sqlite *of(struct ledger *l)
{
    return container_of(l, struct ledger_sqlite, base);
}

/* --- errors --- */

static int translate(int rc)
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

static int fail(struct err *e, const char *path, sqlite3 *db, int rc, const char *doing)
{
    bool damaged = (rc & 0xFF) == SQLITE_CORRUPT;
    return err_set(e, translate(rc), "ledger %s: %s: %s%s", path, doing,
                   db == NULL ? sqlite3_errstr(rc) : sqlite3_errmsg(db),
                   damaged ? ": put a good copy in its place, or move it away to start anew" : "");
}

/* --- rows --- */

static int bind_column(sqlite3_stmt *st, int at, const struct column *c, const char *record)
{
    const char *field = record + c->offset;
    switch (c->type) {
    case COLUMN_U64:
        return sqlite3_bind_int64(st, at, *(const sqlite3_int64 *)(const void *)field);
    case COLUMN_U32:
        return sqlite3_bind_int64(st, at, *(const uint32_t *)(const void *)field);
    case COLUMN_BOOL:
        return sqlite3_bind_int(st, at, *(const bool *)(const void *)field);
    case COLUMN_TEXT: {
        const char *text = *(const char *const *)(const void *)field;
        return sqlite3_bind_text(st, at, text == NULL ? "" : text, -1, SQLITE_STATIC);
    }
    case COLUMN_DIGEST:
        return sqlite3_bind_blob(st, at, field, 16, SQLITE_STATIC);
    case COLUMN_BLOB: {
        const void *blob = *(const void *const *)(const void *)field;
        size_t n = *(const size_t *)(const void *)(record + c->length_offset);
        return sqlite3_bind_blob64(st, at, blob, n, SQLITE_STATIC);
    }
    }
    return SQLITE_MISUSE;
}

static int upsert(struct ledger_sqlite *l, const struct ledger_record *record, uint64_t number)
{
    const struct table *t = &ledger_tables[record->kind];
    sqlite3_stmt *st = l->upserts[record->kind];
    int rc = SQLITE_OK;
    for (size_t i = 0; rc == SQLITE_OK && i < t->n_columns; i++)
        rc = bind_column(st, (int)i + 1, &t->columns[i], (const char *)record);
    if (rc == SQLITE_OK && record->kind == LEDGER_MARK)
        rc = sqlite3_bind_int64(st, (int)t->n_columns + 1, (sqlite3_int64)number);
    if (rc == SQLITE_OK)
        rc = sqlite3_step(st);
    int reset = sqlite3_reset(st);
    (void)sqlite3_clear_bindings(st);
    return rc == SQLITE_DONE ? SQLITE_OK : rc != SQLITE_ROW ? rc : reset;
}

static void read_column(sqlite3_stmt *st, int at, const struct column *c, char *record)
{
    char *field = record + c->offset;
    switch (c->type) {
    case COLUMN_U64:
        *(sqlite3_int64 *)(void *)field = sqlite3_column_int64(st, at);
        break;
    case COLUMN_U32:
        *(uint32_t *)(void *)field = (uint32_t)sqlite3_column_int64(st, at);
        break;
    case COLUMN_BOOL:
        *(bool *)(void *)field = sqlite3_column_int(st, at) != 0;
        break;
    case COLUMN_TEXT: {
        const char *text = (const char *)sqlite3_column_text(st, at);
        *(const char **)(void *)field = text == NULL ? "" : text;
        break;
    }
    case COLUMN_DIGEST:
        if (sqlite3_column_bytes(st, at) == 16)
            memcpy(field, sqlite3_column_blob(st, at), 16);
        break;
    case COLUMN_BLOB:
        *(const void **)(void *)field = sqlite3_column_blob(st, at);
        *(size_t *)(void *)(record + c->length_offset) = (size_t)sqlite3_column_bytes(st, at);
        break;
    }
}

static void read_row(sqlite3_stmt *st, enum ledger_kind kind, struct ledger_record *ret)
{
    const struct table *t = &ledger_tables[kind];
    *ret = (struct ledger_record){.kind = kind};
    for (size_t i = 0; i < t->n_columns; i++)
        read_column(st, (int)i, &t->columns[i], (char *)ret);
}

/* --- the writer --- */

static int run(sqlite3 *db, const char *sql)
{
    return sqlite3_exec(db, sql, NULL, NULL, NULL);
}

/* The store's page goes into each transaction, so that a log always tells whose it is (check_log). A row that stays
 * as it was would not be written: it changes places, 1 and 2. */
static int write_records(struct ledger_sqlite *l, const struct ledger_transaction *t)
{
    int rc = run(l->writer, "BEGIN IMMEDIATE; UPDATE store SET rowid = 3 - rowid");
    for (size_t i = 0; rc == SQLITE_OK && i < t->n_records; i++)
        rc = upsert(l, &t->records[i], 0);
    return rc == SQLITE_OK ? run(l->writer, "COMMIT") : rc;
}

/* Only these leave the file as it was, for certain. */
static bool harmless(int code)
{
    return code == RS_EFULL || code == RS_ENOMEM || code == RS_EUNAVAIL;
}

static void write_transaction(struct ledger_sqlite *l, struct ledger_transaction *t)
{
    t->err = l->failure;
    t->code = l->failure.code;
    if (t->code != 0)
        return;
    int rc = write_records(l, t);
    if (rc == SQLITE_OK)
        return;
    t->code = fail(&t->err, l->path, l->writer, rc, "writing");
    if (!harmless(t->code)) {
        t->code = t->err.code = RS_EDISK;
        l->failure = t->err;
    }
    (void)run(l->writer, "ROLLBACK"); /* SQLite may have done it already */
}

static void mark_free(struct waiting_mark *m)
{
    mem_free(m->record);
    mem_free(m->bytes);
    mem_free(m);
}

/* Without waiting for the disk: a crash may lose the last marks. */
static int write_marks(struct ledger_sqlite *l, struct queue *marks)
{
    if (l->failure.code != 0)
        return RS_EDISK;
    int rc = run(l->writer, "PRAGMA synchronous = NORMAL");
    if (rc == SQLITE_OK)
        rc = run(l->writer, "BEGIN IMMEDIATE");
    queue_foreach (q, marks) {
        const struct waiting_mark *m = container_of(q, struct waiting_mark, link);
        if (rc == SQLITE_OK)
            rc = upsert(l, m->record, m->number);
    }
    if (rc == SQLITE_OK)
        rc = run(l->writer, "COMMIT");
    if (rc != SQLITE_OK)
        (void)run(l->writer, "ROLLBACK");
    int full = run(l->writer, "PRAGMA synchronous = FULL");
    if (full != SQLITE_OK) /* what follows would not be durable */
        (void)fail(&l->failure, l->path, l->writer, full, "setting synchronous");
    return rc == SQLITE_OK ? 0 : translate(rc);
}

/* Marks stay in `writing`, where the reader sees them, until they are in the file. Called and
 * returns with the mutex held. */
static void flush_marks(struct ledger_sqlite *l)
{
    queue_move(&l->marks, &l->writing); /* behind those that could not be written before */
    if (queue_empty(&l->writing))
        return;
    (void)pthread_mutex_unlock(&l->mutex);
    int rc = write_marks(l, &l->writing);
    (void)pthread_mutex_lock(&l->mutex);
    if (rc != 0)
        return; /* they wait for the next time */
    for (struct queue *q = queue_pop(&l->writing); q != NULL; q = queue_pop(&l->writing)) {
        mark_free(container_of(q, struct waiting_mark, link));
        l->n_marks--;
    }
}

static struct timespec later(time_t seconds)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += seconds;
    return t;
}

static bool passed(const struct timespec *t)
{
    struct timespec now = later(0);
    return now.tv_sec > t->tv_sec || (now.tv_sec == t->tv_sec && now.tv_nsec >= t->tv_nsec);
}

/* Called and returns with the mutex held. */
static void write_next(struct ledger_sqlite *l)
{
    struct ledger_transaction *t =
        container_of(queue_pop(&l->transactions), struct ledger_transaction, link);
    (void)pthread_mutex_unlock(&l->mutex);
    write_transaction(l, t);
    rs_assert(mailbox_post(l->loop, &t->item)); /* the loop's mailbox outlives its ledger */
    (void)pthread_mutex_lock(&l->mutex);
}

static void *writer_main(void *arg)
{
    struct ledger_sqlite *l = arg;
    struct timespec marks_due = later(MARK_DELAY_S);
    (void)pthread_mutex_lock(&l->mutex);
    while (!l->stop || !queue_empty(&l->transactions)) {
        if (!queue_empty(&l->transactions)) {
            write_next(l);
        } else if (l->n_marks > 0 && (l->n_marks >= MARK_BATCH || passed(&marks_due))) {
            flush_marks(l);
            marks_due = later(MARK_DELAY_S);
            if (l->n_marks >= MARK_BATCH) /* could not be written: not again at once */
                (void)pthread_cond_timedwait(&l->wake, &l->mutex, &marks_due);
        } else if (l->n_marks > 0) {
            (void)pthread_cond_timedwait(&l->wake, &l->mutex, &marks_due);
        } else {
            (void)pthread_cond_wait(&l->wake, &l->mutex);
            marks_due = later(MARK_DELAY_S);
        }
    }
    flush_marks(l);
    (void)pthread_mutex_unlock(&l->mutex);
    return NULL;
}

static void sqlite_submit(struct ledger *base, struct ledger_transaction *t)
{
    struct ledger_sqlite *l = of(base);
    t->item.fn = ledger_transaction_done;
    (void)pthread_mutex_lock(&l->mutex);
    queue_push(&l->transactions, &t->link);
    (void)pthread_cond_signal(&l->wake);
    (void)pthread_mutex_unlock(&l->mutex);
}

static int sqlite_mark(struct ledger *base, const char *model, const struct ledger_mark *mark)
{
    struct ledger_sqlite *l = of(base);
    struct ledger_record record = {.kind = LEDGER_MARK, .model = model, .mark = *mark};
    struct waiting_mark *m = mem_zalloc(sizeof *m);
    if (m == NULL)
        return RS_ENOMEM;
    int rc = ledger_records_copy(&record, 1, &m->record, &m->bytes);
    if (rc != 0) {
        mem_free(m);
        return rc;
    }
    (void)pthread_mutex_lock(&l->mutex);
    if (l->n_marks >= MAX_MARKS) {
        rc = RS_EEXHAUSTED;
    } else {
        m->number = l->next_mark++;
        queue_push(&l->marks, &m->link);
        if (l->n_marks++ == 0 || l->n_marks >= MARK_BATCH)
            (void)pthread_cond_signal(&l->wake);
    }
    (void)pthread_mutex_unlock(&l->mutex);
    if (rc != 0)
        mark_free(m);
    return rc;
}

/* --- reading --- */

/* Runs `sql` (?1 model, ?2 version, ?3 limit, as far as it has them) and gives each row to fn. */
static int query(struct ledger_sqlite *l, enum ledger_kind kind, const char *sql, const char *model,
                 uint64_t version, uint32_t last, ledger_row_fn fn, void *arg, struct err *e)
{
    sqlite3_stmt *st = NULL;
    int rc = sqlite3_prepare_v2(l->reader, sql, -1, &st, NULL);
    int n = rc == SQLITE_OK ? sqlite3_bind_parameter_count(st) : 0;
    if (rc == SQLITE_OK && n >= 1)
        rc = sqlite3_bind_text(st, 1, model, -1, SQLITE_STATIC);
    if (rc == SQLITE_OK && n >= 2)
        rc = sqlite3_bind_int64(st, 2, (sqlite3_int64)version);
    if (rc == SQLITE_OK && n >= 3)
        rc = sqlite3_bind_int64(st, 3, last == 0 ? -1 : (sqlite3_int64)last);
    int told = 0;
    while (rc == SQLITE_OK && told == 0) {
        int step = sqlite3_step(st);
        if (step == SQLITE_DONE)
            break;
        if (step != SQLITE_ROW) {
            rc = step;
            break;
        }
        struct ledger_record row;
        read_row(st, kind, &row);
        told = fn(&row, arg);
    }
    if (rc != SQLITE_OK)
        told = fail(e, l->path, l->reader, rc, "reading");
    (void)sqlite3_finalize(st);
    return told;
}

static int sqlite_load(struct ledger *base, ledger_row_fn fn, void *arg, struct err *e)
{
    static const struct {
        enum ledger_kind kind;
        const char *sql;
    } all[] = {{LEDGER_LAYOUT, "SELECT * FROM layouts ORDER BY rowid"},
               {LEDGER_MODEL, "SELECT * FROM models"},
               {LEDGER_MEMBER, "SELECT * FROM members ORDER BY rowid"},
               {LEDGER_VERSION, "SELECT * FROM versions ORDER BY model, version"},
               {LEDGER_REQUEST, "SELECT * FROM requests ORDER BY rowid"},
               {LEDGER_ATTEMPT, "SELECT * FROM attempts ORDER BY model, attempt"},
               {LEDGER_ACCEPTANCE, "SELECT * FROM acceptances ORDER BY rowid"}};
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < sizeof all / sizeof *all; i++)
        rc = query(of(base), all[i].kind, all[i].sql, NULL, 0, 0, fn, arg, e);
    return rc;
}

static int sqlite_versions(struct ledger *base, const char *model, uint64_t version, uint32_t last,
                           ledger_row_fn fn, void *arg, struct err *e)
{
    return query(of(base), LEDGER_VERSION,
                 "SELECT * FROM versions WHERE model = ?1 AND (?2 = 0 OR version = ?2) ORDER BY "
                 "version DESC "
                 "LIMIT ?3",
                 model, version, last, fn, arg, e);
}

/* What the timeline's reader carries: marks in the file, then those that wait, merged by time. */
struct merge {
    ledger_row_fn fn;
    void *arg;
    struct ledger_record **waiting; /* ascending at_ns; copies */
    void **bytes;
    size_t n_waiting, at;
};

static int merge_row(const struct ledger_record *row, void *arg)
{
    struct merge *m = arg;
    int rc = 0;
    while (rc == 0 && m->at < m->n_waiting && m->waiting[m->at]->mark.at_ns < row->mark.at_ns)
        rc = m->fn(m->waiting[m->at++], m->arg);
    return rc != 0 ? rc : m->fn(row, m->arg);
}

static void merge_close(struct merge *m)
{
    for (size_t i = 0; i < m->n_waiting; i++) {
        mem_free(m->waiting[i]);
        mem_free(m->bytes[i]);
    }
    mem_free((void *)m->waiting);
    mem_free((void *)m->bytes);
}

/* Insertion keeps them in order: there are few. */
static int merge_add(struct merge *m, const struct ledger_record *record)
{
    struct ledger_record *copy;
    void *bytes;
    int rc = ledger_records_copy(record, 1, &copy, &bytes);
    if (rc != 0)
        return rc;
    size_t at = m->n_waiting++;
    for (; at > 0 && m->waiting[at - 1]->mark.at_ns > copy->mark.at_ns; at--) {
        m->waiting[at] = m->waiting[at - 1];
        m->bytes[at] = m->bytes[at - 1];
    }
    m->waiting[at] = copy;
    m->bytes[at] = bytes;
    return 0;
}

static int merge_list(struct merge *m, const struct queue *list, const char *model,
                      uint64_t version, uint64_t in_file)
{
    int rc = 0;
    queue_foreach (q, list) {
        const struct waiting_mark *w = container_of(q, struct waiting_mark, link);
        if (rc == 0 && w->number > in_file && w->record->mark.version == version &&
            strcmp(w->record->model, model) == 0)
            rc = merge_add(m, w->record);
    }
    return rc;
}

/* Copies of the marks that are not in the file up to number `in_file`. */
static int merge_init(struct merge *m, struct ledger_sqlite *l, const char *model, uint64_t version,
                      uint64_t in_file)
{
    (void)pthread_mutex_lock(&l->mutex);
    m->waiting = mem_calloc(l->n_marks, sizeof *m->waiting);
    m->bytes = mem_calloc(l->n_marks, sizeof *m->bytes);
    int rc = m->waiting == NULL || m->bytes == NULL ? RS_ENOMEM : 0;
    if (rc == 0)
        rc = merge_list(m, &l->writing, model, version, in_file);
    if (rc == 0)
        rc = merge_list(m, &l->marks, model, version, in_file);
    (void)pthread_mutex_unlock(&l->mutex);
    return rc;
}

static int read_number(sqlite3 *db, const char *sql, int64_t *ret)
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

static int timeline_marks(struct ledger_sqlite *l, const char *model, uint64_t version,
                          ledger_row_fn fn, void *arg, struct err *e)
{
    struct merge m = {.fn = fn, .arg = arg};
    int64_t in_file = 0;
    int rc = read_number(l->reader, "SELECT coalesce(max(number), 0) FROM marks", &in_file);
    if (rc != SQLITE_OK)
        return fail(e, l->path, l->reader, rc, "reading marks");
    rc = merge_init(&m, l, model, version, (uint64_t)in_file);
    if (rc != 0)
        rc = err_set(e, rc, "ledger %s: out of memory", l->path);
    else
        rc = query(l, LEDGER_MARK,
                   "SELECT * FROM marks WHERE model = ?1 AND version = ?2 ORDER BY at_ns, number",
                   model, version, 0, merge_row, &m, e);
    while (rc == 0 && m.at < m.n_waiting)
        rc = fn(m.waiting[m.at++], arg);
    merge_close(&m);
    return rc;
}

static int sqlite_timeline(struct ledger *base, const char *model, uint64_t version,
                           ledger_row_fn fn, void *arg, struct err *e)
{
    struct ledger_sqlite *l = of(base);
    int rc = run(l->reader, "BEGIN"); /* one view for all of it */
    if (rc != SQLITE_OK)
        return fail(e, l->path, l->reader, rc, "reading");
    rc = timeline_marks(l, model, version, fn, arg, e);
    if (rc == 0)
        rc = query(
            l, LEDGER_ACCEPTANCE,
            "SELECT * FROM acceptances WHERE model = ?1 AND version = ?2 ORDER BY layout, instance",
            model, version, 0, fn, arg, e);
    if (rc == 0)
        rc = query(l, LEDGER_ATTEMPT,
                   "SELECT * FROM attempts WHERE model = ?1 AND version = ?2 ORDER BY attempt",
                   model, version, 0, fn, arg, e);
    (void)run(l->reader, "COMMIT");
    return rc;
}

/* --- opening --- */

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
    return rc == SQLITE_OK ? 0 : fail(e, l->path, *ret, rc, "opening");
}

static int create_schema(struct ledger_sqlite *l, struct err *e)
{
    char pragmas[256];
    (void)snprintf(pragmas, sizeof pragmas,
                   "PRAGMA application_id = %d; PRAGMA user_version = %d;"
                   "CREATE TABLE store (id INTEGER NOT NULL);"
                   "INSERT INTO store VALUES (%lld);",
                   APPLICATION_ID, SCHEMA_VERSION, (long long)(random_id() >> 1));
    int rc = run(l->writer, "BEGIN IMMEDIATE");
    for (size_t k = 0; rc == SQLITE_OK && k <= LEDGER_MARK; k++)
        if (ledger_tables[k].create != NULL)
            rc = run(l->writer, ledger_tables[k].create);
    if (rc == SQLITE_OK)
        rc = run(l->writer, "CREATE INDEX marks_of_version ON marks (model, version, at_ns)");
    if (rc == SQLITE_OK)
        rc = run(l->writer, pragmas);
    if (rc == SQLITE_OK)
        rc = run(l->writer, "COMMIT");
    if (rc == SQLITE_OK)
        return 0;
    int code = fail(e, l->path, l->writer, rc, "creating");
    (void)run(l->writer, "ROLLBACK");
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
        (void)read_number(db, "SELECT id FROM store", &id);
    (void)sqlite3_close(db);
    sqlite3_free(uri);
    return id;
}

/* SQLite takes any log that lies beside the file as its own. */
static int check_log(struct ledger_sqlite *l, struct err *e)
{
    int64_t id = 0, file_id = id_without_log(l);
    if (file_id == 0 || read_number(l->writer, "SELECT id FROM store", &id) != SQLITE_OK ||
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
    int rc = read_number(l->writer, "PRAGMA application_id", &application);
    if (rc == SQLITE_OK)
        rc = read_number(l->writer, "PRAGMA user_version", &schema);
    if (rc == SQLITE_OK)
        rc = read_number(l->writer, "SELECT count(*) FROM sqlite_master", &n_objects);
    if ((rc & 0xFF) == SQLITE_NOTADB || (rc & 0xFF) == SQLITE_CORRUPT)
        return err_set(
            e, RS_EDISK,
            "ledger %s is damaged or no SQLite file (%s): put a good copy in its place, or move "
            "it away to start anew",
            l->path, sqlite3_errmsg(l->writer));
    if (rc != SQLITE_OK)
        return fail(e, l->path, l->writer, rc, "reading its header");
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
    int rc = run(l->writer, "BEGIN IMMEDIATE");
    if (rc == SQLITE_OK && l->schema < 2)
        rc = run(l->writer, "ALTER TABLE versions ADD COLUMN config_digest BLOB;"
                            "UPDATE store SET rowid = 3 - rowid; PRAGMA user_version = 2");
    if (rc == SQLITE_OK)
        rc = run(l->writer, "COMMIT");
    if (rc == SQLITE_OK)
        return 0;
    int code = fail(e, l->path, l->writer, rc, "bringing it up to this release's schema");
    (void)run(l->writer, "ROLLBACK");
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
    rc = run(l->writer, "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL");
    if (rc != SQLITE_OK)
        return fail(e, l->path, l->writer, rc, "turning the write-ahead log on");
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
            return fail(e, l->path, l->writer, rc, ledger_tables[k].name);
    }
    return 0;
}

static int read_identity(struct ledger_sqlite *l, struct err *e)
{
    int64_t id = 0, marks = 0;
    int rc = read_number(l->reader, "SELECT id FROM store", &id);
    if (rc == SQLITE_OK)
        rc = read_number(l->reader, "SELECT coalesce(max(number), 0) FROM marks", &marks);
    if (rc != SQLITE_OK)
        return fail(e, l->path, l->reader, rc, "reading its id");
    l->base.store_id = (uint64_t)id;
    l->next_mark = (uint64_t)marks + 1;
    return 0;
}

static int start_writer(struct ledger_sqlite *l, struct err *e)
{
    int rc = pthread_create(&l->thread, NULL, writer_main, l);
    if (rc != 0)
        return err_set(e, err_from_errno(rc), "ledger %s: starting its writer: %s", l->path,
                       strerror(rc));
    l->thread_runs = true;
    return 0;
}

static void sqlite_close(struct ledger *base)
{
    struct ledger_sqlite *l = of(base);
    if (l->thread_runs) {
        (void)pthread_mutex_lock(&l->mutex);
        l->stop = true;
        (void)pthread_cond_signal(&l->wake);
        (void)pthread_mutex_unlock(&l->mutex);
        (void)pthread_join(l->thread, NULL);
        (void)mailbox_drain(l->loop);
    }
    for (size_t k = 0; k <= LEDGER_MARK; k++)
        (void)sqlite3_finalize(l->upserts[k]);
    queue_move(&l->writing, &l->marks);
    for (struct queue *q = queue_pop(&l->marks); q != NULL; q = queue_pop(&l->marks))
        mark_free(container_of(q, struct waiting_mark, link));
    (void)sqlite3_close(l->reader);
    (void)sqlite3_close(l->writer);
    (void)pthread_cond_destroy(&l->wake);
    (void)pthread_mutex_destroy(&l->mutex);
    if (l->lock_fd >= 0)
        (void)close(l->lock_fd);
    mem_free(l->path);
    mem_free(l);
}

static struct ledger_sqlite *sqlite_new(const char *path, struct mailbox *loop)
{
    static const struct ledger_vtable vtable = {.submit = sqlite_submit,
                                                .mark = sqlite_mark,
                                                .load = sqlite_load,
                                                .versions = sqlite_versions,
                                                .timeline = sqlite_timeline,
                                                .close = sqlite_close};
    struct ledger_sqlite *l = mem_zalloc(sizeof *l);
    char *copy = mem_strdup(path);
    if (l == NULL || copy == NULL) {
        mem_free(l);
        mem_free(copy);
        return NULL;
    }
    pthread_condattr_t monotonic;
    rs_assert(pthread_condattr_init(&monotonic) == 0 &&
              pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC) == 0 &&
              pthread_cond_init(&l->wake, &monotonic) == 0 &&
              pthread_mutex_init(&l->mutex, NULL) == 0);
    (void)pthread_condattr_destroy(&monotonic);
    l->base.vtable = &vtable;
    l->path = copy;
    l->loop = loop;
    l->lock_fd = -1;
    queue_init(&l->transactions);
    queue_init(&l->marks);
    queue_init(&l->writing);
    return l;
}

int ledger_sqlite_open(const char *path, struct mailbox *loop, struct ledger **ret, struct err *e)
{
    struct ledger_sqlite *l = sqlite_new(path, loop);
    if (l == NULL)
        return err_set(e, RS_ENOMEM, "ledger %s: out of memory", path);
    int rc = take_lock(l, e);
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
        rc = start_writer(l, e);
    if (rc != 0) {
        sqlite_close(&l->base);
        return rc;
    }
    *ret = &l->base;
    return 0;
}
