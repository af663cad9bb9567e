/* The operations of the API as plain functions: what the api files call after decoding.
 *
 * Strings and arrays in requests are borrowed for the call unless a function says "takes". A request that has to wait
 * carries a struct waiter of the caller's: its done runs exactly once, later or inside the call, unless waiter_forget
 * comes first (the call ended). Errors that need no waiting are returned, and then done never runs. `client` is the
 * memory socket's number of who calls; operations on a worker refuse (RS_EPERM) others than its owner. Loop thread. */
#ifndef RS_SERVICE_OPS_H
#define RS_SERVICE_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/queue.h"
#include "layout/layout.h"
#include "refit/refit.h"

struct service;
struct decider;
struct model;
struct lease;

struct op_reply {
    int code; /* 0 or RS_E… */
    const char *text;
    uint64_t version, attempt, value;
    enum refit_phase phase;
};

struct waiter {
    struct queue in;
    uint64_t cookie; /* 0: not waiting */
    bool asked;      /* the coordinator was asked: it ends with the session */
    void (*done)(struct waiter *w, const struct op_reply *reply);
};

/* Gives the waiter a cookie / takes it back: done will not run. */
uint64_t waiter_add(struct service *s, struct waiter *w);
void waiter_forget(struct waiter *w);
bool waiter_waits(struct service *s, uint64_t cookie);
/* Runs done. */
void waiter_end(struct waiter *w, int code, const char *text);

/* --- layouts ------------------------------------------------------------------------------------ */

/* Takes `layout` (not yet checked), also on failure. The reply's value is 1 where it was known; *ret_digest is filled
 * before done runs and must live until then or until waiter_forget. */
int op_put_layout(struct service *s, struct layout *layout, uint8_t ret_digest[16],
                  struct waiter *w, struct err *e);

/* --- attach ------------------------------------------------------------------------------------- */

struct attached {
    uint64_t worker, committed, held, applied;
};

/* The stream's end of a worker. The worker calls these until it calls `end`, which is the last. */
struct attach_stream {
    struct lease *lease; /* NULL: none (yet, any more) */
    void (*attached)(struct attach_stream *st, const struct attached *a);
    void (*tell)(struct attach_stream *st, enum refit_tell tell, uint64_t version, uint64_t attempt,
                 const char *reason);
    /* The lease is over (or never began). evicted: say so as an event before the status. */
    void (*end)(struct attach_stream *st, bool evicted, int code, const char *text);
};

struct attach_hello {
    const char *model;
    enum refit_side side;
    const char *layout_name;
    const uint8_t *layout_digest; /* 16 bytes */
    uint32_t rank, device;
    enum refit_receive receive;
    bool accept_automatically;
    uint64_t live_version, shadow_version, opened_version;
    bool asleep;                /* no segments, no pieces, no versions */
    uint32_t push;              /* sources: that live_version belongs to; 0: none */
    bool again;                 /* this process was attached as this worker before */
    uint64_t published_version; /* sources: the last one, released or not */
    uint64_t resume;
    const uint64_t *segments;
    size_t n_segments;
};

struct attach_piece {
    const char *tensor;
    uint32_t segment;
    uint64_t offset_bytes;
    const int64_t *stride_bytes; /* n_strides of them, 0: dense */
    size_t n_strides;
    const struct box *box; /* NULL: the whole of the rank's shard */
};

/* Begins an attach (or resumes one): st->lease is set. */
int op_attach_hello(struct service *s, uint64_t client, const struct attach_hello *h,
                    struct attach_stream *st, struct err *e);
int op_attach_piece(struct attach_stream *st, bool shadow, const struct attach_piece *p,
                    struct err *e);
/* All pieces are there: check, map, bind; then `attached` or `end`. */
int op_attach_done(struct attach_stream *st, struct err *e);
/* The client half-closed (goodbye) or the stream broke; `st` is not used any more. */
void op_attach_closed(struct attach_stream *st, bool goodbye);

/* --- what workers say --------------------------------------------------------------------------- */

struct op_expected {
    const char *tensor;
    uint64_t fingerprint;
};

/* push: as in REFIT_EV_PUBLISHED. */
int op_publish(struct service *s, uint64_t client, uint64_t worker, uint64_t version, uint32_t push,
               const uint8_t *event, const struct op_expected *expected, size_t n_expected,
               struct waiter *w, struct err *e);
int op_withdraw(struct service *s, uint64_t client, uint64_t worker, uint64_t version,
                uint32_t push, bool again, const char *reason, struct waiter *w, struct err *e);
int op_ready(struct service *s, uint64_t client, uint64_t worker, uint64_t version,
             struct waiter *w, struct err *e);
int op_accept(struct service *s, uint64_t client, uint64_t worker, uint64_t version,
              uint64_t attempt, bool accept, const char *reason, struct waiter *w, struct err *e);
int op_apply(struct service *s, uint64_t client, uint64_t worker, uint64_t version, bool skip,
             struct waiter *w, struct err *e);
/* The worker has no memory from now on; done runs once nothing of it is mapped here. A repeated call ends the one before
 * (RS_ECANCELED). */
int op_sleep(struct service *s, uint64_t client, uint64_t worker, struct waiter *w, struct err *e);
/* worker 0: not a worker's. */
int op_mark(struct service *s, uint64_t client, const char *model, uint64_t version,
            const char *name, uint64_t worker, struct waiter *w, struct err *e);

/* --- refits ------------------------------------------------------------------------------------- */

struct op_submit {
    const char *model;
    uint64_t version;
    const char *request_id;
    /* packed RefitOptions: kept, digested, and read again by options.h when planning */
    const void *options;
    size_t n_options_bytes;
    const char *options_words; /* options_words() */
    enum refit_release_at release_at;
    const struct refit_policy *policies;
    uint32_t n_policies;
    uint32_t prepare_timeout_ms, transfer_timeout_ms, accept_timeout_ms;
    bool rehearsal;
};

int op_submit(struct service *s, const struct op_submit *o, struct waiter *w, struct err *e);
int op_abort(struct service *s, const char *model, uint64_t version, const char *reason,
             struct waiter *w, struct err *e);
int op_evict(struct service *s, uint64_t worker, const char *reason, struct waiter *w,
             struct err *e);
/* Takes a node out of use, or (`undrain`) back in. The reply's value: how many workers have left; it comes when none is
 * there any more. RS_ENOTFOUND: no such node. */
int op_drain(struct service *s, uint32_t node, bool undrain, struct waiter *w, struct err *e);

/* --- committed versions and progress ------------------------------------------------------------ */

struct committed {
    const char *model;
    uint64_t version, committed_wall_ns;
    uint64_t age_ns;        /* how old this node's knowledge may be; 0 on the coordinator */
    uint64_t held, applied; /* by the asking worker; 0: none asked */
};

/* One who waits: a long poll (ends at the first call of done) or a stream (`stream`). The caller's; watching ends with
 * poll_close, after which `closed` runs once and it may be freed. */
struct poll {
    struct queue in; /* model.polls */
    struct service *service;
    struct model *model;
    uint64_t newer_than;
    uint64_t worker;
    uint64_t deadline_ns; /* of the call */
    uint64_t end_ns;
    void *timer; /* uv_timer_t; owned */
    bool stream;
    /* code 0: c is the answer, or one item of the stream. Else the end. */
    void (*done)(struct poll *p, int code, const char *text, const struct committed *c);
};

/* Answers at once where it can. RS_ENOTFOUND at the end where there is no committed version. */
int op_get_committed(struct service *s, uint64_t client, const char *model, uint64_t newer_than,
                     uint32_t wait_ms, uint64_t worker, struct poll *p, struct err *e);
int op_watch_committed(struct service *s, uint64_t client, const char *model, uint64_t worker,
                       struct poll *p, struct err *e);
/* Safe to repeat. */
void poll_close(struct poll *p);

struct watcher {
    struct queue in; /* decider.watchers */
    struct service *service;
    struct decider *decider;
    uint64_t version;
    /* The state has changed (read it from the decider), or code tells the end. */
    void (*changed)(struct watcher *w, int code, const char *text);
};

int op_watch_refit(struct service *s, const char *model, uint64_t version, struct watcher *w,
                   struct err *e);
void watcher_close(struct watcher *w);

#endif
