/* The contract of transport.h, for every implementation in `kinds`; and what is the in-memory
 * twin's own: rates, death of a device. */
#include "transport/transport.h"

#include <check.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "device/device_cuda.h"
#include "test/lib/best_of.h"
#include "test/lib/transport_nccl_kind.h"
#include "test/lib/waited.h"
#include "transport/transport_local.h"

enum { MAX_DEVICES = 8 };

/* Open, unless a test shuts it. */
static struct fence fence;

/* What a test needs from an implementation: a transport that spans n local devices. */
struct kind {
    const char *name;
    struct transport *(*open)(struct device *const *devices, uint32_t n, uint64_t seed);
    bool by_devices; /* they do the moving: delays and the fence are theirs */
};

static struct transport *open_mem(struct device *const *devices, uint32_t n, uint64_t seed)
{
    struct transport_mem_options options = {
        .seed = seed, .max_delay_us = seed != 0 ? 300 : 0, .fence = &fence};
    struct transport *t = NULL;
    ck_assert_int_eq(transport_mem_open(devices, n, 7, &options, &t, NULL), 0);
    return t;
}

/* Never closed: it holds no test's state, and Check ends the test's process. */
static struct transport *open_tcp_streams(struct device *const *devices, uint32_t n,
                                          uint32_t streams)
{
    static struct transport_tcp_node *endpoint;
    struct transport_tcp_device all[MAX_DEVICES] = {0};
    struct transport_tcp_options options = {.streams = streams, .fence = &fence};
    struct transport *t = NULL;
    if (endpoint == NULL)
        ck_assert_int_eq(transport_tcp_node_open("127.0.0.1", 0, &endpoint, NULL), 0);
    for (uint32_t i = 0; i < n; i++)
        all[i].device = devices[i];
    ck_assert_int_eq(transport_tcp_open(endpoint, all, n, 7, &options, &t, NULL), 0);
    return t;
}

/* Its delays are the network's. */
static struct transport *open_tcp(struct device *const *devices, uint32_t n, uint64_t seed)
{
    (void)seed;
    return open_tcp_streams(devices, n, 1);
}

static struct transport *open_tcp_4(struct device *const *devices, uint32_t n, uint64_t seed)
{
    (void)seed;
    return open_tcp_streams(devices, n, 4);
}

/* NCCL on the stand-in comes alone: with TEST_DEVICE=cuda. */
#if defined(RS_CUDA)
static struct transport *open_nccl(struct device *const *devices, uint32_t n, uint64_t seed)
{
    return test_open_nccl(devices, n, seed, &fence);
}
enum { HAS_NCCL = 1 };
#else
#define open_nccl NULL
enum { HAS_NCCL = 0 };
#endif

/* Copies of devices alone. */
static struct transport *open_local(struct device *const *devices, uint32_t n, uint64_t seed)
{
    bool pairs[MAX_DEVICES * MAX_DEVICES];
    struct transport *t = NULL;
    (void)seed;
    memset(pairs, 1, sizeof pairs);
    ck_assert_int_eq(transport_local_open(devices, pairs, n, 7, NULL, &t, NULL), 0);
    return t;
}

/* Every other pair is copied, the rest goes on: most groups have messages of both. */
static struct transport *mixed(struct device *const *devices, uint32_t n, struct transport *behind)
{
    bool pairs[MAX_DEVICES * MAX_DEVICES];
    struct transport *t = NULL;
    for (uint32_t i = 0; i < n * n; i++)
        pairs[i] = (i / n + i % n) % 2 == 1 && i != 1;
    ck_assert_int_eq(transport_local_open(devices, pairs, n, 7, behind, &t, NULL), 0);
    return t;
}

static struct transport *open_local_mem(struct device *const *devices, uint32_t n, uint64_t seed)
{
    return mixed(devices, n, open_mem(devices, n, seed));
}

static struct transport *open_local_tcp(struct device *const *devices, uint32_t n, uint64_t seed)
{
    return mixed(devices, n, open_tcp(devices, n, seed));
}

#if defined(RS_CUDA)
static struct transport *open_local_nccl(struct device *const *devices, uint32_t n, uint64_t seed)
{
    return mixed(devices, n, open_nccl(devices, n, seed));
}
#else
#define open_local_nccl NULL
#endif

static const struct kind all_kinds[] = {{"nccl", open_nccl, false},
                                        {"copies", open_local, true},
                                        {"copies and nccl", open_local_nccl, true},
                                        {"mem", open_mem, false},
                                        {"tcp", open_tcp, false},
                                        {"tcp, 4 streams", open_tcp_4, false},
                                        {"copies", open_local, true},
                                        {"copies and mem", open_local_mem, true},
                                        {"copies and tcp", open_local_tcp, true}};
enum { CUDA_KINDS = 3, HOST_KINDS = 6 };
#define kinds   (test_on_cuda() ? all_kinds : all_kinds + CUDA_KINDS)
#define N_KINDS (test_on_cuda() ? HAS_NCCL * CUDA_KINDS : HOST_KINDS)

/* --- a node of n devices with one stream each ------------------------------------------------- */

struct node {
    struct transport *t;
    struct device *devices[MAX_DEVICES];
    struct device_stream *streams[MAX_DEVICES];
    uint32_t n;
};

static void node_devices_of(struct node *node, uint32_t n, struct fence *of, uint64_t seed)
{
    memset(node, 0, sizeof(*node));
    node->n = n;
    for (uint32_t i = 0; i < n; i++) {
        node->devices[i] = test_device_open(i, of, seed);
#if defined(RS_CUDA)
        for (uint32_t k = 0; k < i && device_is_cuda(node->devices[i]); k++)
            ck_assert_int_eq(device_cuda_connect(node->devices[k], node->devices[i], NULL), 0);
#endif
        ck_assert_int_eq(device_stream_new(node->devices[i], "net", &node->streams[i], NULL), 0);
    }
}

static void node_devices(struct node *node, uint32_t n)
{
    node_devices_of(node, n, NULL, 0);
}

static void node_open(struct node *node, const struct kind *kind, uint32_t n, uint64_t seed)
{
    node_devices_of(node, n, kind->by_devices ? &fence : NULL, kind->by_devices ? seed : 0);
    node->t = kind->open(node->devices, n, seed);
    ck_assert_int_eq(transport_begin(node->t, 1, NULL), 0);
}

static void node_close(struct node *node)
{
    for (uint32_t i = 0; i < node->n; i++)
        device_stream_free(node->streams[i]);
    transport_close(node->t);
    for (uint32_t i = 0; i < node->n; i++)
        device_close(node->devices[i]);
}

static int waited_status(struct waited *w)
{
    return waited_status_in(w, 60000);
}

static void enqueue(struct node *node, uint32_t device, struct waited *w)
{
    ck_assert_int_eq(transport_enqueue(node->t, device, node->streams[device], &w->group), 0);
}

/* The pattern from byte `at` on, into memory that no other thread knows: nothing for ThreadSanitizer to see. */
__attribute__((no_sanitize("thread"))) static void pattern_run(uint8_t *run, uint32_t from,
                                                               uint32_t to, uint64_t at, size_t n)
{
    for (size_t i = 0; i < n; i++)
        run[i] = (uint8_t)(from * 31 + to * 17 + (at + i) * 7 + ((at + i) >> 8));
}

static uint8_t *filled(uint32_t from, uint32_t to, uint64_t bytes)
{
    uint8_t *p = malloc(bytes);
    pattern_run(p, from, to, 0, bytes);
    return p;
}

static void check_filled(const uint8_t *p, uint32_t from, uint32_t to, uint64_t bytes)
{
    uint8_t *expected = filled(from, to, bytes);
    uint64_t i = 0;
    if (memcmp(p, expected, bytes) != 0)
        while (p[i] == expected[i])
            i++;
    else
        i = bytes;
    ck_assert_msg(i == bytes, "%u to %u differs at byte %llu", from, to, (unsigned long long)i);
    free(expected);
}

/* --- contract --------------------------------------------------------------------------------- */

struct seeded {
    const struct kind *kind;
    uint64_t seed;
};

/* All pairs, sizes 0 (left out), 1 and 4 MiB, listed in another order on each rank. */
static uint64_t all_pairs(void *arg)
{
    const struct seeded *of = arg;
    enum { N = 4, BIG = 4 << 20 };
    static const uint64_t sizes[3] = {0, 1, BIG};
    struct node node;
    struct transport_message messages[N][2 * N];
    struct waited waited[N];
    node_open(&node, of->kind, N, of->seed);
    uint64_t started = clock_mono_ns();
    for (uint32_t d = 0; d < N; d++) {
        uint32_t n = 0;
        for (uint32_t k = 0; k < N; k++) {
            uint32_t peer = (k + d) % N;
            uint64_t out = sizes[(d + peer) % 3], in = sizes[(peer + d) % 3];
            if (out > 0)
                messages[d][n++] = (struct transport_message){
                    filled(d, peer, out), out, peer, true, true, 0, NULL, 0};
            if (in > 0)
                messages[d][n++] =
                    (struct transport_message){calloc(1, in), in, peer, false, true, 0, NULL, 0};
        }
        waited_init(&waited[d], messages[d], n);
        enqueue(&node, d, &waited[d]);
    }
    for (uint32_t d = 0; d < N; d++) {
        ck_assert_int_eq(waited_status(&waited[d]), 0);
        for (uint32_t i = 0; i < waited[d].group.n_messages; i++) {
            struct transport_message *x = &messages[d][i];
            if (!x->send)
                check_filled(x->data, x->peer, d, x->bytes);
        }
    }
    uint64_t took = clock_mono_ns() - started;
    ck_assert(transport_quiesced(node.t));
    uint64_t sent = 0, received = 0;
    for (uint32_t d = 0; d < N; d++) {
        struct transport_counters c = transport_counters(node.t, d);
        sent += c.network_sent_bytes;
        received += c.network_received_bytes;
        ck_assert_uint_eq(c.domain_sent_bytes + c.domain_received_bytes, 0);
        for (uint32_t i = 0; i < waited[d].group.n_messages; i++)
            free(messages[d][i].data);
    }
    uint64_t expected = 0;
    for (uint32_t a = 0; a < N; a++)
        for (uint32_t b = 0; b < N; b++)
            expected += sizes[(a + b) % 3];
    ck_assert_uint_eq(sent, expected);
    ck_assert_uint_eq(received, expected);
    node_close(&node);
    return took;
}

START_TEST(all_pairs_arrive_whatever_the_order_in_a_group)
{
    for (int k = 0; k < N_KINDS; k++)
        in_time_once(all_pairs, &(struct seeded){&kinds[k], 0}, 5000000000U);
}
END_TEST

START_TEST(all_pairs_arrive_under_seeded_delays)
{
    for (int k = 0; k < N_KINDS; k++)
        for (uint64_t seed = 1; seed <= 3; seed++)
            in_time_once(all_pairs, &(struct seeded){&kinds[k], seed}, 5000000000U);
}
END_TEST

/* Must be an error, neither a hang nor wrong bytes at the end. */
static void size_mismatch(const struct kind *kind)
{
    struct node node;
    uint8_t a[8] = {0}, b[4] = {0};
    struct transport_message send = {a, 8, 1, true, true, 0, NULL, 0},
                             receive = {b, 4, 0, false, true, 0, NULL, 0};
    struct waited ws, wr;
    node_open(&node, kind, 2, 0);
    waited_init(&ws, &send, 1);
    waited_init(&wr, &receive, 1);
    enqueue(&node, 0, &ws);
    enqueue(&node, 1, &wr);
    ck_assert_int_eq(waited_status(&ws), RS_EPROTO);
    ck_assert_int_eq(waited_status(&wr), RS_EPROTO);
    ck_assert_ptr_nonnull(strstr(ws.err.text, "device 1"));
    ck_assert_ptr_nonnull(strstr(wr.err.text, "device 0"));
    ck_assert_ptr_nonnull(strstr(wr.err.text, "8 bytes"));
    ck_assert_ptr_nonnull(strstr(wr.err.text, "4"));
    node_close(&node);
}

START_TEST(sides_that_disagree_on_the_size_both_fail)
{
    for (int k = 0; k < N_KINDS; k++)
        size_mismatch(&kinds[k]);
}
END_TEST

static void abort_in_the_middle(const struct kind *kind)
{
    enum { BYTES = 1 << 20 };
    struct node node;
    uint8_t *sent = filled(0, 1, BYTES), *landed = calloc(1, BYTES);
    struct transport_message missing = {landed, BYTES, 1, false, true, 0, NULL, 0};
    struct transport_message queued = {sent, BYTES, 1, true, true, 0, NULL, 0};
    struct waited w[2], again[2];
    node_open(&node, kind, 2, 0);
    waited_init(&w[0], &missing, 1); /* device 1 never sends it */
    waited_init(&w[1], &queued, 1);  /* waits behind it on the stream */
    enqueue(&node, 0, &w[0]);
    enqueue(&node, 0, &w[1]);
    ck_assert(!waited_within(&w[0], 20));
    ck_assert(!transport_quiesced(node.t));
    ck_assert_int_eq(transport_begin(node.t, 2, NULL), RS_EPRECOND);
    transport_abort(node.t);
    ck_assert_int_eq(waited_status(&w[0]), RS_ECANCELED);
    ck_assert_int_eq(waited_status(&w[1]), RS_ECANCELED);
    ck_assert(transport_quiesced(node.t));
    ck_assert_int_eq(transport_enqueue(node.t, 0, node.streams[0], &w[0].group), RS_ECANCELED);
    ck_assert_uint_eq(transport_counters(node.t, 1).network_received_bytes, 0);

    /* An attempt id is never used again, and the next attempt starts clean. */
    ck_assert_int_eq(transport_begin(node.t, 1, NULL), RS_EPRECOND);
    ck_assert_int_eq(transport_begin(node.t, 2, NULL), 0);
    struct transport_message send = {sent, BYTES, 1, true, true, 0, NULL, 0};
    struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
    waited_init(&again[0], &send, 1);
    waited_init(&again[1], &receive, 1);
    enqueue(&node, 0, &again[0]);
    enqueue(&node, 1, &again[1]);
    ck_assert_int_eq(waited_status(&again[0]), 0);
    ck_assert_int_eq(waited_status(&again[1]), 0);
    check_filled(landed, 0, 1, BYTES);
    node_close(&node);
    free(sent);
    free(landed);
}

START_TEST(abort_ends_running_and_queued_groups_and_the_next_attempt_is_clean)
{
    for (int k = 0; k < N_KINDS; k++)
        abort_in_the_middle(&kinds[k]);
}
END_TEST

/* Aborts while bytes are moving: what lies in the buffers once quiesced stays as it is. */
static void abort_while_moving(const struct kind *kind, uint64_t seed)
{
    enum { BYTES = 8 << 20, GROUPS = 4 };
    struct node node;
    uint8_t *sent = filled(0, 1, BYTES), *landed = calloc(1, BYTES), *copy = malloc(BYTES);
    struct transport_message send = {sent, BYTES, 1, true, false, 0, NULL, 0};
    struct transport_message receive = {landed, BYTES, 0, false, false, 0, NULL, 0};
    struct waited ws[GROUPS], wr[GROUPS];
    node_open(&node, kind, 2, 0);
    for (int i = 0; i < GROUPS; i++) {
        waited_init(&ws[i], &send, 1);
        waited_init(&wr[i], &receive, 1);
        enqueue(&node, 0, &ws[i]);
        enqueue(&node, 1, &wr[i]);
    }
    uint64_t until = clock_mono_ns() + random_next(&seed) % 4000000U;
    while (clock_mono_ns() < until)
        ;
    transport_abort(node.t);
    for (int i = 0; i < GROUPS; i++) {
        int a = waited_status(&ws[i]), b = waited_status(&wr[i]);
        ck_assert(a == 0 || a == RS_ECANCELED);
        ck_assert(b == 0 || b == RS_ECANCELED);
    }
    ck_assert(transport_quiesced(node.t));
    memcpy(copy, landed, BYTES);
    memset(sent, 0xEE, BYTES);
    until = clock_mono_ns() + 2000000U;
    while (clock_mono_ns() < until)
        ;
    ck_assert_int_eq(memcmp(copy, landed, BYTES), 0);
    node_close(&node);
    free(sent);
    free(landed);
    free(copy);
}

START_TEST(no_byte_lands_after_an_aborted_attempt_is_quiesced)
{
    for (int k = 0; k < N_KINDS; k++)
        for (uint64_t seed = 1; seed <= 8; seed++)
            abort_while_moving(&kinds[k], seed);
}
END_TEST

static void small_groups(const struct kind *kind)
{
    enum { N = 3, GROUPS = 1000 };
    struct node node;
    node_open(&node, kind, N, 0);
    struct waited *waited = calloc(N * GROUPS, sizeof(*waited));
    struct transport_message *messages = calloc(N * GROUPS * 2, sizeof(*messages));
    uint32_t *sent = calloc(N * GROUPS, sizeof(*sent)), *landed = calloc(N * GROUPS, sizeof(*sent));
    for (uint32_t g = 0; g < GROUPS; g++)
        for (uint32_t d = 0; d < N; d++) {
            uint32_t i = g * N + d;
            sent[i] = i * 2654435761U;
            messages[2 * i] = (struct transport_message){&sent[i],     4, (d + 1) % N, true,
                                                         (g & 1) != 0, 0, NULL,        0};
            messages[2 * i + 1] = (struct transport_message){
                &landed[i], 4, (d + N - 1) % N, false, (g & 1) != 0, 0, NULL, 0};
            waited_init(&waited[i], &messages[2 * i], 2);
            enqueue(&node, d, &waited[i]);
        }
    for (uint32_t i = 0; i < N * GROUPS; i++) {
        ck_assert_int_eq(waited_status(&waited[i]), 0);
        ck_assert_uint_eq(landed[i], (i / N * N + (i % N + N - 1) % N) * 2654435761U);
    }
    struct transport_counters c = transport_counters(node.t, 0);
    ck_assert_uint_eq(c.messages, 2 * GROUPS);
    ck_assert_uint_eq(c.network_received_bytes, 4 * GROUPS / 2);
    ck_assert_uint_eq(c.domain_received_bytes, 4 * GROUPS / 2);
    node_close(&node);
    free(waited);
    free(messages);
    free(sent);
    free(landed);
}

START_TEST(a_thousand_small_groups_keep_their_order)
{
    for (int k = 0; k < N_KINDS; k++)
        small_groups(&kinds[k]);
}
END_TEST

static uint64_t first_byte_ns(const struct node *node, uint32_t device)
{
    return transport_counters(node->t, device).first_byte_ns;
}

/* The group of device 0 is far from its end when its first message comes: device 2 has not begun. */
static void first_byte(const struct kind *kind)
{
    struct node node;
    struct waited waited[3];
    uint8_t in[2][4], out[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    struct transport_message receives[2] = {{in[0], 4, 1, false, true, 0, NULL, 0},
                                            {in[1], 4, 2, false, true, 0, NULL, 0}};
    struct transport_message sends[2] = {{out[0], 4, 0, true, true, 0, NULL, 0},
                                         {out[1], 4, 0, true, true, 0, NULL, 0}};
    node_open(&node, kind, 3, 0);
    waited_init(&waited[0], receives, 2);
    waited_init(&waited[1], &sends[0], 1);
    waited_init(&waited[2], &sends[1], 1);
    uint64_t before = clock_mono_ns();
    for (uint32_t d = 0; d < 3; d++)
        ck_assert_uint_eq(first_byte_ns(&node, d), 0);
    enqueue(&node, 0, &waited[0]);
    enqueue(&node, 1, &waited[1]);
    while (first_byte_ns(&node, 0) == 0 || first_byte_ns(&node, 1) == 0)
        ck_assert_uint_lt(clock_mono_ns() - before, UINT64_C(20000000000));
    uint64_t first = first_byte_ns(&node, 0), middle = clock_mono_ns();
    ck_assert(first >= before && first <= middle);
    ck_assert_uint_eq(first_byte_ns(&node, 2), 0);
    enqueue(&node, 2, &waited[2]);
    for (uint32_t d = 0; d < 3; d++)
        ck_assert_int_eq(waited_status(&waited[d]), 0);
    ck_assert_uint_eq(first_byte_ns(&node, 0), first);
    ck_assert_uint_ge(first_byte_ns(&node, 2), middle);
    uint64_t deadline = clock_mono_ns() + UINT64_C(20000000000);
    while (!transport_quiesced(node.t))
        ck_assert_uint_lt(clock_mono_ns(), deadline);
    ck_assert_int_eq(transport_begin(node.t, 1000, NULL), 0);
    for (uint32_t d = 0; d < 3; d++)
        ck_assert_uint_eq(first_byte_ns(&node, d), 0);
    node_close(&node);
}

START_TEST(the_first_byte_of_an_attempt_is_known_when_it_moves)
{
    for (int k = 0; k < N_KINDS; k++)
        first_byte(&kinds[k]);
}
END_TEST

static void nonsense(const struct kind *kind)
{
    struct node node;
    uint8_t b[4];
    struct waited w;
    node_open(&node, kind, 2, 0);
    struct transport_message far = {b, 4, 9, true, true, 0, NULL, 0},
                             empty = {b, 0, 1, true, true, 0, NULL, 0};
    waited_init(&w, &far, 1);
    ck_assert_int_eq(transport_enqueue(node.t, 0, node.streams[0], &w.group), RS_EINVAL);
    ck_assert_int_eq(transport_enqueue(node.t, 5, node.streams[0], &w.group), RS_EINVAL);
    waited_init(&w, &empty, 1);
    ck_assert_int_eq(transport_enqueue(node.t, 0, node.streams[0], &w.group), RS_EINVAL);
    ck_assert_int_eq(w.calls, 0);
    waited_init(&w, NULL, 0); /* nothing to do is done at once */
    enqueue(&node, 0, &w);
    ck_assert_int_eq(waited_status(&w), 0);
    node_close(&node);
}

START_TEST(a_group_that_names_no_peer_or_no_bytes_is_refused)
{
    for (int k = 0; k < N_KINDS; k++)
        nonsense(&kinds[k]);
}
END_TEST

static void failing_memory(const struct kind *kind)
{
    struct node node;
    uint8_t a = 1, b = 0;
    struct transport_message send = {&a, 1, 1, true, true, 0, NULL, 0},
                             receive = {&b, 1, 0, false, true, 0, NULL, 0};
    node_open(&node, kind, 2, 0);
    for (long i = 1;; i++) {
        struct waited w;
        waited_init(&w, &send, 1);
        mem_fail_at(i);
        int r = transport_enqueue(node.t, 0, node.streams[0], &w.group);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        if (r == 0) {
            struct waited wr;
            waited_init(&wr, &receive, 1);
            enqueue(&node, 1, &wr);
            ck_assert_int_eq(waited_status(&w), 0);
            ck_assert_int_eq(waited_status(&wr), 0);
        } else {
            ck_assert_int_eq(r, RS_ENOMEM);
        }
        if (!struck)
            break;
    }
    ck_assert(transport_quiesced(node.t));
    node_close(&node);
}

START_TEST(enqueue_without_memory_fails_and_leaves_nothing_behind)
{
    for (int k = 0; k < N_KINDS; k++)
        failing_memory(&kinds[k]);
}
END_TEST

/* --- the in-memory twin's own ----------------------------------------------------------------- */

START_TEST(mem_open_without_memory_fails)
{
    struct node node;
    struct transport_mem_options options = {0};
    node_devices(&node, 2);
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int r = transport_mem_open(node.devices, 2, 1, &options, &node.t, NULL);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        if (!struck)
            break;
    }
    node_close(&node);
}
END_TEST

/* A device's egress is shared by its messages: 2 x 4 MiB at 100 MiB/s take 80 ms, while two
 * messages from different devices to different ones take half of it. */
static double paced_ms(uint32_t second_from, uint32_t second_to)
{
    enum { BYTES = 4 << 20 };
    struct node node;
    struct transport_mem_options options = {.network_bytes_per_s = 100.0 * (1 << 20)};
    node_devices(&node, 4);
    ck_assert_int_eq(transport_mem_open(node.devices, 4, 1, &options, &node.t, NULL), 0);
    ck_assert_int_eq(transport_begin(node.t, 1, NULL), 0);
    uint8_t *a = calloc(4, BYTES);
    uint32_t from[2] = {0, second_from}, to[2] = {1, second_to};
    struct transport_message messages[4][4];
    uint32_t n[4] = {0};
    struct waited waited[4];
    for (uint32_t i = 0; i < 2; i++) {
        messages[from[i]][n[from[i]]++] =
            (struct transport_message){a + (size_t)i * BYTES, BYTES, to[i], true, true, 0, NULL, 0};
        messages[to[i]][n[to[i]]++] = (struct transport_message){
            a + (size_t)(2 + i) * BYTES, BYTES, from[i], false, true, 0, NULL, 0};
    }
    uint64_t started = clock_mono_ns();
    for (uint32_t d = 0; d < 4; d++) {
        waited_init(&waited[d], messages[d], n[d]);
        enqueue(&node, d, &waited[d]);
    }
    for (uint32_t d = 0; d < 4; d++)
        ck_assert_int_eq(waited_status(&waited[d]), 0);
    double ms = (double)(clock_mono_ns() - started) / 1e6;
    node_close(&node);
    free(a);
    return ms;
}

START_TEST(a_set_rate_holds_per_device_and_direction)
{
    double same_egress = INFINITY, same_ingress = INFINITY, apart = INFINITY;
    /* The best of three; of more where the machine is busy. */
    for (int i = 0; i < 3 || (i < 30 && !(apart < same_egress && apart < same_ingress)); i++) {
        same_egress = fmin(same_egress, paced_ms(0, 3));
        same_ingress = fmin(same_ingress, paced_ms(2, 1));
        apart = fmin(apart, paced_ms(2, 3));
    }
    ck_assert_double_ge(same_egress, 77);
    ck_assert_double_ge(same_ingress, 77);
    ck_assert_double_ge(apart, 38);
    ck_assert_double_lt(apart, same_egress);
    ck_assert_double_lt(apart, same_ingress);
}
END_TEST

START_TEST(a_killed_device_falls_silent_and_abort_frees_its_peers)
{
    struct node node;
    struct transport_mem_options options = {.kill_device = 1, .kill_after = 1};
    uint8_t a[2] = {1, 2}, b[2] = {0};
    node_devices(&node, 2);
    ck_assert_int_eq(transport_mem_open(node.devices, 2, 1, &options, &node.t, NULL), 0);
    ck_assert_int_eq(transport_begin(node.t, 1, NULL), 0);
    struct transport_message sends[2] = {{&a[0], 1, 1, true, true, 0, NULL, 0},
                                         {&a[1], 1, 1, true, true, 0, NULL, 0}};
    struct transport_message receives[2] = {{&b[0], 1, 0, false, true, 0, NULL, 0},
                                            {&b[1], 1, 0, false, true, 0, NULL, 0}};
    struct waited ws[2], wr[2];
    for (int i = 0; i < 2; i++) {
        waited_init(&ws[i], &sends[i], 1);
        waited_init(&wr[i], &receives[i], 1);
        enqueue(&node, 0, &ws[i]);
        enqueue(&node, 1, &wr[i]);
    }
    ck_assert_int_eq(waited_status(&ws[0]), 0);
    ck_assert_int_eq(waited_status(&wr[0]), 0);
    ck_assert(!waited_within(&ws[1], 30));
    ck_assert(!waited_within(&wr[1], 1));
    transport_abort(node.t);
    ck_assert_int_eq(waited_status(&ws[1]), RS_ECANCELED);
    ck_assert_int_eq(waited_status(&wr[1]), RS_ECANCELED);
    ck_assert_int_eq(b[0], 1);
    ck_assert_int_eq(b[1], 0);
    node_close(&node);
}
END_TEST

/* --- fences ----------------------------------------------------------------------------------- */

/* Holds a stream until the test lets it go. */
struct gate {
    pthread_mutex_t mutex;
};

static void wait_at(void *arg)
{
    struct gate *g = arg;
    pthread_mutex_lock(&g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

/* The groups are enqueued while the lease holds, and their turn comes when it is over. */
static void queued_behind_the_lease(const struct kind *kind)
{
    enum { BYTES = 3 << 20, GROUPS = 3 };
    struct node node;
    struct gate gate = {PTHREAD_MUTEX_INITIALIZER};
    uint8_t *sent = filled(0, 1, BYTES), *landed = calloc(GROUPS, BYTES);
    struct transport_message send = {sent, BYTES, 1, true, true, 0, NULL, 0}, receives[GROUPS];
    struct waited ws[GROUPS], wr[GROUPS];
    node_open(&node, kind, 2, 0);
    pthread_mutex_lock(&gate.mutex);
    for (uint32_t d = 0; d < 2; d++)
        ck_assert_int_eq(device_call(node.streams[d], wait_at, &gate), 0);
    for (int i = 0; i < GROUPS; i++) {
        receives[i] = (struct transport_message){
            landed + (size_t)i * BYTES, BYTES, 0, false, true, 0, NULL, 0};
        waited_init(&ws[i], &send, 1);
        waited_init(&wr[i], &receives[i], 1);
        enqueue(&node, 0, &ws[i]);
        enqueue(&node, 1, &wr[i]);
    }
    fence_prolong(&fence, 1);
    pthread_mutex_unlock(&gate.mutex);
    ck_assert_int_eq(waited_status(&wr[0]), RS_EDEADLINE);
    ck_assert_ptr_nonnull(strstr(wr[0].err.text, "lease"));
    fence_prolong(&fence, UINT64_MAX); /* too late for what was queued */
    transport_abort(node.t);
    for (int i = 0; i < GROUPS; i++) {
        ck_assert_int_ne(waited_status(&ws[i]), 0);
        ck_assert_int_ne(waited_status(&wr[i]), 0);
    }
    size_t clean = 0;
    while (clean < (size_t)GROUPS * BYTES && landed[clean] == 0)
        clean++;
    ck_assert_uint_eq(clean, (size_t)GROUPS * BYTES);
    fence_reopen(&fence);
    ck_assert_int_eq(transport_begin(node.t, 2, NULL), 0);
    waited_init(&ws[0], &send, 1);
    waited_init(&wr[0], &receives[0], 1);
    enqueue(&node, 0, &ws[0]);
    enqueue(&node, 1, &wr[0]);
    ck_assert_int_eq(waited_status(&wr[0]), 0);
    ck_assert_int_eq(waited_status(&ws[0]), 0);
    check_filled(landed, 0, 1, BYTES);
    node_close(&node);
    free(sent);
    free(landed);
}

START_TEST(groups_whose_turn_comes_after_the_lease_move_nothing)
{
    for (int k = 0; k < N_KINDS; k++)
        queued_behind_the_lease(&kinds[k]);
}
END_TEST

/* --- tags and connections --------------------------------------------------------------------- */

START_TEST(another_message_of_the_same_size_fails_both_groups_and_lands_nothing)
{
    for (int k = 0; k < N_KINDS; k++) {
        struct node node;
        uint8_t a[8] = "8 bytes", b[8] = {0};
        struct transport_message send = {a, 8, 1, true, true, 7, NULL, 0},
                                 receive = {b, 8, 0, false, true, 8, NULL, 0};
        struct waited ws, wr;
        node_open(&node, &kinds[k], 2, 0);
        waited_init(&ws, &send, 1);
        waited_init(&wr, &receive, 1);
        enqueue(&node, 0, &ws);
        enqueue(&node, 1, &wr);
        ck_assert_int_eq(waited_status(&wr), RS_EPROTO);
        ck_assert_int_eq(waited_status(&ws), RS_EPROTO);
        ck_assert_msg(strstr(wr.err.text, "another message") != NULL, "%s", wr.err.text);
        ck_assert_int_eq(b[0], 0);
        node_close(&node);
    }
}
END_TEST

/* Cuts `bytes` into n pieces that lie apart, in an order of their own, with a byte of 0x5A between
 * them; *ret_memory is the caller's. */
static void cut_up(struct transport_piece *pieces, uint32_t n, uint64_t bytes, uint64_t *seed,
                   uint8_t **ret_memory)
{
    uint8_t *memory = malloc(bytes + n);
    uint64_t left = bytes, at = bytes + n;
    memset(memory, 0x5A, bytes + n);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t most = left - (n - i - 1);
        pieces[i].bytes = i == n - 1 ? left : 1 + random_next(seed) % (1 + 2 * most / (n - i));
        if (pieces[i].bytes > most)
            pieces[i].bytes = most;
        at -= pieces[i].bytes + 1;
        pieces[i].data = memory + at; /* from behind */
        left -= pieces[i].bytes;
    }
    *ret_memory = memory;
}

START_TEST(messages_in_pieces_land_whole_though_both_ends_cut_differently)
{
    enum { MOST = 300 };
    static const uint64_t sizes[] = {300, 5000, 3 << 20};
    struct transport_piece from[MOST], to[MOST];
    uint64_t seed = 11;
    for (int k = 0; k < 3 * N_KINDS; k++) {
        uint64_t bytes = sizes[k % 3];
        uint32_t n_from = 1 + (uint32_t)(random_next(&seed) % MOST);
        uint32_t n_to = 1 + (uint32_t)(random_next(&seed) % MOST);
        struct node node;
        struct waited ws, wr;
        uint8_t *sent, *landed, *whole = filled(0, 1, bytes);
        cut_up(from, n_from, bytes, &seed, &sent);
        cut_up(to, n_to, bytes, &seed, &landed);
        uint64_t at = 0;
        for (uint32_t i = 0; i < n_from; at += from[i++].bytes)
            memcpy(from[i].data, whole + at, from[i].bytes);
        struct transport_message send = {NULL, bytes, 1, true, true, 0, from, n_from};
        struct transport_message receive = {NULL, bytes, 0, false, true, 0, to, n_to};
        node_open(&node, &kinds[k / 3], 2, 0);
        bool takes = transport_takes_pieces(node.t, 0, 1);
        ck_assert(takes || test_on_cuda()); /* NCCL takes none: test_standin_nccl */
        if (!takes) {
            node_close(&node);
            free(sent);
            free(landed);
            free(whole);
            continue;
        }
        waited_init(&ws, &send, 1);
        waited_init(&wr, &receive, 1);
        enqueue(&node, 0, &ws);
        enqueue(&node, 1, &wr);
        ck_assert_int_eq(waited_status(&wr), 0);
        ck_assert_int_eq(waited_status(&ws), 0);
        at = 0;
        for (uint32_t i = 0; i < n_to; at += to[i++].bytes) {
            ck_assert_int_eq(memcmp(to[i].data, whole + at, to[i].bytes), 0);
            ck_assert_int_eq(((uint8_t *)to[i].data)[to[i].bytes], 0x5A);
        }
        node_close(&node);
        free(sent);
        free(landed);
        free(whole);
    }
}
END_TEST

static void connect_done(struct transport_connect *c, int status, const struct err *e)
{
    const struct transport_group as_group = {.arg = c->arg};
    waited_done((struct transport_group *)(uintptr_t)&as_group, status, e);
}

START_TEST(devices_of_this_node_need_no_connecting)
{
    for (int k = 0; k < N_KINDS; k++) {
        struct node node;
        struct waited w;
        static const struct transport_pair pairs[2] = {{0, 1}, {1, 0}};
        struct transport_connect c = {
            .pairs = pairs, .n_pairs = 2, .on_done = connect_done, .arg = &w};
        node_open(&node, &kinds[k], 2, 0);
        waited_init(&w, NULL, 0);
        ck_assert_int_eq(transport_connect(node.t, &c), 0);
        ck_assert_int_eq(waited_status(&w), 0);
        ck_assert(transport_quiesced(node.t));
        node_close(&node);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(groups_whose_turn_comes_after_the_lease_move_nothing)                                        \
    X(another_message_of_the_same_size_fails_both_groups_and_lands_nothing)                        \
    X(messages_in_pieces_land_whole_though_both_ends_cut_differently)                              \
    X(devices_of_this_node_need_no_connecting)                                                     \
    X(all_pairs_arrive_whatever_the_order_in_a_group)                                              \
    X(all_pairs_arrive_under_seeded_delays)                                                        \
    X(sides_that_disagree_on_the_size_both_fail)                                                   \
    X(abort_ends_running_and_queued_groups_and_the_next_attempt_is_clean)                          \
    X(no_byte_lands_after_an_aborted_attempt_is_quiesced)                                          \
    X(the_first_byte_of_an_attempt_is_known_when_it_moves)                                         \
    X(a_thousand_small_groups_keep_their_order)                                                    \
    X(a_group_that_names_no_peer_or_no_bytes_is_refused)                                           \
    X(enqueue_without_memory_fails_and_leaves_nothing_behind)                                      \
    X(mem_open_without_memory_fails)                                                               \
    X(a_set_rate_holds_per_device_and_direction)                                                   \
    X(a_killed_device_falls_silent_and_abort_frees_its_peers)

#include "test/lib/main.h"
