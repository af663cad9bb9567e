/* The server over gRPC C core.
 *
 * All gRPC calls are made on the loop thread. A thread waits on the completion queue while there is
 * nothing to do: it posts the first tag to the mailbox and then rests, and the loop drains the
 * queue itself until it is dry, so that under load nothing is handed over between threads. Calls
 * that stream have a queue and a thread of their own, which only posts. A tag is embedded in what it
 * is about (a request slot, a call, the server), which lives until the tag has come back: calls
 * count their outstanding tags. We listen and accept ourselves (rpc_listen.h) and hand connected
 * descriptors to gRPC. Those with TLS it takes only from a listener of its own: that is a socket without
 * a file, which wants TLS too, and relays (rpc_relay.h) carry the bytes there.
 *
 * Stop: listeners close → gRPC server shutdown → its tag is back, no slot is armed, no call is left
 * → both completion queues' shutdown → both threads end → relays end → handles close → freed. No batch starts after
 * the queues' shutdown. */
#include "rpc/rpc.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "rpc/rpc_grpc_channel.h"
#include "rpc/rpc_grpc_inner.h"
#include "rpc/rpc_relay.h"

#include "base/banned.h"

/* Of one connection; what would be more waits at the client. */
#define MAX_STREAMS 16384
/* For a stopped server's last bytes to go through the relays. */
#define LAST_BYTES_MS 1000

static void relays_ended(struct rpc_server *s);

/* --- connections ------------------------------------------------------------------------------ */

/* At most so many per wake, so that calls get their turn in a storm of connections. */
#define ACCEPTS_PER_WAKE 64

static void relay_closed(struct rpc_relay *r, void *arg)
{
    struct rpc_server *s = arg;
    queue_remove(&r->link);
    mem_free(r);
    s->n_relays--;
    relays_ended(s);
}

/* gRPC needs a descriptor for each relay too, and may take it late: those that are still to come can't
 * be told from those that it has, so all count. */
static void relay(struct rpc_server *s, int fd, int max_fd)
{
    struct rpc_relay *r = mem_alloc(sizeof *r);
    max_fd -= (int)s->n_relays + 1;
    if (r == NULL)
        (void)close(fd);
    else if (rpc_relay_start(r, s->loop, fd, s->tls_name, max_fd, relay_closed, s) == 0) {
        queue_push(&s->relays, &r->link);
        s->n_relays++;
        return;
    }
    mem_free(r);
    s->n_failed_relays++;
}

static void on_connection(uv_poll_t *poll, int status, int events)
{
    struct rpc_server *s = poll->data;
    ptrdiff_t i_listener = poll - s->polls;
    struct rpc_listener *l = &s->listeners[i_listener];
    (void)events;
    if (status < 0)
        log_debug("rpc listener: %s", uv_strerror(status));
    for (int i = 0; i < ACCEPTS_PER_WAKE; i++) {
        int fd = rpc_listener_accept(l);
        if (fd < 0)
            return;
        if (s->with_tls[i_listener])
            relay(s, fd, l->max_fd);
        else
            grpc_server_add_channel_from_fd(s->grpc, fd, s->credentials);
    }
}

/* --- start ------------------------------------------------------------------------------------ */

static grpc_arg int_arg(const char *key, uint32_t value)
{
    grpc_arg a = {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key};
    a.value.integer = (int)(value > INT32_MAX ? INT32_MAX : value);
    return a;
}

static grpc_server *new_grpc_server(const struct rpc_server *s)
{
    const struct rpc_server_options *o = &s->options;
    grpc_arg args[] = {
        int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, rpc_services_max_request_bytes(&s->services)),
        int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, MAX_STREAMS),
        int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, o->keepalive_ms),
        int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, o->keepalive_timeout_ms),
        int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        /* Half the agreed interval: an honest client's ping may come a little early. */
        int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, o->keepalive_ms / 2),
        /* Small compressed messages could become large ones past the limit: none are taken. */
        int_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1U << GRPC_COMPRESS_NONE),
        int_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
        int_arg(GRPC_ARG_ENABLE_CHANNELZ, 0),
        int_arg(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, o->handshake_timeout_ms),
        int_arg(GRPC_ARG_ALLOW_REUSEPORT, 0),
    };
    grpc_channel_args a = {.num_args = sizeof args / sizeof *args, .args = args};
    return grpc_server_create(&a, NULL);
}

/* A name that nobody guesses or takes; who connects there without a certificate gets as far as anyone
 * from outside. */
static int start_tls(struct rpc_server *s, struct err *e)
{
    char address[sizeof s->tls_name + 16];
    grpc_server_credentials *credentials = NULL;
    uint64_t name[2];
    int r = rpc_grpc_tls_load(&s->tls, s->options.tls, e);
    if (r == 0)
        r = rpc_grpc_tls_credentials(&s->tls, s->options.tls_anonymous, &credentials, e);
    if (r != 0)
        return r;
    random_bytes(name, sizeof name);
    (void)snprintf(s->tls_name, sizeof s->tls_name, "reshard-tls-%016" PRIx64 "%016" PRIx64,
                   name[0], name[1]);
    (void)snprintf(address, sizeof address, "unix-abstract:%s", s->tls_name);
    if (grpc_server_add_http2_port(s->grpc, address, credentials) == 0)
        r = err_set(e, RS_EIO, "TLS: the inner socket can't be bound");
    grpc_server_credentials_release(credentials);
    return r;
}

static bool wants_tls(const struct rpc_server *s)
{
    for (size_t i = 0; i < MAX_LISTENERS; i++)
        if (s->with_tls[i])
            return true;
    return false;
}

static int start_grpc(struct rpc_server *s, struct err *e)
{
    /* It only hands over: were it to look at sockets too, its thread would do the loop's reading. */
    const grpc_completion_queue_attributes quiet = {
        .version = 1, .cq_completion_type = GRPC_CQ_NEXT, .cq_polling_type = GRPC_CQ_NON_POLLING};
    rpc_grpc_log_start(true);
    grpc_init();
    s->cq = grpc_completion_queue_create_for_next(NULL);
    s->stream_cq =
        grpc_completion_queue_create(grpc_completion_queue_factory_lookup(&quiet), &quiet, NULL);
    s->grpc = new_grpc_server(s);
    s->credentials = grpc_insecure_server_credentials_create();
    grpc_server_register_completion_queue(s->grpc, s->cq, NULL);
    s->n_handshakes_before = rpc_grpc_n_failed_handshakes();
    int r = rpc_grpc_slots_make(s, e);
    if (r == 0 && wants_tls(s))
        r = start_tls(s, e);
    if (r == 0)
        grpc_server_start(s->grpc);
    return r;
}

static int check_addresses(const struct rpc_server_options *o, struct err *e)
{
    bool tls = false;
    for (size_t i = 0; i < o->n_addresses && i < RPC_MAX_ADDRESSES; i++)
        tls = tls || o->addresses[i].tls;
    if (o->unix_path == NULL && o->tcp_address == NULL && o->n_addresses == 0)
        return err_set(e, RS_EINVAL, "neither a socket path nor an address to serve on");
    if (o->n_addresses > RPC_MAX_ADDRESSES)
        return err_set(e, RS_EINVAL, "%zu addresses, at most %d", o->n_addresses,
                       RPC_MAX_ADDRESSES);
    if (tls && o->tls == NULL)
        return err_set(e, RS_EINVAL,
                       "an address with TLS needs the files of authority, certificate and key");
    return 0;
}

static int open_plain(struct rpc_server *s, size_t i, const char *address, struct err *e)
{
    return s->options.insecure_network ? rpc_listen_network(&s->listeners[i], address, e)
                                       : rpc_listen_tcp(&s->listeners[i], address, e);
}

static int open_listeners(struct rpc_server *s, struct err *e)
{
    const struct rpc_server_options *o = &s->options;
    int r = check_addresses(o, e);
    if (r == 0 && o->unix_path != NULL)
        r = rpc_listen_unix(&s->listeners[0], o->unix_path, o->unix_mode, e);
    if (r == 0 && o->tcp_address != NULL)
        r = open_plain(s, 1, o->tcp_address, e);
    for (size_t i = 0; r == 0 && i < o->n_addresses; i++) {
        s->with_tls[i + 2] = o->addresses[i].tls;
        r = o->addresses[i].tls
                ? rpc_listen_network(&s->listeners[i + 2], o->addresses[i].address, e)
                : open_plain(s, i + 2, o->addresses[i].address, e);
    }
    return r;
}

static int open_poll(struct rpc_server *s, size_t i, struct err *e)
{
    struct rpc_listener *l = &s->listeners[i];
    if (l->fd < 0)
        return 0;
    rpc_listener_limit(l, s->options.max_connections_hint);
    int r = uv_poll_init(s->loop, &s->polls[i], l->fd);
    if (r != 0)
        return err_set(e, RS_EIO, "poll listener: %s", uv_strerror(r));
    s->polls[i].data = s;
    s->n_handles++;
    r = uv_poll_start(&s->polls[i], UV_READABLE, on_connection);
    return r == 0 ? 0 : err_set(e, RS_EIO, "poll listener: %s", uv_strerror(r));
}

static int open_handles(struct rpc_server *s, struct err *e)
{
    int r = uv_async_init(s->loop, &s->async, rpc_grpc_on_async);
    if (r != 0)
        return err_set(e, RS_EIO, "wake-up handle: %s", uv_strerror(r));
    s->async.data = s;
    s->n_handles++;
    (void)uv_timer_init(s->loop, &s->timer); /* never fails */
    s->timer.data = s;
    s->n_handles++;
    for (size_t i = 0; r == 0 && i < MAX_LISTENERS; i++)
        r = open_poll(s, i, e);
    return r;
}

static void on_thread_ended(struct mailbox_item *item);
static void on_stream_thread_ended(struct mailbox_item *item);

static int start_threads(struct rpc_server *s, struct err *e)
{
    int r = pthread_create(&s->stream_thread, NULL, rpc_grpc_wait_streams, s);
    if (r != 0)
        return err_set(e, err_from_errno(r), "completion queue thread: %s", strerror(r));
    r = pthread_create(&s->thread, NULL, rpc_grpc_wait, s);
    if (r != 0) {
        s->stream_queue_shut = true;
        grpc_completion_queue_shutdown(s->stream_cq);
        (void)pthread_join(s->stream_thread, NULL);
        return err_set(e, err_from_errno(r), "completion queue thread: %s", strerror(r));
    }
    s->n_threads = 2;
    return 0;
}

static void shut_queue(grpc_completion_queue *cq)
{
    grpc_completion_queue_shutdown(cq);
    while (grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL).type !=
           GRPC_QUEUE_SHUTDOWN)
        ;
}

/* Everything but the handles, which must be closed. */
static void destroy(struct rpc_server *s)
{
    if (s->cq != NULL && !s->queue_shut)
        shut_queue(s->cq);
    if (s->cq != NULL && !s->stream_queue_shut)
        shut_queue(s->stream_cq);
    if (s->cq != NULL) {
        grpc_server_destroy(s->grpc);
        grpc_server_credentials_release(s->credentials);
        grpc_completion_queue_destroy(s->cq);
        grpc_completion_queue_destroy(s->stream_cq);
        grpc_shutdown_blocking();
    }
    for (size_t i = 0; i < MAX_LISTENERS; i++)
        rpc_listener_close(&s->listeners[i]);
    rpc_grpc_tls_close(&s->tls);
    mem_free(s->slots);
    rpc_services_close(&s->services);
    mailbox_close(&s->mailbox);
    (void)sem_destroy(&s->queue_is_dry);
    mem_free(s);
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct rpc_server *s = handle->data;
    if (--s->n_handles > 0)
        return;
    void (*done)(void *arg) = s->done;
    void *arg = s->arg;
    destroy(s);
    if (done != NULL)
        done(arg);
}

static void close_handle(uv_handle_t *handle)
{
    if (handle->data != NULL && !uv_is_closing(handle))
        uv_close(handle, on_handle_closed);
}

static void stop_listening(struct rpc_server *s)
{
    for (size_t i = 0; i < MAX_LISTENERS; i++) {
        close_handle((uv_handle_t *)&s->polls[i]);
        rpc_listener_close(&s->listeners[i]);
    }
}

/* The last callback frees the server; without any handle it is freed now. */
static void close_handles(struct rpc_server *s)
{
    if (s->n_handles == 0) {
        destroy(s);
        return;
    }
    stop_listening(s);
    close_handle((uv_handle_t *)&s->timer);
    close_handle((uv_handle_t *)&s->async);
}

static void on_shut_down(struct tag *tag, bool ok);

static struct rpc_server *server_new(uv_loop_t *loop, const struct rpc_server_options *options)
{
    struct rpc_server *s = mem_zalloc(sizeof *s);
    if (s == NULL)
        return NULL;
    s->loop = loop;
    s->options = rpc_options_with_defaults(options);
    rs_assert(sem_init(&s->queue_is_dry, 0, 0) == 0);
    rpc_grpc_tls_init(&s->tls);
    mailbox_init(&s->mailbox, rpc_grpc_wake, s);
    queue_init(&s->thread_ended.link);
    s->thread_ended.fn = on_thread_ended;
    queue_init(&s->stream_thread_ended.link);
    s->stream_thread_ended.fn = on_stream_thread_ended;
    tag_init(&s->shutdown_tag, on_shut_down);
    queue_init(&s->calls);
    queue_init(&s->relays);
    for (size_t i = 0; i < MAX_LISTENERS; i++)
        rpc_listener_init(&s->listeners[i]);
    return s;
}

int rpc_server_start(uv_loop_t *loop, const struct rpc_server_options *options,
                     const struct rpc_method *methods, size_t n_methods, struct rpc_server **ret,
                     struct err *e)
{
    struct rpc_server *s = server_new(loop, options);
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the rpc server");
    int r = rpc_services_init(&s->services, &s->options, methods, n_methods, e);
    if (r == 0)
        r = open_listeners(s, e);
    if (r == 0)
        r = start_grpc(s, e);
    if (r == 0)
        r = open_handles(s, e);
    if (r == 0)
        r = start_threads(s, e);
    if (r != 0) {
        close_handles(s);
        return err_prefix(e, r, "rpc server");
    }
    rpc_grpc_slots_arm(s);
    *ret = s;
    return 0;
}

/* --- stop ------------------------------------------------------------------------------------- */

static void close_relays(struct rpc_server *s)
{
    queue_foreach (q, &s->relays)
        rpc_relay_close(container_of(q, struct rpc_relay, link));
}

static void on_last_bytes_over(uv_timer_t *timer)
{
    close_relays(timer->data);
}

/* The server's end, once gRPC is done with: its connections are closed, and the relays pass on what it
 * wrote last. */
static void relays_ended(struct rpc_server *s)
{
    if (s->stopping && s->n_threads == 0 && queue_empty(&s->relays))
        close_handles(s);
}

static void thread_joined(struct rpc_server *s)
{
    if (--s->n_threads > 0)
        return;
    mailbox_shut(&s->mailbox);
    (void)uv_timer_start(&s->timer, on_last_bytes_over, LAST_BYTES_MS, 0);
    relays_ended(s);
}

static void on_thread_ended(struct mailbox_item *item)
{
    struct rpc_server *s = container_of(item, struct rpc_server, thread_ended);
    (void)pthread_join(s->thread, NULL);
    thread_joined(s);
}

static void on_stream_thread_ended(struct mailbox_item *item)
{
    struct rpc_server *s = container_of(item, struct rpc_server, stream_thread_ended);
    (void)pthread_join(s->stream_thread, NULL);
    thread_joined(s);
}

void rpc_grpc_finish_stop(struct rpc_server *s)
{
    if (!s->shut_down || s->queue_shut || s->n_armed > 0 || s->n_served > 0)
        return;
    s->queue_shut = s->stream_queue_shut = true;
    grpc_completion_queue_shutdown(s->cq);
    grpc_completion_queue_shutdown(s->stream_cq);
}

static void on_shut_down(struct tag *tag, bool ok)
{
    struct rpc_server *s = container_of(tag, struct rpc_server, shutdown_tag);
    (void)ok;
    s->shut_down = true;
    rpc_grpc_finish_stop(s);
}

static void on_grace_over(uv_timer_t *timer)
{
    struct rpc_server *s = timer->data;
    grpc_server_cancel_all_calls(s->grpc);
}

static void end_streams(struct rpc_server *s)
{
    queue_foreach (q, &s->calls) {
        struct rpc_call *call = container_of(q, struct rpc_call, link);
        if (call->method->kind != RPC_UNARY)
            rpc_call_finish(call, RS_EUNAVAIL, "the daemon stops");
    }
}

void rpc_server_stop(struct rpc_server *s, uint32_t grace_ms, void (*done)(void *arg), void *arg)
{
    if (s->stopping)
        return;
    s->stopping = true;
    s->done = done;
    s->arg = arg;
    stop_listening(s);
    rpc_health_stop(&s->services.health);
    end_streams(s);
    hand_over(&s->shutdown_tag);
    grpc_server_shutdown_and_notify(s->grpc, s->cq, &s->shutdown_tag);
    (void)uv_timer_start(&s->timer, on_grace_over, grace_ms, 0);
}

uint16_t rpc_server_port(const struct rpc_server *s)
{
    return s->listeners[1].port;
}

uint16_t rpc_server_address_port(const struct rpc_server *s, size_t i)
{
    return i < s->options.n_addresses ? s->listeners[i + 2].port : 0;
}

int rpc_server_reload_tls(struct rpc_server *s, const struct rpc_tls_files *files, struct err *e)
{
    if (s->tls_name[0] == '\0')
        return err_set(e, RS_EPRECOND, "this server has no address with TLS");
    return rpc_grpc_tls_load(&s->tls, files, e);
}

uint64_t rpc_server_n_refused(const struct rpc_server *s)
{
    uint64_t n = rpc_grpc_n_failed_handshakes() - s->n_handshakes_before + s->n_failed_relays;
    for (size_t i = 0; i < MAX_LISTENERS; i++)
        n += s->listeners[i].n_turned_away;
    return n;
}

void rpc_server_last_refusal(const struct rpc_server *s, char ret[RPC_REFUSAL_BYTES])
{
    (void)s; /* gRPC tells for all of them */
    rpc_grpc_last_failed_handshake(ret);
}

uint32_t rpc_server_n_calls(const struct rpc_server *s)
{
    return s->n_calls;
}
