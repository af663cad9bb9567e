/* What CUDA does that a program finds out late: kernels that are loaded at their first launch, threads without a context,
 * errors that are none and stay all the same, contexts that nobody asked for. */
#include <check.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
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

enum { N = 4096, FINGERPRINTS = 40, VMM_BYTES = 2 << 20, PATIENCE_S = 60 };

/* Of the stand-in: the program is linked with the real runtime, which has none of it. */
static void *symbol(const char *name)
{
    void *at = dlsym(RTLD_DEFAULT, name);
    ck_assert_msg(at != NULL, "%s", name);
    return at;
}

static const struct standin_device_counters *counters(int device)
{
    struct standin_device_counters *(*count)(int);
    void *at = symbol("standin_count");
    memcpy(&count, &at, sizeof count);
    return count(device);
}

static void *driver(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *at = dlsym(library, name);
    ck_assert_msg(at != NULL, "%s", name);
    return at;
}

static struct device *open_gpu(uint32_t local)
{
    struct device *d = NULL;
    struct err e = {0};
    ck_assert_msg(device_cuda_open(local, NULL, &d, &e) == 0, "%s", e.text);
    return d;
}

static struct device_stream *stream_of(struct device *d)
{
    struct device_stream *s = NULL;
    ck_assert_int_eq(device_stream_new(d, "test", &s, NULL), 0);
    return s;
}

static void *segment(struct device *d, size_t n)
{
    void *p = NULL;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, (off_t)n), 0);
    ck_assert_int_eq(device_map(d, fd, n, true, &p, NULL), 0);
    return p;
}

/* --- gates: what is behind one waits ------------------------------------------------------------- */

/* Everything enqueued on s is done. */
static bool drains(struct device_stream *s)
{
    struct gate g = GATE;
    return device_call(s, gate_open, &g) == 0 && gate_opens(&g, PATIENCE_S * 1000);
}

static void behind_gate(void *gate, struct CUstream_st *stream)
{
    ck_assert_ptr_nonnull(stream);
    ck_assert_int_eq(cudaLaunchHostFunc(stream, gate_wait, gate), cudaSuccess);
}

static void fingerprint(struct device_stream *s, void *p, uint64_t *sum)
{
    const struct kernel_fingerprint f = {
        .from = {p, {1}}, .size = {N}, .n_dims = 1, .dtype = KERNEL_UINT8, .fingerprint = sum};
    ck_assert_int_eq(device_fingerprint(s, &f, 1), 0);
}

/* As many boxes in one launch. */
static void copy_boxes(struct device_stream *s, uint8_t *to, uint8_t *from, uint32_t n)
{
    struct kernel_copy copies[64];
    ck_assert_uint_le(n, 64);
    for (uint32_t i = 0; i < n; i++)
        copies[i] = (struct kernel_copy){.size = {16},
                                         .from = {from + 32 * i, {1}},
                                         .to = {{to + 32 * i, {1}}},
                                         .n_targets = 1,
                                         .n_dims = 1,
                                         .from_dtype = KERNEL_UINT8,
                                         .to_dtype = KERNEL_UINT8};
    ck_assert_int_eq(device_copy(s, copies, n), 0);
}

/* --- tests --------------------------------------------------------------------------------------- */

/* A receive of NCCL waits on one stream for a peer that waits for what another stream packs. */
START_TEST(no_kernel_is_loaded_while_another_stream_waits)
{
    struct device *d = open_gpu(0);
    struct device_stream *blocked = stream_of(d), *s = stream_of(d);
    uint8_t *from = segment(d, N), *to = segment(d, N);
    struct gate g = GATE;
    struct err e = {0};
    uint64_t sum = 0;
    memset(from, 0x5A, N);
    ck_assert_int_eq(device_cuda_issue(blocked, behind_gate, &g, NULL), 0);
    copy_boxes(s, to, from, 1);
    copy_boxes(s, to, from, 64);
    fingerprint(s, from, &sum);
    bool done = drains(s);
    gate_open(&g);
    ck_assert(done);
    ck_assert(drains(blocked));
    ck_assert_msg(device_error(d, &e) == 0, "%s", e.text);
    ck_assert_uint_eq(counters(0)->late_loads, 0);
    device_stream_free(s);
    device_stream_free(blocked);
    device_close(d);
}
END_TEST

static uint64_t calls_of(const struct standin_calls *calls, const char *name)
{
    for (unsigned i = 0; i < STANDIN_MAX_NAMES; i++)
        if (strcmp(calls->of[i].name, name) == 0)
            return __atomic_load_n(&calls->of[i].n, __ATOMIC_RELAXED);
    return 0;
}

/* More launches with fingerprints than there are places for their sums: the next one waits, and asks how the stream is. */
START_TEST(a_stream_that_is_not_ready_is_no_error_of_the_launch_after_it)
{
    char path[] = "/tmp/standin-calls-XXXXXX";
    int fd = mkstemp(path);
    ck_assert_int_eq(ftruncate(fd, sizeof(struct standin_calls)), 0);
    ck_assert_int_eq(setenv("STANDIN_CALLS", path, 1), 0);
    const struct standin_calls *calls = mmap(NULL, sizeof *calls, PROT_READ, MAP_SHARED, fd, 0);
    struct device *d = open_gpu(0);
    struct device_stream *s = stream_of(d);
    uint8_t *p = segment(d, N);
    struct gate g = GATE;
    struct err e = {0};
    uint64_t sums[FINGERPRINTS] = {0};
    memset(p, 0x5A, N);
    ck_assert_int_eq(device_cuda_issue(s, behind_gate, &g, NULL), 0);
    for (unsigned i = 0; i < FINGERPRINTS; i++)
        fingerprint(s, p, &sums[i]);
    uint64_t until = clock_mono_ns() + PATIENCE_S * UINT64_C(1000000000);
    while (calls_of(calls, "cudaStreamQuery") == 0 && clock_mono_ns() < until)
        (void)sched_yield();
    ck_assert_uint_gt(calls_of(calls, "cudaStreamQuery"), 0);
    gate_open(&g);
    ck_assert(drains(s));
    ck_assert_msg(device_error(d, &e) == 0, "%s", e.text);
    for (unsigned i = 0; i < FINGERPRINTS; i++)
        ck_assert(sums[i] == sums[0] && sums[i] != 0);
    device_stream_free(s);
    device_close(d);
    (void)unlink(path);
}
END_TEST

START_TEST(a_stream_that_has_failed_is_no_wait_for_ever_of_the_launch_after_it)
{
    ck_assert_int_eq(setenv("STANDIN_FAIL", "cudaStreamQuery:1:700", 1), 0);
    struct device *d = open_gpu(0);
    struct device_stream *s = stream_of(d);
    uint8_t *p = segment(d, N);
    struct gate g = GATE;
    struct err e = {0};
    uint64_t sums[FINGERPRINTS] = {0};
    ck_assert_int_eq(device_cuda_issue(s, behind_gate, &g, NULL), 0);
    for (unsigned i = 0; i < FINGERPRINTS; i++)
        fingerprint(s, p, &sums[i]);
    uint64_t until = clock_mono_ns() + PATIENCE_S * UINT64_C(1000000000);
    while (device_error(d, &e) == 0 && clock_mono_ns() < until)
        (void)sched_yield();
    gate_open(&g);
    ck_assert_int_eq(device_error(d, &e), RS_EDEVICE);
    ck_assert_ptr_nonnull(strstr(e.text, "waiting for fingerprints"));
    device_stream_free(s); /* what it was given is skipped */
    device_close(d);
}
END_TEST

static void leave_error(void *arg, struct CUstream_st *stream)
{
    void (*leave)(int code);
    void *at = symbol("standin_leave_error");
    (void)arg;
    (void)stream;
    memcpy(&leave, &at, sizeof leave);
    leave(cudaErrorInvalidValue);
}

START_TEST(what_another_library_leaves_behind_is_no_error_of_the_next_launch)
{
    struct device *d = open_gpu(0);
    struct device_stream *s = stream_of(d);
    uint8_t *p = segment(d, N);
    struct err e = {0};
    uint64_t sum = 0;
    ck_assert_int_eq(device_cuda_issue(s, leave_error, NULL, NULL), 0);
    fingerprint(s, p, &sum);
    ck_assert(drains(s));
    ck_assert_msg(device_error(d, &e) == 0, "%s", e.text);
    device_stream_free(s);
    device_close(d);
}
END_TEST

START_TEST(only_gpus_that_are_opened_have_a_context_and_those_that_are_connected_reach_each_other)
{
    struct device *one = open_gpu(1);
    ck_assert_uint_eq(counters(1)->contexts, 1);
    ck_assert_uint_eq(counters(0)->contexts, 0);
    struct device *zero = open_gpu(0);
    struct device_stream *s = stream_of(zero);
    struct err e = {0};
    void *there = NULL;
    uint8_t *from = segment(zero, N), *to = segment(one, N);
    memset(from, 0x5A, N);
    ck_assert_int_eq(device_alloc(one, N, &there, &e), 0);
    ck_assert_msg(device_cuda_connect(zero, one, &e) == 0, "%s", e.text);
    ck_assert_msg(device_cuda_connect(zero, one, &e) == 0, "%s", e.text);
    copy_boxes(s, there, from, 64); /* a kernel of one writes into memory of the other */
    ck_assert(drains(s));
    struct device_stream *back = stream_of(one);
    copy_boxes(back, to, there, 64);
    ck_assert(drains(back));
    ck_assert_msg(device_error(zero, &e) == 0 && device_error(one, &e) == 0, "%s", e.text);
    ck_assert_mem_eq(to, from, 16);
    device_stream_free(s);
    device_stream_free(back);
    device_free(one, there, N);
    device_close(zero);
    device_close(one);
}
END_TEST

/* --- threads that never used CUDA (CASES C20) ------------------------------------------------------ */

/* A process that has exported memory of GPU 1, and lives until its pipe is closed. */
struct owner {
    pid_t pid;
    int fd;
    uint8_t handle[DEVICE_IPC_BYTES];
};

static struct owner owner_start(void)
{
    struct owner o;
    int down[2], up[2];
    ck_assert(pipe(down) == 0 && pipe(up) == 0);
    o.pid = fork();
    if (o.pid == 0) {
        cudaIpcMemHandle_t h;
        void *p = NULL;
        char end;
        (void)close(down[1]);
        if (cudaSetDevice(1) != cudaSuccess || cudaMalloc(&p, N) != cudaSuccess ||
            cudaIpcGetMemHandle(&h, p) != cudaSuccess || write(up[1], &h, sizeof h) != sizeof h)
            _exit(1);
        (void)!read(down[0], &end, 1);
        _exit(0);
    }
    (void)close(down[0]);
    o.fd = down[1];
    ck_assert_int_eq(read(up[0], o.handle, sizeof o.handle), sizeof o.handle);
    return o;
}

struct closing {
    struct device *d;
    struct device_event *event;
    void *ipc, *vmm;
    const struct owner *owner;
    int unmap_said;
};

static void *close_all(void *arg)
{
    struct closing *c = arg;
    CUresult (*unmap)(CUdeviceptr, size_t);
    void *at = driver("cuMemUnmap"), *again = NULL;
    memcpy(&unmap, &at, sizeof unmap);
    c->unmap_said = (int)unmap((CUdeviceptr)(uintptr_t)c->vmm, VMM_BYTES);
    struct device_import more = {.kind = DEVICE_IMPORT_IPC,
                                 .handle = c->owner->handle,
                                 .generation = 1,
                                 .fd = -1,
                                 .bytes = N};
    struct err e = {0};
    if (device_import(c->d, &more, &again, &e) != 0)
        device_cuda_fail(c->d, e.text);
    else
        device_import_close(c->d, DEVICE_IMPORT_IPC, again, N);
    device_event_free(c->event);
    return NULL;
}

static void *close_rest(void *arg)
{
    struct closing *c = arg;
    device_import_close(c->d, DEVICE_IMPORT_VMM, c->vmm, VMM_BYTES);
    device_import_close(c->d, DEVICE_IMPORT_IPC, c->ipc, N);
    return NULL;
}

static void on_a_fresh_thread(void *(*fn)(void *), void *arg)
{
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, fn, arg), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
}

static int vmm_export(void)
{
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*export)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    void *a = driver("cuMemCreate"), *b = driver("cuMemExportToShareableHandle"),
         *c = driver("cuMemRelease");
    CUmemAllocationProp what = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1}};
    CUmemGenericAllocationHandle handle;
    int fd = -1;
    memcpy(&create, &a, sizeof create);
    memcpy(&export, &b, sizeof export);
    memcpy(&release, &c, sizeof release);
    ck_assert_int_eq(create(&handle, VMM_BYTES, &what, 0), CUDA_SUCCESS);
    ck_assert_int_eq(export(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                     CUDA_SUCCESS);
    ck_assert_int_eq(release(handle), CUDA_SUCCESS); /* the descriptor holds the memory */
    return fd;
}

START_TEST(a_thread_that_never_used_cuda_closes_on_the_device_that_the_memory_is_on)
{
    struct owner o = owner_start();
    struct device *d = open_gpu(1);
    struct err e = {0};
    struct closing c = {.d = d, .owner = &o};
    struct device_import ipc = {
        .kind = DEVICE_IMPORT_IPC, .handle = o.handle, .generation = 1, .fd = -1, .bytes = N};
    struct device_import vmm = {.kind = DEVICE_IMPORT_VMM, .fd = vmm_export(), .bytes = VMM_BYTES};
    ck_assert_msg(device_import(d, &ipc, &c.ipc, &e) == 0, "%s", e.text);
    ck_assert_msg(device_import(d, &vmm, &c.vmm, &e) == 0, "%s", e.text);
    ck_assert_int_eq(device_event_new(d, &c.event), 0);
    ck_assert_uint_eq(counters(1)->open_handles, 2);
    on_a_fresh_thread(close_all, &c);
    ck_assert_int_eq(c.unmap_said, CUDA_ERROR_INVALID_CONTEXT); /* so the driver is asked in none */
    on_a_fresh_thread(close_rest, &c);
    ck_assert_msg(device_error(d, &e) == 0, "%s", e.text);
    ck_assert_uint_eq(counters(1)->open_handles, 0);
    ck_assert_uint_eq(counters(0)->contexts, 0);
    device_close(d);
    (void)close(o.fd);
    ck_assert_int_eq(waitpid(o.pid, NULL, 0), o.pid);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(no_kernel_is_loaded_while_another_stream_waits)                                              \
    X(a_stream_that_has_failed_is_no_wait_for_ever_of_the_launch_after_it)                         \
    X(a_stream_that_is_not_ready_is_no_error_of_the_launch_after_it)                               \
    X(what_another_library_leaves_behind_is_no_error_of_the_next_launch)                           \
    X(only_gpus_that_are_opened_have_a_context_and_those_that_are_connected_reach_each_other)      \
    X(a_thread_that_never_used_cuda_closes_on_the_device_that_the_memory_is_on)
#include "test/lib/main.h"
