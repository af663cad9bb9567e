/* A worker of `make demo`: one process that is one rank of a trainer or of an inference engine.
 *
 * It knows reshard.h and nothing else of the project. A trainer rank fills its shards with values
 * that follow from (tensor, element, version), publishes, and waits until they are released; an
 * inference rank receives each version and compares every element with the value that it must have.
 * That check knows nothing of the daemon's fingerprints. What happens is told on stdout, one JSON
 * object per line; the end of stdin says that the process may go. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "client/reshard.h"

enum { CALL_MS = 60000, EVENT_MS = 90000, PIECES_MOST = 1 << 20, LAYOUT_MOST_BYTES = 1 << 26 };

struct options {
    const char *socket, *model, *layout;
    bool source, leader, fused, in_place;
    unsigned rank, device, versions;
};

/* A piece as the worker itself reads and writes it. */
struct part {
    const char *tensor;
    uint32_t n_dims, element_bytes;
    uint64_t shape[RESHARD_MAX_DIMS];
    struct reshard_box box;
    int64_t stride[RESHARD_MAX_DIMS];
    uint64_t offset;
    uint32_t seed; /* of the tensor's name */
};

struct worker {
    struct options options;
    struct reshard_client *client;
    struct reshard_layout *layout;
    struct reshard_worker *worker;
    struct reshard_segment *live, *shadow;
    struct part *parts;
    size_t n_parts;
    uint64_t bytes; /* of a segment */
};

static double now_s(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static _Noreturn void die(const char *what, const char *why)
{
    (void)fflush(stdout);
    (void)fprintf(stderr, "demo_worker %ld: %s: %s\n", (long)getpid(), what, why);
    exit(1);
}

static void must(int code, const char *what, const struct reshard_error *e)
{
    if (code != 0)
        die(what, e->text);
}

static void *must_alloc(size_t n, size_t bytes)
{
    void *p = calloc(n == 0 ? 1 : n, bytes);
    if (p == NULL)
        die("memory", "out");
    return p;
}

__attribute__((format(printf, 2, 3))) static void tell(const char *event, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)printf("{\"event\": \"%s\"", event);
    (void)vprintf(format, args);
    (void)printf("}\n");
    (void)fflush(stdout);
    va_end(args);
}

/* ---- values: a hash of tensor, element and version ---- */

static uint32_t mix(uint32_t h)
{
    h ^= h >> 16;
    h *= 0x7feb352dU;
    h ^= h >> 15;
    h *= 0x846ca68bU;
    return h ^ (h >> 16);
}

static uint32_t name_seed(const char *name)
{
    uint32_t h = 2166136261U; /* FNV-1a */
    for (; *name != '\0'; name++)
        h = (h ^ (uint8_t)*name) * 16777619U;
    return mix(h);
}

/* Of a run of elements whose first has the row-major number `first` in the whole tensor. */
static uint32_t run_seed(uint32_t tensor_seed, uint64_t version, uint64_t first)
{
    return mix(tensor_seed ^ mix((uint32_t)version) ^ mix((uint32_t)(first >> 32) + 0x9e3779b9U));
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define VECTORS /* ifuncs run before the sanitizer is ready */
#else
#define VECTORS __attribute__((optimize("O3"), target_clones("arch=x86-64-v4", "avx2", "default")))
#endif

static inline uint32_t element(uint32_t seed, uint32_t number)
{
    uint32_t h = number * 0x9e3779b1U + seed;
    h ^= h >> 15;
    h *= 0x85ebca77U;
    return h ^ (h >> 13);
}

/* For elements of 1, 2, 4 and 8 bytes: fills a run, or counts how many of it are not as they must
 * be. */
#define RUN_FUNCTION(type, expression)                                                             \
    VECTORS static uint64_t run_##type(type *at, uint64_t n, uint32_t seed, uint32_t first,        \
                                       bool fill)                                                  \
    {                                                                                              \
        uint64_t wrong = 0;                                                                        \
        for (uint64_t i = 0; fill && i < n; i++) {                                                 \
            uint32_t h = element(seed, first + (uint32_t)i);                                       \
            at[i] = (type)(expression);                                                            \
        }                                                                                          \
        for (uint64_t i = 0; !fill && i < n; i++) {                                                \
            uint32_t h = element(seed, first + (uint32_t)i);                                       \
            wrong += at[i] != (type)(expression);                                                  \
        }                                                                                          \
        return wrong;                                                                              \
    }
RUN_FUNCTION(uint8_t, h >> 24)
RUN_FUNCTION(uint16_t, h >> 16)
RUN_FUNCTION(uint32_t, h)
RUN_FUNCTION(uint64_t, ((uint64_t)h << 32) | (h * 0x2545f491U))

static uint64_t run(const struct part *p, void *at, uint64_t n, uint32_t seed, uint64_t first,
                    bool fill)
{
    switch (p->element_bytes) {
    case 1:
        return run_uint8_t(at, n, seed, (uint32_t)first, fill);
    case 2:
        return run_uint16_t(at, n, seed, (uint32_t)first, fill);
    case 4:
        return run_uint32_t(at, n, seed, (uint32_t)first, fill);
    default:
        return run_uint64_t(at, n, seed, (uint32_t)first, fill);
    }
}

/* Walks a part row by row. `fill`: writes it; else returns how many elements are wrong and, of the
 * first such row, where it begins. */
static uint64_t walk(const struct part *p, char *base, uint64_t version, bool fill,
                     uint64_t *ret_first_wrong)
{
    uint32_t rows_dims = p->n_dims == 0 ? 0 : p->n_dims - 1;
    uint64_t n_rows = 1, wrong = 0, row_length = p->n_dims == 0 ? 1 : p->box.size[rows_dims];
    for (uint32_t d = 0; d < rows_dims; d++)
        n_rows *= p->box.size[d];
    for (uint64_t row = 0; row < n_rows; row++) {
        uint64_t rest = row, number = 0, scale = 1;
        char *at = base + p->offset;
        for (uint32_t d = p->n_dims; d-- > 0;) {
            uint64_t i = 0;
            if (d < rows_dims) {
                i = rest % p->box.size[d];
                rest /= p->box.size[d];
            }
            number += (p->box.offset[d] + i) * scale;
            scale *= p->shape[d];
            at += (int64_t)i * p->stride[d];
        }
        uint64_t n = run(p, at, row_length, run_seed(p->seed, version, number), number, fill);
        if (n > 0 && wrong == 0)
            *ret_first_wrong = number;
        wrong += n;
    }
    return wrong;
}

static void fill_all(struct worker *w, uint64_t version)
{
    uint64_t unused;
    for (size_t i = 0; i < w->n_parts; i++)
        (void)walk(&w->parts[i], reshard_segment_data(w->live), version, true, &unused);
}

/* Every element of every part; the process ends where one is wrong. Returns how many there are. */
static uint64_t check_all(struct worker *w, uint64_t version)
{
    uint64_t checked = 0;
    for (size_t i = 0; i < w->n_parts; i++) {
        const struct part *p = &w->parts[i];
        uint64_t n = 1, first = 0;
        uint64_t wrong = walk(p, reshard_segment_data(w->live), version, false, &first);
        for (uint32_t d = 0; d < p->n_dims; d++)
            n *= p->box.size[d];
        checked += n;
        if (wrong > 0) {
            char text[512];
            (void)snprintf(text, sizeof text,
                           "tensor '%s' version %llu rank %u: %llu of %llu elements are wrong, the "
                           "first in the row that begins with element %llu",
                           p->tensor, (unsigned long long)version, w->options.rank,
                           (unsigned long long)wrong, (unsigned long long)n,
                           (unsigned long long)first);
            die("check", text);
        }
    }
    return checked;
}

/* ---- where the shards lie ---- */

static uint64_t align_up(uint64_t v)
{
    return (v + 127) & ~(uint64_t)127;
}

static void dense_strides(struct part *p)
{
    int64_t stride = (int64_t)p->element_bytes;
    for (uint32_t d = p->n_dims; d-- > 0;) {
        p->stride[d] = stride;
        stride *= (int64_t)p->box.size[d];
    }
}

static uint64_t part_bytes(const struct part *p)
{
    uint64_t bytes = p->element_bytes;
    for (uint32_t d = 0; d < p->n_dims; d++)
        bytes *= p->box.size[d];
    return bytes;
}

/* A part per box of this rank, dense strides, no place yet. */
static void collect_parts(struct worker *w)
{
    uint32_t n = reshard_layout_n_tensors(w->layout);
    w->parts = must_alloc(PIECES_MOST, sizeof *w->parts);
    for (uint32_t i = 0; i < n; i++) {
        struct reshard_tensor t;
        if (reshard_layout_tensor(w->layout, i, &t) != 0)
            die("layout", "tensor beyond the last");
        uint32_t n_boxes = reshard_layout_shards(w->layout, i, w->options.rank, NULL, 0);
        struct reshard_box *boxes = must_alloc(n_boxes, sizeof *boxes);
        (void)reshard_layout_shards(w->layout, i, w->options.rank, boxes, n_boxes);
        for (uint32_t k = 0; k < n_boxes; k++) {
            if (w->n_parts == PIECES_MOST)
                die("layout", "too many shards for the demo");
            struct part *p = &w->parts[w->n_parts++];
            *p = (struct part){.tensor = t.name,
                               .n_dims = t.n_dims,
                               .element_bytes = t.element_bytes,
                               .box = boxes[k],
                               .seed = name_seed(t.name)};
            memcpy(p->shape, t.shape, sizeof t.shape);
            dense_strides(p);
        }
        free(boxes);
    }
}

/* The part of the tensor whose name is `name` with `suffix` put in the place of `from`. */
static struct part *sibling(struct worker *w, const char *name, const char *from,
                            const char *suffix)
{
    size_t keep = strlen(name) - strlen(from);
    for (size_t i = 0; i < w->n_parts; i++)
        if (strncmp(w->parts[i].tensor, name, keep) == 0 &&
            strcmp(w->parts[i].tensor + keep, suffix) == 0)
            return &w->parts[i];
    return NULL;
}

static bool ends_with(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);
    return n >= m && strcmp(name + n - m, suffix) == 0;
}

static const char q_name[] = "q_proj.weight", k_name[] = "k_proj.weight",
                  v_name[] = "v_proj.weight", gate_name[] = "gate_proj.weight",
                  up_name[] = "up_proj.weight";

/* [q; k; v] one under the other, as engines fuse them: three pieces of one block. */
static bool place_qkv(struct worker *w, struct part *k, uint64_t *end)
{
    struct part *q = sibling(w, k->tensor, k_name, q_name);
    struct part *v = sibling(w, k->tensor, k_name, v_name);
    if (q == NULL || v == NULL)
        return false;
    struct part *order[] = {q, k, v};
    for (size_t i = 0; i < 3; i++) {
        order[i]->offset = *end;
        *end += part_bytes(order[i]);
    }
    return true;
}

/* gate and up row by row in turn, as engines do for one pass of SwiGLU: stride of two rows. */
static bool place_gate_up(struct worker *w, struct part *gate, uint64_t *end)
{
    struct part *up = sibling(w, gate->tensor, gate_name, up_name);
    if (up == NULL || gate->n_dims != 2 || memcmp(&gate->box, &up->box, sizeof gate->box) != 0)
        return false;
    int64_t row = gate->stride[0];
    gate->stride[0] = up->stride[0] = 2 * row;
    gate->offset = *end;
    up->offset = *end + (uint64_t)row;
    *end += 2 * part_bytes(gate);
    return true;
}

static void place_all(struct worker *w)
{
    uint64_t end = 0;
    for (size_t i = 0; i < w->n_parts; i++)
        w->parts[i].offset = UINT64_MAX;
    for (size_t i = 0; i < w->n_parts; i++) {
        struct part *p = &w->parts[i];
        end = align_up(end);
        if (w->options.fused && ends_with(p->tensor, k_name) && place_qkv(w, p, &end))
            continue;
        if (w->options.fused && ends_with(p->tensor, gate_name) && place_gate_up(w, p, &end))
            continue;
    }
    for (size_t i = 0; i < w->n_parts; i++)
        if (w->parts[i].offset == UINT64_MAX) {
            w->parts[i].offset = end = align_up(end);
            end += part_bytes(&w->parts[i]);
        }
    w->bytes = end == 0 ? 1 : end;
}

static struct reshard_piece *pieces_in(const struct worker *w, struct reshard_segment *segment)
{
    struct reshard_piece *pieces = must_alloc(w->n_parts, sizeof *pieces);
    for (size_t i = 0; i < w->n_parts; i++) {
        const struct part *p = &w->parts[i];
        pieces[i] = (struct reshard_piece){
            .tensor = p->tensor, .segment = segment, .offset_bytes = p->offset, .box = p->box};
        memcpy(pieces[i].stride_bytes, p->stride, sizeof p->stride);
    }
    return pieces;
}

/* ---- start ---- */

static struct reshard_layout *read_layout(const char *path)
{
    FILE *f = fopen(path, "r");
    if (f == NULL)
        die(path, strerror(errno));
    char *text = must_alloc(LAYOUT_MOST_BYTES, 1);
    size_t n = fread(text, 1, LAYOUT_MOST_BYTES, f);
    (void)fclose(f);
    struct reshard_error e;
    struct reshard_layout *layout = NULL;
    must(reshard_layout_from_json(text, n, &layout, &e), path, &e);
    free(text);
    return layout;
}

static void attach(struct worker *w)
{
    struct reshard_error e;
    const struct options *o = &w->options;
    bool staged = !o->source && !o->in_place;
    must(reshard_segment_new(w->client, w->bytes, CALL_MS, &w->live, &e), "live memory", &e);
    if (staged)
        must(reshard_segment_new(w->client, w->bytes, CALL_MS, &w->shadow, &e), "shadow memory",
             &e);
    struct reshard_attach a = {.model = o->model,
                               .side = o->source ? RESHARD_SOURCE : RESHARD_DESTINATION,
                               .layout = w->layout,
                               .rank = o->rank,
                               .device = o->device,
                               .n_live = w->n_parts};
    if (!o->source)
        a.receive = staged ? RESHARD_RECEIVE_STAGED : RESHARD_RECEIVE_IN_PLACE;
    struct reshard_piece *live = pieces_in(w, w->live);
    struct reshard_piece *shadow = staged ? pieces_in(w, w->shadow) : NULL;
    a.live = live;
    a.shadow = shadow;
    a.n_shadow = staged ? w->n_parts : 0;
    must(reshard_attach(w->client, &a, CALL_MS, &w->worker, &e), "attach", &e);
    free(live);
    free(shadow);
    tell("attached", ", \"bytes\": %llu, \"pieces\": %zu", (unsigned long long)w->bytes,
         w->n_parts);
}

/* ---- trainer ---- */

/* Events that a worker has no part in are passed over; what ends the demo ends it. */
static struct reshard_event next_event(struct worker *w)
{
    struct reshard_error e;
    struct reshard_event ev;
    must(reshard_next_event(w->worker, EVENT_MS, &ev, &e), "waiting for an event", &e);
    if (ev.type == RESHARD_EVENT_ABORTED)
        die("the refit was aborted", ev.reason);
    if (ev.type == RESHARD_EVENT_EVICTED)
        die("evicted", ev.reason);
    return ev;
}

static int show_progress(const struct reshard_state *s, void *arg)
{
    (void)arg;
    tell("progress", ", \"version\": %llu, \"phase\": \"%s\", \"landed\": %llu, \"total\": %llu",
         (unsigned long long)s->version, reshard_phase_name(s->phase),
         (unsigned long long)s->bytes.landed, (unsigned long long)s->bytes.total);
    return 0;
}

static void lead(struct worker *w, uint64_t version)
{
    struct reshard_error e;
    must(reshard_submit(w->client, w->options.model, version, NULL, CALL_MS, NULL, &e), "submit",
         &e);
    tell("submitted", ", \"version\": %llu", (unsigned long long)version);
    struct reshard_state state = {0};
    must(reshard_wait(w->client, w->options.model, version, RESHARD_UNTIL_COMMITTED, show_progress,
                      NULL, EVENT_MS, &state, &e),
         "waiting for the commit", &e);
    tell("version_committed", ", \"version\": %llu, \"seconds\": %.3f", (unsigned long long)version,
         (double)state.elapsed_ns * 1e-9);
}

static void train(struct worker *w, uint64_t version)
{
    struct reshard_error e;
    double begin = now_s();
    fill_all(w, version);
    double filled = now_s();
    must(reshard_publish(w->worker, version, NULL, 0, CALL_MS, &e), "publish", &e);
    tell("published", ", \"version\": %llu, \"fill_s\": %.3f, \"seconds\": %.3f",
         (unsigned long long)version, filled - begin, now_s() - filled);
    if (w->options.leader)
        lead(w, version);
    struct reshard_event ev;
    do
        ev = next_event(w);
    while (ev.type != RESHARD_EVENT_SOURCE_RELEASED || ev.version < version);
    tell("released", ", \"version\": %llu", (unsigned long long)version);
}

/* ---- inference ---- */

static void mark(struct worker *w, uint64_t version, const char *name)
{
    struct reshard_error e;
    must(reshard_mark(w->client, w->options.model, version, name, w->worker, CALL_MS, &e), "mark",
         &e);
}

static void committed(struct worker *w, uint64_t version)
{
    struct reshard_error e;
    double begin = now_s();
    if (w->shadow != NULL) {
        mark(w, version, "pause");
        must(reshard_apply(w->worker, version, CALL_MS, NULL, &e), "apply", &e);
    }
    mark(w, version, "resume");
    double applied = now_s();
    uint64_t n = check_all(w, version);
    tell("checked", ", \"version\": %llu, \"elements\": %llu, \"apply_s\": %.3f, \"seconds\": %.3f",
         (unsigned long long)version, (unsigned long long)n, applied - begin, now_s() - applied);
}

static void serve(struct worker *w)
{
    struct reshard_error e;
    uint64_t last = w->options.versions;
    for (uint64_t version = 0; version < last;) {
        struct reshard_event ev = next_event(w);
        if (ev.type == RESHARD_EVENT_READY_REQUESTED) {
            mark(w, ev.version, "pause");
            must(reshard_ready(w->worker, ev.version, CALL_MS, &e), "ready", &e);
            tell("ready", ", \"version\": %llu", (unsigned long long)ev.version);
        } else if (ev.type == RESHARD_EVENT_ACCEPT_REQUESTED) {
            must(reshard_accept(w->worker, ev.version, ev.attempt, CALL_MS, &e), "accept", &e);
            tell("accepted", ", \"version\": %llu", (unsigned long long)ev.version);
        } else if (ev.type == RESHARD_EVENT_COMMITTED && ev.version > version) {
            committed(w, ev.version);
            version = ev.version;
        }
    }
}

/* ---- main ---- */

static unsigned number(const char *text)
{
    char *end;
    unsigned long v = strtoul(text, &end, 10);
    if (end == text || *end != '\0' || v > 1000000)
        die(text, "is no number");
    return (unsigned)v;
}

static struct options parse(int argc, char **argv)
{
    struct options o = {.versions = 3};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(a, "--source") == 0)
            o.source = true;
        else if (strcmp(a, "--leader") == 0)
            o.leader = true;
        else if (strcmp(a, "--fused") == 0)
            o.fused = true;
        else if (strcmp(a, "--in-place") == 0)
            o.in_place = true;
        else if (strcmp(a, "--socket") == 0)
            o.socket = value, i++;
        else if (strcmp(a, "--model") == 0)
            o.model = value, i++;
        else if (strcmp(a, "--layout") == 0)
            o.layout = value, i++;
        else if (strcmp(a, "--rank") == 0)
            o.rank = number(value), i++;
        else if (strcmp(a, "--device") == 0)
            o.device = number(value), i++;
        else if (strcmp(a, "--versions") == 0)
            o.versions = number(value), i++;
        else
            die(a, "there is no such option; scripts/demo starts this program");
    }
    if (o.model == NULL || o.layout == NULL)
        die("options", "--model and --layout are needed");
    return o;
}

int main(int argc, char **argv)
{
    struct worker w = {.options = parse(argc, argv)};
    struct reshard_error e;
    w.layout = read_layout(w.options.layout);
    must(reshard_connect(w.options.socket, CALL_MS, &w.client, &e), "connect", &e);
    collect_parts(&w);
    place_all(&w);
    attach(&w);
    if (w.options.source)
        for (uint64_t v = 1; v <= w.options.versions; v++)
            train(&w, v);
    else
        serve(&w);
    tell("done", ", \"versions\": %u", w.options.versions);
    char c;
    while (read(STDIN_FILENO, &c, 1) > 0 || errno == EINTR)
        errno = 0;
    reshard_close(w.client);
    reshard_layout_free(w.layout);
    free(w.parts);
    return 0;
}
