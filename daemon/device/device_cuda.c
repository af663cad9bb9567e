/* The CUDA device. How it works stands in device_cuda.h.
 *
 * Threads: each stream's own hands items to CUDA; CUDA's own thread runs sums_land. Locks: a
 * stream's guards its queue and its sum blocks, an event's its counters, the device's the sticky
 * error and the open handles; an event's may be held while CUDA is called, none while another of
 * ours is taken. */
#include "device/device_cuda.h"

#include <ctype.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/queue.h"
#include "device/packed.h"
#include "kernels/kernels_cuda.h"
#include "kernels/kernels_dtype.h"

#include "base/banned.h"

enum {
    THREAD_NAME_BYTES = 16,
    MAX_QUEUED_BYTES = 256 << 20, /* per stream: bounds what a runaway caller can make us hold */
    SUM_BLOCKS = 32,              /* per stream: launches with fingerprints in flight */
    MAX_GPUS = 64,
    MAX_HANDLES = 1000 /* open IPC handles per device (CASES.md C23) */
};

/* From so many bytes of one run, or of a row of several, the copy engine is asked. Smaller rows are
 * better off with a kernel (each 2-D copy is a call of its own). */
#define ENGINE_RUN_BYTES ((uint64_t)256 << 10)
#define ENGINE_ROW_BYTES ((uint64_t)32 << 10)

struct open_handle {
    uint8_t handle[DEVICE_CUDA_IPC_BYTES];
    uint64_t generation;
    void *base;
    uint32_t n_users;
};

struct device_cuda {
    struct device base;
    struct device_cuda_options options;
    int ordinal;
    uint32_t max_blocks;
    char uuid[DEVICE_CUDA_NAME_BYTES];
    atomic_uint n_streams;
    atomic_bool failed; /* error.code != 0, readable without the lock */
    pthread_mutex_t mutex;
    struct err error;
    struct open_handle *handles;
    size_t n_handles, handles_capacity;
};

struct cuda_event {
    struct device_event base;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    cudaEvent_t cuda;
    uint64_t recorded; /* records enqueued so far */
    uint64_t issued;   /* of those, handed to CUDA (or skipped) */
    uint64_t done;     /* of those, known to be done */
    uint32_t refs;     /* the owner's, and one per item that names it */
};

/* The fingerprints of one launch on their way back. */
struct sum_block {
    struct cuda_stream *stream;
    uint64_t *on_device, *on_host; /* KERNEL_BATCH_TASKS each */
    uint64_t *targets[KERNEL_BATCH_TASKS];
    uint32_t n;
    bool busy;
};

struct cuda_stream {
    struct device_stream base;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t filled; /* the queue, or a sum block was given back */
    struct queue items;
    size_t queued_bytes;
    bool stopping;
    cudaStream_t cuda;
    cudaEvent_t marker; /* what device_call waits for */
    bool dirty;         /* handed over since the marker was last waited for; the thread's own */
    uint64_t *sums_on_device, *sums_on_host;
    struct sum_block blocks[SUM_BLOCKS];
    struct kernel_batch copies, sums; /* being filled; the thread's own */
    struct sum_block *block;          /* that `sums` adds to */
    uint64_t *target;                 /* of the copy that is being cut */
    char name[THREAD_NAME_BYTES];
};

struct cuda_item {
    struct queue link;
    void (*run)(struct cuda_stream *s, struct cuda_item *item);
    size_t bytes;
    void (*fn)(void *arg);
    void (*issue)(void *arg, struct CUstream_st *stream);
    void *arg; /* of fn or issue; memory to poison */
    struct cuda_event *event;
    uint64_t number; /* the event's record; bytes to poison */
    uint32_t n;
    uint64_t payload[];
};

static struct device_cuda *cuda_of(const struct device *d)
{
    return container_of((struct device *)(uintptr_t)d, struct device_cuda, base);
}

static struct cuda_stream *stream_of(struct device_stream *s)
{
    return container_of(s, struct cuda_stream, base);
}

static struct cuda_event *event_of(const struct device_event *ev)
{
    return container_of((struct device_event *)(uintptr_t)ev, struct cuda_event, base);
}

/* --- errors ------------------------------------------------------------------------------------ */

static int code_of(cudaError_t code)
{
    switch (code) {
    case cudaSuccess:
        return 0;
    case cudaErrorMemoryAllocation:
        return RS_EEXHAUSTED;
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
        return RS_EPRECOND;
    default:
        return RS_EDEVICE;
    }
}

/* Sets the text of what a call said. */
static int said(const struct device_cuda *c, cudaError_t code, const char *what, struct err *e)
{
    return err_set(e, code_of(code), "CUDA device %u (%s): %s: %s (%s)", c->base.local, c->uuid,
                   what, cudaGetErrorString(code), cudaGetErrorName(code));
}

static void fail_with(struct device_cuda *c, const char *text)
{
    pthread_mutex_lock(&c->mutex);
    if (c->error.code == 0)
        (void)err_set(&c->error, RS_EDEVICE, "%s", text);
    pthread_mutex_unlock(&c->mutex);
    atomic_store(&c->failed, true);
}

/* True where the call went well; else the device has failed. */
static bool good(struct device_cuda *c, cudaError_t code, const char *what)
{
    struct err e = {0};
    if (code == cudaSuccess)
        return true;
    (void)said(c, code, what, &e);
    fail_with(c, e.text);
    return false;
}

static bool failed(const struct device_cuda *c)
{
    return atomic_load(&c->failed);
}

static int cuda_error(const struct device *d, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    if (!failed(c)) {
        if (fence_holds(c->options.fence))
            return 0;
        return err_set(e, RS_EDEADLINE, "CUDA device %u: the lease has run out", d->local);
    }
    pthread_mutex_lock(&c->mutex);
    struct err error = c->error;
    pthread_mutex_unlock(&c->mutex);
    return err_set(e, error.code, "%s", error.text);
}

void device_cuda_fail(struct device *d, const char *text)
{
    fail_with(cuda_of(d), text);
}

/* --- memory ------------------------------------------------------------------------------------ */

static int cuda_alloc(struct device *d, size_t bytes, void **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    char what[64];
    void *p = NULL;
    if (bytes == 0)
        return err_set(e, RS_EINVAL, "CUDA device %u: 0 bytes of memory asked for", d->local);
    (void)snprintf(what, sizeof what, "%zu bytes of GPU memory", bytes);
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaMalloc(&p, bytes);
    if (r != cudaSuccess) {
        (void)cudaGetLastError(); /* it was told here: no later call shall tell it again */
        return said(c, r, what, e);
    }
    if (c->options.seed != 0) {
        cudaStream_t s = NULL;
        r = cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, 0);
        if (r == cudaSuccess)
            r = cudaMemsetAsync(p, DEVICE_POISON, bytes, s);
        if (r == cudaSuccess)
            r = cudaStreamSynchronize(s);
        if (s != NULL)
            (void)cudaStreamDestroy(s);
    }
    if (r != cudaSuccess) {
        (void)cudaFree(p);
        return said(c, r, "filling memory with poison", e);
    }
    *ret = p;
    return 0;
}

static void cuda_free(struct device *d, void *p, size_t bytes)
{
    struct device_cuda *c = cuda_of(d);
    (void)bytes;
    if (good(c, cudaSetDevice(c->ordinal), "choosing the device"))
        (void)good(c, cudaFree(p), "freeing memory");
}

/* The host segment is pinned, and the GPU reaches it at the address that the CPU has. What is only
 * read is mapped for writing all the same where it may be: few GPUs register read-only memory. */
static int cuda_map(struct device *d, int fd, size_t bytes, bool writable, void **ret,
                    struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct stat st;
    if (bytes == 0 || fstat(fd, &st) != 0 || st.st_size < 0 || (uint64_t)st.st_size < bytes)
        return err_set(e, RS_EINVAL, "CUDA device %u: segment of %zu bytes: the file is shorter",
                       d->local, bytes);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED && (errno == EACCES || errno == EPERM))
        return err_set(e, RS_EPERM, "CUDA device %u: segment of %zu bytes: %s", d->local, bytes,
                       writable ? "its descriptor does not allow writing"
                                : "pinning it needs a descriptor that is open for writing, also "
                                  "where it is only read");
    if (p == MAP_FAILED)
        return err_set(e, errno == ENOMEM ? RS_EEXHAUSTED : err_from_errno(errno),
                       "CUDA device %u: mapping %zu bytes: %s", d->local, bytes, strerror(errno));
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaHostRegister(p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (r != cudaSuccess) {
        (void)cudaGetLastError();
        (void)munmap(p, bytes);
        return said(c, r, "pinning a segment (is the memory lock limit, ulimit -l, too low?)", e);
    }
    (void)close(fd);
    *ret = p;
    return 0;
}

static void cuda_unmap(struct device *d, void *p, size_t bytes)
{
    struct device_cuda *c = cuda_of(d);
    if (good(c, cudaSetDevice(c->ordinal), "choosing the device"))
        (void)good(c, cudaHostUnregister(p), "unpinning a segment");
    rs_assert(munmap(p, bytes) == 0);
}

/* --- events ------------------------------------------------------------------------------------ */

static int cuda_event_new(struct device *d, struct device_event **ret)
{
    struct device_cuda *c = cuda_of(d);
    struct cuda_event *ev = mem_zalloc(sizeof *ev);
    if (ev == NULL)
        return RS_ENOMEM;
    ev->base.device = d;
    ev->refs = 1;
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaEventCreateWithFlags(&ev->cuda, cudaEventDisableTiming);
    if (r != cudaSuccess) {
        mem_free(ev);
        return code_of(r);
    }
    (void)pthread_mutex_init(&ev->mutex, NULL);
    (void)pthread_cond_init(&ev->changed, NULL);
    *ret = &ev->base;
    return 0;
}

static void event_unref(struct cuda_event *ev)
{
    pthread_mutex_lock(&ev->mutex);
    bool last = --ev->refs == 0;
    pthread_mutex_unlock(&ev->mutex);
    if (!last)
        return;
    (void)cudaEventDestroy(ev->cuda);
    (void)pthread_cond_destroy(&ev->changed);
    (void)pthread_mutex_destroy(&ev->mutex);
    mem_free(ev);
}

static void cuda_event_free(struct device_event *ev)
{
    event_unref(event_of(ev));
}

/* With the event's lock held. */
static bool event_done_locked(struct cuda_event *ev)
{
    struct device_cuda *c = cuda_of(ev->base.device);
    if (ev->done == ev->recorded || ev->issued != ev->recorded)
        return ev->done == ev->recorded;
    cudaError_t r = failed(c) ? cudaSuccess : cudaSetDevice(c->ordinal);
    if (r == cudaSuccess && !failed(c))
        r = cudaEventQuery(ev->cuda);
    if (r == cudaErrorNotReady)
        return false;
    (void)good(c, r, "asking for an event"); /* asynchronous errors show here, too */
    ev->done = ev->recorded;
    return true;
}

static bool cuda_event_done(const struct device_event *base)
{
    struct cuda_event *ev = event_of(base);
    pthread_mutex_lock(&ev->mutex);
    bool done = event_done_locked(ev);
    pthread_mutex_unlock(&ev->mutex);
    return done;
}

static void run_record(struct cuda_stream *s, struct cuda_item *item)
{
    struct cuda_event *ev = item->event;
    struct device_cuda *c = cuda_of(s->base.device);
    pthread_mutex_lock(&ev->mutex);
    if (!failed(c))
        (void)good(c, cudaEventRecord(ev->cuda, s->cuda), "recording an event");
    ev->issued = item->number;
    pthread_cond_broadcast(&ev->changed);
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
}

/* A record that came after the awaited one means that the latter is done (device.h). */
static void run_wait(struct cuda_stream *s, struct cuda_item *item)
{
    struct cuda_event *ev = item->event;
    struct device_cuda *c = cuda_of(s->base.device);
    pthread_mutex_lock(&ev->mutex);
    while (ev->issued < item->number)
        pthread_cond_wait(&ev->changed, &ev->mutex);
    if (item->number != 0 && ev->issued == item->number && ev->done < item->number && !failed(c))
        (void)good(c, cudaStreamWaitEvent(s->cuda, ev->cuda, 0), "waiting for an event");
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
}

/* --- fingerprints on their way back ------------------------------------------------------------- */

/* On a thread of CUDA: may not call it. */
static void CUDART_CB sums_land(void *arg)
{
    struct sum_block *b = arg;
    struct cuda_stream *s = b->stream;
    for (uint32_t i = 0; i < b->n; i++)
        (void)__atomic_fetch_add(b->targets[i], b->on_host[i], __ATOMIC_RELAXED);
    pthread_mutex_lock(&s->mutex);
    b->busy = false;
    pthread_cond_broadcast(&s->filled);
    pthread_mutex_unlock(&s->mutex);
}

static struct sum_block *free_block_locked(struct cuda_stream *s)
{
    for (unsigned i = 0; i < SUM_BLOCKS; i++)
        if (!s->blocks[i].busy)
            return &s->blocks[i];
    return NULL;
}

/* Waits for a launch to end where all blocks are in flight. NULL: the device failed, and they may
 * never come back. */
static struct sum_block *take_block(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    struct sum_block *b;
    pthread_mutex_lock(&s->mutex);
    while ((b = free_block_locked(s)) == NULL && !failed(c)) {
        struct timespec until;
        (void)clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50000000; /* a failure wakes nobody: look again */
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&s->filled, &s->mutex, &until) != ETIMEDOUT)
            continue;
        pthread_mutex_unlock(&s->mutex);
        cudaError_t r = cudaStreamQuery(s->cuda);
        if (r != cudaErrorNotReady)
            (void)good(c, r, "waiting for fingerprints");
        pthread_mutex_lock(&s->mutex);
    }
    if (b != NULL) {
        b->busy = true;
        b->n = 0;
    }
    pthread_mutex_unlock(&s->mutex);
    return b;
}

static void give_block(struct sum_block *b)
{
    pthread_mutex_lock(&b->stream->mutex);
    b->busy = false;
    pthread_mutex_unlock(&b->stream->mutex);
}

/* --- copies and fingerprints -------------------------------------------------------------------- */

static void flush_copies(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    if (s->copies.n_tasks > 0 && !failed(c))
        (void)good(c, (cudaError_t)kernel_launch_batch(s->cuda, &s->copies, c->max_blocks),
                   "launching copies");
    s->copies.n_tasks = 0;
    s->copies.n_tiles = 0;
}

static void flush_sums(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    struct sum_block *b = s->block;
    size_t bytes = b == NULL ? 0 : b->n * sizeof(uint64_t);
    if (b == NULL)
        return;
    if (!failed(c) &&
        good(c, cudaMemsetAsync(b->on_device, 0, bytes, s->cuda), "clearing fingerprints") &&
        good(c, (cudaError_t)kernel_launch_batch(s->cuda, &s->sums, c->max_blocks),
             "launching fingerprints") &&
        good(c, cudaMemcpyAsync(b->on_host, b->on_device, bytes, cudaMemcpyDeviceToHost, s->cuda),
             "fetching fingerprints") &&
        good(c, cudaLaunchHostFunc(s->cuda, sums_land, b), "adding fingerprints up"))
        b = NULL; /* sums_land gives it back */
    if (b != NULL)
        give_block(b);
    s->block = NULL;
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
        s->block = take_block(s);
    struct sum_block *b = s->block;
    if (b == NULL)
        return RS_EDEVICE;
    if (b->n == 0 || b->targets[b->n - 1] != s->target)
        b->targets[b->n++] = s->target;
    t.sum = b->on_device + (b->n - 1);
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

/* A copy that an engine can do: one run, or rows of one pitch per side. */
struct engine_copy {
    char *to;
    const char *from;
    size_t width, rows, to_pitch, from_pitch;
};

static bool engine_can(const struct kernel_copy *k, struct engine_copy *ret)
{
    uint32_t bytes = kernel_dtype_bytes(k->to_dtype);
    *ret =
        (struct engine_copy){.to = k->to[0].base, .from = k->from.base, .width = bytes, .rows = 1};
    if (k->n_targets != 1 || k->fingerprint != NULL || k->from_dtype != k->to_dtype)
        return false;
    for (unsigned d = k->n_dims; d-- > 0;) {
        int64_t to = k->to[0].stride_bytes[d], from = k->from.stride_bytes[d];
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
    return good(c, r, "copying");
}

static void issue_copy(struct cuda_stream *s, const struct kernel_copy *k)
{
    static uint64_t patched; /* emit_sum puts the real place */
    struct engine_copy x;
    if (engine_can(k, &x)) {
        (void)issue_engine(s, &x);
        return;
    }
    s->target = k->fingerprint;
    (void)kernel_tasks_of_copy(k, &patched, emit, s);
}

/* Work after a failure, and what would write behind the fence, is skipped. */
static bool skips(const struct cuda_stream *s)
{
    const struct device_cuda *c = cuda_of(s->base.device);
    return failed(c) || !fence_holds(c->options.fence);
}

static void run_copies(struct cuda_stream *s, struct cuda_item *item)
{
    struct kernel_copy k;
    const char *at = (const char *)item->payload;
    for (uint32_t i = 0; i < item->n && !skips(s); i++) {
        at = unpack_copy(at, &k);
        issue_copy(s, &k);
    }
    flush_copies(s);
    flush_sums(s);
}

static void run_fingerprints(struct cuda_stream *s, struct cuda_item *item)
{
    static uint64_t patched;
    struct kernel_fingerprint f;
    for (uint32_t i = 0; i < item->n && !failed(cuda_of(s->base.device)); i++) {
        memcpy(&f, (const char *)item->payload + i * sizeof f, sizeof f);
        s->target = f.fingerprint;
        (void)kernel_tasks_of_fingerprint(&f, &patched, emit, s);
    }
    flush_sums(s);
}

/* Waits for what was handed over. */
static void settle(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    if (!s->dirty || failed(c))
        return;
    if (good(c, cudaEventRecord(s->marker, s->cuda), "marking a stream"))
        (void)good(c, cudaEventSynchronize(s->marker), "waiting for a stream");
    s->dirty = false;
}

static void run_call(struct cuda_stream *s, struct cuda_item *item)
{
    settle(s);
    item->fn(item->arg);
}

static void run_issue(struct cuda_stream *s, struct cuda_item *item)
{
    struct device_cuda *c = cuda_of(s->base.device);
    item->issue(item->arg, failed(c) ? NULL : s->cuda);
    if (item->event != NULL)
        run_record(s, item);
}

static void run_poison(struct cuda_stream *s, struct cuda_item *item)
{
    struct device_cuda *c = cuda_of(s->base.device);
    if (!skips(s))
        (void)good(c, cudaMemsetAsync(item->arg, DEVICE_POISON, item->number, s->cuda),
                   "filling memory with poison");
}

/* --- the queue ---------------------------------------------------------------------------------- */

/* NULL when memory is out. */
static struct cuda_item *item_new(void (*run)(struct cuda_stream *, struct cuda_item *),
                                  size_t payload_bytes)
{
    struct cuda_item *item = mem_alloc(sizeof *item + payload_bytes);
    if (item == NULL)
        return NULL;
    *item = (struct cuda_item){.run = run, .bytes = sizeof *item + payload_bytes};
    return item;
}

/* Takes the item, also on failure; item NULL is RS_ENOMEM. */
static int enqueue(struct cuda_stream *s, struct cuda_item *item)
{
    struct device_cuda *c = cuda_of(s->base.device);
    int r = item == NULL ? RS_ENOMEM : failed(c) ? cuda_error(s->base.device, NULL) : 0;
    if (r != 0) {
        mem_free(item);
        return r;
    }
    pthread_mutex_lock(&s->mutex);
    bool fits = item->bytes <= MAX_QUEUED_BYTES - s->queued_bytes;
    if (fits) {
        s->queued_bytes += item->bytes;
        queue_push(&s->items, &item->link);
        pthread_cond_broadcast(&s->filled);
    }
    pthread_mutex_unlock(&s->mutex);
    if (fits)
        return 0;
    mem_free(item);
    return RS_ENOMEM;
}

static int cuda_copy(struct device_stream *base, const struct kernel_copy *copies, uint32_t n)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        rs_assert(copies[i].n_targets <= KERNEL_MAX_TARGETS);
        bytes += packed_bytes(&copies[i]);
    }
    struct cuda_item *item = item_new(run_copies, bytes);
    if (item != NULL) {
        item->n = n;
        char *at = (char *)item->payload;
        for (uint32_t i = 0; i < n; i++)
            at = pack_copy(at, &copies[i]);
    }
    return enqueue(stream_of(base), item);
}

static int cuda_fingerprint(struct device_stream *base, const struct kernel_fingerprint *f,
                            uint32_t n)
{
    struct cuda_item *item = item_new(run_fingerprints, n * sizeof *f);
    if (item != NULL) {
        item->n = n;
        memcpy(item->payload, f, n * sizeof *f);
    }
    return enqueue(stream_of(base), item);
}

static int cuda_call(struct device_stream *base, void (*fn)(void *arg), void *arg)
{
    struct cuda_item *item = item_new(run_call, 0);
    if (item != NULL) {
        item->fn = fn;
        item->arg = arg;
    }
    return enqueue(stream_of(base), item);
}

static int cuda_poison(struct device_stream *base, void *p, size_t bytes)
{
    if (cuda_of(base->device)->options.seed == 0)
        return 0;
    struct cuda_item *item = item_new(run_poison, 0);
    if (item != NULL) {
        item->arg = p;
        item->number = bytes;
    }
    return enqueue(stream_of(base), item);
}

/* Takes the item, which records the event when it has run. */
static int enqueue_record(struct cuda_stream *s, struct cuda_event *ev, struct cuda_item *item)
{
    if (item == NULL)
        return RS_ENOMEM;
    pthread_mutex_lock(&ev->mutex);
    rs_assert(event_done_locked(ev)); /* the former record is done */
    ev->refs++;
    item->event = ev;
    item->number = ++ev->recorded;
    pthread_mutex_unlock(&ev->mutex);
    int r = enqueue(s, item);
    if (r == 0)
        return 0;
    pthread_mutex_lock(&ev->mutex);
    ev->recorded--;
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
    return r;
}

static int cuda_event_record(struct device_event *base, struct device_stream *stream)
{
    return enqueue_record(stream_of(stream), event_of(base), item_new(run_record, 0));
}

int device_cuda_issue(struct device_stream *base, void (*fn)(void *arg, struct CUstream_st *stream),
                      void *arg, struct device_event *after)
{
    struct cuda_item *item = item_new(run_issue, 0);
    if (item != NULL) {
        item->issue = fn;
        item->arg = arg;
    }
    return after == NULL ? enqueue(stream_of(base), item)
                         : enqueue_record(stream_of(base), event_of(after), item);
}

static int cuda_event_wait(struct device_stream *stream, struct device_event *base)
{
    struct cuda_event *ev = event_of(base);
    struct cuda_item *item = item_new(run_wait, 0);
    if (item == NULL)
        return RS_ENOMEM;
    pthread_mutex_lock(&ev->mutex);
    ev->refs++;
    item->event = ev;
    item->number = ev->recorded;
    pthread_mutex_unlock(&ev->mutex);
    int r = enqueue(stream_of(stream), item);
    if (r != 0)
        event_unref(ev);
    return r;
}

/* --- the stream's thread ------------------------------------------------------------------------ */

/* Blocks for the next item; NULL: the queue is empty and the stream is to end. */
static struct cuda_item *next_item(struct cuda_stream *s)
{
    pthread_mutex_lock(&s->mutex);
    while (queue_empty(&s->items) && !s->stopping)
        pthread_cond_wait(&s->filled, &s->mutex);
    struct queue *q = queue_pop(&s->items);
    pthread_mutex_unlock(&s->mutex);
    return q == NULL ? NULL : container_of(q, struct cuda_item, link);
}

static void *stream_main(void *arg)
{
    struct cuda_stream *s = arg;
    struct device_cuda *c = cuda_of(s->base.device);
    struct cuda_item *item;
    (void)good(c, cudaSetDevice(c->ordinal), "choosing the device");
    while ((item = next_item(s)) != NULL) {
        s->dirty = s->dirty || item->run != run_call;
        item->run(s, item);
        pthread_mutex_lock(&s->mutex);
        s->queued_bytes -= item->bytes;
        pthread_mutex_unlock(&s->mutex);
        mem_free(item);
    }
    s->dirty = true;
    settle(s);
    return NULL;
}

/* With all signals blocked: they are the main thread's. */
static int start_thread(struct cuda_stream *s)
{
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int r = pthread_create(&s->thread, NULL, stream_main, s);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r == 0)
        (void)pthread_setname_np(s->thread, s->name);
    return r;
}

static void stream_destroy(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    (void)cudaSetDevice(c->ordinal);
    if (s->marker != NULL)
        (void)cudaEventDestroy(s->marker);
    if (s->cuda != NULL)
        (void)cudaStreamDestroy(s->cuda);
    if (s->sums_on_device != NULL)
        (void)cudaFree(s->sums_on_device);
    if (s->sums_on_host != NULL)
        (void)cudaFreeHost(s->sums_on_host);
    (void)pthread_cond_destroy(&s->filled);
    (void)pthread_mutex_destroy(&s->mutex);
    mem_free(s);
}

static int stream_parts(struct cuda_stream *s, struct err *e)
{
    struct device_cuda *c = cuda_of(s->base.device);
    size_t bytes = sizeof(uint64_t) * KERNEL_BATCH_TASKS * SUM_BLOCKS;
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaStreamCreateWithPriority(&s->cuda, cudaStreamNonBlocking, 0);
    if (r == cudaSuccess)
        r = cudaEventCreateWithFlags(&s->marker, cudaEventBlockingSync | cudaEventDisableTiming);
    if (r == cudaSuccess)
        r = cudaMalloc((void **)&s->sums_on_device, bytes);
    if (r == cudaSuccess)
        r = cudaHostAlloc((void **)&s->sums_on_host, bytes, cudaHostAllocPortable);
    for (unsigned i = 0; r == cudaSuccess && i < SUM_BLOCKS; i++) {
        s->blocks[i].stream = s;
        s->blocks[i].on_device = s->sums_on_device + i * KERNEL_BATCH_TASKS;
        s->blocks[i].on_host = s->sums_on_host + i * KERNEL_BATCH_TASKS;
    }
    return r == cudaSuccess ? 0 : said(c, r, "a stream", e);
}

static int cuda_stream_new(struct device *d, const char *name, struct device_stream **ret,
                           struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct cuda_stream *s = mem_zalloc(sizeof *s);
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "CUDA device %u: stream '%s': out of memory", d->local, name);
    s->base.device = d;
    queue_init(&s->items);
    (void)pthread_mutex_init(&s->mutex, NULL);
    (void)pthread_cond_init(&s->filled, NULL);
    (void)snprintf(s->name, sizeof s->name, "c%u %s", d->local, name);
    int r = stream_parts(s, e);
    if (r == 0 && (r = start_thread(s)) != 0)
        r = err_set(e, RS_EEXHAUSTED, "CUDA device %u: thread for stream '%s': %s", d->local, name,
                    strerror(r));
    if (r != 0) {
        stream_destroy(s);
        return r;
    }
    atomic_fetch_add(&c->n_streams, 1);
    *ret = &s->base;
    return 0;
}

static void cuda_stream_free(struct device_stream *base)
{
    struct cuda_stream *s = stream_of(base);
    struct device_cuda *c = cuda_of(base->device);
    pthread_mutex_lock(&s->mutex);
    s->stopping = true;
    pthread_cond_broadcast(&s->filled);
    pthread_mutex_unlock(&s->mutex);
    rs_assert(pthread_join(s->thread, NULL) == 0);
    stream_destroy(s);
    atomic_fetch_sub(&c->n_streams, 1);
}

/* --- workers' memory ----------------------------------------------------------------------------- */

/* What we use of the driver library, which is loaded where memory of workers comes. */
struct driver {
    CUresult (*import)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*range)(CUdeviceptr *, size_t *, CUdeviceptr);
    CUresult (*properties)(CUmemAllocationProp *, CUmemGenericAllocationHandle);
};

static int driver_open(struct driver *ret, struct err *e)
{
    static const char *const names[] = {"cuMemImportFromShareableHandle",
                                        "cuMemAddressReserve",
                                        "cuMemMap",
                                        "cuMemSetAccess",
                                        "cuMemUnmap",
                                        "cuMemAddressFree",
                                        "cuMemRelease",
                                        "cuMemGetAddressRange_v2",
                                        "cuMemGetAllocationPropertiesFromHandle"};
    void *at[sizeof names / sizeof *names], *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        return err_set(e, RS_EPRECOND, "CUDA: libcuda.so.1, the driver library, can't be loaded");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((at[i] = dlsym(library, names[i])) == NULL)
            return err_set(e, RS_EPRECOND,
                           "CUDA: the driver library has no %s: install a newer one", names[i]);
    _Static_assert(sizeof at == sizeof *ret, "one name for each function");
    memcpy(ret, at, sizeof *ret);
    return 0;
}

/* Whether what was opened is all that was declared: a refit that reads beyond it would cost the device,
 * whoever's fault it is. */
static int check_opened(const struct device_cuda *c, void *p, size_t bytes, struct err *e)
{
    struct driver v;
    struct cudaPointerAttributes at = {0};
    CUdeviceptr base = 0;
    size_t n = 0;
    int r = driver_open(&v, e);
    if (r != 0)
        return r;
    if (v.range(&base, &n, (CUdeviceptr)(uintptr_t)p) != CUDA_SUCCESS)
        return err_set(e, RS_EDEVICE, "CUDA device %u: the driver does not know what it opened",
                       c->base.local);
    size_t before = (uintptr_t)p - (uintptr_t)base;
    if (before > n || bytes > n - before)
        return err_set(e, RS_EINVAL,
                       "CUDA device %u: the allocation has %zu bytes, %zu were declared: hand over "
                       "what cuMemGetAddressRange gives",
                       c->base.local, n - before, bytes);
    cudaError_t code = cudaPointerGetAttributes(&at, p);
    if (code != cudaSuccess)
        return said(c, code, "asking where an allocation is", e);
    if (at.device != c->ordinal)
        return err_set(
            e, RS_EINVAL,
            "CUDA device %u (%s, GPU %d): the allocation is on GPU %d: attach the worker "
            "with the device that its memory is on",
            c->base.local, c->uuid, c->ordinal, at.device);
    return 0;
}

static int open_ipc(const struct device_cuda *c, const uint8_t *handle, size_t bytes, void **ret,
                    struct err *e)
{
    cudaIpcMemHandle_t h;
    void *p = NULL;
    memcpy(&h, handle, sizeof h);
    cudaError_t code = cudaSetDevice(c->ordinal);
    if (code == cudaSuccess)
        code = cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        (void)said(
            c, code,
            "opening an IPC handle: its owner must be alive, another process than this, and "
            "not have freed the memory; memory of a pool or of VMM has no handle, pass a VMM "
            "descriptor",
            e);
        if (e != NULL)
            e->code = RS_EINVAL;
        return RS_EINVAL;
    }
    int r = check_opened(c, p, bytes, e);
    if (r != 0)
        (void)cudaIpcCloseMemHandle(p);
    else
        *ret = p;
    return r;
}

/* Room for one more. With the device's lock held. */
static int handle_room(struct device_cuda *c, struct err *e)
{
    void *array = c->handles;
    if (c->n_handles >= MAX_HANDLES)
        return err_set(e, RS_EEXHAUSTED,
                       "CUDA device %u: %d IPC handles are open: register one per allocation, not "
                       "one per tensor",
                       c->base.local, MAX_HANDLES);
    int r = mem_grow(&array, &c->handles_capacity, c->n_handles + 1, sizeof *c->handles);
    c->handles = array;
    return r == 0 ? 0 : err_set(e, r, "CUDA device %u: out of memory", c->base.local);
}

int device_cuda_import_ipc(struct device *d, const uint8_t *handle, uint64_t generation,
                           size_t bytes, void **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct open_handle *at = NULL;
    int r = 0;
    pthread_mutex_lock(&c->mutex);
    for (size_t i = 0; i < c->n_handles; i++)
        if (c->handles[i].generation == generation &&
            memcmp(c->handles[i].handle, handle, DEVICE_CUDA_IPC_BYTES) == 0)
            at = &c->handles[i];
    if (at != NULL)
        r = check_opened(c, at->base, bytes, e);
    else if ((r = handle_room(c, e)) == 0) {
        struct open_handle new = {.generation = generation};
        memcpy(new.handle, handle, sizeof new.handle);
        r = open_ipc(c, handle, bytes, &new.base, e);
        if (r == 0) {
            at = &c->handles[c->n_handles++];
            *at = new;
        }
    }
    if (r == 0) {
        at->n_users++;
        *ret = at->base;
    }
    pthread_mutex_unlock(&c->mutex);
    return r;
}

int device_cuda_close_ipc(struct device *d, void *p, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    bool found = false, last = false;
    pthread_mutex_lock(&c->mutex);
    for (size_t i = 0; i < c->n_handles && !found; i++) {
        found = c->handles[i].base == p;
        last = found && --c->handles[i].n_users == 0;
        if (last)
            c->handles[i] = c->handles[--c->n_handles];
    }
    pthread_mutex_unlock(&c->mutex);
    if (!found)
        return err_set(e, RS_ENOTFOUND, "CUDA device %u: no open IPC handle at this address",
                       d->local);
    if (last && good(c, cudaSetDevice(c->ordinal), "choosing the device"))
        (void)good(c, cudaIpcCloseMemHandle(p), "closing an IPC handle");
    return 0;
}

int device_cuda_import_vmm(struct device *d, int fd, size_t bytes, void **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct driver v;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p = 0;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    int r = driver_open(&v, e);
    if (r != 0)
        return r;
    if (cudaSetDevice(c->ordinal) != cudaSuccess)
        return err_set(e, RS_EDEVICE, "CUDA device %u can't be chosen", d->local);
    access.location.id = c->ordinal;
    if (v.import(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) !=
        CUDA_SUCCESS)
        return err_set(e, RS_EINVAL,
                       "CUDA device %u: the descriptor is no VMM allocation: export it with "
                       "cuMemExportToShareableHandle",
                       d->local);
    CUmemAllocationProp at;
    if (v.properties(&at, handle) == CUDA_SUCCESS &&
        at.location.type == CU_MEM_LOCATION_TYPE_DEVICE && at.location.id != c->ordinal) {
        (void)v.release(handle);
        return err_set(e, RS_EINVAL,
                       "CUDA device %u (%s, GPU %d): the VMM allocation is on GPU %d: attach the "
                       "worker with the device that its memory is on",
                       d->local, c->uuid, c->ordinal, at.location.id);
    }
    bool reserved = v.reserve(&p, bytes, 0, 0, 0) == CUDA_SUCCESS;
    bool mapped = reserved && v.map(p, bytes, 0, handle, 0) == CUDA_SUCCESS;
    bool done = mapped && v.access(p, bytes, &access, 1) == CUDA_SUCCESS;
    (void)v.release(handle); /* the mapping holds the memory */
    if (done) {
        (void)close(fd);
        *ret = (void *)(uintptr_t)p;
        return 0;
    }
    if (mapped)
        (void)v.unmap(p, bytes);
    if (reserved)
        (void)v.unreserve(p, bytes);
    return err_set(e, RS_EINVAL,
                   "CUDA device %u: mapping %zu bytes of a VMM allocation: declare the size it was "
                   "made with, and make it on this device",
                   d->local, bytes);
}

int device_cuda_close_vmm(struct device *d, void *p, size_t bytes, struct err *e)
{
    struct driver v;
    int r = driver_open(&v, e);
    if (r != 0)
        return r;
    if (v.unmap((CUdeviceptr)(uintptr_t)p, bytes) != CUDA_SUCCESS)
        return err_set(e, RS_ENOTFOUND, "CUDA device %u: no VMM mapping at this address", d->local);
    (void)v.unreserve((CUdeviceptr)(uintptr_t)p, bytes);
    return 0;
}

static int cuda_import(struct device *d, const struct device_import *from, void **ret,
                       struct err *e)
{
    if (from->kind == DEVICE_IMPORT_IPC)
        return device_cuda_import_ipc(d, from->handle, from->generation, from->bytes, ret, e);
    return device_cuda_import_vmm(d, from->fd, from->bytes, ret, e);
}

static void cuda_import_close(struct device *d, enum device_import_kind kind, void *p, size_t bytes)
{
    struct err e = {0};
    int r = kind == DEVICE_IMPORT_IPC ? device_cuda_close_ipc(d, p, &e)
                                      : device_cuda_close_vmm(d, p, bytes, &e);
    if (r != 0) /* memory that can't be let go: the process must, and its successor has it not */
        fail_with(cuda_of(d), e.text);
}

/* --- open and close ------------------------------------------------------------------------------ */

static void cuda_close(struct device *d)
{
    struct device_cuda *c = cuda_of(d);
    rs_assert(atomic_load(&c->n_streams) == 0);
    (void)cudaSetDevice(c->ordinal);
    for (size_t i = 0; i < c->n_handles; i++)
        (void)cudaIpcCloseMemHandle(c->handles[i].base);
    mem_free(c->handles);
    (void)pthread_mutex_destroy(&c->mutex);
    mem_free(c);
}

static const struct device_ops cuda_ops = {
    .kind = "cuda",
    .close = cuda_close,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .import = cuda_import,
    .import_close = cuda_import_close,
    .name = device_cuda_uuid,
    .stream_new = cuda_stream_new,
    .stream_free = cuda_stream_free,
    .copy = cuda_copy,
    .fingerprint = cuda_fingerprint,
    .call = cuda_call,
    .poison = cuda_poison,
    .event_new = cuda_event_new,
    .event_free = cuda_event_free,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_done = cuda_event_done,
    .error = cuda_error,
};

bool device_is_cuda(const struct device *d)
{
    return d->ops == &cuda_ops;
}

const char *device_cuda_uuid(const struct device *d)
{
    return cuda_of(d)->uuid;
}

int device_cuda_ordinal(const struct device *d)
{
    return cuda_of(d)->ordinal;
}

int device_cuda_use(const struct device *d, struct err *e)
{
    const struct device_cuda *c = cuda_of(d);
    cudaError_t r = cudaSetDevice(c->ordinal);
    return r == cudaSuccess ? 0 : said(c, r, "choosing the device", e);
}

int device_cuda_count(uint32_t *ret, struct err *e)
{
    int n = 0, driver = 0;
    cudaError_t r = cudaGetDeviceCount(&n);
    if (r == cudaErrorInsufficientDriver || r == cudaErrorNoDevice) {
        (void)cudaDriverGetVersion(&driver);
        if (driver == 0)
            return err_set(e, RS_EPRECOND,
                           "backend 'cuda': no NVIDIA driver is loaded on this machine (%s): "
                           "install it, or use backend 'host'",
                           cudaGetErrorString(r));
        return err_set(e, RS_EPRECOND,
                       "backend 'cuda': %s (driver for CUDA %d.%d, this build needs %d.%d): is a "
                       "GPU visible here? Else use backend 'host'",
                       cudaGetErrorString(r), driver / 1000, driver % 1000 / 10,
                       CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    }
    if (r != cudaSuccess || n <= 0)
        return err_set(e, RS_EPRECOND, "backend 'cuda': counting GPUs: %s", cudaGetErrorString(r));
    *ret = n > MAX_GPUS ? MAX_GPUS : (uint32_t)n;
    return 0;
}

static void uuid_text(const struct cudaDeviceProp *p, char ret[DEVICE_CUDA_NAME_BYTES])
{
    const unsigned char *b = (const unsigned char *)p->uuid.bytes;
    (void)snprintf(ret, DEVICE_CUDA_NAME_BYTES,
                   "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                   b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
                   b[14], b[15]);
}

/* Past "GPU-" or "MIG-", in any case. */
static const char *bare(const char *name)
{
    return strncasecmp(name, "GPU-", 4) == 0 || strncasecmp(name, "MIG-", 4) == 0 ? name + 4 : name;
}

static bool is_index(const char *name)
{
    for (const char *at = name; *at != '\0'; at++)
        if (!isdigit((unsigned char)*at))
            return false;
    return *name != '\0' && strlen(name) < 4;
}

/* The GPU that `name` means (index, uuid; NULL: `local`), its uuid in ret_uuid. */
static int find_gpu(uint32_t local, const char *name, int *ret, char *ret_uuid, struct err *e)
{
    char there[512] = "", uuid[DEVICE_CUDA_NAME_BYTES];
    uint32_t n = 0, index = local;
    int r = device_cuda_count(&n, e);
    if (r != 0)
        return r;
    bool by_index = name == NULL || is_index(name);
    if (name != NULL && by_index)
        index = (uint32_t)strtoul(name, NULL, 10);
    for (uint32_t i = 0; i < n; i++) {
        struct cudaDeviceProp p;
        cudaError_t code = cudaGetDeviceProperties(&p, (int)i);
        if (code != cudaSuccess)
            return err_set(e, RS_EDEVICE, "CUDA: properties of GPU %u: %s", i,
                           cudaGetErrorString(code));
        uuid_text(&p, uuid);
        if (by_index ? i == index : strcasecmp(bare(name), bare(uuid)) == 0) {
            memcpy(ret_uuid, uuid, sizeof uuid);
            *ret = (int)i;
            return 0;
        }
        size_t at = strlen(there);
        (void)snprintf(there + at, sizeof there - at, "%s%s", at == 0 ? "" : ", ", uuid);
    }
    if (by_index)
        return err_set(e, RS_ENOTFOUND, "GPU %u is not there: %u are: %s", index, n, there);
    return err_set(e, RS_ENOTFOUND, "GPU '%s' is not there: there are %s", name, there);
}

/* Between the new device and those that may be open already; what is there stays. */
static int enable_peers(const struct device_cuda *c, struct err *e)
{
    uint32_t n = 0;
    int r = device_cuda_count(&n, e);
    for (int i = 0; r == 0 && i < (int)n; i++) {
        int can = 0;
        if (i == c->ordinal)
            continue;
        cudaError_t code = cudaDeviceCanAccessPeer(&can, c->ordinal, i);
        if (code == cudaSuccess && can != 0)
            code = cudaDeviceEnablePeerAccess(i, 0);
        if (code == cudaErrorPeerAccessAlreadyEnabled || code == cudaErrorTooManyPeers) {
            (void)cudaGetLastError();
            code = cudaSuccess;
        }
        if (code != cudaSuccess)
            r = said(c, code, "enabling peer access", e);
    }
    return r;
}

int device_cuda_version(void)
{
    int version = 0;
    return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

bool device_cuda_reaches(const struct device *d, const struct device *peer)
{
    int can = 0, from = cuda_of(d)->ordinal, to = cuda_of(peer)->ordinal;
    return from == to || (cudaDeviceCanAccessPeer(&can, from, to) == cudaSuccess && can != 0);
}

int device_cuda_open(uint32_t local, const struct device_cuda_options *options, struct device **ret,
                     struct err *e)
{
    int processors = 0;
    struct device_cuda *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return err_set(e, RS_ENOMEM, "CUDA device %u: out of memory", local);
    c->base.ops = &cuda_ops;
    c->base.local = local;
    if (options != NULL)
        c->options = *options;
    int r = find_gpu(local, c->options.name, &c->ordinal, c->uuid, e);
    if (r == 0) {
        cudaError_t code = cudaSetDevice(c->ordinal);
        if (code == cudaSuccess)
            code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, c->ordinal);
        if (code != cudaSuccess)
            r = said(c, code, "opening it", e);
    }
    if (r == 0)
        r = enable_peers(c, e);
    if (r != 0) {
        mem_free(c);
        return r;
    }
    c->options.name = NULL; /* the caller's */
    c->max_blocks = c->options.max_blocks != 0 ? c->options.max_blocks
                                               : DEVICE_CUDA_BLOCKS * (uint32_t)processors;
    (void)pthread_mutex_init(&c->mutex, NULL);
    *ret = &c->base;
    return 0;
}
