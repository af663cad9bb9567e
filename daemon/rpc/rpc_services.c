#include "rpc/rpc_services.h"

#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

static void refuse_unknown(struct rpc_call *call)
{
    rpc_call_finish(call, RS_EUNIMPL, "no such method here");
}

static const struct rpc_method unknown_method = {
    .path = "", .kind = RPC_BIDI, .on_open = refuse_unknown};
const struct rpc_entry rpc_unknown = {.method = &unknown_method};

static int add(struct rpc_services *s, const struct rpc_method *methods, size_t n, void *context,
               struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        if (methods[i].path[0] != '/' || rpc_services_find(s, methods[i].path) != NULL)
            return err_set(e, RS_EINVAL, "method '%s': twice, or not a path", methods[i].path);
        s->entries[s->n_entries++] = (struct rpc_entry){&methods[i], context};
    }
    return 0;
}

int rpc_services_init(struct rpc_services *s, const struct rpc_server_options *options,
                      const struct rpc_method *methods, size_t n_methods, struct err *e)
{
    *s = (struct rpc_services){0};
    size_t most = n_methods + RPC_HEALTH_N_METHODS + RPC_REFLECTION_N_METHODS;
    s->entries = mem_calloc(most, sizeof *s->entries);
    if (s->entries == NULL)
        return err_set(e, RS_ENOMEM, "no memory for %zu methods", most);
    rpc_health_init(&s->health, methods, n_methods);
    int r = rpc_reflection_init(&s->reflection, options->descriptor_set,
                                options->descriptor_set_bytes, methods, n_methods, e);
    if (r == 0)
        r = add(s, methods, n_methods, options->context, e);
    if (r == 0)
        r = add(s, rpc_health_methods, RPC_HEALTH_N_METHODS, &s->health, e);
    if (r == 0 && options->descriptor_set != NULL)
        r = add(s, rpc_reflection_methods, RPC_REFLECTION_N_METHODS, &s->reflection, e);
    if (r != 0)
        rpc_services_close(s);
    return r;
}

void rpc_services_close(struct rpc_services *s)
{
    mem_free(s->entries);
    s->entries = NULL;
    s->n_entries = 0;
}

const struct rpc_entry *rpc_services_find(const struct rpc_services *s, const char *path)
{
    for (size_t i = 0; i < s->n_entries; i++)
        if (strcmp(s->entries[i].method->path, path) == 0)
            return &s->entries[i];
    return NULL;
}

uint32_t rpc_services_max_request_bytes(const struct rpc_services *s)
{
    uint32_t most = 0;
    for (size_t i = 0; i < s->n_entries; i++)
        if (s->entries[i].method->max_request_bytes > most)
            most = s->entries[i].method->max_request_bytes;
    return most;
}
