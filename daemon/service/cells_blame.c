#include "service/cells_blame.h"

#include <inttypes.h>

#include "base/mem.h"
#include "service/state.h"

#include "base/banned.h"

/* --- words -------------------------------------------------------------------------------------- */

struct where {
    uint64_t cell;
    uint32_t tensor;
    struct box box;
};

static int on_transfer(const struct plan_transfer *t, void *arg)
{
    struct where *w = arg;
    if (t->cell != w->cell)
        return 0;
    w->tensor = t->tensor;
    w->box = t->box;
    return 1;
}

static const char *layout_name(const struct plan_entry *plan, uint32_t layout)
{
    return layout == 0                      ? plan->source->layout->name
           : layout <= plan->n_destinations ? plan->destinations[layout - 1]->layout->name
                                            : "?";
}

int cells_blame(const struct plan_entry *plan, const struct cells_difference *x, struct err *e)
{
    struct where w = {.cell = x->bad.cell};
    char box[160] = "";
    const char *tensor = "?";
    int r = plan_transfers(plan->plan, -1, on_transfer, &w);
    if (r == 1) {
        tensor = plan_tensor_name(plan->plan, w.tensor);
        (void)box_text(&w.box, box, sizeof box);
    } else if (r != 0) {
        return err_set(e, r, "no memory to say where nodes differ");
    }
    return err_set(e, RS_EDATALOSS,
                   "tensor '%s' %s: layout '%s' rank %u %s fingerprint %016" PRIx64
                   " where layout '%s' rank %u %s %016" PRIx64,
                   tensor, box, layout_name(plan, x->bad.layout), x->bad.rank,
                   x->bad.layout == 0 ? "sent" : "holds", x->bad.fingerprint,
                   layout_name(plan, x->good.layout), x->good.rank,
                   x->good.layout == 0 ? "sent" : "holds", x->good.fingerprint);
}

/* --- the job ------------------------------------------------------------------------------------ */

struct cells_blame {
    uv_work_t work;
    struct service *service;
    void (*done)(void *arg, int code, const char *text, const struct cells_difference *x);
    void *arg;
    struct plan_entry *plan;
    struct cells_difference x;
    int code;
    struct err err;
};

static void blame_work(uv_work_t *work)
{
    struct cells_blame *b = container_of(work, struct cells_blame, work);
    b->code = cells_blame(b->plan, &b->x, &b->err);
}

static void blame_done(uv_work_t *work, int status)
{
    struct cells_blame *b = container_of(work, struct cells_blame, work);
    struct service *s = b->service;
    if (status != 0)
        b->code = RS_ECANCELED;
    if (b->done != NULL)
        b->done(b->arg, b->code, err_text(&b->err, b->code), &b->x);
    plan_entry_unref(b->plan);
    mem_free(b);
    s->n_jobs--;
    service_stop_if_idle(s);
}

int cells_blame_start(struct service *s, struct plan_entry *plan, const struct cells_difference *x,
                      void (*done)(void *arg, int code, const char *text,
                                   const struct cells_difference *x),
                      void *arg, struct cells_blame **ret)
{
    struct cells_blame *b = mem_zalloc(sizeof *b);
    if (b == NULL)
        return RS_ENOMEM;
    *b = (struct cells_blame){.service = s, .done = done, .arg = arg, .x = *x};
    b->plan = plan_entry_ref(plan);
    if (uv_queue_work(s->loop, &b->work, blame_work, blame_done) != 0) {
        plan_entry_unref(b->plan);
        mem_free(b);
        return RS_ENOMEM;
    }
    s->n_jobs++;
    *ret = b;
    return 0;
}

void cells_blame_forget(struct cells_blame *b)
{
    if (b != NULL)
        b->done = NULL;
}
