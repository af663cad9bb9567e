#include "exec/pairs.h"

#include <stdio.h>
#include <string.h>

#include "device/device_cuda.h"
#include "exec/attempt.h"

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
    memset(p->reached, 0, sizeof p->reached);
    for (uint32_t a = 0; a < p->n_devices; a++)
        for (uint32_t b = 0; b < p->n_devices; b++)
            if (reach(p, a, b))
                p->reached[a] |= UINT64_C(1) << b;
    if (kept_by(p) == NULL)
        memcpy(p->copied, p->reached, sizeof p->copied);
}

/* Memory that only those GPUs touch which reach the place's own. */
static bool on_gpu(const struct attempt *a, const struct place *place)
{
    const struct worker *w = place->worker;
    bool any = w == NULL && a->plane->nccl != NULL;
    for (size_t i = 0; w != NULL && i < w->n_segments && !any; i++)
        any = w->segments[i].imported;
    return any;
}

/* What the device itself writes of an item. */
static int check_item(const struct attempt *a, uint32_t device, uint32_t item, struct err *e)
{
    const uint32_t *list = &a->program.lists[program_item(&a->program, item).places];
    for (uint32_t i = 1; i <= list[0]; i++) {
        const struct place *to = &a->places[list[i]];
        if ((a->plane->reached[device] >> to->device & 1) == 0 && on_gpu(a, to))
            return err_set(e, RS_EPRECOND,
                           "device %u can't write into memory of device %u: there is no peer "
                           "access between them; put them into two domains ([devices] domains)",
                           device, to->device);
    }
    return 0;
}

int pairs_check(const struct attempt *a, struct err *e)
{
    const struct program *p = &a->program;
    bool all = true;
    int r = 0;
    for (uint32_t d = 0; d < p->n_devices; d++)
        for (uint32_t k = 0; k < p->n_devices; k++)
            all = all && (a->plane->reached[d] >> k & 1) != 0;
    for (uint32_t s = 0; s < p->n_streams && !all && r == 0; s++)
        for (uint32_t i = 0; i < p->streams[s].n_items && p->streams[s].send == 0 && r == 0; i++)
            r = check_item(a, p->streams[s].device, p->streams[s].first_item + i, e);
    for (uint32_t d = 0; d < p->n_devices && !all && r == 0; d++)
        for (uint32_t i = 0; i < p->devices[d].n_copies && r == 0; i++)
            r = check_item(a, d, p->devices[d].first_copy + i, e);
    return r;
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
