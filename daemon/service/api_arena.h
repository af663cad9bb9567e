/* An arena for one reply of the API: all that the reply points to, freed at once. A failed allocation marks it, so that only the end
 * has to look. On the loop thread. */
#ifndef RS_SERVICE_API_ARENA_H
#define RS_SERVICE_API_ARENA_H

#include <stdbool.h>
#include <stddef.h>

#include <protobuf-c/protobuf-c.h>

#include "rpc/rpc.h"

struct chunk;

/* {0} is an empty one. */
struct arena {
    struct chunk *chunks;
    bool failed;
};

/* n times `bytes`, zeroed; NULL: no memory, which the arena remembers. */
void *arena_take(struct arena *a, size_t n, size_t bytes);
/* A copy; NULL as above. */
char *arena_text(struct arena *a, const char *text);
/* A repeated field: the array of n pointers and what they point to, of `bytes` each; NULL as above. */
void **arena_list(struct arena *a, size_t n, size_t bytes);
/* Ends the call with the message, or with RS_ENOMEM where the arena has failed; closes the arena. */
void arena_finish(struct rpc_call *call, struct arena *a, const ProtobufCMessage *m);
void arena_close(struct arena *a);

#endif
