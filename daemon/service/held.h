/* What committed versions look like in the memory of each destination rank: one number per (layout, rank), folded from
 * the fingerprints of its tensors. It is kept with the version in the ledger, so that memory which says that it holds
 * a version can be believed after a restart, once it has been fingerprinted again. */
#ifndef RS_SERVICE_HELD_H
#define RS_SERVICE_HELD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

struct held_store;

enum { HELD_VERSIONS = 16 }; /* older ones are forgotten */

struct held_store *held_new(void);
void held_free(struct held_store *h);

/* The number for one rank's fingerprints. */
uint64_t held_fold(const uint64_t *fingerprints, uint32_t n);
/* One entry of a version's row. */
void held_put(struct buf *out, const uint8_t layout_digest[16], uint32_t rank, uint64_t fold);
/* Takes a row, as written by held_put, from the ledger or from a commit; it replaces that version's. Copies. 0 or
 * RS_ENOMEM. */
int held_load(struct held_store *h, uint64_t version, const void *row, size_t n_bytes);
/* True where that rank's memory, folded so, is that version. */
bool held_is(const struct held_store *h, uint64_t version, const uint8_t layout_digest[16],
             uint32_t rank, uint64_t fold);
/* The number of that rank's memory in that version; false: none is known. */
bool held_find(const struct held_store *h, uint64_t version, const uint8_t layout_digest[16],
               uint32_t rank, uint64_t *ret_fold);
/* Puts behind the entries of `out` those of that version's row which are of other ranks: what the row is to be from now
 * on. Errors stay in `out`. */
void held_merge(const struct held_store *h, uint64_t version, struct buf *out);

#endif
