/* Whether a node's data port can be reached from here, before anyone relies on it. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "peer/address.h"
#include "peer/private.h"

#include "base/banned.h"

static void on_closed(uv_handle_t *handle)
{
    struct probe *probe = handle->data;
    struct peer *p = probe->p;
    if (--probe->n_open > 0)
        return;
    mem_free(probe);
    p->n_probes--;
    peer_maybe_gone(p);
}

static void probe_close(struct probe *probe)
{
    if (!uv_is_closing((uv_handle_t *)&probe->tcp)) {
        uv_close((uv_handle_t *)&probe->tcp, on_closed);
        uv_close((uv_handle_t *)&probe->timer, on_closed);
    }
}

static void probe_end(struct probe *probe, const char *why)
{
    struct session *s = probe->session;
    char text[256];
    probe->session = NULL;
    probe_close(probe);
    if (s == NULL)
        return;
    const struct peer_options *o = &probe->p->options;
    (void)snprintf(
        text, sizeof text,
        "the data port of node %s, %s, can't be reached from the coordinator %s: %s; set "
        "its data_address, or open the port",
        o->nodes[s->seat->node].name, probe->address, o->nodes[o->coordinator].name,
        why != NULL ? why : "");
    coordinator_probed(s, why != NULL ? text : NULL);
}

static void on_connect(uv_connect_t *connect, int status)
{
    struct probe *probe = connect->data;
    if (status != UV_ECANCELED)
        probe_end(probe, status == 0 ? NULL : uv_strerror(status));
}

static void on_timer(uv_timer_t *timer)
{
    probe_end(timer->data, "no answer within 2 s");
}

int probe_start(struct session *s, const char *data_address, uint16_t port, struct err *e)
{
    struct address a;
    struct sockaddr_storage to;
    socklen_t n;
    int r = address_parse(data_address, false, &a, e);
    a.port = port;
    if (r == 0)
        r = address_socket(&a, &to, &n, e);
    struct probe *probe = r == 0 ? mem_zalloc(sizeof *probe) : NULL;
    if (r == 0 && probe == NULL)
        r = err_set(e, RS_ENOMEM, "no memory to try a data port");
    if (r != 0)
        return r;
    uv_loop_t *loop = s->p->options.loop;
    rs_assert(uv_tcp_init(loop, &probe->tcp) == 0 && uv_timer_init(loop, &probe->timer) == 0);
    probe->tcp.data = probe->timer.data = probe->connect.data = probe;
    probe->p = s->p;
    probe->n_open = 2;
    s->p->n_probes++;
    (void)address_text(&a, probe->address, sizeof probe->address);
    r = uv_tcp_connect(&probe->connect, &probe->tcp, (const struct sockaddr *)&to, on_connect);
    if (r != 0) {
        probe_close(probe);
        return err_set(e, RS_EPRECOND, "the data port of its node, %s, can't be reached: %s",
                       probe->address, uv_strerror(r));
    }
    (void)uv_timer_start(&probe->timer, on_timer, PEER_PROBE_MS, 0);
    probe->session = s;
    s->probe = probe;
    return 0;
}

void probe_forget(struct probe *probe)
{
    probe->session = NULL;
    probe_close(probe);
}
