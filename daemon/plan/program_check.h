/* What program_open checks, once the arrays are found: first all that is looked up, then what moves. RS_EPROTO says what is
 * wrong, RS_ENOMEM. */
#ifndef RS_PLAN_PROGRAM_CHECK_H
#define RS_PLAN_PROGRAM_CHECK_H

#include "plan/program.h"

/* Greatest size of anything, so that sums of a few of them cannot overflow. */
#define PROGRAM_LIMIT_BYTES (UINT64_C(1) << 57)

static inline int program_bad(struct err *e, const char *what, uint64_t index)
{
    return err_set(e, RS_EPROTO, "program: %s %llu", what, (unsigned long long)index);
}

/* program_check.c: the runs as such, tensors, boxes, cells, places. */
int program_check_things(const struct program *p, struct err *e);
/* program_check_moves.c: items, streams, copies, messages, holds; of a program whose things are right. */
int program_check_moves(const struct program *p, struct err *e);

#endif
