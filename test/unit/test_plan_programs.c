/* Programs run byte by byte in a toy data plane, in the order rule of program.h and with the least
 * that it allows: one message at a time on each device, both ends at the front of their queues. So
 * what the programs of all nodes move is compared with the layouts, and a circle of waits would
 * show as no progress. */
#include <check.h>
#include <inttypes.h>

#include "plan/program.h"
#include "test/lib/plan_cases.h"

enum { MAX_TENSORS = 8, NEVER = UINT32_MAX };

/* Elements are 16-bit numbers of their own; float32 holds one in its upper half, so that the cast
 * to bfloat16 keeps it and nothing here has to know rounding. */
static uint16_t element_value(uint32_t tensor, uint64_t element)
{
    return (uint16_t)(1 + tensor * 1500 + element);
}

/* A destination rank's memory of one tensor. */
struct landing {
    uint16_t *value;
    uint32_t *round; /* in which it was written; NEVER: not yet */
};

struct node_program {
    struct buf bytes;
    struct program p;
};

struct machine {
    const struct plan_case *c;
    struct node_program *nodes;
    struct landing (*landing[CASE_MAX_LAYOUTS])[MAX_TENSORS]; /* [rank][tensor] */
    uint8_t **scratch;                                        /* [device] */
    uint32_t **scratch_round;                                 /* [device][byte] */
    uint32_t *next;                                           /* [device]: its next message */
    uint64_t network;
};

static uint32_t first_device(const struct topology *t, uint32_t node)
{
    uint32_t d = 0;
    while (d < t->n_devices && t->devices[d].node != node)
        d++;
    return d;
}

static void machine_init(struct machine *m, const struct plan_case *c, const struct plan *p)
{
    *m = (struct machine){.c = c};
    m->nodes = calloc(c->topology.n_nodes, sizeof *m->nodes);
    m->scratch = calloc(c->topology.n_devices, sizeof *m->scratch);
    m->scratch_round = calloc(c->topology.n_devices, sizeof *m->scratch_round);
    m->next = calloc(c->topology.n_devices, sizeof *m->next);
    for (uint32_t i = 0; i < c->topology.n_nodes; i++) {
        struct err e = {0};
        struct node_program *n = &m->nodes[i];
        buf_init(&n->bytes);
        ck_assert_msg(plan_program(p, i, &n->bytes, &e) == 0, "%s", e.text);
        ck_assert_msg(program_open(n->bytes.data, n->bytes.n_bytes, &n->p, &e) == 0, "%s", e.text);
        ck_assert_mem_eq(n->p.digest, plan_totals(p)->digest, 16);
        for (uint32_t d = 0; d < n->p.n_devices; d++) {
            uint32_t device = n->p.devices[d].device;
            ck_assert_uint_eq(device, first_device(&c->topology, i) + d);
            m->scratch[device] = calloc(n->p.scratch_bytes + 1, 1);
            m->scratch_round[device] = malloc((n->p.scratch_bytes + 1) * sizeof(uint32_t));
            for (uint64_t b = 0; b < n->p.scratch_bytes; b++)
                m->scratch_round[device][b] = NEVER;
        }
    }
    for (uint32_t i = 0; i < c->n_destinations; i++) {
        uint32_t n_ranks = c->destinations[i]->n_ranks;
        m->landing[i] = calloc(n_ranks, sizeof *m->landing[i]);
        for (uint32_t r = 0; r < n_ranks; r++)
            for (uint32_t t = 0; t < c->source->n_tensors; t++) {
                uint64_t n = layouts_elements(&c->source->tensors[t]);
                struct landing *l = &m->landing[i][r][t];
                l->value = calloc(n + 1, sizeof *l->value);
                l->round = malloc((n + 1) * sizeof *l->round);
                for (uint64_t k = 0; k < n; k++)
                    l->round[k] = NEVER;
            }
    }
}

static void machine_close(struct machine *m)
{
    const struct plan_case *c = m->c;
    for (uint32_t i = 0; i < c->n_destinations; i++) {
        for (uint32_t r = 0; r < c->destinations[i]->n_ranks; r++)
            for (uint32_t t = 0; t < c->source->n_tensors; t++) {
                free(m->landing[i][r][t].value);
                free(m->landing[i][r][t].round);
            }
        free(m->landing[i]);
    }
    for (uint32_t d = 0; d < c->topology.n_devices; d++) {
        free(m->scratch[d]);
        free(m->scratch_round[d]);
    }
    for (uint32_t i = 0; i < c->topology.n_nodes; i++)
        buf_close(&m->nodes[i].bytes);
    free(m->scratch);
    free(m->scratch_round);
    free(m->next);
    free(m->nodes);
}

/* --- one element --------------------------------------------------------- */

/* Where an item's k-th element is: tensor, row-major number in the whole tensor, coordinates. */
struct spot {
    uint32_t tensor;
    uint64_t element;
    uint64_t at[BOX_MAX_DIMS];
    uint32_t wire_bytes;
    const struct program_tensor *program_tensor;
};

static struct spot spot_of(const struct machine *m, const struct program *p, uint32_t cell,
                           uint64_t k)
{
    struct program_cell c = program_cell(p, cell);
    const struct box *b = &p->boxes[c.box];
    struct spot s = {.program_tensor = &p->tensors[c.tensor]};
    s.tensor = s.program_tensor->index;
    s.wire_bytes = dtype_bytes((enum dtype)c.wire);
    const struct tensor *t = &m->c->source->tensors[s.tensor];
    ck_assert_uint_eq(b->n_dims, t->n_dims);
    struct tensor local = {.n_dims = b->n_dims};
    memcpy(local.shape, b->size, sizeof local.shape);
    layouts_unravel(&local, k, s.at);
    for (unsigned d = 0; d < b->n_dims; d++) {
        s.at[d] += b->offset[d];
        ck_assert_uint_lt(s.at[d], t->shape[d]);
        s.element = s.element * t->shape[d] + s.at[d];
    }
    return s;
}

/* The place's value of an element, as it is before `round`; fails where there is none yet. */
static uint16_t place_read(const struct machine *m, uint32_t device_base,
                           const struct program_place *place, const struct spot *s, uint32_t round)
{
    const struct tensor *t = &m->c->source->tensors[s->tensor];
    uint32_t device = device_base + place->device;
    if (place->side == PROGRAM_SOURCE) {
        ck_assert_int_eq(m->c->source_device[place->rank], (int32_t)device);
        ck_assert_uint_eq(layouts_holds(m->c->source, t, place->rank, s->at), 1);
        return element_value(s->tensor, s->element);
    }
    if (place->side == PROGRAM_DESTINATION) {
        const struct landing *l = &m->landing[place->layout][place->rank][s->tensor];
        ck_assert_msg(l->round[s->element] < round, "round %u sends what round %u brings", round,
                      l->round[s->element]);
        return l->value[s->element];
    }
    uint64_t at = s->program_tensor->scratch_offset + s->element * s->wire_bytes;
    const uint8_t *bytes = m->scratch[device] + at;
    ck_assert_uint_lt(m->scratch_round[device][at], round);
    return (uint16_t)(bytes[s->wire_bytes - 2] | bytes[s->wire_bytes - 1] << 8);
}

static void scratch_write(struct machine *m, uint32_t device, const struct spot *s, uint16_t value,
                          uint32_t round)
{
    uint64_t at = s->program_tensor->scratch_offset + s->element * s->wire_bytes;
    for (uint32_t i = 0; i < s->wire_bytes; i++) {
        m->scratch[device][at + i] = 0;
        m->scratch_round[device][at + i] = round;
    }
    m->scratch[device][at + s->wire_bytes - 2] = (uint8_t)value;
    m->scratch[device][at + s->wire_bytes - 1] = (uint8_t)(value >> 8);
}

static void place_write(struct machine *m, uint32_t device_base, const struct program_place *place,
                        const struct spot *s, uint16_t value, uint32_t round)
{
    if (place->side == PROGRAM_SCRATCH) {
        scratch_write(m, device_base + place->device, s, value, round);
        return;
    }
    ck_assert_int_eq(place->side, PROGRAM_DESTINATION);
    const struct layout *l = m->c->destinations[place->layout];
    int64_t i = layout_find(l, m->c->source->tensors[s->tensor].name);
    ck_assert_int_ge(i, 0);
    ck_assert_uint_eq(dtype_bytes(l->tensors[i].dtype), s->wire_bytes);
    ck_assert_uint_eq(layouts_holds(l, &l->tensors[i], place->rank, s->at), 1);
    ck_assert_int_eq(m->c->destination_device[place->layout][place->rank],
                     (int32_t)(device_base + place->device));
    struct landing *landing = &m->landing[place->layout][place->rank][s->tensor];
    ck_assert_msg(landing->round[s->element] == NEVER, "element %" PRIu64 " is written again",
                  s->element);
    landing->value[s->element] = value;
    landing->round[s->element] = round;
}

static void write_all(struct machine *m, const struct program *p, uint32_t list,
                      const struct spot *s, uint16_t value, uint32_t round)
{
    uint32_t base = p->devices[0].device, n = p->lists[list];
    for (uint32_t i = 0; i < n; i++)
        place_write(m, base, &p->places[p->lists[list + 1 + i]], s, value, round);
}

/* --- streams ------------------------------------------------------------- */

/* The item and element that lie at a byte of a stream. */
static struct program_item stream_at(const struct program *p, const struct program_stream *s,
                                     uint64_t byte, uint64_t *ret_element)
{
    for (uint32_t i = s->first_item; i < s->first_item + s->n_items; i++) {
        uint64_t bytes = program_cell_bytes(p, program_item(p, i).cell);
        if (byte < bytes) {
            uint32_t wire = dtype_bytes((enum dtype)program_item_cell(p, i).wire);
            ck_assert_uint_eq(byte % wire, 0); /* messages hold whole elements */
            *ret_element = byte / wire;
            return program_item(p, i);
        }
        byte -= bytes;
    }
    ck_abort_msg("a message leaves its stream");
}

/* One message from both ends: the sender's next bytes land in the receiver's places. */
static void run_message(struct machine *m, const struct program *from, const struct program *to,
                        const struct program_message *send, const struct program_message *receive)
{
    const struct program_stream *out = &from->streams[send->stream];
    const struct program_stream *in = &to->streams[receive->stream];
    ck_assert_uint_eq(send->begin, receive->begin);
    ck_assert_uint_eq(send->end, receive->end);
    ck_assert_uint_eq(send->round, receive->round);
    ck_assert_uint_eq(out->bytes, in->bytes);
    ck_assert_uint_eq(out->tier, in->tier);
    ck_assert_uint_gt(send->end, send->begin);
    ck_assert_uint_le(send->end - send->begin, from->chunk_bytes);
    for (uint64_t byte = send->begin; byte < send->end;) {
        uint64_t k, j;
        struct program_item a = stream_at(from, out, byte, &k);
        struct program_item b = stream_at(to, in, byte, &j);
        struct spot s = spot_of(m, from, a.cell, k), d = spot_of(m, to, b.cell, j);
        ck_assert_uint_eq(program_cell(from, a.cell).id, program_cell(to, b.cell).id);
        ck_assert_uint_eq(s.tensor, d.tensor);
        ck_assert_uint_eq(s.element, d.element);
        ck_assert_uint_eq(s.wire_bytes, d.wire_bytes);
        uint16_t value =
            place_read(m, from->devices[0].device, &from->places[a.from], &s, send->round);
        write_all(m, to, b.places, &d, value, send->round);
        byte += s.wire_bytes;
    }
    if (out->tier == TIER_NETWORK)
        m->network += send->end - send->begin;
}

static void run_copies(struct machine *m, const struct program *p, const struct program_device *d)
{
    for (uint32_t i = d->first_copy; i < d->first_copy + d->n_copies; i++) {
        struct program_item item = program_item(p, i);
        ck_assert_uint_eq(p->places[item.from].side, PROGRAM_SOURCE);
        for (uint64_t k = 0; k < program_cell_elements(p, item.cell); k++) {
            struct spot s = spot_of(m, p, item.cell, k);
            uint16_t value = place_read(m, p->devices[0].device, &p->places[item.from], &s, 0);
            write_all(m, p, item.places, &s, value, 0);
        }
    }
}

/* --- order --------------------------------------------------------------- */

/* The device's message at the front of its queue, or NULL when it has done all. */
static const struct program_message *front(const struct machine *m, uint32_t device,
                                           const struct program **ret_program)
{
    uint32_t node = m->c->topology.devices[device].node;
    const struct program *p = &m->nodes[node].p;
    *ret_program = p;
    if (p->n_devices == 0)
        return NULL;
    const struct program_device *d = &p->devices[device - p->devices[0].device];
    return m->next[device] < d->n_messages ? &p->messages[d->first_message + m->next[device]]
                                           : NULL;
}

/* Runs the device's front message if its other end is at the front there. */
static bool try_device(struct machine *m, uint32_t device)
{
    const struct program *p, *q;
    const struct program_message *mine = front(m, device, &p), *theirs;
    if (mine == NULL)
        return false;
    const struct program_stream *s = &p->streams[mine->stream];
    ck_assert_uint_eq(s->device + p->devices[0].device, device);
    theirs = front(m, s->peer, &q);
    if (theirs == NULL)
        return false;
    const struct program_stream *t = &q->streams[theirs->stream];
    if (t->order != s->order || t->peer != device)
        return false;
    ck_assert_uint_ne(t->send, s->send);
    if (s->send)
        run_message(m, p, q, mine, theirs);
    else
        run_message(m, q, p, theirs, mine);
    m->next[device]++;
    m->next[s->peer]++;
    return true;
}

/* Devices get their turn at random; without progress some wait for each other. */
static void run_all(struct machine *m, uint64_t *seed)
{
    uint32_t n = m->c->topology.n_devices;
    for (uint32_t i = 0; i < m->c->topology.n_nodes; i++)
        for (uint32_t d = 0; d < m->nodes[i].p.n_devices; d++)
            run_copies(m, &m->nodes[i].p, &m->nodes[i].p.devices[d]);
    for (bool progress = true; progress;) {
        progress = false;
        uint32_t start = layouts_below(seed, n);
        for (uint32_t i = 0; i < n; i++)
            progress = try_device(m, (start + i) % n) || progress;
    }
    for (uint32_t d = 0; d < n; d++) {
        const struct program *p;
        ck_assert_msg(front(m, d, &p) == NULL, "device %u waits for ever at its message %u", d,
                      m->next[d]);
    }
}

/* Messages ascend by (round, order); the ring is the one asked for. */
static void check_order(const struct program *p, const struct plan_options *o)
{
    ck_assert_uint_eq(p->ring_slots, o->ring_slots);
    ck_assert_uint_eq(p->chunk_bytes, o->chunk_bytes);
    for (uint32_t d = 0; d < p->n_devices; d++)
        for (uint32_t i = 1; i < p->devices[d].n_messages; i++) {
            const struct program_message *a = &p->messages[p->devices[d].first_message + i - 1];
            const struct program_message *b = a + 1;
            uint32_t x = p->streams[a->stream].order, y = p->streams[b->stream].order;
            bool same =
                a->stream == b->stream && a->end == b->begin; /* two messages in one round */
            ck_assert_msg(a->round < b->round || (a->round == b->round && (x < y || same)),
                          "message %u (round %u, order %u) stands before (round %u, order %u)",
                          i - 1, a->round, x, b->round, y);
        }
}

/* --- the end ------------------------------------------------------------- */

static void check_rank(const struct machine *m, uint32_t layout, uint32_t t, uint32_t rank)
{
    const struct layout *l = m->c->destinations[layout];
    int64_t source = layout_find(m->c->source, l->tensors[t].name);
    const struct landing *got = &m->landing[layout][rank][source];
    for (uint64_t i = 0; i < layouts_elements(&l->tensors[t]); i++) {
        uint64_t at[BOX_MAX_DIMS];
        layouts_unravel(&l->tensors[t], i, at);
        bool needed = layouts_holds(l, &l->tensors[t], rank, at) > 0;
        ck_assert_msg((got->round[i] != NEVER) == needed, "'%s' element %" PRIu64 " of rank %u",
                      l->tensors[t].name, i, rank);
        if (needed)
            ck_assert_msg(got->value[i] == element_value((uint32_t)source, i),
                          "'%s' element %" PRIu64 " of rank %u has another's value",
                          l->tensors[t].name, i, rank);
    }
}

/* Holds, which verification goes by: every needed element of a local destination place once, and of
 * a local source place only what it holds. */
static void check_holds(const struct machine *m, const struct program *p,
                        const struct program_place *place, uint32_t index)
{
    bool source = place->side == PROGRAM_SOURCE;
    const struct layout *l = source ? m->c->source : m->c->destinations[place->layout];
    for (uint32_t t = 0; t < l->n_tensors; t++) {
        int64_t number = layout_find(m->c->source, l->tensors[t].name);
        for (uint64_t i = 0; i < layouts_elements(&l->tensors[t]); i++) {
            uint64_t at[BOX_MAX_DIMS];
            unsigned in = 0;
            layouts_unravel(&l->tensors[t], i, at);
            for (uint32_t h = 0; h < p->n_holds; h++) {
                struct program_cell c = program_hold_cell(p, h);
                in += program_hold(p, h).place == index && p->tensors[c.tensor].index == number &&
                      layouts_box_has(&p->boxes[c.box], at) &&
                      (source || (enum dtype)c.wire == l->tensors[t].dtype);
            }
            unsigned holds = layouts_holds(l, &l->tensors[t], place->rank, at);
            if (source)
                ck_assert(in == 0 || holds == 1);
            else
                ck_assert_uint_eq(in, holds);
        }
    }
}

static void judge_programs(const struct plan_case *c, const struct plan *p, uint64_t *seed,
                           bool holds)
{
    struct machine m;
    machine_init(&m, c, p);
    run_all(&m, seed);
    for (uint32_t i = 0; i < c->n_destinations; i++)
        for (uint32_t t = 0; t < c->destinations[i]->n_tensors; t++)
            for (uint32_t r = 0; r < c->destinations[i]->n_ranks; r++)
                check_rank(&m, i, t, r);
    ck_assert_uint_eq(m.network, plan_totals(p)->network_bytes);
    for (uint32_t i = 0; i < c->topology.n_nodes; i++) {
        const struct program *q = &m.nodes[i].p;
        check_order(q, &c->input.options);
        for (uint32_t k = 0; holds && k < q->n_places; k++)
            if (q->places[k].side != PROGRAM_SCRATCH)
                check_holds(&m, q, &q->places[k], k);
    }
    machine_close(&m);
}

static unsigned rounds_of(unsigned fallback)
{
    const char *text = getenv("ORACLE_ROUNDS");
    return text == NULL ? fallback : (unsigned)strtoul(text, NULL, 10);
}

START_TEST(random_programs_land_every_element_and_never_wait_in_a_circle)
{
    unsigned rounds = rounds_of(150);
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t seed = 50000 + round;
        struct plan_case c;
        case_random(&c, &seed);
        struct plan *p = case_plan(&c);
        judge_programs(&c, p, &seed, round % 4 == 0);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

START_TEST(relays_work_with_a_ring_of_one_slot)
{
    uint64_t seed = 99;
    for (unsigned round = 0; round < 40; round++) {
        struct plan_case c;
        uint32_t sizes[6], domains[6];
        for (uint32_t i = 0; i < 6; i++) {
            sizes[i] = 2;
            domains[i] = i;
        }
        c = (struct plan_case){.n_destinations = 1};
        case_topology(&c.topology, 6, sizes, domains);
        c.source = layouts_random(&seed, "source", 2, 3, NULL);
        c.destinations[0] = layouts_random(&seed, "d", 10, 3, c.source);
        c.source_device = case_random_devices(&c.topology, 2, &seed);
        c.destination_device[0] = case_random_devices(&c.topology, 10, &seed);
        c.input.options = plan_options_default();
        c.input.options.ring_slots = 1;
        c.input.options.chunk_bytes = 16;
        c.input.options.least_piece_bytes = 16;
        case_finish(&c);
        struct plan *p = case_plan(&c);
        judge_programs(&c, p, &seed, true);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(random_programs_land_every_element_and_never_wait_in_a_circle)                               \
    X(relays_work_with_a_ring_of_one_slot)
#include "test/lib/main.h"
