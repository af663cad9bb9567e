#include "client/cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

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

/* Base, size and number of the allocation that p is in; the range must stay in it. */
static int allocation_of(const struct driver *v, device_pointer p, uint64_t bytes,
                         struct memory_device *ret, struct err *e)
{
    device_pointer base = 0;
    size_t n = 0;
    unsigned long long number = 0;
    int r = v->range(&base, &n, p);
    if (r == OK)
        r = v->attribute(&number, BUFFER_ID, p);
    if (r != OK)
        return said(v, r, RS_EINVAL, "the allocation of this pointer", e);
    ret->offset = p - base;
    ret->allocation_bytes = n;
    ret->allocation = number;
    if (bytes == 0 || bytes > n - ret->offset)
        return err_set(e, RS_EINVAL,
                       "segment: %llu bytes from %llu on leave the allocation of %zu bytes: hand "
                       "over one segment for each allocation",
                       (unsigned long long)bytes, (unsigned long long)ret->offset, n);
    return 0;
}

static int vmm_export(const struct driver *v, const void *p, int *ret_fd, struct err *e)
{
    device_pointer handle;
    int r = v->vmm_retain(&handle, p);
    if (r != OK)
        return err_set(
            e, RS_EINVAL,
            "segment: this GPU memory can't be handed over: it has no CUDA IPC handle and "
            "is no VMM allocation (a pool's, cudaMallocAsync?): use cudaMalloc, or VMM "
            "memory that is made to be exported");
    r = v->vmm_export(ret_fd, handle, POSIX_FILE_DESCRIPTOR, 0);
    (void)v->vmm_release(handle);
    return r == OK ? 0
                   : said(v, r, RS_EINVAL,
                          "exporting a VMM allocation (was it made with "
                          "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR?)",
                          e);
}

static int export_in_context(const struct driver *v, const void *pointer, uint64_t bytes,
                             struct segment_export *x, struct err *e)
{
    device_pointer p = (device_pointer)(uintptr_t)pointer;
    int capable = 0;
    int r = allocation_of(v, p, bytes, &x->device, e);
    if (r == 0)
        r = uuid_text(v, x->ordinal, x->device.name, e);
    if (r != 0)
        return r;
    int result = v->attribute(&capable, IS_LEGACY_IPC_CAPABLE, p);
    if (result != OK)
        return said(v, result, RS_EINVAL, "whether this memory has an IPC handle", e);
    if (!capable) {
        x->kind = MEMORY_SEGMENT_CUDA_VMM;
        return vmm_export(v, pointer, &x->fd, e);
    }
    x->kind = MEMORY_SEGMENT_CUDA_IPC;
    result = v->ipc_handle(x->device.handle, p - x->device.offset);
    return result == OK ? 0 : said(v, result, RS_EINVAL, "this memory's IPC handle", e);
}

int cuda_export(const void *pointer, uint64_t bytes, struct segment_export *ret, struct err *e)
{
    struct driver v;
    struct segment_export x = {.fd = -1, .data = (void *)(uintptr_t)pointer};
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
    return r;
}
