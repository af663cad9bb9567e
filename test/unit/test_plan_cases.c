/* Plans whose pieces public fault reports state, by every strategy, in one domain and in many. */
#include <check.h>
#include <inttypes.h>

#include "plan/planner.h"
#include "test/lib/plan_judge.h"

/* --- plans whose pieces are published ------------------------------------- */

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

/* --- large sizes: geometry only, no element is touched ------------------- */

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
    static const struct {
        const char *shape;
        enum dtype dtype;
        uint64_t bytes;
    } sizes[] = {{"131072, 131072", DTYPE_UINT8, UINT64_C(1) << 34},
                 {"262144, 8960", DTYPE_BFLOAT16, UINT64_C(262144) * 8960 * 2},
                 {"19345706, 128", DTYPE_FLOAT32, UINT64_C(19345706) * 128 * 4}};
    for (unsigned i = 0; i < 3; i++) {
        struct plan_case c;
        struct pairs pairs = {0};
        struct layout *s = layouts_one(sizes[i].shape, 4, "4", "0, 1, 2, 3", S0, "");
        struct layout *d = layouts_one(sizes[i].shape, 8, "4", "4, 5, 6, 7", S1, "");
        s->tensors[0].dtype = d->tensors[0].dtype = sizes[i].dtype;
        published(&c, s, d, false);
        struct plan *p = case_plan(&c);
        ck_assert_int_eq(plan_transfers(p, -1, count_pairs, &pairs), 0);
        for (uint32_t k = 0; i == 0 && k < 16; k++)
            ck_assert_uint_eq(pairs.bytes[k / 4][4 + k % 4], UINT64_C(1) << 30);
        ck_assert_uint_eq(plan_totals(p)->network_bytes, sizes[i].bytes);
        ck_assert_uint_eq(plan_device_ingress(p, 7), sizes[i].bytes / 4);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

START_TEST(a35_a_changed_layout_has_another_key_and_plan)
{
    uint8_t key[2][16];
    struct plan_case c[2];
    published(&c[0], layouts_one("8", 4, "4", "0, 1, 2, 3", S0, ""),
              layouts_one("8", 6, "2", "4, 5", S0, ""), false);
    published(&c[1], layouts_one("8", 4, "1", "0", RE, ""),
              layouts_one("8", 7, "3", "4, 5, 6", S0, ""), false);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(plan_input_digest(&c[i].input, key[i]), 0);
    ck_assert_mem_ne(key[0], key[1], 16);
    struct plan *p = case_plan(&c[0]), *q = case_plan(&c[1]);
    ck_assert_mem_ne(plan_totals(p)->digest, plan_totals(q)->digest, 16);
    c[0].input.options.relay = false; /* options are part of the key as well */
    ck_assert_int_eq(plan_input_digest(&c[0].input, key[1]), 0);
    ck_assert_mem_ne(key[0], key[1], 16);
    plan_free(p);
    plan_free(q);
    case_close(&c[0]);
    case_close(&c[1]);
}
END_TEST

/* 16 experts of 4 elements as one tensor by regions: `owned` lists (expert, rank). */
static struct layout *experts(const char *name, uint32_t (*owned)[2], size_t n)
{
    char text[4096];
    size_t at = (size_t)snprintf(text, sizeof text,
                                 "{'name': '%s', 'ranks': 8, 'tensors': [{'name': 'experts', "
                                 "'shape': [16, 4], 'dtype': 'float32', 'regions': [",
                                 name);
    for (size_t i = 0; i < n; i++)
        at += (size_t)snprintf(text + at, sizeof text - at,
                               "%s{'rank': %u, 'offset': [%u, 0], 'size': [1, 4]}",
                               i == 0 ? "" : ",", owned[i][1], owned[i][0]);
    (void)snprintf(text + at, sizeof text - at, "]}]}");
    return layouts_parse(text);
}

START_TEST(b27_a_round_robin_expert_map_with_a_redundant_copy)
{
    uint32_t owned[17][2];
    for (uint32_t i = 0; i < 16; i++) {
        owned[i][0] = i;
        owned[i][1] = 4 + i % 4;
    }
    owned[16][0] = 3; /* expert 3 on rank 4 as well */
    owned[16][1] = 4;
    struct plan_case c;
    published(&c, layouts_one("16, 4", 4, "4", "0, 1, 2, 3", S0, ""), experts("d", owned, 17),
              false);
    c.source->tensors[0].name = realloc(c.source->tensors[0].name, 16);
    (void)snprintf(c.source->tensors[0].name, 16, "experts");
    struct plan *p = case_plan(&c);
    struct sim m = judge(&c, p);
    for (uint32_t i = 0; i < 17; i++)
        ck_assert_int_eq(origins(&m, &m.destination[0][owned[i][1]], 0)[4 * owned[i][0]],
                         (int32_t)owned[i][0] / 4);
    ck_assert_uint_eq(plan_totals(p)->destination_bytes, 17 * 16);
    sim_close(&m);
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

#define TESTS(X)                                                                                   \
    X(a01_uneven_rows_to_columns)                                                                  \
    X(a01_uneven_rows_to_one_without_padding)                                                      \
    X(a09_uneven_rows_to_uneven_columns)                                                           \
    X(a10_two_to_five_rows)                                                                        \
    X(a14_nothing_crosses_the_halves_where_each_is_a_domain)                                       \
    X(a14_only_the_inner_dim_changes)                                                              \
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
    X(a35_a_changed_layout_has_another_key_and_plan)                                               \
    X(a36_a_replica_axis_is_not_added_up)                                                          \
    X(a_plan_does_not_depend_on_the_order_in_the_files)                                            \
    X(b27_a_round_robin_expert_map_with_a_redundant_copy)
#include "test/lib/main.h"
