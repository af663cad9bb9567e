/* What travels on a data connection: a hello, then frames; both little-endian, of fixed size.
 *
 *   connector (from) → acceptor (to):  hello, then DATA frames, each followed by its payload
 *   acceptor → connector:              WELCOME, once; ACCEPT or REFUSE, one per message
 *   either:                            ALIVE, where there is nothing else to say
 *
 * Pure: packing, unpacking, and what can be said of a header alone. */
#ifndef RS_TRANSPORT_TCP_FRAME_H
#define RS_TRANSPORT_TCP_FRAME_H

#include <stdbool.h>
#include <stdint.h>

#include "transport/transport.h"

enum {
    TCP_PROTOCOL = 2,
    TCP_HELLO_BYTES = 64,
    TCP_FRAME_BYTES = 64, /* the header of a frame */
    TCP_MAX_PAYLOAD_BYTES = 1 << 20
};

struct tcp_hello {
    uint32_t protocol;
    uint64_t model, epoch, attempt;
    uint8_t token[TRANSPORT_TOKEN_BYTES];
    uint32_t from, to; /* the plan's devices: DATA goes this way */
    uint32_t stream;   /* one connection for each (model, epoch, attempt, from, to, stream) */
};

enum tcp_frame_type { TCP_DATA = 1, TCP_ACCEPT, TCP_REFUSE, TCP_ALIVE, TCP_WELCOME };

struct tcp_frame {
    uint8_t type; /* enum tcp_frame_type */
    bool network;
    uint32_t from, to; /* as in the hello, whichever way the frame goes */
    uint64_t epoch, attempt;
    uint64_t sequence;      /* of the message, among those of the attempt from `from` to `to` */
    uint64_t message_bytes; /* DATA: the sender's; REFUSE: the receiver's */
    uint64_t offset;        /* DATA: of the payload in the message */
    uint32_t length;        /* DATA: bytes of payload that follow */
    uint32_t tag;           /* DATA: what the message is */
};

void tcp_hello_pack(const struct tcp_hello *h, uint8_t out[TCP_HELLO_BYTES]);
/* RS_EPROTO: not a hello at all; the protocol number is the caller's to judge. */
int tcp_hello_unpack(const uint8_t in[TCP_HELLO_BYTES], struct tcp_hello *ret);
/* In a time that does not tell how much of it agrees. */
bool tcp_token_equal(const uint8_t a[TRANSPORT_TOKEN_BYTES],
                     const uint8_t b[TRANSPORT_TOKEN_BYTES]);

void tcp_frame_pack(const struct tcp_frame *f, uint8_t out[TCP_FRAME_BYTES]);
/* RS_EPROTO: no frame, or one whose numbers do not fit together. */
int tcp_frame_unpack(const uint8_t in[TCP_FRAME_BYTES], struct tcp_frame *ret);

#endif
