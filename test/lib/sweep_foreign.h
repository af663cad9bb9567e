/* GPU memory of another process, for test_standin_sweep.c: a child exports an allocation by CUDA IPC, an event that has
 * happened, and an allocation by VMM, and keeps them until foreign_close(). */
#ifndef RS_TEST_SWEEP_FOREIGN_H
#define RS_TEST_SWEEP_FOREIGN_H

#include <check.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* --- memory of another process ---------------------------------------------------------------------- */

static struct {
    pid_t pid;
    int socket, vmm_fd;
    struct handles {
        cudaIpcMemHandle_t memory;
        cudaIpcEventHandle_t event; /* has happened */
    } handles;
} foreign;

enum { IPC_BYTES = 1 << 20, VMM_BYTES = 2 << 20 };

static inline void send_fd(int socket, int fd, const void *data, size_t n)
{
    union {
        struct cmsghdr h;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.h = {.cmsg_len = CMSG_LEN(sizeof(int)),
                       .cmsg_level = SOL_SOCKET,
                       .cmsg_type = SCM_RIGHTS}};
    struct iovec v = {(void *)(uintptr_t)data, n};
    struct msghdr m = {.msg_iov = &v,
                       .msg_iovlen = 1,
                       .msg_control = control.room,
                       .msg_controllen = sizeof control.room};
    memcpy(CMSG_DATA(&control.h), &fd, sizeof fd);
    ck_assert_int_eq(sendmsg(socket, &m, 0), (ssize_t)n);
}

static inline void foreign_main(int socket)
{
    void *p = NULL;
    int fd = -1;
    char c;
    struct handles handles;
    cudaEvent_t event;
    cudaStream_t stream;
    CUmemGenericAllocationHandle vmm;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    if (cudaMalloc(&p, IPC_BYTES) != cudaSuccess ||
        cudaIpcGetMemHandle(&handles.memory, p) != cudaSuccess ||
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess) !=
            cudaSuccess ||
        cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0) != cudaSuccess ||
        cudaEventRecord(event, stream) != cudaSuccess ||
        cudaEventSynchronize(event) != cudaSuccess ||
        cudaIpcGetEventHandle(&handles.event, event) != cudaSuccess ||
        cuMemCreate(&vmm, VMM_BYTES, &prop, 0) != CUDA_SUCCESS ||
        cuMemExportToShareableHandle(&fd, vmm, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) !=
            CUDA_SUCCESS)
        _exit(1);
    send_fd(socket, fd, &handles, sizeof handles);
    (void)!read(socket, &c, 1);
    _exit(0);
}

static inline void foreign_open(void)
{
    int pair[2];
    union {
        struct cmsghdr h;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec v = {&foreign.handles, sizeof foreign.handles};
    struct msghdr m = {.msg_iov = &v,
                       .msg_iovlen = 1,
                       .msg_control = control.room,
                       .msg_controllen = sizeof control.room};
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    foreign.pid = fork();
    if (foreign.pid == 0) {
        close(pair[0]);
        foreign_main(pair[1]);
    }
    close(pair[1]);
    foreign.socket = pair[0];
    ck_assert_int_eq(recvmsg(pair[0], &m, MSG_CMSG_CLOEXEC), (ssize_t)sizeof foreign.handles);
    memcpy(&foreign.vmm_fd, CMSG_DATA(&control.h), sizeof foreign.vmm_fd);
}

static inline void foreign_close(void)
{
    int status;
    close(foreign.socket);
    close(foreign.vmm_fd);
    ck_assert_int_eq(waitpid(foreign.pid, &status, 0), foreign.pid);
}

#endif
