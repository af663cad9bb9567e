/* The other daemons: peer/peer.h's events, handed to the node part and the coordinator. Private to service/. */
#ifndef RS_SERVICE_PEERS_H
#define RS_SERVICE_PEERS_H

#include "base/err.h"

/* Beyond a member's lease, for clocks that drift and frames that are late: then it is over for sure. */
enum { PEERS_SLACK_MS = 1000 };

struct peers;
struct service;

/* Sets s->peer. RS_EINVAL, RS_ENOMEM. */
int peers_start(struct service *s, struct peers **ret, struct err *e);
/* Says goodbye; s->peer is NULL at once, and done runs once. The data plane is dead by then. */
void peers_stop(struct peers *p, void (*done)(void *arg), void *arg);

/* Asked whenever something has come to rest here: a JOIN that waits for it goes out. NULL is fine. */
void peers_quiet(struct peers *p);

/* The data plane serves, and has said what it is: environment and domains follow it. NULL is fine. */
void peers_about(struct peers *p);

#endif
