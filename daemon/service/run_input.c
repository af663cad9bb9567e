/* The input of an attempt: who takes part by the decider, on which devices, with which options. */
#include <string.h>

#include "base/mem.h"
#include "exec/wire.h"
#include "service/attempt_input.h"
#include "service/coordinator.h"
#include "service/nodes.h"
#include "service/options.h"

#include "base/banned.h"

/* --- options ------------------------------------------------------------------------------------ */

static int rules_take(struct attempt_input *in, const struct options *from)
{
    struct plan_rule *rules = mem_calloc(from->n_rules, sizeof *rules);
    in->options.rules = rules;
    if (rules == NULL)
        return RS_ENOMEM;
    for (; in->options.n_rules < from->n_rules; in->options.n_rules++) {
        const struct plan_rule *rule = &from->rules[in->options.n_rules];
        rules[in->options.n_rules].strategy = rule->strategy;
        if ((rules[in->options.n_rules].glob = mem_strdup(rule->glob)) == NULL)
            return RS_ENOMEM;
    }
    return 0;
}

static uint32_t verify_default(const struct config *c)
{
    return c->verify[0] == 'f'   ? WIRE_VERIFY_FULL
           : c->verify[0] == 's' ? WIRE_VERIFY_SAMPLED
                                 : WIRE_VERIFY_OFF;
}

static int options_fill(const struct config *c, const struct refit_version *v,
                        struct attempt_input *in, struct err *e)
{
    struct options options;
    int r = options_read(v->options, v->n_options_bytes, &options, e);
    if (r != 0)
        return r;
    in->options = plan_options_default();
    in->options.rules = NULL;
    in->options.n_rules = 0;
    (void)plan_strategy_parse(c->strategy, &in->options.strategy); /* checked when it was read */
    if (options.has_strategy)
        in->options.strategy = options.strategy;
    in->options.relay = c->relay;
    in->options.staging_ingest = c->staging_ingest;
    in->options.least_piece_bytes = c->least_piece_bytes;
    in->options.chunk_bytes = c->chunk_bytes;
    in->options.ring_slots = c->ring_slots;
    static const uint32_t modes[] = {[OPTIONS_VERIFY_OFF] = WIRE_VERIFY_OFF,
                                     [OPTIONS_VERIFY_SAMPLED] = WIRE_VERIFY_SAMPLED,
                                     [OPTIONS_VERIFY_FULL] = WIRE_VERIFY_FULL};
    in->verify =
        options.verify == OPTIONS_VERIFY_DEFAULT ? verify_default(c) : modes[options.verify];
    r = rules_take(in, &options);
    options_close(&options);
    return r == 0 ? 0 : err_set(e, r, "no memory to plan");
}

/* --- layouts and workers ------------------------------------------------------------------------ */

/* A worker of it has that role. */
static bool layout_has(const struct decider *d, const struct refit_layout *l, enum refit_role role)
{
    for (uint32_t i = 0; i < l->n_ranks; i++) {
        const struct refit_worker *w = l->worker_of_rank[i];
        if (w != NULL && !w->gone && refit_worker_role(d->refit, w) == role &&
            roster_find(d, w->id) != NULL)
            return true;
    }
    return false;
}

/* What it feeds is in its shadow memory. */
static bool feeds_shadow(const struct decider *d, const struct roster_entry *r)
{
    const struct refit_worker *w = refit_find_worker(d->refit, r->worker);
    return w->feeding == REFIT_FEED_RECEIVING && w->receive == REFIT_STAGED_RECEIVE;
}

/* All of one layout and role, in the order of their ranks. A digest that two layouts share is one layout to the plan. */
static void participants_put(const struct decider *d, struct attempt_input *in,
                             const uint8_t digest[16], enum refit_role role, uint32_t index,
                             struct participant *to)
{
    uint32_t first = in->n_participants;
    queue_foreach (q, &d->roster) {
        const struct roster_entry *r = container_of(q, struct roster_entry, in);
        if (roster_role(d, r) != role || memcmp(r->layout->layout->digest, digest, 16) != 0)
            continue;
        uint32_t at = in->n_participants++;
        for (; at > first && to[at - 1].rank > r->rank; at--)
            to[at] = to[at - 1];
        to[at] = (struct participant){.worker = r->worker,
                                      .node = r->node,
                                      .device = r->device,
                                      .layout = index,
                                      .rank = r->rank,
                                      .shadow = role == REFIT_ROLE_SENDS && feeds_shadow(d, r)};
    }
}

/* The trainer's, or that of the destination workers that feed. */
static const struct refit_layout *source_of(const struct decider *d)
{
    if (d->refit->feed_layout != NULL)
        return layout_has(d, d->refit->feed_layout, REFIT_ROLE_SENDS) ? d->refit->feed_layout
                                                                      : NULL;
    queue_foreach (q, &d->refit->layouts) {
        const struct refit_layout *l = container_of(q, struct refit_layout, link);
        if (l->side == REFIT_SOURCE && layout_has(d, l, REFIT_ROLE_SENDS))
            return l;
    }
    return NULL;
}

static bool has_destination(const struct attempt_input *in, const uint8_t digest[16])
{
    for (uint32_t i = 0; i < in->n_destinations; i++)
        if (memcmp(in->destinations[i], digest, 16) == 0)
            return true;
    return false;
}

static size_t roster_length(const struct decider *d)
{
    size_t n = 0;
    queue_foreach (q, &d->roster)
        n++;
    return n;
}

/* The source, then the destinations in the decider's order, so that the same members give the same plan. */
static int participants_fill(const struct decider *d, struct attempt_input *in, struct err *e)
{
    const struct refit_layout *source = source_of(d);
    struct participant *participants = mem_calloc(roster_length(d), sizeof *participants);
    uint8_t(*destinations)[16] = mem_calloc(REFIT_MAX_LAYOUTS, sizeof *destinations);
    in->participants = participants;
    in->destinations = (const uint8_t(*)[16])destinations;
    if (participants == NULL || destinations == NULL)
        return err_set(e, RS_ENOMEM, "no memory to plan");
    if (source == NULL)
        return err_set(e, RS_EPRECOND, "no source worker takes part");
    memcpy(in->source, source->digest, sizeof in->source);
    participants_put(d, in, source->digest, REFIT_ROLE_SENDS, 0, participants);
    queue_foreach (q, &d->refit->layouts) {
        const struct refit_layout *l = container_of(q, struct refit_layout, link);
        if (l->side != REFIT_DESTINATION || has_destination(in, l->digest) ||
            !layout_has(d, l, REFIT_ROLE_RECEIVES))
            continue;
        memcpy(destinations[in->n_destinations++], l->digest, 16);
        participants_put(d, in, l->digest, REFIT_ROLE_RECEIVES, in->n_destinations, participants);
    }
    return in->n_destinations > 0 ? 0 : err_set(e, RS_EPRECOND, "no destination worker takes part");
}

/* --- who feeds ---------------------------------------------------------------------------------- */

static int feed_tensors_check(const struct layout *feed, const struct layout *to, struct err *e)
{
    for (uint32_t i = 0; i < to->n_tensors; i++) {
        int64_t t = layout_find(feed, to->tensors[i].name);
        if (to->tensors[i].derived_from != NULL)
            return err_set(
                e, RS_EPRECOND,
                "tensor '%s' of layout '%s' is derived from weights that only the trainer has; "
                "let it publish again",
                to->tensors[i].name, to->name);
        if (t >= 0 && feed->tensors[t].dtype != to->tensors[i].dtype)
            return err_set(
                e, RS_EPRECOND,
                "tensor '%s': layout '%s' has it in another dtype than layout '%s', which "
                "could feed it: it would be cast twice; let the trainer publish again",
                to->tensors[i].name, to->name, feed->name);
    }
    return layout_check_pair(feed, to, e);
}

/* Whether what a destination layout has is all that the others need. RS_EPRECOND: the decider tries another one. */
static int feed_check(const struct decider *d, const struct attempt_input *in, struct err *e)
{
    struct layouts *layouts = &d->coordinator->service->layouts;
    const struct layout_entry *feed = layouts_find(layouts, in->source);
    for (uint32_t i = 0; feed != NULL && i < in->n_destinations; i++) {
        const struct layout_entry *to = layouts_find(layouts, in->destinations[i]);
        int r = to != NULL ? feed_tensors_check(feed->layout, to->layout, e) : 0;
        if (r != 0)
            return r;
    }
    return 0; /* one that is not here is named when it is planned */
}

/* --- nodes -------------------------------------------------------------------------------------- */

static int nodes_fill(struct decider *d, struct attempt_input *in, struct err *e)
{
    struct coordinator *c = d->coordinator;
    bool *takes_part = mem_calloc(c->n_nodes, sizeof *takes_part);
    uint32_t *nodes = mem_calloc(c->n_nodes, sizeof *nodes);
    uint32_t n = 0;
    in->nodes = nodes;
    if (takes_part == NULL || nodes == NULL) {
        mem_free(takes_part);
        return err_set(e, RS_ENOMEM, "no memory to plan");
    }
    for (uint32_t i = 0; i < in->n_participants; i++)
        takes_part[in->participants[i].node] = true;
    for (uint32_t i = 0; i < c->n_nodes; i++)
        if (takes_part[i])
            nodes[n++] = i;
    mem_free(takes_part);
    in->topology = nodes_topology(c, nodes, n);
    return in->topology != NULL ? 0 : err_set(e, RS_ENOMEM, "no memory for the topology");
}

int attempt_input_make(struct decider *d, const struct refit_version *v, struct attempt_input **ret,
                       struct err *e)
{
    struct attempt_input *in = mem_zalloc(sizeof *in);
    if (in == NULL)
        return err_set(e, RS_ENOMEM, "no memory to plan");
    int r = options_fill(d->coordinator->service->config, v, in, e);
    if (r == 0)
        r = participants_fill(d, in, e);
    if (r == 0 && d->refit->feed_layout != NULL)
        r = feed_check(d, in, e);
    if (r == 0)
        r = nodes_fill(d, in, e);
    if (r == 0 && (r = attempt_input_check(in, e)) != 0)
        (void)err_prefix(e, r, "a worker sits on a device that its node has not");
    if (r != 0) {
        attempt_input_free(in);
        return r;
    }
    *ret = in;
    return 0;
}
