#include "base/interface.h"

#include <errno.h>
#include <ifaddrs.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

int interface_list(struct interface **ret, size_t *ret_n, struct err *e)
{
    struct ifaddrs *all = NULL;
    size_t n = 0, capacity = 0;
    if (getifaddrs(&all) != 0)
        return err_set(e, err_from_errno(errno), "network interfaces: %s", strerror(errno));
    for (const struct ifaddrs *i = all; i != NULL; i = i->ifa_next)
        capacity++;
    struct interface *list = mem_calloc(capacity == 0 ? 1 : capacity, sizeof *list);
    for (const struct ifaddrs *i = all; i != NULL && list != NULL; i = i->ifa_next) {
        struct interface *to = &list[n];
        if (i->ifa_addr == NULL || netaddr_from_sockaddr(i->ifa_addr, &to->address) != 0)
            continue;
        to->address.has_port = false;
        to->up = (i->ifa_flags & IFF_UP) != 0;
        (void)snprintf(to->name, sizeof to->name, "%s", i->ifa_name);
        n++;
    }
    freeifaddrs(all);
    if (list == NULL)
        return err_set(e, RS_ENOMEM, "no memory for %zu network interfaces", capacity);
    *ret = list;
    *ret_n = n;
    return 0;
}

/* --- choice ----------------------------------------------------------------------------------- */

/* Made by container engines, hypervisors, bridges and tunnels: other nodes can't reach what is behind
 * them, or reach it by a detour. */
static bool is_made(const char *name)
{
    static const char *const prefixes[] = {
        "docker", "br-",  "veth",      "virbr",  "vnet",        "lxc",    "lxd",     "cni",
        "cali",   "cbr",  "flannel",   "cilium", "podman",      "kube",   "dummy",   "ifb",
        "ip6tnl", "tunl", "gre",       "erspan", "sit",         "ip_vti", "ip6_vti", "tun",
        "tap",    "wg",   "tailscale", "zt",     "nodelocaldns"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    return false;
}

static bool family_fits(const struct interface *i, int family)
{
    return family == 0 || i->address.family == family;
}

static bool is_reachable(const struct interface *i)
{
    return i->up && !netaddr_is_loopback(&i->address) && !netaddr_is_link_local(&i->address) &&
           !is_made(i->name);
}

/* "lo 127.0.0.1, eth0 192.0.2.10": what there is, for the error's text; cut where it is long. */
static void name_all(const struct interface *list, size_t n, char *ret, size_t size)
{
    size_t at = 0;
    ret[0] = '\0';
    for (size_t i = 0; i < n && at < size; i++) {
        char text[NETADDR_TEXT_BYTES];
        netaddr_format(&list[i].address, text);
        at += (size_t)snprintf(ret + at, size - at, "%s%s %s%s", i == 0 ? "" : ", ", list[i].name,
                               text, list[i].up ? "" : " (down)");
    }
}

#define SEEN_BYTES 512

static const struct interface *first(const struct interface *list, size_t n, int family,
                                     bool (*fits)(const struct interface *i))
{
    for (size_t i = 0; i < n; i++)
        if (list[i].address.family == family && fits(&list[i]))
            return &list[i];
    return NULL;
}

static bool is_loopback(const struct interface *i)
{
    return i->up && netaddr_is_loopback(&i->address);
}

/* IPv4 before IPv6. */
static const struct interface *find(const struct interface *list, size_t n, int family,
                                    bool (*fits)(const struct interface *i))
{
    const struct interface *found = NULL;
    if (family != AF_INET6)
        found = first(list, n, AF_INET, fits);
    if (found == NULL && family != AF_INET)
        found = first(list, n, AF_INET6, fits);
    return found;
}

static const char *family_name(int family)
{
    return family == AF_INET ? " IPv4" : family == AF_INET6 ? " IPv6" : "";
}

/* Named: link-local only where it has nothing else. */
static int choose_named(const struct interface *list, size_t n, const char *name, int family,
                        const struct interface **ret, struct err *e)
{
    const struct interface *best = NULL;
    char seen[SEEN_BYTES];
    bool known = false;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i].name, name) != 0)
            continue;
        known = true;
        if (!family_fits(&list[i], family))
            continue;
        bool better = best == NULL || (netaddr_is_link_local(&best->address) &&
                                       !netaddr_is_link_local(&list[i].address));
        if (better)
            best = &list[i];
    }
    if (best != NULL) {
        *ret = best;
        return 0;
    }
    name_all(list, n, seen, sizeof seen);
    if (known)
        return err_set(e, RS_ENOTFOUND, "interface '%s' has no%s address; there are: %s", name,
                       family_name(family), seen);
    return err_set(e, RS_ENOTFOUND, "there is no interface '%s' with an address; there are: %s",
                   name, seen);
}

int interface_choose(const struct interface *list, size_t n, const char *name, int family,
                     bool alone, const struct interface **ret, struct err *e)
{
    char seen[SEEN_BYTES];
    if (name != NULL)
        return choose_named(list, n, name, family, ret, e);
    const struct interface *found = find(list, n, family, is_reachable);
    if (found == NULL && alone)
        found = find(list, n, family, is_loopback);
    if (found != NULL) {
        *ret = found;
        return 0;
    }
    name_all(list, n, seen, sizeof seen);
    return err_set(
        e, RS_EPRECOND,
        "no interface that other nodes could reach: there are: %s; name the interface or "
        "the address to use",
        seen);
}
