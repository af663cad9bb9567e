/* The digest that identifies a layout: XXH3 over canonical bytes.
 *
 * Canonical bytes: tag, name, ranks, instances, the distinct meshes that tensors use in the order
 * of their contents (names of meshes and their dims left out), tensors by name with the number of
 * their mesh in that order. All numbers as 64-bit little endian. */
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "layout/layout.h"

#include "base/banned.h"

static void put(XXH3_state_t *h, uint64_t v)
{
    unsigned char raw[8];
    for (unsigned i = 0; i < 8; i++)
        raw[i] = (unsigned char)(v >> (8 * i));
    (void)XXH3_128bits_update(h, raw, sizeof raw);
}

static void put_text(XXH3_state_t *h, const char *s)
{
    size_t n = s == NULL ? 0 : strlen(s);
    put(h, n);
    if (n > 0)
        (void)XXH3_128bits_update(h, s, n);
}

static int compare_mesh(const struct mesh *x, const struct mesh *y)
{
    if (x->n_dims != y->n_dims)
        return x->n_dims < y->n_dims ? -1 : 1;
    for (unsigned i = 0; i < x->n_dims; i++)
        if (x->shape[i] != y->shape[i])
            return x->shape[i] < y->shape[i] ? -1 : 1;
    for (uint32_t i = 0; i < x->n_ranks; i++)
        if (x->ranks[i] != y->ranks[i])
            return x->ranks[i] < y->ranks[i] ? -1 : 1;
    return 0;
}

static int compare_mesh_index(const void *a, const void *b, void *meshes)
{
    const struct mesh *m = meshes;
    return compare_mesh(&m[*(const uint32_t *)a], &m[*(const uint32_t *)b]);
}

static void put_mesh(XXH3_state_t *h, const struct mesh *m)
{
    put(h, m->n_dims);
    for (unsigned i = 0; i < m->n_dims; i++)
        put(h, m->shape[i]);
    for (uint32_t i = 0; i < m->n_ranks; i++)
        put(h, m->ranks[i]);
}

/* Writes the used distinct meshes; ret_number[i]: the canonical number of mesh i. `order` has room
 * for n_meshes. */
static void put_meshes(XXH3_state_t *h, const struct layout *l, uint32_t *order,
                       uint32_t *ret_number)
{
    uint32_t n = 0, number = 0;
    for (uint32_t i = 0; i < l->n_tensors; i++)
        if (l->tensors[i].mesh >= 0)
            ret_number[l->tensors[i].mesh] = 1;
    for (uint32_t i = 0; i < l->n_meshes; i++)
        if (ret_number[i] != 0)
            order[n++] = i;
    qsort_r(order, n, sizeof *order, compare_mesh_index, l->meshes);
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 || compare_mesh(&l->meshes[order[i - 1]], &l->meshes[order[i]]) != 0) {
            put_mesh(h, &l->meshes[order[i]]);
            number++;
        }
        ret_number[order[i]] = number - 1;
    }
    put(h, number);
}

static void put_tensor(XXH3_state_t *h, const struct layout *l, const struct tensor *t,
                       const uint32_t *mesh_number)
{
    put_text(h, t->name);
    put(h, (uint64_t)t->dtype | (uint64_t)t->n_dims << 8 | (uint64_t)t->cast << 16);
    for (unsigned d = 0; d < t->n_dims; d++)
        put(h, t->shape[d]);
    put(h, t->mesh < 0 ? UINT64_MAX : mesh_number[t->mesh]);
    for (unsigned i = 0; t->mesh >= 0 && i < l->meshes[t->mesh].n_dims; i++)
        put(h, (uint64_t)(uint8_t)t->placements[i] | (uint64_t)t->shard_order[i] << 8);
    put(h, t->n_regions);
    for (uint32_t i = 0; i < t->n_regions; i++) {
        put(h, t->regions[i].rank);
        for (unsigned d = 0; d < t->n_dims; d++) {
            put(h, t->regions[i].box.offset[d]);
            put(h, t->regions[i].box.size[d]);
        }
    }
    put_text(h, t->derived_from);
    for (unsigned i = 0; t->derived_from != NULL && i < 2; i++)
        put(h, t->derived_block[i]);
}

static void put_layout(XXH3_state_t *h, const struct layout *l, uint32_t *order, uint32_t *number)
{
    put_text(h, "reshard layout 1");
    put_text(h, l->name);
    put(h, l->n_ranks);
    put(h, l->n_instances);
    for (uint32_t i = 0; i < l->n_instances; i++) {
        put(h, l->instances[i].n_ranks);
        for (uint32_t k = 0; k < l->instances[i].n_ranks; k++)
            put(h, l->instances[i].ranks[k]);
    }
    put_meshes(h, l, order, number);
    put(h, l->n_tensors);
    for (uint32_t i = 0; i < l->n_tensors; i++)
        put_tensor(h, l, &l->tensors[i], number);
}

int layout_digest(struct layout *l)
{
    uint32_t *order = mem_calloc(l->n_meshes, sizeof *order);
    uint32_t *number = mem_calloc(l->n_meshes, sizeof *number);
    int r = order == NULL || number == NULL ? RS_ENOMEM : 0;
    if (r == 0) {
        XXH3_state_t h;
        (void)XXH3_128bits_reset(&h);
        put_layout(&h, l, order, number);
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&h));
        memcpy(l->digest, canonical.digest, sizeof l->digest);
    }
    mem_free(order);
    mem_free(number);
    return r;
}

void layout_digest_text(const uint8_t digest[16], char ret_text[33])
{
    for (unsigned i = 0; i < 16; i++)
        (void)snprintf(ret_text + (size_t)2 * i, 3, "%02x", digest[i]);
}
