/* Senders: for each bundle and each domain that needs it, a source holder or the ingest device of a domain
 * already fed (relay).
 *
 * Each run must leave its holders once: those sends are given out for all runs first, to the least loaded
 * holder each, so that optional work never takes the place of mandatory work. The domain that is fed first is the
 * one whose ingest device has had the least relaying put in its way. Every further domain goes to the least loaded
 * of the holders and the relays. Where sources can do a good part of all sends, any domain that a holder feeds
 * may relay, and two hops are enough (a star). Where they can't, a relay would have to send each run many times,
 * and all of them to everybody; then each domain passes on to the next one (chains): every device has few peers,
 * links are never fought over, and what the many hops cost is two messages each. Where all domains need a run and one
 * chain reaches them it begins at the first one for all runs: one peer each way, and a last domain that sends nothing.
 * Else chains begin in turn, because whoever begins a second one sends twice. */
#include "plan/plan_private.h"

#include "base/banned.h"

/* Hops of a chain cost about two messages' time each: as many as cost a sixteenth of the whole, at most. A longer
 * chain ends, and the next begins at the domain that was fed first. */
enum { MOST_HOPS = 128, HOPS_PART = 16 };

static uint8_t chain_hops(const struct plan *p)
{
    uint64_t n = p->totals.lower_bound / (2 * HOPS_PART * p->message_bytes);
    return (uint8_t)(n < 2 ? 2 : n > MOST_HOPS ? MOST_HOPS : n);
}

static uint32_t least_loaded(const struct plan *p, const struct set *s, const uint64_t *load)
{
    uint32_t best = p->ends.at[s->first].device;
    for (uint32_t i = 1; i < s->n; i++) {
        uint32_t d = p->ends.at[s->first + i].device;
        if (load[d] < load[best])
            best = d;
    }
    return best;
}

/* A bundle's only batch; what has several comes from holders only where it has no other way. */
static const struct plan_batch *only_batch(const struct plan *p, uint32_t bundle)
{
    const struct plan_bundle *u = &p->bundles.at[bundle];
    return u->n_batches == 1 ? &p->batches.at[u->first_batch] : NULL;
}

static const struct set *holders(const struct plan *p, uint32_t bundle)
{
    return &p->sets.at[only_batch(p, bundle)->source];
}

static void send_from(struct plan *p, struct need *x, uint32_t device)
{
    x->from = device;
    if (device != EACH_HOLDER)
        p->egress[device] += p->bundles.at[x->bundle].bytes;
}

/* The first send: it counts before any other. */
static void send_from_holders(struct plan *p, struct needs *n, struct need *x)
{
    const struct plan_bundle *u = &p->bundles.at[x->bundle];
    if (u->n_batches == 1) {
        send_from(p, x, least_loaded(p, holders(p, x->bundle), p->egress));
        return;
    }
    x->from = EACH_HOLDER;
    for (uint32_t b = u->first_batch; b < u->first_batch + u->n_batches; b++) {
        const struct plan_batch *batch = &p->batches.at[b];
        n->batch_from[b] = least_loaded(p, &p->sets.at[batch->source], p->egress);
        p->egress[n->batch_from[b]] += batch->bytes;
    }
}

/* True where one chain reaches all domains there are: it always begins at the same one then. Whoever passes on what it
 * takes in sends no more than that, and each device has one to take from and one to send to. */
static bool one_chain(const struct plan *p, const struct needs *n, uint32_t bundle)
{
    uint32_t k = n->first_of_bundle[bundle + 1] - n->first_of_bundle[bundle];
    return p->chains && p->options.relay && k == n->n_domains && k <= chain_hops(p);
}

/* The need of the run to feed first. */
static uint32_t first_fed(const struct plan *p, const struct needs *n, uint32_t bundle,
                          const uint64_t *relaying)
{
    uint32_t begin = n->first_of_bundle[bundle], best = begin;
    bool always_same = one_chain(p, n, bundle);
    for (uint32_t i = begin + 1; i < n->first_of_bundle[bundle + 1]; i++) {
        const struct need *x = &n->v.at[i], *y = &n->v.at[best];
        if (x->staging)
            continue;
        if (y->staging || (!always_same && relaying[x->device] < relaying[y->device]))
            best = i;
    }
    return best;
}

static void mandatory(struct plan *p, struct needs *n, uint64_t *relaying)
{
    for (uint32_t i = 0; i < n->n_reshard; i++) {
        uint32_t bundle = n->order[i];
        uint32_t k = n->first_of_bundle[bundle + 1] - n->first_of_bundle[bundle];
        if (k == 0)
            continue;
        struct need *x = &n->v.at[first_fed(p, n, bundle, relaying)];
        relaying[x->device] += p->bundles.at[bundle].bytes * (k - 1);
        send_from_holders(p, n, x);
    }
}

/* Batches are small where they are this part of the bound or less; nine tenths of all bytes must be in such. */
enum { SMALL_PART = 128, SMALL_TENTHS = 9, RELAY_SHARE = 16 };

/* What a relay sends at most of its own accord. Where batches are small, they are relayed by whom a holder feeds as long
 * as that one is well below the bound: all of its go the same ways then, so devices have few peers and streams are
 * long. With large ones it would cost time: who is fed last waits for the relay's whole fan-out. */
static uint64_t relay_limit(const struct plan *p, const struct needs *n)
{
    uint64_t bound = p->totals.lower_bound, small = 0, all = 0;
    for (uint32_t i = 0; i < n->n_reshard; i++) {
        uint64_t bytes = p->bundles.at[i].bytes;
        all += bytes;
        small += bytes <= bound / SMALL_PART ? bytes : 0;
    }
    return small >= all / 10 * SMALL_TENTHS ? bound - bound / RELAY_SHARE : 0;
}

/* A relay within its limit, else the least loaded of the bundle's holders and of the ingest devices that holders feed.
 */
static uint32_t star_sender(const struct plan *p, const struct needs *n, uint32_t bundle,
                            uint32_t *ret_via)
{
    uint64_t bytes = p->bundles.at[bundle].bytes, limit = n->relay_limit;
    uint32_t best = least_loaded(p, holders(p, bundle), p->egress);
    *ret_via = NONE32;
    for (uint32_t k = n->first_of_bundle[bundle]; k < n->first_of_bundle[bundle + 1]; k++) {
        const struct need *y = &n->v.at[k];
        if (y->from == NONE32 || y->via != NONE32 || y->staging)
            continue;
        if (p->egress[y->device] + bytes <= limit) {
            *ret_via = k;
            return y->device;
        }
        if (p->egress[y->device] < p->egress[best]) {
            best = y->device;
            *ret_via = k;
        }
    }
    return best;
}

/* Of a bundle of several batches only the first domain is fed by holders. That one passes it on to all others where
 * that is this part of the bound at most: it takes the least time. Else whoever has it may, the least loaded first, up
 * to so many hops. */
enum { STAR_PART = 4, TREE_HOPS = 8 };

static uint32_t tree_sender(const struct plan *p, const struct needs *n, uint32_t bundle,
                            uint32_t *ret_via)
{
    uint32_t best = EACH_HOLDER, begin = n->first_of_bundle[bundle];
    uint64_t all = (n->first_of_bundle[bundle + 1] - begin) * p->bundles.at[bundle].bytes;
    uint8_t most_hops = all <= p->totals.lower_bound / STAR_PART ? 2 : TREE_HOPS;
    *ret_via = NONE32;
    for (uint32_t k = n->first_of_bundle[bundle]; k < n->first_of_bundle[bundle + 1]; k++) {
        const struct need *y = &n->v.at[k];
        if (y->hops == 0 || y->hops >= most_hops || y->staging)
            continue;
        if (best == EACH_HOLDER || p->egress[y->device] < p->egress[best]) {
            best = y->device;
            *ret_via = k;
        }
    }
    return best;
}

/* Of a holder and the last domain of the chain, the less loaded. */
static uint32_t chain_sender(const struct plan *p, const struct needs *n, uint32_t bundle,
                             uint32_t last, uint32_t *ret_via)
{
    uint32_t best = only_batch(p, bundle) == NULL ? EACH_HOLDER
                                                  : least_loaded(p, holders(p, bundle), p->egress);
    *ret_via = NONE32;
    if (last != NONE32 &&
        (best == EACH_HOLDER || p->egress[n->v.at[last].device] < p->egress[best])) {
        best = n->v.at[last].device;
        *ret_via = last;
    }
    return best;
}

/* All but the mandatory send of a run: in the order of domains, round from the one that is fed first. */
static void optional(struct plan *p, struct needs *n, uint32_t bundle, uint8_t most_hops)
{
    uint32_t begin = n->first_of_bundle[bundle], k = n->first_of_bundle[bundle + 1] - begin;
    uint32_t fed = 0;
    while (fed < k && n->v.at[begin + fed].from == NONE32)
        fed++;
    uint32_t last = NONE32;
    for (uint32_t i = 0; i < k; i++) {
        uint32_t index = begin + (fed + i) % k, via = NONE32;
        struct need *x = &n->v.at[index];
        if (i > 0 && !p->options.relay)
            send_from(p, x, least_loaded(p, holders(p, bundle), p->egress));
        else if (i > 0 && p->chains)
            send_from(p, x, chain_sender(p, n, bundle, last, &via));
        else if (i > 0 && only_batch(p, bundle) == NULL)
            send_from(p, x, tree_sender(p, n, bundle, &via));
        else if (i > 0)
            send_from(p, x, star_sender(p, n, bundle, &via));
        x->via = via;
        x->hops = (uint8_t)(via == NONE32 ? 1 : n->v.at[via].hops + 1);
        if (!x->staging)
            last = x->hops < most_hops ? index : begin + fed;
    }
}

/* --- evening out ---------------------------------------------------------------------------------
 *
 * The choices above look at the past alone. Where that leaves a device with much more than the bound, sends move to
 * less loaded devices until that is over or none can. Chains stay as they are. */

/* Looked at where the busiest is further above the bound than this part of it; so many times at most. */
enum { UNEVEN_SHIFT = 6, MOST_PASSES = 16 };

static bool uneven(const struct plan *p)
{
    uint64_t cap = p->totals.lower_bound + (p->totals.lower_bound >> UNEVEN_SHIFT);
    for (uint32_t d = 0; d < p->topology->n_devices; d++)
        if (p->egress[d] > cap)
            return true;
    return false;
}

static void hand_over(struct plan *p, struct needs *n, uint32_t *children, uint32_t need,
                      uint32_t to, uint32_t via)
{
    struct need *x = &n->v.at[need];
    uint64_t bytes = p->bundles.at[x->bundle].bytes;
    p->egress[x->from] -= bytes;
    p->egress[to] += bytes;
    if (x->via != NONE32)
        children[x->via]--;
    if (via != NONE32)
        children[via]++;
    x->from = to;
    x->via = via;
    x->hops = via == NONE32 ? 1 : 2;
}

/* The need's send goes to the least loaded of those that could do it, if that evens out the two. What relays to others
 * must itself come from a holder. */
static bool even_out(struct plan *p, struct needs *n, uint32_t *children, uint32_t need)
{
    const struct need *x = &n->v.at[need];
    if (only_batch(p, x->bundle) == NULL)
        return false;
    uint32_t via = NONE32, to = least_loaded(p, holders(p, x->bundle), p->egress);
    for (uint32_t k = n->first_of_bundle[x->bundle];
         p->options.relay && children[need] == 0 && k < n->first_of_bundle[x->bundle + 1]; k++) {
        const struct need *y = &n->v.at[k];
        if (k == need || y->via != NONE32 || y->staging || p->egress[y->device] >= p->egress[to])
            continue;
        to = y->device;
        via = k;
    }
    if (p->egress[to] + p->bundles.at[x->bundle].bytes >= p->egress[x->from])
        return false;
    hand_over(p, n, children, need, to, via);
    return true;
}

static int even_senders(struct plan *p, struct needs *n)
{
    if (p->chains || !uneven(p))
        return 0;
    uint32_t *children = mem_calloc(n->v.n + 1, sizeof *children);
    if (children == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < n->v.n; i++)
        if (n->v.at[i].via != NONE32)
            children[n->v.at[i].via]++;
    bool moved = true;
    for (int pass = 0; pass < MOST_PASSES && moved && uneven(p); pass++) {
        moved = false;
        for (uint32_t i = 0; i < n->v.n; i++)
            moved |= even_out(p, n, children, i);
    }
    mem_free(children);
    return 0;
}

static int count_domains(const struct plan *p, struct needs *n)
{
    uint8_t *seen = mem_calloc(p->topology->n_domains + 1U, 1);
    if (seen == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < n->v.n; i++) {
        uint8_t *s = &seen[n->v.at[i].domain];
        n->n_domains += *s == 0;
        *s = 1;
    }
    mem_free(seen);
    return 0;
}

int plan_senders(struct plan *p, struct needs *n)
{
    int r = count_domains(p, n);
    uint64_t *relaying = mem_calloc(p->topology->n_devices + 1U, sizeof *relaying);
    if (r != 0 || relaying == NULL) {
        mem_free(relaying);
        return RS_ENOMEM;
    }
    uint8_t most_hops = chain_hops(p);
    n->relay_limit = relay_limit(p, n);
    mandatory(p, n, relaying);
    for (uint32_t i = 0; i < n->n_reshard; i++)
        optional(p, n, n->order[i], most_hops);
    mem_free(relaying);
    return even_senders(p, n);
}
