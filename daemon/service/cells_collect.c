#include "service/cells_collect.h"

#include "base/mem.h"
#include "exec/wire.h"

#include "base/banned.h"

/* Per cell of the program: whether it crosses to another node, and the hold that stands for it. */
struct crossing {
    bool crosses;
    uint32_t hold; /* + 1; 0: none */
};

static bool is_remote(const struct plan_entry *plan, const struct program_stream *s)
{
    const struct topology *t = plan->topology;
    return s->peer < t->n_devices && t->devices[s->peer].node != plan->node;
}

static void crossings_mark(const struct plan_entry *plan, struct crossing *cells)
{
    const struct program *p = &plan->program;
    for (uint32_t i = 0; i < p->n_streams; i++)
        for (uint32_t k = 0; is_remote(plan, &p->streams[i]) && k < p->streams[i].n_items; k++)
            cells[program_item(p, p->streams[i].first_item + k).cell].crosses = true;
}

static bool is_source(const struct program *p, uint32_t hold)
{
    return p->places[program_hold(p, hold).place].side == PROGRAM_SOURCE;
}

static uint32_t holds_choose(const struct program *p, enum compare_mode mode,
                             struct crossing *cells)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_holds; i++) {
        struct crossing *c = &cells[program_hold(p, i).cell];
        bool taken = mode == COMPARE_FULL || wire_sampled(p->digest, program_hold_cell(p, i).id);
        if (!c->crosses || !taken || (c->hold != 0 && is_source(p, c->hold - 1)))
            continue;
        n += c->hold == 0;
        if (c->hold == 0 || is_source(p, i))
            c->hold = i + 1;
    }
    return n;
}

static bool is_wanted(const struct program *p, const struct crossing *c, enum cells_part which)
{
    return c->hold != 0 &&
           (which == CELLS_ALL || is_source(p, c->hold - 1) == (which == CELLS_OF_SOURCES));
}

int cells_collect(const struct plan_entry *plan, const uint64_t *holds, enum compare_mode mode,
                  enum cells_part which, struct cell_print **ret, uint32_t *ret_n)
{
    const struct program *p = &plan->program;
    struct cell_print *prints = NULL;
    *ret = NULL;
    *ret_n = 0;
    if (mode == COMPARE_OFF || plan->topology->n_nodes < 2)
        return 0;
    struct crossing *cells = mem_calloc(p->n_cells, sizeof *cells);
    if (cells == NULL)
        return RS_ENOMEM;
    crossings_mark(plan, cells);
    uint32_t n = 0, most = holds_choose(p, mode, cells);
    prints = mem_calloc(most, sizeof *prints);
    for (uint32_t i = 0; prints != NULL && i < p->n_cells; i++) {
        if (!is_wanted(p, &cells[i], which))
            continue;
        struct program_hold h = program_hold(p, cells[i].hold - 1);
        const struct program_place *place = &p->places[h.place];
        prints[n++] =
            (struct cell_print){.cell = program_cell(p, i).id,
                                .fingerprint = holds[cells[i].hold - 1],
                                .layout = place->side == PROGRAM_SOURCE ? 0 : 1 + place->layout,
                                .rank = place->rank};
    }
    mem_free(cells);
    if (prints == NULL)
        return RS_ENOMEM;
    *ret = prints;
    *ret_n = n;
    return 0;
}
