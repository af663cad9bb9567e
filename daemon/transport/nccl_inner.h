/* Inside of the NCCL transport. Not for other folders.
 *
 *   nccl_library.c    the library and its symbols; ids, each used once
 *   nccl_environment.c  which interface NCCL uses
 *   nccl_comm.c       communicators: joining, asynchronous errors, ending under a watchdog
 *   nccl_shrink.c     … that are made by shrinking an earlier epoch's
 *   nccl_buffer.c     buffers that are registered with communicators
 *   nccl_group.c      groups of messages: given to NCCL on their stream, compared, finished
 *   transport_nccl.c  attempts, the vtable
 *
 *        begin                 all ranks are there
 *   NONE ─────▶ JOINING ──────────────────────────▶ READY
 *    ▲             │ deadline, error, abort           │ error, abort with a group in flight, fence
 *    │             ▼                                  ▼
 *    └────────── ENDING (each ncclCommAbort on a thread of its own) ◀─┘
 *
 * Threads: callers; each device's stream (issue_group); the watcher, which alone changes the state;
 * one thread per communicator that is being aborted. `mutex` guards all but the communicators; a
 * lane's own mutex is held around NCCL calls on its communicator, taken after `mutex` or alone. */
#ifndef RS_TRANSPORT_NCCL_INNER_H
#define RS_TRANSPORT_NCCL_INNER_H

#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/queue.h"
#include "transport/transport_nccl.h"

enum {
    NCCL_POLL_US = 50,        /* with groups in flight */
    NCCL_IDLE_POLL_US = 20000 /* asynchronous errors between groups */
};

_Static_assert(TRANSPORT_NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "an id travels whole");

struct nccl_library {
    ncclResult_t (*version)(int *);
    ncclResult_t (*id)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
    ncclResult_t (*abort)(ncclComm_t);
    ncclResult_t (*error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*receive)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*start)(void);
    ncclResult_t (*end)(void);
    const char *(*text)(ncclResult_t);
    const char *(*last)(ncclComm_t);
};

/* What a library may lack: NULL. */
struct nccl_extras {
    ncclResult_t (*enlist)(ncclComm_t, void *, size_t, void **); /* a buffer */
    ncclResult_t (*delist)(ncclComm_t, void *);
    ncclResult_t (*alloc)(void **, size_t);
    ncclResult_t (*free)(void *);
    ncclResult_t (*shrink)(ncclComm_t, int *, int, ncclComm_t *, ncclConfig_t *, int);
};

struct transport_nccl_node {
    struct nccl_library nccl;
    struct nccl_extras extras;
    atomic_bool told_refusal;
    void *handle;
    int version;
    pthread_mutex_t mutex;
    uint8_t (*used)[TRANSPORT_NCCL_ID_BYTES]; /* ids: each once */
    size_t n_used, capacity;
};

/* Notes that the id is used. RS_EPRECOND: it was before. Any thread. */
int nccl_id_take(struct transport_nccl_node *node, const uint8_t *id, struct err *e);

enum nccl_shrink { NCCL_SHRINK_NONE, NCCL_SHRINK_MAKING, NCCL_SHRINK_PARTING, NCCL_SHRINK_FAILED };

enum nccl_state { NCCL_NONE, NCCL_JOINING, NCCL_READY, NCCL_ENDING };

/* Where a device's messages lie (its staging ring). */
struct nccl_buffer {
    void *data; /* NULL: none was told */
    uint64_t bytes;
    void *handle; /* NULL: not registered with the communicator that stands */
    bool tried;   /* with that communicator */
};

/* A local device. */
struct nccl_lane {
    struct nccl *t;
    struct device *device;
    pthread_mutex_t mutex;
    ncclComm_t comm;
    ncclComm_t parent;         /* of which comm is, or is to be, a part; NULL: none */
    struct nccl_buffer buffer; /* of the lane's mutex */
    bool idle;                 /* no group was in NCCL's hands when the communicators' end began */
    atomic_uint_fast64_t registrations, refusals;
    atomic_uint_fast64_t registered_bytes, hits, hit_bytes;
    int rank;
    int failed; /* a group of this attempt failed: later ones do too */
    struct transport_counters counters;
};

struct nccl_message {
    struct queue link; /* in its channel until the other end is enqueued */
    struct nccl_group *group;
    struct transport_message what;
};

struct nccl_group {
    struct queue link; /* in nccl.groups */
    struct transport_group *group;
    struct nccl *t;
    struct device_event *done;
    struct err err;
    int status;
    uint32_t device;
    bool issued; /* NCCL has it, or is being given it */
    uint32_t n_messages;
    struct nccl_message messages[];
};

struct nccl_waiter {
    struct queue link; /* in nccl.waiters */
    struct transport_connect *connect;
};

struct nccl {
    struct transport base;
    struct transport_nccl_node *node;
    struct transport_nccl_options options;
    pthread_t watcher;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct nccl_lane *lanes; /* [n_devices]: device NULL where it is not local */
    struct queue
        *channels; /* [from * n_devices + to], both local: messages without the other end */
    struct queue groups, waiters;
    uint8_t id[TRANSPORT_NCCL_ID_BYTES];
    struct err why; /* code != 0: the communicators are to end, or have ended, because of it */
    enum nccl_state state;
    enum nccl_shrink shrink;
    int *excluded; /* of the parents' ranks; NULL: nothing is shrunk */
    uint32_t n_excluded, shrunk, shrinks_failed;
    uint64_t shrink_until_ns;
    bool has_parents;
    uint64_t attempt, join_until_ns, end_until_ns;
    uint32_t n_devices, n_ranks, n_local, n_open, n_ending;
    atomic_bool leave; /* NCCL calls that poll shall return: an abort wants their lane */
    bool has_id, aborted, closing, stuck;
    bool again; /* a new attempt has begun, which the communicators that stand are not for */
};

static inline struct nccl *nccl_of(const struct transport *t)
{
    return container_of((struct transport *)(uintptr_t)t, struct nccl, base);
}

/* With the mutex held: communicators stand, or are being made, that a new attempt may use. */
static inline bool nccl_usable(const struct nccl *n)
{
    return n->why.code == 0 && !n->again &&
           (n->state == NCCL_READY || (n->state == NCCL_JOINING && !n->aborted));
}

static inline bool nccl_all_local(const struct nccl *n)
{
    return n->n_local == n->n_ranks;
}

/* --- nccl_comm.c ------------------------------------------------------------------------------- */

int nccl_code(ncclResult_t r); /* RS_E… */
/* With the mutex held: until something changes, or a while has passed. */
void nccl_wait_us(struct nccl *n, uint64_t us);
/* With the mutex held. The communicators are to end; the first reason stays. */
void nccl_end_because(struct nccl *n, int code, const char *text);
/* With the mutex held: they are to end now. */
bool nccl_must_end(struct nccl *n);
void nccl_configure(const struct nccl *n, ncclConfig_t *ret);
/* With the mutex held: a detached thread for each local lane, counted in n_ending until it calls
 * nccl_thread_ends, as its last; nccl_watchdog tells where that takes too long. */
void nccl_threads_start(struct nccl *n, void *(*fn)(void *lane));
void nccl_thread_ends(struct nccl *n);
void nccl_watchdog(struct nccl *n);
/* The watcher's thread. */
void *nccl_watch(void *nccl);

/* --- nccl_shrink.c ----------------------------------------------------------------------------- */

/* Notes who has left. RS_ENOMEM. */
int nccl_shrink_copy(struct nccl *n, struct err *e);
/* Takes the communicators of the parent, where they are fit; else a new one will be made by the id. Before the
 * first attempt. */
void nccl_shrink_take(struct nccl *n);
/* The watcher's, with the mutex held. */
void nccl_shrink_start(struct nccl *n);
void nccl_shrink_poll(struct nccl *n);
/* With the lane's mutex held and its device current. */
void nccl_shrink_end_parent(struct nccl_lane *lane);

/* --- nccl_buffer.c ----------------------------------------------------------------------------- */

/* With the lane's mutex held, its device current and its communicator ready: once for each communicator. */
void nccl_buffer_register(struct nccl *n, struct nccl_lane *lane);
/* With the lane's mutex held. The communicator has ended, and its registrations with it. */
void nccl_buffer_forget(struct nccl_lane *lane);
/* With the lane's mutex held: a message is given to NCCL. */
void nccl_buffer_count(struct nccl_lane *lane, const struct transport_message *m);
/* With the lane's mutex held, its device current and nothing in flight there. */
void nccl_buffer_deregister(struct nccl *n, struct nccl_lane *lane);

/* --- nccl_group.c ------------------------------------------------------------------------------ */

int nccl_enqueue(struct transport *t, uint32_t device, struct device_stream *stream,
                 struct transport_group *group);
int nccl_connect(struct transport *t, struct transport_connect *c);
/* With the mutex held: a group is in NCCL's hands. */
bool nccl_any_issued(const struct nccl *n);
/* The watcher's, with the mutex held, which they let go for on_done: end what is done. */
void nccl_poll_groups(struct nccl *n);
void nccl_finish_waiters(struct nccl *n);

#endif
