#include "service/planning.h"

#include <string.h>

#include "base/mem.h"
#include "layout/layout.h"
#include "service/attempt_input.h"
#include "service/state.h"

#include "base/banned.h"

struct planning {
    uv_work_t work;
    struct service *service;
    planning_fn done; /* NULL: nobody waits any more */
    void *arg;
    struct plan_order order;
    struct share share;       /* memory that its workers have in common */
    struct plan_entry *entry; /* found in the store: only the share is checked */
    bool made;                /* entry is new */
    int code;
    struct err err;
};

/* --- the order ---------------------------------------------------------------------------------- */

static int layout_take(struct service *s, const uint8_t digest[16], struct layout_entry **ret,
                       struct err *e)
{
    char text[33];
    struct layout_entry *entry = layouts_find(&s->layouts, digest);
    if (entry == NULL) {
        layout_digest_text(digest, text);
        return err_set(e, RS_ENOTFOUND, "layout %s is not stored here", text);
    }
    *ret = layout_entry_ref(entry);
    return 0;
}

/* Devices of the ranks of a layout that take part; TOPOLOGY_ABSENT for the others. */
static int devices_of(const struct attempt_input *in, uint32_t index, const struct layout *layout,
                      int32_t **ret, struct err *e)
{
    int32_t *devices = *ret = mem_calloc(layout->n_ranks, sizeof *devices);
    if (devices == NULL)
        return err_set(e, RS_ENOMEM, "no memory to plan");
    for (uint32_t i = 0; i < layout->n_ranks; i++)
        devices[i] = TOPOLOGY_ABSENT;
    for (uint32_t i = 0; i < in->n_participants; i++) {
        const struct participant *p = &in->participants[i];
        if (p->layout != index)
            continue;
        if (p->rank >= layout->n_ranks)
            return err_set(e, RS_EPROTO, "rank %u takes part; layout '%s' has %u ranks", p->rank,
                           layout->name, layout->n_ranks);
        devices[p->rank] = (int32_t)attempt_input_device(in, p);
    }
    return 0;
}

static int order_layouts(struct service *s, const struct attempt_input *in, struct plan_order *o,
                         struct err *e)
{
    o->destinations = mem_calloc(in->n_destinations, sizeof(struct layout_entry *));
    o->destination_device = mem_calloc(in->n_destinations, sizeof *o->destination_device);
    if (o->destinations == NULL || o->destination_device == NULL)
        return err_set(e, RS_ENOMEM, "no memory to plan");
    int r = layout_take(s, in->source, &o->source, e);
    if (r == 0)
        r = devices_of(in, 0, o->source->layout, &o->source_device, e);
    for (uint32_t i = 0; r == 0 && i < in->n_destinations; i++) {
        r = layout_take(s, in->destinations[i], &o->destinations[i], e);
        if (r != 0)
            break;
        o->n_destinations++;
        r = devices_of(in, 1 + i, o->destinations[i]->layout, &o->destination_device[i], e);
        if (r != 0)
            (void)err_prefix(e, r, "layout '%s'", o->destinations[i]->layout->name);
        else
            r = layout_check_pair(o->source->layout, o->destinations[i]->layout, e); /* names it */
    }
    return r;
}

static int order_options(const struct attempt_input *in, struct plan_order *o)
{
    struct plan_rule *rules = mem_calloc(in->options.n_rules, sizeof *rules);
    o->options = in->options;
    o->options.rules = rules;
    o->options.n_rules = 0;
    if (rules == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < in->options.n_rules; i++, o->options.n_rules++) {
        rules[i].strategy = in->options.rules[i].strategy;
        if ((rules[i].glob = mem_strdup(in->options.rules[i].glob)) == NULL)
            return RS_ENOMEM;
    }
    return 0;
}

static int order_make(struct service *s, const struct attempt_input *in, struct plan_order *o,
                      struct err *e)
{
    uint32_t node = attempt_input_node(in, s->node);
    o->node = node == UINT32_MAX ? PLAN_NO_NODE : node;
    o->topology = topology_copy(in->topology);
    int r = o->topology == NULL || order_options(in, o) != 0
                ? err_set(e, RS_ENOMEM, "no memory to plan")
                : order_layouts(s, in, o, e);
    if (r == 0 && (r = plan_order_key(o)) != 0)
        (void)err_set(e, r, "the plan's input has no digest");
    return r;
}

/* --- the job ------------------------------------------------------------------------------------ */

static void planning_work(uv_work_t *work)
{
    struct planning *p = work->data;
    p->code = p->share.n_users > 0 ? share_check(&p->share, &p->err) : 0;
    p->made = p->entry == NULL;
    if (p->code == 0 && p->made)
        p->code = plan_entry_make(&p->order, &p->entry, &p->err);
}

static void planning_free(struct planning *p)
{
    plan_order_close(&p->order);
    share_close(&p->share);
    plan_entry_unref(p->entry);
    mem_free(p);
}

/* Gives the plan away, or says why there is none. */
static void planning_tell(struct planning *p)
{
    struct plan_entry *entry = NULL;
    if (p->code == 0) {
        entry = p->entry;
        p->entry = NULL;
        if (p->done == NULL)
            plan_entry_unref(entry);
    }
    if (p->done != NULL)
        p->done(p->arg, p->code, entry, &p->err);
}

static void planning_done(uv_work_t *work, int status)
{
    struct planning *p = work->data;
    struct service *s = p->service;
    if (status != 0)
        p->code = RS_ECANCELED;
    if (p->code == 0 && p->made)
        plan_store_add(&s->plans, p->entry);
    planning_tell(p);
    planning_free(p);
    s->n_jobs--;
    service_stop_if_idle(s);
}

int planning_start(struct service *s, const struct attempt_input *in, struct share *share,
                   planning_fn done, void *arg, struct planning **ret, struct err *e)
{
    struct planning *p = mem_zalloc(sizeof *p);
    *ret = NULL;
    if (p == NULL) {
        if (share != NULL)
            share_close(share);
        return err_set(e, RS_ENOMEM, "no memory to plan");
    }
    p->work.data = p;
    p->service = s;
    p->done = done;
    p->arg = arg;
    if (share != NULL)
        p->share = *share;
    int r = order_make(s, in, &p->order, e);
    if (r == 0)
        p->entry = plan_store_find(&s->plans, p->order.key, p->order.node);
    if (r == 0 && p->entry != NULL && p->share.n_users == 0) {
        planning_tell(p);
        planning_free(p);
        return 0;
    }
    if (r == 0 && uv_queue_work(s->loop, &p->work, planning_work, planning_done) != 0)
        r = err_set(e, RS_EINTERNAL, "no thread to plan on");
    if (r != 0) {
        planning_free(p);
        return r;
    }
    s->n_jobs++;
    *ret = p;
    return 0;
}

void planning_forget(struct planning *p)
{
    if (p != NULL)
        p->done = NULL;
}
