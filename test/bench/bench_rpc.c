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
#include <stdio.h>
#include <stdlib.h>

#include "base/err.h"
#include "rpc/rpc.h"
#include "test/lib/bare_grpc.h"

#define ROUNDS  11
#define PATH    "/bench.v1.Echo/Get"
#define WATCH   "/bench.v1.Echo/Watch"
#define N_BYTES 32 /* about a GetCommitted reply */

/* --- ours ------------------------------------------------------------------------------------- */

static void echo(struct rpc_call *call, const void *data, size_t n_bytes)
{
    rpc_call_finish(call, rpc_call_send(call, data, n_bytes), NULL);
}

static const struct rpc_method methods[] = {
    {.path = PATH, .kind = RPC_UNARY, .max_request_bytes = 4096, .on_message = echo},
    {.path = WATCH, .kind = RPC_SERVER_STREAM, .max_request_bytes = 4096},
};

static void serve_ours(const char *path, const char *method, int ready)
{
    (void)method;
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

/* --- measuring -------------------------------------------------------------------------------- */

static const char request[N_BYTES];

static double measure(struct bare_client *c, unsigned n_calls)
{
    return bare_rate(c, PATH, request, sizeof request, sizeof request, n_calls);
}

static void open_watchers(struct bare_client *c, unsigned n)
{
    struct bare_ask *asks = calloc(n == 0 ? 1 : n, sizeof *asks);
    for (unsigned i = 0; i < n && asks != NULL; i++)
        bare_start(c, &asks[i], WATCH, request, sizeof request, false); /* as long as we live */
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

int main(int argc, char **argv)
{
    char directory[] = "/tmp/bench-rpc-XXXXXX", path[2][64], command[64];
    double rate[2][ROUNDS], ratio[ROUNDS];
    struct bare_client client[2], watchers;
    pid_t child[2];
    unsigned n_calls = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : 8000;
    unsigned n_watchers = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 0;
    if (n_calls < BARE_IN_FLIGHT || mkdtemp(directory) == NULL)
        return 2;
    for (int i = 0; i < 2; i++) {
        (void)snprintf(path[i], sizeof path[i], "%s/%d", directory, i);
        child[i] = bare_child(i == 0 ? bare_serve : serve_ours, path[i], PATH);
        if (child[i] < 0)
            return 1;
    }
    grpc_init();
    for (int i = 0; i < 2; i++) {
        bare_open(&client[i], path[i], NULL);
        (void)measure(&client[i], n_calls / 10 < BARE_IN_FLIGHT ? BARE_IN_FLIGHT : n_calls / 10);
    }
    bare_open(&watchers, path[1], NULL);
    open_watchers(&watchers, n_watchers);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < 2; i++)
            rate[i][round] = measure(&client[i], n_calls);
    for (int round = 0; round < ROUNDS; round++)
        ratio[round] = rate[1][round] / rate[0][round];
    for (int i = 0; i < 2; i++) {
        (void)printf("%s median %.0f calls/s, %.1f us of CPU a call\n",
                     i == 0 ? "bare echo: " : "rpc server:", median(rate[i]),
                     bare_end_us(child[i]) / ((ROUNDS + 0.1) * n_calls));
    }
    (void)printf("ratio %.3f with %u in flight, %u watchers (aim 0.8)\n", median(ratio),
                 BARE_IN_FLIGHT, n_watchers);
    (void)snprintf(command, sizeof command, "rm -rf '%s'", directory);
    return system(command) == 0 ? 0 : 1;
}
