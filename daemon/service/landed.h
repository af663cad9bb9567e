/* What had landed of an attempt when it was called off, for the next attempt at the same content by the same plan: nothing of
 * it need be moved again, all of it is verified. A bit per hold of a node's program, lowest first.
 *
 * The coordinator keeps what the nodes said with QUIESCED and gives it to all nodes with PREPARE, so that both ends of
 * every stream leave out the same. It forgets it as soon as the memory may be another: at START, when a worker comes or
 * goes, when a node is not heard of. Private to service/. Loop thread. */
#ifndef RS_SERVICE_LANDED_H
#define RS_SERVICE_LANDED_H

#include <stdbool.h>
#include <stdint.h>

#include "peer/message.h"

struct landed_key {
    uint64_t version, content;
    uint8_t plan[16]; /* digest */
};

struct landed_store {
    struct landed_key key;
    struct attempt_landed *nodes; /* owned, their holds too */
    uint32_t n_nodes;
};

static inline bool landed_bit(const struct attempt_landed *x, uint32_t hold)
{
    return (x->holds[hold / 8] >> (hold % 8) & 1) != 0;
}
static inline uint32_t landed_bytes(uint32_t n_holds)
{
    return n_holds / 8 + (n_holds % 8 != 0);
}
bool landed_key_equal(const struct landed_key *a, const struct landed_key *b);

/* Takes a node's word (copied) about an attempt; what is kept of another key or attempt is let go. Without memory all is
 * let go, and moved again. */
void landed_note(struct landed_store *s, const struct landed_key *key,
                 const struct attempt_landed *said);
/* Those of that key; *ret_n is 0 where there are none. */
const struct attempt_landed *landed_find(const struct landed_store *s, const struct landed_key *key,
                                         uint32_t *ret_n);
void landed_clear(struct landed_store *s);
/* That node's memory may be another by now; what the others said stands. */
void landed_drop(struct landed_store *s, uint32_t node);

/* Deep; NULL: no memory. */
struct attempt_landed *landed_copy(const struct attempt_landed *from, uint32_t n);
void landed_free(struct attempt_landed *x, uint32_t n); /* NULL is fine */
/* That node's; NULL: it has none. */
const struct attempt_landed *landed_of(const struct attempt_landed *x, uint32_t n, uint32_t node);

#endif
