/* Communicators that are shrunk where a member has left, between processes (CASES.md C12): what is left works
 * without an id; where it can't be done a new one is made by the id, and nothing is left behind. */
#include "test/lib/best_of.h"
#include "test/lib/nccl_side.h"

enum { PARENTS = 3 };

/* What the members of a test agree on before they are forked. */
static uint8_t first_id[TRANSPORT_NCCL_ID_BYTES], second_id[TRANSPORT_NCCL_ID_BYTES];
static int until_told[2]; /* a pipe: rank 2 stays until it is closed */

static int connect_status(struct transport *t, struct err *ret_err)
{
    struct done d;
    struct transport_connect c = {.on_done = connect_done,
                                  .arg = &d,
                                  .deadline_ns =
                                      clock_mono_ns() + SIDE_WAIT_MS * UINT64_C(1000000)};
    done_init(&d);
    ck_assert_int_eq(transport_connect(t, &c), 0);
    int status = status_of(&d);
    *ret_err = d.err;
    return status;
}

/* A member of the three, joined. */
static struct side join_three(uint32_t here)
{
    struct side x = {.here = here};
    struct err e = {0};
    struct device *devices[PARENTS] = {NULL, NULL, NULL};
    static const bool takes_part[PARENTS] = {true, true, true};
    ck_assert_msg(device_cuda_open(0, NULL, &x.d, &e) == 0, "%s", e.text);
    ck_assert_int_eq(device_stream_new(x.d, "net", &x.s, &e), 0);
    x.out = segment(x.d, BYTES);
    x.in = segment(x.d, BYTES);
    memset(x.out, 0x10 + (int)here, BYTES);
    ck_assert_msg(transport_nccl_node_open(&x.node, &e) == 0, "%s", e.text);
    devices[here] = x.d;
    ck_assert_msg(
        transport_nccl_open(x.node, devices, takes_part, PARENTS, 1, first_id, NULL, &x.t, &e) == 0,
        "%s", e.text);
    ck_assert_int_eq(transport_begin(x.t, 1, &e), 0);
    ck_assert_msg(connect_status(x.t, &e) == 0, "%s", e.text);
    return x;
}

/* Epoch 2: rank 2 has left; ranks 0 and 1 are the plan's devices 0 and 1 again. */
static void shrink(struct side *x, uint32_t ms, uint32_t watchdog_ms)
{
    struct transport *parent = x->t;
    struct err e = {0};
    struct device *devices[2] = {NULL, NULL};
    static const bool takes_part[2] = {true, true};
    static const uint32_t excluded[1] = {2};
    struct transport_nccl_options options = {
        .watchdog_ms = watchdog_ms,
        .shrink = {.parent = parent, .excluded = excluded, .n_excluded = 1, .ms = ms}};
    devices[x->here] = x->d;
    ck_assert_msg(transport_nccl_open(x->node, devices, takes_part, 2, 2, second_id, &options,
                                      &x->t, &e) == 0,
                  "%s", e.text);
    transport_close(parent);
}

/* What both who are left do; 0 where it is as expected. */
static int leave_and_exchange(uint32_t here, const char *variable, const char *value,
                              uint32_t n_shrunk, uint32_t n_failed)
{
    if (variable != NULL)
        (void)setenv(variable, value, 1);
    struct side x = join_three(here);
    struct err e = {0};
    bool ok = exchange_status(&x) == 0 && all_are(x.in, (uint8_t)(0x11 - here));
    shrink(&x, 500, 0);
    memset(x.in, 0, BYTES);
    ok = ok && transport_begin(x.t, 2, &e) == 0 && connect_status(x.t, &e) == 0;
    ok = ok && exchange_status(&x) == 0 && all_are(x.in, (uint8_t)(0x11 - here));
    struct transport_counters c = transport_counters(x.t, here);
    if (!ok || c.shrunk != n_shrunk || c.shrinks_failed != n_failed)
        fprintf(stderr, "rank %u: %s; shrunk %llu, failed %llu\n", here, e.text,
                (unsigned long long)c.shrunk, (unsigned long long)c.shrinks_failed);
    ok = ok && c.shrunk == n_shrunk && c.shrinks_failed == n_failed;
    side_close(&x);
    ok = ok && counters()->registered == 0 && counters()->mistakes == 0 &&
         counters()->open_handles == 0;
    return ok ? 0 : 1;
}

static const char *const no_faults[2];
static const char *const *fault_variables = no_faults, *const *fault_values = no_faults;
static uint32_t expected_shrunk, expected_failed;

static int second_main(const uint8_t *id)
{
    (void)id;
    return leave_and_exchange(1, fault_variables[1], fault_values[1], expected_shrunk,
                              expected_failed);
}

static int third_main(const uint8_t *id)
{
    char c;
    (void)id;
    close(until_told[1]);
    struct side x = join_three(2);
    (void)!read(until_told[0], &c, 1);
    side_close(&x);
    return 0;
}

/* kill: the third dies before the others shrink; else it is there, idle, until they have. */
static void run(bool dies, uint32_t n_shrunk, uint32_t n_failed)
{
    expected_shrunk = n_shrunk;
    expected_failed = n_failed;
    id_make(first_id);
    id_make(second_id);
    ck_assert_int_eq(pipe(until_told), 0);
    pid_t third = other(third_main, NULL), second = other(second_main, NULL);
    close(until_told[0]);
    struct side x = join_three(0);
    if (dies) {
        ck_assert_int_eq(kill(third, SIGKILL), 0);
        ck_assert_int_eq(status_of_process(third), -SIGKILL);
    }
    /* the same as leave_and_exchange, but for the joining */
    struct err e = {0};
    if (fault_variables[0] != NULL)
        (void)setenv(fault_variables[0], fault_values[0], 1);
    ck_assert_int_eq(exchange_status(&x), 0);
    ck_assert(all_are(x.in, 0x11));
    shrink(&x, 500, 0);
    memset(x.in, 0, BYTES);
    ck_assert_int_eq(transport_begin(x.t, 2, &e), 0);
    ck_assert_msg(connect_status(x.t, &e) == 0, "%s", e.text);
    ck_assert_int_eq(exchange_status(&x), 0);
    ck_assert(all_are(x.in, 0x11));
    struct transport_counters c = transport_counters(x.t, 0);
    ck_assert_uint_eq(c.shrunk, n_shrunk);
    ck_assert_uint_eq(c.shrinks_failed, n_failed);
    ck_assert_int_eq(status_of_process(second), 0);
    close(until_told[1]);
    if (!dies)
        ck_assert_int_eq(status_of_process(third), 0);
    side_close(&x);
    ck_assert_uint_eq(counters()->open_handles, 0);
    ck_assert_uint_eq(counters()->mistakes, 0);
}

START_TEST(those_who_are_left_shrink_while_the_other_is_idle)
{
    run(false, 1, 0);
}
END_TEST

START_TEST(those_who_are_left_shrink_after_the_other_has_died)
{
    run(true, 1, 0);
}
END_TEST

START_TEST(an_nccl_that_refuses_to_shrink_makes_a_new_communicator)
{
    static const char *const variables[2] = {"STANDIN_FAIL", "STANDIN_FAIL"},
                             *const values[2] = {"ncclCommShrink:1:5", "ncclCommShrink:1:5"};
    fault_variables = variables;
    fault_values = values;
    run(true, 0, 1);
}
END_TEST

START_TEST(shrinking_that_fails_later_makes_a_new_communicator)
{
    static const char *const variables[2] = {"STANDIN_ASYNC", "STANDIN_ASYNC"}, *const values[2] = {
                                                                                    "shrink:1:3",
                                                                                    "shrink:1:3"};
    fault_variables = variables;
    fault_values = values;
    run(false, 0, 1);
}
END_TEST

/* One refuses and the other waits for it: in vain, for its 500 ms, and then they meet by the id. */
START_TEST(one_that_fails_and_one_that_waits_meet_by_the_id)
{
    static const char *const variables[2] = {"STANDIN_FAIL", NULL}, *const values[2] = {
                                                                        "ncclCommShrink:1:5", NULL};
    fault_variables = variables;
    fault_values = values;
    run(true, 0, 1);
}
END_TEST

START_TEST(shrinking_that_hangs_ends_at_its_deadline)
{
    static const char *const variables[2] = {"STANDIN_HANG", NULL}, *const values[2] = {"shrink:1",
                                                                                        NULL};
    fault_variables = variables;
    fault_values = values;
    run(true, 0, 1);
}
END_TEST

/* --- without others ------------------------------------------------------------------------------- */

/* Two local devices, of which the second leaves: a device that is local can't be left out. */
START_TEST(a_local_device_that_has_left_makes_a_new_communicator)
{
    struct device *devices[2];
    static const bool both[2] = {true, true}, one[1] = {true};
    static const uint32_t excluded[1] = {1};
    struct transport_nccl_node *node;
    struct transport *parent, *t;
    struct err e = {0};
    for (uint32_t i = 0; i < 2; i++)
        ck_assert_int_eq(device_cuda_open(i, NULL, &devices[i], &e), 0);
    ck_assert_int_eq(transport_nccl_node_open(&node, &e), 0);
    ck_assert_int_eq(transport_nccl_open(node, devices, both, 2, 1, NULL, NULL, &parent, &e), 0);
    ck_assert_int_eq(transport_begin(parent, 1, &e), 0);
    ck_assert_int_eq(connect_status(parent, &e), 0);
    struct transport_nccl_options options = {
        .shrink = {.parent = parent, .excluded = excluded, .n_excluded = 1}};
    ck_assert_int_eq(transport_nccl_open(node, devices, one, 1, 2, NULL, &options, &t, &e), 0);
    transport_close(parent);
    ck_assert_msg(transport_begin(t, 2, &e) == 0, "%s", e.text);
    ck_assert_int_eq(connect_status(t, &e), 0);
    ck_assert_uint_eq(transport_counters(t, 0).shrinks_failed, 1);
    transport_close(t);
    transport_nccl_node_close(node);
    for (uint32_t i = 0; i < 2; i++)
        device_close(devices[i]);
}
END_TEST

static uint64_t taken_and_never_used(void *arg)
{
    (void)arg;
    id_make(first_id);
    id_make(second_id);
    ck_assert_int_eq(pipe(until_told), 0);
    pid_t third = other(third_main, NULL);
    pid_t second = fork();
    if (second == 0) {
        (void)alarm(SIDE_ALARM_S);
        struct side y = join_three(1);
        side_close(&y);
        _exit(0);
    }
    struct side x = join_three(0);
    shrink(&x, 0, 0);
    uint64_t before = clock_mono_ns();
    side_close(&x);
    uint64_t took = clock_mono_ns() - before;
    close(until_told[1]);
    ck_assert_int_eq(status_of_process(second), 0);
    ck_assert_int_eq(status_of_process(third), 0);
    ck_assert_uint_eq(counters()->open_handles, 0);
    return took;
}

START_TEST(what_was_taken_and_never_used_is_ended_too)
{
    in_time_once(apart, &(struct apart){taken_and_never_used, NULL}, 3000000000U);
}
END_TEST

START_TEST(shrinking_without_memory_fails_and_leaves_the_parent_as_it_was)
{
    struct device *d;
    static const bool takes_part[1] = {true};
    static const uint32_t excluded[1] = {7};
    struct transport_nccl_node *node;
    struct transport *parent;
    struct err e = {0};
    ck_assert_int_eq(device_cuda_open(0, NULL, &d, &e), 0);
    ck_assert_int_eq(transport_nccl_node_open(&node, &e), 0);
    ck_assert_int_eq(transport_nccl_open(node, &d, takes_part, 1, 1, NULL, NULL, &parent, &e), 0);
    ck_assert_int_eq(transport_begin(parent, 1, &e), 0);
    ck_assert_int_eq(connect_status(parent, &e), 0);
    struct transport_nccl_options options = {
        .shrink = {.parent = parent, .excluded = excluded, .n_excluded = 1}};
    for (long i = 1;; i++) {
        struct transport *t = NULL;
        mem_fail_at(i);
        int r = transport_nccl_open(node, &d, takes_part, 1, 2, NULL, &options, &t, &e);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        if (r == 0) {
            transport_close(t);
            break;
        }
        ck_assert_int_lt(i, 50);
    }
    ck_assert_int_eq(transport_begin(parent, 2, &e), 0);
    ck_assert_int_eq(connect_status(parent, &e), 0);
    transport_close(parent);
    transport_nccl_node_close(node);
    device_close(d);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(those_who_are_left_shrink_while_the_other_is_idle)                                           \
    X(those_who_are_left_shrink_after_the_other_has_died)                                          \
    X(an_nccl_that_refuses_to_shrink_makes_a_new_communicator)                                     \
    X(shrinking_that_fails_later_makes_a_new_communicator)                                         \
    X(one_that_fails_and_one_that_waits_meet_by_the_id)                                            \
    X(shrinking_that_hangs_ends_at_its_deadline)                                                   \
    X(a_local_device_that_has_left_makes_a_new_communicator)                                       \
    X(what_was_taken_and_never_used_is_ended_too)                                                  \
    X(shrinking_without_memory_fails_and_leaves_the_parent_as_it_was)
#include "test/lib/main.h"
