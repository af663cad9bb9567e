#include "exec/scaled.h"

#include <string.h>

#include "layout/scale.h"

#include "base/banned.h"

/* Work memory of a stream: source elements (float32 at most), what they become, scales, maxima. */
enum {
    WORK_ELEMENTS = SCALE_MAX_BLOCK,
    WORK_SCALES = 1 << 14,
    WORK_OUT = 4 * WORK_ELEMENTS,
    WORK_SCALES_AT = WORK_OUT + WORK_ELEMENTS,
    WORK_AMAX_AT = WORK_SCALES_AT + 4 * WORK_SCALES,
    WORK_BYTES = WORK_AMAX_AT + 4 * PLANE_WORK_AMAX,
    /* Of one cast that needs no work memory for elements: bounds how long it takes. */
    READ_ELEMENTS = 1 << 24
};

enum { MAX_TARGETS = 256 };

_Static_assert((int)WORK_BYTES == (int)PLANE_WORK_BYTES,
               "plane.h says how much data_plane.c frees");

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

bool scaled_by_amax(const struct program_tensor *t)
{
    return scale_whole(t->block, t->origin) && t->origin[0] * t->origin[1] > WORK_ELEMENTS;
}

void scaled_open(struct place *place)
{
    const struct program *p = place->program;
    for (uint32_t i = 0; i < p->n_tensors && place->made == 0; i++)
        if (p->tensors[i].value != PROGRAM_AS_SOURCE)
            place->made = ++place->plane->n_made;
}

static int work_ready(struct batch *b)
{
    void *p;
    rs_assert(b->work != NULL);
    if (b->work->memory != NULL)
        return 0;
    int r = device_alloc(device_stream_device(b->stream), PLANE_WORK_BYTES, &p, NULL);
    if (r == 0)
        b->work->memory = p;
    return r;
}

int scaled_number(struct batch *b, uint32_t **ret)
{
    int r = work_ready(b);
    if (r == 0)
        *ret = (uint32_t *)(void *)(b->work->memory + WORK_SCALES_AT);
    return r;
}

/* --- a part being made ------------------------------------------------------------------------ */

struct making {
    struct batch *b;
    const struct move *m;
    const struct program_tensor *t;
    uint32_t *amax; /* of a tensor with one scale, once it is known on this stream */
    struct move_end to[MAX_TARGETS];
};

static bool source_rows(const struct making *k, const struct box *elements, const void **ret_from,
                        int64_t *ret_stride)
{
    return place_rows(k->m->from.place, k->m->tensor, elements, dtype_bytes(k->m->from_dtype),
                      ret_from, ret_stride);
}

/* A cast of these elements; where they lie, and what is done with it, is to be added. */
static struct kernel_quantise cast_of(const struct making *k, const struct box *elements,
                                      uint8_t step)
{
    return (struct kernel_quantise){.rows = elements->size[0],
                                    .columns = elements->size[1],
                                    .block_rows = k->t->block[0],
                                    .block_columns = k->t->block[1],
                                    .amax_bits = k->amax,
                                    .offset = {elements->offset[0], elements->offset[1]},
                                    .from_dtype = k->m->from_dtype,
                                    .step = step,
                                    .streaming = k->m->streaming};
}

/* --- straight from the source's memory to its targets ------------------------------------------- */

/* Where the float8 elements of `part` go. False: not into dense rows of one view. */
static bool target_rows(const struct making *k, const struct move_end *to, const struct box *part,
                        struct kernel_quantise_target *ret)
{
    const void *first;
    if (to->place != NULL) {
        if (!place_rows(to->place, k->m->tensor, part, 1, &first, &ret->stride))
            return false;
        ret->base = (uint8_t *)(uintptr_t)first;
        return true;
    }
    ret->stride = (int64_t)to->box->size[1];
    ret->base = to->compact + (part->offset[0] - to->box->offset[0]) * to->box->size[1] +
                (part->offset[1] - to->box->offset[1]);
    return true;
}

/* True where these elements can be read straight, and (but for scales) what they become written. */
static bool straight(const struct making *k, const struct box *elements)
{
    struct kernel_quantise_target to;
    const void *from;
    int64_t stride;
    bool can = source_rows(k, elements, &from, &stride), scales = k->t->value == PROGRAM_SCALES;
    for (uint32_t i = 0; i < k->m->n_to && can && !scales; i++)
        can = target_rows(k, &k->to[i], &k->m->box, &to);
    return can;
}

/* A few targets at a time; the fingerprint goes with the first. */
static int cast_straight(struct making *k, const struct box *elements, uint8_t step)
{
    struct kernel_quantise q = cast_of(k, elements, step);
    struct box part;
    uint32_t done = 0;
    int r = 0;
    if (!box_intersect(elements, &k->m->box, &part))
        return 0;
    rs_assert(source_rows(k, elements, &q.from, &q.from_stride));
    q.window_row = part.offset[0] - elements->offset[0];
    q.window_column = part.offset[1] - elements->offset[1];
    q.window_rows = part.size[0];
    q.window_columns = part.size[1];
    q.fingerprint = k->m->fingerprint;
    do {
        for (q.n_targets = 0; q.n_targets < KERNEL_QUANTISE_TARGETS && done < k->m->n_to; done++)
            rs_assert(target_rows(k, &k->to[done], &part, &q.to[q.n_targets++]));
        r = batch_cast(k->b, &q);
        q.fingerprint = NULL;
    } while (r == 0 && done < k->m->n_to);
    return r;
}

/* --- by way of the work memory ------------------------------------------------------------------ */

/* The elements of a box in dense rows: where they lie already, or brought together. */
static int read_rows(const struct making *k, const struct box *elements, struct kernel_quantise *q)
{
    const struct move *m = k->m;
    if (source_rows(k, elements, &q->from, &q->from_stride))
        return 0;
    const struct move_end in = {.compact = k->b->work->memory};
    q->from = in.compact;
    q->from_stride = (int64_t)elements->size[1] * dtype_bytes(m->from_dtype);
    return batch_gather(k->b, &(struct move){.tensor = m->tensor,
                                             .box = *elements,
                                             .from = m->from,
                                             .to = &in,
                                             .n_to = 1,
                                             .from_dtype = m->from_dtype,
                                             .to_dtype = m->from_dtype});
}

/* Behind what is in the batch: that may read what is written here. */
static int cast_now(struct making *k, const struct kernel_quantise *q)
{
    int r = batch_flush(k->b);
    return r == 0 ? device_quantise(k->b->stream, q, 1) : r;
}

/* From the work memory, which holds `made`, to where the move goes. */
static int move_on(struct making *k, const struct box *made, uint8_t *at)
{
    const struct move *m = k->m;
    struct box part;
    if (!box_intersect(made, &m->box, &part))
        return 0;
    const struct move on = {.tensor = m->tensor,
                            .box = part,
                            .from = {.compact = at, .box = made},
                            .to = k->to,
                            .n_to = m->n_to,
                            .from_dtype = m->to_dtype,
                            .to_dtype = m->to_dtype,
                            .streaming = m->streaming,
                            .fingerprint = m->fingerprint};
    return m->n_to > 0 ? batch_move(k->b, &on) : batch_print_compact(k->b, &on);
}

/* Elements that fit into it, in float8. */
static int cast_by_work(struct making *k, const struct box *elements, uint8_t step)
{
    struct kernel_quantise q = cast_of(k, elements, step);
    int r = work_ready(k->b);
    if (r == 0)
        r = read_rows(k, elements, &q);
    if (r < 0)
        return r;
    q.window_rows = q.rows;
    q.window_columns = q.columns;
    q.n_targets = 1;
    q.to[0].base = k->b->work->memory + WORK_OUT;
    q.to[0].stride = (int64_t)q.columns;
    r = cast_now(k, &q);
    return r == 0 ? move_on(k, elements, q.to[0].base) : r;
}

static int make_scales(struct making *k, const struct box *scales, const struct box *elements)
{
    struct kernel_quantise q = cast_of(k, elements, KERNEL_QUANTISE_BLOCKS);
    int r = work_ready(k->b);
    if (r == 0)
        r = read_rows(k, elements, &q);
    if (r < 0)
        return r;
    uint8_t *at = k->b->work->memory + WORK_SCALES_AT;
    q.scales = (uint32_t *)(void *)at;
    r = cast_now(k, &q);
    return r == 0 ? move_on(k, scales, at) : r;
}

/* --- tiles of whole blocks, given as boxes of scales ---------------------------------------------- */

/* Most blocks of a tile, along rows first. `elements` of them fit. */
static void tile_size(const struct program_tensor *t, const struct box *scales, uint64_t elements,
                      uint64_t ret_size[2])
{
    uint64_t rows = least(t->block[0], t->origin[0]), columns = least(t->block[1], t->origin[1]);
    uint64_t most = least(elements / (rows * columns), WORK_SCALES);
    most = most == 0 ? 1 : most;
    ret_size[1] = least(scales->size[1], most);
    ret_size[0] = ret_size[1] == scales->size[1] ? least(scales->size[0], most / ret_size[1]) : 1;
}

static int make_tile(struct making *k, const struct box *scales, bool is_straight)
{
    struct box elements = scale_elements(k->t->block, k->t->origin, scales);
    if (k->t->value == PROGRAM_SCALES)
        return make_scales(k, scales, &elements);
    return is_straight ? cast_straight(k, &elements, KERNEL_QUANTISE_BLOCKS)
                       : cast_by_work(k, &elements, KERNEL_QUANTISE_BLOCKS);
}

static int make_tiles(struct making *k, const struct box *all, bool is_straight)
{
    uint64_t size[2];
    struct box tile = {.n_dims = 2};
    int r = 0;
    tile_size(k->t, all, is_straight ? READ_ELEMENTS : WORK_ELEMENTS, size);
    for (uint64_t row = 0; row < all->size[0] && r == 0; row += size[0])
        for (uint64_t column = 0; column < all->size[1] && r == 0; column += size[1]) {
            tile.offset[0] = all->offset[0] + row;
            tile.offset[1] = all->offset[1] + column;
            tile.size[0] = least(size[0], all->size[0] - row);
            tile.size[1] = least(size[1], all->size[1] - column);
            r = make_tile(k, &tile, is_straight);
        }
    return r;
}

/* Where a box of blocks lies in several views it is halved, down to what the work memory takes: most
 * of it may lie in one each. */
static int make_blocks(struct making *k, const struct box *all)
{
    struct box elements = scale_elements(k->t->block, k->t->origin, all), half = *all;
    bool is_straight = straight(k, &elements);
    if (is_straight || all->size[0] < 2 || box_elements(&elements) <= WORK_ELEMENTS)
        return make_tiles(k, all, is_straight);
    half.size[0] = all->size[0] / 2;
    int r = make_blocks(k, &half);
    half.offset[0] += half.size[0];
    half.size[0] = all->size[0] - half.size[0];
    return r == 0 ? make_blocks(k, &half) : r;
}

/* --- one scale for a great tensor ------------------------------------------------------------- */

/* Calls fn for the box in parts of so many elements. */
static int each_part(struct making *k, const struct box *box, uint64_t elements,
                     int (*fn)(struct making *k, const struct box *part))
{
    uint64_t columns = least(box->size[1], elements), rows = elements / columns;
    struct box part = {.n_dims = 2};
    int r = 0;
    for (uint64_t row = 0; row < box->size[0] && r == 0; row += rows)
        for (uint64_t column = 0; column < box->size[1] && r == 0; column += columns) {
            part.offset[0] = box->offset[0] + row;
            part.offset[1] = box->offset[1] + column;
            part.size[0] = least(rows, box->size[0] - row);
            part.size[1] = least(columns, box->size[1] - column);
            r = fn(k, &part);
        }
    return r;
}

static int read_amax_straight(struct making *k, const struct box *part)
{
    struct kernel_quantise q = cast_of(k, part, KERNEL_QUANTISE_AMAX);
    rs_assert(source_rows(k, part, &q.from, &q.from_stride));
    return batch_cast(k->b, &q);
}

static int read_amax(struct making *k, const struct box *part)
{
    struct kernel_quantise q = cast_of(k, part, KERNEL_QUANTISE_AMAX);
    int r = read_rows(k, part, &q);
    return r == 0 ? cast_now(k, &q) : r;
}

static int find_amax(struct making *k)
{
    struct box whole = box_whole(2, k->t->origin);
    const struct kernel_quantise clear = {
        .amax_bits = k->amax, .from_dtype = k->m->from_dtype, .step = KERNEL_QUANTISE_CLEAR};
    const void *from;
    int64_t stride;
    int r = batch_cast(k->b, &clear);
    if (r < 0)
        return r;
    return source_rows(k, &whole, &from, &stride)
               ? each_part(k, &whole, READ_ELEMENTS, read_amax_straight)
               : each_part(k, &whole, WORK_ELEMENTS, read_amax);
}

/* The stream keeps the maxima of a few tensors. */
static int amax_ready(struct making *k)
{
    struct plane_work *w = k->b->work;
    uint32_t at = k->m->tensor % PLANE_WORK_AMAX;
    uint64_t made = k->m->from.place->made;
    int r = work_ready(k->b);
    if (r < 0)
        return r;
    k->amax = (uint32_t *)(void *)(w->memory + WORK_AMAX_AT) + at;
    if (w->amax[at].made == made && w->amax[at].tensor == k->m->tensor)
        return 0;
    w->amax[at].made = 0;
    r = find_amax(k);
    if (r == 0)
        w->amax[at] = (struct plane_amax){made, k->m->tensor};
    return r;
}

static int part_straight(struct making *k, const struct box *part)
{
    return cast_straight(k, part, KERNEL_QUANTISE_BY_AMAX);
}

static int part_by_work(struct making *k, const struct box *part)
{
    return cast_by_work(k, part, KERNEL_QUANTISE_BY_AMAX);
}

static int make_by_amax(struct making *k)
{
    struct box one = {.n_dims = 2, .size = {1, 1}};
    int r = amax_ready(k);
    if (r < 0)
        return r;
    if (k->t->value == PROGRAM_QUANTISED)
        return straight(k, &k->m->box) ? each_part(k, &k->m->box, READ_ELEMENTS, part_straight)
                                       : each_part(k, &k->m->box, WORK_ELEMENTS, part_by_work);
    uint8_t *scales = k->b->work->memory + WORK_SCALES_AT;
    const struct kernel_quantise q = {.scales = (uint32_t *)(void *)scales,
                                      .amax_bits = k->amax,
                                      .from_dtype = k->m->from_dtype,
                                      .step = KERNEL_QUANTISE_BY_AMAX};
    r = cast_now(k, &q);
    return r == 0 ? move_on(k, &one, scales) : r;
}

/* --- moves ------------------------------------------------------------------------------------ */

int scaled_move(struct batch *b, const struct move *m)
{
    struct making k = {.b = b, .m = m, .t = place_makes(m->from.place, m->tensor)};
    rs_assert(k.t != NULL && m->from.place->made != 0 && m->n_to <= MAX_TARGETS);
    if (box_empty(&m->box) || (m->n_to == 0 && m->fingerprint == NULL))
        return 0;
    for (uint32_t i = 0; i < m->n_to; i++) {
        k.to[i] = m->to[i];
        if (k.to[i].compact != NULL && k.to[i].box == NULL)
            k.to[i].box = &m->box;
    }
    if (scaled_by_amax(k.t))
        return make_by_amax(&k);
    struct box all = k.t->value == PROGRAM_SCALES ? m->box : scale_touched(k.t->block, &m->box);
    return make_blocks(&k, &all);
}

uint64_t scaled_part(const struct program *p, uint32_t cell, uint64_t at, uint64_t budget,
                     uint64_t *ret_used)
{
    struct program_cell c = program_cell(p, cell);
    const struct program_tensor *t = &p->tensors[c.tensor];
    const struct box *box = &p->boxes[c.box];
    uint64_t n = box_elements(box), width = box->size[1], bytes = dtype_bytes(t->source_dtype);
    uint64_t block = least(t->block[0], t->origin[0]);
    if (t->value == PROGRAM_SCALES)
        bytes *= block * least(t->block[1], t->origin[1]);
    uint64_t end = least(at + (budget / bytes > 0 ? budget / bytes : 1), n);
    if (t->value == PROGRAM_QUANTISED && !scaled_by_amax(t)) {
        uint64_t row = box->offset[0] + end / width, last = row / block * block;
        uint64_t now = (box->offset[0] + at / width) / block * block + block; /* at least one row */
        last = last > now ? last : now;
        end = least((last - box->offset[0]) * width, n);
    }
    *ret_used = (end - at) * bytes;
    return end;
}
