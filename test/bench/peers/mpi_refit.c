/* Open MPI as a peer of the benchmark: the same bytes between the same ranks, in the ways that MPI
 * programs have.
 *
 *   mpirun … mpi_refit JOB MODE …        JOB: written by test/bench/cases.py, which has the format
 *
 *   gather-broadcast   buckets of whole tensors are gathered on rank 0 (MPI_Igatherv, the next bucket
 *                      while one is broadcast), broadcast to every destination rank (MPI_Bcast), and
 *                      each takes its part
 *   point-to-point     each pair of ranks that share something: packed, one message, unpacked
 *
 * Rank 0 prints a JSON line per mode: seconds from the first rank's begin to the last one's end, and how
 * many elements of the destinations were compared and were wrong. One thread, one job, then it ends. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAGIC = 0x4a4f4231, POISON = 0xa5 };

struct shard {
    int64_t rank, tensor, row, column, rows, columns, gathered, place;
};
struct move {
    int64_t from, to, tensor, row, column, rows, columns;
};
struct job {
    int64_t n_ranks, n_source, n_tensors, n_shards, n_moves, n_buckets;
    const int64_t *nodes;        /* [n_ranks] */
    const int64_t (*tensors)[2]; /* rows, columns */
    const struct shard *shards;
    const struct move *moves;
    const int64_t (*buckets)[2]; /* first tensor, end */
};

static struct job job;
static int me;
static uint16_t *memory;        /* this rank's shards */
static const struct shard **of; /* [tensor]: this rank's shard of it, or NULL */

static _Noreturn void die(const char *what)
{
    (void)fprintf(stderr, "mpi_refit: rank %d: %s\n", me, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void *must_alloc(size_t bytes)
{
    void *p = malloc(bytes > 0 ? bytes : 1);
    if (p == NULL)
        die("no memory");
    memset(p, POISON, bytes > 0 ? bytes : 1); /* pages are there before the clock starts */
    return p;
}

/* ---- the job ---- */

static void read_job(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL || fseek(f, 0, SEEK_END) != 0)
        die("can't read the job");
    long bytes = ftell(f);
    int64_t *n = must_alloc((size_t)bytes);
    rewind(f);
    if (bytes < 56 || fread(n, 1, (size_t)bytes, f) != (size_t)bytes || n[0] != MAGIC)
        die("that is no job");
    (void)fclose(f);
    job = (struct job){n[1], n[2], n[3], n[4], n[5], n[6], n + 7, NULL, NULL, NULL, NULL};
    if (bytes / 8 != 7 + job.n_ranks + 2 * job.n_tensors + 8 * job.n_shards + 7 * job.n_moves +
                         2 * job.n_buckets)
        die("the job is cut short");
    job.tensors = (const int64_t(*)[2])(void *)(job.nodes + job.n_ranks);
    job.shards = (const struct shard *)(const void *)(job.tensors + job.n_tensors);
    job.moves = (const struct move *)(const void *)(job.shards + job.n_shards);
    job.buckets = (const int64_t(*)[2])(const void *)(job.moves + job.n_moves);
}

static void find_mine(void)
{
    int64_t end = 0;
    of = calloc((size_t)job.n_tensors, sizeof *of);
    if (of == NULL)
        die("no memory");
    for (int64_t i = 0; i < job.n_shards; i++) {
        const struct shard *s = &job.shards[i];
        if (s->rank != me)
            continue;
        of[s->tensor] = s;
        end = s->place + s->rows * s->columns;
    }
    memory = must_alloc((size_t)end * 2);
}

/* ---- values ---- */

static uint16_t value(int64_t tensor, int64_t element)
{
    uint32_t h = (uint32_t)element * 0x9e3779b1U + (uint32_t)tensor * 0x85ebca77U;
    return (uint16_t)(h >> 15);
}

/* Fills all shards of this rank, or counts the elements that are not as they must be. */
static int64_t walk(int fill, int64_t *ret_elements)
{
    int64_t wrong = 0;
    *ret_elements = 0;
    for (int64_t t = 0; t < job.n_tensors; t++) {
        const struct shard *s = of[t];
        for (int64_t r = 0; s != NULL && r < s->rows; r++) {
            uint16_t *row = memory + s->place + r * s->columns;
            int64_t first = (s->row + r) * job.tensors[t][1] + s->column;
            for (int64_t c = 0; c < s->columns; c++) {
                if (fill)
                    row[c] = value(t, first + c);
                else
                    wrong += row[c] != value(t, first + c);
            }
            *ret_elements += s->columns;
        }
    }
    return wrong;
}

/* ---- rectangles ---- */

static void copy_rows(uint16_t *to, int64_t to_stride, const uint16_t *from, int64_t from_stride,
                      int64_t rows, int64_t columns)
{
    if (to_stride == columns && from_stride == columns) {
        memcpy(to, from, (size_t)(rows * columns) * 2);
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        memcpy(to + r * to_stride, from + r * from_stride, (size_t)columns * 2);
}

/* Where a box of a tensor begins in this rank's memory. */
static uint16_t *in_memory(int64_t tensor, int64_t row, int64_t column)
{
    const struct shard *s = of[tensor];
    return memory + s->place + (row - s->row) * s->columns + (column - s->column);
}

/* ---- gather, then broadcast ---- */

struct gather {
    uint16_t *packed, *pieces,
        *whole; /* pieces, whole: of rank 0; whole also where it is received */
    int *counts, *places;
    MPI_Request request;
};

static int64_t bucket_elements(int64_t b)
{
    int64_t n = 0;
    for (int64_t t = job.buckets[b][0]; t < job.buckets[b][1]; t++)
        n += job.tensors[t][0] * job.tensors[t][1];
    return n;
}

static int64_t greatest_bucket(void)
{
    int64_t most = 0;
    for (int64_t b = 0; b < job.n_buckets; b++)
        if (bucket_elements(b) > most)
            most = bucket_elements(b);
    return most;
}

static int in_bucket(const struct shard *s, int64_t b)
{
    return s->gathered && s->tensor >= job.buckets[b][0] && s->tensor < job.buckets[b][1];
}

/* Packs what this rank has of a bucket, by tensor, and begins to gather it. */
static void begin_gather(struct gather *g, int64_t b, MPI_Comm sources)
{
    int64_t n = 0;
    for (int64_t t = job.buckets[b][0]; t < job.buckets[b][1]; t++)
        if (of[t] != NULL && of[t]->gathered) {
            int64_t elements = of[t]->rows * of[t]->columns;
            memcpy(g->packed + n, memory + of[t]->place, (size_t)elements * 2);
            n += elements;
        }
    if (me == 0) {
        int at = 0;
        memset(g->counts, 0, (size_t)job.n_source * sizeof *g->counts);
        for (int64_t i = 0; i < job.n_shards; i++)
            if (in_bucket(&job.shards[i], b))
                g->counts[job.shards[i].rank] += (int)(job.shards[i].rows * job.shards[i].columns);
        for (int64_t r = 0; r < job.n_source; r++) {
            g->places[r] = at;
            at += g->counts[r];
        }
    }
    MPI_Igatherv(g->packed, (int)n, MPI_UINT16_T, g->pieces, g->counts, g->places, MPI_UINT16_T, 0,
                 sources, &g->request);
}

static void end_gather(struct gather *g, int64_t b)
{
    MPI_Wait(&g->request, MPI_STATUS_IGNORE);
    if (me != 0)
        return;
    const uint16_t *from = g->pieces;
    for (int64_t i = 0; i < job.n_shards; i++) { /* by rank, then tensor: as they came */
        const struct shard *s = &job.shards[i];
        if (!in_bucket(s, b))
            continue;
        int64_t at = 0, width = job.tensors[s->tensor][1];
        for (int64_t t = job.buckets[b][0]; t < s->tensor; t++)
            at += job.tensors[t][0] * job.tensors[t][1];
        copy_rows(g->whole + at + s->row * width + s->column, width, from, s->columns, s->rows,
                  s->columns);
        from += s->rows * s->columns;
    }
}

static void take_parts(const struct gather *g, int64_t b)
{
    int64_t at = 0;
    for (int64_t t = job.buckets[b][0]; t < job.buckets[b][1]; t++) {
        const struct shard *s = of[t];
        int64_t width = job.tensors[t][1];
        if (s != NULL)
            copy_rows(memory + s->place, s->columns, g->whole + at + s->row * width + s->column,
                      width, s->rows, s->columns);
        at += job.tensors[t][0] * width;
    }
}

static struct gather new_gather(int64_t elements)
{
    struct gather g = {.counts = must_alloc((size_t)job.n_source * sizeof(int)),
                       .places = must_alloc((size_t)job.n_source * sizeof(int))};
    g.packed = must_alloc(me < job.n_source ? (size_t)elements * 2 : 0);
    g.pieces = must_alloc(me == 0 ? (size_t)elements * 2 : 0);
    g.whole = must_alloc(me == 0 || me >= job.n_source ? (size_t)elements * 2 : 0);
    return g;
}

static struct gather gathers[2];
static MPI_Comm sources = MPI_COMM_NULL, broadcasters = MPI_COMM_NULL;

/* Groups and buffers, outside of the clock. Rank 0 comes first, the others by node: a chain then enters each
 * node once. */
static void ready_gather(void)
{
    int64_t most = greatest_bucket();
    int takes = me == 0 || me >= job.n_source;
    MPI_Comm_split(MPI_COMM_WORLD, me < job.n_source ? 0 : MPI_UNDEFINED, me, &sources);
    int order = me == 0 ? 0 : (int)(job.nodes[me] * job.n_ranks) + me + 1;
    MPI_Comm_split(MPI_COMM_WORLD, takes ? 0 : MPI_UNDEFINED, order, &broadcasters);
    for (int i = 0; i < 2; i++)
        gathers[i] = new_gather(most);
}

static void gather_broadcast(void)
{
    if (me < job.n_source)
        begin_gather(&gathers[0], 0, sources);
    for (int64_t b = 0; b < job.n_buckets; b++) {
        struct gather *g = &gathers[b % 2];
        if (me < job.n_source)
            end_gather(g, b);
        if (me < job.n_source && b + 1 < job.n_buckets)
            begin_gather(&gathers[(b + 1) % 2], b + 1, sources);
        if (broadcasters != MPI_COMM_NULL)
            MPI_Bcast(g->whole, (int)bucket_elements(b), MPI_UINT16_T, 0, broadcasters);
        if (me >= job.n_source)
            take_parts(g, b);
    }
}

/* ---- point to point ---- */

struct pair {
    int64_t first, end, elements; /* moves of the pair */
    int other;
    uint16_t *packed;
};

static struct pair *pairs;
static MPI_Request *requests;
static int n_pairs;

/* Moves are in order of sender and receiver; this rank's pairs and their buffers. */
static void ready_pairs(void)
{
    pairs = must_alloc((size_t)job.n_ranks * sizeof *pairs);
    requests = must_alloc((size_t)job.n_ranks * sizeof *requests);
    for (int64_t i = 0; i < job.n_moves;) {
        const struct move *m = &job.moves[i];
        struct pair p = {.first = i};
        for (; i < job.n_moves && job.moves[i].from == m->from && job.moves[i].to == m->to; i++)
            p.elements += job.moves[i].rows * job.moves[i].columns;
        p.end = i;
        p.other = (int)(m->from == me ? m->to : m->from);
        if (m->from != me && m->to != me)
            continue;
        p.packed = must_alloc((size_t)p.elements * 2);
        pairs[n_pairs++] = p;
    }
}

static void pack(const struct pair *p, int into_message)
{
    uint16_t *at = p->packed;
    for (int64_t i = p->first; i < p->end; i++) {
        const struct move *m = &job.moves[i];
        uint16_t *mine = in_memory(m->tensor, m->row, m->column);
        int64_t stride = of[m->tensor]->columns;
        if (into_message)
            copy_rows(at, m->columns, mine, stride, m->rows, m->columns);
        else
            copy_rows(mine, stride, at, m->columns, m->rows, m->columns);
        at += m->rows * m->columns;
    }
}

static void point_to_point(void)
{
    int receives = me >= job.n_source;
    for (int i = 0; i < n_pairs; i++) {
        struct pair *p = &pairs[i];
        if (receives) {
            MPI_Irecv(p->packed, (int)p->elements, MPI_UINT16_T, p->other, 1, MPI_COMM_WORLD,
                      &requests[i]);
            continue;
        }
        pack(p, 1);
        MPI_Isend(p->packed, (int)p->elements, MPI_UINT16_T, p->other, 1, MPI_COMM_WORLD,
                  &requests[i]);
    }
    for (int left = n_pairs; left > 0; left--) {
        int i;
        MPI_Waitany(n_pairs, requests, &i, MPI_STATUS_IGNORE);
        if (receives)
            pack(&pairs[i], 0);
    }
}

/* ---- one mode ---- */

static double now_s(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Every pair of ranks talks once, so that connections stand before the clock starts. */
static void meet(void)
{
    char *out = must_alloc((size_t)job.n_ranks), *in = must_alloc((size_t)job.n_ranks);
    MPI_Alltoall(out, 1, MPI_CHAR, in, 1, MPI_CHAR, MPI_COMM_WORLD);
    free(out);
    free(in);
}

static void measure(const char *name, void (*run)(void))
{
    double span[2], all[2];
    int64_t found[2], sum[2];
    if (me >= job.n_source)
        for (int64_t t = 0; t < job.n_tensors; t++)
            if (of[t] != NULL)
                memset(memory + of[t]->place, POISON, (size_t)(of[t]->rows * of[t]->columns) * 2);
    MPI_Barrier(MPI_COMM_WORLD);
    span[0] = -now_s();
    run();
    span[1] = now_s();
    MPI_Reduce(span, all, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    found[0] = found[1] = 0;
    if (me >= job.n_source)
        found[1] = walk(0, &found[0]);
    MPI_Reduce(found, sum, 2, MPI_INT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
    if (me == 0) {
        (void)printf("{\"mode\": \"%s\", \"seconds\": %.6f, \"elements\": %lld, \"wrong\": %lld}\n",
                     name, all[0] + all[1], (long long)sum[0], (long long)sum[1]);
        (void)fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    int n;
    int64_t unused;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    if (argc < 3)
        die("usage: mpi_refit JOB gather-broadcast|point-to-point …");
    read_job(argv[1]);
    if (n != job.n_ranks)
        die("other number of ranks than in the job");
    find_mine();
    if (me < job.n_source)
        (void)walk(1, &unused);
    ready_gather();
    ready_pairs();
    meet();
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "gather-broadcast") == 0)
            measure(argv[i], gather_broadcast);
        else if (strcmp(argv[i], "point-to-point") == 0)
            measure(argv[i], point_to_point);
        else
            die("there is no such mode");
    }
    MPI_Finalize();
    return 0;
}
