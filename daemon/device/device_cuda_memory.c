/* The CUDA device's memory: its own, and workers' host segments. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/device_cuda_private.h"
#include "device/numa.h"

#include "base/banned.h"

int cuda_alloc(struct device *d, size_t bytes, void **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    char what[64];
    void *p = NULL;
    if (bytes == 0)
        return err_set(e, RS_EINVAL, "CUDA device %u: 0 bytes of memory asked for", d->local);
    (void)snprintf(what, sizeof what, "%zu bytes of GPU memory", bytes);
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaMalloc(&p, bytes);
    if (r != cudaSuccess) {
        (void)cudaGetLastError(); /* it was told here: no later call shall tell it again */
        return cuda_said(c, r, what, e);
    }
    if (c->options.seed != 0) {
        cudaStream_t s = NULL;
        r = cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, 0);
        if (r == cudaSuccess)
            r = cudaMemsetAsync(p, DEVICE_POISON, bytes, s);
        if (r == cudaSuccess)
            r = cudaStreamSynchronize(s);
        if (s != NULL)
            (void)cudaStreamDestroy(s);
    }
    if (r != cudaSuccess) {
        (void)cudaFree(p);
        return cuda_said(c, r, "filling memory with poison", e);
    }
    *ret = p;
    return 0;
}

void cuda_free(struct device *d, void *p, size_t bytes)
{
    struct device_cuda *c = cuda_of(d);
    (void)bytes;
    if (cuda_good(c, cudaSetDevice(c->ordinal), "choosing the device"))
        (void)cuda_good(c, cudaFree(p), "freeing memory");
}

/* The host segment is pinned, and the GPU reaches it at the address that the CPU has. What is only
 * read is mapped for writing all the same where it may be: few GPUs register read-only memory. */
int cuda_map(struct device *d, int fd, size_t bytes, bool writable, void **ret, struct err *e)
{
    struct device_cuda *c = cuda_of(d);
    struct stat st;
    if (bytes == 0 || fstat(fd, &st) != 0 || st.st_size < 0 || (uint64_t)st.st_size < bytes)
        return err_set(e, RS_EINVAL, "CUDA device %u: segment of %zu bytes: the file is shorter",
                       d->local, bytes);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED && (errno == EACCES || errno == EPERM))
        return err_set(e, RS_EPERM, "CUDA device %u: segment of %zu bytes: %s", d->local, bytes,
                       writable ? "its descriptor does not allow writing"
                                : "pinning it needs a descriptor that is open for writing, also "
                                  "where it is only read");
    if (p == MAP_FAILED)
        return err_set(e, errno == ENOMEM ? RS_EEXHAUSTED : err_from_errno(errno),
                       "CUDA device %u: mapping %zu bytes: %s", d->local, bytes, strerror(errno));
    numa_prefer(p, bytes, c->numa_node); /* before pages are pinned where they are */
    cudaError_t r = cudaSetDevice(c->ordinal);
    if (r == cudaSuccess)
        r = cudaHostRegister(p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (r != cudaSuccess) {
        (void)cudaGetLastError();
        (void)munmap(p, bytes);
        return cuda_said(c, r, "pinning a segment (is the memory lock limit, ulimit -l, too low?)",
                         e);
    }
    (void)close(fd);
    *ret = p;
    return 0;
}

void cuda_unmap(struct device *d, void *p, size_t bytes)
{
    struct device_cuda *c = cuda_of(d);
    if (cuda_good(c, cudaSetDevice(c->ordinal), "choosing the device"))
        (void)cuda_good(c, cudaHostUnregister(p), "unpinning a segment");
    rs_assert(munmap(p, bytes) == 0);
}
