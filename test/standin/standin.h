/* The stand-in for machines without a GPU: what its four libraries share.
 *
 * libcudart.so.13, libcuda.so.1, libnvidia-ml.so.1 and libnccl.so.2 of this folder have the sonames
 * and the symbols of the real ones, as far as reshard calls them, and run on the CPU. The programs
 * under test are the same binaries: only LD_LIBRARY_PATH differs. Results on it say nothing about
 * the speed of a GPU, and are called stand-in wherever they appear.
 *
 * What it is strict about, so that mistakes show:
 * - Memory of a device can't be touched by the CPU: its pages are there without any right, the
 *   library works on a second mapping of the same file. New memory is full of 0xCD.
 * - A kernel or copy that touches memory which the device can't reach (pageable, freed, another
 *   device's without peer access) fails as an illegal address, sticky, as on a GPU.
 * - Streams are threads that start each operation after a random delay: a missing event shows.
 * - A kernel that was not loaded before waits at its first launch for all that runs on its device, as lazy loading
 *   may; the driver's calls want a context of the calling thread, and the runtime's give a thread that has chosen no device
 *   one on GPU 0; "not ready" stays as a thread's last error.
 * - A host function that calls the runtime gets an error; operations are lost after a sticky error.
 * - NCCL: a communicator that does not block says "in progress", and gives groups to their streams later, from a thread of its
 *   own; a send ends when its receive has taken it; groups in another order hang; a dead peer is
 *   silence.
 *
 * Environment:
 *   STANDIN_DEVICES=2        how many devices
 *   STANDIN_MEMORY=1073741824 bytes of each
 *   STANDIN_CONTEXT=0        bytes that a process's context takes of each device that it uses
 *   STANDIN_SEED=1           of delays (0: none), STANDIN_DELAY_US=200 the longest
 *   STANDIN_PAGEABLE=0       1: kernels and NCCL reach any memory of the process (contract tests that know no device memory)
 *   STANDIN_PEER=1           0: devices have no peer access; n above 1: n in a row have
 *   STANDIN_NVLINK=0         so many devices in a row are connected by NVLink, by NVML; 0: none
 *   STANDIN_CLIQUE           all devices are in that clique of one fabric; unset: there is none
 *   STANDIN_NCCL_VERSION     what NCCL says it is, as 22809
 *   STANDIN_CUDA_VERSION     what the CUDA runtime says it is, as 13000
 *   STANDIN_FAIL=call:n[:code],…    the n-th call of that name returns code (default 999, for NCCL 2)
 *   STANDIN_ASYNC=op:n[:code],…     the n-th operation (kernel, copy, set, host, group, init, shrink) fails when it runs, sticky
 *   STANDIN_HANG=name:n,…           the n-th call or operation of that name hangs (a group until it is aborted)
 *   RESHARD_DAMAGE=name[:n[:m]]     silent harm from the n-th passage on, m times (1): flipped-bit, lost-chunk and
 *                            wrong-address of a message received, lost-copy, wrong-cast and wrong-scale of a box
 *   STANDIN_COUNTERS=FILE    counters are kept in this file, a struct standin_counters, shared by all
 *                            processes that name it
 *   STANDIN_CALLS=FILE       calls and operations are counted in this file, a struct standin_calls, of one process */
#ifndef RS_TEST_STANDIN_H
#define RS_TEST_STANDIN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STANDIN_EXPORT __attribute__((visibility("default")))

enum { STANDIN_MAX_DEVICES = 16 };

struct standin_device_counters {
    uint64_t launches, tasks;      /* kernels; boxes in them */
    uint64_t copies, copied_bytes; /* copy engine */
    uint64_t sets, host_functions;
    uint64_t groups_begun;     /* NCCL */
    uint64_t groups, messages; /* that ended well; messages are sends and receives */
    uint64_t sent_bytes, received_bytes;
    uint64_t allocated_bytes, open_handles; /* now, IPC and VMM mappings included in handles only */
    uint64_t contexts;                      /* made so far */
    uint64_t most_blocks, most_ctas;        /* of a kernel's grid; of a communicator */
    uint64_t registered;                    /* buffers, with NCCL, now */
    uint64_t mistakes; /* that the real NCCL might suffer in silence (nccl_memory.c) */
    uint64_t
        late_loads; /* kernels that were loaded by a launch, which may wait for the whole device */
    uint64_t peak_bytes; /* greatest allocated_bytes */
};

struct standin_counters {
    struct standin_device_counters device[STANDIN_MAX_DEVICES];
};

/* Raises a counter to at least that much. */
STANDIN_EXPORT void standin_most(uint64_t *counter, uint64_t value);
enum { STANDIN_MAX_NAMES = 128, STANDIN_NAME_BYTES = 48 };

struct standin_calls {
    struct standin_calls_of {
        char name[STANDIN_NAME_BYTES];
        uint64_t n; /* 0: this one and those behind it are free */
    } of[STANDIN_MAX_NAMES];
};

/* Never NULL. */
STANDIN_EXPORT struct standin_device_counters *standin_count(int device);

/* The n-th call of `name`: the code that STANDIN_FAIL wants, or 0. Hangs where STANDIN_HANG says so. */
STANDIN_EXPORT int standin_call(const char *name, int default_code);
/* The same for operations as they run: STANDIN_ASYNC. A hang ends when *stop gets true (NULL: never). */
STANDIN_EXPORT int standin_operation(const char *name, int default_code, const atomic_bool *stop);

/* Whether to do harm here, now: RESHARD_DAMAGE of daemon/base/crash.h, with the names and counts that
 * the host device and its transports have. */
STANDIN_EXPORT bool standin_damage(const char *name);

/* A number of the environment. */
STANDIN_EXPORT uint64_t standin_number(const char *name, uint64_t otherwise);
/* Seeded by STANDIN_SEED and the process's own number of the call; 0 for ever where the seed is 0. */
STANDIN_EXPORT uint64_t standin_random(void);

/* --- for the other libraries ------------------------------------------------------------------- */

struct CUstream_st;
/* Enqueues fn(arg) as an operation of the stream: NCCL's groups. fn returns 0 or a CUDA error, which
 * sticks. RS: a CUDA error. */
STANDIN_EXPORT int standin_enqueue(struct CUstream_st *stream, const char *name,
                                   int (*fn)(void *arg), void *arg);
STANDIN_EXPORT int standin_stream_device(struct CUstream_st *stream);
STANDIN_EXPORT int standin_current_device(void);
/* The calling thread has chosen a device or pushed a context: what the driver's calls want. */
STANDIN_EXPORT bool standin_has_context(void);
/* The runtime's last error of this thread, as another library's failed call leaves it there. */
STANDIN_EXPORT void standin_leave_error(int code);
/* More memory of the device's own is allocated. */
STANDIN_EXPORT void standin_allocated(int device, uint64_t bytes);
/* Where the library can touch what a device calls `p`: n bytes; NULL: that device can't reach them. */
STANDIN_EXPORT void *standin_reach(int device, const void *p, size_t n_bytes);
/* Memory of a device out of a file that others may map: takes fd. Address in *ret. */
STANDIN_EXPORT int standin_map_memory(int device, int fd, size_t n_bytes, void **ret);
/* The same at given addresses in a reserved range and where the library touches it (what is there is replaced); what lies
 * one behind the other in both is touched as one. No device reaches it until it is given one. */
STANDIN_EXPORT int standin_map_at(int fd, size_t n_bytes, void *at, void *alias, const void *range);
/* What is mapped at p is memory of device `at`, and `device` may touch it. */
STANDIN_EXPORT void standin_give_memory(void *p, int at, int device);
STANDIN_EXPORT int standin_unmap_memory(void *p);
/* Of a device, over all processes that share counters. */
STANDIN_EXPORT void standin_memory(int device, size_t *ret_free, size_t *ret_total);
/* What an address of a device's memory belongs to. False: nothing. */
struct standin_allocation {
    void *base;
    size_t bytes;
    int device, fd;  /* fd stays the library's */
    uint64_t number; /* of this process; never repeats */
    bool own;        /* by cudaMalloc here; else mapped: another process's, or VMM */
    bool pool;       /* by cudaMallocAsync here: can't be exported */
};
STANDIN_EXPORT bool standin_find(const void *p, struct standin_allocation *ret);
/* The file behind an allocation that begins at p, or -1. */
STANDIN_EXPORT int standin_file_of(const void *p, size_t *ret_bytes);

#endif
