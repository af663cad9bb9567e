/* The rules that one layout must keep by itself (layout_check), and its canonical form.
 *
 * Order: names and meshes, each tensor, sort by name, derived tensors, instances. Each refusal
 * names mesh or tensor, the cause, and what would be right. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "layout/layout.h"
#include "layout/layout_check.h"
#include "layout/region.h"

#include "base/banned.h"

/* Decodes one UTF-8 character of at most n bytes: its length, or 0 where it is none (overlong
 * forms, surrogates and what lies beyond U+10FFFF included). */
static size_t utf8_next(const unsigned char *s, size_t n, uint32_t *ret_point)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t length = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    if (length == 0 || length > n || s[0] > 0xF4)
        return 0;
    uint32_t point = length == 1 ? s[0] : s[0] & (0x7FU >> length);
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
        point = point << 6 | (s[i] & 0x3FU);
    }
    if (point < least[length] || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF))
        return 0;
    *ret_point = point;
    return length;
}

/* Control, line separator and direction characters would forge log lines and tables. */
static bool printable(uint32_t point)
{
    return point >= 0x20 && !(point >= 0x7F && point <= 0x9F) && point != 0x2028 &&
           point != 0x2029 && !(point >= 0x202A && point <= 0x202E) &&
           !(point >= 0x2066 && point <= 0x2069) && point != 0x200E && point != 0x200F;
}

bool layout_name_valid(const char *name, size_t n_bytes)
{
    if (n_bytes == 0 || n_bytes > LAYOUT_MAX_NAME_BYTES)
        return false;
    for (size_t at = 0, step; at < n_bytes; at += step) {
        uint32_t point;
        step = utf8_next((const unsigned char *)name + at, n_bytes - at, &point);
        if (step == 0 || !printable(point))
            return false;
    }
    return true;
}

static int check_name(const char *name, const char *what, struct err *e)
{
    if (name == NULL || name[0] == '\0')
        return err_set(e, RS_EINVAL, "%s has no name", what);
    size_t n = strnlen(name, LAYOUT_MAX_NAME_BYTES + 1);
    if (n > LAYOUT_MAX_NAME_BYTES)
        return err_set(e, RS_EINVAL, "the name of %s is longer than %d bytes: '%.40s…'", what,
                       LAYOUT_MAX_NAME_BYTES, layout_name_valid(name, 40) ? name : "");
    if (!layout_name_valid(name, n))
        return err_set(e, RS_EINVAL,
                       "the name of %s is not printable UTF-8 (no control, line or direction "
                       "characters)",
                       what);
    return 0;
}

/* --- meshes -------------------------------------------------------------- */

static int compare_mesh_name(const void *a, const void *b)
{
    const struct mesh *x = *(const struct mesh *const *)a, *y = *(const struct mesh *const *)b;
    return strcmp(x->name, y->name);
}

static int check_mesh_names(const struct layout *l, struct err *e)
{
    const struct mesh **sorted = mem_calloc(l->n_meshes, sizeof *sorted);
    if (sorted == NULL)
        return RS_ENOMEM;
    int r = 0;
    for (uint32_t i = 0; i < l->n_meshes; i++)
        sorted[i] = &l->meshes[i];
    qsort(sorted, l->n_meshes, sizeof *sorted, compare_mesh_name);
    for (uint32_t i = 1; r == 0 && i < l->n_meshes; i++)
        if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0)
            r = err_set(e, RS_EINVAL, "mesh '%s' is declared twice", sorted[i]->name);
    mem_free(sorted);
    return r;
}

static int check_mesh_dim_names(const struct mesh *m, struct err *e)
{
    for (unsigned i = 0; i < m->n_dims; i++) {
        if (m->dim_names[i] == NULL)
            continue;
        int r = check_name(m->dim_names[i], "a mesh dim", e);
        for (unsigned j = 0; r == 0 && j < i; j++)
            if (m->dim_names[j] != NULL && strcmp(m->dim_names[i], m->dim_names[j]) == 0)
                r = err_set(e, RS_EINVAL, "dim name '%s' stands twice", m->dim_names[i]);
        if (r != 0)
            return r;
    }
    return 0;
}

static int check_mesh_shape(const struct layout *l, const struct mesh *m, struct err *e)
{
    if (m->n_dims < 1 || m->n_dims > LAYOUT_MAX_MESH_DIMS)
        return err_set(e, RS_EINVAL, "it has %u dims; a mesh has 1 to %d", m->n_dims,
                       LAYOUT_MAX_MESH_DIMS);
    uint64_t product = 1;
    for (unsigned i = 0; i < m->n_dims; i++) {
        if (m->shape[i] == 0)
            return err_set(e, RS_EINVAL, "dim %u has size 0; leave the dim out or give it ranks",
                           i);
        product *= m->shape[i]; /* < 2^20 · 2^32 */
        if (product > l->n_ranks)
            return err_set(e, RS_EINVAL,
                           "its shape needs at least %" PRIu64 " ranks, the layout has %" PRIu32,
                           product, l->n_ranks);
    }
    if (product != m->n_ranks)
        return err_set(e, RS_EINVAL,
                       "its shape needs %" PRIu64 " ranks, %" PRIu32
                       " are listed (ragged?); list them row by row",
                       product, m->n_ranks);
    return 0;
}

/* `seen[r]` is the mesh (plus 1) that had rank r last. */
static int check_mesh(const struct layout *l, uint32_t index, uint32_t *seen, struct err *e)
{
    const struct mesh *m = &l->meshes[index];
    int r = check_mesh_shape(l, m, e);
    if (r == 0)
        r = check_mesh_dim_names(m, e);
    for (uint32_t i = 0; r == 0 && i < m->n_ranks; i++) {
        uint32_t rank = m->ranks[i];
        if (rank >= l->n_ranks)
            return err_set(e, RS_EINVAL,
                           "rank %" PRIu32 " is unknown: the layout has ranks 0 to %" PRIu32, rank,
                           l->n_ranks - 1);
        if (seen[rank] == index + 1)
            return err_set(e, RS_EINVAL, "rank %" PRIu32 " stands in two places", rank);
        seen[rank] = index + 1;
    }
    return r;
}

static int check_meshes(const struct layout *l, struct err *e)
{
    uint32_t *seen = mem_calloc(l->n_ranks, sizeof *seen);
    if (seen == NULL)
        return RS_ENOMEM;
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < l->n_meshes; i++) {
        r = check_name(l->meshes[i].name, "a mesh", e);
        if (r == 0 && (r = check_mesh(l, i, seen, e)) != 0)
            r = err_prefix(e, r, "mesh '%s'", l->meshes[i].name);
    }
    mem_free(seen);
    return r == 0 ? check_mesh_names(l, e) : r;
}

/* --- tensors ------------------------------------------------------------- */

/* Adds the tensor's bytes to *total; zero-size dims count as 1, so that no partial product
 * overflows. */
static int check_sizes(const struct tensor *t, uint64_t *total, struct err *e)
{
    if (t->n_dims > BOX_MAX_DIMS)
        return err_set(e, RS_EINVAL, "it has %u dims; at most %d are supported", t->n_dims,
                       BOX_MAX_DIMS);
    uint64_t bytes = dtype_bytes(t->dtype);
    if (bytes == 0)
        return err_set(e, RS_EINVAL, "dtype %d is unknown", (int)t->dtype);
    for (unsigned d = 0; d < t->n_dims; d++) {
        uint64_t size = t->shape[d] == 0 ? 1 : t->shape[d];
        if (size > INT64_MAX || __builtin_mul_overflow(bytes, size, &bytes) || bytes > INT64_MAX)
            return err_set(e, RS_EINVAL, "its size is beyond 2^63 bytes");
    }
    *total += bytes; /* both below 2^63 */
    if (*total > INT64_MAX)
        return err_set(e, RS_EINVAL, "with it the layout is beyond 2^63 bytes");
    return 0;
}

static const char *mesh_dim_text(const struct mesh *m, unsigned i, char *text, size_t capacity)
{
    if (m->dim_names[i] != NULL)
        (void)snprintf(text, capacity, "'%s'", m->dim_names[i]);
    else
        (void)snprintf(text, capacity, "%u", i);
    return text;
}

static int check_placements(const struct tensor *t, const struct mesh *m, struct err *e)
{
    char dim[LAYOUT_MAX_NAME_BYTES + 3];
    for (unsigned i = 0; i < m->n_dims; i++) {
        int d = t->placements[i];
        if (d == LAYOUT_REPLICATE || (d >= 0 && d < t->n_dims))
            continue;
        if (t->n_dims == 0)
            return err_set(e, RS_EINVAL,
                           "placement Shard(%d) of mesh dim %s: the tensor has no dims; use "
                           "Replicate",
                           d, mesh_dim_text(m, i, dim, sizeof dim));
        return err_set(e, RS_EINVAL,
                       "placement Shard(%d) of mesh dim %s: the tensor has %u dims; use 0 to %u", d,
                       mesh_dim_text(m, i, dim, sizeof dim), t->n_dims, t->n_dims - 1U);
    }
    return 0;
}

/* The order matters only among mesh dims that cut the same tensor dim. In canonical form each
 * tensor dim's cutters keep their order but stand in ascending slots, the rest stand in their own.
 */
static int canonical_order(struct tensor *t, const struct mesh *m, struct err *e)
{
    unsigned seen = 0;
    for (unsigned k = 0; k < m->n_dims; k++) {
        unsigned i = t->shard_order[k];
        if (i >= m->n_dims || (seen & 1U << i) != 0)
            return err_set(e, RS_EINVAL,
                           "shard_order must name each of the %u mesh dims once, as 0 to %u",
                           m->n_dims, m->n_dims - 1U);
        seen |= 1U << i;
    }
    uint8_t canonical[LAYOUT_MAX_MESH_DIMS];
    for (unsigned slot = 0; slot < m->n_dims; slot++)
        canonical[slot] = (uint8_t)slot;
    for (int d = 0; d < t->n_dims; d++) {
        unsigned slot = 0;
        for (unsigned k = 0; k < m->n_dims; k++) {
            if (t->placements[t->shard_order[k]] != d)
                continue;
            while (t->placements[slot] != d)
                slot++;
            canonical[slot++] = t->shard_order[k];
        }
    }
    memcpy(t->shard_order, canonical, m->n_dims);
    return 0;
}

static int compare_rank_box(const void *a, const void *b)
{
    const struct region *x = a, *y = b;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return region_box_compare(&x->box, &y->box);
}

static int check_region(const struct layout *l, const struct tensor *t, const struct region *g,
                        struct err *e)
{
    if (g->rank >= l->n_ranks)
        return err_set(e, RS_EINVAL,
                       "rank %" PRIu32 " is unknown: the layout has ranks 0 to %" PRIu32, g->rank,
                       l->n_ranks - 1);
    if (g->box.n_dims != t->n_dims)
        return err_set(e, RS_EINVAL,
                       "the region of rank %" PRIu32 " has %u dims, the tensor has %u", g->rank,
                       g->box.n_dims, t->n_dims);
    for (unsigned d = 0; d < t->n_dims; d++)
        if (g->box.offset[d] > t->shape[d] || g->box.size[d] > t->shape[d] - g->box.offset[d])
            return err_set(e, RS_EINVAL,
                           "the region of rank %" PRIu32 " leaves the tensor in dim %u: offset "
                           "%" PRIu64 ", size %" PRIu64 ", length %" PRIu64,
                           g->rank, d, g->box.offset[d], g->box.size[d], t->shape[d]);
    return 0;
}

static int check_overlap(const struct tensor *t, struct err *e)
{
    const struct region **distinct, *a, *b;
    uint32_t n;
    if (region_distinct(t, &distinct, &n) != 0)
        return RS_ENOMEM;
    int r = region_overlap(distinct, n, &a, &b);
    if (r == 1) {
        char x[256], y[256];
        r = err_set(e, RS_EINVAL,
                    "region %s of rank %" PRIu32 " overlaps region %s of rank %" PRIu32
                    "; regions must be disjoint, or equal where they are replicas",
                    box_text(&a->box, x, sizeof x), a->rank, box_text(&b->box, y, sizeof y),
                    b->rank);
    } else if (r == RS_EEXHAUSTED) {
        r = err_set(e, r, "its %" PRIu32 " regions are too irregular to check for overlap", n);
    }
    mem_free(distinct);
    return r;
}

/* Regions in canonical form: without empty ones, by rank, then box. */
static int check_regions(const struct layout *l, struct tensor *t, struct err *e)
{
    if (t->n_regions > 0 && t->regions == NULL)
        return err_set(e, RS_EINVAL, "regions are missing");
    uint32_t kept = 0;
    for (uint32_t i = 0; i < t->n_regions; i++) {
        int r = check_region(l, t, &t->regions[i], e);
        if (r != 0)
            return r;
        if (!box_empty(&t->regions[i].box))
            t->regions[kept++] = t->regions[i];
    }
    struct box whole = box_whole(t->n_dims, t->shape);
    t->n_regions = kept;
    if (kept == 0)
        return box_empty(&whole)
                   ? 0
                   : err_set(e, RS_EINVAL, "no rank holds a part of it; give it a mesh or regions");
    qsort(t->regions, kept, sizeof *t->regions, compare_rank_box);
    for (uint32_t i = 1; i < kept; i++)
        if (compare_rank_box(&t->regions[i - 1], &t->regions[i]) == 0)
            return err_set(e, RS_EINVAL, "rank %" PRIu32 " lists the same region twice",
                           t->regions[i].rank);
    return check_overlap(t, e);
}

static int check_derived_fields(struct tensor *t, struct err *e)
{
    t->scaled_by = 0;
    if (t->derived_from == NULL)
        return 0;
    if (t->derived_block[0] == 0 || t->derived_block[1] == 0)
        return err_set(e, RS_EINVAL, "derived: block sizes must be greater than 0");
    return 0;
}

static int check_tensor(const struct layout *l, struct tensor *t, uint64_t *total, struct err *e)
{
    int r = check_sizes(t, total, e);
    if (r == 0)
        r = check_derived_fields(t, e);
    if (r != 0)
        return r;
    if (t->mesh < 0)
        return check_regions(l, t, e);
    if ((uint32_t)t->mesh >= l->n_meshes)
        return err_set(e, RS_EINVAL, "mesh %" PRId32 " does not exist", t->mesh);
    if (t->n_regions != 0)
        return err_set(e, RS_EINVAL, "it has a mesh and regions; keep one");
    r = check_placements(t, &l->meshes[t->mesh], e);
    return r == 0 ? canonical_order(t, &l->meshes[t->mesh], e) : r;
}

static int compare_tensor_name(const void *a, const void *b)
{
    const struct tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static bool tensors_sorted(const struct layout *l)
{
    for (uint32_t i = 1; i < l->n_tensors; i++)
        if (strcmp(l->tensors[i - 1].name, l->tensors[i].name) > 0)
            return false;
    return true;
}

static int check_tensors(struct layout *l, struct err *e)
{
    uint64_t total = 0, n_regions = 0;
    for (uint32_t i = 0; i < l->n_tensors; i++) {
        struct tensor *t = &l->tensors[i];
        int r = check_name(t->name, "a tensor", e);
        if (r != 0)
            return r;
        n_regions += t->n_regions;
        if (n_regions > LAYOUT_MAX_REGIONS)
            return err_set(e, RS_EEXHAUSTED, "tensor '%s': more than %d regions in the layout",
                           t->name, LAYOUT_MAX_REGIONS);
        r = check_tensor(l, t, &total, e);
        if (r != 0)
            return err_prefix(e, r, "tensor '%s'", t->name);
    }
    if (!tensors_sorted(l))
        qsort(l->tensors, l->n_tensors, sizeof *l->tensors, compare_tensor_name);
    for (uint32_t i = 1; i < l->n_tensors; i++)
        if (strcmp(l->tensors[i - 1].name, l->tensors[i].name) == 0)
            return err_set(e, RS_EINVAL, "tensor '%s' is declared twice; names must be unique",
                           l->tensors[i].name);
    return 0;
}

/* --- instances ----------------------------------------------------------- */

/* Marks the ranks that some tensor names (also those whose piece is empty: their workers take
 * part). */
static int mark_used_ranks(const struct layout *l, uint8_t *used)
{
    uint8_t *mesh_used = mem_zalloc(l->n_meshes);
    if (mesh_used == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < l->n_tensors; i++) {
        const struct tensor *t = &l->tensors[i];
        if (t->mesh >= 0)
            mesh_used[t->mesh] = 1;
        for (uint32_t k = 0; t->mesh < 0 && k < t->n_regions; k++)
            used[t->regions[k].rank] = 1;
    }
    for (uint32_t i = 0; i < l->n_meshes; i++)
        for (uint32_t k = 0; mesh_used[i] && k < l->meshes[i].n_ranks; k++)
            used[l->meshes[i].ranks[k]] = 1;
    mem_free(mesh_used);
    return 0;
}

/* One instance with all ranks that some tensor names, or with all ranks where there is none. */
static int default_instance(struct layout *l, const uint8_t *used)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < l->n_ranks; r++)
        n += used[r];
    bool all = n == 0;
    struct instance *one = mem_calloc(1, sizeof *one);
    uint32_t *ranks = mem_calloc(all ? l->n_ranks : n, sizeof *ranks);
    if (one == NULL || ranks == NULL) {
        mem_free(one);
        mem_free(ranks);
        return RS_ENOMEM;
    }
    mem_free(l->instances);
    *one = (struct instance){.ranks = ranks};
    for (uint32_t r = 0; r < l->n_ranks; r++)
        if (all || used[r])
            ranks[one->n_ranks++] = r;
    l->instances = one;
    l->n_instances = 1;
    return 0;
}

static int compare_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static int compare_instance(const void *a, const void *b)
{
    const struct instance *x = a, *y = b;
    return compare_u32(&x->ranks[0], &y->ranks[0]);
}

/* Takes the ranks of one instance off `used`, where 2 marks a rank that some instance has already.
 */
static int check_instance(const struct layout *l, uint32_t index, uint8_t *used, struct err *e)
{
    struct instance *in = &l->instances[index];
    if (in->n_ranks == 0)
        return err_set(e, RS_EINVAL, "instance %" PRIu32 " has no ranks", index);
    for (uint32_t i = 0; i < in->n_ranks; i++) {
        uint32_t rank = in->ranks[i];
        if (rank >= l->n_ranks)
            return err_set(e, RS_EINVAL,
                           "instance %" PRIu32 ": rank %" PRIu32
                           " is unknown: the layout has ranks 0 to %" PRIu32,
                           index, rank, l->n_ranks - 1);
        if (used[rank] == 2)
            return err_set(e, RS_EINVAL,
                           "instance %" PRIu32 ": rank %" PRIu32
                           " is in an instance already; instances must not overlap",
                           index, rank);
        used[rank] = 2;
    }
    qsort(in->ranks, in->n_ranks, sizeof *in->ranks, compare_u32);
    return 0;
}

static int check_instances(struct layout *l, struct err *e)
{
    uint8_t *used = mem_zalloc(l->n_ranks);
    if (used == NULL)
        return RS_ENOMEM;
    int r = mark_used_ranks(l, used);
    if (r == 0 && l->n_instances == 0) {
        r = default_instance(l, used);
        mem_free(used);
        return r;
    }
    for (uint32_t i = 0; r == 0 && i < l->n_instances; i++)
        r = check_instance(l, i, used, e);
    for (uint32_t rank = 0; r == 0 && rank < l->n_ranks; rank++)
        if (used[rank] == 1)
            r = err_set(e, RS_EINVAL,
                        "rank %" PRIu32 " holds tensors but is in no instance; add it to one",
                        rank);
    if (r == 0)
        qsort(l->instances, l->n_instances, sizeof *l->instances, compare_instance);
    mem_free(used);
    return r;
}

/* --- the whole ----------------------------------------------------------- */

static int check_limits(const struct layout *l, struct err *e)
{
    if (l->n_ranks == 0)
        return err_set(e, RS_EINVAL, "it has no ranks; 'ranks' is the greatest rank id + 1");
    if (l->n_ranks > LAYOUT_MAX_RANKS)
        return err_set(e, RS_EEXHAUSTED, "%" PRIu32 " ranks are more than %d", l->n_ranks,
                       LAYOUT_MAX_RANKS);
    if (l->n_meshes > LAYOUT_MAX_MESHES)
        return err_set(e, RS_EEXHAUSTED, "%" PRIu32 " meshes are more than %d", l->n_meshes,
                       LAYOUT_MAX_MESHES);
    if (l->n_tensors > LAYOUT_MAX_TENSORS)
        return err_set(e, RS_EEXHAUSTED, "%" PRIu32 " tensors are more than %d", l->n_tensors,
                       LAYOUT_MAX_TENSORS);
    if (l->n_instances > l->n_ranks)
        return err_set(e, RS_EINVAL, "it has more instances than ranks");
    return 0;
}

static int check_rules(struct layout *l, struct err *e)
{
    int r = check_limits(l, e);
    if (r == 0)
        r = check_meshes(l, e);
    if (r == 0)
        r = check_tensors(l, e);
    if (r == 0)
        r = layout_check_derived(l, e);
    return r == 0 ? check_instances(l, e) : r;
}

int layout_check(struct layout *l, struct err *e)
{
    int r = check_name(l->name, "the layout", e);
    if (r != 0)
        return r;
    r = check_rules(l, e);
    if (r == RS_ENOMEM)
        (void)err_set(e, r, "out of memory");
    return r == 0 ? 0 : err_prefix(e, r, "layout '%s'", l->name);
}

int layout_gap(const struct tensor *t, struct box *ret_missing)
{
    struct box whole = box_whole(t->n_dims, t->shape);
    const struct region **distinct;
    uint32_t n;
    if (t->mesh >= 0 || box_empty(&whole))
        return 0;
    if (region_distinct(t, &distinct, &n) != 0)
        return RS_ENOMEM;
    int r = region_gap(distinct, n, &whole, ret_missing);
    mem_free(distinct);
    return r;
}
