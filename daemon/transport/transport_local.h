/* The transport between devices of one node: device copies, in front of a transport that reaches others.
 *
 * A message whose two ends are here, and whose devices reach each other's memory, is copied by the
 * sender's device straight from where the sender has it to where the receiver wants it: long runs by the
 * copy engine, short ones by one kernel for a list of them. All other messages go on to the transport
 * behind, group by group. Both parts of a group run side by side.
 *
 * How: a group's turn on its stream is an event; where both ends of a message have come, the sender's
 * copy stream waits for the two groups' turns, copies, and both groups' streams wait for that. Nothing
 * here blocks on the work. A group begins when the one before it on its device has met the other ends
 * of all its messages: only then can what follows on the stream be made to wait for them.
 *
 * The devices' own fence (device.h) is what holds copies back; a group that was enqueued after it has
 * shut fails at once. */
#ifndef RS_TRANSPORT_TRANSPORT_LOCAL_H
#define RS_TRANSPORT_TRANSPORT_LOCAL_H

#include "transport/transport.h"

/* devices[i] is the plan's device i where it is local, else NULL. pairs [n_devices * n_devices]: true at
 * from * n_devices + to where that pair's messages are copied; both must be local. behind: for all other
 * pairs, of the same epoch; NULL: there are none. Taken on success: it ends with this one, and until then
 * only transport_tcp_renew and the like may be called on it. RS_ENOMEM, RS_EEXHAUSTED. */
int transport_local_open(struct device *const *devices, const bool *pairs, uint32_t n_devices,
                         uint64_t epoch, struct transport *behind, struct transport **ret,
                         struct err *e);

#endif
