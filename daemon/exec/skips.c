#include "exec/skips.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "exec/prints.h"

#include "base/banned.h"

enum { HEAD_BYTES = 8, WORD_BITS = 64 };

static uint64_t bits_bytes(uint32_t n_items)
{
    return ((uint64_t)n_items + WORD_BITS - 1) / WORD_BITS * sizeof(uint64_t);
}

/* --- making ----------------------------------------------------------------------------------- */

bool skips_item_held(const struct program *p, const uint8_t *held, uint32_t item)
{
    struct program_item x = program_item(p, item);
    const uint32_t *list = &p->lists[x.places];
    for (uint32_t i = 1; i <= list[0]; i++) {
        uint32_t hold = program_hold_at(p, list[i], x.cell);
        if (hold == PROGRAM_NONE || held[hold] == 0)
            return false;
    }
    return true;
}

static bool device_here(const struct program *p, uint32_t device)
{
    for (uint32_t d = 0; d < p->n_devices; d++)
        if (p->devices[d].device == device)
            return true;
    return false;
}

static void put_record(const struct program *p, const uint8_t *held, uint32_t stream,
                       struct buf *out)
{
    const struct program_stream *s = &p->streams[stream];
    size_t begin = out->n_bytes;
    uint64_t word = 0, any = 0;
    buf_put_u32(out, s->order);
    buf_put_u32(out, s->n_items);
    for (uint32_t i = 0; i < s->n_items; i++) {
        if (skips_item_held(p, held, s->first_item + i))
            word |= UINT64_C(1) << (i % WORD_BITS);
        if (i % WORD_BITS != WORD_BITS - 1 && i != s->n_items - 1)
            continue;
        buf_put_u64(out, word);
        any |= word;
        word = 0;
    }
    if (any == 0 && buf_error(out) == 0)
        out->n_bytes = begin;
}

int skips_encode(const struct program *p, const uint8_t *held, struct buf *out)
{
    for (uint32_t s = 0; s < p->n_streams; s++)
        if (p->streams[s].send == 0 && !device_here(p, p->streams[s].peer))
            put_record(p, held, s, out);
    return buf_error(out);
}

/* --- reading ---------------------------------------------------------------------------------- */

static int order_compare(const void *a, const void *b)
{
    uint32_t x = ((const struct skips_record *)a)->order;
    uint32_t y = ((const struct skips_record *)b)->order;
    return x < y ? -1 : x > y;
}

/* The record at *at, which it moves behind it. */
static int take_record(struct reader *r, struct skips_record *ret)
{
    ret->order = reader_u32(r);
    ret->n_items = reader_u32(r);
    ret->bits = reader_bytes(r, bits_bytes(ret->n_items));
    return ret->bits == NULL || ret->n_items == 0 ? RS_EPROTO : 0;
}

static int count_records(const void *data, size_t n_bytes, size_t *ret)
{
    struct skips_record x;
    struct reader r;
    size_t n = 0;
    reader_init(&r, data, n_bytes);
    for (; r.at < n_bytes; n++)
        if (take_record(&r, &x) != 0)
            return RS_EPROTO;
    *ret = n;
    return 0;
}

int skips_open(const void *data, size_t n_bytes, struct skips *ret, struct err *e)
{
    struct skips s = {0};
    struct reader r;
    if (count_records(data, n_bytes, &s.n) != 0)
        return err_set(e, RS_EPROTO, "skips: %zu bytes that are no records", n_bytes);
    s.records = mem_calloc(s.n, sizeof(*s.records));
    if (s.records == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    reader_init(&r, data, n_bytes);
    for (size_t i = 0; i < s.n; i++)
        (void)take_record(&r, &s.records[i]);
    if (s.n > 0)
        qsort(s.records, s.n, sizeof(*s.records), order_compare);
    for (size_t i = 1; i < s.n; i++)
        if (s.records[i].order == s.records[i - 1].order) {
            int code = err_set(e, RS_EPROTO, "skips: stream %u is named twice", s.records[i].order);
            skips_close(&s);
            return code;
        }
    *ret = s;
    return 0;
}

const struct skips_record *skips_find(const struct skips *s, uint32_t order)
{
    const struct skips_record key = {.order = order};
    return s->n == 0 ? NULL : bsearch(&key, s->records, s->n, sizeof(key), order_compare);
}

bool skips_has(const struct skips_record *r, uint32_t item)
{
    return item < r->n_items && (r->bits[item / 8] >> (item % 8) & 1) != 0;
}

void skips_close(struct skips *s)
{
    mem_free(s->records);
    *s = (struct skips){0};
}
