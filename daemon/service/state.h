/* What the files of this folder share: the structs of the control process. Private to service/.
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
#include "plan/plan.h"
#include "refit/refit.h"
#include "service/config.h"
#include "service/data_plane_link.h"
#include "service/layouts.h"
#include "service/memory_server.h"
#include "service/ops.h"
#include "service/plan_store.h"

enum { NODE = 0 }; /* the number of this daemon's node in the decider's events: there is one */

struct service {
    uv_loop_t *loop;
    const struct config *config;
    uint64_t incarnation;
    uint64_t start_ns;
    struct mailbox mailbox; /* from the ledger's writer */
    uv_async_t wake;
    struct ledger *ledger;
    struct memory_server *memory;
    struct data_plane_link *link;
    struct topology *topology;
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
    /* whose refit moves bytes there; NULL: nobody's */
    struct model *device_user[CONFIG_MAX_DEVICES];
    uint64_t random;    /* state of the jitter's sequence */
    uint32_t n_jobs;    /* on libuv's threads */
    uint32_t n_writes;  /* at the ledger */
    unsigned n_handles; /* of ours, open or closing */
    bool stopping, stop_finished;
    void (*stopped)(void *arg);
    void *stopped_arg;
    void (*failed)(void *arg); /* NULL: told already */
    void *failed_arg;
};

/* What a source worker has published, with the fingerprints of its shards. Counted; immutable. */
struct publication {
    uint32_t refs;
    uint64_t version;
    uint64_t id;
    /* per tensor of the source layout, this rank's shards; NULL: verification is off */
    uint64_t *fingerprints;
    uint32_t n_tensors;
    struct expected_fingerprint {
        uint32_t tensor;
        uint64_t fingerprint;
    } * expected; /* of whole tensors, by the client's own way */
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
    bool torn;                           /* what live memory claimed to hold it does not */
    struct segment **segments;
    uint32_t n_segments;
    uint64_t segment_bytes;
    struct binding_piece *pieces[2]; /* WIRE_LIVE, WIRE_SHADOW: while the pages come */
    size_t n_pieces[2], pieces_capacity[2];
    int binding_fd[2]; /* encoded bindings, sealed; -1: none */
    int dtypes_fd;
    struct attach_stream *stream; /* NULL: broken or ended */
    uv_timer_t grace;
    bool known;  /* the decider knows it */
    bool mapped; /* segments are told to the data plane */
    bool bound;  /* the data plane can use it */
    bool waits_unbind, rebinding;
    bool resuming; /* between its hello with `resume` and AttachDone */
    bool done;     /* AttachDone came */
    int checking;  /* enum wire_memory whose content is being checked */
    bool job;      /* its bindings are being checked on another thread */
    unsigned step; /* of MAP and BIND */
    void (*after_bind)(struct lease *l, int code, const struct err *e);
    struct link_request bind, unbind, publish, apply;
    struct waiter waiter; /* of the attach: the decider's answers */
    uint64_t publish_version;
    uint64_t publish_cookie;
    struct publication *publishing, *published;
    /* per tensor of its layout: what receiving memory held when `sums_version` was staged */
    uint64_t *sums;
    uint64_t sums_version;
    uint64_t apply_version;
    char end_reason[256];
};

/* The attempt in flight of one model, as far as it is carried out here. */
struct run {
    uint64_t id, version, epoch;
    struct planning *planning;    /* job; NULL: none */
    struct plan_entry *plan;      /* counted; NULL: not planned */
    struct verify_job *verifying; /* job; NULL: none */
    uint64_t prepare_deadline_ns;
    bool wants_devices; /* PREPARE waits for other models' refits */
    bool has_devices;
    bool sent;    /* PREPARE went to this data plane: ABORT must follow it */
    bool staging; /* STAGED is being looked through */
    int verify;   /* enum wire_verify */
    struct link_request prepare, start, abort;
    struct wire_progress progress; /* newest */
    uint64_t notified_ns;
};

struct model {
    struct queue in; /* service.models */
    struct service *service;
    char *name;
    uint64_t id; /* in wire messages */
    struct refit *refit;
    struct refit_update update;
    struct queue later; /* struct later: events that wait for the running step's end */
    bool stepping;
    uv_timer_t deadline;
    uv_timer_t retry; /* after RS_ENOMEM */
    struct run run;
    /* of the newest attempt that was planned: what Publish fingerprints by */
    struct plan_entry *last_plan;
    struct queue polls;      /* struct poll: long polls and watchers of committed versions */
    struct queue watchers;   /* struct watcher: of refits */
    struct held_store *held; /* fingerprints of committed versions, for workers that attach again */
    void *fingerprints;      /* of the attempt in flight, for the ledger's row; owned */
    size_t n_fingerprints_bytes;
};

/* --- model.c ------------------------------------------------------------------------------------ */

struct model *model_find(struct service *s, const char *name);
/* RS_EEXHAUSTED: max_models. */
int model_open(struct service *s, const char *name, struct model **ret, struct err *e);
/* Gives the decider an event (stamped with the clocks) and carries out what it says, and what follows from that. An
 * event from inside an action waits for its turn. RS_ENOMEM: nothing happened; an event without a cookie is kept and
 * given again. */
int model_event(struct model *m, struct refit_event *ev);
/* Closes handles and frees it when they are closed. */
void model_close(struct model *m);

/* --- run.c: PLAN, PREPARE, START, ABORT, EXPEL, APPLY of the decider, carried out ------------ */

void run_plan(struct model *m, const struct refit_action *a);
void run_prepare(struct model *m, const struct refit_action *a);
void run_start(struct model *m, const struct refit_action *a);
void run_abort(struct model *m, const struct refit_action *a);
void run_expel(struct model *m, const struct refit_action *a);
/* Nothing of it is needed any more: it committed, aborted, or its data plane is dead. */
void run_end(struct model *m);
/* Models that wait for devices take them, in order. */
void run_devices_free(struct service *s);

/* --- lease.c ------------------------------------------------------------------------------------ */

struct lease *lease_find(struct service *s, uint64_t id);
void lease_apply(struct model *m, const struct refit_action *a);
void lease_tell(struct model *m, const struct refit_action *a);
/* The lease ends: tells the decider, ends the stream with that code and text, lets the memory go. */
void lease_end(struct lease *w, bool for_good, int code, const char *reason);
/* Those whose memory nobody needs any more are unbound and freed. After every step. */
void leases_sweep(struct service *s);
/* A new data plane: tells it of all live workers; NODE_UP when that is done. */
void leases_rebind(struct service *s);
void leases_lost_data_plane(struct service *s);
void leases_client_ended(struct service *s, const struct memory_client *client);
void publication_unref(struct publication *p);

/* --- attach.c ----------------------------------------------------------------------------------- */

/* Tells the decider of a layout; the decider answers the cookie. RS_ENOMEM: it will not. */
int layout_event(struct model *m, enum refit_side side, const struct layout *layout, bool member,
                 uint64_t cookie);

/* --- watch.c ------------------------------------------------------------------------------------ */

void watch_committed(struct model *m);
void watch_refit(struct model *m, uint64_t version);
/* All watchers of a model end with RS_EUNAVAIL. */
void watch_close(struct model *m);

/* --- service.c ---------------------------------------------------------------------------------- */

/* Finishes a request with a cookie. */
void service_reply(struct service *s, const struct refit_action *a);
/* The same, for who is not the decider. Nothing where nobody waits with that cookie any more. */
void service_answer(struct service *s, uint64_t cookie, int code, const char *text);
/* When nothing is left to wait for, ends the stop. */
void service_stop_if_idle(struct service *s);
/* After each of the ledger's answers: RS_EDISK is told to the owner (service_on_failure), once. */
void service_check_ledger(struct service *s, int code);
/* A handle of the service (or of what it owns) is closed. */
void service_handle_closed(struct service *s);

#endif
