/* The stand-in's CUDA runtime: memory and events of other processes. A handle names a file of the exporter. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test/standin/cudart_inner.h"

struct ipc_handle {
    char magic[8];
    int32_t pid, fd;
    uint64_t bytes, inode;
    int32_t device;
};

_Static_assert(sizeof(struct ipc_handle) <= CUDA_IPC_HANDLE_SIZE, "fits");

STANDIN_EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *ret, void *p)
{
    ENTER("cudaIpcGetMemHandle");
    struct ipc_handle h = {.magic = "standin", .pid = getpid()};
    struct stat st;
    size_t bytes = 0;
    struct standin_allocation at; /* any address of an allocation gives its handle */
    h.fd = standin_find(p, &at) ? standin_file_of(at.base, &bytes) : -1;
    if (h.fd < 0 || fstat(h.fd, &st) != 0)
        return rt_said(cudaErrorInvalidValue);
    h.bytes = bytes;
    h.inode = st.st_ino;
    h.device = at.device;
    memset(ret, 0, sizeof *ret);
    memcpy(ret, &h, sizeof h);
    return cudaSuccess;
}

/* The file that an exporter has open, where that one lives and still has it; else -1. */
static int ipc_open(const struct ipc_handle *h)
{
    struct stat st;
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", h->pid, h->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_ino == h->inode)
        return fd;
    if (fd >= 0)
        (void)close(fd);
    return -1;
}

STANDIN_EXPORT cudaError_t cudaIpcOpenMemHandle(void **ret, cudaIpcMemHandle_t handle,
                                                unsigned flags)
{
    (void)flags;
    ENTER("cudaIpcOpenMemHandle");
    struct ipc_handle h;
    memcpy(&h, &handle, sizeof h);
    if (memcmp(h.magic, "standin", 8) != 0)
        return rt_said(cudaErrorInvalidValue);
    if (h.pid == getpid())
        return rt_said(
            cudaErrorDeviceUninitialized); /* as the real one: not in the exporter (C16) */
    int fd = ipc_open(&h);
    if (fd < 0)
        return rt_said(cudaErrorMapBufferObjectFailed);
    return rt_said(standin_map_memory(h.device, fd, h.bytes, ret));
}

STANDIN_EXPORT cudaError_t cudaIpcCloseMemHandle(void *p)
{
    ENTER("cudaIpcCloseMemHandle");
    return rt_said(standin_unmap_memory(p));
}

STANDIN_EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *ret, cudaEvent_t e)
{
    ENTER("cudaIpcGetEventHandle");
    struct ipc_handle h = {.magic = "sievent", .pid = getpid(), .fd = e->fd};
    struct stat st;
    if (e->fd < 0 || fstat(e->fd, &st) != 0)
        return rt_said(cudaErrorInvalidResourceHandle);
    h.inode = st.st_ino;
    memset(ret, 0, sizeof *ret);
    memcpy(ret, &h, sizeof h);
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *ret, cudaIpcEventHandle_t handle)
{
    ENTER("cudaIpcOpenEventHandle");
    struct ipc_handle h;
    memcpy(&h, &handle, sizeof h);
    if (memcmp(h.magic, "sievent", 8) != 0)
        return rt_said(cudaErrorInvalidValue);
    int fd = ipc_open(&h);
    struct CUevent_st *e = fd < 0 ? NULL : rt_event_map(fd);
    if (e == NULL)
        return rt_said(fd < 0 ? cudaErrorMapBufferObjectFailed : cudaErrorMemoryAllocation);
    *ret = e;
    return cudaSuccess;
}
