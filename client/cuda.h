/* What libreshard asks of the CUDA driver, loaded at run time: the library links no CUDA.
 *
 * Thread: any. The calls see this process's primary contexts, which every CUDA runtime in it shares. */
#ifndef RS_CLIENT_CUDA_H
#define RS_CLIENT_CUDA_H

#include <stdint.h>

#include "base/err.h"
#include "memory/memory_socket.h"

/* Memory of a GPU as it is handed over. */
struct segment_export {
    uint32_t kind; /* MEMORY_SEGMENT_CUDA_IPC, _VMM or _VMM_PARTS */
    struct memory_device device;
    int *fds; /* n_fds, as memory_socket.h has them for the kind; mem_alloc'd, NULL: none */
    uint32_t n_fds;
    void *data;  /* the pointer */
    int ordinal; /* of the GPU in this process */
};
void segment_export_close(struct segment_export *x); /* the descriptors; again is fine */

/* RS_EPRECOND: no driver, or none that is new enough. RS_EINVAL: no GPU memory, or of a kind that can't
 * be exported, or the range leaves its allocation; VMM memory may go on over several that are mapped one behind the
 * other (torch's expandable segments), and leaves what is mapped there or has more than MEMORY_MAX_PARTS. */
int cuda_export(const void *device_pointer, uint64_t bytes, struct segment_export *ret,
                struct err *e);
enum { CUDA_HANDLE_BYTES = MEMORY_DEVICE_HANDLE_BYTES };
/* The handle of an event (cudaEvent_t), by which another process can wait for it. RS_EINVAL: it was not made
 * with cudaEventInterprocess | cudaEventDisableTiming. */
int cuda_event_export(void *event, uint8_t ret[CUDA_HANDLE_BYTES], struct err *e);
/* Waits for all that this process has enqueued on the GPU. RS_EDEVICE. */
int cuda_synchronise(int ordinal, struct err *e);

#endif
