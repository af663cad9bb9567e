/* Prepares tasks for a GPU, and runs them on the CPU as a GPU would. */
#include "kernels/kernels_task.h"

#include <stdbool.h>
#include <string.h>

#include "base/err.h"
#include "kernels/kernels_body.h"
#include "kernels/kernels_dtype.h"

#include "base/banned.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words go through registers as they lie");
_Static_assert(sizeof(struct kernel_batch) <= 32764, "the parameters of one launch");
_Static_assert(sizeof(struct kernel_small_batch) <= 4096, "the parameters of one launch");

enum { MAX_VIEWS = 1 + KERNEL_TASK_TARGETS };

/* So many elements at most are one task: all its numbers stay far below 2^31. */
#define MOST_ELEMENTS (UINT64_C(1) << 30)

struct kernel_divisor kernel_divisor_of(uint32_t by)
{
    struct kernel_divisor d = {.by = by};
    if (by <= 1)
        return (struct kernel_divisor){.by = 1};
    uint32_t bits = 32U - (uint32_t)__builtin_clz(by - 1); /* ceil(log2(by)) */
    d.multiplier = (uint32_t)(((UINT64_C(1) << (31 + bits)) + by - 1) / by);
    d.shift = bits - 1;
    return d;
}

/* --- a box on its way to a task ---------------------------------------------------------------- */

/* View 0 is read. */
struct shape {
    uint64_t size[KERNEL_MAX_DIMS];
    int64_t stride[MAX_VIEWS][KERNEL_MAX_DIMS];
    char *base[MAX_VIEWS];
    uint32_t bytes[MAX_VIEWS]; /* of an element */
    unsigned n_dims, n_views;
};

static void dims_move(struct shape *s, unsigned to, unsigned from)
{
    s->size[to] = s->size[from];
    for (unsigned v = 0; v < s->n_views; v++)
        s->stride[v][to] = s->stride[v][from];
}

static void dims_swap(struct shape *s, unsigned a, unsigned b)
{
    uint64_t size = s->size[a];
    s->size[a] = s->size[b];
    s->size[b] = size;
    for (unsigned v = 0; v < s->n_views; v++) {
        int64_t stride = s->stride[v][a];
        s->stride[v][a] = s->stride[v][b];
        s->stride[v][b] = stride;
    }
}

static bool mergeable(const struct shape *s, unsigned outer, unsigned inner)
{
    for (unsigned v = 0; v < s->n_views; v++)
        if (s->stride[v][outer] != s->stride[v][inner] * (int64_t)s->size[inner])
            return false;
    return true;
}

/* Without dims of one element, sorted by descending stride of what is written, and merged. */
static void simplify(struct shape *s)
{
    unsigned n = 0, last = s->n_views - 1;
    for (unsigned d = 0; d < s->n_dims; d++)
        if (s->size[d] != 1)
            dims_move(s, n++, d);
    s->n_dims = n;
    for (unsigned i = 1; i < n; i++)
        for (unsigned k = i; k > 0 && s->stride[last][k - 1] < s->stride[last][k]; k--)
            dims_swap(s, k - 1, k);
    n = 0;
    for (unsigned d = 0; d < s->n_dims; d++) {
        if (n > 0 && mergeable(s, n - 1, d)) {
            uint64_t size = s->size[n - 1] * s->size[d];
            dims_move(s, n - 1, d);
            s->size[n - 1] = size;
        } else {
            dims_move(s, n++, d);
        }
    }
    s->n_dims = n;
}

static bool dense(const struct shape *s)
{
    for (unsigned v = 0; v < s->n_views; v++)
        if (s->size[s->n_dims - 1] != 1 && s->stride[v][s->n_dims - 1] != s->bytes[v])
            return false;
    return true;
}

/* True where view v's rows all begin at multiples of `n_bytes`. */
static bool rows_aligned(const struct shape *s, unsigned v, uint32_t n_bytes)
{
    uint64_t bits = (uintptr_t)s->base[v];
    for (unsigned d = 0; d + 1 < s->n_dims; d++)
        bits |= (uint64_t)s->stride[v][d];
    return bits % n_bytes == 0;
}

/* True where rows can be taken `n` elements at a time. */
static bool fits(const struct shape *s, uint32_t n)
{
    if (s->size[s->n_dims - 1] % n != 0)
        return false;
    for (unsigned v = 0; v < s->n_views; v++)
        if (!rows_aligned(s, v, n * s->bytes[v]))
            return false;
    return true;
}

/* --- units ------------------------------------------------------------------------------------- */

static uint8_t cast_unit(uint8_t from, uint8_t to)
{
    rs_assert((from == KERNEL_FLOAT32 && (to == KERNEL_BFLOAT16 || to == KERNEL_FLOAT16)) ||
              (from == KERNEL_BFLOAT16 && to == KERNEL_FLOAT8_E4M3FN));
    return to == KERNEL_BFLOAT16  ? KERNEL_UNIT_BFLOAT16
           : to == KERNEL_FLOAT16 ? KERNEL_UNIT_FLOAT16
                                  : KERNEL_UNIT_E4M3;
}

/* Elements of one unit. */
static uint32_t unit_elements(uint8_t unit, uint32_t from_bytes)
{
    return unit == KERNEL_UNIT_ELEMENT ? 1 : kernel_unit_reads(unit) / from_bytes;
}

/* The widest that all rows allow; ELEMENT where none does. */
static uint8_t dense_unit(const struct shape *s, const struct kernel_task *t)
{
    if (!dense(s))
        return KERNEL_UNIT_ELEMENT;
    if (t->from_dtype != t->to_dtype) {
        uint8_t unit = cast_unit(t->from_dtype, t->to_dtype);
        return fits(s, unit_elements(unit, s->bytes[0])) ? unit : KERNEL_UNIT_ELEMENT;
    }
    for (uint8_t unit = KERNEL_UNIT_16; (1U << unit) >= s->bytes[0]; unit--) {
        if (fits(s, unit_elements(unit, s->bytes[0])))
            return unit;
        if (unit == KERNEL_UNIT_1)
            break;
    }
    return KERNEL_UNIT_ELEMENT;
}

/* A plain copy may take the bytes of its rows as they come. */
static void take_bytes(struct shape *s)
{
    s->size[s->n_dims - 1] *= s->bytes[0];
    for (unsigned v = 0; v < s->n_views; v++) {
        s->bytes[v] = 1;
        s->stride[v][s->n_dims - 1] = 1;
    }
}

/* --- tasks ------------------------------------------------------------------------------------- */

static void task_views(struct kernel_task *t, const struct shape *s, uint32_t elements)
{
    unsigned last = s->n_dims - 1;
    t->from = s->base[0];
    t->from_step = elements * s->stride[0][last];
    memcpy(t->from_stride, s->stride[0], sizeof t->from_stride);
    t->n_targets = (uint8_t)(s->n_views - 1);
    for (unsigned k = 0; k < t->n_targets; k++) {
        t->to[k] = s->base[1 + k];
        t->to_step[k] = elements * s->stride[1 + k][last];
        memcpy(t->to_stride[k], s->stride[1 + k], sizeof t->to_stride[k]);
    }
    /* With a single element its stride means nothing, and a unit of one needs none. */
    t->units = kernel_divisor_of((uint32_t)(s->size[last] / elements));
    t->n_outer = (uint8_t)last;
    for (unsigned d = 0; d < last; d++)
        t->outer[d] = kernel_divisor_of((uint32_t)s->size[d]);
}

static uint32_t count_rows(const struct shape *s, unsigned n_dims)
{
    uint64_t n = 1;
    for (unsigned d = 0; d < n_dims; d++)
        n *= s->size[d];
    return (uint32_t)n;
}

static void one_dim(struct shape *s)
{
    if (s->n_dims > 0)
        return;
    s->n_dims = 1;
    s->size[0] = 1;
    for (unsigned v = 0; v < s->n_views; v++)
        s->stride[v][0] = s->bytes[v];
}

/* How many elements of each row 16-byte accesses can take, where that leaves an end that is not worth
 * taking the whole row by less: all of them, or all but the end. */
static uint64_t wide_part(const struct shape *s, const struct kernel_task *t)
{
    enum { WORTH_UNITS = 8 };
    uint64_t all = s->size[s->n_dims - 1];
    uint8_t unit = t->from_dtype == t->to_dtype ? (uint8_t)KERNEL_UNIT_16
                                                : cast_unit(t->from_dtype, t->to_dtype);
    uint32_t n = unit_elements(unit, s->bytes[0]);
    if (all % n == 0 || all < (uint64_t)n * WORTH_UNITS || !dense(s))
        return all;
    for (unsigned v = 0; v < s->n_views; v++)
        if (!rows_aligned(s, v, n * s->bytes[v]))
            return all;
    return all - all % n;
}

static void plain_task(struct kernel_task *t, struct shape *s)
{
    t->unit = dense_unit(s, t);
    task_views(t, s, unit_elements(t->unit, s->bytes[0]));
    t->n_units = count_rows(s, s->n_dims - 1) * t->units.by;
    t->n_tiles = (t->n_units + KERNEL_THREADS * KERNEL_COPY_UNITS - 1) /
                 (KERNEL_THREADS * KERNEL_COPY_UNITS);
}

static void sum_task(struct kernel_task *t, struct shape *s, const uint64_t *offset,
                     uint32_t written_bytes)
{
    memcpy(t->offset, offset, (s->n_dims - 1) * sizeof *offset);
    t->first_byte = offset[s->n_dims - 1] * written_bytes;
    uint8_t unit = t->first_byte % 4 == 0 ? dense_unit(s, t) : KERNEL_UNIT_ELEMENT;
    if (unit <= KERNEL_UNIT_16 && unit < KERNEL_UNIT_4)
        unit = KERNEL_UNIT_ELEMENT;
    t->unit = unit;
    task_views(t, s, unit_elements(unit, s->bytes[0]));
    t->groups = kernel_divisor_of(1);
    uint32_t before = 1;
    if (t->n_outer > 0) {
        t->groups = kernel_divisor_of((t->outer[t->n_outer - 1].by + KERNEL_SUM_ROWS - 1) /
                                      KERNEL_SUM_ROWS);
        before = count_rows(s, t->n_outer - 1U);
    }
    t->n_units = before * t->groups.by * t->units.by;
    t->n_tiles = (t->n_units + KERNEL_THREADS - 1) / KERNEL_THREADS;
}

struct cutting {
    const struct kernel_copy *copy;
    uint64_t *sum;
    int (*emit)(const struct kernel_task *task, void *arg);
    void *arg;
    uint32_t first_target, n_targets;
};

/* Elements [begin, end) of each row. */
static int emit_columns(const struct cutting *c, const struct shape *whole, const uint64_t *offset,
                        uint64_t begin, uint64_t end)
{
    const struct kernel_copy *k = c->copy;
    struct kernel_task t = {.sum = c->sum, .from_dtype = k->from_dtype, .to_dtype = k->to_dtype};
    struct shape s = *whole;
    unsigned last = s.n_dims - 1;
    uint64_t at[KERNEL_MAX_DIMS];
    for (unsigned v = 0; v < s.n_views; v++)
        s.base[v] += (int64_t)begin * s.stride[v][last];
    s.size[last] = end - begin;
    if (c->sum == NULL) {
        plain_task(&t, &s);
    } else {
        memcpy(at, offset, sizeof at);
        at[last] += begin;
        sum_task(&t, &s, at, kernel_dtype_bytes(k->to_dtype));
    }
    return c->emit(&t, c->arg);
}

/* `size` at `begin` within the copy's box: one task, or two where rows have ragged ends. */
static int emit_task(const struct cutting *c, const uint64_t *begin, const uint64_t *size)
{
    const struct kernel_copy *k = c->copy;
    struct kernel_task t = {.sum = c->sum, .from_dtype = k->from_dtype, .to_dtype = k->to_dtype};
    struct shape s = {.n_dims = k->n_dims, .n_views = 1 + c->n_targets};
    uint64_t offset[KERNEL_MAX_DIMS] = {0};
    memcpy(s.size, size, k->n_dims * sizeof *size);
    for (unsigned v = 0; v < s.n_views; v++) {
        const struct kernel_view *view = v == 0 ? &k->from : &k->to[c->first_target + v - 1];
        s.base[v] = (char *)view->base;
        s.bytes[v] = kernel_dtype_bytes(v == 0 ? k->from_dtype : k->to_dtype);
        memcpy(s.stride[v], view->stride_bytes, k->n_dims * sizeof *view->stride_bytes);
        for (unsigned d = 0; d < k->n_dims; d++)
            s.base[v] += (int64_t)begin[d] * view->stride_bytes[d];
    }
    for (unsigned d = 0; d < k->n_dims; d++)
        offset[d] = k->offset[d] + begin[d];
    if (c->sum == NULL)
        simplify(&s);
    one_dim(&s);
    if (c->sum == NULL && k->from_dtype == k->to_dtype && dense(&s))
        take_bytes(&s);
    uint64_t all = s.size[s.n_dims - 1], wide = wide_part(&s, &t);
    int r = emit_columns(c, &s, offset, 0, wide);
    return r == 0 && wide < all ? emit_columns(c, &s, offset, wide, all) : r;
}

/* False where the box has no element; elements may be beyond 2^64, then they saturate. */
static bool count_elements(const uint64_t *size, unsigned n_dims, uint64_t *ret)
{
    uint64_t n = 1;
    bool over = false;
    for (unsigned d = 0; d < n_dims; d++) {
        if (size[d] == 0)
            return false;
        over = __builtin_mul_overflow(n, size[d], &n) || over;
    }
    *ret = over ? UINT64_MAX : n;
    return true;
}

/* Halves the greatest dim until the parts are small enough; at multiples of 64, so that a part is
 * aligned as the whole is. */
static int cut_box(const struct cutting *c, const uint64_t *begin, const uint64_t *size)
{
    uint64_t n, at[KERNEL_MAX_DIMS], part[KERNEL_MAX_DIMS];
    unsigned greatest = 0, n_dims = c->copy->n_dims;
    if (!count_elements(size, n_dims, &n))
        return 0;
    if (n <= MOST_ELEMENTS)
        return emit_task(c, begin, size);
    for (unsigned d = 1; d < n_dims; d++)
        if (size[d] > size[greatest])
            greatest = d;
    memcpy(at, begin, sizeof at);
    memcpy(part, size, sizeof part);
    part[greatest] = size[greatest] / 2;
    if (part[greatest] > 64)
        part[greatest] -= part[greatest] % 64;
    int r = cut_box(c, at, part);
    at[greatest] += part[greatest];
    part[greatest] = size[greatest] - part[greatest];
    return r != 0 ? r : cut_box(c, at, part);
}

int kernel_tasks_of_copy(const struct kernel_copy *k, uint64_t *sum,
                         int (*emit)(const struct kernel_task *task, void *arg), void *arg)
{
    static const uint64_t begin[KERNEL_MAX_DIMS];
    struct cutting c = {.copy = k, .emit = emit, .arg = arg};
    rs_assert(k->n_dims <= KERNEL_MAX_DIMS && k->n_targets <= KERNEL_MAX_TARGETS);
    rs_assert(kernel_dtype_bytes(k->from_dtype) > 0 && kernel_dtype_bytes(k->to_dtype) > 0);
    c.sum = k->fingerprint != NULL ? sum : NULL;
    int r = 0;
    do {
        uint32_t left = k->n_targets - c.first_target;
        c.n_targets = left < KERNEL_TASK_TARGETS ? left : KERNEL_TASK_TARGETS;
        if (c.n_targets > 0 || c.sum != NULL)
            r = cut_box(&c, begin, k->size);
        c.first_target += c.n_targets;
        c.sum = NULL; /* the first part has added it all */
    } while (r == 0 && c.first_target < k->n_targets);
    return r;
}

int kernel_tasks_of_fingerprint(const struct kernel_fingerprint *f, uint64_t *sum,
                                int (*emit)(const struct kernel_task *task, void *arg), void *arg)
{
    struct kernel_copy c = {.from = f->from,
                            .fingerprint = f->fingerprint,
                            .n_dims = f->n_dims,
                            .from_dtype = f->dtype,
                            .to_dtype = f->dtype};
    memcpy(c.size, f->size, sizeof c.size);
    memcpy(c.offset, f->offset, sizeof c.offset);
    return kernel_tasks_of_copy(&c, sum, emit, arg);
}

void kernel_batch_add(struct kernel_batch *b, const struct kernel_task *task)
{
    rs_assert(b->n_tasks < KERNEL_BATCH_TASKS);
    rs_assert(b->n_tasks == 0 || (b->tasks[0].sum == NULL) == (task->sum == NULL));
    b->tasks[b->n_tasks] = *task;
    b->tasks[b->n_tasks].first_tile = b->n_tiles;
    b->n_tiles += task->n_tiles;
    b->n_tasks++;
}

/* --- as a GPU would ---------------------------------------------------------------------------- */

static void run_thread(const struct kernel_batch *b, uint32_t block, uint32_t n_blocks,
                       uint32_t thread)
{
    uint32_t i = 0;
    for (uint32_t tile = block; tile < b->n_tiles; tile += n_blocks) {
        i = kernel_task_of_tile(b->tasks, i, tile);
        const struct kernel_task *t = &b->tasks[i];
        if (t->sum == NULL) {
            kernel_copy_thread(t, tile - t->first_tile, thread);
            continue;
        }
        uint64_t sum = kernel_sum_thread(t, tile - t->first_tile, thread);
        (void)__atomic_fetch_add(t->sum, sum, __ATOMIC_RELAXED);
    }
}

void kernel_batch_run_host(const struct kernel_batch *b, uint32_t n_blocks)
{
    for (uint32_t block = 0; block < n_blocks; block++)
        for (uint32_t thread = 0; thread < KERNEL_THREADS; thread++)
            run_thread(b, block, n_blocks, thread);
}
