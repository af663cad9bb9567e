/* What the api files share: decoding within limits, identity, names, replies. Private to service/. */
#ifndef RS_SERVICE_API_COMMON_H
#define RS_SERVICE_API_COMMON_H

#include <stdbool.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#include "base/err.h"
#include "reshard.pb-c.h"
#include "rpc/pb_budget.h"
#include "rpc/rpc.h"
#include "service/coordinator.h"
#include "service/ops.h"

enum { API_MAX_REQUEST_BYTES = 4 << 20, API_SMALL_REQUEST_BYTES = 64 << 10 };

/* One unary call that may have to wait. */
struct api_call {
    struct waiter waiter;
    struct rpc_call *call;
    struct service *service;
    uint64_t client; /* 0: anonymous */
    uint64_t begin_ns;
    uint8_t digest[16];
    uint32_t node;       /* Drain: which */
    bool drained_before; /* Drain */
};

/* A unary method after decoding: returns 0 when it will answer (or has), else the error to end the call with. */
typedef int (*api_unary_fn)(struct api_call *c, void *request, struct err *e);

/* rpc_method.on_open and on_end of all unary methods. */
void api_unary_open(struct rpc_call *call);
void api_unary_end(struct rpc_call *call, int reason);
/* on_message: decodes and runs fn. `identified`: anonymous callers are refused (RS_EUNAUTH). */
void api_unary(struct rpc_call *call, const void *data, size_t n_bytes,
               const ProtobufCMessageDescriptor *type, bool identified, api_unary_fn fn);

/* Within the API's limits; *ret is pb_free's. */
int api_decode(const ProtobufCMessageDescriptor *type, const void *data, size_t n_bytes, void **ret,
               struct err *e);
/* The client's number; 0 for anonymous callers. RS_EUNAUTH: a token that this start does not know, or none where
 * `identified`. */
int api_identity(struct rpc_call *call, bool identified, uint64_t *ret_client, struct err *e);

/* Names as layouts may carry them: printable UTF-8, 1 … 512 bytes; optional ones may be empty. */
int api_name(const char *field, const char *value, struct err *e);
int api_text(const char *field, const char *value, struct err *e);

/* The decider of that model. RS_EUNAVAIL: not here, or the daemon is stopping; RS_ENOTFOUND: no such model. */
int api_decider(struct api_call *c, const char *name, struct decider **ret, struct err *e);

/* Packs and sends one message; *_finish ends the call with it. */
void api_send(struct rpc_call *call, const ProtobufCMessage *m);
void api_finish(struct rpc_call *call, const ProtobufCMessage *m);
void api_finish_error(struct rpc_call *call, int code, const struct err *e);

/* Enums of the decider and of the API have the same numbers; this is where that is relied upon. */
#define API_PHASE(phase) ((Reshard__V1__Phase)(phase))

/* api_state.c: what a version, its bytes and its record look like; strings are borrowed from the model. */
struct api_refit_state {
    Reshard__V1__RefitState state;
    Reshard__V1__Bytes bytes;
    char *waiting[16];
    uint32_t n_waiting;
};
void api_refit_state_fill(struct api_refit_state *s, const struct decider *d,
                          const struct refit_version *v);
/* Of a version, or of the rehearsal that borrows its number or did so last; false: there is none. */
bool api_refit_state_find(struct api_refit_state *s, const struct decider *d, uint64_t version);
void api_refit_state_close(struct api_refit_state *s);
void api_bytes_fill(Reshard__V1__Bytes *to, const struct refit_bytes *from);
void api_record_fill(Reshard__V1__VersionRecord *to, Reshard__V1__Bytes *bytes,
                     const struct decider *d, const struct refit_version *v);

/* Method handlers, by file. */
void api_put_layout_open(struct rpc_call *call);
void api_put_layout_message(struct rpc_call *call, const void *data, size_t n_bytes);
void api_put_layout_half_close(struct rpc_call *call);
void api_put_layout_end(struct rpc_call *call, int reason);
void api_attach_open(struct rpc_call *call);
void api_attach_message(struct rpc_call *call, const void *data, size_t n_bytes);
void api_attach_half_close(struct rpc_call *call);
void api_attach_end(struct rpc_call *call, int reason);
void api_publish(struct rpc_call *call, const void *data, size_t n_bytes);
void api_withdraw(struct rpc_call *call, const void *data, size_t n_bytes);
void api_submit(struct rpc_call *call, const void *data, size_t n_bytes);
void api_ready(struct rpc_call *call, const void *data, size_t n_bytes);
void api_accept(struct rpc_call *call, const void *data, size_t n_bytes);
void api_sleep(struct rpc_call *call, const void *data, size_t n_bytes);
void api_apply(struct rpc_call *call, const void *data, size_t n_bytes);
void api_mark(struct rpc_call *call, const void *data, size_t n_bytes);
void api_poll_open(struct rpc_call *call);
void api_poll_end(struct rpc_call *call, int reason);
void api_get_committed(struct rpc_call *call, const void *data, size_t n_bytes);
void api_watch_committed(struct rpc_call *call, const void *data, size_t n_bytes);
void api_watch_refit_open(struct rpc_call *call);
void api_watch_refit(struct rpc_call *call, const void *data, size_t n_bytes);
void api_watch_refit_end(struct rpc_call *call, int reason);
void api_status(struct rpc_call *call, const void *data, size_t n_bytes);
/* At a member, for a Status that it has passed on: ends the call with the coordinator's answer (packed; NULL: it gave
 * none, and `why`), in which what is of the daemon that was asked is this one's. model: of the request. */
void api_status_member(struct rpc_call *call, const void *answer, size_t n_bytes, const char *model,
                       const char *why);
void api_versions(struct rpc_call *call, const void *data, size_t n_bytes);
void api_timeline(struct rpc_call *call, const void *data, size_t n_bytes);
void api_abort(struct rpc_call *call, const void *data, size_t n_bytes);
void api_evict(struct rpc_call *call, const void *data, size_t n_bytes);
void api_drain(struct rpc_call *call, const void *data, size_t n_bytes);

#endif
