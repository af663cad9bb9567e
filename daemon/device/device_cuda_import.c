/* Workers' GPU memory, as the CUDA device opens it: IPC handles and VMM descriptors. */
#include <cuda.h>
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "device/device_cuda_private.h"

#include "base/banned.h"

enum { MAX_HANDLES = 1000 /* open IPC handles per device (CASES.md C23) */ };

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
    if (r == 0)
        r = device_cuda_use(&c->base, e);
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
        return cuda_said(c, code, "asking where an allocation is", e);
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
        (void)cuda_said(
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
    cudaError_t code = last ? cudaSetDevice(c->ordinal) : cudaSuccess;
    if (last && code == cudaSuccess) /* with the lock: nobody opens it while it is being closed */
        code = cudaIpcCloseMemHandle(p);
    pthread_mutex_unlock(&c->mutex);
    if (!found)
        return err_set(e, RS_ENOTFOUND, "CUDA device %u: no open IPC handle at this address",
                       d->local);
    (void)cuda_good(c, code, "closing an IPC handle");
    return 0;
}

enum { MAX_GPUS = 64 };

/* For this GPU and each that reaches it: rights of VMM memory do not follow from peer access. */
static bool give_rights(const struct device_cuda *c, const struct driver *v, CUdeviceptr p,
                        size_t bytes)
{
    CUmemAccessDesc access[MAX_GPUS];
    size_t n = 0;
    int n_gpus = 0;
    if (cudaGetDeviceCount(&n_gpus) != cudaSuccess)
        return false;
    for (int i = 0; i < n_gpus && n < MAX_GPUS; i++) {
        int can = i == c->ordinal;
        if (can == 0 && cudaDeviceCanAccessPeer(&can, i, c->ordinal) != cudaSuccess)
            return false;
        if (can != 0)
            access[n++] =
                (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = i},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    }
    return v->access(p, bytes, access, n) == CUDA_SUCCESS;
}

int device_cuda_import_vmm(struct device *d, int fd, size_t bytes, void **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct driver v;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p = 0;
    int r = driver_open(&v, e);
    if (r != 0)
        return r;
    if (cudaSetDevice(c->ordinal) != cudaSuccess)
        return err_set(e, RS_EDEVICE, "CUDA device %u can't be chosen", d->local);
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
    bool done = mapped && give_rights(c, &v, p, bytes);
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
    if (r == 0)
        r = device_cuda_use(d, e);
    if (r != 0)
        return r;
    if (v.unmap((CUdeviceptr)(uintptr_t)p, bytes) != CUDA_SUCCESS)
        return err_set(e, RS_ENOTFOUND, "CUDA device %u: no VMM mapping at this address", d->local);
    (void)v.unreserve((CUdeviceptr)(uintptr_t)p, bytes);
    return 0;
}

int cuda_import(struct device *d, const struct device_import *from, void **ret, struct err *e)
{
    if (from->kind == DEVICE_IMPORT_IPC)
        return device_cuda_import_ipc(d, from->handle, from->generation, from->bytes, ret, e);
    return device_cuda_import_vmm(d, from->fd, from->bytes, ret, e);
}

void cuda_import_close(struct device *d, enum device_import_kind kind, void *p, size_t bytes)
{
    struct err e = {0};
    int r = kind == DEVICE_IMPORT_IPC ? device_cuda_close_ipc(d, p, &e)
                                      : device_cuda_close_vmm(d, p, bytes, &e);
    if (r != 0) /* memory that can't be let go: the process must, and its successor has it not */
        device_cuda_fail(d, e.text);
}

void cuda_import_close_all(struct device_cuda *c)
{
    for (size_t i = 0; i < c->n_handles; i++)
        (void)cudaIpcCloseMemHandle(c->handles[i].base);
    mem_free(c->handles);
}
