/* Gather-broadcast, the conventional way done well: each tensor is gathered once on a source device
 * and then goes whole, in messages, down one chain of all destination devices that enters each
 * domain once.
 *
 * Tensors (units) go one after another; each has a half of every device's scratch, in turn, so that
 * one is gathered while the one before is broadcast. Everything follows by formula from a unit's
 * plan_cast; nothing is listed. The cells of a unit go in their own order, each row-major, like the
 * items of a stream. */
#ifndef RS_PLAN_BROADCAST_H
#define RS_PLAN_BROADCAST_H

#include "plan/plan_private.h"

/* Decides gather devices, order and times. After plan_rounds: broadcasts begin when runs are done.
 */
int plan_broadcast(struct plan *p, struct err *e);
/* What gather-broadcast would cost for every tensor, and the loads of those that use it. */
int plan_broadcast_totals(struct plan *p);
uint64_t plan_broadcast_count(const struct plan *p, uint32_t unit);
int plan_broadcast_transfers(const struct plan *p, uint32_t unit,
                             int (*fn)(const struct plan_transfer *t, void *arg), void *arg);

/* The chain of one gather device: hop h goes from device h - 1 to device h; device 0 is the gather
 * device. */
struct chain {
    uint32_t gather;
    uint32_t first; /* into plan.chain: where the round trip begins */
    uint32_t skip;  /* the gather device's own place on it, NONE32 where it has none */
    uint32_t n_hops;
};
struct chain chain_of(const struct plan *p, uint32_t gather);
uint32_t chain_device(const struct plan *p, const struct chain *c, uint32_t h);

/* A cast leg: what one message stream carries of a unit: a chain hop (all cells), or what one
 * device gives to the gather device. */
struct cast_leg {
    const struct plan_cast *cast;
    const struct plan_shape *shape;
    uint32_t giver; /* NONE32: a chain hop */
    uint64_t bytes, start;
    uint8_t tier;
};
struct cast_leg cast_hop(const struct plan *p, const struct plan_cast *cast, const struct chain *c,
                         uint32_t hop);
struct cast_leg cast_gather(const struct plan *p, const struct plan_cast *cast, uint32_t giver);
/* The device that gives a cell to the gather device; NONE32 where that holds it itself. *ret_end:
 * the source end that is read. */
uint32_t cast_giver(const struct plan *p, const struct plan_cast *cast, uint32_t cell,
                    uint32_t *ret_end);
uint64_t cast_messages(const struct plan *p, const struct cast_leg *l);
void cast_message(const struct plan *p, const struct cast_leg *l, uint64_t i, uint64_t *ret_begin,
                  uint64_t *ret_end, uint32_t *ret_round);
/* Number of the stream between two devices, unlike that of every other: (kind 0 chain, 1 gather).
 */
uint32_t cast_order(const struct plan *p, uint32_t from, uint32_t to, unsigned kind);

#endif
