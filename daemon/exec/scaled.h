/* Cells that a source's reader makes: values quantised by block, and the blocks' scales.
 *
 * A part of such a cell is made in tiles of whole blocks: the tile's source elements are brought
 * together (or read where they lie, in dense rows), quantised by a device item into the stream's
 * work memory, and moved on from there as any other box. So a part depends on nothing but the
 * source's content, wherever it is cut. A scale of a tensor too great for one tile is found first,
 * once per stream that needs it. Loop thread. */
#ifndef RS_EXEC_SCALED_H
#define RS_EXEC_SCALED_H

#include "exec/move.h"

/* The greatest magnitude of one whole tensor at a place, and the streams (of the place's device, by
 * bit) on which finding it is enqueued. */
struct place_amax {
    uint32_t bits;
    uint32_t streams;
};

/* A source place of a program with such cells: what it needs beside its bindings. RS_EUNIMPL: its
 * device makes none. scaled_close undoes it, and is fine without. */
int scaled_open(struct place *place, struct err *e);
void scaled_close(struct place *place);

/* batch_move from a place that makes the tensor (place_makes). Without a target its fingerprint is
 * taken. */
int scaled_move(struct batch *b, const struct move *m);

/* The end of a part of the cell that begins at element `at` and reads about `budget` bytes of the
 * source: between rows of blocks where it can be. *ret_used: the bytes that it reads. */
uint64_t scaled_part(const struct program *p, uint32_t cell, uint64_t at, uint64_t budget,
                     uint64_t *ret_used);

#endif
