/* Between the parts of the server over gRPC C core: rpc_grpc_server.c starts and stops it and takes connections,
 * rpc_grpc_served.c has its calls, rpc_grpc_queue.c brings the completion queues' tags to the loop. All on the loop thread, but
 * rpc_grpc_wait and rpc_grpc_wait_streams. */
#ifndef RS_RPC_RPC_GRPC_INNER_H
#define RS_RPC_RPC_GRPC_INNER_H

#include <semaphore.h>
#include <stdatomic.h>

#include <grpc/grpc.h>

#include "rpc/rpc.h"
#include "rpc/rpc_call.h"
#include "rpc/rpc_grpc_tag.h"
#include "rpc/rpc_grpc_tls.h"
#include "rpc/rpc_listen.h"
#include "rpc/rpc_services.h"

/* Unix, TCP, and the list's. */
#define MAX_LISTENERS (2 + RPC_MAX_ADDRESSES)

/* Waits for one call of one method (entry NULL: of unknown ones). */
struct slot {
    struct tag tag;
    struct rpc_server *server;
    const struct rpc_entry *entry;
    void *registered;
    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_byte_buffer *payload;
    grpc_call_details details;
};

struct served {
    struct rpc_call base;
    struct rpc_server *server;
    grpc_call *call;
    unsigned n_refs; /* outstanding tags */
    struct tag close_tag, receive_tag, send_tag;
    int cancelled; /* written by gRPC until close_tag is back */
    uint64_t timeout_ns;
    grpc_byte_buffer *received;
    grpc_byte_buffer *sending; /* NULL: no send batch is out */
    bool send_out;
    bool sent_initial;
    bool sent_status;
    bool close_out;   /* close_tag, or send_tag in its place, will tell of the end */
    bool close_rides; /* on send_tag: the call was answered before it was watched */
    bool broken;      /* a send failed: nothing more will go */
    grpc_slice status_text;
    grpc_metadata trailer;
};

struct rpc_server {
    uv_loop_t *loop;
    struct rpc_server_options options;
    struct rpc_services services;
    grpc_server *grpc;
    grpc_server_credentials *credentials;
    grpc_completion_queue *cq;
    pthread_t thread;
    sem_t queue_is_dry; /* the thread rests on it while the loop drains the queue */
    atomic_bool rests;  /* it does, or is about to: it has posted, or will now */
    bool draining;      /* the loop does the thread's work */
    /* Of calls that stream: their tags are out for as long as they live. Debian's gRPC, built with its asserts, looks
     * through all tags of a queue at each completion: 2,000 watchers cost each other call 2.4 us of 17. */
    grpc_completion_queue *stream_cq;
    pthread_t stream_thread;
    bool stream_queue_shut;
    unsigned n_threads;
    struct mailbox mailbox;
    struct mailbox_item thread_ended, stream_thread_ended;
    uv_async_t async;
    uv_timer_t timer;
    struct rpc_listener listeners[MAX_LISTENERS];
    uv_poll_t polls[MAX_LISTENERS];
    bool with_tls[MAX_LISTENERS];
    struct rpc_grpc_tls tls;
    char tls_name[64]; /* gRPC's own listener for TLS, abstract; "": none */
    struct queue relays;
    uint32_t n_relays;
    uint64_t n_failed_relays;
    uint64_t n_handshakes_before; /* that had failed in the process at the start */
    unsigned n_handles;           /* open */
    struct slot *slots;
    size_t n_slots;
    size_t n_armed;
    struct queue calls; /* that have not ended */
    uint32_t n_calls;
    uint32_t n_served; /* objects, ended ones with tags out included */
    struct tag shutdown_tag;
    bool stopping;
    bool shut_down; /* shutdown_tag is back */
    bool queue_shut;
    void (*done)(void *arg);
    void *arg;
};

/* The two queues' threads; `arg` is the server. */
void *rpc_grpc_wait(void *arg);
void *rpc_grpc_wait_streams(void *arg);
/* The mailbox's wake-up, from any thread. */
void rpc_grpc_wake(void *arg);
void rpc_grpc_on_async(uv_async_t *async);
/* One set of slots per method, and one for methods that don't exist. RS_ENOMEM. */
int rpc_grpc_slots_make(struct rpc_server *s, struct err *e);
/* Once the server runs: from here on calls come. */
void rpc_grpc_slots_arm(struct rpc_server *s);
/* Shuts the queues once the server has stopped and nothing can start a batch any more; called wherever the last of
 * something went. */
void rpc_grpc_finish_stop(struct rpc_server *s);

#endif
