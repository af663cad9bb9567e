/* What the files of the node part share: the structs of the control process on every daemon. Private to service/.
 *
 *   node part (here)           leases, models, this node's part of the attempts in flight, pollers
 *   coordinator (coordinator.h) deciders, roster, ledger: on one daemon of a cluster
 *
 * They speak only by struct node_report and struct node_order (peer/message.h): node_tell and node_order_take are this
 * part's ends of it. No file of the node part touches a struct refit.
 *
 * Everything here is owned by the loop thread. Jobs on libuv's threads get copies or counted references of immutable
 * things (layouts, plans, fingerprints) and touch nothing else. */
#ifndef RS_SERVICE_STATE_H
#define RS_SERVICE_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "base/mailbox.h"
#include "base/queue.h"
#include "ledger/ledger.h"
#include "peer/message.h"
#include "peer/peer.h"
#include "plan/plan.h"
#include "refit/refit.h"
#include "service/config.h"
#include "service/data_plane_link.h"
#include "service/layouts.h"
#include "service/memory_server.h"
#include "service/ops.h"
#include "service/plan_store.h"

struct coordinator;
struct part;
struct peers;

struct service {
    uv_loop_t *loop;
    const struct config *config;
    uint64_t incarnation;
    uint64_t start_ns;
    uint32_t node;                   /* our number */
    struct coordinator *coordinator; /* NULL: on another node */
    struct peer *peer;               /* NULL: there is no other node */
    struct peers *peers;             /* what hangs on it: peers.c */
    uint64_t session;                /* with the coordinator: a number never used before; 0: none */
    uint64_t sessions;               /* the last number given out */
    uint64_t coordinator_incarnation;
    bool introduced;        /* NODE_UP was said in this session */
    struct mailbox mailbox; /* from the ledger's writer */
    uv_async_t wake;
    struct ledger *
        ledger; /* of record on the coordinator; elsewhere of what is committed alone (remember.c) */
    struct memory_server *memory;
    struct data_plane_link *link;
    struct layouts layouts;
    struct plan_store plans;
    struct queue models; /* struct model */
    uint32_t n_models;
    struct queue leases; /* struct lease, leaving ones too */
    uint32_t n_leases;
    uint32_t n_watchers;
    uint32_t n_rebinding; /* workers that a new data plane does not know yet */
    bool node_up;
    uint64_t next_cookie;
    struct queue waiters; /* struct waiter */
    uint64_t random;      /* state of the jitter's sequence */
    uint32_t n_jobs;      /* on libuv's threads */
    uint32_t n_writes;    /* at the ledger */
    unsigned n_handles;   /* of ours, open or closing */
    bool stopping, stop_finished;
    void (*stopped)(void *arg);
    void *stopped_arg;
    void (*failed)(void *arg); /* NULL: told already */
    void *failed_arg;
    uint64_t (*n_refused)(void *arg); /* by the rpc server; NULL: none serves */
    void *n_refused_arg;
};

/* What a source worker has published, with the fingerprints of its shards. Counted; immutable. */
struct publication {
    uint32_t refs;
    uint64_t version;
    uint64_t id;
    uint32_t push; /* see REFIT_EV_PUBLISHED */
    /* per tensor of the source layout, this rank's shards; NULL: verification is off */
    uint64_t *fingerprints;
    uint32_t n_tensors;
    uint8_t *event; /* NULL: the client has waited; else its event, WIRE_HANDLE_BYTES */
    struct publication_print *expected; /* of whole tensors, by the client's own way */
    uint32_t n_expected;
};

enum lease_life { LEASE_ATTACHING, LEASE_LIVE, LEASE_GRACE, LEASE_LEAVING };

/* One attach of one worker.
 *
 *   ATTACHING ──attached──▶ LIVE ◀──resume── GRACE          LEAVING: its lease is over; it stays until the data
 *       │                    │ ╰─stream broke──▲ │          plane has let its memory go, then it is freed.
 *       ╰─────────refused────┴──────▶ LEAVING ◀──╯ */
struct lease {
    struct queue in; /* service.leases */
    struct service *service;
    struct model *model;
    enum lease_life life;
    uint64_t id;
    uint64_t client; /* of the memory socket */
    int32_t pid;
    enum refit_side side;
    struct layout_entry *layout;
    uint32_t rank, device;
    enum refit_receive receive;
    bool accept_automatically;
    uint64_t claims_live, claims_shadow; /* from AttachHello, until they are checked */
    uint64_t opened;                     /* live memory was being written with that version */
    uint64_t waits_for;                  /* see REFIT_EV_ATTACHED */
    uint32_t waits_push;                 /* the push that `waits_for` belongs to */
    struct {
        uint64_t version; /* 0: nothing */
        uint32_t push;
        char *reason; /* owned */
    } withdrawn; /* by its client, and no later push published since: for the coordinators to come */
    bool again;  /* see REFIT_EV_ATTACHED */
    uint64_t published_before; /* … as `published` */
    uint64_t held, applied;    /* by the decider's last word */
    bool torn;                 /* live memory is partly written */
    bool asleep; /* it has no memory: what is still mapped is let go as soon as nothing uses it */
    uint64_t sleep_cookie; /* of who waits for that; 0: nobody */
    struct segment **segments;
    uint32_t n_segments;
    uint64_t segment_bytes;
    struct binding_piece *pieces[2]; /* WIRE_LIVE, WIRE_SHADOW: while the pages come */
    size_t n_pieces[2], pieces_capacity[2];
    int binding_fd[2]; /* encoded bindings, sealed; -1: none */
    int dtypes_fd;
    struct attach_stream *stream; /* NULL: broken or ended */
    uv_timer_t grace;
    bool known;            /* the decider knows it */
    uint64_t told_session; /* in which it was reported last */
    bool mapped;           /* segments are told to the data plane */
    bool bound;            /* the data plane can use it */
    bool waits_unbind, rebinding;
    bool resuming; /* between its hello with `resume` and AttachDone */
    bool done;     /* AttachDone came */
    int checking;  /* enum wire_memory whose content is being checked */
    bool job;      /* its bindings are being checked on another thread */
    unsigned step; /* of MAP and BIND */
    void (*after_bind)(struct lease *l, int code, const struct err *e);
    struct link_request bind, unbind, publish, apply;
    struct waiter waiter;    /* of the attach: the decider's answer */
    struct waiter ask;       /* whether it may publish */
    uint64_t publish_cookie; /* of the client's call */
    struct publication *publishing, *published;
    /* per tensor of its layout: what receiving memory held when `sums_version` was staged or claimed */
    uint64_t *sums;
    uint64_t sums_version;
    /* What its memory is known to hold, whole: told when it is reported again. */
    struct memory_content {
        uint64_t version; /* 0: nothing that is known */
        uint64_t fold;    /* of its fingerprints (held.h); 0: they were not taken */
        uint64_t content; /* as the PREPARE that brought it named it; 0: not known */
    } content[2];         /* WIRE_LIVE, WIRE_SHADOW */
    uint64_t apply_version;
    char end_reason[256];
};

/* A model as every node knows it. The coordinator's view of it is struct decider. */
struct model {
    struct queue in; /* service.models */
    struct service *service;
    char *name;
    uint64_t id;    /* in wire messages */
    bool announced; /* the coordinator has told of it */
    struct {
        uint64_t version, wall_ns;
    } committed; /* the newest that the coordinator has told; version 0: none */
    uint64_t
        remembered; /* the newest that an earlier start of this node was told: for JOIN, not for who polls */
    struct part *part; /* this node's part of the attempt in flight: part.h */
    /* of the newest attempt that was planned: what Publish fingerprints by */
    struct plan_entry *last_plan;
    struct queue polls; /* struct poll: long polls and watchers of committed versions */
};

/* --- model.c ------------------------------------------------------------------------------------ */

struct model *model_find(struct service *s, const char *name);
/* RS_EEXHAUSTED: max_models. */
int model_open(struct service *s, const char *name, struct model **ret, struct err *e);
/* Its polls end, its part is forgotten; the data plane is not told. Freed when its handles are closed. */
void model_close(struct model *m);

/* --- node.c: this node's end of what it and the coordinator say to each other --------------------- */

/* 0, or RS_EUNAVAIL where there is no session. Orders may come back inside the call. */
int node_tell(struct service *s, const struct node_report *r);
/* As node_tell, with a cookie in the event (or the ask) whose REPLY ends w; an error that is returned does not. */
int node_ask(struct service *s, struct node_report *r, struct waiter *w, struct err *e);
void node_order_take(struct service *s, const struct node_order *o);
/* A session has begun: all live workers and the data plane are reported anew. */
void node_welcomed(struct service *s, uint64_t coordinator_incarnation);
/* The data plane has come, with all live workers bound; or has gone. */
void node_up(struct service *s);
void node_lost(struct service *s, const char *why);
/* The session is over: attempts are aborted here, and who waits for the coordinator is told. */
void node_severed(struct service *s, const char *why);
/* Nothing of an attempt or an Apply moves here. */
bool node_is_quiet(const struct service *s);

/* --- lease.c ------------------------------------------------------------------------------------ */

struct lease *lease_find(struct service *s, uint64_t id);
/* Shadow to live; told by APPLIED. */
void lease_apply(struct lease *l, uint64_t version);
/* The lease ends: tells the coordinator, ends the stream with that code and text, lets the memory go. */
void lease_end(struct lease *l, bool for_good, int code, const char *reason);
/* Its memory is let go; w ends when it is. Told by SLEPT. Twice is fine. */
void lease_sleep(struct lease *l, struct waiter *w);
/* Those whose memory nobody needs any more are unbound and freed. */
void leases_sweep(struct service *s);
/* A new data plane: tells it of all live workers; node_up when that is done. */
void leases_rebind(struct service *s);
void leases_lost_data_plane(struct service *s);
void leases_client_ended(struct service *s, const struct memory_client *client);
void publication_unref(struct publication *p); /* publish.c */

/* --- attach.c ----------------------------------------------------------------------------------- */

/* Reports all live leases again, with what their memory is known to hold and what they have published. */
void leases_tell(struct service *s);

/* --- remember.c: on a node that is not the coordinator, what is committed, over restarts -------------- */

/* Before the loop runs. RS_EDISK: the file makes no sense. */
int remember_load(struct service *s, struct err *e);
/* m->committed has grown. What can't be written is logged: the coordinator's ledger is the one that counts. */
void remember_committed(struct model *m);

/* --- watch.c ------------------------------------------------------------------------------------ */

void watch_committed(struct model *m);
/* All polls of a model end with RS_EUNAVAIL. */
void polls_close(struct model *m);

/* --- service.c ---------------------------------------------------------------------------------- */

/* Runs done of the waiter with that cookie; nothing where nobody waits with it any more. */
void service_reply(struct service *s, uint64_t cookie, const struct op_reply *reply);
/* The same, for a code and a text alone. */
void service_answer(struct service *s, uint64_t cookie, int code, const char *text);
/* When nothing is left to wait for, ends the stop. */
void service_stop_if_idle(struct service *s);
/* Who was turned away here so far. */
struct peer_strangers service_strangers(const struct service *s);
/* After each of the ledger's answers: RS_EDISK is told to the owner (service_on_failure), once. */
void service_check_ledger(struct service *s, int code);
/* A handle of the service (or of what it owns) is closed. */
void service_handle_closed(struct service *s);

#endif
