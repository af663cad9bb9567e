/* Drives a data plane as the control process does: a real socket pair, memfds, plans of the real
 * planner. For tests and benchmarks of exec; include it in one .c only.
 *
 * One node's data plane; all devices are its own, unless the test says of which node each is, and
 * which node this is. Each device has the domain that the test gives it. Every rank is a worker
 * with its memory in a memfd. Pieces are laid out by the rig itself, so that what lands is checked
 * through addresses that the code under test had no part in. */
#ifndef RS_TEST_RIG_H
#define RS_TEST_RIG_H

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "exec/data_plane.h"
#include "plan/planner.h"
#include "test/lib/rig_workers.h"

/* --- packets ---------------------------------------------------------------------------------- */

static inline struct wire_header rig_header(struct rig *r, uint32_t type, uint64_t worker)
{
    return (struct wire_header){.type = type,
                                .incarnation = 11,
                                .request = ++r->request,
                                .model = RIG_MODEL,
                                .epoch = r->epoch,
                                .attempt = r->attempt,
                                .version = r->version,
                                .worker = worker};
}

static inline void rig_take_progress(struct rig *r)
{
    struct wire_progress p;
    rig_assert_eq(r->packet->header.body_bytes, sizeof(p));
    memcpy(&p, r->packet->body, sizeof(p));
    rig_assert_ge(p.done_bytes, r->progress.done_bytes);
    rig_assert_le(p.done_bytes, p.total_bytes);
    rig_assert(r->progress.first_byte_ns == 0 || p.first_byte_ns == r->progress.first_byte_ns);
    rig_assert(r->progress.sources_read_ns == 0 ||
               p.sources_read_ns == r->progress.sources_read_ns);
    r->progress = p;
    r->n_progress++;
}

enum { RIG_WAIT_MS = 60000 }; /* a guard against hangs */

/* The next packet: true, or false when none comes in time or the other side is gone. */
static inline bool rig_receive(struct rig *r, int ms)
{
    struct pollfd fd = {.fd = r->control, .events = POLLIN};
    wire_packet_close(r->packet);
    return poll(&fd, 1, ms) == 1 && wire_receive(r->control, r->packet, NULL) == 0;
}

/* Waits for the answer to `request`; its type. PROGRESS on the way is checked and kept. */
static inline uint32_t rig_answer(struct rig *r, uint64_t request)
{
    for (;;) {
        rig_assert_msg(rig_receive(r, RIG_WAIT_MS), "no answer to request %llu",
                       (unsigned long long)request);
        if (r->packet->header.type == WIRE_PROGRESS)
            rig_take_progress(r);
        else if (r->packet->header.request == request)
            break;
    }
    if (r->packet->header.type == WIRE_STAGED)
        rig_take_progress(r);
    return r->packet->header.type;
}

/* Waits until bytes have been moved by the attempt that was started. */
static inline void rig_until_moving(struct rig *r)
{
    while (r->progress.done_bytes == 0) {
        rig_assert_msg(rig_receive(r, RIG_WAIT_MS), "%s", "nothing moves");
        rig_assert_msg(r->packet->header.type == WIRE_PROGRESS, "%s came",
                       wire_type_name(r->packet->header.type));
        rig_take_progress(r);
    }
}

static inline int rig_answer_ms(const struct rig *r)
{
    return r->o.answer_ms != 0 ? r->o.answer_ms : RIG_WAIT_MS;
}

/* As rig_answer, but the other side may be gone: 0 then. */
static inline uint32_t rig_try(struct rig *r, uint64_t request)
{
    while (!r->gone) {
        r->gone = !rig_receive(r, rig_answer_ms(r));
        if (!r->gone && r->packet->header.type != WIRE_PROGRESS &&
            r->packet->header.request == request)
            return r->packet->header.type;
    }
    return 0;
}

static inline uint64_t rig_send(struct rig *r, uint32_t type, uint64_t worker, const void *body,
                                size_t body_bytes, const void *table, size_t table_bytes,
                                const int *fds, uint32_t n_fds)
{
    struct wire_header h = rig_header(r, type, worker);
    int sent = wire_send(r->control, &h, body, body_bytes, table, table_bytes, fds, n_fds, NULL);
    rig_assert(sent == 0 || (r->o.lenient && sent == RS_EPEER));
    r->gone = r->gone || sent != 0;
    return h.request;
}

static inline const struct wire_failure *rig_failure(struct rig *r)
{
    static struct wire_failure f;
    memset(&f, 0, sizeof(f));
    if (r->packet->header.code != 0 && r->packet->header.body_bytes == sizeof(f))
        memcpy(&f, r->packet->body, sizeof(f));
    return &f;
}

static inline void rig_expect(struct rig *r, uint64_t request, uint32_t type)
{
    uint32_t got = r->o.lenient ? rig_try(r, request) : rig_answer(r, request);
    if (r->o.lenient && (got != type || r->packet->header.code != 0)) {
        r->refused = true;
        return;
    }
    rig_assert_msg(got == type, "%s came: %s", wire_type_name(got), rig_failure(r)->text);
}

/* The u64 table that came with the answer; the caller frees it. */
static inline uint64_t *rig_table(struct rig *r, size_t n)
{
    const void *data;
    size_t bytes;
    rig_assert_eq(r->packet->n_fds, 1);
    rig_assert_eq(wire_map_fd(r->packet->fds[0], &data, &bytes, NULL), 0);
    rig_assert_eq(bytes, n * sizeof(uint64_t));
    uint64_t *copy = malloc(bytes + 1);
    memcpy(copy, data, bytes);
    wire_unmap(data, bytes);
    return copy;
}

/* --- attach ----------------------------------------------------------------------------------- */

static inline void rig_map(struct rig *r, struct rig_worker *w, unsigned memory)
{
    struct wire_map m = {.bytes = w->memory[memory].bytes,
                         .segment = memory,
                         .device = w->device,
                         .writable = w->layout != 0};
    rig_expect(r, rig_send(r, WIRE_MAP, w->id, &m, sizeof(m), NULL, 0, &w->memory[memory].fd, 1),
               WIRE_MAPPED);
    rig_assert_msg(r->refused || r->packet->header.code == 0, "%s", rig_failure(r)->text);
}

static inline void rig_bind(struct rig *r, struct rig_worker *w, unsigned memory)
{
    const struct layout *l = r->layouts[w->layout];
    const struct rig_memory *m = &w->memory[memory];
    struct binding_piece *pieces = mem_calloc(m->n_pieces, sizeof(*pieces));
    struct binding *b = NULL;
    struct buf encoded;
    uint8_t *dtypes = malloc(l->n_tensors + 1);
    if (m->n_pieces > 0)
        memcpy(pieces, m->pieces, m->n_pieces * sizeof(*pieces));
    for (uint32_t i = 0; i < m->n_pieces; i++)
        pieces[i].segment = memory;
    for (uint32_t t = 0; t < l->n_tensors; t++)
        dtypes[t] = (uint8_t)l->tensors[t].dtype;
    rig_assert_eq(binding_new(pieces, m->n_pieces, l->n_tensors, &b), 0);
    buf_init(&encoded);
    rig_assert_eq(binding_encode(b, &encoded), 0);
    int fds[2] = {wire_memfd("binding", encoded.data, encoded.n_bytes, NULL),
                  wire_memfd("dtypes", dtypes, l->n_tensors, NULL)};
    struct wire_bind body = {.device = w->device, .memory = memory, .n_tensors = l->n_tensors};
    rig_expect(r, rig_send(r, WIRE_BIND, w->id, &body, sizeof(body), NULL, 0, fds, 2), WIRE_BOUND);
    rig_assert_msg(r->refused || r->packet->header.code == 0, "%s", rig_failure(r)->text);
    close(fds[0]);
    close(fds[1]);
    buf_close(&encoded);
    binding_free(b);
    free(dtypes);
}

/* A device's number on its own node. */
static inline uint32_t rig_local(const struct rig *r, uint32_t device)
{
    uint32_t local = 0;
    for (uint32_t d = 0; d < device; d++)
        local += r->o.node_of[d] == r->o.node_of[device] ? 1 : 0;
    return local;
}

static inline bool rig_has_rank(const struct rig *r, uint32_t layout, uint32_t rank)
{
    int32_t device = r->rank_device[layout][rank];
    return device >= 0 && r->o.node_of[device] == r->o.node;
}

static inline void rig_attach(struct rig *r, uint32_t layout, uint32_t rank, uint64_t *seed)
{
    struct rig_worker *w = &r->workers[r->n_workers];
    memset(w, 0, sizeof(*w));
    w->id = 100 + r->n_workers++;
    w->layout = layout;
    w->rank = rank;
    w->device = rig_local(r, (uint32_t)r->rank_device[layout][rank]);
    w->shadow = layout != 0 && r->o.shadow;
    for (unsigned m = 0; m < (w->shadow ? 2U : 1U); m++) {
        rig_allocate(&w->memory[m], r->layouts[layout], rank, r->o.fused, seed);
        rig_map(r, w, m);
        rig_bind(r, w, m);
    }
}

/* --- life ------------------------------------------------------------------------------------- */

static inline void *rig_plane(void *arg)
{
    return (void *)(intptr_t)data_plane_run((int)(intptr_t)arg);
}

static inline void rig_spawn(struct rig *r)
{
    int pair[2];
    rig_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    r->control = pair[0];
    if (!r->o.process) {
        rig_assert_eq(pthread_create(&r->thread, NULL, rig_plane, (void *)(intptr_t)pair[1]), 0);
        return;
    }
    r->child = fork();
    rig_assert_ge(r->child, 0);
    if (r->child == 0) {
        close(pair[0]);
        mem_fail_at(r->o.fail_at);
        _exit(data_plane_run(pair[1]));
    }
    close(pair[1]);
}

static inline void rig_hello(struct rig *r)
{
    struct wire_hello h = r->o.hello;
    struct wire_ready ready = {0};
    h.n_devices = 0;
    for (uint32_t d = 0; d < r->o.n_devices; d++)
        h.n_devices += r->o.node_of[d] == r->o.node ? 1 : 0;
    if (h.ring_slots == 0)
        h.ring_slots = r->o.plan.ring_slots;
    if (h.slot_bytes == 0)
        h.slot_bytes = r->o.plan.chunk_bytes;
    if (h.backend[0] == '\0')
        memcpy(h.backend, "host", 5);
    rig_expect(r, rig_send(r, WIRE_HELLO, 0, &h, sizeof(h), NULL, 0, NULL, 0), WIRE_READY);
    if (!r->refused && !r->gone && r->packet->header.body_bytes >= sizeof(ready))
        memcpy(&ready, r->packet->body, sizeof(ready));
    r->data_port = ready.data_port;
    memcpy(r->local, ready.local, sizeof r->local);
}

static inline void rig_topology(struct rig *r)
{
    uint32_t n_domains = 0, n_nodes = 0;
    for (uint32_t i = 0; i < r->o.n_devices; i++) {
        r->devices[i] = (struct device_place){r->o.node_of[i], rig_local(r, i), r->o.domain[i]};
        n_domains = r->o.domain[i] + 1 > n_domains ? r->o.domain[i] + 1 : n_domains;
        n_nodes = r->o.node_of[i] + 1 > n_nodes ? r->o.node_of[i] + 1 : n_nodes;
    }
    for (uint32_t i = 0; i < RIG_MAX_DEVICES; i++) {
        r->nodes[i] = r->texts[i];
        r->domains[i] = r->texts[RIG_MAX_DEVICES + i];
        snprintf(r->nodes[i], sizeof(r->texts[0]), "n%u", i);
        snprintf(r->domains[i], sizeof(r->texts[0]), "d%u", i);
    }
    r->topology = (struct topology){.nodes = r->nodes,
                                    .n_nodes = n_nodes,
                                    .domains = r->domains,
                                    .n_domains = n_domains,
                                    .devices = r->devices,
                                    .n_devices = r->o.n_devices,
                                    .network_bytes_per_s = r->o.hello.network_bytes_per_s,
                                    .domain_bytes_per_s = r->o.hello.domain_bytes_per_s};
}

/* Index of a program tensor in destination layout l, where that has it so; UINT32_MAX. */
static inline uint32_t rig_index(const struct rig *r, uint32_t l, const struct program_tensor *t)
{
    const struct layout *to = r->layouts[1 + l];
    const char *name = t->value == PROGRAM_SCALES
                           ? r->layouts[1 + t->named_layout]->tensors[t->named_tensor].name
                           : r->layouts[0]->tensors[t->index].name;
    int64_t found = layout_find(to, name);
    if (found < 0)
        return UINT32_MAX;
    bool derived = to->tensors[found].derived_from != NULL;
    return derived == (t->value == PROGRAM_SCALES) ? (uint32_t)found : UINT32_MAX;
}

/* Index of each program tensor in each destination layout, as the control process makes it. */
static inline int rig_index_fd(struct rig *r)
{
    size_t n = r->program.n_tensors;
    uint32_t *index = malloc(n * r->n_layouts * sizeof(*index) + 1);
    for (uint32_t l = 0; l < r->n_layouts; l++)
        for (uint32_t t = 0; t < n; t++) {
            index[l * n + t] = rig_index(r, l, &r->program.tensors[t]);
        }
    int fd = wire_memfd("index", index, n * r->n_layouts * sizeof(*index), NULL);
    free(index);
    return fd;
}

/* Layouts and rank_device are set: plans, starts the data plane, attaches all workers. */
static inline void rig_open(struct rig *r)
{
    const struct layout *destinations[RIG_MAX_LAYOUTS];
    const int32_t *devices[RIG_MAX_LAYOUTS];
    struct err e = {0};
    uint64_t seed = r->o.seed + 1;
    uint32_t n = 0;
    for (uint32_t l = 0; l < r->n_layouts; l++) {
        destinations[l] = r->layouts[1 + l];
        devices[l] = r->rank_device[1 + l];
    }
    rig_topology(r);
    struct plan_input input = {.source = r->layouts[0],
                               .source_device = r->rank_device[0],
                               .n_destinations = r->n_layouts,
                               .destinations = destinations,
                               .destination_device = devices,
                               .topology = &r->topology,
                               .options = r->o.plan};
    rig_assert_msg(plan_make(&input, &r->plan, &e) == 0, "%s", e.text);
    buf_init(&r->encoded);
    rig_assert_msg(plan_program(r->plan, r->o.node, &r->encoded, &e) == 0, "%s", e.text);
    rig_assert_msg(program_open(r->encoded.data, r->encoded.n_bytes, &r->program, &e) == 0, "%s",
                   e.text);
    r->program_fd = wire_memfd("program", r->encoded.data, r->encoded.n_bytes, NULL);
    r->index_fd = rig_index_fd(r);
    r->packet = calloc(1, sizeof(*r->packet));
    r->attempt = 0;
    r->version = 1;
    r->epoch = 1;
    buf_init(&r->peers);
    buf_init(&r->skips);
    buf_init(&r->comm);
    rig_spawn(r);
    rig_hello(r);
    for (uint32_t l = 0; l <= r->n_layouts; l++)
        n += r->layouts[l]->n_ranks;
    r->workers = calloc(n, sizeof(*r->workers));
    for (uint32_t l = 0; l <= r->n_layouts; l++)
        for (uint32_t i = 0; i < r->layouts[l]->n_ranks; i++)
            if (rig_has_rank(r, l, i))
                rig_attach(r, l, i, &seed);
}

/* Ends the data plane by STOP or by closing the socket; returns its exit status. */
static inline int rig_end(struct rig *r, bool by_stop)
{
    void *status = NULL;
    int child = 0;
    if (by_stop)
        (void)rig_send(r, WIRE_STOP, 0, NULL, 0, NULL, 0, NULL, 0);
    else
        close(r->control);
    if (r->o.process)
        rig_assert_eq(waitpid(r->child, &child, 0), r->child);
    else
        pthread_join(r->thread, &status);
    if (by_stop)
        close(r->control);
    if (r->o.process)
        return WIFEXITED(child) ? WEXITSTATUS(child) : -1;
    return (int)(intptr_t)status;
}

static inline void rig_free(struct rig *r)
{
    for (uint32_t i = 0; i < r->n_workers; i++)
        for (unsigned m = 0; m < 2; m++)
            if (r->workers[i].memory[m].bytes > 0) {
                munmap(r->workers[i].memory[m].data, r->workers[i].memory[m].bytes);
                close(r->workers[i].memory[m].fd);
                free(r->workers[i].memory[m].pieces);
            }
    free(r->workers);
    wire_packet_close(r->packet);
    free(r->packet);
    close(r->program_fd);
    close(r->index_fd);
    buf_close(&r->encoded);
    buf_close(&r->peers);
    buf_close(&r->skips);
    buf_close(&r->comm);
    plan_free(r->plan);
    for (uint32_t l = 0; l <= r->n_layouts; l++) {
        layout_free(r->layouts[l]);
        free(r->rank_device[l]);
    }
}

static inline void rig_close(struct rig *r)
{
    rig_assert_eq(rig_end(r, true), EXIT_SUCCESS);
    rig_free(r);
}

/* --- a refit ---------------------------------------------------------------------------------- */

static inline struct rig_worker *rig_worker(struct rig *r, uint32_t layout, uint32_t rank)
{
    for (uint32_t i = 0; i < r->n_workers; i++)
        if (r->workers[i].layout == layout && r->workers[i].rank == rank)
            return &r->workers[i];
    return NULL;
}

static inline uint64_t rig_send_prepare(struct rig *r, enum wire_verify verify, const uint8_t *held)
{
    struct wire_prepare m = {.deadline_ns = r->deadline_ns,
                             .n_places = r->program.n_places,
                             .verify = verify,
                             .has_held = held != NULL,
                             .has_peers = r->peers.n_bytes > 0,
                             .has_skips = r->skips.n_bytes > 0,
                             .has_comm = r->comm.n_bytes > 0,
                             .n_layouts = r->n_layouts};
    struct wire_place *places = calloc(r->program.n_places + 1, sizeof(*places));
    for (uint32_t i = 0; i < r->program.n_places; i++) {
        const struct program_place *p = &r->program.places[i];
        if (p->side == PROGRAM_SCRATCH)
            continue;
        uint32_t layout = p->side == PROGRAM_SOURCE ? 0 : 1 + p->layout;
        places[i].worker = rig_worker(r, layout, p->rank)->id;
        places[i].memory = layout == 0 ? WIRE_LIVE : rig_target(r);
    }
    uint32_t n = 2;
    int fds[WIRE_MAX_FDS] = {r->program_fd, r->index_fd};
    if (held != NULL)
        fds[n++] = wire_memfd("held", held, r->program.n_holds, NULL);
    if (m.has_peers)
        fds[n++] = wire_memfd("peers", r->peers.data, r->peers.n_bytes, NULL);
    if (m.has_skips)
        fds[n++] = wire_memfd("skips", r->skips.data, r->skips.n_bytes, NULL);
    if (m.has_comm)
        fds[n++] = wire_memfd("comm", r->comm.data, r->comm.n_bytes, NULL);
    memset(&r->progress, 0, sizeof(r->progress));
    uint64_t request = rig_send(r, WIRE_PREPARE, 0, &m, sizeof(m), places,
                                r->program.n_places * sizeof(*places), fds, n);
    for (uint32_t i = 2; i < n; i++)
        close(fds[i]);
    free(places);
    return request;
}

static inline void rig_prepare(struct rig *r, enum wire_verify verify)
{
    r->attempt++;
    rig_expect(r, rig_send_prepare(r, verify, NULL), WIRE_PREPARED);
}

static inline uint64_t rig_send_start(struct rig *r)
{
    return rig_send(r, WIRE_START, 0, NULL, 0, NULL, 0, NULL, 0);
}

static inline void rig_abort(struct rig *r)
{
    rig_expect(r, rig_send(r, WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0), WIRE_QUIESCED);
}

/* PREPARE and START; the table per hold (the caller frees it). */
static inline uint64_t *rig_refit(struct rig *r, enum wire_verify verify)
{
    rig_prepare(r, verify);
    rig_expect(r, rig_send_start(r), WIRE_STAGED);
    rig_assert_eq(r->progress.done_bytes, r->progress.total_bytes);
    return rig_table(r, r->program.n_holds);
}

#endif
