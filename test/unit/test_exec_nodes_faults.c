/* Nodes that abort, die, stop, are late or run out of memory in the middle of a refit. */
#include <signal.h>

#include "test/lib/best_of.h"
#include "test/lib/rig_nodes.h"

/* --- faults --- */

static uint64_t checksum(struct cluster *c)
{
    uint64_t sum = 0;
    cluster_foreach(c, r)
    {
        sum = sum * 31 + rig_checksum(r);
    }
    return sum;
}

START_TEST(after_quiesced_no_byte_lands_from_elsewhere_and_the_next_attempt_is_clean)
{
    for (uint64_t seed = 200; seed < 216; seed++) {
        struct cluster c;
        uint64_t state = seed, requests[MAX_NODES];
        random_cluster(&c, seed);
        cluster_foreach(&c, r)
        {
            r->o.hello.network_bytes_per_s =
                2e6; /* so that it is in the middle when it is aborted */
        }
        cluster_open(&c);
        new_version(&c, 1);
        prepare_all(&c, WIRE_VERIFY_FULL, NULL);
        start_all(&c, requests);
        rig_pause_us(random_next(&state) % 6000);
        abort_all(&c);
        uint64_t sum = checksum(&c);
        cluster_foreach(&c, r)
        {
            rig_fill_sources(r, 2);
        }
        rig_pause_us(2000);
        cluster_foreach(&c, r)
        {
            rig_fill_sources(r, 1);
        }
        ck_assert_uint_eq(checksum(&c), sum);
        refit(&c, 2, WIRE_VERIFY_FULL);
        cluster_close(&c);
    }
}
END_TEST

/* The first FAILED of any node but the victim; the node. The others would be told by their control
 * processes. */
static struct rig *first_failure(struct cluster *c, const uint64_t *requests, uint32_t victim)
{
    uint64_t until = clock_mono_ns() + RIG_WAIT_MS * UINT64_C(1000000);
    while (clock_mono_ns() < until)
        for (uint32_t i = 0; i < c->n_nodes; i++)
            if (i != victim && rig_receive(&c->n[i], 5) &&
                c->n[i].packet->header.request == requests[i] &&
                c->n[i].packet->header.type == WIRE_FAILED)
                return &c->n[i];
    ck_abort_msg("nobody failed");
    return NULL;
}

static const char *const names[] = {"node 'node-a' at", "node 'node-b' at", "node 'node-c' at"};

static void abort_but(struct cluster *c, uint32_t victim)
{
    for (uint32_t i = 0; i < c->n_nodes; i++)
        if (i != victim)
            rig_abort(&c->n[i]);
}

/* Slow, as processes. Node 0 sends, 1 and 2 take and relay. silence_ms: who is silent for so long is given up. */
static void slow_processes(struct cluster *c, uint32_t silence_ms)
{
    plain_cluster(c, 1, 2, "Replicate", 512); /* 156 KB */
    cluster_foreach(c, r)
    {
        r->o.process = true;
        r->o.hello.network_bytes_per_s = 100e3;
        r->o.hello.silence_ms = silence_ms;
    }
    cluster_open(c);
    new_version(c, 1);
}

static void open_again(struct cluster *c, uint32_t node)
{
    struct rig *r = &c->n[node], old = *r;
    char *source = one_tensor("s", 1, "Shard(0)", 512);
    char *dest = one_tensor("d", 2, "Replicate", 512);
    rig_free(r);
    memset(r, 0, sizeof(*r));
    r->o = old.o;
    rig_side(r, 0, source, 0, 1);
    rig_side(r, 1, dest, 1, 2);
    rig_open(r);
    r->attempt = old.attempt;
    free(source);
    free(dest);
}

/* How long after its death the first of the others fails. */
static uint64_t death(void *arg)
{
    uint32_t victim = *(uint32_t *)arg;
    struct cluster c;
    uint64_t requests[3];
    slow_processes(&c, 60000); /* nobody waits for that */
    prepare_all(&c, WIRE_VERIFY_OFF, NULL);
    start_all(&c, requests);
    rig_until_moving(&c.n[1]);
    ck_assert_int_eq(kill(c.n[victim].child, SIGKILL), 0);
    ck_assert_int_eq(rig_end(&c.n[victim], false), -1);
    uint64_t killed = clock_mono_ns();
    struct rig *r = first_failure(&c, requests, victim);
    uint64_t took = clock_mono_ns() - killed;
    ck_assert_int_eq(r->packet->header.code, RS_EPEER);
    ck_assert_msg(strstr(rig_failure(r)->text, names[victim]) != NULL, "%s", rig_failure(r)->text);
    abort_but(&c, victim);
    open_again(&c, victim);
    refit(&c, 2, WIRE_VERIFY_FULL); /* the same epoch: survivors' connections go on */
    cluster_close(&c);
    return took;
}

START_TEST(the_death_of_a_node_fails_the_others_at_once_and_its_successor_serves_the_next_attempt)
{
    for (uint32_t victim = 0; victim < 3; victim++)
        in_time_once(death, &victim, 1000000000);
}
END_TEST

/* Its kernel takes what is sent until the buffers are full, and it says nothing. Woken past its
 * lease it lets nothing land, though groups and bytes were queued. */
START_TEST(a_stopped_node_is_past_its_deadline_and_lands_nothing_once_it_wakes)
{
    struct cluster c;
    uint64_t requests[3];
    slow_processes(&c, 1500);
    prepare_all(&c, WIRE_VERIFY_OFF, NULL);
    start_all(&c, requests);
    rig_until_moving(&c.n[1]);
    struct wire_lease lease = {.until_ns = clock_mono_ns() + UINT64_C(3000000000)};
    (void)rig_send(&c.n[1], WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    (void)rig_stats(&c.n[1]); /* it has heard of the lease */
    ck_assert_int_eq(kill(c.n[1].child, SIGSTOP), 0);
    int status;
    ck_assert_int_eq(waitpid(c.n[1].child, &status, WUNTRACED), c.n[1].child);
    uint64_t sum = rig_checksum(&c.n[1]);
    struct rig *r = first_failure(&c, requests, 1);
    ck_assert_int_eq(r->packet->header.code, RS_EDEADLINE);
    ck_assert_msg(strstr(rig_failure(r)->text, names[1]) != NULL, "%s", rig_failure(r)->text);
    abort_but(&c, 1);
    while (clock_mono_ns() <= lease.until_ns)
        rig_pause_us(1000);
    ck_assert_int_eq(kill(c.n[1].child, SIGCONT), 0);
    ck_assert_uint_eq(end_of(&c.n[1], requests[1]), WIRE_FAILED);
    ck_assert_int_eq(c.n[1].packet->header.code, RS_EDEADLINE);
    ck_assert_uint_eq(rig_checksum(&c.n[1]), sum);
    rig_abort(&c.n[1]);
    lease.until_ns = 0;
    (void)rig_send(&c.n[1], WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    refit(&c, 2, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

/* A control process that renews the lease just after it was over must not bring to life what was
 * left out meanwhile. */
START_TEST(a_lease_that_is_prolonged_too_late_fails_the_attempt_all_the_same)
{
    struct cluster c;
    uint64_t requests[3];
    slow_processes(&c, 60000);
    prepare_all(&c, WIRE_VERIFY_OFF, NULL);
    start_all(&c, requests);
    struct wire_lease lease = {.until_ns = 1}, longer = {.until_ns = UINT64_MAX};
    (void)rig_send(&c.n[1], WIRE_LEASE, 0, &lease, sizeof(lease), NULL, 0, NULL, 0);
    (void)rig_send(&c.n[1], WIRE_LEASE, 0, &longer, sizeof(longer), NULL, 0, NULL, 0);
    ck_assert_uint_eq(end_of(&c.n[1], requests[1]), WIRE_FAILED);
    ck_assert_int_eq(c.n[1].packet->header.code, RS_EDEADLINE);
    abort_all(&c);
    refit(&c, 2, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

/* --- memory that is out --- */

static bool run_out(long n)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_foreach(&c, r)
    {
        r->o.process = true;
    }
    c.n[0].o.fail_at = n;
    c.n[0].o.lenient = true;
    for (uint32_t i = 0; i < 2; i++) {
        memcpy(c.n[i].o.hello.transport, "tcp", 4);
        c.n[i].o.node = i;
        rig_open(&c.n[i]);
    }
    bool failed = c.n[0].refused || c.n[0].gone;
    new_version(&c, 1);
    for (int attempt = 0; attempt < 2 && !c.n[0].gone && !c.n[0].refused; attempt++) {
        uint64_t requests[2];
        next_attempt(&c);
        c.n[0].deadline_ns = clock_mono_ns() + UINT64_C(2000000000);
        for (uint32_t i = 0; i < 2; i++)
            requests[i] = rig_send_prepare(&c.n[i], WIRE_VERIFY_FULL, NULL);
        rig_expect(&c.n[1], requests[1], WIRE_PREPARED);
        bool prepared = rig_try(&c.n[0], requests[0]) == WIRE_PREPARED;
        if (prepared) {
            start_all(&c, requests);
            bool staged = rig_try(&c.n[0], requests[0]) == WIRE_STAGED;
            if (staged && end_of(&c.n[1], requests[1]) == WIRE_STAGED) {
                ck_assert_uint_eq(rig_wrong(&c.n[1], WIRE_LIVE, 1), 0);
                break;
            }
        }
        failed = true;
        (void)rig_try(&c.n[0], rig_send(&c.n[0], WIRE_ABORT, 0, NULL, 0, NULL, 0, NULL, 0));
        rig_abort(&c.n[1]);
    }
    failed = failed || c.n[0].gone;
    int status = rig_end(&c.n[0], !c.n[0].gone);
    ck_assert_msg(status == EXIT_SUCCESS || (c.n[0].gone && status == EXIT_FAILURE), "status %d",
                  status);
    rig_free(&c.n[0]);
    rig_close(&c.n[1]);
    return failed;
}

START_TEST(without_memory_a_node_says_so_and_its_peer_goes_on)
{
    long quiet = 0;
    for (long n = 1; quiet < 3; n += 1 + n / 10)
        quiet = run_out(n) ? 0 : quiet + 1;
}
END_TEST

#define TESTS(X)                                                                                   \
    X(after_quiesced_no_byte_lands_from_elsewhere_and_the_next_attempt_is_clean)                   \
    X(the_death_of_a_node_fails_the_others_at_once_and_its_successor_serves_the_next_attempt)      \
    X(a_stopped_node_is_past_its_deadline_and_lands_nothing_once_it_wakes)                         \
    X(a_lease_that_is_prolonged_too_late_fails_the_attempt_all_the_same)                           \
    X(without_memory_a_node_says_so_and_its_peer_goes_on)
#include "test/lib/main.h"
