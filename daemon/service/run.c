/* The decider's attempt, carried out: plan, prepare, start, abort, on this node's data plane.
 *
 *   PLAN     order → (store | job on a thread) → PLANNED
 *   PREPARE  devices that other models' refits use → job: sources compared → WIRE_PREPARE → PREPARED
 *   START    WIRE_START → PROGRESS* → job: fingerprints compared → STAGED
 *   ABORT    whatever of this goes on is forgotten → WIRE_ABORT → QUIESCED
 *
 * Whatever fails becomes one FAILED event with the attempt's number; the decider does the rest. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/log.h"
#include "base/mem.h"
#include "service/blame.h"
#include "service/compare.h"
#include "service/held.h"
#include "service/options.h"
#include "service/share.h"
#include "service/state.h"

#include "base/banned.h"

enum { WATCH_INTERVAL_MS = 100 };

struct planning {
    uv_work_t work;
    struct service *service;
    struct model *model; /* NULL: nobody waits any more */
    struct plan_order order;
    struct share share;       /* memory that its workers have in common */
    struct plan_entry *entry; /* found in the store: only the share is checked */
    bool made;                /* entry is new */
    int code;
    struct err err;
};

/* Both comparisons; what they read is counted or owned. */
struct verify_job {
    uv_work_t work;
    struct service *service;
    struct model *model; /* NULL: nobody waits any more */
    bool landed;         /* else: sources */
    struct plan_entry *plan;
    enum compare_mode mode;
    struct publication **publications; /* per source rank */
    const uint64_t *holds;             /* mapped */
    size_t holds_bytes;
    uint64_t **sums; /* per place */
    uint32_t place;
    struct wire_progress progress;
    int code;
    struct err err;
};

static void report(struct model *m, enum refit_event_type type, int code, const char *text,
                   uint64_t worker)
{
    struct refit_event ev = {
        .type = type,
        .node = {.node = NODE, .attempt = m->run.id, .code = code, .text = text, .worker = worker}};
    (void)model_event(m, &ev);
}

static struct lease *place_lease(struct model *m, const struct plan_entry *plan, uint32_t place);

/* The destination worker that a FAILED answer blames; 0: none. */
static uint64_t blamed_worker(struct model *m, const struct wire_packet *packet)
{
    struct wire_failure f;
    const struct plan_entry *plan = m->run.plan;
    if (packet == NULL || plan == NULL || packet->header.body_bytes < sizeof f)
        return 0;
    memcpy(&f, packet->body, sizeof f);
    const struct lease *l = f.place < plan->program.n_places ? place_lease(m, plan, f.place) : NULL;
    return l != NULL && l->side == REFIT_DESTINATION ? l->id : 0;
}

static void report_failed(struct model *m, int code, const struct wire_packet *packet,
                          const struct err *e)
{
    struct err named = *e;
    if (code == RS_EPEER)
        return; /* a dead data plane is told once for all, as NODE_LOST */
    uint64_t worker = blamed_worker(m, packet);
    if (m->run.plan != NULL)
        blame_names(&named, m->run.plan->source->layout, m->run.plan);
    report(m, REFIT_EV_FAILED, code, err_text(&named, code), worker);
}

/* --- devices ------------------------------------------------------------------------------------ */

static bool lease_takes_part(const struct model *m, const struct lease *l)
{
    const struct refit_worker *w = refit_find_worker(m->refit, l->id);
    return w != NULL && l->model == m && w->taking_part && !w->gone;
}

/* The model that moves bytes on a device that m needs; NULL: none. */
static struct model *devices_blocker(const struct model *m)
{
    queue_foreach (q, &m->service->leases) {
        const struct lease *l = container_of(q, struct lease, in);
        struct model *user = m->service->device_user[l->device];
        if (user != NULL && user != m && lease_takes_part(m, l))
            return user;
    }
    return NULL;
}

static bool devices_take(struct model *m)
{
    const struct model *blocker = devices_blocker(m);
    m->run.wants_devices = blocker != NULL;
    if (blocker != NULL) {
        log_info("model %s version %" PRIu64 " attempt %" PRIu64 ": waits for devices of model %s",
                 m->name, m->run.version, m->run.id, blocker->name);
        return false;
    }
    queue_foreach (q, &m->service->leases) {
        const struct lease *l = container_of(q, struct lease, in);
        if (lease_takes_part(m, l))
            m->service->device_user[l->device] = m;
    }
    m->run.has_devices = true;
    return true;
}

static void devices_give(struct model *m)
{
    for (unsigned d = 0; d < CONFIG_MAX_DEVICES; d++)
        if (m->service->device_user[d] == m)
            m->service->device_user[d] = NULL;
    m->run.has_devices = m->run.wants_devices = false;
}

static void prepare_continue(struct model *m);

void run_devices_free(struct service *s)
{
    queue_foreach (q, &s->models) {
        struct model *m = container_of(q, struct model, in);
        if (m->run.wants_devices && !m->stepping && devices_blocker(m) == NULL)
            prepare_continue(m);
    }
}

/* --- planning ----------------------------------------------------------------------------------- */

static void planned(struct model *m, struct plan_entry *entry)
{
    const struct plan_totals *t = plan_totals(entry->plan);
    struct refit_event ev = {
        .type = REFIT_EV_PLANNED,
        .planned = {.attempt = m->run.id,
                    .digest = t->digest,
                    .totals = {.total = t->destination_bytes,
                               .network_minimum = t->network_bytes_minimum,
                               .network = t->network_bytes,
                               .domain = t->domain_bytes,
                               .device = t->device_bytes},
                    .strategy = plan_strategy_name(plan_options(entry->plan)->strategy)}};
    m->run.plan = entry;
    plan_entry_unref(m->last_plan);
    m->last_plan = plan_entry_ref(entry);
    (void)model_event(m, &ev);
}

static void planned_not(struct model *m, int code, const char *text)
{
    struct refit_event ev = {.type = REFIT_EV_PLANNED,
                             .planned = {.attempt = m->run.id, .code = code, .text = text}};
    (void)model_event(m, &ev);
}

static void planning_work(uv_work_t *work)
{
    struct planning *p = work->data;
    p->code = p->share.n_users > 0 ? share_check(&p->share, &p->err) : 0;
    p->made = p->entry == NULL;
    if (p->code == 0 && p->made)
        p->code = plan_entry_make(&p->order, &p->entry, &p->err);
}

static void planning_done(uv_work_t *work, int status)
{
    struct planning *p = work->data;
    struct service *s = p->service;
    struct model *m = p->model;
    if (status != 0)
        p->code = RS_ECANCELED;
    plan_order_close(&p->order);
    share_close(&p->share);
    if (m != NULL)
        m->run.planning = NULL;
    if (p->code != 0) { /* a plan from the store is left unused */
        plan_entry_unref(p->entry);
        p->entry = NULL;
    }
    if (p->code == 0) {
        if (p->made)
            plan_store_add(&s->plans, p->entry);
        if (m != NULL)
            planned(m, p->entry);
        else
            plan_entry_unref(p->entry);
    } else if (m != NULL) {
        planned_not(m, p->code, err_text(&p->err, p->code));
    }
    mem_free(p);
    s->n_jobs--;
    service_stop_if_idle(s);
}

static int rules_copy(struct plan_options *to, const struct options *from)
{
    struct plan_rule *rules = mem_calloc(from->n_rules, sizeof *rules);
    if (rules == NULL)
        return RS_ENOMEM;
    to->rules = rules;
    for (; to->n_rules < from->n_rules; to->n_rules++) {
        rules[to->n_rules].strategy = from->rules[to->n_rules].strategy;
        if ((rules[to->n_rules].glob = mem_strdup(from->rules[to->n_rules].glob)) == NULL)
            return RS_ENOMEM;
    }
    return 0;
}

static int order_options(struct model *m, struct plan_order *o, const struct refit_version *v,
                         struct err *e)
{
    const struct config *c = m->service->config;
    struct options options;
    int r = options_read(v->options, v->n_options_bytes, &options, e);
    if (r != 0)
        return r;
    o->options = plan_options_default();
    (void)plan_strategy_parse(c->strategy, &o->options.strategy); /* checked when it was read */
    if (options.has_strategy)
        o->options.strategy = options.strategy;
    o->options.relay = c->relay;
    o->options.staging_ingest = c->staging_ingest;
    o->options.least_piece_bytes = c->least_piece_bytes;
    o->options.chunk_bytes = c->chunk_bytes;
    o->options.ring_slots = c->ring_slots;
    static const int modes[] = {-1, WIRE_VERIFY_OFF, WIRE_VERIFY_SAMPLED, WIRE_VERIFY_FULL};
    m->run.verify = modes[options.verify];
    if (m->run.verify < 0)
        m->run.verify = c->verify[0] == 'f'   ? WIRE_VERIFY_FULL
                        : c->verify[0] == 's' ? WIRE_VERIFY_SAMPLED
                                              : WIRE_VERIFY_OFF;
    r = rules_copy(&o->options, &options);
    options_close(&options);
    return r == 0 ? 0 : err_set(e, r, "no memory to plan");
}

/* Devices of the ranks of a layout that take part; TOPOLOGY_ABSENT for the others. */
static int32_t *devices_of(struct model *m, const struct layout_entry *layout, enum refit_side side)
{
    uint32_t n = layout->layout->n_ranks;
    int32_t *devices = mem_calloc(n, sizeof *devices);
    for (uint32_t i = 0; devices != NULL && i < n; i++)
        devices[i] = TOPOLOGY_ABSENT;
    if (devices == NULL)
        return NULL;
    queue_foreach (q, &m->service->leases) {
        const struct lease *l = container_of(q, struct lease, in);
        if (l->side == side && l->layout == layout && lease_takes_part(m, l))
            devices[l->rank] = (int32_t)l->device;
    }
    return devices;
}

static bool order_has(const struct plan_order *o, const struct layout_entry *layout)
{
    for (uint32_t i = 0; i < o->n_destinations; i++)
        if (o->destinations[i] == layout)
            return true;
    return false;
}

static int order_destinations(struct model *m, struct plan_order *o)
{
    o->destinations = mem_calloc(REFIT_MAX_LAYOUTS, sizeof(struct layout_entry *));
    o->destination_device = mem_calloc(REFIT_MAX_LAYOUTS, sizeof *o->destination_device);
    if (o->destinations == NULL || o->destination_device == NULL)
        return RS_ENOMEM;
    /* In the decider's order of layouts, so that the same members give the same plan. */
    queue_foreach (q, &m->refit->layouts) {
        const struct refit_layout *rl = container_of(q, struct refit_layout, link);
        struct layout_entry *layout = layouts_find(&m->service->layouts, rl->digest);
        bool takes_part = false;
        for (uint32_t i = 0; rl->side == REFIT_DESTINATION && i < rl->n_ranks; i++)
            takes_part =
                takes_part || (rl->worker_of_rank[i] != NULL && rl->worker_of_rank[i]->taking_part);
        if (!takes_part || layout == NULL || order_has(o, layout))
            continue;
        o->destinations[o->n_destinations] = layout_entry_ref(layout);
        o->destination_device[o->n_destinations] = devices_of(m, layout, REFIT_DESTINATION);
        if (o->destination_device[o->n_destinations++] == NULL)
            return RS_ENOMEM;
    }
    return 0;
}

static int order_source(struct model *m, struct plan_order *o, struct err *e)
{
    queue_foreach (q, &m->service->leases) {
        const struct lease *l = container_of(q, struct lease, in);
        if (l->side != REFIT_SOURCE || !lease_takes_part(m, l) || o->source != NULL)
            continue;
        o->source = layout_entry_ref(l->layout);
        o->source_device = devices_of(m, l->layout, REFIT_SOURCE);
        if (o->source_device == NULL)
            return err_set(e, RS_ENOMEM, "no memory to plan");
    }
    return o->source != NULL ? 0 : err_set(e, RS_EPRECOND, "no source worker takes part");
}

static int order_make(struct model *m, struct plan_order *o, const struct refit_version *v,
                      struct err *e)
{
    o->topology = m->service->topology;
    o->node = NODE;
    int r = order_options(m, o, v, e);
    if (r == 0)
        r = order_source(m, o, e);
    if (r == 0 && (r = order_destinations(m, o)) != 0)
        (void)err_set(e, r, "no memory to plan");
    if (r == 0 && o->n_destinations == 0)
        r = err_set(e, RS_EPRECOND, "no destination worker takes part");
    for (uint32_t i = 0; r == 0 && i < o->n_destinations; i++)
        if ((r = layout_check_pair(o->source->layout, o->destinations[i]->layout, e)) != 0)
            (void)err_prefix(e, r, "layout '%s'", o->destinations[i]->layout->name);
    if (r == 0 && (r = plan_order_key(o)) != 0)
        (void)err_set(e, r, "the plan's input has no digest");
    return r;
}

static int planning_start(struct model *m, struct planning *p, struct err *e)
{
    p->work.data = p;
    p->service = m->service;
    p->model = m;
    if (uv_queue_work(m->service->loop, &p->work, planning_work, planning_done) != 0)
        return err_set(e, RS_EINTERNAL, "no thread to plan on");
    m->service->n_jobs++;
    m->run.planning = p;
    return 0;
}

static int share_make(struct model *m, struct share *ret, struct err *e)
{
    size_t n = 0;
    struct lease **leases = mem_calloc(m->service->n_leases, sizeof(struct lease *));
    if (leases == NULL)
        return err_set(e, RS_ENOMEM, "no memory to plan");
    queue_foreach (q, &m->service->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if (lease_takes_part(m, l))
            leases[n++] = l;
    }
    int r = share_collect(leases, n, ret, e);
    mem_free(leases);
    return r;
}

void run_plan(struct model *m, const struct refit_action *a)
{
    struct err e = {0};
    const struct refit_version *v = refit_find_version(m->refit, a->version);
    struct planning *p = mem_zalloc(sizeof *p);
    run_end(m);
    m->run.id = a->attempt;
    m->run.version = a->version;
    m->run.epoch = a->epoch;
    int r = p == NULL || v == NULL ? err_set(&e, RS_ENOMEM, "no memory to plan")
                                   : order_make(m, &p->order, v, &e);
    if (r == 0)
        r = share_make(m, &p->share, &e);
    if (r == 0)
        p->entry = plan_store_find(&m->service->plans, p->order.key);
    if (r == 0 && p->entry != NULL && p->share.n_users == 0) {
        planned(m, p->entry);
    } else if (r == 0) {
        r = planning_start(m, p, &e);
        if (r == 0)
            return; /* the job owns p */
    }
    if (r != 0)
        planned_not(m, r, err_text(&e, r));
    if (p != NULL) {
        if (r != 0)
            plan_entry_unref(p->entry);
        plan_order_close(&p->order);
        share_close(&p->share);
    }
    mem_free(p);
}

/* --- comparing ---------------------------------------------------------------------------------- */

static void verify_job_free(struct verify_job *j)
{
    uint32_t n_ranks = j->plan->source->layout->n_ranks;
    for (uint32_t i = 0; j->publications != NULL && i < n_ranks; i++)
        publication_unref(j->publications[i]);
    for (uint32_t i = 0; j->sums != NULL && i < j->plan->program.n_places; i++)
        mem_free(j->sums[i]);
    mem_free(j->publications);
    mem_free(j->sums);
    if (j->holds != NULL)
        wire_unmap(j->holds, j->holds_bytes);
    plan_entry_unref(j->plan);
    mem_free(j);
}

/* The lease of a place of the plan, or NULL. */
static struct lease *place_lease(struct model *m, const struct plan_entry *plan, uint32_t place)
{
    const struct program_place *p = &plan->program.places[place];
    const struct layout_entry *layout =
        p->side == PROGRAM_SOURCE ? plan->source : plan->destinations[p->layout];
    enum refit_side side = p->side == PROGRAM_SOURCE ? REFIT_SOURCE : REFIT_DESTINATION;
    if (p->side == PROGRAM_SCRATCH)
        return NULL;
    queue_foreach (q, &m->service->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if (l->side == side && l->layout == layout && l->rank == p->rank && lease_takes_part(m, l))
            return l;
    }
    return NULL;
}

static int publications_take(struct model *m, struct verify_job *j)
{
    j->publications = mem_calloc(j->plan->source->layout->n_ranks, sizeof(struct publication *));
    if (j->publications == NULL)
        return RS_ENOMEM;
    queue_foreach (q, &m->service->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if (l->side != REFIT_SOURCE || l->layout != j->plan->source || !lease_takes_part(m, l) ||
            l->published == NULL || l->published->version != m->run.version)
            continue;
        l->published->refs++;
        j->publications[l->rank] = l->published;
    }
    return 0;
}

static int sums_make(struct verify_job *j)
{
    const struct program *p = &j->plan->program;
    j->sums = mem_calloc(p->n_places, sizeof(uint64_t *));
    for (uint32_t i = 0; j->sums != NULL && i < p->n_places; i++) {
        if (p->places[i].side != PROGRAM_DESTINATION)
            continue;
        uint32_t n = j->plan->destinations[p->places[i].layout]->layout->n_tensors;
        if ((j->sums[i] = mem_calloc(n, sizeof(uint64_t))) == NULL)
            return RS_ENOMEM;
    }
    return j->sums != NULL ? 0 : RS_ENOMEM;
}

static void verify_work(uv_work_t *work)
{
    struct verify_job *j = work->data;
    j->place = PROGRAM_NONE;
    j->code = j->landed ? compare_landed(j->plan, j->holds, j->mode, j->publications, j->sums,
                                         &j->place, &j->err)
                        : compare_sources(j->plan->source->layout, j->publications, &j->err);
}

static void prepare_send(struct model *m);
static void staged(struct model *m, struct verify_job *j);

static void verify_done(uv_work_t *work, int status)
{
    struct verify_job *j = work->data;
    struct service *s = j->service;
    struct model *m = j->model;
    if (status != 0)
        j->code = RS_ECANCELED;
    if (m != NULL) {
        m->run.verifying = NULL;
        if (j->code == 0 && j->landed)
            staged(m, j);
        else if (j->code == 0)
            prepare_send(m);
        else {
            const struct lease *l =
                j->place != PROGRAM_NONE ? place_lease(m, j->plan, j->place) : NULL;
            report(m, REFIT_EV_FAILED, j->code, err_text(&j->err, j->code), l != NULL ? l->id : 0);
        }
    }
    verify_job_free(j);
    s->n_jobs--;
    service_stop_if_idle(s);
}

static struct verify_job *verify_job_new(struct model *m, bool landed)
{
    struct verify_job *j = mem_zalloc(sizeof *j);
    if (j == NULL)
        return NULL;
    j->work.data = j;
    j->service = m->service;
    j->model = m;
    j->landed = landed;
    j->mode = (enum compare_mode)m->run.verify;
    j->plan = plan_entry_ref(m->run.plan);
    if (publications_take(m, j) == 0 && (!landed || sums_make(j) == 0))
        return j;
    verify_job_free(j);
    return NULL;
}

static int verify_start(struct model *m, struct verify_job *j)
{
    if (uv_queue_work(m->service->loop, &j->work, verify_work, verify_done) != 0) {
        verify_job_free(j);
        return RS_EINTERNAL;
    }
    m->service->n_jobs++;
    m->run.verifying = j;
    return 0;
}

/* --- prepare ------------------------------------------------------------------------------------ */

static uint32_t ms_until(uint64_t deadline_ns)
{
    uint64_t now = clock_mono_ns();
    uint64_t ms = deadline_ns > now ? (deadline_ns - now) / 1000000 : 0;
    return ms > UINT32_MAX / 2 ? UINT32_MAX / 2 : (uint32_t)ms;
}

static void on_prepared(struct link_request *r, int code, struct wire_packet *packet,
                        const struct err *e)
{
    struct model *m = container_of(r, struct model, run.prepare);
    if (code != 0)
        report_failed(m, code, packet, e);
    else
        report(m, REFIT_EV_PREPARED, 0, "", 0);
}

static enum wire_memory receiving(const struct lease *l)
{
    return l->receive == REFIT_STAGED_RECEIVE ? WIRE_SHADOW : WIRE_LIVE;
}

/* Per place its worker and memory; false: a worker has gone meanwhile (the decider knows already). */
static bool places_fill(struct model *m, struct wire_place *places, bool *ret_has_held,
                        uint8_t *held_place)
{
    const struct program *p = &m->run.plan->program;
    for (uint32_t i = 0; i < p->n_places; i++) {
        struct lease *l = place_lease(m, m->run.plan, i);
        places[i] = (struct wire_place){0};
        if (p->places[i].side == PROGRAM_SCRATCH)
            continue;
        if (l == NULL || !l->bound)
            return false;
        bool destination = p->places[i].side == PROGRAM_DESTINATION;
        places[i].worker = l->id;
        places[i].memory = destination ? receiving(l) : WIRE_LIVE;
        held_place[i] =
            destination && refit_holds_already(m->refit, refit_find_worker(m->refit, l->id));
        *ret_has_held = *ret_has_held || held_place[i] != 0;
    }
    return true;
}

/* One byte per hold in a memfd. */
static int held_memfd(const struct program *p, const uint8_t *held_place, struct err *e)
{
    uint8_t *held = mem_alloc(p->n_holds > 0 ? p->n_holds : 1);
    if (held == NULL)
        return err_set(e, RS_ENOMEM, "no memory to prepare");
    for (uint32_t i = 0; i < p->n_holds; i++)
        held[i] = held_place[p->holds[i].place];
    int fd = wire_memfd("reshard-held", held, p->n_holds, e);
    mem_free(held);
    return fd;
}

static int prepare_submit(struct model *m, struct wire_place *places, uint8_t *held_place,
                          struct err *e)
{
    const struct plan_entry *plan = m->run.plan;
    bool has_held = false;
    int fds[WIRE_MAX_FDS] = {plan->program_fd, plan->tensors_fd, -1};
    if (!places_fill(m, places, &has_held, held_place))
        return err_set(e, RS_EABORTED, "a worker that takes part has just gone");
    if (has_held && (fds[2] = held_memfd(&plan->program, held_place, e)) < 0)
        return fds[2];
    struct wire_prepare body = {.deadline_ns = m->run.prepare_deadline_ns,
                                .n_places = plan->program.n_places,
                                .verify = (uint32_t)m->run.verify,
                                .has_held = has_held,
                                .n_layouts = plan->n_destinations};
    struct wire_header h = {.type = WIRE_PREPARE,
                            .model = m->id,
                            .epoch = m->run.epoch,
                            .attempt = m->run.id,
                            .version = m->run.version};
    m->run.prepare = (struct link_request){.done = on_prepared, .patient = true};
    int r = link_submit(m->service->link, &m->run.prepare, h, &body, sizeof body, places,
                        plan->program.n_places * sizeof *places, fds, has_held ? 3 : 2,
                        ms_until(m->run.prepare_deadline_ns) + 1000, e);
    m->run.sent = r == 0;
    crash_point(CRASH_PREPARE_SENT);
    if (fds[2] >= 0)
        (void)close(fds[2]);
    return r;
}

static void prepare_send(struct model *m)
{
    struct err e = {0};
    uint32_t n = m->run.plan->program.n_places;
    struct wire_place *places = mem_calloc(n, sizeof *places);
    uint8_t *held_place = mem_calloc(n, sizeof *held_place);
    int r = places == NULL || held_place == NULL ? err_set(&e, RS_ENOMEM, "no memory to prepare")
                                                 : prepare_submit(m, places, held_place, &e);
    mem_free(places);
    mem_free(held_place);
    if (r != 0)
        report(m, REFIT_EV_FAILED, r, err_text(&e, r), 0);
}

static void prepare_continue(struct model *m)
{
    struct verify_job *j;
    if (!devices_take(m))
        return;
    if (m->run.verify == WIRE_VERIFY_OFF || m->service->config->verify[0] == 'o') {
        prepare_send(m); /* publications carry no fingerprints */
        return;
    }
    if ((j = verify_job_new(m, false)) == NULL || verify_start(m, j) != 0)
        report(m, REFIT_EV_FAILED, RS_ENOMEM, "no memory to compare the sources", 0);
}

void run_prepare(struct model *m, const struct refit_action *a)
{
    m->run.prepare_deadline_ns = a->at_ns;
    m->run.epoch = a->epoch;
    if (m->run.plan == NULL || m->run.id != a->attempt)
        report(m, REFIT_EV_FAILED, RS_EINTERNAL, "PREPARE without a plan", 0);
    else
        prepare_continue(m);
}

/* --- start -------------------------------------------------------------------------------------- */

static void report_bytes(struct model *m, enum refit_event_type type, const struct wire_progress *p)
{
    struct refit_event ev = {.type = type,
                             .node = {.node = NODE,
                                      .attempt = m->run.id,
                                      .bytes = {.landed = p->done_bytes,
                                                .network = p->network_bytes,
                                                .domain = p->domain_bytes,
                                                .device = p->device_bytes,
                                                .skipped = p->skipped_bytes,
                                                .total = p->total_bytes},
                                      .first_byte_ns = p->first_byte_ns,
                                      .last_byte_ns = p->last_byte_ns,
                                      .sources_read_ns = p->sources_read_ns,
                                      .verified_ns = p->verified_ns}};
    m->run.progress = *p;
    (void)model_event(m, &ev);
}

static void on_progress(struct link_request *r, const struct wire_progress *p)
{
    struct model *m = container_of(r, struct model, run.start);
    uint64_t now = clock_mono_ns(), version = m->run.version;
    report_bytes(m, REFIT_EV_PROGRESS, p);
    if (now - m->run.notified_ns < WATCH_INTERVAL_MS * UINT64_C(1000000))
        return;
    m->run.notified_ns = now;
    watch_refit(m, version);
}

static int staged_take(struct model *m, struct wire_packet *packet, struct verify_job *j,
                       struct err *e)
{
    if (packet->header.type != WIRE_STAGED || packet->header.body_bytes < sizeof j->progress ||
        packet->n_fds < 1)
        return err_set(e, RS_EPROTO, "the data plane ended START with %s",
                       wire_type_name(packet->header.type));
    memcpy(&j->progress, packet->body, sizeof j->progress);
    int r = wire_map_fd(packet->fds[0], (const void **)&j->holds, &j->holds_bytes, e);
    if (r == 0 && j->holds_bytes < j->plan->program.n_holds * sizeof *j->holds)
        r = err_set(e, RS_EPROTO, "STAGED tells of %zu bytes of fingerprints; there are %u holds",
                    j->holds_bytes, j->plan->program.n_holds);
    (void)m;
    return r;
}

static void on_staged(struct link_request *r, int code, struct wire_packet *packet,
                      const struct err *e)
{
    struct model *m = container_of(r, struct model, run.start);
    struct err mine = {0};
    if (code != 0) {
        report_failed(m, code, packet, e);
        return;
    }
    struct verify_job *j = verify_job_new(m, true);
    int result = j == NULL ? err_set(&mine, RS_ENOMEM, "no memory to compare fingerprints")
                           : staged_take(m, packet, j, &mine);
    if (result == 0)
        result = verify_start(m, j);
    else if (j != NULL)
        verify_job_free(j);
    if (result != 0)
        report(m, REFIT_EV_FAILED, result, err_text(&mine, result), 0);
}

void run_start(struct model *m, const struct refit_action *a)
{
    struct err e = {0};
    struct wire_header h = {.type = WIRE_START,
                            .model = m->id,
                            .epoch = m->run.epoch,
                            .attempt = a->attempt,
                            .version = a->version};
    const struct refit_version *v = refit_find_version(m->refit, a->version);
    uint32_t timeout_ms =
        v != NULL ? v->transfer_timeout_ms : m->service->config->transfer_timeout_ms;
    m->run.start =
        (struct link_request){.done = on_staged, .progress = on_progress, .patient = true};
    int r = link_submit(m->service->link, &m->run.start, h, NULL, 0, NULL, 0, NULL, 0,
                        timeout_ms > UINT32_MAX / 2 ? timeout_ms : timeout_ms + 5000, &e);
    if (r != 0)
        report(m, REFIT_EV_FAILED, r, err_text(&e, r), 0);
}

/* What a destination's receiving memory looks like now, for Apply and for the ledger's row. */
static int sums_keep(struct model *m, struct verify_job *j)
{
    struct buf row;
    buf_init(&row);
    for (uint32_t i = 0; j->mode == COMPARE_FULL && i < j->plan->program.n_places; i++) {
        struct lease *l = place_lease(m, j->plan, i);
        if (j->sums[i] == NULL || l == NULL)
            continue;
        const struct layout *layout = l->layout->layout;
        held_put(&row, layout->digest, l->rank, held_fold(j->sums[i], layout->n_tensors));
        mem_free(l->sums);
        l->sums = j->sums[i];
        l->sums_version = m->run.version;
        j->sums[i] = NULL;
    }
    int r = buf_error(&row);
    if (r == 0) {
        mem_free(m->fingerprints);
        m->fingerprints = row.n_bytes > 0 ? buf_steal(&row, &m->n_fingerprints_bytes) : NULL;
        if (m->fingerprints == NULL)
            m->n_fingerprints_bytes = 0;
    }
    buf_close(&row);
    return r;
}

static void staged(struct model *m, struct verify_job *j)
{
    if (sums_keep(m, j) != 0) {
        report(m, REFIT_EV_FAILED, RS_ENOMEM, "no memory to keep the fingerprints", 0);
        return;
    }
    j->progress.verified_ns = clock_mono_ns();
    report_bytes(m, REFIT_EV_STAGED, &j->progress);
    devices_give(m); /* no byte moves any more */
}

/* --- the end ------------------------------------------------------------------------------------ */

static void work_forget(struct model *m)
{
    link_forget(m->service->link, &m->run.prepare);
    link_forget(m->service->link, &m->run.start);
    if (m->run.planning != NULL)
        m->run.planning->model = NULL;
    if (m->run.verifying != NULL)
        m->run.verifying->model = NULL;
    m->run.planning = NULL;
    m->run.verifying = NULL;
    m->run.wants_devices = false;
}

static void quiesced(struct model *m)
{
    devices_give(m);
    report(m, REFIT_EV_QUIESCED, 0, "", 0);
}

static void on_quiesced(struct link_request *r, int code, struct wire_packet *packet,
                        const struct err *e)
{
    struct model *m = container_of(r, struct model, run.abort);
    (void)packet;
    (void)e;
    if (code == 0)
        quiesced(m);
    else if (code != RS_EPEER && code != RS_EDEADLINE && code != RS_ECANCELED)
        link_kill(m->service->link,
                  "it could not abort an attempt"); /* its death proves that all is quiet */
}

void run_abort(struct model *m, const struct refit_action *a)
{
    struct err e = {0};
    struct wire_header h = {.type = WIRE_ABORT,
                            .model = m->id,
                            .epoch = m->run.epoch,
                            .attempt = a->attempt,
                            .version = a->version};
    work_forget(m);
    if (a->attempt != m->run.id || !m->run.sent) { /* nothing of it has reached the data plane */
        quiesced(m);
        return;
    }
    if (link_state(m->service->link) != LINK_READY)
        return; /* it is dying: NODE_LOST comes */
    m->run.abort = (struct link_request){.done = on_quiesced};
    int r = link_submit(m->service->link, &m->run.abort, h, NULL, 0, NULL, 0, NULL, 0,
                        m->service->config->quiesce_timeout_ms * 2, &e);
    if (r != 0)
        link_kill(m->service->link, err_text(&e, r));
}

void run_expel(struct model *m, const struct refit_action *a)
{
    (void)a;
    log_warn("model %s version %" PRIu64 " attempt %" PRIu64
             ": the data plane has not quiesced in time",
             m->name, m->run.version, m->run.id);
    link_kill(m->service->link, "it did not quiesce in time");
}

void run_end(struct model *m)
{
    work_forget(m);
    link_forget(m->service->link, &m->run.abort);
    devices_give(m);
    plan_entry_unref(m->run.plan);
    mem_free(m->fingerprints);
    m->fingerprints = NULL;
    m->n_fingerprints_bytes = 0;
    m->run = (struct run){0};
}
