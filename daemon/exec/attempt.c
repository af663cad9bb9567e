#include "exec/attempt.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/mem.h"

#include "base/banned.h"

enum { PROGRESS_MS = 100 };

static const struct sm_state states[] = {
    [ATTEMPT_PREPARING] = {"preparing",
                           SM_TO(ATTEMPT_PREPARED) | SM_TO(ATTEMPT_FAILED) | SM_TO(ATTEMPT_ENDING)},
    [ATTEMPT_PREPARED] = {"prepared",
                          SM_TO(ATTEMPT_RUNNING) | SM_TO(ATTEMPT_FAILED) | SM_TO(ATTEMPT_ENDING)},
    [ATTEMPT_RUNNING] = {"running", SM_TO(ATTEMPT_FAILED) | SM_TO(ATTEMPT_ENDING)},
    [ATTEMPT_FAILED] = {"failed", SM_TO(ATTEMPT_ENDING)},
    [ATTEMPT_ENDING] = {"ending", 0},
};

static void move(struct attempt *a, enum attempt_state next)
{
    sm_move(&a->sm, (int)next, "model %llx attempt %llu", (unsigned long long)a->model->id,
            (unsigned long long)a->number);
}

bool attempt_runs(const struct attempt *a)
{
    return a->sm.state == ATTEMPT_RUNNING;
}

bool attempt_checks(const struct attempt *a, uint32_t cell)
{
    return a->verify == WIRE_VERIFY_FULL ||
           (a->verify == WIRE_VERIFY_SAMPLED &&
            wire_sampled(a->program.digest, program_cell(&a->program, cell).id));
}

void attempt_describe(const struct attempt *a, uint32_t cell, uint32_t place, char *ret_text,
                      size_t capacity)
{
    static const char *const sides[] = {"source", "destination", "scratch"};
    struct program_cell c = program_cell(&a->program, cell);
    const struct program_place *p = &a->program.places[place];
    char box[256];
    (void)snprintf(ret_text, capacity, "tensor %u, box %s, place %u (%s, layout %u, rank %u)",
                   a->program.tensors[c.tensor].index,
                   box_text(&a->program.boxes[c.box], box, sizeof(box)), place, sides[p->side],
                   p->layout, p->rank);
}

uint32_t attempt_targets(const struct attempt *a, uint32_t item, uint32_t *ret_places,
                         uint32_t capacity)
{
    struct program_item x = program_item(&a->program, item);
    uint32_t n = 0;
    if (x.places == PROGRAM_NONE)
        return 0;
    const uint32_t *list = &a->program.lists[x.places];
    for (uint32_t i = 1; i <= list[0] && n < capacity; i++) {
        uint32_t hold = a->held == NULL ? PROGRAM_NONE : attempt_hold(a, list[i], x.cell);
        if (hold == PROGRAM_NONE || a->held[hold] == 0)
            ret_places[n++] = list[i];
    }
    return n;
}

/* --- stopping --------------------------------------------------------------------------------- */

static void stop_work(struct attempt *a)
{
    for (uint32_t i = 0; i < a->n_pumps; i++) {
        (void)pump_stop(&a->copiers[i].pump);
        (void)pump_stop(&a->checkers[i].pump);
    }
    transport_abort(a->model->transport);
}

static bool in_flight(const struct attempt *a)
{
    for (uint32_t i = 0; i < a->n_pumps; i++)
        if (a->copiers[i].pump.n_busy > 0 || a->checkers[i].pump.n_busy > 0)
            return true;
    for (uint32_t d = 0; d < a->program.n_devices; d++)
        if (lane_in_flight(&a->lanes[d]))
            return true;
    return a->connecting || a->n_sampling > 0 || !transport_quiesced(a->model->transport);
}

/* One range for each, on the first of the devices. */
static void range_start(struct attempt *a)
{
    char name[96];
    (void)snprintf(name, sizeof(name), "model %llx version %llu attempt %llu",
                   (unsigned long long)a->model->id, (unsigned long long)a->request.version,
                   (unsigned long long)a->number);
    a->range = device_range_start(a->plane->devices[0].device, name);
}

static void forget(struct attempt *a)
{
    if (a->started)
        device_range_end(a->plane->devices[0].device, a->range);
    a->model->attempt = NULL;
    attempt_close(a);
}

/* A failed device's work is skipped: contents that differ may be just that. */
static int failed_device(const struct attempt *a, struct err *e)
{
    int r = 0;
    for (uint32_t d = 0; d < a->program.n_devices && r == 0; d++)
        r = device_error(a->plane->devices[d].device, e);
    return r;
}

void attempt_fail(struct attempt *a, int code, const struct err *e, uint32_t tensor, uint32_t place)
{
    struct err cause = {0};
    if (!sm_can(&a->sm, ATTEMPT_FAILED))
        return;
    move(a, ATTEMPT_FAILED);
    int r = code == RS_EDATALOSS ? failed_device(a, &cause) : 0;
    if (r != 0)
        plane_fail(a->plane, &a->request, WIRE_FAILED, r, &cause, UINT32_MAX, UINT32_MAX);
    else
        plane_fail(a->plane, &a->request, WIRE_FAILED, code, e, tensor, place);
    stop_work(a);
}

/* --- progress --------------------------------------------------------------------------------- */

static void mark(struct attempt *a, uint64_t *at)
{
    if (*at != 0)
        return;
    *at = clock_mono_ns();
    a->marks_changed = true;
}

void attempt_moves(struct attempt *a, uint64_t since_ns)
{
    if (a->progress.first_byte_ns != 0)
        return;
    a->progress.first_byte_ns = since_ns;
    a->marks_changed = true;
}

void attempt_count(struct attempt *a, uint64_t bytes)
{
    a->progress.done_bytes += bytes;
    a->bytes_changed = true;
}

/* What attempt.progress counts is local; messages are counted by the transport. The first byte's mark stays once it is told. */
static struct wire_progress progress_now(struct attempt *a)
{
    struct wire_progress p = a->progress;
    uint64_t first = a->first_byte_told || p.first_byte_ns == 0 ? UINT64_MAX : p.first_byte_ns;
    for (uint32_t d = 0; d < a->program.n_devices; d++) {
        struct transport_counters c =
            transport_counters(a->model->transport, a->program.devices[d].device);
        p.network_bytes += c.network_received_bytes - a->counted[d].network_received_bytes;
        p.domain_bytes += c.domain_received_bytes - a->counted[d].domain_received_bytes;
        p.network_sent_bytes += c.network_sent_bytes - a->counted[d].network_sent_bytes;
        p.domain_sent_bytes += c.domain_sent_bytes - a->counted[d].domain_sent_bytes;
        p.stale_frames += c.stale_frames - a->counted[d].stale_frames;
        if (c.first_byte_ns != 0 && c.first_byte_ns < first)
            first = c.first_byte_ns;
    }
    if (!a->first_byte_told && first != UINT64_MAX) {
        p.first_byte_ns = a->progress.first_byte_ns = first;
        a->first_byte_told = true;
    }
    return p;
}

static uint64_t tell_progress(struct attempt *a)
{
    uint64_t now = clock_mono_ns(), due = a->told_ns + PROGRESS_MS * UINT64_C(1000000);
    if (!attempt_runs(a) || (!a->marks_changed && !a->bytes_changed))
        return UINT64_MAX;
    if (!a->marks_changed && now < due)
        return due;
    struct wire_progress p = progress_now(a);
    plane_answer(a->plane, &a->request, WIRE_PROGRESS, 0, &p, sizeof(p), -1);
    a->told_ns = now;
    a->marks_changed = false;
    a->bytes_changed = false;
    return UINT64_MAX;
}

uint64_t attempts_progress(struct plane *p)
{
    uint64_t next = UINT64_MAX;
    queue_foreach (q, &p->models) {
        struct attempt *a = container_of(q, struct model, link)->attempt;
        uint64_t due = a == NULL ? UINT64_MAX : tell_progress(a);
        next = due < next ? due : next;
    }
    return next;
}

/* --- items ------------------------------------------------------------------------------------ */

static void source_read(struct attempt *a, uint32_t number)
{
    struct program_item item = program_item(&a->program, number);
    uint32_t hold = attempt_hold(a, item.from, item.cell), place;
    bool whole = a->item_skipped[number] == 0 &&
                 (item.places == PROGRAM_NONE || attempt_targets(a, number, &place, 1) > 0);
    if (--a->n_reads_left == 0)
        mark(a, &a->progress.sources_read_ns);
    if (!whole || !attempt_checks(a, item.cell) || a->item_print[number] == a->hold_prints[hold])
        return;
    char text[512];
    struct err e;
    attempt_describe(a, item.cell, item.from, text, sizeof(text));
    int r = err_set(&e, RS_EDATALOSS, "%s: the source changed while it was being sent", text);
    attempt_fail(a, r, &e, a->program.tensors[program_cell(&a->program, item.cell).tensor].index,
                 item.from);
}

static void item_landed(struct attempt *a, uint32_t number)
{
    uint32_t targets[256], n = attempt_targets(a, number, targets, 256);
    for (uint32_t i = 0; i < n && attempt_runs(a); i++) {
        uint32_t hold = attempt_hold(a, targets[i], program_item(&a->program, number).cell);
        if (hold != PROGRAM_NONE)
            verify_landed(a, hold);
    }
    if (a->n_landings_left == 0)
        mark(a, &a->progress.last_byte_ns);
    else
        crash_point(CRASH_EXEC_MOVING);
}

void attempt_item_done(struct attempt *a, uint32_t number, uint64_t elements)
{
    struct program_item item = program_item(&a->program, number);
    if (!attempt_runs(a) || elements == 0)
        return;
    rs_assert(a->item_left[number] >= elements);
    a->item_left[number] -= elements;
    if (a->item_left[number] > 0)
        return;
    if (item.from != PROGRAM_NONE && a->program.places[item.from].side == PROGRAM_SOURCE)
        source_read(a, number);
    if (item.places != PROGRAM_NONE && attempt_runs(a))
        item_landed(a, number);
}

void attempt_landed(struct attempt *a)
{
    a->n_holders++; /* an idle pump would settle it under the caller */
    for (uint32_t i = 0; i < a->n_pumps && attempt_runs(a); i++) {
        checker_kick(&a->checkers[i]);
        if (a->copiers[i].pump.n_busy == 0 && a->n_landings_left > 0)
            copier_kick(&a->copiers[i]);
    }
    a->n_holders--;
}

/* --- settling --------------------------------------------------------------------------------- */

static bool all_idle(const struct attempt *a)
{
    for (uint32_t i = 0; i < a->n_pumps; i++) {
        const struct checker *c = &a->checkers[i];
        if (c->pump.n_busy > 0 || c->n_done < c->n_queued || a->copiers[i].pump.n_busy > 0)
            return false;
    }
    return true;
}

/* The prepare pass, then a sample of what it found. */
static void finish_prepare(struct attempt *a)
{
    struct err e = {0};
    int r = 0;
    if (a->samplers == NULL) {
        r = verify_published(a, &e);
        if (r == 0)
            r = samples_begin(a, &e);
    }
    if (r < 0) {
        attempt_fail(a, r, &e, UINT32_MAX, UINT32_MAX);
        return;
    }
    if (a->n_sampling > 0)
        return;
    move(a, ATTEMPT_PREPARED);
    if (a->peers != NULL && a->verify != WIRE_VERIFY_OFF)
        plane_answer_table(a->plane, &a->request, WIRE_PREPARED, NULL, 0, a->hold_prints,
                           a->program.n_holds);
    else
        plane_answer(a->plane, &a->request, WIRE_PREPARED, 0, NULL, 0, -1);
    crash_point(CRASH_EXEC_PREPARED);
}

static bool all_done(const struct attempt *a)
{
    if (a->n_landings_left > 0 || a->n_checks_left > 0 || a->n_reads_left > 0 || !all_idle(a))
        return false;
    for (uint32_t i = 0; i < a->n_pumps; i++)
        if (a->copiers[i].landed < a->copiers[i].end)
            return false;
    for (uint32_t d = 0; d < a->program.n_devices; d++)
        if (!lane_done(&a->lanes[d]))
            return false;
    return true;
}

static void finish_staged(struct attempt *a)
{
    mark(a, &a->progress.sources_read_ns);
    mark(a, &a->progress.last_byte_ns);
    mark(a, &a->progress.verified_ns);
    struct wire_progress p = progress_now(a);
    crash_point(CRASH_EXEC_STAGED);
    plane_answer_table(a->plane, &a->request, WIRE_STAGED, &p, sizeof(p), a->hold_prints,
                       a->program.n_holds);
    forget(a);
}

static enum wire_landed landed(const struct attempt *a, uint32_t hold)
{
    struct program_hold h = program_hold(&a->program, hold);
    if (a->program.places[h.place].side != PROGRAM_DESTINATION)
        return WIRE_MISSING;
    switch (a->hold_state[hold]) {
    case HOLD_READ:
        return WIRE_READ;
    case HOLD_LANDED:
        return WIRE_LANDED;
    case HOLD_WAITING:
        return a->held != NULL && a->held[hold] != 0 ? WIRE_LANDED : WIRE_MISSING;
    default:
        return WIRE_MISSING;
    }
}

/* QUIESCED's memfd; below 0 where there is none. A control process that does not get it moves
 * everything again. */
static int landed_memfd(const struct attempt *a)
{
    size_t n = a->program.n_holds;
    if (!a->started)
        return -1;
    uint8_t *table = mem_zalloc(n * (sizeof(uint64_t) + 1));
    if (table == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < n; i++) {
        enum wire_landed state = landed(a, i);
        table[n * sizeof(uint64_t) + i] = (uint8_t)state;
        if (state == WIRE_READ)
            memcpy(table + i * sizeof(uint64_t), &a->hold_prints[i], sizeof(uint64_t));
    }
    int fd = wire_memfd("landed", table, n * (sizeof(uint64_t) + 1), NULL);
    mem_free(table);
    return fd;
}

static void finish_ending(struct attempt *a)
{
    struct plane *p = a->plane;
    struct wire_header h = a->ending;
    struct wire_quiesced body = {.n_holds = a->program.n_holds};
    bool tell = a->tell_ending;
    int fd = tell ? landed_memfd(a) : -1;
    forget(a);
    if (tell)
        plane_answer(p, &h, WIRE_QUIESCED, 0, fd >= 0 ? &body : NULL, fd >= 0 ? sizeof(body) : 0,
                     fd >= 0 ? fd : -1);
    if (fd >= 0)
        (void)close(fd);
}

void attempt_settle(struct attempt *a)
{
    if (a->n_holders > 0)
        return;
    if (a->sm.state == ATTEMPT_PREPARING && all_idle(a) && !a->connecting)
        finish_prepare(a);
    else if (a->sm.state == ATTEMPT_RUNNING && all_done(a))
        finish_staged(a);
    else if (a->sm.state == ATTEMPT_ENDING && !in_flight(a))
        finish_ending(a);
}

/* --- messages --------------------------------------------------------------------------------- */

struct model *plane_model(struct plane *p, uint64_t id)
{
    queue_foreach (q, &p->models) {
        struct model *m = container_of(q, struct model, link);
        if (m->id == id)
            return m;
    }
    return NULL;
}

static struct model *model_get(struct plane *p, uint64_t id)
{
    struct model *m = plane_model(p, id);
    if (m != NULL)
        return m;
    m = mem_zalloc(sizeof(*m));
    if (m == NULL)
        return NULL;
    m->id = id;
    queue_push(&p->models, &m->link);
    return m;
}

static int prepare(struct plane *p, struct wire_packet *packet, struct err *e)
{
    struct model *m = model_get(p, packet->header.model);
    struct attempt *a = mem_zalloc(sizeof(*a));
    if (m == NULL || a == NULL) {
        mem_free(a);
        return err_set(e, RS_ENOMEM, "out of memory");
    }
    if (m->attempt != NULL) {
        mem_free(a);
        return err_set(e, RS_EPRECOND, "attempt %llu is not over",
                       (unsigned long long)m->attempt->number);
    }
    a->plane = p;
    a->model = m;
    a->request = packet->header;
    a->number = packet->header.attempt;
    a->epoch = packet->header.epoch;
    sm_init(&a->sm, states, ATTEMPT_PREPARING);
    int r = attempt_open(a, packet, e);
    if (r < 0) {
        attempt_close(a);
        return r;
    }
    m->attempt = a;
    a->n_holders++;
    verify_sources(a);
    a->n_holders--;
    attempt_settle(a);
    return 0;
}

void attempt_prepare(struct plane *p, struct wire_packet *packet)
{
    struct err e = {0};
    int r = plane_may_begin(p) ? prepare(p, packet, &e)
                               : err_set(&e, RS_EDEADLINE, "the lease has run out");
    if (r < 0) {
        (void)err_prefix(&e, r, "prepare attempt %llu", (unsigned long long)packet->header.attempt);
        plane_fail(p, &packet->header, WIRE_FAILED, r, &e, UINT32_MAX, UINT32_MAX);
    }
}

/* The attempt that the message is about; NULL where it is not the current one. */
static struct attempt *current(struct plane *p, const struct wire_header *h)
{
    struct model *m = plane_model(p, h->model);
    struct attempt *a = m == NULL ? NULL : m->attempt;
    return a != NULL && a->number == h->attempt && a->epoch == h->epoch ? a : NULL;
}

/* Holds that need no transfer are checked from the start. */
static void check_held(struct attempt *a)
{
    for (uint32_t i = 0; i < a->program.n_holds && a->held != NULL; i++) {
        struct program_hold h = program_hold(&a->program, i);
        if (a->held[i] != 0 && a->program.places[h.place].side == PROGRAM_DESTINATION &&
            program_cell_elements(&a->program, h.cell) > 0 && attempt_checks(a, h.cell))
            (void)checker_add(a, i);
    }
}

/* Items that no message carries are through. */
static void pass_needless(struct attempt *a)
{
    for (uint32_t i = 0; i < a->program.n_items && a->item_needless != NULL; i++) {
        if (a->item_needless[i] == 0)
            continue;
        a->item_skipped[i] = 1;
        attempt_item_done(a, i, a->item_left[i]);
    }
}

/* In turn: the first bytes of no device wait for another's later ones. */
static void kick_lanes(struct attempt *a)
{
    bool any = true;
    while (any) {
        any = false;
        for (uint32_t d = 0; d < a->program.n_devices; d++)
            any = lane_kick_one(&a->lanes[d]) || any;
    }
}

static void run(struct attempt *a)
{
    a->n_holders++;
    check_held(a);
    pass_needless(a);
    for (uint32_t d = 0; d < a->program.n_devices; d++)
        a->counted[d] = transport_counters(a->model->transport, a->program.devices[d].device);
    kick_lanes(a);
    for (uint32_t i = 0; i < a->n_pumps; i++) {
        checker_kick(&a->checkers[i]);
        copier_kick(&a->copiers[i]);
    }
    a->n_holders--;
    attempt_settle(a);
}

void attempt_start(struct plane *p, struct wire_packet *packet)
{
    struct attempt *a = current(p, &packet->header);
    if (a == NULL || a->sm.state != ATTEMPT_PREPARED) {
        struct err e = {0};
        int r = a == NULL ? RS_EABORTED : RS_EPRECOND;
        (void)err_set(&e, r, "start attempt %llu: it is %s",
                      (unsigned long long)packet->header.attempt,
                      a == NULL ? "not the current one" : sm_name(&a->sm));
        plane_fail(p, &packet->header, WIRE_FAILED, r, &e, UINT32_MAX, UINT32_MAX);
        return;
    }
    a->request = packet->header;
    a->started = true;
    range_start(a);
    move(a, ATTEMPT_RUNNING);
    run(a);
}

static void end(struct attempt *a)
{
    if (a->sm.state != ATTEMPT_FAILED)
        stop_work(a);
    move(a, ATTEMPT_ENDING);
}

/* Of an attempt that is not here nothing moves: that is the answer. */
void attempt_abort(struct plane *p, struct wire_packet *packet)
{
    struct attempt *a = current(p, &packet->header);
    if (a == NULL) {
        plane_answer(p, &packet->header, WIRE_QUIESCED, 0, NULL, 0, -1);
        return;
    }
    a->ending = packet->header;
    a->tell_ending = true;
    if (a->sm.state != ATTEMPT_ENDING)
        end(a);
    attempt_settle(a);
}

void attempts_lease_lost(struct plane *p)
{
    queue_foreach (q, &p->models) {
        struct attempt *a = container_of(q, struct model, link)->attempt;
        struct err e;
        (void)err_set(&e, RS_EDEADLINE, "the lease has run out");
        if (a != NULL)
            attempt_fail(a, RS_EDEADLINE, &e, UINT32_MAX, UINT32_MAX);
    }
}

bool attempts_quiet(const struct plane *p)
{
    queue_foreach (q, &p->models) {
        const struct attempt *a = container_of(q, struct model, link)->attempt;
        if (a != NULL && (a->sm.state < ATTEMPT_FAILED || in_flight(a)))
            return false;
    }
    return true;
}

bool attempts_stop(struct plane *p)
{
    bool quiet = true;
    queue_foreach (q, &p->models) {
        struct model *m = container_of(q, struct model, link);
        if (m->attempt != NULL && m->attempt->sm.state != ATTEMPT_ENDING)
            end(m->attempt);
        if (m->attempt != NULL)
            attempt_settle(m->attempt);
        quiet = quiet && m->attempt == NULL;
    }
    return quiet;
}
