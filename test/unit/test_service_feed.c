/* Who feeds an attempt is looked at first (service/part_feed.c): with every allocation failing in turn. Leases and the data
 * plane are stood in for, here. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "service/held.h"
#include "service/lease.h"
#include "service/part.h"

enum { NODE = 2, FEEDERS = 3, TENSORS = 2, VERSION = 7 };

/* What part_feed.c asks of others. */
static struct lease *stub_lease_find(struct service *s, uint64_t id);
static int stub_lease_table(struct lease *l, struct wire_packet *packet, uint64_t **ret,
                            struct err *e);
static int stub_link_submit(struct data_plane_link *l, struct link_request *r, struct wire_header h,
                            const void *body, size_t body_bytes, const void *table,
                            size_t table_bytes, const int *fds, uint32_t n_fds, uint32_t timeout_ms,
                            struct err *e);
static void stub_link_forget(struct data_plane_link *l, struct link_request *r);
static void stub_prepare_checked(struct part *p);
static void stub_answer(struct part *p, enum member_event_type type, int code, const char *text,
                        const uint8_t *digest);

#define lease_find           stub_lease_find
#define lease_table          stub_lease_table
#define link_submit          stub_link_submit
#define link_forget          stub_link_forget
#define part_prepare_checked stub_prepare_checked
#define part_answer          stub_answer
#include "service/part_feed.c"
#undef lease_find
#undef lease_table
#undef link_submit
#undef link_forget
#undef part_prepare_checked
#undef part_answer

struct bed {
    struct lease leases[FEEDERS];
    struct layout layout;
    struct layout_entry entry;
    struct service service;
    struct model model;
    struct participant participants[FEEDERS + 1];
    struct attempt_input input;
    struct prepare now;
    struct part part;
    unsigned n_asked, n_checked, n_failed;
    int code; /* of the last answer that was a failure */
};

static struct bed *bed;

static struct lease *stub_lease_find(struct service *s, uint64_t id)
{
    (void)s;
    for (unsigned i = 0; i < FEEDERS; i++)
        if (bed->leases[i].id == id)
            return &bed->leases[i];
    return NULL;
}

/* What the memory of the worker has: its rank, and one more per tensor. */
static int stub_lease_table(struct lease *l, struct wire_packet *packet, uint64_t **ret,
                            struct err *e)
{
    uint64_t *table = mem_calloc(TENSORS, sizeof *table);
    (void)packet;
    if (table == NULL)
        return err_set(e, RS_ENOMEM, "no memory");
    for (uint32_t t = 0; t < TENSORS; t++)
        table[t] = l->rank + t + 1;
    *ret = table;
    return 0;
}

/* As the link does: a packet that has to wait is copied. */
static int stub_link_submit(struct data_plane_link *l, struct link_request *r, struct wire_header h,
                            const void *body, size_t body_bytes, const void *table,
                            size_t table_bytes, const int *fds, uint32_t n_fds, uint32_t timeout_ms,
                            struct err *e)
{
    void *copy = mem_alloc(body_bytes);
    (void)l, (void)body, (void)table, (void)table_bytes, (void)fds, (void)n_fds, (void)timeout_ms;
    ck_assert_uint_eq(h.type, WIRE_CHECK);
    if (copy == NULL)
        return err_set(e, RS_ENOMEM, "no memory");
    mem_free(copy);
    r->id = ++bed->n_asked;
    return 0;
}

static void stub_link_forget(struct data_plane_link *l, struct link_request *r)
{
    (void)l;
    r->id = 0;
}

static void stub_prepare_checked(struct part *p)
{
    ck_assert_ptr_eq(p, &bed->part);
    bed->n_checked++;
}

static void stub_answer(struct part *p, enum member_event_type type, int code, const char *text,
                        const uint8_t *digest)
{
    ck_assert_ptr_eq(p, &bed->part);
    ck_assert_int_eq((int)type, MEMBER_EV_MADE_READY);
    ck_assert(code != 0 && text[0] != '\0' && digest == NULL);
    bed->n_failed++;
    bed->code = code;
}

static void bed_init(struct bed *b)
{
    static char name[] = "rollout";
    *b = (struct bed){.layout = {.name = name, .n_tensors = TENSORS, .digest = {9}},
                      .entry = {.layout = &b->layout},
                      .service = {.node = NODE},
                      .model = {.service = &b->service, .id = 1},
                      .input = {.participants = b->participants,
                                .n_participants = FEEDERS + 1,
                                .verify = WIRE_VERIFY_FULL},
                      .now = {.input = &b->input, .version = VERSION},
                      .part = {.model = &b->model, .now = &b->now}};
    for (uint32_t i = 0; i < FEEDERS; i++) {
        b->leases[i] =
            (struct lease){.id = 10 + i, .rank = i, .side = REFIT_DESTINATION, .layout = &b->entry};
        b->participants[i] = (struct participant){.worker = 10 + i, .node = NODE, .rank = i};
    }
    b->participants[FEEDERS] = (struct participant){.worker = 99, .node = NODE + 1}; /* not ours */
    bed = b;
}

/* All that were asked answer. */
static void all_answer(struct bed *b)
{
    struct wire_packet packet = {0};
    for (uint32_t i = 0; i < b->part.feeders->n && b->n_failed == 0; i++) {
        struct link_request *r = &b->part.feeders->all[i].request;
        r->id = 0;
        r->done(r, 0, &packet, NULL);
    }
}

static uint64_t fold_of(uint32_t rank)
{
    const uint64_t table[TENSORS] = {rank + 1, rank + 2};
    return held_fold(table, TENSORS);
}

START_TEST(every_failed_allocation_of_the_check_is_an_answer_and_leaves_nothing)
{
    bool failed = true;
    for (long i = 1; failed; i++) {
        struct bed b;
        struct err e = {0};
        bed_init(&b);
        mem_fail_at(i);
        int r = part_feeders_check(&b.part, &e);
        if (r == 1)
            all_answer(&b);
        failed = mem_failed() != 0;
        mem_fail_at(0);
        if (!failed)
            ck_assert(r == 1 && b.n_checked == 1 && b.n_failed == 0 && b.n_asked == FEEDERS);
        else if (r == 1) /* in an answer: the attempt is told, and not gone on with */
            ck_assert(b.n_checked == 0 && b.n_failed == 1 && b.code == RS_ENOMEM);
        else
            ck_assert(r == RS_ENOMEM && e.text[0] != '\0' && b.part.feeders == NULL);
        part_feeders_forget(&b.part);
        ck_assert_ptr_null(b.part.feeders);
        ck_assert_int_lt(i, 20);
    }
}
END_TEST

START_TEST(every_failed_allocation_of_the_folds_leaves_those_that_were_there)
{
    bool failed = true;
    for (long i = 1; failed; i++) {
        struct bed b;
        bed_init(&b);
        ck_assert_int_eq(part_feeders_check(&b.part, NULL), 1);
        all_answer(&b);
        struct memory_fold *folds = mem_calloc(1, sizeof *folds);
        uint32_t n = 1;
        ck_assert_ptr_nonnull(folds);
        folds[0].fold = 5;
        mem_fail_at(i);
        int r = part_feeders_folds(&b.part, &folds, &n);
        failed = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, failed ? RS_ENOMEM : 0);
        ck_assert_uint_eq(n, failed ? 1 : 1 + FEEDERS);
        ck_assert_uint_eq(folds[0].fold, 5);
        for (uint32_t k = 1; k < n; k++)
            ck_assert(folds[k].rank == k - 1 && folds[k].fold == fold_of(k - 1) &&
                      folds[k].layout[0] == 9);
        mem_free(folds);
        part_feeders_forget(&b.part);
        ck_assert_int_lt(i, 5);
    }
}
END_TEST

START_TEST(who_does_not_hold_what_it_held_is_blamed)
{
    struct bed b;
    bed_init(&b);
    b.leases[1].content[WIRE_LIVE] =
        (struct memory_content){.version = VERSION, .fold = fold_of(1) + 1};
    ck_assert_int_eq(part_feeders_check(&b.part, NULL), 1);
    all_answer(&b);
    ck_assert(b.n_checked == 0 && b.n_failed == 1 && b.code == RS_EDATALOSS);
    ck_assert_uint_eq(b.part.blamed, 11);
    part_feeders_forget(&b.part);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_failed_allocation_of_the_check_is_an_answer_and_leaves_nothing)                        \
    X(every_failed_allocation_of_the_folds_leaves_those_that_were_there)                           \
    X(who_does_not_hold_what_it_held_is_blamed)

#include "test/lib/main.h"
