/* Intrusive doubly linked list: the element embeds a struct queue; nothing is allocated.
 *
 * A head is a struct queue too, made by queue_init. An element is in one list at a time. Not
 * thread-safe. */
#ifndef RS_BASE_QUEUE_H
#define RS_BASE_QUEUE_H

#include <stdbool.h>
#include <stddef.h>

struct queue {
    struct queue *next;
    struct queue *prev;
};

/* The struct of `type` whose `member` is at `pointer`. */
#define container_of(pointer, type, member)                                                        \
    ((type *)(void *)((char *)(pointer)-offsetof(type, member)))

#define queue_foreach(var, head)                                                                   \
    for (struct queue *var = (head)->next; var != (head); var = var->next)
/* The body may remove `var`. */
#define queue_foreach_safe(var, tmp, head)                                                         \
    for (struct queue *var = (head)->next, *tmp = var->next; var != (head);                        \
         var = tmp, tmp = tmp->next)

static inline void queue_init(struct queue *q)
{
    q->next = q;
    q->prev = q;
}

static inline bool queue_empty(const struct queue *head)
{
    return head->next == head;
}

static inline void queue_push(struct queue *head, struct queue *q)
{
    q->next = head;
    q->prev = head->prev;
    head->prev->next = q;
    head->prev = q;
}

/* Safe to repeat: a removed element is a list of its own. */
static inline void queue_remove(struct queue *q)
{
    q->prev->next = q->next;
    q->next->prev = q->prev;
    queue_init(q);
}

/* The first element, removed; NULL from an empty list. */
static inline struct queue *queue_pop(struct queue *head)
{
    struct queue *q = head->next;
    if (q == head)
        return NULL;
    queue_remove(q);
    return q;
}

/* Moves all of `from` to the end of `to`. */
static inline void queue_move(struct queue *from, struct queue *to)
{
    if (queue_empty(from))
        return;
    from->next->prev = to->prev;
    to->prev->next = from->next;
    from->prev->next = to;
    to->prev = from->prev;
    queue_init(from);
}

#endif
