/* Casts to float8 with scales: tasks for a GPU, their run on the CPU, and the host twin. */
#include <stdbool.h>
#include <string.h>

#include "base/err.h"
#include "kernels/kernels_body.h"
#include "kernels/kernels_task.h"

#include "base/banned.h"

static uint64_t blocks_of(uint64_t size)
{
    return (size + KERNEL_SCALE_BLOCK_SIZE - 1) / KERNEL_SCALE_BLOCK_SIZE;
}

/* Sizes and the number of blocks. */
static int task_shape(struct kernel_scale_task *t, const uint64_t *size, unsigned n_dims)
{
    uint64_t n = 1;
    for (unsigned d = 0; d < n_dims; d++) {
        uint64_t count = d + 2 < n_dims ? size[d] : blocks_of(size[d]);
        if (count > INT32_MAX || __builtin_mul_overflow(n, count, &n))
            return RS_EINVAL;
        if (d + 2 < n_dims)
            t->outer[d] = kernel_divisor_of((uint32_t)count);
    }
    if (n > INT32_MAX)
        return RS_EINVAL;
    t->n_blocks = (uint32_t)n;
    t->n_outer = (uint8_t)(n_dims - 2);
    t->n_rows = size[n_dims - 2];
    t->n_columns = size[n_dims - 1];
    t->block_rows = kernel_divisor_of((uint32_t)blocks_of(t->n_rows));
    t->block_columns = kernel_divisor_of((uint32_t)blocks_of(t->n_columns));
    return 0;
}

int kernel_scale_task_of_cast(const struct kernel_scaled_cast *c, struct kernel_scale_task *ret)
{
    struct kernel_scale_task t = {.from = c->from.base,
                                  .to = c->to.base,
                                  .scale = c->scale.base,
                                  .sum = c->fingerprint,
                                  .scale_sum = c->scale_fingerprint,
                                  .rule = c->rule};
    unsigned n = c->n_dims;
    if (n < 2 || n > KERNEL_MAX_DIMS || c->rule > KERNEL_SCALE_TENSOR ||
        (c->size[n - 1] > 1 &&
         (c->from.stride_bytes[n - 1] != 2 || c->to.stride_bytes[n - 1] != 1)) ||
        c->offset[n - 1] % KERNEL_SCALE_BLOCK_SIZE != 0 ||
        (c->rule == KERNEL_SCALE_BLOCK && c->offset[n - 2] % KERNEL_SCALE_BLOCK_SIZE != 0))
        return RS_EINVAL;
    int r = task_shape(&t, c->size, n);
    if (r != 0)
        return r;
    memcpy(t.from_stride, c->from.stride_bytes, sizeof t.from_stride);
    memcpy(t.to_stride, c->to.stride_bytes, sizeof t.to_stride);
    memcpy(t.scale_stride, c->scale.stride_bytes, sizeof t.scale_stride);
    memcpy(t.offset, c->offset, n * sizeof *t.offset);
    *ret = t;
    return 0;
}

int kernel_scale_task_of_amax(const struct kernel_amax *a, struct kernel_scale_task *ret)
{
    struct kernel_scale_task t = {.from = a->from.base, .amax_bits = a->amax_bits};
    unsigned n = a->n_dims;
    if (n < 2 || n > KERNEL_MAX_DIMS || (a->size[n - 1] > 1 && a->from.stride_bytes[n - 1] != 2))
        return RS_EINVAL;
    int r = task_shape(&t, a->size, n);
    if (r != 0)
        return r;
    memcpy(t.from_stride, a->from.stride_bytes, sizeof t.from_stride);
    *ret = t;
    return 0;
}

static void add(uint64_t *to, uint64_t sum)
{
    if (to != NULL)
        (void)__atomic_fetch_add(to, sum, __ATOMIC_RELAXED);
}

static void raise_to(uint32_t *to, uint32_t value)
{
    uint32_t seen = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (value > seen &&
           !__atomic_compare_exchange_n(to, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

/* One block of one task: all its threads read before any writes, as at a barrier. */
static void run_block(const struct kernel_scale_task *t, uint32_t block)
{
    uint32_t amax = 0, scale = 0;
    struct kernel_scale_part part;
    for (uint32_t thread = 0; thread < KERNEL_THREADS; thread++) {
        part = kernel_scale_place(t, block, thread);
        uint32_t here = kernel_scale_read(t, &part);
        amax = here > amax ? here : amax;
    }
    if (t->amax_bits != NULL) {
        raise_to(t->amax_bits, amax);
        return;
    }
    scale = t->rule == KERNEL_SCALE_BLOCK ? kernel_scale_of(amax)
                                          : (uint32_t)kernel_load_element(t->scale, 4);
    for (uint32_t thread = 0; thread < KERNEL_THREADS; thread++) {
        part = kernel_scale_place(t, block, thread);
        (void)kernel_scale_read(t, &part);
        if (thread == 0 && t->rule == KERNEL_SCALE_BLOCK)
            add(t->scale_sum, kernel_scale_put(t, &part, scale));
        add(t->sum, kernel_scale_write(t, &part, scale));
    }
}

void kernel_scale_task_run_host(const struct kernel_scale_task *t, uint32_t n_blocks)
{
    for (uint32_t first = 0; first < n_blocks; first++)
        for (uint32_t block = first; block < t->n_blocks; block += n_blocks)
            run_block(t, block);
}

int kernel_scaled_cast_host(const struct kernel_scaled_cast *c)
{
    struct kernel_scale_task t;
    int r = kernel_scale_task_of_cast(c, &t);
    if (r == 0)
        kernel_scale_task_run_host(&t, 1);
    return r;
}

int kernel_amax_host(const struct kernel_amax *a)
{
    struct kernel_scale_task t;
    int r = kernel_scale_task_of_amax(a, &t);
    if (r == 0)
        kernel_scale_task_run_host(&t, 1);
    return r;
}
