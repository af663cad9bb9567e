/* Segments: sealed memfds, mapped here and handed over on every link that the client opens. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "client/client.h"
#include "client/cuda.h"
#include "client/room.h"

#include "base/banned.h"

enum { SEGMENT_DROP_MOST_MS = 2000, PAGES_STEP_BYTES = 256 << 20 };

static int page_round(uint64_t bytes, uint64_t *ret, struct err *e)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (bytes == 0 || bytes > (uint64_t)INT64_MAX - page)
        return err_set(e, RS_EINVAL, "segment of %llu bytes: use 1 … 2^63-1",
                       (unsigned long long)bytes);
    *ret = (bytes + page - 1) / page * page;
    return 0;
}

/* Takes the pages step by step, and each time asks whether the rest still fits: ranks of one node
 * that start together see what the others have taken by then. */
static int pages_take(int fd, uint64_t bytes, const char *root, struct err *e)
{
    for (uint64_t at = 0; at < bytes;) {
        uint64_t step = bytes - at < PAGES_STEP_BYTES ? bytes - at : PAGES_STEP_BYTES;
        int r = room_check(root, bytes - at, e);
        if (r != 0)
            return r;
        if (fallocate(fd, 0, (off_t)at, (off_t)step) == 0)
            at += step;
        else if (errno != EINTR)
            return err_set(e, errno == ENOSPC || errno == ENOMEM ? RS_EEXHAUSTED : RS_EIO, "%s",
                           strerror(errno));
    }
    return 0;
}

int segment_memfd(uint64_t bytes, const char *root, int *ret_fd, struct err *e)
{
    int fd = memfd_create("reshard", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return err_set(e, RS_EIO, "memfd_create: %s", strerror(errno));
    int r = pages_take(fd, bytes, root, e);
    if (r == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        r = err_set(e, RS_EIO, "sealing: %s", strerror(errno));
    if (r != 0) {
        close(fd);
        return err_prefix(e, r, "segment of %llu bytes", (unsigned long long)bytes);
    }
    *ret_fd = fd;
    return 0;
}

static int adopt_check(int fd, uint64_t bytes, struct err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return err_set(e, RS_EINVAL, "segment: descriptor %d: %s", fd, strerror(errno));
    if (bytes == 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size < bytes)
        return err_set(e, RS_EINVAL, "segment: descriptor %d is not a memfd of at least %llu bytes",
                       fd, (unsigned long long)bytes);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        return err_set(e, RS_EINVAL,
                       "segment: descriptor %d is not sealed against shrinking; make it with "
                       "MFD_ALLOW_SEALING and add F_SEAL_SHRINK",
                       fd);
    if ((uint64_t)st.st_blocks * 512 < bytes)
        return err_set(e, RS_EINVAL,
                       "segment: %llu of %llu bytes of descriptor %d have no memory; fallocate it",
                       (unsigned long long)(bytes - (uint64_t)st.st_blocks * 512),
                       (unsigned long long)bytes, fd);
    return 0;
}

static void segment_destroy(struct reshard_segment *s)
{
    if (s->data != NULL && s->kind == MEMORY_SEGMENT_MEMFD)
        munmap(s->data, s->bytes);
    if (s->fd >= 0)
        close(s->fd);
    for (uint32_t i = 0; i < s->n_fds; i++)
        close(s->fds[i]);
    mem_free(s->fds);
    mem_free(s);
}

int segment_add(struct link *l, struct reshard_segment *s, uint64_t deadline_ns, struct err *e)
{
    if (s->kind == MEMORY_SEGMENT_MEMFD)
        return link_segment_add(l, s->fd, s->bytes, deadline_ns, &s->id, e);
    return link_device_segment_add(l, s->kind, &s->device, s->fds, s->n_fds, s->bytes, deadline_ns,
                                   &s->id, &s->device.local, e);
}

/* Takes fd, also on failure. */
static int segment_map(struct reshard_client *c, int fd, uint64_t bytes,
                       struct reshard_segment **ret, struct err *e)
{
    struct reshard_segment *s = mem_zalloc(sizeof *s);
    if (s == NULL) {
        close(fd);
        return err_set(e, RS_ENOMEM, "segment: out of memory");
    }
    *s = (struct reshard_segment){
        .client = c, .kind = MEMORY_SEGMENT_MEMFD, .fd = fd, .bytes = bytes, .ordinal = -1};
    queue_init(&s->queue);
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
        int why = errno;
        segment_destroy(s);
        return err_set(e, RS_EEXHAUSTED, "segment of %llu bytes: mmap: %s",
                       (unsigned long long)bytes, strerror(why));
    }
    s->data = data;
    *ret = s;
    return 0;
}

static int try_add(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg, struct err *e)
{
    (void)worker;
    struct reshard_segment *s = arg;
    struct reshard_client *c = s->client;
    int r = client_connect_lock(c, deadline_ns, e);
    if (r != 0)
        return r;
    /* While the lock is held no other link is made, so the id is that of the newest. */
    r = link_alive(l) ? segment_add(l, s, deadline_ns, e)
                      : err_set(e, RS_EUNAVAIL, "segment: the daemon is gone");
    if (r == 0)
        queue_push(&c->segments, &s->queue);
    client_connect_unlock(c);
    return r;
}

/* Takes fd, also on failure. */
static int segment_hand_over(struct reshard_client *c, int fd, uint64_t bytes, uint32_t timeout_ms,
                             struct reshard_segment **ret, struct err *e)
{
    struct reshard_segment *s = NULL;
    int r = segment_map(c, fd, bytes, &s, e);
    if (r != 0)
        return r;
    r = client_call(c, NULL, client_deadline(timeout_ms), try_add, s, e);
    if (r != 0)
        segment_destroy(s);
    else
        *ret = s;
    return r;
}

/* --- memory of GPUs ------------------------------------------------------------------------------ */

static int device_name_take(struct memory_device *d, const char *name, struct err *e)
{
    if (name == NULL || strlen(name) >= sizeof d->name)
        return err_set(e, RS_EINVAL, "segment: a GPU is named by its uuid, \"GPU-…\"");
    memcpy(d->name, name, strlen(name) + 1);
    return 0;
}

/* Takes the descriptors, also on failure. data, ordinal: NULL and -1 where this process does not know them. */
static int device_segment_hand_over(struct reshard_client *c, struct segment_export *x,
                                    uint64_t bytes, uint32_t timeout_ms,
                                    struct reshard_segment **ret, struct err *e)
{
    const struct memory_device *d = &x->device;
    struct reshard_segment *s = NULL;
    int r = 0;
    if (bytes == 0 || d->offset > d->allocation_bytes || bytes > d->allocation_bytes - d->offset)
        r = err_set(e, RS_EINVAL,
                    "segment: %llu bytes from %llu on leave the allocation of %llu bytes",
                    (unsigned long long)bytes, (unsigned long long)d->offset,
                    (unsigned long long)d->allocation_bytes);
    else if ((s = mem_zalloc(sizeof *s)) == NULL)
        r = err_set(e, RS_ENOMEM, "segment: out of memory");
    if (r != 0) {
        segment_export_close(x);
        return r;
    }
    *s = (struct reshard_segment){.client = c,
                                  .kind = x->kind,
                                  .fd = -1,
                                  .fds = x->fds,
                                  .n_fds = x->n_fds,
                                  .data = x->data,
                                  .bytes = bytes,
                                  .device = x->device,
                                  .ordinal = x->ordinal};
    queue_init(&s->queue);
    r = client_call(c, NULL, client_deadline(timeout_ms), try_add, s, e);
    if (r != 0)
        segment_destroy(s);
    else
        *ret = s;
    return r;
}

int reshard_segment_cuda(struct reshard_client *c, const void *device_pointer, uint64_t bytes,
                         uint32_t timeout_ms, struct reshard_segment **ret_segment,
                         struct reshard_error *e)
{
    struct err err = {0};
    struct segment_export x;
    int r = cuda_export(device_pointer, bytes, &x, &err);
    if (r == 0)
        r = device_segment_hand_over(c, &x, bytes, timeout_ms, ret_segment, &err);
    return client_give(e, r, &err);
}

/* A copy of the caller's. */
static int vmm_fd_take(int fd, struct segment_export *x, struct err *e)
{
    if ((x->fds = mem_alloc(sizeof *x->fds)) == NULL)
        return err_set(e, RS_ENOMEM, "segment: out of memory");
    if ((x->fds[0] = fcntl(fd, F_DUPFD_CLOEXEC, 0)) >= 0) {
        x->n_fds = 1;
        return 0;
    }
    int why = errno;
    segment_export_close(x);
    return err_set(e, RS_EINVAL, "segment: descriptor %d: %s", fd, strerror(why));
}

int reshard_segment_cuda_exported(struct reshard_client *c,
                                  const struct reshard_cuda_export *exported, uint64_t bytes,
                                  uint32_t timeout_ms, struct reshard_segment **ret_segment,
                                  struct reshard_error *e)
{
    struct err err = {0};
    struct segment_export x = {.kind = MEMORY_SEGMENT_CUDA_IPC, .ordinal = -1};
    int r = device_name_take(&x.device, exported->device, &err);
    x.device.offset = exported->offset_bytes;
    x.device.allocation_bytes = exported->allocation_bytes;
    x.device.allocation = exported->allocation;
    if (exported->ipc_handle != NULL)
        memcpy(x.device.handle, exported->ipc_handle, sizeof x.device.handle);
    else
        x.kind = MEMORY_SEGMENT_CUDA_VMM;
    if (r == 0 && exported->ipc_handle == NULL)
        r = vmm_fd_take(exported->vmm_fd, &x, &err);
    if (r == 0)
        r = device_segment_hand_over(c, &x, bytes, timeout_ms, ret_segment, &err);
    return client_give(e, r, &err);
}

uint32_t reshard_segment_device(const struct reshard_segment *s)
{
    return s->kind == MEMORY_SEGMENT_MEMFD ? UINT32_MAX : s->device.local;
}

int segments_synchronise(struct reshard_segment *const *segments, size_t n, struct err *e)
{
    uint64_t done = 0; /* one bit per ordinal */
    int r = 0;
    for (size_t i = 0; r == 0 && i < n; i++) {
        int ordinal = segments[i]->ordinal;
        if (ordinal < 0 || ordinal >= 64 || (done >> ordinal & 1) != 0)
            continue;
        done |= UINT64_C(1) << ordinal;
        r = cuda_synchronise(ordinal, e);
    }
    return r;
}

int reshard_segment_new(struct reshard_client *c, uint64_t bytes, uint32_t timeout_ms,
                        struct reshard_segment **ret_segment, struct reshard_error *e)
{
    struct err err = {0};
    int fd = -1;
    int r = page_round(bytes, &bytes, &err);
    if (r == 0)
        r = segment_memfd(bytes, "", &fd, &err);
    if (r == 0)
        r = segment_hand_over(c, fd, bytes, timeout_ms, ret_segment, &err);
    return client_give(e, r, &err);
}

int reshard_segment_adopt(struct reshard_client *c, int fd, uint64_t bytes, uint32_t timeout_ms,
                          struct reshard_segment **ret_segment, struct reshard_error *e)
{
    struct err err = {0};
    int r = adopt_check(fd, bytes, &err);
    int own = -1;
    if (r == 0 && (own = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0)
        r = err_set(&err, RS_EIO, "segment: dup: %s", strerror(errno));
    if (r == 0)
        r = segment_hand_over(c, own, bytes, timeout_ms, ret_segment, &err);
    return client_give(e, r, &err);
}

void *reshard_segment_data(const struct reshard_segment *s)
{
    return s->data;
}

uint64_t reshard_segment_bytes(const struct reshard_segment *s)
{
    return s->bytes;
}

/* The daemon forgets it where it can be asked; a daemon that is gone has forgotten it already. */
static void segment_take_back(struct reshard_segment *s, uint64_t deadline_ns)
{
    struct reshard_client *c = s->client;
    pthread_mutex_lock(&c->mutex);
    struct link *l = c->link != NULL && link_alive(c->link) ? link_ref(c->link) : NULL;
    pthread_mutex_unlock(&c->mutex);
    if (l != NULL)
        (void)link_segment_drop(l, s->id, deadline_ns, NULL);
    link_unref(l);
}

int reshard_segment_free(struct reshard_segment *s, uint32_t timeout_ms, struct reshard_error *e)
{
    struct err err = {0};
    if (s == NULL)
        return client_give(e, 0, &err);
    struct reshard_client *c = s->client;
    pthread_mutex_lock(&c->mutex);
    uint32_t n_users = s->n_users;
    pthread_mutex_unlock(&c->mutex);
    if (n_users > 0)
        return client_give(e,
                           err_set(&err, RS_EPRECOND,
                                   "segment: %u workers are attached with it; detach them first",
                                   n_users),
                           &err);
    uint64_t deadline =
        timeout_ms == 0 ? deadline_after_ms(SEGMENT_DROP_MOST_MS) : deadline_after_ms(timeout_ms);
    int r = client_connect_lock(c, deadline, &err);
    if (r != 0)
        return client_give(e, r, &err);
    queue_remove(&s->queue);
    segment_take_back(s, deadline);
    client_connect_unlock(c);
    segment_destroy(s);
    return client_give(e, 0, &err);
}
