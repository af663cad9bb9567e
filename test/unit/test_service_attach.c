/* Attaches whose answer takes time: the coordinator is here, and keeps what it is told until the test lets it go on, as one on
 * another node would. The workers are sleepers: they need no memory and no data plane. */
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "memory/memory_socket.h"
#include "service/lease.h"
#include "service/peers.h"
#include "test/lib/coordinator_bed.h"

/* --- a client of the memory socket ---------------------------------------------------------------- */

static char folder[64];
static int client_fd;
static uint64_t client_id;
static bool memory_stopped;

static void on_client_ended(void *arg, struct memory_client *client)
{
    leases_client_ended(arg, client);
}

static void client_open(void)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    struct memory_record r = {
        .magic = MEMORY_SOCKET_MAGIC, .type = MEMORY_HELLO, .protocol = MEMORY_SOCKET_PROTOCOL};
    (void)snprintf(to.sun_path, sizeof to.sun_path, "%s.mem", w.config.socket);
    client_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(client_fd, (struct sockaddr *)&to, sizeof to), 0);
    ck_assert_int_eq(send(client_fd, &r, sizeof r, 0), (int)sizeof r);
    ssize_t n = -1;
    for (unsigned turn = 0; n < 0 && turn < WAIT_TURNS; turn++) {
        (void)uv_run(&w.loop, turn == 0 ? UV_RUN_ONCE : UV_RUN_NOWAIT);
        n = recv(client_fd, &r, sizeof r, MSG_DONTWAIT);
    }
    ck_assert_int_eq(n, (int)sizeof r);
    ck_assert_uint_eq(r.type, MEMORY_WELCOME);
    client_id = r.client;
}

static void attach_world_open(void)
{
    struct err e = {0};
    world_open();
    (void)snprintf(folder, sizeof folder, "/tmp/reshard-attach-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    (void)snprintf(w.config.socket, sizeof w.config.socket, "%s/d.sock", folder);
    w.service->session = w.service->sessions = 1;
    ck_assert_msg(memory_server_start(&w.loop, &w.config, 77, on_client_ended, w.service,
                                      &w.service->memory, &e) == 0,
                  "%s", e.text);
    client_open();
}

static void on_memory_stopped(void *arg)
{
    (void)arg;
    memory_stopped = true;
}

static void attach_world_close(void)
{
    memory_stopped = false;
    w.service->stopping = true;
    memory_server_stop(w.service->memory, on_memory_stopped, NULL);
    while (!memory_stopped)
        (void)uv_run(&w.loop, UV_RUN_ONCE);
    w.service->memory = NULL;
    leases_sweep(w.service);
    (void)close(client_fd);
    world_close();
    ck_assert_int_eq(rmdir(folder), 0);
}

/* --- streams -------------------------------------------------------------------------------------- */

struct stream {
    struct attach_stream st;
    unsigned n_attached, n_ended;
    struct attached attached;
    int code;
};

static void on_stream_attached(struct attach_stream *st, const struct attached *a)
{
    struct stream *x = container_of(st, struct stream, st);
    x->n_attached++;
    x->attached = *a;
}

static void on_stream_tell(struct attach_stream *st, enum refit_tell tell, uint64_t version,
                           uint64_t attempt, const char *reason)
{
    (void)st, (void)tell, (void)version, (void)attempt, (void)reason;
}

static void on_stream_end(struct attach_stream *st, bool evicted, int code, const char *text)
{
    struct stream *x = container_of(st, struct stream, st);
    (void)evicted, (void)text;
    x->n_ended++;
    x->code = code;
}

/* Of that side's rank 0. */
static int hello_of(struct stream *x, enum refit_side side, uint64_t resume)
{
    struct err e = {0};
    bool source = side == REFIT_SOURCE;
    const struct layout *layout = (source ? w.source : w.destination)->layout;
    struct attach_hello h = {.model = "m",
                             .side = side,
                             .layout_name = layout->name,
                             .layout_digest = layout->digest,
                             .receive = source ? REFIT_RECEIVE_NONE : REFIT_STAGED_RECEIVE,
                             .asleep = true,
                             .resume = resume};
    *x = (struct stream){
        .st = {.attached = on_stream_attached, .tell = on_stream_tell, .end = on_stream_end}};
    return op_attach_hello(w.service, client_id, &h, &x->st, &e);
}

static int hello(struct stream *x, uint64_t resume)
{
    return hello_of(x, REFIT_DESTINATION, resume);
}

static void attach_done(struct stream *x)
{
    struct err e = {0};
    ck_assert_msg(op_attach_done(&x->st, &e) == 0, "%s", e.text);
}

static void attach_sleeper(struct stream *x)
{
    ck_assert_int_eq(hello(x, 0), 0);
    attach_done(x);
    ck_assert_uint_eq(x->n_attached, 1);
}

/* From here on what the decider is told waits, and its answers with it. */
static struct decider *hold(void)
{
    struct decider *d;
    struct err e = {0};
    ck_assert_int_eq(decider_open(w.c, "m", &d, &e), 0);
    ck_assert(!d->stepping);
    d->stepping = true;
    return d;
}

static void let_go(struct decider *d)
{
    struct refit_event ev = {.type = REFIT_EV_TICK};
    d->stepping = false;
    ck_assert_int_eq(decider_event(d, &ev), 0);
    ck_assert(queue_empty(&d->later));
}

/* The coordinator is told of it, and the answer stays away. */
static void told(struct stream *x)
{
    struct lease *l = x->st.lease;
    struct node_report r = attached_of(OWN, 0);
    r.event.attached.worker = l->id;
    r.event.attached.asleep = true;
    r.event.cookie = waiter_add(w.service, &l->waiter) + 1000; /* nobody's */
    coordinator_report(w.c, OWN, &r);
}

static struct lease *only_lease(void)
{
    ck_assert_uint_eq(w.service->n_leases, 1);
    return container_of(w.service->leases.next, struct lease, in);
}

/* --- tests ---------------------------------------------------------------------------------------- */

/* Else the rank would be taken by a worker that nobody has, and that nothing ends. */
START_TEST(who_goes_before_the_answer_leaves_the_rank_free)
{
    struct stream first, second;
    attach_world_open();
    ck_assert_int_eq(hello(&first, 0), 0);
    told(&first);
    const struct decider *d = decider_find(w.c, "m");
    ck_assert_uint_eq(d->refit->n_workers, 1);
    op_attach_closed(&first.st, false);
    ck_assert_uint_eq(first.n_attached, 0);
    ck_assert_uint_eq(d->refit->n_workers, 0);
    ck_assert(queue_empty(&d->roster) && queue_empty(&w.service->waiters));
    attach_sleeper(&second);
    op_attach_closed(&second.st, true);
    attach_world_close();
}
END_TEST

START_TEST(a_sleeper_whose_waking_comes_to_nothing_is_known_again)
{
    struct stream asleep, waking;
    attach_world_open();
    attach_sleeper(&asleep);
    const uint64_t id = only_lease()->id;
    const struct decider *d = decider_find(w.c, "m");
    ck_assert_int_eq(hello(&waking, 0), 0);
    told(&waking);
    ck_assert_ptr_null(
        refit_find_worker(d->refit, id)); /* it has woken up, as far as is known there */
    op_attach_closed(&waking.st, false);
    const struct refit_worker *worker = refit_find_worker(d->refit, id);
    ck_assert(worker != NULL && !worker->gone && worker->asleep);
    ck_assert_uint_eq(d->refit->n_workers, 1);
    ck_assert_uint_eq(asleep.n_ended, 0);
    op_attach_closed(&asleep.st, true);
    attach_world_close();
}
END_TEST

START_TEST(who_resumes_twice_before_the_answer_gets_it_once_on_the_newer_stream)
{
    struct stream a, b, c;
    attach_world_open();
    attach_sleeper(&a);
    const uint64_t id = only_lease()->id;
    struct decider *d = hold();
    op_attach_closed(&a.st, false);
    ck_assert_int_eq(hello(&b, id), 0);
    attach_done(&b);
    ck_assert_int_eq(hello(&c, id), 0); /* the one before is half dead */
    ck_assert_uint_eq(b.n_ended, 1);
    let_go(d);
    ck_assert_uint_eq(c.n_attached, 0); /* it has not said that it is done */
    d = hold();
    attach_done(&c);
    let_go(d);
    ck_assert_uint_eq(b.n_attached, 0);
    ck_assert_uint_eq(c.n_attached, 1);
    ck_assert(queue_empty(&w.service->waiters));
    ck_assert_int_eq(only_lease()->life, LEASE_LIVE);
    op_attach_closed(&c.st, true);
    attach_world_close();
}
END_TEST

/* Nor does who answers the one mistake it for the other. */
START_TEST(a_new_session_does_not_take_the_answer_from_who_resumes)
{
    struct stream a, b;
    attach_world_open();
    attach_sleeper(&a);
    const uint64_t id = only_lease()->id;
    struct decider *d = hold();
    op_attach_closed(&a.st, false);
    ck_assert_int_eq(hello(&b, id), 0);
    attach_done(&b);
    leases_tell(w.service); /* all that this session has not been told of */
    let_go(d);
    ck_assert_uint_eq(b.n_attached, 1);
    ck_assert(queue_empty(&w.service->waiters));
    op_attach_closed(&b.st, true);
    attach_world_close();
}
END_TEST

START_TEST(an_answer_to_a_stream_that_has_broken_does_not_make_its_lease_live)
{
    struct stream a, b;
    attach_world_open();
    attach_sleeper(&a);
    const uint64_t id = only_lease()->id;
    struct decider *d = hold();
    op_attach_closed(&a.st, false);
    ck_assert_int_eq(hello(&b, id), 0);
    attach_done(&b);
    op_attach_closed(&b.st, false);
    let_go(d);
    ck_assert_uint_eq(b.n_attached, 0);
    ck_assert_int_eq(only_lease()->life, LEASE_GRACE);
    attach_world_close();
}
END_TEST

START_TEST(who_resumes_while_the_coordinator_is_away_keeps_its_lease)
{
    struct stream a, b, c;
    attach_world_open();
    attach_sleeper(&a);
    struct lease *l = only_lease();
    leases_tell(w.service);
    ck_assert_uint_eq(l->told_session, 1);
    op_attach_closed(&a.st, false);
    w.service->session = 0;
    ck_assert_int_eq(hello(&b, l->id), 0);
    attach_done(&b); /* it is away already */
    ck_assert_uint_eq(b.n_attached, 1);
    ck_assert_uint_eq(b.attached.worker, l->id);
    ck_assert_uint_eq(b.n_ended, 0);
    w.service->session = w.service->sessions = 2;
    struct decider *d = hold();
    ck_assert_int_eq(hello(&c, l->id), 0);
    attach_done(&c);
    ck_assert_uint_eq(c.n_attached, 0);
    node_severed(w.service, "its stream broke"); /* before it has answered */
    ck_assert_uint_eq(c.n_attached, 1);
    ck_assert_uint_eq(c.n_ended, 0);
    ck_assert_int_eq(l->life, LEASE_LIVE);
    w.service->session = w.service->sessions = 3;
    leases_tell(w.service);
    ck_assert_uint_eq(l->told_session, 3);
    let_go(d);
    ck_assert_uint_eq(c.n_attached, 1);
    op_attach_closed(&c.st, true);
    attach_world_close();
}
END_TEST

/* Else it would be attached, and no refit could be prepared with it. */
START_TEST(who_waits_for_its_answer_is_bound_to_a_new_data_plane_too)
{
    struct stream a;
    attach_world_open();
    ck_assert_int_eq(hello(&a, 0), 0);
    told(&a);
    struct lease *l = only_lease();
    l->asleep = false; /* one whose memory the last data plane had */
    leases_rebind(w.service);
    ck_assert(l->mapped); /* as far as it gets without one */
    leases_lost_data_plane(w.service);
    op_attach_closed(&a.st, true);
    attach_world_close();
}
END_TEST

/* --- publishing ----------------------------------------------------------------------------------- */

struct call {
    struct waiter waiter;
    unsigned n_done;
    int code;
};

static void on_call_done(struct waiter *waiter, const struct op_reply *reply)
{
    struct call *x = container_of(waiter, struct call, waiter);
    x->n_done++;
    x->code = reply->code;
}

static int publish_version(struct lease *l, struct call *x, uint64_t version,
                           const struct op_expected *expected)
{
    struct err e = {0};
    *x = (struct call){.waiter.done = on_call_done};
    return lease_publish(l, version, 0, NULL, expected, expected != NULL, &x->waiter, &e);
}

/* Its own try again after a broken session or connection must not be what it is refused for. */
START_TEST(who_publishes_again_after_a_broken_session_gets_the_answer_of_the_first_time)
{
    struct stream st;
    struct call first, second, third;
    const struct op_expected expected = {.tensor = "w", .fingerprint = 5};
    attach_world_open();
    attach_sleeper(&st);
    struct lease *l = only_lease();
    first = (struct call){.waiter.done = on_call_done};
    struct publication *p = l->publishing = mem_zalloc(sizeof *p); /* it is at the data plane */
    *p = (struct publication){.refs = 1, .version = 7};
    l->publish_cookie = waiter_add(w.service, &first.waiter);
    first.waiter.asked = true;
    ck_assert_int_eq(publish_version(l, &second, 7, NULL), RS_EPRECOND);
    node_severed(w.service, "its stream broke");
    ck_assert_int_eq(first.code, RS_EUNAVAIL);
    ck_assert_int_eq(publish_version(l, &second, 8, NULL), RS_EPRECOND);
    ck_assert_int_eq(publish_version(l, &second, 7, &expected), RS_EPRECOND);
    ck_assert_int_eq(publish_version(l, &second, 7, NULL), 0);
    ck_assert_uint_eq(second.n_done, 0);
    ck_assert_int_eq(publish_version(l, &third, 7, NULL), RS_EPRECOND);
    lease_publish_refuse(l, RS_EDATALOSS, "so it ends");
    ck_assert_uint_eq(first.n_done, 1);
    ck_assert_uint_eq(second.n_done, 1);
    ck_assert_int_eq(second.code, RS_EDATALOSS);
    ck_assert(queue_empty(&w.service->waiters));
    op_attach_closed(&st.st, true);
    attach_world_close();
}
END_TEST

/* Fingerprints need a data plane; without them its memory need not be there. */
static struct refit_worker *source_open(struct stream *st)
{
    attach_world_open();
    (void)snprintf(w.config.verify, sizeof w.config.verify, "off");
    ck_assert_int_eq(hello_of(st, REFIT_SOURCE, 0), 0);
    attach_done(st);
    struct lease *l = only_lease();
    struct refit_worker *worker = refit_find_worker(decider_find(w.c, "m")->refit, l->id);
    l->asleep = worker->asleep = false;
    return worker;
}

static void releases(struct lease *l, uint64_t version, uint32_t push)
{
    struct err e = {0};
    struct call x = {.waiter.done = on_call_done};
    ck_assert_int_eq(
        op_withdraw(w.service, client_id, l->id, version, push, false, "", &x.waiter, &e), 0);
    ck_assert_uint_eq(x.n_done, 1);
    ck_assert_int_eq(x.code, 0);
}

static void new_session(void)
{
    w.service->session = ++w.service->sessions;
    leases_tell(w.service);
}

/* It has been written since: nobody may read it, and no version is made of it. */
START_TEST(what_has_been_released_is_not_published_again_by_a_new_session)
{
    struct stream st;
    struct call x = {.waiter.done = on_call_done};
    struct err e = {0};
    const struct refit_worker *worker = source_open(&st);
    struct lease *l = only_lease();
    ck_assert_int_eq(lease_publish(l, 7, 1, NULL, NULL, 0, &x.waiter, &e), 0);
    ck_assert_uint_eq(x.n_done, 1);
    ck_assert_int_eq(x.code, 0);
    ck_assert(worker->published == 7 && !worker->released);
    new_session();
    ck_assert(worker->published == 7 && !worker->released);
    releases(l, 7, 1);
    ck_assert(worker->published == 7 && worker->released);
    new_session();
    ck_assert(worker->published == 7 && worker->released);
    ck_assert_uint_eq(l->published_before, 7); /* what a coordinator that starts hears of it */
    op_attach_closed(&st.st, true);
    attach_world_close();
}
END_TEST

/* Of the source's rank 0. */
static struct lease *attach_source_sleeper(struct stream *x)
{
    struct err e = {0};
    const struct layout *layout = w.source->layout;
    struct attach_hello h = {.model = "m",
                             .side = REFIT_SOURCE,
                             .layout_name = layout->name,
                             .layout_digest = layout->digest,
                             .receive = REFIT_RECEIVE_NONE,
                             .asleep = true};
    *x = (struct stream){
        .st = {.attached = on_stream_attached, .tell = on_stream_tell, .end = on_stream_end}};
    ck_assert_msg(op_attach_hello(w.service, client_id, &h, &x->st, &e) == 0, "%s", e.text);
    attach_done(x);
    ck_assert_uint_eq(x->n_attached, 1);
    return x->st.lease;
}

static int withdraw_version(const struct lease *l, struct call *x, const char *reason)
{
    struct err e = {0};
    *x = (struct call){.waiter.done = on_call_done};
    return op_withdraw(w.service, client_id, l->id, 1, 1, false, reason, &x->waiter, &e);
}

START_TEST(what_was_withdrawn_while_the_coordinator_was_away_is_told_when_it_is_back)
{
    struct stream st;
    struct call call;
    attach_world_open();
    node_comes(TRAINER);
    attach(TRAINER, 1);
    push(1, 1);
    struct lease *l = attach_source_sleeper(&st);
    w.service->session = 0;
    ck_assert_int_eq(withdraw_version(l, &call, "a slip"), RS_EUNAVAIL);
    ck_assert_int_eq(withdraw_version(l, &call, "its options are wrong"), RS_EUNAVAIL);
    ck_assert_uint_eq(count(TRAINER, NODE_ORDER_TELL), 0);
    w.service->session = w.service->sessions = 2;
    leases_tell(w.service);
    const struct got *g = expect(TRAINER, NODE_ORDER_TELL);
    ck_assert_int_eq((int)g->o.tell, REFIT_TELL_WITHDRAWN);
    ck_assert_msg(strstr(g->text, "its options are wrong") != NULL, "%s", g->text);
    op_attach_closed(&st.st, true);
    attach_world_close();
}
END_TEST

START_TEST(what_was_withdrawn_is_told_again_until_the_next_push)
{
    struct stream st;
    struct call call;
    struct err e = {0};
    attach_world_open();
    struct lease *l = attach_source_sleeper(&st);
    ck_assert_int_eq(withdraw_version(l, &call, "its options are wrong"), 0);
    l->asleep = false; /* what it publishes here the coordinator refuses all the same */
    (void)op_publish(w.service, client_id, l->id, 1, 1, NULL, NULL, 0, &call.waiter, &e);
    ck_assert_uint_eq(l->withdrawn.version, 1); /* of the same push */
    (void)op_publish(w.service, client_id, l->id, 1, 2, NULL, NULL, 0, &call.waiter, &e);
    ck_assert_uint_eq(l->withdrawn.version, 0);
    l->asleep = true;
    op_attach_closed(&st.st, true);
    attach_world_close();
}
END_TEST

#define TESTS(X)                                                                                   \
    X(who_goes_before_the_answer_leaves_the_rank_free)                                             \
    X(a_sleeper_whose_waking_comes_to_nothing_is_known_again)                                      \
    X(who_resumes_twice_before_the_answer_gets_it_once_on_the_newer_stream)                        \
    X(a_new_session_does_not_take_the_answer_from_who_resumes)                                     \
    X(an_answer_to_a_stream_that_has_broken_does_not_make_its_lease_live)                          \
    X(who_resumes_while_the_coordinator_is_away_keeps_its_lease)                                   \
    X(who_waits_for_its_answer_is_bound_to_a_new_data_plane_too)                                   \
    X(who_publishes_again_after_a_broken_session_gets_the_answer_of_the_first_time)                \
    X(what_has_been_released_is_not_published_again_by_a_new_session)                              \
    X(what_was_withdrawn_while_the_coordinator_was_away_is_told_when_it_is_back)                   \
    X(what_was_withdrawn_is_told_again_until_the_next_push)

#include "test/lib/main.h"
