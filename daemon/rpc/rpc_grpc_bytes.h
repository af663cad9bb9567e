/* Messages as gRPC C core has them, between the rpc_grpc_*.c. Any thread. */
#ifndef RS_RPC_RPC_GRPC_BYTES_H
#define RS_RPC_RPC_GRPC_BYTES_H

struct grpc_byte_buffer;
struct grpc_op;
struct rpc_message;

/* The message's bytes as gRPC's, without a copy; takes the reference. */
struct grpc_byte_buffer *rpc_grpc_bytes_of(struct rpc_message *m);
/* Where there are any; NULL is left behind. */
void rpc_grpc_bytes_drop(struct grpc_byte_buffer **bytes);
/* Sends them; they stay the caller's, and have to live until it is done. */
struct grpc_op rpc_grpc_op_send(struct grpc_byte_buffer *bytes);

#endif
