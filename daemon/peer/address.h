/* Numeric addresses of nodes, as settings and JOIN carry them: parsed, compared, looked for on this machine.
 *
 * "192.0.2.1:7000", "[2001:db8::1]:7000", "[fe80::1%eth0]:7000"; without a port "192.0.2.1", "fe80::1%eth0". Host names
 * are not looked up: a cluster must not depend on a resolver. Thread: any. */
#ifndef RS_PEER_ADDRESS_H
#define RS_PEER_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/err.h"
#include "peer/message.h"

enum address_family { ADDRESS_V4 = 4, ADDRESS_V6 = 6 };

struct address {
    enum address_family family;
    char host[NODE_ADDRESS_BYTES];  /* numeric, canonical, with its scope: "fe80::1%eth0" */
    uint16_t port;                  /* 0: none */
    bool loopback, link_local, any; /* any: 0.0.0.0 or :: */
};

/* RS_EINVAL says what is wrong with it. with_port: a port of 1 … 65535 must be there; else none may be. */
int address_parse(const char *text, bool with_port, struct address *ret, struct err *e);
/* "10.0.0.1:7070", "[fd00::1]:7070"; returns ret_text. */
char *address_text(const struct address *a, char *ret_text, size_t capacity);
/* For connect and bind. RS_EINVAL: its scope is no interface here. */
int address_socket(const struct address *a, struct sockaddr_storage *ret, socklen_t *ret_bytes,
                   struct err *e);
/* Whether this machine has it: RS_ENOTFOUND where a socket can't be bound to it. */
int address_is_here(const struct address *a, struct err *e);

/* One address of one interface, and the choice among them. */
struct address_interface {
    char name[16];
    struct address address;
};
/* The first of interface `name`: of `family` where there is one, link-local ones last. RS_ENOTFOUND names the
 * interfaces that there are. Pure. */
int address_choose(const struct address_interface *list, size_t n, const char *name,
                   enum address_family family, struct address *ret, struct err *e);
/* The same over this machine's interfaces. */
int address_of_interface(const char *name, enum address_family family, struct address *ret,
                         struct err *e);

#endif
