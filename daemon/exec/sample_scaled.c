#include "exec/sample_scaled.h"

#include "exec/scaled.h"

#include "base/banned.h"

enum { MOST_STEPS = 3 };

static bool is_scale(const struct sample_scaled *x)
{
    return x->tensor->value == PROGRAM_SCALES;
}

static struct kernel_quantise step_of(const struct sample_scaled *x, uint32_t *amax, uint8_t step)
{
    return (struct kernel_quantise){.from = x->from,
                                    .from_stride =
                                        (int64_t)(x->elements.size[1] * dtype_bytes(x->from_dtype)),
                                    .rows = x->elements.size[0],
                                    .columns = x->elements.size[1],
                                    .block_rows = x->tensor->block[0],
                                    .block_columns = x->tensor->block[1],
                                    .amax_bits = amax,
                                    .offset = {x->elements.offset[0], x->elements.offset[1]},
                                    .from_dtype = x->from_dtype,
                                    .step = step};
}

/* The kernels that a refit takes for this tensor (scaled.c), as steps of one item; the last one makes it. */
static uint32_t steps_of(const struct sample_scaled *x, uint32_t *amax,
                         struct kernel_quantise ret[MOST_STEPS])
{
    uint32_t n = 0;
    if (scaled_by_amax(x->tensor)) {
        ret[n++] = step_of(x, amax, KERNEL_QUANTISE_CLEAR);
        ret[n++] = step_of(x, amax, KERNEL_QUANTISE_AMAX);
        ret[n++] = step_of(x, amax, KERNEL_QUANTISE_BY_AMAX);
    } else {
        ret[n++] = step_of(x, NULL, KERNEL_QUANTISE_BLOCKS);
    }
    return n;
}

static void values_of(const struct sample_scaled *x, struct kernel_quantise *last,
                      uint64_t *fingerprint)
{
    last->window_rows = x->elements.size[0];
    last->window_columns = x->elements.size[1];
    last->fingerprint = fingerprint;
}

static int print_scale(struct batch *b, const struct sample_scaled *x, uint64_t *fingerprint)
{
    const struct move m = {
        .box = {.n_dims = 2, .offset = {x->scale[0], x->scale[1]}, .size = {1, 1}},
        .from = {.compact = x->made},
        .from_dtype = DTYPE_FLOAT32,
        .to_dtype = DTYPE_FLOAT32,
        .fingerprint = fingerprint};
    return batch_print_compact(b, &m);
}

int sample_scaled_fast(struct batch *b, const struct sample_scaled *x, uint64_t *fingerprint)
{
    struct kernel_quantise steps[MOST_STEPS];
    uint32_t *amax = NULL;
    int r = batch_flush(b);
    if (r == 0 && scaled_by_amax(x->tensor))
        r = scaled_number(b, &amax);
    if (r != 0)
        return r;
    uint32_t n = steps_of(x, amax, steps);
    struct kernel_quantise *last = &steps[n - 1];
    if (is_scale(x)) {
        last->scales = (uint32_t *)(void *)x->made;
    } else {
        values_of(x, last, fingerprint);
        last->to[0] = (struct kernel_quantise_target){x->made, (int64_t)x->elements.size[1]};
        last->n_targets = 1;
    }
    r = device_quantise(b->stream, steps, n);
    return r == 0 && is_scale(x) ? print_scale(b, x, fingerprint) : r;
}

void sample_scaled_reference(const struct sample_scaled *x, uint64_t *fingerprint)
{
    struct kernel_quantise steps[MOST_STEPS];
    uint32_t amax = 0, scale = 0, n = steps_of(x, &amax, steps);
    struct kernel_quantise *last = &steps[n - 1];
    last->scales = &scale;
    if (!is_scale(x))
        values_of(x, last, fingerprint);
    for (uint32_t i = 0; i < n; i++)
        kernel_quantise_reference(&steps[i]);
    if (is_scale(x))
        kernel_fingerprint_reference(
            &(struct kernel_fingerprint){.size = {1, 1},
                                         .offset = {x->scale[0], x->scale[1]},
                                         .from = {&scale, {4, 4}},
                                         .fingerprint = fingerprint,
                                         .n_dims = 2,
                                         .dtype = DTYPE_FLOAT32});
}
