/* A layout as PutLayout's pages. */
#include <string.h>

#include "base/mem.h"
#include "client/api.h"
#include "client/api_pack.h"
#include "client/link.h"
#include "rpc/pb_budget.h"

#include "reshard.pb-c.h"

#include "base/banned.h"

enum { PAGE_TENSORS = 512, PAGE_REGIONS = 4096 };

static void *pointers(struct api_arena *a, size_t n)
{
    return arena_alloc(a, n, sizeof(void *));
}

/* n pointers to n fresh messages of a type: the shape that the generated code wants. NULL: out. */
static void *new_list(struct api_arena *a, size_t n, const ProtobufCMessageDescriptor *type)
{
    void **list = pointers(a, n);
    char *items = arena_alloc(a, n, type->sizeof_message);
    if (list == NULL || items == NULL)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        list[i] = items + i * type->sizeof_message;
        protobuf_c_message_init(type, list[i]);
    }
    return list;
}

static void put_mesh(struct api_arena *a, const struct mesh *m, Reshard__V1__Mesh *p)
{
    bool named = m->n_dims > 0 && m->dim_names[0] != NULL;
    p->name = m->name;
    p->n_shape = m->n_dims;
    p->shape = (uint32_t *)(uintptr_t)m->shape;
    p->n_ranks = m->n_ranks;
    p->ranks = m->ranks;
    p->dim_names = named ? pointers(a, m->n_dims) : NULL;
    for (uint8_t d = 0; p->dim_names != NULL && d < m->n_dims; d++)
        p->dim_names[p->n_dim_names++] = m->dim_names[d];
}

static void put_placements(struct api_arena *a, const struct tensor *t, uint8_t n_dims,
                           Reshard__V1__Tensor *p)
{
    p->placements = new_list(a, n_dims, &reshard__v1__placement__descriptor);
    p->shard_order = arena_alloc(a, n_dims, sizeof *p->shard_order);
    if (p->placements == NULL || p->shard_order == NULL)
        return;
    p->n_placements = p->n_shard_order = n_dims;
    bool identity = true;
    for (uint8_t d = 0; d < n_dims; d++) {
        if (t->placements[d] != LAYOUT_REPLICATE) {
            p->placements[d]->kind = RESHARD__V1__PLACEMENT__KIND__SHARD;
            p->placements[d]->dim = t->placements[d];
        }
        p->shard_order[d] = t->shard_order[d];
        identity = identity && t->shard_order[d] == d;
    }
    if (identity)
        p->n_shard_order = 0;
}

static void put_regions(struct api_arena *a, const struct tensor *t, Reshard__V1__Tensor *p)
{
    p->regions = new_list(a, t->n_regions, &reshard__v1__region__descriptor);
    Reshard__V1__Box *boxes = arena_alloc(a, t->n_regions, sizeof *boxes);
    if (p->regions == NULL || boxes == NULL)
        return;
    p->n_regions = t->n_regions;
    for (uint32_t i = 0; i < t->n_regions; i++) {
        const struct box *b = &t->regions[i].box;
        reshard__v1__box__init(&boxes[i]);
        boxes[i].n_offset = boxes[i].n_size = b->n_dims;
        boxes[i].offset = (uint64_t *)(uintptr_t)b->offset;
        boxes[i].size = (uint64_t *)(uintptr_t)b->size;
        p->regions[i]->rank = t->regions[i].rank;
        p->regions[i]->box = &boxes[i];
    }
}

static void put_derived(struct api_arena *a, const struct tensor *t, Reshard__V1__Tensor *p)
{
    Reshard__V1__Derived *d = arena_alloc(a, 1, sizeof *d);
    if (d == NULL)
        return;
    reshard__v1__derived__init(d);
    d->from = t->derived_from;
    d->rule = (char *)(uintptr_t) "block_scale";
    d->n_block = 2;
    d->block = (uint32_t *)(uintptr_t)t->derived_block;
    p->derived = d;
}

static void put_tensor(struct api_arena *a, const struct layout *l, const struct tensor *t,
                       Reshard__V1__Tensor *p)
{
    p->name = t->name;
    p->n_shape = t->n_dims;
    p->shape = (uint64_t *)(uintptr_t)t->shape;
    p->dtype = (Reshard__V1__Dtype)t->dtype;
    p->cast = t->cast;
    if (t->derived_from != NULL)
        put_derived(a, t, p);
    if (t->mesh < 0) {
        put_regions(a, t, p);
    } else {
        p->mesh = l->meshes[t->mesh].name;
        put_placements(a, t, l->meshes[t->mesh].n_dims, p);
    }
}

static void put_header(struct api_arena *a, const struct layout *l, Reshard__V1__LayoutHeader *h)
{
    h->name = l->name;
    h->ranks = l->n_ranks;
    h->n_tensors = l->n_tensors;
    h->meshes = new_list(a, l->n_meshes, &reshard__v1__mesh__descriptor);
    for (uint32_t i = 0; h->meshes != NULL && i < l->n_meshes; i++)
        put_mesh(a, &l->meshes[i], h->meshes[h->n_meshes++]);
    h->instances = new_list(a, l->n_instances, &reshard__v1__instance__descriptor);
    for (uint32_t i = 0; h->instances != NULL && i < l->n_instances; i++) {
        Reshard__V1__Instance *p = h->instances[h->n_instances++];
        p->n_ranks = l->instances[i].n_ranks;
        p->ranks = l->instances[i].ranks;
    }
}

/* Tensors from *at on, until the page is full; a tensor with many regions has one of its own. */
static int send_page(struct rpc_stream *s, const struct layout *l, uint32_t *at,
                     uint64_t deadline_ns, struct err *e)
{
    uint32_t n = 0;
    uint64_t n_regions = 0;
    while (*at + n < l->n_tensors && n < PAGE_TENSORS && (n == 0 || n_regions < PAGE_REGIONS))
        n_regions += l->tensors[*at + n++].n_regions;
    struct api_arena arena = {0};
    Reshard__V1__PutLayoutRequest m = RESHARD__V1__PUT_LAYOUT_REQUEST__INIT;
    m.tensors = new_list(&arena, n, &reshard__v1__tensor__descriptor);
    for (uint32_t i = 0; m.tensors != NULL && i < n; i++)
        put_tensor(&arena, l, &l->tensors[*at + i], m.tensors[m.n_tensors++]);
    int r = arena.failed ? err_set(e, RS_ENOMEM, "layout: out of memory")
                         : api_stream_send(s, &m.base, deadline_ns, e);
    arena_close(&arena);
    *at += n;
    return r;
}

static int send_header(struct rpc_stream *s, const struct layout *l, uint64_t deadline_ns,
                       struct err *e)
{
    struct api_arena arena = {0};
    Reshard__V1__LayoutHeader header = RESHARD__V1__LAYOUT_HEADER__INIT;
    Reshard__V1__PutLayoutRequest m = RESHARD__V1__PUT_LAYOUT_REQUEST__INIT;
    put_header(&arena, l, &header);
    m.header = &header;
    int r = arena.failed ? err_set(e, RS_ENOMEM, "layout: out of memory")
                         : api_stream_send(s, &m.base, deadline_ns, e);
    arena_close(&arena);
    return r;
}

static int receive_digest(struct rpc_stream *s, uint64_t deadline_ns, uint8_t ret_digest[16],
                          struct err *e)
{
    void *message;
    int r = api_receive(s, &reshard__v1__put_layout_reply__descriptor,
                        deadline_left_ms(deadline_ns), &message, e);
    if (r == 1)
        return err_set(e, RS_EPROTO, "PutLayout ended without an answer");
    if (r != 0)
        return r;
    const Reshard__V1__PutLayoutReply *reply = message;
    if (reply->digest.len == 16)
        memcpy(ret_digest, reply->digest.data, 16);
    else
        r = err_set(e, RS_EPROTO, "PutLayout: a digest of %zu bytes", reply->digest.len);
    pb_free(message);
    return r;
}

int api_put_layout(struct rpc_channel *c, const struct layout *l, uint64_t deadline_ns,
                   uint8_t ret_digest[16], struct err *e)
{
    struct rpc_stream *s;
    uint32_t left = deadline_left_ms(deadline_ns);
    int r = left == 0 ? err_set(e, RS_EDEADLINE, "layout: the deadline has passed")
                      : rpc_stream_open(c, "/reshard.v1.Refit/PutLayout", left, &s, e);
    if (r != 0)
        return r;
    r = send_header(s, l, deadline_ns, e);
    for (uint32_t at = 0; r == 0 && at < l->n_tensors;)
        r = send_page(s, l, &at, deadline_ns, e);
    if (r == 0)
        r = rpc_stream_half_close(s, e);
    r = r != 0 ? api_stream_status(s, r, e) : receive_digest(s, deadline_ns, ret_digest, e);
    rpc_stream_close(s);
    return r != 0 ? err_prefix(e, r, "layout '%s'", l->name) : 0;
}
