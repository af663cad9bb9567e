/* Makes plans. Pure: the same input gives the same bytes on every daemon. DESIGN.md section 4.
 *
 * How (each step a file of its own):
 *   class   tensors whose shapes, meshes and placements cut the same way share one geometry
 *   cells   merge the interval lists of both sides per tensor dim
 *   ingest  each domain on its own: which destination device takes each run in
 *   senders which source holder, or which fed domain's ingest rank (relay), sends each run
 *   rounds  a globally numbered round for each chunk of each pair's stream */
#ifndef RS_PLAN_PLANNER_H
#define RS_PLAN_PLANNER_H

#include "plan/plan.h"

/* RS_EINVAL, RS_EPRECOND (layout_check_pair; a rank with no device), RS_EUNIMPL (derived tensors),
 * RS_ENOMEM. *ret is the caller's to plan_free. CPU-bound: tens of milliseconds for 70,000 tensors
 * on 1024 ranks; call it off the loop thread. */
int plan_make(const struct plan_input *input, struct plan **ret, struct err *e);

/* Digest of all of the input: the key of a plan cache. */
int plan_input_digest(const struct plan_input *input, uint8_t ret_digest[16]);

#endif
