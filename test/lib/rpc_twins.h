/* One small service, and a peer to call it, over gRPC (own loop thread, blocking client) and over
 * the in-memory twin: what the contract test of daemon/rpc is written against. Header only; one
 * test program includes it. */
#ifndef RS_TEST_RPC_TWINS_H
#define RS_TEST_RPC_TWINS_H

#include <check.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "rpc/rpc.h"
#include "rpc/rpc_client.h"
#include "rpc/rpc_mem.h"

#define WAIT_MS 60000 /* a guard against hangs */
/* A busy machine may take seconds in which nobody answers a ping: of tests that are not about that. */
#define PATIENT_MS 60000

/* --- the service ------------------------------------------------------------------------------ */

/* What handlers saw. Written on the loop thread, read by the test under the mutex. */
struct seen {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    unsigned n_opened, n_ended, n_half_closed, n_messages;
    int last_reason;
    int flood_result; /* of the send that failed */
    unsigned n_flooded;
    int late_send; /* of a send after finish */
};

struct service {
    struct seen seen;
    struct rpc_call *held[64]; /* loop thread: unary calls that wait for release */
    unsigned n_held;
};

static void note(struct service *v, unsigned *counter)
{
    (void)pthread_mutex_lock(&v->seen.mutex);
    ++*counter;
    (void)pthread_cond_broadcast(&v->seen.changed);
    (void)pthread_mutex_unlock(&v->seen.mutex);
}

static struct service *service_of(const struct rpc_call *call)
{
    return rpc_call_context(call);
}

static void on_open(struct rpc_call *call)
{
    struct service *v = service_of(call);
    note(v, &v->seen.n_opened);
}

static void on_end(struct rpc_call *call, int reason)
{
    struct service *v = service_of(call);
    (void)pthread_mutex_lock(&v->seen.mutex);
    v->seen.last_reason = reason;
    (void)pthread_mutex_unlock(&v->seen.mutex);
    for (unsigned i = 0; i < v->n_held; i++)
        if (v->held[i] == call)
            v->held[i] = v->held[--v->n_held];
    mem_free(rpc_call_arg(call));
    note(v, &v->seen.n_ended);
}

static void echo(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct service *v = service_of(call);
    int r = rpc_call_send(call, data, n_bytes);
    rpc_call_finish(call, r, NULL);
    int late = rpc_call_send(call, data, n_bytes);
    (void)pthread_mutex_lock(&v->seen.mutex);
    v->seen.late_send = late;
    (void)pthread_mutex_unlock(&v->seen.mutex);
}

static void size_of(struct rpc_call *call, const void *data, size_t n_bytes)
{
    char text[32];
    (void)data;
    int n = snprintf(text, sizeof text, "%zu", n_bytes);
    rpc_call_finish(call, rpc_call_send(call, text, (size_t)n), NULL);
}

static void count(struct rpc_call *call, const void *data, size_t n_bytes)
{
    unsigned n = 0;
    int r = n_bytes == sizeof n ? 0 : RS_EINVAL;
    if (r == 0)
        memcpy(&n, data, sizeof n);
    for (unsigned i = 0; i < n && r == 0; i++)
        r = rpc_call_send(call, &i, sizeof i);
    rpc_call_finish(call, r, NULL);
}

static void sum_open(struct rpc_call *call)
{
    uint64_t *total = mem_zalloc(sizeof *total);
    on_open(call);
    rpc_call_set_arg(call, total);
    if (total == NULL)
        rpc_call_finish(call, RS_ENOMEM, NULL);
}

static void sum_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct service *v = service_of(call);
    uint64_t *total = rpc_call_arg(call);
    for (size_t i = 0; i < n_bytes; i++)
        *total += ((const uint8_t *)data)[i];
    note(v, &v->seen.n_messages);
}

static void sum_half_close(struct rpc_call *call)
{
    struct service *v = service_of(call);
    note(v, &v->seen.n_half_closed);
    rpc_call_finish(call, rpc_call_send(call, rpc_call_arg(call), sizeof(uint64_t)), NULL);
}

static void chat_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    if (rpc_call_send(call, data, n_bytes) == RS_ENOMEM)
        rpc_call_finish(call, RS_ENOMEM, NULL);
}

static void chat_half_close(struct rpc_call *call)
{
    rpc_call_finish(call, 0, NULL);
}

/* Holds unary calls until release_held. */
static void hold(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct service *v = service_of(call);
    (void)data, (void)n_bytes;
    if (v->n_held == sizeof v->held / sizeof *v->held)
        rpc_call_finish(call, RS_EEXHAUSTED, NULL);
    else
        v->held[v->n_held++] = call;
    note(v, &v->seen.n_messages);
}

static inline void release_held(void *arg)
{
    struct service *v = arg;
    for (unsigned i = 0; i < v->n_held; i++) {
        (void)rpc_call_send(v->held[i], "late", 4);
        rpc_call_finish(v->held[i], 0, NULL);
    }
    v->n_held = 0;
}

static void ignore(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct service *v = service_of(call);
    (void)data, (void)n_bytes;
    note(v, &v->seen.n_messages);
}

/* Sends until it is told that nobody reads. */
static void flood(struct rpc_call *call, const void *data, size_t n_bytes)
{
    static char block[16384];
    struct service *v = service_of(call);
    unsigned n = 0;
    int r;
    (void)data, (void)n_bytes;
    while ((r = rpc_call_send(call, block, sizeof block)) == 0)
        n++;
    (void)pthread_mutex_lock(&v->seen.mutex);
    v->seen.flood_result = r;
    v->seen.n_flooded = n;
    (void)pthread_mutex_unlock(&v->seen.mutex);
}

static void fail_with_details(struct rpc_call *call, const void *data, size_t n_bytes)
{
    rpc_call_finish_details(call, RS_EPRECOND,
                            "tensor 'w': gr\xc3\xb6\xc3\x9f"
                            "e",
                            data, n_bytes);
}

static void refuse(struct rpc_call *call)
{
    on_open(call);
    rpc_call_finish(call, RS_EPERM, "not you");
}

static void who(struct rpc_call *call, const void *data, size_t n_bytes)
{
    const struct rpc_identity *id = rpc_call_identity(call);
    char text[384];
    (void)data, (void)n_bytes;
    int n = snprintf(text, sizeof text, "%d %llu %u %d%s%s", (int)id->kind,
                     (unsigned long long)id->client, id->uid, id->pid,
                     id->name[0] == '\0' ? "" : " ", id->name);
    rpc_call_finish(call, rpc_call_send(call, text, (size_t)n), NULL);
}

/* Answers with what came under reshard-model, "-" without. */
static void meta(struct rpc_call *call, const void *data, size_t n_bytes)
{
    const char *value = rpc_call_metadata(call, "reshard-model");
    (void)data, (void)n_bytes;
    value = value == NULL ? "-" : value;
    rpc_call_finish(call, rpc_call_send(call, value, strlen(value)), NULL);
}

static void time_left(struct rpc_call *call, const void *data, size_t n_bytes)
{
    uint64_t deadline = rpc_call_deadline_ns(call);
    uint64_t left = deadline == UINT64_MAX ? deadline : deadline - clock_mono_ns();
    (void)data, (void)n_bytes;
    rpc_call_finish(call, rpc_call_send(call, &left, sizeof left), NULL);
}

#define METHOD(p, k, max)                                                                          \
    .path = "/test.v1.Twins/" p, .kind = k, .max_request_bytes = max, .on_end = on_end
static const struct rpc_method methods[] = {
    {METHOD("Echo", RPC_UNARY, 65536), .on_open = on_open, .on_message = echo},
    {METHOD("Size", RPC_UNARY, 4U << 20), .on_open = on_open, .on_message = size_of},
    {METHOD("Count", RPC_SERVER_STREAM, 64), .on_open = on_open, .on_message = count},
    {METHOD("Sum", RPC_CLIENT_STREAM, 65536), .on_open = sum_open, .on_message = sum_message,
     .on_half_close = sum_half_close},
    {METHOD("Chat", RPC_BIDI, 65536), .on_open = on_open, .on_message = chat_message,
     .on_half_close = chat_half_close},
    {METHOD("Hold", RPC_UNARY, 64), .on_open = on_open, .on_message = hold},
    {METHOD("Watch", RPC_SERVER_STREAM, 64), .on_open = on_open, .on_message = ignore},
    {METHOD("Flood", RPC_SERVER_STREAM, 64), .on_open = on_open, .on_message = flood},
    {METHOD("Fail", RPC_UNARY, 64), .on_open = on_open, .on_message = fail_with_details},
    {METHOD("Refuse", RPC_BIDI, 64), .on_open = refuse, .on_message = ignore},
    {METHOD("Who", RPC_UNARY, 64), .on_open = on_open, .on_message = who},
    {METHOD("Meta", RPC_UNARY, 64), .on_open = on_open, .on_message = meta},
    {METHOD("TimeLeft", RPC_UNARY, 64), .on_open = on_open, .on_message = time_left},
};
#undef METHOD
#define N_METHODS (sizeof methods / sizeof *methods)

static bool identify(void *context, const char *token, struct rpc_identity *ret)
{
    (void)context;
    if (strcmp(token, "token-of-7") != 0)
        return false;
    *ret = (struct rpc_identity){.kind = RPC_LOCAL, .client = 7, .uid = 1000, .pid = 4242};
    return true;
}

/* --- the server, one of two ------------------------------------------------------------------- */

struct twin {
    bool in_memory;
    struct service service;
    struct rpc_mem *mem;
    /* gRPC: */
    char directory[64];
    char path[96];
    struct rpc_server *server;
    uv_loop_t loop;
    uv_async_t command;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    void (*fn)(void *arg); /* to run on the loop thread */
    void *arg;
    bool stop_asked; /* nothing may be run on the loop any more: it ends when the stop has ended */
    unsigned n_done;
    struct rpc_channel *channel;
};

static void deadline_in(struct timespec *t, unsigned ms)
{
    (void)clock_gettime(CLOCK_REALTIME, t);
    t->tv_sec += ms / 1000;
    t->tv_nsec += (long)(ms % 1000) * 1000000;
    t->tv_sec += t->tv_nsec / 1000000000;
    t->tv_nsec %= 1000000000;
}

static void run_command(uv_async_t *async)
{
    struct twin *t = async->data;
    (void)pthread_mutex_lock(&t->mutex);
    void (*fn)(void *arg) = t->fn;
    void *arg = t->arg;
    (void)pthread_mutex_unlock(&t->mutex);
    if (fn == NULL)
        return;
    fn(arg);
    (void)pthread_mutex_lock(&t->mutex);
    t->fn = NULL;
    (void)pthread_cond_broadcast(&t->changed);
    (void)pthread_mutex_unlock(&t->mutex);
}

/* Runs fn where handlers run, and waits for it. */
static inline void twin_run(struct twin *t, void (*fn)(void *arg), void *arg)
{
    if (t->in_memory) {
        fn(arg);
        rpc_mem_run(t->mem);
        return;
    }
    (void)pthread_mutex_lock(&t->mutex);
    t->fn = fn;
    t->arg = arg;
    (void)uv_async_send(&t->command);
    while (t->fn != NULL)
        (void)pthread_cond_wait(&t->changed, &t->mutex);
    (void)pthread_mutex_unlock(&t->mutex);
}

static void *run_loop(void *arg)
{
    struct twin *t = arg;
    (void)uv_run(&t->loop, UV_RUN_DEFAULT);
    return NULL;
}

static void seen_init(struct seen *s)
{
    memset(s, 0, sizeof *s);
    (void)pthread_mutex_init(&s->mutex, NULL);
    (void)pthread_cond_init(&s->changed, NULL);
}

static struct rpc_server_options twin_options(struct twin *t)
{
    return (struct rpc_server_options){
        .identify = identify, .context = &t->service, .keepalive_timeout_ms = PATIENT_MS};
}

/* The server and its loop's thread, without a channel: at options->unix_path and tcp_address. */
static inline void twin_serve(struct twin *t, const struct rpc_server_options *options)
{
    struct err e = {0};
    (void)pthread_mutex_init(&t->mutex, NULL);
    (void)pthread_cond_init(&t->changed, NULL);
    ck_assert_int_eq(uv_loop_init(&t->loop), 0);
    t->command.data = t;
    ck_assert_int_eq(uv_async_init(&t->loop, &t->command, run_command), 0);
    int r = rpc_server_start(&t->loop, options, methods, N_METHODS, &t->server, &e);
    ck_assert_msg(r == 0, "%s", err_text(&e, r));
    ck_assert_int_eq(pthread_create(&t->thread, NULL, run_loop, t), 0);
}

static inline void twin_open_grpc(struct twin *t, const struct rpc_server_options *options,
                                  const char *token)
{
    struct err e = {0};
    struct rpc_server_options o = *options;
    (void)snprintf(t->directory, sizeof t->directory, "/tmp/rs-rpc-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(t->directory));
    (void)snprintf(t->path, sizeof t->path, "%s/a b.sock", t->directory);
    o.unix_path = t->path;
    twin_serve(t, &o);
    char target[128];
    (void)snprintf(target, sizeof target, "unix:%s", t->path);
    ck_assert_int_eq(rpc_channel_open(target, token, &t->channel, &e), 0);
}

static inline void twin_open_with(struct twin *t, bool in_memory,
                                  const struct rpc_server_options *options, const char *token)
{
    t->in_memory = in_memory;
    if (!in_memory)
        twin_open_grpc(t, options, token);
    else
        ck_assert_int_eq(rpc_mem_new(options, methods, N_METHODS, &t->mem, NULL), 0);
}

static inline void twin_open(struct twin *t, bool in_memory)
{
    memset(t, 0, sizeof *t);
    seen_init(&t->service.seen);
    struct rpc_server_options o = twin_options(t);
    twin_open_with(t, in_memory, &o, NULL);
}

static void on_stopped(void *arg)
{
    struct twin *t = arg;
    uv_close((uv_handle_t *)&t->command, NULL);
    (void)pthread_mutex_lock(&t->mutex);
    t->n_done++;
    (void)pthread_cond_broadcast(&t->changed);
    (void)pthread_mutex_unlock(&t->mutex);
}

static void stop_command(void *arg)
{
    struct twin *t = arg;
    rpc_server_stop(t->server, WAIT_MS, on_stopped, t);
}

/* Asks for the stop; it goes on in the background. */
static inline void twin_stop(struct twin *t)
{
    t->stop_asked = true;
    if (t->in_memory)
        rpc_mem_stop(t->mem);
    else
        twin_run(t, stop_command, t);
}

static inline void twin_await_stop(struct twin *t)
{
    if (t->in_memory) {
        rpc_mem_cancel_all(t->mem);
        return;
    }
    (void)pthread_join(t->thread, NULL);
    ck_assert_uint_eq(t->n_done, 1);
    ck_assert_int_eq(uv_loop_close(&t->loop), 0);
}

/* After twin_stop or without it. */
static inline void twin_close(struct twin *t)
{
    if (t->in_memory) {
        rpc_mem_free(t->mem);
        return;
    }
    rpc_channel_close(t->channel);
    if (!t->stop_asked)
        twin_stop(t);
    twin_await_stop(t);
    ck_assert_int_ne(access(t->path, F_OK), 0);
    char command[128];
    (void)snprintf(command, sizeof command, "%s.lock", t->path);
    (void)unlink(command);
    (void)rmdir(t->directory);
}

/* Waits until a counter of `seen` reaches n; false after WAIT_MS. */
static inline bool seen_wait(struct twin *t, const unsigned *counter, unsigned n)
{
    struct seen *s = &t->service.seen;
    struct timespec until;
    int r = 0;
    deadline_in(&until, t->in_memory ? 0 : WAIT_MS);
    (void)pthread_mutex_lock(&s->mutex);
    while (*counter < n && r == 0)
        r = pthread_cond_timedwait(&s->changed, &s->mutex, &until);
    bool reached = *counter >= n;
    (void)pthread_mutex_unlock(&s->mutex);
    return reached;
}

/* What handlers wrote, read as they write it. */
static inline unsigned seen_count(struct twin *t, const unsigned *counter)
{
    (void)pthread_mutex_lock(&t->service.seen.mutex);
    unsigned n = *counter;
    (void)pthread_mutex_unlock(&t->service.seen.mutex);
    return n;
}

static inline int seen_result(struct twin *t, const int *result)
{
    (void)pthread_mutex_lock(&t->service.seen.mutex);
    int r = *result;
    (void)pthread_mutex_unlock(&t->service.seen.mutex);
    return r;
}

static inline int last_reason(struct twin *t)
{
    return seen_result(t, &t->service.seen.last_reason);
}

/* --- the peer --------------------------------------------------------------------------------- */

struct peer {
    struct twin *t;
    struct rpc_mem_call *mem;
    struct rpc_stream *grpc;
};

static inline struct peer peer_open(struct twin *t, const char *path, uint32_t timeout_ms)
{
    struct peer p = {.t = t};
    uint64_t deadline = timeout_ms == 0 ? UINT64_MAX : clock_mono_ns() + timeout_ms * 1000000ULL;
    if (t->in_memory)
        ck_assert_ptr_nonnull(p.mem = rpc_mem_open(t->mem, path, NULL, deadline));
    else
        ck_assert_int_eq(rpc_stream_open(t->channel, path, timeout_ms, &p.grpc, NULL), 0);
    return p;
}

static inline void peer_send(struct peer *p, const void *data, size_t n_bytes)
{
    if (p->mem != NULL)
        rpc_mem_send(p->mem, data, n_bytes);
    else
        (void)rpc_stream_send(p->grpc, data, n_bytes, WAIT_MS, NULL);
}

static inline void peer_half_close(struct peer *p)
{
    if (p->mem != NULL)
        rpc_mem_half_close(p->mem);
    else
        (void)rpc_stream_half_close(p->grpc, NULL);
}

static inline int peer_receive(struct peer *p, void **ret, size_t *ret_n_bytes, struct err *e)
{
    return p->mem != NULL ? rpc_mem_receive(p->mem, ret, ret_n_bytes, e)
                          : rpc_stream_receive(p->grpc, WAIT_MS, ret, ret_n_bytes, e);
}

static inline void peer_cancel(struct peer *p)
{
    if (p->mem != NULL)
        rpc_mem_cancel(p->mem);
    else
        rpc_stream_cancel(p->grpc);
}

/* The deadline given at open passes. */
static inline void peer_let_expire(struct peer *p)
{
    if (p->mem != NULL)
        rpc_mem_expire(p->mem);
}

static inline void peer_close(struct peer *p)
{
    rpc_mem_close(p->mem);
    rpc_stream_close(p->grpc);
}

/* The whole of an unary call or a server stream's request. */
static inline struct peer peer_ask(struct twin *t, const char *path, const void *data,
                                   size_t n_bytes, uint32_t timeout_ms)
{
    struct peer p = peer_open(t, path, timeout_ms);
    peer_send(&p, data, n_bytes);
    peer_half_close(&p);
    return p;
}

/* The next message must be exactly these bytes. */
static inline void expect_message(struct peer *p, const void *data, size_t n_bytes)
{
    void *got = NULL;
    size_t n = 0;
    struct err e = {0};
    int r = peer_receive(p, &got, &n, &e);
    ck_assert_msg(r == 0, "receive: %s", err_text(&e, r));
    ck_assert_uint_eq(n, n_bytes);
    ck_assert(n == 0 || memcmp(got, data, n) == 0);
    mem_free(got);
}

/* No message more, and this end; the text is in e. */
static inline void expect_end(struct peer *p, int code, struct err *e)
{
    void *got = NULL;
    size_t n = 0;
    int r = peer_receive(p, &got, &n, e);
    mem_free(got);
    ck_assert_msg(r == (code == 0 ? 1 : code), "ended with %d (%s), not %d", r,
                  r < 0 ? err_text(e, r) : "no error", code);
}

#endif
