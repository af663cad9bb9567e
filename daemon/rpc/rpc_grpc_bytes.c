#include "rpc/rpc_grpc_bytes.h"

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>

#include "rpc/rpc_call.h"

#include "base/banned.h"

static void unref_slice(void *message)
{
    rpc_message_unref(message);
}

grpc_byte_buffer *rpc_grpc_bytes_of(struct rpc_message *m)
{
    grpc_slice slice = grpc_slice_new_with_user_data(m->data, m->n_bytes, unref_slice, m);
    grpc_byte_buffer *b = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return b;
}

void rpc_grpc_bytes_drop(grpc_byte_buffer **bytes)
{
    if (*bytes != NULL)
        grpc_byte_buffer_destroy(*bytes);
    *bytes = NULL;
}

grpc_op rpc_grpc_op_send(grpc_byte_buffer *bytes)
{
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};
    op.data.send_message.send_message = bytes;
    return op;
}
