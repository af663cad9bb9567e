/* The API: every method of reshard.v1.Refit and reshard.v1.Admin, as rpc.h serves them. Protobuf is known in the
 * api files alone; they decode within limits, call the plain functions of ops.h, and encode the answers. */
#ifndef RS_SERVICE_API_H
#define RS_SERVICE_API_H

#include <stddef.h>

#include "rpc/rpc.h"

/* The methods table; static, with n methods. rpc_server_options.context must be the service. */
const struct rpc_method *api_methods(size_t *ret_n);

#endif
