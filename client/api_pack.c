#include "client/api_pack.h"

#include <stdalign.h>
#include <string.h>

#include "base/mem.h"
#include "client/link.h"
#include "rpc/pb_budget.h"

#include "base/banned.h"

enum { CHUNK_BYTES = 64 << 10, MESSAGE_MOST_BYTES = 4 << 20, REPLY_MOST_REPEATED = 1 << 20 };

struct api_chunk {
    struct api_chunk *next;
    size_t used, size;
    alignas(max_align_t) char data[];
};

static struct api_chunk *arena_grow(struct api_arena *a, size_t bytes)
{
    size_t size = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES;
    struct api_chunk *c = a->failed ? NULL : mem_zalloc(sizeof *c + size);
    if (c == NULL) {
        a->failed = true;
        return NULL;
    }
    c->size = size;
    c->next = a->chunks;
    a->chunks = c;
    return c;
}

void *arena_alloc(struct api_arena *a, size_t n, size_t bytes)
{
    size_t total;
    if (__builtin_mul_overflow(n, bytes, &total) || total > SIZE_MAX / 2) {
        a->failed = true;
        return NULL;
    }
    total = (total + alignof(max_align_t) - 1) & ~(alignof(max_align_t) - 1);
    struct api_chunk *c = a->chunks;
    if (a->failed || c == NULL || c->size - c->used < total)
        c = arena_grow(a, total);
    if (c == NULL)
        return NULL;
    void *p = c->data + c->used;
    c->used += total;
    return p;
}

void arena_close(struct api_arena *a)
{
    while (a->chunks != NULL) {
        struct api_chunk *c = a->chunks;
        a->chunks = c->next;
        mem_free(c);
    }
}

int api_pack(const ProtobufCMessage *m, void **ret_data, size_t *ret_n_bytes, struct err *e)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    if (n > MESSAGE_MOST_BYTES)
        return err_set(e, RS_EEXHAUSTED, "%s of %zu bytes: messages hold at most 4 MiB",
                       m->descriptor->name, n);
    void *data = mem_alloc(n);
    if (data == NULL)
        return err_set(e, RS_ENOMEM, "%s: out of memory", m->descriptor->name);
    protobuf_c_message_pack(m, data);
    *ret_data = data;
    *ret_n_bytes = n;
    return 0;
}

int api_stream_send(struct rpc_stream *s, const ProtobufCMessage *m, uint64_t deadline_ns,
                    struct err *e)
{
    void *data;
    size_t n;
    int r = api_pack(m, &data, &n, e);
    if (r != 0)
        return r;
    r = rpc_stream_send(s, data, n, deadline_left_ms(deadline_ns), e);
    mem_free(data);
    return r;
}

static int unpack(const ProtobufCMessageDescriptor *type, void *data, size_t n, void **ret,
                  struct err *e)
{
    static const struct pb_limits limits = {.max_repeated = REPLY_MOST_REPEATED,
                                            .max_memory_bytes = (size_t)512 << 20};
    int r = pb_unpack(type, data, n, &limits, ret, e);
    mem_free(data);
    return r != 0 ? err_prefix(e, r == RS_EINVAL ? RS_EPROTO : r, "the daemon's answer") : 0;
}

int api_unary(struct rpc_channel *c, const char *path, const ProtobufCMessage *request,
              const ProtobufCMessageDescriptor *type, uint64_t deadline_ns, void **ret_reply,
              struct err *e)
{
    void *data, *reply;
    size_t n, n_reply;
    int r = api_pack(request, &data, &n, e);
    if (r != 0)
        return r;
    uint32_t left = deadline_left_ms(deadline_ns);
    r = left == 0 ? err_set(e, RS_EDEADLINE, "%s: the deadline has passed", path)
                  : rpc_call_unary(c, path, data, n, left, &reply, &n_reply, e);
    mem_free(data);
    return r != 0 ? r : unpack(type, reply, n_reply, ret_reply, e);
}

int api_receive(struct rpc_stream *s, const ProtobufCMessageDescriptor *type, uint32_t timeout_ms,
                void **ret, struct err *e)
{
    void *data;
    size_t n;
    int r = rpc_stream_receive(s, timeout_ms, &data, &n, e);
    return r != 0 ? r : unpack(type, data, n, ret, e);
}

int api_stream_status(struct rpc_stream *s, int code, struct err *e)
{
    struct err status = {0};
    void *data;
    size_t n;
    int r;
    while ((r = rpc_stream_receive(s, 100, &data, &n, &status)) == 0)
        mem_free(data);
    if (r == 1 || r == RS_EDEADLINE)
        return code;
    return err_set(e, r, "%s", err_text(&status, r));
}

int api_server_stream(struct rpc_channel *c, const char *path, const ProtobufCMessage *request,
                      uint64_t deadline_ns, struct rpc_stream **ret, struct err *e)
{
    uint32_t left = deadline_left_ms(deadline_ns);
    if (left == 0)
        return err_set(e, RS_EDEADLINE, "%s: the deadline has passed", path);
    struct rpc_stream *s;
    int r = rpc_stream_open(c, path, left, &s, e);
    if (r != 0)
        return r;
    r = api_stream_send(s, request, deadline_ns, e);
    if (r == 0)
        r = rpc_stream_half_close(s, e);
    if (r != 0) {
        r = api_stream_status(s, r, e);
        rpc_stream_close(s);
        return r;
    }
    *ret = s;
    return 0;
}
