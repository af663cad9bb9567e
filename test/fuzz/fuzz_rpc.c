/* Bytes from outside that daemon/rpc itself reads: requests to health and reflection through the in-memory twin, and
 * messages through pb_unpack. The first byte chooses; what the scan accepts must unpack. */
#include <stdint.h>
#include <stdlib.h>

#include "base/mem.h"
#include "reshard.pb-c.h"
#include "rpc/pb_budget.h"
#include "rpc/rpc_mem.h"

#include "test/lib/health_fds.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void ask(const char *path, const uint8_t *data, size_t n_bytes)
{
    struct rpc_server_options o = {.descriptor_set = health_fds,
                                   .descriptor_set_bytes = sizeof health_fds};
    struct rpc_mem *m = NULL;
    void *reply = NULL;
    size_t n;
    if (rpc_mem_new(&o, NULL, 0, &m, NULL) != 0)
        abort();
    struct rpc_mem_call *c = rpc_mem_open(m, path, NULL, UINT64_MAX);
    rpc_mem_send(c, data, n_bytes);
    rpc_mem_half_close(c);
    while (rpc_mem_receive(c, &reply, &n, NULL) == 0)
        mem_free(reply);
    rpc_mem_close(c);
    rpc_mem_free(m);
}

/* The embedded set is ours, but a damaged one must be said, not read past its end. */
static void load_set(const uint8_t *data, size_t n_bytes)
{
    struct rpc_server_options o = {.descriptor_set = data, .descriptor_set_bytes = n_bytes};
    struct rpc_mem *m = NULL;
    if (rpc_mem_new(&o, NULL, 0, &m, NULL) != 0)
        return;
    struct rpc_mem_call *c = rpc_mem_open(
        m, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", NULL, UINT64_MAX);
    rpc_mem_send(c,
                 "\x22\x05"
                 "a.b.c",
                 7);
    rpc_mem_close(c);
    rpc_mem_free(m);
}

static void unpack(const uint8_t *data, size_t n_bytes)
{
    static const ProtobufCMessageDescriptor *const types[] = {
        &reshard__v1__put_layout_request__descriptor, &reshard__v1__attach_request__descriptor,
        &reshard__v1__submit_request__descriptor, &reshard__v1__status_reply__descriptor};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        void *message = NULL;
        int r = pb_prescan(types[i], data, n_bytes, NULL, NULL);
        if (pb_unpack(types[i], data, n_bytes, NULL, &message, NULL) != r)
            abort();
        pb_free(message);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    switch (data[0] % 5) {
    case 0:
        ask("/grpc.health.v1.Health/Check", data + 1, n_bytes - 1);
        break;
    case 1:
        ask("/grpc.health.v1.Health/Watch", data + 1, n_bytes - 1);
        break;
    case 2:
        ask("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", data + 1, n_bytes - 1);
        break;
    case 3:
        load_set(data + 1, n_bytes - 1);
        break;
    default:
        unpack(data + 1, n_bytes - 1);
        break;
    }
    return 0;
}
