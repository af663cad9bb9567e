#include "rpc/rpc_health.h"

#include <string.h>

#include "base/mem.h"
#include "rpc/rpc_wire.h"

#include "base/banned.h"

/* HealthCheckResponse.ServingStatus. */
enum status { SERVING = 1, NOT_SERVING = 2, SERVICE_UNKNOWN = 3 };

struct watcher {
    struct queue link;
    struct rpc_call *call;
};

void rpc_health_init(struct rpc_health *h, const struct rpc_method *methods, size_t n_methods)
{
    *h = (struct rpc_health){.methods = methods, .n_methods = n_methods};
    queue_init(&h->watchers);
}

/* "/pkg.Service/Method" belongs to "pkg.Service". */
static bool path_is_of(const char *path, const uint8_t *service, size_t n_bytes)
{
    return strlen(path) > n_bytes + 1 && memcmp(path + 1, service, n_bytes) == 0 &&
           path[n_bytes + 1] == '/';
}

static bool known(const struct rpc_health *h, const uint8_t *service, size_t n_bytes)
{
    if (n_bytes == 0)
        return true;
    for (size_t i = 0; i < h->n_methods; i++)
        if (path_is_of(h->methods[i].path, service, n_bytes))
            return true;
    return path_is_of(rpc_health_methods[0].path, service, n_bytes);
}

/* 0 and the status of the service that HealthCheckRequest names, or RS_EINVAL. */
static int answer(const struct rpc_health *h, const void *data, size_t n_bytes, enum status *ret)
{
    struct wire w;
    struct wire_field f, service = {.data = (const uint8_t *)""};
    int r;
    wire_init(&w, data, n_bytes);
    while ((r = wire_next(&w, &f)) == 1)
        if (f.number == 1 && f.type == WIRE_BYTES)
            service = f;
    if (r < 0)
        return r;
    if (!known(h, service.data, service.n_bytes))
        *ret = SERVICE_UNKNOWN;
    else
        *ret = h->stopping ? NOT_SERVING : SERVING;
    return 0;
}

static int send_status(struct rpc_call *call, enum status status)
{
    const uint8_t bytes[2] = {1 << 3 | WIRE_VARINT, (uint8_t)status};
    return rpc_call_send(call, bytes, sizeof bytes);
}

static void check(struct rpc_call *call, const void *data, size_t n_bytes)
{
    enum status status;
    if (answer(rpc_call_context(call), data, n_bytes, &status) != 0)
        rpc_call_finish(call, RS_EINVAL, "malformed HealthCheckRequest");
    else if (status == SERVICE_UNKNOWN)
        rpc_call_finish(call, RS_ENOTFOUND, "no such service here");
    else
        rpc_call_finish(call, send_status(call, status), NULL);
}

static void watch(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct rpc_health *h = rpc_call_context(call);
    enum status status;
    if (answer(h, data, n_bytes, &status) != 0) {
        rpc_call_finish(call, RS_EINVAL, "malformed HealthCheckRequest");
        return;
    }
    struct watcher *w = mem_alloc(sizeof *w);
    if (w == NULL) {
        rpc_call_finish(call, RS_ENOMEM, NULL);
        return;
    }
    w->call = call;
    queue_push(&h->watchers, &w->link);
    rpc_call_set_arg(call, w);
    if (send_status(call, status) == RS_ENOMEM)
        rpc_call_finish(call, RS_ENOMEM, NULL);
}

static void watch_ended(struct rpc_call *call, int reason)
{
    struct watcher *w = rpc_call_arg(call);
    (void)reason;
    if (w != NULL)
        queue_remove(&w->link);
    mem_free(w);
}

void rpc_health_stop(struct rpc_health *h)
{
    h->stopping = true;
    queue_foreach_safe (q, tmp, &h->watchers) {
        struct rpc_call *call = container_of(q, struct watcher, link)->call;
        (void)send_status(call, NOT_SERVING); /* a watcher who can't be told still sees the end */
        rpc_call_finish(call, RS_EUNAVAIL, "the daemon stops");
    }
}

const struct rpc_method rpc_health_methods[RPC_HEALTH_N_METHODS] = {
    {.path = "/grpc.health.v1.Health/Check",
     .kind = RPC_UNARY,
     .max_request_bytes = 4096,
     .on_message = check},
    {.path = "/grpc.health.v1.Health/Watch",
     .kind = RPC_SERVER_STREAM,
     .max_request_bytes = 4096,
     .on_message = watch,
     .on_end = watch_ended},
};
