/* One node's part of the attempt in flight of one model: what the node part of the service asks
 * before it acts on an order. Pure: no clock, no I/O, no memory.
 *
 * How it is used. The node part has one `struct member` per model beside the things of the attempt
 * (plan, jobs, requests to the data plane). Every order about an attempt, every answer of those
 * jobs and of the data plane, and every change of the session goes through member_step, and the
 * node part does what the update says, in order:
 *
 *   struct member_event ev = {.type = MEMBER_EV_START, .session = …, .attempt = …, .now_ns = …};
 *   struct member_update u;
 *   member_step(&m->member, &ev, &u);
 *   for (i = 0; i < u.n_actions; i++) node_do(m, &u.actions[i], payload of ev);
 *
 * What goes with an event (the input of a PREPARE, the bytes of a PROGRESS) is not looked at here:
 * it is the node part's to keep, and an action that comes of an event is about that event's. An
 * action is for `attempt` (not always the event's). Answers of jobs and of the data plane carry the
 * attempt that they were started for; what is late is dropped here, so nobody else need look.
 *
 * Sessions. `session` is any number that tells one stream to the coordinator from another (never 0,
 * never used twice in a process); orders carry the one they came by. On the coordinator's own node
 * there is one session, from the first step on. A node says JOIN only while member_quiet() is true
 * for all its models: JOIN promises that nothing of an older session moves.
 *
 * Drawing, table and invariants: member.c. Thread: one (the loop). */
#ifndef RS_REFIT_MEMBER_H
#define RS_REFIT_MEMBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/sm.h"

enum member_state {
    MEMBER_IDLE = 0,
    MEMBER_PREPARING, /* planning, then the data plane prepares */
    MEMBER_PREPARED,
    MEMBER_STARTED, /* bytes move */
    MEMBER_STAGED,  /* all of them are here and verified; nothing moves */
    MEMBER_ABORTING /* until the data plane is quiet or dead */
};

enum member_event_type {
    /* --- the session and what this node is --- */
    MEMBER_EV_JOINED = 1, /* the session stands: `session`, `coordinator` (its incarnation) */
    MEMBER_EV_BROKEN,     /* it is over (`text`: why) */
    MEMBER_EV_LEASE_OVER, /* the data plane may move nothing any more; the session counts as over */
    MEMBER_EV_DATA_PLANE_UP, /* `data_plane`: a number of its own, as NODE_UP tells it; 0: told nobody */
    MEMBER_EV_DATA_PLANE_DEAD, /* the process is gone: nothing of it moves (`text`: why) */
    /* --- orders: `session`, `attempt` --- */
    MEMBER_EV_PREPARE, /* and `version`, `epoch`, `digest` (the coordinator's plan) */
    MEMBER_EV_START,
    MEMBER_EV_ABORT,
    MEMBER_EV_END,   /* the attempt is over: committed, or aborted and quiet */
    MEMBER_EV_EXPEL, /* it has not quiesced in time: end the data plane */
    /* --- answers: `attempt`, `code` (0, or why not, with `text`) --- */
    MEMBER_EV_PLANNED,    /* to MEMBER_DO_PLAN; code 0: `digest` */
    MEMBER_EV_MADE_READY, /* to MEMBER_DO_PREPARE */
    MEMBER_EV_PROGRESS,
    MEMBER_EV_LANDED, /* to MEMBER_DO_START: landed and verified, or why not */
    MEMBER_EV_QUIET,  /* to MEMBER_DO_ABORT: nothing of the attempt moves any more */
    MEMBER_EV_TICK    /* MEMBER_DO_SET_DEADLINE's time has come; too early does no harm */
};

struct member_event {
    enum member_event_type type;
    uint64_t now_ns; /* monotonic */
    uint64_t session, coordinator;
    uint64_t version, attempt, epoch;
    uint64_t
        data_plane; /* PREPARE: which one the coordinator means (0: any). One that has died since is
                            refused, since NODE_LOST is still on its way and would be taken for this one's */
    int code;
    const char *text;      /* borrowed for the step; NULL: none */
    const uint8_t *digest; /* 16 bytes, borrowed for the step */
};

enum member_action_type {
    MEMBER_DO_PLAN = 1, /* fetch layouts, plan; answer PLANNED */
    MEMBER_DO_PREPARE,  /* compare sources, prepare the data plane; answer MADE_READY */
    MEMBER_DO_START,    /* answer PROGRESS*, then LANDED */
    /* Forget the attempt's jobs (their answers may still come; they are dropped), tell the data plane
     * to abort; answer QUIET. Where nothing of it has reached the data plane: answer QUIET at once. */
    MEMBER_DO_ABORT,
    MEMBER_DO_KILL, /* the data plane does not let go: end its process; answer DATA_PLANE_DEAD */
    MEMBER_DO_END,  /* nothing moves: let go of plan, jobs and what the data plane keeps of it */
    MEMBER_DO_REPORT,
    MEMBER_DO_SET_DEADLINE /* give TICK at at_ns; MEMBER_NEVER: none */
};

enum member_report {
    MEMBER_REPORT_PREPARED = 1,
    MEMBER_REPORT_PROGRESS,
    MEMBER_REPORT_STAGED, /* also as an answer to a repeated START */
    MEMBER_REPORT_FAILED, /* code, text */
    MEMBER_REPORT_QUIESCED
};

#define MEMBER_NEVER UINT64_MAX
enum { MEMBER_MOST_ACTIONS = 6, MEMBER_MOST_TEXT = 512 };

struct member_action {
    enum member_action_type type;
    enum member_report report; /* REPORT */
    uint64_t attempt;
    uint64_t session; /* REPORT: by which it goes */
    uint64_t at_ns;   /* SET_DEADLINE */
    int code;         /* REPORT FAILED */
    const char
        *text; /* REPORT FAILED, ABORT: in words, or ""; until the next step with this update */
};

struct member_update {
    struct member_action actions[MEMBER_MOST_ACTIONS];
    size_t n_actions;
    char text[MEMBER_MOST_TEXT];
};

struct member {
    struct sm state; /* member_state */
    char model[64];  /* for log lines; cut off */
    uint32_t quiesce_timeout_ms;
    bool data_plane_up;
    uint64_t data_plane;  /* which one */
    uint64_t session;     /* 0: none */
    uint64_t coordinator; /* incarnation of the newest coordinator that was joined; 0: none */
    uint64_t version, attempt, epoch; /* of the attempt that this node has; 0: none */
    uint64_t
        fence; /* newest attempt of this coordinator that is over here: it and older ones are refused */
    uint64_t newest_epoch; /* of this coordinator */
    uint64_t owed;  /* attempt whose QUIESCED could not be said, the session being over; 0: none */
    uint64_t asked; /* ABORTING: attempt whose QUIESCED is asked for; 0: nobody has asked yet */
    uint64_t deadline_ns; /* ABORTING: then the data plane is ended */
    bool planned;         /* PREPARING: the plan is made and is the coordinator's */
    uint8_t digest[16];   /* the coordinator's plan */
};

void member_init(struct member *m, const char *model, uint32_t quiesce_timeout_ms);
/* Never fails. What it answers belongs to `u` until the next step with it. */
void member_step(struct member *m, const struct member_event *ev, struct member_update *u);

/* Nothing of any attempt moves here, and nothing will before the next PREPARE of a new session. */
bool member_quiet(const struct member *m);
/* True where the attempt's bytes may be written to (or read from) this node's workers. */
bool member_moves(const struct member *m);
const char *member_state_name(int state);

/* Proves the invariants of member.c (asserts). */
void member_check(const struct member *m);

#endif
