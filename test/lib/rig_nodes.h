/* Two or three data planes over loopback, each with its own part of one plan, driven as the control processes of a cluster
 * would. What lands is compared byte by byte. For tests with Check; include it in one .c only. */
#ifndef RS_TEST_RIG_NODES_H
#define RS_TEST_RIG_NODES_H

#include <check.h>

#include "test/lib/rig_runs.h"

enum { MAX_NODES = 3 };

struct cluster {
    struct rig n[MAX_NODES];
    uint32_t n_nodes;
    uint8_t token[MAX_NODES][MAX_NODES][WIRE_TOKEN_BYTES]; /* of the last attempt */
    uint64_t seed;
    /* What PREPARED brought: of source holds what their cells will be compared with, wherever they land. NULL: nothing. */
    uint64_t *told[MAX_NODES];
};

#define cluster_foreach(c, r) for (struct rig *r = (c)->n; r < (c)->n + (c)->n_nodes; r++)

/* --- the part of the control processes --- */

static inline void fresh_tokens(struct cluster *c)
{
    for (uint32_t a = 0; a < c->n_nodes; a++)
        for (uint32_t b = 0; b <= a; b++)
            for (int i = 0; i < WIRE_TOKEN_BYTES; i++)
                c->token[a][b][i] = c->token[b][a][i] = (uint8_t)random_next(&c->seed);
}

/* What node `to` is told of the others. */
static inline void tell_peers(struct cluster *c, uint32_t to)
{
    struct rig *r = &c->n[to];
    struct wire_peers h = {.n_peers = c->n_nodes, .n_devices = r->o.n_devices};
    r->peers.n_bytes = 0;
    buf_put(&r->peers, &h, sizeof(h));
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        struct wire_peer p = {.port = c->n[i].data_port};
        snprintf(p.address, sizeof(p.address), "127.0.0.1");
        snprintf(p.name, sizeof(p.name), "node-%c", 'a' + (int)i);
        memcpy(p.token, c->token[to][i], sizeof(p.token));
        buf_put(&r->peers, &p, sizeof(p));
    }
    for (uint32_t d = 0; d < r->o.n_devices; d++)
        buf_put_u32(&r->peers, r->o.node_of[d] == to ? UINT32_MAX : r->o.node_of[d]);
    ck_assert_int_eq(buf_error(&r->peers), 0);
}

static inline void next_attempt(struct cluster *c)
{
    fresh_tokens(c);
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        c->n[i].attempt++;
        tell_peers(c, i);
    }
}

static inline void expect_all(struct cluster *c, const uint64_t *requests, uint32_t type)
{
    for (uint32_t i = 0; i < c->n_nodes; i++)
        rig_expect(&c->n[i], requests[i], type);
}

static inline void told_take(struct cluster *c, enum wire_verify verify)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        free(c->told[i]);
        c->told[i] =
            verify != WIRE_VERIFY_OFF ? rig_table(&c->n[i], c->n[i].program.n_holds) : NULL;
        ck_assert(verify != WIRE_VERIFY_OFF || c->n[i].packet->n_fds == 0);
    }
}

static inline void told_check(struct cluster *c, uint64_t *const *tables)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        const struct program *p = &c->n[i].program;
        for (uint32_t k = 0; c->told[i] != NULL && k < p->n_holds; k++) {
            bool source = p->places[program_hold(p, k).place].side == PROGRAM_SOURCE;
            ck_assert_uint_eq(c->told[i][k], source ? tables[i][k] : 0);
        }
        free(c->told[i]);
        c->told[i] = NULL;
    }
}

/* held[i]: of node i, or NULL. */
static inline void prepare_all(struct cluster *c, enum wire_verify verify, uint8_t *const *held)
{
    uint64_t requests[MAX_NODES];
    next_attempt(c);
    for (uint32_t i = 0; i < c->n_nodes; i++)
        requests[i] = rig_send_prepare(&c->n[i], verify, held == NULL ? NULL : held[i]);
    expect_all(c, requests, WIRE_PREPARED);
    told_take(c, verify);
}

static inline void start_all(struct cluster *c, uint64_t *requests)
{
    for (uint32_t i = 0; i < c->n_nodes; i++)
        requests[i] = rig_send_start(&c->n[i]);
}

static inline void abort_all(struct cluster *c)
{
    uint64_t requests[MAX_NODES];
    for (uint32_t i = 0; i < c->n_nodes; i++)
        requests[i] = rig_send(&c->n[i], WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0);
    expect_all(c, requests, WIRE_QUIESCED);
}

/* Holds of one cell have one fingerprint, on whichever nodes they are. */
static inline void compare_prints(const struct cluster *c, uint64_t *const *tables)
{
    for (uint32_t a = 0; a < c->n_nodes; a++)
        for (uint32_t i = 0; i < c->n[a].program.n_holds; i++)
            for (uint32_t b = 0; b < c->n_nodes; b++)
                for (uint32_t k = 0; k < c->n[b].program.n_holds; k++) {
                    const struct program *p = &c->n[a].program, *q = &c->n[b].program;
                    if (program_hold_cell(p, i).id == program_hold_cell(q, k).id)
                        ck_assert_uint_eq(tables[a][i], tables[b][k]);
                }
}

static inline void finish_all(struct cluster *c, const uint64_t *requests, bool compare)
{
    uint64_t *tables[MAX_NODES];
    expect_all(c, requests, WIRE_STAGED);
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        ck_assert_uint_eq(c->n[i].progress.done_bytes, c->n[i].progress.total_bytes);
        tables[i] = rig_table(&c->n[i], c->n[i].program.n_holds);
    }
    if (compare)
        compare_prints(c, tables);
    told_check(c, tables);
    for (uint32_t i = 0; i < c->n_nodes; i++)
        free(tables[i]);
}

static inline uint32_t wrong_at(struct cluster *c, uint64_t version)
{
    uint32_t wrong = 0;
    cluster_foreach(c, r)
    {
        wrong += rig_wrong(r, rig_target(r), version);
    }
    return wrong;
}

static inline void new_version(struct cluster *c, uint64_t version)
{
    cluster_foreach(c, r)
    {
        r->version = version;
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
    }
}

static inline void refit(struct cluster *c, uint64_t version, enum wire_verify verify)
{
    uint64_t requests[MAX_NODES];
    new_version(c, version);
    prepare_all(c, verify, NULL);
    start_all(c, requests);
    finish_all(c, requests, verify == WIRE_VERIFY_FULL);
    ck_assert_uint_eq(wrong_at(c, version), 0);
}

static inline struct wire_stats stats_of_all(struct cluster *c)
{
    struct wire_stats all = {0};
    cluster_foreach(c, r)
    {
        struct wire_stats s = rig_stats(r);
        all.network_sent_bytes += s.network_sent_bytes;
        all.network_received_bytes += s.network_received_bytes;
        all.domain_sent_bytes += s.domain_sent_bytes;
        all.domain_received_bytes += s.domain_received_bytes;
        all.stale_frames += s.stale_frames;
        all.refused += s.refused;
        all.connections += s.connections;
        all.connected += s.connected;
    }
    return all;
}

/* Receives until the request's answer, PROGRESS aside; 0: the data plane has gone. */
static inline uint32_t end_of(struct rig *r, uint64_t request)
{
    r->o.lenient = true;
    uint32_t type = rig_try(r, request);
    r->o.lenient = false;
    return type;
}

/* --- making --- */

/* All nodes plan by themselves: their plans are the same, or nothing below works. */
static inline void cluster_open(struct cluster *c)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        memcpy(c->n[i].o.hello.transport, "tcp", 4);
        c->n[i].o.node = i;
        rig_open(&c->n[i]);
        ck_assert_uint_ne(c->n[i].data_port, 0);
        ck_assert_int_eq(memcmp(c->n[i].program.digest, c->n[0].program.digest, 16), 0);
    }
}

static inline void cluster_close(struct cluster *c)
{
    cluster_foreach(c, r)
    {
        rig_close(r);
    }
    for (uint32_t i = 0; i < c->n_nodes; i++)
        free(c->told[i]);
}

/* Ranks that follow each other need not be on devices that do. */
static inline void scatter(struct rig *r, uint64_t *state)
{
    int32_t to[RIG_MAX_DEVICES];
    for (uint32_t i = 0; i < r->o.n_devices; i++) {
        uint32_t k = (uint32_t)(random_next(state) % (i + 1));
        to[i] = to[k];
        to[k] = (int32_t)i;
    }
    for (uint32_t l = 0; l <= r->n_layouts; l++)
        for (uint32_t i = 0; i < r->layouts[l]->n_ranks; i++)
            r->rank_device[l][i] = to[r->rank_device[l][i]];
}

/* Source and destination devices anywhere on 2 or 3 nodes; the same at each of them. */
static inline void random_node(struct rig *r, uint64_t seed, uint32_t n_nodes)
{
    uint64_t state = seed;
    uint32_t n_source = 1 + (uint32_t)(random_next(&state) % 4);
    uint32_t n_dest = 1 + (uint32_t)(random_next(&state) % 4);
    memset(r, 0, sizeof(*r));
    r->o.n_devices = n_source + n_dest;
    while (r->o.n_devices < n_nodes)
        r->o.n_devices++;
    for (uint32_t i = 0; i < r->o.n_devices; i++)
        r->o.node_of[i] = r->o.domain[i] = i * n_nodes / r->o.n_devices;
    r->o.plan = plan_options_default();
    r->o.plan.strategy = (enum plan_strategy)(seed % 3);
    r->o.plan.ring_slots = 1 + (uint32_t)(random_next(&state) % 4);
    r->o.plan.chunk_bytes = 64U << (random_next(&state) % 8);
    r->o.plan.least_piece_bytes = 64;
    r->o.fused = random_next(&state) % 2 == 0;
    r->o.shadow = random_next(&state) % 2 == 0;
    r->o.seed = seed;
    char *source = rig_random_json(seed, seed + 1, "s", n_source, 6, false);
    char *dest = rig_random_json(seed, seed + 2, "d", n_dest, 6, seed % 4 == 0);
    rig_side(r, 0, source, 0, n_source);
    rig_side(r, 1, dest, n_source, n_dest);
    scatter(r, &state);
    mem_free(source);
    mem_free(dest);
}

static inline void random_cluster(struct cluster *c, uint64_t seed)
{
    memset(c, 0, sizeof(*c));
    c->n_nodes = 2 + (uint32_t)(seed % 2);
    c->seed = seed;
    for (uint32_t i = 0; i < c->n_nodes; i++)
        random_node(&c->n[i], seed, c->n_nodes);
}

static inline char *one_tensor(const char *name, uint32_t ranks, const char *placement,
                               uint32_t rows)
{
    char *json = malloc(512);
    int n = snprintf(json, 512,
                     "{\"name\":\"%s\",\"ranks\":%u,\"meshes\":[{\"name\":\"m\",\"shape\":[%u],"
                     "\"ranks\":[",
                     name, ranks, ranks);
    for (uint32_t i = 0; i < ranks; i++)
        n += snprintf(json + n, 512 - (size_t)n, "%s%u", i > 0 ? "," : "", i);
    (void)snprintf(json + n, 512 - (size_t)n,
                   "]}],\"tensors\":[{\"name\":\"w\",\"shape\":[%u,64],\"dtype\":\"float32\","
                   "\"mesh\":\"m\",\"placements\":[\"%s\"]},{\"name\":\"v\",\"shape\":[%u,24],"
                   "\"dtype\":\"bfloat16\",\"mesh\":\"m\",\"placements\":[\"%s\"]}]}",
                   rows, placement, rows, placement);
    return json;
}

/* One device per node and domain; the source's ranks on the first nodes, the destination's behind
 * them. */
static inline void plain_cluster(struct cluster *c, uint32_t n_source, uint32_t n_dest,
                                 const char *placement, uint32_t rows)
{
    char *source = one_tensor("s", n_source, "Shard(0)", rows);
    char *dest = one_tensor("d", n_dest, placement, rows);
    memset(c, 0, sizeof(*c));
    c->n_nodes = n_source + n_dest;
    c->seed = rows;
    cluster_foreach(c, r)
    {
        r->o.n_devices = c->n_nodes;
        for (uint32_t i = 0; i < c->n_nodes; i++)
            r->o.node_of[i] = r->o.domain[i] = i;
        r->o.plan = plan_options_default();
        r->o.plan.chunk_bytes = 16 << 10;
        r->o.plan.ring_slots = 2;
        r->o.plan.least_piece_bytes = 1024;
        rig_side(r, 0, source, 0, n_source);
        rig_side(r, 1, dest, n_source, n_dest);
    }
    free(source);
    free(dest);
}

#endif
