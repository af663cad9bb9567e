/* Any bytes as a program: refused with a reason, or one that can be run without a further check. Runs it like an
 * executor does: every message of every device in order, cut into the items and elements that it carries, every
 * place and box looked up. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "plan/program.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(bool holds)
{
    if (!holds)
        abort();
}

static void touch_place(const struct program *g, uint32_t place, uint32_t cell)
{
    const struct program_place *x = &g->places[place];
    const struct program_tensor *t = &g->tensors[program_cell(g, cell).tensor];
    const struct box *b = &g->boxes[program_cell(g, cell).box];
    uint64_t bytes = dtype_bytes((enum dtype)program_cell(g, cell).wire);
    demand(g->devices[x->device].device < g->n_plan_devices);
    demand(b->n_dims == t->n_dims);
    for (uint8_t d = 0; d < t->n_dims; d++) {
        demand(b->size[d] > 0 && b->offset[d] + b->size[d] <= t->shape[d]);
        bytes *= t->shape[d];
    }
    if (x->side == PROGRAM_SCRATCH)
        demand(t->scratch_offset + bytes <= g->scratch_bytes);
}

static void touch_item(const struct program *g, struct program_item item)
{
    if (item.from != PROGRAM_NONE)
        touch_place(g, item.from, item.cell);
    if (item.places == PROGRAM_NONE)
        return;
    for (uint32_t i = 1; i <= g->lists[item.places]; i++)
        touch_place(g, g->lists[item.places + i], item.cell);
}

/* A stream is received in order: `at` walks its items, `done` the bytes of the one at hand. */
struct cursor {
    uint32_t at;
    uint64_t done;
};

static void run_message(const struct program *g, const struct program_message *m, struct cursor *c)
{
    const struct program_stream *s = &g->streams[m->stream];
    struct box parts[2 * BOX_MAX_DIMS];
    demand(m->end - m->begin <= g->chunk_bytes);
    for (uint64_t left = m->end - m->begin; left > 0;) {
        demand(c->at < s->n_items);
        struct program_item item = program_item(g, s->first_item + c->at);
        uint32_t element = dtype_bytes((enum dtype)program_cell(g, item.cell).wire);
        uint64_t bytes = program_cell_bytes(g, item.cell), n = bytes - c->done;
        n = n < left ? n : left;
        demand(n % element == 0 && c->done % element == 0);
        demand(box_range(&g->boxes[program_cell(g, item.cell).box], c->done / element,
                         (c->done + n) / element, parts) <= 2 * BOX_MAX_DIMS);
        touch_item(g, item);
        left -= n;
        c->done += n;
        if (c->done == bytes)
            *c = (struct cursor){.at = c->at + 1};
    }
}

/* A few runs may be of more entries than there is time for. */
static bool is_long(const struct program *g)
{
    return (uint64_t)g->n_cells + g->n_items + g->n_holds > 1 << 16;
}

static void run(const struct program *g)
{
    struct cursor *cursors = calloc((size_t)g->n_streams + 1, sizeof *cursors);
    demand(cursors != NULL);
    for (uint32_t d = 0; d < g->n_devices; d++) {
        const struct program_device *x = &g->devices[d];
        for (uint32_t i = 0; i < x->n_messages; i++) {
            const struct program_message *m = &g->messages[x->first_message + i];
            run_message(g, m, &cursors[m->stream]);
        }
        for (uint32_t i = 0; i < x->n_copies; i++)
            touch_item(g, program_item(g, x->first_copy + i));
    }
    for (uint32_t i = 0; i < g->n_streams; i++)
        demand(cursors[i].at == g->streams[i].n_items);
    for (uint32_t i = 0; i < g->n_holds; i++)
        touch_place(g, program_hold(g, i).place, program_hold(g, i).cell);
    free(cursors);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct program g;
    struct err e = {0};
    uint64_t *exact = malloc(size > 0 ? size : 1); /* aligned, and ends where the bytes end */
    if (size > 0)
        memcpy(exact, data, size);
    if (program_open(exact, size, &g, &e) == 0) {
        if (!is_long(&g))
            run(&g);
    } else if (e.text[0] == '\0') {
        abort();
    }
    free(exact);
    return 0;
}
