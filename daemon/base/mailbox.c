#include "base/mailbox.h"

#include "base/err.h"

#include "base/banned.h"

void mailbox_init(struct mailbox *m, void (*wake)(void *arg), void *arg)
{
    rs_assert(pthread_mutex_init(&m->mutex, NULL) == 0);
    queue_init(&m->items);
    m->wake = wake;
    m->arg = arg;
    m->shut = false;
}

bool mailbox_post(struct mailbox *m, struct mailbox_item *item)
{
    (void)pthread_mutex_lock(&m->mutex);
    bool open = !m->shut;
    if (open) {
        bool was_empty = queue_empty(&m->items);
        queue_push(&m->items, &item->link);
        if (was_empty)
            m->wake(m->arg);
    }
    (void)pthread_mutex_unlock(&m->mutex);
    return open;
}

unsigned mailbox_drain(struct mailbox *m)
{
    struct queue taken;
    unsigned n = 0;
    queue_init(&taken);
    (void)pthread_mutex_lock(&m->mutex);
    queue_move(&m->items, &taken);
    (void)pthread_mutex_unlock(&m->mutex);
    for (struct queue *q = queue_pop(&taken); q != NULL; q = queue_pop(&taken), n++) {
        struct mailbox_item *item = container_of(q, struct mailbox_item, link);
        item->fn(item);
    }
    return n;
}

void mailbox_shut(struct mailbox *m)
{
    (void)pthread_mutex_lock(&m->mutex);
    m->shut = true;
    (void)pthread_mutex_unlock(&m->mutex);
}

void mailbox_close(struct mailbox *m)
{
    (void)pthread_mutex_destroy(&m->mutex);
}
