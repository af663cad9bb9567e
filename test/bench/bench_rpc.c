/* How much of a bare C core echo's rate our server keeps: 64 unary calls in flight over a Unix
 * socket.
 *
 *     build/bench/bench_rpc [CALLS] [WATCHERS]      default 8000 calls a round, no watchers
 *
 * Two server processes, forked before gRPC starts: the bare one answers on its completion queue's
 * thread, ours goes through loop and handler. The client takes turns between them, eleven rounds
 * each; the ratio is the median of the rounds' ratios, since what else the machine does hits both
 * of a round alike. The servers' own CPU time per call stands beside it. WATCHERS open streams stay
 * on ours while it is measured. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>

#include "base/clock.h"
#include "base/err.h"
#include "rpc/rpc.h"

#define IN_FLIGHT 64
#define ROUNDS    11
#define ARMED     IN_FLIGHT
#define PATH      "/bench.v1.Echo/Get"
#define WATCH     "/bench.v1.Echo/Watch"
#define N_BYTES   32 /* about a GetCommitted reply */

/* --- the bare server
 * ------------------------------------------------------------------------------ */

struct bare_call {
    enum { ARRIVED, ANSWERED } next;
    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_byte_buffer *payload;
    int cancelled;
};

struct bare {
    grpc_server *server;
    grpc_completion_queue *cq;
    void *method;
};

static void bare_arm(struct bare *b, struct bare_call *c)
{
    c->next = ARRIVED;
    grpc_metadata_array_init(&c->metadata);
    (void)grpc_server_request_registered_call(b->server, b->method, &c->call, &c->deadline,
                                              &c->metadata, &c->payload, b->cq, b->cq, c);
}

static void bare_answer(struct bare_call *c)
{
    grpc_op ops[4] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                      {.op = GRPC_OP_SEND_MESSAGE},
                      {.op = GRPC_OP_SEND_STATUS_FROM_SERVER},
                      {.op = GRPC_OP_RECV_CLOSE_ON_SERVER}};
    ops[1].data.send_message.send_message = c->payload;
    ops[2].data.send_status_from_server.status = GRPC_STATUS_OK;
    ops[3].data.recv_close_on_server.cancelled = &c->cancelled;
    c->next = ANSWERED;
    (void)grpc_call_start_batch(c->call, ops, 4, c, NULL);
}

static void bare_done(struct bare *b, struct bare_call *c)
{
    grpc_byte_buffer_destroy(c->payload);
    grpc_metadata_array_destroy(&c->metadata);
    grpc_call_unref(c->call);
    bare_arm(b, c);
}

static void serve_bare(const char *path, int ready)
{
    static struct bare_call calls[ARMED];
    struct bare b;
    char address[128];
    (void)snprintf(address, sizeof address, "unix:%s", path);
    grpc_init();
    b.cq = grpc_completion_queue_create_for_next(NULL);
    b.server = grpc_server_create(NULL, NULL);
    b.method = grpc_server_register_method(b.server, PATH, NULL,
                                           GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
    grpc_server_register_completion_queue(b.server, b.cq, NULL);
    grpc_server_credentials *creds = grpc_insecure_server_credentials_create();
    if (grpc_server_add_http2_port(b.server, address, creds) == 0)
        _exit(1);
    grpc_server_start(b.server);
    for (int i = 0; i < ARMED; i++)
        bare_arm(&b, &calls[i]);
    (void)!write(ready, "r", 1);
    for (;;) {
        grpc_event e = grpc_completion_queue_next(b.cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        struct bare_call *c = e.tag;
        if (c->next == ARRIVED)
            bare_answer(c);
        else
            bare_done(&b, c);
    }
}

/* --- ours
 * ----------------------------------------------------------------------------------------- */

static void echo(struct rpc_call *call, const void *data, size_t n_bytes)
{
    rpc_call_finish(call, rpc_call_send(call, data, n_bytes), NULL);
}

static const struct rpc_method methods[] = {
    {.path = PATH, .kind = RPC_UNARY, .max_request_bytes = 4096, .on_message = echo},
    {.path = WATCH, .kind = RPC_SERVER_STREAM, .max_request_bytes = 4096},
};

static void serve_ours(const char *path, int ready)
{
    uv_loop_t loop;
    struct rpc_server *s;
    struct err e = {0};
    struct rpc_server_options o = {.unix_path = path};
    (void)uv_loop_init(&loop);
    if (rpc_server_start(&loop, &o, methods, 2, &s, &e) != 0) {
        (void)fprintf(stderr, "bench_rpc: %s\n", e.text);
        _exit(1);
    }
    (void)!write(ready, "r", 1);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    _exit(0);
}

/* --- client
 * --------------------------------------------------------------------------------------- */

struct client {
    grpc_channel *channel;
    grpc_completion_queue *cq;
};

struct ask {
    grpc_call *call;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *reply;
    grpc_status_code status;
    grpc_slice text;
};

static void client_open(struct client *c, const char *path)
{
    char target[128];
    grpc_channel_credentials *creds = grpc_insecure_credentials_create();
    (void)snprintf(target, sizeof target, "unix:%s", path);
    c->channel = grpc_channel_create(target, creds, NULL);
    c->cq = grpc_completion_queue_create_for_next(NULL);
    grpc_channel_credentials_release(creds);
}

static void ask_start(struct client *c, struct ask *a, const char *method)
{
    char bytes[N_BYTES] = {0};
    grpc_slice slice = grpc_slice_from_copied_buffer(bytes, sizeof bytes);
    grpc_byte_buffer *request = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_op ops[6] = {
        {.op = GRPC_OP_SEND_INITIAL_METADATA},  {.op = GRPC_OP_SEND_MESSAGE},
        {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}, {.op = GRPC_OP_RECV_INITIAL_METADATA},
        {.op = GRPC_OP_RECV_MESSAGE},           {.op = GRPC_OP_RECV_STATUS_ON_CLIENT}};
    memset(a, 0, sizeof *a);
    a->text = grpc_empty_slice();
    grpc_metadata_array_init(&a->initial);
    grpc_metadata_array_init(&a->trailing);
    a->call = grpc_channel_create_call(c->channel, NULL, GRPC_PROPAGATE_DEFAULTS, c->cq,
                                       grpc_slice_from_static_string(method), NULL,
                                       gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    ops[1].data.send_message.send_message = request;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &a->initial;
    ops[4].data.recv_message.recv_message = &a->reply;
    ops[5].data.recv_status_on_client.trailing_metadata = &a->trailing;
    ops[5].data.recv_status_on_client.status = &a->status;
    ops[5].data.recv_status_on_client.status_details = &a->text;
    (void)grpc_call_start_batch(a->call, ops, 6, a, NULL);
    grpc_byte_buffer_destroy(request);
    grpc_slice_unref(slice);
}

static void ask_end(struct ask *a)
{
    if (a->status != GRPC_STATUS_OK || a->reply == NULL ||
        grpc_byte_buffer_length(a->reply) != N_BYTES) {
        (void)fprintf(stderr, "bench_rpc: call failed with status %d\n", (int)a->status);
        exit(1);
    }
    grpc_byte_buffer_destroy(a->reply);
    grpc_metadata_array_destroy(&a->initial);
    grpc_metadata_array_destroy(&a->trailing);
    grpc_slice_unref(a->text);
    grpc_call_unref(a->call);
}

/* Calls per second. */
static double measure(struct client *c, unsigned n_calls)
{
    static struct ask asks[IN_FLIGHT];
    unsigned started = 0, ended = 0;
    uint64_t before = clock_mono_ns();
    while (started < IN_FLIGHT)
        ask_start(c, &asks[started++], PATH);
    while (ended < n_calls) {
        grpc_event e = grpc_completion_queue_next(c->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        ask_end(e.tag);
        ended++;
        if (started < n_calls) {
            ask_start(c, e.tag, PATH);
            started++;
        }
    }
    return n_calls * 1e9 / (double)(clock_mono_ns() - before);
}

static void open_watchers(struct client *c, unsigned n)
{
    struct ask *asks = calloc(n == 0 ? 1 : n, sizeof *asks);
    for (unsigned i = 0; i < n && asks != NULL; i++)
        ask_start(c, &asks[i], WATCH); /* for the life of the process */
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double values[ROUNDS])
{
    qsort(values, ROUNDS, sizeof values[0], by_size);
    return values[ROUNDS / 2];
}

/* Ends the child: all the CPU time that it used. */
static double cpu_us(pid_t child)
{
    struct rusage u = {0};
    (void)kill(child, SIGKILL);
    (void)wait4(child, NULL, 0, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e6 +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static pid_t serve(void (*server)(const char *path, int ready), const char *path)
{
    int ready[2];
    char byte;
    if (pipe(ready) != 0)
        return -1;
    pid_t child = fork();
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        server(path, ready[1]);
    }
    (void)close(ready[1]);
    bool up = read(ready[0], &byte, 1) == 1;
    (void)close(ready[0]);
    return up ? child : -1;
}

int main(int argc, char **argv)
{
    char directory[] = "/tmp/bench-rpc-XXXXXX", path[2][64], command[64];
    double rate[2][ROUNDS], ratio[ROUNDS];
    struct client client[2], watchers;
    pid_t child[2];
    unsigned n_calls = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : 8000;
    unsigned n_watchers = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 0;
    if (n_calls < IN_FLIGHT || mkdtemp(directory) == NULL)
        return 2;
    for (int i = 0; i < 2; i++) {
        (void)snprintf(path[i], sizeof path[i], "%s/%d", directory, i);
        child[i] = serve(i == 0 ? serve_bare : serve_ours, path[i]);
        if (child[i] < 0)
            return 1;
    }
    grpc_init();
    for (int i = 0; i < 2; i++) {
        client_open(&client[i], path[i]);
        (void)measure(&client[i], n_calls / 10 < IN_FLIGHT ? IN_FLIGHT : n_calls / 10);
    }
    client_open(&watchers, path[1]);
    open_watchers(&watchers, n_watchers);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < 2; i++)
            rate[i][round] = measure(&client[i], n_calls);
    for (int round = 0; round < ROUNDS; round++)
        ratio[round] = rate[1][round] / rate[0][round];
    for (int i = 0; i < 2; i++) {
        (void)printf("%s median %.0f calls/s, %.1f us of CPU a call\n",
                     i == 0 ? "bare echo: " : "rpc server:", median(rate[i]),
                     cpu_us(child[i]) / ((ROUNDS + 0.1) * n_calls));
    }
    (void)printf("ratio %.3f with %u in flight, %u watchers (aim 0.8)\n", median(ratio), IN_FLIGHT,
                 n_watchers);
    (void)snprintf(command, sizeof command, "rm -rf '%s'", directory);
    return system(command) == 0 ? 0 : 1;
}
