/* Protobuf bytes from outside: looked through against the schema before any memory is spent on
 * them.
 *
 * protobuf-c itself has no limit on depth or memory, keeps bad UTF-8, and cuts strings at a NUL.
 * The messages' meaning is not known here. Called by the api files of service, peer and client, on
 * any thread. Every refusal is RS_EINVAL or, where a size is to blame, RS_EEXHAUSTED, and names the
 * field. */
#ifndef RS_RPC_PB_BUDGET_H
#define RS_RPC_PB_BUDGET_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct ProtobufCMessageDescriptor; /* protobuf-c's; the generated x__descriptor */

/* A repeated field that may hold more than pb_limits.max_repeated. */
struct pb_field_limit {
    const char *field; /* "reshard.v1.Layout.tensors" */
    uint32_t max;
};

struct pb_limits {
    uint32_t max_depth;        /* of messages in messages; 0: 16, which is the most */
    uint32_t max_repeated;     /* elements of one repeated field in one message; 0: 1024 */
    size_t max_memory_bytes;   /* of the unpacked message, as estimated from its bytes; 0: 64 MiB */
    uint32_t max_string_bytes; /* 0: 4096 */
    const struct pb_field_limit *fields; /* exceptions upwards to max_repeated; may be NULL */
    size_t n_fields;
};

/* Refuses what should not reach an unpacker: varints that are too long, tags beyond 32 bits, field
 * number 0, wire types 3, 4, 6 and 7, lengths beyond the end, a wire type that isn't the field's, a
 * singular message given twice (protobuf-c merges it wrongly), a string that is not UTF-8 or holds
 * a NUL, and everything over a limit. Unknown fields are legal and count as memory. Doesn't
 * allocate. limits may be NULL: the defaults. */
int pb_prescan(const struct ProtobufCMessageDescriptor *type, const void *data, size_t n_bytes,
               const struct pb_limits *limits, struct err *e);

/* pb_prescan, then unpacks under a budget. *ret is the generated struct, freed by pb_free. */
int pb_unpack(const struct ProtobufCMessageDescriptor *type, const void *data, size_t n_bytes,
              const struct pb_limits *limits, void **ret, struct err *e);
void pb_free(void *message); /* NULL is fine */

/* Memory that is counted, beneath pb_arena.h. Live bytes never pass max_bytes. */
struct pb_budget {
    size_t max_bytes;
    size_t live_bytes;
    size_t peak_bytes;
};

void *pb_budget_alloc(void *budget, size_t n_bytes); /* NULL: over the budget, or no memory */
void pb_budget_free(void *budget, void *p);

#endif
