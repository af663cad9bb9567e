/* The CUDA device: what goes beyond device.h. In CUDA builds only (device_open says so in others).
 *
 * A stream is a thread that hands its items to a CUDA stream in order and does not wait for them;
 * only device_call waits, since its function is to find the work before it done. So enqueueing never blocks on the driver's
 * own limits, and waiting for an event of another stream begins when that record was handed over.
 * The fence is looked at when copies are handed over. What CUDA has by then runs whatever the fence or
 * the device's error say: device_call and events wait for it in any case.
 * Copies go to the copy engine where they are one run or large rows, else to kernels
 * (kernels_cuda.h). Fingerprints are summed on the GPU and added to the caller's number by a host
 * function. Memory: device_alloc is the GPU's and can't be touched by the CPU; device_map makes a
 * host segment reachable for both (pinned). */
#ifndef RS_DEVICE_DEVICE_CUDA_H
#define RS_DEVICE_DEVICE_CUDA_H

#include <stdint.h>

#include "device/device.h"

struct CUstream_st; /* a cudaStream_t points to it */

enum { DEVICE_CUDA_IPC_BYTES = DEVICE_IPC_BYTES, DEVICE_CUDA_NAME_BYTES = 48 };

/* RS_ENOTFOUND names the GPUs there are. RS_EPRECOND: CUDA can't run here; says what is missing. */
int device_cuda_open(uint32_t local, const struct device_cuda_options *options, struct device **ret,
                     struct err *e);
/* How many GPUs; RS_EPRECOND as above. */
int device_cuda_count(uint32_t *ret, struct err *e);
/* Each name means a GPU that is there (RS_ENOTFOUND), and none two of them (RS_EINVAL). */
int device_cuda_names_check(const char *const *names, uint32_t n, struct err *e);
/* Of the CUDA runtime, as 13000; 0: it does not say. */
int device_cuda_version(void);
/* "GPU-…" */
const char *device_cuda_uuid(const struct device *d);
int device_cuda_ordinal(const struct device *d);
bool device_is_cuda(const struct device *d);
/* The NUMA node that its host memory is asked for from (segments, and what streams pin); -1: there is one
 * node only, or it is not known. */
int device_cuda_numa_node(const struct device *d);
/* What opening it took of the GPU: the context, by what NVML and CUDA said was free before and after,
 * so with what others took or gave meanwhile. 0: not known. */
uint64_t device_cuda_context_bytes(const struct device *d);
/* Of the whole GPU, now; false: it does not say. */
bool device_cuda_memory(const struct device *d, uint64_t *ret_free_bytes,
                        uint64_t *ret_total_bytes);
/* Before the process's first call of CUDA, while it has no other thread: streams get hardware queues of their own, as far as there
 * are (CUDA_DEVICE_MAX_CONNECTIONS, unless an operator has set it). In a queue that two share, a copy waits behind whatever
 * waits for a receive of NCCL. RS_ENOMEM. */
int device_cuda_environment(struct err *e);
/* Each may reach the other's memory from here on, where the machine can: of memory that CUDA or IPC handles made. Not for all
 * GPUs there are: a GPU whose memory may be reached gets a context of this process. RS_EDEVICE. */
int device_cuda_connect(struct device *a, struct device *b, struct err *e);
/* True where kernels of `d` may write memory of `peer`, once they are connected. */
bool device_cuda_reaches(const struct device *d, const struct device *peer);

/* Calls fn(arg, stream) on the stream's thread when it is this item's turn to be handed over: work
 * before it may still run. fn enqueues on `stream`; where the device has failed before, stream is
 * NULL. Then `after`, where not NULL, is recorded, as by device_event_record. Errors as device_call.
 */
int device_cuda_issue(struct device_stream *s, void (*fn)(void *arg, struct CUstream_st *stream),
                      void *arg, struct device_event *after);
/* Makes it the calling thread's current device, for calls of NCCL. RS_EDEVICE. */
int device_cuda_use(const struct device *d, struct err *e);
/* The device fails with this text, as after an asynchronous error; the first one stays. */
void device_cuda_fail(struct device *d, const char *text);

/* --- memory of workers -------------------------------------------------------------------------- */

/* What device_import and device_import_close do, with errors.
 *
 * A worker's allocation by its IPC handle. Opened once per (handle, generation) and counted, so that
 * tensors of one allocation share it; another generation is memory that came later, whatever its
 * handle looks like. RS_EINVAL: the exporter is gone, is this process, or the memory is of a kind that
 * has no such handle, has fewer than `bytes`, or is on another device. (device_import is told who the exporter is, and takes
 * what this process has exported where it lies, if the handle is of what lies there now: CASES C16.) */
int device_cuda_import_ipc(struct device *d, const uint8_t *handle, uint64_t generation,
                           size_t bytes, void **ret, struct err *e);
/* The exporter may free its memory once this has returned: the last one closes. RS_ENOTFOUND: not
 * open. The caller has made sure that nothing is in flight. */
int device_cuda_close_ipc(struct device *d, void *p, struct err *e);
/* A CUDA VMM allocation by its descriptor (taken on success): torch's expandable segments, memory
 * that sleeps. `bytes` is the whole allocation's. */
int device_cuda_import_vmm(struct device *d, int fd, size_t bytes, void **ret, struct err *e);
/* Several of them (their descriptors are taken on success, all together), one behind the other in one range: a tensor over some of torch's
 * expandable segments. RS_EINVAL too: they are not `bytes` together. */
int device_cuda_import_vmm_parts(struct device *d, const struct device_import_part *parts,
                                 uint32_t n, size_t bytes, void **ret, struct err *e);
/* Either. */
int device_cuda_close_vmm(struct device *d, void *p, size_t bytes, struct err *e);

#endif
