#include "service/rehearse.h"

#include <string.h>

#include "base/mem.h"
#include "kernels/kernels.h"
#include "layout/coordinates.h"
#include "service/state.h"

#include "base/banned.h"

/* SMALL: elements of shards that a sample never leaves out. TILE: elements that are made at a time. */
enum { TILE = 32 << 10, SMALL = 1 << 20 };

struct boxes {
    struct box *boxes;
    size_t capacity;
};

struct work {
    const struct layout *layout;
    struct publication *const *publications;
    uint64_t nth; /* of the large shards; 1: all */
    uint64_t large;
    struct rehearse_extent extent;
    uint8_t *run; /* TILE elements of at most 8 bytes */
    uint32_t seed, n_wrong;
    struct boxes mine, others;
};

/* --- what a box of coordinates comes to ---------------------------------------------------------- */

/* Of `rows` rows (along the last dim but one) `n` elements each, the first of them at `at`. */
static void tile_add(const struct work *w, const struct tensor *t, const uint64_t *at,
                     uint64_t rows, uint64_t n, uint64_t *sum)
{
    struct kernel_fingerprint f = {
        .fingerprint = sum, .n_dims = t->n_dims, .dtype = (uint8_t)t->dtype};
    unsigned last = t->n_dims == 0 ? 0 : t->n_dims - 1U;
    uint64_t bytes = dtype_bytes(t->dtype), here[BOX_MAX_DIMS];
    memcpy(here, at, sizeof here);
    for (uint64_t i = 0; i < rows; i++) {
        uint32_t row = coordinates_row(w->seed, t->n_dims, here);
        coordinates_run(t->dtype, row, here[last], n, w->run + i * n * bytes);
        here[last > 0 ? last - 1 : 0] += last > 0;
    }
    for (unsigned d = 0; d < t->n_dims; d++) {
        f.offset[d] = at[d];
        f.size[d] = d == last ? n : d + 1 == last ? rows : 1;
        f.from.stride_bytes[d] = (int64_t)(d == last ? bytes : n * bytes);
    }
    f.from.base = w->run;
    kernel_fingerprint_host(&f);
}

/* The box's part in the last two dims, in tiles; `at` is where the others stand. */
static void plane_add(const struct work *w, const struct tensor *t, const struct box *b,
                      uint64_t *at, uint64_t *sum)
{
    unsigned last = b->n_dims - 1U, before = b->n_dims > 1 ? last - 1 : 0;
    uint64_t n_rows = b->n_dims > 1 ? b->size[before] : 1, n = b->size[last];
    uint64_t width = n < TILE ? n : TILE, height = TILE / width;
    for (uint64_t row = 0; row < n_rows; row += height)
        for (uint64_t x = 0; x < n; x += width) {
            at[before] = b->offset[before] + row;
            at[last] = b->offset[last] + x; /* 1 dim: after `before`, which is the same */
            tile_add(w, t, at, n_rows - row < height ? n_rows - row : height,
                     n - x < width ? n - x : width, sum);
        }
}

/* The next place of the dims before the last two; false after the last. */
static bool plane_next(const struct box *b, uint64_t *at)
{
    for (unsigned d = b->n_dims > 2 ? b->n_dims - 2U : 0; d-- > 0;) {
        if (++at[d] < b->offset[d] + b->size[d])
            return true;
        at[d] = b->offset[d];
    }
    return false;
}

static uint64_t box_sum(struct work *w, const struct tensor *t, const struct box *b)
{
    uint64_t at[BOX_MAX_DIMS] = {0}, sum = 0;
    w->seed = coordinates_seed(t->name);
    for (unsigned d = 0; d < b->n_dims; d++)
        at[d] = b->offset[d];
    if (b->n_dims == 0)
        tile_add(w, t, at, 1, 1, &sum);
    else if (box_elements(b) > 0)
        do
            plane_add(w, t, b, at, &sum);
        while (plane_next(b, at));
    return sum;
}

/* --- which shards -------------------------------------------------------------------------------- */

/* How many there are; RS_ENOMEM. */
static int boxes_read(const struct work *w, uint32_t t, uint32_t rank, struct boxes *ret,
                      uint32_t *ret_n)
{
    void *boxes = ret->boxes;
    *ret_n = layout_shards(w->layout, t, rank, NULL, 0);
    if (mem_grow(&boxes, &ret->capacity, *ret_n, sizeof *ret->boxes) != 0)
        return RS_ENOMEM;
    ret->boxes = boxes;
    (void)layout_shards(w->layout, t, rank, ret->boxes, *ret_n);
    return 0;
}

/* 1: a lower rank holds the same (compare_sources has seen to it that both have published the same); 0; RS_ENOMEM. */
static int is_replica(struct work *w, uint32_t t, uint32_t rank, uint32_t n)
{
    for (uint32_t r = 0; r < rank; r++) {
        uint32_t n_others;
        if (w->publications[r] == NULL)
            continue;
        if (boxes_read(w, t, r, &w->others, &n_others) != 0)
            return RS_ENOMEM;
        bool same = n_others == n;
        for (uint32_t i = 0; same && i < n; i++)
            same = box_equal(&w->mine.boxes[i], &w->others.boxes[i]);
        if (same)
            return 1;
    }
    return 0;
}

/* This rank's boxes of t, if they are to be looked at, and how many elements they have (0: nothing is). RS_ENOMEM. */
static int shard_read(struct work *w, uint32_t t, uint32_t rank, uint32_t *ret_n,
                      uint64_t *ret_elements)
{
    *ret_elements = 0;
    *ret_n = 0;
    if (w->publications[rank] == NULL)
        return 0;
    int r = boxes_read(w, t, rank, &w->mine, ret_n);
    if (r == 0 && *ret_n > 0)
        r = is_replica(w, t, rank, *ret_n);
    for (uint32_t i = 0; r == 0 && i < *ret_n; i++)
        *ret_elements += box_elements(&w->mine.boxes[i]);
    return r < 0 ? r : 0;
}

static bool sampled(struct work *w, uint64_t elements)
{
    return elements < SMALL || w->large++ % w->nth == 0;
}

/* --- the check ----------------------------------------------------------------------------------- */

static void differs(struct work *w, uint32_t t, uint32_t rank, uint32_t n, struct err *e)
{
    char box[160];
    if (w->n_wrong++ > 0)
        return;
    (void)err_set(
        e, RS_EDATALOSS,
        "tensor '%s' %s%s of source rank %u: the buffers do not hold the coordinates that "
        "the layout gives them; the layout or a binding says something else than the "
        "framework",
        w->layout->tensors[t].name, box_text(&w->mine.boxes[0], box, sizeof box), n > 1 ? " …" : "",
        rank);
}

static int shard_check(struct work *w, uint32_t t, uint32_t rank, struct err *e)
{
    uint32_t n = 0;
    uint64_t sum = 0, elements;
    if (shard_read(w, t, rank, &n, &elements) != 0)
        return err_set(e, RS_ENOMEM, "no memory to check coordinates");
    if (elements == 0)
        return 0;
    w->extent.shards++;
    if (!sampled(w, elements))
        return 0;
    w->extent.checked++;
    for (uint32_t i = 0; i < n; i++)
        sum += box_sum(w, &w->layout->tensors[t], &w->mine.boxes[i]);
    if (sum != w->publications[rank]->fingerprints[t])
        differs(w, t, rank, n, e);
    return 0;
}

/* Of how many large shards one is computed, so that it is about `most` elements in all. */
static int nth_choose(struct work *w, uint64_t most, struct err *e)
{
    uint64_t all = 0, elements;
    uint32_t n;
    for (uint32_t t = 0; t < w->layout->n_tensors; t++)
        for (uint32_t rank = 0; rank < w->layout->n_ranks; rank++) {
            if (shard_read(w, t, rank, &n, &elements) != 0)
                return err_set(e, RS_ENOMEM, "no memory to check coordinates");
            all += elements;
        }
    w->nth = most == 0 || all <= most ? 1 : (all + most - 1) / most;
    return 0;
}

int rehearse_fingerprinted(const struct layout *source, struct publication *const *publications,
                           struct err *e)
{
    for (uint32_t rank = 0; rank < source->n_ranks; rank++)
        if (publications[rank] != NULL && publications[rank]->fingerprints == NULL)
            return err_set(
                e, RS_EPRECOND,
                "source rank %u has published without fingerprints, so a rehearsal proves "
                "nothing of it: set [refit] verify of its node to sampled or full",
                rank);
    return 0;
}

int rehearse_check(const struct layout *source, struct publication *const *publications,
                   uint64_t most_elements, struct rehearse_extent *ret, struct err *e)
{
    struct work w = {.layout = source, .publications = publications};
    w.run = mem_alloc((size_t)TILE * 8);
    int r = w.run == NULL ? err_set(e, RS_ENOMEM, "no memory to check coordinates")
                          : nth_choose(&w, most_elements, e);
    for (uint32_t t = 0; r == 0 && t < source->n_tensors; t++)
        for (uint32_t rank = 0; r == 0 && rank < source->n_ranks; rank++)
            r = shard_check(&w, t, rank, e);
    if (r == 0 && w.n_wrong > 0) {
        r = RS_EDATALOSS;
        if (w.n_wrong > 1 && e != NULL) {
            const struct err first = *e;
            (void)err_set(e, r, "%.900s; and %u more", first.text, w.n_wrong - 1);
        }
    }
    if (r == 0)
        *ret = w.extent;
    mem_free(w.run);
    mem_free(w.mine.boxes);
    mem_free(w.others.boxes);
    return r;
}
