/* Topology files: numbering of devices and domains, and what is refused. */
#include <check.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "topology/topology.h"

static int parse(const char *quoted, struct topology_file **ret, struct err *e)
{
    char *text = strdup(quoted);
    for (char *c = text; *c != '\0'; c++)
        if (*c == '\'')
            *c = '"';
    *ret = NULL;
    int r = topology_from_json(text, strlen(text), ret, e);
    free(text);
    return r;
}

static const char example[] =
    "{'nodes': [{'name': 'n0', 'devices': 8}, {'name': 'n1', 'devices': 8, 'domain': 'rack1'},"
    " {'name': 'a:b', 'devices': 2, 'domain': 'rack1'}, {'name': 'n3', 'devices': 1}],"
    " 'source': ['n0:0', null, 'n0:7'], 'destination': {'rollout': ['n1:0', 'a:b:1'],"
    " 'eval': ['n3:0']}, 'network_gbytes_per_s': 50, 'domain_gbytes_per_s': 400.5}";

START_TEST(devices_are_numbered_in_node_order_and_domains_by_their_first_node)
{
    struct topology_file *f;
    struct err e = {0};
    char text[32];
    ck_assert_msg(parse(example, &f, &e) == 0, "%s", e.text);
    const struct topology *t = &f->topology;
    ck_assert_uint_eq(t->n_nodes, 4);
    ck_assert_uint_eq(t->n_devices, 19);
    ck_assert_uint_eq(t->n_domains, 3);
    ck_assert_str_eq(t->domains[0], "n0");
    ck_assert_str_eq(t->domains[1], "rack1");
    ck_assert_str_eq(t->domains[2], "n3");
    ck_assert_uint_eq(t->devices[15].domain, 1);
    ck_assert_uint_eq(t->devices[16].domain, 1);
    ck_assert_uint_eq(t->devices[18].domain, 2);
    ck_assert_str_eq(topology_device_text(t, 17, text, sizeof text), "a:b:1");
    ck_assert_int_eq(topology_find(t, "a:b", 1), 17);
    ck_assert_int_eq(topology_find(t, "a:b", 2), TOPOLOGY_NONE);
    ck_assert_int_eq(topology_find(t, "n9", 0), TOPOLOGY_NONE);
    ck_assert_int_eq(f->source.device[0], 0);
    ck_assert_int_eq(f->source.device[1], TOPOLOGY_NONE);
    ck_assert_int_eq(f->source.device[2], 7);
    ck_assert_uint_eq(f->n_destinations, 2);
    ck_assert_str_eq(f->destination_names[1], "eval");
    ck_assert_int_eq(f->destinations[0].device[1], 17);
    ck_assert_int_eq(f->destinations[1].device[0], 18);
    ck_assert_double_eq(t->network_bytes_per_s, 50e9);
    ck_assert_double_eq(t->domain_bytes_per_s, 400.5e9);
    topology_file_free(f);
}
END_TEST

START_TEST(a_domain_may_have_another_nodes_name)
{
    struct topology_file *f;
    struct err e = {0};
    ck_assert_int_eq(parse("{'nodes': [{'name': 'x', 'devices': 1, 'domain': 'y'},"
                           "{'name': 'z', 'devices': 1}, {'name': 'y', 'devices': 1}],"
                           "'source': ['x:0'], 'destination': ['y:0']}",
                           &f, &e),
                     0);
    ck_assert_uint_eq(f->topology.n_domains, 2);
    ck_assert_uint_eq(f->topology.devices[0].domain, f->topology.devices[2].domain);
    ck_assert_uint_ne(f->topology.devices[0].domain, f->topology.devices[1].domain);
    ck_assert_ptr_null(f->destination_names[0]);
    ck_assert_double_eq(f->topology.network_bytes_per_s, 0);
    topology_file_free(f);
}
END_TEST

#define NODES "'nodes': [{'name': 'n', 'devices': 2}]"
static const struct {
    const char *json, *says;
} refusals[] = {
    {"{" NODES ", 'source': ['n:2'], 'destination': []}", "source: rank 0|'n:2'"},
    {"{" NODES ", 'source': [], 'destination': ['n:0', 'm:0']}", "destination: rank 1|'m:0'"},
    {"{" NODES ", 'source': [], 'destination': {'d': ['n:']}}", "destination 'd': rank 0"},
    {"{" NODES ", 'source': ['n'], 'destination': []}", "rank 0|'n'"},
    {"{" NODES ", 'source': ['n:-1'], 'destination': []}", "rank 0"},
    {"{" NODES ", 'source': ['n:0x'], 'destination': []}", "rank 0"},
    {"{" NODES ", 'source': [0], 'destination': []}", "rank 0|\"n:0\""},
    {"{" NODES ", 'source': 'n:0', 'destination': []}", "source|list"},
    {"{" NODES ", 'source': []}", "'destination' is missing"},
    {"{" NODES ", 'destination': []}", "'source' is missing"},
    {"{" NODES ", 'source': [], 'destination': {}}", "destination"},
    {"{" NODES ", 'source': [], 'destination': [], 'rate': 1}", "unknown key 'rate'"},
    {"{" NODES ", 'source': [], 'destination': [], 'network_gbytes_per_s': 0}",
     "network_gbytes_per_s"},
    {"{" NODES ", 'source': [], 'destination': [], 'domain_gbytes_per_s': 'x'}",
     "domain_gbytes_per_s"},
    {"{'nodes': [], 'source': [], 'destination': []}", "nodes"},
    {"{'nodes': [{'name': 'n', 'devices': 0}], 'source': [], 'destination': []}",
     "node 'n'|devices"},
    {"{'nodes': [{'name': 'n', 'devices': 262145}], 'source': [], 'destination': []}",
     "node 'n'|262144"},
    {"{'nodes': [{'name': 'n', 'devices': 1}, {'name': 'n', 'devices': 1}], 'source': [],"
     "'destination': []}",
     "node 'n' is listed twice"},
    {"{'nodes': [{'devices': 1}], 'source': [], 'destination': []}", "node 0|name"},
    {"{'nodes': [{'name': 'n', 'devices': 1, 'domain': ''}], 'source': [], 'destination': []}",
     "node 'n'|domain"},
    {"{'nodes': [{'name': 'n', 'devices': 1, 'gpus': 1}], 'source': [], 'destination': []}",
     "node 0|unknown key 'gpus'"},
    {"{" NODES ", " NODES ", 'source': [], 'destination': []}", "line 1|duplicate"},
    {"{" NODES ",\n", "line 2"},
};

START_TEST(each_fault_names_node_key_or_rank)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct topology_file *f;
        struct err e = {0};
        int r = parse(refusals[i].json, &f, &e);
        ck_assert_msg(r == RS_EINVAL, "%zu: %d %s", i, r, refusals[i].json);
        ck_assert_ptr_null(f);
        char *parts = strdup(refusals[i].says);
        for (char *rest = parts, *part; (part = strsep(&rest, "|")) != NULL;)
            ck_assert_msg(strstr(e.text, part) != NULL, "%zu: no '%s' in: %s", i, part, e.text);
        free(parts);
    }
}
END_TEST

static void parse_with_failures(int also, long least)
{
    for (long i = 1;; i++) {
        struct topology_file *f;
        struct err e = {0};
        mem_fail_at(i);
        int r = parse(example, &f, &e);
        bool struck = mem_failed() != 0;
        mem_fail_at(0);
        if (!struck) {
            ck_assert_int_eq(r, 0);
            ck_assert_int_gt(i, least);
            topology_file_free(f);
            return;
        }
        ck_assert_msg(r == RS_ENOMEM || r == also, "allocation %ld: %d %s", i, r, e.text);
        ck_assert_ptr_null(f);
    }
}

START_TEST(every_failed_allocation_is_reported_and_leaks_nothing)
{
    parse_with_failures(RS_ENOMEM, 15);
    /* In the parser as well: jansson tells some of its own failures as syntax errors. */
    json_set_alloc_funcs(mem_alloc, mem_free);
    parse_with_failures(RS_EINVAL, 60);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(devices_are_numbered_in_node_order_and_domains_by_their_first_node)                          \
    X(a_domain_may_have_another_nodes_name)                                                        \
    X(each_fault_names_node_key_or_rank)                                                           \
    X(every_failed_allocation_is_reported_and_leaks_nothing)
#include "test/lib/main.h"
