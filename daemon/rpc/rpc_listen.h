/* Listening sockets that are ours: bound, locked, accepted and removed here, since gRPC would steal
 * a live daemon's Unix socket, remove a later one's, and share a TCP port. Knows no gRPC. */
#ifndef RS_RPC_RPC_LISTEN_H
#define RS_RPC_RPC_LISTEN_H

#include <stdint.h>
#include <sys/types.h>

#include "base/err.h"

/* sun_path less its NUL. */
#define RPC_UNIX_PATH_MAX 107

struct rpc_listener {
    int fd;       /* -1: none */
    int lock_fd;  /* Unix: holds "<path>.lock"; -1: none */
    int spare_fd; /* given up for a moment to turn a connection away when descriptors are out */
    int max_fd; /* connections from this descriptor on are turned away, so that others find some */
    uint64_t n_turned_away;           /* connections */
    char path[RPC_UNIX_PATH_MAX + 1]; /* Unix: what was bound; else "" */
    dev_t device;                     /* of the socket file, so that only our own is removed */
    ino_t inode;
    uint16_t port; /* TCP */
};

void rpc_listener_init(struct rpc_listener *l);
/* Takes the lock, replaces a left-over socket and only that, binds, listens. RS_EEXIST: another
 * daemon lives there. */
int rpc_listen_unix(struct rpc_listener *l, const char *path, uint32_t mode, struct err *e);
/* "127.0.0.1:7070", "[::1]:0", "localhost:0". Loopback only. */
int rpc_listen_tcp(struct rpc_listener *l, const char *address, struct err *e);
/* Any address of this machine. RS_EEXIST: in use; RS_ENOTFOUND: none of this machine's. */
int rpc_listen_network(struct rpc_listener *l, const char *address, struct err *e);
/* Turns connections away beyond n_connections (0: as many as the descriptor limit allows, less a
 * reserve). */
void rpc_listener_limit(struct rpc_listener *l, uint32_t n_connections);
/* A connection (non-blocking, close-on-exec), or -1: none now. One beyond the limit is closed here,
 * so that the caller never spins on it. */
int rpc_listener_accept(struct rpc_listener *l);
/* Closes, and removes the socket file if it is still ours. Safe to repeat. The lock file stays:
 * removing it would let two daemons hold two locks. */
void rpc_listener_close(struct rpc_listener *l);

#endif
