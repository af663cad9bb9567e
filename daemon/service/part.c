#include "service/part.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/log.h"
#include "base/mem.h"
#include "service/blame.h"
#include "service/cells_sum.h"
#include "service/peers.h"

#include "base/banned.h"

/* --- reports ------------------------------------------------------------------------------------ */

static void tell(struct part *p, struct node_report *r)
{
    r->type = NODE_REPORT_EVENT;
    r->model = p->model->name;
    if (r->event.node.text == NULL)
        r->event.node.text = "";
    (void)node_tell(p->model->service, r); /* without a session nobody is to be told */
}

static void bytes_fill(struct refit_event *ev, const struct wire_progress *p)
{
    ev->node.bytes = (struct refit_bytes){.landed = p->done_bytes,
                                          .network = p->network_bytes,
                                          .domain = p->domain_bytes,
                                          .device = p->device_bytes,
                                          .skipped = p->skipped_bytes,
                                          .total = p->total_bytes};
    ev->node.first_byte_ns = p->first_byte_ns;
    ev->node.last_byte_ns = p->last_byte_ns;
    ev->node.sources_read_ns = p->sources_read_ns;
    ev->node.verified_ns = p->verified_ns;
}

void part_cells_tell(const struct part *p, uint64_t attempt, const struct cell_print *cells,
                     uint32_t n)
{
    for (uint32_t i = 0; i < n; i += NODE_PAGE_CELLS) {
        uint32_t left = n - i;
        struct node_report r = {.type = NODE_REPORT_CELLS,
                                .model = p->model->name,
                                .attempt = attempt,
                                .cells = cells + i,
                                .n_cells = left < NODE_PAGE_CELLS ? left : NODE_PAGE_CELLS};
        (void)node_tell(p->model->service,
                        &r); /* one that is lost ends the session: none follows it */
    }
}

static void cells_tell_short(const struct part *p, uint64_t attempt)
{
    for (uint32_t i = 0; i < p->n_cells;) {
        struct node_report r = {.type = NODE_REPORT_CELL_SUM,
                                .model = p->model->name,
                                .attempt = attempt,
                                .runs = p->runs};
        i += cells_sum(p->cells + i, p->n_cells - i, p->runs, p->n_runs, &r.n_runs, r.digest);
        (void)node_tell(p->model->service, &r); /* as there */
    }
}

/* One by one only once, since a repeated STAGED finds them merged. */
static void cells_tell(struct part *p, uint64_t attempt)
{
    if (p->runs != NULL) {
        cells_tell_short(p, attempt);
        return;
    }
    part_cells_tell(p, attempt, p->cells, p->n_cells);
    mem_free(p->cells);
    p->cells = NULL;
    p->n_cells = 0;
}

static void report(struct part *p, const struct member_action *a)
{
    static const enum refit_event_type events[] = {
        [MEMBER_REPORT_PREPARED] = REFIT_EV_PREPARED, [MEMBER_REPORT_PROGRESS] = REFIT_EV_PROGRESS,
        [MEMBER_REPORT_STAGED] = REFIT_EV_STAGED,     [MEMBER_REPORT_FAILED] = REFIT_EV_FAILED,
        [MEMBER_REPORT_QUIESCED] = REFIT_EV_QUIESCED,
    };
    struct node_report r = {.event = {.type = events[a->report],
                                      .node = {.node = p->model->service->node,
                                               .attempt = a->attempt,
                                               .code = a->code,
                                               .text = a->text}}};
    if (a->session != p->model->service->session)
        return; /* its session has ended while this was on its way */
    if (a->report == MEMBER_REPORT_PROGRESS || a->report == MEMBER_REPORT_STAGED)
        bytes_fill(&r.event, &p->progress);
    r.event.node.sources_known = a->report == MEMBER_REPORT_PROGRESS && p->sources_told;
    if (a->report == MEMBER_REPORT_FAILED) {
        r.event.node.worker = p->blamed;
        p->blamed = 0;
    }
    if (a->report == MEMBER_REPORT_STAGED) {
        r.folds = p->folds;
        r.n_folds = p->n_folds;
        cells_tell(p, a->attempt);
    }
    if (a->report == MEMBER_REPORT_QUIESCED && p->landed.attempt == a->attempt) {
        r.landed = p->landed.holds;
        r.n_landed_bytes = p->landed.n_bytes;
    }
    tell(p, &r);
    if (a->report == MEMBER_REPORT_STAGED)
        crash_point(CRASH_STAGED_TOLD);
}

/* --- actions ------------------------------------------------------------------------------------ */

static void clear(struct part *p)
{
    part_prepare_forget(p);
    part_start_forget(p);
    part_sources_forget(p);
    link_forget(p->model->service->link, &p->abort);
    plan_entry_unref(p->plan);
    prepare_free(p->now);
    mem_free(p->folds);
    mem_free(p->cells);
    mem_free(p->runs);
    p->plan = NULL;
    p->now = NULL;
    p->folds = NULL;
    p->cells = NULL;
    p->runs = NULL;
    p->n_folds = p->n_cells = p->n_runs = 0;
    p->sent = false;
    p->blamed = 0;
    p->progress = (struct wire_progress){0};
}

static void plan(struct part *p, uint64_t attempt)
{
    rs_assert(p->next != NULL && p->next->attempt == attempt && p->now == NULL);
    p->now = p->next;
    p->next = NULL;
    part_plan(p);
}

static void on_deadline(uv_timer_t *t);

static void deadline_set(struct part *p, uint64_t at_ns)
{
    uint64_t now = clock_mono_ns();
    if (at_ns == MEMBER_NEVER) {
        (void)uv_timer_stop(&p->deadline);
        return;
    }
    uv_update_time(p->model->service->loop);
    (void)uv_timer_start(&p->deadline, on_deadline, at_ns > now ? (at_ns - now) / 1000000 + 1 : 0,
                         0);
}

static void kill_data_plane(struct part *p)
{
    log_warn("model %s version %" PRIu64 " attempt %" PRIu64
             ": the data plane has not let go in time",
             p->model->name, p->member.version, p->member.attempt);
    link_kill(p->model->service->link, "it did not quiesce in time");
}

static void action_do(struct part *p, const struct member_action *a)
{
    switch (a->type) {
    case MEMBER_DO_PLAN:
        plan(p, a->attempt);
        break;
    case MEMBER_DO_PREPARE:
        part_prepare(p);
        break;
    case MEMBER_DO_START:
        part_start(p);
        break;
    case MEMBER_DO_ABORT:
        part_prepare_forget(p);
        part_start_forget(p);
        part_abort(p);
        break;
    case MEMBER_DO_KILL:
        kill_data_plane(p);
        break;
    case MEMBER_DO_END:
        clear(p);
        break;
    case MEMBER_DO_REPORT:
        report(p, a);
        break;
    case MEMBER_DO_SET_DEADLINE:
        deadline_set(p, a->at_ns);
        break;
    }
}

/* --- events ------------------------------------------------------------------------------------- */

static void step(struct part *p, struct member_event *ev)
{
    struct member_update u;
    ev->now_ns = clock_mono_ns();
    member_step(&p->member, ev, &u);
    for (size_t i = 0; i < u.n_actions; i++)
        action_do(p, &u.actions[i]);
}

/* Orders and answers that come of an action wait for its step's end. */
static void pending_add(struct part *p, const struct member_event *ev)
{
    rs_assert(p->n_pending < PART_MOST_PENDING); /* an attempt has few events in one turn */
    struct part_pending *x = &p->pending[p->n_pending++];
    x->ev = *ev;
    (void)snprintf(x->text, sizeof x->text, "%s", ev->text != NULL ? ev->text : "");
    x->ev.text = ev->text != NULL ? x->text : NULL;
    if (ev->digest != NULL) {
        memcpy(x->digest, ev->digest, sizeof x->digest);
        x->ev.digest = x->digest;
    }
}

static bool pending_take(struct part *p, struct part_pending *ret)
{
    if (p->n_pending == 0)
        return false;
    *ret = p->pending[0];
    if (ret->ev.text != NULL)
        ret->ev.text = ret->text;
    if (ret->ev.digest != NULL)
        ret->ev.digest = ret->digest;
    p->n_pending--;
    for (unsigned i = 0; i < p->n_pending; i++) {
        p->pending[i] = p->pending[i + 1];
        if (p->pending[i].ev.text != NULL)
            p->pending[i].ev.text = p->pending[i].text;
        if (p->pending[i].ev.digest != NULL)
            p->pending[i].ev.digest = p->pending[i].digest;
    }
    return true;
}

static void event_give(struct part *p, struct member_event *ev)
{
    struct part_pending next;
    if (p->stepping) {
        pending_add(p, ev);
        return;
    }
    p->stepping = true;
    step(p, ev);
    while (pending_take(p, &next))
        step(p, &next.ev);
    p->stepping = false;
    leases_sweep(p->model->service);
    peers_quiet(p->model->service->peers);
}

static void on_deadline(uv_timer_t *t)
{
    struct part *p = t->data;
    struct member_event ev = {.type = MEMBER_EV_TICK};
    link_look(p->model->service->link); /* it may have quiesced while this loop stood still */
    event_give(p, &ev);
}

void part_answer(struct part *p, enum member_event_type type, int code, const char *text,
                 const uint8_t *digest)
{
    struct member_event ev = {
        .type = type, .attempt = p->member.attempt, .code = code, .text = text, .digest = digest};
    event_give(p, &ev);
}

void part_joined(struct part *p)
{
    const struct service *s = p->model->service;
    struct member_event ev = {
        .type = MEMBER_EV_JOINED, .session = s->session, .coordinator = s->coordinator_incarnation};
    event_give(p, &ev);
}

void part_broken(struct part *p, const char *why)
{
    struct member_event ev = {.type = MEMBER_EV_BROKEN, .text = why};
    event_give(p, &ev);
}

void part_data_plane(struct part *p, bool up, const char *why)
{
    struct member_event ev = {.type = up ? MEMBER_EV_DATA_PLANE_UP : MEMBER_EV_DATA_PLANE_DEAD,
                              .data_plane = up ? link_child(p->model->service->link) : 0,
                              .text = why};
    if (!up)
        p->sent = false;
    event_give(p, &ev);
}

static void order_refuse(struct part *p, const struct node_order *o, int code, const char *text)
{
    struct node_report r = {.event = {.type = REFIT_EV_FAILED,
                                      .node = {.attempt = o->attempt, .code = code, .text = text}}};
    tell(p, &r);
}

static bool prepare_take(struct part *p, const struct node_order *o)
{
    struct err e = {0};
    int r = attempt_input_check(o->input, &e);
    struct prepare *next = r == 0 ? prepare_copy(o) : NULL;
    if (r == 0 && next == NULL)
        r = err_set(&e, RS_ENOMEM, "no memory to prepare");
    if (r != 0) {
        order_refuse(p, o, r, err_text(&e, r));
        return false;
    }
    prepare_free(p->next);
    p->next = next;
    return true;
}

static void one_by_one(struct part *p)
{
    mem_free(p->runs);
    p->runs = NULL;
    p->n_runs = 0;
}

void part_order(struct part *p, const struct node_order *o)
{
    static const enum member_event_type events[] = {
        [NODE_ORDER_PREPARE] = MEMBER_EV_PREPARE, [NODE_ORDER_START] = MEMBER_EV_START,
        [NODE_ORDER_ABORT] = MEMBER_EV_ABORT,     [NODE_ORDER_END] = MEMBER_EV_END,
        [NODE_ORDER_EXPEL] = MEMBER_EV_EXPEL,     [NODE_ORDER_CELLS] = MEMBER_EV_START,
    };
    struct member_event ev = {.type = events[o->type],
                              .session = p->model->service->session,
                              .version = o->version,
                              .attempt = o->attempt,
                              .epoch = o->epoch,
                              .data_plane = o->data_plane,
                              .text = o->text,
                              .digest = o->plan_digest};
    if (o->type == NODE_ORDER_CELLS && p->member.attempt == o->attempt)
        one_by_one(p); /* with the STAGED that a repeated START is answered */
    if (o->type != NODE_ORDER_PREPARE || prepare_take(p, o))
        event_give(p, &ev);
}

/* --- questions ---------------------------------------------------------------------------------- */

bool part_is_quiet(const struct part *p)
{
    return member_quiet(&p->member);
}

bool part_uses(const struct part *p, const struct lease *l)
{
    if (member_quiet(&p->member) || p->now == NULL)
        return false;
    const struct attempt_input *in = p->now->input;
    for (uint32_t i = 0; i < in->n_participants; i++)
        if (in->participants[i].worker == l->id)
            return true;
    return false;
}

struct lease *part_place_lease(const struct part *p, uint32_t place)
{
    const struct program_place *x = &p->plan->program.places[place];
    if (x->side == PROGRAM_SCRATCH)
        return NULL;
    uint32_t layout = x->side == PROGRAM_SOURCE ? 0 : 1 + x->layout;
    const struct participant *who = attempt_input_find(p->now->input, layout, x->rank);
    return who != NULL ? lease_find(p->model->service, who->worker) : NULL;
}

enum wire_memory part_receiving(const struct lease *l)
{
    return l->receive == REFIT_STAGED_RECEIVE ? WIRE_SHADOW : WIRE_LIVE;
}

static uint64_t blamed_worker(const struct part *p, const struct wire_packet *packet)
{
    struct wire_failure f;
    if (packet == NULL || p->plan == NULL || packet->header.body_bytes < sizeof f)
        return 0;
    memcpy(&f, packet->body, sizeof f);
    const struct lease *l =
        f.place < p->plan->program.n_places ? part_place_lease(p, f.place) : NULL;
    return l != NULL && l->side == REFIT_DESTINATION ? l->id : 0;
}

void part_link_failed(struct part *p, enum member_event_type type, int code,
                      const struct wire_packet *packet, const struct err *e)
{
    struct err named = *e;
    if (code == RS_EPEER && packet == NULL)
        return; /* a dead data plane is told once for all */
    p->blamed = blamed_worker(p, packet);
    if (p->plan != NULL)
        blame_names(&named, p->plan->source->layout, p->plan);
    part_answer(p, type, code, err_text(&named, code), NULL);
}

/* --- life --------------------------------------------------------------------------------------- */

struct part *part_new(struct model *m)
{
    struct service *s = m->service;
    struct part *p = mem_zalloc(sizeof *p);
    if (p == NULL)
        return NULL;
    p->model = m;
    member_init(&p->member, m->name, s->config->quiesce_timeout_ms);
    rs_assert(uv_timer_init(s->loop, &p->deadline) == 0);
    p->deadline.data = p;
    s->n_handles++;
    if (s->node_up)
        part_data_plane(p, true, "");
    if (s->session != 0)
        part_joined(p);
    return p;
}

static void on_closed(uv_handle_t *h)
{
    struct part *p = h->data;
    struct service *s = p->model->service;
    mem_free(p->model->name);
    mem_free(p->model);
    mem_free(p);
    service_handle_closed(s);
}

void part_close(struct part *p)
{
    clear(p);
    link_forget(p->model->service->link, &p->comm);
    part_landed_clear(p);
    prepare_free(p->next);
    p->next = NULL;
    uv_close((uv_handle_t *)&p->deadline, on_closed);
}
