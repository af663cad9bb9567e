/* The stand-in's driver library: what torch's expandable segments and their import need of VMM, and what
 * libreshard asks of an allocation that it hands over. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test/standin/standin.h"

enum { MAX_RESERVATIONS = 256, MAX_MAPPINGS = 4096, GRANULARITY = 2 << 20 };

/* A generic handle is a file; a mapping of it becomes memory of the runtime. */
struct handle {
    int fd, device;
    size_t bytes;
};

/* A reserved range, and a second one as large where the runtime touches what is mapped in it. */
static struct reservation {
    char *base, *alias;
    size_t bytes;
} reservations[MAX_RESERVATIONS];
/* What is mapped in them, whole handles or their beginnings, at any offset. */
static struct mapping {
    char *base; /* NULL: free */
    size_t bytes;
    int device; /* that the memory is of */
} mappings[MAX_MAPPINGS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static CUresult entered(const char *name)
{
    return (CUresult)standin_call(name, CUDA_ERROR_UNKNOWN);
}

/* … of calls that work in the calling thread's context. */
static CUresult entered_context(const char *name)
{
    CUresult r = entered(name);
    return r == CUDA_SUCCESS && !standin_has_context() ? CUDA_ERROR_INVALID_CONTEXT : r;
}

STANDIN_EXPORT CUresult cuInit(unsigned flags)
{
    (void)flags;
    return entered("cuInit");
}

STANDIN_EXPORT CUresult cuGetErrorString(CUresult code, const char **ret)
{
    *ret = code == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "an error of the stand-in";
    return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemGetAllocationGranularity(size_t *ret,
                                                      const CUmemAllocationProp *properties,
                                                      CUmemAllocationGranularity_flags flags)
{
    (void)properties;
    (void)flags;
    *ret = GRANULARITY;
    return entered("cuMemGetAllocationGranularity");
}

static CUresult handle_new(int fd, int device, size_t bytes, CUmemGenericAllocationHandle *ret)
{
    struct handle *h = malloc(sizeof *h);
    if (h == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *h = (struct handle){fd, device, bytes};
    *ret = (CUmemGenericAllocationHandle)(uintptr_t)h;
    return CUDA_SUCCESS;
}

static struct handle *handle_of(CUmemGenericAllocationHandle h)
{
    return (struct handle *)(uintptr_t)h;
}

STANDIN_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *ret, size_t bytes,
                                    const CUmemAllocationProp *properties, unsigned long long flags)
{
    (void)flags;
    CUresult r = entered("cuMemCreate");
    if (r != CUDA_SUCCESS || bytes == 0 || bytes % GRANULARITY != 0)
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
    /* Not sealable: unlike the host segments of a worker. */
    char name[32];
    (void)snprintf(name, sizeof name, "standin-vmm-%d", properties->location.id);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return handle_new(fd, properties->location.id, bytes, ret);
}

STANDIN_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    (void)close(handle_of(handle)->fd);
    free(handle_of(handle));
    return entered("cuMemRelease");
}

STANDIN_EXPORT CUresult cuMemExportToShareableHandle(void *ret, CUmemGenericAllocationHandle handle,
                                                     CUmemAllocationHandleType type,
                                                     unsigned long long flags)
{
    (void)flags;
    CUresult r = entered("cuMemExportToShareableHandle");
    int fd = r == CUDA_SUCCESS && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                 ? dup(handle_of(handle)->fd)
                 : -1;
    if (fd < 0)
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
    memcpy(ret, &fd, sizeof fd);
    return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *ret, void *os,
                                                       CUmemAllocationHandleType type)
{
    CUresult r = entered("cuMemImportFromShareableHandle");
    char link[64] = "", path[64];
    struct stat st;
    int fd = (int)(intptr_t)os, device = 0;
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (r != CUDA_SUCCESS)
        return r;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(fd, &st) != 0 ||
        readlink(path, link, sizeof link - 1) < 0 ||
        sscanf(link, "/memfd:standin-vmm-%d", &device) != 1)
        return CUDA_ERROR_INVALID_VALUE;
    int copy = dup(fd);
    return copy < 0 ? CUDA_ERROR_OUT_OF_MEMORY : handle_new(copy, device, (size_t)st.st_size, ret);
}

static void *range_new(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void range_free(void *p, size_t bytes)
{
    if (p != NULL)
        (void)munmap(p, bytes);
}

/* Nothing is mapped there; cuMemMap puts files into it. */
STANDIN_EXPORT CUresult cuMemAddressReserve(CUdeviceptr *ret, size_t bytes, size_t alignment,
                                            CUdeviceptr address, unsigned long long flags)
{
    (void)alignment, (void)address, (void)flags;
    CUresult r = entered("cuMemAddressReserve");
    if (r != CUDA_SUCCESS || bytes == 0 || bytes % GRANULARITY != 0)
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
    struct reservation v = {range_new(bytes), range_new(bytes), bytes};
    r = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    for (int i = 0; v.base != NULL && v.alias != NULL && i < MAX_RESERVATIONS && r != CUDA_SUCCESS;
         i++)
        if (reservations[i].base == NULL) {
            reservations[i] = v;
            r = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&mutex);
    if (r == CUDA_SUCCESS) {
        *ret = (CUdeviceptr)(uintptr_t)v.base;
        return r;
    }
    range_free(v.base, bytes);
    range_free(v.alias, bytes);
    return r;
}

/* The range that all of these bytes lie in, or NULL. */
static struct reservation *reservation_of(const char *p, size_t bytes)
{
    for (int i = 0; i < MAX_RESERVATIONS; i++) {
        struct reservation *v = &reservations[i];
        if (v->base != NULL && p >= v->base && p < v->base + v->bytes &&
            bytes <= v->bytes - (size_t)(p - v->base))
            return v;
    }
    return NULL;
}

/* Some mapping that has one of these bytes, or NULL. */
static struct mapping *mapping_in(const char *p, size_t bytes)
{
    for (int i = 0; i < MAX_MAPPINGS; i++) {
        struct mapping *m = &mappings[i];
        if (m->base != NULL && m->base < p + bytes && p < m->base + m->bytes)
            return m;
    }
    return NULL;
}

/* With the lock held. As the real one: from a handle's beginning, into a reserved range, where nothing is mapped yet. */
static CUresult map_locked(char *p, size_t bytes, size_t offset, const struct handle *h)
{
    const struct reservation *v = reservation_of(p, bytes);
    struct mapping *free_one = NULL;
    if (v == NULL || bytes == 0 || bytes % GRANULARITY != 0 ||
        (size_t)(p - v->base) % GRANULARITY != 0 || mapping_in(p, bytes) != NULL || offset != 0 ||
        bytes > h->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MAX_MAPPINGS && free_one == NULL; i++)
        if (mappings[i].base == NULL)
            free_one = &mappings[i];
    if (free_one == NULL ||
        standin_map_at(dup(h->fd), bytes, p, v->alias + (p - v->base), v->base) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *free_one = (struct mapping){p, bytes, h->device};
    return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset,
                                 CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)flags;
    CUresult r = entered_context("cuMemMap");
    pthread_mutex_lock(&mutex);
    if (r == CUDA_SUCCESS)
        r = map_locked((char *)(uintptr_t)p, bytes, offset, handle_of(handle));
    pthread_mutex_unlock(&mutex);
    return r;
}

/* Rights are given to the devices named, and to no others; until then, no access: left to the caller's care here. All bytes
 * must be mapped, by whole mappings. */
STANDIN_EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes,
                                       const CUmemAccessDesc *access, size_t n)
{
    CUresult r = entered_context("cuMemSetAccess");
    char *p = (char *)(uintptr_t)pointer;
    pthread_mutex_lock(&mutex);
    const struct mapping *m = NULL;
    for (size_t at = 0; r == CUDA_SUCCESS && at < bytes; at += m->bytes)
        if ((m = mapping_in(p + at, 1)) == NULL || m->base != p + at || m->bytes > bytes - at) {
            r = CUDA_ERROR_INVALID_VALUE;
            break;
        }
    for (size_t at = 0; r == CUDA_SUCCESS && at < bytes; at += m->bytes) {
        m = mapping_in(p + at, 1);
        for (size_t i = 0; i < n; i++)
            if (access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE)
                standin_give_memory(m->base, m->device, access[i].location.id);
    }
    pthread_mutex_unlock(&mutex);
    return r;
}

/* Exactly what one cuMemMap has mapped. */
STANDIN_EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t bytes)
{
    CUresult r = entered_context("cuMemUnmap");
    pthread_mutex_lock(&mutex);
    struct mapping *m = mapping_in((char *)(uintptr_t)p, 1);
    if (r == CUDA_SUCCESS && (m == NULL || m->base != (char *)(uintptr_t)p || m->bytes != bytes))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == CUDA_SUCCESS) {
        (void)standin_unmap_memory(m->base); /* the range stays reserved */
        m->base = NULL;
    }
    pthread_mutex_unlock(&mutex);
    return r;
}

STANDIN_EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes)
{
    CUresult r = entered_context("cuMemAddressFree");
    pthread_mutex_lock(&mutex);
    struct reservation *v = reservation_of((char *)(uintptr_t)p, bytes);
    if (r == CUDA_SUCCESS && (v == NULL || v->base != (char *)(uintptr_t)p || v->bytes != bytes ||
                              mapping_in(v->base, bytes) != NULL))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == CUDA_SUCCESS) {
        range_free(v->base, bytes);
        range_free(v->alias, bytes);
        v->base = NULL;
    }
    pthread_mutex_unlock(&mutex);
    return r;
}

STANDIN_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *ret,
                                                               CUmemGenericAllocationHandle handle)
{
    CUresult r = entered("cuMemGetAllocationPropertiesFromHandle");
    memset(ret, 0, sizeof *ret);
    ret->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    ret->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    ret->location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE};
    ret->location.id = handle_of(handle)->device;
    return r;
}

/* --- what there is at an address ---------------------------------------------------------------- */

static CUresult find(const char *call, CUdeviceptr p, struct standin_allocation *ret)
{
    CUresult r = entered(call);
    if (r == CUDA_SUCCESS && !standin_find((const void *)(uintptr_t)p, ret))
        r = CUDA_ERROR_INVALID_VALUE;
    return r;
}

STANDIN_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *ret_base, size_t *ret_bytes,
                                                CUdeviceptr p)
{
    struct standin_allocation a;
    CUresult r =
        standin_has_context() ? find("cuMemGetAddressRange", p, &a) : CUDA_ERROR_INVALID_CONTEXT;
    if (r == CUDA_SUCCESS) {
        *ret_base = (CUdeviceptr)(uintptr_t)a.base;
        *ret_bytes = a.bytes;
    }
    return r;
}

STANDIN_EXPORT CUresult cuPointerGetAttribute(void *ret, CUpointer_attribute which, CUdeviceptr p)
{
    struct standin_allocation a;
    CUresult r = find("cuPointerGetAttribute", p, &a);
    if (r != CUDA_SUCCESS)
        return r;
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)ret = a.device;
    else if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)ret = CU_MEMORYTYPE_DEVICE;
    else if (which == CU_POINTER_ATTRIBUTE_BUFFER_ID)
        *(unsigned long long *)ret = a.number;
    else if (which == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
        *(int *)ret = a.own;
    else
        r = CUDA_ERROR_INVALID_VALUE;
    return r;
}

STANDIN_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *ret, void *p)
{
    struct standin_allocation a;
    CUresult r = find("cuMemRetainAllocationHandle", (CUdeviceptr)(uintptr_t)p, &a);
    if (r == CUDA_SUCCESS && (a.own || a.pool))
        r = CUDA_ERROR_INVALID_VALUE; /* no VMM */
    return r == CUDA_SUCCESS ? handle_new(dup(a.fd), a.device, a.bytes, ret) : r;
}

STANDIN_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *ret, CUdeviceptr p)
{
    cudaIpcMemHandle_t h;
    CUresult r = entered_context("cuIpcGetMemHandle");
    if (r == CUDA_SUCCESS && cudaIpcGetMemHandle(&h, (void *)(uintptr_t)p) != cudaSuccess)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == CUDA_SUCCESS)
        memcpy(ret, &h, sizeof h);
    return r;
}

STANDIN_EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle *ret, CUevent event)
{
    cudaIpcEventHandle_t h;
    CUresult r = entered_context("cuIpcGetEventHandle");
    if (r == CUDA_SUCCESS && cudaIpcGetEventHandle(&h, event) != cudaSuccess)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == CUDA_SUCCESS)
        memcpy(ret, &h, sizeof h);
    return r;
}

/* --- devices and contexts: a context is its device's number + 1 ------------------------------------ */

STANDIN_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *ret, CUdevice device)
{
    struct cudaDeviceProp properties;
    CUresult r = entered("cuDeviceGetUuid");
    if (r == CUDA_SUCCESS && cudaGetDeviceProperties(&properties, device) != cudaSuccess)
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == CUDA_SUCCESS)
        memcpy(ret, &properties.uuid, sizeof *ret);
    return r;
}

STANDIN_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *ret, CUdevice device)
{
    *ret = (CUcontext)(uintptr_t)(device + 1);
    return entered("cuDevicePrimaryCtxRetain");
}

STANDIN_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    (void)device;
    return entered("cuDevicePrimaryCtxRelease");
}

static _Thread_local int before; /* one deep is all that is needed */

STANDIN_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CUresult r = entered("cuCtxPushCurrent");
    before = standin_current_device();
    return r == CUDA_SUCCESS && cudaSetDevice((int)(uintptr_t)context - 1) != cudaSuccess
               ? CUDA_ERROR_INVALID_CONTEXT
               : r;
}

STANDIN_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *ret)
{
    *ret = (CUcontext)(uintptr_t)(standin_current_device() + 1);
    (void)cudaSetDevice(before);
    return entered("cuCtxPopCurrent");
}

STANDIN_EXPORT CUresult cuCtxSynchronize(void)
{
    CUresult r = entered_context("cuCtxSynchronize");
    return r == CUDA_SUCCESS && cudaDeviceSynchronize() != cudaSuccess ? CUDA_ERROR_UNKNOWN : r;
}
