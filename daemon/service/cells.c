#include "service/cells.h"

#include "base/mem.h"
#include "base/random.h"

#include "base/banned.h"

enum { FIRST_SLOTS = 1024 };

/* Open addressing, linear; a slot is free where `used` is not set. */
struct slot {
    struct cell_print print;
    bool used;
};

struct cells {
    struct slot *slots;
    size_t n_slots, n_used; /* n_slots: a power of two, or 0 */
    struct cell_print
        *disputes; /* destinations that differ from the slot's, itself a destination's */
    size_t n_disputes, disputes_capacity;
};

struct cells *cells_new(void)
{
    return mem_zalloc(sizeof(struct cells));
}

void cells_free(struct cells *c)
{
    if (c == NULL)
        return;
    mem_free(c->slots);
    mem_free(c->disputes);
    mem_free(c);
}

static bool is_source(const struct cell_print *p)
{
    return p->layout == 0;
}

/* The slot of that cell, or the free one where it belongs. */
static struct slot *slot_of(struct slot *slots, size_t n_slots, uint64_t cell)
{
    uint64_t state = cell;
    size_t i = (size_t)random_next(&state) & (n_slots - 1);
    while (slots[i].used && slots[i].print.cell != cell)
        i = (i + 1) & (n_slots - 1);
    return &slots[i];
}

/* Keeps a free slot beyond one in four. */
static int room_make(struct cells *c)
{
    if ((c->n_used + 1) * 4 <= c->n_slots * 3)
        return 0;
    size_t n = c->n_slots == 0 ? FIRST_SLOTS : c->n_slots * 2;
    struct slot *slots = mem_calloc(n, sizeof *slots);
    if (slots == NULL)
        return RS_ENOMEM;
    for (size_t i = 0; i < c->n_slots; i++)
        if (c->slots[i].used)
            *slot_of(slots, n, c->slots[i].print.cell) = c->slots[i];
    mem_free(c->slots);
    c->slots = slots;
    c->n_slots = n;
    return 0;
}

static int differ(const struct cell_print *bad, const struct cell_print *good,
                  struct cells_difference *ret)
{
    *ret = (struct cells_difference){.bad = *bad, .good = *good};
    return RS_EDATALOSS;
}

static int dispute_add(struct cells *c, const struct cell_print *p)
{
    void *disputes = c->disputes;
    if (mem_grow(&disputes, &c->disputes_capacity, c->n_disputes + 1, sizeof *c->disputes) != 0)
        return RS_ENOMEM;
    c->disputes = disputes;
    c->disputes[c->n_disputes++] = *p;
    return 0;
}

/* A source's print where only destinations' were: all of them are held against it. */
static int source_take(struct cells *c, struct slot *slot, const struct cell_print *p,
                       struct cells_difference *ret)
{
    struct cell_print before = slot->print;
    slot->print = *p;
    if (before.fingerprint != p->fingerprint)
        return differ(&before, p, ret);
    for (size_t i = 0; i < c->n_disputes;
         i++) /* each of them differs from the slot's, which is right */
        if (c->disputes[i].cell == p->cell)
            return differ(&c->disputes[i], p, ret);
    return 0;
}

static int print_merge(struct cells *c, const struct cell_print *p, struct cells_difference *ret)
{
    if (room_make(c) != 0)
        return RS_ENOMEM;
    struct slot *slot = slot_of(c->slots, c->n_slots, p->cell);
    if (!slot->used) {
        *slot = (struct slot){.print = *p, .used = true};
        c->n_used++;
        return 0;
    }
    if (is_source(p) && !is_source(&slot->print))
        return source_take(c, slot, p, ret);
    if (slot->print.fingerprint == p->fingerprint)
        return 0;
    return is_source(&slot->print) ? differ(p, &slot->print, ret) : dispute_add(c, p);
}

int cells_merge(struct cells *c, const struct cell_print *prints, size_t n,
                struct cells_difference *ret)
{
    int r = 0;
    for (size_t i = 0; r == 0 && i < n; i++)
        r = print_merge(c, &prints[i], ret);
    return r;
}

int cells_settle(const struct cells *c, struct cells_difference *ret)
{
    if (c->n_disputes == 0)
        return 0;
    const struct cell_print *p = &c->disputes[0];
    return differ(p, &slot_of(c->slots, c->n_slots, p->cell)->print, ret);
}
