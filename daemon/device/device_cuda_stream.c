/* The CUDA device's streams and events: items in order, handed over by the stream's thread. */
#include <string.h>

#include "base/mem.h"
#include "device/device_cuda_private.h"

#include "base/banned.h"

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

static struct cuda_event *event_of(const struct device_event *ev)
{
    return container_of((struct device_event *)(uintptr_t)ev, struct cuda_event, base);
}

/* --- events ------------------------------------------------------------------------------------ */

/* NULL when memory is out. */
static struct cuda_event *event_alloc(struct device *d)
{
    struct cuda_event *ev = mem_zalloc(sizeof *ev);
    if (ev == NULL)
        return NULL;
    ev->base.device = d;
    ev->refs = 1;
    (void)pthread_mutex_init(&ev->mutex, NULL);
    (void)pthread_cond_init(&ev->changed, NULL);
    return ev;
}

static void event_destroy(struct cuda_event *ev)
{
    (void)pthread_cond_destroy(&ev->changed);
    (void)pthread_mutex_destroy(&ev->mutex);
    mem_free(ev);
}

int cuda_event_new(struct device *d, struct device_event **ret)
{
    struct cuda_event *ev = event_alloc(d);
    if (ev == NULL)
        return RS_ENOMEM;
    cudaError_t r = cudaSetDevice(cuda_of(d)->ordinal);
    if (r == cudaSuccess)
        r = cudaEventCreateWithFlags(&ev->cuda, cudaEventDisableTiming);
    if (r != cudaSuccess) {
        event_destroy(ev);
        return cuda_code_of(r);
    }
    *ret = &ev->base;
    return 0;
}

/* Its one record is its owner's, which came before the handle. */
int cuda_event_import(struct device *d, const uint8_t *handle, struct device_event **ret,
                      struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct cuda_event *ev = event_alloc(d);
    cudaIpcEventHandle_t h;
    _Static_assert(sizeof h == DEVICE_IPC_BYTES, "a handle travels whole");
    if (ev == NULL)
        return err_set(e, RS_ENOMEM, "CUDA device %u: out of memory", d->local);
    memcpy(&h, handle, sizeof h);
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaIpcOpenEventHandle(&ev->cuda, h);
    if (r != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cuda_said(
            c, r,
            "opening an event: its owner must be alive, another process than this and in its pid "
            "namespace, and have made it with cudaEventInterprocess",
            e);
        event_destroy(ev);
        if (e != NULL)
            e->code = RS_EINVAL;
        return RS_EINVAL;
    }
    ev->recorded = ev->issued = 1;
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
    (void)cudaSetDevice(
        cuda_of(ev->base.device)->ordinal); /* any thread: else GPU 0 gets a context */
    (void)cudaEventDestroy(ev->cuda);
    event_destroy(ev);
}

void cuda_event_free(struct device_event *ev)
{
    event_unref(event_of(ev));
}

/* With the event's lock held. */
static bool event_done_locked(struct cuda_event *ev)
{
    struct device_cuda *c = cuda_of(ev->base.device);
    if (ev->done == ev->recorded || ev->issued != ev->recorded)
        return ev->done == ev->recorded;
    /* Asked of a device that has failed, too: what it was given before may still run. */
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaEventQuery(ev->cuda);
    if (r == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* no error, but kept as this thread's last one */
        return false;
    }
    (void)cuda_good(c, r, "asking for an event"); /* asynchronous errors show here, too */
    ev->done = ev->recorded;
    return true;
}

bool cuda_event_done(const struct device_event *base)
{
    struct cuda_event *ev = event_of(base);
    pthread_mutex_lock(&ev->mutex);
    bool done = event_done_locked(ev);
    pthread_mutex_unlock(&ev->mutex);
    return done;
}

/* Of a device that has failed, too. Where CUDA does not take the record, all that it stands for is
 * waited for here: a failed call is no word about what was handed over before it. Without the event's
 * lock: nobody asks CUDA for a record that is not issued. */
static void run_record(struct device_stream *base, struct item *item)
{
    struct cuda_stream *s = cuda_stream_of(base);
    struct cuda_event *ev = event_of(item->event);
    struct device_cuda *c = cuda_of(s->base.device);
    if (!cuda_good(c, cudaEventRecord(ev->cuda, s->cuda), "recording an event"))
        (void)cudaStreamSynchronize(s->cuda);
    pthread_mutex_lock(&ev->mutex);
    ev->issued = item->number;
    pthread_cond_broadcast(&ev->changed);
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
}

/* A record that came after the awaited one means that the latter is done (device.h). */
static void run_wait(struct device_stream *base, struct item *item)
{
    struct cuda_stream *s = cuda_stream_of(base);
    struct cuda_event *ev = event_of(item->event);
    struct device_cuda *c = cuda_of(s->base.device);
    pthread_mutex_lock(&ev->mutex);
    while (ev->issued < item->number)
        pthread_cond_wait(&ev->changed, &ev->mutex);
    if (item->number != 0 && ev->issued == item->number && ev->done < item->number &&
        !cuda_failed(c))
        (void)cuda_good(c, cudaStreamWaitEvent(s->cuda, ev->cuda, 0), "waiting for an event");
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
}

/* --- items -------------------------------------------------------------------------------------- */

int cuda_enqueue(struct device_stream *s, struct item *item)
{
    int r = item != NULL && cuda_failed(cuda_of(s->device)) ? cuda_error(s->device, NULL) : 0;
    if (r == 0)
        return items_push(&cuda_stream_of(s)->items, item);
    mem_free(item);
    return r;
}

/* Waits for what was handed over, whether or not the device has failed meanwhile. */
static void settle(struct cuda_stream *s)
{
    struct device_cuda *c = cuda_of(s->base.device);
    if (!s->dirty)
        return;
    s->dirty = false;
    if (!cuda_good(c, cudaEventRecord(s->marker, s->cuda), "marking a stream") ||
        !cuda_good(c, cudaEventSynchronize(s->marker), "waiting for a stream"))
        (void)cudaStreamSynchronize(s->cuda);
}

static void run_call(struct device_stream *base, struct item *item)
{
    struct cuda_stream *s = cuda_stream_of(base);
    settle(s);
    item->fn(item->arg);
}

static void run_issue(struct device_stream *base, struct item *item)
{
    void (*fn)(void *arg, struct CUstream_st *stream);
    memcpy(&fn, item->payload, sizeof fn);
    fn(item->arg, cuda_failed(cuda_of(base->device)) ? NULL : cuda_stream_of(base)->cuda);
    if (item->event != NULL)
        run_record(base, item);
}

int cuda_call(struct device_stream *s, void (*fn)(void *arg), void *arg)
{
    return cuda_enqueue(s, item_call(run_call, fn, arg));
}

/* Takes the item, which records the event when it has run. */
static int enqueue_record(struct device_stream *s, struct cuda_event *ev, struct item *item)
{
    if (item == NULL)
        return RS_ENOMEM;
    pthread_mutex_lock(&ev->mutex);
    rs_assert(event_done_locked(ev)); /* the former record is done */
    ev->refs++;
    item->event = &ev->base;
    item->number = ++ev->recorded;
    pthread_mutex_unlock(&ev->mutex);
    int r = cuda_enqueue(s, item);
    if (r == 0)
        return 0;
    pthread_mutex_lock(&ev->mutex);
    ev->recorded--;
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
    return r;
}

int cuda_event_record(struct device_event *base, struct device_stream *stream)
{
    return enqueue_record(stream, event_of(base), item_new(run_record));
}

int device_cuda_issue(struct device_stream *s, void (*fn)(void *arg, struct CUstream_st *stream),
                      void *arg, struct device_event *after)
{
    struct item *item = item_entries(run_issue, &fn, 1, sizeof fn);
    if (item != NULL)
        item->arg = arg;
    return after == NULL ? cuda_enqueue(s, item) : enqueue_record(s, event_of(after), item);
}

int cuda_event_wait(struct device_stream *stream, struct device_event *base)
{
    struct cuda_event *ev = event_of(base);
    struct item *item = item_new(run_wait);
    if (item == NULL)
        return RS_ENOMEM;
    pthread_mutex_lock(&ev->mutex);
    ev->refs++;
    item->event = &ev->base;
    item->number = ev->recorded;
    pthread_mutex_unlock(&ev->mutex);
    int r = cuda_enqueue(stream, item);
    if (r != 0)
        event_unref(ev);
    return r;
}

/* --- the stream -------------------------------------------------------------------------------- */

static void *stream_main(void *arg)
{
    struct cuda_stream *s = arg;
    struct device_cuda *c = cuda_of(s->base.device);
    struct item *item;
    (void)cuda_good(c, cudaSetDevice(c->ordinal), "choosing the device");
    while ((item = items_next(&s->items)) != NULL) {
        s->dirty = s->dirty || item->run != run_call;
        bool works = item->n > 0; /* copies, fingerprints, a group: what a profiler is to show */
        if (works)
            cuda_range_push(s->items.name);
        item->run(&s->base, item);
        if (works)
            cuda_range_pop();
        items_done(&s->items, item);
    }
    s->dirty = true;
    settle(s);
    return NULL;
}

static void stream_destroy(struct cuda_stream *s)
{
    (void)cudaSetDevice(cuda_of(s->base.device)->ordinal);
    if (s->marker != NULL)
        (void)cudaEventDestroy(s->marker);
    if (s->cuda != NULL)
        (void)cudaStreamDestroy(s->cuda);
    cuda_sums_close(s);
    (void)pthread_cond_destroy(&s->landed);
    (void)pthread_mutex_destroy(&s->sums_mutex);
    items_close(&s->items);
    mem_free(s);
}

static int stream_parts(struct cuda_stream *s, struct err *e)
{
    struct device_cuda *c = cuda_of(s->base.device);
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaStreamCreateWithPriority(&s->cuda, cudaStreamNonBlocking, 0);
    if (r == cudaSuccess)
        r = cudaEventCreateWithFlags(&s->marker, cudaEventBlockingSync | cudaEventDisableTiming);
    if (r == cudaSuccess)
        r = cuda_sums_open(s);
    return r == cudaSuccess ? 0 : cuda_said(c, r, "a stream", e);
}

int cuda_stream_new(struct device *d, const char *name, struct device_stream **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct cuda_stream *s = mem_zalloc(sizeof *s);
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "CUDA device %u: stream '%s': out of memory", d->local, name);
    s->base.device = d;
    items_init(&s->items, "c", d->local, name);
    (void)pthread_mutex_init(&s->sums_mutex, NULL);
    (void)pthread_cond_init(&s->landed, NULL);
    int r = stream_parts(s, e);
    if (r == 0 && (r = items_start(&s->items, stream_main, s)) != 0)
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

void cuda_stream_free(struct device_stream *base)
{
    struct cuda_stream *s = cuda_stream_of(base);
    struct device_cuda *c = cuda_of(base->device);
    items_stop(&s->items);
    stream_destroy(s);
    atomic_fetch_sub(&c->n_streams, 1);
}
