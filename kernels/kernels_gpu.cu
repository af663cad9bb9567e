/* The GPU kernels: blocks and threads around kernels_body.h, and their launchers. CUDA C written as C. */
#include <string.h>

#include "kernels/kernels_cuda.h"
#include "kernels/kernels_quantise_body.h"

enum { WARP = 32, WARPS = KERNEL_THREADS / WARP };

/* Sum over the block; valid in thread 0. All threads take part. */
static __device__ uint64_t block_sum(uint64_t x)
{
    __shared__ uint64_t parts[WARPS];
    for (int step = WARP / 2; step > 0; step /= 2)
        x += __shfl_down_sync(0xFFFFFFFF, (unsigned long long)x, step);
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0;
    if (threadIdx.x == 0)
        for (int i = 0; i < WARPS; i++)
            x += parts[i];
    __syncthreads(); /* parts may be written again */
    return x;
}

static __device__ void add_block(uint64_t *to, uint64_t x)
{
    x = block_sum(x);
    if (threadIdx.x == 0)
        atomicAdd((unsigned long long *)to, (unsigned long long)x);
}

/* Greatest over the block, in all threads. */
static __device__ uint32_t block_max(uint32_t x)
{
    __shared__ uint32_t parts[WARPS];
    for (int step = WARP / 2; step > 0; step /= 2) {
        uint32_t other = __shfl_xor_sync(0xFFFFFFFF, x, step);
        x = other > x ? other : x;
    }
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        x = parts[i] > x ? parts[i] : x;
    __syncthreads();
    return x;
}

static __device__ __forceinline__ void copy_block(const struct kernel_task *tasks, uint32_t n_tiles)
{
    uint32_t i = 0;
    for (uint32_t tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        i = kernel_task_of_tile(tasks, i, tile);
        kernel_copy_thread(&tasks[i], tile - tasks[i].first_tile, threadIdx.x);
    }
}

/* A block adds once per task that it has worked on. */
static __device__ __forceinline__ void sum_block(const struct kernel_task *tasks, uint32_t n_tiles)
{
    uint32_t i = 0;
    uint64_t sum = 0;
    for (uint32_t tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        uint32_t at = kernel_task_of_tile(tasks, i, tile);
        if (at != i) {
            add_block(tasks[i].sum, sum);
            sum = 0;
            i = at;
        }
        sum += kernel_sum_thread(&tasks[i], tile - tasks[i].first_tile, threadIdx.x);
    }
    add_block(tasks[i].sum, sum);
}

#define KERNEL extern "C" __global__ void __launch_bounds__(KERNEL_THREADS)

KERNEL reshard_copy(const __grid_constant__ struct kernel_batch b)
{
    copy_block(b.tasks, b.n_tiles);
}

KERNEL reshard_copy_small(const __grid_constant__ struct kernel_small_batch b)
{
    copy_block(b.tasks, b.n_tiles);
}

KERNEL reshard_sum(const __grid_constant__ struct kernel_batch b)
{
    sum_block(b.tasks, b.n_tiles);
}

KERNEL reshard_sum_small(const __grid_constant__ struct kernel_small_batch b)
{
    sum_block(b.tasks, b.n_tiles);
}

/* One block of elements. What it adds to the fingerprint is returned. All threads of the block take
 * part, and all take the same way. */
static __device__ __forceinline__ uint64_t quantise_block(const struct kernel_quantise_task *t,
                                                          uint32_t number, const uint32_t n_bytes)
{
    struct kernel_quantise_block b = kernel_quantise_block_of(t, number);
    struct kernel_quantise_pass pass;
    uint32_t n_units = kernel_quantise_units(t, &b), amax = 0;
    uint64_t sum = 0;
    if (t->step != KERNEL_QUANTISE_BY_AMAX) {
        for (uint32_t base = 0; base < n_units; base += kernel_quantise_pass_units(n_bytes)) {
            uint32_t here = kernel_quantise_read(t, &b, base + threadIdx.x, &pass, n_bytes);
            amax = here > amax ? here : amax;
        }
        amax = block_max(amax);
    }
    if (t->step == KERNEL_QUANTISE_AMAX) {
        if (threadIdx.x == 0)
            atomicMax(t->amax_bits, amax);
        return 0;
    }
    if (t->step == KERNEL_QUANTISE_BY_AMAX)
        amax = *t->amax_bits;
    uint32_t scale = kernel_scale_of(amax);
    if (threadIdx.x == 0 && t->scales != NULL && (t->step == KERNEL_QUANTISE_BLOCKS || number == 0))
        t->scales[number] = scale;
    if (kernel_quantise_outside(t, &b))
        return 0;
    bool held = t->step == KERNEL_QUANTISE_BLOCKS && n_units <= kernel_quantise_pass_units(n_bytes);
    for (uint32_t base = 0; base < n_units; base += kernel_quantise_pass_units(n_bytes)) {
        if (!held)
            (void)kernel_quantise_read(t, &b, base + threadIdx.x, &pass, n_bytes);
        sum += kernel_quantise_write(t, &b, base + threadIdx.x, &pass, kernel_float_of(scale),
                                     n_bytes);
    }
    return sum;
}

/* A block of threads adds once per task that it has worked on. Two blocks per multiprocessor: one
 * reads while the other one writes. */
extern "C" __global__ void __launch_bounds__(KERNEL_THREADS, 2)
    reshard_quantise(const __grid_constant__ struct kernel_quantise_batch b)
{
    uint32_t i = 0;
    uint64_t sum = 0;
    for (uint32_t block = blockIdx.x; block < b.n_blocks; block += gridDim.x) {
        uint32_t at = kernel_quantise_task_of_block(b.tasks, i, block);
        if (at != i && b.tasks[i].sum != NULL)
            add_block(b.tasks[i].sum, sum);
        sum = at == i ? sum : 0;
        i = at;
        const struct kernel_quantise_task *t = &b.tasks[i];
        uint32_t number = block - t->first_block;
        sum += t->from_dtype == KERNEL_BFLOAT16 ? quantise_block(t, number, 2)
                                                : quantise_block(t, number, 4);
    }
    if (b.tasks[i].sum != NULL)
        add_block(b.tasks[i].sum, sum);
}

static uint32_t grid_of(uint32_t n, uint32_t max_blocks)
{
    uint32_t most = max_blocks == 0 ? (1U << 30) : max_blocks;
    return n < most ? n : most;
}

extern "C" int kernel_launch_batch(cudaStream_t stream, const struct kernel_batch *b,
                                   uint32_t max_blocks)
{
    if (b->n_tiles == 0)
        return 0;
    (void)cudaGetLastError(); /* of an earlier call, NCCL's for instance: not this launch's */
    uint32_t n = grid_of(b->n_tiles, max_blocks);
    bool sums = b->tasks[0].sum != NULL;
    if (b->n_tasks <= KERNEL_SMALL_BATCH_TASKS) {
        struct kernel_small_batch small;
        small.n_tasks = b->n_tasks;
        small.n_tiles = b->n_tiles;
        memcpy(small.tasks, b->tasks, b->n_tasks * sizeof *b->tasks);
        if (sums)
            reshard_sum_small<<<n, KERNEL_THREADS, 0, stream>>>(small);
        else
            reshard_copy_small<<<n, KERNEL_THREADS, 0, stream>>>(small);
    } else if (sums) {
        reshard_sum<<<n, KERNEL_THREADS, 0, stream>>>(*b);
    } else {
        reshard_copy<<<n, KERNEL_THREADS, 0, stream>>>(*b);
    }
    return (int)cudaGetLastError();
}

extern "C" int kernel_launch_quantise(cudaStream_t stream, const struct kernel_quantise_batch *b,
                                      uint32_t max_blocks)
{
    if (b->n_blocks == 0)
        return 0;
    (void)cudaGetLastError();
    reshard_quantise<<<grid_of(b->n_blocks, max_blocks), KERNEL_THREADS, 0, stream>>>(*b);
    return (int)cudaGetLastError();
}

extern "C" int kernel_load_all(void)
{
    const void *const kernels[] = {(const void *)reshard_copy, (const void *)reshard_copy_small,
                                   (const void *)reshard_sum, (const void *)reshard_sum_small,
                                   (const void *)reshard_quantise};
    cudaError_t r = cudaSuccess;
    for (size_t i = 0; r == cudaSuccess && i < sizeof kernels / sizeof *kernels; i++) {
        struct cudaFuncAttributes attributes;
        r = cudaFuncGetAttributes(&attributes, kernels[i]);
    }
    return (int)r;
}
