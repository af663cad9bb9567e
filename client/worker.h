/* What the files of a worker share: worker.c (its lease, its events, its life), worker_calls.c (Publish to Apply), push.c (pushes, Withdraw), sleep.c (its memory
 * goes and comes). */
#ifndef RS_CLIENT_WORKER_H
#define RS_CLIENT_WORKER_H

#include "client/api.h"
#include "client/client.h"

enum { EVENTS_MOST = 4096, PUSHES_MOST = 8 };

enum worker_state { WORKER_ATTACHED, WORKER_BROKEN, WORKER_OVER };

struct worker_event {
    enum reshard_event_type type;
    uint64_t version, attempt;
    char *reason; /* owned; NULL: none */
};

/* What a worker is bound to. */
struct worker_memory {
    unsigned refs;                     /* of the worker's mutex */
    struct reshard_segment **segments; /* distinct, in the order in which the pieces name them */
    size_t n_segments;
    struct api_pages pages;
};

struct worker_attached {
    struct link *link;
    struct rpc_stream *stream;
    struct api_attached what;
};

struct reshard_worker {
    struct queue queue; /* in client.workers */
    struct reshard_client *client;
    char *model;
    const struct layout *layout;
    enum reshard_side side;
    enum reshard_receive receive;
    uint32_t rank, device;
    bool accept_automatically;
    pthread_t thread;
    bool started;

    pthread_mutex_t mutex;
    pthread_cond_t changed;       /* state, closing, events */
    struct worker_memory *memory; /* counted; NULL: it sleeps */
    unsigned sleeping; /* reshard_sleep under way: its memory is not there, and may be given back */
    bool waking;       /* reshard_wake attaches anew: the thread does not */
    struct worker_attached next; /* what that has brought; stream NULL: nothing */
    enum worker_state state;
    bool closing;
    struct link *link;         /* of the stream */
    struct rpc_stream *stream; /* freed by the thread (or by detach after it has ended) */
    uint64_t id;
    uint64_t committed, held, applied, reattached;
    uint64_t live_version, shadow_version; /* what to claim at the next attach */
    uint64_t published_version;            /* the last one, released or not */
    struct worker_push {
        uint64_t version;
        uint32_t n;             /* how often reshard_push_begin was said for it; 0: never */
    } pushes[PUSHES_MOST];      /* the newest first */
    uint64_t withdrawn_version; /* withdrawn here, and no push begun since; 0: none */
    char *withdrawn_reason;
    uint64_t opened_version; /* Ready or Apply was said for it: live memory may be torn */
    char *over_reason;
    bool evicted;
    struct worker_event *events; /* ring of EVENTS_MOST */
    size_t first_event, n_events;
};

/* The client's count of who uses each segment goes with it. RS_EINVAL names the piece's tensor; RS_ENOMEM. */
int worker_memory_new(struct reshard_client *c, const struct reshard_piece *live, size_t n_live,
                      const struct reshard_piece *shadow, size_t n_shadow,
                      struct worker_memory **ret, struct err *e);
/* NULL: it sleeps. */
struct worker_memory *worker_memory_get(struct reshard_worker *w);
void worker_memory_put(struct reshard_worker *w, struct worker_memory *m); /* NULL is fine */
/* push.c. The push that what is said of this version belongs to; 0: none. Under the mutex. */
uint32_t worker_push(const struct reshard_worker *w, uint64_t version);
/* push.c. After an attach: says again what was withdrawn, unless it is the lease that it was, `before`. */
void worker_withdraw_again(struct reshard_worker *w, uint64_t before, struct link *l,
                           uint64_t deadline_ns);
/* One attach on `l` with that memory: the layout first, since a daemon with a new ledger does not know it. m NULL: as a
 * sleeper. */
int worker_attach_on(struct reshard_worker *w, const struct worker_memory *m, struct link *l,
                     uint64_t resume, uint64_t deadline_ns, struct rpc_stream **ret_stream,
                     struct api_attached *ret, struct err *e);

#endif
