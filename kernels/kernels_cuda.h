/* Launchers of the GPU kernels: kernels_gpu.cu, in CUDA builds only.
 *
 * Stream first; nothing is allocated and nothing waits. A batch is copied by the launch. They return
 * a cudaError_t as a number: 0, or what the launch said. Addresses are the device's (or a peer's
 * that it may reach, or pinned memory of the host); `max_blocks` caps the blocks of the grid, so that
 * an engine that computes on the same GPU keeps most of it (0: no cap). Thread: any whose current device is the
 * stream's. */
#ifndef RS_KERNELS_KERNELS_CUDA_H
#define RS_KERNELS_KERNELS_CUDA_H

#include <stdint.h>

#include "kernels/kernels_quantise.h"
#include "kernels/kernels_task.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* a cudaStream_t points to it */

/* Loads every kernel on the current device, once for each, before anything runs there: CUDA loads a kernel at its first
 * launch otherwise, and may wait for all else that runs on the device to do so. A receive of NCCL that waits for a peer
 * which waits for what that launch packs would wait for ever. */
int kernel_load_all(void);
int kernel_launch_batch(struct CUstream_st *stream, const struct kernel_batch *b,
                        uint32_t max_blocks);
int kernel_launch_quantise(struct CUstream_st *stream, const struct kernel_quantise_batch *b,
                           uint32_t max_blocks);

#ifdef __cplusplus
}
#endif

#endif
