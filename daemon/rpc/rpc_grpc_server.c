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
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mailbox.h"
#include "base/mem.h"
#include "base/random.h"
#include "rpc/rpc_call.h"
#include "rpc/rpc_grpc_channel.h"
#include "rpc/rpc_grpc_tls.h"
#include "rpc/rpc_listen.h"
#include "rpc/rpc_relay.h"
#include "rpc/rpc_services.h"

#include "base/banned.h"

/* Requests that wait for a call, per method: what arrives beyond waits inside gRPC until one is
 * armed again. */
#define SLOTS_PER_METHOD 8
/* Live calls of a server; the next ones are refused with RS_EEXHAUSTED. A call costs about 12 kB in
 * gRPC. */
#define MAX_CALLS 32768
/* Of one connection; what would be more waits at the client. */
#define MAX_STREAMS     16384
#define MAX_TOKEN_BYTES 256
/* For a stopped server's last bytes to go through the relays. */
#define LAST_BYTES_MS 1000
/* Unix, TCP, and the list's. */
#define MAX_LISTENERS (2 + RPC_MAX_ADDRESSES)
/* A client cancels at its deadline by its own clock; on the wire the time left is rounded by up to
 * 1 %. */
#define DEADLINE_SLACK_NS 20000000U
/* Tags that the loop takes in a row before its other work. */
#define TAGS_PER_WAKE 256
/* Times that the loop looks again, after letting others run, before it wakes the thread to wait: a busy client has
 * answered by then, and two switches between threads are saved. */
#define LOOKS_AGAIN 2

/* The hand-over through gRPC is invisible to the thread sanitizer, since gRPC is not built with it.
 */
#if defined(__SANITIZE_THREAD__)
void __tsan_acquire(void *p);
void __tsan_release(void *p);
#define hand_over(p) __tsan_release(p)
#define take_over(p) __tsan_acquire(p)
#else
#define hand_over(p) ((void)(p))
#define take_over(p) ((void)(p))
#endif

struct tag {
    struct mailbox_item item;
    void (*fn)(struct tag *tag, bool ok);
    bool ok;
};

/* Waits for one call of one method (entry NULL: of unknown ones). */
struct slot {
    struct tag tag;
    struct rpc_server *server;
    const struct rpc_entry *entry;
    void *registered;
    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_byte_buffer *payload;
    grpc_call_details details;
};

struct served {
    struct rpc_call base;
    struct rpc_server *server;
    grpc_call *call;
    unsigned n_refs; /* outstanding tags */
    struct tag close_tag, receive_tag, send_tag;
    int cancelled; /* written by gRPC until close_tag is back */
    uint64_t timeout_ns;
    grpc_byte_buffer *received;
    grpc_byte_buffer *sending; /* NULL: no send batch is out */
    bool send_out;
    bool sent_initial;
    bool sent_status;
    bool close_out;   /* close_tag, or send_tag in its place, will tell of the end */
    bool close_rides; /* on send_tag: the call was answered before it was watched */
    bool broken;      /* a send failed: nothing more will go */
    grpc_slice status_text;
    grpc_metadata trailer;
};

struct rpc_server {
    uv_loop_t *loop;
    struct rpc_server_options options;
    struct rpc_services services;
    grpc_server *grpc;
    grpc_server_credentials *credentials;
    grpc_completion_queue *cq;
    pthread_t thread;
    sem_t queue_is_dry; /* the thread rests on it while the loop drains the queue */
    atomic_bool rests;  /* it does, or is about to: it has posted, or will now */
    bool draining;      /* the loop does the thread's work */
    /* Of calls that stream: their tags are out for as long as they live. Debian's gRPC, built with its asserts, looks
     * through all tags of a queue at each completion: 2,000 watchers cost each other call 2.4 us of 17. */
    grpc_completion_queue *stream_cq;
    pthread_t stream_thread;
    bool stream_queue_shut;
    unsigned n_threads;
    struct mailbox mailbox;
    struct mailbox_item thread_ended, stream_thread_ended;
    uv_async_t async;
    uv_timer_t timer;
    struct rpc_listener listeners[MAX_LISTENERS];
    uv_poll_t polls[MAX_LISTENERS];
    bool with_tls[MAX_LISTENERS];
    struct rpc_grpc_tls tls;
    char tls_name[64]; /* gRPC's own listener for TLS, abstract; "": none */
    struct queue relays;
    uint32_t n_relays;
    uint64_t n_failed_relays;
    uint64_t n_handshakes_before; /* that had failed in the process at the start */
    unsigned n_handles;           /* open */
    struct slot *slots;
    size_t n_slots;
    size_t n_armed;
    struct queue calls; /* that have not ended */
    uint32_t n_calls;
    uint32_t n_served; /* objects, ended ones with tags out included */
    struct tag shutdown_tag;
    bool stopping;
    bool shut_down; /* shutdown_tag is back */
    bool queue_shut;
    void (*done)(void *arg);
    void *arg;
};

static void call_free(struct served *c);
static void call_closed(struct served *c);
static void finish_stop(struct rpc_server *s);
static void relays_ended(struct rpc_server *s);

/* --- tags ------------------------------------------------------------------------------------- */

static void tag_run(struct mailbox_item *item)
{
    struct tag *t = container_of(item, struct tag, item);
    t->fn(t, t->ok);
}

static void tag_init(struct tag *t, void (*fn)(struct tag *tag, bool ok))
{
    queue_init(&t->item.link);
    t->item.fn = tag_run;
    t->fn = fn;
    t->ok = false;
}

static struct tag *tag_of(const grpc_event *e)
{
    struct tag *t = e->tag;
    take_over(t);
    t->ok = e->success != 0;
    return t;
}

static void *wait_on_queue(void *arg)
{
    struct rpc_server *s = arg;
    for (;;) {
        grpc_event e = grpc_completion_queue_next(s->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN)
            break;
        atomic_store(&s->rests, true);
        (void)mailbox_post(&s->mailbox, &tag_of(&e)->item);
        while (sem_wait(&s->queue_is_dry) != 0)
            ; /* interrupted */
    }
    (void)mailbox_post(&s->mailbox, &s->thread_ended);
    return NULL;
}

static void *wait_on_stream_queue(void *arg)
{
    struct rpc_server *s = arg;
    for (;;) {
        grpc_event e =
            grpc_completion_queue_next(s->stream_cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN)
            break;
        (void)mailbox_post(&s->mailbox, &tag_of(&e)->item);
    }
    (void)mailbox_post(&s->mailbox, &s->stream_thread_ended);
    return NULL;
}

static void wake_loop(void *arg)
{
    struct rpc_server *s = arg;
    (void)uv_async_send(&s->async);
}

/* The thread rests: the queue is the loop's, until it is dry. */
static void drain_queue(struct rpc_server *s)
{
    int looks = 0;
    for (int i = 0; i < TAGS_PER_WAKE; i++) {
        grpc_event e = grpc_completion_queue_next(s->cq, gpr_inf_past(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_OP_COMPLETE) {
            looks = LOOKS_AGAIN;
            tag_run(&tag_of(&e)->item);
            continue;
        }
        if (looks-- > 0) {
            (void)sched_yield();
            continue;
        }
        s->draining = false;
        (void)sem_post(&s->queue_is_dry);
        return;
    }
    (void)uv_async_send(&s->async); /* the loop's other work first */
}

static void on_async(uv_async_t *async)
{
    struct rpc_server *s = async->data;
    (void)mailbox_drain(&s->mailbox);
    if (atomic_exchange(&s->rests, false))
        s->draining = true;
    if (s->draining)
        drain_queue(s);
}

/* --- a call's batches ------------------------------------------------------------------------- */

static void call_unref(struct served *c)
{
    if (--c->n_refs == 0)
        call_free(c);
}

static void start(struct served *c, const grpc_op *ops, size_t n_ops, struct tag *tag)
{
    rs_assert(!c->server->queue_shut);
    c->n_refs++;
    hand_over(tag);
    rs_assert(grpc_call_start_batch(c->call, ops, n_ops, tag, NULL) == GRPC_CALL_OK);
}

static void unref_slice(void *message)
{
    rpc_message_unref(message);
}

/* The message's bytes as gRPC's, without a copy; takes the reference. */
static grpc_byte_buffer *wrap(struct rpc_message *m)
{
    grpc_slice slice = grpc_slice_new_with_user_data(m->data, m->n_bytes, unref_slice, m);
    grpc_byte_buffer *b = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return b;
}

static grpc_op op_initial(void)
{
    return (grpc_op){.op = GRPC_OP_SEND_INITIAL_METADATA};
}

static grpc_op op_message(grpc_byte_buffer *bytes)
{
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};
    op.data.send_message.send_message = bytes;
    return op;
}

static grpc_op op_status(struct served *c)
{
    grpc_op op = {.op = GRPC_OP_SEND_STATUS_FROM_SERVER};
    const struct rpc_call *base = &c->base;
    c->status_text = grpc_slice_from_copied_string(base->text == NULL ? "" : base->text);
    op.data.send_status_from_server.status = (grpc_status_code)err_status(base->code);
    op.data.send_status_from_server.status_details = &c->status_text;
    if (base->details != NULL) {
        c->trailer.key = grpc_slice_from_static_string("grpc-status-details-bin");
        c->trailer.value = grpc_slice_from_copied_buffer((const char *)base->details->data,
                                                         base->details->n_bytes);
        op.data.send_status_from_server.trailing_metadata_count = 1;
        op.data.send_status_from_server.trailing_metadata = &c->trailer;
    }
    return op;
}

static grpc_op op_close(struct served *c)
{
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    op.data.recv_close_on_server.cancelled = &c->cancelled;
    c->close_out = true;
    return op;
}

/* One send batch at a time: the first metadata, the next message, and the status behind the last
 * one. */
static void pump(struct rpc_call *call)
{
    struct served *c = container_of(call, struct served, base);
    bool finishing = call->state == RPC_CALL_FINISHING;
    grpc_op ops[4];
    size_t n = 0;
    if (c->send_out || c->sent_status || c->broken || call->state == RPC_CALL_ENDED ||
        (call->method->kind == RPC_UNARY && !finishing))
        return;
    if (!c->sent_initial)
        ops[n++] = op_initial();
    struct rpc_message *m = rpc_call_next_out(call);
    if (m != NULL)
        ops[n++] = op_message(c->sending = wrap(m));
    if (finishing && call->n_out == 0) {
        ops[n++] = op_status(c);
        c->sent_status = true;
        if (!c->close_out) {
            ops[n++] = op_close(c);
            c->close_rides = true;
        }
    }
    if (n == 0)
        return;
    c->sent_initial = true;
    c->send_out = true;
    start(c, ops, n, &c->send_tag);
}

static void on_sent(struct tag *tag, bool ok)
{
    struct served *c = container_of(tag, struct served, send_tag);
    if (c->sending != NULL)
        grpc_byte_buffer_destroy(c->sending);
    c->sending = NULL;
    c->send_out = false;
    c->broken = c->broken || !ok;
    if (c->close_rides)
        call_closed(c);
    else
        pump(&c->base);
    call_unref(c);
}

static void cut(struct rpc_call *call, int code, const char *text)
{
    struct served *c = container_of(call, struct served, base);
    c->broken = true;
    (void)grpc_call_cancel_with_status(c->call, (grpc_status_code)err_status(code), text, NULL);
}

static const struct rpc_carrier carrier = {.pump = pump, .cut = cut};

/* Hands the bytes to the handler: in place where they are one piece, as small messages are. */
static void deliver(struct served *c, grpc_byte_buffer *bytes)
{
    if (bytes->type != GRPC_BB_RAW || bytes->data.raw.compression != GRPC_COMPRESS_NONE) {
        rpc_call_finish(&c->base, RS_EUNIMPL, "compressed messages are not taken here");
        return;
    }
    grpc_byte_buffer_reader reader;
    if (!grpc_byte_buffer_reader_init(&reader, bytes)) {
        rpc_call_finish(&c->base, RS_EPROTO, "message could not be read");
        return;
    }
    size_t n_pieces = bytes->data.raw.slice_buffer.count;
    grpc_slice *piece = NULL;
    if (n_pieces == 1 && grpc_byte_buffer_reader_peek(&reader, &piece) != 0) {
        rpc_call_received(&c->base, GRPC_SLICE_START_PTR(*piece), GRPC_SLICE_LENGTH(*piece));
    } else {
        grpc_slice whole = grpc_byte_buffer_reader_readall(&reader);
        rpc_call_received(&c->base, GRPC_SLICE_START_PTR(whole), GRPC_SLICE_LENGTH(whole));
        grpc_slice_unref(whole);
    }
    grpc_byte_buffer_reader_destroy(&reader);
}

static void receive_next(struct served *c)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &c->received;
    start(c, &op, 1, &c->receive_tag);
}

static void on_received(struct tag *tag, bool ok)
{
    struct served *c = container_of(tag, struct served, receive_tag);
    grpc_byte_buffer *bytes = c->received;
    c->received = NULL;
    if (bytes != NULL && c->base.state == RPC_CALL_OPEN) {
        deliver(c, bytes);
        if (c->base.state == RPC_CALL_OPEN)
            receive_next(c);
    } else if (bytes == NULL && ok && !grpc_call_failed_before_recv_message(c->call)) {
        /* A broken stream ends without a message too, but must not look like a finished one. */
        rpc_call_half_closed(&c->base);
    }
    if (bytes != NULL)
        grpc_byte_buffer_destroy(bytes);
    call_unref(c);
}

/* --- a call's life ---------------------------------------------------------------------------- */

static int end_reason(const struct served *c)
{
    uint64_t slack = DEADLINE_SLACK_NS + c->timeout_ns / 64;
    uint64_t deadline = c->base.deadline_ns;
    if (c->cancelled == 0 && c->sent_status)
        return 0;
    if (deadline != UINT64_MAX && clock_mono_ns() + slack >= deadline)
        return RS_EDEADLINE;
    return RS_ECANCELED;
}

static void call_closed(struct served *c)
{
    queue_remove(&c->base.link);
    c->server->n_calls--;
    rpc_call_ended(&c->base, end_reason(c));
}

static void on_closed(struct tag *tag, bool ok)
{
    struct served *c = container_of(tag, struct served, close_tag);
    (void)ok; /* it comes at every end */
    call_closed(c);
    call_unref(c);
}

static void call_free(struct served *c)
{
    struct rpc_server *s = c->server;
    grpc_call_unref(c->call);
    grpc_slice_unref(c->status_text);
    grpc_slice_unref(c->trailer.value);
    rpc_call_close(&c->base);
    mem_free(c);
    s->n_served--;
    finish_stop(s);
}

/* ns from now, UINT64_MAX: never. */
static uint64_t time_left_ns(gpr_timespec deadline)
{
    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0)
        return UINT64_MAX;
    gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
    if (left.tv_sec < 0)
        return 0;
    if (left.tv_sec > 1000000000)
        return UINT64_MAX;
    return (uint64_t)left.tv_sec * 1000000000U + (uint64_t)left.tv_nsec;
}

static void set_deadline(struct served *c, gpr_timespec deadline)
{
    uint64_t left = time_left_ns(deadline);
    c->timeout_ns = left == UINT64_MAX ? 0 : left;
    c->base.deadline_ns = left == UINT64_MAX ? UINT64_MAX : clock_mono_ns() + left;
}

/* The call's token, NUL-terminated in `ret`; false: none, or none that can be right. */
static bool find_token(const grpc_metadata_array *metadata, char ret[MAX_TOKEN_BYTES])
{
    for (size_t i = 0; i < metadata->count; i++) {
        const grpc_metadata *m = &metadata->metadata[i];
        size_t n = GRPC_SLICE_LENGTH(m->value);
        if (grpc_slice_str_cmp(m->key, "reshard-token") != 0 || n >= MAX_TOKEN_BYTES)
            continue;
        memcpy(ret, GRPC_SLICE_START_PTR(m->value), n);
        ret[n] = '\0';
        return true;
    }
    return false;
}

static bool has_prefix(grpc_slice s, const char *prefix)
{
    size_t n = strlen(prefix);
    return GRPC_SLICE_LENGTH(s) >= n && memcmp(GRPC_SLICE_START_PTR(s), prefix, n) == 0;
}

/* Appends the bytes and a NUL; false: no room, or a NUL among them. */
static bool put_slice(grpc_slice s, char *to, size_t size, size_t *at)
{
    size_t n = GRPC_SLICE_LENGTH(s);
    if (n >= size - *at || memchr(GRPC_SLICE_START_PTR(s), '\0', n) != NULL)
        return false;
    memcpy(to + *at, GRPC_SLICE_START_PTR(s), n);
    to[*at + n] = '\0';
    *at += n + 1;
    return true;
}

/* What handlers may read, packed; NULL: nothing, too much, or no memory. */
static char *pack_metadata(const grpc_metadata_array *metadata)
{
    char packed[RPC_METADATA_MAX_BYTES + 1];
    size_t at = 0;
    for (size_t i = 0; i < metadata->count; i++) {
        const grpc_metadata *m = &metadata->metadata[i];
        if (!has_prefix(m->key, RPC_METADATA_PREFIX) ||
            grpc_slice_str_cmp(m->key, "reshard-token") == 0)
            continue;
        if (!put_slice(m->key, packed, sizeof packed - 1, &at) ||
            !put_slice(m->value, packed, sizeof packed - 1, &at))
            return NULL;
    }
    packed[at++] = '\0';
    char *kept = at == 1 ? NULL : mem_alloc(at);
    if (kept != NULL)
        memcpy(kept, packed, at);
    return kept;
}

/* A caller that showed a certificate is known by it, whatever token it sends. */
static void identify(const struct rpc_server *s, const struct slot *slot, struct rpc_identity *ret)
{
    char token[MAX_TOKEN_BYTES];
    if (s->tls_name[0] != '\0' && rpc_grpc_tls_identify(slot->call, ret))
        return;
    rpc_identify(&s->options, find_token(&slot->metadata, token) ? token : NULL, ret);
}

/* The call in the slot, as an object of ours; NULL: no memory. */
static struct served *call_new(struct slot *slot)
{
    struct rpc_server *s = slot->server;
    struct served *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return NULL;
    rpc_call_init(&c->base, &carrier, slot->entry == NULL ? &rpc_unknown : slot->entry,
                  &s->options);
    c->server = s;
    c->call = slot->call;
    c->status_text = grpc_empty_slice();
    c->trailer.value = grpc_empty_slice();
    tag_init(&c->close_tag, on_closed);
    tag_init(&c->receive_tag, on_received);
    tag_init(&c->send_tag, on_sent);
    set_deadline(c, slot->deadline);
    identify(s, slot, &c->base.identity);
    c->base.metadata = pack_metadata(&slot->metadata);
    queue_push(&s->calls, &c->base.link);
    s->n_calls++;
    s->n_served++;
    return c;
}

static bool wants_payload(const struct rpc_entry *entry)
{
    return entry != NULL && !rpc_kind_streams_in(entry->method->kind);
}

/* A call that is answered at once needs one batch, its end included; else its end is watched from
 * here on. */
static void watch_close(struct served *c)
{
    if (c->close_out)
        return;
    grpc_op op = op_close(c);
    start(c, &op, 1, &c->close_tag);
}

static void begin(struct served *c, grpc_byte_buffer *payload, bool with_payload)
{
    c->n_refs++; /* ours, until the tags hold it */
    rpc_call_opened(&c->base);
    if (with_payload) {
        if (payload != NULL)
            deliver(c, payload);
        rpc_call_half_closed(&c->base);
    } else if (c->base.state == RPC_CALL_OPEN) {
        receive_next(c);
    }
    watch_close(c);
    call_unref(c);
}

/* --- slots ------------------------------------------------------------------------------------ */

static void arm(struct slot *slot)
{
    struct rpc_server *s = slot->server;
    grpc_call_error r;
    slot->payload = NULL;
    slot->deadline = gpr_inf_future(GPR_CLOCK_REALTIME);
    grpc_metadata_array_init(&slot->metadata);
    grpc_call_details_init(&slot->details);
    hand_over(&slot->tag);
    if (slot->entry == NULL)
        r = grpc_server_request_call(s->grpc, &slot->call, &slot->details, &slot->metadata, s->cq,
                                     s->cq, &slot->tag);
    else
        r = grpc_server_request_registered_call(
            s->grpc, slot->registered, &slot->call, &slot->deadline, &slot->metadata,
            wants_payload(slot->entry) ? &slot->payload : NULL,
            slot->entry->method->kind == RPC_UNARY ? s->cq : s->stream_cq, s->cq, &slot->tag);
    rs_assert(r == GRPC_CALL_OK);
    s->n_armed++;
}

static void disarm(struct slot *slot)
{
    slot->server->n_armed--;
    grpc_metadata_array_destroy(&slot->metadata);
    grpc_call_details_destroy(&slot->details);
}

static void refuse(grpc_call *call, const char *text)
{
    (void)grpc_call_cancel_with_status(call, GRPC_STATUS_RESOURCE_EXHAUSTED, text, NULL);
    grpc_call_unref(call);
}

static void on_request(struct tag *tag, bool ok)
{
    struct slot *slot = container_of(tag, struct slot, tag);
    struct rpc_server *s = slot->server;
    struct served *c = NULL;
    if (!ok) { /* the server is shutting down: there is no call */
        disarm(slot);
        finish_stop(s);
        return;
    }
    if (slot->entry == NULL)
        slot->deadline = slot->details.deadline;
    if (s->n_calls >= MAX_CALLS)
        refuse(slot->call, "too many calls");
    else if ((c = call_new(slot)) == NULL)
        refuse(slot->call, "out of memory");
    grpc_byte_buffer *payload = slot->payload;
    disarm(slot);
    arm(slot);
    if (c != NULL)
        begin(c, payload, wants_payload(slot->entry));
    if (payload != NULL)
        grpc_byte_buffer_destroy(payload);
}

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

static void slot_init(struct slot *slot, struct rpc_server *s, const struct rpc_entry *entry,
                      void *registered)
{
    *slot = (struct slot){.server = s, .entry = entry, .registered = registered};
    tag_init(&slot->tag, on_request);
}

/* One set of slots per method, and one for methods that don't exist. */
static int make_slots(struct rpc_server *s, struct err *e)
{
    size_t n = (s->services.n_entries + 1) * SLOTS_PER_METHOD;
    s->slots = mem_calloc(n, sizeof *s->slots);
    if (s->slots == NULL)
        return err_set(e, RS_ENOMEM, "no memory for %zu request slots", n);
    for (size_t i = 0; i <= s->services.n_entries; i++) {
        const struct rpc_entry *entry = i < s->services.n_entries ? &s->services.entries[i] : NULL;
        void *registered = NULL;
        if (entry != NULL)
            registered = grpc_server_register_method(s->grpc, entry->method->path, NULL,
                                                     wants_payload(entry)
                                                         ? GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER
                                                         : GRPC_SRM_PAYLOAD_NONE,
                                                     0);
        for (size_t k = 0; k < SLOTS_PER_METHOD; k++)
            slot_init(&s->slots[s->n_slots++], s, entry, registered);
    }
    return 0;
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
    int r = make_slots(s, e);
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
    int r = uv_async_init(s->loop, &s->async, on_async);
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
    int r = pthread_create(&s->stream_thread, NULL, wait_on_stream_queue, s);
    if (r != 0)
        return err_set(e, err_from_errno(r), "completion queue thread: %s", strerror(r));
    r = pthread_create(&s->thread, NULL, wait_on_queue, s);
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
    mailbox_init(&s->mailbox, wake_loop, s);
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
    for (size_t i = 0; i < s->n_slots; i++)
        arm(&s->slots[i]);
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

/* Shuts the queue once nothing can start a batch any more. */
static void finish_stop(struct rpc_server *s)
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
    finish_stop(s);
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
