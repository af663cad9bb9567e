/* The fast host twins: how a box becomes runs. The inner loops stand in kernels_run_*.c.
 *
 * A copy without a fingerprint may visit elements in any order, so its dims are sorted by stride
 * and merged to the longest runs. With a fingerprint the rows along the last dim must stay apart,
 * since each has its own weight; a row is worked on in chunks whose weights, and whose bytes, stay
 * in the first-level cache while all rows pass by. What is strided, cast, or goes to several
 * targets is brought together in a buffer on the stack first: one read, several writes. */
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/err.h"
#include "kernels/fingerprint.h"
#include "kernels/kernels.h"
#include "kernels/kernels_dtype.h"
#include "kernels/kernels_run.h"

#include "base/banned.h"

enum {
    CHUNK_WORDS = 2048, /* of the written dtype: 8 KiB of weights, 8 KiB of data */
    CHUNK_BYTES = 4 * CHUNK_WORDS,
    WIDEST_CAST = 2, /* read bytes / written bytes, at most */
    MAX_VIEWS = 1 + KERNEL_MAX_TARGETS
};

/* A box to work on: dims that may have been merged; view 0 is read, the others are written. */
struct job {
    const struct kernel_runs *runs;
    uint64_t size[KERNEL_MAX_DIMS];
    int64_t stride[MAX_VIEWS][KERNEL_MAX_DIMS];
    char *base[MAX_VIEWS];
    unsigned n_dims;
    unsigned n_views;
    uint32_t from_bytes, to_bytes;
    uint8_t from_dtype, to_dtype;
    bool streaming;
    bool dense[MAX_VIEWS]; /* elements of the last dim stand side by side */
};

static uint32_t element_bytes(const struct job *j, unsigned view)
{
    return view == 0 ? j->from_bytes : j->to_bytes;
}

static void job_view(struct job *j, const struct kernel_view *v)
{
    j->base[j->n_views] = v->base;
    memcpy(j->stride[j->n_views], v->stride_bytes, j->n_dims * sizeof *v->stride_bytes);
    j->n_views++;
}

/* False where the box has no element. */
static bool job_size(struct job *j, const uint64_t *size, uint8_t n_dims)
{
    rs_assert(n_dims <= KERNEL_MAX_DIMS);
    j->n_dims = n_dims;
    memcpy(j->size, size, n_dims * sizeof *size);
    for (unsigned d = 0; d < n_dims; d++)
        if (size[d] == 0)
            return false;
    return true;
}

/* 0 dims become one row of one element. */
static void job_finish(struct job *j)
{
    if (j->n_dims == 0) {
        j->n_dims = 1;
        j->size[0] = 1;
    }
    unsigned last = j->n_dims - 1;
    for (unsigned v = 0; v < j->n_views; v++)
        j->dense[v] = j->size[last] == 1 || j->stride[v][last] == element_bytes(j, v);
}

static void dims_move(struct job *j, unsigned to, unsigned from)
{
    j->size[to] = j->size[from];
    for (unsigned v = 0; v < j->n_views; v++)
        j->stride[v][to] = j->stride[v][from];
}

static void dims_swap(struct job *j, unsigned a, unsigned b)
{
    uint64_t size = j->size[a];
    j->size[a] = j->size[b];
    j->size[b] = size;
    for (unsigned v = 0; v < j->n_views; v++) {
        int64_t stride = j->stride[v][a];
        j->stride[v][a] = j->stride[v][b];
        j->stride[v][b] = stride;
    }
}

static void drop_single_dims(struct job *j)
{
    unsigned n = 0;
    for (unsigned d = 0; d < j->n_dims; d++)
        if (j->size[d] != 1)
            dims_move(j, n++, d);
    j->n_dims = n;
}

/* Descending strides of what is written: the fastest dim last. */
static void sort_dims(struct job *j)
{
    unsigned v = j->n_views - 1;
    for (unsigned i = 1; i < j->n_dims; i++)
        for (unsigned k = i; k > 0 && j->stride[v][k - 1] < j->stride[v][k]; k--)
            dims_swap(j, k - 1, k);
}

/* Dim d goes on where dim d+1 ends, in all views. */
static bool mergeable(const struct job *j, unsigned outer, unsigned inner)
{
    for (unsigned v = 0; v < j->n_views; v++)
        if (j->stride[v][outer] != j->stride[v][inner] * (int64_t)j->size[inner])
            return false;
    return true;
}

static void merge_dims(struct job *j)
{
    unsigned n = 0; /* dims kept; the last of them is n-1 */
    for (unsigned d = 0; d < j->n_dims; d++) {
        if (n > 0 && mergeable(j, n - 1, d)) {
            uint64_t size = j->size[n - 1] * j->size[d];
            dims_move(j, n - 1, d);
            j->size[n - 1] = size;
        } else {
            dims_move(j, n++, d);
        }
    }
    j->n_dims = n;
}

/* --- elements that do not stand side by side -------------------------------------------------- */

#define STRIDED_LOOP(type)                                                                         \
    for (size_t i = 0; i < n; i++) {                                                               \
        type x;                                                                                    \
        memcpy(&x, from + (ptrdiff_t)i * from_stride, sizeof x);                                   \
        memcpy(to + (ptrdiff_t)i * to_stride, &x, sizeof x);                                       \
    }

static void copy_strided(char *to, int64_t to_stride, const char *from, int64_t from_stride,
                         size_t n, uint32_t n_bytes)
{
    switch (n_bytes) {
    case 1:
        STRIDED_LOOP(uint8_t)
        return;
    case 2:
        STRIDED_LOOP(uint16_t)
        return;
    case 4:
        STRIDED_LOOP(uint32_t)
        return;
    default:
        STRIDED_LOOP(uint64_t)
    }
}

/* --- one piece: n elements that all views have in one row, or in rows without gaps ------------ */

struct piece_buffers {
    _Alignas(64) char gathered[WIDEST_CAST * CHUNK_BYTES];
    _Alignas(64) char cast[CHUNK_BYTES];
};

static const char *piece_cast(const struct job *j, struct piece_buffers *b, const char *from,
                              size_t n)
{
    if (j->from_dtype == j->to_dtype)
        return from;
    if (j->from_dtype == KERNEL_FLOAT32 && j->to_dtype == KERNEL_BFLOAT16)
        j->runs->bfloat16_of_float32((uint16_t *)(void *)b->cast, from, n);
    else if (j->from_dtype == KERNEL_FLOAT32 && j->to_dtype == KERNEL_FLOAT16)
        j->runs->float16_of_float32((uint16_t *)(void *)b->cast, from, n);
    else
        j->runs->e4m3_of_bfloat16((uint8_t *)b->cast, from, n);
    return b->cast;
}

/* Where the n elements in the written dtype stand side by side: in place, or in `b`. What is read
 * here and not by piece_write has `ahead` prefetched. */
static const char *piece_read(const struct job *j, struct piece_buffers *b, const char *from,
                              size_t n, const char *ahead)
{
    if (j->dense[0] && j->from_dtype != j->to_dtype)
        j->runs->prefetch(ahead, n * j->from_bytes);
    if (!j->dense[0]) {
        copy_strided(b->gathered, j->from_bytes, from, j->stride[0][j->n_dims - 1], n,
                     j->from_bytes);
        from = b->gathered;
    }
    return piece_cast(j, b, from, n);
}

static void piece_write(const struct job *j, char *const *at, const char *elements, size_t n,
                        const char *ahead)
{
    bool in_place = j->dense[0] && j->from_dtype == j->to_dtype;
    for (unsigned v = 1; v < j->n_views; v++) {
        if (j->dense[v])
            j->runs->copy(at[v], elements, n * j->to_bytes, j->streaming,
                          in_place && v == 1 ? ahead : NULL);
        else
            copy_strided(at[v], j->stride[v][j->n_dims - 1], elements, j->to_bytes, n, j->to_bytes);
    }
}

/* --- copy without a fingerprint --------------------------------------------------------------- */

/* True where a row needs no buffer and is written once: it can be any length at a time. */
static bool is_plain(const struct job *j)
{
    return j->n_views == 2 && j->dense[0] && j->dense[1] && j->from_dtype == j->to_dtype;
}

/* Where row i + 1 of the box will be read, or for short rows i + 2. */
static const char *row_ahead(const struct job *j, const char *row)
{
    enum { SHORT_ROW_BYTES = 1024 };
    uint64_t n_bytes = j->size[j->n_dims - 1] * j->from_bytes;
    if (j->n_dims < 2)
        return row + n_bytes;
    return row + j->stride[0][j->n_dims - 2] * (n_bytes < SHORT_ROW_BYTES ? 2 : 1);
}

static void copy_pieces(const struct job *j, struct piece_buffers *b, char *const *row)
{
    uint64_t n = j->size[j->n_dims - 1], most = CHUNK_BYTES / j->to_bytes;
    char *at[MAX_VIEWS];
    for (uint64_t i = 0; i < n; i += most) {
        size_t here = n - i < most ? n - i : most;
        for (unsigned v = 0; v < j->n_views; v++)
            at[v] = row[v] + (ptrdiff_t)i * j->stride[v][j->n_dims - 1];
        const char *ahead = n > most ? at[0] + here * j->from_bytes : row_ahead(j, row[0]);
        piece_write(j, at, piece_read(j, b, at[0], here, ahead), here, ahead);
    }
}

/* The rows of the dim before the last; `row` is the first. */
static void copy_rows(const struct job *j, struct piece_buffers *b, char *const *first)
{
    uint64_t n_rows = j->n_dims < 2 ? 1 : j->size[j->n_dims - 2];
    uint64_t n_bytes = j->size[j->n_dims - 1] * j->to_bytes;
    bool plain = is_plain(j), near = n_bytes <= CHUNK_BYTES;
    char *row[MAX_VIEWS];
    memcpy(row, first, sizeof row);
    for (uint64_t i = 0; i < n_rows; i++) {
        if (plain)
            j->runs->copy(row[1], row[0], n_bytes, j->streaming,
                          near ? row_ahead(j, row[0]) : NULL);
        else
            copy_pieces(j, b, row);
        for (unsigned v = 0; j->n_dims > 1 && v < j->n_views; v++)
            row[v] += j->stride[v][j->n_dims - 2];
    }
}

/* Rows of a job: all dims but the last, in order. */
struct odometer {
    uint64_t at[KERNEL_MAX_DIMS];
    char *row[MAX_VIEWS];
};

static void odometer_start(struct odometer *o, const struct job *j)
{
    memset(o->at, 0, sizeof o->at);
    memcpy(o->row, j->base, sizeof o->row);
}

/* Steps dim `d`; returns the outermost dim that changed, or -1 at the end. */
static int odometer_step(struct odometer *o, const struct job *j, int d)
{
    for (; d >= 0; d--) {
        bool wraps = ++o->at[d] == j->size[d];
        int64_t steps = wraps ? -(int64_t)(j->size[d] - 1) : 1;
        for (unsigned v = 0; v < j->n_views; v++)
            o->row[v] += steps * j->stride[v][d];
        if (!wraps)
            return d;
        o->at[d] = 0;
    }
    return -1;
}

static void copy_job(const struct job *j)
{
    struct odometer o;
    struct piece_buffers b;
    odometer_start(&o, j);
    do
        copy_rows(j, &b, o.row);
    while (odometer_step(&o, j, (int)j->n_dims - 3) >= 0);
}

/* --- fingerprint, with or without a copy ------------------------------------------------------ */

/* A range of columns, the same for all rows: the words that it touches and their weights. */
struct span {
    uint32_t weights[CHUNK_WORDS];
    uint64_t zeros;   /* what a row of zeros adds: Σ ones · W */
    uint32_t phase;   /* first byte's place in its word */
    uint32_t n_head;  /* bytes up to a whole word */
    uint32_t n_tail;  /* bytes after the last whole word */
    size_t n_words;   /* whole words */
    size_t n_touched; /* all words */
};

/* `n` low bytes of a word set. */
static uint32_t low_bytes(uint32_t n)
{
    return n == 4 ? UINT32_MAX : (UINT32_C(1) << (8 * n)) - 1;
}

/* Bytes [begin, begin + n) of the rows, counted from coordinate 0. */
static void span_set(struct span *s, const struct kernel_runs *runs, uint64_t begin, size_t n,
                     uint32_t n_bytes)
{
    s->phase = (uint32_t)(begin % 4);
    s->n_head = s->phase == 0 ? 0 : 4 - s->phase;
    if (s->n_head > n)
        s->n_head = (uint32_t)n;
    s->n_words = (n - s->n_head) / 4;
    s->n_tail = (uint32_t)((n - s->n_head) % 4);
    s->n_touched = (s->n_head > 0) + s->n_words + (s->n_tail > 0);
    uint32_t ones = fingerprint_ones(n_bytes);
    uint64_t whole = runs->weights(s->weights, begin / 4, s->n_touched);
    s->zeros = 0;
    if (s->n_head > 0) {
        whole -= s->weights[0];
        s->zeros += (uint64_t)(ones & (low_bytes(s->n_head) << (8 * s->phase))) * s->weights[0];
    }
    if (s->n_tail > 0) {
        uint32_t w = s->weights[s->n_touched - 1];
        whole -= w;
        s->zeros += (uint64_t)(ones & low_bytes(s->n_tail)) * w;
    }
    s->zeros += ones * whole;
}

static const uint32_t *span_whole(const struct span *s)
{
    return s->weights + (s->n_head > 0);
}

/* n < 4 bytes as the low end of a word. */
static uint64_t part_word(const char *p, uint32_t n)
{
    uint64_t word = 0;
    for (uint32_t i = 0; i < n; i++)
        word |= (uint64_t)(uint8_t)p[i] << (8 * i);
    return word;
}

/* The first and last word of a row, where the row has a part of them only. */
static uint64_t span_ends(const struct span *s, const char *row)
{
    uint64_t sum = s->zeros;
    if (s->n_head > 0)
        sum += (part_word(row, s->n_head) << (8 * s->phase)) * s->weights[0];
    if (s->n_tail > 0)
        sum +=
            part_word(row + s->n_head + 4 * s->n_words, s->n_tail) * s->weights[s->n_touched - 1];
    return sum;
}

static uint64_t span_sum(const struct span *s, const struct kernel_runs *runs, const char *row,
                         const char *ahead)
{
    return span_ends(s, row) + runs->sum(row + s->n_head, span_whole(s), s->n_words, ahead);
}

/* The same, writing the row on the way. */
static uint64_t span_copy_sum(const struct span *s, const struct job *j, char *to, const char *row,
                              const char *ahead)
{
    size_t body = 4 * s->n_words;
    memcpy(to, row, s->n_head);
    memcpy(to + s->n_head + body, row + s->n_head + body, s->n_tail);
    return span_ends(s, row) + j->runs->copy_sum(to + s->n_head, row + s->n_head, span_whole(s),
                                                 s->n_words, j->streaming, ahead);
}

/* Weights of rows: prefix[d] is the product over the dims before d. */
struct row_weights {
    uint64_t prefix[KERNEL_MAX_DIMS + 1];
    const uint64_t *offset;
};

static void row_weights_from(struct row_weights *w, const struct odometer *o, int d, int n_dims)
{
    for (; d < n_dims - 1; d++)
        w->prefix[d + 1] =
            w->prefix[d] * fingerprint_dim_weight((uint32_t)d, w->offset[d] + o->at[d]);
}

/* How many rows follow each other without gaps in all views and fit into one chunk: they are read,
 * cast and written as one piece. 1 where they don't. */
static uint64_t rows_per_piece(const struct job *j)
{
    if (j->n_dims < 2)
        return 1;
    uint64_t columns = j->size[j->n_dims - 1];
    for (unsigned v = 0; v < j->n_views; v++)
        if (!j->dense[v] || j->stride[v][j->n_dims - 2] != (int64_t)(columns * element_bytes(j, v)))
            return 1;
    uint64_t fit = CHUNK_BYTES / j->to_bytes / columns;
    return fit == 0 ? 1 : fit;
}

struct sum_loop {
    const struct job *job;
    struct span span;
    struct piece_buffers buffers;
    uint64_t rows_per_piece;
    uint64_t ready;       /* rows of the current piece that are still to be added */
    const char *elements; /* of the next of them */
    bool fused;           /* one row, one read: written and added in one loop */
};

/* Where the next piece will be read, n elements after `row` or in the next row. */
static const char *piece_ahead(const struct sum_loop *l, const char *row, size_t n)
{
    const struct job *j = l->job;
    if (l->rows_per_piece > 1 || j->n_dims < 2 || j->size[j->n_dims - 2] == 1)
        return row + n * j->from_bytes;
    return row_ahead(j, row);
}

/* Reads and writes the rows of the piece that begins at `o`; sets the elements and rows to add. */
static void sum_next_piece(struct sum_loop *l, const struct odometer *o, size_t n)
{
    const struct job *j = l->job;
    uint64_t left = j->n_dims < 2 ? 1 : j->size[j->n_dims - 2] - o->at[j->n_dims - 2];
    l->ready = left < l->rows_per_piece ? left : l->rows_per_piece;
    const char *ahead = piece_ahead(l, o->row[0], n * l->ready);
    l->elements = piece_read(j, &l->buffers, o->row[0], n * l->ready, ahead);
    piece_write(j, o->row, l->elements, n * l->ready, ahead);
}

static uint64_t sum_row(struct sum_loop *l, const struct odometer *o, size_t n)
{
    const struct job *j = l->job;
    if (l->fused)
        return span_copy_sum(&l->span, j, o->row[1], o->row[0], piece_ahead(l, o->row[0], n));
    if (l->ready == 0)
        sum_next_piece(l, o, n);
    const char *elements = l->elements, *ahead = NULL;
    if (j->n_views == 1 && elements == o->row[0]) /* read here for the first time */
        ahead = l->rows_per_piece > 1 ? elements + CHUNK_BYTES : piece_ahead(l, elements, n);
    l->elements += n * j->to_bytes;
    l->ready--;
    return span_sum(&l->span, j->runs, elements, ahead);
}

/* All rows of the columns [column, column + n). */
static uint64_t sum_columns(struct sum_loop *l, const uint64_t *offset, uint64_t column, size_t n)
{
    const struct job *j = l->job;
    int n_dims = (int)j->n_dims, changed = 0;
    struct odometer o;
    struct row_weights w = {.prefix = {1}, .offset = offset};
    uint64_t sum = 0;
    odometer_start(&o, j);
    for (unsigned v = 0; v < j->n_views; v++)
        o.row[v] += (ptrdiff_t)column * j->stride[v][n_dims - 1];
    do {
        row_weights_from(&w, &o, changed, n_dims);
        sum += w.prefix[n_dims - 1] * sum_row(l, &o, n);
    } while ((changed = odometer_step(&o, j, n_dims - 2)) >= 0);
    return sum;
}

/* Copies (where there are targets) and returns the fingerprint. */
static uint64_t sum_job(const struct job *j, const uint64_t *offset)
{
    static const uint64_t nowhere[KERNEL_MAX_DIMS];
    struct sum_loop l;
    unsigned last = j->n_dims - 1;
    uint64_t sum = 0;
    if (offset == NULL)
        offset = nowhere;
    l.job = j;
    l.ready = 0;
    l.rows_per_piece = rows_per_piece(j);
    l.fused = is_plain(j) && l.rows_per_piece == 1;
    for (uint64_t column = 0, n; column < j->size[last]; column += n) {
        uint64_t begin = (offset[last] + column) * j->to_bytes;
        n = (CHUNK_BYTES - begin % 4) / j->to_bytes;
        if (n > j->size[last] - column)
            n = j->size[last] - column;
        span_set(&l.span, j->runs, begin, n * j->to_bytes, j->to_bytes);
        sum += sum_columns(&l, offset, column, n);
    }
    return sum;
}

/* --- entry ------------------------------------------------------------------------------------ */

static bool can_cast(uint8_t from, uint8_t to)
{
    return from == to ||
           (from == KERNEL_FLOAT32 && (to == KERNEL_BFLOAT16 || to == KERNEL_FLOAT16)) ||
           (from == KERNEL_BFLOAT16 && to == KERNEL_FLOAT8_E4M3FN);
}

void kernel_copy_with(const struct kernel_copy *c, const struct kernel_runs *runs)
{
    struct job j = {.runs = runs,
                    .from_bytes = kernel_dtype_bytes(c->from_dtype),
                    .to_bytes = kernel_dtype_bytes(c->to_dtype),
                    .from_dtype = c->from_dtype,
                    .to_dtype = c->to_dtype,
                    .streaming = c->streaming != 0};
    rs_assert(j.from_bytes > 0 && can_cast(c->from_dtype, c->to_dtype));
    rs_assert(c->n_targets <= KERNEL_MAX_TARGETS);
    if (!job_size(&j, c->size, c->n_dims) || (c->n_targets == 0 && c->fingerprint == NULL))
        return;
    job_view(&j, &c->from);
    for (uint32_t t = 0; t < c->n_targets; t++)
        job_view(&j, &c->to[t]);
    if (c->fingerprint != NULL) {
        job_finish(&j);
        uint64_t sum = sum_job(&j, c->n_dims == 0 ? NULL : c->offset);
        (void)__atomic_fetch_add(c->fingerprint, sum, __ATOMIC_RELAXED);
    } else {
        drop_single_dims(&j);
        sort_dims(&j);
        merge_dims(&j);
        job_finish(&j);
        copy_job(&j);
    }
    if (j.streaming)
        runs->fence();
}

void kernel_fingerprint_with(const struct kernel_fingerprint *f, const struct kernel_runs *runs)
{
    struct job j = {.runs = runs,
                    .from_bytes = kernel_dtype_bytes(f->dtype),
                    .to_bytes = kernel_dtype_bytes(f->dtype),
                    .from_dtype = f->dtype,
                    .to_dtype = f->dtype};
    rs_assert(j.from_bytes > 0);
    if (!job_size(&j, f->size, f->n_dims))
        return;
    job_view(&j, &f->from);
    job_finish(&j);
    uint64_t sum = sum_job(&j, f->n_dims == 0 ? NULL : f->offset);
    (void)__atomic_fetch_add(f->fingerprint, sum, __ATOMIC_RELAXED);
}

#if defined(__x86_64__)
/* clang 14 does not know "f16c" as a feature to ask for. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

const struct kernel_runs *kernel_runs(enum kernel_isa isa)
{
#if defined(__x86_64__)
    if (isa == KERNEL_ISA_AVX512 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw"))
        return &kernel_runs_avx512;
    if (isa == KERNEL_ISA_AVX2 && __builtin_cpu_supports("avx2") && has_f16c())
        return &kernel_runs_avx2;
#endif
    return isa == KERNEL_ISA_PORTABLE ? &kernel_runs_portable : NULL;
}

enum kernel_isa kernel_isa_best(void)
{
    if (kernel_runs(KERNEL_ISA_AVX512) != NULL)
        return KERNEL_ISA_AVX512;
    return kernel_runs(KERNEL_ISA_AVX2) != NULL ? KERNEL_ISA_AVX2 : KERNEL_ISA_PORTABLE;
}

const char *kernel_host_name(void)
{
    static const char *const names[] = {[KERNEL_ISA_PORTABLE] = "portable",
                                        [KERNEL_ISA_AVX2] = "avx2",
                                        [KERNEL_ISA_AVX512] = "avx512"};
    return names[kernel_isa_best()];
}

void kernel_copy_host(const struct kernel_copy *c)
{
    kernel_copy_with(c, kernel_runs(kernel_isa_best()));
}

void kernel_fingerprint_host(const struct kernel_fingerprint *f)
{
    kernel_fingerprint_with(f, kernel_runs(kernel_isa_best()));
}
