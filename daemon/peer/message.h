/* What a node says to the coordinator, and the coordinator to a node.
 *
 *     node part  ── struct node_report ──▶  coordinator part    the decider's events, with what goes with them
 *     node part  ◀── struct node_order ──  coordinator part    the decider's actions aimed at a node or a worker there
 *
 * The same structs are handed over by a function call on the coordinator's own node and by a Peer stream elsewhere
 * (peer.h); in both cases in order, each at most once, and none of an earlier session (peer.h) comes after one of a later
 * session. What they point to is borrowed for the call. All times in here are of the receiver's monotonic clock: the
 * stream carries ages and remainders and converts.
 *
 * Numbers: `node` is the index in the config's list of nodes, stable; `device` a local device number of its node. Plans
 * number devices by attempt_input.topology instead. */
#ifndef RS_PEER_MESSAGE_H
#define RS_PEER_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "plan/plan.h"
#include "refit/refit.h"
#include "topology/topology.h"

enum {
    NODE_MAX = 1024,         /* nodes of one cluster */
    NODE_NAME_BYTES = 64,    /* with its NUL */
    NODE_ADDRESS_BYTES = 64, /* numeric address, with its NUL */
    NODE_TOKEN_BYTES = 16,
    NODE_COMM_ID_BYTES = 128, /* what names a communicator of NCCL */
    NODE_MAX_EXCLUDED = 64,   /* ranks that leave one at once, where the rest is kept */
    NODE_PAGE_CELLS = 32768   /* struct cell_print, or struct cell_run, in one report */
};

/* A worker that takes part in an attempt. */
struct participant {
    uint64_t worker;
    uint32_t node, device;
    uint32_t layout; /* 0: the source layout; 1 + i: destinations[i] */
    uint32_t rank;
    bool held; /* destination: its receiving memory already holds the content, verified */
    bool
        shadow; /* source: a destination worker that feeds, and what is read is its shadow memory, not live */
};

/* All that a plan depends on: the same on every node, so each plans by itself and gets the same plan. */
struct attempt_input {
    struct topology *topology; /* the nodes that take part, in ascending number */
    const uint32_t *nodes;     /* [topology->n_nodes]: their numbers */
    uint8_t source[16];        /* layout digests */
    const uint8_t (*destinations)[16];
    uint32_t n_destinations;
    const struct participant *participants;
    uint32_t n_participants;
    struct plan_options options;
    uint32_t verify; /* enum wire_verify */
};

/* The parts of an input, in the order in which they are compared where plans differ. */
enum attempt_part {
    ATTEMPT_PART_SOURCE,
    ATTEMPT_PART_DESTINATIONS,
    ATTEMPT_PART_TOPOLOGY,
    ATTEMPT_PART_PARTICIPANTS,
    ATTEMPT_PART_OPTIONS,
    ATTEMPT_PARTS
};

/* Where another node's data plane is, and the secret of this pair of nodes for this attempt. */
struct attempt_peer {
    uint32_t node;
    char address[NODE_ADDRESS_BYTES];
    uint16_t port; /* 0: its data plane listens nowhere (transport nccl) */
    uint8_t token[NODE_TOKEN_BYTES];
};

/* What had landed on a node when an attempt was called off: a bit per hold of its program, lowest first. A retry of that
 * content by that plan leaves it out at both ends, and verifies it. */
struct attempt_landed {
    uint32_t node;
    uint64_t attempt; /* that was called off */
    const uint8_t *holds;
    uint32_t n_bytes;
};

enum node_order_type {
    NODE_ORDER_PREPARE =
        1, /* plan, compare digests, prepare the data plane; answered PREPARED or FAILED */
    NODE_ORDER_START, /* answered CELLS*, PROGRESS* and CELL_SUM*, then STAGED or FAILED */
    NODE_ORDER_ABORT, /* answered QUIESCED */
    NODE_ORDER_END, /* the attempt is over: committed (code 0) or aborted; its plan and memory are let go */
    NODE_ORDER_EXPEL, /* its data plane has not quiesced in time: end it; answered NODE_LOST, then NODE_UP */
    NODE_ORDER_APPLY,     /* shadow to live; answered APPLIED */
    NODE_ORDER_TELL,      /* for a worker's event stream */
    NODE_ORDER_REPLY,     /* to the report with that cookie */
    NODE_ORDER_COMMITTED, /* the newest committed version of a model: for polls and watchers */
    NODE_ORDER_WORKER,    /* what a worker's memory holds, by the decider */
    NODE_ORDER_EVICT,     /* ends a worker's lease; text says why */
    /* GPUs of several nodes are to have a communicator, and this node has its comm rank 0: its data plane
     * (`data_plane`) makes an id for it; answered COMM_ID or FAILED of `attempt` */
    NODE_ORDER_COMM_ID,
    /* What it told in CELL_SUMs is wanted cell by cell: answered CELLS*, then STAGED again */
    NODE_ORDER_CELLS
};

/* Where members have left between refits: the communicator `parent`, which stands on all nodes that take part, is to
 * be shrunk by those of its ranks; the new id is for where that fails. */
struct node_comm_shrink {
    uint32_t n_excluded; /* 0: nothing is shrunk */
    uint32_t excluded[NODE_MAX_EXCLUDED];
    uint8_t parent[NODE_COMM_ID_BYTES];
};

struct node_order {
    enum node_order_type type;
    const char *model;
    uint64_t version, attempt, epoch; /* epoch: PREPARE */
    uint64_t worker;                  /* APPLY, TELL, WORKER, EVICT */
    uint64_t cookie;                  /* REPLY */
    uint64_t value;                   /* REPLY */
    uint64_t wall_ns;                 /* COMMITTED: when, by the wall clock */
    uint64_t
        content; /* PREPARE, COMMITTED: names what is moved (refit_action.content); 0: not known */
    uint64_t data_plane; /* PREPARE: the node's that is meant (refit_action.data_plane); 0: any */
    uint64_t held, applied; /* WORKER; `version`: of which it has got wrong bytes; 0: none */
    enum refit_phase phase; /* REPLY */
    enum refit_tell tell;   /* TELL */
    int code;               /* REPLY, END */
    const char *text;       /* "" where there is none */
    /* PREPARE: */
    uint64_t deadline_ns;
    uint32_t transfer_timeout_ms;
    const struct attempt_input *input;
    uint8_t plan_digest[16];               /* as the coordinator planned it */
    uint64_t input_digests[ATTEMPT_PARTS]; /* of the parts of `input` as the coordinator has them */
    const struct attempt_peer *peers;      /* the other nodes that take part */
    uint32_t n_peers;
    /* transport nccl, several nodes: the communicator that the attempt uses, of the participants' devices in the
     * topology's order. One that stands is used again where it has this id, else one is made with it, by each node. */
    bool has_comm_id;
    uint8_t comm_id[NODE_COMM_ID_BYTES];
    struct node_comm_shrink shrink;
    const struct attempt_landed *landed; /* of the nodes that take part */
    uint32_t n_landed;
};

enum node_report_type {
    /* `event`, of these types: ATTACHED LEFT SLEPT PUBLISHED WITHDRAW READY VERDICT APPLY APPLIED MARK PREPARED PROGRESS STAGED FAILED
     * QUIESCED NODE_UP NODE_LOST (code RS_EDEVICE: its data plane does not start, text says why; until NODE_UP). now_ns
     * and wall_ns are the coordinator's to fill in; event.cookie is the node's own and
     * comes back in the REPLY; event.node.node is filled in by the coordinator. */
    NODE_REPORT_EVENT = 1,
    /* A source worker asks whether it may publish a version: REPLY with code 0 and value 1 (published already, it
     * holds) or 0 (fingerprint it, then report PUBLISHED), or with the reason why not. */
    NODE_REPORT_PUBLISH_ASK,
    /* Fingerprints of cells that other nodes hold too: what its sources send, soon after START and before a PROGRESS says
     * sources_known; before STAGED what has not been told, unless by CELL_SUM. */
    NODE_REPORT_CELLS,
    NODE_REPORT_COMM_ID, /* what NODE_ORDER_COMM_ID asked for, never used before */
    /* In short, before STAGED: cells that the node has received, and one digest of their fingerprints (service/cells.h).
     * Where sources have told of other content, or not of all of them, NODE_ORDER_CELLS follows STAGED. */
    NODE_REPORT_CELL_SUM
};

/* A cell as one node saw it. All of the node's own holders of that side agree on it (else it has FAILED). */
struct cell_print {
    uint64_t cell; /* the plan's number */
    uint64_t fingerprint;
    uint32_t layout; /* as in participant: 0 is the source, who is believed */
    uint32_t rank;   /* of one holder, for the blame */
};

/* The cells [cell, cell + n). */
struct cell_run {
    uint64_t cell;
    uint32_t n;
};

/* What a source worker has published; sparse: tensors of which it holds nothing are left out. */
struct publication_print {
    uint32_t tensor; /* index in the source layout */
    uint64_t fingerprint;
};

/* What receiving memory holds, as one number per worker (service/held.h): kept with the committed version, and compared
 * when a worker attaches again. */
struct memory_fold {
    uint8_t layout[16];
    uint32_t rank;
    uint64_t fold;
};

struct node_report {
    enum node_report_type type;
    const char *model;        /* "": NODE_UP and NODE_LOST, which are about all of them */
    struct refit_event event; /* EVENT */
    uint64_t cookie;          /* PUBLISH_ASK */
    uint64_t worker, version; /* PUBLISH_ASK */
    uint64_t attempt;         /* CELLS, CELL_SUM, COMM_ID */
    /* EVENT ATTACHED: the rest of what the roster wants to know, and folds of what its memory claims to hold (0 where it
     * claims nothing): event.attached.live and .shadow are the claims, the coordinator compares. */
    uint8_t layout[16];
    uint32_t device;
    int32_t pid;
    uint64_t segment_bytes;
    uint64_t live_fold, shadow_fold;
    uint64_t
        opened; /* by its client's account live memory was being written with this version; 0: it was not */
    /* EVENT PUBLISHED */
    const struct publication_print *prints;
    uint32_t n_prints;
    bool has_prints;                          /* false: verification is off on this node */
    const struct publication_print *expected; /* of whole tensors, by the client's own way */
    uint32_t n_expected;
    /* EVENT STAGED, verification full */
    const struct memory_fold *folds;
    uint32_t n_folds;
    /* EVENT QUIESCED: as in attempt_landed.holds; NULL: nothing that a retry could leave out */
    const uint8_t *landed;
    uint32_t n_landed_bytes;
    /* EVENT NODE_UP: said when the data plane serves and, in this session, every live worker has been reported
     * (ATTACHED): workers of the node that were not are gone. */
    uint16_t data_port;
    /* EVENT FAILED of a PREPARE whose plan differs: both digests and the first differing input are in its text */
    /* CELLS */
    const struct cell_print *cells;
    uint32_t n_cells;
    /* CELL_SUM */
    const struct cell_run *runs;
    uint32_t n_runs;
    uint8_t digest[16];
    uint8_t comm_id[NODE_COMM_ID_BYTES]; /* COMM_ID */
};

#endif
