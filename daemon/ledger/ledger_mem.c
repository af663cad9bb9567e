/* The ledger's twin in memory: the same contract without a disk, with faults that a test sets. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/queue.h"
#include "ledger/copy.h"

#include "base/banned.h"

/* One durable record, a copy. */
struct row {
    struct ledger_record *record;
    void *bytes;
};

struct ledger_store {
    struct row *rows; /* in the order in which their keys first became durable */
    size_t n_rows, capacity;
};

struct ledger_mem {
    struct ledger base;
    struct ledger_store *store;
    struct mailbox *loop;
    struct queue waiting; /* struct ledger_transaction, oldest first */
    size_t n_waiting;
    struct ledger_mem_faults faults;
    struct ledger_store marks; /* not yet written */
};

static void row_close(struct row *row)
{
    mem_free(row->record);
    mem_free(row->bytes);
}

static void store_clear(struct ledger_store *s)
{
    for (size_t i = 0; i < s->n_rows; i++)
        row_close(&s->rows[i]);
    mem_free(s->rows);
    *s = (struct ledger_store){0};
}

struct ledger_store *ledger_store_new(void)
{
    return mem_zalloc(sizeof(struct ledger_store));
}

void ledger_store_free(struct ledger_store *s)
{
    if (s == NULL)
        return;
    store_clear(s);
    mem_free(s);
}

/* --- keys --- */

static bool same(const char *a, const char *b)
{
    return a == NULL || b == NULL ? a == b : strcmp(a, b) == 0;
}

static bool same_key(const struct ledger_record *a, const struct ledger_record *b)
{
    if (a->kind != b->kind || !same(a->model, b->model))
        return false;
    switch (a->kind) {
    case LEDGER_MODEL:
        return true;
    case LEDGER_LAYOUT:
        return memcmp(a->layout.digest, b->layout.digest, sizeof a->layout.digest) == 0;
    case LEDGER_MEMBER:
        return a->member.side == b->member.side && same(a->member.name, b->member.name);
    case LEDGER_EPOCH:
        return a->epoch.epoch == b->epoch.epoch;
    case LEDGER_VERSION:
        return a->version.version == b->version.version;
    case LEDGER_REQUEST:
        return same(a->request.id, b->request.id);
    case LEDGER_ATTEMPT:
        return a->attempt.attempt == b->attempt.attempt;
    case LEDGER_ACCEPTANCE:
        return a->acceptance.version == b->acceptance.version &&
               a->acceptance.instance == b->acceptance.instance &&
               a->acceptance.attempt == b->acceptance.attempt &&
               same(a->acceptance.layout_name, b->acceptance.layout_name);
    case LEDGER_DRAIN:
        return same(a->drain.node, b->drain.node);
    case LEDGER_ENDED:
    case LEDGER_MARK:
        return false;
    }
    return false;
}

static uint64_t greater(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* What an upsert keeps of the row before. `fresh` is a copy of its own. */
static void merge(struct ledger_record *fresh, const struct ledger_record *old)
{
    if (fresh->kind != LEDGER_MODEL)
        return;
    fresh->as_model.committed = greater(fresh->as_model.committed, old->as_model.committed);
    fresh->as_model.attempt = greater(fresh->as_model.attempt, old->as_model.attempt);
    fresh->as_model.epoch = greater(fresh->as_model.epoch, old->as_model.epoch);
}

static int store_put(struct ledger_store *s, const struct ledger_record *record)
{
    struct ledger_record merged = *record;
    struct row *old = NULL;
    for (size_t i = s->n_rows; i > 0 && old == NULL; i--)
        if (same_key(s->rows[i - 1].record, record))
            old = &s->rows[i - 1];
    if (old != NULL)
        merge(&merged, old->record);
    if (old != NULL && record->kind == LEDGER_VERSION && record->version.fingerprints == NULL) {
        merged.version.fingerprints = old->record->version.fingerprints;
        merged.version.n_fingerprints_bytes = old->record->version.n_fingerprints_bytes;
    }
    if (old != NULL && record->kind == LEDGER_VERSION && record->version.config_digest == NULL) {
        merged.version.config_digest = old->record->version.config_digest;
        merged.version.n_config_digest_bytes = old->record->version.n_config_digest_bytes;
    }
    struct row row;
    if (ledger_records_copy(&merged, 1, &row.record, &row.bytes) != 0)
        return RS_ENOMEM;
    if (old == NULL &&
        mem_grow((void **)&s->rows, &s->capacity, s->n_rows + 1, sizeof *s->rows) != 0) {
        row_close(&row);
        return RS_ENOMEM;
    }
    if (old != NULL)
        row_close(old);
    else
        old = &s->rows[s->n_rows++];
    *old = row;
    return 0;
}

static int store_copy(const struct ledger_store *from, struct ledger_store *ret)
{
    struct ledger_store s = {0};
    for (size_t i = 0; i < from->n_rows; i++) {
        struct row row;
        if (mem_grow((void **)&s.rows, &s.capacity, i + 1, sizeof *s.rows) != 0 ||
            ledger_records_copy(from->rows[i].record, 1, &row.record, &row.bytes) != 0) {
            store_clear(&s);
            return RS_ENOMEM;
        }
        s.rows[s.n_rows++] = row;
    }
    *ret = s;
    return 0;
}

/* --- transactions --- */

static struct ledger_mem *of(const struct ledger *l)
{
    return (struct ledger_mem *)(void *)(uintptr_t)l;
}

/* All of the records or none: on a copy, which then takes the store's place. */
static int write_all(struct ledger_store *store, const struct ledger_transaction *t)
{
    struct ledger_store next;
    int rc = store_copy(store, &next);
    for (size_t i = 0; rc == 0 && i < t->n_records; i++) {
        rc = store_put(&next, &t->records[i]);
        if (rc != 0)
            store_clear(&next);
    }
    if (rc != 0)
        return rc;
    store_clear(store);
    *store = next;
    return 0;
}

static void set_times(struct ledger_store *s, const struct ledger_record *ended)
{
    for (size_t i = 0; i < s->n_rows; i++) {
        struct ledger_record *r = s->rows[i].record;
        if (r->kind != LEDGER_VERSION || !same(r->model, ended->model) ||
            r->version.version != ended->ended.version ||
            r->version.attempt != ended->ended.attempt)
            continue;
        r->version.total_ns = ended->ended.total_ns;
        r->version.stall_ns = ended->ended.stall_ns;
    }
}

static int write_marks(struct ledger_mem *m)
{
    for (size_t i = 0; i < m->marks.n_rows; i++) {
        const struct ledger_record *r = m->marks.rows[i].record;
        if (r->kind == LEDGER_ENDED)
            set_times(m->store, r);
        else if (store_put(m->store, r) != 0)
            return RS_ENOMEM;
    }
    store_clear(&m->marks);
    return 0;
}

static int fault(struct ledger_mem *m)
{
    if (m->faults.fail_at <= 0 || --m->faults.fail_at > 0)
        return 0;
    return m->faults.fail_code == 0 ? RS_EFULL : m->faults.fail_code;
}

static struct ledger_transaction *take_oldest(struct ledger_mem *m)
{
    struct queue *q = queue_pop(&m->waiting);
    if (q == NULL)
        return NULL;
    m->n_waiting--;
    return container_of(q, struct ledger_transaction, link);
}

static void decide(struct ledger_mem *m, struct ledger_transaction *t)
{
    t->err = (struct err){0};
    int rc = fault(m);
    if (rc == 0) /* what was told before it comes before it */
        (void)write_marks(m);
    if (rc != 0)
        (void)err_set(&t->err, rc, "ledger: a failure that the test asked for");
    else if ((rc = write_all(m->store, t)) != 0)
        (void)err_set(&t->err, rc, "ledger: out of memory");
    t->code = rc;
}

size_t ledger_mem_release(struct ledger *l, size_t n)
{
    struct ledger_mem *m = of(l);
    size_t done = 0;
    for (struct ledger_transaction *t; done < n && (t = take_oldest(m)) != NULL; done++) {
        decide(m, t);
        t->done(t, t->code, &t->err);
    }
    return done;
}

size_t ledger_mem_waiting(const struct ledger *l)
{
    return of(l)->n_waiting;
}

static void mem_submit(struct ledger *l, struct ledger_transaction *t)
{
    struct ledger_mem *m = of(l);
    t->item.fn = ledger_transaction_done;
    queue_push(&m->waiting, &t->link);
    m->n_waiting++;
    if (m->faults.hold || m->loop == NULL)
        return;
    t = take_oldest(m);
    decide(m, t);
    rs_assert(mailbox_post(m->loop, &t->item));
}

static int mem_lazy(struct ledger *l, const struct ledger_record *record)
{
    return store_put(&of(l)->marks, record);
}

/* --- reading --- */

static int mem_load(struct ledger *l, ledger_row_fn fn, void *arg, struct err *e)
{
    static const enum ledger_kind order[] = {LEDGER_LAYOUT,     LEDGER_MODEL,   LEDGER_MEMBER,
                                             LEDGER_VERSION,    LEDGER_REQUEST, LEDGER_ATTEMPT,
                                             LEDGER_ACCEPTANCE, LEDGER_DRAIN};
    (void)e;
    const struct ledger_store *s = of(l)->store;
    for (size_t k = 0; k < sizeof order / sizeof *order; k++)
        for (size_t i = 0; i < s->n_rows; i++) {
            int rc = s->rows[i].record->kind == order[k] ? fn(s->rows[i].record, arg) : 0;
            if (rc != 0)
                return rc;
        }
    return 0;
}

static int by_version_down(const void *a, const void *b)
{
    uint64_t x = (*(const struct ledger_record *const *)a)->version.version;
    uint64_t y = (*(const struct ledger_record *const *)b)->version.version;
    return x < y ? 1 : x > y ? -1 : 0;
}

static int by_time(const void *a, const void *b)
{
    int64_t x = (*(const struct ledger_record *const *)a)->mark.at_ns;
    int64_t y = (*(const struct ledger_record *const *)b)->mark.at_ns;
    return x < y ? -1 : x > y ? 1 : 0;
}

/* The rows of one kind of a model and version (0: all), in the store and among the waiting marks.
 */
static int pick(const struct ledger_mem *m, enum ledger_kind kind, const char *model,
                uint64_t version, const struct ledger_record ***ret, size_t *ret_n)
{
    const struct ledger_store *both[] = {m->store, &m->marks};
    const struct ledger_record **rows =
        mem_calloc(m->store->n_rows + m->marks.n_rows, sizeof *rows);
    size_t n = 0;
    if (rows == NULL)
        return RS_ENOMEM;
    for (size_t b = 0; b < 2; b++)
        for (size_t i = 0; i < both[b]->n_rows; i++) {
            const struct ledger_record *r = both[b]->rows[i].record;
            if (r->kind != kind || !same(r->model, model))
                continue;
            uint64_t of_row = kind == LEDGER_VERSION   ? r->version.version
                              : kind == LEDGER_MARK    ? r->mark.version
                              : kind == LEDGER_ATTEMPT ? r->attempt.version
                                                       : r->acceptance.version;
            if (version == 0 || of_row == version)
                rows[n++] = r;
        }
    *ret = rows;
    *ret_n = n;
    return 0;
}

static int walk(const struct ledger_mem *m, enum ledger_kind kind, const char *model,
                uint64_t version, uint32_t last, ledger_row_fn fn, void *arg, struct err *e)
{
    const struct ledger_record **rows;
    size_t n;
    if (pick(m, kind, model, version, &rows, &n) != 0)
        return err_set(e, RS_ENOMEM, "ledger: out of memory");
    if (kind == LEDGER_VERSION)
        qsort((void *)rows, n, sizeof *rows, by_version_down);
    if (kind == LEDGER_MARK)
        qsort((void *)rows, n, sizeof *rows, by_time);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < n && (last == 0 || i < last); i++)
        rc = fn(rows[i], arg);
    mem_free((void *)rows);
    return rc;
}

static int mem_versions(struct ledger *l, const char *model, uint64_t version, uint32_t last,
                        ledger_row_fn fn, void *arg, struct err *e)
{
    return walk(of(l), LEDGER_VERSION, model, version, last, fn, arg, e);
}

static int mem_timeline(struct ledger *l, const char *model, uint64_t version, ledger_row_fn fn,
                        void *arg, struct err *e)
{
    static const enum ledger_kind order[] = {LEDGER_MARK, LEDGER_ACCEPTANCE, LEDGER_ATTEMPT};
    for (size_t k = 0; k < 3; k++) {
        int rc = walk(of(l), order[k], model, version, 0, fn, arg, e);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* --- life --- */

static void mem_free_ledger(struct ledger_mem *m)
{
    store_clear(&m->marks);
    mem_free(m);
}

void ledger_mem_crash(struct ledger *l)
{
    mem_free_ledger(of(l));
}

static void mem_close(struct ledger *l)
{
    struct ledger_mem *m = of(l);
    (void)ledger_mem_release(l, m->n_waiting);
    (void)write_marks(m);
    mem_free_ledger(m);
}

void ledger_mem_set_faults(struct ledger *l, const struct ledger_mem_faults *f)
{
    of(l)->faults = *f;
}

int ledger_mem_open(struct ledger_store *store, struct mailbox *loop, struct ledger **ret)
{
    static const struct ledger_vtable vtable = {.submit = mem_submit,
                                                .lazy = mem_lazy,
                                                .load = mem_load,
                                                .versions = mem_versions,
                                                .timeline = mem_timeline,
                                                .close = mem_close};
    struct ledger_mem *m = mem_zalloc(sizeof *m);
    if (m == NULL)
        return RS_ENOMEM;
    m->base = (struct ledger){.vtable = &vtable, .store_id = 1, .created = store->n_rows == 0};
    m->store = store;
    m->loop = loop;
    queue_init(&m->waiting);
    *ret = &m->base;
    return 0;
}
