/* Casts with scales on the CUDA device. */
#include <string.h>

#include "device/device_cuda_private.h"

#include "base/banned.h"

/* Of one item, being filled. */
struct launch {
    struct cuda_stream *stream;
    struct kernel_quantise_batch batch;
    struct sum_block *sums; /* NULL: no task of the batch has a fingerprint */
    uint8_t step;           /* of all of the batch's tasks */
};

static void flush(struct launch *l)
{
    struct cuda_stream *s = l->stream;
    struct device_cuda *c = cuda_of(s->base.device);
    bool good = !cuda_skips(s) && (l->sums == NULL || cuda_sums_clear(s, l->sums));
    if (good && l->batch.n_tasks > 0)
        good = cuda_good(c, (cudaError_t)kernel_launch_quantise(s->cuda, &l->batch, c->max_blocks),
                         "launching casts with scales");
    if (l->sums != NULL)
        cuda_sums_fetch(s, l->sums, good);
    l->sums = NULL;
    l->batch.n_tasks = 0;
    l->batch.n_blocks = 0;
}

/* Where the next task is to add its fingerprint; NULL: the device has failed. */
static uint64_t *place_for_sum(struct launch *l, uint64_t *fingerprint)
{
    if (l->sums == NULL)
        l->sums = cuda_sums_take(l->stream);
    struct sum_block *b = l->sums;
    if (b == NULL)
        return NULL;
    if (b->n == 0 || b->targets[b->n - 1] != fingerprint)
        b->targets[b->n++] = fingerprint;
    return b->on_device + (b->n - 1);
}

_Static_assert((int)KERNEL_QUANTISE_BATCH_TASKS <= (int)KERNEL_BATCH_TASKS,
               "a sum block has a place for each task");

static void clear(struct launch *l, uint32_t *amax_bits)
{
    struct cuda_stream *s = l->stream;
    flush(l);
    (void)cuda_good(cuda_of(s->base.device),
                    cudaMemsetAsync(amax_bits, 0, sizeof *amax_bits, s->cuda),
                    "clearing a maximum");
}

/* What finds a maximum is one launch, and what uses it another. */
static void add(struct launch *l, const struct kernel_quantise *q)
{
    struct kernel_quantise_task t = kernel_quantise_task_of(q, NULL);
    if (l->batch.n_tasks == KERNEL_QUANTISE_BATCH_TASKS || l->step != q->step ||
        t.n_blocks > INT32_MAX - l->batch.n_blocks)
        flush(l);
    l->step = q->step;
    if (q->fingerprint != NULL && (t.sum = place_for_sum(l, q->fingerprint)) == NULL)
        return;
    kernel_quantise_batch_add(&l->batch, &t);
}

static void run_quantise(struct device_stream *base, struct item *item)
{
    struct launch l = {.stream = cuda_stream_of(base)};
    struct kernel_quantise q;
    for (uint32_t i = 0; i < item->n && !cuda_skips(l.stream); i++) {
        memcpy(&q, (const char *)item->payload + i * sizeof q, sizeof q);
        if (q.step == KERNEL_QUANTISE_CLEAR)
            clear(&l, q.amax_bits);
        else
            add(&l, &q);
    }
    flush(&l);
}

int cuda_quantise(struct device_stream *s, const struct kernel_quantise *q, uint32_t n)
{
    return cuda_enqueue(s, item_entries(run_quantise, q, n, sizeof *q));
}
