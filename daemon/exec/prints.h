/* Fingerprints of a program's cells through places. Loop thread. */
#ifndef RS_EXEC_PRINTS_H
#define RS_EXEC_PRINTS_H

#include "exec/move.h"

/* Enqueues (through `b`, on the way's check stream) the fingerprint of a part of `cell` at `place`, in wire dtype: elements
 * from *at on, about *budget bytes; both are moved on. A cast cell's is that of the cast value. */
int prints_cell(struct batch *b, struct plane_way *way, const struct program *p,
                const struct place *place, uint32_t cell, uint64_t *at, uint64_t *budget,
                uint64_t *sum);
/* Program tensor → index in the source layout; NULL when memory is out. */
uint32_t *prints_source_index(const struct program *p);
/* Every cell that place number `number` holds is bound at `place`, in the right dtype, and writable
 * where it is a destination. */
int prints_check_holds(const struct program *p, const struct place *place, uint32_t number,
                       struct err *e);

#endif
