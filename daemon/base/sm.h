/* A state machine in a table: states, allowed moves, one function that moves, one line in the log.
 *
 * Each machine's drawing, enum, table and invariant stand together in its own file. Moving along an
 * edge that the table does not have is a bug (rs_assert). */
#ifndef RS_BASE_SM_H
#define RS_BASE_SM_H

#include <stdint.h>

struct sm_state {
    const char *name;
    uint32_t allowed; /* bit s: may move to state s */
};

struct sm {
    const struct sm_state *table;
    int state;
};

#define SM_TO(state) (1U << (state))

void sm_init(struct sm *m, const struct sm_state *table, int state);
/* True where the table allows the move. */
int sm_can(const struct sm *m, int next);
/* Moves; `format` names what moves, for the log line at debug. */
void sm_move(struct sm *m, int next, const char *format, ...) __attribute__((format(printf, 3, 4)));
const char *sm_name(const struct sm *m);

#endif
