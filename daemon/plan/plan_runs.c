/* How much there is to move, the lower bound of the busiest device, and runs: the units of
 * assignment.
 *
 * The lower bound (planner.h) does not depend on the strategy: what a domain misses over
 * its destination devices; what a set of source devices alone holds of that over the devices of the
 * set. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_private.h"

#include "base/banned.h"

/* Runs per device at the bound, at least and at most. Finer is better balanced and wastes less time at the end, and
 * its plan is larger; so it is as fine as a number of edges allows. */
enum { LEAST_RUNS = 16, MOST_RUNS = 512, EDGES = 1 << 14 };

/* The last part of each group's bytes is cut finer, because what is sent last decides how even the end is: like
 * guided self-scheduling, large runs first, small ones to fill up. */
enum { TAIL_PART = 8, TAIL_FINER = 8 };

static void group_bytes(struct plan *p)
{
    for (uint32_t i = 0; i < p->classes.n; i++) {
        const struct plan_class *c = &p->classes.at[i];
        for (uint32_t k = 0; k < c->n_shapes; k++) {
            const struct plan_shape *s = &p->shapes.at[p->class_shapes.at[c->first_shape + k]];
            for (uint32_t cell = 0; cell < c->n_cells; cell++)
                p->groups.at[c->first_group + cell].bytes +=
                    s->n_members * plan_cell_bytes(p, s, cell);
        }
    }
}

/* True where a holder sits in the domain. `*at` walks the holders, which are in domain order. */
static bool held_in(const struct plan *p, const struct set *source, uint32_t domain, uint32_t *at)
{
    while (*at < source->n && p->ends.at[source->first + *at].domain < domain)
        ++*at;
    return *at < source->n && p->ends.at[source->first + *at].domain == domain;
}

/* --- bound ------------------------------------------------------------------------------------ */

struct bound {
    uint64_t *missing;   /* per domain */
    uint32_t *devices;   /* destination devices per domain */
    uint64_t *set_bytes; /* per set: bytes that leave its devices at least once */
    uint64_t unique;     /* bytes that some domain misses, once */
    uint64_t needed;     /* the same, for each domain that misses them */
};

static void count_missing(struct plan *p, struct bound *b)
{
    for (uint32_t i = 0; i < p->groups.n; i++) {
        const struct plan_group *g = &p->groups.at[i];
        const struct set *takers = &p->sets.at[g->takers], *source = &p->sets.at[g->source];
        uint32_t at = 0, n = 0;
        for (uint32_t k = 0; k < takers->n; k++) {
            uint32_t domain = p->ends.at[takers->first + k].domain;
            if (k > 0 && p->ends.at[takers->first + k - 1].domain == domain)
                continue;
            if (held_in(p, source, domain, &at))
                continue;
            b->missing[domain] += g->bytes;
            n++;
        }
        b->needed += n * g->bytes;
        if (n > 0) {
            b->unique += g->bytes;
            b->set_bytes[g->source] += g->bytes;
        }
    }
}

/* Devices that some destination rank sits on, per domain. */
static int count_devices(struct plan *p, struct bound *b)
{
    uint8_t *seen = mem_calloc(p->topology->n_devices + 1U, 1);
    if (seen == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < p->groups.n; i++) {
        const struct set *takers = &p->sets.at[p->groups.at[i].takers];
        for (uint32_t k = 0; k < takers->n; k++)
            seen[p->ends.at[takers->first + k].device] = 1;
    }
    for (uint32_t d = 0; d < p->topology->n_devices; d++)
        b->devices[p->topology->devices[d].domain] += seen[d];
    mem_free(seen);
    return 0;
}

/* A set as a set of devices, for comparison. */
struct device_set {
    uint32_t first, n; /* into the list of devices, ascending, no repeats */
    uint64_t bytes;
};

static int compare_u32(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

static bool device_subset(const uint32_t *list, const struct device_set *a,
                          const struct device_set *b)
{
    uint32_t k = 0;
    for (uint32_t i = 0; i < a->n; i++) {
        while (k < b->n && list[b->first + k] < list[a->first + i])
            k++;
        if (k == b->n || list[b->first + k] != list[a->first + i])
            return false;
    }
    return true;
}

/* Nested sets are compared pairwise up to this many; beyond, only equal sets are merged. */
enum { NESTED_SETS = 1024 };

static uint64_t sets_bound(const uint32_t *list, struct device_set *v, uint32_t n)
{
    uint64_t bound = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bytes = v[i].bytes;
        for (uint32_t k = 0; n <= NESTED_SETS && k < n; k++)
            if (k != i && v[k].n <= v[i].n && device_subset(list, &v[k], &v[i]))
                bytes += v[k].bytes;
        uint64_t share = (bytes + v[i].n - 1) / v[i].n;
        bound = share > bound ? share : bound;
    }
    return bound;
}

struct device_sets {
    VEC(uint32_t) list;
    VEC(struct device_set) v;
    uint32_t *table;
    uint32_t table_size;
};

static uint64_t device_hash(const uint32_t *at, uint32_t n)
{
    uint64_t h = n;
    for (uint32_t i = 0; i < n; i++) {
        h = (h ^ at[i]) * 0x9E3779B97F4A7C15U;
        h ^= h >> 29;
    }
    return h;
}

static int merge_set(struct plan *p, struct device_sets *d, const struct set *s, uint64_t bytes)
{
    if (vec_reserve(&d->list, d->list.n + s->n) != 0 || vec_reserve(&d->v, d->v.n + 1) != 0)
        return RS_ENOMEM;
    uint32_t *at = d->list.at + d->list.n, n = 0;
    for (uint32_t i = 0; i < s->n; i++)
        at[i] = p->ends.at[s->first + i].device;
    qsort(at, s->n, sizeof *at, compare_u32);
    for (uint32_t i = 0; i < s->n; i++)
        if (n == 0 || at[n - 1] != at[i])
            at[n++] = at[i];
    uint64_t h = device_hash(at, n);
    uint32_t slot;
    while ((slot = d->table[h & (d->table_size - 1)]) != 0) {
        struct device_set *o = &d->v.at[slot - 1];
        if (o->n == n && memcmp(d->list.at + o->first, at, n * sizeof *at) == 0) {
            o->bytes += bytes;
            return 0;
        }
        h++;
    }
    d->v.at[d->v.n++] = (struct device_set){(uint32_t)d->list.n, n, bytes};
    d->table[h & (d->table_size - 1)] = (uint32_t)d->v.n;
    d->list.n += n;
    return 0;
}

static int source_bound(struct plan *p, const struct bound *b, uint64_t *ret)
{
    struct device_sets d = {.table_size = 1024};
    while (d.table_size < 2 * p->sets.n)
        d.table_size *= 2;
    d.table = mem_calloc(d.table_size, sizeof *d.table);
    int r = d.table == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; i < p->sets.n && r == 0; i++)
        if (b->set_bytes[i] > 0)
            r = merge_set(p, &d, &p->sets.at[i], b->set_bytes[i]);
    if (r == 0)
        *ret = sets_bound(d.list.at, d.v.at, (uint32_t)d.v.n);
    mem_free(d.table);
    mem_free(d.list.at);
    mem_free(d.v.at);
    return r;
}

static void run_size(struct plan *p, const struct bound *b, uint64_t bound)
{
    uint64_t least = p->options.least_piece_bytes > 0 ? p->options.least_piece_bytes : 1;
    uint64_t q =
        b->needed / (p->chains ? 2 * EDGES : EDGES); /* chains need few peers, hence less */
    if (q < bound / MOST_RUNS)
        q = bound / MOST_RUNS;
    if (q > bound / LEAST_RUNS)
        q = bound / LEAST_RUNS;
    p->run_bytes = q < least ? least : q;
    p->piece_bytes = p->run_bytes / 4 < least ? least : p->run_bytes / 4;
}

static uint64_t source_devices(const struct plan *p, const struct bound *b, uint8_t *seen)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < p->sets.n; i++)
        for (uint32_t k = 0; b->set_bytes[i] > 0 && k < p->sets.at[i].n; k++) {
            uint8_t *s = &seen[p->ends.at[p->sets.at[i].first + k].device];
            n += *s == 0;
            *s = 1;
        }
    return n;
}

/* Relays form chains where sources could at most send this part of what the domains need. */
enum { CHAIN_FROM = 2 };

static int choose_chains(struct plan *p, const struct bound *b, uint64_t bound)
{
    uint8_t *seen = mem_calloc(p->topology->n_devices + 1U, 1);
    if (seen == NULL)
        return RS_ENOMEM;
    uint64_t n = source_devices(p, b, seen);
    p->chains = n > 0 && bound > 0 && b->needed / n / bound >= CHAIN_FROM;
    mem_free(seen);
    return 0;
}

/* Below this a message's fixed cost shows (some 10 us against 20 us of wire at 50 GB/s). Each hop of a chain costs two
 * messages' time, though, and rounds are a message long: where bytes are handed on from domain to domain messages are
 * this part of the bound at most, down to what is still long beside its own frame. */
enum { LEAST_MESSAGE_BYTES = 1 << 20, LEAST_RELAYED_BYTES = 1 << 16, RELAYED_PART = 256 };

/* Greatest message, and the nominal distance of cuts, such that rounding a cut down to a row or an
 * element never makes a message longer than that. */
static void message_size(struct plan *p, uint64_t bound)
{
    uint64_t size = p->run_bytes / TAIL_FINER, least = LEAST_MESSAGE_BYTES;
    uint64_t relayed = bound / RELAYED_PART;
    if (p->chains && p->options.relay && relayed < least)
        least = relayed < LEAST_RELAYED_BYTES ? LEAST_RELAYED_BYTES : relayed;
    if (size < least)
        size = least;
    p->message_bytes = size < p->options.chunk_bytes ? size : p->options.chunk_bytes;
    p->cut_bytes = p->message_bytes / 16 < 8 ? 8 : p->message_bytes / 16;
    p->message_step = p->message_bytes - p->cut_bytes;
}

static int find_bound(struct plan *p)
{
    struct bound b = {.missing = mem_calloc(p->topology->n_domains + 1U, sizeof(uint64_t)),
                      .devices = mem_calloc(p->topology->n_domains + 1U, sizeof(uint32_t)),
                      .set_bytes = mem_calloc(p->sets.n + 1, sizeof(uint64_t))};
    uint64_t bound = 0;
    int r = RS_ENOMEM;
    if (b.missing != NULL && b.devices != NULL && b.set_bytes != NULL)
        r = count_devices(p, &b);
    if (r == 0) {
        count_missing(p, &b);
        r = source_bound(p, &b, &bound);
    }
    for (uint32_t d = 0; r == 0 && d < p->topology->n_domains; d++) {
        p->totals.network_bytes_minimum += b.missing[d];
        if (b.devices[d] == 0)
            continue;
        uint64_t share = (b.missing[d] + b.devices[d] - 1) / b.devices[d];
        bound = share > bound ? share : bound;
    }
    if (r == 0)
        r = choose_chains(p, &b, bound);
    if (r == 0)
        run_size(p, &b, bound);
    p->totals.lower_bound = bound;
    message_size(p, bound);
    mem_free(b.missing);
    mem_free(b.devices);
    mem_free(b.set_bytes);
    return r;
}

/* --- runs ------------------------------------------------------------------------------------- */

/* Sums of pieces per cell, for shapes that have a split cell. */
static int number_pieces(struct plan *p, struct plan_shape *s)
{
    const struct plan_class *c = &p->classes.at[s->class];
    bool split = false;
    if (c->strategy == PLAN_GATHER_BROADCAST) /* sent as tensors, not as runs */
        return 0;
    for (uint32_t cell = 0; cell < c->n_cells && !split; cell++)
        split = plan_cell_bytes(p, s, cell) > p->piece_bytes && plan_cell_pieces(p, s, cell) > 1;
    if (!split)
        return 0;
    if (vec_reserve(&p->pieces, p->pieces.n + c->n_cells + 1) != 0)
        return RS_ENOMEM;
    s->first_piece = (uint32_t)p->pieces.n;
    uint64_t sum = 0;
    for (uint32_t cell = 0; cell < c->n_cells; cell++) {
        p->pieces.at[p->pieces.n++] = (uint32_t)sum;
        sum += plan_cell_pieces(p, s, cell);
    }
    p->pieces.at[p->pieces.n++] = (uint32_t)sum;
    return sum > UINT32_MAX ? RS_EEXHAUSTED : 0;
}

static uint32_t pieces_of(const struct plan *p, const struct plan_shape *s, uint32_t cell)
{
    if (s->first_piece == NONE32)
        return 1;
    const uint32_t *sum = p->pieces.at + s->first_piece + cell;
    return sum[1] - sum[0];
}

static int add_run(struct plan *p, const struct plan_run *r)
{
    if (p->runs.n >= INT32_MAX)
        return RS_EEXHAUSTED;
    if (vec_reserve(&p->runs, p->runs.n + 1) != 0)
        return RS_ENOMEM;
    p->runs.at[p->runs.n++] = *r;
    return 0;
}

/* The runs of one group under construction. */
struct cutter {
    struct plan *p;
    struct plan_run open;
    uint64_t left; /* bytes of the group that are in no closed run */
    uint64_t tail; /* from here on finer */
};

static int flush(struct cutter *c)
{
    int r = c->open.count > 0 ? add_run(c->p, &c->open) : 0;
    c->left -= c->open.bytes;
    c->open.count = 0;
    c->open.bytes = 0;
    return r;
}

static int split_members(struct cutter *c, const struct plan_shape *s, uint32_t cell,
                         uint32_t n_pieces)
{
    int r = flush(c);
    for (uint32_t m = 0; m < s->n_members && r == 0; m++)
        for (uint32_t k = 0; k < n_pieces && r == 0; k++) {
            struct plan_run run = {.group = c->open.group,
                                   .member = s->first_member + m,
                                   .count = 1,
                                   .piece = k,
                                   .bytes = plan_piece_bytes(c->p, s, cell, k)};
            c->left -= run.bytes;
            r = add_run(c->p, &run);
        }
    return r;
}

/* As many whole members as fit to the open run; a member that fits to none opens the next one. */
static int whole_members(struct cutter *c, const struct plan_shape *s, uint64_t bytes)
{
    struct plan_run *open = &c->open;
    for (uint32_t m = 0; m < s->n_members;) {
        uint64_t size = c->left > c->tail ? c->p->run_bytes : c->p->run_bytes / TAIL_FINER;
        uint64_t room = size > open->bytes ? size - open->bytes : 0;
        uint64_t fit = room / bytes;
        if (fit == 0 && open->count > 0) {
            int r = flush(c);
            if (r != 0)
                return r;
            continue;
        }
        fit = fit == 0 ? 1 : fit;
        if (fit > s->n_members - m)
            fit = s->n_members - m;
        if (open->count == 0)
            open->member = s->first_member + m;
        open->count += (uint32_t)fit;
        open->bytes += fit * bytes;
        m += (uint32_t)fit;
    }
    return 0;
}

static int group_runs(struct plan *p, uint32_t group)
{
    struct plan_group *g = &p->groups.at[group];
    const struct plan_class *c = &p->classes.at[g->class];
    struct cutter cut = {.p = p,
                         .open = {.group = group, .piece = NONE32},
                         .left = g->bytes,
                         .tail = g->bytes / TAIL_PART};
    int r = 0;
    g->first_run = (uint32_t)p->runs.n;
    if (c->strategy == PLAN_GATHER_BROADCAST)
        return 0;
    for (uint32_t k = 0; k < c->n_shapes && r == 0; k++) {
        const struct plan_shape *s = &p->shapes.at[p->class_shapes.at[c->first_shape + k]];
        uint32_t n_pieces = pieces_of(p, s, g->cell);
        r = n_pieces == 1 ? whole_members(&cut, s, plan_cell_bytes(p, s, g->cell))
                          : split_members(&cut, s, g->cell, n_pieces);
    }
    if (r == 0)
        r = flush(&cut);
    g->n_runs = (uint32_t)p->runs.n - g->first_run;
    return r;
}

/* Global cell numbers: units in canonical order, then cells, then pieces. */
static void number_cells(struct plan *p)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < p->units.n; i++) {
        struct plan_unit *u = &p->units.at[i];
        const struct plan_shape *s = &p->shapes.at[u->shape];
        uint32_t n_cells = p->classes.at[s->class].n_cells;
        u->first_cell = n;
        n += s->first_piece == NONE32 ? n_cells : p->pieces.at[s->first_piece + n_cells];
    }
    p->totals.cells = n;
}

int plan_runs(struct plan *p, struct err *e)
{
    group_bytes(p);
    int r = find_bound(p);
    for (uint32_t i = 0; i < p->shapes.n && r == 0; i++)
        r = number_pieces(p, &p->shapes.at[i]);
    for (uint32_t i = 0; i < p->groups.n && r == 0; i++)
        r = group_runs(p, i);
    if (r != 0)
        return err_set(e, r, r == RS_ENOMEM ? "out of memory" : "more than 2^31 runs");
    number_cells(p);
    return 0;
}
