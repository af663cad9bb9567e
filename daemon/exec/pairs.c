#include "exec/pairs.h"

#include <stdio.h>
#include <string.h>

#include "device/device_cuda.h"

#include "base/banned.h"

_Static_assert(PLANE_MAX_DEVICES <= 64, "a row is a number");

/* NULL: by copies, where devices reach each other; else why the transport has them all. */
static const char *kept_by(const struct plane *p)
{
    const struct wire_hello *h = &p->hello;
    if (p->tcp == NULL && p->nccl == NULL)
        return ""; /* it copies in memory itself */
    if (h->local_pairs == WIRE_LOCAL_TRANSPORT)
        return " (local_pairs = transport)";
    if (p->tcp != NULL && (h->network_bytes_per_s > 0 || h->domain_bytes_per_s > 0))
        return " (rates are set, which copies would not keep)";
    return NULL;
}

static bool reach(const struct plane *p, uint32_t a, uint32_t b)
{
#if defined(RS_CUDA)
    const struct device *x = p->devices[a].device, *y = p->devices[b].device;
    if (p->nccl != NULL)
        return device_cuda_reaches(x, y) && device_cuda_reaches(y, x);
#endif
    (void)p, (void)a, (void)b;
    return true;
}

void pairs_decide(struct plane *p)
{
    memset(p->copied, 0, sizeof p->copied);
    for (uint32_t a = 0; a < p->n_devices && kept_by(p) == NULL; a++)
        for (uint32_t b = 0; b < p->n_devices; b++)
            if (reach(p, a, b))
                p->copied[a] |= UINT64_C(1) << b;
}

void pairs_text(const struct plane *p, char *ret, size_t capacity)
{
    const char *why = kept_by(p), *transport = p->hello.transport;
    uint32_t n_apart = 0;
    ret[0] = '\0';
    if (p->n_devices < 2)
        return;
    if (why != NULL) {
        (void)snprintf(ret, capacity, "%s%s", transport[0] != '\0' ? transport : "memory", why);
        return;
    }
    int at = snprintf(ret, capacity, "device copies");
    for (uint32_t a = 0; a < p->n_devices; a++)
        for (uint32_t b = a + 1; b < p->n_devices; b++) {
            if (pairs_copied(p, a, b))
                continue;
            if (n_apart++ < 4 && at > 0 && (size_t)at < capacity)
                at += snprintf(ret + at, capacity - (size_t)at, "%s%u-%u",
                               n_apart == 1 ? "; without peer access by the transport: " : ", ", a,
                               b);
        }
    if (n_apart > 4 && at > 0 && (size_t)at < capacity)
        (void)snprintf(ret + at, capacity - (size_t)at, " and %u more", n_apart - 4);
}
