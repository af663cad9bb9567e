/* Addresses as people write them, and the choice of an interface. */
#include <arpa/inet.h>
#include <check.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "base/interface.h"
#include "base/mem.h"
#include "base/netaddr.h"

static struct netaddr good(const char *text, enum netaddr_port rule)
{
    struct netaddr a;
    struct err e = {0};
    int r = netaddr_parse(text, rule, &a, &e);
    ck_assert_msg(r == 0, "'%s': %s", text, err_text(&e, r));
    return a;
}

static void bad(const char *text, enum netaddr_port rule, const char *part)
{
    struct netaddr a;
    struct err e = {0};
    ck_assert_msg(netaddr_parse(text, rule, &a, &e) == RS_EINVAL, "'%s' was taken", text);
    ck_assert_msg(strstr(e.text, part) != NULL, "'%s': '%s' lacks '%s'", text, e.text, part);
}

START_TEST(both_families_are_read_with_port_and_interface)
{
    struct netaddr a = good("[2001:db8::1]:7000", NETADDR_PORT);
    const uint8_t six[16] = {0x20, 0x01, 0x0d, 0xb8, [15] = 1};
    ck_assert_int_eq(a.family, AF_INET6);
    ck_assert_int_eq(memcmp(a.bytes, six, 16), 0);
    ck_assert_uint_eq(a.port, 7000);
    a = good("fe80::1%eth0", NETADDR_NO_PORT);
    ck_assert_str_eq(a.interface, "eth0");
    ck_assert(!a.has_port);
    ck_assert(netaddr_is_link_local(&a));
    a = good("fe80::1%eth0", NETADDR_PORT_OPTIONAL);
    ck_assert_str_eq(a.interface, "eth0");
    a = good("[fe80::1%eth0]:65535", NETADDR_PORT);
    ck_assert_str_eq(a.interface, "eth0");
    ck_assert_uint_eq(a.port, 65535);
    a = good("192.0.2.1:7000", NETADDR_PORT);
    ck_assert_int_eq(a.family, AF_INET);
    ck_assert_int_eq(memcmp(a.bytes, "\xc0\x00\x02\x01", 4), 0);
    ck_assert_uint_eq(a.port, 7000);
    ck_assert_str_eq(a.interface, "");
    ck_assert_uint_eq(good("127.0.0.1:0", NETADDR_PORT_OR_ANY).port, 0);
}
END_TEST

START_TEST(what_can_be_read_in_two_ways_is_refused_with_both)
{
    bad("2001:db8::1:7000", NETADDR_PORT, "write [2001:db8::1]:7000 or [2001:db8::1:7000]");
    bad("2001:db8::1:7000", NETADDR_PORT_OPTIONAL, "two ways");
    bad("2001:db8::1:7000", NETADDR_PORT_OR_ANY, "two ways");
    (void)good("2001:db8::1", NETADDR_PORT_OPTIONAL);     /* 2001:db8: is no address */
    (void)good("2001:db8::1:7000", NETADDR_NO_PORT);      /* no port belongs there */
    (void)good("1:2:3:4:5:6:7:8", NETADDR_PORT_OPTIONAL); /* seven groups are no address */
    bad("1:2:3:4:5:6:7:8:9", NETADDR_PORT_OPTIONAL, "write [1:2:3:4:5:6:7:8]:9");
}
END_TEST

START_TEST(ports_that_are_none_are_refused)
{
    bad("192.0.2.1:0", NETADDR_PORT, "port 0");
    bad("192.0.2.1:0", NETADDR_PORT_OPTIONAL, "port 0");
    bad("[2001:db8::1]:0", NETADDR_PORT, "port 0");
    bad("192.0.2.1:65536", NETADDR_PORT, "65535");
    bad("[2001:db8::1]:65536", NETADDR_PORT_OR_ANY, "65535");
    bad("192.0.2.1:", NETADDR_PORT, "65535");
    bad("192.0.2.1:-1", NETADDR_PORT, "65535");
    bad("192.0.2.1:+1", NETADDR_PORT, "65535");
    bad("192.0.2.1: 1", NETADDR_PORT, "65535");
    bad("192.0.2.1:0x10", NETADDR_PORT, "65535");
    bad("192.0.2.1:4294967297", NETADDR_PORT, "65535");
    bad("192.0.2.1", NETADDR_PORT, "write 192.0.2.1:PORT");
    bad("2001:db8::1", NETADDR_PORT, "write [2001:db8::1]:PORT");
    bad("[2001:db8::1]", NETADDR_PORT, "write [2001:db8::1]:PORT");
    bad("192.0.2.1:7000", NETADDR_NO_PORT, "no port belongs here");
    bad("[::1]:7000", NETADDR_NO_PORT, "no port belongs here");
}
END_TEST

START_TEST(what_is_no_address_is_refused)
{
    static const char *const texts[] = {"",
                                        ":",
                                        "::",
                                        ":7000",
                                        "[",
                                        "[]",
                                        "[]:1",
                                        "[::1",
                                        "[::1]x:1",
                                        "[::1]:1x",
                                        "[192.0.2.1]:1",
                                        "192.0.2:1",
                                        "192.0.2.256:1",
                                        "192.0.2.01.:1",
                                        "host.example:1",
                                        "fe80::1%:1",
                                        "[fe80::1%]:1",
                                        "[fe80::1%a/b]:1",
                                        "[fe80::1%sixteen-letters-]:1",
                                        "192.0.2.1%eth0:1",
                                        "1::2::3",
                                        "[::1]:1:2",
                                        "[fe80::1%eth0%eth1]:1",
                                        " 192.0.2.1:1"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        bad(texts[i], NETADDR_PORT, "address '");
}
END_TEST

START_TEST(a_text_comes_back_as_it_was)
{
    static const char *const texts[] = {"192.0.2.1:7000", "[2001:db8::1]:7000", "[fe80::1%eth0]:1",
                                        "fe80::1%eth0",   "192.0.2.1",          "::1",
                                        "[::]:65535"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char text[NETADDR_TEXT_BYTES];
        struct netaddr a = good(texts[i], NETADDR_PORT_OPTIONAL);
        netaddr_format(&a, text);
        ck_assert_str_eq(text, texts[i]);
        struct netaddr b = good(text, NETADDR_PORT_OPTIONAL);
        ck_assert(netaddr_equal(&a, &b));
    }
    char text[NETADDR_TEXT_BYTES];
    struct netaddr a = good("[abcd:abcd:abcd:abcd:abcd:abcd:abcd:abcd%fifteen-letters]:65535",
                            NETADDR_PORT); /* the longest fits */
    netaddr_format(&a, text);
    ck_assert_str_eq(text, "[abcd:abcd:abcd:abcd:abcd:abcd:abcd:abcd%fifteen-letters]:65535");
}
END_TEST

START_TEST(loopback_any_and_link_local_are_told_in_every_dress)
{
    struct netaddr a = good("::ffff:127.0.0.1", NETADDR_NO_PORT);
    ck_assert_int_eq(a.family, AF_INET);
    ck_assert(netaddr_is_loopback(&a));
    a = good("localhost:1", NETADDR_PORT);
    ck_assert(netaddr_is_loopback(&a));
    a = good("127.255.0.9", NETADDR_NO_PORT);
    ck_assert(netaddr_is_loopback(&a));
    a = good("::1", NETADDR_NO_PORT);
    ck_assert(netaddr_is_loopback(&a) && !netaddr_is_any(&a));
    a = good("::2", NETADDR_NO_PORT);
    ck_assert(!netaddr_is_loopback(&a));
    a = good("128.0.0.1", NETADDR_NO_PORT);
    ck_assert(!netaddr_is_loopback(&a));
    a = good("0.0.0.0", NETADDR_NO_PORT);
    ck_assert(netaddr_is_any(&a));
    a = good("::", NETADDR_NO_PORT);
    ck_assert(netaddr_is_any(&a));
    a = good("169.254.3.4", NETADDR_NO_PORT);
    ck_assert(netaddr_is_link_local(&a));
    a = good("febf::1%x", NETADDR_NO_PORT);
    ck_assert(netaddr_is_link_local(&a));
    a = good("fec0::1", NETADDR_NO_PORT);
    ck_assert(!netaddr_is_link_local(&a));
}
END_TEST

START_TEST(the_system_s_form_goes_there_and_back)
{
    struct sockaddr_storage sa;
    socklen_t n = 0;
    struct netaddr b;
    struct err e = {0};
    struct netaddr a = good("192.0.2.1:7000", NETADDR_PORT);
    ck_assert_int_eq(netaddr_sockaddr(&a, &sa, &n, NULL), 0);
    ck_assert_uint_eq(n, sizeof(struct sockaddr_in));
    ck_assert_uint_eq(((struct sockaddr_in *)&sa)->sin_addr.s_addr, inet_addr("192.0.2.1"));
    ck_assert_int_eq(netaddr_from_sockaddr((struct sockaddr *)&sa, &b), 0);
    ck_assert(netaddr_equal(&a, &b));
    a = good("[fe80::1%lo]:7000", NETADDR_PORT);
    ck_assert_int_eq(netaddr_sockaddr(&a, &sa, &n, NULL), 0);
    ck_assert_uint_eq(((struct sockaddr_in6 *)&sa)->sin6_scope_id, if_nametoindex("lo"));
    ck_assert_int_eq(netaddr_from_sockaddr((struct sockaddr *)&sa, &b), 0);
    ck_assert(netaddr_equal(&a, &b));
    a = good("[fe80::1%rs-none]:7000", NETADDR_PORT);
    ck_assert_int_eq(netaddr_sockaddr(&a, &sa, &n, &e), RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "'rs-none'"));
    a = good("[fe80::1]:7000", NETADDR_PORT);
    ck_assert_int_eq(netaddr_sockaddr(&a, &sa, &n, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "link-local"));
    sa.ss_family = AF_UNIX;
    ck_assert_int_eq(netaddr_from_sockaddr((struct sockaddr *)&sa, &b), RS_EINVAL);
}
END_TEST

/* --- interfaces ------------------------------------------------------------------------------- */

static struct interface entry(const char *name, const char *address)
{
    struct interface i = {.up = true, .address = good(address, NETADDR_NO_PORT)};
    (void)snprintf(i.name, sizeof i.name, "%s", name);
    return i;
}

/* NCCL took docker0 or a tunnel here: NVIDIA/nccl#929, #529. */
START_TEST(the_interface_that_others_reach_is_chosen)
{
    struct interface list[] = {entry("lo", "127.0.0.1"), entry("docker0", "172.17.0.1"),
                               entry("veth0", "fe80::1%veth0"), entry("ip6tnl0", "fe80::2%ip6tnl0"),
                               entry("eth0", "192.0.2.10")};
    const struct interface *got = NULL;
    ck_assert_int_eq(interface_choose(list, 5, NULL, 0, false, &got, NULL), 0);
    ck_assert_str_eq(got->name, "eth0");
    ck_assert_int_eq(interface_choose(list, 5, NULL, AF_INET, true, &got, NULL), 0);
    ck_assert_str_eq(got->name, "eth0");
    ck_assert_int_eq(interface_choose(list, 5, "docker0", 0, false, &got, NULL), 0);
    ck_assert_str_eq(got->name, "docker0");
}
END_TEST

START_TEST(loopback_alone_will_do_for_one_node_and_not_for_two)
{
    struct interface list[] = {entry("lo", "127.0.0.1"), entry("lo", "::1")};
    const struct interface *got = NULL;
    struct err e = {0};
    ck_assert_int_eq(interface_choose(list, 2, NULL, 0, true, &got, NULL), 0);
    ck_assert_str_eq(got->name, "lo");
    ck_assert_int_eq(interface_choose(list, 2, NULL, 0, false, &got, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "lo 127.0.0.1, lo ::1"));
    ck_assert_ptr_nonnull(strstr(e.text, "name the interface"));
    ck_assert_int_eq(interface_choose(list, 0, NULL, 0, true, &got, &e), RS_EPRECOND);
}
END_TEST

START_TEST(families_and_downs_are_heeded)
{
    struct interface list[] = {entry("eth0", "fe80::1%eth0"), entry("eth0", "2001:db8::1"),
                               entry("eth1", "192.0.2.1"), entry("eth2", "192.0.2.2")};
    const struct interface *got = NULL;
    struct err e = {0};
    list[2].up = false;
    ck_assert_int_eq(interface_choose(list, 4, NULL, 0, false, &got, NULL), 0);
    ck_assert_str_eq(got->name, "eth2");
    ck_assert_int_eq(interface_choose(list, 4, NULL, AF_INET6, false, &got, NULL), 0);
    ck_assert_ptr_eq(got, &list[1]);
    ck_assert_int_eq(interface_choose(list, 3, NULL, AF_INET, false, &got, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "eth1 192.0.2.1 (down)"));
    ck_assert_int_eq(interface_choose(list, 4, "eth0", 0, false, &got, NULL), 0);
    ck_assert_ptr_eq(got, &list[1]); /* link-local last */
    ck_assert_int_eq(interface_choose(list, 4, "eth0", AF_INET, false, &got, &e), RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "no IPv4 address"));
}
END_TEST

/* NCCL died later, of "family 59936": NVIDIA/nccl#1837. */
START_TEST(an_interface_that_is_not_there_is_named_with_those_that_are)
{
    struct interface *list = NULL;
    const struct interface *got = NULL;
    size_t n = 0;
    struct err e = {0};
    ck_assert_int_eq(interface_list(&list, &n, NULL), 0);
    ck_assert_int_eq(interface_choose(list, n, "eth99", 0, false, &got, &e), RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "'eth99'"));
    ck_assert_ptr_nonnull(strstr(e.text, "lo 127.0.0.1"));
    ck_assert_int_eq(interface_choose(list, n, "lo", AF_INET, false, &got, NULL), 0);
    ck_assert(got->up && netaddr_is_loopback(&got->address) && !got->address.has_port);
    mem_free(list);
}
END_TEST

START_TEST(a_failed_allocation_is_an_error)
{
    struct interface *list = NULL;
    size_t n = 0;
    mem_fail_at(1);
    ck_assert_int_eq(interface_list(&list, &n, NULL), RS_ENOMEM);
    mem_fail_at(0);
    ck_assert_ptr_null(list);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(both_families_are_read_with_port_and_interface)                                              \
    X(what_can_be_read_in_two_ways_is_refused_with_both)                                           \
    X(ports_that_are_none_are_refused)                                                             \
    X(what_is_no_address_is_refused)                                                               \
    X(a_text_comes_back_as_it_was)                                                                 \
    X(loopback_any_and_link_local_are_told_in_every_dress)                                         \
    X(the_system_s_form_goes_there_and_back)                                                       \
    X(the_interface_that_others_reach_is_chosen)                                                   \
    X(loopback_alone_will_do_for_one_node_and_not_for_two)                                         \
    X(families_and_downs_are_heeded)                                                               \
    X(an_interface_that_is_not_there_is_named_with_those_that_are)                                 \
    X(a_failed_allocation_is_an_error)

#include "test/lib/main.h"
