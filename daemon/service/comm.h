/* Communicators of GPUs on several nodes (transport nccl): who names them, and when one is used again.
 *
 *   coordinator: all nodes wanted ── COMM_ID order ─▶ node of comm rank 0 ── COMM_ID ─▶ its data plane
 *                PREPAREs with the id ◀── COMM_ID report ──                ◀── COMM_ID_MADE ──
 *
 * An id names one communicator. It is used again only by the next attempt of the same epoch, devices and data planes after one
 * that committed: then it stands everywhere. After any other end it may have been aborted on some node, and a
 * new one is asked for.
 *
 * With [nccl] shrink, where whole nodes have left since that commit and nobody has come, the data planes that are left
 * are told to shrink it; the new id, which is asked for all the same, is for where that fails. A member that leaves
 * during an attempt ends it, and with it the communicator: there is nothing to shrink then. Loop thread. */
#ifndef RS_SERVICE_COMM_H
#define RS_SERVICE_COMM_H

#include <stdbool.h>

#include "peer/message.h"

struct buf;
struct decider;
struct part;
struct prepare;

/* --- coordinator --- */

/* True: PREPAREs may go, with d->run.comm where it has one. Else it has been asked for, or has failed. */
bool comm_ready(struct decider *d);
/* True: that is the id which comm_ready waits for. */
bool comm_take(struct decider *d, uint32_t node, const struct node_report *r);
/* PREPAREs go: nobody else may count on it. */
void comm_use(struct decider *d);
/* The attempt is over. */
void comm_end(struct decider *d, bool committed);
void comm_close(struct decider *d);

/* --- node part --- */

void comm_id_make(struct part *p, const struct node_order *o);
/* struct wire_comm and what follows it (exec/wire.h). RS_ENOMEM. */
int comm_encode(const struct prepare *o, struct buf *out);

#endif
