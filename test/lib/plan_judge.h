/* A plan judged element by element: a simulation that knows layouts by index arithmetic (layouts.h) and the
 * plan by its stream of transfers alone, so that it shares nothing with the planner or plan_check. */
#ifndef RS_TEST_PLAN_JUDGE_H
#define RS_TEST_PLAN_JUDGE_H

#include <inttypes.h>

#include "test/lib/plan_cases.h"

/* --- simulation ---------------------------------------------------------- */

/* Wire dtypes are told apart: a cell in float32 is not one in bfloat16. */
enum { N_WIRES = 2 };

/* Where an element may be: at a destination rank, or in a device's staging memory. Each holds, per
 * tensor and element, the source rank that it came from, or NOBODY. */
enum { NOBODY = -1 };

struct memory {
    int32_t *origin[8]; /* [tensor][element]; NULL: nothing yet */
};

struct sim {
    const struct plan_case *c;
    struct stream s;
    struct memory *destination[CASE_MAX_LAYOUTS]; /* [rank] */
    struct memory *staging;                       /* [device * N_WIRES + wire] */
    uint8_t *entered[N_WIRES][8];                 /* [tensor][domain * elements + element] */
    uint64_t network, domain, device, received;
    uint64_t *egress, *ingress;
};

static inline unsigned wire_index(enum dtype d)
{
    return d == DTYPE_BFLOAT16 ? 1 : 0;
}

static inline uint32_t domain_of(const struct sim *m, uint32_t device)
{
    return m->c->topology.devices[device].domain;
}

static inline void sim_init(struct sim *m, const struct plan_case *c, const struct plan *p)
{
    *m = (struct sim){.c = c};
    stream_read(&m->s, p);
    ck_assert_uint_le(c->source->n_tensors, 8);
    for (uint32_t i = 0; i < c->n_destinations; i++)
        m->destination[i] = calloc(c->destinations[i]->n_ranks, sizeof *m->destination[i]);
    m->staging = calloc((size_t)c->topology.n_devices * N_WIRES, sizeof *m->staging);
    for (uint32_t t = 0; t < c->source->n_tensors; t++)
        for (unsigned w = 0; w < N_WIRES; w++)
            m->entered[w][t] =
                calloc(layouts_elements(&c->source->tensors[t]) * c->topology.n_domains + 1, 1);
    m->egress = calloc(c->topology.n_devices, sizeof *m->egress);
    m->ingress = calloc(c->topology.n_devices, sizeof *m->ingress);
}

static inline void memory_close(struct memory *m)
{
    for (unsigned t = 0; t < 8; t++)
        free(m->origin[t]);
}

static inline void sim_close(struct sim *m)
{
    for (uint32_t i = 0; i < m->c->n_destinations; i++) {
        for (uint32_t r = 0; r < m->c->destinations[i]->n_ranks; r++)
            memory_close(&m->destination[i][r]);
        free(m->destination[i]);
    }
    for (uint32_t d = 0; d < m->c->topology.n_devices * N_WIRES; d++)
        memory_close(&m->staging[d]);
    free(m->staging);
    for (unsigned t = 0; t < 8; t++)
        for (unsigned w = 0; w < N_WIRES; w++)
            free(m->entered[w][t]);
    free(m->egress);
    free(m->ingress);
    stream_close(&m->s);
}

static inline struct memory *memory_of(struct sim *m, const struct plan_end *end, enum dtype wire)
{
    if (end->side == SIDE_DESTINATION)
        return &m->destination[end->layout][end->rank];
    return &m->staging[end->device * N_WIRES + wire_index(wire)];
}

static inline int32_t *origins(struct sim *m, struct memory *where, uint32_t tensor)
{
    if (where->origin[tensor] == NULL) {
        uint64_t n = layouts_elements(&m->c->source->tensors[tensor]);
        where->origin[tensor] = malloc((n + 1) * sizeof(int32_t));
        for (uint64_t i = 0; i < n; i++)
            where->origin[tensor][i] = NOBODY;
    }
    return where->origin[tensor];
}

/* The destination's tensor of a source tensor, or NULL. */
static inline const struct tensor *taker_tensor(const struct sim *m, uint32_t layout,
                                                uint32_t tensor)
{
    const struct layout *l = m->c->destinations[layout];
    int64_t i = layout_find(l, m->c->source->tensors[tensor].name);
    return i < 0 ? NULL : &l->tensors[i];
}

/* Gather-broadcast passes a device's scratch on: what a message brings to a destination rank there
 * lies in the scratch (its staging memory) as well. */
static inline bool fills_scratch(const struct plan_transfer *t)
{
    return t->strategy == PLAN_GATHER_BROADCAST && t->tier != TIER_DEVICE &&
           t->to.side == SIDE_DESTINATION;
}

static inline bool brought_by(const struct sim *m, const struct plan_transfer *t,
                              const uint64_t *at)
{
    for (uint32_t i = 0; i < t->n_after; i++) {
        const struct plan_transfer *b = &m->s.all[t->after[i]];
        bool same = b->to.device == t->from.device && b->tensor == t->tensor && b->wire == t->wire;
        if (t->from.side == SIDE_STAGING)
            same = same && (b->to.side == SIDE_STAGING || fills_scratch(b));
        else
            same = same && b->to.side == SIDE_DESTINATION;
        if (same && t->from.side == SIDE_DESTINATION)
            same = b->to.layout == t->from.layout && b->to.rank == t->from.rank;
        if (same && layouts_box_has(&b->box, at))
            return true;
    }
    return false;
}

/* The source rank whose bytes `from` gives for an element; fails where it has none. */
static inline int32_t give_element(struct sim *m, const struct plan_transfer *t, uint64_t element,
                                   const uint64_t *at)
{
    if (t->from.side == SIDE_SOURCE) {
        ck_assert_uint_eq(t->n_after, 0);
        ck_assert_uint_eq(
            layouts_holds(m->c->source, &m->c->source->tensors[t->tensor], t->from.rank, at), 1);
        return (int32_t)t->from.rank;
    }
    ck_assert_msg(brought_by(m, t, at), "transfer %" PRIu64 " sends what none of `after` brought",
                  t->id);
    int32_t origin = origins(m, memory_of(m, &t->from, t->wire), t->tensor)[element];
    ck_assert_int_ne(origin, NOBODY);
    return origin;
}

static inline void take_element(struct sim *m, const struct plan_transfer *t, uint64_t element,
                                const uint64_t *at, int32_t origin)
{
    int32_t *to = &origins(m, memory_of(m, &t->to, t->wire), t->tensor)[element];
    if (t->to.side == SIDE_DESTINATION) {
        const struct tensor *wanted = taker_tensor(m, t->to.layout, t->tensor);
        ck_assert_ptr_nonnull(wanted);
        ck_assert_int_eq(wanted->dtype, t->wire);
        ck_assert_uint_eq(layouts_holds(m->c->destinations[t->to.layout], wanted, t->to.rank, at),
                          1);
    }
    ck_assert_msg(*to == NOBODY, "transfer %" PRIu64 " writes an element again", t->id);
    *to = origin;
    if (fills_scratch(t)) {
        struct plan_end scratch = {.device = t->to.device, .side = SIDE_STAGING};
        origins(m, memory_of(m, &scratch, t->wire), t->tensor)[element] = origin;
    }
    if (t->tier == TIER_NETWORK)
        m->entered[wire_index(t->wire)][t->tensor]
                  [domain_of(m, t->to.device) *
                       layouts_elements(&m->c->source->tensors[t->tensor]) +
                   element]++;
}

static inline void check_ends(const struct sim *m, const struct plan_transfer *t)
{
    const struct plan_case *c = m->c;
    if (t->from.side == SIDE_SOURCE)
        ck_assert_int_eq(c->source_device[t->from.rank], (int32_t)t->from.device);
    if (t->from.side == SIDE_DESTINATION)
        ck_assert_int_eq(c->destination_device[t->from.layout][t->from.rank],
                         (int32_t)t->from.device);
    ck_assert_int_ne(t->to.side, SIDE_SOURCE);
    if (t->to.side == SIDE_DESTINATION)
        ck_assert_int_eq(c->destination_device[t->to.layout][t->to.rank], (int32_t)t->to.device);
    enum plan_tier tier = t->from.device == t->to.device ? TIER_DEVICE
                          : domain_of(m, t->from.device) == domain_of(m, t->to.device)
                              ? TIER_DOMAIN
                              : TIER_NETWORK;
    ck_assert_int_eq(t->tier, tier);
    ck_assert_uint_eq(t->bytes, box_elements(&t->box) * dtype_bytes(t->wire));
    ck_assert(!box_empty(&t->box));
}

static inline void count_transfer(struct sim *m, const struct plan_transfer *t)
{
    if (t->tier == TIER_NETWORK) {
        m->network += t->bytes;
        m->egress[t->from.device] += t->bytes;
        m->ingress[t->to.device] += t->bytes;
    } else if (t->tier == TIER_DOMAIN) {
        m->domain += t->bytes;
    } else {
        m->device += t->bytes;
    }
    if (t->to.side == SIDE_DESTINATION)
        m->received += t->bytes;
}

/* What each strategy and option allows a transfer to be. */
static inline void check_strategy(const struct sim *m, const struct plan_transfer *t)
{
    const struct plan_options *o = &m->c->input.options;
    if (t->strategy == PLAN_DIRECT)
        ck_assert_int_eq(t->from.side, SIDE_SOURCE);
    if (t->strategy != PLAN_RESHARD)
        return;
    if (t->to.side == SIDE_STAGING)
        ck_assert(o->staging_ingest);
    if (t->tier == TIER_NETWORK)
        ck_assert_int_ne(t->from.side, SIDE_STAGING); /* it is no relay */
    if (t->tier == TIER_NETWORK && !o->relay)
        ck_assert_int_eq(t->from.side, SIDE_SOURCE);
}

static inline void run_transfer(struct sim *m, const struct plan_transfer *t)
{
    check_ends(m, t);
    check_strategy(m, t);
    for (uint32_t i = 0; i < t->n_after; i++)
        ck_assert_uint_lt(m->s.all[t->after[i]].round, t->round);
    const struct tensor *tensor = &m->c->source->tensors[t->tensor];
    for (uint64_t element = 0; element < layouts_elements(tensor); element++) {
        uint64_t at[BOX_MAX_DIMS];
        layouts_unravel(tensor, element, at);
        if (layouts_box_has(&t->box, at))
            take_element(m, t, element, at, give_element(m, t, element, at));
    }
    count_transfer(m, t);
}

/* Runs each transfer once all of its `after` have run, in whatever order that allows. */
static inline void sim_run(struct sim *m)
{
    bool *done = calloc(m->s.n + 1, sizeof *done);
    for (size_t left = m->s.n, before = left + 1; left > 0; before = left) {
        (void)before;
        size_t ran = 0;
        for (size_t i = 0; i < m->s.n; i++) {
            const struct plan_transfer *t = &m->s.all[i];
            bool ready = !done[i];
            ck_assert_uint_eq(t->id, i);
            for (uint32_t k = 0; ready && k < t->n_after; k++) {
                ck_assert_uint_lt(t->after[k], m->s.n);
                ready = done[t->after[k]];
            }
            if (!ready)
                continue;
            run_transfer(m, t);
            done[i] = true;
            ran++;
        }
        ck_assert_msg(ran > 0, "transfers wait for each other in a circle");
        left -= ran;
    }
    free(done);
}

/* --- what must hold at the end ------------------------------------------- */

static inline void check_destination(struct sim *m, uint32_t layout, uint32_t tensor)
{
    const struct layout *l = m->c->destinations[layout];
    const struct tensor *t = taker_tensor(m, layout, tensor);
    for (uint32_t rank = 0; t != NULL && rank < l->n_ranks; rank++) {
        const int32_t *got = origins(m, &m->destination[layout][rank], tensor);
        for (uint64_t element = 0; element < layouts_elements(t); element++) {
            uint64_t at[BOX_MAX_DIMS];
            layouts_unravel(t, element, at);
            bool needed = layouts_holds(l, t, rank, at) > 0;
            ck_assert_msg((got[element] != NOBODY) == needed,
                          "'%s' element %" PRIu64 " of rank %u of '%s'", t->name, element, rank,
                          l->name);
        }
    }
}

static inline bool domain_holds(const struct sim *m, uint32_t domain, uint32_t tensor,
                                const uint64_t *at)
{
    for (uint32_t r = 0; r < m->c->source->n_ranks; r++)
        if (domain_of(m, (uint32_t)m->c->source_device[r]) == domain &&
            layouts_holds(m->c->source, &m->c->source->tensors[tensor], r, at) > 0)
            return true;
    return false;
}

static inline bool domain_needs(const struct sim *m, uint32_t domain, uint32_t tensor,
                                unsigned wire, const uint64_t *at)
{
    for (uint32_t i = 0; i < m->c->n_destinations; i++) {
        const struct tensor *t = taker_tensor(m, i, tensor);
        if (t == NULL || wire_index(t->dtype) != wire)
            continue;
        for (uint32_t r = 0; r < m->c->destinations[i]->n_ranks; r++)
            if (domain_of(m, (uint32_t)m->c->destination_device[i][r]) == domain &&
                layouts_holds(m->c->destinations[i], t, r, at) > 0)
                return true;
    }
    return false;
}

static inline enum plan_strategy strategy_of(const struct plan_case *c, uint32_t tensor)
{
    const char *name = c->source->tensors[tensor].name;
    const struct plan_options *o = &c->input.options;
    for (uint32_t i = 0; i < o->n_rules; i++)
        if (strcmp(o->rules[i].glob, "*") == 0 || name[1] == '1')
            return o->rules[i].strategy;
    return o->strategy;
}

/* Each element enters a domain once where the domain needs it and does not hold it, and else never;
 * returns the bytes that must enter. */
static inline uint64_t check_domains(const struct sim *m)
{
    uint64_t minimum = 0;
    for (uint32_t tensor = 0; tensor < m->c->source->n_tensors; tensor++) {
        const struct tensor *t = &m->c->source->tensors[tensor];
        uint64_t n = layouts_elements(t);
        for (uint64_t i = 0; i < n * m->c->topology.n_domains * N_WIRES; i++) {
            uint64_t element = i % n, at[BOX_MAX_DIMS];
            uint32_t domain = (uint32_t)(i / n % m->c->topology.n_domains);
            unsigned wire = (unsigned)(i / n / m->c->topology.n_domains);
            layouts_unravel(t, element, at);
            unsigned must =
                domain_needs(m, domain, tensor, wire, at) && !domain_holds(m, domain, tensor, at);
            minimum += must * dtype_bytes(wire == 1 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32);
            if (strategy_of(m->c, tensor) == PLAN_RESHARD)
                ck_assert_uint_eq(m->entered[wire][tensor][domain * n + element], must);
        }
    }
    return minimum;
}

static inline void check_totals(const struct sim *m, const struct plan *p, uint64_t minimum)
{
    const struct plan_totals *t = plan_totals(p);
    uint64_t busiest = 0;
    ck_assert_uint_eq(t->transfers, m->s.n);
    ck_assert_uint_eq(t->network_bytes, m->network);
    ck_assert_uint_eq(t->domain_bytes, m->domain);
    ck_assert_uint_eq(t->device_bytes, m->device);
    ck_assert_uint_eq(t->destination_bytes, m->received);
    ck_assert_uint_eq(t->network_bytes_minimum, minimum);
    for (uint32_t d = 0; d < m->c->topology.n_devices; d++) {
        ck_assert_uint_eq(plan_device_egress(p, d), m->egress[d]);
        ck_assert_uint_eq(plan_device_ingress(p, d), m->ingress[d]);
        busiest = m->egress[d] > busiest ? m->egress[d] : busiest;
        busiest = m->ingress[d] > busiest ? m->ingress[d] : busiest;
    }
    if (m->network > 0) {
        ck_assert_uint_eq(t->busiest_bytes, busiest);
        ck_assert_uint_eq(t->busiest_egress ? m->egress[t->busiest_device]
                                            : m->ingress[t->busiest_device],
                          busiest);
    }
}

/* --- the lower bound of the busiest device ------------------------------- */

/* Devices that hold an element at the source, as a bit set. */
static inline uint32_t holder_devices(const struct sim *m, uint32_t tensor, const uint64_t *at)
{
    uint32_t set = 0;
    for (uint32_t r = 0; r < m->c->source->n_ranks; r++)
        if (layouts_holds(m->c->source, &m->c->source->tensors[tensor], r, at) > 0)
            set |= 1U << m->c->source_device[r];
    return set;
}

/* True where a domain of [first, last] must take the element in over the network. */
static inline bool must_enter(const struct sim *m, uint32_t first, uint32_t last, uint32_t tensor,
                              unsigned wire, const uint64_t *at)
{
    for (uint32_t d = first; d <= last; d++)
        if (domain_needs(m, d, tensor, wire, at) && !domain_holds(m, d, tensor, at))
            return true;
    return false;
}

/* Bytes that some domain of [first, last] must take in, of those elements that only `set` holds. */
static inline uint64_t must_move(const struct sim *m, uint32_t first, uint32_t last, uint32_t set)
{
    uint64_t bytes = 0;
    for (uint32_t tensor = 0; tensor < m->c->source->n_tensors; tensor++)
        for (uint64_t i = 0; i < layouts_elements(&m->c->source->tensors[tensor]) * N_WIRES; i++) {
            uint64_t at[BOX_MAX_DIMS];
            unsigned wire = i % N_WIRES;
            layouts_unravel(&m->c->source->tensors[tensor], i / N_WIRES, at);
            if ((holder_devices(m, tensor, at) & ~set) == 0 &&
                must_enter(m, first, last, tensor, wire, at))
                bytes += dtype_bytes(wire == 1 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32);
        }
    return bytes;
}

static inline uint64_t share(uint64_t bytes, uint32_t devices)
{
    unsigned n = (unsigned)__builtin_popcount(devices);
    return n == 0 ? 0 : (bytes + n - 1) / n;
}

/* Devices of the domain where some destination rank holds something. */
static inline uint32_t destination_devices(const struct sim *m, uint32_t domain)
{
    uint32_t devices = 0;
    for (uint32_t i = 0; i < m->c->n_destinations; i++)
        for (uint32_t r = 0; r < m->c->destinations[i]->n_ranks; r++) {
            uint32_t d = (uint32_t)m->c->destination_device[i][r];
            if (domain_of(m, d) == domain && layout_rank_bytes(m->c->destinations[i], r) > 0)
                devices |= 1U << d;
        }
    return devices;
}

static inline uint64_t greater(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* The lower bound (plan/planner.h), over every set of source devices that holds some element by itself. */
static inline uint64_t bound_by_hand(const struct sim *m)
{
    uint32_t n_domains = m->c->topology.n_domains;
    uint64_t bound = 0;
    for (uint32_t d = 0; d < n_domains; d++)
        bound = greater(bound, share(must_move(m, d, d, UINT32_MAX), destination_devices(m, d)));
    for (uint32_t tensor = 0; tensor < m->c->source->n_tensors; tensor++) {
        uint32_t last = 0;
        for (uint64_t i = 0; i < layouts_elements(&m->c->source->tensors[tensor]); i++) {
            uint64_t at[BOX_MAX_DIMS];
            layouts_unravel(&m->c->source->tensors[tensor], i, at);
            uint32_t set = holder_devices(m, tensor, at);
            if (set != last)
                bound = greater(bound, share(must_move(m, 0, n_domains - 1, set), set));
            last = set;
        }
    }
    return bound;
}

/* Simulates the whole plan; returns the simulation for more questions, the caller's to close. */
static inline struct sim judge(const struct plan_case *c, const struct plan *p)
{
    struct sim m;
    sim_init(&m, c, p);
    sim_run(&m);
    for (uint32_t i = 0; i < c->n_destinations; i++)
        for (uint32_t t = 0; t < c->source->n_tensors; t++)
            check_destination(&m, i, t);
    check_totals(&m, p, check_domains(&m));
    return m;
}

#endif
