/* Plans against real topologies: who sends, who takes in, and what crosses a domain's border. What is expected is
 * counted element by element from the layouts, or by hand; the plan is known by its stream of transfers alone. */
#include <check.h>
#include <inttypes.h>

#include "test/lib/layouts.h"
#include "test/lib/plan_zoo.h"

/* --- what the layouts ask for ---------------------------------------------------------------------------- */

static const struct tensor *named(const struct layout *l, const char *name)
{
    int64_t i = layout_find(l, name);
    ck_assert_int_ge(i, 0);
    return &l->tensors[i];
}

static bool held_in(const struct zoo_case *c, const struct layout *l, const int32_t *device,
                    const struct tensor *t, const uint64_t *at, uint32_t domain)
{
    for (uint32_t r = 0; r < l->n_ranks; r++)
        if (device[r] >= 0 && c->topology.devices[device[r]].domain == domain &&
            layouts_holds(l, t, r, at) > 0)
            return true;
    return false;
}

/* Bytes that a domain needs and does not hold, element by element. */
static uint64_t missing(const struct zoo_case *c, uint32_t domain)
{
    uint64_t bytes = 0, at[BOX_MAX_DIMS];
    for (uint32_t i = 0; i < c->source->n_tensors; i++) {
        const struct tensor *s = &c->source->tensors[i];
        const struct tensor *d = named(c->destinations[0], s->name);
        for (uint64_t k = 0; k < layouts_elements(s); k++) {
            layouts_unravel(s, k, at);
            if (held_in(c, c->destinations[0], c->destination_device[0], d, at, domain) &&
                !held_in(c, c->source, c->source_device, s, at, domain))
                bytes += dtype_bytes(d->dtype);
        }
    }
    return bytes;
}

/* --- what a plan does ------------------------------------------------------------------------------------ */

enum { MANY = 64 };

struct moved {
    const struct topology *t;
    uint64_t into_domain[MANY], network_in[MANY], network_out[MANY]; /* out and in: per device */
    uint64_t from_source[MANY];                                      /* network, per device */
    uint64_t relayed, network, domain, staged;
    uint64_t between_nodes; /* inside a domain */
};

static int look(const struct plan_transfer *t, void *arg)
{
    struct moved *m = arg;
    const struct device_place *from = &m->t->devices[t->from.device],
                              *to = &m->t->devices[t->to.device];
    ck_assert_uint_lt(t->to.device, MANY);
    ck_assert_int_eq(t->tier == TIER_NETWORK, from->domain != to->domain);
    if (t->tier == TIER_DOMAIN) {
        m->domain += t->bytes;
        m->between_nodes += from->node != to->node ? t->bytes : 0;
    }
    if (t->tier != TIER_NETWORK)
        return 0;
    m->network += t->bytes;
    m->into_domain[to->domain] += t->bytes;
    m->network_in[t->to.device] += t->bytes;
    m->network_out[t->from.device] += t->bytes;
    m->staged += t->to.side == SIDE_STAGING ? t->bytes : 0;
    if (t->from.side == SIDE_SOURCE)
        m->from_source[t->from.device] += t->bytes;
    else
        m->relayed += t->bytes;
    return 0;
}

static struct moved plan_and_look(struct zoo_case *c, struct plan_totals *ret_totals)
{
    struct plan *p = NULL;
    struct err e = {0};
    struct moved m = {.t = &c->topology};
    ck_assert_msg(plan_make(&c->input, &p, &e) == 0, "%s", e.text);
    ck_assert_msg(plan_check(p, &c->input, true, &e) == 0, "%s", e.text);
    ck_assert_int_eq(plan_transfers(p, -1, look, &m), 0);
    *ret_totals = *plan_totals(p);
    ck_assert_uint_eq(m.network, ret_totals->network_bytes);
    plan_free(p);
    return m;
}

/* Each domain takes in just what it misses. */
static void once_into_each_domain(const struct zoo_case *c, const struct moved *m)
{
    for (uint32_t d = 0; d < c->topology.n_domains; d++)
        ck_assert_uint_eq(m->into_domain[d], missing(c, d));
}

static void domains_of_nodes(struct zoo_case *c, const uint32_t *domain_of)
{
    for (uint32_t d = 0; d < c->topology.n_devices; d++)
        c->topology.devices[d].domain = domain_of[c->topology.devices[d].node];
}

/* n tensors of rows x columns in float32; ranks of both sides on devices as told. */
struct spread {
    uint32_t n;
    uint64_t rows, columns;
    uint32_t source_dims[2], destination_dims[2];
    const char *from, *to; /* placements over those */
    uint32_t nodes, per_node;
    const uint32_t *domain_of; /* per node; NULL: its own */
    const uint32_t *source_on, *destination_on;
};

/* Less than a message is not shared out, so messages are a tensor's size here. */
static void small_units(struct zoo_case *c)
{
    c->input.options.chunk_bytes = 1024;
    c->input.options.least_piece_bytes = 256;
}

static void build(struct zoo_case *c, const struct spread *s)
{
    uint64_t shape[] = {s->rows, s->columns};
    uint32_t zero = 0;
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", s->source_dims[0] * s->source_dims[1]);
    c->destinations[0] = case_layout("rollout", s->destination_dims[0] * s->destination_dims[1]);
    int32_t sm = case_mesh(c->source, 2, s->source_dims, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 2, s->destination_dims, NULL, 0, 1);
    for (uint32_t i = 0; i < s->n; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%03u", i);
        case_tensor(c->source, name, DTYPE_FLOAT32, 2, shape, sm, s->from);
        case_tensor(c->destinations[0], name, DTYPE_FLOAT32, 2, shape, dm, s->to);
    }
    case_topology(c, s->nodes, s->per_node, 1);
    if (s->domain_of != NULL)
        domains_of_nodes(c, s->domain_of);
    case_finish(c, 0, &zero);
    for (uint32_t r = 0; r < c->source->n_ranks; r++)
        c->source_device[r] = (int32_t)s->source_on[r];
    for (uint32_t r = 0; r < c->destinations[0]->n_ranks; r++)
        c->destination_device[0][r] = (int32_t)s->destination_on[r];
    small_units(c);
}

/* --- relays ---------------------------------------------------------------------------------------------- */

/* Two replicas on two nodes, six domains of one device: everything six times. */
static const struct spread FAN = {.n = 60,
                                  .rows = 16,
                                  .columns = 16,
                                  .source_dims = {2, 1},
                                  .destination_dims = {6, 1},
                                  .from = "RR",
                                  .to = "RR",
                                  .nodes = 8,
                                  .per_node = 1,
                                  .source_on = (const uint32_t[]){0, 1},
                                  .destination_on = (const uint32_t[]){2, 3, 4, 5, 6, 7}};
enum { FAN_BYTES = 60 * 16 * 16 * 4, FAN_TENSOR = 16 * 16 * 4 };

START_TEST(relays_send_where_domains_outnumber_source_replicas)
{
    struct zoo_case c;
    struct plan_totals t;
    build(&c, &FAN);
    struct moved m = plan_and_look(&c, &t);
    once_into_each_domain(&c, &m);
    ck_assert_uint_eq(m.network, 6 * FAN_BYTES);
    /* A domain takes in everything over its one device: the bound; no device sends more than that, a tensor aside. With
     * eight devices to send 6 times everything, the sources can't have sent it all then. */
    ck_assert_uint_eq(t.lower_bound, FAN_BYTES);
    ck_assert_uint_gt(m.relayed, 0);
    ck_assert_uint_eq(m.relayed + m.from_source[0] + m.from_source[1], 6 * FAN_BYTES);
    ck_assert_uint_ge(m.from_source[0] + m.from_source[1], FAN_BYTES);
    for (uint32_t d = 0; d < 8; d++)
        ck_assert_uint_le(m.network_out[d], FAN_BYTES + FAN_TENSOR);
    case_close(&c);
}
END_TEST

START_TEST(without_relays_the_sources_send_everything_and_share_it)
{
    struct zoo_case c;
    struct plan_totals t;
    build(&c, &FAN);
    c.input.options.relay = false;
    struct moved m = plan_and_look(&c, &t);
    once_into_each_domain(&c, &m);
    ck_assert_uint_eq(m.relayed, 0);
    ck_assert_uint_eq(t.max_relay_depth, 1);
    for (uint32_t d = 0; d < 2; d++) { /* half of six times everything, to a tensor */
        ck_assert_uint_le(m.from_source[d], 3 * FAN_BYTES + FAN_TENSOR);
        ck_assert_uint_ge(m.from_source[d], 3 * FAN_BYTES - FAN_TENSOR);
    }
    case_close(&c);
}
END_TEST

/* Four replicas on four nodes feed as many domains as one each. */
START_TEST(source_replicas_on_different_nodes_share_the_load)
{
    struct spread s = FAN;
    struct zoo_case c;
    struct plan_totals t;
    s.source_dims[0] = 4;
    s.destination_dims[0] = 4;
    s.source_on = (const uint32_t[]){0, 1, 2, 3};
    s.destination_on = (const uint32_t[]){4, 5, 6, 7};
    for (int relay = 0; relay < 2; relay++) {
        build(&c, &s);
        c.input.options.relay = relay != 0;
        struct moved m = plan_and_look(&c, &t);
        once_into_each_domain(&c, &m);
        uint64_t sum = 0;
        for (uint32_t d = 0; d < 4; d++) {
            sum += m.from_source[d];
            ck_assert_uint_le(m.from_source[d], FAN_BYTES + FAN_TENSOR);
            ck_assert_uint_ge(m.from_source[d], FAN_BYTES / 4 - FAN_TENSOR);
        }
        ck_assert_uint_eq(sum + m.relayed, 4 * FAN_BYTES);
        ck_assert(relay != 0 || m.relayed == 0);
        case_close(&c);
    }
}
END_TEST

/* --- ingest ---------------------------------------------------------------------------------------------- */

/* Four devices of a domain need all of it: a quarter comes in over each, three copies of each part go on. */
START_TEST(ingest_is_split_over_a_domains_devices)
{
    struct spread s = FAN;
    struct zoo_case c;
    struct plan_totals t;
    s.nodes = 2;
    s.per_node = 4;
    s.source_dims[0] = 4;
    s.destination_dims[0] = 4;
    s.source_on = (const uint32_t[]){0, 1, 2, 3};
    s.destination_on = (const uint32_t[]){4, 5, 6, 7};
    build(&c, &s);
    struct moved m = plan_and_look(&c, &t);
    once_into_each_domain(&c, &m);
    ck_assert_uint_eq(m.network, FAN_BYTES);
    ck_assert_uint_eq(t.lower_bound, FAN_BYTES / 4);
    ck_assert_uint_eq(m.domain, 3 * FAN_BYTES);
    ck_assert_uint_eq(m.between_nodes, 0);
    for (uint32_t d = 4; d < 8; d++) {
        ck_assert_uint_le(m.network_in[d], FAN_BYTES / 4 + FAN_TENSOR);
        ck_assert_uint_ge(m.network_in[d], FAN_BYTES / 4 - FAN_TENSOR);
    }
    case_close(&c);
}
END_TEST

/* One rank needs three quarters of all bytes, the three others of its node share the rest. Staging evens that out where
 * it is allowed; where it is not, each takes in what it needs. */
START_TEST(staging_evens_out_ingest_only_where_it_may)
{
    for (int staging = 0; staging < 2; staging++) {
        struct zoo_case c;
        struct plan_totals t;
        uint64_t shape[] = {16, 16}, whole[] = {0, 0};
        uint32_t four = 4, first = 4;
        memset(&c, 0, sizeof c);
        c.source = case_layout("train", 4);
        c.destinations[0] = case_layout("rollout", 4);
        int32_t sm = case_mesh(c.source, 1, &four, NULL, 0, 1);
        for (uint32_t i = 0; i < 60; i++) {
            char name[8];
            snprintf(name, sizeof name, "w%03u", i);
            case_tensor(c.source, name, DTYPE_FLOAT32, 2, shape, sm, "R");
            struct tensor *d =
                case_tensor(c.destinations[0], name, DTYPE_FLOAT32, 2, shape, -1, NULL);
            case_region(d, i < 45 ? 0 : 1 + i % 3, whole, shape);
        }
        case_topology(&c, 2, 4, 1);
        case_finish(&c, 0, &first);
        small_units(&c);
        c.input.options.staging_ingest = staging != 0;
        struct moved m = plan_and_look(&c, &t);
        once_into_each_domain(&c, &m);
        ck_assert_uint_eq(m.network, 60 * FAN_TENSOR);
        if (staging == 0) {
            ck_assert_uint_eq(m.staged, 0);
            ck_assert_uint_eq(m.network_in[4], 45 * FAN_TENSOR);
            for (uint32_t d = 5; d < 8; d++)
                ck_assert_uint_eq(m.network_in[d], 5 * FAN_TENSOR);
        } else { /* 60 tensors over 4 devices */
            for (uint32_t d = 4; d < 8; d++) {
                ck_assert_uint_le(m.network_in[d], 16 * FAN_TENSOR);
                ck_assert_uint_ge(m.network_in[d], 14 * FAN_TENSOR);
            }
            ck_assert_uint_eq(m.domain, m.staged);
        }
        case_close(&c);
    }
}
END_TEST

/* --- domains --------------------------------------------------------------------------------------------- */

/* The trainer's node also has an engine: that one takes all from inside, the other's domain takes it in once. */
START_TEST(sources_inside_the_domain_cost_no_network)
{
    const struct spread s = {.n = 10,
                             .rows = 16,
                             .columns = 12,
                             .source_dims = {1, 4},
                             .destination_dims = {2, 2},
                             .from = "R0",
                             .to = "R1",
                             .nodes = 2,
                             .per_node = 8,
                             .source_on = (const uint32_t[]){0, 1, 2, 3},
                             .destination_on = (const uint32_t[]){4, 5, 8, 9}};
    struct zoo_case c;
    struct plan_totals t;
    build(&c, &s);
    struct moved m = plan_and_look(&c, &t);
    once_into_each_domain(&c, &m);
    ck_assert_uint_eq(m.into_domain[0], 0);
    ck_assert_uint_eq(m.into_domain[1], 10 * 16 * 12 * 4);
    ck_assert_uint_eq(m.domain, 10 * 16 * 12 * 4);
    case_close(&c);
}
END_TEST

/* Nodes 1 and 2 are one domain: both engines there need everything, it comes in once and crosses between the nodes in
 * the domain tier. With the sources in that domain too (node 3), nothing crosses the network at all. */
START_TEST(a_domain_that_spans_nodes_takes_in_once_and_hands_on_between_them)
{
    struct spread s = {.n = 10,
                       .rows = 16,
                       .columns = 16,
                       .source_dims = {1, 1},
                       .destination_dims = {2, 1},
                       .from = "RR",
                       .to = "RR",
                       .nodes = 4,
                       .per_node = 2,
                       .domain_of = (const uint32_t[]){0, 1, 1, 1},
                       .source_on = (const uint32_t[]){0},
                       .destination_on = (const uint32_t[]){2, 4}};
    struct zoo_case c;
    struct plan_totals t;
    build(&c, &s);
    struct moved m = plan_and_look(&c, &t);
    once_into_each_domain(&c, &m);
    ck_assert_uint_eq(m.network, 10 * FAN_TENSOR);
    ck_assert_uint_eq(m.between_nodes, 10 * FAN_TENSOR);
    ck_assert_uint_eq(m.domain, 10 * FAN_TENSOR);
    case_close(&c);

    s.source_on = (const uint32_t[]){6};
    build(&c, &s);
    m = plan_and_look(&c, &t);
    once_into_each_domain(&c, &m);
    ck_assert_uint_eq(m.network, 0);
    ck_assert_uint_eq(m.between_nodes, 2 * 10 * FAN_TENSOR);
    case_close(&c);
}
END_TEST

/* TP4 over two nodes to two instances of TP4, each over two nodes: a domain needs half of the columns. */
START_TEST(instances_that_span_two_domains_take_in_what_each_domain_needs)
{
    const struct spread s = {.n = 12,
                             .rows = 18,
                             .columns = 20,
                             .source_dims = {1, 4},
                             .destination_dims = {2, 4},
                             .from = "R0",
                             .to = "R1",
                             .nodes = 6,
                             .per_node = 2,
                             .source_on = (const uint32_t[]){0, 1, 2, 3},
                             .destination_on = (const uint32_t[]){4, 5, 6, 7, 8, 9, 10, 11}};
    struct zoo_case c;
    struct plan_totals t;
    build(&c, &s);
    struct moved m = plan_and_look(&c, &t);
    once_into_each_domain(&c, &m);
    for (uint32_t d = 2; d < 6; d++)
        ck_assert_uint_eq(m.into_domain[d], 12 * 18 * 10 * 4);
    ck_assert_uint_eq(t.network_bytes_minimum, m.network);
    case_close(&c);
}
END_TEST

/* Any mix of the above: three rank counts on both sides, domains of one node or two. */
START_TEST(every_domain_takes_in_what_it_misses_and_nothing_else)
{
    static const uint32_t domains[3][6] = {
        {0, 1, 2, 3, 4, 5}, {0, 0, 1, 1, 2, 2}, {0, 1, 1, 0, 2, 3}};
    static const char *const placements[] = {"RR", "R0", "R1", "01", "10", "0R"};
    for (uint32_t i = 0; i < 108; i++) {
        uint32_t source[6], destination[6];
        for (uint32_t k = 0; k < 6; k++) {
            source[k] = (k * 5 + i) % 12;
            destination[k] = (k * 7 + i / 3) % 12;
        }
        const struct spread s = {.n = 3,
                                 .rows = 7,
                                 .columns = 9,
                                 .source_dims = {2, 1 + i % 3},
                                 .destination_dims = {1 + i / 3 % 3, 2},
                                 .from = placements[i % 6],
                                 .to = placements[i / 6 % 6],
                                 .nodes = 6,
                                 .per_node = 2,
                                 .domain_of = domains[i / 36],
                                 .source_on = source,
                                 .destination_on = destination};
        struct zoo_case c;
        struct plan_totals t;
        build(&c, &s);
        struct moved m = plan_and_look(&c, &t);
        once_into_each_domain(&c, &m);
        ck_assert_uint_eq(m.network, t.network_bytes_minimum);
        case_close(&c);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(relays_send_where_domains_outnumber_source_replicas)                                         \
    X(without_relays_the_sources_send_everything_and_share_it)                                     \
    X(source_replicas_on_different_nodes_share_the_load)                                           \
    X(ingest_is_split_over_a_domains_devices)                                                      \
    X(staging_evens_out_ingest_only_where_it_may)                                                  \
    X(sources_inside_the_domain_cost_no_network)                                                   \
    X(a_domain_that_spans_nodes_takes_in_once_and_hands_on_between_them)                           \
    X(instances_that_span_two_domains_take_in_what_each_domain_needs)                              \
    X(every_domain_takes_in_what_it_misses_and_nothing_else)
#include "test/lib/main.h"
