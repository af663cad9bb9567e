/* Clients that go, cancel, do nothing or come in crowds: what is left of them at a gRPC server. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/random.h"
#include "test/lib/best_of.h"
#include "test/lib/rpc_grpc_twin.h"

/* --- clients that go -------------------------------------------------------------------------- */

static size_t resident_bytes(void)
{
    unsigned long total = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fscanf(f, "%lu %lu", &total, &resident), 2);
    (void)fclose(f);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

#if defined(__SANITIZE_THREAD__)
#define N_CANCELLED                                                                                \
    200 /* of each of gRPC's accesses a report is made and suppressed: more takes minutes */
#else
#define N_CANCELLED 2000
#endif

/* Cancelled at every stage; nothing stays. */
START_TEST(thousands_of_cancelled_calls_leave_nothing)
{
    struct twin t;
    uint64_t seed = 3;
    open_grpc(&t);
    size_t before = 0;
    for (int i = 0; i < N_CANCELLED; i++) {
        if (i == N_CANCELLED / 4)
            before = resident_bytes();
        struct peer p = peer_open(&t, i % 2 == 0 ? T "Watch" : T "Sum", 0);
        unsigned stage = (unsigned)(random_next(&seed) % 4);
        if (stage > 0)
            peer_send(&p, "x", 1);
        if (stage > 1 && i % 2 == 0)
            peer_half_close(&p);
        if (stage > 2) {
            void *got = NULL;
            size_t n;
            if (rpc_stream_receive(p.grpc, 1, &got, &n, NULL) == 0)
                mem_free(got);
        }
        peer_close(&p);
    }
    echo_works(&t); /* a busy server may be behind: it has seen all that came before */
    expect_no_calls(&t);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* which keep freed memory */
    ck_assert_uint_lt(resident_bytes(),
                      before + (8U << 20)); /* 1,500 calls of 12 kB would be 18 MB */
#endif
    (void)before;
    echo_works(&t);
    expect_no_calls(&t);
    twin_close(&t);
    ck_assert_uint_eq(seen_count(&t, &t.service.seen.n_opened),
                      seen_count(&t, &t.service.seen.n_ended));
}
END_TEST

/* Says that it has failed, and why. */
static void fail_client(int ready, const char *what, const struct err *e)
{
    (void)fprintf(stderr, "client %d: %s: %s\n", (int)getpid(), what, e->text);
    (void)!write(ready, "f", 1);
    _exit(1);
}

/* A client process: floods itself without reading and holds calls, says so, and waits to be killed.
 */
static void doomed_client(const char *path, int go, int ready)
{
    struct rpc_channel *c = NULL;
    struct rpc_stream *s = NULL;
    struct err e = {0};
    char target[160], byte;
    (void)!read(go, &byte, 1);
    (void)snprintf(target, sizeof target, "unix:%s", path);
    if (rpc_channel_open(target, NULL, &c, &e) != 0)
        fail_client(ready, "open", &e);
    for (int i = 0; i < 20; i++) {
        if (rpc_stream_open(c, i == 0 ? T "Flood" : T "Watch", 0, &s, &e) != 0)
            fail_client(ready, "open a stream", &e);
        /* A flood that nobody reads may have been cut off by the time that this returns. */
        if (rpc_stream_send(s, "x", 1, WAIT_MS, &e) != 0 && i > 0)
            fail_client(ready, "send", &e);
        (void)rpc_stream_half_close(s, NULL);
    }
    (void)!write(ready, "r", 1);
    for (;;)
        (void)pause();
}

/* Killed in the middle of being written to; no SIGPIPE, no call left. */
START_TEST(killed_clients_leave_no_call_and_no_harm)
{
    struct twin t;
    pid_t child[4];
    int go[2], ready[2];
    char byte, path[96];
    memset(&t, 0, sizeof t);
    ck_assert_int_eq(pipe(go), 0);
    ck_assert_int_eq(pipe(ready), 0);
    (void)snprintf(path, sizeof path, "/tmp/rs-killed-%d", (int)getpid());
    for (int i = 0; i < 4; i++) /* before gRPC starts here */
        if ((child[i] = fork()) == 0)
            doomed_client(path, go[0], ready[1]);
    seen_init(&t.service.seen);
    (void)signal(SIGPIPE, SIG_DFL);
    struct rpc_server_options o = twin_options(&t);
    o.unix_path = path;
    o.max_queued_bytes = 1U << 30; /* so that floods fill the socket and wait */
    twin_serve(&t, &o);
    ck_assert_int_eq(write(go[1], "gggg", 4), 4);
    for (int i = 0; i < 4; i++) {
        ck_assert_int_eq(read(ready[0], &byte, 1), 1);
        ck_assert_int_eq(byte, 'r');
    }
    ck_assert(seen_wait(&t, &t.service.seen.n_messages, 4 * 19));
    for (int i = 0; i < 4; i++) {
        ck_assert_int_eq(kill(child[i], SIGKILL), 0);
        ck_assert_int_eq(waitpid(child[i], NULL, 0), child[i]);
    }
    ck_assert(seen_wait(&t, &t.service.seen.n_ended, 4 * 20));
    expect_no_calls(&t);
    twin_stop(&t);
    twin_await_stop(&t);
    remove_lock(path);
}
END_TEST

/* Of the server's pings. An answer may take as long as a thread of a busy machine does to get its turn. */
enum { PING_MS = 500, ANSWER_MS = 2500 };

/* Holds a stream, and for twice as long as it takes to be given up does nothing that has to do with it. */
static void idle_client(const char *path, int go)
{
    struct rpc_channel *c = NULL;
    struct rpc_stream *s = NULL;
    char target[160], byte;
    void *got = NULL;
    size_t n;
    (void)!read(go, &byte, 1);
    (void)snprintf(target, sizeof target, "unix:%s", path);
    if (rpc_channel_open(target, NULL, &c, NULL) != 0 ||
        rpc_stream_open(c, T "Chat", 0, &s, NULL) != 0 ||
        rpc_stream_send(s, "x", 1, WAIT_MS, NULL) != 0)
        _exit(1);
    (void)poll(NULL, 0,
               2 * (PING_MS + ANSWER_MS)); /* the claim is about doing nothing for a while */
    if (rpc_stream_receive(s, WAIT_MS, &got, &n, NULL) != 0 ||
        rpc_stream_receive(s, 0, &got, &n, NULL) != RS_EDEADLINE)
        _exit(2);
    rpc_stream_close(s);
    rpc_channel_close(c);
    _exit(0);
}

START_TEST(an_idle_program_keeps_its_streams)
{
    struct twin t;
    pid_t child;
    int go[2], status = 0;
    char path[96];
    ck_assert_int_eq(pipe(go), 0);
    (void)snprintf(path, sizeof path, "/tmp/rs-idle-%d", (int)getpid());
    if ((child = fork()) ==
        0) /* before gRPC starts here; in a process of its own, where only its threads read */
        idle_client(path, go[0]);
    memset(&t, 0, sizeof t);
    seen_init(&t.service.seen);
    struct rpc_server_options o = twin_options(&t);
    o.unix_path = path;
    o.keepalive_ms = PING_MS;
    o.keepalive_timeout_ms = ANSWER_MS;
    twin_serve(&t, &o);
    ck_assert_int_eq(write(go[1], "g", 1), 1);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    twin_stop(&t);
    twin_await_stop(&t);
    remove_lock(path);
}
END_TEST

/* --- descriptors ------------------------------------------------------------------------------ */

/* Each time it is told: opens n connections, says so, waits, closes them, says so. */
static void crowd(const char *path, int go, int ready, int n)
{
    int fd[128];
    char byte;
    while (read(go, &byte, 1) == 1) {
        for (int i = 0; i < n; i++)
            fd[i] = connect_raw(path);
        (void)!write(ready, "r", 1);
        (void)!read(go, &byte, 1);
        for (int i = 0; i < n; i++)
            (void)close(fd[i]);
        (void)!write(ready, "r", 1);
    }
    _exit(0);
}

static uint64_t cpu_ms(void)
{
    struct rusage u;
    (void)getrusage(RUSAGE_SELF, &u);
    return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000 +
           (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1000;
}

struct crowded {
    const char *path;
    int go, ready;
};

static void tell_crowd(const struct crowded *c)
{
    char byte;
    ck_assert_int_eq(write(c->go, "g", 1), 1);
    ck_assert_int_eq(read(c->ready, &byte, 1), 1);
}

static uint64_t cpu_in_a_second(void *arg)
{
    (void)arg;
    uint64_t before = cpu_ms();
    (void)poll(NULL, 0, 1000); /* a span to measure over, nothing is awaited */
    return (cpu_ms() - before) * 1000000;
}

/* The crowd comes and goes; how long after that somebody is served. */
static uint64_t served_again(void *arg)
{
    const struct crowded *c = arg;
    int spare[8], n_spare = 0; /* the ledger and others still find descriptors */
    char target[96];
    void *reply = NULL;
    size_t n;
    int r = RS_EUNAVAIL;
    tell_crowd(c);
    while (n_spare < 8 && (spare[n_spare] = dup(0)) >= 0)
        n_spare++;
    ck_assert_int_eq(n_spare, 8);
    while (n_spare > 0)
        (void)close(spare[--n_spare]);
    in_time_once(cpu_in_a_second, NULL, 100000000);
    tell_crowd(c);
    uint64_t closed = clock_mono_ns();
    (void)snprintf(target, sizeof target, "unix:%s", c->path);
    while (r == RS_EUNAVAIL &&
           clock_mono_ns() - closed < WAIT_MS * 1000000ULL) { /* a new channel has no back-off */
        struct rpc_channel *channel = NULL;
        ck_assert_int_eq(rpc_channel_open(target, NULL, &channel, NULL), 0);
        r = rpc_call_unary(channel, T "Echo", "x", 1, WAIT_MS, &reply, &n, NULL);
        rpc_channel_close(channel);
    }
    uint64_t took = clock_mono_ns() - closed;
    ck_assert_int_eq(r, 0);
    mem_free(reply);
    return took;
}

START_TEST(a_crowd_beyond_the_descriptors_costs_no_cpu_and_leaves_no_harm)
{
    struct twin t;
    struct rlimit limit = {64, 64};
    int go[2], ready[2];
    pid_t child;
    ck_assert_int_eq(pipe2(go, O_CLOEXEC), 0);
    ck_assert_int_eq(pipe2(ready, O_CLOEXEC), 0);
    char directory[] = "/tmp/rs-crowd-XXXXXX", path[64];
    ck_assert_ptr_nonnull(mkdtemp(directory));
    (void)snprintf(path, sizeof path, "%s/s", directory);
    if ((child = fork()) == 0) {
        (void)close(go[1]); /* its end is ours */
        crowd(path, go[0], ready[1], 100);
    }
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    memset(&t, 0, sizeof t);
    seen_init(&t.service.seen);
    struct rpc_server_options o = twin_options(&t);
    o.unix_path = path;
    twin_serve(&t, &o);
    in_time_once(served_again, &(struct crowded){path, go[1], ready[0]}, 2000000000U);
    (void)close(go[1]);
    twin_stop(&t);
    twin_await_stop(&t);
    remove_lock(path);
    ck_assert_int_eq(rmdir(directory), 0);
    (void)waitpid(child, NULL, 0);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(an_idle_program_keeps_its_streams)                                                           \
    X(thousands_of_cancelled_calls_leave_nothing)                                                  \
    X(killed_clients_leave_no_call_and_no_harm)                                                    \
    X(a_crowd_beyond_the_descriptors_costs_no_cpu_and_leaves_no_harm)

#include "test/lib/main.h"
