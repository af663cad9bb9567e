/* The ledger's rows at a start: layouts, models, versions, drained nodes. Private to service/. */
#ifndef RS_SERVICE_RESTORE_H
#define RS_SERVICE_RESTORE_H

#include "base/err.h"

struct service;

/* Before the loop runs. RS_EDISK: a row makes no sense; the text says which. */
int restore(struct service *s, struct err *e);

#endif
