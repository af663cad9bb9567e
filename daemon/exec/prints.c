#include "exec/prints.h"

#include "exec/scaled.h"

#include "base/mem.h"

#include "base/banned.h"

static int bounce_ready(struct plane_way *way)
{
    void *p;
    if (way->bounce != NULL)
        return 0;
    int r = device_alloc(way->device, BOUNCE_BYTES, &p, NULL);
    if (r == 0)
        way->bounce = p;
    return r;
}

/* The value after the cast is made in a buffer that nobody reads: the stream's order keeps its
 * users apart. */
static int print_cast(struct batch *b, struct plane_way *way, const struct place *place,
                      uint32_t tensor, const struct box *box, uint8_t from, uint8_t wire,
                      uint64_t *sum)
{
    const struct move_end to = {.compact = way->bounce};
    return batch_move(b, &(struct move){.tensor = tensor,
                                        .box = *box,
                                        .from = {.place = place},
                                        .to = &to,
                                        .n_to = 1,
                                        .from_dtype = from,
                                        .to_dtype = wire,
                                        .fingerprint = sum});
}

/* As prints_cell, of a cell that the place makes. */
static int prints_made(struct batch *b, const struct program *p, const struct place *place,
                       uint32_t cell, uint64_t *at, uint64_t *budget, uint64_t *sum)
{
    struct program_cell c = program_cell(p, cell);
    struct box boxes[2 * BOX_MAX_DIMS];
    uint64_t used, end = scaled_part(p, cell, *at, *budget, &used);
    unsigned n = box_range(&p->boxes[c.box], *at, end, boxes);
    int r = 0;
    for (unsigned i = 0; i < n && r == 0; i++)
        r = batch_move(b, &(struct move){.tensor = c.tensor,
                                         .box = boxes[i],
                                         .from = {.place = place},
                                         .from_dtype = place_dtype(place, c.tensor, c.wire),
                                         .to_dtype = c.wire,
                                         .fingerprint = sum});
    *budget -= used < *budget ? used : *budget;
    *at = end;
    return r;
}

int prints_cell(struct batch *b, struct plane_way *way, const struct program *p,
                const struct place *place, uint32_t cell, uint64_t *at, uint64_t *budget,
                uint64_t *sum)
{
    struct program_cell c = program_cell(p, cell);
    const struct box *box = &p->boxes[c.box];
    uint8_t dtype = place_dtype(place, c.tensor, c.wire);
    bool cast = dtype != c.wire;
    uint64_t n = program_cell_elements(p, cell), bytes = dtype_bytes(dtype);
    if (place_makes(place, c.tensor) != NULL)
        return prints_made(b, p, place, cell, at, budget, sum);
    uint64_t most = cast && *budget > BOUNCE_BYTES ? BOUNCE_BYTES : *budget;
    uint64_t end = *at + (most / bytes > 0 ? most / bytes : 1);
    struct box boxes[2 * BOX_MAX_DIMS];
    int r = cast ? bounce_ready(way) : 0;
    end = end < n ? end : n;
    unsigned n_boxes = end > *at ? box_range(box, *at, end, boxes) : 0;
    for (unsigned i = 0; i < n_boxes && r == 0; i++)
        r = cast ? print_cast(b, way, place, c.tensor, &boxes[i], dtype, c.wire, sum)
                 : batch_print(b, place, c.tensor, &boxes[i], dtype, sum);
    uint64_t used = (end - *at) * bytes;
    *budget -= used < *budget ? used : *budget;
    *at = end;
    return r;
}

uint32_t *prints_source_index(const struct program *p)
{
    uint32_t *index = mem_calloc(p->n_tensors, sizeof(*index));
    for (uint32_t t = 0; index != NULL && t < p->n_tensors; t++)
        index[t] = p->tensors[t].index;
    return index;
}

int prints_check_holds(const struct program *p, const struct place *place, uint32_t number,
                       struct err *e)
{
    bool source = p->places[number].side == PROGRAM_SOURCE;
    uint32_t first, end;
    program_holds_of(p, number, &first, &end);
    for (uint32_t i = first; i < end; i++) {
        struct program_cell c = program_hold_cell(p, i);
        uint8_t wanted = source ? p->tensors[c.tensor].source_dtype : c.wire;
        uint8_t dtype = place_dtype(place, c.tensor, c.wire);
        int r = dtype == wanted
                    ? 0
                    : err_set(e, RS_EPRECOND, "dtype %u is bound, the plan says %u", dtype, wanted);
        struct box box = p->boxes[c.box];
        if (source)
            box = program_source_box(&p->tensors[c.tensor], &box);
        if (r == 0)
            r = place_covers(place, c.tensor, &box, dtype_bytes(dtype), !source, e);
        if (r < 0)
            return err_prefix(e, r, "tensor %u, place %u", p->tensors[c.tensor].index, number);
    }
    return 0;
}
