/* Bytes between a connection from outside and gRPC's own listener, as they are: gRPC can do TLS only on
 * connections that it has accepted itself, and its accepting has no limit, and stops for good at the
 * first error. Knows no gRPC and no TLS. Loop thread. */
#ifndef RS_RPC_RPC_RELAY_H
#define RS_RPC_RPC_RELAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "base/queue.h"

#define RPC_RELAY_BYTES 32768

/* What was read from one side and not yet written to the other. */
struct rpc_relay_pipe {
    size_t at, n;
    bool ended; /* no more will be read */
    bool shut;  /* and the other side was told */
    uint8_t data[RPC_RELAY_BYTES];
};

struct rpc_relay {
    struct queue link; /* the owner's */
    int fd[2];         /* remote, local */
    uv_poll_t poll[2];
    uv_timer_t timer;              /* gRPC has hung up: until the remote side has too */
    struct rpc_relay_pipe pipe[2]; /* out of remote, out of local */
    unsigned n_handles;
    bool closing;
    /* The relay is the caller's to free again; its descriptors are closed. */
    void (*on_closed)(struct rpc_relay *r, void *arg);
    void *arg;
};

/* Connects to `local`, an abstract socket's name, and carries until one side has ended. r is not
 * initialised. Takes remote_fd (non-blocking), also where it fails: 0 or RS_E…, without on_closed.
 * max_fd: descriptors from this on are for others. */
int rpc_relay_start(struct rpc_relay *r, uv_loop_t *loop, int remote_fd, const char *local,
                    int max_fd, void (*on_closed)(struct rpc_relay *r, void *arg), void *arg);
/* Ends it now; what is under way is lost. Safe to repeat. */
void rpc_relay_close(struct rpc_relay *r);

#endif
