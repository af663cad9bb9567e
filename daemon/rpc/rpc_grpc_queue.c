/* Tags: from gRPC's completion queues to the loop. */
#include <sched.h>

#include "rpc/rpc_grpc_inner.h"

#include "base/banned.h"

/* Tags that the loop takes in a row before its other work. */
#define TAGS_PER_WAKE 256

/* Times that the loop looks again, after letting others run, before it wakes the thread to wait: a busy client has
 * answered by then, and two switches between threads are saved. */
#define LOOKS_AGAIN 2

void *rpc_grpc_wait(void *arg)
{
    struct rpc_server *s = arg;
    for (;;) {
        grpc_event e = grpc_completion_queue_next(s->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN)
            break;
        atomic_store(&s->rests, true);
        (void)mailbox_post(&s->mailbox, &tag_of(&e)->item);
        while (sem_wait(&s->queue_is_dry) != 0)
            ; /* interrupted */
    }
    (void)mailbox_post(&s->mailbox, &s->thread_ended);
    return NULL;
}

void *rpc_grpc_wait_streams(void *arg)
{
    struct rpc_server *s = arg;
    for (;;) {
        grpc_event e =
            grpc_completion_queue_next(s->stream_cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN)
            break;
        (void)mailbox_post(&s->mailbox, &tag_of(&e)->item);
    }
    (void)mailbox_post(&s->mailbox, &s->stream_thread_ended);
    return NULL;
}

void rpc_grpc_wake(void *arg)
{
    struct rpc_server *s = arg;
    (void)uv_async_send(&s->async);
}

/* The thread rests: the queue is the loop's, until it is dry. */
static void drain_queue(struct rpc_server *s)
{
    int looks = 0;
    for (int i = 0; i < TAGS_PER_WAKE; i++) {
        grpc_event e = grpc_completion_queue_next(s->cq, gpr_inf_past(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_OP_COMPLETE) {
            looks = LOOKS_AGAIN;
            tag_run(&tag_of(&e)->item);
            continue;
        }
        if (looks-- > 0) {
            (void)sched_yield();
            continue;
        }
        s->draining = false;
        (void)sem_post(&s->queue_is_dry);
        return;
    }
    (void)uv_async_send(&s->async); /* the loop's other work first */
}

void rpc_grpc_on_async(uv_async_t *async)
{
    struct rpc_server *s = async->data;
    (void)mailbox_drain(&s->mailbox);
    if (atomic_exchange(&s->rests, false))
        s->draining = true;
    if (s->draining)
        drain_queue(s);
}
