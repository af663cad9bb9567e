/* Bindings: what is refused and why, against an oracle that marks every byte; views; encoding. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/random.h"
#include "memory/memory.h"
#include "memory/strided.h"

enum { ARENA_BYTES = 4096, MAX_PIECES = 64 };

static uint64_t below(uint64_t *seed, uint64_t n)
{
    return random_next(seed) % n;
}

/* --- strided sets, by brute force ------------------------------------------------------------- */

static uint64_t strided_mark(const struct strided *s, uint8_t *map)
{
    uint64_t at[BOX_MAX_DIMS] = {0}, most = 0;
    for (;;) {
        uint64_t p = s->begin;
        for (unsigned d = 0; d < s->n_dims; d++)
            p += at[d] * s->stride_bytes[d];
        for (uint32_t k = 0; k < s->element_bytes; k++) {
            map[p + k]++;
            most = map[p + k] > most ? map[p + k] : most;
        }
        unsigned d = s->n_dims;
        while (d > 0 && ++at[d - 1] == s->size[d - 1])
            at[--d] = 0;
        if (d == 0)
            return most;
    }
}

static struct strided random_strided(uint64_t *seed)
{
    struct strided s = {.begin = below(seed, 60),
                        .n_dims = (uint32_t)below(seed, 5),
                        .element_bytes = UINT32_C(1) << below(seed, 4)};
    for (unsigned d = 0; d < s.n_dims; d++) {
        s.size[d] = 1 + below(seed, 5);
        s.stride_bytes[d] =
            below(seed, 2) == 0 ? below(seed, 40) : s.element_bytes * (1 + below(seed, 20));
    }
    return s;
}

START_TEST(strided_overlaps_are_exactly_those_that_marking_bytes_finds)
{
    uint64_t seed = 1;
    unsigned met = 0, apart = 0;
    for (unsigned i = 0; i < 20000; i++) {
        uint8_t map[ARENA_BYTES] = {0}, both[ARENA_BYTES] = {0};
        int64_t budget = 1 << 20;
        struct strided a = random_strided(&seed), b = random_strided(&seed);
        bool a_meets = strided_mark(&a, map) > 1;
        ck_assert_int_eq(strided_self_overlap(&a, &budget), a_meets);
        bool b_meets = strided_mark(&b, both) > 1;
        if (a_meets || b_meets)
            continue;
        bool expected = strided_mark(&a, both) > 1;
        ck_assert_int_eq(strided_overlap(&a, &b, &budget), expected);
        ck_assert_int_eq(strided_overlap(&b, &a, &budget), expected);
        met += expected;
        apart += !expected;
    }
    ck_assert_uint_gt(met, 1000);
    ck_assert_uint_gt(apart, 1000);
}
END_TEST

START_TEST(a_strided_set_beyond_the_address_space_has_no_end)
{
    struct strided s = {.n_dims = 2,
                        .size = {UINT64_C(1) << 40, 2},
                        .stride_bytes = {UINT64_C(1) << 30, 1},
                        .element_bytes = 2};
    ck_assert_uint_eq(strided_end(&s), UINT64_MAX);
    s.size[0] = 3;
    ck_assert_uint_eq(strided_end(&s), (UINT64_C(2) << 30) + 1 + 2);
    s.begin = UINT64_MAX - 3;
    ck_assert_uint_eq(strided_end(&s), UINT64_MAX);
}
END_TEST

/* --- layouts and pieces ----------------------------------------------------------------------- */

static struct layout *layout_of(const char *tensors)
{
    struct layout *l = NULL;
    struct err e = {0};
    char *json = mem_printf("{\"name\": \"x\", \"ranks\": 4, \"meshes\": [{\"name\": \"m\", "
                            "\"shape\": [4], \"ranks\": [0, 1, 2, 3], \"dim_names\": [\"tp\"]}], "
                            "\"tensors\": [%s]}",
                            tensors);
    int r = layout_from_json(json, strlen(json), &l, &e);
    ck_assert_msg(r == 0, "%s", e.text);
    mem_free(json);
    return l;
}

/* The usual case: [8, 6] float32 in four row shards; rank 1 holds rows 2 and 3, 48 bytes. */
static const char *const ROWS = "{\"name\": \"w\", \"shape\": [8, 6], \"dtype\": \"float32\", "
                                "\"mesh\": \"m\", \"placements\": [\"Shard(0)\"]}";

static struct binding_piece piece_2d(uint32_t tensor, uint64_t row, uint64_t column, uint64_t rows,
                                     uint64_t columns, uint64_t offset, int64_t pitch)
{
    return (struct binding_piece){
        .tensor = tensor,
        .box = {.n_dims = 2, .offset = {row, column}, .size = {rows, columns}},
        .offset = offset,
        .stride_bytes = {pitch, 4}};
}

static struct binding *bind_all(const struct binding_piece *pieces, uint32_t n, uint32_t n_tensors)
{
    struct binding *b = NULL;
    struct binding_piece *own = mem_calloc(n, sizeof *own);
    if (n > 0)
        memcpy(own, pieces, n * sizeof *own);
    ck_assert_int_eq(binding_new(own, n, n_tensors, &b), 0);
    return b;
}

/* Checks for rank 1 with one segment of that size. */
static int check_pieces(const char *tensors, const struct binding_piece *pieces, uint32_t n,
                        uint64_t segment_bytes, bool aliases, struct err *e)
{
    struct layout *l = layout_of(tensors);
    struct binding *b = bind_all(pieces, n, l->n_tensors);
    *e = (struct err){0};
    int r = binding_check(b, l, 1, &segment_bytes, 1, aliases, e);
    binding_free(b);
    layout_free(l);
    return r;
}

static void refused_with(const struct binding_piece *pieces, uint32_t n, uint64_t segment_bytes,
                         const char *text)
{
    struct err e;
    ck_assert_int_eq(check_pieces(ROWS, pieces, n, segment_bytes, false, &e), RS_EINVAL);
    ck_assert_msg(strstr(e.text, "tensor 'w'") != NULL && strstr(e.text, text) != NULL, "%s",
                  e.text);
}

START_TEST(a_shard_bound_by_one_piece_or_by_many_is_accepted)
{
    struct err e;
    struct binding_piece whole = piece_2d(0, 2, 0, 2, 6, 0, 24);
    ck_assert_int_eq(check_pieces(ROWS, &whole, 1, 48, false, &e), 0);
    struct binding_piece parts[] = {piece_2d(0, 3, 0, 1, 6, 100, 24), piece_2d(0, 2, 4, 1, 2, 0, 8),
                                    piece_2d(0, 2, 0, 1, 4, 8, 16)};
    ck_assert_int_eq(check_pieces(ROWS, parts, 3, 124, false, &e), 0);
    struct binding_piece with_empty[] = {piece_2d(0, 4, 0, 0, 6, 0, 24), whole};
    ck_assert_int_eq(check_pieces(ROWS, with_empty, 2, 48, false, &e), 0);
}
END_TEST

START_TEST(a_piece_that_leaves_its_segment_is_refused)
{
    struct binding_piece p = piece_2d(0, 2, 0, 2, 6, 1, 24);
    refused_with(&p, 1, 48, "ends at byte 49");
    p = piece_2d(0, 2, 0, 2, 6, UINT64_MAX - 7, 24);
    refused_with(&p, 1, 48, "or beyond");
    p.offset = 0;
    p.stride_bytes[0] = INT64_MAX;
    refused_with(&p, 1, 48, "or beyond");
    p.stride_bytes[0] = -24;
    refused_with(&p, 1, 48, "negative");
    p = piece_2d(0, 2, 0, 2, 6, 0, 24);
    p.segment = 1;
    refused_with(&p, 1, 48, "segment 1: the worker has 1");
}
END_TEST

START_TEST(gaps_doubles_and_strangers_are_refused_by_name)
{
    struct binding_piece gap = piece_2d(0, 2, 0, 1, 6, 0, 24);
    refused_with(&gap, 1, 48, "[3:4, 0:6], which the layout gives rank 1, is not bound");
    refused_with(NULL, 0, 48, "is not bound");
    struct binding_piece twice[] = {piece_2d(0, 2, 0, 2, 6, 0, 24),
                                    piece_2d(0, 3, 0, 1, 6, 48, 24)};
    refused_with(twice, 2, 96, "bind each element once");
    struct binding_piece strange = piece_2d(0, 3, 0, 2, 6, 0, 24);
    refused_with(&strange, 1, 48, "bind only what the rank holds");
    strange = piece_2d(0, 7, 0, 2, 6, 0, 24);
    refused_with(&strange, 1, 48, "global shape");
    strange.box.offset[0] = UINT64_MAX - 1;
    refused_with(&strange, 1, 48, "global shape");
    strange = piece_2d(0, 2, 0, 2, 6, 0, 24);
    strange.box.n_dims = 1;
    refused_with(&strange, 1, 48, "it has 1 dims, the tensor has 2");
}
END_TEST

/* [4, 31, 10] with stride (320, 10, 1) leaves gaps; with (300, 10, 1) elements meet. */
START_TEST(padded_strides_are_accepted_and_overlapping_ones_refused)
{
    static const char *const T =
        "{\"name\": \"w\", \"shape\": [4, 31, 10], \"dtype\": \"float32\", "
        "\"mesh\": \"m\", \"placements\": [\"Replicate\"]}";
    struct err e;
    struct binding_piece p = {.box = {.n_dims = 3, .size = {4, 31, 10}},
                              .stride_bytes = {4 * 320, 40, 4}};
    ck_assert_int_eq(check_pieces(T, &p, 1, 4 * 1280, false, &e), 0);
    p.stride_bytes[0] = 4 * 310;
    ck_assert_int_eq(check_pieces(T, &p, 1, 4 * 1240, false, &e), 0);
    p.stride_bytes[0] = 4 * 300;
    ck_assert_int_eq(check_pieces(T, &p, 1, 4 * 1280, false, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "strides make elements overlap"));
    ck_assert_int_eq(check_pieces(T, &p, 1, 4 * 1280, true, &e), RS_EINVAL);
    p.stride_bytes[0] = 0; /* an expanded tensor */
    ck_assert_int_eq(check_pieces(T, &p, 1, 4 * 1280, true, &e), RS_EINVAL);
}
END_TEST

/* Gate first, up after it in one buffer; then column by column in one matrix. */
START_TEST(fused_buffers_by_rows_and_by_columns_are_accepted)
{
    static const char *const T =
        "{\"name\": \"gate\", \"shape\": [8, 2], \"dtype\": \"float32\", \"mesh\": \"m\", "
        "\"placements\": [\"Shard(0)\"]}, {\"name\": \"up\", \"shape\": [8, 2], \"dtype\": "
        "\"float32\", \"mesh\": \"m\", \"placements\": [\"Shard(0)\"]}";
    struct err e;
    struct binding_piece rows[] = {piece_2d(0, 2, 0, 2, 2, 0, 8), piece_2d(1, 2, 0, 2, 2, 16, 8)};
    ck_assert_int_eq(check_pieces(T, rows, 2, 32, false, &e), 0);
    struct binding_piece columns[] = {piece_2d(0, 2, 0, 2, 2, 0, 16),
                                      piece_2d(1, 2, 0, 2, 2, 8, 16)};
    ck_assert_int_eq(check_pieces(T, columns, 2, 32, false, &e), 0);
    columns[1].offset = 4; /* up's first column on gate's second */
    ck_assert_int_eq(check_pieces(T, columns, 2, 32, false, &e), RS_EINVAL);
    ck_assert_msg(strstr(e.text, "tensor 'gate'") != NULL && strstr(e.text, "tensor 'up'") != NULL,
                  "%s", e.text);
    ck_assert_int_eq(check_pieces(T, columns, 2, 32, true, &e), 0); /* a source may share memory */
}
END_TEST

/* Rank 3 of 8 holds Q rows [51, 64) and K, V rows [64, 68) of one fused matrix. */
START_TEST(a_fused_qkv_shard_that_cuts_heads_is_accepted)
{
    static const char *const T =
        "{\"name\": \"k\", \"shape\": [4, 2], \"dtype\": \"float32\", \"regions\": [{\"rank\": 1, "
        "\"offset\": [0, 0], \"size\": [2, 2]}, {\"rank\": 2, \"offset\": [2, 0], \"size\": [2, "
        "2]}]}, {\"name\": \"q\", \"shape\": [128, 2], \"dtype\": \"float32\", \"regions\": "
        "[{\"rank\": 0, \"offset\": [0, 0], \"size\": [51, 2]}, {\"rank\": 1, \"offset\": [51, 0], "
        "\"size\": [13, 2]}, {\"rank\": 2, \"offset\": [64, 0], \"size\": [64, 2]}]}, {\"name\": "
        "\"v\", \"shape\": [4, 2], \"dtype\": \"float32\", \"regions\": [{\"rank\": 1, \"offset\": "
        "[0, 0], \"size\": [2, 2]}, {\"rank\": 2, \"offset\": [2, 0], \"size\": [2, 2]}]}";
    struct err e;
    struct binding_piece p[] = {piece_2d(1, 51, 0, 13, 2, 0, 8), piece_2d(0, 0, 0, 2, 2, 104, 8),
                                piece_2d(2, 0, 0, 2, 2, 120, 8)};
    ck_assert_int_eq(check_pieces(T, p, 3, 136, false, &e), 0);
    p[2].offset = 116;
    ck_assert_int_eq(check_pieces(T, p, 3, 136, false, &e), RS_EINVAL);
}
END_TEST

/* [6, 256] on 4 ranks leaves rank 3 without rows: nothing to bind, no segment. */
START_TEST(an_empty_shard_needs_no_piece_and_no_segment)
{
    struct layout *l = layout_of("{\"name\": \"w\", \"shape\": [6, 256], \"dtype\": \"float32\", "
                                 "\"mesh\": \"m\", \"placements\": [\"Shard(0)\"]}");
    struct err e = {0};
    struct binding *none = bind_all(NULL, 0, 1);
    ck_assert_int_eq(binding_check(none, l, 3, NULL, 0, false, &e), 0);
    ck_assert_int_eq(binding_check(none, l, 2, NULL, 0, false, &e), RS_EINVAL);
    struct binding_piece p = piece_2d(0, 5, 0, 1, 256, 0, 1024);
    struct binding *some = bind_all(&p, 1, 1);
    uint64_t bytes = 1024;
    ck_assert_int_eq(binding_check(some, l, 3, &bytes, 1, false, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "gives rank 3 none of it"));
    binding_free(none);
    binding_free(some);
    layout_free(l);
}
END_TEST

START_TEST(a_binding_of_another_layout_is_refused)
{
    struct layout *l = layout_of(ROWS);
    struct err e = {0};
    struct binding *b = bind_all(NULL, 0, 2);
    ck_assert_int_eq(binding_check(b, l, 0, NULL, 0, false, &e), RS_EINVAL);
    binding_free(b);
    struct binding_piece p = piece_2d(1, 0, 0, 1, 1, 0, 4);
    ck_assert_int_eq(binding_new(&p, 1, 1, &b), RS_EINVAL);
    layout_free(l);
}
END_TEST

/* --- random bindings against marking each element and each byte ------------------------------- */

enum { TENSORS = 2, ROWS_MAX = 8, COLUMNS_MAX = 6 };

struct oracle {
    uint8_t elements[TENSORS][ROWS_MAX][COLUMNS_MAX];
    uint8_t bytes[TENSORS][ARENA_BYTES]; /* one map for all, but for aliases */
    bool ok;
};

static void oracle_mark(struct oracle *o, const struct binding_piece *p, uint64_t segment_bytes,
                        uint32_t element_bytes, bool aliases)
{
    uint8_t *bytes = o->bytes[aliases ? p->tensor : 0];
    for (uint64_t i = 0; i < p->box.size[0]; i++)
        for (uint64_t j = 0; j < p->box.size[1]; j++) {
            uint64_t row = p->box.offset[0] + i, column = p->box.offset[1] + j;
            uint64_t at =
                p->offset + i * (uint64_t)p->stride_bytes[0] + j * (uint64_t)p->stride_bytes[1];
            if (row >= ROWS_MAX || column >= COLUMNS_MAX || at + element_bytes > segment_bytes) {
                o->ok = false;
                continue;
            }
            o->elements[p->tensor][row][column]++;
            for (uint32_t k = 0; k < element_bytes; k++)
                o->ok = ++bytes[at + k] == 1 && o->ok;
        }
}

/* Rank 1 holds rows 2 and 3 of tensor 0, columns 2 and 3 of tensor 1. */
static bool oracle_says_ok(struct oracle *o)
{
    for (unsigned i = 0; i < ROWS_MAX; i++)
        for (unsigned j = 0; j < COLUMNS_MAX; j++) {
            o->ok = o->ok && o->elements[0][i][j] == (i == 2 || i == 3);
            o->ok = o->ok && o->elements[1][i][j] == (j == 2 || j == 3);
        }
    return o->ok;
}

/* Cuts the box in two along a random dim, twice at most. */
static uint32_t random_cut(uint64_t *seed, struct binding_piece *p, uint32_t n)
{
    for (unsigned times = (unsigned)below(seed, 3); times > 0; times--) {
        struct binding_piece *cut = &p[below(seed, n)];
        unsigned d = (unsigned)below(seed, 2);
        if (cut->box.size[d] < 2)
            continue;
        uint64_t at = 1 + below(seed, cut->box.size[d] - 1);
        p[n] = *cut;
        cut->box.size[d] = at;
        p[n].box.offset[d] += at;
        p[n].box.size[d] -= at;
        n++;
    }
    return n;
}

/* Somewhere: dense, transposed, with a wider pitch, or anyhow. */
static void random_place(uint64_t *seed, struct binding_piece *p, uint32_t element_bytes,
                         uint64_t *at)
{
    unsigned inner = below(seed, 5) == 0 ? 0 : 1;
    int64_t pitch = (int64_t)(p->box.size[inner] * element_bytes);
    p->stride_bytes[inner] = element_bytes;
    p->stride_bytes[1 - inner] = below(seed, 3) == 0 ? 8 * (int64_t)element_bytes : pitch;
    p->offset = *at;
    if (p->stride_bytes[1 - inner] > pitch && below(seed, 2) == 0)
        *at += (uint64_t)pitch; /* the next one interlaces, perhaps */
    else
        *at += (uint64_t)p->stride_bytes[1 - inner] * p->box.size[1 - inner];
}

static void random_fault(uint64_t *seed, struct binding_piece *p)
{
    unsigned d = (unsigned)below(seed, 2);
    switch (below(seed, 5)) {
    case 0:
        p->offset += below(seed, 9);
        return;
    case 1:
        p->stride_bytes[d] = (int64_t)below(seed, 40);
        return;
    case 2:
        p->box.offset[d] += 1;
        return;
    case 3:
        p->box.size[d] += 1;
        return;
    default:
        p->box.size[d] -= 1;
    }
}

START_TEST(random_bindings_are_judged_as_by_marking_every_element_and_byte)
{
    static const char *const T =
        "{\"name\": \"a\", \"shape\": [8, 6], \"dtype\": \"float32\", \"mesh\": \"m\", "
        "\"placements\": [\"Shard(0)\"]}, {\"name\": \"b\", \"shape\": [8, 6], \"dtype\": "
        "\"bfloat16\", \"mesh\": \"m\", \"placements\": [\"Shard(1)\"]}";
    struct layout *l = layout_of(T);
    uint64_t seed = 7;
    unsigned accepted = 0, refused = 0;
    for (unsigned i = 0; i < 6000; i++) {
        struct binding_piece p[MAX_PIECES] = {
            {.tensor = 0, .box = {.n_dims = 2, .offset = {2, 0}, .size = {2, 6}}},
            {.tensor = 1, .box = {.n_dims = 2, .offset = {0, 2}, .size = {8, 2}}}};
        uint32_t n = random_cut(&seed, p, 2);
        uint64_t at = 0, segment_bytes = 100 + below(&seed, 300);
        bool aliases = below(&seed, 4) == 0;
        for (uint32_t k = 0; k < n; k++)
            random_place(&seed, &p[k], p[k].tensor == 0 ? 4 : 2, &at);
        if (below(&seed, 2) == 0)
            random_fault(&seed, &p[below(&seed, n)]);
        struct oracle o = {.ok = true};
        for (uint32_t k = 0; k < n; k++)
            oracle_mark(&o, &p[k], segment_bytes, p[k].tensor == 0 ? 4 : 2, aliases);
        bool expected = oracle_says_ok(&o);
        struct binding *b = bind_all(p, n, TENSORS);
        struct err e = {0};
        int r = binding_check(b, l, 1, &segment_bytes, 1, aliases, &e);
        ck_assert_msg(r == (expected ? 0 : RS_EINVAL), "case %u: %d %s", i, r, e.text);
        ck_assert(expected || strstr(e.text, "tensor '") != NULL);
        accepted += expected;
        refused += !expected;
        binding_free(b);
    }
    ck_assert_uint_gt(accepted, 1000);
    ck_assert_uint_gt(refused, 1000);
    layout_free(l);
}
END_TEST

/* --- reading it ------------------------------------------------------------------------------- */

struct seen {
    uint32_t n;
    uint64_t sum; /* of the bytes found at each element's address */
};

static int add_part(const struct box *part, const struct kernel_view *view, void *arg)
{
    struct seen *s = arg;
    s->n++;
    for (uint64_t i = 0; i < part->size[0]; i++)
        for (uint64_t j = 0; j < part->size[1]; j++) {
            uint32_t v;
            memcpy(&v,
                   (char *)view->base + (int64_t)i * view->stride_bytes[0] +
                       (int64_t)j * view->stride_bytes[1],
                   4);
            ck_assert_uint_eq(v, 100 * (part->offset[0] + i) + part->offset[1] + j);
            s->sum += v;
        }
    return 0;
}

/* A matrix [20, 10] of value 100 * row + column, cut in a grid of pieces, two of three in
 * segment 1. */
static struct binding *grid(uint32_t *memory, uint32_t rows, uint32_t columns)
{
    struct binding_piece p[MAX_PIECES];
    uint32_t n = 0, at = 0;
    for (uint32_t i = 0; i < 20; i += rows)
        for (uint32_t j = 0; j < 10; j += columns) {
            p[n] = piece_2d(0, i, j, rows, columns, 4 * at, 4 * (int64_t)columns);
            for (uint32_t k = 0; k < rows * columns; k++)
                memory[at++] = 100 * (i + k / columns) + j + k % columns;
            n++;
        }
    return bind_all(p, n, 1);
}

START_TEST(views_find_each_element_of_any_box)
{
    uint32_t memory[200];
    void *base = memory;
    struct binding *b = grid(memory, 4, 5);
    for (uint64_t i = 0; i < 20; i++)
        for (uint64_t k = i + 1; k <= 20; k++) {
            struct box box = {.n_dims = 2, .offset = {i, i % 7}, .size = {k - i, 10 - i % 7}};
            struct seen s = {0};
            uint64_t sum = 0;
            for (uint64_t r = i; r < k; r++)
                for (uint64_t c = i % 7; c < 10; c++)
                    sum += 100 * r + c;
            ck_assert_int_eq(binding_views(b, 0, &box, &base, add_part, &s), 0);
            ck_assert_uint_eq(s.sum, sum);
        }
    struct box beyond = {.n_dims = 2, .offset = {19, 0}, .size = {2, 10}};
    struct seen s = {0};
    ck_assert_int_eq(binding_views(b, 0, &beyond, &base, add_part, &s), RS_ENOTFOUND);
    ck_assert_int_eq(binding_views(b, 1, &beyond, &base, add_part, &s), RS_ENOTFOUND);
    beyond.size[0] = 0;
    ck_assert_int_eq(binding_views(b, 0, &beyond, &base, add_part, &s), 0);
    binding_free(b);
}
END_TEST

/* [20, 10] cut anyhow, so that pieces of one row reach differently far down. */
static struct binding *random_grid(uint64_t *seed, uint32_t *memory)
{
    struct binding_piece p[MAX_PIECES] = {{.box = {.n_dims = 2, .size = {20, 10}}}};
    uint32_t n = 1, at = 0;
    while (n < 24)
        n = random_cut(seed, p, n);
    for (uint32_t k = 0; k < n; k++) {
        const struct box *b = &p[k].box;
        p[k].offset = 4 * at;
        p[k].stride_bytes[0] = 4 * (int64_t)b->size[1];
        p[k].stride_bytes[1] = 4;
        for (uint64_t i = 0; i < b->size[0] * b->size[1]; i++)
            memory[at++] =
                (uint32_t)(100 * (b->offset[0] + i / b->size[1]) + b->offset[1] + i % b->size[1]);
    }
    return bind_all(p, n, 1);
}

START_TEST(views_find_each_element_among_pieces_of_uneven_heights)
{
    uint64_t seed = 12;
    for (unsigned round = 0; round < 300; round++) {
        uint32_t memory[200];
        void *base = memory;
        struct binding *b = random_grid(&seed, memory);
        for (unsigned i = 0; i < 20; i++) {
            struct box box = {.n_dims = 2, .offset = {below(&seed, 20), below(&seed, 10)}};
            box.size[0] = 1 + below(&seed, 20 - box.offset[0]);
            box.size[1] = 1 + below(&seed, 10 - box.offset[1]);
            struct seen s = {0};
            void *address = NULL;
            ck_assert_int_eq(binding_views(b, 0, &box, &base, add_part, &s), 0);
            box.size[0] = 1; /* a run within one piece is one view, and contiguous */
            s = (struct seen){0};
            ck_assert_int_eq(binding_views(b, 0, &box, &base, add_part, &s), 0);
            ck_assert(binding_contiguous(b, 0, &box, 4, &base, &address) == (s.n == 1));
            ck_assert(s.n != 1 || *(uint32_t *)address == 100 * box.offset[0] + box.offset[1]);
        }
        binding_free(b);
    }
}
END_TEST

static int stop_at_second(const struct box *part, const struct kernel_view *view, void *arg)
{
    (void)part;
    (void)view;
    return ++*(int *)arg == 2 ? 42 : 0;
}

START_TEST(views_stop_where_the_caller_says_so_and_do_not_touch_holes)
{
    uint32_t memory[200];
    void *base = memory, *hole = NULL;
    struct binding *b = grid(memory, 4, 5);
    struct box all = {.n_dims = 2, .size = {20, 10}};
    int n = 0;
    ck_assert_int_eq(binding_views(b, 0, &all, &base, stop_at_second, &n), 42);
    ck_assert_int_eq(n, 2);
    ck_assert_int_eq(binding_views(b, 0, &all, &hole, stop_at_second, &n), RS_ENOTFOUND);
    ck_assert_int_eq(n, 2);
    binding_free(b);
}
END_TEST

START_TEST(contiguous_is_true_for_runs_only_and_gives_their_address)
{
    uint32_t memory[200];
    void *base = memory, *address = NULL;
    struct binding *b = grid(memory, 4, 5);
    struct box box = {.n_dims = 2, .offset = {4, 5}, .size = {4, 5}};
    ck_assert(binding_contiguous(b, 0, &box, 4, &base, &address));
    ck_assert_uint_eq(*(uint32_t *)address, 405);
    box = (struct box){.n_dims = 2, .offset = {6, 7}, .size = {1, 3}}; /* part of one row */
    ck_assert(binding_contiguous(b, 0, &box, 4, &base, &address));
    ck_assert_uint_eq(*(uint32_t *)address, 607);
    box.size[0] = 2; /* parts of two rows */
    ck_assert(!binding_contiguous(b, 0, &box, 4, &base, &address));
    box = (struct box){.n_dims = 2, .offset = {0, 3}, .size = {1, 4}}; /* of two pieces */
    ck_assert(!binding_contiguous(b, 0, &box, 4, &base, &address));
    box.size[1] = 0;
    ck_assert(!binding_contiguous(b, 0, &box, 4, &base, &address));
    binding_free(b);
}
END_TEST

/* --- encoding --------------------------------------------------------------------------------- */

START_TEST(a_binding_survives_its_encoding)
{
    uint32_t memory[200];
    struct binding *b = grid(memory, 2, 5), *decoded = NULL;
    struct buf buf;
    struct err e = {0};
    b->rows[3].segment = 2;
    buf_init(&buf);
    ck_assert_int_eq(binding_encode(b, &buf), 0);
    ck_assert_int_eq(binding_decode(buf.data, buf.n_bytes, &decoded, &e), 0);
    ck_assert_uint_eq(decoded->n_pieces, b->n_pieces);
    ck_assert_mem_eq(decoded->rows, b->rows, b->n_pieces * sizeof *b->rows);
    ck_assert_mem_eq(decoded->dims, b->dims, 2 * b->n_pieces * sizeof *b->dims); /* all of 2 dims */
    ck_assert_mem_eq(decoded->first, b->first, 2 * sizeof *b->first);
    for (size_t n = 0; n < buf.n_bytes; n++)
        ck_assert_int_eq(binding_decode(buf.data, n, &decoded, &e), RS_EPROTO);
    buf_put_u8(&buf, 0);
    ck_assert_int_eq(binding_decode(buf.data, buf.n_bytes, &decoded, &e), RS_EPROTO);
    binding_free(decoded);
    binding_free(b);
    buf_close(&buf);
}
END_TEST

START_TEST(a_decoder_refuses_counts_and_numbers_out_of_range_before_it_spends_memory)
{
    struct buf buf;
    struct err e = {0};
    struct binding *b = NULL;
    buf_init(&buf);
    buf_put_u32(&buf, 0x31425352);
    buf_put_u32(&buf, 1);
    buf_put_u32(&buf, 1 << 22); /* pieces that are not there */
    mem_fail_at(1);
    ck_assert_int_eq(binding_decode(buf.data, buf.n_bytes, &b, &e), RS_EPROTO);
    ck_assert_int_eq(mem_failed(), 0);
    mem_fail_at(0);
    buf.n_bytes = 8;
    buf_put_u32(&buf, 1);
    buf_put_u32(&buf, 0);
    buf_put_u32(&buf, 0);
    buf_put_u8(&buf, 1);
    buf_put_u64(&buf, 0);
    buf_put_u64(&buf, UINT64_MAX); /* offset + size wraps */
    buf_put_u64(&buf, 2);
    buf_put_u64(&buf, 4);
    ck_assert_int_eq(binding_decode(buf.data, buf.n_bytes, &b, &e), RS_EPROTO);
    ck_assert_ptr_nonnull(strstr(e.text, "piece 0: the box is beyond 2^63"));
    buf.data[12] = 1; /* tensor 1 of 1 */
    ck_assert_int_eq(binding_decode(buf.data, buf.n_bytes, &b, &e), RS_EPROTO);
    ck_assert_ptr_null(b);
    buf_close(&buf);
}
END_TEST

/* --- size, and memory that is out ------------------------------------------------------------- */

/* 70,000 tensors of 64 elements, bound in pairs that interlace by columns: fused experts. */
START_TEST(seventy_thousand_fused_pieces_are_checked_in_well_under_a_second)
{
    enum { N = 70000 };
    struct layout *l = layout_new();
    l->n_ranks = 1;
    l->n_tensors = N;
    l->tensors = mem_calloc(N, sizeof *l->tensors);
    struct region *regions = mem_calloc(N, sizeof *regions);
    struct binding_piece *pieces = mem_calloc(N, sizeof *pieces);
    for (uint32_t t = 0; t < N; t++) {
        regions[t] = (struct region){.box = {.n_dims = 2, .size = {8, 8}}};
        l->tensors[t] = (struct tensor){.name = mem_printf("t%u", t),
                                        .dtype = DTYPE_BFLOAT16,
                                        .n_dims = 2,
                                        .shape = {8, 8},
                                        .mesh = -1,
                                        .regions = mem_alloc(sizeof *regions),
                                        .n_regions = 1};
        l->tensors[t].regions[0] = regions[t];
        pieces[t] = (struct binding_piece){.tensor = t,
                                           .box = regions[t].box,
                                           .offset = (t / 2) * 256 + (t % 2) * 16,
                                           .stride_bytes = {32, 2}};
    }
    struct binding *b = NULL;
    struct err e = {0};
    uint64_t segment_bytes = N / 2 * 256;
    ck_assert_int_eq(binding_new(pieces, N, N, &b), 0);
    clock_t start = clock();
    ck_assert_int_eq(binding_check(b, l, 0, &segment_bytes, 1, false, &e), 0);
    ck_assert_int_lt((int)((clock() - start) * 1000 / CLOCKS_PER_SEC), 1000);
    b->rows[N / 2].offset += 2;
    ck_assert_int_eq(binding_check(b, l, 0, &segment_bytes, 1, false, &e), RS_EINVAL);
    binding_free(b);
    mem_free(regions);
    layout_free(l);
}
END_TEST

static int use_binding(const struct layout *l)
{
    struct binding_piece parts[] = {piece_2d(0, 3, 0, 1, 6, 100, 24), piece_2d(0, 2, 4, 1, 2, 0, 8),
                                    piece_2d(0, 2, 0, 1, 4, 8, 16)};
    uint64_t segment_bytes = 124;
    struct err e = {0};
    struct binding *b = NULL, *decoded = NULL;
    struct buf buf;
    buf_init(&buf);
    struct binding_piece *own = mem_calloc(3, sizeof *own);
    if (own == NULL)
        return RS_ENOMEM;
    memcpy(own, parts, sizeof parts);
    int r = binding_new(own, 3, 1, &b);
    if (r != 0)
        mem_free(own);
    if (r == 0)
        r = binding_check(b, l, 1, &segment_bytes, 1, false, &e);
    if (r == 0)
        r = binding_encode(b, &buf);
    if (r == 0)
        r = binding_decode(buf.data, buf.n_bytes, &decoded, &e);
    binding_free(b);
    binding_free(decoded);
    buf_close(&buf);
    return r;
}

START_TEST(every_failed_allocation_is_an_error_and_leaks_nothing)
{
    struct layout *l = layout_of(ROWS);
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int r = use_binding(l);
        int failed = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, failed ? RS_ENOMEM : 0);
        if (!failed)
            break;
        ck_assert_int_lt((int)i, 100);
    }
    layout_free(l);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(strided_overlaps_are_exactly_those_that_marking_bytes_finds)                                 \
    X(a_strided_set_beyond_the_address_space_has_no_end)                                           \
    X(a_shard_bound_by_one_piece_or_by_many_is_accepted)                                           \
    X(a_piece_that_leaves_its_segment_is_refused)                                                  \
    X(gaps_doubles_and_strangers_are_refused_by_name)                                              \
    X(padded_strides_are_accepted_and_overlapping_ones_refused)                                    \
    X(fused_buffers_by_rows_and_by_columns_are_accepted)                                           \
    X(a_fused_qkv_shard_that_cuts_heads_is_accepted)                                               \
    X(an_empty_shard_needs_no_piece_and_no_segment)                                                \
    X(a_binding_of_another_layout_is_refused)                                                      \
    X(random_bindings_are_judged_as_by_marking_every_element_and_byte)                             \
    X(views_find_each_element_of_any_box)                                                          \
    X(views_find_each_element_among_pieces_of_uneven_heights)                                      \
    X(views_stop_where_the_caller_says_so_and_do_not_touch_holes)                                  \
    X(contiguous_is_true_for_runs_only_and_gives_their_address)                                    \
    X(a_binding_survives_its_encoding)                                                             \
    X(a_decoder_refuses_counts_and_numbers_out_of_range_before_it_spends_memory)                   \
    X(seventy_thousand_fused_pieces_are_checked_in_well_under_a_second)                            \
    X(every_failed_allocation_is_an_error_and_leaks_nothing)
#include "test/lib/main.h"
