#include "exec/watchdog.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/thread.h"

#include "base/banned.h"

enum { LOOK_MS = 50 };

static void end_process(void)
{
    (void)fputs(
        "reshardd: data plane: work is in flight though the lease ran out long ago, a GPU does "
        "not finish it; ending\n",
        stderr);
    _exit(EXIT_FAILURE);
}

/* With the mutex held. While nothing is in flight there is nothing to look at. */
static void wait_for_change(struct watchdog *w)
{
    uint64_t until = clock_mono_ns() + LOOK_MS * UINT64_C(1000000);
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000U),
                         .tv_nsec = (long)(until % 1000000000U)};
    if (atomic_load(&w->busy))
        (void)pthread_cond_timedwait(&w->changed, &w->mutex, &t);
    else
        (void)pthread_cond_wait(&w->changed, &w->mutex);
}

static void *watch(void *arg)
{
    struct watchdog *w = arg;
    uint64_t shut_ns = 0; /* when it was first seen shut with work in flight */
    pthread_mutex_lock(&w->mutex);
    while (!w->stop) {
        uint64_t now = clock_mono_ns();
        if (!atomic_load(&w->busy) || fence_holds(w->fence))
            shut_ns = 0;
        else if (shut_ns == 0)
            shut_ns = now;
        else if (now - shut_ns > FENCE_DRAIN_MS * UINT64_C(1000000))
            end_process();
        wait_for_change(w);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

int watchdog_start(struct watchdog *w, struct fence *fence, struct err *e)
{
    pthread_condattr_t attributes;
    w->fence = fence;
    (void)pthread_mutex_init(&w->mutex, NULL);
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&w->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    int r = thread_start(&w->thread, watch, w);
    w->runs = r == 0;
    return r == 0 ? 0 : err_set(e, RS_EEXHAUSTED, "a thread for the watchdog: %s", strerror(r));
}

void watchdog_busy(struct watchdog *w, bool busy)
{
    if (!w->runs || atomic_exchange(&w->busy, busy) == busy || !busy)
        return;
    pthread_mutex_lock(&w->mutex);
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->mutex);
}

void watchdog_stop(struct watchdog *w)
{
    if (!w->runs)
        return;
    pthread_mutex_lock(&w->mutex);
    w->stop = true;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->mutex);
    rs_assert(pthread_join(w->thread, NULL) == 0);
    (void)pthread_cond_destroy(&w->changed);
    (void)pthread_mutex_destroy(&w->mutex);
    w->runs = false;
}
