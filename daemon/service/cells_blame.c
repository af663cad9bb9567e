#include "service/cells_blame.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/mem.h"
#include "service/state.h"

#include "base/banned.h"

/* --- words -------------------------------------------------------------------------------------- */

struct where {
    uint64_t cell;
    uint32_t tensor;
    struct box box;
    uint32_t device; /* on_sent: that sends it */
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

/* --- who has not told of it ----------------------------------------------------------------------- */

static int on_sent(const struct plan_transfer *t, void *arg)
{
    struct where *w = arg;
    if (t->from.side != SIDE_SOURCE)
        return 0;
    w->device = t->from.device;
    return on_transfer(t, w);
}

int cells_untold_blame(const struct plan_entry *plan, const struct cell_print *told,
                       uint32_t *ret_node, struct err *e)
{
    struct where w = {.cell = told->cell};
    char box[160] = "";
    int r = plan_transfers(plan->plan, -1, on_sent, &w);
    if (r <= 0)
        return err_set(e, r < 0 ? r : RS_EPROTO, "cell %" PRIu64 " has no source", told->cell);
    *ret_node = plan->topology->devices[w.device].node;
    (void)box_text(&w.box, box, sizeof box);
    return err_set(
        e, RS_EPROTO,
        "it says that it has told what its sources send, but not of tensor '%s' %s, which layout "
        "'%s' rank %u holds",
        plan_tensor_name(plan->plan, w.tensor), box, layout_name(plan, told->layout), told->rank);
}

/* --- who has them -------------------------------------------------------------------------------- */

static int places_compare(const void *a, const void *b)
{
    const struct cells_place *x = a, *y = b;
    if (x->cell != y->cell)
        return x->cell < y->cell ? -1 : 1;
    return x->node == y->node ? 0 : x->node < y->node ? -1 : 1;
}

/* Ranks of all destination layouts, one behind the other. */
struct holders {
    const struct plan_entry *plan;
    const struct cells_place *wrong;
    size_t n_wrong;
    uint8_t *is_holder;
    size_t n_holders;
};

static size_t holder_index(const struct plan_entry *plan, uint32_t layout, uint32_t rank)
{
    size_t first = 0;
    for (uint32_t i = 0; i < layout; i++)
        first += plan->destinations[i]->layout->n_ranks;
    return first + rank;
}

static int on_taken(const struct plan_transfer *t, void *arg)
{
    struct holders *h = arg;
    if (t->to.side != SIDE_DESTINATION)
        return 0;
    const struct cells_place key = {t->cell, h->plan->topology->devices[t->to.device].node};
    if (bsearch(&key, h->wrong, h->n_wrong, sizeof key, places_compare) == NULL)
        return 0;
    uint8_t *is = &h->is_holder[holder_index(h->plan, t->to.layout, t->to.rank)];
    h->n_holders += *is == 0;
    *is = 1;
    return 0;
}

static void holders_list(const struct holders *h, struct cells_holder *to)
{
    size_t n = 0;
    for (uint32_t l = 0; l < h->plan->n_destinations; l++)
        for (uint32_t rank = 0; rank < h->plan->destinations[l]->layout->n_ranks; rank++)
            if (h->is_holder[holder_index(h->plan, l, rank)] != 0)
                to[n++] = (struct cells_holder){.layout = l + 1, .rank = rank};
}

int cells_holders(const struct plan_entry *plan, struct cells_place *wrong, size_t n_wrong,
                  struct cells_holder **ret, size_t *ret_n)
{
    struct holders h = {.plan = plan, .wrong = wrong, .n_wrong = n_wrong};
    if (n_wrong > 0)
        qsort(wrong, n_wrong, sizeof *wrong, places_compare);
    h.is_holder = mem_zalloc(holder_index(plan, plan->n_destinations, 0) + 1);
    int r = h.is_holder != NULL ? plan_transfers(plan->plan, -1, on_taken, &h) : RS_ENOMEM;
    struct cells_holder *list = r == 0 ? mem_calloc(h.n_holders, sizeof *list) : NULL;
    if (list != NULL) {
        holders_list(&h, list);
        *ret = list;
        *ret_n = h.n_holders;
    }
    mem_free(h.is_holder);
    return list != NULL ? 0 : RS_ENOMEM;
}

/* --- the job ------------------------------------------------------------------------------------ */

struct cells_blame {
    uv_work_t work;
    struct service *service;
    void (*done)(void *arg, const struct cells_blamed *x);
    void *arg;
    struct plan_entry *plan;
    struct cells_difference first; /* untold: first.bad alone */
    struct cells_place *wrong;
    size_t n_places, n_wrong;
    struct cells_holder *holders;
    size_t n_holders;
    bool all, untold;
    uint32_t node;
    int code;
    struct err err;
};

static void blame_work(uv_work_t *work)
{
    struct cells_blame *b = container_of(work, struct cells_blame, work);
    if (b->untold) {
        b->code = cells_untold_blame(b->plan, &b->first.bad, &b->node, &b->err);
        return;
    }
    b->code = cells_blame(b->plan, &b->first, &b->err);
    b->all = cells_holders(b->plan, b->wrong, b->n_places, &b->holders, &b->n_holders) == 0;
}

static void blame_free(struct cells_blame *b)
{
    plan_entry_unref(b->plan);
    mem_free(b->wrong);
    mem_free(b->holders);
    mem_free(b);
}

static void blame_done(uv_work_t *work, int status)
{
    struct cells_blame *b = container_of(work, struct cells_blame, work);
    struct service *s = b->service;
    if (status != 0)
        b->code = RS_ECANCELED;
    const struct cells_blamed x = {.code = b->code,
                                   .text = err_text(&b->err, b->code),
                                   .first = b->first,
                                   .holders = b->holders,
                                   .n_holders = b->n_holders,
                                   .all = b->all,
                                   .node = b->node,
                                   .n_wrong = b->n_wrong};
    if (b->done != NULL)
        b->done(b->arg, &x);
    blame_free(b);
    s->n_jobs--;
    service_stop_if_idle(s);
}

static int blame_start(struct service *s, struct plan_entry *plan, const struct cells_blame *what,
                       struct cells_blame **ret)
{
    struct cells_blame *b = mem_zalloc(sizeof *b);
    if (b == NULL) {
        mem_free(what->wrong);
        return RS_ENOMEM;
    }
    *b = *what;
    b->service = s;
    b->plan = plan_entry_ref(plan);
    if (uv_queue_work(s->loop, &b->work, blame_work, blame_done) != 0) {
        blame_free(b);
        return RS_ENOMEM;
    }
    s->n_jobs++;
    *ret = b;
    return 0;
}

int cells_untold_start(struct service *s, struct plan_entry *plan, const struct cell_print *told,
                       void (*done)(void *arg, const struct cells_blamed *x), void *arg,
                       struct cells_blame **ret)
{
    const struct cells_blame what = {
        .done = done, .arg = arg, .first = {.bad = *told}, .untold = true};
    return blame_start(s, plan, &what, ret);
}

int cells_blame_start(struct service *s, struct plan_entry *plan,
                      const struct cells_difference *first, struct cells_place *wrong,
                      size_t n_places, size_t n_wrong,
                      void (*done)(void *arg, const struct cells_blamed *x), void *arg,
                      struct cells_blame **ret)
{
    const struct cells_blame what = {.done = done,
                                     .arg = arg,
                                     .first = *first,
                                     .wrong = wrong,
                                     .n_places = n_places,
                                     .n_wrong = n_wrong};
    return blame_start(s, plan, &what, ret);
}

void cells_blame_forget(struct cells_blame *b)
{
    if (b != NULL)
        b->done = NULL;
}
