/* Fingerprints of an attempt: source cells at PREPARE, destination cells once they have landed. */
#include <string.h>

#include "base/mem.h"
#include "exec/attempt.h"

#include "base/banned.h"

enum { CHECK_CHUNK_BYTES = 2 << 20 };

static bool is_source(const struct attempt *a, uint32_t hold)
{
    return a->program.places[program_hold(&a->program, hold).place].side == PROGRAM_SOURCE;
}

/* --- the pump --------------------------------------------------------------------------------- */

static int part(struct checker *c, struct batch *b, uint64_t *budget)
{
    struct attempt *a = c->attempt;
    uint32_t hold = c->queue[c->next];
    struct program_hold h = program_hold(&a->program, hold);
    int r = prints_cell(b, c->way, &a->program, &a->places[h.place], h.cell, &c->at, budget,
                        &a->hold_prints[hold]);
    if (c->at == program_cell_elements(&a->program, h.cell)) {
        c->next++;
        c->at = 0;
    }
    return r;
}

static int checker_fill(struct pump *p, struct pump_ticket *t)
{
    struct checker *c = container_of(p, struct checker, pump);
    struct batch b;
    uint64_t budget = CHECK_CHUNK_BYTES;
    int r = 0;
    if (c->next == c->n_queued)
        return 0;
    batch_init(&b, *p->stream, &c->way->check_work);
    while (r == 0 && budget > 0 && c->next < c->n_queued)
        r = part(c, &b, &budget);
    if (r == 0)
        r = batch_flush(&b);
    t->end = c->next;
    return r < 0 ? r : 1;
}

static void mismatch(struct attempt *a, uint32_t hold, uint32_t cell)
{
    char text[512];
    struct err e;
    uint32_t place = program_hold(&a->program, hold).place;
    attempt_describe(a, cell, place, text, sizeof(text));
    int r = err_set(&e, RS_EDATALOSS, "%s: what has landed differs from its source", text);
    attempt_fail(a, r, &e, a->program.tensors[program_cell(&a->program, cell).tensor].index, place);
}

static void hold_read(struct attempt *a, uint32_t hold)
{
    uint32_t cell = program_hold(&a->program, hold).cell;
    a->hold_state[hold] = HOLD_READ;
    if (is_source(a, hold))
        return;
    a->n_checks_left--;
    if (a->cell_known[cell] == 0 || a->cell_prints[cell] == a->hold_prints[hold])
        return;
    a->hold_state[hold] = HOLD_WRONG;
    mismatch(a, hold, cell);
}

static void checker_landed(struct pump *p, const struct pump_ticket *t)
{
    struct checker *c = container_of(p, struct checker, pump);
    while (c->n_done < t->end)
        hold_read(c->attempt, c->queue[c->n_done++]);
}

static void checker_idle(struct pump *p)
{
    struct attempt *a = container_of(p, struct checker, pump)->attempt;
    if (p->status != 0) {
        struct err e;
        (void)err_set(&e, p->status, "fingerprints on device %u: %s",
                      device_local(p->device->device), err_name(p->status));
        attempt_fail(a, p->status, &e, UINT32_MAX, UINT32_MAX);
    }
    attempt_settle(a);
}

int checkers_init(struct attempt *a, uint32_t device, uint32_t n_holds)
{
    struct plane_device *d = &a->plane->devices[device];
    for (uint32_t w = 0; w < a->plane->n_ways; w++) {
        struct checker *c = &a->checkers[device * a->plane->n_ways + w];
        c->attempt = a;
        c->way = &d->ways[w];
        c->queue = mem_calloc(n_holds, sizeof(*c->queue));
        if (c->queue == NULL)
            return RS_ENOMEM;
        pump_init(&c->pump, a->plane, d, &d->ways[w].check);
        c->pump.fill = checker_fill;
        c->pump.landed = checker_landed;
        c->pump.idle = checker_idle;
    }
    return 0;
}

/* To the way that has least to do, by count: cells of one plan are of similar size. */
struct checker *checker_add(struct attempt *a, uint32_t hold)
{
    uint32_t n = a->plane->n_ways;
    struct checker *c = &a->checkers[a->places[program_hold(&a->program, hold).place].device * n],
                   *least = c;
    for (uint32_t w = 1; w < n; w++)
        if (c[w].n_queued - c[w].n_done < least->n_queued - least->n_done)
            least = &c[w];
    least->queue[least->n_queued++] = hold;
    return least;
}

void checker_kick(struct checker *c)
{
    if (c->next < c->n_queued)
        pump_run(&c->pump);
}

/* --- sources ---------------------------------------------------------------------------------- */

/* The publication's own value, where it was taken by the cells of this very program. */
static bool published_cell(const struct attempt *a, uint32_t hold, uint32_t first,
                           uint64_t *ret_print)
{
    const struct worker *w = a->places[program_hold(&a->program, hold).place].worker;
    if (w->cell_prints == NULL || w->published_version != a->request.version ||
        hold - first >= w->n_cell_prints ||
        memcmp(w->cell_digest, a->program.digest, sizeof(w->cell_digest)) != 0)
        return false;
    *ret_print = w->cell_prints[hold - first];
    return true;
}

void verify_sources(struct attempt *a)
{
    uint32_t first = 0;
    for (uint32_t i = 0; i < a->program.n_holds; i++) {
        struct program_hold h = program_hold(&a->program, i);
        if (i == 0 || program_hold(&a->program, i - 1).place != h.place)
            first = i;
        if (!is_source(a, i) || !attempt_checks(a, h.cell) ||
            published_cell(a, i, first, &a->hold_prints[i]))
            continue;
        (void)checker_add(a, i);
    }
    for (uint32_t i = 0; i < a->n_pumps; i++)
        checker_kick(&a->checkers[i]);
}

/* Sums of a source place's cells, where they are all of the worker's part and in its own dtype. */
static int check_place(struct attempt *a, uint32_t place, uint64_t *sums, uint64_t *elements,
                       struct err *e)
{
    const struct worker *w = a->places[place].worker;
    const struct binding *b = w->bindings[a->places[place].memory];
    uint32_t first, end;
    program_holds_of(&a->program, place, &first, &end);
    memset(sums, 0, w->n_tensors * sizeof(*sums));
    memset(elements, 0, w->n_tensors * sizeof(*elements));
    for (uint32_t i = first; i < end; i++) {
        struct program_cell c = program_hold_cell(&a->program, i);
        const struct program_tensor *t = &a->program.tensors[c.tensor];
        if (!program_unchanged(t, c.wire))
            continue;
        sums[t->index] += a->hold_prints[i];
        elements[t->index] += program_cell_elements(&a->program, program_hold(&a->program, i).cell);
    }
    for (uint32_t t = 0; t < w->n_tensors; t++) {
        if (sums[t] != w->published[t] && binding_elements(b, t) == elements[t])
            return err_set(e, RS_EDATALOSS,
                           "tensor %u, place %u (source, rank %u): it has changed since it was "
                           "published",
                           t, place, a->program.places[place].rank);
    }
    return 0;
}

/* Replicas of a cell on this node must agree. */
static int know_cell(struct attempt *a, uint32_t hold, struct err *e)
{
    struct program_hold h = program_hold(&a->program, hold);
    char text[512];
    if (a->cell_known[h.cell] == 0) {
        a->cell_known[h.cell] = 1;
        a->cell_prints[h.cell] = a->hold_prints[hold];
        return 0;
    }
    if (a->cell_prints[h.cell] == a->hold_prints[hold])
        return 0;
    attempt_describe(a, h.cell, h.place, text, sizeof(text));
    return err_set(e, RS_EDATALOSS, "%s: differs from another replica of the source", text);
}

int verify_published(struct attempt *a, struct err *e)
{
    uint32_t most = 0;
    int r = 0;
    for (uint32_t i = 0; i < a->program.n_holds && r == 0; i++)
        if (is_source(a, i) && attempt_checks(a, program_hold(&a->program, i).cell))
            r = know_cell(a, i, e);
    if (r < 0 || a->verify != WIRE_VERIFY_FULL)
        return r;
    for (uint32_t i = 0; i < a->program.n_places; i++)
        if (a->places[i].worker != NULL && a->places[i].worker->n_tensors > most)
            most = a->places[i].worker->n_tensors;
    uint64_t *sums = mem_calloc(most, sizeof(*sums));
    uint64_t *elements = mem_calloc(most, sizeof(*elements));
    if (sums == NULL || elements == NULL)
        r = err_set(e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < a->program.n_places && r == 0; i++)
        if (a->program.places[i].side == PROGRAM_SOURCE && a->places[i].worker->published != NULL &&
            a->places[i].worker->published_version == a->request.version)
            r = check_place(a, i, sums, elements, e);
    mem_free(sums);
    mem_free(elements);
    return r;
}

/* --- destinations ----------------------------------------------------------------------------- */

void verify_landed(struct attempt *a, uint32_t hold)
{
    a->hold_state[hold] = HOLD_LANDED;
    a->n_landings_left--;
    if (!attempt_checks(a, program_hold(&a->program, hold).cell))
        return;
    (void)checker_add(a, hold);
}
