#include "exec/data_plane.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "exec/proof.h"
#include "transport/transport_nccl.h"

#include "base/banned.h"

/* --- answers ---------------------------------------------------------------------------------- */

void plane_answer(struct plane *p, const struct wire_header *request, enum wire_type type, int code,
                  const void *body, size_t body_bytes, int fd)
{
    struct wire_header h = *request;
    h.type = (uint32_t)type;
    h.code = code;
    h.incarnation = p->incarnation;
    (void)wire_send(p->socket, &h, body, body_bytes, NULL, 0, &fd, fd >= 0 ? 1 : 0, NULL);
}

void plane_fail(struct plane *p, const struct wire_header *request, enum wire_type type, int code,
                const struct err *e, uint32_t tensor, uint32_t place)
{
    struct wire_failure f;
    if (code == 0) {
        plane_answer(p, request, type, 0, NULL, 0, -1);
        return;
    }
    memset(&f, 0, sizeof(f));
    f.tensor = tensor;
    f.place = place;
    (void)snprintf(f.text, sizeof(f.text), "%s", err_text(e, code));
    plane_answer(p, request, type, code, &f, sizeof(f), -1);
}

void plane_answer_table(struct plane *p, const struct wire_header *request, enum wire_type type,
                        const void *body, size_t body_bytes, const uint64_t *table, size_t n)
{
    struct err e = {0};
    int fd = wire_memfd("fingerprints", table, n * sizeof(*table), &e);
    if (fd < 0) {
        plane_fail(p, request, WIRE_FAILED, fd, &e, UINT32_MAX, UINT32_MAX);
        return;
    }
    plane_answer(p, request, type, 0, body, body_bytes, fd);
    (void)close(fd);
}

void plane_settle(struct plane *p, struct device *d, struct device_stream **stream)
{
    device_stream_free(*stream);
    if (device_stream_new(d, "again", stream, NULL) < 0) {
        *stream = NULL;
        p->broken = true;
    }
}

bool plane_lease_holds(struct plane *p)
{
    return fence_holds(&p->fence);
}

bool plane_may_begin(struct plane *p)
{
    if (!fence_holds(&p->fence) && queue_empty(&p->errands) && attempts_quiet(p))
        fence_reopen(&p->fence);
    return fence_holds(&p->fence);
}

/* --- small ones ------------------------------------------------------------------------------- */

static void on_lease(struct plane *p, struct wire_packet *packet)
{
    struct wire_lease m;
    if (packet->header.body_bytes != sizeof(m))
        return;
    memcpy(&m, packet->body, sizeof(m));
    fence_prolong(&p->fence, m.until_ns);
}

static void on_stats(struct plane *p, struct wire_packet *packet)
{
    struct {
        struct wire_stats head;
        struct wire_gpu_memory gpus[PLANE_MAX_DEVICES];
    } body = {.head = links_stats(p)};
    uint32_t n = hello_gpu_memory(p, body.gpus);
    plane_answer(p, &packet->header, WIRE_COUNTED, 0, &body,
                 sizeof(body.head) + n * sizeof(body.gpus[0]), -1);
}

static void on_stop(struct plane *p, struct wire_packet *packet)
{
    (void)packet;
    p->stop = true;
}

#if defined(RS_CUDA)
static void on_comm_id(struct plane *p, struct wire_packet *packet)
{
    struct err e = {0};
    struct wire_comm_id id;
    _Static_assert(sizeof id.id == (size_t)TRANSPORT_NCCL_ID_BYTES, "an id travels whole");
    int r = p->nccl == NULL ? err_set(&e, RS_EPRECOND, "transport '%s' has no communicators",
                                      p->hello.transport)
                            : transport_nccl_node_id(p->nccl, id.id, &e);
    if (r != 0)
        plane_fail(p, &packet->header, WIRE_FAILED, r, &e, UINT32_MAX, UINT32_MAX);
    else
        plane_answer(p, &packet->header, WIRE_COMM_ID_MADE, 0, &id, sizeof(id), -1);
}
#else
static void on_comm_id(struct plane *p, struct wire_packet *packet)
{
    struct err e;
    int r = err_set(&e, RS_EPRECOND, "this reshardd has no NCCL: build it with CUDA=1");
    plane_fail(p, &packet->header, WIRE_FAILED, r, &e, UINT32_MAX, UINT32_MAX);
}
#endif

/* --- dispatch --------------------------------------------------------------------------------- */

static void (*const handlers[])(struct plane *p, struct wire_packet *packet) = {
    [WIRE_HELLO] = hello_take,     [WIRE_MAP] = worker_map,          [WIRE_BIND] = worker_bind,
    [WIRE_UNBIND] = worker_unbind, [WIRE_PUBLISH] = errand_start,    [WIRE_APPLY] = errand_start,
    [WIRE_CHECK] = errand_start,   [WIRE_PREPARE] = attempt_prepare, [WIRE_START] = attempt_start,
    [WIRE_ABORT] = attempt_abort,  [WIRE_LEASE] = on_lease,          [WIRE_STOP] = on_stop,
    [WIRE_STATS] = on_stats,       [WIRE_COMM_ID] = on_comm_id,
};

static void refuse(struct plane *p, const struct wire_packet *packet, int code, const char *why)
{
    struct err e;
    (void)err_set(&e, code, "%s: %s", wire_type_name(packet->header.type), why);
    plane_fail(p, &packet->header, WIRE_FAILED, code, &e, UINT32_MAX, UINT32_MAX);
}

static void dispatch(struct plane *p, struct wire_packet *packet)
{
    uint32_t type = packet->header.type;
    if (type >= sizeof(handlers) / sizeof(handlers[0]) || handlers[type] == NULL)
        refuse(p, packet, RS_EPROTO, "no message of the control process");
    else if (type != WIRE_HELLO && type != WIRE_STOP && !p->ready)
        refuse(p, packet, RS_EPRECOND, "HELLO comes first");
    else if (type != WIRE_HELLO && p->ready && packet->header.incarnation != p->incarnation)
        refuse(p, packet, RS_EABORTED, "of another incarnation");
    else
        handlers[type](p, packet);
}

/* --- the loop --------------------------------------------------------------------------------- */

/* Any thread, under the mailbox's lock. */
static void wake(void *arg)
{
    uint64_t one = 1;
    ssize_t n = write(((struct plane *)arg)->wake_fd, &one, sizeof(one));
    (void)n; /* a full counter wakes as well */
}

static void drain(struct plane *p)
{
    uint64_t n;
    ssize_t got = read(p->wake_fd, &n, sizeof(n));
    (void)got;
    (void)mailbox_drain(&p->mailbox);
}

static void check_lease(struct plane *p)
{
    if (plane_lease_holds(p))
        return;
    attempts_lease_lost(p);
    errands_stop(p);
}

static void receive(struct plane *p, struct wire_packet *packet)
{
    struct err e = {0};
    int r = wire_receive(p->socket, packet, &e);
    if (r == 0) {
        dispatch(p, packet);
        wire_packet_close(packet);
    } else if (r == RS_EPROTO) {
        struct wire_header none = {0};
        plane_fail(p, &none, WIRE_FAILED, r, &e, UINT32_MAX, UINT32_MAX);
    } else if (r < 0) {
        p->stop = true;
    }
}

static bool has_errands(const struct plane *p)
{
    return !queue_empty(&p->errands);
}

static bool has_attempts(const struct plane *p)
{
    queue_foreach (q, &p->models) {
        if (container_of(q, struct model, link)->attempt != NULL)
            return true;
    }
    return false;
}

/* Until the next PROGRESS is due or the lease ends; -1: for as long as it takes. */
static int timeout_ms(const struct plane *p, uint64_t next_ns)
{
    uint64_t now = clock_mono_ns();
    bool works = has_errands(p) || has_attempts(p);
    uint64_t lease_ns = atomic_load(&p->fence.until_ns);
    if (lease_ns > now && works && lease_ns < next_ns)
        next_ns = lease_ns;
    if (next_ns == UINT64_MAX)
        return -1;
    if (next_ns <= now)
        return 0;
    uint64_t ms = (next_ns - now) / 1000000U + 1;
    return ms > 60000 ? 60000 : (int)ms;
}

static int loop(struct plane *p, struct wire_packet *packet)
{
    while (!p->stop && !p->broken) {
        struct pollfd fds[2] = {{.fd = p->wake_fd, .events = POLLIN},
                                {.fd = p->socket, .events = POLLIN}};
        uint64_t progress_ns = attempts_progress(p), look_ns = errands_look(p);
        int n = poll(fds, 2, timeout_ms(p, progress_ns < look_ns ? progress_ns : look_ns));
        if (n < 0 && errno != EINTR)
            return err_from_errno(errno);
        if (n <= 0)
            fds[0].revents = fds[1].revents = 0;
        if (fds[0].revents != 0)
            drain(p);
        check_lease(p);
        if (fds[1].revents != 0 && !p->stop) {
            watchdog_busy(&p->watchdog, true); /* it may hang in what is asked for */
            receive(p, packet);
        }
        watchdog_busy(&p->watchdog, has_errands(p) || !attempts_quiet(p));
    }
    return 0;
}

/* Waits for the work in flight; its end comes by the mailbox. Broken: a stream is missing, and the
 * process is of no more use. */
static void wind_down(struct plane *p)
{
    errands_stop(p);
    while (!p->broken && (!attempts_stop(p) || has_errands(p))) {
        struct pollfd fd = {.fd = p->wake_fd, .events = POLLIN};
        (void)poll(&fd, 1, -1);
        drain(p);
    }
    if (p->broken) {
        log_debug("out of memory for a stream: the data plane ends");
        _exit(EXIT_FAILURE);
    }
}

static void close_models(struct plane *p)
{
    struct queue *q;
    while ((q = queue_pop(&p->models)) != NULL) {
        struct model *m = container_of(q, struct model, link);
        links_close(p, m);
        mem_free(m);
    }
}

static int plane_open(struct plane *p, int control_socket)
{
    memset(p, 0, sizeof(*p));
    p->socket = control_socket;
    queue_init(&p->workers);
    queue_init(&p->models);
    queue_init(&p->errands);
    queue_init(&p->proofs);
    p->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (p->wake_fd < 0)
        return err_from_errno(errno);
    p->segments = segment_table_new();
    if (p->segments == NULL) {
        (void)close(p->wake_fd);
        return RS_ENOMEM;
    }
    mailbox_init(&p->mailbox, wake, p);
    return 0;
}

static void plane_close(struct plane *p)
{
    watchdog_stop(&p->watchdog);
    close_models(p);
    transport_tcp_node_close(p->tcp);
    workers_free(p);
    proofs_forget(p);
    segment_table_free(p->segments);
    hello_close(p);
#if defined(RS_CUDA)
    transport_nccl_node_close(p->nccl); /* after the rings that are its */
#endif
    mailbox_shut(&p->mailbox);
    mailbox_close(&p->mailbox);
    (void)close(p->wake_fd);
}

int data_plane_run(int control_socket)
{
    struct plane plane;
    struct wire_packet *packet = mem_zalloc(sizeof(*packet));
    if (packet == NULL || plane_open(&plane, control_socket) < 0) {
        mem_free(packet);
        return EXIT_FAILURE;
    }
    int r = loop(&plane, packet);
    wind_down(&plane);
    plane_close(&plane);
    mem_free(packet);
    (void)close(control_socket);
    return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
