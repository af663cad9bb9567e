/* Layouts as JSON: what is refused and how it is said, one digest for equal layouts, memory that
 * runs out, and texts as large as real models. */
#include <check.h>
#include <inttypes.h>
#include <jansson.h>
#include <time.h>

#include "base/buf.h"
#include "base/mem.h"
#include "test/lib/layouts.h"

/* A layout of 4 ranks with meshes and tensors as given. */
#define LAYOUT(meshes, tensors)                                                                    \
    "{'name': 'l', 'ranks': 4, 'meshes': [" meshes "], 'tensors': [" tensors "]}"
#define MESH4              "{'name': 'm', 'shape': [4], 'ranks': [0, 1, 2, 3], 'dim_names': ['tp']}"
#define MESH(shape, ranks) "{'name': 'm', 'shape': [" shape "], 'ranks': [" ranks "]}"
#define TENSOR(name, shape, placements)                                                            \
    "{'name': '" name "', 'shape': [" shape                                                        \
    "], 'dtype': 'float32', 'mesh': 'm', 'placements': [" placements "]}"
#define W1(placements)     TENSOR("w", "8", placements)
#define W3(placements)     TENSOR("w", "4, 6, 8", placements)
#define REGIONS(s, list)   "{'name': 'w', 'shape': [" s "], 'dtype': 'int8', 'regions': [" list "]}"
#define REGION(r, off, sz) "{'rank': " #r ", 'offset': [" #off "], 'size': [" #sz "]}"
#define KEYED(key)                                                                                 \
    LAYOUT(MESH4, "{'name': 'w', 'shape': [8], 'dtype': 'float32', 'mesh': 'm', 'placements': "    \
                  "['Shard(0)'], " key "}")
#define BIG "9223372036854775807"

static const struct refusal {
    const char *json;
    int code;
    const char *says; /* parts of the text, separated by | */
} refusals[] = {
    /* Kinds of placement that are never read as another one */
    {LAYOUT(MESH4, W1("'_StridedShard(dim=0, sf=2)'")), RS_EINVAL, "tensor 'w'|shard_order"},
    {LAYOUT(MESH4, W1("'Partial'")), RS_EINVAL, "tensor 'w'|mesh dim 'tp'|pending sum"},
    {LAYOUT(MESH4, W1("'Partial(sum)'")), RS_EINVAL, "pending sum"},
    {LAYOUT(MESH4, W1("'S(0)'")), RS_EINVAL, "unknown placement|Shard(d)"},
    {LAYOUT(MESH4, W1("'Shard(0'")), RS_EINVAL, "unknown placement"},
    {LAYOUT(MESH4, W1("'Shard(0)x'")), RS_EINVAL, "unknown placement"},
    {LAYOUT(MESH4, W1("'Shard(+0)'")), RS_EINVAL, "unknown placement"},
    {LAYOUT(MESH4, W1("'Shard(99999999999999999999)'")), RS_EINVAL, "unknown placement"},
    /* Dims from the end; tensors of no dim and of one. */
    {LAYOUT(MESH4, W3("'Shard(3)'")), RS_EINVAL, "tensor 'w'|Shard(3)|'tp'|3 dims|-3 to 2"},
    {LAYOUT(MESH4, W3("'Shard(-4)'")), RS_EINVAL, "tensor 'w'|Shard(-4)|3 dims"},
    {LAYOUT(MESH4, TENSOR("w", "", "'Shard(0)'")), RS_EINVAL, "tensor 'w'|no dims|Replicate"},
    /* Bad meshes. */
    {LAYOUT(MESH("2, 2", "0, 1, 1, 2"), W1("'Shard(0)', 'Replicate'")), RS_EINVAL,
     "mesh 'm'|rank 1 stands in two places"},
    {LAYOUT(MESH("2, 2", "0, 1, 2"), W1("'Shard(0)', 'Replicate'")), RS_EINVAL,
     "mesh 'm'|4 ranks|3 are listed"},
    {LAYOUT(MESH("2, 2", "[0, 1], [2]"), W1("'Shard(0)', 'Replicate'")), RS_EINVAL,
     "mesh 'm'|'ranks' must have integers"},
    {LAYOUT(MESH("2, 2", "0, 1, 2, 9"), W1("'Shard(0)', 'Replicate'")), RS_EINVAL,
     "mesh 'm'|rank 9 is unknown"},
    {LAYOUT(MESH("0", ""), W1("'Shard(0)'")), RS_EINVAL, "mesh 'm'|size 0"},
    {LAYOUT(MESH("2, 2", "0, 1, 2, 3"), W1("'Shard(0)'")), RS_EINVAL,
     "tensor 'w'|1 placements for the 2 dims of mesh 'm'"},
    {LAYOUT(MESH("65536, 65536", "0, 1"), W1("'Shard(0)', 'Replicate'")), RS_EINVAL,
     "mesh 'm'|at least 65536 ranks"},
    {LAYOUT(MESH("", ""), W1("")), RS_EINVAL, "mesh 'm'|0 dims"},
    {LAYOUT(MESH("1, 1, 1, 1, 1, 1, 1", "0"), ""), RS_EINVAL, "mesh 'm'|7 dims"},
    {LAYOUT(MESH4 ", " MESH4, W1("'Shard(0)'")), RS_EINVAL, "mesh 'm' is declared twice"},
    {LAYOUT("{'name': 'm', 'shape': [2, 2], 'ranks': [0, 1, 2, 3], 'dim_names': ['a', 'a']}", ""),
     RS_EINVAL, "mesh 'm'|'a' stands twice"},
    {LAYOUT("{'name': 'm', 'shape': [2, 2], 'ranks': [0, 1, 2, 3], 'dim_names': ['a']}", ""),
     RS_EINVAL, "mesh 'm'|1 names for 2 dims"},
    {LAYOUT("", W1("'Shard(0)'")), RS_EINVAL, "tensor 'w'|mesh 'm' is not among"},
    /* One name, one owner set */
    {LAYOUT(MESH4, W1("'Shard(0)'") ", " W1("'Shard(0)'")), RS_EINVAL,
     "tensor 'w' is declared twice"},
    {LAYOUT(MESH4, W1("'Shard(0)'") ", " W3("'Shard(0)'")), RS_EINVAL,
     "tensor 'w' is declared twice"},
    {LAYOUT("", "{'name': 'w', 'shape': [2], 'dtype': 'float32'}"), RS_EINVAL,
     "tensor 'w'|no mesh and no regions"},
    /* Regions. */
    {LAYOUT("", REGIONS("14", REGION(0, 0, 5) "," REGION(1, 4, 10))), RS_EINVAL,
     "tensor 'w'|[0:5]|rank 0|overlaps|[4:14]|rank 1"},
    {LAYOUT("", REGIONS("14", REGION(0, 0, 5) "," REGION(0, 0, 5))), RS_EINVAL,
     "tensor 'w'|rank 0 lists the same region twice"},
    {LAYOUT("", REGIONS("14", REGION(0, 10, 5))), RS_EINVAL, "tensor 'w'|leaves the tensor|14"},
    {LAYOUT("", REGIONS("14", REGION(0, 5, 9223372036854775807))), RS_EINVAL, "leaves the tensor"},
    {LAYOUT("", REGIONS("14", REGION(4, 0, 5))), RS_EINVAL, "tensor 'w'|rank 4 is unknown"},
    {LAYOUT("", REGIONS("14", "{'rank': 0, 'offset': [0, 0], 'size': [1, 1]}")), RS_EINVAL,
     "tensor 'w'|region 0|2 entries|1 dims"},
    {LAYOUT("", REGIONS("14", "")), RS_EINVAL, "tensor 'w'|no rank holds"},
    {LAYOUT("", REGIONS("", "{'rank': 0, 'offset': [], 'size': []},"
                            "{'rank': 0, 'offset': [], 'size': []}")),
     RS_EINVAL, "same region twice"},
    {KEYED("'regions': []"), RS_EINVAL, "tensor 'w'|mesh and regions"},
    /* keys */
    {KEYED("'shards': 4"), RS_EINVAL, "tensor 'w'|unknown key 'shards'|placements|shard_order"},
    {KEYED("'cast': 1"), RS_EINVAL, "'cast'"},
    {KEYED("'shape': [8]"), RS_EINVAL, "line 1|duplicate"},
    {KEYED("'shard_order': [0, 0]"), RS_EINVAL, "tensor 'w'|mesh dim 0 stands twice"},
    {KEYED("'shard_order': [1]"), RS_EINVAL, "tensor 'w'|shard_order"},
    {KEYED("'shard_order': []"), RS_EINVAL, "leaves out mesh dim 0"},
    {KEYED("'derived': {'from': 'w', 'rule': 'x', 'block': [1, 1]}"), RS_EINVAL, "unknown rule"},
    {KEYED("'derived': {'from': 'v', 'rule': 'block_scale', 'block': [1, 1]}"), RS_EINVAL,
     "derived from 'v', which the layout does not have"},
    {KEYED("'derived': {'from': 'w', 'rule': 'block_scale', 'block': [0, 1]}"), RS_EINVAL, "block"},
    {"{'name': 'l', 'ranks': 4, 'tensors': [], 'more': 1}", RS_EINVAL, "unknown key 'more'"},
    {"{'name': 'l', 'tensors': []}", RS_EINVAL, "'ranks' is missing"},
    {"{'ranks': 1, 'tensors': []}", RS_EINVAL, "'name' is missing"},
    {"{'name': 'l', 'ranks': 1}", RS_EINVAL, "'tensors' is missing"},
    {"{'name': 'l', 'ranks': 0, 'tensors': []}", RS_EINVAL, "'ranks'"},
    {"{'name': 'l', 'ranks': 1048577, 'tensors': []}", RS_EINVAL, "'ranks'"},
    {"[]", RS_EINVAL, "object"},
    /* numbers and dtypes */
    {LAYOUT(MESH4, TENSOR("w", "8.0", "'Shard(0)'")), RS_EINVAL, "tensor 'w'|integers"},
    {LAYOUT(MESH4, TENSOR("w", "-8", "'Shard(0)'")), RS_EINVAL, "tensor 'w'|-8"},
    {LAYOUT(MESH4, TENSOR("w", "9223372036854775808", "'Shard(0)'")), RS_EINVAL, "line 1|integer"},
    {LAYOUT(MESH4, TENSOR("w", BIG, "'Shard(0)'")), RS_EINVAL, "tensor 'w'|2^63"},
    {LAYOUT(MESH4, TENSOR("w", "4294967296, 4294967296", "'Shard(0)'")), RS_EINVAL, "2^63"},
    {LAYOUT(MESH4, TENSOR("w", "0, " BIG, "'Shard(0)'")), RS_EINVAL, "2^63"},
    {LAYOUT(MESH4, TENSOR("a", "2000000000000000000",
                          "'Shard(0)'") "," TENSOR("b", "2000000000000000000", "'Shard(0)'")),
     RS_EINVAL, "tensor 'b'|layout is beyond 2^63"},
    {LAYOUT(MESH4, "{'name': 'w', 'shape': [8], 'dtype': 'float4', 'mesh': 'm', 'placements': "
                   "['Shard(0)']}"),
     RS_EINVAL, "tensor 'w'|unknown dtype 'float4'|bfloat16"},
    /* Instances. */
    {"{'name': 'l', 'ranks': 3, 'tensors': [], 'instances': [[0, 1], [1, 2]]}", RS_EINVAL,
     "instance 1|rank 1 is in an instance already"},
    {"{'name': 'l', 'ranks': 3, 'tensors': [], 'instances': [[0, 3]]}", RS_EINVAL, "rank 3"},
    {"{'name': 'l', 'ranks': 3, 'tensors': [], 'instances': [[]]}", RS_EINVAL, "no ranks"},
    {"{'name': 'l', 'ranks': 3, 'tensors': [], 'instances': []}", RS_EINVAL, "instances"},
    {"{'name': 'l', 'ranks': 4, 'meshes': [" MESH4
     "], 'tensors': [" W1("'Shard(0)'") "], "
                                        "'instances': [[0, 1], [2]]}",
     RS_EINVAL, "rank 3 holds tensors but is in no instance"},
    /* Names. */
    {LAYOUT(MESH4, TENSOR("", "8", "'Shard(0)'")), RS_EINVAL, "tensor 0|printable"},
    {LAYOUT(MESH4, TENSOR("a\\nb", "8", "'Shard(0)'")), RS_EINVAL, "tensor 0|printable"},
    {LAYOUT(MESH4, TENSOR("a\\u0000b", "8", "'Shard(0)'")), RS_EINVAL, "line 1"},
    {LAYOUT(MESH4, TENSOR("\xf0\x80", "8", "'Shard(0)'")), RS_EINVAL, "line 1"},
    {LAYOUT(MESH4, TENSOR("a\\u202eb", "8", "'Shard(0)'")), RS_EINVAL, "printable"},
    /* syntax */
    {"", RS_EINVAL, "line 1"},
    {"{'name': 'l', 'ranks': 1, 'tensors': []} x", RS_EINVAL, "line 1"},
    {"{'name': 'l',\n 'ranks': }", RS_EINVAL, "line 2"},
    {"[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]", RS_EEXHAUSTED, "nested"},
};

START_TEST(each_fault_is_refused_with_its_place_and_cause)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct layout *l;
        struct err e = {0};
        int r = layouts_try(refusals[i].json, &l, &e);
        ck_assert_msg(r == refusals[i].code, "%zu: %d (%s) for %s", i, r, e.text, refusals[i].json);
        ck_assert_ptr_null(l);
        char *parts = strdup(refusals[i].says);
        for (char *rest = parts, *part; (part = strsep(&rest, "|")) != NULL;)
            ck_assert_msg(strstr(e.text, part) != NULL, "%zu: no '%s' in: %s", i, part, e.text);
        free(parts);
    }
}
END_TEST

START_TEST(names_of_512_bytes_and_paths_are_accepted_and_longer_ones_are_not)
{
    char name[700], text[1200];
    struct layout *l;
    struct err e = {0};
    memset(name, 'n', sizeof name);
    name[LAYOUT_MAX_NAME_BYTES] = '\0';
    (void)snprintf(text, sizeof text, LAYOUT(MESH4, TENSOR("%s", "8", "'Shard(0)'")), name);
    ck_assert_int_eq(layouts_try(text, &l, &e), 0);
    layout_free(l);
    name[LAYOUT_MAX_NAME_BYTES] = 'n';
    name[LAYOUT_MAX_NAME_BYTES + 1] = '\0';
    (void)snprintf(text, sizeof text, LAYOUT(MESH4, TENSOR("%s", "8", "'Shard(0)'")), name);
    ck_assert_int_eq(layouts_try(text, &l, &e), RS_EINVAL);
    l = layouts_parse(LAYOUT(MESH4, TENSOR("../x", "8", "'Shard(0)'") "," TENSOR(
                                        "\xc3\xa9 \xe6\x9d\x83", "8", "'Shard(0)'")));
    layout_free(l);
}
END_TEST

START_TEST(utf8_is_checked_by_ourselves_too)
{
    static const struct {
        const char *bytes;
        size_t n;
        bool valid;
    } names[] = {{"a", 1, true},
                 {"a\0b", 3, false},
                 {"\xc0\xaf", 2, false},
                 {"\xed\xa0\x80", 3, false},
                 {"\xf4\x90\x80\x80", 4, false},
                 {"\xf0\x9f\x98\x80", 4, true},
                 {"\xf0\x9f\x98", 3, false},
                 {"\xe2\x80\xa8", 3, false},
                 {"\x80", 1, false},
                 {"\x7f", 1, false},
                 {"\xc2\x85", 2, false},
                 {"", 0, false}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        ck_assert_msg(layout_name_valid(names[i].bytes, names[i].n) == names[i].valid, "%zu", i);
}
END_TEST

static void check_same_digest(const char *a, const char *b, bool same)
{
    struct layout *x = layouts_parse(a), *y = layouts_parse(b);
    ck_assert_msg((memcmp(x->digest, y->digest, sizeof x->digest) == 0) == same, "%s\n%s", a, b);
    layout_free(x);
    layout_free(y);
}

#define T2(name, mesh)                                                                             \
    "{'name': '" name "', 'shape': [8, 4], 'dtype': 'int8', 'mesh': '" mesh                        \
    "', 'placements': ['Shard(0)', 'Shard(1)']}"
#define M2(name, ranks, names)                                                                     \
    "{'name': '" name "', 'shape': [2, 2], 'ranks': [" ranks "]" names "}"
#define T2ORDER(order)                                                                             \
    LAYOUT(M2("a", "0, 1, 2, 3", ""), "{'name': 'x', 'shape': [8, 4], 'dtype': 'int8', 'mesh': "   \
                                      "'a', 'placements': ['Shard(0)', 'Shard(1)']" order "}")

START_TEST(equal_layouts_have_one_digest_and_others_have_not)
{
    const char *plain = LAYOUT(M2("a", "0, 1, 2, 3", "") "," M2("b", "3, 2, 1, 0", ""),
                               T2("x", "a") "," T2("y", "b"));
    check_same_digest(
        plain,
        LAYOUT(M2("q", "3, 2, 1, 0", "") "," M2("p", "0, 1, 2, 3", ", 'dim_names': ['u', 'v']"),
               T2("y", "q") "," T2("x", "p")),
        true);
    check_same_digest(plain,
                      LAYOUT(M2("a", "0, 1, 2, 3", "") "," M2("b", "3, 2, 1, 0", "") "," M2(
                                 "unused", "1, 2, 3, 0", "") "," M2("a2", "0, 1, 2, 3", ""),
                             T2("x", "a2") "," T2("y", "b")),
                      true);
    check_same_digest(plain,
                      LAYOUT(M2("a", "0, 1, 2, 3", "") "," M2("b", "3, 2, 1, 0", ""),
                             T2("x", "b") "," T2("y", "a")),
                      false);
    check_same_digest(T2ORDER(""), T2ORDER(", 'shard_order': [1, 0]"), true); /* cuts other dims */
    check_same_digest(T2ORDER(""), T2ORDER(", 'cast': true"), false);
    check_same_digest(
        LAYOUT("", REGIONS("4", REGION(0, 0, 2) "," REGION(1, 2, 2))),
        LAYOUT("", REGIONS("4", REGION(1, 2, 2) "," REGION(2, 4, 0) "," REGION(0, 0, 2))), true);
    check_same_digest("{'name': 'l', 'ranks': 2, 'tensors': [], 'instances': [[1], [0]]}",
                      "{'name': 'l', 'ranks': 2, 'tensors': [], 'instances': [[0], [1]]}", true);
    check_same_digest("{'name': 'l', 'ranks': 2, 'tensors': [], 'instances': [[0, 1]]}",
                      "{'name': 'l', 'ranks': 2, 'tensors': [], 'instances': [[0], [1]]}", false);
}
END_TEST

START_TEST(json_out_and_in_again_is_the_same_layout)
{
    uint64_t seed = 3;
    for (unsigned round = 0; round < 100; round++) {
        struct layout *l = layouts_random(&seed, "quo\"te \\ \xc3\xa9", 6, 5, NULL), *again;
        struct err e = {0};
        char *text = layout_to_json(l);
        ck_assert_int_eq(layout_from_json(text, strlen(text), &again, &e), 0);
        ck_assert_mem_eq(l->digest, again->digest, sizeof l->digest);
        char *twice = layout_to_json(again);
        ck_assert_str_eq(text, twice);
        mem_free(text);
        mem_free(twice);
        layout_free(l);
        layout_free(again);
    }
}
END_TEST

static const char with_all_parts[] =
    "{'name': 'l', 'ranks': 4, 'instances': [[0, 1], [2, 3]], 'meshes': [" MESH4 "], 'tensors': ["
    "{'name': 'w', 'shape': [8, 8], 'dtype': 'float8_e4m3fn', 'mesh': 'm', 'placements': "
    "['Shard(0)'],"
    "'cast': true}, {'name': 's', 'shape': [4, 4], 'dtype': 'float32', 'mesh': 'm', 'placements':"
    "['Shard(0)'], 'derived': {'from': 'w', 'rule': 'block_scale', 'block': [2, 2]}},"
    "{'name': 'r', 'shape': [4], 'dtype': 'int8', 'regions': [" REGION(0, 0, 2) "," REGION(
        1, 2, 2) "]}]}";

/* Fails each allocation in turn; `also` is a second code that is right for a failure. */
static struct layout *parse_with_failures(int also, long least)
{
    for (long i = 1;; i++) {
        struct layout *l;
        struct err e = {0};
        mem_fail_at(i);
        int r = layouts_try(with_all_parts, &l, &e);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        if (!struck) {
            ck_assert_int_eq(r, 0);
            ck_assert_int_gt(i, least);
            return l;
        }
        ck_assert_msg(r == RS_ENOMEM || r == also, "allocation %ld: %d %s", i, r, e.text);
        ck_assert_ptr_null(l);
    }
}

START_TEST(every_failed_allocation_is_reported_and_leaks_nothing)
{
    struct layout *l = parse_with_failures(RS_ENOMEM, 20);
    for (long i = 1;; i++) {
        mem_fail_at(i);
        char *text = layout_to_json(l);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert((text == NULL) == struck);
        mem_free(text);
        if (!struck)
            break;
    }
    layout_free(l);
    /* In the parser as well: jansson tells some of its own failures as syntax errors. */
    json_set_alloc_funcs(mem_alloc, mem_free);
    layout_free(parse_with_failures(RS_EINVAL, 100));
}
END_TEST

/* Instrumented code is several times slower. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const double limit_s = 20;
#else
static const double limit_s = 2;
#endif

/* A mixture of experts with 70,000 tensors on 1024 ranks, as text. */
static char *large_layout(size_t *ret_n)
{
    struct buf b;
    buf_init(&b);
    buf_printf(&b, "{\"name\": \"big\", \"ranks\": 1024, \"meshes\": [");
    for (unsigned m = 0; m < 256; m++) {
        buf_printf(&b, "%s{\"name\": \"m%u\", \"shape\": [2, 2], \"ranks\": [", m == 0 ? "" : ", ",
                   m);
        for (unsigned r = 0; r < 4; r++)
            buf_printf(&b, "%s%u", r == 0 ? "" : ", ", 4 * m + r);
        buf_printf(&b, "]}");
    }
    buf_printf(&b, "], \"tensors\": [");
    for (unsigned t = 0; t < 70000; t++)
        buf_printf(&b,
                   "%s\n{\"name\": \"model.layers.%u.mlp.experts.%u.down_proj.weight\", \"shape\": "
                   "[7168, 2048], \"dtype\": \"bfloat16\", \"mesh\": \"m%u\", \"placements\": "
                   "[\"Replicate\", \"Shard(1)\"]}",
                   t == 0 ? "" : ",", (t * 7919U) % 70000 / 384, (t * 7919U) % 70000 % 384,
                   t % 256);
    buf_printf(&b, "]}");
    return (char *)buf_steal(&b, ret_n);
}

START_TEST(seventy_thousand_tensors_are_read_within_two_seconds)
{
    size_t n;
    char *text = large_layout(&n);
    struct layout *l;
    struct err e = {0};
    clock_t begin = clock();
    ck_assert_msg(layout_from_json(text, n, &l, &e) == 0, "%s", e.text);
    ck_assert_double_lt((double)(clock() - begin) / CLOCKS_PER_SEC, limit_s);
    ck_assert_uint_eq(l->n_tensors, 70000);
    ck_assert_int_ge(layout_find(l, "model.layers.100.mlp.experts.7.down_proj.weight"), 0);
    layout_free(l);
    mem_free(text);
}
END_TEST

/* n x n regions on one rank each, the way a grid lies, with one box one row too high at the end. */
static int try_grid(uint32_t n, bool overlap, struct err *e)
{
    struct layout *l = layout_new();
    l->name = mem_strdup("l");
    l->n_ranks = 1024;
    l->n_tensors = 1;
    l->tensors = mem_calloc(1, sizeof *l->tensors);
    struct tensor *t = l->tensors;
    *t = (struct tensor){.name = mem_strdup("w"), .dtype = DTYPE_INT8, .n_dims = 2, .mesh = -1};
    t->shape[0] = t->shape[1] = 2 * n;
    t->regions = mem_calloc((size_t)n * n, sizeof *t->regions);
    t->n_regions = n * n;
    for (uint32_t i = 0; i < n * n; i++)
        t->regions[i] = (struct region){i % 1024, {2, {2 * (i % n), 2 * (i / n)}, {2, 2}}};
    if (overlap) {
        t->regions[n * n - 1].box.offset[0]--;
        t->regions[n * n - 1].box.size[0]++;
    }
    int r = layout_check(l, e);
    layout_free(l);
    return r;
}

START_TEST(a_grid_of_a_quarter_million_regions_is_checked_within_two_seconds)
{
    struct err e = {0};
    clock_t begin = clock();
    ck_assert_msg(try_grid(500, false, &e) == 0, "%s", e.text);
    ck_assert_int_eq(try_grid(500, true, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "overlaps"));
    ck_assert_double_lt((double)(clock() - begin) / CLOCKS_PER_SEC, limit_s);
}
END_TEST

/* n x n pinwheels of five boxes each: no plane separates the boxes of one. */
static int try_pinwheels(uint32_t n, struct err *e)
{
    static const uint64_t wheel[5][4] = {
        {0, 0, 1, 2}, {0, 2, 2, 1}, {2, 1, 1, 2}, {1, 0, 2, 1}, {1, 1, 1, 1}};
    struct layout *l = layout_new();
    l->name = mem_strdup("l");
    l->n_ranks = 5;
    l->n_tensors = 1;
    l->tensors = mem_calloc(1, sizeof *l->tensors);
    struct tensor *t = l->tensors;
    *t = (struct tensor){.name = mem_strdup("w"), .dtype = DTYPE_INT8, .n_dims = 2, .mesh = -1};
    t->shape[0] = t->shape[1] = (uint64_t)3 * n;
    t->regions = mem_calloc((size_t)5 * n * n, sizeof *t->regions);
    for (uint32_t i = 0; i < n * n; i++)
        for (uint32_t k = 0; k < 5; k++)
            t->regions[t->n_regions++] = (struct region){
                k,
                {2,
                 {(uint64_t)3 * (i % n) + wheel[k][0], (uint64_t)3 * (i / n) + wheel[k][1]},
                 {wheel[k][2], wheel[k][3]}}};
    int r = layout_check(l, e);
    struct box missing;
    if (r == 0)
        ck_assert_int_eq(layout_gap(t, &missing), 0);
    layout_free(l);
    return r;
}

/* Bars of two directions that cross nowhere but hang together in both: nothing to divide by. */
static int try_tangle(uint32_t n, struct err *e)
{
    struct layout *l = layout_new();
    l->name = mem_strdup("l");
    l->n_ranks = 2;
    l->n_tensors = 1;
    l->tensors = mem_calloc(1, sizeof *l->tensors);
    struct tensor *t = l->tensors;
    *t = (struct tensor){.name = mem_strdup("w"), .dtype = DTYPE_INT8, .n_dims = 3, .mesh = -1};
    t->shape[0] = t->shape[1] = t->shape[2] = (uint64_t)2 * n;
    t->regions = mem_calloc((size_t)2 * n, sizeof *t->regions);
    for (uint64_t i = 0; i < n; i++) {
        t->regions[t->n_regions++] = (struct region){0, {3, {2 * i, 0, 0}, {1, 2 * n, 1}}};
        t->regions[t->n_regions++] = (struct region){1, {3, {0, 2 * i, 1}, {2 * n, 1, 1}}};
    }
    int r = layout_check(l, e);
    layout_free(l);
    return r;
}

START_TEST(irregular_regions_are_checked_or_refused_in_bounded_time)
{
    struct err e = {0};
    clock_t begin = clock();
    ck_assert_msg(try_pinwheels(100, &e) == 0, "%s", e.text);
    ck_assert_msg(try_tangle(50000, &e) == 0, "%s", e.text); /* dim 2 divides them */
    ck_assert_double_lt((double)(clock() - begin) / CLOCKS_PER_SEC, 2 * limit_s);
}
END_TEST

START_TEST(layouts_that_were_not_parsed_are_checked_all_the_same)
{
    struct layout *l = layouts_parse(LAYOUT(MESH4, W1("'Shard(0)'")));
    struct tensor good = l->tensors[0], *t = &l->tensors[0];
    struct err e = {0};
    ck_assert_int_eq(layout_check(l, &e), 0); /* again */
    t->mesh = 1;
    ck_assert_int_eq(layout_check(l, &e), RS_EINVAL);
    *t = good;
    t->placements[0] = 1;
    ck_assert_int_eq(layout_check(l, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "tensor 'w': placement Shard(1) of mesh dim 'tp'"));
    *t = good;
    t->shard_order[0] = 1;
    ck_assert_int_eq(layout_check(l, &e), RS_EINVAL);
    *t = good;
    t->dtype = (enum dtype)99;
    ck_assert_int_eq(layout_check(l, &e), RS_EINVAL);
    t->dtype = (enum dtype) - 1;
    ck_assert_int_eq(layout_check(l, &e), RS_EINVAL);
    *t = good;
    t->n_dims = 9;
    ck_assert_int_eq(layout_check(l, &e), RS_EINVAL);
    *t = good;
    t->name = NULL;
    ck_assert_int_eq(layout_check(l, &e), RS_EINVAL);
    *t = good;
    l->meshes[0].n_ranks = 3;
    ck_assert_int_eq(layout_check(l, &e), RS_EINVAL);
    l->meshes[0].n_ranks = 4;
    ck_assert_int_eq(layout_check(l, &e), 0);
    layout_free(l);
}
END_TEST

START_TEST(every_prefix_of_a_layout_is_refused)
{
    size_t n = sizeof with_all_parts - 1;
    char *text = strdup(with_all_parts);
    for (char *c = text; *c != '\0'; c++)
        if (*c == '\'')
            *c = '"';
    for (size_t i = 0; i < n; i++) {
        struct layout *l = NULL;
        ck_assert_int_eq(layout_from_json(text, i, &l, NULL), RS_EINVAL);
        ck_assert_ptr_null(l);
    }
    free(text);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(each_fault_is_refused_with_its_place_and_cause)                                              \
    X(names_of_512_bytes_and_paths_are_accepted_and_longer_ones_are_not)                           \
    X(utf8_is_checked_by_ourselves_too)                                                            \
    X(equal_layouts_have_one_digest_and_others_have_not)                                           \
    X(json_out_and_in_again_is_the_same_layout)                                                    \
    X(every_failed_allocation_is_reported_and_leaks_nothing)                                       \
    X(seventy_thousand_tensors_are_read_within_two_seconds)                                        \
    X(a_grid_of_a_quarter_million_regions_is_checked_within_two_seconds)                           \
    X(irregular_regions_are_checked_or_refused_in_bounded_time)                                    \
    X(layouts_that_were_not_parsed_are_checked_all_the_same)                                       \
    X(every_prefix_of_a_layout_is_refused)
#include "test/lib/main.h"
