/* Every CUDA call that can fail does, once: never a wrong byte without an error, never a hang, and the
 * error names the call. And what the stand-in itself is strict about. */
#include <check.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "device/device_cuda.h"
#include "kernels/kernels_dtype.h"
#include "test/lib/gate.h"
#include "test/standin/standin.h"

enum { N = 1 << 19, ROWS = 64, RUN = 100 };

/* The program is linked with the real runtime, which has none. */
static struct standin_device_counters *counters(int device)
{
    struct standin_device_counters *(*count)(int) = NULL;
    void *at = dlsym(RTLD_DEFAULT, "standin_count");
    ck_assert_ptr_nonnull(at);
    memcpy(&count, &at, sizeof count);
    return count(device);
}

/* How a run of `work` ended. */
enum end { GOOD = 10, SAID, SILENT_WRONG, HUNG };

/* False: the completion did not come. RS_EDEVICE from the call is an end, too. */
static bool drain(struct device_stream *s)
{
    struct gate g = GATE;
    return device_call(s, gate_open, &g) != 0 || gate_opens(&g, GATE_WAIT_MS);
}

static void *segment(struct device *d, size_t n, struct err *e)
{
    void *p = NULL;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    return ftruncate(fd, (off_t)n) == 0 && device_map(d, fd, n, true, &p, e) == 0 ? p : NULL;
}

/* A long copy (the engine), a pack with a fingerprint (a kernel), an event between two streams. */
static enum end move(struct device *d, struct device_stream *const *s, struct err *e)
{
    struct device_event *ev = NULL;
    uint8_t *from = segment(d, N, e), *to = from == NULL ? NULL : segment(d, N, e);
    uint64_t sum = 0, expected = 0;
    void *middle = NULL;
    if (to == NULL || device_alloc(d, N, &middle, e) != 0)
        return e->text[0] != '\0' ? SAID : SILENT_WRONG;
    if (device_event_new(d, &ev) != 0)
        return SAID;
    for (unsigned i = 0; i < N; i++)
        from[i] = (uint8_t)(i * 13 + (i >> 8));
    struct kernel_copy whole = {.size = {N},
                                .from = {from, {1}},
                                .to = {{middle, {1}}},
                                .n_targets = 1,
                                .n_dims = 1,
                                .from_dtype = KERNEL_UINT8,
                                .to_dtype = KERNEL_UINT8};
    struct kernel_copy pack = whole;
    pack.n_dims = 2;
    pack.size[0] = ROWS;
    pack.size[1] = RUN;
    pack.from = (struct kernel_view){middle, {1000, 1}};
    pack.to[0] = (struct kernel_view){to, {RUN, 1}};
    pack.fingerprint = &sum;
    int r = device_copy(s[0], &whole, 1);
    r = r != 0 ? r : device_event_record(ev, s[0]);
    r = r != 0 ? r : device_event_wait(s[1], ev);
    r = r != 0 ? r : device_copy(s[1], &pack, 1);
    if (!drain(s[0]) || !drain(s[1]))
        return HUNG;
    device_event_free(ev);
    device_free(d, middle, N);
    if (device_error(d, e) != 0 || r != 0)
        return r != 0 || strstr(e->text, "CUDA device 0") != NULL ? SAID : SILENT_WRONG;
    struct kernel_fingerprint f = {.size = {ROWS, RUN},
                                   .from = {from, {1000, 1}},
                                   .fingerprint = &expected,
                                   .n_dims = 2,
                                   .dtype = KERNEL_UINT8};
    kernel_fingerprint_reference(&f);
    for (unsigned i = 0; i < ROWS; i++)
        if (memcmp(to + i * RUN, from + i * 1000, RUN) != 0)
            return SILENT_WRONG;
    return sum == expected ? GOOD : SILENT_WRONG;
}

static enum end work(void)
{
    struct device *d = NULL, *peer = NULL;
    struct device_stream *s[2] = {NULL, NULL};
    struct err e = {0};
    int r = device_cuda_open(0, NULL, &d, &e);
    if (r == 0)
        r = device_cuda_open(1, NULL, &peer, &e);
    if (r == 0)
        r = device_cuda_connect(d, peer, &e);
    for (int i = 0; r == 0 && i < 2; i++)
        r = device_stream_new(d, "work", &s[i], &e);
    enum end end = r != 0 ? (e.text[0] != '\0' ? SAID : SILENT_WRONG) : move(d, s, &e);
    if (end == HUNG)
        return end;
    for (int i = 0; i < 2; i++)
        device_stream_free(s[i]);
    device_close(peer);
    device_close(d);
    return end;
}

/* In a process of its own: calls are counted by process. */
static enum end run_with(const char *variable, const char *value)
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        (void)setenv(variable, value, 1);
        (void)alarm(200);
        _exit((int)work());
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_msg(WIFEXITED(status), "%s=%s: killed by %d", variable, value, WTERMSIG(status));
    return (enum end)WEXITSTATUS(status);
}

static const char *const calls[] = {"cudaGetDeviceCount",
                                    "cudaGetDeviceProperties",
                                    "cudaSetDevice",
                                    "cudaDeviceGetAttribute",
                                    "cudaFuncGetAttributes",
                                    "cudaDeviceCanAccessPeer",
                                    "cudaDeviceEnablePeerAccess",
                                    "cudaStreamCreateWithPriority",
                                    "cudaEventCreateWithFlags",
                                    "cudaMalloc",
                                    "cudaHostAlloc",
                                    "cudaHostRegister",
                                    "cudaMemcpyAsync",
                                    "cudaMemsetAsync",
                                    "cudaLaunchKernel",
                                    "cudaLaunchHostFunc",
                                    "cudaEventRecord",
                                    "cudaStreamWaitEvent",
                                    "cudaEventSynchronize"};

START_TEST(every_cuda_call_that_fails_is_told_and_nothing_hangs)
{
    unsigned n_said = 0;
    ck_assert_int_eq(run_with("STANDIN_FAIL", ""), GOOD);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (unsigned n = 1; n <= 2; n++) {
            char value[64];
            (void)snprintf(value, sizeof value, "%s:%u", calls[i], n);
            enum end end = run_with("STANDIN_FAIL", value);
            /* a second call that is never made fails nothing */
            ck_assert_msg(end == SAID || (n == 2 && end == GOOD), "%s: %d", value, (int)end);
            n_said += end == SAID;
        }
    ck_assert_uint_ge(n_said, sizeof calls / sizeof *calls);
}
END_TEST

START_TEST(an_error_while_the_gpu_works_is_told_whatever_was_running)
{
    static const char *const values[] = {"kernel:1", "copy:1", "copy:2:719", "set:1", "host:1"};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        ck_assert_msg(run_with("STANDIN_ASYNC", values[i]) == SAID, "%s", values[i]);
}
END_TEST

/* Memory that no GPU can reach must not pass on the stand-in either. */
START_TEST(a_kernel_on_memory_that_is_not_pinned_is_an_illegal_access)
{
    struct device *d;
    struct device_stream *s;
    struct err e = {0};
    static uint8_t from[64], to[64];
    ck_assert_int_eq(device_cuda_open(0, NULL, &d, &e), 0);
    ck_assert_int_eq(device_stream_new(d, "test", &s, &e), 0);
    struct kernel_copy c = {.size = {64},
                            .from = {from, {1}},
                            .to = {{to, {1}}},
                            .n_targets = 1,
                            .n_dims = 1,
                            .from_dtype = KERNEL_UINT8,
                            .to_dtype = KERNEL_UINT8};
    ck_assert_int_eq(device_copy(s, &c, 1), 0);
    ck_assert(drain(s));
    ck_assert_int_eq(device_error(d, &e), RS_EDEVICE);
    ck_assert_ptr_nonnull(strstr(e.text, "illegal memory access"));
    device_stream_free(s);
    device_close(d);
}
END_TEST

START_TEST(memory_of_a_device_can_not_be_touched_by_the_cpu)
{
    void *p = NULL;
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        if (cudaMalloc(&p, 4096) != cudaSuccess)
            _exit(70);
        *(volatile char *)p = 1;
        _exit(71);
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(!WIFEXITED(status) || (WEXITSTATUS(status) != 70 && WEXITSTATUS(status) != 71));
}
END_TEST

START_TEST(without_a_gpu_or_with_too_few_the_backend_says_what_is_missing)
{
    struct err e = {0};
    ck_assert_int_eq(setenv("STANDIN_DEVICES", "0", 1), 0);
    ck_assert_int_eq(device_backend_check("cuda", 1, NULL, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "is a GPU visible here?"));
    ck_assert_int_eq(setenv("STANDIN_DEVICES", "2", 1), 0);
    ck_assert_int_eq(device_backend_check("cuda", 2, NULL, &e), 0);
    ck_assert_int_eq(device_backend_check("cuda", 3, NULL, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "3 devices are set, 2 GPUs are there"));
    ck_assert_int_eq(device_backend_check("rocm", 1, NULL, &e), RS_EINVAL);
}
END_TEST

static void copy_all(struct device *d, struct device_stream *s, void *to, void *from)
{
    struct err e = {0};
    struct kernel_copy c = {.size = {N},
                            .from = {from, {1}},
                            .to = {{to, {1}}},
                            .n_targets = 1,
                            .n_dims = 1,
                            .from_dtype = KERNEL_UINT8,
                            .to_dtype = KERNEL_UINT8};
    ck_assert_int_eq(device_copy(s, &c, 1), 0);
    ck_assert(drain(s));
    ck_assert_msg(device_error(d, &e) == 0, "%s", e.text);
}

/* With and without peer access; the copy engine needs none. */
START_TEST(long_runs_go_by_the_copy_engine_between_devices_too)
{
    for (unsigned peer = 0; peer < 2; peer++) {
        struct device *d[2];
        struct device_stream *s;
        struct err e = {0};
        void *p[2];
        ck_assert_int_eq(setenv("STANDIN_PEER", peer == 0 ? "0" : "1", 1), 0);
        for (uint32_t i = 0; i < 2; i++) {
            ck_assert_msg(device_cuda_open(i, NULL, &d[i], &e) == 0, "%s", e.text);
            ck_assert_int_eq(device_alloc(d[i], N, &p[i], &e), 0);
        }
        ck_assert_int_eq(device_cuda_reaches(d[0], d[1]), peer == 1);
        ck_assert_int_eq(device_stream_new(d[0], "test", &s, &e), 0);
        uint8_t *from = segment(d[0], N, &e), *to = segment(d[0], N, &e);
        memset(from, 0x42 + (int)peer, N);
        uint64_t copies = counters(0)->copies, launches = counters(0)->launches;
        copy_all(d[0], s, p[0], from);
        copy_all(d[0], s, p[1], p[0]);
        copy_all(d[0], s, to, p[1]);
        ck_assert_mem_eq(from, to, N);
        ck_assert_uint_eq(counters(0)->copies - copies, 3);
        ck_assert_uint_eq(counters(0)->launches, launches);
        device_stream_free(s);
        for (uint32_t i = 0; i < 2; i++) {
            device_free(d[i], p[i], N);
            device_close(d[i]);
        }
        ck_assert_uint_eq(counters(0)->allocated_bytes, 0);
    }
}
END_TEST

/* 52 boxes are one launch: what is counted is what a GPU would be asked to do. */
START_TEST(a_list_of_boxes_is_one_launch)
{
    enum { BOXES = 104 };
    struct device *d;
    struct device_stream *s;
    struct err e = {0};
    struct kernel_copy c[BOXES];
    ck_assert_int_eq(device_cuda_open(0, NULL, &d, &e), 0);
    ck_assert_int_eq(device_stream_new(d, "test", &s, &e), 0);
    uint8_t *from = segment(d, N, &e), *to = segment(d, N, &e);
    for (unsigned i = 0; i < BOXES; i++)
        c[i] = (struct kernel_copy){.size = {8, 48},
                                    .from = {from + 4096 * i, {96, 1}},
                                    .to = {{to + 384 * i, {48, 1}}},
                                    .n_targets = 1,
                                    .n_dims = 2,
                                    .from_dtype = KERNEL_UINT8,
                                    .to_dtype = KERNEL_UINT8};
    ck_assert_int_eq(device_copy(s, c, BOXES), 0);
    ck_assert(drain(s));
    ck_assert_uint_eq(counters(0)->launches, 2);
    ck_assert_uint_eq(counters(0)->tasks, BOXES);
    device_stream_free(s);
    device_close(d);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_cuda_call_that_fails_is_told_and_nothing_hangs)                                        \
    X(an_error_while_the_gpu_works_is_told_whatever_was_running)                                   \
    X(a_kernel_on_memory_that_is_not_pinned_is_an_illegal_access)                                  \
    X(memory_of_a_device_can_not_be_touched_by_the_cpu)                                            \
    X(without_a_gpu_or_with_too_few_the_backend_says_what_is_missing)                              \
    X(long_runs_go_by_the_copy_engine_between_devices_too)                                         \
    X(a_list_of_boxes_is_one_launch)
#include "test/lib/main.h"
