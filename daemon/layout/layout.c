#include "layout/layout.h"

#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

struct layout *layout_new(void)
{
    return mem_zalloc(sizeof(struct layout));
}

static void mesh_close(struct mesh *m)
{
    mem_free(m->name);
    for (unsigned i = 0; i < LAYOUT_MAX_MESH_DIMS; i++)
        mem_free(m->dim_names[i]);
    mem_free(m->ranks);
}

void layout_free(struct layout *l)
{
    if (l == NULL)
        return;
    for (uint32_t i = 0; l->meshes != NULL && i < l->n_meshes; i++)
        mesh_close(&l->meshes[i]);
    for (uint32_t i = 0; l->tensors != NULL && i < l->n_tensors; i++) {
        mem_free(l->tensors[i].name);
        mem_free(l->tensors[i].regions);
        mem_free(l->tensors[i].derived_from);
    }
    for (uint32_t i = 0; l->instances != NULL && i < l->n_instances; i++)
        mem_free(l->instances[i].ranks);
    mem_free(l->meshes);
    mem_free(l->tensors);
    mem_free(l->instances);
    mem_free(l->name);
    mem_free(l);
}

int layout_shard_dim(int64_t d, uint8_t n_dims, int8_t *ret_dim)
{
    if (d < -(int64_t)n_dims || d >= (int64_t)n_dims)
        return RS_EINVAL;
    *ret_dim = (int8_t)(d < 0 ? d + n_dims : d);
    return 0;
}

int64_t layout_find(const struct layout *l, const char *name)
{
    uint32_t low = 0, high = l->n_tensors;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = strcmp(name, l->tensors[middle].name);
        if (order == 0)
            return middle;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return -1;
}

void layout_chunk(uint64_t length, uint32_t n, uint32_t i, uint64_t *ret_begin, uint64_t *ret_end)
{
    uint64_t chunk = length / n + (length % n != 0);
    uint64_t begin = i * chunk, end = begin + chunk;
    *ret_begin = begin < length ? begin : length;
    *ret_end = end < length ? end : length;
}

struct box layout_position_shard(const struct layout *l, const struct tensor *t, uint32_t position)
{
    const struct mesh *m = &l->meshes[t->mesh];
    struct box b = box_whole(t->n_dims, t->shape);
    uint32_t coordinates[LAYOUT_MAX_MESH_DIMS];
    for (unsigned i = m->n_dims; i-- > 0;) {
        coordinates[i] = position % m->shape[i];
        position /= m->shape[i];
    }
    for (unsigned k = 0; k < m->n_dims; k++) {
        unsigned i = t->shard_order[k];
        if (t->placements[i] == LAYOUT_REPLICATE)
            continue;
        unsigned d = (unsigned)t->placements[i];
        uint64_t begin, end;
        layout_chunk(b.size[d], m->shape[i], coordinates[i], &begin, &end);
        b.offset[d] += begin;
        b.size[d] = end - begin;
    }
    for (unsigned d = 0; d < b.n_dims; d++)
        if (b.size[d] == 0)
            b.offset[d] = t->shape[d];
    return b;
}

/* Position of a rank in a mesh, or -1. Most meshes count upwards, so that is tried first. */
static int64_t mesh_position(const struct mesh *m, uint32_t rank)
{
    uint32_t guess = rank - m->ranks[0];
    if (guess < m->n_ranks && m->ranks[guess] == rank)
        return guess;
    for (uint32_t i = 0; i < m->n_ranks; i++)
        if (m->ranks[i] == rank)
            return i;
    return -1;
}

bool layout_mesh_shard(const struct layout *l, uint32_t t, uint32_t rank, struct box *ret_box)
{
    const struct tensor *tensor = &l->tensors[t];
    if (tensor->mesh < 0)
        return false;
    int64_t position = mesh_position(&l->meshes[tensor->mesh], rank);
    if (position < 0)
        return false;
    *ret_box = layout_position_shard(l, tensor, (uint32_t)position);
    return true;
}

/* The first region of `rank` (they are sorted by rank), or where it would stand. */
static uint32_t region_first(const struct tensor *t, uint32_t rank)
{
    uint32_t low = 0, high = t->n_regions;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (t->regions[middle].rank < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

uint32_t layout_shards(const struct layout *l, uint32_t t, uint32_t rank, struct box *ret_boxes,
                       uint32_t capacity)
{
    const struct tensor *tensor = &l->tensors[t];
    uint32_t n = 0;
    if (tensor->mesh >= 0) {
        struct box b;
        if (!layout_mesh_shard(l, t, rank, &b) || box_empty(&b))
            return 0;
        if (capacity > 0)
            ret_boxes[0] = b;
        return 1;
    }
    for (uint32_t i = region_first(tensor, rank);
         i < tensor->n_regions && tensor->regions[i].rank == rank; i++, n++)
        if (n < capacity)
            ret_boxes[n] = tensor->regions[i].box;
    return n;
}

uint64_t layout_shard_bytes(const struct layout *l, uint32_t t, uint32_t rank)
{
    const struct tensor *tensor = &l->tensors[t];
    struct box b;
    uint64_t elements = 0;
    if (tensor->mesh >= 0)
        elements = layout_mesh_shard(l, t, rank, &b) ? box_elements(&b) : 0;
    for (uint32_t i = tensor->mesh < 0 ? region_first(tensor, rank) : tensor->n_regions;
         i < tensor->n_regions && tensor->regions[i].rank == rank; i++)
        elements += box_elements(&tensor->regions[i].box);
    return elements * dtype_bytes(tensor->dtype);
}

uint64_t layout_rank_bytes(const struct layout *l, uint32_t rank)
{
    uint64_t bytes = 0;
    for (uint32_t t = 0; t < l->n_tensors; t++)
        bytes += layout_shard_bytes(l, t, rank);
    return bytes;
}

uint64_t layout_tensor_bytes(const struct tensor *t)
{
    struct box whole = box_whole(t->n_dims, t->shape);
    return box_elements(&whole) * dtype_bytes(t->dtype);
}
