/* PLAN and PREPARE of this node's part. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/mem.h"
#include "exec/skips.h"
#include "service/comm.h"
#include "service/part.h"
#include "service/share.h"

#include "base/banned.h"

/* --- what came with the order -------------------------------------------------------------------- */

void prepare_free(struct prepare *o)
{
    if (o == NULL)
        return;
    attempt_input_free(o->input);
    mem_free(o->peers);
    landed_free(o->landed, o->n_landed);
    mem_free(o);
}

struct prepare *prepare_copy(const struct node_order *from)
{
    struct prepare *o = mem_zalloc(sizeof *o);
    if (o == NULL)
        return NULL;
    o->version = from->version;
    o->attempt = from->attempt;
    o->epoch = from->epoch;
    o->content = from->content;
    o->deadline_ns = from->deadline_ns;
    o->transfer_timeout_ms = from->transfer_timeout_ms;
    o->has_comm_id = from->has_comm_id;
    memcpy(o->comm_id, from->comm_id, sizeof o->comm_id);
    o->shrink = from->shrink;
    memcpy(o->plan_digest, from->plan_digest, sizeof o->plan_digest);
    memcpy(o->input_digests, from->input_digests, sizeof o->input_digests);
    o->input = attempt_input_copy(from->input);
    o->peers = mem_calloc(from->n_peers, sizeof *o->peers);
    o->landed = landed_copy(from->landed, from->n_landed);
    o->n_landed = o->landed != NULL ? from->n_landed : 0;
    if (o->input == NULL || o->peers == NULL || o->landed == NULL) {
        prepare_free(o);
        return NULL;
    }
    o->n_peers = from->n_peers;
    if (o->n_peers > 0)
        memcpy(o->peers, from->peers, o->n_peers * sizeof *o->peers);
    return o;
}

/* --- layouts ------------------------------------------------------------------------------------ */

/* Layouts that are not here come from the coordinator, one after the other. Those that have come are held until the plan
 * has them. */
struct layout_fetch {
    struct part *part; /* NULL: nobody waits any more */
    struct layout_entry *held[1 + REFIT_MAX_LAYOUTS];
    uint32_t n_held;
    uint8_t digest[16]; /* that is on its way */
};

static void fetch_free(struct layout_fetch *f)
{
    for (uint32_t i = 0; i < f->n_held; i++)
        layout_entry_unref(f->held[i]);
    mem_free(f);
}

static void plan_begin(struct part *p);

/* The next one that is not here; NULL: all are. */
static const uint8_t *layout_missing(const struct part *p)
{
    struct layouts *layouts = &p->model->service->layouts;
    const struct attempt_input *in = p->now->input;
    if (layouts_find(layouts, in->source) == NULL)
        return in->source;
    for (uint32_t i = 0; i < in->n_destinations; i++)
        if (layouts_find(layouts, in->destinations[i]) == NULL)
            return in->destinations[i];
    return NULL;
}

static void fetch_next(struct part *p);

static int fetched(struct layout_fetch *f, struct layout *layout, struct err *e)
{
    struct layout_entry *entry;
    int r = layouts_add(&f->part->model->service->layouts, layout, &entry, e);
    if (r == 0)
        f->held[f->n_held++] = layout_entry_ref(entry);
    return r;
}

static void on_fetched(void *arg, int code, const char *text, struct layout *layout)
{
    struct layout_fetch *f = arg;
    struct part *p = f->part;
    struct err e = {0};
    if (p == NULL) {
        layout_free(layout);
        fetch_free(f);
        return;
    }
    if (code != 0)
        (void)err_set(&e, code, "%s", text);
    else if (memcmp(layout->digest, f->digest, sizeof f->digest) != 0) {
        code = err_set(&e, RS_EPROTO, "the coordinator gave another layout than was asked for");
        layout_free(layout);
    } else
        code = fetched(f, layout, &e);
    if (code == 0) {
        fetch_next(p);
        return;
    }
    p->fetch = NULL;
    fetch_free(f);
    part_answer(p, MEMBER_EV_PLANNED, code, err_text(&e, code), NULL);
}

static void fetch_next(struct part *p)
{
    struct service *s = p->model->service;
    struct layout_fetch *f = p->fetch;
    const uint8_t *missing = layout_missing(p);
    if (missing != NULL && s->peer != NULL && s->coordinator == NULL &&
        f->n_held < sizeof f->held / sizeof *f->held) {
        memcpy(f->digest, missing, sizeof f->digest);
        peer_fetch_layout(s->peer, f->digest, on_fetched, f);
        return;
    }
    p->fetch = NULL;
    plan_begin(p); /* says which one is missing, where one is */
    fetch_free(f);
}

/* --- plan --------------------------------------------------------------------------------------- */

/* Our own workers that take part. */
static int share_make(struct part *p, struct share *ret, struct err *e)
{
    const struct service *s = p->model->service;
    const struct attempt_input *in = p->now->input;
    struct lease **leases = mem_calloc(in->n_participants, sizeof(struct lease *));
    size_t n = 0;
    int r = leases == NULL ? err_set(e, RS_ENOMEM, "no memory to plan") : 0;
    for (uint32_t i = 0; r == 0 && i < in->n_participants; i++) {
        if (in->participants[i].node != s->node)
            continue;
        leases[n] = lease_find(p->model->service, in->participants[i].worker);
        if (leases[n] == NULL || !leases[n]->bound)
            r = err_set(e, RS_EABORTED, "a worker that takes part has just gone");
        n++;
    }
    if (r == 0)
        r = share_collect(leases, n, ret, e);
    mem_free(leases);
    return r;
}

/* One of our destination workers is a source of it. */
static bool is_fed(const struct part *p)
{
    const struct attempt_input *in = p->now->input;
    for (uint32_t i = 0; i < in->n_participants && in->participants[i].layout == 0; i++) {
        const struct lease *l = lease_find(p->model->service, in->participants[i].worker);
        if (l != NULL && l->side == REFIT_DESTINATION)
            return true;
    }
    return false;
}

static void on_planned(void *arg, int code, struct plan_entry *entry, const struct err *e)
{
    struct part *p = arg;
    struct model *m = p->model;
    char text[128];
    uint64_t mine[ATTEMPT_PARTS];
    p->planning = NULL;
    if (code != 0) {
        part_answer(p, MEMBER_EV_PLANNED, code, err_text(e, code), NULL);
        return;
    }
    p->plan = entry;
    if (!is_fed(p)) { /* the trainer's next one will be as the last of its own */
        plan_entry_unref(m->last_plan);
        m->last_plan = plan_entry_ref(entry);
    }
    attempt_input_digest(p->now->input, mine);
    (void)snprintf(text, sizeof text, "what differs is %s",
                   attempt_input_difference(mine, p->now->input_digests));
    part_answer(p, MEMBER_EV_PLANNED, 0, text, plan_totals(entry->plan)->digest);
}

static void plan_begin(struct part *p)
{
    struct err e = {0};
    struct share share;
    int r = share_make(p, &share, &e);
    if (r == 0)
        r = planning_start(p->model->service, p->now->input, &share, on_planned, p, &p->planning,
                           &e);
    if (r != 0)
        part_answer(p, MEMBER_EV_PLANNED, r, err_text(&e, r), NULL);
}

void part_plan(struct part *p)
{
    if (layout_missing(p) == NULL) {
        plan_begin(p);
        return;
    }
    p->fetch = mem_zalloc(sizeof *p->fetch);
    if (p->fetch == NULL) {
        part_answer(p, MEMBER_EV_PLANNED, RS_ENOMEM, "no memory to fetch a layout", NULL);
        return;
    }
    p->fetch->part = p;
    fetch_next(p);
}

/* --- what others hold --------------------------------------------------------------------------- */

/* What this node need not send: every node's program follows from the plan, so nobody has to say it. */
struct skips_job {
    uv_work_t work;
    struct part *part; /* NULL: nobody waits any more */
    struct service *service;
    struct plan_entry *plan;
    struct attempt_input *input;
    struct attempt_landed *landed;
    uint32_t n_landed;
    struct buf skips;
    int code;
    struct err err;
};

static bool node_holds(const struct attempt_input *in, const struct attempt_landed *landed,
                       uint32_t n_landed, uint32_t node)
{
    if (landed_of(landed, n_landed, node) != NULL)
        return true;
    for (uint32_t i = 0; i < in->n_participants; i++)
        if (in->participants[i].held && in->participants[i].node == node)
            return true;
    return false;
}

static bool others_hold(const struct part *p)
{
    const struct prepare *o = p->now;
    for (uint32_t i = 0; i < o->input->topology->n_nodes; i++)
        if (o->input->nodes[i] != p->model->service->node &&
            node_holds(o->input, o->landed, o->n_landed, o->input->nodes[i]))
            return true;
    return false;
}

/* A byte per hold of the program: its place is a worker that holds the content, or this much of it had landed before. */
static uint8_t *held_table(const struct program *p, const struct attempt_input *in,
                           const struct attempt_landed *landed)
{
    uint8_t *held = mem_calloc(p->n_holds, 1);
    for (uint32_t i = 0; held != NULL && i < p->n_holds; i++) {
        const struct program_place *x = &p->places[program_hold(p, i).place];
        const struct participant *who =
            x->side == PROGRAM_DESTINATION ? attempt_input_find(in, 1 + x->layout, x->rank) : NULL;
        held[i] = who != NULL && (who->held || (landed != NULL && landed_bit(landed, i)));
    }
    return held;
}

static int node_skips(struct skips_job *j, uint32_t node)
{
    struct program program;
    struct buf b;
    buf_init(&b);
    int r = plan_program(j->plan->plan, node, &b, &j->err);
    if (r == 0 && buf_error(&b) != 0)
        r = err_set(&j->err, RS_ENOMEM, "no memory for the program of another node");
    if (r == 0)
        r = program_open(b.data, b.n_bytes, &program, &j->err);
    const struct attempt_landed *landed = landed_of(j->landed, j->n_landed, j->input->nodes[node]);
    if (r == 0 && landed != NULL && landed->n_bytes != landed_bytes(program.n_holds))
        r = err_set(&j->err, RS_EPROTO, "node %u says of %u holds what had landed; it has %u",
                    landed->node, landed->n_bytes * 8, program.n_holds);
    uint8_t *held = r == 0 ? held_table(&program, j->input, landed) : NULL;
    if (r == 0 && (held == NULL || skips_encode(&program, held, &j->skips) != 0))
        r = err_set(&j->err, RS_ENOMEM, "no memory for what other nodes hold");
    mem_free(held);
    buf_close(&b);
    return r;
}

static void skips_work(uv_work_t *work)
{
    struct skips_job *j = container_of(work, struct skips_job, work);
    for (uint32_t i = 0; j->code == 0 && i < j->input->topology->n_nodes; i++)
        if (i != j->plan->node && node_holds(j->input, j->landed, j->n_landed, j->input->nodes[i]))
            j->code = node_skips(j, i);
}

static void prepare_send(struct part *p, const struct buf *skips);

static void skips_free(struct skips_job *j)
{
    plan_entry_unref(j->plan);
    attempt_input_free(j->input);
    landed_free(j->landed, j->n_landed);
    buf_close(&j->skips);
    mem_free(j);
}

static void skips_done(uv_work_t *work, int status)
{
    struct skips_job *j = container_of(work, struct skips_job, work);
    struct service *s = j->service;
    struct part *p = j->part;
    if (status != 0)
        j->code = RS_ECANCELED;
    if (p != NULL) {
        p->skipping = NULL;
        if (j->code == 0)
            prepare_send(p, &j->skips);
        else
            part_answer(p, MEMBER_EV_MADE_READY, j->code, err_text(&j->err, j->code), NULL);
    }
    skips_free(j);
    s->n_jobs--;
    service_stop_if_idle(s);
}

static int skips_start(struct part *p)
{
    struct service *s = p->model->service;
    struct skips_job *j = mem_zalloc(sizeof *j);
    if (j == NULL)
        return RS_ENOMEM;
    j->part = p;
    j->service = s;
    j->plan = plan_entry_ref(p->plan);
    j->input = attempt_input_copy(p->now->input);
    j->landed = landed_copy(p->now->landed, p->now->n_landed);
    j->n_landed = j->landed != NULL ? p->now->n_landed : 0;
    buf_init(&j->skips);
    if (j->input == NULL || j->landed == NULL ||
        uv_queue_work(s->loop, &j->work, skips_work, skips_done) != 0) {
        skips_free(j);
        return RS_ENOMEM;
    }
    s->n_jobs++;
    p->skipping = j;
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
    struct part *p = container_of(r, struct part, prepare);
    struct err mine = {0};
    if (code != 0) {
        part_link_failed(p, MEMBER_EV_MADE_READY, code, packet, e);
        return;
    }
    code = part_sources_take(p, packet, &mine);
    part_answer(p, MEMBER_EV_MADE_READY, code, code != 0 ? err_text(&mine, code) : "", NULL);
}

/* What a destination worker feeds from is as the coordinator says. */
static enum wire_memory place_memory(const struct part *p, const struct program_place *place,
                                     const struct lease *l)
{
    if (place->side == PROGRAM_DESTINATION)
        return part_receiving(l);
    const struct participant *x = attempt_input_find(p->now->input, 0, place->rank);
    return x != NULL && x->shadow ? WIRE_SHADOW : WIRE_LIVE;
}

/* Per place its worker and memory; false: a worker has gone meanwhile (the coordinator knows already). */
static bool places_fill(const struct part *p, struct wire_place *places)
{
    const struct program *program = &p->plan->program;
    for (uint32_t i = 0; i < program->n_places; i++) {
        const struct lease *l = part_place_lease(p, i);
        places[i] = (struct wire_place){0};
        if (program->places[i].side == PROGRAM_SCRATCH)
            continue;
        if (l == NULL || !l->bound)
            return false;
        places[i].worker = l->id;
        places[i].memory = place_memory(p, &program->places[i], l);
    }
    return true;
}

static uint32_t peer_index(const struct prepare *o, uint32_t node)
{
    for (uint32_t i = 0; i < o->n_peers; i++)
        if (o->peers[i].node == node)
            return i;
    return UINT32_MAX;
}

/* struct wire_peers and what follows it. */
static int peers_encode(const struct part *p, struct buf *out)
{
    const struct prepare *o = p->now;
    const struct topology *t = o->input->topology;
    struct wire_peers head = {.n_peers = o->n_peers, .n_devices = t->n_devices};
    buf_put(out, &head, sizeof head);
    for (uint32_t i = 0; i < o->n_peers; i++) {
        struct wire_peer x = {.port = o->peers[i].port};
        uint32_t node = attempt_input_node(o->input, o->peers[i].node);
        (void)snprintf(x.address, sizeof x.address, "%s", o->peers[i].address);
        (void)snprintf(x.name, sizeof x.name, "%s", node == UINT32_MAX ? "" : t->nodes[node]);
        memcpy(x.token, o->peers[i].token, sizeof x.token);
        buf_put(out, &x, sizeof x);
    }
    for (uint32_t i = 0; i < t->n_devices; i++) {
        uint32_t peer = peer_index(o, o->input->nodes[t->devices[i].node]);
        buf_put(out, &peer, sizeof peer);
    }
    return buf_error(out);
}

/* The descriptors of PREPARE, in its order; those from the third on are the caller's to close. */
struct prepare_fds {
    int fds[WIRE_MAX_FDS];
    uint32_t n;
};

static int fd_add(struct prepare_fds *x, const char *name, const void *data, size_t n_bytes,
                  struct err *e)
{
    int fd = wire_memfd(name, data, n_bytes, e);
    if (fd < 0)
        return fd;
    x->fds[x->n++] = fd;
    return 0;
}

static int held_add(const struct part *p, struct prepare_fds *x, struct err *e)
{
    const struct program *program = &p->plan->program;
    uint8_t *held =
        held_table(program, p->now->input,
                   landed_of(p->now->landed, p->now->n_landed, p->model->service->node));
    if (held == NULL)
        return err_set(e, RS_ENOMEM, "no memory to prepare");
    int r = fd_add(x, "reshard-held", held, program->n_holds, e);
    mem_free(held);
    return r;
}

static int peers_add(const struct part *p, struct prepare_fds *x, struct err *e)
{
    struct buf b;
    buf_init(&b);
    int r = peers_encode(p, &b) != 0 ? err_set(e, RS_ENOMEM, "no memory to prepare")
                                     : fd_add(x, "reshard-peers", b.data, b.n_bytes, e);
    buf_close(&b);
    return r;
}

static int comm_add(const struct part *p, struct prepare_fds *x, struct err *e)
{
    struct buf b;
    buf_init(&b);
    int r = comm_encode(p->now, &b) != 0 ? err_set(e, RS_ENOMEM, "no memory to prepare")
                                         : fd_add(x, "reshard-comm", b.data, b.n_bytes, e);
    buf_close(&b);
    return r;
}

static int fds_make(const struct part *p, const struct buf *skips, struct wire_prepare *body,
                    struct prepare_fds *x, struct err *e)
{
    int r = 0;
    x->fds[x->n++] = p->plan->program_fd;
    x->fds[x->n++] = p->plan->tensors_fd;
    body->has_held =
        node_holds(p->now->input, p->now->landed, p->now->n_landed, p->model->service->node);
    body->has_peers = p->now->n_peers > 0;
    body->has_skips = skips != NULL && skips->n_bytes > 0;
    if (body->has_held)
        r = held_add(p, x, e);
    if (r == 0 && body->has_peers)
        r = peers_add(p, x, e);
    if (r == 0 && body->has_skips)
        r = fd_add(x, "reshard-skips", skips->data, skips->n_bytes, e);
    body->has_comm = p->now->has_comm_id;
    if (r == 0 && p->now->has_comm_id)
        r = comm_add(p, x, e);
    return r;
}

static int prepare_submit(struct part *p, struct wire_place *places, const struct buf *skips,
                          struct err *e)
{
    struct service *s = p->model->service;
    const struct prepare *o = p->now;
    uint32_t n_places = p->plan->program.n_places;
    struct prepare_fds x = {.n = 0};
    struct wire_prepare body = {.deadline_ns = o->deadline_ns,
                                .n_places = n_places,
                                .verify = o->input->verify,
                                .n_layouts = p->plan->n_destinations};
    struct wire_header h = {.type = WIRE_PREPARE,
                            .model = p->model->id,
                            .epoch = o->epoch,
                            .attempt = o->attempt,
                            .version = o->version};
    int r = places_fill(p, places)
                ? fds_make(p, skips, &body, &x, e)
                : err_set(e, RS_EABORTED, "a worker that takes part has just gone");
    p->prepare = (struct link_request){.done = on_prepared, .patient = true};
    if (r == 0)
        r = link_submit(s->link, &p->prepare, h, &body, sizeof body, places,
                        n_places * sizeof *places, x.fds, x.n, ms_until(o->deadline_ns) + 1000, e);
    p->sent = r == 0;
    crash_point(CRASH_PREPARE_SENT);
    for (uint32_t i = 2; i < x.n; i++)
        (void)close(x.fds[i]);
    return r;
}

static void prepare_send(struct part *p, const struct buf *skips)
{
    struct err e = {0};
    struct wire_place *places = mem_calloc(p->plan->program.n_places, sizeof *places);
    int r = places == NULL ? err_set(&e, RS_ENOMEM, "no memory to prepare")
                           : prepare_submit(p, places, skips, &e);
    mem_free(places);
    if (r != 0)
        part_answer(p, MEMBER_EV_MADE_READY, r, err_text(&e, r), NULL);
}

void part_prepare(struct part *p)
{
    struct err e = {0};
    int r;
    if (p->plan->node == PLAN_NO_NODE)
        r = err_set(&e, RS_EPROTO, "PREPARE, but no worker of this node takes part");
    else if ((r = part_landed_check(p, &e)) == 0)
        r = part_feeders_check(p, &e);
    if (r == 0)
        part_prepare_checked(p);
    else if (r < 0)
        part_answer(p, MEMBER_EV_MADE_READY, r, err_text(&e, r), NULL);
}

void part_prepare_checked(struct part *p)
{
    if (!others_hold(p))
        prepare_send(p, NULL);
    else if (skips_start(p) != 0)
        part_answer(p, MEMBER_EV_MADE_READY, RS_ENOMEM, "no memory for what other nodes hold",
                    NULL);
}

void part_prepare_forget(struct part *p)
{
    link_forget(p->model->service->link, &p->prepare);
    part_feeders_forget(p);
    planning_forget(p->planning);
    if (p->fetch != NULL)
        p->fetch->part = NULL; /* freed when its layout has come */
    if (p->skipping != NULL)
        p->skipping->part = NULL;
    p->planning = NULL;
    p->fetch = NULL;
    p->skipping = NULL;
}
