/* The control process's end of the data plane. The child is this very program, which answers each request at once. */
#include <check.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "service/data_plane_link_private.h"
#include "service/part.h"

/* --- the child ------------------------------------------------------------------------------------ */

static uint32_t answer_of(uint32_t type)
{
    return type == WIRE_HELLO ? WIRE_READY : type == WIRE_ABORT ? WIRE_QUIESCED : WIRE_FAILED;
}

static void play_child(int fd)
{
    static struct wire_packet packet;
    struct wire_ready ready = {.how = "", .local = ""};
    while (wire_receive(fd, &packet, NULL) == 0 && packet.header.type != WIRE_STOP) {
        struct wire_header h = packet.header;
        bool hello = h.type == WIRE_HELLO;
        h.type = answer_of(h.type);
        (void)wire_send(fd, &h, hello ? &ready : NULL, hello ? sizeof ready : 0, NULL, 0, NULL, 0,
                        NULL);
        wire_packet_close(&packet);
    }
}

/* Before main: run as the link runs its child. */
__attribute__((constructor)) static void play_child_where_asked(int argc, char **argv)
{
    if (argc < 3 || strcmp(argv[1], "--data-plane") != 0)
        return;
    play_child(atoi(argv[2]));
    _exit(EXIT_SUCCESS);
}

/* --- the link ------------------------------------------------------------------------------------- */

static struct world {
    uv_loop_t loop;
    struct config config;
    struct data_plane_link *link;
    struct link_request request;
    int code;
    unsigned n_done;
} w;

static void on_ready(void *arg)
{
    (void)arg;
    uv_stop(&w.loop);
}

static void on_lost(void *arg, const char *why)
{
    (void)arg;
    ck_abort_msg("the data plane was lost: %s", why);
}

static void on_done(struct link_request *r, int code, struct wire_packet *packet,
                    const struct err *e)
{
    (void)r, (void)packet, (void)e;
    w.code = code;
    w.n_done++;
    uv_stop(&w.loop);
}

static void world_open(void)
{
    const struct link_events events = {.ready = on_ready, .lost = on_lost};
    struct err e = {0};
    w = (struct world){0};
    config_init(&w.config);
    ck_assert_int_eq(uv_loop_init(&w.loop), 0);
    ck_assert_msg(link_new(&w.loop, &w.config, &events, &w.link, &e) == 0, "%s", e.text);
    (void)uv_run(&w.loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(link_state(w.link), LINK_READY);
}

static void on_stopped(void *arg)
{
    (void)arg;
}

static void world_close(void)
{
    link_stop(w.link, on_stopped, NULL);
    (void)uv_run(&w.loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&w.loop), 0);
}

/* As after a SIGSTOP: the answer is there, and its time is over. */
static void stand_still_past(uint64_t deadline_ns)
{
    struct pollfd answered = {.fd = w.link->socket, .events = POLLIN};
    ck_assert_int_eq(poll(&answered, 1, -1), 1);
    while (clock_mono_ns() <= deadline_ns + 1000000)
        (void)poll(NULL, 0, 1);
}

static void submit(uint32_t timeout_ms)
{
    struct err e = {0};
    w.request = (struct link_request){.done = on_done};
    int r = link_submit(w.link, &w.request, (struct wire_header){.type = WIRE_ABORT}, NULL, 0, NULL,
                        0, NULL, 0, timeout_ms, &e);
    ck_assert_msg(r == 0, "%s", e.text);
}

START_TEST(an_answer_that_came_while_the_loop_stood_still_counts)
{
    world_open();
    submit(5);
    stand_still_past(w.request.deadline_ns);
    (void)uv_run(&w.loop, UV_RUN_DEFAULT);
    ck_assert_uint_eq(w.n_done, 1);
    ck_assert_int_eq(w.code, 0);
    ck_assert_int_eq(link_state(w.link), LINK_READY); /* it is not taken for hung */
    world_close();
}
END_TEST

/* A part of this node's whose attempt is at the data plane, by its own account. */
static struct part *part_open(struct service *s)
{
    struct model *m = mem_zalloc(sizeof *m);
    const uint8_t digest[16] = {0};
    struct member_update u;
    *s = (struct service){.loop = &w.loop, .config = &w.config, .link = w.link, .n_handles = 1};
    queue_init(&s->models);
    queue_init(&s->leases);
    m->service = s;
    m->name = mem_strdup("m");
    m->id = 1;
    m->part = part_new(m);
    struct member *member = &m->part->member;
    struct member_event joined = {.type = MEMBER_EV_JOINED, .session = 1, .coordinator = 1};
    struct member_event up = {.type = MEMBER_EV_DATA_PLANE_UP, .data_plane = 1};
    struct member_event prepare = {
        .type = MEMBER_EV_PREPARE, .session = 1, .version = 1, .attempt = 1, .digest = digest};
    member_step(member, &joined, &u);
    member_step(member, &up, &u);
    member_step(member, &prepare, &u);
    ck_assert_int_eq(member->state.state, MEMBER_PREPARING);
    m->part->now = mem_zalloc(sizeof *m->part->now);
    m->part->sent = true;
    return m->part;
}

START_TEST(a_data_plane_that_has_let_go_while_the_loop_stood_still_is_not_ended)
{
    struct service s;
    world_open();
    w.config.quiesce_timeout_ms = 5; /* and twice that for the request */
    struct part *p = part_open(&s);
    struct node_order o = {.type = NODE_ORDER_ABORT, .model = "m", .attempt = 1, .text = ""};
    s.session = 1;
    part_order(p, &o);
    s.session = 0; /* nobody is told */
    ck_assert_int_eq(p->member.state.state, MEMBER_ABORTING);
    stand_still_past(p->member.deadline_ns);
    while (p->member.state.state == MEMBER_ABORTING)
        (void)uv_run(&w.loop, UV_RUN_NOWAIT);
    ck_assert_int_eq(link_state(w.link), LINK_READY);
    part_close(p);
    world_close();
}
END_TEST

#define TESTS(X)                                                                                   \
    X(an_answer_that_came_while_the_loop_stood_still_counts)                                       \
    X(a_data_plane_that_has_let_go_while_the_loop_stood_still_is_not_ended)

#include "test/lib/main.h"
