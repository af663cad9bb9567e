/* A server's certificates inside gRPC, replaced while it runs; and whom a call's certificate names. Only
 * rpc_grpc_server.c includes this. */
#ifndef RS_RPC_RPC_GRPC_TLS_H
#define RS_RPC_RPC_GRPC_TLS_H

#include <pthread.h>
#include <stdbool.h>

#include "base/err.h"
#include "rpc/rpc.h"

struct grpc_call;
struct grpc_server_credentials;

/* gRPC asks for new certificates on threads of its own, before each handshake. */
struct rpc_grpc_tls {
    pthread_mutex_t mutex;
    struct rpc_tls_pems pems;
    bool fresh; /* gRPC hasn't got them yet */
};

void rpc_grpc_tls_init(struct rpc_grpc_tls *t);
/* Loads and checks the files; gRPC has them from the next handshake on. After an error what was there
 * stays. Loop thread. */
int rpc_grpc_tls_load(struct rpc_grpc_tls *t, const struct rpc_tls_files *files, struct err *e);
/* t must live as long as the credentials, and the server that has them. */
int rpc_grpc_tls_credentials(struct rpc_grpc_tls *t, bool anonymous,
                             struct grpc_server_credentials **ret, struct err *e);
void rpc_grpc_tls_close(struct rpc_grpc_tls *t);

/* False: the caller showed no certificate that was verified. */
bool rpc_grpc_tls_identify(struct grpc_call *call, struct rpc_identity *ret);

#endif
