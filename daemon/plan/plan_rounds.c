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

/* A stream that can send something: what choosing needs, side by side. */
enum { CANDIDATES = 32 };
struct offer {
    uint64_t ready; /* of the leg at its head */
    uint32_t stream;
    uint32_t out;   /* sending port */
    uint32_t feeds; /* the leg is relayed further */
    uint32_t reserved;
};

struct timetable {
    struct plan *p;
    /* Per edge: children by first child and next sibling. */
    uint32_t *child, *sibling;
    /* Per leg. */
    uint32_t *waits; /* edges whose parents are not placed */
    uint64_t *ready;
    uint32_t *queued; /* next leg of the stream's queue */
    /* Per stream: the queue of available legs, and bytes not yet placed. */
    uint32_t *head, *tail;
    /* Per port (2 * device + network). */
    uint64_t *out_free, *in_free, *out_left, *in_left;
    uint32_t *port_first;  /* into offers, by receiving port: */
    uint32_t *port_offers; /* streams that have a leg available, in front of the port's range */
    struct offer *offers;
    uint32_t *offer_at; /* per stream, NONE32: nothing available */
    /* Heap of receiving ports by the earliest start known. */
    uint32_t *heap, *heap_at;
    uint64_t *heap_key;
    uint32_t n_heap;
};

static uint32_t port_of(uint32_t device, uint8_t tier)
{
    return 2 * device + (tier == TIER_NETWORK);
}

/* --- streams and legs
 * ------------------------------------------------------------------------------- */

/* Edges of runs with the most bytes first, and of those that are relayed further before the others: what fills up at
 * the end is small and nobody waits for it. */
static int order_edges(const struct plan *p, uint32_t *key, uint32_t *a, uint32_t *ret_order)
{
    uint32_t n = (uint32_t)p->edges.n;
    uint64_t *bytes = mem_alloc((n + 1U) * sizeof *bytes);
    if (bytes == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < n; i++) {
        bytes[i] = p->runs.at[p->edges.at[i].run].bytes;
        key[i] = 1;
    }
    for (uint32_t i = 0; i < n; i++)
        if (p->edges.at[i].parent != NONE32)
            key[p->edges.at[i].parent] = 0;
    int r = sort_descending(bytes, n, a);
    mem_free(bytes);
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
enum { LEG_PART = 16 };

static int build_legs(struct plan *p)
{
    uint64_t most = p->run_bytes / LEG_PART;
    most = most > p->message_bytes ? most : p->message_bytes;
    int r = sort_edges(p);
    for (uint32_t i = 0; i < p->leg_edges.n && r == 0; i++) {
        struct plan_edge *e = &p->edges.at[p->leg_edges.at[i]];
        uint64_t bytes = p->runs.at[e->run].bytes;
        bool fresh = p->streams.n == 0 || !same_stream(&p->streams.at[p->streams.n - 1], e);
        if (fresh)
            r = open_stream(p, e);
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

/* --- heap of receiving ports
 * ----------------------------------------------------------------------------- */

static bool heap_less(const struct timetable *t, uint32_t a, uint32_t b)
{
    if (t->heap_key[a] != t->heap_key[b])
        return t->heap_key[a] < t->heap_key[b];
    return t->in_left[a] != t->in_left[b] ? t->in_left[a] > t->in_left[b] : a < b;
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

/* --- placing
 * ------------------------------------------------------------------------------------------------
 */

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static bool feeds(const struct timetable *t, uint32_t leg)
{
    return t->child[t->p->leg_edges.at[t->p->legs.at[leg].first_edge]] != NONE32;
}

/* The stream has a (new) leg at its head. */
static void offer_put(struct timetable *t, uint32_t stream)
{
    const struct plan_stream *s = &t->p->streams.at[stream];
    uint32_t in = port_of(s->to, s->tier), leg = t->head[stream];
    if (t->offer_at[stream] == NONE32)
        t->offer_at[stream] = t->port_first[in] + t->port_offers[in]++;
    t->offers[t->offer_at[stream]] = (struct offer){.ready = t->ready[leg],
                                                    .stream = stream,
                                                    .out = port_of(s->from, s->tier),
                                                    .feeds = feeds(t, leg)};
}

static void offer_drop(struct timetable *t, uint32_t stream, uint32_t in)
{
    uint32_t at = t->offer_at[stream], last = t->port_first[in] + --t->port_offers[in];
    t->offers[at] = t->offers[last];
    t->offer_at[t->offers[at].stream] = at;
    t->offer_at[stream] = NONE32;
}

/* The leg joins its stream's queue: all that it depends on is placed. */
static void make_available(struct timetable *t, uint32_t leg)
{
    uint32_t stream = t->p->legs.at[leg].stream;
    const struct plan_stream *s = &t->p->streams.at[stream];
    t->queued[leg] = NONE32;
    if (t->head[stream] == NONE32) {
        t->head[stream] = leg;
        offer_put(t, stream);
    } else {
        t->queued[t->tail[stream]] = leg;
    }
    t->tail[stream] = leg;
    uint32_t in = port_of(s->to, s->tier);
    heap_offer(t, in, later(t->in_free[in], t->ready[leg]));
}

/* Earliest start of child edge c's leg, whose parent edge has just been placed: see plan_messages.c on why rounds are
 * strictly later then. The last term is for a child that runs faster than its parent; what stands before the edge in
 * its leg gives time. */
static uint64_t child_ready(const struct plan *p, const struct plan_edge *parent,
                            const struct plan_edge *c)
{
    const struct plan_leg *from = &p->legs.at[parent->leg];
    uint64_t bytes = p->runs.at[c->run].bytes, u = p->message_bytes;
    uint64_t begin = from->start + plan_time(p, parent->tier, parent->offset);
    uint64_t took = plan_time(p, parent->tier, bytes), takes = plan_time(p, c->tier, bytes);
    uint64_t ready = begin + later(2 * u, u + plan_time(p, parent->tier, u)) + p->cut_bytes + 2 +
                     (took > takes ? took - takes : 0);
    uint64_t before = plan_time(p, c->tier, c->offset);
    return ready > before ? ready - before : 0;
}

static void place_children(struct timetable *t, uint32_t edge)
{
    struct plan *p = t->p;
    for (uint32_t c = t->child[edge]; c != NONE32; c = t->sibling[c]) {
        uint32_t leg = p->edges.at[c].leg;
        t->ready[leg] = later(t->ready[leg], child_ready(p, &p->edges.at[edge], &p->edges.at[c]));
        if (--t->waits[leg] == 0)
            make_available(t, leg);
    }
}

static void place(struct timetable *t, uint32_t stream, uint64_t start)
{
    struct plan *p = t->p;
    struct plan_stream *s = &p->streams.at[stream];
    uint32_t leg = t->head[stream];
    struct plan_leg *l = &p->legs.at[leg];
    uint32_t in = port_of(s->to, s->tier), out = port_of(s->from, s->tier);
    uint64_t took = plan_time(p, s->tier, l->bytes);
    t->head[stream] = t->queued[leg];
    l->start = start;
    l->base = s->bytes;
    s->bytes += l->bytes;
    if (s->last_leg == NONE32)
        s->first_leg = leg;
    else
        p->legs.at[s->last_leg].next = leg;
    s->last_leg = leg;
    t->in_free[in] = start + took;
    t->out_free[out] = start + took;
    t->out_left[out] -= took;
    t->in_left[in] -= took;
    if (t->head[stream] == NONE32)
        offer_drop(t, stream, in);
    else
        offer_put(t, stream);
    for (uint32_t i = 0; i < l->n_edges; i++)
        place_children(t, p->leg_edges.at[l->first_edge + i]);
}

/* Of two legs that can start at once: what is relayed further, then the sender with most left. */
static bool better(const struct timetable *t, const struct offer *a, const struct offer *b)
{
    if (a->feeds != b->feeds)
        return a->feeds > b->feeds;
    return t->out_left[a->out] > t->out_left[b->out];
}

/* The stream to receive from next on the port and its earliest start; NONE32 where nothing is available. Looks
 * no further once it has seen a few that can start at once. */
static uint32_t choose(const struct timetable *t, uint32_t port, uint64_t *ret_start)
{
    const struct offer *best = NULL;
    uint64_t best_start = UINT64_MAX;
    uint32_t at_once = 0;
    for (uint32_t i = 0; i < t->port_offers[port] && at_once < CANDIDATES; i++) {
        const struct offer *o = &t->offers[t->port_first[port] + i];
        uint64_t start = later(later(t->in_free[port], t->out_free[o->out]), o->ready);
        at_once += start == t->in_free[port];
        if (start > best_start || (start == best_start && !better(t, o, best)))
            continue;
        best = o;
        best_start = start;
    }
    *ret_start = best_start;
    return best == NULL ? NONE32 : best->stream;
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
        t->heap_key[port] = later(t->heap_key[port], t->in_free[port]);
        heap_down(t, t->heap_at[port]);
    }
    return placed;
}

/* --- set-up
 * -------------------------------------------------------------------------------------------------
 */

static int timetable_init(struct timetable *t, struct plan *p)
{
    size_t n_edges = p->edges.n + 1, n_legs = p->legs.n + 1, n_streams = p->streams.n + 1;
    size_t n_ports = 2 * (size_t)p->topology->n_devices + 2;
    memset(t, 0, sizeof *t);
    t->p = p;
    t->child = mem_alloc(n_edges * sizeof *t->child);
    t->sibling = mem_alloc(n_edges * sizeof *t->sibling);
    t->waits = mem_calloc(n_legs, sizeof *t->waits);
    t->ready = mem_calloc(n_legs, sizeof *t->ready);
    t->queued = mem_calloc(n_legs, sizeof *t->queued);
    t->head = mem_alloc(n_streams * sizeof *t->head);
    t->tail = mem_calloc(n_streams, sizeof *t->tail);
    t->out_free = mem_calloc(n_ports, sizeof *t->out_free);
    t->in_free = mem_calloc(n_ports, sizeof *t->in_free);
    t->out_left = mem_calloc(n_ports, sizeof *t->out_left);
    t->in_left = mem_calloc(n_ports, sizeof *t->in_left);
    t->port_first = mem_calloc(n_ports + 1, sizeof *t->port_first);
    t->port_offers = mem_calloc(n_ports, sizeof *t->port_offers);
    t->offers = mem_calloc(n_streams, sizeof *t->offers);
    t->offer_at = mem_alloc(n_streams * sizeof *t->offer_at);
    t->heap = mem_calloc(n_ports, sizeof *t->heap);
    t->heap_at = mem_alloc(n_ports * sizeof *t->heap_at);
    t->heap_key = mem_calloc(n_ports, sizeof *t->heap_key);
    if (t->child == NULL || t->sibling == NULL || t->waits == NULL || t->ready == NULL ||
        t->queued == NULL || t->head == NULL || t->tail == NULL || t->out_free == NULL ||
        t->in_free == NULL || t->out_left == NULL || t->in_left == NULL || t->port_first == NULL ||
        t->port_offers == NULL || t->offers == NULL || t->offer_at == NULL || t->heap == NULL ||
        t->heap_at == NULL || t->heap_key == NULL)
        return RS_ENOMEM;
    memset(t->child, 0xFF, n_edges * sizeof *t->child);
    memset(t->head, 0xFF, n_streams * sizeof *t->head);
    memset(t->offer_at, 0xFF, n_streams * sizeof *t->offer_at);
    memset(t->heap_at, 0xFF, n_ports * sizeof *t->heap_at);
    return 0;
}

static void timetable_close(struct timetable *t)
{
    mem_free(t->child);
    mem_free(t->sibling);
    mem_free(t->waits);
    mem_free(t->ready);
    mem_free(t->queued);
    mem_free(t->head);
    mem_free(t->tail);
    mem_free(t->out_free);
    mem_free(t->in_free);
    mem_free(t->out_left);
    mem_free(t->port_first);
    mem_free(t->port_offers);
    mem_free(t->offers);
    mem_free(t->offer_at);
    mem_free(t->in_left);
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
        t->sibling[i] = t->child[parent];
        t->child[parent] = i;
        t->waits[p->edges.at[i].leg]++;
    }
}

static void link_ports(struct timetable *t)
{
    struct plan *p = t->p;
    for (uint32_t i = 0; i < p->streams.n; i++)
        t->port_first[port_of(p->streams.at[i].to, p->streams.at[i].tier) + 1]++;
    for (uint32_t i = 0; i < 2 * p->topology->n_devices; i++)
        t->port_first[i + 1] += t->port_first[i];
}

static void offer_first(struct timetable *t)
{
    struct plan *p = t->p;
    for (uint32_t i = 0; i < p->legs.n; i++) {
        const struct plan_leg *l = &p->legs.at[i];
        const struct plan_stream *s = &p->streams.at[l->stream];
        t->out_left[port_of(s->from, s->tier)] += plan_time(p, s->tier, l->bytes);
        t->in_left[port_of(s->to, s->tier)] += plan_time(p, s->tier, l->bytes);
    }
    for (uint32_t i = 0; i < p->legs.n; i++)
        if (t->waits[i] == 0)
            make_available(t, i);
}

int plan_rounds(struct plan *p, struct err *e)
{
    struct timetable t = {0};
    int r = build_legs(p);
    if (r == 0)
        r = timetable_init(&t, p);
    if (r == 0) {
        link_edges(&t);
        link_ports(&t);
    }
    if (r == 0) {
        offer_first(&t);
        rs_assert(place_all(&t) == p->legs.n);
    }
    timetable_close(&t);
    if (r != 0)
        return err_set(e, r, "out of memory");
    for (uint32_t i = 0; i < p->legs.n; i++) {
        const struct plan_leg *l = &p->legs.at[i];
        uint64_t last = (l->start + plan_time(p, TIER_NETWORK, l->bytes)) / p->message_bytes;
        if (last >= UINT32_MAX - 1)
            return err_set(e, RS_EEXHAUSTED,
                           "more than 2^32 rounds: chunk_bytes %llu is too small for this model",
                           (unsigned long long)p->options.chunk_bytes);
    }
    return 0;
}
