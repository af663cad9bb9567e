/* A node that is not the coordinator remembers the newest committed version of each model, so that a coordinator whose
 * ledger was replaced by an older one hears of it after a restart of them both. */
#include <inttypes.h>

#include "base/log.h"
#include "base/mem.h"
#include "service/state.h"

#include "base/banned.h"

static int row_take(const struct ledger_record *row, void *arg)
{
    struct service *s = arg;
    struct model *m;
    struct err e = {0};
    if (row->kind != LEDGER_MODEL || row->as_model.committed == 0)
        return 0;
    int r = model_open(s, row->model, &m, &e);
    if (r == RS_EEXHAUSTED) {
        log_warn("model %s not taken up: %s", row->model, err_text(&e, r));
        return 0;
    }
    if (r == 0)
        m->remembered = row->as_model.committed;
    return r;
}

int remember_load(struct service *s, struct err *e)
{
    int r = ledger_load(s->ledger, row_take, s, e);
    return r == 0 ? 0 : err_prefix(e, r, "ledger in %s", s->config->state_dir);
}

struct remembering {
    struct ledger_transaction transaction;
    struct service *service;
};

static void on_written(struct ledger_transaction *t, int code, const struct err *e)
{
    struct remembering *x = container_of(t, struct remembering, transaction);
    struct service *s = x->service;
    if (code != 0)
        log_warn("what is committed was not written to the ledger here: %s", err_text(e, code));
    ledger_transaction_close(t);
    mem_free(x);
    s->n_writes--;
    service_stop_if_idle(s);
}

void remember_committed(struct model *m)
{
    struct service *s = m->service;
    struct ledger_record record = {
        .kind = LEDGER_MODEL, .model = m->name, .as_model = {.committed = m->committed.version}};
    if (s->coordinator != NULL || s->ledger == NULL || m->committed.version <= m->remembered)
        return;
    struct remembering *x = mem_zalloc(sizeof *x);
    if (x == NULL || ledger_transaction_init(&x->transaction, &record, 1) != 0) {
        mem_free(x);
        log_warn("model %s: no memory to remember version %" PRIu64, m->name, m->committed.version);
        return;
    }
    m->remembered = m->committed.version;
    x->service = s;
    x->transaction.done = on_written;
    s->n_writes++;
    ledger_submit(s->ledger, &x->transaction);
}
