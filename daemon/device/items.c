/* The queue and the thread of a stream. The lock guards the list and its size alone. */
#include "device/items.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/thread.h"
#include "device/packed.h"

#include "base/banned.h"

static struct item *item_with(item_run *run, size_t payload_bytes)
{
    struct item *item = mem_alloc(sizeof *item + payload_bytes);
    if (item == NULL)
        return NULL;
    *item = (struct item){.run = run, .bytes = sizeof *item + payload_bytes};
    return item;
}

struct item *item_new(item_run *run)
{
    return item_with(run, 0);
}

struct item *item_call(item_run *run, void (*fn)(void *arg), void *arg)
{
    struct item *item = item_with(run, 0);
    if (item != NULL) {
        item->fn = fn;
        item->arg = arg;
    }
    return item;
}

struct item *item_fill(item_run *run, void *p, size_t bytes)
{
    struct item *item = item_with(run, 0);
    if (item != NULL) {
        item->arg = p;
        item->number = bytes;
    }
    return item;
}

struct item *item_copies(item_run *run, const struct kernel_copy *copies, uint32_t n)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        rs_assert(copies[i].n_targets <= KERNEL_MAX_TARGETS);
        bytes += packed_bytes(&copies[i]);
    }
    struct item *item = item_with(run, bytes);
    if (item == NULL)
        return NULL;
    item->n = n;
    char *at = (char *)item->payload;
    for (uint32_t i = 0; i < n; i++)
        at = pack_copy(at, &copies[i]);
    return item;
}

struct item *item_fingerprints(item_run *run, const struct kernel_fingerprint *f, uint32_t n)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < n; i++)
        bytes += packed_fingerprint_bytes(&f[i]);
    struct item *item = item_with(run, bytes);
    if (item == NULL)
        return NULL;
    item->n = n;
    char *at = (char *)item->payload;
    for (uint32_t i = 0; i < n; i++)
        at = pack_fingerprint(at, &f[i]);
    return item;
}

struct item *item_entries(item_run *run, const void *entries, uint32_t n, size_t entry_bytes)
{
    struct item *item = item_with(run, n * entry_bytes);
    if (item == NULL)
        return NULL;
    item->n = n;
    memcpy(item->payload, entries, n * entry_bytes);
    return item;
}

void items_init(struct items *q, const char *kind, uint32_t local, const char *name)
{
    *q = (struct items){0};
    queue_init(&q->list);
    (void)pthread_mutex_init(&q->mutex, NULL);
    (void)pthread_cond_init(&q->filled, NULL);
    (void)snprintf(q->name, sizeof q->name, "%s%u %s", kind, local, name);
}

void items_close(struct items *q)
{
    (void)pthread_cond_destroy(&q->filled);
    (void)pthread_mutex_destroy(&q->mutex);
}

int items_push(struct items *q, struct item *item)
{
    if (item == NULL)
        return RS_ENOMEM;
    pthread_mutex_lock(&q->mutex);
    bool fits = item->bytes <= ITEMS_MAX_BYTES - q->queued_bytes;
    if (fits) {
        q->queued_bytes += item->bytes;
        queue_push(&q->list, &item->link);
        pthread_cond_signal(&q->filled);
    }
    pthread_mutex_unlock(&q->mutex);
    if (fits)
        return 0;
    mem_free(item);
    return RS_ENOMEM;
}

struct item *items_next(struct items *q)
{
    pthread_mutex_lock(&q->mutex);
    while (queue_empty(&q->list) && !q->stopping)
        pthread_cond_wait(&q->filled, &q->mutex);
    struct queue *first = queue_pop(&q->list);
    pthread_mutex_unlock(&q->mutex);
    return first == NULL ? NULL : container_of(first, struct item, link);
}

void items_done(struct items *q, struct item *item)
{
    pthread_mutex_lock(&q->mutex);
    q->queued_bytes -= item->bytes;
    pthread_mutex_unlock(&q->mutex);
    mem_free(item);
}

int items_start(struct items *q, void *(*thread)(void *arg), void *arg)
{
    int r = thread_start(&q->thread, thread, arg);
    if (r == 0)
        (void)pthread_setname_np(q->thread, q->name);
    return r;
}

void items_stop(struct items *q)
{
    pthread_mutex_lock(&q->mutex);
    q->stopping = true;
    pthread_cond_signal(&q->filled);
    pthread_mutex_unlock(&q->mutex);
    rs_assert(pthread_join(q->thread, NULL) == 0);
}
