/* The stand-in's NCCL: memory of its own, and buffers that are registered with communicators.
 *
 * What the real one would suffer in silence is counted as a mistake: a buffer that is let go while a group is
 * in flight, that is no more when it is let go, memory that is freed while it is registered. Memory of another
 * process, opened by its IPC handle, is refused. */
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test/standin/nccl_inner.h"
#include "test/standin/standin.h"

enum { MAX_REGISTERED = 256, MAX_OWN = 256 };

static struct registered {
    struct ncclComm *comm;
    char *data;
    size_t bytes;
    int device;
} registered[MAX_REGISTERED];
static char *own[MAX_OWN]; /* by ncclMemAlloc */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void count(uint64_t *at, int64_t by)
{
    __atomic_fetch_add(at, (uint64_t)by, __ATOMIC_RELAXED);
}

/* What another process allocated can't be registered; what NCCL or CUDA allocated here can. */
static bool can_be(const char *p, size_t bytes)
{
    struct standin_allocation a;
    bool mine = false;
    if (!standin_find(p, &a) || bytes > a.bytes - (size_t)(p - (char *)a.base))
        return false;
    for (int i = 0; i < MAX_OWN; i++)
        mine = mine || own[i] == a.base;
    return a.own || mine;
}

STANDIN_EXPORT ncclResult_t ncclCommRegister(const ncclComm_t c, void *p, size_t bytes, void **ret)
{
    int code = standin_call("ncclCommRegister", ncclSystemError);
    int r = code != 0 ? code : ncclInvalidArgument;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < MAX_REGISTERED && r == ncclInvalidArgument && can_be(p, bytes); i++)
        if (registered[i].comm == NULL) {
            registered[i] = (struct registered){c, p, bytes, standin_comm_device(c)};
            *ret = &registered[i];
            r = ncclSuccess;
            count(&standin_count(registered[i].device)->registered, 1);
        }
    pthread_mutex_unlock(&mutex);
    if (r != ncclSuccess) /* NCCL asks CUDA about the memory, and leaves what it was told */
        standin_leave_error(cudaErrorInvalidValue);
    return (ncclResult_t)r;
}

static void let_go(struct registered *x)
{
    struct standin_device_counters *c = standin_count(x->device);
    struct standin_allocation a;
    if (!standin_find(x->data, &a))
        count(&c->mistakes, 1);
    count(&c->registered, -1);
    x->comm = NULL;
}

STANDIN_EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t c, void *handle)
{
    int code = standin_call("ncclCommDeregister", ncclSystemError);
    struct registered *x = handle;
    pthread_mutex_lock(&mutex);
    bool known = x >= registered && x < registered + MAX_REGISTERED && x->comm == c;
    if (!known || standin_comm_busy(c))
        count(&standin_count(standin_comm_device(c))->mistakes, 1);
    if (known && code == 0)
        let_go(x);
    pthread_mutex_unlock(&mutex);
    return (ncclResult_t)(code != 0 ? code : known ? ncclSuccess : ncclInvalidArgument);
}

/* A communicator's end. */
void standin_registered_drop(struct ncclComm *c)
{
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < MAX_REGISTERED; i++)
        if (registered[i].comm == c)
            let_go(&registered[i]);
    pthread_mutex_unlock(&mutex);
}

STANDIN_EXPORT ncclResult_t ncclMemAlloc(void **ret, size_t bytes)
{
    int code = standin_call("ncclMemAlloc", ncclUnhandledCudaError);
    size_t rounded = (bytes + 4095) & ~(size_t)4095;
    int device = standin_current_device();
    if (code != 0 || bytes == 0)
        return (ncclResult_t)(code != 0 ? code : ncclInvalidArgument);
    int fd = memfd_create("standin-nccl-memory", MFD_CLOEXEC);
    void *p = NULL;
    if (fd < 0 || ftruncate(fd, (off_t)rounded) != 0 ||
        standin_map_memory(device, fd, rounded, &p) != 0)
        return ncclUnhandledCudaError;
    memset(standin_reach(device, p, rounded), 0xCD, rounded);
    count(&standin_count(device)->open_handles, -1); /* it is no mapping of another's memory */
    standin_allocated(device, rounded);
    pthread_mutex_lock(&mutex);
    int i = 0;
    while (i < MAX_OWN - 1 && own[i] != NULL)
        i++;
    own[i] = p;
    pthread_mutex_unlock(&mutex);
    *ret = p;
    return ncclSuccess;
}

STANDIN_EXPORT ncclResult_t ncclMemFree(void *p)
{
    int code = standin_call("ncclMemFree", ncclUnhandledCudaError);
    struct standin_allocation a;
    bool found = false;
    if (code != 0)
        return (ncclResult_t)code;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < MAX_OWN && !found; i++)
        if (own[i] == (char *)p) {
            own[i] = NULL;
            found = standin_find(p, &a);
        }
    for (int i = 0; i < MAX_REGISTERED && found; i++)
        if (registered[i].comm != NULL && registered[i].data >= (char *)p &&
            registered[i].data < (char *)p + a.bytes)
            count(&standin_count(a.device)->mistakes, 1);
    pthread_mutex_unlock(&mutex);
    if (!found)
        return ncclInvalidArgument;
    count(&standin_count(a.device)->open_handles, 1);
    count(&standin_count(a.device)->allocated_bytes, -(int64_t)a.bytes);
    return standin_unmap_memory(p) == 0 ? ncclSuccess : ncclInvalidArgument;
}
