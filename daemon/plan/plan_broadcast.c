#include "plan/plan_broadcast.h"

#include <string.h>

#include "base/banned.h"

/* --- chain ------------------------------------------------------------------------------------ */

struct chain chain_of(const struct plan *p, uint32_t gather)
{
    struct chain c = {.gather = gather, .skip = NONE32, .n_hops = (uint32_t)p->chain.n};
    uint32_t domain = p->topology->devices[gather].domain;
    for (uint32_t i = 0; i < p->chain.n; i++)
        if (p->topology->devices[p->chain.at[i]].domain == domain) {
            c.first = i;
            break;
        }
    for (uint32_t i = 0; i < p->chain.n; i++)
        if (p->chain.at[(c.first + i) % p->chain.n] == gather) {
            c.skip = i;
            c.n_hops--;
        }
    return c;
}

uint32_t chain_device(const struct plan *p, const struct chain *c, uint32_t h)
{
    if (h == 0)
        return c->gather;
    uint32_t i = h - 1 >= c->skip ? h : h - 1;
    return p->chain.at[(c->first + i) % p->chain.n];
}

static int list_chain(struct plan *p)
{
    uint32_t n = p->topology->n_devices;
    uint8_t *seen = mem_calloc(n + 1U, 1);
    uint32_t *order = mem_alloc((n + 1U) * sizeof *order);
    int r = RS_ENOMEM;
    if (seen != NULL && order != NULL)
        r = vec_reserve(&p->chain, n + 1U);
    for (uint32_t i = 0; r == 0 && i < p->groups.n; i++) {
        const struct set *s = &p->sets.at[p->groups.at[i].takers];
        for (uint32_t k = 0; k < s->n; k++)
            seen[p->ends.at[s->first + k].device] = 1;
    }
    if (r == 0) /* sites are numbered by domain first */
        r = sort_count(p->device_site, NULL, n, n + 1, order);
    for (uint32_t i = 0; r == 0 && i < n; i++)
        if (seen[order[i]])
            p->chain.at[p->chain.n++] = order[i];
    mem_free(seen);
    mem_free(order);
    return r;
}

/* --- gather device ---------------------------------------------------------------------------- */

/* Bytes that a device holds of a shape's members, added up per source set first: many cells share
 * one. */
struct holdings {
    uint64_t *of_set, *of_device;
    uint32_t *sets; /* those with bytes */
    uint32_t n_sets;
};

static int holdings_init(struct holdings *h, const struct plan *p)
{
    h->of_set = mem_calloc(p->sets.n + 1, sizeof *h->of_set);
    h->of_device = mem_calloc(p->topology->n_devices + 1U, sizeof *h->of_device);
    h->sets = mem_calloc(p->sets.n + 1, sizeof *h->sets);
    return h->of_set == NULL || h->of_device == NULL || h->sets == NULL ? RS_ENOMEM : 0;
}

static void holdings_close(struct holdings *h)
{
    mem_free(h->of_set);
    mem_free(h->of_device);
    mem_free(h->sets);
}

/* Fills the holdings of one member of the shape and returns the device that holds most (ties: the
 * lowest). */
static uint32_t gather_device(const struct plan *p, const struct plan_shape *s, struct holdings *h)
{
    const struct plan_class *c = &p->classes.at[s->class];
    for (uint32_t i = 0; i < h->n_sets; i++)
        h->of_set[h->sets[i]] = 0;
    h->n_sets = 0;
    for (uint32_t cell = 0; cell < c->n_cells; cell++) {
        uint32_t set = p->groups.at[c->first_group + cell].source;
        if (h->of_set[set] == 0)
            h->sets[h->n_sets++] = set;
        h->of_set[set] += plan_cell_bytes(p, s, cell);
    }
    uint32_t best = NONE32;
    for (unsigned pass = 0; pass < 3; pass++) /* clear, add, choose */
        for (uint32_t i = 0; i < h->n_sets; i++) {
            const struct set *set = &p->sets.at[h->sets[i]];
            for (uint32_t k = 0; k < set->n; k++) {
                uint32_t d = p->ends.at[set->first + k].device;
                bool again = k > 0 && p->ends.at[set->first + k - 1].device == d;
                if (pass == 0)
                    h->of_device[d] = 0;
                else if (pass == 1)
                    h->of_device[d] += again ? 0 : h->of_set[h->sets[i]];
                else if (best == NONE32 || h->of_device[d] > h->of_device[best] ||
                         (h->of_device[d] == h->of_device[best] && d < best))
                    best = d;
            }
        }
    return best;
}

static bool set_has_device(const struct plan *p, const struct set *s, uint32_t device)
{
    uint32_t first,
        n = set_site(p, s, p->topology->devices[device].domain, p->device_site[device], &first);
    for (uint32_t i = 0; i < n; i++)
        if (p->ends.at[first + i].device == device)
            return true;
    return false;
}

static bool set_has_domain(const struct plan *p, const struct set *s, uint32_t domain)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (p->ends.at[s->first + i].domain == domain)
            return true;
    return false;
}

/* --- legs and messages ------------------------------------------------------------------------ */

uint32_t cast_giver(const struct plan *p, const struct plan_cast *cast, uint32_t cell,
                    uint32_t *ret_end)
{
    const struct plan_class *c = &p->classes.at[p->shapes.at[p->units.at[cast->unit].shape].class];
    const struct set *s = &p->sets.at[p->groups.at[c->first_group + cell].source];
    uint32_t domain = p->topology->devices[cast->gather].domain, first = NONE32, n = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        const struct end *x = &p->ends.at[s->first + i];
        if (x->device == cast->gather) {
            *ret_end = s->first + i;
            return NONE32;
        }
        if (x->domain == domain && n++ == 0)
            first = s->first + i;
    }
    if (n == 0) {
        first = s->first;
        n = s->n;
    }
    *ret_end = first + cell % n;
    while (*ret_end > first && p->ends.at[*ret_end - 1].device == p->ends.at[*ret_end].device)
        --*ret_end;
    return p->ends.at[*ret_end].device;
}

struct cast_leg cast_hop(const struct plan *p, const struct plan_cast *cast, const struct chain *c,
                         uint32_t hop)
{
    uint32_t from = chain_device(p, c, hop - 1), to = chain_device(p, c, hop);
    bool inside = p->topology->devices[from].domain == p->topology->devices[to].domain;
    return (struct cast_leg){.cast = cast,
                             .shape = &p->shapes.at[p->units.at[cast->unit].shape],
                             .giver = NONE32,
                             .bytes = cast->bytes,
                             .start = cast->start + (hop - 1) * p->message_bytes,
                             .tier = inside ? TIER_DOMAIN : TIER_NETWORK};
}

struct cast_leg cast_gather(const struct plan *p, const struct plan_cast *cast, uint32_t giver)
{
    struct cast_leg l = {.cast = cast,
                         .shape = &p->shapes.at[p->units.at[cast->unit].shape],
                         .giver = giver,
                         .start = cast->gather_start};
    bool inside = p->topology->devices[giver].domain == p->topology->devices[cast->gather].domain;
    l.tier = inside ? TIER_DOMAIN : TIER_NETWORK;
    uint32_t n_cells = p->classes.at[l.shape->class].n_cells, end;
    for (uint32_t cell = 0; cell < n_cells; cell++) {
        uint32_t from = cast_giver(p, cast, cell, &end);
        if (from == giver)
            l.bytes += plan_cell_bytes(p, l.shape, cell);
        else if (from < giver) /* one after another into the gather device's link */
            l.start += plan_cell_bytes(p, l.shape, cell);
    }
    return l;
}

uint64_t cast_messages(const struct plan *p, const struct cast_leg *l)
{
    return l->bytes <= p->message_bytes ? 1 : (l->bytes - 1) / p->message_step + 1;
}

/* As plan_messages.c cuts: down to the start of a small item, or to whole rows of a large one. */
static uint64_t cast_cut(const struct plan *p, const struct cast_leg *l, uint64_t nominal)
{
    uint32_t n_cells = p->classes.at[l->shape->class].n_cells, end;
    uint64_t begin = 0;
    for (uint32_t cell = 0; cell < n_cells; cell++) {
        if (l->giver != NONE32 && cast_giver(p, l->cast, cell, &end) != l->giver)
            continue;
        uint64_t bytes = plan_cell_bytes(p, l->shape, cell);
        if (nominal >= begin + bytes) {
            begin += bytes;
            continue;
        }
        struct box b;
        plan_cell_box(p, l->shape, cell, &b);
        uint64_t unit = bytes <= p->cut_bytes ? bytes : plan_cut_unit(p, l->shape, &b);
        return begin + (nominal - begin) / unit * unit;
    }
    return l->bytes;
}

static uint32_t cast_round(const struct plan *p, const struct cast_leg *l, uint64_t i)
{
    return (uint32_t)plan_round(p, l->tier, l->start + i * p->message_step);
}

void cast_message(const struct plan *p, const struct cast_leg *l, uint64_t i, uint64_t *ret_begin,
                  uint64_t *ret_end, uint32_t *ret_round)
{
    *ret_round = cast_round(p, l, i);
    *ret_begin = i == 0 ? 0 : cast_cut(p, l, i * p->message_step);
    *ret_end = i + 1 == cast_messages(p, l) ? l->bytes : cast_cut(p, l, (i + 1) * p->message_step);
}

static uint32_t cast_round_of(const struct plan *p, const struct cast_leg *l, uint64_t at)
{
    if (l->bytes <= p->message_bytes)
        return cast_round(p, l, 0);
    uint64_t i = at / p->message_step;
    if (i + 1 < cast_messages(p, l) && cast_cut(p, l, (i + 1) * p->message_step) <= at)
        i++;
    return cast_round(p, l, i);
}

uint32_t cast_order(const struct plan *p, uint32_t from, uint32_t to, unsigned kind)
{
    return (uint32_t)p->streams.n + 2 * (from * p->topology->n_devices + to) + kind;
}

/* --- order and times -------------------------------------------------------------------------- */

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t gathered_bytes(const struct plan *p, const struct plan_cast *c)
{
    const struct plan_shape *s = &p->shapes.at[p->units.at[c->unit].shape];
    uint32_t n_cells = p->classes.at[s->class].n_cells, end;
    uint64_t bytes = 0;
    for (uint32_t cell = 0; cell < n_cells; cell++)
        if (cast_giver(p, c, cell, &end) != NONE32)
            bytes += plan_cell_bytes(p, s, cell);
    return bytes;
}

static int list_casts(struct plan *p)
{
    struct holdings h = {0};
    uint32_t *of_shape = mem_alloc((p->shapes.n + 1) * sizeof *of_shape);
    int r = of_shape == NULL ? RS_ENOMEM : holdings_init(&h, p);
    if (r == 0)
        memset(of_shape, 0xFF, (p->shapes.n + 1) * sizeof *of_shape);
    for (uint32_t i = 0; r == 0 && i < p->units.n; i++) {
        struct plan_unit *u = &p->units.at[i];
        const struct plan_shape *s = &p->shapes.at[u->shape];
        const struct plan_class *c = &p->classes.at[s->class];
        u->cast = NONE32;
        if (c->strategy != PLAN_GATHER_BROADCAST || c->n_cells == 0)
            continue;
        if (of_shape[u->shape] == NONE32)
            of_shape[u->shape] = gather_device(p, s, &h);
        r = vec_reserve(&p->casts, p->casts.n + 1);
        if (r != 0)
            break;
        struct plan_cast cast = {.unit = i, .gather = of_shape[u->shape]};
        for (uint32_t cell = 0; cell < c->n_cells; cell++)
            cast.bytes += plan_cell_bytes(p, s, cell);
        p->casts.at[p->casts.n++] = cast;
    }
    mem_free(of_shape);
    holdings_close(&h);
    return r;
}

/* By the gather device's domain, so that neighbours share a chain; within that in canonical order.
 */
static int order_casts(struct plan *p)
{
    uint32_t n = (uint32_t)p->casts.n;
    uint32_t *key = mem_alloc((n + 1U) * sizeof *key), *order = mem_alloc((n + 1U) * sizeof *order);
    struct plan_cast *sorted = mem_alloc((n + 1U) * sizeof *sorted);
    int r = key == NULL || order == NULL || sorted == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < n; i++)
        key[i] = p->topology->devices[p->casts.at[i].gather].domain;
    if (r == 0)
        r = sort_count(key, NULL, n, p->topology->n_domains, order);
    if (r == 0) {
        for (uint32_t i = 0; i < n; i++)
            sorted[i] = p->casts.at[order[i]];
        if (n > 0) /* memcpy takes no NULL, even for 0 bytes */
            memcpy(p->casts.at, sorted, n * sizeof *sorted);
        for (uint32_t i = 0; i < n; i++)
            p->units.at[sorted[i].unit].cast = i;
    }
    mem_free(key);
    mem_free(order);
    mem_free(sorted);
    return r;
}

/* When every device is done with a cast. */
static uint64_t cast_end(const struct plan *p, const struct plan_cast *c)
{
    return c->start + c->bytes + (p->chain.n + 2) * p->message_bytes;
}

/* Each waits for the link (the one before), for its half of the scratch (the one before that), on a
 * change of chain for everything, and for its own gather. */
static void time_casts(struct plan *p, uint64_t from)
{
    uint64_t u = p->message_bytes;
    for (uint32_t i = 0; i < p->casts.n; i++) {
        struct plan_cast *c = &p->casts.at[i];
        const struct plan_cast *before = i > 0 ? c - 1 : NULL, *half = i > 1 ? c - 2 : NULL;
        c->gather_start = c->start = from;
        if (before != NULL) {
            bool same_chain = p->topology->devices[before->gather].domain ==
                              p->topology->devices[c->gather].domain;
            c->gather_start =
                later(c->gather_start, before->gather_start + gathered_bytes(p, before));
            /* Two more, because the same two devices may be one hop further down another chain. */
            c->start = later(c->start, same_chain ? before->start + before->bytes + 2 * u
                                                  : cast_end(p, before));
        }
        if (half != NULL) {
            bool on_chain = chain_of(p, c->gather).skip != NONE32;
            c->gather_start = later(c->gather_start, on_chain ? cast_end(p, half)
                                                              : half->start + half->bytes + 2 * u);
            c->start = later(c->start, half->start + half->bytes + 4 * u);
        }
        c->start = later(c->start, c->gather_start + gathered_bytes(p, c) + 2 * u + p->cut_bytes);
    }
}

static void place_scratch(struct plan *p)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < p->casts.n; i++)
        most = later(most, p->casts.at[i].bytes);
    for (uint32_t i = 0; i < p->casts.n; i++) {
        const struct plan_unit *u = &p->units.at[p->casts.at[i].unit];
        const struct plan_shape *s = &p->shapes.at[u->shape];
        struct box whole = box_whole(s->n_dims, s->size);
        most = later(most, box_elements(&whole) * s->wire_bytes);
    }
    most = (most + 255) / 256 * 256;
    for (uint32_t i = 0; i < p->casts.n; i++)
        p->casts.at[i].scratch_offset = i % 2 * most;
    p->scratch_bytes = p->casts.n > 0 ? 2 * most : 0;
}

int plan_broadcast(struct plan *p, struct err *e)
{
    uint64_t from = 0;
    int r = list_chain(p);
    if (r == 0)
        r = list_casts(p);
    if (r == 0)
        r = order_casts(p);
    if (r != 0)
        return err_set(e, r, "out of memory");
    if (p->casts.n == 0)
        return 0;
    uint64_t n = p->topology->n_devices;
    if (p->streams.n + 2 * n * n >= UINT32_MAX)
        return err_set(e, RS_EEXHAUSTED, "too many devices for gather-broadcast");
    for (uint32_t i = 0; i < p->legs.n; i++)
        from = later(from, p->legs.at[i].start + p->legs.at[i].bytes + 2 * p->message_bytes);
    time_casts(p, from);
    if (plan_round(p, TIER_DOMAIN, cast_end(p, &p->casts.at[p->casts.n - 1])) >= UINT32_MAX - 1)
        return err_set(e, RS_EEXHAUSTED, "more than 2^32 rounds: chunk_bytes is too small");
    place_scratch(p);
    return 0;
}

/* --- totals ----------------------------------------------------------------------------------- */

/* What it would cost for a shape's members. */
static void count_conventional(struct plan *p, const struct plan_shape *s, struct holdings *h)
{
    struct plan_totals *t = &p->totals;
    uint32_t gather = gather_device(p, s, h), domain = p->topology->devices[gather].domain;
    uint64_t gathered = 0, network = 0, bytes = 0, n_domains = 0;
    for (uint32_t i = 0; i < h->n_sets; i++) {
        const struct set *set = &p->sets.at[h->sets[i]];
        uint64_t here = h->of_set[h->sets[i]];
        bytes += here;
        if (set_has_device(p, set, gather))
            continue;
        gathered += here;
        network += set_has_domain(p, set, domain) ? 0 : here;
    }
    bool on_chain = false;
    for (uint32_t i = 0; i < p->chain.n; i++) {
        uint32_t d = p->topology->devices[p->chain.at[i]].domain;
        on_chain = on_chain || p->chain.at[i] == gather;
        n_domains +=
            d != domain && (i == 0 || p->topology->devices[p->chain.at[i - 1]].domain != d);
    }
    t->gather_bytes += s->n_members * gathered;
    t->broadcast_bytes += s->n_members * bytes * (p->chain.n - on_chain);
    t->gather_broadcast_network_bytes += s->n_members * (network + n_domains * bytes);
}

static void count_leg(struct plan *p, uint32_t from, uint32_t to, const struct cast_leg *l)
{
    if (l->tier == TIER_NETWORK) {
        p->totals.network_bytes += l->bytes;
        p->egress[from] += l->bytes;
        p->ingress[to] += l->bytes;
    } else {
        p->totals.domain_bytes += l->bytes;
    }
    uint32_t last = cast_round(p, l, cast_messages(p, l) - 1);
    if (last + 1 > p->totals.n_rounds)
        p->totals.n_rounds = last + 1;
}

static void count_cast(struct plan *p, const struct plan_cast *cast)
{
    struct chain c = chain_of(p, cast->gather);
    const struct plan_shape *s = &p->shapes.at[p->units.at[cast->unit].shape];
    const struct plan_class *class = &p->classes.at[s->class];
    for (uint32_t h = 1; h <= c.n_hops; h++) {
        struct cast_leg l = cast_hop(p, cast, &c, h);
        count_leg(p, chain_device(p, &c, h - 1), chain_device(p, &c, h), &l);
    }
    for (uint32_t cell = 0; cell < class->n_cells; cell++) {
        uint32_t end, giver = cast_giver(p, cast, cell, &end);
        struct cast_leg l = {.cast = cast, .shape = s, .start = cast->gather_start};
        l.bytes = plan_cell_bytes(p, s, cell);
        const struct set *takers = &p->sets.at[p->groups.at[class->first_group + cell].takers];
        if (giver != NONE32) {
            bool inside =
                p->topology->devices[giver].domain == p->topology->devices[cast->gather].domain;
            l.tier = inside ? TIER_DOMAIN : TIER_NETWORK;
            count_leg(p, giver, cast->gather, &l);
        }
        for (uint32_t i = 0; i < takers->n; i++) {
            uint32_t d = p->ends.at[takers->first + i].device;
            bool first = i == 0 || p->ends.at[takers->first + i - 1].device != d;
            if (!first || d == cast->gather)
                p->totals.device_bytes += l.bytes;
        }
    }
}

int plan_broadcast_totals(struct plan *p)
{
    struct holdings h = {0};
    int r = holdings_init(&h, p);
    for (uint32_t i = 0; r == 0 && i < p->shapes.n; i++)
        if (p->classes.at[p->shapes.at[i].class].n_cells > 0)
            count_conventional(p, &p->shapes.at[i], &h);
    for (uint32_t i = 0; r == 0 && i < p->casts.n; i++)
        count_cast(p, &p->casts.at[i]);
    holdings_close(&h);
    return r;
}

/* --- transfers -------------------------------------------------------------------------------- */

/* Distinct devices of the takers, the gather device aside. */
static uint32_t taker_devices(const struct plan *p, const struct set *takers, uint32_t gather)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < takers->n; i++) {
        uint32_t d = p->ends.at[takers->first + i].device;
        n += d != gather && (i == 0 || p->ends.at[takers->first + i - 1].device != d);
    }
    return n;
}

uint64_t plan_broadcast_count(const struct plan *p, uint32_t unit)
{
    if (p->units.at[unit].cast == NONE32)
        return 0;
    const struct plan_cast *cast = &p->casts.at[p->units.at[unit].cast];
    const struct plan_class *c = &p->classes.at[p->shapes.at[p->units.at[unit].shape].class];
    uint64_t n = 0, n_hops = chain_of(p, cast->gather).n_hops;
    for (uint32_t cell = 0; cell < c->n_cells; cell++) {
        const struct set *takers = &p->sets.at[p->groups.at[c->first_group + cell].takers];
        uint32_t end;
        n += n_hops + takers->n - taker_devices(p, takers, cast->gather) +
             (cast_giver(p, cast, cell, &end) != NONE32);
    }
    return n;
}

struct emitter {
    const struct plan *p;
    const struct plan_cast *cast;
    struct chain chain;
    struct plan_transfer t;
    const struct set *takers;
    uint64_t offset; /* of the cell in a chain hop */
    int (*fn)(const struct plan_transfer *t, void *arg);
    void *arg;
};

static struct plan_end end_at(const struct plan *p, uint32_t end, enum plan_side side)
{
    const struct end *x = &p->ends.at[end];
    return (struct plan_end){
        .device = x->device, .side = side, .layout = x->layout, .rank = x->rank};
}

static int emit(struct emitter *m, struct plan_end from, struct plan_end to, enum plan_tier tier,
                uint32_t round, uint64_t after)
{
    m->t.from = from;
    m->t.to = to;
    m->t.tier = tier;
    m->t.round = round;
    m->t.after = after == UINT64_MAX ? NULL : &after;
    m->t.n_after = after != UINT64_MAX;
    int r = m->fn(&m->t, m->arg);
    m->t.id++;
    return r;
}

static uint32_t device_takers(const struct emitter *m, uint32_t device, uint32_t *ret_first)
{
    const struct plan *p = m->p;
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->takers->n; i++)
        if (p->ends.at[m->takers->first + i].device == device && n++ == 0)
            *ret_first = m->takers->first + i;
    return n;
}

/* From `from` to the device's takers after the first `skip` of them, on the device itself. */
static int emit_local(struct emitter *m, uint32_t device, uint32_t skip, struct plan_end from,
                      uint32_t round, uint64_t after)
{
    uint32_t first = 0, n = device_takers(m, device, &first);
    int r = 0;
    for (uint32_t i = skip; i < n && r == 0; i++)
        r = emit(m, from, end_at(m->p, first + i, SIDE_DESTINATION), TIER_DEVICE, round, after);
    return r;
}

static uint64_t gather_offset(const struct emitter *m, uint32_t giver, uint32_t cell)
{
    uint64_t bytes = 0;
    uint32_t end;
    for (uint32_t i = 0; i < cell; i++)
        if (cast_giver(m->p, m->cast, i, &end) == giver)
            bytes +=
                plan_cell_bytes(m->p, &m->p->shapes.at[m->p->units.at[m->cast->unit].shape], i);
    return bytes;
}

static int emit_gather(struct emitter *m, uint32_t cell, struct plan_end *ret_from,
                       uint64_t *ret_after)
{
    uint32_t end, giver = cast_giver(m->p, m->cast, cell, &end), round = 0;
    *ret_from = end_at(m->p, end, SIDE_SOURCE);
    *ret_after = UINT64_MAX;
    int r = 0;
    if (giver != NONE32) {
        struct cast_leg l = cast_gather(m->p, m->cast, giver);
        struct plan_end staging = {.device = m->cast->gather, .side = SIDE_STAGING};
        round = cast_round_of(m->p, &l, gather_offset(m, giver, cell));
        *ret_after = m->t.id;
        r = emit(m, *ret_from, staging, (enum plan_tier)l.tier, round, UINT64_MAX);
        *ret_from = staging;
        round++;
    }
    return r == 0 ? emit_local(m, m->cast->gather, 0, *ret_from, round, *ret_after) : r;
}

static int emit_cell(struct emitter *m, uint32_t cell)
{
    struct plan_end from;
    uint64_t after;
    int r = emit_gather(m, cell, &from, &after);
    for (uint32_t h = 1; h <= m->chain.n_hops && r == 0; h++) {
        struct cast_leg l = cast_hop(m->p, m->cast, &m->chain, h);
        uint32_t device = chain_device(m->p, &m->chain, h), first = 0;
        uint32_t n = device_takers(m, device, &first), round = cast_round_of(m->p, &l, m->offset);
        struct plan_end staging = {.device = device, .side = SIDE_STAGING};
        struct plan_end to = n > 0 ? end_at(m->p, first, SIDE_DESTINATION) : staging;
        uint64_t id = m->t.id;
        r = emit(m, from, to, (enum plan_tier)l.tier, round, after);
        if (r == 0)
            r = emit_local(m, device, 1, staging, round + 1, id);
        from = staging;
        after = id;
    }
    return r;
}

int plan_broadcast_transfers(const struct plan *p, uint32_t unit,
                             int (*fn)(const struct plan_transfer *t, void *arg), void *arg)
{
    const struct plan_unit *u = &p->units.at[unit];
    if (u->cast == NONE32)
        return 0;
    const struct plan_shape *s = &p->shapes.at[u->shape];
    const struct plan_class *c = &p->classes.at[s->class];
    struct emitter m = {.p = p, .cast = &p->casts.at[u->cast], .fn = fn, .arg = arg};
    m.chain = chain_of(p, m.cast->gather);
    m.t = (struct plan_transfer){.id = u->first_transfer,
                                 .tensor = u->tensor,
                                 .value = (enum plan_value)s->value,
                                 .block = {s->block[0], s->block[1]},
                                 .wire = (enum dtype)s->wire,
                                 .strategy = PLAN_GATHER_BROADCAST};
    int r = 0;
    for (uint32_t cell = 0; cell < c->n_cells && r == 0; cell++) {
        plan_cell_box(p, s, cell, &m.t.box);
        m.t.bytes = plan_cell_bytes(p, s, cell);
        m.t.cell = plan_cell_number(p, unit, cell, NONE32);
        m.takers = &p->sets.at[p->groups.at[c->first_group + cell].takers];
        r = emit_cell(&m, cell);
        m.offset += m.t.bytes;
    }
    return r;
}
