/* Addresses of nodes: parsed, printed, found among interfaces. */
#include <check.h>
#include <string.h>

#include "peer/address.h"

/* CASES C09 (NVIDIA/nccl#210, #2057): address families, ambiguous text, ports out of range. */
START_TEST(addresses_of_both_families_are_read_and_ambiguous_ones_refused)
{
    struct address a;
    char text[96];
    struct err e = {0};
    ck_assert_int_eq(address_parse("[2001:db8::1]:7000", true, &a, &e), 0);
    ck_assert(a.family == ADDRESS_V6 && a.port == 7000);
    ck_assert_str_eq(a.host, "2001:db8::1");
    ck_assert_str_eq(address_text(&a, text, sizeof text), "[2001:db8::1]:7000");
    ck_assert_int_eq(address_parse("fe80::1%eth0", false, &a, &e), 0);
    ck_assert(a.family == ADDRESS_V6 && a.link_local && a.port == 0);
    ck_assert_str_eq(a.host, "fe80::1%eth0");
    ck_assert_int_eq(address_parse("192.0.2.1:7000", true, &a, &e), 0);
    ck_assert(a.family == ADDRESS_V4 && a.port == 7000 && !a.loopback);
    static const char *const bad[] = {
        "2001:db8::1:7000", "192.0.2.1:0",     "192.0.2.1:65536", "192.0.2.1",  "[2001:db8::1]",
        "[2001:db8::1",     "localhost:7000",  "192.0.2.1:+7000", "192.0.2.1:", "[192.0.2.1]:7000",
        "192.0.2:7000",     "[fe80::1%]:7000", "[fe80::1%a/b]:1", ":7000",      "192.0.2.1:070000"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        ck_assert_msg(address_parse(bad[i], true, &a, &e) == RS_EINVAL, "'%s' was taken", bad[i]);
    (void)address_parse("2001:db8::1:7000", true, &a, &e);
    ck_assert_msg(strstr(e.text, "ambiguous") != NULL, "%s", e.text);
}
END_TEST

START_TEST(one_spelling_of_an_address_is_kept)
{
    struct address a;
    struct err e = {0};
    ck_assert_int_eq(address_parse("2001:DB8:0:0:0:0:0:1", false, &a, &e), 0);
    ck_assert_str_eq(a.host, "2001:db8::1");
    ck_assert_int_eq(address_parse("127.4.5.6", false, &a, &e), 0);
    ck_assert(a.loopback);
    ck_assert_int_eq(address_parse("::1", false, &a, &e), 0);
    ck_assert(a.loopback && a.family == ADDRESS_V6);
    ck_assert_int_eq(address_parse("0.0.0.0", false, &a, &e), 0);
    ck_assert(a.any);
}
END_TEST

static struct address_interface interface(const char *name, const char *host)
{
    struct address_interface i = {0};
    struct err e = {0};
    ck_assert_msg(address_parse(host, false, &i.address, &e) == 0, "%s", e.text);
    memcpy(i.name, name, strlen(name) + 1);
    return i;
}

/* CASES C08 (NVIDIA/nccl#929, #529): docker's bridge or a link-local address was taken for the network. */
START_TEST(an_interface_gives_its_routable_address_of_the_clusters_family)
{
    struct address_interface list[] = {
        interface("lo", "127.0.0.1"),      interface("docker0", "172.17.0.1"),
        interface("veth0", "fe80::1"),     interface("ip6tnl0", "fe80::2"),
        interface("eth0", "fe80::3%eth0"), interface("eth0", "2001:db8::5"),
        interface("eth0", "192.0.2.10"),
    };
    size_t n = sizeof list / sizeof *list;
    struct address a;
    struct err e = {0};
    ck_assert_int_eq(address_choose(list, n, "eth0", ADDRESS_V4, &a, &e), 0);
    ck_assert_str_eq(a.host, "192.0.2.10");
    ck_assert_int_eq(address_choose(list, n, "eth0", ADDRESS_V6, &a, &e), 0);
    ck_assert_str_eq(a.host, "2001:db8::5");
    ck_assert_int_eq(address_choose(list, n, "veth0", ADDRESS_V4, &a, &e), 0);
    ck_assert_str_eq(a.host, "fe80::1");
    ck_assert_int_eq(address_choose(list, n, "eth9", ADDRESS_V4, &a, &e), RS_ENOTFOUND);
    ck_assert_msg(strstr(e.text, "lo, docker0, veth0, ip6tnl0, eth0"), "%s", e.text);
}
END_TEST

START_TEST(an_address_of_this_machine_is_told_from_another)
{
    struct address a;
    struct err e = {0};
    ck_assert_int_eq(address_parse("127.0.0.9", false, &a, &e), 0);
    ck_assert_int_eq(address_is_here(&a, &e), 0);
    ck_assert_int_eq(address_parse("192.0.2.77", false, &a, &e), 0);
    ck_assert_int_eq(address_is_here(&a, &e), RS_ENOTFOUND);
    ck_assert_int_eq(address_parse("fe80::1%nosuch0", false, &a, &e), 0);
    ck_assert_int_eq(address_is_here(&a, &e), RS_EINVAL);
    ck_assert_msg(strstr(e.text, "nosuch0"), "%s", e.text);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(addresses_of_both_families_are_read_and_ambiguous_ones_refused)                              \
    X(one_spelling_of_an_address_is_kept)                                                          \
    X(an_interface_gives_its_routable_address_of_the_clusters_family)                              \
    X(an_address_of_this_machine_is_told_from_another)

#include "test/lib/main.h"
