#include "exec/lane.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "exec/attempt.h"

#include "base/banned.h"

enum { LANE_MAX_TARGETS = 256 };

/* A run of elements of one item inside a message. */
struct piece {
    uint32_t item;
    uint64_t begin, end; /* elements of the item */
    uint64_t at;         /* byte of the message */
    uint32_t size;       /* bytes of an element */
};

static const struct program *program_of(const struct lane *l)
{
    return &l->attempt->program;
}

/* Nothing of it is in the stream's messages. */
static bool left_out(const struct lane *l, uint32_t item)
{
    return l->attempt->item_needless != NULL && l->attempt->item_needless[item] != 0;
}

/* The piece of a span at byte `at`; false at its end. */
static bool piece_next(const struct lane *l, const struct lane_span *s, struct piece *x)
{
    if (x->at == s->bytes)
        return false;
    uint64_t offset = x->at == 0 ? s->offset : 0;
    x->item = x->at == 0 ? s->item : x->item + 1;
    const struct program *p = program_of(l);
    uint64_t all = program_cell_bytes(p, program_item(p, x->item).cell);
    while (all == 0 || offset == all || left_out(l, x->item)) { /* empty cells are nothing, too */
        x->item++;
        offset = 0;
        all = program_cell_bytes(p, program_item(p, x->item).cell);
    }
    uint64_t bytes = all - offset < s->bytes - x->at ? all - offset : s->bytes - x->at;
    x->size = dtype_bytes(program_item_cell(p, x->item).wire);
    x->begin = offset / x->size;
    x->end = (offset + bytes) / x->size;
    return true;
}

static void piece_done(struct piece *x)
{
    x->at += (x->end - x->begin) * x->size;
}

#define piece_foreach(l, s, x) for (struct piece x = {0}; piece_next(l, s, &x); piece_done(&x))

/* --- building --------------------------------------------------------------------------------- */

/* Where [begin, end) of the item is one run in the place's memory, in wire dtype. */
static bool run_at(const struct lane *l, uint32_t place, const struct piece *x, uint8_t **ret)
{
    const struct attempt *a = l->attempt;
    struct program_cell c = program_item_cell(&a->program, x->item);
    const struct box *box = &a->program.boxes[c.box];
    uint32_t size = dtype_bytes(c.wire);
    struct box boxes[2 * BOX_MAX_DIMS];
    uint8_t *address, *next = NULL;
    if (place_dtype(&a->places[place], c.tensor, c.wire) != c.wire ||
        place_makes(&a->places[place], c.tensor) != NULL)
        return false;
    unsigned n = box_range(box, x->begin, x->end, boxes);
    for (unsigned i = 0; i < n; i++) {
        if (!place_contiguous(&a->places[place], c.tensor, &boxes[i], size, &address) ||
            (next != NULL && address != next))
            return false;
        if (next == NULL)
            *ret = address;
        next = address + box_elements(&boxes[i]) * size;
    }
    return n > 0;
}

/* The place in which a piece can be read or written as one run; PROGRAM_NONE. */
static uint32_t direct_place(const struct lane *l, bool send, const struct piece *x, uint8_t **ret)
{
    const struct attempt *a = l->attempt;
    uint32_t targets[LANE_MAX_TARGETS] = {program_item(&a->program, x->item).from};
    uint32_t n = send ? 1 : attempt_targets(a, x->item, targets, LANE_MAX_TARGETS);
    for (uint32_t i = 0; i < n; i++)
        if (run_at(l, targets[i], x, ret))
            return targets[i];
    return PROGRAM_NONE;
}

/* Without a slot where each of its items lies in one run (or is received into one place where it
 * does), of some length on average. */
static void choose_direct(const struct lane *l, struct lane_group *g, struct lane_message *m)
{
    uint32_t most = LANE_GROUP_PIECES - g->n_pieces, n = 0;
    m->staged = true;
    m->first_piece = g->n_pieces;
    const struct program *p = program_of(l);
    if (most > 1 &&
        !transport_takes_pieces(l->attempt->model->transport, p->devices[l->device].device,
                                p->streams[p->messages[m->message].stream].peer))
        most = 1;
    if (most > 1 && m->span.bytes / LANE_LEAST_RUN < most)
        most = 1 + (uint32_t)(m->span.bytes / LANE_LEAST_RUN);
    piece_foreach(l, &m->span, x)
    {
        uint8_t *data = NULL;
        uint32_t place = n < most ? direct_place(l, m->send, &x, &data) : PROGRAM_NONE;
        if (place == PROGRAM_NONE)
            return;
        g->pieces[g->n_pieces + n] = (struct transport_piece){data, (x.end - x.begin) * x.size};
        g->piece_place[g->n_pieces + n++] = place;
    }
    m->staged = false;
    g->n_pieces += n;
}

/* Moves the stream's cursor over the message's bytes. */
static void take_span(struct lane *l, const struct program_message *m, uint64_t bytes,
                      struct lane_span *ret)
{
    struct lane_span *c = &l->cursors[m->stream];
    *ret = (struct lane_span){c->item, c->offset, bytes};
    piece_foreach(l, ret, x)
    {
        c->item = x.item;
        c->offset = x.end * x.size;
    }
}

static bool is_scratch(const struct lane *l, uint32_t place)
{
    return program_of(l)->places[place].side == PROGRAM_SCRATCH;
}

static void later(uint64_t *after, uint64_t group)
{
    if (group > *after)
        *after = group;
}

static bool writes_scratch(const struct lane *l, uint32_t item)
{
    uint32_t targets[LANE_MAX_TARGETS];
    uint32_t n = attempt_targets(l->attempt, item, targets, LANE_MAX_TARGETS);
    for (uint32_t i = 0; i < n; i++)
        if (is_scratch(l, targets[i]))
            return true;
    return false;
}

static uint64_t scratch_end(const struct lane *l, struct program_cell c)
{
    const struct program_tensor *t = &program_of(l)->tensors[c.tensor];
    struct box whole = box_whole(t->n_dims, t->shape);
    return t->scratch_offset + box_elements(&whole) * dtype_bytes(c.wire);
}

/* Two tensors take turns in one part of the scratch. */
static bool scratch_shared(const struct lane *l, uint32_t item, uint32_t other)
{
    const struct program *p = program_of(l);
    struct program_cell a = program_item_cell(p, item);
    struct program_cell b = program_item_cell(p, other);
    return a.tensor != b.tensor && p->tensors[a.tensor].scratch_offset < scratch_end(l, b) &&
           p->tensors[b.tensor].scratch_offset < scratch_end(l, a);
}

/* Whether a group under way may still unpack into, or out of, the scratch that the item goes to. */
static bool scratch_busy(const struct lane *l, const struct lane_group *x, uint32_t item)
{
    for (uint32_t i = 0; i < x->n; i++) {
        if (x->messages[i].send)
            continue;
        piece_foreach(l, &x->messages[i].span, y)
        {
            if (writes_scratch(l, y.item) && scratch_shared(l, item, y.item))
                return true;
        }
    }
    return false;
}

static void depend_scratch(struct lane *l, struct lane_group *g, uint32_t item)
{
    if (program_of(l)->scratch_bytes == 0 || !writes_scratch(l, item))
        return;
    for (int i = 0; i < LANE_DEPTH; i++) {
        const struct lane_group *x = &l->groups[i];
        if (x != g && (x->stage == LANE_WIRE || x->stage == LANE_UNPACK) &&
            scratch_busy(l, x, item))
            later(&g->after, x->number + 1);
    }
}

/* What the group must wait for: cells that it sends on must have landed where it reads them. What
 * a direct send reads and a direct receive wrote is in order on the net stream already. */
static void depend(struct lane *l, struct lane_group *g, const struct lane_message *m)
{
    piece_foreach(l, &m->span, x)
    {
        uint32_t cell = program_item(program_of(l), x.item).cell;
        if (!m->send)
            depend_scratch(l, g, x.item);
        else if (l->relay_from != NULL)
            later(&g->after, m->staged ? l->relay_landed[cell] : l->relay_unpacked[cell]);
    }
}

/* After the group is complete: what later groups must wait for. */
static void leave_marks(struct lane *l, const struct lane_group *g, const struct lane_message *m)
{
    uint32_t piece = m->first_piece;
    if (m->send || l->relay_from == NULL)
        return;
    piece_foreach(l, &m->span, x)
    {
        uint32_t cell = program_item(program_of(l), x.item).cell;
        uint32_t place = m->staged ? PROGRAM_NONE : g->piece_place[piece++];
        if (l->relay_from[cell] == PROGRAM_NONE)
            continue;
        l->relay_landed[cell] = g->number + 1;
        if (l->relay_from[cell] != place)
            l->relay_unpacked[cell] = g->number + 1;
    }
}

static uint64_t message_bytes(const struct lane *l, uint32_t message)
{
    const struct program_message *m = &program_of(l)->messages[message];
    return l->attempt->message_bytes != NULL ? l->attempt->message_bytes[message]
                                             : m->end - m->begin;
}

static void add_message(struct lane *l, struct lane_group *g)
{
    const struct program *p = program_of(l);
    const struct program_message *pm = &p->messages[l->next];
    struct lane_message *m = &g->messages[g->n];
    uint64_t bytes = message_bytes(l, l->next);
    if (bytes == 0) { /* at both ends */
        l->next++;
        return;
    }
    *m = (struct lane_message){
        .message = l->next, .slot = LANE_NO_SLOT, .send = p->streams[pm->stream].send != 0};
    take_span(l, pm, bytes, &m->span);
    l->next++;
    choose_direct(l, g, m);
    g->bytes += bytes;
    g->n_staged += m->staged ? 1 : 0;
    g->n++;
    depend(l, g, m);
}

/* The next group; one with n == 0 where all that was left is held already. */
static void build(struct lane *l, struct lane_group *g)
{
    const struct program *p = program_of(l);
    g->stage = LANE_BUILT;
    g->number = l->n_built++;
    g->n = 0;
    g->n_staged = 0;
    g->n_pieces = 0;
    g->bytes = 0;
    g->after = 0;
    g->status = 0;
    uint32_t round = p->messages[l->next].round;
    while (l->next < l->end && g->n < LANE_GROUP_MESSAGES && g->n_staged < l->n_slots &&
           g->bytes < LANE_GROUP_BYTES && p->messages[l->next].round == round)
        add_message(l, g);
    for (uint32_t i = 0; i < g->n; i++)
        leave_marks(l, g, &g->messages[i]);
}

/* --- packing and sending ---------------------------------------------------------------------- */

static void give_slots(struct lane *l, struct lane_group *g)
{
    uint8_t *ring = l->attempt->plane->devices[l->device].ring;
    for (uint32_t i = 0; i < g->n; i++) {
        struct lane_message *m = &g->messages[i];
        if (!m->staged)
            continue;
        m->slot = l->free_slots[--l->n_free];
        m->data = ring + (size_t)m->slot * program_of(l)->chunk_bytes;
    }
}

static void take_slot(struct lane *l, struct lane_message *m)
{
    if (m->slot == LANE_NO_SLOT)
        return;
    l->free_slots[l->n_free++] = m->slot;
    m->slot = LANE_NO_SLOT;
}

static void free_group(struct lane *l, struct lane_group *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        take_slot(l, &g->messages[i]);
    g->stage = LANE_FREE;
}

static bool reads_source(const struct lane *l, uint32_t item)
{
    uint32_t from = program_item(program_of(l), item).from;
    return from != PROGRAM_NONE && program_of(l)->places[from].side == PROGRAM_SOURCE;
}

static uint64_t *sent_print(const struct lane *l, uint32_t item)
{
    struct attempt *a = l->attempt;
    return reads_source(l, item) && attempt_checks(a, program_item(&a->program, item).cell)
               ? &a->item_print[item]
               : NULL;
}

static int pack_piece(struct lane *l, struct batch *b, const struct lane_message *m,
                      const struct piece *x)
{
    const struct attempt *a = l->attempt;
    struct program_item item = program_item(&a->program, x->item);
    struct program_cell c = program_cell(&a->program, item.cell);
    const struct place *from = &a->places[item.from];
    uint64_t *print = sent_print(l, x->item);
    uint8_t dtype = place_dtype(from, c.tensor, c.wire);
    struct box boxes[2 * BOX_MAX_DIMS];
    uint8_t *at = m->data + x->at;
    int r = 0;
    unsigned n = box_range(&a->program.boxes[c.box], x->begin, x->end, boxes);
    for (unsigned i = 0; i < n && r == 0; i++) {
        const struct move_end to = {.compact = at};
        if (m->staged)
            r = batch_move(b, &(struct move){.tensor = c.tensor,
                                             .box = boxes[i],
                                             .from = {.place = from},
                                             .to = &to,
                                             .n_to = 1,
                                             .from_dtype = dtype,
                                             .to_dtype = c.wire,
                                             .fingerprint = print});
        else if (print != NULL)
            r = batch_print(b, from, c.tensor, &boxes[i], c.wire, print);
        at += box_elements(&boxes[i]) * dtype_bytes(c.wire);
    }
    return r;
}

static bool needs_pack(const struct lane *l, const struct lane_message *m)
{
    return m->send && (m->staged || l->attempt->verify != WIRE_VERIFY_OFF);
}

static int pack(struct lane *l, struct lane_group *g)
{
    struct plane_device *d = &l->attempt->plane->devices[l->device];
    struct batch b;
    bool any = false;
    int r = 0;
    batch_init(&b, d->pack, &d->pack_work);
    for (uint32_t i = 0; i < g->n && r == 0; i++) {
        if (!needs_pack(l, &g->messages[i]))
            continue;
        any = true;
        piece_foreach(l, &g->messages[i].span, x)
        {
            if (r == 0)
                r = pack_piece(l, &b, &g->messages[i], &x);
        }
    }
    if (r == 0)
        r = batch_flush(&b);
    if (r == 0 && any)
        r = device_event_record(g->packed, d->pack);
    if (r == 0 && any)
        r = device_event_wait(d->net, g->packed);
    return r;
}

static void lane_fail(struct lane *l, int code, const struct err *cause)
{
    struct err e;
    (void)err_set(&e, code, "messages of device %u: %s", l->device, err_text(cause, code));
    attempt_fail(l->attempt, code, &e, UINT32_MAX, UINT32_MAX);
}

/* On a thread of the device or the transport. */
static void group_wired(struct transport_group *tg, int status, const struct err *e)
{
    struct lane_group *g = container_of(tg, struct lane_group, group);
    g->status = status;
    if (status != 0)
        g->err = *e;
    (void)mailbox_post(&g->lane->attempt->plane->mailbox, &g->wired);
}

/* Both ends have the stream's order and the message's begin: whoever left out another message than
 * its peer is found out. */
static uint32_t message_tag(const struct program_stream *s, const struct program_message *m)
{
    uint64_t mixed = (m->begin + 1) * UINT64_C(0x9E3779B97F4A7C15) ^
                     (s->order + UINT64_C(1)) * UINT64_C(0xC2B2AE3D27D4EB4F);
    return (uint32_t)(mixed >> 32);
}

static uint32_t message_pieces(const struct lane_group *g, uint32_t message)
{
    const struct lane_message *m = &g->messages[message];
    if (m->staged)
        return 0;
    return (message + 1 < g->n ? m[1].first_piece : g->n_pieces) - m->first_piece;
}

static void start(struct lane *l, struct lane_group *g)
{
    const struct program *p = program_of(l);
    struct attempt *a = l->attempt;
    for (uint32_t i = 0; i < g->n; i++) {
        const struct lane_message *m = &g->messages[i];
        const struct program_stream *s = &p->streams[p->messages[m->message].stream];
        uint32_t n_pieces = message_pieces(g, i);
        const struct transport_piece *pieces = &g->pieces[m->first_piece];
        g->wire[i] = (struct transport_message){.data = m->staged       ? m->data
                                                        : n_pieces == 1 ? pieces->data
                                                                        : NULL,
                                                .bytes = m->span.bytes,
                                                .pieces = pieces,
                                                .n_pieces = n_pieces,
                                                .peer = s->peer,
                                                .send = m->send,
                                                .network = s->tier == 2,
                                                .tag = message_tag(s, &p->messages[m->message])};
    }
    g->group.messages = g->wire;
    g->group.n_messages = g->n;
    int r = pack(l, g);
    if (r == 0)
        r = transport_enqueue(a->model->transport, p->devices[l->device].device,
                              a->plane->devices[l->device].net, &g->group);
    if (r == 0) {
        g->stage = LANE_WIRE;
        return;
    }
    plane_settle(a->plane, a->plane->devices[l->device].device, &a->plane->devices[l->device].pack);
    free_group(l, g);
    lane_fail(l, r, NULL);
}

static bool may_start(const struct lane *l, const struct lane_group *g)
{
    if (l->n_free < g->n_staged || !plane_lease_holds(l->attempt->plane))
        return false;
    for (int i = 0; i < LANE_DEPTH; i++) {
        const struct lane_group *x = &l->groups[i];
        if (x != g && x->stage != LANE_FREE && x->number < g->after)
            return false;
    }
    return true;
}

static struct lane_group *group_in(struct lane *l, enum lane_stage stage)
{
    for (int i = 0; i < LANE_DEPTH; i++)
        if (l->groups[i].stage == stage)
            return &l->groups[i];
    return NULL;
}

bool lane_kick_one(struct lane *l)
{
    struct lane_group *g = group_in(l, LANE_BUILT);
    if (!attempt_runs(l->attempt))
        return false;
    if (g == NULL) {
        g = group_in(l, LANE_FREE);
        if (g == NULL || l->next == l->end)
            return false;
        build(l, g);
    }
    if (g->n == 0) {
        g->stage = LANE_FREE;
        return true;
    }
    if (!may_start(l, g))
        return false;
    give_slots(l, g);
    start(l, g);
    return true;
}

void lane_kick(struct lane *l)
{
    while (lane_kick_one(l))
        ;
}

/* --- receiving and unpacking ------------------------------------------------------------------ */

/* Bytes by tier that the fan-out adds to the message itself. */
static void count_fan_out(struct lane *l, const uint32_t *targets, uint32_t n, uint64_t bytes)
{
    struct attempt *a = l->attempt;
    bool own = false; /* the message itself went to this device */
    for (uint32_t i = 0; i < n; i++) {
        if (is_scratch(l, targets[i]))
            continue;
        bool here = a->places[targets[i]].device == l->device;
        if (!here)
            a->progress.domain_bytes += bytes;
        else if (own)
            a->progress.device_bytes += bytes;
        own = own || here;
        attempt_count(a, bytes);
    }
}

/* From where it has landed (`landed`, a place or PROGRAM_NONE for a slot) to its other targets. */
static int unpack_piece(struct lane *l, struct batch *b, uint8_t *at, uint32_t landed,
                        const struct piece *x, bool *any)
{
    struct attempt *a = l->attempt;
    struct program_cell c = program_item_cell(&a->program, x->item);
    uint32_t targets[LANE_MAX_TARGETS], n_to = 0;
    uint32_t n = attempt_targets(a, x->item, targets, LANE_MAX_TARGETS);
    struct move_end to[LANE_MAX_TARGETS];
    struct box boxes[2 * BOX_MAX_DIMS];
    int r = 0;
    for (uint32_t i = 0; i < n; i++)
        if (targets[i] != landed)
            to[n_to++] = (struct move_end){.place = &a->places[targets[i]]};
    unsigned n_boxes = n_to > 0 ? box_range(&a->program.boxes[c.box], x->begin, x->end, boxes) : 0;
    for (unsigned i = 0; i < n_boxes && r == 0; i++) {
        r = batch_move(b, &(struct move){.tensor = c.tensor,
                                         .box = boxes[i],
                                         .from = {.compact = at},
                                         .to = to,
                                         .n_to = n_to,
                                         .from_dtype = c.wire,
                                         .to_dtype = c.wire,
                                         .streaming = true});
        at += box_elements(&boxes[i]) * dtype_bytes(c.wire);
    }
    *any = *any || n_to > 0;
    return r;
}

static void finish_messages(struct lane *l, struct lane_group *g, bool sends)
{
    for (uint32_t i = 0; i < g->n; i++) {
        struct lane_message *m = &g->messages[i];
        if (m->send != sends)
            continue;
        take_slot(l, m);
        l->attempt->progress.messages += sends ? 0 : 1;
        piece_foreach(l, &m->span, x)
        {
            uint32_t targets[LANE_MAX_TARGETS];
            uint32_t n = sends ? 0 : attempt_targets(l->attempt, x.item, targets, LANE_MAX_TARGETS);
            count_fan_out(l, targets, n, (x.end - x.begin) * x.size);
            attempt_item_done(l->attempt, x.item, x.end - x.begin);
        }
    }
}

/* On the stream's thread. */
static void group_unpacked(void *arg)
{
    struct lane_group *g = arg;
    (void)mailbox_post(&g->lane->attempt->plane->mailbox, &g->unpacked);
}

static int unpack_message(struct lane *l, struct batch *b, const struct lane_group *g,
                          const struct lane_message *m, bool *any)
{
    uint32_t piece = m->first_piece;
    int r = 0;
    piece_foreach(l, &m->span, x)
    {
        if (r == 0 && m->staged)
            r = unpack_piece(l, b, m->data + x.at, PROGRAM_NONE, &x, any);
        else if (r == 0)
            r = unpack_piece(l, b, g->pieces[piece].data, g->piece_place[piece], &x, any);
        piece++;
    }
    return r;
}

/* Enqueues the fan-out. 1: it is on its way; 0: there is none. */
static int unpack(struct lane *l, struct lane_group *g)
{
    struct plane_device *d = &l->attempt->plane->devices[l->device];
    struct batch b;
    bool any = false;
    int r = 0;
    batch_init(&b, d->unpack, NULL);
    for (uint32_t i = 0; i < g->n && r == 0; i++) {
        if (!g->messages[i].send)
            r = unpack_message(l, &b, g, &g->messages[i], &any);
    }
    if (r == 0)
        r = batch_flush(&b);
    if (!any && r == 0)
        return 0;
    int called = device_call(d->unpack, group_unpacked, g);
    if (called != 0) {
        plane_settle(l->attempt->plane, d->device, &d->unpack);
        return r < 0 ? r : called;
    }
    g->status = r;
    return 1;
}

static void finish_group(struct lane *l, struct lane_group *g)
{
    finish_messages(l, g, false);
    free_group(l, g);
    lane_kick(l);
    attempt_landed(l->attempt);
}

static int device_status(const struct lane *l)
{
    return device_error(l->attempt->plane->devices[l->device].device, NULL);
}

static void on_wired(struct mailbox_item *item)
{
    struct lane_group *g = container_of(item, struct lane_group, wired);
    struct lane *l = g->lane;
    struct attempt *a = l->attempt;
    int r = g->status != 0 ? g->status : device_status(l);
    if (r != 0 || !attempt_runs(a)) {
        free_group(l, g);
        if (r != 0 && r != RS_ECANCELED)
            lane_fail(l, r, g->status != 0 ? &g->err : NULL);
        attempt_settle(a);
        return;
    }
    finish_messages(l, g, true);
    if (!plane_lease_holds(a->plane) || !attempt_runs(a)) {
        free_group(l, g);
        attempt_settle(a);
        return;
    }
    g->stage = LANE_UNPACK;
    r = unpack(l, g);
    if (r < 0) {
        free_group(l, g);
        lane_fail(l, r, NULL);
    } else if (r == 0)
        finish_group(l, g);
    else
        lane_kick(l); /* the slots of its sends are free */
    attempt_settle(a);
}

static void on_unpacked(struct mailbox_item *item)
{
    struct lane_group *g = container_of(item, struct lane_group, unpacked);
    struct lane *l = g->lane;
    struct attempt *a = l->attempt;
    int r = g->status != 0 ? g->status : device_status(l);
    if (r != 0 || !attempt_runs(a)) {
        free_group(l, g);
        if (r != 0)
            lane_fail(l, r, NULL);
    } else {
        finish_group(l, g);
    }
    attempt_settle(a);
}

/* --- life ------------------------------------------------------------------------------------- */

bool lane_in_flight(const struct lane *l)
{
    for (int i = 0; i < LANE_DEPTH; i++)
        if (l->groups[i].stage == LANE_WIRE || l->groups[i].stage == LANE_UNPACK)
            return true;
    return false;
}

bool lane_done(const struct lane *l)
{
    for (int i = 0; i < LANE_DEPTH; i++)
        if (l->groups[i].stage != LANE_FREE)
            return false;
    return l->next == l->end;
}

static bool relays(const struct lane *l, uint32_t item)
{
    struct program_item x = program_item(program_of(l), item);
    return x.from != PROGRAM_NONE && program_of(l)->places[x.from].side != PROGRAM_SOURCE;
}

/* Notes from where this device relays each cell; allocates only where it relays any. */
static int note_relays(struct lane *l)
{
    const struct program *p = program_of(l);
    for (uint32_t s = 0; s < p->n_streams; s++) {
        const struct program_stream *x = &p->streams[s];
        if (x->device != l->device || x->send == 0)
            continue;
        for (uint32_t i = x->first_item; i < x->first_item + x->n_items; i++) {
            if (!relays(l, i))
                continue;
            if (l->relay_from == NULL) {
                l->relay_from = mem_alloc(p->n_cells * sizeof(*l->relay_from));
                l->relay_landed = mem_calloc(p->n_cells, sizeof(*l->relay_landed));
                l->relay_unpacked = mem_calloc(p->n_cells, sizeof(*l->relay_unpacked));
                if (l->relay_from == NULL || l->relay_landed == NULL || l->relay_unpacked == NULL)
                    return RS_ENOMEM;
                memset(l->relay_from, 0xFF, p->n_cells * sizeof(*l->relay_from));
            }
            l->relay_from[program_item(p, i).cell] = program_item(p, i).from;
        }
    }
    return 0;
}

int lane_init(struct lane *l, struct attempt *a, uint32_t device, struct lane_span *cursors)
{
    const struct program_device *d = &a->program.devices[device];
    l->attempt = a;
    l->device = device;
    l->cursors = cursors;
    l->next = d->first_message;
    l->end = d->first_message + d->n_messages;
    l->n_slots = a->program.ring_slots;
    l->free_slots = mem_calloc(l->n_slots, sizeof(*l->free_slots));
    if (l->free_slots == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < l->n_slots; i++)
        l->free_slots[l->n_free++] = (int32_t)(l->n_slots - 1 - i);
    for (int i = 0; i < LANE_DEPTH; i++) {
        struct lane_group *g = &l->groups[i];
        g->lane = l;
        g->wired.fn = on_wired;
        g->unpacked.fn = on_unpacked;
        queue_init(&g->wired.link);
        queue_init(&g->unpacked.link);
        g->group.on_done = group_wired;
        int r = device_event_new(a->plane->devices[device].device, &g->packed);
        if (r < 0)
            return r;
    }
    return note_relays(l);
}

void lane_close(struct lane *l)
{
    for (int i = 0; i < LANE_DEPTH; i++)
        if (l->groups[i].packed != NULL)
            device_event_free(l->groups[i].packed);
    mem_free(l->free_slots);
    mem_free(l->relay_from);
    mem_free(l->relay_landed);
    mem_free(l->relay_unpacked);
}
