/* Sessions between daemons over the in-memory twin: who may join, order, silence, leases, restarts, floods. */
#include <check.h>

#include "rpc/rpc_mem.h"
#include "test/lib/peer_world.h"

static void all_join(void)
{
    world_begin();
    for (unsigned n = 1; n < WORLD_NODES; n++)
        member_begin(n);
    world_step(300);
    for (unsigned n = 1; n < WORLD_NODES; n++)
        ck_assert_msg(world->members[n].joined, "%s", peer_text(world->members[n].peer));
}

START_TEST(members_join_and_the_coordinator_knows_what_they_are)
{
    all_join();
    struct peer_view v = world_look(2);
    ck_assert_int_eq(v.state, PEER_HERE);
    ck_assert_str_eq(v.name, "n2");
    ck_assert_uint_eq(v.incarnation, 201);
    ck_assert_uint_eq(v.n_devices, 2);
    ck_assert_str_eq(v.domain_of_device[0], "n2"); /* "" is its own name */
    ck_assert_str_eq(v.domain_of_device[1], "rack");
    ck_assert_str_eq(v.data_address, "127.0.0.1");
    ck_assert_str_eq(v.release, "1");
    ck_assert(!world->nodes[2].again);
    ck_assert_uint_eq(world->members[2].coordinator, 1);
    ck_assert(peer_joined(world->members[2].peer) && peer_is_coordinator(world->coordinator));
    ck_assert_str_eq(peer_text(world->members[2].peer), "joined");
    world_end();
}
END_TEST

START_TEST(reports_and_orders_arrive_in_order_and_once)
{
    all_join();
    for (unsigned i = 0; i < 500; i++)
        for (unsigned n = 1; n < WORLD_NODES; n++) {
            ck_assert_int_eq(world_report(n), 0);
            ck_assert_int_eq(world_order(n), 0);
            if (i % 100 == 7)
                world_turn();
        }
    world_turn();
    for (unsigned n = 1; n < WORLD_NODES; n++) {
        ck_assert_uint_eq(world->nodes[n].n_report, 500);
        ck_assert_uint_eq(world->members[n].n_order, 500);
    }
    world_end();
}
END_TEST

START_TEST(an_event_says_which_node_it_is_of)
{
    all_join();
    struct node_report r = {.type = NODE_REPORT_EVENT, .model = ""};
    r.event.type = REFIT_EV_NODE_UP;
    r.event.node.node = 77; /* the coordinator's to fill in */
    ck_assert_int_eq(peer_report(world->members[3].peer, &r), 0);
    world_turn();
    ck_assert_uint_eq(world->nodes[3].last.event.node.node, 3);
    ck_assert_int_eq(world->nodes[3].last.event.type, REFIT_EV_NODE_UP);
    world_end();
}
END_TEST

START_TEST(only_a_member_that_is_here_vouches_for_calls)
{
    all_join();
    char token[PEER_TOKEN_TEXT], other[PEER_TOKEN_TEXT];
    uint32_t node = 9;
    peer_token(world->members[2].peer, token);
    peer_token(world->members[3].peer, other);
    ck_assert_uint_eq(strlen(token), 32);
    ck_assert_str_ne(token, other);
    ck_assert(peer_vouches(world->coordinator, token, &node) && node == 2);
    ck_assert(peer_vouches(world->coordinator, other, &node) && node == 3);
    ck_assert(!peer_vouches(world->coordinator, NULL, &node));
    ck_assert(!peer_vouches(world->coordinator, "", &node));
    ck_assert(!peer_vouches(world->coordinator, "00000000000000000000000000000000", &node));
    member_kill(2);
    world_turn();
    ck_assert(!peer_vouches(world->coordinator, token, &node));
    world_end();
}
END_TEST

/* --- leases ------------------------------------------------------------------------------------------ */

START_TEST(a_lease_counts_from_when_the_answered_beat_was_sent)
{
    all_join();
    world_step(3000);
    struct member_world *m = &world->members[1];
    ck_assert_uint_le(m->lease_until_ns, world_now + LEASE_MS * WORLD_MS);
    ck_assert_uint_ge(m->lease_until_ns, world_now + (LEASE_MS - BEAT_MS - 200) * WORLD_MS);
    world->coordinator_frozen = true; /* beats go out, answers do not come */
    uint64_t frozen_at = world_now, last = m->lease_until_ns;
    world_step(2000);
    ck_assert_uint_eq(m->lease_until_ns, last);
    ck_assert(m->joined);
    world_step(1000);
    ck_assert(!m->joined);
    ck_assert_uint_le(last, frozen_at + LEASE_MS * WORLD_MS);
    ck_assert_msg(strstr(m->severed, "not answered"), "%s", m->severed);
    world->coordinator_frozen = false;
    world_end();
}
END_TEST

START_TEST(the_coordinators_own_data_plane_has_a_lease_as_long_as_its_loop_turns)
{
    world_begin();
    world_step(1000);
    ck_assert_uint_ge(world->own_lease_ns, world_now + (LEASE_MS - BEAT_MS) * WORLD_MS);
    ck_assert_uint_le(world->own_lease_ns, world_now + LEASE_MS * WORLD_MS);
    world_end();
}
END_TEST

START_TEST(a_member_that_says_nothing_is_silent_within_its_lease_and_lost_when_it_is_over)
{
    all_join();
    world_step(1000);
    struct node_world *n = &world->nodes[1];
    uint64_t before = world_now;
    world->members[1].frozen = true;
    while (n->n_silent == 0 && world_now < before + 60000 * WORLD_MS)
        world_step(50);
    ck_assert_uint_le(world_now - before, 3000 * WORLD_MS);
    ck_assert_uint_eq(n->n_lost, 0);
    ck_assert_int_eq(world_look(1).state, PEER_SILENT);
    ck_assert_int_eq(world_order(1), RS_EUNAVAIL);
    while (n->n_lost == 0 && world_now < before + 60000 * WORLD_MS)
        world_step(50);
    ck_assert_uint_ge(world_now, world->members[1].lease_until_ns);
    ck_assert_uint_le(world_now - before, (LEASE_MS + SLACK_MS + 200) * WORLD_MS);
    ck_assert_int_eq(world_look(1).state, PEER_AWAY);
    ck_assert_str_eq(n->why, "its lease is over");
    world_end();
}
END_TEST

START_TEST(a_coordinator_that_stood_still_reads_beats_before_it_calls_anyone_silent)
{
    all_join();
    world_step(1000);
    /* Everything stood still for 10 s (a debugger, a suspended machine): the coordinator's clock goes first. */
    world_now += 10000 * WORLD_MS;
    peer_tick(world->coordinator);
    for (unsigned n = 1; n < WORLD_NODES; n++)
        ck_assert_uint_eq(world->nodes[n].n_silent, 0);
    world_end();
}
END_TEST

/* --- breaks ------------------------------------------------------------------------------------------ */

START_TEST(a_broken_stream_is_silent_at_once_and_the_same_daemon_joins_again_when_it_is_quiet)
{
    all_join();
    struct member_world *m = &world->members[1];
    struct node_world *n = &world->nodes[1];
    rpc_link_mem_cut(m->link, "connection reset");
    world_turn();
    ck_assert_uint_eq(n->n_silent, 1);
    ck_assert_uint_eq(n->n_lost, 0);
    ck_assert(!m->joined);
    ck_assert_int_eq(world_report(1), RS_EUNAVAIL);
    rpc_link_mem_join(m->link, world->server);
    world_step(1000);
    ck_assert_uint_eq(n->n_joined, 1); /* its data plane still moves: it says nothing yet */
    ck_assert_msg(strstr(peer_text(m->peer), "not ready"), "%s", peer_text(m->peer));
    m->quiet = true;
    peer_ready(m->peer);
    world_step(300);
    ck_assert_uint_eq(n->n_lost, 1);
    ck_assert_uint_eq(n->n_joined, 2);
    ck_assert(n->again && m->joined);
    world_end();
}
END_TEST

START_TEST(a_member_that_was_restarted_faster_than_a_beat_is_another_one)
{
    all_join();
    struct node_world *n = &world->nodes[2];
    ck_assert_int_eq(world_report(2), 0);
    world_turn();
    member_kill(2);
    member_begin(2);
    world_step(100);
    ck_assert_uint_eq(n->n_silent, 1);
    ck_assert_uint_eq(n->n_lost, 1);
    ck_assert_uint_eq(n->n_joined, 2);
    ck_assert(!n->again);
    ck_assert_uint_eq(world_look(2).incarnation, 202);
    ck_assert_int_eq(world_report(2), 0);
    world_turn();
    ck_assert_uint_eq(n->n_report, 2);
    world_end();
}
END_TEST

START_TEST(members_join_a_coordinator_that_was_restarted)
{
    all_join();
    coordinator_end(true);
    world_step(200);
    for (unsigned n = 1; n < WORLD_NODES; n++)
        ck_assert_uint_eq(world->members[n].n_severed, 1);
    coordinator_begin();
    for (unsigned n = 1; n < WORLD_NODES; n++) {
        world->members[n].quiet = true;
        peer_ready(world->members[n].peer);
    }
    world_step(3000);
    for (unsigned n = 1; n < WORLD_NODES; n++) {
        ck_assert(world->members[n].joined);
        ck_assert_uint_eq(world->members[n].coordinator, 2);
        ck_assert(!world->nodes[n].again);
    }
    world_end();
}
END_TEST

START_TEST(a_coordinator_that_stops_says_so)
{
    all_join();
    coordinator_end(false);
    ck_assert_msg(strstr(world->members[1].severed, "stops") != NULL, "%s",
                  world->members[1].severed);
    world_end();
}
END_TEST

START_TEST(a_goodbye_spares_the_coordinator_the_wait)
{
    all_join();
    uint64_t before = world_now;
    member_end(1);
    world_turn();
    ck_assert_uint_eq(world->nodes[1].n_silent, 1);
    ck_assert_uint_eq(world->nodes[1].n_lost, 1);
    ck_assert_str_eq(world->nodes[1].why, "it has stopped");
    ck_assert_uint_lt(world_now - before, 1000 * WORLD_MS);
    ck_assert_int_eq(world_look(1).state, PEER_AWAY);
    world_end();
}
END_TEST

START_TEST(a_severed_member_is_told_later_and_why)
{
    all_join();
    peer_sever(world->coordinator, 1, "its plan differs");
    ck_assert_uint_eq(world->nodes[1].n_silent, 0); /* never inside */
    ck_assert_int_eq(world_order(1), RS_EUNAVAIL);
    world_step(100);
    ck_assert_uint_eq(world->nodes[1].n_silent, 1);
    ck_assert_str_eq(world->nodes[1].why, "its plan differs");
    ck_assert_msg(strstr(world->members[1].severed, "its plan differs"), "%s",
                  world->members[1].severed);
    world_end();
}
END_TEST

START_TEST(tries_back_off_to_two_seconds_and_start_small_again)
{
    world_begin();
    world->refuse = RS_EPRECOND;
    member_begin(1);
    world_step(20000);
    uint64_t refused = world_look(1).refused;
    ck_assert_uint_ge(refused, 10); /* at least one in 2 s */
    ck_assert_uint_le(refused, 26); /* 0.1, 0.2, 0.4 … 2 s, each at least half of it */
    ck_assert_uint_eq(peer_n_refused(world->coordinator), refused);
    ck_assert_msg(strstr(peer_text(world->members[1].peer), "the ledger is behind"), "%s",
                  peer_text(world->members[1].peer));
    world->refuse = 0;
    world_step(2200);
    ck_assert(world->members[1].joined);
    ck_assert_uint_eq(world->members[1].peer->member->backoff_ms, PEER_BACKOFF_MS);
    world_end();
}
END_TEST

/* --- who may join ------------------------------------------------------------------------------------ */

/* A JOIN that n1 would send, and what is wrong with it. */
static void join_refused(void (*spoil)(struct frame_join *j), int code, const char *const *words)
{
    struct peer_options o = world_options(0);
    struct frame_join j = {.name = "n1", .number = 1, .coordinator = "n0"};
    struct err e = {0};
    uint32_t node = 9;
    j.member = (struct peer_member){.incarnation = 5, .protocol = PEER_PROTOCOL, .release = "1"};
    (void)snprintf(j.member.environment, sizeof j.member.environment, "%s", o.environment);
    (void)snprintf(j.member.data_address, sizeof j.member.data_address, "127.0.0.2");
    ck_assert_msg(admit_check(&o, &j, &node, &e) == 0 && node == 1, "%s", e.text);
    spoil(&j);
    ck_assert_int_eq(admit_check(&o, &j, &node, &e), code);
    for (; *words != NULL; words++)
        ck_assert_msg(strstr(e.text, *words) != NULL, "no '%s' in: %s", *words, e.text);
}
#define JOIN_REFUSED(spoil, code, ...)                                                             \
    join_refused(spoil, code, (const char *const[]){__VA_ARGS__, NULL})

static void spoil_name(struct frame_join *j)
{
    j->name = "n9";
}
static void spoil_self(struct frame_join *j)
{
    j->name = "n0";
    j->number = 0;
}
static void spoil_number(struct frame_join *j)
{
    j->number = 2;
}
static void spoil_coordinator(struct frame_join *j)
{
    j->coordinator = "n3";
}
static void spoil_protocol(struct frame_join *j)
{
    j->member.protocol = 7;
}
static void spoil_incarnation(struct frame_join *j)
{
    j->member.incarnation = 0;
}
static void environment(struct frame_join *j, const char *text)
{
    (void)snprintf(j->member.environment, sizeof j->member.environment, "%s", text);
}
static void spoil_transport(struct frame_join *j)
{
    environment(j, "backend host, transport memory");
}
static void spoil_missing(struct frame_join *j)
{
    environment(j, "transport tcp");
}
static void spoil_more(struct frame_join *j)
{
    environment(j, "backend host, transport tcp, nccl 2.28");
}
static void address(struct frame_join *j, const char *text)
{
    (void)snprintf(j->member.data_address, sizeof j->member.data_address, "%s", text);
}
static void spoil_no_address(struct frame_join *j)
{
    address(j, "");
}
static void spoil_family(struct frame_join *j)
{
    address(j, "::1");
}
static void spoil_loopback(struct frame_join *j)
{
    address(j, "192.0.2.1");
}
static void spoil_any(struct frame_join *j)
{
    address(j, "0.0.0.0");
}

START_TEST(a_join_that_does_not_fit_is_refused_with_what_differs)
{
    JOIN_REFUSED(spoil_name, RS_ENOTFOUND, "'n9'", "[cluster] nodes", "n0");
    JOIN_REFUSED(spoil_self, RS_EEXIST, "n0", "--node");
    JOIN_REFUSED(spoil_number, RS_EPRECOND, "n1", "number 2", "number 1", "same order");
    JOIN_REFUSED(spoil_coordinator, RS_EPRECOND, "'n3'", "n0");
    JOIN_REFUSED(spoil_protocol, RS_EPRECOND, "protocol 7", "n0", "1");
    JOIN_REFUSED(spoil_incarnation, RS_EPROTO, "incarnation");
    JOIN_REFUSED(spoil_transport, RS_EPRECOND, "transport", "n1 has memory", "n0 has tcp");
    JOIN_REFUSED(spoil_missing, RS_EPRECOND, "backend", "n1 has none", "n0 has host");
    JOIN_REFUSED(spoil_more, RS_EPRECOND, "nccl", "n1 has 2.28", "n0 has none");
    JOIN_REFUSED(spoil_no_address, RS_EPRECOND, "n1", "data_address");
    /* CASES C09: a node that has IPv6 alone and one that has IPv4 alone can't exchange data. */
    JOIN_REFUSED(spoil_family, RS_EPRECOND, "n1", "::1", "IPv6", "127.0.0.1", "IPv4");
    JOIN_REFUSED(spoil_loopback, RS_EPRECOND, "n0", "127.0.0.1", "loopback");
    JOIN_REFUSED(spoil_any, RS_EPRECOND, "0.0.0.0");
}
END_TEST

/* A stream of the test's own, beside the members. */
static struct rpc_mem_call *stranger_open(void)
{
    struct rpc_mem_call *c = rpc_mem_open(world->server, "/reshard.v1.Peer/Join", NULL, UINT64_MAX);
    ck_assert_ptr_nonnull(c);
    return c;
}

static void stranger_send(struct rpc_mem_call *c, const struct frame *f)
{
    struct buf b;
    struct err e = {0};
    buf_init(&b);
    ck_assert_int_eq(frame_encode(f, true, world_now, &b, &e), 0);
    rpc_mem_send(c, b.data, b.n_bytes);
    rpc_mem_run(world->server);
    buf_close(&b);
}

/* How the call ended; messages before it are dropped. */
static int stranger_end(struct rpc_mem_call *c, struct err *e)
{
    for (;;) {
        void *data = NULL;
        size_t n;
        int r = rpc_mem_receive(c, &data, &n, e);
        mem_free(data);
        if (r != 0)
            return r;
    }
}

static struct frame join_frame(const char *name, uint32_t number, uint64_t incarnation)
{
    struct frame f = {.type = FRAME_JOIN};
    f.join.name = name;
    f.join.number = number;
    f.join.coordinator = "n0";
    f.join.member =
        (struct peer_member){.incarnation = incarnation, .protocol = PEER_PROTOCOL, .release = "1"};
    (void)snprintf(f.join.member.environment, sizeof f.join.member.environment, "%s",
                   "backend host, transport tcp");
    (void)snprintf(f.join.member.data_address, sizeof f.join.member.data_address, "127.0.0.1");
    return f;
}

START_TEST(a_name_that_a_live_daemon_has_is_not_given_to_another)
{
    all_join();
    struct frame f = join_frame("n1", 1, 4711);
    struct rpc_mem_call *c = stranger_open();
    struct err e = {0};
    stranger_send(c, &f);
    ck_assert_int_eq(stranger_end(c, &e), RS_EEXIST);
    ck_assert_msg(strstr(e.text, "n1") && strstr(e.text, "--node"), "%s", e.text);
    ck_assert(world->members[1].joined);
    ck_assert_uint_eq(world->nodes[1].n_joined, 1);
    rpc_mem_close(c);
    world_end();
}
END_TEST

START_TEST(a_second_stream_of_the_same_daemon_takes_the_place_of_the_first)
{
    all_join();
    struct frame f = join_frame("n1", 1, world->members[1].incarnation);
    struct rpc_mem_call *c = stranger_open();
    world->members[1].quiet = true; /* what a JOIN says */
    stranger_send(c, &f);
    ck_assert_uint_eq(world->nodes[1].n_silent, 1);
    ck_assert_uint_eq(world->nodes[1].n_lost, 1);
    ck_assert_uint_eq(world->nodes[1].n_joined, 2);
    ck_assert_int_eq(world_report(1), 0); /* of the first stream: said, and not handed over */
    world->members[1].n_sent = 0;
    unsigned before = world->nodes[1].n_report;
    world_turn();
    ck_assert_uint_eq(world->nodes[1].n_report, before);
    ck_assert(!world->members[1].joined);
    rpc_mem_close(c);
    world_end();
}
END_TEST

START_TEST(strangers_are_refused_and_counted_and_the_members_go_on)
{
    all_join();
    struct frame beat = {.type = FRAME_BEAT}, twice = join_frame("n9", 9, 1);
    struct err e = {0};
    struct rpc_mem_call *c = stranger_open();
    rpc_mem_send(c, "\xff\xff garbage", 10);
    rpc_mem_run(world->server);
    ck_assert_int_eq(stranger_end(c, &e), RS_EINVAL); /* RS_EPROTO's status */
    rpc_mem_close(c);
    c = stranger_open();
    stranger_send(c, &beat);
    ck_assert_int_eq(stranger_end(c, &e), RS_EINVAL);
    ck_assert_msg(strstr(e.text, "JOIN"), "%s", e.text);
    rpc_mem_close(c);
    c = stranger_open();
    stranger_send(c, &twice);
    ck_assert_int_eq(stranger_end(c, &e), RS_ENOTFOUND);
    rpc_mem_close(c);
    ck_assert_uint_eq(peer_n_refused(world->coordinator), 3);
    c = stranger_open(); /* says nothing at all */
    world_step(PEER_JOIN_MS + 200);
    ck_assert_int_eq(stranger_end(c, &e), RS_EDEADLINE);
    rpc_mem_close(c);
    ck_assert_uint_eq(peer_n_refused(world->coordinator), 4);
    for (unsigned n = 1; n < WORLD_NODES; n++)
        ck_assert(world->members[n].joined && world->nodes[n].n_joined == 1);
    world_end();
}
END_TEST

START_TEST(a_member_that_floods_is_cut_off)
{
    world_begin();
    struct frame f = join_frame("n1", 1, 4711), beat = {.type = FRAME_GOODBYE};
    struct err e = {0};
    struct rpc_mem_call *c = stranger_open();
    struct buf b;
    stranger_send(c, &f);
    ck_assert_uint_eq(world->nodes[1].n_joined, 1);
    beat.type = FRAME_REPORT;
    beat.report = (struct node_report){.type = NODE_REPORT_EVENT, .model = "m"};
    beat.report.event.type = REFIT_EV_READY;
    buf_init(&b);
    ck_assert_int_eq(frame_encode(&beat, true, world_now, &b, &e), 0);
    for (unsigned i = 0; i < PEER_FLOOD_BURST + 10; i++)
        rpc_mem_send(c, b.data, b.n_bytes);
    rpc_mem_run(world->server);
    ck_assert_int_eq(stranger_end(c, &e), RS_EEXHAUSTED);
    ck_assert_uint_eq(world->nodes[1].n_silent, 1);
    ck_assert_uint_lt(world->nodes[1].n_report, PEER_FLOOD_BURST);
    rpc_mem_close(c);
    world->members[1].quiet = true;
    buf_close(&b);
    world_end();
}
END_TEST

START_TEST(a_member_that_does_not_read_is_cut_off)
{
    all_join();
    world->members[1].frozen = true;
    int r = 0;
    unsigned n = 0;
    for (; r == 0 && n < 100000; n++)
        r = world_order(1);
    ck_assert_int_eq(r, RS_EEXHAUSTED);
    ck_assert_uint_ge(n, 60000); /* one moment's orders to thousands of workers fit */
    ck_assert_uint_eq(world->nodes[1].n_silent, 0); /* never inside */
    ck_assert_int_eq(world_order(1), RS_EUNAVAIL);
    world_step(50);
    ck_assert_uint_eq(world->nodes[1].n_silent, 1);
    ck_assert_int_eq(world_order(2), 0);
    world_end();
}
END_TEST

START_TEST(a_coordinator_that_answers_what_was_not_asked_is_left)
{
    all_join();
    struct member_world *m = &world->members[1];
    struct frame f = {.type = FRAME_BEAT, .beat = {.sequence = 999}};
    struct buf b;
    struct err e = {0};
    buf_init(&b);
    ck_assert_int_eq(frame_encode(&f, false, world_now, &b, &e), 0);
    struct rpc_call *call = world->coordinator->seats[1].session->call;
    ck_assert_int_eq(rpc_call_send(call, b.data, b.n_bytes), 0);
    world_turn();
    ck_assert(!m->joined);
    ck_assert_msg(strstr(m->severed, "not sent"), "%s", m->severed);
    buf_close(&b);
    world_end();
}
END_TEST

/* --- everything at once ------------------------------------------------------------------------------ */

/* Seeded faults in any order; the callbacks check the contract (peer_world.h). In the end all are there again. */
static void storm(uint64_t seed)
{
    uint64_t s = seed;
    unsigned joins = 0;
    world_begin();
    for (unsigned n = 1; n < WORLD_NODES; n++)
        member_begin(n);
    for (int i = 0; i < 400; i++) {
        unsigned n = 1 + (unsigned)rnd(&s, WORLD_MEMBERS);
        struct member_world *m = &world->members[n];
        switch (rnd(&s, 14)) {
        case 0:
            if (m->link != NULL && world->server != NULL)
                rpc_link_mem_cut(m->link, "cut");
            break;
        case 1:
            m->frozen = m->peer != NULL;
            break;
        case 2:
            m->frozen = false;
            break;
        case 3:
            if (m->peer != NULL)
                member_kill(n);
            else
                member_begin(n);
            break;
        case 4:
            if (rnd(&s, 4) == 0 && world->coordinator != NULL)
                coordinator_end(rnd(&s, 2) != 0);
            if (world->coordinator == NULL)
                coordinator_begin();
            break;
        case 5:
            world->coordinator_frozen = world->coordinator != NULL && rnd(&s, 3) == 0;
            break;
        case 6:
            if (world->coordinator != NULL)
                peer_sever(world->coordinator, n, "severed");
            break;
        default:
            for (uint64_t k = rnd(&s, 20); k > 0; k--) {
                if (m->peer != NULL)
                    (void)world_report(n);
                if (world->coordinator != NULL)
                    (void)world_order(n);
            }
        }
        for (unsigned k = 1; k < WORLD_NODES; k++) {
            struct member_world *o = &world->members[k];
            if (o->peer != NULL && !o->joined && !o->quiet && rnd(&s, 3) == 0) {
                o->quiet = true; /* QUIESCED */
                peer_ready(o->peer);
            }
            if (o->link != NULL && world->server != NULL && rnd(&s, 3) == 0 &&
                !o->peer->member->link_up)
                rpc_link_mem_join(o->link, world->server);
        }
        world_step(rnd(&s, 10) == 0 ? 4000 : 50 * rnd(&s, 12));
    }
    world->coordinator_frozen = false;
    if (world->coordinator == NULL)
        coordinator_begin();
    for (unsigned n = 1; n < WORLD_NODES; n++) {
        struct member_world *m = &world->members[n];
        m->frozen = false;
        if (m->peer == NULL)
            member_begin(n);
        world_turn();
        if (!m->joined)
            m->quiet = true;
        rpc_link_mem_join(m->link, world->server);
    }
    for (int i = 0; i < 200; i++) {
        world_step(50);
        for (unsigned n = 1; n < WORLD_NODES; n++)
            if (!world->members[n].joined) {
                world->members[n].quiet = true;
                peer_ready(world->members[n].peer);
            }
    }
    for (unsigned n = 1; n < WORLD_NODES; n++) {
        ck_assert_msg(world->members[n].joined && world->nodes[n].state == NODE_HERE,
                      "seed %" PRIu64 ": n%u: %s", seed, n, peer_text(world->members[n].peer));
        joins += world->nodes[n].n_joined;
    }
    ck_assert_uint_gt(joins, 10);
    world_end();
}

START_TEST(nothing_of_an_earlier_session_is_handed_over_in_a_later_one)
{
    for (uint64_t seed = 1; seed <= 60; seed++)
        storm(seed);
}
END_TEST

START_TEST(sessions_survive_the_failure_of_any_allocation)
{
    for (long i = 1; i < 400; i++) {
        world_begin();
        member_begin(1);
        mem_fail_at(i);
        world_step(100);
        if (world->members[1].joined) {
            (void)world_report(1);
            (void)world_order(1);
        }
        world_step(100);
        int struck = mem_failed();
        mem_fail_at(0);
        world->members[1].quiet = world->members[1].quiet || !world->members[1].joined;
        peer_ready(world->members[1].peer);
        for (int k = 0; k < 60 && !world->members[1].joined; k++) {
            world_step(100);
            world->members[1].quiet = world->members[1].quiet || !world->members[1].joined;
            peer_ready(world->members[1].peer);
        }
        ck_assert_msg(world->members[1].joined, "allocation %ld: %s", i,
                      peer_text(world->members[1].peer));
        world_end();
        if (!struck)
            return;
    }
    ck_abort_msg("it never ran out of allocations to fail");
}
END_TEST

#define TESTS(X)                                                                                   \
    X(members_join_and_the_coordinator_knows_what_they_are)                                        \
    X(reports_and_orders_arrive_in_order_and_once)                                                 \
    X(an_event_says_which_node_it_is_of)                                                           \
    X(only_a_member_that_is_here_vouches_for_calls)                                                \
    X(a_lease_counts_from_when_the_answered_beat_was_sent)                                         \
    X(the_coordinators_own_data_plane_has_a_lease_as_long_as_its_loop_turns)                       \
    X(a_member_that_says_nothing_is_silent_within_its_lease_and_lost_when_it_is_over)              \
    X(a_coordinator_that_stood_still_reads_beats_before_it_calls_anyone_silent)                    \
    X(a_broken_stream_is_silent_at_once_and_the_same_daemon_joins_again_when_it_is_quiet)          \
    X(a_member_that_was_restarted_faster_than_a_beat_is_another_one)                               \
    X(members_join_a_coordinator_that_was_restarted)                                               \
    X(a_coordinator_that_stops_says_so)                                                            \
    X(a_goodbye_spares_the_coordinator_the_wait)                                                   \
    X(a_severed_member_is_told_later_and_why)                                                      \
    X(tries_back_off_to_two_seconds_and_start_small_again)                                         \
    X(a_join_that_does_not_fit_is_refused_with_what_differs)                                       \
    X(a_name_that_a_live_daemon_has_is_not_given_to_another)                                       \
    X(a_second_stream_of_the_same_daemon_takes_the_place_of_the_first)                             \
    X(strangers_are_refused_and_counted_and_the_members_go_on)                                     \
    X(a_member_that_floods_is_cut_off)                                                             \
    X(a_member_that_does_not_read_is_cut_off)                                                      \
    X(a_coordinator_that_answers_what_was_not_asked_is_left)                                       \
    X(nothing_of_an_earlier_session_is_handed_over_in_a_later_one)                                 \
    X(sessions_survive_the_failure_of_any_allocation)

#include "test/lib/main.h"
