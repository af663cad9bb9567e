/* Daemons that work as one: who is there, the streams between them, their leases.
 *
 *     member ══ Peer.Join (one bidi stream, opened by the member) ══ coordinator
 *            ── BEAT every beat_ms ──▶   ◀── answer ──      lease: from the time that an answered BEAT was sent
 *
 *   member:       SEEKING ──stream──▶ JOINING ──WELCOME──▶ JOINED ──broke, silent, refused──▶ SEEKING (back-off)
 *   coordinator:  (per node) AWAY ──JOIN──▶ HERE ──broke──▶ SILENT ──lease over──▶ AWAY     SILENT ──JOIN──▶ HERE
 *
 * A session is one stream from WELCOME to its end. Nothing of an earlier session is handed over in a later one. A JOIN
 * says that nothing of the node's earlier sessions moves any more: the member has told its data plane to abort and has
 * heard QUIESCED, or that data plane is dead.
 *
 * This folder knows who may join and carries messages (message.h); it decides nothing about versions. Protobuf in
 * api_*.c alone. Thread: the loop. */
#ifndef RS_PEER_PEER_H
#define RS_PEER_PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "base/err.h"
#include "peer/message.h"
#include "rpc/rpc.h"
#include "rpc/rpc_link.h"

#define PEER_PROTOCOL UINT32_C(4)
enum { PEER_TOKEN_BYTES = 16, PEER_TOKEN_TEXT = 2 * PEER_TOKEN_BYTES + 1 };

struct peer;

struct peer_node {
    char name[NODE_NAME_BYTES];
    char address[NODE_ADDRESS_BYTES + 8]; /* of its gRPC, "10.0.0.1:7070", "[fd00::1]:7070" */
};

/* What a member says of itself; the strings are copied where they are kept. */
struct peer_member {
    uint64_t incarnation;
    uint32_t protocol;
    char release[32];
    uint32_t n_devices;
    const char *const *domain_of_device; /* names, n_devices of them; "" is the node's own name */
    char data_address[NODE_ADDRESS_BYTES];
    char environment[1024]; /* "backend host, transport tcp": what must be alike in a cluster */
    struct peer_commit {
        const char *model;
        uint64_t version; /* newest committed version that it knows of */
    } const *commits;
    uint32_t n_commits;
};

/* Who had no business at a node and was turned away, since it was started. */
struct peer_strangers {
    uint64_t connections; /* at gRPC */
    uint64_t peers;       /* joins and other calls of daemons */
    uint64_t data;        /* at the data port */
};

enum peer_state { PEER_AWAY, PEER_HERE, PEER_SILENT };

/* The coordinator's view of a node, for status and for topologies. */
struct peer_view {
    enum peer_state state;
    const char *name;
    uint64_t incarnation;
    uint32_t n_devices;
    const char *const *domain_of_device;
    const char *data_address;
    const char *release;
    uint64_t heard_ns; /* monotonic, of the last message; 0: never */
    uint64_t round_trip_ns;
    const char *why; /* AWAY, SILENT: in words */
    uint64_t joins, refused;
    struct peer_strangers strangers; /* as its newest beat had it */
};

struct peer_events {
    void *arg;
    /* --- on the coordinator --- */
    /* Anything against it beyond what peer checks itself (names, protocol, incarnation, environment, addresses)?
     * RS_E… refuses it with the text in e. */
    int (*admit)(void *arg, uint32_t node, const struct peer_member *m, struct err *e);
    /* It is HERE: its NODE_UP and its workers come as reports. again: an incarnation that was here before. */
    void (*joined)(void *arg, uint32_t node, const struct peer_member *m, bool again);
    void (*report)(void *arg, uint32_t node, const struct node_report *r);
    /* The stream broke or nothing was heard: its part of what is in flight has failed; but its data plane may still be
     * moving bytes. */
    void (*silent)(void *arg, uint32_t node, const char *why);
    /* Nothing of it moves any more, for sure: its lease is over, or it (or its successor) is about to join. Comes before
     * `joined`, and after `silent`. */
    void (*lost)(void *arg, uint32_t node, const char *why);
    /* --- on a member --- */
    /* What it says of itself in the JOIN that is about to go; borrowed until the next call. RS_EUNAVAIL: not yet (its
     * data plane is not quiet after the last session); peer asks again after peer_ready. */
    int (*introduce)(void *arg, struct peer_member *ret);
    void (*welcomed)(void *arg, uint64_t coordinator_incarnation);
    void (*order)(void *arg, const struct node_order *o);
    /* The session is over: stop what it started, then peer_ready. */
    void (*severed)(void *arg, const char *why);
    /* The data plane may move bytes until then (monotonic). On the coordinator's own node too. */
    void (*lease)(void *arg, uint64_t until_ns);
};

struct peer_options {
    uv_loop_t *loop;
    const struct peer_node *nodes;
    uint32_t n_nodes;
    uint32_t me, coordinator; /* indices into nodes */
    uint32_t beat_ms, lease_ms,
        slack_ms; /* slack_ms 0: 1000; of a member's, the coordinator's hold */
    /* The coordinator's, to compare with; may change. Empty: not known yet, and who joins is told to try again. */
    const char *environment;
    uint64_t
        incarnation; /* of this start of the daemon; what introduce leaves 0 or empty is taken from here */
    const char *release;
    const char *data_address; /* numeric */
    const char
        *peer_role; /* [roles] peer: certificate names with `*`; NULL or "": a node's own name */
    const char *tls_ca, *tls_certificate,
        *tls_key; /* NULL: plain, which only an insecure network or loopback allows */
    struct peer_events events;
    /* Tests only: NULL are the real ones. With a clock of its own a peer has no timer: peer_tick (private.h). */
    uint64_t (*clock)(void);
    int (*open_link)(uv_loop_t *loop, const struct rpc_link_options *options,
                     const struct rpc_link_events *events, void *arg, struct rpc_link **ret,
                     struct err *e);
};

/* Starts seeking (member), or waits to be joined (coordinator, or a single node). RS_EINVAL, RS_ENOMEM. options is
 * borrowed for the call, nodes and the strings in it for life. No callback runs inside. After an error the loop must run
 * once more, since handles close on it. */
int peer_start(const struct peer_options *options, struct peer **ret, struct err *e);
/* Closes all; `done` runs once, then it is freed; no other callback runs any more but those of
 * fetches, with RS_ECANCELED. Says goodbye: the coordinator need not
 * wait for the lease. So a member's data plane is quiet or dead before this. */
void peer_stop(struct peer *p, void (*done)(void *arg), void *arg);

bool peer_is_coordinator(const struct peer *p);

/* --- the coordinator --- */

/* The methods of service Peer for the rpc server; *context is what rpc_call_context must lead to: see peer_of. */
const struct rpc_method *peer_methods(size_t *ret_n);
/* Set once by the service: from rpc_server's context to the peer. */
void peer_set_resolver(struct peer *(*of)(void *rpc_context));
/* By that; NULL: there is none. */
struct peer *peer_of(void *rpc_context);
/* RS_EUNAVAIL: it is not HERE. RS_EEXHAUSTED: it does not read, RS_ENOMEM: its session ends, and `silent` comes later,
 * never inside. Never for the coordinator's own node. */
int peer_order(struct peer *p, uint32_t node, const struct node_order *o);
/* Ends its session: it is SILENT until its lease is over. `silent` comes later, never inside. */
void peer_sever(struct peer *p, uint32_t node, const char *why);
void peer_look(const struct peer *p, uint32_t node, struct peer_view *ret);
/* Whether a call that came with this text (peer_token) was passed on by a member that is HERE; its number. NULL text:
 * false. */
bool peer_vouches(const struct peer *p, const char *token, uint32_t *ret_node);
/* JOINs, and other calls of service Peer, that were refused: strangers, wrong certificates, wrong settings. */
uint64_t peer_n_refused(const struct peer *p);
/* Answers GetLayout: pages of a layout's canonical form. Set once by the service. */
struct layout;
void peer_set_layouts(struct peer *p,
                      const struct layout *(*find)(void *arg, const uint8_t digest[16]), void *arg);

/* --- a member --- */

/* RS_EUNAVAIL: no session, or it ends by this (no memory, the coordinator does not read); `severed` comes later, never
 * inside. Never on the coordinator. */
int peer_report(struct peer *p, const struct node_report *r);
/* introduce can say now what it could not. */
void peer_ready(struct peer *p);
bool peer_joined(const struct peer *p);
/* Reads the certificates again, for the next connection to the coordinator; the one that stands stays. 0, with nothing
 * done, on the coordinator and where there are none. After an error the old ones go on. */
int peer_reload_tls(struct peer *p, struct err *e);
/* What goes along with the next beats; nothing on the coordinator. */
void peer_set_strangers(struct peer *p, const struct peer_strangers *refused);
/* "joined", "seeking n0 at 10.0.0.1:7070: connection refused" …; borrowed until the next call. */
const char *peer_text(const struct peer *p);
/* How old the newest word of the coordinator is (monotonic ns); UINT64_MAX: none in this start. */
uint64_t peer_age_ns(const struct peer *p);
/* Fetches a layout from the coordinator: done runs once, later (at once only without memory); the layout is the
 * callee's. */
void peer_fetch_layout(struct peer *p, const uint8_t digest[16],
                       void (*done)(void *arg, int code, const char *text, struct layout *layout),
                       void *arg);
/* What proves to the coordinator that a call comes from this member, as metadata; "": no session. */
void peer_token(const struct peer *p, char ret_text[PEER_TOKEN_TEXT]);
/* The channel to the coordinator, for calls that are passed on (rpc_link.h); NULL: none stands. */
struct rpc_link *peer_channel(struct peer *p);

#endif
