/* The contract of device.h: order, events, disorder by seed, sticky errors, memory.
 *
 * One program for each implementation: TEST_DEVICE=cuda runs it on the CUDA device, with the stand-in's libraries on the
 * library path (make check does), or on a GPU (scripts/gpu-check); else on the host device. Memory that device and CPU both
 * touch is a mapped segment, as a worker's is. TEST_GPU=1: a real one, which can't be made to fail or be slow. */
#include <check.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"
#include "device/device.h"
#include "kernels/kernels_dtype.h"
#include "test/lib/gate.h"

enum { BYTES = 4096, N_STREAMS = 3 };

struct fixture {
    struct device *device;
    struct device_stream *stream[N_STREAMS];
};

static bool on_cuda(void)
{
    const char *kind = getenv("TEST_DEVICE");
    return kind != NULL && strcmp(kind, "cuda") == 0;
}

static bool on_gpu(void)
{
    return on_cuda() && getenv("TEST_GPU") != NULL;
}

static void set_number(const char *name, uint64_t value)
{
    char text[32];
    (void)snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    ck_assert_int_eq(setenv(name, text, 1), 0);
}

/* The host device takes delays and faults as options, the stand-in from the environment. */
static int open_device(struct device_host_options options, struct device **ret, struct err *e)
{
    struct device_cuda_options cuda = {.seed = options.seed};
    set_number("STANDIN_SEED", options.seed);
    set_number("STANDIN_DELAY_US", options.max_delay_us);
    if (options.fail_at_item != 0)
        ck_assert_int_eq(setenv("STANDIN_ASYNC", "kernel:1", 1), 0);
    return device_open(on_cuda() ? "cuda" : "host", 0, &options, &cuda, ret, e);
}

static struct fixture open_with(struct device_host_options options)
{
    struct fixture f;
    struct err e = {0};
    ck_assert_msg(open_device(options, &f.device, &e) == 0, "%s", e.text);
    ck_assert_str_eq(device_kind(f.device), on_cuda() ? "cuda" : "host");
    for (unsigned i = 0; i < N_STREAMS; i++)
        ck_assert_int_eq(device_stream_new(f.device, "test", &f.stream[i], &e), 0);
    return f;
}

static void close_all(struct fixture *f)
{
    for (unsigned i = 0; i < N_STREAMS; i++)
        device_stream_free(f->stream[i]);
    device_close(f->device);
}

/* Memory of a worker: n bytes, filled; the test's process ends before it matters that it is never unmapped. */
static uint8_t *segment(struct fixture *f, size_t n, int fill)
{
    struct err e = {0};
    void *p;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, (off_t)n), 0);
    ck_assert_msg(device_map(f->device, fd, n, true, &p, &e) == 0, "%s", e.text);
    memset(p, fill, n);
    return p;
}

static struct kernel_copy bytes_copy(void *to, void *from, uint64_t n)
{
    return (struct kernel_copy){.size = {n},
                                .from = {from, {1}},
                                .to = {{to, {1}}},
                                .n_targets = 1,
                                .n_dims = 1,
                                .from_dtype = KERNEL_UINT8,
                                .to_dtype = KERNEL_UINT8};
}

/* Waits until everything on s has run. */
static void drain(struct device_stream *s)
{
    struct gate g;
    gate_init(&g);
    ck_assert_int_eq(device_call(s, gate_open, &g), 0);
    gate_wait(&g);
}

struct log {
    unsigned at;
    unsigned seen[200];
};

struct note {
    struct log *log;
    unsigned value;
};

static void note_down(void *arg)
{
    struct note *n = arg;
    n->log->seen[n->log->at++] = n->value;
}

START_TEST(items_of_one_stream_run_in_order_under_delays)
{
    struct fixture f = open_with((struct device_host_options){.seed = 5, .max_delay_us = 50});
    struct log log = {0};
    struct note notes[200];
    for (unsigned i = 0; i < 200; i++) {
        notes[i] = (struct note){&log, i};
        ck_assert_int_eq(device_call(f.stream[0], note_down, &notes[i]), 0);
    }
    drain(f.stream[0]);
    for (unsigned i = 0; i < 200; i++)
        ck_assert_uint_eq(log.seen[i], i);
    close_all(&f);
}
END_TEST

START_TEST(enqueueing_copies_its_arguments_and_does_not_wait)
{
    struct fixture f = open_with((struct device_host_options){0});
    struct gate g;
    uint8_t *from = segment(&f, BYTES, 7);
    uint8_t *to[2] = {segment(&f, BYTES, 0), segment(&f, BYTES, 0)};
    gate_init(&g);
    ck_assert_int_eq(device_call(f.stream[0], gate_wait, &g), 0);
    struct kernel_copy c[2] = {bytes_copy(to[0], from, BYTES), bytes_copy(to[1], from, BYTES)};
    ck_assert_int_eq(device_copy(f.stream[0], c, 2), 0);
    memset(c, 0xFF, sizeof c);
    ck_assert_uint_eq(to[1][0], 0);
    gate_open(&g);
    drain(f.stream[0]);
    ck_assert_mem_eq(to[0], from, BYTES);
    ck_assert_mem_eq(to[1], from, BYTES);
    close_all(&f);
}
END_TEST

/* stream 1 copies what stream 0 wrote, `rounds` times over; returns how often it read too early. */
static unsigned early_reads(struct fixture *f, bool with_event, unsigned rounds)
{
    unsigned early = 0;
    struct device_event *ev;
    uint8_t *from = segment(f, BYTES, 0), *middle = segment(f, BYTES, 0);
    uint8_t *to = segment(f, BYTES, 0);
    ck_assert_int_eq(device_event_new(f->device, &ev), 0);
    for (unsigned i = 1; i <= rounds; i++) {
        memset(from, (int)i, BYTES);
        struct kernel_copy first = bytes_copy(middle, from, BYTES);
        struct kernel_copy second = bytes_copy(to, middle, BYTES);
        ck_assert_int_eq(device_copy(f->stream[0], &first, 1), 0);
        ck_assert_int_eq(device_event_record(ev, f->stream[0]), 0);
        if (with_event)
            ck_assert_int_eq(device_event_wait(f->stream[1], ev), 0);
        ck_assert_int_eq(device_copy(f->stream[1], &second, 1), 0);
        drain(f->stream[0]);
        drain(f->stream[1]);
        early += to[0] != (uint8_t)i || to[BYTES - 1] != (uint8_t)i;
    }
    device_event_free(ev);
    return early;
}

/* CASES.md B22; the next one is what shows where the event is missing. */
START_TEST(an_event_orders_two_streams_under_delays)
{
    struct fixture f = open_with((struct device_host_options){.seed = 6, .max_delay_us = 300});
    ck_assert_uint_eq(early_reads(&f, true, 60), 0);
    close_all(&f);
}
END_TEST

START_TEST(a_missing_dependency_shows_under_delays)
{
#if defined(__SANITIZE_THREAD__)
    return; /* the fault that it makes is a data race */
#endif
    if (on_gpu())
        return; /* it is not slow on demand */
    struct fixture f = open_with((struct device_host_options){.seed = 6, .max_delay_us = 300});
    ck_assert_uint_gt(early_reads(&f, false, 60), 5);
    close_all(&f);
}
END_TEST

START_TEST(an_event_that_was_never_recorded_counts_as_done)
{
    struct fixture f = open_with((struct device_host_options){0});
    struct device_event *ev;
    ck_assert_int_eq(device_event_new(f.device, &ev), 0);
    ck_assert(device_event_done(ev));
    ck_assert_int_eq(device_event_wait(f.stream[0], ev), 0);
    drain(f.stream[0]);
    device_event_free(ev);
    close_all(&f);
}
END_TEST

START_TEST(an_event_is_done_when_its_record_has_run_and_may_be_recorded_again)
{
    struct fixture f = open_with((struct device_host_options){0});
    struct device_event *ev;
    ck_assert_int_eq(device_event_new(f.device, &ev), 0);
    for (unsigned i = 0; i < 3; i++) {
        struct gate g;
        gate_init(&g);
        ck_assert_int_eq(device_call(f.stream[0], gate_wait, &g), 0);
        ck_assert_int_eq(device_event_record(ev, f.stream[0]), 0);
        ck_assert(!device_event_done(ev));
        ck_assert_int_eq(device_event_wait(f.stream[1], ev), 0);
        gate_open(&g);
        drain(f.stream[1]);
        ck_assert(device_event_done(ev));
    }
    device_event_free(ev);
    close_all(&f);
}
END_TEST

START_TEST(an_event_may_be_freed_while_others_wait_for_it)
{
    struct fixture f = open_with((struct device_host_options){0});
    struct device_event *ev;
    struct gate g;
    gate_init(&g);
    ck_assert_int_eq(device_event_new(f.device, &ev), 0);
    ck_assert_int_eq(device_call(f.stream[0], gate_wait, &g), 0);
    ck_assert_int_eq(device_event_record(ev, f.stream[0]), 0);
    ck_assert_int_eq(device_event_wait(f.stream[1], ev), 0);
    ck_assert_int_eq(device_event_wait(f.stream[2], ev), 0);
    device_event_free(ev);
    gate_open(&g);
    drain(f.stream[1]);
    drain(f.stream[2]);
    close_all(&f);
}
END_TEST

static void count_up(void *arg)
{
    atomic_fetch_add((atomic_uint *)arg, 1);
}

START_TEST(freeing_a_busy_stream_waits_for_all_that_is_enqueued)
{
    struct fixture f = open_with((struct device_host_options){.seed = 8, .max_delay_us = 200});
    struct device_stream *s;
    struct err e = {0};
    atomic_uint count = 0;
    ck_assert_int_eq(device_stream_new(f.device, "busy", &s, &e), 0);
    for (unsigned i = 0; i < 50; i++)
        ck_assert_int_eq(device_call(s, count_up, &count), 0);
    device_stream_free(s);
    ck_assert_uint_eq(atomic_load(&count), 50);
    close_all(&f);
}
END_TEST

START_TEST(after_an_error_work_is_skipped_completions_come_and_the_error_stays)
{
    if (on_gpu())
        return; /* it does not fail on demand */
    struct fixture f = open_with((struct device_host_options){.fail_at_item = 3});
    struct gate gates[2];
    struct device_event *ev;
    struct err e = {0};
    atomic_uint count = 0;
    uint8_t *from = segment(&f, BYTES, 1), *to = segment(&f, BYTES, 0);
    gate_init(&gates[0]);
    gate_init(&gates[1]);
    ck_assert_int_eq(device_event_new(f.device, &ev), 0);
    struct kernel_copy c = bytes_copy(to, from, BYTES);
    ck_assert_int_eq(device_error(f.device, &e), 0);
    /* items 1 and 2 hold both streams; the third that starts is the copy */
    ck_assert_int_eq(device_call(f.stream[0], gate_wait, &gates[0]), 0);
    ck_assert_int_eq(device_call(f.stream[1], gate_wait, &gates[1]), 0);
    gate_started(&gates[0]);
    gate_started(&gates[1]);
    ck_assert_int_eq(device_copy(f.stream[0], &c, 1), 0);
    ck_assert_int_eq(device_event_record(ev, f.stream[0]), 0);
    ck_assert_int_eq(device_event_wait(f.stream[1], ev), 0);
    ck_assert_int_eq(device_call(f.stream[1], count_up, &count), 0);
    gate_open(&gates[0]);
    while (!device_event_done(ev))
        sched_yield();
    gate_open(&gates[1]);
    while (atomic_load(&count) == 0)
        sched_yield();
    ck_assert(device_event_done(ev));
    ck_assert_uint_eq(to[0], 0);
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_int_eq(device_error(f.device, &e), RS_EDEVICE);
        ck_assert_ptr_nonnull(strstr(e.text, on_cuda() ? "illegal memory access" : "test"));
        ck_assert_int_eq(device_copy(f.stream[2], &c, 1), RS_EDEVICE);
        ck_assert_int_eq(device_call(f.stream[2], count_up, &count), RS_EDEVICE);
        ck_assert_int_eq(device_event_record(ev, f.stream[2]), RS_EDEVICE);
        ck_assert(device_event_done(ev));
    }
    device_event_free(ev);
    close_all(&f);
}
END_TEST

/* What the device's own memory holds: brought to where the CPU can look. */
static void fetch(struct fixture *f, uint8_t *to, void *from, uint64_t n)
{
    struct kernel_copy c = bytes_copy(to, from, n);
    ck_assert_int_eq(device_copy(f->stream[0], &c, 1), 0);
    drain(f->stream[0]);
}

START_TEST(memory_of_the_device_is_aligned_and_poisoned_only_with_a_seed)
{
    for (uint64_t seed = 0; seed < 2; seed++) {
        struct fixture f = open_with((struct device_host_options){.seed = seed});
        struct err e = {0};
        uint8_t *seen = segment(&f, 10000, 1);
        void *p;
        ck_assert_int_eq(device_alloc(f.device, 10000, &p, &e), 0);
        ck_assert_uint_eq((uintptr_t)p % (on_cuda() ? 256 : 4096), 0);
        struct kernel_copy ones = bytes_copy(p, seen, 10000);
        if (seed != 0 || !on_cuda()) { /* without one CUDA promises nothing */
            uint8_t *fresh = segment(&f, 10000, 0);
            fetch(&f, fresh, p, 10000);
            ck_assert_uint_eq(fresh[9999], seed == 0 ? 0 : DEVICE_POISON);
        }
        ck_assert_int_eq(device_copy(f.stream[0], &ones, 1), 0);
        ck_assert_int_eq(device_poison(f.stream[0], (char *)p + 1, 9998), 0);
        fetch(&f, seen, p, 10000);
        ck_assert_uint_eq(seen[0], 1);
        ck_assert_uint_eq(seen[1], seed == 0 ? 1 : DEVICE_POISON);
        ck_assert_uint_eq(seen[9998], seed == 0 ? 1 : DEVICE_POISON);
        ck_assert_uint_eq(seen[9999], 1);
        device_free(f.device, p, 10000);
        close_all(&f);
    }
}
END_TEST

START_TEST(memory_that_is_not_there_is_refused_with_the_bytes)
{
    struct fixture f = open_with((struct device_host_options){0});
    struct err e = {0};
    void *p = NULL;
    ck_assert_int_eq(device_alloc(f.device, (size_t)1 << 60, &p, &e), RS_EEXHAUSTED);
    ck_assert_ptr_nonnull(strstr(e.text, "1152921504606846976"));
    ck_assert_int_eq(device_alloc(f.device, 0, &p, &e), RS_EINVAL);
    ck_assert_ptr_null(p);
    close_all(&f);
}
END_TEST

START_TEST(a_mapped_segment_is_the_clients_memory_and_read_only_where_asked)
{
    struct fixture f = open_with((struct device_host_options){0});
    struct err e = {0};
    void *p, *q;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, BYTES), 0);
    uint8_t *client = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert_int_eq(device_map(f.device, dup(fd), BYTES, true, &p, &e), 0);
    client[5] = 9;
    ck_assert_uint_eq(((uint8_t *)p)[5], 9);
    ((uint8_t *)p)[6] = 8;
    ck_assert_uint_eq(client[6], 8);
    ck_assert_int_eq(device_map(f.device, fd, BYTES + 1, true, &q, &e), RS_EINVAL);
    ck_assert_int_eq(device_map(f.device, fd, 0, true, &q, &e), RS_EINVAL);
    ck_assert_int_eq(fcntl(fd, F_GETFD), FD_CLOEXEC); /* refused: still ours */
    device_unmap(f.device, p, BYTES);
    (void)munmap(client, BYTES);
    (void)close(fd);
    close_all(&f);
}
END_TEST

/* Three streams add parts of a tensor to one number, as replicas' cells do. */
START_TEST(streams_add_to_one_fingerprint_without_losing_a_part)
{
    enum { PARTS = 300, PART = 50 };
    struct fixture f = open_with((struct device_host_options){.seed = 9, .max_delay_us = 20});
    uint8_t *data = segment(&f, PARTS * PART, 0);
    uint64_t sum = 0, expected = 0;
    for (unsigned i = 0; i < PARTS * PART; i++)
        data[i] = (uint8_t)(i * 31);
    struct kernel_fingerprint whole = {.size = {PARTS * PART},
                                       .from = {data, {1}},
                                       .fingerprint = &expected,
                                       .n_dims = 1,
                                       .dtype = KERNEL_UINT8};
    kernel_fingerprint_reference(&whole);
    for (unsigned i = 0; i < PARTS; i++) {
        struct kernel_fingerprint part = {.size = {PART},
                                          .offset = {i * PART},
                                          .from = {data + i * PART, {1}},
                                          .fingerprint = &sum,
                                          .n_dims = 1,
                                          .dtype = KERNEL_UINT8};
        ck_assert_int_eq(device_fingerprint(f.stream[i % N_STREAMS], &part, 1), 0);
    }
    for (unsigned i = 0; i < N_STREAMS; i++)
        drain(f.stream[i]);
    ck_assert_uint_eq(sum, expected);
    close_all(&f);
}
END_TEST

/* Opens, uses and closes a device; the first error. */
static int use_device(void)
{
    struct device *d = NULL;
    struct device_stream *s = NULL;
    struct device_event *ev = NULL;
    struct err e = {0};
    uint64_t sum = 0;
    void *p = NULL;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, 4096), 0);
    int r = open_device((struct device_host_options){0}, &d, &e);
    if (r == 0)
        ck_assert_int_eq(device_map(d, fd, 4096, true, &p, &e), 0);
    else
        (void)close(fd);
    uint8_t *from = p, *to = from == NULL ? NULL : from + 8;
    if (from != NULL)
        from[0] = 1;
    struct kernel_copy c = bytes_copy(to, from, 8);
    struct kernel_fingerprint fp = {
        .size = {8}, .from = {from, {1}}, .fingerprint = &sum, .n_dims = 1, .dtype = KERNEL_UINT8};
    if (r == 0)
        r = device_stream_new(d, "s", &s, &e);
    if (r == 0)
        r = device_event_new(d, &ev);
    if (r == 0)
        r = device_copy(s, &c, 1);
    if (r == 0)
        r = device_fingerprint(s, &fp, 1);
    if (r == 0)
        r = device_event_record(ev, s);
    if (r == 0)
        r = device_event_wait(s, ev);
    device_event_free(ev);
    device_stream_free(s);
    ck_assert(r != 0 || (to[0] == 1 && sum != 0));
    if (p != NULL)
        device_unmap(d, p, 4096);
    device_close(d);
    return r;
}

START_TEST(every_failed_allocation_is_an_error_and_leaks_nothing)
{
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int r = use_device();
        int failed = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, failed ? RS_ENOMEM : 0);
        if (!failed)
            break;
    }
}
END_TEST

/* A runaway caller meets a limit instead of taking all memory: a megabyte per item. */
START_TEST(a_queue_that_holds_too_much_refuses_more)
{
    struct fixture f = open_with((struct device_host_options){0});
    struct gate g;
    gate_init(&g);
    enum { N = 8192 };
    uint64_t sum = 0;
    uint8_t byte = 1;
    struct kernel_fingerprint *fp = calloc(N, sizeof *fp);
    for (unsigned i = 0; i < N; i++) /* of nothing: what counts is that they wait */
        fp[i] = (struct kernel_fingerprint){
            .from = {&byte, {1}}, .fingerprint = &sum, .n_dims = 1, .dtype = KERNEL_UINT8};
    ck_assert_int_eq(device_call(f.stream[0], gate_wait, &g), 0);
    unsigned n = 0;
    int r = 0;
    for (; r == 0 && n < 1000; n++)
        r = device_fingerprint(f.stream[0], fp, N);
    ck_assert_int_eq(r, RS_ENOMEM);
    ck_assert_uint_gt(n, 100);
    gate_open(&g);
    drain(f.stream[0]);
    ck_assert_int_eq(device_fingerprint(f.stream[0], fp, N), 0);
    free(fp);
    close_all(&f);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(items_of_one_stream_run_in_order_under_delays)                                               \
    X(enqueueing_copies_its_arguments_and_does_not_wait)                                           \
    X(an_event_orders_two_streams_under_delays)                                                    \
    X(a_missing_dependency_shows_under_delays)                                                     \
    X(an_event_that_was_never_recorded_counts_as_done)                                             \
    X(an_event_is_done_when_its_record_has_run_and_may_be_recorded_again)                          \
    X(an_event_may_be_freed_while_others_wait_for_it)                                              \
    X(freeing_a_busy_stream_waits_for_all_that_is_enqueued)                                        \
    X(after_an_error_work_is_skipped_completions_come_and_the_error_stays)                         \
    X(memory_of_the_device_is_aligned_and_poisoned_only_with_a_seed)                               \
    X(memory_that_is_not_there_is_refused_with_the_bytes)                                          \
    X(a_mapped_segment_is_the_clients_memory_and_read_only_where_asked)                            \
    X(streams_add_to_one_fingerprint_without_losing_a_part)                                        \
    X(every_failed_allocation_is_an_error_and_leaks_nothing)                                       \
    X(a_queue_that_holds_too_much_refuses_more)
#include "test/lib/main.h"
