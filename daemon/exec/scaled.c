#include "exec/scaled.h"

#include <string.h>

#include "base/mem.h"
#include "layout/scale.h"

#include "base/banned.h"

/* Work memory of a stream: source elements (float32 at most), what they become, scales. */
enum {
    WORK_ELEMENTS = SCALE_MAX_BLOCK,
    WORK_SCALES = 1 << 14,
    WORK_OUT = 4 * WORK_ELEMENTS,
    WORK_SCALES_AT = WORK_OUT + WORK_ELEMENTS,
    WORK_BYTES = WORK_SCALES_AT + 4 * WORK_SCALES,
    /* Read in one item where nothing is written but scales: bounds how long one item takes. */
    READ_ELEMENTS = 1 << 24
};

enum { MAX_TARGETS = 256 };

/* --- places and work memory ------------------------------------------------------------------- */

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Its one block does not fit into the work memory. */
static bool by_amax(const struct program_tensor *t)
{
    return scale_whole(t->block, t->origin) && t->origin[0] * t->origin[1] > WORK_ELEMENTS;
}

int scaled_open(struct place *place, struct err *e)
{
    const struct program *p = place->program;
    bool any = false, amax = false;
    for (uint32_t i = 0; i < p->n_tensors; i++) {
        any = any || p->tensors[i].value != PROGRAM_AS_SOURCE;
        amax = amax || (p->tensors[i].value != PROGRAM_AS_SOURCE && by_amax(&p->tensors[i]));
    }
    const struct device *d = place->plane->devices[place->device].device;
    if (any && !device_quantises(d))
        return err_set(e, RS_EUNIMPL,
                       "backend '%s' does not compute block scales yet; leave derived tensors out, "
                       "or use backend 'host'",
                       device_kind(d));
    if (!amax)
        return 0;
    place->amax = mem_calloc(p->n_tensors, sizeof(*place->amax));
    return place->amax == NULL ? err_set(e, RS_ENOMEM, "out of memory") : 0;
}

void scaled_close(struct place *place)
{
    mem_free(place->amax);
    place->amax = NULL;
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

/* --- tiles ------------------------------------------------------------------------------------ */

_Static_assert((int)WORK_BYTES == (int)PLANE_WORK_BYTES,
               "plane.h says how much data_plane.c frees");

/* A part being made. */
struct making {
    struct batch *b;
    const struct move *m;
    const struct program_tensor *t;
    struct move_end to[MAX_TARGETS];
};

/* Where the elements of a box lie in dense rows: in the source's own memory, or brought together. */
static int read_rows(const struct making *k, const struct box *elements, const void **ret_from,
                     int64_t *ret_stride)
{
    const struct move *m = k->m;
    uint32_t bytes = dtype_bytes(m->from_dtype);
    if (place_rows(m->from.place, m->tensor, elements, bytes, ret_from, ret_stride))
        return 0;
    const struct move_end in = {.compact = k->b->work->memory};
    *ret_from = in.compact;
    *ret_stride = (int64_t)elements->size[1] * bytes;
    return batch_gather(k->b, &(struct move){.tensor = m->tensor,
                                             .box = *elements,
                                             .from = m->from,
                                             .to = &in,
                                             .n_to = 1,
                                             .from_dtype = m->from_dtype,
                                             .to_dtype = m->from_dtype});
}

static int quantise(const struct making *k, const struct box *elements, struct kernel_quantise q)
{
    int r = read_rows(k, elements, &q.from, &q.from_stride);
    q.rows = elements->size[0];
    q.columns = elements->size[1];
    q.block_rows = k->t->block[0];
    q.block_columns = k->t->block[1];
    q.from_dtype = k->m->from_dtype;
    if (r == 0)
        r = batch_flush(k->b);
    return r == 0 ? device_quantise(k->b->stream, &q, 1) : r;
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

/* One tile of whole blocks, given as a box of scales. */
static int make_tile(struct making *k, const struct box *scales)
{
    struct box elements = scale_elements(k->t->block, k->t->origin, scales);
    uint8_t *work = k->b->work->memory;
    bool is_scales = k->t->value == PROGRAM_SCALES;
    struct kernel_quantise q = {.to = is_scales ? NULL : work + WORK_OUT,
                                .scales =
                                    is_scales ? (uint32_t *)(void *)(work + WORK_SCALES_AT) : NULL,
                                .step = KERNEL_QUANTISE_BLOCKS};
    int r = quantise(k, &elements, q);
    if (r < 0)
        return r;
    return is_scales ? move_on(k, scales, work + WORK_SCALES_AT)
                     : move_on(k, &elements, work + WORK_OUT);
}

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

/* Scales of what lies in dense rows: only they need work memory. */
static bool reads_in_place(const struct making *k, const struct box *scales)
{
    struct box elements = scale_elements(k->t->block, k->t->origin, scales);
    const void *first;
    int64_t stride;
    return k->t->value == PROGRAM_SCALES &&
           place_rows(k->m->from.place, k->m->tensor, &elements, dtype_bytes(k->m->from_dtype),
                      &first, &stride);
}

static int make_tiles(struct making *k)
{
    const struct program_tensor *t = k->t;
    struct box all = t->value == PROGRAM_SCALES ? k->m->box : scale_touched(t->block, &k->m->box);
    uint64_t size[2];
    struct box tile = {.n_dims = 2};
    int r = 0;
    tile_size(t, &all, reads_in_place(k, &all) ? READ_ELEMENTS : WORK_ELEMENTS, size);
    for (uint64_t row = 0; row < all.size[0] && r == 0; row += size[0])
        for (uint64_t column = 0; column < all.size[1] && r == 0; column += size[1]) {
            tile.offset[0] = all.offset[0] + row;
            tile.offset[1] = all.offset[1] + column;
            tile.size[0] = least(size[0], all.size[0] - row);
            tile.size[1] = least(size[1], all.size[1] - column);
            r = make_tile(k, &tile);
        }
    return r;
}

/* --- one scale for a great tensor ------------------------------------------------------------- */

/* Calls fn for the box in parts that fit into the work memory. */
static int each_part(struct making *k, const struct box *box,
                     int (*fn)(struct making *k, const struct box *part))
{
    uint64_t columns = least(box->size[1], WORK_ELEMENTS), rows = WORK_ELEMENTS / columns;
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

static struct place_amax *amax_of(const struct making *k)
{
    return &k->m->from.place->amax[k->m->tensor];
}

static int read_amax(struct making *k, const struct box *part)
{
    return quantise(
        k, part,
        (struct kernel_quantise){.amax_bits = &amax_of(k)->bits, .step = KERNEL_QUANTISE_AMAX});
}

static int scale_part(struct making *k, const struct box *part)
{
    uint8_t *out = k->b->work->memory + WORK_OUT;
    int r =
        quantise(k, part,
                 (struct kernel_quantise){
                     .amax_bits = &amax_of(k)->bits, .to = out, .step = KERNEL_QUANTISE_BY_AMAX});
    return r == 0 ? move_on(k, part, out) : r;
}

static int make_by_amax(struct making *k)
{
    struct place_amax *amax = amax_of(k);
    struct box whole = box_whole(2, k->t->origin), one = {.n_dims = 2, .size = {1, 1}};
    uint32_t bit = UINT32_C(1) << k->b->work->number;
    bool own = device_local(device_stream_device(k->b->stream)) == k->m->from.place->device;
    int r = own && (amax->streams & bit) != 0 ? 0 : each_part(k, &whole, read_amax);
    if (r < 0)
        return r;
    amax->streams |= own ? bit : 0;
    if (k->t->value == PROGRAM_QUANTISED)
        return each_part(k, &k->m->box, scale_part);
    uint8_t *scales = k->b->work->memory + WORK_SCALES_AT;
    const struct kernel_quantise q = {.scales = (uint32_t *)(void *)scales,
                                      .amax_bits = &amax->bits,
                                      .from_dtype = k->m->from_dtype,
                                      .step = KERNEL_QUANTISE_BY_AMAX};
    r = batch_flush(k->b);
    if (r == 0)
        r = device_quantise(k->b->stream, &q, 1);
    return r == 0 ? move_on(k, &one, scales) : r;
}

/* --- moves ------------------------------------------------------------------------------------ */

int scaled_move(struct batch *b, const struct move *m)
{
    struct making k = {.b = b, .m = m, .t = place_makes(m->from.place, m->tensor)};
    rs_assert(k.t != NULL && m->n_to <= MAX_TARGETS);
    if (box_empty(&m->box))
        return 0;
    int r = work_ready(b);
    for (uint32_t i = 0; i < m->n_to; i++) {
        k.to[i] = m->to[i];
        if (k.to[i].compact != NULL && k.to[i].box == NULL)
            k.to[i].box = &m->box;
    }
    if (r == 0)
        r = by_amax(k.t) ? make_by_amax(&k) : make_tiles(&k);
    return r;
}

uint64_t scaled_part(const struct program *p, uint32_t cell, uint64_t at, uint64_t budget,
                     uint64_t *ret_used)
{
    const struct program_cell *c = &p->cells[cell];
    const struct program_tensor *t = &p->tensors[c->tensor];
    const struct box *box = &p->boxes[c->box];
    uint64_t n = box_elements(box), width = box->size[1], bytes = dtype_bytes(t->source_dtype);
    uint64_t block = least(t->block[0], t->origin[0]);
    if (t->value == PROGRAM_SCALES)
        bytes *= block * least(t->block[1], t->origin[1]);
    uint64_t end = least(at + (budget / bytes > 0 ? budget / bytes : 1), n);
    if (t->value == PROGRAM_QUANTISED && !by_amax(t)) {
        uint64_t row = box->offset[0] + end / width, last = row / block * block;
        uint64_t now = (box->offset[0] + at / width) / block * block + block; /* at least one row */
        last = last > now ? last : now;
        end = least((last - box->offset[0]) * width, n);
    }
    *ret_used = (end - at) * bytes;
    return end;
}
