/* The stand-in's CUDA runtime: kernels, run by what a host device runs (kernels_task.h), on memory that their device reaches. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels_body.h"
#include "kernels/kernels_quantise.h"
#include "kernels/kernels_task.h"
#include "test/standin/cudart_inner.h"

enum { MAX_KERNELS = 32 };

/* The bytes that a view of a task touches, as offsets from its base. */
struct extent {
    int64_t low, high;
};

static void widen(struct extent *x, int64_t stride, uint64_t count)
{
    int64_t far = count == 0 ? 0 : stride * (int64_t)(count - 1);
    *(far < 0 ? &x->low : &x->high) += far;
}

/* Where the library touches what the device calls p, over the extent; NULL: an illegal address. */
static char *moved(int device, char *p, struct extent x)
{
    char *at = standin_reach(device, p + x.low, (size_t)(x.high - x.low));
    return at == NULL ? NULL : at - x.low;
}

static struct extent extent_of(const struct kernel_task *t, int64_t step, const int64_t *stride,
                               uint32_t bytes)
{
    struct extent x = {0, bytes};
    widen(&x, step, t->units.by);
    for (unsigned d = 0; d < t->n_outer; d++)
        widen(&x, stride[d], t->outer[d].by);
    return x;
}

static char *moved_view(int device, char *base, const struct kernel_task *t, int64_t step,
                        const int64_t *stride, uint32_t bytes)
{
    return moved(device, base, extent_of(t, step, stride, bytes));
}

static bool move_task(int device, struct kernel_task *t)
{
    bool element = t->unit == KERNEL_UNIT_ELEMENT;
    uint32_t reads = element ? kernel_dtype_size(t->from_dtype) : kernel_unit_reads(t->unit);
    uint32_t writes = element ? kernel_dtype_size(t->to_dtype) : kernel_unit_writes(t->unit);
    bool aligned = element || (uintptr_t)t->from % reads == 0;
    char *from = moved_view(device, t->from, t, t->from_step, t->from_stride, reads);
    t->from = from;
    if (from == NULL || !aligned)
        return false;
    for (unsigned k = 0; k < t->n_targets; k++) {
        if (!element && (uintptr_t)t->to[k] % writes != 0)
            return false;
        t->to[k] = moved_view(device, t->to[k], t, t->to_step[k], t->to_stride[k], writes);
        if (t->to[k] == NULL)
            return false;
    }
    if (t->sum == NULL)
        return true;
    t->sum = (uint64_t *)(void *)moved(device, (char *)t->sum, (struct extent){0, 8});
    return t->sum != NULL;
}

struct launch {
    uint32_t n_blocks;
    int device;
    union {
        struct kernel_batch batch;
        struct kernel_quantise_batch quantise;
    };
};

/* A cast that rounds wrong: its first element has another sign, as written and as summed. Runs on a copy of what it reads,
 * since others read that too; the caller frees it. NULL: no memory. */
static char *cast_wrong(struct kernel_task *t)
{
    uint32_t bytes = kernel_dtype_size(t->from_dtype);
    struct extent x =
        extent_of(t, t->from_step, t->from_stride,
                  t->unit == KERNEL_UNIT_ELEMENT ? bytes : kernel_unit_reads(t->unit));
    char *copy = malloc((size_t)(x.high - x.low));
    if (copy == NULL)
        return NULL;
    memcpy(copy, t->from + x.low, (size_t)(x.high - x.low));
    t->from = copy - x.low;
    t->from[bytes - 1] ^= (char)0x80;
    return copy;
}

/* Where tests have it so, a task of the batch goes wrong; what is to be freed after it has run. */
static char *harm(struct kernel_batch *b)
{
    char *copy = NULL;
    for (uint32_t i = 0; i < b->n_tasks && getenv("RESHARD_DAMAGE") != NULL; i++) {
        struct kernel_task *t = &b->tasks[i];
        if (t->n_targets == 0)
            continue;
        if (t->from_dtype != t->to_dtype && standin_damage("wrong-cast") && copy == NULL)
            copy = cast_wrong(t);
        if (rt_is_shared(t->from) && rt_is_shared(t->to[0]) && standin_damage("lost-copy"))
            t->n_targets = 0;
    }
    return copy;
}

static int run_batch(void *arg)
{
    struct launch *l = arg;
    for (uint32_t i = 0; i < l->batch.n_tasks; i++)
        if (!move_task(l->device, &l->batch.tasks[i]))
            return cudaErrorIllegalAddress;
    char *copy = harm(&l->batch);
    kernel_batch_run_host(&l->batch, l->n_blocks);
    free(copy);
    __atomic_fetch_add(&standin_count(l->device)->launches, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&standin_count(l->device)->tasks, l->batch.n_tasks, __ATOMIC_RELAXED);
    return 0;
}

static bool move_pointer(int device, void **p, size_t bytes)
{
    if (*p == NULL)
        return true;
    *p = standin_reach(device, *p, bytes);
    return *p != NULL;
}

/* A matrix of the device's: rows of so many bytes. Empty ones are left where they are. */
static bool move_rows(int device, char **p, int64_t stride, uint64_t rows, uint64_t row_bytes)
{
    struct extent x = {0, (int64_t)row_bytes};
    if (rows == 0 || row_bytes == 0)
        return true;
    widen(&x, stride, rows);
    *p = moved(device, *p, x);
    return *p != NULL;
}

static bool move_quantise(int device, struct kernel_quantise_task *t)
{
    uint32_t bytes = t->from_dtype == KERNEL_BFLOAT16 ? 2 : 4;
    void *scales = t->scales, *amax = t->amax_bits, *sum = t->sum;
    char *from = (char *)(uintptr_t)t->from;
    bool one = t->step != KERNEL_QUANTISE_BLOCKS;
    bool good = (uintptr_t)from % bytes == 0 && t->from_stride % bytes == 0 &&
                move_rows(device, &from, t->from_stride, t->rows, (uint64_t)t->columns * bytes) &&
                move_pointer(device, &scales, one ? 4 : 4 * (size_t)t->n_blocks) &&
                move_pointer(device, &amax, 4) && move_pointer(device, &sum, 8);
    for (unsigned i = 0; i < t->n_targets && good; i++)
        good = move_rows(device, &t->to[i], t->to_stride[i], t->row_end - t->row,
                         t->column_end - t->column);
    t->from = from;
    t->scales = scales;
    t->amax_bits = amax;
    t->sum = sum;
    return good;
}

/* A matrix of which each element is -2 times what it was (where it has a double), as a float32 or the upper half of one; the
 * caller frees it. NULL: no memory. */
static char *scale_wrong(struct kernel_quantise_task *t)
{
    uint32_t bytes = t->from_dtype == KERNEL_BFLOAT16 ? 2 : 4;
    char *copy = malloc((size_t)t->rows * t->columns * bytes + 1);
    for (uint32_t i = 0; copy != NULL && i < t->rows; i++)
        for (uint32_t k = 0; k < t->columns; k++) {
            uint32_t bits = 0;
            char *upper = (char *)&bits + 4 - bytes;
            memcpy(upper, t->from + (int64_t)i * t->from_stride + (size_t)k * bytes, bytes);
            uint32_t exponent = bits >> 23 & 0xFF;
            bits = (bits ^ 1U << 31) + (exponent > 0 && exponent < 0xFE ? 1U << 23 : 0);
            memcpy(copy + ((size_t)i * t->columns + k) * bytes, upper, bytes);
        }
    if (copy != NULL) {
        t->from = copy;
        t->from_stride = (int64_t)t->columns * bytes;
    }
    return copy;
}

static int run_quantise(void *arg)
{
    struct launch *l = arg;
    char *wrong[KERNEL_QUANTISE_BATCH_TASKS] = {NULL};
    for (uint32_t i = 0; i < l->quantise.n_tasks; i++) {
        struct kernel_quantise_task *t = &l->quantise.tasks[i];
        if (!move_quantise(l->device, t))
            return cudaErrorIllegalAddress;
        if (standin_damage("wrong-scale"))
            wrong[i] = scale_wrong(t);
    }
    kernel_quantise_batch_run_host(&l->quantise, l->n_blocks);
    for (uint32_t i = 0; i < l->quantise.n_tasks; i++)
        free(wrong[i]);
    __atomic_fetch_add(&standin_count(l->device)->launches, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&standin_count(l->device)->tasks, l->quantise.n_tasks, __ATOMIC_RELAXED);
    return 0;
}

static const struct kernel {
    const char *name;
    size_t parameter_bytes;
    int (*run)(void *arg);
} known[] = {
    {"reshard_copy", sizeof(struct kernel_batch), run_batch},
    {"reshard_copy_small", sizeof(struct kernel_small_batch), run_batch},
    {"reshard_sum", sizeof(struct kernel_batch), run_batch},
    {"reshard_sum_small", sizeof(struct kernel_small_batch), run_batch},
    {"reshard_quantise", sizeof(struct kernel_quantise_batch), run_quantise},
};

/* By the address of the stub that nvcc makes. */
static struct {
    const void *stub;
    const struct kernel *kernel;
} registered[MAX_KERNELS];

STANDIN_EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    (void)binary;
    return &handle;
}

STANDIN_EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

STANDIN_EXPORT void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

STANDIN_EXPORT void __cudaRegisterFunction(void **handle, const char *stub, char *function,
                                           const char *name, int limit, void *tid, void *bid,
                                           void *block, void *grid, int *warp)
{
    (void)handle, (void)function, (void)limit, (void)tid, (void)bid, (void)block, (void)grid;
    (void)warp;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        for (int k = 0; strcmp(name, known[i].name) == 0 && k < MAX_KERNELS; k++)
            if (registered[k].stub == NULL) {
                registered[k].stub = stub;
                registered[k].kernel = &known[i];
                break;
            }
}

/* Kernels are loaded at their first launch on a device, or when their attributes are asked for. */
static atomic_bool loaded[STANDIN_MAX_DEVICES][MAX_KERNELS];

static int number_of(const void *stub)
{
    for (int i = 0; i < MAX_KERNELS; i++)
        if (registered[i].stub == stub && stub != NULL)
            return i;
    return -1;
}

STANDIN_EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret, const void *stub)
{
    ENTER("cudaFuncGetAttributes");
    int i = number_of(stub);
    if (i < 0)
        return rt_said(cudaErrorInvalidDeviceFunction);
    memset(ret, 0, sizeof *ret);
    atomic_store(&loaded[rt_device][i], true);
    return cudaSuccess;
}

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

STANDIN_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                                    cudaStream_t stream)
{
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

STANDIN_EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared,
                                                      void *stream)
{
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *ret, const void *stub)
{
    /* The compiler's stub has one place for all threads, which write the same there. */
    __atomic_store_n(ret, (cudaKernel_t)(uintptr_t)stub, __ATOMIC_RELAXED);
    return cudaSuccess;
}

STANDIN_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block,
                                              void **args, size_t shared, cudaStream_t stream)
{
    (void)shared;
    ENTER("cudaLaunchKernel");
    int number = number_of((const void *)handle);
    const struct kernel *k = number < 0 ? NULL : registered[number].kernel;
    if (k == NULL || stream == NULL || standin_stream_device(stream) != rt_device)
        return rt_said(k == NULL ? cudaErrorInvalidDeviceFunction : cudaErrorInvalidResourceHandle);
    if (block.x != KERNEL_THREADS || grid.x == 0)
        return rt_said(cudaErrorInvalidConfiguration);
    if (!atomic_exchange(&loaded[rt_device][number], true)) {
        __atomic_fetch_add(&standin_count(rt_device)->late_loads, 1, __ATOMIC_RELAXED);
        rt_drain_device(); /* loading may wait for all that runs there, and here it does */
    }
    struct launch *l = malloc(sizeof *l);
    if (l == NULL)
        return rt_said(cudaErrorMemoryAllocation);
    l->n_blocks = grid.x;
    standin_most(&standin_count(standin_stream_device(stream))->most_blocks, grid.x);
    l->device = standin_stream_device(stream);
    memcpy(&l->batch, args[0], k->parameter_bytes);
    return rt_said(rt_push(
        stream, (struct operation){.name = "kernel", .run = k->run, .arg = l, .own = true}));
}
