/* Layouts as protobuf pages. */
#include "peer/layout_pages.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "peer/api_private.h"
#include "rpc/pb_budget.h"

#include "base/banned.h"

static const struct pb_field_limit field_limits[] = {
    {"reshard.v1.PutLayoutRequest.tensors", 200000}, {"reshard.v1.LayoutHeader.meshes", 65536},
    {"reshard.v1.LayoutHeader.instances", 1 << 18},  {"reshard.v1.Mesh.ranks", 1 << 20},
    {"reshard.v1.Instance.ranks", 1 << 20},          {"reshard.v1.Tensor.regions", 1 << 18},
};
/* Names have a limit of their own, which name_check tells as such. */
static const struct pb_limits limits = {.max_depth = 6,
                                        .max_repeated = 1024,
                                        .max_memory_bytes = (size_t)192 << 20,
                                        .max_string_bytes = 1 << 17,
                                        .fields = field_limits,
                                        .n_fields = sizeof field_limits / sizeof *field_limits};

static int name_check(const char *field, const char *value, struct err *e)
{
    if (layout_name_valid(value, strlen(value)))
        return 0;
    return err_set(e, RS_EINVAL, "%s: must be printable UTF-8 of 1 … %d bytes", field,
                   LAYOUT_MAX_NAME_BYTES);
}

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
    return name_check("mesh.name", from->name, e);
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

static int header_read(struct layout_builder *b, const Reshard__V1__LayoutHeader *h, struct err *e)
{
    struct layout *l = b->layout = layout_new();
    int r = l == NULL ? err_set(e, RS_ENOMEM, "no memory for the layout")
                      : name_check("layout.name", h->name, e);
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
    b->n_declared = h->n_tensors;
    b->has_header = true;
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

static int regions_read(struct layout_builder *b, const Reshard__V1__Tensor *from,
                        struct tensor *to, struct err *e)
{
    b->n_regions += from->n_regions;
    if (b->n_regions > LAYOUT_MAX_REGIONS)
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
    int r = name_check("derived.from", d->from, e);
    to->derived_block[0] = d->block[0];
    to->derived_block[1] = d->block[1];
    if (r == 0 && (to->derived_from = mem_strdup(d->from)) == NULL)
        r = err_set(e, RS_ENOMEM, "no memory for the layout");
    return r;
}

static int tensor_read(struct layout_builder *b, const Reshard__V1__Tensor *from, struct tensor *to,
                       struct err *e)
{
    int r = name_check("name", from->name, e);
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
        return regions_read(b, from, to, e);
    if (from->n_regions != 0)
        return err_set(e, RS_EINVAL, "both a mesh and regions; use one");
    to->mesh = mesh_find(b->layout, from->mesh);
    if (to->mesh < 0)
        return err_set(e, RS_EINVAL, "mesh '%s' is not in the header", from->mesh);
    return placements_read(b->layout, from, to, e);
}

static int tensors_read(struct layout_builder *b, const Reshard__V1__PutLayoutRequest *q,
                        struct err *e)
{
    struct layout *l = b->layout;
    void *tensors = l->tensors;
    if (q->n_tensors > b->n_declared - l->n_tensors)
        return err_set(e, RS_EINVAL, "more tensors than the header says (n_tensors = %u)",
                       b->n_declared);
    if (mem_grow(&tensors, &b->tensors_capacity, l->n_tensors + q->n_tensors, sizeof *l->tensors) !=
        0)
        return err_set(e, RS_ENOMEM, "no memory for the layout");
    l->tensors = tensors;
    for (size_t i = 0; i < q->n_tensors; i++) {
        struct tensor *t = &l->tensors[l->n_tensors];
        *t = (struct tensor){.mesh = -1};
        l->n_tensors++;
        int r = tensor_read(b, q->tensors[i], t, e);
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

/* --- pages in ------------------------------------------------------------------------------------ */

void layout_builder_close(struct layout_builder *b)
{
    layout_free(b->layout);
    b->layout = NULL;
}

static int page_take(struct layout_builder *b, const Reshard__V1__PutLayoutRequest *q,
                     bool header_again, struct err *e)
{
    int r = 0;
    if (b->has_header && q->header != NULL && !header_again)
        return err_set(e, RS_EINVAL, "the header comes once, in the first message");
    if (!b->has_header && q->header == NULL)
        return err_set(e, RS_EINVAL, "the first message must have the header");
    if (!b->has_header)
        r = header_read(b, q->header, e);
    return r == 0 ? tensors_read(b, q, e) : r;
}

int layout_builder_page(struct layout_builder *b, const void *data, size_t n_bytes,
                        bool header_again, struct err *e)
{
    void *request = NULL;
    if (b->has_header && b->layout == NULL)
        return err_set(e, RS_EINVAL, "a page of a layout that was refused");
    int r = pb_unpack(&reshard__v1__put_layout_request__descriptor, data, n_bytes, &limits,
                      &request, e);
    if (r == 0)
        r = page_take(b, request, header_again, e);
    pb_free(request);
    if (r != 0) {
        layout_builder_close(b);
        b->has_header = true;
    }
    return r;
}

bool layout_builder_complete(const struct layout_builder *b)
{
    return b->layout != NULL && b->layout->n_tensors == b->n_declared;
}

int layout_builder_take(struct layout_builder *b, struct layout **ret, struct err *e)
{
    if (b->layout == NULL)
        return err_set(e, RS_EINVAL, "no header came");
    if (!layout_builder_complete(b))
        return err_set(e, RS_EINVAL, "%u tensors came; the header says %u", b->layout->n_tensors,
                       b->n_declared);
    tensors_fit(b->layout);
    *ret = b->layout;
    b->layout = NULL;
    return 0;
}

/* --- pages out ----------------------------------------------------------------------------------- */

static int page_put(const Reshard__V1__PutLayoutRequest *q, const char *what, struct buf *out,
                    struct err *e)
{
    size_t n = protobuf_c_message_get_packed_size(&q->base);
    if (n > LAYOUT_PAGE_MOST_BYTES - LAYOUT_PAGE_BYTES)
        return err_set(e, RS_EEXHAUSTED, "%s: %zu bytes are more than a page", what, n);
    uint8_t *bytes = mem_alloc(n);
    if (bytes != NULL) {
        (void)protobuf_c_message_pack(&q->base, bytes);
        buf_put(out, bytes, n);
    }
    mem_free(bytes);
    return bytes == NULL || buf_error(out) != 0 ? err_set(e, RS_ENOMEM, "no memory for a page") : 0;
}

static void mesh_fill(Reshard__V1__Mesh *to, const struct mesh *from)
{
    bool named = true;
    reshard__v1__mesh__init(to);
    to->name = from->name;
    to->shape = (uint32_t *)(uintptr_t)from->shape;
    to->n_shape = from->n_dims;
    to->ranks = from->ranks;
    to->n_ranks = from->n_ranks;
    for (unsigned d = 0; d < from->n_dims; d++)
        named = named && from->dim_names[d] != NULL;
    to->dim_names = (char **)(uintptr_t)from->dim_names;
    to->n_dim_names = named ? from->n_dims : 0;
}

static int header_put(const struct layout *l, struct buf *out, struct err *e)
{
    Reshard__V1__PutLayoutRequest q = RESHARD__V1__PUT_LAYOUT_REQUEST__INIT;
    Reshard__V1__LayoutHeader h = RESHARD__V1__LAYOUT_HEADER__INIT;
    struct api_scratch s = {0};
    Reshard__V1__Mesh *meshes = api_scratch_array(&s, l->n_meshes, sizeof *meshes);
    Reshard__V1__Instance *instances = api_scratch_array(&s, l->n_instances, sizeof *instances);
    h.meshes = api_scratch_array(&s, l->n_meshes, sizeof *h.meshes);
    h.instances = api_scratch_array(&s, l->n_instances, sizeof *h.instances);
    int r = s.failed ? err_set(e, RS_ENOMEM, "no memory for a page") : 0;
    for (; r == 0 && h.n_meshes < l->n_meshes; h.n_meshes++) {
        mesh_fill(&meshes[h.n_meshes], &l->meshes[h.n_meshes]);
        h.meshes[h.n_meshes] = &meshes[h.n_meshes];
    }
    for (; r == 0 && h.n_instances < l->n_instances; h.n_instances++) {
        Reshard__V1__Instance *to = h.instances[h.n_instances] = &instances[h.n_instances];
        reshard__v1__instance__init(to);
        to->ranks = l->instances[h.n_instances].ranks;
        to->n_ranks = l->instances[h.n_instances].n_ranks;
    }
    h.name = l->name;
    h.ranks = l->n_ranks;
    h.n_tensors = l->n_tensors;
    q.header = &h;
    if (r == 0)
        r = page_put(&q, "the layout's header", out, e);
    api_scratch_close(&s);
    return r;
}

/* The pb structs of one tensor; regions come from the scratch memory. */
struct tensor_pb {
    Reshard__V1__Tensor m;
    Reshard__V1__Placement placements[LAYOUT_MAX_MESH_DIMS], *placement[LAYOUT_MAX_MESH_DIMS];
    uint32_t shard_order[LAYOUT_MAX_MESH_DIMS];
    Reshard__V1__Derived derived;
};

static void placements_fill(struct tensor_pb *to, const struct tensor *t, unsigned n_dims)
{
    for (unsigned i = 0; i < n_dims; i++) {
        Reshard__V1__Placement *p = to->placement[i] = &to->placements[i];
        reshard__v1__placement__init(p);
        p->kind = t->placements[i] == LAYOUT_REPLICATE ? RESHARD__V1__PLACEMENT__KIND__REPLICATE
                                                       : RESHARD__V1__PLACEMENT__KIND__SHARD;
        p->dim = t->placements[i] == LAYOUT_REPLICATE ? 0 : t->placements[i];
        to->shard_order[i] = t->shard_order[i];
    }
    to->m.placements = to->placement;
    to->m.shard_order = to->shard_order;
    to->m.n_placements = to->m.n_shard_order = n_dims;
}

static void regions_fill(struct tensor_pb *to, const struct tensor *t, struct api_scratch *s)
{
    Reshard__V1__Region *regions = api_scratch_array(s, t->n_regions, sizeof *regions);
    Reshard__V1__Box *boxes = api_scratch_array(s, t->n_regions, sizeof *boxes);
    to->m.regions = api_scratch_array(s, t->n_regions, sizeof *to->m.regions);
    to->m.n_regions = s->failed ? 0 : t->n_regions;
    for (size_t i = 0; i < to->m.n_regions; i++) {
        reshard__v1__region__init(&regions[i]);
        reshard__v1__box__init(&boxes[i]);
        boxes[i].offset = t->regions[i].box.offset;
        boxes[i].size = t->regions[i].box.size;
        boxes[i].n_offset = boxes[i].n_size = t->n_dims;
        regions[i].rank = t->regions[i].rank;
        regions[i].box = &boxes[i];
        to->m.regions[i] = &regions[i];
    }
}

static int tensor_put(const struct layout *l, const struct tensor *t, struct buf *out,
                      struct err *e)
{
    Reshard__V1__PutLayoutRequest q = RESHARD__V1__PUT_LAYOUT_REQUEST__INIT;
    struct tensor_pb pb;
    Reshard__V1__Tensor *m = &pb.m, *list[1] = {m};
    struct api_scratch s = {0};
    reshard__v1__tensor__init(m);
    m->name = t->name;
    m->shape = (uint64_t *)(uintptr_t)t->shape;
    m->n_shape = t->n_dims;
    m->dtype = (Reshard__V1__Dtype)t->dtype;
    m->cast = t->cast;
    if (t->mesh >= 0) {
        m->mesh = l->meshes[t->mesh].name;
        placements_fill(&pb, t, l->meshes[t->mesh].n_dims);
    } else {
        regions_fill(&pb, t, &s);
    }
    if (t->derived_from != NULL) {
        reshard__v1__derived__init(&pb.derived);
        pb.derived.from = t->derived_from;
        pb.derived.rule = api_borrow("block_scale");
        pb.derived.block = (uint32_t *)(uintptr_t)t->derived_block;
        pb.derived.n_block = 2;
        m->derived = &pb.derived;
    }
    q.tensors = list;
    q.n_tensors = 1;
    int r =
        s.failed ? err_set(e, RS_ENOMEM, "no memory for a page") : page_put(&q, t->name, out, e);
    api_scratch_close(&s);
    return r;
}

/* Packed messages put one after the other are one message with all of their tensors. */
int layout_page(const struct layout *l, bool header, uint32_t *at, struct buf *out, struct err *e)
{
    int r = header ? header_put(l, out, e) : 0;
    while (r == 0 && *at < l->n_tensors && out->n_bytes < LAYOUT_PAGE_BYTES)
        if ((r = tensor_put(l, &l->tensors[*at], out, e)) == 0)
            ++*at;
    return r;
}

/* --- GetLayoutRequest ---------------------------------------------------------------------------- */

int layout_request(const uint8_t digest[16], uint32_t first_tensor, struct buf *out)
{
    Reshard__V1__GetLayoutRequest m = RESHARD__V1__GET_LAYOUT_REQUEST__INIT;
    uint8_t bytes[64];
    m.digest.data = (uint8_t *)(uintptr_t)digest;
    m.digest.len = 16;
    m.first_tensor = first_tensor;
    rs_assert(protobuf_c_message_get_packed_size(&m.base) <= sizeof bytes);
    buf_put(out, bytes, protobuf_c_message_pack(&m.base, bytes));
    return buf_error(out);
}

int layout_request_read(const void *data, size_t n_bytes, uint8_t ret_digest[16],
                        uint32_t *ret_first_tensor, struct err *e)
{
    void *request = NULL;
    int r = pb_unpack(&reshard__v1__get_layout_request__descriptor, data, n_bytes, &limits,
                      &request, e);
    const Reshard__V1__GetLayoutRequest *m = request;
    if (r == 0)
        r = api_digest_check("digest", &m->digest, 16, e);
    if (r == 0) {
        memcpy(ret_digest, m->digest.data, 16);
        *ret_first_tensor = m->first_tensor;
    }
    pb_free(request);
    return r;
}
