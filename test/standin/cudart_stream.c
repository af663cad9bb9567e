/* The stand-in's CUDA runtime: streams, which are threads, and what is given to them: copies, sets, host functions. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test/standin/cudart_inner.h"

/* --- streams --- */

struct CUstream_st {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct operation *first, **last;
    uint64_t pushed, done;
    int device;
    bool stopping;
    struct CUstream_st *next_of_all;
};

static struct CUstream_st *all_streams;
static pthread_mutex_t all_mutex = PTHREAD_MUTEX_INITIALIZER;

int standin_stream_device(struct CUstream_st *s)
{
    return s->device;
}

static void delay(void)
{
    uint64_t most = standin_number("STANDIN_DELAY_US", 200), r = standin_random();
    if (r == 0 || most == 0)
        return;
    long ns = (long)(r % (most + 1)) * 1000;
    struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) == EINTR)
        continue;
}

static void run_operation(struct CUstream_st *s, struct operation *o)
{
    static const atomic_bool never;
    delay();
    int code = 0;
    if (o->name != NULL && strcmp(o->name, "group") != 0 && atomic_load(&rt_sticky[s->device]) == 0)
        code = standin_operation(o->name, cudaErrorIllegalAddress, &never);
    if (atomic_load(&rt_sticky[s->device]) == 0 && code == 0)
        code = o->run(o->arg);
    else if (o->drop != NULL)
        o->drop(o->arg);
    if (code != 0)
        atomic_store(&rt_sticky[s->device], code);
    if (o->own)
        free(o->arg);
    free(o);
}

static void *stream_main(void *arg)
{
    struct CUstream_st *s = arg;
    rt_device = s->device;
    rt_has_chosen = true;
    pthread_mutex_lock(&s->mutex);
    for (;;) {
        while (s->first == NULL && !s->stopping)
            pthread_cond_wait(&s->changed, &s->mutex);
        struct operation *o = s->first;
        if (o == NULL)
            break;
        s->first = o->next;
        if (s->first == NULL)
            s->last = &s->first;
        pthread_mutex_unlock(&s->mutex);
        run_operation(s, o);
        pthread_mutex_lock(&s->mutex);
        s->done++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

int rt_push(struct CUstream_st *s, struct operation what)
{
    struct operation *o = malloc(sizeof *o);
    if (o == NULL || s == NULL) {
        free(o);
        if (what.own)
            free(what.arg);
        return o == NULL ? cudaErrorMemoryAllocation : cudaErrorInvalidResourceHandle;
    }
    *o = what;
    o->next = NULL;
    pthread_mutex_lock(&s->mutex);
    *s->last = o;
    s->last = &o->next;
    s->pushed++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    return 0;
}

int standin_enqueue(struct CUstream_st *stream, const char *name, int (*fn)(void *arg), void *arg)
{
    return rt_push(stream, (struct operation){.name = name, .run = fn, .arg = arg});
}

static void drain(struct CUstream_st *s)
{
    pthread_mutex_lock(&s->mutex);
    for (uint64_t until = s->pushed; s->done < until;)
        pthread_cond_wait(&s->changed, &s->mutex);
    pthread_mutex_unlock(&s->mutex);
}

STANDIN_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *ret, unsigned flags,
                                                        int priority)
{
    (void)flags;
    (void)priority;
    ENTER("cudaStreamCreateWithPriority");
    struct CUstream_st *s = calloc(1, sizeof *s);
    if (s == NULL)
        return rt_said(cudaErrorMemoryAllocation);
    s->device = rt_device;
    s->last = &s->first;
    (void)pthread_mutex_init(&s->mutex, NULL);
    (void)pthread_cond_init(&s->changed, NULL);
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int r = pthread_create(&s->thread, NULL, stream_main, s);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r != 0) {
        free(s);
        return rt_said(cudaErrorMemoryAllocation);
    }
    pthread_mutex_lock(&all_mutex);
    s->next_of_all = all_streams;
    all_streams = s;
    pthread_mutex_unlock(&all_mutex);
    *ret = s;
    return cudaSuccess;
}

/* Like the real one it doesn't wait in the program's eyes; here the thread has to end, so it does. */
STANDIN_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    int injected = rt_in_host_function ? DEVICE_FUNCTION_NOT_ALLOWED
                                       : standin_call("cudaStreamDestroy", cudaErrorUnknown);
    if (injected != 0)
        return rt_said(injected);
    pthread_mutex_lock(&all_mutex);
    for (struct CUstream_st **at = &all_streams; *at != NULL; at = &(*at)->next_of_all)
        if (*at == s) {
            *at = s->next_of_all;
            break;
        }
    pthread_mutex_unlock(&all_mutex);
    pthread_mutex_lock(&s->mutex);
    s->stopping = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    (void)pthread_join(s->thread, NULL);
    (void)pthread_cond_destroy(&s->changed);
    (void)pthread_mutex_destroy(&s->mutex);
    int device = s->device;
    free(s);
    return rt_said(atomic_load(&rt_sticky[device]));
}

STANDIN_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    ENTER("cudaStreamSynchronize");
    drain(s);
    return rt_said(atomic_load(&rt_sticky[s->device]));
}

STANDIN_EXPORT cudaError_t cudaStreamQuery(cudaStream_t s)
{
    ENTER("cudaStreamQuery");
    pthread_mutex_lock(&s->mutex);
    bool idle = s->done == s->pushed;
    pthread_mutex_unlock(&s->mutex);
    return rt_said(idle ? cudaSuccess
                        : cudaErrorNotReady); /* kept as the last error, as the real one does */
}

void rt_drain_device(void)
{
    pthread_mutex_lock(&all_mutex);
    for (struct CUstream_st *s = all_streams; s != NULL; s = s->next_of_all)
        if (s->device == rt_device)
            drain(s);
    pthread_mutex_unlock(&all_mutex);
}

STANDIN_EXPORT cudaError_t cudaDeviceSynchronize(void)
{
    ENTER("cudaDeviceSynchronize");
    rt_drain_device();
    return rt_said(atomic_load(&rt_sticky[rt_device]));
}

/* --- copies, sets, host functions --- */

struct copy {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, rows;
    int device, value; /* value: of a set, from is NULL */
};

static int run_copy(void *arg)
{
    struct copy *c = arg;
    if (c->width == 0 || c->rows == 0)
        return 0;
    char *to = rt_touchable(c->to, c->to_pitch * (c->rows - 1) + c->width);
    if (c->from == NULL) {
        if (to == NULL)
            return cudaErrorIllegalAddress;
        memset(to, c->value, c->width);
        __atomic_fetch_add(&standin_count(c->device)->sets, 1, __ATOMIC_RELAXED);
        return 0;
    }
    const char *from = rt_touchable(c->from, c->from_pitch * (c->rows - 1) + c->width);
    if (to == NULL || from == NULL)
        return cudaErrorIllegalAddress;
    bool lost = getenv("RESHARD_DAMAGE") != NULL && rt_has_weights(c->to) &&
                rt_has_weights(c->from) && standin_damage("lost-copy");
    for (size_t i = 0; i < c->rows && !lost; i++)
        memcpy(to + i * c->to_pitch, from + i * c->from_pitch, c->width);
    __atomic_fetch_add(&standin_count(c->device)->copies, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&standin_count(c->device)->copied_bytes, c->width * c->rows,
                       __ATOMIC_RELAXED);
    return 0;
}

static cudaError_t push_copy(cudaStream_t s, struct copy what)
{
    struct copy *c = malloc(sizeof *c);
    if (c == NULL || s == NULL) {
        free(c);
        return rt_said(c == NULL ? cudaErrorMemoryAllocation : cudaErrorInvalidResourceHandle);
    }
    *c = what;
    c->device = s->device;
    return rt_said(rt_push(s, (struct operation){.name = what.from == NULL ? "set" : "copy",
                                                 .run = run_copy,
                                                 .arg = c,
                                                 .own = true}));
}

STANDIN_EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n,
                                           enum cudaMemcpyKind kind, cudaStream_t s)
{
    (void)kind;
    ENTER("cudaMemcpyAsync");
    return push_copy(s, (struct copy){.to = to, .from = from, .width = n, .rows = 1});
}

STANDIN_EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from,
                                             size_t from_pitch, size_t width, size_t rows,
                                             enum cudaMemcpyKind kind, cudaStream_t s)
{
    (void)kind;
    ENTER("cudaMemcpy2DAsync");
    if (width > to_pitch || width > from_pitch)
        return rt_said(cudaErrorInvalidPitchValue);
    return push_copy(s, (struct copy){.to = to,
                                      .from = from,
                                      .to_pitch = to_pitch,
                                      .from_pitch = from_pitch,
                                      .width = width,
                                      .rows = rows});
}

STANDIN_EXPORT cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s)
{
    ENTER("cudaMemsetAsync");
    return push_copy(s, (struct copy){.to = p, .value = value, .width = n, .rows = 1});
}

STANDIN_EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t n,
                                      enum cudaMemcpyKind kind)
{
    (void)kind;
    ENTER("cudaMemcpy");
    struct copy c = {.to = to, .from = from, .width = n, .rows = 1, .device = rt_device};
    return rt_said(run_copy(&c));
}

struct host_function {
    cudaHostFn_t fn;
    void *arg;
    int device;
};

static int run_host_function(void *arg)
{
    struct host_function *h = arg;
    __atomic_fetch_add(&standin_count(h->device)->host_functions, 1, __ATOMIC_RELAXED);
    rt_in_host_function = true;
    h->fn(h->arg);
    rt_in_host_function = false;
    return 0;
}

STANDIN_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *arg)
{
    ENTER("cudaLaunchHostFunc");
    struct host_function *h = malloc(sizeof *h);
    if (h == NULL)
        return rt_said(cudaErrorMemoryAllocation);
    *h = (struct host_function){fn, arg, s->device};
    return rt_said(rt_push(
        s, (struct operation){.name = "host", .run = run_host_function, .arg = h, .own = true}));
}
