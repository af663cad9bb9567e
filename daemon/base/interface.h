/* This machine's network interfaces, and which one to use where nobody said. Thread: any. */
#ifndef RS_BASE_INTERFACE_H
#define RS_BASE_INTERFACE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/netaddr.h"

/* One address of one interface; an interface without address has no entry. */
struct interface {
    char name[IF_NAMESIZE];
    struct netaddr address; /* without port */
    bool up;
};

/* All that there are, in the system's order; *ret is the caller's to mem_free. */
int interface_list(struct interface **ret, size_t *ret_n, struct err *e);

/* The one whose address other nodes should use. Pure.
 *
 * name given: that interface, whatever it is; RS_ENOTFOUND names it and those that are there. name NULL:
 * the first that is up, not loopback, not link-local, and not made by containers, bridges or tunnels.
 * family: AF_INET, AF_INET6, or 0: IPv4 before IPv6. alone: there is one node only, so loopback will do
 * where nothing else is; else RS_EPRECOND, naming what was seen and the remedy. */
int interface_choose(const struct interface *list, size_t n, const char *name, int family,
                     bool alone, const struct interface **ret, struct err *e);

#endif
