/* Inside of libreshard: the client, its segments, and how a call survives a daemon's restart.
 *
 * Locks, in the order in which they may be taken: the connect lock (who opens a link and hands the
 * segments over; held while blocking, waited for with a deadline), then mutex (pointers and counts;
 * held for a few instructions). A worker's own mutex (worker.c) is taken after both. */
#ifndef RS_CLIENT_CLIENT_H
#define RS_CLIENT_CLIENT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/queue.h"
#include "client/link.h"
#include "client/reshard.h"
#include "layout/layout.h"
#include "memory/memory_socket.h"

struct reshard_client {
    char *path;
    struct queue segments; /* of struct reshard_segment; guarded by the connect lock */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* monotonic; closing */
    struct link *link;      /* guarded by mutex; NULL: none */
    struct queue workers;   /* guarded by mutex */
    uint64_t n_links;       /* opened so far */
    bool connecting;        /* the connect lock, see below */
    bool closing;
};

struct reshard_segment {
    struct queue queue; /* in client.segments */
    struct reshard_client *client;
    uint32_t kind; /* enum memory_segment_kind */
    int fd;        /* of a memfd; else -1 */
    int *fds;      /* of a GPU's memory, as memory_socket.h has them; NULL: none */
    uint32_t n_fds;
    void *data;
    uint64_t bytes;
    struct memory_device device; /* of a GPU's memory; `local` as of the newest link */
    int ordinal;                 /* of that GPU in this process; -1: not known */
    uint64_t id;                 /* the daemon's, on the client's newest link */
    uint32_t n_users;            /* workers; guarded by client.mutex */
};

/* A memfd whose pages all exist and which nobody can shrink or grow; the caller's to close. `root` as in
 * room.h. RS_EEXHAUSTED before it takes what is not there. */
int segment_memfd(uint64_t bytes, const char *root, int *ret_fd, struct err *e);

/* Hands it over on a link: fills in its id and, of a GPU's, the node's number of the device. */
int segment_add(struct link *l, struct reshard_segment *s, uint64_t deadline_ns, struct err *e);
/* Waits for all work of this process on the GPUs that have the segments. RS_EDEVICE: one has failed. */
int segments_synchronise(struct reshard_segment *const *segments, size_t n, struct err *e);

struct reshard_layout {
    struct layout *layout;
};

struct reshard_worker;

/* Copies what happened to the caller's struct (may be NULL); returns code. */
int client_give(struct reshard_error *e, int code, const struct err *err);
uint64_t client_deadline(uint32_t timeout_ms); /* 0: the default */

/* The live link, referenced; opens one where there is none. Looks for a daemon (with back-off) until
 * look_until_ns; one that was found has until the deadline for its hello and all the segments, so
 * that a slow one is not begun with again and again. RS_EUNAVAIL, RS_EPERM, RS_EPROTO, RS_ECANCELED
 * (closing). */
int client_link(struct reshard_client *c, uint64_t look_until_ns, uint64_t deadline_ns,
                struct link **ret, struct err *e);

/* RS_EUNAVAIL where it was not free until the deadline. */
int client_connect_lock(struct reshard_client *c, uint64_t deadline_ns, struct err *e);
void client_connect_unlock(struct reshard_client *c);

/* One try of a call over a link. worker: the id to say, 0 where the call has no worker. */
typedef int (*client_try)(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                          struct err *e);
/* Tries until it is answered or the deadline is over; w may be NULL. What is answered for a dead
 * link, an unknown token or a data plane that is being replaced is tried again. */
int client_call(struct reshard_client *c, struct reshard_worker *w, uint64_t deadline_ns,
                client_try fn, void *arg, struct err *e);

/* Whether a failure of a call on `l` is worth another try, and drops the link where it is broken.
 */
bool client_retry(struct link *l, int code);
/* Waits the jittered pause before try number `n` (0, 1, …): false where the deadline or the
 * client's end is nearer. At most one second. */
bool client_pause(struct reshard_client *c, unsigned n, uint64_t deadline_ns);
void client_timespec(uint64_t deadline_ns, struct timespec *ret);

/* worker.c: the worker's id on a link, waiting until it is attached. */
int worker_hold(struct reshard_worker *w, uint64_t deadline_ns, struct link **ret_link,
                uint64_t *ret_worker, struct err *e);
/* Whether the worker is attached under another id (or link) by now, or about to be. */
bool worker_moved(struct reshard_worker *w, uint64_t worker);
struct reshard_worker *worker_of_queue(struct queue *q);

#endif
