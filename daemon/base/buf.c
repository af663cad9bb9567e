#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"

#include "base/banned.h"

void buf_init(struct buf *b)
{
    *b = (struct buf){0};
}

void buf_close(struct buf *b)
{
    mem_free(b->data);
    *b = (struct buf){0};
}

int buf_error(const struct buf *b)
{
    return b->error;
}

/* Room for n more bytes and a NUL. */
static bool reserve(struct buf *b, size_t n)
{
    if (b->error != 0)
        return false;
    if (n > SIZE_MAX - b->n_bytes - 1) {
        b->error = RS_ENOMEM;
        return false;
    }
    void *data = b->data;
    b->error = mem_grow(&data, &b->capacity, b->n_bytes + n + 1, 1);
    if (b->error != 0)
        return false;
    b->data = data;
    return true;
}

void buf_put(struct buf *b, const void *data, size_t n_bytes)
{
    if (!reserve(b, n_bytes))
        return;
    if (n_bytes > 0)
        memcpy(b->data + b->n_bytes, data, n_bytes);
    b->n_bytes += n_bytes;
}

void buf_put_u8(struct buf *b, uint8_t v)
{
    buf_put(b, &v, 1);
}

void buf_put_u32(struct buf *b, uint32_t v)
{
    uint8_t raw[4];
    for (unsigned i = 0; i < 4; i++)
        raw[i] = (uint8_t)(v >> (8 * i));
    buf_put(b, raw, sizeof raw);
}

void buf_put_u64(struct buf *b, uint64_t v)
{
    uint8_t raw[8];
    for (unsigned i = 0; i < 8; i++)
        raw[i] = (uint8_t)(v >> (8 * i));
    buf_put(b, raw, sizeof raw);
}

void buf_put_str(struct buf *b, const char *s)
{
    size_t n = strlen(s);
    buf_put_u32(b, (uint32_t)n);
    buf_put(b, s, n);
}

void buf_printf(struct buf *b, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n < 0 || !reserve(b, (size_t)n))
        return;
    va_start(args, format);
    (void)vsnprintf((char *)b->data + b->n_bytes, (size_t)n + 1, format, args);
    va_end(args);
    b->n_bytes += (size_t)n;
}

uint8_t *buf_steal(struct buf *b, size_t *ret_n_bytes)
{
    if (!reserve(b, 0))
        return NULL;
    uint8_t *data = b->data;
    data[b->n_bytes] = 0;
    if (ret_n_bytes != NULL)
        *ret_n_bytes = b->n_bytes;
    *b = (struct buf){0};
    return data;
}

void reader_init(struct reader *r, const void *data, size_t n_bytes)
{
    *r = (struct reader){.data = data, .n_bytes = n_bytes};
}

const uint8_t *reader_bytes(struct reader *r, size_t n)
{
    if (n > r->n_bytes - r->at) {
        r->short_read = true;
        r->at = r->n_bytes;
        return NULL;
    }
    const uint8_t *p = r->data + r->at;
    r->at += n;
    return p;
}

uint8_t reader_u8(struct reader *r)
{
    const uint8_t *p = reader_bytes(r, 1);
    return p == NULL ? 0 : *p;
}

uint32_t reader_u32(struct reader *r)
{
    const uint8_t *p = reader_bytes(r, 4);
    uint32_t v = 0;
    for (unsigned i = 0; p != NULL && i < 4; i++)
        v |= (uint32_t)p[i] << (8 * i);
    return v;
}

uint64_t reader_u64(struct reader *r)
{
    const uint8_t *p = reader_bytes(r, 8);
    uint64_t v = 0;
    for (unsigned i = 0; p != NULL && i < 8; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}
