/* Help for the api files: memory of one message, freed at once, and packing, calling, unpacking. */
#ifndef RS_CLIENT_API_PACK_H
#define RS_CLIENT_API_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#include "base/err.h"
#include "rpc/rpc_client.h"

/* What a message is built in. A failed allocation marks it and gives NULL from then on. */
struct api_arena {
    struct api_chunk *chunks;
    bool failed;
};

void *arena_alloc(struct api_arena *a, size_t n, size_t bytes); /* zeroed, aligned; NULL: out */
void arena_close(struct api_arena *a);

/* Packs m: *ret_data is the caller's to mem_free. RS_ENOMEM; RS_EEXHAUSTED beyond 4 MiB. */
int api_pack(const ProtobufCMessage *m, void **ret_data, size_t *ret_n_bytes, struct err *e);
int api_stream_send(struct rpc_stream *s, const ProtobufCMessage *m, uint64_t deadline_ns,
                    struct err *e);
/* A unary call; *ret_reply (of `type`) is freed by pb_free. */
int api_unary(struct rpc_channel *c, const char *path, const ProtobufCMessage *request,
              const ProtobufCMessageDescriptor *type, uint64_t deadline_ns, void **ret_reply,
              struct err *e);
/* A server stream with its one request sent. */
int api_server_stream(struct rpc_channel *c, const char *path, const ProtobufCMessage *request,
                      uint64_t deadline_ns, struct rpc_stream **ret, struct err *e);
/* The next message of a stream, unpacked; 1 at its good end. */
int api_receive(struct rpc_stream *s, const ProtobufCMessageDescriptor *type, uint32_t timeout_ms,
                void **ret, struct err *e);
/* After a failed send: what the daemon ended the stream with, else `code` as it is. */
int api_stream_status(struct rpc_stream *s, int code, struct err *e);

#endif
