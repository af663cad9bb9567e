/* Messages between the control process and its data plane child, over a SOCK_SEQPACKET pair.
 *
 * Each is one packet: struct wire_header, then the body named below, then (where it says so) a
 * table; descriptors ride along in SCM_RIGHTS. Large things (programs, bindings, fingerprints)
 * travel in sealed memfds. Host order; both ends are the same binary, which the HELLO proves
 * (protocol number). Every message carries the data plane's incarnation; messages about an attempt
 * carry model, epoch and attempt, and one that is not of the current attempt is answered
 * WIRE_FAILED (RS_EABORTED) or dropped.
 *
 *   control → data plane               data plane → control
 *   HELLO   devices, ring, backend     READY (data port, what GPUs there are) | FAILED
 *   MAP     worker, segment [+ fds]    MAPPED (code)
 *   BIND    worker, memory + 2 fds     BOUND (code)
 *   UNBIND  worker                     UNBOUND, once nothing of it is in flight or mapped
 *   PUBLISH worker [+ fd program]      PUBLISHED + fd: u64 fingerprint per tensor of its layout
 *   COMM_ID                            COMM_ID_MADE | FAILED: names a communicator, once
 *   PREPARE places + 2 to 6 fds        PREPARED [+ fd: u64 per hold] | FAILED
 *   START                              PROGRESS*, then STAGED + fd: u64 per hold, or FAILED
 *   APPLY   worker, version            APPLIED + fd: u64 fingerprint per tensor | FAILED
 *   CHECK   worker, memory             CHECKED + fd: u64 fingerprint per tensor | FAILED
 *   ABORT                              QUIESCED [+ fd: what has landed]: no byte of the attempt
 *                                      moves any more
 *   LEASE   until                      –
 *   STATS                              COUNTED: counters since the process began
 *   STOP                               the socket closes
 *
 * `request` pairs an answer with its question; PROGRESS and what ends a START carry START's. A
 * FAILED attempt accepts ABORT only; QUIESCED forgets it. A lease that has run out drops every
 * attempt, as ABORT would, and fails it (RS_EDEADLINE); the threads that move bytes look at it
 * themselves, before each chunk. The end of the socket is the end of the
 * other side: the data plane then drops everything and exits. */
#ifndef RS_EXEC_WIRE_H
#define RS_EXEC_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/err.h"
#include "base/process.h"
#include "base/random.h"

#define WIRE_PROTOCOL UINT32_C(6)
enum {
    WIRE_MAX_BYTES = 64 * 1024,
    WIRE_MAX_FDS = 252, /* the kernel's most is 253: one more can be told from all that are ours */
    WIRE_TEXT_BYTES = 1024,
    WIRE_ADDRESS_BYTES = 64,
    WIRE_NAME_BYTES = 64,
    WIRE_TOKEN_BYTES = 16,
    WIRE_HANDLE_BYTES = 64, /* of a CUDA IPC handle */
    WIRE_DEVICE_NAME_BYTES = 48,
    WIRE_COMM_ID_BYTES = 128,
    WIRE_FABRIC_BYTES = 48,
    WIRE_HOW_BYTES = 96,
    WIRE_LOCAL_BYTES = 128,
    WIRE_MAX_PEERS = 4096
};

enum wire_type {
    WIRE_HELLO = 1,
    WIRE_READY,
    WIRE_MAP,
    WIRE_MAPPED,
    WIRE_BIND,
    WIRE_BOUND,
    WIRE_UNBIND,
    WIRE_UNBOUND,
    WIRE_PUBLISH,
    WIRE_PUBLISHED,
    WIRE_PREPARE,
    WIRE_PREPARED,
    WIRE_START,
    WIRE_PROGRESS,
    WIRE_STAGED,
    WIRE_APPLY,
    WIRE_APPLIED,
    WIRE_CHECK,
    WIRE_CHECKED,
    WIRE_ABORT,
    WIRE_QUIESCED,
    WIRE_LEASE,
    WIRE_STATS,
    WIRE_COUNTED,
    WIRE_STOP,
    WIRE_FAILED,
    WIRE_COMM_ID,
    WIRE_COMM_ID_MADE
};

enum wire_memory { WIRE_LIVE, WIRE_SHADOW };
enum wire_verify { WIRE_VERIFY_OFF, WIRE_VERIFY_SAMPLED, WIRE_VERIFY_FULL };

struct wire_header {
    uint32_t protocol; /* wire_send fills it in */
    uint32_t type;     /* enum wire_type */
    uint64_t incarnation;
    uint64_t request;
    uint64_t model; /* 0 where not about a model */
    uint64_t epoch;
    uint64_t attempt;
    uint64_t version;
    uint64_t worker;     /* 0 where not about a worker */
    uint32_t body_bytes; /* all that follows the header: body and table; wire_send fills it in */
    int32_t code;        /* answers: 0 or RS_E… */
};

/* With backend "cuda" char [n_devices][WIRE_DEVICE_NAME_BYTES] may follow: which GPU each device is
 * (device_cuda_options.name). */
struct wire_hello {
    uint32_t n_devices;
    uint32_t ring_slots;
    uint64_t slot_bytes;
    uint64_t host_seed; /* device_host_options.seed and delays: tests */
    uint32_t host_max_delay_us;
    uint32_t n_threads; /* copy threads over all host devices, at least one each; 0: cores */
    double network_bytes_per_s; /* the transport's rate limits; 0: none */
    double domain_bytes_per_s;
    uint32_t host_fail_device; /* tests: this device fails at its n-th item; 0: none does */
    uint32_t host_fail_at_item;
    char backend[16];   /* "host" */
    char transport[16]; /* "memory", "tcp"; "": memory */
    /* With "tcp": where it listens for the data planes of other nodes. Numeric, v4 or v6; "":
     * 127.0.0.1. An address that this machine has not: FAILED, naming it. */
    char data_address[WIRE_ADDRESS_BYTES];
    uint16_t data_port; /* 0: one that the kernel picks */
    uint16_t reserved;
    uint32_t silence_ms;  /* a peer of which nothing is heard so long is given up; 0: the default */
    uint32_t streams;     /* connections per pair of devices; 0: the default */
    uint32_t max_ctas;    /* of a communicator on each GPU; 0: the default */
    uint32_t max_blocks;  /* of a kernel's grid; 0: the default */
    uint32_t local_pairs; /* enum wire_local */
    uint64_t max_gpu_memory_bytes; /* that may be taken of each GPU (budget.h); 0: no limit */
};

/* How messages between two devices of this node go: by device copies, where the devices reach each other's
 * memory and no rates are set that the transport has to keep; or all by the transport. */
enum wire_local { WIRE_LOCAL_COPY, WIRE_LOCAL_TRANSPORT };

/* The body of READY; followed by char [n_devices][WIRE_DEVICE_NAME_BYTES]: "GPU-<uuid>", "" of host
 * devices. */
struct wire_ready {
    uint16_t data_port; /* really bound; 0 where the transport is none that listens */
    uint16_t reserved;
    uint32_t n_devices;           /* that follow */
    int32_t nccl_version;         /* as 22809; 0: none */
    int32_t cuda_version;         /* of the runtime, as 13000; 0: none */
    char how[WIRE_HOW_BYTES];     /* the domains were found, in words */
    char local[WIRE_LOCAL_BYTES]; /* how messages between devices of this node go, in words */
};

/* Follows READY, for each of its devices (device/device_domains.h). */
struct wire_ready_device {
    char name[WIRE_DEVICE_NAME_BYTES];
    char fabric[WIRE_FABRIC_BYTES];
    uint32_t island;
    int32_t numa_node; /* that its pinned memory is asked for from; -1: none */
};

enum wire_segment_kind {
    WIRE_SEGMENT_MEMFD,
    WIRE_SEGMENT_CUDA_IPC,
    WIRE_SEGMENT_CUDA_VMM,
    WIRE_SEGMENT_CUDA_VMM_PARTS
};

/* With one descriptor; with none of kind CUDA_IPC; of kind CUDA_VMM_PARTS with one for each VMM allocation, in the order of
 * their addresses, and behind this u64 [their number]: the bytes of each, allocation_bytes together. */
struct wire_map {
    uint64_t bytes;
    uint32_t segment; /* the worker's own number */
    uint32_t device;  /* local */
    uint32_t writable;
    uint32_t kind; /* enum wire_segment_kind */
    /* Of a GPU's memory: the segment is offset … offset + bytes of an allocation (memory_socket.h). */
    uint64_t offset, allocation_bytes;
    uint64_t generation; /* CUDA_IPC: tells allocations apart whose handles are equal */
    uint8_t handle[WIRE_HANDLE_BYTES];
    /* CUDA_IPC: who exported it, and where the allocation begins there. A data plane in that process takes it as it lies. */
    struct process_id owner;
    uint64_t address; /* 0: not known */
};

/* fd 0: the encoded binding (memory/memory.h); fd 1: one byte per tensor of the worker's layout,
 * its dtype. Live and shadow are bound by one message each. */
struct wire_bind {
    uint32_t device;
    uint32_t memory; /* enum wire_memory */
    uint32_t n_tensors;
    uint32_t reserved;
};

/* With a program (fd 0) the fingerprints are taken by the cells that `place` holds there, and kept
 * for the PREPARE of a program with the same digest: one pass for both. */
struct wire_publish {
    uint32_t has_program;
    uint32_t place; /* index into program.places: this worker */
    /* Nothing is read before this event of the worker has happened, for which it is waited `event_ms`. */
    uint32_t has_event;
    uint32_t event_ms;
    uint32_t unread; /* nothing is fingerprinted: only the event is waited for */
    uint32_t reserved;
    uint8_t event[WIRE_HANDLE_BYTES]; /* as its owner exported it */
};

/* Followed by n_places struct wire_place, in the order of program.places. Descriptors, in this
 * order, those in brackets only where the flag is set:
 *
 *   program     plan_program
 *   index       u32 [n_layouts][program.n_tensors]: the index in destination layout l
 *               (program_place.layout) of program tensor t, UINT32_MAX where it has none
 *   [held]      one byte per program hold, 1 where that (destination) place already holds the
 *               content: such cells are not moved, but verified
 *   [peers]     the other nodes that take part: struct wire_peers and what follows it. Without it
 *               all devices that the program's streams name must be local
 *   [skips]     what the other nodes hold already (exec/skips.h): the items of this node's sending
 *               streams that their receivers need not. Made on each receiving node, by skips_encode
 *               from its own program and held table; the blobs of several nodes may be put one
 *               behind the other, and a node ignores what is about streams that it does not send.
 *               Both ends leave the marked items out of their messages, and messages of nothing
 *               else altogether. Where one end was told and the other was not, the attempt fails (RS_EPROTO); nothing
 *               lands where it should not.
 *
 *   [comm]      transport nccl with peers: struct wire_comm and what follows it
 *
 * With peers, PREPARED comes once all outgoing connections (with nccl: the communicator) stand (tried again until the deadline,
 * since the other side may prepare later); else FAILED names device, node and address. Unless verification is off, PREPARED
 * then brings fd 0: u64 [n_holds], of each source hold that is fingerprinted the value with which everything that is sent of
 * it will be compared as it leaves, as STAGED tells it again; 0 of all others. */
struct wire_prepare {
    uint64_t deadline_ns; /* monotonic */
    uint32_t n_places;
    uint32_t verify; /* enum wire_verify */
    uint32_t has_held;
    uint32_t n_layouts;
    uint32_t has_peers;
    uint32_t has_skips;
    uint32_t has_comm;
    uint32_t reserved;
};

/* One node that takes part, as this one reaches it. The token is of this attempt and this pair of
 * nodes, the same at both ends: a new connection from device a to device b shows it, and it is
 * taken once for each (model, epoch, attempt, a, b, stream). Connections of earlier attempts of the
 * epoch go on without it. */
struct wire_peer {
    char address[WIRE_ADDRESS_BYTES]; /* numeric */
    char name[WIRE_NAME_BYTES];       /* of the node, for errors; may be "" */
    uint8_t token[WIRE_TOKEN_BYTES];
    uint16_t port;
    uint16_t reserved;
    uint32_t reserved2;
};

/* Followed by n_peers struct wire_peer, then u32 [n_devices]: for each of the plan's devices the
 * peer that has it; UINT32_MAX: it is here, or takes no part. */
struct wire_peers {
    uint32_t n_peers;
    uint32_t n_devices; /* = program.n_plan_devices */
};

/* The communicator of an attempt over several nodes. Where the model's stands with this id it is used
 * again, else it is ended and one with this id takes its place: each data plane does so on its own.
 * Followed by a byte for each of the plan's devices: 1 where it takes part (comm ranks are given to those in
 * their order); then u32 [n_excluded]: with `parent`, the communicator that stands here, those of its ranks that
 * have left. It is shrunk by them then, and the id is for where that fails. */
struct wire_comm {
    uint8_t id[WIRE_COMM_ID_BYTES];
    uint8_t parent[WIRE_COMM_ID_BYTES];
    uint32_t n_devices;  /* = program.n_plan_devices */
    uint32_t n_excluded; /* 0: there is no parent */
};

/* The body of COMM_ID_MADE. This process must live until all have joined. */
struct wire_comm_id {
    uint8_t id[WIRE_COMM_ID_BYTES];
};

struct wire_place {
    uint64_t worker; /* 0 for scratch */
    uint32_t memory; /* enum wire_memory */
    uint32_t reserved;
};

struct wire_check {
    uint32_t memory; /* enum wire_memory */
    uint32_t reserved;
};

struct wire_lease {
    uint64_t until_ns; /* CLOCK_MONOTONIC; 0: no lease is kept (tests, tools) */
};

/* The body of PROGRESS and STAGED. */
struct wire_progress {
    uint64_t total_bytes; /* to land at this node's destinations, held ones left out */
    uint64_t done_bytes;
    uint64_t network_bytes, domain_bytes,
        device_bytes; /* so far, payload received by local devices */
    /* CLOCK_MONOTONIC; 0: not yet. first_byte_ns: the first copy was given to its device, or the transport's first byte moved,
     * in or out (transport.h). sources_read_ns: all that is sent of sources has left, and was what PREPARED had told. */
    uint64_t first_byte_ns, last_byte_ns, sources_read_ns, verified_ns;
    uint64_t messages;                              /* received by local devices */
    uint64_t skipped_bytes;                         /* not moved, since they were held already */
    uint64_t network_sent_bytes, domain_sent_bytes; /* so far, payload sent by local devices */
    uint64_t stale_frames; /* so far: came, or were left, of an attempt that is over */
};

/* The body of COUNTED: since the process began, over all models. With backend "cuda" followed by struct
 * wire_gpu_memory [n_devices]. */
struct wire_stats {
    uint64_t network_sent_bytes, network_received_bytes; /* payload */
    uint64_t domain_sent_bytes, domain_received_bytes;
    uint64_t messages; /* both ends */
    uint64_t stale_frames;
    uint64_t refused;                              /* connections of strangers, let go */
    uint64_t connections;                          /* that stand now, both ways */
    uint64_t connected;                            /* made so far, both ways */
    uint64_t registrations, refused_registrations; /* of rings, by NCCL, so far */
    uint64_t shrunk, shrinks_failed;               /* communicators, one of each device */
};

/* Of one GPU: what the data plane has taken, by part (budget.h), and what it has open of its workers. */
struct wire_gpu_memory {
    uint64_t limit_bytes; /* 0: none */
    uint64_t context_bytes, communicator_bytes, work_bytes, ring_bytes, scratch_bytes;
    uint64_t worker_bytes; /* mapped, live and shadow: the workers' own, not counted above */
    uint64_t free_bytes, total_bytes;                 /* of the GPU; 0: it does not say */
    uint32_t context_measured, communicator_measured; /* 0: estimated */
    uint64_t peak_bytes;                              /* greatest sum of the parts so far */
    /* By NCCL: of the ring, so far, but for registered_bytes, which is now; hits are messages that lay in it. */
    uint64_t registrations, refused_registrations, registered_bytes, hits, hit_bytes;
};

/* The body of QUIESCED, where the attempt was here and had started (one that was answered STAGED is
 * not: all of its holds have landed, with the fingerprints that STAGED told); fd 0: u64 [n_holds], then u8
 * [n_holds] enum wire_landed. The u64 is the fingerprint of a destination hold that is WIRE_READ,
 * else 0. What is marked may be told as held in the next PREPARE of the same content. */
struct wire_quiesced {
    uint32_t n_holds;
    uint32_t reserved;
};
enum wire_landed {
    WIRE_MISSING,
    WIRE_LANDED, /* whole, but not read back (verification off or not that far), or told as held */
    WIRE_READ    /* read back, and equal to its source where that is on this node */
};

/* The body of WIRE_FAILED and of answers with code != 0. tensor, box, place: the blame, where there
 * is one. */
struct wire_failure {
    uint32_t tensor; /* of an attempt: index in the source layout; else in the worker's own;
                        UINT32_MAX: none */
    uint32_t place;  /* index into program.places; UINT32_MAX: none */
    char text[WIRE_TEXT_BYTES];
};

/* True for the one in 16 cells that WIRE_VERIFY_SAMPLED fingerprints: the same cells on all nodes.
 * Holds that are not fingerprinted have 0 in STAGED's table. */
static inline bool wire_sampled(const uint8_t plan_digest[16], uint64_t cell_id)
{
    uint64_t seed;
    memcpy(&seed, plan_digest, sizeof(seed));
    seed ^= cell_id;
    return random_next(&seed) % 16 == 0;
}

/* One received packet. fds beyond what the receiver takes (sets to -1) are closed by
 * wire_packet_close. */
struct wire_packet {
    struct wire_header header;
    const void *body; /* in `data` */
    int fds[WIRE_MAX_FDS];
    uint32_t n_fds;
    uint8_t data[WIRE_MAX_BYTES];
};

/* Sends one packet (blocks only for socket buffer space). fds are not closed. RS_EPEER: the other
 * side is gone. */
int wire_send(int socket, const struct wire_header *h, const void *body, size_t body_bytes,
              const void *table, size_t table_bytes, const int *fds, uint32_t n_fds, struct err *e);
/* Receives one packet: 0; 1 nothing there now (non-blocking socket); RS_EPEER closed; RS_EPROTO
 * malformed. */
int wire_receive(int socket, struct wire_packet *ret, struct err *e);
void wire_packet_close(struct wire_packet *p);
const char *wire_type_name(uint32_t type);

/* A sealed memfd with these bytes; the descriptor, or RS_E…. */
int wire_memfd(const char *name, const void *data, size_t n_bytes, struct err *e);
/* Maps a received memfd read-only (checks that it is sealed). munmap by wire_unmap. fd stays the
 * caller's. */
int wire_map_fd(int fd, const void **ret_data, size_t *ret_n_bytes, struct err *e);
void wire_unmap(const void *data, size_t n_bytes);

#endif
