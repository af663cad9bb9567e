/* An attempt's plan, made by the real planner, and memory by the element. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/random.h"
#include "plan/planner.h"
#include "test/sim/world.h"

/* --- layouts and topology --- */

static uint64_t mask(uint64_t from, uint64_t n)
{
    return (n >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1) << from;
}

/* The elements of a box of tensor t, whose first has number `base`. Tensors here have one or two dims. */
static uint64_t box_mask(const struct tensor *t, const struct box *b, uint64_t base)
{
    if (t->n_dims == 1)
        return mask(base + b->offset[0], b->size[0]);
    uint64_t m = 0;
    for (uint64_t row = 0; row < b->size[0] && b->size[1] > 0; row++)
        m |= mask(base + (b->offset[0] + row) * t->shape[1] + b->offset[1], b->size[1]);
    return m;
}

static void layout_make(struct world *w, struct layout_truth *l, const uint64_t *sizes,
                        const int *shard_dims, uint32_t outer)
{
    char text[1024], ranks[64] = "", instances[128] = "";
    uint32_t inner = l->n_ranks / outer, each = l->n_ranks / l->n_instances;
    for (uint32_t r = 0; r < l->n_ranks; r++) {
        size_t at = strlen(ranks);
        (void)snprintf(ranks + at, sizeof ranks - at, "%s%u", r == 0 ? "" : ",", r);
        at = strlen(instances);
        (void)snprintf(instances + at, sizeof instances - at, "%s%u%s",
                       r == 0          ? "["
                       : r % each == 0 ? "],["
                                       : ",",
                       r, r == l->n_ranks - 1 ? "]" : "");
    }
    (void)snprintf(text, sizeof text,
                   "{\"name\":\"%s\",\"ranks\":%u,\"instances\":[%s],\"meshes\":[{\"name\":\"m\","
                   "\"shape\":[%u,%u],\"ranks\":[%s]}],\"tensors\":["
                   "{\"name\":\"v\",\"shape\":[%llu],\"dtype\":\"float32\",\"mesh\":\"m\","
                   "\"placements\":[\"Replicate\",\"%s\"]},"
                   "{\"name\":\"w\",\"shape\":[%llu,%llu],\"dtype\":\"float32\",\"mesh\":\"m\","
                   "\"placements\":[\"Replicate\",\"Shard(%d)\"]}]}",
                   l->name, l->n_ranks, instances, outer, inner, ranks,
                   (unsigned long long)sizes[0], shard_dims[0] < 0 ? "Replicate" : "Shard(0)",
                   (unsigned long long)sizes[1], (unsigned long long)sizes[2], shard_dims[1]);
    struct err e = {0};
    if (layout_from_json(text, strlen(text), &l->layout, &e) != 0 || layout_digest(l->layout) != 0)
        world_fail(w, "layout %s: %s", text, e.text);
    uint64_t base = 0;
    for (uint32_t t = 0; t < l->layout->n_tensors; t++) {
        const struct tensor *tensor = &l->layout->tensors[t];
        w->base[t] = base;
        for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
            struct box boxes[4];
            uint32_t n = layout_shards(l->layout, t, rank, boxes, 4);
            for (uint32_t i = 0; i < n; i++)
                l->owned[rank] |= box_mask(tensor, &boxes[i], base);
        }
        base += tensor->n_dims == 1 ? tensor->shape[0] : tensor->shape[0] * tensor->shape[1];
    }
    w->n_elements = (uint32_t)base;
}

static void topology_make(struct world *w)
{
    static char name[MAX_NODES][4] = {"n0", "n1", "n2", "n3"};
    static char *names[MAX_NODES] = {name[0], name[1], name[2], name[3]};
    struct topology *t = &w->topology;
    *t = (struct topology){.nodes = names,
                           .n_nodes = w->n_nodes,
                           .domains = names,
                           .n_domains = w->n_nodes,
                           .devices = calloc(MAX_WORKERS, sizeof *t->devices)};
    rs_assert(t->devices != NULL);
    bool one_domain = world_chance(w, 0.3);
    for (uint32_t n = 0; n < w->n_nodes; n++)
        for (uint32_t i = 0, local = 0; i < w->n_workers; i++)
            if (w->workers[i].node == n) {
                w->workers[i].device = (int32_t)t->n_devices;
                t->devices[t->n_devices++] = (struct device_place){
                    .node = n, .local = local++, .domain = one_domain ? 0 : n};
            }
    if (one_domain)
        t->n_domains = 1;
}

void trial_layouts(struct world *w)
{
    uint64_t sizes[3] = {1 + world_random(w, 9), 1 + world_random(w, 6), 1 + world_random(w, 5)};
    for (uint32_t i = 0; i < w->n_layouts; i++) {
        struct layout_truth *l = &w->layouts[i];
        int dims[2] = {world_chance(w, 0.2) ? -1 : 0, (int)world_random(w, 2)};
        bool halves = l->side == REFIT_SOURCE && l->n_ranks % 2 == 0 && world_chance(w, 0.4);
        layout_make(w, l, sizes, dims, halves ? 2 : l->n_instances);
    }
    topology_make(w);
}

void trial_layouts_close(struct world *w)
{
    for (uint32_t i = 0; i < w->n_layouts; i++)
        layout_free(w->layouts[i].layout);
    free(w->topology.devices);
}

/* --- memory --- */

uint32_t world_value(uint64_t salt, uint32_t element)
{
    uint64_t state = salt * 1000 + element;
    return (uint32_t)random_next(&state) | 1;
}

uint64_t worker_owned(const struct world *w, const struct worker *worker)
{
    return w->layouts[worker->layout].owned[worker->rank];
}

struct memory *worker_receiving(struct worker *worker)
{
    return worker->receive == REFIT_STAGED_RECEIVE ? &worker->shadow : &worker->live;
}

/* Salt 0: what a trainer writes that no version has. */
void worker_scribble(struct world *w, struct worker *worker, uint64_t salt)
{
    worker->salt = salt;
    for (uint32_t i = 0; i < w->n_elements; i++)
        if (worker_owned(w, worker) >> i & 1)
            worker->live.element[i] = salt == 0 ? 0xDEADBEE0U : world_value(salt, i);
}

bool memory_whole(const struct world *w, const struct worker *worker, const struct memory *m)
{
    uint64_t owned = worker_owned(w, worker);
    return m->version != 0 && (m->got & owned) == owned;
}

static bool same_elements(const uint32_t *a, const uint32_t *b, uint64_t elements)
{
    for (uint32_t i = 0; i < MAX_ELEMENTS; i++)
        if ((elements >> i & 1) != 0 && a[i] != b[i])
            return false;
    return true;
}

bool memory_is_committed(struct world *w, const struct worker *worker, const struct memory *m)
{
    const struct version_truth *v;
    if (!memory_whole(w, worker, m))
        return false;
    v = world_version(w, m->version);
    return v->committed && same_elements(m->element, v->expected, worker_owned(w, worker));
}

/* --- the plan --- */

struct trial *trial_find(struct world *w, uint64_t attempt)
{
    struct trial *t = &w->trials[attempt % MAX_TRIALS];
    return attempt != 0 && t->attempt == attempt ? t : NULL;
}

struct taking {
    struct world *w;
    struct trial *t;
    int32_t sources[MAX_RANKS], destinations[MAX_LAYOUTS][MAX_RANKS];
    const struct layout_truth *source, *layouts[MAX_LAYOUTS];
    const struct layout *layout_pointers[MAX_LAYOUTS];
    const int32_t *device_pointers[MAX_LAYOUTS];
    uint32_t n_layouts;
};

static uint32_t worker_at(const struct taking *k, const struct plan_end *end)
{
    const struct layout_truth *l = end->side == SIDE_SOURCE ? k->source : k->layouts[end->layout];
    for (uint32_t i = 0; i < k->w->n_workers; i++)
        if (&k->w->layouts[k->w->workers[i].layout] == l && k->w->workers[i].rank == end->rank)
            return i;
    world_fail(k->w, "the plan names a rank that nobody has");
}

static int take_move(const struct plan_transfer *p, void *arg)
{
    struct taking *k = arg;
    struct trial *t = k->t;
    if (t->n_moves >= MAX_MOVES || p->n_after > 8 || p->id != t->n_moves ||
        p->from.side == SIDE_STAGING || p->to.side == SIDE_STAGING)
        world_fail(k->w, "transfer %llu is more than the world can model",
                   (unsigned long long)p->id);
    struct move *m = &t->moves[t->n_moves++];
    const struct tensor *tensor = &k->source->layout->tensors[p->tensor];
    *m = (struct move){.from = worker_at(k, &p->from),
                       .to = worker_at(k, &p->to),
                       .elements = box_mask(tensor, &p->box, k->w->base[p->tensor]),
                       .n_after = p->n_after};
    for (uint32_t i = 0; i < p->n_after; i++)
        m->after[i] = (uint32_t)p->after[i];
    if (p->from.side == SIDE_SOURCE)
        m->feeding = refit_find_worker(k->w->refit, t->worker[m->from])->feeding;
    else
        m->feeding = REFIT_FEED_RECEIVING; /* a relay */
    return 0;
}

/* Who sends and who receives, by the decider. */
static void take_roles(struct taking *k)
{
    struct world *w = k->w;
    int32_t index[MAX_LAYOUTS];
    for (uint32_t l = 0; l < MAX_LAYOUTS; l++) {
        index[l] = -1;
        for (uint32_t r = 0; r < MAX_RANKS; r++)
            k->sources[r] = k->destinations[l][r] = TOPOLOGY_ABSENT;
    }
    for (struct queue *q = w->refit->workers.next; q != &w->refit->workers; q = q->next) {
        const struct refit_worker *r = container_of(q, struct refit_worker, link);
        uint32_t i = world_index(w, r);
        const struct worker *worker = &w->workers[i];
        if (refit_worker_role(w->refit, r) == REFIT_ROLE_NONE)
            continue;
        if (r->asleep)
            world_fail(w, "attempt %llu is planned with worker %u, which sleeps",
                       (unsigned long long)k->t->attempt, i);
        k->t->worker[i] = r->id;
        k->t->role[i] = refit_worker_role(w->refit, r);
        k->t->held[i] = refit_holds_already(w->refit, r);
        if (k->t->role[i] == REFIT_ROLE_SENDS) {
            k->source = &w->layouts[worker->layout];
            k->sources[worker->rank] = worker->device;
        }
        if (k->t->role[i] != REFIT_ROLE_RECEIVES)
            continue;
        if (index[worker->layout] < 0) {
            index[worker->layout] = (int32_t)k->n_layouts;
            k->layouts[k->n_layouts] = &w->layouts[worker->layout];
            k->layout_pointers[k->n_layouts] = w->layouts[worker->layout].layout;
            k->device_pointers[k->n_layouts] = k->destinations[k->n_layouts];
            k->n_layouts++;
        }
        k->destinations[index[worker->layout]][worker->rank] = worker->device;
    }
}

/* What ought to arrive: what the trainer has published, or what the version was when it moved before. */
static void expect(struct taking *k)
{
    struct world *w = k->w;
    struct trial *t = k->t;
    struct version_truth *v = world_version(w, t->version);
    uint64_t known = 0;
    if (w->refit->feed_layout != NULL && t->kind == REFIT_KIND_CATCH_UP) {
        memcpy(t->expected, v->expected, sizeof t->expected);
        return;
    }
    for (uint32_t i = 0; i < v->n_contents && w->refit->feed_layout != NULL; i++)
        if (v->contents[i].number == t->content) {
            memcpy(t->expected, v->contents[i].expected, sizeof t->expected);
            return;
        }
    if (w->refit->feed_layout != NULL)
        world_fail(w, "attempt %llu is fed a content that was never moved",
                   (unsigned long long)t->attempt);
    for (uint32_t i = 0; i < w->n_workers; i++) {
        const struct worker *worker = &w->workers[i];
        if (w->layouts[worker->layout].side != REFIT_SOURCE || t->role[i] != REFIT_ROLE_SENDS)
            continue;
        /* A publication's number is the salt; it may have died meanwhile, or trained on. */
        uint64_t salt = refit_find_worker(w->refit, t->worker[i])->publication;
        for (uint32_t e = 0; e < w->n_elements; e++) {
            if ((worker_owned(w, worker) >> e & 1) == 0)
                continue;
            uint32_t value = world_value(salt, e);
            t->disagree |= (known >> e & 1) != 0 && t->expected[e] != value;
            t->expected[e] = value;
            known |= UINT64_C(1) << e;
        }
    }
}

/* The same number names the same content. */
static void note_content(struct world *w, const struct trial *t)
{
    struct version_truth *v = world_version(w, t->version);
    if (t->content == 0 || t->disagree || t->kind == REFIT_KIND_REHEARSAL)
        return;
    for (uint32_t i = 0; i < v->n_contents; i++)
        if (v->contents[i].number == t->content) {
            if (!same_elements(v->contents[i].expected, t->expected, mask(0, w->n_elements)))
                world_fail(w, "content %llx of version %llu is two contents",
                           (unsigned long long)t->content, (unsigned long long)t->version);
            return;
        }
    if (v->n_contents == MAX_CONTENTS)
        world_fail(w, "version %llu has too many contents", (unsigned long long)t->version);
    v->contents[v->n_contents].number = t->content;
    memcpy(v->contents[v->n_contents++].expected, t->expected, sizeof t->expected);
}

int trial_plan(struct world *w, const struct refit_action *a, struct trial **ret)
{
    struct trial *t = &w->trials[a->attempt % MAX_TRIALS];
    *t = (struct trial){.attempt = a->attempt, .version = a->version, .kind = a->kind};
    struct taking k = {.w = w, .t = t};
    struct plan *plan = NULL;
    struct err e = {0};
    t->content = w->refit->publication;
    take_roles(&k);
    if (k.source == NULL || k.n_layouts == 0)
        world_fail(w, "attempt %llu is planned with nobody to %s", (unsigned long long)a->attempt,
                   k.source == NULL ? "send" : "receive");
    for (uint32_t r = k.source->n_ranks; r < MAX_RANKS; r++)
        k.sources[r] = TOPOLOGY_NONE;
    struct plan_input input = {.source = k.source->layout,
                               .source_device = k.sources,
                               .n_destinations = k.n_layouts,
                               .destinations = k.layout_pointers,
                               .destination_device = k.device_pointers,
                               .topology = &w->topology,
                               .options = plan_options_default()};
    input.options.staging_ingest = false;
    int rc = plan_make(&input, &plan, &e);
    if (rc != 0)
        return rc;
    memcpy(t->digest, plan_totals(plan)->digest, sizeof t->digest);
    rc = plan_transfers(plan, -1, take_move, &k);
    plan_free(plan);
    rs_assert(rc == 0);
    expect(&k);
    note_content(w, t);
    wrong_plan(w, t);
    *ret = t;
    return 0;
}

/* --- bytes --- */

static bool here(const struct world *w, const struct trial *t, uint32_t worker, uint32_t node)
{
    return w->workers[worker].node == node && t->role[worker] != REFIT_ROLE_NONE;
}

void trial_open(struct world *w, struct trial *t, uint32_t node)
{
    for (uint32_t i = 0; i < w->n_workers; i++) {
        struct worker *worker = &w->workers[i];
        if (!here(w, t, i, node) || t->role[i] != REFIT_ROLE_RECEIVES ||
            worker->id != t->worker[i] || !worker->attached) /* dead: that is on its way */
            continue;
        struct memory *m = worker_receiving(worker);
        /* Wrong bytes of an attempt that ended for another reason may not have been compared yet. */
        bool unknown = m->wrong_of != 0 && !wrong_told(w, m);
        if (t->held[i] && !worker->asleep && /* since a moment ago: the decider does not know yet */
            (!memory_whole(w, worker, m) || m->version != t->version ||
             (!unknown && !same_elements(m->element, t->expected, worker_owned(w, worker)))))
            world_fail(w, "worker %u is skipped, but does not hold version %llu as published", i,
                       (unsigned long long)t->version);
        t->opened[i] = true;
        bool same = m->version == t->version && m->content == t->content && t->content != 0 &&
                    !wrong_told(w, m);
        if (!same && !t->held[i])
            *m = (struct memory){.version = t->version, .content = t->content};
        m->vouched &= t->held[i];
    }
    /* What has landed of an earlier attempt with the same content is not moved again. */
    for (uint32_t i = 0; i < t->n_moves; i++) {
        struct move *m = &t->moves[i];
        if (!here(w, t, m->to, node))
            continue;
        m->landed = (worker_receiving(&w->workers[m->to])->got & m->elements) == m->elements;
        w->n_reused += m->landed;
    }
}

/* The other end of a transfer moves too. */
static bool sender_is_ready(const struct world *w, const struct trial *t, const struct move *m)
{
    const struct worker *from = &w->workers[m->from];
    const struct node *n = &w->nodes[from->node];
    return n->attempt == t->attempt && n->started && node_may_move(w, n) && from->attached &&
           from->id == t->worker[m->from];
}

static bool is_after_all(const struct trial *t, const struct move *m)
{
    for (uint32_t i = 0; i < m->n_after; i++)
        if (!t->moves[m->after[i]].landed)
            return false;
    return true;
}

static void land(struct world *w, struct trial *t, struct move *m)
{
    struct worker *to = &w->workers[m->to];
    const struct node *n = &w->nodes[to->node];
    struct worker *from = &w->workers[m->from];
    struct memory *at = worker_receiving(to);
    const struct memory *of = w->layouts[from->layout].side == REFIT_SOURCE ? &from->live
                              : m->feeding == REFIT_FEED_LIVE               ? &from->live
                                                              : worker_receiving(from);
    if (t->attempt != w->last_planned_attempt && w->refit != NULL)
        world_fail(w, "a byte of attempt %llu lands, %llu is planned",
                   (unsigned long long)t->attempt, (unsigned long long)w->last_planned_attempt);
    if (n->attempt != t->attempt || !member_moves(&n->member) || n->member.attempt != t->attempt ||
        !node_may_move(w, n))
        world_fail(w, "a byte of attempt %llu lands on node %u, which has let go of it",
                   (unsigned long long)t->attempt, to->node);
    if (!t->opened[m->to])
        world_fail(w, "a byte lands in memory that was not opened");
    for (uint32_t e = 0; e < w->n_elements; e++)
        if (m->elements >> e & 1) {
            at->element[e] = of->element[e];
            wrong_land(t, m, e, at);
        }
    at->got |= m->elements;
    m->landed = true;
    w->n_moved++;
    w->n_fed += w->layouts[from->layout].side == REFIT_DESTINATION && m->n_after == 0;
}

bool trial_move(struct world *w, struct trial *t, uint32_t node)
{
    bool any = false;
    for (uint32_t i = 0; i < t->n_moves; i++) {
        struct move *m = &t->moves[i];
        if (m->landed || w->workers[m->to].node != node || !world_chance(w, 0.5) ||
            !is_after_all(t, m) || !sender_is_ready(w, t, m) || !w->workers[m->to].attached ||
            w->workers[m->to].id != t->worker[m->to])
            continue;
        land(w, t, m);
        any = true;
    }
    return any;
}

bool trial_read(const struct world *w, const struct trial *t, uint32_t node)
{
    for (uint32_t i = 0; i < t->n_moves; i++) {
        const struct worker *from = &w->workers[t->moves[i].from];
        if (!t->moves[i].landed && from->node == node)
            return false;
    }
    return true;
}

bool trial_done(const struct world *w, const struct trial *t, uint32_t node)
{
    for (uint32_t i = 0; i < t->n_moves; i++)
        if (!t->moves[i].landed &&
            (w->workers[t->moves[i].from].node == node || w->workers[t->moves[i].to].node == node))
            return false;
    return true;
}
