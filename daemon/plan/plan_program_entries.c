/* Holds, items, copies, streams and messages: added in the order in which they are found, laid out in the program's. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_program.h"

#include "base/banned.h"

static int add_hold_places(struct encoder *x, const struct set *s, uint8_t side)
{
    for (uint32_t i = s->first; i < s->first + s->n; i++) {
        if (!end_here(x, i))
            continue;
        uint32_t place;
        int r = encoder_end_place(x, i, side, &place);
        if (r == 0)
            r = vec_reserve(&x->hold_places, x->hold_places.n + 1);
        if (r != 0)
            return r;
        x->hold_places.at[x->hold_places.n++] = place;
    }
    return 0;
}

int encoder_holds(struct encoder *x, const struct plan_group *g, uint32_t first, uint32_t count)
{
    const struct plan *p = x->p;
    int r = 0;
    x->hold_places.n = 0;
    if (x->set_here[g->source])
        r = add_hold_places(x, &p->sets.at[g->source], PROGRAM_SOURCE);
    if (r == 0 && x->set_here[g->takers])
        r = add_hold_places(x, &p->sets.at[g->takers], PROGRAM_DESTINATION);
    if (r == 0)
        r = vec_reserve(&x->holds, x->holds.n + x->hold_places.n);
    if (r == 0 && (uint64_t)x->hold_places.n * count > PROGRAM_MOST - x->n_holds)
        r = RS_EEXHAUSTED;
    if (r != 0 || count == 0)
        return r;
    for (uint32_t k = 0; k < x->hold_places.n; k++)
        x->holds.at[x->holds.n++] = (struct hold_stretch){x->hold_places.at[k], first, count};
    x->n_holds += (uint32_t)x->hold_places.n * count;
    return 0;
}

int encoder_items(struct encoder *x, struct program_item item, uint32_t n)
{
    struct program_item_run *last;
    if (n > PROGRAM_MOST - x->n_items)
        return RS_EEXHAUSTED;
    if (vec_reserve(&x->v_item_runs, x->v_item_runs.n + 1) != 0)
        return RS_ENOMEM;
    last = x->v_item_runs.n > 0 ? &x->v_item_runs.at[x->v_item_runs.n - 1] : NULL;
    if (n > 0 && (last == NULL || last->from != item.from || last->places != item.places ||
                  last->cell + (x->n_items - last->first) != item.cell))
        x->v_item_runs.at[x->v_item_runs.n++] =
            (struct program_item_run){x->n_items, item.cell, item.from, item.places};
    x->n_items += n;
    return 0;
}

int encoder_copies(struct encoder *x, uint32_t device, struct program_item item, uint32_t n)
{
    if (vec_reserve(&x->copies, x->copies.n + 1) != 0)
        return RS_ENOMEM;
    x->copies.at[x->copies.n++] = (struct routed_copies){device, n, item};
    return 0;
}

int encoder_message(struct encoder *x, struct program_message m, uint32_t order)
{
    if (x->messages.n >= NONE32 - 1)
        return RS_EEXHAUSTED;
    if (vec_reserve(&x->messages, x->messages.n + 1) != 0)
        return RS_ENOMEM;
    uint32_t device = x->v_streams.at[m.stream].device;
    x->messages.at[x->messages.n++] = (struct routed_message){m, device, order};
    return 0;
}

int encoder_stream(struct encoder *x, uint32_t from, uint32_t to, uint32_t order, bool send,
                   uint8_t tier)
{
    if (vec_reserve(&x->v_streams, x->v_streams.n + 1) != 0)
        return RS_ENOMEM;
    struct program_stream *s = &x->v_streams.at[x->v_streams.n++];
    memset(s, 0, sizeof *s);
    s->device = x->local[send ? from : to];
    s->peer = send ? to : from;
    s->order = order;
    s->first_item = x->n_items;
    s->send = send;
    s->tier = tier;
    return 0;
}

static int message_compare(const void *a, const void *b)
{
    const struct routed_message *p = a, *q = b;
    if (p->device != q->device)
        return p->device < q->device ? -1 : 1;
    if (p->m.round != q->m.round)
        return p->m.round < q->m.round ? -1 : 1;
    if (p->order != q->order)
        return p->order < q->order ? -1 : 1;
    return p->m.begin < q->m.begin ? -1 : p->m.begin > q->m.begin;
}

/* By (place, cell): they were added with ascending cells, so it is enough to part them by place. */
static int part_by_place(const struct encoder *x, struct hold_stretch *sorted)
{
    size_t *at = mem_calloc(x->v_places.n + 1, sizeof *at);
    if (at == NULL)
        return RS_ENOMEM;
    for (size_t i = 0; i < x->holds.n; i++)
        at[x->holds.at[i].place + 1]++;
    for (size_t i = 0; i < x->v_places.n; i++)
        at[i + 1] += at[i];
    for (size_t i = 0; i < x->holds.n; i++)
        sorted[at[x->holds.at[i].place]++] = x->holds.at[i];
    mem_free(at);
    return 0;
}

static int sort_holds(struct encoder *x)
{
    struct hold_stretch *sorted = mem_alloc((x->holds.n + 1) * sizeof *sorted);
    int r = sorted == NULL ? RS_ENOMEM : part_by_place(x, sorted);
    uint32_t n = 0;
    if (r == 0)
        r = vec_reserve(&x->v_hold_runs, x->holds.n);
    for (size_t i = 0; i < x->holds.n && r == 0; i++) {
        const struct hold_stretch *h = &sorted[i];
        if (i == 0 || h->place != h[-1].place || h->cell != h[-1].cell + h[-1].n)
            x->v_hold_runs.at[x->v_hold_runs.n++] = (struct program_hold_run){n, h->place, h->cell};
        n += h->n;
    }
    mem_free(sorted);
    return r;
}

/* Runs begin with the number of their first entry; marks as in program.h. */
static int mark(struct marks *m, const void *runs, size_t run_bytes, size_t n_runs, uint32_t n)
{
    size_t run = 0;
    if (n == 0)
        return 0;
    if (vec_reserve(m, n / PROGRAM_MARK + 2) != 0)
        return RS_ENOMEM;
    for (uint32_t at = 0; at < n; at += PROGRAM_MARK) {
        while (run + 1 < n_runs &&
               *(const uint32_t *)(const void *)((const char *)runs + (run + 1) * run_bytes) <= at)
            run++;
        m->at[m->n++] = (uint32_t)run;
    }
    m->at[m->n++] = (uint32_t)n_runs - 1;
    return 0;
}

static int mark_all(struct encoder *x)
{
#define MARK(kind)                                                                                 \
    mark(&x->v_##kind##_marks, x->v_##kind##_runs.at, sizeof *x->v_##kind##_runs.at,               \
         x->v_##kind##_runs.n, x->n_##kind##s)
    int r = MARK(cell);
    if (r == 0)
        r = MARK(item);
    return r == 0 ? MARK(hold) : r;
#undef MARK
}

/* Copies behind the streams' items, by device. */
static int lay_out_copies(struct encoder *x)
{
    int r = 0;
    for (uint32_t d = 0; d < x->v_devices.n && r == 0; d++) {
        struct program_device *out = &x->v_devices.at[d];
        out->first_copy = x->n_items;
        for (size_t i = 0; i < x->copies.n && r == 0; i++)
            if (x->copies.at[i].device == d)
                r = encoder_items(x, x->copies.at[i].item, x->copies.at[i].n);
        out->n_copies = x->n_items - out->first_copy;
    }
    return r;
}

/* By device, in their order. */
static int lay_out_messages(struct encoder *x)
{
    if (vec_reserve(&x->v_messages, x->messages.n) != 0)
        return RS_ENOMEM;
    if (x->messages.n > 0)
        qsort(x->messages.at, x->messages.n, sizeof *x->messages.at, message_compare);
    for (uint32_t d = 0; d < x->v_devices.n; d++) {
        struct program_device *out = &x->v_devices.at[d];
        out->first_message = (uint32_t)x->v_messages.n;
        while (x->v_messages.n < x->messages.n && x->messages.at[x->v_messages.n].device == d) {
            x->v_messages.at[x->v_messages.n] = x->messages.at[x->v_messages.n].m;
            x->v_messages.n++;
        }
        out->n_messages = (uint32_t)x->v_messages.n - out->first_message;
    }
    return 0;
}

int encoder_lay_out(struct encoder *x)
{
    int r = sort_holds(x);
    if (r == 0)
        r = lay_out_copies(x);
    if (r == 0)
        r = lay_out_messages(x);
    return r == 0 ? mark_all(x) : r;
}
