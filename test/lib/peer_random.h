/* Random messages between daemons, every field set, and a text of a message that has every field: what goes in must come
 * out. Used by test_peer_frame.c and fuzz_peer.c. */
#ifndef TEST_LIB_PEER_RANDOM_H
#define TEST_LIB_PEER_RANDOM_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "peer/frame.h"

#define PEER_NOW UINT64_C(1000000000000)

static uint64_t rnd(uint64_t *s, uint64_t below)
{
    return random_next(s) % below;
}

/* --- memory: one pool per message, freed at once --------------------------------------------------- */

struct pool {
    void *p[512];
    unsigned n;
};

static void *pool_take(struct pool *pool, size_t n, size_t bytes)
{
    void *p = calloc(n + 1, bytes);
    if (p == NULL || pool->n == sizeof pool->p / sizeof *pool->p)
        abort();
    pool->p[pool->n++] = p;
    return p;
}

static void pool_free(struct pool *pool)
{
    while (pool->n > 0)
        free(pool->p[--pool->n]);
}

static const char *rnd_text(uint64_t *s, struct pool *pool)
{
    size_t n = rnd(s, 20);
    char *t = pool_take(pool, n, 1);
    for (size_t i = 0; i < n; i++)
        t[i] = (char)('!' + rnd(s, 90));
    return t;
}

static void rnd_bytes(uint64_t *s, void *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ((uint8_t *)to)[i] = (uint8_t)random_next(s);
}

/* A monotonic time at or before PEER_NOW, or 0. */
static uint64_t rnd_past(uint64_t *s)
{
    return rnd(s, 4) == 0 ? 0 : PEER_NOW - rnd(s, PEER_NOW / 2);
}

/* --- messages -------------------------------------------------------------------------------------- */

static const enum refit_event_type report_events[] = {
    REFIT_EV_ATTACHED, REFIT_EV_LEFT,     REFIT_EV_SLEPT,   REFIT_EV_PUBLISHED, REFIT_EV_READY,
    REFIT_EV_VERDICT,  REFIT_EV_APPLY,    REFIT_EV_APPLIED, REFIT_EV_WITHDRAW,  REFIT_EV_MARK,
    REFIT_EV_PREPARED, REFIT_EV_PROGRESS, REFIT_EV_STAGED,  REFIT_EV_FAILED,    REFIT_EV_QUIESCED,
    REFIT_EV_NODE_UP,  REFIT_EV_NODE_LOST};
enum { N_REPORT_EVENTS = sizeof report_events / sizeof *report_events };

static const struct publication_print *rnd_prints(uint64_t *s, struct pool *pool, uint32_t *n)
{
    *n = (uint32_t)rnd(s, 30);
    struct publication_print *p = pool_take(pool, *n, sizeof *p);
    for (uint32_t i = 0; i < *n; i++)
        p[i] = (struct publication_print){(uint32_t)random_next(s), random_next(s)};
    return p;
}

static void rnd_node_event(uint64_t *s, struct pool *pool, struct node_report *r)
{
    struct refit_event *ev = &r->event;
    ev->node.attempt = random_next(s);
    ev->node.code = -(int)rnd(s, 22);
    ev->node.text = rnd_text(s, pool);
    ev->node.worker = random_next(s);
    ev->node.committed = random_next(s);
    ev->node.data_plane = random_next(s);
    rnd_bytes(s, &ev->node.bytes, sizeof ev->node.bytes);
    ev->node.first_byte_ns = rnd_past(s);
    ev->node.last_byte_ns = rnd_past(s);
    ev->node.sources_read_ns = rnd_past(s);
    ev->node.verified_ns = rnd_past(s);
    ev->node.sources_known = rnd(s, 2) != 0;
    r->data_port = (uint16_t)random_next(s);
    r->n_folds = (uint32_t)rnd(s, 9);
    struct memory_fold *folds = pool_take(pool, r->n_folds, sizeof *folds);
    for (uint32_t i = 0; i < r->n_folds; i++) {
        rnd_bytes(s, folds[i].layout, 16);
        folds[i].rank = (uint32_t)random_next(s);
        folds[i].fold = random_next(s);
    }
    r->folds = folds;
    r->n_landed_bytes = (uint32_t)rnd(s, 20);
    uint8_t *landed = pool_take(pool, r->n_landed_bytes, 1);
    rnd_bytes(s, landed, r->n_landed_bytes);
    r->landed = landed;
}

static void rnd_event(uint64_t *s, struct pool *pool, struct node_report *r)
{
    struct refit_event *ev = &r->event;
    ev->cookie = random_next(s);
    ev->type = report_events[rnd(s, N_REPORT_EVENTS)];
    switch (ev->type) {
    case REFIT_EV_ATTACHED:
        ev->attached.worker = random_next(s);
        ev->attached.side = (enum refit_side)(1 + rnd(s, 2));
        ev->attached.layout_name = rnd_text(s, pool);
        ev->attached.rank = (uint32_t)random_next(s);
        ev->attached.receive = (enum refit_receive)rnd(s, 3);
        ev->attached.accept_automatically = rnd(s, 2) != 0;
        ev->attached.live = random_next(s);
        ev->attached.shadow = random_next(s);
        ev->attached.torn = rnd(s, 2) != 0;
        ev->attached.waits_for = random_next(s);
        ev->attached.push = (uint32_t)random_next(s);
        ev->attached.again = rnd(s, 2) != 0;
        ev->attached.published = random_next(s);
        ev->attached.uncommitted = random_next(s);
        ev->attached.uncommitted_content = random_next(s);
        ev->attached.tells_memory = rnd(s, 2) != 0;
        ev->attached.asleep = rnd(s, 2) != 0;
        rnd_bytes(s, r->layout, 16);
        r->device = (uint32_t)random_next(s);
        r->pid = (int32_t)random_next(s);
        r->segment_bytes = random_next(s);
        r->live_fold = random_next(s);
        r->shadow_fold = random_next(s);
        r->opened = random_next(s);
        break;
    case REFIT_EV_SLEPT:
        ev->left.worker = random_next(s);
        break;
    case REFIT_EV_WITHDRAW:
        ev->withdraw.worker = random_next(s);
        ev->withdraw.version = random_next(s);
        ev->withdraw.push = (uint32_t)random_next(s);
        ev->withdraw.again = rnd(s, 2) != 0;
        ev->withdraw.reason = rnd_text(s, pool);
        break;
    case REFIT_EV_LEFT:
        ev->left.worker = random_next(s);
        ev->left.for_good = rnd(s, 2) != 0;
        ev->left.reason = rnd_text(s, pool);
        break;
    case REFIT_EV_PUBLISHED:
        ev->published.worker = random_next(s);
        ev->published.push = (uint32_t)random_next(s);
        ev->published.version = random_next(s);
        ev->published.publication = random_next(s);
        r->has_prints = rnd(s, 3) != 0;
        if (r->has_prints)
            r->prints = rnd_prints(s, pool, &r->n_prints);
        r->expected = rnd_prints(s, pool, &r->n_expected);
        break;
    case REFIT_EV_READY:
        ev->ready.worker = random_next(s);
        ev->ready.version = random_next(s);
        break;
    case REFIT_EV_VERDICT:
        ev->verdict.worker = random_next(s);
        ev->verdict.version = random_next(s);
        ev->verdict.attempt = random_next(s);
        ev->verdict.accept = rnd(s, 2) != 0;
        ev->verdict.reason = rnd_text(s, pool);
        break;
    case REFIT_EV_APPLY:
        ev->apply.worker = random_next(s);
        ev->apply.version = random_next(s);
        ev->apply.skip = rnd(s, 2) != 0;
        break;
    case REFIT_EV_APPLIED:
        ev->applied.worker = random_next(s);
        ev->applied.version = random_next(s);
        ev->applied.code = -(int)rnd(s, 22);
        ev->applied.text = rnd_text(s, pool);
        break;
    case REFIT_EV_MARK:
        ev->mark.version = random_next(s);
        ev->mark.name = rnd_text(s, pool);
        ev->mark.worker = random_next(s);
        break;
    default:
        rnd_node_event(s, pool, r);
    }
}

static void rnd_report(uint64_t *s, struct pool *pool, struct node_report *r)
{
    *r = (struct node_report){.type = (enum node_report_type)(1 + rnd(s, NODE_REPORT_CELL_SUM))};
    r->model = rnd_text(s, pool);
    if (r->type == NODE_REPORT_EVENT) {
        rnd_event(s, pool, r);
    } else if (r->type == NODE_REPORT_PUBLISH_ASK) {
        r->cookie = random_next(s);
        r->worker = random_next(s);
        r->version = random_next(s);
    } else if (r->type == NODE_REPORT_CELL_SUM) {
        r->attempt = random_next(s);
        r->n_runs = (uint32_t)rnd(s, 50);
        struct cell_run *runs = pool_take(pool, r->n_runs, sizeof *runs);
        for (uint32_t i = 0; i < r->n_runs; i++)
            runs[i] = (struct cell_run){random_next(s), (uint32_t)random_next(s)};
        r->runs = runs;
        rnd_bytes(s, r->digest, sizeof r->digest);
    } else if (r->type == NODE_REPORT_COMM_ID) {
        r->attempt = random_next(s);
        rnd_bytes(s, r->comm_id, sizeof r->comm_id);
    } else {
        r->attempt = random_next(s);
        r->n_cells = (uint32_t)rnd(s, 50);
        struct cell_print *cells = pool_take(pool, r->n_cells, sizeof *cells);
        for (uint32_t i = 0; i < r->n_cells; i++)
            cells[i] = (struct cell_print){random_next(s), random_next(s), (uint32_t)random_next(s),
                                           (uint32_t)random_next(s)};
        r->cells = cells;
    }
}

static struct topology *rnd_topology(uint64_t *s, struct pool *pool)
{
    struct topology *t = pool_take(pool, 1, sizeof *t);
    t->n_nodes = 1 + (uint32_t)rnd(s, 6);
    t->n_domains = 1 + (uint32_t)rnd(s, 6);
    t->nodes = pool_take(pool, t->n_nodes, sizeof *t->nodes);
    t->domains = pool_take(pool, t->n_domains, sizeof *t->domains);
    for (uint32_t i = 0; i < t->n_nodes; i++)
        t->nodes[i] = (char *)(uintptr_t)rnd_text(s, pool);
    for (uint32_t i = 0; i < t->n_domains; i++)
        t->domains[i] = (char *)(uintptr_t)rnd_text(s, pool);
    t->devices = pool_take(pool, t->n_nodes * 8, sizeof *t->devices);
    for (uint32_t n = 0; n < t->n_nodes; n++)
        for (uint32_t l = 0, most = (uint32_t)rnd(s, 9); l < most; l++)
            t->devices[t->n_devices++] =
                (struct device_place){n, l, (uint32_t)rnd(s, t->n_domains)};
    t->network_bytes_per_s = (double)rnd(s, 1000000) / 7;
    t->domain_bytes_per_s = (double)rnd(s, 1000000) / 3;
    return t;
}

static struct attempt_input *rnd_input(uint64_t *s, struct pool *pool)
{
    struct attempt_input *i = pool_take(pool, 1, sizeof *i);
    i->topology = rnd_topology(s, pool);
    uint32_t *nodes = pool_take(pool, i->topology->n_nodes, sizeof *nodes);
    for (uint32_t k = 0; k < i->topology->n_nodes; k++)
        nodes[k] = (k > 0 ? nodes[k - 1] + 1 : 0) + (uint32_t)rnd(s, 100);
    i->nodes = nodes;
    rnd_bytes(s, i->source, 16);
    i->n_destinations = (uint32_t)rnd(s, 5);
    uint8_t(*digests)[16] = pool_take(pool, i->n_destinations, sizeof *digests);
    rnd_bytes(s, digests, i->n_destinations * sizeof *digests);
    i->destinations = (const uint8_t(*)[16])digests;
    i->n_participants = (uint32_t)rnd(s, 40);
    struct participant *p = pool_take(pool, i->n_participants, sizeof *p);
    for (uint32_t k = 0; k < i->n_participants; k++)
        p[k] = (struct participant){random_next(s),
                                    (uint32_t)rnd(s, NODE_MAX),
                                    (uint32_t)random_next(s),
                                    (uint32_t)rnd(s, i->n_destinations + 1),
                                    (uint32_t)random_next(s),
                                    rnd(s, 2) != 0,
                                    rnd(s, 2) != 0};
    i->participants = p;
    i->options.strategy = (enum plan_strategy)rnd(s, 3);
    i->options.n_rules = (uint32_t)rnd(s, 4);
    struct plan_rule *rules = pool_take(pool, i->options.n_rules, sizeof *rules);
    for (uint32_t k = 0; k < i->options.n_rules; k++)
        rules[k] = (struct plan_rule){rnd_text(s, pool), (enum plan_strategy)rnd(s, 3)};
    i->options.rules = rules;
    i->options.relay = rnd(s, 2) != 0;
    i->options.staging_ingest = rnd(s, 2) != 0;
    i->options.least_piece_bytes = random_next(s);
    i->options.chunk_bytes = random_next(s);
    i->options.ring_slots = (uint32_t)random_next(s);
    i->verify = (uint32_t)rnd(s, 3);
    return i;
}

static void rnd_order(uint64_t *s, struct pool *pool, struct node_order *o)
{
    *o = (struct node_order){.type = (enum node_order_type)(1 + rnd(s, NODE_ORDER_CELLS))};
    o->model = rnd_text(s, pool);
    uint64_t *numbers[] = {&o->version, &o->attempt, &o->epoch,     &o->worker,
                           &o->cookie,  &o->value,   &o->wall_ns,   &o->held,
                           &o->applied, &o->content, &o->data_plane};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        *numbers[i] = random_next(s);
    o->phase = (enum refit_phase)rnd(s, REFIT_N_PHASES);
    o->tell = (enum refit_tell)rnd(s, REFIT_TELL_WITHDRAWN + 1);
    o->code = -(int)rnd(s, 22);
    o->text = rnd_text(s, pool);
    if (o->type != NODE_ORDER_PREPARE)
        return;
    o->deadline_ns = rnd(s, 4) == 0 ? REFIT_NEVER : PEER_NOW + rnd(s, PEER_NOW);
    o->transfer_timeout_ms = (uint32_t)random_next(s);
    o->input = rnd_input(s, pool);
    rnd_bytes(s, o->plan_digest, 16);
    rnd_bytes(s, o->input_digests, sizeof o->input_digests);
    o->n_peers = (uint32_t)rnd(s, 6);
    struct attempt_peer *peers = pool_take(pool, o->n_peers, sizeof *peers);
    for (uint32_t i = 0; i < o->n_peers; i++) {
        peers[i].node = (uint32_t)rnd(s, NODE_MAX);
        (void)snprintf(peers[i].address, sizeof peers[i].address, "10.%u.0.%u",
                       (unsigned)rnd(s, 256), (unsigned)rnd(s, 256));
        peers[i].port = (uint16_t)(1 + rnd(s, 65535));
        rnd_bytes(s, peers[i].token, sizeof peers[i].token);
    }
    o->peers = peers;
    o->n_landed = (uint32_t)rnd(s, 4);
    struct attempt_landed *landed = pool_take(pool, o->n_landed, sizeof *landed);
    for (uint32_t i = 0; i < o->n_landed; i++) {
        uint32_t n = 1 + (uint32_t)rnd(s, 30);
        uint8_t *holds = pool_take(pool, n, 1);
        rnd_bytes(s, holds, n);
        landed[i] = (struct attempt_landed){(uint32_t)rnd(s, NODE_MAX), random_next(s), holds, n};
    }
    o->landed = landed;
    o->has_comm_id = rnd(s, 2) != 0;
    if (o->has_comm_id)
        rnd_bytes(s, o->comm_id, sizeof o->comm_id);
    o->shrink.n_excluded = o->has_comm_id ? (uint32_t)rnd(s, NODE_MAX_EXCLUDED + 1) : 0;
    for (uint32_t i = 0; i < o->shrink.n_excluded; i++)
        o->shrink.excluded[i] = (uint32_t)rnd(s, 1024);
    if (o->shrink.n_excluded > 0)
        rnd_bytes(s, o->shrink.parent, sizeof o->shrink.parent);
}

static void rnd_join(uint64_t *s, struct pool *pool, struct frame_join *j)
{
    struct peer_member *m = &j->member;
    j->name = rnd_text(s, pool);
    j->number = (uint32_t)random_next(s);
    j->coordinator = rnd_text(s, pool);
    m->incarnation = random_next(s);
    m->protocol = (uint32_t)random_next(s);
    (void)snprintf(m->release, sizeof m->release, "%s", rnd_text(s, pool));
    (void)snprintf(m->data_address, sizeof m->data_address, "%s", rnd_text(s, pool));
    (void)snprintf(m->environment, sizeof m->environment, "%s", rnd_text(s, pool));
    m->n_devices = (uint32_t)rnd(s, 9);
    const char **domains = pool_take(pool, m->n_devices, sizeof *domains);
    for (uint32_t i = 0; i < m->n_devices; i++)
        domains[i] = rnd_text(s, pool);
    m->domain_of_device = domains;
    m->n_commits = (uint32_t)rnd(s, 5);
    struct peer_commit *commits = pool_take(pool, m->n_commits, sizeof *commits);
    for (uint32_t i = 0; i < m->n_commits; i++)
        commits[i] = (struct peer_commit){rnd_text(s, pool), random_next(s)};
    m->commits = commits;
}

/* A frame of any type that goes that way, but for parts. */
static void rnd_frame(uint64_t *s, struct pool *pool, bool up, struct frame *f)
{
    memset(f, 0, sizeof *f);
    switch (rnd(s, up ? 8 : 6)) {
    case 0:
        f->type = FRAME_BEAT;
        f->beat.sequence = random_next(s);
        f->beat.round_trip_ns = random_next(s);
        break;
    case 1:
        f->type = up ? FRAME_GOODBYE : FRAME_WELCOME;
        if (up)
            break;
        f->welcome.incarnation = random_next(s);
        f->welcome.number = (uint32_t)random_next(s);
        f->welcome.beat_ms = 1 + (uint32_t)rnd(s, 1000);
        f->welcome.lease_ms = f->welcome.beat_ms + (uint32_t)rnd(s, 1000);
        (void)snprintf(f->welcome.release, sizeof f->welcome.release, "%s", rnd_text(s, pool));
        rnd_bytes(s, f->welcome.token, sizeof f->welcome.token);
        break;
    case 2:
        if (up) {
            f->type = FRAME_JOIN;
            rnd_join(s, pool, &f->join);
            break;
        }
        /* fallthrough */
    default:
        f->type = up ? FRAME_REPORT : FRAME_ORDER;
        if (up)
            rnd_report(s, pool, &f->report);
        else
            rnd_order(s, pool, &f->order);
    }
}

/* --- as text: every field, times moved by `shift` -------------------------------------------------- */

static uint64_t moved(uint64_t t, uint64_t shift)
{
    return t == 0 || t == REFIT_NEVER ? t : t + shift;
}

static void say_hex(struct buf *b, const void *data, size_t n)
{
    for (size_t i = 0; i < n; i++)
        buf_printf(b, "%02x", ((const uint8_t *)data)[i]);
    buf_printf(b, " ");
}

static void say_prints(struct buf *b, const struct publication_print *p, uint32_t n)
{
    buf_printf(b, "prints %u ", n);
    for (uint32_t i = 0; i < n; i++)
        buf_printf(b, "%u:%" PRIx64 " ", p[i].tensor, p[i].fingerprint);
}

static void say_event(struct buf *b, const struct node_report *r, uint64_t shift)
{
    const struct refit_event *ev = &r->event;
    buf_printf(b, "event %d cookie %" PRIu64 " ", ev->type, ev->cookie);
    switch (ev->type) {
    case REFIT_EV_ATTACHED:
        buf_printf(b, "%" PRIu64 " %d %s %u %d %d %" PRIu64 " %" PRIu64 " %d %" PRIu64 " ",
                   ev->attached.worker, ev->attached.side, ev->attached.layout_name,
                   ev->attached.rank, ev->attached.receive, ev->attached.accept_automatically,
                   ev->attached.live, ev->attached.shadow, ev->attached.torn,
                   ev->attached.waits_for);
        buf_printf(b, "%" PRIu64 " %" PRIu64 " %d %d %u %d %" PRIu64 " ", ev->attached.uncommitted,
                   ev->attached.uncommitted_content, ev->attached.tells_memory, ev->attached.asleep,
                   ev->attached.push, ev->attached.again, ev->attached.published);
        say_hex(b, r->layout, 16);
        buf_printf(b, "%u %d %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64, r->device, r->pid,
                   r->segment_bytes, r->live_fold, r->shadow_fold, r->opened);
        break;
    case REFIT_EV_SLEPT:
        buf_printf(b, "%" PRIu64, ev->left.worker);
        break;
    case REFIT_EV_WITHDRAW:
        buf_printf(b, "%" PRIu64 " %" PRIu64 " %u %d '%s'", ev->withdraw.worker,
                   ev->withdraw.version, ev->withdraw.push, ev->withdraw.again,
                   ev->withdraw.reason);
        break;
    case REFIT_EV_LEFT:
        buf_printf(b, "%" PRIu64 " %d '%s'", ev->left.worker, ev->left.for_good, ev->left.reason);
        break;
    case REFIT_EV_PUBLISHED:
        buf_printf(b, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %u %d ", ev->published.worker,
                   ev->published.version, ev->published.publication, ev->published.push,
                   r->has_prints);
        say_prints(b, r->prints, r->n_prints);
        say_prints(b, r->expected, r->n_expected);
        break;
    case REFIT_EV_READY:
        buf_printf(b, "%" PRIu64 " %" PRIu64, ev->ready.worker, ev->ready.version);
        break;
    case REFIT_EV_VERDICT:
        buf_printf(b, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %d '%s'", ev->verdict.worker,
                   ev->verdict.version, ev->verdict.attempt, ev->verdict.accept,
                   ev->verdict.reason);
        break;
    case REFIT_EV_APPLY:
        buf_printf(b, "%" PRIu64 " %" PRIu64 " %d", ev->apply.worker, ev->apply.version,
                   ev->apply.skip);
        break;
    case REFIT_EV_APPLIED:
        buf_printf(b, "%" PRIu64 " %" PRIu64 " %d '%s'", ev->applied.worker, ev->applied.version,
                   ev->applied.code, ev->applied.text);
        break;
    case REFIT_EV_MARK:
        buf_printf(b, "%" PRIu64 " '%s' %" PRIu64, ev->mark.version, ev->mark.name,
                   ev->mark.worker);
        break;
    default:
        buf_printf(b, "%" PRIu64 " %d '%s' %" PRIu64 " %" PRIu64 " %" PRIu64 " ", ev->node.attempt,
                   ev->node.code, ev->node.text, ev->node.worker, ev->node.committed,
                   ev->node.data_plane);
        say_hex(b, &ev->node.bytes, sizeof ev->node.bytes);
        buf_printf(b, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " port %u folds %u ",
                   moved(ev->node.first_byte_ns, shift), moved(ev->node.last_byte_ns, shift),
                   moved(ev->node.sources_read_ns, shift), moved(ev->node.verified_ns, shift),
                   r->data_port, r->n_folds);
        for (uint32_t i = 0; i < r->n_folds; i++) {
            say_hex(b, r->folds[i].layout, 16);
            buf_printf(b, "%u %" PRIu64 " ", r->folds[i].rank, r->folds[i].fold);
        }
        say_hex(b, r->landed, r->n_landed_bytes);
    }
}

static void say_report(struct buf *b, const struct node_report *r, uint64_t shift)
{
    buf_printf(b, "report %d model '%s' ", r->type, r->model);
    if (r->type == NODE_REPORT_EVENT)
        say_event(b, r, shift);
    else
        buf_printf(b, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " cells %u ", r->cookie,
                   r->worker, r->version, r->attempt, r->n_cells);
    for (uint32_t i = 0; r->type == NODE_REPORT_CELLS && i < r->n_cells; i++)
        buf_printf(b, "%" PRIu64 ":%" PRIx64 ":%u:%u ", r->cells[i].cell, r->cells[i].fingerprint,
                   r->cells[i].layout, r->cells[i].rank);
    for (uint32_t i = 0; r->type == NODE_REPORT_CELL_SUM && i < r->n_runs; i++)
        buf_printf(b, "%" PRIu64 "+%u ", r->runs[i].cell, r->runs[i].n);
    if (r->type == NODE_REPORT_CELL_SUM)
        say_hex(b, r->digest, sizeof r->digest);
    if (r->type == NODE_REPORT_COMM_ID)
        say_hex(b, r->comm_id, sizeof r->comm_id);
}

static void say_input(struct buf *b, const struct attempt_input *i)
{
    const struct topology *t = i->topology;
    buf_printf(b, "topology %u %u %u %.17g %.17g ", t->n_nodes, t->n_domains, t->n_devices,
               t->network_bytes_per_s, t->domain_bytes_per_s);
    for (uint32_t k = 0; k < t->n_nodes; k++)
        buf_printf(b, "%u='%s' ", i->nodes[k], t->nodes[k]);
    for (uint32_t k = 0; k < t->n_domains; k++)
        buf_printf(b, "'%s' ", t->domains[k]);
    for (uint32_t k = 0; k < t->n_devices; k++)
        buf_printf(b, "%u:%u:%u ", t->devices[k].node, t->devices[k].local, t->devices[k].domain);
    say_hex(b, i->source, 16);
    say_hex(b, i->destinations, i->n_destinations * 16U);
    for (uint32_t k = 0; k < i->n_participants; k++)
        buf_printf(b, "%" PRIu64 ":%u:%u:%u:%u:%d:%d ", i->participants[k].worker,
                   i->participants[k].node, i->participants[k].device, i->participants[k].layout,
                   i->participants[k].rank, i->participants[k].held, i->participants[k].shadow);
    const struct plan_options *o = &i->options;
    buf_printf(b, "options %d %d %d %" PRIu64 " %" PRIu64 " %u ", o->strategy, o->relay,
               o->staging_ingest, o->least_piece_bytes, o->chunk_bytes, o->ring_slots);
    for (uint32_t k = 0; k < o->n_rules; k++)
        buf_printf(b, "'%s':%d ", o->rules[k].glob, o->rules[k].strategy);
    buf_printf(b, "verify %u ", i->verify);
}

static void say_order(struct buf *b, const struct node_order *o, uint64_t shift)
{
    buf_printf(b, "order %d '%s' ", o->type, o->model);
    buf_printf(b, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " ",
               o->version, o->attempt, o->epoch, o->worker, o->cookie, o->value);
    buf_printf(b, "%" PRIu64 " ", o->data_plane);
    buf_printf(b, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %d %d %d '%s' ", o->wall_ns,
               o->content, o->held, o->applied, o->phase, o->tell, o->code, o->text);
    if (o->type != NODE_ORDER_PREPARE)
        return;
    buf_printf(b, "deadline %" PRIu64 " %u ", moved(o->deadline_ns, shift), o->transfer_timeout_ms);
    say_hex(b, o->plan_digest, 16);
    say_hex(b, o->input_digests, sizeof o->input_digests);
    for (uint32_t i = 0; i < o->n_peers; i++) {
        buf_printf(b, "%u %s %u ", o->peers[i].node, o->peers[i].address, o->peers[i].port);
        say_hex(b, o->peers[i].token, sizeof o->peers[i].token);
    }
    buf_printf(b, "comm %d ", o->has_comm_id);
    say_hex(b, o->comm_id, sizeof o->comm_id);
    buf_printf(b, "shrink %u ", o->shrink.n_excluded);
    say_hex(b, (const uint8_t *)o->shrink.excluded, sizeof o->shrink.excluded);
    say_hex(b, o->shrink.parent, sizeof o->shrink.parent);
    for (uint32_t i = 0; i < o->n_landed; i++) {
        buf_printf(b, "landed %u %" PRIu64 " ", o->landed[i].node, o->landed[i].attempt);
        say_hex(b, o->landed[i].holds, o->landed[i].n_bytes);
    }
    say_input(b, o->input);
}

static void say_join(struct buf *b, const struct frame_join *j)
{
    const struct peer_member *m = &j->member;
    buf_printf(b, "join '%s' %u '%s' %" PRIu64 " %u '%s' '%s' '%s' ", j->name, j->number,
               j->coordinator, m->incarnation, m->protocol, m->release, m->data_address,
               m->environment);
    for (uint32_t i = 0; i < m->n_devices; i++)
        buf_printf(b, "'%s' ", m->domain_of_device[i]);
    for (uint32_t i = 0; i < m->n_commits; i++)
        buf_printf(b, "'%s':%" PRIu64 " ", m->commits[i].model, m->commits[i].version);
}

static void say_frame(struct buf *b, const struct frame *f, uint64_t shift)
{
    buf_printf(b, "frame %d ", f->type);
    if (f->type == FRAME_JOIN)
        say_join(b, &f->join);
    else if (f->type == FRAME_WELCOME) {
        buf_printf(b, "%" PRIu64 " %u '%s' %u %u ", f->welcome.incarnation, f->welcome.number,
                   f->welcome.release, f->welcome.lease_ms, f->welcome.beat_ms);
        say_hex(b, f->welcome.token, sizeof f->welcome.token);
    } else if (f->type == FRAME_BEAT)
        buf_printf(b, "%" PRIu64 " %" PRIu64, f->beat.sequence, f->beat.round_trip_ns);
    else if (f->type == FRAME_REPORT)
        say_report(b, &f->report, shift);
    else if (f->type == FRAME_ORDER)
        say_order(b, &f->order, shift);
}

#endif
