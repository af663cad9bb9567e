/* Plans judged element by element: a simulation that knows layouts by index arithmetic (layouts.h)
 * and the plan by its stream of transfers alone, so it shares nothing with the planner or
 * plan_check. And the published plans of CASES.md group A. */
#include <check.h>
#include <inttypes.h>

#include "test/lib/plan_cases.h"

/* --- simulation ------------------------------------------------------------ */

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

static unsigned wire_index(enum dtype d)
{
    return d == DTYPE_BFLOAT16 ? 1 : 0;
}

static uint32_t domain_of(const struct sim *m, uint32_t device)
{
    return m->c->topology.devices[device].domain;
}

static void sim_init(struct sim *m, const struct plan_case *c, const struct plan *p)
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

static void memory_close(struct memory *m)
{
    for (unsigned t = 0; t < 8; t++)
        free(m->origin[t]);
}

static void sim_close(struct sim *m)
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

static struct memory *memory_of(struct sim *m, const struct plan_end *end, enum dtype wire)
{
    if (end->side == SIDE_DESTINATION)
        return &m->destination[end->layout][end->rank];
    return &m->staging[end->device * N_WIRES + wire_index(wire)];
}

static int32_t *origins(struct sim *m, struct memory *where, uint32_t tensor)
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
static const struct tensor *taker_tensor(const struct sim *m, uint32_t layout, uint32_t tensor)
{
    const struct layout *l = m->c->destinations[layout];
    int64_t i = layout_find(l, m->c->source->tensors[tensor].name);
    return i < 0 ? NULL : &l->tensors[i];
}

/* Gather-broadcast passes a device's scratch on: what a message brings to a destination rank there
 * lies in the scratch (its staging memory) as well. */
static bool fills_scratch(const struct plan_transfer *t)
{
    return t->strategy == PLAN_GATHER_BROADCAST && t->tier != TIER_DEVICE &&
           t->to.side == SIDE_DESTINATION;
}

static bool brought_by(const struct sim *m, const struct plan_transfer *t, const uint64_t *at)
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
static int32_t give_element(struct sim *m, const struct plan_transfer *t, uint64_t element,
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

static void take_element(struct sim *m, const struct plan_transfer *t, uint64_t element,
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

static void check_ends(const struct sim *m, const struct plan_transfer *t)
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

static void count_transfer(struct sim *m, const struct plan_transfer *t)
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
static void check_strategy(const struct sim *m, const struct plan_transfer *t)
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

static void run_transfer(struct sim *m, const struct plan_transfer *t)
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
static void sim_run(struct sim *m)
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

/* --- what must hold at the end --------------------------------------------- */

static void check_destination(struct sim *m, uint32_t layout, uint32_t tensor)
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

static bool domain_holds(const struct sim *m, uint32_t domain, uint32_t tensor, const uint64_t *at)
{
    for (uint32_t r = 0; r < m->c->source->n_ranks; r++)
        if (domain_of(m, (uint32_t)m->c->source_device[r]) == domain &&
            layouts_holds(m->c->source, &m->c->source->tensors[tensor], r, at) > 0)
            return true;
    return false;
}

static bool domain_needs(const struct sim *m, uint32_t domain, uint32_t tensor, unsigned wire,
                         const uint64_t *at)
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

static enum plan_strategy strategy_of(const struct plan_case *c, uint32_t tensor)
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
static uint64_t check_domains(const struct sim *m)
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

static void check_totals(const struct sim *m, const struct plan *p, uint64_t minimum)
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

/* --- the lower bound of the busiest device --------------------------------- */

/* Devices that hold an element at the source, as a bit set. */
static uint32_t holder_devices(const struct sim *m, uint32_t tensor, const uint64_t *at)
{
    uint32_t set = 0;
    for (uint32_t r = 0; r < m->c->source->n_ranks; r++)
        if (layouts_holds(m->c->source, &m->c->source->tensors[tensor], r, at) > 0)
            set |= 1U << m->c->source_device[r];
    return set;
}

/* True where a domain of [first, last] must take the element in over the network. */
static bool must_enter(const struct sim *m, uint32_t first, uint32_t last, uint32_t tensor,
                       unsigned wire, const uint64_t *at)
{
    for (uint32_t d = first; d <= last; d++)
        if (domain_needs(m, d, tensor, wire, at) && !domain_holds(m, d, tensor, at))
            return true;
    return false;
}

/* Bytes that some domain of [first, last] must take in, of those elements that only `set` holds. */
static uint64_t must_move(const struct sim *m, uint32_t first, uint32_t last, uint32_t set)
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

static uint64_t share(uint64_t bytes, uint32_t devices)
{
    unsigned n = (unsigned)__builtin_popcount(devices);
    return n == 0 ? 0 : (bytes + n - 1) / n;
}

/* Devices of the domain where some destination rank holds something. */
static uint32_t destination_devices(const struct sim *m, uint32_t domain)
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

static uint64_t greater(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* DESIGN.md section 4, over every set of source devices that holds some element by itself. */
static uint64_t bound_by_hand(const struct sim *m)
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
static struct sim judge(const struct plan_case *c, const struct plan *p)
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

/* --- random plans ---------------------------------------------------------- */

static unsigned random_rounds(unsigned fallback)
{
    const char *text = getenv("ORACLE_ROUNDS");
    return text == NULL ? fallback : (unsigned)strtoul(text, NULL, 10);
}

START_TEST(random_plans_write_each_needed_element_once_and_enter_each_domain_once)
{
    unsigned rounds = random_rounds(250);
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t seed = 1000 + round;
        struct plan_case c;
        case_random(&c, &seed);
        struct plan *p = case_plan(&c), *again = case_plan(&c);
        struct sim m = judge(&c, p);
        ck_assert_mem_eq(plan_totals(p)->digest, plan_totals(again)->digest, 16);
        sim_close(&m);
        plan_free(p);
        plan_free(again);
        case_close(&c);
    }
}
END_TEST

/* --- the published plans of CASES.md --------------------------------------- */

/* Source and destination of one float32 tensor "w", all ranks on one node, or each rank on a node
 * of its own; destination rank r of a mesh that lists it. Ranks of both sides have the same numbers
 * as in the case and rank r lies on device r. */
static void published(struct plan_case *c, struct layout *source, struct layout *destination,
                      bool one_domain)
{
    *c = (struct plan_case){.source = source, .destinations = {destination}, .n_destinations = 1};
    uint32_t n = source->n_ranks > destination->n_ranks ? source->n_ranks : destination->n_ranks;
    uint32_t sizes[32], domain_of_node[32];
    ck_assert_uint_le(n, 32);
    for (uint32_t i = 0; i < n; i++) {
        sizes[i] = one_domain ? n : 1;
        domain_of_node[i] = i;
    }
    case_topology(&c->topology, one_domain ? 1 : n, sizes, domain_of_node);
    c->source_device = calloc(source->n_ranks, sizeof(int32_t));
    c->destination_device[0] = calloc(destination->n_ranks, sizeof(int32_t));
    for (uint32_t r = 0; r < source->n_ranks; r++)
        c->source_device[r] = (int32_t)r;
    for (uint32_t r = 0; r < destination->n_ranks; r++)
        c->destination_device[0][r] = (int32_t)r;
    c->input.options = plan_options_default();
    case_finish(c);
}

START_TEST(random_plans_know_the_lower_bound_of_the_busiest_device)
{
    unsigned rounds = random_rounds(40);
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t seed = 90000 + round;
        struct plan_case c;
        case_random(&c, &seed);
        c.input.options.strategy = PLAN_RESHARD;
        c.input.options.n_rules = 0;
        struct plan *p = case_plan(&c);
        const struct plan_totals *t = plan_totals(p);
        struct sim m = judge(&c, p);
        if (t->network_bytes_minimum > 0) {
            ck_assert_msg(t->lower_bound == bound_by_hand(&m),
                          "round %u: %" PRIu64 ", not %" PRIu64, round, t->lower_bound,
                          bound_by_hand(&m));
            ck_assert_uint_ge(t->busiest_bytes, t->lower_bound);
        }
        sim_close(&m);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

#define PAIR(name, a, b, m1, m2)                                                                   \
    "{'name': '" name "', 'ranks': 4, 'meshes': [" m1 "," m2 "], 'tensors': [" a "," b "]}"
#define MESH_A "{'name': 'a', 'shape': [4], 'ranks': [0, 1, 2, 3]}"
#define MESH_B "{'name': 'b', 'shape': [2, 2], 'ranks': [3, 2, 1, 0]}"
#define T_X                                                                                        \
    "{'name': 'w', 'shape': [64, 9], 'dtype': 'float32', 'mesh': 'a', 'placements': ['Shard(0)']}"
#define T_Y                                                                                        \
    "{'name': 'y', 'shape': [64, 9], 'dtype': 'float32', 'mesh': 'b', 'placements': "              \
    "['Shard(1)', 'Replicate']}"

START_TEST(a_plan_does_not_depend_on_the_order_in_the_files)
{
    struct plan_case one, two;
    published(&one, layouts_parse(PAIR("s", T_X, T_Y, MESH_A, MESH_B)),
              layouts_one("64, 9", 8, "4", "4, 5, 6, 7", "'Shard(1)'", ""), false);
    published(&two, layouts_parse(PAIR("s", T_Y, T_X, MESH_B, MESH_A)),
              layouts_one("64, 9", 8, "4", "4, 5, 6, 7", "'Shard(1)'", ""), false);
    struct plan *p = case_plan(&one), *q = case_plan(&two);
    ck_assert_mem_eq(plan_totals(p)->digest, plan_totals(q)->digest, 16);
    plan_free(p);
    plan_free(q);
    case_close(&one);
    case_close(&two);
}
END_TEST

struct delivery {
    uint32_t from, to;
    uint64_t elements;
};

/* Elements that source `from` delivers to destination `to`, by whatever hops. */
static uint64_t delivered(struct sim *m, uint32_t from, uint32_t to)
{
    uint64_t n = 0;
    const int32_t *got = origins(m, &m->destination[0][to], 0);
    for (uint64_t i = 0; i < layouts_elements(&m->c->source->tensors[0]); i++)
        n += got[i] == (int32_t)from;
    return n;
}

/* Every strategy, in one domain and in many, delivers the published numbers and nothing else. */
static void check_deliveries(struct layout *(*source)(void), struct layout *(*destination)(void),
                             const struct delivery *expected, size_t n)
{
    for (unsigned way = 0; way < 6; way++) {
        struct plan_case c;
        published(&c, source(), destination(), way % 2 == 0);
        c.input.options.strategy = (enum plan_strategy)(way / 2);
        c.input.options.chunk_bytes = 32;
        struct plan *p = case_plan(&c);
        struct sim m = judge(&c, p);
        uint64_t sum = 0, all = 0;
        for (size_t i = 0; i < n; i++) {
            ck_assert_msg(delivered(&m, expected[i].from, expected[i].to) == expected[i].elements,
                          "way %u: %u -> %u: %" PRIu64 ", not %" PRIu64, way, expected[i].from,
                          expected[i].to, delivered(&m, expected[i].from, expected[i].to),
                          expected[i].elements);
            sum += expected[i].elements;
        }
        for (uint32_t s = 0; s < c.source->n_ranks; s++)
            for (uint32_t d = 0; d < c.destinations[0]->n_ranks; d++)
                all += delivered(&m, s, d);
        ck_assert_uint_eq(all, sum);
        sim_close(&m);
        plan_free(p);
        case_close(&c);
    }
}

/* A published case: two layouts and the deliveries between them. */
#define PUBLISHED(test, SOURCE, DESTINATION, ...)                                                  \
    static struct layout *test##_source(void)                                                      \
    {                                                                                              \
        return layouts_one SOURCE;                                                                 \
    }                                                                                              \
    static struct layout *test##_destination(void)                                                 \
    {                                                                                              \
        return layouts_one DESTINATION;                                                            \
    }                                                                                              \
    START_TEST(test)                                                                               \
    {                                                                                              \
        static const struct delivery expected[] = {__VA_ARGS__};                                   \
        check_deliveries(test##_source, test##_destination, expected,                              \
                         sizeof expected / sizeof *expected);                                      \
    }                                                                                              \
    END_TEST

#define S0 "'Shard(0)'"
#define S1 "'Shard(1)'"
#define S2 "'Shard(2)'"
#define RE "'Replicate'"
#define OR ", 'shard_order': [1, 0]"

PUBLISHED(a01_uneven_rows_to_columns, ("5, 10", 4, "4", "0, 1, 2, 3", S0, ""),
          ("5, 10", 7, "3", "4, 5, 6", S1, ""), {0, 4, 8}, {1, 4, 8}, {2, 4, 4}, {0, 5, 8},
          {1, 5, 8}, {2, 5, 4}, {0, 6, 4}, {1, 6, 4}, {2, 6, 2})
PUBLISHED(a01_uneven_rows_to_one_without_padding, ("5, 10", 4, "4", "0, 1, 2, 3", S0, ""),
          ("5, 10", 5, "1", "4", RE, ""), {0, 4, 20}, {1, 4, 20}, {2, 4, 10})
PUBLISHED(a09_uneven_rows_to_uneven_columns, ("7, 3", 3, "3", "0, 1, 2", S0, ""),
          ("7, 3", 5, "2", "3, 4", S1, ""), {0, 3, 6}, {1, 3, 6}, {2, 3, 2}, {0, 4, 3}, {1, 4, 3},
          {2, 4, 1})
PUBLISHED(a10_two_to_five_rows, ("31, 10", 2, "2", "0, 1", S0, ""),
          ("31, 10", 7, "5", "2, 3, 4, 5, 6", S0, ""), {0, 2, 70}, {0, 3, 70}, {0, 4, 20},
          {1, 4, 50}, {1, 5, 70}, {1, 6, 30})
PUBLISHED(a14_only_the_inner_dim_changes, ("4, 8, 6", 4, "2, 2", "0, 1, 2, 3", S1 ", " S1, ""),
          ("4, 8, 6", 4, "2, 2", "0, 1, 2, 3", S1 ", " S2, ""), {0, 0, 24}, {1, 0, 24}, {0, 1, 24},
          {1, 1, 24}, {2, 2, 24}, {3, 2, 24}, {2, 3, 24}, {3, 3, 24})
PUBLISHED(a17_one_element_to_the_first_of_two, ("1", 2, "2", "0, 1", S0, ""),
          ("1", 4, "2", "2, 3", S0, ""), {0, 2, 1})
PUBLISHED(a26_two_mesh_dims_on_both_sides,
          ("8, 6, 4", 8, "4, 2", "0, 1, 2, 3, 4, 5, 6, 7", S0 ", " S1, ""),
          ("8, 6, 4", 16, "2, 4", "8, 9, 10, 11, 12, 13, 14, 15", S0 ", " S1, ""), {0, 8, 16},
          {2, 8, 16}, {0, 9, 8}, {1, 9, 8}, {2, 9, 8}, {3, 9, 8}, {1, 10, 16}, {3, 10, 16},
          {4, 12, 16}, {6, 12, 16}, {4, 13, 8}, {5, 13, 8}, {6, 13, 8}, {7, 13, 8}, {5, 14, 16},
          {7, 14, 16})
PUBLISHED(a27_order_and_transpose, ("10, 9", 4, "2, 2", "0, 1, 2, 3", S0 ", " S0, OR),
          ("10, 9", 13, "3", "10, 11, 12", S1, ""), {0, 10, 9}, {1, 10, 9}, {2, 10, 6}, {3, 10, 6},
          {0, 11, 9}, {1, 11, 9}, {2, 11, 6}, {3, 11, 6}, {0, 12, 9}, {1, 12, 9}, {2, 12, 6},
          {3, 12, 6})
PUBLISHED(a31_source_and_destination_ranks_overlap, ("8, 4", 4, "4", "0, 1, 2, 3", S0, ""),
          ("8, 4", 4, "2", "2, 3", RE, ""), {0, 2, 8}, {1, 2, 8}, {2, 2, 8}, {3, 2, 8}, {0, 3, 8},
          {1, 3, 8}, {2, 3, 8}, {3, 3, 8})
PUBLISHED(a32_six_to_two, ("9, 2", 6, "6", "0, 1, 2, 3, 4, 5", S0, ""),
          ("9, 2", 8, "2", "6, 7", S0, ""), {0, 6, 4}, {1, 6, 4}, {2, 6, 2}, {2, 7, 2}, {3, 7, 4},
          {4, 7, 2})
PUBLISHED(a32_two_to_six, ("9, 2", 2, "2", "0, 1", S0, ""),
          ("9, 2", 8, "6", "2, 3, 4, 5, 6, 7", S0, ""), {0, 2, 4}, {0, 3, 4}, {0, 4, 2}, {1, 4, 2},
          {1, 5, 4}, {1, 6, 2})

START_TEST(a14_nothing_crosses_the_halves_where_each_is_a_domain)
{
    struct plan_case c;
    published(&c, layouts_one("4, 8, 6", 4, "2, 2", "0, 1, 2, 3", S1 ", " S1, ""),
              layouts_one("4, 8, 6", 4, "2, 2", "0, 1, 2, 3", S1 ", " S2, ""), true);
    topology_close(&c.topology);
    case_topology(&c.topology, 2, (const uint32_t[]){2, 2}, (const uint32_t[]){0, 1});
    struct plan *p = case_plan(&c);
    struct sim m = judge(&c, p);
    ck_assert_uint_eq(plan_totals(p)->network_bytes, 0);
    ck_assert_uint_eq(plan_totals(p)->device_bytes, 4 * 24 * 4);
    ck_assert_uint_eq(plan_totals(p)->domain_bytes, 4 * 24 * 4);
    sim_close(&m);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(a16_zero_size_tensors_need_no_transfer)
{
    struct plan_case c;
    published(&c, layouts_one("12, 0", 4, "4", "0, 1, 2, 3", S0, ""),
              layouts_one("12, 0", 5, "1", "4", RE, ""), false);
    struct plan *p = case_plan(&c);
    struct sim m = judge(&c, p);
    ck_assert_uint_eq(plan_totals(p)->transfers, 0);
    ck_assert_uint_eq(plan_totals(p)->network_bytes, 0);
    sim_close(&m);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(a17_scalars_reach_every_replica)
{
    for (unsigned one_domain = 0; one_domain < 2; one_domain++) {
        struct plan_case c;
        published(&c, layouts_one("", 2, "2", "0, 1", RE, ""),
                  layouts_one("", 4, "2", "2, 3", RE, ""), one_domain == 1);
        struct plan *p = case_plan(&c);
        struct sim m = judge(&c, p);
        ck_assert_uint_eq(plan_totals(p)->destination_bytes, 8);
        ck_assert_uint_eq(delivered(&m, 0, 2) + delivered(&m, 1, 2), 1);
        ck_assert_uint_eq(delivered(&m, 0, 3) + delivered(&m, 1, 3), 1);
        sim_close(&m);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

/* Elements of destination `to` from any of two replicas. */
static uint64_t from_either(struct sim *m, uint32_t a, uint32_t b, uint32_t to)
{
    return delivered(m, a, to) + delivered(m, b, to);
}

START_TEST(a29_replicas_on_both_sides_are_read_once)
{
    for (unsigned one_domain = 0; one_domain < 2; one_domain++) {
        struct plan_case c;
        published(&c, layouts_one("6, 4", 4, "2, 2", "0, 1, 2, 3", RE ", " S0, ""),
                  layouts_one("6, 4", 10, "3, 2", "4, 5, 6, 7, 8, 9", S1 ", " RE, ""),
                  one_domain == 1);
        struct plan *p = case_plan(&c);
        struct sim m = judge(&c, p);
        for (uint32_t to = 4; to < 8; to++) {
            ck_assert_uint_eq(from_either(&m, 0, 2, to), 6);
            ck_assert_uint_eq(from_either(&m, 1, 3, to), 6);
        }
        ck_assert_uint_eq(plan_totals(p)->destination_bytes, 4 * 12 * 4);
        sim_close(&m);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

START_TEST(a36_a_replica_axis_is_not_added_up)
{
    struct plan_case c;
    published(&c, layouts_one("16", 8, "4, 2", "0, 1, 2, 3, 4, 5, 6, 7", S0 ", " RE, ""),
              layouts_one("16", 9, "1", "8", RE, ""), false);
    struct plan *p = case_plan(&c);
    struct sim m = judge(&c, p);
    for (uint32_t pair = 0; pair < 8; pair += 2)
        ck_assert_uint_eq(from_either(&m, pair, pair + 1, 8), 4);
    ck_assert_uint_eq(plan_totals(p)->network_bytes, 64);
    sim_close(&m);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(a20_fused_parts_are_tensors_of_their_own)
{
    struct plan_case c;
    const char *gate_up = "{'name': '%s', 'ranks': 11, 'meshes': [{'name': 'm', 'shape': [%u], "
                          "'ranks': [%s]}], 'tensors': [{'name': 'gate', 'shape': [8, 2], 'dtype': "
                          "'float32', 'mesh': 'm', 'placements': ['Shard(0)']}, {'name': 'up', "
                          "'shape': [8, 2], 'dtype': 'float32', 'mesh': 'm', 'placements': "
                          "['Shard(0)']}]}";
    char s[600], d[600];
    (void)snprintf(s, sizeof s, gate_up, "s", 8U, "0, 1, 2, 3, 4, 5, 6, 7");
    (void)snprintf(d, sizeof d, gate_up, "d", 3U, "8, 9, 10");
    published(&c, layouts_parse(s), layouts_parse(d), false);
    struct plan *p = case_plan(&c);
    struct sim m = judge(&c, p);
    for (uint32_t tensor = 0; tensor < 2; tensor++)
        for (uint64_t row = 0; row < 8; row++)
            ck_assert_int_eq(origins(&m, &m.destination[0][8 + row / 3], tensor)[2 * row],
                             (int32_t)row);
    sim_close(&m);
    plan_free(p);
    case_close(&c);
}
END_TEST

/* A layout by regions of 1-d tensors: one line per (tensor, rank, begin, end). */
START_TEST(a21_fused_rows_cut_across_heads_are_each_mapped_once)
{
    /* 136 fused rows in groups (64 Q, 2 K, 2 V) on 8 ranks of 17: as three tensors by regions. */
    static const struct {
        const char *name;
        uint32_t rank, begin, end;
    } rows[] = {{"k", 3, 0, 2},    {"k", 7, 2, 4},     {"q", 0, 0, 17},  {"q", 1, 17, 34},
                {"q", 2, 34, 51},  {"q", 3, 51, 64},   {"q", 4, 64, 81}, {"q", 5, 81, 98},
                {"q", 6, 98, 115}, {"q", 7, 115, 128}, {"v", 3, 0, 2},   {"v", 7, 2, 4}};
    char text[4096] = "{'name': 's', 'ranks': 8, 'tensors': [";
    for (size_t i = 0; i < 12; i++) {
        size_t at = strlen(text);
        bool first = i == 0 || strcmp(rows[i - 1].name, rows[i].name) != 0;
        bool last = i == 11 || strcmp(rows[i + 1].name, rows[i].name) != 0;
        if (first)
            at += (size_t)snprintf(
                text + at, sizeof text - at,
                "{'name': '%s', 'shape': [%u, 3], 'dtype': 'float32', 'regions': [", rows[i].name,
                rows[i].name[0] == 'q' ? 128U : 4U);
        (void)snprintf(text + at, sizeof text - at,
                       "{'rank': %u, 'offset': [%u, 0], 'size': [%u, 3]}%s", rows[i].rank,
                       rows[i].begin, rows[i].end - rows[i].begin,
                       !last     ? ","
                       : i == 11 ? "]}]}"
                                 : "]},");
    }
    const char *taker =
        "{'name': 'd', 'ranks': 10, 'meshes': [{'name': 'm', 'shape': [2], 'ranks': "
        "[8, 9]}], 'tensors': [{'name': 'q', 'shape': [128, 3], 'dtype': 'float32', "
        "'mesh': 'm', 'placements': ['Shard(0)']}, {'name': 'k', 'shape': [4, 3], "
        "'dtype': 'float32', 'mesh': 'm', 'placements': ['Shard(0)']}, {'name': 'v', "
        "'shape': [4, 3], 'dtype': 'float32', 'mesh': 'm', 'placements': "
        "['Shard(0)']}]}";
    struct plan_case c;
    published(&c, layouts_parse(text), layouts_parse(taker), false);
    struct plan *p = case_plan(&c);
    struct sim m = judge(&c, p); /* each of the 136 rows arrives once */
    ck_assert_uint_eq(plan_totals(p)->network_bytes, 136 * 3 * 4);
    ck_assert_int_eq(origins(&m, &m.destination[0][8], 0)[0], 3); /* K row 0 is rank 3's */
    ck_assert_int_eq(origins(&m, &m.destination[0][9], 2)[6], 7); /* V row 2 is rank 7's */
    sim_close(&m);
    plan_free(p);
    case_close(&c);
}
END_TEST

/* --- large sizes: geometry only, no element is touched --------------------- */

struct pairs {
    uint64_t bytes[8][8];
    uint64_t transfers, greatest;
};

static int count_pairs(const struct plan_transfer *t, void *arg)
{
    struct pairs *pairs = arg;
    pairs->bytes[t->from.device][t->to.device] += t->bytes;
    pairs->transfers++;
    pairs->greatest = t->bytes > pairs->greatest ? t->bytes : pairs->greatest;
    return 0;
}

START_TEST(a24_bytes_beyond_32_bits_are_counted_right)
{
    struct plan_case c;
    struct pairs pairs = {0};
    struct layout *s = layouts_one("131072, 131072", 4, "4", "0, 1, 2, 3", S0, "");
    struct layout *d = layouts_one("131072, 131072", 8, "4", "4, 5, 6, 7", S1, "");
    s->tensors[0].dtype = d->tensors[0].dtype = DTYPE_UINT8;
    published(&c, s, d, false);
    struct plan *p = case_plan(&c);
    ck_assert_int_eq(plan_transfers(p, -1, count_pairs, &pairs), 0);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t k = 4; k < 8; k++)
            ck_assert_uint_eq(pairs.bytes[i][k], UINT64_C(1) << 30);
    ck_assert_uint_eq(plan_totals(p)->network_bytes, UINT64_C(1) << 34);
    ck_assert_uint_eq(plan_device_ingress(p, 7), UINT64_C(1) << 32);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(a34_a_plan_is_boxes_not_runs_of_rows)
{
    struct plan_case c;
    struct pairs pairs = {0};
    published(&c, layouts_one("8192, 4096", 8, "8", "0, 1, 2, 3, 4, 5, 6, 7", S1, ""),
              layouts_one("8192, 4096", 8, "8", "0, 1, 2, 3, 4, 5, 6, 7", S0, ""), false);
    c.input.options.least_piece_bytes = UINT64_C(1) << 40;
    struct plan *p = case_plan(&c);
    ck_assert_int_eq(plan_transfers(p, -1, count_pairs, &pairs), 0);
    ck_assert_uint_eq(pairs.transfers, 64);
    ck_assert_uint_eq(pairs.greatest, 1024 * 512 * 4);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(one_source_feeds_many_domains_by_relays)
{
    struct plan_case c = {.n_destinations = 1};
    uint32_t sizes[9], domains[9];
    for (uint32_t i = 0; i < 9; i++) {
        sizes[i] = 1;
        domains[i] = i;
    }
    case_topology(&c.topology, 9, sizes, domains);
    c.source = layouts_one("512", 1, "1", "0", RE, "");
    c.destinations[0] = layouts_one("512", 8, "8", "0, 1, 2, 3, 4, 5, 6, 7", RE, "");
    c.source_device = calloc(1, sizeof(int32_t));
    c.destination_device[0] = calloc(8, sizeof(int32_t));
    for (int32_t r = 0; r < 8; r++)
        c.destination_device[0][r] = r + 1;
    c.input.options = plan_options_default();
    c.input.options.least_piece_bytes = 16;
    c.input.options.chunk_bytes = 64;
    case_finish(&c);
    struct plan *p = case_plan(&c);
    struct sim m = judge(&c, p);
    const struct plan_totals *t = plan_totals(p);
    ck_assert_uint_eq(t->lower_bound,
                      2048); /* the source alone holds it; each domain needs it all */
    ck_assert_uint_eq(t->network_bytes, 8 * 2048);
    ck_assert_uint_le(t->busiest_bytes, 2048 + 2048 / 8);
    sim_close(&m);
    plan_free(p);
    case_close(&c);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(random_plans_write_each_needed_element_once_and_enter_each_domain_once)                      \
    X(random_plans_know_the_lower_bound_of_the_busiest_device)                                     \
    X(a_plan_does_not_depend_on_the_order_in_the_files)                                            \
    X(a01_uneven_rows_to_columns)                                                                  \
    X(a01_uneven_rows_to_one_without_padding)                                                      \
    X(a09_uneven_rows_to_uneven_columns)                                                           \
    X(a10_two_to_five_rows)                                                                        \
    X(a14_only_the_inner_dim_changes)                                                              \
    X(a14_nothing_crosses_the_halves_where_each_is_a_domain)                                       \
    X(a16_zero_size_tensors_need_no_transfer)                                                      \
    X(a17_one_element_to_the_first_of_two)                                                         \
    X(a17_scalars_reach_every_replica)                                                             \
    X(a20_fused_parts_are_tensors_of_their_own)                                                    \
    X(a21_fused_rows_cut_across_heads_are_each_mapped_once)                                        \
    X(a24_bytes_beyond_32_bits_are_counted_right)                                                  \
    X(a26_two_mesh_dims_on_both_sides)                                                             \
    X(a27_order_and_transpose)                                                                     \
    X(a29_replicas_on_both_sides_are_read_once)                                                    \
    X(a31_source_and_destination_ranks_overlap)                                                    \
    X(a32_six_to_two)                                                                              \
    X(a32_two_to_six)                                                                              \
    X(a34_a_plan_is_boxes_not_runs_of_rows)                                                        \
    X(a36_a_replica_axis_is_not_added_up)                                                          \
    X(one_source_feeds_many_domains_by_relays)
#include "test/lib/main.h"
