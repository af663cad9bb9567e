/* The decider's attempt, carried out for all nodes together.
 *
 *   PLAN     input from the roster → plan (store, or a job) → PLANNED
 *   PREPARE  devices that other models' refits use, on all nodes at once → job: sources compared → PREPARE orders
 *   START    START orders → PROGRESS* → CELLS* of all nodes merged → STAGED of each: run_verify.c
 *   ABORT    ABORT orders; a node that nothing was sent to is quiet
 *
 * Whatever fails here becomes a FAILED event with the attempt's number; the decider does the rest. What happens on a
 * node is that node's part.c. */
#include "service/coordinator.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "exec/wire.h"
#include "service/attempt_input.h"
#include "service/cells.h"
#include "service/cells_blame.h"
#include "service/comm.h"
#include "service/compare.h"
#include "service/held.h"
#include "service/nodes.h"
#include "service/planning.h"
#include "service/rehearse.h"

#include "base/banned.h"

enum { WATCH_INTERVAL_MS = 100 };

void run_fail(struct decider *d, uint32_t node, int code, const char *text, uint64_t worker)
{
    struct refit_event ev = {
        .type = REFIT_EV_FAILED,
        .node = {.node = node, .attempt = d->run.id, .code = code, .text = text, .worker = worker}};
    if (code == RS_EDATALOSS) {
        run_distrust(d);
        ev.node.wrong = d->run.wrong;
        ev.node.n_wrong = d->run.n_wrong;
    }
    (void)decider_event(d, &ev);
}

void run_fail_here(struct decider *d, int code, const char *text)
{
    run_fail(d, d->run.input != NULL ? d->run.input->nodes[0] : 0, code, text, 0);
}

struct run_node *run_node_of(const struct decider *d, uint32_t node)
{
    uint32_t i = d->run.input == NULL || d->run.nodes == NULL
                     ? UINT32_MAX
                     : attempt_input_node(d->run.input, node);
    return i == UINT32_MAX ? NULL : &d->run.nodes[i];
}

bool run_has_node(const struct decider *d, uint32_t node)
{
    return d->run.id != 0 && run_node_of(d, node) != NULL;
}

/* --- devices ------------------------------------------------------------------------------------ */

/* The decider whose refit moves bytes on a device that d needs; NULL: none. */
static const struct decider *devices_blocker(const struct decider *d)
{
    const struct attempt_input *in = d->run.input;
    for (uint32_t i = 0; i < in->n_participants; i++) {
        const struct participant *p = &in->participants[i];
        const struct decider *user = d->coordinator->nodes[p->node].device_user[p->device];
        if (user != NULL && user != d)
            return user;
    }
    return NULL;
}

/* All of them on all nodes, or none. */
static bool devices_take(struct decider *d)
{
    const struct attempt_input *in = d->run.input;
    const struct decider *blocker = devices_blocker(d);
    d->run.wants_devices = blocker != NULL;
    if (blocker != NULL) {
        log_info("model %s version %" PRIu64 " attempt %" PRIu64 ": waits for devices of model %s",
                 d->model, d->run.version, d->run.id, blocker->model);
        return false;
    }
    for (uint32_t i = 0; i < in->n_participants; i++)
        d->coordinator->nodes[in->participants[i].node].device_user[in->participants[i].device] = d;
    d->run.has_devices = true;
    return true;
}

void run_node_quiet(struct decider *d, uint32_t node)
{
    struct node *n = &d->coordinator->nodes[node];
    for (unsigned i = 0; i < CONFIG_MAX_DEVICES; i++)
        if (n->device_user[i] == d)
            n->device_user[i] = NULL;
}

static void devices_give(struct decider *d)
{
    for (uint32_t i = 0; d->run.has_devices && i < d->run.input->topology->n_nodes; i++)
        run_node_quiet(d, d->run.input->nodes[i]);
    d->run.has_devices = d->run.wants_devices = false;
}

static void prepare_continue(struct decider *d);

void run_devices_free(struct coordinator *c)
{
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        if (d->run.wants_devices && !d->stepping && devices_blocker(d) == NULL)
            prepare_continue(d);
    }
}

/* --- planning ----------------------------------------------------------------------------------- */

static void on_planned(void *arg, int code, struct plan_entry *entry, const struct err *e)
{
    struct decider *d = arg;
    struct refit_event ev = {.type = REFIT_EV_PLANNED,
                             .planned = {.attempt = d->run.id, .code = code}};
    d->run.planning = NULL;
    d->run.plan = entry;
    if (code != 0) {
        ev.planned.text = err_text(e, code);
        (void)decider_event(d, &ev);
        return;
    }
    const struct plan_totals *t = plan_totals(entry->plan);
    ev.planned.digest = t->digest;
    ev.planned.totals = (struct refit_bytes){.total = t->destination_bytes,
                                             .network_minimum = t->network_bytes_minimum,
                                             .network = t->network_bytes,
                                             .domain = t->domain_bytes,
                                             .device = t->device_bytes};
    ev.planned.strategy = plan_strategy_name(plan_options(entry->plan)->strategy);
    (void)decider_event(d, &ev);
}

static int nodes_make(struct decider *d, struct err *e)
{
    uint32_t n = d->run.input->topology->n_nodes;
    size_t n_pairs = (size_t)n * (n - 1) / 2;
    d->run.nodes = mem_calloc(n, sizeof *d->run.nodes);
    d->run.tokens = mem_calloc(n_pairs, NODE_TOKEN_BYTES);
    d->run.wrong = mem_calloc(d->run.input->n_participants, sizeof *d->run.wrong);
    if (d->run.nodes == NULL || d->run.tokens == NULL || d->run.wrong == NULL)
        return err_set(e, RS_ENOMEM, "no memory to plan");
    if (n_pairs > 0)
        random_bytes(d->run.tokens, n_pairs * NODE_TOKEN_BYTES);
    return 0;
}

void run_plan(struct decider *d, const struct refit_action *a)
{
    struct err e = {0};
    const struct refit_version *v = refit_attempt(d->refit, a->attempt);
    run_end(d, false);
    d->run.id = a->attempt;
    d->run.version = a->version;
    d->run.kind = a->kind;
    d->run.epoch = a->epoch;
    int r = v == NULL ? err_set(&e, RS_EINTERNAL, "PLAN of a version that is not there")
                      : attempt_input_make(d, v, &d->run.input, &e);
    if (r == 0)
        speed_digest(d->coordinator->service->config, d->run.input->verify, d->run.config_digest);
    if (r == 0)
        r = nodes_make(d, &e);
    if (r == 0)
        r = planning_start(d->coordinator->service, d->run.input, NULL, on_planned, d,
                           &d->run.planning, &e);
    if (r != 0)
        on_planned(d, r, NULL, &e);
}

/* --- sources compared --------------------------------------------------------------------------- */

struct source_check {
    uv_work_t work;
    struct service *service;
    struct decider *decider; /* NULL: nobody waits any more */
    struct plan_entry *plan;
    struct publication **publications; /* per source rank */
    bool rehearsal;                    /* they hold coordinates, by their own account */
    struct rehearse_extent extent;
    int code;
    struct err err;
};

static void source_check_free(struct source_check *j)
{
    for (uint32_t i = 0; j->publications != NULL && i < j->plan->source->layout->n_ranks; i++)
        publication_unref(j->publications[i]);
    mem_free(j->publications);
    plan_entry_unref(j->plan);
    mem_free(j);
}

static void source_check_work(uv_work_t *work)
{
    struct source_check *j = container_of(work, struct source_check, work);
    const struct layout *source = j->plan->source->layout;
    j->code = j->rehearsal ? rehearse_fingerprinted(source, j->publications, &j->err) : 0;
    if (j->code == 0)
        j->code = compare_sources(source, j->publications, &j->err);
    if (j->code == 0 && j->rehearsal)
        j->code =
            rehearse_check(source, j->publications, REHEARSE_MOST_ELEMENTS, &j->extent, &j->err);
}

static void source_check_done(uv_work_t *work, int status)
{
    struct source_check *j = container_of(work, struct source_check, work);
    struct service *s = j->service;
    struct decider *d = j->decider;
    if (status != 0)
        j->code = RS_ECANCELED;
    if (d != NULL && j->code == 0 && j->rehearsal)
        log_info("model %s version %" PRIu64 " attempt %" PRIu64
                 ": the sources hold their coordinates: %" PRIu64 " of %" PRIu64
                 " parts computed%s",
                 d->model, d->run.version, d->run.id, j->extent.checked, j->extent.shards,
                 j->extent.checked < j->extent.shards ? " (a sample: the model is large)" : "");
    if (d != NULL) {
        d->run.checking = NULL;
        d->run.sources_agree = j->code == 0;
        if (j->code == 0)
            prepare_continue(d);
        else
            run_fail_here(d, j->code, err_text(&j->err, j->code));
    }
    source_check_free(j);
    s->n_jobs--;
    service_stop_if_idle(s);
}

static bool is_rehearsal(const struct decider *d)
{
    const struct refit_version *v = refit_attempt(d->refit, d->run.id);
    return v != NULL && v->kind == REFIT_KIND_REHEARSAL;
}

/* What the sources that take part have published of this version, with fingerprints (a rehearsal: must have). */
static int publications_take(struct decider *d, struct source_check *j)
{
    const struct attempt_input *in = d->run.input;
    j->publications = mem_calloc(j->plan->source->layout->n_ranks, sizeof(struct publication *));
    if (j->publications == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < in->n_participants && in->participants[i].layout == 0; i++) {
        const struct roster_entry *r = roster_find(d, in->participants[i].worker);
        if (r == NULL || r->published == NULL || r->published->version != d->run.version ||
            (r->published->fingerprints == NULL && !j->rehearsal))
            continue;
        r->published->refs++;
        j->publications[r->rank] = r->published;
    }
    return 0;
}

/* A client has said what its tensors must be: that is checked even where nothing else is verified. */
static bool sources_expect(const struct decider *d)
{
    const struct attempt_input *in = d->run.input;
    for (uint32_t i = 0; i < in->n_participants && in->participants[i].layout == 0; i++) {
        const struct roster_entry *r = roster_find(d, in->participants[i].worker);
        if (r != NULL && r->published != NULL && r->published->version == d->run.version &&
            r->published->n_expected > 0)
            return true;
    }
    return false;
}

static int source_check_start(struct decider *d)
{
    struct service *s = d->coordinator->service;
    struct source_check *j = mem_zalloc(sizeof *j);
    if (j == NULL)
        return RS_ENOMEM;
    j->service = s;
    j->decider = d;
    j->plan = plan_entry_ref(d->run.plan);
    j->rehearsal = is_rehearsal(d);
    if (publications_take(d, j) != 0 ||
        uv_queue_work(s->loop, &j->work, source_check_work, source_check_done) != 0) {
        source_check_free(j);
        return RS_ENOMEM;
    }
    s->n_jobs++;
    d->run.checking = j;
    return 0;
}

/* --- prepare ------------------------------------------------------------------------------------ */

static const uint8_t *token_of(const struct run *r, uint32_t a, uint32_t b)
{
    uint32_t high = a > b ? a : b, low = a > b ? b : a;
    return r->tokens[(size_t)high * (high - 1) / 2 + low];
}

/* The other nodes as that one (by its index) reaches them. */
static void peers_fill(const struct decider *d, uint32_t index, struct attempt_peer *peers)
{
    const struct coordinator *c = d->coordinator;
    const struct attempt_input *in = d->run.input;
    uint32_t n = 0;
    for (uint32_t i = 0; i < in->topology->n_nodes; i++) {
        struct attempt_peer *p = &peers[n];
        struct peer_view v;
        if (i == index)
            continue;
        n++;
        nodes_look(c, in->nodes[i], &v);
        *p = (struct attempt_peer){.node = in->nodes[i], .port = c->nodes[in->nodes[i]].data_port};
        (void)snprintf(p->address, sizeof p->address, "%s", v.data_address);
        memcpy(p->token, token_of(&d->run, index, i), sizeof p->token);
    }
}

static struct landed_key landed_key(const struct decider *d)
{
    struct landed_key key = {.version = d->run.version, .content = d->run.content};
    memcpy(key.plan, plan_totals(d->run.plan->plan)->digest, sizeof key.plan);
    return key;
}

void run_quiesced(struct decider *d, uint32_t node, const struct node_report *r)
{
    run_node_quiet(d, node);
    if (r->event.node.attempt != d->run.id || !d->run.started || d->run.distrusted ||
        d->run.kind == REFIT_KIND_REHEARSAL || /* of which nothing is wanted afterwards */
        d->run.content == 0 || d->run.plan == NULL || r->landed == NULL ||
        run_node_of(d, node) == NULL)
        return;
    const struct landed_key key = landed_key(d);
    const struct attempt_landed said = {
        .node = node, .attempt = d->run.id, .holds = r->landed, .n_bytes = r->n_landed_bytes};
    landed_note(&d->landed, &key, &said);
}

static int prepare_send(struct decider *d, uint32_t index, uint32_t transfer_timeout_ms,
                        const uint64_t digests[ATTEMPT_PARTS])
{
    const struct attempt_input *in = d->run.input;
    uint32_t n_peers = in->topology->n_nodes - 1;
    struct attempt_peer *peers = mem_calloc(n_peers, sizeof *peers);
    struct node_order o = {.type = NODE_ORDER_PREPARE,
                           .model = d->model,
                           .version = d->run.version,
                           .attempt = d->run.id,
                           .epoch = d->run.epoch,
                           .content = d->run.content,
                           .data_plane = d->run.nodes[index].data_plane,
                           .text = "",
                           .deadline_ns = d->run.prepare_deadline_ns,
                           .transfer_timeout_ms = transfer_timeout_ms,
                           .input = in,
                           .peers = peers,
                           .n_peers = n_peers};
    if (peers == NULL)
        return RS_ENOMEM;
    peers_fill(d, index, peers);
    const struct landed_key key = landed_key(d);
    if (o.content != 0)
        o.landed = landed_find(&d->landed, &key, &o.n_landed);
    o.has_comm_id = d->run.comm.has;
    memcpy(o.comm_id, d->run.comm.id, sizeof o.comm_id);
    o.shrink = d->run.comm.shrink;
    memcpy(o.plan_digest, plan_totals(d->run.plan->plan)->digest, sizeof o.plan_digest);
    memcpy(o.input_digests, digests, sizeof o.input_digests);
    d->run.nodes[index].sent = true;
    int r = coordinator_order(d->coordinator, in->nodes[index], &o);
    mem_free(peers);
    return r;
}

/* What is held is held until START: nothing is written before. */
static void held_fill(struct decider *d)
{
    struct participant *p = (struct participant *)(uintptr_t)d->run.input->participants;
    for (uint32_t i = 0; i < d->run.input->n_participants; i++) {
        const struct refit_worker *w = refit_find_worker(d->refit, p[i].worker);
        p[i].held = p[i].layout != 0 && w != NULL && refit_holds_already(d->refit, w);
    }
}

static void prepares_send(struct decider *d)
{
    const struct refit_version *v = refit_attempt(d->refit, d->run.id);
    uint32_t timeout_ms =
        v != NULL ? v->transfer_timeout_ms : d->coordinator->service->config->transfer_timeout_ms;
    uint64_t id = d->run.id, digests[ATTEMPT_PARTS];
    held_fill(d);
    comm_use(d);
    attempt_input_digest(d->run.input, digests);
    for (uint32_t i = 0; d->run.id == id && i < d->run.input->topology->n_nodes; i++) {
        uint32_t node = d->run.input->nodes[i];
        if (!d->run.nodes[i].wanted || d->run.nodes[i].sent)
            continue;
        int r = prepare_send(d, i, timeout_ms, digests);
        char text[160];
        if (r == 0)
            continue;
        (void)snprintf(text, sizeof text, "it could not be told to prepare: %s", err_name(r));
        run_fail(d, node, r, text, 0);
    }
}

static void prepare_continue(struct decider *d)
{
    if (!d->run.has_devices && !devices_take(d))
        return;
    if (d->run.input->verify == WIRE_VERIFY_OFF && !sources_expect(d) && !is_rehearsal(d))
        d->run.sources_agree = true;
    if (d->run.sources_agree) {
        if (comm_ready(d))
            prepares_send(d);
    } else if (d->run.checking == NULL && source_check_start(d) != 0) {
        run_fail_here(d, RS_ENOMEM, "no memory to compare the sources");
    }
}

void run_comm_id(struct decider *d, uint32_t node, const struct node_report *r)
{
    if (comm_take(d, node, r))
        prepare_continue(d);
}

void run_prepare(struct decider *d, const struct refit_action *a)
{
    struct run_node *n = run_node_of(d, a->node);
    if (n == NULL || d->run.plan == NULL || d->run.id != a->attempt) {
        run_fail(d, a->node, RS_EINTERNAL, "PREPARE without a plan", 0);
        return;
    }
    n->wanted = true;
    n->data_plane = a->data_plane;
    d->run.prepare_deadline_ns = a->at_ns;
    d->run.epoch = a->epoch;
    d->run.content = a->content;
    prepare_continue(d);
}

/* --- start, progress, staged -------------------------------------------------------------------- */

static struct node_order order_of(const struct decider *d, const struct refit_action *a,
                                  enum node_order_type type)
{
    return (struct node_order){
        .type = type, .model = d->model, .version = a->version, .attempt = a->attempt, .text = ""};
}

void run_start(struct decider *d, const struct refit_action *a)
{
    struct node_order o = order_of(d, a, NODE_ORDER_START);
    d->run.started = true;
    landed_clear(&d->landed); /* it has gone into the PREPAREs; memory is written anew */
    int r = coordinator_order(d->coordinator, a->node, &o);
    char text[160];
    if (r == 0)
        return;
    (void)snprintf(text, sizeof text, "it could not be told to start: %s", err_name(r));
    run_fail(d, a->node, r, text, 0);
}

static void progress_tell(struct decider *d)
{
    (void)uv_timer_stop(&d->progress);
    d->run.notified_ns = clock_mono_ns();
    if (d->run.kind != REFIT_KIND_CATCH_UP) /* that version's refit has long ended */
        watch_refit(d, d->run.version);
}

static void on_progress_due(uv_timer_t *t)
{
    progress_tell(t->data);
}

void run_progress(struct decider *d)
{
    uint64_t now = clock_mono_ns();
    uint64_t due = d->run.notified_ns + WATCH_INTERVAL_MS * UINT64_C(1000000);
    if (now >= due) {
        progress_tell(d);
    } else if (!uv_is_active((uv_handle_t *)&d->progress)) { /* it may be the last for long */
        uv_update_time(d->coordinator->service->loop);
        (void)uv_timer_start(&d->progress, on_progress_due, (due - now) / 1000000 + 1, 0);
    }
}

/* --- the end ------------------------------------------------------------------------------------ */

static void work_forget(struct decider *d)
{
    planning_forget(d->run.planning);
    cells_blame_forget(d->run.blaming);
    cells_blame_forget(d->run.untold);
    if (d->run.checking != NULL)
        d->run.checking->decider = NULL;
    d->run.planning = NULL;
    d->run.blaming = d->run.untold = NULL;
    d->run.checking = NULL;
    d->run.wants_devices = false;
}

void run_abort(struct decider *d, const struct refit_action *a)
{
    const struct run_node *n = run_node_of(d, a->node);
    struct node_order o = order_of(d, a, NODE_ORDER_ABORT);
    run_called_off(d);
    work_forget(d);
    if (a->attempt == d->run.id && n != NULL && n->sent) {
        (void)coordinator_order(d->coordinator, a->node, &o); /* who is away is lost before long */
        return;
    }
    struct refit_event ev = {.type = REFIT_EV_QUIESCED,
                             .node = {.node = a->node, .attempt = a->attempt, .text = ""}};
    run_node_quiet(d, a->node);
    (void)decider_event(d, &ev);
}

void run_expel(struct decider *d, const struct refit_action *a)
{
    struct node_order o = order_of(d, a, NODE_ORDER_EXPEL);
    log_warn("model %s version %" PRIu64 " attempt %" PRIu64
             ": the data plane of node %s has not quiesced in time",
             d->model, d->run.version, d->run.id, coordinator_node_name(d->coordinator, a->node));
    (void)coordinator_order(d->coordinator, a->node, &o);
}

static void end_send(struct decider *d, bool committed)
{
    struct node_order o = {.type = NODE_ORDER_END,
                           .model = d->model,
                           .version = d->run.version,
                           .attempt = d->run.id,
                           .code = committed ? 0 : RS_EABORTED,
                           .text = ""};
    for (uint32_t i = 0; d->run.nodes != NULL && i < d->run.input->topology->n_nodes; i++)
        if (d->run.nodes[i].sent)
            (void)coordinator_order(d->coordinator, d->run.input->nodes[i], &o);
}

void run_end(struct decider *d, bool committed)
{
    struct run *r = &d->run;
    work_forget(d);
    (void)uv_timer_stop(&d->progress);
    if (r->input != NULL)
        devices_give(d);
    comm_end(d, committed);
    end_send(d, committed);
    plan_entry_unref(r->plan);
    attempt_input_free(r->input);
    cells_free(r->cells);
    mem_free(r->nodes);
    mem_free(r->tokens);
    mem_free(r->wrong);
    *r = (struct run){0};
}
