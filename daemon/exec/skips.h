/* What a node needs not be sent: items of its receiving streams that all of their takers hold.
 *
 * Made where the streams end (the receiving node has the places), used where they begin. A blob is a
 * row of records, each of one stream; blobs of several nodes may be put one behind the other, since
 * a stream's order is unique in the plan. Records are u32 order, u32 n_items, then n_items bits,
 * lowest first, in u64 words; host order is little-endian on all machines that this runs on, and so
 * is the blob. Pure, any thread. */
#ifndef RS_EXEC_SKIPS_H
#define RS_EXEC_SKIPS_H

#include "base/buf.h"
#include "plan/program.h"

struct skips_record {
    uint32_t order, n_items;
    const uint8_t *bits;
};

struct skips {
    struct skips_record *records; /* ascending order */
    size_t n;
};

/* Appends a record for each receiving stream of the program with a sender that is not on this node,
 * where `held` (a byte per hold) makes any item needless. RS_ENOMEM. */
int skips_encode(const struct program *p, const uint8_t *held, struct buf *out);
/* True where all places that item `item` is written to hold it already; never for scratch. */
bool skips_item_held(const struct program *p, const uint8_t *held, uint32_t item);

/* Reads a blob, which must outlive it. RS_EPROTO: it is none, or names a stream twice; RS_ENOMEM. */
int skips_open(const void *data, size_t n_bytes, struct skips *ret, struct err *e);
/* The record of a stream; NULL: nothing of it is left out. */
const struct skips_record *skips_find(const struct skips *s, uint32_t order);
bool skips_has(const struct skips_record *r, uint32_t item); /* item: from the stream's first on */
void skips_close(struct skips *s);

#endif
