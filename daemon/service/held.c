#include "service/held.h"

#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "service/mix.h"

#include "base/banned.h"

enum { ENTRY_BYTES = 16 + 4 + 8 };

struct held_row {
    uint64_t version; /* 0: free */
    uint8_t *bytes;
    size_t n_bytes;
};

struct held_store {
    struct held_row rows[HELD_VERSIONS]; /* a ring, by the order of coming */
    unsigned next;
};

struct held_store *held_new(void)
{
    return mem_zalloc(sizeof(struct held_store));
}

void held_free(struct held_store *h)
{
    for (unsigned i = 0; h != NULL && i < HELD_VERSIONS; i++)
        mem_free(h->rows[i].bytes);
    mem_free(h);
}

uint64_t held_fold(const uint64_t *fingerprints, uint32_t n)
{
    return mix_bytes(0, fingerprints, (size_t)n * sizeof *fingerprints);
}

void held_put(struct buf *out, const uint8_t layout_digest[16], uint32_t rank, uint64_t fold)
{
    buf_put(out, layout_digest, 16);
    buf_put_u32(out, rank);
    buf_put_u64(out, fold);
}

static const struct held_row *row_of(const struct held_store *h, uint64_t version)
{
    for (unsigned i = 0; version != 0 && i < HELD_VERSIONS; i++)
        if (h->rows[i].version == version)
            return &h->rows[i];
    return NULL;
}

int held_load(struct held_store *h, uint64_t version, const void *row, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    uint8_t *copy = mem_alloc(n_bytes);
    if (copy == NULL)
        return RS_ENOMEM;
    memcpy(copy, row, n_bytes);
    const struct held_row *old = row_of(h, version);
    struct held_row *r =
        old != NULL ? &h->rows[old - h->rows] : &h->rows[h->next++ % HELD_VERSIONS];
    mem_free(r->bytes);
    *r = (struct held_row){version, copy, n_bytes};
    return 0;
}

struct held_entry {
    const uint8_t *layout;
    uint32_t rank;
    uint64_t fold;
};

/* The next one; false: there is none, or what is left is cut short. */
static bool entry_next(struct reader *r, size_t *left, struct held_entry *ret)
{
    if (*left < ENTRY_BYTES)
        return false;
    *left -= ENTRY_BYTES;
    ret->layout = reader_bytes(r, 16);
    ret->rank = reader_u32(r);
    ret->fold = reader_u64(r);
    return true;
}

static bool bytes_find(const uint8_t *bytes, size_t n_bytes, const uint8_t digest[16],
                       uint32_t rank, uint64_t *ret_fold)
{
    struct reader r;
    struct held_entry x;
    reader_init(&r, bytes, n_bytes);
    while (entry_next(&r, &n_bytes, &x))
        if (x.rank == rank && memcmp(x.layout, digest, 16) == 0) {
            *ret_fold = x.fold;
            return true;
        }
    return false;
}

bool held_find(const struct held_store *h, uint64_t version, const uint8_t digest[16],
               uint32_t rank, uint64_t *ret_fold)
{
    const struct held_row *row = row_of(h, version);
    return row != NULL && bytes_find(row->bytes, row->n_bytes, digest, rank, ret_fold);
}

bool held_is(const struct held_store *h, uint64_t version, const uint8_t digest[16], uint32_t rank,
             uint64_t fold)
{
    uint64_t known;
    return held_find(h, version, digest, rank, &known) && known == fold;
}

void held_merge(const struct held_store *h, uint64_t version, struct buf *out)
{
    const struct held_row *row = row_of(h, version);
    struct reader r;
    struct held_entry x;
    size_t left = row != NULL ? row->n_bytes : 0, n_new = out->n_bytes;
    reader_init(&r, row != NULL ? row->bytes : NULL, left);
    while (entry_next(&r, &left, &x)) {
        uint64_t newer;
        if (buf_error(out) == 0 && !bytes_find(out->data, n_new, x.layout, x.rank, &newer))
            held_put(out, x.layout, x.rank, x.fold);
    }
}
