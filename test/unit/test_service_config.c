/* Settings of a cluster: nodes, addresses, the node's name in paths, what is refused and how it is told. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "peer/address.h"
#include "service/config.h"

static int parse(struct config *c, const char *text, struct err *e)
{
    config_init(c);
    return config_parse(c, text, "f", e);
}

/* Refused, with each of the words (ended by NULL) in the text. */
static void refused(const char *text, const char *const *words)
{
    struct config c;
    struct err e = {0};
    ck_assert_msg(parse(&c, text, &e) != 0, "taken: %s", text);
    for (; *words != NULL; words++)
        ck_assert_msg(strstr(e.text, *words) != NULL, "no '%s' in: %s", *words, e.text);
    config_close(&c);
}
#define REFUSED(text, ...) refused(text, (const char *const[]){__VA_ARGS__, NULL})

START_TEST(one_file_serves_every_node)
{
    static const char text[] =
        "[daemon]\nnode = n0\nsocket = /run/%n/%n.sock\nstate_dir = /var/%n\n"
        "[cluster]\ncoordinator = n1\n"
        "nodes = n0=127.0.0.1:7070 n1=127.0.0.2:7070\n"
        "  n2=[::1]:7071\n";
    struct err e = {0};
    struct config c;
    for (unsigned i = 0; i < 3; i++) {
        const char *names[] = {"n0", "n1", "n2"};
        config_init(&c);
        ck_assert_int_eq(config_set_node(&c, names[i], &e), 0);
        ck_assert_msg(config_parse(&c, text, "f", &e) == 0, "%s", e.text);
        ck_assert_str_eq(c.node, names[i]);
        ck_assert_uint_eq(c.me, i);
        ck_assert_uint_eq(c.coordinator_index, 1);
        ck_assert_uint_eq(c.n_nodes, 3);
        ck_assert_str_eq(c.socket, i == 0   ? "/run/n0/n0.sock"
                                   : i == 1 ? "/run/n1/n1.sock"
                                            : "/run/n2/n2.sock");
        ck_assert_str_eq(c.data_address, i == 0 ? "127.0.0.1" : i == 1 ? "127.0.0.2" : "::1");
        ck_assert_str_eq(c.nodes[2].address, "[::1]:7071");
        config_close(&c);
    }
}
END_TEST

START_TEST(gpus_are_named_for_a_backend_that_has_them_one_for_each_device)
{
    REFUSED("[devices]\ngpus = 0 1\ndevices = 2\n", "gpus", "backend = cuda", "'host'");
    REFUSED("[devices]\ngpus = 0 1 2\ndevices = 2\n", "'2' is one more than devices = 2");
    REFUSED("[devices]\ngpus = GPU-aa gpu-AA\ndevices = 2\n", "'gpu-AA' stands twice");
    REFUSED("[devices]\ngpus = 0\n 1\ndevices = 3\n", "2 are named", "devices = 3");
    REFUSED("[devices]\ngpus = GPU-0123456789012345678901234567890123456789012345\ndevices = 1\n",
            "no name of a GPU", "nvidia-smi -L");
    REFUSED("[devices]\nmax_gpu_memory_bytes = many\n", "max_gpu_memory_bytes", "no size");
}
END_TEST

START_TEST(without_nodes_it_is_alone)
{
    struct config c;
    struct err e = {0};
    ck_assert_msg(parse(&c, "[daemon]\nnode = solo\n", &e) == 0, "%s", e.text);
    ck_assert_uint_eq(c.n_nodes, 0);
    ck_assert_str_eq(c.data_address, "127.0.0.1");
    ck_assert_uint_eq(c.lease_ms, 2500);
    ck_assert_uint_eq(c.beat_ms, 500);
    ck_assert(!c.insecure_network);
}
END_TEST

START_TEST(a_thousand_nodes_fit_and_one_more_does_not)
{
    char *text = mem_alloc(64 << 10);
    struct config c;
    struct err e = {0};
    ck_assert_ptr_nonnull(text);
    size_t at = (size_t)snprintf(text, 64 << 10,
                                 "[daemon]\nnode = n0\n[cluster]\n"
                                 "insecure_network = yes\ncoordinator = n0\nnodes =\n");
    for (int i = 0; i < 1024; i++)
        at += (size_t)snprintf(text + at, (64U << 10) - at, " n%d=10.1.%d.%d:7070\n", i, i / 256,
                               i % 256);
    ck_assert_msg(parse(&c, text, &e) == 0, "%s", e.text);
    ck_assert_uint_eq(c.n_nodes, 1024);
    ck_assert_str_eq(c.nodes[1023].address, "10.1.3.255:7070");
    config_close(&c);
    (void)snprintf(text + at, (64U << 10) - at, " more=10.9.9.9:1\n");
    REFUSED(text, "nodes", "1024");
    mem_free(text);
}
END_TEST

#define CLUSTER(rest) "[daemon]\nnode = n0\n[cluster]\n" rest

START_TEST(refusals_of_a_cluster_name_what_is_wrong)
{
    REFUSED(CLUSTER("coordinator = n0\n"), "coordinator", "no nodes");
    REFUSED(CLUSTER("nodes = n0=127.0.0.1:1\n"), "coordinator", "n0");
    REFUSED(CLUSTER("coordinator = n9\nnodes = n0=127.0.0.1:1 n1=127.0.0.1:2\n"), "n9", "n0, n1");
    REFUSED(CLUSTER("coordinator = n1\nnodes = n1=127.0.0.1:1\n"), "'n0'", "--node");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=127.0.0.1:1 n0=127.0.0.1:2\n"), "f:5", "n0",
            "twice");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=127.0.0.1:1 n1=127.0.0.1:1\n"), "n0 and n1",
            "127.0.0.1:1");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=127.0.0.1\n"), "n0", "port");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=host:7070\n"), "host:7070", "numeric");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=0.0.0.0:7070\n"), "0.0.0.0");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n/0=127.0.0.1:7070\n"), "n/0", "name=address");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=192.0.2.1:7070\n"), "192.0.2.1:7070", "tls_ca",
            "insecure_network");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=127.0.0.1:1\ntls_ca = /x\n"), "all three");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=127.0.0.1:1\nlease_ms = 900\n"), "lease_ms",
            "500");
    REFUSED(CLUSTER("coordinator = n0\nnodes = n0=127.0.0.1:1\ndata_address = ::\n"),
            "data_address");
}
END_TEST

START_TEST(a_line_that_the_reader_would_cut_is_refused_by_number)
{
    char text[512] = "[cluster]\nnodes =";
    while (strlen(text) < 300)
        (void)snprintf(text + strlen(text), 32, " n%zu=127.0.0.1:%zu", strlen(text), strlen(text));
    REFUSED(text, "f:2", "begins with a space");
}
END_TEST

START_TEST(a_name_that_fits_no_path_is_refused_only_where_a_path_wants_it)
{
    struct config c;
    struct err e = {0};
    ck_assert_int_eq(parse(&c, "[daemon]\nnode = a/b\n", &e), 0);
    REFUSED("[daemon]\nnode = a/b\nsocket = /run/%n.sock\n", "socket", "a/b");
}
END_TEST

START_TEST(roles_go_on_in_further_lines)
{
    struct config c;
    struct err e = {0};
    ck_assert_msg(parse(&c, "[roles]\ntrainer = a b\n  c*\noperator = uid:0\n", &e) == 0, "%s",
                  e.text);
    ck_assert_str_eq(c.trainer, "a b c*");
    ck_assert_str_eq(c.operator, "uid:0");
    ck_assert_str_eq(c.peer, "");
}
END_TEST

/* CASES C07 (NVIDIA/nccl#1837): a configured interface that is not there was found out late, as "family 59936". */
START_TEST(an_interface_or_address_that_is_not_here_is_named_at_start)
{
    struct config c;
    struct err e = {0};
    ck_assert_int_eq(parse(&c, "[cluster]\ndata_address = eth99\n", &e), 0);
    ck_assert_int_eq(config_check_here(&c, &e), RS_ENOTFOUND);
    ck_assert_msg(strstr(e.text, "data_address") && strstr(e.text, "eth99") && strstr(e.text, "lo"),
                  "%s", e.text);
    ck_assert_int_eq(parse(&c,
                           CLUSTER("coordinator = n0\nnodes = n0=192.0.2.77:7070\n"
                                   "insecure_network = yes\n"),
                           &e),
                     0);
    ck_assert_int_eq(config_check_here(&c, &e), RS_ENOTFOUND);
    ck_assert_msg(strstr(e.text, "n0=192.0.2.77:7070") && strstr(e.text, "does not have"), "%s",
                  e.text);
    config_close(&c);
    ck_assert_int_eq(parse(&c, "[cluster]\ndata_address = lo\n", &e), 0);
    ck_assert_msg(config_check_here(&c, &e) == 0, "%s", e.text);
    ck_assert_str_eq(c.data_address, "127.0.0.1");
    ck_assert_int_eq(parse(&c,
                           CLUSTER("coordinator = n0\nnodes = n0=127.0.0.3:7070\n"
                                   "tls_ca = /none/ca.pem\ntls_certificate = /none/c\n"
                                   "tls_key = /none/k\n"),
                           &e),
                     0);
    ck_assert_int_ne(config_check_here(&c, &e), 0);
    ck_assert_msg(strstr(e.text, "/none/ca.pem") != NULL, "%s", e.text);
    config_close(&c);
}
END_TEST

START_TEST(settings_survive_the_failure_of_any_allocation)
{
    static const char text[] = "[daemon]\nnode = n1\n[cluster]\ncoordinator = n0\n"
                               "nodes = n0=127.0.0.1:1 n1=127.0.0.1:2\n n2=127.0.0.1:3\n";
    for (long i = 1;; i++) {
        struct config c;
        struct err e = {0};
        config_init(&c);
        mem_fail_at(i);
        int r = config_parse(&c, text, "f", &e);
        int struck = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        config_close(&c);
        if (!struck)
            break;
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(one_file_serves_every_node)                                                                  \
    X(gpus_are_named_for_a_backend_that_has_them_one_for_each_device)                              \
    X(without_nodes_it_is_alone)                                                                   \
    X(a_thousand_nodes_fit_and_one_more_does_not)                                                  \
    X(refusals_of_a_cluster_name_what_is_wrong)                                                    \
    X(a_line_that_the_reader_would_cut_is_refused_by_number)                                       \
    X(a_name_that_fits_no_path_is_refused_only_where_a_path_wants_it)                              \
    X(roles_go_on_in_further_lines)                                                                \
    X(an_interface_or_address_that_is_not_here_is_named_at_start)                                  \
    X(settings_survive_the_failure_of_any_allocation)

#include "test/lib/main.h"
