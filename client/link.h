/* One connection to one start of the daemon: the memory socket and the gRPC channel.
 *
 * Made by link_open, counted, never repaired: who finds it broken drops it, and client.c opens
 * another. Thread: any; the records of the memory socket go one at a time under a mutex. All
 * deadlines are clock_mono_ns values. */
#ifndef RS_CLIENT_LINK_H
#define RS_CLIENT_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "memory/memory_socket.h"
#include "rpc/rpc_client.h"

struct link;

/* Connects to "<path>.mem", says hello, and opens a channel on "unix:<path>" with the token.
 * RS_EUNAVAIL: nobody listens there. RS_EPROTO: somebody else does. */
int link_open(const char *path, uint64_t deadline_ns, struct link **ret, struct err *e);
struct link *link_ref(struct link *l);
void link_unref(struct link *l); /* the last closes it; NULL is fine */

struct rpc_channel *link_channel(const struct link *l);
uint64_t link_incarnation(const struct link *l); /* the daemon's start */

/* Hands a memfd over: *ret_segment is the daemon's id of it. The daemon's refusal comes back as its
 * code and text; RS_EUNAVAIL where the socket broke. */
int link_segment_add(struct link *l, int fd, uint64_t bytes, uint64_t deadline_ns,
                     uint64_t *ret_segment, struct err *e);
/* Memory of a GPU: `kind` of enum memory_segment_kind, with its n_fds descriptors (at most MEMORY_MAX_PARTS + 1).
 * *ret_local: the node's number of the device. */
int link_device_segment_add(struct link *l, uint32_t kind, const struct memory_device *device,
                            const int *fds, uint32_t n_fds, uint64_t bytes, uint64_t deadline_ns,
                            uint64_t *ret_segment, uint32_t *ret_local, struct err *e);
int link_segment_drop(struct link *l, uint64_t segment, uint64_t deadline_ns, struct err *e);

/* Whether the daemon's end of the memory socket is still there. Marks the link lost where not. */
bool link_alive(struct link *l);
void link_lose(struct link *l); /* nobody shall use it again */

/* Milliseconds until then, rounded up, at most UINT32_MAX; 0 where it has passed. */
uint32_t deadline_left_ms(uint64_t deadline_ns);
uint64_t deadline_after_ms(uint32_t ms);

#endif
