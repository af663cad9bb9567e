/* A device's messages: groups in the order of the plan, packed, exchanged, unpacked.
 *
 *   built → (slots free, what it relays has landed) → packing and on the wire → unpacking → done
 *
 * A group is consecutive messages of one round that need at most the ring's slots. Which messages
 * form it does not depend on time. Several groups are under way at once as slots permit: one packs
 * while the one before is on the wire and the one before that unpacks. Messages whose items lie in
 * runs of some length need no slot: the transport reads and writes worker memory itself. Loop
 * thread. */
#ifndef RS_EXEC_LANE_H
#define RS_EXEC_LANE_H

#include "exec/plane.h"

/* LEAST_RUN: below, on average, packing is cheaper than a run of its own in a system call. */
enum {
    LANE_DEPTH = 4,
    LANE_GROUP_MESSAGES = 64,
    LANE_GROUP_PIECES = 1024,
    LANE_GROUP_BYTES = 32 << 20, /* a group is full with so much: what comes after it can begin */
    LANE_LEAST_RUN = 4096,
    LANE_NO_SLOT = -1
};

/* Bytes of a stream as a message carries them: from `offset` of `item` on. */
struct lane_span {
    uint32_t item;
    uint64_t offset, bytes;
};

struct lane_message {
    uint32_t message;
    struct lane_span span;
    uint8_t *data;        /* the slot */
    int32_t slot;         /* LANE_NO_SLOT: direct, or not given yet */
    uint32_t first_piece; /* direct: of the group's; one for each item of the span */
    bool staged, send;
};

enum lane_stage { LANE_FREE, LANE_BUILT, LANE_WIRE, LANE_UNPACK };

struct lane_group {
    struct lane *lane;
    enum lane_stage stage;
    uint64_t number;
    uint32_t n, n_staged, n_pieces;
    uint64_t bytes;
    uint64_t after; /* this group (number + 1) must have been unpacked; 0: none */
    struct lane_message messages[LANE_GROUP_MESSAGES];
    struct transport_message wire[LANE_GROUP_MESSAGES];
    struct transport_piece pieces[LANE_GROUP_PIECES];
    uint32_t piece_place[LANE_GROUP_PIECES]; /* where it is read, or lands */
    struct transport_group group;
    int status;
    struct err err;
    struct device_event *packed;
    struct mailbox_item wired, unpacked;
};

struct lane {
    struct attempt *attempt;
    uint32_t device; /* local */
    uint32_t next, end;
    struct lane_group groups[LANE_DEPTH];
    uint64_t n_built;
    struct lane_span *cursors; /* per stream, of the attempt: shared by all lanes */
    int32_t *free_slots;
    uint32_t n_free, n_slots;
    /* Per cell, where this device relays anything: the place that it relays it from; the last group
     * (number + 1) that brings it there, and the last that does so by unpacking. */
    uint32_t *relay_from;
    uint64_t *relay_landed, *relay_unpacked;
};

int lane_init(struct lane *l, struct attempt *a, uint32_t device, struct lane_span *cursors);
void lane_close(struct lane *l);
/* Starts what can be started. */
void lane_kick(struct lane *l);
/* One group of it; false: none can be started now. */
bool lane_kick_one(struct lane *l);
bool lane_in_flight(const struct lane *l);
/* All messages are through. */
bool lane_done(const struct lane *l);

#endif
