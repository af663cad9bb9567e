/* Feeds one stream chunk by chunk, with a few chunks in flight, so that abort, lease and progress
 * act between chunks and nothing is ever enqueued that could not be waited for.
 *
 * Loop thread only. `fill` enqueues one chunk; a ticket follows it through the stream and comes
 * back by the mailbox. */
#ifndef RS_EXEC_PUMP_H
#define RS_EXEC_PUMP_H

#include "exec/plane.h"

enum { PUMP_DEPTH = 3 };

struct pump;

struct pump_ticket {
    struct mailbox_item item;
    struct pump *pump;
    bool busy;
    uint64_t end;   /* the filler's: how far it had come */
    uint64_t bytes; /* the filler's */
};

struct pump {
    struct plane *plane;
    struct plane_device *device;
    struct device_stream **stream; /* a stream may be replaced: plane_settle */
    /* 1: a chunk was enqueued; 0: nothing (more) to do now; RS_E…. */
    int (*fill)(struct pump *p, struct pump_ticket *t);
    void (*landed)(struct pump *p, const struct pump_ticket *t);
    /* After each time the pump ran dry, failed or was stopped, with nothing in flight. */
    void (*idle)(struct pump *p);
    struct pump_ticket tickets[PUMP_DEPTH];
    uint32_t n_busy;
    int status; /* the first error */
    bool stopped;
};

void pump_init(struct pump *p, struct plane *plane, struct plane_device *device,
               struct device_stream **stream);
/* Enqueues as much as there is room for; calls idle, as its last act, where nothing is in flight.
 */
void pump_run(struct pump *p);
/* No more chunks. Returns true where nothing is in flight; else idle follows. */
bool pump_stop(struct pump *p);

#endif
