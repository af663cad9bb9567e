/* One process's side of a communicator of two, for tests of NCCL on the stand-in; include it in one .c only. */
#ifndef RS_TEST_NCCL_SIDE_H
#define RS_TEST_NCCL_SIDE_H

#include <check.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "device/device_cuda.h"
#include "test/standin/standin.h"
#include "transport/transport_nccl.h"

enum { BYTES = 300000 };

/* One process's side: device `here` of two. */
struct side {
    struct transport_nccl_node *node;
    struct transport *t;
    struct device *d;
    struct device_stream *s;
    uint8_t *out, *in;
    uint32_t here;
};

/* The stand-in's, of device 0. */
static inline struct standin_device_counters *counters(void)
{
    struct standin_device_counters *(*count)(int) = NULL;
    void *at = dlsym(RTLD_DEFAULT, "standin_count");
    ck_assert_ptr_nonnull(at);
    memcpy(&count, &at, sizeof count);
    return count(0);
}

struct done {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int calls, status;
    struct err err;
};

static inline void done_init(struct done *d)
{
    *d = (struct done){.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
}

static inline void done_now(struct done *d, int status, const struct err *e)
{
    pthread_mutex_lock(&d->mutex);
    d->calls++;
    d->status = status;
    d->err = *e;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mutex);
}

static inline void group_done(struct transport_group *g, int status, const struct err *e)
{
    done_now(g->arg, status, e);
}

static inline void connect_done(struct transport_connect *c, int status, const struct err *e)
{
    done_now(c->arg, status, e);
}

enum { SIDE_WAIT_MS = 60000, SIDE_ALARM_S = 200 }; /* guards against hangs */

static inline bool done_within(struct done *d, long ms)
{
    struct timespec until;
    int r = 0;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += ms % 1000 * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&d->mutex);
    while (d->calls == 0 && r == 0)
        r = pthread_cond_timedwait(&d->changed, &d->mutex, &until);
    bool done = d->calls > 0;
    pthread_mutex_unlock(&d->mutex);
    return done;
}

static inline int status_of(struct done *d)
{
    ck_assert_msg(done_within(d, SIDE_WAIT_MS), "it did not end");
    ck_assert_int_eq(d->calls, 1);
    return d->status;
}

static inline uint8_t *segment(struct device *d, size_t n)
{
    void *p = NULL;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, (off_t)n), 0);
    ck_assert_int_eq(device_map(d, fd, n, true, &p, NULL), 0);
    return p;
}

static inline struct side side_open(uint32_t here, const uint8_t *id,
                                    const struct transport_nccl_options *options)
{
    struct side x = {.here = here};
    struct err e = {0};
    struct device *devices[2] = {NULL, NULL};
    static const bool takes_part[2] = {true, true};
    ck_assert_msg(device_cuda_open(0, NULL, &x.d, &e) == 0, "%s", e.text);
    ck_assert_int_eq(device_stream_new(x.d, "net", &x.s, &e), 0);
    x.out = segment(x.d, BYTES);
    x.in = segment(x.d, BYTES);
    memset(x.out, 0x10 + (int)here, BYTES);
    ck_assert_msg(transport_nccl_node_open(&x.node, &e) == 0, "%s", e.text);
    devices[here] = x.d;
    ck_assert_msg(transport_nccl_open(x.node, devices, takes_part, 2, 9, id, options, &x.t, &e) ==
                      0,
                  "%s", e.text);
    ck_assert_int_eq(transport_begin(x.t, 1, &e), 0);
    return x;
}

static inline void side_close(struct side *x)
{
    device_stream_free(x->s);
    transport_close(x->t);
    transport_nccl_node_close(x->node);
    device_close(x->d);
}

static inline void id_make(uint8_t id[TRANSPORT_NCCL_ID_BYTES])
{
    struct transport_nccl_node *node;
    struct err e = {0};
    ck_assert_msg(transport_nccl_node_open(&node, &e) == 0, "%s", e.text);
    ck_assert_msg(transport_nccl_node_id(node, id, &e) == 0, "%s", e.text);
    transport_nccl_node_close(node);
}

static inline void message(struct side *x, struct transport_message *m, bool send, uint64_t n)
{
    *m = (struct transport_message){.data = send ? x->out : x->in,
                                    .bytes = n,
                                    .peer = 1 - x->here,
                                    .send = send,
                                    .network = true};
}

/* One group that sends and receives. */
static inline void exchange(struct side *x, struct transport_group *g, struct transport_message *m,
                            struct done *d)
{
    message(x, &m[0], true, BYTES);
    message(x, &m[1], false, BYTES);
    done_init(d);
    *g = (struct transport_group){m, 2, group_done, d};
    ck_assert_int_eq(transport_enqueue(x->t, x->here, x->s, g), 0);
}

/* Until NCCL has begun its n-th group. */
static inline void wait_begun(uint64_t n)
{
    struct standin_device_counters *(*count)(int) = NULL;
    void *at = dlsym(RTLD_DEFAULT, "standin_count");
    ck_assert_ptr_nonnull(at);
    memcpy(&count, &at, sizeof count);
    while (__atomic_load_n(&count(0)->groups_begun, __ATOMIC_RELAXED) < n)
        sched_yield();
}

static inline int exchange_status(struct side *x)
{
    struct transport_message m[2];
    struct transport_group g;
    struct done d;
    exchange(x, &g, m, &d);
    int status = status_of(&d);
    return status;
}

/* The other process: fn runs there with the id; its exit status is what fn returns. */
static inline pid_t other(int (*fn)(const uint8_t *id), const uint8_t *id)
{
    pid_t pid = fork();
    if (pid == 0) {
        (void)alarm(SIDE_ALARM_S);
        _exit(fn(id));
    }
    return pid;
}

static inline int status_of_process(pid_t pid)
{
    int status = 0;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static inline bool all_are(const uint8_t *p, uint8_t value)
{
    for (unsigned i = 0; i < BYTES; i++)
        if (p[i] != value)
            return false;
    return true;
}

#endif
