/* What is broken is found: plan_check on damaged plans, program_open on damaged bytes; and no memory at any point
 * is an answer, not a crash. */
#include <stdlib.h>

#include "plan/plan_private.h"
#include "plan/plan_simulate.h"
#include "plan/program_format.h"
#include "test/lib/plan_random.h"

#include <check.h>

/* --- plan_check ------------------------------------------------------------------------------------------ */

/* Two row shards to four domains of two column shards each, small messages: pieces, relays, fan-out. */
static void spread(struct zoo_case *c)
{
    uint32_t two = 2, dims[] = {4, 2}, first = 2;
    uint64_t shape[] = {64, 64};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", 2);
    c->destinations[0] = case_layout("rollout", 8);
    int32_t sm = case_mesh(c->source, 1, &two, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 2, dims, NULL, 0, 1);
    for (int i = 0; i < 4; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%d", i);
        case_tensor(c->source, name, DTYPE_FLOAT32, 2, shape, sm, "0");
        case_tensor(c->destinations[0], name, DTYPE_FLOAT32, 2, shape, dm, i < 2 ? "R1" : "RR");
    }
    case_topology(c, 5, 2, 1);
    case_finish(c, 0, &first);
    c->input.options.chunk_bytes = 256;
    c->input.options.least_piece_bytes = 1024;
}

static uint32_t relay_edge(const struct plan *p)
{
    for (uint32_t i = 0; i < p->edges.n; i++)
        if (p->edges.at[i].parent != NONE32)
            return i;
    ck_abort_msg("no relay");
}

/* Each kind of damage is done to a fresh plan and must be found. */
static void damage(struct plan *p, int kind)
{
    uint32_t relay = relay_edge(p);
    struct plan_edge *edge = &p->edges.at[relay];
    switch (kind) {
    case 0: /* an end is another rank: one gets too much, one nothing */
        p->ends.at[p->sets.at[p->groups.at[0].takers].first].rank ^= 1;
        break;
    case 1: /* a source that does not hold it */
        p->ends.at[p->sets.at[p->groups.at[0].source].first].rank ^= 1;
        break;
    case 2: /* a run that is done twice */
        p->groups.at[0].n_runs++;
        break;
    case 3: /* a relay that starts with what it relays */
        p->legs.at[edge->leg].start = 0;
        p->legs.at[p->edges.at[edge->parent].leg].start = 0;
        break;
    case 4: /* cuts that overlap */
        p->cuts.at[p->shapes.at[0].cuts + 1] += 1;
        break;
    case 5: /* a run that is lost */
        p->runs.at[0].count = 0;
        break;
    case 6: /* a wrong total */
        p->totals.domain_bytes++;
        break;
    case 7: /* network bytes beyond the minimum */
        p->totals.network_bytes_minimum--;
        break;
    case 8: /* a device's load */
        p->egress[0]--;
        break;
    case 9: /* takers of another cell */
        p->groups.at[0].takers = p->groups.at[1].takers;
        break;
    case 10: /* another wire dtype */
        p->shapes.at[0].wire = DTYPE_INT32;
        break;
    case 11: /* an edge with the wrong tier */
        edge->tier = TIER_DOMAIN;
        break;
    case 12: /* a relay that is said to be a source */
        p->shapes.at[0].size[0]++;
        p->boxes.n = 0;
        p->groups.at[1].source = p->groups.at[0].source;
        p->groups.at[p->groups.n - 1].source = p->groups.at[0].source;
        break;
    case 13: /* bytes of a stream that no message carries */
        p->streams.at[0].bytes++;
        break;
    case 14: /* two units with one tensor */
        p->units.at[1].tensor = p->units.at[0].tensor;
        break;
    default: /* transfer numbers with a hole */
        p->units.at[1].first_transfer++;
        p->totals.transfers++;
    }
}
enum { DAMAGES = 16 };

START_TEST(plan_check_finds_each_kind_of_damage)
{
    for (int kind = 0; kind < DAMAGES; kind++) {
        struct zoo_case c;
        struct plan *p = NULL;
        struct err e = {0};
        spread(&c);
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
        ck_assert_msg(plan_check(p, &c.input, true, &e) == 0, "%s", e.text);
        damage(p, kind);
        ck_assert_msg(plan_check(p, &c.input, true, &e) != 0, "damage %d is not seen", kind);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

START_TEST(what_plan_check_says_names_tensor_box_and_rank)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct err e = {0};
    spread(&c);
    ck_assert_int_eq(plan_make(&c.input, &p, &e), 0);
    damage(p, 1);
    ck_assert_int_eq(plan_check(p, &c.input, true, &e), RS_EINTERNAL);
    ck_assert_ptr_nonnull(strstr(e.text, "'w0'"));
    ck_assert_ptr_nonnull(strstr(e.text, "["));
    ck_assert_ptr_nonnull(strstr(e.text, "rank"));
    plan_free(p);
    case_close(&c);
}
END_TEST

/* --- program_open ----------------------------------------------------------------------------------------- */

static void encoded(struct buf *b, enum plan_strategy strategy)
{
    struct zoo_case c;
    struct plan *p = NULL;
    struct err e = {0};
    spread(&c);
    c.input.options.strategy = strategy;
    if (strategy == PLAN_DIRECT)
        c.input.options.least_piece_bytes = 1 << 20; /* whole cells: they follow along tensors */
    ck_assert_int_eq(plan_make(&c.input, &p, &e), 0);
    buf_init(b);
    ck_assert_int_eq(plan_program(p, 1, b, &e), 0);
    plan_free(p);
    case_close(&c);
}

START_TEST(every_shorter_or_longer_program_is_refused)
{
    struct buf b;
    struct program g;
    struct err e = {0};
    encoded(&b, PLAN_RESHARD);
    ck_assert_int_eq(program_open(b.data, b.n_bytes, &g, &e), 0);
    for (size_t n = 0; n < b.n_bytes; n++) {
        uint8_t *exact = mem_alloc(n + 1); /* exact, so that a sanitizer sees a read beyond */
        memcpy(exact, b.data, n);
        ck_assert_int_eq(program_open(exact, n, &g, &e), RS_EPROTO);
        mem_free(exact);
    }
    buf_put_u64(&b, 0);
    ck_assert_int_eq(program_open(b.data, b.n_bytes, &g, &e), RS_EPROTO);
    buf_close(&b);
}
END_TEST

#define BREAK(expression)              BREAK_IN(PLAN_GATHER_BROADCAST, expression)
#define BREAK_IN(strategy, expression) BREAK_SAYS(strategy, "program", expression)
#define BREAK_SAYS(strategy, text_, expression)                                                    \
    do {                                                                                           \
        struct buf b;                                                                              \
        struct program g;                                                                          \
        struct err e = {0};                                                                        \
        encoded(&b, strategy);                                                                     \
        ck_assert_int_eq(program_open(b.data, b.n_bytes, &g, &e), 0);                              \
        struct program_header *header = (struct program_header *)(void *)b.data;                   \
        (void)header;                                                                              \
        expression;                                                                                \
        ck_assert_msg(program_open(b.data, b.n_bytes, &g, &e) == RS_EPROTO, "%s", #expression);    \
        ck_assert_msg(strstr(e.text, text_) != NULL, "%s: %s", #expression, e.text);               \
        buf_close(&b);                                                                             \
    } while (0)
#define OF(type, array) ((type *)(uintptr_t)g.array)

START_TEST(a_program_with_any_wrong_field_is_refused)
{
    BREAK(header->magic++);
    BREAK(header->chunk_bytes = 0);
    BREAK(header->chunk_bytes = 100); /* messages are longer */
    BREAK(header->ring_slots = 0);
    BREAK(header->scratch_bytes = 0);
    BREAK(header->n_plan_devices = 1);
    BREAK(header->n_cells++); /* a cell in no box */
    BREAK(header->n_cells--); /* a run beyond the last cell, or items of a cell that is not there */
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "more than", header->n_cells = PROGRAM_MOST + 1);
    BREAK(header->n_items++);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "more than", header->n_items = PROGRAM_MOST + 1);
    BREAK(header->n_holds++);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "more than", header->n_holds = PROGRAM_MOST + 1);
    BREAK(header->n_messages = UINT32_MAX);
    BREAK(OF(struct program_tensor, tensors)[0].n_dims = 9);
    BREAK(OF(struct program_tensor, tensors)[0].shape[0] = 0);
    BREAK(OF(struct program_tensor, tensors)[0].shape[0] = UINT64_C(1) << 60);
    BREAK(OF(struct program_tensor, tensors)[0].shape[0] = 1);
    BREAK(OF(struct program_tensor, tensors)[0].source_dtype = 99);
    BREAK(OF(struct program_tensor, tensors)[0].scratch_offset = UINT64_MAX - 8);
    BREAK(OF(struct program_tensor, tensors)[0].scratch_offset = UINT64_MAX);
    BREAK(OF(struct box, boxes)[0].n_dims = 1);
    BREAK(OF(struct box, boxes)[0].size[0] = 0);
    BREAK(OF(struct box, boxes)[0].offset[0] = UINT64_MAX);
    BREAK(OF(struct box, boxes)[0].size[1]++);
    BREAK(OF(struct program_place, places)[0].device = g.n_devices);
    BREAK(OF(struct program_place, places)[0].side = 3);
    BREAK(OF(uint32_t, lists)[0] = 0);
    BREAK(OF(uint32_t, lists)[0] = g.n_lists);
    BREAK(OF(uint32_t, lists)[1] = g.n_places);
    BREAK(OF(struct program_stream, streams)[0].bytes++);
    BREAK(OF(struct program_stream, streams)[0].device = g.n_devices);
    BREAK(OF(struct program_stream, streams)[0].peer = g.n_plan_devices);
    BREAK(OF(struct program_stream, streams)[0].send = 2);
    BREAK(OF(struct program_stream, streams)[0].tier = 0);
    BREAK(OF(struct program_stream, streams)[0].first_item++);
    BREAK(OF(struct program_stream, streams)[0].n_items = 0);
    BREAK(OF(struct program_stream, streams)[0].order = UINT32_MAX);
    BREAK(OF(struct program_message, messages)[0].begin = 4);
    BREAK(OF(struct program_message, messages)[0].end += 4);
    BREAK(OF(struct program_message, messages)[0].end -= 2); /* inside an element */
    BREAK(OF(struct program_message, messages)[0].stream = g.n_streams);
    BREAK(OF(struct program_message, messages)[0].round = UINT32_MAX);
    BREAK(OF(struct program_device, devices)[0].device = UINT32_MAX);
    BREAK(OF(struct program_device, devices)[0].first_message++);
    BREAK(OF(struct program_device, devices)[0].n_messages--);
    BREAK(OF(struct program_device, devices)[0].n_copies++);
}
END_TEST

#define RUN(kind) OF(struct program_##kind##_run, kind##_runs)

START_TEST(a_program_with_any_wrong_run_is_refused)
{
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "cell run or mark", RUN(cell)[0].first = 1);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "cell run or mark", RUN(cell)[1].first = 0);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "cell run or mark", RUN(cell)[1].first = UINT32_MAX);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "cell run or mark",
               RUN(cell)[g.n_cell_runs - 1].first = g.n_cells);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "tensor, box or number", RUN(cell)[0].tensor = UINT32_MAX);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "tensor, box or number", RUN(cell)[0].box = g.n_boxes);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "tensor, box or number",
               RUN(cell)[0].number = UINT32_MAX); /* of more than one cell */
    BREAK(RUN(cell)[0].wire = 0);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "tensor, box or number", RUN(cell)[0].along_tensors = 2);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "tensor, box or number",
               RUN(cell)[g.n_cell_runs - 1].along_tensors = 1); /* tensors that there are not */
    BREAK_SAYS(PLAN_DIRECT, "tensor, box or number",
               RUN(cell)[g.n_cell_runs - 1].along_tensors = 0); /* boxes, likewise */
    BREAK_SAYS(PLAN_DIRECT, "tensor, box or number", RUN(cell)[0].tensor = g.n_tensors - 1);
    BREAK_IN(PLAN_DIRECT,
             OF(struct program_tensor, tensors)[1].shape[0] = 1); /* the second of a run */
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "cell run or mark", OF(uint32_t, cell_marks)[0] = 1);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "cell run or mark", OF(uint32_t, cell_marks)[1]++);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "item run or mark", RUN(item)[0].first = 1);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "item run or mark", RUN(item)[1].first = 0);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "cell of item", RUN(item)[0].cell = g.n_cells);
    BREAK(RUN(item)[0].cell = g.n_cells - 1); /* another one's bytes */
    BREAK_SAYS(PLAN_DIRECT, "cell of item",
               RUN(item)[0].cell = g.n_cells - 1); /* the second one's is not there */
    BREAK(RUN(item)[0].places = g.n_lists);
    BREAK(RUN(item)[0].from = 0);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "item run or mark", OF(uint32_t, item_marks)[0] = UINT32_MAX);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "item run or mark", OF(uint32_t, item_marks)[1]--);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "hold run or mark", RUN(hold)[0].first = 1);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "hold run or mark", RUN(hold)[1].first = 0);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "place or cell of hold", RUN(hold)[0].place = g.n_places);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "place or cell of hold", RUN(hold)[0].cell = g.n_cells);
    BREAK(RUN(hold)[0].cell = g.n_cells - 1);
    BREAK((RUN(hold)[1].place = g.hold_runs[0].place, RUN(hold)[1].cell = g.hold_runs[0].cell));
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "hold run or mark", OF(uint32_t, hold_marks)[0] = 1);
    BREAK_SAYS(PLAN_GATHER_BROADCAST, "hold run or mark", (header->n_hold_marks--, b.n_bytes -= 4));
}
END_TEST

/* --- memory ------------------------------------------------------------------------------------------------- */

/* Everything that plan_make, plan_program, plan_check and program_open allocate, failing in turn. */
static int use_all(const struct zoo_case *c)
{
    struct plan *p = NULL;
    struct err e = {0};
    int r = plan_make(&c->input, &p, &e);
    if (r != 0) {
        ck_assert_ptr_null(p);
        return r;
    }
    r = plan_check(p, &c->input, true, &e);
    plan_free(p);
    return r;
}

/* 64 sources with a row of each tensor, to 40 engines of TP8: more parts and domains than the bound (which is lowered: the
 * real one takes minutes with a sanitizer), so the parts of several sources go on from the first domain together. */
START_TEST(parts_of_many_sources_are_relayed_together_where_there_are_too_many)
{
    uint32_t sources = 64, dims[] = {40, 8}, first = 64;
    uint64_t shape[] = {64, 16};
    struct zoo_case c;
    struct plan *p = NULL;
    struct err e = {0};
    memset(&c, 0, sizeof c);
    c.source = case_layout("train", sources);
    c.destinations[0] = case_layout("rollout", 40 * 8);
    int32_t sm = case_mesh(c.source, 1, &sources, NULL, 0, 1);
    int32_t dm = case_mesh(c.destinations[0], 2, dims, NULL, 0, 1);
    case_tensor(c.source, "w", DTYPE_BFLOAT16, 2, shape, sm, "0");
    case_tensor(c.destinations[0], "w", DTYPE_BFLOAT16, 2, shape, dm, "R1");
    case_topology(&c, 8 + 40, 8, 1);
    case_finish(&c, 0, &first);
    c.input.options.chunk_bytes = 512;
    plan_bundle_from = 64 * 8 * 40 - 1;
    ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "%s", e.text);
    ck_assert_uint_lt(p->bundles.n, p->batches.n);
    ck_assert_uint_lt(p->edges.n, 64 * 8 * 40 / 8);
    ck_assert_msg(plan_check(p, &c.input, true, &e) == 0, "%s", e.text);
    struct plan_model m = plan_model_of(&c.topology);
    struct plan_simulation s = {0};
    ck_assert_msg(plan_simulate(p, &m, &s, &e) == 0, "%s",
                  e.text); /* every byte, by tier and device */
    ck_assert_uint_eq(s.tiers[TIER_NETWORK].bytes, 40 * 64 * 16 * 2);
    plan_simulation_close(&s);
    plan_free(p);
    case_close(&c);
}
END_TEST

START_TEST(no_memory_at_any_point_is_an_answer)
{
    static const uint64_t seeds[] = {3, 8};
    for (size_t i = 0; i <= sizeof seeds / sizeof seeds[0]; i++)
        for (int strategy = 0; strategy < 3; strategy++) {
            struct zoo_case c;
            long n = 1;
            if (i == 0)
                spread(&c);
            else
                random_case(seeds[i - 1], &c);
            c.input.options.strategy = (enum plan_strategy)strategy;
            for (;; n++) {
                mem_fail_at(n);
                int r = use_all(&c);
                int struck = mem_failed();
                mem_fail_at(0);
                if (!struck) {
                    ck_assert_int_eq(r, 0);
                    break;
                }
                ck_assert_msg(r == RS_ENOMEM, "seed %zu, allocation %ld: %d", i, n, r);
            }
            ck_assert_int_gt(n, 50);
            case_close(&c);
        }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(plan_check_finds_each_kind_of_damage)                                                        \
    X(what_plan_check_says_names_tensor_box_and_rank)                                              \
    X(every_shorter_or_longer_program_is_refused)                                                  \
    X(a_program_with_any_wrong_field_is_refused)                                                   \
    X(a_program_with_any_wrong_run_is_refused)                                                     \
    X(parts_of_many_sources_are_relayed_together_where_there_are_too_many)                         \
    X(no_memory_at_any_point_is_an_answer)
#include "test/lib/main.h"
