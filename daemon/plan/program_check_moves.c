#include "plan/program_check.h"

#include "base/mem.h"
#include "plan/plan.h"

#include "base/banned.h"

/* --- ends of items ---------------------------------------------------------------------------- */

/* Of cells [cell, cell + n). */
static bool place_fits(const struct program *p, uint32_t place, uint32_t cell, uint32_t n)
{
    if (place >= p->n_places)
        return false;
    if (p->places[place].side != PROGRAM_SCRATCH)
        return true;
    for (uint32_t i = 0; i < n; i++)
        if (p->tensors[program_cell(p, cell + i).tensor].scratch_offset == UINT64_MAX)
            return false;
    return true;
}

/* The places that items are written to. */
static bool list_fits(const struct program *p, uint32_t list, uint32_t cell, uint32_t n)
{
    if (list >= p->n_lists || p->lists[list] == 0 || p->lists[list] > p->n_lists - list - 1)
        return false;
    for (uint32_t i = 1; i <= p->lists[list]; i++) {
        uint32_t place = p->lists[list + i];
        if (!place_fits(p, place, cell, n) || p->places[place].side == PROGRAM_SOURCE)
            return false;
    }
    return true;
}

/* Which ends the items of a stream or a device's copies have. */
struct ends {
    uint32_t device;
    bool reads, writes;
};

/* n items of one run. */
static int check_run(const struct program *p, uint32_t i, uint32_t n, struct ends ends,
                     struct err *e)
{
    struct program_item x = program_item(p, i);
    if (x.cell >= p->n_cells || n > p->n_cells - x.cell)
        return program_bad(e, "cell of item", i);
    if (ends.reads ? !place_fits(p, x.from, x.cell, n) || p->places[x.from].device != ends.device
                   : x.from != PROGRAM_NONE)
        return program_bad(e, "where to read item", i);
    if (ends.writes ? !list_fits(p, x.places, x.cell, n) : x.places != PROGRAM_NONE)
        return program_bad(e, "where to write item", i);
    return 0;
}

/* Items [at, at + n), run by run. */
static int check_items(const struct program *p, uint32_t at, uint32_t n, struct ends ends,
                       struct err *e)
{
    int r = 0;
    for (uint32_t i = at, most; i < at + n && r == 0; i += most) {
        uint32_t run = program_run(p->item_runs, sizeof *p->item_runs, p->item_marks, i);
        uint32_t end = run + 1 < p->n_item_runs ? p->item_runs[run + 1].first : p->n_items;
        most = (end < at + n ? end : at + n) - i;
        r = check_run(p, i, most, ends, e);
    }
    return r;
}

/* --- streams, copies -------------------------------------------------------------------------- */

/* Bytes of items that are checked; UINT64_MAX: too many. */
static uint64_t items_bytes(const struct program *p, uint32_t at, uint32_t n_items)
{
    uint64_t sum = 0;
    for (uint32_t i = at, n; i < at + n_items; i += n) {
        uint64_t bytes = program_cell_bytes(p, program_item(p, i).cell);
        n = program_like_items(p, i, at + n_items - i);
        if (bytes > (PROGRAM_LIMIT_BYTES - sum) / n)
            return UINT64_MAX;
        sum += n * bytes;
    }
    return sum;
}

static int check_streams(const struct program *p, uint32_t *ret_n_items, struct err *e)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < p->n_streams; i++) {
        const struct program_stream *s = &p->streams[i];
        if (s->device >= p->n_devices || s->peer >= p->n_plan_devices || s->send > 1 ||
            (s->tier != TIER_DOMAIN && s->tier != TIER_NETWORK))
            return program_bad(e, "ends of stream", i);
        if (i > 0 && (s->order < s[-1].order || (s->order == s[-1].order && s->send <= s[-1].send)))
            return program_bad(e, "order of stream", i);
        if (s->first_item != at || s->n_items == 0 || s->n_items > p->n_items - at)
            return program_bad(e, "items of stream", i);
        int r = check_items(p, at, s->n_items, (struct ends){s->device, s->send, !s->send}, e);
        if (r != 0)
            return r;
        if (items_bytes(p, at, s->n_items) != s->bytes || s->bytes > PROGRAM_LIMIT_BYTES)
            return program_bad(e, "sum of stream", i);
        at += s->n_items;
    }
    *ret_n_items = at;
    return 0;
}

static int check_copies(const struct program *p, uint32_t at, struct err *e)
{
    for (uint32_t i = 0; i < p->n_devices; i++) {
        const struct program_device *d = &p->devices[i];
        if (d->device >= p->n_plan_devices || (i > 0 && d->device <= d[-1].device))
            return program_bad(e, "number of device", i);
        if (d->first_copy != at || d->n_copies > p->n_items - at)
            return program_bad(e, "copies of device", i);
        int r = check_items(p, at, d->n_copies, (struct ends){i, true, true}, e);
        if (r != 0)
            return r;
        at += d->n_copies;
    }
    return at == p->n_items ? 0 : err_set(e, RS_EPROTO, "program: items that belong to nothing");
}

/* --- messages --------------------------------------------------------------------------------- */

/* How far a stream's messages have come: they must follow one another without a gap. */
struct progress {
    uint64_t bytes;      /* up to here */
    uint64_t item_begin; /* of `item`, the one that holds `bytes` */
    uint32_t item;
};

/* Goes on to the item that holds byte g->bytes. */
static bool whole_elements(const struct program *p, const struct program_stream *s,
                           struct progress *g)
{
    while (g->item < s->n_items) {
        uint32_t item = s->first_item + g->item;
        struct program_cell c = program_item_cell(p, item);
        uint64_t size = dtype_bytes((enum dtype)c.wire);
        uint64_t bytes = box_elements(&p->boxes[c.box]) * size;
        uint32_t n = program_like_items(p, item, s->n_items - g->item);
        uint64_t whole = (g->bytes - g->item_begin) / bytes;
        bool here = whole < n;
        n = here ? (uint32_t)whole : n;
        g->item += n;
        g->item_begin += n * bytes;
        if (here)
            return (g->bytes - g->item_begin) % size == 0;
    }
    return true;
}

static int check_message(const struct program *p, uint32_t i, uint32_t device, bool first,
                         struct progress *progress, struct err *e)
{
    const struct program_message *m = &p->messages[i];
    if (m->stream >= p->n_streams || p->streams[m->stream].device != device)
        return program_bad(e, "stream of message", i);
    const struct program_stream *s = &p->streams[m->stream];
    struct progress *g = &progress[m->stream];
    if (m->begin != g->bytes || m->end <= m->begin || m->end > s->bytes ||
        m->end - m->begin > p->chunk_bytes)
        return program_bad(e, "range of message", i);
    g->bytes = m->end;
    if (!whole_elements(p, s, g))
        return program_bad(e, "an element is cut by message", i);
    if (first)
        return 0;
    const struct program_message *before = m - 1;
    uint32_t order = p->streams[before->stream].order;
    if (m->round < before->round || (m->round == before->round && s->order < order))
        return program_bad(e, "order of message", i);
    return 0;
}

static int check_messages(const struct program *p, struct progress *progress, struct err *e)
{
    uint32_t at = 0;
    for (uint32_t d = 0; d < p->n_devices; d++) {
        if (p->devices[d].first_message != at || p->devices[d].n_messages > p->n_messages - at)
            return program_bad(e, "messages of device", d);
        for (uint32_t k = 0; k < p->devices[d].n_messages; k++) {
            int r = check_message(p, at + k, d, k == 0, progress, e);
            if (r != 0)
                return r;
        }
        at += p->devices[d].n_messages;
    }
    if (at != p->n_messages)
        return err_set(e, RS_EPROTO, "program: messages that belong to no device");
    for (uint32_t i = 0; i < p->n_streams; i++)
        if (progress[i].bytes != p->streams[i].bytes)
            return program_bad(e, "bytes without a message in stream", i);
    return 0;
}

static int check_all_messages(const struct program *p, struct err *e)
{
    struct progress *progress = mem_calloc((size_t)p->n_streams + 1, sizeof *progress);
    if (progress == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    int r = check_messages(p, progress, e);
    mem_free(progress);
    return r;
}

/* --- holds ------------------------------------------------------------------------------------ */

static int check_holds(const struct program *p, struct err *e)
{
    uint64_t behind = 0; /* the last hold, as place << 32 | cell */
    for (uint32_t i = 0; i < p->n_hold_runs; i++) {
        const struct program_hold_run *h = &p->hold_runs[i];
        uint32_t n = (i + 1 < p->n_hold_runs ? h[1].first : p->n_holds) - h->first;
        uint64_t key = (uint64_t)h->place << 32 | h->cell;
        if (h->place >= p->n_places || h->cell >= p->n_cells || n > p->n_cells - h->cell ||
            p->places[h->place].side == PROGRAM_SCRATCH)
            return program_bad(e, "place or cell of hold", h->first);
        if (i > 0 && key <= behind)
            return program_bad(e, "order of hold", h->first);
        behind = key + n - 1;
    }
    return 0;
}

int program_check_moves(const struct program *p, struct err *e)
{
    uint32_t n_items = 0;
    int r = check_streams(p, &n_items, e);
    if (r == 0)
        r = check_copies(p, n_items, e);
    if (r == 0)
        r = check_holds(p, e);
    if (r == 0)
        r = check_all_messages(p, e);
    return r;
}
