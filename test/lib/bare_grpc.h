/* A bare C core echo server, and a client that keeps 64 unary calls in flight: what benchmarks of
 * our server are held against, and what measures both.
 *
 * The echo answers on the completion queue's own thread, without loop or handler, with the
 * request's bytes. Fork it before gRPC starts in the process. Failures end the process: test code. */
#ifndef RS_TEST_BARE_GRPC_H
#define RS_TEST_BARE_GRPC_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>

#include "base/clock.h"

enum { BARE_IN_FLIGHT = 64 };

/* --- server --- */

struct bare_call {
    enum { BARE_ARRIVED, BARE_ANSWERED } next;
    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_byte_buffer *payload;
    int cancelled;
};

struct bare_server {
    grpc_server *server;
    grpc_completion_queue *cq;
    void *method;
};

static inline void bare_arm(struct bare_server *b, struct bare_call *c)
{
    c->next = BARE_ARRIVED;
    grpc_metadata_array_init(&c->metadata);
    (void)grpc_server_request_registered_call(b->server, b->method, &c->call, &c->deadline,
                                              &c->metadata, &c->payload, b->cq, b->cq, c);
}

static inline void bare_answer(struct bare_call *c)
{
    grpc_op ops[4] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                      {.op = GRPC_OP_SEND_MESSAGE},
                      {.op = GRPC_OP_SEND_STATUS_FROM_SERVER},
                      {.op = GRPC_OP_RECV_CLOSE_ON_SERVER}};
    ops[1].data.send_message.send_message = c->payload;
    ops[2].data.send_status_from_server.status = GRPC_STATUS_OK;
    ops[3].data.recv_close_on_server.cancelled = &c->cancelled;
    c->next = BARE_ANSWERED;
    (void)grpc_call_start_batch(c->call, ops, 4, c, NULL);
}

static inline void bare_done(struct bare_server *b, struct bare_call *c)
{
    grpc_byte_buffer_destroy(c->payload);
    grpc_metadata_array_destroy(&c->metadata);
    grpc_call_unref(c->call);
    bare_arm(b, c);
}

/* Serves `method` on that socket for ever; one byte to `ready` when it listens. */
static inline void bare_serve(const char *path, const char *method, int ready)
{
    static struct bare_call calls[BARE_IN_FLIGHT];
    struct bare_server b;
    char address[160];
    (void)snprintf(address, sizeof address, "unix:%s", path);
    grpc_init();
    b.cq = grpc_completion_queue_create_for_next(NULL);
    b.server = grpc_server_create(NULL, NULL);
    b.method = grpc_server_register_method(b.server, method, NULL,
                                           GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
    grpc_server_register_completion_queue(b.server, b.cq, NULL);
    grpc_server_credentials *creds = grpc_insecure_server_credentials_create();
    if (grpc_server_add_http2_port(b.server, address, creds) == 0)
        _exit(1);
    grpc_server_start(b.server);
    for (int i = 0; i < BARE_IN_FLIGHT; i++)
        bare_arm(&b, &calls[i]);
    (void)!write(ready, "r", 1);
    for (;;) {
        grpc_event e = grpc_completion_queue_next(b.cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        struct bare_call *c = e.tag;
        if (c->next == BARE_ARRIVED)
            bare_answer(c);
        else
            bare_done(&b, c);
    }
}

/* A child that runs `serve` until it is ended, up when this returns; -1: it did not come up. */
static inline pid_t bare_child(void (*serve)(const char *path, const char *method, int ready),
                               const char *path, const char *method)
{
    int ready[2];
    char byte;
    if (pipe(ready) != 0)
        return -1;
    pid_t child = fork();
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(path, method, ready[1]);
        _exit(1);
    }
    (void)close(ready[1]);
    bool up = read(ready[0], &byte, 1) == 1;
    (void)close(ready[0]);
    return up ? child : -1;
}

/* Ends the child: all the CPU time that it used. */
static inline double bare_end_us(pid_t child)
{
    struct rusage u = {0};
    (void)kill(child, SIGKILL);
    (void)wait4(child, NULL, 0, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e6 +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* --- client --- */

struct bare_client {
    grpc_channel *channel;
    grpc_completion_queue *cq;
    const char *token; /* metadata "reshard-token" of each call; NULL: none */
};

struct bare_ask {
    grpc_call *call;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *reply;
    grpc_status_code status;
    grpc_slice text;
    uint64_t began_ns;
};

static inline void bare_open(struct bare_client *c, const char *path, const char *token)
{
    char target[160];
    grpc_channel_credentials *creds = grpc_insecure_credentials_create();
    (void)snprintf(target, sizeof target, "unix:%s", path);
    c->channel = grpc_channel_create(target, creds, NULL);
    c->cq = grpc_completion_queue_create_for_next(NULL);
    c->token = token;
    grpc_channel_credentials_release(creds);
}

static inline grpc_call *bare_new_call(struct bare_client *c, const char *method)
{
    return grpc_channel_create_call(c->channel, NULL, GRPC_PROPAGATE_DEFAULTS, c->cq,
                                    grpc_slice_from_static_string(method), NULL,
                                    gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
}

/* Sends the request. `stream`: stops at the first reply, the call lives on; else runs to its
 * status. The ask is the event's tag. */
static inline void bare_start(struct bare_client *c, struct bare_ask *a, const char *method,
                              const void *data, size_t n_bytes, bool stream)
{
    grpc_slice slice = grpc_slice_from_copied_buffer(data, n_bytes);
    grpc_byte_buffer *request = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_metadata token = {.key = grpc_slice_from_static_string("reshard-token")};
    grpc_op ops[6] = {
        {.op = GRPC_OP_SEND_INITIAL_METADATA},  {.op = GRPC_OP_SEND_MESSAGE},
        {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}, {.op = GRPC_OP_RECV_INITIAL_METADATA},
        {.op = GRPC_OP_RECV_MESSAGE},           {.op = GRPC_OP_RECV_STATUS_ON_CLIENT}};
    memset(a, 0, sizeof *a);
    a->text = grpc_empty_slice();
    grpc_metadata_array_init(&a->initial);
    grpc_metadata_array_init(&a->trailing);
    a->began_ns = clock_mono_ns();
    a->call = bare_new_call(c, method);
    if (c->token != NULL) {
        token.value = grpc_slice_from_static_string(c->token);
        ops[0].data.send_initial_metadata.count = 1;
        ops[0].data.send_initial_metadata.metadata = &token;
    }
    ops[1].data.send_message.send_message = request;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &a->initial;
    ops[4].data.recv_message.recv_message = &a->reply;
    ops[5].data.recv_status_on_client.trailing_metadata = &a->trailing;
    ops[5].data.recv_status_on_client.status = &a->status;
    ops[5].data.recv_status_on_client.status_details = &a->text;
    (void)grpc_call_start_batch(a->call, ops, stream ? 5 : 6, a, NULL);
    grpc_byte_buffer_destroy(request);
    grpc_slice_unref(slice);
}

/* n_bytes 0: any reply will do. */
static inline void bare_end(struct bare_ask *a, size_t n_bytes)
{
    if (a->status != GRPC_STATUS_OK || a->reply == NULL ||
        (n_bytes > 0 && grpc_byte_buffer_length(a->reply) != n_bytes)) {
        char *text = grpc_slice_to_c_string(a->text);
        (void)fprintf(stderr, "call failed with status %d: %s\n", (int)a->status, text);
        exit(1);
    }
    grpc_byte_buffer_destroy(a->reply);
    grpc_metadata_array_destroy(&a->initial);
    grpc_metadata_array_destroy(&a->trailing);
    grpc_slice_unref(a->text);
    grpc_call_unref(a->call);
}

/* Calls per second over n_calls (at least 64), 64 in flight. */
static inline double bare_rate(struct bare_client *c, const char *method, const void *data,
                               size_t n_bytes, size_t n_reply_bytes, unsigned n_calls)
{
    static struct bare_ask asks[BARE_IN_FLIGHT];
    unsigned started = 0, ended = 0;
    uint64_t before = clock_mono_ns();
    while (started < BARE_IN_FLIGHT)
        bare_start(c, &asks[started++], method, data, n_bytes, false);
    while (ended < n_calls) {
        grpc_event e = grpc_completion_queue_next(c->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        bare_end(e.tag, n_reply_bytes);
        ended++;
        if (started < n_calls) {
            bare_start(c, e.tag, method, data, n_bytes, false);
            started++;
        }
    }
    return n_calls * 1e9 / (double)(clock_mono_ns() - before);
}

#endif
