/* The table of all methods that a server has: the caller's, health, reflection. Only rpc/ includes
 * this. */
#ifndef RS_RPC_RPC_SERVICES_H
#define RS_RPC_RPC_SERVICES_H

#include "rpc/rpc_call.h"
#include "rpc/rpc_health.h"
#include "rpc/rpc_reflection.h"

struct rpc_services {
    struct rpc_health health;
    struct rpc_reflection reflection;
    struct rpc_entry *entries; /* owned */
    size_t n_entries;
};

/* options are borrowed for life. RS_EINVAL: two methods of one path, or a descriptor set that is
 * damaged. */
int rpc_services_init(struct rpc_services *s, const struct rpc_server_options *options,
                      const struct rpc_method *methods, size_t n_methods, struct err *e);
void rpc_services_close(struct rpc_services *s);
/* NULL: unknown. */
const struct rpc_entry *rpc_services_find(const struct rpc_services *s, const char *path);
/* What answers unknown methods: ends each call with RS_EUNIMPL. */
extern const struct rpc_entry rpc_unknown;
/* The most that any method takes. */
uint32_t rpc_services_max_request_bytes(const struct rpc_services *s);

#endif
