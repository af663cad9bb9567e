/* reshardctl serve: a daemon's state over HTTP, for a browser and for Prometheus. Reads only.
 *
 * A process of its own, so that no HTTP is spoken by who maps the workers' memory. One thread of the HTTP
 * library answers; it asks the daemon at most once in CACHE_MS for status, whoever asks it. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>
#include <microhttpd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/netaddr.h"
#include "client/cmd_online.h"
#include "client/ctl.h"
#include "client/ctl_metrics.h"
#include "client/ctl_phases.h"

#include "base/banned.h"

static const char *const usage =
    "usage: reshardctl serve [--listen ADDRESS:PORT]\n"
    "A page, and metrics, of the daemon at --socket, over HTTP until SIGINT or SIGTERM:\n"
    "  /                     what is in flight, versions, timelines, workers, nodes; for people\n"
    "  /metrics              for Prometheus; reshard_up 0 while the daemon does not answer\n"
    "  /api/status           as status --json\n"
    "  /api/versions         ?model=M[&last=N]; as versions --json\n"
    "  /api/timeline         ?model=M[&version=V | &last=N]; as timeline --json\n"
    "  --listen ADDRESS:PORT where (default 127.0.0.1:9817; port 0: any, which is printed). There "
    "is no\n"
    "                        password and no TLS: beyond loopback, put it behind something that "
    "has\n";

enum {
    CACHE_MS = 500,
    CONNECTIONS_MOST = 64,
    CONNECTION_TIMEOUT_S = 15,
    LAST_MOST = 1000,
    LAST_DEFAULT = 60,
    MODEL_BYTES_MOST = 512
};

/* client/page.html, by the linker. */
extern const char rs_page[], rs_page_end[];

struct serve {
    struct ctl ctl;
    json_t *status; /* the newest, or NULL where `why` says what failed */
    struct err why;
    uint64_t asked_ns; /* 0: never */
};

/* --- the daemon ------------------------------------------------------------------------------------ */

static int ask_once(struct serve *s, enum ctl_call call, json_t *request, json_t **ret,
                    struct err *e)
{
    struct ctl *c = &s->ctl;
    int r = c->link == NULL ? link_open(c->socket, ctl_deadline(c), &c->link, e) : 0;
    if (r == 0)
        return ctl_call(link_channel(c->link), call, request, ctl_deadline(c), ret, e);
    json_decref(request);
    return r;
}

/* Takes request. The daemon may have been started anew since the last call: then once more. */
static int ask(struct serve *s, enum ctl_call call, json_t *request, json_t **ret, struct err *e)
{
    struct link *before = s->ctl.link;
    if (before != NULL && !link_alive(before)) {
        link_unref(before);
        s->ctl.link = before = NULL;
    }
    int r = ask_once(s, call, json_incref(request), ret, e);
    bool lost = r == RS_EUNAVAIL || r == RS_EUNAUTH;
    if (lost && s->ctl.link != NULL) {
        link_unref(s->ctl.link);
        s->ctl.link = NULL;
        if (before != NULL)
            r = ask_once(s, call, json_incref(request), ret, e);
    }
    json_decref(request);
    return r;
}

/* Not older than CACHE_MS; borrowed. NULL: s->why. */
static const json_t *status_of(struct serve *s)
{
    uint64_t now = clock_mono_ns();
    if (s->asked_ns != 0 && now - s->asked_ns < CACHE_MS * UINT64_C(1000000))
        return s->status;
    json_decref(s->status);
    s->status = NULL;
    s->why = (struct err){0};
    int r = ask(s, CTL_STATUS, json_object(), &s->status, &s->why);
    if (r != 0)
        s->status = NULL;
    s->asked_ns = clock_mono_ns();
    return s->status;
}

/* --- answers --------------------------------------------------------------------------------------- */

static enum MHD_Result send_response(struct MHD_Connection *to, unsigned code, const char *type,
                                     struct MHD_Response *r)
{
    if (r == NULL)
        return MHD_NO;
    (void)MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    (void)MHD_add_response_header(r, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    (void)MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    (void)MHD_add_response_header(r, "Content-Security-Policy",
                                  "default-src 'self'; style-src 'unsafe-inline'; script-src "
                                  "'unsafe-inline'; frame-ancestors 'none'");
    if (code == MHD_HTTP_METHOD_NOT_ALLOWED)
        (void)MHD_add_response_header(r, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    enum MHD_Result sent = MHD_queue_response(to, code, r);
    MHD_destroy_response(r);
    return sent;
}

static enum MHD_Result send_text(struct MHD_Connection *to, unsigned code, const char *type,
                                 const void *text, size_t n)
{
    return send_response(
        to, code, type,
        MHD_create_response_from_buffer(n, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY));
}

/* Takes j. */
static enum MHD_Result send_json(struct MHD_Connection *to, unsigned code, json_t *j)
{
    char *text = j != NULL ? json_dumps(j, JSON_COMPACT | JSON_REAL_PRECISION(6)) : NULL;
    enum MHD_Result r =
        text != NULL ? send_text(to, code, "application/json", text, strlen(text)) : MHD_NO;
    free(text);
    json_decref(j);
    return r;
}

static enum MHD_Result send_error(struct MHD_Connection *to, int code, const struct err *e)
{
    unsigned http = code == RS_EINVAL      ? MHD_HTTP_BAD_REQUEST
                    : code == RS_ENOTFOUND ? MHD_HTTP_NOT_FOUND
                                           : MHD_HTTP_SERVICE_UNAVAILABLE;
    return send_json(to, http, json_pack("{sbss}", "ok", 0, "error", err_text(e, code)));
}

/* Of a model's last refit; NULL: it has none, or can't be had now. */
static json_t *phases_of_last(struct serve *s, const json_t *model)
{
    const json_t *last = json_object_get(model, "last");
    json_t *reply, *phases = NULL;
    struct err e = {0};
    if (last == NULL)
        return NULL;
    json_t *request = json_pack("{sssI}", "model", jstr(model, "model"), "version",
                                (json_int_t)jnum(last, "version"));
    if (ask(s, CTL_TIMELINE, request, &reply, &e) != 0)
        return NULL;
    const json_t *version = json_array_get(json_object_get(reply, "versions"), 0);
    if (version != NULL)
        phases = phases_of(version);
    json_decref(reply);
    return phases;
}

/* A status with "last_phases" (ctl_metrics.h). NULL: status is. */
static json_t *with_phases(struct serve *s, const json_t *status)
{
    json_t *all = json_copy((json_t *)(uintptr_t)status), *phases = json_object(), *m;
    size_t i;
    json_array_foreach(json_object_get(status, "models"), i, m)
    {
        json_t *p = phases_of_last(s, m);
        if (p != NULL)
            (void)json_object_set_new(phases, jstr(m, "model"), p);
    }
    (void)json_object_set_new(all, "last_phases", phases);
    return all;
}

static enum MHD_Result send_metrics(struct serve *s, struct MHD_Connection *to)
{
    json_t *all = with_phases(s, status_of(s));
    struct buf b;
    buf_init(&b);
    metrics_write(all, &b);
    json_decref(all);
    enum MHD_Result r = buf_error(&b) == 0 ? send_text(to, MHD_HTTP_OK, "text/plain; version=0.0.4",
                                                       b.data, b.n_bytes)
                                           : MHD_NO;
    buf_close(&b);
    return r;
}

static enum MHD_Result send_status(struct serve *s, struct MHD_Connection *to)
{
    const json_t *status = status_of(s);
    if (status == NULL)
        return send_error(to, s->why.code, &s->why);
    return send_json(to, MHD_HTTP_OK, json_incref((json_t *)(uintptr_t)status));
}

/* ?model=, with &version= or &last=, into a request of Versions or Timeline. */
static int read_query(struct MHD_Connection *from, bool one, json_t **ret, struct err *e)
{
    const char *model = MHD_lookup_connection_value(from, MHD_GET_ARGUMENT_KIND, "model");
    const char *last = MHD_lookup_connection_value(from, MHD_GET_ARGUMENT_KIND, "last");
    const char *version =
        one ? MHD_lookup_connection_value(from, MHD_GET_ARGUMENT_KIND, "version") : NULL;
    uint64_t n = one ? 1 : LAST_DEFAULT, v = 0;
    if (model == NULL || strlen(model) > MODEL_BYTES_MOST)
        return err_set(e, RS_EINVAL, "?model= is missing or longer than %d bytes",
                       MODEL_BYTES_MOST);
    if (last != NULL && !cmd_parse_u64(last, 1, LAST_MOST, &n))
        return err_set(e, RS_EINVAL, "?last=: use 1 … %d", LAST_MOST);
    if (version != NULL && !cmd_parse_u64(version, 1, INT64_MAX, &v))
        return err_set(e, RS_EINVAL, "?version=: use 1 … 2^63-1");
    *ret = v != 0 ? json_pack("{sssI}", "model", model, "version", (json_int_t)v)
                  : json_pack("{sssI}", "model", model, "last", (json_int_t)n);
    return *ret != NULL ? 0 : err_set(e, RS_EINVAL, "?model= is no UTF-8");
}

static enum MHD_Result send_versions(struct serve *s, struct MHD_Connection *to, enum ctl_call call)
{
    json_t *request, *reply;
    struct err e = {0};
    int r = read_query(to, call == CTL_TIMELINE, &request, &e);
    if (r == 0)
        r = ask(s, call, request, &reply, &e);
    if (r == 0 && call == CTL_TIMELINE)
        phases_add(reply);
    return r == 0 ? send_json(to, MHD_HTTP_OK, reply) : send_error(to, r, &e);
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *to, const char *url,
                                  const char *method, const char *protocol, const char *body,
                                  size_t *n_body, void **state)
{
    struct serve *s = arg;
    static const char nothing[] =
        "There is nothing here. / is the page; /metrics, /api/status, /api/versions?model=M, "
        "/api/timeline?model=M\n";
    (void)protocol, (void)body, (void)n_body, (void)state;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return send_text(to, MHD_HTTP_METHOD_NOT_ALLOWED, "text/plain", "GET only\n", 9);
    if (strcmp(url, "/") == 0)
        return send_text(to, MHD_HTTP_OK, "text/html; charset=utf-8", rs_page,
                         (size_t)(rs_page_end - rs_page));
    if (strcmp(url, "/metrics") == 0)
        return send_metrics(s, to);
    if (strcmp(url, "/api/status") == 0)
        return send_status(s, to);
    if (strcmp(url, "/api/versions") == 0)
        return send_versions(s, to, CTL_VERSIONS);
    if (strcmp(url, "/api/timeline") == 0)
        return send_versions(s, to, CTL_TIMELINE);
    return send_text(to, MHD_HTTP_NOT_FOUND, "text/plain", nothing, sizeof nothing - 1);
}

/* --- the command ----------------------------------------------------------------------------------- */

static struct MHD_Daemon *listen_at(struct serve *s, const struct netaddr *at, struct err *e)
{
    struct sockaddr_storage address;
    socklen_t n;
    if (netaddr_sockaddr(at, &address, &n, e) != 0)
        return NULL;
    unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO | MHD_USE_ERROR_LOG |
                     (at->family == AF_INET6 ? MHD_USE_IPv6 : 0);
    struct MHD_Daemon *d =
        MHD_start_daemon(flags, at->port, NULL, NULL, on_request, s, MHD_OPTION_SOCK_ADDR, &address,
                         MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MOST,
                         MHD_OPTION_CONNECTION_TIMEOUT, CONNECTION_TIMEOUT_S, MHD_OPTION_END);
    char text[NETADDR_TEXT_BYTES];
    netaddr_format(at, text);
    if (d == NULL)
        (void)err_set(e, RS_EIO, "can't listen at %s: is the port in use, the address this host's?",
                      text);
    return d;
}

static void announce(const struct ctl *c, struct netaddr at, struct MHD_Daemon *d)
{
    char text[NETADDR_TEXT_BYTES];
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(d, MHD_DAEMON_INFO_BIND_PORT);
    if (info != NULL)
        at.port = info->port;
    netaddr_format(&at, text);
    if (c->json)
        (void)printf("{\"listen\": \"%s\"}\n", text);
    else
        (void)printf("http://%s/ shows %s; metrics at http://%s/metrics\n", text, c->socket, text);
    (void)fflush(stdout);
    if (!netaddr_is_loopback(&at))
        (void)fprintf(stderr,
                      "reshardctl serve: whoever reaches %s sees the daemon's state: there "
                      "is no password and no TLS\n",
                      text);
}

static int serve(struct serve *s, const struct netaddr *at)
{
    struct err e = {0};
    sigset_t ends;
    int caught;
    (void)sigemptyset(&ends);
    (void)sigaddset(&ends, SIGINT);
    (void)sigaddset(&ends, SIGTERM);
    (void)signal(SIGPIPE, SIG_IGN);
    (void)pthread_sigmask(SIG_BLOCK, &ends, NULL); /* before there are threads */
    struct MHD_Daemon *d = listen_at(s, at, &e);
    if (d == NULL)
        return ctl_fail(&s->ctl, e.code, &e);
    announce(&s->ctl, *at, d);
    (void)sigwait(&ends, &caught);
    MHD_stop_daemon(d);
    json_decref(s->status);
    return CMD_OK;
}

int cmd_serve(int argc, char **argv)
{
    struct serve s = {.status = NULL};
    const char *listen = "127.0.0.1:9817";
    const struct ctl_option own[] = {{"listen", &listen, NULL}};
    struct netaddr at;
    struct err e = {0};
    if (!ctl_begin(&s.ctl, "serve", usage, own, 1, 0, 0, argc, argv))
        return s.ctl.exit;
    if (netaddr_parse(listen, NETADDR_PORT_OR_ANY, &at, &e) != 0)
        s.ctl.exit = ctl_bad(&s.ctl, "--listen %s: %s", listen, err_text(&e, e.code));
    else
        s.ctl.exit = serve(&s, &at);
    ctl_end(&s.ctl);
    return s.ctl.exit;
}
