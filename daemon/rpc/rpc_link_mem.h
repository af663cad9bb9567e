/* The in-memory twin of the link: calls to a server in memory (rpc_mem.h), delivered by hand. No loop,
 * no thread, and deadlines, which handlers see, pass by hand too.
 *
 * Everything of rpc_link.h works on it but rpc_link_open. Handlers of the server and this link's
 * callbacks run inside rpc_link_mem_run alone, which none of them may call. */
#ifndef RS_RPC_RPC_LINK_MEM_H
#define RS_RPC_RPC_LINK_MEM_H

#include "rpc/rpc_link.h"
#include "rpc/rpc_mem.h"

/* A link whose peer is `server` (NULL: nobody is there yet). The server must live until the link is
 * cut or on_closed has run. Of the options token and queue limits count. */
int rpc_link_mem_open(struct rpc_mem *server, const struct rpc_link_options *options,
                      const struct rpc_link_events *events, void *arg, struct rpc_link **ret,
                      struct err *e);
/* Delivers what is due, both ways, until nothing is. Returns how many callbacks and messages that
 * were; after on_closed the link is gone. */
unsigned rpc_link_mem_run(struct rpc_link *l);
/* The connection breaks: the server sees its calls cancelled now, and may go; calls end with RS_EUNAVAIL
 * and `text` at the next run, then comes on_down. */
void rpc_link_mem_cut(struct rpc_link *l, const char *text);
/* The peer is there (again): on_up at the next run. */
void rpc_link_mem_join(struct rpc_link *l, struct rpc_mem *server);
/* The call's deadline passes, on both sides. */
void rpc_link_mem_expire(struct rpc_link_call *c);

#endif
