/* The simulation of plans: times by hand for small ones; a second simulation that knows nothing but the programs of all
 * nodes; and what must hold for any plan. */
#include <check.h>
#include <inttypes.h>
#include <math.h>

#include "plan/plan_simulate.h"
#include "plan/program.h"
#include "test/lib/plan_random.h"

enum { KIB = 1024, MIB = 1 << 20 };

/* n tensors of kib KiB, whole at every rank of both sides. */
static void whole_tensors(struct zoo_case *c, uint32_t n, uint32_t kib, uint32_t sources,
                          uint32_t takers, uint32_t nodes, uint32_t per_node, uint32_t first_taker)
{
    uint64_t shape[] = {kib, 256};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", sources);
    c->destinations[0] = case_layout("rollout", takers);
    int32_t sm = case_mesh(c->source, 1, &sources, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 1, &takers, NULL, 0, 1);
    for (uint32_t i = 0; i < n; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%03u", i);
        case_tensor(c->source, name, DTYPE_FLOAT32, 2, shape, sm, "R");
        case_tensor(c->destinations[0], name, DTYPE_FLOAT32, 2, shape, dm, "R");
    }
    case_topology(c, nodes, per_node, 1);
    c->topology.network_bytes_per_s = MIB; /* a MiB a second: times are MiB */
    c->topology.domain_bytes_per_s = 8 * MIB;
    case_finish(c, 0, &first_taker);
    c->input.options.chunk_bytes = MIB;
}

static struct plan_simulation simulate(const struct zoo_case *c, const struct plan_model *m)
{
    struct plan *p = NULL;
    struct plan_simulation s = {0};
    struct err e = {0};
    ck_assert_msg(plan_make(&c->input, &p, &e) == 0, "%s", e.text);
    ck_assert_msg(plan_simulate(p, m, &s, &e) == 0, "%s", e.text);
    if (m->peers == 1 && !(m->chunk_latency_s > 0)) /* one model, not two */
        ck_assert_double_eq(plan_predict_s(p, &c->topology), s.makespan_s);
    plan_free(p);
    return s;
}

static void expect(struct zoo_case *c, double latency, uint32_t peers, double seconds)
{
    struct plan_model m = plan_model_of(&c->topology);
    m.chunk_latency_s = latency;
    m.peers = peers;
    struct plan_simulation s = simulate(c, &m);
    ck_assert_double_eq_tol(s.makespan_s, seconds, 1e-9);
    plan_simulation_close(&s);
    case_close(c);
}

/* --- by hand --------------------------------------------------------------------------------------------- */

START_TEST(a_link_takes_bytes_over_its_rate)
{
    struct zoo_case c;
    whole_tensors(&c, 8, 512, 1, 1, 2, 1, 1);
    expect(&c, 0, 1, 4);
}
END_TEST

/* 16 MiB in as many messages as the simulation says (at least 16: they have at most a MiB). */
START_TEST(latency_is_paid_for_each_message_or_overlaps_with_peers)
{
    struct zoo_case c;
    whole_tensors(&c, 16, 1024, 1, 1, 2, 1, 1);
    struct plan_model m = plan_model_of(&c.topology);
    struct plan_simulation s = simulate(&c, &m);
    double n = (double)s.tiers[TIER_NETWORK].messages;
    ck_assert_double_ge(n, 16);
    ck_assert_double_eq_tol(s.makespan_s, 16, 1e-9);
    plan_simulation_close(&s);
    m.chunk_latency_s = 0.25;
    s = simulate(&c, &m);
    ck_assert_double_eq_tol(s.makespan_s, 16 + n * 0.25, 1e-9);
    ck_assert_double_eq_tol(s.tiers[TIER_NETWORK].first_s, 0.25, 1e-9);
    plan_simulation_close(&s);
    m.peers =
        8; /* never more than 8 slots: the link has always something to do after the first wait */
    s = simulate(&c, &m);
    ck_assert_double_ge(s.makespan_s, 16.25 - 1e-9);
    ck_assert_double_le(s.makespan_s, 16 + n * 0.25 / 4);
    plan_simulation_close(&s);
    case_close(&c);
    /* A single one has nothing to overlap with. */
    whole_tensors(&c, 1, 128, 1, 1, 2, 1, 1);
    expect(&c, 3, 8, 3 + 0.125);
}
END_TEST

/* A relay sends on what it has: both domains could also be fed by the source one after another, so two sends. */
START_TEST(a_relay_waits_for_what_it_passes_on)
{
    struct zoo_case c;
    whole_tensors(&c, 1, 64, 1, 2, 3, 1, 1);
    expect(&c, 0, 1, 2 * 0.0625);
}
END_TEST

/* What is relayed goes in messages of a 256th, and a relay is two of them (of 15/16 each, and one of them more at most
 * until its group is through) behind: three hops cost less than a thirtieth, not a message of 1 MiB each. */
START_TEST(hops_of_little_cost_little)
{
    struct zoo_case c;
    whole_tensors(&c, 1, 32 * KIB, 1, 4, 5, 1, 1);
    struct plan_model m = plan_model_of(&c.topology);
    struct plan_simulation s = simulate(&c, &m);
    ck_assert_double_ge(s.makespan_s, 32);
    ck_assert_double_le(s.makespan_s, 32 + 32.0 / 30);
    for (uint32_t d = 1; d < 5;
         d++) /* one to take from, one to send to: nobody but the last has less to do */
        ck_assert_uint_eq(s.ports[plan_port_of(d, TIER_NETWORK, true)].bytes, d < 4 ? 32 * MIB : 0);
    plan_simulation_close(&s);
    case_close(&c);
}
END_TEST

/* Into the domain once, then copied to the other device at the domain's rate. */
START_TEST(copies_inside_a_site_follow_the_message)
{
    struct zoo_case c;
    whole_tensors(&c, 1, 128, 1, 2, 2, 2, 2);
    expect(&c, 0, 1, 0.125 + 0.125 / 8);
    /* The source's own node, all with no message: three copies out of one device. */
    whole_tensors(&c, 1, 128, 1, 3, 1, 4, 1);
    expect(&c, 0, 1, 3 * 0.125 / 8);
}
END_TEST

START_TEST(a_broadcast_costs_its_bytes_per_hop_not_whole_messages)
{
    struct zoo_case c;
    whole_tensors(&c, 1, 64, 1, 3, 4, 1, 1);
    c.input.options.strategy = PLAN_GATHER_BROADCAST;
    expect(&c, 0, 1, 3 * 0.0625);
    /* Two tensors: the second one follows right behind. */
    whole_tensors(&c, 2, 64, 1, 3, 4, 1, 1);
    c.input.options.strategy = PLAN_GATHER_BROADCAST;
    expect(&c, 0, 1, 3 * 0.0625 + 0.0625);
    /* Many messages: two more hops cost a message each, of a 256th. */
    whole_tensors(&c, 1, 64 * KIB, 1, 3, 4, 1, 1);
    c.input.options.strategy = PLAN_GATHER_BROADCAST;
    expect(&c, 0, 1, 64 + 2 * 0.25);
}
END_TEST

/* Two halves on two nodes: the other half is gathered first. */
START_TEST(a_broadcast_waits_for_its_gather)
{
    uint64_t shape[] = {128, 256};
    uint32_t two = 2, one = 1, first = 2;
    struct zoo_case c;
    memset(&c, 0, sizeof c);
    c.source = case_layout("train", 2);
    c.destinations[0] = case_layout("rollout", 1);
    case_tensor(c.source, "w", DTYPE_FLOAT32, 2, shape, case_mesh(c.source, 1, &two, NULL, 0, 1),
                "0");
    case_tensor(c.destinations[0], "w", DTYPE_FLOAT32, 2, shape,
                case_mesh(c.destinations[0], 1, &one, NULL, 0, 1), "R");
    case_topology(&c, 3, 1, 1);
    c.topology.network_bytes_per_s = MIB;
    c.topology.domain_bytes_per_s = MIB;
    case_finish(&c, 0, &first);
    c.input.options.strategy = PLAN_GATHER_BROADCAST;
    expect(&c, 0, 1, 0.125 / 2 + 0.125);
}
END_TEST

START_TEST(rates_that_are_missing_and_models_without_sense_are_refused)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct plan_simulation s = {0};
    struct err e = {0};
    whole_tensors(&c, 1, 128, 1, 2, 3, 1, 1);
    ck_assert_int_eq(plan_make(&c.input, &p, NULL), 0);
    struct plan_model good = plan_model_of(&c.topology), m = good;
    m.network_bytes_per_s = 0;
    ck_assert_int_eq(plan_simulate(p, &m, &s, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "network_gbytes_per_s"));
    m = good;
    m.chunk_latency_s = -1;
    ck_assert_int_eq(plan_simulate(p, &m, &s, NULL), RS_EINVAL);
    m.chunk_latency_s = (double)INFINITY;
    ck_assert_int_eq(plan_simulate(p, &m, &s, NULL), RS_EINVAL);
    m = good;
    m.peers = 0;
    ck_assert_int_eq(plan_simulate(p, &m, &s, NULL), RS_EINVAL);
    m.peers = MODEL_MOST_PEERS + 1;
    ck_assert_int_eq(plan_simulate(p, &m, &s, NULL), RS_EINVAL);
    ck_assert_ptr_null(s.ports);
    plan_free(p);
    case_close(&c);
}
END_TEST

/* --- a second simulation, from the programs ---------------------------------------------------------------- */

/* A message as both of its ends list it. */
struct wire {
    uint32_t round, order, from, to;
    uint64_t begin, end;
    const struct program *send, *receive;
    const struct program_stream *out, *in;
};

/* Bytes [begin, end) of a cell that came to a place, and the group of the device that brought them. */
struct arrival {
    uint32_t device, layout, rank;
    uint64_t cell, begin, end;
    uint32_t group;
};

enum { MOST_DEVICES = 64, MOST_GROUPS = 1 << 14, MOST_ARRIVALS = 1 << 16 };

struct reference {
    double out[MOST_DEVICES][2], in[MOST_DEVICES][2]; /* [device][network] */
    double *group_end[MOST_DEVICES];
    uint32_t group_size[MOST_DEVICES][MOST_GROUPS];
    uint32_t group[MOST_DEVICES], round[MOST_DEVICES];
    double slot[MOST_DEVICES][64];
    uint32_t slot_group[MOST_DEVICES][64]; /* group + 1 that has it */
    double opened[MOST_DEVICES];
    struct arrival *arrivals;
    uint32_t n_arrivals, n_slots;
    double network_s, domain_s, end; /* per byte */
};

static double most(double a, double b)
{
    return a > b ? a : b;
}

static double slot_free(const struct reference *r, uint32_t d, uint32_t i)
{
    return r->slot_group[d][i] == 0 ? 0 : r->group_end[d][r->slot_group[d][i] - 1];
}

/* Groups end as their members do: one that is still open keeps its slots. */
static double enter(struct reference *r, uint32_t d, uint32_t round)
{
    uint32_t g = r->group[d];
    if (r->group_size[d][g] > 0 && (r->round[d] != round || r->group_size[d][g] == r->n_slots))
        g = ++r->group[d];
    ck_assert_uint_lt(g, MOST_GROUPS);
    r->round[d] = round;
    r->group_size[d][g]++;
    if (r->group_size[d][g] == 1 && g >= 4)
        r->opened[d] = most(r->opened[d], r->group_end[d][g - 4]);
    uint32_t best = PROGRAM_NONE;
    for (uint32_t i = 0; i < r->n_slots; i++)
        if (r->slot_group[d][i] != g + 1 &&
            (best == PROGRAM_NONE || slot_free(r, d, i) < slot_free(r, d, best)))
            best = i;
    ck_assert_uint_ne(best, PROGRAM_NONE);
    r->opened[d] = most(r->opened[d], slot_free(r, d, best));
    r->slot_group[d][best] = g + 1;
    return r->opened[d];
}

static void copy(struct reference *r, uint32_t from, uint32_t to, uint64_t bytes, double ready)
{
    if (from == to)
        return;
    r->out[from][0] = most(r->out[from][0], ready) + (double)bytes * r->domain_s;
    r->in[to][0] = most(r->in[to][0], ready) + (double)bytes * r->domain_s;
    r->end = most(r->end, most(r->out[from][0], r->in[to][0]));
}

/* The items that a message has bytes of; fn gets each and how many. */
static void items_of(const struct program *p, const struct program_stream *s, const struct wire *w,
                     void (*fn)(struct reference *r, const struct program *p,
                                struct program_item item, uint64_t begin, uint64_t end,
                                double *time),
                     struct reference *r, double *time)
{
    uint64_t at = 0;
    for (uint32_t i = s->first_item; i < s->first_item + s->n_items; i++) {
        uint64_t bytes = program_cell_bytes(p, program_item(p, i).cell);
        uint64_t begin = at > w->begin ? at : w->begin;
        uint64_t end = at + bytes < w->end ? at + bytes : w->end;
        if (begin < end)
            fn(r, p, program_item(p, i), begin - at, end - at, time);
        at += bytes;
    }
}

static void wait_for(struct reference *r, const struct program *p, struct program_item item,
                     uint64_t begin, uint64_t end, double *time)
{
    const struct program_place *from = &p->places[item.from];
    uint64_t found = from->side == PROGRAM_SOURCE ? end - begin : 0;
    for (uint32_t i = 0; i < r->n_arrivals && from->side != PROGRAM_SOURCE; i++) {
        const struct arrival *a = &r->arrivals[i];
        if (a->device == p->devices[from->device].device && a->layout == from->layout &&
            a->rank == from->rank && a->cell == program_cell(p, item.cell).id && a->begin < end &&
            a->end > begin) {
            *time = most(*time, r->group_end[a->device][a->group]);
            found += (a->end < end ? a->end : end) - (a->begin > begin ? a->begin : begin);
        }
    }
    ck_assert_msg(found == end - begin, "a relay sends what never came");
}

static uint32_t receiver; /* of the message that land() is called for */

static void land(struct reference *r, const struct program *p, struct program_item item,
                 uint64_t begin, uint64_t end, double *time)
{
    const uint32_t *list = p->lists + item.places;
    for (uint32_t i = 0; i < list[0]; i++) {
        const struct program_place *to = &p->places[list[1 + i]];
        uint32_t device = p->devices[to->device].device;
        copy(r, receiver, device, end - begin, *time);
        ck_assert_uint_lt(r->n_arrivals, MOST_ARRIVALS);
        if (device == receiver)
            r->arrivals[r->n_arrivals++] =
                (struct arrival){device, to->layout, to->rank,        program_cell(p, item.cell).id,
                                 begin,  end,        r->group[device]};
    }
}

static void run_wire(struct reference *r, const struct wire *w)
{
    bool network = w->out->tier == 2;
    double open = enter(r, w->from, w->round), ready = 0;
    open = most(open, enter(r, w->to, w->round));
    items_of(w->send, w->out, w, wait_for, r, &ready);
    double end = most(most(open, ready), most(r->out[w->from][network], r->in[w->to][network])) +
                 (double)(w->end - w->begin) * (network ? r->network_s : r->domain_s);
    r->out[w->from][network] = r->in[w->to][network] = end;
    double *a = &r->group_end[w->from][r->group[w->from]];
    double *b = &r->group_end[w->to][r->group[w->to]];
    *a = most(*a, end);
    *b = most(*b, end);
    r->end = most(r->end, end);
    receiver = w->to;
    items_of(w->receive, w->in, w, land, r, &end);
}

static int wire_compare(const void *a, const void *b)
{
    const struct wire *x = a, *y = b;
    if (x->round != y->round)
        return x->round < y->round ? -1 : 1;
    if (x->order != y->order)
        return x->order < y->order ? -1 : 1;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Pairs the messages of all programs: sends first, then their other ends. */
static size_t pair(const struct program *v, uint32_t n_nodes, struct wire **ret)
{
    size_t n = 0, capacity = 0;
    struct wire *all = NULL;
    for (uint32_t k = 0; k < n_nodes; k++)
        for (uint32_t i = 0; i < v[k].n_messages; i++) {
            const struct program_message *m = &v[k].messages[i];
            const struct program_stream *s = &v[k].streams[m->stream];
            if (s->send == 0)
                continue;
            if (n == capacity)
                all = realloc(all, (capacity = 2 * capacity + 64) * sizeof *all);
            all[n++] = (struct wire){.round = m->round,
                                     .order = s->order,
                                     .begin = m->begin,
                                     .end = m->end,
                                     .from = v[k].devices[s->device].device,
                                     .to = s->peer,
                                     .send = &v[k],
                                     .out = s};
        }
    if (n > 0)
        qsort(all, n, sizeof *all, wire_compare);
    for (size_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < n_nodes && all[i].in == NULL; k++)
            for (uint32_t j = 0; j < v[k].n_streams && all[i].in == NULL; j++)
                if (v[k].streams[j].order == all[i].order && v[k].streams[j].send == 0) {
                    all[i].receive = &v[k];
                    all[i].in = &v[k].streams[j];
                }
    *ret = all;
    return n;
}

static double reference_s(const struct zoo_case *c, const struct plan *p)
{
    uint32_t n_nodes = c->topology.n_nodes;
    struct program *v = calloc(n_nodes, sizeof *v);
    struct buf *bytes = calloc(n_nodes, sizeof *bytes);
    struct reference *r = calloc(1, sizeof *r);
    struct wire *all;
    r->arrivals = calloc(MOST_ARRIVALS, sizeof *r->arrivals);
    r->n_slots = c->input.options.ring_slots;
    r->network_s = 1 / c->topology.network_bytes_per_s;
    r->domain_s = 1 / c->topology.domain_bytes_per_s;
    ck_assert_uint_le(c->topology.n_devices, MOST_DEVICES);
    for (uint32_t d = 0; d < c->topology.n_devices; d++)
        r->group_end[d] = calloc(MOST_GROUPS, sizeof *r->group_end[d]);
    for (uint32_t k = 0; k < n_nodes; k++) {
        buf_init(&bytes[k]);
        ck_assert_int_eq(plan_program(p, k, &bytes[k], NULL), 0);
        ck_assert_int_eq(program_open(bytes[k].data, bytes[k].n_bytes, &v[k], NULL), 0);
        for (uint32_t d = 0; d < v[k].n_devices; d++)
            for (uint32_t i = 0; i < v[k].devices[d].n_copies; i++) {
                struct program_item item = program_item(&v[k], v[k].devices[d].first_copy + i);
                const uint32_t *list = v[k].lists + item.places;
                for (uint32_t j = 0; j < list[0]; j++)
                    copy(r, v[k].devices[d].device,
                         v[k].devices[v[k].places[list[1 + j]].device].device,
                         program_cell_bytes(&v[k], item.cell), 0);
            }
    }
    size_t n = pair(v, n_nodes, &all);
    for (size_t i = 0; i < n; i++)
        run_wire(r, &all[i]);
    double end = r->end;
    for (uint32_t k = 0; k < n_nodes; k++)
        buf_close(&bytes[k]);
    for (uint32_t d = 0; d < c->topology.n_devices; d++)
        free(r->group_end[d]);
    free(r->arrivals);
    free(all);
    free(bytes);
    free(v);
    free(r);
    return end;
}

/* Tensors below a message, so that cuts lie between tensors and both simulations have the same messages. */
START_TEST(a_second_simulation_from_the_programs_agrees)
{
    static const struct {
        uint32_t n, kib, sources, takers, nodes, per_node, first_taker, per_domain, slots;
    } cases[] = {{40, 60, 1, 6, 7, 1, 1, 1, 8},   {40, 60, 2, 6, 8, 1, 2, 1, 2},
                 {24, 600, 4, 8, 3, 4, 4, 1, 8},  {24, 600, 4, 16, 5, 4, 4, 2, 8},
                 {24, 600, 4, 16, 5, 4, 4, 2, 3}, {30, 900, 8, 8, 2, 8, 2, 1, 8},
                 {30, 900, 2, 24, 7, 4, 4, 3, 4}};
    unsigned relayed = 0, between_nodes = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int strategy = PLAN_RESHARD; strategy <= PLAN_DIRECT; strategy++) {
            struct zoo_case c;
            struct plan *p = NULL;
            struct plan_simulation s = {0};
            struct err e = {0};
            whole_tensors(&c, cases[i].n, cases[i].kib, cases[i].sources, cases[i].takers,
                          cases[i].nodes, cases[i].per_node, cases[i].first_taker);
            for (uint32_t d = 0; d < c.topology.n_devices; d++)
                c.topology.devices[d].domain = c.topology.devices[d].node / cases[i].per_domain;
            c.input.options.strategy = (enum plan_strategy)strategy;
            c.input.options.ring_slots = cases[i].slots;
            ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
            struct plan_model m = plan_model_of(&c.topology);
            ck_assert_msg(plan_simulate(p, &m, &s, &e) == 0, "%s", e.text);
            relayed += plan_totals(p)->max_relay_depth > 1;
            between_nodes += s.tiers[TIER_DOMAIN].messages > 0;
            double expected = reference_s(&c, p);
            ck_assert_msg(fabs(s.makespan_s - expected) <= 1e-9 * expected,
                          "case %zu, strategy %d: %.9f, not %.9f", i, strategy, s.makespan_s,
                          expected);
            plan_simulation_close(&s);
            plan_free(p);
            case_close(&c);
        }
    ck_assert_uint_gt(relayed, 3);
    ck_assert_uint_gt(between_nodes, 3);
}
END_TEST

/* --- any plan ---------------------------------------------------------------------------------------------- */

struct sums {
    uint64_t tier[3], in[MOST_DEVICES], out[MOST_DEVICES]; /* devices: network */
};

static int add_up(const struct plan_transfer *t, void *arg)
{
    struct sums *s = arg;
    s->tier[t->tier] += t->bytes;
    if (t->tier == TIER_NETWORK) {
        s->out[t->from.device] += t->bytes;
        s->in[t->to.device] += t->bytes;
    }
    return 0;
}

static void holds_for(const struct zoo_case *c, const struct plan *p,
                      const struct plan_simulation *s, const struct plan_model *m)
{
    struct sums sums = {0};
    double busy[3] = {0}, buckets[3] = {0};
    ck_assert_int_eq(plan_transfers(p, -1, add_up, &sums), 0);
    for (int t = 0; t < 3; t++) {
        const struct plan_tier_line *x = &s->tiers[t];
        ck_assert_uint_eq(x->bytes, sums.tier[t]);
        for (int i = 0; i < SIMULATION_BUCKETS; i++)
            buckets[t] += x->bucket[i];
        ck_assert_double_le(x->last_s, s->makespan_s);
        ck_assert_double_le(x->first_s, x->last_s);
    }
    for (uint32_t d = 0; d < c->topology.n_devices; d++) {
        ck_assert_uint_eq(s->ports[plan_port_of(d, TIER_NETWORK, false)].bytes, sums.in[d]);
        ck_assert_uint_eq(s->ports[plan_port_of(d, TIER_NETWORK, true)].bytes, sums.out[d]);
    }
    for (uint32_t i = 0; i < 4 * s->n_devices; i++) {
        double rate =
            plan_port_tier(i) == TIER_NETWORK ? m->network_bytes_per_s : m->domain_bytes_per_s;
        ck_assert_double_eq_tol(s->ports[i].busy_s, (double)s->ports[i].bytes / rate, 1e-9);
        ck_assert_double_le(s->ports[i].busy_s, s->ports[i].last_s + 1e-9);
        ck_assert_double_le(s->ports[i].last_s, s->makespan_s);
        busy[plan_port_tier(i)] += s->ports[i].busy_s;
    }
    for (int t = 1; t < 3; t++)
        ck_assert_double_eq_tol(busy[t], buckets[t], 1e-6 * (1 + busy[t]));
}

START_TEST(random_plans_move_every_byte_and_no_link_is_faster_than_its_rate)
{
    for (uint64_t seed = 1; seed <= 300; seed++) {
        struct zoo_case c;
        struct plan *p = NULL;
        struct err e = {0};
        random_case(seed, &c);
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
        ck_assert_uint_le(c.topology.n_devices, MOST_DEVICES);
        struct plan_model m = {.network_bytes_per_s = 1000, .domain_bytes_per_s = 3000, .peers = 1};
        double before = 0;
        for (int i = 0; i < 4; i++) {
            struct plan_simulation s = {0};
            m.peers = (i & 1) != 0 ? 4 : 1;
            m.chunk_latency_s = (i & 2) != 0 ? 0.01 : 0;
            ck_assert_msg(plan_simulate(p, &m, &s, &e) == 0, "seed %" PRIu64 ": %s", seed, e.text);
            holds_for(&c, p, &s, &m);
            ck_assert_msg(i != 2 || s.makespan_s >= before - 1e-9, "latency makes it faster");
            before = i == 0 ? s.makespan_s : before;
            plan_simulation_close(&s);
        }
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

START_TEST(no_memory_at_any_point_is_an_answer)
{
    for (int strategy = 0; strategy < 3; strategy++) {
        struct zoo_case c;
        struct plan *p = NULL;
        whole_tensors(&c, 8, 512, 2, 6, 3, 4, 2);
        c.input.options.strategy = (enum plan_strategy)strategy;
        ck_assert_int_eq(plan_make(&c.input, &p, NULL), 0);
        struct plan_model m = plan_model_of(&c.topology);
        m.peers = 2;
        long n = 1;
        for (int struck = 1; struck; n++) {
            struct plan_simulation s = {0};
            mem_fail_at(n);
            int r = plan_simulate(p, &m, &s, NULL);
            struck = mem_failed();
            mem_fail_at(0);
            ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
            plan_simulation_close(&s);
        }
        ck_assert_int_gt(n, 8);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_link_takes_bytes_over_its_rate)                                                            \
    X(latency_is_paid_for_each_message_or_overlaps_with_peers)                                     \
    X(a_relay_waits_for_what_it_passes_on)                                                         \
    X(hops_of_little_cost_little)                                                                  \
    X(copies_inside_a_site_follow_the_message)                                                     \
    X(a_broadcast_costs_its_bytes_per_hop_not_whole_messages)                                      \
    X(a_broadcast_waits_for_its_gather)                                                            \
    X(rates_that_are_missing_and_models_without_sense_are_refused)                                 \
    X(a_second_simulation_from_the_programs_agrees)                                                \
    X(random_plans_move_every_byte_and_no_link_is_faster_than_its_rate)                            \
    X(no_memory_at_any_point_is_an_answer)
#include "test/lib/main.h"
