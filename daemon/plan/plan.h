/* What moves where: the result of the planner, the same bytes on every daemon.
 *
 * planner.h makes a plan from (layouts, ranks on devices, topology, options); this header is what
 * everybody else reads: totals, the stream of transfers (reshardctl plan, plan_check, oracles), and
 * a node's own part as a program (program.h). A plan is immutable; reading it is safe on any
 * thread. It keeps runs, not transfers: transfers, chunks and messages are derived while they are
 * read.
 *
 * Words: planner.h. `tensor` is always an index into the source layout's tensors; behind those stand
 * the derived tensors of the destinations (plan_tensor_name). */
#ifndef RS_PLAN_PLAN_H
#define RS_PLAN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "layout/layout.h"
#include "topology/topology.h"

enum plan_strategy { PLAN_RESHARD, PLAN_DIRECT, PLAN_GATHER_BROADCAST };

/* reshard, direct, gather-broadcast. plan_strategy_parse: 0 or RS_EINVAL. */
const char *plan_strategy_name(enum plan_strategy s);
int plan_strategy_parse(const char *name, enum plan_strategy *ret);

/* The first rule whose glob (fnmatch) matches a tensor's name picks its strategy. */
struct plan_rule {
    const char *glob;
    enum plan_strategy strategy;
};

/* Set by the coordinator; part of the input, of the digest and of the cache key. */
struct plan_options {
    enum plan_strategy strategy;
    const struct plan_rule *rules;
    uint32_t n_rules;
    bool relay;          /* ingest ranks of fed domains may send on (default true) */
    bool staging_ingest; /* a device that does not need a cell may ingest it (default true) */
    uint64_t least_piece_bytes; /* cells are not split below this (default 256 KiB) */
    uint64_t chunk_bytes;       /* greatest message (default 8 MiB) */
    uint32_t ring_slots; /* staging slots per device, each of chunk_bytes (default 8; 1 works) */
};
struct plan_options plan_options_default(void);

/* Borrowed for the call of plan_make; a plan does not point into it afterwards, except for the
 * layouts and the topology, which must outlive the plan. */
struct plan_input {
    const struct layout *source;
    const int32_t *source_device; /* source->n_ranks of them; TOPOLOGY_NONE: unused id;
                                     TOPOLOGY_ABSENT: the rank takes no part now: it holds and takes
                                     nothing */
    uint32_t n_destinations;
    const struct layout *const *destinations;
    const int32_t *const *destination_device; /* [layout][rank] */
    const struct topology *topology;
    struct plan_options options;
};

enum plan_tier { TIER_DEVICE, TIER_DOMAIN, TIER_NETWORK };
enum plan_side { SIDE_SOURCE, SIDE_DESTINATION, SIDE_STAGING };

/* What the elements of a cell are. */
enum plan_value {
    PLAN_SOURCE,    /* the source's, cast where the wire dtype is another */
    PLAN_QUANTISED, /* the source's, each divided by its block's scale and cast to float8 */
    PLAN_SCALES     /* those scales, one per block: a derived tensor */
};

/* One end of a transfer. layout and rank have no meaning at SIDE_STAGING. */
struct plan_end {
    uint32_t device;
    enum plan_side side;
    uint32_t layout; /* index of the destination layout */
    uint32_t rank;
};

/* One cell from one device to another (planner.h). */
struct plan_transfer {
    uint64_t id;   /* 0 … n_transfers-1 in the order of the stream */
    uint64_t cell; /* global number of the cell; transfers of one cell share it */
    uint32_t tensor;
    enum plan_value value;
    uint32_t block[2]; /* unless PLAN_SOURCE */
    enum dtype wire;
    struct box box;
    uint64_t bytes; /* in the wire dtype */
    enum plan_tier tier;
    enum plan_strategy strategy;
    struct plan_end from;
    struct plan_end to;
    /* The first round in which a byte of it moves. What is copied on inside one node's part of a domain has no
     * message: it counts one round after what it comes after, and 0 where it comes from a source holder. */
    uint32_t round;
    /* Transfers that brought the bytes to `from`, ids; only where from is no source holder. */
    const uint64_t *after;
    uint32_t n_after;
};

struct plan_totals {
    uint32_t tensors; /* that some destination needs */
    uint64_t transfers;
    uint64_t cells;
    uint64_t logical_bytes;     /* global sizes of those tensors, in wire dtype, once */
    uint64_t destination_bytes; /* what all destination ranks receive */
    uint64_t network_bytes;
    /* sum over domains of the unique bytes needed and not held there */
    uint64_t network_bytes_minimum;
    uint64_t domain_bytes;
    uint64_t device_bytes;
    /* What gather-broadcast would cost for the same tensors (planner.h). */
    uint64_t gather_bytes, broadcast_bytes, gather_broadcast_network_bytes;
    /* The busiest device (network tier; where nothing crosses it, the domain tier). */
    uint32_t busiest_device;
    bool busiest_egress;
    uint64_t busiest_bytes;
    uint64_t lower_bound; /* of the busiest device (planner.h) */
    uint32_t n_rounds;
    uint32_t max_relay_depth;
    uint8_t digest[16];
};

struct plan;

void plan_free(struct plan *p); /* NULL is fine */
const struct plan_totals *plan_totals(const struct plan *p);
/* The options that it was made with (rules are the plan's own copy). */
const struct plan_options *plan_options(const struct plan *p);

/* Derived tensors included: they are numbered behind the source layout's. */
uint32_t plan_n_tensors(const struct plan *p);
const char *plan_tensor_name(const struct plan *p, uint32_t tensor);
/* The source layout's tensor that it is made from: itself, or what a derived one is derived from. */
uint32_t plan_tensor_origin(const struct plan *p, uint32_t tensor);
/* The number of a name; derived tensors that are made in two ways have two, the first is given.
 * -1: none. */
int64_t plan_find_tensor(const struct plan *p, const char *name);

/* Calls fn for each transfer in canonical order; a non-zero return stops and is returned. The
 * transfer (and its `after`) is valid during the call. RS_ENOMEM is possible. `tensor` >= 0
 * restricts to one. */
int plan_transfers(const struct plan *p, int64_t tensor,
                   int (*fn)(const struct plan_transfer *t, void *arg), void *arg);

/* Network load of a device in bytes. */
uint64_t plan_device_egress(const struct plan *p, uint32_t device);
uint64_t plan_device_ingress(const struct plan *p, uint32_t device);

/* plan_program.c: node's part, encoded as program.h says, appended to `out`. 0, RS_ENOMEM,
 * RS_EEXHAUSTED (more than 2^32 items of a kind). */
int plan_program(const struct plan *p, uint32_t node, struct buf *out, struct err *e);

/* plan_check.c: proves by itself, from the input and the transfer and message streams alone: every
 * element of every destination shard is written exactly once; each sender holds what it sends when
 * it sends it (rounds of `after` strictly earlier); each domain takes in each needed byte once
 * (reshard strategy); both ends of each stream cut the same messages; no group needs more slots
 * than the ring has. `full` checks each tensor, else one tensor per class and all totals (cheap;
 * before first use). RS_EINTERNAL names tensor, box and rank. */
int plan_check(const struct plan *p, const struct plan_input *input, bool full, struct err *e);

/* plan_simulate.c: seconds that the plan takes with the topology's rates (0 where they are unknown),
 * no latency, one peer at a time: the makespan of plan_simulate.h. */
double plan_predict_s(const struct plan *p, const struct topology *t);

#endif
