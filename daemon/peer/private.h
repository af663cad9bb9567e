/* What the files of peer/ share.
 *
 *   peer.c          start, stop, the clock
 *   member.c        the stream to the coordinator       coordinator.c   seats of the nodes, their sessions
 *   admit.c         who may join (pure)                 probe.c         whether a data port can be reached
 *   fetch.c         layouts from the coordinator        api_*.c, frame.h   messages as bytes */
#ifndef RS_PEER_PRIVATE_H
#define RS_PEER_PRIVATE_H

#include "base/queue.h"
#include "base/sm.h"
#include "peer/frame.h"
#include "peer/peer.h"
#include "rpc/rpc_link.h"

enum {
    PEER_WHY_BYTES = 512,
    PEER_JOIN_MS = 5000,   /* a stream without JOIN, a JOIN without WELCOME */
    PEER_PROBE_MS = 2000,  /* a data port that does not answer */
    PEER_GOODBYE_MS = 500, /* the coordinator's answer to a GOODBYE */
    PEER_BACKOFF_MS = 100, /* between two tries, doubling */
    PEER_BACKOFF_MOST_MS = 2000,
    PEER_BEATS = 64,           /* beats whose answer may be out */
    PEER_FLOOD_BURST = 200000, /* messages of one session, */
    PEER_FLOOD_PER_S = 20000,  /* and how fast that fills up again */
    /* What may wait for the other side: orders or reports of one moment (a join, a commit) to or of all workers of a node. */
    PEER_QUEUE_MESSAGES = 65536,
    PEER_QUEUE_BYTES = 128 << 20
};

/* --- the coordinator --- */

/* A connection that is tried. */
struct probe {
    uv_tcp_t tcp;
    uv_connect_t connect;
    uv_timer_t timer;
    unsigned n_open; /* handles */
    struct peer *p;
    struct session *session; /* NULL: nobody waits any more */
    char address[NODE_ADDRESS_BYTES + 8];
    bool told;
};

/* A report that waits behind a probe, as bytes. */
struct held_report {
    struct queue link;
    uint64_t arrived_ns;
    size_t n_bytes;
    uint8_t data[];
};

struct session {
    struct queue link; /* peer.sessions */
    struct peer *p;    /* NULL: the peer is gone */
    struct rpc_call *call;
    struct seat *seat; /* NULL: not joined, or its time is over */
    uint64_t opened_ns;
    uint8_t token[PEER_TOKEN_BYTES];
    struct frame_parts parts;
    bool finished; /* rpc_call_finish was called */
    char *doomed;  /* it ends at the next tick, and why */
    double tokens; /* messages that it may still send */
    uint64_t tokens_ns;
    struct probe *probe; /* NODE_UP waits for it */
    struct queue held;   /* struct held_report */
    size_t held_bytes;
};

/* A node of the list, as the coordinator knows it. */
struct seat {
    struct sm state; /* enum peer_state */
    uint32_t node;
    struct session *session; /* HERE */
    uint64_t incarnation;    /* of the newest JOIN; 0: none */
    char release[32], data_address[NODE_ADDRESS_BYTES];
    char **domains; /* owned, of n_devices */
    uint32_t n_devices;
    uint64_t heard_ns, beat_ns; /* newest message; newest JOIN or BEAT */
    uint64_t round_trip_ns;
    uint64_t joins, refused;
    struct peer_strangers strangers; /* of its newest beat */
    char why[PEER_WHY_BYTES];
};

/* --- a member --- */

enum member_state { MEMBER_SEEKING, MEMBER_JOINING, MEMBER_JOINED };

struct member {
    struct sm state;
    struct rpc_link *link;
    struct rpc_link_call *call; /* lives until its on_end, whatever the state */
    bool link_up;
    bool waits_ready;  /* introduce said: not yet */
    bool broken;       /* JOINED, but it ends at the next tick */
    bool goodbye;      /* sent */
    uint64_t since_ns; /* of the state */
    uint64_t try_ns;   /* not before */
    uint32_t backoff_ms;
    uint64_t random;
    struct frame_parts parts;
    uint64_t sequence, answered; /* of beats; 0 is the JOIN */
    uint64_t sent_ns[PEER_BEATS];
    uint64_t beat_due_ns;
    uint64_t heard_ns, round_trip_ns;
    struct peer_strangers strangers; /* for the next beat */
    uint32_t lease_ms, beat_ms;      /* the coordinator's */
    uint8_t token[PEER_TOKEN_BYTES];
    char why[PEER_WHY_BYTES], link_text[PEER_WHY_BYTES], link_told[PEER_WHY_BYTES];
    char text[2 * PEER_WHY_BYTES];
};

/* --- both --- */

struct peer {
    struct peer_options options; /* strings as given */
    uv_timer_t timer;
    uint64_t ticked_ns, lease_due_ns;
    struct seat *seats; /* coordinator: n_nodes; NULL on a member */
    struct queue sessions;
    unsigned n_probes, n_jobs;
    uint64_t refused, refused_told_ns;
    struct member *member; /* NULL on the coordinator */
    const struct layout *(*find_layout)(void *arg, const uint8_t digest[16]);
    void *find_arg;
    bool stopping, timer_open, link_open;
    uint64_t stop_ns;
    void (*done)(void *arg);
    void *done_arg;
};

uint64_t peer_now(const struct peer *p);
/* What time brings; by a timer, or by a test. */
void peer_tick(struct peer *p);
/* Something closed: frees the peer where that was the last. */
void peer_maybe_gone(struct peer *p);
/* Once, when nothing needs the clock any more. */
void peer_timer_close(struct peer *p);

int coordinator_start(struct peer *p, struct err *e);
void coordinator_tick(struct peer *p, uint64_t now_ns);
void coordinator_stop(struct peer *p);
void coordinator_free(struct peer *p);
/* probe.c's answer; text is NULL where it was reached. */
void coordinator_probed(struct session *s, const char *text);
/* Who calls a method of service Peer: RS_EPERM where its certificate is not of the role, or it has none; name: of the
 * node that it says it is, NULL: any node's. */
int coordinator_identify(const struct peer *p, const struct rpc_call *call, const char *name,
                         struct err *e);
/* The peer that serves a call; NULL: ended with a status. */
struct peer *coordinator_of(struct rpc_call *call);

int member_start(struct peer *p, struct err *e);
void member_tick(struct peer *p, uint64_t now_ns);
void member_stop(struct peer *p);
void member_free(struct peer *p);

/* 0 and the probe (freed by itself), else the text is in e. */
int probe_start(struct session *s, const char *data_address, uint16_t port, struct err *e);
void probe_forget(struct probe *probe);

/* fetch.c: the server's method; a member's fetches end when the link closes. */
void fetch_serve(struct rpc_call *call, const void *data, size_t n_bytes);

/* --- admit.c, pure --- */

/* Whether a JOIN fits this coordinator, but for incarnations and certificates. RS_EPRECOND; RS_ENOTFOUND: no such node. */
int admit_check(const struct peer_options *o, const struct frame_join *j, uint32_t *ret_node,
                struct err *e);
/* The index of a node by name; UINT32_MAX: none. */
uint32_t admit_find(const struct peer_options *o, const char *name);
/* Whether `name` is matched by one of the space separated globs. */
bool admit_matches(const char *globs, const char *name);

#endif
