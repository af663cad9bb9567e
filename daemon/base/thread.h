/* Threads that take no signal: signals are for the thread that started them. Any thread may start one. */
#ifndef RS_BASE_THREAD_H
#define RS_BASE_THREAD_H

#include <pthread.h>

/* 0, or an errno; *ret is to be joined. */
int thread_start(pthread_t *ret, void *(*fn)(void *arg), void *arg);
/* Nobody joins it. 0, or an errno. */
int thread_start_detached(void *(*fn)(void *arg), void *arg);

#endif
