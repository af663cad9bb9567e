#include "peer/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

#include "base/banned.h"

/* --- text ---------------------------------------------------------------------------------------- */

static int port_parse(const char *text, uint16_t *ret)
{
    unsigned v = 0;
    size_t n = strlen(text);
    if (n == 0 || n > 5 || strspn(text, "0123456789") != n)
        return RS_EINVAL;
    for (size_t i = 0; i < n; i++)
        v = v * 10 + (unsigned)(text[i] - '0');
    if (v == 0 || v > 65535)
        return RS_EINVAL;
    *ret = (uint16_t)v;
    return 0;
}

static int v4_parse(const char *host, struct address *ret)
{
    struct in_addr in;
    if (inet_pton(AF_INET, host, &in) != 1)
        return RS_EINVAL;
    ret->family = ADDRESS_V4;
    ret->loopback = ntohl(in.s_addr) >> 24 == 127;
    ret->link_local = ntohl(in.s_addr) >> 16 == 0xA9FE;
    ret->any = in.s_addr == 0;
    return inet_ntop(AF_INET, &in, ret->host, sizeof ret->host) != NULL ? 0 : RS_EINVAL;
}

static int v6_parse(const char *host, struct address *ret)
{
    char bare[INET6_ADDRSTRLEN];
    struct in6_addr in;
    const char *scope = strchr(host, '%');
    size_t n = scope != NULL ? (size_t)(scope - host) : strlen(host);
    if (n >= sizeof bare ||
        (scope != NULL && (scope[1] == '\0' || strlen(scope + 1) >= IF_NAMESIZE ||
                           strpbrk(scope + 1, "%/[] \t") != NULL)))
        return RS_EINVAL;
    memcpy(bare, host, n);
    bare[n] = '\0';
    if (inet_pton(AF_INET6, bare, &in) != 1)
        return RS_EINVAL;
    ret->family = ADDRESS_V6;
    ret->loopback = IN6_IS_ADDR_LOOPBACK(&in);
    ret->link_local = IN6_IS_ADDR_LINKLOCAL(&in);
    ret->any = IN6_IS_ADDR_UNSPECIFIED(&in);
    (void)inet_ntop(AF_INET6, &in, bare, sizeof bare);
    (void)snprintf(ret->host, sizeof ret->host, "%s%s", bare, scope != NULL ? scope : "");
    return 0;
}

/* Splits "host:port" or "[host]:port"; more than one colon outside brackets is ambiguous. */
static int split(const char *text, char *ret_host, size_t capacity, const char **ret_port,
                 struct err *e)
{
    const char *host = text, *end = strchr(text, ':');
    *ret_port = NULL;
    if (text[0] == '[') {
        host = text + 1;
        end = strchr(host, ']');
        if (end == NULL || end[1] != ':')
            return err_set(e, RS_EINVAL, "'%.80s': write [address]:port", text);
        *ret_port = end + 2;
    } else if (end == NULL) {
        return err_set(e, RS_EINVAL, "'%.80s' has no port; write address:port", text);
    } else if (strchr(end + 1, ':') != NULL) {
        return err_set(e, RS_EINVAL, "'%.80s' is ambiguous; write [address]:port for IPv6", text);
    } else {
        *ret_port = end + 1;
    }
    size_t n = (size_t)(end - host);
    if (n >= capacity)
        return err_set(e, RS_EINVAL, "'%.80s' is no numeric address", text);
    memcpy(ret_host, host, n);
    ret_host[n] = '\0';
    return 0;
}

int address_parse(const char *text, bool with_port, struct address *ret, struct err *e)
{
    struct address a = {0};
    char host[NODE_ADDRESS_BYTES];
    const char *port = NULL;
    if (with_port) {
        int r = split(text, host, sizeof host, &port, e);
        if (r != 0)
            return r;
        if (port_parse(port, &a.port) != 0)
            return err_set(e, RS_EINVAL, "'%.80s': port '%.40s' is not within 1 … 65535", text,
                           port);
    } else if (strlen(text) >= sizeof host) {
        return err_set(e, RS_EINVAL, "'%.80s' is no numeric address", text);
    } else {
        (void)snprintf(host, sizeof host, "%s", text);
    }
    bool v6 = with_port ? text[0] == '[' : strchr(host, ':') != NULL;
    if ((v6 ? v6_parse(host, &a) : v4_parse(host, &a)) != 0)
        return err_set(e, RS_EINVAL,
                       "'%.80s' is no numeric address such as 10.0.0.1%s or %sfd00::1%s", text,
                       with_port ? ":7070" : "", with_port ? "[" : "", with_port ? "]:7070" : "");
    *ret = a;
    return 0;
}

char *address_text(const struct address *a, char *ret_text, size_t capacity)
{
    bool v6 = a->family == ADDRESS_V6 && a->port != 0;
    if (a->port == 0)
        (void)snprintf(ret_text, capacity, "%s", a->host);
    else
        (void)snprintf(ret_text, capacity, "%s%s%s:%u", v6 ? "[" : "", a->host, v6 ? "]" : "",
                       a->port);
    return ret_text;
}

/* --- sockets ------------------------------------------------------------------------------------- */

int address_socket(const struct address *a, struct sockaddr_storage *ret, socklen_t *ret_bytes,
                   struct err *e)
{
    memset(ret, 0, sizeof *ret);
    if (a->family == ADDRESS_V4) {
        struct sockaddr_in *in = (struct sockaddr_in *)ret;
        in->sin_family = AF_INET;
        in->sin_port = htons(a->port);
        *ret_bytes = sizeof *in;
        return inet_pton(AF_INET, a->host, &in->sin_addr) == 1 ? 0 : RS_EINTERNAL;
    }
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)ret;
    char bare[NODE_ADDRESS_BYTES];
    (void)snprintf(bare, sizeof bare, "%s", a->host);
    char *scope = strchr(bare, '%');
    if (scope != NULL) {
        *scope = '\0';
        in6->sin6_scope_id = if_nametoindex(scope + 1);
        if (in6->sin6_scope_id == 0)
            return err_set(e, RS_EINVAL, "%s: this machine has no interface %s", a->host,
                           scope + 1);
    }
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(a->port);
    *ret_bytes = sizeof *in6;
    return inet_pton(AF_INET6, bare, &in6->sin6_addr) == 1 ? 0 : RS_EINTERNAL;
}

int address_is_here(const struct address *a, struct err *e)
{
    struct address any_port = *a;
    struct sockaddr_storage s;
    socklen_t n;
    any_port.port = 0;
    int r = address_socket(&any_port, &s, &n, e);
    if (r != 0)
        return r;
    int fd = socket(s.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return err_set(e, err_from_errno(errno), "%s: no socket: %s", a->host, strerror(errno));
    if (bind(fd, (struct sockaddr *)&s, n) != 0)
        r = errno == EADDRNOTAVAIL
                ? err_set(e, RS_ENOTFOUND, "this machine does not have the address %s", a->host)
                : err_set(e, err_from_errno(errno), "address %s can't be used here: %s", a->host,
                          strerror(errno));
    (void)close(fd);
    return r;
}

/* --- interfaces ---------------------------------------------------------------------------------- */

/* "lo, eth0": each once, in the order of the list. */
static void interface_names(const struct address_interface *list, size_t n, char *ret,
                            size_t capacity)
{
    size_t at = 0;
    ret[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        bool again = false;
        for (size_t j = 0; j < i; j++)
            again = again || strcmp(list[j].name, list[i].name) == 0;
        if (again || at + sizeof list[i].name + 2 >= capacity)
            continue;
        at += (size_t)snprintf(ret + at, capacity - at, "%s%s", at > 0 ? ", " : "", list[i].name);
    }
}

/* Greater is better; 0: not of that interface. */
static int interface_fit(const struct address_interface *i, const char *name,
                         enum address_family family)
{
    if (strcmp(i->name, name) != 0)
        return 0;
    return 1 + (i->address.family == family ? 2 : 0) + (i->address.link_local ? 0 : 1);
}

int address_choose(const struct address_interface *list, size_t n, const char *name,
                   enum address_family family, struct address *ret, struct err *e)
{
    char names[256];
    const struct address_interface *best = NULL;
    for (size_t i = 0; i < n; i++)
        if (interface_fit(&list[i], name, family) >
            (best != NULL ? interface_fit(best, name, family) : 0))
            best = &list[i];
    if (best != NULL) {
        *ret = best->address;
        return 0;
    }
    interface_names(list, n, names, sizeof names);
    return err_set(e, RS_ENOTFOUND,
                   "'%.40s' is neither a numeric address nor an interface that is up and has an "
                   "address; there are %s",
                   name, names[0] != '\0' ? names : "none");
}

static bool interface_take(const struct ifaddrs *i, struct address_interface *ret)
{
    char host[NODE_ADDRESS_BYTES], bare[INET6_ADDRSTRLEN];
    struct err e = {0};
    if (i->ifa_addr == NULL || (i->ifa_flags & IFF_UP) == 0 ||
        strlen(i->ifa_name) >= sizeof ret->name)
        return false;
    if (i->ifa_addr->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)i->ifa_addr;
        (void)inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
    } else if (i->ifa_addr->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)(const void *)i->ifa_addr;
        (void)inet_ntop(AF_INET6, &in6->sin6_addr, bare, sizeof bare);
        (void)snprintf(host, sizeof host, "%s%s%s", bare,
                       IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr) ? "%" : "",
                       IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr) ? i->ifa_name : "");
    } else {
        return false;
    }
    (void)snprintf(ret->name, sizeof ret->name, "%s", i->ifa_name);
    return address_parse(host, false, &ret->address, &e) == 0;
}

int address_of_interface(const char *name, enum address_family family, struct address *ret,
                         struct err *e)
{
    struct ifaddrs *all = NULL;
    size_t n = 0, most = 0;
    if (getifaddrs(&all) != 0)
        return err_set(e, err_from_errno(errno), "interfaces can't be listed: %s", strerror(errno));
    for (struct ifaddrs *i = all; i != NULL; i = i->ifa_next)
        most++;
    struct address_interface *list = mem_calloc(most, sizeof *list);
    for (struct ifaddrs *i = all; list != NULL && i != NULL; i = i->ifa_next)
        if (interface_take(i, &list[n]))
            n++;
    int r = list == NULL ? err_set(e, RS_ENOMEM, "no memory for the list of interfaces")
                         : address_choose(list, n, name, family, ret, e);
    mem_free(list);
    freeifaddrs(all);
    return r;
}
