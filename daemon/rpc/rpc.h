/* Calls without a word of gRPC: what a service is written against, and its twin in memory.
 *
 * Every call is a stream of messages both ways, of one of four kinds; bytes are the packed protobuf
 * messages and their meaning is not known here. rpc_grpc_server.c serves it over gRPC C core,
 * rpc_mem.c in memory for tests. A thread that waits on gRPC's
 * completion queue wakes the loop through the mailbox; every function and callback below runs on the
 * loop thread.
 *
 * Life of a call: on_open → on_message* → on_half_close → (rpc_call_send | rpc_call_finish)* →
 * on_end, exactly once and last, with the reason (done, cancelled, deadline, peer gone). The
 * handler's state hangs on call->arg. After rpc_call_finish or on_end nothing may be sent; sending
 * then is refused, not a bug, since the peer may go at any time.
 *
 * on_end's reason: 0 the status went out; RS_ECANCELED the peer cancelled or is gone (gRPC doesn't
 * tell which), or the server stopped; RS_EDEADLINE; RS_EPEER it did not read and was cut off. It never
 * runs inside rpc_call_send or rpc_call_finish; the call may not be touched after it. */
#ifndef RS_RPC_RPC_H
#define RS_RPC_RPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "base/err.h"
#include "rpc/rpc_tls.h"

enum rpc_kind { RPC_UNARY, RPC_SERVER_STREAM, RPC_CLIENT_STREAM, RPC_BIDI };

/* Who calls. A local client's token (metadata "reshard-token", from the memory socket) is resolved
 * by the server's identify function; TLS peers are known by their certificate's name. */
struct rpc_identity {
    enum { RPC_ANONYMOUS, RPC_LOCAL, RPC_TLS } kind;
    uint64_t client; /* RPC_LOCAL: the memory socket's number for this client */
    uint32_t uid;
    int32_t pid;
    /* RPC_TLS: the certificate's first DNS name, else its common name; "" where it has neither, or one
     * that is longer or holds a NUL */
    char name[256];
};

struct rpc_call; /* opaque */

struct rpc_method {
    const char *path; /* "/reshard.v1.Refit/Submit" */
    enum rpc_kind kind;
    uint32_t max_request_bytes; /* of one message; larger ones end the call with RS_EEXHAUSTED */
    /* Any may be NULL but on_end must free what on_open made. on_open may refuse by
     * rpc_call_finish. */
    void (*on_open)(struct rpc_call *call);
    void (*on_message)(struct rpc_call *call, const void *data, size_t n_bytes); /* borrowed */
    /* No more messages. A unary call without one: not called, the call ends with RS_EINVAL. */
    void (*on_half_close)(struct rpc_call *call);
    void (*on_end)(struct rpc_call *call, int reason); /* 0, RS_ECANCELED, RS_EDEADLINE, RS_EPEER */
};

/* The handler's own pointer, and what came with the call. */
void rpc_call_set_arg(struct rpc_call *call, void *arg);
void *rpc_call_arg(const struct rpc_call *call);
void *rpc_call_context(const struct rpc_call *call); /* rpc_server's context: the service */
const struct rpc_identity *rpc_call_identity(const struct rpc_call *call);
/* For calls that another daemon passed on: who made them in truth. Before anything else looks. */
void rpc_call_set_identity(struct rpc_call *call, const struct rpc_identity *who);
const char *rpc_call_path(const struct rpc_call *call); /* the method's */
/* How much may wait for this call's peer, instead of what the server's options say. */
void rpc_call_set_queue(struct rpc_call *call, uint32_t max_messages, uint32_t max_bytes);
/* Monotonic ns; UINT64_MAX: none. */
uint64_t rpc_call_deadline_ns(const struct rpc_call *call);
/* What the caller sent under a key that begins with "reshard-"; NULL: nothing, or more than 4 KiB of
 * such. Borrowed, until on_end. */
const char *rpc_call_metadata(const struct rpc_call *call, const char *key);

/* Bytes that many calls can send without a copy each: made once, counted. */
struct rpc_message;
struct rpc_message *rpc_message_new(const void *data, size_t n_bytes); /* copies; NULL: no memory */
struct rpc_message *rpc_message_ref(struct rpc_message *m);
void rpc_message_unref(struct rpc_message *m);

/* Queues a message (copies data). 0; RS_ENOMEM; RS_ECANCELED: the call has ended; RS_EEXHAUSTED:
 * the peer does not read (more than the server's queue limit is waiting): the call is then cut off.
 */
int rpc_call_send(struct rpc_call *call, const void *data, size_t n_bytes);
int rpc_call_send_shared(struct rpc_call *call, struct rpc_message *m);
/* Ends the call after what is queued, with 0 or RS_E… (its status and `text`, which may be NULL).
 * `details` (may be NULL): a packed message for the trailing key "grpc-status-details-bin". */
void rpc_call_finish(struct rpc_call *call, int code, const char *text);
void rpc_call_finish_details(struct rpc_call *call, int code, const char *text, const void *details,
                             size_t n_bytes);

/* One more address to serve on. */
struct rpc_address {
    const char *address; /* "192.0.2.1:7000", "[2001:db8::1]:0" */
    bool tls;            /* with options.tls; without, as tcp_address */
};

#define RPC_MAX_ADDRESSES 8

struct rpc_server_options {
    /* NULL: none. At most 107 bytes; the lock file beside it is "<path>.lock" */
    const char *unix_path;
    uint32_t unix_mode; /* of the socket file, 0660 */
    /* "127.0.0.1:7070", plaintext; NULL: none. Anything but loopback is refused unless
     * insecure_network */
    const char *tcp_address;
    const struct rpc_address *addresses; /* besides; at most RPC_MAX_ADDRESSES; may be NULL */
    size_t n_addresses;
    /* Needed where an address has tls: all three files. Borrowed for the start. */
    const struct rpc_tls_files *tls;
    /* Clients without a certificate are served too, as RPC_ANONYMOUS; else they are refused. */
    bool tls_anonymous;
    uint32_t handshake_timeout_ms; /* of TLS, from the connection on, 5000 */
    /* Plaintext may be reachable from outside: for tests and closed networks. The caller warns. */
    bool insecure_network;
    uint32_t max_connections_hint; /* 0: from the descriptor limit */
    uint32_t keepalive_ms;         /* ping interval both ways, 1000 */
    uint32_t keepalive_timeout_ms; /* 2000 */
    uint32_t max_queued_messages;  /* per call, to a peer that does not read, 1024 */
    uint32_t max_queued_bytes;     /* per call, 16 MiB */
    /* serialised FileDescriptorSet for reflection; NULL: no reflection */
    const void *descriptor_set;
    size_t descriptor_set_bytes;
    /* Resolves a token; false: the call goes on as RPC_ANONYMOUS. Loop thread. */
    bool (*identify)(void *context, const char *token, struct rpc_identity *ret);
    void *context;
};

struct rpc_server;

/* Binds and serves `methods` (borrowed for life) on `loop`, with grpc.health.v1.Health (serving
 * until rpc_server_stop) and reflection besides; an unknown method gets UNIMPLEMENTED. Errors name
 * the path or address and the remedy: RS_EEXIST another daemon lives there, RS_EINVAL path too
 * long, not a socket …
 * After an error the loop must run once more, since handles close on it. */
int rpc_server_start(uv_loop_t *loop, const struct rpc_server_options *options,
                     const struct rpc_method *methods, size_t n_methods, struct rpc_server **ret,
                     struct err *e);
/* Graceful stop: health says NOT_SERVING, no new calls, open streams end with RS_EUNAVAIL, unary
 * ones may finish; at grace_ms the rest is cancelled. done runs on the loop, once; the server is
 * freed after it. A second call is ignored. */
void rpc_server_stop(struct rpc_server *s, uint32_t grace_ms, void (*done)(void *arg), void *arg);
/* The port really bound on TCP (0: none), and calls that are alive now. */
uint16_t rpc_server_port(const struct rpc_server *s);
/* The same of addresses[i]. */
uint16_t rpc_server_address_port(const struct rpc_server *s, size_t i);
/* Other certificates from the next handshake on, where some were given at the start; connections that
 * stand stay. The files are checked here (rpc_tls_load); after an error the old ones go on. */
int rpc_server_reload_tls(struct rpc_server *s, const struct rpc_tls_files *files, struct err *e);
/* Connections that were turned away: TLS handshakes that failed (a foreign or no certificate, no TLS at
 * all, nothing said in time), and what was beyond the limit on connections. gRPC doesn't tell whose
 * handshake failed, so those of other servers of the process count too. */
uint64_t rpc_server_n_refused(const struct rpc_server *s);
/* Why the last handshake failed, in OpenSSL's words ("peer did not return a certificate"); "" where none
 * has, here or at another server of the process. */
#define RPC_REFUSAL_BYTES 256
void rpc_server_last_refusal(const struct rpc_server *s, char ret[RPC_REFUSAL_BYTES]);
uint32_t rpc_server_n_calls(const struct rpc_server *s);

#endif
