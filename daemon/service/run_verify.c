/* What has landed, compared over all nodes, and whom to believe after a difference.
 *
 *   CELLS*   of each node → merged (cells.c) → a difference: job (cells_blame.c) → FAILED
 *   CELL_SUM of each node: what it received, in short; not as sources have told: its STAGED is answered with an order for CELLS,
 *            then STAGED again
 *   PROGRESS of each node: what its sources send has been merged (sources_known); once all have said so, a cell that only
 *            destinations have told of is a source's node that has kept it to itself (cells_untold) → FAILED
 *   STAGED   of each node → folds of its receivers against what is known of the version; of the last: what is open is settled
 *
 * The decider hears with one FAILED of everybody whose memory is not to be believed (run.wrong), so that one retry is
 * enough: who has a cell that differs; who has not staged yet, and says so too late to be compared; and, unless the
 * sources' own fingerprints are all known, who has: wrong bytes that a node sent, or passed on, are in several memories,
 * and only the sources' tell in which.
 *
 * Sources may be released, and an attempt may end, before all have staged. So nodes tell as they start what their sources
 * send: once all have, the decider takes whoever stages for proven (refit_worker.proven), and only those may feed others in
 * the sources' place. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "service/attempt_input.h"
#include "service/cells.h"
#include "service/cells_blame.h"
#include "service/cells_sum.h"
#include "service/coordinator.h"
#include "service/held.h"

#include "base/banned.h"

/* --- whom to believe ---------------------------------------------------------------------------- */

void run_distrust(struct decider *d)
{
    d->run.distrusted = true;
    landed_clear(&d->landed);
}

static void wrong_add(struct decider *d, const struct participant *p)
{
    for (uint32_t i = 0; i < d->run.n_wrong; i++)
        if (d->run.wrong[i] == p->worker)
            return;
    d->run.wrong[d->run.n_wrong++] = p->worker;
}

static bool has_staged(const struct decider *d, uint32_t node)
{
    const struct run_node *n = run_node_of(d, node);
    return n != NULL && n->staged;
}

/* All fingerprints that sources have taken of cells for other nodes are merged. */
static bool sources_told(const struct decider *d)
{
    const struct attempt_input *in = d->run.input;
    for (uint32_t i = 0; i < in->n_participants && in->participants[i].layout == 0; i++) {
        const struct run_node *n = run_node_of(d, in->participants[i].node);
        if (n == NULL || !n->told)
            return false;
    }
    return true;
}

static void on_untold(void *arg, const struct cells_blamed *x)
{
    struct decider *d = arg;
    d->run.untold = NULL;
    run_fail(d, d->run.input->nodes[x->node], x->code, x->text, 0);
}

/* All sources are said to be told of, and somebody has got a cell that they are not: nothing can be compared with them. */
static void untold_find(struct decider *d)
{
    struct cell_print told;
    if (d->run.cells == NULL || d->run.unsound || d->run.distrusted || d->run.differ ||
        !sources_told(d) || !cells_untold(d->run.cells, &told))
        return; /* in this order: cells are looked through once, not with each page */
    d->run.unsound = true;
    if (cells_untold_start(d->coordinator->service, d->run.plan, &told, on_untold, d,
                           &d->run.untold) != 0)
        run_fail_here(d, RS_ENOMEM,
                      "cells of sources are missing, and there is no memory to say whose");
}

void run_sources_known(struct decider *d, uint32_t node, struct refit_event *ev)
{
    struct run_node *n = run_node_of(d, node);
    if (ev->node.attempt != d->run.id || n == NULL || !ev->node.sources_known)
        return;
    n->told = true;
    untold_find(d);
    if (d->run.unsound || d->run.distrusted || d->run.differ)
        ev->node.sources_known = false;
}

/* Who receives and is not known to have got the right bytes; `compared`: whoever has staged is. Who held the content
 * before has been believed for another reason. */
static void unproven_add(struct decider *d, bool compared)
{
    const struct attempt_input *in = d->run.input;
    for (uint32_t i = 0; i < in->n_participants; i++) {
        const struct participant *p = &in->participants[i];
        if (p->layout != 0 && !p->held && !(compared && has_staged(d, p->node)))
            wrong_add(d, p);
    }
}

void run_failed(struct decider *d, struct refit_event *ev)
{
    if (ev->node.attempt != d->run.id)
        return;
    if (!d->run.started) /* perhaps what should have landed is not there */
        landed_clear(&d->landed);
    if (ev->node.code != RS_EDATALOSS || d->run.nodes == NULL)
        return;
    run_distrust(d);
    if (d->run.started) /* else nobody has got anything */
        unproven_add(d, !d->run.differ && sources_told(d));
    ev->node.wrong = d->run.wrong;
    ev->node.n_wrong = d->run.n_wrong;
}

void run_called_off(struct decider *d)
{
    if (d->run.blaming == NULL && d->run.bad_feeder == NULL && d->run.bad_receiver == NULL)
        return;
    cells_blame_forget(d->run.blaming); /* there is no time for its words */
    d->run.blaming = NULL;
    d->run.bad_feeder = d->run.bad_receiver = NULL;
    unproven_add(d, false);
    run_fail_here(d, RS_EDATALOSS, "nodes saw different content");
}

/* --- differences -------------------------------------------------------------------------------- */

static void on_blamed(void *arg, const struct cells_blamed *x)
{
    struct decider *d = arg;
    const struct attempt_input *in = d->run.input;
    const struct participant *bad = attempt_input_find(in, x->first.bad.layout, x->first.bad.rank);
    size_t n_wrong;
    (void)cells_wrong(d->run.cells, &n_wrong);
    d->run.blaming = NULL;
    for (size_t i = 0; i < x->n_holders; i++) {
        const struct participant *p =
            attempt_input_find(in, x->holders[i].layout, x->holders[i].rank);
        if (p != NULL)
            wrong_add(d, p);
    }
    bool all =
        x->all && n_wrong == x->n_wrong && !d->run.unsound && !cells_wrong_more(d->run.cells);
    unproven_add(d, all && sources_told(d));
    run_fail(d, bad != NULL ? bad->node : in->nodes[0], RS_EDATALOSS, x->text,
             bad != NULL && bad->layout != 0 ? bad->worker : 0);
}

/* What is wrong so far, and on which node; NULL: no memory. */
static struct cells_place *wrong_places(const struct decider *d, size_t *ret_n)
{
    size_t n, n_places = 0;
    const struct cells_difference *x = cells_wrong(d->run.cells, &n);
    struct cells_place *places = mem_calloc(n, sizeof *places);
    for (size_t i = 0; places != NULL && i < n; i++) {
        const struct participant *p =
            attempt_input_find(d->run.input, x[i].bad.layout, x[i].bad.rank);
        if (p != NULL && p->layout != 0)
            places[n_places++] = (struct cells_place){
                .cell = x[i].bad.cell, .node = attempt_input_node(d->run.input, p->node)};
    }
    *ret_n = n_places;
    return places;
}

/* The attempt fails, with words to it. */
static void differ(struct decider *d, const struct cells_difference *first)
{
    size_t n_places, n_wrong;
    struct cells_place *places = wrong_places(d, &n_places);
    (void)cells_wrong(d->run.cells, &n_wrong);
    d->run.differ = true;
    if (places != NULL && cells_blame_start(d->coordinator->service, d->run.plan, first, places,
                                            n_places, n_wrong, on_blamed, d, &d->run.blaming) == 0)
        return;
    unproven_add(d, false);
    run_fail_here(d, RS_EDATALOSS,
                  "nodes saw different content, and there is no memory to say which");
}

static void cells_failed(struct decider *d, int code, const struct cells_difference *x)
{
    if (code == RS_EDATALOSS && !d->run.differ)
        differ(d, x);
    else if (code != RS_EDATALOSS)
        run_fail_here(d, code, "no memory to compare what the nodes saw");
}

/* --- CELLS -------------------------------------------------------------------------------------- */

/* A source's word is believed: nobody speaks for ranks of another node. */
static bool is_its_own(const struct decider *d, uint32_t node, const struct cell_print *c)
{
    const struct participant *p = attempt_input_find(d->run.input, c->layout, c->rank);
    return p != NULL && p->node == node;
}

/* Everything that is used as an index later; the number of cells bounds what is kept. NULL, or what is wrong. */
static const char *page_fault(const struct decider *d, uint32_t node, const struct node_report *r)
{
    uint64_t n_cells = plan_totals(d->run.plan->plan)->cells;
    const struct cell_print *before = NULL;
    if (r->n_cells > NODE_PAGE_CELLS)
        return "it reports more cells at a time than a page has";
    for (uint32_t i = 0; i < r->n_cells; i++) {
        const struct cell_print *c = &r->cells[i];
        if (c->cell >= n_cells || c->layout > d->run.input->n_destinations)
            return "it reports cells that the plan has not";
        bool same = before != NULL && before->layout == c->layout && before->rank == c->rank;
        if (!same && !is_its_own(d, node, c))
            return "it reports cells of ranks that it has not";
        before = c;
    }
    return NULL;
}

static void cells_unsound(struct decider *d, uint32_t node, const char *fault)
{
    d->run.unsound = true;
    run_fail(d, node, RS_EPROTO, fault, 0);
}

void run_cells(struct decider *d, uint32_t node, const struct node_report *r)
{
    struct cells_difference x;
    if (r->attempt != d->run.id || d->run.plan == NULL || d->run.unsound)
        return;
    const char *fault = page_fault(d, node, r);
    if (fault != NULL) {
        cells_unsound(d, node, fault);
        return;
    }
    if (d->run.cells == NULL)
        d->run.cells = cells_new();
    int code =
        d->run.cells == NULL ? RS_ENOMEM : cells_merge(d->run.cells, r->cells, r->n_cells, &x);
    d->run.unsound = code != 0 && code != RS_EDATALOSS;
    if (code != 0)
        cells_failed(d, code, &x);
    else
        untold_find(d);
}

static const char *sum_fault(const struct decider *d, const struct node_report *r)
{
    uint64_t n_cells = plan_totals(d->run.plan->plan)->cells, n = 0;
    if (r->n_runs > NODE_PAGE_CELLS)
        return "it reports more runs of cells at a time than a page has";
    for (uint32_t i = 0; i < r->n_runs; i++) {
        n += r->runs[i].n;
        if (n > n_cells || r->runs[i].cell > n_cells - r->runs[i].n)
            return "it reports cells that the plan has not";
    }
    return NULL;
}

void run_cell_sum(struct decider *d, uint32_t node, const struct node_report *r)
{
    struct run_node *n = run_node_of(d, node);
    if (r->attempt != d->run.id || d->run.plan == NULL || d->run.unsound || n == NULL)
        return;
    const char *fault = sum_fault(d, r);
    if (fault != NULL) {
        cells_unsound(d, node, fault);
        return;
    }
    if (!cells_agree(d->run.cells, r->runs, r->n_runs, r->digest))
        n->doubted = true;
}

/* All nodes have said what they saw. */
static bool all_staged(const struct decider *d)
{
    for (uint32_t i = 0; i < d->run.input->topology->n_nodes; i++)
        if (!d->run.nodes[i].staged)
            return false;
    return true;
}

/* --- folds ------------------------------------------------------------------------------------ */

static const struct participant *participant_of(const struct decider *d, const uint8_t layout[16],
                                                uint32_t rank)
{
    const struct attempt_input *in = d->run.input;
    const struct participant *p = NULL;
    for (uint32_t i = 0; p == NULL && i < in->n_destinations; i++)
        if (memcmp(in->destinations[i], layout, 16) == 0)
            p = attempt_input_find(in, 1 + i, rank);
    if (p == NULL && memcmp(in->source, layout, 16) == 0)
        p = attempt_input_find(in, 0, rank);
    return p;
}

/* Of a version that is committed it is known what each rank's memory has to be, whoever has fed it; of one that is not, what
 * those who feed had staged. */
static bool fold_known(const struct decider *d, const struct participant *p,
                       const struct memory_fold *f, uint64_t *ret)
{
    const struct roster_entry *r = p->layout == 0 ? roster_find(d, p->worker) : NULL;
    if (held_find(d->held, d->run.version, f->layout, f->rank, ret))
        return true;
    if (r == NULL || r->fold_version != d->run.version || r->fold == 0)
        return false;
    *ret = r->fold;
    return true;
}

static void folds_compare(struct decider *d, const struct memory_fold *folds, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t known;
        const struct participant *p = participant_of(d, folds[i].layout, folds[i].rank);
        if (p == NULL || !fold_known(d, p, &folds[i], &known) || known == folds[i].fold)
            continue;
        const struct participant **first =
            p->layout == 0 ? &d->run.bad_feeder : &d->run.bad_receiver;
        *first = *first != NULL ? *first : p;
        d->run.differ = true;
        wrong_add(d, p);
    }
}

static const char *layout_name_of(const struct decider *d, const struct participant *p)
{
    const struct roster_entry *r = roster_find(d, p->worker);
    return r != NULL ? r->layout->layout->name : "?";
}

/* Somebody's memory is not the version. Where that is a feeder, it is to blame, and what has been got from it is worth
 * nothing, also where nobody knows what it has to be. */
static void folds_fail(struct decider *d)
{
    char text[640] = "";
    const struct participant *feeder = d->run.bad_feeder, *receiver = d->run.bad_receiver;
    const struct participant *bad = feeder != NULL ? feeder : receiver;
    size_t n = 0;
    if (receiver != NULL)
        n = (size_t)snprintf(text, sizeof text,
                             "layout '%.128s' rank %u: what has landed is not version %" PRIu64
                             " as it was committed; ",
                             layout_name_of(d, receiver), receiver->rank, d->run.version);
    if (feeder != NULL)
        (void)snprintf(text + n, sizeof text - n,
                       "layout '%.128s' rank %u, which feeds, does not hold version %" PRIu64
                       " any more: its %s memory was written over",
                       layout_name_of(d, feeder), feeder->rank, d->run.version,
                       feeder->shadow ? "shadow" : "receiving or live");
    else
        (void)snprintf(text + n, sizeof text - n, "who has fed it holds other weights");
    d->run.bad_feeder = d->run.bad_receiver = NULL; /* it is told */
    unproven_add(d, feeder == NULL);
    run_fail(d, bad->node, RS_EDATALOSS, text, bad->worker);
}

static bool folds_differ(const struct decider *d)
{
    return d->run.bad_feeder != NULL || d->run.bad_receiver != NULL;
}

/* --- STAGED ------------------------------------------------------------------------------------- */

/* It has failed, or will have; but whose fault a fold is shows when all have told. */
static bool compares_no_more(const struct decider *d)
{
    return d->run.unsound || d->run.distrusted || (d->run.differ && !folds_differ(d));
}

static void cells_ask(struct decider *d, uint32_t node)
{
    const struct node_order o = {.type = NODE_ORDER_CELLS,
                                 .model = d->model,
                                 .version = d->run.version,
                                 .attempt = d->run.id,
                                 .text = ""};
    (void)coordinator_order(d->coordinator, node, &o); /* who is away is lost before long */
}

bool run_staged(struct decider *d, uint32_t node, const struct node_report *r)
{
    struct run_node *n = run_node_of(d, node);
    struct cells_difference x;
    if (r->event.node.attempt != d->run.id || n == NULL)
        return true; /* the decider drops what is old */
    if (n->doubted) {
        n->doubted = compares_no_more(d); /* then it is not believed */
        if (!n->doubted)
            cells_ask(d, node);
        return false;
    }
    bool first = !n->staged;
    n->staged = n->told = true;
    run_node_quiet(d, node);
    untold_find(d);
    if (compares_no_more(d))
        return false;
    folds_compare(d, r->folds, r->n_folds);
    if (folds_differ(d)) { /* whose fault it is shows when all have told */
        if (all_staged(d))
            folds_fail(d);
        return false;
    }
    if (first)
        roster_staged(d, node, r->folds, r->n_folds);
    int code = d->run.cells != NULL && all_staged(d) ? cells_settle(d->run.cells, &x) : 0;
    if (code != 0)
        cells_failed(d, code, &x);
    return code == 0;
}
