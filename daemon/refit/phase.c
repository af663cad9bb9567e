/* The phases of a version: drawing, table, invariants, and the one function that moves.
 *
 *   SUBMITTED → PLANNED → PREPARED → TRANSFERRING → STAGED → ACCEPTING → COMMITTED
 *       |  ↖ ______________________________________________________|
 *       |   \                    (any of these)                    ↓
 *       |    +------------------------------------------------ ABORTING → ABORTED ↘
 *       +→ SUPERSEDED ------------------------------------------------------------ SUBMITTED again
 *
 * ABORTING → SUBMITTED: the policy holds without the instances that failed, so another attempt (new
 * id) starts by itself, without them. ABORTED or SUPERSEDED → SUBMITTED: submitted again with the
 * same content under a new request id. COMMITTED is for ever. A catch-up and a rehearsal (side.c) go
 * the same way beside the list of versions, ACCEPTING → COMMITTED (caught up) or REHEARSED.
 *
 * Invariants, proved by refit_check:
 *  1. Of one model, one version at a time is in flight; at most one more waits, and it is newer.
 *  2. Whatever is neither in flight, queued, on its way to the ledger nor on its way out is final.
 *  3. `committed` is the greatest COMMITTED version, or the ledger's word where that was forgotten.
 *  4. No attempt id is above attempt_high, and none is used by two attempts.
 *  5. While the commit record is on its way the phase is ACCEPTING; nothing but the ledger ends it.
 *  6. Workers and nodes take part only in an attempt from PLAN on; none where nothing is in flight.
 *  7. In ABORTING some node still has to quiesce, or a record is on its way.
 *  8. A catch-up is about the newest committed version; it gives way to whatever is submitted.
 *  9. Only who holds the version whole and is proven feeds; who feeds does not receive. Proven is: its node has said
 *     STAGED, and every node that sends in that attempt has told what it sends (in either order, while that attempt lasts,
 *     called off or not), so the service has compared them; or it is known as committed. So what is fed is what the sources
 *     had, and sources are not released before they have told. A version is committed without a plan only where all who
 *     hold it are proven. A restart proves nothing: what a node says then is compared by the attempt that commits it. So
 *     blame that was forgotten with the coordinator does no harm: who was blamed is as unproven as all others.
 * 10. Who is blamed holds nothing: not by a late STAGED of the attempt that brought wrong bytes, nor by its node's word.
 *     The next START that writes its memory makes good.
 * 11. A source that has been told that its push is withdrawn waits only while something is on its way that may read it. */
#include "refit/private.h"

#include "base/banned.h"

#define RUNNING(next) (SM_TO(next) | SM_TO(REFIT_ABORTING))

const struct sm_state refit_phase_table[REFIT_N_PHASES] = {
    [REFIT_NONE] = {"NONE", SM_TO(REFIT_SUBMITTED)},
    [REFIT_SUBMITTED] = {"SUBMITTED", RUNNING(REFIT_PLANNED) | SM_TO(REFIT_SUPERSEDED)},
    [REFIT_PLANNED] = {"PLANNED", RUNNING(REFIT_PREPARED)},
    [REFIT_PREPARED] = {"PREPARED", RUNNING(REFIT_TRANSFERRING)},
    [REFIT_TRANSFERRING] = {"TRANSFERRING", RUNNING(REFIT_STAGED)},
    [REFIT_STAGED] = {"STAGED", RUNNING(REFIT_ACCEPTING)},
    [REFIT_ACCEPTING] = {"ACCEPTING", RUNNING(REFIT_COMMITTED) | SM_TO(REFIT_REHEARSED)},
    [REFIT_COMMITTED] = {"COMMITTED", 0},
    [REFIT_ABORTING] = {"ABORTING", SM_TO(REFIT_ABORTED) | SM_TO(REFIT_SUBMITTED)},
    [REFIT_ABORTED] = {"ABORTED", SM_TO(REFIT_SUBMITTED)},
    [REFIT_SUPERSEDED] = {"SUPERSEDED", SM_TO(REFIT_SUBMITTED)},
    [REFIT_REHEARSED] = {"REHEARSED", 0},
};

const char *refit_phase_name(int phase)
{
    return phase >= 0 && phase < REFIT_N_PHASES ? refit_phase_table[phase].name : "unknown";
}

bool refit_phase_final(int phase)
{
    return phase == REFIT_COMMITTED || phase == REFIT_ABORTED || phase == REFIT_SUPERSEDED ||
           phase == REFIT_REHEARSED;
}

void phase_move(const struct refit *r, struct refit_version *v, enum refit_phase next)
{
    sm_move(&v->phase, (int)next, "model %s version %llu attempt %llu", r->model,
            (unsigned long long)v->version, (unsigned long long)v->attempt);
}

bool attempt_chosen(const struct refit *r)
{
    if (r->in_flight == NULL)
        return false;
    int phase = r->in_flight->phase.state;
    return phase == REFIT_SUBMITTED ? r->planning : phase != REFIT_ABORTING;
}

static void check_versions(const struct refit *r)
{
    uint64_t before = 0, newest = 0;
    uint32_t n = 0;
    foreach_version (v, r) {
        int phase = v->phase.state;
        rs_assert(v->version > before && v->version <= REFIT_VERSION_MAX);
        before = v->version;
        n++;
        rs_assert(v->attempt <= r->attempt_high);
        rs_assert(refit_phase_final(phase) || v == r->in_flight || v == r->queued ||
                  v->n_writes > 0);
        if (phase == REFIT_COMMITTED)
            newest = v->version;
    }
    rs_assert(n == r->n_versions);
    rs_assert(r->committed >= newest);
    rs_assert(r->known_committed >= r->committed);
}

static void check_in_flight(const struct refit *r)
{
    const struct refit_version *v = r->in_flight;
    bool aborting_node = false, part = false;
    for (size_t i = 0; i < r->n_nodes; i++) {
        aborting_node |= r->nodes[i].part == REFIT_NODE_ABORTING;
        part |= r->nodes[i].taking_part;
    }
    foreach_worker (w, r)
        part |= w->taking_part;
    if (v == NULL) {
        rs_assert(!part && !aborting_node && !r->committing && !r->planning && r->queued == NULL);
        return;
    }
    rs_assert(!refit_phase_final(v->phase.state));
    rs_assert((v == &r->side) == (v->kind != REFIT_KIND_REFIT));
    rs_assert(v->attempt <= r->attempt_high);
    rs_assert(v->kind == REFIT_KIND_CATCH_UP ? v->version == r->committed
                                             : v->version > r->committed);
    rs_assert(!r->committing || v->phase.state == REFIT_ACCEPTING);
    if (v->phase.state == REFIT_ABORTING)
        rs_assert(aborting_node || v->n_writes > 0);
    else
        rs_assert(!aborting_node && (attempt_chosen(r) || !part));
}

static void check_memory(const struct refit *r)
{
    foreach_worker (w, r) {
        rs_assert(w->blamed == 0 || w->held == 0);
        rs_assert(!w->asleep || (w->held == 0 && w->applied == 0 && w->published == 0));
        rs_assert(!w->asleep || w->applying == 0);
    }
}

static void check_pushes(const struct refit *r)
{
    foreach_worker (w, r)
        rs_assert(!push_is_stuck(r, w));
}

static void check_proven(const struct refit *r)
{
    foreach_worker (w, r) {
        rs_assert(!w->proven || w->held != 0);
        rs_assert(w->feeding != REFIT_FEED_RECEIVING || w->held == 0 || w->proven);
    }
}

void refit_check(const struct refit *r)
{
    check_versions(r);
    check_memory(r);
    check_proven(r);
    check_pushes(r);
    check_in_flight(r);
    if (r->queued != NULL) {
        rs_assert(r->queued->phase.state == REFIT_SUBMITTED && r->queued->durable);
        rs_assert(r->in_flight != NULL);
        rs_assert(r->in_flight->kind != REFIT_KIND_CATCH_UP || r->committing ||
                  r->in_flight->phase.state == REFIT_ABORTING);
        rs_assert(r->in_flight->kind == REFIT_KIND_REHEARSAL ||
                  r->queued->version > r->in_flight->version);
    }
}
