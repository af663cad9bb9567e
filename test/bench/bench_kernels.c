/* How fast the host twins are beside memcpy and beside the best copy that this CPU can do.
 *
 * Each row copies the left half of a matrix (source rows twice as far apart as they are long) to a
 * dense target, 128 MiB in all, for several row lengths; the figure is the best of a few rounds, in
 * which all kinds take turns. "stream" is a loop of non-temporal stores and nothing else.
 *
 *   bench_kernels [--json]    a table, or a list of {name, row_bytes, gbytes_per_s, …} */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/kernels.h"
#include "kernels/kernels_dtype.h"
#include "kernels/kernels_run.h"

enum { TOTAL_BYTES = 128 << 20, ROUNDS = 5 };

struct matrix {
    char *from;  /* 2 * TOTAL_BYTES */
    char *to[2]; /* TOTAL_BYTES each */
    uint64_t row_bytes, rows;
    const struct kernel_runs *runs;
};

static struct kernel_copy copy_of(const struct matrix *m, uint8_t dtype)
{
    uint32_t e = kernel_dtype_bytes(dtype);
    return (struct kernel_copy){
        .size = {m->rows, m->row_bytes / e},
        .from = {m->from, {2 * (int64_t)m->row_bytes, e}},
        .to = {{m->to[0], {(int64_t)m->row_bytes, e}}, {m->to[1], {(int64_t)m->row_bytes, e}}},
        .n_targets = 1,
        .n_dims = 2,
        .from_dtype = dtype,
        .to_dtype = dtype,
        .streaming = 1};
}

static uint64_t run_memcpy(const struct matrix *m)
{
    for (uint64_t i = 0; i < m->rows; i++)
        memcpy(m->to[0] + i * m->row_bytes, m->from + 2 * i * m->row_bytes, m->row_bytes);
    return (uint64_t)m->to[0][1];
}

static uint64_t run_stream(const struct matrix *m)
{
    for (uint64_t i = 0; i < m->rows; i++)
        m->runs->copy(m->to[0] + i * m->row_bytes, m->from + 2 * i * m->row_bytes, m->row_bytes,
                      true, NULL);
    m->runs->fence();
    return (uint64_t)m->to[0][1];
}

static uint64_t run_copy(const struct matrix *m)
{
    struct kernel_copy c = copy_of(m, KERNEL_BFLOAT16);
    kernel_copy_with(&c, m->runs);
    return (uint64_t)m->to[0][1];
}

static uint64_t run_copy_fingerprint(const struct matrix *m)
{
    uint64_t sum = 0;
    struct kernel_copy c = copy_of(m, KERNEL_BFLOAT16);
    c.fingerprint = &sum;
    kernel_copy_with(&c, m->runs);
    return sum;
}

static uint64_t run_two_targets(const struct matrix *m)
{
    struct kernel_copy c = copy_of(m, KERNEL_BFLOAT16);
    c.n_targets = 2;
    kernel_copy_with(&c, m->runs);
    return (uint64_t)m->to[1][1];
}

static uint64_t run_fingerprint(const struct matrix *m)
{
    uint64_t sum = 0;
    struct kernel_fingerprint f = {.size = {m->rows, m->row_bytes / 2},
                                   .from = {m->from, {2 * (int64_t)m->row_bytes, 2}},
                                   .fingerprint = &sum,
                                   .n_dims = 2,
                                   .dtype = KERNEL_BFLOAT16};
    kernel_fingerprint_with(&f, m->runs);
    return sum;
}

static uint64_t run_fingerprint_dense(const struct matrix *m)
{
    uint64_t sum = 0;
    struct kernel_fingerprint f = {.size = {m->rows, m->row_bytes / 2},
                                   .from = {m->from, {(int64_t)m->row_bytes, 2}},
                                   .fingerprint = &sum,
                                   .n_dims = 2,
                                   .dtype = KERNEL_BFLOAT16};
    kernel_fingerprint_with(&f, m->runs);
    return sum;
}

/* Half as many bytes are written as are read; the figure counts what is read. */
static uint64_t run_cast(const struct matrix *m)
{
    uint64_t sum = 0;
    struct kernel_copy c = copy_of(m, KERNEL_FLOAT32);
    c.to_dtype = KERNEL_BFLOAT16;
    c.to[0].stride_bytes[0] = (int64_t)m->row_bytes / 2;
    c.to[0].stride_bytes[1] = 2;
    c.fingerprint = &sum;
    kernel_copy_with(&c, m->runs);
    return sum;
}

static const struct kind {
    const char *name;
    uint64_t (*run)(const struct matrix *m);
} KINDS[] = {
    {"memcpy", run_memcpy},
    {"stream", run_stream},
    {"copy", run_copy},
    {"copy+fingerprint", run_copy_fingerprint},
    {"copy to two", run_two_targets},
    {"fingerprint", run_fingerprint},
    {"fingerprint dense", run_fingerprint_dense},
    {"float32 to bfloat16", run_cast},
};

enum { N_KINDS = sizeof KINDS / sizeof *KINDS };

/* Best rate of each kind in GB/s. */
static void measure(const struct matrix *m, double *ret_gbytes_per_s)
{
    static volatile uint64_t sink; /* keeps results alive */
    for (unsigned round = 0; round < ROUNDS; round++)
        for (unsigned k = 0; k < N_KINDS; k++) {
            uint64_t start = clock_mono_ns();
            sink += KINDS[k].run(m);
            double rate = (double)(m->rows * m->row_bytes) / (double)(clock_mono_ns() - start);
            if (rate > ret_gbytes_per_s[k])
                ret_gbytes_per_s[k] = rate;
        }
}

static void print_row(const char *isa, const struct matrix *m, const double *rate, bool json,
                      bool first)
{
    if (!json)
        printf("%-9s %8llu", isa, (unsigned long long)m->row_bytes);
    for (unsigned k = 0; k < N_KINDS; k++) {
        if (json)
            printf("%s{\"name\": \"%s\", \"isa\": \"%s\", \"row_bytes\": %llu, \"gbytes_per_s\": "
                   "%.3f, \"ratio_to_memcpy\": %.3f, \"ratio_to_stream\": %.3f}",
                   first && k == 0 ? "[\n" : ",\n", KINDS[k].name, isa,
                   (unsigned long long)m->row_bytes, rate[k], rate[0] / rate[k], rate[1] / rate[k]);
        else
            printf("  %6.2f (%4.2f)", rate[k], rate[1] / rate[k]);
    }
    if (!json)
        printf("\n");
}

static void print_head(void)
{
    printf("GB/s of rows read (in brackets: time / time of stream), best of %d\n%-9s %8s", ROUNDS,
           "", "row");
    for (unsigned k = 0; k < N_KINDS; k++)
        printf("  %13.13s", KINDS[k].name);
    printf("\n");
}

int main(int argc, char **argv)
{
    static const uint64_t lengths[] = {128, 384, 1024, 8192, 1 << 20};
    static const char *const isas[KERNEL_N_ISAS] = {"portable", "avx2", "avx512"};
    bool json = argc == 2 && strcmp(argv[1], "--json") == 0, first = true;
    if (argc > 1 && !json) {
        fprintf(stderr, "usage: bench_kernels [--json]\n");
        return 2;
    }
    struct matrix m = {.from = aligned_alloc(4096, 2 * (size_t)TOTAL_BYTES),
                       .to = {aligned_alloc(4096, TOTAL_BYTES), aligned_alloc(4096, TOTAL_BYTES)}};
    if (m.from == NULL || m.to[0] == NULL || m.to[1] == NULL)
        return 1;
    memset(m.from, 0x3F, 2 * (size_t)TOTAL_BYTES);
    memset(m.to[0], 1, TOTAL_BYTES);
    memset(m.to[1], 1, TOTAL_BYTES);
    if (!json)
        print_head();
    for (enum kernel_isa isa = 0; isa < KERNEL_N_ISAS; isa++)
        for (unsigned i = 0; kernel_runs(isa) != NULL && i < sizeof lengths / sizeof *lengths;
             i++) {
            double rate[N_KINDS] = {0};
            m.runs = kernel_runs(isa);
            m.row_bytes = lengths[i];
            m.rows = TOTAL_BYTES / m.row_bytes;
            measure(&m, rate);
            print_row(isas[isa], &m, rate, json, first);
            first = false;
        }
    if (json)
        printf("\n]\n");
    free(m.from);
    free(m.to[0]);
    free(m.to[1]);
    return 0;
}
