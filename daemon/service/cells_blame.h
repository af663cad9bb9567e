/* Words for a difference between nodes: tensor, box, layouts and ranks, found in the plan off the loop. */
#ifndef RS_SERVICE_CELLS_BLAME_H
#define RS_SERVICE_CELLS_BLAME_H

#include "base/err.h"
#include "service/cells.h"
#include "service/plan_store.h"

struct cells_blame;
struct service;

/* RS_EDATALOSS "tensor 'w' [0:4]: layout 'rollout' rank 2 holds fingerprint … where layout 'train' rank 0 sent …". Pure;
 * any thread. */
int cells_blame(const struct plan_entry *plan, const struct cells_difference *x, struct err *e);

/* The same as a job; done runs once, later. RS_ENOMEM. */
int cells_blame_start(struct service *s, struct plan_entry *plan, const struct cells_difference *x,
                      void (*done)(void *arg, int code, const char *text,
                                   const struct cells_difference *x),
                      void *arg, struct cells_blame **ret);
void cells_blame_forget(struct cells_blame *b); /* NULL is fine */

#endif
