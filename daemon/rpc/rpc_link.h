/* Calls to another daemon, without a word of gRPC and without blocking: one connection that comes
 * back by itself, and any number of calls of any kind on it.
 *
 * rpc_grpc_link.c carries them over gRPC C core, rpc_link_mem.c in memory for tests. Bytes are packed
 * messages and their meaning is not known here. A thread that waits on gRPC's completion queue wakes
 * the loop through the mailbox; every function and callback below runs on the loop thread, and no
 * callback runs inside any function of this header.
 *
 * Life of a link: (on_up → on_down)* → rpc_link_close → on_end of each call → on_closed, once, last;
 * the link is freed after it. It starts as down, without a callback. on_down may come again, with the
 * reason why it stays down, where that is another one; between two tries to connect it waits 0.1 s,
 * growing to 1 s. A break too short to be seen shows in its calls' on_end alone.
 *
 * Life of a call: rpc_link_call_open → (send | on_message)* → on_end, exactly once and last; the call
 * is freed after it, and may not be touched any more. A call that is opened while the link is down
 * waits for the try that is under way, or ends with RS_EUNAVAIL. Nothing is ever repeated by itself.
 *
 * on_end's code: what the peer's rpc_call_finish said, as far as the wire keeps it (err_from_status of
 * err_status); RS_EUNAVAIL no connection, or it broke; RS_EDEADLINE; RS_ECANCELED we cancelled, or the
 * link was closed; RS_EEXHAUSTED a message was larger than max_message_bytes. */
#ifndef RS_RPC_RPC_LINK_H
#define RS_RPC_RPC_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "base/err.h"
#include "rpc/rpc_tls.h"

struct rpc_link;      /* opaque */
struct rpc_link_call; /* opaque */

/* Goes with a call. Keys are lower case; those that begin with "reshard-" can be read by the peer's
 * rpc_call_metadata. Values are printable ASCII. */
struct rpc_metadata {
    const char *key;
    const char *value;
};

struct rpc_link_options {
    /* "192.0.2.1:7000", "[2001:db8::1]:7000", "host.example:7000", "unix:/run/x.sock" */
    const char *target;
    const struct rpc_tls_files *tls; /* NULL: plaintext */
    const char *server_name;       /* the name in the peer's certificate; NULL: the target's host */
    const char *token;             /* "reshard-token" of every call; NULL: none */
    uint32_t keepalive_ms;         /* ping interval, 1000 */
    uint32_t keepalive_timeout_ms; /* no answer for so long: the connection is dead, 2000 */
    uint32_t connect_timeout_ms;   /* of one try, 5000 */
    uint32_t max_message_bytes;    /* that may be received, 16 MiB */
    uint32_t max_queued_messages;  /* per call, to a peer that does not read, 1024 */
    uint32_t max_queued_bytes;     /* per call, 16 MiB */
};

/* Any may be NULL. */
struct rpc_link_events {
    void (*on_up)(struct rpc_link *l, void *arg);
    void (*on_down)(struct rpc_link *l, void *arg, const char *text); /* why; borrowed */
    void (*on_closed)(void *arg);
};

struct rpc_link_call_options {
    const char *path;                    /* "/reshard.v1.Peer/Join" */
    uint32_t deadline_ms;                /* of the whole call, from now; 0: none */
    const struct rpc_metadata *metadata; /* besides the token; borrowed for the open */
    size_t n_metadata;
};

/* Any may be NULL. */
struct rpc_link_call_events {
    void (*on_message)(struct rpc_link_call *c, void *arg, const void *data, size_t n_bytes);
    /* The queue was full (a send said RS_EEXHAUSTED) and is half empty again. */
    void (*on_writable)(struct rpc_link_call *c, void *arg);
    /* text is never NULL; details (NULL: none) are the packed message of "grpc-status-details-bin".
     * All borrowed. */
    void (*on_end)(struct rpc_link_call *c, void *arg, int code, const char *text,
                   const void *details, size_t n_details);
};

/* Starts to connect and goes on trying until closed. events is borrowed for life, options is not.
 * RS_EINVAL names what is wrong with an option; certificates are checked here (rpc_tls_load).
 * After an error the loop must run once more, since handles close on it. */
int rpc_link_open(uv_loop_t *loop, const struct rpc_link_options *options,
                  const struct rpc_link_events *events, void *arg, struct rpc_link **ret,
                  struct err *e);
/* The certificates of options->tls, read and checked here, from the next connection on; the one that stands, and its
 * calls, stay. The other options are those of the open. RS_EPRECOND: the link has no TLS. After an error the old ones
 * go on. */
int rpc_link_reload_tls(struct rpc_link *l, const struct rpc_link_options *options, struct err *e);
/* Ends all calls with RS_ECANCELED, then on_closed. A second call is ignored. */
void rpc_link_close(struct rpc_link *l);
bool rpc_link_is_up(const struct rpc_link *l);
uint32_t rpc_link_n_calls(const struct rpc_link *l);

/* RS_ENOMEM; RS_EINVAL metadata that no header may hold; RS_ECANCELED: the link is closing. An error
 * means no callback. */
int rpc_link_call_open(struct rpc_link *l, const struct rpc_link_call_options *options,
                       const struct rpc_link_call_events *events, void *arg,
                       struct rpc_link_call **ret, struct err *e);
/* Queues a message (copies data). 0; RS_ENOMEM; RS_EEXHAUSTED: the queue is full, nothing was queued,
 * on_writable tells when to try again; RS_ECANCELED: half closed, cancelled, or the peer ended the
 * call (on_end tells). One message may always wait, however large. */
int rpc_link_call_send(struct rpc_link_call *c, const void *data, size_t n_bytes);
/* No more messages from us, after what is queued. Safe to repeat. */
void rpc_link_call_half_close(struct rpc_link_call *c);
/* No on_message and no on_writable after it; on_end follows, with RS_ECANCELED or with what the peer
 * had said before. Safe to repeat. */
void rpc_link_call_cancel(struct rpc_link_call *c);
/* While held no message is taken from the connection (the one that is under way still comes), so that
 * a fast peer waits. The end may come while held. */
void rpc_link_call_hold(struct rpc_link_call *c, bool hold);
/* Bytes that are queued and not yet taken by the connection. */
size_t rpc_link_call_queued_bytes(const struct rpc_link_call *c);

#endif
