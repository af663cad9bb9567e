/* Geometry of cells and pieces: all by formula from a shape's cuts, nothing is listed. */
#include "plan/plan_private.h"

#include "base/banned.h"

/* Rows that pieces are cut at (multiples, in the tensor's own coordinates) where they have at least
 * twice as many: a GEMM or quantisation block's worth, which keeps pieces aligned for the kernels.
 */
enum { PIECE_ROWS = 128, PIECE_BYTES = 16 };

void plan_cell_box(const struct plan *p, const struct plan_shape *s, uint32_t cell, struct box *ret)
{
    const struct plan_class *c = &p->classes.at[s->class];
    if (c->structure == NONE32) {
        *ret = p->boxes.at[c->first_box + cell];
        return;
    }
    const uint64_t *cut = p->cuts.at + s->cuts;
    uint32_t index[BOX_MAX_DIMS] = {0};
    for (int d = c->n_dims - 1; d >= 0; d--) {
        index[d] = cell % c->intervals[d];
        cell /= c->intervals[d];
    }
    *ret = (struct box){.n_dims = c->n_dims};
    for (uint8_t d = 0; d < c->n_dims; d++) {
        ret->offset[d] = cut[index[d]];
        ret->size[d] = cut[index[d] + 1] - cut[index[d]];
        cut += c->intervals[d] + 1;
    }
}

uint64_t plan_cell_bytes(const struct plan *p, const struct plan_shape *s, uint32_t cell)
{
    struct box b;
    plan_cell_box(p, s, cell, &b);
    return box_elements(&b) * s->wire_bytes;
}

/* How a cell is cut in pieces: along dim, at base + k * step. */
struct cut {
    uint8_t dim;
    uint64_t base, step;
    uint32_t n;
};

static uint8_t cut_dim(const struct box *b, uint64_t n)
{
    uint8_t largest = 0;
    for (uint8_t d = 0; d < b->n_dims; d++) {
        if (b->size[d] >= n)
            return d;
        if (b->size[d] > b->size[largest])
            largest = d;
    }
    return largest;
}

static struct cut cell_cut(const struct plan *p, const struct plan_shape *s, const struct box *b)
{
    struct cut c = {.n = 1};
    uint64_t bytes = box_elements(b) * s->wire_bytes;
    if (bytes <= p->piece_bytes || b->n_dims == 0)
        return c;
    uint64_t n = (bytes - 1) / p->piece_bytes + 1;
    c.dim = cut_dim(b, n);
    uint64_t size = b->size[c.dim];
    if (n > size)
        n = size;
    uint64_t step = (size - 1) / n + 1;
    uint64_t align = 1;
    if (s->value == PLAN_QUANTISED && s->block[c.dim] <= step / 2)
        align = s->block[c.dim]; /* whole blocks: else the sender reads those at the cut twice */
    else if (step >= 2 * PIECE_ROWS)
        align = PIECE_ROWS;
    else if (c.dim + 1 == b->n_dims && step * s->wire_bytes >= 2 * PIECE_BYTES)
        align = PIECE_BYTES / s->wire_bytes;
    c.step = (step + align - 1) / align * align;
    c.base = b->offset[c.dim] / align * align;
    c.n = (uint32_t)((b->offset[c.dim] + size - c.base - 1) / c.step + 1);
    return c;
}

uint32_t plan_cell_pieces(const struct plan *p, const struct plan_shape *s, uint32_t cell)
{
    if (plan_cell_bytes(p, s, cell) <= p->piece_bytes)
        return 1;
    struct box b;
    plan_cell_box(p, s, cell, &b);
    return cell_cut(p, s, &b).n;
}

void plan_piece_box(const struct plan *p, const struct plan_shape *s, uint32_t cell, uint32_t piece,
                    struct box *ret)
{
    plan_cell_box(p, s, cell, ret);
    if (piece == NONE32)
        return;
    struct cut c = cell_cut(p, s, ret);
    uint64_t begin = ret->offset[c.dim], end = begin + ret->size[c.dim];
    uint64_t from = c.base + piece * c.step, to = from + c.step;
    from = from < begin ? begin : from;
    to = to > end ? end : to;
    ret->offset[c.dim] = from;
    ret->size[c.dim] = to - from;
}

uint64_t plan_piece_bytes(const struct plan *p, const struct plan_shape *s, uint32_t cell,
                          uint32_t piece)
{
    struct box b;
    plan_piece_box(p, s, cell, piece, &b);
    return box_elements(&b) * s->wire_bytes;
}

uint64_t plan_cell_number(const struct plan *p, uint32_t unit, uint32_t cell, uint32_t piece)
{
    const struct plan_unit *u = &p->units.at[unit];
    const struct plan_shape *s = &p->shapes.at[u->shape];
    uint64_t number = u->first_cell;
    number += s->first_piece == NONE32 ? cell : p->pieces.at[s->first_piece + cell];
    return number + (piece == NONE32 ? 0 : piece);
}

void run_walk_init(const struct plan *p, const struct plan_run *r, struct run_walk *ret)
{
    (void)p;
    *ret = (struct run_walk){.member = r->member, .end = r->member + r->count};
}

bool run_walk_next(const struct plan *p, const struct plan_run *r, struct run_walk *w)
{
    w->member += w->n;
    if (w->member >= w->end)
        return false;
    w->shape = plan_member_shape(p, w->member);
    uint32_t shape_end = w->shape->first_member + w->shape->n_members;
    w->n = (shape_end < w->end ? shape_end : w->end) - w->member;
    w->bytes = plan_piece_bytes(p, w->shape, p->groups.at[r->group].cell, r->piece);
    return true;
}
