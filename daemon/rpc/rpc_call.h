/* What every call has, whatever carries it: its queue, its end, the built-in services. Only rpc/
 * includes this.
 *
 *          open ── finish asked or cut ──> finishing ── carrier: it is over ──> ended
 *            └───────────── carrier: cancelled, deadline, peer gone ──────────────^
 *
 * Invariant: handlers hear nothing but on_end once finishing, and nothing at all once ended. Loop
 * thread. */
#ifndef RS_RPC_RPC_CALL_H
#define RS_RPC_RPC_CALL_H

#include <stdatomic.h>

#include "base/queue.h"
#include "rpc/rpc.h"
#include "rpc/rpc_link.h"

struct rpc_message {
    atomic_uint refs;
    size_t n_bytes;
    uint8_t data[];
};

/* One queued message. */
struct rpc_out {
    struct queue link;
    struct rpc_message *message; /* a reference */
};

enum rpc_call_state { RPC_CALL_OPEN, RPC_CALL_FINISHING, RPC_CALL_ENDED };

/* What gRPC and the memory twin each do. */
struct rpc_carrier {
    /* Something was queued or the end was asked for: send what can be sent now. Must not end the
     * call. */
    void (*pump)(struct rpc_call *call);
    /* Ends the call at once with `code` and `text`, past whatever is queued. Must not call on_end.
     */
    void (*cut)(struct rpc_call *call, int code, const char *text);
};

struct rpc_call {
    const struct rpc_carrier *carrier;
    const struct rpc_method *method;
    void *context;
    void *arg;
    struct rpc_identity identity;
    uint64_t deadline_ns;
    char *metadata; /* owned, NULL: none; "key\0value\0key\0value\0\0" */
    enum rpc_call_state state;
    bool got_message;
    bool was_cut;
    int code;                    /* the status, from finishing on */
    char *text;                  /* owned, may be NULL */
    struct rpc_message *details; /* owned, may be NULL */
    struct queue out;            /* of rpc_out */
    uint32_t n_out;
    size_t out_bytes;
    uint32_t max_queued_messages;
    uint32_t max_queued_bytes;
    struct queue link; /* the server's live calls */
};

/* A method and the context that its calls get. */
struct rpc_entry {
    const struct rpc_method *method;
    void *context;
};

void rpc_call_init(struct rpc_call *call, const struct rpc_carrier *carrier,
                   const struct rpc_entry *entry, const struct rpc_server_options *options);
/* Frees what the call holds, not the call. */
void rpc_call_close(struct rpc_call *call);

/* The carrier's side: what the peer did. on_end runs in rpc_call_ended alone. */
void rpc_call_opened(struct rpc_call *call);
void rpc_call_received(struct rpc_call *call, const void *data, size_t n_bytes);
void rpc_call_half_closed(struct rpc_call *call);
void rpc_call_ended(struct rpc_call *call, int reason);

/* The next message to send, removed from the queue; its reference is the caller's. NULL: none. */
struct rpc_message *rpc_call_next_out(struct rpc_call *call);

/* Keys that a call's handler may read begin so. */
#define RPC_METADATA_PREFIX "reshard-"
/* Of a call's metadata, packed. */
#define RPC_METADATA_MAX_BYTES 4096
/* The pairs whose keys have the prefix, packed; *ret is NULL where there is none. RS_ENOMEM;
 * RS_EEXHAUSTED: too many bytes. */
int rpc_metadata_pack(const struct rpc_metadata *pairs, size_t n, char **ret);

void rpc_identify(const struct rpc_server_options *options, const char *token,
                  struct rpc_identity *ret);
struct rpc_server_options rpc_options_with_defaults(const struct rpc_server_options *options);

static inline bool rpc_kind_streams_in(enum rpc_kind kind)
{
    return kind == RPC_CLIENT_STREAM || kind == RPC_BIDI;
}

#endif
