/* Protobuf's wire format by hand, strict, for the few tiny messages of health and reflection and
 * for the look through a message before it is unpacked. Pure. */
#ifndef RS_RPC_RPC_WIRE_H
#define RS_RPC_RPC_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

enum wire_type { WIRE_VARINT = 0, WIRE_FIXED64 = 1, WIRE_BYTES = 2, WIRE_FIXED32 = 5 };

struct wire {
    const uint8_t *at; /* borrowed */
    const uint8_t *end;
    const char *fault; /* what was wrong, after wire_next gave RS_EINVAL */
};

struct wire_field {
    uint32_t number;
    enum wire_type type;
    uint64_t value; /* of WIRE_VARINT */
    /* the payload's bytes: of WIRE_BYTES after the length, else as they stand */
    const uint8_t *data;
    size_t n_bytes;
};

void wire_init(struct wire *w, const void *data, size_t n_bytes);
/* 1 and the next field; 0 at the end; RS_EINVAL: malformed (groups count as malformed). */
int wire_next(struct wire *w, struct wire_field *ret);
/* One varint of at most 64 bits in at most 10 bytes; false: malformed or cut short. */
bool wire_varint(struct wire *w, uint64_t *ret);
/* True where the field's bytes are exactly `text`. */
bool wire_equals(const struct wire_field *f, const char *text, size_t n_bytes);

/* Encoders; a failed allocation marks the buffer (base/buf.h). */
void wire_put_varint(struct buf *b, uint64_t v);
void wire_put_uint(struct buf *b, uint32_t number, uint64_t v);
void wire_put_bytes(struct buf *b, uint32_t number, const void *data, size_t n_bytes);

/* Valid UTF-8 (no surrogates, no overlong forms, up to U+10FFFF) without a NUL. */
bool wire_is_text(const uint8_t *data, size_t n_bytes);

#endif
