/* Who feeds an attempt in the trainer's place is looked at first: what is read out of its memory is right only if that
 * still is what was staged or applied there, and a receiver of which nobody knows what it has to hold would not show it.
 *
 * All of the memory that each of this node's feeders is read from is fingerprinted (a read pass, before PREPARE goes to the
 * data plane), and compared with what this node knows of it. Its fold goes with STAGED, too: the coordinator compares it
 * with the ledger's. Only where verification is full: else nothing is known. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "service/held.h"
#include "service/lease.h"
#include "service/part.h"

#include "base/banned.h"

struct feeder {
    struct link_request request;
    struct part *part;
    uint64_t worker;
    uint32_t memory; /* enum wire_memory */
    struct memory_fold fold;
};

struct part_feeders {
    uint32_t n, n_left;
    struct feeder all[];
};

static bool feeds(const struct part *p, const struct participant *x, struct lease **ret)
{
    *ret = x->layout == 0 && x->node == p->model->service->node
               ? lease_find(p->model->service, x->worker)
               : NULL;
    return *ret != NULL && (*ret)->side == REFIT_DESTINATION;
}

static uint32_t feeders_count(const struct part *p)
{
    const struct attempt_input *in = p->now->input;
    struct lease *l;
    uint32_t n = 0;
    for (uint32_t i = 0; i < in->n_participants; i++)
        n += feeds(p, &in->participants[i], &l);
    return n;
}

static int fold_take(struct feeder *f, struct wire_packet *packet, struct err *e)
{
    struct lease *l = lease_find(f->part->model->service, f->worker);
    uint64_t *table = NULL;
    if (l == NULL)
        return err_set(e, RS_EABORTED, "a worker that feeds has left");
    int r = lease_table(l, packet, &table, e);
    if (r == 0)
        f->fold.fold = held_fold(table, l->layout->layout->n_tensors);
    mem_free(table);
    return r;
}

/* Not what it was when it was staged, applied, or claimed and believed. */
static bool is_other(const struct feeder *f, const struct lease *l)
{
    const struct memory_content *c = &l->content[f->memory];
    return c->version == f->part->now->version && c->fold != 0 && c->fold != f->fold.fold;
}

/* The first that is not what it was fails the attempt; the next attempt does without it. */
static int feeders_judge(struct part *p, struct err *e)
{
    for (uint32_t i = 0; i < p->feeders->n; i++) {
        const struct feeder *f = &p->feeders->all[i];
        const struct lease *l = lease_find(p->model->service, f->worker);
        if (l == NULL || !is_other(f, l))
            continue;
        p->blamed = l->id;
        return err_set(
            e, RS_EDATALOSS,
            "layout '%s' rank %u, which was to feed others, does not hold version %" PRIu64
            " any more: its %s memory was written over",
            l->layout->layout->name, l->rank, p->now->version,
            f->memory == WIRE_SHADOW ? "shadow" : "live");
    }
    return 0;
}

static void on_checked(struct link_request *request, int code, struct wire_packet *packet,
                       const struct err *e)
{
    struct feeder *f = container_of(request, struct feeder, request);
    struct part *p = f->part;
    struct err mine = {0};
    if (code == RS_EPEER && packet == NULL)
        return; /* a dead data plane is told once for all */
    if (code == 0)
        code = fold_take(f, packet, &mine);
    else
        mine = *e;
    if (code != 0)
        (void)err_prefix(&mine, code, "the memory that feeds");
    else if (--p->feeders->n_left > 0)
        return;
    else
        code = feeders_judge(p, &mine);
    if (code == 0)
        part_prepare_checked(p);
    else
        part_answer(p, MEMBER_EV_MADE_READY, code, err_text(&mine, code), NULL);
}

static int feeder_check(struct part *p, const struct participant *x, struct lease *l, struct err *e)
{
    struct feeder *f = &p->feeders->all[p->feeders->n++];
    struct wire_check body = {.memory = x->shadow ? WIRE_SHADOW : WIRE_LIVE};
    struct wire_header h = {.type = WIRE_CHECK, .model = p->model->id, .worker = l->id};
    *f = (struct feeder){.request = {.done = on_checked},
                         .part = p,
                         .worker = l->id,
                         .memory = body.memory,
                         .fold = {.rank = l->rank}};
    memcpy(f->fold.layout, l->layout->layout->digest, sizeof f->fold.layout);
    int r = link_submit(p->model->service->link, &f->request, h, &body, sizeof body, NULL, 0, NULL,
                        0, p->now->transfer_timeout_ms, e);
    p->feeders->n_left += r == 0;
    return r;
}

int part_feeders_check(struct part *p, struct err *e)
{
    const struct attempt_input *in = p->now->input;
    uint32_t n = in->verify == WIRE_VERIFY_FULL ? feeders_count(p) : 0;
    struct lease *l;
    int r = 0;
    if (n == 0)
        return 0;
    p->feeders = mem_zalloc(sizeof *p->feeders + n * sizeof p->feeders->all[0]);
    if (p->feeders == NULL)
        return err_set(e, RS_ENOMEM, "no memory to look at who feeds");
    for (uint32_t i = 0; r == 0 && i < in->n_participants; i++)
        if (feeds(p, &in->participants[i], &l))
            r = feeder_check(p, &in->participants[i], l, e);
    if (r != 0) /* those that were asked must not go on with what has failed */
        part_feeders_forget(p);
    return r == 0 ? 1 : r;
}

int part_feeders_folds(const struct part *p, struct memory_fold **folds, uint32_t *n)
{
    uint32_t n_more = p->feeders != NULL ? p->feeders->n : 0;
    if (n_more == 0)
        return 0;
    struct memory_fold *all = mem_calloc((size_t)*n + n_more, sizeof *all);
    if (all == NULL)
        return RS_ENOMEM;
    if (*n > 0)
        memcpy(all, *folds, *n * sizeof *all);
    for (uint32_t i = 0; i < n_more; i++)
        all[*n + i] = p->feeders->all[i].fold;
    mem_free(*folds);
    *folds = all;
    *n += n_more;
    return 0;
}

void part_feeders_forget(struct part *p)
{
    for (uint32_t i = 0; p->feeders != NULL && i < p->feeders->n; i++)
        link_forget(p->model->service->link, &p->feeders->all[i].request);
    mem_free(p->feeders);
    p->feeders = NULL;
}
