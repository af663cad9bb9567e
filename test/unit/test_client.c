/* libreshard's parts that need no daemon: memory, pieces, pages, the memory socket, JSON of
 * answers, progress. */
#include <check.h>
#include <ctype.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <jansson.h>

#include "base/mem.h"
#include "client/api.h"
#include "client/client.h"
#include "client/link.h"
#include "client/progress.h"
#include "client/reshard.h"
#include "client/room.h"
#include "memory/memory_socket.h"
#include "rpc/pb_budget.h"

#include "reshard.pb-c.h"

#include "client/cmd_layout_whole.c"
#include "client/ctl_api.c" /* belongs to reshardctl, not to the library that tests link */
#include "client/ctl_compare.c"

static const char layout_text[] =
    "{\"name\": \"l\", \"ranks\": 3, \"meshes\": [{\"name\": \"m\", \"shape\": [3], \"ranks\": [2, "
    "0, 1]}],"
    " \"tensors\": ["
    "  {\"name\": \"w\", \"shape\": [7, 3], \"dtype\": \"bfloat16\", \"mesh\": \"m\", "
    "\"placements\": [\"Shard(0)\"]},"
    "  {\"name\": \"b\", \"shape\": [5], \"dtype\": \"float32\", \"mesh\": \"m\", \"placements\": "
    "[\"Replicate\"]},"
    "  {\"name\": \"r\", \"shape\": [10], \"dtype\": \"uint8\", \"regions\": ["
    "    {\"rank\": 0, \"offset\": [0], \"size\": [4]}, {\"rank\": 1, \"offset\": [4], \"size\": "
    "[2]},"
    "    {\"rank\": 0, \"offset\": [6], \"size\": [4]}]}]}";

static struct reshard_layout *layout(void)
{
    struct reshard_layout *l = NULL;
    struct reshard_error e;
    ck_assert_msg(reshard_layout_from_json(layout_text, sizeof layout_text - 1, &l, &e) == 0, "%s",
                  e.text);
    return l;
}

START_TEST(dense_pieces_follow_the_layouts_order_and_alignment)
{
    struct reshard_layout *l = layout();
    uint64_t end = 0;
    /* Rank 0 has b (20 B), two regions of r (4 B each) and, as the mesh's second, rows 3 … 5 of w
     * (18 B): from 100 on with 64 B alignment they begin at 128, 192, 256, 320. */
    ck_assert_int_eq(reshard_pieces_dense(l, 0, NULL, 100, 64, NULL, NULL, &end, NULL), 0);
    ck_assert_uint_eq(end, 320 + 18);
    /* Rank 2 is the mesh's first: rows 0 … 2 of w, no region: b at 0, w at 64. */
    ck_assert_int_eq(reshard_pieces_dense(l, 2, NULL, 0, 0, NULL, NULL, &end, NULL), 0);
    ck_assert_uint_eq(end, 64 + 18);
    /* Rank 1: one row of w, one region. */
    ck_assert_int_eq(reshard_pieces_dense(l, 1, NULL, 0, 1, NULL, NULL, &end, NULL), 0);
    ck_assert_uint_eq(end, 20 + 2 + 6);
    struct reshard_error e;
    ck_assert_int_eq(reshard_pieces_dense(l, 1, NULL, 0, 48, NULL, NULL, &end, &e), RESHARD_EINVAL);
    ck_assert_str_eq(e.text, "dense pieces: align 48 is no power of two");
    ck_assert_int_eq(reshard_pieces_dense(l, 1, NULL, INT64_MAX, 1, NULL, NULL, &end, &e),
                     RESHARD_EINVAL);
    ck_assert_int_eq(reshard_pieces_dense(l, 3, NULL, 0, 0, NULL, NULL, &end, &e), RESHARD_EINVAL);
    ck_assert_str_eq(e.text, "dense pieces: rank 3: layout 'l' has ranks 0 … 2");
    reshard_layout_free(l);
}
END_TEST

START_TEST(a_layout_tells_its_tensors_and_shards)
{
    struct reshard_layout *l = layout();
    struct reshard_box boxes[3];
    struct reshard_tensor t;
    ck_assert_str_eq(reshard_layout_name(l), "l");
    ck_assert_uint_eq(reshard_layout_n_ranks(l), 3);
    ck_assert_uint_eq(reshard_layout_n_tensors(l), 3);
    ck_assert_int_eq(reshard_layout_find(l, "r"), 1);
    ck_assert_int_eq(reshard_layout_find(l, "nobody"), -1);
    ck_assert_int_eq(reshard_layout_tensor(l, 2, &t), 0);
    ck_assert_str_eq(t.name, "w");
    ck_assert_str_eq(t.dtype, "bfloat16");
    ck_assert_uint_eq(t.shape[1], 3);
    ck_assert_int_eq(reshard_layout_tensor(l, 3, &t), RESHARD_EINVAL);
    ck_assert_uint_eq(reshard_layout_shards(l, 1, 0, boxes, 3), 2);
    ck_assert_uint_eq(boxes[1].offset[0], 6);
    ck_assert_uint_eq(boxes[1].size[0], 4);
    ck_assert_uint_eq(reshard_layout_shards(l, 1, 0, NULL, 0), 2);
    ck_assert_uint_eq(reshard_layout_shards(l, 2, 1, boxes, 1), 1);
    ck_assert_uint_eq(boxes[0].offset[0], 6); /* c = ceil(7/3) = 3: rank 1 is the mesh's third */
    ck_assert_uint_eq(boxes[0].size[0], 1);
    ck_assert_uint_eq(reshard_layout_rank_bytes(l, 0), 20 + 8 + 18);
    reshard_layout_free(l);
}
END_TEST

static int memfd(uint64_t bytes, bool seal, bool allocate)
{
    int fd = memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    if (allocate)
        ck_assert_int_eq(fallocate(fd, 0, 0, (off_t)bytes), 0);
    if (seal)
        ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    return fd;
}

static void refused(int fd, uint64_t bytes, const char *why)
{
    struct reshard_segment *s = NULL;
    struct reshard_error e;
    ck_assert_int_eq(reshard_segment_adopt(NULL, fd, bytes, 0, &s, &e), RESHARD_EINVAL);
    ck_assert_msg(strstr(e.text, why) != NULL, "%s", e.text);
    ck_assert_ptr_null(s);
    close(fd);
}

START_TEST(memory_that_could_vanish_is_not_handed_over)
{
    refused(memfd(8192, false, true), 8192, "add F_SEAL_SHRINK");
    refused(memfd(8192, true, false), 8192, "8192 of 8192 bytes");
    refused(memfd(4096, true, true), 8192, "at least 8192 bytes");
    int pipes[2];
    ck_assert_int_eq(pipe(pipes), 0);
    refused(pipes[0], 1, "is not a memfd");
    close(pipes[1]);
}
END_TEST

/* ---- pages ---- */

static uint32_t seventh(const struct reshard_segment *s, void *arg)
{
    (void)s;
    (void)arg;
    return 7;
}

static void piece_is(const Reshard__V1__BindingPiece *p, uint64_t number)
{
    ck_assert_str_eq(p->tensor, "w");
    ck_assert_uint_eq(p->segment, 7);
    ck_assert_uint_eq(p->offset_bytes, number);
    ck_assert_uint_eq(p->n_stride_bytes, number % 2 == 0 ? 0 : 2);
    ck_assert_ptr_nonnull(p->box);
    ck_assert_uint_eq(p->box->n_offset, 2);
    ck_assert_uint_eq(p->box->offset[1], number + 1);
    if (number % 2 == 1)
        ck_assert_int_eq(p->stride_bytes[0], 128);
}

static void put_file(const char *root, const char *name, const char *text)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *slash = path + strlen(root) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    FILE *f = fopen(path, "we");
    ck_assert_ptr_nonnull(f);
    (void)fputs(text, f);
    ck_assert_int_eq(fclose(f), 0);
}

static void remove_files(const char *root)
{
    char command[600];
    (void)snprintf(command, sizeof command, "rm -r '%s'", root);
    ck_assert_int_eq(system(command), 0);
}

START_TEST(a_segment_larger_than_the_memory_left_is_refused_before_a_page_is_taken)
{
    char root[] = "/tmp/reshard-room-XXXXXX";
    struct err e = {0};
    struct stat st;
    int fd = -1;
    ck_assert_ptr_nonnull(mkdtemp(root));
    put_file(root, "proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:   1024 kB\n");
    ck_assert_int_eq(segment_memfd(1 << 20, root, &fd, &e), RS_EEXHAUSTED);
    ck_assert_str_eq(e.text,
                     "segment of 1048576 bytes: 1048576 bytes are wanted, but the machine has "
                     "1048576 left");
    ck_assert_int_eq(fd, -1);
    ck_assert_int_eq(segment_memfd(1 << 19, root, &fd, &e), 0);
    ck_assert_int_eq(fstat(fd, &st), 0);
    ck_assert_int_eq(st.st_size, 1 << 19);
    ck_assert_int_ge(st.st_blocks * 512, 1 << 19);
    ck_assert_int_eq(fcntl(fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW);
    close(fd);
    remove_files(root);
}
END_TEST

START_TEST(the_tightest_limit_of_machine_and_cgroups_counts)
{
    char root[] = "/tmp/reshard-room-XXXXXX";
    struct err e = {0};
    ck_assert_ptr_nonnull(mkdtemp(root));
    ck_assert_int_eq(room_check(root, UINT64_MAX, &e), 0); /* a kernel that tells nothing */
    put_file(root, "proc/meminfo", "MemAvailable: 1000000 kB\n");
    put_file(root, "proc/self/cgroup", "5:cpu,memory:/job\n0::/pod/worker\n");
    ck_assert_int_eq(room_check(root, 900000000, &e), 0);
    /* v2: the parent's limit, of whose use 300000 is page cache: 1000000 - (800000 - 300000). */
    put_file(root, "sys/fs/cgroup/pod/worker/memory.max", "max\n");
    put_file(root, "sys/fs/cgroup/pod/worker/memory.current", "1\n");
    put_file(root, "sys/fs/cgroup/pod/memory.max", "1000000\n");
    put_file(root, "sys/fs/cgroup/pod/memory.current", "800000\n");
    put_file(root, "sys/fs/cgroup/pod/memory.stat",
             "anon 500000\ninactive_file_x 9\ninactive_file 100000\nactive_file 200000\n");
    ck_assert_int_eq(room_check(root, 484375, &e), 0); /* 500000 less a 32nd */
    ck_assert_int_eq(room_check(root, 484376, &e), RS_EEXHAUSTED);
    ck_assert_str_eq(e.text,
                     "484376 bytes are wanted, but cgroup '/pod' (memory.max) has 500000 left");
    /* v1, used beyond its limit. */
    put_file(root, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1000\n");
    put_file(root, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1001\n");
    ck_assert_int_eq(room_check(root, 1, &e), RS_EEXHAUSTED);
    ck_assert_str_eq(e.text,
                     "1 bytes are wanted, but cgroup '/job' (memory.limit_in_bytes) has 0 left");
    remove_files(root);
}
END_TEST

START_TEST(bindings_of_any_number_are_cut_into_pages_in_order)
{
    enum { N = 1300 };
    struct reshard_piece *pieces = calloc(N, sizeof *pieces);
    for (uint64_t i = 0; i < N; i++)
        pieces[i] = (struct reshard_piece){.tensor = "w",
                                           .offset_bytes = i,
                                           .dense = i % 2 == 0,
                                           .box = {2, {0, i + 1}, {1, 1}},
                                           .stride_bytes = {128, 2}};
    struct api_pages pages = {0};
    ck_assert_int_eq(api_pages_add(&pages, true, pieces, N, seventh, NULL, NULL), 0);
    uint64_t number = 0;
    for (size_t i = 0; i < pages.n_pages; i++) {
        void *message;
        struct err e = {0};
        ck_assert_msg(pb_unpack(&reshard__v1__attach_request__descriptor, pages.pages[i].data,
                                pages.pages[i].n_bytes, NULL, &message, &e) == 0,
                      "%s", e.text);
        const Reshard__V1__AttachRequest *m = message;
        ck_assert_int_eq((int)m->message_case, RESHARD__V1__ATTACH_REQUEST__MESSAGE_BINDINGS);
        ck_assert(m->bindings->shadow);
        for (size_t k = 0; k < m->bindings->n_pieces; k++)
            piece_is(m->bindings->pieces[k], number++);
        pb_free(message);
    }
    ck_assert_uint_eq(number, N);
    api_pages_close(&pages);
    free(pieces);
}
END_TEST

START_TEST(an_event_that_the_library_does_not_know_is_named_and_passed_over)
{
    struct reshard_event ev = {.version = 99};
    struct err e = {0};
    /* Field 1 (`attached`, which comes only once, first) and field 15, which there is not: both empty. */
    ck_assert_int_eq(api_event("\x0a\x00", 2, &ev, &e), RS_EUNIMPL);
    ck_assert_str_eq(e.text, "an event of kind 1");
    ck_assert_int_eq(api_event("\x7a\x00", 2, &ev, &e), RS_EUNIMPL);
    ck_assert_int_eq(api_event("\x7a\x05", 2, &ev, &e), RS_EPROTO);
    ck_assert_uint_eq(ev.version, 99);
    /* Field 6, aborted: version 2, attempt 7, reason "no". */
    ck_assert_int_eq(api_event("\x32\x08\x08\x02\x10\x07\x1a\x02no", 10, &ev, &e), 0);
    ck_assert_int_eq((int)ev.type, RESHARD_EVENT_ABORTED);
    ck_assert_uint_eq(ev.version, 2);
    ck_assert_uint_eq(ev.attempt, 7);
    ck_assert_str_eq(ev.reason, "no");
}
END_TEST

/* ---- the memory socket ---- */

struct peer {
    char path[96];
    int listener;
    struct memory_record answer; /* to the hello; request is echoed */
    size_t answer_bytes;
    pthread_t thread;
};

static void *peer_run(void *arg)
{
    struct peer *p = arg;
    struct memory_record record;
    int fd = accept(p->listener, NULL, NULL);
    if (recv(fd, &record, sizeof record, MSG_WAITALL) == (ssize_t)sizeof record)
        (void)!write(fd, &p->answer, p->answer_bytes);
    if (p->answer_bytes == sizeof p->answer)
        (void)recv(fd, &record, 1, 0); /* until the client goes */
    close(fd);
    return NULL;
}

static void peer_start(struct peer *p)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    (void)snprintf(p->path, sizeof p->path, "/tmp/test_client.%ld", (long)getpid());
    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s.mem", p->path);
    (void)unlink(a.sun_path);
    p->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(p->listener, (const struct sockaddr *)&a, sizeof a), 0);
    ck_assert_int_eq(listen(p->listener, 1), 0);
    ck_assert_int_eq(pthread_create(&p->thread, NULL, peer_run, p), 0);
}

static int peer_hello(struct peer *p, struct err *e)
{
    struct link *l = NULL;
    char path[110];
    peer_start(p);
    int r = link_open(p->path, deadline_after_ms(500), &l, e);
    link_unref(l);
    ck_assert_int_eq(pthread_join(p->thread, NULL), 0);
    close(p->listener);
    (void)snprintf(path, sizeof path, "%s.mem", p->path);
    (void)unlink(path);
    return r;
}

static struct peer welcome(void)
{
    struct peer p = {.answer = {.magic = MEMORY_SOCKET_MAGIC,
                                .type = MEMORY_WELCOME,
                                .protocol = MEMORY_SOCKET_PROTOCOL,
                                .incarnation = 9},
                     .answer_bytes = sizeof p.answer};
    memset(p.answer.token, 'a', MEMORY_SOCKET_TOKEN_BYTES - 1);
    return p;
}

START_TEST(a_welcome_is_believed_only_when_whole_and_right)
{
    struct err e = {0};
    struct peer p = welcome();
    ck_assert_int_eq(peer_hello(&p, &e), 0);
    p = welcome();
    p.answer.magic ^= 1;
    ck_assert_int_eq(peer_hello(&p, &e), RS_EPROTO);
    p = welcome();
    p.answer.protocol = 2;
    ck_assert_int_eq(peer_hello(&p, &e), RS_EPROTO);
    ck_assert_str_eq(e.text, "hello: the daemon speaks protocol 2, this library 1");
    p = welcome();
    p.answer.token[3] = '\0';
    ck_assert_int_eq(peer_hello(&p, &e), RS_EPROTO);
    p = welcome();
    p.answer_bytes = 100;
    ck_assert_int_eq(peer_hello(&p, &e), RS_EUNAVAIL);
    p = welcome();
    p.answer.code = RS_EEXHAUSTED;
    (void)snprintf(p.answer.text, sizeof p.answer.text, "1024 clients are connected");
    ck_assert_int_eq(peer_hello(&p, &e), RS_EEXHAUSTED);
    ck_assert_str_eq(e.text, "hello: 1024 clients are connected");
}
END_TEST

START_TEST(no_daemon_and_a_path_that_is_too_long_are_told_apart)
{
    struct err e = {0};
    struct link *l = NULL;
    char path[200];
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    ck_assert_int_eq(link_open("/nonexistent/d.sock", deadline_after_ms(100), &l, &e), RS_EUNAVAIL);
    ck_assert_str_eq(e.text, "no daemon at '/nonexistent/d.sock': No such file or directory; is "
                             "reshardd running?");
    ck_assert_int_eq(link_open("/proc/self/exe", deadline_after_ms(100), &l, &e), RS_EUNAVAIL);
    ck_assert_str_eq(e.text,
                     "no daemon at '/proc/self/exe': there is no '/proc/self/exe.mem' beside "
                     "it; is that its [daemon] socket, and is reshardd running?");
    ck_assert_int_eq(link_open(path, deadline_after_ms(100), &l, &e), RS_EINVAL);
    struct reshard_client *c = NULL;
    ck_assert_int_eq(reshard_connect("/nonexistent/d.sock", 100, &c, NULL), RESHARD_EUNAVAIL);
    ck_assert_ptr_null(c);
}
END_TEST

/* ---- answers as JSON ---- */

static void *packed_status(size_t *ret_n)
{
    Reshard__V1__WorkerStatus worker = RESHARD__V1__WORKER_STATUS__INIT;
    Reshard__V1__ModelStatus model = RESHARD__V1__MODEL_STATUS__INIT;
    Reshard__V1__StatusReply m = RESHARD__V1__STATUS_REPLY__INIT;
    Reshard__V1__WorkerStatus *workers[] = {&worker};
    Reshard__V1__ModelStatus *models[] = {&model};
    uint32_t domains[] = {0, 1};
    worker.worker = UINT64_C(0xfedcba9876543210);
    worker.state = RESHARD__V1__WORKER_STATE__WORKER_TORN;
    worker.receive = RESHARD__V1__RECEIVE__RECEIVE_IN_PLACE;
    worker.pid = -5;
    worker.segment_bytes = UINT64_MAX;
    model.model = (char *)(uintptr_t) "qwen \"3\"";
    model.n_workers = 1;
    model.workers = workers;
    m.n_models = 1;
    m.models = models;
    m.n_domain_of_device = 2;
    m.domain_of_device = domains;
    *ret_n = protobuf_c_message_get_packed_size(&m.base);
    void *data = malloc(*ret_n);
    protobuf_c_message_pack(&m.base, data);
    return data;
}

START_TEST(answers_become_json_with_hex_ids_and_plain_enum_names)
{
    size_t n;
    void *data = packed_status(&n);
    json_t *j = NULL;
    ck_assert_int_eq(ctl_decode(CTL_STATUS, data, n, &j, NULL), 0);
    const json_t *m = json_array_get(json_object_get(j, "models"), 0);
    const json_t *w = json_array_get(json_object_get(m, "workers"), 0);
    ck_assert_str_eq(json_string_value(json_object_get(m, "model")), "qwen \"3\"");
    ck_assert_ptr_null(json_object_get(m, "in_flight"));
    ck_assert_str_eq(json_string_value(json_object_get(w, "worker")), "fedcba9876543210");
    ck_assert_str_eq(json_string_value(json_object_get(w, "state")), "torn");
    ck_assert_str_eq(json_string_value(json_object_get(w, "receive")), "in_place");
    ck_assert_str_eq(json_string_value(json_object_get(w, "side")), "unspecified");
    ck_assert_int_eq(json_integer_value(json_object_get(w, "pid")), -5);
    ck_assert_int_eq(json_integer_value(json_object_get(w, "segment_bytes")), INT64_MAX);
    ck_assert_uint_eq(json_array_size(json_object_get(j, "domain_of_device")), 2);
    json_decref(j);
    ck_assert_int_eq(ctl_decode(CTL_STATUS, "\x0a\x05x", 3, &j, NULL), RS_EINVAL);
    free(data);
}
END_TEST

/* ---- two sets of versions ---- */

/* Newest first: 20 … 1; epoch 2 from 11 on; 15 was aborted; version v took v ms. */
static json_t *twenty_versions(void)
{
    json_t *list = json_array();
    for (json_int_t v = 20; v >= 1; v--)
        (void)json_array_append_new(list,
                                    json_pack("{sIsssIsIsIsIssss}", "version", v, "phase",
                                              v == 15 ? "aborted" : "committed", "epoch",
                                              (json_int_t)(v > 10 ? 2 : 1), "total_ns", v * 1000000,
                                              "wire_ns", v, "stall_ns", (json_int_t)0, "strategy",
                                              v % 2 ? "reshard" : "direct", "plan_digest", "p"));
    return list;
}

static json_int_t number_of(const json_t *set, const char *group_name, const char *time,
                            const char *which)
{
    const json_t *g = json_object_get(set, group_name);
    return json_integer_value(json_object_get(json_object_get(g, time), which));
}

START_TEST(firsts_of_an_epoch_and_aborted_versions_stand_apart_from_steady_ones)
{
    json_t *versions = twenty_versions();
    const struct compare_set sets[] = {{1, 10}, {9, 20}};
    json_t *c = compare_records(versions, sets);
    const json_t *a = json_array_get(json_object_get(c, "sets"), 0);
    const json_t *b = json_array_get(json_object_get(c, "sets"), 1);
    /* Steady of the first set: 2 … 10, nine of them: median the 5th, p90 the 9th (nearest rank). */
    ck_assert_int_eq(number_of(a, "first_of_epoch", "total_ns", "most"), 1000000);
    ck_assert_int_eq(number_of(a, "steady", "total_ns", "least"), 2000000);
    ck_assert_int_eq(number_of(a, "steady", "total_ns", "median"), 6000000);
    ck_assert_int_eq(number_of(a, "steady", "total_ns", "p90"), 10000000);
    /* Of the second: 9, 10, 12 … 14, 16 … 20, ten of them: median the 5th (14), p90 the 9th (19). */
    ck_assert_int_eq(number_of(b, "first_of_epoch", "wire_ns", "median"), 11);
    ck_assert_int_eq(number_of(b, "steady", "wire_ns", "median"), 14);
    ck_assert_int_eq(number_of(b, "steady", "wire_ns", "p90"), 19);
    ck_assert_int_eq(json_integer_value(json_object_get(b, "not_committed")), 1);
    ck_assert_uint_eq(json_array_size(json_object_get(b, "strategies")), 2);
    ck_assert_uint_eq(json_array_size(json_object_get(b, "plans")), 1);
    json_decref(c);
    json_decref(versions);
}
END_TEST

/* ---- progress ---- */

START_TEST(rate_and_time_left_follow_the_newest_two_seconds)
{
    struct progress p = {0};
    const uint64_t ms = 1000000;
    ck_assert(progress_eta_s(&p) < 0);
    /* Ten seconds at 100 B/s, then five at 1000 B/s, told every 100 ms. */
    uint64_t landed = 0;
    for (uint64_t t = 0; t <= 15000; t += 100) {
        progress_add(&p, t * ms, landed, 10000);
        if (t == 10000)
            ck_assert_double_eq_tol(progress_rate(&p), 100, 1);
        landed += t < 10000 ? 10 : 100;
    }
    ck_assert_double_eq_tol(progress_rate(&p), 1000, 1);
    ck_assert_double_eq_tol(progress_share(&p), 0.6, 1e-9);
    ck_assert_double_eq_tol(progress_eta_s(&p), 4, 0.01);
    progress_add(&p, 15100 * ms, 5, 10000); /* another attempt begins */
    ck_assert(progress_rate(&p) == 0);
    ck_assert(progress_eta_s(&p) < 0);
}
END_TEST

START_TEST(waiting_for_the_first_byte_does_not_count_into_the_rate)
{
    struct progress p = {0};
    const uint64_t ms = 1000000;
    for (uint64_t t = 0; t < 60000; t += 100)
        progress_add(&p, t * ms, 0, 1000);
    progress_add(&p, 60000 * ms, 0, 1000);
    progress_add(&p, 60500 * ms, 200, 1000);
    ck_assert_double_eq_tol(progress_rate(&p), 400, 0.01);
    ck_assert_double_eq_tol(progress_eta_s(&p), 2, 0.01);
}
END_TEST

START_TEST(a_bar_is_as_full_as_its_share)
{
    char bar[13];
    ck_assert_str_eq(progress_bar(0, 10, bar), "[..........]");
    ck_assert_str_eq(progress_bar(0.55, 10, bar), "[#####.....]");
    ck_assert_str_eq(progress_bar(1.7, 10, bar), "[##########]");
}
END_TEST

/* ---- memory that runs out ---- */

static int everything(const void *status, size_t n_status)
{
    struct reshard_layout *l = NULL;
    struct reshard_piece piece = {.tensor = "w", .dense = true, .whole_shard = true};
    struct api_pages pages = {0};
    uint64_t end;
    json_t *j = NULL;
    int r = reshard_layout_from_json(layout_text, sizeof layout_text - 1, &l, NULL);
    if (r == 0)
        r = reshard_pieces_dense(l, 0, NULL, 0, 0, NULL, NULL, &end, NULL);
    if (r == 0)
        r = api_pages_add(&pages, false, &piece, 1, seventh, NULL, NULL);
    if (r == 0)
        r = ctl_decode(CTL_STATUS, status, n_status, &j, NULL);
    json_decref(j);
    api_pages_close(&pages);
    reshard_layout_free(l);
    return r;
}

START_TEST(each_allocation_that_fails_is_reported_and_nothing_leaks)
{
    size_t n;
    void *data = packed_status(&n);
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int r = everything(data, n);
        if (!mem_failed()) {
            mem_fail_at(0);
            ck_assert_int_eq(r, 0);
            ck_assert_int_gt(i, 10);
            break;
        }
        ck_assert_msg(r == RS_ENOMEM || r == RS_EEXHAUSTED, "allocation %ld: code %d", i, r);
    }
    free(data);
}
END_TEST

START_TEST(a_check_of_instances_that_runs_out_of_memory_says_so)
{
    static const char text[] =
        "{\"name\": \"l\", \"ranks\": 2, \"instances\": [[0], [1]], \"meshes\": [{\"name\": \"m\", "
        "\"shape\": [2], \"ranks\": [0, 1]}], \"tensors\": [{\"name\": \"w\", \"shape\": [5], "
        "\"dtype\": \"int8\", \"mesh\": \"m\", \"placements\": [\"Shard(0)\"]}]}";
    struct layout *l = NULL;
    ck_assert_int_eq(layout_from_json(text, sizeof text - 1, &l, NULL), 0);
    for (long i = 1;; i++) {
        struct buf b;
        buf_init(&b);
        mem_fail_at(i);
        int r = cmd_layout_whole(l, &b);
        bool failed = mem_failed();
        mem_fail_at(0);
        if (!failed) {
            ck_assert_int_eq(r, 0);
            ck_assert_int_gt(i, 3);
            buf_put(&b, "", 1);
            ck_assert_ptr_nonnull(
                strstr((char *)b.data,
                       "instance 0 (ranks 0) holds 3 of the 5 elements of tensor 'w'; 1 of 1"));
        } else {
            ck_assert_int_eq(r, RS_ENOMEM);
        }
        buf_close(&b);
        if (!failed)
            break;
    }
    layout_free(l);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(dense_pieces_follow_the_layouts_order_and_alignment)                                         \
    X(a_layout_tells_its_tensors_and_shards)                                                       \
    X(memory_that_could_vanish_is_not_handed_over)                                                 \
    X(a_segment_larger_than_the_memory_left_is_refused_before_a_page_is_taken)                     \
    X(the_tightest_limit_of_machine_and_cgroups_counts)                                            \
    X(bindings_of_any_number_are_cut_into_pages_in_order)                                          \
    X(an_event_that_the_library_does_not_know_is_named_and_passed_over)                            \
    X(a_welcome_is_believed_only_when_whole_and_right)                                             \
    X(no_daemon_and_a_path_that_is_too_long_are_told_apart)                                        \
    X(answers_become_json_with_hex_ids_and_plain_enum_names)                                       \
    X(firsts_of_an_epoch_and_aborted_versions_stand_apart_from_steady_ones)                        \
    X(rate_and_time_left_follow_the_newest_two_seconds)                                            \
    X(waiting_for_the_first_byte_does_not_count_into_the_rate)                                     \
    X(a_bar_is_as_full_as_its_share)                                                               \
    X(a_check_of_instances_that_runs_out_of_memory_says_so)                                        \
    X(each_allocation_that_fails_is_reported_and_nothing_leaks)
#include "test/lib/main.h"
