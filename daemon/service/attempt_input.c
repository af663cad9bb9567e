#include "service/attempt_input.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "service/mix.h"

#include "base/banned.h"

/* --- topologies --------------------------------------------------------------------------------- */

static char **names_copy(char *const *from, uint32_t n, uint32_t *ret_n)
{
    char **names = mem_calloc(n, sizeof(char *));
    for (; names != NULL && *ret_n < n; (*ret_n)++)
        if ((names[*ret_n] = mem_strdup(from[*ret_n])) == NULL)
            break;
    return names;
}

struct topology *topology_copy(const struct topology *from)
{
    struct topology *t = mem_zalloc(sizeof *t);
    if (t == NULL)
        return NULL;
    t->nodes = names_copy(from->nodes, from->n_nodes, &t->n_nodes);
    t->domains = names_copy(from->domains, from->n_domains, &t->n_domains);
    t->devices = mem_calloc(from->n_devices, sizeof *t->devices);
    if (t->devices != NULL && from->n_devices > 0) {
        memcpy(t->devices, from->devices, from->n_devices * sizeof *t->devices);
        t->n_devices = from->n_devices;
    }
    t->network_bytes_per_s = from->network_bytes_per_s;
    t->domain_bytes_per_s = from->domain_bytes_per_s;
    if (t->n_nodes == from->n_nodes && t->n_domains == from->n_domains &&
        t->n_devices == from->n_devices)
        return t;
    topology_free(t);
    return NULL;
}

void topology_free(struct topology *t)
{
    if (t != NULL)
        topology_close(t);
    mem_free(t);
}

/* --- copies ------------------------------------------------------------------------------------- */

/* NULL with n > 0: no memory. */
static void *array_copy(const void *from, size_t n, size_t bytes)
{
    void *copy = mem_calloc(n, bytes);
    if (copy != NULL && n > 0)
        memcpy(copy, from, n * bytes);
    return copy;
}

static int rules_copy(const struct plan_options *from, struct plan_options *to)
{
    struct plan_rule *rules = mem_calloc(from->n_rules, sizeof *rules);
    *to = *from;
    to->rules = rules;
    to->n_rules = 0;
    for (; rules != NULL && to->n_rules < from->n_rules; to->n_rules++) {
        rules[to->n_rules].strategy = from->rules[to->n_rules].strategy;
        rules[to->n_rules].glob = mem_strdup(from->rules[to->n_rules].glob);
        if (rules[to->n_rules].glob == NULL)
            break;
    }
    return rules != NULL && to->n_rules == from->n_rules ? 0 : RS_ENOMEM;
}

struct attempt_input *attempt_input_copy(const struct attempt_input *from)
{
    struct attempt_input *in = mem_zalloc(sizeof *in);
    if (in == NULL)
        return NULL;
    memcpy(in->source, from->source, sizeof in->source);
    in->verify = from->verify;
    in->topology = topology_copy(from->topology);
    if (in->topology != NULL)
        in->nodes = array_copy(from->nodes, from->topology->n_nodes, sizeof *from->nodes);
    in->destinations = array_copy(from->destinations, from->n_destinations, 16);
    in->participants =
        array_copy(from->participants, from->n_participants, sizeof *from->participants);
    in->n_destinations = in->destinations != NULL ? from->n_destinations : 0;
    in->n_participants = in->participants != NULL ? from->n_participants : 0;
    if (rules_copy(&from->options, &in->options) == 0 && in->nodes != NULL &&
        in->destinations != NULL && in->participants != NULL)
        return in;
    attempt_input_free(in);
    return NULL;
}

void attempt_input_free(struct attempt_input *in)
{
    if (in == NULL)
        return;
    topology_free(in->topology);
    for (uint32_t i = 0; in->options.rules != NULL && i < in->options.n_rules; i++)
        mem_free((char *)(uintptr_t)in->options.rules[i].glob);
    mem_free((void *)(uintptr_t)in->options.rules);
    mem_free((void *)(uintptr_t)in->nodes);
    mem_free((void *)(uintptr_t)in->destinations);
    mem_free((void *)(uintptr_t)in->participants);
    mem_free(in);
}

/* --- questions ---------------------------------------------------------------------------------- */

static int participants_compare(const void *a, const void *b)
{
    const struct participant *x = a, *y = b;
    if (x->layout != y->layout)
        return x->layout < y->layout ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

const struct participant *attempt_input_find(const struct attempt_input *in, uint32_t layout,
                                             uint32_t rank)
{
    struct participant key = {.layout = layout, .rank = rank};
    return in->n_participants == 0 ? NULL
                                   : bsearch(&key, in->participants, in->n_participants, sizeof key,
                                             participants_compare);
}

uint32_t attempt_input_node(const struct attempt_input *in, uint32_t number)
{
    for (uint32_t i = 0; i < in->topology->n_nodes; i++)
        if (in->nodes[i] == number)
            return i;
    return UINT32_MAX;
}

/* Devices stand in node order, then by local number. */
uint32_t attempt_input_device(const struct attempt_input *in, const struct participant *p)
{
    const struct topology *t = in->topology;
    uint32_t low = 0, high = t->n_devices;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct device_place *d = &t->devices[middle];
        uint32_t number = in->nodes[d->node];
        if (number < p->node || (number == p->node && d->local < p->device))
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < t->n_devices && in->nodes[t->devices[low].node] == p->node &&
                 t->devices[low].local == p->device;
    return found ? low : UINT32_MAX;
}

/* --- the check ---------------------------------------------------------------------------------- */

static int topology_check(const struct attempt_input *in, struct err *e)
{
    const struct topology *t = in->topology;
    if (t->n_nodes == 0 || t->n_nodes > NODE_MAX || t->n_devices > TOPOLOGY_MAX_DEVICES)
        return err_set(e, RS_EPROTO, "%u nodes with %u devices take part", t->n_nodes,
                       t->n_devices);
    for (uint32_t i = 1; i < t->n_nodes; i++)
        if (in->nodes[i] <= in->nodes[i - 1])
            return err_set(e, RS_EPROTO, "nodes %u and %u are out of order", in->nodes[i - 1],
                           in->nodes[i]);
    for (uint32_t i = 0, next = 0; i < t->n_devices; i++, next++) {
        const struct device_place *d = &t->devices[i];
        if (i == 0 || d->node != t->devices[i - 1].node)
            next = 0;
        if (d->node >= t->n_nodes || d->domain >= t->n_domains || d->local != next ||
            (i > 0 && d->node < t->devices[i - 1].node))
            return err_set(e, RS_EPROTO, "device %u of the topology is not in order", i);
    }
    return 0;
}

int attempt_input_check(const struct attempt_input *in, struct err *e)
{
    int r = topology_check(in, e);
    if (r == 0 && (in->n_destinations == 0 || in->n_destinations > REFIT_MAX_LAYOUTS))
        r = err_set(e, RS_EPROTO, "%u destination layouts take part", in->n_destinations);
    for (uint32_t i = 0; r == 0 && i < in->n_participants; i++) {
        const struct participant *p = &in->participants[i];
        if (p->layout > in->n_destinations || attempt_input_device(in, p) == UINT32_MAX)
            r = err_set(e, RS_EPROTO, "rank %u of layout %u: node %u has no device %u", p->rank,
                        p->layout, p->node, p->device);
        else if (p->layout != 0 && p->shadow)
            r = err_set(e, RS_EPROTO,
                        "rank %u of layout %u: only what feeds is read from shadow memory", p->rank,
                        p->layout);
        else if (i > 0 && participants_compare(p - 1, p) >= 0)
            r = err_set(e, RS_EPROTO, "rank %u of layout %u comes twice or out of order", p->rank,
                        p->layout);
    }
    return r;
}

/* --- digests ------------------------------------------------------------------------------------ */

static uint64_t text_mix(uint64_t state, const char *text)
{
    return mix_bytes(state, text, strlen(text));
}

static uint64_t rate_mix(uint64_t state, double rate)
{
    uint64_t bits;
    memcpy(&bits, &rate, sizeof bits);
    return mix_word(state, bits);
}

static uint64_t topology_digest(const struct attempt_input *in)
{
    const struct topology *t = in->topology;
    uint64_t d = mix_word(ATTEMPT_PART_TOPOLOGY, t->n_nodes);
    for (uint32_t i = 0; i < t->n_nodes; i++)
        d = text_mix(mix_word(d, in->nodes[i]), t->nodes[i]);
    for (uint32_t i = 0; i < t->n_domains; i++)
        d = text_mix(d, t->domains[i]);
    for (uint32_t i = 0; i < t->n_devices; i++)
        d = mix_word(mix_word(mix_word(d, t->devices[i].node), t->devices[i].local),
                     t->devices[i].domain);
    return rate_mix(rate_mix(d, t->network_bytes_per_s), t->domain_bytes_per_s);
}

static uint64_t participants_digest(const struct attempt_input *in)
{
    uint64_t d = mix_word(ATTEMPT_PART_PARTICIPANTS, in->n_participants);
    for (uint32_t i = 0; i < in->n_participants; i++) {
        const struct participant *p = &in->participants[i];
        const uint64_t words[] = {p->worker, p->node, p->device, p->layout,
                                  p->rank,   p->held, p->shadow};
        d = mix_bytes(d, words, sizeof words);
    }
    return d;
}

static uint64_t options_digest(const struct attempt_input *in)
{
    const struct plan_options *o = &in->options;
    const uint64_t words[] = {
        o->strategy,          o->n_rules,     o->relay,      o->staging_ingest,
        o->least_piece_bytes, o->chunk_bytes, o->ring_slots, in->verify};
    uint64_t d = mix_bytes(ATTEMPT_PART_OPTIONS, words, sizeof words);
    for (uint32_t i = 0; i < o->n_rules; i++)
        d = mix_word(text_mix(d, o->rules[i].glob), o->rules[i].strategy);
    return d;
}

void attempt_input_digest(const struct attempt_input *in, uint64_t ret[ATTEMPT_PARTS])
{
    uint64_t d = mix_word(ATTEMPT_PART_DESTINATIONS, in->n_destinations);
    for (uint32_t i = 0; i < in->n_destinations; i++)
        d = mix_bytes(d, in->destinations[i], 16);
    ret[ATTEMPT_PART_SOURCE] = mix_bytes(ATTEMPT_PART_SOURCE, in->source, sizeof in->source);
    ret[ATTEMPT_PART_DESTINATIONS] = d;
    ret[ATTEMPT_PART_TOPOLOGY] = topology_digest(in);
    ret[ATTEMPT_PART_PARTICIPANTS] = participants_digest(in);
    ret[ATTEMPT_PART_OPTIONS] = options_digest(in);
}

const char *attempt_input_difference(const uint64_t mine[ATTEMPT_PARTS],
                                     const uint64_t theirs[ATTEMPT_PARTS])
{
    static const char *const names[] = {
        [ATTEMPT_PART_SOURCE] = "the source layout",
        [ATTEMPT_PART_DESTINATIONS] = "the destination layouts",
        [ATTEMPT_PART_TOPOLOGY] = "the topology (nodes, devices, domains, rates)",
        [ATTEMPT_PART_PARTICIPANTS] = "the workers that take part",
        [ATTEMPT_PART_OPTIONS] = "the options",
    };
    for (unsigned i = 0; i < ATTEMPT_PARTS; i++)
        if (mine[i] != theirs[i])
            return names[i];
    return "the planner itself: is it another release?";
}
