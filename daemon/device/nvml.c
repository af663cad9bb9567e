#include "device/nvml.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "base/banned.h"

const char *nvml_open(struct nvml *n, char *text, size_t capacity)
{
    static const char *const names[] = {"nvmlInit_v2",
                                        "nvmlShutdown",
                                        "nvmlDeviceGetHandleByUUID",
                                        "nvmlDeviceGetGpuFabricInfo",
                                        "nvmlDeviceGetP2PStatus",
                                        "nvmlDeviceGetMemoryInfo",
                                        "nvmlErrorString"};
    void *at[sizeof names / sizeof *names];
    _Static_assert(sizeof at == sizeof *n, "one name for each function");
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL); /* stays */
    if (library == NULL)
        return "libnvidia-ml.so.1 is not there";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((at[i] = dlsym(library, names[i])) == NULL) {
            (void)snprintf(text, capacity, "NVML has no %s", names[i]);
            return text;
        }
    memcpy(n, at, sizeof at);
    int r = n->init();
    if (r == 0)
        return NULL;
    (void)snprintf(text, capacity, "NVML: %s", n->text(r));
    return text;
}

uint64_t nvml_free_bytes(const char *uuid)
{
    struct nvml n;
    struct nvml_memory memory = {0};
    nvml_device device;
    char text[96];
    if (nvml_open(&n, text, sizeof text) != NULL)
        return 0;
    if (n.by_uuid(uuid, &device) != 0 || n.memory(device, &memory) != 0)
        memory.free = 0;
    (void)n.shutdown();
    return memory.free;
}
