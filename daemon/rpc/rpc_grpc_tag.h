/* A tag of gRPC C core that comes back as a mailbox item: embedded in what it is about, which lives until then. Of the server
 * and of the link (rpc_grpc_*.c), each with queues and threads of its own. */
#ifndef RS_RPC_RPC_GRPC_TAG_H
#define RS_RPC_RPC_GRPC_TAG_H

#include <stdbool.h>

#include <grpc/grpc.h>

#include "base/mailbox.h"

/* The hand-over through gRPC is invisible to the thread sanitizer, since gRPC is not built with it. */
#if defined(__SANITIZE_THREAD__)
void __tsan_acquire(void *p);
void __tsan_release(void *p);
#define hand_over(p) __tsan_release(p)
#define take_over(p) __tsan_acquire(p)
#else
#define hand_over(p) ((void)(p))
#define take_over(p) ((void)(p))
#endif

struct tag {
    struct mailbox_item item;
    void (*fn)(struct tag *tag, bool ok); /* on the loop thread */
    bool ok;
};

static inline void tag_run(struct mailbox_item *item)
{
    struct tag *t = container_of(item, struct tag, item);
    t->fn(t, t->ok);
}

static inline void tag_init(struct tag *t, void (*fn)(struct tag *tag, bool ok))
{
    *t = (struct tag){.item = {.fn = tag_run}, .fn = fn};
    queue_init(&t->item.link);
}

/* The tag of what a completion queue gave, on the thread that took it. */
static inline struct tag *tag_of(const grpc_event *e)
{
    struct tag *t = e->tag;
    take_over(t);
    t->ok = e->success != 0;
    return t;
}

#endif
