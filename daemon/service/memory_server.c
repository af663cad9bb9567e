#include "service/memory_server.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "memory/memory.h"
#include "memory/memory_socket.h"

#include "base/banned.h"

enum { BACKLOG = 128, ACCEPT_PAUSE_MS = 200, MAX_FDS = MEMORY_MAX_PARTS + 1 };

struct connection {
    struct memory_client client; /* what others see */
    struct queue segments;
    uint32_t n_segments;
    bool welcome; /* HELLO was answered */
    bool ended;
    int socket;
    int pidfd; /* -1: the kernel has none */
    uv_poll_t poll, process;
    unsigned n_open;  /* handles that are not closed yet */
    size_t n_read;    /* bytes of `record` so far */
    int fds[MAX_FDS]; /* came with the record that is being read, by one message */
    uint32_t n_fds;
    bool fds_are_scarce;       /* so that more than one can't be kept */
    struct memory_part *parts; /* what is said of them; CUDA_VMM_PARTS, while the record is taken */
    struct memory_record record;
    bool checking; /* the segment of `record`; nothing is read until that is done */
    uv_work_t check;
    int check_code;
    struct err check_err;
};

struct memory_server {
    uv_loop_t *loop;
    const struct config *config;
    uint64_t incarnation;
    void (*ended)(void *arg, struct memory_client *client);
    void *arg;
    int (*device_of)(void *arg, const char *name, uint32_t *ret, struct err *e);
    void *device_arg;
    struct queue clients;
    uint32_t n_clients;
    uint64_t next_client, next_segment;
    int socket;
    char path[sizeof((struct sockaddr_un *)0)->sun_path];
    ino_t inode;
    uv_poll_t poll;
    uv_timer_t pause; /* after accept ran out of descriptors */
    unsigned n_open;
    bool stopping;
    void (*stopped)(void *arg);
    void *stopped_arg;
};

static struct connection *connection_of(const struct memory_client *c)
{
    return container_of((struct memory_client *)(uintptr_t)c, struct connection, client);
}

/* --- segments ----------------------------------------------------------------------------------- */

static void segment_free(struct segment *s)
{
    if (s->fd >= 0)
        (void)close(s->fd);
    for (uint32_t i = 0; s->part_fds != NULL && i < s->n_parts; i++)
        (void)close(s->part_fds[i]);
    mem_free(s->part_fds);
    mem_free(s->parts);
    mem_free(s);
}

static void segment_free_if_unused(struct segment *s)
{
    if (s->client != NULL || s->n_uses > 0 || s->n_mapped > 0)
        return;
    segment_free(s);
}

/* Closes the record's descriptors but for the first `keep`. */
static void fds_drop(struct connection *c, uint32_t keep)
{
    while (c->n_fds > keep)
        (void)close(c->fds[--c->n_fds]);
    if (keep == 0) {
        c->fds_are_scarce = false;
        mem_free(c->parts);
        c->parts = NULL;
    }
}

static bool record_send(struct connection *c, const struct memory_record *r)
{
    ssize_t n;
    do {
        n = send(c->socket, r, sizeof *r, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof *r;
}

static void connection_end(struct connection *c, const char *why);

static bool of_gpu(uint32_t kind)
{
    return kind >= MEMORY_SEGMENT_CUDA_IPC && kind <= MEMORY_SEGMENT_CUDA_VMM_PARTS;
}

static bool of_vmm(uint32_t kind)
{
    return kind == MEMORY_SEGMENT_CUDA_VMM || kind == MEMORY_SEGMENT_CUDA_VMM_PARTS;
}

static void reply_kept(struct connection *c, uint64_t request, const struct segment *s)
{
    struct memory_record r = {.magic = MEMORY_SOCKET_MAGIC,
                              .type = MEMORY_SEGMENT_REPLY,
                              .request = request,
                              .segment = s->id};
    if (of_gpu(s->kind))
        r.device = s->device;
    if (!record_send(c, &r))
        connection_end(c, "it does not read its replies");
}

static void reply(struct connection *c, uint64_t request, uint64_t segment, int code,
                  const char *text)
{
    struct memory_record r = {.magic = MEMORY_SOCKET_MAGIC,
                              .type = MEMORY_SEGMENT_REPLY,
                              .code = code,
                              .request = request,
                              .segment = segment};
    if (text != NULL)
        (void)snprintf(r.text, sizeof r.text, "%s", text);
    if (!record_send(c, &r))
        connection_end(c, "it does not read its replies");
}

static void segment_dropped(struct segment *s)
{
    struct connection *c = connection_of(s->client);
    queue_remove(&s->in);
    c->n_segments--;
    s->client = NULL;
    const bool asked = s->dropping;
    const uint64_t request = s->drop_request, id = s->id;
    segment_free_if_unused(s); /* before the answer: an open descriptor keeps its memory */
    if (asked)
        reply(c, request, id, 0, NULL);
}

void segment_use(struct segment *s)
{
    s->n_uses++;
}

void segment_unuse(struct segment *s)
{
    s->n_uses--;
    segment_free_if_unused(s);
}

void segment_mapped(struct segment *s)
{
    s->n_mapped++;
}

void segment_unmapped(struct segment *s)
{
    s->n_mapped--;
    if (s->dropping && s->n_mapped == 0 && s->client != NULL)
        segment_dropped(s);
    else
        segment_free_if_unused(s);
}

struct segment *memory_client_segment(const struct memory_client *client, uint64_t id)
{
    struct connection *c = connection_of(client);
    queue_foreach (q, &c->segments) {
        struct segment *s = container_of(q, struct segment, in);
        if (s->id == id && !s->dropping)
            return s;
    }
    return NULL;
}

/* A new descriptor has the lowest free number, so a high one tells that all below are taken. The last eighth is for the
 * daemon's own: without one, no answer of the data plane that brings descriptors could be read. */
static bool descriptors_are_scarce(int newest)
{
    struct rlimit l;
    return getrlimit(RLIMIT_NOFILE, &l) == 0 && (rlim_t)newest >= l.rlim_cur - l.rlim_cur / 8;
}

/* In how many pid namespaces a process is numbered, as this one sees it; 0: it can't be told. */
static unsigned pid_namespaces(const char *process)
{
    char path[64], line[256];
    unsigned n = 0;
    (void)snprintf(path, sizeof path, "/proc/%s/status", process);
    FILE *f = fopen(path, "re");
    while (f != NULL && n == 0 && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, "NSpid:", 6) == 0)
            for (const char *at = line + 6; *(at += strspn(at, " \t\n")) != '\0'; n++)
                at += strcspn(at, " \t\n");
    if (f != NULL)
        (void)fclose(f);
    return n;
}

/* A CUDA IPC handle names its owner by pid: in another namespace that is another process, or none. */
static int same_pid_namespace(const struct connection *c, struct err *e)
{
    char pid[16];
    (void)snprintf(pid, sizeof pid, "%d", (int)c->client.pid);
    unsigned own = pid_namespaces("self"), its = c->client.pid > 0 ? pid_namespaces(pid) : 0;
    if (c->client.pid > 0 && (its == own || own == 0))
        return 0;
    return err_set(
        e, RS_EPRECOND,
        "the client (pid %d here) is in another pid namespace than the daemon, where a CUDA "
        "IPC handle can't be opened: run its container in the daemon's (--pid=host), or "
        "hand over a VMM descriptor",
        (int)c->client.pid);
}

/* Which bytes of which allocation on which device; `device` is the record's, its name ended. */
static int device_admit(const struct connection *c, const struct memory_record *r,
                        struct memory_device *device, struct err *e)
{
    const struct memory_server *s = c->client.server;
    if (strcmp(s->config->backend, "cuda") != 0)
        return err_set(e, RS_EPRECOND,
                       "GPU memory can't be reached by backend '%s': hand over a memfd, or run the "
                       "daemon with backend = cuda and transport = nccl",
                       s->config->backend);
    if (device->offset > device->allocation_bytes ||
        r->bytes > device->allocation_bytes - device->offset)
        return err_set(e, RS_EINVAL,
                       "%" PRIu64 " bytes from %" PRIu64
                       " on leave the allocation, which has %" PRIu64
                       ": give the offset from its base (cuMemGetAddressRange)",
                       r->bytes, device->offset, device->allocation_bytes);
    if (device->allocation_bytes > s->config->max_segment_bytes)
        return err_set(e, RS_EEXHAUSTED,
                       "allocation of %" PRIu64 " bytes: max_segment_bytes is %" PRIu64,
                       device->allocation_bytes, s->config->max_segment_bytes);
    int code = r->kind == MEMORY_SEGMENT_CUDA_IPC ? same_pid_namespace(c, e) : 0;
    if (code == 0 && s->device_of == NULL)
        code = err_set(e, RS_EUNAVAIL, "the daemon is starting; try again");
    return code != 0 ? code : s->device_of(s->device_arg, device->name, &device->local, e);
}

static int segment_admit(struct connection *c, const struct memory_record *r, struct err *e)
{
    const struct config *config = c->client.server->config;
    if (r->kind != MEMORY_SEGMENT_MEMFD && !of_gpu(r->kind))
        return err_set(
            e, RS_EINVAL,
            "segment kind %u is not known; use 1 (memfd), 2 (CUDA IPC), 3 (CUDA VMM) or 4 (several "
            "CUDA VMM)",
            r->kind);
    if ((c->n_fds == 0) != (r->kind == MEMORY_SEGMENT_CUDA_IPC))
        return c->n_fds > 0 ? err_set(e, RS_EINVAL, "a CUDA IPC segment comes without a descriptor")
                            : err_set(e, RS_EINVAL, "no descriptor came with the segment");
    if (r->bytes == 0)
        return err_set(e, RS_EINVAL, "a segment of 0 bytes holds nothing");
    if (r->bytes > config->max_segment_bytes)
        return err_set(e, RS_EEXHAUSTED,
                       "segment of %" PRIu64 " bytes: max_segment_bytes is %" PRIu64, r->bytes,
                       config->max_segment_bytes);
    if (c->n_segments >= config->max_segments)
        return err_set(e, RS_EEXHAUSTED, "%u segments: max_segments is reached; use one per arena",
                       c->n_segments);
    if ((c->fds_are_scarce && r->kind == MEMORY_SEGMENT_CUDA_VMM_PARTS) ||
        (c->n_fds > 0 && descriptors_are_scarce(c->fds[0])))
        return err_set(e, RS_EEXHAUSTED,
                       "the daemon is nearly out of descriptors; use one segment per arena, or "
                       "raise its limit (LimitNOFILE)");
    return 0;
}

/* What comes with the allocations of a CUDA_VMM_PARTS: the table, and a descriptor of each. */
static int parts_admit(struct connection *c, const struct memory_record *r, struct err *e)
{
    if (r->kind != MEMORY_SEGMENT_CUDA_VMM_PARTS)
        return 0;
    if (c->n_fds < 2)
        return err_set(e, RS_EINVAL,
                       "%u descriptors came with the segment, all in one message must be: a memfd "
                       "with the table, then 1 to %d VMM allocations",
                       c->n_fds, MEMORY_MAX_PARTS);
    return memory_parts_read(c->fds[0], c->n_fds - 1, r->device.allocation_bytes, &c->parts, e);
}

/* A file of shared memory as one number. */
static uint64_t memory_number(int fd)
{
    struct stat st;
    rs_assert(fstat(fd, &st) == 0);
    return (uint64_t)st.st_ino ^ (uint64_t)st.st_dev << 48;
}

/* An allocation of a GPU that has an IPC handle as one number. */
static uint64_t ipc_memory_number(const struct memory_record *r)
{
    uint64_t n = UINT64_C(0xcbf29ce484222325);
    const uint64_t what[] = {0, r->device.allocation};
    const uint8_t *parts[] = {(const uint8_t *)what, r->device.handle};
    const size_t sizes[] = {sizeof what, sizeof r->device.handle};
    for (unsigned k = 0; k < 2; k++)
        for (size_t i = 0; i < sizes[k]; i++)
            n = (n ^ parts[k][i]) * UINT64_C(0x100000001b3);
    return n | UINT64_C(1) << 63;
}

/* What no other segment's memory is called: neither files nor IPC handles have such numbers. */
static uint64_t fresh_memory_number(const struct memory_server *s)
{
    return UINT64_C(3) << 62 | (s->next_segment + 1);
}

/* All VMM descriptors look alike, so that what the client says of its allocations counts: it could only spoil its own memory
 * with it. */
static int place_find(struct connection *c, struct segment *s, struct err *e)
{
    size_t n = 0;
    struct memory_place **others = mem_alloc((c->n_segments + 1) * sizeof(struct memory_place *));
    if (others == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the segment");
    queue_foreach (q, &c->segments) {
        struct segment *other = container_of(q, struct segment, in);
        if (of_vmm(other->kind))
            others[n++] = &other->place;
    }
    s->place = (struct memory_place){.parts = s->parts, .n_parts = s->n_parts};
    int r = memory_place_find(&s->place, others, n, fresh_memory_number(c->client.server), e);
    mem_free(others);
    return r;
}

/* From the places, of which some may have moved. */
static void memory_numbers_set(struct connection *c)
{
    queue_foreach (q, &c->segments) {
        struct segment *s = container_of(q, struct segment, in);
        if (!of_vmm(s->kind))
            continue;
        s->memory = s->place.memory;
        s->offset = s->place.base + s->device.offset;
    }
}

/* The record's descriptors become the segment's. */
static void fds_give(struct connection *c, struct segment *s)
{
    if (s->part_fds == NULL) {
        s->fd = c->n_fds > 0 ? c->fds[0] : -1;
        c->n_fds = 0;
        return;
    }
    memcpy(s->part_fds, c->fds + 1, s->n_parts * sizeof *s->part_fds);
    c->n_fds = 1; /* the table's */
}

/* Of GPU memory: what it is made of. */
static int segment_fill(struct connection *c, struct segment *s, struct err *e)
{
    const struct memory_record *r = &c->record;
    if (!of_gpu(r->kind)) {
        s->memory = memory_number(c->fds[0]);
        return 0;
    }
    s->device = r->device;
    s->offset = r->device.offset;
    if (r->kind == MEMORY_SEGMENT_CUDA_IPC) {
        s->memory = ipc_memory_number(r);
        if (r->device.address != 0)
            (void)process_id_of(c->client.pid, &s->owner);
        return 0;
    }
    if (r->kind == MEMORY_SEGMENT_CUDA_VMM_PARTS) {
        s->n_parts = c->n_fds - 1;
        s->parts = c->parts;
        c->parts = NULL;
        s->part_fds = mem_alloc(s->n_parts * sizeof *s->part_fds);
    } else if ((s->parts = mem_alloc(sizeof *s->parts)) != NULL) {
        s->n_parts = 1;
        s->parts[0] = (struct memory_part){r->device.allocation_bytes, r->device.allocation};
    }
    if (s->parts == NULL || (r->kind == MEMORY_SEGMENT_CUDA_VMM_PARTS && s->part_fds == NULL))
        return err_set(e, RS_ENOMEM, "no memory for the segment");
    return place_find(c, s, e);
}

static void segment_keep(struct connection *c)
{
    const struct memory_record *r = &c->record;
    struct segment *s = NULL;
    int code = c->check_code;
    if (code == 0 && (s = mem_zalloc(sizeof *s)) == NULL)
        code = err_set(&c->check_err, RS_ENOMEM, "no memory for the segment");
    if (code == 0) {
        *s = (struct segment){.fd = -1, .kind = r->kind};
        code = segment_fill(c, s, &c->check_err);
    }
    if (code != 0) {
        if (s != NULL) {
            mem_free(s->part_fds);
            mem_free(s->parts);
            mem_free(s);
        }
        reply(c, r->request, 0, code, err_text(&c->check_err, code));
        return;
    }
    s->client = &c->client;
    s->id = ++c->client.server->next_segment;
    s->bytes = r->bytes;
    s->writable = r->writable != 0;
    fds_give(c, s);
    queue_push(&c->segments, &s->in);
    c->n_segments++;
    memory_numbers_set(c);
    reply_kept(c, r->request, s);
}

static void on_readable(uv_poll_t *handle, int status, int events);
static void connection_unref(struct connection *c);

static void check_work(uv_work_t *work)
{
    struct connection *c = work->data;
    c->check_code = segment_check(c->fds[0], c->record.bytes, &c->check_err);
}

static void check_done(uv_work_t *work, int status)
{
    struct connection *c = work->data;
    (void)status; /* it is never cancelled */
    c->checking = false;
    if (!c->ended)
        segment_keep(c);
    fds_drop(c, 0);
    if (!c->ended)
        (void)uv_poll_start(&c->poll, UV_READABLE, on_readable);
    connection_unref(c);
}

/* Memory without pages is given them, which takes some 0.4 s per GiB: not on the loop. */
static void segment_take(struct connection *c, const struct memory_record *r)
{
    c->check_err = (struct err){0};
    if (r->kind != MEMORY_SEGMENT_CUDA_VMM_PARTS)
        fds_drop(c, 1); /* more than it can do with */
    int code = segment_admit(c, r, &c->check_err);
    if (code == 0 && of_gpu(r->kind)) {
        c->record.device.name[MEMORY_DEVICE_NAME_BYTES - 1] = '\0';
        code = device_admit(c, r, &c->record.device, &c->check_err);
    }
    if (code == 0)
        code = parts_admit(c, r, &c->check_err);
    if (code != 0) {
        reply(c, r->request, 0, code, err_text(&c->check_err, code));
        return;
    }
    if (of_gpu(
            r->kind)) { /* the data plane sees whether it can be opened, when a worker attaches */
        c->check_code = 0;
        segment_keep(c);
        return;
    }
    c->checking = true;
    c->check.data = c;
    c->n_open++;
    (void)uv_poll_stop(&c->poll);
    rs_assert(uv_queue_work(c->client.server->loop, &c->check, check_work, check_done) == 0);
}

static void segment_drop(struct connection *c, const struct memory_record *r)
{
    struct segment *s = memory_client_segment(&c->client, r->segment);
    if (s == NULL) {
        reply(c, r->request, r->segment, RS_ENOTFOUND, "no such segment of this client");
        return;
    }
    if (s->n_uses > 0) {
        reply(c, r->request, r->segment, RS_EPRECOND,
              "a worker is attached with the segment; detach it first");
        return;
    }
    s->dropping = true;
    s->drop_request = r->request;
    if (s->n_mapped == 0)
        segment_dropped(s);
}

/* --- one client --------------------------------------------------------------------------------- */

static void free_if_stopped(struct memory_server *s)
{
    if (!s->stopping || s->n_open > 0 || s->n_clients > 0)
        return;
    void (*done)(void *) = s->stopped;
    void *arg = s->stopped_arg;
    mem_free(s);
    done(arg);
}

/* Freed when its handles are closed and no check of its memory runs. */
static void connection_unref(struct connection *c)
{
    struct memory_server *s = c->client.server;
    if (--c->n_open > 0)
        return;
    (void)close(c->socket);
    if (c->pidfd >= 0)
        (void)close(c->pidfd);
    fds_drop(c, 0);
    queue_remove(&c->client.in);
    s->n_clients--;
    mem_free(c);
    free_if_stopped(s);
}

static void on_connection_closed(uv_handle_t *h)
{
    connection_unref(h->data);
}

static void connection_end(struct connection *c, const char *why)
{
    if (c->ended)
        return;
    c->ended = true;
    if (c->welcome) {
        log_debug("client %" PRIu64 " ended: pid %d, %s", c->client.id, (int)c->client.pid, why);
        c->client.server->ended(c->client.server->arg, &c->client);
    }
    while (!queue_empty(&c->segments)) {
        struct segment *s = container_of(c->segments.next, struct segment, in);
        s->dropping = false;
        segment_dropped(s);
    }
    uv_close((uv_handle_t *)&c->poll, on_connection_closed);
    if (c->pidfd >= 0)
        uv_close((uv_handle_t *)&c->process, on_connection_closed);
}

static void hello_take(struct connection *c, const struct memory_record *r)
{
    uint8_t random[16];
    struct memory_record w = {.magic = MEMORY_SOCKET_MAGIC,
                              .type = MEMORY_WELCOME,
                              .protocol = MEMORY_SOCKET_PROTOCOL,
                              .request = r->request,
                              .incarnation = c->client.server->incarnation,
                              .client = c->client.id};
    if (r->protocol != MEMORY_SOCKET_PROTOCOL) {
        w.code = RS_EPROTO;
        (void)snprintf(w.text, sizeof w.text, "protocol %u is not spoken here; use %u", r->protocol,
                       MEMORY_SOCKET_PROTOCOL);
        (void)record_send(c, &w);
        connection_end(c, "other protocol");
        return;
    }
    random_bytes(random, sizeof random);
    for (unsigned i = 0; i < sizeof random; i++)
        (void)snprintf(c->client.token + (size_t)2 * i, 3, "%02x", random[i]);
    memcpy(w.token, c->client.token, sizeof w.token);
    c->welcome = true;
    if (!record_send(c, &w))
        connection_end(c, "it went before its welcome");
}

static void record_take(struct connection *c)
{
    const struct memory_record r = c->record;
    bool known = r.magic == MEMORY_SOCKET_MAGIC;
    if (known && !c->welcome && r.type == MEMORY_HELLO)
        hello_take(c, &r);
    else if (known && c->welcome && r.type == MEMORY_SEGMENT)
        segment_take(c, &r);
    else if (known && c->welcome && r.type == MEMORY_SEGMENT_DROP)
        segment_drop(c, &r);
    else
        connection_end(c, "a record that is not of the protocol");
    if (!c->checking) /* descriptors that nobody asked for, or of a refused segment */
        fds_drop(c, 0);
}

/* Keeps the descriptors of the first message of the record that has some, closes the rest. Where they are scarce, one at most. */
static void fds_take(struct connection *c, struct msghdr *m)
{
    const bool first = c->n_fds == 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h != NULL; h = CMSG_NXTHDR(m, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
            if (!first || c->n_fds == MAX_FDS) {
                (void)close(fd);
                continue;
            }
            c->fds[c->n_fds++] = fd;
            c->fds_are_scarce = c->fds_are_scarce || (c->n_fds > 1 && descriptors_are_scarce(fd));
        }
    }
    if (c->fds_are_scarce)
        fds_drop(c, 1);
}

/* 1: a whole record is there; 0: not yet; RS_EPEER: the end. */
static int record_read(struct connection *c)
{
    union {
        struct cmsghdr align;
        char data[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov = {(char *)&c->record + c->n_read, sizeof c->record - c->n_read};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.data,
                       .msg_controllen = sizeof control.data};
    ssize_t n = recvmsg(c->socket, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : RS_EPEER;
    fds_take(c, &m);
    if (n == 0)
        return RS_EPEER;
    c->n_read += (size_t)n;
    if (c->n_read < sizeof c->record)
        return 0;
    c->n_read = 0;
    return 1;
}

static void on_readable(uv_poll_t *handle, int status, int events)
{
    struct connection *c = handle->data;
    (void)events;
    int r = status < 0 ? RS_EPEER : record_read(c);
    if (r == 1)
        record_take(c);
    else if (r != 0)
        connection_end(c, "connection closed");
}

static void on_process_end(uv_poll_t *handle, int status, int events)
{
    (void)status;
    (void)events;
    connection_end(handle->data, "process ended");
}

static void connection_open(struct memory_server *s, int socket)
{
    struct ucred who;
    socklen_t n = sizeof who;
    struct connection *c = NULL;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &n) != 0 ||
        s->n_clients >= s->config->max_clients || descriptors_are_scarce(socket) ||
        (c = mem_zalloc(sizeof *c)) == NULL) {
        log_warn("client refused: %u clients, max_clients %u, descriptor %d", s->n_clients,
                 s->config->max_clients, socket);
        (void)close(socket);
        return;
    }
    c->client =
        (struct memory_client){.server = s, .id = ++s->next_client, .uid = who.uid, .pid = who.pid};
    queue_init(&c->segments);
    queue_push(&s->clients, &c->client.in);
    s->n_clients++;
    c->socket = socket;
    /* A process of another pid namespace has pid 0 here: then its connection alone tells its end. */
    c->pidfd = who.pid > 0 ? (int)syscall(SYS_pidfd_open, who.pid, 0) : -1;
    rs_assert(uv_poll_init(s->loop, &c->poll, socket) == 0);
    c->poll.data = c;
    c->n_open = 1;
    (void)uv_poll_start(&c->poll, UV_READABLE, on_readable);
    if (c->pidfd >= 0 && uv_poll_init(s->loop, &c->process, c->pidfd) == 0) {
        c->process.data = c;
        c->n_open++;
        (void)uv_poll_start(&c->process, UV_READABLE, on_process_end);
    } else if (c->pidfd >= 0) {
        (void)close(c->pidfd);
        c->pidfd = -1;
    }
}

/* --- the server --------------------------------------------------------------------------------- */

static void on_connect(uv_poll_t *handle, int status, int events);

static void on_pause_over(uv_timer_t *t)
{
    struct memory_server *s = t->data;
    (void)uv_poll_start(&s->poll, UV_READABLE, on_connect);
}

static void on_connect(uv_poll_t *handle, int status, int events)
{
    struct memory_server *s = handle->data;
    (void)status;
    (void)events;
    int socket = accept4(s->socket, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket >= 0) {
        connection_open(s, socket);
        return;
    }
    if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS)
        return;
    /* The listening socket stays readable: without a pause this would be a busy loop. */
    log_warn("memory socket: no client accepted for %d ms: %s", ACCEPT_PAUSE_MS, strerror(errno));
    (void)uv_poll_stop(&s->poll);
    (void)uv_timer_start(&s->pause, on_pause_over, ACCEPT_PAUSE_MS, 0);
}

static int path_clear(const char *path, struct err *e)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return 0;
    if (!S_ISSOCK(st.st_mode))
        return err_set(e, RS_EEXIST, "%s is there and is no socket; move it away", path);
    (void)unlink(path);
    return 0;
}

static int listen_open(struct memory_server *s, struct err *e)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat st;
    int n = snprintf(s->path, sizeof s->path, "%s.mem", s->config->socket);
    if (n < 0 || (size_t)n >= sizeof s->path)
        return err_set(e, RS_EINVAL, "%s.mem is longer than %zu bytes", s->config->socket,
                       sizeof s->path - 1);
    memcpy(address.sun_path, s->path, sizeof s->path);
    int r = path_clear(s->path, e);
    if (r != 0)
        return r;
    s->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s->socket < 0)
        return err_set(e, err_from_errno(errno), "memory socket: %s", strerror(errno));
    (void)fchmod(s->socket, s->config->socket_mode); /* so that it is never open wider than this */
    if (bind(s->socket, (struct sockaddr *)&address, sizeof address) != 0 ||
        chmod(s->path, s->config->socket_mode) != 0 || lstat(s->path, &st) != 0 ||
        listen(s->socket, BACKLOG) != 0) {
        r = err_set(e, err_from_errno(errno), "memory socket %s: %s", s->path, strerror(errno));
        (void)close(s->socket);
        return r;
    }
    s->inode = st.st_ino;
    return 0;
}

int memory_server_start(uv_loop_t *loop, const struct config *config, uint64_t incarnation,
                        void (*ended)(void *arg, struct memory_client *client), void *arg,
                        struct memory_server **ret, struct err *e)
{
    struct memory_server *s = mem_zalloc(sizeof *s);
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the memory socket");
    s->loop = loop;
    s->config = config;
    s->incarnation = incarnation;
    s->ended = ended;
    s->arg = arg;
    queue_init(&s->clients);
    int r = listen_open(s, e);
    if (r != 0) {
        mem_free(s);
        return r;
    }
    rs_assert(uv_poll_init(loop, &s->poll, s->socket) == 0 && uv_timer_init(loop, &s->pause) == 0);
    s->poll.data = s->pause.data = s;
    s->n_open = 2;
    (void)uv_poll_start(&s->poll, UV_READABLE, on_connect);
    *ret = s;
    return 0;
}

void memory_server_devices(struct memory_server *s,
                           int (*device_of)(void *arg, const char *name, uint32_t *ret,
                                            struct err *e),
                           void *arg)
{
    s->device_of = device_of;
    s->device_arg = arg;
}

static void on_server_closed(uv_handle_t *h)
{
    struct memory_server *s = h->data;
    if (--s->n_open == 0)
        (void)close(s->socket);
    free_if_stopped(s);
}

void memory_server_stop(struct memory_server *s, void (*done)(void *arg), void *arg)
{
    struct stat st;
    s->stopping = true;
    s->stopped = done;
    s->stopped_arg = arg;
    if (lstat(s->path, &st) == 0 && st.st_ino == s->inode)
        (void)unlink(s->path);
    queue_foreach_safe (q, tmp, &s->clients)
        connection_end(connection_of(container_of(q, struct memory_client, in)),
                       "the daemon is stopping");
    uv_close((uv_handle_t *)&s->poll, on_server_closed);
    uv_close((uv_handle_t *)&s->pause, on_server_closed);
}

static bool token_equal(const char *a, const char *b)
{
    unsigned char differ = 0;
    for (unsigned i = 0; i < MEMORY_SOCKET_TOKEN_BYTES - 1; i++)
        differ = (unsigned char)(differ | (a[i] ^ b[i]));
    return differ == 0;
}

const struct memory_client *memory_server_find(const struct memory_server *s, const char *token)
{
    if (strnlen(token, MEMORY_SOCKET_TOKEN_BYTES) != MEMORY_SOCKET_TOKEN_BYTES - 1)
        return NULL;
    queue_foreach (q, &s->clients) {
        const struct connection *c = connection_of(container_of(q, struct memory_client, in));
        if (c->welcome && !c->ended && token_equal(c->client.token, token))
            return &c->client;
    }
    return NULL;
}

const struct memory_client *memory_server_client(const struct memory_server *s, uint64_t id)
{
    queue_foreach (q, &s->clients) {
        const struct connection *c = connection_of(container_of(q, struct memory_client, in));
        if (c->client.id == id && c->welcome && !c->ended)
            return &c->client;
    }
    return NULL;
}

uint32_t memory_server_n_clients(const struct memory_server *s)
{
    return s->n_clients;
}
