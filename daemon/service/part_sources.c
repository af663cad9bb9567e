/* What this node's sources send, told to the coordinator while it moves.
 *
 *   PREPARED + fingerprints (wire.h) → kept → START → job: cells of them that go to other nodes → CELLS → sources_told
 *
 * From then on PROGRESS says sources_known (part.c): what lands elsewhere, also in an attempt that ends before this node
 * stages, is compared with it, and sources are not released before. It is told once (about 13 bytes a cell; Qwen3-235B
 * from TP4 EP8 DP16 to four instances of TP8 EP8: 38,919 cells, 0.5 MB of all source nodes together), so that what lands
 * can be told in short (cells_sum.h); where all has landed first, STAGED's CELLS bring it. */
#include "base/mem.h"
#include "service/cells_collect.h"
#include "service/part.h"

#include "base/banned.h"

/* What it reads is counted or owned. */
struct sources_job {
    uv_work_t work;
    struct service *service;
    struct part *part; /* NULL: nobody waits any more */
    struct plan_entry *plan;
    enum compare_mode mode;
    const uint64_t *holds; /* mapped */
    size_t holds_bytes;
    struct cell_print *cells;
    uint32_t n_cells;
    int code;
};

static void job_free(struct sources_job *j)
{
    if (j->holds != NULL)
        wire_unmap(j->holds, j->holds_bytes);
    plan_entry_unref(j->plan);
    mem_free(j->cells);
    mem_free(j);
}

static void sources_work(uv_work_t *work)
{
    struct sources_job *j = container_of(work, struct sources_job, work);
    j->code = cells_collect(j->plan, j->holds, j->mode, CELLS_OF_SOURCES, &j->cells, &j->n_cells);
}

static void sources_done(uv_work_t *work, int status)
{
    struct sources_job *j = container_of(work, struct sources_job, work);
    struct service *s = j->service;
    struct part *p = j->part;
    if (status != 0)
        j->code = RS_ECANCELED;
    if (p != NULL) {
        p->telling = NULL;
        if (j->code == 0) {
            part_cells_tell(p, p->now->attempt, j->cells, j->n_cells);
            p->sources_told = true; /* not before: it goes with the next PROGRESS */
            part_answer(p, MEMBER_EV_PROGRESS, 0, "", NULL);
        } else {
            part_answer(p, MEMBER_EV_LANDED, j->code, "no memory to tell what the sources send",
                        NULL);
        }
    }
    job_free(j);
    s->n_jobs--;
    service_stop_if_idle(s);
}

static bool has_sources(const struct program *p)
{
    for (uint32_t i = 0; i < p->n_places; i++)
        if (p->places[i].side == PROGRAM_SOURCE)
            return true;
    return false;
}

int part_sources_take(struct part *p, const struct wire_packet *packet, struct err *e)
{
    const struct program *program = &p->plan->program;
    part_sources_forget(p);
    p->sources_told =
        p->now->input->verify == WIRE_VERIFY_OFF || p->now->n_peers == 0 || !has_sources(program);
    if (p->sources_told)
        return 0;
    const void *table;
    if (packet == NULL || packet->n_fds < 1)
        return err_set(e, RS_EPROTO, "PREPARED came without fingerprints of the sources");
    int r = wire_map_fd(packet->fds[0], &table, &p->source_holds_bytes, e);
    if (r != 0)
        return r;
    p->source_holds = table;
    if (p->source_holds_bytes < program->n_holds * sizeof *p->source_holds)
        r = err_set(e, RS_EPROTO, "PREPARED tells of %zu bytes of fingerprints; there are %u holds",
                    p->source_holds_bytes, program->n_holds);
    return r;
}

int part_sources_tell(struct part *p)
{
    if (p->sources_told) { /* a node that only sends would say so no sooner than all is read */
        if (p->now->n_peers > 0)
            part_answer(p, MEMBER_EV_PROGRESS, 0, "", NULL);
        return 0;
    }
    struct sources_job *j = mem_zalloc(sizeof *j);
    if (j == NULL)
        return RS_ENOMEM;
    *j = (struct sources_job){.service = p->model->service,
                              .part = p,
                              .mode = (enum compare_mode)p->now->input->verify,
                              .holds = p->source_holds,
                              .holds_bytes = p->source_holds_bytes};
    j->plan = plan_entry_ref(p->plan);
    p->source_holds = NULL; /* the job's from here on */
    if (uv_queue_work(j->service->loop, &j->work, sources_work, sources_done) != 0) {
        job_free(j);
        return RS_ENOMEM;
    }
    j->service->n_jobs++;
    p->telling = j;
    return 0;
}

void part_sources_leave(struct part *p)
{
    if (p->telling != NULL)
        p->telling->part = NULL;
    p->telling = NULL;
}

void part_sources_forget(struct part *p)
{
    part_sources_leave(p);
    if (p->source_holds != NULL)
        wire_unmap(p->source_holds, p->source_holds_bytes);
    p->source_holds = NULL;
    p->source_holds_bytes = 0;
    p->sources_told = false;
}
