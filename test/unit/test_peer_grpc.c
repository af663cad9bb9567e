/* The same sessions over real gRPC on loopback: joining, long messages, layouts, data ports, certificates, breaks. */
#include <arpa/inet.h>
#include <check.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "peer/layout_pages.h"
#include "peer/private.h"
#include "rpc/rpc.h"

/* No session here ends because its lease does: a busy machine may take seconds for one turn of the loop. */
enum { NODES = 4, BEAT = 100, LEASE = 60000, SLACK = 300 };

struct side {
    unsigned node, n_started;
    struct peer *peer;
    unsigned n_welcomed, n_severed, n_orders;
    uint64_t order_bytes, lease_ns;
    uint64_t session,
        n_sent; /* of reports that say so in their cookie; sessions count over restarts */
    bool quiet;
    char severed[PEER_WHY_BYTES];
};

struct cluster {
    uv_loop_t loop;
    uv_timer_t alarm; /* a deadline for uv_run */
    struct rpc_server *server;
    struct peer *coordinator;
    struct peer_node nodes[NODES];
    struct side members[NODES];
    bool here[NODES];
    unsigned n_joined[NODES], n_silent[NODES], n_lost[NODES], n_reports[NODES];
    uint64_t n_prints;
    uint64_t report_session[NODES], report_number[NODES], newest_session[NODES];
    uint16_t data_port[NODES];
    char dir[64]; /* certificates; "": plain */
    char ca[128], certificate[NODES][128], key[NODES][128];
    const char *role;
    unsigned n_done, n_fetched;
    bool late;
    struct layout *layout, *fetched;
    int fetch_code;
};

static struct cluster *c;

/* --- callbacks --------------------------------------------------------------------------------------- */

static void joined(void *arg, uint32_t node, const struct peer_member *m, bool again)
{
    (void)arg;
    (void)m;
    (void)again;
    ck_assert(!c->here[node] && c->n_silent[node] == c->n_lost[node]);
    c->here[node] = true;
    c->n_joined[node]++;
    if (c->report_session[node] != 0)
        c->newest_session[node] = c->report_session[node];
    c->report_session[node] = 0;
}

static void report(void *arg, uint32_t node, const struct node_report *r)
{
    (void)arg;
    ck_assert(c->here[node]);
    c->n_reports[node]++;
    c->n_prints += r->n_prints;
    if (r->data_port != 0)
        c->data_port[node] = r->data_port;
    if (r->type != NODE_REPORT_PUBLISH_ASK)
        return;
    if (c->report_session[node] == 0) {
        ck_assert_uint_gt(r->cookie >> 32, c->newest_session[node]);
        c->report_session[node] = r->cookie >> 32;
        c->report_number[node] = 0;
    }
    ck_assert_uint_eq(r->cookie >> 32, c->report_session[node]);
    ck_assert_uint_eq(r->cookie & UINT32_MAX, c->report_number[node]);
    c->report_number[node]++;
}

static void silent(void *arg, uint32_t node, const char *why)
{
    (void)arg;
    (void)why;
    c->here[node] = false;
    c->n_silent[node]++;
}

static void lost(void *arg, uint32_t node, const char *why)
{
    (void)arg;
    (void)why;
    c->n_lost[node]++;
}

static int introduce(void *arg, struct peer_member *ret)
{
    struct side *s = arg;
    (void)ret;
    return s->quiet ? 0 : RS_EUNAVAIL;
}

static void welcomed(void *arg, uint64_t incarnation)
{
    struct side *s = arg;
    (void)incarnation;
    s->n_welcomed++;
    s->session++;
    s->n_sent = 0;
}

static void order(void *arg, const struct node_order *o)
{
    struct side *s = arg;
    s->n_orders++;
    s->order_bytes += strlen(o->text);
}

static void severed(void *arg, const char *why)
{
    struct side *s = arg;
    s->n_severed++;
    (void)snprintf(s->severed, sizeof s->severed, "%s", why);
}

static void lease(void *arg, uint64_t until_ns)
{
    ((struct side *)arg)->lease_ns = until_ns;
}

/* --- turning ----------------------------------------------------------------------------------------- */

static void on_alarm(uv_timer_t *t)
{
    (void)t;
    c->late = true;
}

/* Turns the loop until `cond` holds; fails after 60 s, which the loop counts from when it last looked at the clock. */
#define UNTIL(cond)                                                                                \
    do {                                                                                           \
        c->late = false;                                                                           \
        uv_update_time(&c->loop);                                                                  \
        (void)uv_timer_start(&c->alarm, on_alarm, 60000, 0);                                       \
        while (!(cond) && !c->late)                                                                \
            (void)uv_run(&c->loop, UV_RUN_ONCE);                                                   \
        (void)uv_timer_stop(&c->alarm);                                                            \
        ck_assert_msg(cond, "never came: %s", #cond);                                              \
    } while (0)

static void turn_ms(uint64_t ms)
{
    c->late = false;
    uv_update_time(&c->loop);
    (void)uv_timer_start(&c->alarm, on_alarm, ms, 0);
    while (!c->late)
        (void)uv_run(&c->loop, UV_RUN_ONCE);
}

static void on_done(void *arg)
{
    (void)arg;
    c->n_done++;
}

static struct peer *resolve(void *context)
{
    (void)context;
    return c->coordinator;
}

static struct peer_options options_of(unsigned me)
{
    bool tls = c->dir[0] != '\0';
    return (struct peer_options){.loop = &c->loop,
                                 .nodes = c->nodes,
                                 .n_nodes = NODES,
                                 .me = me,
                                 .beat_ms = BEAT,
                                 .lease_ms = LEASE,
                                 .slack_ms = SLACK,
                                 .environment = "backend host",
                                 .incarnation = 100 + me,
                                 .release = "1",
                                 .data_address = "127.0.0.1",
                                 .peer_role = c->role,
                                 .tls_ca = tls ? c->ca : NULL,
                                 .tls_certificate = tls ? c->certificate[me] : NULL,
                                 .tls_key = tls ? c->key[me] : NULL};
}

static void server_begin(const char *address)
{
    size_t n;
    const struct rpc_method *methods = peer_methods(&n);
    struct rpc_tls_files tls = {c->ca, c->certificate[0], c->key[0]};
    struct rpc_address a = {address, c->dir[0] != '\0'};
    struct rpc_server_options o = {.addresses = &a,
                                   .n_addresses = 1,
                                   .tls = a.tls ? &tls : NULL,
                                   .keepalive_ms = 1000,
                                   .keepalive_timeout_ms = 2000,
                                   .max_queued_messages = 1024,
                                   .max_queued_bytes = 16 << 20,
                                   .context = c};
    struct err e = {0};
    ck_assert_msg(rpc_server_start(&c->loop, &o, methods, n, &c->server, &e) == 0, "%s", e.text);
}

static void cluster_begin(const char *dir, const char *role)
{
    struct err e = {0};
    c = mem_zalloc(sizeof *c);
    ck_assert_ptr_nonnull(c);
    (void)snprintf(c->dir, sizeof c->dir, "%s", dir);
    (void)snprintf(c->ca, sizeof c->ca, "%s/ca.pem", dir);
    for (unsigned i = 0; i < NODES; i++) {
        (void)snprintf(c->nodes[i].name, sizeof c->nodes[i].name, "n%u", i);
        (void)snprintf(c->nodes[i].address, sizeof c->nodes[i].address, "127.0.0.1:%u", 1 + i);
        (void)snprintf(c->certificate[i], sizeof c->certificate[i], "%s/n%u.pem", dir, i);
        (void)snprintf(c->key[i], sizeof c->key[i], "%s/n%u.key", dir, i);
    }
    c->role = role;
    ck_assert_int_eq(uv_loop_init(&c->loop), 0);
    ck_assert_int_eq(uv_timer_init(&c->loop, &c->alarm), 0);
    struct peer_options o = options_of(0);
    o.events =
        (struct peer_events){.joined = joined, .report = report, .silent = silent, .lost = lost};
    peer_set_resolver(resolve);
    ck_assert_msg(peer_start(&o, &c->coordinator, &e) == 0, "%s", e.text);
    server_begin("127.0.0.1:0");
    (void)snprintf(c->nodes[0].address, sizeof c->nodes[0].address, "127.0.0.1:%u",
                   rpc_server_address_port(c->server, 0));
}

static void member_begin(unsigned node)
{
    struct side *s = &c->members[node];
    struct peer_options o = options_of(node);
    struct err e = {0};
    s->node = node;
    s->quiet = true;
    o.incarnation += 10 * (s->n_started + 1);
    s->n_started++;
    o.events = (struct peer_events){.arg = s,
                                    .introduce = introduce,
                                    .welcomed = welcomed,
                                    .order = order,
                                    .severed = severed,
                                    .lease = lease};
    ck_assert_msg(peer_start(&o, &s->peer, &e) == 0, "%s", e.text);
}

static void server_end(void)
{
    unsigned before = c->n_done;
    rpc_server_stop(c->server, 500, on_done, NULL);
    UNTIL(c->n_done > before);
    c->server = NULL;
}

static void cluster_end(void)
{
    unsigned want = c->n_done;
    for (unsigned i = 1; i < NODES; i++)
        if (c->members[i].peer != NULL) {
            peer_stop(c->members[i].peer, on_done, NULL);
            want++;
        }
    UNTIL(c->n_done == want);
    if (c->server != NULL)
        server_end();
    want = c->n_done + 1;
    peer_stop(c->coordinator, on_done, NULL);
    UNTIL(c->n_done == want);
    uv_close((uv_handle_t *)&c->alarm, NULL);
    (void)uv_run(&c->loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&c->loop), 0);
    layout_free(c->layout);
    layout_free(c->fetched);
    mem_free(c);
    c = NULL;
}

/* --- plain ------------------------------------------------------------------------------------------- */

START_TEST(three_members_join_and_long_messages_arrive_both_ways)
{
    enum { PRINTS = 300000 };
    cluster_begin("", NULL);
    for (unsigned i = 1; i < NODES; i++)
        member_begin(i);
    UNTIL(c->members[1].n_welcomed == 1 && c->members[2].n_welcomed == 1 &&
          c->members[3].n_welcomed == 1);
    struct publication_print *prints = calloc(PRINTS, sizeof *prints);
    for (uint32_t i = 0; i < PRINTS; i++)
        prints[i] = (struct publication_print){i, ~(uint64_t)i};
    struct node_report r = {.type = NODE_REPORT_EVENT,
                            .model = "m",
                            .has_prints = true,
                            .prints = prints,
                            .n_prints = PRINTS};
    r.event.type = REFIT_EV_PUBLISHED;
    struct node_order o = {.type = NODE_ORDER_EVICT, .model = "m", .text = "away"};
    for (unsigned i = 1; i < NODES; i++) {
        ck_assert_int_eq(peer_report(c->members[i].peer, &r), 0);
        ck_assert_int_eq(peer_order(c->coordinator, i, &o), 0);
    }
    UNTIL(c->n_prints == 3 * PRINTS && c->members[1].order_bytes == 4 &&
          c->members[2].order_bytes == 4 && c->members[3].order_bytes == 4);
    uint64_t before = c->members[1].lease_ns;
    UNTIL(c->members[1].lease_ns > before + 500000000); /* beats are answered */
    struct peer_view v;
    UNTIL((peer_look(c->coordinator, 1, &v), v.round_trip_ns > 0)); /* the next beat tells it */
    free(prints);
    cluster_end();
}
END_TEST

START_TEST(a_server_that_ends_severs_its_members_and_they_come_back)
{
    cluster_begin("", NULL);
    char address[80];
    (void)snprintf(address, sizeof address, "%s", c->nodes[0].address);
    member_begin(1);
    UNTIL(c->members[1].n_welcomed == 1);
    server_end();
    UNTIL(c->members[1].n_severed == 1 && c->n_silent[1] == 1);
    ck_assert_int_eq(peer_report(c->members[1].peer, &(struct node_report){.model = ""}),
                     RS_EUNAVAIL);
    server_begin(address);
    UNTIL(c->members[1].n_welcomed == 2);
    ck_assert_uint_eq(c->n_lost[1], 1);
    cluster_end();
}
END_TEST

static void member_stop_now(unsigned node)
{
    unsigned before = c->n_done;
    peer_stop(c->members[node].peer, on_done, NULL);
    c->members[node].peer = NULL;
    UNTIL(c->n_done > before);
}

/* One seeded fault, or reports and orders. */
static void fault(uint64_t *seed, const char *address)
{
    unsigned node = 1 + (unsigned)(random_next(seed) % (NODES - 1));
    struct side *s = &c->members[node];
    switch (random_next(seed) % 8) {
    case 0:
        peer_sever(c->coordinator, node, "severed by the test");
        break;
    case 1:
        if (s->peer != NULL)
            member_stop_now(node);
        else
            member_begin(node);
        break;
    case 2:
        if (random_next(seed) % 3 == 0) {
            server_end();
            server_begin(address);
        }
        break;
    default:
        for (uint64_t k = random_next(seed) % 200; k > 0; k--) {
            struct node_report r = {.type = NODE_REPORT_PUBLISH_ASK,
                                    .model = "m",
                                    .cookie = s->session << 32 | s->n_sent};
            if (s->peer != NULL && peer_report(s->peer, &r) == 0)
                s->n_sent++;
        }
    }
}

static unsigned n_reports(void)
{
    unsigned n = 0;
    for (unsigned i = 1; i < NODES; i++)
        n += c->n_reports[i];
    return n;
}

START_TEST(over_grpc_too_nothing_of_an_earlier_session_is_handed_over_in_a_later_one)
{
    uint64_t seed = 20251;
    char address[80];
    cluster_begin("", NULL);
    (void)snprintf(address, sizeof address, "%s", c->nodes[0].address);
    for (unsigned i = 1; i < NODES; i++)
        member_begin(i);
    UNTIL(c->here[1] && c->here[2] && c->here[3]);
    /* On a busy machine a session may end before it has begun: more rounds until enough was reported. */
    for (int i = 0; i < 80 || (n_reports() <= 500 && i < 8000); i++) {
        fault(&seed, address);
        turn_ms(random_next(&seed) % 30);
    }
    for (unsigned i = 1; i < NODES; i++) {
        if (c->members[i].peer == NULL)
            member_begin(i);
        UNTIL(c->here[i] && peer_joined(c->members[i].peer));
        ck_assert_uint_gt(c->n_joined[i], 1);
    }
    ck_assert_uint_gt(n_reports(), 500);
    cluster_end();
}
END_TEST

/* --- data ports -------------------------------------------------------------------------------------- */

static int listen_somewhere(uint16_t *ret_port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    *ret_port = ntohs(a.sin_port);
    return fd;
}

static void node_up(unsigned node, uint16_t port)
{
    struct node_report r = {.type = NODE_REPORT_EVENT, .model = "", .data_port = port};
    r.event.type = REFIT_EV_NODE_UP;
    ck_assert_int_eq(peer_report(c->members[node].peer, &r), 0);
    r.data_port = 0;
    r.model = "m";
    r.event.type = REFIT_EV_READY; /* waits behind it */
    ck_assert_int_eq(peer_report(c->members[node].peer, &r), 0);
}

START_TEST(a_data_port_that_can_be_reached_is_told_and_what_comes_after_keeps_its_place)
{
    uint16_t port;
    cluster_begin("", NULL);
    member_begin(1);
    UNTIL(c->members[1].n_welcomed == 1);
    int fd = listen_somewhere(&port);
    ck_assert_int_eq(listen(fd, 4), 0);
    node_up(1, port);
    UNTIL(c->n_reports[1] == 2);
    ck_assert_uint_eq(c->data_port[1], port);
    ck_assert_uint_eq(c->n_silent[1], 0);
    (void)close(fd);
    cluster_end();
}
END_TEST

START_TEST(a_data_port_that_nobody_reaches_is_refused_by_address_and_port)
{
    uint16_t port;
    char text[32];
    cluster_begin("", NULL);
    member_begin(1);
    UNTIL(c->members[1].n_welcomed == 1);
    int fd = listen_somewhere(&port); /* bound, not listening: refused */
    node_up(1, port);
    UNTIL(c->members[1].n_severed == 1);
    (void)snprintf(text, sizeof text, "127.0.0.1:%u", port);
    ck_assert_msg(strstr(c->members[1].severed, text) && strstr(c->members[1].severed, "n1") &&
                      strstr(c->members[1].severed, "refused"),
                  "%s", c->members[1].severed);
    ck_assert_uint_eq(c->n_reports[1], 0);
    (void)close(fd);
    cluster_end();
}
END_TEST

/* --- layouts ----------------------------------------------------------------------------------------- */

static struct layout *big_layout(unsigned n_tensors)
{
    struct buf b;
    struct layout *l = NULL;
    struct err e = {0};
    buf_init(&b);
    buf_printf(
        &b,
        "{\"name\": \"train\", \"ranks\": 4, \"meshes\": [{\"name\": \"tp\", \"shape\": [2, 2], "
        "\"ranks\": [3, 1, 0, 2], \"dim_names\": [\"dp\", \"tp\"]}], \"tensors\": ["
        "{\"name\": \"odd\", \"shape\": [10], \"dtype\": \"float32\", \"regions\": "
        "[{\"rank\": 0, \"offset\": [0], \"size\": [7]}, {\"rank\": 3, \"offset\": [7], "
        "\"size\": [3]}]}");
    for (unsigned i = 0; i < n_tensors; i++)
        buf_printf(
            &b,
            ", {\"name\": \"model.layers.%u.mlp.experts.down_proj.weight\", \"shape\": [%u, 64], "
            "\"dtype\": \"bfloat16\", \"mesh\": \"tp\", \"placements\": [\"Shard(-1)\", "
            "\"Replicate\"], \"shard_order\": [1, 0], \"cast\": true}",
            i, 4 + i % 7);
    buf_printf(&b, "]}");
    ck_assert_msg(layout_from_json((char *)b.data, b.n_bytes, &l, &e) == 0, "%s", e.text);
    ck_assert_int_eq(layout_digest(l), 0);
    buf_close(&b);
    return l;
}

static const struct layout *find_layout(void *arg, const uint8_t digest[16])
{
    (void)arg;
    return c->layout != NULL && memcmp(c->layout->digest, digest, 16) == 0 ? c->layout : NULL;
}

static void on_fetched(void *arg, int code, const char *text, struct layout *l)
{
    (void)arg;
    (void)text;
    c->fetch_code = code;
    c->fetched = l;
    c->n_fetched++;
}

START_TEST(a_layout_is_fetched_in_as_many_calls_as_it_takes)
{
    cluster_begin("", NULL);
    c->layout = big_layout(70000); /* some 7 MB */
    peer_set_layouts(c->coordinator, find_layout, NULL);
    member_begin(1);
    UNTIL(c->members[1].n_welcomed == 1);
    peer_fetch_layout(c->members[1].peer, c->layout->digest, on_fetched, NULL);
    UNTIL(c->n_fetched == 1);
    ck_assert_int_eq(c->fetch_code, 0);
    ck_assert_uint_eq(c->fetched->n_tensors, 70001);
    ck_assert_mem_eq(c->fetched->digest, c->layout->digest, 16);
    char *a = layout_to_json(c->layout), *b = layout_to_json(c->fetched);
    ck_assert_str_eq(a, b);
    mem_free(a);
    mem_free(b);
    cluster_end();
}
END_TEST

START_TEST(a_layout_that_nobody_has_is_told_so)
{
    cluster_begin("", NULL);
    member_begin(1);
    UNTIL(c->members[1].n_welcomed == 1);
    const uint8_t digest[16] = {1, 2};
    peer_fetch_layout(c->members[1].peer, digest, on_fetched, NULL);
    UNTIL(c->n_fetched == 1);
    ck_assert_int_eq(c->fetch_code, RS_ENOTFOUND);
    peer_fetch_layout(c->members[1].peer, digest, on_fetched, NULL);
    peer_stop(c->members[1].peer, on_done,
              NULL); /* what is under way ends with it, and before it */
    c->members[1].peer = NULL;
    UNTIL(c->n_done == 1);
    ck_assert_uint_eq(c->n_fetched, 2);
    cluster_end();
}
END_TEST

/* --- certificates ------------------------------------------------------------------------------------ */

static void certificates(const char *dir, const char *names)
{
    char command[256];
    (void)snprintf(command, sizeof command, "scripts/dev-certs %s %s >/dev/null", dir, names);
    int r = system(command);
    ck_assert_msg(WIFEXITED(r) && WEXITSTATUS(r) == 0, "%s", command);
}

static void remove_folder(const char *dir)
{
    char command[128];
    (void)snprintf(command, sizeof command, "rm -r %s", dir);
    ck_assert_int_eq(system(command), 0);
}

START_TEST(members_prove_who_they_are_by_the_nodes_name_in_their_certificate)
{
    char dir[] = "/tmp/peer-certs-XXXXXX", foreign[] = "/tmp/peer-certs-XXXXXX";
    ck_assert_ptr_nonnull(mkdtemp(dir));
    ck_assert_ptr_nonnull(mkdtemp(foreign));
    certificates(dir, "n0 n1 n2 n3");
    certificates(foreign, "n0 n3");
    cluster_begin(dir, NULL);
    member_begin(1);
    /* n2 has n1's certificate */
    memcpy(c->certificate[2], c->certificate[1], sizeof c->certificate[2]);
    memcpy(c->key[2], c->key[1], sizeof c->key[2]);
    member_begin(2);
    /* n3's is of another authority */
    (void)snprintf(c->ca, sizeof c->ca, "%s/ca.pem", foreign);
    (void)snprintf(c->certificate[3], sizeof c->certificate[3], "%s/n3.pem", foreign);
    (void)snprintf(c->key[3], sizeof c->key[3], "%s/n3.key", foreign);
    member_begin(3);
    UNTIL(c->members[1].n_welcomed == 1 && peer_n_refused(c->coordinator) >= 2 &&
          rpc_server_n_refused(c->server) >= 1);
    ck_assert_msg(strstr(peer_text(c->members[2].peer), "'n1'") &&
                      strstr(peer_text(c->members[2].peer), "n2"),
                  "%s", peer_text(c->members[2].peer));
    ck_assert(!c->here[2] && !c->here[3]);
    ck_assert(!peer_joined(c->members[3].peer));
    cluster_end();
    remove_folder(dir);
    remove_folder(foreign);
}
END_TEST

START_TEST(the_role_peer_names_other_certificates)
{
    char dir[] = "/tmp/peer-certs-XXXXXX";
    ck_assert_ptr_nonnull(mkdtemp(dir));
    certificates(dir, "n0 host-1 other");
    cluster_begin(dir, "host-*  n0");
    (void)snprintf(c->certificate[1], sizeof c->certificate[1], "%s/host-1.pem", dir);
    (void)snprintf(c->key[1], sizeof c->key[1], "%s/host-1.key", dir);
    (void)snprintf(c->certificate[2], sizeof c->certificate[2], "%s/other.pem", dir);
    (void)snprintf(c->key[2], sizeof c->key[2], "%s/other.key", dir);
    member_begin(1);
    member_begin(2);
    UNTIL(c->members[1].n_welcomed == 1 && peer_n_refused(c->coordinator) >= 1);
    UNTIL(strstr(peer_text(c->members[2].peer), "'other' does not have the role peer") != NULL);
    cluster_end();
    remove_folder(dir);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(three_members_join_and_long_messages_arrive_both_ways)                                       \
    X(a_server_that_ends_severs_its_members_and_they_come_back)                                    \
    X(over_grpc_too_nothing_of_an_earlier_session_is_handed_over_in_a_later_one)                   \
    X(a_data_port_that_can_be_reached_is_told_and_what_comes_after_keeps_its_place)                \
    X(a_data_port_that_nobody_reaches_is_refused_by_address_and_port)                              \
    X(a_layout_is_fetched_in_as_many_calls_as_it_takes)                                            \
    X(a_layout_that_nobody_has_is_told_so)                                                         \
    X(members_prove_who_they_are_by_the_nodes_name_in_their_certificate)                           \
    X(the_role_peer_names_other_certificates)

#include "test/lib/main.h"
