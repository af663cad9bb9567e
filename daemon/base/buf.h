/* Growing byte buffer for encoders, with little-endian put and checked get.
 *
 * A failed allocation marks the buffer; later puts do nothing, and the encoder checks once, at the
 * end, with buf_error. A reader never runs past its end: a short read marks it and gives zeros. */
#ifndef RS_BASE_BUF_H
#define RS_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buf {
    uint8_t *data; /* owned */
    size_t n_bytes;
    size_t capacity;
    int error; /* 0 or RS_ENOMEM */
};

void buf_init(struct buf *b);
void buf_close(struct buf *b);
int buf_error(const struct buf *b);
void buf_put(struct buf *b, const void *data, size_t n_bytes);
void buf_put_u8(struct buf *b, uint8_t v);
void buf_put_u32(struct buf *b, uint32_t v);
void buf_put_u64(struct buf *b, uint64_t v);
/* Length as u32, then the bytes; no NUL. */
void buf_put_str(struct buf *b, const char *s);
void buf_printf(struct buf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Gives the bytes away (NUL-terminated beyond n_bytes); the buffer is empty again. NULL on error.
 */
uint8_t *buf_steal(struct buf *b, size_t *ret_n_bytes);

struct reader {
    const uint8_t *data; /* borrowed */
    size_t n_bytes;
    size_t at;
    bool short_read;
};

void reader_init(struct reader *r, const void *data, size_t n_bytes);
uint8_t reader_u8(struct reader *r);
uint32_t reader_u32(struct reader *r);
uint64_t reader_u64(struct reader *r);
/* The next n bytes, borrowed; NULL where there are fewer. */
const uint8_t *reader_bytes(struct reader *r, size_t n);

#endif
