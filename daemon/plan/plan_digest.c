/* Digests (XXH3, 128 bits, big endian): of a plan, so that daemons can compare theirs before any
 * byte moves, and of all of a plan's input, the key of the plan cache.
 *
 * Fields are fed one by one as little-endian words, never structs as they lie in memory. */
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "plan/plan_broadcast.h"
#include "plan/plan_private.h"
#include "plan/planner.h"

#include "base/banned.h"

enum { BLOCK_WORDS = 512 };

struct digest {
    XXH3_state_t *state;
    uint64_t word[BLOCK_WORDS];
    unsigned n;
};

static int digest_init(struct digest *d)
{
    d->n = 0;
    d->state = XXH3_createState();
    if (d->state == NULL)
        return RS_ENOMEM;
    XXH3_128bits_reset(d->state);
    return 0;
}

static void flush(struct digest *d)
{
    XXH3_128bits_update(d->state, d->word, d->n * sizeof d->word[0]);
    d->n = 0;
}

static void put(struct digest *d, uint64_t v)
{
    if (d->n == BLOCK_WORDS)
        flush(d);
    d->word[d->n++] = htole64(v);
}

static void put2(struct digest *d, uint32_t a, uint32_t b)
{
    put(d, (uint64_t)a << 32 | b);
}

static void put_text(struct digest *d, const char *s)
{
    put(d, strlen(s));
    flush(d);
    XXH3_128bits_update(d->state, s, strlen(s));
}

static void digest_end(struct digest *d, uint8_t ret_digest[16])
{
    XXH128_canonical_t canonical;
    flush(d);
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(d->state));
    memcpy(ret_digest, canonical.digest, 16);
    XXH3_freeState(d->state);
}

static void put_options(struct digest *d, const struct plan_options *o)
{
    put2(d, o->strategy, o->n_rules);
    put2(d, o->relay, o->staging_ingest);
    put(d, o->least_piece_bytes);
    put(d, o->chunk_bytes);
    put(d, o->ring_slots);
    for (uint32_t i = 0; i < o->n_rules; i++) {
        put(d, o->rules[i].strategy);
        put_text(d, o->rules[i].glob);
    }
}

static void put_geometry(struct digest *d, const struct plan *p)
{
    for (size_t i = 0; i < p->ends.n; i++) {
        const struct end *x = &p->ends.at[i];
        put2(d, x->device, x->rank);
        put2(d, x->layout, x->domain);
    }
    for (size_t i = 0; i < p->groups.n; i++) {
        const struct plan_group *g = &p->groups.at[i];
        put2(d, g->class, g->cell);
        put2(d, p->sets.at[g->source].first, p->sets.at[g->source].n);
        put2(d, p->sets.at[g->takers].first, p->sets.at[g->takers].n);
    }
    for (size_t i = 0; i < p->boxes.n; i++)
        for (uint8_t k = 0; k < p->boxes.at[i].n_dims; k++) {
            put(d, p->boxes.at[i].offset[k]);
            put(d, p->boxes.at[i].size[k]);
        }
    for (size_t i = 0; i < p->shapes.n; i++) {
        const struct plan_shape *s = &p->shapes.at[i];
        put2(d, s->class, (uint32_t)s->wire << 16 | (uint32_t)s->source_dtype << 8 | s->n_dims);
        for (uint8_t k = 0; k < s->n_dims; k++)
            put(d, s->size[k]);
        if (s->value != PLAN_SOURCE) {
            put2(d, s->block[0], s->block[1]);
            put(d, s->origin[0]);
            put(d, s->origin[1]);
            put(d, s->value);
        }
    }
    for (size_t i = 0; i < p->derived.n; i++)
        put2(d, p->derived.at[i].origin, p->derived.at[i].layout);
    for (size_t i = 0; i < p->derived_of.n; i++)
        put2(d, p->derived_of.at[i].layout, p->derived_of.at[i].tensor);
    for (size_t i = 0; i < p->cuts.n; i++)
        put(d, p->cuts.at[i]);
    for (size_t i = 0; i < p->units.n; i++)
        put2(d, p->units.at[i].tensor, p->units.at[i].shape);
}

static void put_moves(struct digest *d, const struct plan *p)
{
    for (size_t i = 0; i < p->runs.n; i++) {
        const struct plan_run *r = &p->runs.at[i];
        put2(d, r->group, r->member);
        put2(d, r->count, r->piece);
    }
    for (size_t i = 0; i < p->edges.n; i++) {
        const struct plan_edge *x = &p->edges.at[i];
        const struct plan_batch *b = &p->batches.at[x->first_batch];
        put2(d, p->batch_runs.at[b->first_run], x->parent);
        if (b->n_runs > 1 || x->n_batches > 1)
            put2(d, b->n_runs, x->n_batches);
        put2(d, x->from, x->to);
        put2(d, x->taker, x->leg);
    }
    for (size_t i = 0; i < p->legs.n; i++) {
        put2(d, p->legs.at[i].stream, p->legs.at[i].first_edge);
        put(d, p->legs.at[i].start);
        put(d, p->legs.at[i].base);
    }
    for (size_t i = 0; i < p->casts.n; i++) {
        const struct plan_cast *c = &p->casts.at[i];
        put2(d, c->unit, c->gather);
        put(d, c->gather_start);
        put(d, c->start);
        put(d, c->scratch_offset);
    }
}

int plan_digest(const struct plan *p, uint8_t ret_digest[16])
{
    struct digest d;
    if (digest_init(&d) != 0)
        return RS_ENOMEM;
    put_options(&d, &p->options);
    put(&d, p->message_bytes | (uint64_t)p->apart << 63);
    put_geometry(&d, p);
    put_moves(&d, p);
    digest_end(&d, ret_digest);
    return 0;
}

/* --- input ------------------------------------------------------------------------------------ */

static void put_bits(struct digest *d, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    put(d, bits);
}

static void put_side(struct digest *d, const struct layout *l, const int32_t *device)
{
    flush(d);
    XXH3_128bits_update(d->state, l->digest, sizeof l->digest);
    put(d, l->n_ranks);
    for (uint32_t r = 0; r < l->n_ranks; r++)
        put(d, (uint64_t)(int64_t)device[r]);
}

int plan_input_digest(const struct plan_input *input, uint8_t ret_digest[16])
{
    struct digest d;
    const struct topology *t = input->topology;
    if (digest_init(&d) != 0)
        return RS_ENOMEM;
    put_options(&d, &input->options);
    put_side(&d, input->source, input->source_device);
    put(&d, input->n_destinations);
    for (uint32_t i = 0; i < input->n_destinations; i++)
        put_side(&d, input->destinations[i], input->destination_device[i]);
    put2(&d, t->n_nodes, t->n_domains);
    put(&d, t->n_devices);
    for (uint32_t i = 0; i < t->n_devices; i++) {
        put2(&d, t->devices[i].node, t->devices[i].domain);
        put(&d, t->devices[i].local);
    }
    put_bits(&d, t->network_bytes_per_s);
    put_bits(&d, t->domain_bytes_per_s);
    digest_end(&d, ret_digest);
    return 0;
}
