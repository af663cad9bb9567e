/* libreshard's export of GPU memory (client/cuda.c) and the daemon's import of it, between real processes.
 * Runs on the stand-in in make check, on a GPU in scripts/gpu-check. */
#include <check.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "device/device_cuda.h"
#include "kernels/kernels_dtype.h"

#include "client/cuda.c" /* needs no more than base: a GPU machine may have no gRPC to link the library */

enum { ALLOCATION_BYTES = 6 << 20, OFFSET = (1 << 20) + 0x1200, SHARD_BYTES = 3 << 20 };
enum {
    PARTS = 3,
    PART_BYTES = ALLOCATION_BYTES / PARTS
}; /* the shard begins in the first, ends in the third */

union control {
    char bytes[CMSG_SPACE((MEMORY_MAX_PARTS + 1) * sizeof(int))];
    struct cmsghdr align;
};

/* What a client sends: what to import, and the descriptors. */
static void export_send(int socket, const struct segment_export *x)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)x, .iov_len = sizeof *x};
    union control control = {0};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (x->n_fds > 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = CMSG_SPACE(x->n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(x->n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), x->fds, x->n_fds * sizeof(int));
    }
    if (sendmsg(socket, &m, 0) != (ssize_t)sizeof *x)
        _exit(9);
}

static struct segment_export export_receive(int socket)
{
    struct segment_export x = {0};
    union control control = {0};
    struct iovec part = {.iov_base = &x, .iov_len = sizeof x};
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    ck_assert_int_eq(recvmsg(socket, &m, MSG_WAITALL), sizeof x);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    x.fds = mem_calloc(MEMORY_MAX_PARTS + 1, sizeof *x.fds);
    ck_assert_uint_eq(x.n_fds, c == NULL ? 0 : (c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    if (c != NULL)
        memcpy(x.fds, CMSG_DATA(c), x.n_fds * sizeof(int));
    return x;
}

static void *malloc_memory(void)
{
    void *p = NULL;
    return cudaMalloc(&p, ALLOCATION_BYTES) == cudaSuccess ? p : NULL;
}

/* So many VMM allocations, one behind the other, as torch's expandable segments make them; in a larger range of addresses. */
static void *parts_memory(uint32_t n, size_t part_bytes)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr p = 0;
    if (cudaSetDevice(0) != cudaSuccess ||
        cuMemAddressReserve(&p, (n + 2) * part_bytes, 0, 0, 0) != CUDA_SUCCESS)
        return NULL;
    p += part_bytes;
    for (uint32_t i = 0; i < n; i++) {
        CUmemGenericAllocationHandle handle;
        if (cuMemCreate(&handle, part_bytes, &properties, 0) != CUDA_SUCCESS ||
            cuMemMap(p + i * part_bytes, part_bytes, 0, handle, 0) != CUDA_SUCCESS ||
            cuMemRelease(handle) != CUDA_SUCCESS)
            return NULL;
    }
    return cuMemSetAccess(p, n * part_bytes, &access, 1) == CUDA_SUCCESS ? (void *)(uintptr_t)p
                                                                         : NULL;
}

static void *vmm_memory(void)
{
    return parts_memory(1, ALLOCATION_BYTES);
}

static void *three_parts(void)
{
    return parts_memory(PARTS, PART_BYTES);
}

static uint8_t byte_at(size_t i)
{
    return (uint8_t)(i * 13 + i / 251);
}

/* The trainer: its shard lies inside an allocation; written without waiting, then cuda_synchronise. */
static void be_trainer(int socket, void *(*memory)(void))
{
    static uint8_t data[SHARD_BYTES], seen[SHARD_BYTES];
    struct segment_export x;
    struct err e = {0};
    cudaStream_t stream;
    char byte;
    char *base = memory();
    for (size_t i = 0; i < SHARD_BYTES; i++)
        data[i] = byte_at(i);
    if (base == NULL || cuda_export(base + OFFSET, SHARD_BYTES, &x, &e) != 0) {
        (void)fprintf(stderr, "%s\n", e.text);
        _exit(1);
    }
    if (cuda_export(base + OFFSET, ALLOCATION_BYTES - OFFSET + 1, &x, &e) != RS_EINVAL)
        _exit(2);
    if (cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0) != cudaSuccess ||
        cudaMemcpyAsync(base + OFFSET, data, SHARD_BYTES, cudaMemcpyHostToDevice, stream) !=
            cudaSuccess ||
        cuda_synchronise(0, &e) != 0)
        _exit(3);
    export_send(socket, &x);
    if (read(socket, &byte, 1) != 1)
        _exit(4);
    if (cudaMemcpy(seen, base + OFFSET, SHARD_BYTES, cudaMemcpyDeviceToHost) != cudaSuccess)
        _exit(5);
    for (size_t i = 0; i < SHARD_BYTES; i++)
        if (seen[i] != 255 - byte_at(i))
            _exit(6);
    _exit(0);
}

static void post(void *arg)
{
    ck_assert_int_eq(write(*(int *)arg, "x", 1), 1);
}

/* Both ways, as one run; the device must be well. */
static void move(struct device_stream *s, void *to, void *from)
{
    struct kernel_copy c = {.size = {SHARD_BYTES},
                            .from = {from, {1}},
                            .to = {{to, {1}}},
                            .n_targets = 1,
                            .n_dims = 1,
                            .from_dtype = KERNEL_UINT8,
                            .to_dtype = KERNEL_UINT8};
    struct err e = {0};
    int ends[2];
    char byte;
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(device_copy(s, &c, 1), 0);
    ck_assert_int_eq(device_call(s, post, &ends[1]), 0);
    ck_assert_int_eq(read(ends[0], &byte, 1), 1);
    (void)close(ends[0]);
    (void)close(ends[1]);
    ck_assert_msg(device_error(device_stream_device(s), &e) == 0, "%s", e.text);
}

/* By the table that goes first; each allocation has its own number. */
static uint32_t parts_read(const struct segment_export *x, struct device_import_part *ret)
{
    struct memory_part table[PARTS];
    ck_assert_uint_eq(x->n_fds, PARTS + 1);
    ck_assert_int_eq(pread(x->fds[0], table, sizeof table, 0), sizeof table);
    ck_assert_int_eq(lseek(x->fds[0], 0, SEEK_END), sizeof table);
    for (uint32_t i = 0; i < PARTS; i++) {
        ck_assert_uint_eq(table[i].bytes, PART_BYTES);
        for (uint32_t k = 0; k < i; k++)
            ck_assert_uint_ne(table[i].allocation, table[k].allocation);
        ret[i] = (struct device_import_part){.fd = x->fds[1 + i], .bytes = PART_BYTES};
    }
    return PARTS;
}

static size_t n_mapped(void)
{
    char line[512];
    size_t n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    ck_assert_ptr_nonnull(f);
    while (fgets(line, sizeof line, f) != NULL)
        n += strstr(line, "standin-vmm") != NULL;
    (void)fclose(f);
    return n;
}

/* What can't be mapped as a whole isn't at all, and the descriptors stay the caller's. */
static void import_in_part(struct device *d, const struct device_import *good)
{
    struct device_import_part parts[PARTS];
    struct device_import from = *good;
    struct err e = {0};
    void *p = NULL;
    const size_t before =
        n_mapped(); /* on a GPU nothing of this is seen, but that the driver does not complain */
    from.parts = parts;
    for (long i = 1;; i++) {
        for (uint32_t k = 0; k < PARTS; k++)
            parts[k] = (struct device_import_part){dup(good->parts[k].fd), good->parts[k].bytes};
        mem_fail_at(i);
        int r = device_import(d, &from, &p, &e);
        int failed = mem_failed();
        mem_fail_at(0);
        if (!failed) {
            ck_assert_msg(r == 0, "%s", e.text);
            break;
        }
        ck_assert_int_eq(r, RS_ENOMEM);
        for (uint32_t k = 0; k < PARTS; k++)
            ck_assert_int_eq(close(parts[k].fd), 0); /* still the caller's */
        ck_assert_uint_eq(n_mapped(), before);
    }
    device_import_close(d, DEVICE_IMPORT_VMM, p, ALLOCATION_BYTES);
    ck_assert_uint_eq(n_mapped(), before);
    for (uint32_t bad = 0; bad < PARTS; bad++) {
        memcpy(parts, good->parts, sizeof parts);
        parts[bad].fd = -1;
        ck_assert_int_eq(device_import(d, &from, &p, &e), RS_EINVAL);
        ck_assert_uint_eq(n_mapped(), before);
        memcpy(parts, good->parts, sizeof parts);
        parts[bad].bytes = SIZE_MAX;
        ck_assert_int_eq(device_import(d, &from, &p, &e), RS_EINVAL);
        parts[bad].bytes = PART_BYTES + 1;
        ck_assert_int_eq(device_import(d, &from, &p, &e), RS_EINVAL);
    }
    ck_assert_int_eq(device_error(d, &e), 0);
}

static void hand_over(void *(*memory)(void), uint32_t kind)
{
    int ends[2], status = -1;
    struct device *d = NULL;
    struct device_stream *s = NULL;
    struct err e = {0};
    void *p = NULL, *host = NULL;
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    pid_t pid = fork(); /* before this process has used CUDA */
    if (pid == 0) {
        (void)close(ends[0]);
        be_trainer(ends[1], memory);
    }
    (void)close(ends[1]);
    struct segment_export x = export_receive(ends[0]);
    ck_assert_uint_eq(x.kind, kind);
    ck_assert_uint_eq(x.device.offset, OFFSET);
    ck_assert_uint_eq(x.device.allocation_bytes, ALLOCATION_BYTES);
    ck_assert_msg(device_open("cuda", 0, NULL, NULL, &d, &e) == 0, "%s", e.text);
    ck_assert_int_eq(strcasecmp(x.device.name, device_name(d)), 0);
    struct device_import_part parts[MEMORY_MAX_PARTS];
    struct device_import from = {.kind = kind == MEMORY_SEGMENT_CUDA_IPC ? DEVICE_IMPORT_IPC
                                                                         : DEVICE_IMPORT_VMM,
                                 .handle = x.device.handle,
                                 .generation = x.device.allocation,
                                 .fd = x.n_fds > 0 ? x.fds[0] : -1,
                                 .bytes = ALLOCATION_BYTES};
    if (kind == MEMORY_SEGMENT_CUDA_VMM_PARTS) {
        from.parts = parts;
        from.n_parts = parts_read(&x, parts);
        import_in_part(d, &from);
    }
    ck_assert_msg(device_import(d, &from, &p, &e) == 0, "%s", e.text);
    ck_assert_msg(device_stream_new(d, "test", &s, &e) == 0, "%s", e.text);
    int fd = memfd_create("host", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, SHARD_BYTES), 0);
    ck_assert_msg(device_map(d, fd, SHARD_BYTES, true, &host, &e) == 0, "%s", e.text);
    move(s, host, (char *)p + OFFSET);
    for (size_t i = 0; i < SHARD_BYTES; i++) {
        if (((uint8_t *)host)[i] != byte_at(i)) /* each assertion is a message to Check */
            ck_abort_msg("byte %zu", i);
        ((uint8_t *)host)[i] = (uint8_t)(255 - byte_at(i));
    }
    move(s, (char *)p + OFFSET, host);
    ck_assert_int_eq(write(ends[0], "x", 1), 1);
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_int_eq(status, 0);
    device_import_close(d, from.kind, p, ALLOCATION_BYTES); /* after its owner has gone */
    ck_assert_int_eq(device_error(d, &e), 0);
    device_unmap(d, host, SHARD_BYTES);
    device_stream_free(s);
    device_close(d);
    (void)close(ends[0]);
    mem_free(x.fds);
}

START_TEST(a_part_of_an_allocation_is_handed_over_by_its_pointer)
{
    hand_over(malloc_memory, MEMORY_SEGMENT_CUDA_IPC);
}
END_TEST

START_TEST(a_part_of_a_vmm_allocation_is_handed_over_by_its_pointer)
{
    hand_over(vmm_memory, MEMORY_SEGMENT_CUDA_VMM);
}
END_TEST

START_TEST(a_tensor_over_three_vmm_allocations_is_handed_over_by_its_pointer)
{
    hand_over(three_parts, MEMORY_SEGMENT_CUDA_VMM_PARTS);
}
END_TEST

/* What is exported is imported in the same process; `owner` is who it is said to be. */
static int import_here(struct device *d, const struct segment_export *x,
                       const struct process_id *owner, void **ret, struct err *e)
{
    struct device_import from = {.kind = DEVICE_IMPORT_IPC,
                                 .handle = x->device.handle,
                                 .generation = x->device.allocation,
                                 .owner = owner,
                                 .address = (void *)(uintptr_t)x->device.address,
                                 .fd = -1,
                                 .bytes = x->device.allocation_bytes};
    return device_import(d, &from, ret, e);
}

/* CASES.md C16 (openucx/ucx#11603): CUDA opens no handle in the process that made it. */
START_TEST(what_this_process_has_exported_is_used_where_it_lies)
{
    static uint8_t data[SHARD_BYTES], seen[SHARD_BYTES];
    struct device *d = NULL;
    struct err e = {0};
    struct segment_export x;
    struct process_id self;
    void *p = NULL, *q = NULL;
    char *base = malloc_memory();
    ck_assert_ptr_nonnull(base);
    ck_assert_msg(cuda_export(base + OFFSET, SHARD_BYTES, &x, &e) == 0, "%s", e.text);
    ck_assert_msg(device_open("cuda", 0, NULL, NULL, &d, &e) == 0, "%s", e.text);
    ck_assert(process_id_self(&self));
    for (size_t i = 0; i < SHARD_BYTES; i++)
        data[i] = byte_at(i);
    ck_assert_int_eq(cudaMemcpy(base + OFFSET, data, SHARD_BYTES, cudaMemcpyHostToDevice),
                     cudaSuccess);

    ck_assert_msg(import_here(d, &x, &self, &p, &e) == 0, "%s", e.text);
    ck_assert_msg(import_here(d, &x, &self, &q, &e) == 0, "%s", e.text);
    ck_assert_ptr_eq(p, base);
    ck_assert_ptr_eq(q, base);
    struct process_id others[] = {self, self, self};
    others[0].pid_namespace++;
    others[1].start++;
    others[2].pid++;
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(import_here(d, &x, &others[i], &q, &e), RS_EINVAL);
        ck_assert_ptr_nonnull(strstr(e.text, "another process than this"));
    }
    ck_assert_int_eq(import_here(d, &x, NULL, &q, &e), RS_EINVAL);
    struct segment_export more = x;
    more.device.allocation_bytes++;
    ck_assert_int_eq(import_here(d, &more, &self, &q, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "were declared"));

    device_import_close(d, DEVICE_IMPORT_IPC, p, ALLOCATION_BYTES);
    device_import_close(d, DEVICE_IMPORT_IPC, p,
                        ALLOCATION_BYTES); /* as often as it was imported */
    ck_assert_int_eq(device_error(d, &e), 0);
    ck_assert_int_eq(cudaMemcpy(seen, base + OFFSET, SHARD_BYTES, cudaMemcpyDeviceToHost),
                     cudaSuccess); /* it is still its owner's */
    ck_assert_mem_eq(seen, data, SHARD_BYTES);

    char *later = malloc_memory(); /* C21: the handle is of memory that is there no more */
    struct segment_export stale = x;
    ck_assert_ptr_nonnull(later);
    stale.device.address = (uintptr_t)later;
    ck_assert_int_eq(import_here(d, &stale, &self, &q, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "other memory lies there now"));
    ck_assert_int_eq(cudaFree(base), cudaSuccess);
    ck_assert_int_eq(import_here(d, &x, &self, &q, &e), RS_EINVAL);
    ck_assert_int_eq(device_error(d, &e), 0);
    ck_assert_int_eq(cudaFree(later), cudaSuccess);
    device_close(d);
}
END_TEST

static int n_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 4096; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

START_TEST(an_export_of_several_vmm_allocations_is_all_of_them_or_nothing)
{
    enum { SMALL = 2 << 20 };
    struct segment_export x = {0};
    struct err e = {0};
    char *p = parts_memory(MEMORY_MAX_PARTS + 1, SMALL);
    if (p == NULL) /* a GPU with little free memory */
        return;
    ck_assert_int_eq(cuda_export(p, SMALL, &x, &e), 0);
    segment_export_close(&x);
    const int before = n_descriptors();
    ck_assert_int_eq(cuda_export(p + 1, (uint64_t)MEMORY_MAX_PARTS * SMALL, &x, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "more than 252 VMM allocations"));
    ck_assert_int_eq(cuda_export(p + 3 * SMALL, (uint64_t)MEMORY_MAX_PARTS * SMALL, &x, &e),
                     RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "4194304 bytes before it"));
    ck_assert_int_eq(cuda_export(p, UINT64_MAX, &x, &e), RS_EINVAL);
    ck_assert_int_eq(n_descriptors(), before);
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int r = cuda_export(p + 1, (uint64_t)MEMORY_MAX_PARTS * SMALL - 1, &x, &e);
        int failed = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, failed ? RS_ENOMEM : 0);
        if (!failed)
            break;
        ck_assert_int_eq(n_descriptors(), before);
    }
    ck_assert_uint_eq(x.kind, MEMORY_SEGMENT_CUDA_VMM_PARTS);
    ck_assert_uint_eq(x.n_fds, MEMORY_MAX_PARTS + 1);
    ck_assert_uint_eq(x.device.offset, 1);
    ck_assert_uint_eq(x.device.allocation_bytes, (uint64_t)MEMORY_MAX_PARTS * SMALL);
    ck_assert_int_eq(n_descriptors(), before + MEMORY_MAX_PARTS + 1);
    segment_export_close(&x);
    segment_export_close(&x);
    ck_assert_int_eq(n_descriptors(), before);
}
END_TEST

/* CASES.md C17 */
START_TEST(a_pools_memory_and_host_memory_are_refused_with_their_kind)
{
    struct segment_export x;
    struct err e = {0};
    cudaStream_t stream;
    void *p = NULL;
    char host[64];
    ck_assert_int_eq(cudaSetDevice(0), cudaSuccess);
    ck_assert_int_eq(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
    ck_assert_int_eq(cudaMallocAsync(&p, 1 << 16, stream), cudaSuccess);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
    ck_assert_int_eq(cuda_export(p, 1 << 16, &x, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "can't be handed over"));
    ck_assert_int_eq(cuda_export(host, sizeof host, &x, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "no GPU memory"));
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_part_of_an_allocation_is_handed_over_by_its_pointer)                                       \
    X(a_part_of_a_vmm_allocation_is_handed_over_by_its_pointer)                                    \
    X(a_tensor_over_three_vmm_allocations_is_handed_over_by_its_pointer)                           \
    X(what_this_process_has_exported_is_used_where_it_lies)                                        \
    X(an_export_of_several_vmm_allocations_is_all_of_them_or_nothing)                              \
    X(a_pools_memory_and_host_memory_are_refused_with_their_kind)
#include "test/lib/main.h"
