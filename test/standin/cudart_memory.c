/* The stand-in's CUDA runtime: memory of devices and pinned memory, and who reaches it. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test/standin/cudart_inner.h"

enum { MAX_ALLOCATIONS = 4096, FRESH = 0xCD };

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
           rt_peer(device, a->device);
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

bool rt_is_shared(const void *p)
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

bool rt_has_weights(const void *p)
{
    pthread_mutex_lock(&memory_mutex);
    struct allocation *a = find_locked(p);
    bool device = a != NULL && (a->kind == DEVICE || a->kind == MAPPED);
    pthread_mutex_unlock(&memory_mutex);
    return device || rt_is_shared(p);
}

void *rt_touchable(const void *p, size_t n_bytes)
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
    struct allocation a = {.kind = DEVICE, .device = rt_device};
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
    return rt_said(allocate(bytes, ret));
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
    standin_memory(rt_device, ret_free, ret_total);
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
    return rt_said(r);
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

/* Waits for the device, as the real one does. */
STANDIN_EXPORT cudaError_t cudaFree(void *p)
{
    ENTER("cudaFree");
    if (p == NULL)
        return cudaSuccess;
    rt_drain_device();
    return rt_said(forget(p, DEVICE));
}

STANDIN_EXPORT cudaError_t cudaHostAlloc(void **ret, size_t bytes, unsigned flags)
{
    (void)flags;
    ENTER("cudaHostAlloc");
    size_t rounded = (bytes + 4095) & ~(size_t)4095;
    void *p = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == 0 || p == MAP_FAILED)
        return rt_said(cudaErrorMemoryAllocation);
    memset(p, FRESH, rounded);
    *ret = p;
    return rt_said(pin(p, rounded, PINNED));
}

STANDIN_EXPORT cudaError_t cudaFreeHost(void *p)
{
    ENTER("cudaFreeHost");
    return rt_said(p == NULL ? 0 : forget(p, PINNED));
}

STANDIN_EXPORT cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
    (void)flags;
    ENTER("cudaHostRegister");
    return rt_said(bytes == 0 ? cudaErrorInvalidValue : pin(p, bytes, REGISTERED));
}

STANDIN_EXPORT cudaError_t cudaHostUnregister(void *p)
{
    ENTER("cudaHostUnregister");
    return rt_said(forget(p, REGISTERED));
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
