/* libreshard against the real daemon: a trainer and engines in one process, each with a client of its own.
 *
 * RESHARD_BUILD (default: build) is the folder of reshardd; RESHARD_SLOW stretches deadlines. Each test has its own
 * daemon in a folder of its own, ended by its pid. Values follow from (element, version); every one is compared. */
#include <check.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/reshard.h"

extern char **environ;

enum { ROWS = 96, COLUMNS = 40, N_SOURCES = 3, N_DESTINATIONS = 4, WAIT_MS = 20000 };

/* Two tensors that engines keep interleaved by rows, and one by itself. Sources: dim 0 over three (32 rows each; the
 * bias of 41 elements unevenly: 14, 14, 13). Destinations: two instances of two, columns cut. */
#define TENSOR(name, placements)                                                                   \
    "{\"name\": \"" name "\", \"shape\": [96, 40], \"dtype\": \"bfloat16\", \"mesh\": \"m\", "     \
    "\"placements\": " placements "}"
static const char source_json[] =
    "{\"name\": \"trainer\", \"ranks\": 3, \"meshes\": [{\"name\": \"m\", \"shape\": [3], "
    "\"ranks\": [0, 1, 2]}],"
    " \"tensors\": [" TENSOR("gate", "[\"Shard(0)\"]") ", " TENSOR(
        "up", "[\"Shard(0)\"]") ","
                                " {\"name\": \"bias\", \"shape\": [41], \"dtype\": \"float32\", "
                                "\"mesh\": \"m\", \"placements\": [\"Shard(0)\"]}]}";
static const char destination_json[] =
    "{\"name\": \"rollout\", \"ranks\": 4, \"instances\": [[0, 1], [2, 3]],"
    " \"meshes\": [{\"name\": \"m\", \"shape\": [2, 2], \"ranks\": [0, 1, 2, 3]}],"
    " \"tensors\": [" TENSOR("gate", "[\"Replicate\", \"Shard(1)\"]") ", " TENSOR(
        "up",
        "[\"Replicate\", \"Shard(1)\"]") ","
                                         " {\"name\": \"bias\", \"shape\": [41], \"dtype\": "
                                         "\"float32\", \"mesh\": \"m\","
                                         "  \"placements\": [\"Replicate\", \"Replicate\"]}]}";

#define OK(call)                                                                                   \
    do {                                                                                           \
        struct reshard_error ok_error;                                                             \
        int r_ = (call);                                                                           \
        ck_assert_msg(r_ == 0, "%s: %s: %s", #call, reshard_error_name(r_), ok_error.text);        \
    } while (0)

/* ---- the daemon ---- */

struct world {
    char folder[64], socket[96], config[96], log[96];
    pid_t daemon;
};

static uint32_t slow_ms(uint32_t ms)
{
    const char *slow = getenv("RESHARD_SLOW");
    return slow != NULL ? (uint32_t)(ms * strtod(slow, NULL)) : ms;
}

static void daemon_start(struct world *w)
{
    const char *build = getenv("RESHARD_BUILD");
    char program[256];
    (void)snprintf(program, sizeof program, "%s/reshardd", build != NULL ? build : "build");
    char option[] = "--config";
    char *argv[] = {program, option, w->config, NULL};
    posix_spawn_file_actions_t actions;
    ck_assert_int_eq(posix_spawn_file_actions_init(&actions), 0);
    ck_assert_int_eq(posix_spawn_file_actions_addopen(&actions, 2, w->log, 02102, 0600), 0);
    ck_assert_msg(posix_spawn(&w->daemon, program, &actions, NULL, argv, environ) == 0, "no %s",
                  program);
    (void)posix_spawn_file_actions_destroy(&actions);
}

/* Gives how it ended, as waitpid does. */
static int daemon_kill(struct world *w, int signal_number)
{
    int status = -1;
    ck_assert_int_eq(kill(w->daemon, signal_number), 0);
    ck_assert_int_eq(waitpid(w->daemon, &status, 0), w->daemon);
    return status;
}

static void world_start(struct world *w)
{
    *w = (struct world){.folder = "/tmp/test_libreshard.XXXXXX"};
    ck_assert_ptr_nonnull(mkdtemp(w->folder));
    (void)snprintf(w->socket, sizeof w->socket, "%s/d.sock", w->folder);
    (void)snprintf(w->config, sizeof w->config, "%s/d.conf", w->folder);
    (void)snprintf(w->log, sizeof w->log, "%s/log", w->folder);
    FILE *f = fopen(w->config, "w");
    ck_assert_ptr_nonnull(f);
    /* On the stand-in for GPUs: `backends.py run` has put its libraries on the library path. */
    const char *backend = getenv("RESHARD_BACKEND");
    bool standin = backend != NULL && strcmp(backend, "standin") == 0;
    (void)fprintf(
        f,
        "[daemon]\nnode = n0\nsocket = %s\nstate_dir = %s\n"
        "[devices]\n%sdevices = 8\ndomains = 0-3 4-7\nchunk_bytes = 4096\nring_slots = 1\n"
        "[refit]\nleast_piece_bytes = 64\n[clients]\ngrace_ms = 2000\n",
        w->socket, w->folder, standin ? "backend = cuda\ntransport = nccl\n" : "");
    ck_assert_int_eq(fclose(f), 0);
    daemon_start(w);
}

static void world_stop(struct world *w)
{
    char command[128];
    ck_assert_int_eq(daemon_kill(w, SIGTERM), 0); /* a sanitizer's findings, too, would show here */
    (void)snprintf(command, sizeof command, "rm -rf '%s'", w->folder);
    ck_assert_int_eq(system(command), 0);
}

/* ---- ranks ---- */

struct rank {
    struct reshard_client *client;
    struct reshard_layout *layout;
    struct reshard_segment *live, *shadow;
    struct reshard_worker *worker;
    struct reshard_piece pieces[3];
    size_t n_pieces;
    bool source;
};

static uint32_t value(const char *tensor, uint64_t number, uint64_t version)
{
    return (uint32_t)((number + 1) * 2654435761U + version * 40503U +
                      (uint64_t)(uint8_t)tensor[0] * 977U) >>
           9;
}

/* Writes or compares every element of a piece, one by one. */
static void each_element(const struct rank *r, const struct reshard_piece *p, uint64_t version,
                         bool write)
{
    struct reshard_tensor t = {0};
    ck_assert_int_eq(
        reshard_layout_tensor(r->layout, (uint32_t)reshard_layout_find(r->layout, p->tensor), &t),
        0);
    uint64_t n_columns = t.n_dims == 2 ? p->box.size[1] : 1;
    for (uint64_t i = 0; i < p->box.size[0]; i++)
        for (uint64_t k = 0; k < n_columns; k++) {
            uint64_t number = p->box.offset[0] + i;
            if (t.n_dims == 2)
                number = number * t.shape[1] + p->box.offset[1] + k;
            char *at = (char *)reshard_segment_data(r->live) + p->offset_bytes +
                       (int64_t)i * p->stride_bytes[0] + (int64_t)k * p->stride_bytes[1];
            uint32_t want = value(p->tensor, number, version), got = 0;
            if (t.element_bytes == 2)
                want &= 0xffff;
            if (write)
                memcpy(at, &want, t.element_bytes);
            memcpy(&got, at, t.element_bytes);
            ck_assert_msg(got == want, "tensor %s element %llu version %llu: %x, not %x", p->tensor,
                          (unsigned long long)number, (unsigned long long)version, got, want);
        }
}

static void each_piece(const struct rank *r, uint64_t version, bool write)
{
    for (size_t i = 0; i < r->n_pieces; i++)
        each_element(r, &r->pieces[i], version, write);
}

/* Sources: dense, one after the other. Destinations: rows of gate and up in turn. */
static uint64_t arrange(struct rank *r, uint32_t rank, bool source)
{
    static const char *const names[] = {"bias", "gate", "up"};
    uint64_t end = 0;
    for (size_t i = 0; i < 3; i++) {
        struct reshard_piece *p = &r->pieces[r->n_pieces];
        *p = (struct reshard_piece){.tensor = names[i]};
        int64_t t = reshard_layout_find(r->layout, names[i]);
        ck_assert_uint_eq(reshard_layout_shards(r->layout, (uint32_t)t, rank, &p->box, 1), 1);
        int64_t row = i == 0 ? 4 : (int64_t)(2 * p->box.size[1]);
        p->stride_bytes[0] = !source && i > 0 ? 2 * row : row;
        p->stride_bytes[1] = i == 0 ? 0 : 2;
        p->offset_bytes = end;
        if (!source && i == 1)
            end += (uint64_t)row; /* up's first row lies right behind gate's */
        else
            end = (p->offset_bytes + (uint64_t)p->stride_bytes[0] * p->box.size[0] + 63) &
                  ~(uint64_t)63;
        r->n_pieces++;
    }
    return end;
}

static int try_attach(struct rank *r, uint32_t rank, bool source, bool in_place,
                      struct reshard_error *e)
{
    struct reshard_piece shadow[3];
    struct reshard_attach a = {.model = "m",
                               .side = source ? RESHARD_SOURCE : RESHARD_DESTINATION,
                               .layout = r->layout,
                               .rank = rank,
                               .device = source ? rank : 4 + rank,
                               .live = r->pieces,
                               .n_live = r->n_pieces};
    for (size_t i = 0; i < r->n_pieces; i++)
        r->pieces[i].segment = r->live;
    if (!source)
        a.receive = in_place ? RESHARD_RECEIVE_IN_PLACE : RESHARD_RECEIVE_STAGED;
    if (!source && !in_place) {
        memcpy(shadow, r->pieces, sizeof shadow);
        for (size_t i = 0; i < r->n_pieces; i++)
            shadow[i].segment = r->shadow;
        a.shadow = shadow;
        a.n_shadow = r->n_pieces;
    }
    return reshard_attach(r->client, &a, slow_ms(WAIT_MS), &r->worker, e);
}

static void rank_start(struct world *w, struct rank *r, uint32_t rank, bool source, bool in_place)
{
    const char *json = source ? source_json : destination_json;
    *r = (struct rank){.source = source};
    OK(reshard_layout_from_json(json, strlen(json), &r->layout, &ok_error));
    OK(reshard_connect(w->socket, slow_ms(WAIT_MS), &r->client, &ok_error));
    uint64_t bytes = arrange(r, rank, source);
    OK(reshard_segment_new(r->client, bytes, 0, &r->live, &ok_error));
    if (!source && !in_place)
        OK(reshard_segment_new(r->client, bytes, 0, &r->shadow, &ok_error));
    OK(try_attach(r, rank, source, in_place, &ok_error));
}

static void rank_stop(struct rank *r)
{
    reshard_close(r->client);
    reshard_layout_free(r->layout);
}

struct fleet {
    struct rank sources[N_SOURCES], destinations[N_DESTINATIONS];
};

/* Instance 0 receives staged, instance 1 in place. */
static void fleet_start(struct world *w, struct fleet *f)
{
    for (uint32_t i = 0; i < N_DESTINATIONS; i++)
        rank_start(w, &f->destinations[i], i, false, i >= 2);
    for (uint32_t i = 0; i < N_SOURCES; i++)
        rank_start(w, &f->sources[i], i, true, false);
}

static void fleet_stop(struct fleet *f)
{
    for (uint32_t i = 0; i < N_SOURCES; i++)
        rank_stop(&f->sources[i]);
    for (uint32_t i = 0; i < N_DESTINATIONS; i++)
        rank_stop(&f->destinations[i]);
}

/* The next event of that type for that version; others on the way are passed over. */
static struct reshard_event await(struct rank *r, enum reshard_event_type type, uint64_t version)
{
    struct reshard_event ev;
    do
        OK(reshard_next_event(r->worker, slow_ms(WAIT_MS), &ev, &ok_error));
    while (ev.type != type || ev.version != version);
    return ev;
}

static void publish_all(struct fleet *f, uint64_t version)
{
    for (uint32_t i = 0; i < N_SOURCES; i++) {
        each_piece(&f->sources[i], version, true);
        OK(reshard_publish(f->sources[i].worker, version, NULL, 0, 0, &ok_error));
    }
}

static void accept_all(struct fleet *f, uint64_t version)
{
    for (uint32_t i = 2; i < N_DESTINATIONS; i++) {
        (void)await(&f->destinations[i], RESHARD_EVENT_READY_REQUESTED, version);
        OK(reshard_ready(f->destinations[i].worker, version, 0, &ok_error));
    }
    for (uint32_t i = 0; i < N_DESTINATIONS; i++) {
        struct reshard_event ev =
            await(&f->destinations[i], RESHARD_EVENT_ACCEPT_REQUESTED, version);
        OK(reshard_accept(f->destinations[i].worker, version, ev.attempt, 0, &ok_error));
    }
}

static void take_all(struct fleet *f, uint64_t version)
{
    for (uint32_t i = 0; i < N_DESTINATIONS; i++) {
        (void)await(&f->destinations[i], RESHARD_EVENT_COMMITTED, version);
        if (i < 2)
            OK(reshard_apply(f->destinations[i].worker, version, 0, NULL, &ok_error));
        each_piece(&f->destinations[i], version, false);
        struct reshard_worker_info info;
        reshard_worker_info(f->destinations[i].worker, &info);
        ck_assert_uint_eq(info.applied, version);
    }
}

static struct reshard_state refit(struct fleet *f, uint64_t version)
{
    struct reshard_state state;
    publish_all(f, version);
    OK(reshard_submit(f->sources[0].client, "m", version, NULL, 0, NULL, &ok_error));
    accept_all(f, version);
    OK(reshard_wait(f->sources[0].client, "m", version, RESHARD_UNTIL_COMMITTED, NULL, NULL,
                    slow_ms(WAIT_MS), &state, &ok_error));
    for (uint32_t i = 0; i < N_SOURCES; i++)
        (void)await(&f->sources[i], RESHARD_EVENT_SOURCE_RELEASED, version);
    take_all(f, version);
    return state;
}

/* ---- tests ---- */

START_TEST(versions_arrive_in_interleaved_memory_staged_and_in_place)
{
    struct world w;
    struct fleet f;
    world_start(&w);
    fleet_start(&w, &f);
    for (uint64_t v = 1; v <= 3; v++) {
        struct reshard_state s = refit(&f, v);
        /* Unique: 2 x 96 x 40 x 2 + 41 x 4 bytes, all missing in the inference domain; bias lands four times. */
        ck_assert_uint_eq(s.bytes.network_minimum, 2 * 96 * 40 * 2 + 41 * 4);
        ck_assert_uint_eq(s.bytes.network, s.bytes.network_minimum);
        ck_assert_uint_eq(s.bytes.landed, 2 * (2 * 96 * 40 * 2) + 4 * 41 * 4);
    }
    struct reshard_committed c;
    OK(reshard_committed(f.destinations[3].client, "m", 0, 0, f.destinations[3].worker, 0, &c,
                         &ok_error));
    ck_assert_uint_eq(c.version, 3);
    ck_assert_uint_eq(c.applied, 3);
    fleet_stop(&f);
    world_stop(&w);
}
END_TEST

START_TEST(a_killed_daemon_comes_back_and_the_next_version_arrives)
{
    struct world w;
    struct fleet f;
    world_start(&w);
    fleet_start(&w, &f);
    (void)refit(&f, 1);
    (void)daemon_kill(&w, SIGKILL);
    daemon_start(&w);
    for (uint32_t i = 0; i < N_DESTINATIONS; i++) {
        struct reshard_worker_info info;
        struct reshard_event ev = await(&f.destinations[i], RESHARD_EVENT_REATTACHED, 1);
        ck_assert_uint_eq(ev.version, 1); /* the commit outlived the daemon */
        reshard_worker_info(f.destinations[i].worker, &info);
        ck_assert_uint_eq(info.reattached, 1);
        ck_assert_uint_eq(info.applied, 1); /* claimed, fingerprinted, believed */
    }
    (void)refit(&f, 2);
    ck_assert_uint_eq(reshard_reconnects(f.sources[0].client), 1);
    fleet_stop(&f);
    world_stop(&w);
}
END_TEST

START_TEST(a_daemon_killed_in_a_refit_ends_the_version_and_a_new_submit_commits_it)
{
    struct world w;
    struct fleet f;
    struct reshard_state state;
    world_start(&w);
    fleet_start(&w, &f);
    (void)refit(&f, 1);
    publish_all(&f, 2);
    OK(reshard_submit(f.sources[0].client, "m", 2, NULL, 0, NULL, &ok_error));
    (void)await(&f.destinations[2], RESHARD_EVENT_READY_REQUESTED, 2); /* prepared but for us */
    (void)daemon_kill(&w, SIGKILL);
    daemon_start(&w);
    /* The wait goes on over the restart and hears what became of it. */
    struct reshard_error e;
    int r = reshard_wait(f.sources[0].client, "m", 2, RESHARD_UNTIL_COMMITTED, NULL, NULL,
                         slow_ms(WAIT_MS), &state, &e);
    ck_assert_msg(r == RESHARD_EABORTED, "%d: %s", r, e.text);
    /* So does whoever waits for events alone: nobody hangs. */
    for (uint32_t i = 0; i < N_SOURCES; i++) {
        (void)await(&f.sources[i], RESHARD_EVENT_REATTACHED, 1);
        struct reshard_event ev = await(&f.sources[i], RESHARD_EVENT_ABORTED, 2);
        ck_assert_msg(strstr(ev.reason, "restarted") != NULL, "%s", ev.reason);
        (void)await(&f.sources[i], RESHARD_EVENT_SOURCE_RELEASED, 2);
    }
    for (uint32_t i = 0; i < N_DESTINATIONS; i++) {
        (void)await(&f.destinations[i], RESHARD_EVENT_REATTACHED, 1);
        (void)await(&f.destinations[i], RESHARD_EVENT_ABORTED, 2);
    }
    (void)refit(&f, 2);
    fleet_stop(&f);
    world_stop(&w);
}
END_TEST

START_TEST(a_detached_rank_is_free_at_once_for_another_client)
{
    struct world w;
    struct rank one, two;
    world_start(&w);
    rank_start(&w, &one, 1, true, false);
    reshard_detach(one.worker);
    rank_start(&w, &two, 1, true, false); /* far within the grace time of a broken stream */
    rank_stop(&two);
    rank_stop(&one);
    world_stop(&w);
}
END_TEST

START_TEST(bad_bindings_are_refused_with_the_tensor_named)
{
    struct world w;
    struct rank r;
    struct reshard_error e;
    world_start(&w);
    rank_start(&w, &r, 0, true, false);
    reshard_detach(r.worker);
    struct reshard_piece good = r.pieces[1];
    r.pieces[1].offset_bytes = reshard_segment_bytes(r.live) - 8;
    ck_assert_int_eq(try_attach(&r, 0, true, false, &e), RESHARD_EINVAL);
    ck_assert_msg(strstr(e.text, "'gate'") != NULL, "%s", e.text);
    r.pieces[1] = good;
    r.pieces[1].box.size[0]--;
    ck_assert_int_eq(try_attach(&r, 0, true, false, &e), RESHARD_EINVAL);
    ck_assert_msg(strstr(e.text, "'gate'") != NULL, "%s", e.text);
    r.pieces[1] = good;
    r.pieces[1].tensor = "nobody";
    ck_assert_int_eq(try_attach(&r, 0, true, false, &e), RESHARD_EINVAL);
    ck_assert_msg(strstr(e.text, "nobody") != NULL, "%s", e.text);
    r.pieces[1] = good;
    OK(try_attach(&r, 0, true, false, &ok_error));
    rank_stop(&r);
    world_stop(&w);
}
END_TEST

static int stop_at_once(const struct reshard_state *state, void *arg)
{
    unsigned *n = arg;
    ck_assert_uint_eq(state->version, 5);
    (*n)++;
    return 1;
}

START_TEST(a_wait_can_be_ended_by_its_caller_and_by_its_deadline)
{
    struct world w;
    struct fleet f;
    struct reshard_error e;
    unsigned n = 0;
    world_start(&w);
    fleet_start(&w, &f);
    OK(reshard_submit(f.sources[0].client, "m", 5, NULL, 0, NULL, &ok_error));
    ck_assert_int_eq(reshard_wait(f.sources[0].client, "m", 5, RESHARD_UNTIL_FINAL, stop_at_once,
                                  &n, 0, NULL, &e),
                     RESHARD_ECANCELED);
    ck_assert_uint_eq(n, 1);
    ck_assert_int_eq(reshard_wait(f.sources[0].client, "m", 5, RESHARD_UNTIL_FINAL, NULL, NULL,
                                  slow_ms(300), NULL, &e),
                     RESHARD_EDEADLINE);
    ck_assert_msg(strstr(e.text, "trainer/rank 2") != NULL, "%s", e.text);
    ck_assert_int_eq(reshard_wait(f.sources[0].client, "m", 6, RESHARD_UNTIL_FINAL, NULL, NULL,
                                  slow_ms(300), NULL, &e),
                     RESHARD_ENOTFOUND);
    (void)await(&f.sources[1], RESHARD_EVENT_PUBLISH_REQUESTED, 5);
    fleet_stop(&f);
    world_stop(&w);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(versions_arrive_in_interleaved_memory_staged_and_in_place)                                   \
    X(a_killed_daemon_comes_back_and_the_next_version_arrives)                                     \
    X(a_daemon_killed_in_a_refit_ends_the_version_and_a_new_submit_commits_it)                     \
    X(a_detached_rank_is_free_at_once_for_another_client)                                          \
    X(bad_bindings_are_refused_with_the_tensor_named)                                              \
    X(a_wait_can_be_ended_by_its_caller_and_by_its_deadline)
#include "test/lib/main.h"
