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

/* What lies at an address of this process, if that is what the handle was made of: memory that was freed since is not, nor is
 * what came to lie there after it. */
static int use_own(const struct device_cuda *c, const uint8_t *handle, size_t bytes, void *address,
                   struct err *e)
{
    cudaIpcMemHandle_t now;
    cudaError_t code = cudaSetDevice(c->ordinal);
    if (code == cudaSuccess)
        code = cudaIpcGetMemHandle(&now, address);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cuda_said(c, code,
                        "an IPC handle of this process: its memory must not have been freed", e);
        if (e != NULL)
            e->code = RS_EINVAL;
        return RS_EINVAL;
    }
    if (memcmp(&now, handle, sizeof now) != 0)
        return err_set(e, RS_EINVAL,
                       "CUDA device %u: an IPC handle of this process: other memory lies there now",
                       c->base.local);
    return check_opened(c, address, bytes, e);
}

/* address: in this process, which is the owner; NULL: another one is. */
static int import_handle(struct device *d, const uint8_t *handle, uint64_t generation,
                         void *address, size_t bytes, void **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct open_handle *at = NULL;
    int r = 0;
    pthread_mutex_lock(&c->mutex);
    for (size_t i = 0; i < c->n_handles; i++)
        if (c->handles[i].generation == generation && c->handles[i].own == (address != NULL) &&
            memcmp(c->handles[i].handle, handle, DEVICE_CUDA_IPC_BYTES) == 0)
            at = &c->handles[i];
    if (at != NULL)
        r = check_opened(c, at->base, bytes, e);
    else if ((r = handle_room(c, e)) == 0) {
        struct open_handle new = {
            .generation = generation, .base = address, .own = address != NULL};
        memcpy(new.handle, handle, sizeof new.handle);
        r = new.own ? use_own(c, handle, bytes, address, e)
                    : open_ipc(c, handle, bytes, &new.base, e);
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

int device_cuda_import_ipc(struct device *d, const uint8_t *handle, uint64_t generation,
                           size_t bytes, void **ret, struct err *e)
{
    return import_handle(d, handle, generation, NULL, bytes, ret, e);
}

int device_cuda_close_ipc(struct device *d, void *p, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    bool found = false, last = false; /* last: of those who had it open */
    pthread_mutex_lock(&c->mutex);
    for (size_t i = 0; i < c->n_handles && !found; i++) {
        found = c->handles[i].base == p;
        if (!found || --c->handles[i].n_users > 0)
            continue;
        last = !c->handles[i].own;
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

/* The handle of one allocation, which must be on this GPU. */
static int part_open(const struct device_cuda *c, const struct driver *v, int fd,
                     CUmemGenericAllocationHandle *ret, struct err *e)
{
    CUmemAllocationProp what;
    if (v->import(ret, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) !=
        CUDA_SUCCESS)
        return err_set(e, RS_EINVAL,
                       "CUDA device %u: the descriptor is no VMM allocation: export it with "
                       "cuMemExportToShareableHandle",
                       c->base.local);
    if (v->properties(&what, *ret) != CUDA_SUCCESS ||
        what.location.type != CU_MEM_LOCATION_TYPE_DEVICE || what.location.id == c->ordinal)
        return 0;
    (void)v->release(*ret);
    return err_set(e, RS_EINVAL,
                   "CUDA device %u (%s, GPU %d): the VMM allocation is on GPU %d: attach the "
                   "worker with the device that its memory is on",
                   c->base.local, c->uuid, c->ordinal, what.location.id);
}

/* The first n parts. False: one can't be unmapped, nor then the range be given back. */
static bool span_unmap(const struct driver *v, const struct open_span *s, uint32_t n)
{
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)s->base;
    for (uint32_t i = 0; i < n; i++) { /* one by one: a range is unmapped as it was mapped */
        if (v->unmap(at, s->part_bytes[i]) != CUDA_SUCCESS)
            return false;
        at += s->part_bytes[i];
    }
    (void)v->unreserve((CUdeviceptr)(uintptr_t)s->base, s->bytes);
    return true;
}

static int span_keep(struct device_cuda *c, struct open_span *s, struct err *e)
{
    pthread_mutex_lock(&c->mutex);
    void *array = c->spans;
    int r = mem_grow(&array, &c->spans_capacity, c->n_spans + 1, sizeof *c->spans);
    c->spans = array;
    if (r == 0)
        c->spans[c->n_spans++] = s;
    pthread_mutex_unlock(&c->mutex);
    return r == 0 ? 0 : err_set(e, r, "CUDA device %u: out of memory", c->base.local);
}

/* All parts in one range of addresses, or none. */
static int span_map(struct device_cuda *c, const struct driver *v,
                    const CUmemGenericAllocationHandle *handles, struct open_span *s, struct err *e)
{
    CUdeviceptr base = 0, at;
    uint32_t n = 0;
    if (v->reserve(&base, s->bytes, 0, 0, 0) != CUDA_SUCCESS)
        return err_set(e, RS_EINVAL,
                       "CUDA device %u: no range of addresses for VMM memory of %zu bytes: "
                       "declare the size it was made with",
                       c->base.local, s->bytes);
    s->base = (void *)(uintptr_t)base;
    for (at = base;
         n < s->n_parts && v->map(at, s->part_bytes[n], 0, handles[n], 0) == CUDA_SUCCESS;)
        at += s->part_bytes[n++];
    int r = 0;
    if (n < s->n_parts)
        r = err_set(e, RS_EINVAL,
                    "CUDA device %u: mapping %zu bytes of VMM allocation %u of %u: declare the "
                    "size it was made with, and make it on this device",
                    c->base.local, s->part_bytes[n], n + 1, s->n_parts);
    else if (!give_rights(c, v, base, s->bytes))
        r = err_set(e, RS_EINVAL,
                    "CUDA device %u: rights to %zu bytes of VMM memory: make it on this device",
                    c->base.local, s->bytes);
    if (r == 0)
        r = span_keep(c, s, e);
    if (r != 0 && !span_unmap(v, s, n)) /* memory that can't be let go: the process must */
        device_cuda_fail(&c->base, "VMM memory that was opened in part can't be unmapped");
    return r;
}

/* The mappings hold the memory then, not the handles. */
static int span_open(struct device_cuda *c, const struct driver *v,
                     const struct device_import_part *parts, struct open_span *s, struct err *e)
{
    CUmemGenericAllocationHandle *handles = mem_calloc(s->n_parts, sizeof *handles);
    uint32_t n = 0;
    int r = handles == NULL ? err_set(e, RS_ENOMEM, "VMM memory: out of memory") : 0;
    while (r == 0 && n < s->n_parts) {
        r = part_open(c, v, parts[n].fd, &handles[n], e);
        if (r == 0)
            n++;
        else if (s->n_parts > 1)
            (void)err_prefix(e, r, "VMM allocation %u of %u", n + 1, s->n_parts);
    }
    if (r == 0)
        r = span_map(c, v, handles, s, e);
    while (n > 0)
        (void)v->release(handles[--n]);
    mem_free(handles);
    return r;
}

/* Their sizes; together they must be so many bytes. */
static int span_new(const struct device_import_part *parts, uint32_t n, size_t bytes,
                    struct open_span **ret, struct err *e)
{
    size_t all = 0;
    for (uint32_t i = 0; i < n; i++)
        if (parts[i].bytes == 0 || __builtin_add_overflow(all, parts[i].bytes, &all))
            return err_set(e, RS_EINVAL, "VMM allocation %u of %u has %zu bytes", i + 1, n,
                           parts[i].bytes);
    if (n == 0 || all != bytes)
        return err_set(e, RS_EINVAL, "%u VMM allocations of %zu bytes together, not %zu", n, all,
                       bytes);
    struct open_span *s = mem_zalloc(sizeof *s + n * sizeof s->part_bytes[0]);
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "VMM memory: out of memory");
    s->bytes = bytes;
    s->n_parts = n;
    for (uint32_t i = 0; i < n; i++)
        s->part_bytes[i] = parts[i].bytes;
    *ret = s;
    return 0;
}

int device_cuda_import_vmm_parts(struct device *d, const struct device_import_part *parts,
                                 uint32_t n, size_t bytes, void **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct driver v;
    struct open_span *s = NULL;
    int r = driver_open(&v, e);
    if (r == 0 && cudaSetDevice(c->ordinal) != cudaSuccess)
        r = err_set(e, RS_EDEVICE, "CUDA device %u can't be chosen", d->local);
    if (r == 0)
        r = span_new(parts, n, bytes, &s, e);
    if (r == 0)
        r = span_open(c, &v, parts, s, e);
    if (r != 0) {
        mem_free(s);
        return r;
    }
    for (uint32_t i = 0; i < n; i++)
        (void)close(parts[i].fd);
    *ret = s->base;
    return 0;
}

int device_cuda_import_vmm(struct device *d, int fd, size_t bytes, void **ret, struct err *e)
{
    struct device_import_part one = {.fd = fd, .bytes = bytes};
    return device_cuda_import_vmm_parts(d, &one, 1, bytes, ret, e);
}

/* What was opened there, no longer the device's; NULL: nothing was. */
static struct open_span *span_take(struct device_cuda *c, const void *p, size_t bytes)
{
    struct open_span *s = NULL;
    pthread_mutex_lock(&c->mutex);
    for (size_t i = 0; i < c->n_spans && s == NULL; i++)
        if (c->spans[i]->base == p && c->spans[i]->bytes == bytes) {
            s = c->spans[i];
            c->spans[i] = c->spans[--c->n_spans];
        }
    pthread_mutex_unlock(&c->mutex);
    return s;
}

int device_cuda_close_vmm(struct device *d, void *p, size_t bytes, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct driver v;
    int r = driver_open(&v, e);
    if (r == 0)
        r = device_cuda_use(d, e);
    if (r != 0)
        return r;
    struct open_span *s = span_take(c, p, bytes);
    bool done = s != NULL && span_unmap(&v, s, s->n_parts);
    mem_free(s);
    return done ? 0
                : err_set(e, RS_ENOTFOUND, "CUDA device %u: no VMM mapping at this address",
                          d->local);
}

int cuda_import(struct device *d, const struct device_import *from, void **ret, struct err *e)
{
    struct process_id self;
    bool own = from->owner != NULL && from->address != NULL && process_id_self(&self) &&
               process_id_equal(from->owner, &self);
    if (from->kind == DEVICE_IMPORT_IPC)
        return import_handle(d, from->handle, from->generation, own ? from->address : NULL,
                             from->bytes, ret, e);
    if (from->n_parts > 0)
        return device_cuda_import_vmm_parts(d, from->parts, from->n_parts, from->bytes, ret, e);
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
        if (!c->handles[i].own)
            (void)cudaIpcCloseMemHandle(c->handles[i].base);
    mem_free(c->handles);
    while (c->n_spans > 0)
        (void)device_cuda_close_vmm(&c->base, c->spans[0]->base, c->spans[0]->bytes, NULL);
    mem_free(c->spans);
}
