#include "service/memory_parts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "exec/wire.h"

#include "base/banned.h"

/* In the middle, so that places may be found on both sides; as far from it as this they are no client's of good faith. */
#define ORIGIN   (UINT64_C(1) << 61)
#define FARTHEST (UINT64_C(1) << 60)

static int parts_check(const struct memory_part *parts, uint32_t n, uint64_t allocation_bytes,
                       struct err *e)
{
    uint64_t all = 0;
    for (uint32_t i = 0; i < n; i++)
        if (parts[i].bytes == 0 || __builtin_add_overflow(all, parts[i].bytes, &all))
            return err_set(e, RS_EINVAL,
                           "VMM allocation %u of %u has %" PRIu64
                           " bytes: give the size of each mapping (cuMemGetAddressRange)",
                           i + 1, n, parts[i].bytes);
    if (all != allocation_bytes)
        return err_set(e, RS_EINVAL,
                       "%u VMM allocations are %" PRIu64 " bytes together, not %" PRIu64, n, all,
                       allocation_bytes);
    return 0;
}

int memory_parts_read(int table, uint32_t n, uint64_t allocation_bytes, struct memory_part **ret,
                      struct err *e)
{
    struct stat st;
    const void *data;
    size_t n_bytes = 0;
    const size_t wanted = n * sizeof(struct memory_part);
    if (fstat(table, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != wanted)
        return err_set(
            e, RS_EINVAL,
            "%u descriptors of VMM allocations came: the first descriptor must be a memfd "
            "of %zu bytes that says the size of each",
            n, wanted);
    if (wire_map_fd(table, &data, &n_bytes, NULL) != 0)
        return err_set(e, RS_EINVAL,
                       "the table of VMM allocations must be a memfd that is sealed against "
                       "shrinking, growing and writing");
    struct memory_part *parts = n_bytes == wanted ? mem_alloc(wanted) : NULL;
    if (parts != NULL)
        memcpy(parts, data, wanted);
    wire_unmap(data, n_bytes);
    if (parts == NULL)
        return err_set(e, RS_ENOMEM, "no memory for %u VMM allocations", n);
    int r = parts_check(parts, n, allocation_bytes, e);
    if (r != 0)
        mem_free(parts);
    else
        *ret = parts;
    return r;
}

/* --- places ------------------------------------------------------------------------------------- */

struct at {
    uint64_t allocation, bytes;
    uint64_t begins; /* from the first one's beginning on */
};

static int compare_at(const void *a, const void *b)
{
    const struct at *x = a, *y = b;
    return (x->allocation > y->allocation) - (x->allocation < y->allocation);
}

/* Those that have a number, in its order. Returns how many, or RS_EINVAL. */
static int sort_parts(const struct memory_place *p, struct at *ret, struct err *e)
{
    uint64_t begins = 0;
    int n = 0;
    for (uint32_t i = 0; i < p->n_parts; begins += p->parts[i++].bytes)
        if (p->parts[i].allocation != 0)
            ret[n++] = (struct at){p->parts[i].allocation, p->parts[i].bytes, begins};
    qsort(ret, (size_t)n, sizeof *ret, compare_at);
    for (int i = 1; i < n; i++)
        if (ret[i].allocation == ret[i - 1].allocation)
            return err_set(e, RS_EINVAL,
                           "the VMM allocation of number %" PRIu64
                           " comes twice in one segment: hand it over once",
                           ret[i].allocation);
    return n;
}

static int disagree(uint64_t allocation, struct err *e)
{
    return err_set(
        e, RS_EINVAL,
        "the VMM allocation of number %" PRIu64
        " has another size or other neighbours in a segment that was handed over before: "
        "free that segment first, or give each allocation a number of its own",
        allocation);
}

/* Where `one` must begin in the other's memory, by an allocation that both have. 1: there is one; 0: none. */
static int base_beside(const struct at *mine, int n, const struct memory_place *other,
                       uint64_t *ret_base, struct err *e)
{
    uint64_t begins = 0;
    int found = 0;
    for (uint32_t i = 0; i < other->n_parts; begins += other->parts[i++].bytes) {
        struct at key = {.allocation = other->parts[i].allocation};
        const struct at *same = bsearch(&key, mine, (size_t)n, sizeof *mine, compare_at);
        if (same == NULL)
            continue;
        uint64_t base = other->base + begins - same->begins;
        if (same->bytes != other->parts[i].bytes || (found == 1 && base != *ret_base) ||
            base < ORIGIN - FARTHEST || base > ORIGIN + FARTHEST)
            return disagree(key.allocation, e);
        *ret_base = base;
        found = 1;
    }
    return found;
}

/* All places of `from` as places of `to`, moved by so much. */
static void join(struct memory_place *const *all, size_t n, uint64_t from, uint64_t to, uint64_t by)
{
    for (size_t i = 0; i < n; i++)
        if (all[i]->memory == from) {
            all[i]->memory = to;
            all[i]->base += by;
        }
}

/* Whether a memory can be moved by so much. */
static bool can_join(struct memory_place *const *all, size_t n, uint64_t from, uint64_t by)
{
    for (size_t i = 0; i < n; i++)
        if (all[i]->memory == from &&
            (all[i]->base + by < ORIGIN - FARTHEST || all[i]->base + by > ORIGIN + FARTHEST))
            return false;
    return true;
}

int memory_place_find(struct memory_place *one, struct memory_place *const *others, size_t n_others,
                      uint64_t fresh, struct err *e)
{
    struct at mine[MEMORY_MAX_PARTS];
    struct memory_place place = {.memory = fresh, .base = ORIGIN};
    int n = sort_parts(one, mine, e);
    for (size_t i = 0; n > 0 && i < n_others; i++) {
        uint64_t base = 0;
        int r = base_beside(mine, n, others[i], &base, e);
        if (r < 0)
            return r;
        if (r == 0)
            continue;
        if (place.memory == fresh) {
            place.memory = others[i]->memory;
            place.base = base;
        } else if (place.memory == others[i]->memory
                       ? base != place.base
                       : !can_join(others, n_others, others[i]->memory, place.base - base))
            return disagree(mine[0].allocation, e);
        else if (place.memory != others[i]->memory)
            join(others, n_others, others[i]->memory, place.memory, place.base - base);
    }
    if (n < 0)
        return n;
    one->memory = place.memory;
    one->base = place.base;
    return 0;
}
