/* JSON text: how a string is escaped, and whether a text is small enough to be parsed. */
#ifndef RS_BASE_JSON_TEXT_H
#define RS_BASE_JSON_TEXT_H

#include "base/buf.h"
#include "base/err.h"

/* Appends s as a JSON string with its quotes. What is not UTF-8 in it becomes U+FFFD. */
void json_put_string(struct buf *b, const char *s);

/* Before a text from outside goes to a parser, which spends some fifty bytes on each value:
 * RS_EEXHAUSTED where it has more bytes, more values or deeper nesting than allowed. `what` names
 * it. */
int json_check_size(const char *text, size_t n_bytes, const char *what, size_t max_bytes,
                    size_t max_values, unsigned max_depth, struct err *e);

#endif
