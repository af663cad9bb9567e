/* What the CUDA device's streams hand to the GPU: copies, fingerprints and their way back. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "device/device_cuda_private.h"
#include "device/numa.h"
#include "device/packed.h"
#include "kernels/kernels_dtype.h"

#include "base/banned.h"

/* From so many bytes of one run, or of a row of several, the copy engine is asked. Smaller rows are
 * better off with a kernel (each 2-D copy is a call of its own). */
#define ENGINE_RUN_BYTES ((uint64_t)256 << 10)
#define ENGINE_ROW_BYTES ((uint64_t)32 << 10)

/* --- fingerprints on their way back ------------------------------------------------------------- */

/* On a thread of CUDA: may not call it. */
static void CUDART_CB sums_land(void *arg)
{
    struct sum_block *b = arg;
    struct cuda_stream *s = b->stream;
    for (uint32_t i = 0; i < b->n; i++)
        (void)__atomic_fetch_add(b->targets[i], b->on_host[i], __ATOMIC_RELAXED);
    pthread_mutex_lock(&s->sums_mutex);
    b->busy = false;
    pthread_cond_broadcast(&s->landed);
    pthread_mutex_unlock(&s->sums_mutex);
}

static struct sum_block *free_block_locked(struct cuda_stream *s)
{
    for (unsigned i = 0; i < CUDA_SUM_BLOCKS; i++)
        if (!s->blocks[i].busy)
            return &s->blocks[i];
    return NULL;
}

struct sum_block *cuda_sums_take(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    struct sum_block *b;
    pthread_mutex_lock(&s->sums_mutex);
    while ((b = free_block_locked(s)) == NULL && !cuda_failed(c)) {
        struct timespec until;
        (void)clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50000000; /* a failure wakes nobody: look again */
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&s->landed, &s->sums_mutex, &until) != ETIMEDOUT)
            continue;
        pthread_mutex_unlock(&s->sums_mutex);
        cudaError_t r = cudaStreamQuery(s->cuda);
        if (r == cudaErrorNotReady)
            (void)cudaGetLastError(); /* no error, but kept as this thread's last one */
        else
            (void)cuda_good(c, r, "waiting for fingerprints");
        pthread_mutex_lock(&s->sums_mutex);
    }
    if (b != NULL) {
        b->busy = true;
        b->n = 0;
    }
    pthread_mutex_unlock(&s->sums_mutex);
    return b;
}

static void give_block(struct sum_block *b)
{
    pthread_mutex_lock(&b->stream->sums_mutex);
    b->busy = false;
    pthread_mutex_unlock(&b->stream->sums_mutex);
}

bool cuda_sums_clear(struct cuda_stream *s, const struct sum_block *b)
{
    struct device_cuda *c = cuda_of(s->base.device);
    return !cuda_failed(c) &&
           cuda_good(c, cudaMemsetAsync(b->on_device, 0, b->n * sizeof(uint64_t), s->cuda),
                     "clearing fingerprints");
}

void cuda_sums_fetch(struct cuda_stream *s, struct sum_block *b, bool launched)
{
    struct device_cuda *c = cuda_of(s->base.device);
    if (launched &&
        cuda_good(c,
                  cudaMemcpyAsync(b->on_host, b->on_device, b->n * sizeof(uint64_t),
                                  cudaMemcpyDeviceToHost, s->cuda),
                  "fetching fingerprints") &&
        cuda_good(c, cudaLaunchHostFunc(s->cuda, sums_land, b), "adding fingerprints up"))
        return; /* sums_land gives it back */
    give_block(b);
}

/* --- copies and fingerprints -------------------------------------------------------------------- */

bool cuda_skips(const struct cuda_stream *s)
{
    const struct device_cuda *c = cuda_of(s->base.device);
    return cuda_failed(c) || !fence_holds(c->options.fence);
}

static void flush_copies(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    if (s->copies.n_tasks > 0 && !cuda_skips(s))
        (void)cuda_good(c, (cudaError_t)kernel_launch_batch(s->cuda, &s->copies, c->max_blocks),
                        "launching copies");
    s->copies.n_tasks = 0;
    s->copies.n_tiles = 0;
}

static void flush_sums(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    struct sum_block *b = s->block;
    if (b == NULL)
        return;
    bool skipped = s->sums_write ? cuda_skips(s) : cuda_failed(c);
    bool launched = !skipped && cuda_sums_clear(s, b) &&
                    cuda_good(c, (cudaError_t)kernel_launch_batch(s->cuda, &s->sums, c->max_blocks),
                              "launching fingerprints");
    cuda_sums_fetch(s, b, launched);
    s->block = NULL;
    s->sums_write = false;
    s->sums.n_tasks = 0;
    s->sums.n_tiles = 0;
}

/* Tasks of one number share a slot as long as they are in one launch. */
static int emit_sum(struct cuda_stream *s, const struct kernel_task *task)
{
    struct kernel_task t = *task;
    if (s->sums.n_tasks == KERNEL_BATCH_TASKS)
        flush_sums(s);
    if (s->block == NULL)
        s->block = cuda_sums_take(s);
    struct sum_block *b = s->block;
    if (b == NULL)
        return RS_EDEVICE;
    if (b->n == 0 || b->targets[b->n - 1] != s->target)
        b->targets[b->n++] = s->target;
    t.sum = b->on_device + (b->n - 1);
    s->sums_write = s->sums_write || task->n_targets > 0;
    kernel_batch_add(&s->sums, &t);
    return 0;
}

static int emit(const struct kernel_task *task, void *arg)
{
    struct cuda_stream *s = arg;
    if (task->sum != NULL)
        return emit_sum(s, task);
    if (s->copies.n_tasks == KERNEL_BATCH_TASKS)
        flush_copies(s);
    kernel_batch_add(&s->copies, task);
    return 0;
}

/* A copy to one target that an engine can do: one run, or rows of one pitch per side. */
struct engine_copy {
    char *to;
    const char *from;
    size_t width, rows, to_pitch, from_pitch;
};

static bool engine_can(const struct kernel_copy *k, uint32_t target, struct engine_copy *ret)
{
    const struct kernel_view *view = &k->to[target];
    uint32_t bytes = kernel_dtype_bytes(k->to_dtype);
    *ret = (struct engine_copy){.to = view->base, .from = k->from.base, .width = bytes, .rows = 1};
    if (k->fingerprint != NULL || k->from_dtype != k->to_dtype)
        return false;
    for (unsigned d = k->n_dims; d-- > 0;) {
        int64_t to = view->stride_bytes[d], from = k->from.stride_bytes[d];
        if (k->size[d] == 0)
            return false;
        if (k->size[d] == 1)
            continue;
        if (ret->rows == 1 && to == (int64_t)ret->width && from == to) {
            ret->width *= k->size[d];
        } else if (ret->rows == 1 && to >= (int64_t)ret->width && from >= (int64_t)ret->width) {
            ret->to_pitch = (size_t)to;
            ret->from_pitch = (size_t)from;
            ret->rows = k->size[d];
        } else if (ret->rows > 1 && to == (int64_t)(ret->to_pitch * ret->rows) &&
                   from == (int64_t)(ret->from_pitch * ret->rows)) {
            ret->rows *= k->size[d];
        } else {
            return false;
        }
    }
    return ret->rows == 1 ? ret->width >= ENGINE_RUN_BYTES
                          : ret->width >= ENGINE_ROW_BYTES && ret->to_pitch < INT32_MAX &&
                                ret->from_pitch < INT32_MAX;
}

static bool issue_engine(struct cuda_stream *s, const struct engine_copy *x)
{
    struct device_cuda *c = cuda_of(s->base.device);
    cudaError_t r = x->rows == 1
                        ? cudaMemcpyAsync(x->to, x->from, x->width, cudaMemcpyDefault, s->cuda)
                        : cudaMemcpy2DAsync(x->to, x->to_pitch, x->from, x->from_pitch, x->width,
                                            x->rows, cudaMemcpyDefault, s->cuda);
    return cuda_good(c, r, "copying");
}

static void issue_copy(struct cuda_stream *s, const struct kernel_copy *k)
{
    static uint64_t patched; /* emit_sum puts the real place */
    struct engine_copy x[KERNEL_MAX_TARGETS];
    uint32_t n = 0;
    while (n < k->n_targets && engine_can(k, n, &x[n]))
        n++;
    if (n > 0 && n == k->n_targets) {
        for (uint32_t i = 0; i < n; i++)
            (void)issue_engine(s, &x[i]);
        return;
    }
    s->target = k->fingerprint;
    (void)kernel_tasks_of_copy(k, &patched, emit, s);
}

static void run_copies(struct device_stream *base, struct item *item)
{
    struct cuda_stream *s = cuda_stream_of(base);
    struct kernel_copy k = {.n_dims = 0};
    const char *at = (const char *)item->payload;
    for (uint32_t i = 0; i < item->n && !cuda_skips(s); i++) {
        at = unpack_copy(at, &k);
        issue_copy(s, &k);
    }
    flush_copies(s);
    flush_sums(s);
}

static void run_fingerprints(struct device_stream *base, struct item *item)
{
    struct cuda_stream *s = cuda_stream_of(base);
    static uint64_t patched;
    struct kernel_fingerprint f = {.n_dims = 0};
    const char *at = (const char *)item->payload;
    for (uint32_t i = 0; i < item->n && !cuda_failed(cuda_of(s->base.device)); i++) {
        at = unpack_fingerprint(at, &f);
        s->target = f.fingerprint;
        (void)kernel_tasks_of_fingerprint(&f, &patched, emit, s);
    }
    flush_sums(s);
}

static void run_poison(struct device_stream *base, struct item *item)
{
    struct cuda_stream *s = cuda_stream_of(base);
    struct device_cuda *c = cuda_of(s->base.device);
    if (!cuda_skips(s))
        (void)cuda_good(c, cudaMemsetAsync(item->arg, DEVICE_POISON, item->number, s->cuda),
                        "filling memory with poison");
}

/* --- the vtable's part ------------------------------------------------------------------------- */

int cuda_copy(struct device_stream *s, const struct kernel_copy *copies, uint32_t n)
{
    return cuda_enqueue(s, item_copies(run_copies, copies, n));
}

int cuda_fingerprint(struct device_stream *s, const struct kernel_fingerprint *f, uint32_t n)
{
    return cuda_enqueue(s, item_fingerprints(run_fingerprints, f, n));
}

int cuda_poison(struct device_stream *s, void *p, size_t bytes)
{
    return cuda_of(s->device)->options.seed == 0 ? 0
                                                 : cuda_enqueue(s, item_fill(run_poison, p, bytes));
}

cudaError_t cuda_sums_open(struct cuda_stream *s)
{
    size_t bytes = sizeof(uint64_t) * KERNEL_BATCH_TASKS * CUDA_SUM_BLOCKS;
    cudaError_t r = cudaMalloc((void **)&s->sums_on_device, bytes);
    int node = cuda_of(s->base.device)->numa_node;
    if (node >= 0)
        numa_thread_prefers(node);
    if (r == cudaSuccess)
        r = cudaHostAlloc((void **)&s->sums_on_host, bytes, cudaHostAllocPortable);
    if (node >= 0)
        numa_thread_prefers(-1);
    for (unsigned i = 0; r == cudaSuccess && i < CUDA_SUM_BLOCKS; i++) {
        s->blocks[i].stream = s;
        s->blocks[i].on_device = s->sums_on_device + i * KERNEL_BATCH_TASKS;
        s->blocks[i].on_host = s->sums_on_host + i * KERNEL_BATCH_TASKS;
    }
    return r;
}

void cuda_sums_close(struct cuda_stream *s)
{
    if (s->sums_on_device != NULL)
        (void)cudaFree(s->sums_on_device);
    if (s->sums_on_host != NULL)
        (void)cudaFreeHost(s->sums_on_host);
}
