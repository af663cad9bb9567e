/* The encoded table, as it travels in a sealed memfd. Little-endian:
 *
 *   magic u32, n_tensors u32, n_pieces u32, then n_pieces times
 *   tensor u32, segment u32, n_dims u8, offset u64, n_dims × (box offset u64, size u64, stride u64)
 *
 * The decoder trusts nothing: counts are compared with the bytes that are there before memory is
 * spent, and every number is brought into the range that binding_views and binding_check rely on.
 */
#include "base/mem.h"
#include "memory/memory.h"

#include "base/banned.h"

#define BINDING_MAGIC UINT32_C(0x31425352) /* "RSB1" */

enum { LEAST_PIECE_BYTES = 4 + 4 + 1 + 8 };

int binding_encode(const struct binding *b, struct buf *out)
{
    buf_put_u32(out, BINDING_MAGIC);
    buf_put_u32(out, b->n_tensors);
    buf_put_u32(out, b->n_pieces);
    for (uint32_t i = 0; i < b->n_pieces; i++) {
        const struct binding_row *p = &b->rows[i];
        buf_put_u32(out, p->tensor);
        buf_put_u32(out, p->segment);
        buf_put_u8(out, p->n_dims);
        buf_put_u64(out, p->offset);
        for (unsigned d = 0; d < p->n_dims; d++) {
            const struct binding_dim *dim = &b->dims[p->dims + d];
            buf_put_u64(out, dim->offset);
            buf_put_u64(out, dim->size);
            buf_put_u64(out, (uint64_t)dim->stride_bytes);
        }
    }
    return buf_error(out);
}

/* Coordinates and element counts stay below 2^63. */
static bool box_is_sane(const struct box *box)
{
    uint64_t elements = 1;
    for (unsigned d = 0; d < box->n_dims; d++) {
        uint64_t end;
        if (__builtin_add_overflow(box->offset[d], box->size[d], &end) || end > INT64_MAX)
            return false;
        if (__builtin_mul_overflow(elements, box->size[d], &elements) || elements > INT64_MAX)
            return false;
    }
    return true;
}

static int read_piece(struct reader *r, uint32_t n_tensors, struct binding_piece *p, struct err *e)
{
    *p = (struct binding_piece){0};
    p->tensor = reader_u32(r);
    p->segment = reader_u32(r);
    p->box.n_dims = reader_u8(r);
    p->offset = reader_u64(r);
    if (p->tensor >= n_tensors)
        return err_set(e, RS_EPROTO, "tensor %u of %u", p->tensor, n_tensors);
    if (p->segment >= SEGMENT_MAX_PER_WORKER)
        return err_set(e, RS_EPROTO, "segment %u: the limit is %d", p->segment,
                       SEGMENT_MAX_PER_WORKER);
    if (p->box.n_dims > BOX_MAX_DIMS)
        return err_set(e, RS_EPROTO, "%u dims: the limit is %d", p->box.n_dims, BOX_MAX_DIMS);
    for (unsigned d = 0; d < p->box.n_dims; d++) {
        p->box.offset[d] = reader_u64(r);
        p->box.size[d] = reader_u64(r);
        uint64_t stride = reader_u64(r);
        if (stride > INT64_MAX)
            return err_set(e, RS_EPROTO, "the stride of dim %u is negative", d);
        p->stride_bytes[d] = (int64_t)stride;
    }
    if (r->short_read)
        return err_set(e, RS_EPROTO, "the table ends within it");
    return box_is_sane(&p->box) ? 0 : err_set(e, RS_EPROTO, "the box is beyond 2^63");
}

static int read_header(struct reader *r, uint32_t *ret_n_tensors, uint32_t *ret_n_pieces,
                       struct err *e)
{
    uint32_t magic = reader_u32(r), n_tensors = reader_u32(r), n_pieces = reader_u32(r);
    if (r->short_read || magic != BINDING_MAGIC)
        return err_set(e, RS_EPROTO, "binding: not an encoded binding");
    if (n_tensors > LAYOUT_MAX_TENSORS || n_pieces > SEGMENT_MAX_BINDING_PIECES)
        return err_set(e, RS_EPROTO, "binding: %u tensors, %u pieces: the limits are %d and %d",
                       n_tensors, n_pieces, LAYOUT_MAX_TENSORS, SEGMENT_MAX_BINDING_PIECES);
    if (n_pieces > (r->n_bytes - r->at) / LEAST_PIECE_BYTES)
        return err_set(e, RS_EPROTO, "binding: %u pieces don't fit into %zu bytes", n_pieces,
                       r->n_bytes);
    *ret_n_tensors = n_tensors;
    *ret_n_pieces = n_pieces;
    return 0;
}

static int read_pieces(struct reader *r, uint32_t n_tensors, struct binding_piece *pieces,
                       uint32_t n_pieces, struct err *e)
{
    for (uint32_t i = 0; i < n_pieces; i++) {
        int code = read_piece(r, n_tensors, &pieces[i], e);
        if (code != 0)
            return err_prefix(e, code, "binding: piece %u", i);
    }
    if (r->at != r->n_bytes)
        return err_set(e, RS_EPROTO, "binding: %zu bytes after the last piece", r->n_bytes - r->at);
    return 0;
}

int binding_decode(const void *data, size_t n_bytes, struct binding **ret, struct err *e)
{
    struct reader r;
    uint32_t n_tensors = 0, n_pieces = 0;
    reader_init(&r, data, n_bytes);
    int code = read_header(&r, &n_tensors, &n_pieces, e);
    if (code != 0)
        return code;
    struct binding_piece *pieces = mem_calloc(n_pieces, sizeof *pieces);
    if (pieces == NULL)
        return err_set(e, RS_ENOMEM, "binding: %u pieces: out of memory", n_pieces);
    code = read_pieces(&r, n_tensors, pieces, n_pieces, e);
    if (code == 0)
        code = binding_new(pieces, n_pieces, n_tensors, ret);
    if (code == RS_ENOMEM)
        (void)err_set(e, RS_ENOMEM, "binding: %u pieces: out of memory", n_pieces);
    if (code != 0)
        mem_free(pieces);
    return code;
}
