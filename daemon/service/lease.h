/* What lease.c, attach.c and ops.c share: one lease at the data plane. Private to service/. */
#ifndef RS_SERVICE_LEASE_H
#define RS_SERVICE_LEASE_H

#include "service/state.h"

/* Tells the data plane of the lease's memory: MAP, BIND; then `after`, once. */
void lease_bind(struct lease *l, void (*after)(struct lease *l, int code, const struct err *e));
/* Copies the fingerprints (one per tensor of its layout) out of an answer. *ret is the caller's to mem_free. */
int lease_table(struct lease *l, struct wire_packet *packet, uint64_t **ret, struct err *e);
/* As op_publish, for a lease whose owner asks. */
int lease_publish(struct lease *l, uint64_t version, const struct op_expected *expected,
                  size_t n_expected, struct waiter *w, struct err *e);
/* Reports what it has published once more. */
void lease_publish_again(struct lease *l);

#endif
