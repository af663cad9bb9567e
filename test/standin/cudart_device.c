/* The stand-in's CUDA runtime: what every call begins with, devices, errors. See standin.h. */
#include <stdio.h>
#include <string.h>

#include "test/standin/cudart_inner.h"

/* --- per thread and per device --- */

_Thread_local int rt_device;
_Thread_local bool rt_has_chosen; /* a device, by cudaSetDevice or a context that was pushed */
static _Thread_local int last_error;
_Thread_local bool rt_in_host_function;
atomic_int rt_sticky[STANDIN_MAX_DEVICES];

int rt_n_devices(void)
{
    uint64_t n = standin_number("STANDIN_DEVICES", 2);
    return n > STANDIN_MAX_DEVICES ? STANDIN_MAX_DEVICES : (int)n;
}

int standin_current_device(void)
{
    return rt_device;
}

bool standin_has_context(void)
{
    return rt_has_chosen;
}

void standin_leave_error(int code)
{
    last_error = code;
}

cudaError_t rt_said(int code)
{
    if (code != 0)
        last_error = code;
    return (cudaError_t)code;
}

static atomic_bool has_context[STANDIN_MAX_DEVICES];

void rt_make_context(int device)
{
    if (!atomic_exchange(&has_context[device], true))
        __atomic_fetch_add(&standin_count(device)->contexts, 1, __ATOMIC_RELAXED);
}

int rt_enter(const char *name)
{
    if (rt_in_host_function)
        return DEVICE_FUNCTION_NOT_ALLOWED;
    int code = standin_call(name, cudaErrorUnknown);
    if (code == 0 && rt_n_devices() == 0)
        code = cudaErrorNoDevice;
    if (code == 0 && !rt_has_chosen)
        rt_make_context(rt_device);
    return code != 0 ? code : atomic_load(&rt_sticky[rt_device]);
}

/* --- devices and errors --- */

STANDIN_EXPORT cudaError_t cudaGetDeviceCount(int *ret)
{
    int code = standin_call("cudaGetDeviceCount", cudaErrorUnknown);
    if (code != 0 || rt_n_devices() == 0)
        return rt_said(code != 0 ? code : cudaErrorNoDevice);
    *ret = rt_n_devices();
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= rt_n_devices())
        return rt_said(cudaErrorInvalidDevice);
    int before = rt_device;
    bool chosen = rt_has_chosen;
    rt_device = device;
    rt_has_chosen = true;
    rt_make_context(device);
    int entered = rt_enter("cudaSetDevice");
    if (entered != 0 && entered != atomic_load(&rt_sticky[device])) {
        rt_device = before;
        rt_has_chosen = chosen;
    }
    return rt_said(entered);
}

STANDIN_EXPORT cudaError_t cudaGetDevice(int *ret)
{
    ENTER_ANYWHERE("cudaGetDevice");
    *ret = rt_device;
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret, int device)
{
    ENTER_ANYWHERE("cudaGetDeviceProperties");
    if (device < 0 || device >= rt_n_devices())
        return rt_said(cudaErrorInvalidDevice);
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
    if (device < 0 || device >= rt_n_devices())
        return rt_said(cudaErrorInvalidDevice);
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

static atomic_bool peers[STANDIN_MAX_DEVICES][STANDIN_MAX_DEVICES]; /* [device][that it reaches] */

bool rt_peer(int device, int peer)
{
    return atomic_load(&peers[device][peer]);
}

STANDIN_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)flags;
    ENTER("cudaDeviceEnablePeerAccess");
    if (peer < 0 || peer >= rt_n_devices() || !may_reach(rt_device, peer))
        return rt_said(cudaErrorPeerAccessUnsupported);
    rt_make_context(peer); /* as the real one */
    return rt_said(
        atomic_exchange(&peers[rt_device][peer], true) ? cudaErrorPeerAccessAlreadyEnabled : 0);
}

STANDIN_EXPORT cudaError_t cudaDriverGetVersion(int *ret)
{
    *ret = 13000;
    return rt_said(standin_call("cudaDriverGetVersion", cudaErrorUnknown));
}

STANDIN_EXPORT cudaError_t cudaRuntimeGetVersion(int *ret)
{
    *ret = (int)standin_number("STANDIN_CUDA_VERSION", 13000);
    return rt_said(standin_call("cudaRuntimeGetVersion", cudaErrorUnknown));
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
