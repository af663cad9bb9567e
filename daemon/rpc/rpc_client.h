/* Blocking calls to a daemon, for libreshard and tests (rpc_grpc_client.c). No loop needed.
 *
 * Thread: an rpc_channel may be used from many threads; one rpc_stream by one sender and one
 * receiver at a time. Every wait has a deadline. Never fork after rpc_channel_open without exec. */
#ifndef RS_RPC_RPC_CLIENT_H
#define RS_RPC_RPC_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "rpc/rpc_tls.h"

struct rpc_channel;
struct rpc_stream;

/* target: "unix:/run/reshard/reshardd.sock" or "127.0.0.1:7070". token (may be NULL) goes with
 * every call. Does not connect yet. A connection is dead when a ping on it is not answered within 20 s. */
int rpc_channel_open(const char *target, const char *token, struct rpc_channel **ret,
                     struct err *e);
/* The same with TLS (NULL: plaintext); the certificates are checked here (rpc_tls_load). server_name: the
 * name in the daemon's certificate; NULL: the target's host. */
int rpc_channel_open_tls(const char *target, const struct rpc_tls_files *tls,
                         const char *server_name, const char *token, struct rpc_channel **ret,
                         struct err *e);
void rpc_channel_close(struct rpc_channel *c); /* NULL is fine; no call may be in progress */

/* One request, one reply (*ret_reply is the caller's to mem_free). The status's code and text come
 * back as RS_E… and in e; RS_EUNAVAIL: no daemon there. timeout_ms counts from now. */
int rpc_call_unary(struct rpc_channel *c, const char *path, const void *request, size_t n_bytes,
                   uint32_t timeout_ms, void **ret_reply, size_t *ret_n_bytes, struct err *e);

/* Any of the streaming kinds. timeout_ms of the whole stream; 0: none. */
int rpc_stream_open(struct rpc_channel *c, const char *path, uint32_t timeout_ms,
                    struct rpc_stream **ret, struct err *e);
/* RS_EDEADLINE: the daemon takes no more yet, the message may still go; RS_EPEER: the stream has
 * ended, and receiving tells why. timeout_ms of this send. */
int rpc_stream_send(struct rpc_stream *s, const void *data, size_t n_bytes, uint32_t timeout_ms,
                    struct err *e);
int rpc_stream_half_close(struct rpc_stream *s, struct err *e);
/* The next message: 0 and *ret (caller's to mem_free); 1: the stream ended well; RS_E…: its status,
 * or RS_EDEADLINE where nothing came within timeout_ms (the stream lives on). timeout_ms 0: don't
 * wait. */
int rpc_stream_receive(struct rpc_stream *s, uint32_t timeout_ms, void **ret, size_t *ret_n_bytes,
                       struct err *e);
/* Cancels; safe from another thread than the receiver's, who then gets RS_ECANCELED. */
void rpc_stream_cancel(struct rpc_stream *s);
void rpc_stream_close(struct rpc_stream *s); /* cancels if alive, frees */

#endif
