/* Streams, legs, and when each leg starts: the timetable that messages get their rounds from.
 *
 * Balanced bytes are not yet a short time: a device's link must not wait while others are busy. So
 * the legs are laid out like jobs in an open shop: every device has one link in and one out per
 * tier, a leg occupies its sender's and its receiver's link from start to start + bytes, and no two
 * legs overlap on a link. Always the leg that can start earliest is placed next (a receiver with
 * the earliest free link asks, of its senders the first that is free gives; ties: what is relayed
 * further first, then the sender that has most left, then the lowest stream). A leg that depends on
 * another becomes available when that one is placed; it may start while the other is still running,
 * two messages behind, because its messages then lie in later rounds (plan_private.h, leg_message).
 *
 * A round is one message's time at network rate: message i of a leg lies in round (start + i *
 * step) / U. */
#include <string.h>

#include "plan/plan_private.h"

#include "base/banned.h"

/* What placing needs lies side by side, one line of cache per step: legs and streams are visited in no order that
 * their numbers have.
 *
 * Until a leg is placed its own fields hold what placing needs of it: `start` the earliest start, `next` the next leg
 * of its stream's queue, `base` the edges whose parents are not placed (once it's available: 0), and FEEDS where it is
 * relayed further. Then `start` is its start; `next` and `base` are set when all are placed. */
struct lane {            /* a stream */
    uint32_t head, tail; /* legs that are available, in the order in which they became so */
    uint32_t offer;      /* NONE32: nothing available */
    uint32_t in, out;    /* ports */
};

struct sender { /* a sending port */
    uint64_t free;
    uint64_t left;
};

struct receiver { /* a receiving port */
    uint64_t free;
    uint64_t left;
    uint32_t first_offer; /* into the offers: one place per stream that can come here */
    uint32_t n_offers;    /* streams that have a leg available, in front */
};

/* An offer: the leg at the head of a stream. Choosing reads all of a port's in a row. */
struct offers {
    uint64_t *ready;
    uint32_t *out; /* port, and FEEDS where the leg is relayed further */
    uint32_t *stream;
};
#define FEEDS (1U << 31)
enum { CANDIDATES = 32 };
/* Starts that differ by less than this part of a message count as equal. */
enum { START_PART = 64 };

struct timetable {
    struct plan *p;
    uint32_t *child, *sibling; /* per edge: children by first child and next sibling */
    struct lane *lanes;
    struct sender *senders; /* per port (port_of) */
    struct receiver *receivers;
    struct offers offers;
    unsigned start_shift; /* starts that differ by less than 1 << this count as equal */
    unsigned left_shift;  /* bytes left are compared in units of 1 << this */
    /* Heap of receiving ports by the earliest start known. */
    uint32_t *heap, *heap_at;
    uint64_t *heap_key;
    uint32_t n_heap;
};

/* Ports of a tier stand together: most plans use one tier's, or little of the other's. */
static uint32_t port_of(const struct plan *p, uint32_t device, uint8_t tier)
{
    return tier == TIER_NETWORK ? p->topology->n_devices + device : device;
}

/* --- streams and legs ------------------------------------------------------------------------- */

/* Edges of bundles with the most bytes first, and of those that are relayed further before the others: what fills up
 * at the end is small and nobody waits for it. A bundle's stand together. */
static int order_edges(const struct plan *p, uint32_t *key, uint32_t *a, uint32_t *ret_order)
{
    uint32_t n = (uint32_t)p->edges.n, n_bundles = (uint32_t)p->bundles.n, k = 0;
    uint64_t *bytes = mem_alloc((n_bundles + 1U) * sizeof *bytes);
    uint32_t *order = mem_alloc((n_bundles + 1U) * sizeof *order);
    int r = bytes == NULL || order == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < n_bundles; i++)
        bytes[i] = p->bundles.at[i].bytes;
    if (r == 0)
        r = sort_descending(bytes, n_bundles, order);
    for (uint32_t i = 0; r == 0 && i < n_bundles; i++) {
        const struct plan_bundle *u = &p->bundles.at[order[i]];
        for (uint32_t e = u->first_edge; e < u->first_edge + u->n_edges; e++)
            a[k++] = e;
    }
    mem_free(bytes);
    mem_free(order);
    for (uint32_t i = 0; i < n; i++)
        key[i] = 1;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < plan_edge_parents(p, &p->edges.at[i]); j++)
            key[p->edges.at[i].parent + j] = 0;
    return r == 0 ? sort_count(key, a, n, 2, ret_order) : r;
}

/* Edges by (to, from, depth), each stream's in the order above: receivers are looked at one by one. */
static int sort_edges(struct plan *p)
{
    uint32_t n = (uint32_t)p->edges.n, n_devices = p->topology->n_devices;
    uint32_t *key = mem_alloc((n + 1U) * sizeof *key);
    uint32_t *a = mem_alloc((n + 1U) * sizeof *a);
    int r = key == NULL || a == NULL ? RS_ENOMEM : vec_reserve(&p->leg_edges, n + 1);
    uint32_t *b = p->leg_edges.at;
    if (r == 0)
        r = order_edges(p, key, a, b);
    for (uint32_t i = 0; r == 0 && i < n; i++)
        key[i] = p->edges.at[i].depth;
    if (r == 0)
        r = sort_count(key, b, n, 256, a);
    for (uint32_t i = 0; r == 0 && i < n; i++)
        key[i] = p->edges.at[i].from;
    if (r == 0)
        r = sort_count(key, a, n, n_devices, b);
    for (uint32_t i = 0; r == 0 && i < n; i++)
        key[i] = p->edges.at[i].to;
    if (r == 0)
        r = sort_count(key, b, n, n_devices, a);
    for (uint32_t i = 0; r == 0 && i < n; i++)
        p->leg_edges.at[i] = a[i];
    p->leg_edges.n = n;
    mem_free(key);
    mem_free(a);
    return r;
}

static bool same_stream(const struct plan_stream *s, const struct plan_edge *e)
{
    return s->from == e->from && s->to == e->to && s->depth == e->depth;
}

static int open_stream(struct plan *p, const struct plan_edge *e)
{
    if (vec_reserve(&p->streams, p->streams.n + 1) != 0)
        return RS_ENOMEM;
    p->streams.at[p->streams.n++] = (struct plan_stream){.from = e->from,
                                                         .to = e->to,
                                                         .first_leg = NONE32,
                                                         .last_leg = NONE32,
                                                         .depth = e->depth,
                                                         .tier = e->tier};
    return 0;
}

static int open_leg(struct plan *p, uint32_t at)
{
    if (vec_reserve(&p->legs, p->legs.n + 1) != 0)
        return RS_ENOMEM;
    p->legs.at[p->legs.n++] =
        (struct plan_leg){.stream = (uint32_t)p->streams.n - 1, .first_edge = at, .next = NONE32};
    return 0;
}

/* Small neighbours share a leg, up to a part of a run; every other edge is a leg of its own. */
enum { LEG_PART = 12, LEAST_LEGS = 3, LEG_TIMES = 3 };

uint64_t plan_leg_bytes(const struct plan *p)
{
    uint64_t most = p->run_bytes / LEG_PART;
    return most > p->message_bytes ? most : p->message_bytes;
}

/* Of the stream that begins at leg edge `at`: where it has many runs its legs may be longer, up to LEG_TIMES. */
static uint64_t stream_leg_bytes(const struct plan *p, uint32_t at)
{
    const struct plan_edge *first = &p->edges.at[p->leg_edges.at[at]];
    uint64_t bytes = 0, most = plan_leg_bytes(p);
    for (uint32_t i = at; i < p->leg_edges.n; i++) {
        const struct plan_edge *e = &p->edges.at[p->leg_edges.at[i]];
        if (e->to != first->to || e->from != first->from || e->depth != first->depth)
            break;
        bytes += plan_edge_bytes(p, e);
    }
    uint64_t part = bytes / LEAST_LEGS;
    return part < most ? most : part > LEG_TIMES * most ? LEG_TIMES * most : part;
}

static int build_legs(struct plan *p)
{
    uint64_t most = 0;
    int r = sort_edges(p);
    for (uint32_t i = 0; i < p->leg_edges.n && r == 0; i++) {
        struct plan_edge *e = &p->edges.at[p->leg_edges.at[i]];
        uint64_t bytes = plan_edge_bytes(p, e);
        bool fresh = p->streams.n == 0 || !same_stream(&p->streams.at[p->streams.n - 1], e);
        if (fresh) {
            most = stream_leg_bytes(p, i);
            r = open_stream(p, e);
        }
        if (r == 0 && (fresh || p->legs.at[p->legs.n - 1].bytes + bytes > most))
            r = open_leg(p, i);
        if (r != 0)
            return r;
        struct plan_leg *l = &p->legs.at[p->legs.n - 1];
        e->leg = (uint32_t)p->legs.n - 1;
        e->offset = l->bytes;
        l->bytes += bytes;
        l->n_edges++;
    }
    return r;
}

/* --- heap of receiving ports ------------------------------------------------------------------ */

static bool heap_less(const struct timetable *t, uint32_t a, uint32_t b)
{
    if (t->heap_key[a] != t->heap_key[b])
        return t->heap_key[a] < t->heap_key[b];
    uint64_t x = t->receivers[a].left, y = t->receivers[b].left;
    return x != y ? x > y : a < b;
}

static void heap_put(struct timetable *t, uint32_t at, uint32_t port)
{
    t->heap[at] = port;
    t->heap_at[port] = at;
}

static void heap_up(struct timetable *t, uint32_t at)
{
    uint32_t port = t->heap[at];
    while (at > 0 && heap_less(t, port, t->heap[(at - 1) / 2])) {
        heap_put(t, at, t->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_put(t, at, port);
}

static void heap_down(struct timetable *t, uint32_t at)
{
    uint32_t port = t->heap[at];
    for (;;) {
        uint32_t c = 2 * at + 1;
        if (c >= t->n_heap)
            break;
        if (c + 1 < t->n_heap && heap_less(t, t->heap[c + 1], t->heap[c]))
            c++;
        if (!heap_less(t, t->heap[c], port))
            break;
        heap_put(t, at, t->heap[c]);
        at = c;
    }
    heap_put(t, at, port);
}

/* The port may have something to receive from `key` on. */
static void heap_offer(struct timetable *t, uint32_t port, uint64_t key)
{
    if (t->heap_at[port] == NONE32) {
        t->heap_key[port] = key;
        heap_put(t, t->n_heap++, port);
        heap_up(t, t->n_heap - 1);
    } else if (key < t->heap_key[port]) {
        t->heap_key[port] = key;
        heap_up(t, t->heap_at[port]);
    }
}

static void heap_drop_first(struct timetable *t)
{
    t->heap_at[t->heap[0]] = NONE32;
    uint32_t last = t->heap[--t->n_heap];
    if (t->n_heap > 0) {
        heap_put(t, 0, last);
        heap_down(t, 0);
    }
}

/* --- placing ---------------------------------------------------------------------------------- */

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* The stream has a (new) leg at its head. */
static void offer_put(struct timetable *t, uint32_t stream)
{
    struct lane *s = &t->lanes[stream];
    const struct plan_leg *l = &t->p->legs.at[s->head];
    if (s->offer == NONE32)
        s->offer = t->receivers[s->in].first_offer + t->receivers[s->in].n_offers++;
    t->offers.ready[s->offer] = l->start;
    t->offers.out[s->offer] = s->out | (uint32_t)l->base;
    t->offers.stream[s->offer] = stream;
}

static void offer_drop(struct timetable *t, struct lane *s)
{
    struct receiver *in = &t->receivers[s->in];
    uint32_t at = s->offer, last = in->first_offer + --in->n_offers;
    t->offers.ready[at] = t->offers.ready[last];
    t->offers.out[at] = t->offers.out[last];
    t->offers.stream[at] = t->offers.stream[last];
    t->lanes[t->offers.stream[at]].offer = at;
    s->offer = NONE32;
}

/* The leg joins its stream's queue: all that it depends on is placed. */
static void make_available(struct timetable *t, uint32_t leg)
{
    struct plan_leg *l = &t->p->legs.at[leg];
    struct lane *s = &t->lanes[l->stream];
    l->next = NONE32;
    if (s->head == NONE32) {
        s->head = leg;
        offer_put(t, l->stream);
    } else {
        t->p->legs.at[s->tail].next = leg;
    }
    s->tail = leg;
    heap_offer(t, s->in, later(t->receivers[s->in].free, l->start));
}

/* Earliest start of child edge c's leg, whose parent edge has just been placed: see plan_messages.c on why rounds are
 * strictly later then. The last term is for a child that runs faster than its parent; what stands before the edge in
 * its leg gives time. */
static uint64_t child_ready(const struct plan *p, const struct plan_edge *parent,
                            const struct plan_edge *c)
{
    const struct plan_leg *from = &p->legs.at[parent->leg];
    uint64_t bytes = plan_edge_bytes(p, parent), u = p->message_bytes;
    uint64_t begin = from->start + plan_time(p, parent->tier, parent->offset);
    uint64_t took = plan_time(p, parent->tier, bytes), takes = plan_time(p, c->tier, bytes);
    uint64_t ready = begin + later(2 * u, u + plan_time(p, parent->tier, u)) + p->cut_bytes + 2 +
                     (took > takes ? took - takes : 0);
    uint64_t before =
        plan_time(p, c->tier, c->offset + plan_batch_offset(p, c, parent->first_batch));
    return ready > before ? ready - before : 0;
}

/* The legs of children are all over memory: they are asked for before they are needed. */
static void fetch_children(const struct timetable *t, uint32_t edge)
{
    const struct plan *p = t->p;
    for (uint32_t c = t->child[edge]; c != NONE32; c = t->sibling[c])
        __builtin_prefetch(&p->legs.at[p->edges.at[c].leg], 1);
    for (uint32_t c = t->child[edge]; c != NONE32; c = t->sibling[c])
        __builtin_prefetch(&t->lanes[p->legs.at[p->edges.at[c].leg].stream], 1);
}

static void place_children(struct timetable *t, uint32_t edge)
{
    struct plan *p = t->p;
    fetch_children(t, edge);
    for (uint32_t c = t->child[edge]; c != NONE32; c = t->sibling[c]) {
        uint32_t leg = p->edges.at[c].leg;
        struct plan_leg *l = &p->legs.at[leg];
        l->start = later(l->start, child_ready(p, &p->edges.at[edge], &p->edges.at[c]));
        l->base--;
        if ((l->base & ~(uint64_t)FEEDS) == 0)
            make_available(t, leg);
    }
}

static void place(struct timetable *t, uint32_t stream, uint64_t start)
{
    struct plan *p = t->p;
    struct lane *s = &t->lanes[stream];
    struct plan_leg *l = &p->legs.at[s->head];
    struct sender *out = &t->senders[s->out];
    struct receiver *in = &t->receivers[s->in];
    uint64_t took = plan_time(
        p, (uint8_t)(s->in >= p->topology->n_devices ? TIER_NETWORK : TIER_DOMAIN), l->bytes);
    l->start = start;
    out->free = in->free = start + took;
    out->left -= took;
    in->left -= took;
    s->head = l->next;
    if (s->head == NONE32)
        offer_drop(t, s);
    else
        offer_put(t, stream);
    for (uint32_t i = 0; (l->base & FEEDS) != 0 && i < l->n_edges; i++)
        place_children(t, p->leg_edges.at[l->first_edge + i]);
}

/* A stream's legs lie together; they follow each other by their starts (one link takes them in; ties of tiny ones by
 * number). */
static void chain_legs(struct plan *p, uint32_t *order)
{
    for (uint32_t first = 0, n; first < p->legs.n; first += n) {
        struct plan_stream *s = &p->streams.at[p->legs.at[first].stream];
        for (n = 0;
             first + n < p->legs.n && p->legs.at[first + n].stream == p->legs.at[first].stream;
             n++) {
            uint32_t k = n; /* most legs are placed in the order in which they lie */
            for (; k > 0 && p->legs.at[order[k - 1]].start > p->legs.at[first + n].start; k--)
                order[k] = order[k - 1];
            order[k] = first + n;
        }
        s->first_leg = order[0];
        s->last_leg = order[n - 1];
        for (uint32_t i = 0; i < n; i++) {
            struct plan_leg *l = &p->legs.at[order[i]];
            l->base = s->bytes;
            l->next = i + 1 < n ? order[i + 1] : NONE32;
            s->bytes += l->bytes;
        }
    }
}

/* What makes one offer better than another, as a number to be small: how much later than `now` it can start, then
 * that it is relayed further, then what its sender has left. */
static uint64_t offer_rank(const struct timetable *t, uint32_t offer, uint64_t now)
{
    uint32_t out = t->offers.out[offer];
    const struct sender *s = &t->senders[out & ~FEEDS];
    uint64_t wait = (later(later(now, s->free), t->offers.ready[offer]) - now) >> t->start_shift;
    wait = wait < (1U << 30) ? wait : 1U << 30;
    return wait << 33 | (uint64_t)((out & FEEDS) == 0) << 32 |
           (UINT32_MAX - (s->left >> t->left_shift));
}

/* The stream to receive from next on the port and its earliest start; NONE32 where nothing is available. Looks
 * no further once it has seen a few that can start at once. */
static uint32_t choose(const struct timetable *t, uint32_t port, uint64_t *ret_start)
{
    const struct receiver *in = &t->receivers[port];
    uint32_t best = NONE32, at_once = 0, end = in->first_offer + in->n_offers;
    uint64_t best_rank = UINT64_MAX, now = in->free;
    for (uint32_t i = in->first_offer; i < end && at_once < CANDIDATES; i++) {
        uint64_t rank = offer_rank(t, i, now);
        at_once += rank >> 33 == 0;
        best = rank < best_rank ? i : best;
        best_rank = rank < best_rank ? rank : best_rank;
    }
    if (best == NONE32)
        return NONE32;
    *ret_start =
        later(later(now, t->senders[t->offers.out[best] & ~FEEDS].free), t->offers.ready[best]);
    return t->offers.stream[best];
}

static uint32_t place_all(struct timetable *t)
{
    uint32_t placed = 0;
    while (t->n_heap > 0) {
        uint32_t port = t->heap[0];
        uint64_t start = 0;
        uint32_t stream = choose(t, port, &start);
        if (stream == NONE32) {
            heap_drop_first(t);
            continue;
        }
        if (start > t->heap_key[port]) { /* its senders are busy: others may go first */
            t->heap_key[port] = start;
            heap_down(t, 0);
            continue;
        }
        place(t, stream, start);
        placed++;
        t->heap_key[port] = later(t->heap_key[port], t->receivers[port].free);
        heap_down(t, t->heap_at[port]);
    }
    return placed;
}

/* --- set-up ----------------------------------------------------------------------------------- */

static int timetable_init(struct timetable *t, struct plan *p)
{
    size_t n_edges = p->edges.n + 1, n_streams = p->streams.n + 1;
    size_t n_ports = 2 * (size_t)p->topology->n_devices + 2;
    memset(t, 0, sizeof *t);
    t->p = p;
    t->child = mem_alloc(n_edges * sizeof *t->child);
    t->sibling = mem_alloc(n_edges * sizeof *t->sibling);
    t->lanes = mem_calloc(n_streams, sizeof *t->lanes);
    t->senders = mem_calloc(n_ports, sizeof *t->senders);
    t->receivers = mem_calloc(n_ports, sizeof *t->receivers);
    t->offers.ready = mem_alloc(n_streams * sizeof *t->offers.ready);
    t->offers.out = mem_alloc(n_streams * sizeof *t->offers.out);
    t->offers.stream = mem_alloc(n_streams * sizeof *t->offers.stream);
    t->heap = mem_calloc(n_ports, sizeof *t->heap);
    t->heap_at = mem_alloc(n_ports * sizeof *t->heap_at);
    t->heap_key = mem_calloc(n_ports, sizeof *t->heap_key);
    if (t->child == NULL || t->sibling == NULL || t->lanes == NULL || t->senders == NULL ||
        t->receivers == NULL || t->offers.ready == NULL || t->offers.out == NULL ||
        t->offers.stream == NULL || t->heap == NULL || t->heap_at == NULL || t->heap_key == NULL)
        return RS_ENOMEM;
    memset(t->child, 0xFF, n_edges * sizeof *t->child);
    memset(t->heap_at, 0xFF, n_ports * sizeof *t->heap_at);
    return 0;
}

static void timetable_close(struct timetable *t)
{
    mem_free(t->child);
    mem_free(t->sibling);
    mem_free(t->lanes);
    mem_free(t->senders);
    mem_free(t->receivers);
    mem_free(t->offers.ready);
    mem_free(t->offers.out);
    mem_free(t->offers.stream);
    mem_free(t->heap);
    mem_free(t->heap_at);
    mem_free(t->heap_key);
}

static void link_edges(struct timetable *t)
{
    struct plan *p = t->p;
    for (uint32_t i = (uint32_t)p->edges.n; i-- > 0;) {
        uint32_t parent = p->edges.at[i].parent;
        if (parent == NONE32)
            continue;
        uint32_t n = plan_edge_parents(p, &p->edges.at[i]);
        t->sibling[i] = t->child[parent];
        t->child[parent] = i;
        p->legs.at[p->edges.at[i].leg].base += n;
        for (uint32_t j = 0; j < n; j++)
            p->legs.at[p->edges.at[parent + j].leg].base |= FEEDS;
    }
    for (uint32_t i = 0; i < p->edges.n; i++) { /* parents side by side have the same children */
        uint32_t parent = p->edges.at[i].parent, n = plan_edge_parents(p, &p->edges.at[i]);
        for (uint32_t j = 1; j < n && t->child[parent] == i; j++)
            t->child[parent + j] = i;
    }
}

/* Ports of streams, which are sorted by receiver: the offers of one port stand together. */
static void link_ports(struct timetable *t)
{
    struct plan *p = t->p;
    uint32_t n_ports = 2 * p->topology->n_devices, sum = 0;
    for (uint32_t i = 0; i < p->streams.n; i++) {
        const struct plan_stream *s = &p->streams.at[i];
        t->lanes[i] = (struct lane){.head = NONE32,
                                    .tail = NONE32,
                                    .offer = NONE32,
                                    .in = port_of(p, s->to, s->tier),
                                    .out = port_of(p, s->from, s->tier)};
        t->receivers[t->lanes[i].in].first_offer++;
    }
    for (uint32_t i = 0; i < n_ports; i++) {
        uint32_t n = t->receivers[i].first_offer;
        t->receivers[i].first_offer = sum;
        sum += n;
    }
}

static unsigned bits(uint64_t v)
{
    return v == 0 ? 0 : 64 - (unsigned)__builtin_clzll(v);
}

static void load_ports(struct timetable *t)
{
    struct plan *p = t->p;
    uint64_t most = 0;
    for (uint32_t i = 0; i < p->legs.n; i++) {
        const struct plan_leg *l = &p->legs.at[i];
        uint64_t takes = plan_time(p, p->streams.at[l->stream].tier, l->bytes);
        t->receivers[t->lanes[l->stream].in].left += takes;
        t->senders[t->lanes[l->stream].out].left += takes;
    }
    for (uint32_t i = 0; i < 2 * p->topology->n_devices; i++)
        most = later(most, t->senders[i].left);
    t->left_shift = bits(most) > 32 ? bits(most) - 32 : 0;
    t->start_shift = bits(p->message_bytes / START_PART);
}

static void offer_first(struct timetable *t)
{
    for (uint32_t i = 0; i < t->p->legs.n; i++)
        if ((t->p->legs.at[i].base & ~(uint64_t)FEEDS) == 0)
            make_available(t, i);
}

static void part_tiers(struct plan *p)
{
    bool seen[3] = {false};
    for (uint32_t i = 0; i < p->streams.n; i++)
        seen[p->streams.at[i].tier] = true;
    p->apart = seen[TIER_DOMAIN] && seen[TIER_NETWORK];
}

int plan_rounds(struct plan *p, struct err *e)
{
    struct timetable t = {0};
    int r = build_legs(p);
    part_tiers(p);
    if (r == 0)
        r = timetable_init(&t, p);
    if (r == 0) {
        link_edges(&t);
        link_ports(&t);
        load_ports(&t);
        offer_first(&t);
        rs_assert(place_all(&t) == p->legs.n);
        chain_legs(p, t.child); /* not needed any more */
    }
    timetable_close(&t);
    if (r != 0)
        return err_set(e, r, "out of memory");
    for (uint32_t i = 0; i < p->legs.n; i++) {
        const struct plan_leg *l = &p->legs.at[i];
        uint64_t last = plan_round(p, TIER_DOMAIN, l->start + plan_time(p, TIER_NETWORK, l->bytes));
        if (last >= UINT32_MAX - 1)
            return err_set(e, RS_EEXHAUSTED,
                           "more than 2^32 rounds: chunk_bytes %llu is too small for this model",
                           (unsigned long long)p->options.chunk_bytes);
    }
    return 0;
}
