/* Inside of the TCP transport. Not for other folders.
 *
 *   tcp_frame.c      what travels: hello and frames
 *   tcp_node.c       listening socket; lets in who says the right hello, lets strangers go
 *   tcp_conn.c       one connection: reads into, and writes out of, the messages' own buffers
 *   tcp_link.c       the connections and messages from one device to another
 *   tcp_dial.c       transport_connect: all connections that an attempt needs, before it starts
 *   transport_tcp.c  groups, attempts, the vtable
 *
 *   device a:  port ── out link to b ══ 1 … 8 connections ══ in link from a ── port  :device b
 *
 * Who lets in: a hello shows the token of the attempt, and is good for one connection. One of an
 * attempt that has not begun here waits in its place until that has begun, or for HELLO_MS. The
 * acceptor's WELCOME tells the connector that it was let in. A connection serves all attempts of the
 * epoch.
 *
 * A group runs on its stream's thread, which itself reads and writes the sockets of its device: a
 * buffer is touched by no other thread, so the group's end is the buffer's release. The node's
 * thread is for what no group waits for: hellos, and ALIVE of devices that are idle.
 *
 * A message is cut into frames, each of which goes by whichever connection has room. A frame whose
 * receive is not posted yet stays in its socket, and its connection waits: memory is bounded by the
 * socket buffers, and the sender feels it. The receiver answers the first frame of a message
 * (ACCEPT, or REFUSE where the sizes differ); a send is done when all of it is written and
 * accepted. An aborted send leaves its frame unfinished; it is filled with zeros once the next
 * attempt has begun, and the receiver drains it as stale.
 *
 * A group whose buffers are free, of which nothing but answers is missing, makes way for one that
 * waits behind it: else each group would take a round trip, and a device could be no further than
 * its slowest peer. It trails: its messages stay in their links until the answers are there, read
 * by the groups that follow; the last group waits for those to all.
 *
 * Locks: node.mutex, then port.io, then tcp.mutex. */
#ifndef RS_TRANSPORT_TCP_H
#define RS_TRANSPORT_TCP_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "base/queue.h"
#include "transport/pace.h"
#include "transport/tcp_frame.h"

struct tcp;
struct tcp_link;
struct tcp_group;

union tcp_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

enum { TCP_ADDRESS_TEXT_BYTES = 64, TCP_NODE_TEXT_BYTES = 64 };

/* One end of a message; of its group. */
struct tcp_message {
    struct queue in_link; /* in link.messages from post to done */
    struct tcp_group *group;
    struct tcp_link *link;
    const struct transport_message *from; /* the caller's: where its bytes are */
    uint64_t bytes, sequence;
    uint32_t tag;
    uint64_t claimed; /* given to frames */
    uint64_t moved;   /* written, or landed */
    bool send, network, posted, done;
    bool released;   /* its buffer is touched no more */
    bool accepted;   /* sends: the ACCEPT came; receives: it is written */
    bool answer_due; /* receives: the ACCEPT is to be written */
};

struct tcp_out {
    uint8_t header[TCP_FRAME_BYTES]; /* or a hello */
    uint32_t header_bytes, header_at;
    uint32_t length, at;         /* of the payload */
    struct tcp_message *message; /* whose payload; NULL with a length: zeros, in the next attempt */
    uint64_t offset;             /* of the payload in the message */
    uint64_t attempt;
    uint64_t due_ns;               /* of a paced frame */
    struct tcp_message *answering; /* whose ACCEPT this is */
};

struct tcp_in {
    uint8_t header[TCP_FRAME_BYTES];
    uint32_t header_at;
    struct tcp_frame frame; /* of the payload that is being read, or of the header that waits */
    uint32_t left;          /* of the payload; 0: a header comes */
    struct tcp_message *message; /* NULL: it is drained */
    uint64_t due_ns;
};

struct tcp_conn {
    struct tcp_link *link;
    int fd; /* -1: none */
    uint32_t stream;
    bool connecting, readable, writable;
    bool counted; /* among the node's connections */
    bool welcome; /* out: the other side has let it in */
    bool hung;    /* the other side has closed; what it sent before may still be there */
    uint64_t said_ns;
    struct tcp_out out;
    struct tcp_in in;
};

struct tcp_link {
    struct queue in_port;   /* in port.links */
    struct queue in_active; /* in port.active while messages are posted */
    struct queue messages;  /* by sequence */
    struct tcp_port *port;
    uint32_t peer;
    bool out;  /* this device sends */
    bool lost; /* a connection broke in this attempt while nothing was posted */
    uint64_t n_posted;
    uint64_t heard_ns;
    char why[128]; /* what ended a connection last, while nothing was posted */
    struct tcp_conn conns[TRANSPORT_TCP_MAX_STREAMS];
    /* Under tcp.mutex: connections that the node let in, not yet taken over. */
    struct queue in_arrivals;
    int arrived[TRANSPORT_TCP_MAX_STREAMS];     /* -1: none */
    uint64_t newest[TRANSPORT_TCP_MAX_STREAMS]; /* attempt of the last one let in */
};

/* A local device. All but the arrivals belongs to the holder of io. */
struct tcp_port {
    struct tcp *tcp;
    uint32_t device;
    pthread_mutex_t io;
    int epoll, wake;
    struct queue links, active;
    struct tcp_group *group; /* the one that runs */
    struct queue trailing;   /* groups before it, of which answers are missing */
    uint32_t n_trailing;
    struct pace pace;
    uint64_t next_due_ns; /* of paced frames, since the last pump */
    uint64_t ticked_ns;
    int failed; /* a group of this attempt failed: later ones do too */
    struct queue arrivals;
    struct tcp_link **in, **out; /* [n_devices], under tcp.mutex; a link stays once it is there */
    _Atomic uint64_t sent_bytes[2], received_bytes[2]; /* [network] */
    _Atomic uint64_t messages, stale_frames;
    _Atomic uint64_t first_byte_ns; /* of the attempt; written by the holder of io */
    _Atomic uint32_t n_waiting;     /* groups enqueued behind the one that runs */
};

struct tcp_peer {
    struct tcp_port *port; /* local devices */
    union tcp_address address;
    char node[TCP_NODE_TEXT_BYTES];
    uint8_t token[TRANSPORT_TOKEN_BYTES]; /* under node.mutex */
    bool takes_part;
};

/* A transport_connect under way; the node's thread has it. */
struct tcp_dial {
    struct transport_connect *request;
    struct err err;
    uint32_t n;
    struct tcp_dialled {
        struct tcp_link *link;
        uint64_t retry_ns;
        uint32_t backoff_ms;
        bool stands;
    } pairs[];
};

struct tcp {
    struct transport base;
    struct queue in_node;
    struct transport_tcp_node *node;
    struct transport_tcp_options options;
    struct tcp_peer *peers; /* [n_devices] */
    uint32_t n_devices, n_remote;
    pthread_mutex_t mutex;
    uint32_t n_groups;     /* enqueued and not over; a dial is one */
    struct tcp_dial *dial; /* under node.mutex */
    _Atomic uint64_t attempt;
    atomic_bool aborted;
};

struct tcp_group {
    struct queue in_trailing;
    struct transport_group *group; /* NULL: it trails */
    struct tcp_port *port;
    struct err err;
    uint64_t attempt;
    uint32_t n_messages, n_open;
    uint32_t n_buffers; /* messages that are not released */
    int status;
    struct tcp_message messages[];
};

/* --- tcp_node.c --- */
void tcp_node_add(struct transport_tcp_node *node, struct tcp *t);
/* Afterwards the node's thread touches it no more. */
void tcp_node_remove(struct transport_tcp_node *node, struct tcp *t);
void tcp_node_lock(struct transport_tcp_node *node);
void tcp_node_unlock(struct transport_tcp_node *node);
/* Looks at what has changed: a new attempt, a dial, an abort. Any thread. */
void tcp_node_wake(struct transport_tcp_node *node);
/* The port's events wake the node's thread too, while it dials. */
int tcp_node_watch(struct transport_tcp_node *node, struct tcp_port *port);
void tcp_node_ignore(struct transport_tcp_node *node, struct tcp_port *port);
void tcp_node_count(struct transport_tcp_node *node, bool made);
const union tcp_address *tcp_node_address(const struct transport_tcp_node *node);
int tcp_address_parse(const char *text, uint16_t port, union tcp_address *ret);
socklen_t tcp_address_bytes(const union tcp_address *a);
const char *tcp_address_text(const union tcp_address *a, char out[TCP_ADDRESS_TEXT_BYTES]);

/* --- tcp_conn.c --- */
int tcp_socket_prepare(int fd);
void tcp_conn_init(struct tcp_conn *c, struct tcp_link *l, uint32_t stream);
/* Takes fd. connecting: the hello goes first, once the socket is connected. */
int tcp_conn_open(struct tcp_conn *c, int fd, const struct tcp_hello *hello);
void tcp_conn_close(struct tcp_conn *c);
/* Each does what it can without blocking; true when something moved. A failure closes the
 * connection and fails the port's group where it waits for this link. */
bool tcp_conn_read(struct tcp_conn *c);
bool tcp_conn_write(struct tcp_conn *c);
/* Stages an ALIVE where nothing was said for a while and nothing else is under way. */
void tcp_conn_keep_alive(struct tcp_conn *c, uint64_t now);
/* The message's buffer is touched no more by this connection. */
void tcp_conn_withdraw(struct tcp_conn *c, const struct tcp_message *m);
/* Before the next attempt: closes a connection whose other end is gone, or has not let it in. */
void tcp_conn_renew(struct tcp_conn *c);

/* --- tcp_link.c --- */
/* The link of `port` to or from `peer`, made if need be. NULL: no memory. Any thread. */
struct tcp_link *tcp_link_get(struct tcp_port *port, uint32_t peer, bool out);
void tcp_link_free(struct tcp_link *l);
/* Begins to make one of its connections; a failure is told as tcp_link_fail does. */
void tcp_link_dial(struct tcp_link *l, uint32_t stream);
void tcp_link_post(struct tcp_link *l, struct tcp_message *m, uint64_t now);
struct tcp_message *tcp_link_find(struct tcp_link *l, uint64_t sequence);
/* The next frame's message of an out link, or the next one to be answered of an in link. */
struct tcp_message *tcp_link_unsent(struct tcp_link *l);
struct tcp_message *tcp_link_unanswered(struct tcp_link *l);
bool tcp_link_pump(struct tcp_link *l);
/* Ends the message if all of it is through, and its group if that trails and this was the last. */
void tcp_link_settle(struct tcp_link *l, struct tcp_message *m);
void tcp_link_withdraw(struct tcp_link *l, struct tcp_message *m);
/* Fails the group that runs, if it waits for this link; text says what happened. */
void tcp_link_fail(struct tcp_link *l, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* "device 0, peer device 3 of node 'b' at 10.0.0.2:7001: text"; returns code. */
int tcp_link_error(const struct tcp_link *l, struct err *e, int code, const char *text);
/* Silence of the peer, and ALIVE to it. */
void tcp_link_tick(struct tcp_link *l, uint64_t now);
/* Takes over what the node let in. */
void tcp_port_adopt(struct tcp_port *port);

/* --- tcp_dial.c --- */
int tcp_connect(struct transport *transport, struct transport_connect *c);
/* The node's thread, under node.mutex: goes on with the transport's dial; when to come again. */
uint64_t tcp_dial_step(struct tcp *t, uint64_t now);

/* --- transport_tcp.c --- */
/* Of one that trails: no link knows its messages any more. */
void tcp_group_forget(struct tcp_group *g);
struct tcp *tcp_of_transport(const struct transport *t);
/* One more group that the attempt waits for. RS_EPRECOND: none has begun; RS_ECANCELED: it was aborted. */
int tcp_count_group(struct tcp *t, uint64_t *ret_attempt);
struct tcp_port *tcp_port_of(const struct tcp *t, uint32_t device);
uint64_t tcp_beat_ns(const struct tcp *t);
/* Takes the events that are there. */
void tcp_port_take_events(struct tcp_port *port);
/* All links of a port; while it is idle its senders' answers are read too. */
void tcp_port_tick(struct tcp_port *port, uint64_t now);
/* The node's thread, under node.mutex. REFUSED: *ret_why says what is wrong with the hello. */
enum tcp_answer { TCP_TAKEN, TCP_REFUSED, TCP_NOT_YET, TCP_NOT_MINE };
enum tcp_answer tcp_admit(struct tcp *t, const struct tcp_hello *h, int fd, const char **ret_why);

#endif
