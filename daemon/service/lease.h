/* What lease.c, attach.c and ops.c share: one lease at the data plane. Private to service/. */
#ifndef RS_SERVICE_LEASE_H
#define RS_SERVICE_LEASE_H

#include "service/state.h"

/* attach_bindings.c. Checks and encodes the pieces that have come; `done` runs once, later, unless the lease has ended
 * meanwhile. RS_ENOMEM. */
int lease_check_bindings(struct lease *l,
                         void (*done)(struct lease *l, int code, const struct err *e),
                         struct err *e);
/* Tells the data plane of the lease's memory: MAP, BIND; then `after`, once. */
void lease_bind(struct lease *l, void (*after)(struct lease *l, int code, const struct err *e));
/* The coordinator knows it, or will before it hears anything else of it: it must be told of its end. */
bool lease_is_told(const struct lease *l);
/* What the data plane is doing while this worker's memory is not bound there; borrowed until the loop's next turn. */
const char *lease_unbound(const struct lease *l);
/* Copies the fingerprints (one per tensor of its layout) out of an answer. *ret is the caller's to mem_free. */
int lease_table(struct lease *l, struct wire_packet *packet, uint64_t **ret, struct err *e);
/* One with its model's name in it. */
struct node_report lease_report(const struct lease *l, enum refit_event_type type);
/* publish.c. As op_publish, for a lease whose owner asks. */
int lease_publish(struct lease *l, uint64_t version, uint32_t push, const uint8_t *event,
                  const struct op_expected *expected, size_t n_expected, struct waiter *w,
                  struct err *e);
/* Its sources have been released, up to this version: the memory is its owner's again, and what was published of it is not
 * reported any more. */
void lease_publish_ends(struct lease *l, uint64_t version);
/* Reports what it has published, and what has not been released since, once more. */
void lease_publish_again(struct lease *l);
/* ops.c. Tells the coordinator once more what its client has withdrawn. */
void lease_withdraw_again(struct lease *l);
/* The publish that is going on ends so. */
void lease_publish_refuse(struct lease *l, int code, const char *text);

#endif
