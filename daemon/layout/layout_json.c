/* Layouts as JSON: what people write and what the command line reads. The format: config/FORMATS.md. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/json_text.h"
#include "base/mem.h"
#include "layout/layout.h"

#include "base/banned.h"

enum { MAX_DEPTH = 16 };

/* --- small readers: each error names the key ----------------------------- */

#define KEYS(...)                                                                                  \
    (const char *const[])                                                                          \
    {                                                                                              \
        __VA_ARGS__, NULL                                                                          \
    }

static int unknown_key(const char *key, const char *const *known, struct err *e)
{
    char list[256] = "";
    for (size_t at = 0; *known != NULL && at < sizeof list; known++) {
        int n = snprintf(list + at, sizeof list - at, "%s%s", at == 0 ? "" : ", ", *known);
        at += n > 0 ? (size_t)n : 0;
    }
    return err_set(e, RS_EINVAL, "unknown key '%.100s'; there are: %s", key, list);
}

static int check_keys(const json_t *object, const char *const *known, struct err *e)
{
    const char *key;
    json_t *value;
    if (!json_is_object(object))
        return err_set(e, RS_EINVAL, "must be an object");
    json_object_foreach((json_t *)object, key, value)
    {
        size_t i = 0;
        while (known[i] != NULL && strcmp(known[i], key) != 0)
            i++;
        if (known[i] == NULL)
            return unknown_key(key, known, e);
    }
    return 0;
}

/* 0 to max_elements elements; *ret is NULL where the key is missing and not required. */
static int get_array(const json_t *object, const char *key, bool required, size_t max_elements,
                     const json_t **ret, struct err *e)
{
    const json_t *value = json_object_get(object, key);
    *ret = value;
    if (value == NULL)
        return required ? err_set(e, RS_EINVAL, "key '%s' is missing", key) : 0;
    if (!json_is_array(value))
        return err_set(e, RS_EINVAL, "key '%s' must be a list", key);
    if (json_array_size(value) > max_elements)
        return err_set(e, RS_EEXHAUSTED, "key '%s' has %zu entries; at most %zu are supported", key,
                       json_array_size(value), max_elements);
    return 0;
}

static int as_integer(const json_t *value, const char *key, int64_t least, int64_t greatest,
                      int64_t *ret, struct err *e)
{
    if (!json_is_integer(value))
        return err_set(e, RS_EINVAL, "key '%s' must have integers", key);
    int64_t v = json_integer_value(value);
    if (v < least || v > greatest)
        return err_set(e, RS_EINVAL, "key '%s': %" PRId64 " is not within %" PRId64 " to %" PRId64,
                       key, v, least, greatest);
    *ret = v;
    return 0;
}

static int get_integer(const json_t *object, const char *key, int64_t least, int64_t greatest,
                       int64_t *ret, struct err *e)
{
    const json_t *value = json_object_get(object, key);
    if (value == NULL)
        return err_set(e, RS_EINVAL, "key '%s' is missing", key);
    return as_integer(value, key, least, greatest, ret, e);
}

static int get_string(const json_t *object, const char *key, const char **ret, struct err *e)
{
    const json_t *value = json_object_get(object, key);
    if (value == NULL)
        return err_set(e, RS_EINVAL, "key '%s' is missing", key);
    if (!json_is_string(value))
        return err_set(e, RS_EINVAL, "key '%s' must be a string", key);
    *ret = json_string_value(value);
    return 0;
}

/* Copies a string that may be a name; the rest of the name rules are layout_check's. */
static int copy_name(const char *text, char **ret, struct err *e)
{
    if (!layout_name_valid(text, strlen(text)))
        return err_set(e, RS_EINVAL, "a name must be 1 to %d bytes of printable UTF-8",
                       LAYOUT_MAX_NAME_BYTES);
    *ret = mem_strdup(text);
    return *ret == NULL ? RS_ENOMEM : 0;
}

static int get_name(const json_t *object, char **ret, struct err *e)
{
    const char *text;
    int r = get_string(object, "name", &text, e);
    return r == 0 ? copy_name(text, ret, e) : r;
}

static int get_ranks(const json_t *object, const char *key, uint32_t **ret, uint32_t *ret_n,
                     struct err *e)
{
    const json_t *list = object;
    int r = key == NULL ? 0 : get_array(object, key, true, LAYOUT_MAX_RANKS, &list, e);
    if (r != 0)
        return r;
    uint32_t n = (uint32_t)json_array_size(list);
    *ret = mem_calloc(n, sizeof **ret);
    if (*ret == NULL)
        return RS_ENOMEM;
    *ret_n = n;
    for (uint32_t i = 0; r == 0 && i < n; i++) {
        int64_t rank = 0;
        r = as_integer(json_array_get(list, i), key == NULL ? "instances" : key, 0,
                       LAYOUT_MAX_RANKS - 1, &rank, e);
        (*ret)[i] = (uint32_t)rank;
    }
    return r;
}

/* --- meshes -------------------------------------------------------------- */

static int mesh_shape(const json_t *object, struct mesh *m, struct err *e)
{
    const json_t *list;
    int r = get_array(object, "shape", true, SIZE_MAX, &list, e);
    if (r == 0 && json_array_size(list) > LAYOUT_MAX_MESH_DIMS)
        return err_set(e, RS_EINVAL, "it has %zu dims; a mesh has 1 to %d", json_array_size(list),
                       LAYOUT_MAX_MESH_DIMS);
    for (size_t i = 0; r == 0 && i < json_array_size(list); i++) {
        int64_t size;
        r = as_integer(json_array_get(list, i), "shape", 0, UINT32_MAX, &size, e);
        if (r == 0)
            m->shape[m->n_dims++] = (uint32_t)size;
    }
    return r;
}

static int mesh_dim_names(const json_t *object, struct mesh *m, struct err *e)
{
    const json_t *list;
    int r = get_array(object, "dim_names", false, LAYOUT_MAX_MESH_DIMS, &list, e);
    if (r != 0 || list == NULL)
        return r;
    if (json_array_size(list) != m->n_dims)
        return err_set(e, RS_EINVAL, "key 'dim_names' has %zu names for %u dims",
                       json_array_size(list), m->n_dims);
    for (unsigned i = 0; r == 0 && i < m->n_dims; i++) {
        const char *name = json_string_value(json_array_get(list, i));
        r = name == NULL ? err_set(e, RS_EINVAL, "key 'dim_names' must have strings")
                         : copy_name(name, &m->dim_names[i], e);
    }
    return r;
}

static int decode_mesh(const json_t *object, struct mesh *m, struct err *e)
{
    int r = check_keys(object, KEYS("name", "shape", "ranks", "dim_names"), e);
    if (r == 0)
        r = get_name(object, &m->name, e);
    if (r == 0)
        r = mesh_shape(object, m, e);
    if (r == 0)
        r = get_ranks(object, "ranks", &m->ranks, &m->n_ranks, e);
    if (r == 0)
        r = mesh_dim_names(object, m, e);
    return r;
}

/* Prefixes the place of an array's element: its name where it has one, else its number. */
static int at_element(int r, const json_t *object, const char *what, size_t i, struct err *e)
{
    const char *name = json_string_value(json_object_get(object, "name"));
    if (name != NULL && layout_name_valid(name, strlen(name)))
        return err_prefix(e, r, "%s '%s'", what, name);
    return err_prefix(e, r, "%s %zu of the list", what, i);
}

static int decode_meshes(const json_t *root, struct layout *l, struct err *e)
{
    const json_t *list;
    int r = get_array(root, "meshes", false, LAYOUT_MAX_MESHES, &list, e);
    if (r != 0 || list == NULL)
        return r;
    l->meshes = mem_calloc(json_array_size(list), sizeof *l->meshes);
    if (l->meshes == NULL)
        return RS_ENOMEM;
    l->n_meshes = (uint32_t)json_array_size(list);
    for (uint32_t i = 0; i < l->n_meshes; i++) {
        const json_t *object = json_array_get(list, i);
        r = decode_mesh(object, &l->meshes[i], e);
        if (r != 0)
            return at_element(r, object, "mesh", i, e);
    }
    return 0;
}

/* --- tensors ------------------------------------------------------------- */

struct decoder {
    struct layout *l;
    const struct mesh **meshes; /* by name */
    uint64_t n_regions;
    struct err *e;
};

static int compare_mesh(const void *a, const void *b)
{
    return strcmp((*(const struct mesh *const *)a)->name, (*(const struct mesh *const *)b)->name);
}

static int compare_mesh_key(const void *name, const void *mesh)
{
    return strcmp(name, (*(const struct mesh *const *)mesh)->name);
}

static int tensor_mesh(struct decoder *c, const json_t *object, struct tensor *t)
{
    const char *name;
    int r = get_string(object, "mesh", &name, c->e);
    if (r != 0)
        return r;
    const struct mesh **found =
        bsearch(name, c->meshes, c->l->n_meshes, sizeof *c->meshes, compare_mesh_key);
    if (found == NULL)
        return err_set(c->e, RS_EINVAL, "mesh '%.100s' is not among the layout's meshes", name);
    t->mesh = (int32_t)(*found - c->l->meshes);
    return 0;
}

/* The number in "Shard(d)"; false where the text has another form. */
static bool parse_shard(const char *text, int64_t *ret_d)
{
    char *end;
    if (strncmp(text, "Shard(", 6) != 0)
        return false;
    const char *number = text + 6;
    const char *digits = number + (*number == '-');
    size_t n = strspn(digits, "0123456789");
    if (n == 0 || n > 6 || strcmp(digits + n, ")") != 0)
        return false;
    *ret_d = strtoll(number, &end, 10);
    return true;
}

static int parse_placement(const char *text, uint8_t n_dims, int8_t *ret, struct err *e)
{
    int64_t d;
    if (strcmp(text, "Replicate") == 0) {
        *ret = LAYOUT_REPLICATE;
        return 0;
    }
    if (parse_shard(text, &d)) {
        if (layout_shard_dim(d, n_dims, ret) == 0)
            return 0;
        if (n_dims == 0)
            return err_set(e, RS_EINVAL, "the tensor has no dims; use Replicate");
        return err_set(e, RS_EINVAL, "the tensor has %u dims; use -%u to %d", n_dims, n_dims,
                       n_dims - 1);
    }
    if (strncmp(text, "Partial", 7) == 0)
        return err_set(e, RS_EINVAL,
                       "a pending sum can't be moved; reduce it first, then use Replicate or "
                       "Shard(d)");
    if (strstr(text, "trided") != NULL)
        return err_set(e, RS_EINVAL,
                       "strided placements are not supported; use Shard(d) with \"shard_order\"");
    return err_set(e, RS_EINVAL, "unknown placement; use Replicate or Shard(d)");
}

static int tensor_placements(struct decoder *c, const json_t *object, struct tensor *t)
{
    const struct mesh *m = &c->l->meshes[t->mesh];
    const json_t *list;
    int r = get_array(object, "placements", true, SIZE_MAX, &list, c->e);
    if (r != 0)
        return r;
    if (json_array_size(list) != m->n_dims)
        return err_set(c->e, RS_EINVAL, "%zu placements for the %u dims of mesh '%s'",
                       json_array_size(list), m->n_dims, m->name);
    for (unsigned i = 0; i < m->n_dims; i++) {
        const char *text = json_string_value(json_array_get(list, i));
        if (text == NULL)
            return err_set(c->e, RS_EINVAL, "key 'placements' must have strings");
        r = parse_placement(text, t->n_dims, &t->placements[i], c->e);
        if (r != 0 && m->dim_names[i] != NULL)
            return err_prefix(c->e, r, "placement %.60s of mesh dim '%s'", text, m->dim_names[i]);
        if (r != 0)
            return err_prefix(c->e, r, "placement %.60s of mesh dim %u", text, i);
    }
    return 0;
}

/* All mesh dims, or at least those that cut, in cutting order; the rest follows in ascending order.
 */
static int tensor_order(struct decoder *c, const json_t *object, struct tensor *t)
{
    const struct mesh *m = &c->l->meshes[t->mesh];
    const json_t *list;
    unsigned seen = 0, n = 0;
    int r = get_array(object, "shard_order", false, LAYOUT_MAX_MESH_DIMS, &list, c->e);
    for (size_t i = 0; r == 0 && list != NULL && i < json_array_size(list); i++) {
        int64_t dim;
        r = as_integer(json_array_get(list, i), "shard_order", 0, m->n_dims - 1, &dim, c->e);
        if (r == 0 && (seen & 1U << dim) != 0)
            r = err_set(c->e, RS_EINVAL, "key 'shard_order': mesh dim %" PRId64 " stands twice",
                        dim);
        if (r != 0)
            return r;
        seen |= 1U << dim;
        t->shard_order[n++] = (uint8_t)dim;
    }
    for (unsigned i = 0; r == 0 && i < m->n_dims; i++) {
        if ((seen & 1U << i) != 0)
            continue;
        if (list != NULL && t->placements[i] != LAYOUT_REPLICATE)
            return err_set(c->e, RS_EINVAL,
                           "key 'shard_order' leaves out mesh dim %u, which shards the tensor", i);
        t->shard_order[n++] = (uint8_t)i;
    }
    return r;
}

static int tensor_shape(const json_t *object, struct tensor *t, struct err *e)
{
    const json_t *list;
    int r = get_array(object, "shape", true, SIZE_MAX, &list, e);
    if (r == 0 && json_array_size(list) > BOX_MAX_DIMS)
        return err_set(e, RS_EINVAL, "it has %zu dims; at most %d are supported",
                       json_array_size(list), BOX_MAX_DIMS);
    for (size_t i = 0; r == 0 && i < json_array_size(list); i++) {
        int64_t size;
        r = as_integer(json_array_get(list, i), "shape", 0, INT64_MAX, &size, e);
        if (r == 0)
            t->shape[t->n_dims++] = (uint64_t)size;
    }
    return r;
}

static int region_numbers(const json_t *object, const char *key, uint8_t n_dims, uint64_t *ret,
                          struct err *e)
{
    const json_t *list;
    int r = get_array(object, key, true, SIZE_MAX, &list, e);
    if (r == 0 && json_array_size(list) != n_dims)
        return err_set(e, RS_EINVAL, "key '%s' has %zu entries, the tensor has %u dims", key,
                       json_array_size(list), n_dims);
    for (unsigned d = 0; r == 0 && d < n_dims; d++) {
        int64_t v;
        r = as_integer(json_array_get(list, d), key, 0, INT64_MAX, &v, e);
        if (r == 0)
            ret[d] = (uint64_t)v;
    }
    return r;
}

static int decode_region(const json_t *object, const struct tensor *t, struct region *g,
                         struct err *e)
{
    int64_t rank = 0;
    int r = check_keys(object, KEYS("rank", "offset", "size"), e);
    if (r == 0)
        r = get_integer(object, "rank", 0, LAYOUT_MAX_RANKS - 1, &rank, e);
    g->rank = (uint32_t)rank;
    g->box.n_dims = t->n_dims;
    if (r == 0)
        r = region_numbers(object, "offset", t->n_dims, g->box.offset, e);
    if (r == 0)
        r = region_numbers(object, "size", t->n_dims, g->box.size, e);
    return r;
}

static int tensor_regions(struct decoder *c, const json_t *object, struct tensor *t)
{
    const json_t *list;
    int r = get_array(object, "regions", true, LAYOUT_MAX_REGIONS - c->n_regions, &list, c->e);
    if (r != 0)
        return r;
    if (json_object_get(object, "placements") != NULL ||
        json_object_get(object, "shard_order") != NULL)
        return err_set(c->e, RS_EINVAL, "placements belong to a mesh; regions stand alone");
    t->regions = mem_calloc(json_array_size(list), sizeof *t->regions);
    if (t->regions == NULL)
        return RS_ENOMEM;
    t->n_regions = (uint32_t)json_array_size(list);
    c->n_regions += t->n_regions;
    for (uint32_t i = 0; i < t->n_regions; i++) {
        r = decode_region(json_array_get(list, i), t, &t->regions[i], c->e);
        if (r != 0)
            return err_prefix(c->e, r, "region %" PRIu32, i);
    }
    return 0;
}

static int tensor_held(struct decoder *c, const json_t *object, struct tensor *t)
{
    bool mesh = json_object_get(object, "mesh") != NULL;
    bool regions = json_object_get(object, "regions") != NULL;
    t->mesh = -1;
    if (mesh == regions)
        return err_set(c->e, RS_EINVAL,
                       mesh ? "it has a mesh and regions; keep one"
                            : "it has no mesh and no regions, so nobody holds it; give it one");
    if (regions)
        return tensor_regions(c, object, t);
    int r = tensor_mesh(c, object, t);
    if (r == 0)
        r = tensor_placements(c, object, t);
    return r == 0 ? tensor_order(c, object, t) : r;
}

static int tensor_dtype(const json_t *object, struct tensor *t, struct err *e)
{
    const char *name;
    int r = get_string(object, "dtype", &name, e);
    if (r != 0)
        return r;
    t->dtype = dtype_parse(name);
    if (t->dtype != DTYPE_NONE)
        return 0;
#define X(value, number, text, bytes) " " text
    return err_set(e, RS_EINVAL, "unknown dtype '%.40s'; there are:%s", name, DTYPES(X));
#undef X
}

static int tensor_cast(const json_t *object, struct tensor *t, struct err *e)
{
    const json_t *cast = json_object_get(object, "cast");
    if (cast != NULL && !json_is_boolean(cast))
        return err_set(e, RS_EINVAL, "key 'cast' must be true or false");
    t->cast = json_is_true(cast);
    return 0;
}

static int tensor_derived(const json_t *object, struct tensor *t, struct err *e)
{
    const json_t *derived = json_object_get(object, "derived"), *block;
    const char *text;
    if (derived == NULL)
        return 0;
    int r = check_keys(derived, KEYS("from", "rule", "block"), e);
    if (r == 0)
        r = get_string(derived, "rule", &text, e);
    if (r == 0 && strcmp(text, "block_scale") != 0)
        r = err_set(e, RS_EINVAL, "unknown rule '%.40s'; there is: block_scale", text);
    if (r == 0)
        r = get_array(derived, "block", true, SIZE_MAX, &block, e);
    if (r == 0 && json_array_size(block) != 2)
        r = err_set(e, RS_EINVAL, "key 'block' must have 2 sizes");
    for (size_t d = 0; r == 0 && d < 2; d++) {
        int64_t size;
        r = as_integer(json_array_get(block, d), "block", 1, UINT32_MAX, &size, e);
        if (r == 0)
            t->derived_block[d] = (uint32_t)size;
    }
    if (r == 0)
        r = get_string(derived, "from", &text, e);
    if (r == 0)
        r = copy_name(text, &t->derived_from, e);
    return r == 0 ? 0 : err_prefix(e, r, "derived");
}

static int decode_tensor(struct decoder *c, const json_t *object, struct tensor *t)
{
    t->mesh = -1;
    int r = check_keys(object,
                       KEYS("name", "shape", "dtype", "mesh", "placements", "shard_order",
                            "regions", "cast", "derived"),
                       c->e);
    if (r == 0)
        r = get_name(object, &t->name, c->e);
    if (r == 0)
        r = tensor_dtype(object, t, c->e);
    if (r == 0)
        r = tensor_shape(object, t, c->e);
    if (r == 0)
        r = tensor_held(c, object, t);
    if (r == 0)
        r = tensor_cast(object, t, c->e);
    return r == 0 ? tensor_derived(object, t, c->e) : r;
}

static int decode_tensor_list(struct decoder *c, const json_t *list)
{
    struct layout *l = c->l;
    l->tensors = mem_calloc(json_array_size(list), sizeof *l->tensors);
    if (l->tensors == NULL)
        return RS_ENOMEM;
    l->n_tensors = (uint32_t)json_array_size(list);
    for (uint32_t i = 0; i < l->n_tensors; i++) {
        const json_t *object = json_array_get(list, i);
        int r = decode_tensor(c, object, &l->tensors[i]);
        if (r != 0)
            return at_element(r, object, "tensor", i, c->e);
    }
    return 0;
}

static int decode_tensors(const json_t *root, struct layout *l, struct err *e)
{
    const json_t *list;
    int r = get_array(root, "tensors", true, LAYOUT_MAX_TENSORS, &list, e);
    if (r != 0)
        return r;
    struct decoder c = {.l = l, .e = e};
    c.meshes = mem_calloc(l->n_meshes, sizeof *c.meshes);
    if (c.meshes == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < l->n_meshes; i++)
        c.meshes[i] = &l->meshes[i];
    qsort(c.meshes, l->n_meshes, sizeof *c.meshes, compare_mesh);
    r = decode_tensor_list(&c, list);
    mem_free(c.meshes);
    return r;
}

/* --- the whole ----------------------------------------------------------- */

static int decode_instances(const json_t *root, struct layout *l, struct err *e)
{
    const json_t *list;
    int r = get_array(root, "instances", false, LAYOUT_MAX_RANKS, &list, e);
    if (r != 0 || list == NULL)
        return r;
    if (json_array_size(list) == 0)
        return err_set(e, RS_EINVAL,
                       "key 'instances' is empty; leave it out for one with all ranks");
    l->instances = mem_calloc(json_array_size(list), sizeof *l->instances);
    if (l->instances == NULL)
        return RS_ENOMEM;
    l->n_instances = (uint32_t)json_array_size(list);
    for (uint32_t i = 0; r == 0 && i < l->n_instances; i++) {
        const json_t *ranks = json_array_get(list, i);
        r = json_is_array(ranks)
                ? get_ranks(ranks, NULL, &l->instances[i].ranks, &l->instances[i].n_ranks, e)
                : err_set(e, RS_EINVAL, "key 'instances' must have lists of ranks");
    }
    return r;
}

static int decode_layout(const json_t *root, struct layout *l, struct err *e)
{
    int64_t ranks = 0;
    int r = check_keys(root, KEYS("name", "ranks", "instances", "meshes", "tensors"), e);
    if (r == 0)
        r = get_name(root, &l->name, e);
    if (r == 0)
        r = get_integer(root, "ranks", 1, LAYOUT_MAX_RANKS, &ranks, e);
    l->n_ranks = (uint32_t)ranks;
    if (r == 0)
        r = decode_instances(root, l, e);
    if (r == 0)
        r = decode_meshes(root, l, e);
    return r == 0 ? decode_tensors(root, l, e) : r;
}

static int parse(const char *text, size_t n_bytes, json_t **ret, struct err *e)
{
    json_error_t error;
    int r = json_check_size(text, n_bytes, "the layout", LAYOUT_MAX_JSON_BYTES,
                            LAYOUT_MAX_JSON_VALUES, MAX_DEPTH, e);
    if (r != 0)
        return r;
    *ret = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &error);
    if (*ret != NULL)
        return 0;
    /* jansson says so only at times: then there is no text, or one about the last token. */
    if (error.text[0] == '\0' || json_error_code(&error) == json_error_out_of_memory)
        return err_set(e, RS_ENOMEM, "out of memory");
    return err_set(e, RS_EINVAL, "line %d, column %d: %s", error.line, error.column, error.text);
}

int layout_from_json(const char *text, size_t n_bytes, struct layout **ret_layout, struct err *e)
{
    json_t *root = NULL;
    int r = parse(text, n_bytes, &root, e);
    if (r != 0)
        return r;
    struct layout *l = layout_new();
    r = l == NULL ? RS_ENOMEM : decode_layout(root, l, e);
    json_decref(root);
    if (r == 0)
        r = layout_check(l, e);
    if (r == 0)
        r = layout_digest(l);
    if (r == RS_ENOMEM)
        (void)err_set(e, r, "out of memory");
    if (r == 0)
        *ret_layout = l;
    else
        layout_free(l);
    return r;
}

/* --- writing ------------------------------------------------------------- */

static void put_u32_list(struct buf *b, const uint32_t *v, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        buf_printf(b, "%s%" PRIu32, i == 0 ? "[" : ", ", v[i]);
    buf_put(b, n == 0 ? "[]" : "]", n == 0 ? 2 : 1);
}

static void put_u64_list(struct buf *b, const uint64_t *v, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        buf_printf(b, "%s%" PRIu64, i == 0 ? "[" : ", ", v[i]);
    buf_put(b, n == 0 ? "[]" : "]", n == 0 ? 2 : 1);
}

static void put_mesh(struct buf *b, const struct mesh *m)
{
    buf_printf(b, "{\"name\": ");
    json_put_string(b, m->name);
    buf_printf(b, ", \"shape\": ");
    put_u32_list(b, m->shape, m->n_dims);
    buf_printf(b, ", \"ranks\": ");
    put_u32_list(b, m->ranks, m->n_ranks);
    bool named = true;
    for (unsigned i = 0; i < m->n_dims; i++)
        named = named && m->dim_names[i] != NULL;
    for (unsigned i = 0; named && i < m->n_dims; i++) {
        buf_printf(b, "%s", i == 0 ? ", \"dim_names\": [" : ", ");
        json_put_string(b, m->dim_names[i]);
    }
    buf_printf(b, named ? "]}" : "}");
}

static void put_placements(struct buf *b, const struct layout *l, const struct tensor *t)
{
    const struct mesh *m = &l->meshes[t->mesh];
    bool in_order = true;
    buf_printf(b, ", \"mesh\": ");
    json_put_string(b, m->name);
    for (unsigned i = 0; i < m->n_dims; i++) {
        buf_printf(b, "%s", i == 0 ? ", \"placements\": [" : ", ");
        if (t->placements[i] == LAYOUT_REPLICATE)
            buf_printf(b, "\"Replicate\"");
        else
            buf_printf(b, "\"Shard(%d)\"", t->placements[i]);
        in_order = in_order && t->shard_order[i] == i;
    }
    buf_printf(b, "]");
    for (unsigned i = 0; !in_order && i < m->n_dims; i++)
        buf_printf(b, "%s%u", i == 0 ? ", \"shard_order\": [" : ", ", t->shard_order[i]);
    buf_printf(b, "%s", in_order ? "" : "]");
}

static void put_regions(struct buf *b, const struct tensor *t)
{
    buf_printf(b, ", \"regions\": [");
    for (uint32_t i = 0; i < t->n_regions; i++) {
        buf_printf(b, "%s{\"rank\": %" PRIu32 ", \"offset\": ", i == 0 ? "" : ", ",
                   t->regions[i].rank);
        put_u64_list(b, t->regions[i].box.offset, t->n_dims);
        buf_printf(b, ", \"size\": ");
        put_u64_list(b, t->regions[i].box.size, t->n_dims);
        buf_printf(b, "}");
    }
    buf_printf(b, "]");
}

static void put_tensor(struct buf *b, const struct layout *l, const struct tensor *t)
{
    buf_printf(b, "{\"name\": ");
    json_put_string(b, t->name);
    buf_printf(b, ", \"shape\": ");
    put_u64_list(b, t->shape, t->n_dims);
    buf_printf(b, ", \"dtype\": \"%s\"", dtype_name(t->dtype));
    if (t->mesh >= 0)
        put_placements(b, l, t);
    else
        put_regions(b, t);
    if (t->cast)
        buf_printf(b, ", \"cast\": true");
    if (t->derived_from != NULL) {
        buf_printf(b, ", \"derived\": {\"from\": ");
        json_put_string(b, t->derived_from);
        buf_printf(b, ", \"rule\": \"block_scale\", \"block\": ");
        put_u32_list(b, t->derived_block, 2);
        buf_printf(b, "}");
    }
    buf_printf(b, "}");
}

char *layout_to_json(const struct layout *l)
{
    struct buf b;
    buf_init(&b);
    buf_printf(&b, "{\"name\": ");
    json_put_string(&b, l->name);
    buf_printf(&b, ", \"ranks\": %" PRIu32 ", \"instances\": [", l->n_ranks);
    for (uint32_t i = 0; i < l->n_instances; i++) {
        buf_printf(&b, "%s", i == 0 ? "" : ", ");
        put_u32_list(&b, l->instances[i].ranks, l->instances[i].n_ranks);
    }
    buf_printf(&b, "],\n \"meshes\": [");
    for (uint32_t i = 0; i < l->n_meshes; i++) {
        buf_printf(&b, "%s", i == 0 ? "\n  " : ",\n  ");
        put_mesh(&b, &l->meshes[i]);
    }
    buf_printf(&b, "],\n \"tensors\": [");
    for (uint32_t i = 0; i < l->n_tensors; i++) {
        buf_printf(&b, "%s", i == 0 ? "\n  " : ",\n  ");
        put_tensor(&b, l, &l->tensors[i]);
    }
    buf_printf(&b, "]}\n");
    char *text = (char *)buf_steal(&b, NULL);
    buf_close(&b);
    return text;
}
