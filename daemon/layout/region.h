/* Sets of boxes that should tile a tensor: overlap, gaps, and the same box on several ranks.
 *
 * For layout/ and memory/binding_check.c; libc alone. Work is bounded: what would take too long is
 * refused with RS_EEXHAUSTED. */
#ifndef RS_LAYOUT_REGION_H
#define RS_LAYOUT_REGION_H

#include "layout/layout.h"

/* The distinct regions of a tensor (one for each set of replicas, the lowest rank's), in the order of
 * their boxes. `ret`: a mem_alloc'd array of pointers into t->regions, the caller's. 0 or RS_ENOMEM. */
int region_distinct(const struct tensor *t, const struct region ***ret, uint32_t *ret_n);

/* 1 and two regions that share an element where there are such; 0 where all are disjoint; RS_EEXHAUSTED.
 * Reorders `regions`. */
int region_overlap(const struct region **regions, uint32_t n, const struct region **ret_a,
                   const struct region **ret_b);

/* Of disjoint regions: 1 and a part of `need` that none of them holds; 0 where there is none; RS_ENOMEM. */
int region_gap(const struct region *const *regions, uint32_t n, const struct box *need,
               struct box *ret_missing);

/* Total order of boxes of the same number of dims. */
int region_box_compare(const struct box *a, const struct box *b);

#endif
