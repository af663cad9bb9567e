/* Bandwidth of the GPU kernels, each as a share of a device copy measured in the same run. No
 * libraries but CUDA: `bench_gpu [--json FILE]`. On the stand-in it runs small and prints no figure:
 * there is none to have. */
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "kernels/kernels_cuda.h"
#include "kernels/kernels_dtype.h"

enum { ROUNDS = 7, MAX_ROWS = 32 };

static void must(cudaError_t code, const char *what)
{
    if (code == cudaSuccess)
        return;
    (void)fprintf(stderr, "bench_gpu: %s: %s\n", what, cudaGetErrorString(code));
    exit(1);
}

struct bench {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    char *from, *to;
    uint64_t *sum;
    uint64_t bytes; /* of each buffer */
    uint32_t max_blocks, processors;
    bool figures;
    double copy_gbytes_per_s;
    struct {
        char name[64];
        double gbytes_per_s, share;
    } rows[MAX_ROWS];
    unsigned n_rows;
};

struct work {
    int (*run)(struct bench *b, const void *arg);
    const void *arg;
    uint64_t traffic_bytes; /* read and written */
};

/* The median of ROUNDS, in seconds. */
static double measure(struct bench *b, const struct work *w)
{
    float ms[ROUNDS];
    must((cudaError_t)w->run(b, w->arg), "warming up");
    for (int i = 0; i < ROUNDS; i++) {
        must(cudaEventRecord(b->begin, b->stream), "recording");
        must((cudaError_t)w->run(b, w->arg), "launching");
        must(cudaEventRecord(b->end, b->stream), "recording");
        must(cudaEventSynchronize(b->end), "waiting");
        must(cudaEventElapsedTime(&ms[i], b->begin, b->end), "timing");
        for (int k = i; k > 0 && ms[k - 1] > ms[k]; k--) {
            float t = ms[k];
            ms[k] = ms[k - 1];
            ms[k - 1] = t;
        }
    }
    return (double)ms[ROUNDS / 2] / 1e3;
}

static void row(struct bench *b, const char *name, struct work w)
{
    double seconds = measure(b, &w);
    double rate = seconds > 0 ? (double)w.traffic_bytes / seconds / 1e9 : 0;
    if (b->copy_gbytes_per_s == 0)
        b->copy_gbytes_per_s = rate;
    (void)snprintf(b->rows[b->n_rows].name, sizeof b->rows[0].name, "%s", name);
    b->rows[b->n_rows].gbytes_per_s = rate;
    b->rows[b->n_rows].share = rate / b->copy_gbytes_per_s;
    if (b->figures)
        (void)printf("%-44s %9.1f GB/s %6.3f of a device copy\n", name, rate,
                     b->rows[b->n_rows].share);
    else
        (void)printf("%-44s ran (stand-in: no figure)\n", name);
    b->n_rows++;
}

static int run_copy(struct bench *b, const void *arg)
{
    (void)arg;
    return (int)cudaMemcpyAsync(b->to, b->from, b->bytes, cudaMemcpyDeviceToDevice, b->stream);
}

static int add_task(const struct kernel_task *t, void *arg)
{
    kernel_batch_add(arg, t);
    return 0;
}

/* One launch of each sort. */
static int run_kernel(struct bench *b, const void *arg)
{
    static struct kernel_batch batch;
    batch.n_tasks = batch.n_tiles = 0;
    (void)kernel_tasks_of_copy(arg, b->sum, add_task, &batch);
    return kernel_launch_batch(b->stream, &batch, b->max_blocks);
}

/* n_rows runs of `run` elements out of rows of `pitch`, packed; or back. */
static struct kernel_copy boxes(const struct bench *b, uint64_t run, uint64_t pitch, uint8_t from,
                                uint8_t to, bool unpack)
{
    uint32_t in = kernel_dtype_bytes(from), out = kernel_dtype_bytes(to);
    uint64_t n_rows = b->bytes / (pitch * in);
    struct kernel_copy c = {.size = {n_rows, run},
                            .from = {b->from, {(int64_t)(pitch * in), in}},
                            .to = {{b->to, {(int64_t)(run * out), out}}},
                            .n_targets = 1,
                            .n_dims = 2,
                            .from_dtype = from,
                            .to_dtype = to};
    if (unpack) {
        c.from.stride_bytes[0] = (int64_t)(run * in);
        c.to[0].stride_bytes[0] = (int64_t)(pitch * out);
    }
    return c;
}

static void copy_row(struct bench *b, const char *name, struct kernel_copy c, bool sum)
{
    uint64_t n = c.size[0] * c.size[1];
    uint64_t written = c.n_targets * kernel_dtype_bytes(c.to_dtype);
    c.fingerprint = sum ? b->sum : NULL;
    row(b, name, (struct work){run_kernel, &c, n * (kernel_dtype_bytes(c.from_dtype) + written)});
}

static int run_quantise(struct bench *b, const void *arg)
{
    return kernel_launch_quantise(b->stream, arg, b->max_blocks);
}

/* As the data plane casts an expert's weights: 128 × 128 blocks, their scales, the fingerprint; or
 * one scale for all, found before. */
static void quantise_row(struct bench *b, const char *name, uint8_t from, uint8_t step)
{
    static struct kernel_quantise_batch batch;
    enum { COLUMNS = 7168, ROWS = 2048, MATRICES = KERNEL_QUANTISE_BATCH_TASKS };
    uint64_t in = kernel_dtype_bytes(from), one = b->bytes / (COLUMNS * in) / MATRICES;
    uint64_t rows = one < ROWS ? one : ROWS;
    bool blocks = step == KERNEL_QUANTISE_BLOCKS;
    batch.n_tasks = batch.n_blocks = 0;
    for (uint64_t i = 0; i < MATRICES && rows > 0; i++) {
        uint8_t *scales = (uint8_t *)b->to + b->bytes / 2 + i * 4096 * 4;
        struct kernel_quantise q = {.from = b->from + i * rows * COLUMNS * in,
                                    .from_stride = (int64_t)(COLUMNS * in),
                                    .rows = rows,
                                    .columns = COLUMNS,
                                    .block_rows = 128,
                                    .block_columns = 128,
                                    .scales = blocks ? (uint32_t *)(void *)scales : NULL,
                                    .amax_bits = blocks ? NULL : (uint32_t *)(void *)b->sum,
                                    .window_rows = rows,
                                    .window_columns = COLUMNS,
                                    .to = {{(uint8_t *)b->to + i * rows * COLUMNS, COLUMNS}},
                                    .fingerprint = step == KERNEL_QUANTISE_AMAX ? NULL : b->sum,
                                    .n_targets = step == KERNEL_QUANTISE_AMAX ? 0 : 1,
                                    .from_dtype = from,
                                    .step = step};
        struct kernel_quantise_task t = kernel_quantise_task_of(&q, b->sum);
        kernel_quantise_batch_add(&batch, &t);
    }
    if (rows > 0)
        row(b, name,
            (struct work){run_quantise, &batch,
                          MATRICES * rows * COLUMNS *
                              (step == KERNEL_QUANTISE_AMAX ? in : in + 1)});
}

static void all_rows(struct bench *b)
{
    static const uint64_t runs[] = {192, 256, 1024, 4096};
    enum { BF16 = KERNEL_BFLOAT16, F32 = KERNEL_FLOAT32 };
    char name[64];
    row(b, "device copy (cudaMemcpyAsync)", (struct work){run_copy, NULL, 2 * b->bytes});
    copy_row(b, "copy by kernel, contiguous", boxes(b, 4096, 4096, BF16, BF16, false), false);
    for (unsigned i = 0; i < sizeof runs / sizeof *runs; i++) {
        (void)snprintf(name, sizeof name, "pack, runs of %d bytes", (int)(2 * runs[i]));
        copy_row(b, name, boxes(b, runs[i], 2 * runs[i], BF16, BF16, false), false);
        (void)snprintf(name, sizeof name, "unpack, runs of %d bytes", (int)(2 * runs[i]));
        copy_row(b, name, boxes(b, runs[i], 2 * runs[i], BF16, BF16, true), false);
        (void)snprintf(name, sizeof name, "pack and fingerprint, runs of %d bytes",
                       (int)(2 * runs[i]));
        copy_row(b, name, boxes(b, runs[i], 2 * runs[i], BF16, BF16, false), true);
    }
    for (uint32_t n = 1; n <= 16; n *= 2) { /* how many blocks it takes */
        (void)snprintf(name, sizeof name, "pack, runs of 384 bytes, %u blocks per SM", n);
        b->max_blocks = n * b->processors;
        copy_row(b, name, boxes(b, 192, 384, BF16, BF16, false), false);
    }
    b->max_blocks = DEVICE_CUDA_BLOCKS * b->processors;
    struct kernel_copy read = boxes(b, 4096, 4096, BF16, BF16, false);
    read.n_targets = 0;
    copy_row(b, "fingerprint, rows of 8192 bytes", read, true);
    read = boxes(b, 192, 192, BF16, BF16, false);
    read.n_targets = 0;
    copy_row(b, "fingerprint, rows of 384 bytes", read, true);
    copy_row(b, "float32 to bfloat16", boxes(b, 4096, 4096, F32, BF16, false), false);
    copy_row(b, "float32 to bfloat16, packed and summed", boxes(b, 1024, 2048, F32, BF16, false),
             true);
    copy_row(b, "bfloat16 to float8", boxes(b, 4096, 4096, BF16, KERNEL_FLOAT8_E4M3FN, false),
             false);
    quantise_row(b, "bfloat16 to float8, 128x128 scales, summed", BF16, KERNEL_QUANTISE_BLOCKS);
    quantise_row(b, "float32 to float8, 128x128 scales, summed", F32, KERNEL_QUANTISE_BLOCKS);
    quantise_row(b, "bfloat16, greatest magnitude", BF16, KERNEL_QUANTISE_AMAX);
    quantise_row(b, "bfloat16 to float8, one scale, summed", BF16, KERNEL_QUANTISE_BY_AMAX);
}

static void write_json(const struct bench *b, const char *path, const char *card)
{
    FILE *f = fopen(path, "w");
    if (f == NULL)
        return;
    (void)fprintf(f, "{\"card\": \"%s\", \"standin\": %s, \"rows\": [", card,
                  b->figures ? "false" : "true");
    for (unsigned i = 0; i < b->n_rows && b->figures; i++)
        (void)fprintf(f, "%s\n {\"name\": \"%s\", \"gbytes_per_s\": %.1f, \"share\": %.4f}",
                      i == 0 ? "" : ",", b->rows[i].name, b->rows[i].gbytes_per_s,
                      b->rows[i].share);
    (void)fprintf(f, "]}\n");
    (void)fclose(f);
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    struct cudaDeviceProp p;
    must(cudaSetDevice(0), "choosing the GPU");
    must(cudaGetDeviceProperties(&p, 0), "asking for it");
    b.figures = strncmp(p.name, "stand-in", 8) != 0;
    b.bytes = b.figures ? (uint64_t)1 << 30 : (uint64_t)1 << 21;
    b.processors = (uint32_t)p.multiProcessorCount;
    b.max_blocks = DEVICE_CUDA_BLOCKS * b.processors; /* what the data plane launches */
    must(cudaStreamCreateWithPriority(&b.stream, cudaStreamNonBlocking, 0), "a stream");
    must(cudaEventCreateWithFlags(&b.begin, 0), "an event");
    must(cudaEventCreateWithFlags(&b.end, 0), "an event");
    /* Unpacking writes rows of twice the pitch. */
    must(cudaMalloc((void **)&b.from, b.bytes), "memory");
    must(cudaMalloc((void **)&b.to, b.bytes), "memory");
    must(cudaMalloc((void **)&b.sum, sizeof *b.sum), "memory");
    must(cudaMemsetAsync(b.from, 0x3C, b.bytes, b.stream), "filling");
    must(cudaMemsetAsync(b.sum, 0, sizeof *b.sum, b.stream), "filling");
    (void)printf("%s, %llu MiB per buffer, at most %u blocks\n", p.name,
                 (unsigned long long)(b.bytes >> 20), b.max_blocks);
    all_rows(&b);
    must(cudaStreamSynchronize(b.stream), "waiting");
    if (argc == 3 && strcmp(argv[1], "--json") == 0)
        write_json(&b, argv[2], p.name);
    return 0;
}
