/* Requests to the data plane: sent at once or when the socket has room, answered once, by a packet or by their deadline. */
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "service/data_plane_link_private.h"

#include "base/banned.h"

/* A packet that waits for room in the socket. */
struct packet_out {
    struct queue in;
    struct wire_header header;
    int fds[WIRE_MAX_FDS];
    uint32_t n_fds;
    size_t n_bytes;
    uint8_t body[];
};

const char link_closed_socket[] = "it closed its socket";

/* --- requests ----------------------------------------------------------------------------------- */

static void request_end(struct link_request *r, int code, struct wire_packet *packet,
                        const struct err *e)
{
    queue_remove(&r->in);
    r->id = 0;
    r->done(r, code, packet, e);
}

void link_requests_fail(struct data_plane_link *l, int code, const char *why)
{
    struct err e = {0};
    struct queue failed;
    (void)err_set(&e, code, "%s", why);
    queue_init(&failed);
    queue_move(&l->requests, &failed);
    while (!queue_empty(&failed))
        request_end(container_of(failed.next, struct link_request, in), code, NULL, &e);
}

void link_forget(struct data_plane_link *l, struct link_request *r)
{
    (void)l;
    if (r->id == 0)
        return;
    queue_remove(&r->in);
    r->id = 0;
}

static void deadline_arm(struct data_plane_link *l);

static void on_deadline(uv_timer_t *t)
{
    struct data_plane_link *l = t->data;
    uint64_t now = clock_mono_ns();
    struct queue due;
    bool hung = false;
    struct err e = {0};
    /* A loop that stood still comes here first, whatever has been answered meanwhile. */
    link_look(l);
    queue_init(&due);
    queue_foreach_safe (q, tmp, &l->requests) {
        struct link_request *r = container_of(q, struct link_request, in);
        if (r->deadline_ns > now)
            continue;
        hung = hung || !r->patient;
        queue_remove(q);
        queue_push(&due, q);
    }
    (void)err_set(&e, RS_EDEADLINE, "the data plane did not answer in time");
    while (!queue_empty(&due))
        request_end(container_of(due.next, struct link_request, in), RS_EDEADLINE, NULL, &e);
    if (hung)
        link_kill(l, "it did not answer in time");
    deadline_arm(l);
}

static void deadline_arm(struct data_plane_link *l)
{
    uint64_t first = UINT64_MAX, now = clock_mono_ns();
    if (l->state == LINK_STOPPED)
        return;
    queue_foreach (q, &l->requests) {
        const struct link_request *r = container_of(q, struct link_request, in);
        if (r->deadline_ns < first)
            first = r->deadline_ns;
    }
    if (first == UINT64_MAX)
        (void)uv_timer_stop(&l->deadline);
    else
        (void)uv_timer_start(&l->deadline, on_deadline,
                             first > now ? (first - now) / 1000000 + 1 : 0, 0);
}

/* --- sending ------------------------------------------------------------------------------------ */

static void packet_out_free(struct packet_out *p)
{
    for (uint32_t i = 0; i < p->n_fds; i++)
        (void)close(p->fds[i]);
    mem_free(p);
}

void link_out_clear(struct data_plane_link *l)
{
    while (!queue_empty(&l->out))
        packet_out_free(container_of(queue_pop(&l->out), struct packet_out, in));
}

bool link_writable(int socket)
{
    struct pollfd p = {.fd = socket, .events = POLLOUT};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLOUT) != 0;
}

static void out_flush(struct data_plane_link *l)
{
    while (!queue_empty(&l->out) && link_writable(l->socket)) {
        struct packet_out *p = container_of(queue_pop(&l->out), struct packet_out, in);
        /* A dead child shows as the end of the socket, on reading. */
        (void)wire_send(l->socket, &p->header, p->body, p->n_bytes, NULL, 0, p->fds, p->n_fds,
                        NULL);
        packet_out_free(p);
    }
    (void)uv_poll_start(&l->poll, UV_READABLE | (queue_empty(&l->out) ? 0 : UV_WRITABLE),
                        link_on_poll);
}

static int out_queue(struct data_plane_link *l, const struct wire_header *h, const void *body,
                     size_t body_bytes, const void *table, size_t table_bytes, const int *fds,
                     uint32_t n_fds)
{
    struct packet_out *p = mem_alloc(sizeof *p + body_bytes + table_bytes);
    if (p == NULL)
        return RS_ENOMEM;
    p->header = *h;
    p->n_bytes = body_bytes + table_bytes;
    p->n_fds = 0;
    if (body_bytes > 0)
        memcpy(p->body, body, body_bytes);
    if (table_bytes > 0)
        memcpy(p->body + body_bytes, table, table_bytes);
    for (uint32_t i = 0; i < n_fds; i++) {
        int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
        if (fd < 0) {
            packet_out_free(p);
            return RS_EEXHAUSTED;
        }
        p->fds[p->n_fds++] = fd;
    }
    queue_push(&l->out, &p->in);
    out_flush(l);
    return 0;
}

int link_send(struct data_plane_link *l, const struct wire_header *h, const void *body,
              size_t body_bytes, const void *table, size_t table_bytes, const int *fds,
              uint32_t n_fds, struct err *e)
{
    if (sizeof *h + body_bytes + table_bytes > WIRE_MAX_BYTES)
        return err_set(e, RS_EEXHAUSTED, "message %s of %zu bytes: %d are the most",
                       wire_type_name(h->type), sizeof *h + body_bytes + table_bytes,
                       WIRE_MAX_BYTES);
    if (queue_empty(&l->out) && link_writable(l->socket)) {
        int r = wire_send(l->socket, h, body, body_bytes, table, table_bytes, fds, n_fds, e);
        return r == RS_EPEER ? 0 : r; /* its death is told when it is reaped */
    }
    int r = out_queue(l, h, body, body_bytes, table, table_bytes, fds, n_fds);
    return r == 0 ? 0 : err_set(e, r, "message %s could not be queued", wire_type_name(h->type));
}

int link_submit_early(struct data_plane_link *l, struct link_request *r, struct wire_header h,
                      const void *body, size_t body_bytes, const void *table, size_t table_bytes,
                      const int *fds, uint32_t n_fds, uint32_t timeout_ms, struct err *e)
{
    rs_assert(r->id == 0);
    h.incarnation = l->incarnation;
    h.request = ++l->next_request;
    int code = link_send(l, &h, body, body_bytes, table, table_bytes, fds, n_fds, e);
    if (code != 0)
        return code;
    r->id = h.request;
    r->deadline_ns = clock_mono_ns() + (uint64_t)timeout_ms * 1000000;
    queue_push(&l->requests, &r->in);
    deadline_arm(l);
    return 0;
}

int link_submit(struct data_plane_link *l, struct link_request *r, struct wire_header h,
                const void *body, size_t body_bytes, const void *table, size_t table_bytes,
                const int *fds, uint32_t n_fds, uint32_t timeout_ms, struct err *e)
{
    if (link_state(l) != LINK_READY)
        return err_set(e, RS_EUNAVAIL, "the data plane is %s; try again", link_text(l));
    return link_submit_early(l, r, h, body, body_bytes, table, table_bytes, fds, n_fds, timeout_ms,
                             e);
}

/* --- receiving ---------------------------------------------------------------------------------- */

static struct link_request *request_find(struct data_plane_link *l, uint64_t id)
{
    queue_foreach (q, &l->requests) {
        struct link_request *r = container_of(q, struct link_request, in);
        if (r->id == id)
            return r;
    }
    return NULL;
}

/* The text of a FAILED answer, bounded by what came. */
static void failure_text(const struct wire_packet *p, struct err *e)
{
    int code = p->header.code < 0 ? p->header.code : RS_EINTERNAL;
    struct wire_failure f;
    if (p->header.body_bytes < sizeof f) {
        (void)err_set(e, code, "%s", err_name(code));
        return;
    }
    memcpy(&f, p->body, sizeof f);
    f.text[sizeof f.text - 1] = '\0';
    (void)err_set(e, code, "%s", f.text[0] != '\0' ? f.text : err_name(code));
}

/* What is taken of the GPUs is asked for again after each of these. */
static bool changes_memory(uint32_t type)
{
    return type == WIRE_MAPPED || type == WIRE_UNBOUND || type == WIRE_PREPARED ||
           type == WIRE_STAGED || type == WIRE_QUIESCED;
}

static void packet_take(struct data_plane_link *l, struct wire_packet *p)
{
    struct err e = {0};
    if (p->header.incarnation != l->incarnation)
        return;
    struct link_request *r = request_find(l, p->header.request);
    if (r == NULL)
        return; /* forgotten, or past its deadline */
    if (p->header.type == WIRE_PROGRESS) {
        struct wire_progress progress;
        if (r->progress == NULL || p->header.body_bytes < sizeof progress)
            return;
        memcpy(&progress, p->body, sizeof progress);
        r->progress(r, &progress);
        return;
    }
    if (changes_memory(p->header.type) && l->about.cuda_version != 0)
        link_stats_ask(l);
    if (p->header.code == 0 && p->header.type != WIRE_FAILED) {
        request_end(r, 0, p, NULL);
        return;
    }
    failure_text(p, &e);
    request_end(r, e.code, p, &e);
}

/* Up to so many packets, of those that have come. */
static void packets_take(struct data_plane_link *l, unsigned most)
{
    struct err e = {0};
    for (unsigned i = 0; i < most && l->socket >= 0; i++) {
        int r = wire_receive(l->socket, &l->packet, &e);
        if (r == 1)
            return;
        if (r != 0) {
            (void)uv_poll_stop(&l->poll);
            if (l->state != LINK_STOPPED)
                link_kill(l, r == RS_EPEER ? link_closed_socket : err_text(&e, r));
            return;
        }
        packet_take(l, &l->packet);
        wire_packet_close(&l->packet);
    }
}

void link_look(struct data_plane_link *l)
{
    enum { MOST_AT_ONCE = 4096 };
    if (l != NULL && l->poll_open && !uv_is_closing((uv_handle_t *)&l->poll))
        packets_take(l, MOST_AT_ONCE);
}

void link_on_poll(uv_poll_t *handle, int status, int events)
{
    enum { MOST_PER_TURN = 64 };
    struct data_plane_link *l = handle->data;
    (void)status;
    if ((events & UV_WRITABLE) != 0)
        out_flush(l);
    packets_take(l, MOST_PER_TURN);
}
