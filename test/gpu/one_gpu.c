/* One GPU shown as several (ONE_GPU_DEVICES, 16 by default), so that a machine with one can run what the project does between
 * devices: daemon, kernels, streams, IPC, VMM and NCCL are the real ones, only the numbers and uuids of devices are made up.
 *
 *     LD_PRELOAD=libone-gpu.so NCCL_MULTI_RANK_GPU_ENABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=32 …
 *
 * Device i has the GPU's uuid with i added to its last byte, so device 0 is the GPU under its own name. All are peers of each
 * other. The runtime's functions are found here before libcudart's. Who loads the driver's library or NVML by dlopen (the
 * daemon and the client library do) is given this library instead, which has them behind it; CUDA's own
 * libraries and NCCL get the real ones. What it can't show: which GPU memory is on, where another process has allocated it: it
 * says that of the calling thread's current device. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64, UUID_BYTES = 16, N_PLACES = 65536 };
#define RUNTIME "libcudart.so.13"
#define DRIVER  "libcuda.so.1"
#define NVML    "libnvidia-ml.so.1"

static _Thread_local int current;

static int n_devices(void)
{
    const char *text = getenv("ONE_GPU_DEVICES");
    int n = text != NULL ? atoi(text) : 16;
    return n < 1 || n > MOST ? 16 : n;
}

static void *(*real_dlopen(void))(const char *, int)
{
    static void *(*at)(const char *, int);
    if (at == NULL) {
        void *p = dlsym(RTLD_NEXT, "dlopen");
        memcpy(&at, &p, sizeof at);
    }
    return at;
}

static void *real(const char *library, const char *name)
{
    void *handle = real_dlopen()(library, RTLD_NOW);
    void *at = handle != NULL ? dlsym(handle, name) : NULL;
    if (at == NULL) {
        (void)fprintf(stderr, "one_gpu: %s of %s is not there\n", name, library);
        abort();
    }
    return at;
}

/* real_f: the function of this name behind this library. */
#define REAL(library, f)                                                                           \
    static __typeof__(&f) real_f;                                                                  \
    if (real_f == NULL) {                                                                          \
        void *p = real(library, #f);                                                               \
        memcpy(&real_f, &p, sizeof real_f);                                                        \
    }

void *dlopen(const char *name, int flags)
{
    Dl_info caller = {0}, self = {0};
    bool ours =
        name != NULL && (strcmp(name, DRIVER) == 0 || strcmp(name, NVML) == 0) &&
        dladdr(__builtin_return_address(0), &caller) != 0 && caller.dli_fname != NULL &&
        strstr(caller.dli_fname, "libcu") == NULL && strstr(caller.dli_fname, "libnv") == NULL &&
        strstr(caller.dli_fname, "libnccl") == NULL && strstr(caller.dli_fname, "torch") == NULL;
    if (ours && dladdr((void *)n_devices, &self) != 0)
        name = self.dli_fname;
    return real_dlopen()(name, flags);
}

/* --- where allocations of this process are ---------------------------------------------------------- */

static struct {
    pthread_mutex_t mutex;
    struct {
        uintptr_t base;
        size_t bytes;
        int device;
    } at[N_PLACES];
    size_t n;
} places = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void place_add(uintptr_t base, size_t bytes, int device)
{
    pthread_mutex_lock(&places.mutex);
    if (places.n == N_PLACES)
        abort();
    places.at[places.n].base = base;
    places.at[places.n].bytes = bytes;
    places.at[places.n++].device = device;
    pthread_mutex_unlock(&places.mutex);
}

static void place_remove(uintptr_t base)
{
    pthread_mutex_lock(&places.mutex);
    for (size_t i = 0; i < places.n; i++)
        if (places.at[i].base == base)
            places.at[i--] = places.at[--places.n];
    pthread_mutex_unlock(&places.mutex);
}

static int place_of(uintptr_t p)
{
    int device = current;
    pthread_mutex_lock(&places.mutex);
    for (size_t i = 0; i < places.n; i++)
        if (p >= places.at[i].base && p - places.at[i].base < places.at[i].bytes)
            device = places.at[i].device;
    pthread_mutex_unlock(&places.mutex);
    return device;
}

/* --- the runtime ------------------------------------------------------------------------------------ */

static bool is_there(int device)
{
    return device >= 0 && device < n_devices();
}

cudaError_t cudaGetDeviceCount(int *n)
{
    REAL(RUNTIME, cudaGetDeviceCount)
    cudaError_t r = real_f(n);
    if (r == cudaSuccess && *n > 0)
        *n = n_devices();
    return r;
}

cudaError_t cudaSetDevice(int device)
{
    REAL(RUNTIME, cudaSetDevice)
    if (!is_there(device))
        return cudaErrorInvalidDevice;
    current = device;
    return real_f(0);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    REAL(RUNTIME, cudaGetDeviceProperties)
    if (!is_there(device))
        return cudaErrorInvalidDevice;
    cudaError_t r = real_f(p, 0);
    p->uuid.bytes[UUID_BYTES - 1] = (char)(p->uuid.bytes[UUID_BYTES - 1] + device);
    return r;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device)
{
    REAL(RUNTIME, cudaDeviceGetAttribute)
    return is_there(device) ? real_f(value, which, 0) : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceGetPCIBusId(char *ret, int bytes, int device)
{
    REAL(RUNTIME, cudaDeviceGetPCIBusId)
    return is_there(device) ? real_f(ret, bytes, 0) : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (!is_there(device) || !is_there(peer))
        return cudaErrorInvalidDevice;
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)flags;
    return is_there(peer) && peer != current ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaMalloc(void **ret, size_t bytes)
{
    REAL(RUNTIME, cudaMalloc)
    cudaError_t r = real_f(ret, bytes);
    if (r == cudaSuccess && bytes != 0)
        place_add((uintptr_t)*ret, bytes, current);
    return r;
}

cudaError_t cudaFree(void *p)
{
    REAL(RUNTIME, cudaFree)
    place_remove((uintptr_t)p);
    return real_f(p);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *ret, const void *p)
{
    REAL(RUNTIME, cudaPointerGetAttributes)
    cudaError_t r = real_f(ret, p);
    if (r == cudaSuccess && ret->device >= 0)
        ret->device = place_of((uintptr_t)p);
    return r;
}

/* --- the driver ------------------------------------------------------------------------------------- */

CUresult cuDeviceGetCount(int *n)
{
    REAL(DRIVER, cuDeviceGetCount)
    CUresult r = real_f(n);
    if (r == CUDA_SUCCESS && *n > 0)
        *n = n_devices();
    return r;
}

CUresult cuDeviceGet(CUdevice *ret, int ordinal)
{
    *ret = ordinal;
    return is_there(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid_v2(CUuuid *ret, CUdevice device)
{
    REAL(DRIVER, cuDeviceGetUuid_v2)
    if (!is_there(device))
        return CUDA_ERROR_INVALID_DEVICE;
    CUresult r = real_f(ret, 0);
    ret->bytes[UUID_BYTES - 1] = (char)(ret->bytes[UUID_BYTES - 1] + device);
    return r;
}

CUresult cuDeviceGetName(char *ret, int bytes, CUdevice device)
{
    REAL(DRIVER, cuDeviceGetName)
    return is_there(device) ? real_f(ret, bytes, 0) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *ret, CUdevice_attribute which, CUdevice device)
{
    REAL(DRIVER, cuDeviceGetAttribute)
    return is_there(device) ? real_f(ret, which, 0) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceTotalMem_v2(size_t *ret, CUdevice device)
{
    REAL(DRIVER, cuDeviceTotalMem_v2)
    return is_there(device) ? real_f(ret, 0) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    *can = device != peer;
    return is_there(device) && is_there(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ret, CUdevice device)
{
    REAL(DRIVER, cuDevicePrimaryCtxRetain)
    return is_there(device) ? real_f(ret, 0) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    REAL(DRIVER, cuDevicePrimaryCtxRelease_v2)
    return is_there(device) ? real_f(0) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuPointerGetAttribute(void *ret, CUpointer_attribute which, CUdeviceptr p)
{
    REAL(DRIVER, cuPointerGetAttribute)
    CUresult r = real_f(ret, which, p);
    if (r == CUDA_SUCCESS && which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)ret = place_of(p);
    return r;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *ret, size_t bytes,
                     const CUmemAllocationProp *how, unsigned long long flags)
{
    REAL(DRIVER, cuMemCreate)
    CUmemAllocationProp here = *how;
    here.location.id = 0;
    return is_there(how->location.id) ? real_f(ret, bytes, &here, flags)
                                      : CUDA_ERROR_INVALID_DEVICE;
}

/* Others than the first are its peers. */
CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const CUmemAccessDesc *how, size_t n)
{
    REAL(DRIVER, cuMemSetAccess)
    CUmemAccessDesc here = *how;
    here.location.id = 0;
    for (size_t i = 0; i < n; i++)
        if (!is_there(how[i].location.id))
            return CUDA_ERROR_INVALID_VALUE;
    place_remove(p);
    place_add(p, bytes, how->location.id);
    return real_f(p, bytes, &here, 1);
}

CUresult cuMemUnmap(CUdeviceptr p, size_t bytes)
{
    REAL(DRIVER, cuMemUnmap)
    place_remove(p);
    return real_f(p, bytes);
}

CUresult cuMemGetAllocationGranularity(size_t *ret, const CUmemAllocationProp *how,
                                       CUmemAllocationGranularity_flags which)
{
    REAL(DRIVER, cuMemGetAllocationGranularity)
    CUmemAllocationProp here = *how;
    here.location.id = 0;
    return real_f(ret, &here, which);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *ret,
                                                CUmemGenericAllocationHandle handle)
{
    REAL(DRIVER, cuMemGetAllocationPropertiesFromHandle)
    CUresult r = real_f(ret, handle);
    if (r == CUDA_SUCCESS)
        ret->location.id = current;
    return r;
}

/* --- NVML ------------------------------------------------------------------------------------------- */

/* Of nvml.h, which toolkits need not have: an enumeration with 0 for success, and a pointer. */
int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret)
{
    static int (*by_uuid)(const char *, void **);
    char there[96];
    size_t n = strlen(uuid);
    int r = 0;
    if (by_uuid == NULL) {
        void *at = real(NVML, "nvmlDeviceGetHandleByUUID");
        memcpy(&by_uuid, &at, sizeof by_uuid);
    }
    if (n < 2 || n >= sizeof there)
        return by_uuid(uuid, ret);
    memcpy(there, uuid, n + 1);
    unsigned last = (unsigned)strtoul(uuid + n - 2, NULL, 16);
    for (int i = 0; i < n_devices(); i++) {
        (void)snprintf(there + n - 2, 3, "%02x", (last - (unsigned)i) & 0xFF);
        if ((r = by_uuid(there, ret)) == 0)
            return 0;
    }
    return r;
}
