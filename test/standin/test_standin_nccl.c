/* NCCL communicators between processes: deadlines, dead peers, aborts that hang, ids that were used
 * (CASES.md C01 to C05, C10, C13, C14). On the stand-in, whose ordering rules are the real ones. */
#include "test/lib/best_of.h"
#include "test/lib/nccl_side.h"

static int exchange_20_times(const uint8_t *id)
{
    struct side x = side_open(1, id, NULL);
    for (int i = 0; i < 20; i++) {
        if (exchange_status(&x) != 0)
            return 1;
        if (!all_are(x.in, 0x10))
            return 2;
    }
    side_close(&x);
    return 0;
}

START_TEST(two_processes_exchange_in_one_communicator)
{
    uint8_t id[TRANSPORT_NCCL_ID_BYTES];
    id_make(id);
    pid_t pid = other(exchange_20_times, id);
    struct side x = side_open(0, id, NULL);
    for (int i = 0; i < 20; i++) {
        ck_assert_int_eq(exchange_status(&x), 0);
        ck_assert(all_are(x.in, 0x11));
    }
    ck_assert(!transport_takes_pieces(x.t, 0, 1)); /* the two ends may be cut differently */
    struct transport_counters c = transport_counters(x.t, 0);
    ck_assert_uint_eq(c.network_sent_bytes, 20 * BYTES);
    ck_assert_uint_eq(c.messages, 40);
    ck_assert_int_eq(status_of_process(pid), 0);
    side_close(&x);
}
END_TEST

/* C01 */
static uint64_t never_comes(void *arg)
{
    uint8_t id[TRANSPORT_NCCL_ID_BYTES];
    struct transport_nccl_options options = {.init_ms = 300};
    struct done d;
    struct err e = {0};
    (void)arg;
    id_make(id);
    struct side x = side_open(0, id, &options);
    struct transport_connect c = {.on_done = connect_done,
                                  .arg = &d,
                                  .deadline_ns =
                                      clock_mono_ns() + SIDE_WAIT_MS * UINT64_C(1000000)};
    done_init(&d);
    uint64_t begin = clock_mono_ns();
    ck_assert_int_eq(transport_connect(x.t, &c), 0);
    ck_assert_int_eq(exchange_status(&x), RS_EDEADLINE);
    ck_assert_int_eq(status_of(&d), RS_EDEADLINE);
    ck_assert_ptr_nonnull(strstr(d.err.text, "not all 2 devices (1 are local)"));
    uint64_t took = clock_mono_ns() - begin;
    while (!transport_quiesced(x.t))
        sched_yield();
    ck_assert(transport_nccl_needs_id(x.t));
    ck_assert_int_eq(transport_begin(x.t, 2, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "new id"));
    side_close(&x);
    return took;
}

START_TEST(a_member_that_never_comes_ends_it_at_the_deadline)
{
    in_time_once(apart, &(struct apart){never_comes, NULL}, 3000000000U);
}
END_TEST

static int exchange_once_and_stay(const uint8_t *id)
{
    struct side x = side_open(1, id, NULL);
    (void)exchange_status(&x);
    (void)pause(); /* until it is killed */
    return 0;
}

/* Forked before CUDA was used here, as it must be; waits for its id. */
static int id_pipe[2];

static int exchange_when_told(const uint8_t *id)
{
    uint8_t next[TRANSPORT_NCCL_ID_BYTES];
    (void)id;
    if (read(id_pipe[0], next, sizeof next) != sizeof next)
        return 2;
    struct side x = side_open(1, next, NULL);
    int status = exchange_status(&x);
    side_close(&x);
    return status == 0 ? 0 : 1;
}

/* How long the abort takes. */
static uint64_t killed(void *arg)
{
    uint8_t id[TRANSPORT_NCCL_ID_BYTES], next[TRANSPORT_NCCL_ID_BYTES];
    struct transport_message m[2];
    struct transport_group g;
    struct done d;
    struct err e = {0};
    (void)arg;
    ck_assert_int_eq(pipe(id_pipe), 0);
    id_make(id);
    pid_t pid = other(exchange_once_and_stay, id), second = other(exchange_when_told, NULL);
    struct side x = side_open(0, id, NULL);
    ck_assert_int_eq(exchange_status(&x), 0);
    exchange(&x, &g, m, &d);
    wait_begun(2);
    ck_assert_int_eq(kill(pid, SIGKILL), 0);
    (void)status_of_process(pid);
    ck_assert(!done_within(&d, 50));
    uint64_t begin = clock_mono_ns();
    transport_abort(x.t);
    ck_assert_int_eq(status_of(&d), RS_ECANCELED);
    uint64_t took = clock_mono_ns() - begin;
    ck_assert(transport_quiesced(x.t));
    ck_assert_int_eq(transport_begin(x.t, 2, &e), RS_EPRECOND);
    ck_assert_int_eq(transport_nccl_renew(x.t, id, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "used"));
    ck_assert_int_eq(transport_nccl_node_id(x.node, next, &e), 0);
    ck_assert_int_eq(transport_nccl_renew(x.t, next, &e), 0);
    ck_assert_int_eq(transport_begin(x.t, 2, &e), 0);
    ck_assert_int_eq(write(id_pipe[1], next, sizeof next), sizeof next);
    ck_assert_int_eq(exchange_status(&x), 0);
    ck_assert_int_eq(status_of_process(second), 0);
    side_close(&x);
    return took;
}

/* C13, C04: death is silence; an abort ends it; ids are good once. */
START_TEST(a_killed_peer_is_silence_until_aborted_and_a_new_id_makes_a_new_communicator)
{
    in_time_once(apart, &(struct apart){killed, NULL}, 2000000000U);
}
END_TEST

static int receive_then_send(const uint8_t *id)
{
    struct side x = side_open(1, id, NULL);
    struct transport_message m[2];
    struct done d[2];
    message(&x, &m[0], false, BYTES);
    message(&x, &m[1], true, BYTES);
    struct transport_group g[2] = {{&m[0], 1, group_done, &d[0]}, {&m[1], 1, group_done, &d[1]}};
    for (int i = 0; i < 2; i++) {
        done_init(&d[i]);
        if (transport_enqueue(x.t, 1, x.s, &g[i]) != 0)
            return 1;
    }
    bool hangs = !done_within(&d[0], 300);
    transport_abort(x.t);
    return hangs && status_of(&d[0]) == RS_ECANCELED && status_of(&d[1]) == RS_ECANCELED ? 0 : 2;
}

/* C10: why a plan's rounds are proved before: two that both receive first wait for ever. */
START_TEST(groups_in_an_order_that_does_not_match_hang_and_an_abort_ends_them)
{
    uint8_t id[TRANSPORT_NCCL_ID_BYTES];
    id_make(id);
    pid_t pid = other(receive_then_send, id);
    struct side x = side_open(0, id, NULL);
    struct transport_message m[2];
    struct done d[2];
    message(&x, &m[0], false, BYTES);
    message(&x, &m[1], true, BYTES);
    struct transport_group g[2] = {{&m[0], 1, group_done, &d[0]}, {&m[1], 1, group_done, &d[1]}};
    for (int i = 0; i < 2; i++) {
        done_init(&d[i]);
        ck_assert_int_eq(transport_enqueue(x.t, 0, x.s, &g[i]), 0);
    }
    ck_assert(!done_within(&d[0], 300));
    transport_abort(x.t);
    ck_assert_int_eq(status_of(&d[0]), RS_ECANCELED);
    ck_assert_int_eq(status_of(&d[1]), RS_ECANCELED);
    ck_assert_int_eq(status_of_process(pid), 0);
    side_close(&x);
}
END_TEST

START_TEST(an_asynchronous_error_fails_the_group_without_being_asked)
{
    uint8_t id[TRANSPORT_NCCL_ID_BYTES];
    id_make(id);
    pid_t pid = other(exchange_once_and_stay, id);
    ck_assert_int_eq(setenv("STANDIN_ASYNC", "group:1", 1), 0);
    struct side x = side_open(0, id, NULL);
    struct transport_message m[2];
    struct transport_group g;
    struct done d;
    exchange(&x, &g, m, &d);
    ck_assert_int_eq(status_of(&d), RS_EPEER);
    ck_assert_ptr_nonnull(strstr(d.err.text, "remote process exited"));
    ck_assert_ptr_nonnull(strstr(d.err.text, "comm rank 0 of 2"));
    while (!transport_quiesced(x.t))
        sched_yield();
    ck_assert_int_eq(kill(pid, SIGKILL), 0);
    (void)status_of_process(pid);
    side_close(&x);
}
END_TEST

/* Whatever the communicators are at, their end keeps nobody waiting who has no group in flight. */
START_TEST(an_attempt_aborted_while_members_join_is_over_at_once_and_the_next_one_works)
{
    struct device *devices[2];
    struct device_stream *s[2];
    static const bool takes_part[2] = {true, true};
    struct transport_nccl_node *node;
    struct transport *t;
    struct err e = {0};
    for (uint32_t i = 0; i < 2; i++) {
        ck_assert_int_eq(device_cuda_open(i, NULL, &devices[i], &e), 0);
        ck_assert_int_eq(device_stream_new(devices[i], "net", &s[i], &e), 0);
    }
    uint8_t *out = segment(devices[0], BYTES), *in = segment(devices[1], BYTES);
    ck_assert_int_eq(transport_nccl_node_open(&node, &e), 0);
    ck_assert_int_eq(transport_nccl_open(node, devices, takes_part, 2, 1, NULL, NULL, &t, &e), 0);
    for (unsigned i = 0; i < 20; i++) {
        struct transport_message m[2] = {
            {.data = out, .bytes = BYTES, .peer = 1, .send = true, .network = true},
            {.data = in, .bytes = BYTES, .peer = 0, .network = true}};
        struct done d[2];
        struct transport_group g[2] = {{&m[0], 1, group_done, &d[0]},
                                       {&m[1], 1, group_done, &d[1]}};
        memset(out, (int)i, BYTES);
        ck_assert_int_eq(transport_begin(t, 2 * i + 1, &e), 0);
        for (unsigned k = 0; k < i % 4 * 100; k++)
            sched_yield(); /* at another step of theirs each time */
        transport_abort(t);
        ck_assert(transport_quiesced(t));
        ck_assert_msg(transport_begin(t, 2 * i + 2, &e) == 0, "%s", e.text);
        for (uint32_t k = 0; k < 2; k++) {
            done_init(&d[k]);
            ck_assert_int_eq(transport_enqueue(t, k, s[k], &g[k]), 0);
        }
        for (uint32_t k = 0; k < 2; k++)
            ck_assert_msg(status_of(&d[k]) == 0, "%s", d[k].err.text);
        ck_assert(all_are(in, (uint8_t)i));
    }
    for (uint32_t i = 0; i < 2; i++)
        device_stream_free(s[i]);
    transport_close(t);
    transport_nccl_node_close(node);
    for (uint32_t i = 0; i < 2; i++)
        device_close(devices[i]);
}
END_TEST

static void stuck_now(void *arg)
{
    struct err e = {0};
    done_now(arg, 1, &e);
}

/* C03: the process is to be ended; the transport never says that its buffers are free. */
START_TEST(an_abort_that_hangs_is_told_by_the_watchdog)
{
    uint8_t id[TRANSPORT_NCCL_ID_BYTES];
#if defined(__SANITIZE_THREAD__)
    return; /* its threads never end, which is an error there */
#endif
    struct done stuck, d;
    struct transport_nccl_options options = {
        .watchdog_ms = 200, .on_stuck = stuck_now, .arg = &stuck};
    struct transport_message m[2];
    struct transport_group g;
    done_init(&stuck);
    id_make(id);
    pid_t pid = other(exchange_once_and_stay, id);
    ck_assert_int_eq(setenv("STANDIN_HANG", "ncclCommAbort:1", 1), 0);
    struct side x = side_open(0, id, &options);
    ck_assert_int_eq(exchange_status(&x), 0);
    exchange(&x, &g, m, &d);
    wait_begun(2);
    transport_abort(x.t);
    ck_assert(done_within(&stuck, SIDE_WAIT_MS));
    ck_assert(!transport_quiesced(x.t));
    ck_assert(!done_within(&d, 10));
    ck_assert_int_eq(kill(pid, SIGKILL), 0);
    (void)status_of_process(pid);
    _exit(EXIT_SUCCESS); /* the stuck threads never end */
}
END_TEST

/* C05 */
START_TEST(one_gpu_in_two_ranks_is_refused_before_nccl_is_asked)
{
    struct device *devices[2];
    static const bool takes_part[2] = {true, true};
    struct transport_nccl_node *node;
    struct transport *t;
    struct device_cuda_options options = {.name = "0"};
    struct err e = {0};
    for (uint32_t i = 0; i < 2; i++)
        ck_assert_int_eq(device_cuda_open(i, &options, &devices[i], &e), 0);
    ck_assert_int_eq(transport_nccl_node_open(&node, &e), 0);
    ck_assert_int_eq(transport_nccl_open(node, devices, takes_part, 2, 1, NULL, NULL, &t, &e),
                     RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "devices 0 and 1 are one GPU"));
    struct device *host;
    ck_assert_int_eq(device_host_open(0, NULL, &host, &e), 0);
    device_close(devices[1]);
    devices[1] = host;
    ck_assert_int_eq(transport_nccl_open(node, devices, takes_part, 2, 1, NULL, NULL, &t, &e),
                     RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "no CUDA device"));
    device_close(devices[0]);
    device_close(host);
    transport_nccl_node_close(node);
}
END_TEST

START_TEST(an_nccl_that_is_too_old_is_refused_with_its_version)
{
    struct transport_nccl_node *node;
    struct err e = {0};
    ck_assert_int_eq(setenv("STANDIN_NCCL_VERSION", "22703", 1), 0);
    ck_assert_int_eq(transport_nccl_node_open(&node, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "2.27.3"));
}
END_TEST

/* Two local devices; every NCCL call fails once. Neither a hang, nor success where a call failed
 * before the group was given. */
static int local_exchange(const uint8_t *call)
{
    struct device *devices[2];
    struct device_stream *s[2];
    static const bool takes_part[2] = {true, true};
    struct transport_nccl_node *node;
    struct transport *t;
    struct err e = {0};
    (void)setenv("STANDIN_FAIL", (const char *)call, 1);
    if (transport_nccl_node_open(&node, &e) != 0)
        return e.text[0] != '\0' ? 10 : 1;
    for (uint32_t i = 0; i < 2; i++)
        if (device_cuda_open(i, NULL, &devices[i], &e) != 0 ||
            device_stream_new(devices[i], "net", &s[i], &e) != 0)
            return 2;
    if (transport_nccl_open(node, devices, takes_part, 2, 1, NULL, NULL, &t, &e) != 0)
        return 3;
    int r = transport_begin(t, 1, &e);
    uint8_t *out = segment(devices[0], BYTES), *in = segment(devices[1], BYTES);
    memset(out, 0x33, BYTES);
    struct transport_message m[2] = {
        {.data = out, .bytes = BYTES, .peer = 1, .send = true, .network = true},
        {.data = in, .bytes = BYTES, .peer = 0, .network = true}};
    struct done d[2];
    struct transport_group g[2] = {{&m[0], 1, group_done, &d[0]}, {&m[1], 1, group_done, &d[1]}};
    for (uint32_t i = 0; i < 2; i++) {
        done_init(&d[i]);
        if (r == 0 && transport_enqueue(t, i, s[i], &g[i]) != 0)
            return 4;
    }
    for (uint32_t i = 0; r == 0 && i < 2; i++)
        if (!done_within(&d[i], SIDE_WAIT_MS))
            return 5;
    bool told = r != 0 || d[0].status != 0 || d[1].status != 0;
    if (!told && (in[0] != 0x33 || in[BYTES - 1] != 0x33))
        return 6;
    transport_abort(t);
    while (!transport_quiesced(t))
        sched_yield();
    for (uint32_t i = 0; i < 2; i++)
        device_stream_free(s[i]);
    transport_close(t);
    return told ? 10 : 11;
}

START_TEST(every_nccl_call_that_fails_is_told_and_nothing_hangs)
{
    static const char *const calls[] = {"ncclGetVersion:1",
                                        "ncclGetUniqueId:1",
                                        "ncclCommInitRankConfig:1",
                                        "ncclCommInitRankConfig:2",
                                        "ncclGroupStart:1",
                                        "ncclGroupStart:2",
                                        "ncclGroupEnd:1",
                                        "ncclGroupEnd:2",
                                        "ncclGroupEnd:3",
                                        "ncclSend:1",
                                        "ncclRecv:1",
                                        "ncclCommGetAsyncError:1",
                                        "ncclCommGetAsyncError:2"};
    ck_assert_int_eq(status_of_process(other(local_exchange, (const uint8_t *)"")), 11);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        ck_assert_msg(status_of_process(other(local_exchange, (const uint8_t *)calls[i])) == 10,
                      "%s", calls[i]);
}
END_TEST

START_TEST(open_begin_and_connect_without_memory_fail_and_leave_nothing_behind)
{
    struct device *devices[2];
    static const bool takes_part[2] = {true, true};
    struct err e = {0};
    for (uint32_t i = 0; i < 2; i++)
        ck_assert_int_eq(device_cuda_open(i, NULL, &devices[i], &e), 0);
    for (long i = 1;; i++) {
        struct transport_nccl_node *node = NULL;
        struct transport *t = NULL;
        struct done d;
        struct transport_connect c = {.on_done = connect_done, .arg = &d};
        done_init(&d);
        mem_fail_at(i);
        int r = transport_nccl_node_open(&node, &e);
        r = r != 0 ? r : transport_nccl_open(node, devices, takes_part, 2, 1, NULL, NULL, &t, &e);
        r = r != 0 ? r : transport_begin(t, 1, &e);
        r = r != 0 ? r : transport_connect(t, &c);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        if (r == 0)
            ck_assert_int_eq(status_of(&d), 0);
        transport_close(t);
        transport_nccl_node_close(node);
        if (!struck)
            break;
        ck_assert_int_lt(i, 100);
    }
    for (uint32_t i = 0; i < 2; i++)
        device_close(devices[i]);
}
END_TEST

/* C14 */
START_TEST(two_hundred_communicators_come_and_go)
{
    struct device *devices[2];
    static const bool takes_part[2] = {true, true};
    struct transport_nccl_node *node;
    struct err e = {0};
    ck_assert_int_eq(setenv("STANDIN_SEED", "0", 1), 0);
    for (uint32_t i = 0; i < 2; i++)
        ck_assert_int_eq(device_cuda_open(i, NULL, &devices[i], &e), 0);
    ck_assert_int_eq(transport_nccl_node_open(&node, &e), 0);
    for (unsigned i = 0; i < 200; i++) {
        struct transport *t;
        struct done d;
        struct transport_connect c = {.on_done = connect_done, .arg = &d};
        done_init(&d);
        ck_assert_int_eq(
            transport_nccl_open(node, devices, takes_part, 2, i + 1, NULL, NULL, &t, &e), 0);
        ck_assert_int_eq(transport_begin(t, 1, &e), 0);
        ck_assert_int_eq(transport_connect(t, &c), 0);
        ck_assert_int_eq(status_of(&d), 0);
        transport_close(t);
    }
    transport_nccl_node_close(node);
    for (uint32_t i = 0; i < 2; i++)
        device_close(devices[i]);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(two_processes_exchange_in_one_communicator)                                                  \
    X(a_member_that_never_comes_ends_it_at_the_deadline)                                           \
    X(a_killed_peer_is_silence_until_aborted_and_a_new_id_makes_a_new_communicator)                \
    X(groups_in_an_order_that_does_not_match_hang_and_an_abort_ends_them)                          \
    X(an_asynchronous_error_fails_the_group_without_being_asked)                                   \
    X(an_attempt_aborted_while_members_join_is_over_at_once_and_the_next_one_works)                \
    X(an_abort_that_hangs_is_told_by_the_watchdog)                                                 \
    X(one_gpu_in_two_ranks_is_refused_before_nccl_is_asked)                                        \
    X(an_nccl_that_is_too_old_is_refused_with_its_version)                                         \
    X(every_nccl_call_that_fails_is_told_and_nothing_hangs)                                        \
    X(open_begin_and_connect_without_memory_fail_and_leave_nothing_behind)                         \
    X(two_hundred_communicators_come_and_go)
#include "test/lib/main.h"
