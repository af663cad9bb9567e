/* Cells that a node has received, told in short: which, and one digest of their fingerprints. Whoever knows what their sources
 * sent needs no more to see that all of them are right; to see which are wrong it needs each (NODE_ORDER_CELLS). Pure. */
#ifndef RS_SERVICE_CELLS_SUM_H
#define RS_SERVICE_CELLS_SUM_H

#include "service/cells.h"

/* By their numbers, so that their runs are long: a program has them by their shapes. RS_ENOMEM: they are as they were. */
int cells_sort(struct cell_print *prints, uint32_t n);
/* The first of `prints` in runs that follow each other as they do, as many as ret_runs has room for (`capacity`, at least 1), and
 * the XXH3-128 of their fingerprints, 64 bits little-endian each. Returns how many prints these are. */
uint32_t cells_sum(const struct cell_print *prints, uint32_t n, struct cell_run *ret_runs,
                   uint32_t capacity, uint32_t *ret_n_runs, uint8_t ret_digest[16]);
/* Sources have told of each of these cells, and the digest is that of what they have told. c may be NULL: nobody has told
 * anything. */
bool cells_agree(const struct cells *c, const struct cell_run *runs, uint32_t n_runs,
                 const uint8_t digest[16]);

#endif
