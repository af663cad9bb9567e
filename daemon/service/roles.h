/* Who may do what: [roles] of the settings against the identity of a call. Pure.
 *
 *   trainer     attach as a source, Publish, Submit, Mark         operator   Admin but Status
 *   inference   attach as a destination, Ready, Accept, Apply, Mark     any   what reads, PutLayout
 *
 * A local client has every role, unless some role names a uid:N: then those that name its own. A client with a certificate
 * has the roles that name it. A caller without either may only read; Versions and Timeline too as long as nobody is named an
 * operator. */
#ifndef RS_SERVICE_ROLES_H
#define RS_SERVICE_ROLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "rpc/rpc.h"
#include "service/config.h"

enum role { ROLE_TRAINER = 1, ROLE_INFERENCE = 2, ROLE_OPERATOR = 4 };

/* Bits of enum role. */
unsigned roles_of(const struct config *c, const struct rpc_identity *who);
/* 0, or RS_EPERM with the role that is needed and what the caller has. Methods that are not known need nothing. What needs a
 * token is refused elsewhere to who has none. */
int roles_check(const struct config *c, const struct rpc_identity *who, const char *path,
                struct err *e);
/* The same for an Attach, once its side is known: source or destination. */
int roles_check_side(const struct config *c, const struct rpc_identity *who, bool source,
                     struct err *e);
/* AttachRequest.hello.side of a packed message, unchecked; 0: it has none, which the decoder behind refuses. */
uint64_t roles_hello_side(const void *data, size_t n_bytes);
/* Whether a method is for callers that said who they are only. */
bool roles_identified(const char *path);
/* [roles] in words: RS_EINVAL for an entry that is neither uid:N nor a certificate's name. */
int roles_config_check(const struct config *c, struct err *e);

#endif
