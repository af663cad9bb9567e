/* The coordinator: the deciders, what is known of every node's workers, the ledger of record. Private to service/.
 *
 * It exists on one daemon of a cluster, beside that daemon's node part (state.h), with which it speaks as with any
 * other node's: coordinator_report takes what a node reports, coordinator_order sends a node its orders. Loop thread. */
#ifndef RS_SERVICE_COORDINATOR_H
#define RS_SERVICE_COORDINATOR_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "base/buf.h"
#include "base/queue.h"
#include "peer/message.h"
#include "refit/refit.h"
#include "service/landed.h"
#include "service/speed.h"
#include "service/state.h"

struct cells;
struct cells_blame;
struct decider;
struct held_store;
struct source_check;

/* A node, beyond what peer_look says. */
struct node {
    bool up;                         /* its data plane serves, with all its workers */
    uint64_t data_plane;             /* which one it is */
    uint16_t data_port;              /* of that data plane */
    uint64_t n_lost;                 /* how often its data plane, or the node, was lost */
    char broken[REFIT_BROKEN_BYTES]; /* why its data plane does not start; "": it does */
    /* Since when it is drained (op_drain), told to every decider, also to one that is opened later; 0: it is in use. As the
     * ledger has it. */
    uint64_t drained_wall_ns;
    /* Newest committed versions that it said it knows when it joined; owned. */
    struct node_commit {
        char *model;
        uint64_t version;
    } * commits;
    uint32_t n_commits;
    struct decider
        *device_user[CONFIG_MAX_DEVICES]; /* whose refit moves bytes there; NULL: nobody's */
};

struct coordinator {
    struct service *service;
    /* To and of the other nodes: peer_order and peer_look, or a test's. */
    int (*send)(struct service *s, uint32_t node, const struct node_order *o);
    void (*look)(const struct service *s, uint32_t node, struct peer_view *ret);
    struct queue deciders; /* struct decider */
    uint32_t n_deciders;
    struct node *nodes; /* by number */
    uint32_t n_nodes;
    char **own_domains; /* nodes.h: of our own devices */
    struct queue asked; /* struct asked (report.c): requests of nodes that wait for a REPLY */
    struct queue
        drains; /* struct drain (drain.c): from its record until every decider has answered */
};

/* A worker of any node, as it was reported. */
struct roster_entry {
    struct queue in; /* decider.roster */
    uint64_t worker;
    uint32_t node, device, rank;
    int32_t pid;
    uint64_t segment_bytes;
    enum refit_side side;
    struct layout_entry *layout;                   /* counted */
    struct publication *published;                 /* counted; NULL: none */
    uint64_t told_held, told_applied, told_blamed; /* last WORKER order */
    /* What receiving memory held as its node saw it last (held.h); fold 0: not known. */
    uint64_t fold_version, fold;
    bool reported; /* in its node's present session */
    bool taken;    /* the decider has known it */
    bool leaving;  /* it has been told to go: its node is drained */
};

/* A communicator of devices on several nodes (comm.h). */
struct run_comm {
    bool has, asked;
    uint64_t key; /* what it depends on */
    uint8_t id[NODE_COMM_ID_BYTES];
    struct comm_member {
        uint64_t plane;  /* names node and data plane */
        uint32_t device; /* local */
    } * members;         /* in the order of comm ranks; owned; NULL: not known */
    uint32_t n_members;
    struct node_comm_shrink shrink; /* of the one that stood before */
};

/* The attempt in flight, as far as it is carried out for all nodes together. */
struct run {
    uint64_t id, version, epoch; /* id 0: none */
    enum refit_kind kind;
    struct attempt_input *input;   /* owned; NULL: not yet */
    struct planning *planning;     /* job; NULL: none */
    struct plan_entry *plan;       /* counted; NULL: not planned */
    struct source_check *checking; /* job; NULL: none */
    uint64_t prepare_deadline_ns;
    uint64_t content;                          /* names what is moved */
    uint8_t config_digest[SPEED_DIGEST_BYTES]; /* with input */
    bool wants_devices;                        /* PREPARE waits for other models' refits */
    bool has_devices;
    bool sources_agree;
    struct run_comm comm;
    struct run_node {
        bool wanted;         /* the decider wants it prepared */
        bool sent;           /* PREPARE went there */
        uint64_t data_plane; /* which PREPARE means */
        bool staged;
        bool doubted; /* what it has told in short is not what is known: it is to tell each cell */
        bool told;    /* what its sources send is merged: it has said so, or has staged */
    } * nodes;        /* as input->nodes; owned */
    uint8_t (*tokens)[NODE_TOKEN_BYTES]; /* of each pair of nodes; owned */
    struct cells *cells;                 /* what nodes have reported; NULL: nothing yet */
    struct cells_blame *blaming;         /* job; NULL: none */
    struct cells_blame *untold;          /* job: whose cells are missing; NULL: none */
    uint64_t *wrong; /* workers whose memory is not believed; owned, room for all participants */
    uint32_t n_wrong;
    bool started;    /* START was put */
    bool distrusted; /* something that has landed is wrong: nothing of it is kept */
    bool differ;     /* nodes saw different content: it has failed, or will have */
    /* Whose memory is not the version by its fold, until that is told; of input. */
    const struct participant *bad_feeder, *bad_receiver;
    bool unsound; /* what a node reported of cells could not be merged: it has failed */
    uint64_t notified_ns;
};

struct decider {
    struct queue in; /* coordinator.deciders */
    struct coordinator *coordinator;
    char *model;
    struct refit *refit;
    struct refit_update update;
    struct queue later; /* struct later: events that wait for the running step's end */
    bool stepping;
    bool announced; /* all nodes know of the model */
    uv_timer_t deadline;
    uv_timer_t retry;    /* after RS_ENOMEM */
    uv_timer_t progress; /* watchers are told of what the run has done since run.notified_ns */
    struct run run;
    struct run_comm comm;    /* that stands on all its nodes since the last commit */
    struct queue roster;     /* struct roster_entry */
    struct queue watchers;   /* struct watcher: of refits */
    struct held_store *held; /* folds of committed versions, for workers that attach again */
    /* The row (held.h) that is written with a commit or catch-up, until that is durable. */
    struct buf folds;
    struct landed_store landed; /* of the last attempt that was called off while bytes moved */
    /* The newest version above the committed one that a worker came with in live memory, and who: for status. */
    uint64_t worker_committed;
    char worker_committed_by[192];
};

/* --- coordinator.c ------------------------------------------------------------------------------ */

int coordinator_new(struct service *s, struct coordinator **ret, struct err *e);
void coordinator_close(struct coordinator *c);
/* RS_EUNAVAIL: it is not here now. Reports of our own node may come back inside the call. */
int coordinator_order(struct coordinator *c, uint32_t node, const struct node_order *o);
const char *coordinator_node_name(const struct coordinator *c, uint32_t node);
/* Everything that a node has to know when its session begins. */
void coordinator_brief(struct coordinator *c, uint32_t node);
/* Tells all nodes what is committed of this model. */
void coordinator_announce(struct decider *d);
/* Keeps what it said is committed. RS_ENOMEM. */
int coordinator_node_joined(struct coordinator *c, uint32_t node, const struct peer_member *m);
/* Its data plane serves / is dead: nothing moves there. */
void coordinator_node_up(struct coordinator *c, uint32_t node, const struct node_report *r);
/* That node is back, and does not have this worker any more: the decider is told, the entry is freed. */
void worker_missing_leave(struct decider *d, struct roster_entry *r);
void coordinator_node_lost(struct coordinator *c, uint32_t node, int code, const char *why);
/* What it takes part in is called off, but may still be moving bytes. */
void coordinator_node_silent(struct coordinator *c, uint32_t node, const char *why);
/* Nothing of it moves any more. expelled: refits need not wait for its workers. */
void coordinator_node_gone(struct coordinator *c, uint32_t node, bool expelled, const char *why);

/* --- drain.c ------------------------------------------------------------------------------------ */

/* Tells a decider that has just heard of this node whether it is drained. */
void drain_tell(struct decider *d, uint32_t node);
/* Ends the leases of workers on drained nodes that the decider has let go. */
void drain_sweep(struct decider *d);
/* A row of the ledger at a start, before any decider hears of the node. */
void drain_restore(struct coordinator *c, const struct ledger_drain *row);
/* Nobody waits any more; for coordinator_close. */
void drains_forget(struct coordinator *c);

/* --- report.c ----------------------------------------------------------------------------------- */

/* What a node reports. A cookie is answered by a REPLY, once, perhaps inside the call. */
void coordinator_report(struct coordinator *c, uint32_t node, const struct node_report *r);
/* Nobody there waits any more. */
void asked_forget(struct coordinator *c, uint32_t node);
/* Tells the decider of a layout; the decider answers the cookie. RS_ENOMEM: it will not. */
int layout_event(struct decider *d, enum refit_side side, const struct layout *layout, bool member,
                 uint64_t cookie);

/* --- decider.c ---------------------------------------------------------------------------------- */

struct decider *decider_find(struct coordinator *c, const char *model);
/* RS_EEXHAUSTED: max_models. */
int decider_open(struct coordinator *c, const char *model, struct decider **ret, struct err *e);
/* Gives the decider an event (stamped with the clocks) and carries out what it says, and what follows from that. An
 * event from inside an action waits for its turn. RS_ENOMEM: nothing happened; an event without a cookie is kept and
 * given again. */
int decider_event(struct decider *d, struct refit_event *ev);
/* Closes handles and frees it when they are closed. */
void decider_close(struct decider *d);

/* --- run.c: PLAN, PREPARE, START, ABORT, EXPEL of the decider, carried out ------------------------- */

void run_plan(struct decider *d, const struct refit_action *a);
void run_prepare(struct decider *d, const struct refit_action *a);
void run_start(struct decider *d, const struct refit_action *a);
void run_abort(struct decider *d, const struct refit_action *a);
void run_expel(struct decider *d, const struct refit_action *a);
/* Tells the decider that the attempt has failed; with RS_EDATALOSS, also of run.wrong. The run may be over afterwards. */
void run_fail(struct decider *d, uint32_t node, int code, const char *text, uint64_t worker);
/* What is nobody's fault there is told as the first node's: the attempt fails as a whole. */
void run_fail_here(struct decider *d, int code, const char *text);
/* NULL: it takes no part. */
struct run_node *run_node_of(const struct decider *d, uint32_t node);

/* --- run_verify.c: what has landed, compared over all nodes ---------------------------------------- */

/* Something that has landed is wrong: a retry moves all of what is not known to be whole. */
void run_distrust(struct decider *d);
/* The attempt is called off, whatever for: what is known to be wrong and not told yet is told. */
void run_called_off(struct decider *d);
/* What a node saw of cells that others hold too. */
void run_cells(struct decider *d, uint32_t node, const struct node_report *r);
/* What it has received, in short. */
void run_cell_sum(struct decider *d, uint32_t node, const struct node_report *r);
/* The id of the communicator that PREPARE waits for. */
void run_comm_id(struct decider *d, uint32_t node, const struct node_report *r);
/* A PROGRESS: where it says that its sources' cells are told, they are merged. The decider (ev) does not hear that where
 * something is known to be wrong: nothing would be proven by it. */
void run_sources_known(struct decider *d, uint32_t node, struct refit_event *ev);
/* A node has staged: false where what has landed there is not believed, or not yet, and the decider is not told. */
bool run_staged(struct decider *d, uint32_t node, const struct node_report *r);
/* What a FAILED says about what has landed: ev, which the decider is given next, names whose memory is not believed. */
void run_failed(struct decider *d, struct refit_event *ev);

/* --- run.c, again ---------------------------------------------------------------------------------- */

/* What a QUIESCED says about what has landed. */
void run_quiesced(struct decider *d, uint32_t node, const struct node_report *r);
/* A PROGRESS was taken: watchers hear of it now and then. */
void run_progress(struct decider *d);
/* No byte of it moves on that node any more. */
void run_node_quiet(struct decider *d, uint32_t node);
/* The node takes part in the attempt in flight. */
bool run_has_node(const struct decider *d, uint32_t node);
/* It is over: nodes are told, all is let go. */
void run_end(struct decider *d, bool committed);
/* Deciders that wait for devices take them, in order. */
void run_devices_free(struct coordinator *c);

/* --- run_input.c --------------------------------------------------------------------------------- */

/* From who takes part by the decider. RS_EPRECOND: nobody does; RS_EINVAL, RS_ENOMEM. */
int attempt_input_make(struct decider *d, const struct refit_version *v, struct attempt_input **ret,
                       struct err *e);

/* --- roster.c ----------------------------------------------------------------------------------- */

struct roster_entry *roster_find(const struct decider *d, uint64_t worker);
/* NULL: no memory. */
struct roster_entry *roster_add(struct decider *d, uint64_t worker);
void roster_remove(struct roster_entry *r);
/* What the worker does in the attempt in flight. */
enum refit_role roster_role(const struct decider *d, const struct roster_entry *r);
/* Workers of a node have staged the attempt in flight: what its memory is from now on. */
void roster_staged(struct decider *d, uint32_t node, const struct memory_fold *folds, uint32_t n);
/* WORKER orders for those whose memory holds something else by now. */
void roster_tell(struct decider *d);

/* --- watch.c ------------------------------------------------------------------------------------ */

void watch_refit(struct decider *d, uint64_t version);
/* All watchers of a model end with RS_EUNAVAIL. */
void watchers_close(struct decider *d);

#endif
