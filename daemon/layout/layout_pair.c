/* Source and destination layout together: do they describe the same model? */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "layout/layout.h"
#include "layout/region.h"

#include "base/banned.h"

/* Faults of one kind: how many, and the text of the first few. */
struct faults {
    uint32_t n;
    size_t at;
    char text[240];
};

enum { SHOWN = 3 };

static void fault_add(struct faults *f, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Drops the last character of a text that was cut, since only a part of it may be left. */
static void trim(char *text)
{
    size_t n = strlen(text);
    while (n > 0 && ((unsigned char)text[n - 1] & 0xC0) == 0x80)
        n--;
    text[n > 0 ? n - 1 : 0] = '\0';
}

static void fault_add(struct faults *f, const char *format, ...)
{
    if (f->n++ >= SHOWN || f->at >= sizeof f->text)
        return;
    int n = snprintf(f->text + f->at, sizeof f->text - f->at, f->n > 1 ? ", " : "");
    f->at += n > 0 ? (size_t)n : 0;
    if (f->at >= sizeof f->text)
        return;
    va_list args;
    va_start(args, format);
    n = vsnprintf(f->text + f->at, sizeof f->text - f->at, format, args);
    va_end(args);
    f->at += n > 0 ? (size_t)n : 0;
    if (f->at >= sizeof f->text)
        trim(f->text);
}

struct pair {
    const struct layout *source, *destination;
    struct faults missing, unexpected, shape, dtype, gap;
};

static char *shape_text(const struct tensor *t, char *text, size_t capacity)
{
    size_t at = 0;
    for (unsigned d = 0; d < t->n_dims && at < capacity; d++) {
        int n = snprintf(text + at, capacity - at, "%s%" PRIu64, d == 0 ? "[" : ", ", t->shape[d]);
        at += n > 0 ? (size_t)n : 0;
    }
    if (at < capacity)
        (void)snprintf(text + at, capacity - at, t->n_dims == 0 ? "[]" : "]");
    return text;
}

static bool shapes_equal(const struct tensor *a, const struct tensor *b)
{
    return a->n_dims == b->n_dims && memcmp(a->shape, b->shape, a->n_dims * sizeof *a->shape) == 0;
}

bool layout_dtypes_agree(const struct tensor *s, const struct tensor *d)
{
    if (d->scaled_by != 0)
        return s->dtype == DTYPE_BFLOAT16 || s->dtype == DTYPE_FLOAT32;
    return s->dtype == d->dtype || (d->cast && dtype_can_cast(s->dtype, d->dtype));
}

static void check_dtype(struct pair *p, const struct tensor *s, const struct tensor *d)
{
    if (layout_dtypes_agree(s, d))
        return;
    if (d->scaled_by != 0)
        fault_add(&p->dtype,
                  "'%s' is %s at the source: block scales can be derived from bfloat16 and float32",
                  d->name, dtype_name(s->dtype));
    else if (!d->cast)
        fault_add(&p->dtype, "'%s' is %s at the source and %s here (declare \"cast\": true?)",
                  d->name, dtype_name(s->dtype), dtype_name(d->dtype));
    else
        fault_add(&p->dtype, "'%s': no cast from %s to %s is known", d->name, dtype_name(s->dtype),
                  dtype_name(d->dtype));
}

/* Comparisons of one tensor's regions with one another that are worth waiting for. */
static const uint64_t GAP_BUDGET = UINT64_C(1) << 28;

/* The first part that the destination needs and no source region holds: 1, 0 or an error. */
static int needed_gap(const struct tensor *s, const struct tensor *d, struct box *ret_missing)
{
    struct box whole = box_whole(s->n_dims, s->shape);
    const struct region **held = NULL, **needed = NULL;
    uint32_t n_held, n_needed = 0;
    int r = region_distinct(s, &held, &n_held);
    if (r == 0)
        r = region_gap(held, n_held, &whole, ret_missing);
    if (r == 1 && d->mesh < 0) {
        r = region_distinct(d, &needed, &n_needed);
        if (r == 0 && (uint64_t)n_held * n_needed > GAP_BUDGET)
            r = RS_EEXHAUSTED;
        for (uint32_t i = 0; r == 0 && i < n_needed; i++)
            r = region_gap(held, n_held, &needed[i]->box, ret_missing);
    }
    mem_free(held);
    mem_free(needed);
    return r;
}

static int check_gap(struct pair *p, const struct tensor *s, const struct tensor *d, struct err *e)
{
    struct box missing;
    char text[256];
    if (s->mesh >= 0)
        return 0;
    int r = needed_gap(s, d, &missing);
    if (r == 1)
        fault_add(&p->gap, "'%s' %s", d->name, box_text(&missing, text, sizeof text));
    else if (r == RS_EEXHAUSTED)
        return err_set(e, r, "tensor '%s': too many regions with gaps to compare", d->name);
    return r < 0 ? r : 0;
}

static int check_tensor_pair(struct pair *p, const struct tensor *s, const struct tensor *d,
                             struct err *e)
{
    char x[96], y[96];
    if (d->derived_from != NULL)
        return 0;
    if (!shapes_equal(s, d)) {
        fault_add(&p->shape, "'%s' is %s at the source and %s here", d->name,
                  shape_text(s, x, sizeof x), shape_text(d, y, sizeof y));
        return 0;
    }
    check_dtype(p, s, d);
    return check_gap(p, s, d, e);
}

/* Walks both name-sorted lists in step. */
static int check_names(struct pair *p, struct err *e)
{
    uint32_t i = 0, k = 0;
    int r = 0;
    while (r == 0 && (i < p->source->n_tensors || k < p->destination->n_tensors)) {
        const struct tensor *s = i < p->source->n_tensors ? &p->source->tensors[i] : NULL;
        const struct tensor *d = k < p->destination->n_tensors ? &p->destination->tensors[k] : NULL;
        int order = s == NULL ? 1 : d == NULL ? -1 : strcmp(s->name, d->name);
        if (order < 0)
            fault_add(&p->unexpected, "'%s'", s->name);
        else if (order > 0 && d->derived_from == NULL)
            fault_add(&p->missing, "'%s'", d->name);
        else if (order == 0)
            r = check_tensor_pair(p, s, d, e);
        i += order <= 0;
        k += order >= 0;
    }
    return r;
}

static int faults_say(const struct faults *f, const char *what, char *text, size_t capacity)
{
    size_t at = strlen(text);
    if (f->n == 0)
        return 0;
    return snprintf(text + at, capacity - at, "%s%" PRIu32 " %s: %s%s", at == 0 ? "" : "; ", f->n,
                    what, f->text, f->n > SHOWN ? ", …" : "");
}

static int pair_result(const struct pair *p, struct err *e)
{
    char text[ERR_TEXT_BYTES] = "";
    if (p->missing.n + p->shape.n + p->dtype.n + p->gap.n == 0)
        return 0;
    (void)faults_say(&p->missing, "missing at the source", text, sizeof text);
    (void)faults_say(&p->shape, "with another shape", text, sizeof text);
    (void)faults_say(&p->dtype, "with another dtype", text, sizeof text);
    (void)faults_say(&p->gap, "with a needed part that no source rank holds", text, sizeof text);
    (void)faults_say(&p->unexpected, "unexpected, in the source only", text, sizeof text);
    return err_set(e, RS_EPRECOND, "layout '%s' against source '%s': %s", p->destination->name,
                   p->source->name, text);
}

int layout_check_pair(const struct layout *source, const struct layout *destination, struct err *e)
{
    struct pair p = {.source = source, .destination = destination};
    int r = check_names(&p, e);
    if (r == RS_ENOMEM)
        return err_set(e, r, "out of memory");
    return r == 0 ? pair_result(&p, e) : r;
}
