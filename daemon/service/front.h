/* The methods that this daemon serves: those of api.h and peer.h behind one door. At the door it is found out who really
 * calls (proxy.h), and whether that one may (roles.h); at a node that is not the coordinator some methods lead on to it. */
#ifndef RS_SERVICE_FRONT_H
#define RS_SERVICE_FRONT_H

#include <stddef.h>

#include "base/err.h"
#include "rpc/rpc.h"
#include "service/config.h"

/* The table for rpc_server_start; the caller's to mem_free once the server is gone. RS_ENOMEM. */
int front_methods(const struct config *c, struct rpc_method **ret, size_t *ret_n, struct err *e);

#endif
