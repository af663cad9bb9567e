/* Buffers that are registered with NCCL, and the interface that it uses. */
#include "test/lib/nccl_side.h"

#include <cuda_runtime_api.h>

static uint64_t registered(void)
{
    return __atomic_load_n(&counters()->registered, __ATOMIC_RELAXED);
}

/* A communicator of one rank, which sends to itself. */
static struct side alone(const struct transport_nccl_options *options)
{
    struct side x = {0};
    struct err e = {0};
    static const bool takes_part[1] = {true};
    ck_assert_msg(device_cuda_open(0, NULL, &x.d, &e) == 0, "%s", e.text);
    ck_assert_int_eq(device_stream_new(x.d, "net", &x.s, &e), 0);
    x.out = segment(x.d, BYTES);
    x.in = segment(x.d, BYTES);
    ck_assert_msg(transport_nccl_node_open(&x.node, &e) == 0, "%s", e.text);
    ck_assert_int_eq(transport_nccl_open(x.node, &x.d, takes_part, 1, 9, NULL, options, &x.t, &e),
                     0);
    ck_assert_int_eq(transport_begin(x.t, 1, &e), 0);
    return x;
}

static int send_to_itself(struct side *x, uint8_t value)
{
    struct transport_message m[2] = {
        {.data = x->out, .bytes = BYTES, .peer = 0, .send = true, .network = true},
        {.data = x->in, .bytes = BYTES, .peer = 0, .network = true}};
    struct done d;
    struct transport_group g = {m, 2, group_done, &d};
    memset(x->out, value, BYTES);
    memset(x->in, 0, BYTES);
    done_init(&d);
    ck_assert_int_eq(transport_enqueue(x->t, 0, x->s, &g), 0);
    int status = status_of(&d);
    ck_assert(status != 0 || all_are(x->in, value));
    return status;
}

static void end_alone(struct side *x, void *ring)
{
    device_stream_free(x->s);
    transport_close(x->t);
    ck_assert_uint_eq(registered(), 0);
    if (ring != NULL)
        transport_nccl_node_free(x->node, x->d, ring);
    transport_nccl_node_close(x->node);
    device_close(x->d);
    ck_assert_uint_eq(counters()->open_handles, 0);
    ck_assert_uint_eq(counters()->allocated_bytes, 0);
    ck_assert_uint_eq(counters()->mistakes, 0);
}

static void *ring_of(struct side *x)
{
    void *ring = NULL;
    struct err e = {0};
    ck_assert_msg(transport_nccl_node_alloc(x->node, x->d, BYTES, &ring, &e) == 0, "%s", e.text);
    transport_nccl_buffer(x->t, 0, ring, BYTES);
    return ring;
}

START_TEST(a_buffer_is_registered_once_for_each_communicator_and_let_go_before_it_ends)
{
    struct side x = alone(NULL);
    void *ring = ring_of(&x);
    for (uint8_t i = 1; i <= 3; i++)
        ck_assert_int_eq(send_to_itself(&x, i), 0);
    ck_assert_uint_eq(registered(), 1);
    struct transport_counters c = transport_counters(x.t, 0);
    ck_assert_uint_eq(c.registrations, 1);
    ck_assert_uint_eq(c.refused_registrations, 0);
    end_alone(&x, ring);
}
END_TEST

/* From one part of the registered buffer to another; send_to_itself has memory that is not. */
START_TEST(messages_that_lie_in_the_registered_buffer_are_counted)
{
    enum { HALF = BYTES / 2 };
    struct side x = alone(NULL);
    char *ring = ring_of(&x);
    struct transport_message m[2] = {
        {.data = ring, .bytes = HALF, .peer = 0, .send = true, .network = true},
        {.data = ring + (BYTES - HALF), .bytes = HALF, .peer = 0, .network = true}};
    struct done d;
    struct transport_group g = {m, 2, group_done, &d};
    ck_assert_int_eq(send_to_itself(&x, 1), 0);
    struct transport_counters c = transport_counters(x.t, 0);
    ck_assert(c.hits == 0 && c.hit_bytes == 0 && c.registered_bytes == BYTES);
    done_init(&d);
    ck_assert_int_eq(transport_enqueue(x.t, 0, x.s, &g), 0);
    ck_assert_int_eq(status_of(&d), 0);
    c = transport_counters(x.t, 0);
    ck_assert(c.hits == 2 && c.hit_bytes == 2 * HALF);
    transport_nccl_buffer(x.t, 0, NULL, 0);
    ck_assert_uint_eq(transport_counters(x.t, 0).registered_bytes, 0);
    end_alone(&x, ring);
}
END_TEST

START_TEST(a_buffer_that_is_replaced_is_let_go_before_it_may_be_freed)
{
    struct side x = alone(NULL);
    void *first = ring_of(&x);
    ck_assert_int_eq(send_to_itself(&x, 1), 0);
    transport_nccl_buffer(x.t, 0, NULL, 0);
    ck_assert_uint_eq(registered(), 0);
    transport_nccl_node_free(x.node, x.d, first);
    void *second = ring_of(&x);
    ck_assert_int_eq(send_to_itself(&x, 2), 0);
    ck_assert_uint_eq(registered(), 1);
    ck_assert_uint_eq(transport_counters(x.t, 0).registrations, 2);
    end_alone(&x, second);
}
END_TEST

/* Another process's memory, opened by its IPC handle, is what the library refuses: nothing is lost by it. */
START_TEST(a_refusal_is_counted_and_no_error)
{
    void *of_another = NULL;
    int status = 0, pipes[2][2];
    cudaIpcMemHandle_t handle;
    ck_assert(pipe(pipes[0]) == 0 && pipe(pipes[1]) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        void *p = NULL;
        char c;
        if (cudaMalloc(&p, BYTES) != cudaSuccess || cudaIpcGetMemHandle(&handle, p) != cudaSuccess)
            _exit(1);
        (void)!write(pipes[0][1], &handle, sizeof handle);
        (void)!read(pipes[1][0], &c, 1);
        _exit(0);
    }
    ck_assert_int_eq(read(pipes[0][0], &handle, sizeof handle), sizeof handle);
    struct side x = alone(NULL);
    ck_assert_int_eq(cudaIpcOpenMemHandle(&of_another, handle, cudaIpcMemLazyEnablePeerAccess), 0);
    transport_nccl_buffer(x.t, 0, of_another, BYTES);
    for (uint8_t i = 1; i <= 2; i++)
        ck_assert_int_eq(send_to_itself(&x, i), 0);
    struct transport_counters c = transport_counters(x.t, 0);
    ck_assert_uint_eq(c.registrations, 0);
    ck_assert_uint_eq(c.refused_registrations, 1);
    ck_assert_int_eq(cudaIpcCloseMemHandle(of_another), 0);
    ck_assert_int_eq(write(pipes[1][1], "x", 1), 1);
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    end_alone(&x, NULL);
}
END_TEST

START_TEST(an_nccl_that_allocates_nothing_leaves_it_to_cuda)
{
    struct err e = {0};
    void *p = NULL;
    ck_assert_int_eq(setenv("STANDIN_FAIL", "ncclMemAlloc:1:1,ncclCommRegister:1:5", 1), 0);
    struct side x = alone(NULL);
    ck_assert_int_eq(transport_nccl_node_alloc(x.node, x.d, BYTES, &p, &e), RS_EUNAVAIL);
    ck_assert_ptr_nonnull(strstr(e.text, "allocating 300000 bytes"));
    ck_assert_int_eq(device_alloc(x.d, BYTES, &p, &e), 0);
    transport_nccl_buffer(x.t, 0, p, BYTES);
    ck_assert_int_eq(send_to_itself(&x, 1), 0);
    ck_assert_uint_eq(transport_counters(x.t, 0).refused_registrations, 1);
    transport_nccl_buffer(x.t, 0, NULL, 0);
    device_free(x.d, p, BYTES);
    end_alone(&x, NULL);
}
END_TEST

/* What runs may still read the buffer: the abort comes first then, and takes the registration along. */
START_TEST(an_abort_with_a_group_in_flight_lets_go_of_its_buffer_itself)
{
    ck_assert_int_eq(setenv("STANDIN_HANG", "group:2", 1), 0);
    struct side x = alone(NULL);
    void *ring = ring_of(&x);
    ck_assert_int_eq(send_to_itself(&x, 1), 0);
    struct transport_message m[2] = {
        {.data = x.out, .bytes = BYTES, .peer = 0, .send = true, .network = true},
        {.data = x.in, .bytes = BYTES, .peer = 0, .network = true}};
    struct done d;
    struct transport_group g = {m, 2, group_done, &d};
    struct err e = {0};
    done_init(&d);
    ck_assert_int_eq(transport_enqueue(x.t, 0, x.s, &g), 0);
    ck_assert(!done_within(&d, 50));
    transport_abort(x.t);
    ck_assert_int_eq(status_of(&d), RS_ECANCELED);
    ck_assert_uint_eq(registered(), 0);
    ck_assert_msg(transport_begin(x.t, 2, &e) == 0, "%s", e.text);
    ck_assert_int_eq(send_to_itself(&x, 3), 0);
    ck_assert_uint_eq(registered(), 1); /* with the new communicator */
    end_alone(&x, ring);
}
END_TEST

/* --- the interface ----------------------------------------------------------------------------- */

START_TEST(the_interface_of_the_data_address_is_nccls)
{
    struct err e = {0};
    ck_assert_msg(transport_nccl_environment("127.0.0.1", &e) == 0, "%s", e.text);
    ck_assert_str_eq(getenv("NCCL_SOCKET_IFNAME"), "=lo");
    ck_assert_str_eq(getenv("NCCL_SOCKET_FAMILY"), "AF_INET");
}
END_TEST

START_TEST(every_address_of_the_loopback_is_the_machines)
{
    struct err e = {0};
    ck_assert_msg(transport_nccl_environment("127.0.0.3", &e) == 0, "%s", e.text);
    ck_assert_str_eq(getenv("NCCL_SOCKET_IFNAME"), "=lo");
}
END_TEST

START_TEST(what_an_operator_has_set_stays)
{
    struct err e = {0};
    ck_assert_int_eq(setenv("NCCL_SOCKET_IFNAME", "nothing,l", 1), 0);
    ck_assert_msg(transport_nccl_environment("127.0.0.1", &e) == 0, "%s", e.text);
    ck_assert_str_eq(getenv("NCCL_SOCKET_IFNAME"), "nothing,l");
    ck_assert_ptr_null(getenv("NCCL_SOCKET_FAMILY"));
}
END_TEST

/* C07 (NVIDIA/nccl#1837): an interface that is not there was found out late, as "family 59936". */
START_TEST(an_interface_or_address_that_is_not_there_is_named_with_those_that_are)
{
    struct err e = {0};
    ck_assert_int_eq(transport_nccl_environment("192.0.2.77", &e), RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "192.0.2.77"));
    ck_assert_ptr_nonnull(strstr(e.text, "lo"));
    ck_assert_ptr_null(getenv("NCCL_SOCKET_IFNAME"));
    ck_assert_int_eq(setenv("NCCL_SOCKET_IFNAME", "=eth99", 1), 0);
    ck_assert_int_eq(transport_nccl_environment("127.0.0.1", &e), RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "NCCL_SOCKET_IFNAME==eth99"));
    ck_assert_ptr_nonnull(strstr(e.text, "lo"));
}
END_TEST

/* C14 (NVIDIA/nccl#1936): with a fixed address of the bootstrap each communicator has the same id and port. */
START_TEST(a_fixed_id_is_refused_at_the_start)
{
    struct err e = {0};
    ck_assert_int_eq(setenv("NCCL_COMM_ID", "127.0.0.1:7777", 1), 0);
    ck_assert_int_eq(transport_nccl_environment("127.0.0.1", &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "NCCL_COMM_ID=127.0.0.1:7777"));
    ck_assert_ptr_nonnull(strstr(e.text, "unset it"));
    ck_assert_ptr_null(getenv("NCCL_SOCKET_IFNAME"));
}
END_TEST

/* It overrides what a communicator is configured to be. */
START_TEST(communicators_that_block_are_refused_at_the_start)
{
    struct err e = {0};
    ck_assert_int_eq(setenv("NCCL_COMM_BLOCKING", "1", 1), 0);
    ck_assert_int_eq(transport_nccl_environment("127.0.0.1", &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "NCCL_COMM_BLOCKING=1"));
    ck_assert_ptr_nonnull(strstr(e.text, "unset it"));
    ck_assert_int_eq(setenv("NCCL_COMM_BLOCKING", "0", 1), 0);
    ck_assert_msg(transport_nccl_environment("127.0.0.1", &e) == 0, "%s", e.text);
}
END_TEST

/* As NCCL's user guide has it: prefixes, "=" for the name itself, "^" for all others. */
START_TEST(a_list_of_interfaces_is_read_as_nccl_reads_it)
{
    static const struct {
        const char *list, *name;
        bool matches;
    } cases[] = {{"eth", "eth0", true},           {"eth", "veth0", false},
                 {"=eth", "eth0", false},         {"=eth0", "eth0", true},
                 {"=eth0", "eth01", false},       {"eth0", "eth01", true},
                 {"^docker,lo", "eth0", true},    {"^docker,lo", "docker0", false},
                 {"^=docker0", "docker0", false}, {"^=docker", "docker0", true},
                 {"ib,eth:7000", "eth3", true},   {"ib,eth", "lo", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        ck_assert_msg(transport_nccl_interface_matches(cases[i].list, cases[i].name) ==
                          cases[i].matches,
                      "%s with %s", cases[i].list, cases[i].name);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_buffer_is_registered_once_for_each_communicator_and_let_go_before_it_ends)                 \
    X(a_buffer_that_is_replaced_is_let_go_before_it_may_be_freed)                                  \
    X(a_refusal_is_counted_and_no_error)                                                           \
    X(an_nccl_that_allocates_nothing_leaves_it_to_cuda)                                            \
    X(an_abort_with_a_group_in_flight_lets_go_of_its_buffer_itself)                                \
    X(every_address_of_the_loopback_is_the_machines)                                               \
    X(the_interface_of_the_data_address_is_nccls)                                                  \
    X(what_an_operator_has_set_stays)                                                              \
    X(an_interface_or_address_that_is_not_there_is_named_with_those_that_are)                      \
    X(messages_that_lie_in_the_registered_buffer_are_counted)                                      \
    X(communicators_that_block_are_refused_at_the_start)                                           \
    X(a_fixed_id_is_refused_at_the_start)                                                          \
    X(a_list_of_interfaces_is_read_as_nccl_reads_it)
#include "test/lib/main.h"
