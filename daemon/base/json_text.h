/* Writing JSON text: the one place that knows how a string is escaped. */
#ifndef RS_BASE_JSON_TEXT_H
#define RS_BASE_JSON_TEXT_H

#include "base/buf.h"

/* Appends s as a JSON string with its quotes. What is not UTF-8 in it becomes U+FFFD. */
void json_put_string(struct buf *b, const char *s);

#endif
