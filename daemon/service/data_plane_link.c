#include "service/data_plane_link.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"

#include "base/banned.h"

enum {
    HELLO_TIMEOUT_MS = 20000,
    STOP_GRACE_MS = 2000,
    BACKOFF_FIRST_MS = 50,
    BACKOFF_MOST_MS = 5000,
    BACKOFF_FAILING_MOST_MS = 30000, /* of a child that does not start */
    BACKOFF_FORGET_S = 10,           /* a child that lived so long starts the back-off anew */
    FAILING_FROM = 3,                /* starts that failed in a row: it is no chance any more */
    SEND_BUFFER_BYTES = 1 << 20,
    CHILD_FD = 3
};

/* A packet that waits for room in the socket. */
struct packet_out {
    struct queue in;
    struct wire_header header;
    int fds[WIRE_MAX_FDS];
    uint32_t n_fds;
    size_t n_bytes;
    uint8_t body[];
};

struct data_plane_link {
    uv_loop_t *loop;
    const struct config *config;
    struct link_events events;
    enum link_state state;
    uv_process_t process;
    uv_poll_t poll;
    uv_timer_t deadline; /* of the request that is due first */
    uv_timer_t backoff;
    int socket;                   /* -1: none */
    bool process_open, poll_open; /* handles that are not closed yet */
    bool reaped;
    uint64_t incarnation;
    uint64_t next_request;
    uint64_t restarts;
    uint64_t ready_ns;
    uint16_t data_port;      /* of the child that is ready */
    struct link_about about; /* of the newest child that was ready; a GPU keeps its name for ever */
    uint64_t lease_until_ns; /* 0: none is kept */
    uint32_t backoff_ms;
    bool was_ready;         /* the newest child has been */
    uint32_t n_failed;      /* starts in a row that did not come to ready */
    uint64_t next_start_ns; /* while the back-off runs */
    char why[256];          /* of the last death, or why it was not started */
    char text[600];
    struct queue requests;
    struct queue out;
    struct link_request hello, stats;
    uint64_t strangers, shrinks_failed; /* by the newest COUNTED, as what follows */
    struct wire_gpu_memory gpu_memory[CONFIG_MAX_DEVICES];
    uint32_t n_gpu_memory;
    void (*stopped)(void *arg);
    void *stopped_arg;
    unsigned n_closing; /* handles left to close before the link is freed */
    struct wire_packet packet;
};

static int child_start(struct data_plane_link *l, struct err *e);

/* What is seen first of a child that ends; its exit status says more. */
static const char closed_socket[] = "it closed its socket";

enum link_state link_state(const struct data_plane_link *l)
{
    return l == NULL ? LINK_STOPPED : l->state;
}

const char *link_text(const struct data_plane_link *l)
{
    struct data_plane_link *w = (struct data_plane_link *)(uintptr_t)l;
    if (link_state(l) == LINK_READY)
        return "ready";
    if (link_state(l) == LINK_STOPPED)
        return "stopping";
    if (l->why[0] == '\0')
        return "starting";
    uint64_t now = clock_mono_ns();
    if (l->n_failed < FAILING_FROM)
        (void)snprintf(w->text, sizeof w->text, "replacing: %s", l->why);
    else
        (void)snprintf(w->text, sizeof w->text,
                       "not starting: %" PRIu32 " starts failed in a row: %s; mend that, then "
                       "SIGHUP to the daemon (systemctl reload) tries at once, else in %" PRIu64
                       " s",
                       l->n_failed, l->why,
                       l->next_start_ns > now ? (l->next_start_ns - now) / 1000000000 + 1 : 0);
    return l->text;
}

uint32_t link_failing(const struct data_plane_link *l, const char **ret_why)
{
    *ret_why = l->why;
    return l->n_failed < FAILING_FROM ? 0 : l->n_failed;
}

uint64_t link_restarts(const struct data_plane_link *l)
{
    return l->restarts;
}

int32_t link_pid(const struct data_plane_link *l)
{
    return l->process_open && !l->reaped ? l->process.pid : 0;
}

uint64_t link_child(const struct data_plane_link *l)
{
    return l->incarnation;
}

const struct link_about *link_about(const struct data_plane_link *l)
{
    return &l->about;
}

/* Past "GPU-" or "MIG-". */
static const char *bare(const char *name)
{
    return strncasecmp(name, "GPU-", 4) == 0 || strncasecmp(name, "MIG-", 4) == 0 ? name + 4 : name;
}

int link_device_of(const struct data_plane_link *l, const char *name, uint32_t *ret, struct err *e)
{
    char there[384] = "";
    if (l->about.n_devices == 0)
        return err_set(e, RS_EUNAVAIL, "the data plane is %s; try again", link_text(l));
    for (uint32_t i = 0; i < l->about.n_devices; i++) {
        if (strcasecmp(bare(l->about.devices[i].name), bare(name)) == 0) {
            *ret = i;
            return 0;
        }
        size_t at = strlen(there);
        (void)snprintf(there + at, sizeof there - at, "%s%s", i == 0 ? "" : ", ",
                       l->about.devices[i].name);
    }
    return err_set(e, RS_ENOTFOUND, "GPU '%s' is none of this daemon's devices; they are %s", name,
                   there);
}

const char *link_device_name(const struct data_plane_link *l, uint32_t device)
{
    return device < CONFIG_MAX_DEVICES ? l->about.devices[device].name : "";
}

uint16_t link_data_port(const struct data_plane_link *l)
{
    return l->state == LINK_READY ? l->data_port : 0;
}

bool link_waits(const struct link_request *r)
{
    return r->id != 0;
}

/* --- requests ----------------------------------------------------------------------------------- */

static void request_end(struct link_request *r, int code, struct wire_packet *packet,
                        const struct err *e)
{
    queue_remove(&r->in);
    r->id = 0;
    r->done(r, code, packet, e);
}

static void requests_fail(struct data_plane_link *l, int code, const char *why)
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

static void out_clear(struct data_plane_link *l)
{
    while (!queue_empty(&l->out))
        packet_out_free(container_of(queue_pop(&l->out), struct packet_out, in));
}

static bool writable_now(int socket)
{
    struct pollfd p = {.fd = socket, .events = POLLOUT};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLOUT) != 0;
}

static void on_poll(uv_poll_t *handle, int status, int events);

static void out_flush(struct data_plane_link *l)
{
    while (!queue_empty(&l->out) && writable_now(l->socket)) {
        struct packet_out *p = container_of(queue_pop(&l->out), struct packet_out, in);
        /* A dead child shows as the end of the socket, on reading. */
        (void)wire_send(l->socket, &p->header, p->body, p->n_bytes, NULL, 0, p->fds, p->n_fds,
                        NULL);
        packet_out_free(p);
    }
    (void)uv_poll_start(&l->poll, UV_READABLE | (queue_empty(&l->out) ? 0 : UV_WRITABLE), on_poll);
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

static int packet_send(struct data_plane_link *l, const struct wire_header *h, const void *body,
                       size_t body_bytes, const void *table, size_t table_bytes, const int *fds,
                       uint32_t n_fds, struct err *e)
{
    if (sizeof *h + body_bytes + table_bytes > WIRE_MAX_BYTES)
        return err_set(e, RS_EEXHAUSTED, "message %s of %zu bytes: %d are the most",
                       wire_type_name(h->type), sizeof *h + body_bytes + table_bytes,
                       WIRE_MAX_BYTES);
    if (queue_empty(&l->out) && writable_now(l->socket)) {
        int r = wire_send(l->socket, h, body, body_bytes, table, table_bytes, fds, n_fds, e);
        return r == RS_EPEER ? 0 : r; /* its death is told when it is reaped */
    }
    int r = out_queue(l, h, body, body_bytes, table, table_bytes, fds, n_fds);
    return r == 0 ? 0 : err_set(e, r, "message %s could not be queued", wire_type_name(h->type));
}

static int submit(struct data_plane_link *l, struct link_request *r, struct wire_header h,
                  const void *body, size_t body_bytes, const void *table, size_t table_bytes,
                  const int *fds, uint32_t n_fds, uint32_t timeout_ms, struct err *e)
{
    rs_assert(r->id == 0);
    h.incarnation = l->incarnation;
    h.request = ++l->next_request;
    int code = packet_send(l, &h, body, body_bytes, table, table_bytes, fds, n_fds, e);
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
    return submit(l, r, h, body, body_bytes, table, table_bytes, fds, n_fds, timeout_ms, e);
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

static void stats_ask(struct data_plane_link *l);

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
        stats_ask(l);
    if (p->header.code == 0 && p->header.type != WIRE_FAILED) {
        request_end(r, 0, p, NULL);
        return;
    }
    failure_text(p, &e);
    request_end(r, e.code, p, &e);
}

static void on_poll(uv_poll_t *handle, int status, int events)
{
    enum { MOST_PER_TURN = 64 };
    struct data_plane_link *l = handle->data;
    struct err e = {0};
    (void)status;
    if ((events & UV_WRITABLE) != 0)
        out_flush(l);
    for (unsigned i = 0; i < MOST_PER_TURN && l->socket >= 0; i++) {
        int r = wire_receive(l->socket, &l->packet, &e);
        if (r == 1)
            return;
        if (r != 0) {
            (void)uv_poll_stop(&l->poll);
            if (l->state != LINK_STOPPED)
                link_kill(l, r == RS_EPEER ? closed_socket : err_text(&e, r));
            return;
        }
        packet_take(l, &l->packet);
        wire_packet_close(&l->packet);
    }
}

/* --- the child ---------------------------------------------------------------------------------- */

static void free_if_closed(struct data_plane_link *l)
{
    if (l->state != LINK_STOPPED || l->process_open || l->poll_open || l->n_closing > 0)
        return;
    void (*done)(void *) = l->stopped;
    void *arg = l->stopped_arg;
    out_clear(l);
    mem_free(l);
    done(arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    struct data_plane_link *l = h->data;
    l->n_closing--;
    free_if_closed(l);
}

static void on_backoff(uv_timer_t *t);

/* Each time later. */
static void start_later(struct data_plane_link *l)
{
    uint32_t most = l->n_failed < FAILING_FROM ? BACKOFF_MOST_MS : BACKOFF_FAILING_MOST_MS;
    uint32_t ms = l->backoff_ms;
    l->next_start_ns = clock_mono_ns() + ms * UINT64_C(1000000);
    (void)uv_timer_start(&l->backoff, on_backoff, ms, 0);
    l->backoff_ms = ms * 2 > most ? most : ms * 2;
}

/* This child did not come to ready. */
static void start_failed(struct data_plane_link *l, const char *why)
{
    if (why != l->why)
        (void)snprintf(l->why, sizeof l->why, "%s", why);
    l->n_failed++;
    l->state = LINK_DOWN;
    log_error("data plane not started: %s; starts that failed in a row %" PRIu32 ", the next in "
              "%" PRIu32 " ms",
              l->why, l->n_failed, l->backoff_ms);
}

static void on_backoff(uv_timer_t *t)
{
    struct data_plane_link *l = t->data;
    struct err e = {0};
    int r = child_start(l, &e);
    if (r == 0)
        return;
    start_failed(l, err_text(&e, r));
    if (!l->process_open && !l->poll_open) /* else its closing arms the next try */
        start_later(l);
    l->events.lost(l->events.arg, l->why);
}

bool link_retry(struct data_plane_link *l)
{
    if (l == NULL || l->state != LINK_DOWN || !uv_is_active((uv_handle_t *)&l->backoff))
        return false;
    l->backoff_ms = BACKOFF_FIRST_MS;
    l->next_start_ns = 0;
    (void)uv_timer_start(&l->backoff, on_backoff, 0, 0);
    return true;
}

static void replace_if_closed(struct data_plane_link *l)
{
    if (l->process_open || l->poll_open)
        return;
    if (l->state == LINK_STOPPED) {
        free_if_closed(l);
        return;
    }
    if (l->ready_ns != 0 && clock_mono_ns() - l->ready_ns > BACKOFF_FORGET_S * UINT64_C(1000000000))
        l->backoff_ms = BACKOFF_FIRST_MS;
    start_later(l);
}

static void on_process_closed(uv_handle_t *h)
{
    struct data_plane_link *l = h->data;
    l->process_open = false;
    replace_if_closed(l);
}

static void on_poll_closed(uv_handle_t *h)
{
    struct data_plane_link *l = h->data;
    (void)close(l->socket);
    l->socket = -1;
    l->poll_open = false;
    replace_if_closed(l);
}

static void child_close(struct data_plane_link *l)
{
    out_clear(l);
    if (l->poll_open && !uv_is_closing((uv_handle_t *)&l->poll))
        uv_close((uv_handle_t *)&l->poll, on_poll_closed);
    if (l->process_open && !uv_is_closing((uv_handle_t *)&l->process))
        uv_close((uv_handle_t *)&l->process, on_process_closed);
}

static void on_exit_child(uv_process_t *process, int64_t status, int signal)
{
    struct data_plane_link *l = process->data;
    l->reaped = true;
    if (l->state == LINK_STOPPED) {
        child_close(l);
        uv_close((uv_handle_t *)&l->backoff, on_timer_closed);
        return;
    }
    bool by_itself = signal == 0 && strcmp(l->why, closed_socket) == 0;
    if (l->why[0] == '\0' || l->state == LINK_READY || by_itself)
        (void)snprintf(l->why, sizeof l->why,
                       signal != 0 ? "killed by signal %d" : "exit status %d",
                       signal != 0 ? signal : (int)status);
    if (l->was_ready)
        log_error("data plane lost: pid %d, exit status %d, signal %d: %s; a new one is started",
                  (int)process->pid, (int)status, signal, l->why);
    else
        start_failed(l, l->why);
    l->state = LINK_DOWN;
    l->restarts++;
    child_close(l);
    requests_fail(l, RS_EPEER, "the data plane process ended");
    l->events.lost(l->events.arg, l->why);
}

void link_kill(struct data_plane_link *l, const char *why)
{
    if (l == NULL || !l->process_open || l->reaped || l->state == LINK_STOPPED ||
        l->state == LINK_DOWN)
        return;
    (void)snprintf(l->why, sizeof l->why, "%s", why);
    l->state = LINK_DOWN; /* nothing new is sent; on_exit_child does the rest */
    (void)uv_process_kill(&l->process, SIGKILL);
}

static void lease_send(struct data_plane_link *l)
{
    struct wire_lease body = {.until_ns = l->lease_until_ns};
    struct wire_header h = {.type = WIRE_LEASE, .incarnation = l->incarnation};
    struct err e = {0};
    int r = packet_send(l, &h, &body, sizeof body, NULL, 0, NULL, 0, &e);
    if (r != 0) /* the lease that it has runs out before long, which is safe */
        log_warn("data plane: the lease could not be told: %s", err_text(&e, r));
}

static void on_counted(struct link_request *r, int code, struct wire_packet *packet,
                       const struct err *e)
{
    struct data_plane_link *l = container_of(r, struct data_plane_link, stats);
    struct wire_stats stats;
    (void)e;
    if (code != 0 || packet->header.body_bytes < sizeof stats)
        return;
    memcpy(&stats, packet->body, sizeof stats);
    l->strangers = stats.refused;
    if (stats.shrinks_failed > l->shrinks_failed)
        log_warn("data plane: a communicator could not be shrunk, and a new one was made (%" PRIu64
                 " so far, over all devices)",
                 stats.shrinks_failed);
    l->shrinks_failed = stats.shrinks_failed;
    size_t left = packet->header.body_bytes - sizeof stats;
    if (left % sizeof l->gpu_memory[0] != 0 || left > sizeof l->gpu_memory)
        return;
    l->n_gpu_memory = (uint32_t)(left / sizeof l->gpu_memory[0]);
    memcpy(l->gpu_memory, (const uint8_t *)packet->body + sizeof stats, left);
}

/* One at a time: a child that is slow to answer is asked less often. */
static void stats_ask(struct data_plane_link *l)
{
    struct err e = {0};
    if (link_waits(&l->stats))
        return;
    l->stats = (struct link_request){.done = on_counted};
    (void)link_submit(l, &l->stats, (struct wire_header){.type = WIRE_STATS}, NULL, 0, NULL, 0,
                      NULL, 0, l->config->memory_timeout_ms, &e);
}

uint64_t link_strangers(const struct data_plane_link *l)
{
    return l->strangers;
}

uint32_t link_gpu_memory(struct data_plane_link *l, const struct wire_gpu_memory **ret)
{
    *ret = l->gpu_memory;
    return l->n_gpu_memory;
}

void link_lease(struct data_plane_link *l, uint64_t until_ns)
{
    l->lease_until_ns = until_ns;
    if (l->state != LINK_READY)
        return;
    lease_send(l);
    stats_ask(l);
}

static void about_read(struct link_about *a, const struct wire_packet *packet,
                       const struct wire_ready *ready)
{
    size_t left = packet->header.body_bytes - sizeof *ready;
    uint32_t n = ready->n_devices;
    *a = (struct link_about){.nccl_version = ready->nccl_version,
                             .cuda_version = ready->cuda_version};
    (void)snprintf(a->how, sizeof a->how, "%.*s", (int)sizeof ready->how - 1, ready->how);
    (void)snprintf(a->local, sizeof a->local, "%.*s", (int)sizeof ready->local - 1, ready->local);
    if (n > CONFIG_MAX_DEVICES || left != n * sizeof a->devices[0])
        return;
    a->n_devices = n;
    if (n > 0)
        memcpy(a->devices, (const uint8_t *)packet->body + sizeof *ready, left);
    for (uint32_t i = 0; i < n; i++) {
        a->devices[i].fabric[WIRE_FABRIC_BYTES - 1] = '\0';
        a->devices[i].name[WIRE_DEVICE_NAME_BYTES - 1] = '\0';
    }
}

static void on_hello(struct link_request *r, int code, struct wire_packet *packet,
                     const struct err *e)
{
    struct data_plane_link *l = container_of(r, struct data_plane_link, hello);
    struct wire_ready ready = {0};
    if (code != 0) {
        if (code != RS_EPEER && code != RS_ECANCELED)
            link_kill(l, err_text(e, code));
        return;
    }
    if (packet->header.body_bytes >= sizeof ready)
        memcpy(&ready, packet->body, sizeof ready);
    if (packet->header.body_bytes >= sizeof ready)
        about_read(&l->about, packet, &ready);
    l->data_port = ready.data_port;
    l->strangers = l->shrinks_failed = 0;
    l->n_gpu_memory = 0;
    l->state = LINK_READY;
    l->ready_ns = clock_mono_ns();
    l->was_ready = true;
    l->n_failed = 0;
    l->why[0] = '\0';
    if (l->lease_until_ns != 0)
        lease_send(l);
    if (l->about.cuda_version != 0)
        stats_ask(l);
    log_info("data plane ready: pid %d, restarts %" PRIu64, (int)l->process.pid, l->restarts);
    l->events.ready(l->events.arg);
}

static int hello_send(struct data_plane_link *l, struct err *e)
{
    const struct config *c = l->config;
    struct wire_hello hello = {.n_devices = c->devices,
                               .ring_slots = c->ring_slots,
                               .slot_bytes = c->chunk_bytes,
                               .host_seed = c->host_seed,
                               .host_max_delay_us = c->host_max_delay_us,
                               .n_threads = c->threads,
                               .local_pairs = strcmp(c->local_pairs, "transport") == 0
                                                  ? WIRE_LOCAL_TRANSPORT
                                                  : WIRE_LOCAL_COPY,
                               .network_bytes_per_s = c->network_gbytes_per_s * 1e9,
                               .domain_bytes_per_s = c->domain_gbytes_per_s * 1e9,
                               .max_ctas = c->max_ctas,
                               .max_blocks = c->max_kernel_blocks,
                               .max_gpu_memory_bytes = c->max_gpu_memory_bytes};
    _Static_assert((int)CONFIG_MAX_GPU == (int)WIRE_DEVICE_NAME_BYTES, "a name travels whole");
    (void)snprintf(hello.backend, sizeof hello.backend, "%s", c->backend);
    (void)snprintf(hello.transport, sizeof hello.transport, "%s", c->transport);
    (void)snprintf(hello.data_address, sizeof hello.data_address, "%s", c->data_address);
    l->hello = (struct link_request){.done = on_hello};
    return submit(l, &l->hello, (struct wire_header){.type = WIRE_HELLO}, &hello, sizeof hello,
                  c->gpu_of_device, c->n_gpus * sizeof c->gpu_of_device[0], NULL, 0,
                  HELLO_TIMEOUT_MS, e);
}

static int child_spawn(struct data_plane_link *l, int child_end, struct err *e)
{
    char path[1024], fd_text[16];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0)
        return err_set(e, RS_EIO, "own program not found: %s", strerror(errno));
    path[n] = '\0';
    (void)snprintf(fd_text, sizeof fd_text, "%d", CHILD_FD);
    char name[] = "reshardd", option[] = "--data-plane";
    char level[16];
    (void)snprintf(level, sizeof level, "%s", log_level_name(l->config->log_level));
    char *args[] = {name, option, fd_text, level, NULL};
    uv_stdio_container_t stdio[CHILD_FD + 1] = {
        {.flags = UV_IGNORE},
        {.flags = UV_INHERIT_FD, .data.fd = STDOUT_FILENO},
        {.flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO},
        {.flags = UV_INHERIT_FD, .data.fd = child_end},
    };
    uv_process_options_t options = {.exit_cb = on_exit_child,
                                    .file = path,
                                    .args = args,
                                    .stdio_count = CHILD_FD + 1,
                                    .stdio = stdio};
    l->process.data = l;
    int r = uv_spawn(l->loop, &l->process, &options);
    l->process_open = true; /* the handle is initialised even where the spawn failed */
    l->reaped = r != 0;
    crash_spent();
    return r == 0 ? 0 : err_set(e, RS_EIO, "%s could not be run: %s", path, uv_strerror(r));
}

static int child_start(struct data_plane_link *l, struct err *e)
{
    int pair[2], size = SEND_BUFFER_BYTES;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return err_set(e, err_from_errno(errno), "no socket pair: %s", strerror(errno));
    (void)setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    (void)setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    (void)fcntl(pair[0], F_SETFL, O_NONBLOCK);
    l->state = LINK_STARTING;
    l->was_ready = false;
    l->incarnation = random_id();
    l->socket = pair[0];
    rs_assert(uv_poll_init(l->loop, &l->poll, pair[0]) == 0);
    l->poll.data = l;
    l->poll_open = true;
    (void)uv_poll_start(&l->poll, UV_READABLE, on_poll);
    int r = child_spawn(l, pair[1], e);
    (void)close(pair[1]);
    if (r == 0)
        r = hello_send(l, e);
    if (r != 0 && l->reaped) {
        child_close(l); /* its closing arms the next try */
        return r;
    }
    if (r != 0)
        link_kill(l, "it could not be told to begin");
    return 0;
}

int link_new(uv_loop_t *loop, const struct config *config, const struct link_events *events,
             struct data_plane_link **ret, struct err *e)
{
    struct data_plane_link *l = mem_zalloc(sizeof *l);
    if (l == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the data plane's link");
    l->loop = loop;
    l->config = config;
    l->events = *events;
    l->socket = -1;
    l->backoff_ms = BACKOFF_FIRST_MS;
    queue_init(&l->requests);
    queue_init(&l->out);
    rs_assert(uv_timer_init(loop, &l->deadline) == 0 && uv_timer_init(loop, &l->backoff) == 0);
    l->deadline.data = l->backoff.data = l;
    int r = child_start(l, e);
    if (r != 0)
        start_failed(l, err_text(e, r));
    if (r != 0 && !l->process_open && !l->poll_open)
        start_later(l);
    *ret = l;
    return 0;
}

static void on_grace_over(uv_timer_t *t)
{
    struct data_plane_link *l = t->data;
    if (!l->reaped)
        (void)uv_process_kill(&l->process, SIGKILL);
}

void link_stop(struct data_plane_link *l, void (*done)(void *arg), void *arg)
{
    struct wire_header stop = {.type = WIRE_STOP, .incarnation = l->incarnation};
    l->stopped = done;
    l->stopped_arg = arg;
    bool alive = l->process_open && !l->reaped;
    if (alive && writable_now(l->socket))
        (void)wire_send(l->socket, &stop, NULL, 0, NULL, 0, NULL, 0, NULL);
    l->state = LINK_STOPPED;
    requests_fail(l, RS_ECANCELED, "the daemon is stopping");
    l->n_closing = 2;
    uv_close((uv_handle_t *)&l->deadline, on_timer_closed);
    if (alive) { /* the back-off timer now guards the child's end; on_exit_child closes it */
        (void)uv_timer_start(&l->backoff, on_grace_over, STOP_GRACE_MS, 0);
        return;
    }
    child_close(l);
    uv_close((uv_handle_t *)&l->backoff, on_timer_closed);
}
