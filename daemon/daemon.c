#include "daemon.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include <uv.h>
#ifdef RS_SYSTEMD
#include <systemd/sd-daemon.h>
#endif

#include "base/log.h"
#include "base/mem.h"
#include "rpc/rpc.h"
#include "service/front.h"
#include "service/service.h"

#include "base/banned.h"

enum { STOP_GRACE_MS = 1500 };

/* proto/ as a FileDescriptorSet, for reflection (Makefile.programs). */
extern const uint8_t rs_descriptor_set[], rs_descriptor_set_end[];

struct daemon {
    uv_loop_t loop;
    uv_signal_t term, interrupt, hangup;
    const struct config *config;
    struct service *service;
    struct rpc_server *server;
    struct rpc_method *methods; /* owned; for as long as the server lives */
    bool stopping, failed;
    bool watching; /* signals */
};

static void tell_systemd(const char *state)
{
#ifdef RS_SYSTEMD
    (void)sd_notify(0, state); /* nothing to tell where NOTIFY_SOCKET is not set */
#else
    (void)state;
#endif
}

static void on_service_stopped(void *arg)
{
    struct daemon *d = arg;
    d->service = NULL;
    if (!d->watching)
        return;
    uv_close((uv_handle_t *)&d->term, NULL);
    uv_close((uv_handle_t *)&d->interrupt, NULL);
    uv_close((uv_handle_t *)&d->hangup, NULL);
    (void)signal(SIGTERM, SIG_IGN); /* what is left is to exit */
    (void)signal(SIGINT, SIG_IGN);
    (void)signal(SIGHUP, SIG_IGN);
}

static void on_server_stopped(void *arg)
{
    struct daemon *d = arg;
    d->server = NULL;
    service_set_refused(d->service, NULL, NULL);
    service_stop(d->service, on_service_stopped, d);
}

/* Calls first, then clients and the data plane, then the ledger. Signals are watched to the end: an impatient second
 * one must not cut the ledger off. */
static void stop(struct daemon *d)
{
    d->stopping = true;
    tell_systemd("STOPPING=1");
    rpc_server_stop(d->server, STOP_GRACE_MS, on_server_stopped, d);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct daemon *d = handle->data;
    if (d->stopping)
        return;
    log_info("stopping: signal %d", number);
    stop(d);
}

static struct rpc_tls_files tls_files(const struct config *c)
{
    return (struct rpc_tls_files){c->tls_ca, c->tls_certificate, c->tls_key};
}

/* Both ends of a node's connections: where it is called, and where it calls. */
static int reload_tls(const struct daemon *d, struct err *e)
{
    const struct rpc_tls_files tls = tls_files(d->config);
    int r = rpc_server_reload_tls(d->server, &tls, e);
    return r == 0 ? service_reload_tls(d->service, e) : r;
}

static void on_hangup(uv_signal_t *handle, int number)
{
    const struct daemon *d = handle->data;
    const struct config *c = d->config;
    struct err e = {0};
    (void)number;
    if (d->stopping)
        return;
    bool retried = service_retry_data_plane(d->service);
    if (retried)
        log_info("SIGHUP: the data plane is started now");
    if (c->tls_ca[0] == '\0' && retried)
        return;
    if (c->tls_ca[0] == '\0') {
        log_warn("SIGHUP: there are no certificates to read again ([cluster] tls_ca is not set)");
        return;
    }
    int r = reload_tls(d, &e);
    if (r != 0)
        log_error("SIGHUP: the certificates stay as they were: %s", err_text(&e, r));
    else
        log_info("SIGHUP: certificates were read again: authority %s, certificate %s; from the "
                 "next connection on",
                 c->tls_ca, c->tls_certificate);
}

static void on_ledger_failed(void *arg)
{
    struct daemon *d = arg;
    d->failed = true;
    if (d->stopping)
        return;
    log_error("stopping: the ledger failed, and what is in it is not known");
    stop(d);
}

static uint64_t refused_count(void *server)
{
    return rpc_server_n_refused(server);
}

/* For connections whose other end is there and says nothing; 20 s is gRPC's own. Nothing of ours waits for that: a client that dies
 * is told by its pidfd, a member that is silent by its beats, a cut link on which nothing is sent by the kernel (rpc_listen.c). One
 * that has had no CPU for some seconds, or stands in a debugger, keeps its workers. */
enum { PING_MS = 1000, PING_ANSWER_MS = 20000 };

/* On the node's own address in [cluster], besides what [daemon] says. */
static int server_start(struct daemon *d, struct err *e)
{
    const struct config *c = d->config;
    const struct rpc_tls_files tls = tls_files(c);
    bool secure = c->tls_ca[0] != '\0';
    const struct rpc_address address = {c->n_nodes > 0 ? c->nodes[c->me].address : NULL, secure};
    size_t n;
    int r = front_methods(c, &d->methods, &n, e);
    struct rpc_server_options options = {.unix_path = c->socket,
                                         .unix_mode = c->socket_mode,
                                         .tcp_address = c->tcp[0] != '\0' ? c->tcp : NULL,
                                         .addresses = &address,
                                         .n_addresses = c->n_nodes > 0,
                                         .tls = secure ? &tls : NULL,
                                         .insecure_network = c->insecure_network && !secure,
                                         .keepalive_ms = PING_MS,
                                         .keepalive_timeout_ms = PING_ANSWER_MS,
                                         .max_queued_messages = 1024,
                                         .max_queued_bytes = 16U << 20,
                                         .descriptor_set = rs_descriptor_set,
                                         .descriptor_set_bytes =
                                             (size_t)(rs_descriptor_set_end - rs_descriptor_set),
                                         .identify = service_identify,
                                         .context = d->service};
    if (r == 0)
        r = rpc_server_start(&d->loop, &options, d->methods, n, &d->server, e);
    if (r == 0)
        service_set_refused(d->service, refused_count, d->server);
    return r;
}

static void first_line(const struct daemon *d)
{
    const struct config *c = d->config;
    char tcp[32] = "";
    if (rpc_server_port(d->server) != 0)
        (void)snprintf(tcp, sizeof tcp, ", tcp port %u", rpc_server_port(d->server));
    log_info("reshardd serves: node %s, backend %s, devices %u, domains %s, socket %s%s", c->node,
             c->backend, c->devices,
             c->domains[0] != '\0'             ? c->domains
             : strcmp(c->backend, "cuda") == 0 ? "as the data plane finds them"
                                               : "one",
             c->socket, tcp);
    if (c->n_nodes > 0)
        log_info("cluster: %u nodes, coordinator %s at %s, this one at %s, data at %s, %s",
                 c->n_nodes, c->coordinator, c->nodes[c->coordinator_index].address,
                 c->nodes[c->me].address, c->data_address,
                 c->tls_ca[0] != '\0' ? "TLS both ways" : "no TLS");
}

static void signals_watch(struct daemon *d)
{
    rs_assert(uv_signal_init(&d->loop, &d->term) == 0 &&
              uv_signal_init(&d->loop, &d->interrupt) == 0 &&
              uv_signal_init(&d->loop, &d->hangup) == 0);
    d->term.data = d->interrupt.data = d->hangup.data = d;
    (void)uv_signal_start(&d->term, on_signal, SIGTERM);
    (void)uv_signal_start(&d->interrupt, on_signal, SIGINT);
    (void)uv_signal_start(&d->hangup, on_hangup, SIGHUP);
    d->watching = true;
}

/* The lock beside the socket comes before anything that another daemon could be using. */
static int start(struct daemon *d, struct err *e)
{
    int r = service_new(&d->loop, d->config, &d->service, e);
    if (r == 0)
        r = server_start(d, e);
    if (r == 0)
        r = service_start(d->service, e);
    return r;
}

/* What was started before something else failed ends in the usual order. */
static void give_up(struct daemon *d)
{
    if (d->server != NULL)
        rpc_server_stop(d->server, 0, on_server_stopped, d);
    else if (d->service != NULL)
        service_stop(d->service, on_service_stopped, d);
    (void)uv_run(&d->loop, UV_RUN_DEFAULT);
}

static void descriptors_raise(void)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) != 0 || l.rlim_cur == l.rlim_max)
        return;
    l.rlim_cur = l.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &l);
}

int daemon_run(const struct config *config)
{
    struct daemon d = {.config = config};
    struct err e = {0};
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGXFSZ,
                 SIG_IGN); /* a file size limit is a failed write, which the ledger tells */
    descriptors_raise();
    rs_assert(uv_loop_init(&d.loop) == 0);
    int r = start(&d, &e);
    if (r != 0) {
        log_error("not started: %s", err_text(&e, r));
        give_up(&d);
    } else {
        signals_watch(&d);
        service_on_failure(d.service, on_ledger_failed, &d);
        first_line(&d);
        tell_systemd("READY=1");
        (void)uv_run(&d.loop, UV_RUN_DEFAULT);
        if (d.failed)
            log_error("stopped: the ledger in %s failed; the next start reads what there is",
                      config->state_dir);
        else
            log_info("stopped");
    }
    mem_free(d.methods);
    int left = uv_loop_close(&d.loop);
    if (left != 0)
        log_error("handles were left open: %s", uv_strerror(left));
    return r == 0 && !d.failed ? EXIT_STOPPED : EXIT_FAILED;
}
