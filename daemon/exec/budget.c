#include "exec/budget.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "exec/plane.h"

#include "base/banned.h"

#define MIB (UINT64_C(1) << 20)

/* Until a context has been measured: of a data center GPU with the kernels of reshard and NCCL
 * loaded lazily, rounded up. */
#define CONTEXT_BYTES (512 * MIB)
/* Of NCCL 2.28: what a connection between two GPUs of a node has per channel beside its buffer of
 * NCCL_BUFFSIZE (LL: 8 lines x 512 threads x 8 steps x 16 B; LL128: 120 x 640 x 8 x 8 B); what the
 * network has per channel and direction (16 steps of 512 KiB, shared by all peers); the communicator's
 * own tables. */
#define BUFFSIZE_BYTES (4 * MIB)
#define SMALL_BYTES    (UINT64_C(8) * 512 * 8 * 16 + UINT64_C(120) * 640 * 8 * 8)
#define NETWORK_BYTES  (UINT64_C(2) * 16 * 512 * 1024)
#define TABLES_BYTES   (16 * MIB)
enum { DEFAULT_CTAS = 8, STREAM_BYTES = 64 << 10 };

static const char *const part_names[] = {[BUDGET_CONTEXT] = "context",
                                         [BUDGET_COMMUNICATOR] = "communicators",
                                         [BUDGET_WORK] = "streams",
                                         [BUDGET_RING] = "staging ring",
                                         [BUDGET_SCRATCH] = "scratch"};

uint32_t budget_ways(uint32_t n_threads, uint32_t n_devices)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t threads = n_threads != 0 ? n_threads : cores > 0 ? (uint32_t)cores : 1;
    uint32_t n = threads / n_devices;
    return n < 1 ? 1 : n > PLANE_MAX_WAYS ? PLANE_MAX_WAYS : n;
}

static uint64_t buffsize(void)
{
    const char *text = getenv("NCCL_BUFFSIZE");
    uint64_t bytes = text == NULL ? 0 : strtoull(text, NULL, 10);
    return bytes > 0 && bytes <= 1024 * MIB ? bytes : BUFFSIZE_BYTES;
}

uint64_t budget_communicator_bytes(uint32_t n_local, bool elsewhere, uint32_t max_ctas)
{
    uint64_t channels = max_ctas != 0 ? max_ctas : DEFAULT_CTAS;
    uint64_t peers = n_local > 1 ? n_local - 1 : 0;
    if (peers == 0 && !elsewhere)
        return TABLES_BYTES;
    return TABLES_BYTES +
           channels * (peers * (buffsize() + SMALL_BYTES) + (elsewhere ? NETWORK_BYTES : 0));
}

/* Each way has two streams with a work buffer and a bounce buffer, and there are three more streams
 * (data_plane.c). Allocated when first needed, and never more. */
static uint64_t work_bytes(const struct budget_settings *s)
{
    uint64_t ways = budget_ways(s->n_threads, s->n_devices);
    return ways * (2 * (PLANE_WORK_BYTES + (uint64_t)STREAM_BYTES) + BOUNCE_BYTES) +
           PLANE_WORK_BYTES + 3 * (uint64_t)STREAM_BYTES;
}

uint64_t budget_total(const struct budget *b)
{
    uint64_t all = 0;
    for (unsigned i = 0; i < BUDGET_PARTS; i++)
        all += b->bytes[i];
    return all;
}

static int refuse(const struct budget *b, struct err *e)
{
    char parts[256] = "";
    size_t at = 0;
    for (unsigned i = 0; i < BUDGET_PARTS; i++)
        if (b->bytes[i] > 0 && at < sizeof parts)
            at +=
                (size_t)snprintf(parts + at, sizeof parts - at, "%s%s %" PRIu64 " MiB%s",
                                 at == 0 ? "" : ", ", part_names[i], (b->bytes[i] + MIB - 1) / MIB,
                                 i > BUDGET_COMMUNICATOR ? ""
                                 : b->measured[i]        ? " (measured)"
                                                         : " (estimated)");
    return err_set(e, RS_EEXHAUSTED,
                   "max_gpu_memory_bytes: %" PRIu64 " MiB are allowed, %" PRIu64
                   " MiB needed: %s: raise it, or lower ring_slots, chunk_bytes, threads or [nccl] "
                   "max_ctas",
                   b->limit_bytes / MIB, (budget_total(b) + MIB - 1) / MIB, parts);
}

static bool fits(const struct budget *b)
{
    return b->limit_bytes == 0 || budget_total(b) <= b->limit_bytes;
}

static void note_peak(struct budget *b)
{
    uint64_t now = budget_total(b);
    b->peak_bytes = now > b->peak_bytes ? now : b->peak_bytes;
}

static struct budget least(const struct budget_settings *s)
{
    return (struct budget){.limit_bytes = s->limit_bytes,
                           .bytes = {[BUDGET_CONTEXT] = CONTEXT_BYTES,
                                     [BUDGET_COMMUNICATOR] = budget_communicator_bytes(
                                         s->n_devices, false, s->max_ctas),
                                     [BUDGET_WORK] = work_bytes(s),
                                     [BUDGET_RING] = s->ring_slots * s->slot_bytes}};
}

int budget_check(const struct budget_settings *s, struct err *e)
{
    struct budget b = least(s);
    return fits(&b) ? 0 : refuse(&b, e);
}

int budget_open(const struct budget_settings *s, struct budget *ret, struct err *e)
{
    struct budget b = least(s);
    if (!fits(&b))
        return refuse(&b, e);
    b.bytes[BUDGET_COMMUNICATOR] = 0;
    b.bytes[BUDGET_RING] = 0;
    note_peak(&b);
    *ret = b;
    return 0;
}

int budget_take(struct budget *b, enum budget_part part, uint64_t bytes, struct err *e)
{
    struct budget next = *b;
    next.bytes[part] += bytes;
    if (!fits(&next))
        return refuse(&next, e);
    note_peak(&next);
    *b = next;
    return 0;
}

void budget_give(struct budget *b, enum budget_part part, uint64_t bytes)
{
    rs_assert(b->bytes[part] >= bytes);
    b->bytes[part] -= bytes;
}

int budget_measured(struct budget *b, enum budget_part part, uint64_t bytes, struct err *e)
{
    if (bytes == 0 || (part == BUDGET_COMMUNICATOR && bytes < b->bytes[part]))
        return 0;
    if (!b->measured[part] && bytes < b->bytes[part]) /* so much was never taken */
        b->peak_bytes -= b->bytes[part] - bytes;
    b->bytes[part] = bytes;
    b->measured[part] = true;
    note_peak(b);
    return fits(b) ? 0 : refuse(b, e);
}
