/* The CUDA device: opening, names and errors. How it works stands in device_cuda.h. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "device/device_cuda_private.h"
#include "device/numa.h"
#include "device/nvml.h"

#include "base/banned.h"

enum { MAX_GPUS = 64 };

/* --- errors ------------------------------------------------------------------------------------ */

int cuda_code_of(cudaError_t code)
{
    switch (code) {
    case cudaSuccess:
        return 0;
    case cudaErrorMemoryAllocation:
        return RS_EEXHAUSTED;
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
        return RS_EPRECOND;
    default:
        return RS_EDEVICE;
    }
}

int cuda_said(const struct device_cuda *c, cudaError_t code, const char *what, struct err *e)
{
    return err_set(e, cuda_code_of(code), "CUDA device %u (%s): %s: %s (%s)", c->base.local,
                   c->uuid, what, cudaGetErrorString(code), cudaGetErrorName(code));
}

void device_cuda_fail(struct device *d, const char *text)
{
    struct device_cuda *c = cuda_of(d);
    pthread_mutex_lock(&c->mutex);
    if (c->error.code == 0)
        (void)err_set(&c->error, RS_EDEVICE, "%s", text);
    pthread_mutex_unlock(&c->mutex);
    atomic_store(&c->failed, true);
}

bool cuda_good(struct device_cuda *c, cudaError_t code, const char *what)
{
    struct err e = {0};
    if (code == cudaSuccess)
        return true;
    (void)cuda_said(c, code, what, &e);
    device_cuda_fail(&c->base, e.text);
    return false;
}

int cuda_error(const struct device *d, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    if (!cuda_failed(c)) {
        if (fence_holds(c->options.fence))
            return 0;
        return err_set(e, RS_EDEADLINE, "CUDA device %u: the lease has run out", d->local);
    }
    pthread_mutex_lock(&c->mutex);
    struct err error = c->error;
    pthread_mutex_unlock(&c->mutex);
    return err_set(e, error.code, "%s", error.text);
}

/* --- open and close ------------------------------------------------------------------------------ */

static void cuda_close(struct device *d)
{
    struct device_cuda *c = cuda_of(d);
    rs_assert(atomic_load(&c->n_streams) == 0);
    (void)cudaSetDevice(c->ordinal);
    cuda_import_close_all(c);
    (void)pthread_mutex_destroy(&c->mutex);
    mem_free(c);
}

static const struct device_ops cuda_ops = {
    .kind = "cuda",
    .close = cuda_close,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .import = cuda_import,
    .import_close = cuda_import_close,
    .name = device_cuda_uuid,
    .stream_new = cuda_stream_new,
    .stream_free = cuda_stream_free,
    .copy = cuda_copy,
    .fingerprint = cuda_fingerprint,
    .quantise = cuda_quantise,
    .call = cuda_call,
    .poison = cuda_poison,
    .event_new = cuda_event_new,
    .event_free = cuda_event_free,
    .event_import = cuda_event_import,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_done = cuda_event_done,
    .error = cuda_error,
    .range_start = cuda_range_start,
    .range_end = cuda_range_end,
};

bool device_is_cuda(const struct device *d)
{
    return d->ops == &cuda_ops;
}

const char *device_cuda_uuid(const struct device *d)
{
    return cuda_of(d)->uuid;
}

int device_cuda_ordinal(const struct device *d)
{
    return cuda_of(d)->ordinal;
}

int device_cuda_use(const struct device *d, struct err *e)
{
    const struct device_cuda *c = cuda_of(d);
    cudaError_t r = cudaSetDevice(c->ordinal);
    return r == cudaSuccess ? 0 : cuda_said(c, r, "choosing the device", e);
}

int device_cuda_count(uint32_t *ret, struct err *e)
{
    int n = 0, driver = 0;
    cudaError_t r = cudaGetDeviceCount(&n);
    if (r == cudaErrorInsufficientDriver || r == cudaErrorNoDevice) {
        (void)cudaDriverGetVersion(&driver);
        if (driver == 0)
            return err_set(e, RS_EPRECOND,
                           "backend 'cuda': no NVIDIA driver is loaded on this machine (%s): "
                           "install it, or use backend 'host'",
                           cudaGetErrorString(r));
        return err_set(e, RS_EPRECOND,
                       "backend 'cuda': %s (driver for CUDA %d.%d, this build needs %d.%d): is a "
                       "GPU visible here? Else use backend 'host'",
                       cudaGetErrorString(r), driver / 1000, driver % 1000 / 10,
                       CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    }
    if (r != cudaSuccess || n <= 0)
        return err_set(e, RS_EPRECOND, "backend 'cuda': counting GPUs: %s", cudaGetErrorString(r));
    *ret = n > MAX_GPUS ? MAX_GPUS : (uint32_t)n;
    return 0;
}

static void uuid_text(const struct cudaDeviceProp *p, char ret[DEVICE_CUDA_NAME_BYTES])
{
    const unsigned char *b = (const unsigned char *)p->uuid.bytes;
    (void)snprintf(ret, DEVICE_CUDA_NAME_BYTES,
                   "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                   b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
                   b[14], b[15]);
}

/* Past "GPU-" or "MIG-", in any case. */
static const char *bare(const char *name)
{
    return strncasecmp(name, "GPU-", 4) == 0 || strncasecmp(name, "MIG-", 4) == 0 ? name + 4 : name;
}

static bool is_index(const char *name)
{
    for (const char *at = name; *at != '\0'; at++)
        if (!isdigit((unsigned char)*at))
            return false;
    return *name != '\0' && strlen(name) < 4;
}

/* The GPU that `name` means (index, uuid; NULL: `local`), its uuid in ret_uuid. */
static int find_gpu(uint32_t local, const char *name, int *ret, char *ret_uuid, struct err *e)
{
    char there[512] = "", uuid[DEVICE_CUDA_NAME_BYTES];
    uint32_t n = 0, index = local;
    int r = device_cuda_count(&n, e);
    if (r != 0)
        return r;
    bool by_index = name == NULL || is_index(name);
    if (name != NULL && by_index)
        index = (uint32_t)strtoul(name, NULL, 10);
    for (uint32_t i = 0; i < n; i++) {
        struct cudaDeviceProp p;
        cudaError_t code = cudaGetDeviceProperties(&p, (int)i);
        if (code != cudaSuccess)
            return err_set(e, RS_EDEVICE, "CUDA: properties of GPU %u: %s", i,
                           cudaGetErrorString(code));
        uuid_text(&p, uuid);
        if (by_index ? i == index : strcasecmp(bare(name), bare(uuid)) == 0) {
            memcpy(ret_uuid, uuid, sizeof uuid);
            *ret = (int)i;
            return 0;
        }
        size_t at = strlen(there);
        (void)snprintf(there + at, sizeof there - at, "%s%s", at == 0 ? "" : ", ", uuid);
    }
    if (by_index)
        return err_set(e, RS_ENOTFOUND, "GPU %u is not there: %u are: %s", index, n, there);
    return err_set(e, RS_ENOTFOUND, "GPU '%s' is not there: there are %s", name, there);
}

int device_cuda_names_check(const char *const *names, uint32_t n, struct err *e)
{
    int ordinals[MAX_GPUS];
    char uuid[DEVICE_CUDA_NAME_BYTES];
    if (n > MAX_GPUS)
        return err_set(e, RS_EINVAL, "%u GPUs are named, %d are the most", n, MAX_GPUS);
    for (uint32_t i = 0; i < n; i++) {
        int r = find_gpu(i, names[i], &ordinals[i], uuid, e);
        if (r != 0)
            return err_prefix(e, r, "device %u", i);
        for (uint32_t k = 0; k < i; k++)
            if (ordinals[k] == ordinals[i])
                return err_set(e, RS_EINVAL,
                               "devices %u ('%s') and %u ('%s') are one GPU, %s: name each once", k,
                               names[k], i, names[i], uuid);
    }
    return 0;
}

int device_cuda_environment(struct err *e)
{
    return setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0
               ? 0
               : err_set(e, RS_ENOMEM, "CUDA: out of memory for the environment");
}

/* Memory that `from` shall reach is `to`'s. What is there stays. */
static int enable_peer(const struct device_cuda *from, const struct device_cuda *to, struct err *e)
{
    int can = 0;
    cudaError_t code = cudaDeviceCanAccessPeer(&can, from->ordinal, to->ordinal);
    if (code == cudaSuccess && can != 0)
        code = cudaSetDevice(from->ordinal);
    if (code == cudaSuccess && can != 0)
        code = cudaDeviceEnablePeerAccess(to->ordinal, 0);
    if (code == cudaErrorPeerAccessAlreadyEnabled || code == cudaErrorTooManyPeers) {
        (void)cudaGetLastError();
        code = cudaSuccess;
    }
    return code == cudaSuccess ? 0 : cuda_said(from, code, "enabling peer access", e);
}

int device_cuda_connect(struct device *a, struct device *b, struct err *e)
{
    const struct device_cuda *x = cuda_of(a), *y = cuda_of(b);
    if (x->ordinal == y->ordinal)
        return 0;
    int r = enable_peer(x, y, e);
    return r == 0 ? enable_peer(y, x, e) : r;
}

int device_cuda_version(void)
{
    int version = 0;
    return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

bool device_cuda_reaches(const struct device *d, const struct device *peer)
{
    int can = 0, from = cuda_of(d)->ordinal, to = cuda_of(peer)->ordinal;
    return from == to || (cudaDeviceCanAccessPeer(&can, from, to) == cudaSuccess && can != 0);
}

int device_cuda_numa_node(const struct device *d)
{
    return cuda_of(d)->numa_node;
}

/* Where CUDA does not say, there is none: memory is no worse than without asking. */
static int find_numa_node(int ordinal)
{
    char bus_id[32] = "";
    if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, ordinal) != cudaSuccess) {
        (void)cudaGetLastError();
        return -1;
    }
    return numa_node_of("/sys", bus_id);
}

uint64_t device_cuda_context_bytes(const struct device *d)
{
    return cuda_of(d)->context_bytes;
}

bool device_cuda_memory(const struct device *d, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
    size_t free_bytes = 0, total_bytes = 0;
    if (cuda_failed(cuda_of(d)) || cudaSetDevice(cuda_of(d)->ordinal) != cudaSuccess ||
        cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    *ret_free_bytes = free_bytes;
    *ret_total_bytes = total_bytes;
    return true;
}

static void measure_context(struct device_cuda *c, uint64_t free_before)
{
    uint64_t now, total;
    if (free_before != 0 && device_cuda_memory(&c->base, &now, &total) && now < free_before)
        c->context_bytes = free_before - now;
}

/* The device is the current one. What is asked once here would fail, or wait for others, in the middle of a refit. */
static int prepare(struct device_cuda *c, int *ret_processors, struct err *e)
{
    int same_address = 0;
    cudaError_t code =
        cudaDeviceGetAttribute(ret_processors, cudaDevAttrMultiProcessorCount, c->ordinal);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                      c->ordinal);
    if (code != cudaSuccess)
        return cuda_said(c, code, "opening it", e);
    if (same_address == 0)
        return err_set(
            e, RS_EPRECOND,
            "CUDA device %u (%s): it does not reach host memory at the address that the CPU has "
            "(cudaDevAttrCanUseHostPointerForRegisteredMem): segments of workers can't be used",
            c->base.local, c->uuid);
    code = (cudaError_t)kernel_load_all();
    return code == cudaSuccess ? 0
                               : cuda_said(c, code, "loading kernels (built for another GPU?)", e);
}

int device_cuda_open(uint32_t local, const struct device_cuda_options *options, struct device **ret,
                     struct err *e)
{
    int processors = 0;
    struct device_cuda *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return err_set(e, RS_ENOMEM, "CUDA device %u: out of memory", local);
    c->base.ops = &cuda_ops;
    c->base.local = local;
    if (options != NULL)
        c->options = *options;
    int r = find_gpu(local, c->options.name, &c->ordinal, c->uuid, e);
    uint64_t free_before = r == 0 ? nvml_free_bytes(c->uuid) : 0;
    if (r == 0) {
        cudaError_t code = cudaSetDevice(c->ordinal);
        r = code == cudaSuccess
                ? prepare(c, &processors, e)
                : cuda_said(c, code,
                            "opening it (compute mode EXCLUSIVE_PROCESS, and another has it?)", e);
    }
    if (r != 0) {
        mem_free(c);
        return r;
    }
    measure_context(c, free_before);
    c->numa_node = find_numa_node(c->ordinal);
    c->options.name = NULL; /* the caller's */
    c->max_blocks = c->options.max_blocks != 0 ? c->options.max_blocks
                                               : DEVICE_CUDA_BLOCKS * (uint32_t)processors;
    (void)pthread_mutex_init(&c->mutex, NULL);
    *ret = &c->base;
    return 0;
}
