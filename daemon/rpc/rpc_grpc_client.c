/* Blocking calls over gRPC C core.
 *
 * Every call has a completion queue of its own that is plucked by tag, so that a sender and a
 * receiver may wait at the same time. A batch whose wait ran out stays under way; its tag is
 * awaited before the next of its kind starts, and all are awaited before the call is freed. */
#include "rpc/rpc_client.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>

#include "base/mem.h"
#include "rpc/rpc_grpc_bytes.h"
#include "rpc/rpc_grpc_channel.h"

#include "base/banned.h"

/* A reply larger than this is refused: no daemon of ours sends one. */
#define MAX_REPLY_BYTES (256U << 20)

/* gRPC reads a connection only while some thread waits in it. A program that holds a stream and does
 * something else would answer no ping and lose its connection, so each channel has a thread that waits
 * on the channel's state, for as long as the channel lives. */
struct rpc_channel {
    grpc_channel *grpc;
    char *token;               /* owned, may be NULL */
    grpc_completion_queue *cq; /* the thread's */
    pthread_t thread;
    pthread_mutex_t mutex; /* closing, and grpc against its end */
    bool closing;
};

/* What a batch is waited for by; its address is the tag. */
struct batch {
    bool under_way;
};

struct rpc_stream {
    grpc_call *call;
    grpc_completion_queue *cq;
    grpc_metadata token;
    struct batch status_batch, send_batch, receive_batch;
    bool half_closed;
    bool ended; /* status and text are there */
    grpc_status_code status;
    grpc_slice text;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *sending, *received;
};

/* --- channel ---------------------------------------------------------------------------------- */

/* Starts to wait for the next state; false: the channel is closing. */
static bool watch_state(struct rpc_channel *c)
{
    (void)pthread_mutex_lock(&c->mutex);
    bool open = !c->closing;
    if (open)
        grpc_channel_watch_connectivity_state(c->grpc,
                                              grpc_channel_check_connectivity_state(c->grpc, 0),
                                              gpr_inf_future(GPR_CLOCK_REALTIME), c->cq, c);
    (void)pthread_mutex_unlock(&c->mutex);
    return open;
}

static void *keep_reading(void *arg)
{
    struct rpc_channel *c = arg;
    while (watch_state(c))
        (void)grpc_completion_queue_next(c->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    return NULL;
}

/* The destroyed channel's last state ends the thread's wait. */
static void destroy_channel(struct rpc_channel *c)
{
    (void)pthread_mutex_lock(&c->mutex);
    c->closing = true;
    grpc_channel_destroy(c->grpc);
    (void)pthread_mutex_unlock(&c->mutex);
}

static void destroy_queue(struct rpc_channel *c)
{
    grpc_completion_queue_shutdown(c->cq);
    while (grpc_completion_queue_next(c->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL).type !=
           GRPC_QUEUE_SHUTDOWN)
        ;
    grpc_completion_queue_destroy(c->cq);
    grpc_shutdown_blocking();
}

static void channel_free(struct rpc_channel *c)
{
    (void)pthread_mutex_destroy(&c->mutex);
    mem_free(c->token);
    mem_free(c);
}

static struct rpc_channel *channel_new(const char *token)
{
    struct rpc_channel *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return NULL;
    rs_assert(pthread_mutex_init(&c->mutex, NULL) == 0);
    if (token != NULL && (c->token = mem_strdup(token)) == NULL) {
        channel_free(c);
        return NULL;
    }
    return c;
}

static int connect_channel(struct rpc_channel *c, const struct rpc_channel_spec *spec,
                           struct err *e)
{
    rpc_grpc_log_start(false);
    grpc_init();
    int r = rpc_grpc_channel_new(spec, &c->grpc, e);
    if (r != 0) {
        grpc_shutdown_blocking();
        return r;
    }
    c->cq = grpc_completion_queue_create_for_next(NULL);
    r = pthread_create(&c->thread, NULL, keep_reading, c);
    if (r == 0)
        return 0;
    destroy_channel(c);
    destroy_queue(c);
    return err_set(e, err_from_errno(r), "channel's thread: %s", strerror(r));
}

static int check_token(const char *token, struct err *e)
{
    if (token == NULL)
        return 0;
    bool legal = grpc_header_nonbin_value_is_legal(grpc_slice_from_static_string(token)) != 0;
    return legal ? 0 : err_set(e, RS_EINVAL, "token holds bytes that no header may hold");
}

/* gRPC's own. A daemon that dies is told by the end of the socket, and calls have deadlines; one that has had no CPU for some
 * seconds, or stands in a debugger, keeps its clients. */
enum { PING_ANSWER_MS = 20000 };

int rpc_channel_open_tls(const char *target, const struct rpc_tls_files *tls,
                         const char *server_name, const char *token, struct rpc_channel **ret,
                         struct err *e)
{
    const struct rpc_channel_spec spec = {.target = target,
                                          .tls = tls,
                                          .server_name = server_name,
                                          .keepalive_timeout_ms = PING_ANSWER_MS,
                                          .max_message_bytes = MAX_REPLY_BYTES};
    int r = check_token(token, e);
    if (r != 0)
        return r;
    struct rpc_channel *c = channel_new(token);
    if (c == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a channel");
    r = connect_channel(c, &spec, e);
    if (r != 0)
        channel_free(c);
    else
        *ret = c;
    return r;
}

int rpc_channel_open(const char *target, const char *token, struct rpc_channel **ret, struct err *e)
{
    return rpc_channel_open_tls(target, NULL, NULL, token, ret, e);
}

void rpc_channel_close(struct rpc_channel *c)
{
    if (c == NULL)
        return;
    destroy_channel(c);
    (void)pthread_join(c->thread, NULL);
    destroy_queue(c);
    channel_free(c);
}

/* --- batches ---------------------------------------------------------------------------------- */

static gpr_timespec after_ms(uint32_t timeout_ms)
{
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_millis((int64_t)timeout_ms, GPR_TIMESPAN));
}

static void start(struct rpc_stream *s, const grpc_op *ops, size_t n_ops, struct batch *b)
{
    rs_assert(!b->under_way);
    b->under_way = true;
    rs_assert(grpc_call_start_batch(s->call, ops, n_ops, b, NULL) == GRPC_CALL_OK);
}

/* 0: done well; RS_EPEER: done, but the call is broken; RS_EDEADLINE: still under way. */
static int await(struct rpc_stream *s, struct batch *b, gpr_timespec deadline)
{
    if (!b->under_way)
        return 0;
    grpc_event e = grpc_completion_queue_pluck(s->cq, b, deadline, NULL);
    if (e.type != GRPC_OP_COMPLETE)
        return RS_EDEADLINE;
    b->under_way = false;
    return e.success != 0 ? 0 : RS_EPEER;
}

static gpr_timespec never(void)
{
    return gpr_inf_future(GPR_CLOCK_MONOTONIC);
}

static grpc_op op_initial(struct rpc_stream *s)
{
    grpc_op op = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    op.data.send_initial_metadata.count = GRPC_SLICE_IS_EMPTY(s->token.value) ? 0 : 1;
    op.data.send_initial_metadata.metadata = &s->token;
    return op;
}

static grpc_op op_receive_initial(struct rpc_stream *s)
{
    grpc_op op = {.op = GRPC_OP_RECV_INITIAL_METADATA};
    op.data.recv_initial_metadata.recv_initial_metadata = &s->initial;
    return op;
}

static grpc_op op_receive(struct rpc_stream *s)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &s->received;
    return op;
}

static grpc_op op_status(struct rpc_stream *s)
{
    grpc_op op = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    op.data.recv_status_on_client.trailing_metadata = &s->trailing;
    op.data.recv_status_on_client.status = &s->status;
    op.data.recv_status_on_client.status_details = &s->text;
    return op;
}

static grpc_byte_buffer *copy_in(const void *data, size_t n_bytes)
{
    grpc_slice slice = grpc_slice_from_copied_buffer(n_bytes == 0 ? "" : data, n_bytes);
    grpc_byte_buffer *b = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return b;
}

/* The bytes as one piece that the caller frees. */
static int copy_out(grpc_byte_buffer *bytes, void **ret, size_t *ret_n_bytes, struct err *e)
{
    grpc_byte_buffer_reader reader;
    grpc_slice slice;
    size_t n = grpc_byte_buffer_length(bytes), at = 0;
    uint8_t *copy = mem_alloc(n);
    if (copy == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a message of %zu bytes", n);
    if (!grpc_byte_buffer_reader_init(&reader, bytes)) {
        mem_free(copy);
        return err_set(e, RS_EPROTO, "message could not be read");
    }
    while (grpc_byte_buffer_reader_next(&reader, &slice) != 0) {
        memcpy(copy + at, GRPC_SLICE_START_PTR(slice), GRPC_SLICE_LENGTH(slice));
        at += GRPC_SLICE_LENGTH(slice);
        grpc_slice_unref(slice);
    }
    grpc_byte_buffer_reader_destroy(&reader);
    *ret = copy;
    *ret_n_bytes = at;
    return 0;
}

static int take_received(struct rpc_stream *s, void **ret, size_t *ret_n_bytes, struct err *e)
{
    int r = copy_out(s->received, ret, ret_n_bytes, e);
    grpc_byte_buffer_destroy(s->received);
    s->received = NULL;
    return r;
}

/* --- a call's life ---------------------------------------------------------------------------- */

static struct rpc_stream *stream_new(struct rpc_channel *c, const char *path, gpr_timespec deadline)
{
    struct rpc_stream *s = mem_zalloc(sizeof *s);
    if (s == NULL)
        return NULL;
    s->cq = grpc_completion_queue_create_for_pluck(NULL);
    grpc_slice method = grpc_slice_from_copied_string(path);
    s->call = grpc_channel_create_call(c->grpc, NULL, GRPC_PROPAGATE_DEFAULTS, s->cq, method, NULL,
                                       deadline, NULL);
    grpc_slice_unref(method);
    s->token.key = grpc_slice_from_static_string("reshard-token");
    s->token.value =
        c->token == NULL ? grpc_empty_slice() : grpc_slice_from_copied_string(c->token);
    s->text = grpc_empty_slice();
    grpc_metadata_array_init(&s->initial);
    grpc_metadata_array_init(&s->trailing);
    return s;
}

/* All batches must have been awaited. */
static void stream_free(struct rpc_stream *s)
{
    rpc_grpc_bytes_drop(&s->sending);
    rpc_grpc_bytes_drop(&s->received);
    grpc_metadata_array_destroy(&s->initial);
    grpc_metadata_array_destroy(&s->trailing);
    grpc_slice_unref(s->text);
    grpc_slice_unref(s->token.value);
    grpc_call_unref(s->call);
    grpc_completion_queue_shutdown(s->cq);
    while (grpc_completion_queue_pluck(s->cq, NULL, never(), NULL).type != GRPC_QUEUE_SHUTDOWN)
        ;
    grpc_completion_queue_destroy(s->cq);
    mem_free(s);
}

/* The status as ours: 0 or RS_E… and its text. */
static int status_of(const struct rpc_stream *s, struct err *e)
{
    if (s->status == GRPC_STATUS_OK)
        return 0;
    int r = err_from_status((int)s->status);
    int n = (int)GRPC_SLICE_LENGTH(s->text);
    return err_set(e, r, "%.*s", n, (const char *)GRPC_SLICE_START_PTR(s->text));
}

static int unary_result(struct rpc_stream *s, const char *path, void **ret, size_t *ret_n_bytes,
                        struct err *e)
{
    int r = status_of(s, e);
    if (r != 0)
        return r;
    if (s->received == NULL)
        return err_set(e, RS_EPROTO, "%s: the daemon sent no reply", path);
    return take_received(s, ret, ret_n_bytes, e);
}

int rpc_call_unary(struct rpc_channel *c, const char *path, const void *request, size_t n_bytes,
                   uint32_t timeout_ms, void **ret_reply, size_t *ret_n_bytes, struct err *e)
{
    struct rpc_stream *s = stream_new(c, path, after_ms(timeout_ms));
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "%s: no memory for a call", path);
    s->sending = copy_in(request, n_bytes);
    grpc_op ops[] = {op_initial(s),
                     rpc_grpc_op_send(s->sending),
                     {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
                     op_receive_initial(s),
                     op_receive(s),
                     op_status(s)};
    start(s, ops, sizeof ops / sizeof *ops, &s->status_batch);
    (void)await(s, &s->status_batch, never()); /* gRPC ends it at the call's deadline */
    int r = unary_result(s, path, ret_reply, ret_n_bytes, e);
    stream_free(s);
    return r;
}

int rpc_stream_open(struct rpc_channel *c, const char *path, uint32_t timeout_ms,
                    struct rpc_stream **ret, struct err *e)
{
    struct rpc_stream *s = stream_new(c, path, timeout_ms == 0 ? never() : after_ms(timeout_ms));
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "%s: no memory for a stream", path);
    grpc_op ops[] = {op_initial(s), op_receive_initial(s), op_status(s)};
    start(s, ops, sizeof ops / sizeof *ops, &s->status_batch);
    *ret = s;
    return 0;
}

/* Waits for an earlier send that ran out of time. */
static int finish_send(struct rpc_stream *s, gpr_timespec deadline, struct err *e)
{
    int r = await(s, &s->send_batch, deadline);
    if (r == RS_EDEADLINE)
        return err_set(e, r, "the daemon takes no more messages yet");
    rpc_grpc_bytes_drop(&s->sending);
    return r == 0 ? 0 : err_set(e, RS_EPEER, "the stream has ended: receiving tells why");
}

int rpc_stream_send(struct rpc_stream *s, const void *data, size_t n_bytes, uint32_t timeout_ms,
                    struct err *e)
{
    gpr_timespec deadline = after_ms(timeout_ms);
    int r = finish_send(s, deadline, e);
    if (r != 0)
        return r;
    if (s->half_closed)
        return err_set(e, RS_EINVAL, "a message after the half close");
    s->sending = copy_in(data, n_bytes);
    grpc_op op = rpc_grpc_op_send(s->sending);
    start(s, &op, 1, &s->send_batch);
    return finish_send(s, deadline, e);
}

int rpc_stream_half_close(struct rpc_stream *s, struct err *e)
{
    /* Behind an earlier send; without one gRPC takes it at once, and the call's end ends the wait.
     */
    int r = finish_send(s, never(), e);
    if (r != 0 || s->half_closed)
        return r;
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    s->half_closed = true;
    start(s, &op, 1, &s->send_batch);
    return finish_send(s, never(), e); /* needs no window, and the call's end ends it too */
}

/* The stream is over: its status, which may still be under way. */
static int end_of(struct rpc_stream *s, gpr_timespec deadline, struct err *e)
{
    if (!s->ended && await(s, &s->status_batch, deadline) == RS_EDEADLINE)
        return err_set(e, RS_EDEADLINE, "no status yet");
    s->ended = true;
    int r = status_of(s, e);
    return r == 0 ? 1 : r;
}

int rpc_stream_receive(struct rpc_stream *s, uint32_t timeout_ms, void **ret, size_t *ret_n_bytes,
                       struct err *e)
{
    gpr_timespec deadline = after_ms(timeout_ms);
    if (s->ended)
        return end_of(s, deadline, e);
    if (!s->receive_batch.under_way) {
        grpc_op op = op_receive(s);
        start(s, &op, 1, &s->receive_batch);
    }
    if (await(s, &s->receive_batch, deadline) == RS_EDEADLINE)
        return err_set(e, RS_EDEADLINE, "no message yet");
    return s->received == NULL ? end_of(s, deadline, e) : take_received(s, ret, ret_n_bytes, e);
}

void rpc_stream_cancel(struct rpc_stream *s)
{
    (void)grpc_call_cancel(s->call, NULL);
}

void rpc_stream_close(struct rpc_stream *s)
{
    if (s == NULL)
        return;
    rpc_stream_cancel(s);
    (void)await(s, &s->send_batch, never());
    (void)await(s, &s->receive_batch, never());
    (void)await(s, &s->status_batch, never());
    stream_free(s);
}
