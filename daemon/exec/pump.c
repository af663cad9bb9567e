#include "exec/pump.h"

#include "base/banned.h"

static void ticket_landed(struct mailbox_item *item)
{
    struct pump_ticket *t = container_of(item, struct pump_ticket, item);
    struct pump *p = t->pump;
    int r = device_error(p->device->device, NULL);
    if (r != 0 && p->status == 0)
        p->status = r;
    t->busy = false;
    p->n_busy--;
    if (p->status == 0)
        p->landed(p, t);
    pump_run(p);
}

/* On the stream's thread. */
static void ticket_post(void *arg)
{
    struct pump_ticket *t = arg;
    (void)mailbox_post(&t->pump->plane->mailbox, &t->item);
}

void pump_init(struct pump *p, struct plane *plane, struct plane_device *device,
               struct device_stream **stream)
{
    p->plane = plane;
    p->device = device;
    p->stream = stream;
    for (int i = 0; i < PUMP_DEPTH; i++) {
        queue_init(&p->tickets[i].item.link);
        p->tickets[i].item.fn = ticket_landed;
        p->tickets[i].pump = p;
    }
}

static struct pump_ticket *free_ticket(struct pump *p)
{
    for (int i = 0; i < PUMP_DEPTH; i++)
        if (!p->tickets[i].busy)
            return &p->tickets[i];
    return NULL;
}

/* 1: a chunk is on its way. */
static int feed(struct pump *p, struct pump_ticket *t)
{
    int r = p->fill(p, t);
    if (r == 0)
        return 0;
    /* A chunk that failed half enqueued is waited for as well. */
    int called = device_call(*p->stream, ticket_post, t);
    if (called != 0) {
        plane_settle(p->plane, p->device->device, p->stream);
        p->status = r < 0 ? r : called;
        return 0;
    }
    t->busy = true;
    p->n_busy++;
    if (r < 0 && p->status == 0)
        p->status = r;
    return 1;
}

void pump_run(struct pump *p)
{
    struct pump_ticket *t;
    if (p->plane->broken)
        return;
    while (p->status == 0 && !p->stopped && (t = free_ticket(p)) != NULL &&
           plane_lease_holds(p->plane) && feed(p, t) == 1)
        ;
    if (p->n_busy == 0 && !p->plane->broken)
        p->idle(p); /* as the last act: it may free the pump */
}

bool pump_stop(struct pump *p)
{
    p->stopped = true;
    return p->n_busy == 0;
}
