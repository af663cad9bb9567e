/* reshardctl layout show: an inventory.
 *
 * Tensors whose names differ in numbers only and that are declared alike are shown as one line, so that
 * 70,000 tensors fit on a page. What tensors of one class (mesh, placements, shape, dtype) cost per rank
 * is computed once. */
#include "client/cmd_layout.h"

#include <ctype.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "base/mem.h"

#include "base/banned.h"

/* --- what tensors cost --------------------------------------------------- */

struct cost {
    uint64_t held_bytes;  /* by all ranks together */
    uint64_t least, most; /* of a rank that holds some */
    uint32_t owners;
};

struct inventory {
    const struct layout *l;
    struct cost *costs;   /* [tensor] */
    uint64_t *rank_bytes; /* [rank], of the tensors looked at */
};

/* Orders tensors so that those of one class stand together. */
static int compare_class(const void *a, const void *b, void *tensors)
{
    const struct tensor *x = (struct tensor *)tensors + *(const uint32_t *)a;
    const struct tensor *y = (struct tensor *)tensors + *(const uint32_t *)b;
    if (x->mesh != y->mesh)
        return x->mesh < y->mesh ? -1 : 1;
    if (x->dtype != y->dtype)
        return x->dtype < y->dtype ? -1 : 1;
    if (x->n_dims != y->n_dims)
        return x->n_dims < y->n_dims ? -1 : 1;
    int order = memcmp(x->shape, y->shape, sizeof x->shape);
    if (order == 0)
        order = memcmp(x->placements, y->placements, sizeof x->placements);
    if (order == 0)
        order = memcmp(x->shard_order, y->shard_order, sizeof x->shard_order);
    return order;
}

static void cost_add(struct cost *c, uint64_t bytes)
{
    if (bytes == 0)
        return;
    c->held_bytes += bytes;
    c->least = c->owners == 0 || bytes < c->least ? bytes : c->least;
    c->most = bytes > c->most ? bytes : c->most;
    c->owners++;
}

/* Cost of `count` tensors of one class, the first of which is t. */
static void mesh_cost(struct inventory *v, const struct tensor *t, uint32_t count, struct cost *c)
{
    const struct mesh *m = &v->l->meshes[t->mesh];
    for (uint32_t p = 0; p < m->n_ranks; p++) {
        struct box b = layout_position_shard(v->l, t, p);
        uint64_t bytes = box_elements(&b) * dtype_bytes(t->dtype);
        cost_add(c, bytes);
        v->rank_bytes[m->ranks[p]] += bytes * count;
    }
}

static void region_cost(struct inventory *v, const struct tensor *t, struct cost *c)
{
    for (uint32_t i = 0; i < t->n_regions;) {
        uint32_t rank = t->regions[i].rank;
        uint64_t bytes = 0;
        for (; i < t->n_regions && t->regions[i].rank == rank; i++)
            bytes += box_elements(&t->regions[i].box) * dtype_bytes(t->dtype);
        cost_add(c, bytes);
        v->rank_bytes[rank] += bytes;
    }
}

static void inventory_close(struct inventory *v)
{
    mem_free(v->costs);
    mem_free(v->rank_bytes);
}

/* Costs of the n tensors in `which` (reordered by class). */
static int inventory_init(struct inventory *v, const struct layout *l, uint32_t *which, uint32_t n)
{
    *v = (struct inventory){.l = l};
    v->costs = mem_calloc(l->n_tensors, sizeof *v->costs);
    v->rank_bytes = mem_calloc(l->n_ranks, sizeof *v->rank_bytes);
    if (v->costs == NULL || v->rank_bytes == NULL)
        return RS_ENOMEM;
    qsort_r(which, n, sizeof *which, compare_class, l->tensors);
    for (uint32_t i = 0, end; i < n; i = end) {
        const struct tensor *t = &l->tensors[which[i]];
        struct cost c = {0};
        end = i + 1;
        while (t->mesh >= 0 && end < n && compare_class(&which[i], &which[end], l->tensors) == 0)
            end++;
        if (t->mesh >= 0)
            mesh_cost(v, t, end - i, &c);
        else
            region_cost(v, t, &c);
        for (uint32_t k = i; k < end; k++)
            v->costs[which[k]] = c;
    }
    return 0;
}

static double replication(const struct tensor *t, uint64_t held_bytes, uint64_t count)
{
    uint64_t bytes = layout_tensor_bytes(t) * count;
    return bytes == 0 ? 0 : (double)held_bytes / (double)bytes;
}

/* --- text of a tensor ---------------------------------------------------- */

static const char *shape_text(const struct tensor *t, char *text, size_t capacity)
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

/* "dp: Replicate, tp: Shard(1)", with the order where it is not from left to right. */
static const char *placement_text(const struct layout *l, const struct tensor *t, char *text,
                                  size_t capacity)
{
    if (t->mesh < 0) {
        (void)snprintf(text, capacity, "%" PRIu32 " regions", t->n_regions);
        return text;
    }
    const struct mesh *m = &l->meshes[t->mesh];
    size_t at = 0;
    bool in_order = true;
    for (unsigned i = 0; i < m->n_dims && at < capacity; i++) {
        char number[8];
        (void)snprintf(number, sizeof number, "%u", i);
        const char *dim = m->dim_names[i] == NULL ? number : m->dim_names[i];
        int n = t->placements[i] == LAYOUT_REPLICATE
                    ? snprintf(text + at, capacity - at, "%s%s: Replicate", i == 0 ? "" : ", ", dim)
                    : snprintf(text + at, capacity - at, "%s%s: Shard(%d)", i == 0 ? "" : ", ", dim,
                               t->placements[i]);
        at += n > 0 ? (size_t)n : 0;
        in_order = in_order && t->shard_order[i] == i;
    }
    for (unsigned i = 0; !in_order && i < m->n_dims && at < capacity; i++) {
        int n = snprintf(text + at, capacity - at, "%s%u", i == 0 ? "; order " : ",",
                         t->shard_order[i]);
        at += n > 0 ? (size_t)n : 0;
    }
    return text;
}

static const char *range_text(uint64_t least, uint64_t most, char *text, size_t capacity)
{
    char a[24], b[24];
    if (least == most)
        return cmd_bytes_text(least, text, capacity);
    (void)snprintf(text, capacity, "%s to %s", cmd_bytes_text(least, a, sizeof a),
                   cmd_bytes_text(most, b, sizeof b));
    return text;
}

/* --- groups: names that differ in numbers only --------------------------- */

struct group {
    char *pattern;
    const struct tensor *first;
    uint64_t n;
    uint64_t held_bytes, least, most;
    uint32_t owners_least, owners_most;
};

/* A name with each run of digits that makes up a whole part of it as '*'. */
static char *name_pattern(const char *name)
{
    char *pattern = mem_strdup(name);
    if (pattern == NULL)
        return NULL;
    char *to = pattern;
    for (const char *from = name; *from != '\0';) {
        size_t n = strspn(from, "0123456789");
        bool whole = n > 0 && (from == name || ispunct((unsigned char)from[-1])) &&
                     (from[n] == '\0' || ispunct((unsigned char)from[n]));
        if (whole) {
            *to++ = '*';
            from += n;
            continue;
        }
        n = n == 0 ? 1 : n;
        memmove(to, from, n);
        to += n;
        from += n;
    }
    *to = '\0';
    return pattern;
}

/* True where two tensors may share a line but for their names: meshes of one form count as alike.
 */
static int compare_declaration(const struct layout *l, const struct tensor *x,
                               const struct tensor *y)
{
    char a[512], b[512];
    if (x->dtype != y->dtype)
        return x->dtype < y->dtype ? -1 : 1;
    if (x->n_dims != y->n_dims)
        return x->n_dims < y->n_dims ? -1 : 1;
    int order = memcmp(x->shape, y->shape, sizeof x->shape);
    if (order != 0 || (x->mesh == y->mesh && x->mesh >= 0 &&
                       memcmp(x->placements, y->placements, sizeof x->placements) == 0 &&
                       memcmp(x->shard_order, y->shard_order, sizeof x->shard_order) == 0))
        return order;
    return strcmp(placement_text(l, x, a, sizeof a), placement_text(l, y, b, sizeof b));
}

struct named {
    char *pattern;
    uint32_t tensor;
};

static int compare_named(const void *a, const void *b, void *layout)
{
    const struct layout *l = layout;
    const struct named *x = a, *y = b;
    int order = strcmp(x->pattern, y->pattern);
    if (order == 0)
        order = compare_declaration(l, &l->tensors[x->tensor], &l->tensors[y->tensor]);
    return order != 0 ? order : (x->tensor > y->tensor) - (x->tensor < y->tensor);
}

static void group_add(struct group *g, const struct tensor *t, const struct cost *c)
{
    bool first = g->n++ == 0;
    if (first)
        g->first = t;
    g->held_bytes += c->held_bytes;
    g->least = first || c->least < g->least ? c->least : g->least;
    g->most = c->most > g->most ? c->most : g->most;
    g->owners_least = first || c->owners < g->owners_least ? c->owners : g->owners_least;
    g->owners_most = c->owners > g->owners_most ? c->owners : g->owners_most;
}

static void group_row(struct cmd_table *table, const struct layout *l, const struct group *g)
{
    char shape[200], placements[512], bytes[24], per_rank[64], owners[32];
    if (g->owners_least == g->owners_most)
        (void)snprintf(owners, sizeof owners, "%" PRIu32, g->owners_most);
    else
        (void)snprintf(owners, sizeof owners, "%" PRIu32 "-%" PRIu32, g->owners_least,
                       g->owners_most);
    cmd_table_cell(table, "%" PRIu64, g->n);
    cmd_table_cell(table, "%s", g->n == 1 ? g->first->name : g->pattern);
    cmd_table_cell(table, "%s", shape_text(g->first, shape, sizeof shape));
    cmd_table_cell(table, "%s%s%s", dtype_name(g->first->dtype), g->first->cast ? " cast" : "",
                   g->first->derived_from != NULL ? " derived" : "");
    cmd_table_cell(table, "%s", placement_text(l, g->first, placements, sizeof placements));
    cmd_table_cell(table, "%s", owners);
    cmd_table_cell(table, "x%.3g", replication(g->first, g->held_bytes, g->n));
    cmd_table_cell(table, "%s", range_text(g->least, g->most, per_rank, sizeof per_rank));
    cmd_table_cell(table, "%s",
                   cmd_bytes_text(layout_tensor_bytes(g->first) * g->n, bytes, sizeof bytes));
}

static int print_groups(const struct inventory *v, struct named *named, uint32_t n)
{
    struct cmd_table table;
    cmd_table_init(&table, "rllllrrrr");
    static const char *const head[] = {"count",  "tensor", "shape",       "dtype", "placements",
                                       "owners", "copies", "bytes/owner", "bytes"};
    for (size_t i = 0; i < sizeof head / sizeof *head; i++)
        cmd_table_cell(&table, "%s", head[i]);
    for (uint32_t i = 0, end; i < n; i = end) {
        struct group g = {.pattern = named[i].pattern};
        for (end = i; end < n && strcmp(named[end].pattern, g.pattern) == 0 &&
                      compare_declaration(v->l, &v->l->tensors[named[i].tensor],
                                          &v->l->tensors[named[end].tensor]) == 0;
             end++)
            group_add(&g, &v->l->tensors[named[end].tensor], &v->costs[named[end].tensor]);
        group_row(&table, v->l, &g);
    }
    return cmd_table_print(&table, stdout, 0);
}

static int print_grouped(const struct inventory *v, const uint32_t *which, uint32_t n, bool all)
{
    struct named *named = mem_calloc(n, sizeof *named);
    int r = named == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < n; i++) {
        const char *name = v->l->tensors[which[i]].name;
        named[i] = (struct named){all ? mem_strdup(name) : name_pattern(name), which[i]};
        r = named[i].pattern == NULL ? RS_ENOMEM : 0;
    }
    if (r == 0) {
        qsort_r(named, n, sizeof *named, compare_named, (void *)v->l);
        r = print_groups(v, named, n);
    }
    for (uint32_t i = 0; named != NULL && i < n; i++)
        mem_free(named[i].pattern);
    mem_free(named);
    return r;
}

/* --- totals -------------------------------------------------------------- */

struct totals {
    uint64_t unique_bytes, held_bytes;
    uint64_t least, most; /* of a rank */
    uint32_t least_rank, most_rank, holders;
};

static struct totals inventory_totals(const struct inventory *v, const uint32_t *which, uint32_t n)
{
    struct totals t = {0};
    for (uint32_t i = 0; i < n; i++) {
        t.unique_bytes += layout_tensor_bytes(&v->l->tensors[which[i]]);
        t.held_bytes += v->costs[which[i]].held_bytes;
    }
    for (uint32_t r = 0; r < v->l->n_ranks; r++) {
        uint64_t bytes = v->rank_bytes[r];
        if (bytes > 0 && (t.holders == 0 || bytes < t.least)) {
            t.least = bytes;
            t.least_rank = r;
        }
        if (bytes > t.most) {
            t.most = bytes;
            t.most_rank = r;
        }
        t.holders += bytes > 0;
    }
    return t;
}

static void print_totals(const struct inventory *v, const uint32_t *which, uint32_t n)
{
    struct totals t = inventory_totals(v, which, n);
    char a[24], b[24], c[24], d[24];
    (void)printf("\n%" PRIu32 " tensor%s, %s unique, %s held", n, n == 1 ? "" : "s",
                 cmd_bytes_text(t.unique_bytes, a, sizeof a),
                 cmd_bytes_text(t.held_bytes, b, sizeof b));
    if (t.unique_bytes > 0)
        (void)printf(" (x%.3g)", (double)t.held_bytes / (double)t.unique_bytes);
    if (t.holders > 0 && t.least == t.most)
        (void)printf(" by %" PRIu32 " of %" PRIu32 " ranks, %s each", t.holders, v->l->n_ranks,
                     cmd_bytes_text(t.least, c, sizeof c));
    else if (t.holders > 0)
        (void)printf(" by %" PRIu32 " of %" PRIu32 " ranks: %s (rank %" PRIu32
                     ") to %s (rank %" PRIu32 ")",
                     t.holders, v->l->n_ranks, cmd_bytes_text(t.least, c, sizeof c), t.least_rank,
                     cmd_bytes_text(t.most, d, sizeof d), t.most_rank);
    (void)printf("\n");
}

/* A few ranks as they stand in the mesh, many as the first and the last of them. */
static void print_ranks(const struct mesh *m)
{
    if (m->n_ranks > 8) {
        (void)printf(", %" PRIu32 " ranks: %" PRIu32 ", %" PRIu32 " … %" PRIu32 "\n", m->n_ranks,
                     m->ranks[0], m->ranks[1], m->ranks[m->n_ranks - 1]);
        return;
    }
    for (uint32_t i = 0; i < m->n_ranks; i++)
        (void)printf("%s%" PRIu32,
                     i > 0             ? ", "
                     : m->n_ranks == 1 ? ", rank "
                                       : ", ranks ",
                     m->ranks[i]);
    (void)printf("\n");
}

static void print_header(const struct layout *l)
{
    char digest[33];
    layout_digest_text(l->digest, digest);
    (void)printf("layout '%s', %" PRIu32 " ranks, %" PRIu32 " instance%s, digest %s\n", l->name,
                 l->n_ranks, l->n_instances, l->n_instances == 1 ? "" : "s", digest);
    for (uint32_t i = 0; i < l->n_meshes && i < 8; i++) {
        const struct mesh *m = &l->meshes[i];
        (void)printf("mesh '%s':", m->name);
        for (unsigned k = 0; k < m->n_dims; k++)
            (void)printf(" %s%s%" PRIu32, m->dim_names[k] == NULL ? "" : m->dim_names[k],
                         m->dim_names[k] == NULL ? "" : "=", m->shape[k]);
        print_ranks(m);
    }
    if (l->n_meshes > 8)
        (void)printf("and %" PRIu32 " more meshes\n", l->n_meshes - 8);
    (void)printf("\n");
}

/* --- who holds a tensor -------------------------------------------------- */

struct holding {
    struct box box;
    uint32_t rank;
};

static int compare_holding(const void *a, const void *b)
{
    const struct holding *x = a, *y = b;
    for (unsigned d = 0; d < x->box.n_dims; d++) {
        if (x->box.offset[d] != y->box.offset[d])
            return x->box.offset[d] < y->box.offset[d] ? -1 : 1;
        if (x->box.size[d] != y->box.size[d])
            return x->box.size[d] < y->box.size[d] ? -1 : 1;
    }
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* All boxes of a tensor (of one rank, where rank >= 0), replicas side by side; the caller's. */
static int holdings_of(const struct layout *l, uint32_t tensor, int64_t rank, struct holding **ret,
                       uint32_t *ret_n)
{
    const struct tensor *t = &l->tensors[tensor];
    uint32_t capacity = t->mesh < 0 ? t->n_regions : l->meshes[t->mesh].n_ranks, n = 0;
    struct holding *all = mem_calloc(capacity, sizeof *all);
    if (all == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < capacity; i++) {
        struct holding h = {.rank = t->mesh < 0 ? t->regions[i].rank : l->meshes[t->mesh].ranks[i]};
        h.box = t->mesh < 0 ? t->regions[i].box : layout_position_shard(l, t, i);
        if ((rank < 0 || h.rank == (uint32_t)rank) && !box_empty(&h.box))
            all[n++] = h;
    }
    qsort(all, n, sizeof *all, compare_holding);
    *ret = all;
    *ret_n = n;
    return 0;
}

/* Ranks of the replicas of all[i], as "0-3, 8"; returns the index after the last replica. */
static uint32_t replica_ranks(const struct holding *all, uint32_t n, uint32_t i, struct buf *text)
{
    uint32_t end = i;
    while (end < n && box_equal(&all[end].box, &all[i].box)) {
        uint32_t last = end;
        while (last + 1 < n && box_equal(&all[last + 1].box, &all[i].box) &&
               all[last + 1].rank == all[last].rank + 1)
            last++;
        buf_printf(text, "%s%" PRIu32, end == i ? "" : ", ", all[end].rank);
        if (last > end)
            buf_printf(text, "-%" PRIu32, all[last].rank);
        end = last + 1;
    }
    return end;
}

static int print_holdings(const struct layout *l, uint32_t tensor, int64_t rank)
{
    const struct tensor *t = &l->tensors[tensor];
    struct holding *all;
    uint32_t n;
    int r = holdings_of(l, tensor, rank, &all, &n);
    struct cmd_table table;
    cmd_table_init(&table, "lrl");
    cmd_table_cell(&table, "part");
    cmd_table_cell(&table, "bytes");
    cmd_table_cell(&table, "ranks");
    for (uint32_t i = 0; r == 0 && i < n;) {
        struct buf ranks;
        char box[256], bytes[24];
        buf_init(&ranks);
        uint32_t end = replica_ranks(all, n, i, &ranks);
        buf_put_u8(&ranks, '\0');
        r = buf_error(&ranks);
        cmd_table_cell(&table, "%s", box_text(&all[i].box, box, sizeof box));
        cmd_table_cell(
            &table, "%s",
            cmd_bytes_text(box_elements(&all[i].box) * dtype_bytes(t->dtype), bytes, sizeof bytes));
        cmd_table_cell(&table, "%s", r == 0 ? (const char *)ranks.data : "");
        buf_close(&ranks);
        i = end;
    }
    if (r >= 0)
        mem_free(all);
    int printed = cmd_table_print(&table, stdout, 2);
    return r == 0 ? printed : r;
}

static int print_tensor(const struct layout *l, uint32_t i, int64_t rank)
{
    const struct tensor *t = &l->tensors[i];
    char shape[200], placements[512], bytes[24];
    (void)printf("%s  %s %s, %s, %s\n", t->name, dtype_name(t->dtype),
                 shape_text(t, shape, sizeof shape),
                 cmd_bytes_text(layout_tensor_bytes(t), bytes, sizeof bytes),
                 placement_text(l, t, placements, sizeof placements));
    if (t->derived_from != NULL)
        (void)printf("  derived from '%s' by blocks of %" PRIu32 " x %" PRIu32 "\n",
                     t->derived_from, t->derived_block[0], t->derived_block[1]);
    return print_holdings(l, i, rank);
}

/* --- JSON ---------------------------------------------------------------- */

static void put_numbers(struct buf *b, const char *key, const uint64_t *v, unsigned n)
{
    buf_printf(b, "\"%s\": [", key);
    for (unsigned i = 0; i < n; i++)
        buf_printf(b, "%s%" PRIu64, i == 0 ? "" : ", ", v[i]);
    buf_printf(b, "]");
}

static int put_shards(struct buf *b, const struct layout *l, uint32_t tensor, int64_t rank)
{
    const struct tensor *t = &l->tensors[tensor];
    struct holding *all;
    uint32_t n;
    int r = holdings_of(l, tensor, rank, &all, &n);
    if (r != 0)
        return r;
    buf_printf(b, ", \"shards\": [");
    for (uint32_t i = 0; i < n; i++) {
        buf_printf(b, "%s{\"rank\": %" PRIu32 ", ", i == 0 ? "" : ", ", all[i].rank);
        put_numbers(b, "offset", all[i].box.offset, t->n_dims);
        buf_printf(b, ", ");
        put_numbers(b, "size", all[i].box.size, t->n_dims);
        buf_printf(b, ", \"bytes\": %" PRIu64 "}",
                   box_elements(&all[i].box) * dtype_bytes(t->dtype));
    }
    buf_printf(b, "]");
    mem_free(all);
    return 0;
}

static int put_tensor(struct buf *b, const struct inventory *v, uint32_t i,
                      const struct layout_options *o)
{
    const struct tensor *t = &v->l->tensors[i];
    const struct cost *c = &v->costs[i];
    char placements[512];
    buf_printf(b, "{\"name\": ");
    json_put_string(b, t->name);
    buf_printf(b, ", ");
    put_numbers(b, "shape", t->shape, t->n_dims);
    buf_printf(b, ", \"dtype\": \"%s\", \"bytes\": %" PRIu64 ", \"placements\": ",
               dtype_name(t->dtype), layout_tensor_bytes(t));
    json_put_string(b, placement_text(v->l, t, placements, sizeof placements));
    buf_printf(b,
               ", \"owners\": %" PRIu32 ", \"replication\": %.6g, \"owner_bytes_least\": %" PRIu64
               ", \"owner_bytes_most\": %" PRIu64,
               c->owners, replication(t, c->held_bytes, 1), c->least, c->most);
    int r = o->tensor != NULL || o->rank >= 0 ? put_shards(b, v->l, i, o->rank) : 0;
    buf_printf(b, "}");
    return r;
}

/* Prints what is in the buffer and empties it, keeping its memory. */
static int drain(struct buf *b)
{
    int r = buf_error(b);
    if (r == 0)
        (void)fwrite(b->data, 1, b->n_bytes, stdout);
    b->n_bytes = 0;
    return r;
}

static void put_totals(struct buf *b, const struct inventory *v, const uint32_t *which, uint32_t n)
{
    struct totals t = inventory_totals(v, which, n);
    buf_printf(b,
               "],\n \"totals\": {\"tensors\": %" PRIu32 ", \"unique_bytes\": %" PRIu64
               ", \"held_bytes\": %" PRIu64 ", \"rank_bytes\": [",
               n, t.unique_bytes, t.held_bytes);
    for (uint32_t r = 0; r < v->l->n_ranks; r++)
        buf_printf(b, "%s%" PRIu64, r == 0 ? "" : ", ", v->rank_bytes[r]);
    buf_printf(b, "]}}\n");
}

static int show_json(const struct inventory *v, const uint32_t *which, uint32_t n,
                     const struct layout_options *o)
{
    struct buf b;
    char digest[33];
    buf_init(&b);
    layout_digest_text(v->l->digest, digest);
    buf_printf(&b, "{\"name\": ");
    json_put_string(&b, v->l->name);
    buf_printf(&b,
               ", \"digest\": \"%s\", \"ranks\": %" PRIu32 ", \"instances\": %" PRIu32
               ", \"meshes\": %" PRIu32 ",\n \"tensors\": [",
               digest, v->l->n_ranks, v->l->n_instances, v->l->n_meshes);
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < n; i++) {
        buf_printf(&b, "%s", i == 0 ? "\n  " : ",\n  ");
        r = put_tensor(&b, v, which[i], o);
        if (r == 0 && b.n_bytes > (1U << 16))
            r = drain(&b);
    }
    put_totals(&b, v, which, n);
    if (r == 0)
        r = drain(&b);
    buf_close(&b);
    return r;
}

/* --- show ---------------------------------------------------------------- */

/* The tensors that the options ask for: by exact name, else by glob, and held by the rank. */
static int select_tensors(const struct layout *l, const struct layout_options *o, uint32_t **ret,
                          uint32_t *ret_n, struct err *e)
{
    uint32_t *which = mem_calloc(l->n_tensors, sizeof *which), n = 0;
    if (which == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    int64_t exact = o->tensor == NULL ? -1 : layout_find(l, o->tensor);
    for (uint32_t i = 0; i < l->n_tensors; i++) {
        bool wanted = exact >= 0
                          ? i == exact
                          : o->tensor == NULL || fnmatch(o->tensor, l->tensors[i].name, 0) == 0;
        if (wanted && o->rank >= 0 && exact < 0)
            wanted = layout_shards(l, i, (uint32_t)o->rank, NULL, 0) > 0;
        if (wanted)
            which[n++] = i;
    }
    *ret = which;
    *ret_n = n;
    if (n == 0 && o->tensor != NULL)
        return err_set(e, RS_ENOTFOUND, "layout '%s' has no tensor '%s'%s", l->name, o->tensor,
                       o->rank >= 0 ? " on that rank" : "");
    return 0;
}

/* The inventory counts only what the rank holds. */
static void narrow_to_rank(struct inventory *v, uint32_t *which, uint32_t n, uint32_t rank)
{
    for (uint32_t r = 0; r < v->l->n_ranks; r++)
        v->rank_bytes[r] = r == rank ? v->rank_bytes[r] : 0;
    for (uint32_t i = 0; i < n; i++) {
        v->costs[which[i]] = (struct cost){0};
        cost_add(&v->costs[which[i]], layout_shard_bytes(v->l, which[i], rank));
    }
}

static int show_text(const struct inventory *v, const uint32_t *which, uint32_t n,
                     const struct layout_options *o)
{
    int r = 0;
    print_header(v->l);
    if (o->rank >= 0)
        (void)printf("rank %" PRId64 ":\n", o->rank);
    for (uint32_t i = 0; o->tensor != NULL && r == 0 && i < n; i++)
        r = print_tensor(v->l, which[i], o->rank);
    if (r == 0 && o->tensor == NULL)
        r = print_grouped(v, which, n, o->all);
    if (r == 0)
        print_totals(v, which, n);
    return r;
}

static int compare_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

int cmd_layout_show(const struct layout *l, const struct layout_options *o, struct err *e)
{
    uint32_t *which = NULL, n = 0;
    struct inventory v = {0};
    if (o->rank >= (int64_t)l->n_ranks)
        return err_set(e, RS_EINVAL, "layout '%s' has ranks 0 to %" PRIu32 ", not %" PRId64,
                       l->name, l->n_ranks - 1, o->rank);
    int r = select_tensors(l, o, &which, &n, e);
    if (r == 0)
        r = inventory_init(&v, l, which, n);
    if (r == 0) {
        qsort(which, n, sizeof *which, compare_u32);
        if (o->rank >= 0)
            narrow_to_rank(&v, which, n, (uint32_t)o->rank);
        r = o->json ? show_json(&v, which, n, o) : show_text(&v, which, n, o);
    }
    inventory_close(&v);
    mem_free(which);
    return r;
}
