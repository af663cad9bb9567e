/* What all nodes of one attempt saw of its cells, merged: the same content everywhere, or differences to blame.
 *
 * Pages come in any order of nodes. A source's fingerprint is believed over a destination's, whichever comes first:
 * two destinations that differ wait for a source to tell which of them is wrong (cells_settle: none did). Merging goes on
 * after a difference: whoever else has got wrong bytes is to be known too. Pure. */
#ifndef RS_SERVICE_CELLS_H
#define RS_SERVICE_CELLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "peer/message.h"

struct cells;

/* Of more differences than that it is only known that there are (cells_wrong_more). */
enum { CELLS_MOST_WRONG = 65536 };

/* Both are prints of one cell. */
struct cells_difference {
    struct cell_print bad, good;
};

struct cells *cells_new(void); /* NULL: no memory */
void cells_free(struct cells *c);

/* 0; RS_EDATALOSS: all are merged, *ret is the first difference among those found by this call; RS_ENOMEM: of the
 * prints none, or those before one that failed, are merged. */
int cells_merge(struct cells *c, const struct cell_print *prints, size_t n,
                struct cells_difference *ret);
/* Every node has said all: RS_EDATALOSS where destinations differ and no source has told which is right: then each of them
 * is among the wrong ones. RS_ENOMEM. */
int cells_settle(struct cells *c, struct cells_difference *ret);

/* A print of a cell of which destinations have told and no source has (yet). False: there is none. */
bool cells_untold(const struct cells *c, struct cell_print *ret);

/* What sources have told of the cells [cell, cell + n); false: not of all of them. */
bool cells_sent(const struct cells *c, uint64_t cell, uint32_t n, uint64_t *ret_fingerprints);

/* All differences so far, in the order in which they were found; valid until the next call that changes c. */
const struct cells_difference *cells_wrong(const struct cells *c, size_t *ret_n);
/* There are more than CELLS_MOST_WRONG. */
bool cells_wrong_more(const struct cells *c);

#endif
