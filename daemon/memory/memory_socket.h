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
 *   SEGMENT {request, kind, bytes}   →    with the descriptor
 *                                    ←    SEGMENT_REPLY {request, code, segment, text}
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
 * against neither writing nor growing: `writable` must be true for memory that is received into. */
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

enum memory_segment_kind { MEMORY_SEGMENT_MEMFD = 1 };

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
    char text[MEMORY_SOCKET_TEXT_BYTES];       /* why not */
};

#endif
