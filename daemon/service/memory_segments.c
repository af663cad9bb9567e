/* Segments that clients hand over: which are taken, what memory each is, who borrows it, when its descriptor is closed. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "service/memory_server_private.h"

#include "base/banned.h"

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
    if (!connection_send(c, &r))
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
    if (!connection_send(c, &r))
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
        (c->n_fds > 0 && memory_descriptors_are_scarce(c->fds[0])))
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
    connection_fds_drop(c, 0);
    if (!c->ended)
        connection_read(c);
    connection_unref(c);
}

/* Memory without pages is given them, which takes some 0.4 s per GiB: not on the loop. */
void segment_take(struct connection *c, const struct memory_record *r)
{
    c->check_err = (struct err){0};
    if (r->kind != MEMORY_SEGMENT_CUDA_VMM_PARTS)
        connection_fds_drop(c, 1); /* more than it can do with */
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

void segment_drop(struct connection *c, const struct memory_record *r)
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

void segments_end(struct connection *c)
{
    while (!queue_empty(&c->segments)) {
        struct segment *s = container_of(c->segments.next, struct segment, in);
        s->dropping = false;
        segment_dropped(s);
    }
}
