/* Fingerprints compared, off the loop thread: what sources published, and what landed. What a fingerprint is: kernels/fingerprint.h.
 *
 * Both functions are pure: they read what they are given and blame by name: tensor, box, side and rank. */
#ifndef RS_SERVICE_COMPARE_H
#define RS_SERVICE_COMPARE_H

#include <stdint.h>

#include "base/err.h"
#include "layout/layout.h"
#include "service/plan_store.h"

struct publication;

enum compare_mode { COMPARE_OFF, COMPARE_SAMPLED, COMPARE_FULL }; /* = enum wire_verify */

/* publications[rank] (NULL: that rank takes no part) of one version. Ranks that hold the same box of a tensor must
 * agree; whole tensors that a client has fingerprinted its own way must be the sum of their boxes. RS_EDATALOSS tells of the first tensor and names more. */
int compare_sources(const struct layout *source, struct publication *const *publications,
                    struct err *e);

/* holds[i] is the fingerprint of plan->program.holds[i] as the data plane read it. All holds of a cell must agree; a
 * source that sent whole shards in its own dtype must have sent what it published. sums (mem_calloc'd by the caller,
 * [n_places] of NULL or arrays) receive per place and tensor of its layout the sum of its cells. RS_EDATALOSS, and
 * *ret_place is the blamed destination's place (PROGRAM_NONE: not known). */
int compare_landed(const struct plan_entry *plan, const uint64_t *holds, enum compare_mode mode,
                   struct publication *const *publications, uint64_t **sums, uint32_t *ret_place,
                   struct err *e);

#endif
