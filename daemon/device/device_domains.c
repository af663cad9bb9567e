#include "device/device_domains.h"

#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "device/nvml.h"

#include "base/banned.h"

enum { FABRIC_COMPLETED = 3, P2P_NVLINK = 2, P2P_OK = 0, MOST = 64 };

static bool is_zero(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != 0)
            return false;
    return true;
}

static bool fabric_of(const struct nvml *n, nvml_device device, char ret[DEVICE_FABRIC_BYTES])
{
    struct nvml_fabric info;
    memset(&info, 0, sizeof info);
    if (n->fabric(device, &info) != 0 || info.status != 0 || info.state != FABRIC_COMPLETED ||
        is_zero(info.cluster, sizeof info.cluster))
        return false;
    for (size_t i = 0; i < sizeof info.cluster; i++)
        (void)snprintf(ret + 2 * i, DEVICE_FABRIC_BYTES - 2 * i, "%02x", info.cluster[i]);
    size_t at = 2 * sizeof info.cluster;
    (void)snprintf(ret + at, DEVICE_FABRIC_BYTES - at, ".%u", info.clique);
    return true;
}

/* linked: a row of bits for each device. */
static bool links_by_nvml(const struct nvml *n, const nvml_device *devices, uint32_t count,
                          uint64_t *linked)
{
    bool any = false;
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = 0; b < count; b++) {
            int status = -1;
            if (a == b || n->p2p(devices[a], devices[b], P2P_NVLINK, &status) != 0 ||
                status != P2P_OK)
                continue;
            linked[a] |= UINT64_C(1) << b;
            linked[b] |= UINT64_C(1) << a;
            any = true;
        }
    return any;
}

static void links_by_reach(bool (*reaches)(void *arg, uint32_t a, uint32_t b), void *arg,
                           uint32_t count, uint64_t *linked)
{
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = 0; b < count; b++)
            if (a != b && reaches(arg, a, b) && reaches(arg, b, a))
                linked[a] |= UINT64_C(1) << b;
}

/* Everything that a device's links lead to is its island. */
static void islands(const uint64_t *linked, uint32_t count, struct device_domain *ret)
{
    uint64_t done = 0;
    uint32_t island = 0;
    for (uint32_t first = 0; first < count; first++) {
        uint64_t all = UINT64_C(1) << first, before = 0;
        if ((done & all) != 0)
            continue;
        for (; all != before;) {
            before = all;
            for (uint32_t d = 0; d < count; d++)
                all |= (all >> d & 1) != 0 ? linked[d] : 0;
        }
        for (uint32_t d = 0; d < count; d++)
            if ((all >> d & 1) != 0)
                ret[d].island = island;
        done |= all;
        island++;
    }
}

/* NULL, or why NVML says nothing. */
static const char *ask_nvml(const char *const *uuids, uint32_t n, struct device_domain *ret,
                            uint64_t *linked, bool *ret_fabric, bool *ret_linked, char *text,
                            size_t capacity)
{
    struct nvml nvml;
    nvml_device devices[MOST];
    const char *why = nvml_open(&nvml, text, capacity);
    if (why != NULL)
        return why;
    for (uint32_t i = 0; i < n && why == NULL; i++) {
        int r = nvml.by_uuid(uuids[i], &devices[i]);
        if (r != 0) {
            (void)snprintf(text, capacity, "NVML: %.44s: %s", uuids[i], nvml.text(r));
            why = text;
        }
    }
    for (uint32_t i = 0; i < n && why == NULL; i++)
        *ret_fabric = fabric_of(&nvml, devices[i], ret[i].fabric) || *ret_fabric;
    if (why == NULL)
        *ret_linked = links_by_nvml(&nvml, devices, n, linked);
    (void)nvml.shutdown();
    return why;
}

void device_domains(const char *const *uuids, uint32_t n,
                    bool (*reaches)(void *arg, uint32_t a, uint32_t b), void *arg,
                    struct device_domain *ret, char ret_how[DEVICE_HOW_BYTES])
{
    uint64_t linked[MOST] = {0};
    char text[DEVICE_HOW_BYTES];
    bool fabric = false, nvlink = false;
    rs_assert(n <= MOST);
    memset(ret, 0, n * sizeof *ret);
    const char *why = ask_nvml(uuids, n, ret, linked, &fabric, &nvlink, text, sizeof text);
    if (!nvlink)
        links_by_reach(reaches, arg, n, linked);
    islands(linked, n, ret);
    (void)snprintf(ret_how, DEVICE_HOW_BYTES, "%s%s%.60s%s",
                   fabric   ? "fabric"
                   : nvlink ? "NVLink"
                            : "peer access",
                   why != NULL ? " (" : "", why != NULL ? why : "", why != NULL ? ")" : "");
}

struct parts {
    uint32_t n, island[MOST];
    uint64_t members[MOST];
};

/* The part that device d can join; n: none. */
static uint32_t part_for(const struct parts *p, uint32_t d, uint32_t island,
                         bool (*reaches)(void *arg, uint32_t a, uint32_t b), void *arg)
{
    for (uint32_t i = 0; i < p->n; i++) {
        bool fits = p->island[i] == island;
        for (uint32_t k = 0; k < d && fits; k++)
            fits = (p->members[i] >> k & 1) == 0 || (reaches(arg, d, k) && reaches(arg, k, d));
        if (fits)
            return i;
    }
    return p->n;
}

bool device_islands_part(uint32_t n, bool (*reaches)(void *arg, uint32_t a, uint32_t b), void *arg,
                         struct device_domain *domains)
{
    struct parts p = {0};
    bool parted = false;
    rs_assert(n <= MOST);
    for (uint32_t d = 0; d < n; d++) {
        uint32_t part = part_for(&p, d, domains[d].island, reaches, arg);
        if (part == p.n) {
            for (uint32_t i = 0; i < p.n; i++)
                parted = parted || p.island[i] == domains[d].island;
            p.island[p.n++] = domains[d].island;
        }
        p.members[part] |= UINT64_C(1) << d;
    }
    for (uint32_t i = 0; i < p.n; i++)
        for (uint32_t d = 0; d < n; d++)
            if ((p.members[i] >> d & 1) != 0)
                domains[d].island = i;
    return parted;
}
