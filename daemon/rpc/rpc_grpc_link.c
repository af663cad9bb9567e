/* The link over gRPC C core.
 *
 * All gRPC calls are made on the loop thread. One thread waits on the completion queue, which is also
 * what makes gRPC read the connection, and posts each tag to the mailbox. A tag is embedded in what it
 * is about (a call, the probe, the link), which lives until the tag has come back.
 *
 * The state is watched: each change is looked at, an idle channel is made to connect again, and while
 * it is down a probe, a call that fails at once, asks gRPC why.
 *
 * Close: calls and probe are cancelled, the channel is destroyed → all tags come back → on_end of each
 * call → the queue's shutdown → the thread ends → handles close → on_closed. */
#include "rpc/rpc_link_call.h"

#include <pthread.h>
#include <string.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>

#include "base/mem.h"
#include "rpc/rpc_grpc_bytes.h"
#include "rpc/rpc_grpc_channel.h"
#include "rpc/rpc_grpc_tag.h"

#include "base/banned.h"

#define MAX_MESSAGE_BYTES (16U << 20)
/* While down: how often gRPC is asked why. */
#define PROBE_MS 2000
/* How long a probe waits where the channel is connecting. */
#define PROBE_TIMEOUT_MS 1000
#define MAX_METADATA     16

/* What comes with a call's end. */
struct status {
    grpc_status_code code;
    grpc_slice text;
    grpc_metadata_array initial, trailing;
};

/* A call of our own that only asks whether, and if not why not. */
struct probe {
    struct tag tag;
    grpc_call *call; /* NULL: none is out */
    struct status status;
};

struct grpc_link {
    struct rpc_link base;
    uv_loop_t *loop;
    grpc_channel *channel;
    grpc_channel
        *next; /* with other certificates, once the connection that stands is gone; NULL: none */
    grpc_completion_queue *cq;
    pthread_t thread;
    struct mailbox mailbox;
    struct mailbox_item thread_ended;
    uv_async_t async;
    uv_timer_t timer;
    unsigned n_handles; /* open */
    unsigned n_out;     /* calls, and tags of link and probe */
    struct tag watch_tag;
    grpc_connectivity_state state;
    struct probe probe;
    struct err down; /* what on_down said last */
    bool with_tls;
    bool queue_shut;
};

struct grpc_link_call {
    struct rpc_link_call base;
    grpc_call *call;
    unsigned n_refs; /* outstanding tags */
    struct tag status_tag, receive_tag, send_tag;
    struct status status;
    grpc_byte_buffer *received, *sending;
    bool receive_out, send_out;
    bool status_in;
    bool read_all; /* no more messages will come */
    bool broken;   /* a send failed: nothing more will go */
};

static void unref_link(struct grpc_link *l);

static struct grpc_link *grpc_link(struct rpc_link *l)
{
    return container_of(l, struct grpc_link, base);
}

static struct grpc_link_call *grpc_link_call(struct rpc_link_call *c)
{
    return container_of(c, struct grpc_link_call, base);
}

/* --- tags ------------------------------------------------------------------------------------- */

static void *wait_on_queue(void *arg)
{
    struct grpc_link *l = arg;
    for (;;) {
        grpc_event e = grpc_completion_queue_next(l->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN)
            break;
        (void)mailbox_post(&l->mailbox, &tag_of(&e)->item);
    }
    (void)mailbox_post(&l->mailbox, &l->thread_ended);
    return NULL;
}

static void wake_loop(void *arg)
{
    struct grpc_link *l = arg;
    (void)uv_async_send(&l->async);
}

static void on_async(uv_async_t *async)
{
    struct grpc_link *l = async->data;
    (void)mailbox_drain(&l->mailbox);
}

/* --- status ----------------------------------------------------------------------------------- */

static void status_init(struct status *s)
{
    s->code = GRPC_STATUS_UNKNOWN;
    s->text = grpc_empty_slice();
    grpc_metadata_array_init(&s->initial);
    grpc_metadata_array_init(&s->trailing);
}

static void status_close(struct status *s)
{
    grpc_slice_unref(s->text);
    grpc_metadata_array_destroy(&s->initial);
    grpc_metadata_array_destroy(&s->trailing);
}

static grpc_op op_status(struct status *s)
{
    grpc_op op = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    op.data.recv_status_on_client.trailing_metadata = &s->trailing;
    op.data.recv_status_on_client.status = &s->code;
    op.data.recv_status_on_client.status_details = &s->text;
    return op;
}

static grpc_op op_receive_initial(struct status *s)
{
    grpc_op op = {.op = GRPC_OP_RECV_INITIAL_METADATA};
    op.data.recv_initial_metadata.recv_initial_metadata = &s->initial;
    return op;
}

static int status_code(const struct status *s)
{
    return s->code == GRPC_STATUS_OK ? 0 : err_from_status((int)s->code);
}

/* The text, cut at whole characters where it is long. */
static void status_text(const struct status *s, struct err *ret)
{
    (void)err_set(ret, status_code(s), "%.*s", (int)GRPC_SLICE_LENGTH(s->text),
                  (const char *)GRPC_SLICE_START_PTR(s->text));
}

static const void *status_details(const struct status *s, size_t *ret_n)
{
    for (size_t i = 0; i < s->trailing.count; i++) {
        const grpc_metadata *m = &s->trailing.metadata[i];
        if (grpc_slice_str_cmp(m->key, "grpc-status-details-bin") != 0)
            continue;
        *ret_n = GRPC_SLICE_LENGTH(m->value);
        return GRPC_SLICE_START_PTR(m->value);
    }
    *ret_n = 0;
    return NULL;
}

/* --- a call's batches ------------------------------------------------------------------------- */

static void start(struct grpc_link_call *c, const grpc_op *ops, size_t n_ops, struct tag *tag)
{
    c->n_refs++;
    hand_over(tag);
    rs_assert(grpc_call_start_batch(c->call, ops, n_ops, tag, NULL) == GRPC_CALL_OK);
}

/* One send batch at a time: the next message, and the half close behind the last one. */
static void send_next(struct grpc_link_call *c)
{
    grpc_op ops[2];
    size_t n = 0;
    if (c->send_out || c->broken || c->status_in || c->base.half_close_sent)
        return;
    struct rpc_message *m = rpc_link_call_next_out(&c->base);
    if (m != NULL) {
        c->sending = rpc_grpc_bytes_of(m);
        ops[n++] = rpc_grpc_op_send(c->sending);
    }
    if (c->base.half_close && c->base.n_out == 0) {
        ops[n++] = (grpc_op){.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
        c->base.half_close_sent = true;
    }
    if (n == 0)
        return;
    c->send_out = true;
    start(c, ops, n, &c->send_tag);
}

static void receive_next(struct grpc_link_call *c)
{
    if (c->receive_out || c->read_all || c->base.held)
        return;
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &c->received;
    c->receive_out = true;
    start(c, &op, 1, &c->receive_tag);
}

static void pump(struct rpc_link_call *base)
{
    struct grpc_link_call *c = grpc_link_call(base);
    send_next(c);
    receive_next(c);
}

static void call_free(struct grpc_link_call *c)
{
    rpc_grpc_bytes_drop(&c->sending);
    rpc_grpc_bytes_drop(&c->received);
    status_close(&c->status);
    grpc_call_unref(c->call);
    rpc_link_call_fini(&c->base);
    mem_free(c);
}

/* A tag is back. The last one, with the status in, ends the call. */
static void call_unref(struct grpc_link_call *c)
{
    struct grpc_link *l = grpc_link(c->base.link);
    struct err e = {0};
    size_t n = 0;
    if (--c->n_refs > 0)
        return;
    status_text(&c->status, &e);
    const void *details = status_details(&c->status, &n);
    rpc_link_call_ended(&c->base, status_code(&c->status), e.text, details, n);
    call_free(c);
    unref_link(l);
}

static void on_sent(struct tag *tag, bool ok)
{
    struct grpc_link_call *c = container_of(tag, struct grpc_link_call, send_tag);
    rpc_grpc_bytes_drop(&c->sending);
    c->send_out = false;
    c->broken = c->broken || !ok;
    send_next(c);
    if (!c->broken)
        rpc_link_call_drained(&c->base);
    call_unref(c);
}

/* Hands the bytes over: in place where they are one piece, as small messages are. */
static void deliver(struct grpc_link_call *c, grpc_byte_buffer *bytes)
{
    grpc_byte_buffer_reader reader;
    if (bytes->type != GRPC_BB_RAW || bytes->data.raw.compression != GRPC_COMPRESS_NONE ||
        !grpc_byte_buffer_reader_init(&reader, bytes)) {
        (void)grpc_call_cancel_with_status(c->call, GRPC_STATUS_UNIMPLEMENTED,
                                           "compressed messages are not taken here", NULL);
        c->base.open = false;
        return;
    }
    grpc_slice *piece = NULL;
    if (bytes->data.raw.slice_buffer.count == 1 &&
        grpc_byte_buffer_reader_peek(&reader, &piece) != 0) {
        rpc_link_call_received(&c->base, GRPC_SLICE_START_PTR(*piece), GRPC_SLICE_LENGTH(*piece));
    } else {
        grpc_slice whole = grpc_byte_buffer_reader_readall(&reader);
        rpc_link_call_received(&c->base, GRPC_SLICE_START_PTR(whole), GRPC_SLICE_LENGTH(whole));
        grpc_slice_unref(whole);
    }
    grpc_byte_buffer_reader_destroy(&reader);
}

static void on_received(struct tag *tag, bool ok)
{
    struct grpc_link_call *c = container_of(tag, struct grpc_link_call, receive_tag);
    grpc_byte_buffer *bytes = c->received;
    (void)ok; /* no bytes then */
    c->received = NULL;
    c->receive_out = false;
    if (bytes == NULL)
        c->read_all = true;
    else
        deliver(c, bytes);
    rpc_grpc_bytes_drop(&bytes);
    receive_next(c);
    call_unref(c);
}

static void on_status(struct tag *tag, bool ok)
{
    struct grpc_link_call *c = container_of(tag, struct grpc_link_call, status_tag);
    (void)ok; /* it comes at every end */
    c->status_in = true;
    call_unref(c);
}

/* --- a call's life ---------------------------------------------------------------------------- */

static gpr_timespec after_ms(uint32_t ms)
{
    return ms == 0 ? gpr_inf_future(GPR_CLOCK_MONOTONIC)
                   : gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                  gpr_time_from_millis((int64_t)ms, GPR_TIMESPAN));
}

static grpc_call *new_call(struct grpc_link *l, const char *path, uint32_t deadline_ms)
{
    grpc_slice method = grpc_slice_from_copied_string(path);
    grpc_call *call = grpc_channel_create_call(l->channel, NULL, GRPC_PROPAGATE_DEFAULTS, l->cq,
                                               method, NULL, after_ms(deadline_ms), NULL);
    grpc_slice_unref(method);
    return call;
}

static struct grpc_link_call *call_new(struct grpc_link *l, const char *path, uint32_t deadline_ms)
{
    struct grpc_link_call *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return NULL;
    c->call = new_call(l, path, deadline_ms);
    status_init(&c->status);
    tag_init(&c->status_tag, on_status);
    tag_init(&c->receive_tag, on_received);
    tag_init(&c->send_tag, on_sent);
    l->n_out++;
    return c;
}

/* gRPC copies metadata when the batch starts. Returns how many. */
static size_t fill_metadata(const struct rpc_link *l, const struct rpc_link_call_options *options,
                            grpc_metadata *ret)
{
    size_t n = 0;
    if (l->token != NULL)
        ret[n++] = (grpc_metadata){.key = grpc_slice_from_static_string("reshard-token"),
                                   .value = grpc_slice_from_copied_string(l->token)};
    for (size_t i = 0; i < options->n_metadata; i++)
        ret[n++] =
            (grpc_metadata){.key = grpc_slice_from_copied_string(options->metadata[i].key),
                            .value = grpc_slice_from_copied_string(options->metadata[i].value)};
    return n;
}

static void begin(struct grpc_link_call *c, const struct rpc_link_call_options *options)
{
    grpc_metadata metadata[MAX_METADATA + 1];
    size_t n = fill_metadata(c->base.link, options, metadata);
    grpc_op initial = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    initial.data.send_initial_metadata.count = n;
    initial.data.send_initial_metadata.metadata = metadata;
    grpc_op ops[] = {initial, op_receive_initial(&c->status), op_status(&c->status)};
    start(c, ops, sizeof ops / sizeof *ops, &c->status_tag);
    for (size_t i = 0; i < n; i++) {
        grpc_slice_unref(metadata[i].key);
        grpc_slice_unref(metadata[i].value);
    }
    receive_next(c);
}

static int open_call(struct rpc_link *base, const struct rpc_link_call_options *options,
                     const struct rpc_link_call_events *events, void *arg,
                     struct rpc_link_call **ret, struct err *e)
{
    if (options->n_metadata > MAX_METADATA)
        return err_set(e, RS_EINVAL, "%zu metadata, at most %d", options->n_metadata, MAX_METADATA);
    struct grpc_link_call *c = call_new(grpc_link(base), options->path, options->deadline_ms);
    if (c == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a call");
    rpc_link_call_init(&c->base, base, events, arg);
    begin(c, options);
    *ret = &c->base;
    return 0;
}

static void cancel(struct rpc_link_call *base, const char *text)
{
    struct grpc_link_call *c = grpc_link_call(base);
    c->read_all = true;
    (void)grpc_call_cancel_with_status(c->call, GRPC_STATUS_CANCELLED, text, NULL);
}

/* --- the connection's state ------------------------------------------------------------------- */

static void went_down(struct grpc_link *l, const char *text)
{
    (void)err_set(&l->down, RS_EUNAVAIL, "%s", text);
    rpc_link_went_down(&l->base, l->down.text);
}

/* gRPC's words for why it can't connect, and what they may mean: a server that refuses a certificate, or
 * what is no TLS, just hangs up. */
static void explain(const struct grpc_link *l, struct err *ret)
{
    static const char general[] = "failed to connect to all addresses; last error: ";
    struct err e = {0};
    status_text(&l->probe.status, &e);
    bool is_general = strncmp(e.text, general, sizeof general - 1) == 0;
    bool hung_up =
        strstr(e.text, "Socket closed") != NULL || strstr(e.text, "Connection reset") != NULL;
    const char *hint = "";
    if (hung_up && l->with_tls)
        hint = "; the peer hung up: it may not trust our certificate, or not speak TLS";
    else if (hung_up)
        hint = "; the peer hung up: it may want TLS";
    (void)err_set(ret, e.code, "%s%s", e.text + (is_general ? sizeof general - 1 : 0), hint);
}

static void on_probed(struct tag *tag, bool ok)
{
    struct grpc_link *l = container_of(tag, struct grpc_link, probe.tag);
    struct err e = {0};
    (void)ok;
    explain(l, &e);
    bool failed = l->probe.status.code == GRPC_STATUS_UNAVAILABLE;
    grpc_call_unref(l->probe.call);
    l->probe.call = NULL;
    status_close(&l->probe.status);
    if (failed && !l->base.up && !l->base.closing && strcmp(e.text, l->down.text) != 0)
        went_down(l, e.text);
    unref_link(l);
}

/* A call that waits for nothing: where there is no connection it fails at once and says why. */
static void probe(struct grpc_link *l)
{
    struct probe *p = &l->probe;
    if (p->call != NULL || l->base.closing)
        return;
    status_init(&p->status);
    tag_init(&p->tag, on_probed);
    p->call = new_call(l, "/grpc.health.v1.Health/Check", PROBE_TIMEOUT_MS);
    grpc_op ops[] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                     {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
                     op_receive_initial(&p->status),
                     op_status(&p->status)};
    l->n_out++;
    hand_over(&p->tag);
    rs_assert(grpc_call_start_batch(p->call, ops, sizeof ops / sizeof *ops, &p->tag, NULL) ==
              GRPC_CALL_OK);
}

static void on_probe_time(uv_timer_t *timer)
{
    struct grpc_link *l = timer->data;
    probe(l);
}

static void watch(struct grpc_link *l)
{
    hand_over(&l->watch_tag);
    grpc_channel_watch_connectivity_state(l->channel, l->state, gpr_inf_future(GPR_CLOCK_REALTIME),
                                          l->cq, &l->watch_tag);
}

static void state_changed(struct grpc_link *l)
{
    if (l->state == GRPC_CHANNEL_READY) {
        (void)uv_timer_stop(&l->timer);
        l->down.text[0] = '\0';
        rpc_link_went_up(&l->base);
        return;
    }
    if (l->base.up)
        went_down(l, "the connection broke");
    if (l->state != GRPC_CHANNEL_TRANSIENT_FAILURE || l->base.closing)
        return;
    probe(l);
    (void)uv_timer_start(&l->timer, on_probe_time, PROBE_MS, PROBE_MS);
}

/* The old channel's connection is gone, or there was none. Where its watch is out, this brings the tag back. */
static void take_next_channel(struct grpc_link *l)
{
    grpc_channel_destroy(l->channel);
    l->channel = l->next;
    l->next = NULL;
}

static void on_state(struct tag *tag, bool ok)
{
    struct grpc_link *l = container_of(tag, struct grpc_link, watch_tag);
    (void)ok;
    if (l->base.closing) {
        unref_link(l);
        return;
    }
    if (l->next != NULL)
        take_next_channel(l);
    l->state = grpc_channel_check_connectivity_state(l->channel, 1);
    state_changed(l);
    if (!l->base.closing)
        watch(l);
    else
        unref_link(l);
}

/* --- open and close --------------------------------------------------------------------------- */

static void destroy(struct grpc_link *l)
{
    grpc_completion_queue_destroy(l->cq);
    grpc_shutdown_blocking();
    mailbox_close(&l->mailbox);
    rpc_link_fini(&l->base);
    mem_free(l);
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct grpc_link *l = handle->data;
    if (--l->n_handles > 0)
        return;
    const struct rpc_link_events *events = l->base.events;
    bool was_open = l->base.closing;
    void *arg = l->base.arg;
    destroy(l);
    if (was_open && events->on_closed != NULL)
        events->on_closed(arg);
}

static void close_handles(struct grpc_link *l)
{
    uv_close((uv_handle_t *)&l->timer, on_handle_closed);
    uv_close((uv_handle_t *)&l->async, on_handle_closed);
}

static void on_thread_ended(struct mailbox_item *item)
{
    struct grpc_link *l = container_of(item, struct grpc_link, thread_ended);
    (void)pthread_join(l->thread, NULL);
    mailbox_shut(&l->mailbox);
    close_handles(l);
}

/* Something that had tags out has none any more. */
static void unref_link(struct grpc_link *l)
{
    rs_assert(l->n_out > 0);
    if (--l->n_out > 0)
        return;
    rs_assert(l->base.closing);
    grpc_completion_queue_shutdown(l->cq);
}

static void close_link(struct rpc_link *base)
{
    struct grpc_link *l = grpc_link(base);
    (void)uv_timer_stop(&l->timer);
    if (l->probe.call != NULL)
        (void)grpc_call_cancel(l->probe.call, NULL);
    if (l->next != NULL)
        grpc_channel_destroy(l->next);
    l->next = NULL;
    /* Its last state brings the watch's tag back. */
    grpc_channel_destroy(l->channel);
}

static int new_channel(const struct rpc_link_options *o, grpc_channel **ret, struct err *e)
{
    const struct rpc_channel_spec spec = {
        .target = o->target,
        .tls = o->tls,
        .server_name = o->server_name,
        .keepalive_ms = o->keepalive_ms,
        .keepalive_timeout_ms = o->keepalive_timeout_ms,
        .connect_timeout_ms = o->connect_timeout_ms,
        .max_message_bytes = o->max_message_bytes == 0 ? MAX_MESSAGE_BYTES : o->max_message_bytes};
    return rpc_grpc_channel_new(&spec, ret, e);
}

static int reload_tls(struct rpc_link *base, const struct rpc_link_options *options, struct err *e)
{
    struct grpc_link *l = grpc_link(base);
    grpc_channel *channel = NULL;
    if (!l->with_tls || options->tls == NULL)
        return err_set(e, RS_EPRECOND, "this link has no TLS");
    int r = new_channel(options, &channel, e);
    if (r != 0)
        return r;
    if (l->next != NULL)
        grpc_channel_destroy(l->next);
    l->next = channel;
    if (l->state != GRPC_CHANNEL_READY)
        take_next_channel(l);
    return 0;
}

static const struct rpc_link_carrier carrier = {.open = open_call,
                                                .pump = pump,
                                                .cancel = cancel,
                                                .reload_tls = reload_tls,
                                                .close = close_link};

static int make_channel(struct grpc_link *l, const struct rpc_link_options *o, struct err *e)
{
    l->with_tls = o->tls != NULL;
    rpc_grpc_log_start(false);
    grpc_init();
    int r = new_channel(o, &l->channel, e);
    if (r != 0)
        grpc_shutdown_blocking();
    return r;
}

static int open_handles(struct grpc_link *l, struct err *e)
{
    int r = uv_async_init(l->loop, &l->async, on_async);
    if (r != 0)
        return err_set(e, RS_EIO, "wake-up handle: %s", uv_strerror(r));
    (void)uv_timer_init(l->loop, &l->timer); /* never fails */
    l->async.data = l->timer.data = l;
    l->n_handles = 2;
    return 0;
}

/* After make_channel. Without handles the link is still the caller's to free. */
static int run(struct grpc_link *l, struct err *e)
{
    l->cq = grpc_completion_queue_create_for_next(NULL);
    int r = open_handles(l, e);
    if (r == 0 && (r = pthread_create(&l->thread, NULL, wait_on_queue, l)) != 0)
        r = err_set(e, err_from_errno(r), "completion queue thread: %s", strerror(r));
    if (r != 0) {
        grpc_channel_destroy(l->channel);
        grpc_completion_queue_shutdown(l->cq);
        (void)grpc_completion_queue_next(l->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        return r;
    }
    l->n_out = 1; /* the watch */
    l->state = grpc_channel_check_connectivity_state(l->channel, 1);
    watch(l);
    return 0;
}

static struct grpc_link *link_new(uv_loop_t *loop)
{
    struct grpc_link *l = mem_zalloc(sizeof *l);
    if (l == NULL)
        return NULL;
    l->loop = loop;
    mailbox_init(&l->mailbox, wake_loop, l);
    queue_init(&l->thread_ended.link);
    l->thread_ended.fn = on_thread_ended;
    tag_init(&l->watch_tag, on_state);
    return l;
}

/* Nothing of gRPC is there. */
static void link_free(struct grpc_link *l)
{
    mailbox_close(&l->mailbox);
    rpc_link_fini(&l->base);
    mem_free(l);
}

int rpc_link_open(uv_loop_t *loop, const struct rpc_link_options *options,
                  const struct rpc_link_events *events, void *arg, struct rpc_link **ret,
                  struct err *e)
{
    struct grpc_link *l = link_new(loop);
    if (l == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a link");
    int r = rpc_link_init(&l->base, &carrier, options, events, arg, e);
    if (r == 0)
        r = make_channel(l, options, e);
    if (r != 0) {
        link_free(l);
        return err_prefix(e, r, "link");
    }
    r = run(l, e);
    if (r == 0) {
        *ret = &l->base;
        return 0;
    }
    if (l->n_handles > 0)
        close_handles(l);
    else
        destroy(l);
    return err_prefix(e, r, "link");
}
