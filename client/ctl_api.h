/* Admin calls for reshardctl, JSON in and JSON out, by the schema itself.
 *
 * A message becomes an object with every field under its proto name: numbers as integers (what is
 * beyond 2^63-1 as 2^63-1), ids (fixed64) and bytes as hex text, enums as their lower-case names
 * without the common prefix ("committed"), messages as objects, repeated fields as arrays. Absent
 * messages are left out. The same conventions hold for requests. */
#ifndef RS_CLIENT_CTL_API_H
#define RS_CLIENT_CTL_API_H

#include <stdint.h>

#include "base/err.h"
#include "rpc/rpc_client.h"

struct json_t; /* jansson's */

enum ctl_call {
    CTL_STATUS,
    CTL_VERSIONS,
    CTL_TIMELINE,
    CTL_ABORT,
    CTL_EVICT,
    CTL_DRAIN,
    CTL_N_CALLS
};

/* Takes request (an object; NULL: out of memory). *ret_reply is the caller's. */
int ctl_call(struct rpc_channel *c, enum ctl_call call, struct json_t *request,
             uint64_t deadline_ns, struct json_t **ret_reply, struct err *e);

/* The next state of a WatchRefit stream (api_watch_refit) as JSON; 1 at its good end. */
int ctl_refit_state(struct rpc_stream *s, uint32_t timeout_ms, struct json_t **ret, struct err *e);

/* Fields of an answer, with a default where they are missing. */
uint64_t jnum(const struct json_t *o, const char *key);
const char *jstr(const struct json_t *o, const char *key);

/* Tests: a packed message of one of the replies, as JSON. */
int ctl_decode(enum ctl_call call, const void *data, size_t n_bytes, struct json_t **ret,
               struct err *e);

#endif
