/* grpc.health.v1.Health over any carrier (proto/health.proto): serving until rpc_health_stop.
 *
 * Its two messages have one field each, so they are encoded by hand: rpc/ sees no generated code.
 */
#ifndef RS_RPC_RPC_HEALTH_H
#define RS_RPC_RPC_HEALTH_H

#include "base/queue.h"
#include "rpc/rpc.h"

#define RPC_HEALTH_N_METHODS 2

struct rpc_health {
    const struct rpc_method *methods; /* borrowed: whose services are known */
    size_t n_methods;
    bool stopping;
    struct queue watchers;
};

/* Their context is a struct rpc_health. */
extern const struct rpc_method rpc_health_methods[RPC_HEALTH_N_METHODS];

void rpc_health_init(struct rpc_health *h, const struct rpc_method *methods, size_t n_methods);
/* Tells all watchers NOT_SERVING and ends them with RS_EUNAVAIL; from now on Check says so too. */
void rpc_health_stop(struct rpc_health *h);

#endif
