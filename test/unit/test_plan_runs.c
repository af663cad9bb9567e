/* A node's program keeps cells, items and holds as runs. Against plain tables: of the transfers of the whole plan, which
 * know no runs, and of the runs walked from the first to the last, which knows no marks. */
#include <stdlib.h>

#include "plan/program_format.h"
#include "test/lib/plan_random.h"

#include <check.h>

/* FSDP over eight devices of two nodes to two engines of TP4 on the same ones. Many tensors of a few shapes, between
 * them some that are like no other: long runs and short ones, in thousands of entries. */
static void many(struct zoo_case *c, enum plan_strategy strategy, uint64_t least_piece_bytes)
{
    static const uint64_t shapes[][2] = {{64, 32}, {32, 64}, {48, 48}};
    uint32_t eight = 8, dims[] = {2, 4}, first = 0;
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", 8);
    c->destinations[0] = case_layout("rollout", 8);
    int32_t sm = case_mesh(c->source, 1, &eight, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 2, dims, NULL, 0, 1);
    for (uint32_t i = 0; i < 240; i++) {
        char name[16];
        uint64_t own[] = {8 + i, 40};
        const uint64_t *shape = i % 10 == 9 ? own : shapes[i % 3];
        snprintf(name, sizeof name, "w%03u", i);
        case_tensor(c->source, name, DTYPE_BFLOAT16, 2, shape, sm, "0");
        case_tensor(c->destinations[0], name, DTYPE_BFLOAT16, 2, shape, dm, i % 2 ? "R1" : "R0");
    }
    case_topology(c, 2, 4, 1);
    case_finish(c, 0, &first);
    c->input.options.strategy = strategy;
    c->input.options.chunk_bytes = 1024;
    c->input.options.least_piece_bytes = least_piece_bytes;
}

enum { N_MANY = 4, N_RANDOM = 150 };

static void build(struct zoo_case *c, unsigned i)
{
    if (i < N_MANY)
        many(c, (enum plan_strategy)(i % 3), i < 3 ? 1 << 20 : 64);
    else
        random_case(7000 + i, c);
}

static void encode(const struct plan *p, uint32_t node, struct buf *b, struct program *g)
{
    struct err e = {0};
    buf_init(b);
    ck_assert_msg(plan_program(p, node, b, &e) == 0, "%s", e.text);
    ck_assert_msg(program_open(b->data, b->n_bytes, g, &e) == 0, "%s", e.text);
}

/* --- the plan's transfers -------------------------------------------------------------------------------- */

/* A row of a table: what is at a number, with the number first; rows are compared as bytes. */
struct row {
    uint64_t cell;
    uint64_t a, b, c;
};

struct table {
    struct row *at;
    size_t n, capacity;
};

static void add(struct table *t, struct row row)
{
    if (t->n == t->capacity) {
        t->capacity = t->capacity * 2 + 64;
        t->at = realloc(t->at, t->capacity * sizeof *t->at);
        ck_assert_ptr_nonnull(t->at);
    }
    t->at[t->n++] = row;
}

static int row_compare(const void *x, const void *y)
{
    const uint64_t *a = x, *b = y;
    for (size_t i = 0; i < 4; i++)
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    return 0;
}

static void sort(struct table *t)
{
    if (t->n > 0)
        qsort(t->at, t->n, sizeof *t->at, row_compare);
}

static void same_rows(struct table *got, struct table *want, const char *what)
{
    sort(got);
    sort(want);
    ck_assert_msg(got->n == want->n, "%s: %zu, not %zu", what, got->n, want->n);
    for (size_t i = 0; i < got->n; i++)
        ck_assert_msg(row_compare(&got->at[i], &want->at[i]) == 0, "%s: cell %llu or %llu", what,
                      (unsigned long long)got->at[i].cell, (unsigned long long)want->at[i].cell);
    free(got->at);
    free(want->at);
}

/* All of a box in one number. */
static uint64_t box_hash(const struct box *b)
{
    uint64_t h = b->n_dims;
    for (unsigned d = 0; d < b->n_dims; d++)
        h = ((h ^ b->offset[d]) * 0x9E3779B97F4A7C15U + b->size[d]) * 0xC2B2AE3D27D4EB4FU;
    return h;
}

/* What the transfers say of one node. */
struct transfers {
    const struct plan *p;
    const struct topology *t;
    uint32_t node;
    struct table cells; /* of the whole plan: (cell, box, tensor and wire) */
    struct table ends;  /* cells with a source or destination here */
    struct table takes; /* (cell, layout, rank) on this node */
    struct table sends; /* (cell, from device, to device) to other nodes */
};

static int note(const struct plan_transfer *t, void *arg)
{
    struct transfers *x = arg;
    struct row row = {t->cell, box_hash(&t->box),
                      (uint64_t)plan_tensor_origin(x->p, t->tensor) << 8 | t->wire, t->value};
    uint32_t from = x->t->devices[t->from.device].node, to = x->t->devices[t->to.device].node;
    add(&x->cells, row);
    if (from == x->node || to == x->node)
        add(&x->ends, row);
    if (to == x->node && t->to.side == SIDE_DESTINATION)
        add(&x->takes, (struct row){t->cell, t->to.layout, t->to.rank, 0});
    if (from == x->node && to != x->node)
        add(&x->sends, (struct row){t->cell, t->from.device, t->to.device, 0});
    return 0;
}

static bool has(const struct table *t, const struct row *row)
{
    return t->n > 0 && bsearch(row, t->at, t->n, sizeof *row, row_compare) != NULL;
}

static int by_cell(const void *x, const void *y)
{
    uint64_t a = ((const struct row *)x)->cell, b = ((const struct row *)y)->cell;
    return a < b ? -1 : a > b;
}

static bool has_cell(const struct table *t, const struct row *row)
{
    return t->n > 0 && bsearch(row, t->at, t->n, sizeof *row, by_cell) != NULL;
}

static struct row cell_row(const struct program *g, uint32_t cell)
{
    struct program_cell c = program_cell(g, cell);
    const struct program_tensor *t = &g->tensors[c.tensor];
    return (struct row){c.id, box_hash(&g->boxes[c.box]), (uint64_t)t->index << 8 | c.wire,
                        t->value};
}

/* The program's cells are as the plan's (or nobody takes them), each once; all that moves here is among them. */
static void judge_cells(const struct program *g, struct transfers *x)
{
    struct table own = {0};
    sort(&x->cells);
    for (uint32_t i = 0; i < g->n_cells; i++) {
        add(&own, cell_row(g, i));
        ck_assert_msg(has(&x->cells, &own.at[i]) || !has_cell(&x->cells, &own.at[i]),
                      "cell %u is not the plan's", i);
    }
    sort(&own);
    for (size_t i = 1; i < own.n; i++)
        ck_assert_uint_ne(own.at[i].cell, own.at[i - 1].cell);
    for (size_t i = 0; i < x->ends.n; i++)
        ck_assert_msg(has(&own, &x->ends.at[i]), "cell %llu is missing",
                      (unsigned long long)x->ends.at[i].cell);
    free(own.at);
    free(x->cells.at);
    free(x->ends.at);
}

static void add_take(struct table *t, const struct program *g, uint32_t place, uint32_t cell)
{
    const struct program_place *x = &g->places[place];
    if (x->side == PROGRAM_DESTINATION)
        add(t, (struct row){program_cell(g, cell).id, x->layout, x->rank, 0});
}

/* Destination holds are what the transfers bring, and the items write the same. */
static void judge_takes(const struct program *g, struct transfers *x)
{
    struct table holds = {0}, writes = {0}, want = {0};
    for (uint32_t i = 0; i < g->n_holds; i++)
        add_take(&holds, g, program_hold(g, i).place, program_hold(g, i).cell);
    for (uint32_t i = 0; i < g->n_items; i++) {
        struct program_item item = program_item(g, i);
        if (item.places == PROGRAM_NONE)
            continue;
        for (uint32_t k = 1; k <= g->lists[item.places]; k++)
            add_take(&writes, g, g->lists[item.places + k], item.cell);
    }
    for (size_t i = 0; i < x->takes.n; i++)
        add(&want, x->takes.at[i]);
    same_rows(&holds, &want, "holds");
    same_rows(&writes, &x->takes, "writes");
}

static void judge_sends(const struct program *g, struct transfers *x)
{
    struct table sends = {0};
    for (uint32_t s = 0; s < g->n_streams; s++) {
        const struct program_stream *m = &g->streams[s];
        if (!m->send || x->t->devices[m->peer].node == x->node)
            continue;
        for (uint32_t i = 0; i < m->n_items; i++)
            add(&sends, (struct row){program_item_cell(g, m->first_item + i).id,
                                     g->devices[m->device].device, m->peer, 0});
    }
    same_rows(&sends, &x->sends, "sends");
}

START_TEST(entries_are_those_of_the_plans_transfers)
{
    for (unsigned i = 0; i < N_MANY + N_RANDOM; i++) {
        struct zoo_case c;
        struct plan *p = NULL;
        struct err e = {0};
        build(&c, i);
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
        for (uint32_t node = 0; node < c.topology.n_nodes; node++) {
            struct transfers x = {.p = p, .t = &c.topology, .node = node};
            struct program g;
            struct buf b;
            encode(p, node, &b, &g);
            ck_assert_int_eq(plan_transfers(p, -1, note, &x), 0);
            judge_cells(&g, &x);
            judge_takes(&g, &x);
            judge_sends(&g, &x);
            buf_close(&b);
        }
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

/* --- looking up ------------------------------------------------------------------------------------------- */

/* Every run, every entry. */
static void walk_cells(const struct program *g)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < g->n_cell_runs; r++) {
        const struct program_cell_run *run = &g->cell_runs[r];
        uint32_t end = r + 1 < g->n_cell_runs ? run[1].first : g->n_cells;
        for (uint32_t k = 0; n < end; k++, n++) {
            struct program_cell c = program_cell(g, n);
            uint32_t along = run->along_tensors;
            ck_assert_uint_eq(c.tensor, run->tensor + along * k);
            ck_assert_uint_eq(c.box, run->box + (1 - along) * k);
            ck_assert_uint_eq(c.id,
                              g->tensors[c.tensor].first_cell + run->number + (1 - along) * k);
            ck_assert_uint_eq(c.wire, run->wire);
            ck_assert_uint_eq(program_like_cells(g, n, UINT32_MAX), along ? end - n : 1);
            ck_assert_uint_eq(program_like_cells(g, n, 1), 1);
        }
    }
    ck_assert_uint_eq(n, g->n_cells);
}

static void walk_items(const struct program *g)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < g->n_item_runs; r++) {
        const struct program_item_run *run = &g->item_runs[r];
        uint32_t end = r + 1 < g->n_item_runs ? run[1].first : g->n_items;
        for (uint32_t k = 0; n < end; k++, n++) {
            struct program_item x = program_item(g, n);
            uint32_t like = program_like_cells(g, x.cell, UINT32_MAX);
            ck_assert_uint_eq(x.cell, run->cell + k);
            ck_assert_uint_eq(x.from, run->from);
            ck_assert_uint_eq(x.places, run->places);
            ck_assert_uint_eq(program_like_items(g, n, 1 << 20), like < end - n ? like : end - n);
        }
    }
    ck_assert_uint_eq(n, g->n_items);
}

/* Holds, into hold_of[place][cell]. */
static void walk_holds(const struct program *g, uint32_t *hold_of)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < g->n_hold_runs; r++) {
        const struct program_hold_run *run = &g->hold_runs[r];
        uint32_t end = r + 1 < g->n_hold_runs ? run[1].first : g->n_holds;
        for (uint32_t k = 0; n < end; k++, n++) {
            struct program_hold x = program_hold(g, n);
            uint32_t like = program_like_cells(g, x.cell, UINT32_MAX);
            ck_assert_uint_eq(x.place, run->place);
            ck_assert_uint_eq(x.cell, run->cell + k);
            ck_assert_uint_eq(program_like_holds(g, n, 1 << 20), like < end - n ? like : end - n);
            hold_of[(size_t)x.place * g->n_cells + x.cell] = n;
        }
    }
    ck_assert_uint_eq(n, g->n_holds);
}

static void judge_holds(const struct program *g)
{
    size_t n = (size_t)g->n_places * g->n_cells;
    uint32_t *hold_of = malloc((n + 1) * sizeof *hold_of), behind = 0;
    memset(hold_of, 0xFF, n * sizeof *hold_of);
    walk_holds(g, hold_of);
    for (uint32_t place = 0; place < g->n_places; place++) {
        uint32_t first, end;
        program_holds_of(g, place, &first, &end);
        ck_assert_uint_eq(first, behind);
        for (uint32_t cell = 0; cell < g->n_cells; cell++) {
            uint32_t want = hold_of[(size_t)place * g->n_cells + cell];
            ck_assert_uint_eq(program_hold_at(g, place, cell), want);
            behind += want != PROGRAM_NONE;
        }
        ck_assert_uint_eq(end, behind);
    }
    ck_assert_uint_eq(program_hold_at(g, g->n_places, 0), PROGRAM_NONE);
    free(hold_of);
}

START_TEST(entries_are_found_where_a_walk_over_the_runs_finds_them)
{
    for (unsigned i = 0; i < N_MANY + N_RANDOM; i++) {
        struct zoo_case c;
        struct plan *p = NULL;
        build(&c, i);
        ck_assert_int_eq(plan_make(&c.input, &p, NULL), 0);
        for (uint32_t node = 0; node < c.topology.n_nodes; node++) {
            struct program g;
            struct buf b;
            encode(p, node, &b, &g);
            walk_cells(&g);
            walk_items(&g);
            judge_holds(&g);
            buf_close(&b);
        }
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

START_TEST(runs_are_few_where_tensors_are_alike)
{
    for (int strategy = 0; strategy < 3; strategy++) {
        struct zoo_case c;
        struct plan *p = NULL;
        struct program g;
        struct buf b;
        many(&c, (enum plan_strategy)strategy, 1 << 20);
        c.input.options.chunk_bytes = 1 << 20;
        ck_assert_int_eq(plan_make(&c.input, &p, NULL), 0);
        encode(p, 1, &b, &g);
        ck_assert_uint_gt(g.n_cells, 5 * g.n_cell_runs);
        ck_assert_uint_gt(g.n_items, 3 * g.n_item_runs);
        if (strategy != PLAN_GATHER_BROADCAST) { /* which keeps each tensor's cells together */
            ck_assert_uint_gt(g.n_items, 50 * g.n_item_runs);
            ck_assert_uint_gt(g.n_holds, 60 * g.n_hold_runs);
        }
        plan_free(p);
        case_close(&c);
        buf_close(&b);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(entries_are_those_of_the_plans_transfers)                                                    \
    X(entries_are_found_where_a_walk_over_the_runs_finds_them)                                     \
    X(runs_are_few_where_tensors_are_alike)
#include "test/lib/main.h"
