/* A plan for an attempt: found in the store, or made on another thread. The same on every node. Private to service/. */
#ifndef RS_SERVICE_PLANNING_H
#define RS_SERVICE_PLANNING_H

#include "base/err.h"
#include "peer/message.h"
#include "service/plan_store.h"
#include "service/share.h"

struct planning;
struct service;

/* code 0: `entry` is the callee's, counted. */
typedef void (*planning_fn)(void *arg, int code, struct plan_entry *entry, const struct err *e);

/* Plans, with this node's program where it takes part, and checks what the workers of `share` have in common (taken;
 * NULL: nothing). 0: done runs once, later, or inside the call and *ret is NULL then. RS_ENOTFOUND: a layout is not
 * here. The input has passed attempt_input_check. */
int planning_start(struct service *s, const struct attempt_input *in, struct share *share,
                   planning_fn done, void *arg, struct planning **ret, struct err *e);
/* done will not run; NULL is fine. */
void planning_forget(struct planning *p);

#endif
