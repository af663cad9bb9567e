/* The driver, NVML and NCCL are loaded here by hand, with the few types of theirs that are asked for: this tool is built and
 * runs on machines that have none of them. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cmd.h"
#include "client/ctl_doctor.h"

#include "base/banned.h"

enum {
    MOST_DEVICES = 64,
    NCCL_OLDEST = 22800, /* 2.28: major * 10000 + minor * 100 + patch */
    /* CUdevice_attribute */
    ATTRIBUTE_CAPABILITY_MAJOR = 75,
    ATTRIBUTE_CAPABILITY_MINOR = 76,
    ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    ATTRIBUTE_VMM_BY_DESCRIPTOR = 103,
    CAPABILITY_LEAST = 80,
    UUID_BYTES = 16,
    UUID_TEXT_BYTES = 48
};

/* All of the driver's functions return 0 where they worked. */
struct driver {
    void *library;
    int (*init)(unsigned flags);
    int (*version)(int *ret);
    int (*count)(int *ret);
    int (*get)(int *ret, int ordinal);
    int (*name)(char *ret, int n, int device);
    int (*attribute)(int *ret, int attribute, int device);
    int (*peer)(int *ret, int device, int other);
    int (*uuid)(unsigned char *ret, int device); /* NULL: older than 11.4 */
};

/* "GPU-…", by which NVML knows it; "": it does not say. */
typedef char uuid_text[UUID_TEXT_BYTES];

static void *symbol(void *library, const char *name)
{
    return library != NULL ? dlsym(library, name) : NULL;
}

/* ISO C has no cast from dlsym's pointer to a function's. */
static void bind(void *function, void *library, const char *name)
{
    void *s = symbol(library, name);
    memcpy(function, &s, sizeof s);
}

static enum doctor_grade grade_of(const struct doctor *d)
{
    return d->needs_gpu ? DOCTOR_FAILED : DOCTOR_NOTE;
}

static bool driver_open(struct doctor *d, struct driver *c)
{
    *c = (struct driver){.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)};
    if (c->library == NULL) {
        doctor_add(d, grade_of(d), "driver",
                   "for GPUs: install NVIDIA's driver; without it the host backend serves",
                   "there is no libcuda.so.1");
        return false;
    }
    bind(&c->init, c->library, "cuInit");
    bind(&c->version, c->library, "cuDriverGetVersion");
    bind(&c->count, c->library, "cuDeviceGetCount");
    bind(&c->get, c->library, "cuDeviceGet");
    bind(&c->name, c->library, "cuDeviceGetName");
    bind(&c->attribute, c->library, "cuDeviceGetAttribute");
    bind(&c->peer, c->library, "cuDeviceCanAccessPeer");
    bind(&c->uuid, c->library, "cuDeviceGetUuid_v2");
    if (c->init == NULL || c->version == NULL || c->count == NULL || c->get == NULL ||
        c->name == NULL || c->attribute == NULL || c->peer == NULL) {
        doctor_add(d, grade_of(d), "driver", "install a current driver",
                   "libcuda.so.1 lacks functions that every driver has");
        return false;
    }
    return true;
}

static int attribute_of(const struct driver *c, int attribute, int device)
{
    int value = 0;
    return c->attribute(&value, attribute, device) == 0 ? value : 0;
}

static void uuid_of(const struct driver *c, int device, char *ret)
{
    unsigned char b[UUID_BYTES];
    size_t at = 0;
    if (c->uuid == NULL || c->uuid(b, device) != 0)
        return;
    at += (size_t)snprintf(ret, UUID_TEXT_BYTES, "GPU-");
    for (unsigned i = 0; i < UUID_BYTES; i++)
        at += (size_t)snprintf(ret + at, UUID_TEXT_BYTES - at, "%s%02x",
                               i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
}

static void check_device(struct doctor *d, const struct driver *c, int i, char *ret_uuid)
{
    char name[96] = "unknown";
    int device;
    if (c->get(&device, i) != 0) {
        doctor_add(d, grade_of(d), "device", "see nvidia-smi", "device %d does not answer", i);
        return;
    }
    uuid_of(c, device, ret_uuid);
    (void)c->name(name, sizeof name, device);
    int capability = 10 * attribute_of(c, ATTRIBUTE_CAPABILITY_MAJOR, device) +
                     attribute_of(c, ATTRIBUTE_CAPABILITY_MINOR, device);
    bool old = capability < CAPABILITY_LEAST;
    doctor_add(d, old ? grade_of(d) : DOCTOR_OK, "device",
               old ? "the kernels are built for compute capability 8.0 and newer" : NULL,
               "%d: %s, compute capability %d.%d", i, name, capability / 10, capability % 10);
    bool ipc = attribute_of(c, ATTRIBUTE_UNIFIED_ADDRESSING, device) != 0;
    bool vmm = attribute_of(c, ATTRIBUTE_VMM_BY_DESCRIPTOR, device) != 0;
    doctor_add(d, ipc ? DOCTOR_OK : grade_of(d), "sharing memory",
               ipc ? NULL : "a worker's device memory can't be mapped: use host segments",
               "%d: %s%s", i, ipc ? "IPC handles" : "no IPC handles",
               vmm ? ", VMM descriptors"
                   : ", no VMM descriptors (torch expandable segments, sleep mode)");
}

static void check_peers(struct doctor *d, const struct driver *c, int n)
{
    unsigned without = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++) {
            int yes = 0;
            without += i != k && (c->peer(&yes, i, k) != 0 || yes == 0);
        }
    if (n == 1)
        doctor_add(d, DOCTOR_OK, "peer access", NULL, "one device needs none");
    else
        doctor_add(d, without == 0 ? DOCTOR_OK : DOCTOR_WARNING, "peer access",
                   without == 0 ? NULL : "see nvidia-smi topo -p2p r; such pairs are domains apart",
                   without == 0 ? "between all %d devices" : "missing between some of %d devices",
                   n);
}

/* How many devices there are, MOST_DEVICES at most, and their names. */
static int check_driver(struct doctor *d, uuid_text *ret_uuids)
{
    struct driver c;
    int version = 0, n = 0;
    if (!driver_open(d, &c))
        return 0;
    int code = c.init(0);
    if (code == 0)
        code = c.version(&version);
    if (code == 0)
        code = c.count(&n);
    if (code != 0 || n == 0) {
        char why[64] = "no device is visible";
        if (code != 0)
            (void)snprintf(why, sizeof why, "it does not start (error %d)", code);
        doctor_add(d, grade_of(d), "driver",
                   "see dmesg and nvidia-smi; in a container, pass the devices through",
                   "libcuda.so.1 is there, but %s", why);
        return 0;
    }
    doctor_add(d, DOCTOR_OK, "driver", NULL, "CUDA %d.%d", version / 1000, version % 1000 / 10);
    if (n > MOST_DEVICES)
        n = MOST_DEVICES;
    for (int i = 0; i < n; i++)
        check_device(d, &c, i, ret_uuids[i]);
    check_peers(d, &c, n);
    return n;
}

/* --- memory left beside the engine ---------------------------------------------------------------- */

struct nvml_memory {
    unsigned long long total, free, used;
};

/* By the uuid: NVML counts all devices of the machine, CUDA those that CUDA_VISIBLE_DEVICES shows, in its order. */
static void check_memory_left(struct doctor *d, int n, uuid_text *uuids)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(void), (*handle)(const char *uuid, void **ret),
        (*memory)(void *device, struct nvml_memory *ret);
    bind(&init, library, "nvmlInit_v2");
    bind(&handle, library, "nvmlDeviceGetHandleByUUID");
    bind(&memory, library, "nvmlDeviceGetMemoryInfo");
    if (init == NULL || handle == NULL || memory == NULL || init() != 0) {
        doctor_add(
            d, DOCTOR_WARNING, "NVML", "install the driver's libnvidia-ml.so.1",
            "not to be had: NVLink domains can't be found by themselves; set them in [devices]");
        return;
    }
    for (int i = 0; i < n; i++) {
        void *device;
        struct nvml_memory m;
        char left[24], total[24];
        if (handle(uuids[i], &device) != 0 || memory(device, &m) != 0) {
            doctor_add(d, DOCTOR_WARNING, "device memory", "see nvidia-smi: 2 GiB should be free",
                       "%d: NVML does not tell how much is free", i);
            continue;
        }
        bool little = m.free < UINT64_C(2) << 30;
        doctor_add(d, little ? DOCTOR_WARNING : DOCTOR_OK, "device memory",
                   little ? "leave 2 GiB beside the engine: context, communicator and staging ring"
                          : NULL,
                   "%d: %s of %s free", i, cmd_bytes_text(m.free, left, sizeof left),
                   cmd_bytes_text(m.total, total, sizeof total));
    }
}

/* --- NCCL ----------------------------------------------------------------------------------------- */

extern char **environ;

static void check_nccl(struct doctor *d)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    int (*version_of)(int *ret), version = 0;
    bind(&version_of, library, "ncclGetVersion");
    if (version_of == NULL || version_of(&version) != 0) {
        doctor_add(d, grade_of(d), "NCCL", "for transport = nccl: install NCCL 2.28 or newer",
                   "there is no libnccl.so.2");
        return;
    }
    bool old = version < NCCL_OLDEST;
    doctor_add(d, old ? grade_of(d) : DOCTOR_OK, "NCCL", old ? "install NCCL 2.28 or newer" : NULL,
               "%d.%d.%d", version / 10000, version % 10000 / 100, version % 100);
    for (char **e = environ; *e != NULL; e++)
        if (strncmp(*e, "NCCL_", 5) == 0)
            doctor_add(d, DOCTOR_NOTE, "NCCL", NULL, "%s (has to be alike on all nodes)", *e);
}

void doctor_gpu(struct doctor *d)
{
    uuid_text uuids[MOST_DEVICES] = {""};
    int n = check_driver(d, uuids);
    if (n > 0)
        check_memory_left(d, n, uuids);
    check_nccl(d);
}
