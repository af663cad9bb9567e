/* Ends of messages between devices of a node: how they meet, and the copy between them. */
#include <stdio.h>

#include "base/clock.h"
#include "base/thread.h"
#include "transport/transport_local_private.h"

#include "base/banned.h"

static struct queue *channel_of(struct local *t, const struct end *x)
{
    uint32_t here = x->group->device, peer = x->what->peer;
    size_t at =
        x->what->send ? (size_t)here * t->n_devices + peer : (size_t)peer * t->n_devices + here;
    return &t->channels[at];
}

/* Between the turns of both groups and what comes behind them. *ret_begun: something of it may run. */
static int copy_message(struct local *t, struct end *send, struct end *receive, bool *ret_begun)
{
    struct device_stream *copies = t->ports[send->group->device].copies;
    int r = copies == NULL ? t->why : device_event_wait(copies, send->group->ready);
    if (r == 0)
        r = device_event_wait(copies, receive->group->ready);
    if (r != 0)
        return r;
    *ret_begun = true;
    uint64_t now = clock_mono_ns();
    transport_first_byte(&t->ports[send->group->device].counters, now);
    transport_first_byte(&t->ports[receive->group->device].counters, now);
    r = transport_copy(copies, receive->what, send->what);
    if (r == 0)
        r = device_event_record(send->done, copies);
    if (r == 0)
        r = device_event_wait(send->group->stream, send->done);
    if (r == 0)
        r = device_event_wait(receive->group->stream, send->done);
    return r;
}

/* --- ends --------------------------------------------------------------------------------------- */

static bool agree(const struct end *a, const struct end *b)
{
    return a->what->bytes == b->what->bytes && a->what->network == b->what->network &&
           a->what->tag == b->what->tag;
}

static void disagree(struct end *send, struct end *receive)
{
    struct end *ends[2] = {send, receive};
    const struct transport_message *s = send->what, *r = receive->what;
    for (int i = 0; i < 2; i++) {
        char text[192];
        (void)snprintf(
            text, sizeof text,
            "peer device %u: %s: the sender's has %llu bytes, tag %u, the receiver's %llu "
            "bytes, tag %u%s",
            ends[i]->what->peer,
            s->bytes != r->bytes ? "messages of different sizes"
                                 : "another message of the same size",
            (unsigned long long)s->bytes, s->tag, (unsigned long long)r->bytes, r->tag,
            s->network == r->network ? "" : "; their tiers differ");
        local_group_fail(ends[i]->group, RS_EPROTO, text);
    }
}

static void *settle_main(void *arg)
{
    struct local *t = arg;
    for (uint32_t i = 0; i < t->n_devices; i++)
        if (t->ports[i].dying != NULL)
            device_stream_free(t->ports[i].dying); /* waits for what is on it */
    (void)pthread_mutex_lock(&t->mutex);
    t->settling = false;
    for (uint32_t i = 0; i < t->n_devices; i++)
        t->ports[i].dying = NULL;
    for (struct queue *q; (q = queue_pop(&t->held)) != NULL;)
        local_part_over(t, container_of(q, struct group, hold));
    local_unlock(t);
    return NULL;
}

void local_settle(struct local *t, struct group *g, int why)
{
    if (g->is_held)
        return;
    g->is_held = true;
    g->n_parts++;
    queue_push(&t->held, &g->hold);
    if (t->settling)
        return;
    t->settling = true;
    t->why = t->why == 0 ? why : t->why;
    for (uint32_t i = 0; i < t->n_devices; i++) {
        t->ports[i].dying = t->ports[i].copies;
        t->ports[i].copies = NULL;
    }
    /* Without a thread those groups stay: it is not quiesced any more, and who waits for that ends the
     * process. */
    (void)thread_start_detached(settle_main, t);
}

static void meet(struct local *t, struct end *send, struct end *receive)
{
    bool begun = false;
    send->met = receive->met = true;
    send->group->n_unmet--;
    receive->group->n_unmet--;
    int r = agree(send, receive) ? copy_message(t, send, receive, &begun) : RS_EPROTO;
    if (r == 0)
        return;
    if (begun) {
        local_settle(t, send->group, r);
        local_settle(t, receive->group, r);
    }
    if (r == RS_EPROTO)
        disagree(send, receive);
    local_group_fail(send->group, r, err_name(r));
    local_group_fail(receive->group, r, err_name(r));
    if (t->behind != NULL)
        transport_abort(t->behind); /* what goes on behind may be waited for in vain */
}

void local_post(struct local *t, struct end *x)
{
    struct queue *channel = channel_of(t, x);
    struct end *first = queue_empty(channel) ? NULL : container_of(channel->next, struct end, link);
    x->posted = true;
    if (first == NULL || first->what->send == x->what->send) {
        queue_push(channel, &x->link);
        return;
    }
    queue_remove(&first->link);
    meet(t, x->what->send ? x : first, x->what->send ? first : x);
}

void local_take_back(struct group *g)
{
    for (uint32_t i = 0; i < g->n_ends; i++) {
        struct end *x = &g->ends[i];
        if (!x->posted || x->met)
            continue;
        queue_remove(&x->link);
        x->met = true;
        g->n_unmet--;
    }
}
