/* A sample of the source, fingerprinted by the plain scalar twin of the kernels as well.
 *
 * Source and destination are fingerprinted by the same kernels, and a cast's result by the cast itself: one that is wrong
 * in the same way each time agrees with itself. So before PREPARED, per source place, up to SAMPLE_BYTES of up to
 * SAMPLE_CELLS cells (most of them casts; drawn by the version) are copied, and both the device's kernels and
 * kernels_reference.c, which shares no code with them, cast and fingerprint that copy: the source itself may be written
 * too early, which is found elsewhere and is no kernel's fault.
 *
 *   fetch    the elements as they lie → `copied`: by the scalar twin, or where only the device reaches them by the device,
 *            into pinned memory
 *   fast     on the stream that takes the source's fingerprints
 *   compute  the scalar twin, on that stream's thread; then back to the loop, which compares
 *
 * Of cells that the place makes (scaled.h) up to SCALED_CELLS more are looked at, by one block each: sample_scaled.c. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"
#include "exec/attempt.h"
#include "exec/sample_scaled.h"
#include "layout/scale.h"

#include "base/banned.h"

/* SAMPLE_CASTS: of SAMPLE_CELLS, the most that are casts while there are others. */
enum { SAMPLE_CELLS = 64, SAMPLE_CASTS = 48, SAMPLE_BYTES = 4096 };
/* SCALED_ELEMENTS: a block of 128 × 128, float32 at most; each begins at a multiple of SCALED_ALIGN. */
enum { SCALED_CELLS = 4, SCALED_ELEMENTS = 1 << 14, SCALED_ALIGN = 64 };
enum {
    COPIED_BYTES = SAMPLE_CELLS * SAMPLE_BYTES + SCALED_CELLS * (4 * SCALED_ELEMENTS + SCALED_ALIGN)
};

enum sample_kind { SAMPLE_PLAIN, SAMPLE_CAST, SAMPLE_MADE };

struct sample {
    uint32_t hold;
    uint64_t scale[2]; /* made: the number of the block whose elements are looked at */
    uint64_t fast, reference;
};

/* A box of a sample's cell, row-major from `at` on. */
struct sample_box {
    struct box box;
    uint32_t sample;
    uint32_t at;
};

struct sampler {
    struct mailbox_item item;
    struct attempt *attempt;
    uint32_t place;
    struct plane_way *way;
    struct sample samples[SAMPLE_CELLS + SCALED_CELLS];
    uint32_t n_samples;
    struct sample_box *boxes;
    size_t n_boxes, boxes_capacity;
    struct kernel_copy *fetches; /* where the CPU fetches */
    size_t n_fetches, fetches_capacity;
    uint8_t *copied; /* the way's: COPIED_BYTES, and as many for what is cast */
    uint32_t n_copied_bytes;
};

static bool on_host(const struct sampler *s)
{
    return strcmp(device_kind(s->way->device), "host") == 0;
}

/* --- which -------------------------------------------------------------------------------------- */

static struct program_cell cell_of(const struct attempt *a, uint32_t hold)
{
    return program_hold_cell(&a->program, hold);
}

static uint8_t dtype_at(const struct attempt *a, uint32_t hold)
{
    struct program_cell c = cell_of(a, hold);
    return place_dtype(&a->places[program_hold(&a->program, hold).place], c.tensor, c.wire);
}

/* NULL: it lies there. */
static const struct program_tensor *made_of(const struct attempt *a, uint32_t hold)
{
    const struct place *place = &a->places[program_hold(&a->program, hold).place];
    return place->made == 0 ? NULL : place_makes(place, cell_of(a, hold).tensor);
}

static enum sample_kind kind_of(const struct attempt *a, uint32_t hold)
{
    if (made_of(a, hold) != NULL)
        return SAMPLE_MADE;
    return dtype_at(a, hold) != cell_of(a, hold).wire ? SAMPLE_CAST : SAMPLE_PLAIN;
}

static bool is_candidate(const struct attempt *a, uint32_t hold, enum sample_kind kind)
{
    uint32_t cell = program_hold(&a->program, hold).cell;
    return kind_of(a, hold) == kind && attempt_checks(a, cell) &&
           program_cell_elements(&a->program, cell) > 0;
}

/* Each of the place's of that kind is as likely as another: the n-th replaces one of `most` by chance. */
static void draw(struct sampler *s, enum sample_kind kind, uint32_t most, uint64_t *state)
{
    uint32_t base = s->n_samples, first, end;
    uint64_t n = 0;
    if (kind == SAMPLE_MADE && s->attempt->places[s->place].made == 0)
        return;
    program_holds_of(&s->attempt->program, s->place, &first, &end);
    for (uint32_t i = first; i < end && most > 0; i++) {
        if (!is_candidate(s->attempt, i, kind))
            continue;
        uint64_t at = n < most ? n : random_next(state) % (n + 1);
        n++;
        if (at >= most)
            continue;
        s->samples[base + at] = (struct sample){.hold = i};
        s->n_samples += base + at == s->n_samples;
    }
}

/* --- the elements ------------------------------------------------------------------------------- */

static int box_add(struct sampler *s, uint32_t sample, const struct box *box)
{
    void *boxes = s->boxes;
    uint64_t bytes = box_elements(box) * dtype_bytes(dtype_at(s->attempt, s->samples[sample].hold));
    rs_assert(s->n_copied_bytes + bytes <= COPIED_BYTES);
    if (mem_grow(&boxes, &s->boxes_capacity, s->n_boxes + 1, sizeof(*s->boxes)) != 0)
        return RS_ENOMEM;
    s->boxes = boxes;
    s->boxes[s->n_boxes++] =
        (struct sample_box){.box = *box, .sample = sample, .at = s->n_copied_bytes};
    s->n_copied_bytes += (uint32_t)bytes;
    return 0;
}

/* The block of one of its elements (of scales: the elements of one), or so much of that as there is room for, as if the block were
 * no greater: what makes it does not depend on its size. */
static int block_add(struct sampler *s, uint32_t sample, uint64_t *state)
{
    const struct attempt *a = s->attempt;
    struct sample *x = &s->samples[sample];
    const struct program_tensor *t = made_of(a, x->hold);
    uint64_t n = program_cell_elements(&a->program, program_hold(&a->program, x->hold).cell);
    uint64_t at = random_next(state) % n;
    struct box one[2 * BOX_MAX_DIMS];
    (void)box_range(&a->program.boxes[cell_of(a, x->hold).box], at, at + 1, one);
    struct box scale = t->value == PROGRAM_SCALES ? one[0] : scale_touched(t->block, &one[0]);
    struct box elements = scale_elements(t->block, t->origin, &scale);
    if (elements.size[1] > SCALED_ELEMENTS)
        elements.size[1] = SCALED_ELEMENTS;
    if (elements.size[0] > SCALED_ELEMENTS / elements.size[1])
        elements.size[0] = SCALED_ELEMENTS / elements.size[1];
    memcpy(x->scale, scale.offset, sizeof(x->scale));
    s->n_copied_bytes = (s->n_copied_bytes + SCALED_ALIGN - 1) / SCALED_ALIGN * SCALED_ALIGN;
    return box_add(s, sample, &elements);
}

/* Of a small cell all, of a greater one what lies from some element on. */
static int boxes_add(struct sampler *s, uint32_t sample, uint64_t *state)
{
    const struct attempt *a = s->attempt;
    uint32_t hold = s->samples[sample].hold;
    uint64_t n = program_cell_elements(&a->program, program_hold(&a->program, hold).cell);
    uint64_t most = SAMPLE_BYTES / dtype_bytes(dtype_at(a, hold));
    if (made_of(a, hold) != NULL)
        return block_add(s, sample, state);
    uint64_t at = n > most ? random_next(state) % (n - most + 1) : 0;
    struct box boxes[2 * BOX_MAX_DIMS];
    unsigned n_boxes =
        box_range(&a->program.boxes[cell_of(a, hold).box], at, at + (n > most ? most : n), boxes);
    int r = 0;
    for (unsigned i = 0; i < n_boxes && r == 0; i++)
        r = box_add(s, sample, &boxes[i]);
    return r;
}

static uint32_t hold_of(const struct sampler *s, const struct sample_box *x)
{
    return s->samples[x->sample].hold;
}

static struct kernel_view copied_view(const struct sampler *s, const struct sample_box *x)
{
    struct kernel_view view = {.base = s->copied + x->at};
    int64_t stride = (int64_t)dtype_bytes(dtype_at(s->attempt, hold_of(s, x)));
    for (unsigned d = x->box.n_dims; d-- > 0;) {
        view.stride_bytes[d] = stride;
        stride *= (int64_t)x->box.size[d];
    }
    return view;
}

static struct kernel_copy copy_of(const struct box *part, const struct kernel_view *from,
                                  uint8_t from_dtype, uint8_t to_dtype)
{
    struct kernel_copy c = {
        .from = *from, .n_dims = part->n_dims, .from_dtype = from_dtype, .to_dtype = to_dtype};
    memcpy(c.size, part->size, sizeof(c.size));
    memcpy(c.offset, part->offset, sizeof(c.offset));
    return c;
}

/* --- fetch -------------------------------------------------------------------------------------- */

struct fetch_to {
    struct sampler *sampler;
    const struct sample_box *box;
};

static int on_part(const struct box *part, const struct kernel_view *view, void *arg)
{
    const struct fetch_to *to = arg;
    struct sampler *s = to->sampler;
    uint8_t dtype = dtype_at(s->attempt, hold_of(s, to->box));
    struct kernel_view target = copied_view(s, to->box);
    void *fetches = s->fetches;
    if (mem_grow(&fetches, &s->fetches_capacity, s->n_fetches + 1, sizeof(*s->fetches)) != 0)
        return RS_ENOMEM;
    s->fetches = fetches;
    for (unsigned d = 0; d < part->n_dims; d++)
        target.base = (uint8_t *)target.base +
                      (int64_t)(part->offset[d] - to->box->box.offset[d]) * target.stride_bytes[d];
    struct kernel_copy *c = &s->fetches[s->n_fetches++];
    *c = copy_of(part, view, dtype, dtype);
    c->to[0] = target;
    c->n_targets = 1;
    return 0;
}

static struct move move_of(const struct sampler *s, const struct sample_box *x)
{
    uint8_t dtype = dtype_at(s->attempt, hold_of(s, x));
    return (struct move){.tensor = cell_of(s->attempt, hold_of(s, x)).tensor,
                         .box = x->box,
                         .from_dtype = dtype,
                         .to_dtype = dtype};
}

static int fetch_add(struct sampler *s, struct batch *b, const struct sample_box *x)
{
    const struct place *place = &s->attempt->places[s->place];
    struct move m = move_of(s, x);
    const struct move_end to = {.compact = s->copied + x->at};
    struct fetch_to arg = {s, x};
    if (on_host(s))
        return place_views(place, m.tensor, &x->box, dtype_bytes(m.from_dtype), on_part, &arg);
    m.from.place = place;
    m.to = &to;
    m.n_to = 1;
    return batch_gather(b, &m);
}

static void fetch(void *arg)
{
    const struct sampler *s = arg;
    for (size_t i = 0; i < s->n_fetches; i++)
        kernel_copy_reference(&s->fetches[i]);
}

/* --- fast, compute ------------------------------------------------------------------------------ */

static struct sample_scaled scaled_of(struct sampler *s, const struct sample_box *x)
{
    const struct sample *sample = &s->samples[x->sample];
    return (struct sample_scaled){.tensor = made_of(s->attempt, sample->hold),
                                  .elements = x->box,
                                  .scale = {sample->scale[0], sample->scale[1]},
                                  .from = s->copied + x->at,
                                  .from_dtype = dtype_at(s->attempt, sample->hold),
                                  .made = s->copied + COPIED_BYTES + x->at};
}

static int fast_add(struct sampler *s, struct batch *b, const struct sample_box *x)
{
    struct move m = move_of(s, x);
    if (made_of(s->attempt, hold_of(s, x)) != NULL) {
        const struct sample_scaled block = scaled_of(s, x);
        return sample_scaled_fast(b, &block, &s->samples[x->sample].fast);
    }
    const struct move_end to = {.compact = s->copied + COPIED_BYTES + x->at};
    m.from.compact = s->copied + x->at;
    m.to_dtype = cell_of(s->attempt, hold_of(s, x)).wire;
    m.fingerprint = &s->samples[x->sample].fast;
    if (m.from_dtype == m.to_dtype)
        return batch_print_compact(b, &m);
    m.to = &to;
    m.n_to = 1;
    return batch_gather(b, &m);
}

static void compute_box(struct sampler *s, const struct sample_box *x)
{
    uint32_t hold = hold_of(s, x);
    const struct kernel_view view = copied_view(s, x);
    uint64_t *sum = &s->samples[x->sample].reference;
    if (made_of(s->attempt, hold) != NULL) {
        const struct sample_scaled block = scaled_of(s, x);
        sample_scaled_reference(&block, sum);
        return;
    }
    struct kernel_copy c =
        copy_of(&x->box, &view, dtype_at(s->attempt, hold), cell_of(s->attempt, hold).wire);
    c.fingerprint = sum;
    kernel_copy_reference(&c);
}

static void compute(void *arg)
{
    struct sampler *s = arg;
    for (size_t i = 0; i < s->n_boxes; i++)
        compute_box(s, &s->boxes[i]);
    (void)mailbox_post(&s->attempt->plane->mailbox, &s->item);
}

static int enqueue(struct sampler *s)
{
    struct batch b;
    int r = 0;
    batch_init(&b, s->way->check, &s->way->check_work);
    for (size_t i = 0; r == 0 && i < s->n_boxes; i++)
        r = fetch_add(s, &b, &s->boxes[i]);
    if (r == 0)
        r = batch_flush(&b);
    if (r == 0 && s->n_fetches > 0)
        r = device_call(s->way->check, fetch, s);
    for (size_t i = 0; r == 0 && i < s->n_boxes; i++)
        r = fast_add(s, &b, &s->boxes[i]);
    if (r == 0)
        r = batch_flush(&b);
    return r == 0 ? device_call(s->way->check, compute, s) : r;
}

/* --- what came of it ------------------------------------------------------------------------------ */

/* What the kernel makes of it. */
static void made_text(const struct attempt *a, const struct sample *x, char *ret, size_t n_bytes)
{
    const char *from = dtype_name((enum dtype)dtype_at(a, x->hold));
    const char *wire = dtype_name((enum dtype)cell_of(a, x->hold).wire);
    const struct program_tensor *t = made_of(a, x->hold);
    if (t != NULL && t->value == PROGRAM_SCALES)
        (void)snprintf(ret, n_bytes, "the scale of a block of %s", from);
    else if (t != NULL)
        (void)snprintf(ret, n_bytes, "%s to %s by the block's scale", from, wire);
    else if (strcmp(from, wire) != 0)
        (void)snprintf(ret, n_bytes, "%s to %s", from, wire);
    else
        (void)snprintf(ret, n_bytes, "%s", from);
}

static void differs(struct attempt *a, const struct sampler *s, const struct sample *x)
{
    char text[512], made[96];
    struct err e;
    const struct device *d = s->way->device;
    uint32_t cell = program_hold(&a->program, x->hold).cell;
    attempt_describe(a, cell, s->place, text, sizeof(text));
    made_text(a, x, made, sizeof(made));
    int r = err_set(&e, RS_EDATALOSS,
                    "%s: of the same bytes of it the %s kernel of device %u makes %s with "
                    "fingerprint %016llx, the scalar one %016llx",
                    text, on_host(s) ? kernel_host_name() : device_kind(d), device_local(d), made,
                    (unsigned long long)x->fast, (unsigned long long)x->reference);
    attempt_fail(a, r, &e, a->program.tensors[program_cell(&a->program, cell).tensor].index,
                 s->place);
}

static void computed(struct mailbox_item *item)
{
    struct sampler *s = container_of(item, struct sampler, item);
    struct attempt *a = s->attempt;
    struct err e = {0};
    int r = device_error(s->way->device, &e);
    a->n_sampling--;
    if (r != 0)
        attempt_fail(a, r, &e, UINT32_MAX, UINT32_MAX);
    for (uint32_t i = 0; r == 0 && i < s->n_samples; i++) {
        if (s->samples[i].fast == s->samples[i].reference)
            continue;
        differs(a, s, &s->samples[i]);
        break;
    }
    attempt_settle(a);
}

/* --- life --------------------------------------------------------------------------------------- */

/* In the stream's order: samplers of one way use it one after another. */
static int memory_ready(struct sampler *s, struct err *e)
{
    void *p = NULL;
    int r = RS_ENOMEM;
    if (s->way->sample == NULL && on_host(s)) {
        s->way->sample = mem_alloc(2 * COPIED_BYTES);
    } else if (s->way->sample == NULL) {
        int fd = memfd_create("reshard-sample", MFD_CLOEXEC);
        if (fd >= 0 && ftruncate(fd, 2 * COPIED_BYTES) == 0)
            r = device_map(s->way->device, fd, 2 * COPIED_BYTES, true, &p, e);
        if (fd >= 0 && r != 0)
            (void)close(fd);
        s->way->sample = p;
    }
    s->copied = s->way->sample;
    return s->copied != NULL ? 0 : err_set(e, r, "no memory to look at a sample of the source");
}

void sample_memory_free(struct plane_way *way)
{
    if (way->sample != NULL && strcmp(device_kind(way->device), "host") != 0)
        device_unmap(way->device, way->sample, 2 * COPIED_BYTES);
    else
        mem_free(way->sample);
    way->sample = NULL;
}

static void sampler_free(struct sampler *s)
{
    if (s == NULL)
        return;
    mem_free(s->boxes);
    mem_free(s->fetches);
    mem_free(s);
}

static int sampler_run(struct sampler *s, uint64_t *state, struct err *e)
{
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < s->n_samples; i++)
        r = boxes_add(s, i, state);
    if (r != 0)
        return err_set(e, r, "out of memory");
    if ((r = memory_ready(s, e)) != 0)
        return r;
    r = enqueue(s);
    if (r == 0) {
        s->attempt->n_sampling++;
        return 0;
    }
    plane_settle(s->attempt->plane, s->way->device, &s->way->check);
    return err_set(e, r, "a sample of the source on device %u: %s", device_local(s->way->device),
                   err_name(r));
}

static int sampler_new(struct attempt *a, uint32_t place, struct err *e)
{
    struct plane_device *d = &a->plane->devices[a->places[place].device];
    uint64_t state = a->request.version + ((uint64_t)place << 48);
    struct sampler *s = mem_zalloc(sizeof(*s));
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    a->samplers[place] = s;
    s->attempt = a;
    s->place = place;
    s->way = &d->ways[place % a->plane->n_ways];
    s->item.fn = computed;
    queue_init(&s->item.link);
    draw(s, SAMPLE_CAST, SAMPLE_CASTS, &state);
    draw(s, SAMPLE_PLAIN, SAMPLE_CELLS - s->n_samples, &state);
    draw(s, SAMPLE_MADE, SCALED_CELLS, &state);
    return s->n_samples > 0 ? sampler_run(s, &state, e) : 0;
}

int samples_begin(struct attempt *a, struct err *e)
{
    int r = 0;
    a->samplers = mem_calloc(a->program.n_places, sizeof(struct sampler *));
    if (a->samplers == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; r == 0 && i < a->program.n_places && a->verify != WIRE_VERIFY_OFF; i++)
        if (a->program.places[i].side == PROGRAM_SOURCE)
            r = sampler_new(a, i, e);
    return r;
}

void samples_close(struct attempt *a)
{
    for (uint32_t i = 0; a->samplers != NULL && i < a->program.n_places; i++)
        sampler_free(a->samplers[i]);
    mem_free(a->samplers);
    a->samplers = NULL;
}
