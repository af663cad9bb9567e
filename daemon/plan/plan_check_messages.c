/* Checks the messages: what every node's program does, taken together. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_check.h"
#include "plan/plan_private.h"

#include "base/banned.h"

/* What was written on a node: (place, cell), and the item of a stream that brought it. */
struct written {
    uint64_t key;  /* place << 32 | cell */
    uint32_t item; /* NONE32: a copy */
};

struct node_check {
    const struct program *g;
    struct err *e;
    uint32_t node;
    VEC(struct written) v;
    uint32_t *first_round, *last_round; /* per item of a stream */
    uint64_t *begin;                    /* per item: where it begins in its stream */
    uint32_t *stream;                   /* per item */
    uint32_t *message_first;            /* per stream, into messages: */
    uint32_t *messages;                 /* by stream, ascending begin */
};

struct ends {
    VEC(struct stream_end) v;
};

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9E3779B97F4A7C15U;
    return h ^ h >> 29;
}

static int fault(struct node_check *c, uint32_t cell, const char *what)
{
    char text[256];
    struct program_cell x = program_cell(c->g, cell);
    return err_set(c->e, RS_EINTERNAL, "plan: node %u, tensor %u %s: %s", c->node,
                   c->g->tensors[x.tensor].index, box_text(&c->g->boxes[x.box], text, sizeof text),
                   what);
}

/* --- one node --------------------------------------------------------------------------------- */

/* First and last round of every item of every stream: its messages follow one another. */
static int item_rounds(struct node_check *c)
{
    const struct program *g = c->g;
    uint64_t *item_begin = mem_calloc((size_t)g->n_streams + 1, sizeof *item_begin);
    uint32_t *item = mem_calloc((size_t)g->n_streams + 1, sizeof *item);
    int r = item_begin == NULL || item == NULL ? err_set(c->e, RS_ENOMEM, "out of memory") : 0;
    for (uint32_t i = 0; i < g->n_messages && r == 0; i++) {
        const struct program_message *m = &g->messages[i];
        const struct program_stream *s = &g->streams[m->stream];
        while (item[m->stream] < s->n_items && item_begin[m->stream] < m->end) {
            uint32_t k = s->first_item + item[m->stream];
            uint64_t end = item_begin[m->stream] + program_cell_bytes(g, program_item(g, k).cell);
            if (m->begin <= item_begin[m->stream])
                c->first_round[k] = m->round;
            c->begin[k] = item_begin[m->stream];
            c->stream[k] = m->stream;
            c->last_round[k] = m->round;
            if (end > m->end)
                break;
            item_begin[m->stream] = end;
            item[m->stream]++;
        }
    }
    mem_free(item_begin);
    mem_free(item);
    return r;
}

static int list_messages(struct node_check *c)
{
    const struct program *g = c->g;
    uint32_t *key = mem_alloc(((size_t)g->n_messages + 1) * sizeof *key);
    if (key == NULL)
        return err_set(c->e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < g->n_messages; i++) {
        key[i] = g->messages[i].stream;
        c->message_first[key[i] + 1]++;
    }
    for (uint32_t i = 0; i < g->n_streams; i++)
        c->message_first[i + 1] += c->message_first[i];
    int r = sort_count(key, NULL, g->n_messages, g->n_streams, c->messages);
    mem_free(key);
    return r == 0 ? 0 : err_set(c->e, r, "out of memory");
}

static int write_list(struct node_check *c, struct program_item item, uint32_t index)
{
    const uint32_t *list = c->g->lists + item.places;
    if (vec_reserve(&c->v, c->v.n + list[0]) != 0)
        return err_set(c->e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 1; i <= list[0]; i++)
        c->v.at[c->v.n++] = (struct written){(uint64_t)list[i] << 32 | item.cell, index};
    return 0;
}

static int written_compare(const void *a, const void *b)
{
    const struct written *x = a, *y = b;
    return x->key < y->key ? -1 : x->key > y->key;
}

static int all_writes(struct node_check *c)
{
    const struct program *g = c->g;
    int r = 0;
    for (uint32_t i = 0; i < g->n_streams && r == 0; i++)
        for (uint32_t k = 0; k < g->streams[i].n_items && r == 0 && !g->streams[i].send; k++) {
            uint32_t item = g->streams[i].first_item + k;
            r = write_list(c, program_item(g, item), item);
        }
    for (uint32_t d = 0; d < g->n_devices && r == 0; d++)
        for (uint32_t k = 0; k < g->devices[d].n_copies && r == 0; k++)
            r = write_list(c, program_item(g, g->devices[d].first_copy + k), NONE32);
    if (c->v.n > 0)
        qsort(c->v.at, c->v.n, sizeof *c->v.at, written_compare);
    for (size_t i = 1; i < c->v.n && r == 0; i++)
        if (c->v.at[i].key == c->v.at[i - 1].key)
            r = fault(c, (uint32_t)c->v.at[i].key, "written twice in one place");
    return r;
}

static const struct written *find_written(const struct node_check *c, uint32_t place, uint32_t cell)
{
    struct written key = {.key = (uint64_t)place << 32 | cell};
    if (c->v.n == 0)
        return NULL;
    return bsearch(&key, c->v.at, c->v.n, sizeof key, written_compare);
}

/* Each destination's hold is written, and nothing else but scratch is. */
static int check_holds(struct node_check *c)
{
    const struct program *g = c->g;
    uint64_t takes = 0, writes = 0;
    for (uint32_t i = 0; i < g->n_holds; i++) {
        if (g->places[program_hold(g, i).place].side != PROGRAM_DESTINATION)
            continue;
        takes++;
        if (find_written(c, program_hold(g, i).place, program_hold(g, i).cell) == NULL)
            return fault(c, program_hold(g, i).cell, "never written");
    }
    for (size_t i = 0; i < c->v.n; i++)
        writes += g->places[c->v.at[i].key >> 32].side == PROGRAM_DESTINATION;
    return takes == writes
               ? 0
               : err_set(c->e, RS_EINTERNAL, "plan: node %u writes what no rank takes", c->node);
}

/* The first message of the item's stream that holds a byte beyond `at` of the item. */
static uint32_t message_at(const struct node_check *c, uint32_t item, uint64_t at)
{
    uint32_t low = c->message_first[c->stream[item]];
    uint32_t high = c->message_first[c->stream[item] + 1];
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (c->g->messages[c->messages[middle]].end <= c->begin[item] + at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Each message that sends on a part of item `out` lies in a later round than those that brought
 * that part, as item `in`. */
static bool comes_after(const struct node_check *c, uint32_t in, uint32_t out)
{
    const struct program *g = c->g;
    uint64_t bytes = program_cell_bytes(g, program_item(g, out).cell);
    uint32_t i = message_at(c, in, 0);
    for (uint32_t k = message_at(c, out, 0);
         k < c->message_first[c->stream[out] + 1] &&
         g->messages[c->messages[k]].begin < c->begin[out] + bytes;
         k++) {
        const struct program_message *m = &g->messages[c->messages[k]];
        uint64_t end = m->end - c->begin[out]; /* of the item's bytes in this message */
        end = end < bytes ? end : bytes;
        while (g->messages[c->messages[i]].end < c->begin[in] + end)
            i++;
        if (g->messages[c->messages[i]].round >= m->round)
            return false;
    }
    return true;
}

/* Everything sent is a source's, or was brought by messages of earlier rounds. */
static int check_sends(struct node_check *c)
{
    const struct program *g = c->g;
    for (uint32_t i = 0; i < g->n_streams; i++)
        for (uint32_t k = 0; k < g->streams[i].n_items && g->streams[i].send; k++) {
            uint32_t index = g->streams[i].first_item + k;
            struct program_item item = program_item(g, index);
            if (g->places[item.from].side == PROGRAM_SOURCE) {
                if (program_hold_at(g, item.from, item.cell) == PROGRAM_NONE)
                    return fault(c, item.cell, "sent by a source that does not hold it");
                continue;
            }
            const struct written *w = find_written(c, item.from, item.cell);
            if (w == NULL || w->item == NONE32)
                return fault(c, item.cell, "sent on, but never received");
            if (!comes_after(c, w->item, index))
                return fault(c, item.cell, "sent on before it is there");
        }
    return 0;
}

/* Copies read sources only: they have no round that could come after anything. */
static int check_copies(struct node_check *c)
{
    const struct program *g = c->g;
    for (uint32_t d = 0; d < g->n_devices; d++)
        for (uint32_t k = 0; k < g->devices[d].n_copies; k++) {
            struct program_item item = program_item(g, g->devices[d].first_copy + k);
            if (g->places[item.from].side != PROGRAM_SOURCE ||
                program_hold_at(g, item.from, item.cell) == PROGRAM_NONE)
                return fault(c, item.cell, "copied from where it is not");
        }
    return 0;
}

/* --- scratch ---------------------------------------------------------------------------------- */

/* A tensor's stay in a device's scratch: from the first message that writes it to the last that
 * reads it. */
struct stay {
    uint64_t where; /* device << 32 | tensor of the program */
    uint32_t begin, end;
    uint64_t offset;
};

static int stay_by_where(const void *a, const void *b)
{
    const struct stay *x = a, *y = b;
    if (x->where != y->where)
        return x->where < y->where ? -1 : 1;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static int stay_by_offset(const void *a, const void *b)
{
    const struct stay *x = a, *y = b;
    if (x->where >> 32 != y->where >> 32)
        return x->where >> 32 < y->where >> 32 ? -1 : 1;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static bool in_scratch(const struct program *g, struct program_item item, bool send)
{
    if (send)
        return g->places[item.from].side == PROGRAM_SCRATCH;
    const uint32_t *list = g->lists + item.places;
    for (uint32_t i = 1; i <= list[0]; i++)
        if (g->places[list[i]].side == PROGRAM_SCRATCH)
            return true;
    return false;
}

static uint32_t list_stays(const struct node_check *c, struct stay *v)
{
    const struct program *g = c->g;
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->n_streams; i++)
        for (uint32_t k = 0; k < g->streams[i].n_items; k++) {
            uint32_t index = g->streams[i].first_item + k;
            struct program_item item = program_item(g, index);
            if (!in_scratch(g, item, g->streams[i].send))
                continue;
            uint32_t tensor = program_cell(g, item.cell).tensor;
            v[n++] =
                (struct stay){(uint64_t)g->streams[i].device << 32 | tensor, c->first_round[index],
                              c->last_round[index], g->tensors[tensor].scratch_offset};
        }
    return n;
}

/* Tensors at one place of a device's scratch stay there one after another. */
static int check_scratch(struct node_check *c)
{
    struct stay *v = mem_calloc((size_t)c->g->n_items + 1, sizeof *v);
    if (v == NULL)
        return err_set(c->e, RS_ENOMEM, "out of memory");
    uint32_t n = list_stays(c, v), kept = 0;
    qsort(v, n, sizeof *v, stay_by_where);
    for (uint32_t i = 0; i < n; i++) {
        if (kept > 0 && v[kept - 1].where == v[i].where)
            v[kept - 1].end = v[i].end > v[kept - 1].end ? v[i].end : v[kept - 1].end;
        else
            v[kept++] = v[i];
    }
    qsort(v, kept, sizeof *v, stay_by_offset);
    int r = 0;
    for (uint32_t i = 1; i < kept && r == 0; i++)
        if (v[i].where >> 32 == v[i - 1].where >> 32 && v[i].offset == v[i - 1].offset &&
            v[i].begin <= v[i - 1].end)
            r = err_set(c->e, RS_EINTERNAL,
                        "plan: node %u: tensor %u is overwritten in scratch while it is in use",
                        c->node, c->g->tensors[(uint32_t)v[i - 1].where].index);
    mem_free(v);
    return r;
}

/* --- both ends -------------------------------------------------------------------------------- */

static int add_ends(struct node_check *c, struct ends *ends)
{
    const struct program *g = c->g;
    size_t first = ends->v.n;
    if (vec_reserve(&ends->v, ends->v.n + g->n_streams) != 0)
        return err_set(c->e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < g->n_streams; i++) {
        const struct program_stream *s = &g->streams[i];
        uint64_t h = mix(s->bytes, s->tier);
        for (uint32_t k = 0; k < s->n_items; k++)
            h = mix(h, program_item_cell(g, s->first_item + k).id);
        ends->v.at[ends->v.n++] = (struct stream_end){.digest = h,
                                                      .order = s->order,
                                                      .device = g->devices[s->device].device,
                                                      .peer = s->peer,
                                                      .send = s->send};
    }
    for (uint32_t i = 0; i < g->n_messages; i++) {
        const struct program_message *m = &g->messages[i];
        struct stream_end *x = &ends->v.at[first + m->stream];
        x->digest = mix(mix(mix(x->digest, m->begin), m->end), m->round);
    }
    return 0;
}

static int end_compare(const void *a, const void *b)
{
    const struct stream_end *x = a, *y = b;
    if (x->order != y->order)
        return x->order < y->order ? -1 : 1;
    return x->send < y->send ? -1 : x->send > y->send;
}

static int check_ends(struct ends *ends, struct err *e)
{
    if (ends->v.n > 0)
        qsort(ends->v.at, ends->v.n, sizeof *ends->v.at, end_compare);
    for (size_t i = 0; i < ends->v.n; i += 2) {
        const struct stream_end *a = &ends->v.at[i], *b = a + 1;
        if (i + 1 == ends->v.n || a->order != b->order || a->send != 0 || b->send != 1 ||
            a->device != b->peer || b->device != a->peer || a->digest != b->digest)
            return err_set(e, RS_EINTERNAL,
                           "plan: the two ends of stream %u (devices %u and %u) differ", a->order,
                           a->device, a->peer);
    }
    return 0;
}

static int check_node(const struct plan *p, uint32_t node, struct ends *ends, struct err *e)
{
    struct buf b;
    struct program g;
    buf_init(&b);
    int r = plan_program(p, node, &b, e);
    if (r == 0)
        r = program_open(b.data, b.n_bytes, &g, e);
    if (r != 0) {
        buf_close(&b);
        return r;
    }
    struct node_check c = {.g = &g, .e = e, .node = node};
    c.first_round = mem_calloc((size_t)g.n_items + 1, sizeof *c.first_round);
    c.last_round = mem_calloc((size_t)g.n_items + 1, sizeof *c.last_round);
    c.begin = mem_calloc((size_t)g.n_items + 1, sizeof *c.begin);
    c.stream = mem_calloc((size_t)g.n_items + 1, sizeof *c.stream);
    c.message_first = mem_calloc((size_t)g.n_streams + 2, sizeof *c.message_first);
    c.messages = mem_calloc((size_t)g.n_messages + 1, sizeof *c.messages);
    if (c.first_round == NULL || c.last_round == NULL || c.begin == NULL || c.stream == NULL ||
        c.message_first == NULL || c.messages == NULL)
        r = err_set(e, RS_ENOMEM, "out of memory");
    if (r == 0)
        r = item_rounds(&c);
    if (r == 0)
        r = list_messages(&c);
    if (r == 0)
        r = all_writes(&c);
    if (r == 0)
        r = check_holds(&c);
    if (r == 0)
        r = check_sends(&c);
    if (r == 0)
        r = check_copies(&c);
    if (r == 0)
        r = check_scratch(&c);
    if (r == 0)
        r = add_ends(&c, ends);
    mem_free(c.first_round);
    mem_free(c.last_round);
    mem_free(c.begin);
    mem_free(c.stream);
    mem_free(c.message_first);
    mem_free(c.messages);
    mem_free(c.v.at);
    buf_close(&b);
    return r;
}

int plan_check_messages(const struct plan *p, uint32_t n_nodes, struct err *e)
{
    struct ends ends = {0};
    int r = 0;
    for (uint32_t node = 0; node < n_nodes && r == 0; node++)
        r = check_node(p, node, &ends, e);
    if (r == 0)
        r = check_ends(&ends, e);
    mem_free(ends.v.at);
    return r;
}
