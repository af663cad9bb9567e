/* Long polls for the newest committed version, many at once at several daemons: how long after the
 * commit each of them knows.
 *
 *   bench_client_pollers MODEL NEWER_THAN EACH SOCKET …
 *
 * EACH polls (GetCommitted with a wait) are left open at every SOCKET, one connection and one thread
 * a socket. "ready" is printed once all daemons have them; then, when the last is answered, a JSON
 * line: answers, and milliseconds from the commit (committed_wall_ns, of the coordinator's clock: all
 * on one machine) to the answer's arrival, median, 99th percentile and most. */
#include <limits.h>
#include <pthread.h>
#include <time.h>

#include "test/lib/bare_grpc.h"
#include "test/lib/bench_daemon.h"

enum { MAX_SOCKETS = 64, MAX_EACH = 20000, WAIT_MS = 120000 };

#define GET "/reshard.v1.Refit/GetCommitted"

struct poller {
    pthread_t thread;
    struct bare_client client;
    struct bare_ask *asks;
    char token[MEMORY_SOCKET_TOKEN_BYTES];
    unsigned each;
    double *ms; /* [each] */
};

static uint64_t wall_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static size_t put_varint(uint8_t *at, uint64_t v)
{
    size_t n = 0;
    for (; v >= 0x80; v >>= 7)
        at[n++] = (uint8_t)(v | 0x80);
    at[n++] = (uint8_t)v;
    return n;
}

/* GetCommittedRequest: model = 1, newer_than = 2, wait_ms = 3. */
static size_t request(uint8_t *at, const char *model, uint64_t newer_than, uint32_t wait_ms)
{
    size_t length = strlen(model), n = 0;
    at[n++] = 0x0a;
    at[n++] = (uint8_t)length;
    memcpy(at + n, model, length);
    n += length;
    at[n++] = 0x10;
    n += put_varint(at + n, newer_than);
    at[n++] = 0x18;
    return n + put_varint(at + n, wait_ms);
}

/* A varint field of a Committed; 0 where it is not there. */
static uint64_t field(const grpc_byte_buffer *reply, unsigned number)
{
    grpc_byte_buffer_reader reader;
    uint64_t found = 0;
    if (grpc_byte_buffer_reader_init(&reader, (grpc_byte_buffer *)reply) == 0)
        bench_die("a reply can't be read");
    grpc_slice s = grpc_byte_buffer_reader_readall(&reader);
    const uint8_t *at = GRPC_SLICE_START_PTR(s), *end = at + GRPC_SLICE_LENGTH(s);
    while (at < end) {
        unsigned key = *at++;
        uint64_t v = 0;
        for (unsigned shift = 0; at < end; shift += 7) {
            uint8_t b = *at++;
            v |= (uint64_t)(b & 0x7f) << shift;
            if (b < 0x80)
                break;
        }
        if ((key & 7) == 2)
            at += v;
        else if ((key & 7) == 0 && key >> 3 == number)
            found = v;
        else if ((key & 7) != 0)
            bench_die("a reply has a field of an unexpected kind");
    }
    grpc_slice_unref(s);
    grpc_byte_buffer_reader_destroy(&reader);
    return found;
}

static void *collect(void *arg)
{
    struct poller *p = arg;
    for (unsigned i = 0; i < p->each; i++) {
        grpc_event e =
            grpc_completion_queue_next(p->client.cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        struct bare_ask *a = e.tag;
        uint64_t now = wall_ns();
        if (a->status != GRPC_STATUS_OK || a->reply == NULL)
            bare_end(a, 0); /* says what was wrong, and ends */
        p->ms[i] = (double)(int64_t)(now - field(a->reply, 3)) / 1e6;
        if (field(a->reply, 2) == 0)
            bench_die("a poll ended without a version");
        bare_end(a, 0);
    }
    return NULL;
}

/* Leaves the polls open. An answered call after them on the same connection shows that they came. */
static void start(struct poller *p, const char *socket_path, const char *model, uint64_t newer_than)
{
    uint8_t data[400];
    struct bare_ask *asks = calloc(p->each + 1U, sizeof *asks);
    p->ms = calloc(p->each, sizeof *p->ms);
    if (asks == NULL || p->ms == NULL)
        bench_die("no memory");
    bench_hello(socket_path, p->token);
    bare_open(&p->client, socket_path, p->token);
    size_t n = request(data, model, newer_than, WAIT_MS);
    for (unsigned i = 0; i < p->each; i++)
        bare_start(&p->client, &asks[i], GET, data, n, false);
    n = request(data, model, 0, 0);
    bare_start(&p->client, &asks[p->each], GET, data, n, false);
    grpc_event e =
        grpc_completion_queue_next(p->client.cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    if (e.tag != &asks[p->each])
        bench_die("a poll was answered before there was anything to tell");
    bare_end(&asks[p->each], 0);
    p->asks = asks;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(struct poller *pollers, unsigned n_pollers, unsigned each)
{
    size_t n = (size_t)n_pollers * each;
    double *all = calloc(n, sizeof *all);
    if (all == NULL)
        bench_die("no memory");
    for (unsigned i = 0; i < n_pollers; i++)
        memcpy(all + (size_t)i * each, pollers[i].ms, each * sizeof *all);
    qsort(all, n, sizeof *all, by_size);
    (void)printf("{\"answers\": %zu, \"median_ms\": %.3f, \"p99_ms\": %.3f, \"most_ms\": %.3f}\n",
                 n, all[n / 2], all[(size_t)((double)(n - 1) * 0.99 + 0.5)], all[n - 1]);
    free(all);
}

static unsigned long number(const char *text, unsigned long most)
{
    char *end;
    unsigned long v = strtoul(text, &end, 10);
    if (end == text || *end != '\0' || v > most)
        bench_die("%s: is no number, or too large", text);
    return v;
}

int main(int argc, char **argv)
{
    static struct poller pollers[MAX_SOCKETS];
    unsigned n = (unsigned)argc - 4;
    if (argc < 5 || n > MAX_SOCKETS || strlen(argv[1]) > 100)
        bench_die("usage: bench_client_pollers MODEL NEWER_THAN EACH SOCKET …");
    uint64_t newer_than = number(argv[2], LONG_MAX);
    unsigned each = (unsigned)number(argv[3], MAX_EACH);
    grpc_init();
    for (unsigned i = 0; i < n; i++) {
        pollers[i].each = each;
        start(&pollers[i], argv[4 + i], argv[1], newer_than);
    }
    (void)printf("ready\n");
    (void)fflush(stdout);
    for (unsigned i = 0; i < n; i++)
        if (pthread_create(&pollers[i].thread, NULL, collect, &pollers[i]) != 0)
            bench_die("no thread");
    for (unsigned i = 0; i < n; i++)
        (void)pthread_join(pollers[i].thread, NULL);
    report(pollers, n, each);
    return EXIT_SUCCESS;
}
