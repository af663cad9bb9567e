/* Refits through the data plane against what the machine can do at best, in the same run.
 *
 *   bench_exec [--json] [--layers N] [--rounds N] [ROW …]
 *
 * A refit is timed from START to STAGED, as the control process sees it; the plan is the real
 * planner's, memory is in memfds as workers have it. Of several rounds, in which a refit and what
 * it is held against take turns, the one with the best time of each counts.
 *
 *   memory_bound         Qwen3-0.6B's shapes, TP4 → TP2×DP2, all in one domain, against the landed
 *                        bytes copied with non-temporal stores by as many threads as there are
 *                        cores; with fingerprints plus one read pass over the landed bytes
 *   overlap              one layout over the network and one inside the domain, at once, against
 *                        the longer of the two alone
 *   vs_gather_broadcast, vs_direct
 *                        sources in two domains, rates set: against what the busiest devices'
 *                        bytes say
 *   wire_ratio           payload received over the network, by the transport's counters, over the
 *                        unique bytes that the domains need and do not hold
 *   tcp_loopback         the network's part over TCP, against raw TCP of the same bytes over as
 *                        many connections */
#include <arpa/inet.h>
#include <math.h>
#include <netinet/in.h>
#include <sys/resource.h>

#include "kernels/kernels.h"
#include "test/lib/rig.h"

enum { MAX_ROWS = 16 };

struct row {
    const char *name;
    double value, against, ratio, aim;
    const char *unit, *against_what;
    bool at_least; /* the aim is a floor, not a ceiling */
    char note[256];
};

struct bench {
    struct row rows[MAX_ROWS];
    int n_rows;
    int layers, rounds;
    bool json;
    char **wanted;
    int n_wanted;
};

static double seconds_since(uint64_t began)
{
    return (double)(clock_mono_ns() - began) / 1e9;
}

/* CPU time of all threads: what a busy machine disturbs less than the clock. */
static double cpu_s(void)
{
    struct rusage u;
    (void)getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static bool wanted(const struct bench *b, const char *name)
{
    for (int i = 0; i < b->n_wanted; i++)
        if (strcmp(b->wanted[i], name) == 0)
            return true;
    return b->n_wanted == 0;
}

/* --- model ------------------------------------------------------------------------------------ */

static void put_tensor(struct buf *b, const char *name, int layer, int rows, int columns,
                       const char *placements)
{
    bool first = b->data[b->n_bytes - 1] == '[';
    buf_printf(b, "%s{\"name\":\"%s.%02d\",\"shape\":[%d", first ? "" : ",", name, layer, rows);
    if (columns > 0)
        buf_printf(b, ",%d", columns);
    buf_printf(b, "],\"dtype\":\"bfloat16\",\"mesh\":\"m\",\"placements\":[%s]}", placements);
}

/* Qwen3-0.6B (embedding tied), cut as Megatron and vLLM do it. */
static char *qwen_json(const char *name, int dp, int tp, int layers, bool embedding)
{
    struct buf b;
    char column[64], row[64], whole[64];
    const char *outer = dp > 0 ? "\"Replicate\"," : "";
    snprintf(column, sizeof(column), "%s\"Shard(0)\"", outer);
    snprintf(row, sizeof(row), "%s\"Shard(1)\"", outer);
    snprintf(whole, sizeof(whole), "%s\"Replicate\"", outer);
    int ranks = (dp > 0 ? dp : 1) * tp;
    buf_init(&b);
    buf_printf(&b, "{\"name\":\"%s\",\"ranks\":%d,\"meshes\":[{\"name\":\"m\",\"shape\":[", name,
               ranks);
    if (dp > 0)
        buf_printf(&b, "%d,", dp);
    buf_printf(&b, "%d],\"ranks\":[", tp);
    for (int i = 0; i < ranks; i++)
        buf_printf(&b, "%s%d", i > 0 ? "," : "", i);
    buf_printf(&b, "]}],\"tensors\":[");
    if (embedding)
        put_tensor(&b, "embed", 0, 151936, 1024, column);
    for (int l = 0; l < layers; l++) {
        put_tensor(&b, "q", l, 2048, 1024, column);
        put_tensor(&b, "k", l, 1024, 1024, column);
        put_tensor(&b, "v", l, 1024, 1024, column);
        put_tensor(&b, "o", l, 1024, 2048, row);
        put_tensor(&b, "gate", l, 3072, 1024, column);
        put_tensor(&b, "up", l, 3072, 1024, column);
        put_tensor(&b, "down", l, 1024, 3072, row);
        put_tensor(&b, "norm1", l, 1024, 0, whole);
        put_tensor(&b, "norm2", l, 1024, 0, whole);
    }
    put_tensor(&b, "norm", 99, 1024, 0, whole);
    buf_printf(&b, "]}");
    size_t n;
    return (char *)buf_steal(&b, &n);
}

static void side(struct rig *r, uint32_t number, char *json, uint32_t first, uint32_t n)
{
    rig_side(r, number, json, first, n);
    mem_free(json);
}

static void rig_start(struct rig *r, uint32_t n_devices)
{
    memset(r, 0, sizeof(*r));
    r->o.n_devices = n_devices;
    r->o.plan = plan_options_default();
}

/* Words that differ everywhere; what they are does not matter to a clock. */
static void fill_fast(struct rig *r)
{
    for (uint32_t i = 0; i < r->n_workers; i++) {
        struct rig_memory *m = &r->workers[i].memory[WIRE_LIVE];
        uint64_t *words = (uint64_t *)(void *)m->data;
        uint64_t tensor_seed = 1;
        for (size_t k = 0; r->workers[i].layout == 0 && k < m->bytes / 8; k++)
            words[k] = random_next(&tensor_seed);
    }
}

static double started_s(struct rig *r)
{
    uint64_t began = clock_mono_ns();
    rig_expect(r, rig_send_start(r), WIRE_STAGED);
    double s = seconds_since(began);
    if (r->progress.done_bytes != r->progress.total_bytes)
        abort();
    return s;
}

static double refit_s(struct rig *r, enum wire_verify verify)
{
    rig_prepare(r, verify);
    return started_s(r);
}

/* --- what the machine can do ------------------------------------------------------------------ */

enum pass { PASS_COPY, PASS_FAN_OUT, PASS_READ, PASS_PRINT };

struct share {
    const struct rig *rig;
    uint32_t thread, n_threads;
    enum pass pass;
    uint64_t sum;
};

/* Reads as fast as it can: eight sums, so that no addition waits for the one before. */
static uint64_t read_all(const uint8_t *data, size_t bytes)
{
    const uint64_t *w = (const uint64_t *)(const void *)data;
    uint64_t s[8] = {0};
    for (size_t i = 0; i + 8 <= bytes / 8; i += 8)
        for (int k = 0; k < 8; k++)
            s[k] += w[i + (size_t)k];
    return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}

/* The other way to read: the fingerprint kernel over one long run, which prefetches across pages. */
static uint64_t print_all(uint8_t *data, size_t bytes)
{
    uint64_t sum = 0;
    struct kernel_fingerprint f = {.size = {bytes / 2},
                                   .from = {data, {2}},
                                   .fingerprint = &sum,
                                   .n_dims = 1,
                                   .dtype = DTYPE_BFLOAT16};
    kernel_fingerprint_host(&f);
    return sum;
}

/* One read, one or two writes; `second` NULL: one. */
static void stream_copy(uint8_t *to, uint8_t *second, uint8_t *from, size_t bytes)
{
    struct kernel_copy c = {.size = {bytes},
                            .from = {from, {1}},
                            .to = {{to, {1}}, {second, {1}}},
                            .n_targets = second == NULL ? 1 : 2,
                            .n_dims = 1,
                            .from_dtype = DTYPE_UINT8,
                            .to_dtype = DTYPE_UINT8,
                            .streaming = 1};
    kernel_copy_host(&c);
}

/* This thread's part of one destination's memory, in long runs. */
static void share_part(struct share *s, const struct rig_memory *m, const struct rig_memory *twin)
{
    const struct rig_memory *source = &s->rig->workers[s->thread % 4].memory[WIRE_LIVE];
    size_t part = m->bytes / s->n_threads / 64 * 64, at = part * s->thread;
    for (size_t done = 0, n; done < part; done += n) {
        n = part - done < 1 << 20 ? part - done : 1 << 20;
        size_t from = (at + done) % (source->bytes - n) / 64 * 64;
        if (s->pass == PASS_READ)
            s->sum += read_all(m->data + at + done, n);
        else if (s->pass == PASS_PRINT)
            s->sum += print_all(m->data + at + done, n);
        else
            stream_copy(m->data + at + done, twin == NULL ? NULL : twin->data + at + done,
                        source->data + from, n);
    }
}

/* Workers 4 … 7 are the destination; 6 and 7 hold what 4 and 5 do. */
static void *share_run(void *arg)
{
    struct share *s = arg;
    const struct rig_worker *w = s->rig->workers;
    for (uint32_t i = 4; i < (s->pass == PASS_FAN_OUT ? 6 : 8); i++)
        share_part(s, &w[i].memory[WIRE_LIVE],
                   s->pass == PASS_FAN_OUT ? &w[i + 2].memory[WIRE_LIVE] : NULL);
    return NULL;
}

/* With as many threads as the refit has streams for it, so that a busy machine gives both alike. */
static double pass_s(const struct rig *r, enum pass pass, double *cpu)
{
    enum { N = 4 };
    pthread_t threads[N];
    struct share shares[N];
    double cpu_began = cpu_s();
    uint64_t began = clock_mono_ns();
    for (uint32_t i = 0; i < N; i++) {
        shares[i] = (struct share){.rig = r, .thread = i, .n_threads = N, .pass = pass};
        if (pthread_create(&threads[i], NULL, share_run, &shares[i]) != 0)
            abort();
    }
    static volatile uint64_t sink;
    for (uint32_t i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        sink = sink + shares[i].sum;
    }
    *cpu = fmin(*cpu, cpu_s() - cpu_began);
    return seconds_since(began);
}

/* --- rows ------------------------------------------------------------------------------------- */

static struct row *add_row(struct bench *b, const char *name, double value, const char *unit,
                           const char *against_what, double against, double ratio, double aim)
{
    struct row *row = &b->rows[b->n_rows++];
    *row = (struct row){.name = name,
                        .value = value,
                        .unit = unit,
                        .against_what = against_what,
                        .against = against,
                        .ratio = ratio,
                        .aim = aim};
    return row;
}

struct best {
    double s, cpu;
};

static void best_pass(struct best *x, const struct rig *r, enum pass pass)
{
    x->s = fmin(x->s, pass_s(r, pass, &x->cpu));
}

static void best_refit(struct best *x, struct rig *r, enum wire_verify verify)
{
    rig_prepare(r, verify);
    double began = cpu_s();
    x->s = fmin(x->s, started_s(r));
    x->cpu = fmin(x->cpu, cpu_s() - began);
}

static void memory_bound(struct bench *b)
{
    struct rig r;
    struct best none = {INFINITY, INFINITY}, plain = none, fan = none, read = none, print = none,
                off = none, sampled = none, full = none;
    rig_start(&r, 8);
    side(&r, 0, qwen_json("train", 0, 4, b->layers, true), 0, 4);
    side(&r, 1, qwen_json("rollout", 2, 2, b->layers, true), 4, 4);
    rig_open(&r);
    fill_fast(&r);
    (void)refit_s(&r, WIRE_VERIFY_FULL); /* maps every page */
    for (int i = 0; i < b->rounds; i++) {
        best_pass(&plain, &r, PASS_COPY);
        best_refit(&off, &r, WIRE_VERIFY_OFF);
        best_pass(&fan, &r, PASS_FAN_OUT);
        best_pass(&read, &r, PASS_READ);
        best_pass(&print, &r, PASS_PRINT);
        best_refit(&sampled, &r, WIRE_VERIFY_SAMPLED);
        best_refit(&full, &r, WIRE_VERIFY_FULL);
    }
    double mb = (double)r.progress.total_bytes / 1e6;
    rig_close(&r);
    double copy = fmin(plain.s, fan.s), cpu = fmin(plain.cpu, fan.cpu);
    double plain_read_s = read.s;
    read = (struct best){fmin(read.s, print.s), fmin(read.cpu, print.cpu)};
    struct row *row = add_row(b, "memory_bound", off.s, "s", "best copy of the landed bytes", copy,
                              off.s / copy, 1.25);
    snprintf(row->note, sizeof(row->note),
             "off; %.0f MB landed; copy: 1 write per read %.3f s, 2 writes %.3f s; CPU ratio %.2f",
             mb, plain.s, fan.s, off.cpu / cpu);
    row = add_row(b, "memory_bound_full", full.s, "s", "best copy and one read pass", copy + read.s,
                  full.s / (copy + read.s), 1.4);
    snprintf(
        row->note, sizeof(row->note),
        "full; copy %.3f s, read pass %.3f s (plain loop %.3f s); CPU ratio %.2f; against off: "
        "sampled %.2f, full %.2f of the time",
        copy, read.s, plain_read_s, full.cpu / (cpu + read.cpu), sampled.s / off.s, full.s / off.s);
}

/* Both, or one of: rollout in another domain, eval beside the trainer. */
static double overlap_s(struct bench *b, bool network, bool local, enum wire_verify verify)
{
    struct rig r;
    uint32_t number = 0;
    double s = INFINITY;
    rig_start(&r, 6);
    r.o.domain[2] = r.o.domain[3] = 1;
    r.o.hello.network_bytes_per_s = 250e6;
    side(&r, 0, qwen_json("train", 0, 2, 8, false), 0, 2);
    if (network)
        side(&r, ++number, qwen_json("rollout", 0, 2, 8, false), 2, 2);
    if (local)
        side(&r, ++number, qwen_json("eval", 8, 1, 8, false), 4, 2);
    rig_open(&r);
    fill_fast(&r);
    (void)refit_s(&r, verify);
    for (int i = 0; i < b->rounds; i++)
        s = fmin(s, refit_s(&r, verify));
    rig_close(&r);
    return s;
}

static void overlap(struct bench *b)
{
    double network = overlap_s(b, true, false, WIRE_VERIFY_OFF);
    double local = overlap_s(b, false, true, WIRE_VERIFY_OFF);
    double both = overlap_s(b, true, true, WIRE_VERIFY_OFF);
    struct row *row = add_row(b, "overlap", both, "s", "the larger of the two alone",
                              fmax(network, local), both / fmax(network, local), 1.15);
    snprintf(row->note, sizeof(row->note),
             "network alone %.3f s at 250 MB/s a port, local alone %.3f s", network, local);
}

struct measured {
    double s;
    struct plan_totals totals;
    struct wire_progress progress;
};

/* Four sources in two domains; two instances of two ranks in two domains more, or both in one. */
static struct measured shaped(struct bench *b, enum plan_strategy strategy, bool one_domain)
{
    struct rig r;
    struct measured m = {.s = INFINITY};
    rig_start(&r, 8);
    for (uint32_t i = 0; i < 8; i++)
        r.o.domain[i] = one_domain && i > 4 ? 2 : i / 2;
    r.o.plan.strategy = strategy;
    r.o.plan.chunk_bytes = 1 << 20;
    r.o.hello.network_bytes_per_s = 200e6;
    side(&r, 0, qwen_json("train", 0, 4, 4, false), 0, 4);
    side(&r, 1, qwen_json("rollout", 2, 2, 4, false), 4, 4);
    rig_open(&r);
    fill_fast(&r);
    (void)refit_s(&r, WIRE_VERIFY_OFF);
    for (int i = 0; i < b->rounds; i++)
        m.s = fmin(m.s, refit_s(&r, WIRE_VERIFY_OFF));
    m.totals = *plan_totals(r.plan);
    m.progress = r.progress;
    rig_close(&r);
    return m;
}

static void versus(struct bench *b, const char *name, enum plan_strategy strategy, bool one_domain)
{
    struct measured reshard = shaped(b, PLAN_RESHARD, one_domain), *own = &reshard;
    struct measured other = shaped(b, strategy, one_domain);
    double bytes = (double)other.totals.busiest_bytes / (double)own->totals.busiest_bytes;
    double speed = other.s / own->s;
    struct row *row = add_row(b, name, speed, "times faster", "ratio of the busiest devices' bytes",
                              bytes, speed / bytes, 0.9);
    row->at_least = true;
    snprintf(row->note, sizeof(row->note), "%.3f s against %.3f s at 200 MB/s a port; bound %.3f s",
             own->s, other.s, (double)own->totals.lower_bound / 200e6);
}

static void wire_ratio(struct bench *b)
{
    struct measured m = shaped(b, PLAN_RESHARD, true), *own = &m;
    double unique = (double)own->totals.network_bytes_minimum;
    double payload = (double)own->progress.network_bytes;
    struct row *row =
        add_row(b, "wire_ratio", payload, "bytes", "unique bytes", unique, payload / unique, 1.0);
    snprintf(row->note, sizeof(row->note), "counted by the in-memory transport");
}

/* --- TCP -------------------------------------------------------------------------------------- */

/* One connection, and half of it: a source's memory sent, or received into a destination's. */
struct raw_end {
    int fd;
    uint8_t *data;
    size_t bytes;
    bool send;
};

enum { RAW_PIECE_BYTES = 1024 << 10, RAW_LINKS = 4 };

static void *raw_run(void *arg)
{
    struct raw_end *x = arg;
    for (size_t at = 0; at < x->bytes;) {
        size_t n = x->bytes - at < RAW_PIECE_BYTES ? x->bytes - at : RAW_PIECE_BYTES;
        ssize_t r = x->send ? send(x->fd, x->data + at, n, MSG_NOSIGNAL)
                            : recv(x->fd, x->data + at, n, MSG_WAITALL);
        if (r <= 0)
            abort();
        at += (size_t)r;
    }
    return NULL;
}

static void raw_connect(int fds[2])
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof(a);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || fds[0] < 0 || bind(listener, (struct sockaddr *)&a, n) != 0 ||
        listen(listener, 1) != 0 || getsockname(listener, (struct sockaddr *)&a, &n) != 0 ||
        connect(fds[0], (struct sockaddr *)&a, n) != 0 ||
        (fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) < 0)
        abort();
    close(listener);
}

/* `bytes` in all, from each of the four sources to one of the four destinations. */
static void raw_open(const struct rig *r, uint64_t bytes, struct raw_end ends[2 * RAW_LINKS])
{
    int fds[2];
    for (uint32_t i = 0; i < RAW_LINKS; i++) {
        raw_connect(fds);
        for (uint32_t k = 0; k < 2; k++)
            ends[2 * i + k] =
                (struct raw_end){.fd = fds[k],
                                 .data = r->workers[i + k * RAW_LINKS].memory[WIRE_LIVE].data,
                                 .bytes = bytes / RAW_LINKS,
                                 .send = k == 0};
    }
}

static void best_raw(struct best *x, struct raw_end ends[2 * RAW_LINKS])
{
    pthread_t threads[2 * RAW_LINKS];
    double cpu_began = cpu_s();
    uint64_t began = clock_mono_ns();
    for (uint32_t i = 0; i < 2 * RAW_LINKS; i++)
        if (pthread_create(&threads[i], NULL, raw_run, &ends[i]) != 0)
            abort();
    for (uint32_t i = 0; i < 2 * RAW_LINKS; i++)
        pthread_join(threads[i], NULL);
    x->s = fmin(x->s, seconds_since(began));
    x->cpu = fmin(x->cpu, cpu_s() - cpu_began);
}

/* TP4 → TP4 in another domain: all bytes over the network, none twice. Connections are up, as they
 * are from the second refit of an epoch on, and for the raw transfer. */
static void tcp_loopback(struct bench *b)
{
    struct rig r;
    struct raw_end ends[2 * RAW_LINKS];
    struct best none = {INFINITY, INFINITY}, tcp = none, raw = none;
    rig_start(&r, 8);
    for (uint32_t i = 4; i < 8; i++)
        r.o.domain[i] = 1;
    memcpy(r.o.hello.transport, "tcp", 4);
    r.o.hello.local_pairs = WIRE_LOCAL_TRANSPORT;
    side(&r, 0, qwen_json("train", 0, 4, b->layers, true), 0, 4);
    side(&r, 1, qwen_json("rollout", 0, 4, b->layers, true), 4, 4);
    rig_open(&r);
    fill_fast(&r);
    (void)refit_s(&r, WIRE_VERIFY_OFF);
    uint64_t bytes = r.progress.network_bytes;
    raw_open(&r, bytes, ends);
    for (int i = 0; i < b->rounds; i++) {
        best_raw(&raw, ends);
        best_refit(&tcp, &r, WIRE_VERIFY_OFF);
    }
    for (uint32_t i = 0; i < 2 * RAW_LINKS; i++)
        close(ends[i].fd);
    rig_close(&r);
    struct row *row = add_row(b, "tcp_loopback", tcp.s, "s", "raw TCP of the same bytes", raw.s,
                              tcp.s / raw.s, 1.15);
    snprintf(row->note, sizeof(row->note),
             "off; %.0f MB over 4 connections of one host; raw: a thread at each end, %.2f GB/s; "
             "CPU ratio %.2f",
             (double)bytes / 1e6, (double)bytes / 1e9 / raw.s, tcp.cpu / raw.cpu);
}

/* --- output ----------------------------------------------------------------------------------- */

static bool holds(const struct row *row)
{
    return row->at_least ? row->ratio >= row->aim : row->ratio <= row->aim + 1e-9;
}

static void print_table(const struct bench *b)
{
    for (int i = 0; i < b->n_rows; i++) {
        const struct row *x = &b->rows[i];
        printf("%-20s %12.4g %-12s ratio %6.3f  aim %s %.3g  %-5s %s (%s)\n", x->name, x->value,
               x->unit, x->ratio, x->at_least ? "at least" : "at most", x->aim,
               holds(x) ? "holds" : "SHORT", x->against_what, x->note);
    }
}

static void print_json(const struct bench *b)
{
    printf("[");
    for (int i = 0; i < b->n_rows; i++) {
        const struct row *x = &b->rows[i];
        printf("%s\n  {\"name\": \"%s\", \"value\": %.9g, \"unit\": \"%s\", \"against\": \"%s\", "
               "\"ratio\": %.6f, \"aim\": \"%s %.3g\", \"holds\": %s, \"note\": \"%s\"}",
               i > 0 ? "," : "", x->name, x->value, x->unit, x->against_what, x->ratio,
               x->at_least ? ">=" : "<=", x->aim, holds(x) ? "true" : "false", x->note);
    }
    printf("\n]\n");
}

static int number(const char *text)
{
    char *end;
    long n = text == NULL ? 0 : strtol(text, &end, 10);
    if (n < 1 || n > 1000 || *end != '\0') {
        fprintf(stderr, "usage: bench_exec [--json] [--layers N] [--rounds N] [ROW …]\n");
        exit(2);
    }
    return (int)n;
}

int main(int argc, char **argv)
{
    struct bench b = {.layers = 28, .rounds = 5, .wanted = argv};
    int kept = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            b.json = true;
        else if (strcmp(argv[i], "--layers") == 0)
            b.layers = number(argv[++i]);
        else if (strcmp(argv[i], "--rounds") == 0)
            b.rounds = number(argv[++i]);
        else
            argv[kept++] = argv[i];
    }
    b.n_wanted = kept;
    if (wanted(&b, "memory_bound"))
        memory_bound(&b);
    if (wanted(&b, "overlap"))
        overlap(&b);
    if (wanted(&b, "vs_gather_broadcast"))
        versus(&b, "vs_gather_broadcast", PLAN_GATHER_BROADCAST, false);
    if (wanted(&b, "vs_direct"))
        versus(&b, "vs_direct", PLAN_DIRECT, true);
    if (wanted(&b, "wire_ratio"))
        wire_ratio(&b);
    if (wanted(&b, "tcp_loopback"))
        tcp_loopback(&b);
    if (b.json)
        print_json(&b);
    else
        print_table(&b);
    return EXIT_SUCCESS;
}
