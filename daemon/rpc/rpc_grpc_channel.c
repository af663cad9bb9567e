#include "rpc/rpc_grpc_channel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <grpc/compression.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>

#include "base/log.h"
#include "base/netaddr.h"
#include "rpc/rpc_listen.h"

#include "base/banned.h"

/* A daemon that restarts is found again within a second. */
#define RECONNECT_FIRST_MS 100
#define RECONNECT_MOST_MS  1000
#define MAX_HOST_BYTES     254 /* a DNS name and NUL */
#define MAX_URI_BYTES      (4 * RPC_UNIX_PATH_MAX + 16)

/* --- gRPC's log ------------------------------------------------------------------------------- */

/* gRPC's log function is one for the process and takes no context, so what it counts can't hang on a
 * server. */
static atomic_uint_fast64_t n_failed_handshakes;
static pthread_mutex_t last_mutex = PTHREAD_MUTEX_INITIALIZER;
static char last_failed[RPC_REFUSAL_BYTES];

/* "Handshaking failed: UNKNOWN:Ssl handshake failed: SSL_ERROR_SSL: error:0A0000C7:SSL routines::peer did
 * not return a certificate {tsi_code:10, …": from behind the last "::", or else the first ": ", to the
 * brace. */
static void handshake_failed(const char *message)
{
    const char *end = strstr(message, " {");
    const char *routines = strstr(message, "SSL routines:");
    const char *start = strstr(message, ": ") + 2;
    if (routines != NULL)
        start = routines + strcspn(routines, ":") + strspn(routines + strcspn(routines, ":"), ":");
    int n = (int)(end != NULL && end > start ? (size_t)(end - start) : strlen(start));
    atomic_fetch_add_explicit(&n_failed_handshakes, 1, memory_order_relaxed);
    (void)pthread_mutex_lock(&last_mutex);
    (void)snprintf(last_failed, sizeof last_failed, "%.*s", n, start);
    (void)pthread_mutex_unlock(&last_mutex);
}

static void log_grpc(gpr_log_func_args *args)
{
    static const char failed[] = "Handshaking failed: ";
    if (strncmp(args->message, failed, sizeof failed - 1) == 0 &&
        strstr(args->file, "chttp2_server") != NULL)
        handshake_failed(args->message);
    /* At debug: a stranger at the socket must not fill anybody's log. */
    log_debug("grpc: %s", args->message);
}

void rpc_grpc_log_start(bool as_server)
{
    gpr_set_log_function(log_grpc);
    if (as_server)
        gpr_set_log_verbosity(GPR_LOG_SEVERITY_DEBUG); /* as which it tells of handshakes */
}

void rpc_grpc_last_failed_handshake(char ret[RPC_REFUSAL_BYTES])
{
    (void)pthread_mutex_lock(&last_mutex);
    memcpy(ret, last_failed, sizeof last_failed);
    (void)pthread_mutex_unlock(&last_mutex);
}

uint64_t rpc_grpc_n_failed_handshakes(void)
{
    return atomic_load_explicit(&n_failed_handshakes, memory_order_relaxed);
}

/* --- target ----------------------------------------------------------------------------------- */

struct target {
    char uri[MAX_URI_BYTES];   /* as gRPC reads it */
    char host[MAX_HOST_BYTES]; /* whose name the certificate must bear; "" of a Unix socket */
};

/* What a path or a zone may hold and a URI may not is escaped. */
static void escape(const char *text, char *ret, size_t size)
{
    static const char plain[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._-~:[]";
    size_t n = strlen(ret);
    for (const char *p = text; *p != '\0'; p++) {
        rs_assert(n + 4 <= size);
        if (strchr(plain, *p) != NULL)
            ret[n++] = *p;
        else
            n += (size_t)snprintf(ret + n, size - n, "%%%02X", (unsigned)(unsigned char)*p);
    }
    ret[n] = '\0';
}

static int unix_target(const char *target, struct target *ret, struct err *e)
{
    size_t n = strlen(target + 5);
    if (n == 0 || n > RPC_UNIX_PATH_MAX)
        return err_set(e, RS_EINVAL, "target '%s': a socket path has 1 to %d bytes", target,
                       RPC_UNIX_PATH_MAX);
    escape(target, ret->uri, sizeof ret->uri);
    return 0;
}

static void ip_target(const struct netaddr *a, struct target *ret)
{
    char text[NETADDR_TEXT_BYTES];
    struct netaddr host = *a;
    netaddr_format(a, text);
    (void)snprintf(ret->uri, sizeof ret->uri, "%s:", a->family == AF_INET ? "ipv4" : "ipv6");
    escape(text, ret->uri, sizeof ret->uri);
    host.has_port = false;
    host.interface[0] = '\0';
    netaddr_format(&host, text);
    (void)snprintf(ret->host, sizeof ret->host, "%s", text);
}

static bool is_host_name(const char *host, size_t n)
{
    static const char legal[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-_";
    return n > 0 && n < MAX_HOST_BYTES && strspn(host, legal) == n &&
           strspn(host, "0123456789.") != n;
}

static bool is_port(const char *text)
{
    size_t n = strlen(text);
    long value = n == 0 || n > 5 || strspn(text, "0123456789") != n ? 0 : strtol(text, NULL, 10);
    return value > 0 && value <= 65535;
}

static int name_target(const char *target, struct target *ret, struct err *e)
{
    const char *colon = strchr(target, ':');
    size_t n = colon == NULL ? 0 : (size_t)(colon - target);
    if (colon == NULL || !is_host_name(target, n) || !is_port(colon + 1))
        return err_set(e, RS_EINVAL,
                       "target '%s' is not ADDRESS:PORT, NAME:PORT or unix:PATH, like "
                       "192.0.2.1:7000, [2001:db8::1]:7000",
                       target);
    (void)snprintf(ret->uri, sizeof ret->uri, "dns:%s", target);
    (void)snprintf(ret->host, sizeof ret->host, "%.*s", (int)n, target);
    return 0;
}

static int read_target(const char *target, struct target *ret, struct err *e)
{
    struct netaddr a;
    const char *colon = strchr(target, ':');
    *ret = (struct target){.uri = ""};
    if (strncmp(target, "unix:", 5) == 0)
        return unix_target(target, ret, e);
    bool numeric = target[0] == '[' || (colon != NULL && strchr(colon + 1, ':') != NULL);
    int r = netaddr_parse(target, NETADDR_PORT, &a, numeric ? e : NULL);
    if (r != 0)
        return numeric ? err_prefix(e, r, "target") : name_target(target, ret, e);
    ip_target(&a, ret);
    if (strncmp(target, "localhost:", 10) == 0)
        (void)snprintf(ret->host, sizeof ret->host, "localhost");
    return 0;
}

/* --- channel ---------------------------------------------------------------------------------- */

static grpc_arg int_arg(const char *key, uint32_t value)
{
    grpc_arg a = {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key};
    a.value.integer = (int)(value > INT32_MAX ? INT32_MAX : value);
    return a;
}

static grpc_arg text_arg(const char *key, const char *value)
{
    grpc_arg a = {.type = GRPC_ARG_STRING, .key = (char *)(uintptr_t)key};
    a.value.string = (char *)(uintptr_t)value;
    return a;
}

static uint32_t or (uint32_t value, uint32_t otherwise)
{
    return value == 0 ? otherwise : value;
}

static grpc_channel *create(const struct rpc_channel_spec *s, const struct target *t,
                            const char *server_name, grpc_channel_credentials *credentials)
{
    uint32_t keepalive_ms = or (s->keepalive_ms, 1000);
    grpc_arg args[] = {
        int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, s->max_message_bytes),
        int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms),
        int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, or (s->keepalive_timeout_ms, 2000)),
        int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, keepalive_ms / 2),
        int_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, RECONNECT_FIRST_MS),
        int_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, or (s->connect_timeout_ms, 5000)), /* sic */
        int_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, RECONNECT_MOST_MS),
        int_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0), /* else http_proxy would catch even 127.0.0.1 */
        int_arg(GRPC_ARG_ENABLE_RETRIES, 0),    /* what is repeated is decided above */
        /* Small compressed messages could become large ones past the limit: none are taken. */
        int_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1U << GRPC_COMPRESS_NONE),
        int_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
        /* Another channel's connection and back-off are none of ours. */
        int_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),
        text_arg(GRPC_SSL_TARGET_NAME_OVERRIDE_ARG, server_name), /* last: of TLS alone */
    };
    grpc_channel_args a = {.num_args = sizeof args / sizeof *args, .args = args};
    if (s->tls == NULL)
        a.num_args--;
    return grpc_channel_create(t->uri, credentials, &a);
}

static int tls_credentials(const struct rpc_tls_files *files, grpc_channel_credentials **ret,
                           struct err *e)
{
    struct rpc_tls_pems pems;
    int r = rpc_tls_load(files, &pems, e);
    if (r != 0)
        return r;
    grpc_ssl_pem_key_cert_pair pair = {.private_key = pems.key, .cert_chain = pems.certificate};
    *ret = grpc_ssl_credentials_create_ex(pems.ca, pems.key == NULL ? NULL : &pair, NULL, NULL);
    rpc_tls_free(&pems);
    return *ret != NULL ? 0
                        : err_set(e, RS_EINVAL, "TLS: the files of '%s' can't be used", files->ca);
}

int rpc_grpc_channel_new(const struct rpc_channel_spec *spec, grpc_channel **ret, struct err *e)
{
    struct target t;
    grpc_channel_credentials *credentials = NULL;
    int r = read_target(spec->target, &t, e);
    if (r != 0)
        return r;
    const char *server_name = spec->server_name != NULL ? spec->server_name : t.host;
    if (spec->tls != NULL && server_name[0] == '\0')
        return err_set(e, RS_EINVAL, "target '%s' with TLS needs the server's name", spec->target);
    if (spec->tls != NULL)
        r = tls_credentials(spec->tls, &credentials, e);
    else
        credentials = grpc_insecure_credentials_create();
    if (r != 0)
        return r;
    *ret = create(spec, &t, server_name, credentials);
    grpc_channel_credentials_release(credentials);
    return 0;
}
