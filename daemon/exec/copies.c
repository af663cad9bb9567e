/* An attempt's local copies: from one place of the node to others, beside the messages. */
#include "base/clock.h"
#include "exec/attempt.h"
#include "exec/scaled.h"

#include "base/banned.h"

enum { COPY_CHUNK_BYTES = 2 << 20, MAX_TARGETS = 256 };

/* A copy out of memory that this refit itself writes waits until that has landed. */
static bool source_ready(const struct attempt *a, struct program_item item)
{
    if (a->program.places[item.from].side == PROGRAM_SOURCE)
        return true;
    uint32_t hold = attempt_hold(a, item.from, item.cell);
    return hold == PROGRAM_NONE || a->hold_state[hold] != HOLD_WAITING ||
           (a->held != NULL && a->held[hold] != 0);
}

/* Elements [begin, end) of the item to all its targets. Returns the bytes written. */
static int move_part(struct copier *c, struct batch *b, uint32_t number, uint64_t begin,
                     uint64_t end, uint64_t *ret_bytes)
{
    struct attempt *a = c->attempt;
    struct program_item item = program_item(&a->program, number);
    struct program_cell cell = program_cell(&a->program, item.cell);
    uint32_t targets[MAX_TARGETS], n = attempt_targets(a, number, targets, MAX_TARGETS);
    struct move_end to[MAX_TARGETS];
    struct box boxes[2 * BOX_MAX_DIMS];
    int r = 0;
    for (uint32_t i = 0; i < n; i++)
        to[i] = (struct move_end){.place = &a->places[targets[i]]};
    unsigned n_boxes = n > 0 ? box_range(&a->program.boxes[cell.box], begin, end, boxes) : 0;
    for (unsigned i = 0; i < n_boxes && r == 0; i++)
        r = batch_move(
            b, &(struct move){
                   .tensor = cell.tensor,
                   .box = boxes[i],
                   .from = {.place = &a->places[item.from]},
                   .to = to,
                   .n_to = n,
                   .from_dtype = place_dtype(&a->places[item.from], cell.tensor, cell.wire),
                   .to_dtype = cell.wire,
                   .streaming = true,
                   .fingerprint = attempt_checks(a, item.cell) ? &a->item_print[number] : NULL});
    *ret_bytes += (end - begin) * dtype_bytes(cell.wire) * n;
    return r;
}

static int part(struct copier *c, struct batch *b, uint64_t *budget, uint64_t *bytes)
{
    struct attempt *a = c->attempt;
    struct program_cell cell = program_item_cell(&a->program, c->item);
    uint64_t n = program_cell_elements(&a->program, program_item(&a->program, c->item).cell);
    uint64_t size = dtype_bytes(cell.wire);
    uint64_t end = c->at + (*budget / size > 0 ? *budget / size : 1), used;
    end = end < n ? end : n;
    used = (end - c->at) * size;
    if (c->at < n &&
        place_makes(&a->places[program_item(&a->program, c->item).from], cell.tensor) != NULL)
        end = scaled_part(&a->program, program_item(&a->program, c->item).cell, c->at, *budget,
                          &used);
    int r = end > c->at ? move_part(c, b, c->item, c->at, end, bytes) : 0;
    *budget -= used < *budget ? used : *budget;
    c->at = end;
    if (end == n) {
        c->item++;
        c->at = 0;
    }
    return r;
}

static int copier_fill(struct pump *p, struct pump_ticket *t)
{
    struct copier *c = container_of(p, struct copier, pump);
    struct batch b;
    uint64_t budget = COPY_CHUNK_BYTES;
    uint32_t began = c->item;
    uint64_t began_at = c->at, now = clock_mono_ns(); /* a full batch goes to the device at once */
    int r = 0;
    batch_init(&b, *p->stream, c->work);
    t->bytes = 0;
    while (r == 0 && budget > 0 && c->item < c->end &&
           source_ready(c->attempt, program_item(&c->attempt->program, c->item)))
        r = part(c, &b, &budget, &t->bytes);
    if (r == 0)
        r = batch_flush(&b);
    t->end = c->item;
    if (t->bytes > 0)
        attempt_moves(c->attempt, now);
    if (r == 0 && c->item == began && c->at == began_at)
        return 0;
    return r < 0 ? r : 1;
}

/* Bytes by tier: to the device that read them, or to another one. */
static void count_tiers(struct attempt *a, uint32_t number)
{
    struct program_item item = program_item(&a->program, number);
    uint32_t targets[MAX_TARGETS], n = attempt_targets(a, number, targets, MAX_TARGETS);
    uint64_t bytes = program_cell_bytes(&a->program, item.cell);
    for (uint32_t i = 0; i < n; i++)
        *(a->places[targets[i]].device == a->places[item.from].device
              ? &a->progress.device_bytes
              : &a->progress.domain_bytes) += bytes;
}

static void copier_landed(struct pump *p, const struct pump_ticket *t)
{
    struct copier *c = container_of(p, struct copier, pump);
    attempt_count(c->attempt, t->bytes);
    for (; c->landed < t->end; c->landed++) {
        count_tiers(c->attempt, c->landed);
        attempt_item_done(c->attempt, c->landed, c->attempt->item_left[c->landed]);
    }
    attempt_landed(c->attempt);
}

static void copier_idle(struct pump *p)
{
    struct attempt *a = container_of(p, struct copier, pump)->attempt;
    if (p->status != 0) {
        struct err e;
        (void)err_set(&e, p->status, "copies on device %u: %s", device_local(p->device->device),
                      err_name(p->status));
        attempt_fail(a, p->status, &e, UINT32_MAX, UINT32_MAX);
    }
    attempt_settle(a);
}

/* The first copy of the share that begins where `share` of `n_shares` of the bytes are done. */
static uint32_t share_begin(const struct attempt *a, const struct program_device *pd,
                            uint64_t all_bytes, uint32_t share, uint32_t n_shares)
{
    uint64_t bytes = 0, most = all_bytes / n_shares * share;
    uint32_t i = pd->first_copy, end = pd->first_copy + pd->n_copies;
    while (share < n_shares && i < end && bytes < most) {
        uint64_t each = program_cell_bytes(&a->program, program_item(&a->program, i).cell);
        uint32_t n = program_like_items(&a->program, i, end - i);
        if (each > 0 && (most - bytes + each - 1) / each < n)
            n = (uint32_t)((most - bytes + each - 1) / each);
        bytes += n * each;
        i += n;
    }
    return share == n_shares ? end : i;
}

void copiers_init(struct attempt *a, uint32_t device)
{
    const struct program_device *pd = &a->program.devices[device];
    struct plane_device *d = &a->plane->devices[device];
    uint32_t n = a->plane->n_ways;
    uint64_t bytes = 0;
    for (uint32_t i = pd->first_copy, end = i + pd->n_copies, like; i < end; i += like) {
        like = program_like_items(&a->program, i, end - i);
        bytes += like * program_cell_bytes(&a->program, program_item(&a->program, i).cell);
    }
    for (uint32_t w = 0; w < n; w++) {
        struct copier *c = &a->copiers[device * n + w];
        c->attempt = a;
        c->item = share_begin(a, pd, bytes, w, n);
        c->end = share_begin(a, pd, bytes, w + 1, n);
        c->landed = c->item;
        c->work = &d->ways[w].copy_work;
        pump_init(&c->pump, a->plane, d, &d->ways[w].copy);
        c->pump.fill = copier_fill;
        c->pump.landed = copier_landed;
        c->pump.idle = copier_idle;
    }
}

void copier_kick(struct copier *c)
{
    if (c->item < c->end)
        pump_run(&c->pump);
}
