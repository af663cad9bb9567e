/* A gate that holds a stream or a thread until a test opens it. For tests with Check; include it in one .c only. */
#ifndef RS_TEST_GATE_H
#define RS_TEST_GATE_H

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

enum { GATE_WAIT_MS = 60000 }; /* a guard against hangs */

struct gate {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool open, started;
};

#define GATE                                                                                       \
    {                                                                                              \
        PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, false                          \
    }

static inline void gate_init(struct gate *g)
{
    *g = (struct gate)GATE;
}

static inline void gate_open(void *arg)
{
    struct gate *g = arg;
    pthread_mutex_lock(&g->mutex);
    g->open = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}

static inline void gate_wait(void *arg)
{
    struct gate *g = arg;
    pthread_mutex_lock(&g->mutex);
    g->started = true;
    pthread_cond_broadcast(&g->changed);
    while (!g->open)
        pthread_cond_wait(&g->changed, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

/* Waits until somebody stands before the gate. */
static inline void gate_started(struct gate *g)
{
    pthread_mutex_lock(&g->mutex);
    while (!g->started)
        pthread_cond_wait(&g->changed, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

/* False: not within `ms`. */
static inline bool gate_opens(struct gate *g, unsigned ms)
{
    struct timespec until;
    int r = 0;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&g->mutex);
    while (!g->open && r == 0)
        r = pthread_cond_timedwait(&g->changed, &g->mutex, &until);
    bool open = g->open;
    pthread_mutex_unlock(&g->mutex);
    return open;
}

#endif
