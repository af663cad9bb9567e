/* A transport's group whose end can be waited for. For tests with Check; include it in one .c only. */
#ifndef RS_TEST_WAITED_H
#define RS_TEST_WAITED_H

#include <check.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "transport/transport.h"

struct waited {
    struct transport_group group;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    int calls;
    int status;
    struct err err;
};

static inline void waited_done(struct transport_group *g, int status, const struct err *e)
{
    struct waited *w = g->arg;
    pthread_mutex_lock(&w->mutex);
    w->calls++;
    w->status = status;
    w->err = *e;
    pthread_cond_broadcast(&w->cond);
    pthread_mutex_unlock(&w->mutex);
}

static inline void waited_init(struct waited *w, const struct transport_message *messages,
                               uint32_t n)
{
    memset(w, 0, sizeof(*w));
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->cond, NULL);
    w->group = (struct transport_group){messages, n, waited_done, w};
}

/* True once done; false when it is not done within `ms`. */
static inline bool waited_within(struct waited *w, long ms)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += ms % 1000 * 1000000;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    int r = 0;
    pthread_mutex_lock(&w->mutex);
    while (w->calls == 0 && r == 0)
        r = pthread_cond_timedwait(&w->cond, &w->mutex, &t);
    bool done = w->calls > 0;
    pthread_mutex_unlock(&w->mutex);
    return done;
}

/* Its status, once: it must end within `ms`. */
static inline int waited_status_in(struct waited *w, long ms)
{
    ck_assert_msg(waited_within(w, ms), "a group did not end");
    ck_assert_int_eq(w->calls, 1);
    return w->status;
}

#endif
