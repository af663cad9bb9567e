#include "transport/transport.h"

#include <sys/uio.h>

#include "base/crash.h"

#include "base/banned.h"

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
