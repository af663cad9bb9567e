/* The two halves of plan_check: transfers (plan_check.c) and messages (plan_check_messages.c). */
#ifndef RS_PLAN_CHECK_H
#define RS_PLAN_CHECK_H

#include "plan/plan.h"
#include "plan/program.h"

/* All nodes' programs: every hold of a destination is written once, nothing is sent before it is
 * there, and both ends of each stream have the same items and messages. */
int plan_check_messages(const struct plan *p, uint32_t n_nodes, struct err *e);

/* What the programs said of each stream, to be compared between its ends. */
struct stream_end {
    uint64_t digest; /* of items and messages */
    uint32_t order;
    uint32_t device; /* the plan's number */
    uint32_t peer;
    uint8_t send;
};

#endif
