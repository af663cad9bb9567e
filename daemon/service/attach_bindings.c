/* Bindings of a worker that attaches: pieces as they come, then checked and encoded on another thread. */
#include <inttypes.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "exec/wire.h"
#include "memory/memory.h"
#include "service/lease.h"

#include "base/banned.h"

/* --- pieces ------------------------------------------------------------------------------------- */

static int piece_box(const struct lease *l, const struct attach_piece *p, uint32_t t,
                     struct box *ret, struct err *e)
{
    const struct layout *layout = l->layout->layout;
    struct box shards[2];
    if (p->box != NULL && p->box->n_dims != layout->tensors[t].n_dims)
        return err_set(e, RS_EINVAL, "tensor '%s': a piece's box has %u dims; the tensor has %u",
                       p->tensor, p->box->n_dims, layout->tensors[t].n_dims);
    if (p->box != NULL) {
        *ret = *p->box;
        return 0;
    }
    uint32_t n = layout_shards(layout, t, l->rank, shards, 2);
    if (n != 1)
        return err_set(
            e, RS_EINVAL,
            "tensor '%s': rank %u holds %u boxes of it; a piece without a box needs exactly one",
            p->tensor, l->rank, n);
    *ret = shards[0];
    return 0;
}

/* Bytes between elements per dim; dense row-major over the box where the client gave none. */
static int piece_strides(const struct attach_piece *p, const struct box *box,
                         uint32_t element_bytes, int64_t *ret, struct err *e)
{
    if (p->n_strides != 0 && p->n_strides != box->n_dims)
        return err_set(e, RS_EINVAL, "tensor '%s': %zu strides for %u dims", p->tensor,
                       p->n_strides, box->n_dims);
    uint64_t stride = element_bytes;
    for (unsigned d = box->n_dims; d-- > 0;) {
        if (p->n_strides != 0) {
            ret[d] = p->stride_bytes[d];
            continue;
        }
        if (stride > INT64_MAX)
            return err_set(e, RS_EINVAL, "tensor '%s': a piece beyond 2^63 bytes", p->tensor);
        ret[d] = (int64_t)stride;
        if (__builtin_mul_overflow(stride, box->size[d], &stride))
            return err_set(e, RS_EINVAL, "tensor '%s': a piece beyond 2^64 bytes", p->tensor);
    }
    return 0;
}

static int piece_make(const struct lease *l, const struct attach_piece *p,
                      struct binding_piece *ret, struct err *e)
{
    const struct layout *layout = l->layout->layout;
    int64_t t = layout_find(layout, p->tensor);
    if (t < 0)
        return err_set(e, RS_EINVAL, "binding of tensor '%s': layout '%s' has no such tensor",
                       p->tensor, layout->name);
    if (p->segment >= l->n_segments)
        return err_set(e, RS_EINVAL, "tensor '%s': segment %u; the hello named %u", p->tensor,
                       p->segment, l->n_segments);
    *ret = (struct binding_piece){
        .tensor = (uint32_t)t, .segment = p->segment, .offset = p->offset_bytes};
    int r = piece_box(l, p, (uint32_t)t, &ret->box, e);
    return r != 0 ? r
                  : piece_strides(p, &ret->box, dtype_bytes(layout->tensors[t].dtype),
                                  ret->stride_bytes, e);
}

int op_attach_piece(struct attach_stream *st, bool shadow, const struct attach_piece *p,
                    struct err *e)
{
    struct lease *l = st->lease;
    unsigned memory = shadow ? WIRE_SHADOW : WIRE_LIVE;
    struct binding_piece piece;
    if (l == NULL || (!l->resuming && (l->done || l->life != LEASE_ATTACHING)))
        return err_set(e, RS_EPRECOND, "bindings come between AttachHello and AttachDone");
    if (l->resuming)
        return 0;
    if (shadow && l->receive != REFIT_STAGED_RECEIVE)
        return err_set(e, RS_EINVAL, "only a destination that receives STAGED has shadow memory");
    if (l->n_pieces[memory] >= SEGMENT_MAX_BINDING_PIECES)
        return err_set(e, RS_EEXHAUSTED, "more than %d pieces", SEGMENT_MAX_BINDING_PIECES);
    int r = piece_make(l, p, &piece, e);
    void *pieces = l->pieces[memory];
    if (r != 0)
        return r;
    if (mem_grow(&pieces, &l->pieces_capacity[memory], l->n_pieces[memory] + 1, sizeof piece) != 0)
        return err_set(e, RS_ENOMEM, "no memory for the bindings");
    l->pieces[memory] = pieces;
    l->pieces[memory][l->n_pieces[memory]++] = piece;
    return 0;
}

/* --- bindings checked, off the loop -------------------------------------------------------------- */

/* Checks and encodes the bindings of one lease off the loop; the lease stays for it (lease.job). What the other thread reads is the job's own (the loop may end the lease meanwhile); only its end touches the lease. */
struct binding_job {
    uv_work_t work;
    struct lease *lease;
    void (*done)(struct lease *l, int code, const struct err *e);
    const struct layout *layout; /* the lease counts it until the job's end */
    uint32_t rank, n_segments;
    bool source, staged;
    struct binding_piece *pieces[2]; /* owned, until a binding takes them */
    uint32_t n_pieces[2];
    uint64_t *segment_bytes;
    uint64_t *memory_of_segment, *offset_of_segment;
    struct binding *bindings[2];
    int fds[2];
    int dtypes_fd;
    int code;
    struct err err;
};

static int binding_make(struct binding_job *j, unsigned memory)
{
    if (j->pieces[memory] == NULL && (j->pieces[memory] = mem_alloc(sizeof **j->pieces)) == NULL)
        return err_set(&j->err, RS_ENOMEM, "no memory for the bindings");
    int r = binding_new(j->pieces[memory], j->n_pieces[memory], j->layout->n_tensors,
                        &j->bindings[memory]);
    if (r != 0)
        return err_set(&j->err, r, "no memory for the bindings");
    j->pieces[memory] = NULL;
    return 0;
}

static int binding_job_one(struct binding_job *j, unsigned memory)
{
    struct buf encoded;
    buf_init(&encoded);
    int r = binding_make(j, memory);
    struct binding *b = j->bindings[memory];
    if (r == 0)
        r = binding_check(b, j->layout, j->rank, j->segment_bytes, j->n_segments, j->source,
                          &j->err);
    if (r == 0 && (r = binding_encode(b, &encoded)) != 0)
        (void)err_set(&j->err, r, "no memory for the bindings");
    if (r == 0) {
        j->fds[memory] = wire_memfd("reshard-binding", encoded.data, encoded.n_bytes, &j->err);
        r = j->fds[memory] < 0 ? j->fds[memory] : 0;
    }
    buf_close(&encoded);
    return r == 0 ? 0
                  : err_prefix(&j->err, r, "%s memory", memory == WIRE_LIVE ? "live" : "shadow");
}

/* What is served may not change while the next version comes in. */
static int live_and_shadow_check(struct binding_job *j)
{
    struct binding_user users[2];
    for (unsigned i = 0; i < 2; i++)
        users[i] = (struct binding_user){.binding = j->bindings[i],
                                         .layout = j->layout,
                                         .memory_of_segment = j->memory_of_segment,
                                         .offset_of_segment = j->offset_of_segment,
                                         .written = true,
                                         .who = i == WIRE_LIVE ? "live memory" : "shadow memory"};
    return bindings_disjoint(users, 2, &j->err);
}

static int dtypes_make(struct binding_job *j)
{
    const struct layout *layout = j->layout;
    uint8_t *dtypes = mem_alloc(layout->n_tensors > 0 ? layout->n_tensors : 1);
    if (dtypes == NULL)
        return err_set(&j->err, RS_ENOMEM, "no memory for the bindings");
    for (uint32_t t = 0; t < layout->n_tensors; t++)
        dtypes[t] = (uint8_t)layout->tensors[t].dtype;
    j->dtypes_fd = wire_memfd("reshard-dtypes", dtypes, layout->n_tensors, &j->err);
    mem_free(dtypes);
    return j->dtypes_fd < 0 ? j->dtypes_fd : 0;
}

static void binding_work(uv_work_t *work)
{
    struct binding_job *j = work->data;
    j->code = binding_job_one(j, WIRE_LIVE);
    if (j->code == 0 && j->staged)
        j->code = binding_job_one(j, WIRE_SHADOW);
    if (j->code == 0 && j->bindings[WIRE_SHADOW] != NULL)
        j->code = live_and_shadow_check(j);
    if (j->code == 0)
        j->code = dtypes_make(j);
    binding_free(j->bindings[WIRE_LIVE]);
    binding_free(j->bindings[WIRE_SHADOW]);
}

static void binding_job_free(struct binding_job *j)
{
    if (j != NULL) {
        mem_free(j->pieces[WIRE_LIVE]);
        mem_free(j->pieces[WIRE_SHADOW]);
        mem_free(j->segment_bytes);
        mem_free(j->memory_of_segment);
        mem_free(j->offset_of_segment);
    }
    mem_free(j);
}

static void binding_done(uv_work_t *work, int status)
{
    struct binding_job *j = work->data;
    struct lease *l = j->lease;
    struct service *s = l->service;
    l->job = false;
    s->n_jobs--;
    l->binding_fd[WIRE_LIVE] = j->fds[WIRE_LIVE];
    l->binding_fd[WIRE_SHADOW] = j->fds[WIRE_SHADOW];
    l->dtypes_fd = j->dtypes_fd;
    if (status != 0)
        j->code = RS_ECANCELED;
    if (l->life != LEASE_ATTACHING)
        leases_sweep(s); /* the stream or the client went meanwhile */
    else
        j->done(l, j->code, &j->err);
    binding_job_free(j);
    service_stop_if_idle(s);
}

static struct binding_job *binding_job_new(struct lease *l)
{
    struct binding_job *j = mem_zalloc(sizeof *j);
    if (j == NULL)
        return NULL;
    j->work.data = j;
    j->lease = l;
    j->layout = l->layout->layout;
    j->rank = l->rank;
    j->n_segments = l->n_segments;
    j->source = l->side == REFIT_SOURCE;
    j->staged = l->receive == REFIT_STAGED_RECEIVE;
    j->fds[0] = j->fds[1] = j->dtypes_fd = -1;
    j->segment_bytes = mem_calloc(l->n_segments, sizeof *j->segment_bytes);
    j->memory_of_segment = mem_calloc(l->n_segments, sizeof *j->memory_of_segment);
    j->offset_of_segment = mem_calloc(l->n_segments, sizeof *j->offset_of_segment);
    if (j->segment_bytes == NULL || j->memory_of_segment == NULL || j->offset_of_segment == NULL) {
        binding_job_free(j);
        return NULL;
    }
    for (uint32_t i = 0; i < l->n_segments; i++) {
        j->segment_bytes[i] = l->segments[i]->bytes;
        j->memory_of_segment[i] = l->segments[i]->memory;
        j->offset_of_segment[i] = l->segments[i]->offset;
    }
    for (unsigned i = 0; i < 2; i++) {
        j->pieces[i] = l->pieces[i];
        j->n_pieces[i] = (uint32_t)l->n_pieces[i];
        l->pieces[i] = NULL;
    }
    return j;
}

int lease_check_bindings(struct lease *l,
                         void (*done)(struct lease *l, int code, const struct err *e),
                         struct err *e)
{
    struct binding_job *j = binding_job_new(l);
    if (j == NULL || uv_queue_work(l->service->loop, &j->work, binding_work, binding_done) != 0) {
        binding_job_free(j);
        return err_set(e, RS_ENOMEM, "no memory to check the bindings");
    }
    j->done = done;
    l->service->n_jobs++;
    l->job = true;
    return 0;
}
