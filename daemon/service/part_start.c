/* START and ABORT of this node's part: bytes move, what has landed is compared, or all of it ends. */
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "service/cells_collect.h"
#include "service/cells_sum.h"
#include "service/compare.h"
#include "service/held.h"
#include "service/part.h"

#include "base/banned.h"

/* --- what has landed, compared ------------------------------------------------------------------- */

/* What it reads is counted or owned. */
struct landed_job {
    uv_work_t work;
    struct service *service;
    struct part *part; /* NULL: nobody waits any more */
    struct plan_entry *plan;
    enum compare_mode mode;
    struct publication **publications; /* per source rank: of our own source workers */
    const uint64_t *holds;             /* mapped */
    size_t holds_bytes;
    uint64_t **sums; /* per place */
    uint32_t place;  /* to blame */
    enum cells_part tells;
    struct cell_print *cells;
    uint32_t n_cells;
    struct cell_run *runs; /* where what landed is told in short */
    uint32_t n_runs;
    struct wire_progress progress;
    int code;
    struct err err;
};

static void job_free(struct landed_job *j)
{
    uint32_t n_ranks = j->plan->source->layout->n_ranks;
    for (uint32_t i = 0; j->publications != NULL && i < n_ranks; i++)
        publication_unref(j->publications[i]);
    for (uint32_t i = 0; j->sums != NULL && i < j->plan->program.n_places; i++)
        mem_free(j->sums[i]);
    mem_free(j->publications);
    mem_free(j->sums);
    mem_free(j->cells);
    mem_free(j->runs);
    if (j->holds != NULL)
        wire_unmap(j->holds, j->holds_bytes);
    plan_entry_unref(j->plan);
    mem_free(j);
}

static int publications_take(const struct part *p, struct landed_job *j)
{
    const struct attempt_input *in = p->now->input;
    j->publications = mem_calloc(j->plan->source->layout->n_ranks, sizeof(struct publication *));
    if (j->publications == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < in->n_participants && in->participants[i].layout == 0; i++) {
        const struct lease *l = lease_find(p->model->service, in->participants[i].worker);
        if (l == NULL || l->published == NULL || l->published->version != p->now->version)
            continue;
        l->published->refs++;
        j->publications[l->rank] = l->published;
    }
    return 0;
}

static int sums_make(struct landed_job *j)
{
    const struct program *p = &j->plan->program;
    j->sums = mem_calloc(p->n_places, sizeof(uint64_t *));
    for (uint32_t i = 0; j->sums != NULL && i < p->n_places; i++) {
        if (p->places[i].side != PROGRAM_DESTINATION)
            continue;
        uint32_t n = j->plan->destinations[p->places[i].layout]->layout->n_tensors;
        if ((j->sums[i] = mem_calloc(n, sizeof(uint64_t))) == NULL)
            return RS_ENOMEM;
    }
    return j->sums != NULL ? 0 : RS_ENOMEM;
}

static struct landed_job *landed_new(struct part *p)
{
    struct landed_job *j = mem_zalloc(sizeof *j);
    if (j == NULL)
        return NULL;
    j->service = p->model->service;
    j->part = p;
    j->mode = (enum compare_mode)p->now->input->verify;
    j->plan = plan_entry_ref(p->plan);
    if (publications_take(p, j) == 0 && sums_make(j) == 0)
        return j;
    job_free(j);
    return NULL;
}

/* What sources sent is told in full: it is what the rest is held against. */
static int cells_make(struct landed_job *j)
{
    int r = cells_collect(j->plan, j->holds, j->mode, j->tells, &j->cells, &j->n_cells);
    if (r != 0 || j->tells != CELLS_OF_THE_REST)
        return r;
    if ((r = cells_sort(j->cells, j->n_cells)) != 0)
        return r;
    j->n_runs = j->n_cells < NODE_PAGE_CELLS ? j->n_cells : NODE_PAGE_CELLS;
    j->runs = mem_calloc(j->n_runs, sizeof *j->runs);
    return j->runs != NULL ? 0 : RS_ENOMEM;
}

static void landed_work(uv_work_t *work)
{
    struct landed_job *j = container_of(work, struct landed_job, work);
    j->place = PROGRAM_NONE;
    j->code =
        compare_landed(j->plan, j->holds, j->mode, j->publications, j->sums, &j->place, &j->err);
    if (j->code == 0 && (j->code = cells_make(j)) != 0)
        (void)err_set(&j->err, j->code, "no memory to tell what has landed");
}

/* --- STAGED ------------------------------------------------------------------------------------- */

/* What a destination's receiving memory is from now on: for Apply, for the ledger's row, and for being reported again. */
static void content_keep(const struct part *p, struct lease *l, uint64_t fold)
{
    l->content[part_receiving(l)] = (struct memory_content){
        .version = p->now->version, .fold = fold, .content = p->now->content};
    l->torn = l->torn && part_receiving(l) != WIRE_LIVE;
}

static int folds_keep(struct part *p, struct landed_job *j)
{
    const struct program *program = &j->plan->program;
    struct memory_fold *folds = mem_calloc(program->n_places, sizeof *folds);
    uint32_t n = 0;
    if (folds == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < program->n_places; i++) {
        struct lease *l = j->sums[i] == NULL ? NULL : part_place_lease(p, i);
        if (l == NULL || l->asleep)
            continue;
        if (j->mode != COMPARE_FULL) {
            content_keep(p, l, 0);
            continue;
        }
        const struct layout *layout = l->layout->layout;
        struct memory_fold *f = &folds[n++];
        *f =
            (struct memory_fold){.rank = l->rank, .fold = held_fold(j->sums[i], layout->n_tensors)};
        memcpy(f->layout, layout->digest, sizeof f->layout);
        content_keep(p, l, f->fold);
        mem_free(l->sums);
        l->sums = j->sums[i];
        l->sums_version = p->now->version;
        j->sums[i] = NULL;
    }
    mem_free(p->folds);
    p->folds = folds;
    p->n_folds = n;
    return 0;
}

static void landed(struct part *p, struct landed_job *j)
{
    if (folds_keep(p, j) != 0 || part_feeders_folds(p, &p->folds, &p->n_folds) != 0) {
        part_answer(p, MEMBER_EV_LANDED, RS_ENOMEM, "no memory to keep the fingerprints", NULL);
        return;
    }
    mem_free(p->cells);
    mem_free(p->runs);
    p->cells = j->cells;
    p->n_cells = j->n_cells;
    p->runs = j->runs;
    p->n_runs = j->n_runs;
    j->cells = NULL;
    j->runs = NULL;
    p->progress = j->progress;
    p->progress.verified_ns = clock_mono_ns();
    part_answer(p, MEMBER_EV_LANDED, 0, "", NULL);
}

static void landed_done(uv_work_t *work, int status)
{
    struct landed_job *j = container_of(work, struct landed_job, work);
    struct service *s = j->service;
    struct part *p = j->part;
    if (status != 0)
        j->code = RS_ECANCELED;
    if (p != NULL) {
        p->landing = NULL;
        if (j->code == 0) {
            landed(p, j);
        } else {
            const struct lease *l = j->place != PROGRAM_NONE ? part_place_lease(p, j->place) : NULL;
            p->blamed = l != NULL ? l->id : 0;
            part_answer(p, MEMBER_EV_LANDED, j->code, err_text(&j->err, j->code), NULL);
        }
    }
    job_free(j);
    s->n_jobs--;
    service_stop_if_idle(s);
}

static int staged_take(struct wire_packet *packet, struct landed_job *j, struct err *e)
{
    if (packet->header.type != WIRE_STAGED || packet->header.body_bytes < sizeof j->progress ||
        packet->n_fds < 1)
        return err_set(e, RS_EPROTO, "the data plane ended START with %s",
                       wire_type_name(packet->header.type));
    memcpy(&j->progress, packet->body, sizeof j->progress);
    int r = wire_map_fd(packet->fds[0], (const void **)&j->holds, &j->holds_bytes, e);
    if (r == 0 && j->holds_bytes < j->plan->program.n_holds * sizeof *j->holds)
        r = err_set(e, RS_EPROTO, "STAGED tells of %zu bytes of fingerprints; there are %u holds",
                    j->holds_bytes, j->plan->program.n_holds);
    return r;
}

static int landed_start(struct part *p, struct wire_packet *packet, struct err *e)
{
    struct landed_job *j = landed_new(p);
    if (j == NULL)
        return err_set(e, RS_ENOMEM, "no memory to compare fingerprints");
    part_sources_leave(p);
    j->tells = p->sources_told ? CELLS_OF_THE_REST : CELLS_ALL;
    int r = staged_take(packet, j, e);
    if (r == 0 && uv_queue_work(j->service->loop, &j->work, landed_work, landed_done) != 0)
        r = err_set(e, RS_EINTERNAL, "no thread to compare fingerprints on");
    if (r != 0) {
        job_free(j);
        return r;
    }
    j->service->n_jobs++;
    p->landing = j;
    return 0;
}

static void on_staged(struct link_request *r, int code, struct wire_packet *packet,
                      const struct err *e)
{
    struct part *p = container_of(r, struct part, start);
    struct err mine = {0};
    if (code != 0) {
        part_link_failed(p, MEMBER_EV_LANDED, code, packet, e);
        return;
    }
    code = landed_start(p, packet, &mine);
    if (code != 0)
        part_answer(p, MEMBER_EV_LANDED, code, err_text(&mine, code), NULL);
}

/* --- START -------------------------------------------------------------------------------------- */

static void on_progress(struct link_request *r, const struct wire_progress *progress)
{
    struct part *p = container_of(r, struct part, start);
    p->progress = *progress;
    part_answer(p, MEMBER_EV_PROGRESS, 0, "", NULL);
}

/* From here on receiving memory holds nothing that is known, unless it held the content before. */
static void memory_open(struct part *p)
{
    const struct attempt_input *in = p->now->input;
    part_landed_clear(p);
    for (uint32_t i = 0; i < in->n_participants; i++) {
        const struct participant *x = &in->participants[i];
        struct lease *l = x->layout != 0 && !x->held && x->node == p->model->service->node
                              ? lease_find(p->model->service, x->worker)
                              : NULL;
        if (l == NULL || l->asleep)
            continue;
        l->content[part_receiving(l)] = (struct memory_content){0};
        l->torn = l->torn || part_receiving(l) == WIRE_LIVE;
    }
}

static struct wire_header header_of(const struct part *p, enum wire_type type)
{
    return (struct wire_header){.type = type,
                                .model = p->model->id,
                                .epoch = p->now->epoch,
                                .attempt = p->now->attempt,
                                .version = p->now->version};
}

void part_start(struct part *p)
{
    struct err e = {0};
    uint32_t timeout_ms = p->now->transfer_timeout_ms;
    p->start = (struct link_request){.done = on_staged, .progress = on_progress, .patient = true};
    memory_open(p);
    int r =
        link_submit(p->model->service->link, &p->start, header_of(p, WIRE_START), NULL, 0, NULL, 0,
                    NULL, 0, timeout_ms > UINT32_MAX / 2 ? timeout_ms : timeout_ms + 5000, &e);
    if (r == 0 && part_sources_tell(p) != 0)
        r = err_set(&e, RS_ENOMEM, "no memory to tell what the sources send");
    if (r != 0)
        part_answer(p, MEMBER_EV_LANDED, r, err_text(&e, r), NULL);
}

void part_start_forget(struct part *p)
{
    part_sources_leave(p);
    link_forget(p->model->service->link, &p->start);
    if (p->landing != NULL)
        p->landing->part = NULL;
    p->landing = NULL;
}

/* --- ABORT -------------------------------------------------------------------------------------- */

static void on_quiesced(struct link_request *r, int code, struct wire_packet *packet,
                        const struct err *e)
{
    struct part *p = container_of(r, struct part, abort);
    if (code == 0)
        part_landed_take(p, packet);
    if (code != RS_EPEER && code != RS_ECANCELED) /* a dead data plane is told once for all */
        part_answer(p, MEMBER_EV_QUIET, code, code != 0 ? err_text(e, code) : "", NULL);
}

void part_abort(struct part *p)
{
    struct service *s = p->model->service;
    struct err e = {0};
    if (!p->sent) { /* nothing of it has reached the data plane */
        part_answer(p, MEMBER_EV_QUIET, 0, "", NULL);
        return;
    }
    if (link_state(s->link) != LINK_READY)
        return; /* it is dying, which is told */
    p->abort = (struct link_request){.done = on_quiesced};
    int r = link_submit(s->link, &p->abort, header_of(p, WIRE_ABORT), NULL, 0, NULL, 0, NULL, 0,
                        s->config->quiesce_timeout_ms * 2, &e);
    if (r != 0)
        part_answer(p, MEMBER_EV_QUIET, r, err_text(&e, r), NULL);
}
