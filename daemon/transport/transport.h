/* Moves bytes between devices: groups of sends and receives, in the order of the plan.
 *
 * A transport belongs to one epoch of one model and spans all of its devices (by the plan's device
 * index); each local device takes part with one stream. transport_mem.c is the in-memory twin
 * (devices of one process; set rate, seeded delay, loss and death), transport_tcp.c moves them over
 * TCP connections, transport_nccl.c by NCCL, and transport_local.c stands in front of one of these where
 * devices of one node reach each other's memory. All pass one contract test.
 *
 * Contract: the n-th send from a to b meets the n-th receive at b from a; both name the same bytes
 * and tag, else both groups fail (RS_EPROTO; a sender's group that had another one behind it may be over by then: a
 * later one of its device fails). A group starts when the work before it on its stream is done,
 * all its messages progress together, and the stream goes on when all are complete. Buffers stay
 * untouched by others until then. Every frame carries epoch and attempt; what belongs to another
 * attempt is dropped and counted. */
#ifndef RS_TRANSPORT_TRANSPORT_H
#define RS_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "device/device.h"

struct transport;

/* A run of a message's bytes. */
struct transport_piece {
    void *data;
    uint64_t bytes;
};

struct transport_message {
    void *data; /* read or written while the group runs; NULL: pieces say where it is */
    uint64_t bytes;
    uint32_t peer; /* the plan's device index */
    bool send;
    bool network; /* tier, for the counters and rates: false inside a domain */
    uint32_t tag; /* what the message is; must be the same at both ends */
    /* Where data is NULL: in order, `bytes` in all; the caller's, alive as the group is. Only where
     * transport_takes_pieces. The two ends may be cut differently. */
    const struct transport_piece *pieces;
    uint32_t n_pieces;
};

/* The caller's, alive until on_done. */
struct transport_group {
    const struct transport_message *messages;
    uint32_t n_messages;
    /* Exactly once, on some thread: 0, RS_ECANCELED (aborted), RS_EPEER / RS_EDEADLINE / RS_EPROTO
     * with the peer named in err. Not called if transport_enqueue itself failed. */
    void (*on_done)(struct transport_group *g, int status, const struct err *e);
    void *arg;
};

struct transport_pair {
    uint32_t device, peer; /* the plan's device indices; device is local and sends */
};

/* The caller's, alive until on_done. */
struct transport_connect {
    const struct transport_pair *pairs;
    uint32_t n_pairs;
    uint64_t deadline_ns; /* monotonic */
    /* Exactly once, on some thread, maybe before transport_connect returns; may only post to a
     * mailbox and the like. 0, RS_ECANCELED (aborted), RS_EDEADLINE with the peer named in err. */
    void (*on_done)(struct transport_connect *c, int status, const struct err *e);
    void *arg;
};

struct transport_counters {
    uint64_t network_sent_bytes, network_received_bytes; /* payload, not frames */
    uint64_t domain_sent_bytes, domain_received_bytes;
    uint64_t messages, stale_frames;
    uint64_t registrations, refused_registrations; /* of buffers, by NCCL */
    uint64_t registered_bytes;                     /* now */
    uint64_t hits, hit_bytes;        /* messages that lay in a registered buffer, given to NCCL */
    uint64_t shrunk, shrinks_failed; /* communicators of NCCL */
    /* Of the newest attempt, monotonic: when the first payload of its messages began to move here, out or in; 0: none has
     * yet. TCP: its write, or what is read of it was there. Else not seen from outside, so never too late, but it may be
     * too early: when the copy was given to its device; when the group was given to NCCL. */
    uint64_t first_byte_ns;
};

struct transport_mem_options {
    double network_bytes_per_s; /* per device and direction; 0: no limit */
    double domain_bytes_per_s;
    uint64_t seed;         /* 0: no faults */
    uint32_t max_delay_us; /* random delay before each message */
    uint32_t kill_after; /* the device kill_device falls silent after so many messages; 0: never */
    uint32_t kill_device;
    struct fence *fence; /* as in transport_tcp_options */
};

/* For start-up: 0 where a transport of that name ("memory", "tcp", "nccl") can run here. RS_EPRECOND: NCCL isn't there, or is
 * too old: says so. RS_EUNIMPL: not in this build. */
int transport_check(const char *name, struct err *e);

/* All the plan's devices are local. devices[i] is the plan's device i (NULL where it does not take
 * part). */
int transport_mem_open(struct device *const *devices, uint32_t n_devices, uint64_t epoch,
                       const struct transport_mem_options *options, struct transport **ret,
                       struct err *e);

/* --- TCP --------------------------------------------------------------------------------------- */

/* A data plane's endpoint: its listening socket and the thread that lets connections in. */
struct transport_tcp_node;

enum { TRANSPORT_TOKEN_BYTES = 16, TRANSPORT_TCP_MAX_STREAMS = 8 };

/* Listens on a numeric address; port 0: one that the kernel picks. RS_EINVAL, RS_EUNAVAIL name
 * both. */
int transport_tcp_node_open(const char *address, uint16_t port, struct transport_tcp_node **ret,
                            struct err *e);
uint16_t transport_tcp_node_port(const struct transport_tcp_node *node);
/* Connections that were let go: no hello in time, or not one that anybody waits for. */
uint64_t transport_tcp_node_refused(const struct transport_tcp_node *node);
/* Connections of all its transports, both ways: that stand now, and that were made so far. */
uint64_t transport_tcp_node_connections(const struct transport_tcp_node *node);
uint64_t transport_tcp_node_connected(const struct transport_tcp_node *node);
/* All its transports must be closed. NULL is fine. */
void transport_tcp_node_close(struct transport_tcp_node *node);

/* One of the plan's devices: here, or at another data plane's address. */
struct transport_tcp_device {
    struct device *device; /* NULL: not local */
    const char *address;   /* numeric, copied; NULL where the device takes no part or is local */
    const char *node;      /* its name, for errors, copied; NULL: none */
    uint16_t port;
    /* Not local: the secret that both data planes were told for this attempt. Local devices reach
     * each other by one that the transport makes itself. */
    uint8_t token[TRANSPORT_TOKEN_BYTES];
};

struct transport_tcp_options {
    double network_bytes_per_s; /* per device and direction; 0: no limit */
    double domain_bytes_per_s;
    uint32_t streams; /* connections per (from, to), at most; 0: the default */
    /* A device on another data plane of which nothing is heard for so long while a message waits
     * for it fails its group with RS_EDEADLINE; 0: the default. Where data plane and network are
     * well something is always heard: each end of a connection says so when it has nothing else to
     * say. */
    uint32_t silence_ms;
    uint64_t model; /* epochs and attempts are counted by model */
    /* Looked at before each read into and write out of a message; shut, it fails the group
     * (RS_EDEADLINE). NULL: none. Outlives the transport. */
    struct fence *fence;
};

/* The node must outlive the transport. RS_EINVAL: an address that is none. */
int transport_tcp_open(struct transport_tcp_node *node, const struct transport_tcp_device *devices,
                       uint32_t n_devices, uint64_t epoch,
                       const struct transport_tcp_options *options, struct transport **ret,
                       struct err *e);

/* Before the next attempt, between attempts: new tokens and addresses of the devices that are not
 * local; the same devices must take part. Connections stand on, except to a device whose address
 * has changed. RS_EINVAL: an address that is none. */
int transport_tcp_renew(struct transport *t, const struct transport_tcp_device *devices,
                        struct err *e);

/* A new attempt: allowed when the former is over (finished or quiesced). Fences what is older. */
int transport_begin(struct transport *t, uint64_t attempt, struct err *e);
/* Makes, in the background, the connections from each pair's local device to its peer, as far as
 * they don't stand, trying again until the deadline: the other data plane may begin the attempt
 * later. After transport_begin, before the first group; counts as a group for transport_quiesced.
 * RS_ENOMEM, RS_ECANCELED (aborted): on_done is not called. */
int transport_connect(struct transport *t, struct transport_connect *c);
/* Whether messages between these two may be given in pieces. */
bool transport_takes_pieces(const struct transport *t, uint32_t device, uint32_t peer);
/* Enqueues a group for local device `device` (plan index) on `stream`. */
int transport_enqueue(struct transport *t, uint32_t device, struct device_stream *stream,
                      struct transport_group *group);
/* Any thread, never blocks: all groups of the attempt, queued ones too, end soon with RS_ECANCELED.
 */
void transport_abort(struct transport *t);
/* True when no group of an aborted or finished attempt can touch a buffer any more. */
bool transport_quiesced(const struct transport *t);
struct transport_counters transport_counters(const struct transport *t, uint32_t device);
void transport_close(struct transport *t); /* must be quiesced */

/* For implementations: notes when the attempt's first byte began to move, unless that is known. */
static inline void transport_first_byte(struct transport_counters *c, uint64_t now_ns)
{
    if (c->first_byte_ns == 0)
        c->first_byte_ns = now_ns;
}
/* For implementations: the runs of [offset, offset + length) of the message, up to `most` of them;
 * returns how many. */
struct iovec;
uint32_t transport_runs(const struct transport_message *m, uint64_t offset, uint64_t length,
                        struct iovec *ret_runs, uint32_t most);
/* Where tests have it so (base/crash.h), flips a bit in the middle of [offset, offset + length), which
 * has just been received. */
void transport_damage(const struct transport_message *m, uint64_t offset, uint64_t length);
/* Enqueues the copy of a message's bytes to where another one of as many has them, by the stream's device,
 * which must reach both. Errors as device_copy; some of it may be enqueued then. */
int transport_copy(struct device_stream *stream, const struct transport_message *to,
                   const struct transport_message *from);

struct transport_ops {
    const char *kind;
    /* NULL: never */
    bool (*takes_pieces)(const struct transport *t, uint32_t device, uint32_t peer);
    int (*begin)(struct transport *t, uint64_t attempt, struct err *e);
    int (*connect)(struct transport *t, struct transport_connect *c);
    int (*enqueue)(struct transport *t, uint32_t device, struct device_stream *stream,
                   struct transport_group *group);
    void (*abort)(struct transport *t);
    bool (*quiesced)(const struct transport *t);
    struct transport_counters (*counters)(const struct transport *t, uint32_t device);
    void (*close)(struct transport *t);
};

struct transport {
    const struct transport_ops *ops;
    uint64_t epoch;
};

#endif
