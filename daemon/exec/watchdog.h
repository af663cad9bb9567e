/* Ends the process where work stays in flight after the lease has run out.
 *
 * A GPU may never finish what it was given, and the loop may hang in a call of its driver with it; by
 * then others take the node for gone (device/fence.h). So this is a thread of its own, which only looks
 * at the clock. The control process starts another data plane. */
#ifndef RS_EXEC_WATCHDOG_H
#define RS_EXEC_WATCHDOG_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/err.h"
#include "device/fence.h"

struct watchdog {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct fence *fence;
    atomic_bool busy;
    bool runs, stop;
};

/* The owner's thread. RS_EEXHAUSTED: no thread could be had. `fence` outlives it. */
int watchdog_start(struct watchdog *w, struct fence *fence, struct err *e);
/* Is anything in flight, or about to be? Nothing where it was not started. */
void watchdog_busy(struct watchdog *w, bool busy);
/* Nothing where it was not started. */
void watchdog_stop(struct watchdog *w);

#endif
