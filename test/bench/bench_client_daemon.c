/* The real daemon, both processes, as its clients find it.
 *
 *   bench_client_daemon [--json] [ROW …]          expects reshardd in the folder above its own
 *
 *   empty_commit    submit → commit of a model without elements, less the fsyncs that the daemon
 *                   made meanwhile (counted and timed inside it by fsync_clock.so)
 *   get_committed   rate of GetCommitted, 64 in flight and 2,000 WatchCommitted streams open,
 *                   against a bare C core echo of the same request; rounds in turn, the median of
 *                   their ratios; and commits while 1,000 long polls wait for each of them,
 *                   alone and while the large model attaches and is refitted (CASES.md E15)
 *   daemon_memory   both processes with 70,000 tensors on 8 local workers, attached, through two
 *                   refits: the most that they ever had, by share (Pss), clients' segments apart
 *
 * Medians: the machine may be busy with other work. */
#include <limits.h>
#include <math.h>
#include <pthread.h>

#include "base/buf.h"
#include "base/mem.h"
#include "client/reshard.h"
#include "test/lib/bare_grpc.h"
#include "test/lib/bench_daemon.h"
#include "test/lib/bench_rows.h"

enum {
    EMPTY_VERSIONS = 200,
    EMPTY_WARM = 10,
    ROUNDS = 61, /* short ones: both of a pair find the machine as busy */
    CALLS = 1500,
    WATCHERS = 2000,
    HERD = 1000,
    HERD_VERSIONS = 50,
    HERD_MOST_VERSIONS = 2000,
    LARGE_TENSORS = 70000,
    LARGE_SIDE = 4, /* workers of each side */
    LARGE_REFITS = 2,
    MAX_PINGS = 1 << 20,
    WAIT_MS = 120000
};

#define GET   "/reshard.v1.Refit/GetCommitted"
#define WATCH "/reshard.v1.Refit/WatchCommitted"

#define OK(call)                                                                                   \
    do {                                                                                           \
        struct reshard_error ok_error = {0};                                                       \
        int ok_r = (call);                                                                         \
        if (ok_r != 0)                                                                             \
            bench_die("%s: %s: %s", #call, reshard_error_name(ok_r), ok_error.text);               \
    } while (0)

struct bench {
    struct row_table table;
    char build[PATH_MAX];
    char **wanted;
    int n_wanted;
    pid_t echo;
    char echo_folder[64], echo_socket[96];
};

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts; q of 0 … 1. */
static double quantile(double *values, size_t n, double q)
{
    qsort(values, n, sizeof *values, by_size);
    return values[(size_t)(q * (double)(n - 1) + 0.5)];
}

static double seconds_since(uint64_t began)
{
    return (double)(clock_mono_ns() - began) / 1e9;
}

/* --- one worker --- */

struct peer {
    struct reshard_client *client;
    struct reshard_layout *layout;
    struct reshard_segment *segment[2]; /* live, shadow */
    struct reshard_worker *worker;
};

static void peer_attach(struct peer *p, const char *socket_path, const char *model,
                        const char *json, enum reshard_side side, uint32_t rank, uint32_t device,
                        enum reshard_receive receive)
{
    struct reshard_piece *pieces[2] = {NULL, NULL};
    size_t n[2] = {0, 0};
    uint64_t end = 0;
    OK(reshard_connect(socket_path, WAIT_MS, &p->client, &ok_error));
    OK(reshard_layout_from_json(json, strlen(json), &p->layout, &ok_error));
    OK(reshard_pieces_dense(p->layout, rank, NULL, 0, 0, NULL, NULL, &end, &ok_error));
    for (int k = 0; k < (receive == RESHARD_RECEIVE_STAGED ? 2 : 1); k++) {
        OK(reshard_segment_new(p->client, end > 0 ? end : 1, 0, &p->segment[k], &ok_error));
        OK(reshard_pieces_dense(p->layout, rank, p->segment[k], 0, 0, &pieces[k], &n[k], &end,
                                &ok_error));
    }
    struct reshard_attach a = {.model = model,
                               .side = side,
                               .layout = p->layout,
                               .rank = rank,
                               .device = device,
                               .receive = receive,
                               .accept_automatically = side == RESHARD_DESTINATION,
                               .live = pieces[0],
                               .n_live = n[0],
                               .shadow = pieces[1],
                               .n_shadow = n[1]};
    OK(reshard_attach(p->client, &a, WAIT_MS, &p->worker, &ok_error));
    reshard_pieces_free(pieces[0]);
    reshard_pieces_free(pieces[1]);
}

static void peer_close(struct peer *p)
{
    reshard_close(p->client);
    reshard_layout_free(p->layout);
}

/* --- a model of nothing --- */

#define EMPTY_JSON(name)                                                                           \
    "{\"name\": \"" name "\", \"ranks\": 1, \"meshes\": [{\"name\": \"m\", \"shape\": [1], "       \
    "\"ranks\": [0]}], \"tensors\": [{\"name\": \"w\", \"shape\": [0, 16], \"dtype\": "            \
    "\"bfloat16\", \"mesh\": \"m\", \"placements\": [\"Replicate\"]}]}"

struct empty {
    struct peer source, destination;
};

static void empty_start(struct empty *x, const char *socket_path)
{
    peer_attach(&x->source, socket_path, "empty", EMPTY_JSON("train"), RESHARD_SOURCE, 0, 0,
                RESHARD_RECEIVE_NONE);
    peer_attach(&x->destination, socket_path, "empty", EMPTY_JSON("rollout"), RESHARD_DESTINATION,
                0, 1, RESHARD_RECEIVE_STAGED);
}

/* Seconds from submit to commit, as the trainer sees it. */
static double empty_refit(struct empty *x, uint64_t version)
{
    struct reshard_submit options = {.release_at = RESHARD_RELEASE_DEFAULT};
    OK(reshard_publish(x->source.worker, version, NULL, 0, 0, &ok_error));
    uint64_t began = clock_mono_ns();
    OK(reshard_submit(x->source.client, "empty", version, &options, 0, NULL, &ok_error));
    OK(reshard_wait(x->source.client, "empty", version, RESHARD_UNTIL_COMMITTED, NULL, NULL,
                    WAIT_MS, NULL, &ok_error));
    return seconds_since(began);
}

/* Out of the way of the next version. */
static void empty_done(struct empty *x, uint64_t version)
{
    OK(reshard_skip(x->destination.worker, version, 0, &ok_error));
}

static void empty_stop(struct empty *x)
{
    peer_close(&x->source);
    peer_close(&x->destination);
}

static void empty_commit(struct bench *b)
{
    struct bench_daemon d;
    struct empty x = {0};
    static double wall[EMPTY_VERSIONS], sync[EMPTY_VERSIONS], net[EMPTY_VERSIONS];
    uint64_t n_syncs = 0;
    bench_daemon_start(&d, b->build, "[devices]\ndevices = 2\n");
    empty_start(&x, d.socket);
    for (uint64_t v = 1; v <= EMPTY_WARM + EMPTY_VERSIONS; v++) {
        uint64_t calls = d.fsyncs->n_calls, ns = d.fsyncs->ns;
        double s = empty_refit(&x, v);
        if (v > EMPTY_WARM) {
            size_t i = v - EMPTY_WARM - 1;
            n_syncs += d.fsyncs->n_calls - calls;
            wall[i] = s * 1e3;
            sync[i] = (double)(d.fsyncs->ns - ns) / 1e6;
            net[i] = wall[i] - sync[i];
        }
        empty_done(&x, v);
    }
    if (n_syncs == 0)
        bench_die("the daemon made no fsync: fsync_clock.so is not in it, or commits don't last");
    empty_stop(&x);
    bench_daemon_stop(&d);
    struct row *row = add_row(&b->table, "empty_commit", quantile(net, EMPTY_VERSIONS, 0.5), "ms",
                              "fsyncs alone", 0);
    row->ratio = quantile(wall, EMPTY_VERSIONS, 0.5) / quantile(sync, EMPTY_VERSIONS, 0.5);
    set_aim(row, 10, false);
    (void)snprintf(
        row->note, sizeof row->note,
        "median of %d versions, one daemon, less its own fsyncs (%.1f a version, %.2f ms); p99 "
        "%.2f, most %.2f ms; fsyncs included: median %.2f, most %.2f ms",
        EMPTY_VERSIONS, (double)n_syncs / EMPTY_VERSIONS, quantile(sync, EMPTY_VERSIONS, 0.5),
        quantile(net, EMPTY_VERSIONS, 0.99), quantile(net, EMPTY_VERSIONS, 1),
        quantile(wall, EMPTY_VERSIONS, 0.5), quantile(wall, EMPTY_VERSIONS, 1));
}

/* --- pollers and watchers --- */

/* GetCommittedRequest and WatchCommittedRequest of model "empty", as bytes: field 1, a string. */
static const uint8_t ask_empty[] = {0x0a, 5, 'e', 'm', 'p', 't', 'y'};

/* Opens n streams and waits until each has had its first message. */
static void open_watchers(struct bare_client *c, struct bare_ask *asks, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        bare_start(c, &asks[i], WATCH, ask_empty, sizeof ask_empty, true);
    for (unsigned i = 0; i < n; i++) {
        grpc_event e = grpc_completion_queue_next(c->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        struct bare_ask *a = e.tag;
        if (a->reply == NULL)
            bench_die("a watcher got no version");
    }
}

static void get_committed(struct bench *b)
{
    struct bench_daemon d;
    struct empty x = {0};
    struct bare_client clients[2], watchers;
    char token[MEMORY_SOCKET_TOKEN_BYTES];
    double rate[2][ROUNDS], ratio[ROUNDS], cpu[2] = {0, 0};
    struct bare_ask *asks = calloc(WATCHERS, sizeof *asks);
    bench_daemon_start(&d, b->build, "[devices]\ndevices = 2\n");
    empty_start(&x, d.socket);
    (void)empty_refit(&x, 1);
    bench_hello(d.socket, token);
    bare_open(&clients[0], b->echo_socket, token);
    bare_open(&clients[1], d.socket, token);
    bare_open(&watchers, d.socket, token);
    open_watchers(&watchers, asks, WATCHERS);
    for (int round = -1; round < ROUNDS; round++) /* the first only warms up */
        for (int i = 0; i < 2; i++) {
            double before = bench_cpu_us(i == 0 ? b->echo : d.pid);
            double r = bare_rate(&clients[i], GET, ask_empty, sizeof ask_empty,
                                 i == 0 ? sizeof ask_empty : 0, CALLS);
            if (round < 0)
                continue;
            rate[i][round] = r;
            cpu[i] += bench_cpu_us(i == 0 ? b->echo : d.pid) - before;
        }
    for (int round = 0; round < ROUNDS; round++)
        ratio[round] = rate[1][round] / rate[0][round];
    bench_daemon_stop(&d); /* which ends the watchers' streams */
    double median = quantile(ratio, ROUNDS, 0.5);
    struct row *row = add_row(&b->table, "get_committed", quantile(rate[1], ROUNDS, 0.5), "calls/s",
                              "bare C core echo", median);
    set_aim(row, 0.8, true);
    (void)snprintf(row->note, sizeof row->note,
                   "%d in flight, %d watchers, token sent; median of %d rounds' ratios (quartiles "
                   "%.2f and %.2f); echo %.0f calls/s; CPU a call %.1f us, the echo's %.1f us",
                   BARE_IN_FLIGHT, WATCHERS, ROUNDS, quantile(ratio, ROUNDS, 0.25),
                   quantile(ratio, ROUNDS, 0.75), quantile(rate[0], ROUNDS, 0.5),
                   cpu[1] / (ROUNDS * CALLS), cpu[0] / (ROUNDS * CALLS));
}

/* --- a large model --- */

#define LARGE_SETTINGS                                                                             \
    "[devices]\ndevices = 8\ndomains = 0-3 4-7\nring_slots = 1\nchunk_bytes = 256 KiB\n"

/* Experts as TP cuts them: gate and up by rows, down by columns; the shapes are tiny, the names and
 * the number of tensors are Kimi-K2's. */
static char *large_json(const char *name, bool destination)
{
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    struct buf b;
    size_t n;
    buf_init(&b);
    buf_printf(&b, "{\"name\": \"%s\", \"ranks\": %d, %s\"meshes\": [{\"name\": \"m\", \"shape\": ",
               name, LARGE_SIDE, destination ? "\"instances\": [[0, 1], [2, 3]], " : "");
    buf_printf(&b, "%s, \"ranks\": [0, 1, 2, 3]}], \"tensors\": [", destination ? "[2, 2]" : "[4]");
    for (int i = 0; i < LARGE_TENSORS; i++)
        buf_printf(&b,
                   "%s{\"name\": \"model.layers.%d.mlp.experts.%d.%s.weight\", \"shape\": [8, 8], "
                   "\"dtype\": \"bfloat16\", \"mesh\": \"m\", \"placements\": [%s\"Shard(%d)\"]}",
                   i > 0 ? ", " : "", i / 3 / 384, i / 3 % 384, parts[i % 3],
                   destination ? "\"Replicate\", " : "", i % 3 == 2);
    buf_printf(&b, "]}");
    char *text = (char *)buf_steal(&b, &n);
    if (text == NULL)
        bench_die("no memory for a layout");
    return text;
}

/* Asks for the newest version all the time; how long each answer took. */
struct pinger {
    pthread_t thread;
    struct reshard_client *client;
    _Atomic bool stop;
    size_t n;
    double *ms;
};

static void *pinger_run(void *arg)
{
    struct pinger *p = arg;
    while (!p->stop && p->n < MAX_PINGS) {
        struct reshard_committed c;
        uint64_t began = clock_mono_ns();
        OK(reshard_committed(p->client, "empty", 0, 0, NULL, 0, &c, &ok_error));
        p->ms[p->n++] = seconds_since(began) * 1e3;
        (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return NULL;
}

/* Looks at both processes ten times a second and keeps the most. */
struct sampler {
    pthread_t thread;
    pid_t pid, child;
    _Atomic bool stop;
    double most_mib, most_each_mib[2];
};

static double sample(struct sampler *s)
{
    struct bench_memory m = bench_memory(s->pid, s->child);
    s->most_mib = fmax(s->most_mib, m.control + m.plane);
    s->most_each_mib[0] = fmax(s->most_each_mib[0], m.control);
    s->most_each_mib[1] = fmax(s->most_each_mib[1], m.plane);
    return m.control + m.plane;
}

static void *sampler_run(void *arg)
{
    struct sampler *s = arg;
    while (!s->stop) {
        (void)sample(s);
        (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    return NULL;
}

static void await(struct peer *p, enum reshard_event_type type, uint64_t version)
{
    struct reshard_event ev;
    do {
        OK(reshard_next_event(p->worker, WAIT_MS, &ev, &ok_error));
        if (ev.type == RESHARD_EVENT_ABORTED)
            bench_die("version %llu: %s", (unsigned long long)ev.version, ev.reason);
    } while (ev.type != type || ev.version != version);
}

static void large_refit(struct peer *sources, struct peer *destinations, uint64_t version)
{
    for (int i = 0; i < LARGE_SIDE; i++)
        OK(reshard_publish(sources[i].worker, version, NULL, 0, WAIT_MS, &ok_error));
    OK(reshard_submit(sources[0].client, "large", version, NULL, 0, NULL, &ok_error));
    for (int i = 0; i < LARGE_SIDE; i++) {
        await(&destinations[i], RESHARD_EVENT_READY_REQUESTED, version);
        OK(reshard_ready(destinations[i].worker, version, 0, &ok_error));
    }
    OK(reshard_wait(sources[0].client, "large", version, RESHARD_UNTIL_COMMITTED, NULL, NULL,
                    WAIT_MS, NULL, &ok_error));
}

static void large_attach(struct peer *sources, struct peer *destinations, const char *socket_path)
{
    char *source = large_json("train", false), *destination = large_json("rollout", true);
    for (uint32_t i = 0; i < LARGE_SIDE; i++)
        peer_attach(&sources[i], socket_path, "large", source, RESHARD_SOURCE, i, i,
                    RESHARD_RECEIVE_NONE);
    for (uint32_t i = 0; i < LARGE_SIDE; i++)
        peer_attach(&destinations[i], socket_path, "large", destination, RESHARD_DESTINATION, i,
                    LARGE_SIDE + i, RESHARD_RECEIVE_IN_PLACE);
    mem_free(source);
    mem_free(destination);
}

static void daemon_memory(struct bench *b)
{
    struct bench_daemon d;
    struct empty x = {0};
    struct peer sources[LARGE_SIDE] = {{0}}, destinations[LARGE_SIDE] = {{0}};
    struct sampler s = {0};
    struct pinger p = {.ms = calloc(MAX_PINGS, sizeof *p.ms)};
    double refit_s[LARGE_REFITS];
    bench_daemon_start(&d, b->build, LARGE_SETTINGS);
    empty_start(&x, d.socket);
    (void)empty_refit(&x, 1);
    s.pid = d.pid;
    s.child = bench_child_of(d.pid);
    double idle = sample(&s);
    OK(reshard_connect(d.socket, WAIT_MS, &p.client, &ok_error));
    (void)pthread_create(&s.thread, NULL, sampler_run, &s);
    (void)pthread_create(&p.thread, NULL, pinger_run, &p);
    uint64_t began = clock_mono_ns();
    large_attach(sources, destinations, d.socket);
    double attach_s = seconds_since(began);
    p.stop = true;
    (void)pthread_join(p.thread, NULL);
    double attached = sample(&s);
    for (int v = 0; v < LARGE_REFITS; v++) {
        began = clock_mono_ns();
        large_refit(sources, destinations, (uint64_t)v + 1);
        refit_s[v] = seconds_since(began);
    }
    s.stop = true;
    (void)pthread_join(s.thread, NULL);
    double after = sample(&s), segments = bench_memory(s.pid, s.child).segments;
    reshard_close(p.client);
    for (int i = 0; i < LARGE_SIDE; i++) {
        peer_close(&sources[i]);
        peer_close(&destinations[i]);
    }
    empty_stop(&x);
    bench_daemon_stop(&d);

    struct row *row = add_row(&b->table, "daemon_memory", s.most_mib, "MiB", "", s.most_mib / 256);
    set_aim(row, 256, false);
    (void)snprintf(
        row->note, sizeof row->note,
        "%d tensors x %d workers, the most at any time (control %.0f, data plane %.0f), 2 "
        "MiB of staging included; idle %.0f, attached %.0f, after %d refits %.0f; "
        "segments (%.0f mapped) apart; attach %.1f s, refits %.1f and %.1f s",
        LARGE_TENSORS, 2 * LARGE_SIDE, s.most_each_mib[0], s.most_each_mib[1], idle, attached,
        LARGE_REFITS, after, segments, attach_s, refit_s[0], refit_s[1]);
    row = add_row(&b->table, "get_committed/during_attach", quantile(p.ms, p.n, 0.99), "ms", "", 0);
    (void)snprintf(row->note, sizeof row->note,
                   "99th percentile of one caller's waits while 8 workers with %d tensors attach; "
                   "median %.2f, most %.1f ms of %zu calls",
                   LARGE_TENSORS, quantile(p.ms, p.n, 0.5), quantile(p.ms, p.n, 1), p.n);
    free(p.ms);
}

/* --- a herd of pollers --- */

struct herd {
    struct empty x;
    struct bare_client client;
    struct bare_ask asks[HERD + 1];
    uint64_t version;                                 /* the newest */
    double commit_ms[HERD_MOST_VERSIONS], *answer_ms; /* each version's; HERD of each */
    size_t n;
    pthread_t thread; /* while it collects the answers of one version */
    uint64_t began_ns;
};

/* GetCommittedRequest of model "empty": newer_than, wait_ms (both below 2^21). */
static size_t ask_newer(uint8_t *at, uint64_t newer_than, uint32_t wait_ms)
{
    const uint64_t values[] = {newer_than, wait_ms};
    size_t n = sizeof ask_empty;
    memcpy(at, ask_empty, n);
    for (unsigned i = 0; i < 2; i++) {
        at[n++] = (uint8_t)((i + 2) << 3);
        for (int k = 0; k < 3; k++)
            at[n++] = (uint8_t)((values[i] >> (7 * k) & 0x7f) | (k < 2 ? 0x80 : 0));
    }
    return n;
}

static void *herd_collect(void *arg)
{
    struct herd *h = arg;
    double *ms = h->answer_ms + h->n * HERD;
    for (unsigned i = 0; i < HERD; i++) {
        grpc_event e =
            grpc_completion_queue_next(h->client.cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        ms[i] = seconds_since(h->began_ns) * 1e3;
        bare_end(e.tag, 0);
    }
    return NULL;
}

/* All polls wait for the next version: an answered call after them on their connection shows that they came. */
static void herd_wait(struct herd *h)
{
    uint8_t data[sizeof ask_empty + 8];
    size_t n = ask_newer(data, h->version, WAIT_MS);
    for (unsigned i = 0; i < HERD; i++)
        bare_start(&h->client, &h->asks[i], GET, data, n, false);
    n = ask_newer(data, 0, 0);
    bare_start(&h->client, &h->asks[HERD], GET, data, n, false);
    grpc_event e =
        grpc_completion_queue_next(h->client.cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    if (e.tag != &h->asks[HERD])
        bench_die("a poll was answered before there was anything to tell");
    bare_end(e.tag, 0);
}

static void herd_version(struct herd *h)
{
    herd_wait(h);
    h->began_ns = clock_mono_ns();
    (void)pthread_create(&h->thread, NULL, herd_collect, h);
    h->commit_ms[h->n] = empty_refit(&h->x, ++h->version) * 1e3;
    (void)pthread_join(h->thread, NULL);
    empty_done(&h->x, h->version);
    h->n++;
}

struct large {
    pthread_t thread;
    const char *socket_path;
    struct peer sources[LARGE_SIDE], destinations[LARGE_SIDE];
    _Atomic bool done;
};

static void *large_run(void *arg)
{
    struct large *l = arg;
    large_attach(l->sources, l->destinations, l->socket_path);
    for (uint64_t v = 1; v <= LARGE_REFITS; v++)
        large_refit(l->sources, l->destinations, v);
    l->done = true;
    return NULL;
}

static void herd_row(struct bench *b, struct herd *h, const char *name, const char *meanwhile)
{
    double commit = quantile(h->commit_ms, h->n, 0.99);
    struct row *row = add_row(&b->table, name, commit, "ms", "the limit", commit / 100);
    set_aim(row, 100, false);
    (void)snprintf(row->note, sizeof row->note,
                   "99th percentile of submit to commit, fsyncs included, with %d long polls woken "
                   "by each of %zu versions%s; median %.2f, most %.1f ms; polls, from the submit: "
                   "median %.1f, 99th percentile %.1f, most %.1f ms",
                   HERD, h->n, meanwhile, quantile(h->commit_ms, h->n, 0.5),
                   quantile(h->commit_ms, h->n, 1), quantile(h->answer_ms, h->n * HERD, 0.5),
                   quantile(h->answer_ms, h->n * HERD, 0.99),
                   quantile(h->answer_ms, h->n * HERD, 1));
    h->n = 0;
}

static void herd(struct bench *b)
{
    static struct herd h;
    static struct large l;
    struct bench_daemon d;
    char token[MEMORY_SOCKET_TOKEN_BYTES];
    h.answer_ms = calloc((size_t)HERD_MOST_VERSIONS * HERD, sizeof *h.answer_ms);
    if (h.answer_ms == NULL)
        bench_die("no memory");
    bench_daemon_start(&d, b->build, LARGE_SETTINGS);
    empty_start(&h.x, d.socket);
    bench_hello(d.socket, token);
    bare_open(&h.client, d.socket, token);
    (void)empty_refit(&h.x, ++h.version);
    empty_done(&h.x, h.version);
    for (int i = 0; i < HERD_VERSIONS; i++)
        herd_version(&h);
    herd_row(b, &h, "get_committed/commit-1000-polls", "");
    l.socket_path = d.socket;
    (void)pthread_create(&l.thread, NULL, large_run, &l);
    while (!l.done && h.n < HERD_MOST_VERSIONS)
        herd_version(&h);
    (void)pthread_join(l.thread, NULL);
    herd_row(b, &h, "get_committed/commit-1000-polls-and-attach",
             ", while 8 workers with 70000 tensors attach and are refitted");
    for (int i = 0; i < LARGE_SIDE; i++) {
        peer_close(&l.sources[i]);
        peer_close(&l.destinations[i]);
    }
    empty_stop(&h.x);
    free(h.answer_ms);
    bench_daemon_stop(&d);
}

/* --- main --- */

static bool wanted(const struct bench *b, const char *name)
{
    for (int i = 0; i < b->n_wanted; i++)
        if (strcmp(b->wanted[i], name) == 0)
            return true;
    return b->n_wanted == 0;
}

/* Before anything that starts gRPC. */
static void echo_start(struct bench *b)
{
    (void)snprintf(b->echo_folder, sizeof b->echo_folder, "/tmp/bench-echo-XXXXXX");
    if (mkdtemp(b->echo_folder) == NULL)
        bench_die("%s: %s", b->echo_folder, strerror(errno));
    (void)snprintf(b->echo_socket, sizeof b->echo_socket, "%s/s", b->echo_folder);
    b->echo = bare_child(bare_serve, b->echo_socket, GET);
    if (b->echo < 0)
        bench_die("the echo did not come up");
}

static void echo_stop(struct bench *b)
{
    (void)bare_end_us(b->echo);
    (void)unlink(b->echo_socket);
    (void)rmdir(b->echo_folder);
}

static void find_build(struct bench *b)
{
    ssize_t n = readlink("/proc/self/exe", b->build, sizeof b->build - 1);
    if (n < 0)
        bench_die("/proc/self/exe: %s", strerror(errno));
    b->build[n] = '\0';
    for (int up = 0; up < 2; up++)
        *strrchr(b->build, '/') = '\0';
}

int main(int argc, char **argv)
{
    static struct bench b;
    bool json = false;
    b.wanted = argv;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            json = true;
        else
            argv[b.n_wanted++] = argv[i];
    }
    find_build(&b);
    echo_start(&b);
    (void)atexit(bench_at_exit); /* not in the echo */
    if (wanted(&b, "empty_commit"))
        empty_commit(&b);
    if (wanted(&b, "get_committed"))
        get_committed(&b);
    if (wanted(&b, "get_committed"))
        herd(&b);
    if (wanted(&b, "daemon_memory"))
        daemon_memory(&b);
    echo_stop(&b);
    print_rows(&b.table, json);
    return EXIT_SUCCESS;
}
