/* The host device: memory is the process's own, a stream is a thread with a queue of items (items.h).
 *
 * Locks: a stream's guards its queue, an event's its counters, the device's the sticky error; none
 * is held while another is taken. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/crash.h"
#include "base/mem.h"
#include "base/random.h"
#include "device/device.h"
#include "device/items.h"
#include "device/packed.h"
#include "kernels/kernels_dtype.h"

#include "base/banned.h"

/* Up to this size a segment's page tables are filled when it is mapped (measured: 0.1 s for 512 MiB;
 * the same by faults in the first refit: 0.5 s). Above, mapping would keep the caller too long. */
#define POPULATE_MOST_BYTES ((size_t)4 << 30)

struct device_host {
    struct device base;
    struct device_host_options options;
    atomic_uint n_streams;   /* alive */
    atomic_uint next_stream; /* numbers them, for their seeds */
    atomic_uint items;       /* started so far; counted only where fail_at_item is set */
    atomic_bool failed;      /* error.code != 0, readable without the lock */
    pthread_mutex_t mutex;
    struct err error;
};

struct host_event {
    struct device_event base;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint64_t recorded; /* records enqueued so far */
    uint64_t done;     /* of those, run */
    uint32_t refs;     /* the owner's, and one per item that names it */
};

struct host_stream {
    struct device_stream base;
    struct items items;
    uint64_t seed;
};

static struct device_host *host_of(const struct device *d)
{
    return container_of(d, struct device_host, base);
}

static struct host_stream *stream_of(struct device_stream *s)
{
    return container_of(s, struct host_stream, base);
}

static struct host_event *event_of(const struct device_event *ev)
{
    return container_of(ev, struct host_event, base);
}

/* --- the sticky error ------------------------------------------------------------------------- */

static int host_error(const struct device *d, struct err *e)
{
    struct device_host *h = host_of(d);
    if (!atomic_load(&h->failed)) {
        if (fence_holds(h->options.fence))
            return 0;
        return err_set(e, RS_EDEADLINE, "host device %u: the lease has run out", d->local);
    }
    pthread_mutex_lock(&h->mutex);
    struct err error = h->error;
    pthread_mutex_unlock(&h->mutex);
    return err_set(e, error.code, "%s", error.text);
}

static void fail(struct device_host *h, const char *stream)
{
    pthread_mutex_lock(&h->mutex);
    if (h->error.code == 0)
        (void)err_set(&h->error, RS_EDEVICE, "host device %u: stream '%s' was made to fail",
                      h->base.local, stream);
    pthread_mutex_unlock(&h->mutex);
    atomic_store(&h->failed, true);
}

/* --- memory ----------------------------------------------------------------------------------- */

static int host_alloc(struct device *d, size_t bytes, void **ret, struct err *e)
{
    void *p = bytes == 0
                  ? MAP_FAILED
                  : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return err_set(e, bytes == 0 ? RS_EINVAL : RS_EEXHAUSTED,
                       "host device %u: %zu bytes of memory of its own: %s", d->local, bytes,
                       bytes == 0 ? "none asked for" : strerror(errno));
    /* Only a hint: fewer TLB misses in staging. */
    (void)madvise(p, bytes, MADV_HUGEPAGE);
    if (host_of(d)->options.seed != 0)
        memset(p, DEVICE_POISON, bytes);
    *ret = p;
    return 0;
}

static void host_free(struct device *d, void *p, size_t bytes)
{
    (void)d;
    rs_assert(munmap(p, bytes) == 0);
}

static int host_map(struct device *d, int fd, size_t bytes, bool writable, void **ret,
                    struct err *e)
{
    struct stat st;
    if (bytes == 0 || fstat(fd, &st) != 0 || st.st_size < 0 || (uint64_t)st.st_size < bytes)
        return err_set(e, RS_EINVAL, "host device %u: segment of %zu bytes: the file is shorter",
                       d->local, bytes);
    int populate = bytes <= POPULATE_MOST_BYTES ? MAP_POPULATE : 0;
    void *p = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                   MAP_SHARED | populate, fd, 0);
    if (p == MAP_FAILED)
        return err_set(e, errno == ENOMEM ? RS_EEXHAUSTED : err_from_errno(errno),
                       "host device %u: mapping %zu bytes: %s", d->local, bytes, strerror(errno));
    (void)close(fd); /* the mapping holds the file */
    *ret = p;
    return 0;
}

static void host_unmap(struct device *d, void *p, size_t bytes)
{
    host_free(d, p, bytes);
}

/* --- events ----------------------------------------------------------------------------------- */

static int host_event_new(struct device *d, struct device_event **ret)
{
    struct host_event *ev = mem_zalloc(sizeof *ev);
    if (ev == NULL)
        return RS_ENOMEM;
    ev->base.device = d;
    ev->refs = 1;
    (void)pthread_mutex_init(&ev->mutex, NULL);
    (void)pthread_cond_init(&ev->changed, NULL);
    *ret = &ev->base;
    return 0;
}

static void event_unref(struct host_event *ev)
{
    pthread_mutex_lock(&ev->mutex);
    bool last = --ev->refs == 0;
    pthread_mutex_unlock(&ev->mutex);
    if (!last)
        return;
    (void)pthread_cond_destroy(&ev->changed);
    (void)pthread_mutex_destroy(&ev->mutex);
    mem_free(ev);
}

static void host_event_free(struct device_event *ev)
{
    event_unref(event_of(ev));
}

static bool host_event_done(const struct device_event *base)
{
    struct host_event *ev = event_of(base);
    pthread_mutex_lock(&ev->mutex);
    bool done = ev->done == ev->recorded;
    pthread_mutex_unlock(&ev->mutex);
    return done;
}

static void run_record(struct device_stream *s, struct item *item)
{
    struct host_event *ev = event_of(item->event);
    (void)s;
    pthread_mutex_lock(&ev->mutex);
    ev->done = item->number;
    pthread_cond_broadcast(&ev->changed);
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
}

static void run_wait(struct device_stream *s, struct item *item)
{
    struct host_event *ev = event_of(item->event);
    (void)s;
    pthread_mutex_lock(&ev->mutex);
    while (ev->done < item->number)
        pthread_cond_wait(&ev->changed, &ev->mutex);
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
}

/* --- items ------------------------------------------------------------------------------------ */

/* Work after a failure is skipped. */
static bool skips(const struct device_stream *s)
{
    return atomic_load(&host_of(s->device)->failed);
}

/* What writes is skipped behind the fence, too. */
static bool skips_writing(const struct device_stream *s)
{
    return skips(s) || !fence_holds(host_of(s->device)->options.fence);
}

/* As a cast that rounds wrong would: what it sums is what it has written. */
static void cast_wrong(const struct kernel_copy *c)
{
    struct kernel_copy silent = *c;
    silent.fingerprint = NULL;
    kernel_copy_host(&silent);
    for (uint32_t i = 0; i < c->n_targets; i++)
        *(uint8_t *)c->to[i].base ^= 1;
    struct kernel_fingerprint f = {
        .from = c->to[0], .fingerprint = c->fingerprint, .n_dims = c->n_dims, .dtype = c->to_dtype};
    memcpy(f.size, c->size, sizeof f.size);
    memcpy(f.offset, c->offset, sizeof f.offset);
    if (c->fingerprint != NULL)
        kernel_fingerprint_host(&f);
}

/* Where tests have it so, wrong (base/crash.h). */
static void run_copy(struct kernel_copy *c)
{
    if (c->from_dtype != c->to_dtype && c->n_targets > 0 && damage_due(DAMAGE_WRONG_CAST)) {
        cast_wrong(c);
        return;
    }
    if (damage_due(DAMAGE_LOST_COPY))
        c->n_targets = 0;
    kernel_copy_host(c);
}

static uint64_t copy_bytes(const struct kernel_copy *c)
{
    uint64_t n = kernel_dtype_bytes(c->to_dtype);
    for (unsigned d = 0; d < c->n_dims; d++)
        n *= c->size[d];
    return n;
}

/* The fence is looked at before each copy, but where they are small only every LOOK_BYTES: its clock
 * costs as much as they do. */
static void run_copies(struct device_stream *s, struct item *item)
{
    enum { LOOK_BYTES = 16 << 10 };
    struct kernel_copy c = {.n_dims = 0};
    const char *at = (const char *)item->payload;
    uint64_t unseen = LOOK_BYTES;
    for (uint32_t i = 0; i < item->n; i++) {
        at = unpack_copy(at, &c);
        uint64_t bytes = copy_bytes(&c);
        unseen += bytes;
        if (unseen >= LOOK_BYTES) {
            if (skips_writing(s))
                return;
            unseen = bytes;
        }
        run_copy(&c);
    }
}

static void run_fingerprints(struct device_stream *s, struct item *item)
{
    struct kernel_fingerprint f = {.n_dims = 0};
    const char *at = (const char *)item->payload;
    for (uint32_t i = 0; i < item->n && !skips(s); i++) {
        at = unpack_fingerprint(at, &f);
        kernel_fingerprint_host(&f);
    }
}

/* As cast_wrong. */
static void quantise_wrong(const struct kernel_quantise *q)
{
    struct kernel_quantise silent = *q;
    silent.fingerprint = NULL;
    kernel_quantise_host(&silent);
    for (uint32_t i = 0; i < q->n_targets; i++)
        q->to[i].base[0] ^= 1;
    struct kernel_fingerprint f = {
        .size = {q->window_rows, q->window_columns},
        .offset = {q->offset[0] + q->window_row, q->offset[1] + q->window_column},
        .from = {q->to[0].base, {q->to[0].stride, 1}},
        .fingerprint = q->fingerprint,
        .n_dims = 2,
        .dtype = KERNEL_FLOAT8_E4M3FN};
    if (q->fingerprint != NULL)
        kernel_fingerprint_host(&f);
}

/* Of a float's bits, or a bfloat16's as the upper half of one: with another sign, and where it is a normal number that has a double,
 * doubled. */
static uint32_t minus_twice(uint32_t bits)
{
    uint32_t exponent = bits >> 23 & 0xFF;
    return (bits ^ 1U << 31) + (exponent > 0 && exponent < 0xFE ? 1U << 23 : 0);
}

/* Values and scales wrong in the same way each time, however the matrix is cut. */
static void quantise_wrong_values(const struct kernel_quantise *q)
{
    struct kernel_quantise wrong = *q;
    uint64_t bytes = q->from_dtype == KERNEL_BFLOAT16 ? 2 : 4;
    uint8_t *copy = mem_alloc(q->rows * q->columns * bytes + 1);
    rs_assert(copy != NULL); /* for tests alone */
    for (uint64_t i = 0; i < q->rows; i++)
        for (uint64_t k = 0; k < q->columns; k++) {
            uint32_t bits = 0;
            uint8_t *upper = (uint8_t *)&bits + 4 - bytes;
            const uint8_t *at = (const uint8_t *)q->from + (int64_t)i * q->from_stride + k * bytes;
            memcpy(upper, at, bytes);
            bits = minus_twice(bits);
            memcpy(copy + (i * q->columns + k) * bytes, upper, bytes);
        }
    wrong.from = copy;
    wrong.from_stride = (int64_t)(q->columns * bytes);
    kernel_quantise_host(&wrong);
    mem_free(copy);
}

static void run_quantise(struct device_stream *s, struct item *item)
{
    struct kernel_quantise q;
    for (uint32_t i = 0; i < item->n && !skips_writing(s); i++) {
        memcpy(&q, (const char *)item->payload + i * sizeof q, sizeof q);
        if (q.step != KERNEL_QUANTISE_CLEAR && damage_due(DAMAGE_WRONG_SCALE))
            quantise_wrong_values(&q);
        else if (q.n_targets > 0 && q.window_rows * q.window_columns > 0 &&
                 damage_due(DAMAGE_WRONG_CAST))
            quantise_wrong(&q);
        else
            kernel_quantise_host(&q);
    }
}

static void run_call(struct device_stream *s, struct item *item)
{
    (void)s;
    item->fn(item->arg);
}

static void run_poison(struct device_stream *s, struct item *item)
{
    if (!skips(s))
        memset(item->arg, DEVICE_POISON, item->number);
}

/* Takes the item, also on failure; item NULL is RS_ENOMEM. */
static int enqueue(struct device_stream *s, struct item *item)
{
    int r = item != NULL && skips(s) ? host_error(s->device, NULL) : 0;
    if (r == 0)
        return items_push(&stream_of(s)->items, item);
    mem_free(item);
    return r;
}

static int host_copy(struct device_stream *s, const struct kernel_copy *copies, uint32_t n)
{
    return enqueue(s, item_copies(run_copies, copies, n));
}

static int host_fingerprint(struct device_stream *s, const struct kernel_fingerprint *f, uint32_t n)
{
    return enqueue(s, item_fingerprints(run_fingerprints, f, n));
}

static int host_quantise(struct device_stream *s, const struct kernel_quantise *q, uint32_t n)
{
    return enqueue(s, item_entries(run_quantise, q, n, sizeof *q));
}

static int host_call(struct device_stream *s, void (*fn)(void *arg), void *arg)
{
    return enqueue(s, item_call(run_call, fn, arg));
}

static int host_poison(struct device_stream *s, void *p, size_t bytes)
{
    return host_of(s->device)->options.seed == 0 ? 0 : enqueue(s, item_fill(run_poison, p, bytes));
}

static int host_event_record(struct device_event *base, struct device_stream *stream)
{
    struct host_event *ev = event_of(base);
    struct item *item = item_new(run_record);
    if (item == NULL)
        return RS_ENOMEM;
    pthread_mutex_lock(&ev->mutex);
    rs_assert(ev->done == ev->recorded); /* the former record is done */
    ev->refs++;
    item->event = &ev->base;
    item->number = ++ev->recorded;
    pthread_mutex_unlock(&ev->mutex);
    int r = enqueue(stream, item);
    if (r == 0)
        return 0;
    pthread_mutex_lock(&ev->mutex);
    ev->recorded--;
    pthread_mutex_unlock(&ev->mutex);
    event_unref(ev);
    return r;
}

static int host_event_wait(struct device_stream *stream, struct device_event *base)
{
    struct host_event *ev = event_of(base);
    struct item *item = item_new(run_wait);
    if (item == NULL)
        return RS_ENOMEM;
    pthread_mutex_lock(&ev->mutex);
    ev->refs++;
    item->event = &ev->base;
    item->number = ev->recorded;
    pthread_mutex_unlock(&ev->mutex);
    int r = enqueue(stream, item);
    if (r != 0)
        event_unref(ev);
    return r;
}

/* --- the stream's thread ---------------------------------------------------------------------- */

/* A seeded wait, to make other streams overtake: the point is the disorder, nothing relies on it.
 */
static void delay(struct host_stream *s, uint32_t max_us)
{
    if (s->seed == 0 || max_us == 0)
        return;
    long ns = (long)(random_next(&s->seed) % (max_us + 1ULL)) * 1000;
    struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) == EINTR)
        continue;
}

static void *stream_main(void *arg)
{
    struct host_stream *s = arg;
    struct device_host *h = host_of(s->base.device);
    struct item *item;
    while ((item = items_next(&s->items)) != NULL) {
        delay(s, h->options.max_delay_us);
        if (h->options.fail_at_item != 0 &&
            atomic_fetch_add(&h->items, 1) + 1 == h->options.fail_at_item)
            fail(h, s->items.name);
        item->run(&s->base, item);
        items_done(&s->items, item);
    }
    return NULL;
}

static void stream_destroy(struct host_stream *s)
{
    items_close(&s->items);
    mem_free(s);
}

static int host_stream_new(struct device *d, const char *name, struct device_stream **ret,
                           struct err *e)
{
    struct device_host *h = host_of(d);
    struct host_stream *s = mem_zalloc(sizeof *s);
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "host device %u: stream '%s': out of memory", d->local, name);
    s->base.device = d;
    items_init(&s->items, "d", d->local, name);
    uint64_t number = atomic_fetch_add(&h->next_stream, 1) + 1;
    uint64_t mixed = h->options.seed + number;
    s->seed = h->options.seed == 0 ? 0 : random_next(&mixed) | 1;
    int r = items_start(&s->items, stream_main, s);
    if (r != 0) {
        stream_destroy(s);
        return err_set(e, RS_EEXHAUSTED, "host device %u: thread for stream '%s': %s", d->local,
                       name, strerror(r));
    }
    atomic_fetch_add(&h->n_streams, 1);
    *ret = &s->base;
    return 0;
}

static void host_stream_free(struct device_stream *base)
{
    struct host_stream *s = stream_of(base);
    items_stop(&s->items);
    atomic_fetch_sub(&host_of(base->device)->n_streams, 1);
    stream_destroy(s);
}

/* --- open and close --------------------------------------------------------------------------- */

static void host_close(struct device *d)
{
    struct device_host *h = host_of(d);
    rs_assert(atomic_load(&h->n_streams) == 0);
    (void)pthread_mutex_destroy(&h->mutex);
    mem_free(h);
}

static const struct device_ops host_ops = {
    .kind = "host",
    .close = host_close,
    .alloc = host_alloc,
    .free = host_free,
    .map = host_map,
    .unmap = host_unmap,
    .stream_new = host_stream_new,
    .stream_free = host_stream_free,
    .copy = host_copy,
    .fingerprint = host_fingerprint,
    .quantise = host_quantise,
    .call = host_call,
    .poison = host_poison,
    .event_new = host_event_new,
    .event_free = host_event_free,
    .event_record = host_event_record,
    .event_wait = host_event_wait,
    .event_done = host_event_done,
    .error = host_error,
};

int device_host_open(uint32_t local, const struct device_host_options *options, struct device **ret,
                     struct err *e)
{
    struct device_host *h = mem_zalloc(sizeof *h);
    if (h == NULL)
        return err_set(e, RS_ENOMEM, "host device %u: out of memory", local);
    h->base.ops = &host_ops;
    h->base.local = local;
    if (options != NULL)
        h->options = *options;
    (void)pthread_mutex_init(&h->mutex, NULL);
    *ret = &h->base;
    return 0;
}
