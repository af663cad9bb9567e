/* Reports of nodes as protobuf. */
#include <string.h>

#include "base/mem.h"
#include "peer/api_private.h"

#include "base/banned.h"

/* --- encoding ------------------------------------------------------------------------------------ */

static void attached_fill(Reshard__V1__AttachedEvent *to, const struct node_report *r)
{
    const struct refit_event *ev = &r->event;
    reshard__v1__attached_event__init(to);
    to->worker = ev->attached.worker;
    to->side = ev->attached.side;
    to->layout_name = api_borrow(ev->attached.layout_name);
    to->rank = ev->attached.rank;
    to->receive = ev->attached.receive;
    to->accept_automatically = ev->attached.accept_automatically;
    to->live = ev->attached.live;
    to->shadow = ev->attached.shadow;
    to->torn = ev->attached.torn;
    to->waits_for = ev->attached.waits_for;
    to->push = ev->attached.push;
    to->again = ev->attached.again;
    to->published = ev->attached.published;
    to->uncommitted = ev->attached.uncommitted;
    to->uncommitted_content = ev->attached.uncommitted_content;
    to->tells_memory = ev->attached.tells_memory;
    to->asleep = ev->attached.asleep;
    to->layout.data = (uint8_t *)(uintptr_t)r->layout;
    to->layout.len = sizeof r->layout;
    to->device = r->device;
    to->pid = r->pid;
    to->segment_bytes = r->segment_bytes;
    to->live_fold = r->live_fold;
    to->shadow_fold = r->shadow_fold;
    to->opened = r->opened;
}

static Reshard__V1__PublicationPrints *prints_fill(Reshard__V1__PublicationPrints *to,
                                                   const struct publication_print *from, uint32_t n,
                                                   struct api_scratch *s)
{
    reshard__v1__publication_prints__init(to);
    to->tensors = api_scratch_array(s, n, sizeof *to->tensors);
    to->fingerprints = api_scratch_array(s, n, sizeof *to->fingerprints);
    to->n_tensors = to->n_fingerprints = s->failed ? 0 : n;
    for (uint32_t i = 0; !s->failed && i < n; i++) {
        to->tensors[i] = from[i].tensor;
        to->fingerprints[i] = from[i].fingerprint;
    }
    return to;
}

static void published_fill(struct api_report *a, const struct node_report *r, struct api_scratch *s)
{
    Reshard__V1__PublishedEvent *to = &a->published;
    reshard__v1__published_event__init(to);
    to->worker = r->event.published.worker;
    to->version = r->event.published.version;
    to->publication = r->event.published.publication;
    to->push = r->event.published.push;
    if (r->has_prints)
        to->prints = prints_fill(&a->prints, r->prints, r->n_prints, s);
    if (r->n_expected > 0)
        to->expected = prints_fill(&a->expected, r->expected, r->n_expected, s);
}

static void folds_fill(Reshard__V1__PartEvent *to, const struct node_report *r,
                       struct api_scratch *s)
{
    Reshard__V1__MemoryFold *folds = api_scratch_array(s, r->n_folds, sizeof *folds);
    to->folds = api_scratch_array(s, r->n_folds, sizeof *to->folds);
    to->n_folds = s->failed ? 0 : r->n_folds;
    for (size_t i = 0; i < to->n_folds; i++) {
        reshard__v1__memory_fold__init(&folds[i]);
        folds[i].layout.data = (uint8_t *)(uintptr_t)r->folds[i].layout;
        folds[i].layout.len = sizeof r->folds[i].layout;
        folds[i].rank = r->folds[i].rank;
        folds[i].fold = r->folds[i].fold;
        to->folds[i] = &folds[i];
    }
}

static void bytes_fill(Reshard__V1__Bytes *to, const struct refit_bytes *from)
{
    reshard__v1__bytes__init(to);
    to->landed = from->landed;
    to->network = from->network;
    to->domain = from->domain;
    to->device = from->device;
    to->skipped = from->skipped;
    to->total = from->total;
    to->network_minimum = from->network_minimum;
}

static void part_fill(struct api_report *a, const struct node_report *r, uint64_t now_ns,
                      struct api_scratch *s)
{
    Reshard__V1__PartEvent *to = &a->part;
    const struct refit_event *ev = &r->event;
    reshard__v1__part_event__init(to);
    to->type = ev->type;
    to->attempt = ev->node.attempt;
    to->code = ev->node.code;
    to->text = api_scratch_text(s, ev->node.text);
    to->worker = ev->node.worker;
    to->committed = ev->node.committed;
    bytes_fill(&a->bytes, &ev->node.bytes);
    to->bytes = &a->bytes;
    to->first_byte_age_ns = api_age(ev->node.first_byte_ns, now_ns);
    to->last_byte_age_ns = api_age(ev->node.last_byte_ns, now_ns);
    to->sources_read_age_ns = api_age(ev->node.sources_read_ns, now_ns);
    to->verified_age_ns = api_age(ev->node.verified_ns, now_ns);
    to->sources_known = ev->node.sources_known;
    to->data_port = r->data_port;
    to->data_plane = ev->node.data_plane;
    to->landed.data = (uint8_t *)(uintptr_t)r->landed;
    to->landed.len = r->n_landed_bytes;
    folds_fill(to, r, s);
}

static void cells_fill(Reshard__V1__CellPrints *to, const struct node_report *r,
                       struct api_scratch *s)
{
    reshard__v1__cell_prints__init(to);
    to->attempt = r->attempt;
    to->cells = api_scratch_array(s, r->n_cells, sizeof *to->cells);
    to->fingerprints = api_scratch_array(s, r->n_cells, sizeof *to->fingerprints);
    to->layouts = api_scratch_array(s, r->n_cells, sizeof *to->layouts);
    to->ranks = api_scratch_array(s, r->n_cells, sizeof *to->ranks);
    if (s->failed)
        return;
    to->n_cells = to->n_fingerprints = to->n_layouts = to->n_ranks = r->n_cells;
    for (uint32_t i = 0; i < r->n_cells; i++) {
        to->cells[i] = r->cells[i].cell;
        to->fingerprints[i] = r->cells[i].fingerprint;
        to->layouts[i] = r->cells[i].layout;
        to->ranks[i] = r->cells[i].rank;
    }
}

static void cell_sum_fill(Reshard__V1__CellSum *to, const struct node_report *r,
                          struct api_scratch *s)
{
    reshard__v1__cell_sum__init(to);
    to->attempt = r->attempt;
    to->cells = api_scratch_array(s, r->n_runs, sizeof *to->cells);
    to->lengths = api_scratch_array(s, r->n_runs, sizeof *to->lengths);
    to->digest.data = (uint8_t *)(uintptr_t)r->digest;
    to->digest.len = sizeof r->digest;
    if (s->failed)
        return;
    to->n_cells = to->n_lengths = r->n_runs;
    for (uint32_t i = 0; i < r->n_runs; i++) {
        to->cells[i] = r->runs[i].cell;
        to->lengths[i] = r->runs[i].n;
    }
}

/* WITHDRAW, READY, VERDICT, APPLY, APPLIED, LEFT, SLEPT, MARK: what a worker or its client said. */
static void small_fill(struct api_report *a, const struct refit_event *ev, struct api_scratch *s)
{
    switch (ev->type) {
    case REFIT_EV_LEFT:
        reshard__v1__left_event__init(&a->left);
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_LEFT;
        a->m.left = &a->left;
        a->left.worker = ev->left.worker;
        a->left.for_good = ev->left.for_good;
        a->left.reason = api_scratch_text(s, ev->left.reason);
        break;
    case REFIT_EV_SLEPT:
        reshard__v1__slept_event__init(&a->slept);
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_SLEPT;
        a->m.slept = &a->slept;
        a->slept.worker = ev->left.worker;
        break;
    case REFIT_EV_WITHDRAW:
        reshard__v1__withdraw_event__init(&a->withdraw);
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_WITHDRAW;
        a->m.withdraw = &a->withdraw;
        a->withdraw.worker = ev->withdraw.worker;
        a->withdraw.version = ev->withdraw.version;
        a->withdraw.push = ev->withdraw.push;
        a->withdraw.again = ev->withdraw.again;
        a->withdraw.reason = api_scratch_text(s, ev->withdraw.reason);
        break;
    case REFIT_EV_READY:
        reshard__v1__ready_event__init(&a->ready);
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_READY;
        a->m.ready = &a->ready;
        a->ready.worker = ev->ready.worker;
        a->ready.version = ev->ready.version;
        break;
    case REFIT_EV_VERDICT:
        reshard__v1__verdict_event__init(&a->verdict);
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_VERDICT;
        a->m.verdict = &a->verdict;
        a->verdict.worker = ev->verdict.worker;
        a->verdict.version = ev->verdict.version;
        a->verdict.attempt = ev->verdict.attempt;
        a->verdict.accept = ev->verdict.accept;
        a->verdict.reason = api_scratch_text(s, ev->verdict.reason);
        break;
    case REFIT_EV_APPLY:
        reshard__v1__apply_event__init(&a->apply);
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_APPLY;
        a->m.apply = &a->apply;
        a->apply.worker = ev->apply.worker;
        a->apply.version = ev->apply.version;
        a->apply.skip = ev->apply.skip;
        break;
    case REFIT_EV_APPLIED:
        reshard__v1__applied_event__init(&a->applied);
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_APPLIED;
        a->m.applied = &a->applied;
        a->applied.worker = ev->applied.worker;
        a->applied.version = ev->applied.version;
        a->applied.code = ev->applied.code;
        a->applied.text = api_scratch_text(s, ev->applied.text);
        break;
    default: /* REFIT_EV_MARK */
        reshard__v1__mark_event__init(&a->mark);
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_MARK;
        a->m.mark = &a->mark;
        a->mark.version = ev->mark.version;
        a->mark.name = api_borrow(ev->mark.name);
        a->mark.worker = ev->mark.worker;
        break;
    }
}

static int event_fill(struct api_report *a, const struct node_report *r, uint64_t now_ns,
                      struct api_scratch *s, struct err *e)
{
    a->m.cookie = r->event.cookie;
    switch (r->event.type) {
    case REFIT_EV_ATTACHED:
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_ATTACHED;
        a->m.attached = &a->attached;
        attached_fill(&a->attached, r);
        return 0;
    case REFIT_EV_PUBLISHED:
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_PUBLISHED;
        a->m.published = &a->published;
        published_fill(a, r, s);
        return 0;
    case REFIT_EV_LEFT:
    case REFIT_EV_SLEPT:
    case REFIT_EV_WITHDRAW:
    case REFIT_EV_READY:
    case REFIT_EV_VERDICT:
    case REFIT_EV_APPLY:
    case REFIT_EV_APPLIED:
    case REFIT_EV_MARK:
        small_fill(a, &r->event, s);
        return 0;
    case REFIT_EV_PREPARED:
    case REFIT_EV_PROGRESS:
    case REFIT_EV_STAGED:
    case REFIT_EV_FAILED:
    case REFIT_EV_QUIESCED:
    case REFIT_EV_NODE_UP:
    case REFIT_EV_NODE_LOST:
        a->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_PART;
        a->m.part = &a->part;
        part_fill(a, r, now_ns, s);
        return 0;
    default:
        return err_set(e, RS_EINVAL, "an event of type %d is nothing that a node reports",
                       r->event.type);
    }
}

int api_report_fill(struct api_report *to, const struct node_report *from, uint64_t now_ns,
                    struct api_scratch *s, struct err *e)
{
    int r = 0;
    reshard__v1__node_report__init(&to->m);
    to->m.model = api_borrow(from->model);
    switch (from->type) {
    case NODE_REPORT_EVENT:
        r = event_fill(to, from, now_ns, s, e);
        break;
    case NODE_REPORT_PUBLISH_ASK:
        reshard__v1__publish_ask__init(&to->ask);
        to->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_PUBLISH_ASK;
        to->m.publish_ask = &to->ask;
        to->m.cookie = from->cookie;
        to->ask.worker = from->worker;
        to->ask.version = from->version;
        break;
    case NODE_REPORT_CELLS:
        if (from->n_cells > NODE_PAGE_CELLS)
            return err_set(e, RS_EINVAL, "%u cells in one report; %d are the most", from->n_cells,
                           NODE_PAGE_CELLS);
        to->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_CELLS;
        to->m.cells = &to->cells;
        cells_fill(&to->cells, from, s);
        break;
    case NODE_REPORT_CELL_SUM:
        if (from->n_runs > NODE_PAGE_CELLS)
            return err_set(e, RS_EINVAL, "%u runs of cells in one report; %d are the most",
                           from->n_runs, NODE_PAGE_CELLS);
        to->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_CELL_SUM;
        to->m.cell_sum = &to->cell_sum;
        cell_sum_fill(&to->cell_sum, from, s);
        break;
    case NODE_REPORT_COMM_ID:
        reshard__v1__comm_id__init(&to->comm_id);
        to->m.what_case = RESHARD__V1__NODE_REPORT__WHAT_COMM_ID;
        to->m.comm_id = &to->comm_id;
        to->comm_id.attempt = from->attempt;
        to->comm_id.id.data = (uint8_t *)(uintptr_t)from->comm_id;
        to->comm_id.id.len = sizeof from->comm_id;
        break;
    default:
        return err_set(e, RS_EINVAL, "a report of type %d is not known", from->type);
    }
    return r == 0 && s->failed ? err_set(e, RS_ENOMEM, "no memory for a report") : r;
}

/* --- decoding ------------------------------------------------------------------------------------ */

static int no_memory(struct err *e)
{
    return err_set(e, RS_ENOMEM, "no memory for a report");
}

static int attached_read(const Reshard__V1__AttachedEvent *from, struct node_report *r,
                         struct err *e)
{
    struct refit_event *ev = &r->event;
    if (from->side != REFIT_SOURCE && from->side != REFIT_DESTINATION)
        return err_set(e, RS_EPROTO, "attached.side: %u", from->side);
    if (from->receive > REFIT_IN_PLACE)
        return err_set(e, RS_EPROTO, "attached.receive: %u", from->receive);
    int x = api_digest_check("attached.layout", &from->layout, sizeof r->layout, e);
    if (x != 0)
        return x;
    ev->type = REFIT_EV_ATTACHED;
    ev->attached.worker = from->worker;
    ev->attached.side = (enum refit_side)from->side;
    ev->attached.layout_name = from->layout_name;
    ev->attached.rank = from->rank;
    ev->attached.receive = (enum refit_receive)from->receive;
    ev->attached.accept_automatically = from->accept_automatically;
    ev->attached.live = from->live;
    ev->attached.shadow = from->shadow;
    ev->attached.torn = from->torn;
    ev->attached.waits_for = from->waits_for;
    ev->attached.push = from->push;
    ev->attached.again = from->again;
    ev->attached.published = from->published;
    ev->attached.uncommitted = from->uncommitted;
    ev->attached.uncommitted_content = from->uncommitted_content;
    ev->attached.tells_memory = from->tells_memory;
    ev->attached.asleep = from->asleep;
    memcpy(r->layout, from->layout.data, sizeof r->layout);
    r->device = from->device;
    r->pid = from->pid;
    r->segment_bytes = from->segment_bytes;
    r->live_fold = from->live_fold;
    r->shadow_fold = from->shadow_fold;
    r->opened = from->opened;
    return 0;
}

static int prints_read(struct frame *f, const Reshard__V1__PublicationPrints *from,
                       const struct publication_print **ret, uint32_t *ret_n, struct err *e)
{
    if (from->n_tensors != from->n_fingerprints)
        return err_set(e, RS_EPROTO, "%zu tensors and %zu fingerprints", from->n_tensors,
                       from->n_fingerprints);
    struct publication_print *prints = api_frame_array(f, from->n_tensors, sizeof *prints);
    if (prints == NULL)
        return no_memory(e);
    for (size_t i = 0; i < from->n_tensors; i++)
        prints[i] = (struct publication_print){from->tensors[i], from->fingerprints[i]};
    *ret = prints;
    *ret_n = (uint32_t)from->n_tensors;
    return 0;
}

static int published_read(const Reshard__V1__PublishedEvent *from, struct frame *f, struct err *e)
{
    struct node_report *r = &f->report;
    int x = 0;
    r->event.type = REFIT_EV_PUBLISHED;
    r->event.published.worker = from->worker;
    r->event.published.version = from->version;
    r->event.published.publication = from->publication;
    r->event.published.push = from->push;
    r->has_prints = from->prints != NULL;
    if (from->prints != NULL)
        x = prints_read(f, from->prints, &r->prints, &r->n_prints, e);
    if (x == 0 && from->expected != NULL)
        x = prints_read(f, from->expected, &r->expected, &r->n_expected, e);
    return x;
}

static int folds_read(const Reshard__V1__PartEvent *from, struct frame *f, struct err *e)
{
    struct memory_fold *folds = api_frame_array(f, from->n_folds, sizeof *folds);
    int r = folds == NULL ? no_memory(e) : 0;
    for (size_t i = 0; r == 0 && i < from->n_folds; i++) {
        r = api_digest_check("fold.layout", &from->folds[i]->layout, sizeof folds[i].layout, e);
        if (r != 0)
            return r;
        memcpy(folds[i].layout, from->folds[i]->layout.data, sizeof folds[i].layout);
        folds[i].rank = from->folds[i]->rank;
        folds[i].fold = from->folds[i]->fold;
    }
    f->report.folds = folds;
    f->report.n_folds = (uint32_t)from->n_folds;
    return r;
}

static struct refit_bytes bytes_of(const Reshard__V1__Bytes *b)
{
    if (b == NULL)
        return (struct refit_bytes){0};
    return (struct refit_bytes){.landed = b->landed,
                                .network = b->network,
                                .domain = b->domain,
                                .device = b->device,
                                .skipped = b->skipped,
                                .total = b->total,
                                .network_minimum = b->network_minimum};
}

static int part_read(const Reshard__V1__PartEvent *from, uint64_t now_ns, struct frame *f,
                     struct err *e)
{
    struct refit_event *ev = &f->report.event;
    if ((from->type < REFIT_EV_PREPARED || from->type > REFIT_EV_NODE_LOST))
        return err_set(e, RS_EPROTO, "part.type: %u", from->type);
    if (from->data_port > UINT16_MAX)
        return err_set(e, RS_EPROTO, "part.data_port: %u", from->data_port);
    ev->type = (enum refit_event_type)from->type;
    ev->node.attempt = from->attempt;
    ev->node.code = from->code;
    ev->node.text = from->text;
    ev->node.worker = from->worker;
    ev->node.committed = from->committed;
    ev->node.bytes = bytes_of(from->bytes);
    ev->node.first_byte_ns = api_time_of_age(from->first_byte_age_ns, now_ns);
    ev->node.last_byte_ns = api_time_of_age(from->last_byte_age_ns, now_ns);
    ev->node.sources_read_ns = api_time_of_age(from->sources_read_age_ns, now_ns);
    ev->node.verified_ns = api_time_of_age(from->verified_age_ns, now_ns);
    ev->node.sources_known = from->sources_known != 0;
    f->report.data_port = (uint16_t)from->data_port;
    ev->node.data_plane = from->data_plane;
    f->report.landed = from->landed.len > 0 ? from->landed.data : NULL;
    f->report.n_landed_bytes = (uint32_t)from->landed.len; /* of a message of FRAME_MAX_BYTES */
    return folds_read(from, f, e);
}
_Static_assert(REFIT_EV_NODE_LOST - REFIT_EV_PREPARED == 6, "PartEvent's types stand in a row");

static int cells_read(const Reshard__V1__CellPrints *from, struct frame *f, struct err *e)
{
    struct node_report *r = &f->report;
    if (from->n_cells != from->n_fingerprints || from->n_cells != from->n_layouts ||
        from->n_cells != from->n_ranks)
        return err_set(e, RS_EPROTO, "columns of cells differ in length");
    struct cell_print *cells = api_frame_array(f, from->n_cells, sizeof *cells);
    if (cells == NULL)
        return no_memory(e);
    for (size_t i = 0; i < from->n_cells; i++)
        cells[i] = (struct cell_print){from->cells[i], from->fingerprints[i], from->layouts[i],
                                       from->ranks[i]};
    r->type = NODE_REPORT_CELLS;
    r->attempt = from->attempt;
    r->cells = cells;
    r->n_cells = (uint32_t)from->n_cells;
    return 0;
}

static int cell_sum_read(const Reshard__V1__CellSum *from, struct frame *f, struct err *e)
{
    struct node_report *r = &f->report;
    if (from->n_cells != from->n_lengths)
        return err_set(e, RS_EPROTO, "columns of runs of cells differ in length");
    int x = api_digest_check("cell_sum.digest", &from->digest, sizeof r->digest, e);
    if (x != 0)
        return x;
    struct cell_run *runs = api_frame_array(f, from->n_cells, sizeof *runs);
    if (runs == NULL)
        return no_memory(e);
    for (size_t i = 0; i < from->n_cells; i++)
        runs[i] = (struct cell_run){from->cells[i], from->lengths[i]};
    r->type = NODE_REPORT_CELL_SUM;
    r->attempt = from->attempt;
    r->runs = runs;
    r->n_runs = (uint32_t)from->n_cells;
    memcpy(r->digest, from->digest.data, sizeof r->digest);
    return 0;
}

static int comm_id_read(const Reshard__V1__CommId *from, struct node_report *r, struct err *e)
{
    int x = api_digest_check("comm_id.id", &from->id, sizeof r->comm_id, e);
    if (x != 0)
        return x;
    r->type = NODE_REPORT_COMM_ID;
    r->event.cookie = 0;
    r->attempt = from->attempt;
    memcpy(r->comm_id, from->id.data, sizeof r->comm_id);
    return 0;
}

static int small_read(const Reshard__V1__NodeReport *m, struct refit_event *ev, struct err *e)
{
    switch (m->what_case) {
    case RESHARD__V1__NODE_REPORT__WHAT_LEFT:
        ev->type = REFIT_EV_LEFT;
        ev->left.worker = m->left->worker;
        ev->left.for_good = m->left->for_good;
        ev->left.reason = m->left->reason;
        return 0;
    case RESHARD__V1__NODE_REPORT__WHAT_SLEPT:
        ev->type = REFIT_EV_SLEPT;
        ev->left.worker = m->slept->worker;
        return 0;
    case RESHARD__V1__NODE_REPORT__WHAT_WITHDRAW:
        ev->type = REFIT_EV_WITHDRAW;
        ev->withdraw.worker = m->withdraw->worker;
        ev->withdraw.version = m->withdraw->version;
        ev->withdraw.push = m->withdraw->push;
        ev->withdraw.again = m->withdraw->again;
        ev->withdraw.reason = m->withdraw->reason;
        return 0;
    case RESHARD__V1__NODE_REPORT__WHAT_READY:
        ev->type = REFIT_EV_READY;
        ev->ready.worker = m->ready->worker;
        ev->ready.version = m->ready->version;
        return 0;
    case RESHARD__V1__NODE_REPORT__WHAT_VERDICT:
        ev->type = REFIT_EV_VERDICT;
        ev->verdict.worker = m->verdict->worker;
        ev->verdict.version = m->verdict->version;
        ev->verdict.attempt = m->verdict->attempt;
        ev->verdict.accept = m->verdict->accept;
        ev->verdict.reason = m->verdict->reason;
        return 0;
    case RESHARD__V1__NODE_REPORT__WHAT_APPLY:
        ev->type = REFIT_EV_APPLY;
        ev->apply.worker = m->apply->worker;
        ev->apply.version = m->apply->version;
        ev->apply.skip = m->apply->skip;
        return 0;
    case RESHARD__V1__NODE_REPORT__WHAT_APPLIED:
        ev->type = REFIT_EV_APPLIED;
        ev->applied.worker = m->applied->worker;
        ev->applied.version = m->applied->version;
        ev->applied.code = m->applied->code;
        ev->applied.text = m->applied->text;
        return 0;
    case RESHARD__V1__NODE_REPORT__WHAT_MARK:
        ev->type = REFIT_EV_MARK;
        ev->mark.version = m->mark->version;
        ev->mark.name = m->mark->name;
        ev->mark.worker = m->mark->worker;
        return 0;
    default:
        return err_set(e, RS_EPROTO, "a report of a kind that is not known");
    }
}

int api_report_read(const Reshard__V1__NodeReport *from, uint64_t now_ns, struct frame *ret,
                    struct err *e)
{
    struct node_report *r = &ret->report;
    r->type = NODE_REPORT_EVENT;
    r->model = from->model;
    r->event.cookie = from->cookie;
    switch (from->what_case) {
    case RESHARD__V1__NODE_REPORT__WHAT_ATTACHED:
        return attached_read(from->attached, r, e);
    case RESHARD__V1__NODE_REPORT__WHAT_PUBLISHED:
        return published_read(from->published, ret, e);
    case RESHARD__V1__NODE_REPORT__WHAT_PART:
        return part_read(from->part, now_ns, ret, e);
    case RESHARD__V1__NODE_REPORT__WHAT_CELLS:
        r->event.cookie = 0;
        return cells_read(from->cells, ret, e);
    case RESHARD__V1__NODE_REPORT__WHAT_CELL_SUM:
        r->event.cookie = 0;
        return cell_sum_read(from->cell_sum, ret, e);
    case RESHARD__V1__NODE_REPORT__WHAT_COMM_ID:
        return comm_id_read(from->comm_id, r, e);
    case RESHARD__V1__NODE_REPORT__WHAT_PUBLISH_ASK:
        r->type = NODE_REPORT_PUBLISH_ASK;
        r->event.cookie = 0;
        r->cookie = from->cookie;
        r->worker = from->publish_ask->worker;
        r->version = from->publish_ask->version;
        return 0;
    default:
        return small_read(from, &r->event, e);
    }
}
