/* Which segments of which workers this data plane has mapped, and where.
 *
 * A node has tens of workers and a worker few segments, so both are arrays that are searched. */
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "memory/memory.h"

#include "base/banned.h"

struct mapping {
    struct device *device;
    uint64_t bytes;
    bool used, imported;
    enum device_import_kind kind; /* of what is imported: */
    void *allocation;
    uint64_t allocation_bytes;
};

struct worker_segments {
    uint64_t worker;
    struct mapping *mappings;
    void **bases; /* by segment number; NULL: not mapped, or of no bytes */
    size_t mappings_capacity, bases_capacity;
    uint32_t n; /* greatest number + 1 */
};

struct segment_table {
    struct worker_segments *workers;
    size_t n_workers, capacity;
};

struct segment_table *segment_table_new(void)
{
    return mem_zalloc(sizeof(struct segment_table));
}

static void mapping_end(const struct mapping *m, void *base)
{
    if (m->imported)
        device_import_close(m->device, m->kind, m->allocation, m->allocation_bytes);
    else if (base != NULL)
        device_unmap(m->device, base, m->bytes);
}

static uint32_t unmap_worker(struct worker_segments *w)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n; i++) {
        if (!w->mappings[i].used)
            continue;
        mapping_end(&w->mappings[i], w->bases[i]);
        n++;
    }
    mem_free(w->mappings);
    mem_free(w->bases);
    return n;
}

void segment_table_free(struct segment_table *t)
{
    if (t == NULL)
        return;
    for (size_t i = 0; i < t->n_workers; i++)
        (void)unmap_worker(&t->workers[i]);
    mem_free(t->workers);
    mem_free(t);
}

static struct worker_segments *find(const struct segment_table *t, uint64_t worker)
{
    for (size_t i = 0; i < t->n_workers; i++)
        if (t->workers[i].worker == worker)
            return &t->workers[i];
    return NULL;
}

/* NULL when memory is out. */
static struct worker_segments *find_or_add(struct segment_table *t, uint64_t worker)
{
    struct worker_segments *w = find(t, worker);
    if (w != NULL)
        return w;
    void *array = t->workers;
    if (mem_grow(&array, &t->capacity, t->n_workers + 1, sizeof *t->workers) != 0)
        return NULL;
    t->workers = array;
    w = &t->workers[t->n_workers++];
    *w = (struct worker_segments){.worker = worker};
    return w;
}

/* Room for `segment`; new places are empty. */
static int reserve(struct worker_segments *w, uint32_t segment)
{
    if (segment < w->n)
        return 0;
    void *mappings = w->mappings, *bases = w->bases;
    int r = mem_grow(&mappings, &w->mappings_capacity, segment + 1U, sizeof *w->mappings);
    w->mappings = mappings;
    if (r == 0)
        r = mem_grow(&bases, &w->bases_capacity, segment + 1U, sizeof *w->bases);
    w->bases = bases;
    if (r != 0)
        return r;
    for (; w->n <= segment; w->n++) {
        w->mappings[w->n] = (struct mapping){0};
        w->bases[w->n] = NULL;
    }
    return 0;
}

/* A free place of that number. */
static int place(struct segment_table *t, uint64_t worker, uint32_t segment,
                 struct worker_segments **ret, struct err *e)
{
    if (segment >= SEGMENT_MAX_PER_WORKER)
        return err_set(e, RS_EINVAL, "segment %u: a worker has at most %d", segment,
                       SEGMENT_MAX_PER_WORKER);
    struct worker_segments *w = find_or_add(t, worker);
    if (w == NULL || reserve(w, segment) != 0)
        return err_set(e, RS_ENOMEM, "segment %u: out of memory", segment);
    if (w->mappings[segment].used)
        return err_set(e, RS_EEXIST, "segment %u is mapped already", segment);
    *ret = w;
    return 0;
}

int segment_table_map(struct segment_table *t, struct device *d, uint64_t worker, uint32_t segment,
                      int fd, uint64_t bytes, bool writable, struct err *e)
{
    struct worker_segments *w;
    int r = place(t, worker, segment, &w, e);
    if (r != 0)
        return r;
    if (bytes == 0 && fd >= 0)
        (void)close(fd);
    r = bytes == 0 ? 0 : device_map(d, fd, bytes, writable, &w->bases[segment], e);
    if (r != 0)
        return err_prefix(e, r, "segment %u", segment);
    w->mappings[segment] = (struct mapping){.device = d, .bytes = bytes, .used = true};
    return 0;
}

int segment_table_import(struct segment_table *t, struct device *d, uint64_t worker,
                         uint32_t segment, const struct device_import *from, uint64_t offset,
                         uint64_t bytes, struct err *e)
{
    struct worker_segments *w;
    void *p = NULL;
    if (offset > from->bytes || bytes > from->bytes - offset)
        return err_set(e, RS_EINVAL,
                       "segment %u: %" PRIu64 " bytes from %" PRIu64 " on leave the allocation of "
                       "%zu",
                       segment, bytes, offset, from->bytes);
    int r = place(t, worker, segment, &w, e);
    if (r == 0)
        r = device_import(d, from, &p, e);
    if (r != 0)
        return err_prefix(e, r, "segment %u", segment);
    w->bases[segment] = (char *)p + offset;
    w->mappings[segment] = (struct mapping){.device = d,
                                            .bytes = bytes,
                                            .used = true,
                                            .imported = true,
                                            .kind = from->kind,
                                            .allocation = p,
                                            .allocation_bytes = from->bytes};
    return 0;
}

void *const *segment_table_bases(const struct segment_table *t, uint64_t worker, uint32_t *ret_n)
{
    const struct worker_segments *w = find(t, worker);
    *ret_n = w == NULL ? 0 : w->n;
    return w == NULL ? NULL : w->bases;
}

uint64_t segment_table_imported_bytes(const struct segment_table *t, const struct device *d)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < t->n_workers; i++)
        for (uint32_t k = 0; k < t->workers[i].n; k++)
            if (t->workers[i].mappings[k].imported && t->workers[i].mappings[k].device == d)
                bytes += t->workers[i].mappings[k].bytes;
    return bytes;
}

uint32_t segment_table_unmap(struct segment_table *t, uint64_t worker)
{
    struct worker_segments *w = find(t, worker);
    if (w == NULL)
        return 0;
    uint32_t n = unmap_worker(w);
    *w = t->workers[--t->n_workers];
    return n;
}
