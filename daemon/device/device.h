/* A device: memory, streams, events, copies, fingerprints. Asynchronous everywhere.
 *
 * A vtable with two implementations that pass one contract test: device_host.c (shared memory,
 * streams that are threads) and device_cuda.c.
 * Work is enqueued on a stream and runs in order; different streams run at the same time unless an
 * event says otherwise. Enqueueing never blocks on the work; it copies what it is given. Callbacks run on a thread of the device and may only touch what they carry and post to
 * a mailbox.
 *
 * Errors are sticky: after one, device_error gives it, later work is skipped, and completions still
 * come. */
#ifndef RS_DEVICE_DEVICE_H
#define RS_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/process.h"
#include "device/fence.h"
#include "kernels/kernels.h"
#include "kernels/kernels_quantise.h"

struct device;
struct device_stream;
struct device_event;

/* Host device only. All but the fence is 0 in production. Tests make a missing dependency show: each stream
 * waits a seeded random while before each item, and staging memory is filled with a poison byte
 * when allocated and when device_poison is called. */
struct device_host_options {
    uint64_t seed; /* 0: no delays, no poison */
    uint32_t max_delay_us;
    uint32_t fail_at_item; /* the n-th item (1 is the first) makes the device fail; 0: none does */
    /* Not for tests: copies that come to their turn when it is shut are left out, and device_error
     * gives RS_EDEADLINE while it is. NULL: none. Outlives the device. */
    struct fence *fence;
};

enum { DEVICE_POISON = 0xA5 };

int device_host_open(uint32_t local, const struct device_host_options *options, struct device **ret,
                     struct err *e);

/* Not tuned yet: enough loads in flight for the memory's latency, by arithmetic (64 bytes a thread). */
enum { DEVICE_CUDA_BLOCKS = 4 };

/* CUDA device only. */
struct device_cuda_options {
    /* "GPU-<uuid>" or "MIG-<uuid>" in any case, or an index; NULL: the index `local` */
    const char *name;
    uint64_t seed;       /* tests: poison, as above; delays are the stand-in's. 0: none */
    uint32_t max_blocks; /* of a kernel's grid; 0: DEVICE_CUDA_BLOCKS per multiprocessor */
    struct fence *fence; /* as above, looked at when work is handed over */
};

/* backend: "host" or "cuda". The other one's options are not looked at, NULL is fine for either.
 * RS_EINVAL: no such backend. RS_EUNIMPL: not in this build. RS_EPRECOND: it can't run here. Each
 * says what is missing. */
int device_open(const char *backend, uint32_t local, const struct device_host_options *host,
                const struct device_cuda_options *cuda, struct device **ret, struct err *e);
/* For start-up: 0 where `n_devices` devices of the backend can be opened; else as device_open. names:
 * of GPUs (device_cuda_options.name), one for each device, none twice; NULL: the indices 0 … */
int device_backend_check(const char *backend, uint32_t n_devices, const char *const *names,
                         struct err *e);
/* All streams must be freed first. NULL is fine. */
void device_close(struct device *d);
const char *device_kind(const struct device *d); /* "host" */
uint32_t device_local(const struct device *d);

/* Memory of the device itself (staging ring, scratch), aligned to 4096, of a GPU to 256; the CPU can
 * touch only a host device's. RS_EEXHAUSTED names the
 * bytes. */
int device_alloc(struct device *d, size_t bytes, void **ret, struct err *e);
void device_free(struct device *d, void *p, size_t bytes);

/* Maps a segment of a worker by its descriptor (taken on success; closed when it is unmapped at the
 * latest). RS_EINVAL: no bytes, or the file is shorter than `bytes`; RS_EPERM; RS_EEXHAUSTED. */
int device_map(struct device *d, int fd, size_t bytes, bool writable, void **ret, struct err *e);
void device_unmap(struct device *d, void *p, size_t bytes);

/* Memory of the device itself that another process owns, by what that one exported. */
enum device_import_kind { DEVICE_IMPORT_IPC, DEVICE_IMPORT_VMM };
enum { DEVICE_IPC_BYTES = 64 };
/* Of VMM memory that is more than one allocation: one of them, all of it, mapped from its beginning. */
struct device_import_part {
    int fd; /* taken when all have been opened */
    size_t bytes;
};
struct device_import {
    enum device_import_kind kind;
    const uint8_t *handle; /* IPC: DEVICE_IPC_BYTES */
    uint64_t generation;   /* IPC: equal handles of unequal generations are unequal memory */
    const struct process_id *owner; /* IPC: who exported it; NULL: not known */
    void *address;                  /* and where the allocation begins there; NULL: not known */
    int fd;                         /* VMM: taken on success */
    size_t bytes;                   /* the whole allocation's, or all of the parts' */
    const struct device_import_part *parts; /* VMM: these, one behind the other, instead of fd */
    uint32_t n_parts;                       /* 0: there is fd */
};
/* All of it, or nothing. IPC is opened once per (handle, generation) and counted; where this process is the owner, in which a
 * handle can't be opened, the memory is used where it lies. RS_EPRECOND: the device has no memory of its own
 * (host). RS_EINVAL: the owner is gone or has freed it, or it is smaller, on another device, or of a
 * kind that can't be had this way; the text says which, as far as it can be known. RS_EEXHAUSTED:
 * too many are open. */
int device_import(struct device *d, const struct device_import *from, void **ret, struct err *e);
/* The owner may free the memory once this has returned for the last import. Nothing may be in flight.
 * Any thread. */
void device_import_close(struct device *d, enum device_import_kind kind, void *p, size_t bytes);
/* An event that another process exported (cudaIpcGetEventHandle: DEVICE_IPC_BYTES) and has recorded: asked
 * by device_event_done, closed by device_event_free; it is neither recorded nor waited for here.
 * RS_EPRECOND: the device shares none (host). RS_EINVAL: the owner is gone, or this process. */
int device_event_import(struct device *d, const uint8_t *handle, struct device_event **ret,
                        struct err *e);
/* "GPU-<uuid>"; "" for a host device. */
const char *device_name(const struct device *d);

int device_stream_new(struct device *d, const char *name, struct device_stream **ret,
                      struct err *e);
/* Waits for what is enqueued (the thread is joined). */
void device_stream_free(struct device_stream *s);
struct device *device_stream_device(struct device_stream *s);

/* Enqueue. n copies or fingerprints run as one item. RS_ENOMEM (also where too much is queued on
 * the stream already), or the sticky error; nothing is enqueued then. */
int device_copy(struct device_stream *s, const struct kernel_copy *copies, uint32_t n);
int device_fingerprint(struct device_stream *s, const struct kernel_fingerprint *f, uint32_t n);
/* Casts with scales as one item. In order as far as *amax_bits goes; else none may read what another
 * one writes. */
int device_quantise(struct device_stream *s, const struct kernel_quantise *q, uint32_t n);
/* Calls fn(arg) on the stream's thread when all before it is done. It may block only for a
 * transport (transport.h), never for anything the same stream must do. */
int device_call(struct device_stream *s, void (*fn)(void *arg), void *arg);

/* Fills memory with DEVICE_POISON, in the stream's order; does nothing where the device has no
 * seed. For staging slots that were given back: who still reads one will be noticed. */
int device_poison(struct device_stream *s, void *p, size_t bytes);

/* Events: recorded on one stream, waited for by others or asked from outside. An event that was
 * never recorded counts as done. Recording again is allowed once the former record is done. A wait
 * is for the newest record at the time of the call. An event may be freed while records of it and
 * waits for it are still to run. */
int device_event_new(struct device *d, struct device_event **ret);
void device_event_free(struct device_event *ev);
int device_event_record(struct device_event *ev, struct device_stream *s);
int device_event_wait(struct device_stream *s, struct device_event *ev);
bool device_event_done(const struct device_event *ev);

int device_error(const struct device *d, struct err *e);

/* A range of time that a profiler shows, where one is there (NVTX; a stream shows by itself what it hands
 * over, under its name). Any thread may end it. The name is copied. */
uint64_t device_range_start(const struct device *d, const char *name);
void device_range_end(const struct device *d, uint64_t range);

/* --- the vtable (for implementations) --------------------------------------------------------- */

struct device_ops {
    const char *kind;
    void (*close)(struct device *d);
    int (*alloc)(struct device *d, size_t bytes, void **ret, struct err *e);
    void (*free)(struct device *d, void *p, size_t bytes);
    int (*map)(struct device *d, int fd, size_t bytes, bool writable, void **ret, struct err *e);
    void (*unmap)(struct device *d, void *p, size_t bytes);
    /* NULL, all three: no memory of its own */
    int (*import)(struct device *d, const struct device_import *from, void **ret, struct err *e);
    void (*import_close)(struct device *d, enum device_import_kind kind, void *p, size_t bytes);
    const char *(*name)(const struct device *d);
    int (*stream_new)(struct device *d, const char *name, struct device_stream **ret,
                      struct err *e);
    void (*stream_free)(struct device_stream *s);
    int (*copy)(struct device_stream *s, const struct kernel_copy *copies, uint32_t n);
    int (*fingerprint)(struct device_stream *s, const struct kernel_fingerprint *f, uint32_t n);
    int (*quantise)(struct device_stream *s, const struct kernel_quantise *q, uint32_t n);
    int (*call)(struct device_stream *s, void (*fn)(void *arg), void *arg);
    int (*poison)(struct device_stream *s, void *p, size_t bytes);
    int (*event_new)(struct device *d, struct device_event **ret);
    void (*event_free)(struct device_event *ev);
    /* NULL: it shares none */
    int (*event_import)(struct device *d, const uint8_t *handle, struct device_event **ret,
                        struct err *e);
    int (*event_record)(struct device_event *ev, struct device_stream *s);
    int (*event_wait)(struct device_stream *s, struct device_event *ev);
    bool (*event_done)(const struct device_event *ev);
    int (*error)(const struct device *d, struct err *e);
    /* NULL, both: no profiler */
    uint64_t (*range_start)(const struct device *d, const char *name);
    void (*range_end)(const struct device *d, uint64_t range);
};

/* First member of every implementation's struct. */
struct device {
    const struct device_ops *ops;
    uint32_t local;
};
struct device_stream {
    struct device *device;
};
struct device_event {
    struct device *device;
};

#endif
