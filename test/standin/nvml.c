/* The stand-in's NVML: what finding NVLink domains needs. Types as in NVIDIA's reference. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "test/standin/standin.h"

typedef void *nvmlDevice_t;

/* nvmlGpuFabricInfo_t */
struct fabric_info {
    unsigned char clusterUuid[16];
    int status; /* nvmlReturn_t */
    unsigned cliqueId;
    unsigned char state; /* 3: completed */
};

STANDIN_EXPORT int nvmlInit_v2(void)
{
    return standin_call("nvmlInit_v2", 999);
}

STANDIN_EXPORT int nvmlShutdown(void)
{
    return 0;
}

STANDIN_EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *ret)
{
    unsigned first = 0;
    int code = standin_call("nvmlDeviceGetHandleByUUID", 999);
    if (code != 0 || sscanf(uuid, "GPU-%2x", &first) != 1)
        return code != 0 ? code : 2;
    if (first / 16 >= standin_number("STANDIN_DEVICES", 2))
        return 6; /* not found */
    *ret = (nvmlDevice_t)(uintptr_t)(first / 16 + 1);
    return 0;
}

/* STANDIN_CLIQUE: all devices are in that clique of one fabric; unset: no fabric. */
STANDIN_EXPORT int nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, struct fabric_info *ret)
{
    uint64_t clique = standin_number("STANDIN_CLIQUE", UINT64_MAX);
    (void)device;
    int code = standin_call("nvmlDeviceGetGpuFabricInfo", 999);
    memset(ret, 0, sizeof *ret);
    if (code != 0 || clique == UINT64_MAX)
        return code != 0 ? code : 3; /* not supported */
    memset(ret->clusterUuid, 0x5A, sizeof ret->clusterUuid);
    ret->cliqueId = (unsigned)clique;
    ret->state = 3;
    return 0;
}

/* STANDIN_NVLINK: so many devices in a row are connected by NVLink; 0 or unset: none is. */
STANDIN_EXPORT int nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, int what, int *ret)
{
    uint64_t row = standin_number("STANDIN_NVLINK", 0);
    uint64_t x = (uint64_t)(uintptr_t)a - 1, y = (uint64_t)(uintptr_t)b - 1;
    int code = standin_call("nvmlDeviceGetP2PStatus", 999);
    *ret = what == 2 && row != 0 && x / row == y / row ? 0 : 6; /* 6: unknown */
    return code;
}

struct memory {
    unsigned long long total, free, used;
};

STANDIN_EXPORT int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *ret)
{
    size_t free_bytes = 0, total_bytes = 0;
    standin_memory((int)(uintptr_t)device - 1, &free_bytes, &total_bytes);
    *ret = (struct memory){total_bytes, free_bytes, total_bytes - free_bytes};
    return standin_call("nvmlDeviceGetMemoryInfo", 999);
}

STANDIN_EXPORT int nvmlSystemGetDriverVersion(char *ret, unsigned n)
{
    (void)snprintf(ret, n, "stand-in");
    return standin_call("nvmlSystemGetDriverVersion", 999);
}

STANDIN_EXPORT const char *nvmlErrorString(int code)
{
    return code == 3 ? "Not Supported" : code == 6 ? "Not Found" : "an error of the stand-in";
}
