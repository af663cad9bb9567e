/* What links and their calls have, whatever carries them: the queue, the callbacks, the end. Only rpc/
 * includes this.
 *
 *     open ── the peer's status is in, or cancelled ──> closing ── carrier: nothing is out ──> ended
 *
 * Invariant: on_message and on_writable run in open alone, on_end once, at ended. A call is in its
 * link's list until it has ended. Loop thread. */
#ifndef RS_RPC_RPC_LINK_CALL_H
#define RS_RPC_RPC_LINK_CALL_H

#include "base/queue.h"
#include "rpc/rpc_call.h"
#include "rpc/rpc_link.h"

/* What gRPC and the memory twin each do. None may run a callback. */
struct rpc_link_carrier {
    /* A call whose base is initialised by rpc_link_call_init. */
    int (*open)(struct rpc_link *l, const struct rpc_link_call_options *options,
                const struct rpc_link_call_events *events, void *arg, struct rpc_link_call **ret,
                struct err *e);
    /* Something was queued, the half close was asked for, or a hold was lifted: do what can be done
     * now. */
    void (*pump)(struct rpc_link_call *c);
    /* Ends the call with RS_ECANCELED and `text`, if nothing has ended it yet. */
    void (*cancel)(struct rpc_link_call *c, const char *text);
    /* Other certificates for the connections to come. */
    int (*reload_tls)(struct rpc_link *l, const struct rpc_link_options *options, struct err *e);
    /* The link is closing and all its calls are cancelled. */
    void (*close)(struct rpc_link *l);
};

struct rpc_link {
    const struct rpc_link_carrier *carrier;
    const struct rpc_link_events *events;
    void *arg;
    char *token; /* owned; NULL: none */
    uint32_t max_queued_messages;
    uint32_t max_queued_bytes;
    bool up;
    bool closing;
    struct queue calls; /* that have not ended */
    uint32_t n_calls;
};

struct rpc_link_call {
    struct rpc_link *link;
    const struct rpc_link_call_events *events;
    void *arg;
    struct queue out; /* of rpc_out */
    uint32_t n_out;
    size_t out_bytes;
    bool open;            /* nothing has ended it yet */
    bool half_close;      /* asked for */
    bool half_close_sent; /* the carrier's */
    bool full;            /* a send was refused: on_writable is due */
    bool held;
    struct queue of_link;
};

/* RS_ENOMEM, RS_EINVAL. */
int rpc_link_init(struct rpc_link *l, const struct rpc_link_carrier *carrier,
                  const struct rpc_link_options *options, const struct rpc_link_events *events,
                  void *arg, struct err *e);
void rpc_link_fini(struct rpc_link *l);
/* Tells; nothing once the link is closing. */
void rpc_link_went_up(struct rpc_link *l);
void rpc_link_went_down(struct rpc_link *l, const char *text);

void rpc_link_call_init(struct rpc_link_call *c, struct rpc_link *l,
                        const struct rpc_link_call_events *events, void *arg);
/* The next message to send, its reference the caller's; NULL: none. */
struct rpc_message *rpc_link_call_next_out(struct rpc_link_call *c);
/* After rpc_link_call_next_out, outside of any call's function. */
void rpc_link_call_drained(struct rpc_link_call *c);
void rpc_link_call_received(struct rpc_link_call *c, const void *data, size_t n_bytes);
/* on_end. The carrier frees the call after it. */
void rpc_link_call_ended(struct rpc_link_call *c, int code, const char *text, const void *details,
                         size_t n_details);
/* Frees what it holds, not the call. */
void rpc_link_call_fini(struct rpc_link_call *c);

#endif
