/* grpc.reflection (v1 and v1alpha, the same messages) from a FileDescriptorSet that is embedded in
 * the program, so that a foreign client can ask what is served. Read where it lies, encoded by
 * hand. */
#ifndef RS_RPC_RPC_REFLECTION_H
#define RS_RPC_RPC_REFLECTION_H

#include "rpc/rpc.h"

#define RPC_REFLECTION_N_METHODS 2

struct rpc_reflection {
    const uint8_t *set; /* borrowed */
    size_t n_bytes;
    const struct rpc_method *methods; /* borrowed: what is really served */
    size_t n_methods;
};

/* Their context is a struct rpc_reflection. */
extern const struct rpc_method rpc_reflection_methods[RPC_REFLECTION_N_METHODS];

/* Checks that the set is well-formed, as deep as it is read later; set NULL: nothing to do. */
int rpc_reflection_init(struct rpc_reflection *r, const void *set, size_t n_bytes,
                        const struct rpc_method *methods, size_t n_methods, struct err *e);

#endif
