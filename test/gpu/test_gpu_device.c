/* The CUDA device beyond the contract: kernels through real launches against the scalar twins, names,
 * memory of other processes. Runs on the stand-in in make check, on a GPU in scripts/gpu-check. */
#include <check.h>
#include <ctype.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/device_cuda.h"
#include "kernels/kernels_cuda.h"
#include "test/lib/kernel_cases.h"
#include "test/lib/quantise_cases.h"

static struct device *open_gpu(void)
{
    struct device_cuda_options options = {.seed = 3};
    struct device *d = NULL;
    struct err e = {0};
    ck_assert_msg(device_cuda_open(0, &options, &d, &e) == 0, "%s", e.text);
    return d;
}

static struct device_stream *stream_of(struct device *d)
{
    struct device_stream *s = NULL;
    struct err e = {0};
    ck_assert_msg(device_stream_new(d, "test", &s, &e) == 0, "%s", e.text);
    return s;
}

/* Memory that CPU and GPU both reach. */
static uint8_t *segment(struct device *d, size_t n)
{
    struct err e = {0};
    void *p = NULL;
    int fd = memfd_create("segment", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, (off_t)n), 0);
    ck_assert_msg(device_map(d, fd, n, true, &p, &e) == 0, "%s", e.text);
    return p;
}

static void post(void *arg)
{
    int fd = *(int *)arg;
    ck_assert_int_eq(write(fd, "x", 1), 1);
}

/* Waits for all that is enqueued; the device must be well. */
static void drain(struct device_stream *s)
{
    struct err e = {0};
    int ends[2];
    char byte;
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(device_call(s, post, &ends[1]), 0);
    ck_assert_int_eq(read(ends[0], &byte, 1), 1);
    (void)close(ends[0]);
    (void)close(ends[1]);
    ck_assert_msg(device_error(device_stream_device(s), &e) == 0, "%s", e.text);
}

static struct kernel_copy bytes(void *to, void *from, uint64_t n)
{
    return (struct kernel_copy){.size = {n},
                                .from = {from, {1}},
                                .to = {{to, {1}}},
                                .n_targets = 1,
                                .n_dims = 1,
                                .from_dtype = KERNEL_UINT8,
                                .to_dtype = KERNEL_UINT8};
}

static void move(struct device_stream *s, void *to, void *from, uint64_t n)
{
    struct kernel_copy c = bytes(to, from, n);
    ck_assert_int_eq(device_copy(s, &c, 1), 0);
    drain(s);
}

START_TEST(launched_copies_casts_and_fingerprints_are_the_scalar_twins)
{
    enum { N = 12 };
    uint64_t seed = 21;
    struct device *d = open_gpu();
    struct device_stream *s = stream_of(d);
    struct arenas a = {segment(d, ARENA_BYTES), {segment(d, ARENA_BYTES), malloc(ARENA_BYTES)}};
    fill(&seed, a.from, ARENA_BYTES);
    for (unsigned round = 0; round < 100; round++) {
        struct kernel_copy c[N];
        uint64_t sums[2][N] = {{0}, {0}};
        memset(a.to[0], POISON, ARENA_BYTES);
        memset(a.to[1], POISON, ARENA_BYTES);
        struct arenas part = a;
        unsigned n = 0;
        for (uint64_t at = 0; n < N; n++) { /* each in a part of its own */
            c[n] = random_copy(&seed, &part);
            uint64_t most = 0;
            for (uint32_t t = 0; t < c[n].n_targets; t++)
                for (unsigned k = 0; k < c[n].n_dims; k++)
                    most += c[n].size[k] * (uint64_t)llabs(c[n].to[t].stride_bytes[k]);
            at += most + 600;
            if (at > ARENA_BYTES)
                break;
            part.to[0] += most + 600;
            c[n].fingerprint = below(&seed, 2) == 0 ? &sums[0][n] : NULL;
        }
        ck_assert_int_eq(device_copy(s, c, n), 0);
        drain(s);
        for (unsigned i = 0; i < n; i++) {
            struct kernel_copy reference = c[i];
            if (c[i].fingerprint != NULL)
                reference.fingerprint = &sums[1][i];
            for (uint32_t t = 0; t < c[i].n_targets; t++)
                reference.to[t].base = a.to[1] + ((uint8_t *)c[i].to[t].base - a.to[0]);
            kernel_copy_reference(&reference);
        }
        ck_assert_mem_eq(sums[0], sums[1], sizeof sums[0]);
        ck_assert_mem_eq(a.to[0], a.to[1], ARENA_BYTES);
    }
    free(a.to[1]);
    device_stream_free(s);
    device_close(d);
}
END_TEST

/* TP8 of a down projection: packed on the GPU, fetched, unpacked into another, fingerprinted. */
START_TEST(packing_and_unpacking_on_the_gpu_keeps_every_byte)
{
    enum { ROWS = 512, PITCH = 3072, RUN = 384, ALL = ROWS * PITCH };
    struct device *d = open_gpu();
    struct device_stream *s = stream_of(d);
    uint8_t *host = segment(d, ALL), *seen = segment(d, ALL);
    uint64_t seed = 22, sums[2] = {0, 0}, expected = 0;
    struct err e = {0};
    void *full, *packed, *again;
    fill(&seed, host, ALL);
    ck_assert_int_eq(device_alloc(d, ALL, &full, &e), 0);
    ck_assert_int_eq(device_alloc(d, ROWS * RUN, &packed, &e), 0);
    ck_assert_int_eq(device_alloc(d, ALL, &again, &e), 0);
    move(s, full, host, ALL);
    for (unsigned shard = 0; shard < PITCH / RUN; shard++) {
        struct kernel_copy c = {.size = {ROWS, RUN / 2},
                                .offset = {0, shard * RUN / 2},
                                .from = {(char *)full + shard * RUN, {PITCH, 2}},
                                .to = {{packed, {RUN, 2}}},
                                .fingerprint = &sums[0],
                                .n_targets = 1,
                                .n_dims = 2,
                                .from_dtype = KERNEL_BFLOAT16,
                                .to_dtype = KERNEL_BFLOAT16};
        struct kernel_copy back = c;
        back.from = c.to[0];
        back.to[0] = (struct kernel_view){(char *)again + shard * RUN, {PITCH, 2}};
        back.fingerprint = NULL;
        ck_assert_int_eq(device_copy(s, &c, 1), 0);
        ck_assert_int_eq(device_copy(s, &back, 1), 0);
    }
    struct kernel_fingerprint f = {.size = {ROWS, PITCH / 2},
                                   .from = {again, {PITCH, 2}},
                                   .fingerprint = &sums[1],
                                   .n_dims = 2,
                                   .dtype = KERNEL_BFLOAT16};
    ck_assert_int_eq(device_fingerprint(s, &f, 1), 0);
    move(s, seen, again, ALL);
    ck_assert_mem_eq(seen, host, ALL);
    f.from.base = host;
    f.fingerprint = &expected;
    kernel_fingerprint_reference(&f);
    ck_assert_uint_eq(sums[0], expected);
    ck_assert_uint_eq(sums[1], expected);
    device_stream_free(s);
    device_free(d, full, ALL);
    device_free(d, packed, ROWS * RUN);
    device_free(d, again, ALL);
    device_close(d);
}
END_TEST

static struct quantise_out quantise_out_mapped(struct device *d)
{
    uint8_t *small = segment(d, 4096);
    return (struct quantise_out){.to = segment(d, QUANTISE_TO),
                                 .scales = (uint32_t *)(void *)segment(d, QUANTISE_SCALES * 4),
                                 .amax = (uint32_t *)(void *)small,
                                 .sum = (uint64_t *)(void *)(small + 64)};
}

static struct quantise_out quantise_out_plain(void)
{
    return (struct quantise_out){malloc(QUANTISE_TO), malloc(QUANTISE_SCALES * 4), malloc(4),
                                 malloc(8)};
}

START_TEST(launched_casts_with_scales_are_the_scalar_twins)
{
    enum { CASES = 120 };
    uint64_t seed = 23;
    struct device *d = open_gpu();
    struct device_stream *s = stream_of(d);
    uint8_t *from = segment(d, QUANTISE_FROM);
    struct quantise_out out = quantise_out_mapped(d), expected = quantise_out_plain();
    for (unsigned i = 0; i < CASES; i++) {
        struct kernel_quantise q = random_quantise(&seed, from, &out);
        struct kernel_quantise reference = quantise_into(&q, &out, &expected);
        uint32_t amax = random_amax(&seed);
        quantise_out_reset(&out, amax);
        quantise_out_reset(&expected, amax);
        ck_assert_int_eq(device_quantise(s, &q, 1), 0);
        drain(s);
        kernel_quantise_reference(&reference);
        ck_assert_msg(quantise_out_equal(&out, &expected),
                      "case %u: step %u, dtype %u: %llu x %llu in blocks of %llu x %llu", i, q.step,
                      q.from_dtype, (unsigned long long)q.rows, (unsigned long long)q.columns,
                      (unsigned long long)q.block_rows, (unsigned long long)q.block_columns);
    }
    device_stream_free(s);
    device_close(d);
    free(expected.to);
    free(expected.scales);
    free(expected.amax);
    free(expected.sum);
}
END_TEST

/* Cleared, found in parts and used, twice, as one item: what uses a maximum comes after what finds it
 * and before what clears it. More casts than a launch takes, each with its fingerprint. */
START_TEST(casts_of_one_item_find_and_use_their_maxima_in_order)
{
    enum { ROWS = 40, COLUMNS = 48, PARTS = 20, N = 2 * (2 + PARTS) };
    uint64_t seed = 24, sums[2][N] = {{0}, {0}};
    struct device *d = open_gpu();
    struct device_stream *s = stream_of(d);
    uint8_t *from = segment(d, QUANTISE_FROM);
    struct quantise_out out = quantise_out_mapped(d), expected = quantise_out_plain();
    struct kernel_quantise q[N];
    odd_values(&seed, from, QUANTISE_FROM, KERNEL_BFLOAT16);
    memset(from, 0, 2 * ROWS * COLUMNS / 4); /* the first half's maximum is not the second's */
    quantise_out_reset(&out, 0x7F000000);
    quantise_out_reset(&expected, 0x7F000000);
    for (unsigned i = 0; i < N; i++) {
        unsigned half = i / (N / 2), step = i % (N / 2);
        const struct kernel_quantise all = {.from = from + half * ROWS * COLUMNS,
                                            .from_stride = COLUMNS * 2,
                                            .rows = ROWS / 2,
                                            .columns = COLUMNS,
                                            .amax_bits = out.amax,
                                            .from_dtype = KERNEL_BFLOAT16};
        q[i] = all;
        q[i].step = step == 0   ? KERNEL_QUANTISE_CLEAR
                    : step == 1 ? KERNEL_QUANTISE_AMAX
                                : KERNEL_QUANTISE_BY_AMAX;
        if (step < 2)
            continue;
        q[i].window_row = step - 2;
        q[i].window_rows = 1;
        q[i].window_columns = COLUMNS;
        q[i].n_targets = 1;
        q[i].to[0] = (struct kernel_quantise_target){out.to + i * COLUMNS, COLUMNS};
        q[i].fingerprint = &sums[0][i];
    }
    ck_assert_int_eq(device_quantise(s, q, N), 0);
    drain(s);
    for (unsigned i = 0; i < N; i++) {
        struct kernel_quantise reference = quantise_into(&q[i], &out, &expected);
        reference.fingerprint = q[i].fingerprint == NULL ? NULL : &sums[1][i];
        kernel_quantise_reference(&reference);
    }
    ck_assert(quantise_out_equal(&out, &expected));
    ck_assert_mem_eq(sums[0], sums[1], sizeof sums[0]);
    device_stream_free(s);
    device_close(d);
    free(expected.to);
    free(expected.scales);
    free(expected.amax);
    free(expected.sum);
}
END_TEST

/* CASES.md C25 */
START_TEST(a_gpu_is_found_by_index_and_by_uuid_in_any_case)
{
    struct device *d = open_gpu();
    struct err e = {0};
    char upper[64], mig[64];
    const char *uuid = device_cuda_uuid(d);
    for (size_t i = 0; i <= strlen(uuid); i++)
        upper[i] = (char)toupper((unsigned char)uuid[i]);
    (void)snprintf(mig, sizeof mig, "MIG-%s", uuid + 4);
    const char *names[] = {"0", uuid, upper, mig};
    for (unsigned i = 0; i < 4; i++) {
        struct device_cuda_options options = {.name = names[i]};
        struct device *same = NULL;
        ck_assert_msg(device_cuda_open(5, &options, &same, &e) == 0, "%s", e.text);
        ck_assert_str_eq(device_cuda_uuid(same), uuid);
        ck_assert_uint_eq(device_local(same), 5);
        device_close(same);
    }
    struct device_cuda_options unknown = {.name = "GPU-ffffffff-0000-0000-0000-000000000000"};
    ck_assert_int_eq(device_cuda_open(0, &unknown, &d, &e), RS_ENOTFOUND); /* d is untouched */
    ck_assert_ptr_nonnull(strstr(e.text, uuid));
    unknown.name = "99";
    struct device *none = NULL;
    ck_assert_int_eq(device_cuda_open(0, &unknown, &none, &e), RS_ENOTFOUND);
    device_close(d);
}
END_TEST

/* --- memory of another process ------------------------------------------------------------------ */

enum { WORKER_BYTES = 64 << 10, FIRST = 0x1200, SHARD = 0x800 };

/* A client: allocates, fills, hands the handle over; says 1 when the shard was written to 0x77. */
static void be_worker(int fd)
{
    cudaIpcMemHandle_t handle;
    void *p = NULL;
    static uint8_t data[WORKER_BYTES];
    char byte = 0;
    for (unsigned i = 0; i < WORKER_BYTES; i++)
        data[i] = (uint8_t)(i * 7);
    if (cudaMalloc(&p, WORKER_BYTES) != cudaSuccess ||
        cudaMemcpy(p, data, WORKER_BYTES, cudaMemcpyHostToDevice) != cudaSuccess ||
        cudaIpcGetMemHandle(&handle, p) != cudaSuccess)
        _exit(1);
    if (write(fd, &handle, sizeof handle) != sizeof handle || read(fd, &byte, 1) != 1)
        _exit(2);
    if (cudaMemcpy(data, p, WORKER_BYTES, cudaMemcpyDeviceToHost) != cudaSuccess)
        _exit(3);
    byte = data[FIRST] == 0x77 && data[FIRST + SHARD - 1] == 0x77 && data[FIRST - 1] != 0x77;
    (void)!write(fd, &byte, 1);
    (void)!read(fd, &byte, 1);
    _exit(0);
}

struct worker {
    pid_t pid;
    int fd;
    uint8_t handle[DEVICE_CUDA_IPC_BYTES];
};

/* Forked before this process has used CUDA. */
static struct worker worker_start(void)
{
    struct worker w;
    int ends[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    w.pid = fork();
    if (w.pid == 0)
        be_worker(ends[1]);
    (void)close(ends[1]);
    w.fd = ends[0];
    ck_assert_int_eq(read(w.fd, w.handle, sizeof w.handle), sizeof w.handle);
    return w;
}

static void worker_kill(const struct worker *w)
{
    ck_assert_int_eq(kill(w->pid, SIGKILL), 0);
    ck_assert_int_eq(waitpid(w->pid, NULL, 0), w->pid);
}

/* CASES.md C18, C19 */
START_TEST(a_workers_gpu_memory_is_read_and_written_through_one_open_handle)
{
    struct worker w = worker_start();
    struct device *d = open_gpu();
    struct device_stream *s = stream_of(d);
    uint8_t *seen = segment(d, WORKER_BYTES), *ones = segment(d, SHARD);
    struct err e = {0};
    void *p[3];
    char byte = 1;
    for (unsigned i = 0; i < 3; i++) /* three tensors of one allocation */
        ck_assert_msg(device_cuda_import_ipc(d, w.handle, 1, WORKER_BYTES, &p[i], &e) == 0, "%s",
                      e.text);
    ck_assert_ptr_eq(p[0], p[1]);
    ck_assert_ptr_eq(p[0], p[2]);
    move(s, seen, p[0], WORKER_BYTES);
    for (unsigned i = 0; i < WORKER_BYTES; i++)
        ck_assert_msg(seen[i] == (uint8_t)(i * 7), "byte %u", i);
    memset(ones, 0x77, SHARD);
    move(s, (char *)p[0] + FIRST, ones, SHARD);
    ck_assert_int_eq(write(w.fd, &byte, 1), 1);
    ck_assert_int_eq(read(w.fd, &byte, 1), 1);
    ck_assert_int_eq(byte, 1);
    for (unsigned i = 0; i < 3; i++)
        ck_assert_int_eq(device_cuda_close_ipc(d, p[i], &e), 0);
    ck_assert_int_eq(device_cuda_close_ipc(d, p[0], &e), RS_ENOTFOUND);
    worker_kill(&w);
    device_stream_free(s);
    device_close(d);
}
END_TEST

/* CASES.md C16, C22: and the device is none the worse for either. */
START_TEST(a_handle_of_a_dead_worker_or_of_this_process_is_refused)
{
    struct worker w = worker_start();
    struct device *d = open_gpu();
    struct device_stream *s = stream_of(d);
    uint8_t *a = segment(d, 4096), *b = segment(d, 4096);
    struct err e = {0};
    cudaIpcMemHandle_t own;
    void *mine, *p;
    worker_kill(&w);
    ck_assert_int_eq(device_cuda_import_ipc(d, w.handle, 1, WORKER_BYTES, &p, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "owner must be alive"));
    ck_assert_int_eq(device_alloc(d, 4096, &mine, &e), 0);
    ck_assert_int_eq(cudaIpcGetMemHandle(&own, mine), cudaSuccess);
    ck_assert_int_eq(device_cuda_import_ipc(d, (const uint8_t *)&own, 1, 4096, &p, &e), RS_EINVAL);
    memset(a, 5, 4096);
    move(s, b, a, 4096);
    ck_assert_mem_eq(a, b, 4096);
    device_free(d, mine, 4096);
    device_stream_free(s);
    device_close(d);
}
END_TEST

/* What torch's expandable segments do. False: this GPU or driver has no such memory. */
static bool make_vmm(size_t n, int *ret_fd)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemGenericAllocationHandle handle;
    if (cuMemCreate(&handle, n, &properties, 0) != CUDA_SUCCESS)
        return false;
    bool exported =
        cuMemExportToShareableHandle(ret_fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ==
        CUDA_SUCCESS;
    return cuMemRelease(handle) == CUDA_SUCCESS && exported;
}

/* CASES.md C17, B29 */
START_TEST(a_vmm_allocation_is_mapped_by_its_descriptor_and_anything_else_is_refused)
{
    enum { N = 2 << 20 };
    struct device *d = open_gpu();
    struct device_stream *s = stream_of(d);
    uint8_t *a = segment(d, N), *b = segment(d, N);
    struct err e = {0};
    uint64_t seed = 24;
    void *p, *q;
    int fd = -1;
    ck_assert(make_vmm(N, &fd));
    int again = dup(fd), no_vmm = memfd_create("no vmm", MFD_CLOEXEC);
    fill(&seed, a, N);
    ck_assert_msg(device_cuda_import_vmm(d, fd, N, &p, &e) == 0, "%s", e.text);
    ck_assert_msg(device_cuda_import_vmm(d, again, N, &q, &e) == 0, "%s", e.text);
    move(s, p, a, N);
    move(s, b, q, N); /* one memory, two mappings */
    ck_assert_mem_eq(a, b, N);
    ck_assert_int_eq(device_cuda_import_vmm(d, no_vmm, N, &q, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "no VMM allocation"));
    ck_assert_int_eq(device_cuda_close_vmm(d, p, N, &e), 0);
    device_stream_free(s);
    device_close(d);
}
END_TEST

/* Fan-out writes into memory that another GPU's worker has: rights of VMM memory are per GPU. */
START_TEST(a_vmm_allocation_is_reached_by_kernels_of_every_gpu_that_reaches_its_own)
{
    enum { N = 2 << 20, FEW = 4096 }; /* few: a kernel's work, not the copy engine's */
    struct device_cuda_options options = {.seed = 3};
    struct device *d = open_gpu(), *other = NULL;
    struct err e = {0};
    uint64_t seed = 25;
    uint32_t n = 0;
    void *p;
    int fd = -1;
    ck_assert_int_eq(device_cuda_count(&n, &e), 0);
    if (n < 2) {
        device_close(d);
        return;
    }
    ck_assert_msg(device_cuda_open(1, &options, &other, &e) == 0, "%s", e.text);
    struct device_stream *s = stream_of(d), *of_other = stream_of(other);
    uint8_t *a = segment(d, FEW), *b = segment(d, FEW);
    fill(&seed, a, FEW);
    ck_assert(make_vmm(N, &fd));
    ck_assert_msg(device_cuda_import_vmm(d, fd, N, &p, &e) == 0, "%s", e.text);
    ck_assert_msg(device_cuda_connect(d, other, &e) == 0, "%s", e.text);
    if (device_cuda_reaches(other, d)) {
        move(of_other, p, a, FEW);
        move(s, b, p, FEW);
        ck_assert_mem_eq(a, b, FEW);
    }
    ck_assert_int_eq(device_cuda_close_vmm(d, p, N, &e), 0);
    device_stream_free(s);
    device_stream_free(of_other);
    device_close(other);
    device_close(d);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_vmm_allocation_is_reached_by_kernels_of_every_gpu_that_reaches_its_own)                    \
    X(launched_copies_casts_and_fingerprints_are_the_scalar_twins)                                 \
    X(packing_and_unpacking_on_the_gpu_keeps_every_byte)                                           \
    X(launched_casts_with_scales_are_the_scalar_twins)                                             \
    X(casts_of_one_item_find_and_use_their_maxima_in_order)                                        \
    X(a_gpu_is_found_by_index_and_by_uuid_in_any_case)                                             \
    X(a_workers_gpu_memory_is_read_and_written_through_one_open_handle)                            \
    X(a_handle_of_a_dead_worker_or_of_this_process_is_refused)                                     \
    X(a_vmm_allocation_is_mapped_by_its_descriptor_and_anything_else_is_refused)
#include "test/lib/main.h"
