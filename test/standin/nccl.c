/* The stand-in's NCCL: communicators between threads and processes over shared memory.
 *
 * A unique id names a file of the process that made it, which all ranks map. Between each two ranks lies a ring per direction; a
 * send ends when its receive has taken all of it, so nothing is buffered that the real one might not
 * buffer. Operations of one peer and direction go in order; groups of one communicator go in the
 * order they were ended. Sizes that differ, another order, a dead peer: it waits for ever, until
 * aborted. */
#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "test/standin/nccl_inner.h"
#include "test/standin/standin.h"

enum {
    MAX_RANKS = 16,
    RING_BYTES = 1 << 19,
    MAX_OPERATIONS = 4096,
    MAX_IN_GROUP = 16,
    MAX_SHRINKS = 4 /* of one communicator */
};

struct ring {
    _Alignas(64) _Atomic uint64_t written, taken;
    char data[RING_BYTES];
};

struct shared {
    _Atomic uint32_t n_ranks, n_joined, refused;
    _Atomic uint32_t here[MAX_RANKS];
    int32_t pid[MAX_RANKS], device[MAX_RANKS];
    struct {
        _Atomic uint32_t made;
        char path[48]; /* of the communicator that is left */
    } shrinks[MAX_SHRINKS];
    struct ring rings[MAX_RANKS * MAX_RANKS]; /* [from * MAX_RANKS + to] */
};

struct ncclComm {
    struct shared *shared;
    pthread_t thread;
    int n_ranks, rank, device;
    atomic_int state, refs;
    atomic_bool aborted;
    atomic_uint launching; /* groups that a thread of ours still has to give to their streams */
    bool joined, blocking;
    _Atomic uint64_t next_ticket, serving;
    int n_shrinks;
    struct ncclComm *child;           /* that is being made by shrinking this one */
    struct ncclComm *parent, **place; /* of one that is: where the caller wants it */
};

int standin_comm_device(const struct ncclComm *c)
{
    return c->device;
}

bool standin_comm_busy(const struct ncclComm *c)
{
    return atomic_load(&c->serving) != atomic_load(&c->next_ticket);
}

struct message {
    char *data;
    uint64_t bytes, at, begin; /* begin: where it starts in the ring's count */
    int peer;
    bool send, started, lost;
};

struct group {
    struct ncclComm *comm;
    uint64_t ticket;
    int n, device;
    struct message messages[];
};

/* --- ids and init ------------------------------------------------------------------------------ */

enum { MAX_IDS = 64 };

/* Files of ids that this process has made: closed once all ranks have mapped them, when the next one is made. */
static int id_files[MAX_IDS];
static int n_id_files;
static pthread_mutex_t id_mutex = PTHREAD_MUTEX_INITIALIZER;

static bool all_joined(int fd)
{
    uint32_t head[2]; /* n_ranks, n_joined */
    _Static_assert(offsetof(struct shared, n_joined) == sizeof head[0], "they come first");
    return pread(fd, head, sizeof head, 0) == sizeof head && head[0] > 0 && head[1] >= head[0];
}

/* Where there is no room, the file stays open. */
static void keep_id_file(int fd)
{
    pthread_mutex_lock(&id_mutex);
    int n = 0;
    for (int i = 0; i < n_id_files; i++)
        if (!all_joined(id_files[i]))
            id_files[n++] = id_files[i];
        else
            (void)close(id_files[i]);
    if (n < MAX_IDS)
        id_files[n++] = fd;
    n_id_files = n;
    pthread_mutex_unlock(&id_mutex);
}

STANDIN_EXPORT ncclResult_t ncclGetVersion(int *ret)
{
    *ret = (int)standin_number("STANDIN_NCCL_VERSION", NCCL_VERSION_CODE);
    return (ncclResult_t)standin_call("ncclGetVersion", ncclSystemError);
}

STANDIN_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *ret)
{
    int code = standin_call("ncclGetUniqueId", ncclSystemError);
    if (code != 0)
        return (ncclResult_t)code;
    /* As with the real one, whoever made the id must live until all have joined. */
    int fd = memfd_create("standin-nccl", MFD_CLOEXEC);
    uint64_t r = 0;
    if (fd < 0 || ftruncate(fd, sizeof(struct shared)) != 0 || getrandom(&r, sizeof r, 0) < 0)
        return ncclSystemError;
    memset(ret, 0, sizeof *ret);
    (void)snprintf(ret->internal, sizeof ret->internal, "/proc/%d/fd/%d", getpid(), fd);
    memcpy(ret->internal + sizeof ret->internal - sizeof r, &r, sizeof r);
    keep_id_file(fd);
    return ncclSuccess;
}

static void pause_a_little(void)
{
    struct timespec t = {.tv_nsec = 20000};
    (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

/* As the library refuses it, but where it is told that ranks share a GPU. */
static bool one_device_twice(const struct ncclComm *c)
{
    const char *shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (shared != NULL && strcmp(shared, "1") == 0)
        return false;
    for (int a = 0; a < c->n_ranks; a++)
        for (int b = 0; b < a; b++)
            if (c->shared->pid[a] == c->shared->pid[b] &&
                c->shared->device[a] == c->shared->device[b])
                return true;
    return false;
}

static void *init_main(void *arg)
{
    struct ncclComm *c = arg;
    struct shared *s = c->shared;
    int code = standin_operation("init", ncclInternalError, &c->aborted);
    uint32_t none = 0;
    if (code == 0 && !atomic_compare_exchange_strong(&s->here[c->rank], &none, 1))
        code = ncclInvalidUsage; /* the id was used before, or the rank twice */
    if (code == 0) {
        s->pid[c->rank] = getpid();
        s->device[c->rank] = c->device;
        atomic_store(&s->n_ranks, (uint32_t)c->n_ranks);
        atomic_fetch_add(&s->n_joined, 1);
    }
    while (code == 0 && !c->aborted && atomic_load(&s->n_joined) < (uint32_t)c->n_ranks)
        pause_a_little();
    if (code == 0 && !c->aborted && one_device_twice(c))
        code = ncclInvalidUsage;
    atomic_store(&c->state, code);
    return NULL;
}

static _Thread_local int group_depth;
static _Thread_local struct ncclComm *joining[MAX_IN_GROUP];
static _Thread_local int n_joining;

static ncclResult_t finish_blocking(struct ncclComm *c)
{
    while (atomic_load(&c->state) == ncclInProgress)
        pause_a_little();
    return (ncclResult_t)atomic_load(&c->state);
}

STANDIN_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret, int n_ranks, ncclUniqueId id,
                                                   int rank, ncclConfig_t *config)
{
    int code = standin_call("ncclCommInitRankConfig", ncclSystemError);
    if (code != 0)
        return (ncclResult_t)code;
    if (n_ranks < 1 || n_ranks > MAX_RANKS || rank < 0 || rank >= n_ranks)
        return ncclInvalidArgument;
    int fd = open(id.internal, O_RDWR | O_CLOEXEC);
    struct ncclComm *c = calloc(1, sizeof *c);
    void *p = fd < 0 ? MAP_FAILED
                     : mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        (void)close(fd);
    if (c == NULL || p == MAP_FAILED) {
        free(c);
        return ncclSystemError;
    }
    c->shared = p;
    c->n_ranks = n_ranks;
    c->rank = rank;
    c->device = standin_current_device();
    c->blocking = config == NULL || config->blocking != 0;
    standin_most(&standin_count(c->device)->most_ctas, (uint64_t)config->maxCTAs);
    atomic_store(&c->state, ncclInProgress);
    atomic_store(&c->refs, 1);
    if (pthread_create(&c->thread, NULL, init_main, c) != 0)
        return ncclSystemError;
    *ret = c;
    if (config != NULL && config->blocking == 0)
        return ncclInProgress;
    if (group_depth == 0)
        return finish_blocking(c);
    if (n_joining < MAX_IN_GROUP)
        joining[n_joining++] = c;
    return ncclSuccess;
}

static void unref(struct ncclComm *c)
{
    if (atomic_fetch_sub(&c->refs, 1) != 1)
        return;
    if (c->shared != NULL)
        (void)munmap(c->shared, sizeof(struct shared));
    free(c);
}

/* One that was shrunk from another has been joined, or will be by that one's end. */
static void join_init(struct ncclComm *c)
{
    if (c->parent != NULL) {
        c->parent->child = NULL;
        c->parent = NULL;
    }
    if (!c->joined)
        (void)pthread_join(c->thread, NULL);
    c->joined = true;
}

/* --- shrinking --------------------------------------------------------------------------------- */

static int map_child(struct ncclComm *c, int fd)
{
    void *p = fd < 0 ? MAP_FAILED
                     : mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    c->shared = p == MAP_FAILED ? NULL : p;
    return c->shared == NULL ? ncclSystemError : 0;
}

/* The lowest rank that is left makes what the others map. */
static int find_child(struct ncclComm *c, int number)
{
    struct shared *s = c->parent->shared;
    if (c->rank == 0) {
        int fd = memfd_create("standin-nccl", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, sizeof(struct shared)) != 0)
            return ncclSystemError;
        (void)snprintf(s->shrinks[number].path, sizeof s->shrinks[number].path, "/proc/%d/fd/%d",
                       getpid(), fd);
        atomic_store(&s->shrinks[number].made, 1);
        return map_child(c, fd);
    }
    while (atomic_load(&s->shrinks[number].made) == 0 && !c->aborted && !c->parent->aborted)
        pause_a_little();
    if (atomic_load(&s->shrinks[number].made) == 0)
        return ncclInternalError;
    int fd = open(s->shrinks[number].path, O_RDWR | O_CLOEXEC), r = map_child(c, fd);
    if (fd >= 0)
        (void)close(fd);
    return r;
}

/* As with the real one, the caller's pointer is set at the end, and the parent tells until then. */
static void *shrink_main(void *arg)
{
    struct ncclComm *c = arg, *parent = c->parent;
    int code = standin_operation("shrink", ncclInternalError, &parent->aborted);
    if (code == 0 && !parent->aborted)
        code = find_child(c, parent->n_shrinks - 1);
    if (code == 0 && c->shared != NULL) {
        atomic_store(&c->shared->n_ranks, (uint32_t)c->n_ranks);
        atomic_fetch_add(&c->shared->n_joined, 1);
    }
    while (code == 0 && !parent->aborted &&
           atomic_load(&c->shared->n_joined) < (uint32_t)c->n_ranks)
        pause_a_little();
    if (parent->aborted)
        code = ncclInternalError;
    if (code == 0) {
        atomic_store(&c->state, ncclSuccess);
        __atomic_store_n(c->place, c, __ATOMIC_RELEASE);
    }
    atomic_store(&parent->state, code);
    return NULL;
}

static int rank_left(const struct ncclComm *c, const int *out, int n_out)
{
    int below = 0;
    for (int i = 0; i < n_out; i++) {
        if (out[i] < 0 || out[i] >= c->n_ranks || out[i] == c->rank)
            return -1;
        below += out[i] < c->rank;
    }
    return c->rank - below;
}

STANDIN_EXPORT ncclResult_t ncclCommShrink(ncclComm_t parent, int *out, int n_out, ncclComm_t *ret,
                                           ncclConfig_t *config, int flags)
{
    int code = standin_call("ncclCommShrink", ncclSystemError);
    int rank = rank_left(parent, out, n_out);
    *ret = NULL;
    if (code != 0)
        return (ncclResult_t)code;
    if (rank < 0 || n_out < 1 || parent->n_shrinks == MAX_SHRINKS || config == NULL ||
        config->blocking != 0)
        return ncclInvalidArgument;
    if (atomic_load(&parent->state) != ncclSuccess ||
        (standin_comm_busy(parent) && (flags & NCCL_SHRINK_ABORT) == 0))
        return ncclInvalidUsage;
    struct ncclComm *c = calloc(1, sizeof *c);
    if (c == NULL)
        return ncclSystemError;
    c->n_ranks = parent->n_ranks - n_out;
    c->rank = rank;
    c->device = parent->device;
    c->parent = parent;
    c->place = ret;
    atomic_store(&c->refs, 1);
    atomic_store(&c->state, ncclInProgress);
    atomic_store(&parent->state, ncclInProgress);
    parent->n_shrinks++;
    parent->child = c;
    return pthread_create(&c->thread, NULL, shrink_main, c) == 0 ? ncclInProgress : ncclSystemError;
}

/* A parent's end ends the making of its child. */
static void end_child(struct ncclComm *parent)
{
    struct ncclComm *c = parent->child;
    parent->child = NULL;
    if (c == NULL)
        return;
    if (!c->joined)
        (void)pthread_join(c->thread, NULL);
    c->joined = true;
    c->parent = NULL;
    if (atomic_load(&c->state) == ncclSuccess)
        return; /* the caller's */
    if (c->shared != NULL)
        (void)munmap(c->shared, sizeof(struct shared));
    free(c);
}

/* --- the end ----------------------------------------------------------------------------------- */

static void await_launches(const struct ncclComm *c)
{
    while (atomic_load(&c->launching) > 0)
        pause_a_little();
}

/* What runs ends soon; what is still behind other work of its stream ends when its turn comes. */
STANDIN_EXPORT ncclResult_t ncclCommAbort(ncclComm_t c)
{
    int code = standin_call("ncclCommAbort", ncclSystemError);
    c->aborted = true;
    await_launches(c);
    end_child(c);
    join_init(c);
    standin_registered_drop(c);
    unref(c);
    return (ncclResult_t)code;
}

STANDIN_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t c)
{
    (void)c;
    return (ncclResult_t)standin_call("ncclCommFinalize", ncclSystemError);
}

STANDIN_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    int code = standin_call("ncclCommDestroy", ncclSystemError);
    join_init(c);
    await_launches(c);
    while (standin_comm_busy(c))
        pause_a_little();
    end_child(c);
    standin_registered_drop(c);
    unref(c);
    return (ncclResult_t)code;
}

STANDIN_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *ret)
{
    int code = standin_call("ncclCommGetAsyncError", ncclSystemError);
    *ret = (ncclResult_t)atomic_load(&c->state);
    return (ncclResult_t)code;
}

STANDIN_EXPORT ncclResult_t ncclCommCount(const ncclComm_t c, int *ret)
{
    *ret = c->n_ranks;
    return ncclSuccess;
}

/* --- groups ------------------------------------------------------------------------------------ */

struct queued {
    struct ncclComm *comm;
    struct CUstream_st *stream;
    struct message message;
};
static _Thread_local struct queued queued[MAX_OPERATIONS];
static _Thread_local int n_queued;

static ncclResult_t queue_message(void *p, size_t count, ncclDataType_t type, int peer,
                                  struct ncclComm *c, struct CUstream_st *stream, bool send)
{
    if (type != ncclInt8 && type != ncclUint8)
        return ncclInvalidArgument; /* bytes are all that we send */
    if (peer < 0 || peer >= c->n_ranks || standin_stream_device(stream) != c->device)
        return ncclInvalidArgument;
    int state = atomic_load(&c->state);
    if (state != ncclSuccess)
        return state == ncclInProgress ? ncclInvalidUsage : (ncclResult_t)state;
    if (n_queued == MAX_OPERATIONS)
        return ncclInternalError;
    queued[n_queued].comm = c;
    queued[n_queued].stream = stream;
    queued[n_queued++].message =
        (struct message){.data = p, .bytes = count, .peer = peer, .send = send};
    if (group_depth == 0)
        return ncclGroupStart(), ncclGroupEnd();
    /* A communicator that does not block may say so of any call. */
    return !c->blocking && standin_random() % 4 == 0 ? ncclInProgress : ncclSuccess;
}

STANDIN_EXPORT ncclResult_t ncclSend(const void *p, size_t count, ncclDataType_t type, int peer,
                                     ncclComm_t c, cudaStream_t stream)
{
    int code = standin_call("ncclSend", ncclSystemError);
    return code != 0 ? (ncclResult_t)code
                     : queue_message((void *)(uintptr_t)p, count, type, peer, c, stream, true);
}

STANDIN_EXPORT ncclResult_t ncclRecv(void *p, size_t count, ncclDataType_t type, int peer,
                                     ncclComm_t c, cudaStream_t stream)
{
    int code = standin_call("ncclRecv", ncclSystemError);
    return code != 0 ? (ncclResult_t)code : queue_message(p, count, type, peer, c, stream, false);
}

STANDIN_EXPORT ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return (ncclResult_t)standin_call("ncclGroupStart", ncclSystemError);
}

static void ring_write(struct ring *r, uint64_t at, const void *from, uint64_t n)
{
    uint64_t place = at % RING_BYTES, first = n < RING_BYTES - place ? n : RING_BYTES - place;
    memcpy(r->data + place, from, first);
    memcpy(r->data, (const char *)from + first, n - first);
}

static void ring_read(struct ring *r, uint64_t at, void *to, uint64_t n)
{
    uint64_t place = at % RING_BYTES, first = n < RING_BYTES - place ? n : RING_BYTES - place;
    memcpy(to, r->data + place, first);
    memcpy((char *)to + first, r->data, n - first);
}

/* A header of the message's bytes, then the bytes. True where something moved. */
static bool step_send(struct ring *r, struct message *m)
{
    uint64_t written = atomic_load(&r->written);
    uint64_t room = RING_BYTES - (written - atomic_load(&r->taken));
    if (!m->started) {
        if (room < sizeof m->bytes)
            return false;
        m->started = true;
        m->begin = written;
        ring_write(r, written, &m->bytes, sizeof m->bytes);
        atomic_store(&r->written, written + sizeof m->bytes);
        return true;
    }
    uint64_t n = m->bytes - m->at < room ? m->bytes - m->at : room;
    if (n == 0)
        return false;
    ring_write(r, written, m->data + m->at, n);
    m->at += n;
    atomic_store(&r->written, written + n);
    return true;
}

/* Of what has just been received, where tests have it so. */
static void harm(struct message *m)
{
    uint64_t half = m->bytes / 2;
    if (standin_damage("wrong-address"))
        for (uint64_t i = 0; i < half; i++) {
            char c = m->data[i];
            m->data[i] = m->data[half + i];
            m->data[half + i] = c;
        }
    if (standin_damage("flipped-bit"))
        m->data[half] ^= 0x10;
}

static bool step_receive(struct ring *r, struct message *m)
{
    uint64_t taken = atomic_load(&r->taken), there = atomic_load(&r->written) - taken;
    if (!m->started) {
        uint64_t bytes;
        if (there < sizeof bytes)
            return false;
        ring_read(r, taken, &bytes, sizeof bytes);
        if (bytes != m->bytes)
            return false; /* sides that disagree wait for ever, as they may with the real one */
        m->started = true;
        m->lost = standin_damage("lost-chunk");
        atomic_store(&r->taken, taken + sizeof bytes);
        return true;
    }
    uint64_t n = m->bytes - m->at < there ? m->bytes - m->at : there;
    if (n == 0)
        return false;
    if (!m->lost)
        ring_read(r, taken, m->data + m->at, n);
    m->at += n;
    if (m->at == m->bytes)
        harm(m);
    atomic_store(&r->taken, taken + n);
    return true;
}

static bool finished(const struct ring *r, const struct message *m)
{
    if (!m->started || m->at < m->bytes)
        return false;
    return !m->send || atomic_load(&r->taken) >= m->begin + sizeof m->bytes + m->bytes;
}

static struct ring *ring_of(struct group *g, const struct message *m)
{
    int from = m->send ? g->comm->rank : m->peer, to = m->send ? m->peer : g->comm->rank;
    return &g->comm->shared->rings[from * MAX_RANKS + to];
}

/* One round over all messages; *ret_left: how many are not finished. */
static bool step_group(struct group *g, int *ret_left)
{
    bool blocked[2][MAX_RANKS] = {{false}}, moved = false;
    *ret_left = 0;
    for (int i = 0; i < g->n; i++) {
        struct message *m = &g->messages[i];
        struct ring *r = ring_of(g, m);
        if (m->started && m->at == m->bytes && finished(r, m))
            continue;
        ++*ret_left;
        bool *before = &blocked[m->send][m->peer];
        if (*before)
            continue;
        moved = (m->send ? step_send(r, m) : step_receive(r, m)) || moved;
        /* the next of this peer and direction begins when this one's bytes are all under way */
        *before = !(m->started && m->at == m->bytes);
    }
    return moved;
}

static void count_group(const struct group *g)
{
    struct standin_device_counters *c = standin_count(g->device);
    __atomic_fetch_add(&c->groups, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->messages, (uint64_t)g->n, __ATOMIC_RELAXED);
    for (int i = 0; i < g->n; i++)
        __atomic_fetch_add(g->messages[i].send ? &c->sent_bytes : &c->received_bytes,
                           g->messages[i].bytes, __ATOMIC_RELAXED);
}

static int run_group(void *arg)
{
    struct group *g = arg;
    struct ncclComm *c = g->comm;
    int left = 1, result = 0;
    while (!c->aborted && atomic_load(&c->serving) != g->ticket)
        pause_a_little();
    int code = c->aborted ? 0 : standin_operation("group", ncclRemoteError, &c->aborted);
    if (code != 0)
        atomic_store(&c->state, code);
    __atomic_fetch_add(&standin_count(g->device)->groups_begun, 1, __ATOMIC_RELAXED);
    bool pageable = standin_number("STANDIN_PAGEABLE", 0) != 0;
    for (int i = 0; i < g->n && result == 0; i++) {
        struct message *m = &g->messages[i];
        char *at = standin_reach(g->device, m->data, m->bytes);
        if (at != NULL)
            m->data = at;
        else if (!pageable)
            result = cudaErrorIllegalAddress;
    }
    while (result == 0 && left > 0 && !c->aborted)
        if (code != 0 || !step_group(g, &left)) /* after an error it stands still until aborted */
            pause_a_little();
    if (result == 0 && left == 0)
        count_group(g);
    atomic_fetch_add(&c->serving, 1);
    unref(c);
    free(g);
    return result;
}

/* The queued messages of one communicator and stream become one operation of the stream. */
static ncclResult_t launch(struct queued *q, int n_queued_here, struct ncclComm *c,
                           struct CUstream_st *stream)
{
    int n = 0;
    for (int i = 0; i < n_queued_here; i++)
        n += q[i].comm == c && q[i].stream == stream;
    struct group *g = calloc(1, sizeof *g + (size_t)n * sizeof g->messages[0]);
    if (g == NULL)
        return ncclSystemError;
    g->comm = c;
    g->device = c->device;
    for (int i = 0; i < n_queued_here; i++)
        if (q[i].comm == c && q[i].stream == stream) {
            g->messages[g->n++] = q[i].message;
            q[i].comm = NULL;
        }
    g->ticket = atomic_fetch_add(&c->next_ticket, 1);
    atomic_fetch_add(&c->refs, 1);
    return standin_enqueue(stream, "group", run_group, g) == 0 ? ncclSuccess
                                                               : ncclUnhandledCudaError;
}

static ncclResult_t launch_all(struct queued *q, int n)
{
    ncclResult_t r = ncclSuccess;
    for (int i = 0; i < n && r == ncclSuccess; i++)
        if (q[i].comm != NULL)
            r = launch(q, n, q[i].comm, q[i].stream);
    return r;
}

/* What a group's end of communicators that do not block leaves to a thread. */
struct launching {
    int n, n_comms;
    struct ncclComm *comms[MAX_IN_GROUP];
    struct queued queued[];
};

static void *launch_main(void *arg)
{
    struct launching *l = arg;
    pause_a_little();
    int r = launch_all(l->queued, l->n), in_progress = ncclInProgress;
    for (int i = 0; i < l->n_comms; i++) {
        /* An error that came meanwhile stays. */
        (void)atomic_compare_exchange_strong(&l->comms[i]->state, &in_progress, r);
        in_progress = ncclInProgress;
        atomic_fetch_sub(&l->comms[i]->launching, 1);
    }
    free(l);
    return NULL;
}

static void note_comm(struct launching *l, struct ncclComm *c)
{
    for (int i = 0; i < l->n_comms; i++)
        if (l->comms[i] == c)
            return;
    if (l->n_comms < MAX_IN_GROUP)
        l->comms[l->n_comms++] = c;
}

static ncclResult_t launch_later(void)
{
    struct launching *l = calloc(1, sizeof *l + (size_t)n_queued * sizeof l->queued[0]);
    pthread_t thread;
    if (l == NULL)
        return ncclSystemError;
    l->n = n_queued;
    memcpy(l->queued, queued, (size_t)n_queued * sizeof queued[0]);
    for (int i = 0; i < n_queued; i++)
        note_comm(l, queued[i].comm);
    for (int i = 0; i < l->n_comms; i++) {
        atomic_store(&l->comms[i]->state, ncclInProgress);
        atomic_fetch_add(&l->comms[i]->launching, 1);
    }
    if (pthread_create(&thread, NULL, launch_main, l) != 0)
        return ncclSystemError;
    (void)pthread_detach(thread);
    return ncclInProgress;
}

STANDIN_EXPORT ncclResult_t ncclGroupEnd(void)
{
    int code = standin_call("ncclGroupEnd", ncclSystemError);
    if (--group_depth > 0)
        return (ncclResult_t)code;
    ncclResult_t r = (ncclResult_t)code;
    if (r == ncclSuccess && n_queued > 0)
        r = queued[0].comm->blocking ? launch_all(queued, n_queued) : launch_later();
    n_queued = 0;
    for (int i = 0; i < n_joining && r == ncclSuccess; i++)
        r = finish_blocking(joining[i]);
    n_joining = 0;
    return r;
}

STANDIN_EXPORT const char *ncclGetErrorString(ncclResult_t code)
{
    return code == ncclRemoteError    ? "remote process exited or there was a network error"
           : code == ncclInvalidUsage ? "invalid usage"
           : code == ncclInProgress   ? "NCCL operation in progress"
           : code == ncclSuccess      ? "no error"
                                      : "an error of the stand-in";
}

STANDIN_EXPORT const char *ncclGetLastError(ncclComm_t c)
{
    return c != NULL && atomic_load(&c->state) == ncclInvalidUsage
               ? "the id was used before, or one GPU is in two ranks"
               : "";
}
