/* This node's part of the attempt in flight of one model: orders and answers through refit/member.h, its actions
 * carried out on this node's data plane.
 *
 *   part.c          events in, actions out, what is reported
 *   part_prepare.c  PLAN: layouts fetched, plan found or made, memory that workers share → PREPARE of the data plane
 *   part_landed.c   what of a called off attempt need not be moved again
 *   part_sources.c  meanwhile: what this node's sources send, by its fingerprints → CELLS; from then on PROGRESS says that
 *                   they are known
 *   part_start.c    START → PROGRESS* → fingerprints compared → STAGED; ABORT
 *   part_feed.c     before that: destination workers that feed the attempt, fingerprinted
 *
 * Private to service/. Loop thread. */
#ifndef RS_SERVICE_PART_H
#define RS_SERVICE_PART_H

#include "refit/member.h"
#include "service/attempt_input.h"
#include "service/landed.h"
#include "service/planning.h"
#include "service/state.h"

struct layout_fetch;
struct landed_job;
struct part_feeders;
struct skips_job;
struct sources_job;

enum { PART_MOST_PENDING = 8, PART_TEXT_BYTES = ERR_TEXT_BYTES };

/* What came with a PREPARE; owned. */
struct prepare {
    uint64_t version, attempt, epoch, content;
    struct attempt_input *input;
    struct attempt_peer *peers;
    uint32_t n_peers;
    struct attempt_landed *landed;
    uint32_t n_landed;
    uint8_t plan_digest[16];
    uint64_t input_digests[ATTEMPT_PARTS];
    uint64_t deadline_ns;
    uint32_t transfer_timeout_ms;
    bool has_comm_id;
    uint8_t comm_id[NODE_COMM_ID_BYTES];
    struct node_comm_shrink shrink;
};

struct part {
    /* What is in shadow memory of an attempt that was called off. */
    struct part_landed {
        uint64_t attempt;
        struct landed_key key;
        uint8_t *holds; /* owned; as in attempt_landed; NULL: nothing */
        uint32_t n_bytes;
        uint64_t *workers; /* of the program's places; owned */
    } landed;
    struct model *model;
    struct member member;
    uv_timer_t deadline;          /* of ABORTING */
    struct prepare *next;         /* came with a PREPARE that is not taken yet; NULL: none */
    struct prepare *now;          /* of the attempt here; NULL: none */
    struct layout_fetch *fetch;   /* NULL: none */
    struct planning *planning;    /* NULL: none */
    struct plan_entry *plan;      /* counted; NULL: not planned */
    struct skips_job *skipping;   /* NULL: none */
    struct landed_job *landing;   /* NULL: none */
    struct part_feeders *feeders; /* NULL: none of this node's feeds, or none is looked at */
    bool sent;                    /* PREPARE went to this data plane: ABORT must follow it */
    struct link_request prepare, start, abort;
    struct link_request comm; /* of no attempt here: the coordinator asked for an id */
    uint64_t comm_attempt;
    struct wire_progress progress;
    struct memory_fold *folds; /* what has landed; owned */
    uint32_t n_folds;
    struct cell_print *cells; /* to be reported before STAGED; owned */
    uint32_t n_cells;
    struct cell_run
        *runs; /* room for a report's: they are told in short; owned; NULL: one by one */
    uint32_t n_runs;
    const uint64_t *source_holds; /* as PREPARED brought them, mapped; NULL: none */
    size_t source_holds_bytes;
    struct sources_job *telling; /* NULL: none */
    bool sources_told;           /* their cells are reported, or there are none */
    uint64_t blamed;             /* a destination worker whose fault a failure is; 0: not known */
    /* Events that came while one was being carried out. */
    bool stepping;
    struct part_pending {
        struct member_event ev;
        uint8_t digest[16];
        char text[PART_TEXT_BYTES];
    } pending[PART_MOST_PENDING];
    unsigned n_pending;
};

/* --- for the rest of the node part --- */

/* NULL: no memory. */
struct part *part_new(struct model *m);
/* Forgets all of it; freed when its handles are closed. */
void part_close(struct part *p);
/* PREPARE, START, ABORT, END, EXPEL, CELLS. */
void part_order(struct part *p, const struct node_order *o);
/* The session (s->session) stands, or is over; the data plane serves, or is dead. */
void part_joined(struct part *p);
void part_broken(struct part *p, const char *why);
void part_data_plane(struct part *p, bool up, const char *why);
bool part_is_quiet(const struct part *p);
/* The attempt here uses this worker's memory. */
bool part_uses(const struct part *p, const struct lease *l);

/* --- among the part's files --- */

/* An answer to one of the member's actions: code 0, or why not (text). `digest` for PLANNED. */
void part_answer(struct part *p, enum member_event_type type, int code, const char *text,
                 const uint8_t *digest);
/* The destination worker that a FAILED answer of the data plane blames is kept in p->blamed, and its text gets names. */
void part_link_failed(struct part *p, enum member_event_type type, int code,
                      const struct wire_packet *packet, const struct err *e);
/* The lease of a place of the plan; NULL: scratch, or its worker has gone. */
struct lease *part_place_lease(const struct part *p, uint32_t place);
enum wire_memory part_receiving(const struct lease *l);

void prepare_free(struct prepare *o);
struct prepare *prepare_copy(const struct node_order *o); /* NULL: no memory */
void part_plan(struct part *p);
void part_prepare(struct part *p);
void part_prepare_forget(struct part *p);
void part_start(struct part *p);
void part_abort(struct part *p);
void part_start_forget(struct part *p);
/* Fingerprints those of this node. 0: there are none to wait for; 1: part_prepare_checked follows once all are what they
 * were, else MADE_READY with the reason and p->blamed. RS_E…. */
int part_feeders_check(struct part *p, struct err *e);
void part_prepare_checked(struct part *p);
/* Puts their folds behind those of *folds (mem_free'd), *n is raised. RS_ENOMEM. */
int part_feeders_folds(const struct part *p, struct memory_fold **folds, uint32_t *n);
void part_feeders_forget(struct part *p);
/* CELLS in pages. */
void part_cells_tell(const struct part *p, uint64_t attempt, const struct cell_print *cells,
                     uint32_t n);
/* PREPARED came from the data plane: its fingerprints are kept. RS_EPROTO: there ought to be some. */
int part_sources_take(struct part *p, const struct wire_packet *packet, struct err *e);
/* At START: their cells are told, if there are any, and a PROGRESS follows where others wait for it. RS_ENOMEM. */
int part_sources_tell(struct part *p);
/* What has not been told yet is told with STAGED. */
void part_sources_leave(struct part *p);
void part_sources_forget(struct part *p);
/* QUIESCED came from the data plane. What it tells is kept until part_landed_clear. */
void part_landed_take(struct part *p, const struct wire_packet *packet);
void part_landed_clear(struct part *p);
/* RS_EABORTED: the PREPARE says that something is here which is not. */
int part_landed_check(const struct part *p, struct err *e);

#endif
