/* The coordinator's memory that outlives it: one SQLite file, and a twin in memory.
 *
 * Contract (both keep it). A transaction is all or nothing. Transactions become durable in the
 * order in which they were submitted; `done` tells of each exactly once, on the loop thread, in
 * that order.
 * When done says 0 the transaction survives a crash of the machine. When it says RS_EFULL,
 * RS_ENOMEM or RS_EUNAVAIL it left nothing behind. RS_EDISK: what is in the file is not known;
 * every later transaction is refused with it too, and the daemon must stop without telling anyone
 * how those that failed ended (the decider refuses everything once it has been told): the next start reads what there
 * is. A crash between submit and done leaves the whole of the transaction or nothing of it.
 *
 * Marks (ledger_mark) are not part of that: they are written in batches, within about a second, and
 * a crash may lose the last ones. What ledger_ended is given is written at once, with the marks before it and before
 * any later transaction, but without waiting for the disk: it outlives the daemon, though perhaps not the machine.
 *
 * The file: WAL, synchronous=FULL, application_id "rshd", user_version = schema, a store id made
 * once. One writer thread owns it; the loop thread only reads, through a connection of its own. A
 * file that is damaged, of another program, of another schema or locked by another daemon is
 * refused at open, and the text names the file and the remedy; so is an older copy that was put in its place, as far as the log
 * or the small file NAME.stamp beside it tell (ledger_sqlite_stamp.c). Files of older schemas are brought up to this one.
 *
 * Thread: the loop thread calls everything here. */
#ifndef RS_LEDGER_LEDGER_H
#define RS_LEDGER_LEDGER_H

#include "base/err.h"
#include "base/mailbox.h"
#include "ledger/record.h"

struct ledger;

/* Copies of records, and the request that carries them. Embedded in the caller's struct. */
struct ledger_transaction {
    struct mailbox_item item; /* the ledger's while submitted */
    struct queue link;        /* the ledger's while submitted */
    struct ledger_record *records;
    size_t n_records;
    void *bytes; /* what the records point to */
    int code;    /* for done */
    struct err err;
    void (*done)(struct ledger_transaction *t, int code, const struct err *e);
};

/* Deep copies of n records; strings and blobs of `records` may go afterwards. RS_ENOMEM: *t holds
 * nothing. */
int ledger_transaction_init(struct ledger_transaction *t, const struct ledger_record *records,
                            size_t n_records);
/* Frees the copies; not while submitted. Safe on a zeroed transaction. */
void ledger_transaction_close(struct ledger_transaction *t);

/* Called once per row by ledger_load and the queries; what it points to lives until it returns.
 * Non-zero ends the walk, which then returns it. */
typedef int (*ledger_row_fn)(const struct ledger_record *row, void *arg);

struct ledger_vtable {
    void (*submit)(struct ledger *l, struct ledger_transaction *t);
    int (*lazy)(struct ledger *l, const struct ledger_record *record); /* MARK, ENDED */
    int (*load)(struct ledger *l, ledger_row_fn fn, void *arg, struct err *e);
    int (*versions)(struct ledger *l, const char *model, uint64_t version, uint32_t last,
                    ledger_row_fn fn, void *arg, struct err *e);
    int (*timeline)(struct ledger *l, const char *model, uint64_t version, ledger_row_fn fn,
                    void *arg, struct err *e);
    void (*close)(struct ledger *l);
};

struct ledger {
    const struct ledger_vtable *vtable;
    uint64_t store_id; /* of the file, made once */
    bool created;      /* the file was not there before */
};

/* Takes t until done has run; t->done set. Doesn't allocate and can't fail: what goes wrong is told
 * by done. */
static inline void ledger_submit(struct ledger *l, struct ledger_transaction *t)
{
    l->vtable->submit(l, t);
}

/* A time mark, copied, written lazily. RS_ENOMEM; RS_EEXHAUSTED: too many wait to be written (it is
 * dropped). */
static inline int ledger_mark(struct ledger *l, const char *model, const struct ledger_mark *m)
{
    return l->vtable->lazy(
        l, &(struct ledger_record){.kind = LEDGER_MARK, .model = model, .mark = *m});
}

/* A version's times, after its end is durable. Errors as of ledger_mark: the row then says what it said. */
static inline int ledger_ended(struct ledger *l, const char *model, const struct ledger_ended *x)
{
    return l->vtable->lazy(
        l, &(struct ledger_record){.kind = LEDGER_ENDED, .model = model, .ended = *x});
}

/* Everything that a start needs, in one pass, in this order: layouts, models, members, versions
 * (oldest first; each followed by nothing of its own), requests, attempts, acceptances (of an instance: oldest first),
 * drains. Epochs and marks are left out. Only before the first submit. */
static inline int ledger_load(struct ledger *l, ledger_row_fn fn, void *arg, struct err *e)
{
    return l->vtable->load(l, fn, arg, e);
}

/* LEDGER_VERSION rows of a model, newest first: one version (0: all), at most `last` (0: no limit).
 * Sees what was durable when it was called. */
static inline int ledger_versions(struct ledger *l, const char *model, uint64_t version,
                                  uint32_t last, ledger_row_fn fn, void *arg, struct err *e)
{
    return l->vtable->versions(l, model, version, last, fn, arg, e);
}

/* LEDGER_MARK rows of one version, ascending at_ns (marks that still wait to be written included),
 * then its LEDGER_ACCEPTANCE rows, then its LEDGER_ATTEMPT rows. */
static inline int ledger_timeline(struct ledger *l, const char *model, uint64_t version,
                                  ledger_row_fn fn, void *arg, struct err *e)
{
    return l->vtable->timeline(l, model, version, fn, arg, e);
}

/* Waits for what was submitted (each done runs: it drains the loop's mailbox, which must not be
 * shut yet), ends the writer, frees. NULL is fine. */
static inline void ledger_close(struct ledger *l)
{
    if (l != NULL)
        l->vtable->close(l);
}

/* Opens or creates the file at `path`. Completions are posted to `loop` (borrowed), which the owner
 * drains. RS_EDISK: damaged, not a ledger, an older copy, a newer schema; RS_EPERM, RS_EFULL, RS_EUNAVAIL (another
 * daemon has it), RS_ENOMEM. */
int ledger_sqlite_open(const char *path, struct mailbox *loop, struct ledger **ret, struct err *e);

/* --- the twin in memory --- */

/* What the twin keeps when its ledger is closed or crashes. */
struct ledger_store;
struct ledger_store *ledger_store_new(void); /* NULL: no memory */
void ledger_store_free(struct ledger_store *s);

struct ledger_mem_faults {
    long fail_at;  /* the n-th transaction from now fails (1: the next); 0: none */
    int fail_code; /* with which code; RS_EFULL if 0 */
    bool hold;     /* nothing becomes durable until ledger_mem_release */
};

/* A ledger over `store` (borrowed; one ledger at a time). done runs in ledger_mem_release or, where
 * nothing is held, through `loop` (may be NULL: then only in ledger_mem_release). */
int ledger_mem_open(struct ledger_store *store, struct mailbox *loop, struct ledger **ret);
void ledger_mem_set_faults(struct ledger *l, const struct ledger_mem_faults *f);
/* Makes the n oldest waiting transactions durable (or fail, as set) and runs their done. Returns
 * how many there were. */
size_t ledger_mem_release(struct ledger *l, size_t n);
size_t ledger_mem_waiting(const struct ledger *l);
/* The machine dies: what is not durable is gone, no done runs (the transactions are the caller's
 * again), marks that were not written are lost. Frees the ledger, leaves the store. */
void ledger_mem_crash(struct ledger *l);

#endif
