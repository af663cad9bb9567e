#include "client/cuda.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"

#include "base/banned.h"

/* Of cuda.h, which need not be there where this is built; all of them are the driver's stable ABI. */
typedef unsigned long long device_pointer;
enum {
    OK = 0,
    MEMORY_TYPE = 2,
    MEMORY_TYPE_DEVICE = 2,
    BUFFER_ID = 7,
    DEVICE_ORDINAL = 9,
    IS_LEGACY_IPC_CAPABLE = 10,
    POSIX_FILE_DESCRIPTOR = 1,
    UUID_BYTES = 16
};

struct driver {
    int (*init)(unsigned flags);
    int (*error_text)(int code, const char **ret);
    int (*attribute)(void *ret, int which, device_pointer p);
    int (*range)(device_pointer *ret_base, size_t *ret_bytes, device_pointer p);
    int (*uuid)(unsigned char *ret, int device);
    int (*retain)(void **ret_context, int device);
    int (*release)(int device);
    int (*push)(void *context);
    int (*pop)(void **ret_context);
    int (*synchronise)(void);
    int (*ipc_handle)(uint8_t *ret, device_pointer p);
    int (*event_handle)(uint8_t *ret, void *event);
    int (*vmm_retain)(device_pointer *ret_handle, const void *p);
    int (*vmm_export)(void *ret_fd, device_pointer handle, int type, unsigned long long flags);
    int (*vmm_release)(device_pointer handle);
};

static int driver_open(struct driver *ret, struct err *e)
{
    static const char *const names[] = {"cuInit",
                                        "cuGetErrorString",
                                        "cuPointerGetAttribute",
                                        "cuMemGetAddressRange_v2",
                                        "cuDeviceGetUuid_v2",
                                        "cuDevicePrimaryCtxRetain",
                                        "cuDevicePrimaryCtxRelease_v2",
                                        "cuCtxPushCurrent_v2",
                                        "cuCtxPopCurrent_v2",
                                        "cuCtxSynchronize",
                                        "cuIpcGetMemHandle",
                                        "cuIpcGetEventHandle",
                                        "cuMemRetainAllocationHandle",
                                        "cuMemExportToShareableHandle",
                                        "cuMemRelease"};
    void *at[sizeof names / sizeof *names];
    void *library = dlopen("libcuda.so.1", RTLD_NOW); /* stays: CUDA can't be unloaded */
    if (library == NULL)
        return err_set(e, RS_EPRECOND,
                       "libcuda.so.1, the NVIDIA driver's library, can't be loaded here");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((at[i] = dlsym(library, names[i])) == NULL)
            return err_set(e, RS_EPRECOND, "the NVIDIA driver has no %s: install a newer one",
                           names[i]);
    _Static_assert(sizeof at == sizeof *ret, "one name for each function");
    memcpy(ret, at, sizeof *ret);
    int r = ret->init(0);
    return r == OK ? 0 : err_set(e, RS_EPRECOND, "the NVIDIA driver does not start: error %d", r);
}

static int said(const struct driver *v, int result, int code, const char *what, struct err *e)
{
    const char *text = NULL;
    if (v->error_text(result, &text) != OK || text == NULL)
        text = "unknown error";
    return err_set(e, code, "CUDA: %s: %s (%d)", what, text, result);
}

/* --- contexts ------------------------------------------------------------------------------------ */

static int context_enter(const struct driver *v, int ordinal, struct err *e)
{
    void *context;
    int r = v->retain(&context, ordinal);
    if (r != OK)
        return said(v, r, RS_EDEVICE, "taking the device's context", e);
    r = v->push(context);
    if (r == OK)
        return 0;
    (void)v->release(ordinal);
    return said(v, r, RS_EDEVICE, "entering the device's context", e);
}

static void context_leave(const struct driver *v, int ordinal)
{
    void *context;
    (void)v->pop(&context);
    (void)v->release(ordinal);
}

int cuda_synchronise(int ordinal, struct err *e)
{
    struct driver v;
    int r = driver_open(&v, e);
    if (r == 0)
        r = context_enter(&v, ordinal, e);
    if (r != 0)
        return r;
    int result = v.synchronise();
    context_leave(&v, ordinal);
    return result == OK ? 0 : said(&v, result, RS_EDEVICE, "waiting for the device", e);
}

int cuda_event_export(void *event, uint8_t ret[CUDA_HANDLE_BYTES], struct err *e)
{
    struct driver v;
    uint8_t handle[CUDA_HANDLE_BYTES] = {0};
    int r = driver_open(&v, e);
    if (r != 0)
        return r;
    int result = v.event_handle(handle, event);
    if (result != OK)
        return said(&v, result, RS_EINVAL,
                    "the handle of an event (was it made with cudaEventInterprocess | "
                    "cudaEventDisableTiming?)",
                    e);
    memcpy(ret, handle, sizeof handle);
    return 0;
}

/* --- export -------------------------------------------------------------------------------------- */

static int uuid_text(const struct driver *v, int ordinal, char *ret, struct err *e)
{
    unsigned char b[UUID_BYTES];
    int r = v->uuid(b, ordinal);
    if (r != OK)
        return said(v, r, RS_EDEVICE, "the device's uuid", e);
    size_t at = (size_t)snprintf(ret, MEMORY_DEVICE_NAME_BYTES, "GPU-");
    for (unsigned i = 0; i < UUID_BYTES; i++)
        at += (size_t)snprintf(ret + at, MEMORY_DEVICE_NAME_BYTES - at, "%s%02x",
                               i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
    return 0;
}

void segment_export_close(struct segment_export *x)
{
    for (uint32_t i = 0; i < x->n_fds; i++)
        if (x->fds[i] >= 0)
            (void)close(x->fds[i]);
    mem_free(x->fds);
    x->fds = NULL;
    x->n_fds = 0;
}

/* Takes fd, also on failure; -1 keeps a place. */
static int fd_add(struct segment_export *x, int fd, struct err *e)
{
    if (x->fds == NULL)
        x->fds = mem_alloc((MEMORY_MAX_PARTS + 1) * sizeof *x->fds);
    if (x->fds == NULL) {
        if (fd >= 0)
            (void)close(fd);
        return err_set(e, RS_ENOMEM, "segment: out of memory");
    }
    x->fds[x->n_fds++] = fd;
    return 0;
}

/* What one cudaMalloc has allocated, or one cuMemMap has mapped. */
struct mapping {
    device_pointer base;
    size_t bytes;
};

/* The one that p is in. */
static int mapping_of(const struct driver *v, device_pointer p, struct mapping *ret, struct err *e)
{
    int r = v->range(&ret->base, &ret->bytes, p);
    if (r == OK && ret->base <= p && p - ret->base < ret->bytes)
        return 0;
    return r != OK
               ? said(v, r, RS_EINVAL, "the allocation of this pointer", e)
               : err_set(e, RS_EINVAL, "segment: the driver does not know what is at 0x%llx", p);
}

static int number_of(const struct driver *v, device_pointer p, uint64_t *ret, struct err *e)
{
    unsigned long long number = 0;
    int r = v->attribute(&number, BUFFER_ID, p);
    *ret = number;
    return r == OK ? 0 : said(v, r, RS_EINVAL, "the number of this pointer's allocation", e);
}

/* Of VMM memory. With the address, so that mappings of one reservation are told apart whatever the driver numbers. */
static int vmm_number_of(const struct driver *v, const struct mapping *m, uint64_t *ret,
                         struct err *e)
{
    int r = number_of(v, m->base, ret, e);
    *ret = (*ret ^ m->base * UINT64_C(0x9e3779b97f4a7c15)) | 1;
    return r;
}

static int vmm_export(const struct driver *v, const struct mapping *m, struct segment_export *x,
                      struct err *e)
{
    device_pointer handle;
    int fd = -1;
    int r = v->vmm_retain(&handle, (const void *)(uintptr_t)m->base);
    if (r != OK)
        return err_set(
            e, RS_EINVAL,
            "segment: this GPU memory can't be handed over: it has no CUDA IPC handle and "
            "is no VMM allocation (a pool's, cudaMallocAsync?): use cudaMalloc, or VMM "
            "memory that is made to be exported");
    r = v->vmm_export(&fd, handle, POSIX_FILE_DESCRIPTOR, 0);
    (void)v->vmm_release(handle);
    return r == OK ? fd_add(x, fd, e)
                   : said(v, r, RS_EINVAL,
                          "exporting a VMM allocation (was it made with "
                          "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR?)",
                          e);
}

/* --- several VMM allocations ----------------------------------------------------------------------- */

/* The sealed memfd that goes first. */
static int table_write(const struct memory_part *parts, uint32_t n, int *ret_fd, struct err *e)
{
    size_t bytes = n * sizeof *parts;
    int fd = memfd_create("reshard-parts", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && write(fd, parts, bytes) == (ssize_t)bytes &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) == 0) {
        *ret_fd = fd;
        return 0;
    }
    if (fd >= 0)
        (void)close(fd);
    return err_set(e, RS_EIO, "segment: a memfd of %zu bytes can't be made", bytes);
}

/* The mappings that cover p … p + bytes, each beginning where the one before it ends; the first is known. */
static int mappings_walk(const struct driver *v, const struct mapping *first, device_pointer end,
                         struct mapping *ret, uint32_t *ret_n, struct err *e)
{
    struct mapping m = *first;
    uint32_t n = 0;
    for (;;) {
        if (n == MEMORY_MAX_PARTS)
            return err_set(e, RS_EINVAL,
                           "segment: it lies over more than %d VMM allocations: hand over several "
                           "segments, each "
                           "of fewer (with torch, a smaller tensor for each), or allocate it "
                           "without expandable_segments",
                           MEMORY_MAX_PARTS);
        ret[n++] = m;
        device_pointer next = m.base + m.bytes;
        if (end <= next)
            break;
        struct err no = {0};
        if (mapping_of(v, next, &m, &no) != 0 || m.base != next)
            return err_set(
                e, RS_EINVAL,
                "segment: it leaves the VMM memory that is mapped there, which ends at 0x%llx, "
                "%llu bytes before it",
                next, (unsigned long long)(end - next));
    }
    *ret_n = n;
    return 0;
}

static int part_export(const struct driver *v, const struct mapping *m, struct segment_export *x,
                       struct memory_part *ret, struct err *e)
{
    int ordinal = -1;
    int r = v->attribute(&ordinal, DEVICE_ORDINAL, m->base);
    if (r != OK)
        return said(v, r, RS_EINVAL, "the device of a VMM allocation", e);
    if (ordinal != x->ordinal)
        return err_set(e, RS_EINVAL,
                       "segment: it begins on GPU %d and goes on on GPU %d: hand over one for each",
                       x->ordinal, ordinal);
    ret->bytes = m->bytes;
    r = vmm_number_of(v, m, &ret->allocation, e);
    return r == 0 ? vmm_export(v, m, x, e) : r;
}

static int parts_export(const struct driver *v, const struct mapping *first, device_pointer end,
                        struct segment_export *x, struct err *e)
{
    struct mapping mappings[MEMORY_MAX_PARTS];
    struct memory_part parts[MEMORY_MAX_PARTS];
    uint32_t n = 0;
    int table = -1;
    int r = mappings_walk(v, first, end, mappings, &n, e);
    if (r == 0) /* it goes first; written when all is known */
        r = fd_add(x, -1, e);
    x->kind = MEMORY_SEGMENT_CUDA_VMM_PARTS;
    x->device.allocation_bytes = 0;
    x->device.allocation = 0;
    for (uint32_t i = 0; r == 0 && i < n; i++) {
        r = part_export(v, &mappings[i], x, &parts[i], e);
        x->device.allocation_bytes += mappings[i].bytes;
    }
    if (r == 0)
        r = table_write(parts, n, &table, e);
    if (r == 0)
        x->fds[0] = table;
    return r;
}

/* --- one pointer ----------------------------------------------------------------------------------- */

static int ipc_export(const struct driver *v, const struct mapping *m, uint64_t bytes,
                      struct segment_export *x, struct err *e)
{
    x->kind = MEMORY_SEGMENT_CUDA_IPC;
    if (bytes > m->bytes - x->device.offset)
        return err_set(e, RS_EINVAL,
                       "segment: %llu bytes from %llu on leave the allocation of %zu bytes: hand "
                       "over one segment for each allocation",
                       (unsigned long long)bytes, (unsigned long long)x->device.offset, m->bytes);
    int r = number_of(v, m->base, &x->device.allocation, e);
    if (r != 0)
        return r;
    x->device.address = m->base;
    int result = v->ipc_handle(x->device.handle, m->base);
    return result == OK ? 0 : said(v, result, RS_EINVAL, "this memory's IPC handle", e);
}

static int export_in_context(const struct driver *v, const void *pointer, uint64_t bytes,
                             struct segment_export *x, struct err *e)
{
    device_pointer p = (device_pointer)(uintptr_t)pointer;
    struct mapping m = {0};
    int capable = 0;
    int r = mapping_of(v, p, &m, e);
    if (r == 0)
        r = uuid_text(v, x->ordinal, x->device.name, e);
    if (r != 0)
        return r;
    if (bytes == 0 || bytes > UINT64_MAX - p)
        return err_set(e, RS_EINVAL, "segment: %llu bytes of GPU memory at %p",
                       (unsigned long long)bytes, pointer);
    x->device.offset = p - m.base;
    x->device.allocation_bytes = m.bytes;
    int result = v->attribute(&capable, IS_LEGACY_IPC_CAPABLE, p);
    if (result != OK)
        return said(v, result, RS_EINVAL, "whether this memory has an IPC handle", e);
    if (capable)
        return ipc_export(v, &m, bytes, x, e);
    if (bytes > m.bytes - x->device.offset)
        return parts_export(v, &m, p + bytes, x, e);
    x->kind = MEMORY_SEGMENT_CUDA_VMM;
    r = vmm_number_of(v, &m, &x->device.allocation, e);
    return r == 0 ? vmm_export(v, &m, x, e) : r;
}

int cuda_export(const void *pointer, uint64_t bytes, struct segment_export *ret, struct err *e)
{
    struct driver v;
    struct segment_export x = {.data = (void *)(uintptr_t)pointer};
    unsigned type = 0;
    device_pointer p = (device_pointer)(uintptr_t)pointer;
    int r = driver_open(&v, e);
    if (r != 0)
        return r;
    if (v.attribute(&type, MEMORY_TYPE, p) != OK || type != MEMORY_TYPE_DEVICE ||
        v.attribute(&x.ordinal, DEVICE_ORDINAL, p) != OK)
        return err_set(e, RS_EINVAL,
                       "segment: %p is no GPU memory of this process: of host memory use "
                       "reshard_segment_new or reshard_segment_adopt",
                       pointer);
    r = context_enter(&v, x.ordinal, e);
    if (r != 0)
        return r;
    r = export_in_context(&v, pointer, bytes, &x, e);
    context_leave(&v, x.ordinal);
    if (r == 0)
        *ret = x;
    else
        segment_export_close(&x);
    return r;
}
