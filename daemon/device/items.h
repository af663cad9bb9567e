/* Work in order: a queue of items and the thread that runs them, which is what a stream of either
 * device is.
 *
 * An item is one allocation: what to do, and a packed copy of its arguments. Any thread pushes; the
 * thread runs each item outside the queue's lock. Private to device/. */
#ifndef RS_DEVICE_ITEMS_H
#define RS_DEVICE_ITEMS_H

#include <pthread.h>

#include "base/queue.h"
#include "device/device.h"

enum {
    ITEMS_NAME_BYTES = 16,       /* of Linux, with the NUL */
    ITEMS_MAX_BYTES = 256 << 20, /* queued: bounds what a runaway caller can make us hold */
};

struct items {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t filled;
    struct queue list;
    size_t queued_bytes; /* with the item that runs */
    bool stopping;
    char name[ITEMS_NAME_BYTES];
};

struct item;
/* Runs on the stream's thread. */
typedef void item_run(struct device_stream *s, struct item *item);

struct item {
    struct queue link;
    item_run *run;
    size_t bytes; /* of this allocation */
    void (*fn)(void *arg);
    void *arg; /* of fn; memory to fill */
    struct device_event *event;
    uint64_t number; /* the event's record; bytes to fill */
    uint32_t n;      /* entries in payload */
    uint64_t payload[];
};

/* Each NULL when memory is out. The arguments are copied. */
struct item *item_new(item_run *run);
struct item *item_call(item_run *run, void (*fn)(void *arg), void *arg);
struct item *item_fill(item_run *run, void *p, size_t bytes);
/* Packed (packed.h). */
struct item *item_copies(item_run *run, const struct kernel_copy *copies, uint32_t n);
struct item *item_fingerprints(item_run *run, const struct kernel_fingerprint *f, uint32_t n);
/* `n` entries as they are. */
struct item *item_entries(item_run *run, const void *entries, uint32_t n, size_t entry_bytes);

void items_init(struct items *q, const char *kind, uint32_t local, const char *name);
/* Nothing is queued, and the thread, if it was started, has been stopped. */
void items_close(struct items *q);
/* Takes the item, also on failure. RS_ENOMEM: it is NULL, or too much is queued. */
int items_push(struct items *q, struct item *item);
/* The thread's: blocks for the next item; NULL: the queue is empty and it is to end. */
struct item *items_next(struct items *q);
/* The thread's, when it has run: frees it. */
void items_done(struct items *q, struct item *item);
/* With all signals blocked: they are the main thread's. errno's code. */
int items_start(struct items *q, void *(*thread)(void *arg), void *arg);
/* Waits for the thread, which runs what is queued first. */
void items_stop(struct items *q);

#endif
