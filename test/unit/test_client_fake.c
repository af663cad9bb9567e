/* libreshard against a daemon that moves no bytes (test/lib/fake_daemon.py): what it says, and what
 * it survives. */
#include <check.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "client/reshard.h"
#include "client/worker.h"
#include "test/lib/best_of.h"

extern char **environ;

static char folder[64], socket_path[96], log_path[96], gen_path[256];
static pid_t daemon_pid;

static const char layout_json[] =
    "{\"name\": \"l\", \"ranks\": 2, \"meshes\": [{\"name\": \"m\", \"shape\": [2], \"ranks\": [0, "
    "1]}],"
    " \"tensors\": [{\"name\": \"w\", \"shape\": [5, 4], \"dtype\": \"bfloat16\", \"mesh\": \"m\","
    " \"placements\": [\"Shard(0)\"]}, {\"name\": \"b\", \"shape\": [4], \"dtype\": \"float32\","
    " \"mesh\": \"m\", \"placements\": [\"Replicate\"]}]}";

static void daemon_start(void)
{
    char *argv[] = {(char *)(uintptr_t) "/usr/bin/python3",
                    (char *)(uintptr_t) "test/lib/fake_daemon.py",
                    (char *)(uintptr_t) "--socket",
                    socket_path,
                    (char *)(uintptr_t) "--gen",
                    gen_path,
                    (char *)(uintptr_t) "--log",
                    log_path,
                    NULL};
    ck_assert_int_eq(posix_spawn(&daemon_pid, argv[0], NULL, NULL, argv, environ), 0);
}

static void daemon_stop(void)
{
    (void)kill(daemon_pid, SIGKILL);
    (void)waitpid(daemon_pid, NULL, 0);
}

static void start(void)
{
    (void)snprintf(folder, sizeof folder, "/tmp/test_client.XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    (void)snprintf(socket_path, sizeof socket_path, "%s/d.sock", folder);
    (void)snprintf(log_path, sizeof log_path, "%s/log", folder);
    (void)snprintf(gen_path, sizeof gen_path, "%s/gen", folder);
    daemon_start();
}

static void stop(void)
{
    char command[128];
    daemon_stop();
    (void)snprintf(command, sizeof command, "rm -rf '%s'", folder);
    ck_assert_int_eq(system(command), 0);
}

/* The whole log, static. */
static const char *log_text(void)
{
    static char text[65536];
    FILE *f = fopen(log_path, "r");
    ck_assert_ptr_nonnull(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    (void)fclose(f);
    return text;
}

static unsigned log_count(const char *what)
{
    unsigned n = 0;
    for (const char *p = log_text(); (p = strstr(p, what)) != NULL; p++)
        n++;
    return n;
}

/* Until `what` stands in the log `n` times; a minute. */
static void await_log(const char *what, unsigned n)
{
    for (int i = 0; i < 6000 && log_count(what) < n; i++)
        (void)poll(NULL, 0, 10);
    ck_assert_msg(log_count(what) >= n, "no %u x %s in the log:\n%s", n, what, log_text());
}

#define OK(call)                                                                                   \
    do {                                                                                           \
        struct reshard_error ok_error;                                                             \
        int r_ = (call);                                                                           \
        ck_assert_msg(r_ == 0, "%s: %s: %s", #call, reshard_error_name(r_), ok_error.text);        \
    } while (0)

struct rank {
    struct reshard_client *client;
    struct reshard_layout *layout;
    struct reshard_segment *live, *shadow;
    struct reshard_worker *worker;
};

/* A staged destination, in the same segments. */
static void rank_wake(struct rank *r)
{
    struct reshard_piece *live = NULL, *shadow = NULL;
    size_t n = 0;
    uint64_t end = 0;
    OK(reshard_pieces_dense(r->layout, 0, r->live, 0, 0, &live, &n, &end, &ok_error));
    OK(reshard_pieces_dense(r->layout, 0, r->shadow, 0, 0, &shadow, &n, &end, &ok_error));
    OK(reshard_wake(r->worker, live, n, shadow, n, 0, &ok_error));
    reshard_pieces_free(live);
    reshard_pieces_free(shadow);
}

static void rank_attach(struct rank *r, const char *model, enum reshard_side side, bool automatic)
{
    struct reshard_piece *live = NULL, *shadow = NULL;
    size_t n = 0;
    uint64_t end = 0;
    OK(reshard_connect(socket_path, 60000, &r->client, &ok_error));
    OK(reshard_layout_from_json(layout_json, sizeof layout_json - 1, &r->layout, &ok_error));
    OK(reshard_pieces_dense(r->layout, 0, NULL, 0, 0, NULL, NULL, &end, &ok_error));
    OK(reshard_segment_new(r->client, end, 0, &r->live, &ok_error));
    OK(reshard_pieces_dense(r->layout, 0, r->live, 0, 0, &live, &n, &end, &ok_error));
    struct reshard_attach a = {.model = model,
                               .side = side,
                               .layout = r->layout,
                               .live = live,
                               .n_live = n,
                               .accept_automatically = automatic};
    if (side == RESHARD_DESTINATION) {
        OK(reshard_segment_new(r->client, end, 0, &r->shadow, &ok_error));
        OK(reshard_pieces_dense(r->layout, 0, r->shadow, 0, 0, &shadow, &n, &end, &ok_error));
        a.receive = RESHARD_RECEIVE_STAGED;
        a.shadow = shadow;
        a.n_shadow = n;
    }
    OK(reshard_attach(r->client, &a, 0, &r->worker, &ok_error));
    reshard_pieces_free(live);
    reshard_pieces_free(shadow);
}

static void rank_close(struct rank *r)
{
    reshard_close(r->client);
    reshard_layout_free(r->layout);
}

static struct reshard_event must_event(struct rank *r, enum reshard_event_type type)
{
    struct reshard_event ev;
    OK(reshard_next_event(r->worker, 60000, &ev, &ok_error));
    ck_assert_str_eq(reshard_event_name(ev.type), reshard_event_name(type));
    return ev;
}

START_TEST(a_version_goes_from_publish_to_commit_and_apply)
{
    struct rank trainer = {0}, rollout = {0};
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    rank_attach(&rollout, "m", RESHARD_DESTINATION, false);
    struct reshard_expected expected = {"w", UINT64_C(0xfedcba9876543210)};
    OK(reshard_publish(trainer.worker, 7, &expected, 1, 0, &ok_error));
    struct reshard_strategy_rule rule = {"*.weight", RESHARD_STRATEGY_DIRECT};
    struct reshard_policy policy = {"l", 1};
    struct reshard_submit options = {
        .rules = &rule, .n_rules = 1, .policy = &policy, .n_policy = 1, .request_id = "first"};
    uint64_t attempt = 0;
    OK(reshard_submit(trainer.client, "m", 7, &options, 0, &attempt, &ok_error));
    ck_assert_uint_eq(attempt, 1);
    OK(reshard_wait(trainer.client, "m", 7, RESHARD_UNTIL_RELEASED, NULL, NULL, 0, NULL,
                    &ok_error));
    ck_assert_uint_eq(must_event(&trainer, RESHARD_EVENT_SOURCE_RELEASED).version, 7);

    struct reshard_event ev = must_event(&rollout, RESHARD_EVENT_ACCEPT_REQUESTED);
    OK(reshard_accept(rollout.worker, ev.version, ev.attempt, 0, &ok_error));
    struct reshard_state state;
    OK(reshard_wait(trainer.client, "m", 7, RESHARD_UNTIL_COMMITTED, NULL, NULL, 0, &state,
                    &ok_error));
    ck_assert_int_eq((int)state.phase, RESHARD_COMMITTED);
    ck_assert_uint_eq(state.bytes.network, 25);
    ck_assert_uint_eq(must_event(&rollout, RESHARD_EVENT_COMMITTED).version, 7);
    struct reshard_committed committed;
    OK(reshard_committed(rollout.client, "m", 0, 0, rollout.worker, 0, &committed, &ok_error));
    ck_assert_uint_eq(committed.version, 7);
    uint64_t elapsed = 0;
    OK(reshard_apply(rollout.worker, 7, 0, &elapsed, &ok_error));
    ck_assert_uint_eq(elapsed, 5);
    struct reshard_worker_info info;
    reshard_worker_info(rollout.worker, &info);
    ck_assert_uint_eq(info.applied, 7);
    OK(reshard_mark(rollout.client, "m", 7, "first_request_served", rollout.worker, 0, &ok_error));
    await_log("\"name\": \"first_request_served\"", 1);
    ck_assert_uint_eq(log_count("\"expected\": {\"w\": 18364758544493064720}"), 1);
    ck_assert_uint_eq(log_count("\"rules\": [\"*.weight\"], \"policy\": {\"l\": 1}"), 1);
    ck_assert_uint_eq(log_count("\"tensors\": 2"), 2);
    rank_close(&trainer);
    rank_close(&rollout);
    await_log("\"call\": \"Detach\"", 2);
    stop();
}
END_TEST

START_TEST(a_restarted_daemon_gets_hello_segments_and_what_the_memory_holds_again)
{
    struct rank trainer = {0};
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    OK(reshard_publish(trainer.worker, 3, NULL, 0, 0, &ok_error));
    uint64_t before = reshard_incarnation(trainer.client);
    daemon_stop();
    daemon_start();
    /* The call itself waits for the daemon, for the hello and for the attach. */
    OK(reshard_publish(trainer.worker, 4, NULL, 0, 60000, &ok_error));
    struct reshard_event ev = must_event(&trainer, RESHARD_EVENT_REATTACHED);
    ck_assert_uint_eq(ev.version, 0);
    ck_assert_uint_eq(reshard_reconnects(trainer.client), 1);
    ck_assert(reshard_incarnation(trainer.client) != before);
    await_log("\"call\": \"Attach\", \"model\": \"m\", \"rank\": 0, \"pieces\": 2, \"live\": 0", 1);
    await_log("\"call\": \"Attach\", \"model\": \"m\", \"rank\": 0, \"pieces\": 2, \"live\": 3", 1);
    ck_assert_uint_eq(log_count("\"call\": \"memory\", \"kind\": 3"), 2);
    rank_close(&trainer);
    stop();
}
END_TEST

/* Until so many wait to be taken; five seconds. */
static void await_events(const struct rank *r, size_t n)
{
    size_t there = 0;
    for (int i = 0; i < 500 && there < n; i++) {
        pthread_mutex_lock(&r->worker->mutex);
        there = r->worker->n_events;
        pthread_mutex_unlock(&r->worker->mutex);
        if (there < n)
            (void)poll(NULL, 0, 10);
    }
    ck_assert_uint_eq(there, n);
}

START_TEST(a_publication_says_of_which_push_it_is_and_old_news_of_the_version_is_dropped)
{
    struct rank trainer = {0};
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    OK(reshard_publish(trainer.worker, 3, NULL, 0, 0, &ok_error));
    for (int i = 0; i < 2; i++) {
        reshard_push_begin(trainer.worker, 3);
        OK(reshard_publish(trainer.worker, 3, NULL, 0, 0, &ok_error));
    }
    OK(reshard_publish(trainer.worker, 3, NULL, 0, 0, &ok_error)); /* a retry */
    OK(reshard_mark(trainer.client, "m", 3, "refused", NULL, 0, &ok_error));
    struct reshard_event ev = must_event(&trainer, RESHARD_EVENT_WITHDRAWN);
    ck_assert_uint_eq(ev.version, 3);
    ck_assert_str_eq(ev.reason, "a peer was refused");
    /* Its release, and all of this, are about the push before: the next begins without them. */
    OK(reshard_mark(trainer.client, "m", 2, "refused", NULL, 0, &ok_error));
    OK(reshard_mark(trainer.client, "m", 3, "refused", NULL, 0, &ok_error));
    OK(reshard_mark(trainer.client, "m", 4, "refused", NULL, 0, &ok_error));
    (void)must_event(&trainer, RESHARD_EVENT_SOURCE_RELEASED); /* of 3, the first time */
    ck_assert_uint_eq(must_event(&trainer, RESHARD_EVENT_WITHDRAWN).version, 2);
    ck_assert_uint_eq(must_event(&trainer, RESHARD_EVENT_SOURCE_RELEASED).version, 2);
    await_events(&trainer, 4);
    reshard_push_begin(trainer.worker, 3);
    ck_assert_uint_eq(must_event(&trainer, RESHARD_EVENT_WITHDRAWN).version, 4);
    reshard_push_begin(trainer.worker, 4);
    OK(reshard_publish(trainer.worker, 4, NULL, 0, 0, &ok_error));
    await_log("\"version\": 4, \"expected\": {}, \"push\": 1", 1);
    reshard_push_begin(trainer.worker, 3); /* the fourth, whatever was pushed meanwhile */
    OK(reshard_publish(trainer.worker, 3, NULL, 0, 0, &ok_error));
    await_log("\"version\": 3, \"expected\": {}, \"push\": 4", 1);
    ck_assert_uint_eq(log_count("\"version\": 3, \"expected\": {}, \"push\": 0"), 1);
    ck_assert_uint_eq(log_count("\"version\": 3, \"expected\": {}, \"push\": 1"), 1);
    ck_assert_uint_eq(log_count("\"version\": 3, \"expected\": {}, \"push\": 2"), 2);
    rank_close(&trainer);
    stop();
}
END_TEST

/* Latin-1, a line separator, half a character: a daemon refuses them, and the others would hear nothing. */
START_TEST(a_reason_that_is_no_printable_text_is_withdrawn_with_as_a_daemon_takes_it)
{
    struct rank trainer = {0};
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    reshard_push_begin(trainer.worker, 3);
    OK(reshard_publish(trainer.worker, 3, NULL, 0, 0, &ok_error));
    OK(reshard_withdraw(trainer.worker, 3, "caf\xE9 au\xE2\x80\xA8lait, \xC3\xA9\tx\xE2\x80", 0,
                        &ok_error));
    await_log("\"reason\": \"caf? au?lait, \\u00e9 x?\"", 1);
    rank_close(&trainer);
    stop();
}
END_TEST

START_TEST(what_was_withdrawn_is_said_again_to_a_restarted_daemon_until_the_next_push)
{
    struct rank trainer = {0};
    char reason[600];
    memset(reason, 'r', sizeof reason);
    (void)snprintf(reason, 8,
                   "two\nlin"); /* not more than a daemon takes, on one line, whole characters */
    reason[7] = 'e';
    memcpy(reason + 511, "\xC3\xA9", 2); /* the 512th byte begins an é */
    reason[sizeof reason - 1] = '\0';
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    reshard_push_begin(trainer.worker, 3);
    OK(reshard_publish(trainer.worker, 3, NULL, 0, 0, &ok_error));
    OK(reshard_withdraw(trainer.worker, 3, reason, 0, &ok_error));
    await_log("\"call\": \"Withdraw\", \"version\": 3, \"push\": 1, \"reason\": \"two line", 1);
    ck_assert_uint_eq(log_count("\"again\": false"), 2); /* the attach, and this */
    ck_assert_ptr_null(strstr(log_text(), "\\u00e9"));   /* … which does not fit whole */
    (void)must_event(&trainer, RESHARD_EVENT_SOURCE_RELEASED);
    daemon_stop();
    daemon_start();
    await_log("\"call\": \"Withdraw\", \"version\": 3, \"push\": 1, \"reason\": \"two line", 2);
    (void)must_event(&trainer, RESHARD_EVENT_REATTACHED);
    await_log("\"again\": true", 2); /* the attach, and that */
    (void)must_event(&trainer, RESHARD_EVENT_SOURCE_RELEASED);
    reshard_push_begin(trainer.worker, 4);
    OK(reshard_publish(trainer.worker, 4, NULL, 0, 0, &ok_error));
    daemon_stop();
    daemon_start();
    await_log("\"live\": 4, \"shadow\": 0, \"segments\": 1, \"push\": 1, \"again\": true", 1);
    OK(reshard_publish(trainer.worker, 5, NULL, 0, 0,
                       &ok_error)); /* behind whatever an attach says */
    ck_assert_uint_eq(log_count("\"call\": \"Withdraw\""), 2);
    rank_close(&trainer);
    stop();
}
END_TEST

START_TEST(who_sleeps_does_not_hold_what_it_is_asked_to_accept)
{
    struct rank rollout = {0};
    struct reshard_worker_info info;
    start();
    rank_attach(&rollout, "m", RESHARD_DESTINATION, false);
    OK(reshard_mark(rollout.client, "m", 6, "late", NULL, 0, &ok_error));
    ck_assert_uint_eq(must_event(&rollout, RESHARD_EVENT_ACCEPT_REQUESTED).version, 6);
    reshard_worker_info(rollout.worker, &info);
    ck_assert_uint_eq(info.held, 6);
    OK(reshard_sleep(rollout.worker, 0, &ok_error));
    OK(reshard_mark(rollout.client, "m", 7, "late", NULL, 0, &ok_error));
    ck_assert_uint_eq(must_event(&rollout, RESHARD_EVENT_ACCEPT_REQUESTED).version, 7);
    reshard_worker_info(rollout.worker, &info);
    ck_assert_uint_eq(info.held, 0);
    rank_wake(&rollout); /* and does not claim it */
    await_log("\"call\": \"Attach\"", 2);
    ck_assert_uint_eq(log_count("\"shadow\": 0"), 2);
    rank_close(&rollout);
    stop();
}
END_TEST

START_TEST(a_slow_daemon_is_waited_for_and_gets_each_segment_once)
{
    struct rank trainer = {0};
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    daemon_stop();
    ck_assert_int_eq(setenv("FAKE_SLOW_MS", "400", 1), 0); /* the hello, then the segment */
    daemon_start();
    (void)must_event(&trainer, RESHARD_EVENT_REATTACHED);
    ck_assert_uint_eq(log_count("\"call\": \"memory\", \"kind\": 3"), 2);
    ck_assert_uint_eq(reshard_reconnects(trainer.client), 1);
    ck_assert_int_eq(unsetenv("FAKE_SLOW_MS"), 0);
    rank_close(&trainer);
    stop();
}
END_TEST

START_TEST(an_idle_worker_attaches_again_by_itself)
{
    struct rank rollout = {0};
    start();
    rank_attach(&rollout, "m", RESHARD_DESTINATION, true);
    daemon_stop();
    daemon_start();
    await_log("\"call\": \"Attach\"", 2);
    (void)must_event(&rollout, RESHARD_EVENT_REATTACHED);
    struct reshard_worker_info info;
    reshard_worker_info(rollout.worker, &info);
    ck_assert_uint_eq(info.reattached, 1);
    ck_assert(!info.evicted);
    rank_close(&rollout);
    stop();
}
END_TEST

START_TEST(a_call_that_is_answered_unavailable_is_tried_again)
{
    struct rank trainer = {0};
    start();
    rank_attach(&trainer, "busy", RESHARD_SOURCE, false);
    OK(reshard_publish(trainer.worker, 1, NULL, 0, 0, &ok_error));
    OK(reshard_submit(trainer.client, "busy", 1, NULL, 0, NULL, &ok_error));
    OK(reshard_wait(trainer.client, "busy", 1, RESHARD_UNTIL_COMMITTED, NULL, NULL, 0, NULL,
                    &ok_error));
    ck_assert_uint_eq(reshard_reconnects(trainer.client), 0);
    ck_assert_uint_eq(log_count("\"call\": \"Submit\""), 1);
    rank_close(&trainer);
    stop();
}
END_TEST

START_TEST(an_unknown_token_makes_a_new_hello_and_attach)
{
    struct rank trainer = {0};
    start();
    rank_attach(&trainer, "stranger", RESHARD_SOURCE, false);
    OK(reshard_publish(trainer.worker, 1, NULL, 0, 0, &ok_error));
    ck_assert_uint_eq(reshard_reconnects(trainer.client), 1);
    await_log("\"call\": \"memory\", \"kind\": 1", 2);
    ck_assert_uint_eq(log_count("\"call\": \"Publish\""), 1);
    rank_close(&trainer);
    stop();
}
END_TEST

static int watched(const struct reshard_committed *c, void *arg)
{
    uint64_t *last = arg;
    ck_assert_uint_gt(c->version, *last);
    *last = c->version;
    return c->version == 2;
}

static void *commit_two(void *arg)
{
    struct rank *trainer = arg;
    for (uint64_t v = 1; v <= 2; v++) {
        OK(reshard_publish(trainer->worker, v, NULL, 0, 0, &ok_error));
        OK(reshard_submit(trainer->client, "m", v, NULL, 0, NULL, &ok_error));
        OK(reshard_wait(trainer->client, "m", v, RESHARD_UNTIL_FINAL, NULL, NULL, 0, NULL,
                        &ok_error));
    }
    return NULL;
}

START_TEST(a_watch_and_a_long_poll_hear_of_a_commit_in_another_thread)
{
    struct rank trainer = {0};
    pthread_t thread;
    uint64_t last = 0;
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    ck_assert_int_eq(pthread_create(&thread, NULL, commit_two, &trainer), 0);
    struct reshard_committed committed;
    OK(reshard_committed(trainer.client, "m", 1, 10000, NULL, 0, &committed, &ok_error));
    ck_assert_uint_eq(committed.version, 2);
    OK(reshard_watch(trainer.client, "m", NULL, 10000, watched, &last, &ok_error));
    ck_assert_uint_eq(last, 2);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    rank_close(&trainer);
    stop();
}
END_TEST

START_TEST(an_aborted_version_ends_each_wait_with_its_reason)
{
    struct rank trainer = {0};
    start();
    rank_attach(&trainer, "reject", RESHARD_SOURCE, false);
    OK(reshard_submit(trainer.client, "reject", 1, NULL, 0, NULL, &ok_error));
    struct reshard_error e;
    struct reshard_state state;
    ck_assert_int_eq(reshard_wait(trainer.client, "reject", 1, RESHARD_UNTIL_RELEASED, NULL, NULL,
                                  0, &state, &e),
                     RESHARD_EABORTED);
    ck_assert_ptr_nonnull(strstr(e.text, "because the test wants it"));
    ck_assert_int_eq((int)state.phase, RESHARD_ABORTED);
    ck_assert_int_eq(
        reshard_wait(trainer.client, "reject", 1, RESHARD_UNTIL_FINAL, NULL, NULL, 0, NULL, &e), 0);
    ck_assert_str_eq(must_event(&trainer, RESHARD_EVENT_ABORTED).reason,
                     "because the test wants it");
    rank_close(&trainer);
    stop();
}
END_TEST

START_TEST(deadlines_name_what_was_missing)
{
    struct rank trainer = {0};
    struct reshard_error e;
    struct reshard_event ev;
    struct reshard_committed committed;
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    ck_assert_int_eq(reshard_submit(trainer.client, "m", 1, NULL, 0, NULL, &e), 0);
    /* A busy machine's daemon may need longer for its first word. */
    for (uint32_t ms = 300; ms < 60000; ms *= 2) {
        ck_assert_int_eq(
            reshard_wait(trainer.client, "m", 1, RESHARD_UNTIL_FINAL, NULL, NULL, ms, NULL, &e),
            RESHARD_EDEADLINE);
        if (strstr(e.text, "said nothing") == NULL)
            break;
    }
    ck_assert_str_eq(e.text,
                     "model 'm' version 1 is still submitted, waiting for rank 0 to publish");
    ck_assert_int_eq(reshard_next_event(trainer.worker, 50, &ev, &e), RESHARD_EDEADLINE);
    ck_assert_int_eq(reshard_committed(trainer.client, "m", 0, 50, NULL, 0, &committed, &e),
                     RESHARD_ENOTFOUND);
    daemon_stop();
    ck_assert_int_eq(reshard_submit(trainer.client, "m", 2, NULL, 400, NULL, &e), RESHARD_EUNAVAIL);
    ck_assert_int_eq(reshard_publish(trainer.worker, 2, NULL, 0, 400, &e), RESHARD_EUNAVAIL);
    daemon_start();
    rank_close(&trainer);
    stop();
}
END_TEST

static uint64_t detach_from_nobody(void *arg)
{
    struct rank trainer = {0};
    (void)arg;
    start();
    rank_attach(&trainer, "m", RESHARD_SOURCE, false);
    daemon_stop();
    (void)poll(NULL, 0, 400); /* its thread is looking for a daemon by now */
    uint64_t begun = clock_mono_ns();
    rank_close(&trainer);
    uint64_t took = clock_mono_ns() - begun;
    daemon_start();
    stop();
    return took;
}

START_TEST(detaching_does_not_wait_for_a_daemon_that_is_gone)
{
    in_time_once(detach_from_nobody, NULL, 4000000000U);
}
END_TEST

START_TEST(an_attach_that_runs_out_of_memory_says_so_and_leaves_nothing_behind)
{
    struct rank one = {0};
    struct reshard_piece *pieces = NULL;
    size_t n = 0;
    uint64_t end = 0;
    start();
    rank_attach(&one, "m", RESHARD_SOURCE, false);
    OK(reshard_pieces_dense(one.layout, 0, one.live, 0, 0, &pieces, &n, &end, &ok_error));
    unsigned refused = 0;
    for (long i = 1;; i++) {
        char model[16]; /* a new one each time: the fake may be late to see the last attach end */
        (void)snprintf(model, sizeof model, "m%ld", i);
        struct reshard_attach a = {.model = model,
                                   .side = RESHARD_SOURCE,
                                   .layout = one.layout,
                                   .live = pieces,
                                   .n_live = n};
        struct reshard_worker *w = NULL;
        struct reshard_error e;
        mem_fail_at(i);
        int r = reshard_attach(one.client, &a, 60000, &w, &e);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_msg(r == 0 || r == RESHARD_ENOMEM || r == RESHARD_EEXHAUSTED,
                      "allocation %ld: %d %s", i, r, e.text);
        refused += r != 0;
        reshard_detach(w);
        if (!struck) {
            ck_assert_int_eq(r, 0);
            break;
        }
    }
    ck_assert_uint_gt(refused, 10);
    reshard_pieces_free(pieces);
    rank_close(&one);
    stop();
}
END_TEST

START_TEST(refusals_come_back_with_code_and_text)
{
    struct rank one = {0}, two = {0};
    struct reshard_error e;
    start();
    rank_attach(&one, "m", RESHARD_SOURCE, false);
    OK(reshard_connect(socket_path, 60000, &two.client, &ok_error));
    struct reshard_attach a = {.model = "m", .side = RESHARD_SOURCE, .layout = one.layout};
    ck_assert_int_eq(reshard_attach(two.client, &a, 0, &two.worker, &e), RESHARD_EEXIST);
    ck_assert_str_eq(e.text, "attach model 'm' layout 'l' rank 0: rank 0 is attached");
    ck_assert_int_eq(reshard_segment_free(one.live, 0, &e), RESHARD_EPRECOND);
    ck_assert_str_eq(e.text, "segment: 1 workers are attached with it; detach them first");
    a.receive = RESHARD_RECEIVE_STAGED;
    ck_assert_int_eq(reshard_attach(two.client, &a, 0, &two.worker, &e), RESHARD_EINVAL);
    struct reshard_piece other = {
        .tensor = "w", .segment = one.live, .whole_shard = true, .dense = true};
    a = (struct reshard_attach){
        .model = "n", .side = RESHARD_SOURCE, .layout = one.layout, .live = &other, .n_live = 1};
    ck_assert_int_eq(reshard_attach(two.client, &a, 0, &two.worker, &e), RESHARD_EINVAL);
    ck_assert_str_eq(e.text, "binding of tensor 'w': its segment is not this client's");
    reshard_detach(one.worker);
    OK(reshard_segment_free(one.live, 0, &ok_error));
    await_log("\"call\": \"memory\", \"kind\": 5", 1);
    reshard_close(two.client);
    rank_close(&one);
    stop();
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_version_goes_from_publish_to_commit_and_apply)                                             \
    X(a_restarted_daemon_gets_hello_segments_and_what_the_memory_holds_again)                      \
    X(a_publication_says_of_which_push_it_is_and_old_news_of_the_version_is_dropped)               \
    X(a_reason_that_is_no_printable_text_is_withdrawn_with_as_a_daemon_takes_it)                   \
    X(what_was_withdrawn_is_said_again_to_a_restarted_daemon_until_the_next_push)                  \
    X(who_sleeps_does_not_hold_what_it_is_asked_to_accept)                                         \
    X(a_slow_daemon_is_waited_for_and_gets_each_segment_once)                                      \
    X(an_idle_worker_attaches_again_by_itself)                                                     \
    X(a_call_that_is_answered_unavailable_is_tried_again)                                          \
    X(an_unknown_token_makes_a_new_hello_and_attach)                                               \
    X(a_watch_and_a_long_poll_hear_of_a_commit_in_another_thread)                                  \
    X(an_aborted_version_ends_each_wait_with_its_reason)                                           \
    X(deadlines_name_what_was_missing)                                                             \
    X(detaching_does_not_wait_for_a_daemon_that_is_gone)                                           \
    X(an_attach_that_runs_out_of_memory_says_so_and_leaves_nothing_behind)                         \
    X(refusals_come_back_with_code_and_text)
#include "test/lib/main.h"
