/* A service in a loop of the test's, with a ledger in memory and without a data plane. For tests with Check; header only. */
#ifndef RS_TEST_SERVICE_BED_H
#define RS_TEST_SERVICE_BED_H

#include <check.h>

#include "base/mem.h"
#include "service/coordinator.h"
#include "service/ops.h"

static inline void service_bed_wake(void *arg)
{
    struct service *s = arg;
    (void)uv_async_send(&s->wake);
}

static inline void service_bed_drain(uv_async_t *wake)
{
    struct service *s = wake->data;
    (void)mailbox_drain(&s->mailbox);
}

/* Initialises the loop, too; the configuration and the store are the caller's, and outlive the service. */
static inline struct service *service_bed_open(uv_loop_t *loop, struct config *config,
                                               struct ledger_store *store)
{
    ck_assert_int_eq(uv_loop_init(loop), 0);
    struct service *s = mem_zalloc(sizeof *s);
    s->loop = loop;
    s->config = config;
    queue_init(&s->models);
    queue_init(&s->leases);
    queue_init(&s->waiters);
    layouts_init(&s->layouts, 8);
    plan_store_init(&s->plans);
    mailbox_init(&s->mailbox, service_bed_wake, s);
    ck_assert_int_eq(uv_async_init(loop, &s->wake, service_bed_drain), 0);
    s->wake.data = s;
    s->n_handles = 1;
    ck_assert_int_eq(ledger_mem_open(store, &s->mailbox, &s->ledger), 0);
    return s;
}

static inline void service_bed_closed(uv_handle_t *h)
{
    service_handle_closed(h->data);
}

/* Its models and the loop, once its ledger is closed and `stopping` set; frees the service. */
static inline void service_bed_close(struct service *s)
{
    uv_loop_t *loop = s->loop;
    while (!queue_empty(&s->models))
        model_close(container_of(s->models.next, struct model, in));
    mailbox_shut(&s->mailbox);
    uv_close((uv_handle_t *)&s->wake, service_bed_closed);
    (void)uv_run(loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(loop), 0);
}

#endif
