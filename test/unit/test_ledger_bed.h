/* What the tests of the ledger share: a loop of one's own, both ledgers behind one name, rows that are kept. */
#ifndef RS_TEST_LEDGER_BED_H
#define RS_TEST_LEDGER_BED_H

#include <check.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <sqlite3.h>

#include "ledger/ledger.h"

/* --- a loop of one's own, and both ledgers behind one name --- */

struct bench {
    bool file;
    char dir[64];
    char path[96];
    struct ledger_store *store;
    struct mailbox loop;
    sem_t woken;
    struct ledger *l;
};

struct waited {
    struct ledger_transaction t; /* first */
    bool done;
    int code;
    char text[256];
    uint64_t number;
    uint64_t *next; /* where not NULL: done must come in order */
};

static inline void wake(void *arg)
{
    ck_assert_int_eq(sem_post(arg), 0);
}

static inline void open_again(struct bench *b)
{
    struct err e = {0};
    int rc = b->file ? ledger_sqlite_open(b->path, &b->loop, &b->l, &e)
                     : ledger_mem_open(b->store, &b->loop, &b->l);
    ck_assert_msg(rc == 0, "%s", e.text);
}

static inline void bench_init(struct bench *b, bool file)
{
    *b = (struct bench){.file = file};
    (void)snprintf(b->dir, sizeof b->dir, "/tmp/test_ledger.XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(b->dir));
    (void)snprintf(b->path, sizeof b->path, "%s/ledger", b->dir);
    ck_assert_int_eq(sem_init(&b->woken, 0, 0), 0);
    mailbox_init(&b->loop, wake, &b->woken);
    b->store = ledger_store_new();
    ck_assert_ptr_nonnull(b->store);
}

static inline void bench_close(struct bench *b)
{
    char command[160];
    ledger_close(b->l);
    ledger_store_free(b->store);
    mailbox_shut(&b->loop);
    mailbox_close(&b->loop);
    (void)snprintf(command, sizeof command, "rm -rf %s", b->dir);
    ck_assert_int_eq(system(command), 0);
}

static inline void on_done(struct ledger_transaction *t, int code, const struct err *e)
{
    struct waited *w = (struct waited *)(void *)t;
    ck_assert(!w->done);
    w->done = true;
    w->code = code;
    (void)snprintf(w->text, sizeof w->text, "%s", e->text);
    if (w->next != NULL)
        ck_assert_uint_eq((*w->next)++, w->number);
    ledger_transaction_close(t);
}

static inline void submit(struct bench *b, struct waited *w, const struct ledger_record *r,
                          size_t n)
{
    ck_assert_int_eq(ledger_transaction_init(&w->t, r, n), 0);
    w->t.done = on_done;
    ledger_submit(b->l, &w->t);
}

static inline void await(struct bench *b, struct waited *w)
{
    while (!w->done) {
        ck_assert_int_eq(sem_wait(&b->woken), 0);
        (void)mailbox_drain(&b->loop);
    }
}

static inline int write_all(struct bench *b, const struct ledger_record *r, size_t n)
{
    struct waited w = {.done = false};
    submit(b, &w, r, n);
    await(b, &w);
    return w.code;
}

static inline struct ledger_record version_row(uint64_t version, uint32_t phase)
{
    return (struct ledger_record){
        .kind = LEDGER_VERSION, .model = "m", .version = {.version = version, .phase = phase}};
}

static inline struct ledger_record model_row(uint64_t committed, uint64_t attempt, uint64_t epoch)
{
    return (struct ledger_record){
        .kind = LEDGER_MODEL, .model = "m", .as_model = {committed, attempt, epoch}};
}

struct rows {
    size_t n;
    enum ledger_kind kinds[32];
    uint64_t versions[32];
    struct ledger_model model;
    struct ledger_version version;
    char reason[64], strategy[32], name[64], who[64], id[64], json[64], layout[64];
    uint8_t options[8], fingerprints[16], config[16];
    bool has_config;
    struct ledger_request request;
    struct ledger_attempt attempt;
    struct ledger_acceptance acceptance;
    struct ledger_member member;
    uint8_t digest[16];
    int64_t at_ns[32];
    char node[16];
    uint64_t since_wall_ns;
};

static inline void copy_text(char *to, size_t n, const char *from)
{
    (void)snprintf(to, n, "%s", from);
}

/* Keeps the last row of each kind: what it points to, too. */
static inline int keep(const struct ledger_record *row, void *arg)
{
    struct rows *k = arg;
    ck_assert_uint_lt(k->n, 32);
    k->kinds[k->n] = row->kind;
    switch (row->kind) {
    case LEDGER_MODEL:
        k->model = row->as_model;
        break;
    case LEDGER_VERSION:
        k->version = row->version;
        k->versions[k->n] = row->version.version;
        copy_text(k->reason, sizeof k->reason, row->version.reason);
        copy_text(k->strategy, sizeof k->strategy, row->version.strategy);
        ck_assert_uint_le(row->version.n_options_bytes, sizeof k->options);
        if (row->version.n_options_bytes > 0)
            memcpy(k->options, row->version.options, row->version.n_options_bytes);
        if (row->version.n_fingerprints_bytes > 0)
            memcpy(k->fingerprints, row->version.fingerprints, sizeof k->fingerprints);
        k->has_config = row->version.n_config_digest_bytes == sizeof k->config;
        if (k->has_config)
            memcpy(k->config, row->version.config_digest, sizeof k->config);
        break;
    case LEDGER_REQUEST:
        k->request = row->request;
        copy_text(k->id, sizeof k->id, row->request.id);
        break;
    case LEDGER_ATTEMPT:
        k->attempt = row->attempt;
        copy_text(k->reason, sizeof k->reason, row->attempt.reason);
        break;
    case LEDGER_ACCEPTANCE:
        k->acceptance = row->acceptance;
        copy_text(k->layout, sizeof k->layout, row->acceptance.layout_name);
        break;
    case LEDGER_LAYOUT:
        memcpy(k->digest, row->layout.digest, 16);
        copy_text(k->json, sizeof k->json, row->layout.json);
        break;
    case LEDGER_MEMBER:
        k->member = row->member;
        break;
    case LEDGER_MARK:
        k->at_ns[k->n] = row->mark.at_ns;
        copy_text(k->name, sizeof k->name, row->mark.name);
        copy_text(k->who, sizeof k->who, row->mark.who);
        break;
    case LEDGER_DRAIN:
        copy_text(k->node, sizeof k->node, row->drain.node);
        k->since_wall_ns = row->drain.since_wall_ns;
        break;
    case LEDGER_ENDED:
    case LEDGER_EPOCH:
        break;
    }
    k->n++;
    return 0;
}

static inline struct rows load(struct bench *b)
{
    struct rows k = {0};
    struct err e = {0};
    ck_assert_msg(ledger_load(b->l, keep, &k, &e) == 0, "%s", e.text);
    return k;
}

/* Runs the claim on the file, then on the twin. */
#define ON_BOTH(claim)                                                                             \
    START_TEST(claim)                                                                              \
    {                                                                                              \
        for (int i = 0; i < 2; i++) {                                                              \
            struct bench b;                                                                        \
            bench_init(&b, i == 0);                                                                \
            open_again(&b);                                                                        \
            check_##claim(&b);                                                                     \
            bench_close(&b);                                                                       \
        }                                                                                          \
    }                                                                                              \
    END_TEST

/* --- the file --- */

static inline void poke(const char *path, const char *sql)
{
    sqlite3 *db = NULL;
    ck_assert_int_eq(sqlite3_open(path, &db), SQLITE_OK);
    ck_assert_int_eq(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    ck_assert_int_eq(sqlite3_close(db), SQLITE_OK);
}

static inline void refused(struct bench *b, int code, const char *says)
{
    struct err e = {0};
    struct ledger *l = NULL;
    ck_assert_int_eq(ledger_sqlite_open(b->path, &b->loop, &l, &e), code);
    ck_assert_ptr_null(l);
    ck_assert_msg(strstr(e.text, says) != NULL && strstr(e.text, b->path) != NULL, "%s", e.text);
}

static inline void copy_file(const char *from, const char *to)
{
    char command[256];
    (void)snprintf(command, sizeof command, "cp '%s' '%s'", from, to);
    ck_assert_int_eq(system(command), 0);
}

#endif
