/* The data plane blames by number; people are told names. */
#ifndef RS_SERVICE_BLAME_H
#define RS_SERVICE_BLAME_H

#include "base/err.h"
#include "layout/layout.h"
#include "service/plan_store.h"

/* Rewrites e's text: "tensor 3" becomes "tensor 'w'" (layout says which it is), "place 7 (…)" becomes "layout 'rollout'
 * rank 2" where a plan is given. Numbers that are not there stay. */
void blame_names(struct err *e, const struct layout *layout, const struct plan_entry *plan);

#endif
