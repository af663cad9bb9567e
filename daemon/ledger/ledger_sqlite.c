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
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "ledger/copy.h"
#include "ledger/ledger_sqlite.h"

#include "base/banned.h"

enum {
    MAX_MARKS = 65536, /* waiting to be written */
    MARK_BATCH = 1024, /* written at once when as many wait */
    MARK_DELAY_S = 1   /* else after this long */
};

/* Or times of a version that has ended. */
struct waiting_mark {
    struct queue link;
    uint64_t
        number; /* a mark's key in the table: tells the reader which ones it has read already */
    struct ledger_record *record;
    void *bytes;
};

static struct ledger_sqlite *of(struct ledger *l)
{
    return container_of(l, struct ledger_sqlite, base);
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

static int write_records(struct ledger_sqlite *l, const struct ledger_transaction *t)
{
    int rc = stamps_begin(l);
    for (size_t i = 0; rc == SQLITE_OK && i < t->n_records; i++)
        rc = upsert(l, &t->records[i], 0);
    return rc == SQLITE_OK ? stamps_commit(l) : rc;
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
    t->code = db_fail(&t->err, l->path, l->writer, rc, "writing");
    if (!harmless(t->code)) {
        t->code = t->err.code = RS_EDISK;
        l->failure = t->err;
    }
    (void)db_run(l->writer, "ROLLBACK"); /* SQLite may have done it already */
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
    int rc = db_run(l->writer, "PRAGMA synchronous = NORMAL");
    if (rc == SQLITE_OK)
        rc = stamps_begin(l);
    queue_foreach (q, marks) {
        const struct waiting_mark *m = container_of(q, struct waiting_mark, link);
        if (rc == SQLITE_OK)
            rc = upsert(l, m->record, m->number);
    }
    if (rc == SQLITE_OK)
        rc = stamps_commit(l);
    if (rc != SQLITE_OK)
        (void)db_run(l->writer, "ROLLBACK");
    int full = db_run(l->writer, "PRAGMA synchronous = FULL");
    if (full != SQLITE_OK) /* what follows would not be durable */
        (void)db_fail(&l->failure, l->path, l->writer, full, "setting synchronous");
    return rc == SQLITE_OK ? 0 : db_translate(rc);
}

/* Marks stay in `writing`, where the reader sees them, until they are in the file. Called and
 * returns with the mutex held. */
static void flush_marks(struct ledger_sqlite *l)
{
    l->ended = false;
    queue_move(&l->marks, &l->writing); /* behind those that could not be written before */
    if (queue_empty(&l->writing))
        return;
    (void)pthread_mutex_unlock(&l->mutex);
    int rc = write_marks(l, &l->writing);
    stamps_checkpoint_if_due(l);
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
    stamps_checkpoint_if_due(l);
    (void)pthread_mutex_lock(&l->mutex);
}

static void *writer_main(void *arg)
{
    struct ledger_sqlite *l = arg;
    struct timespec marks_due = later(MARK_DELAY_S);
    (void)pthread_mutex_lock(&l->mutex);
    while (!l->stop || !queue_empty(&l->transactions)) {
        if (l->ended) {
            flush_marks(l);
        } else if (!queue_empty(&l->transactions)) {
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

static int sqlite_lazy(struct ledger *base, const struct ledger_record *record)
{
    struct ledger_sqlite *l = of(base);
    struct waiting_mark *m = mem_zalloc(sizeof *m);
    if (m == NULL)
        return RS_ENOMEM;
    int rc = ledger_records_copy(record, 1, &m->record, &m->bytes);
    if (rc != 0) {
        mem_free(m);
        return rc;
    }
    (void)pthread_mutex_lock(&l->mutex);
    if (l->n_marks >= MAX_MARKS) {
        rc = RS_EEXHAUSTED;
    } else {
        l->ended |= record->kind == LEDGER_ENDED;
        m->number = record->kind == LEDGER_MARK ? l->next_mark++ : 0;
        queue_push(&l->marks, &m->link);
        if (l->n_marks++ == 0 || l->n_marks >= MARK_BATCH || l->ended)
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
        told = db_fail(e, l->path, l->reader, rc, "reading");
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
               {LEDGER_ACCEPTANCE, "SELECT * FROM acceptances ORDER BY rowid"},
               {LEDGER_DRAIN, "SELECT * FROM drains"}};
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
        bool mark = w->record->kind == LEDGER_MARK;
        if (rc == 0 && mark && w->number > in_file && w->record->mark.version == version &&
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

static int timeline_marks(struct ledger_sqlite *l, const char *model, uint64_t version,
                          ledger_row_fn fn, void *arg, struct err *e)
{
    struct merge m = {.fn = fn, .arg = arg};
    int64_t in_file = 0;
    int rc = db_number(l->reader, "SELECT coalesce(max(number), 0) FROM marks", &in_file);
    if (rc != SQLITE_OK)
        return db_fail(e, l->path, l->reader, rc, "reading marks");
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
    int rc = db_run(l->reader, "BEGIN"); /* one view for all of it */
    if (rc != SQLITE_OK)
        return db_fail(e, l->path, l->reader, rc, "reading");
    rc = timeline_marks(l, model, version, fn, arg, e);
    if (rc == 0)
        rc = query(l, LEDGER_ACCEPTANCE,
                   "SELECT * FROM acceptances WHERE model = ?1 AND version = ?2 ORDER BY layout, "
                   "instance, attempt",
                   model, version, 0, fn, arg, e);
    if (rc == 0)
        rc = query(l, LEDGER_ATTEMPT,
                   "SELECT * FROM attempts WHERE model = ?1 AND version = ?2 ORDER BY attempt",
                   model, version, 0, fn, arg, e);
    (void)db_run(l->reader, "COMMIT");
    return rc;
}

/* --- life --- */

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
        if (l->failure.code == 0)
            stamps_checkpoint(l);
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
    stamps_close(l);
    mem_free(l->path);
    mem_free(l);
}

static struct ledger_sqlite *sqlite_new(const char *path, struct mailbox *loop)
{
    static const struct ledger_vtable vtable = {.submit = sqlite_submit,
                                                .lazy = sqlite_lazy,
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
    int rc = ledger_file_open(l, e);
    if (rc == 0)
        rc = start_writer(l, e);
    if (rc != 0) {
        sqlite_close(&l->base);
        return rc;
    }
    *ret = &l->base;
    return 0;
}
