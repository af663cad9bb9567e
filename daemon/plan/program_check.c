#include "plan/program_check.h"

#include <string.h>

#include "base/mem.h"
#include "layout/scale.h"

#include "base/banned.h"

/* --- runs ------------------------------------------------------------------------------------- */

/* One kind of runs: each begins with the number of its first entry. */
struct runs {
    const char *what;
    const void *at;
    size_t run_bytes;
    const uint32_t *marks;
    uint32_t n_runs, n_marks, n;
};

static uint32_t first_of(const struct runs *x, uint32_t run)
{
    return *(const uint32_t *)(const void *)((const char *)x->at + run * x->run_bytes);
}

/* Entries 0 … n-1, none of them in no run or two, and each run found where its marks say. */
static int check_runs(const struct runs *x, struct err *e)
{
    uint32_t n_blocks = x->n == 0 ? 0 : (x->n - 1) / PROGRAM_MARK + 1, run = 0;
    if ((x->n == 0) != (x->n_runs == 0) || x->n_marks != (x->n == 0 ? 0 : n_blocks + 1))
        return program_bad(e, x->what, x->n_runs);
    for (uint32_t i = 0; i < x->n_runs; i++)
        if (i == 0 ? first_of(x, i) != 0
                   : first_of(x, i) <= first_of(x, i - 1) || first_of(x, i) >= x->n)
            return program_bad(e, x->what, i);
    for (uint32_t i = 0; i < n_blocks; i++) {
        while (run + 1 < x->n_runs && first_of(x, run + 1) <= i * PROGRAM_MARK)
            run++;
        if (x->marks[i] != run)
            return program_bad(e, x->what, run);
    }
    if (n_blocks > 0 && x->marks[n_blocks] != x->n_runs - 1)
        return program_bad(e, x->what, x->n_runs);
    return 0;
}

static int check_all_runs(const struct program *p, struct err *e)
{
#define RUNS(kind)                                                                                 \
    {                                                                                              \
#kind " run or mark", p->kind##_runs, sizeof *p->kind##_runs, p->kind##_marks,             \
            p->n_##kind##_runs, p->n_##kind##_marks, p->n_##kind##s                                \
    }
    const struct runs all[] = {RUNS(cell), RUNS(item), RUNS(hold)};
#undef RUNS
    int r = 0;
    for (size_t i = 0; i < sizeof all / sizeof all[0] && r == 0; i++)
        r = check_runs(&all[i], e);
    return r;
}

/* --- tensors, boxes --------------------------------------------------------------------------- */

/* Shapes, blocks and dtypes of what is scaled fit together. */
static bool value_fits(const struct program_tensor *t)
{
    if (t->value == PROGRAM_AS_SOURCE)
        return true;
    if (t->value > PROGRAM_SCALES || t->n_dims != 2 ||
        (t->source_dtype != DTYPE_BFLOAT16 && t->source_dtype != DTYPE_FLOAT32))
        return false;
    for (unsigned d = 0; d < 2; d++) {
        if (t->block[d] == 0 || t->origin[d] == 0 || t->origin[d] > PROGRAM_LIMIT_BYTES / 8)
            return false;
        uint64_t length =
            t->value == PROGRAM_SCALES ? scale_count(t->block[d], t->origin[d]) : t->origin[d];
        if (t->shape[d] != length)
            return false;
    }
    return t->origin[0] <= PROGRAM_LIMIT_BYTES / 8 / t->origin[1] &&
           scale_known(t->block, t->origin);
}

/* The wire dtypes in which a tensor can go out. */
static bool wire_fits(const struct program_tensor *t, enum dtype wire)
{
    enum dtype source = (enum dtype)t->source_dtype;
    if (t->value == PROGRAM_QUANTISED)
        return wire == DTYPE_FLOAT8_E4M3FN;
    if (t->value == PROGRAM_SCALES)
        return wire == DTYPE_FLOAT32;
    return wire == source || dtype_can_cast(source, wire);
}

static int check_tensors(const struct program *p, struct err *e)
{
    for (uint32_t i = 0; i < p->n_tensors; i++) {
        const struct program_tensor *t = &p->tensors[i];
        if (t->n_dims > BOX_MAX_DIMS || dtype_bytes((enum dtype)t->source_dtype) == 0)
            return program_bad(e, "dims or dtype of tensor", i);
        uint64_t left = PROGRAM_LIMIT_BYTES / 8;
        for (uint8_t d = 0; d < t->n_dims; d++) {
            if (t->shape[d] == 0 || t->shape[d] > left)
                return program_bad(e, "shape of tensor", i);
            left /= t->shape[d];
        }
        if (!value_fits(t))
            return program_bad(e, "block or shape of scaled tensor", i);
    }
    return 0;
}

static int check_boxes(const struct program *p, struct err *e)
{
    for (uint32_t i = 0; i < p->n_boxes; i++) {
        const struct box *b = &p->boxes[i];
        if (b->n_dims > BOX_MAX_DIMS)
            return program_bad(e, "dims of box", i);
        for (uint8_t d = 0; d < b->n_dims; d++)
            if (b->size[d] == 0 || b->size[d] > PROGRAM_LIMIT_BYTES ||
                b->offset[d] > PROGRAM_LIMIT_BYTES)
                return program_bad(e, "size of box", i);
    }
    return 0;
}

/* --- cells ------------------------------------------------------------------------------------ */

/* What a cell must fit is the same in both. */
static bool alike(const struct program_tensor *a, const struct program_tensor *b)
{
    return memcmp(a->shape, b->shape, sizeof a->shape) == 0 && a->n_dims == b->n_dims &&
           a->source_dtype == b->source_dtype && a->value == b->value &&
           a->scratch_offset == b->scratch_offset;
}

/* Per tensor: the end of the stretch of tensors that are alike. */
static uint32_t *alike_ends(const struct program *p)
{
    uint32_t *end = mem_calloc((size_t)p->n_tensors + 1, sizeof *end);
    for (uint32_t i = p->n_tensors; end != NULL && i-- > 0;)
        end[i] =
            i + 1 < p->n_tensors && alike(&p->tensors[i], &p->tensors[i + 1]) ? end[i + 1] : i + 1;
    return end;
}

static int check_cell(const struct program *p, uint32_t i, const struct program_tensor *t,
                      const struct box *b, enum dtype wire, struct err *e)
{
    if (!wire_fits(t, wire))
        return program_bad(e, "wire dtype of cell", i);
    if (b->n_dims != t->n_dims)
        return program_bad(e, "box dims of cell", i);
    uint64_t bytes = dtype_bytes(wire);
    for (uint8_t d = 0; d < b->n_dims; d++) {
        if (b->offset[d] + b->size[d] > t->shape[d])
            return program_bad(e, "box beyond its tensor: cell", i);
        bytes *= t->shape[d];
    }
    if (t->scratch_offset != UINT64_MAX &&
        (t->scratch_offset > p->scratch_bytes || bytes > p->scratch_bytes - t->scratch_offset))
        return program_bad(e, "scratch of cell", i);
    return 0;
}

/* n cells; of those in one box, one of each stretch of tensors that are alike stands for it. */
static int check_cell_run(const struct program *p, const struct program_cell_run *x, uint32_t n,
                          const uint32_t *alike_end, struct err *e)
{
    uint32_t last = n - 1, tensors = x->along_tensors ? last : 0, boxes = last - tensors;
    int r = 0;
    if (x->along_tensors > 1 || x->tensor >= p->n_tensors || tensors >= p->n_tensors - x->tensor ||
        x->box >= p->n_boxes || boxes >= p->n_boxes - x->box || boxes > UINT32_MAX - x->number)
        return program_bad(e, "tensor, box or number of cell", x->first);
    for (uint32_t k = 0; k < n && r == 0;) {
        uint32_t tensor = x->tensor + (x->along_tensors ? k : 0);
        uint32_t box = x->box + (x->along_tensors ? 0 : k);
        r = check_cell(p, x->first + k, &p->tensors[tensor], &p->boxes[box], (enum dtype)x->wire,
                       e);
        k = x->along_tensors ? alike_end[tensor] - x->tensor : k + 1;
    }
    return r;
}

static int check_cells(const struct program *p, struct err *e)
{
    uint32_t *alike_end = alike_ends(p);
    int r = alike_end == NULL ? err_set(e, RS_ENOMEM, "out of memory") : 0;
    for (uint32_t i = 0; i < p->n_cell_runs && r == 0; i++) {
        const struct program_cell_run *x = &p->cell_runs[i];
        uint32_t end = i + 1 < p->n_cell_runs ? x[1].first : p->n_cells;
        r = check_cell_run(p, x, end - x->first, alike_end, e);
    }
    mem_free(alike_end);
    return r;
}

static int check_places(const struct program *p, struct err *e)
{
    for (uint32_t i = 0; i < p->n_places; i++) {
        const struct program_place *x = &p->places[i];
        if (x->device >= p->n_devices || x->side > PROGRAM_SCRATCH)
            return program_bad(e, "device or side of place", i);
        if (x->side == PROGRAM_SCRATCH && p->scratch_bytes == 0)
            return program_bad(e, "no scratch for place", i);
    }
    return 0;
}

int program_check_things(const struct program *p, struct err *e)
{
    int r = check_all_runs(p, e);
    if (r == 0)
        r = check_tensors(p, e);
    if (r == 0)
        r = check_boxes(p, e);
    if (r == 0)
        r = check_cells(p, e);
    if (r == 0)
        r = check_places(p, e);
    return r;
}
