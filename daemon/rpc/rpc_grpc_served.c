/* The calls of the server over gRPC C core: request slots, a call's life, its batches. */
#include <string.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>

#include "base/clock.h"
#include "base/mem.h"
#include "rpc/rpc_grpc_bytes.h"
#include "rpc/rpc_grpc_inner.h"

#include "base/banned.h"

/* Requests that wait for a call, per method: what arrives beyond waits inside gRPC until one is
 * armed again. */
#define SLOTS_PER_METHOD 8

/* Live calls of a server; the next ones are refused with RS_EEXHAUSTED. A call costs about 12 kB in
 * gRPC. */
#define MAX_CALLS 32768

#define MAX_TOKEN_BYTES 256

/* A client cancels at its deadline by its own clock; on the wire the time left is rounded by up to
 * 1 %. */
#define DEADLINE_SLACK_NS 20000000U

static void call_free(struct served *c);
static void call_closed(struct served *c);

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

static grpc_op op_initial(void)
{
    return (grpc_op){.op = GRPC_OP_SEND_INITIAL_METADATA};
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
        ops[n++] = rpc_grpc_op_send(c->sending = rpc_grpc_bytes_of(m));
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
    rpc_grpc_bytes_drop(&c->sending);
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
    rpc_grpc_bytes_drop(&bytes);
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
    rpc_grpc_finish_stop(s);
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
        rpc_grpc_finish_stop(s);
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
    rpc_grpc_bytes_drop(&payload);
}

static void slot_init(struct slot *slot, struct rpc_server *s, const struct rpc_entry *entry,
                      void *registered)
{
    *slot = (struct slot){.server = s, .entry = entry, .registered = registered};
    tag_init(&slot->tag, on_request);
}

int rpc_grpc_slots_make(struct rpc_server *s, struct err *e)
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

void rpc_grpc_slots_arm(struct rpc_server *s)
{
    for (size_t i = 0; i < s->n_slots; i++)
        arm(&s->slots[i]);
}
