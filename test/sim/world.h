/* A seeded world around the real decider: a trainer, inference workers, nodes with data planes, an
 * operator, a ledger that takes its time, a coordinator that can die at any event.
 *
 * One thread, no clock of its own but world.now_ns. Everything that may differ between two runs
 * comes from world.random, so a seed replays exactly. */
#ifndef RS_TEST_SIM_WORLD_H
#define RS_TEST_SIM_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "ledger/ledger.h"
#include "refit/refit.h"

enum {
    MAX_NODES = 3,
    MAX_WORKERS = 20,
    MAX_LAYOUTS = 3, /* the source, then destinations */
    MAX_VERSIONS = 256,
    MAX_REQUESTS = 4096,
    MAX_MESSAGES = 8192,
    MAX_RANKS = 6
};

enum message_type {
    TO_COORDINATOR, /* `ev` for refit_step */
    TO_NODE,        /* PREPARE, START, ABORT */
    TO_WORKER,      /* a TELL */
    LEDGER_WRITES,  /* the oldest waiting transaction becomes durable, or fails */
    NODE_STEP,      /* a node's own work comes to its end */
    NODE_RETURNS,
    WORKER_ATTACHES,
    WORKER_DIES,
    NODE_DIES,
    TRAINER_ACTS,
    OPERATOR_ACTS,
    COORDINATOR_RETURNS,
    TICK
};

struct message {
    uint64_t at_ns;
    uint64_t number; /* ties go by it */
    enum message_type type;
    uint64_t life; /* of the sender or receiver: a message of an earlier life is dropped */
    uint64_t coordinator_life;
    struct refit_event ev;
    struct refit_action action;
    uint32_t who;     /* node or worker */
    uint32_t step;    /* NODE_STEP */
    uint64_t request; /* TO_COORDINATOR: index in requests + 1; 0: none */
};

/* What memory really holds. */
struct memory {
    uint64_t version;
    uint64_t content; /* sum over the sources' salts */
    bool whole;
};

struct node {
    bool up;
    uint64_t life, known_life; /* known: to the coordinator */
    uint64_t attempt; /* has been asked to prepare it and has neither quiesced nor finished */
    uint64_t version;
    uint64_t content; /* of the sources when it prepared */
    bool started, read;
    bool mute;                        /* does not answer ABORT */
    uint64_t last_in_ns, last_out_ns; /* links are first in, first out */
    bool part[MAX_WORKERS];           /* workers here that the attempt writes or reads */
    bool skip[MAX_WORKERS];           /* of them: their memory holds it already */
};

struct worker {
    uint32_t node, layout, rank;
    enum refit_receive receive;
    bool automatic;
    bool attached;
    bool behaves; /* false: sometimes does not answer */
    uint64_t id;  /* of this attach */
    uint64_t life;
    struct memory live, shadow;
    uint64_t salt;             /* sources: of what they hold now */
    uint64_t published;        /* sources: what they hold */
    uint64_t accepted_attempt; /* destinations: has said yes to it */
    bool left_for_good;
    bool publishing; /* its Publish is on its way */
    uint64_t
        awaits; /* has published it (source), said Ready or Accept (destination); no end heard */
};

struct layout_truth {
    enum refit_side side;
    char name[16];
    uint32_t n_ranks, n_instances;
    uint32_t instance_of_rank[MAX_RANKS];
    uint32_t min_instances; /* policy; n_instances: not named */
    bool named;
    bool known;    /* a worker of it has attached */
    bool required; /* when the attempt in flight was planned */
};

enum request_kind { ASK_SUBMIT, ASK_ABORT, ASK_APPLY, ASK_OTHER };

struct request {
    enum request_kind kind;
    bool open;
    uint64_t version;
    uint8_t content;
    uint64_t worker; /* ASK_APPLY */
    uint64_t coordinator_life;
};

/* What the world knows of one version, by what it saw, not by what the decider says. */
struct version_truth {
    uint64_t version;
    bool content_known; /* a Submit of it was answered well */
    uint8_t content;
    bool committed;
    uint8_t committed_content;
};

struct world {
    uint64_t seed, random;
    uint64_t now_ns, wall_ns;
    uint64_t step;     /* events given to the decider */
    uint64_t crash_at; /* step at which the coordinator dies; 0: by chance */
    bool trace;
    bool calm;      /* no more faults: what is asked now must succeed */
    double trouble; /* scales every fault's probability */

    struct refit *refit; /* NULL: the coordinator is down */
    struct refit_update update;
    struct ledger *ledger;
    struct ledger_store *store;
    uint64_t coordinator_life;
    uint64_t deadline_ns;
    uint64_t tick_number; /* the TICK that counts */

    struct layout_truth layouts[MAX_LAYOUTS];
    uint32_t n_layouts;
    struct node nodes[MAX_NODES];
    uint32_t n_nodes;
    struct worker workers[MAX_WORKERS];
    uint32_t n_workers;
    enum refit_release_at release_at;

    struct message *messages; /* a heap would be faster; there are few */
    uint32_t n_messages;
    uint64_t n_sent;

    struct request requests[MAX_REQUESTS];
    uint32_t n_requests;
    struct version_truth versions[MAX_VERSIONS];
    uint32_t n_versions;
    uint64_t newest_asked, last_request;
    uint64_t last_planned_attempt;
    uint64_t told_committed;
    uint32_t n_trainer_acts, max_trainer_acts;

    /* Figures of a run. */
    uint64_t n_commits, n_aborts, n_crashes, n_answers, n_expels, n_again, n_no_memory;
};

/* world.c */
void world_init(struct world *w, uint64_t seed);
void world_close(struct world *w);
/* Runs to the end of the trouble, then to a committed version in the calm after it. */
void world_run(struct world *w);
uint64_t world_random(struct world *w, uint64_t n); /* 0 … n-1 */
bool world_chance(struct world *w, double p);
struct version_truth *world_version(struct world *w, uint64_t version);
struct worker *world_worker(struct world *w, uint64_t id);

/* check.c: each ends the run with the seed, the step and what is wrong. */
void check_step(struct world *w);
void check_action(struct world *w, const struct refit_action *a);
void check_restored(struct world *w);
void check_end(struct world *w);
__attribute__((noreturn, format(printf, 2, 3))) void world_fail(struct world *w, const char *format,
                                                                ...);

#endif
