/* What all nodes of one attempt saw of its cells, merged: the same content everywhere, or a difference to blame.
 *
 * Pages come in any order of nodes. A source's fingerprint is believed over a destination's, whichever comes first:
 * two destinations that differ wait for a source to tell which of them is wrong (cells_settle: none did). Pure. */
#ifndef RS_SERVICE_CELLS_H
#define RS_SERVICE_CELLS_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "peer/message.h"

struct cells;

/* Both are prints of one cell. */
struct cells_difference {
    struct cell_print bad, good;
};

struct cells *cells_new(void); /* NULL: no memory */
void cells_free(struct cells *c);

/* 0; RS_EDATALOSS: *ret says where; RS_ENOMEM: what came before the failing print is merged. */
int cells_merge(struct cells *c, const struct cell_print *prints, size_t n,
                struct cells_difference *ret);
/* Every node has said all: RS_EDATALOSS where destinations differ and no source has told which is right. */
int cells_settle(const struct cells *c, struct cells_difference *ret);

#endif
