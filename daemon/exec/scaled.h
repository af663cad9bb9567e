/* Cells that a source's reader makes: values quantised by block, and the blocks' scales.
 *
 * A part of such a cell is made of whole blocks. Where their source elements and what they become
 * lie in dense rows (they mostly do) a device item reads the ones and writes the others, with the
 * fingerprint. Else they are brought together, cast into the stream's work memory, and moved on from
 * there as any other box, tile by tile; scales are always. So a part depends on nothing but the
 * source's content, wherever it is cut. A scale of a tensor too great for one tile is found first,
 * once per stream that needs it. Loop thread. */
#ifndef RS_EXEC_SCALED_H
#define RS_EXEC_SCALED_H

#include "exec/move.h"

/* A source place, before anything is read from it. */
void scaled_open(struct place *place);

/* batch_move from a place that makes the tensor (place_makes). Without a target its fingerprint is
 * taken. */
int scaled_move(struct batch *b, const struct move *m);

/* One scale for all of it, whose elements are too many to be worked on at once: it is found before any value is made. */
bool scaled_by_amax(const struct program_tensor *t);
/* A number in the stream's work memory, in the stream's order; no move keeps anything there. */
int scaled_number(struct batch *b, uint32_t **ret);

/* The end of a part of the cell that begins at element `at` and reads about `budget` bytes of the
 * source: between rows of blocks where it can be. *ret_used: the bytes that it reads. */
uint64_t scaled_part(const struct program *p, uint32_t cell, uint64_t at, uint64_t budget,
                     uint64_t *ret_used);

#endif
