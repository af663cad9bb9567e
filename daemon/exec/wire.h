/* Messages between the control process and its data plane child, over a SOCK_SEQPACKET pair.
 *
 * Each is one packet: struct wire_header, then the body named below, then (where it says so) a
 * table; descriptors ride along in SCM_RIGHTS. Large things (programs, bindings, fingerprints)
 * travel in sealed memfds. Host order; both ends are the same binary, which the HELLO proves
 * (protocol number). Every message carries the data plane's incarnation; messages about an attempt
 * carry model, epoch and attempt, and one that is not of the current attempt is answered
 * WIRE_FAILED (RS_EABORTED) or dropped.
 *
 *   control → data plane                         data plane → control
 *   HELLO   devices, ring, backend               READY | FAILED
 *   MAP     worker, segment, bytes + fd          MAPPED  (code)
 *   BIND    worker, device, memory + fd table    BOUND   (code)
 *   UNBIND  worker                               UNBOUND after everything of it is unmapped
 *   PUBLISH worker, version [+ fd program]       PUBLISHED + fd: u64 fingerprint per tensor of its
 * layout PREPARE attempt, places + fd program         PREPARED | FAILED START   attempt PROGRESS*,
 * (STAGED + fd: u64 per program hold | FAILED) APPLY   worker, version                      APPLIED
 * + fd: u64 fingerprint per tensor | FAILED CHECK   worker, memory                       CHECKED +
 * fd: u64 fingerprint per tensor | FAILED ABORT   attempt                              QUIESCED
 *   LEASE   until (monotonic ns)                 –
 *   STOP                                         the socket closes
 *
 * `request` pairs an answer with its question. The end of the socket is the end of the other side:
 * the data plane then drops everything and exits. */
#ifndef RS_EXEC_WIRE_H
#define RS_EXEC_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

#define WIRE_PROTOCOL UINT32_C(1)
enum { WIRE_MAX_BYTES = 64 * 1024, WIRE_MAX_FDS = 2, WIRE_TEXT_BYTES = 1024 };

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
    WIRE_STOP,
    WIRE_FAILED
};

enum wire_memory { WIRE_LIVE, WIRE_SHADOW };
enum wire_verify { WIRE_VERIFY_OFF, WIRE_VERIFY_SAMPLED, WIRE_VERIFY_FULL };

struct wire_header {
    uint32_t protocol;
    uint32_t type; /* enum wire_type */
    uint64_t incarnation;
    uint64_t request;
    uint64_t model; /* 0 where not about a model */
    uint64_t epoch;
    uint64_t attempt;
    uint64_t version;
    uint64_t worker; /* 0 where not about a worker */
    uint32_t body_bytes;
    int32_t code; /* answers: 0 or RS_E… */
};

struct wire_hello {
    uint32_t n_devices;
    uint32_t ring_slots;
    uint64_t slot_bytes;
    uint64_t host_seed; /* device_host_options.seed and delays: tests */
    uint32_t host_max_delay_us;
    uint32_t n_threads;         /* copy threads over all host devices; 0: as many as cores */
    double network_bytes_per_s; /* in-memory transport's rate limits; 0: none */
    double domain_bytes_per_s;
    char backend[16]; /* "host" */
};

struct wire_map {
    uint64_t bytes;
    uint32_t segment; /* the worker's own number */
    uint32_t device;  /* local */
    uint32_t writable;
    uint32_t reserved;
};

/* fd 0: the encoded binding (memory/memory.h); fd 1: one byte per tensor of the worker's layout, its dtype.
 * Live and shadow are bound by one message each. */
struct wire_bind {
    uint32_t device;
    uint32_t memory; /* enum wire_memory */
    uint32_t n_tensors;
    uint32_t reserved;
};

/* Followed by n_places struct wire_place, in the order of program.places. fd 0: the program. */
struct wire_prepare {
    uint64_t deadline_ns; /* monotonic */
    uint32_t n_places;
    uint32_t verify; /* enum wire_verify */
    /* Retry: skip the cells whose destination already holds this content: fd 1 is a bitmap over
     * program.holds (1: already there). Absent: none. */
    uint32_t has_held;
    uint32_t rehearsal; /* 1: move coordinates instead of weights */
};

struct wire_place {
    uint64_t worker; /* 0 for scratch */
    uint32_t memory; /* enum wire_memory */
    uint32_t reserved;
};

struct wire_progress {
    uint64_t total_bytes; /* landed bytes of this node's destinations */
    uint64_t done_bytes;
    uint64_t network_bytes, domain_bytes,
        device_bytes; /* so far, payload received by local devices */
    uint64_t first_byte_ns, last_byte_ns, sources_read_ns,
        verified_ns; /* CLOCK_MONOTONIC; 0: not yet */
    uint64_t messages;
    uint64_t skipped_bytes; /* not moved, since they were held already */
};

/* The body of WIRE_FAILED and of answers with code != 0. tensor, box, place: the blame, where there
 * is one. */
struct wire_failure {
    uint32_t tensor; /* index in the source layout; UINT32_MAX: none */
    uint32_t place;  /* index into program.places; UINT32_MAX: none */
    char text[WIRE_TEXT_BYTES];
};

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
