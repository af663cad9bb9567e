/* A node that is drained, and is in use again: in the ledger first, then told. */
#include "test/lib/coordinator_bed.h"

struct asking {
    struct waiter waiter;
    unsigned n_answers;
    int code;
    uint64_t value;
    char text[128];
};

static void on_drain_answer(struct waiter *waiter, const struct op_reply *reply)
{
    struct asking *a = container_of(waiter, struct asking, waiter);
    a->n_answers++;
    a->code = reply->code;
    a->value = reply->value;
    (void)snprintf(a->text, sizeof a->text, "%s", reply->text != NULL ? reply->text : "");
}

static int drain(struct asking *a, bool undrain)
{
    struct err e = {0};
    *a = (struct asking){.waiter.done = on_drain_answer};
    return op_drain(w.service, ROLLOUT, undrain, &a->waiter, &e);
}

/* One node with two workers, and a ledger that waits. */
static void drain_world_open(void)
{
    world_open();
    node_comes(ROLLOUT);
    attach(ROLLOUT, 0);
    attach(ROLLOUT, 1);
    while (w.service->n_writes > 0)
        (void)uv_run(&w.loop, UV_RUN_ONCE);
    ledger_mem_set_faults(w.service->ledger, &(struct ledger_mem_faults){.hold = true});
}

static int drain_row(const struct ledger_record *row, void *arg)
{
    if (row->kind == LEDGER_DRAIN && strcmp(row->drain.node, "n2") == 0)
        *(uint64_t *)arg = row->drain.since_wall_ns;
    return 0;
}

static uint64_t in_ledger(void)
{
    uint64_t since = 0;
    ck_assert_int_eq(ledger_load(w.service->ledger, drain_row, &since, NULL), 0);
    return since;
}

START_TEST(a_drain_is_in_the_ledger_before_anybody_leaves)
{
    struct asking a, undo;
    drain_world_open();
    ck_assert_int_eq(drain(&a, false), 0);
    for (unsigned i = 0; i < 10; i++)
        (void)uv_run(&w.loop, UV_RUN_NOWAIT);
    ck_assert(a.n_answers == 0 && count(ROLLOUT, NODE_ORDER_EVICT) == 0 && in_ledger() == 0);
    ck_assert_uint_eq(w.c->nodes[ROLLOUT].drained_wall_ns, 0);
    ck_assert_uint_eq(ledger_mem_release(w.service->ledger, 1), 1);
    ck_assert_uint_ne(in_ledger(), 0);
    ck_assert_uint_eq(in_ledger(), w.c->nodes[ROLLOUT].drained_wall_ns);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_EVICT), 2);
    ck_assert(a.n_answers == 1 && a.code == 0 && a.value == 2);
    ck_assert_int_eq(drain(&undo, true), 0);
    ck_assert_uint_ne(w.c->nodes[ROLLOUT].drained_wall_ns, 0);
    ck_assert_uint_eq(ledger_mem_release(w.service->ledger, 1), 1);
    ck_assert(undo.n_answers == 1 && undo.code == 0 && in_ledger() == 0);
    ck_assert_uint_eq(w.c->nodes[ROLLOUT].drained_wall_ns, 0);
    world_close();
}
END_TEST

START_TEST(a_drain_that_can_not_be_written_is_none)
{
    struct asking a;
    drain_world_open();
    ledger_mem_set_faults(w.service->ledger,
                          &(struct ledger_mem_faults){.hold = true, .fail_at = 1});
    ck_assert_int_eq(drain(&a, false), 0);
    ck_assert_uint_eq(ledger_mem_release(w.service->ledger, 1), 1);
    ck_assert(a.n_answers == 1 && a.code == RS_EFULL);
    ck_assert_uint_eq(w.c->nodes[ROLLOUT].drained_wall_ns, 0);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_EVICT), 0);
    ck_assert(queue_empty(&w.c->drains));
    world_close();
}
END_TEST

/* Who asked is answered once. Once the ledger has it the workers leave, whatever he was told. */
START_TEST(a_drain_is_whole_or_none_at_every_failed_allocation)
{
    bool struck = true;
    for (long i = 1; struck; i++) {
        struct asking a;
        drain_world_open();
        mem_fail_at(i);
        int rc = drain(&a, false);
        if (rc == 0)
            (void)ledger_mem_release(w.service->ledger, 1);
        struck = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(rc != 0 ? rc : a.code, struck ? RS_ENOMEM : 0);
        ck_assert_uint_eq(a.n_answers, rc == 0 ? 1 : 0);
        ck_assert_uint_eq(in_ledger(), w.c->nodes[ROLLOUT].drained_wall_ns);
        for (unsigned n = 0; in_ledger() != 0 && n < 2; n++)
            (void)expect(ROLLOUT, NODE_ORDER_EVICT);
        ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_EVICT), in_ledger() != 0 ? 2 : 0);
        ck_assert(queue_empty(&w.c->drains));
        world_close();
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_drain_is_in_the_ledger_before_anybody_leaves)                                              \
    X(a_drain_that_can_not_be_written_is_none)                                                     \
    X(a_drain_is_whole_or_none_at_every_failed_allocation)

#include "test/lib/main.h"
