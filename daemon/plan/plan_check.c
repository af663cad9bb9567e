/* Proves a plan from its input and its streams, with none of the planner's own figures.
 *
 * Tensor by tensor it takes the transfers, and the shards that the layouts give to each rank
 * (layout_shards), and demands: what each destination rank receives tiles its shards; each transfer
 * is read where its sender holds it, or where an earlier transfer of the same cell brought it;
 * tiers fit the devices; and by the reshard strategy a domain takes in nothing that it holds and
 * nothing twice. */
#include "plan/plan_check.h"

#include <stdlib.h>
#include <string.h>

#include "layout/scale.h"
#include "plan/plan_private.h"

#include "base/banned.h"

/* What each rank of one side holds of the tensor at hand. */
struct shards {
    VEC(struct box) boxes;
    uint32_t *first; /* per rank; n_ranks + 1 */
    bool there;      /* the layout has the tensor */
};

struct checker {
    const struct plan *p;
    const struct plan_input *input;
    struct err *e;
    uint32_t tensor;
    const char *name;
    const struct tensor *origin; /* the source's */
    const uint32_t *derived;     /* block of the derived tensor at hand; NULL: it is none */
    uint64_t n_derived;          /* destinations' tensors that were looked at as derived ones */
    struct shards *sides;        /* the source, then the destinations */
    uint32_t *domain_first, *domain_ranks; /* source ranks by domain */
    VEC(struct plan_transfer) v;           /* of the tensor */
    VEC(uint64_t) after;                   /* one per transfer; UINT64_MAX: none */
    uint64_t sum[3];                       /* bytes by tier */
    uint64_t destination_bytes, transfers;
};

static int fault(struct checker *c, const struct plan_transfer *t, const char *what)
{
    char text[256];
    return err_set(c->e, RS_EINTERNAL, "plan: tensor '%s' %s, transfer %llu to rank %u: %s",
                   c->name, box_text(&t->box, text, sizeof text), (unsigned long long)t->id,
                   t->to.rank, what);
}

static int collect(const struct plan_transfer *t, void *arg)
{
    struct checker *c = arg;
    if (vec_reserve(&c->v, c->v.n + 1) != 0 || vec_reserve(&c->after, c->v.n + 1) != 0)
        return RS_ENOMEM;
    c->after.at[c->v.n] = t->n_after > 0 ? t->after[0] : UINT64_MAX;
    c->v.at[c->v.n] = *t;
    c->v.at[c->v.n++].after = NULL;
    return t->n_after > 1 ? RS_EINTERNAL : 0;
}

/* --- single transfers ------------------------------------------------------------------------- */

static enum plan_tier tier_between(const struct topology *t, uint32_t a, uint32_t b)
{
    if (a == b)
        return TIER_DEVICE;
    return t->devices[a].domain == t->devices[b].domain ? TIER_DOMAIN : TIER_NETWORK;
}

static const struct layout *side_layout(const struct checker *c, uint32_t side)
{
    return side == 0 ? c->input->source : c->input->destinations[side - 1];
}

static bool rank_absent(const struct checker *c, uint32_t side, uint32_t rank)
{
    const int32_t *device =
        side == 0 ? c->input->source_device : c->input->destination_device[side - 1];
    return device[rank] == TOPOLOGY_ABSENT;
}

/* Its index on a side: on the source's of what it is made from. -1: it is not there. */
static int64_t find_on(const struct checker *c, uint32_t side)
{
    const struct layout *l = side_layout(c, side);
    if (side == 0)
        return c->origin - l->tensors;
    int64_t index = layout_find(l, c->name);
    if (index < 0)
        return -1;
    const struct tensor *t = &l->tensors[index];
    if (c->derived == NULL || t->derived_from == NULL)
        return c->derived == NULL && t->derived_from == NULL ? index : -1;
    bool same = strcmp(t->derived_from, c->origin->name) == 0 &&
                memcmp(t->derived_block, c->derived, sizeof t->derived_block) == 0;
    return same ? index : -1;
}

static int load_side(struct checker *c, uint32_t side)
{
    const struct layout *l = side_layout(c, side);
    struct shards *s = &c->sides[side];
    int64_t index = find_on(c, side);
    s->there = index >= 0;
    s->boxes.n = 0;
    for (uint32_t r = 0; r < l->n_ranks; r++) {
        s->first[r] = (uint32_t)s->boxes.n;
        if (!s->there || rank_absent(c, side, r))
            continue;
        if (vec_reserve(&s->boxes, s->boxes.n + 1) != 0)
            return RS_ENOMEM;
        size_t room = s->boxes.capacity - s->boxes.n;
        uint32_t n = layout_shards(l, (uint32_t)index, r, s->boxes.at + s->boxes.n,
                                   room > UINT32_MAX ? UINT32_MAX : (uint32_t)room);
        if (n > room) {
            if (vec_reserve(&s->boxes, s->boxes.n + n) != 0)
                return RS_ENOMEM;
            (void)layout_shards(l, (uint32_t)index, r, s->boxes.at + s->boxes.n, n);
        }
        s->boxes.n += n;
    }
    s->first[l->n_ranks] = (uint32_t)s->boxes.n;
    return 0;
}

static bool rank_holds(const struct checker *c, uint32_t side, uint32_t rank, const struct box *b)
{
    const struct shards *s = &c->sides[side];
    for (uint32_t i = s->first[rank]; i < s->first[rank + 1]; i++)
        if (box_contains(&s->boxes.at[i], b))
            return true;
    return false;
}

/* What must be read of a source for the box: for scaled values whole blocks. */
static struct box box_read(const struct checker *c, const struct plan_transfer *t)
{
    if (t->value == PLAN_SOURCE)
        return t->box;
    struct box scales = t->value == PLAN_SCALES ? t->box : scale_touched(t->block, &t->box);
    return scale_elements(t->block, c->origin->shape, &scales);
}

static int check_source_end(struct checker *c, const struct plan_transfer *t)
{
    const struct plan_input *in = c->input;
    if (t->from.rank >= in->source->n_ranks ||
        in->source_device[t->from.rank] != (int32_t)t->from.device)
        return fault(c, t, "its source rank is not on its device");
    struct box read = box_read(c, t);
    if (!rank_holds(c, 0, t->from.rank, &read))
        return fault(c, t, "its source rank does not hold it");
    return t->n_after == 0 ? 0 : fault(c, t, "a source holder waits for nothing");
}

/* What a destination or staging memory sends must have been brought there, in an earlier round. */
static int check_relayed_end(struct checker *c, uint32_t i)
{
    const struct plan_transfer *t = &c->v.at[i];
    uint64_t first = c->v.at[0].id, after = c->after.at[i];
    if (after == UINT64_MAX || after < first || after - first >= c->v.n)
        return fault(c, t, "nothing brings it to its sender");
    const struct plan_transfer *b = &c->v.at[after - first];
    if (b->cell != t->cell || b->to.device != t->from.device)
        return fault(c, t, "what it comes after brings something else");
    if (t->from.side == SIDE_DESTINATION &&
        (b->to.side != SIDE_DESTINATION || b->to.layout != t->from.layout ||
         b->to.rank != t->from.rank))
        return fault(c, t, "its sender's memory is not where the bytes came to");
    return b->round < t->round ? 0 : fault(c, t, "it moves no later than what it comes after");
}

static int check_taker(struct checker *c, const struct plan_transfer *t)
{
    const struct plan_input *in = c->input;
    if (t->to.side != SIDE_DESTINATION)
        return 0;
    if (t->to.layout >= in->n_destinations ||
        t->to.rank >= in->destinations[t->to.layout]->n_ranks ||
        in->destination_device[t->to.layout][t->to.rank] != (int32_t)t->to.device)
        return fault(c, t, "its destination rank is not on its device");
    return 0;
}

static int check_transfer(struct checker *c, uint32_t i)
{
    const struct plan_transfer *t = &c->v.at[i];
    if (t->id != c->v.at[0].id + i)
        return fault(c, t, "its number is out of sequence");
    if (t->tensor != c->tensor || box_empty(&t->box) ||
        t->bytes != box_elements(&t->box) * dtype_bytes(t->wire))
        return fault(c, t, "wrong tensor or size");
    if (t->from.device >= c->input->topology->n_devices ||
        t->to.device >= c->input->topology->n_devices)
        return fault(c, t, "no such device");
    if (t->tier != tier_between(c->input->topology, t->from.device, t->to.device))
        return fault(c, t, "its tier does not fit its devices");
    c->sum[t->tier] += t->bytes;
    c->transfers++;
    if (t->to.side == SIDE_DESTINATION)
        c->destination_bytes += t->bytes;
    int r = check_taker(c, t);
    if (r == 0)
        r = t->from.side == SIDE_SOURCE ? check_source_end(c, t) : check_relayed_end(c, i);
    return r;
}

/* --- sets of transfers ------------------------------------------------------------------------ */

/* For the comparisons below: qsort has no argument. Sorting is by keys put beside the index. */
struct keyed {
    uint64_t a, b;
    uint32_t index;
};

static int keyed_compare(const void *x, const void *y)
{
    const struct keyed *a = x, *b = y;
    if (a->a != b->a)
        return a->a < b->a ? -1 : 1;
    if (a->b != b->b)
        return a->b < b->b ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

/* No two boxes of v[k[i].index] overlap: swept along the dim with the most starts. k is reordered.
 */
static bool disjoint(const struct checker *c, struct keyed *k, uint32_t n)
{
    if (n < 2)
        return true;
    uint8_t n_dims = c->v.at[k[0].index].box.n_dims, dim = 0;
    uint32_t most = 0;
    for (uint8_t d = 0; d < n_dims; d++) {
        for (uint32_t i = 0; i < n; i++)
            k[i].a = c->v.at[k[i].index].box.offset[d];
        qsort(k, n, sizeof *k, keyed_compare);
        uint32_t starts = 1;
        for (uint32_t i = 1; i < n; i++)
            starts += k[i].a != k[i - 1].a;
        if (starts > most) {
            most = starts;
            dim = d;
        }
    }
    for (uint32_t i = 0; i < n && n_dims > 0; i++)
        k[i].a = c->v.at[k[i].index].box.offset[dim];
    qsort(k, n, sizeof *k, keyed_compare);
    for (uint32_t i = 0; i < n; i++) {
        const struct box *a = &c->v.at[k[i].index].box;
        struct box common;
        for (uint32_t j = i + 1; j < n && (n_dims == 0 || k[j].a < a->offset[dim] + a->size[dim]);
             j++)
            if (box_intersect(a, &c->v.at[k[j].index].box, &common))
                return false;
    }
    return true;
}

static uint64_t shard_elements(const struct checker *c, uint32_t side, uint32_t rank)
{
    const struct shards *s = &c->sides[side];
    uint64_t sum = 0;
    for (uint32_t i = s->first[rank]; i < s->first[rank + 1]; i++)
        sum += box_elements(&s->boxes.at[i]);
    return sum;
}

static bool made_so(const struct layout *l, const struct tensor *t, const struct plan_transfer *x)
{
    const struct tensor *d = t->derived_from != NULL ? t
                             : t->scaled_by != 0     ? &l->tensors[t->scaled_by - 1]
                                                     : NULL;
    if (d == NULL)
        return x->value == PLAN_SOURCE;
    return x->value == (d == t ? PLAN_SCALES : PLAN_QUANTISED) &&
           memcmp(x->block, d->derived_block, sizeof x->block) == 0;
}

/* The transfers k[0 … n) to one rank tile its shards. */
static int check_rank(struct checker *c, struct keyed *k, uint32_t n)
{
    const struct plan_transfer *t = &c->v.at[k[0].index];
    const struct layout *l = c->input->destinations[t->to.layout];
    int64_t index = find_on(c, t->to.layout + 1);
    uint64_t sum = 0;
    if (index < 0)
        return fault(c, t, "its destination layout has no such tensor");
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_transfer *x = &c->v.at[k[i].index];
        if (x->wire != l->tensors[index].dtype)
            return fault(c, x, "its wire dtype is not its destination's");
        if (!made_so(l, &l->tensors[index], x))
            return fault(c, x, "it is not made as its destination declares");
        if (!rank_holds(c, t->to.layout + 1, t->to.rank, &x->box))
            return fault(c, x, "its destination rank has no such part");
        sum += box_elements(&x->box);
    }
    if (sum != shard_elements(c, t->to.layout + 1, t->to.rank))
        return fault(c, t, "the rank gets less or more than its shard");
    return disjoint(c, k, n) ? 0 : fault(c, t, "the rank gets an element twice");
}

/* Ranks of destination layouts that hold a part of the tensor. */
static uint64_t takers_in_layouts(const struct checker *c)
{
    uint64_t n = 0;
    for (uint32_t side = 1; side <= c->input->n_destinations; side++)
        for (uint32_t r = 0; r < side_layout(c, side)->n_ranks; r++)
            n += c->sides[side].first[r + 1] > c->sides[side].first[r];
    return n;
}

static int check_ranks(struct checker *c, struct keyed *k)
{
    uint32_t n = 0;
    uint64_t ranks = 0;
    int r = 0;
    for (uint32_t i = 0; i < c->v.n; i++)
        if (c->v.at[i].to.side == SIDE_DESTINATION)
            k[n++] = (struct keyed){c->v.at[i].to.layout, c->v.at[i].to.rank, i};
    qsort(k, n, sizeof *k, keyed_compare);
    for (uint32_t i = 0, m; i < n && r == 0; i += m) {
        for (m = 1; i + m < n && k[i + m].a == k[i].a && k[i + m].b == k[i].b;)
            m++;
        r = check_rank(c, k + i, m);
        ranks++;
    }
    if (r == 0 && ranks != takers_in_layouts(c))
        return err_set(c->e, RS_EINTERNAL, "plan: tensor '%s': %llu of %llu ranks get their part",
                       c->name, (unsigned long long)ranks,
                       (unsigned long long)takers_in_layouts(c));
    return r;
}

static bool domain_holds(const struct checker *c, uint32_t domain, const struct box *b)
{
    for (uint32_t i = c->domain_first[domain]; i < c->domain_first[domain + 1]; i++)
        if (rank_holds(c, 0, c->domain_ranks[i], b))
            return true;
    return false;
}

/* By reshard: cells of one wire dtype do not overlap, and each enters a domain once, and only where
 * no holder sits inside. */
static int check_domains(struct checker *c, struct keyed *k)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->v.n; i++) {
        const struct plan_transfer *t = &c->v.at[i];
        if (t->tier != TIER_NETWORK || t->strategy != PLAN_RESHARD)
            continue;
        k[n++] = (struct keyed){t->cell, c->input->topology->devices[t->to.device].domain, i};
    }
    qsort(k, n, sizeof *k, keyed_compare);
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_transfer *t = &c->v.at[k[i].index];
        if (i > 0 && k[i].a == k[i - 1].a && k[i].b == k[i - 1].b)
            return fault(c, t, "its domain takes the cell in twice");
        struct box read = box_read(c, t);
        if (domain_holds(c, (uint32_t)k[i].b, &read))
            return fault(c, t, "its domain holds the cell already");
    }
    return 0;
}

/* Equal for cells that are made alike. */
static uint64_t making_key(const struct plan_transfer *t)
{
    return t->value == PLAN_SOURCE ? (uint64_t)t->wire : (uint64_t)t->block[0] << 32 | t->block[1];
}

/* Transfers of a cell have its box; boxes of different cells that are made alike have nothing in
 * common. */
static int check_cells(struct checker *c, struct keyed *k)
{
    uint32_t n = 0, kept = 0;
    for (uint32_t i = 0; i < c->v.n; i++)
        k[n++] = (struct keyed){making_key(&c->v.at[i]), c->v.at[i].cell, i};
    qsort(k, n, sizeof *k, keyed_compare);
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_transfer *t = &c->v.at[k[i].index];
        if (kept > 0 && k[kept - 1].a == k[i].a && k[kept - 1].b == k[i].b) {
            if (!box_equal(&t->box, &c->v.at[k[kept - 1].index].box))
                return fault(c, t, "its cell has two boxes");
            continue;
        }
        k[kept++] = k[i];
    }
    for (uint32_t i = 0, m; i < kept; i += m) {
        for (m = 1; i + m < kept && k[i + m].a == k[i].a;)
            m++;
        const struct plan_transfer *t = &c->v.at[k[i].index];
        if (!disjoint(c, k + i, m))
            return fault(c, t, "its cell overlaps another");
    }
    return 0;
}

static int check_tensor(struct checker *c, uint32_t tensor)
{
    uint32_t n = c->input->source->n_tensors;
    const struct plan_derived *d = tensor < n ? NULL : &c->p->derived.at[tensor - n];
    c->tensor = tensor;
    c->name = plan_tensor_name(c->p, tensor);
    c->origin = &c->input->source->tensors[plan_tensor_origin(c->p, tensor)];
    c->derived =
        d == NULL ? NULL : c->input->destinations[d->layout]->tensors[d->tensor].derived_block;
    c->v.n = 0;
    int r = 0;
    for (uint32_t side = 0; side <= c->input->n_destinations && r == 0; side++)
        r = load_side(c, side);
    for (uint32_t side = 1; side <= c->input->n_destinations && c->derived != NULL; side++)
        c->n_derived += c->sides[side].there;
    if (r == 0)
        r = plan_transfers(c->p, tensor, collect, c);
    if (r == RS_ENOMEM)
        return err_set(c->e, r, "out of memory");
    for (uint32_t i = 0; i < c->v.n && r == 0; i++)
        r = check_transfer(c, i);
    if (r != 0)
        return r;
    struct keyed *k = mem_calloc(c->v.n + 1, sizeof *k);
    if (k == NULL)
        return err_set(c->e, RS_ENOMEM, "out of memory");
    r = check_ranks(c, k);
    if (r == 0)
        r = check_cells(c, k);
    if (r == 0)
        r = check_domains(c, k);
    mem_free(k);
    return r;
}

/* --- totals ----------------------------------------------------------------------------------- */

static int check_loads(struct checker *c)
{
    const struct plan_totals *t = plan_totals(c->p);
    uint64_t out = 0, in = 0, busiest = 0;
    for (uint32_t d = 0; d < c->input->topology->n_devices; d++) {
        uint64_t a = plan_device_egress(c->p, d), b = plan_device_ingress(c->p, d);
        out += a;
        in += b;
        busiest = a > busiest ? a : busiest;
        busiest = b > busiest ? b : busiest;
    }
    if (out != t->network_bytes || in != t->network_bytes ||
        (t->network_bytes > 0 && busiest != t->busiest_bytes))
        return err_set(c->e, RS_EINTERNAL, "plan: loads of devices do not add up");
    if (t->network_bytes > 0 && busiest < t->lower_bound && c->input->options.n_rules == 0 &&
        c->input->options.strategy == PLAN_RESHARD)
        return err_set(c->e, RS_EINTERNAL, "plan: the busiest device is below the lower bound");
    return 0;
}

static int check_sums(struct checker *c)
{
    const struct plan_totals *t = plan_totals(c->p);
    if (c->transfers != t->transfers || c->destination_bytes != t->destination_bytes ||
        c->sum[TIER_NETWORK] != t->network_bytes || c->sum[TIER_DOMAIN] != t->domain_bytes ||
        c->sum[TIER_DEVICE] != t->device_bytes)
        return err_set(c->e, RS_EINTERNAL,
                       "plan: totals say %llu transfers, %llu + %llu + %llu bytes; the stream has "
                       "%llu, %llu + %llu + %llu",
                       (unsigned long long)t->transfers, (unsigned long long)t->network_bytes,
                       (unsigned long long)t->domain_bytes, (unsigned long long)t->device_bytes,
                       (unsigned long long)c->transfers, (unsigned long long)c->sum[TIER_NETWORK],
                       (unsigned long long)c->sum[TIER_DOMAIN],
                       (unsigned long long)c->sum[TIER_DEVICE]);
    return 0;
}

static int check_ratio(struct checker *c)
{
    const struct plan_totals *t = plan_totals(c->p);
    const struct plan_options *o = &c->input->options;
    bool reshard = o->strategy == PLAN_RESHARD;
    for (uint32_t i = 0; i < o->n_rules; i++)
        reshard = reshard && o->rules[i].strategy == PLAN_RESHARD;
    if (reshard && t->network_bytes != t->network_bytes_minimum)
        return err_set(c->e, RS_EINTERNAL, "plan: %llu bytes cross the network, %llu would do",
                       (unsigned long long)t->network_bytes,
                       (unsigned long long)t->network_bytes_minimum);
    return 0;
}

/* Each derived tensor of each destination was looked at, once. */
static int check_derived_count(struct checker *c)
{
    uint64_t n = 0;
    for (uint32_t l = 0; l < c->input->n_destinations; l++)
        for (uint32_t t = 0; t < c->input->destinations[l]->n_tensors; t++)
            n += c->input->destinations[l]->tensors[t].derived_from != NULL;
    return n == c->n_derived
               ? 0
               : err_set(c->e, RS_EINTERNAL,
                         "plan: it makes %llu derived tensors, destinations have %llu",
                         (unsigned long long)c->n_derived, (unsigned long long)n);
}

/* --- set-up ----------------------------------------------------------------------------------- */

static int list_domains(struct checker *c)
{
    const struct plan_input *in = c->input;
    uint32_t n = in->source->n_ranks, n_domains = in->topology->n_domains;
    uint32_t *key = mem_alloc((n + 1U) * sizeof *key);
    c->domain_first = mem_calloc(n_domains + 2U, sizeof *c->domain_first);
    c->domain_ranks = mem_alloc((n + 1U) * sizeof *c->domain_ranks);
    int r = RS_ENOMEM;
    if (key != NULL && c->domain_first != NULL && c->domain_ranks != NULL) {
        for (uint32_t i = 0; i < n; i++) {
            int32_t d = in->source_device[i];
            key[i] = d < 0 ? n_domains : in->topology->devices[d].domain;
            c->domain_first[key[i] + 1]++;
        }
        for (uint32_t i = 0; i <= n_domains; i++)
            c->domain_first[i + 1] += c->domain_first[i];
        r = sort_count(key, NULL, n, n_domains + 1, c->domain_ranks);
    }
    mem_free(key);
    return r;
}

static int checker_init(struct checker *c)
{
    c->sides = mem_calloc(c->input->n_destinations + 1U, sizeof *c->sides);
    if (c->sides == NULL)
        return RS_ENOMEM;
    for (uint32_t side = 0; side <= c->input->n_destinations; side++) {
        c->sides[side].first =
            mem_calloc(side_layout(c, side)->n_ranks + 1U, sizeof *c->sides[side].first);
        if (c->sides[side].first == NULL)
            return RS_ENOMEM;
    }
    return list_domains(c);
}

static void checker_close(struct checker *c)
{
    for (uint32_t side = 0; c->sides != NULL && side <= c->input->n_destinations; side++) {
        mem_free(c->sides[side].first);
        mem_free(c->sides[side].boxes.at);
    }
    mem_free(c->sides);
    mem_free(c->domain_first);
    mem_free(c->domain_ranks);
    mem_free(c->v.at);
    mem_free(c->after.at);
}

int plan_check(const struct plan *p, const struct plan_input *input, bool full, struct err *e)
{
    struct checker c = {.p = p, .input = input, .e = e};
    int r = checker_init(&c);
    if (r != 0)
        err_set(e, r, "out of memory");
    if (r == 0)
        r = check_loads(&c);
    if (r == 0)
        r = check_ratio(&c);
    if (full)
        for (uint32_t t = 0; t < plan_n_tensors(p) && r == 0; t++)
            r = check_tensor(&c, t);
    if (r == 0 && full)
        r = check_derived_count(&c);
    for (uint32_t i = 0; !full && i < p->classes.n && r == 0; i++)
        r = check_tensor(&c, p->units.at[p->members.at[p->classes.at[i].first_member]].tensor);
    if (r == 0 && full)
        r = check_sums(&c);
    if (r == 0 && full)
        r = plan_check_messages(p, input->topology->n_nodes, e);
    checker_close(&c);
    return r;
}
