/* What PREPARE has proved of a program is kept for the next one, and for nothing else. */
#include <check.h>
#include <fcntl.h>

#include "exec/prints.h"
#include "exec/proof.h"
#include "plan/program_format.h"
#include "test/lib/rig.h"

static const char *const ROWS =
    "{\"name\":\"s\",\"ranks\":2,\"meshes\":[{\"name\":\"m\",\"shape\":[2],\"ranks\":[0,1]}],"
    "\"tensors\":[{\"name\":\"a\",\"shape\":[64,48],\"dtype\":\"bfloat16\",\"mesh\":\"m\","
    "\"placements\":[\"Shard(0)\"]},{\"name\":\"b\",\"shape\":[32,16],\"dtype\":\"float32\","
    "\"mesh\":\"m\",\"placements\":[\"Shard(0)\"]}]}";
static const char *const COLUMNS =
    "{\"name\":\"d\",\"ranks\":2,\"meshes\":[{\"name\":\"m\",\"shape\":[2],\"ranks\":[0,1]}],"
    "\"tensors\":[{\"name\":\"a\",\"shape\":[64,48],\"dtype\":\"bfloat16\",\"mesh\":\"m\","
    "\"placements\":[\"Shard(1)\"]},{\"name\":\"b\",\"shape\":[32,16],\"dtype\":\"float32\","
    "\"mesh\":\"m\",\"placements\":[\"Shard(1)\"]}]}";

static void rig_of(struct rig *r, const char *source, const char *destination)
{
    memset(r, 0, sizeof(*r));
    r->o.n_devices = 4;
    for (uint32_t i = 0; i < 4; i++)
        r->o.domain[i] = i;
    r->o.plan = plan_options_default();
    r->o.plan.chunk_bytes = 4096;
    r->o.plan.ring_slots = 2;
    r->o.plan.least_piece_bytes = 256;
    rig_side(r, 0, source, 0, 2);
    rig_side(r, 1, destination, 2, 2);
}

static void refit_lands(struct rig *r, uint64_t version)
{
    r->version = version;
    rig_fill_sources(r, version);
    free(rig_refit(r, WIRE_VERIFY_FULL));
    ck_assert_uint_eq(rig_wrong(r, WIRE_LIVE, version), 0);
}

static void prepare_is_refused(struct rig *r)
{
    r->attempt++;
    rig_expect(r, rig_send_prepare(r, WIRE_VERIFY_FULL, NULL), WIRE_FAILED);
    ck_assert_int_eq(r->packet->header.code, RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(rig_failure(r)->text, "is not bound"));
}

/* Rank 0 of the destination binds what rank 1 should. */
static void bind_wrong(struct rig *r)
{
    struct rig_memory own = r->workers[2].memory[WIRE_LIVE];
    r->workers[2].memory[WIRE_LIVE].pieces = r->workers[3].memory[WIRE_LIVE].pieces;
    rig_bind(r, &r->workers[2], WIRE_LIVE);
    r->workers[2].memory[WIRE_LIVE] = own;
}

/* --- what is kept holds ------------------------------------------------------------------------ */

START_TEST(a_binding_that_came_since_is_looked_at_again)
{
    struct rig r;
    rig_of(&r, ROWS, COLUMNS);
    rig_open(&r);
    refit_lands(&r, 1);
    refit_lands(&r, 2);
    bind_wrong(&r);
    prepare_is_refused(&r);
    prepare_is_refused(&r);
    rig_bind(&r, &r.workers[2], WIRE_LIVE);
    refit_lands(&r, 3);
    rig_close(&r);
}
END_TEST

START_TEST(a_worker_that_came_anew_under_its_number_is_looked_at_again)
{
    struct rig r;
    rig_of(&r, ROWS, COLUMNS);
    rig_open(&r);
    refit_lands(&r, 1);
    rig_expect(&r, rig_send(&r, WIRE_UNBIND, r.workers[2].id, NULL, 0, NULL, 0, NULL, 0),
               WIRE_UNBOUND);
    rig_map(&r, &r.workers[2], WIRE_LIVE);
    bind_wrong(&r);
    prepare_is_refused(&r);
    rig_bind(&r, &r.workers[2], WIRE_LIVE);
    refit_lands(&r, 2);
    rig_close(&r);
}
END_TEST

START_TEST(memory_that_is_elsewhere_now_is_what_is_read_and_written)
{
    struct rig r;
    uint64_t seed = 77;
    rig_of(&r, ROWS, COLUMNS);
    r.o.fused = true;
    rig_open(&r);
    refit_lands(&r, 1);
    for (uint32_t i = 0; i < r.n_workers; i++) {
        struct rig_worker *w = &r.workers[i];
        struct rig_memory before = w->memory[WIRE_LIVE];
        rig_expect(&r, rig_send(&r, WIRE_UNBIND, w->id, NULL, 0, NULL, 0, NULL, 0), WIRE_UNBOUND);
        w->memory[WIRE_LIVE] = (struct rig_memory){0};
        rig_allocate(&w->memory[WIRE_LIVE], r.layouts[w->layout], w->rank, true, &seed);
        rig_map(&r, w, WIRE_LIVE);
        rig_bind(&r, w, WIRE_LIVE);
        munmap(before.data, before.bytes);
        close(before.fd);
        free(before.pieces);
    }
    refit_lands(&r, 2);
    rig_close(&r);
}
END_TEST

/* --- which is which ---------------------------------------------------------------------------- */

/* A plane of which nothing but its programs is looked at. */
static void plane_of(struct plane *p)
{
    memset(p, 0, sizeof(*p));
    queue_init(&p->proofs);
}

static uint32_t n_kept(const struct plane *p)
{
    uint32_t n = 0;
    queue_foreach (q, &p->proofs)
        n++;
    return n;
}

static struct proof *get(struct plane *p, int program, int tensors)
{
    struct proof *x = NULL;
    struct err e = {0};
    ck_assert_msg(proof_get(p, program, tensors, 1, &x, &e) == 0, "%s", e.text);
    return x;
}

START_TEST(the_same_files_are_one_program_and_others_are_not)
{
    struct rig r;
    struct plane p;
    rig_of(&r, ROWS, COLUMNS);
    rig_open(&r);
    plane_of(&p);
    int again = wire_memfd("program", r.encoded.data, r.encoded.n_bytes, NULL);
    int tensors = rig_index_fd(&r), twin = fcntl(r.program_fd, F_DUPFD_CLOEXEC, 3);
    struct proof *published = get(&p, r.program_fd, -1), *a = get(&p, r.program_fd, r.index_fd);
    ck_assert_ptr_eq(published, a);
    ck_assert_ptr_eq(get(&p, twin, r.index_fd), a);
    ck_assert_uint_eq(a->uses, 3);
    struct proof *other = get(&p, again, r.index_fd), *named = get(&p, r.program_fd, tensors);
    ck_assert_ptr_ne(other, a);
    ck_assert_ptr_ne(named, a);
    ck_assert_ptr_ne(named, other);
    for (int i = 0; i < 3; i++)
        proof_put(&p, a);
    ck_assert_uint_eq(n_kept(&p), 3);
    ck_assert_ptr_eq(get(&p, r.program_fd, r.index_fd), a); /* it was kept */
    proofs_forget(&p);
    ck_assert_uint_eq(n_kept(&p), 3); /* all are used */
    proof_put(&p, a);
    proof_put(&p, other);
    proof_put(&p, named);
    proofs_forget(&p);
    ck_assert_uint_eq(n_kept(&p), 0);
    close(again);
    close(tensors);
    close(twin);
    rig_close(&r);
}
END_TEST

START_TEST(few_are_kept_and_the_one_used_longest_ago_goes_first)
{
    struct rig r;
    struct plane p;
    int fds[12];
    rig_of(&r, ROWS, COLUMNS);
    rig_open(&r);
    plane_of(&p);
    for (int i = 0; i < 12; i++) {
        fds[i] = wire_memfd("program", r.encoded.data, r.encoded.n_bytes, NULL);
        proof_put(&p, get(&p, fds[i], r.index_fd));
        if (i > 0)
            proof_put(&p, get(&p, fds[0], r.index_fd)); /* in use all the time */
    }
    uint32_t kept = n_kept(&p);
    ck_assert_uint_ge(kept, 2);
    ck_assert_uint_le(kept, 4);
    const struct proof *newest = container_of(p.proofs.prev, struct proof, link);
    struct proof *first = get(&p, fds[0], r.index_fd);
    ck_assert_ptr_eq(first, newest);
    ck_assert_uint_eq(n_kept(&p), kept);
    proof_put(&p, first);
    proofs_forget(&p);
    ck_assert_uint_eq(n_kept(&p), 0);
    for (int i = 0; i < 12; i++)
        close(fds[i]);
    rig_close(&r);
}
END_TEST

/* --- holds and items --------------------------------------------------------------------------- */

/* Its index among the holds, by looking at all of them. */
static uint32_t hold_among(const struct program *p, uint32_t place, uint32_t cell)
{
    for (uint32_t i = 0; i < p->n_holds; i++)
        if (program_hold(p, i).place == place && program_hold(p, i).cell == cell)
            return i;
    return PROGRAM_NONE;
}

START_TEST(every_hold_is_found_and_no_other)
{
    uint32_t n_found = 0, n_missing = 0;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        struct rig r;
        struct plane p;
        char *source = rig_random_json(seed, seed + 1, "s", 2, 14, false);
        char *dest = rig_random_json(seed, seed + 2, "d", 2, 14, false);
        rig_of(&r, source, dest);
        rig_open(&r);
        plane_of(&p);
        struct proof *x = get(&p, r.program_fd, r.index_fd);
        for (uint32_t place = 0; place <= x->program.n_places; place++)
            for (uint32_t cell = 0; cell <= x->program.n_cells; cell++) {
                uint32_t wanted = hold_among(&x->program, place, cell);
                ck_assert_uint_eq(program_hold_at(&x->program, place, cell), wanted);
                n_found += wanted != PROGRAM_NONE;
                n_missing += wanted == PROGRAM_NONE;
            }
        ck_assert_int_eq(proof_items(x, NULL), 0);
        ck_assert_uint_eq(x->destination_bytes, plan_totals(r.plan)->destination_bytes);
        proof_put(&p, x);
        proofs_forget(&p);
        mem_free(source);
        mem_free(dest);
        rig_close(&r);
    }
    ck_assert_uint_gt(n_found, 100);
    ck_assert_uint_gt(n_missing, 100);
}
END_TEST

/* The first list of the program names another destination, which does not hold what it would be sent. */
START_TEST(items_that_go_where_their_cells_are_not_held_are_refused)
{
    struct rig r;
    struct plane p;
    struct err e = {0};
    rig_of(&r, ROWS, COLUMNS);
    rig_open(&r);
    plane_of(&p);
    uint8_t *bytes = malloc(r.encoded.n_bytes);
    memcpy(bytes, r.encoded.data, r.encoded.n_bytes);
    size_t at = (size_t)((const uint8_t *)r.program.lists - (const uint8_t *)r.encoded.data);
    uint32_t *list = (uint32_t *)(void *)(bytes + at), other = 0;
    ck_assert_uint_eq(list[0], 1);
    while (other == list[1] || r.program.places[other].side != PROGRAM_DESTINATION)
        other++;
    list[1] = other;
    int fd = wire_memfd("program", bytes, r.encoded.n_bytes, NULL);
    struct proof *x = NULL;
    ck_assert_int_eq(proof_get(&p, fd, r.index_fd, 1, &x, &e), 0);
    for (int i = 0; i < 2; i++) { /* a refusal is not taken for a proof */
        ck_assert_int_eq(proof_items(x, &e), RS_EPROTO);
        ck_assert_ptr_nonnull(strstr(e.text, "does not hold"));
    }
    proof_put(&p, x);
    proofs_forget(&p);
    close(fd);
    free(bytes);
    rig_close(&r);
}
END_TEST

/* Two tensors that are alike: their items are one run, of which the place's last hold is taken away. */
START_TEST(a_run_of_items_of_which_the_last_cell_is_not_held_is_refused)
{
    struct rig r;
    struct plane p;
    struct err e = {0};
    rig_of(&r,
           "{\"name\":\"s\",\"ranks\":1,\"meshes\":[{\"name\":\"m\",\"shape\":[1],\"ranks\":[0]}],"
           "\"tensors\":[{\"name\":\"a\",\"shape\":[64],\"dtype\":\"bfloat16\",\"mesh\":\"m\","
           "\"placements\":[\"Replicate\"]},{\"name\":\"b\",\"shape\":[64],\"dtype\":\"bfloat16\","
           "\"mesh\":\"m\",\"placements\":[\"Replicate\"]}]}",
           "{\"name\":\"d\",\"ranks\":1,\"meshes\":[{\"name\":\"m\",\"shape\":[1],\"ranks\":[0]}],"
           "\"tensors\":[{\"name\":\"a\",\"shape\":[64],\"dtype\":\"bfloat16\",\"mesh\":\"m\","
           "\"placements\":[\"Replicate\"]},{\"name\":\"b\",\"shape\":[64],\"dtype\":\"bfloat16\","
           "\"mesh\":\"m\",\"placements\":[\"Replicate\"]}]}");
    rig_open(&r);
    plane_of(&p);
    ck_assert_uint_eq(program_like_items(&r.program, 0, 2), 2);
    uint8_t *bytes = malloc(r.encoded.n_bytes);
    memcpy(bytes, r.encoded.data, r.encoded.n_bytes);
    ((struct program_header *)(void *)bytes)->n_holds--;
    int fd = wire_memfd("program", bytes, r.encoded.n_bytes, NULL);
    struct proof *x = NULL;
    ck_assert_int_eq(proof_get(&p, fd, r.index_fd, 1, &x, &e), 0);
    ck_assert_int_eq(proof_items(x, &e), RS_EPROTO);
    ck_assert_ptr_nonnull(strstr(e.text, "item 1: "));
    ck_assert_ptr_nonnull(strstr(e.text, "does not hold"));
    proof_put(&p, x);
    proofs_forget(&p);
    close(fd);
    free(bytes);
    rig_close(&r);
}
END_TEST

START_TEST(without_memory_it_says_so_and_the_next_one_is_whole)
{
    struct rig r;
    struct plane p;
    rig_of(&r, ROWS, COLUMNS);
    rig_open(&r);
    plane_of(&p);
    int code = RS_ENOMEM, n_failed = 0;
    for (long i = 1; code != 0; i++) {
        struct proof *x = NULL;
        mem_fail_at(i);
        code = proof_get(&p, r.program_fd, r.index_fd, 1, &x, NULL);
        mem_fail_at(0);
        ck_assert(code == 0 || code == RS_ENOMEM);
        n_failed += code != 0;
        ck_assert_int_eq(x != NULL, code == 0);
        if (code != 0)
            proofs_forget(&p);
        else
            ck_assert_int_eq(proof_items(x, NULL), 0);
        proof_put(&p, x);
    }
    ck_assert_int_ge(n_failed, 5);
    ck_assert_uint_eq(n_kept(&p), 1);
    proofs_forget(&p);
    rig_close(&r);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_binding_that_came_since_is_looked_at_again)                                                \
    X(a_worker_that_came_anew_under_its_number_is_looked_at_again)                                 \
    X(memory_that_is_elsewhere_now_is_what_is_read_and_written)                                    \
    X(the_same_files_are_one_program_and_others_are_not)                                           \
    X(few_are_kept_and_the_one_used_longest_ago_goes_first)                                        \
    X(every_hold_is_found_and_no_other)                                                            \
    X(items_that_go_where_their_cells_are_not_held_are_refused)                                    \
    X(a_run_of_items_of_which_the_last_cell_is_not_held_is_refused)                                \
    X(without_memory_it_says_so_and_the_next_one_is_whole)

#include "test/lib/main.h"
