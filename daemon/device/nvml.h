/* What we ask of NVML, which is loaded at run time where it is there. Private to device/.
 *
 * Types and values from NVIDIA's NVML reference; its header is not needed to build. */
#ifndef RS_DEVICE_NVML_H
#define RS_DEVICE_NVML_H

#include <stddef.h>
#include <stdint.h>

typedef void *nvml_device;
struct nvml_fabric {
    unsigned char cluster[16];
    int status; /* 0: success */
    unsigned clique;
    unsigned char state;
};
struct nvml_memory {
    unsigned long long total, free, used;
};

/* All give 0 where they worked. */
struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_uuid)(const char *uuid, nvml_device *ret);
    int (*fabric)(nvml_device device, struct nvml_fabric *ret);
    int (*p2p)(nvml_device a, nvml_device b, int what, int *ret);
    int (*memory)(nvml_device device, struct nvml_memory *ret);
    const char *(*text)(int code);
};

/* Loads and starts it: NULL, or what is missing (in `text` or constant). nvml->shutdown ends it. */
const char *nvml_open(struct nvml *n, char *text, size_t capacity);
/* Of a GPU ("GPU-…"), without a context of it; 0: NVML does not say. */
uint64_t nvml_free_bytes(const char *uuid);

#endif
