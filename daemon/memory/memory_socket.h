/* The memory socket: where a local client proves who it is and hands over its memory.
 *
 * A Unix stream socket "<socket path>.mem", mode as the gRPC socket's. Records are fixed structs,
 * host order (both ends are on one machine), each sent with one sendmsg; descriptors travel in
 * SCM_RIGHTS. The connection stays open for the client's life; its end (or that of the process, by
 * pidfd) is the end of the client.
 *
 *   client                                daemon
 *   HELLO {magic, protocol}          →
 *                                    ←    WELCOME {token, incarnation, client}   (SO_PEERCRED says who)
 *   SEGMENT {request, kind, bytes}   →    with the descriptor (kind CUDA_IPC: none; of a GPU: device)
 *                                    ←    SEGMENT_REPLY {request, code, segment, text or device}
 *   SEGMENT_DROP {request, segment}  →
 *                                    ←    SEGMENT_REPLY {request, code, segment, text}, once unmapped
 *
 * The token goes as metadata "reshard-token" with gRPC calls on the Unix socket; the head of
 * reshard.proto says which calls need none. Segment ids are the daemon's, unique within its
 * incarnation; Attach refers to them.
 *
 * A descriptor must be of memfd_create(…, MFD_ALLOW_SEALING), at least `bytes` long and sealed with
 * F_SEAL_SHRINK: what may shrink could be cut off under the daemon's mapping. Allocate its pages
 * first (fallocate); the daemon allocates those that are missing, or refuses where it can't. Seal it
 * against neither writing nor growing: `writable` must be true for memory that is received into.
 *
 * Memory of a GPU is handed over as what its owner exports: a CUDA IPC handle (of cudaMalloc's
 * memory), or the descriptor of a VMM allocation (cuMemExportToShareableHandle; for memory that has
 * no handle: memory that sleeps, torch's expandable segments). One segment per allocation, or per
 * part of one: `offset` and `bytes` say which. VMM memory that goes on over several allocations, mapped
 * one behind the other (torch's expandable segments: 20 MiB each), is one segment of kind
 * CUDA_VMM_PARTS: the first descriptor that comes with it is a memfd with a struct memory_part for each
 * allocation, in the order of their addresses, sealed against shrinking, growing and writing; then
 * comes each one's descriptor, in that order, all in one message; `allocation_bytes` is what they are
 * together, and `offset` counts from the first one's beginning. At most MEMORY_MAX_PARTS, as
 * SCM_RIGHTS takes 253 descriptors. An allocation is mapped from its beginning (cuMemMap takes no other
 * offset). Kind 4 and memory_device.address came to protocol 1 later than the others: an older daemon refuses the one by its
 * number and does not look at the other, and what older clients send is taken as ever. The daemon opens each allocation once and closes it
 * before it answers a SEGMENT_DROP: free the memory after that answer, never before it. It must be
 * on a device of the daemon (backend = cuda), and on the one that the worker attaches with. */
#ifndef RS_MEMORY_MEMORY_SOCKET_H
#define RS_MEMORY_MEMORY_SOCKET_H

#include <stdint.h>

#define MEMORY_SOCKET_MAGIC    UINT32_C(0x52534d31) /* "RSM1" */
#define MEMORY_SOCKET_PROTOCOL UINT32_C(1)
enum { MEMORY_SOCKET_TEXT_BYTES = 512, MEMORY_SOCKET_TOKEN_BYTES = 33 };

enum memory_record_type {
    MEMORY_HELLO = 1,
    MEMORY_WELCOME,
    MEMORY_SEGMENT,
    MEMORY_SEGMENT_REPLY,
    MEMORY_SEGMENT_DROP
};

enum memory_segment_kind {
    MEMORY_SEGMENT_MEMFD = 1,
    MEMORY_SEGMENT_CUDA_IPC, /* no descriptor; the client in the daemon's pid namespace */
    MEMORY_SEGMENT_CUDA_VMM,
    MEMORY_SEGMENT_CUDA_VMM_PARTS
};

enum { MEMORY_MAX_PARTS = 252 };

/* One VMM allocation of several that lie one behind the other. */
struct memory_part {
    uint64_t bytes;      /* that are mapped: all of it, or of its beginning */
    uint64_t allocation; /* as memory_device.allocation; 0: none */
};

enum { MEMORY_DEVICE_NAME_BYTES = 48, MEMORY_DEVICE_HANDLE_BYTES = 64 };

/* Which bytes of which allocation of a GPU: offset … offset + bytes of the record. */
struct memory_device {
    char name[MEMORY_DEVICE_NAME_BYTES];        /* where it is: "GPU-<uuid>", any case, NUL */
    uint8_t handle[MEMORY_DEVICE_HANDLE_BYTES]; /* CUDA_IPC: cudaIpcMemHandle_t of the allocation */
    uint64_t offset;
    uint64_t allocation_bytes; /* all of it */
    /* The client's number of the allocation, which it never gives to another one, also where that
     * comes to lie at the same address (CU_POINTER_ATTRIBUTE_BUFFER_ID). Equal numbers of a client
     * are the same memory. 0: none; then each VMM segment counts as memory of its own. Of
     * CUDA_VMM_PARTS each part has its own, and this is 0. */
    uint64_t allocation;
    uint32_t local; /* SEGMENT_REPLY: the node's number of the device, for Attach */
    uint32_t reserved;
    uint64_t address; /* CUDA_IPC: where the allocation begins in the client; 0: not told */
};

/* One size for all records keeps both ends simple: read until sizeof(struct memory_record). */
struct memory_record {
    uint32_t magic;
    uint32_t type;     /* enum memory_record_type */
    uint32_t protocol; /* HELLO, WELCOME */
    int32_t code;      /* replies: 0 or RS_E… */
    uint64_t request;  /* the client's number, echoed */
    uint64_t segment;
    uint64_t bytes;
    uint64_t incarnation;                      /* WELCOME: the daemon's */
    uint64_t client;                           /* WELCOME: this connection's number */
    uint32_t kind;                             /* SEGMENT: enum memory_segment_kind */
    uint32_t writable;                         /* SEGMENT: the daemon may write it */
    char token[MEMORY_SOCKET_TOKEN_BYTES + 7]; /* WELCOME: 32 hex digits, NUL */
    union {
        char text[MEMORY_SOCKET_TEXT_BYTES]; /* why not */
        struct memory_device device;         /* SEGMENT of a GPU, and its reply where code is 0 */
    };
};

#endif
