/* NCCL on one GPU: a communicator of one rank joins, sends to itself, is aborted and made again. All
 * that a machine with one GPU can tell of it. */
#include <check.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "device/device_cuda.h"
#include "transport/transport_nccl.h"

enum { BYTES = 8 << 20 };

struct done {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int calls, status;
    struct err err;
};

static void done_init(struct done *d)
{
    *d = (struct done){.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
}

static void done_now(struct done *d, int status, const struct err *e)
{
    pthread_mutex_lock(&d->mutex);
    d->calls++;
    d->status = status;
    d->err = *e;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mutex);
}

static void group_done(struct transport_group *g, int status, const struct err *e)
{
    done_now(g->arg, status, e);
}

static void connect_done(struct transport_connect *c, int status, const struct err *e)
{
    done_now(c->arg, status, e);
}

/* The test's own limit ends it where nothing comes. */
static int status_of(struct done *d)
{
    pthread_mutex_lock(&d->mutex);
    while (d->calls == 0)
        pthread_cond_wait(&d->changed, &d->mutex);
    pthread_mutex_unlock(&d->mutex);
    return d->status;
}

struct one {
    struct device *d;
    struct device_stream *s;
    struct transport_nccl_node *node;
    struct transport *t;
    uint8_t *host;
    void *out, *in;
};

static void one_open(struct one *x)
{
    static const bool takes_part[1] = {true};
    struct err e = {0};
    void *p;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_msg(device_cuda_open(0, NULL, &x->d, &e) == 0, "%s", e.text);
    ck_assert_msg(device_stream_new(x->d, "net", &x->s, &e) == 0, "%s", e.text);
    ck_assert_int_eq(ftruncate(fd, BYTES), 0);
    ck_assert_msg(device_map(x->d, fd, BYTES, true, &p, &e) == 0, "%s", e.text);
    x->host = p;
    ck_assert_msg(device_alloc(x->d, BYTES, &x->out, &e) == 0, "%s", e.text);
    ck_assert_msg(device_alloc(x->d, BYTES, &x->in, &e) == 0, "%s", e.text);
    ck_assert_msg(transport_nccl_node_open(&x->node, &e) == 0, "%s", e.text);
    ck_assert_msg(transport_nccl_open(x->node, &x->d, takes_part, 1, 1, NULL, NULL, &x->t, &e) == 0,
                  "%s", e.text);
}

static void one_close(struct one *x)
{
    device_stream_free(x->s);
    transport_close(x->t);
    transport_nccl_node_close(x->node);
    device_free(x->d, x->out, BYTES);
    device_free(x->d, x->in, BYTES);
    device_unmap(x->d, x->host, BYTES);
    device_close(x->d);
}

static void move(struct one *x, void *to, void *from)
{
    struct kernel_copy c = {.size = {BYTES},
                            .from = {from, {1}},
                            .to = {{to, {1}}},
                            .n_targets = 1,
                            .n_dims = 1,
                            .from_dtype = 11, /* uint8 */
                            .to_dtype = 11};
    ck_assert_int_eq(device_copy(x->s, &c, 1), 0);
}

static void send_to_itself(struct one *x, uint8_t value)
{
    struct transport_message m[2] = {
        {.data = x->out, .bytes = BYTES, .peer = 0, .send = true, .network = true},
        {.data = x->in, .bytes = BYTES, .peer = 0, .network = true}};
    struct done d;
    struct transport_group g = {m, 2, group_done, &d};
    memset(x->host, value, BYTES);
    done_init(&d);
    move(x, x->out, x->host);
    ck_assert_int_eq(transport_enqueue(x->t, 0, x->s, &g), 0);
    ck_assert_msg(status_of(&d) == 0, "%s", d.err.text);
    struct done again;
    struct transport_group empty = {NULL, 0, group_done, &again}; /* done when the copy is */
    memset(x->host, 0, BYTES);
    done_init(&again);
    move(x, x->host, x->in);
    ck_assert_int_eq(transport_enqueue(x->t, 0, x->s, &empty), 0);
    ck_assert_msg(status_of(&again) == 0, "%s", again.err.text);
    ck_assert(x->host[0] == value && memcmp(x->host, x->host + 1, BYTES - 1) == 0);
}

START_TEST(a_communicator_of_one_rank_joins_and_sends_to_itself)
{
    struct one x;
    struct done d;
    struct err e = {0};
    struct transport_connect c = {.on_done = connect_done, .arg = &d};
    one_open(&x);
    done_init(&d);
    ck_assert_int_eq(transport_begin(x.t, 1, &e), 0);
    ck_assert_int_eq(transport_connect(x.t, &c), 0);
    ck_assert_msg(status_of(&d) == 0, "%s", d.err.text);
    for (unsigned i = 1; i <= 5; i++)
        send_to_itself(&x, (uint8_t)(0x30 + i));
    ck_assert_uint_eq(transport_counters(x.t, 0).network_sent_bytes, 5 * (uint64_t)BYTES);
    one_close(&x);
}
END_TEST

/* A receive that nobody sends waits on the GPU until the communicator is aborted. */
START_TEST(an_abort_ends_a_group_that_waits_and_the_next_attempt_works)
{
    struct one x;
    struct done d;
    struct err e = {0};
    one_open(&x);
    ck_assert_int_eq(transport_begin(x.t, 1, &e), 0);
    send_to_itself(&x, 1);
    struct transport_message m = {.data = x.in, .bytes = BYTES, .peer = 0, .network = true};
    struct transport_group g = {&m, 1, group_done, &d};
    done_init(&d);
    ck_assert_int_eq(transport_enqueue(x.t, 0, x.s, &g), 0);
    transport_abort(x.t);
    ck_assert_int_eq(status_of(&d), RS_ECANCELED);
    ck_assert(transport_quiesced(x.t));
    ck_assert_msg(transport_begin(x.t, 2, &e) == 0, "%s", e.text);
    send_to_itself(&x, 2);
    one_close(&x);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_communicator_of_one_rank_joins_and_sends_to_itself)                                        \
    X(an_abort_ends_a_group_that_waits_and_the_next_attempt_works)
#include "test/lib/main.h"
