/* The only crossing between threads: any thread posts an item, the owner takes all of them at once.
 *
 * The item embeds struct mailbox_item and belongs to whoever last took it. Waking the owner is the
 * caller's function (uv_async_send in the control process, an eventfd in the data plane), called
 * under the lock, so that after mailbox_shut returns no wake can start (libuv/libuv#4922). */
#ifndef RS_BASE_MAILBOX_H
#define RS_BASE_MAILBOX_H

#include <pthread.h>
#include <stdbool.h>

#include "base/queue.h"

struct mailbox_item {
    struct queue link;
    void (*fn)(struct mailbox_item *); /* called on the owner's thread by mailbox_drain */
};

struct mailbox {
    pthread_mutex_t mutex;
    struct queue items;
    void (*wake)(void *arg);
    void *arg;
    bool shut;
};

void mailbox_init(struct mailbox *m, void (*wake)(void *arg), void *arg);
/* Any thread. Takes the item until it is drained. False after mailbox_shut: the item stays the
 * caller's. */
bool mailbox_post(struct mailbox *m, struct mailbox_item *item);
/* Owner's thread: runs fn of all items posted so far. Returns how many. */
unsigned mailbox_drain(struct mailbox *m);
/* Owner's thread: no post succeeds and no wake starts after it returns; what was posted can still
 * be drained. */
void mailbox_shut(struct mailbox *m);
void mailbox_close(struct mailbox *m);

#endif
