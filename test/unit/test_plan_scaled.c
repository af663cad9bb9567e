/* Plans of block-scaled tensors and their scales: what is refused and how, who sends what, judged
 * element by element from the stream of transfers alone. */
#include <check.h>
#include <stdarg.h>

#include "test/lib/plan_cases.h"

#define MESH(n, ranks)                                                                             \
    "'ranks': " n ", 'meshes': [{'name': 'm', 'shape': [" n "], 'ranks': [" ranks "]}], "

/* A source of one tensor, and a destination of it and its scales. */
#define SOURCE(n, ranks, shape, dtype, placed)                                                     \
    "{'name': 's', " MESH(n, ranks) "'tensors': [{'name': 'w', 'shape': [" shape                   \
                                    "], 'dtype': '" dtype "', " placed "}]}"
#define SCALED(n, ranks, shape, placed, scales, block, scales_placed)                              \
    "{'name': 'd', " MESH(n, ranks) "'tensors': [{'name': 'w', 'shape': [" shape                   \
                                    "], 'dtype': 'float8_e4m3fn', 'cast': true, " placed           \
                                    "}, {'name': 'w_scale', 'shape': [" scales                     \
                                    "], 'dtype': 'float32', 'derived': {'from': 'w', 'rule': "     \
                                    "'block_scale', 'block': [" block "]}, " scales_placed "}]}"
#define REPLICATE "'mesh': 'm', 'placements': ['Replicate']"
#define ROWS      "'mesh': 'm', 'placements': ['Shard(0)']"
#define COLUMNS   "'mesh': 'm', 'placements': ['Shard(1)']"

/* One node per rank, sources first; each node is a domain. */
static void scaled_case(struct plan_case *c, const char *source, uint32_t n, ...)
{
    uint32_t sizes[32], domain_of[32], n_ranks = 0, at = 0;
    va_list args;
    *c = (struct plan_case){.n_destinations = n, .source = layouts_parse(source)};
    n_ranks = c->source->n_ranks;
    va_start(args, n);
    for (uint32_t i = 0; i < n; i++) {
        c->destinations[i] = layouts_parse(va_arg(args, const char *));
        n_ranks += c->destinations[i]->n_ranks;
    }
    va_end(args);
    for (uint32_t i = 0; i < n_ranks; i++) {
        sizes[i] = 1;
        domain_of[i] = i;
    }
    case_topology(&c->topology, n_ranks, sizes, domain_of);
    for (uint32_t i = 0; i <= n; i++) {
        const struct layout *l = i == 0 ? c->source : c->destinations[i - 1];
        int32_t *device = calloc(l->n_ranks, sizeof *device);
        for (uint32_t r = 0; r < l->n_ranks; r++)
            device[r] = (int32_t)at++;
        *(i == 0 ? &c->source_device : &c->destination_device[i - 1]) = device;
    }
    c->input.options = plan_options_default();
    case_finish(c);
}

static void refused(const char *source, const char *destination, int code, const char *const *texts)
{
    struct plan_case c;
    struct plan *p = NULL;
    struct err e = {0};
    scaled_case(&c, source, 1, destination);
    ck_assert_int_eq(plan_make(&c.input, &p, &e), code);
    for (; *texts != NULL; texts++)
        ck_assert_msg(strstr(e.text, *texts) != NULL, "'%s' lacks '%s'", e.text, *texts);
    case_close(&c);
}

#define REFUSED(source, destination, code, ...)                                                    \
    refused(source, destination, code, (const char *const[]){__VA_ARGS__, NULL})

START_TEST(a_block_over_two_source_shards_is_refused_with_edge_and_remedy)
{
    REFUSED(SOURCE("2", "0, 1", "200, 300", "bfloat16", ROWS),
            SCALED("1", "0", "200, 300", REPLICATE, "2, 3", "128, 128", REPLICATE), RS_EPRECOND,
            "tensor 'w'", "shard edge 100 of its dim 0", "128 x 128", "multiples of 128");
    REFUSED(SOURCE("2", "0, 1", "200, 300", "bfloat16", COLUMNS),
            SCALED("1", "0", "200, 300", REPLICATE, "2, 3", "128, 128", REPLICATE), RS_EPRECOND,
            "tensor 'w'", "shard edge 150 of its dim 1");
    /* One scale of the whole tensor: a source that is cut at all holds no block. */
    REFUSED(SOURCE("2", "0, 1", "256, 256", "bfloat16", ROWS),
            SCALED("1", "0", "256, 256", REPLICATE, "1, 1", "256, 256", REPLICATE), RS_EPRECOND,
            "tensor 'w'", "shard edge 128", "256 x 256");
}
END_TEST

START_TEST(a_block_over_two_source_regions_is_refused_with_the_part_that_nobody_holds)
{
    REFUSED(SOURCE("2", "0, 1", "256, 64", "bfloat16",
                   "'regions': [{'rank': 0, 'offset': [0, 0], 'size': [100, 64]}, {'rank': 1, "
                   "'offset': [100, 0], 'size': [156, 64]}]"),
            SCALED("1", "0", "256, 64", REPLICATE, "2, 1", "128, 128", REPLICATE), RS_EPRECOND,
            "tensor 'w'", "[0:128, 0:64]", "128 x 128", "multiples");
}
END_TEST

START_TEST(other_source_dtypes_are_refused_by_name)
{
    REFUSED(SOURCE("1", "0", "256, 64", "float16", REPLICATE),
            SCALED("1", "0", "256, 64", REPLICATE, "2, 1", "128, 128", REPLICATE), RS_EPRECOND,
            "'w' is float16", "bfloat16 and float32");
    REFUSED(SOURCE("1", "0", "256, 64", "float8_e4m3fn", REPLICATE),
            SCALED("1", "0", "256, 64", REPLICATE, "2, 1", "128, 128", REPLICATE), RS_EPRECOND,
            "'w' is float8_e4m3fn", "bfloat16 and float32");
}
END_TEST

/* The fault was: weights came, scales did not, and were what the memory held before. */
START_TEST(b03_a_scale_that_is_neither_at_the_source_nor_derived_is_refused_by_name)
{
    REFUSED(
        SOURCE("1", "0", "256, 64", "bfloat16", REPLICATE),
        "{'name': 'd', " MESH("1", "0") "'tensors': [{'name': 'w', 'shape': [256, 64], 'dtype': "
                                        "'float8_e4m3fn', 'cast': true, " REPLICATE
                                        "}, {'name': 'w.scale', 'shape': [2, 1], "
                                        "'dtype': 'float32', " REPLICATE "}]}",
        RS_EPRECOND, "missing", "'w.scale'");
}
END_TEST

/* --- who sends what ----------------------------------------------------------------------------- */

struct judge {
    const struct plan_case *c;
    uint32_t *taken[CASE_MAX_LAYOUTS]; /* [rank][element] of the tensor at hand */
    const char *name;
    const struct plan *p;
    uint64_t n, network;
};

static bool inside(const struct box *b, const uint64_t *at)
{
    return at[0] >= b->offset[0] && at[0] < b->offset[0] + b->size[0] && at[1] >= b->offset[1] &&
           at[1] < b->offset[1] + b->size[1];
}

/* True where the source rank holds every element of the block. */
static bool holds_block(const struct plan_case *c, uint32_t rank, const uint32_t *block,
                        uint64_t row, uint64_t column)
{
    const struct tensor *w = &c->source->tensors[0];
    for (uint64_t i = row * block[0]; i < (row + 1) * block[0] && i < w->shape[0]; i++)
        for (uint64_t k = column * block[1]; k < (column + 1) * block[1] && k < w->shape[1]; k++) {
            uint64_t element[2] = {i, k};
            if (layouts_holds(c->source, w, rank, element) == 0)
                return false;
        }
    return true;
}

/* Every element of the source of which the box is made lies with the sender. */
static void judge_source(const struct judge *j, const struct plan_transfer *t)
{
    uint64_t last[2], first[2];
    for (int d = 0; d < 2; d++) {
        uint64_t by = t->value == PLAN_SCALES ? 1 : t->block[d];
        first[d] = t->box.offset[d] / by;
        last[d] = (t->box.offset[d] + t->box.size[d] - 1) / by;
    }
    for (uint64_t i = first[0]; i <= last[0]; i++)
        for (uint64_t k = first[1]; k <= last[1]; k++)
            ck_assert(holds_block(j->c, t->from.rank, t->block, i, k));
}

static int judge_one(const struct plan_transfer *t, void *arg)
{
    struct judge *j = arg;
    if (strcmp(plan_tensor_name(j->p, t->tensor), j->name) != 0)
        return 0;
    j->network += t->tier == TIER_NETWORK ? t->bytes : 0;
    if (t->to.side != SIDE_DESTINATION)
        return 0;
    const struct layout *l = j->c->destinations[t->to.layout];
    const struct tensor *x = &l->tensors[layout_find(l, j->name)];
    bool scales = x->derived_from != NULL;
    ck_assert_int_eq(t->value, scales ? PLAN_SCALES : PLAN_QUANTISED);
    ck_assert_int_eq(t->wire, scales ? DTYPE_FLOAT32 : DTYPE_FLOAT8_E4M3FN);
    for (uint64_t i = 0; i < x->shape[0] * x->shape[1]; i++) {
        uint64_t at[2] = {i / x->shape[1], i % x->shape[1]};
        if (!inside(&t->box, at))
            continue;
        j->taken[t->to.layout][t->to.rank * x->shape[0] * x->shape[1] + i]++;
    }
    if (t->from.side == SIDE_SOURCE)
        judge_source(j, t);
    return 0;
}

/* Each rank gets each element of its part once, and nothing else. Returns bytes over the network. */
static uint64_t judge(const struct plan_case *c, const struct plan *p, const char *name)
{
    struct judge j = {.c = c, .p = p, .name = name};
    for (uint32_t l = 0; l < c->n_destinations; l++) {
        const struct layout *to = c->destinations[l];
        int64_t t = layout_find(to, name);
        uint64_t n = t < 0 ? 0 : layouts_elements(&to->tensors[t]);
        j.taken[l] = calloc(to->n_ranks * n + 1, sizeof(uint32_t));
    }
    ck_assert_int_eq(plan_transfers(p, -1, judge_one, &j), 0);
    for (uint32_t l = 0; l < c->n_destinations; l++) {
        const struct layout *to = c->destinations[l];
        int64_t t = layout_find(to, name);
        uint64_t n = t < 0 ? 0 : layouts_elements(&to->tensors[t]);
        for (uint32_t r = 0; r < to->n_ranks; r++)
            for (uint64_t i = 0; i < n; i++) {
                uint64_t columns = to->tensors[t].shape[1], at[2] = {i / columns, i % columns};
                ck_assert_uint_eq(j.taken[l][r * n + i], layouts_holds(to, &to->tensors[t], r, at));
            }
        free(j.taken[l]);
    }
    return j.network;
}

static struct plan *made(const struct plan_case *c)
{
    struct plan *p = NULL;
    struct err e = {0};
    ck_assert_msg(plan_make(&c->input, &p, &e) == 0, "%s", e.text);
    ck_assert_msg(plan_check(p, &c->input, true, &e) == 0, "%s", e.text);
    ck_assert_msg(plan_check(p, &c->input, false, &e) == 0, "%s", e.text);
    return p;
}

START_TEST(a30_values_and_scales_come_from_who_holds_the_block_once_per_domain)
{
    struct plan_case c;
    scaled_case(&c, SOURCE("3", "0, 1, 2", "384, 256", "bfloat16", ROWS), 1,
                SCALED("3", "0, 1, 2", "384, 256", ROWS, "3, 2", "128, 128", ROWS));
    struct plan *p = made(&c);
    ck_assert_uint_eq(judge(&c, p, "w"), 384 * 256);
    ck_assert_uint_eq(judge(&c, p, "w_scale"), 3 * 2 * 4);
    ck_assert_uint_eq(plan_totals(p)->network_bytes_minimum, 384 * 256 + 24);
    ck_assert_uint_eq(plan_totals(p)->tensors, 2);
    ck_assert_uint_eq(plan_n_tensors(p), 2);
    ck_assert_int_eq(plan_find_tensor(p, "w_scale"), 1);
    ck_assert_uint_eq(plan_tensor_origin(p, 1), 0);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(a_scale_that_two_ranks_need_goes_to_both)
{
    struct plan_case c;
    scaled_case(&c, SOURCE("1", "0", "200, 300", "float32", REPLICATE), 1,
                SCALED("2", "0, 1", "200, 300", ROWS, "2, 3", "128, 128", REPLICATE));
    struct plan *p = made(&c);
    ck_assert_uint_eq(judge(&c, p, "w"), 200 * 300);
    ck_assert_uint_eq(judge(&c, p, "w_scale"), 2 * 2 * 3 * 4);
    plan_free(p);
    case_close(&c);
}
END_TEST

/* One tensor, two blocks, and names that differ: each way is made once, and no cell is shared. */
START_TEST(destinations_with_other_blocks_are_made_apart_and_equal_ones_together)
{
    struct plan_case c;
    const char *same = SCALED("2", "0, 1", "256, 256", ROWS, "2, 2", "128, 128", ROWS);
    scaled_case(&c, SOURCE("1", "0", "256, 256", "bfloat16", REPLICATE), 3, same,
                SCALED("2", "0, 1", "256, 256", ROWS, "4, 4", "64, 64", ROWS), same);
    struct plan *p = made(&c);
    ck_assert_uint_eq(plan_n_tensors(p), 3);
    ck_assert_uint_eq(judge(&c, p, "w"), 3 * 256 * 256);
    ck_assert_uint_eq(judge(&c, p, "w_scale"), (4 + 16 + 4) * 4);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(equal_input_gives_equal_plans_and_another_block_another_one)
{
    uint8_t digest[3][16];
    static const char *const blocks[][2] = {
        {"2, 2", "128, 128"}, {"2, 2", "128, 128"}, {"2, 2", "130, 128"}};
    for (int i = 0; i < 3; i++) {
        struct plan_case c;
        char destination[2048];
        (void)snprintf(destination, sizeof destination,
                       SCALED("1", "0", "256, 256", REPLICATE, "%s", "%s", REPLICATE), blocks[i][0],
                       blocks[i][1]);
        scaled_case(&c, SOURCE("1", "0", "256, 256", "bfloat16", REPLICATE), 1, destination);
        struct plan *p = made(&c);
        memcpy(digest[i], plan_totals(p)->digest, 16);
        plan_free(p);
        case_close(&c);
    }
    ck_assert_mem_eq(digest[0], digest[1], 16);
    ck_assert_int_ne(memcmp(digest[0], digest[2], 16), 0);
}
END_TEST

START_TEST(without_memory_planning_fails_and_says_so)
{
    struct plan_case c;
    int r = RS_ENOMEM;
    scaled_case(&c, SOURCE("2", "0, 1", "256, 256", "bfloat16", ROWS), 2,
                SCALED("2", "0, 1", "256, 256", ROWS, "2, 2", "128, 128", ROWS),
                SCALED("2", "0, 1", "256, 256", ROWS, "4, 4", "64, 64", ROWS));
    long i = 1;
    for (; r == RS_ENOMEM; i++) {
        struct plan *p = NULL;
        mem_fail_at(i);
        r = plan_make(&c.input, &p, NULL);
        mem_fail_at(0);
        plan_free(p);
    }
    ck_assert_int_eq(r, 0);
    ck_assert_int_gt(i, 20);
    case_close(&c);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_block_over_two_source_shards_is_refused_with_edge_and_remedy)                              \
    X(a_block_over_two_source_regions_is_refused_with_the_part_that_nobody_holds)                  \
    X(other_source_dtypes_are_refused_by_name)                                                     \
    X(b03_a_scale_that_is_neither_at_the_source_nor_derived_is_refused_by_name)                    \
    X(a30_values_and_scales_come_from_who_holds_the_block_once_per_domain)                         \
    X(a_scale_that_two_ranks_need_goes_to_both)                                                    \
    X(destinations_with_other_blocks_are_made_apart_and_equal_ones_together)                       \
    X(equal_input_gives_equal_plans_and_another_block_another_one)                                 \
    X(without_memory_planning_fails_and_says_so)
#include "test/lib/main.h"
