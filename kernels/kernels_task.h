/* A copy or fingerprint as a GPU kernel works on it: prepared on the host, plain data.
 *
 * kernel_tasks_of_copy cuts a kernel_copy into tasks: dims sorted and merged, an access width that
 * every address of every view allows, divisors made ready, few enough units for 32-bit indices. A
 * batch of tasks is one launch, handed over by value as the kernel's parameter: nothing is
 * allocated, and it may be changed as soon as the launch returns. kernels_body.h has what one
 * thread does; kernels_gpu.cu runs it on a GPU, kernel_batch_run_host (kernels_task.c) with the very same index
 * arithmetic over all blocks and threads on the CPU: that is how tests prove it without a GPU.
 * Thread: any. */
#ifndef RS_KERNELS_KERNELS_TASK_H
#define RS_KERNELS_KERNELS_TASK_H

#include <stdint.h>

#include "kernels/kernels.h"

/* Of a block: threads. Of a thread: units of a copy's tile, loads in flight; rows of a unit where a
 * fingerprint is taken, one set of weights serves them all. */
enum { KERNEL_TASK_TARGETS = 4, KERNEL_THREADS = 256, KERNEL_COPY_UNITS = 4, KERNEL_SUM_ROWS = 4 };

/* What one unit is: bytes read and written by one thread at once. */
enum kernel_unit {
    KERNEL_UNIT_1,
    KERNEL_UNIT_2,
    KERNEL_UNIT_4,
    KERNEL_UNIT_8,
    KERNEL_UNIT_16,
    KERNEL_UNIT_BFLOAT16, /* 4 float32 become 4 bfloat16: 16 bytes read, 8 written */
    KERNEL_UNIT_FLOAT16,
    KERNEL_UNIT_E4M3,    /* 8 bfloat16: 16 bytes read, 8 written */
    KERNEL_UNIT_ELEMENT, /* one element of any dtype at any address */
    KERNEL_N_UNITS
};

/* Division of numbers below 2^31 by a constant: one multiplication. */
struct kernel_divisor {
    uint32_t by, multiplier, shift;
};
struct kernel_divisor kernel_divisor_of(uint32_t by); /* 1 … 2^31 - 1; 0 is taken for 1 */

/* Rows are counted over the outer dims, the last of them fastest; a row has n_units units, `step`
 * bytes apart. */
struct kernel_task {
    char *from;
    char *to[KERNEL_TASK_TARGETS];
    uint64_t *sum;       /* of the device: added to (atomically). NULL: a plain copy */
    uint64_t first_byte; /* sums: place of the box's first element in its row, in written bytes */
    int64_t from_step, to_step[KERNEL_TASK_TARGETS];
    int64_t from_stride[KERNEL_MAX_DIMS], to_stride[KERNEL_TASK_TARGETS][KERNEL_MAX_DIMS];
    uint64_t offset[KERNEL_MAX_DIMS]; /* sums: of the outer dims */
    struct kernel_divisor outer[KERNEL_MAX_DIMS];
    struct kernel_divisor units;  /* of a row */
    struct kernel_divisor groups; /* sums: groups of KERNEL_SUM_ROWS rows in the last outer dim */
    uint32_t n_units;             /* in all; sums: with KERNEL_SUM_ROWS rows each */
    uint32_t first_tile, n_tiles; /* set by kernel_batch_add */
    uint8_t n_outer, n_targets, unit, from_dtype, to_dtype;
};

/* Two sizes of one launch: the small one fits the 4 KiB of parameters of old drivers. */
enum { KERNEL_BATCH_TASKS = 52, KERNEL_SMALL_BATCH_TASKS = 6 };

struct kernel_batch {
    uint32_t n_tasks, n_tiles;
    struct kernel_task tasks[KERNEL_BATCH_TASKS];
};

struct kernel_small_batch {
    uint32_t n_tasks, n_tiles;
    struct kernel_task tasks[KERNEL_SMALL_BATCH_TASKS];
};

/* Calls emit for each task; `sum` is where its fingerprint is to be added (device memory; NULL
 * where c->fingerprint is NULL: c->fingerprint itself is not used otherwise). Stops at a non-zero
 * return and gives it. Views of KERNEL_TASK_TARGETS targets go into one task. */
int kernel_tasks_of_copy(const struct kernel_copy *c, uint64_t *sum,
                         int (*emit)(const struct kernel_task *task, void *arg), void *arg);
int kernel_tasks_of_fingerprint(const struct kernel_fingerprint *f, uint64_t *sum,
                                int (*emit)(const struct kernel_task *task, void *arg), void *arg);

/* A batch holds tasks of one sort: plain copies, or those with a sum. The caller looks at n_tasks
 * before; a full batch is a bug. */
void kernel_batch_add(struct kernel_batch *b, const struct kernel_task *task);
/* What the kernels of kernels_gpu.cu compute, with the same arithmetic, block by block and thread by
 * thread. */
void kernel_batch_run_host(const struct kernel_batch *b, uint32_t n_blocks);

#endif
