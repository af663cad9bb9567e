/* Memory of other processes, where only the stand-in can show it: handles that fail to open at each call, a
 * thousand of them, memory that came back under the same handle. */
#include <check.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "device/device_cuda.h"
#include "memory/memory.h"
#include "test/standin/standin.h"

enum { ALLOCATION_BYTES = 8192, MOST = 1000 };

/* A process that owns n allocations on a device: the k-th is full of k. */
struct owner {
    pid_t pid;
    int fd;
    uint8_t handles[MOST + 1][DEVICE_IPC_BYTES];
};

static void be_owner(int fd, int device, unsigned n)
{
    static uint8_t data[ALLOCATION_BYTES];
    char end;
    for (unsigned k = 0; k < n; k++) {
        cudaIpcMemHandle_t handle;
        void *p = NULL;
        memset(data, (int)(k & 0xFF), sizeof data);
        if (cudaSetDevice(device) != cudaSuccess ||
            cudaMalloc(&p, ALLOCATION_BYTES) != cudaSuccess ||
            cudaMemcpy(p, data, sizeof data, cudaMemcpyHostToDevice) != cudaSuccess ||
            cudaIpcGetMemHandle(&handle, p) != cudaSuccess ||
            write(fd, &handle, sizeof handle) != (ssize_t)sizeof handle)
            _exit(1);
    }
    (void)!read(fd, &end, 1); /* until the test's end */
    _exit(0);
}

/* Forked before this process has used CUDA. */
static void owner_start(struct owner *o, int device, unsigned n)
{
    int ends[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    o->pid = fork();
    if (o->pid == 0) {
        (void)close(ends[0]); /* else it would keep itself alive */
        be_owner(ends[1], device, n);
    }
    (void)close(ends[1]);
    o->fd = ends[0];
    for (size_t have = 0; have < (size_t)n * DEVICE_IPC_BYTES;) {
        ssize_t got =
            read(o->fd, (uint8_t *)o->handles + have, (size_t)n * DEVICE_IPC_BYTES - have);
        ck_assert_int_gt(got, 0);
        have += (size_t)got;
    }
}

static void owner_end(struct owner *o)
{
    (void)close(o->fd);
    ck_assert_int_eq(waitpid(o->pid, NULL, 0), o->pid);
}

static struct device *open_gpu(uint32_t local)
{
    struct device *d = NULL;
    struct err e = {0};
    ck_assert_msg(device_open("cuda", local, NULL, NULL, &d, &e) == 0, "%s", e.text);
    return d;
}

/* Handles that are open, by the stand-in's own count: a symbol that the real runtime has not. */
static uint64_t n_open(int device)
{
    struct standin_device_counters *(*count)(int device);
    void *symbol = dlsym(RTLD_DEFAULT, "standin_count");
    ck_assert_ptr_nonnull(symbol);
    memcpy(&count, &symbol, sizeof count);
    return __atomic_load_n(&count(device)->open_handles, __ATOMIC_RELAXED);
}

/* Address space of memory that the stand-in maps, by what the system says: bytes, in every build. */
static size_t mapped_bytes(void)
{
    char line[512];
    unsigned long from, to;
    size_t n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    ck_assert_ptr_nonnull(f);
    while (fgets(line, sizeof line, f) != NULL)
        if (strstr(line, "/memfd:standin-device") != NULL &&
            sscanf(line, "%lx-%lx", &from, &to) == 2)
            n += to - from;
    (void)fclose(f);
    return n;
}

/* All address space, in pages; the thread sanitizer maps room of its own for what it notes. */
#ifdef __SANITIZE_THREAD__
enum { PAGES_ARE_OURS = 0 };
#else
enum { PAGES_ARE_OURS = 1 };
#endif
static long pages(void)
{
    long n = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fscanf(f, "%ld", &n), 1);
    (void)fclose(f);
    return n;
}

static struct device_import import_of(const uint8_t *handle, uint64_t generation)
{
    return (struct device_import){.kind = DEVICE_IMPORT_IPC,
                                  .handle = handle,
                                  .generation = generation,
                                  .fd = -1,
                                  .bytes = ALLOCATION_BYTES};
}

/* CASES.md C23 */
START_TEST(ten_thousand_imports_leave_no_address_space_and_over_a_thousand_open_ones_are_refused)
{
    static struct owner o;
    static void *open[MOST + 1];
    struct err e = {0};
    long before = 0;
    owner_start(&o, 0, MOST + 1);
    struct device *d = open_gpu(0);
    const size_t own = mapped_bytes();
    for (unsigned i = 0; i < 10000; i++) {
        struct device_import from = import_of(o.handles[i % 3], 0);
        ck_assert_int_eq(device_import(d, &from, &open[0], &e), 0);
        if (i == 10) {
            before = pages();
            ck_assert_uint_ge(mapped_bytes(), own + ALLOCATION_BYTES);
        }
        device_import_close(d, DEVICE_IMPORT_IPC, open[0], ALLOCATION_BYTES);
    }
    ck_assert_uint_eq(n_open(0), 0);
    ck_assert_uint_eq(mapped_bytes(), own);
    if (PAGES_ARE_OURS)
        ck_assert_int_le(pages(), before + 64);
    for (unsigned i = 0; i < MOST; i++) {
        struct device_import from = import_of(o.handles[i], 0);
        ck_assert_msg(device_import(d, &from, &open[i], &e) == 0, "%s", e.text);
    }
    struct device_import last = import_of(o.handles[MOST], 0), again = import_of(o.handles[0], 0);
    ck_assert_int_eq(device_import(d, &last, &open[MOST], &e), RS_EEXHAUSTED);
    ck_assert_ptr_nonnull(strstr(e.text, "one per allocation"));
    ck_assert_int_eq(device_import(d, &again, &open[MOST], &e),
                     0); /* one more user of an open one */
    ck_assert_uint_eq(n_open(0), MOST);
    device_import_close(d, DEVICE_IMPORT_IPC, open[MOST], ALLOCATION_BYTES);
    for (unsigned i = 0; i < MOST; i++)
        device_import_close(d, DEVICE_IMPORT_IPC, open[i], ALLOCATION_BYTES);
    ck_assert_uint_eq(n_open(0), 0);
    ck_assert_int_eq(device_error(d, &e), 0);
    device_close(d);
    owner_end(&o);
}
END_TEST

/* CASES.md C21: a cache by handle alone would give the old mapping. */
START_TEST(another_generation_of_a_handle_is_opened_anew)
{
    static struct owner o;
    struct err e = {0};
    void *p[3];
    owner_start(&o, 0, 1);
    struct device *d = open_gpu(0);
    struct device_import first = import_of(o.handles[0], 1), second = import_of(o.handles[0], 2);
    ck_assert_int_eq(device_import(d, &first, &p[0], &e), 0);
    ck_assert_int_eq(device_import(d, &first, &p[1], &e), 0);
    ck_assert_int_eq(device_import(d, &second, &p[2], &e), 0);
    ck_assert_ptr_eq(p[0], p[1]);
    ck_assert_ptr_ne(p[0], p[2]);
    ck_assert_uint_eq(n_open(0), 2);
    for (unsigned i = 0; i < 3; i++)
        device_import_close(d, DEVICE_IMPORT_IPC, p[i], ALLOCATION_BYTES);
    ck_assert_uint_eq(n_open(0), 0);
    device_close(d);
    owner_end(&o);
}
END_TEST

START_TEST(memory_of_another_device_or_of_fewer_bytes_is_refused_and_closed)
{
    static struct owner o;
    struct err e = {0};
    void *p;
    owner_start(&o, 1, 1);
    struct device *d = open_gpu(0), *its = open_gpu(1);
    struct device_import from = import_of(o.handles[0], 0), more = from;
    more.bytes++;
    ck_assert_int_eq(device_import(d, &from, &p, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "GPU 0"));
    ck_assert_ptr_nonnull(strstr(e.text, "GPU 1"));
    ck_assert_int_eq(device_import(its, &more, &p, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "8192 bytes, 8193 were declared"));
    ck_assert_uint_eq(n_open(0) + n_open(1), 0);
    ck_assert_int_eq(device_import(its, &from, &p, &e), 0);
    ck_assert_int_eq(device_import(its, &more, &p, &e),
                     RS_EINVAL); /* also where it is open already */
    device_import_close(its, DEVICE_IMPORT_IPC, p, ALLOCATION_BYTES);
    device_close(d);
    device_close(its);
    owner_end(&o);
}
END_TEST

/* One failure after the other; each leaves nothing open, and the device well. */
START_TEST(each_call_of_an_import_may_fail_and_leaves_nothing_open)
{
    static struct owner o;
    struct err e = {0};
    void *p = NULL;
    owner_start(&o, 0, 1);
    ck_assert_int_eq(setenv("STANDIN_FAIL",
                            "cudaIpcOpenMemHandle:1:1,cuMemGetAddressRange:1:1,"
                            "cudaPointerGetAttributes:1:1",
                            1),
                     0);
    struct device *d = open_gpu(0);
    struct segment_table *t = segment_table_new();
    struct device_import from = import_of(o.handles[0], 0);
    for (long i = 1;; i++) { /* memory: the table's, and the list of handles */
        mem_fail_at(i);
        int r = segment_table_import(t, d, 1, 0, &from, 16, 4096, &e);
        int failed = mem_failed();
        mem_fail_at(0);
        if (!failed)
            break;
        ck_assert_int_eq(r, RS_ENOMEM);
        ck_assert_uint_eq(n_open(0), 0);
    }
    for (unsigned i = 0; i < 2; i++) { /* the first has failed above */
        ck_assert_int_lt(segment_table_import(t, d, 1, 0, &from, 16, 4096, &e), 0);
        ck_assert_uint_eq(n_open(0), 0);
        ck_assert_int_eq(device_error(d, NULL), 0);
    }
    ck_assert_msg(segment_table_import(t, d, 1, 0, &from, 16, 4096, &e) == 0, "%s", e.text);
    uint32_t n;
    ck_assert_int_eq(device_import(d, &from, &p, &e), 0);
    ck_assert_ptr_eq(segment_table_bases(t, 1, &n)[0], (char *)p + 16);
    device_import_close(d, DEVICE_IMPORT_IPC, p, ALLOCATION_BYTES);
    ck_assert_uint_eq(n_open(0), 1);
    segment_table_free(t);
    ck_assert_uint_eq(n_open(0), 0);
    device_close(d);
    owner_end(&o);
}
END_TEST

enum { PARTS = 3, PART_BYTES = 2 << 20 };

static int vmm_descriptor(void)
{
    CUmemAllocationProp what = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle handle;
    int fd = -1;
    ck_assert_int_eq(cuMemCreate(&handle, PART_BYTES, &what, 0), CUDA_SUCCESS);
    ck_assert_int_eq(
        cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        CUDA_SUCCESS);
    ck_assert_int_eq(cuMemRelease(handle), CUDA_SUCCESS);
    return fd;
}

static uint64_t n_mapped(void)
{
    uint64_t n = 0;
    for (int i = 0; i < STANDIN_MAX_DEVICES; i++)
        n += n_open(i);
    return n;
}

/* Each call fails once, at the first allocation and at a later one. Nothing stays mapped, and the descriptors stay the caller's. */
START_TEST(several_vmm_allocations_are_opened_all_or_none_whichever_call_fails)
{
    static const char *const failures[] = {
        "cuMemImportFromShareableHandle:1:1",
        "cuMemImportFromShareableHandle:3:1", /* the second of three */
        "cuMemAddressReserve:1:1",
        "cuMemMap:1:1",
        "cuMemMap:4:1", /* the third */
        "cuMemSetAccess:1:1"};
    struct device *d = open_gpu(0);
    struct segment_table *t = segment_table_new();
    struct device_import_part parts[PARTS];
    struct err e = {0};
    for (unsigned i = 0; i < PARTS; i++)
        parts[i] = (struct device_import_part){.fd = vmm_descriptor(), .bytes = PART_BYTES};
    struct device_import from = {.kind = DEVICE_IMPORT_VMM,
                                 .fd = -1,
                                 .bytes = PARTS * PART_BYTES,
                                 .parts = parts,
                                 .n_parts = PARTS};
    for (unsigned i = 0; i < sizeof failures / sizeof *failures; i++) {
        ck_assert_int_eq(setenv("STANDIN_FAIL", failures[i], 1), 0);
        ck_assert_msg(segment_table_import(t, d, 1, 0, &from, 1, PART_BYTES * 2, &e) == RS_EINVAL,
                      "%s", failures[i]);
        ck_assert_msg(n_mapped() == 0, "%s", failures[i]);
        for (unsigned k = 0; k < PARTS; k++)
            ck_assert_int_ge(fcntl(parts[k].fd, F_GETFD), 0);
        ck_assert_int_eq(device_error(d, NULL), 0);
    }
    ck_assert_msg(segment_table_import(t, d, 1, 0, &from, 1, PART_BYTES * 2, &e) == 0, "%s",
                  e.text);
    ck_assert_uint_eq(n_open(0), PARTS);
    for (unsigned k = 0; k < PARTS; k++)
        ck_assert_int_lt(fcntl(parts[k].fd, F_GETFD), 0);
    /* What can't be unmapped costs the device, so that the process is replaced: five have been unmapped so far. */
    ck_assert_int_eq(setenv("STANDIN_FAIL", "cuMemUnmap:7:1", 1), 0);
    segment_table_free(t);
    ck_assert_uint_eq(n_mapped(), PARTS - 1);
    ck_assert_int_ne(device_error(d, NULL), 0);
    device_close(d);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(ten_thousand_imports_leave_no_address_space_and_over_a_thousand_open_ones_are_refused)       \
    X(another_generation_of_a_handle_is_opened_anew)                                               \
    X(memory_of_another_device_or_of_fewer_bytes_is_refused_and_closed)                            \
    X(each_call_of_an_import_may_fail_and_leaves_nothing_open)                                     \
    X(several_vmm_allocations_are_opened_all_or_none_whichever_call_fails)
#include "test/lib/main.h"
