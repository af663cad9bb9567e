/* Which devices of this node exchange their messages by device copies (transport_local.h), and which by
 * the transport that reaches other nodes. Decided once, at HELLO; loop thread. */
#ifndef RS_EXEC_PAIRS_H
#define RS_EXEC_PAIRS_H

#include "exec/plane.h"

/* Fills in plane.reached and plane.copied from the devices and plane.hello. */
void pairs_decide(struct plane *p);
/* Whatever a device writes itself into another one's memory (fan-out, copies) it reaches. RS_EPRECOND names
 * the two. */
int pairs_check(const struct attempt *a, struct err *e);
/* Local devices a and b; the same one, too. */
static inline bool pairs_copied(const struct plane *p, uint32_t a, uint32_t b)
{
    return (p->copied[a] >> b & 1) != 0;
}
/* In words, for log and status; "" where there is one device. */
void pairs_text(const struct plane *p, char *ret, size_t capacity);

#endif
