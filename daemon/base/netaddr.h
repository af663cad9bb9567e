/* Network addresses as people write them: an IP address of either family, perhaps a port, perhaps an
 * interface. Pure but for netaddr_sockaddr. No names are resolved. Thread: any. */
#ifndef RS_BASE_NETADDR_H
#define RS_BASE_NETADDR_H

#include <net/if.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/err.h"

struct netaddr {
    int family;                  /* AF_INET or AF_INET6 */
    uint8_t bytes[16];           /* network order; the first 4 of AF_INET, the rest 0 */
    bool has_port;               /* the text gave one, 0 included */
    uint16_t port;               /* host order; 0 where has_port is false */
    char interface[IF_NAMESIZE]; /* fe80::1%eth0: "eth0"; else "" */
};

/* Which port a text may or must have. */
enum netaddr_port {
    NETADDR_NO_PORT,       /* "192.0.2.1", "2001:db8::1", "fe80::1%eth0" */
    NETADDR_PORT_OPTIONAL, /* with one, 1 to 65535, or without */
    NETADDR_PORT,          /* "192.0.2.1:7000", "[2001:db8::1]:7000"; 1 to 65535 */
    NETADDR_PORT_OR_ANY    /* as NETADDR_PORT, and 0: the system chooses */
};

/* RS_EINVAL with what is wrong and what would be right. An IPv6 address with a port needs brackets;
 * where a text without them can be read with and without a port ("2001:db8::1:7000") it is refused,
 * not guessed. "localhost" is 127.0.0.1. An IPv4 address in IPv6 dress (::ffff:192.0.2.1) becomes IPv4. */
int netaddr_parse(const char *text, enum netaddr_port port, struct netaddr *ret, struct err *e);

/* The longest: "[…39…%…15…]:65535" and NUL. */
#define NETADDR_TEXT_BYTES 72
/* As netaddr_parse reads it: "192.0.2.1:7000", "[2001:db8::1]:7000", without port "fe80::1%eth0". */
void netaddr_format(const struct netaddr *a, char ret[NETADDR_TEXT_BYTES]);

bool netaddr_is_loopback(const struct netaddr *a);
bool netaddr_is_any(const struct netaddr *a);        /* 0.0.0.0, :: */
bool netaddr_is_link_local(const struct netaddr *a); /* fe80::/10, 169.254.0.0/16 */
bool netaddr_equal(const struct netaddr *a, const struct netaddr *b); /* port and interface too */

/* For bind and connect. RS_ENOTFOUND: its interface is not there; RS_EINVAL: an IPv6 link-local address
 * without interface. Asks the system for the interface's number. */
int netaddr_sockaddr(const struct netaddr *a, struct sockaddr_storage *ret, socklen_t *ret_n,
                     struct err *e);
/* RS_EINVAL: another family. */
int netaddr_from_sockaddr(const struct sockaddr *sa, struct netaddr *ret);

#endif
