#include "rpc/rpc_wire.h"

#include <string.h>

#include "base/err.h"

#include "base/banned.h"

void wire_init(struct wire *w, const void *data, size_t n_bytes)
{
    static const uint8_t nothing[1];
    w->at = n_bytes == 0 ? nothing : data; /* NULL + 0 is undefined */
    w->end = w->at + n_bytes;
    w->fault = NULL;
}

static int malformed(struct wire *w, const char *fault)
{
    w->fault = fault;
    return RS_EINVAL;
}

bool wire_varint(struct wire *w, uint64_t *ret)
{
    uint64_t v = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
        if (w->at == w->end)
            return false;
        uint8_t byte = *w->at++;
        if (shift == 63 && byte > 1)
            return false; /* the tenth byte holds one bit */
        v |= (uint64_t)(byte & 0x7FU) << shift;
        if ((byte & 0x80U) == 0) {
            *ret = v;
            return true;
        }
    }
    return false;
}

static int take(struct wire *w, struct wire_field *f, uint64_t n_bytes)
{
    if (n_bytes > (uint64_t)(w->end - w->at))
        return malformed(w, "a field runs past the end");
    f->data = w->at;
    f->n_bytes = (size_t)n_bytes;
    w->at += n_bytes;
    return 1;
}

static int take_varint(struct wire *w, struct wire_field *f)
{
    const uint8_t *start = w->at;
    if (!wire_varint(w, &f->value))
        return malformed(w, "a varint is cut short or too long");
    f->data = start;
    f->n_bytes = (size_t)(w->at - start);
    return 1;
}

static int take_bytes(struct wire *w, struct wire_field *f)
{
    uint64_t n_bytes;
    if (!wire_varint(w, &n_bytes))
        return malformed(w, "a length is cut short or too long");
    return take(w, f, n_bytes);
}

int wire_next(struct wire *w, struct wire_field *ret)
{
    uint64_t tag;
    if (w->at == w->end)
        return 0;
    const uint8_t *start = w->at;
    if (!wire_varint(w, &tag) || tag > UINT32_MAX || w->at - start > 5)
        return malformed(w, "a tag is cut short or too long");
    struct wire_field f = {.number = (uint32_t)(tag >> 3), .type = (enum wire_type)(tag & 7U)};
    if (f.number == 0)
        return malformed(w, "field number 0");
    *ret = f;
    switch (f.type) {
    case WIRE_VARINT:
        return take_varint(w, ret);
    case WIRE_FIXED64:
        return take(w, ret, 8);
    case WIRE_BYTES:
        return take_bytes(w, ret);
    case WIRE_FIXED32:
        return take(w, ret, 4);
    default:
        return malformed(w, "a group or an unknown wire type");
    }
}

bool wire_equals(const struct wire_field *f, const char *text, size_t n_bytes)
{
    return f->type == WIRE_BYTES && f->n_bytes == n_bytes && memcmp(f->data, text, n_bytes) == 0;
}

void wire_put_varint(struct buf *b, uint64_t v)
{
    for (; v >= 0x80U; v >>= 7)
        buf_put_u8(b, (uint8_t)(v | 0x80U));
    buf_put_u8(b, (uint8_t)v);
}

void wire_put_uint(struct buf *b, uint32_t number, uint64_t v)
{
    wire_put_varint(b, (uint64_t)number << 3 | WIRE_VARINT);
    wire_put_varint(b, v);
}

void wire_put_bytes(struct buf *b, uint32_t number, const void *data, size_t n_bytes)
{
    wire_put_varint(b, (uint64_t)number << 3 | WIRE_BYTES);
    wire_put_varint(b, n_bytes);
    buf_put(b, data, n_bytes);
}

/* Bytes of the character at p, 0 where it is not one; the ranges are those of RFC 3629. */
static size_t character(const uint8_t *p, size_t left)
{
    if (p[0] < 0x80)
        return p[0] == 0 ? 0 : 1;
    size_t n = p[0] >= 0xC2 && p[0] <= 0xDF ? 2 : (p[0] & 0xF0U) == 0xE0 ? 3 : 4;
    if (p[0] < 0xC2 || p[0] > 0xF4 || left < n)
        return 0;
    uint8_t low = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : 0x80;
    uint8_t high = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : 0xBF;
    if (p[1] < low || p[1] > high)
        return 0;
    for (size_t i = 2; i < n; i++)
        if ((p[i] & 0xC0U) != 0x80U)
            return 0;
    return n;
}

bool wire_is_text(const uint8_t *data, size_t n_bytes)
{
    for (size_t at = 0; at < n_bytes;) {
        size_t n = character(data + at, n_bytes - at);
        if (n == 0)
            return false;
        at += n;
    }
    return true;
}
