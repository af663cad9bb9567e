#include "service/data_plane_link.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
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
#include "service/data_plane_link_private.h"

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

static int child_start(struct data_plane_link *l, struct err *e);

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

/* --- the child ---------------------------------------------------------------------------------- */

static void free_if_closed(struct data_plane_link *l)
{
    if (l->state != LINK_STOPPED || l->process_open || l->poll_open || l->n_closing > 0)
        return;
    void (*done)(void *) = l->stopped;
    void *arg = l->stopped_arg;
    link_out_clear(l);
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
    link_out_clear(l);
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
    bool by_itself = signal == 0 && strcmp(l->why, link_closed_socket) == 0;
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
    link_requests_fail(l, RS_EPEER, "the data plane process ended");
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
    int r = link_send(l, &h, &body, sizeof body, NULL, 0, NULL, 0, &e);
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

void link_stats_ask(struct data_plane_link *l)
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
    link_stats_ask(l);
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
        link_stats_ask(l);
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
    return link_submit_early(l, &l->hello, (struct wire_header){.type = WIRE_HELLO}, &hello,
                             sizeof hello, c->gpu_of_device, c->n_gpus * sizeof c->gpu_of_device[0],
                             NULL, 0, HELLO_TIMEOUT_MS, e);
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
    (void)uv_poll_start(&l->poll, UV_READABLE, link_on_poll);
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
    if (alive && link_writable(l->socket))
        (void)wire_send(l->socket, &stop, NULL, 0, NULL, 0, NULL, 0, NULL);
    l->state = LINK_STOPPED;
    link_requests_fail(l, RS_ECANCELED, "the daemon is stopping");
    l->n_closing = 2;
    uv_close((uv_handle_t *)&l->deadline, on_timer_closed);
    if (alive) { /* the back-off timer now guards the child's end; on_exit_child closes it */
        (void)uv_timer_start(&l->backoff, on_grace_over, STOP_GRACE_MS, 0);
        return;
    }
    child_close(l);
    uv_close((uv_handle_t *)&l->backoff, on_timer_closed);
}
