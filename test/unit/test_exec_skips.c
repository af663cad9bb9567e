/* What a node needs not be sent, told to the nodes that would send it. */
#include <check.h>

#include "exec/skips.h"
#include "test/lib/rig.h"

enum { RANKS = 3 };

/* A plan over as many nodes as ranks, all of which need most of what the others have. */
static void plan_of(struct rig *r, uint64_t seed)
{
    struct err e = {0};
    const struct layout *destinations[1];
    const int32_t *devices[1];
    memset(r, 0, sizeof(*r));
    r->o.n_devices = RANKS;
    for (uint32_t i = 0; i < RANKS; i++)
        r->o.node_of[i] = r->o.domain[i] = i;
    r->o.plan = plan_options_default();
    r->o.plan.least_piece_bytes = 64;
    char *source = rig_random_json(seed, seed + 1, "s", RANKS, 30, false);
    char *dest = rig_random_json(seed, seed + 2, "d", RANKS, 30, false);
    rig_side(r, 0, source, 0, RANKS);
    rig_side(r, 1, dest, 0, RANKS);
    mem_free(source);
    mem_free(dest);
    rig_topology(r);
    destinations[0] = r->layouts[1];
    devices[0] = r->rank_device[1];
    struct plan_input input = {.source = r->layouts[0],
                               .source_device = r->rank_device[0],
                               .n_destinations = 1,
                               .destinations = destinations,
                               .destination_device = devices,
                               .topology = &r->topology,
                               .options = r->o.plan};
    ck_assert_msg(plan_make(&input, &r->plan, &e) == 0, "%s", e.text);
}

static void plan_close(struct rig *r)
{
    plan_free(r->plan);
    for (uint32_t l = 0; l < 2; l++) {
        layout_free(r->layouts[l]);
        free(r->rank_device[l]);
    }
}

static void program_of(const struct rig *r, uint32_t node, struct buf *b, struct program *p)
{
    buf_init(b);
    ck_assert_int_eq(plan_program(r->plan, node, b, NULL), 0);
    ck_assert_int_eq(program_open(b->data, b->n_bytes, p, NULL), 0);
}

/* Whether (cell id) is held at the one place of `p` that is a destination of it. */
static bool cell_held(const struct program *p, const uint8_t *held, uint64_t cell)
{
    bool all = true, any = false;
    for (uint32_t i = 0; i < p->n_holds; i++)
        if (program_hold_cell(p, i).id == cell &&
            p->places[program_hold(p, i).place].side == PROGRAM_DESTINATION) {
            any = true;
            all = all && held[i] != 0;
        }
    return any && all;
}

START_TEST(a_sender_reads_of_each_item_what_its_receiver_said)
{
    uint64_t n_skipped = 0, n_sent = 0;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct rig r;
        struct buf encoded[RANKS], blob;
        struct program p[RANKS];
        uint8_t *held[RANKS];
        struct skips s;
        uint64_t state = seed;
        plan_of(&r, seed);
        buf_init(&blob);
        for (uint32_t n = 0; n < RANKS; n++) {
            program_of(&r, n, &encoded[n], &p[n]);
            held[n] = malloc(p[n].n_holds + 1);
            for (uint32_t i = 0; i < p[n].n_holds; i++)
                held[n][i] = random_next(&state) % 2 == 0;
            ck_assert_int_eq(skips_encode(&p[n], held[n], &blob), 0);
        }
        ck_assert_int_eq(skips_open(blob.data, blob.n_bytes, &s, NULL), 0);
        for (uint32_t n = 0; n < RANKS; n++)
            for (uint32_t i = 0; i < p[n].n_streams; i++) {
                const struct program_stream *x = &p[n].streams[i];
                if (x->send == 0)
                    continue;
                const struct skips_record *record = skips_find(&s, x->order);
                if (record != NULL)
                    ck_assert_uint_eq(record->n_items, x->n_items);
                for (uint32_t k = 0; k < x->n_items; k++) {
                    uint64_t cell = program_item_cell(&p[n], x->first_item + k).id;
                    bool said = record != NULL && skips_has(record, k);
                    ck_assert_int_eq(said, cell_held(&p[x->peer], held[x->peer], cell));
                    n_skipped += said;
                    n_sent += !said;
                }
            }
        skips_close(&s);
        buf_close(&blob);
        for (uint32_t n = 0; n < RANKS; n++) {
            free(held[n]);
            buf_close(&encoded[n]);
        }
        plan_close(&r);
    }
    ck_assert_uint_gt(n_skipped, 100);
    ck_assert_uint_gt(n_sent, 100);
}
END_TEST

START_TEST(where_nothing_is_held_there_is_nothing_to_say)
{
    struct rig r;
    struct buf encoded, blob;
    struct program p;
    plan_of(&r, 3);
    buf_init(&blob);
    program_of(&r, 0, &encoded, &p);
    uint8_t *held = calloc(1, p.n_holds + 1);
    ck_assert_int_eq(skips_encode(&p, held, &blob), 0);
    ck_assert_uint_eq(blob.n_bytes, 0);
    free(held);
    buf_close(&blob);
    buf_close(&encoded);
    plan_close(&r);
}
END_TEST

START_TEST(blobs_that_are_none_are_refused_and_others_are_read_within_their_bounds)
{
    uint64_t seed = 5;
    struct skips s;
    uint32_t twice[] = {4, 1, 1, 0, 9, 70, 0, 0, 0, 0, 4, 2, 3, 0};
    struct err e = {0};
    ck_assert_int_eq(skips_open(twice, sizeof(twice), &s, &e), RS_EPROTO);
    ck_assert_ptr_nonnull(strstr(e.text, "stream 4 is named twice"));
    ck_assert_int_eq(skips_open(twice, sizeof(twice) - 16, &s, NULL), 0);
    ck_assert_ptr_null(skips_find(&s, 5));
    ck_assert(skips_has(skips_find(&s, 4), 0));
    ck_assert(!skips_has(skips_find(&s, 9), 69));
    ck_assert(!skips_has(skips_find(&s, 9), 70));
    skips_close(&s);
    twice[1] = UINT32_MAX; /* more items than there are bytes */
    ck_assert_int_eq(skips_open(twice, sizeof(twice), &s, NULL), RS_EPROTO);
    for (int i = 0; i < 20000; i++) {
        uint32_t words[12];
        size_t n = random_next(&seed) % (sizeof(words) + 1);
        for (int k = 0; k < 12; k++)
            words[k] = (uint32_t)(random_next(&seed) % (random_next(&seed) % 2 == 0 ? 130 : 3));
        uint8_t *exact = malloc(n + 1); /* a sanitizer sees who reads beyond */
        memcpy(exact, words, n);
        if (skips_open(exact, n, &s, NULL) == 0) {
            for (size_t k = 0; k < s.n; k++)
                (void)skips_has(&s.records[k], s.records[k].n_items - 1);
            skips_close(&s);
        }
        free(exact);
    }
}
END_TEST

START_TEST(without_memory_it_says_so)
{
    uint32_t one[] = {4, 1, 1, 0};
    struct skips s;
    mem_fail_at(1);
    ck_assert_int_eq(skips_open(one, sizeof(one), &s, NULL), RS_ENOMEM);
    mem_fail_at(0);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_sender_reads_of_each_item_what_its_receiver_said)                                          \
    X(where_nothing_is_held_there_is_nothing_to_say)                                               \
    X(blobs_that_are_none_are_refused_and_others_are_read_within_their_bounds)                     \
    X(without_memory_it_says_so)

#include "test/lib/main.h"
