#include "plan/plan_spec.h"

#include <stdlib.h>
#include <string.h>

#include "base/banned.h"

/* Only for tables: equality is always checked, so its quality decides speed and nothing else. */
uint64_t hash_words(const void *data, size_t n_bytes)
{
    const uint8_t *at = data;
    uint64_t h = n_bytes * 0x9E3779B97F4A7C15U;
    while (n_bytes > 0) {
        uint64_t word = 0;
        size_t n = n_bytes < sizeof word ? n_bytes : sizeof word;
        memcpy(&word, at, n);
        h = (h ^ word) * 0xFF51AFD7ED558CCDU;
        h ^= h >> 32;
        at += n;
        n_bytes -= n;
    }
    return h;
}

/* --- meshes ------------------------------------------------------------------------------------
 */

static bool mesh_equal(const struct mesh *a, const struct mesh *b)
{
    return a->n_dims == b->n_dims && a->n_ranks == b->n_ranks &&
           memcmp(a->shape, b->shape, a->n_dims * sizeof a->shape[0]) == 0 &&
           memcmp(a->ranks, b->ranks, a->n_ranks * sizeof a->ranks[0]) == 0;
}

static int intern_meshes(struct side *s)
{
    const struct layout *l = s->layout;
    uint32_t size = 16;
    while (size < 2 * l->n_meshes)
        size *= 2;
    uint32_t *table = mem_calloc(size, sizeof *table);
    s->mesh_id = mem_calloc((size_t)l->n_meshes + 1, sizeof *s->mesh_id);
    if (table == NULL || s->mesh_id == NULL) {
        mem_free(table);
        return RS_ENOMEM;
    }
    for (uint32_t i = 0; i < l->n_meshes; i++) {
        const struct mesh *m = &l->meshes[i];
        uint64_t at = hash_words(m->ranks, m->n_ranks * sizeof m->ranks[0]);
        while (table[at & (size - 1)] != 0 &&
               !mesh_equal(m, &l->meshes[table[at & (size - 1)] - 1]))
            at++;
        if (table[at & (size - 1)] == 0)
            table[at & (size - 1)] = i + 1;
        s->mesh_id[i] = table[at & (size - 1)] - 1;
    }
    mem_free(table);
    return 0;
}

int specs_init(struct specs *s, const struct plan_input *input, struct err *e)
{
    memset(s, 0, sizeof *s);
    s->n_sides = input->n_destinations + 1;
    s->sides = mem_calloc(s->n_sides, sizeof *s->sides);
    if (s->sides == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < s->n_sides; i++) {
        struct side *side = &s->sides[i];
        side->destination = i > 0;
        side->layout = i == 0 ? input->source : input->destinations[i - 1];
        side->device = i == 0 ? input->source_device : input->destination_device[i - 1];
        if (intern_meshes(side) != 0)
            return err_set(e, RS_ENOMEM, "out of memory");
    }
    return 0;
}

void specs_close(struct specs *s)
{
    for (uint32_t i = 0; s->sides != NULL && i < s->n_sides; i++)
        mem_free(s->sides[i].mesh_id);
    mem_free(s->sides);
    mem_free(s->v.at);
    mem_free(s->table);
}

bool side_absent(const struct side *s, uint32_t rank)
{
    return rank < s->layout->n_ranks && s->device[rank] == TOPOLOGY_ABSENT;
}

int side_device(const struct side *s, const struct topology *t, uint32_t rank, uint32_t *ret_device,
                struct err *e)
{
    int32_t device = rank < s->layout->n_ranks ? s->device[rank] : TOPOLOGY_NONE;
    if (device == TOPOLOGY_NONE)
        return err_set(e, RS_EPRECOND,
                       "%s layout '%s': rank %u holds tensors but has no device; place it in the "
                       "topology",
                       s->destination ? "destination" : "source",
                       s->layout->name != NULL ? s->layout->name : "", rank);
    if (device < 0 || (uint32_t)device >= t->n_devices)
        return err_set(e, RS_EINVAL, "%s layout '%s': rank %u sits on device %d of %u",
                       s->destination ? "destination" : "source",
                       s->layout->name != NULL ? s->layout->name : "", rank, device, t->n_devices);
    *ret_device = (uint32_t)device;
    return 0;
}

struct end side_end(const struct plan *p, const struct specs *s, uint32_t side, uint32_t device,
                    uint32_t rank)
{
    (void)s;
    return (struct end){.device = device,
                        .domain = p->topology->devices[device].domain,
                        .site = p->device_site[device],
                        .layout = side == 0 ? 0 : side - 1,
                        .rank = rank};
}

int plan_end_compare(const void *a, const void *b)
{
    const struct end *x = a, *y = b;
    if (x->domain != y->domain)
        return x->domain < y->domain ? -1 : 1;
    if (x->site != y->site)
        return x->site < y->site ? -1 : 1;
    if (x->device != y->device)
        return x->device < y->device ? -1 : 1;
    if (x->layout != y->layout)
        return x->layout < y->layout ? -1 : 1;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* --- specs -------------------------------------------------------------------------------------
 */

struct spec_key specs_key(const struct specs *s, uint32_t side, const struct tensor *t)
{
    struct spec_key k;
    memset(&k, 0, sizeof k);
    k.side = side;
    k.mesh = s->sides[side].mesh_id[t->mesh];
    uint8_t n = s->sides[side].layout->meshes[t->mesh].n_dims;
    for (uint8_t i = 0; i < n; i++) {
        k.placements[i] = t->placements[i];
        k.order[i] = t->shard_order[i];
    }
    return k;
}

static void spec_shape(struct spec *sp, const struct mesh *m)
{
    for (uint8_t d = 0; d < BOX_MAX_DIMS; d++)
        sp->leaves[d] = 1;
    for (uint8_t i = 0; i < m->n_dims; i++) {
        uint8_t mesh_dim = sp->key.order[i];
        int8_t d = sp->key.placements[mesh_dim];
        if (d == LAYOUT_REPLICATE)
            continue;
        sp->factors[d][sp->n_factors[d]++] = m->shape[mesh_dim];
        sp->leaves[d] *= m->shape[mesh_dim];
    }
    sp->n_leaves = 1;
    for (uint8_t d = 0; d < BOX_MAX_DIMS; d++)
        sp->n_leaves *= sp->leaves[d];
}

/* The leaf that the mesh position holds. */
static uint32_t position_leaf(const struct spec *sp, const struct mesh *m, uint32_t position)
{
    uint32_t at[LAYOUT_MAX_MESH_DIMS], dim_leaf[BOX_MAX_DIMS] = {0}, leaf = 0;
    for (int i = m->n_dims - 1; i >= 0; i--) {
        at[i] = position % m->shape[i];
        position /= m->shape[i];
    }
    for (uint8_t i = 0; i < m->n_dims; i++) {
        uint8_t mesh_dim = sp->key.order[i];
        int8_t d = sp->key.placements[mesh_dim];
        if (d != LAYOUT_REPLICATE)
            dim_leaf[d] = dim_leaf[d] * m->shape[mesh_dim] + at[mesh_dim];
    }
    for (uint8_t d = 0; d < BOX_MAX_DIMS; d++)
        leaf = leaf * sp->leaves[d] + dim_leaf[d];
    return leaf;
}

static int spec_sets(struct specs *s, struct plan *p, struct spec *sp, struct err *e)
{
    const struct side *side = &s->sides[sp->key.side];
    const struct mesh *m = &side->layout->meshes[sp->key.mesh];
    uint32_t base = (uint32_t)p->ends.n;
    if (vec_reserve(&p->sets, p->sets.n + sp->n_leaves) != 0 ||
        vec_reserve(&p->ends, p->ends.n + m->n_ranks) != 0)
        return err_set(e, RS_ENOMEM, "out of memory");
    sp->first_set = (uint32_t)p->sets.n;
    struct set *sets = p->sets.at + p->sets.n;
    memset(sets, 0, sp->n_leaves * sizeof *sets);
    for (uint32_t i = 0; i < m->n_ranks; i++)
        sets[position_leaf(sp, m, i)].n += !side_absent(side, m->ranks[i]);
    for (uint32_t leaf = 0; leaf < sp->n_leaves; leaf++) {
        sets[leaf].first = base;
        base += sets[leaf].n;
        sets[leaf].n = 0;
    }
    for (uint32_t i = 0; i < m->n_ranks; i++) {
        struct set *set = &sets[position_leaf(sp, m, i)];
        uint32_t device = 0;
        if (side_absent(side, m->ranks[i]))
            continue;
        int r = side_device(side, p->topology, m->ranks[i], &device, e);
        if (r != 0)
            return r;
        p->ends.at[set->first + set->n++] = side_end(p, s, sp->key.side, device, m->ranks[i]);
    }
    for (uint32_t leaf = 0; leaf < sp->n_leaves; leaf++)
        qsort(p->ends.at + sets[leaf].first, sets[leaf].n, sizeof(struct end), plan_end_compare);
    p->sets.n += sp->n_leaves;
    p->ends.n = base;
    return 0;
}

static int specs_grow_table(struct specs *s)
{
    if (s->v.n * 2 < s->table_size)
        return 0;
    uint32_t size = s->table_size == 0 ? 256 : s->table_size * 2;
    uint32_t *table = mem_calloc(size, sizeof *table);
    if (table == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < s->v.n; i++) {
        uint64_t at = hash_words(&s->v.at[i].key, sizeof(struct spec_key));
        while (table[at & (size - 1)] != 0)
            at++;
        table[at & (size - 1)] = i + 1;
    }
    mem_free(s->table);
    s->table = table;
    s->table_size = size;
    return 0;
}

int specs_get(struct specs *s, struct plan *p, const struct spec_key *key, uint32_t *ret_spec,
              struct err *e)
{
    if (specs_grow_table(s) != 0 || vec_reserve(&s->v, s->v.n + 1) != 0)
        return err_set(e, RS_ENOMEM, "out of memory");
    uint64_t at = hash_words(key, sizeof *key);
    uint32_t slot;
    while ((slot = s->table[at & (s->table_size - 1)]) != 0) {
        if (memcmp(&s->v.at[slot - 1].key, key, sizeof *key) == 0) {
            *ret_spec = slot - 1;
            return 0;
        }
        at++;
    }
    struct spec *sp = &s->v.at[s->v.n];
    memset(sp, 0, sizeof *sp);
    sp->key = *key;
    spec_shape(sp, &s->sides[key->side].layout->meshes[key->mesh]);
    int r = spec_sets(s, p, sp, e);
    if (r != 0)
        return r;
    s->table[at & (s->table_size - 1)] = (uint32_t)++s->v.n;
    *ret_spec = (uint32_t)s->v.n - 1;
    return 0;
}

void spec_cuts(const struct spec *s, uint8_t dim, uint64_t length, uint64_t *ret_cuts)
{
    uint32_t n = 1;
    ret_cuts[0] = 0;
    ret_cuts[1] = length;
    for (uint8_t f = 0; f < s->n_factors[dim]; f++) {
        uint32_t k = s->factors[dim][f];
        /* Backwards, so that each interval is read before its place is written. */
        ret_cuts[(size_t)n * k] = ret_cuts[n];
        for (uint32_t i = n; i-- > 0;) {
            uint64_t begin = ret_cuts[i], size = ret_cuts[i + 1] - begin;
            if (i + 1 < n)
                size = ret_cuts[(size_t)(i + 1) * k] - begin;
            for (uint32_t j = k; j-- > 0;) {
                uint64_t from, to;
                layout_chunk(size, k, j, &from, &to);
                ret_cuts[(size_t)i * k + j] = begin + from;
            }
        }
        n *= k;
    }
}
