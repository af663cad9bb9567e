/* One message of a Join stream, decoded: what api_frame.c makes of protobuf bytes and back. Private to peer/.
 *
 * Up: what a member says; down: what the coordinator says. Encoding converts times from now_ns to ages and remainders,
 * decoding back; both are pure. A frame that was decoded owns what it points to until frame_close; one that is to be
 * encoded only borrows. */
#ifndef RS_PEER_FRAME_H
#define RS_PEER_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "peer/message.h"
#include "peer/peer.h"

enum {
    FRAME_PAGE_BYTES = 1 << 20,        /* packed; what is longer goes as parts */
    FRAME_WIRE_BYTES = (1 << 20) + 64, /* a page with its part's header */
    FRAME_MAX_BYTES = 64 << 20,        /* of one message put together again */
    FRAME_MAX_PARTICIPANTS = 65536,
    FRAME_MAX_PRINTS = LAYOUT_MAX_TENSORS,
    FRAME_MAX_COMMITS = 65536,
    FRAME_MAX_TEXT_BYTES = 4096
};

enum frame_type {
    FRAME_JOIN = 1, /* up */
    FRAME_GOODBYE,  /* up */
    FRAME_REPORT,   /* up */
    FRAME_WELCOME,  /* down */
    FRAME_ORDER,    /* down */
    FRAME_BEAT,     /* both */
    FRAME_PART      /* both */
};

struct frame {
    enum frame_type type;
    union {
        struct frame_join {
            const char *name;
            uint32_t number;
            const char *coordinator;
            struct peer_member member;
        } join;
        struct {
            uint64_t incarnation;
            uint32_t number;
            char release[32];
            uint32_t lease_ms, beat_ms;
            uint8_t token[PEER_TOKEN_BYTES];
        } welcome;
        struct {
            uint64_t sequence, round_trip_ns;
            struct peer_strangers strangers; /* up */
        } beat;
        struct {
            const void *data;
            size_t n_bytes;
            bool last;
        } part;
        struct node_report report;
        struct node_order order;
    };
    /* of a decoded frame */
    void *message;
    void *owned[8];
    unsigned n_owned;
};

/* Appends the packed message to `out` (buf_error, RS_ENOMEM). RS_EEXHAUSTED: longer than FRAME_MAX_BYTES. */
int frame_encode(const struct frame *f, bool up, uint64_t now_ns, struct buf *out, struct err *e);
/* RS_EPROTO, RS_EEXHAUSTED, RS_ENOMEM, with the field named; *ret is then untouched. Numbers of nodes, devices and
 * layouts that index something in the same message are in range afterwards. */
int frame_decode(const void *data, size_t n_bytes, bool up, uint64_t now_ns, struct frame *ret,
                 struct err *e);
void frame_close(struct frame *f);

/* Encodes and hands the message, or its parts, to send, in order; a code other than 0 stops and is returned. */
int frame_send(const struct frame *f, bool up, uint64_t now_ns,
               int (*send)(void *arg, const void *data, size_t n_bytes), void *arg, struct err *e);

/* Puts parts together. */
struct frame_parts {
    struct buf bytes;
};
void frame_parts_init(struct frame_parts *p);
void frame_parts_close(struct frame_parts *p);
/* As frame_decode; 1: a part was taken and more are to come. A decoded frame is never a part. */
int frame_take(struct frame_parts *p, const void *data, size_t n_bytes, bool up, uint64_t now_ns,
               struct frame *ret, struct err *e);

#endif
