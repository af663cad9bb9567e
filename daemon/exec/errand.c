/* PUBLISH, CHECK and APPLY: passes over one worker's memory that belong to no attempt.
 *
 *   PUBLISH  [the worker's event is waited for,] [cells of a program,] then each piece of live memory is read
 *   CHECK    each piece of the named memory is read
 *   APPLY    each piece of the shadow is copied to live memory, its fingerprint taken on the way;
 *            then live memory is read and must give the same */
#include <string.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/mem.h"
#include "exec/prints.h"
#include "exec/proof.h"
#include "exec/pump.h"
#include "exec/scaled.h"

#include "base/banned.h"

enum errand_pass { PASS_CELLS, PASS_COPY, PASS_READ };
enum { ERRAND_CHUNK_BYTES = 4 << 20, EVENT_LOOK_NS = 500000 };

struct errand {
    struct queue link;
    struct plane *plane;
    struct worker *worker;
    struct wire_header request;
    struct pump pump;
    struct place live, shadow, read; /* read: the one that PASS_READ reads */
    enum errand_pass pass;
    uint32_t piece; /* cursor of PASS_COPY and PASS_READ */
    uint64_t at;    /* elements of the piece, or of the hold's cell */
    uint64_t *sums; /* [n_tensors] */
    uint64_t *copied;
    uint8_t *known; /* PUBLISH: tensors whose cells add up to their sum already */
    bool stopped;
    struct device_event
        *event; /* PUBLISH: read nothing before; NULL: there is none, or it has happened */
    uint64_t event_until_ns;
    uint32_t event_ms;
    /* PUBLISH with a program. */
    struct proof *proof;
    struct program program; /* the proof's */
    uint32_t hold, first_hold, end_hold;
    uint64_t *cell_prints;
};

static void errand_free(struct errand *x)
{
    struct plane *p = x->plane;
    struct worker *w = x->worker;
    device_event_free(x->event);
    mem_free(x->sums);
    mem_free(x->copied);
    mem_free(x->known);
    mem_free(x->cell_prints);
    queue_remove(&x->link);
    proof_put(p, x->proof);
    mem_free(x);
    if (w != NULL)
        worker_release(p, w);
}

static void errand_fail(struct errand *x, int code, struct err *e, uint32_t tensor)
{
    (void)err_prefix(e, code, "%s of worker %llx", wire_type_name(x->request.type),
                     (unsigned long long)x->request.worker);
    plane_fail(x->plane, &x->request, WIRE_FAILED, code, e, tensor, UINT32_MAX);
    errand_free(x);
}

/* --- passes ----------------------------------------------------------------------------------- */

/* Up to a chunk of the cursor's piece; moves the cursor. */
static int piece_part(struct errand *x, struct batch *b, uint64_t *budget)
{
    const struct binding *bind = x->worker->bindings[x->read.memory];
    if (x->pass == PASS_COPY)
        bind = x->worker->bindings[WIRE_SHADOW];
    const struct binding_piece row = binding_at(bind, x->piece), *piece = &row;
    uint8_t dtype = x->worker->dtypes[x->read.memory][piece->tensor];
    uint64_t n = box_elements(&piece->box), bytes = dtype_bytes(dtype);
    uint64_t end = x->at + (*budget / bytes > 0 ? *budget / bytes : 1);
    struct box boxes[2 * BOX_MAX_DIMS];
    int r = 0;
    end = end < n ? end : n;
    bool skip = x->known != NULL && x->known[piece->tensor] != 0;
    unsigned n_boxes = end > x->at && !skip ? box_range(&piece->box, x->at, end, boxes) : 0;
    const struct move_end to = {.place = &x->live};
    for (unsigned i = 0; i < n_boxes && r == 0; i++) {
        if (x->pass == PASS_READ)
            r = batch_print(b, &x->read, piece->tensor, &boxes[i], dtype, &x->sums[piece->tensor]);
        else
            r = batch_move(b, &(struct move){.tensor = piece->tensor,
                                             .box = boxes[i],
                                             .from = {.place = &x->shadow},
                                             .to = &to,
                                             .n_to = 1,
                                             .from_dtype = dtype,
                                             .to_dtype = dtype,
                                             .streaming = true,
                                             .fingerprint = &x->copied[piece->tensor]});
    }
    uint64_t used = (end - x->at) * bytes;
    *budget -= used < *budget ? used : *budget;
    x->at = end;
    if (skip || end == n) {
        x->piece++;
        x->at = 0;
    }
    return r;
}

static int cell_part(struct errand *x, struct batch *b, uint64_t *budget)
{
    struct program_hold h = program_hold(&x->program, x->hold);
    uint64_t n = program_cell_elements(&x->program, h.cell);
    int r = prints_cell(b, &x->plane->devices[x->worker->device].ways[0], &x->program, &x->live,
                        h.cell, &x->at, budget, &x->cell_prints[x->hold - x->first_hold]);
    if (x->at == n) {
        x->hold++;
        x->at = 0;
    }
    return r;
}

static bool pass_over(const struct errand *x)
{
    if (x->pass == PASS_CELLS)
        return x->hold == x->end_hold;
    unsigned memory = x->pass == PASS_COPY ? WIRE_SHADOW : x->read.memory;
    return x->piece == x->worker->bindings[memory]->n_pieces;
}

static int errand_fill(struct pump *pump, struct pump_ticket *t)
{
    struct errand *x = container_of(pump, struct errand, pump);
    struct batch b;
    uint64_t budget = ERRAND_CHUNK_BYTES;
    int r = 0;
    (void)t;
    if (pass_over(x) || x->event != NULL)
        return 0;
    batch_init(&b, *pump->stream, &x->plane->devices[x->worker->device].ways[0].check_work);
    while (r == 0 && budget > 0 && !pass_over(x))
        r = x->pass == PASS_CELLS ? cell_part(x, &b, &budget) : piece_part(x, &b, &budget);
    if (r == 0)
        r = batch_flush(&b);
    return r < 0 ? r : 1;
}

static void errand_landed(struct pump *pump, const struct pump_ticket *t)
{
    const struct errand *x = container_of(pump, struct errand, pump);
    (void)t;
    if (x->pass == PASS_COPY)
        crash_point(CRASH_APPLY_COPYING);
}

/* --- answers ---------------------------------------------------------------------------------- */

static enum wire_type answer_type(const struct errand *x)
{
    if (x->request.type == WIRE_PUBLISH)
        return WIRE_PUBLISHED;
    return x->request.type == WIRE_APPLY ? WIRE_APPLIED : WIRE_CHECKED;
}

static void keep_publication(struct errand *x)
{
    struct worker *w = x->worker;
    mem_free(w->published);
    mem_free(w->cell_prints);
    w->published = x->sums;
    w->published_version = x->request.version;
    w->cell_prints = x->cell_prints;
    w->n_cell_prints = x->end_hold - x->first_hold;
    memcpy(w->cell_digest, x->program.digest, sizeof(w->cell_digest));
    x->sums = NULL;
    x->cell_prints = NULL;
}

static void errand_finish(struct errand *x)
{
    uint32_t n = x->worker->n_tensors;
    for (uint32_t t = 0; x->copied != NULL && t < n; t++) {
        if (x->copied[t] == x->sums[t])
            continue;
        struct err e = {0};
        (void)err_set(&e, RS_EDATALOSS, "tensor %u of its layout: live memory differs from shadow",
                      t);
        errand_fail(x, RS_EDATALOSS, &e, t);
        return;
    }
    plane_answer_table(x->plane, &x->request, answer_type(x), NULL, 0, x->sums, n);
    if (x->request.type == WIRE_PUBLISH)
        keep_publication(x);
    errand_free(x);
}

/* Where a tensor's cells are all in its own dtype and cover all of the worker's part, their sum is
 * the tensor's; it need not be read again. */
static int sum_cells(struct errand *x)
{
    uint64_t *elements = mem_calloc(x->worker->n_tensors, sizeof(*elements));
    if (elements == NULL)
        return RS_ENOMEM;
    for (uint32_t i = x->first_hold; i < x->end_hold; i++) {
        struct program_cell c = program_hold_cell(&x->program, i);
        const struct program_tensor *t = &x->program.tensors[c.tensor];
        if (!program_unchanged(t, c.wire))
            continue;
        elements[t->index] += program_cell_elements(&x->program, program_hold(&x->program, i).cell);
        x->sums[t->index] += x->cell_prints[i - x->first_hold];
    }
    const struct binding *b = x->worker->bindings[WIRE_LIVE];
    for (uint32_t t = 0; t < x->worker->n_tensors; t++) {
        x->known[t] = binding_elements(b, t) == elements[t];
        if (!x->known[t])
            x->sums[t] = 0;
    }
    mem_free(elements);
    return 0;
}

static void errand_idle(struct pump *pump)
{
    struct errand *x = container_of(pump, struct errand, pump);
    struct err e = {0};
    int status = pump->status;
    if (status == 0 && x->stopped)
        status = plane_lease_holds(x->plane) ? RS_ECANCELED : RS_EDEADLINE;
    if (status == 0 && (!pass_over(x) || x->event != NULL))
        return; /* the lease is out: errands_stop follows; or the event: errands_look */
    if (status == 0 && x->pass == PASS_CELLS)
        status = sum_cells(x);
    if (status != 0) {
        errand_fail(x, err_set(&e, status, "%s", err_name(status)), &e, UINT32_MAX);
        return;
    }
    if (x->pass == PASS_READ) {
        errand_finish(x);
        return;
    }
    x->pass = PASS_READ;
    x->piece = 0;
    x->at = 0;
    pump_run(pump);
}

/* --- beginning -------------------------------------------------------------------------------- */

static int open_program(struct errand *x, const struct wire_packet *packet, uint32_t place,
                        struct err *e)
{
    int r = proof_get(x->plane, packet->fds[0], -1, 0, &x->proof, e);
    if (r < 0)
        return r;
    x->program = x->proof->program;
    if (place >= x->program.n_places || x->program.places[place].side != PROGRAM_SOURCE)
        return err_set(e, RS_EPROTO, "place %u is no source place", place);
    program_holds_of(&x->program, place, &x->first_hold, &x->end_hold);
    x->cell_prints = mem_calloc(x->end_hold - x->first_hold, sizeof(*x->cell_prints));
    x->known = mem_zalloc(x->worker->n_tensors);
    if (x->cell_prints == NULL || x->known == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    x->live.index = x->proof->source_index;
    x->live.program = &x->program;
    x->live.source = true;
    x->hold = x->first_hold;
    x->pass = PASS_CELLS;
    r = proof_place(x->proof, &x->live, place, e);
    if (r == 0)
        scaled_open(&x->live);
    return r;
}

static int open_publish(struct errand *x, const struct wire_packet *packet, struct err *e)
{
    struct wire_publish m;
    if (packet->header.body_bytes != sizeof(m))
        return err_set(e, RS_EPROTO, "body of %u bytes", packet->header.body_bytes);
    memcpy(&m, packet->body, sizeof(m));
    if (packet->n_fds != (m.has_program != 0 ? 1U : 0U))
        return err_set(e, RS_EPROTO, "%u descriptors", packet->n_fds);
    if (m.unread != 0)
        x->piece = x->worker->bindings[WIRE_LIVE]->n_pieces;
    if (m.has_event != 0) {
        int r =
            device_event_import(x->plane->devices[x->worker->device].device, m.event, &x->event, e);
        if (r != 0)
            return err_prefix(e, r, "the event that was published with");
        x->event_ms = m.event_ms;
        x->event_until_ns = clock_mono_ns() + m.event_ms * UINT64_C(1000000);
    }
    return m.has_program != 0 ? open_program(x, packet, m.place, e) : 0;
}

static int open_check(struct errand *x, const struct wire_packet *packet, struct err *e)
{
    struct wire_check m;
    if (packet->header.body_bytes != sizeof(m))
        return err_set(e, RS_EPROTO, "body of %u bytes", packet->header.body_bytes);
    memcpy(&m, packet->body, sizeof(m));
    if (m.memory > WIRE_SHADOW)
        return err_set(e, RS_EPROTO, "memory %u is neither live nor shadow", m.memory);
    x->read.memory = m.memory;
    return 0;
}

/* Every piece of the shadow has its place in live memory, in the same dtype. */
static int open_apply(struct errand *x, struct err *e)
{
    const struct worker *w = x->worker;
    const struct binding *b = w->bindings[WIRE_SHADOW];
    if (b == NULL || w->bindings[WIRE_LIVE] == NULL)
        return err_set(e, RS_EPRECOND, "it has no shadow and live memory bound");
    if (memcmp(w->dtypes[WIRE_SHADOW], w->dtypes[WIRE_LIVE], w->n_tensors) != 0)
        return err_set(e, RS_EPRECOND, "dtypes of shadow and live memory differ");
    for (uint32_t i = 0; i < b->n_pieces; i++) {
        const struct binding_piece piece = binding_at(b, i);
        uint32_t t = piece.tensor;
        int r =
            place_covers(&x->live, t, &piece.box, dtype_bytes(w->dtypes[WIRE_LIVE][t]), true, e);
        if (r < 0)
            return err_prefix(e, r, "tensor %u of its layout", t);
    }
    x->copied = mem_calloc(w->n_tensors, sizeof(*x->copied));
    if (x->copied == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    x->pass = PASS_COPY;
    return 0;
}

static int errand_open(struct errand *x, struct wire_packet *packet, struct err *e)
{
    struct worker *w = worker_find(x->plane, packet->header.worker);
    if (w == NULL || w->unbinding)
        return err_set(e, RS_ENOTFOUND, "there is no such worker");
    w->uses++;
    x->worker = w;
    x->live =
        (struct place){.plane = x->plane, .worker = w, .memory = WIRE_LIVE, .device = w->device};
    x->shadow = x->live;
    x->shadow.memory = WIRE_SHADOW;
    x->read = x->live;
    x->sums = mem_calloc(w->n_tensors, sizeof(*x->sums));
    if (x->sums == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    int r = 0;
    if (packet->header.type == WIRE_CHECK)
        r = open_check(x, packet, e);
    if (r == 0 && w->bindings[x->read.memory] == NULL)
        r = err_set(e, RS_EPRECOND, "it has no such memory bound");
    if (r == 0 && packet->header.type == WIRE_PUBLISH)
        r = open_publish(x, packet, e);
    if (r == 0 && packet->header.type == WIRE_APPLY)
        r = open_apply(x, e);
    return r;
}

void errand_start(struct plane *p, struct wire_packet *packet)
{
    struct err e = {0};
    struct errand *x = mem_zalloc(sizeof(*x));
    if (x == NULL) {
        (void)err_set(&e, RS_ENOMEM, "out of memory");
        plane_fail(p, &packet->header, WIRE_FAILED, RS_ENOMEM, &e, UINT32_MAX, UINT32_MAX);
        return;
    }
    x->plane = p;
    x->request = packet->header;
    x->pass = PASS_READ;
    bool may_begin = plane_may_begin(p);
    queue_push(&p->errands, &x->link);
    int r =
        may_begin ? errand_open(x, packet, &e) : err_set(&e, RS_EDEADLINE, "the lease has run out");
    if (r < 0) {
        errand_fail(x, r, &e, UINT32_MAX);
        return;
    }
    struct plane_device *d = &p->devices[x->worker->device];
    pump_init(&x->pump, p, d, &d->ways[0].check);
    x->pump.fill = errand_fill;
    x->pump.landed = errand_landed;
    x->pump.idle = errand_idle;
    pump_run(&x->pump);
}

/* Of a PUBLISH that waits for its event: has it happened, and is it still wanted? */
static void look(struct errand *x)
{
    if (device_event_done(x->event)) {
        device_event_free(x->event);
        x->event = NULL;
        pump_run(&x->pump);
        return;
    }
    struct err e = {0};
    if (x->worker->unbinding)
        errand_fail(x, err_set(&e, RS_ECANCELED, "the worker is leaving"), &e, UINT32_MAX);
    else if (clock_mono_ns() > x->event_until_ns)
        errand_fail(
            x,
            err_set(&e, RS_EDEADLINE,
                    "the event that was published with has not happened within %u ms: record it "
                    "before publishing",
                    x->event_ms),
            &e, UINT32_MAX);
}

/* Asked from here instead of waited for on a stream: a trainer that is late holds up nobody else, and
 * can be given up. */
uint64_t errands_look(struct plane *p)
{
    uint64_t next = UINT64_MAX;
    queue_foreach_safe (q, tmp, &p->errands) {
        struct errand *x = container_of(q, struct errand, link);
        if (x->event != NULL)
            look(x);
    }
    queue_foreach (q, &p->errands) {
        if (container_of(q, struct errand, link)->event != NULL)
            next = clock_mono_ns() + EVENT_LOOK_NS;
    }
    return next;
}

void errands_stop(struct plane *p)
{
    queue_foreach_safe (q, next, &p->errands) {
        struct errand *x = container_of(q, struct errand, link);
        x->stopped = true;
        if (pump_stop(&x->pump))
            errand_idle(&x->pump);
    }
}
