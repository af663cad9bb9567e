/* Calls that only the coordinator can answer, at any other node: passed on byte for byte, both ways, with their deadline;
 * status, details and cancellation too. PutLayout is stored here as well, before its caller is answered. What Status says
 * of the daemon that was asked is filled in here; a coordinator that does not answer within 2 s is left out of it.
 *
 * Who called goes along as metadata: "reshard-origin" is "local UID PID", "tls NAME" or "anonymous", believed by the
 * coordinator only where "reshard-peer" is the token of a member's live session. Loop thread. */
#ifndef RS_SERVICE_PROXY_H
#define RS_SERVICE_PROXY_H

#include <stdbool.h>

#include "rpc/rpc.h"

#define PROXY_PEER   "reshard-peer"
#define PROXY_ORIGIN "reshard-origin"

/* The client number of who is identified, and has no memory socket here. */
#define PROXY_CLIENT UINT64_MAX

/* Whether a member passes this method on. */
bool proxy_wanted(const char *path);
/* Handlers of such a method; rpc_call_context is the service. */
void proxy_open(struct rpc_call *call);
void proxy_message(struct rpc_call *call, const void *data, size_t n_bytes);
void proxy_half_close(struct rpc_call *call);
void proxy_end(struct rpc_call *call, int reason);

/* At the coordinator: who made a call that a member passed on. 1: it is no such call. RS_EUNAVAIL: the session of who
 * passed it on is over; RS_EINVAL: an origin that makes no sense. */
int proxy_origin(const struct rpc_call *call, struct rpc_identity *ret, struct err *e);

#endif
