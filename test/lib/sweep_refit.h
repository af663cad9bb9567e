/* Whole refits between two data planes with NCCL on the stand-in, one of which may be told to fail in a call: what
 * test_standin_sweep.c strikes. A data plane that is lost is replaced, and nobody is waited for beyond its deadline. */
#ifndef RS_TEST_SWEEP_REFIT_H
#define RS_TEST_SWEEP_REFIT_H

#include <check.h>
#include <poll.h>
#include <sys/pidfd.h>

#include "test/lib/rig.h"
#include "test/lib/sweep_foreign.h"

enum {
    NODES = 2,
    DEVICES = 4,
    ID_BYTES = 128,
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    SLOW = 4,
#else
    SLOW = 1,
#endif
    /* In ms(): */
    ANSWER_MS = 1200, /* what control waits for an answer before it gives a data plane up */
    PREPARE_MS = 900, /* a deadline of PREPARE that passes before that */
    REFIT_MS = 2000,  /* and of the transfer */
    FOREIGN = 900     /* a worker whose memory is another process's GPU memory */
};

/* How slow this machine is, as it is now, by refits without a fault: deadlines that those would pass tell nothing of a fault. */
static int pace = 1;

static inline int ms(int quiet)
{
    return quiet * SLOW * pace;
}

/* --- two data planes -------------------------------------------------------------------------------- */

struct fault {
    const char *variable, *name; /* of the stand-in's environment; NULL: no fault */
    uint64_t nth;
    uint32_t node;
};

struct world {
    struct rig n[NODES];
    bool lost[NODES];     /* is to be replaced: gone, silent, or its device has failed */
    bool replaced[NODES]; /* was */
    char folder[64];
    uint64_t attempt;
    unsigned n_ids;
};

static inline const char *path_of(const struct world *w, uint32_t node, const char *what)
{
    static char path[128];
    (void)snprintf(path, sizeof path, "%s/%s-%u", w->folder, what, node);
    return path;
}

static const char source_json[] =
    "{\"name\":\"s\",\"ranks\":2,\"meshes\":[{\"name\":\"m\",\"shape\":[2],\"ranks\":[0,1]}],"
    "\"tensors\":[{\"name\":\"w\",\"shape\":[96,64],\"dtype\":\"float32\",\"mesh\":\"m\","
    "\"placements\":[\"Shard(0)\"]},{\"name\":\"v\",\"shape\":[40,24],\"dtype\":\"float32\","
    "\"mesh\":\"m\",\"placements\":[\"Shard(0)\"]},{\"name\":\"rows\",\"shape\":[8,131072],"
    "\"dtype\":\"uint8\",\"mesh\":\"m\",\"placements\":[\"Shard(1)\"]}]}"; /* for the copy engine */

static const char destination_json[] =
    "{\"name\":\"d\",\"ranks\":3,\"meshes\":[{\"name\":\"m\",\"shape\":[3],\"ranks\":[0,1,2]}],"
    "\"tensors\":[{\"name\":\"w\",\"shape\":[96,64],\"dtype\":\"float32\",\"mesh\":\"m\","
    "\"placements\":[\"Shard(1)\"]},{\"name\":\"v\",\"shape\":[40,24],\"dtype\":\"bfloat16\","
    "\"cast\":true,\"mesh\":\"m\",\"placements\":[\"Replicate\"]},{\"name\":\"rows\",\"shape\":"
    "[8,131072],\"dtype\":\"uint8\",\"mesh\":\"m\",\"placements\":[\"Shard(0)\"]}]}";

static inline bool good(struct rig *r, uint64_t request, uint32_t type)
{
    r->refused = false;
    rig_expect(r, request, type);
    return !r->refused && !r->gone;
}

static inline void map_foreign(struct rig *r)
{
    struct wire_map ipc = {.bytes = IPC_BYTES,
                           .segment = 0,
                           .writable = 1,
                           .kind = WIRE_SEGMENT_CUDA_IPC,
                           .allocation_bytes = IPC_BYTES,
                           .generation = 1};
    struct wire_map vmm = {.bytes = VMM_BYTES,
                           .segment = 1,
                           .writable = 1,
                           .kind = WIRE_SEGMENT_CUDA_VMM,
                           .allocation_bytes = VMM_BYTES};
    memcpy(ipc.handle, &foreign.handles.memory, sizeof foreign.handles.memory);
    rig_expect(r, rig_send(r, WIRE_MAP, FOREIGN, &ipc, sizeof ipc, NULL, 0, NULL, 0), WIRE_MAPPED);
    rig_expect(r, rig_send(r, WIRE_MAP, FOREIGN, &vmm, sizeof vmm, NULL, 0, &foreign.vmm_fd, 1),
               WIRE_MAPPED);
}

static inline void arm(const struct world *w, const struct fault *f, uint32_t node)
{
    char value[96];
    (void)unlink(path_of(w, node, "counters"));
    (void)setenv("STANDIN_COUNTERS", path_of(w, node, "counters"), 1);
    (void)unlink(path_of(w, node, "calls"));
    (void)setenv("STANDIN_CALLS", path_of(w, node, "calls"), 1);
    (void)unsetenv("STANDIN_FAIL");
    (void)unsetenv("STANDIN_HANG");
    (void)unsetenv("STANDIN_ASYNC");
    if (f->variable == NULL || f->node != node || w->replaced[node])
        return;
    (void)snprintf(value, sizeof value, "%s:%llu", f->name, (unsigned long long)f->nth);
    (void)setenv(f->variable, value, 1);
}

/* Starts it and attaches its workers. */
static inline void node_open(struct world *w, const struct fault *f, uint32_t node)
{
    struct rig *r = &w->n[node];
    memset(r, 0, sizeof *r);
    r->o.n_devices = DEVICES;
    for (uint32_t d = 0; d < DEVICES; d++)
        r->o.node_of[d] = r->o.domain[d] = d / 2;
    r->o.node = node;
    r->o.plan = plan_options_default();
    r->o.plan.chunk_bytes = 256 << 10;
    r->o.plan.ring_slots = 2;
    r->o.plan.least_piece_bytes = 128 << 10;
    r->o.shadow = r->o.process = r->o.lenient = true;
    r->o.answer_ms = ms(ANSWER_MS);
    r->o.hello.n_threads = 2;
    r->o.hello.host_seed = 1; /* poison in fresh memory */
    memcpy(r->o.hello.backend, "cuda", 5);
    memcpy(r->o.hello.transport, "nccl", 5);
    rig_side(r, 0, source_json, 0, 2);
    rig_side(r, 1, destination_json, 2, 2);
    r->rank_device[1][2] =
        0; /* beside a source: copies within a device, and between two of a node */
    arm(w, f, node);
    rig_open(r);
    if (node == 1)
        map_foreign(r);
    r->attempt = w->attempt;
    w->lost[node] = r->refused || r->gone;
}

/* True: it ended by itself. */
static inline bool node_wait(const struct rig *r, int most_ms)
{
    struct pollfd fd = {.fd = pidfd_open(r->child, 0), .events = POLLIN};
    bool ended = poll(&fd, 1, most_ms) == 1;
    close(fd.fd);
    return ended;
}

static inline void node_kill(struct world *w, uint32_t node)
{
    struct rig *r = &w->n[node];
    int status;
    (void)kill(r->child, SIGKILL);
    (void)waitpid(r->child, &status, 0);
    close(r->control);
    rig_free(r);
}

static inline void count_open(struct world *w, const struct fault *f)
{
    for (uint32_t i = 0; i < NODES; i++) {
        w->replaced[i] = false;
        node_open(w, f, i);
    }
}

/* --- one attempt ------------------------------------------------------------------------------------ */

static inline void note_failure(struct world *w, uint32_t node, const char *what)
{
    struct rig *r = &w->n[node];
    if (r->gone) {
        w->lost[node] = true;
        return;
    }
    ck_assert_msg(rig_failure(r)->text[0] != '\0', "%s failed without a word", what);
    if (err_class(r->packet->header.code) == ERR_DEVICE)
        w->lost[node] = true;
}

/* Until all have answered, one has failed, or the time is over. Tables of STAGED go to ret_tables. */
static inline bool await(struct world *w, const uint64_t *requests, uint32_t type, int ms,
                         uint64_t **ret_tables)
{
    uint64_t until = clock_mono_ns() + (uint64_t)ms * 1000000;
    bool done[NODES] = {false, false};
    while (!done[0] || !done[1]) {
        struct pollfd fds[NODES];
        uint64_t now = clock_mono_ns();
        for (uint32_t i = 0; i < NODES; i++)
            fds[i] = (struct pollfd){.fd = done[i] ? -1 : w->n[i].control, .events = POLLIN};
        if (now >= until || poll(fds, NODES, (int)((until - now) / 1000000) + 1) <= 0)
            return false;
        for (uint32_t i = 0; i < NODES; i++) {
            struct rig *r = &w->n[i];
            if (fds[i].revents == 0)
                continue;
            r->gone = !rig_receive(r, 0);
            if (!r->gone && (r->packet->header.type == WIRE_PROGRESS ||
                             r->packet->header.request != requests[i]))
                continue;
            if (r->gone || r->packet->header.type != type || r->packet->header.code != 0) {
                note_failure(w, i, wire_type_name(type));
                return false;
            }
            done[i] = true;
            if (ret_tables != NULL)
                ret_tables[i] = rig_table(r, r->program.n_holds);
        }
    }
    return true;
}

static inline bool errands(struct world *w, uint32_t node, uint32_t type)
{
    struct rig *r = &w->n[node];
    struct wire_publish publish = {.has_event = 1, .event_ms = (uint32_t)ms(ANSWER_MS) / 2};
    memcpy(publish.event, &foreign.handles.event, sizeof foreign.handles.event);
    for (uint32_t i = 0; i < r->n_workers; i++) {
        bool source = type == WIRE_PUBLISH;
        if (source != (r->workers[i].layout == 0))
            continue;
        uint64_t request = rig_send(r, type, r->workers[i].id, source ? &publish : NULL,
                                    source ? sizeof publish : 0, NULL, 0, NULL, 0);
        if (!good(r, request, type + 1)) {
            note_failure(w, node, wire_type_name(type));
            return false;
        }
    }
    return true;
}

static inline bool make_id(struct world *w, uint8_t *id)
{
    struct rig *r = &w->n[0];
    w->n_ids++;
    if (!good(r, rig_send(r, WIRE_COMM_ID, 0, NULL, 0, NULL, 0, NULL, 0), WIRE_COMM_ID_MADE)) {
        note_failure(w, 0, "COMM_ID");
        return false;
    }
    memcpy(id, r->packet->body, ID_BYTES);
    return true;
}

static inline void tell(struct world *w, uint32_t to, const uint8_t *id)
{
    struct rig *r = &w->n[to];
    struct wire_peers peers = {.n_peers = NODES, .n_devices = DEVICES};
    struct wire_comm comm = {.n_devices = DEVICES};
    const uint8_t member[DEVICES] = {1, 1, 1, 1};
    r->peers.n_bytes = r->comm.n_bytes = 0;
    buf_put(&r->peers, &peers, sizeof peers);
    for (uint32_t i = 0; i < NODES; i++) {
        struct wire_peer p = {0};
        (void)snprintf(p.name, sizeof p.name, "n%u", i);
        buf_put(&r->peers, &p, sizeof p);
    }
    for (uint32_t d = 0; d < DEVICES; d++)
        buf_put_u32(&r->peers, r->o.node_of[d] == to ? UINT32_MAX : r->o.node_of[d]);
    memcpy(comm.id, id, sizeof comm.id);
    buf_put(&r->comm, &comm, sizeof comm);
    buf_put(&r->comm, member, sizeof member);
    r->deadline_ns = clock_mono_ns() + (uint64_t)ms(PREPARE_MS) * 1000000;
}

/* As the coordinator compares them: holds of one cell have one fingerprint. */
static inline bool prints_agree(const struct world *w, uint64_t *const *tables)
{
    for (uint32_t a = 0; a < NODES; a++)
        for (uint32_t i = 0; i < w->n[a].program.n_holds; i++)
            for (uint32_t b = 0; b < NODES; b++)
                for (uint32_t k = 0; k < w->n[b].program.n_holds; k++) {
                    const struct program *p = &w->n[a].program, *q = &w->n[b].program;
                    if (program_hold_cell(p, i).id == program_hold_cell(q, k).id &&
                        tables[a][i] != tables[b][k])
                        return false;
                }
    return true;
}

static inline void abort_all(struct world *w)
{
    uint64_t requests[NODES];
    for (uint32_t i = 0; i < NODES; i++)
        requests[i] =
            w->n[i].gone ? 0 : rig_send(&w->n[i], WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0);
    for (uint32_t i = 0; i < NODES; i++)
        if (w->n[i].gone || rig_try(&w->n[i], requests[i]) != WIRE_QUIESCED)
            w->lost[i] = true;
}

static inline bool move(struct world *w, uint64_t **tables)
{
    /* Rows go by the copy engine where nothing is fingerprinted on the way. */
    enum wire_verify verify = w->n[0].version % 2 == 0 ? WIRE_VERIFY_OFF : WIRE_VERIFY_FULL;
    uint8_t id[ID_BYTES];
    uint64_t requests[NODES];
    if (!make_id(w, id))
        return false;
    w->attempt++;
    for (uint32_t i = 0; i < NODES; i++) {
        w->n[i].attempt = w->attempt;
        tell(w, i, id);
        requests[i] = rig_send_prepare(&w->n[i], verify, NULL);
    }
    if (!await(w, requests, WIRE_PREPARED, ms(ANSWER_MS), NULL))
        return false;
    for (uint32_t i = 0; i < NODES; i++)
        requests[i] = rig_send_start(&w->n[i]);
    return await(w, requests, WIRE_STAGED, ms(REFIT_MS), tables) && prints_agree(w, tables);
}

static inline uint32_t wrong(const struct world *w, unsigned memory, uint64_t version)
{
    return rig_wrong(&w->n[0], memory, version) + rig_wrong(&w->n[1], memory, version);
}

/* A version published, moved, compared and applied. True: it is there. */
static inline bool refit(struct world *w, uint64_t version, const char *what)
{
    uint64_t *tables[NODES] = {NULL, NULL};
    for (uint32_t i = 0; i < NODES; i++) {
        w->n[i].version = version;
        rig_fill_sources(&w->n[i], version);
        rig_poison_destinations(&w->n[i]);
    }
    bool ok = errands(w, 0, WIRE_PUBLISH);
    if (ok && !(ok = move(w, tables)))
        abort_all(w);
    if (ok)
        ck_assert_msg(wrong(w, WIRE_SHADOW, version) == 0, "%s: a version was staged that is wrong",
                      what);
    if (ok && (ok = errands(w, 0, WIRE_APPLY) && errands(w, 1, WIRE_APPLY)))
        ck_assert_msg(wrong(w, WIRE_LIVE, version) == 0, "%s: a version was applied that is wrong",
                      what);
    for (uint32_t i = 0; i < NODES; i++)
        free(tables[i]);
    return ok;
}

static inline bool replace_lost(struct world *w, const struct fault *f)
{
    bool any = false;
    for (uint32_t i = 0; i < NODES; i++) {
        if (!w->lost[i])
            continue;
        node_kill(w, i);
        w->replaced[i] = any = true;
        node_open(w, f, i);
        ck_assert_msg(!w->lost[i], "its successor could not begin: %s",
                      rig_failure(&w->n[i])->text);
    }
    return any;
}

#endif
