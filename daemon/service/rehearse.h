/* A rehearsal's sources: whether what they have published is what their layout makes of coordinates (layout/coordinates.h).
 * Pure; off the loop thread, in bounded memory. */
#ifndef RS_SERVICE_REHEARSE_H
#define RS_SERVICE_REHEARSE_H

#include <stdint.h>

#include "base/err.h"
#include "layout/layout.h"

struct publication;

/* Elements that are computed for one rehearsal at most: about ten seconds of one core, within the prepare deadline. Beyond it
 * only a sample is. */
#define REHEARSE_MOST_ELEMENTS (UINT64_C(1) << 31)

struct rehearse_extent {
    uint64_t shards, checked; /* distinct ones: what replicas hold alike is computed once */
};

/* RS_EPRECOND: a rank has published without fingerprints, so that nothing is known of its memory. */
int rehearse_fingerprinted(const struct layout *source, struct publication *const *publications,
                           struct err *e);
/* All fingerprinted, replicas alike (compare_sources). publications[rank] (NULL: that rank takes no part). Where all of it is more than most_elements, every shard below a
 * million elements is computed, and each nth of the others. RS_EDATALOSS names the first tensor, box and rank that differ, and
 * how many more do; RS_ENOMEM. */
int rehearse_check(const struct layout *source, struct publication *const *publications,
                   uint64_t most_elements, struct rehearse_extent *ret, struct err *e);

#endif
