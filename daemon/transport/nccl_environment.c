/* What NCCL reads of its environment, before it does: which of the machine's interfaces it may use. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/interface.h"
#include "base/log.h"
#include "base/mem.h"
#include "transport/transport_nccl.h"

#include "base/banned.h"

/* One word of a list: a prefix, or with `exact` the name; "eth0:7000" has a port. */
static bool word_matches(const char *word, size_t n, bool exact, const char *name)
{
    const char *port = memchr(word, ':', n);
    if (port != NULL)
        n = (size_t)(port - word);
    return strncmp(word, name, n) == 0 && (!exact || name[n] == '\0');
}

bool transport_nccl_interface_matches(const char *list, const char *name)
{
    bool out = list[0] == '^', found = false;
    list += out;
    bool exact = list[0] == '=';
    for (const char *w = list + exact; *w != '\0' && !found;) {
        size_t n = strcspn(w, ",");
        found = n > 0 && word_matches(w, n, exact, name);
        w += n + (w[n] == ',');
    }
    return found != out;
}

/* "lo, eth0": each once. */
static void names(const struct interface *list, size_t n, char *ret, size_t capacity)
{
    size_t at = 0;
    ret[0] = '\0';
    for (size_t i = 0; i < n && at < capacity; i++) {
        bool told = false;
        for (size_t k = 0; k < i; k++)
            told = told || strcmp(list[k].name, list[i].name) == 0;
        int k =
            told ? 0 : snprintf(ret + at, capacity - at, "%s%s", at > 0 ? ", " : "", list[i].name);
        at += k > 0 ? (size_t)k : 0;
    }
}

static int check_operators(const char *said, const struct interface *list, size_t n, struct err *e)
{
    char text[256];
    for (size_t i = 0; i < n; i++)
        if (transport_nccl_interface_matches(said, list[i].name))
            return 0;
    names(list, n, text, sizeof text);
    return err_set(
        e, RS_ENOTFOUND,
        "NCCL_SOCKET_IFNAME=%s matches no interface of this machine (%s): correct it, or "
        "unset it and set data_address",
        said, text);
}

/* Of IPv4's loopback, all of 127.0.0.0/8 is the machine's, though only 127.0.0.1 is listed. */
static bool has_address(const struct interface *i, const struct netaddr *a)
{
    if (i->address.family != a->family)
        return false;
    return memcmp(i->address.bytes, a->bytes, sizeof a->bytes) == 0 ||
           (a->family == AF_INET && a->bytes[0] == 127 && i->address.bytes[0] == 127);
}

static int set_by_address(const char *address, const struct interface *list, size_t n,
                          struct err *e)
{
    struct netaddr a;
    char value[IF_NAMESIZE + 1], text[256];
    int r = netaddr_parse(address, NETADDR_NO_PORT, &a, e);
    if (r != 0)
        return err_prefix(e, r, "NCCL: data_address");
    for (size_t i = 0; i < n; i++) {
        if (!has_address(&list[i], &a))
            continue;
        (void)snprintf(value, sizeof value, "=%s", list[i].name);
        if (setenv("NCCL_SOCKET_IFNAME", value, 1) != 0 ||
            setenv("NCCL_SOCKET_FAMILY", a.family == AF_INET6 ? "AF_INET6" : "AF_INET", 0) != 0)
            return err_set(e, RS_ENOMEM, "NCCL: out of memory for the environment");
        log_debug("NCCL: interface %s, which has the data address %s", list[i].name, address);
        return 0;
    }
    names(list, n, text, sizeof text);
    return err_set(e, RS_ENOTFOUND, "NCCL: data_address %s is on no interface of this machine (%s)",
                   address, text);
}

int transport_nccl_environment(const char *address, struct err *e)
{
    struct interface *list;
    size_t n;
    const char *said = getenv("NCCL_SOCKET_IFNAME"), *fixed = getenv("NCCL_COMM_ID");
    if (fixed != NULL && fixed[0] != '\0')
        return err_set(e, RS_EPRECOND,
                       "NCCL_COMM_ID=%s is set: all communicators would have one id and one port; "
                       "unset it",
                       fixed);
    const char *blocking = getenv("NCCL_COMM_BLOCKING");
    if (blocking != NULL && blocking[0] != '\0' && strcmp(blocking, "0") != 0)
        return err_set(
            e, RS_EPRECOND,
            "NCCL_COMM_BLOCKING=%s is set: calls of NCCL would wait without a deadline; unset it",
            blocking);
    int r = interface_list(&list, &n, e);
    if (r != 0)
        return err_prefix(e, r, "NCCL: this machine's interfaces");
    if (said != NULL && said[0] != '\0')
        r = check_operators(said, list, n, e);
    else if (address[0] != '\0')
        r = set_by_address(address, list, n, e);
    mem_free(list);
    return r;
}
