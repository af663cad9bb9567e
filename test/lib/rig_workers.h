/* The workers of a rig (rig.h): their layouts, their memory and where each piece lies in it, what they hold, and what is wrong with
 * what has landed. Include it by rig.h. */
#ifndef RS_TEST_RIG_WORKERS_H
#define RS_TEST_RIG_WORKERS_H

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/random.h"
#include "exec/wire.h"
#include "layout/layout.h"
#include "memory/memory.h"
#include "plan/plan.h"
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
