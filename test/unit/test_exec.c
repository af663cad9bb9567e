/* Refits through the data plane: what lands, what is caught, what stops. */
#include <check.h>

#include "test/lib/best_of.h"
#include "test/lib/rig_runs.h"

/* Source on devices 0 … s-1, destination behind them, domains as told. */
static void random_rig(struct rig *r, uint64_t seed, bool cast, enum plan_strategy strategy)
{
    static const uint32_t ranks[] = {1, 2, 3, 4};
    uint64_t state = seed;
    uint32_t n_source = ranks[random_next(&state) % 4], n_dest = ranks[random_next(&state) % 4];
    uint32_t n_domains = 1 + (uint32_t)(random_next(&state) % 4);
    memset(r, 0, sizeof(*r));
    r->o.n_devices = n_source + n_dest;
    for (uint32_t i = 0; i < r->o.n_devices; i++)
        r->o.domain[i] = i % n_domains;
    r->o.plan = plan_options_default();
    r->o.plan.strategy = strategy;
    r->o.plan.ring_slots = 1 + (uint32_t)(random_next(&state) % 4);
    r->o.plan.chunk_bytes = 64U << (random_next(&state) % 8);
    r->o.plan.least_piece_bytes = 64;
    r->o.fused = random_next(&state) % 2 == 0;
    r->o.shadow = random_next(&state) % 2 == 0;
    r->o.seed = seed;
    r->o.hello.n_threads = random_next(&state) % 2 == 0 ? 20 : 0;
    bool same_devices = random_next(&state) % 4 == 0;
    char *source = rig_random_json(seed, seed + 1, "s", n_source, 6, false);
    char *dest = rig_random_json(seed, seed + 2, "d", n_dest, 6, cast);
    char *second = rig_random_json(seed, seed + 3, "e", n_dest, 6, false);
    rig_side(r, 0, source, 0, n_source);
    rig_side(r, 1, dest, same_devices ? 0 : n_source, n_dest);
    if (random_next(&state) % 2 == 0)
        rig_side(r, 2, second, n_source, n_dest);
    mem_free(source);
    mem_free(dest);
    mem_free(second);
}

/* Holds of one cell must all have one fingerprint. */
static void check_holds(const struct rig *r, const uint64_t *table)
{
    for (uint32_t i = 0; i < r->program.n_holds; i++)
        for (uint32_t k = i + 1; k < r->program.n_holds; k++)
            if (program_hold(&r->program, i).cell == program_hold(&r->program, k).cell)
                ck_assert_uint_eq(table[i], table[k]);
}

/* What is not fingerprinted has 0. */
static void check_sampled(const struct rig *r, enum wire_verify verify, const uint64_t *table)
{
    for (uint32_t i = 0; i < r->program.n_holds; i++) {
        uint32_t cell = program_hold(&r->program, i).cell;
        bool expected = verify == WIRE_VERIFY_SAMPLED &&
                        wire_sampled(r->program.digest, program_cell(&r->program, cell).id) &&
                        program_cell_elements(&r->program, cell) > 0;
        ck_assert_int_eq(table[i] != 0, expected);
    }
}

static void two_versions(struct rig *r, enum wire_verify verify)
{
    rig_open(r);
    for (uint64_t version = 1; version <= 2; version++) {
        r->version = version;
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
        uint64_t *table = rig_refit(r, verify);
        ck_assert_uint_eq(rig_wrong(r, rig_target(r), version), 0);
        if (verify == WIRE_VERIFY_FULL)
            check_holds(r, table);
        else
            check_sampled(r, verify, table);
        free(table);
    }
    rig_close(r);
}

START_TEST(every_element_lands_for_random_layouts)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct rig r;
        random_rig(&r, seed, false, PLAN_RESHARD);
        two_versions(&r, (enum wire_verify)(seed % 3));
    }
}
END_TEST

START_TEST(every_element_lands_with_casts)
{
    for (uint64_t seed = 100; seed < 120; seed++) {
        struct rig r;
        random_rig(&r, seed, true, PLAN_RESHARD);
        two_versions(&r, WIRE_VERIFY_FULL);
    }
}
END_TEST

START_TEST(every_element_lands_directly_and_by_gather_broadcast)
{
    for (uint64_t seed = 200; seed < 220; seed++) {
        struct rig r;
        random_rig(&r, seed, seed % 4 < 2, seed % 2 == 0 ? PLAN_DIRECT : PLAN_GATHER_BROADCAST);
        two_versions(&r, WIRE_VERIFY_FULL);
    }
}
END_TEST

START_TEST(every_element_lands_under_delays_and_poison)
{
    for (uint64_t seed = 300; seed < 315; seed++) {
        struct rig r;
        random_rig(&r, seed, false, (enum plan_strategy)(seed % 3));
        r.o.hello.host_seed = seed;
        r.o.hello.host_max_delay_us = 200;
        two_versions(&r, WIRE_VERIFY_FULL);
    }
}
END_TEST

/* --- errands ---------------------------------------------------------------------------------- */

/* Source TP-like rows over 2 ranks, destination columns over 2 ranks, each device its own domain.
 */
static const char *const ROWS =
    "{\"name\":\"s\",\"ranks\":2,\"meshes\":[{\"name\":\"m\",\"shape\":[2],\"ranks\":[0,1]}],"
    "\"tensors\":[{\"name\":\"a\",\"shape\":[64,48],\"dtype\":\"bfloat16\",\"mesh\":\"m\","
    "\"placements\":[\"Shard(0)\"]},{\"name\":\"b\",\"shape\":[4096,16],\"dtype\":\"float32\","
    "\"mesh\":\"m\",\"placements\":[\"Shard(0)\"]}]}";
static const char *const COLUMNS =
    "{\"name\":\"d\",\"ranks\":2,\"meshes\":[{\"name\":\"m\",\"shape\":[2],\"ranks\":[0,1]}],"
    "\"tensors\":[{\"name\":\"a\",\"shape\":[64,48],\"dtype\":\"bfloat16\",\"mesh\":\"m\","
    "\"placements\":[\"Shard(1)\"]},{\"name\":\"b\",\"shape\":[4096,16],\"dtype\":\"float32\","
    "\"mesh\":\"m\",\"placements\":[\"Shard(1)\"]}]}";

static void plain_rig(struct rig *r)
{
    memset(r, 0, sizeof(*r));
    r->o.n_devices = 4;
    for (uint32_t i = 0; i < 4; i++)
        r->o.domain[i] = i;
    r->o.plan = plan_options_default();
    r->o.plan.chunk_bytes = 4096;
    r->o.plan.ring_slots = 2;
    r->o.plan.least_piece_bytes = 1024;
    rig_side(r, 0, ROWS, 0, 2);
    rig_side(r, 1, COLUMNS, 2, 2);
}

static uint64_t *errand(struct rig *r, uint32_t type, uint64_t worker, unsigned memory)
{
    struct wire_check check = {.memory = memory};
    struct wire_publish publish = {0};
    const void *body = type == WIRE_CHECK ? (const void *)&check : (const void *)&publish;
    size_t bytes = type == WIRE_APPLY ? 0 : type == WIRE_CHECK ? sizeof(check) : sizeof(publish);
    uint64_t request = rig_send(r, type, worker, body, bytes, NULL, 0, NULL, 0);
    rig_expect(r, request,
               type + (type == WIRE_PUBLISH || type == WIRE_APPLY || type == WIRE_CHECK));
    return rig_table(r, 2);
}

/* The fingerprint of a worker's part of tensor t, element by element through the scalar twin. */
static uint64_t expected_print(const struct rig *r, const struct rig_worker *w, uint32_t t)
{
    const struct layout *l = r->layouts[w->layout];
    struct box boxes[8];
    uint32_t n = layout_shards(l, t, w->rank, boxes, 8);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t index[BOX_MAX_DIMS];
        memcpy(index, boxes[i].offset, sizeof(index));
        for (uint64_t k = 0; k < box_elements(&boxes[i]); k++) {
            uint64_t v = rig_value(t, rig_linear(&l->tensors[t], index), r->version,
                                   (uint8_t)l->tensors[t].dtype);
            struct kernel_fingerprint f = {.from = {.base = &v},
                                           .fingerprint = &sum,
                                           .n_dims = boxes[i].n_dims,
                                           .dtype = (uint8_t)l->tensors[t].dtype};
            for (unsigned d = 0; d < f.n_dims; d++) {
                f.size[d] = 1;
                f.offset[d] = index[d];
            }
            kernel_fingerprint_reference(&f);
            RIG_NEXT_INDEX(&boxes[i], index)
        }
    }
    return sum;
}

START_TEST(publish_apply_and_check_answer_the_fingerprint_of_each_tensor)
{
    struct rig r;
    plain_rig(&r);
    r.o.shadow = true;
    r.o.fused = true;
    rig_open(&r);
    rig_fill_sources(&r, 1);
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t *table = errand(&r, WIRE_PUBLISH, r.workers[i].id, 0);
        for (uint32_t t = 0; t < 2; t++)
            ck_assert_uint_eq(table[t], expected_print(&r, &r.workers[i], t));
        free(table);
    }
    free(rig_refit(&r, WIRE_VERIFY_FULL));
    ck_assert_uint_eq(rig_wrong(&r, WIRE_SHADOW, 1), 0);
    for (uint32_t i = 2; i < 4; i++) {
        uint64_t *shadow = errand(&r, WIRE_CHECK, r.workers[i].id, WIRE_SHADOW);
        uint64_t *applied = errand(&r, WIRE_APPLY, r.workers[i].id, 0);
        uint64_t *live = errand(&r, WIRE_CHECK, r.workers[i].id, WIRE_LIVE);
        for (uint32_t t = 0; t < 2; t++) {
            ck_assert_uint_eq(shadow[t], expected_print(&r, &r.workers[i], t));
            ck_assert_uint_eq(applied[t], shadow[t]);
            ck_assert_uint_eq(live[t], shadow[t]);
        }
        free(shadow);
        free(applied);
        free(live);
    }
    ck_assert_uint_eq(rig_wrong(&r, WIRE_LIVE, 1), 0);
    rig_close(&r);
}
END_TEST

static uint64_t send_publish_program(struct rig *r, uint32_t worker)
{
    struct wire_publish m = {.has_program = 1};
    for (uint32_t i = 0; i < r->program.n_places; i++)
        if (r->program.places[i].side == PROGRAM_SOURCE &&
            r->program.places[i].rank == r->workers[worker].rank)
            m.place = i;
    return rig_send(r, WIRE_PUBLISH, r->workers[worker].id, &m, sizeof(m), NULL, 0, &r->program_fd,
                    1);
}

START_TEST(publish_by_a_programs_cells_gives_the_same_and_serves_prepare)
{
    struct rig r;
    plain_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    for (uint32_t i = 0; i < 2; i++) {
        rig_expect(&r, send_publish_program(&r, i), WIRE_PUBLISHED);
        uint64_t *table = rig_table(&r, 2);
        for (uint32_t t = 0; t < 2; t++)
            ck_assert_uint_eq(table[t], expected_print(&r, &r.workers[i], t));
        free(table);
    }
    free(rig_refit(&r, WIRE_VERIFY_FULL));
    /* The cells' values are those of the publication: what is written later is caught as it is
     * sent, though it was there before PREPARE. */
    r.workers[0].memory[WIRE_LIVE].data[100] ^= 1;
    rig_prepare(&r, WIRE_VERIFY_FULL);
    rig_expect(&r, rig_send_start(&r), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EDATALOSS);
    rig_abort(&r);
    rig_close(&r);
}
END_TEST

/* --- what is caught --------------------------------------------------------------------------- */

START_TEST(a_source_that_changes_after_its_publication_is_caught_at_prepare)
{
    struct rig r;
    plain_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    for (uint32_t i = 0; i < 2; i++)
        free(errand(&r, WIRE_PUBLISH, r.workers[i].id, 0));
    r.workers[1].memory[WIRE_LIVE].data[64 * 24] ^= 0x10;
    r.attempt++;
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EDATALOSS);
    ck_assert_ptr_nonnull(strstr(rig_failure(&r)->text, "tensor 0"));
    ck_assert_ptr_nonnull(strstr(rig_failure(&r)->text, "rank 1"));
    rig_abort(&r);
    rig_close(&r);
}
END_TEST

START_TEST(a_source_that_changes_between_prepare_and_sending_is_blamed)
{
    struct rig r;
    plain_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    rig_prepare(&r, WIRE_VERIFY_FULL);
    const struct rig_memory *m = &r.workers[1].memory[WIRE_LIVE];
    m->data[m->pieces[1].offset + 5] ^= 4; /* tensor b */
    rig_expect(&r, rig_send_start(&r), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EDATALOSS);
    const struct wire_failure *f = rig_failure(&r);
    ck_assert_uint_eq(f->tensor, 1);
    ck_assert_ptr_nonnull(strstr(f->text, "box ["));
    ck_assert_ptr_nonnull(strstr(f->text, "rank"));
    ck_assert_uint_lt(f->place, r.program.n_places);
    /* Only ABORT is accepted now. */
    rig_expect(&r, rig_send_start(&r), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EPRECOND);
    rig_abort(&r);
    r.workers[1].memory[WIRE_LIVE].data[m->pieces[1].offset + 5] ^= 4;
    rig_poison_destinations(&r);
    free(rig_refit(&r, WIRE_VERIFY_FULL));
    ck_assert_uint_eq(rig_wrong(&r, WIRE_LIVE, 1), 0);
    rig_close(&r);
}
END_TEST

/* A held cell is not moved but verified: a flipped byte of it is blamed on its place. */
START_TEST(held_cells_are_not_moved_and_a_damaged_one_is_blamed)
{
    struct rig r;
    plain_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    free(rig_refit(&r, WIRE_VERIFY_FULL));
    uint64_t total = r.progress.total_bytes;
    uint8_t *held = malloc(r.program.n_holds);
    memset(held, 1, r.program.n_holds);
    r.attempt++;
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, held), WIRE_PREPARED);
    rig_expect(&r, rig_send_start(&r), WIRE_STAGED);
    ck_assert_uint_eq(r.progress.total_bytes, 0);
    ck_assert_uint_eq(r.progress.skipped_bytes, total);
    ck_assert_uint_eq(r.progress.network_bytes, 0);
    ck_assert_uint_eq(r.progress.messages, 0);
    uint64_t *table = rig_table(&r, r.program.n_holds);
    check_holds(&r, table);
    free(table);

    const struct rig_memory *m = &r.workers[3].memory[WIRE_LIVE];
    m->data[m->pieces[0].offset] ^= 1;
    r.attempt++;
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, held), WIRE_PREPARED);
    rig_expect(&r, rig_send_start(&r), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EDATALOSS);
    ck_assert_uint_eq(rig_failure(&r)->tensor, 0);
    ck_assert_ptr_nonnull(strstr(rig_failure(&r)->text, "destination, layout 0, rank 1"));
    rig_abort(&r);

    /* Only the cells of that worker are asked for again. */
    for (uint32_t i = 0; i < r.program.n_holds; i++)
        if (r.program.places[program_hold(&r.program, i).place].rank == 1)
            held[i] = 0;
    r.attempt++;
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, held), WIRE_PREPARED);
    rig_expect(&r, rig_send_start(&r), WIRE_STAGED);
    ck_assert_uint_eq(r.progress.total_bytes, total / 2);
    ck_assert_uint_eq(r.progress.network_bytes, total / 2);
    ck_assert_uint_eq(rig_wrong(&r, WIRE_LIVE, 1), 0);
    free(held);
    rig_close(&r);
}
END_TEST

START_TEST(random_held_cells_are_left_alone)
{
    for (uint64_t seed = 400; seed < 415; seed++) {
        struct rig r;
        random_rig(&r, seed, false, (enum plan_strategy)(seed % 3));
        rig_open(&r);
        rig_fill_sources(&r, 1);
        free(rig_refit(&r, WIRE_VERIFY_FULL));
        uint8_t *held = malloc(r.program.n_holds + 1);
        uint64_t state = seed;
        for (uint32_t i = 0; i < r.program.n_holds; i++)
            held[i] = random_next(&state) % 3 != 0;
        r.attempt++;
        rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, held), WIRE_PREPARED);
        rig_expect(&r, rig_send_start(&r), WIRE_STAGED);
        ck_assert_uint_eq(r.progress.done_bytes, r.progress.total_bytes);
        ck_assert_uint_eq(rig_wrong(&r, rig_target(&r), 1), 0);
        free(held);
        rig_close(&r);
    }
}
END_TEST

/* --- stopping --------------------------------------------------------------------------------- */

START_TEST(after_quiesced_no_byte_lands_and_the_next_attempt_is_clean)
{
    for (uint64_t seed = 500; seed < 525; seed++) {
        struct rig r;
        uint64_t state = seed;
        random_rig(&r, seed, false, (enum plan_strategy)(seed % 3));
        r.o.hello.host_seed = seed;
        r.o.hello.host_max_delay_us = 50;
        (void)rig_cut(&r, random_next(&state) % 3000);
    }
}
END_TEST

static void slow_rig(struct rig *r)
{
    plain_rig(r);
    r->o.process = true;
    r->o.hello.network_bytes_per_s = 40e3; /* some 300 KB: many seconds, if nobody stops it */
}

static uint64_t end_of_socket(void *arg)
{
    struct rig r;
    (void)arg;
    slow_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    rig_prepare(&r, WIRE_VERIFY_FULL);
    (void)rig_send_start(&r);
    rig_until_moving(&r);
    uint64_t began = clock_mono_ns();
    ck_assert_int_eq(rig_end(&r, false), EXIT_SUCCESS);
    uint64_t took = clock_mono_ns() - began;
    uint64_t sum = rig_checksum(&r);
    rig_pause_us(5000);
    ck_assert_uint_eq(rig_checksum(&r), sum);
    ck_assert_uint_gt(rig_wrong(&r, WIRE_LIVE, 1), 0);
    rig_free(&r);
    return took;
}

START_TEST(the_end_of_the_socket_ends_the_process_and_memory_stays)
{
    in_time_once(end_of_socket, NULL, 1000000000);
}
END_TEST

START_TEST(past_its_lease_it_drops_everything)
{
    struct rig r;
    slow_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    rig_prepare(&r, WIRE_VERIFY_FULL);
    struct wire_lease lease = {.until_ns = clock_mono_ns() + UINT64_C(60000000)};
    (void)rig_send(&r, WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    rig_expect(&r, rig_send_start(&r), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EDEADLINE);
    rig_abort(&r);
    uint64_t sum = rig_checksum(&r);
    r.attempt++;
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EDEADLINE);
    rig_pause_us(5000);
    ck_assert_uint_eq(rig_checksum(&r), sum);
    lease.until_ns = 0;
    (void)rig_send(&r, WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    r.attempt++;
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_PREPARED);
    rig_abort(&r);
    rig_close(&r);
}
END_TEST

struct queued {
    uint64_t seed;
    bool cut_short;
};

/* Whether anything still changed a few milliseconds after the lease. */
static bool landed_late(struct queued *q)
{
    struct rig r;
    plain_rig(&r);
    r.o.domain[2] = 0; /* local copies, too */
    r.o.domain[3] = 1;
    r.o.hello.host_seed = q->seed;
    r.o.hello.host_max_delay_us = 20000;
    rig_open(&r);
    rig_fill_sources(&r, 1);
    rig_prepare(&r, WIRE_VERIFY_OFF);
    uint64_t start = rig_send_start(&r);
    struct wire_lease lease = {.until_ns = clock_mono_ns() + UINT64_C(25000000)};
    (void)rig_send(&r, WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    while (clock_mono_ns() < lease.until_ns + 3000000)
        rig_pause_us(500);
    uint64_t sum = rig_checksum(&r);
    bool failed = rig_answer(&r, start) == WIRE_FAILED;
    q->cut_short = q->cut_short || failed;
    if (failed)
        ck_assert_int_eq(r.packet->header.code, RS_EDEADLINE);
    rig_abort(&r); /* answered when the queues have drained */
    bool late = rig_checksum(&r) != sum;
    rig_close(&r);
    return late;
}

/* Each item waits up to 20 ms for its turn, so that most are queued when the lease ends. A few milliseconds later nothing may
 * change any more, though the queues have not drained. (What was begun before may be finished after, where a busy machine takes
 * the CPU from a thread in the middle of it.) */
START_TEST(work_that_was_queued_does_not_land_past_the_lease)
{
    struct queued q = {.cut_short = false};
    for (q.seed = 600; q.seed < 606; q.seed++)
        ck_assert(!landed_late(&q) || !landed_late(&q) || !landed_late(&q));
    ck_assert(q.cut_short);
}
END_TEST

START_TEST(unbind_waits_for_the_attempt)
{
    struct rig r;
    slow_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    rig_prepare(&r, WIRE_VERIFY_OFF);
    uint64_t unbind = rig_send(&r, WIRE_UNBIND, r.workers[0].id, NULL, 0, NULL, 0, NULL, 0);
    ck_assert(!rig_receive(&r, 20));
    uint64_t abort = rig_send(&r, WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0);
    ck_assert(rig_receive(&r, 5000));
    ck_assert_uint_eq(r.packet->header.type, WIRE_UNBOUND);
    ck_assert_uint_eq(r.packet->header.request, unbind);
    rig_expect(&r, abort, WIRE_QUIESCED);
    r.attempt++;
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EPRECOND);
    rig_close(&r);
}
END_TEST

/* --- doors ------------------------------------------------------------------------------------ */

START_TEST(packets_that_make_no_sense_are_answered_and_change_nothing)
{
    struct rig r;
    plain_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    uint64_t state = 9;
    uint8_t junk[4096];
    for (int i = 0; i < 3000; i++) {
        struct wire_header h = rig_header(&r, (uint32_t)(random_next(&state) % 30), 100);
        size_t n = random_next(&state) % 3 == 0 ? random_next(&state) % sizeof(junk)
                                                : random_next(&state) % 64;
        for (size_t k = 0; k < n; k++)
            junk[k] = (uint8_t)(random_next(&state) % 4 == 0 ? random_next(&state) : 0);
        h.attempt = random_next(&state) % 3;
        h.worker = 100 + random_next(&state) % 6;
        if (random_next(&state) % 8 == 0)
            h.incarnation = 3;
        if (h.type == WIRE_STOP || h.type == WIRE_UNBIND || h.type == WIRE_LEASE)
            continue;
        int fds[3], n_fds = (int)(random_next(&state) % 4);
        for (int k = 0; k < n_fds; k++)
            fds[k] = wire_memfd("junk", junk, n, NULL);
        ck_assert_int_eq(wire_send(r.control, &h, junk, n, NULL, 0, fds, (uint32_t)n_fds, NULL), 0);
        for (int k = 0; k < n_fds; k++)
            close(fds[k]);
        if (h.type == WIRE_ABORT)
            rig_expect(&r, h.request, h.incarnation == 3 ? WIRE_FAILED : WIRE_QUIESCED);
        else
            (void)rig_answer(&r, h.request);
    }
    /* Short packets, a wrong protocol, more descriptors than any has. */
    ck_assert_int_eq(send(r.control, junk, 3, 0), 3);
    ck_assert(rig_receive(&r, 5000));
    ck_assert_int_eq(r.packet->header.code, RS_EPROTO);
    struct wire_header h = rig_header(&r, WIRE_START, 0);
    h.protocol = 99;
    ck_assert_int_eq(send(r.control, &h, sizeof(h), 0), (ssize_t)sizeof(h));
    ck_assert(rig_receive(&r, 5000));
    ck_assert_int_eq(r.packet->header.code, RS_EPROTO);
    r.attempt = 5;
    free(rig_refit(&r, WIRE_VERIFY_FULL));
    ck_assert_uint_eq(rig_wrong(&r, WIRE_LIVE, 1), 0);
    rig_close(&r);
}
END_TEST

START_TEST(a_message_of_another_attempt_is_refused)
{
    struct rig r;
    plain_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    rig_prepare(&r, WIRE_VERIFY_FULL);
    r.attempt += 3;
    rig_expect(&r, rig_send_start(&r), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EABORTED);
    rig_abort(&r); /* nothing of it moves */
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EPRECOND);
    r.attempt -= 3;
    rig_expect(&r, rig_send_start(&r), WIRE_STAGED);
    /* An attempt's number is never used again. */
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EPRECOND);
    rig_close(&r);
}
END_TEST

START_TEST(a_cell_that_is_not_bound_is_refused_at_prepare)
{
    struct rig r;
    plain_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    /* Rank 0 of the destination binds what rank 1 should. */
    struct rig_memory own = r.workers[2].memory[WIRE_LIVE];
    r.workers[2].memory[WIRE_LIVE].pieces = r.workers[3].memory[WIRE_LIVE].pieces;
    rig_bind(&r, &r.workers[2], WIRE_LIVE);
    r.workers[2].memory[WIRE_LIVE] = own;
    r.attempt++;
    rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_FAILED);
    ck_assert_int_eq(r.packet->header.code, RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(rig_failure(&r)->text, "is not bound"));
    ck_assert_ptr_nonnull(strstr(rig_failure(&r)->text, "tensor 0"));
    rig_bind(&r, &r.workers[2], WIRE_LIVE);
    free(rig_refit(&r, WIRE_VERIFY_FULL));
    ck_assert_uint_eq(rig_wrong(&r, WIRE_LIVE, 1), 0);
    rig_close(&r);
}
END_TEST

static int open_fds(void)
{
    int n = 0;
    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) != -1;
    return n;
}

START_TEST(refits_and_failed_ones_leave_no_descriptor_behind)
{
    struct rig r;
    plain_rig(&r);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    rig_abort(&r); /* answered once the packet before it is closed */
    int before = open_fds();
    for (int i = 0; i < 5; i++) {
        free(rig_refit(&r, WIRE_VERIFY_FULL));
        free(errand(&r, WIRE_PUBLISH, r.workers[0].id, 0));
        r.attempt++;
        rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_PREPARED);
        rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_FAILED);
        rig_abort(&r);
    }
    rig_abort(&r);
    ck_assert_int_eq(open_fds(), before);
    rig_close(&r);
}
END_TEST

/* Whichever device fails, and whenever: one FAILED, then ABORT is answered. */
START_TEST(a_device_that_fails_is_told_once_and_the_rest_quiesces)
{
    int n_failed = 0;
    for (uint32_t item = 1; item < 40; item += 3) {
        struct rig r;
        plain_rig(&r);
        r.o.hello.host_fail_device = item % 4;
        r.o.hello.host_fail_at_item = item;
        rig_open(&r);
        rig_fill_sources(&r, 1);
        r.attempt++;
        uint32_t got = rig_answer(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL));
        if (got == WIRE_PREPARED)
            got = rig_answer(&r, rig_send_start(&r));
        if (got == WIRE_STAGED) { /* it had less to do than that */
            rig_close(&r);
            continue;
        }
        n_failed++;
        ck_assert_uint_eq(got, WIRE_FAILED);
        ck_assert_msg(r.packet->header.code == RS_EDEVICE, "item %u: %s", item,
                      rig_failure(&r)->text);
        ck_assert(!rig_receive(&r, 5));
        rig_abort(&r);
        r.attempt++;
        rig_expect(&r, rig_send_prepare(&r, WIRE_VERIFY_FULL, NULL), WIRE_FAILED);
        ck_assert_int_eq(r.packet->header.code, RS_EDEVICE);
        rig_close(&r);
    }
    ck_assert_int_ge(n_failed, 10);
}
END_TEST

START_TEST(marks_and_counters_add_up)
{
    struct rig r;
    plain_rig(&r);
    r.o.hello.network_bytes_per_s = 2e6; /* 268 KB at 2 ports: more than one PROGRESS */
    rig_open(&r);
    rig_fill_sources(&r, 1);
    free(rig_refit(&r, WIRE_VERIFY_FULL));
    uint64_t bytes = 64 * 48 * 2 + 4096 * 16 * 4;
    ck_assert_uint_eq(r.progress.total_bytes, bytes);
    ck_assert_uint_eq(r.progress.network_bytes, bytes);
    ck_assert_uint_eq(r.progress.network_bytes, plan_totals(r.plan)->network_bytes);
    ck_assert_uint_eq(r.progress.domain_bytes + r.progress.device_bytes, 0);
    ck_assert_uint_ge(r.n_progress, 3);
    ck_assert_uint_eq(r.progress.messages, r.program.n_messages / 2); /* all ends are here */
    ck_assert_uint_gt(r.progress.first_byte_ns, 0);
    ck_assert_uint_le(r.progress.first_byte_ns, r.progress.last_byte_ns);
    ck_assert_uint_le(r.progress.last_byte_ns, r.progress.verified_ns);
    ck_assert_uint_gt(r.progress.sources_read_ns, 0);
    rig_close(&r);
}
END_TEST

/* One tensor of 32768 floats, of one rank on both sides. */
static void one_tensor_rig(struct rig *r, uint32_t to_device)
{
    static const char *const layouts[] = {
        "{\"name\":\"s\",\"ranks\":1,\"tensors\":[{\"name\":\"a\",\"shape\":[32768],\"dtype\":"
        "\"float32\","
        "\"regions\":[{\"rank\":0,\"offset\":[0],\"size\":[32768]}]}]}",
        "{\"name\":\"d\",\"ranks\":1,\"tensors\":[{\"name\":\"a\",\"shape\":[32768],\"dtype\":"
        "\"float32\","
        "\"regions\":[{\"rank\":0,\"offset\":[0],\"size\":[32768]}]}]}"};
    memset(r, 0, sizeof *r);
    r->o.n_devices = 1 + to_device;
    r->o.domain[1] = 1;
    r->o.plan = plan_options_default();
    r->o.hello.n_threads = 1;
    rig_side(r, 0, layouts[0], 0, 1);
    rig_side(r, 1, layouts[1], to_device, 1);
}

/* From the first byte to the last: all of it is one message, or one chunk of a copy, of which nothing is told before its
 * end. */
static uint64_t wire_ns(struct rig *r)
{
    rig_open(r);
    rig_fill_sources(r, 1);
    free(rig_refit(r, WIRE_VERIFY_FULL));
    ck_assert_uint_eq(r->progress.done_bytes, 32768 * 4);
    ck_assert_uint_gt(r->progress.first_byte_ns, 0);
    ck_assert_uint_ge(r->progress.last_byte_ns, r->progress.first_byte_ns);
    uint64_t ns = r->progress.last_byte_ns - r->progress.first_byte_ns;
    rig_close(r);
    return ns;
}

/* The transport keeps the rate; a burst of 1 ms and a chunk of 16 KiB may be ahead of it at either end. */
START_TEST(the_first_byte_of_messages_is_marked_when_it_moves)
{
    static const char *const transports[] = {"memory", "tcp"};
    for (size_t i = 0; i < 2; i++) {
        struct rig r;
        one_tensor_rig(&r, 1);
        r.o.hello.network_bytes_per_s = 2e6;
        (void)snprintf(r.o.hello.transport, sizeof r.o.hello.transport, "%s", transports[i]);
        ck_assert_uint_ge(wire_ns(&r), (32768 * 4 - 2 * 16384) * UINT64_C(500) - 2000000);
    }
}
END_TEST

/* What the copy takes is the delay of its stream: with this seed more than 5 ms. */
START_TEST(the_first_byte_of_copies_is_marked_when_it_moves)
{
    struct rig r;
    one_tensor_rig(&r, 0);
    r.o.hello.host_seed = 7;
    r.o.hello.host_max_delay_us = 50000;
    ck_assert_uint_ge(wire_ns(&r), 5000000);
}
END_TEST

/* --- memory that is out ----------------------------------------------------------------------- */

static bool run_out(long n)
{
    struct rig r;
    plain_rig(&r);
    return rig_runs_out(&r, n, true);
}

START_TEST(without_memory_requests_fail_and_nothing_crashes)
{
    long quiet = 0;
    for (long n = 1; quiet < 3; n += 1 + n / 12)
        quiet = run_out(n) ? 0 : quiet + 1;
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_element_lands_for_random_layouts)                                                      \
    X(every_element_lands_with_casts)                                                              \
    X(every_element_lands_directly_and_by_gather_broadcast)                                        \
    X(every_element_lands_under_delays_and_poison)                                                 \
    X(publish_apply_and_check_answer_the_fingerprint_of_each_tensor)                               \
    X(publish_by_a_programs_cells_gives_the_same_and_serves_prepare)                               \
    X(a_source_that_changes_after_its_publication_is_caught_at_prepare)                            \
    X(a_source_that_changes_between_prepare_and_sending_is_blamed)                                 \
    X(held_cells_are_not_moved_and_a_damaged_one_is_blamed)                                        \
    X(random_held_cells_are_left_alone)                                                            \
    X(after_quiesced_no_byte_lands_and_the_next_attempt_is_clean)                                  \
    X(the_end_of_the_socket_ends_the_process_and_memory_stays)                                     \
    X(past_its_lease_it_drops_everything)                                                          \
    X(work_that_was_queued_does_not_land_past_the_lease)                                           \
    X(unbind_waits_for_the_attempt)                                                                \
    X(packets_that_make_no_sense_are_answered_and_change_nothing)                                  \
    X(a_message_of_another_attempt_is_refused)                                                     \
    X(a_cell_that_is_not_bound_is_refused_at_prepare)                                              \
    X(refits_and_failed_ones_leave_no_descriptor_behind)                                           \
    X(a_device_that_fails_is_told_once_and_the_rest_quiesces)                                      \
    X(the_first_byte_of_messages_is_marked_when_it_moves)                                          \
    X(the_first_byte_of_copies_is_marked_when_it_moves)                                            \
    X(marks_and_counters_add_up)                                                                   \
    X(without_memory_requests_fail_and_nothing_crashes)

#include "test/lib/main.h"
