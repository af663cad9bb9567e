/* What a program has one of each: tensors, boxes, cells, places, and lists of places. */
#include <string.h>

#include "plan/plan_program.h"

#include "base/banned.h"

static int map_grow(struct map *m)
{
    if (m->n * 2 < m->size)
        return 0;
    struct map wider = {.size = m->size == 0 ? 1024 : m->size * 2};
    wider.key = mem_alloc(wider.size * sizeof *wider.key);
    wider.value = mem_alloc(wider.size * sizeof *wider.value);
    if (wider.key == NULL || wider.value == NULL) {
        mem_free(wider.key);
        mem_free(wider.value);
        return RS_ENOMEM;
    }
    memset(wider.value, 0xFF, wider.size * sizeof *wider.value);
    for (size_t i = 0; i < m->size; i++) {
        if (m->value[i] == NONE32)
            continue;
        size_t at = (m->key[i] * 0x9E3779B97F4A7C15U) >> 20 & (wider.size - 1);
        while (wider.value[at] != NONE32)
            at = (at + 1) & (wider.size - 1);
        wider.key[at] = m->key[i];
        wider.value[at] = m->value[i];
    }
    wider.n = m->n;
    mem_free(m->key);
    mem_free(m->value);
    *m = wider;
    return 0;
}

/* The value's place for the key; NONE32 there when it is new (the caller then sets it). NULL: no
 * memory. */
static uint32_t *map_at(struct map *m, uint64_t key)
{
    if (map_grow(m) != 0)
        return NULL;
    size_t at = (key * 0x9E3779B97F4A7C15U) >> 20 & (m->size - 1);
    while (m->value[at] != NONE32 && m->key[at] != key)
        at = (at + 1) & (m->size - 1);
    if (m->value[at] == NONE32) {
        m->key[at] = key;
        m->n++;
    }
    return &m->value[at];
}

static void map_close(struct map *m)
{
    mem_free(m->key);
    mem_free(m->value);
}

void encoder_intern_close(struct encoder *x)
{
    map_close(&x->cells);
    map_close(&x->boxes);
    map_close(&x->places);
    map_close(&x->lists);
}

static int tensor_index(struct encoder *x, uint32_t unit, uint32_t *ret)
{
    const struct plan *p = x->p;
    const struct plan_unit *u = &p->units.at[unit];
    const struct plan_shape *s = &p->shapes.at[u->shape];
    uint32_t *slot = &x->unit_tensor[unit];
    if (*slot == NONE32) {
        if (vec_reserve(&x->v_tensors, x->v_tensors.n + 1) != 0)
            return RS_ENOMEM;
        *slot = (uint32_t)x->v_tensors.n;
        struct program_tensor *t = &x->v_tensors.at[x->v_tensors.n++];
        memset(t, 0, sizeof *t);
        memcpy(t->shape, s->size, s->n_dims * sizeof t->shape[0]);
        t->scratch_offset = UINT64_MAX;
        if (p->classes.at[s->class].strategy == PLAN_GATHER_BROADCAST && u->cast != NONE32)
            t->scratch_offset = p->casts.at[u->cast].scratch_offset;
        t->first_cell = u->first_cell;
        t->index = plan_tensor_origin(p, u->tensor);
        t->n_dims = s->n_dims;
        t->source_dtype = s->source_dtype;
        t->value = s->value;
        t->named_layout = t->named_tensor = PROGRAM_NONE;
        memcpy(t->origin, s->origin, sizeof t->origin);
        memcpy(t->block, s->block, sizeof t->block);
        if (s->value == PLAN_SCALES) {
            const struct plan_derived *d = &p->derived.at[u->tensor - p->source->n_tensors];
            t->named_layout = d->layout;
            t->named_tensor = d->tensor;
        }
    }
    *ret = *slot;
    return 0;
}

/* Members of a shape share the boxes: the key is the number that the cell has in the shape's first
 * unit. */
static int box_index(struct encoder *x, uint32_t unit, uint32_t cell, uint32_t piece, uint32_t *ret)
{
    const struct plan *p = x->p;
    const struct plan_shape *s = &p->shapes.at[p->units.at[unit].shape];
    uint32_t first = p->members.at[s->first_member];
    uint32_t *slot = map_at(&x->boxes, plan_cell_number(p, first, cell, piece));
    if (slot == NULL)
        return RS_ENOMEM;
    if (*slot == NONE32) {
        if (vec_reserve(&x->v_boxes, x->v_boxes.n + 1) != 0)
            return RS_ENOMEM;
        *slot = (uint32_t)x->v_boxes.n;
        struct box b, *out = &x->v_boxes.at[x->v_boxes.n++];
        plan_piece_box(p, s, cell, piece, &b);
        memset(out, 0, sizeof *out);
        out->n_dims = b.n_dims;
        memcpy(out->offset, b.offset, sizeof out->offset);
        memcpy(out->size, b.size, sizeof out->size);
    }
    *ret = *slot;
    return 0;
}

/* Whether cells that begin with b go on where n cells that begin with a end; *ret_along: how they do. One cell alone goes
 * either way. */
static bool cells_join(const struct program_cell_run *a, uint32_t n,
                       const struct program_cell_run *b, uint32_t n_b, bool *ret_along)
{
    bool tensors = a->tensor + n == b->tensor && a->box == b->box && a->number == b->number;
    bool boxes = a->tensor == b->tensor && a->box + n == b->box && a->number + n == b->number;
    *ret_along = tensors;
    return a->wire == b->wire && (tensors || boxes) && (n == 1 || a->along_tensors == tensors) &&
           (n_b == 1 || b->along_tensors == tensors);
}

/* n cells of a unit and those behind it in plan.members: of one shape, and of tensors that follow one another. */
static int cells_add(struct encoder *x, uint32_t unit, uint32_t n, uint32_t cell, uint32_t piece)
{
    const struct plan_unit *u = &x->p->units.at[unit];
    struct program_cell_run run = {.first = x->n_cells, .along_tensors = n > 1}, *last;
    if (n > PROGRAM_MOST - x->n_cells)
        return RS_EEXHAUSTED;
    if (tensor_index(x, unit, &run.tensor) != 0 || box_index(x, unit, cell, piece, &run.box) != 0 ||
        vec_reserve(&x->v_cell_runs, x->v_cell_runs.n + 1) != 0)
        return RS_ENOMEM;
    run.number = (uint32_t)(plan_cell_number(x->p, unit, cell, piece) - u->first_cell);
    run.wire = x->p->shapes.at[u->shape].wire;
    last = x->v_cell_runs.n > 0 ? &x->v_cell_runs.at[x->v_cell_runs.n - 1] : NULL;
    bool along;
    if (last != NULL && cells_join(last, x->n_cells - last->first, &run, n, &along))
        last->along_tensors = along;
    else
        x->v_cell_runs.at[x->v_cell_runs.n++] = run;
    x->n_cells += n;
    return 0;
}

int encoder_cast_cell(struct encoder *x, uint32_t unit, uint32_t cell, uint32_t *ret)
{
    uint32_t *slot = map_at(&x->cells, plan_cell_number(x->p, unit, cell, NONE32));
    if (slot == NULL)
        return RS_ENOMEM;
    if (*slot == NONE32) {
        uint32_t next = x->n_cells;
        int r = cells_add(x, unit, 1, cell, NONE32);
        if (r != 0)
            return r;
        *slot = next;
    }
    *ret = *slot;
    return 0;
}

int encoder_run_cells(struct encoder *x, uint32_t run, uint32_t *ret_first)
{
    const struct plan *p = x->p;
    const struct plan_run *u = &p->runs.at[run];
    uint32_t next = x->n_cells;
    struct run_walk w;
    int r = 0;
    if (x->run_cells[run] == NONE32) {
        run_walk_init(p, u, &w);
        while (r == 0 && run_walk_next(p, u, &w))
            r = cells_add(x, p->members.at[w.member], w.n, p->groups.at[u->group].cell, u->piece);
        if (r != 0)
            return r;
        x->run_cells[run] = next;
    }
    *ret_first = x->run_cells[run];
    return 0;
}

int encoder_run_tensors(struct encoder *x)
{
    const struct plan *p = x->p;
    uint8_t *used = mem_calloc(p->members.n + 1, 1);
    uint32_t index;
    int r = used == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; i < p->runs.n && r == 0; i++)
        if (run_here(x, i))
            memset(used + p->runs.at[i].member, 1, p->runs.at[i].count);
    for (uint32_t i = 0; i < p->members.n && r == 0; i++)
        if (used[i] != 0)
            r = tensor_index(x, p->members.at[i], &index);
    mem_free(used);
    return r;
}

int encoder_place(struct encoder *x, uint8_t side, uint32_t device, uint32_t layout, uint32_t rank,
                  uint32_t *ret)
{
    uint64_t key = (uint64_t)side << 62 | (uint64_t)layout << 32 | rank;
    if (side == PROGRAM_SCRATCH)
        key |= device;
    uint32_t *slot = map_at(&x->places, key);
    if (slot == NULL)
        return RS_ENOMEM;
    if (*slot == NONE32) {
        struct program_place place;
        memset(&place, 0, sizeof place);
        place.device = x->local[device];
        place.layout = layout;
        place.rank = rank;
        place.side = side;
        if (vec_reserve(&x->v_places, x->v_places.n + 1) != 0)
            return RS_ENOMEM;
        *slot = (uint32_t)x->v_places.n;
        x->v_places.at[x->v_places.n++] = place;
    }
    *ret = *slot;
    return 0;
}

int encoder_end_place(struct encoder *x, uint32_t end, uint8_t side, uint32_t *ret)
{
    const struct end *n = &x->p->ends.at[end];
    return encoder_place(x, side, n->device, n->layout, n->rank, ret);
}

int encoder_list_add(struct encoder *x, uint32_t place)
{
    if (vec_reserve(&x->list, x->list.n + 1) != 0)
        return RS_ENOMEM;
    x->list.at[x->list.n++] = place;
    return 0;
}

int encoder_list_add_end(struct encoder *x, uint32_t end)
{
    uint32_t place;
    int r = encoder_end_place(x, end, PROGRAM_DESTINATION, &place);
    return r == 0 ? encoder_list_add(x, place) : r;
}

/* The interned list under construction; equal lists are one. Collisions probe on to the next key.
 */
int encoder_list(struct encoder *x, uint32_t *ret)
{
    uint64_t key = x->list.n;
    for (size_t i = 0; i < x->list.n; i++)
        key = (key ^ x->list.at[i]) * 0x9E3779B97F4A7C15U + (key >> 31);
    for (;; key++) {
        uint32_t *slot = map_at(&x->lists, key);
        if (slot == NULL)
            return RS_ENOMEM;
        if (*slot == NONE32) {
            if (x->v_lists.n + x->list.n + 1 >= NONE32)
                return RS_EEXHAUSTED;
            if (vec_reserve(&x->v_lists, x->v_lists.n + x->list.n + 1) != 0)
                return RS_ENOMEM;
            *slot = (uint32_t)x->v_lists.n;
            x->v_lists.at[x->v_lists.n++] = (uint32_t)x->list.n;
            memcpy(x->v_lists.at + x->v_lists.n, x->list.at, x->list.n * sizeof(uint32_t));
            x->v_lists.n += x->list.n;
        }
        const uint32_t *found = x->v_lists.at + *slot;
        if (found[0] == x->list.n &&
            memcmp(found + 1, x->list.at, x->list.n * sizeof(uint32_t)) == 0) {
            *ret = *slot;
            return 0;
        }
    }
}
