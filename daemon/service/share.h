/* Workers of one refit whose segments are the same memory: a rank that is source and destination, or a mistake. What
 * would write over what another one reads or receives is found before the plan is used. */
#ifndef RS_SERVICE_SHARE_H
#define RS_SERVICE_SHARE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct lease;
struct share_user;

struct share {
    struct share_user *users; /* one per binding of a lease that shares memory */
    uint32_t n_users;         /* 0: nobody shares, and there is nothing to check */
};

/* Copies what the check needs of those leases that share memory with another one of the n. Loop thread. RS_ENOMEM and
 * the like; then the share is closed. */
int share_collect(struct lease *const *leases, size_t n, struct share *ret, struct err *e);
/* RS_EINVAL names tensors, layouts and ranks that overlap. Any thread. */
int share_check(const struct share *s, struct err *e);
void share_close(struct share *s); /* loop thread; an empty one is fine */

#endif
