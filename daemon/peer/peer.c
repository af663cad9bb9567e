#include "peer/private.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

#include "base/banned.h"

enum { SLACK_MS = 1000 };

uint64_t peer_now(const struct peer *p)
{
    return p->options.clock != NULL ? p->options.clock() : clock_mono_ns();
}

bool peer_is_coordinator(const struct peer *p)
{
    return p->member == NULL;
}

/* --- time ---------------------------------------------------------------------------------------- */

/* The coordinator's own data plane: it is here as long as this loop turns. */
static void own_lease(struct peer *p, uint64_t now_ns)
{
    const struct peer_options *o = &p->options;
    if (now_ns < p->lease_due_ns)
        return;
    p->lease_due_ns = now_ns + o->beat_ms * UINT64_C(1000000);
    if (o->events.lease != NULL)
        o->events.lease(o->events.arg, now_ns + o->lease_ms * UINT64_C(1000000));
}

void peer_tick(struct peer *p)
{
    uint64_t now = peer_now(p);
    if (p->member != NULL) {
        member_tick(p, now);
    } else if (!p->stopping) {
        own_lease(p, now);
        coordinator_tick(p, now);
    }
    p->ticked_ns = now;
}

static void on_timer(uv_timer_t *timer)
{
    peer_tick(timer->data);
}

/* --- start, stop --------------------------------------------------------------------------------- */

static int options_check(const struct peer_options *o, struct err *e)
{
    if (o->n_nodes == 0 || o->n_nodes > NODE_MAX || o->me >= o->n_nodes ||
        o->coordinator >= o->n_nodes)
        return err_set(e, RS_EINVAL, "node %u and coordinator %u of %u nodes", o->me,
                       o->coordinator, o->n_nodes);
    if (o->beat_ms == 0 || o->lease_ms < o->beat_ms)
        return err_set(e, RS_EINVAL, "a lease of %u ms with a beat each %u ms", o->lease_ms,
                       o->beat_ms);
    return 0;
}

static uint64_t tick_ms(const struct peer_options *o)
{
    uint32_t ms = o->beat_ms / 5;
    return ms < 10 ? 10 : ms > 100 ? 100 : ms;
}

int peer_start(const struct peer_options *options, struct peer **ret, struct err *e)
{
    int r = options_check(options, e);
    if (r != 0)
        return r;
    struct peer *p = mem_zalloc(sizeof *p);
    if (p == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the cluster");
    p->options = *options;
    if (p->options.slack_ms == 0)
        p->options.slack_ms = SLACK_MS;
    queue_init(&p->sessions);
    p->ticked_ns = peer_now(p);
    r = options->me == options->coordinator ? coordinator_start(p, e) : member_start(p, e);
    if (r != 0) {
        coordinator_free(p);
        member_free(p);
        mem_free(p);
        return r;
    }
    rs_assert(uv_timer_init(options->loop, &p->timer) == 0);
    p->timer.data = p;
    p->timer_open = true;
    if (options->clock == NULL)
        rs_assert(uv_timer_start(&p->timer, on_timer, 0, tick_ms(options)) == 0);
    *ret = p;
    return 0;
}

void peer_maybe_gone(struct peer *p)
{
    if (!p->stopping || p->timer_open || p->link_open || p->n_probes > 0 || p->n_jobs > 0)
        return;
    void (*done)(void *arg) = p->done;
    void *arg = p->done_arg;
    coordinator_free(p);
    member_free(p);
    mem_free(p);
    if (done != NULL)
        done(arg);
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct peer *p = handle->data;
    p->timer_open = false;
    peer_maybe_gone(p);
}

void peer_timer_close(struct peer *p)
{
    uv_close((uv_handle_t *)&p->timer, on_timer_closed);
}

void peer_stop(struct peer *p, void (*done)(void *arg), void *arg)
{
    rs_assert(!p->stopping);
    p->stopping = true;
    p->stop_ns = peer_now(p);
    p->done = done;
    p->done_arg = arg;
    if (p->member != NULL)
        member_stop(p);
    else
        coordinator_stop(p);
}
