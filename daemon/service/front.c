#include "service/front.h"

#include <string.h>

#include "base/mem.h"
#include "peer/peer.h"
#include "service/api.h"
#include "service/api_common.h"
#include "service/proxy.h"
#include "service/roles.h"

#include "base/banned.h"

static const char attach[] = "/reshard.v1.Refit/Attach";

/* The method behind the door. */
static const struct rpc_method *behind(const char *path)
{
    size_t n;
    const struct rpc_method *methods = api_methods(&n);
    for (size_t i = 0; i < n; i++)
        if (strcmp(methods[i].path, path) == 0)
            return &methods[i];
    rs_assert(false); /* front_methods made the table of these */
    return NULL;
}

/* Who really calls: the one that a member passed on, else the one at the other end. A certificate that names somebody is as
 * good as a token from here on, but for what needs a memory socket. */
static int identify(struct rpc_call *call, struct err *e)
{
    const struct service *s = rpc_call_context(call);
    struct rpc_identity who = *rpc_call_identity(call);
    uint64_t client;
    int r = proxy_origin(call, &who, e);
    if (r < 0)
        return r;
    r = roles_check(s->config, &who, rpc_call_path(call), e);
    if (r != 0)
        return r;
    if (who.kind == RPC_TLS && who.name[0] != '\0') {
        who.kind = RPC_LOCAL;
        who.client = PROXY_CLIENT;
    }
    rpc_call_set_identity(call, &who);
    return api_identity(call, roles_identified(rpc_call_path(call)), &client, e);
}

static void open_behind(struct rpc_call *call)
{
    void (*on_open)(struct rpc_call *) = behind(rpc_call_path(call))->on_open;
    struct err e = {0};
    int r = identify(call, &e);
    if (r != 0)
        api_finish_error(call, r, &e);
    else if (on_open != NULL)
        on_open(call);
}

static void open_proxy(struct rpc_call *call)
{
    struct err e = {0};
    int r = identify(call, &e);
    if (r != 0)
        api_finish_error(call, r, &e);
    else
        proxy_open(call);
}

/* --- Attach: the role depends on the side -------------------------------------------------------- */

static void attach_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    const struct service *s = rpc_call_context(call);
    const struct rpc_identity *who = rpc_call_identity(call);
    uint64_t side = roles_hello_side(data, n_bytes);
    struct err e = {0};
    int r = who->client == PROXY_CLIENT
                ? err_set(&e, RS_EPERM,
                          "a worker attaches at its own node's daemon: say hello on "
                          "the memory socket, and attach on the Unix socket")
                : 0;
    if (r == 0 && (side == REFIT_SOURCE || side == REFIT_DESTINATION))
        r = roles_check_side(s->config, who, side == REFIT_SOURCE, &e);
    if (r != 0)
        api_finish_error(call, r, &e);
    else
        behind(attach)->on_message(call, data, n_bytes);
}

/* --- the table ----------------------------------------------------------------------------------- */

static struct rpc_method door(const struct rpc_method *method, bool member)
{
    struct rpc_method m = *method;
    if (member && proxy_wanted(m.path)) {
        m.on_open = open_proxy;
        m.on_message = proxy_message;
        m.on_half_close = proxy_half_close;
        m.on_end = proxy_end;
        return m;
    }
    m.on_open = open_behind;
    if (strcmp(m.path, attach) == 0)
        m.on_message = attach_message;
    return m;
}

int front_methods(const struct config *c, struct rpc_method **ret, size_t *ret_n, struct err *e)
{
    size_t n_api, n_peer;
    const struct rpc_method *api = api_methods(&n_api), *peer = peer_methods(&n_peer);
    bool member = c->n_nodes > 1 && c->me != c->coordinator_index;
    if (c->n_nodes <= 1)
        n_peer = 0;
    struct rpc_method *methods = mem_calloc(n_api + n_peer, sizeof *methods);
    if (methods == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the methods");
    for (size_t i = 0; i < n_api; i++)
        methods[i] = door(&api[i], member);
    for (size_t i = 0; i < n_peer; i++)
        methods[n_api + i] = peer[i];
    *ret = methods;
    *ret_n = n_api + n_peer;
    return 0;
}
