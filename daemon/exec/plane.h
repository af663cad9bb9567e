/* Inside of the data plane: what its one loop thread owns. Not for other folders.
 *
 *   hello.c       HELLO: opens the devices, says what they are
 *   budget.c      what is taken of each GPU's memory
 *   watchdog.c    the end of a data plane whose GPU hangs
 *   data_plane.c  the loop: control socket, mailbox, lease, dispatch
 *   worker.c      MAP, BIND, UNBIND: segments and bindings per worker
 *   move.c        boxes of places into kernel copies and fingerprints
 *   scaled.c      cells that are made on reading a source: quantised values and scales
 *   prints.c      fingerprints of a program's cells
 *   proof.c       programs, and what has been proved of them
 *   pump.c        feeds a stream chunk by chunk, a few in flight
 *   errand.c      PUBLISH, CHECK, APPLY: one worker's memory, outside any attempt
 *   attempt.c     PREPARE, START, ABORT: one attempt at one plan
 *   attempt_open.c  what PREPARE proves and allocates
 *   ring.c        staging rings
 *   links.c       an attempt's peers, transport and connections
 *   pairs.c       which devices of the node exchange messages by copies
 *   skips.c       what needs not be sent, told from node to node
 *   copies.c      an attempt's local copies, verify.c: its fingerprints
 *   sample.c      some of its fingerprints by the scalar kernels, sample_scaled.c: of what a place makes
 *   lane.c        an attempt's messages on one device */
#ifndef RS_EXEC_PLANE_H
#define RS_EXEC_PLANE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mailbox.h"
#include "base/queue.h"
#include "device/device.h"
#include "device/fence.h"
#include "exec/budget.h"
#include "exec/watchdog.h"
#include "exec/wire.h"
#include "memory/memory.h"
#include "transport/transport.h"

struct attempt;

enum {
    PLANE_MAX_DEVICES = 64,
    PLANE_MAX_SLOTS = 1024,
    PLANE_MAX_WAYS = 8,
    BOUNCE_BYTES = 1 << 20,
    PLANE_WORK_AMAX = 64,
    PLANE_WORK_BYTES = (5 << 18) + (4 << 14) + 4 * PLANE_WORK_AMAX
};

/* The greatest magnitude of which tensor of which place (place.made; 0: none) is kept. */
struct plane_amax {
    uint64_t made;
    uint32_t tensor;
};

/* What a stream makes scaled cells in (scaled.c), from the first that it makes on. In the stream's
 * order: nobody else reads it. */
struct plane_work {
    uint8_t *memory; /* PLANE_WORK_BYTES of the device; NULL: none yet */
    struct plane_amax amax[PLANE_WORK_AMAX];
};

/* Local copies and fingerprints of a device go several ways at once where there are more cores than
 * devices. */
struct plane_way {
    struct device *device;
    struct device_stream *copy, *check;
    struct plane_work copy_work, check_work;
    uint8_t *bounce; /* of the check stream, BOUNCE_BYTES; NULL until it is needed */
    uint8_t *sample; /* of the check stream (sample.c); the CPU reaches it, too; as above */
};

/* A local device: its streams live as long as the process, its ring and scratch grow on demand and
 * are reused between attempts. */
struct plane_device {
    struct device *device;
    struct device_stream *pack, *net, *unpack;
    struct plane_work pack_work;
    struct plane_way ways[PLANE_MAX_WAYS];
    uint8_t *ring, *scratch;
    bool ring_of_nccl; /* else device_alloc's */
    size_t ring_bytes, scratch_bytes;
    struct attempt *user;                 /* the attempt that may use it */
    struct budget budget;                 /* of a GPU's memory */
    struct transport_counters registered; /* by links that are closed */
};

struct worker_segment {
    uint64_t bytes;
    bool mapped, writable;
    bool imported; /* memory of a GPU */
};

struct worker {
    struct queue link;
    uint64_t id;
    uint32_t device;
    struct worker_segment *segments;
    size_t n_segments, segments_capacity;
    struct binding *bindings[2]; /* by enum wire_memory; NULL: not bound */
    uint64_t bound[2];           /* the number of each binding, that no other one has */
    uint8_t *dtypes[2];
    uint32_t n_tensors;
    unsigned uses; /* attempts and errands that need its memory */
    bool unbinding;
    struct wire_header unbind; /* answered when uses falls to 0 */
    /* The last publication: per tensor in its own dtype, and (where a program came along) per hold
     * of its place in that program. */
    uint64_t *published; /* [n_tensors]; NULL: none */
    uint64_t published_version;
    uint64_t *cell_prints;
    uint32_t n_cell_prints;
    uint8_t cell_digest[16];
};

/* What a communicator has of a GPU's memory. */
struct comm_memory {
    uint64_t bytes;       /* in the device's budget; 0: there is none */
    uint64_t free_before; /* of the GPU, before it was made; 0: not known */
};

/* A model's links to its peers: one transport per epoch, one attempt at a time. */
struct model {
    struct queue link;
    uint64_t id;
    uint64_t epoch;
    struct transport *transport;
    struct transport *network; /* what of it reaches other devices: itself, behind it, or NULL */
    uint32_t n_plan_devices;
    uint32_t plan_device[PLANE_MAX_DEVICES]; /* of each local device; UINT32_MAX: takes no part */
    uint8_t *parts;        /* [n_plan_devices]: here, elsewhere, nowhere (links.c) */
    struct wire_comm comm; /* with nccl over several nodes: the communicator */
    struct comm_memory comm_memory[PLANE_MAX_DEVICES]; /* of the communicator, per local device */
    struct attempt *attempt;
};

struct plane {
    int socket;
    int wake_fd;
    struct mailbox mailbox;
    uint64_t incarnation;
    struct wire_hello hello;
    bool ready;
    struct plane_device *devices;
    uint32_t n_devices;
    uint32_t n_ways; /* of each device */
    /* Per device, bits of others: whose memory it reaches, and they its; with whom it exchanges messages by
     * copies (pairs.h). */
    uint64_t reached[PLANE_MAX_DEVICES], copied[PLANE_MAX_DEVICES];
    struct transport_tcp_node *tcp;   /* NULL: the transport is another one */
    struct transport_nccl_node *nccl; /* NULL: as above; both: the in-memory one */
    struct segment_table *segments;
    struct queue workers, models, errands, proofs;
    struct fence fence;       /* the lease, as the devices' threads see it */
    struct watchdog watchdog; /* with GPUs */
    struct wire_stats past;   /* counters of transports that are closed */
    uint64_t n_made;          /* places that make cells, so far */
    uint64_t n_bound;         /* bindings, so far */
    bool stop;
    bool broken; /* a stream could not be replaced: the process must go */
};

/* --- data_plane.c --- */
/* Answers `request`. A send that fails means the control process is gone: the loop will see it. */
void plane_answer(struct plane *p, const struct wire_header *request, enum wire_type type, int code,
                  const void *body, size_t body_bytes, int fd);
void plane_fail(struct plane *p, const struct wire_header *request, enum wire_type type, int code,
                const struct err *e, uint32_t tensor, uint32_t place);
/* Answers with a table of n u64 in a memfd. */
void plane_answer_table(struct plane *p, const struct wire_header *request, enum wire_type type,
                        const void *body, size_t body_bytes, const uint64_t *table, size_t n);
/* Waits, here and now, for copies that were enqueued and can't be told when they end (the call
 * behind them was refused), and gives the stream a successor. For streams of copies alone. */
void plane_settle(struct plane *p, struct device *d, struct device_stream **stream);
/* False once the lease has run out; and until all that was in flight then has ended, though it was
 * prolonged meanwhile. */
bool plane_lease_holds(struct plane *p);
/* As plane_lease_holds, for something new: a lease that was prolonged counts again where nothing is
 * in flight any more. */
bool plane_may_begin(struct plane *p);
struct model *plane_model(struct plane *p, uint64_t id);

/* --- hello.c --- */
void hello_take(struct plane *p, struct wire_packet *packet);
/* Closes what devices are open. */
void hello_close(struct plane *p);
/* One for each device where they are GPUs; returns how many. */
uint32_t hello_gpu_memory(const struct plane *p, struct wire_gpu_memory *ret);

/* --- worker.c --- */
struct worker *worker_find(struct plane *p, uint64_t id);
void *const *worker_bases(const struct plane *p, const struct worker *w);
void worker_map(struct plane *p, struct wire_packet *packet);
void worker_bind(struct plane *p, struct wire_packet *packet);
void worker_unbind(struct plane *p, struct wire_packet *packet);
void worker_release(struct plane *p, struct worker *w); /* one use less */
void workers_free(struct plane *p);

/* --- sample.c --- */
void sample_memory_free(struct plane_way *way);

/* --- errand.c --- */
void errand_start(struct plane *p, struct wire_packet *packet);
/* Lets those go on whose worker's event has happened; returns when to look again, or UINT64_MAX. */
uint64_t errands_look(struct plane *p);
/* All of them end with RS_ECANCELED once what is in flight is over. */
void errands_stop(struct plane *p);

/* --- attempt.c --- */
void attempt_prepare(struct plane *p, struct wire_packet *packet);
void attempt_start(struct plane *p, struct wire_packet *packet);
void attempt_abort(struct plane *p, struct wire_packet *packet);
/* Fails every attempt (RS_EDEADLINE) and stops its work. */
void attempts_lease_lost(struct plane *p);
/* Stops all work; true once nothing is in flight. */
bool attempts_stop(struct plane *p);
/* Nothing of any attempt is in flight, and nothing will be. */
bool attempts_quiet(const struct plane *p);
/* Sends what PROGRESS is due; returns the monotonic time when the next is, or UINT64_MAX. */
uint64_t attempts_progress(struct plane *p);

/* --- ring.c --- */
/* Grows the ring of a local device that nothing uses; what it held is lost. */
int ring_reserve(struct plane *p, uint32_t device, uint64_t bytes, struct err *e);
void ring_free(struct plane *p, uint32_t device); /* no transport has it any more */
/* With nccl: the model's transport is told of the rings of its devices. */
void ring_tell(const struct plane *p, const struct model *m);

/* --- links.c --- */
void links_close(struct plane *p, struct model *m);
struct wire_stats links_stats(const struct plane *p);
/* Of a device alone, what NCCL has registered and what lay in it: no other field is set. */
struct transport_counters links_registered(const struct plane *p, uint32_t device);

#endif
