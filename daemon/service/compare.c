#include "service/compare.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "exec/wire.h"
#include "service/state.h"

#include "base/banned.h"

/* MAX_SHARDS: boxes of one rank that are compared one by one; more are compared as a sum only. MAX_ALSO: tensors that are
 * named beside the first that is wrong. */
enum { MAX_SHARDS = 64, MAX_ALSO = 8 };

/* --- sources ------------------------------------------------------------------------------------ */

struct shards {
    struct box boxes[MAX_SHARDS];
    uint32_t n; /* in all; may be more than MAX_SHARDS */
};

static void shards_read(const struct layout *l, uint32_t t, uint32_t rank, struct shards *ret)
{
    ret->n = layout_shards(l, t, rank, ret->boxes, MAX_SHARDS);
}

static bool shards_equal(const struct shards *a, const struct shards *b)
{
    if (a->n != b->n || a->n > MAX_SHARDS)
        return false;
    for (uint32_t i = 0; i < a->n; i++)
        if (!box_equal(&a->boxes[i], &b->boxes[i]))
            return false;
    return true;
}

static uint64_t shards_elements(const struct shards *s)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < s->n && i < MAX_SHARDS; i++)
        n += box_elements(&s->boxes[i]);
    return n;
}

/* Ranks by what they hold of a tensor: open addressing, linear; a slot is free where it is of another tensor. */
struct replica {
    uint32_t tensor; /* + 1 */
    uint32_t rank;
};

struct sources {
    const struct layout *l;
    struct publication *const *publications;
    struct shards mine, other;
    struct replica *replicas;
    size_t n_replicas; /* slots: a power of two, more than ranks */
};

static int sources_open(struct sources *s)
{
    s->n_replicas = 2;
    while (s->n_replicas < 2 * (size_t)s->l->n_ranks)
        s->n_replicas *= 2;
    s->replicas = mem_calloc(s->n_replicas, sizeof *s->replicas);
    return s->replicas != NULL ? 0 : RS_ENOMEM;
}

static uint64_t mix(uint64_t hash, uint64_t x)
{
    uint64_t state = hash ^ x;
    return random_next(&state);
}

static uint64_t shards_hash(const struct shards *s)
{
    uint64_t hash = s->n;
    for (uint32_t i = 0; i < s->n && i < MAX_SHARDS; i++)
        for (unsigned d = 0; d < s->boxes[i].n_dims; d++)
            hash = mix(mix(hash, s->boxes[i].offset[d]), s->boxes[i].size[d]);
    return hash;
}

/* The lowest rank that holds exactly what `rank` holds of t (s->mine); ranks come in ascending order. */
static uint32_t replica_of(struct sources *s, uint32_t t, uint32_t rank)
{
    size_t mask = s->n_replicas - 1, i = shards_hash(&s->mine) & mask;
    for (; s->replicas[i].tensor == t + 1; i = (i + 1) & mask) {
        shards_read(s->l, t, s->replicas[i].rank, &s->other);
        if (shards_equal(&s->other, &s->mine))
            return s->replicas[i].rank;
    }
    s->replicas[i] = (struct replica){t + 1, rank};
    return rank;
}

static int replicas_differ(const struct layout *l, uint32_t t, const struct shards *s, uint32_t a,
                           uint32_t b, struct err *e)
{
    char box[160];
    return err_set(e, RS_EDATALOSS,
                   "tensor '%s' %s: source ranks %u and %u hold the same part but published "
                   "different content; "
                   "publish again from equal weights",
                   l->tensors[t].name, box_text(&s->boxes[0], box, sizeof box), a, b);
}

/* Replicas agree; the sum over distinct parts, and how many elements it is over. */
static int tensor_sum(struct sources *s, uint32_t t, uint64_t *ret_sum, uint64_t *ret_elements,
                      struct err *e)
{
    uint64_t sum = 0, elements = 0;
    for (uint32_t rank = 0; rank < s->l->n_ranks; rank++) {
        if (s->publications[rank] == NULL)
            continue;
        shards_read(s->l, t, rank, &s->mine);
        if (s->mine.n == 0)
            continue;
        uint64_t fingerprint = s->publications[rank]->fingerprints[t];
        uint32_t first = replica_of(s, t, rank);
        if (first != rank && s->publications[first]->fingerprints[t] != fingerprint)
            return replicas_differ(s->l, t, &s->mine, first, rank, e);
        if (first != rank)
            continue;
        sum += fingerprint;
        elements += shards_elements(&s->mine);
    }
    *ret_sum = sum;
    *ret_elements = elements;
    return 0;
}

/* What some client has computed itself for whole tensor t. */
static const struct publication_print *expected_find(const struct layout *l, uint32_t t,
                                                     struct publication *const *publications,
                                                     uint32_t *ret_rank)
{
    for (uint32_t rank = 0; rank < l->n_ranks; rank++)
        for (uint32_t i = 0; publications[rank] != NULL && i < publications[rank]->n_expected; i++)
            if (publications[rank]->expected[i].tensor == t) {
                *ret_rank = rank;
                return &publications[rank]->expected[i];
            }
    return NULL;
}

static int expected_check(const struct layout *l, uint32_t t,
                          struct publication *const *publications, uint64_t sum, uint64_t elements,
                          struct err *e)
{
    uint32_t rank;
    const struct publication_print *x = expected_find(l, t, publications, &rank);
    if (x == NULL)
        return 0;
    struct box whole = box_whole(l->tensors[t].n_dims, l->tensors[t].shape);
    if (elements != box_elements(&whole))
        return err_set(e, RS_EPRECOND,
                       "tensor '%s': its expected fingerprint can't be checked, since what the "
                       "sources hold is "
                       "not each part once",
                       l->tensors[t].name);
    if (x->fingerprint == sum)
        return 0;
    return err_set(e, RS_EDATALOSS,
                   "tensor '%s': source rank %u expects fingerprint %016" PRIx64
                   " for the whole tensor, the buffers hold %016" PRIx64
                   "; the layout or a binding says something else than the framework",
                   l->tensors[t].name, rank, x->fingerprint, sum);
}

/* Another tensor, behind the text about the first; n_before: how many there have been. */
static void also_differs(const struct layout *l, uint32_t t, uint32_t n_before, struct err *e)
{
    if (e == NULL || n_before > MAX_ALSO)
        return;
    const struct err before = *e;
    (void)err_set(e, before.code, "%s%s '%s'%s", before.text, n_before == 1 ? "; also wrong:" : ",",
                  l->tensors[t].name, n_before == MAX_ALSO ? " and perhaps more" : "");
}

int compare_sources(const struct layout *l, struct publication *const *publications, struct err *e)
{
    struct sources *s = mem_zalloc(sizeof *s);
    if (s != NULL) {
        s->l = l;
        s->publications = publications;
    }
    int r = s == NULL || sources_open(s) != 0
                ? err_set(e, RS_ENOMEM, "no memory to compare the sources")
                : 0;
    uint32_t n_wrong = 0;
    for (uint32_t t = 0; r == 0 && t < l->n_tensors; t++) {
        uint64_t sum = 0, elements = 0;
        struct err also, *to = n_wrong == 0 ? e : &also;
        r = tensor_sum(s, t, &sum, &elements, to);
        if (r == 0)
            r = expected_check(l, t, publications, sum, elements, to);
        if (r != RS_EDATALOSS)
            continue;
        if (n_wrong++ > 0)
            also_differs(l, t, n_wrong - 1, e);
        r = 0;
    }
    if (s != NULL)
        mem_free(s->replicas);
    mem_free(s);
    return n_wrong > 0 ? RS_EDATALOSS : r;
}

/* --- destinations ------------------------------------------------------------------------------- */

struct landed {
    const struct plan_entry *plan;
    const struct program *p;
    const uint64_t *holds;
    enum compare_mode mode;
    uint32_t *reference; /* per cell: hold + 1 that all others are compared with; 0: none */
};

static bool is_taken(const struct landed *l, uint32_t hold)
{
    struct program_cell cell = program_hold_cell(l->p, hold);
    return l->mode == COMPARE_FULL || wire_sampled(l->p->digest, cell.id);
}

static const struct program_place *place_of(const struct landed *l, uint32_t hold)
{
    return &l->p->places[program_hold(l->p, hold).place];
}

static const char *tensor_name(const struct landed *l, uint32_t hold)
{
    struct program_cell cell = program_hold_cell(l->p, hold);
    return plan_entry_tensor(l->plan, cell.tensor);
}

static const char *layout_name(const struct landed *l, const struct program_place *place)
{
    return place->side == PROGRAM_SOURCE ? l->plan->source->layout->name
                                         : l->plan->destinations[place->layout]->layout->name;
}

static int blame(const struct landed *l, uint32_t hold, uint32_t reference, struct err *e)
{
    char box[160];
    const struct program_place *bad = place_of(l, hold), *good = place_of(l, reference);
    struct program_cell cell = program_hold_cell(l->p, hold);
    return err_set(e, RS_EDATALOSS,
                   "tensor '%s' %s: layout '%s' rank %u holds fingerprint %016" PRIx64
                   " where layout '%s' rank %u %s %016" PRIx64,
                   tensor_name(l, hold), box_text(&l->p->boxes[cell.box], box, sizeof box),
                   layout_name(l, bad), bad->rank, l->holds[hold], layout_name(l, good), good->rank,
                   good->side == PROGRAM_SOURCE ? "sent" : "holds", l->holds[reference]);
}

/* Sources first: they are what the rest is held against. */
static void references_choose(struct landed *l)
{
    for (int sources = 1; sources >= 0; sources--)
        for (uint32_t i = 0; i < l->p->n_holds; i++) {
            bool source = place_of(l, i)->side == PROGRAM_SOURCE;
            if (source == (sources == 1) && is_taken(l, i) &&
                l->reference[program_hold(l->p, i).cell] == 0)
                l->reference[program_hold(l->p, i).cell] = i + 1;
        }
}

static int cells_compare(const struct landed *l, uint32_t *ret_place, struct err *e)
{
    for (uint32_t i = 0; i < l->p->n_holds; i++) {
        if (!is_taken(l, i))
            continue;
        uint32_t reference = l->reference[program_hold(l->p, i).cell] - 1;
        if (l->holds[i] == l->holds[reference])
            continue;
        if (place_of(l, i)->side == PROGRAM_DESTINATION)
            *ret_place = program_hold(l->p, i).place;
        return blame(l, i, reference, e);
    }
    return 0;
}

/* One source place whose holds are [begin, end): what it sent of whole shards is what it had published. */
static int published_compare(const struct landed *l, uint32_t begin, uint32_t end,
                             const struct publication *published, uint64_t *sum, uint64_t *elements,
                             struct err *e)
{
    const struct program *p = l->p;
    const struct layout *layout = l->plan->source->layout;
    uint32_t rank = place_of(l, begin)->rank;
    memset(sum, 0, p->n_tensors * sizeof *sum);
    memset(elements, 0, p->n_tensors * sizeof *elements);
    for (uint32_t i = begin; i < end; i++) {
        struct program_cell cell = program_hold_cell(p, i);
        if (!program_unchanged(&p->tensors[cell.tensor], cell.wire))
            continue;
        sum[cell.tensor] += l->holds[i];
        elements[cell.tensor] += program_cell_elements(p, program_hold(p, i).cell);
    }
    for (uint32_t t = 0; t < p->n_tensors; t++) {
        struct shards s;
        if (elements[t] == 0 || sum[t] == published->fingerprints[p->tensors[t].index])
            continue;
        shards_read(layout, p->tensors[t].index, rank, &s);
        if (s.n > MAX_SHARDS || shards_elements(&s) != elements[t])
            continue;
        return err_set(e, RS_EDATALOSS,
                       "tensor '%s': source rank %u sent other content than it had published; "
                       "weights must not "
                       "be written before the version is released",
                       layout->tensors[p->tensors[t].index].name, rank);
    }
    return 0;
}

static int sources_compare(const struct landed *l, struct publication *const *publications,
                           struct err *e)
{
    const struct program *p = l->p;
    uint64_t *sum = mem_calloc(p->n_tensors, 2 * sizeof *sum);
    int r = sum == NULL ? err_set(e, RS_ENOMEM, "no memory to compare fingerprints") : 0;
    for (uint32_t begin = 0, end; r == 0 && begin < p->n_holds; begin = end) {
        for (end = begin + 1;
             end < p->n_holds && program_hold(p, end).place == program_hold(p, begin).place;)
            end++;
        const struct program_place *place = place_of(l, begin);
        if (place->side != PROGRAM_SOURCE)
            continue;
        const struct publication *published = publications[place->rank];
        if (published != NULL && published->fingerprints != NULL)
            r = published_compare(l, begin, end, published, sum, sum + p->n_tensors, e);
    }
    mem_free(sum);
    return r;
}

static void sums_add(const struct landed *l, uint64_t **sums)
{
    const struct program *p = l->p;
    for (uint32_t i = 0; i < p->n_holds; i++) {
        const struct program_place *place = place_of(l, i);
        if (place->side != PROGRAM_DESTINATION || sums[program_hold(p, i).place] == NULL)
            continue;
        uint32_t t = program_hold_cell(p, i).tensor;
        uint32_t mine = l->plan->tensor_of[(size_t)place->layout * p->n_tensors + t];
        if (mine != UINT32_MAX)
            sums[program_hold(p, i).place][mine] += l->holds[i];
    }
}

int compare_landed(const struct plan_entry *plan, const uint64_t *holds, enum compare_mode mode,
                   struct publication *const *publications, uint64_t **sums, uint32_t *ret_place,
                   struct err *e)
{
    struct landed l = {.plan = plan, .p = &plan->program, .holds = holds, .mode = mode};
    *ret_place = PROGRAM_NONE;
    if (mode == COMPARE_OFF)
        return 0;
    l.reference = mem_calloc(l.p->n_cells, sizeof *l.reference);
    if (l.reference == NULL)
        return err_set(e, RS_ENOMEM, "no memory to compare fingerprints");
    references_choose(&l);
    int r = cells_compare(&l, ret_place, e);
    mem_free(l.reference);
    if (r == 0 && mode == COMPARE_FULL)
        r = sources_compare(&l, publications, e);
    if (r == 0 && mode == COMPARE_FULL)
        sums_add(&l, sums);
    return r;
}
