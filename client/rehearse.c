/* Coordinates in memory as a framework sees it: written, and looked for. */
#include <stdio.h>
#include <string.h>

#include "client/client.h"
#include "layout/coordinates.h"

#include "base/banned.h"

/* Elements of a row that are made at a time. */
enum { RUN = 1024 };

/* Where a view stands: its rows one after another. */
struct cursor {
    const struct reshard_view *view;
    enum dtype dtype;
    uint32_t element_bytes, seed, last; /* last: the dim along which rows run */
    uint64_t row_elements;
    int64_t stride[RESHARD_MAX_DIMS];
    uint64_t at[RESHARD_MAX_DIMS]; /* global coordinates of the row's first element */
    char *row;
    /* what is not as it must be */
    uint64_t n_wrong, first_wrong[RESHARD_MAX_DIMS];
};

static int cursor_open(struct cursor *c, const struct reshard_view *v, struct err *e)
{
    const struct reshard_box *b = &v->box;
    *c = (struct cursor){.view = v, .dtype = dtype_parse(v->dtype), .row = v->data};
    if (c->dtype == DTYPE_NONE)
        return err_set(e, RS_EINVAL, "tensor '%s': there is no dtype '%s'", v->tensor, v->dtype);
    if (b->n_dims > RESHARD_MAX_DIMS)
        return err_set(e, RS_EINVAL, "tensor '%s': %u dims; %d are the most", v->tensor, b->n_dims,
                       RESHARD_MAX_DIMS);
    c->element_bytes = dtype_bytes(c->dtype);
    c->seed = coordinates_seed(v->tensor);
    c->last = b->n_dims > 0 ? b->n_dims - 1 : 0;
    c->row_elements = b->n_dims > 0 ? b->size[c->last] : 1;
    int64_t stride = c->element_bytes;
    for (uint32_t d = b->n_dims; d-- > 0; stride *= (int64_t)b->size[d]) {
        c->at[d] = b->offset[d];
        c->stride[d] = v->dense ? stride : v->stride_bytes[d];
    }
    return 0;
}

static bool is_empty(const struct reshard_box *b)
{
    for (uint32_t d = 0; d < b->n_dims; d++)
        if (b->size[d] == 0)
            return true;
    return false;
}

static bool row_next(struct cursor *c)
{
    const struct reshard_box *b = &c->view->box;
    for (uint32_t d = c->last; d-- > 0;) {
        c->row += c->stride[d];
        if (++c->at[d] < b->offset[d] + b->size[d])
            return true;
        c->row -= c->stride[d] * (int64_t)b->size[d];
        c->at[d] = b->offset[d];
    }
    return false;
}

static void element_wrong(struct cursor *c, uint64_t x)
{
    if (c->n_wrong++ > 0)
        return;
    memcpy(c->first_wrong, c->at, sizeof c->at);
    if (c->view->box.n_dims > 0)
        c->first_wrong[c->last] += x;
}

/* Elements [x, x + n) of the row. */
static void run_do(struct cursor *c, uint64_t x, uint64_t n, bool fill)
{
    uint64_t made[RUN], bytes = c->element_bytes; /* of the widest dtype */
    uint32_t row = coordinates_row(c->seed, c->view->box.n_dims, c->at);
    int64_t stride = c->view->box.n_dims > 0 ? c->stride[c->last] : (int64_t)bytes;
    char *at = c->row + (int64_t)x * stride;
    coordinates_run(c->dtype, row, c->at[c->last] + x, n, made);
    if (fill && stride == (int64_t)bytes) {
        memcpy(at, made, n * bytes);
        return;
    }
    if (!fill && stride == (int64_t)bytes && memcmp(at, made, n * bytes) == 0)
        return;
    for (uint64_t i = 0; i < n; i++, at += stride) {
        const char *want = (const char *)made + i * bytes;
        if (fill)
            memcpy(at, want, bytes);
        else if (memcmp(at, want, bytes) != 0)
            element_wrong(c, x + i);
    }
}

static void view_do(struct cursor *c, bool fill)
{
    if (is_empty(&c->view->box))
        return;
    do
        for (uint64_t x = 0; x < c->row_elements; x += RUN)
            run_do(c, x, c->row_elements - x < RUN ? c->row_elements - x : RUN, fill);
    while (row_next(c));
}

int reshard_rehearse_fill(const struct reshard_view *view, struct reshard_error *e)
{
    struct err err = {0};
    struct cursor c;
    int r = cursor_open(&c, view, &err);
    if (r == 0)
        view_do(&c, true);
    return client_give(e, r, &err);
}

static int differs(const struct cursor *c, struct err *e)
{
    char at[RESHARD_MAX_DIMS * 22 + 1] = "";
    size_t n = 0;
    for (uint32_t d = 0; d < c->view->box.n_dims; d++)
        n += (size_t)snprintf(at + n, sizeof at - n, "%s%llu", d > 0 ? ", " : "",
                              (unsigned long long)c->first_wrong[d]);
    return err_set(e, RS_EDATALOSS,
                   "tensor '%s': %llu %s not what belongs there, the first at [%s]; the "
                   "layout or a binding says something else than the engine",
                   c->view->tensor, (unsigned long long)c->n_wrong,
                   c->n_wrong == 1 ? "element is" : "elements are", at);
}

int reshard_rehearse_check(const struct reshard_view *view, struct reshard_error *e)
{
    struct err err = {0};
    struct cursor c;
    int r = cursor_open(&c, view, &err);
    if (r == 0)
        view_do(&c, false);
    if (r == 0 && c.n_wrong > 0)
        r = differs(&c, &err);
    return client_give(e, r, &err);
}
