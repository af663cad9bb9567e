#include "base/netaddr.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/banned.h"

/* --- parse ------------------------------------------------------------------------------------ */

/* A piece of the text. */
struct part {
    const char *at;
    size_t n;
};

static bool copy_part(struct part p, char *ret, size_t size)
{
    if (p.n >= size)
        return false;
    memcpy(ret, p.at, p.n);
    ret[p.n] = '\0';
    return true;
}

static bool read_ipv4(struct part host, struct netaddr *ret)
{
    char text[INET_ADDRSTRLEN];
    struct netaddr a = {.family = AF_INET};
    if (!copy_part(host, text, sizeof text) || inet_pton(AF_INET, text, a.bytes) != 1)
        return false;
    *ret = a;
    return true;
}

/* A name as Linux takes it. */
static bool is_interface(const char *name)
{
    return name[0] != '\0' && strpbrk(name, "/ \t\r\n:[]%") == NULL && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

static void undress_ipv4(struct netaddr *a)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (memcmp(a->bytes, mapped, sizeof mapped) != 0 || a->interface[0] != '\0')
        return;
    memmove(a->bytes, a->bytes + 12, 4);
    memset(a->bytes + 4, 0, 12);
    a->family = AF_INET;
}

static bool read_ipv6(struct part host, struct netaddr *ret)
{
    char text[INET6_ADDRSTRLEN];
    struct netaddr a = {.family = AF_INET6};
    const char *zone = memchr(host.at, '%', host.n);
    struct part number = {host.at, zone == NULL ? host.n : (size_t)(zone - host.at)};
    if (!copy_part(number, text, sizeof text) || inet_pton(AF_INET6, text, a.bytes) != 1)
        return false;
    if (zone != NULL) {
        struct part name = {zone + 1, host.n - number.n - 1};
        if (!copy_part(name, a.interface, sizeof a.interface) || !is_interface(a.interface))
            return false;
    }
    undress_ipv4(&a);
    *ret = a;
    return true;
}

static bool read_host(struct part host, struct netaddr *ret)
{
    if (host.n == 9 && memcmp(host.at, "localhost", 9) == 0)
        return read_ipv4((struct part){"127.0.0.1", 9}, ret);
    return read_ipv4(host, ret) || read_ipv6(host, ret);
}

/* Digits alone, at most five. */
static bool read_port(const char *text, long *ret)
{
    size_t n = strlen(text);
    if (n == 0 || n > 5 || strspn(text, "0123456789") != n)
        return false;
    *ret = strtol(text, NULL, 10);
    return true;
}

static int set_port(const char *text, const char *port_text, enum netaddr_port rule,
                    struct netaddr *a, struct err *e)
{
    long port = 0;
    if (!read_port(port_text, &port) || port > 65535)
        return err_set(e, RS_EINVAL, "address '%s': port '%s' is not 1 to 65535", text, port_text);
    if (port == 0 && rule != NETADDR_PORT_OR_ANY)
        return err_set(e, RS_EINVAL, "address '%s': port 0 is no port to be found at: 1 to 65535",
                       text);
    a->has_port = true;
    a->port = (uint16_t)port;
    return 0;
}

/* "[host]" or "[host]:port". */
static int parse_brackets(const char *text, enum netaddr_port rule, struct netaddr *a,
                          struct err *e)
{
    const char *close = strchr(text, ']');
    if (close == NULL || !read_ipv6((struct part){text + 1, (size_t)(close - text - 1)}, a))
        return err_set(e, RS_EINVAL, "address '%s': no IPv6 address in the brackets", text);
    if (close[1] == ':')
        return rule == NETADDR_NO_PORT
                   ? err_set(e, RS_EINVAL, "address '%s': no port belongs here", text)
                   : set_port(text, close + 2, rule, a, e);
    if (close[1] != '\0')
        return err_set(e, RS_EINVAL, "address '%s': ':PORT' is missing after the bracket", text);
    return 0;
}

/* Several colons and no bracket: an IPv6 address, and the last group might be meant as a port. */
static int parse_bare_ipv6(const char *text, enum netaddr_port rule, struct netaddr *a,
                           struct err *e)
{
    const char *last = strrchr(text, ':');
    struct netaddr shorter;
    long port;
    bool whole = read_ipv6((struct part){text, strlen(text)}, a);
    bool split = read_port(last + 1, &port) &&
                 read_ipv6((struct part){text, (size_t)(last - text)}, &shorter);
    if (split && rule != NETADDR_NO_PORT)
        return err_set(e, RS_EINVAL,
                       "address '%s' can be read in two ways: write [%.*s]:%s or [%s]", text,
                       (int)(last - text), text, last + 1, text);
    if (!whole)
        return err_set(e, RS_EINVAL, "address '%s' is no IPv6 address", text);
    return 0;
}

/* "host" or "host:port". */
static int parse_plain(const char *text, enum netaddr_port rule, struct netaddr *a, struct err *e)
{
    const char *colon = strchr(text, ':');
    size_t n = colon == NULL ? strlen(text) : (size_t)(colon - text);
    if (!read_host((struct part){text, n}, a))
        return err_set(e, RS_EINVAL,
                       "address '%s' is no IP address: like 192.0.2.1, [2001:db8::1]:7000", text);
    if (colon == NULL)
        return 0;
    if (rule == NETADDR_NO_PORT)
        return err_set(e, RS_EINVAL, "address '%s': no port belongs here", text);
    return set_port(text, colon + 1, rule, a, e);
}

int netaddr_parse(const char *text, enum netaddr_port rule, struct netaddr *ret, struct err *e)
{
    struct netaddr a = {0};
    const char *colon = strchr(text, ':');
    int r;
    if (text[0] == '[')
        r = parse_brackets(text, rule, &a, e);
    else if (colon != NULL && strchr(colon + 1, ':') != NULL)
        r = parse_bare_ipv6(text, rule, &a, e);
    else
        r = parse_plain(text, rule, &a, e);
    if (r != 0)
        return r;
    if (!a.has_port && (rule == NETADDR_PORT || rule == NETADDR_PORT_OR_ANY))
        return err_set(e, RS_EINVAL, "address '%s' has no port: write %s%s%s:PORT", text,
                       a.family == AF_INET6 && text[0] != '[' ? "[" : "", text,
                       a.family == AF_INET6 && text[0] != '[' ? "]" : "");
    *ret = a;
    return 0;
}

/* --- what it is ------------------------------------------------------------------------------- */

void netaddr_format(const struct netaddr *a, char ret[NETADDR_TEXT_BYTES])
{
    char host[INET6_ADDRSTRLEN] = "";
    const char *percent = a->interface[0] == '\0' ? "" : "%";
    bool brackets = a->family == AF_INET6 && a->has_port;
    (void)inet_ntop(a->family, a->bytes, host, sizeof host);
    int n = snprintf(ret, NETADDR_TEXT_BYTES, "%s%s%s%s%s", brackets ? "[" : "", host, percent,
                     a->interface, brackets ? "]" : "");
    if (a->has_port)
        (void)snprintf(ret + n, NETADDR_TEXT_BYTES - (size_t)n, ":%" PRIu16, a->port);
}

static bool is_all_zero(const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != 0)
            return false;
    return true;
}

bool netaddr_is_loopback(const struct netaddr *a)
{
    if (a->family == AF_INET)
        return a->bytes[0] == 127;
    return is_all_zero(a->bytes, 15) && a->bytes[15] == 1;
}

bool netaddr_is_any(const struct netaddr *a)
{
    return is_all_zero(a->bytes, sizeof a->bytes);
}

bool netaddr_is_link_local(const struct netaddr *a)
{
    if (a->family == AF_INET)
        return a->bytes[0] == 169 && a->bytes[1] == 254;
    return a->bytes[0] == 0xfe && (a->bytes[1] & 0xc0) == 0x80;
}

bool netaddr_equal(const struct netaddr *a, const struct netaddr *b)
{
    return a->family == b->family && memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0 &&
           a->has_port == b->has_port && a->port == b->port &&
           strcmp(a->interface, b->interface) == 0;
}

/* --- the system's form ------------------------------------------------------------------------ */

static int ipv6_sockaddr(const struct netaddr *a, struct sockaddr_in6 *ret, struct err *e)
{
    char text[NETADDR_TEXT_BYTES];
    *ret = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(a->port)};
    memcpy(&ret->sin6_addr, a->bytes, 16);
    netaddr_format(a, text);
    if (a->interface[0] == '\0')
        return netaddr_is_link_local(a)
                   ? err_set(e, RS_EINVAL,
                             "address '%s' is link-local: add its interface, like fe80::1%%eth0",
                             text)
                   : 0;
    ret->sin6_scope_id = if_nametoindex(a->interface);
    if (ret->sin6_scope_id == 0)
        return err_set(e, RS_ENOTFOUND, "address '%s': there is no interface '%s' here", text,
                       a->interface);
    return 0;
}

int netaddr_sockaddr(const struct netaddr *a, struct sockaddr_storage *ret, socklen_t *ret_n,
                     struct err *e)
{
    struct sockaddr_storage s = {0};
    socklen_t n = a->family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    if (a->family == AF_INET) {
        struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(a->port)};
        memcpy(&in.sin_addr, a->bytes, 4);
        memcpy(&s, &in, sizeof in);
    } else {
        struct sockaddr_in6 in6;
        int r = ipv6_sockaddr(a, &in6, e);
        if (r != 0)
            return r;
        memcpy(&s, &in6, sizeof in6);
    }
    *ret = s;
    *ret_n = n;
    return 0;
}

int netaddr_from_sockaddr(const struct sockaddr *sa, struct netaddr *ret)
{
    struct netaddr a = {.family = sa->sa_family, .has_port = true};
    if (sa->sa_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, sa, sizeof in);
        memcpy(a.bytes, &in.sin_addr, 4);
        a.port = ntohs(in.sin_port);
    } else if (sa->sa_family == AF_INET6) {
        struct sockaddr_in6 in6;
        memcpy(&in6, sa, sizeof in6);
        memcpy(a.bytes, &in6.sin6_addr, 16);
        a.port = ntohs(in6.sin6_port);
        if (in6.sin6_scope_id == 0 || if_indextoname(in6.sin6_scope_id, a.interface) == NULL)
            a.interface[0] = '\0';
        undress_ipv4(&a);
    } else {
        return RS_EINVAL;
    }
    *ret = a;
    return 0;
}
