/* The stand-in's CUDA runtime: memory, streams that are threads, events, launches. See standin.h. */
#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/kernels_body.h"
#include "kernels/kernels_quantise.h"
#include "kernels/kernels_task.h"
#include "test/standin/standin.h"

enum { MAX_ALLOCATIONS = 4096, MAX_KERNELS = 32, FRESH = 0xCD, DEVICE_FUNCTION_NOT_ALLOWED = 800 };

/* --- per thread and per device ----------------------------------------------------------------- */

static _Thread_local int current_device;
static _Thread_local bool has_chosen; /* a device, by cudaSetDevice or a context that was pushed */
static _Thread_local int last_error;
static _Thread_local bool in_host_function;
static atomic_int sticky[STANDIN_MAX_DEVICES];
static atomic_bool peers[STANDIN_MAX_DEVICES][STANDIN_MAX_DEVICES]; /* [device][that it reaches] */

#define ENTER_ANYWHERE(name)                                                                       \
    do {                                                                                           \
        bool chosen = has_chosen;                                                                  \
        has_chosen = true; /* it asks, and needs no context */                                     \
        int entered = enter(name);                                                                 \
        has_chosen = chosen;                                                                       \
        if (entered != 0)                                                                          \
            return said(entered);                                                                  \
    } while (0)

static int n_devices(void)
{
    uint64_t n = standin_number("STANDIN_DEVICES", 2);
    return n > STANDIN_MAX_DEVICES ? STANDIN_MAX_DEVICES : (int)n;
}

int standin_current_device(void)
{
    return current_device;
}

bool standin_has_context(void)
{
    return has_chosen;
}

void standin_leave_error(int code)
{
    last_error = code;
}

static cudaError_t said(int code)
{
    if (code != 0)
        last_error = code;
    return (cudaError_t)code;
}

static void make_context(int device);

/* What every call begins with. A thread that has chosen no device has GPU 0, and makes a context there. */
static int enter(const char *name)
{
    if (in_host_function)
        return DEVICE_FUNCTION_NOT_ALLOWED;
    int code = standin_call(name, cudaErrorUnknown);
    if (code == 0 && n_devices() == 0)
        code = cudaErrorNoDevice;
    if (code == 0 && !has_chosen)
        make_context(current_device);
    return code != 0 ? code : atomic_load(&sticky[current_device]);
}

#define ENTER(name)                                                                                \
    do {                                                                                           \
        int entered = enter(name);                                                                 \
        if (entered != 0)                                                                          \
            return said(entered);                                                                  \
    } while (0)

/* --- memory ------------------------------------------------------------------------------------ */

enum kind { FREE, DEVICE, MAPPED, PINNED, REGISTERED };

struct allocation {
    char *base;  /* what the program has */
    char *alias; /* where we can touch it */
    size_t bytes;
    enum kind kind;
    int device, fd;
    uint64_t number;
    unsigned rights; /* VMM: bits of the devices that may touch it; 0: by peer access */
    bool pool;
    const void *range; /* VMM: the reserved one that it is mapped in; NULL: none */
};

static struct allocation allocations[MAX_ALLOCATIONS];
static pthread_mutex_t memory_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t used_bytes[STANDIN_MAX_DEVICES];

static struct allocation *find_locked(const char *p)
{
    for (int i = 0; i < MAX_ALLOCATIONS; i++) {
        struct allocation *a = &allocations[i];
        if (a->kind != FREE && p >= a->base && p < a->base + a->bytes)
            return a;
    }
    return NULL;
}

static int add_locked(struct allocation what)
{
    static uint64_t numbers;
    what.number = ++numbers;
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].kind == FREE) {
            allocations[i] = what;
            return 0;
        }
    return cudaErrorMemoryAllocation;
}

static bool reaches(int device, const struct allocation *a)
{
    if (a->rights != 0)
        return (a->rights >> device & 1) != 0;
    return a->kind == PINNED || a->kind == REGISTERED || a->device == device ||
           atomic_load(&peers[device][a->device]);
}

enum { NO_MATTER_WHICH = -1 };

/* Where n bytes from p on can be touched, all of which the device must reach: in one allocation, or in mappings that lie one
 * behind the other in one reserved range, whose aliases do too. NULL: not so. */
static char *reach_locked(int device, const char *p, size_t n_bytes)
{
    const struct allocation *first = find_locked(p);
    for (size_t done = 0;;) {
        const struct allocation *a = find_locked(p + done);
        if (a == NULL || (device != NO_MATTER_WHICH && !reaches(device, a)) ||
            (a != first && (a->range == NULL || a->range != first->range)))
            return NULL;
        done += a->bytes - (size_t)(p + done - a->base);
        if (n_bytes <= done)
            return first->alias + (p - first->base);
    }
}

void *standin_reach(int device, const void *p, size_t n_bytes)
{
    void *at = NULL;
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    if (a != NULL)
        at = reach_locked(device, p, n_bytes);
    else if (standin_number("STANDIN_PAGEABLE", 0) != 0)
        at = (void *)(uintptr_t)p;
    pthread_mutex_unlock(&memory_mutex);
    return at;
}

/* For the copy engine, which stages: any device's memory, and what is no device's at all. */
/* Whether p lies in a file that processes share, as a worker's host segment and a device's memory do; the daemon's own
 * (a sample of the source) has no weights. */
static bool is_shared(const void *p)
{
    char line[512];
    bool shared = false;
    FILE *f = fopen("/proc/self/maps", "re");
    while (f != NULL && !shared && fgets(line, sizeof line, f) != NULL) {
        unsigned long begin = 0, end = 0;
        shared = sscanf(line, "%lx-%lx", &begin, &end) == 2 && (uintptr_t)p >= begin &&
                 (uintptr_t)p < end && strstr(line, "memfd:") != NULL &&
                 strstr(line, "memfd:reshard-") == NULL;
    }
    if (f != NULL)
        (void)fclose(f);
    return shared;
}

/* Memory of weights: a device's, or a worker's; host memory of the program's own has results of sums. */
static bool has_weights(const void *p)
{
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    bool device = a != NULL && (a->kind == DEVICE || a->kind == MAPPED);
    pthread_mutex_unlock(&memory_mutex);
    return device || is_shared(p);
}

static void *touchable(const void *p, size_t n_bytes)
{
    void *at = (void *)(uintptr_t)p;
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    if (a != NULL)
        at = reach_locked(NO_MATTER_WHICH, p, n_bytes);
    pthread_mutex_unlock(&memory_mutex);
    return at;
}

/* Two mappings of one file: the program's without any right, each at a place or anywhere. */
static int map_twice(int fd, size_t bytes, void *at, void *alias, struct allocation *ret)
{
    ret->base = mmap(at, bytes, PROT_NONE, MAP_SHARED | (at == NULL ? 0 : MAP_FIXED), fd, 0);
    ret->alias = mmap(alias, bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | (alias == NULL ? 0 : MAP_FIXED), fd, 0);
    ret->bytes = bytes;
    ret->fd = fd;
    return ret->base == MAP_FAILED || ret->alias == MAP_FAILED ? cudaErrorMemoryAllocation : 0;
}

static int map_memory(int device, int fd, size_t n_bytes, void *at, void *alias, const void *range,
                      void **ret)
{
    struct allocation a = {.kind = MAPPED, .device = device, .range = range};
    int r = map_twice(fd, n_bytes, at, alias, &a);
    pthread_mutex_lock(&memory_mutex);
    r = r == 0 ? add_locked(a) : r;
    pthread_mutex_unlock(&memory_mutex);
    if (r == 0) {
        *ret = a.base;
        __atomic_fetch_add(&standin_count(device)->open_handles, 1, __ATOMIC_RELAXED);
    }
    return r;
}

int standin_map_memory(int device, int fd, size_t n_bytes, void **ret)
{
    return map_memory(device, fd, n_bytes, NULL, NULL, NULL, ret);
}

enum { NO_DEVICE = STANDIN_MAX_DEVICES - 1 };

int standin_map_at(int fd, size_t n_bytes, void *at, void *alias, const void *range)
{
    void *p;
    return map_memory(NO_DEVICE, fd, n_bytes, at, alias, range, &p);
}

void standin_give_memory(void *p, int at, int device)
{
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    if (a != NULL && a->device == NO_DEVICE) {
        __atomic_fetch_sub(&standin_count(a->device)->open_handles, 1, __ATOMIC_RELAXED);
        a->device = at;
        __atomic_fetch_add(&standin_count(a->device)->open_handles, 1, __ATOMIC_RELAXED);
    }
    if (a != NULL)
        a->rights |= 1U << device;
    pthread_mutex_unlock(&memory_mutex);
}

/* What lies in a reserved range leaves it reserved. */
static void address_give_back(const struct allocation *was, char *p)
{
    if (was->range == NULL)
        (void)munmap(p, was->bytes);
    else
        (void)mmap(p, was->bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static int forget(void *p, enum kind kind)
{
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p), was = {0};
    int r = a == NULL || a->base != (char *)p || a->kind != kind ? cudaErrorInvalidValue : 0;
    if (r == 0) {
        was = *a;
        a->kind = FREE;
        if (kind == DEVICE)
            used_bytes[was.device] -= was.bytes;
    }
    pthread_mutex_unlock(&memory_mutex);
    if (r != 0)
        return r;
    if (kind == DEVICE)
        __atomic_fetch_sub(&standin_count(was.device)->allocated_bytes, was.bytes,
                           __ATOMIC_RELAXED);
    if (kind == MAPPED)
        __atomic_fetch_sub(&standin_count(was.device)->open_handles, 1, __ATOMIC_RELAXED);
    if (kind != REGISTERED)
        address_give_back(&was, was.base);
    if (kind == DEVICE || kind == MAPPED) {
        address_give_back(&was, was.alias);
        (void)close(was.fd);
    }
    return 0;
}

bool standin_find(const void *p, struct standin_allocation *ret)
{
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    bool found = a != NULL && (a->kind == DEVICE || a->kind == MAPPED);
    if (found)
        *ret = (struct standin_allocation){.base = a->base,
                                           .bytes = a->bytes,
                                           .device = a->device,
                                           .fd = a->fd,
                                           .number = a->number,
                                           .own = a->kind == DEVICE && !a->pool,
                                           .pool = a->pool};
    pthread_mutex_unlock(&memory_mutex);
    return found;
}

int standin_unmap_memory(void *p)
{
    return forget(p, MAPPED);
}

int standin_file_of(const void *p, size_t *ret_bytes)
{
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    int fd = a != NULL && a->base == (const char *)p && a->kind == DEVICE && !a->pool ? a->fd : -1;
    if (fd >= 0)
        *ret_bytes = a->bytes;
    pthread_mutex_unlock(&memory_mutex);
    return fd;
}

void standin_allocated(int device, uint64_t bytes)
{
    struct standin_device_counters *c = standin_count(device);
    standin_most(&c->peak_bytes, __atomic_add_fetch(&c->allocated_bytes, bytes, __ATOMIC_RELAXED));
}

static int allocate(size_t bytes, void **ret)
{
    struct allocation a = {.kind = DEVICE, .device = current_device};
    size_t rounded = (bytes + 4095) & ~(size_t)4095;
    uint64_t limit = standin_number("STANDIN_MEMORY", UINT64_C(1) << 30);
    if (bytes == 0 || rounded < bytes)
        return bytes == 0 ? cudaErrorInvalidValue : cudaErrorMemoryAllocation;
    pthread_mutex_lock(&memory_mutex);
    bool fits = rounded <= limit - used_bytes[a.device];
    if (fits)
        used_bytes[a.device] += rounded;
    pthread_mutex_unlock(&memory_mutex);
    int fd = fits ? memfd_create("standin-device", MFD_CLOEXEC) : -1;
    if (fd < 0 || ftruncate(fd, (off_t)rounded) != 0 || map_twice(fd, rounded, NULL, NULL, &a) != 0)
        return cudaErrorMemoryAllocation;
    memset(a.alias, FRESH, rounded);
    pthread_mutex_lock(&memory_mutex);
    int r = add_locked(a);
    pthread_mutex_unlock(&memory_mutex);
    standin_allocated(a.device, rounded);
    *ret = a.base;
    return r;
}

STANDIN_EXPORT cudaError_t cudaMalloc(void **ret, size_t bytes)
{
    ENTER("cudaMalloc");
    return said(allocate(bytes, ret));
}

static atomic_bool has_context[STANDIN_MAX_DEVICES];

static void make_context(int device)
{
    if (!atomic_exchange(&has_context[device], true))
        __atomic_fetch_add(&standin_count(device)->contexts, 1, __ATOMIC_RELAXED);
}

void standin_memory(int device, size_t *ret_free, size_t *ret_total)
{
    const struct standin_device_counters *c = standin_count(device);
    uint64_t total = standin_number("STANDIN_MEMORY", UINT64_C(1) << 30);
    uint64_t used =
        __atomic_load_n(&c->allocated_bytes, __ATOMIC_RELAXED) +
        __atomic_load_n(&c->contexts, __ATOMIC_RELAXED) * standin_number("STANDIN_CONTEXT", 0);
    *ret_total = total;
    *ret_free = used > total ? 0 : total - used;
}

STANDIN_EXPORT cudaError_t cudaMemGetInfo(size_t *ret_free, size_t *ret_total)
{
    ENTER("cudaMemGetInfo");
    standin_memory(current_device, ret_free, ret_total);
    return cudaSuccess;
}

/* Memory of the device's pool, as torch's cudaMallocAsync backend has it. */
STANDIN_EXPORT cudaError_t cudaMallocAsync(void **ret, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    ENTER("cudaMallocAsync");
    int r = allocate(bytes, ret);
    pthread_mutex_lock(&memory_mutex);
    if (r == 0)
        find_locked(*ret)->pool = true;
    pthread_mutex_unlock(&memory_mutex);
    return said(r);
}

static int pin(void *p, size_t bytes, enum kind kind)
{
    pthread_mutex_lock(&memory_mutex);
    int r = find_locked(p) != NULL
                ? cudaErrorHostMemoryAlreadyRegistered
                : add_locked((struct allocation){
                      .base = p, .alias = p, .bytes = bytes, .kind = kind, .fd = -1});
    pthread_mutex_unlock(&memory_mutex);
    return r;
}

STANDIN_EXPORT cudaError_t cudaHostAlloc(void **ret, size_t bytes, unsigned flags)
{
    (void)flags;
    ENTER("cudaHostAlloc");
    size_t rounded = (bytes + 4095) & ~(size_t)4095;
    void *p = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == 0 || p == MAP_FAILED)
        return said(cudaErrorMemoryAllocation);
    memset(p, FRESH, rounded);
    *ret = p;
    return said(pin(p, rounded, PINNED));
}

STANDIN_EXPORT cudaError_t cudaFreeHost(void *p)
{
    ENTER("cudaFreeHost");
    return said(p == NULL ? 0 : forget(p, PINNED));
}

STANDIN_EXPORT cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
    (void)flags;
    ENTER("cudaHostRegister");
    return said(bytes == 0 ? cudaErrorInvalidValue : pin(p, bytes, REGISTERED));
}

STANDIN_EXPORT cudaError_t cudaHostUnregister(void *p)
{
    ENTER("cudaHostUnregister");
    return said(forget(p, REGISTERED));
}

STANDIN_EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *ret,
                                                    const void *p)
{
    ENTER("cudaPointerGetAttributes");
    memset(ret, 0, sizeof *ret);
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    ret->type = a == NULL                                    ? cudaMemoryTypeUnregistered
                : a->kind == PINNED || a->kind == REGISTERED ? cudaMemoryTypeHost
                                                             : cudaMemoryTypeDevice;
    ret->device = a == NULL ? -2 : a->device;
    if (a != NULL)
        ret->devicePointer = (void *)(uintptr_t)p;
    pthread_mutex_unlock(&memory_mutex);
    return cudaSuccess;
}

/* --- IPC: the handle names a file of the exporter ----------------------------------------------- */

struct ipc_handle {
    char magic[8];
    int32_t pid, fd;
    uint64_t bytes, inode;
    int32_t device;
};

_Static_assert(sizeof(struct ipc_handle) <= CUDA_IPC_HANDLE_SIZE, "fits");

STANDIN_EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *ret, void *p)
{
    ENTER("cudaIpcGetMemHandle");
    struct ipc_handle h = {.magic = "standin", .pid = getpid()};
    struct stat st;
    size_t bytes = 0;
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    void *base = a == NULL ? NULL : a->base; /* any address of an allocation gives its handle */
    pthread_mutex_unlock(&memory_mutex);
    h.fd = base == NULL ? -1 : standin_file_of(base, &bytes);
    if (h.fd < 0 || fstat(h.fd, &st) != 0)
        return said(cudaErrorInvalidValue);
    h.bytes = bytes;
    h.inode = st.st_ino;
    struct standin_allocation at = {0};
    (void)standin_find(base, &at);
    h.device = at.device;
    memset(ret, 0, sizeof *ret);
    memcpy(ret, &h, sizeof h);
    return cudaSuccess;
}

/* The file that an exporter has open, where that one lives and still has it; else -1. */
static int ipc_open(const struct ipc_handle *h)
{
    struct stat st;
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", h->pid, h->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_ino == h->inode)
        return fd;
    if (fd >= 0)
        (void)close(fd);
    return -1;
}

STANDIN_EXPORT cudaError_t cudaIpcOpenMemHandle(void **ret, cudaIpcMemHandle_t handle,
                                                unsigned flags)
{
    (void)flags;
    ENTER("cudaIpcOpenMemHandle");
    struct ipc_handle h;
    memcpy(&h, &handle, sizeof h);
    if (memcmp(h.magic, "standin", 8) != 0)
        return said(cudaErrorInvalidValue);
    if (h.pid == getpid())
        return said(cudaErrorDeviceUninitialized); /* as the real one: not in the exporter (C16) */
    int fd = ipc_open(&h);
    if (fd < 0)
        return said(cudaErrorMapBufferObjectFailed);
    return said(standin_map_memory(h.device, fd, h.bytes, ret));
}

STANDIN_EXPORT cudaError_t cudaIpcCloseMemHandle(void *p)
{
    ENTER("cudaIpcCloseMemHandle");
    return said(standin_unmap_memory(p));
}

/* --- streams ------------------------------------------------------------------------------------ */

struct operation {
    struct operation *next;
    const char *name; /* of standin_operation; NULL: none */
    int (*run)(void *arg);
    void (*drop)(void *arg); /* instead of run, after a sticky error; NULL: nothing */
    void *arg;               /* freed after either, where it is `own` */
    bool own;
};

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
    if (o->name != NULL && strcmp(o->name, "group") != 0 && atomic_load(&sticky[s->device]) == 0)
        code = standin_operation(o->name, cudaErrorIllegalAddress, &never);
    if (atomic_load(&sticky[s->device]) == 0 && code == 0)
        code = o->run(o->arg);
    else if (o->drop != NULL)
        o->drop(o->arg);
    if (code != 0)
        atomic_store(&sticky[s->device], code);
    if (o->own)
        free(o->arg);
    free(o);
}

static void *stream_main(void *arg)
{
    struct CUstream_st *s = arg;
    current_device = s->device;
    has_chosen = true;
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

static int push(struct CUstream_st *s, struct operation what)
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
    return push(stream, (struct operation){.name = name, .run = fn, .arg = arg});
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
        return said(cudaErrorMemoryAllocation);
    s->device = current_device;
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
        return said(cudaErrorMemoryAllocation);
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
    int injected = in_host_function ? DEVICE_FUNCTION_NOT_ALLOWED
                                    : standin_call("cudaStreamDestroy", cudaErrorUnknown);
    if (injected != 0)
        return said(injected);
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
    return said(atomic_load(&sticky[device]));
}

STANDIN_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    ENTER("cudaStreamSynchronize");
    drain(s);
    return said(atomic_load(&sticky[s->device]));
}

STANDIN_EXPORT cudaError_t cudaStreamQuery(cudaStream_t s)
{
    ENTER("cudaStreamQuery");
    pthread_mutex_lock(&s->mutex);
    bool idle = s->done == s->pushed;
    pthread_mutex_unlock(&s->mutex);
    return said(idle ? cudaSuccess
                     : cudaErrorNotReady); /* kept as the last error, as the real one does */
}

static void drain_device(void)
{
    pthread_mutex_lock(&all_mutex);
    for (struct CUstream_st *s = all_streams; s != NULL; s = s->next_of_all)
        if (s->device == current_device)
            drain(s);
    pthread_mutex_unlock(&all_mutex);
}

STANDIN_EXPORT cudaError_t cudaDeviceSynchronize(void)
{
    ENTER("cudaDeviceSynchronize");
    drain_device();
    return said(atomic_load(&sticky[current_device]));
}

/* Waits for the device, as the real one does. */
STANDIN_EXPORT cudaError_t cudaFree(void *p)
{
    ENTER("cudaFree");
    if (p == NULL)
        return cudaSuccess;
    drain_device();
    return said(forget(p, DEVICE));
}

/* --- events ------------------------------------------------------------------------------------- */

/* What an event has come to: of an exported one in a file that others map, too. */
struct record {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint64_t recorded, done, done_ns;
};

struct CUevent_st {
    struct record *record;
    atomic_int refs;
    int device, fd; /* fd: of the file; -1: it is not shared */
};

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

/* Takes fd; below 0: not shared. */
static struct CUevent_st *event_map(int fd)
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
    e->device = current_device;
    return e;
}

STANDIN_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    ENTER("cudaEventCreateWithFlags");
    bool shared = (flags & cudaEventInterprocess) != 0;
    if (shared && (flags & cudaEventDisableTiming) == 0)
        return said(cudaErrorInvalidValue); /* as the real one */
    int fd = shared ? memfd_create("standin-event", MFD_CLOEXEC) : -1;
    struct CUevent_st *e = NULL;
    if (!shared || (fd >= 0 && ftruncate(fd, sizeof *e->record) == 0))
        e = event_map(fd);
    if (e == NULL)
        return said(cudaErrorMemoryAllocation);
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

STANDIN_EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *ret, cudaEvent_t e)
{
    ENTER("cudaIpcGetEventHandle");
    struct ipc_handle h = {.magic = "sievent", .pid = getpid(), .fd = e->fd};
    struct stat st;
    if (e->fd < 0 || fstat(e->fd, &st) != 0)
        return said(cudaErrorInvalidResourceHandle);
    h.inode = st.st_ino;
    memset(ret, 0, sizeof *ret);
    memcpy(ret, &h, sizeof h);
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *ret, cudaIpcEventHandle_t handle)
{
    ENTER("cudaIpcOpenEventHandle");
    struct ipc_handle h;
    memcpy(&h, &handle, sizeof h);
    if (memcmp(h.magic, "sievent", 8) != 0)
        return said(cudaErrorInvalidValue);
    int fd = ipc_open(&h);
    struct CUevent_st *e = fd < 0 ? NULL : event_map(fd);
    if (e == NULL)
        return said(fd < 0 ? cudaErrorMapBufferObjectFailed : cudaErrorMemoryAllocation);
    *ret = e;
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    int entered = enter("cudaEventDestroy");
    unref(e);
    return said(entered == atomic_load(&sticky[current_device]) ? 0 : entered);
}

STANDIN_EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    ENTER("cudaEventRecord");
    if (e->device != s->device)
        return said(cudaErrorInvalidResourceHandle); /* as the real one */
    struct event_use *u = use(e, true);
    return said(u == NULL
                    ? cudaErrorMemoryAllocation
                    : push(s, (struct operation){
                                  .run = run_record, .drop = drop_record, .arg = u, .own = true}));
}

STANDIN_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    (void)flags;
    ENTER("cudaStreamWaitEvent");
    struct event_use *u = use(e, false);
    return said(u == NULL
                    ? cudaErrorMemoryAllocation
                    : push(s, (struct operation){
                                  .run = run_wait, .drop = drop_wait, .arg = u, .own = true}));
}

STANDIN_EXPORT cudaError_t cudaEventQuery(cudaEvent_t e)
{
    ENTER("cudaEventQuery");
    pthread_mutex_lock(&e->record->mutex);
    bool done = e->record->done == e->record->recorded;
    pthread_mutex_unlock(&e->record->mutex);
    return said(done ? cudaSuccess : cudaErrorNotReady);
}

STANDIN_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    ENTER("cudaEventSynchronize");
    pthread_mutex_lock(&e->record->mutex);
    for (uint64_t until = e->record->recorded; e->record->done < until;)
        pthread_cond_wait(&e->record->changed, &e->record->mutex);
    pthread_mutex_unlock(&e->record->mutex);
    return said(atomic_load(&sticky[e->device]));
}

STANDIN_EXPORT cudaError_t cudaEventElapsedTime(float *ret_ms, cudaEvent_t begin, cudaEvent_t end)
{
    ENTER("cudaEventElapsedTime");
    *ret_ms = (float)((double)(end->record->done_ns - begin->record->done_ns) / 1e6);
    return cudaSuccess;
}

/* --- copies, sets, host functions ---------------------------------------------------------------- */

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
    char *to = touchable(c->to, c->to_pitch * (c->rows - 1) + c->width);
    if (c->from == NULL) {
        if (to == NULL)
            return cudaErrorIllegalAddress;
        memset(to, c->value, c->width);
        __atomic_fetch_add(&standin_count(c->device)->sets, 1, __ATOMIC_RELAXED);
        return 0;
    }
    const char *from = touchable(c->from, c->from_pitch * (c->rows - 1) + c->width);
    if (to == NULL || from == NULL)
        return cudaErrorIllegalAddress;
    bool lost = getenv("RESHARD_DAMAGE") != NULL && has_weights(c->to) && has_weights(c->from) &&
                standin_damage("lost-copy");
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
        return said(c == NULL ? cudaErrorMemoryAllocation : cudaErrorInvalidResourceHandle);
    }
    *c = what;
    c->device = s->device;
    return said(push(s, (struct operation){.name = what.from == NULL ? "set" : "copy",
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
        return said(cudaErrorInvalidPitchValue);
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
    struct copy c = {.to = to, .from = from, .width = n, .rows = 1, .device = current_device};
    return said(run_copy(&c));
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
    in_host_function = true;
    h->fn(h->arg);
    in_host_function = false;
    return 0;
}

STANDIN_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *arg)
{
    ENTER("cudaLaunchHostFunc");
    struct host_function *h = malloc(sizeof *h);
    if (h == NULL)
        return said(cudaErrorMemoryAllocation);
    *h = (struct host_function){fn, arg, s->device};
    return said(push(
        s, (struct operation){.name = "host", .run = run_host_function, .arg = h, .own = true}));
}

/* --- kernels -------------------------------------------------------------------------------------- */

/* The bytes that a view of a task touches, as offsets from its base. */
struct extent {
    int64_t low, high;
};

static void widen(struct extent *x, int64_t stride, uint64_t count)
{
    int64_t far = count == 0 ? 0 : stride * (int64_t)(count - 1);
    *(far < 0 ? &x->low : &x->high) += far;
}

/* Where the library touches what the device calls p, over the extent; NULL: an illegal address. */
static char *moved(int device, char *p, struct extent x)
{
    char *at = standin_reach(device, p + x.low, (size_t)(x.high - x.low));
    return at == NULL ? NULL : at - x.low;
}

static struct extent extent_of(const struct kernel_task *t, int64_t step, const int64_t *stride,
                               uint32_t bytes)
{
    struct extent x = {0, bytes};
    widen(&x, step, t->units.by);
    for (unsigned d = 0; d < t->n_outer; d++)
        widen(&x, stride[d], t->outer[d].by);
    return x;
}

static char *moved_view(int device, char *base, const struct kernel_task *t, int64_t step,
                        const int64_t *stride, uint32_t bytes)
{
    return moved(device, base, extent_of(t, step, stride, bytes));
}

static bool move_task(int device, struct kernel_task *t)
{
    bool element = t->unit == KERNEL_UNIT_ELEMENT;
    uint32_t reads = element ? kernel_dtype_size(t->from_dtype) : kernel_unit_reads(t->unit);
    uint32_t writes = element ? kernel_dtype_size(t->to_dtype) : kernel_unit_writes(t->unit);
    bool aligned = element || (uintptr_t)t->from % reads == 0;
    char *from = moved_view(device, t->from, t, t->from_step, t->from_stride, reads);
    t->from = from;
    if (from == NULL || !aligned)
        return false;
    for (unsigned k = 0; k < t->n_targets; k++) {
        if (!element && (uintptr_t)t->to[k] % writes != 0)
            return false;
        t->to[k] = moved_view(device, t->to[k], t, t->to_step[k], t->to_stride[k], writes);
        if (t->to[k] == NULL)
            return false;
    }
    if (t->sum == NULL)
        return true;
    t->sum = (uint64_t *)(void *)moved(device, (char *)t->sum, (struct extent){0, 8});
    return t->sum != NULL;
}

struct launch {
    uint32_t n_blocks;
    int device;
    union {
        struct kernel_batch batch;
        struct kernel_quantise_batch quantise;
    };
};

/* A cast that rounds wrong: its first element has another sign, as written and as summed. Runs on a copy of what it reads,
 * since others read that too; the caller frees it. NULL: no memory. */
static char *cast_wrong(struct kernel_task *t)
{
    uint32_t bytes = kernel_dtype_size(t->from_dtype);
    struct extent x =
        extent_of(t, t->from_step, t->from_stride,
                  t->unit == KERNEL_UNIT_ELEMENT ? bytes : kernel_unit_reads(t->unit));
    char *copy = malloc((size_t)(x.high - x.low));
    if (copy == NULL)
        return NULL;
    memcpy(copy, t->from + x.low, (size_t)(x.high - x.low));
    t->from = copy - x.low;
    t->from[bytes - 1] ^= (char)0x80;
    return copy;
}

/* Where tests have it so, a task of the batch goes wrong; what is to be freed after it has run. */
static char *harm(struct kernel_batch *b)
{
    char *copy = NULL;
    for (uint32_t i = 0; i < b->n_tasks && getenv("RESHARD_DAMAGE") != NULL; i++) {
        struct kernel_task *t = &b->tasks[i];
        if (t->n_targets == 0)
            continue;
        if (t->from_dtype != t->to_dtype && standin_damage("wrong-cast") && copy == NULL)
            copy = cast_wrong(t);
        if (is_shared(t->from) && is_shared(t->to[0]) && standin_damage("lost-copy"))
            t->n_targets = 0;
    }
    return copy;
}

static int run_batch(void *arg)
{
    struct launch *l = arg;
    for (uint32_t i = 0; i < l->batch.n_tasks; i++)
        if (!move_task(l->device, &l->batch.tasks[i]))
            return cudaErrorIllegalAddress;
    char *copy = harm(&l->batch);
    kernel_batch_run_host(&l->batch, l->n_blocks);
    free(copy);
    __atomic_fetch_add(&standin_count(l->device)->launches, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&standin_count(l->device)->tasks, l->batch.n_tasks, __ATOMIC_RELAXED);
    return 0;
}

static bool move_pointer(int device, void **p, size_t bytes)
{
    if (*p == NULL)
        return true;
    *p = standin_reach(device, *p, bytes);
    return *p != NULL;
}

/* A matrix of the device's: rows of so many bytes. Empty ones are left where they are. */
static bool move_rows(int device, char **p, int64_t stride, uint64_t rows, uint64_t row_bytes)
{
    struct extent x = {0, (int64_t)row_bytes};
    if (rows == 0 || row_bytes == 0)
        return true;
    widen(&x, stride, rows);
    *p = moved(device, *p, x);
    return *p != NULL;
}

static bool move_quantise(int device, struct kernel_quantise_task *t)
{
    uint32_t bytes = t->from_dtype == KERNEL_BFLOAT16 ? 2 : 4;
    void *scales = t->scales, *amax = t->amax_bits, *sum = t->sum;
    char *from = (char *)(uintptr_t)t->from;
    bool one = t->step != KERNEL_QUANTISE_BLOCKS;
    bool good = (uintptr_t)from % bytes == 0 && t->from_stride % bytes == 0 &&
                move_rows(device, &from, t->from_stride, t->rows, (uint64_t)t->columns * bytes) &&
                move_pointer(device, &scales, one ? 4 : 4 * (size_t)t->n_blocks) &&
                move_pointer(device, &amax, 4) && move_pointer(device, &sum, 8);
    for (unsigned i = 0; i < t->n_targets && good; i++)
        good = move_rows(device, &t->to[i], t->to_stride[i], t->row_end - t->row,
                         t->column_end - t->column);
    t->from = from;
    t->scales = scales;
    t->amax_bits = amax;
    t->sum = sum;
    return good;
}

/* A matrix of which each element is -2 times what it was (where it has a double), as a float32 or the upper half of one; the
 * caller frees it. NULL: no memory. */
static char *scale_wrong(struct kernel_quantise_task *t)
{
    uint32_t bytes = t->from_dtype == KERNEL_BFLOAT16 ? 2 : 4;
    char *copy = malloc((size_t)t->rows * t->columns * bytes + 1);
    for (uint32_t i = 0; copy != NULL && i < t->rows; i++)
        for (uint32_t k = 0; k < t->columns; k++) {
            uint32_t bits = 0;
            char *upper = (char *)&bits + 4 - bytes;
            memcpy(upper, t->from + (int64_t)i * t->from_stride + (size_t)k * bytes, bytes);
            uint32_t exponent = bits >> 23 & 0xFF;
            bits = (bits ^ 1U << 31) + (exponent > 0 && exponent < 0xFE ? 1U << 23 : 0);
            memcpy(copy + ((size_t)i * t->columns + k) * bytes, upper, bytes);
        }
    if (copy != NULL) {
        t->from = copy;
        t->from_stride = (int64_t)t->columns * bytes;
    }
    return copy;
}

static int run_quantise(void *arg)
{
    struct launch *l = arg;
    char *wrong[KERNEL_QUANTISE_BATCH_TASKS] = {NULL};
    for (uint32_t i = 0; i < l->quantise.n_tasks; i++) {
        struct kernel_quantise_task *t = &l->quantise.tasks[i];
        if (!move_quantise(l->device, t))
            return cudaErrorIllegalAddress;
        if (standin_damage("wrong-scale"))
            wrong[i] = scale_wrong(t);
    }
    kernel_quantise_batch_run_host(&l->quantise, l->n_blocks);
    for (uint32_t i = 0; i < l->quantise.n_tasks; i++)
        free(wrong[i]);
    __atomic_fetch_add(&standin_count(l->device)->launches, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&standin_count(l->device)->tasks, l->quantise.n_tasks, __ATOMIC_RELAXED);
    return 0;
}

static const struct kernel {
    const char *name;
    size_t parameter_bytes;
    int (*run)(void *arg);
} known[] = {
    {"reshard_copy", sizeof(struct kernel_batch), run_batch},
    {"reshard_copy_small", sizeof(struct kernel_small_batch), run_batch},
    {"reshard_sum", sizeof(struct kernel_batch), run_batch},
    {"reshard_sum_small", sizeof(struct kernel_small_batch), run_batch},
    {"reshard_quantise", sizeof(struct kernel_quantise_batch), run_quantise},
};

/* By the address of the stub that nvcc makes. */
static struct {
    const void *stub;
    const struct kernel *kernel;
} registered[MAX_KERNELS];

STANDIN_EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    (void)binary;
    return &handle;
}

STANDIN_EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

STANDIN_EXPORT void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

STANDIN_EXPORT void __cudaRegisterFunction(void **handle, const char *stub, char *function,
                                           const char *name, int limit, void *tid, void *bid,
                                           void *block, void *grid, int *warp)
{
    (void)handle, (void)function, (void)limit, (void)tid, (void)bid, (void)block, (void)grid;
    (void)warp;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        for (int k = 0; strcmp(name, known[i].name) == 0 && k < MAX_KERNELS; k++)
            if (registered[k].stub == NULL) {
                registered[k].stub = stub;
                registered[k].kernel = &known[i];
                break;
            }
}

/* Kernels are loaded at their first launch on a device, or when their attributes are asked for. */
static atomic_bool loaded[STANDIN_MAX_DEVICES][MAX_KERNELS];

static int number_of(const void *stub)
{
    for (int i = 0; i < MAX_KERNELS; i++)
        if (registered[i].stub == stub && stub != NULL)
            return i;
    return -1;
}

STANDIN_EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret, const void *stub)
{
    ENTER("cudaFuncGetAttributes");
    int i = number_of(stub);
    if (i < 0)
        return said(cudaErrorInvalidDeviceFunction);
    memset(ret, 0, sizeof *ret);
    atomic_store(&loaded[current_device][i], true);
    return cudaSuccess;
}

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

STANDIN_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                                    cudaStream_t stream)
{
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

STANDIN_EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared,
                                                      void *stream)
{
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *ret, const void *stub)
{
    /* The compiler's stub has one place for all threads, which write the same there. */
    __atomic_store_n(ret, (cudaKernel_t)(uintptr_t)stub, __ATOMIC_RELAXED);
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block,
                                              void **args, size_t shared, cudaStream_t stream)
{
    (void)shared;
    ENTER("cudaLaunchKernel");
    int number = number_of((const void *)handle);
    const struct kernel *k = number < 0 ? NULL : registered[number].kernel;
    if (k == NULL || stream == NULL || stream->device != current_device)
        return said(k == NULL ? cudaErrorInvalidDeviceFunction : cudaErrorInvalidResourceHandle);
    if (block.x != KERNEL_THREADS || grid.x == 0)
        return said(cudaErrorInvalidConfiguration);
    if (!atomic_exchange(&loaded[current_device][number], true)) {
        __atomic_fetch_add(&standin_count(current_device)->late_loads, 1, __ATOMIC_RELAXED);
        drain_device(); /* loading may wait for all that runs there, and here it does */
    }
    struct launch *l = malloc(sizeof *l);
    if (l == NULL)
        return said(cudaErrorMemoryAllocation);
    l->n_blocks = grid.x;
    standin_most(&standin_count(stream->device)->most_blocks, grid.x);
    l->device = stream->device;
    memcpy(&l->batch, args[0], k->parameter_bytes);
    return said(
        push(stream, (struct operation){.name = "kernel", .run = k->run, .arg = l, .own = true}));
}

/* --- devices --------------------------------------------------------------------------------------- */

STANDIN_EXPORT cudaError_t cudaGetDeviceCount(int *ret)
{
    int code = standin_call("cudaGetDeviceCount", cudaErrorUnknown);
    if (code != 0 || n_devices() == 0)
        return said(code != 0 ? code : cudaErrorNoDevice);
    *ret = n_devices();
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= n_devices())
        return said(cudaErrorInvalidDevice);
    int before = current_device;
    bool chosen = has_chosen;
    current_device = device;
    has_chosen = true;
    make_context(device);
    int entered = enter("cudaSetDevice");
    if (entered != 0 && entered != atomic_load(&sticky[device])) {
        current_device = before;
        has_chosen = chosen;
    }
    return said(entered);
}

STANDIN_EXPORT cudaError_t cudaGetDevice(int *ret)
{
    ENTER_ANYWHERE("cudaGetDevice");
    *ret = current_device;
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret, int device)
{
    ENTER_ANYWHERE("cudaGetDeviceProperties");
    if (device < 0 || device >= n_devices())
        return said(cudaErrorInvalidDevice);
    memset(ret, 0, sizeof *ret);
    (void)snprintf(ret->name, sizeof ret->name, "stand-in %d", device);
    for (int i = 0; i < 16; i++)
        ret->uuid.bytes[i] = (char)(0x10 * device + i);
    ret->major = 9;
    ret->multiProcessorCount = 4;
    ret->totalGlobalMem = standin_number("STANDIN_MEMORY", UINT64_C(1) << 30);
    ret->unifiedAddressing = 1;
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaDeviceGetAttribute(int *ret, enum cudaDeviceAttr attribute,
                                                  int device)
{
    ENTER_ANYWHERE("cudaDeviceGetAttribute");
    if (device < 0 || device >= n_devices())
        return said(cudaErrorInvalidDevice);
    *ret = attribute == cudaDevAttrCanUseHostPointerForRegisteredMem ? 1
           : attribute == cudaDevAttrMultiProcessorCount             ? 4
                                                                     : 0;
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaDeviceGetPCIBusId(char *ret, int n, int device)
{
    ENTER_ANYWHERE("cudaDeviceGetPCIBusId");
    (void)snprintf(ret, (size_t)n, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

/* STANDIN_PEER: 0 none, 1 all, n: devices of n in a row. */
static bool may_reach(int device, int peer)
{
    int n = (int)standin_number("STANDIN_PEER", 1);
    return n == 1 || (n > 1 && device / n == peer / n);
}

STANDIN_EXPORT cudaError_t cudaDeviceCanAccessPeer(int *ret, int device, int peer)
{
    ENTER_ANYWHERE("cudaDeviceCanAccessPeer");
    *ret = device != peer && may_reach(device, peer);
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)flags;
    ENTER("cudaDeviceEnablePeerAccess");
    if (peer < 0 || peer >= n_devices() || !may_reach(current_device, peer))
        return said(cudaErrorPeerAccessUnsupported);
    make_context(peer); /* as the real one */
    return said(atomic_exchange(&peers[current_device][peer], true)
                    ? cudaErrorPeerAccessAlreadyEnabled
                    : 0);
}

STANDIN_EXPORT cudaError_t cudaDriverGetVersion(int *ret)
{
    *ret = 13000;
    return said(standin_call("cudaDriverGetVersion", cudaErrorUnknown));
}

STANDIN_EXPORT cudaError_t cudaRuntimeGetVersion(int *ret)
{
    *ret = (int)standin_number("STANDIN_CUDA_VERSION", 13000);
    return said(standin_call("cudaRuntimeGetVersion", cudaErrorUnknown));
}

STANDIN_EXPORT cudaError_t cudaGetLastError(void)
{
    int code = last_error;
    last_error = 0;
    return (cudaError_t)code;
}

STANDIN_EXPORT cudaError_t cudaPeekAtLastError(void)
{
    return (cudaError_t)last_error;
}

STANDIN_EXPORT const char *cudaGetErrorName(cudaError_t code)
{
    return code == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
           : code == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress"
           : code == cudaErrorNoDevice       ? "cudaErrorNoDevice"
                                             : "cudaErrorOfTheStandIn";
}

STANDIN_EXPORT const char *cudaGetErrorString(cudaError_t code)
{
    return code == cudaErrorMemoryAllocation ? "out of memory"
           : code == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
           : code == cudaErrorNoDevice       ? "no CUDA-capable device is detected"
                                             : "an error of the stand-in";
}
