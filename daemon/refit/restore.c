/* Takes the ledger's rows back at a start. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))

static void grow_to(uint64_t *value, uint64_t to)
{
    if (*value < to)
        *value = to;
}

static void restore_phase(struct refit *r, struct refit_version *v, uint32_t phase)
{
    sm_init(&v->phase, refit_phase_table, (int)phase);
    r->n_committed += phase == REFIT_COMMITTED;
}

static int restore_version(struct refit *r, const struct ledger_version *row, struct err *e)
{
    if (row->version == 0 || row->version > REFIT_VERSION_MAX || row->phase == REFIT_NONE ||
        row->phase >= REFIT_N_PHASES || refit_find_version(r, row->version) != NULL)
        return err_set(e, RS_EDISK, "version %llu in phase %u makes no sense", ULL(row->version),
                       row->phase);
    void *options = mem_alloc(row->n_options_bytes);
    struct refit_version *v = options == NULL ? NULL : version_new(r, row->version);
    if (v == NULL) {
        mem_free(options);
        return err_set(e, RS_ENOMEM, "out of memory");
    }
    restore_phase(r, v, row->phase);
    v->durable = v->recorded = true;
    memcpy(v->content, row->content, sizeof v->content);
    memcpy(v->plan_digest, row->plan_digest, sizeof v->plan_digest);
    if (row->n_options_bytes > 0)
        memcpy(options, row->options, row->n_options_bytes);
    v->options = options;
    v->n_options_bytes = row->n_options_bytes;
    v->publication = row->publication;
    v->attempt = row->attempt;
    v->n_attempts = row->n_attempts;
    v->epoch = row->epoch;
    v->source_released = true; /* whatever is not final is aborted, the rest has ended */
    v->submitted_wall_ns = row->submitted_wall_ns;
    v->committed_wall_ns = row->committed_wall_ns;
    v->total_ns = row->total_ns;
    v->wire_ns = row->wire_ns;
    v->stall_ns = row->stall_ns;
    v->bytes = (struct refit_bytes){row->landed,  row->network, row->domain,         row->device,
                                    row->skipped, row->total,   row->network_minimum};
    (void)snprintf(v->reason, sizeof v->reason, "%s", row->reason == NULL ? "" : row->reason);
    (void)snprintf(v->strategy, sizeof v->strategy, "%s",
                   row->strategy == NULL ? "" : row->strategy);
    grow_to(&r->attempt_high, v->attempt);
    grow_to(&r->epoch, v->epoch);
    if (row->phase == REFIT_COMMITTED && row->version >= r->committed) {
        r->committed = row->version;
        r->committed_wall_ns = row->committed_wall_ns;
        grow_to(&r->known_committed, r->committed);
    }
    return 0;
}

static int restore_request(struct refit *r, const struct ledger_request *row, struct err *e)
{
    struct refit_version *v = refit_find_version(r, row->version);
    if (v == NULL)
        return 0; /* of a version that is forgotten */
    struct refit_request *request = mem_zalloc(sizeof *request);
    char *id = request == NULL ? NULL : mem_strdup(row->id);
    if (id == NULL) {
        mem_free(request);
        return err_set(e, RS_ENOMEM, "out of memory");
    }
    request->id = id;
    request->attempt = row->attempt;
    request->phase = (enum refit_phase)row->phase;
    /* What it was answered: it was committed already. If no trainer had published it then, those who do now lose nothing by
     * having their memory back as soon as nobody is fed from it. */
    v->submitted_again |= row->phase == REFIT_COMMITTED;
    v->taken_again = v->submitted_again;
    queue_push(&v->requests, &request->link);
    v->n_requests++;
    grow_to(&r->attempt_high, row->attempt);
    return 0;
}

/* The newest one's outcome; one that was in flight ended with the coordinator. */
static void restore_rehearsal(struct refit *r, const struct ledger_attempt *row)
{
    struct refit_outcome *o = &r->rehearsed;
    if (row->attempt <= o->attempt)
        return;
    bool ended = row->phase == REFIT_REHEARSED || row->phase == REFIT_ABORTED;
    *o = (struct refit_outcome){.version = row->version,
                                .attempt = row->attempt,
                                .phase = ended ? (enum refit_phase)row->phase : REFIT_ABORTED};
    (void)snprintf(o->reason, sizeof o->reason, "%s",
                   ended ? row->reason
                         : "the coordinator was restarted before the rehearsal had ended");
}

int refit_restore(struct refit *r, const struct ledger_record *row, struct err *e)
{
    if (row->model == NULL || strcmp(row->model, r->model) != 0)
        return 0;
    switch (row->kind) {
    case LEDGER_MODEL:
        grow_to(&r->attempt_high, row->as_model.attempt);
        grow_to(&r->epoch, row->as_model.epoch);
        grow_to(&r->committed, row->as_model.committed);
        grow_to(&r->known_committed, r->committed);
        return 0;
    case LEDGER_VERSION: {
        int rc = restore_version(r, &row->version, e);
        queue_prune(r);
        return rc;
    }
    case LEDGER_REQUEST:
        return restore_request(r, &row->request, e);
    case LEDGER_ATTEMPT:
        grow_to(&r->attempt_high, row->attempt.attempt);
        if (row->attempt.kind == REFIT_KIND_REHEARSAL)
            restore_rehearsal(r, &row->attempt);
        return 0;
    default:
        return 0;
    }
}
