/* Refits across nodes: two or three data planes over loopback, each with its own part of one plan,
 * driven as the control processes of a cluster would. What lands is compared byte by byte. */
#include <arpa/inet.h>
#include <check.h>
#include <errno.h>
#include <signal.h>

#include "exec/skips.h"
#include "test/lib/rig.h"
#include "transport/tcp_frame.h"

enum { MAX_NODES = 3 };

struct cluster {
    struct rig n[MAX_NODES];
    uint32_t n_nodes;
    uint8_t token[MAX_NODES][MAX_NODES][WIRE_TOKEN_BYTES]; /* of the last attempt */
    uint64_t seed;
};

#define cluster_foreach(c, r) for (struct rig *r = (c)->n; r < (c)->n + (c)->n_nodes; r++)

/* --- the part of the control processes -------------------------------------------------------- */

static void fresh_tokens(struct cluster *c)
{
    for (uint32_t a = 0; a < c->n_nodes; a++)
        for (uint32_t b = 0; b <= a; b++)
            for (int i = 0; i < WIRE_TOKEN_BYTES; i++)
                c->token[a][b][i] = c->token[b][a][i] = (uint8_t)random_next(&c->seed);
}

/* What node `to` is told of the others. */
static void tell_peers(struct cluster *c, uint32_t to)
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

static void next_attempt(struct cluster *c)
{
    fresh_tokens(c);
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        c->n[i].attempt++;
        tell_peers(c, i);
    }
}

static void expect_all(struct cluster *c, const uint64_t *requests, uint32_t type)
{
    for (uint32_t i = 0; i < c->n_nodes; i++)
        rig_expect(&c->n[i], requests[i], type);
}

/* What PREPARED brought: of source holds what their cells will be compared with, wherever they land. NULL: nothing. */
static uint64_t *told[MAX_NODES];

static void told_take(struct cluster *c, enum wire_verify verify)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        free(told[i]);
        told[i] = verify != WIRE_VERIFY_OFF ? rig_table(&c->n[i], c->n[i].program.n_holds) : NULL;
        ck_assert(verify != WIRE_VERIFY_OFF || c->n[i].packet->n_fds == 0);
    }
}

static void told_check(const struct cluster *c, uint64_t *const *tables)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        const struct program *p = &c->n[i].program;
        for (uint32_t k = 0; told[i] != NULL && k < p->n_holds; k++) {
            bool source = p->places[p->holds[k].place].side == PROGRAM_SOURCE;
            ck_assert_uint_eq(told[i][k], source ? tables[i][k] : 0);
        }
        free(told[i]);
        told[i] = NULL;
    }
}

/* held[i]: of node i, or NULL. */
static void prepare_all(struct cluster *c, enum wire_verify verify, uint8_t *const *held)
{
    uint64_t requests[MAX_NODES];
    next_attempt(c);
    for (uint32_t i = 0; i < c->n_nodes; i++)
        requests[i] = rig_send_prepare(&c->n[i], verify, held == NULL ? NULL : held[i]);
    expect_all(c, requests, WIRE_PREPARED);
    told_take(c, verify);
}

static void start_all(struct cluster *c, uint64_t *requests)
{
    for (uint32_t i = 0; i < c->n_nodes; i++)
        requests[i] = rig_send_start(&c->n[i]);
}

static void abort_all(struct cluster *c)
{
    uint64_t requests[MAX_NODES];
    for (uint32_t i = 0; i < c->n_nodes; i++)
        requests[i] = rig_send(&c->n[i], WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0);
    expect_all(c, requests, WIRE_QUIESCED);
}

/* Holds of one cell have one fingerprint, on whichever nodes they are. */
static void compare_prints(const struct cluster *c, uint64_t *const *tables)
{
    for (uint32_t a = 0; a < c->n_nodes; a++)
        for (uint32_t i = 0; i < c->n[a].program.n_holds; i++)
            for (uint32_t b = 0; b < c->n_nodes; b++)
                for (uint32_t k = 0; k < c->n[b].program.n_holds; k++) {
                    const struct program *p = &c->n[a].program, *q = &c->n[b].program;
                    if (p->cells[p->holds[i].cell].id == q->cells[q->holds[k].cell].id)
                        ck_assert_uint_eq(tables[a][i], tables[b][k]);
                }
}

static void finish_all(struct cluster *c, const uint64_t *requests, bool compare)
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

static uint32_t wrong_at(struct cluster *c, uint64_t version)
{
    uint32_t wrong = 0;
    cluster_foreach(c, r)
    {
        wrong += rig_wrong(r, rig_target(r), version);
    }
    return wrong;
}

static void new_version(struct cluster *c, uint64_t version)
{
    cluster_foreach(c, r)
    {
        r->version = version;
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
    }
}

static void refit(struct cluster *c, uint64_t version, enum wire_verify verify)
{
    uint64_t requests[MAX_NODES];
    new_version(c, version);
    prepare_all(c, verify, NULL);
    start_all(c, requests);
    finish_all(c, requests, verify == WIRE_VERIFY_FULL);
    ck_assert_uint_eq(wrong_at(c, version), 0);
}

static struct wire_stats stats_of(struct rig *r)
{
    struct wire_stats s;
    rig_expect(r, rig_send(r, WIRE_STATS, 0, NULL, 0, NULL, 0, NULL, 0), WIRE_COUNTED);
    ck_assert_uint_eq(r->packet->header.body_bytes, sizeof(s));
    memcpy(&s, r->packet->body, sizeof(s));
    return s;
}

static struct wire_stats stats_of_all(struct cluster *c)
{
    struct wire_stats all = {0};
    cluster_foreach(c, r)
    {
        struct wire_stats s = stats_of(r);
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

/* --- making ----------------------------------------------------------------------------------- */

/* All nodes plan by themselves: their plans are the same, or nothing below works. */
static void cluster_open(struct cluster *c)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        memcpy(c->n[i].o.hello.transport, "tcp", 4);
        c->n[i].o.node = i;
        rig_open(&c->n[i]);
        ck_assert_uint_ne(c->n[i].data_port, 0);
        ck_assert_int_eq(memcmp(c->n[i].program.digest, c->n[0].program.digest, 16), 0);
    }
}

static void cluster_close(struct cluster *c)
{
    cluster_foreach(c, r)
    {
        rig_close(r);
    }
}

/* Ranks that follow each other need not be on devices that do. */
static void scatter(struct rig *r, uint64_t *state)
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
static void random_node(struct rig *r, uint64_t seed, uint32_t n_nodes)
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

static void random_cluster(struct cluster *c, uint64_t seed)
{
    memset(c, 0, sizeof(*c));
    c->n_nodes = 2 + (uint32_t)(seed % 2);
    c->seed = seed;
    for (uint32_t i = 0; i < c->n_nodes; i++)
        random_node(&c->n[i], seed, c->n_nodes);
}

static char *one_tensor(const char *name, uint32_t ranks, const char *placement, uint32_t rows)
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
static void plain_cluster(struct cluster *c, uint32_t n_source, uint32_t n_dest,
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

/* --- what lands ------------------------------------------------------------------------------- */

START_TEST(every_element_lands_across_nodes_and_connections_serve_all_versions)
{
    uint64_t network = 0;
    for (uint64_t seed = 1; seed <= 24; seed++) {
        struct cluster c;
        random_cluster(&c, seed);
        cluster_open(&c);
        uint64_t expected = 0, connected = 0;
        for (uint64_t version = 1; version <= 3; version++) {
            refit(&c, version, (enum wire_verify)(seed % 3));
            expected += plan_totals(c.n[0].plan)->network_bytes;
            struct wire_stats s = stats_of_all(&c);
            ck_assert_uint_eq(s.network_received_bytes, expected);
            ck_assert_uint_eq(s.network_sent_bytes, expected);
            ck_assert_uint_eq(s.refused, 0);
            ck_assert_uint_eq(s.stale_frames, 0);
            if (version > 1)
                ck_assert_uint_eq(s.connected, connected);
            connected = s.connected;
        }
        network += expected;
        cluster_close(&c);
    }
    ck_assert_uint_gt(network, 1 << 20);
}
END_TEST

START_TEST(every_element_lands_across_nodes_under_delays_and_poison)
{
    for (uint64_t seed = 100; seed < 108; seed++) {
        struct cluster c;
        random_cluster(&c, seed);
        cluster_foreach(&c, r)
        {
            r->o.hello.host_seed = seed;
            r->o.hello.host_max_delay_us = 100;
        }
        cluster_open(&c);
        refit(&c, 1, WIRE_VERIFY_FULL);
        refit(&c, 2, WIRE_VERIFY_FULL);
        cluster_close(&c);
    }
}
END_TEST

/* One source, two domains that need all of it: half of what each takes comes from the other. */
START_TEST(a_relay_sends_on_from_its_destination_memory)
{
    struct cluster c;
    plain_cluster(&c, 1, 2, "Replicate", 256);
    cluster_open(&c);
    uint64_t all = 256 * (64 * 4 + 24 * 2);
    ck_assert_uint_ge(plan_totals(c.n[0].plan)->max_relay_depth, 1);
    for (uint64_t version = 1; version <= 2; version++) {
        refit(&c, version, WIRE_VERIFY_FULL);
        struct wire_stats s = stats_of(&c.n[0]), b = stats_of(&c.n[1]), d = stats_of(&c.n[2]);
        ck_assert_uint_eq(b.network_received_bytes, version * all);
        ck_assert_uint_eq(d.network_received_bytes, version * all);
        ck_assert_uint_gt(b.network_sent_bytes + d.network_sent_bytes, 0);
        ck_assert_uint_eq(s.network_sent_bytes + b.network_sent_bytes + d.network_sent_bytes,
                          2 * version * all);
    }
    cluster_close(&c);
}
END_TEST

/* --- preparing -------------------------------------------------------------------------------- */

static void never_opened(struct rig *r)
{
    for (uint32_t l = 0; l <= r->n_layouts; l++) {
        layout_free(r->layouts[l]);
        free(r->rank_device[l]);
    }
}

START_TEST(an_address_that_is_not_there_or_a_port_in_use_is_refused_by_name)
{
    struct cluster c;
    static const char *const bad[] = {"192.0.2.7", "localhost", "2001:db8::1"};
    for (int i = 0; i < 3; i++) {
        plain_cluster(&c, 1, 1, "Replicate", 8);
        struct rig *r = &c.n[0];
        memcpy(r->o.hello.transport, "tcp", 4);
        snprintf(r->o.hello.data_address, sizeof(r->o.hello.data_address), "%s", bad[i]);
        r->o.lenient = true;
        rig_open(r);
        ck_assert(r->refused);
        rig_end(r, true);
        rig_free(r);
        never_opened(&c.n[1]);
    }
    plain_cluster(&c, 1, 1, "Replicate", 8);
    memcpy(c.n[0].o.hello.transport, "tcp", 4);
    rig_open(&c.n[0]);
    memcpy(c.n[1].o.hello.transport, "tcp", 4);
    c.n[1].o.node = 1;
    c.n[1].o.hello.data_port = c.n[0].data_port;
    c.n[1].o.lenient = true;
    rig_open(&c.n[1]);
    ck_assert(c.n[1].refused);
    cluster_foreach(&c, r)
    {
        rig_end(r, true);
        rig_free(r);
    }
}
END_TEST

START_TEST(a_fixed_port_and_an_ipv6_address_are_listened_at)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 8);
    struct rig *r = &c.n[0];
    memcpy(r->o.hello.transport, "tcp", 4);
    memcpy(r->o.hello.data_address, "::1", 4);
    rig_open(r);
    struct sockaddr_in6 a = {.sin6_family = AF_INET6,
                             .sin6_port = htons(r->data_port),
                             .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    close(fd);
    uint16_t port = r->data_port;
    rig_close(r);
    memset(&c.n[1].o.hello, 0, sizeof(c.n[1].o.hello));
    r = &c.n[1];
    memcpy(r->o.hello.transport, "tcp", 4);
    memcpy(r->o.hello.data_address, "::1", 4);
    r->o.hello.data_port = port; /* free again, though a connection of it may linger */
    rig_open(r);
    ck_assert_uint_eq(r->data_port, port);
    rig_close(r);
}
END_TEST

/* The one that sends prepares first: it waits for the other, and nobody counts a stranger. */
START_TEST(nodes_may_prepare_in_any_order)
{
    for (uint32_t first = 0; first < 2; first++) {
        struct cluster c;
        plain_cluster(&c, 1, 1, "Replicate", 64);
        cluster_open(&c);
        new_version(&c, 1);
        next_attempt(&c);
        uint64_t requests[2];
        requests[first] = rig_send_prepare(&c.n[first], WIRE_VERIFY_FULL, NULL);
        if (first == 0)
            ck_assert(!rig_receive(&c.n[0], 150));
        (void)stats_of(&c.n[0]); /* its loop is not blocked meanwhile */
        requests[!first] = rig_send_prepare(&c.n[!first], WIRE_VERIFY_FULL, NULL);
        uint64_t began = clock_mono_ns();
        expect_all(&c, requests,
                   WIRE_PREPARED); /* both: START comes after, as from a coordinator */
        if (first == 0)
            ck_assert_uint_lt(clock_mono_ns() - began, UINT64_C(1000000000));
        start_all(&c, requests);
        finish_all(&c, requests, true);
        ck_assert_uint_eq(wrong_at(&c, 1), 0);
        ck_assert_uint_eq(stats_of_all(&c).refused, 0);
        cluster_close(&c);
    }
}
END_TEST

/* Prepare at node 0 alone, until its deadline: by what it says. */
static void never_connected(struct cluster *c, const char *word)
{
    c->n[0].deadline_ns = clock_mono_ns() + UINT64_C(300000000);
    rig_expect(&c->n[0], rig_send_prepare(&c->n[0], WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
    ck_assert_int_eq(c->n[0].packet->header.code, RS_EDEADLINE);
    const char *text = rig_failure(&c->n[0])->text;
    ck_assert_msg(strstr(text, "node 'node-b' at 127.0.0.1:") != NULL, "%s", text);
    ck_assert_msg(strstr(text, word) != NULL, "%s", text);
    ck_assert_uint_ge(clock_mono_ns(), c->n[0].deadline_ns);
    ck_assert_uint_lt(clock_mono_ns() - c->n[0].deadline_ns, UINT64_C(500000000));
    rig_abort(&c->n[0]);
    c->n[0].deadline_ns = 0;
}

START_TEST(a_peer_that_never_prepares_fails_at_the_deadline_by_name)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    next_attempt(&c);
    never_connected(&c, "no answer");
    refit(&c, 1, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

START_TEST(a_peer_that_does_not_listen_fails_at_the_deadline_by_name)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    uint16_t port = c.n[1].data_port;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof(a);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, n), 0); /* bound, and not listening */
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    c.n[1].data_port = ntohs(a.sin_port);
    next_attempt(&c);
    never_connected(&c, "refused");
    close(fd);
    c.n[1].data_port = port;
    refit(&c, 1, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

START_TEST(a_wrong_token_is_refused_and_counted_and_an_aborted_prepare_ends_at_once)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    next_attempt(&c);
    c.token[0][1][3] ^= 1;
    tell_peers(&c, 0);
    rig_expect(&c.n[1], rig_send_prepare(&c.n[1], WIRE_VERIFY_OFF, NULL), WIRE_PREPARED);
    never_connected(&c, "closed by the other side");
    ck_assert_uint_ge(stats_of(&c.n[1]).refused, 1);
    rig_abort(&c.n[1]);

    next_attempt(&c);
    (void)rig_send_prepare(&c.n[0], WIRE_VERIFY_OFF, NULL);
    (void)stats_of(&c.n[0]);
    uint64_t began = clock_mono_ns();
    rig_abort(&c.n[0]);
    ck_assert_uint_lt(clock_mono_ns() - began, UINT64_C(500000000));
    refit(&c, 1, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

START_TEST(peers_that_make_no_sense_are_refused)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    struct rig *r = &c.n[0];
    for (int i = 0; i < 5; i++) {
        next_attempt(&c);
        uint32_t none = UINT32_MAX, far = 9, here = 0;
        uint8_t *table = r->peers.data + r->peers.n_bytes - 2 * sizeof(uint32_t);
        struct wire_peers h = {.n_peers = UINT32_MAX, .n_devices = 2};
        if (i == 0)
            r->peers.n_bytes = 3;
        else if (i == 1)
            memcpy(r->peers.data, &h, sizeof(h));
        else if (i == 2)
            memcpy(table + sizeof(uint32_t), &far, sizeof(far));
        else if (i == 3)
            memcpy(table, &here, sizeof(here));
        else
            memcpy(table + sizeof(uint32_t), &none,
                   sizeof(none)); /* the stream's peer is nowhere */
        rig_expect(r, rig_send_prepare(r, WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
        ck_assert_int_eq(r->packet->header.code, i == 4 ? RS_EPRECOND : RS_EPROTO);
        rig_abort(r);
    }
    r->peers.n_bytes = 0;
    r->attempt++;
    c.n[1].attempt++;
    rig_expect(r, rig_send_prepare(r, WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
    ck_assert_ptr_nonnull(strstr(rig_failure(r)->text, "was not told where"));
    refit(&c, 1, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

/* --- strangers -------------------------------------------------------------------------------- */

static int dial(uint16_t port)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons(port),
                            .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    return fd;
}

static void wait_closed(int fd)
{
    struct timeval patience = {.tv_sec = 5};
    uint8_t byte;
    ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    ssize_t n = recv(fd, &byte, 1, 0);
    ck_assert(n == 0 || (n < 0 && errno == ECONNRESET));
    close(fd);
}

static void try_hello(const struct cluster *c, struct tcp_hello h)
{
    uint8_t out[TCP_HELLO_BYTES];
    int fd = dial(c->n[1].data_port);
    tcp_hello_pack(&h, out);
    ck_assert_int_eq(send(fd, out, sizeof(out), MSG_NOSIGNAL), TCP_HELLO_BYTES);
    wait_closed(fd);
}

/* One who has listened in and knows the token, and some who don't, while the refit goes on. */
START_TEST(strangers_and_used_or_old_tokens_are_refused_and_the_refit_goes_on)
{
    struct cluster c;
    uint64_t requests[2];
    uint8_t noise[200] = {7, 7, 7};
    plain_cluster(&c, 1, 1, "Replicate", 1024);
    cluster_foreach(&c, r)
    {
        r->o.hello.network_bytes_per_s = 2e6;
    }
    cluster_open(&c);
    refit(&c, 1, WIRE_VERIFY_OFF);
    struct tcp_hello old = {.protocol = TCP_PROTOCOL,
                            .model = RIG_MODEL,
                            .epoch = 1,
                            .attempt = c.n[0].attempt,
                            .from = 0,
                            .to = 1};
    memcpy(old.token, c.token[0][1], sizeof(old.token));
    new_version(&c, 2);
    prepare_all(&c, WIRE_VERIFY_FULL, NULL);
    start_all(&c, requests);
    try_hello(&c, old); /* of an older attempt */
    struct tcp_hello now = old;
    now.attempt++;
    try_hello(&c, now); /* the older attempt's token */
    memcpy(now.token, c.token[0][1], sizeof(now.token));
    now.to = 0;
    try_hello(&c, now);                /* the right token for another pair of devices */
    int look = dial(c.n[1].data_port); /* without a word: as the coordinator's, no stranger */
    close(look);
    int scanner = dial(c.n[1].data_port), garbage = dial(c.n[1].data_port);
    ck_assert_int_eq(send(scanner, noise, 1, MSG_NOSIGNAL), 1);
    close(scanner);
    ck_assert_int_eq(send(garbage, noise, sizeof(noise), MSG_NOSIGNAL), (ssize_t)sizeof(noise));
    wait_closed(garbage);
    finish_all(&c, requests, true);
    ck_assert_uint_eq(wrong_at(&c, 2), 0);
    ck_assert_uint_eq(stats_of(&c.n[1]).refused, 5);
    ck_assert_uint_eq(stats_of(&c.n[0]).refused, 0);
    cluster_close(&c);
}
END_TEST

/* --- faults ----------------------------------------------------------------------------------- */

static void pause_us(uint64_t us)
{
    struct pollfd none;
    (void)poll(&none, 0, (int)(us / 1000));
    uint64_t until = clock_mono_ns() + us % 1000 * 1000;
    while (clock_mono_ns() < until)
        ;
}

static uint64_t checksum(struct cluster *c)
{
    uint64_t sum = 0;
    cluster_foreach(c, r)
    {
        sum = sum * 31 + rig_checksum(r);
    }
    return sum;
}

START_TEST(after_quiesced_no_byte_lands_from_elsewhere_and_the_next_attempt_is_clean)
{
    for (uint64_t seed = 200; seed < 216; seed++) {
        struct cluster c;
        uint64_t state = seed, requests[MAX_NODES];
        random_cluster(&c, seed);
        cluster_foreach(&c, r)
        {
            r->o.hello.network_bytes_per_s =
                2e6; /* so that it is in the middle when it is aborted */
        }
        cluster_open(&c);
        new_version(&c, 1);
        prepare_all(&c, WIRE_VERIFY_FULL, NULL);
        start_all(&c, requests);
        pause_us(random_next(&state) % 6000);
        abort_all(&c);
        uint64_t sum = checksum(&c);
        cluster_foreach(&c, r)
        {
            rig_fill_sources(r, 2);
        }
        pause_us(2000);
        cluster_foreach(&c, r)
        {
            rig_fill_sources(r, 1);
        }
        ck_assert_uint_eq(checksum(&c), sum);
        refit(&c, 2, WIRE_VERIFY_FULL);
        cluster_close(&c);
    }
}
END_TEST

/* Receives until the request's answer, PROGRESS aside; 0: the data plane has gone. */
static uint32_t end_of(struct rig *r, uint64_t request)
{
    r->o.lenient = true;
    uint32_t type = rig_try(r, request);
    r->o.lenient = false;
    return type;
}

/* The first FAILED of any node but the victim; the node. The others would be told by their control
 * processes. */
static struct rig *first_failure(struct cluster *c, const uint64_t *requests, uint32_t victim)
{
    uint64_t until = clock_mono_ns() + UINT64_C(10000000000);
    while (clock_mono_ns() < until)
        for (uint32_t i = 0; i < c->n_nodes; i++)
            if (i != victim && rig_receive(&c->n[i], 5) &&
                c->n[i].packet->header.request == requests[i] &&
                c->n[i].packet->header.type == WIRE_FAILED)
                return &c->n[i];
    ck_abort_msg("nobody failed");
    return NULL;
}

static const char *const names[] = {"node 'node-a' at", "node 'node-b' at", "node 'node-c' at"};

static void abort_but(struct cluster *c, uint32_t victim)
{
    for (uint32_t i = 0; i < c->n_nodes; i++)
        if (i != victim)
            rig_abort(&c->n[i]);
}

/* Slow, as processes. Node 0 sends, 1 and 2 take and relay. */
static void slow_processes(struct cluster *c)
{
    plain_cluster(c, 1, 2, "Replicate", 512); /* 156 KB */
    cluster_foreach(c, r)
    {
        r->o.process = true;
        r->o.hello.network_bytes_per_s = 500e3;
        r->o.hello.silence_ms = 400;
    }
    cluster_open(c);
    new_version(c, 1);
}

static void open_again(struct cluster *c, uint32_t node)
{
    struct rig *r = &c->n[node], old = *r;
    char *source = one_tensor("s", 1, "Shard(0)", 512);
    char *dest = one_tensor("d", 2, "Replicate", 512);
    rig_free(r);
    memset(r, 0, sizeof(*r));
    r->o = old.o;
    rig_side(r, 0, source, 0, 1);
    rig_side(r, 1, dest, 1, 2);
    rig_open(r);
    r->attempt = old.attempt;
    free(source);
    free(dest);
}

START_TEST(the_death_of_a_node_fails_the_others_at_once_and_its_successor_serves_the_next_attempt)
{
    for (uint32_t victim = 0; victim < 3; victim++) {
        struct cluster c;
        uint64_t requests[3];
        slow_processes(&c);
        prepare_all(&c, WIRE_VERIFY_OFF, NULL);
        start_all(&c, requests);
        pause_us(60000);
        ck_assert_int_eq(kill(c.n[victim].child, SIGKILL), 0);
        ck_assert_int_eq(rig_end(&c.n[victim], false), -1);
        uint64_t killed = clock_mono_ns();
        struct rig *r = first_failure(&c, requests, victim);
        ck_assert_uint_lt(clock_mono_ns() - killed, UINT64_C(1000000000));
        ck_assert_int_eq(r->packet->header.code, RS_EPEER);
        ck_assert_msg(strstr(rig_failure(r)->text, names[victim]) != NULL, "%s",
                      rig_failure(r)->text);
        abort_but(&c, victim);
        open_again(&c, victim);
        refit(&c, 2, WIRE_VERIFY_FULL); /* the same epoch: survivors' connections go on */
        cluster_close(&c);
    }
}
END_TEST

/* Its kernel takes what is sent until the buffers are full, and it says nothing. Woken past its
 * lease it lets nothing land, though groups and bytes were queued. */
START_TEST(a_stopped_node_is_past_its_deadline_and_lands_nothing_once_it_wakes)
{
    struct cluster c;
    uint64_t requests[3];
    slow_processes(&c);
    prepare_all(&c, WIRE_VERIFY_OFF, NULL);
    struct wire_lease lease = {.until_ns = clock_mono_ns() + UINT64_C(300000000)};
    (void)rig_send(&c.n[1], WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    start_all(&c, requests);
    pause_us(60000);
    ck_assert_int_eq(kill(c.n[1].child, SIGSTOP), 0);
    int status;
    ck_assert_int_eq(waitpid(c.n[1].child, &status, WUNTRACED), c.n[1].child);
    uint64_t sum = rig_checksum(&c.n[1]);
    struct rig *r = first_failure(&c, requests, 1);
    ck_assert_int_eq(r->packet->header.code, RS_EDEADLINE);
    ck_assert_msg(strstr(rig_failure(r)->text, names[1]) != NULL, "%s", rig_failure(r)->text);
    abort_but(&c, 1);
    ck_assert_uint_gt(clock_mono_ns(), lease.until_ns);
    ck_assert_int_eq(kill(c.n[1].child, SIGCONT), 0);
    ck_assert_uint_eq(end_of(&c.n[1], requests[1]), WIRE_FAILED);
    ck_assert_int_eq(c.n[1].packet->header.code, RS_EDEADLINE);
    ck_assert_uint_eq(rig_checksum(&c.n[1]), sum);
    rig_abort(&c.n[1]);
    lease.until_ns = 0;
    (void)rig_send(&c.n[1], WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    refit(&c, 2, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

/* A control process that renews the lease just after it was over must not bring to life what was
 * left out meanwhile. */
START_TEST(a_lease_that_is_prolonged_too_late_fails_the_attempt_all_the_same)
{
    struct cluster c;
    uint64_t requests[3];
    slow_processes(&c);
    prepare_all(&c, WIRE_VERIFY_OFF, NULL);
    start_all(&c, requests);
    struct wire_lease lease = {.until_ns = 1}, longer = {.until_ns = UINT64_MAX};
    (void)rig_send(&c.n[1], WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    (void)rig_send(&c.n[1], WIRE_LEASE, 0, &longer, sizeof(longer), NULL, 0, NULL, 0);
    ck_assert_uint_eq(end_of(&c.n[1], requests[1]), WIRE_FAILED);
    ck_assert_int_eq(c.n[1].packet->header.code, RS_EDEADLINE);
    abort_all(&c);
    refit(&c, 2, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

/* --- what is held already --------------------------------------------------------------------- */

/* What node i's PREPARE tells of the others: all of their records, its own too. */
static void tell_skips(struct cluster *c, uint8_t *const *held)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        c->n[i].skips.n_bytes = 0;
        for (uint32_t k = 0; k < c->n_nodes; k++)
            ck_assert_int_eq(skips_encode(&c->n[k].program, held[k], &c->n[i].skips), 0);
    }
}

static void free_held(struct cluster *c, uint8_t **held)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        free(held[i]);
        c->n[i].skips.n_bytes = 0;
    }
}

START_TEST(random_held_cells_of_all_nodes_are_left_alone_at_both_ends)
{
    uint64_t saved = 0;
    for (uint64_t seed = 300; seed < 324; seed++) {
        struct cluster c;
        uint64_t requests[MAX_NODES], state = seed;
        uint8_t *held[MAX_NODES];
        random_cluster(&c, seed);
        cluster_open(&c);
        refit(&c, 1, WIRE_VERIFY_FULL);
        uint64_t before = stats_of_all(&c).network_received_bytes;
        for (uint32_t i = 0; i < c.n_nodes; i++) {
            held[i] = malloc(c.n[i].program.n_holds + 1);
            for (uint32_t k = 0; k < c.n[i].program.n_holds; k++)
                held[i][k] = random_next(&state) % 4 != 0;
        }
        tell_skips(&c, held);
        prepare_all(&c, WIRE_VERIFY_FULL, held);
        start_all(&c, requests);
        finish_all(&c, requests, true);
        ck_assert_uint_eq(wrong_at(&c, 1), 0);
        uint64_t moved = stats_of_all(&c).network_received_bytes - before;
        ck_assert_uint_le(moved, before);
        saved += before - moved;
        /* All of it held: nothing moves. */
        for (uint32_t i = 0; i < c.n_nodes; i++)
            memset(held[i], 1, c.n[i].program.n_holds);
        tell_skips(&c, held);
        prepare_all(&c, WIRE_VERIFY_FULL, held);
        start_all(&c, requests);
        finish_all(&c, requests, true);
        if (c.n[0].o.plan.strategy != PLAN_GATHER_BROADCAST) /* which passes through scratch */
            ck_assert_uint_eq(stats_of_all(&c).network_received_bytes, before + moved);
        free_held(&c, held);
        refit(&c, 2, WIRE_VERIFY_FULL);
        cluster_close(&c);
    }
    ck_assert_uint_gt(saved, 50000);
}
END_TEST

/* QUIESCED's table. */
static uint8_t *landed_of(struct rig *r, uint64_t *ret_prints)
{
    const void *data;
    size_t bytes, n = r->program.n_holds;
    struct wire_quiesced q;
    ck_assert_uint_eq(r->packet->header.body_bytes, sizeof(q));
    memcpy(&q, r->packet->body, sizeof(q));
    ck_assert_uint_eq(q.n_holds, n);
    ck_assert_int_eq(wire_map_fd(r->packet->fds[0], &data, &bytes, NULL), 0);
    ck_assert_uint_eq(bytes, n * 9);
    uint8_t *landed = malloc(n + 1);
    memcpy(ret_prints, data, n * 8);
    memcpy(landed, (const uint8_t *)data + n * 8, n);
    wire_unmap(data, bytes);
    return landed;
}

/* Bytes of destination holds that are not held. */
static uint64_t missing_bytes(const struct rig *r, const uint8_t *held)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < r->program.n_holds; i++)
        if (r->program.places[r->program.holds[i].place].side == PROGRAM_DESTINATION &&
            held[i] == 0)
            bytes += program_cell_bytes(&r->program, r->program.holds[i].cell);
    return bytes;
}

/* Aborted in the middle; the retry is told what each node had read back, and moves the rest. */
START_TEST(a_retry_moves_only_what_is_still_missing)
{
    struct cluster c;
    uint64_t requests[3], n_read = 0, n_missing = 0;
    uint8_t *held[MAX_NODES];
    plain_cluster(&c, 1, 2, "Shard(1)", 512);
    cluster_foreach(&c, r)
    {
        r->o.hello.network_bytes_per_s = 1e6;
        r->o.plan.least_piece_bytes = 4096;
    }
    cluster_open(&c);
    new_version(&c, 1);
    prepare_all(&c, WIRE_VERIFY_FULL, NULL);
    start_all(&c, requests);
    pause_us(60000);
    for (uint32_t i = 0; i < 3; i++) {
        uint64_t prints[4096];
        rig_abort(&c.n[i]);
        ck_assert_uint_le(c.n[i].program.n_holds, 4096);
        held[i] = landed_of(&c.n[i], prints);
        for (uint32_t k = 0; k < c.n[i].program.n_holds; k++) {
            bool dest =
                c.n[i].program.places[c.n[i].program.holds[k].place].side == PROGRAM_DESTINATION;
            ck_assert_int_eq(prints[k] != 0, held[i][k] == WIRE_READ);
            n_read += held[i][k] == WIRE_READ;
            n_missing += dest && held[i][k] == WIRE_MISSING;
            held[i][k] = held[i][k] == WIRE_READ;
        }
    }
    ck_assert_uint_gt(n_read, 0);
    ck_assert_uint_gt(n_missing, 0);
    uint64_t before = stats_of_all(&c).network_received_bytes;
    tell_skips(&c, held);
    prepare_all(&c, WIRE_VERIFY_FULL, held);
    start_all(&c, requests);
    finish_all(&c, requests, true);
    ck_assert_uint_eq(wrong_at(&c, 1), 0);
    uint64_t missing = 0, moved = stats_of_all(&c).network_received_bytes - before;
    cluster_foreach(&c, r)
    {
        missing += missing_bytes(r, held[r - c.n]);
        ck_assert_uint_eq(r->progress.total_bytes, missing_bytes(r, held[r - c.n]));
    }
    ck_assert_uint_eq(moved, missing);
    free_held(&c, held);
    cluster_close(&c);
}
END_TEST

/* The sender was not told: its messages are others than the receiver waits for. */
START_TEST(nodes_that_were_told_differently_fail_and_nothing_lands_where_it_should_not)
{
    struct cluster c;
    uint64_t requests[2];
    uint8_t *held[MAX_NODES];
    plain_cluster(&c, 1, 1, "Replicate", 512);
    c.n[0].o.plan.chunk_bytes = c.n[1].o.plan.chunk_bytes = 4096;
    cluster_open(&c);
    refit(&c, 1, WIRE_VERIFY_FULL);
    for (uint32_t i = 0; i < 2; i++)
        held[i] = calloc(1, c.n[i].program.n_holds + 1);
    for (uint32_t k = 0; k < c.n[1].program.n_holds; k += 2)
        held[1][k] = 1;
    prepare_all(&c, WIRE_VERIFY_OFF, held);
    start_all(&c, requests);
    ck_assert_uint_eq(end_of(&c.n[1], requests[1]), WIRE_FAILED);
    ck_assert_int_eq(c.n[1].packet->header.code, RS_EPROTO);
    abort_all(&c);
    ck_assert_uint_eq(wrong_at(&c, 1), 0); /* the same version: what has landed is right */
    /* A blob that is none. */
    next_attempt(&c);
    buf_put_u32(&c.n[0].skips, 7);
    rig_expect(&c.n[0], rig_send_prepare(&c.n[0], WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
    ck_assert_int_eq(c.n[0].packet->header.code, RS_EPROTO);
    free_held(&c, held);
    refit(&c, 2, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

/* --- memory that is out ----------------------------------------------------------------------- */

static bool run_out(long n)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_foreach(&c, r)
    {
        r->o.process = true;
    }
    c.n[0].o.fail_at = n;
    c.n[0].o.lenient = true;
    for (uint32_t i = 0; i < 2; i++) {
        memcpy(c.n[i].o.hello.transport, "tcp", 4);
        c.n[i].o.node = i;
        rig_open(&c.n[i]);
    }
    bool failed = c.n[0].refused || c.n[0].gone;
    new_version(&c, 1);
    for (int attempt = 0; attempt < 2 && !c.n[0].gone && !c.n[0].refused; attempt++) {
        uint64_t requests[2];
        next_attempt(&c);
        c.n[0].deadline_ns = clock_mono_ns() + UINT64_C(2000000000);
        for (uint32_t i = 0; i < 2; i++)
            requests[i] = rig_send_prepare(&c.n[i], WIRE_VERIFY_FULL, NULL);
        rig_expect(&c.n[1], requests[1], WIRE_PREPARED);
        bool prepared = rig_try(&c.n[0], requests[0]) == WIRE_PREPARED;
        if (prepared) {
            start_all(&c, requests);
            bool staged = rig_try(&c.n[0], requests[0]) == WIRE_STAGED;
            if (staged && end_of(&c.n[1], requests[1]) == WIRE_STAGED) {
                ck_assert_uint_eq(rig_wrong(&c.n[1], WIRE_LIVE, 1), 0);
                break;
            }
        }
        failed = true;
        (void)rig_try(&c.n[0], rig_send(&c.n[0], WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0));
        rig_abort(&c.n[1]);
    }
    failed = failed || c.n[0].gone;
    int status = rig_end(&c.n[0], !c.n[0].gone);
    ck_assert_msg(status == EXIT_SUCCESS || (c.n[0].gone && status == EXIT_FAILURE), "status %d",
                  status);
    rig_free(&c.n[0]);
    rig_close(&c.n[1]);
    return failed;
}

START_TEST(without_memory_a_node_says_so_and_its_peer_goes_on)
{
    long quiet = 0;
    for (long n = 1; quiet < 3; n += 1 + n / 10)
        quiet = run_out(n) ? 0 : quiet + 1;
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_element_lands_across_nodes_and_connections_serve_all_versions)                         \
    X(every_element_lands_across_nodes_under_delays_and_poison)                                    \
    X(a_relay_sends_on_from_its_destination_memory)                                                \
    X(an_address_that_is_not_there_or_a_port_in_use_is_refused_by_name)                            \
    X(a_fixed_port_and_an_ipv6_address_are_listened_at)                                            \
    X(nodes_may_prepare_in_any_order)                                                              \
    X(a_peer_that_never_prepares_fails_at_the_deadline_by_name)                                    \
    X(a_peer_that_does_not_listen_fails_at_the_deadline_by_name)                                   \
    X(a_wrong_token_is_refused_and_counted_and_an_aborted_prepare_ends_at_once)                    \
    X(peers_that_make_no_sense_are_refused)                                                        \
    X(strangers_and_used_or_old_tokens_are_refused_and_the_refit_goes_on)                          \
    X(after_quiesced_no_byte_lands_from_elsewhere_and_the_next_attempt_is_clean)                   \
    X(the_death_of_a_node_fails_the_others_at_once_and_its_successor_serves_the_next_attempt)      \
    X(a_stopped_node_is_past_its_deadline_and_lands_nothing_once_it_wakes)                         \
    X(a_lease_that_is_prolonged_too_late_fails_the_attempt_all_the_same)                           \
    X(random_held_cells_of_all_nodes_are_left_alone_at_both_ends)                                  \
    X(a_retry_moves_only_what_is_still_missing)                                                    \
    X(nodes_that_were_told_differently_fail_and_nothing_lands_where_it_should_not)                 \
    X(without_memory_a_node_says_so_and_its_peer_goes_on)

#include "test/lib/main.h"
