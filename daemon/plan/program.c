#include "plan/program.h"

#include <string.h>

#include "base/mem.h"
#include "layout/scale.h"
#include "plan/program_check.h"
#include "plan/program_format.h"

#include "base/banned.h"

struct box program_source_box(const struct program_tensor *t, const struct box *box)
{
    if (t->value == PROGRAM_AS_SOURCE)
        return *box;
    struct box scales = t->value == PROGRAM_SCALES ? *box : scale_touched(t->block, box);
    return scale_elements(t->block, t->origin, &scales);
}

/* --- runs ------------------------------------------------------------------------------------- */

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

uint32_t program_like_cells(const struct program *p, uint32_t cell, uint32_t most)
{
    uint32_t r = program_run(p->cell_runs, sizeof *p->cell_runs, p->cell_marks, cell);
    uint32_t end = r + 1 < p->n_cell_runs ? p->cell_runs[r + 1].first : p->n_cells;
    return least(most, p->cell_runs[r].along_tensors ? end - cell : 1);
}

uint32_t program_like_items(const struct program *p, uint32_t item, uint32_t most)
{
    uint32_t r = program_run(p->item_runs, sizeof *p->item_runs, p->item_marks, item);
    uint32_t end = r + 1 < p->n_item_runs ? p->item_runs[r + 1].first : p->n_items;
    uint32_t cell = p->item_runs[r].cell + (item - p->item_runs[r].first);
    return program_like_cells(p, cell, least(most, end - item));
}

uint32_t program_like_holds(const struct program *p, uint32_t hold, uint32_t most)
{
    uint32_t r = program_run(p->hold_runs, sizeof *p->hold_runs, p->hold_marks, hold);
    uint32_t end = r + 1 < p->n_hold_runs ? p->hold_runs[r + 1].first : p->n_holds;
    uint32_t cell = p->hold_runs[r].cell + (hold - p->hold_runs[r].first);
    return program_like_cells(p, cell, least(most, end - hold));
}

/* The first run of holds that begins behind (place, cell). */
static uint32_t hold_run_behind(const struct program *p, uint32_t place, uint32_t cell)
{
    uint32_t low = 0, high = p->n_hold_runs;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        const struct program_hold_run *r = &p->hold_runs[mid];
        if (r->place > place || (r->place == place && r->cell > cell))
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

static uint32_t hold_run_first(const struct program *p, uint32_t run)
{
    return run < p->n_hold_runs ? p->hold_runs[run].first : p->n_holds;
}

void program_holds_of(const struct program *p, uint32_t place, uint32_t *ret_first,
                      uint32_t *ret_end)
{
    *ret_first = place == 0 ? 0 : hold_run_first(p, hold_run_behind(p, place - 1, PROGRAM_NONE));
    *ret_end = hold_run_first(p, hold_run_behind(p, place, PROGRAM_NONE));
}

uint32_t program_hold_at(const struct program *p, uint32_t place, uint32_t cell)
{
    uint32_t behind = hold_run_behind(p, place, cell);
    if (behind == 0)
        return PROGRAM_NONE;
    const struct program_hold_run *r = &p->hold_runs[behind - 1];
    uint32_t n = hold_run_first(p, behind) - r->first;
    return r->place == place && cell - r->cell < n ? r->first + (cell - r->cell) : PROGRAM_NONE;
}

/* --- opening ---------------------------------------------------------------------------------- */

static int find_arrays(const uint8_t *data, size_t n_bytes, const struct program_header *h,
                       struct program *p, struct err *e)
{
    uint64_t at = sizeof *h;
#define X(name, type, count)                                                                       \
    at = (at + 7) / 8 * 8;                                                                         \
    if (at > n_bytes || h->count > (n_bytes - at) / sizeof(type))                                  \
        return err_set(e, RS_EPROTO, "program: " #name " do not fit in %zu bytes", n_bytes);       \
    p->name = (const type *)(const void *)(data + at);                                             \
    p->count = h->count;                                                                           \
    at += (uint64_t)h->count * sizeof(type);
    PROGRAM_ARRAYS(X)
#undef X
    if (at != n_bytes)
        return err_set(e, RS_EPROTO, "program: %zu bytes, its arrays end at %llu", n_bytes,
                       (unsigned long long)at);
    return 0;
}

static int open_frame(const void *data, size_t n_bytes, struct program *p, struct err *e)
{
    struct program_header h;
    if (n_bytes < sizeof h || (uintptr_t)data % 8 != 0)
        return err_set(e, RS_EPROTO, "program: %zu bytes, or not aligned to 8", n_bytes);
    memcpy(&h, data, sizeof h);
    if (h.magic != PROGRAM_MAGIC)
        return err_set(e, RS_EPROTO, "program: not a program of this version");
    if (h.chunk_bytes == 0 || h.chunk_bytes > PROGRAM_LIMIT_BYTES || h.ring_slots == 0 ||
        h.scratch_bytes > PROGRAM_LIMIT_BYTES)
        return err_set(e, RS_EPROTO, "program: impossible chunk, ring or scratch size");
    if (h.n_cells > PROGRAM_MOST || h.n_items > PROGRAM_MOST || h.n_holds > PROGRAM_MOST)
        return err_set(e, RS_EPROTO, "program: more than %u cells, items or holds", PROGRAM_MOST);
    memcpy(p->digest, h.digest, sizeof p->digest);
    p->chunk_bytes = h.chunk_bytes;
    p->scratch_bytes = h.scratch_bytes;
    p->ring_slots = h.ring_slots;
    p->n_plan_devices = h.n_plan_devices;
    p->n_cells = h.n_cells;
    p->n_items = h.n_items;
    p->n_holds = h.n_holds;
    return find_arrays(data, n_bytes, &h, p, e);
}

int program_open(const void *data, size_t n_bytes, struct program *ret, struct err *e)
{
    struct program p;
    memset(&p, 0, sizeof p);
    int r = open_frame(data, n_bytes, &p, e);
    if (r == 0)
        r = program_check_things(&p, e);
    if (r == 0)
        r = program_check_moves(&p, e);
    if (r == 0)
        *ret = p;
    return r;
}
