/* PutLayout: pages of tensors into a struct layout. What needs one side only is checked by layout_check; here only
 * what must hold before memory is spent or an index is used. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "service/api_common.h"

#include "base/banned.h"

struct put_layout {
    struct api_call base;  /* first: waiter's container */
    struct layout *layout; /* NULL: no header yet, or given away */
    size_t tensors_capacity;
    uint32_t n_declared;
    uint64_t n_regions;
    bool has_header;
};

/* --- header ------------------------------------------------------------------------------------- */

static int mesh_read(const Reshard__V1__Mesh *from, struct mesh *to, struct err *e)
{
    if (from->n_shape < 1 || from->n_shape > LAYOUT_MAX_MESH_DIMS)
        return err_set(e, RS_EINVAL, "mesh '%s' has %zu dims; use 1 … %d", from->name,
                       from->n_shape, LAYOUT_MAX_MESH_DIMS);
    if (from->n_dim_names != 0 && from->n_dim_names != from->n_shape)
        return err_set(e, RS_EINVAL, "mesh '%s': %zu dim_names for %zu dims", from->name,
                       from->n_dim_names, from->n_shape);
    to->n_dims = (uint8_t)from->n_shape;
    to->name = mem_strdup(from->name);
    to->ranks = mem_calloc(from->n_ranks, sizeof *to->ranks);
    if (to->name == NULL || to->ranks == NULL)
        return err_set(e, RS_ENOMEM, "no memory for mesh '%s'", from->name);
    memcpy(to->shape, from->shape, from->n_shape * sizeof *to->shape);
    if (from->n_ranks > 0)
        memcpy(to->ranks, from->ranks, from->n_ranks * sizeof *to->ranks);
    to->n_ranks = (uint32_t)from->n_ranks;
    for (size_t d = 0; d < from->n_dim_names; d++)
        if ((to->dim_names[d] = mem_strdup(from->dim_names[d])) == NULL)
            return err_set(e, RS_ENOMEM, "no memory for mesh '%s'", from->name);
    return api_name("mesh.name", from->name, e);
}

static int rank_compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static int instance_read(const Reshard__V1__Instance *from, struct instance *to, struct err *e)
{
    to->ranks = mem_calloc(from->n_ranks, sizeof *to->ranks);
    if (to->ranks == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the instances");
    if (from->n_ranks > 0)
        memcpy(to->ranks, from->ranks, from->n_ranks * sizeof *to->ranks);
    to->n_ranks = (uint32_t)from->n_ranks;
    qsort(to->ranks, to->n_ranks, sizeof *to->ranks, rank_compare);
    return 0;
}

static int header_read(struct put_layout *p, const Reshard__V1__LayoutHeader *h, struct err *e)
{
    struct layout *l = p->layout = layout_new();
    int r = l == NULL ? err_set(e, RS_ENOMEM, "no memory for the layout")
                      : api_name("layout.name", h->name, e);
    if (r == 0 && h->n_tensors > LAYOUT_MAX_TENSORS)
        r = err_set(e, RS_EEXHAUSTED, "%u tensors; %d are the most", h->n_tensors,
                    LAYOUT_MAX_TENSORS);
    if (r == 0 && h->ranks > LAYOUT_MAX_RANKS)
        r = err_set(e, RS_EEXHAUSTED, "%u ranks; %d are the most", h->ranks, LAYOUT_MAX_RANKS);
    if (r != 0)
        return r;
    l->name = mem_strdup(h->name);
    l->n_ranks = h->ranks;
    l->meshes = mem_calloc(h->n_meshes, sizeof *l->meshes);
    l->instances = mem_calloc(h->n_instances, sizeof *l->instances);
    if (l->name == NULL || l->meshes == NULL || l->instances == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the layout");
    for (; r == 0 && l->n_meshes < h->n_meshes; l->n_meshes++)
        r = mesh_read(h->meshes[l->n_meshes], &l->meshes[l->n_meshes], e);
    for (; r == 0 && l->n_instances < h->n_instances; l->n_instances++)
        r = instance_read(h->instances[l->n_instances], &l->instances[l->n_instances], e);
    p->n_declared = h->n_tensors;
    p->has_header = true;
    return r;
}

/* --- tensors ------------------------------------------------------------------------------------ */

static int mesh_find(const struct layout *l, const char *name)
{
    for (uint32_t i = 0; i < l->n_meshes; i++)
        if (strcmp(l->meshes[i].name, name) == 0)
            return (int)i;
    return -1;
}

static int placements_read(const struct layout *l, const Reshard__V1__Tensor *from,
                           struct tensor *to, struct err *e)
{
    unsigned n = l->meshes[to->mesh].n_dims;
    if (from->n_placements != n)
        return err_set(e, RS_EINVAL, "%zu placements; mesh '%s' has %u dims", from->n_placements,
                       from->mesh, n);
    if (from->n_shard_order != 0 && from->n_shard_order != n)
        return err_set(e, RS_EINVAL, "shard_order has %zu entries; mesh '%s' has %u dims",
                       from->n_shard_order, from->mesh, n);
    for (unsigned i = 0; i < n; i++) {
        const Reshard__V1__Placement *p = from->placements[i];
        to->shard_order[i] = (uint8_t)i;
        to->placements[i] = LAYOUT_REPLICATE;
        if (p->kind == RESHARD__V1__PLACEMENT__KIND__SHARD) {
            int r = layout_shard_dim(p->dim, to->n_dims, &to->placements[i]);
            if (r != 0)
                return err_set(e, r, "placement Shard(%d): the tensor has %u dims", (int)p->dim,
                               to->n_dims);
        } else if (p->kind != RESHARD__V1__PLACEMENT__KIND__REPLICATE) {
            return err_set(e, RS_EINVAL, "placement kind %d is not known; use REPLICATE or SHARD",
                           (int)p->kind);
        }
    }
    for (unsigned i = 0; i < from->n_shard_order; i++) {
        if (from->shard_order[i] >= n)
            return err_set(e, RS_EINVAL, "shard_order names mesh dim %u of %u",
                           from->shard_order[i], n);
        to->shard_order[i] = (uint8_t)from->shard_order[i];
    }
    return 0;
}

static int region_read(const Reshard__V1__Region *from, const struct tensor *t, struct region *to,
                       struct err *e)
{
    const Reshard__V1__Box *b = from->box;
    size_t offsets = b != NULL ? b->n_offset : 0, sizes = b != NULL ? b->n_size : 0;
    if (offsets != t->n_dims || sizes != t->n_dims)
        return err_set(
            e, RS_EINVAL,
            "region of rank %u: box with %zu offsets and %zu sizes; the tensor has %u dims",
            from->rank, offsets, sizes, t->n_dims);
    to->rank = from->rank;
    to->box.n_dims = t->n_dims;
    for (unsigned d = 0; d < t->n_dims; d++) {
        to->box.offset[d] = b->offset[d];
        to->box.size[d] = b->size[d];
    }
    return 0;
}

static int regions_read(struct put_layout *p, const Reshard__V1__Tensor *from, struct tensor *to,
                        struct err *e)
{
    p->n_regions += from->n_regions;
    if (p->n_regions > LAYOUT_MAX_REGIONS)
        return err_set(e, RS_EEXHAUSTED, "more than %d regions in a layout", LAYOUT_MAX_REGIONS);
    if (from->n_placements != 0 || from->n_shard_order != 0)
        return err_set(e, RS_EINVAL, "placements need a mesh");
    to->mesh = -1;
    to->regions = mem_calloc(from->n_regions, sizeof *to->regions);
    if (to->regions == NULL)
        return err_set(e, RS_ENOMEM, "no memory for its regions");
    int r = 0;
    for (; r == 0 && to->n_regions < from->n_regions; to->n_regions++)
        r = region_read(from->regions[to->n_regions], to, &to->regions[to->n_regions], e);
    return r;
}

static int derived_read(const Reshard__V1__Derived *d, struct tensor *to, struct err *e)
{
    if (strcmp(d->rule, "block_scale") != 0)
        return err_set(e, RS_EINVAL, "derived by '%s', which is not known; use block_scale",
                       d->rule);
    if (d->n_block != 2)
        return err_set(e, RS_EINVAL, "derived: block has %zu numbers; use 2", d->n_block);
    int r = api_name("derived.from", d->from, e);
    to->derived_block[0] = d->block[0];
    to->derived_block[1] = d->block[1];
    if (r == 0 && (to->derived_from = mem_strdup(d->from)) == NULL)
        r = err_set(e, RS_ENOMEM, "no memory for the layout");
    return r;
}

static int tensor_read(struct put_layout *p, const Reshard__V1__Tensor *from, struct tensor *to,
                       struct err *e)
{
    int r = api_name("name", from->name, e);
    if (r != 0)
        return r;
    if (from->n_shape > BOX_MAX_DIMS)
        return err_set(e, RS_EINVAL, "%zu dims; use 0 … %d", from->n_shape, BOX_MAX_DIMS);
    if (dtype_bytes((enum dtype)from->dtype) == 0)
        return err_set(e, RS_EINVAL, "dtype %d is not known", (int)from->dtype);
    if ((to->name = mem_strdup(from->name)) == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the layout");
    to->dtype = (enum dtype)from->dtype;
    to->n_dims = (uint8_t)from->n_shape;
    if (from->n_shape > 0)
        memcpy(to->shape, from->shape, from->n_shape * sizeof *to->shape);
    to->cast = from->cast;
    if (from->derived != NULL && (r = derived_read(from->derived, to, e)) != 0)
        return r;
    if (from->mesh[0] == '\0')
        return regions_read(p, from, to, e);
    if (from->n_regions != 0)
        return err_set(e, RS_EINVAL, "both a mesh and regions; use one");
    to->mesh = mesh_find(p->layout, from->mesh);
    if (to->mesh < 0)
        return err_set(e, RS_EINVAL, "mesh '%s' is not in the header", from->mesh);
    return placements_read(p->layout, from, to, e);
}

static int tensors_read(struct put_layout *p, const Reshard__V1__PutLayoutRequest *q, struct err *e)
{
    struct layout *l = p->layout;
    void *tensors = l->tensors;
    if (q->n_tensors > p->n_declared - l->n_tensors)
        return err_set(e, RS_EINVAL, "more tensors than the header says (n_tensors = %u)",
                       p->n_declared);
    if (mem_grow(&tensors, &p->tensors_capacity, l->n_tensors + q->n_tensors, sizeof *l->tensors) !=
        0)
        return err_set(e, RS_ENOMEM, "no memory for the layout");
    l->tensors = tensors;
    for (size_t i = 0; i < q->n_tensors; i++) {
        struct tensor *t = &l->tensors[l->n_tensors];
        *t = (struct tensor){.mesh = -1};
        l->n_tensors++;
        int r = tensor_read(p, q->tensors[i], t, e);
        if (r != 0)
            return err_prefix(e, r, "tensor '%.128s'", q->tensors[i]->name);
    }
    return 0;
}

/* It is kept for as long as a worker has it: gives back what it grew beyond its tensors. */
static void tensors_fit(struct layout *l)
{
    void *tensors = mem_realloc(l->tensors, l->n_tensors * sizeof *l->tensors);
    if (tensors != NULL)
        l->tensors = tensors;
}

/* --- the call ----------------------------------------------------------------------------------- */

static void put_layout_done(struct waiter *w, const struct op_reply *reply)
{
    struct api_call *c = container_of(w, struct api_call, waiter);
    Reshard__V1__PutLayoutReply m = RESHARD__V1__PUT_LAYOUT_REPLY__INIT;
    if (reply->code != 0) {
        rpc_call_finish(c->call, reply->code, reply->text);
        return;
    }
    m.digest.data = c->digest;
    m.digest.len = sizeof c->digest;
    m.known = reply->value != 0;
    api_finish(c->call, &m.base);
}

void api_put_layout_open(struct rpc_call *call)
{
    struct put_layout *p = mem_zalloc(sizeof *p);
    struct err e = {0};
    if (p == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for the call");
        return;
    }
    p->base.call = call;
    p->base.service = rpc_call_context(call);
    p->base.waiter.done = put_layout_done;
    rpc_call_set_arg(call, p);
    int r = api_identity(call, true, &p->base.client, &e);
    if (r != 0)
        api_finish_error(call, r, &e);
}

static int message_take(struct put_layout *p, const Reshard__V1__PutLayoutRequest *q, struct err *e)
{
    int r = 0;
    if (p->has_header && q->header != NULL)
        return err_set(e, RS_EINVAL, "the header comes once, in the first message");
    if (!p->has_header && q->header == NULL)
        return err_set(e, RS_EINVAL, "the first message must have the header");
    if (q->header != NULL)
        r = header_read(p, q->header, e);
    return r == 0 ? tensors_read(p, q, e) : r;
}

void api_put_layout_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct put_layout *p = rpc_call_arg(call);
    struct err e = {0};
    void *request = NULL;
    if (p == NULL || p->base.client == 0 || (p->has_header && p->layout == NULL))
        return; /* it has been refused already */
    int r = api_decode(&reshard__v1__put_layout_request__descriptor, data, n_bytes, &request, &e);
    if (r == 0)
        r = message_take(p, request, &e);
    pb_free(request);
    if (r == 0)
        return;
    layout_free(p->layout);
    p->layout = NULL;
    p->has_header = true;
    api_finish_error(call, r, &e);
}

void api_put_layout_half_close(struct rpc_call *call)
{
    struct put_layout *p = rpc_call_arg(call);
    struct err e = {0};
    int r;
    if (p == NULL || p->base.client == 0 || (p->has_header && p->layout == NULL))
        return;
    struct layout *l = p->layout;
    p->layout = NULL;
    if (l == NULL)
        r = err_set(&e, RS_EINVAL, "no header came");
    else if (l->n_tensors != p->n_declared)
        r = err_set(&e, RS_EINVAL, "%u tensors came; the header says %u", l->n_tensors,
                    p->n_declared);
    else {
        tensors_fit(l);
        r = op_put_layout(p->base.service, l, p->base.digest, &p->base.waiter, &e);
        l = NULL;
    }
    layout_free(l);
    if (r != 0)
        api_finish_error(call, r, &e);
}

void api_put_layout_end(struct rpc_call *call, int reason)
{
    struct put_layout *p = rpc_call_arg(call);
    (void)reason;
    if (p == NULL)
        return;
    waiter_forget(&p->base.waiter);
    layout_free(p->layout);
    mem_free(p);
}
