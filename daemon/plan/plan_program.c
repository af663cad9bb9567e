/* One node's part of a plan, as program.h says: its cells, places, items, streams, messages,
 * copies, holds.
 *
 * Everything is derived here from runs, legs and casts, and only for this node: what the others do
 * is skipped stream by stream. */
#include <string.h>

#include "plan/plan_program.h"

#include "base/banned.h"

static int find_devices(struct encoder *x)
{
    const struct plan *p = x->p;
    uint32_t n = p->topology->n_devices;
    x->local = mem_alloc((n + 1U) * sizeof *x->local);
    x->set_here = mem_calloc(p->sets.n + 1, 1);
    x->run_cells = mem_alloc((p->runs.n + 1) * sizeof *x->run_cells);
    x->unit_tensor = mem_alloc((p->units.n + 1) * sizeof *x->unit_tensor);
    if (x->local == NULL || x->set_here == NULL || x->run_cells == NULL || x->unit_tensor == NULL)
        return RS_ENOMEM;
    memset(x->run_cells, 0xFF, p->runs.n * sizeof *x->run_cells);
    memset(x->unit_tensor, 0xFF, p->units.n * sizeof *x->unit_tensor);
    for (uint32_t d = 0; d < n; d++) {
        x->local[d] = NONE32;
        if (p->topology->devices[d].node != x->node)
            continue;
        if (vec_reserve(&x->v_devices, x->v_devices.n + 1) != 0)
            return RS_ENOMEM;
        x->local[d] = (uint32_t)x->v_devices.n;
        x->v_devices.at[x->v_devices.n++] = (struct program_device){.device = d};
    }
    for (uint32_t i = 0; i < p->sets.n; i++)
        for (uint32_t k = 0; k < p->sets.at[i].n && !x->set_here[i]; k++)
            x->set_here[i] = end_here(x, p->sets.at[i].first + k);
    return 0;
}

static void pad(struct buf *out, size_t begin)
{
    while ((out->n_bytes - begin) % 8 != 0 && buf_error(out) == 0)
        buf_put_u8(out, 0);
}

static void put_array(struct buf *out, size_t begin, const void *at, size_t n_bytes)
{
    pad(out, begin);
    if (n_bytes > 0)
        buf_put(out, at, n_bytes);
}

static int write_out(const struct encoder *x, struct buf *out)
{
    struct program_header h;
    size_t begin = out->n_bytes;
    memset(&h, 0, sizeof h);
    h.magic = PROGRAM_MAGIC;
    memcpy(h.digest, x->p->totals.digest, sizeof h.digest);
    h.chunk_bytes = x->p->options.chunk_bytes;
    h.scratch_bytes = x->p->scratch_bytes;
    h.ring_slots = x->p->options.ring_slots;
    h.n_plan_devices = x->p->topology->n_devices;
    h.n_cells = x->n_cells;
    h.n_items = x->n_items;
    h.n_holds = x->n_holds;
#define X(name, type, count) h.count = (uint32_t)x->v_##name.n;
    PROGRAM_ARRAYS(X)
#undef X
    buf_put(out, &h, sizeof h);
#define X(name, type, count) put_array(out, begin, x->v_##name.at, x->v_##name.n * sizeof(type));
    PROGRAM_ARRAYS(X)
#undef X
    return buf_error(out);
}

static void encoder_close(struct encoder *x)
{
    encoder_intern_close(x);
    mem_free(x->local);
    mem_free(x->set_here);
    mem_free(x->run_cells);
    mem_free(x->unit_tensor);
    mem_free(x->v_tensors.at);
    mem_free(x->v_boxes.at);
    mem_free(x->v_cell_runs.at);
    mem_free(x->v_cell_marks.at);
    mem_free(x->v_places.at);
    mem_free(x->v_lists.at);
    mem_free(x->v_item_runs.at);
    mem_free(x->v_item_marks.at);
    mem_free(x->v_streams.at);
    mem_free(x->v_messages.at);
    mem_free(x->messages.at);
    mem_free(x->copies.at);
    mem_free(x->v_hold_runs.at);
    mem_free(x->v_hold_marks.at);
    mem_free(x->holds.at);
    mem_free(x->v_devices.at);
    mem_free(x->list.at);
    mem_free(x->hold_places.at);
    mem_free(x->v_records.at);
}

int plan_program(const struct plan *p, uint32_t node, struct buf *out, struct err *e)
{
    struct encoder x = {.p = p, .node = node};
    if (node >= p->topology->n_nodes)
        return err_set(e, RS_EINVAL, "node %u of %u", node, p->topology->n_nodes);
    int r = find_devices(&x);
    if (r == 0)
        r = encoder_runs(&x);
    if (r == 0)
        r = encoder_streams(&x);
    if (r == 0)
        r = encoder_casts(&x);
    if (r == 0)
        r = encoder_lay_out(&x);
    if (r == 0)
        r = write_out(&x, out);
    encoder_close(&x);
    if (r != 0)
        return err_set(
            e, r, r == RS_ENOMEM ? "out of memory" : "the node's part has more than 2^32 entries");
    return 0;
}
