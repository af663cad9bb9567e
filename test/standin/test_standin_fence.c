/* What may still land of what a GPU was given, and who waits for it: behind the fence, behind an error,
 * and where the GPU never finishes. */
#include <check.h>
#include <cuda_runtime_api.h>
#include <sys/wait.h>

#include "test/lib/gate.h"
#include "test/lib/rig.h"

#include "device/device_cuda.h"
#include "kernels/kernels_dtype.h"

enum { N = 1 << 19 };

struct bed {
    struct device *d;
    struct device_stream *s;
    struct fence fence;
    uint8_t *from, *to;
};

static uint8_t *segment(struct device *d)
{
    void *p = NULL;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, N), 0);
    ck_assert_int_eq(device_map(d, fd, N, true, &p, NULL), 0);
    return p;
}

static void bed_open(struct bed *b)
{
    struct err e = {0};
    struct device_cuda_options options = {.fence = &b->fence};
    ck_assert_msg(device_cuda_open(0, &options, &b->d, &e) == 0, "%s", e.text);
    ck_assert_msg(device_stream_new(b->d, "test", &b->s, &e) == 0, "%s", e.text);
    b->from = segment(b->d);
    b->to = segment(b->d);
    memset(b->from, 0x42, N);
}

static void bed_close(struct bed *b)
{
    device_stream_free(b->s);
    device_unmap(b->d, b->from, N);
    device_unmap(b->d, b->to, N);
    device_close(b->d);
}

/* On the GPU, before the copies behind it: stands still until the gate is opened. */
static void hold_gpu(void *arg, struct CUstream_st *stream)
{
    ck_assert_int_eq(cudaLaunchHostFunc(stream, gate_wait, arg), cudaSuccess);
}

/* `n` bytes: by the copy engine from 256 KiB on, else by a kernel, with a fingerprint where `sum`. */
static void copy(struct bed *b, size_t n, uint64_t *sum)
{
    struct kernel_copy c = {.size = {n},
                            .from = {b->from, {1}},
                            .to = {{b->to, {1}}},
                            .fingerprint = sum,
                            .n_targets = 1,
                            .n_dims = 1,
                            .from_dtype = KERNEL_UINT8,
                            .to_dtype = KERNEL_UINT8};
    ck_assert_int_eq(device_copy(b->s, &c, 1), 0);
}

static const size_t sizes[] = {N, 64, 64}; /* engine, kernel, kernel with a fingerprint */

START_TEST(what_comes_to_its_turn_behind_the_fence_is_not_handed_over)
{
    for (unsigned i = 0; i < 3; i++) {
        struct bed b = {0};
        struct gate before = GATE, after = GATE;
        struct err e = {0};
        uint64_t sum = 0;
        bed_open(&b);
        ck_assert_int_eq(device_call(b.s, gate_wait, &before), 0);
        copy(&b, sizes[i], i == 2 ? &sum : NULL);
        fence_prolong(&b.fence, 1);
        gate_open(&before);
        ck_assert_int_eq(device_call(b.s, gate_open, &after), 0);
        ck_assert(gate_opens(&after, GATE_WAIT_MS));
        ck_assert_uint_eq(b.to[0], 0);
        ck_assert_uint_eq(sum, 0);
        ck_assert_int_eq(device_error(b.d, &e), RS_EDEADLINE);
        bed_close(&b);
    }
}
END_TEST

/* On the stream's thread: what is before it has been handed over; what is behind it waits. */
struct turn {
    struct gate come, go;
};

static void take_turn(void *arg, struct CUstream_st *stream)
{
    struct turn *t = arg;
    (void)stream;
    gate_open(&t->come);
    gate_wait(&t->go);
}

/* The device fails, or the fence shuts, while the GPU has it: its end is told when it is there. */
START_TEST(what_was_handed_over_lands_and_its_end_is_not_told_before)
{
    for (unsigned i = 0; i < 6; i++) {
        struct bed b = {0};
        struct gate held = GATE, done = GATE;
        struct turn turn = {GATE, GATE};
        struct device_event *ev;
        uint64_t sum = 0;
        bed_open(&b);
        ck_assert_int_eq(device_event_new(b.d, &ev), 0);
        ck_assert_int_eq(device_cuda_issue(b.s, hold_gpu, &held, NULL), 0);
        copy(&b, sizes[i % 3], i % 3 == 2 ? &sum : NULL);
        ck_assert_int_eq(device_cuda_issue(b.s, take_turn, &turn, NULL), 0);
        ck_assert_int_eq(device_event_record(ev, b.s), 0);
        ck_assert_int_eq(device_call(b.s, gate_open, &done), 0);
        ck_assert(gate_opens(&turn.come, GATE_WAIT_MS));
        if (i < 3)
            device_cuda_fail(b.d, "made to fail");
        else
            fence_prolong(&b.fence, 1);
        gate_open(&turn.go);
        ck_assert_msg(!gate_opens(&done, 100), "%u: told while the GPU still had it", i);
        ck_assert(!device_event_done(ev));
        ck_assert_uint_eq(b.to[0], 0);
        gate_open(&held);
        ck_assert(gate_opens(&done, GATE_WAIT_MS));
        ck_assert(device_event_done(ev));
        ck_assert_uint_eq(b.to[0], 0x42);
        ck_assert_uint_eq(b.to[sizes[i % 3] - 1], 0x42);
        ck_assert_int_eq(device_error(b.d, NULL), i < 3 ? RS_EDEVICE : RS_EDEADLINE);
        device_event_free(ev);
        bed_close(&b);
    }
}
END_TEST

/* A call that fails is no word about what was given before: here the record that would have told. */
START_TEST(a_record_that_fails_waits_for_what_it_stands_for)
{
    struct bed b = {0};
    struct gate held = GATE, begin = GATE;
    struct turn turn = {GATE, GATE};
    struct device_event *ev;
    ck_assert_int_eq(setenv("STANDIN_FAIL", "cudaEventRecord:1", 1), 0);
    bed_open(&b);
    ck_assert_int_eq(device_event_new(b.d, &ev), 0);
    /* Nothing can be enqueued once the device has failed. */
    ck_assert_int_eq(device_call(b.s, gate_wait, &begin), 0);
    ck_assert_int_eq(device_cuda_issue(b.s, hold_gpu, &held, NULL), 0);
    copy(&b, N, NULL);
    ck_assert_int_eq(device_event_record(ev, b.s), 0);
    ck_assert_int_eq(device_cuda_issue(b.s, take_turn, &turn, NULL), 0);
    gate_open(&begin);
    ck_assert_msg(!gate_opens(&turn.come, 100),
                  "the record passed while the GPU still had the copy");
    ck_assert(!device_event_done(ev));
    gate_open(&held);
    ck_assert(gate_opens(&turn.come, GATE_WAIT_MS));
    ck_assert(device_event_done(ev));
    ck_assert_uint_eq(b.to[N - 1], 0x42);
    gate_open(&turn.go);
    device_event_free(ev);
    bed_close(&b);
}
END_TEST

/* --- the data plane ---------------------------------------------------------------------------------- */

static void open_rig(struct rig *r)
{
    char *source = rig_random_json(1, 2, "s", 1, 6, false),
         *dest = rig_random_json(1, 3, "d", 1, 6, false);
    memset(r, 0, sizeof(*r));
    r->o.n_devices = 1;
    r->o.plan = plan_options_default();
    r->o.plan.ring_slots = 2;
    r->o.plan.chunk_bytes = 4096;
    r->o.plan.least_piece_bytes = 64;
    r->o.process = true;
    r->o.lenient = true;
    (void)snprintf(r->o.hello.backend, sizeof(r->o.hello.backend), "cuda");
    (void)snprintf(r->o.hello.transport, sizeof(r->o.hello.transport), "nccl");
    rig_side(r, 0, source, 0, 1);
    rig_side(r, 1, dest, 0, 1);
    mem_free(source);
    mem_free(dest);
    rig_open(r);
    r->version = 1;
    rig_fill_sources(r, 1);
}

/* Ends within `ms` of now; -1: it lives. */
static int end_of(pid_t pid, unsigned ms)
{
    uint64_t until = clock_mono_ns() + ms * UINT64_C(1000000);
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        struct timespec t = {.tv_nsec = 1000000};
        if (clock_mono_ns() > until)
            return -1;
        (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
}

static uint64_t send_check(struct rig *r)
{
    struct wire_check m = {.memory = WIRE_LIVE};
    return rig_send(r, WIRE_CHECK, rig_worker(r, 0, 0)->id, &m, sizeof(m), NULL, 0, NULL, 0);
}

static uint64_t send_lease(struct rig *r, uint64_t ms)
{
    struct wire_lease m = {.until_ns = clock_mono_ns() + ms * UINT64_C(1000000)};
    (void)rig_send(r, WIRE_LEASE, 0, &m, sizeof(m), NULL, 0, NULL, 0);
    return m.until_ns;
}

START_TEST(a_data_plane_whose_gpu_hangs_ends_itself_once_its_lease_is_over)
{
    struct rig r;
    ck_assert_int_eq(setenv("STANDIN_HANG", "kernel:1", 1), 0);
    open_rig(&r);
    (void)send_check(&r);
    uint64_t until = send_lease(&r, 3000); /* until then the GPU has it */
    ck_assert_int_eq(end_of(r.child, GATE_WAIT_MS), EXIT_FAILURE);
    ck_assert_uint_ge(clock_mono_ns(), until + FENCE_DRAIN_MS * UINT64_C(1000000));
    (void)close(r.control);
    rig_free(&r);
}
END_TEST

START_TEST(a_data_plane_that_is_through_with_its_work_outlives_its_lease)
{
    struct rig r;
    open_rig(&r);
    rig_expect(&r, send_check(&r), WIRE_CHECKED);
    (void)send_lease(&r, 10);
    ck_assert_int_eq(end_of(r.child, 10 + 2 * FENCE_DRAIN_MS), -1);
    (void)send_lease(&r, 60000);
    rig_expect(&r, send_check(&r), WIRE_CHECKED);
    rig_close(&r);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(what_comes_to_its_turn_behind_the_fence_is_not_handed_over)                                  \
    X(what_was_handed_over_lands_and_its_end_is_not_told_before)                                   \
    X(a_record_that_fails_waits_for_what_it_stands_for)                                            \
    X(a_data_plane_whose_gpu_hangs_ends_itself_once_its_lease_is_over)                             \
    X(a_data_plane_that_is_through_with_its_work_outlives_its_lease)
#include "test/lib/main.h"
