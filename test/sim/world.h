/* A seeded world around the real decider and the real member: daemons on several nodes with their data
 * planes, links that are slow, cut and lossy, leases, a trainer, inference workers, an operator, a
 * ledger that takes its time, a coordinator that can die at any event. Plans are the real planner's,
 * and every element moves in a model of the workers' memory.
 *
 * One thread, no clock of its own but world.now_ns. Everything that may differ between two runs
 * comes from world.random, so a seed replays exactly.
 *
 *   world.c    clock, messages, the coordinator with its ledger, how a world is made
 *   node.c     a daemon on a node: its member, session, lease and data plane
 *   worker.c   trainer's and inference workers
 *   actors.c   what the trainer and the operator do, and what goes wrong
 *   trial.c    an attempt's plan, and memory by the element
 *   wrong.c    wrong bytes, and who is not believed then
 *   check.c    the invariants */
#ifndef RS_TEST_SIM_WORLD_H
#define RS_TEST_SIM_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "layout/layout.h"
#include "ledger/ledger.h"
#include "refit/member.h"
#include "refit/refit.h"
#include "topology/topology.h"

enum {
    MAX_NODES = 4,
    MAX_WORKERS = 20,
    MAX_LAYOUTS = 3, /* the source, then destinations */
    MAX_VERSIONS = 256,
    MAX_CONTENTS = 8,
    MAX_REQUESTS = 8192,
    MAX_MESSAGES = 8192,
    MAX_RANKS = 6,
    MAX_ELEMENTS = 64, /* of all tensors together: one bit each */
    MAX_MOVES = 512,
    MAX_TRIALS = 32 /* newest attempts */
};

/* Times of this world. */
enum { MS = 1000 * 1000, BEAT_MS = 50, LEASE_MS = 250, SLACK_MS = 100, SILENT_MS = 150 };
#define S UINT64_C(1000000000)

enum message_type {
    TO_COORDINATOR, /* `ev` of somebody who is on no node: the trainer's program, the operator */
    REPORT,         /* `ev` of a node or of a worker there, by a session */
    TOLD,           /* the last of what a node tells when it has joined */
    ORDER,          /* `action` for a node or a worker there, by a session */
    JOIN,
    WELCOME,
    BEAT,
    BEAT_ANSWER,
    SEVERED, /* the member sees that its stream has ended */
    TO_WORKER,
    LEDGER_WRITES, /* the oldest waiting transaction becomes durable, or fails */
    NODE_WORKS,    /* something in a node comes to its end */
    NODE_BEATS,
    NODE_SEEKS,
    NODE_TICKS, /* the member's deadline */
    LEASE_LOOK,
    NODE_DIES, /* the daemon and its data plane */
    NODE_RETURNS,
    DATA_PLANE_DIES,
    DATA_PLANE_RETURNS,
    WORKER_ATTACHES,
    WORKER_DIES,
    WORKER_SLEEPS,
    WORKER_PUBLISHES,
    TRAINER_ACTS,
    OPERATOR_ACTS,
    COORDINATOR_RETURNS,
    COORDINATOR_LOOKS, /* whose beat is late */
    TICK
};

enum work { WORK_PLANNED, WORK_PREPARED, WORK_TELLS, WORK_MOVES, WORK_QUIET, WORK_APPLIED };

struct message {
    uint64_t at_ns;
    uint64_t number; /* ties go by it */
    enum message_type type;
    uint64_t life; /* of the sender or receiver: a message of an earlier life is dropped */
    uint64_t coordinator_life;
    uint64_t session;
    uint64_t sent_ns; /* BEAT */
    struct refit_event ev;
    struct refit_action action;
    bool ends;        /* ORDER: the attempt is over */
    uint32_t who;     /* node or worker */
    uint32_t step;    /* NODE_WORKS: enum work; SUBMIT: content */
    uint64_t request; /* SUBMIT: of which request id */
};

/* What memory really holds. */
struct memory {
    uint64_t version; /* of what has been got; 0: nothing that anybody knows of */
    uint64_t content; /* the decider's number for it; 0: not known */
    uint64_t got;     /* a bit per element that is there */
    uint32_t element[MAX_ELEMENTS];
    bool vouched;      /* its node has staged what it is */
    uint64_t wrong_of; /* newest attempt that has brought wrong bytes; 0: none */
};

/* One transfer of a plan. */
struct move {
    uint32_t from, to; /* workers */
    enum refit_feed feeding;
    uint64_t elements; /* a bit each */
    uint32_t after[8], n_after;
    bool landed;
};

/* An attempt as those who carry it out see it. */
struct trial {
    uint64_t attempt, version, content;
    enum refit_kind kind;
    uint8_t digest[16];
    struct move moves[MAX_MOVES];
    uint32_t n_moves;
    uint64_t worker[MAX_WORKERS]; /* ids when it was planned */
    enum refit_role role[MAX_WORKERS];
    bool held[MAX_WORKERS];
    bool opened[MAX_WORKERS];
    bool disagree; /* sources that are replicas have published different content */
    uint32_t expected[MAX_ELEMENTS];
    uint32_t harm; /* worker that sends wrong bytes; MAX_WORKERS: none does */
    uint64_t
        wrong[MAX_WORKERS]; /* elements that are wrong, as its node saw it when it had staged */
    uint32_t sent
        [MAX_ELEMENTS]; /* by the fingerprints of those who send: what the rest is compared with */
    bool told[MAX_NODES];   /* the coordinator has these fingerprints of the node's senders */
    bool staged[MAX_NODES]; /* the coordinator has heard so */
    uint64_t told_life; /* of the coordinator whose decider has been told of wrong bytes; 0: none */
};

struct node {
    bool alive;    /* the daemon */
    bool data_up;  /* its data plane */
    uint64_t life; /* of the daemon: its incarnation */
    uint64_t data_life;
    struct member member;
    struct member_update update;
    uint64_t session; /* 0: none */
    uint64_t joining; /* number of the newest JOIN */
    uint64_t lease_until_ns;
    uint64_t committed; /* newest that it was told of */
    /* the data plane's run */
    uint64_t attempt; /* 0: nothing that moves or may move */
    bool started, read, told, hangs, mute;
    uint32_t idle; /* looks in a row at which nothing could move */
    /* the link */
    uint64_t cut_until_ns, last_in_ns, last_out_ns;
    /* the coordinator's view */
    enum { AWAY, HERE, SILENT } view;
    uint64_t view_session, view_life, heard_ns;
    uint64_t expelled; /* attempt for which EXPEL was ordered */
};

struct worker {
    uint32_t node, layout, rank;
    int32_t device;
    enum refit_receive receive;
    bool automatic;
    bool attached;
    bool asleep;  /* attached, without memory; it wakes by attaching anew */
    bool known;   /* to the coordinator, since this attach */
    bool behaves; /* false: sometimes does not answer */
    uint64_t id;  /* of this attach */
    uint64_t life;
    uint64_t last_in_ns;   /* its event stream is in order */
    uint64_t told_session; /* by which its node has told of it */
    struct memory live, shadow;
    uint64_t salt;             /* sources: of what they hold now; 0: scribbled over */
    uint64_t published;        /* sources: what they hold */
    uint64_t push_version;     /* sources: what they have pushed last */
    uint32_t push;             /* how often */
    uint64_t accepted_attempt; /* destinations: has said yes to it */
    uint64_t accepted_id;      /* as which */
    bool publishing;           /* its Publish is on its way */
    uint64_t
        awaits; /* has published it (source), said Ready or Accept (destination); no end heard */
};

struct layout_truth {
    enum refit_side side;
    char name[16];
    struct layout *layout;
    uint32_t n_ranks, n_instances;
    uint32_t instance_of_rank[MAX_RANKS];
    uint64_t owned[MAX_RANKS]; /* a bit per element */
    uint32_t min_instances;    /* policy; n_instances: not named */
    bool named;
    bool known;    /* a worker of it has attached */
    bool required; /* when the attempt in flight was planned */
};

enum request_kind { ASK_SUBMIT, ASK_ABORT, ASK_APPLY, ASK_ATTACH, ASK_DRAIN, ASK_OTHER };

struct request {
    enum request_kind kind;
    bool open;
    uint64_t version;
    uint8_t content;
    uint64_t worker; /* ASK_APPLY; ASK_ATTACH; ASK_DRAIN: node */
    uint64_t coordinator_life;
};

/* What the world knows of one version, by what it saw, not by what the decider says. */
struct version_truth {
    uint64_t version;
    bool content_known; /* a Submit of it was answered well */
    uint8_t content;
    bool committed;
    uint8_t committed_content;
    uint32_t n_accepted; /* instances, by the ledger when that was told; 0: it was not */
    uint32_t expected[MAX_ELEMENTS]; /* committed */
    uint64_t flavour;                /* of the weights that the trainer has for it */
    struct {
        uint64_t number;
        uint32_t expected[MAX_ELEMENTS];
    } contents[MAX_CONTENTS]; /* that attempts have moved, by the decider's number */
    uint32_t n_contents;
};

struct world {
    uint64_t seed, random;
    uint64_t now_ns, wall_ns;
    uint64_t step;     /* events given to the decider */
    uint64_t crash_at; /* step at which the coordinator dies; 0: by chance */
    bool trace;
    bool calm;      /* no more faults: what is asked now must succeed */
    double trouble; /* scales every fault's probability */
    bool feed, catch_up;

    struct refit *refit; /* NULL: the coordinator is down */
    struct refit_update update;
    struct ledger *ledger;
    struct ledger_store *store;
    uint64_t coordinator_life;
    uint64_t deadline_ns;
    uint64_t tick_number; /* the TICK that counts */

    struct layout_truth layouts[MAX_LAYOUTS];
    uint32_t n_layouts, n_elements;
    uint64_t base[8]; /* first element of each tensor of the source layout */
    struct topology topology;
    struct node nodes[MAX_NODES]; /* 0: the coordinator's */
    uint32_t n_nodes;
    uint64_t n_sessions;
    struct worker workers[MAX_WORKERS];
    uint32_t n_workers;
    enum refit_release_at release_at;
    struct trial trials[MAX_TRIALS];

    struct message *messages; /* a heap of those to come */
    uint32_t n_messages;
    uint64_t n_sent;

    struct request requests[MAX_REQUESTS];
    uint32_t n_requests;
    struct version_truth versions[MAX_VERSIONS];
    uint32_t n_versions;
    uint64_t newest_asked, last_request;
    uint64_t rehearsing; /* number that a rehearsal borrows; 0: none */
    uint64_t last_planned_attempt;
    uint64_t told_committed;
    uint32_t n_trainer_acts, max_trainer_acts;

    /* Figures of a run. */
    uint64_t n_commits, n_aborts, n_crashes, n_answers, n_expels, n_no_memory, n_moved, n_reused,
        n_fed, n_caught_up, n_rehearsed, n_silent, n_drained, n_harmed, n_wrong, n_withdrawn;
};

/* world.c */
void world_init(struct world *w, uint64_t seed);
void world_close(struct world *w);
/* Trouble for a while, then calm; ends when the calm must have settled everything. check.c looks
 * after each step and after it. */
void world_run(struct world *w);
uint64_t world_random(struct world *w, uint64_t n); /* 0 … n-1 */
bool world_chance(struct world *w, double p);
bool world_fault(struct world *w, double p); /* none in the calm */
uint64_t world_soon(struct world *w, uint64_t max_ms);
void world_say(const struct world *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
struct version_truth *world_version(struct world *w, uint64_t version);
struct worker *world_worker(struct world *w, uint64_t id);
/* Which worker it is, by its rank: the decider may not have heard yet that it is gone or another. */
uint32_t world_index(struct world *w, const struct refit_worker *r);
struct message *world_send(struct world *w, enum message_type type, uint64_t at_ns);
uint64_t world_ask(struct world *w, enum request_kind kind, uint64_t version, uint8_t content);
/* Gives one event to the decider and does what it says. The coordinator may be dead afterwards. */
void world_step(struct world *w, struct refit_event *ev);
/* An event of nobody's node, `ms` from now at most. A request's cookie opens when it arrives. */
struct refit_event *world_tell(struct world *w, enum refit_event_type type, uint64_t ms);
/* What arrives with cookie UINT64_MAX gets one here. */
void world_arrive(struct world *w, struct message *m);
void world_crash(struct world *w);

/* node.c */
void node_start(struct world *w, uint32_t node, bool with_coordinator);
void node_dies(struct world *w, uint32_t node);
void node_data_plane_dies(struct world *w, uint32_t node);
/* At the node's end of its session. */
void node_severed(struct world *w, uint32_t node, enum member_event_type why);
/* By its session, if there is one; `ev` is copied. */
void node_report(struct world *w, uint32_t node, const struct refit_event *ev);
/* From the coordinator to a node by its session. */
void node_order(struct world *w, uint32_t node, const struct refit_action *a, bool ends);
void node_seeks_soon(struct world *w, uint32_t node);
bool node_handles(struct world *w, struct message *m); /* false: not a message of nodes */
/* The data plane may move bytes now. */
bool node_may_move(const struct world *w, const struct node *n);
/* The coordinator's end of the links. */
void links_forget(struct world *w); /* it has died */
void link_silent(struct world *w, uint32_t node, const char *why);

/* worker.c */
void worker_attaches(struct world *w, uint32_t index);
void worker_tells(struct world *w, uint32_t index, bool again); /* ATTACHED by its node */
void worker_dies(struct world *w, uint32_t index);
void worker_sleeps(struct world *w, uint32_t index);
void worker_detached(struct world *w, uint32_t index);
void worker_publishes(struct world *w, struct worker *worker, uint64_t version);
void worker_receives(struct world *w, const struct message *m);
void worker_apply(struct world *w, const struct worker *worker, uint64_t version);

/* actors.c */
void trainer_acts(struct world *w);
void trainer_submits_new(struct world *w);
void operator_acts(struct world *w);

/* trial.c */
void trial_layouts(struct world *w); /* layouts and topology, from what world.c has chosen */
void trial_layouts_close(struct world *w);
/* PLAN: the decider's choice as a plan. RS_EPRECOND: the feeding layout lacks something. */
int trial_plan(struct world *w, const struct refit_action *a, struct trial **ret);
struct trial *trial_find(struct world *w, uint64_t attempt);
/* START on a node: its receivers' memory is opened. */
void trial_open(struct world *w, struct trial *t, uint32_t node);
/* Moves what can move to this node's workers, a part of it; true: something has. */
bool trial_move(struct world *w, struct trial *t, uint32_t node);
/* All that comes to this node is here, and all that it sends is there. */
bool trial_done(const struct world *w, const struct trial *t, uint32_t node);
/* All that this node's sources send is there. */
bool trial_read(const struct world *w, const struct trial *t, uint32_t node);
uint32_t world_value(uint64_t salt, uint32_t element);
void worker_scribble(struct world *w, struct worker *worker, uint64_t salt);
struct memory *worker_receiving(struct worker *worker);
uint64_t worker_owned(const struct world *w, const struct worker *worker);
bool memory_whole(const struct world *w, const struct worker *worker, const struct memory *m);
/* Whole, and element by element what was committed as this version. */
bool memory_is_committed(struct world *w, const struct worker *worker, const struct memory *m);

/* wrong.c */
void wrong_plan(struct world *w, struct trial *t);
/* An element has been written. */
void wrong_land(struct trial *t, const struct move *m, uint32_t element, struct memory *at);
/* The memory has got wrong bytes, and the decider knows it. */
bool wrong_told(struct world *w, const struct memory *m);
/* A worker whose bytes a node sees to be wrong by its own sources; 0: none. */
uint64_t wrong_seen(struct world *w, const struct trial *t, uint32_t node);
/* What this node's fingerprints are when it has staged. */
void wrong_note(struct world *w, struct trial *t, uint32_t node);
/* A PROGRESS comes to the coordinator: the decider does not hear that senders are known where that shows something wrong. */
void wrong_known(struct world *w, struct refit_event *ev);
/* STAGED and FAILED come to the coordinator: false where the decider has been told something else. */
bool wrong_staged(struct world *w, const struct refit_event *ev);
/* An ATTACHED on its way to the decider, as report.c's uncommitted_check makes it. */
void wrong_attached(struct world *w, struct refit_event *ev);
bool wrong_failed(struct world *w, const struct refit_event *ev);
void check_wrong(struct world *w);

/* check.c: each ends the run with the seed, the step and what is wrong. */
void check_step(struct world *w);
void check_action(struct world *w, const struct refit_action *a);
void check_restored(struct world *w);
void check_end(struct world *w);
void check_lost(struct world *w, uint32_t node);
__attribute__((noreturn, format(printf, 2, 3))) void world_fail(struct world *w, const char *format,
                                                                ...);

#endif
