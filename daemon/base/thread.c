#include "base/thread.h"

#include <signal.h>

#include "base/err.h"

#include "base/banned.h"

/* A thread has the mask of who starts it. */
static int start(pthread_t *ret, const pthread_attr_t *attr, void *(*fn)(void *arg), void *arg)
{
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int r = pthread_create(ret, attr, fn, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return r;
}

int thread_start(pthread_t *ret, void *(*fn)(void *arg), void *arg)
{
    return start(ret, NULL, fn, arg);
}

int thread_start_detached(void *(*fn)(void *arg), void *arg)
{
    pthread_t thread;
    pthread_attr_t attr;
    rs_assert(pthread_attr_init(&attr) == 0);
    rs_assert(pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED) == 0);
    int r = start(&thread, &attr, fn, arg);
    (void)pthread_attr_destroy(&attr);
    return r;
}
