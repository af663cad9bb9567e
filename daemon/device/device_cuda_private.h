/* What the files of the CUDA device share. Private to device_cuda*.c.
 *
 * device_cuda.c opens, closes and names devices; device_cuda_memory.c has memory, its own and
 * workers'; device_cuda_stream.c streams and events; device_cuda_ranges.c what profilers see; device_cuda_launch.c what streams hand to the
 * GPU, device_cuda_quantise.c casts with scales.
 *
 * Threads: each stream's own hands items to CUDA; CUDA's own thread runs sums_land. Locks: a
 * stream's guard its queue and its sum blocks, an event's its counters, the device's the sticky
 * error, the open handles and spans; an event's may be held while CUDA is called, none while another of
 * ours is taken. */
#ifndef RS_DEVICE_DEVICE_CUDA_PRIVATE_H
#define RS_DEVICE_DEVICE_CUDA_PRIVATE_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "device/device_cuda.h"
#include "device/items.h"
#include "kernels/kernels_cuda.h"

enum { CUDA_SUM_BLOCKS = 32 /* per stream: launches with fingerprints in flight */ };

struct open_handle {
    uint8_t handle[DEVICE_CUDA_IPC_BYTES];
    uint64_t generation;
    void *base;
    uint32_t n_users;
    bool own; /* this process's memory, at its own address: nothing was opened */
};

/* VMM memory as it was mapped, which is how it must be unmapped. */
struct open_span {
    void *base;
    size_t bytes;
    uint32_t n_parts;
    size_t part_bytes[];
};

struct device_cuda {
    struct device base;
    struct device_cuda_options options;
    int ordinal;
    uint32_t max_blocks;
    uint64_t context_bytes; /* 0: not known */
    int numa_node;          /* -1: none */
    char uuid[DEVICE_CUDA_NAME_BYTES];
    atomic_uint n_streams;
    atomic_bool failed; /* error.code != 0, readable without the lock */
    pthread_mutex_t mutex;
    struct err error;
    struct open_handle *handles;
    size_t n_handles, handles_capacity;
    struct open_span **spans;
    size_t n_spans, spans_capacity;
};

/* The fingerprints of one launch on their way back. */
struct sum_block {
    struct cuda_stream *stream;
    uint64_t *on_device, *on_host; /* KERNEL_BATCH_TASKS each */
    uint64_t *targets[KERNEL_BATCH_TASKS];
    uint32_t n;
    bool busy;
};

struct cuda_stream {
    struct device_stream base;
    struct items items;
    cudaStream_t cuda;
    cudaEvent_t marker; /* what device_call waits for */
    bool dirty;         /* handed over since the marker was last waited for; the thread's own */
    pthread_mutex_t sums_mutex;
    pthread_cond_t landed; /* a sum block was given back */
    uint64_t *sums_on_device, *sums_on_host;
    struct sum_block blocks[CUDA_SUM_BLOCKS];
    struct kernel_batch copies, sums; /* being filled; the thread's own */
    struct sum_block *block;          /* that `sums` adds to */
    bool sums_write;                  /* some task of `sums` is a copy, too */
    uint64_t *target;                 /* of the copy that is being cut */
};

static inline struct device_cuda *cuda_of(const struct device *d)
{
    return container_of((struct device *)(uintptr_t)d, struct device_cuda, base);
}

static inline struct cuda_stream *cuda_stream_of(struct device_stream *s)
{
    return container_of(s, struct cuda_stream, base);
}

/* --- device_cuda.c ---------------------------------------------------------------------------- */

static inline bool cuda_failed(const struct device_cuda *c)
{
    return atomic_load(&c->failed);
}
int cuda_code_of(cudaError_t code);
/* Sets the text of what a call said; gives its code. */
int cuda_said(const struct device_cuda *c, cudaError_t code, const char *what, struct err *e);
/* True where the call went well; else the device has failed. */
bool cuda_good(struct device_cuda *c, cudaError_t code, const char *what);
int cuda_error(const struct device *d, struct err *e);

/* --- device_cuda_memory.c --------------------------------------------------------------------- */

int cuda_alloc(struct device *d, size_t bytes, void **ret, struct err *e);
void cuda_free(struct device *d, void *p, size_t bytes);
int cuda_map(struct device *d, int fd, size_t bytes, bool writable, void **ret, struct err *e);
void cuda_unmap(struct device *d, void *p, size_t bytes);

/* --- device_cuda_import.c --------------------------------------------------------------------- */

int cuda_import(struct device *d, const struct device_import *from, void **ret, struct err *e);
void cuda_import_close(struct device *d, enum device_import_kind kind, void *p, size_t bytes);
/* With the device: what is open still. */
void cuda_import_close_all(struct device_cuda *c);

/* --- device_cuda_stream.c --------------------------------------------------------------------- */

int cuda_stream_new(struct device *d, const char *name, struct device_stream **ret, struct err *e);
void cuda_stream_free(struct device_stream *s);
/* Takes the item, also on failure; item NULL is RS_ENOMEM. */
int cuda_enqueue(struct device_stream *s, struct item *item);
int cuda_call(struct device_stream *s, void (*fn)(void *arg), void *arg);
int cuda_event_new(struct device *d, struct device_event **ret);
void cuda_event_free(struct device_event *ev);
int cuda_event_import(struct device *d, const uint8_t *handle, struct device_event **ret,
                      struct err *e);
int cuda_event_record(struct device_event *ev, struct device_stream *s);
int cuda_event_wait(struct device_stream *s, struct device_event *ev);
bool cuda_event_done(const struct device_event *ev);

/* --- device_cuda_ranges.c --------------------------------------------------------------------- */

/* Around what a thread does; nested. */
void cuda_range_push(const char *name);
void cuda_range_pop(void);
uint64_t cuda_range_start(const struct device *d, const char *name);
void cuda_range_end(const struct device *d, uint64_t range);

/* --- device_cuda_launch.c --------------------------------------------------------------------- */

int cuda_copy(struct device_stream *s, const struct kernel_copy *copies, uint32_t n);
int cuda_fingerprint(struct device_stream *s, const struct kernel_fingerprint *f, uint32_t n);
int cuda_poison(struct device_stream *s, void *p, size_t bytes);
/* A stream's sum blocks; on the device that is current. Closing is for what opening left, too, and
 * with nothing in flight. */
cudaError_t cuda_sums_open(struct cuda_stream *s);
void cuda_sums_close(struct cuda_stream *s);
/* For one launch with fingerprints: a block is taken, its targets and n are set, and between clear
 * and fetch the launch adds to on_device. Waits for a launch to end where all blocks are in flight.
 * NULL: the device failed, and they may never come back. */
struct sum_block *cuda_sums_take(struct cuda_stream *s);
bool cuda_sums_clear(struct cuda_stream *s, const struct sum_block *b);
/* Gives the block back, sooner or later. */
void cuda_sums_fetch(struct cuda_stream *s, struct sum_block *b, bool launched);
/* Work after a failure, and what would write behind the fence, is skipped. */
bool cuda_skips(const struct cuda_stream *s);

/* --- device_cuda_quantise.c ------------------------------------------------------------------- */

int cuda_quantise(struct device_stream *s, const struct kernel_quantise *q, uint32_t n);

#endif
