/* What transport_local.c (groups and their way) and transport_local_ends.c (ends of messages, and how they
 * meet) share. All of it is guarded by `mutex`. */
#ifndef RS_TRANSPORT_TRANSPORT_LOCAL_PRIVATE_H
#define RS_TRANSPORT_TRANSPORT_LOCAL_PRIVATE_H

#include <pthread.h>

#include "base/queue.h"
#include "transport/transport_local.h"

enum stage { WAITS, STARTED, PASSED };

/* One end of a message that is copied. */
struct end {
    struct queue link; /* in its channel until the other end comes */
    struct group *group;
    const struct transport_message *what; /* the caller's group has it */
    struct device_event *done;            /* sends: the copy is */
    bool posted, met;
};

struct group {
    struct queue link; /* in its port until it has passed, then in `over` */
    struct local *t;
    struct transport_group *group; /* the caller's */
    struct device_stream *stream;
    struct device_event *ready; /* its turn on the stream has come; NULL: it has no ends */
    struct transport_group rest;
    struct transport_message *others; /* rest's */
    struct err err;
    struct queue hold; /* in `held` */
    enum stage stage;
    bool is_held;
    int status;
    uint32_t device;
    uint32_t n_ends, n_unmet;
    uint32_t n_parts; /* that are not over: its own way, the rest */
    struct end ends[];
};

/* A device. */
struct port {
    struct device *device;        /* NULL: not local */
    struct device_stream *copies; /* NULL: none yet, or it is `dying` */
    struct queue groups;          /* that have not passed, in their order */
    struct transport_counters counters;
    int failed;                  /* a group of this attempt failed: later ones do too */
    struct device_stream *dying; /* settle_main waits for what is on it, and ends it */
};

struct local {
    struct transport base;
    pthread_mutex_t mutex;
    struct transport *behind;
    struct port *ports;
    struct queue *channels; /* [from * n_devices + to]: ends without the other one */
    bool *pairs;
    struct queue over; /* groups that on_done is to be called for */
    struct queue held; /* groups that are not over before settle_main is through */
    bool settling;
    int why; /* it settled for the first time; 0: it has not */
    uint64_t attempt;
    uint32_t n_devices, n_groups; /* enqueued and not over */
    bool aborted;
};

static inline bool local_is_pair(const struct local *t, uint32_t from, uint32_t to)
{
    return from < t->n_devices && to < t->n_devices && t->pairs[(size_t)from * t->n_devices + to];
}

/* The first reason stays. */
void local_group_fail(struct group *g, int status, const char *text);
/* One part less to wait for; the last one's end is told by local_unlock. */
void local_part_over(struct local *t, struct group *g);
/* Lets the mutex go, and calls on_done of what is over. Nothing touches the transport afterwards. */
void local_unlock(struct local *t);

/* The n-th send meets the n-th receive: then it is copied, or both groups fail. */
void local_post(struct local *t, struct end *x);
/* The group's ends that have met none never will. */
void local_take_back(struct group *g);
/* Copies of the group's may be under way, and their end can't be asked for: a thread waits for all that is
 * on the copy streams, and the group is not over before. None is added to meanwhile. */
void local_settle(struct local *t, struct group *g, int why);

#endif
