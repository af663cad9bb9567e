/* What a node's sources send is told before it is said that it is (service/part_sources.c). The plan, the coordinator and
 * the rest of the node part are stood in for, here. */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "service/cells_collect.h"
#include "service/part.h"

enum { HOLDS = 3, CELLS = 2, ATTEMPT = 8 };

static int stub_cells_collect(const struct plan_entry *plan, const uint64_t *holds,
                              enum compare_mode mode, enum cells_part which,
                              struct cell_print **ret, uint32_t *ret_n);
static void stub_cells_tell(const struct part *p, uint64_t attempt, const struct cell_print *cells,
                            uint32_t n);
static void stub_answer(struct part *p, enum member_event_type type, int code, const char *text,
                        const uint8_t *digest);
static struct plan_entry *stub_ref(struct plan_entry *e);
static void stub_unref(struct plan_entry *e);
static void stub_stop_if_idle(struct service *s);

#define cells_collect        stub_cells_collect
#define part_cells_tell      stub_cells_tell
#define part_answer          stub_answer
#define plan_entry_ref       stub_ref
#define plan_entry_unref     stub_unref
#define service_stop_if_idle stub_stop_if_idle
#include "service/part_sources.c"
#undef cells_collect
#undef part_cells_tell
#undef part_answer
#undef plan_entry_ref
#undef plan_entry_unref
#undef service_stop_if_idle

struct bed {
    uv_loop_t loop;
    struct service service;
    struct model model;
    struct program_place places[2];
    struct plan_entry plan;
    struct attempt_input input;
    struct prepare now;
    struct part part;
    struct wire_packet packet;
    int n_refs;
    unsigned n_told, n_progress, n_failed;
};

static struct bed bed;

/* One print of each of the first holds. */
static int stub_cells_collect(const struct plan_entry *plan, const uint64_t *holds,
                              enum compare_mode mode, enum cells_part which,
                              struct cell_print **ret, uint32_t *ret_n)
{
    ck_assert(plan == &bed.plan && mode == COMPARE_FULL && which == CELLS_OF_SOURCES);
    *ret = mem_calloc(CELLS, sizeof **ret);
    *ret_n = 0;
    if (*ret == NULL)
        return RS_ENOMEM;
    for (; *ret_n < CELLS; (*ret_n)++)
        (*ret)[*ret_n] = (struct cell_print){.cell = *ret_n, .fingerprint = holds[*ret_n]};
    return 0;
}

static void stub_cells_tell(const struct part *p, uint64_t attempt, const struct cell_print *cells,
                            uint32_t n)
{
    ck_assert(p == &bed.part && attempt == ATTEMPT && n == CELLS);
    ck_assert(!p->sources_told); /* what goes out before this must not say so */
    ck_assert_uint_eq(bed.n_progress, 0);
    for (uint32_t i = 0; i < n; i++)
        ck_assert_uint_eq(cells[i].fingerprint, 70 + i);
    bed.n_told++;
}

static void stub_answer(struct part *p, enum member_event_type type, int code, const char *text,
                        const uint8_t *digest)
{
    ck_assert(p == &bed.part && digest == NULL);
    if (type == MEMBER_EV_PROGRESS) {
        ck_assert(code == 0 && p->sources_told);
        bed.n_progress++;
    } else {
        ck_assert(type == MEMBER_EV_LANDED && code == RS_ENOMEM && text[0] != '\0');
        ck_assert(!p->sources_told);
        bed.n_failed++;
    }
}

static struct plan_entry *stub_ref(struct plan_entry *e)
{
    bed.n_refs++;
    return e;
}

static void stub_unref(struct plan_entry *e)
{
    ck_assert_ptr_eq(e, &bed.plan);
    bed.n_refs--;
}

static void stub_stop_if_idle(struct service *s)
{
    ck_assert_ptr_eq(s, &bed.service);
}

/* PREPARED with the fingerprints of that many holds; 0: without any. */
static void packet_make(uint32_t n_holds)
{
    const uint64_t holds[HOLDS] = {70, 71, 0};
    wire_packet_close(&bed.packet);
    bed.packet.n_fds = n_holds > 0;
    if (n_holds > 0)
        bed.packet.fds[0] = wire_memfd("holds", holds, n_holds * sizeof *holds, NULL);
}

static void bed_open(void)
{
    memset(&bed, 0, sizeof bed);
    ck_assert_int_eq(uv_loop_init(&bed.loop), 0);
    bed.service.loop = &bed.loop;
    bed.model.service = &bed.service;
    bed.places[0].side = PROGRAM_DESTINATION;
    bed.places[1].side = PROGRAM_SOURCE;
    bed.plan.program.places = bed.places;
    bed.plan.program.n_places = 2;
    bed.plan.program.n_holds = HOLDS;
    bed.input.verify = WIRE_VERIFY_FULL;
    bed.now = (struct prepare){.input = &bed.input, .attempt = ATTEMPT, .n_peers = 1};
    bed.part = (struct part){.model = &bed.model, .now = &bed.now, .plan = &bed.plan};
    packet_make(HOLDS);
}

static void run(void)
{
    (void)uv_run(&bed.loop, UV_RUN_DEFAULT);
    ck_assert_uint_eq(bed.service.n_jobs, 0);
}

static void bed_close(void)
{
    part_sources_forget(&bed.part);
    ck_assert(!bed.part.sources_told && bed.part.source_holds == NULL && bed.part.telling == NULL);
    run();
    ck_assert_int_eq(bed.n_refs, 0);
    wire_packet_close(&bed.packet);
    ck_assert_int_eq(uv_loop_close(&bed.loop), 0);
}

START_TEST(cells_come_first_then_it_is_said_that_they_are_told)
{
    bed_open();
    ck_assert_int_eq(part_sources_take(&bed.part, &bed.packet, NULL), 0);
    ck_assert(!bed.part.sources_told);
    ck_assert_int_eq(part_sources_tell(&bed.part), 0);
    ck_assert(!bed.part.sources_told && bed.n_told == 0 && bed.n_progress == 0);
    run();
    ck_assert(bed.part.sources_told && bed.n_told == 1 && bed.n_progress == 1 && bed.n_failed == 0);
    bed_close();
}
END_TEST

START_TEST(where_there_is_nothing_to_tell_that_is_said_at_once_if_anybody_waits_for_it)
{
    for (int i = 0; i < 3; i++) {
        bed_open();
        bed.input.verify = i == 0 ? WIRE_VERIFY_OFF : WIRE_VERIFY_FULL;
        bed.now.n_peers = i == 1 ? 0 : 1;
        bed.plan.program.n_places = i == 2 ? 1 : 2; /* no source of ours */
        packet_make(0);
        ck_assert_int_eq(part_sources_take(&bed.part, &bed.packet, NULL), 0);
        ck_assert(bed.part.sources_told && bed.n_progress == 0);
        ck_assert_int_eq(part_sources_tell(&bed.part), 0);
        ck_assert_uint_eq(bed.n_progress, i == 1 ? 0 : 1);
        run();
        ck_assert_uint_eq(bed.n_told, 0);
        bed_close();
    }
}
END_TEST

START_TEST(prepared_without_the_fingerprints_or_with_too_few_is_refused)
{
    for (uint32_t n = 0; n < HOLDS; n++) {
        struct err e = {0};
        bed_open();
        packet_make(n);
        ck_assert_int_eq(part_sources_take(&bed.part, &bed.packet, &e), RS_EPROTO);
        ck_assert(!bed.part.sources_told && e.text[0] != '\0');
        bed_close();
    }
}
END_TEST

START_TEST(what_is_left_to_staged_is_told_by_nobody_else)
{
    bed_open();
    ck_assert_int_eq(part_sources_take(&bed.part, &bed.packet, NULL), 0);
    ck_assert_int_eq(part_sources_tell(&bed.part), 0);
    part_sources_leave(&bed.part);
    run();
    ck_assert(!bed.part.sources_told && bed.n_told == 0 && bed.n_progress == 0);
    bed_close();
}
END_TEST

START_TEST(every_failed_allocation_is_an_answer_and_nothing_is_said_to_be_told)
{
    unsigned n_failed = 0;
    for (long i = 1, failed = 1; failed != 0; i++) {
        bed_open();
        ck_assert_int_eq(part_sources_take(&bed.part, &bed.packet, NULL), 0);
        mem_fail_at(i);
        int r = part_sources_tell(&bed.part);
        run();
        failed = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r == 0 && bed.n_failed == 0, failed == 0);
        ck_assert_int_eq(bed.part.sources_told, failed == 0);
        ck_assert_uint_eq(bed.n_told + bed.n_progress, failed == 0 ? 2 : 0);
        n_failed += failed != 0;
        bed_close();
    }
    ck_assert_uint_eq(n_failed, 2);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(cells_come_first_then_it_is_said_that_they_are_told)                                         \
    X(where_there_is_nothing_to_tell_that_is_said_at_once_if_anybody_waits_for_it)                 \
    X(prepared_without_the_fingerprints_or_with_too_few_is_refused)                                \
    X(what_is_left_to_staged_is_told_by_nobody_else)                                               \
    X(every_failed_allocation_is_an_answer_and_nothing_is_said_to_be_told)

#include "test/lib/main.h"
