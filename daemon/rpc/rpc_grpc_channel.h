/* How a client's gRPC channel is made: target, certificates, keepalive. Only rpc_grpc_client.c and
 * rpc_grpc_link.c include this. */
#ifndef RS_RPC_RPC_GRPC_CHANNEL_H
#define RS_RPC_RPC_GRPC_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "rpc/rpc.h"

struct grpc_channel;

struct rpc_channel_spec {
    const char *target;              /* rpc_link.h's */
    const struct rpc_tls_files *tls; /* NULL: plaintext */
    const char *server_name;         /* NULL: the target's host */
    uint32_t keepalive_ms;           /* 0: 1000, as the daemon's default */
    uint32_t keepalive_timeout_ms;   /* 0: 2000 */
    uint32_t connect_timeout_ms;     /* 0: 5000 */
    uint32_t max_message_bytes;      /* that may be received */
};

/* Between grpc_init and grpc_shutdown. Doesn't connect. RS_EINVAL names the option. */
int rpc_grpc_channel_new(const struct rpc_channel_spec *spec, struct grpc_channel **ret,
                         struct err *e);
/* What gRPC would print goes to the log at debug. as_server: it is made to tell of handshakes that fail
 * too, which are counted. Safe to repeat. */
void rpc_grpc_log_start(bool as_server);
/* Such handshakes of all servers of the process so far. gRPC tells of them in its log alone. */
uint64_t rpc_grpc_n_failed_handshakes(void);
/* Why the last of them did; "" where none has. */
void rpc_grpc_last_failed_handshake(char ret[RPC_REFUSAL_BYTES]);

#endif
