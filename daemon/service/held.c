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

int held_load(struct held_store *h, uint64_t version, const void *row, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    uint8_t *copy = mem_alloc(n_bytes);
    if (copy == NULL)
        return RS_ENOMEM;
    memcpy(copy, row, n_bytes);
    struct held_row *r = &h->rows[h->next++ % HELD_VERSIONS];
    mem_free(r->bytes);
    *r = (struct held_row){version, copy, n_bytes};
    return 0;
}

static bool row_has(const struct held_row *row, const uint8_t digest[16], uint32_t rank,
                    uint64_t fold)
{
    struct reader r;
    reader_init(&r, row->bytes, row->n_bytes);
    for (size_t n = row->n_bytes / ENTRY_BYTES; n > 0; n--) {
        bool layout = memcmp(reader_bytes(&r, 16), digest, 16) == 0;
        bool same_rank = reader_u32(&r) == rank;
        bool same = reader_u64(&r) == fold;
        if (layout && same_rank)
            return same;
    }
    return false;
}

bool held_is(const struct held_store *h, uint64_t version, const uint8_t digest[16], uint32_t rank,
             uint64_t fold)
{
    for (unsigned i = 0; i < HELD_VERSIONS; i++)
        if (h->rows[i].version == version && row_has(&h->rows[i], digest, rank, fold))
            return true;
    return false;
}
