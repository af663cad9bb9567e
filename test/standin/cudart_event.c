/* The stand-in's CUDA runtime: events. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "test/standin/cudart_inner.h"

struct event_use {
    struct CUevent_st *event;
    uint64_t number;
};

static void unref(struct CUevent_st *e)
{
    if (atomic_fetch_sub(&e->refs, 1) > 1)
        return;
    (void)munmap(e->record, sizeof *e->record);
    if (e->fd >= 0)
        (void)close(e->fd);
    free(e);
}

static int run_record(void *arg)
{
    struct event_use *u = arg;
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    pthread_mutex_lock(&u->event->record->mutex);
    if (u->event->record->done < u->number)
        u->event->record->done = u->number;
    u->event->record->done_ns = (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
    pthread_cond_broadcast(&u->event->record->changed);
    pthread_mutex_unlock(&u->event->record->mutex);
    unref(u->event);
    return 0;
}

static void drop_record(void *arg)
{
    (void)run_record(arg);
}

static int run_wait(void *arg)
{
    struct event_use *u = arg;
    pthread_mutex_lock(&u->event->record->mutex);
    while (u->event->record->done < u->number)
        pthread_cond_wait(&u->event->record->changed, &u->event->record->mutex);
    pthread_mutex_unlock(&u->event->record->mutex);
    unref(u->event);
    return 0;
}

static void drop_wait(void *arg)
{
    unref(((struct event_use *)arg)->event);
}

static struct event_use *use(struct CUevent_st *e, bool record)
{
    struct event_use *u = malloc(sizeof *u);
    if (u == NULL)
        return NULL;
    atomic_fetch_add(&e->refs, 1);
    pthread_mutex_lock(&e->record->mutex);
    u->event = e;
    u->number = record ? ++e->record->recorded : e->record->recorded;
    pthread_mutex_unlock(&e->record->mutex);
    return u;
}

struct CUevent_st *rt_event_map(int fd)
{
    struct CUevent_st *e = calloc(1, sizeof *e);
    void *p = mmap(NULL, sizeof *e->record, PROT_READ | PROT_WRITE,
                   fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (e == NULL || p == MAP_FAILED) {
        free(e);
        return NULL;
    }
    e->record = p;
    e->fd = fd;
    e->refs = 1;
    e->device = rt_device;
    return e;
}

STANDIN_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    ENTER("cudaEventCreateWithFlags");
    bool shared = (flags & cudaEventInterprocess) != 0;
    if (shared && (flags & cudaEventDisableTiming) == 0)
        return rt_said(cudaErrorInvalidValue); /* as the real one */
    int fd = shared ? memfd_create("standin-event", MFD_CLOEXEC) : -1;
    struct CUevent_st *e = NULL;
    if (!shared || (fd >= 0 && ftruncate(fd, sizeof *e->record) == 0))
        e = rt_event_map(fd);
    if (e == NULL)
        return rt_said(cudaErrorMemoryAllocation);
    pthread_mutexattr_t mutex;
    pthread_condattr_t changed;
    (void)pthread_mutexattr_init(&mutex);
    (void)pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
    (void)pthread_mutex_init(&e->record->mutex, &mutex);
    (void)pthread_condattr_init(&changed);
    (void)pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
    (void)pthread_cond_init(&e->record->changed, &changed);
    *ret = e;
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    int entered = rt_enter("cudaEventDestroy");
    unref(e);
    return rt_said(entered == atomic_load(&rt_sticky[rt_device]) ? 0 : entered);
}

STANDIN_EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    ENTER("cudaEventRecord");
    if (e->device != standin_stream_device(s))
        return rt_said(cudaErrorInvalidResourceHandle); /* as the real one */
    struct event_use *u = use(e, true);
    return rt_said(
        u == NULL ? cudaErrorMemoryAllocation
                  : rt_push(s, (struct operation){
                                   .run = run_record, .drop = drop_record, .arg = u, .own = true}));
}

STANDIN_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    (void)flags;
    ENTER("cudaStreamWaitEvent");
    struct event_use *u = use(e, false);
    return rt_said(
        u == NULL ? cudaErrorMemoryAllocation
                  : rt_push(s, (struct operation){
                                   .run = run_wait, .drop = drop_wait, .arg = u, .own = true}));
}

STANDIN_EXPORT cudaError_t cudaEventQuery(cudaEvent_t e)
{
    ENTER("cudaEventQuery");
    pthread_mutex_lock(&e->record->mutex);
    bool done = e->record->done == e->record->recorded;
    pthread_mutex_unlock(&e->record->mutex);
    return rt_said(done ? cudaSuccess : cudaErrorNotReady);
}

STANDIN_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    ENTER("cudaEventSynchronize");
    pthread_mutex_lock(&e->record->mutex);
    for (uint64_t until = e->record->recorded; e->record->done < until;)
        pthread_cond_wait(&e->record->changed, &e->record->mutex);
    pthread_mutex_unlock(&e->record->mutex);
    return rt_said(atomic_load(&rt_sticky[e->device]));
}

STANDIN_EXPORT cudaError_t cudaEventElapsedTime(float *ret_ms, cudaEvent_t begin, cudaEvent_t end)
{
    ENTER("cudaEventElapsedTime");
    *ret_ms = (float)((double)(end->record->done_ns - begin->record->done_ns) / 1e6);
    return cudaSuccess;
}
