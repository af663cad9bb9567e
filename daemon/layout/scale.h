/* Which blocks a part of a block-scaled tensor touches, and which elements a part of its scales is
 * made of. Two dims; a block counts from element 0 and may be cut at the tensor's end. libc alone. */
#ifndef RS_LAYOUT_SCALE_H
#define RS_LAYOUT_SCALE_H

#include <stdbool.h>
#include <stdint.h>

#include "layout/box.h"

/* Elements of the greatest block, unless one block is the whole tensor: so that a whole one fits
 * where it is worked on. */
enum { SCALE_MAX_BLOCK = 1 << 18 };

/* One block is the whole tensor of that shape: its one scale is that of the tensor. */
bool scale_whole(const uint32_t block[2], const uint64_t shape[2]);
/* True where the planner and the data plane can do it: whole, or of SCALE_MAX_BLOCK elements. */
bool scale_known(const uint32_t block[2], const uint64_t shape[2]);
/* Blocks of a tensor of `length` along one dim. */
uint64_t scale_count(uint32_t block, uint64_t length);
/* The blocks that a part of the tensor touches: a box of its scales. */
struct box scale_touched(const uint32_t block[2], const struct box *part);
/* The elements of a box of scales. */
struct box scale_elements(const uint32_t block[2], const uint64_t shape[2],
                          const struct box *scales);
/* The blocks that lie wholly in a part, as a box of scales; false where there is none. */
bool scale_inside(const uint32_t block[2], const uint64_t shape[2], const struct box *part,
                  struct box *ret);

#endif
