#include "transport/transport.h"

#include <string.h>
#include <sys/uio.h>

#include "base/crash.h"
#include "kernels/kernels_dtype.h"
#include "transport/transport_nccl.h"

#include "base/banned.h"

int transport_check(const char *name, struct err *e)
{
    if (strcmp(name, "nccl") != 0)
        return 0;
#if defined(RS_CUDA)
    return transport_nccl_check(e);
#else
    return err_set(e, RS_EUNIMPL, "transport 'nccl' is not in this build: build with CUDA=1");
#endif
}

int transport_begin(struct transport *t, uint64_t attempt, struct err *e)
{
    return t->ops->begin(t, attempt, e);
}

bool transport_takes_pieces(const struct transport *t, uint32_t device, uint32_t peer)
{
    return t->ops->takes_pieces != NULL && t->ops->takes_pieces(t, device, peer);
}

uint32_t transport_runs(const struct transport_message *m, uint64_t offset, uint64_t length,
                        struct iovec *ret_runs, uint32_t most)
{
    const struct transport_piece whole = {m->data, m->bytes};
    const struct transport_piece *p = m->data != NULL ? &whole : m->pieces;
    uint32_t n_pieces = m->data != NULL ? 1 : m->n_pieces, n = 0;
    for (uint32_t i = 0; i < n_pieces && length > 0 && n < most; i++) {
        if (offset >= p[i].bytes) {
            offset -= p[i].bytes;
            continue;
        }
        uint64_t bytes = p[i].bytes - offset < length ? p[i].bytes - offset : length;
        ret_runs[n++] = (struct iovec){(uint8_t *)p[i].data + offset, bytes};
        length -= bytes;
        offset = 0;
    }
    return n;
}

void transport_damage(const struct transport_message *m, uint64_t offset, uint64_t length)
{
    struct iovec v;
    if (!damage_due(DAMAGE_FLIPPED_BIT))
        return;
    rs_assert(transport_runs(m, offset + length / 2, 1, &v, 1) == 1);
    *(uint8_t *)v.iov_base ^= 0x10;
}

enum { COPIES = 8 };

struct copies {
    struct device_stream *stream;
    uint32_t n;
    struct kernel_copy list[COPIES];
};

static int copies_flush(struct copies *c)
{
    int r = c->n > 0 ? device_copy(c->stream, c->list, c->n) : 0;
    c->n = 0;
    return r;
}

static int copies_add(struct copies *c, void *to, void *from, uint64_t bytes)
{
    c->list[c->n++] = (struct kernel_copy){.size = {bytes},
                                           .from = {from, {1}},
                                           .to = {{to, {1}}},
                                           .n_targets = 1,
                                           .n_dims = 1,
                                           .from_dtype = KERNEL_UINT8,
                                           .to_dtype = KERNEL_UINT8,
                                           .streaming = 1};
    return c->n == COPIES ? copies_flush(c) : 0;
}

/* Both may be in pieces, cut differently. */
static int copy_range(struct copies *c, const struct transport_message *to, uint64_t to_at,
                      const struct transport_message *from, uint64_t from_at, uint64_t bytes)
{
    int r = 0;
    for (uint64_t at = 0; at < bytes && r == 0;) {
        struct iovec a, b;
        rs_assert(transport_runs(to, to_at + at, bytes - at, &a, 1) == 1);
        rs_assert(transport_runs(from, from_at + at, bytes - at, &b, 1) == 1);
        uint64_t n = a.iov_len < b.iov_len ? a.iov_len : b.iov_len;
        r = copies_add(c, a.iov_base, b.iov_base, n);
        at += n;
    }
    return r;
}

/* Where tests have it so, wrong (base/crash.h). */
int transport_copy(struct device_stream *stream, const struct transport_message *to,
                   const struct transport_message *from)
{
    struct copies c = {.stream = stream};
    uint64_t bytes = from->bytes, half = bytes / 2;
    int r;
    if (damage_due(DAMAGE_LOST_CHUNK))
        return 0;
    if (damage_due(DAMAGE_WRONG_ADDRESS)) {
        r = copy_range(&c, to, bytes - half, from, 0, half);
        if (r == 0)
            r = copy_range(&c, to, 0, from, half, bytes - half);
    } else {
        r = copy_range(&c, to, 0, from, 0, bytes);
    }
    return r == 0 ? copies_flush(&c) : r;
}

int transport_connect(struct transport *t, struct transport_connect *c)
{
    return t->ops->connect(t, c);
}

int transport_enqueue(struct transport *t, uint32_t device, struct device_stream *stream,
                      struct transport_group *group)
{
    return t->ops->enqueue(t, device, stream, group);
}

void transport_abort(struct transport *t)
{
    t->ops->abort(t);
}

bool transport_quiesced(const struct transport *t)
{
    return t->ops->quiesced(t);
}

struct transport_counters transport_counters(const struct transport *t, uint32_t device)
{
    return t->ops->counters(t, device);
}

void transport_close(struct transport *t)
{
    if (t != NULL)
        t->ops->close(t);
}
