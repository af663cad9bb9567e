#include "transport/tcp_frame.h"

#include <string.h>

#include "base/banned.h"

#define HELLO_MAGIC UINT32_C(0x68736572) /* "resh" */
#define FRAME_MAGIC UINT32_C(0x66736572) /* "resf" */

struct cursor {
    uint8_t *out;
    const uint8_t *in;
};

static void put(struct cursor *c, uint64_t v, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        *c->out++ = (uint8_t)(v >> (8 * i));
}

static uint64_t take(struct cursor *c, unsigned bytes)
{
    uint64_t v = 0;
    for (unsigned i = 0; i < bytes; i++)
        v |= (uint64_t)*c->in++ << (8 * i);
    return v;
}

void tcp_hello_pack(const struct tcp_hello *h, uint8_t out[TCP_HELLO_BYTES])
{
    struct cursor c = {.out = out};
    put(&c, HELLO_MAGIC, 4);
    put(&c, h->protocol, 4);
    put(&c, h->model, 8);
    put(&c, h->epoch, 8);
    put(&c, h->attempt, 8);
    memcpy(c.out, h->token, sizeof(h->token));
    c.out += sizeof(h->token);
    put(&c, h->from, 4);
    put(&c, h->to, 4);
    put(&c, h->stream, 4);
    put(&c, 0, 4);
}

int tcp_hello_unpack(const uint8_t in[TCP_HELLO_BYTES], struct tcp_hello *ret)
{
    struct cursor c = {.in = in};
    struct tcp_hello h = {0};
    if (take(&c, 4) != HELLO_MAGIC)
        return RS_EPROTO;
    h.protocol = (uint32_t)take(&c, 4);
    h.model = take(&c, 8);
    h.epoch = take(&c, 8);
    h.attempt = take(&c, 8);
    memcpy(h.token, c.in, sizeof(h.token));
    c.in += sizeof(h.token);
    h.from = (uint32_t)take(&c, 4);
    h.to = (uint32_t)take(&c, 4);
    h.stream = (uint32_t)take(&c, 4);
    if (take(&c, 4) != 0)
        return RS_EPROTO;
    *ret = h;
    return 0;
}

bool tcp_token_equal(const uint8_t a[TRANSPORT_TOKEN_BYTES], const uint8_t b[TRANSPORT_TOKEN_BYTES])
{
    unsigned differs = 0;
    for (int i = 0; i < TRANSPORT_TOKEN_BYTES; i++)
        differs |= (unsigned)(a[i] ^ b[i]);
    return differs == 0;
}

void tcp_frame_pack(const struct tcp_frame *f, uint8_t out[TCP_FRAME_BYTES])
{
    struct cursor c = {.out = out};
    put(&c, FRAME_MAGIC, 4);
    put(&c, f->type, 1);
    put(&c, f->network, 1);
    put(&c, 0, 2);
    put(&c, f->epoch, 8);
    put(&c, f->attempt, 8);
    put(&c, f->sequence, 8);
    put(&c, f->message_bytes, 8);
    put(&c, f->offset, 8);
    put(&c, f->length, 4);
    put(&c, f->from, 4);
    put(&c, f->to, 4);
    put(&c, f->tag, 4);
}

static bool fits_together(const struct tcp_frame *f)
{
    switch (f->type) {
    case TCP_DATA:
        return f->length > 0 && f->length <= TCP_MAX_PAYLOAD_BYTES &&
               f->length <= f->message_bytes && f->offset <= f->message_bytes - f->length;
    case TCP_ACCEPT:
    case TCP_REFUSE:
    case TCP_ALIVE:
    case TCP_WELCOME:
        return f->length == 0 && f->tag == 0;
    default:
        return false;
    }
}

int tcp_frame_unpack(const uint8_t in[TCP_FRAME_BYTES], struct tcp_frame *ret)
{
    struct cursor c = {.in = in};
    struct tcp_frame f = {0};
    if (take(&c, 4) != FRAME_MAGIC)
        return RS_EPROTO;
    f.type = (uint8_t)take(&c, 1);
    uint64_t flags = take(&c, 1);
    uint64_t zero = take(&c, 2);
    f.network = flags != 0;
    f.epoch = take(&c, 8);
    f.attempt = take(&c, 8);
    f.sequence = take(&c, 8);
    f.message_bytes = take(&c, 8);
    f.offset = take(&c, 8);
    f.length = (uint32_t)take(&c, 4);
    f.from = (uint32_t)take(&c, 4);
    f.to = (uint32_t)take(&c, 4);
    f.tag = (uint32_t)take(&c, 4);
    if (flags > 1 || zero != 0 || !fits_together(&f))
        return RS_EPROTO;
    *ret = f;
    return 0;
}
