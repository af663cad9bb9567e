/* What the files of Status share. Private to service/. */
#ifndef RS_SERVICE_API_STATUS_H
#define RS_SERVICE_API_STATUS_H

#include "service/api_arena.h"
#include "service/api_common.h"

/* Fills *to from the decider; strings are the decider's or the arena's. */
void api_model_fill(struct arena *a, Reshard__V1__ModelStatus *to, struct decider *d);
/* What keeps all of a node's workers from taking part; "" where nothing does. */
const char *api_node_lacks(const struct refit *r, uint32_t node);

#endif
