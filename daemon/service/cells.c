#include "service/cells.h"

#include "base/mem.h"
#include "base/random.h"

#include "base/banned.h"

enum { FIRST_SLOTS = 1024, AHEAD = 12 };

/* Open addressing, linear; a slot is free where `used` is not set. Two lie in a line of the cache. */
struct slot {
    struct cell_print print;
    uint32_t dispute; /* the newest about this cell, + 1; 0: there is none */
    bool used;
};

/* A destination that differs from the slot's, itself a destination's. */
struct dispute {
    struct cell_print print;
    size_t next; /* about the same cell, + 1; 0: it is the last */
};

struct cells {
    struct slot *slots;
    size_t n_slots, n_used; /* n_slots: a power of two, or 0 */
    size_t n_untold;        /* slots without a source's print */
    struct dispute *disputes;
    size_t n_disputes, disputes_capacity;
    struct cells_difference *wrong;
    size_t n_wrong, wrong_capacity;
    bool more;
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
    mem_free(c->wrong);
    mem_free(c);
}

const struct cells_difference *cells_wrong(const struct cells *c, size_t *ret_n)
{
    *ret_n = c->n_wrong;
    return c->wrong;
}

bool cells_wrong_more(const struct cells *c)
{
    return c->more;
}

static bool is_source(const struct cell_print *p)
{
    return p->layout == 0;
}

static size_t home_of(size_t n_slots, uint64_t cell)
{
    uint64_t state = cell;
    return (size_t)random_next(&state) & (n_slots - 1);
}

/* The slot of that cell, or the free one where it belongs. */
static struct slot *slot_of(struct slot *slots, size_t n_slots, uint64_t cell)
{
    size_t i = home_of(n_slots, cell);
    while (slots[i].used && slots[i].print.cell != cell)
        i = (i + 1) & (n_slots - 1);
    return &slots[i];
}

/* For n more, and a free slot beyond one in four. */
static int room_make(struct cells *c, size_t n_more)
{
    size_t n = c->n_slots == 0 ? FIRST_SLOTS : c->n_slots;
    while ((c->n_used + n_more) * 4 > n * 3)
        n *= 2;
    if (n == c->n_slots)
        return 0;
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

static int differ(struct cells *c, const struct cell_print *bad, const struct cell_print *good)
{
    void *wrong = c->wrong;
    if (c->n_wrong == CELLS_MOST_WRONG) {
        c->more = true;
        return 0;
    }
    if (mem_grow(&wrong, &c->wrong_capacity, c->n_wrong + 1, sizeof *c->wrong) != 0)
        return RS_ENOMEM;
    c->wrong = wrong;
    c->wrong[c->n_wrong++] = (struct cells_difference){.bad = *bad, .good = *good};
    return 0;
}

static int dispute_add(struct cells *c, struct slot *slot, const struct cell_print *p)
{
    void *disputes = c->disputes;
    if (c->n_disputes == UINT32_MAX - 1 ||
        mem_grow(&disputes, &c->disputes_capacity, c->n_disputes + 1, sizeof *c->disputes) != 0)
        return RS_ENOMEM;
    c->disputes = disputes;
    c->disputes[c->n_disputes++] = (struct dispute){.print = *p, .next = slot->dispute};
    slot->dispute = (uint32_t)c->n_disputes;
    return 0;
}

/* A source's print where only destinations' were: all of them are held against it. */
static int source_take(struct cells *c, struct slot *slot, const struct cell_print *p)
{
    struct cell_print before = slot->print;
    int r = before.fingerprint != p->fingerprint ? differ(c, &before, p) : 0;
    for (size_t i = slot->dispute; r == 0 && i != 0; i = c->disputes[i - 1].next)
        if (c->disputes[i - 1].print.fingerprint != p->fingerprint)
            r = differ(c, &c->disputes[i - 1].print, p);
    slot->print = *p;
    slot->dispute = 0;
    c->n_untold--;
    return r;
}

static int print_merge(struct cells *c, const struct cell_print *p)
{
    struct slot *slot = slot_of(c->slots, c->n_slots, p->cell);
    if (!slot->used) {
        *slot = (struct slot){.print = *p, .used = true};
        c->n_used++;
        c->n_untold += !is_source(p);
        return 0;
    }
    if (is_source(p) && !is_source(&slot->print))
        return source_take(c, slot, p);
    if (slot->print.fingerprint == p->fingerprint)
        return 0;
    return is_source(&slot->print) ? differ(c, p, &slot->print) : dispute_add(c, slot, p);
}

/* What has been found since there were n_before. */
static int found(const struct cells *c, size_t n_before, struct cells_difference *ret)
{
    if (c->n_wrong == n_before)
        return 0;
    *ret = c->wrong[n_before];
    return RS_EDATALOSS;
}

int cells_merge(struct cells *c, const struct cell_print *prints, size_t n,
                struct cells_difference *ret)
{
    size_t n_before = c->n_wrong;
    int r = room_make(c, n);
    for (size_t i = 0; r == 0 && i < n; i++) {
        if (i + AHEAD < n) /* else each waits for memory */
            __builtin_prefetch(&c->slots[home_of(c->n_slots, prints[i + AHEAD].cell)], 1);
        r = print_merge(c, &prints[i]);
    }
    return r == 0 ? found(c, n_before, ret) : r;
}

bool cells_sent(const struct cells *c, uint64_t cell, uint32_t n, uint64_t *ret_fingerprints)
{
    if (c->n_slots == 0)
        return n == 0;
    for (uint32_t i = 0; i < n; i++)
        __builtin_prefetch(&c->slots[home_of(c->n_slots, cell + i)]);
    for (uint32_t i = 0; i < n; i++) {
        const struct slot *slot = slot_of(c->slots, c->n_slots, cell + i);
        if (!slot->used || !is_source(&slot->print))
            return false;
        ret_fingerprints[i] = slot->print.fingerprint;
    }
    return true;
}

/* Which of them is right nobody knows: none of them is believed. */
static int slot_settle(struct cells *c, struct slot *slot)
{
    int r = 0;
    if (slot->dispute == 0)
        return 0;
    for (size_t i = slot->dispute; r == 0 && i != 0; i = c->disputes[i - 1].next)
        r = differ(c, &c->disputes[i - 1].print, &slot->print);
    if (r == 0)
        r = differ(c, &slot->print, &c->disputes[slot->dispute - 1].print);
    slot->dispute = 0;
    return r;
}

int cells_settle(struct cells *c, struct cells_difference *ret)
{
    size_t n_before = c->n_wrong;
    int r = 0;
    for (size_t i = 0; r == 0 && c->n_disputes > 0 && i < c->n_slots; i++)
        r = slot_settle(c, &c->slots[i]);
    return r == 0 ? found(c, n_before, ret) : r;
}

bool cells_untold(const struct cells *c, struct cell_print *ret)
{
    for (size_t i = 0; c->n_untold > 0 && i < c->n_slots; i++)
        if (c->slots[i].used && !is_source(&c->slots[i].print)) {
            *ret = c->slots[i].print;
            return true;
        }
    return false;
}
