/* A plan run on a model of the links: when the bytes of each tier move, and which device is waited for. For people
 * (reshardctl plan --simulate) and for the makespan that benchmarks compare with the lower bound; nothing is decided
 * by it.
 *
 * The model
 *   - Every device has one link in and one out per tier (network, domain), each of the tier's rate.
 *   - Messages go in the order of the programs, (round, stream), in groups as program.h says: consecutive messages of
 *     one round, at most ring_slots of them; a slot is free again when its group is through, and a few groups are
 *     under way at a time, as in exec/lane.h. Every message is taken to need a slot at both ends.
 *   - A message costs chunk_latency_s before its first byte, then bytes / rate at both of its links at once.
 *   - With one peer a link serves one message at a time, and it waits while the other end is busy with another. With
 *     more, that many messages of a direction are under way at a device: they share its link, latencies overlap, and a
 *     link goes on with the next one while a peer is busy.
 *   - What is relayed may go on when the group that brought it is through.
 *   - The receiving device hands on to the further takers of its site as a message lands (domain tier; they share the
 *     links of both ends). What a site's own holders give is copied from the start.
 *   - Inside one device nothing takes time.
 *   - A gather-broadcast follows its chain message by message, each tensor after its gather.
 * Where a plan has very many messages, neighbours of one leg go together (`messages_a_step`). */
#ifndef RS_PLAN_SIMULATE_H
#define RS_PLAN_SIMULATE_H

#include "plan/plan.h"

enum { SIMULATION_BUCKETS = 64, MODEL_MOST_PEERS = 64 };

struct plan_model {
    double network_bytes_per_s; /* per device and direction; both > 0 */
    double domain_bytes_per_s;
    double chunk_latency_s; /* >= 0 */
    uint32_t peers;         /* 1 … MODEL_MOST_PEERS, per direction and tier */
};
/* The topology's rates (0 where they are not known), no latency, one peer. */
struct plan_model plan_model_of(const struct topology *t);

/* One link of a device: what crossed it. */
struct plan_port {
    uint64_t bytes;
    double busy_s; /* bytes / rate */
    double last_s; /* its last byte */
};

struct plan_tier_line {
    uint64_t bytes;
    uint64_t messages; /* 0 for what is copied without */
    double first_s;    /* the first byte leaves */
    double last_s;     /* the last one is there */
    double busy_s;     /* of all ports */
    uint32_t n_ports;  /* that something crosses */
    /* Seconds that ports are busy in [i * bucket_s, (i + 1) * bucket_s). */
    double bucket[SIMULATION_BUCKETS];
};

struct plan_simulation {
    struct plan_tier_line tiers[3]; /* by enum plan_tier; of TIER_DEVICE the bytes alone */
    double bucket_s;
    double makespan_s;
    double bound_s; /* lower bound of the busiest device, as time */
    struct plan_port *ports;
    uint32_t n_devices;
    /* The port over which the last byte came, and its idle time until then. */
    uint32_t critical_port;
    uint64_t steps, messages_a_step;
};

/* Port of a device: TIER_DOMAIN or TIER_NETWORK. */
static inline uint32_t plan_port_of(uint32_t device, enum plan_tier tier, bool egress)
{
    return 4 * device + (tier == TIER_NETWORK ? 2 : 0) + (egress ? 1 : 0);
}
static inline uint32_t plan_port_device(uint32_t port)
{
    return port / 4;
}
static inline enum plan_tier plan_port_tier(uint32_t port)
{
    return port % 4 >= 2 ? TIER_NETWORK : TIER_DOMAIN;
}
static inline bool plan_port_egress(uint32_t port)
{
    return port % 2 == 1;
}

/* RS_EINVAL: rates, latency or peers; RS_ENOMEM; RS_EINTERNAL: what moved is not what the plan's totals say (by tier
 * and by device). plan_simulation_close frees what *ret holds. */
int plan_simulate(const struct plan *p, const struct plan_model *m, struct plan_simulation *ret,
                  struct err *e);
void plan_simulation_close(struct plan_simulation *s); /* zeroed is fine */

#endif
