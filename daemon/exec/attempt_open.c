/* What PREPARE proves and allocates. Nothing is written to a worker's memory here. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "exec/attempt.h"
#include "exec/pairs.h"
#include "exec/scaled.h"
#include "exec/skips.h"

#include "base/banned.h"

/* --- program and tables ----------------------------------------------------------------------- */

static int open_program(struct attempt *a, const struct wire_packet *packet, uint32_t n_layouts,
                        struct err *e)
{
    int r = proof_get(a->plane, packet->fds[0], packet->fds[1], n_layouts, &a->proof, e);
    if (r < 0)
        return r;
    a->program = a->proof->program;
    const struct program *p = &a->program;
    const struct wire_hello *h = &a->plane->hello;
    if (p->n_devices > a->plane->n_devices)
        return err_set(e, RS_EINVAL, "program for %u devices: there are %u", p->n_devices,
                       a->plane->n_devices);
    if (p->ring_slots == 0 || p->ring_slots > h->ring_slots || p->chunk_bytes > h->slot_bytes)
        return err_set(e, RS_EEXHAUSTED,
                       "staging of %u slots of %llu bytes: %u of %llu are the most", p->ring_slots,
                       (unsigned long long)p->chunk_bytes, h->ring_slots,
                       (unsigned long long)h->slot_bytes);
    return 0;
}

static int read_held(struct attempt *a, int fd, struct err *e)
{
    const void *data;
    size_t n_bytes;
    int r = wire_map_fd(fd, &data, &n_bytes, e);
    if (r < 0)
        return err_prefix(e, r, "held");
    if (n_bytes != a->program.n_holds)
        r = err_set(e, RS_EPROTO, "held: %zu bytes for %u holds", n_bytes, a->program.n_holds);
    else if ((a->held = mem_alloc(n_bytes)) == NULL)
        r = err_set(e, RS_ENOMEM, "out of memory");
    else
        memcpy(a->held, data, n_bytes);
    wire_unmap(data, n_bytes);
    return r;
}

/* --- places ----------------------------------------------------------------------------------- */

static int open_place(struct attempt *a, uint32_t number, const struct wire_place *w,
                      uint32_t n_layouts, struct err *e)
{
    const struct program_place *pp = &a->program.places[number];
    struct place *place = &a->places[number];
    if (pp->device >= a->program.n_devices)
        return err_set(e, RS_EPROTO, "device %u", pp->device);
    *place = (struct place){.plane = a->plane,
                            .program = &a->program,
                            .memory = w->memory,
                            .device = pp->device,
                            .index = a->proof->source_index};
    if (pp->side == PROGRAM_SCRATCH)
        return 0;
    if (pp->side == PROGRAM_DESTINATION) {
        if (pp->layout >= n_layouts)
            return err_set(e, RS_EPROTO, "destination layout %u: %u came", pp->layout, n_layouts);
        place->index = a->proof->tensors + (size_t)a->program.n_tensors * pp->layout;
    }
    struct worker *worker = worker_find(a->plane, w->worker);
    if (worker == NULL || worker->unbinding)
        return err_set(e, RS_EPRECOND, "worker %llx is not here", (unsigned long long)w->worker);
    if (worker->device != pp->device)
        return err_set(e, RS_EPRECOND, "worker %llx is on device %u, the plan says %u",
                       (unsigned long long)w->worker, worker->device, pp->device);
    if (w->memory > WIRE_SHADOW || worker->bindings[w->memory] == NULL)
        return err_set(e, RS_EPRECOND, "worker %llx has no %s memory bound",
                       (unsigned long long)w->worker, w->memory == WIRE_LIVE ? "live" : "shadow");
    worker->uses++;
    place->worker = worker;
    place->source = pp->side == PROGRAM_SOURCE;
    int r = proof_place(a->proof, place, number, e);
    if (r == 0 && place->source)
        scaled_open(place);
    return r;
}

static int open_places(struct attempt *a, const struct wire_packet *packet,
                       const struct wire_prepare *m, struct err *e)
{
    const uint8_t *at = (const uint8_t *)packet->body + sizeof(*m);
    if (m->n_places != a->program.n_places)
        return err_set(e, RS_EPROTO, "%u places: the program has %u", m->n_places,
                       a->program.n_places);
    a->places = mem_calloc(m->n_places, sizeof(*a->places));
    if (a->places == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < m->n_places; i++) {
        struct wire_place w;
        memcpy(&w, at + i * sizeof(w), sizeof(w));
        int r = open_place(a, i, &w, m->n_layouts, e);
        if (r < 0)
            return err_prefix(e, r, "place %u", i);
    }
    return 0;
}

/* --- items ------------------------------------------------------------------------------------ */

static bool destination_hold(const struct attempt *a, uint32_t hold)
{
    return a->program.places[program_hold(&a->program, hold).place].side == PROGRAM_DESTINATION;
}

/* Of the holds that are to land, where some have landed before or are looked at by sample alone. */
static void count_holds(struct attempt *a)
{
    const struct program *p = &a->program;
    for (uint32_t i = 0; i < p->n_holds; i++) {
        uint64_t bytes = program_cell_bytes(p, program_hold(p, i).cell);
        if (!destination_hold(a, i) || bytes == 0)
            continue;
        bool held = a->held != NULL && a->held[i] != 0;
        *(held ? &a->progress.skipped_bytes : &a->progress.total_bytes) += bytes;
        a->n_landings_left += held ? 0 : 1;
        a->n_checks_left += attempt_checks(a, program_hold(p, i).cell) ? 1 : 0;
    }
}

/* Counts what is to happen. */
static void count_work(struct attempt *a)
{
    const struct program *p = &a->program;
    const struct proof *x = a->proof;
    for (uint32_t i = 0, end; i < p->n_items;) {
        uint64_t elements = program_cell_elements(p, program_item(p, i).cell);
        for (end = i + program_like_items(p, i, p->n_items - i); i < end; i++)
            a->item_left[i] = elements;
    }
    a->n_reads_left = x->n_reads;
    if (a->held != NULL || a->verify == WIRE_VERIFY_SAMPLED) {
        count_holds(a);
        return;
    }
    a->progress.total_bytes = x->destination_bytes;
    a->n_landings_left = x->n_destinations;
    a->n_checks_left = a->verify == WIRE_VERIFY_FULL ? x->n_destinations : 0;
}

/* --- what is held already --------------------------------------------------------------------- */

/* Flags of a stream's items are those of its receiving end, where that is here. */
static void flags_from_partner(const struct program *p, uint32_t stream, uint32_t partner,
                               uint8_t *flags)
{
    const struct program_stream *s = &p->streams[stream], *r = &p->streams[partner];
    if (s->n_items == r->n_items)
        memcpy(flags + s->first_item, flags + r->first_item, s->n_items);
}

static int flags_from_record(const struct program *p, uint32_t stream,
                             const struct skips_record *record, uint8_t *flags, struct err *e)
{
    const struct program_stream *s = &p->streams[stream];
    if (record == NULL)
        return 0;
    if (record->n_items != s->n_items)
        return err_set(e, RS_EPROTO, "skips: stream %u has %u items, its receiver says %u",
                       s->order, s->n_items, record->n_items);
    for (uint32_t i = 0; i < s->n_items; i++)
        flags[s->first_item + i] = skips_has(record, i);
    return 0;
}

struct stream_order {
    uint32_t order, stream;
};

static int order_compare(const void *a, const void *b)
{
    uint32_t x = ((const struct stream_order *)a)->order;
    uint32_t y = ((const struct stream_order *)b)->order;
    return x < y ? -1 : x > y;
}

/* partner: the local receiving stream with the same order; itself for a receiving one. */
static void find_partners(const struct program *p, struct stream_order *sorted, uint32_t *partner)
{
    for (uint32_t s = 0; s < p->n_streams; s++)
        sorted[s] = (struct stream_order){p->streams[s].order, s};
    qsort(sorted, p->n_streams, sizeof(*sorted), order_compare);
    for (uint32_t i = 0; i < p->n_streams; i++) {
        uint32_t s = sorted[i].stream;
        partner[s] = p->streams[s].send == 0 ? s : PROGRAM_NONE;
        for (uint32_t k = i > 0 ? i - 1 : 0; k < p->n_streams && k <= i + 1; k++)
            if (sorted[k].order == sorted[i].order && p->streams[sorted[k].stream].send == 0)
                partner[s] = sorted[k].stream;
    }
}

/* Per item of a stream: all that take it hold it. */
static int flag_items(const struct attempt *a, const struct skips *skips, const uint32_t *partner,
                      uint8_t *flags, struct err *e)
{
    const struct program *p = &a->program;
    int r = 0;
    for (uint32_t s = 0; s < p->n_streams && a->held != NULL; s++)
        for (uint32_t i = 0; i < p->streams[s].n_items && p->streams[s].send == 0; i++)
            flags[p->streams[s].first_item + i] =
                skips_item_held(p, a->held, p->streams[s].first_item + i);
    for (uint32_t s = 0; s < p->n_streams && r == 0; s++) {
        if (p->streams[s].send == 0)
            continue;
        if (partner[s] != PROGRAM_NONE)
            flags_from_partner(p, s, partner[s], flags);
        else
            r = flags_from_record(p, s, skips_find(skips, p->streams[s].order), flags, e);
    }
    return r;
}

/* Where a stream's messages stand: they come in ascending order. */
struct stream_at {
    uint32_t item;
    uint64_t begin; /* of that item in the stream */
};

/* Bytes in [begin, end) of the stream that are of items without a flag. */
static uint64_t bytes_needed(const struct program *p, const uint8_t *flags,
                             const struct program_stream *s, struct stream_at *at, uint64_t begin,
                             uint64_t end)
{
    uint64_t needed = 0;
    for (; at->item < s->first_item + s->n_items && at->begin < end; at->item++) {
        uint64_t bytes = program_cell_bytes(p, program_item(p, at->item).cell);
        uint64_t from = at->begin > begin ? at->begin : begin;
        uint64_t to = at->begin + bytes < end ? at->begin + bytes : end;
        if (flags[at->item] == 0 && to > from)
            needed += to - from;
        if (at->begin + bytes > end)
            break; /* the next message begins in this item */
        at->begin += bytes;
    }
    return needed;
}

static void shorten_messages(struct attempt *a, struct stream_at *at)
{
    const struct program *p = &a->program;
    for (uint32_t s = 0; s < p->n_streams; s++)
        at[s].item = p->streams[s].first_item;
    for (uint32_t i = 0; i < p->n_messages; i++) {
        const struct program_message *m = &p->messages[i];
        a->message_bytes[i] = bytes_needed(p, a->item_needless, &p->streams[m->stream],
                                           &at[m->stream], m->begin, m->end);
    }
}

/* What all takers of an item hold is left out of its message at both ends. The sender looks at the
 * receiver's stream, or at what the receiver's node told of it. */
static int skip_held(struct attempt *a, const struct skips *skips, struct err *e)
{
    const struct program *p = &a->program;
    uint32_t *partner = mem_calloc(p->n_streams, sizeof(*partner));
    struct stream_at *at = mem_calloc(p->n_streams, sizeof(*at));
    struct stream_order *sorted = mem_calloc(p->n_streams, sizeof(*sorted));
    a->item_needless = mem_zalloc(p->n_items);
    a->message_bytes = mem_calloc(p->n_messages, sizeof(*a->message_bytes));
    int r = partner == NULL || at == NULL || sorted == NULL || a->item_needless == NULL ||
                    a->message_bytes == NULL
                ? err_set(e, RS_ENOMEM, "out of memory")
                : 0;
    if (r == 0 && p->n_streams > 0) {
        find_partners(p, sorted, partner);
        r = flag_items(a, skips, partner, a->item_needless, e);
    }
    if (r == 0)
        shorten_messages(a, at);
    mem_free(partner);
    mem_free(at);
    mem_free(sorted);
    return r;
}

/* fd < 0: no other node told anything. */
static int read_skips(struct attempt *a, int fd, struct err *e)
{
    const void *data = "";
    size_t n_bytes = 0;
    struct skips skips = {0};
    int r = fd < 0 ? 0 : wire_map_fd(fd, &data, &n_bytes, e);
    if (r < 0)
        return err_prefix(e, r, "skips");
    r = skips_open(data, n_bytes, &skips, e);
    if (r == 0)
        r = skip_held(a, &skips, e);
    skips_close(&skips);
    wire_unmap(data, n_bytes);
    return r;
}

/* --- memory ----------------------------------------------------------------------------------- */

static int open_tables(struct attempt *a, struct err *e)
{
    const struct program *p = &a->program;
    a->item_left = mem_calloc(p->n_items, sizeof(*a->item_left));
    a->item_print = mem_calloc(p->n_items, sizeof(*a->item_print));
    a->item_skipped = mem_zalloc(p->n_items);
    a->hold_prints = mem_calloc(p->n_holds, sizeof(*a->hold_prints));
    a->hold_state = mem_zalloc(p->n_holds);
    a->cell_prints = mem_calloc(p->n_cells, sizeof(*a->cell_prints));
    a->cell_known = mem_zalloc(p->n_cells);
    a->counted = mem_calloc(p->n_devices, sizeof(*a->counted));
    a->cursors = mem_calloc(p->n_streams, sizeof(*a->cursors));
    a->n_pumps = p->n_devices * a->plane->n_ways;
    a->copiers = mem_calloc(a->n_pumps, sizeof(*a->copiers));
    a->checkers = mem_calloc(a->n_pumps, sizeof(*a->checkers));
    a->lanes = mem_calloc(p->n_devices, sizeof(*a->lanes));
    if (a->item_left == NULL || a->item_print == NULL || a->item_skipped == NULL ||
        a->hold_prints == NULL || a->hold_state == NULL || a->cell_prints == NULL ||
        a->cell_known == NULL || a->counted == NULL || a->cursors == NULL || a->copiers == NULL ||
        a->checkers == NULL || a->lanes == NULL)
        return err_set(e, RS_ENOMEM, "out of memory for %u items and %u holds", p->n_items,
                       p->n_holds);
    return 0;
}

static uint32_t device_holds(const struct attempt *a, uint32_t device)
{
    uint32_t n = 0, first, end;
    for (uint32_t i = 0; i < a->program.n_places; i++) {
        program_holds_of(&a->program, i, &first, &end);
        n += a->program.places[i].device == device ? end - first : 0;
    }
    return n;
}

static int open_parts(struct attempt *a, struct err *e)
{
    const struct program *p = &a->program;
    for (uint32_t s = 0; s < p->n_streams; s++)
        a->cursors[s].item = p->streams[s].first_item;
    for (uint32_t d = 0; d < p->n_devices; d++) {
        copiers_init(a, d);
        int r = checkers_init(a, d, device_holds(a, d));
        if (r == 0)
            r = lane_init(&a->lanes[d], a, d, a->cursors);
        if (r < 0)
            return err_set(e, r, "device %u: %s", d, err_name(r));
    }
    return 0;
}

/* Grows it; what it held is lost. */
static int scratch_reserve(struct plane_device *d, uint64_t need, struct err *e)
{
    void *p;
    if (need <= d->scratch_bytes)
        return 0;
    if (d->scratch_bytes > 0)
        device_free(d->device, d->scratch, d->scratch_bytes);
    budget_give(&d->budget, BUDGET_SCRATCH, d->scratch_bytes);
    d->scratch = NULL;
    d->scratch_bytes = 0;
    int r = budget_take(&d->budget, BUDGET_SCRATCH, need, e);
    if (r < 0)
        return r;
    r = device_alloc(d->device, need, &p, e);
    if (r < 0) {
        budget_give(&d->budget, BUDGET_SCRATCH, need);
        return r;
    }
    d->scratch = p;
    d->scratch_bytes = need;
    return 0;
}

/* Attempts of different models may run at once on devices of their own. */
static bool takes_part(const struct attempt *a, uint32_t device)
{
    const struct program_device *d = &a->program.devices[device];
    bool any = d->n_messages > 0 || d->n_copies > 0;
    for (uint32_t i = 0; i < a->program.n_places && !any; i++)
        any = a->program.places[i].device == device;
    return any;
}

static int open_devices(struct attempt *a, struct err *e)
{
    const struct program *p = &a->program;
    for (uint32_t i = 0; i < p->n_devices; i++) {
        struct plane_device *d = &a->plane->devices[i];
        if (!takes_part(a, i))
            continue;
        if (d->user != NULL)
            return err_set(e, RS_EPRECOND, "device %u is used by attempt %llu of model %llx", i,
                           (unsigned long long)d->user->number,
                           (unsigned long long)d->user->model->id);
        int r = device_error(d->device, e);
        if (r == 0 && p->devices[i].n_messages > 0)
            r = ring_reserve(a->plane, i, p->ring_slots * p->chunk_bytes, e);
        if (r == 0)
            r = scratch_reserve(d, p->scratch_bytes, e);
        if (r < 0)
            return err_prefix(e, r, "device %u", i);
        d->user = a;
    }
    for (uint32_t i = 0; i < p->n_places; i++)
        a->places[i].scratch = a->plane->devices[a->places[i].device].scratch;
    return 0;
}

int attempt_open(struct attempt *a, struct wire_packet *packet, struct err *e)
{
    struct wire_prepare m;
    if (packet->header.body_bytes < sizeof(m))
        return err_set(e, RS_EPROTO, "body of %u bytes", packet->header.body_bytes);
    memcpy(&m, packet->body, sizeof(m));
    if (packet->header.body_bytes - sizeof(m) != (uint64_t)m.n_places * sizeof(struct wire_place) ||
        packet->n_fds !=
            2U + (m.has_held != 0) + (m.has_peers != 0) + (m.has_skips != 0) + (m.has_comm != 0) ||
        m.verify > WIRE_VERIFY_FULL || m.n_layouts > WIRE_MAX_BYTES)
        return err_set(e, RS_EPROTO, "its body, table and descriptors do not fit together");
    if (m.deadline_ns != 0 && clock_mono_ns() > m.deadline_ns)
        return err_set(e, RS_EDEADLINE, "it came after its deadline");
    uint32_t next_fd = 2;
    int held_fd = m.has_held != 0 ? packet->fds[next_fd++] : -1;
    int peers_fd = m.has_peers != 0 ? packet->fds[next_fd++] : -1;
    int skips_fd = m.has_skips != 0 ? packet->fds[next_fd++] : -1;
    int comm_fd = m.has_comm != 0 ? packet->fds[next_fd] : -1;
    a->verify = (enum wire_verify)m.verify;
    int r = open_program(a, packet, m.n_layouts, e);
    if (r == 0 && held_fd >= 0)
        r = read_held(a, held_fd, e);
    if (r == 0 && peers_fd >= 0)
        r = links_read_peers(a, peers_fd, e);
    if (r == 0 && comm_fd >= 0)
        r = links_read_comm(a, comm_fd, e);
    if (r == 0)
        r = open_places(a, packet, &m, e);
    if (r == 0)
        r = proof_items(a->proof, e);
    if (r == 0)
        r = open_tables(a, e);
    if (r == 0)
        count_work(a);
    if (r == 0 && (a->held != NULL || skips_fd >= 0))
        r = read_skips(a, skips_fd, e);
    if (r == 0)
        r = pairs_check(a, e);
    if (r == 0)
        r = links_check(a, e);
    if (r == 0)
        r = open_devices(a, e);
    if (r == 0)
        r = open_parts(a, e);
    if (r == 0)
        r = links_open(a, e);
    if (r == 0)
        r = transport_begin(a->model->transport, a->number, e);
    return r == 0 ? links_connect(a, m.deadline_ns, e) : r;
}

void attempt_close(struct attempt *a)
{
    for (uint32_t d = 0; d < a->plane->n_devices; d++)
        if (a->plane->devices[d].user == a)
            a->plane->devices[d].user = NULL;
    for (uint32_t d = 0; d < a->program.n_devices && a->lanes != NULL; d++)
        lane_close(&a->lanes[d]);
    for (uint32_t i = 0; i < a->n_pumps && a->checkers != NULL; i++)
        mem_free(a->checkers[i].queue);
    samples_close(a);
    for (uint32_t i = 0; i < a->program.n_places && a->places != NULL; i++)
        if (a->places[i].worker != NULL)
            worker_release(a->plane, (struct worker *)(uintptr_t)a->places[i].worker);
    mem_free(a->item_left);
    mem_free(a->item_print);
    mem_free(a->item_skipped);
    mem_free(a->item_needless);
    mem_free(a->message_bytes);
    mem_free(a->hold_prints);
    mem_free(a->hold_state);
    mem_free(a->cell_prints);
    mem_free(a->cell_known);
    mem_free(a->counted);
    mem_free(a->cursors);
    mem_free(a->copiers);
    mem_free(a->checkers);
    mem_free(a->lanes);
    mem_free(a->places);
    mem_free(a->held);
    mem_free(a->peers);
    mem_free(a->peer_of);
    mem_free(a->takes_part);
    mem_free(a->excluded);
    mem_free(a->pairs);
    proof_put(a->plane, a->proof);
    mem_free(a);
}
