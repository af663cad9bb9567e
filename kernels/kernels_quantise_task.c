/* Casts with scales as a GPU works on them: tasks, and their run on the CPU. */
#include <stdbool.h>

#include "base/err.h"
#include "kernels/kernels_quantise_body.h"

#include "base/banned.h"

static uint32_t count(uint64_t n, uint64_t by)
{
    return by == 0 ? 0 : (uint32_t)((n + by - 1) / by);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Where there is one scale for all, blocks are what a block of threads holds at once. */
static void shape_blocks(struct kernel_quantise_task *t, const struct kernel_quantise *q)
{
    enum { MOST_UNITS = 128 }; /* of a row */
    t->block_rows = (uint32_t)least(q->block_rows, q->rows);
    t->block_columns = (uint32_t)least(q->block_columns, q->columns);
    uint32_t units = count(t->block_columns, KERNEL_QUANTISE_UNIT);
    uint32_t n_bytes = q->from_dtype == KERNEL_BFLOAT16 ? 2 : 4;
    if (q->step != KERNEL_QUANTISE_BLOCKS) {
        t->block_columns = (uint32_t)least(q->columns, MOST_UNITS * KERNEL_QUANTISE_UNIT);
        units = count(t->block_columns, KERNEL_QUANTISE_UNIT);
        t->block_rows =
            (uint32_t)least(q->rows, kernel_quantise_pass_units(n_bytes) / (units > 0 ? units : 1));
    }
    t->units = kernel_divisor_of(units);
    t->across = kernel_divisor_of(count(q->columns, t->block_columns));
    t->n_blocks = count(q->rows, t->block_rows) * count(q->columns, t->block_columns);
    if (q->step == KERNEL_QUANTISE_BY_AMAX && q->scales != NULL && t->n_blocks == 0)
        t->n_blocks = 1; /* the scale alone */
}

struct kernel_quantise_task kernel_quantise_task_of(const struct kernel_quantise *q, uint64_t *sum)
{
    struct kernel_quantise_task t = {.from = q->from,
                                     .from_stride = q->from_stride,
                                     .scales = q->scales,
                                     .amax_bits = q->amax_bits,
                                     .sum = q->fingerprint == NULL ? NULL : sum,
                                     .offset = {q->offset[0], q->offset[1]},
                                     .n_targets = q->n_targets,
                                     .from_dtype = q->from_dtype,
                                     .step = q->step};
    rs_assert(q->step != KERNEL_QUANTISE_CLEAR && q->n_targets <= KERNEL_QUANTISE_TARGETS);
    rs_assert(q->rows <= INT32_MAX && q->columns <= INT32_MAX && q->rows * q->columns <= INT32_MAX);
    rs_assert(q->step != KERNEL_QUANTISE_BLOCKS || (q->block_rows > 0 && q->block_columns > 0));
    t.rows = (uint32_t)q->rows;
    t.columns = (uint32_t)q->columns;
    if (q->n_targets > 0 || q->fingerprint != NULL) { /* else the window stays empty */
        t.row = (uint32_t)least(q->window_row, q->rows);
        t.column = (uint32_t)least(q->window_column, q->columns);
        t.row_end = t.row + (uint32_t)least(q->window_rows, q->rows - t.row);
        t.column_end = t.column + (uint32_t)least(q->window_columns, q->columns - t.column);
    }
    for (uint32_t i = 0; i < q->n_targets; i++) {
        t.to[i] = (char *)q->to[i].base;
        t.to_stride[i] = q->to[i].stride;
    }
    shape_blocks(&t, q);
    return t;
}

void kernel_quantise_batch_add(struct kernel_quantise_batch *b,
                               const struct kernel_quantise_task *task)
{
    rs_assert(b->n_tasks < KERNEL_QUANTISE_BATCH_TASKS);
    rs_assert(task->n_blocks <= INT32_MAX - b->n_blocks);
    struct kernel_quantise_task *t = &b->tasks[b->n_tasks++];
    *t = *task;
    t->first_block = b->n_blocks;
    b->n_blocks += t->n_blocks;
}

/* --- as the kernel of kernels_gpu.cu does it ---------------------------------------------------- */

static void raise_to(uint32_t *to, uint32_t value)
{
    uint32_t seen = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (value > seen &&
           !__atomic_compare_exchange_n(to, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

/* All threads read before any of them writes, as at a barrier. Those without a unit are left out:
 * they would read nothing. */
static uint32_t block_amax(const struct kernel_quantise_task *t,
                           const struct kernel_quantise_block *b, uint32_t n_bytes)
{
    struct kernel_quantise_pass pass;
    uint32_t amax = 0, n_units = kernel_quantise_units(t, b);
    for (uint32_t base = 0; base < n_units; base += kernel_quantise_pass_units(n_bytes))
        for (uint32_t thread = 0; thread < KERNEL_THREADS && base + thread < n_units; thread++) {
            uint32_t here = kernel_quantise_read(t, b, base + thread, &pass, n_bytes);
            amax = here > amax ? here : amax;
        }
    return amax;
}

static void run_block(const struct kernel_quantise_task *t, uint32_t number, uint32_t n_bytes)
{
    struct kernel_quantise_block b = kernel_quantise_block_of(t, number);
    struct kernel_quantise_pass pass;
    uint32_t n_units = kernel_quantise_units(t, &b);
    uint32_t amax = t->step == KERNEL_QUANTISE_BY_AMAX ? *t->amax_bits : block_amax(t, &b, n_bytes);
    if (t->step == KERNEL_QUANTISE_AMAX) {
        raise_to(t->amax_bits, amax);
        return;
    }
    uint32_t scale = kernel_scale_of(amax);
    if (t->scales != NULL && (t->step == KERNEL_QUANTISE_BLOCKS || number == 0))
        t->scales[number] = scale;
    if (kernel_quantise_outside(t, &b))
        return;
    for (uint32_t base = 0; base < n_units; base += kernel_quantise_pass_units(n_bytes))
        for (uint32_t thread = 0; thread < KERNEL_THREADS && base + thread < n_units; thread++) {
            (void)kernel_quantise_read(t, &b, base + thread, &pass, n_bytes);
            uint64_t sum =
                kernel_quantise_write(t, &b, base + thread, &pass, kernel_float_of(scale), n_bytes);
            if (t->sum != NULL)
                (void)__atomic_fetch_add(t->sum, sum, __ATOMIC_RELAXED);
        }
}

void kernel_quantise_batch_run_host(const struct kernel_quantise_batch *b, uint32_t n_blocks)
{
    for (uint32_t first = 0; first < n_blocks; first++) {
        uint32_t i = 0;
        for (uint32_t block = first; block < b->n_blocks; block += n_blocks) {
            i = kernel_quantise_task_of_block(b->tasks, i, block);
            run_block(&b->tasks[i], block - b->tasks[i].first_block,
                      b->tasks[i].from_dtype == KERNEL_BFLOAT16 ? 2 : 4);
        }
    }
}
