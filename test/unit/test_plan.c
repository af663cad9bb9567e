/* The planner on small cases whose values are worked out by hand or published. */
#include <stdlib.h>

#include "plan/program.h"
#include "test/lib/plan_zoo.h"

#include <check.h>

/* config/samples' matrix: 8 x 8 bfloat16, two row shards on n0 to four column shards on n1. */
static void example(struct zoo_case *c, enum dtype dtype, uint64_t rows, uint64_t columns)
{
    uint32_t two = 2, four = 4, first = 8;
    uint64_t shape[] = {rows, columns};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", 2);
    c->destinations[0] = case_layout("rollout", 4);
    int32_t sm = case_mesh(c->source, 1, &two, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 1, &four, NULL, 0, 1);
    case_tensor(c->source, "w", dtype, 2, shape, sm, "0");
    case_tensor(c->destinations[0], "w", dtype, 2, shape, dm, "1");
    case_topology(c, 2, 8, 1);
    case_finish(c, 0, &first);
}

struct seen {
    struct plan_transfer t[512];
    uint32_t n;
};

static int remember(const struct plan_transfer *t, void *arg)
{
    struct seen *s = arg;
    ck_assert_uint_lt(s->n, 512);
    s->t[s->n] = *t;
    s->t[s->n++].after = NULL;
    return 0;
}

START_TEST(design_example_gives_the_documented_summary_and_first_transfer)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct err e = {0};
    struct seen s = {.n = 0};
    example(&c, DTYPE_BFLOAT16, 8, 8);
    ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
    const struct plan_totals *t = plan_totals(p);
    ck_assert_uint_eq(t->tensors, 1);
    ck_assert_uint_eq(t->logical_bytes, 128);
    ck_assert_uint_eq(t->destination_bytes, 128);
    ck_assert_uint_eq(t->network_bytes, 128);
    ck_assert_uint_eq(t->network_bytes_minimum, 128);
    ck_assert_uint_eq(t->domain_bytes, 0);
    ck_assert_uint_eq(t->device_bytes, 0);
    ck_assert_uint_eq(t->gather_bytes, 64);
    ck_assert_uint_eq(t->broadcast_bytes, 512);
    ck_assert_uint_eq(t->gather_broadcast_network_bytes, 128);
    ck_assert_uint_eq(t->busiest_device, 0);
    ck_assert(t->busiest_egress);
    ck_assert_uint_eq(t->busiest_bytes, 64);
    ck_assert_uint_eq(t->lower_bound, 64);
    ck_assert_int_eq(plan_transfers(p, -1, remember, &s), 0);
    ck_assert_uint_eq(s.n, 8);
    ck_assert_uint_eq(s.t[0].id, 0);
    ck_assert_uint_eq(s.t[0].bytes, 16);
    ck_assert_uint_eq(s.t[0].box.size[0], 4);
    ck_assert_uint_eq(s.t[0].box.size[1], 2);
    ck_assert_int_eq(s.t[0].tier, TIER_NETWORK);
    ck_assert_int_eq(s.t[0].from.side, SIDE_SOURCE);
    ck_assert_uint_eq(s.t[0].from.device, 0);
    ck_assert_uint_eq(s.t[0].to.device, 8);
    ck_assert_uint_eq(s.t[0].to.rank, 0);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(programs_of_all_nodes_open)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct err e = {0};
    example(&c, DTYPE_BFLOAT16, 1024, 8192);
    for (int strategy = PLAN_RESHARD; strategy <= PLAN_GATHER_BROADCAST; strategy++) {
        c.input.options.strategy = (enum plan_strategy)strategy;
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
        for (uint32_t node = 0; node < 2; node++) {
            struct buf b;
            struct program g;
            buf_init(&b);
            ck_assert_msg(plan_program(p, node, &b, &e) == 0, "%s", e.text);
            ck_assert_msg(program_open(b.data, b.n_bytes, &g, &e) == 0, "%s", e.text);
            ck_assert_uint_gt(g.n_messages, 0);
            buf_close(&b);
        }
        plan_free(p);
    }
    case_close(&c);
}
END_TEST

static struct plan *make(const struct zoo_case *c)
{
    struct plan *p = NULL;
    struct err e = {0};
    ck_assert_msg(plan_make(&c->input, &p, &e) == 0, "%s", e.text);
    ck_assert_msg(plan_check(p, &c->input, true, &e) == 0, "%s", e.text);
    return p;
}

/* [131072, 131072] of one byte, 4 row shards to 4 column shards: 2^34 bytes, 2^30 per pair. */
START_TEST(sizes_beyond_32_bits_stay_exact)
{
    struct zoo_case c;
    uint32_t four = 4, first = 4;
    uint64_t shape[] = {131072, 131072};
    memset(&c, 0, sizeof c);
    c.source = case_layout("train", 4);
    c.destinations[0] = case_layout("rollout", 4);
    case_tensor(c.source, "w", DTYPE_UINT8, 2, shape, case_mesh(c.source, 1, &four, NULL, 0, 1),
                "0");
    case_tensor(c.destinations[0], "w", DTYPE_UINT8, 2, shape,
                case_mesh(c.destinations[0], 1, &four, NULL, 0, 1), "1");
    case_topology(&c, 8, 1, 1);
    case_finish(&c, 0, &first);
    struct plan *p = make(&c);
    const struct plan_totals *t = plan_totals(p);
    ck_assert_uint_eq(t->network_bytes, UINT64_C(1) << 34);
    ck_assert_uint_eq(t->logical_bytes, UINT64_C(1) << 34);
    for (uint32_t d = 0; d < 4; d++) {
        ck_assert_uint_eq(plan_device_egress(p, d), UINT64_C(1) << 32);
        ck_assert_uint_eq(plan_device_ingress(p, 4 + d), UINT64_C(1) << 32);
    }
    plan_free(p);
    case_close(&c);
}
END_TEST

static int count_only(const struct plan_transfer *t, void *arg)
{
    ++*(uint32_t *)arg;
    ck_assert_uint_eq(t->bytes, 1024 * 512 * 2);
    return 0;
}

/* [8192, 4096], 8 column shards to 8 row shards: 64 pairs, stored as boxes; a hundred times the
 * rows make no larger plan. */
START_TEST(plan_size_does_not_depend_on_rows)
{
    size_t bytes[2] = {0};
    for (int k = 0; k < 2; k++) {
        struct zoo_case c;
        uint32_t eight = 8, first = 8, n = 0;
        uint64_t shape[] = {k == 0 ? 8192 : 819200, 4096};
        struct buf b;
        struct err e = {0};
        memset(&c, 0, sizeof c);
        c.source = case_layout("train", 8);
        c.destinations[0] = case_layout("rollout", 8);
        case_tensor(c.source, "w", DTYPE_BFLOAT16, 2, shape,
                    case_mesh(c.source, 1, &eight, NULL, 0, 1), "1");
        case_tensor(c.destinations[0], "w", DTYPE_BFLOAT16, 2, shape,
                    case_mesh(c.destinations[0], 1, &eight, NULL, 0, 1), "0");
        case_topology(&c, 2, 8, 1);
        case_finish(&c, 0, &first);
        c.input.options.least_piece_bytes = UINT64_C(1) << 40; /* no cell is split */
        c.input.options.chunk_bytes = UINT64_C(1) << 40;
        struct plan *p = make(&c);
        ck_assert_uint_eq(plan_totals(p)->transfers, 64);
        ck_assert_uint_eq(plan_totals(p)->cells, 64);
        if (k == 0) {
            ck_assert_int_eq(plan_transfers(p, -1, count_only, &n), 0);
            ck_assert_uint_eq(n, 64);
        }
        buf_init(&b);
        ck_assert_int_eq(plan_program(p, 1, &b, &e), 0);
        bytes[k] = b.n_bytes;
        buf_close(&b);
        plan_free(p);
        case_close(&c);
    }
    ck_assert_uint_eq(bytes[0], bytes[1]);
}
END_TEST

/* Two tensors on two meshes each; `order` permutes how they stand in the layouts. */
static void shuffled(struct zoo_case *c, bool turned)
{
    uint32_t four[] = {4}, pairs[] = {2, 2}, first = 4;
    uint64_t shape[] = {640, 96};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", 4);
    c->destinations[0] = case_layout("rollout", 8);
    for (int side = 0; side < 2; side++) {
        struct layout *l = side == 0 ? c->source : c->destinations[0];
        int32_t mesh[2];
        for (int i = 0; i < 2; i++) {
            int which = turned ? 1 - i : i;
            mesh[which] = case_mesh(l, which == 0 ? 1 : 2, which == 0 ? four : pairs, NULL,
                                    side == 0 ? 0 : (uint32_t)which * 4, 1);
        }
        for (int i = 0; i < 6; i++) {
            int k = turned ? 5 - i : i;
            char name[8];
            snprintf(name, sizeof name, "w%d", k);
            case_tensor(l, name, DTYPE_FLOAT32, 2, shape, mesh[k % 2],
                        k % 2 == 0 ? (side == 0 ? "0" : "1") : (side == 0 ? "01" : "R0"));
        }
    }
    case_topology(c, 3, 4, 1);
    case_finish(c, 0, &first);
}

START_TEST(order_of_tensors_and_meshes_in_the_file_does_not_matter)
{
    struct zoo_case a, b;
    uint8_t da[16], db[16];
    shuffled(&a, false);
    shuffled(&b, true);
    struct plan *p = make(&a), *q = make(&b);
    ck_assert_mem_eq(plan_totals(p)->digest, plan_totals(q)->digest, 16);
    ck_assert_int_eq(plan_input_digest(&a.input, da), 0);
    ck_assert_int_eq(plan_input_digest(&b.input, db), 0);
    ck_assert_mem_eq(da, db, 16);
    for (uint32_t node = 0; node < 3; node++) {
        struct buf x, y;
        buf_init(&x);
        buf_init(&y);
        ck_assert_int_eq(plan_program(p, node, &x, NULL), 0);
        ck_assert_int_eq(plan_program(q, node, &y, NULL), 0);
        ck_assert_uint_eq(x.n_bytes, y.n_bytes);
        ck_assert_mem_eq(x.data, y.data, x.n_bytes);
        buf_close(&x);
        buf_close(&y);
    }
    plan_free(p);
    plan_free(q);
    case_close(&a);
    case_close(&b);
}
END_TEST

START_TEST(digests_change_with_every_part_of_the_input)
{
    struct zoo_case c;
    uint8_t base[16], now[16];
    struct plan_rule rule = {"w*", PLAN_DIRECT};
    shuffled(&c, false);
    ck_assert_int_eq(plan_input_digest(&c.input, base), 0);
    const struct plan_options options = c.input.options;
    for (int i = 0; i < 11; i++) {
        struct plan_options *o = &c.input.options;
        int32_t *device = i == 9 ? &c.source_device[1] : &c.destination_device[0][2];
        int32_t was = *device; /* not 0 */
        double rate = c.topology.network_bytes_per_s;
        *o = options;
        switch (i) {
        case 0:
            o->strategy = PLAN_DIRECT;
            break;
        case 1:
            o->rules = &rule;
            o->n_rules = 1;
            break;
        case 2:
            o->relay = false;
            break;
        case 3:
            o->staging_ingest = false;
            break;
        case 4:
            o->least_piece_bytes++;
            break;
        case 5:
            o->chunk_bytes++;
            break;
        case 6:
            o->ring_slots++;
            break;
        case 7:
            c.topology.network_bytes_per_s *= 2;
            break;
        case 8:
            c.topology.devices[11].domain = 0;
            break;
        default:
            *device = 0;
        }
        ck_assert_int_eq(plan_input_digest(&c.input, now), 0);
        ck_assert_msg(memcmp(base, now, 16) != 0, "change %d", i);
        *device = was;
        c.topology.network_bytes_per_s = rate;
        c.topology.devices[11].domain = 2;
    }
    c.input.options = options;
    ck_assert_int_eq(plan_input_digest(&c.input, now), 0);
    ck_assert_mem_eq(base, now, 16);
    case_close(&c);
}
END_TEST

/* One holder, four domains of one device: everybody needs everything. */
static void fan(struct zoo_case *c, uint32_t n_domains)
{
    uint32_t one = 1, first = 1;
    uint64_t shape[] = {4096, 1024};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", 1);
    c->destinations[0] = case_layout("rollout", n_domains);
    case_tensor(c->source, "w", DTYPE_FLOAT32, 2, shape, case_mesh(c->source, 1, &one, NULL, 0, 1),
                "R");
    case_tensor(c->destinations[0], "w", DTYPE_FLOAT32, 2, shape,
                case_mesh(c->destinations[0], 1, &n_domains, NULL, 0, 1), "R");
    case_topology(c, n_domains + 1, 1, 1);
    case_finish(c, 0, &first);
}

START_TEST(relays_keep_the_source_at_one_send_of_everything)
{
    struct zoo_case c;
    fan(&c, 4);
    struct plan *p = make(&c);
    const uint64_t bytes = 4096 * 1024 * 4;
    ck_assert_uint_eq(plan_totals(p)->network_bytes, 4 * bytes);
    ck_assert_uint_eq(plan_totals(p)->lower_bound, bytes);
    ck_assert_uint_eq(plan_device_egress(p, 0), bytes);
    ck_assert_uint_ge(plan_totals(p)->max_relay_depth, 2);
    plan_free(p);
    c.input.options.relay = false;
    p = make(&c);
    ck_assert_uint_eq(plan_device_egress(p, 0), 4 * bytes);
    ck_assert_uint_eq(plan_totals(p)->max_relay_depth, 1);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(a_ring_of_one_slot_is_enough)
{
    struct zoo_case c;
    fan(&c, 5);
    c.input.options.ring_slots = 1;
    c.input.options.chunk_bytes = 65536;
    struct plan *p = make(&c);
    for (uint32_t node = 0; node < 6; node++) {
        struct buf b;
        struct program g;
        buf_init(&b);
        ck_assert_int_eq(plan_program(p, node, &b, NULL), 0);
        ck_assert_int_eq(program_open(b.data, b.n_bytes, &g, NULL), 0);
        ck_assert_uint_eq(g.ring_slots, 1);
        for (uint32_t i = 0; i < g.n_messages; i++) /* each fits the one slot */
            ck_assert_uint_le(g.messages[i].end - g.messages[i].begin, 65536);
        buf_close(&b);
    }
    plan_free(p);
    case_close(&c);
}
END_TEST

/* n tensors, each whole in the source's ranks' rows; every domain needs all of them. */
static void many(struct zoo_case *c, uint32_t sources, const char *from, uint32_t domains,
                 uint32_t per_domain, const char *to)
{
    uint32_t dims[] = {domains, per_domain}, first = sources;
    uint64_t shape[] = {2048, 2048};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", sources);
    c->destinations[0] = case_layout("rollout", domains * per_domain);
    int32_t sm = case_mesh(c->source, 1, &sources, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 2, dims, NULL, 0, 1);
    for (int i = 0; i < 400; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%03d", i);
        case_tensor(c->source, name, DTYPE_BFLOAT16, 2, shape, sm, from);
        case_tensor(c->destinations[0], name, DTYPE_BFLOAT16, 2, shape, dm, to);
    }
    case_topology(c, sources / per_domain + domains, per_domain, 1);
    case_finish(c, 0, &first);
}

/* The aims of `make bench`: busiest device within 5 % of the bound, time within 10 %. */
START_TEST(busiest_device_and_time_stay_near_the_lower_bound)
{
    static const struct {
        uint32_t sources;
        const char *from;
        uint32_t domains, per_domain;
        const char *to;
    } shapes[] = {{1, "R", 16, 1, "RR"},
                  {4, "0", 8, 4, "R0"},
                  {8, "0", 3, 4, "R1"},
                  {8, "1", 2, 8, "01"},
                  {16, "0", 2, 8, "R1"}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct zoo_case c;
        struct plan *p = NULL;
        struct err e = {0};
        many(&c, shapes[i].sources, shapes[i].from, shapes[i].domains, shapes[i].per_domain,
             shapes[i].to);
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
        const struct plan_totals *t = plan_totals(p);
        double bound_s = (double)t->lower_bound / c.topology.network_bytes_per_s;
        double busiest = (double)t->busiest_bytes / (double)t->lower_bound;
        double time = plan_predict_s(p, &c.topology) / bound_s;
        ck_assert_msg(busiest >= 1 && busiest <= 1.05, "case %zu: busiest %.4f", i, busiest);
        ck_assert_msg(time >= 0.9999 && time <= 1.10, "case %zu: time %.4f", i, time);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

/* FSDP to TP on the same devices: of two rows-cut tensors in three a domain misses nothing of its own rank's part, so
 * one device has little to take in, and what the others send hangs on who was fed first. */
static void colocated(struct zoo_case *c, uint32_t domains, uint32_t per_domain)
{
    uint32_t n = domains * per_domain, dims[] = {domains, per_domain}, first = 0;
    uint64_t shape[] = {1536, 2048};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", n);
    c->destinations[0] = case_layout("rollout", n);
    int32_t sm = case_mesh(c->source, 1, &n, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 2, dims, NULL, 0, 1);
    for (int i = 0; i < 400; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%03d", i);
        case_tensor(c->source, name, DTYPE_BFLOAT16, 2, shape, sm, "0");
        case_tensor(c->destinations[0], name, DTYPE_BFLOAT16, 2, shape, dm,
                    i % 3 == 2 ? "R1" : "R0");
    }
    case_topology(c, domains, per_domain, 1);
    case_finish(c, 0, &first);
}

START_TEST(sends_are_evened_out_where_engines_share_the_trainers_devices)
{
    static const uint32_t shapes[][2] = {{4, 4}, {8, 8}, {3, 8}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct zoo_case c;
        struct plan *p = NULL;
        struct err e = {0};
        colocated(&c, shapes[i][0], shapes[i][1]);
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
        const struct plan_totals *t = plan_totals(p);
        double busiest = (double)t->busiest_bytes / (double)t->lower_bound;
        ck_assert_msg(busiest >= 1 && busiest <= 1.05, "case %zu: busiest %.4f", i, busiest);
        ck_assert_msg(plan_check(p, &c.input, true, &e) == 0, "%s", e.text);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

START_TEST(a_rank_without_device_is_named)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct err e = {0};
    example(&c, DTYPE_FLOAT32, 8, 8);
    c.destination_device[0][2] = TOPOLOGY_NONE;
    ck_assert_int_eq(plan_make(&c.input, &p, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "rank 2"));
    ck_assert_ptr_nonnull(strstr(e.text, "rollout"));
    ck_assert_ptr_null(p);
    c.destination_device[0][2] = 99;
    ck_assert_int_eq(plan_make(&c.input, &p, &e), RS_EINVAL);
    case_close(&c);
}
END_TEST

START_TEST(options_that_make_no_sense_are_refused)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct plan_rule rule = {NULL, PLAN_DIRECT};
    example(&c, DTYPE_FLOAT32, 8, 8);
    const struct plan_options good = c.input.options;
    c.input.options.chunk_bytes = 15;
    ck_assert_int_eq(plan_make(&c.input, &p, NULL), RS_EINVAL);
    c.input.options = good;
    c.input.options.ring_slots = 0;
    ck_assert_int_eq(plan_make(&c.input, &p, NULL), RS_EINVAL);
    c.input.options = good;
    c.input.options.strategy = (enum plan_strategy)7;
    ck_assert_int_eq(plan_make(&c.input, &p, NULL), RS_EINVAL);
    c.input.options = good;
    c.input.options.rules = &rule;
    c.input.options.n_rules = 1;
    ck_assert_int_eq(plan_make(&c.input, &p, NULL), RS_EINVAL);
    ck_assert_ptr_null(p);
    case_close(&c);
}
END_TEST

START_TEST(rules_pick_a_strategy_by_name)
{
    struct zoo_case c;
    struct plan_rule rules[] = {{"w1", PLAN_DIRECT}, {"w[23]", PLAN_GATHER_BROADCAST}};
    struct seen s = {.n = 0};
    shuffled(&c, false);
    c.input.options.rules = rules;
    c.input.options.n_rules = 2;
    struct plan *p = make(&c);
    for (int64_t tensor = 0; tensor < 6; tensor++) {
        s.n = 0;
        ck_assert_int_eq(plan_transfers(p, tensor, remember, &s), 0);
        ck_assert_uint_gt(s.n, 0);
        ck_assert_int_eq(s.t[0].strategy, tensor == 1                  ? PLAN_DIRECT
                                          : tensor == 2 || tensor == 3 ? PLAN_GATHER_BROADCAST
                                                                       : PLAN_RESHARD);
    }
    plan_free(p);
    case_close(&c);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(design_example_gives_the_documented_summary_and_first_transfer)                              \
    X(programs_of_all_nodes_open)                                                                  \
    X(sizes_beyond_32_bits_stay_exact)                                                             \
    X(plan_size_does_not_depend_on_rows)                                                           \
    X(order_of_tensors_and_meshes_in_the_file_does_not_matter)                                     \
    X(digests_change_with_every_part_of_the_input)                                                 \
    X(relays_keep_the_source_at_one_send_of_everything)                                            \
    X(a_ring_of_one_slot_is_enough)                                                                \
    X(busiest_device_and_time_stay_near_the_lower_bound)                                           \
    X(sends_are_evened_out_where_engines_share_the_trainers_devices)                               \
    X(a_rank_without_device_is_named)                                                              \
    X(options_that_make_no_sense_are_refused)                                                      \
    X(rules_pick_a_strategy_by_name)
#include "test/lib/main.h"
