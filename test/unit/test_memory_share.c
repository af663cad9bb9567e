/* Bindings beside each other: which share bytes that a refit would spoil, against marking every byte. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "layout/layout.h"
#include "memory/memory.h"

enum { BYTES = 256, USERS = 3, PIECES = 3 };

static struct layout *layout_make(void)
{
    static const char json[] =
        "{\"name\": \"x\", \"ranks\": 1, \"meshes\": [{\"name\": \"m\", \"shape\": [1], \"ranks\": "
        "[0]}], \"tensors\": [{\"name\": \"a\", \"shape\": [64, 64], \"dtype\": \"int32\", "
        "\"mesh\": \"m\", \"placements\": [\"Replicate\"]}, {\"name\": \"b\", \"shape\": [64, 64], "
        "\"dtype\": \"int16\", \"mesh\": \"m\", \"placements\": [\"Replicate\"]}]}";
    struct layout *l = NULL;
    ck_assert_int_eq(layout_from_json(json, sizeof json - 1, &l, NULL), 0);
    return l;
}

static struct binding *bind(const struct binding_piece *pieces, uint32_t n)
{
    struct binding *b = NULL;
    struct binding_piece *own = mem_calloc(n, sizeof *own);
    memcpy(own, pieces, n * sizeof *own);
    ck_assert_int_eq(binding_new(own, n, 2, &b), 0);
    return b;
}

static struct binding_piece piece(uint32_t tensor, uint64_t rows, uint64_t columns, uint64_t offset,
                                  int64_t pitch, int64_t stride)
{
    return (struct binding_piece){.tensor = tensor,
                                  .box = {.n_dims = 2, .size = {rows, columns}},
                                  .offset = offset,
                                  .stride_bytes = {pitch, stride}};
}

/* Two users of one piece each, in memories m and n. */
static int pair(struct binding_piece p, bool p_written, uint64_t m, struct binding_piece q,
                bool q_written, uint64_t n, struct err *e)
{
    struct layout *l = layout_make();
    struct binding_user users[2] = {{.binding = bind(&p, 1),
                                     .layout = l,
                                     .memory_of_segment = &m,
                                     .written = p_written,
                                     .who = "layout 'train' rank 1"},
                                    {.binding = bind(&q, 1),
                                     .layout = l,
                                     .memory_of_segment = &n,
                                     .written = q_written,
                                     .who = "layout 'rollout' rank 2"}};
    int r = bindings_disjoint(users, 2, e);
    binding_free((struct binding *)(uintptr_t)users[0].binding);
    binding_free((struct binding *)(uintptr_t)users[1].binding);
    layout_free(l);
    return r;
}

START_TEST(what_is_written_may_not_be_anothers)
{
    struct binding_piece p = piece(0, 4, 4, 0, 16, 4), next = piece(0, 4, 4, 64, 16, 4),
                         last = piece(0, 4, 4, 63, 16, 4);
    struct err e = {0};
    ck_assert_int_eq(pair(p, false, 7, next, true, 7, NULL), 0);
    ck_assert_int_eq(pair(p, false, 7, last, false, 7, NULL), 0); /* nobody writes */
    ck_assert_int_eq(pair(p, false, 7, last, true, 8, NULL), 0);  /* other memory */
    ck_assert_int_eq(pair(p, false, 7, last, true, 7, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "tensor 'a' of layout 'train' rank 1"));
    ck_assert_ptr_nonnull(strstr(e.text, "layout 'rollout' rank 2"));
    ck_assert_int_eq(pair(p, true, 7, last, true, 7, NULL), RS_EINVAL);
}
END_TEST

START_TEST(the_same_elements_at_the_same_place_may_be_read_and_written)
{
    struct binding_piece p = piece(0, 4, 4, 0, 16, 4), other = p, name = piece(1, 4, 4, 0, 16, 4);
    ck_assert_int_eq(pair(p, false, 7, p, true, 7, NULL), 0);
    ck_assert_int_eq(pair(p, true, 7, p, true, 7, NULL), RS_EINVAL); /* two receivers */
    other.box.offset[0] = 4;
    ck_assert_int_eq(pair(p, false, 7, other, true, 7, NULL), RS_EINVAL);
    other = p;
    other.stride_bytes[0] = 20;
    ck_assert_int_eq(pair(p, false, 7, other, true, 7, NULL), RS_EINVAL);
    other = p;
    other.box.size[1] = 3;
    ck_assert_int_eq(pair(p, false, 7, other, true, 7, NULL), RS_EINVAL);
    ck_assert_int_eq(pair(p, false, 7, name, true, 7, NULL), RS_EINVAL);
}
END_TEST

START_TEST(columns_between_columns_are_no_overlap)
{
    struct binding_piece gate = piece(0, 4, 2, 0, 16, 4), up = piece(0, 4, 2, 8, 16, 4);
    ck_assert_int_eq(pair(gate, false, 7, up, true, 7, NULL), 0);
    up.offset = 6;
    ck_assert_int_eq(pair(gate, false, 7, up, true, 7, NULL), RS_EINVAL);
}
END_TEST

static uint32_t below(uint64_t *seed, uint32_t n)
{
    *seed = *seed * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(*seed >> 33) % n;
}

struct world {
    struct binding_piece pieces[USERS][PIECES];
    struct binding_user users[USERS];
    uint64_t memories[USERS][2];
};

static void world_make(struct world *w, const struct layout *l, uint64_t *seed)
{
    for (unsigned u = 0; u < USERS; u++) {
        for (unsigned i = 0; i < PIECES; i++) {
            uint32_t t = below(seed, 2), element = t == 0 ? 4 : 2, columns = 1 + below(seed, 3);
            int64_t stride = element * (1 + (int64_t)below(seed, 2));
            w->pieces[u][i] = piece(t, 1 + below(seed, 3), columns, below(seed, BYTES / 2),
                                    stride * columns + below(seed, 9), stride);
            w->pieces[u][i].segment = below(seed, 2);
        }
        w->memories[u][0] = below(seed, 3);
        w->memories[u][1] = below(seed, 3);
        w->users[u] = (struct binding_user){.binding = bind(w->pieces[u], PIECES),
                                            .layout = l,
                                            .memory_of_segment = w->memories[u],
                                            .written = below(seed, 2) == 0,
                                            .who = "x"};
    }
}

/* Each byte of each memory: who has it, and whether one of them writes. Pieces here have no two equal twins. */
static bool world_shares(const struct world *w)
{
    static uint8_t users_of[3][4 * BYTES];
    bool found = false;
    memset(users_of, 0, sizeof users_of);
    for (unsigned u = 0; u < USERS; u++)
        for (unsigned i = 0; i < PIECES; i++) {
            const struct binding_piece *p = &w->pieces[u][i];
            for (uint64_t r = 0; r < p->box.size[0]; r++)
                for (uint64_t c = 0; c < p->box.size[1]; c++)
                    for (unsigned k = 0; k < (p->tensor == 0 ? 4U : 2U); k++)
                        users_of[w->memories[u][p->segment]]
                                [p->offset + r * (uint64_t)p->stride_bytes[0] +
                                 c * (uint64_t)p->stride_bytes[1] + k] |= (uint8_t)(1U << u);
        }
    for (unsigned m = 0; m < 3; m++)
        for (unsigned b = 0; b < 4 * BYTES; b++)
            for (unsigned u = 0; u < USERS; u++)
                found = found || (w->users[u].written && (users_of[m][b] >> u & 1) != 0 &&
                                  users_of[m][b] != 1U << u);
    return found;
}

static bool has_twins(const struct world *w)
{
    for (unsigned u = 0; u < USERS * PIECES; u++)
        for (unsigned v = 0; v < u; v++)
            if (w->pieces[u / PIECES][u % PIECES].offset ==
                w->pieces[v / PIECES][v % PIECES].offset)
                return true;
    return false;
}

START_TEST(random_bindings_are_judged_as_by_marking_every_byte)
{
    struct layout *l = layout_make();
    uint64_t seed = 1;
    unsigned n[2] = {0, 0};
    for (unsigned i = 0; i < 20000; i++) {
        struct world w;
        world_make(&w, l, &seed);
        bool shares = world_shares(&w);
        if (!has_twins(&w)) {
            n[shares]++;
            ck_assert_int_eq(bindings_disjoint(w.users, USERS, NULL), shares ? RS_EINVAL : 0);
        }
        for (unsigned u = 0; u < USERS; u++)
            binding_free((struct binding *)(uintptr_t)w.users[u].binding);
    }
    ck_assert_uint_gt(n[0], 1000);
    ck_assert_uint_gt(n[1], 1000);
    layout_free(l);
}
END_TEST

START_TEST(every_failed_allocation_is_an_error_and_leaks_nothing)
{
    struct layout *l = layout_make();
    struct binding_piece p = piece(0, 4, 4, 0, 16, 4), q = piece(0, 4, 4, 64, 16, 4);
    uint64_t memory = 7;
    struct binding_user users[2] = {{bind(&p, 1), l, &memory, false, "a", NULL},
                                    {bind(&q, 1), l, &memory, true, "b", NULL}};
    for (unsigned i = 1;; i++) {
        mem_fail_at(i);
        int r = bindings_disjoint(users, 2, NULL);
        int failed = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, failed ? RS_ENOMEM : 0);
        if (!failed)
            break;
    }
    binding_free((struct binding *)(uintptr_t)users[0].binding);
    binding_free((struct binding *)(uintptr_t)users[1].binding);
    layout_free(l);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(what_is_written_may_not_be_anothers)                                                         \
    X(the_same_elements_at_the_same_place_may_be_read_and_written)                                 \
    X(columns_between_columns_are_no_overlap)                                                      \
    X(random_bindings_are_judged_as_by_marking_every_byte)                                         \
    X(every_failed_allocation_is_an_error_and_leaks_nothing)
#include "test/lib/main.h"
