/* The daemon's end of the memory socket (memory/memory_socket.h): clients, who they are, and their segments.
 *
 * A client is one connection: who it is comes from the kernel (SO_PEERCRED, pidfd), and it ends with its connection or
 * its process, whichever is first. The token that it is given is its identity on the gRPC socket. A segment belongs to
 * its client; workers borrow it (segment_use) and the data plane maps it (segment_mapped), and its descriptor is
 * closed when neither is left and the client dropped it or ended. Loop thread only. */
#ifndef RS_SERVICE_MEMORY_SERVER_H
#define RS_SERVICE_MEMORY_SERVER_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "base/err.h"
#include "base/process.h"
#include "base/queue.h"
#include "memory/memory_socket.h"
#include "service/config.h"
#include "service/memory_parts.h"

struct memory_server;
struct memory_client;

struct segment {
    struct queue in;              /* its client's list; a list of its own once dropped */
    struct memory_client *client; /* NULL: the client has ended or dropped it */
    uint64_t id;
    uint64_t bytes;
    uint64_t memory; /* equal numbers: the same memory, handed over more than once, from */
    uint64_t offset; /* … on */
    int fd;          /* -1: none (CUDA_IPC, CUDA_VMM_PARTS) */
    /* CUDA_VMM_PARTS: each allocation and its descriptor. CUDA_VMM: the one that there is; no descriptor here. */
    struct memory_part *parts;
    int *part_fds;
    uint32_t n_parts;
    struct memory_place
        place; /* CUDA_VMM and CUDA_VMM_PARTS: of the parts, what `memory` and `offset` come from */
    uint32_t kind; /* enum memory_segment_kind */
    struct memory_device
        device; /* of a GPU's memory, its texts ended; `local` is the node's number */
    struct process_id
        owner; /* CUDA_IPC: the client's, by the kernel; names none where it can't be told */
    bool writable;
    uint32_t n_uses;   /* workers that are attached with it */
    uint32_t n_mapped; /* workers for which the data plane has, or may have, it mapped */
    bool dropping;     /* a SEGMENT_DROP waits for n_mapped to reach 0 */
    uint64_t drop_request;
};

struct memory_client {
    struct queue in; /* the server's list */
    struct memory_server *server;
    uint64_t id; /* never repeats in one start of the daemon */
    uint32_t uid;
    int32_t pid; /* 0: in a pid namespace that can't be seen from here */
    char token[40];
};

/* Listens on "<socket>.mem"; the caller holds the lock beside the gRPC socket. ended: a client is going; its workers'
 * leases end now (its segments are still there during the call). RS_EEXIST: something that is no socket is there. */
int memory_server_start(uv_loop_t *loop, const struct config *config, uint64_t incarnation,
                        void (*ended)(void *arg, struct memory_client *client), void *arg,
                        struct memory_server **ret, struct err *e);
/* Who knows the node's number of a GPU by its name: 0, RS_ENOTFOUND, RS_EUNAVAIL. Without it all segments of GPUs are
 * refused. */
void memory_server_devices(struct memory_server *s,
                           int (*device_of)(void *arg, const char *name, uint32_t *ret,
                                            struct err *e),
                           void *arg);
/* Ends all clients, unlinks the socket if it is still ours; done runs once and the server is freed after it. */
void memory_server_stop(struct memory_server *s, void (*done)(void *arg), void *arg);

/* The client of a token, or NULL. Compares in constant time. */
const struct memory_client *memory_server_find(const struct memory_server *s, const char *token);
const struct memory_client *memory_server_client(const struct memory_server *s, uint64_t id);
uint32_t memory_server_n_clients(const struct memory_server *s);
/* The segment of that id that this client handed over, or NULL. */
struct segment *memory_client_segment(const struct memory_client *c, uint64_t segment);

/* Workers attach with a segment and let it go. */
void segment_use(struct segment *s);
void segment_unuse(struct segment *s);
/* The data plane is told to map it / has unmapped it (or is dead). */
void segment_mapped(struct segment *s);
void segment_unmapped(struct segment *s);

#endif
