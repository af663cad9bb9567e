/* The memory of one unpacked message: small pieces from a few blocks that are freed together, large ones each for itself.
 *
 * protobuf-c asks for four pieces for each region of a layout; from the heap that is a third of what reading a page costs.
 * Only pb_budget.c uses this. Built with the address sanitizer every piece is the heap's own, so that what is read past its
 * end is found. */
#ifndef RS_RPC_PB_ARENA_H
#define RS_RPC_PB_ARENA_H

#include <stddef.h>

struct pb_arena; /* lies in front of its first piece, the message itself */

/* most_bytes: of all that is live, its own bookkeeping included. first_bytes: of the first piece; about_bytes: of all of
 * them, as far as is known. NULL: over most_bytes, or no memory. */
struct pb_arena *pb_arena_new(size_t most_bytes, size_t first_bytes, size_t about_bytes);
/* ProtobufCAllocator's. A small piece stays until the end. */
void *pb_arena_alloc(void *arena, size_t n_bytes);
void pb_arena_free(void *arena, void *p);
struct pb_arena *pb_arena_of(void *first_piece);
void pb_arena_close(struct pb_arena *a); /* frees all */

#endif
