/* Messages of a leg, by formula: both ends cut the same, and nothing is listed.
 *
 * Nominal cuts lie at multiples of message_step. A real cut is the nominal one rounded down to
 * where a box can be cut well: the start of its item where that is small (at most cut_bytes), else
 * a whole number of the item's rows (the longest suffix of dims of at most cut_bytes), at least an
 * element. Rounding moves a cut by less than cut_bytes = message_bytes - message_step, so no
 * message is longer than message_bytes and none is empty.
 *
 * The round of message i is (start + time(i * step)) / U with U = message_bytes (twice that, and one more inside
 * domains, where both tiers have messages: plan_round). Why what depends
 * lies later: let a relay's message i bring on the run's bytes up to b. Those came in with parent
 * messages whose nominal begin is at most b + cut_bytes into the parent's run, so their rounds are
 * at most (P + time(b + cut)) / U with P the run's start there. The relay's leg starts at P + 2 U +
 * cut or later (plus the difference in length where it is the faster), and b is at most one message
 * beyond i * step: so its round is at least one more. */
#include "plan/plan_private.h"

#include "base/banned.h"

static bool single(const struct plan *p, const struct plan_leg *l)
{
    return l->bytes <= p->message_bytes;
}

uint64_t leg_messages(const struct plan *p, const struct plan_leg *l)
{
    return single(p, l) ? 1 : (l->bytes - 1) / p->message_step + 1;
}

static uint32_t round_at(const struct plan *p, const struct plan_leg *l, uint64_t nominal)
{
    uint8_t tier = p->streams.at[l->stream].tier;
    return (uint32_t)plan_round(p, tier, l->start + plan_time(p, tier, nominal));
}

uint32_t leg_last_round(const struct plan *p, const struct plan_leg *l)
{
    return round_at(p, l, (leg_messages(p, l) - 1) * p->message_step);
}

/* Bytes that cuts inside the box are multiples of; `bytes` of the box for a small one. */
uint64_t plan_cut_unit(const struct plan *p, const struct plan_shape *s, const struct box *b)
{
    uint64_t unit = s->wire_bytes;
    int d = b->n_dims - 1;
    for (; d >= 0 && unit * b->size[d] <= p->cut_bytes; d--)
        unit *= b->size[d];
    /* Whole blocks: else the sender reads those at the cut twice. */
    if (s->value == PLAN_QUANTISED && d == 0 && s->block[0] <= p->cut_bytes / unit)
        unit *= s->block[0];
    return unit;
}

static const struct plan_run *cursor_run(const struct plan *p, const struct plan_leg *l,
                                         const struct leg_cursor *c)
{
    const struct plan_edge *e = &p->edges.at[p->leg_edges.at[l->first_edge + c->edge]];
    const struct plan_batch *b = &p->batches.at[e->first_batch + c->batch];
    return &p->runs.at[p->batch_runs.at[b->first_run + c->run]];
}

static void next_run(const struct plan *p, const struct plan_edge *e, struct leg_cursor *c)
{
    c->started = false;
    if (++c->run < p->batches.at[e->first_batch + c->batch].n_runs)
        return;
    c->run = 0;
    if (++c->batch < e->n_batches)
        return;
    c->batch = 0;
    c->edge++;
}

/* To the stretch of equal members that holds the nominal cut. */
static void seek(const struct plan *p, const struct plan_leg *l, struct leg_cursor *c,
                 uint64_t nominal)
{
    for (;;) {
        const struct plan_edge *e = &p->edges.at[p->leg_edges.at[l->first_edge + c->edge]];
        const struct plan_run *r = cursor_run(p, l, c);
        if (!c->started) {
            run_walk_init(p, r, &c->walk);
            (void)run_walk_next(p, r, &c->walk);
            c->started = true;
        }
        uint64_t stretch = c->walk.n * c->walk.bytes;
        if (nominal < c->begin + stretch)
            return;
        c->begin += stretch;
        if (!run_walk_next(p, r, &c->walk))
            next_run(p, e, c);
    }
}

/* The real cut for a nominal one: in the stretch that the cursor comes to. */
static uint64_t cut_at(const struct plan *p, const struct plan_leg *l, struct leg_cursor *c,
                       uint64_t nominal)
{
    if (nominal >= l->bytes)
        return l->bytes;
    seek(p, l, c, nominal);
    const struct plan_run *r = cursor_run(p, l, c);
    uint64_t begin = c->begin + (nominal - c->begin) / c->walk.bytes * c->walk.bytes;
    if (c->walk.bytes <= p->cut_bytes)
        return begin;
    struct box b;
    plan_piece_box(p, c->walk.shape, p->groups.at[r->group].cell, r->piece, &b);
    uint64_t unit = plan_cut_unit(p, c->walk.shape, &b);
    return begin + (nominal - begin) / unit * unit;
}

void leg_message(const struct plan *p, const struct plan_leg *l, uint64_t i, struct leg_cursor *c,
                 uint64_t *ret_begin, uint64_t *ret_end, uint32_t *ret_round)
{
    *ret_round = round_at(p, l, i * p->message_step);
    *ret_begin = i == 0 ? 0 : cut_at(p, l, c, i * p->message_step);
    *ret_end = i + 1 == leg_messages(p, l) ? l->bytes : cut_at(p, l, c, (i + 1) * p->message_step);
}

uint32_t leg_round_of(const struct plan *p, const struct plan_leg *l, uint64_t at)
{
    if (single(p, l))
        return round_at(p, l, 0);
    uint64_t i = at / p->message_step;
    struct leg_cursor c = {0};
    if (i + 1 < leg_messages(p, l) && cut_at(p, l, &c, (i + 1) * p->message_step) <= at)
        i++;
    return round_at(p, l, i * p->message_step);
}
