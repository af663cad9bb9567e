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
        r = vec_reserve(&x->v_holds, x->v_holds.n + x->hold_places.n * count);
    for (uint32_t i = 0; r == 0 && i < count; i++)
        for (uint32_t k = 0; k < x->hold_places.n; k++)
            x->v_holds.at[x->v_holds.n++] = (struct program_hold){x->hold_places.at[k], first + i};
    return r;
}

int encoder_item(struct encoder *x, struct program_item item)
{
    if (x->v_items.n >= NONE32 - 1)
        return RS_EEXHAUSTED;
    if (vec_reserve(&x->v_items, x->v_items.n + 1) != 0)
        return RS_ENOMEM;
    x->v_items.at[x->v_items.n++] = item;
    return 0;
}

int encoder_message(struct encoder *x, struct program_message m, uint32_t order)
{
    if (x->v_messages.n >= NONE32 - 1)
        return RS_EEXHAUSTED;
    if (vec_reserve(&x->v_messages, x->v_messages.n + 1) != 0)
        return RS_ENOMEM;
    uint32_t device = x->v_streams.at[m.stream].device;
    x->v_messages.at[x->v_messages.n++] = (struct routed_message){m, device, order};
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
    s->first_item = (uint32_t)x->v_items.n;
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
static int sort_holds(struct encoder *x)
{
    size_t n_places = x->v_places.n, n = x->v_holds.n;
    size_t *at = mem_calloc(n_places + 1, sizeof *at);
    struct program_hold *sorted = mem_alloc(n * sizeof *sorted);
    if (at == NULL || sorted == NULL) {
        mem_free(at);
        mem_free(sorted);
        return RS_ENOMEM;
    }
    for (size_t i = 0; i < n; i++)
        at[x->v_holds.at[i].place + 1]++;
    for (size_t i = 0; i < n_places; i++)
        at[i + 1] += at[i];
    for (size_t i = 0; i < n; i++)
        sorted[at[x->v_holds.at[i].place]++] = x->v_holds.at[i];
    mem_free(at);
    mem_free(x->v_holds.at);
    x->v_holds.at = sorted;
    x->v_holds.capacity = n;
    return 0;
}

int encoder_lay_out(struct encoder *x)
{
    uint32_t at = 0;
    int r = sort_holds(x);
    if (x->v_messages.n > 0)
        qsort(x->v_messages.at, x->v_messages.n, sizeof *x->v_messages.at, message_compare);
    for (uint32_t d = 0; d < x->v_devices.n && r == 0; d++) {
        struct program_device *out = &x->v_devices.at[d];
        out->first_copy = (uint32_t)x->v_items.n;
        for (size_t i = 0; i < x->v_copies.n && r == 0; i++)
            if (x->v_copies.at[i].device == d)
                r = encoder_item(x, x->v_copies.at[i].item);
        out->n_copies = (uint32_t)x->v_items.n - out->first_copy;
        out->first_message = at;
        while (at < x->v_messages.n && x->v_messages.at[at].device == d)
            at++;
        out->n_messages = at - out->first_message;
    }
    return r;
}
