/* The in-memory twin of the gRPC server: the same methods table, health and reflection, and a peer
 * that a test plays by hand. No loop, no thread, no clock: handlers run inside the functions below.
 *
 * on_end never runs inside rpc_call_send or rpc_call_finish, as over the network; it runs before
 * the next rpc_mem_… function that touches the server returns. */
#ifndef RS_RPC_RPC_MEM_H
#define RS_RPC_RPC_MEM_H

#include "rpc/rpc.h"

struct rpc_mem;      /* the server */
struct rpc_mem_call; /* the peer's end of one call */

/* options: identify, context, queue limits and descriptor set count; addresses don't. */
int rpc_mem_new(const struct rpc_server_options *options, const struct rpc_method *methods,
                size_t n_methods, struct rpc_mem **ret, struct err *e);
/* As rpc_server_stop, but at once: health says NOT_SERVING, streams end with RS_EUNAVAIL, new calls
 * are refused with RS_EUNAVAIL. Unary calls may finish until rpc_mem_cancel_all, which is the grace
 * time's end. */
void rpc_mem_stop(struct rpc_mem *m);
void rpc_mem_cancel_all(struct rpc_mem *m);
/* Ends what is still alive with RS_ECANCELED; all peers' ends must be closed first or never touched
 * again. */
void rpc_mem_free(struct rpc_mem *m);
/* Delivers the on_end calls that are due, and nothing else. */
void rpc_mem_run(struct rpc_mem *m);
uint32_t rpc_mem_n_calls(const struct rpc_mem *m);

/* token may be NULL. deadline_ns is only shown to the handler (UINT64_MAX: none); rpc_mem_expire
 * makes it pass. NULL: no memory. An unknown method's call exists and has ended with RS_EUNIMPL. */
struct rpc_mem_call *rpc_mem_open(struct rpc_mem *m, const char *path, const char *token,
                                  uint64_t deadline_ns);
/* The same with metadata as rpc_call.h packs it, taken even where NULL is returned; NULL: none. */
struct rpc_mem_call *rpc_mem_open_with(struct rpc_mem *m, const char *path, const char *token,
                                       uint64_t deadline_ns, char *metadata);
void rpc_mem_send(struct rpc_mem_call *c, const void *data, size_t n_bytes);
void rpc_mem_half_close(struct rpc_mem_call *c);
void rpc_mem_cancel(struct rpc_mem_call *c);
void rpc_mem_expire(struct rpc_mem_call *c);
/* What the handler has sent: 0 and *ret (caller's to mem_free); 1: the call ended well;
 * RS_EDEADLINE: nothing there now; else the call's status, its text in e. */
int rpc_mem_receive(struct rpc_mem_call *c, void **ret, size_t *ret_n_bytes, struct err *e);
/* All messages are received and the status is there. */
bool rpc_mem_has_ended(const struct rpc_mem_call *c);
/* The packed details that came with the status; borrowed; NULL: none. */
const void *rpc_mem_details(const struct rpc_mem_call *c, size_t *ret_n_bytes);
void rpc_mem_close(struct rpc_mem_call *c); /* cancels if alive; NULL is fine */

#endif
