/* Whom a version waits for, in one line: ranks of a layout that are waited for with the same reason are said together. Pure. */
#ifndef RS_CLIENT_CTL_WAITING_H
#define RS_CLIENT_CTL_WAITING_H

struct buf;
struct json_t; /* jansson's */

/* Appends "; waiting for train/ranks 0-3,6 (has not published this version), …" for RefitState's waiting_for (an array of texts,
 * NULL is fine); nothing where nobody is waited for. After 8 reasons the rest is counted. */
void waiting_put(struct buf *to, const struct json_t *waiting_for);

#endif
