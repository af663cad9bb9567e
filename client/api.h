/* The calls of reshard.v1 as C functions: structs in, protobuf bytes over a channel, structs out.
 *
 * The only place of the library that knows the generated code (api*.c). No retry, no state: one
 * call is one try, until deadline_ns (clock_mono_ns). Errors are the daemon's or the channel's. */
#ifndef RS_CLIENT_API_H
#define RS_CLIENT_API_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "client/reshard.h"
#include "layout/layout.h"
#include "rpc/rpc_client.h"

/* ---- api_layout.c ---- */

/* Streams the layout up, in pages. */
int api_put_layout(struct rpc_channel *c, const struct layout *l, uint64_t deadline_ns,
                   uint8_t ret_digest[16], struct err *e);

/* ---- api_attach.c ---- */

/* A worker's bindings, packed once into messages: they are sent again at each attach. */
struct api_pages {
    struct api_page {
        void *data;
        size_t n_bytes;
    } * pages;
    size_t n_pages;
};

/* segment_number gives a piece's index in the worker's list of segments. RS_EINVAL names the
 * piece's tensor. Adds to *pages (zeroed at first). */
int api_pages_add(struct api_pages *pages, bool shadow, const struct reshard_piece *pieces,
                  size_t n_pieces,
                  uint32_t (*segment_number)(const struct reshard_segment *, void *arg), void *arg,
                  struct err *e);
void api_pages_close(struct api_pages *pages);

struct api_hello {
    const char *model;
    const char *layout_name;
    const uint8_t *digest; /* 16 bytes */
    enum reshard_side side;
    enum reshard_receive receive;
    uint32_t rank, device;
    bool accept_automatically;
    uint64_t live_version, shadow_version, opened_version;
    uint32_t push;              /* that live_version belongs to; 0: none */
    bool again;                 /* it was attached before */
    uint64_t published_version; /* the last one, released or not */
    uint64_t resume;            /* worker id, or 0 */
    bool asleep;                /* no segments, no pages, no versions */
    const uint64_t *segments;
    size_t n_segments;
};

struct api_attached {
    uint64_t worker, incarnation, committed, held, applied;
    uint32_t grace_ms;
};

/* Opens the stream, says everything, waits for `attached`; the stream is the lease. */
int api_attach(struct rpc_channel *c, const struct api_hello *hello, const struct api_pages *pages,
               uint64_t deadline_ns, struct rpc_stream **ret_stream, struct api_attached *ret,
               struct err *e);
/* One message of the stream. RS_EUNIMPL: an event that this library doesn't know; pass over it. */
int api_event(const void *data, size_t n_bytes, struct reshard_event *ret, struct err *e);

/* ---- api_calls.c ---- */

/* event: CUDA_HANDLE_BYTES, or NULL. */
int api_publish(struct rpc_channel *c, uint64_t worker, uint64_t version, uint32_t push,
                const uint8_t *event, const struct reshard_expected *expected, size_t n_expected,
                uint64_t deadline_ns, struct err *e);
int api_withdraw(struct rpc_channel *c, uint64_t worker, uint64_t version, uint32_t push,
                 const char *reason, bool again, uint64_t deadline_ns, struct err *e);
/* request_id is that of the caller, never NULL; options may be NULL. */
int api_submit(struct rpc_channel *c, const char *model, uint64_t version, const char *request_id,
               const struct reshard_submit *options, uint64_t deadline_ns, uint64_t *ret_attempt,
               enum reshard_phase *ret_phase, struct err *e);
int api_ready(struct rpc_channel *c, uint64_t worker, uint64_t version, uint64_t deadline_ns,
              struct err *e);
int api_sleep(struct rpc_channel *c, uint64_t worker, uint64_t deadline_ns, struct err *e);
int api_accept(struct rpc_channel *c, uint64_t worker, uint64_t version, uint64_t attempt,
               bool reject, const char *reason, uint64_t deadline_ns, struct err *e);
int api_apply(struct rpc_channel *c, uint64_t worker, uint64_t version, bool skip,
              uint64_t deadline_ns, uint64_t *ret_applied, uint64_t *ret_elapsed_ns, struct err *e);
int api_mark(struct rpc_channel *c, const char *model, uint64_t version, const char *name,
             uint64_t worker, uint64_t deadline_ns, struct err *e);
int api_get_committed(struct rpc_channel *c, const char *model, uint64_t newer_than,
                      uint32_t wait_ms, uint64_t worker, uint64_t deadline_ns,
                      struct reshard_committed *ret, struct err *e);

/* Server streams: open (request sent and closed), then one message after the other as
 * rpc_stream_receive does: 0, 1 at a good end, or an error. */
int api_watch_refit(struct rpc_channel *c, const char *model, uint64_t version,
                    uint64_t deadline_ns, struct rpc_stream **ret, struct err *e);
int api_refit_state(struct rpc_stream *s, uint32_t timeout_ms, struct reshard_state *ret,
                    struct err *e);
int api_watch_committed(struct rpc_channel *c, const char *model, uint64_t worker,
                        uint64_t deadline_ns, struct rpc_stream **ret, struct err *e);
int api_next_committed(struct rpc_stream *s, uint32_t timeout_ms, struct reshard_committed *ret,
                       struct err *e);

#endif
