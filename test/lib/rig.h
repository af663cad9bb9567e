/* Drives a data plane as the control process does: a real socket pair, memfds, plans of the real
 * planner. For tests and benchmarks of exec; include it in one .c only.
 *
 * One node's data plane; all devices are its own, unless the test says of which node each is, and
 * which node this is. Each device has the domain that the test gives it. Every rank is a worker
 * with its memory in a memfd. Pieces are laid out by the rig itself, so that what lands is checked
 * through addresses that the code under test had no part in. */
#ifndef RS_TEST_RIG_H
#define RS_TEST_RIG_H

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "exec/data_plane.h"
#include "exec/wire.h"
#include "layout/layout.h"
#include "memory/memory.h"
#include "plan/plan.h"
#include "plan/planner.h"
#include "plan/program.h"

/* Asserts of its own, since benchmarks use it without Check: they print and abort. */
#define rig_assert_msg(cond, ...)                                                                  \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);                             \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)
#define rig_assert(cond)    rig_assert_msg(cond, "failed")
#define rig_assert_eq(a, b) rig_assert_msg((a) == (b), "failed")
#define rig_assert_ne(a, b) rig_assert_msg((a) != (b), "failed")
#define rig_assert_ge(a, b) rig_assert_msg((a) >= (b), "failed")
#define rig_assert_le(a, b) rig_assert_msg((a) <= (b), "failed")
#define rig_assert_lt(a, b) rig_assert_msg((a) < (b), "failed")
#define rig_assert_gt(a, b) rig_assert_msg((a) > (b), "failed")

enum { RIG_MAX_LAYOUTS = 3, RIG_MAX_DEVICES = 16, RIG_POISON = 0xA5, RIG_MODEL = 5 };

struct rig_memory {
    int fd;
    uint8_t *data;
    size_t bytes;
    struct binding_piece *pieces; /* offsets and strides as bound */
    uint32_t n_pieces, capacity;
};

struct rig_worker {
    uint64_t id;
    uint32_t layout; /* 0: source; 1 + l: destination l */
    uint32_t rank, device;
    struct rig_memory memory[2];
    bool shadow;
};

struct rig_options {
    uint32_t n_devices;
    uint32_t domain[RIG_MAX_DEVICES];
    uint32_t node_of[RIG_MAX_DEVICES]; /* of each device */
    uint32_t node;                     /* whose data plane this is */
    struct wire_hello hello;           /* n_devices is filled in */
    struct plan_options plan;
    /* The bits of an element, from its layout, tensor and linear index; NULL: rig_value */
    uint64_t (*value)(const struct layout *l, uint32_t tensor, uint64_t linear, uint64_t version);
    bool fused;    /* random gaps and splits in the workers' memory */
    bool shadow;   /* destinations receive into shadow memory */
    bool process;  /* the data plane is a forked child, not a thread */
    long fail_at;  /* its n-th allocation fails (process only); 0: none */
    bool lenient;  /* refusals while attaching are noted, not fatal */
    int answer_ms; /* how long an answer may take; 0: 20 s */
    uint64_t seed;
};

struct rig {
    struct rig_options o;
    int control;
    pthread_t thread;
    pid_t child;
    uint64_t request, attempt, version;
    struct topology topology;
    struct device_place devices[RIG_MAX_DEVICES];
    char *nodes[RIG_MAX_DEVICES], *domains[RIG_MAX_DEVICES];
    char texts[2 * RIG_MAX_DEVICES][8];
    struct layout *layouts[1 + RIG_MAX_LAYOUTS];
    int32_t *rank_device[1 + RIG_MAX_LAYOUTS];
    uint32_t n_layouts; /* destinations */
    struct plan *plan;
    struct buf encoded;
    struct program program;
    int program_fd, index_fd; /* the same for all PREPAREs, as a control process has it */
    struct rig_worker *workers;
    uint32_t n_workers;
    struct wire_packet *packet; /* the last answer */
    struct wire_progress progress;
    uint32_t n_progress;
    uint64_t epoch;               /* 1, until the test counts it up */
    uint16_t data_port;           /* of READY */
    char local[WIRE_LOCAL_BYTES]; /* of READY */
    /* Further parts of the next PREPAREs, where not empty. */
    struct buf peers, skips, comm;
    uint64_t deadline_ns;
    bool refused, gone; /* lenient: something was refused; the data plane has gone */
};

/* --- values ----------------------------------------------------------------------------------- */

/* Computes into memory that no other thread knows: most of what a test with large tensors does, several times slower where
 * ThreadSanitizer looks at it, and nothing there for it to see. */
#define RIG_COMPUTES __attribute__((no_sanitize("thread")))

/* The element's bits in `dtype`. Floats are small whole numbers, which every float dtype here holds
 * exactly, so that a declared cast has one right answer. */
RIG_COMPUTES static inline uint64_t rig_value(uint32_t tensor, uint64_t linear, uint64_t version,
                                              uint8_t dtype)
{
    uint64_t v = (linear + 1) * UINT64_C(0x9E3779B97F4A7C15) + tensor * 1000003U + version * 77U;
    v = (v ^ v >> 30) * UINT64_C(0xBF58476D1CE4E5B9); /* random_next's */
    v = (v ^ v >> 27) * UINT64_C(0x94D049BB133111EB);
    v ^= v >> 31;
    float f = (float)(int)(v % 255) - 127.0F;
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    if (dtype == DTYPE_FLOAT32)
        return bits;
    if (dtype == DTYPE_BFLOAT16)
        return bits >> 16;
    return v;
}

static inline uint64_t rig_linear(const struct tensor *t, const uint64_t *index)
{
    uint64_t linear = 0;
    for (unsigned d = 0; d < t->n_dims; d++)
        linear = linear * t->shape[d] + index[d];
    return linear;
}

/* The next global index in the box, row-major. */
#define RIG_NEXT_INDEX(box, index)                                                                 \
    for (int d_ = (box)->n_dims - 1; d_ >= 0; d_--) {                                              \
        if (++(index)[d_] < (box)->offset[d_] + (box)->size[d_])                                   \
            break;                                                                                 \
        (index)[d_] = (box)->offset[d_];                                                           \
    }

enum { RIG_RUN_BYTES = 4096 };

/* n elements one behind the other. */
RIG_COMPUTES static inline void rig_values(const struct rig *r, const struct layout *l,
                                           uint32_t tensor, uint64_t linear, uint32_t n,
                                           uint64_t version, uint8_t *run)
{
    uint8_t dtype = (uint8_t)l->tensors[tensor].dtype;
    uint32_t size = dtype_bytes(dtype);
    for (uint32_t i = 0; i < n; i++, linear++) {
        uint64_t v = r->o.value != NULL ? r->o.value(l, tensor, linear, version)
                                        : rig_value(tensor, linear, version, dtype);
        for (uint32_t k = 0; k < size; k++)
            run[i * size + k] = (uint8_t)(v >> 8 * k);
    }
}

/* Elements of one row, from `memory` on in steps of `stride`. */
static inline void rig_write_row(const struct rig *r, const struct layout *l, uint32_t tensor,
                                 uint64_t linear, uint64_t n, uint64_t version, uint8_t *memory,
                                 int64_t stride)
{
    uint8_t run[RIG_RUN_BYTES];
    uint32_t size = dtype_bytes(l->tensors[tensor].dtype), most = RIG_RUN_BYTES / size;
    for (uint64_t done = 0; done < n; done += most) {
        uint32_t some = n - done < most ? (uint32_t)(n - done) : most;
        rig_values(r, l, tensor, linear + done, some, version, run);
        if (stride == (int64_t)size)
            memcpy(memory + (int64_t)done * stride, run, (size_t)some * size);
        else
            for (uint32_t i = 0; i < some; i++)
                memcpy(memory + (int64_t)(done + i) * stride, run + (size_t)i * size, size);
    }
}

static inline void rig_write_piece(const struct rig *r, const struct layout *l,
                                   const struct binding_piece *p, uint8_t *memory, uint64_t version)
{
    const struct tensor *t = &l->tensors[p->tensor];
    unsigned n_dims = t->n_dims;
    struct box rows = p->box; /* one element of each row */
    uint64_t index[BOX_MAX_DIMS], n = n_dims > 0 ? p->box.size[n_dims - 1] : 1;
    if (n_dims > 0 && n > 0)
        rows.size[n_dims - 1] = 1;
    memcpy(index, p->box.offset, sizeof(index));
    for (uint64_t i = box_elements(&rows); i > 0; i--) {
        uint8_t *at = memory + p->offset;
        for (unsigned d = 0; d < n_dims; d++)
            at += (int64_t)(index[d] - p->box.offset[d]) * p->stride_bytes[d];
        rig_write_row(r, l, p->tensor, rig_linear(t, index), n, version, at,
                      n_dims > 0 ? p->stride_bytes[n_dims - 1] : 0);
        RIG_NEXT_INDEX(&rows, index)
    }
}

/* What the memory must look like: poison, and the elements of its pieces. */
static inline void rig_write(const struct rig *r, const struct rig_worker *w, unsigned memory,
                             uint8_t *out, uint64_t version)
{
    const struct rig_memory *m = &w->memory[memory];
    memset(out, RIG_POISON, m->bytes);
    for (uint32_t i = 0; i < m->n_pieces; i++)
        rig_write_piece(r, r->layouts[w->layout], &m->pieces[i], out, version);
}

static inline void rig_fill_sources(struct rig *r, uint64_t version)
{
    for (uint32_t i = 0; i < r->n_workers; i++)
        if (r->workers[i].layout == 0)
            rig_write(r, &r->workers[i], WIRE_LIVE, r->workers[i].memory[WIRE_LIVE].data, version);
}

static inline void rig_poison_destinations(struct rig *r)
{
    for (uint32_t i = 0; i < r->n_workers; i++)
        for (unsigned m = 0; m < 2; m++)
            if (r->workers[i].layout != 0 && r->workers[i].memory[m].bytes > 0)
                memset(r->workers[i].memory[m].data, RIG_POISON, r->workers[i].memory[m].bytes);
}

static inline unsigned rig_target(const struct rig *r)
{
    return r->o.shadow ? WIRE_SHADOW : WIRE_LIVE;
}

/* Number of workers whose memory is not exactly what it must be. */
static inline uint32_t rig_wrong(const struct rig *r, unsigned memory, uint64_t version)
{
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < r->n_workers; i++) {
        const struct rig_worker *w = &r->workers[i];
        if (w->layout == 0 || w->memory[memory].bytes == 0)
            continue;
        uint8_t *expected = malloc(w->memory[memory].bytes);
        rig_write(r, w, memory, expected, version);
        wrong += memcmp(expected, w->memory[memory].data, w->memory[memory].bytes) != 0;
        free(expected);
    }
    return wrong;
}

RIG_COMPUTES static inline uint64_t rig_sum(uint64_t sum, const uint8_t *run, size_t n)
{
    for (size_t k = 0; k < n; k++)
        sum = sum * 31 + run[k];
    return sum;
}

static inline uint64_t rig_checksum(const struct rig *r)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < r->n_workers; i++)
        for (unsigned m = 0; m < 2; m++) {
            uint8_t run[RIG_RUN_BYTES];
            size_t bytes = r->workers[i].memory[m].bytes, some;
            for (size_t done = 0; done < bytes; done += some) {
                some = bytes - done < sizeof(run) ? bytes - done : sizeof(run);
                memcpy(run, r->workers[i].memory[m].data + done, some);
                sum = rig_sum(sum, run, some);
            }
        }
    return sum;
}

/* --- memory of workers ------------------------------------------------------------------------ */

static inline void rig_piece(struct rig_memory *m, uint32_t tensor, const struct box *box,
                             uint32_t size, bool fused, uint64_t *seed)
{
    if (m->n_pieces == m->capacity) {
        m->capacity = m->capacity * 2 + 16;
        m->pieces = realloc(m->pieces, m->capacity * sizeof(*m->pieces));
    }
    struct binding_piece *p = &m->pieces[m->n_pieces++];
    memset(p, 0, sizeof(*p));
    p->tensor = tensor;
    p->box = *box;
    int64_t stride = size;
    for (unsigned d = box->n_dims; d-- > 0;) {
        p->stride_bytes[d] = stride;
        stride *= (int64_t)box->size[d];
        if (fused && d > 0 && random_next(seed) % 3 == 0)
            stride += (int64_t)(size * (random_next(seed) % 4));
    }
    uint64_t gap = fused ? random_next(seed) % 3 * size : 0;
    m->bytes = (m->bytes + 63) / 64 * 64 + gap;
    p->offset = m->bytes;
    m->bytes += box_empty(box) ? 0 : (uint64_t)stride;
}

static inline void rig_shard(struct rig_memory *m, uint32_t tensor, struct box box, uint32_t size,
                             bool fused, uint64_t *seed)
{
    if (fused && box.n_dims > 0) {
        unsigned d = (unsigned)(random_next(seed) % box.n_dims);
        if (box.size[d] > 1 && random_next(seed) % 2 == 0) {
            struct box rest = box;
            box.size[d] = 1 + random_next(seed) % (box.size[d] - 1);
            rest.offset[d] += box.size[d];
            rest.size[d] -= box.size[d];
            rig_piece(m, tensor, &rest, size, fused, seed);
        }
    }
    rig_piece(m, tensor, &box, size, fused, seed);
}

static inline void rig_allocate(struct rig_memory *m, const struct layout *l, uint32_t rank,
                                bool fused, uint64_t *seed)
{
    for (uint32_t t = 0; t < l->n_tensors; t++) {
        struct box boxes[64];
        uint32_t n = layout_shards(l, t, rank, boxes, 64);
        for (uint32_t i = 0; i < n; i++)
            rig_shard(m, t, boxes[i], dtype_bytes(l->tensors[t].dtype), fused, seed);
    }
    m->bytes = (m->bytes + 4096) / 4096 * 4096;
    m->fd = memfd_create("rig", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    rig_assert_ge(m->fd, 0);
    rig_assert_eq(ftruncate(m->fd, (off_t)m->bytes), 0);
    m->data = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, m->fd, 0);
    rig_assert_ne(m->data, MAP_FAILED);
    rig_assert_eq(fcntl(m->fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    memset(m->data, RIG_POISON, m->bytes);
}

/* --- packets ---------------------------------------------------------------------------------- */

static inline struct wire_header rig_header(struct rig *r, uint32_t type, uint64_t worker)
{
    return (struct wire_header){.type = type,
                                .incarnation = 11,
                                .request = ++r->request,
                                .model = RIG_MODEL,
                                .epoch = r->epoch,
                                .attempt = r->attempt,
                                .version = r->version,
                                .worker = worker};
}

static inline void rig_take_progress(struct rig *r)
{
    struct wire_progress p;
    rig_assert_eq(r->packet->header.body_bytes, sizeof(p));
    memcpy(&p, r->packet->body, sizeof(p));
    rig_assert_ge(p.done_bytes, r->progress.done_bytes);
    rig_assert_le(p.done_bytes, p.total_bytes);
    rig_assert(r->progress.first_byte_ns == 0 || p.first_byte_ns == r->progress.first_byte_ns);
    rig_assert(r->progress.sources_read_ns == 0 ||
               p.sources_read_ns == r->progress.sources_read_ns);
    r->progress = p;
    r->n_progress++;
}

/* The next packet: true, or false when none comes in time or the other side is gone. */
static inline bool rig_receive(struct rig *r, int ms)
{
    struct pollfd fd = {.fd = r->control, .events = POLLIN};
    wire_packet_close(r->packet);
    return poll(&fd, 1, ms) == 1 && wire_receive(r->control, r->packet, NULL) == 0;
}

/* Waits for the answer to `request`; its type. PROGRESS on the way is checked and kept. */
static inline uint32_t rig_answer(struct rig *r, uint64_t request)
{
    for (;;) {
        rig_assert_msg(rig_receive(r, 20000), "no answer to request %llu",
                       (unsigned long long)request);
        if (r->packet->header.type == WIRE_PROGRESS)
            rig_take_progress(r);
        else if (r->packet->header.request == request)
            break;
    }
    if (r->packet->header.type == WIRE_STAGED)
        rig_take_progress(r);
    return r->packet->header.type;
}

static inline int rig_answer_ms(const struct rig *r)
{
    return r->o.answer_ms != 0 ? r->o.answer_ms : 20000;
}

/* As rig_answer, but the other side may be gone: 0 then. */
static inline uint32_t rig_try(struct rig *r, uint64_t request)
{
    while (!r->gone) {
        r->gone = !rig_receive(r, rig_answer_ms(r));
        if (!r->gone && r->packet->header.type != WIRE_PROGRESS &&
            r->packet->header.request == request)
            return r->packet->header.type;
    }
    return 0;
}

static inline uint64_t rig_send(struct rig *r, uint32_t type, uint64_t worker, const void *body,
                                size_t body_bytes, const void *table, size_t table_bytes,
                                const int *fds, uint32_t n_fds)
{
    struct wire_header h = rig_header(r, type, worker);
    int sent = wire_send(r->control, &h, body, body_bytes, table, table_bytes, fds, n_fds, NULL);
    rig_assert(sent == 0 || (r->o.lenient && sent == RS_EPEER));
    r->gone = r->gone || sent != 0;
    return h.request;
}

static inline const struct wire_failure *rig_failure(struct rig *r)
{
    static struct wire_failure f;
    memset(&f, 0, sizeof(f));
    if (r->packet->header.code != 0 && r->packet->header.body_bytes == sizeof(f))
        memcpy(&f, r->packet->body, sizeof(f));
    return &f;
}

static inline void rig_expect(struct rig *r, uint64_t request, uint32_t type)
{
    uint32_t got = r->o.lenient ? rig_try(r, request) : rig_answer(r, request);
    if (r->o.lenient && (got != type || r->packet->header.code != 0)) {
        r->refused = true;
        return;
    }
    rig_assert_msg(got == type, "%s came: %s", wire_type_name(got), rig_failure(r)->text);
}

/* The u64 table that came with the answer; the caller frees it. */
static inline uint64_t *rig_table(struct rig *r, size_t n)
{
    const void *data;
    size_t bytes;
    rig_assert_eq(r->packet->n_fds, 1);
    rig_assert_eq(wire_map_fd(r->packet->fds[0], &data, &bytes, NULL), 0);
    rig_assert_eq(bytes, n * sizeof(uint64_t));
    uint64_t *copy = malloc(bytes + 1);
    memcpy(copy, data, bytes);
    wire_unmap(data, bytes);
    return copy;
}

/* --- attach ----------------------------------------------------------------------------------- */

static inline void rig_map(struct rig *r, struct rig_worker *w, unsigned memory)
{
    struct wire_map m = {.bytes = w->memory[memory].bytes,
                         .segment = memory,
                         .device = w->device,
                         .writable = w->layout != 0};
    rig_expect(r, rig_send(r, WIRE_MAP, w->id, &m, sizeof(m), NULL, 0, &w->memory[memory].fd, 1),
               WIRE_MAPPED);
    rig_assert_msg(r->refused || r->packet->header.code == 0, "%s", rig_failure(r)->text);
}

static inline void rig_bind(struct rig *r, struct rig_worker *w, unsigned memory)
{
    const struct layout *l = r->layouts[w->layout];
    const struct rig_memory *m = &w->memory[memory];
    struct binding_piece *pieces = mem_calloc(m->n_pieces, sizeof(*pieces));
    struct binding *b = NULL;
    struct buf encoded;
    uint8_t *dtypes = malloc(l->n_tensors + 1);
    if (m->n_pieces > 0)
        memcpy(pieces, m->pieces, m->n_pieces * sizeof(*pieces));
    for (uint32_t i = 0; i < m->n_pieces; i++)
        pieces[i].segment = memory;
    for (uint32_t t = 0; t < l->n_tensors; t++)
        dtypes[t] = (uint8_t)l->tensors[t].dtype;
    rig_assert_eq(binding_new(pieces, m->n_pieces, l->n_tensors, &b), 0);
    buf_init(&encoded);
    rig_assert_eq(binding_encode(b, &encoded), 0);
    int fds[2] = {wire_memfd("binding", encoded.data, encoded.n_bytes, NULL),
                  wire_memfd("dtypes", dtypes, l->n_tensors, NULL)};
    struct wire_bind body = {.device = w->device, .memory = memory, .n_tensors = l->n_tensors};
    rig_expect(r, rig_send(r, WIRE_BIND, w->id, &body, sizeof(body), NULL, 0, fds, 2), WIRE_BOUND);
    rig_assert_msg(r->refused || r->packet->header.code == 0, "%s", rig_failure(r)->text);
    close(fds[0]);
    close(fds[1]);
    buf_close(&encoded);
    binding_free(b);
    free(dtypes);
}

/* A device's number on its own node. */
static inline uint32_t rig_local(const struct rig *r, uint32_t device)
{
    uint32_t local = 0;
    for (uint32_t d = 0; d < device; d++)
        local += r->o.node_of[d] == r->o.node_of[device] ? 1 : 0;
    return local;
}

static inline bool rig_has_rank(const struct rig *r, uint32_t layout, uint32_t rank)
{
    int32_t device = r->rank_device[layout][rank];
    return device >= 0 && r->o.node_of[device] == r->o.node;
}

static inline void rig_attach(struct rig *r, uint32_t layout, uint32_t rank, uint64_t *seed)
{
    struct rig_worker *w = &r->workers[r->n_workers];
    memset(w, 0, sizeof(*w));
    w->id = 100 + r->n_workers++;
    w->layout = layout;
    w->rank = rank;
    w->device = rig_local(r, (uint32_t)r->rank_device[layout][rank]);
    w->shadow = layout != 0 && r->o.shadow;
    for (unsigned m = 0; m < (w->shadow ? 2U : 1U); m++) {
        rig_allocate(&w->memory[m], r->layouts[layout], rank, r->o.fused, seed);
        rig_map(r, w, m);
        rig_bind(r, w, m);
    }
}

/* --- life ------------------------------------------------------------------------------------- */

static inline void *rig_plane(void *arg)
{
    return (void *)(intptr_t)data_plane_run((int)(intptr_t)arg);
}

static inline void rig_spawn(struct rig *r)
{
    int pair[2];
    rig_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    r->control = pair[0];
    if (!r->o.process) {
        rig_assert_eq(pthread_create(&r->thread, NULL, rig_plane, (void *)(intptr_t)pair[1]), 0);
        return;
    }
    r->child = fork();
    rig_assert_ge(r->child, 0);
    if (r->child == 0) {
        close(pair[0]);
        mem_fail_at(r->o.fail_at);
        _exit(data_plane_run(pair[1]));
    }
    close(pair[1]);
}

static inline void rig_hello(struct rig *r)
{
    struct wire_hello h = r->o.hello;
    struct wire_ready ready = {0};
    h.n_devices = 0;
    for (uint32_t d = 0; d < r->o.n_devices; d++)
        h.n_devices += r->o.node_of[d] == r->o.node ? 1 : 0;
    if (h.ring_slots == 0)
        h.ring_slots = r->o.plan.ring_slots;
    if (h.slot_bytes == 0)
        h.slot_bytes = r->o.plan.chunk_bytes;
    if (h.backend[0] == '\0')
        memcpy(h.backend, "host", 5);
    rig_expect(r, rig_send(r, WIRE_HELLO, 0, &h, sizeof(h), NULL, 0, NULL, 0), WIRE_READY);
    if (!r->refused && !r->gone && r->packet->header.body_bytes >= sizeof(ready))
        memcpy(&ready, r->packet->body, sizeof(ready));
    r->data_port = ready.data_port;
    memcpy(r->local, ready.local, sizeof r->local);
}

static inline void rig_topology(struct rig *r)
{
    uint32_t n_domains = 0, n_nodes = 0;
    for (uint32_t i = 0; i < r->o.n_devices; i++) {
        r->devices[i] = (struct device_place){r->o.node_of[i], rig_local(r, i), r->o.domain[i]};
        n_domains = r->o.domain[i] + 1 > n_domains ? r->o.domain[i] + 1 : n_domains;
        n_nodes = r->o.node_of[i] + 1 > n_nodes ? r->o.node_of[i] + 1 : n_nodes;
    }
    for (uint32_t i = 0; i < RIG_MAX_DEVICES; i++) {
        r->nodes[i] = r->texts[i];
        r->domains[i] = r->texts[RIG_MAX_DEVICES + i];
        snprintf(r->nodes[i], sizeof(r->texts[0]), "n%u", i);
        snprintf(r->domains[i], sizeof(r->texts[0]), "d%u", i);
    }
    r->topology = (struct topology){.nodes = r->nodes,
                                    .n_nodes = n_nodes,
                                    .domains = r->domains,
                                    .n_domains = n_domains,
                                    .devices = r->devices,
                                    .n_devices = r->o.n_devices,
                                    .network_bytes_per_s = r->o.hello.network_bytes_per_s,
                                    .domain_bytes_per_s = r->o.hello.domain_bytes_per_s};
}

/* Index of a program tensor in destination layout l, where that has it so; UINT32_MAX. */
static inline uint32_t rig_index(const struct rig *r, uint32_t l, const struct program_tensor *t)
{
    const struct layout *to = r->layouts[1 + l];
    const char *name = t->value == PROGRAM_SCALES
                           ? r->layouts[1 + t->named_layout]->tensors[t->named_tensor].name
                           : r->layouts[0]->tensors[t->index].name;
    int64_t found = layout_find(to, name);
    if (found < 0)
        return UINT32_MAX;
    bool derived = to->tensors[found].derived_from != NULL;
    return derived == (t->value == PROGRAM_SCALES) ? (uint32_t)found : UINT32_MAX;
}

/* Index of each program tensor in each destination layout, as the control process makes it. */
static inline int rig_index_fd(struct rig *r)
{
    size_t n = r->program.n_tensors;
    uint32_t *index = malloc(n * r->n_layouts * sizeof(*index) + 1);
    for (uint32_t l = 0; l < r->n_layouts; l++)
        for (uint32_t t = 0; t < n; t++) {
            index[l * n + t] = rig_index(r, l, &r->program.tensors[t]);
        }
    int fd = wire_memfd("index", index, n * r->n_layouts * sizeof(*index), NULL);
    free(index);
    return fd;
}

/* Layouts and rank_device are set: plans, starts the data plane, attaches all workers. */
static inline void rig_open(struct rig *r)
{
    const struct layout *destinations[RIG_MAX_LAYOUTS];
    const int32_t *devices[RIG_MAX_LAYOUTS];
    struct err e = {0};
    uint64_t seed = r->o.seed + 1;
    uint32_t n = 0;
    for (uint32_t l = 0; l < r->n_layouts; l++) {
        destinations[l] = r->layouts[1 + l];
        devices[l] = r->rank_device[1 + l];
    }
    rig_topology(r);
    struct plan_input input = {.source = r->layouts[0],
                               .source_device = r->rank_device[0],
                               .n_destinations = r->n_layouts,
                               .destinations = destinations,
                               .destination_device = devices,
                               .topology = &r->topology,
                               .options = r->o.plan};
    rig_assert_msg(plan_make(&input, &r->plan, &e) == 0, "%s", e.text);
    buf_init(&r->encoded);
    rig_assert_msg(plan_program(r->plan, r->o.node, &r->encoded, &e) == 0, "%s", e.text);
    rig_assert_msg(program_open(r->encoded.data, r->encoded.n_bytes, &r->program, &e) == 0, "%s",
                   e.text);
    r->program_fd = wire_memfd("program", r->encoded.data, r->encoded.n_bytes, NULL);
    r->index_fd = rig_index_fd(r);
    r->packet = calloc(1, sizeof(*r->packet));
    r->attempt = 0;
    r->version = 1;
    r->epoch = 1;
    buf_init(&r->peers);
    buf_init(&r->skips);
    buf_init(&r->comm);
    rig_spawn(r);
    rig_hello(r);
    for (uint32_t l = 0; l <= r->n_layouts; l++)
        n += r->layouts[l]->n_ranks;
    r->workers = calloc(n, sizeof(*r->workers));
    for (uint32_t l = 0; l <= r->n_layouts; l++)
        for (uint32_t i = 0; i < r->layouts[l]->n_ranks; i++)
            if (rig_has_rank(r, l, i))
                rig_attach(r, l, i, &seed);
}

/* Ends the data plane by STOP or by closing the socket; returns its exit status. */
static inline int rig_end(struct rig *r, bool by_stop)
{
    void *status = NULL;
    int child = 0;
    if (by_stop)
        (void)rig_send(r, WIRE_STOP, 0, NULL, 0, NULL, 0, NULL, 0);
    else
        close(r->control);
    if (r->o.process)
        rig_assert_eq(waitpid(r->child, &child, 0), r->child);
    else
        pthread_join(r->thread, &status);
    if (by_stop)
        close(r->control);
    if (r->o.process)
        return WIFEXITED(child) ? WEXITSTATUS(child) : -1;
    return (int)(intptr_t)status;
}

static inline void rig_free(struct rig *r)
{
    for (uint32_t i = 0; i < r->n_workers; i++)
        for (unsigned m = 0; m < 2; m++)
            if (r->workers[i].memory[m].bytes > 0) {
                munmap(r->workers[i].memory[m].data, r->workers[i].memory[m].bytes);
                close(r->workers[i].memory[m].fd);
                free(r->workers[i].memory[m].pieces);
            }
    free(r->workers);
    wire_packet_close(r->packet);
    free(r->packet);
    close(r->program_fd);
    close(r->index_fd);
    buf_close(&r->encoded);
    buf_close(&r->peers);
    buf_close(&r->skips);
    buf_close(&r->comm);
    plan_free(r->plan);
    for (uint32_t l = 0; l <= r->n_layouts; l++) {
        layout_free(r->layouts[l]);
        free(r->rank_device[l]);
    }
}

static inline void rig_close(struct rig *r)
{
    rig_assert_eq(rig_end(r, true), EXIT_SUCCESS);
    rig_free(r);
}

/* --- a refit ---------------------------------------------------------------------------------- */

static inline struct rig_worker *rig_worker(struct rig *r, uint32_t layout, uint32_t rank)
{
    for (uint32_t i = 0; i < r->n_workers; i++)
        if (r->workers[i].layout == layout && r->workers[i].rank == rank)
            return &r->workers[i];
    return NULL;
}

static inline uint64_t rig_send_prepare(struct rig *r, enum wire_verify verify, const uint8_t *held)
{
    struct wire_prepare m = {.deadline_ns = r->deadline_ns,
                             .n_places = r->program.n_places,
                             .verify = verify,
                             .has_held = held != NULL,
                             .has_peers = r->peers.n_bytes > 0,
                             .has_skips = r->skips.n_bytes > 0,
                             .has_comm = r->comm.n_bytes > 0,
                             .n_layouts = r->n_layouts};
    struct wire_place *places = calloc(r->program.n_places + 1, sizeof(*places));
    for (uint32_t i = 0; i < r->program.n_places; i++) {
        const struct program_place *p = &r->program.places[i];
        if (p->side == PROGRAM_SCRATCH)
            continue;
        uint32_t layout = p->side == PROGRAM_SOURCE ? 0 : 1 + p->layout;
        places[i].worker = rig_worker(r, layout, p->rank)->id;
        places[i].memory = layout == 0 ? WIRE_LIVE : rig_target(r);
    }
    uint32_t n = 2;
    int fds[WIRE_MAX_FDS] = {r->program_fd, r->index_fd};
    if (held != NULL)
        fds[n++] = wire_memfd("held", held, r->program.n_holds, NULL);
    if (m.has_peers)
        fds[n++] = wire_memfd("peers", r->peers.data, r->peers.n_bytes, NULL);
    if (m.has_skips)
        fds[n++] = wire_memfd("skips", r->skips.data, r->skips.n_bytes, NULL);
    if (m.has_comm)
        fds[n++] = wire_memfd("comm", r->comm.data, r->comm.n_bytes, NULL);
    memset(&r->progress, 0, sizeof(r->progress));
    uint64_t request = rig_send(r, WIRE_PREPARE, 0, &m, sizeof(m), places,
                                r->program.n_places * sizeof(*places), fds, n);
    for (uint32_t i = 2; i < n; i++)
        close(fds[i]);
    free(places);
    return request;
}

static inline void rig_prepare(struct rig *r, enum wire_verify verify)
{
    r->attempt++;
    rig_expect(r, rig_send_prepare(r, verify, NULL), WIRE_PREPARED);
}

static inline uint64_t rig_send_start(struct rig *r)
{
    return rig_send(r, WIRE_START, 0, NULL, 0, NULL, 0, NULL, 0);
}

static inline void rig_abort(struct rig *r)
{
    rig_expect(r, rig_send(r, WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0), WIRE_QUIESCED);
}

/* PREPARE and START; the table per hold (the caller frees it). */
static inline uint64_t *rig_refit(struct rig *r, enum wire_verify verify)
{
    rig_prepare(r, verify);
    rig_expect(r, rig_send_start(r), WIRE_STAGED);
    rig_assert_eq(r->progress.done_bytes, r->progress.total_bytes);
    return rig_table(r, r->program.n_holds);
}

/* --- layouts ---------------------------------------------------------------------------------- */

static inline struct layout *rig_layout(const char *json)
{
    struct layout *l = NULL;
    struct err e = {0};
    int r = layout_from_json(json, strlen(json), &l, &e);
    rig_assert_msg(r == 0, "%s in %s", e.text, json);
    rig_assert_eq(layout_digest(l), 0);
    return l;
}

/* Sets layout number `number`, its ranks on devices first, first + 1 … (modulo n). */
static inline void rig_side(struct rig *r, uint32_t number, const char *json, uint32_t first,
                            uint32_t n)
{
    r->layouts[number] = rig_layout(json);
    uint32_t ranks = r->layouts[number]->n_ranks;
    r->rank_device[number] = malloc(ranks * sizeof(int32_t));
    for (uint32_t i = 0; i < ranks; i++)
        r->rank_device[number][i] = (int32_t)(first + i % n);
    if (number > r->n_layouts)
        r->n_layouts = number;
}

/* A random layout of `n_tensors` tensors whose shapes and dtypes follow from `shapes` alone. */
static inline char *rig_random_json(uint64_t shapes, uint64_t seed, const char *name,
                                    uint32_t ranks, uint32_t n_tensors, bool cast)
{
    static const char *const dtypes[] = {"bfloat16", "float32", "int64", "uint8", "float16"};
    struct buf b;
    uint32_t d0 = 1;
    while (d0 < ranks && random_next(&seed) % 2 == 0)
        d0++;
    while (ranks % d0 != 0)
        d0--;
    buf_init(&b);
    buf_printf(&b,
               "{\"name\":\"%s\",\"ranks\":%u,\"meshes\":[{\"name\":\"m\",\"shape\":[%u,%u],"
               "\"ranks\":[",
               name, ranks, d0, ranks / d0);
    for (uint32_t i = 0; i < ranks; i++)
        buf_printf(&b, "%s%u", i > 0 ? "," : "", i);
    buf_printf(&b, "]}],\"tensors\":[");
    for (uint32_t t = 0; t < n_tensors; t++) {
        unsigned n_dims = (unsigned)(random_next(&shapes) % 4);
        const char *dtype = dtypes[random_next(&shapes) % 5];
        bool f32 = dtype[0] == 'f' && dtype[5] == '3';
        buf_printf(&b, "%s{\"name\":\"t%02u\",\"shape\":[", t > 0 ? "," : "", t);
        for (unsigned d = 0; d < n_dims; d++)
            buf_printf(&b, "%s%u", d > 0 ? "," : "",
                       (unsigned)(random_next(&shapes) % (d == 0 ? 40 : 30)));
        if (cast && f32)
            buf_printf(&b,
                       "],\"dtype\":\"bfloat16\",\"cast\":true,\"mesh\":\"m\",\"placements\":[");
        else
            buf_printf(&b, "],\"dtype\":\"%s\",\"mesh\":\"m\",\"placements\":[", dtype);
        for (int m = 0; m < 2; m++) {
            unsigned p = (unsigned)(random_next(&seed) % (n_dims + 1));
            if (p == n_dims)
                buf_printf(&b, "%s\"Replicate\"", m > 0 ? "," : "");
            else
                buf_printf(&b, "%s\"Shard(%u)\"", m > 0 ? "," : "", p);
        }
        buf_printf(&b, "]}");
    }
    buf_printf(&b, "]}");
    size_t n;
    return (char *)buf_steal(&b, &n);
}

#endif
