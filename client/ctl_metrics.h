/* A daemon's status as Prometheus reads it (text format 0.0.4). */
#ifndef RS_CLIENT_CTL_METRICS_H
#define RS_CLIENT_CTL_METRICS_H

#include "base/buf.h"

struct json_t; /* jansson's */

/* Appends all metrics of a StatusReply (ctl_api.h's JSON); status NULL: reshard_up 0 alone. Beside what a status has it may
 * have "last_phases": {model: phases_of() of its last refit}. Durations are seconds, sizes bytes. Each metric's samples
 * stand together, under its HELP and TYPE. */
void metrics_write(const struct json_t *status, struct buf *to);

#endif
