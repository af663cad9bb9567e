/* An attempt over two nodes, as each of them sees it from the same input: plans, cells that cross, words for what differs. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "exec/wire.h"
#include "service/attempt_input.h"
#include "service/cells.h"
#include "service/cells_blame.h"
#include "service/cells_collect.h"
#include "service/state.h"

/* w: 8 rows; two source ranks (node 3) hold four each; destination rank 0 (node 3) takes the first half, ranks 1 and 2
 * (node 7) the second and the first: all of w crosses, once. */
static const char source_text[] =
    "{\"name\":\"train\",\"ranks\":2,\"meshes\":[{\"name\":\"m\",\"shape\":[2],\"ranks\":[0,1]}],"
    "\"tensors\":[{\"name\":\"w\",\"shape\":[8],\"dtype\":\"int32\",\"mesh\":\"m\",\"placements\":["
    "\"Shard(0)\"]}]}";
static const char destination_text[] =
    "{\"name\":\"rollout\",\"ranks\":3,\"instances\":[[0],[1],[2]],\"tensors\":[{\"name\":\"w\","
    "\"shape\":[8],"
    "\"dtype\":\"int32\",\"regions\":["
    "{\"rank\":0,\"offset\":[0],\"size\":[4]},{\"rank\":1,\"offset\":[4],\"size\":[4]},"
    "{\"rank\":2,\"offset\":[0],\"size\":[4]}]}]}";

enum { NEAR = 3, FAR = 7, N_PARTICIPANTS = 5 };

static struct layout *layout_of(const char *text)
{
    struct layout *l = NULL;
    struct err e = {0};
    ck_assert_msg(layout_from_json(text, strlen(text), &l, &e) == 0, "%s", e.text);
    ck_assert_msg(layout_check(l, &e) == 0, "%s", e.text);
    ck_assert_int_eq(layout_digest(l), 0);
    return l;
}

static char near_name[] = "near", far_name[] = "far";
static char *names[] = {near_name, far_name};
static struct device_place devices[] = {{0, 0, 0}, {0, 1, 0}, {1, 0, 1}, {1, 1, 1}};
static struct topology topology = {.nodes = names,
                                   .n_nodes = 2,
                                   .domains = names,
                                   .n_domains = 2,
                                   .devices = devices,
                                   .n_devices = 4};
static const uint32_t numbers[] = {NEAR, FAR};

struct fixture {
    struct layouts layouts;
    struct layout_entry *source, *destination;
    uint8_t digests[1][16];
    struct participant participants[N_PARTICIPANTS];
    struct attempt_input input;
};

static void fixture_make(struct fixture *f)
{
    struct err e = {0};
    layouts_init(&f->layouts, 8);
    ck_assert_int_eq(layouts_add(&f->layouts, layout_of(source_text), &f->source, &e), 0);
    ck_assert_int_eq(layouts_add(&f->layouts, layout_of(destination_text), &f->destination, &e), 0);
    memcpy(f->digests[0], f->destination->layout->digest, 16);
    const struct participant all[] = {{11, NEAR, 0, 0, 0, false, false},
                                      {12, NEAR, 1, 0, 1, false, false},
                                      {21, NEAR, 0, 1, 0, false, false},
                                      {22, FAR, 0, 1, 1, false, false},
                                      {23, FAR, 1, 1, 2, false, false}};
    memcpy(f->participants, all, sizeof all);
    f->input = (struct attempt_input){.topology = &topology,
                                      .nodes = numbers,
                                      .destinations = (const uint8_t(*)[16])f->digests,
                                      .n_destinations = 1,
                                      .participants = f->participants,
                                      .n_participants = N_PARTICIPANTS,
                                      .options = plan_options_default(),
                                      .verify = WIRE_VERIFY_FULL};
    memcpy(f->input.source, f->source->layout->digest, 16);
}

/* As planning.c does on that node. */
static struct plan_entry *entry_make(struct fixture *f, uint32_t index)
{
    struct err e = {0};
    struct plan_entry *entry = NULL;
    static int32_t source[2], destination[3];
    for (uint32_t i = 0; i < N_PARTICIPANTS; i++) {
        const struct participant *p = &f->participants[i];
        (p->layout == 0 ? source : destination)[p->rank] =
            (int32_t)attempt_input_device(&f->input, p);
    }
    struct plan_order o = {.n_destinations = 1,
                           .topology = topology_copy(&topology),
                           .options = plan_options_default(),
                           .node = index};
    o.source = layout_entry_ref(f->source);
    o.destinations = mem_calloc(1, sizeof(struct layout_entry *));
    o.destination_device = mem_calloc(1, sizeof(int32_t *));
    o.source_device = mem_calloc(2, sizeof(int32_t));
    o.destinations[0] = layout_entry_ref(f->destination);
    o.destination_device[0] = mem_calloc(3, sizeof(int32_t));
    memcpy(o.source_device, source, sizeof source);
    memcpy(o.destination_device[0], destination, sizeof destination);
    ck_assert_int_eq(plan_order_key(&o), 0);
    ck_assert_msg(plan_entry_make(&o, &entry, &e) == 0, "%s", e.text);
    plan_order_close(&o);
    return entry;
}

START_TEST(copies_digest_alike_and_each_changed_part_is_named)
{
    struct fixture f;
    fixture_make(&f);
    uint64_t mine[ATTEMPT_PARTS], theirs[ATTEMPT_PARTS];
    struct attempt_input *copy = attempt_input_copy(&f.input);
    attempt_input_digest(&f.input, mine);
    attempt_input_digest(copy, theirs);
    ck_assert_ptr_nonnull(strstr(attempt_input_difference(mine, theirs), "planner"));
    copy->topology->network_bytes_per_s = 1e9;
    attempt_input_digest(copy, theirs);
    ck_assert_ptr_nonnull(strstr(attempt_input_difference(mine, theirs), "topology"));
    copy->options.chunk_bytes++;
    copy->topology->network_bytes_per_s = 0;
    attempt_input_digest(copy, theirs);
    ck_assert_ptr_nonnull(strstr(attempt_input_difference(mine, theirs), "options"));
    copy->source[3] ^= 1;
    attempt_input_digest(copy, theirs);
    ck_assert_ptr_nonnull(strstr(attempt_input_difference(mine, theirs), "source layout"));
    attempt_input_free(copy);
    layouts_close(&f.layouts);
}
END_TEST

START_TEST(an_input_that_would_be_used_as_an_index_wrongly_is_refused)
{
    struct fixture f;
    struct err e = {0};
    fixture_make(&f);
    ck_assert_int_eq(attempt_input_check(&f.input, &e), 0);
    f.participants[3].device = 2; /* node 7 has 0 and 1 */
    ck_assert_int_eq(attempt_input_check(&f.input, &e), RS_EPROTO);
    f.participants[3].device = 0;
    f.participants[3].node = 5;
    ck_assert_int_eq(attempt_input_check(&f.input, &e), RS_EPROTO);
    f.participants[3].node = FAR;
    f.participants[4].rank = 1; /* twice */
    ck_assert_int_eq(attempt_input_check(&f.input, &e), RS_EPROTO);
    f.participants[4].rank = 2;
    f.participants[4].layout = 2;
    ck_assert_int_eq(attempt_input_check(&f.input, &e), RS_EPROTO);
    layouts_close(&f.layouts);
}
END_TEST

START_TEST(participants_are_found_by_layout_and_rank_and_their_devices_counted_over_nodes)
{
    struct fixture f;
    fixture_make(&f);
    ck_assert_uint_eq(attempt_input_find(&f.input, 1, 1)->worker, 22);
    ck_assert_uint_eq(attempt_input_find(&f.input, 0, 1)->worker, 12);
    ck_assert_ptr_null(attempt_input_find(&f.input, 0, 2));
    ck_assert_uint_eq(attempt_input_device(&f.input, &f.participants[4]), 3);
    ck_assert_uint_eq(attempt_input_node(&f.input, FAR), 1);
    ck_assert_uint_eq(attempt_input_node(&f.input, 0), UINT32_MAX);
    layouts_close(&f.layouts);
}
END_TEST

START_TEST(copying_survives_every_failed_allocation)
{
    struct fixture f;
    struct attempt_input *copy = NULL;
    struct plan_rule rules[] = {{.glob = "w*", .strategy = PLAN_DIRECT}};
    fixture_make(&f);
    f.input.options.rules = rules;
    f.input.options.n_rules = 1;
    long i = 1;
    for (; copy == NULL; i++) {
        mem_fail_at(i);
        copy = attempt_input_copy(&f.input);
        mem_fail_at(0);
    }
    ck_assert_int_gt(i, 8);
    ck_assert_str_eq(copy->options.rules[0].glob, "w*");
    attempt_input_free(copy);
    layouts_close(&f.layouts);
}
END_TEST

/* What a data plane would have read of correct memory: any number, the same for all holders of a cell. */
static uint64_t *holds_of(const struct plan_entry *entry)
{
    uint64_t *holds = mem_calloc(entry->program.n_holds, sizeof *holds);
    for (uint32_t i = 0; i < entry->program.n_holds; i++)
        holds[i] = 1000 + program_hold_cell(&entry->program, i).id;
    return holds;
}

static struct cell_print *prints_of(const struct plan_entry *entry, uint32_t *ret_n)
{
    struct cell_print *prints;
    uint64_t *holds = holds_of(entry);
    ck_assert_int_eq(cells_collect(entry, holds, COMPARE_FULL, CELLS_ALL, &prints, ret_n), 0);
    mem_free(holds);
    return prints;
}

START_TEST(both_ends_report_the_same_cells_and_the_sender_as_a_source)
{
    struct fixture f;
    struct cells_difference x;
    uint32_t n_near, n_far;
    fixture_make(&f);
    struct plan_entry *near_entry = entry_make(&f, 0), *far_entry = entry_make(&f, 1);
    ck_assert_mem_eq(plan_totals(near_entry->plan)->digest, plan_totals(far_entry->plan)->digest,
                     16);
    struct cell_print *sent = prints_of(near_entry, &n_near), *taken = prints_of(far_entry, &n_far);
    struct cells *c = cells_new();
    ck_assert_uint_gt(n_near, 0);
    ck_assert_uint_eq(n_near, n_far); /* all of w crosses once, and nothing else is reported */
    for (uint32_t i = 0; i < n_near; i++) {
        ck_assert_uint_eq(sent[i].layout, 0);
        ck_assert_uint_eq(taken[i].layout, 1);
    }
    ck_assert_int_eq(cells_merge(c, taken, n_far, &x), 0);
    ck_assert_int_eq(cells_merge(c, sent, n_near, &x), 0);
    ck_assert_int_eq(cells_settle(c, &x), 0);
    cells_free(c);
    mem_free(sent);
    mem_free(taken);
    plan_entry_unref(near_entry);
    plan_entry_unref(far_entry);
    layouts_close(&f.layouts);
}
END_TEST

START_TEST(what_sources_sent_and_the_rest_are_all_and_no_cell_is_told_twice)
{
    struct fixture f;
    fixture_make(&f);
    for (uint32_t node = 0; node < 2; node++) {
        struct plan_entry *entry = entry_make(&f, node);
        uint64_t *holds = holds_of(entry);
        struct cell_print *prints[3];
        uint32_t n[3];
        for (int part = CELLS_ALL; part <= CELLS_OF_THE_REST; part++)
            ck_assert_int_eq(
                cells_collect(entry, holds, COMPARE_FULL, part, &prints[part], &n[part]), 0);
        ck_assert_uint_gt(n[CELLS_ALL], 0);
        ck_assert_uint_eq(n[CELLS_ALL], n[CELLS_OF_SOURCES] + n[CELLS_OF_THE_REST]);
        ck_assert_uint_eq(n[node == 0 ? CELLS_OF_THE_REST : CELLS_OF_SOURCES], 0);
        for (uint32_t i = 0; i < n[CELLS_OF_SOURCES]; i++) {
            ck_assert_uint_eq(prints[CELLS_OF_SOURCES][i].layout, 0);
            ck_assert_mem_eq(&prints[CELLS_OF_SOURCES][i], &prints[CELLS_ALL][i],
                             sizeof(struct cell_print));
        }
        for (int part = CELLS_ALL; part <= CELLS_OF_THE_REST; part++)
            mem_free(prints[part]);
        mem_free(holds);
        plan_entry_unref(entry);
    }
    layouts_close(&f.layouts);
}
END_TEST

START_TEST(collecting_survives_every_failed_allocation)
{
    struct fixture f;
    fixture_make(&f);
    struct plan_entry *entry = entry_make(&f, 0);
    uint64_t *holds = holds_of(entry);
    int failed = 0, r = RS_ENOMEM;
    for (long i = 1; r != 0; i++) {
        struct cell_print *prints;
        uint32_t n;
        mem_fail_at(i);
        r = cells_collect(entry, holds, COMPARE_FULL, CELLS_OF_SOURCES, &prints, &n);
        mem_fail_at(0);
        ck_assert(r == 0 || (r == RS_ENOMEM && prints == NULL && n == 0));
        failed += r != 0;
        mem_free(prints);
    }
    ck_assert_int_ge(failed, 2);
    mem_free(holds);
    plan_entry_unref(entry);
    layouts_close(&f.layouts);
}
END_TEST

START_TEST(a_difference_is_told_by_tensor_box_layout_and_rank)
{
    struct fixture f;
    struct cells_difference x;
    struct err e = {0};
    uint32_t n_near, n_far;
    fixture_make(&f);
    struct plan_entry *near_entry = entry_make(&f, 0), *far_entry = entry_make(&f, 1);
    struct cell_print *sent = prints_of(near_entry, &n_near), *taken = prints_of(far_entry, &n_far);
    struct cells *c = cells_new();
    taken[n_far - 1].fingerprint ^= 1;
    ck_assert_int_eq(cells_merge(c, sent, n_near, &x), 0);
    ck_assert_int_eq(cells_merge(c, taken, n_far, &x), RS_EDATALOSS);
    ck_assert_int_eq(cells_blame(far_entry, &x, &e), RS_EDATALOSS);
    ck_assert_msg(strstr(e.text, "tensor 'w' [") != NULL &&
                      strstr(e.text, "layout 'rollout' rank ") != NULL &&
                      strstr(e.text, "layout 'train' rank ") != NULL &&
                      strstr(e.text, " sent ") != NULL,
                  "%s", e.text);
    cells_free(c);
    mem_free(sent);
    mem_free(taken);
    plan_entry_unref(near_entry);
    plan_entry_unref(far_entry);
    layouts_close(&f.layouts);
}
END_TEST

struct cell_boxes {
    struct box box[64];
    uint64_t n;
};

static int cell_note(const struct plan_transfer *t, void *arg)
{
    struct cell_boxes *c = arg;
    ck_assert_uint_lt(t->cell, 64);
    c->box[t->cell] = t->box;
    c->n = t->cell + 1 > c->n ? t->cell + 1 : c->n;
    return 0;
}

/* By the layout alone: rank 1 has [4:8], ranks 0 and 2 have [0:4]. */
static bool has_cell(const struct fixture *f, const struct box *box, uint32_t rank, uint32_t node)
{
    return f->participants[2 + rank].node == node && (rank == 1) == (box->offset[0] >= 4);
}

START_TEST(all_ranks_of_a_node_that_take_a_wrong_cell_hold_it_and_no_others)
{
    struct fixture f;
    struct cell_boxes cells = {.n = 0};
    fixture_make(&f);
    f.participants[2].node = FAR; /* beside rank 2, which has the same part */
    f.participants[3].node = NEAR;
    struct plan_entry *entry = entry_make(&f, 1);
    ck_assert_int_eq(plan_transfers(entry->plan, -1, cell_note, &cells), 0);
    for (uint64_t cell = 0; cell < cells.n; cell++)
        for (uint32_t node = 0; node < 2; node++) {
            struct cells_place wrong[] = {{cell, node}, {cell, node}};
            struct cells_holder *holders = NULL;
            size_t n = 0, n_expected = 0;
            ck_assert_int_eq(cells_holders(entry, wrong, 2, &holders, &n), 0);
            for (uint32_t rank = 0; rank < 3; rank++) {
                if (!has_cell(&f, &cells.box[cell], rank, numbers[node]))
                    continue;
                ck_assert_uint_lt(n_expected, n);
                ck_assert_uint_eq(holders[n_expected].layout, 1);
                ck_assert_uint_eq(holders[n_expected++].rank, rank);
            }
            ck_assert_uint_eq(n, n_expected);
            mem_free(holders);
        }
    plan_entry_unref(entry);
    layouts_close(&f.layouts);
}
END_TEST

START_TEST(finding_who_holds_a_cell_survives_every_failed_allocation)
{
    struct fixture f;
    struct cells_place wrong[] = {{0, 0}, {0, 1}};
    struct cells_holder *holders = NULL;
    size_t n = 0;
    fixture_make(&f);
    struct plan_entry *entry = entry_make(&f, 1);
    long i = 1;
    for (int r = RS_ENOMEM; r != 0; i++) {
        mem_fail_at(i);
        r = cells_holders(entry, wrong, 2, &holders, &n);
        mem_fail_at(0);
        ck_assert(r == 0 || (r == RS_ENOMEM && holders == NULL));
    }
    ck_assert_int_gt(i, 3);
    mem_free(holders);
    plan_entry_unref(entry);
    layouts_close(&f.layouts);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(copies_digest_alike_and_each_changed_part_is_named)                                          \
    X(an_input_that_would_be_used_as_an_index_wrongly_is_refused)                                  \
    X(participants_are_found_by_layout_and_rank_and_their_devices_counted_over_nodes)              \
    X(copying_survives_every_failed_allocation)                                                    \
    X(both_ends_report_the_same_cells_and_the_sender_as_a_source)                                  \
    X(what_sources_sent_and_the_rest_are_all_and_no_cell_is_told_twice)                            \
    X(collecting_survives_every_failed_allocation)                                                 \
    X(a_difference_is_told_by_tensor_box_layout_and_rank)                                          \
    X(all_ranks_of_a_node_that_take_a_wrong_cell_hold_it_and_no_others)                            \
    X(finding_who_holds_a_cell_survives_every_failed_allocation)
#include "test/lib/main.h"
