/* The coordinator's side: a seat per node, a session per Join stream.
 *
 *                 JOIN                    broke, silent, severed, goodbye
 *      AWAY ─────────────────> HERE ─────────────────────────────> SILENT
 *        ^                      ^                JOIN                 │
 *        │                      └─────────────────────────────────────┤
 *        └───────────────── lease surely over, goodbye ───────────────┘
 *
 * Invariants: HERE if and only if the seat has a session, and then the session has the seat; a session that lost its seat
 * hands nothing over any more. `lost` is told once between two `joined`. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "peer/private.h"

#include "base/banned.h"

enum { HELD_MOST_BYTES = 64 << 20 };
#define MS UINT64_C(1000000)

static const struct sm_state seat_states[] = {
    [PEER_AWAY] = {"AWAY", SM_TO(PEER_HERE)},
    [PEER_HERE] = {"HERE", SM_TO(PEER_SILENT)},
    [PEER_SILENT] = {"SILENT", SM_TO(PEER_HERE) | SM_TO(PEER_AWAY)},
};

static const char *node_name(const struct peer *p, const struct seat *seat)
{
    return p->options.nodes[seat->node].name;
}

/* --- sessions ------------------------------------------------------------------------------------ */

static void session_finish(struct session *s, int code, const char *text)
{
    if (s->finished)
        return;
    s->finished = true;
    rpc_call_finish(s->call, code, text);
}

static void session_clear(struct session *s)
{
    struct queue *q;
    if (s->probe != NULL)
        probe_forget(s->probe);
    s->probe = NULL;
    while ((q = queue_pop(&s->held)) != NULL)
        mem_free(container_of(q, struct held_report, link));
    s->held_bytes = 0;
    frame_parts_close(&s->parts);
    frame_parts_init(&s->parts);
}

/* It ends at the next tick or with its call, whichever is first: what is told of it is never told inside a call of the
 * service's. `why` may be lost without memory. */
static void session_doom(struct session *s, int code, const char *why)
{
    if (s->doomed == NULL && s->seat != NULL && (s->doomed = mem_strdup(why)) == NULL)
        s->tokens = -1; /* told as a flood would be: without its words */
    session_finish(s, code, why);
}

/* HERE → SILENT: nothing of the session is handed over any more. */
static void session_over(struct session *s, const char *why)
{
    struct seat *seat = s->seat;
    struct peer *p = s->p;
    s->seat = NULL;
    session_clear(s);
    if (seat == NULL || p == NULL)
        return;
    seat->session = NULL;
    (void)snprintf(seat->why, sizeof seat->why, "%s", why);
    sm_move(&seat->state, PEER_SILENT, "node %s", node_name(p, seat));
    log_debug("node %s is silent: %s", node_name(p, seat), why);
    if (p->options.events.silent != NULL)
        p->options.events.silent(p->options.events.arg, seat->node, seat->why);
}

static void seat_lost(struct peer *p, struct seat *seat, const char *why)
{
    if (p->options.events.lost != NULL)
        p->options.events.lost(p->options.events.arg, seat->node, why);
}

/* SILENT → AWAY */
static void seat_away(struct peer *p, struct seat *seat, const char *why)
{
    (void)snprintf(seat->why, sizeof seat->why, "%s", why);
    sm_move(&seat->state, PEER_AWAY, "node %s", node_name(p, seat));
    log_info("node %s is away: %s", node_name(p, seat), why);
    seat_lost(p, seat, seat->why);
}

/* Counted, and told at most once a second: strangers shall not fill the log. */
static void refused(struct peer *p, const char *text)
{
    uint64_t now = peer_now(p);
    p->refused++;
    if (p->refused_told_ns != 0 && now - p->refused_told_ns < 1000 * MS)
        return;
    p->refused_told_ns = now;
    log_warn("refused a caller of Peer.Join (%" PRIu64 " so far): %s", p->refused, text);
}

/* What it said makes no sense, or it may not say it. */
static void session_fault(struct session *s, int code, const char *text)
{
    if (s->seat == NULL && s->p != NULL)
        refused(s->p, text);
    session_finish(s, code, text);
    session_over(s, text);
}

/* --- JOIN ---------------------------------------------------------------------------------------- */

static void domains_free(char **domains, uint32_t n)
{
    for (uint32_t i = 0; domains != NULL && i < n; i++)
        mem_free(domains[i]);
    mem_free(domains);
}

/* "" is the node's own name. */
static char **domains_copy(const struct peer_member *m, const char *name)
{
    char **domains = mem_calloc(m->n_devices, sizeof *domains);
    for (uint32_t i = 0; domains != NULL && i < m->n_devices; i++) {
        const char *d = m->domain_of_device[i];
        if ((domains[i] = mem_strdup(d[0] != '\0' ? d : name)) == NULL) {
            domains_free(domains, m->n_devices);
            return NULL;
        }
    }
    return domains;
}

static int seat_remember(struct peer *p, struct seat *seat, const struct peer_member *m,
                         struct err *e)
{
    char **domains = domains_copy(m, node_name(p, seat));
    if (domains == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a node");
    domains_free(seat->domains, seat->n_devices);
    seat->domains = domains;
    seat->n_devices = m->n_devices;
    seat->incarnation = m->incarnation;
    memcpy(seat->release, m->release, sizeof seat->release);
    memcpy(seat->data_address, m->data_address, sizeof seat->data_address);
    return 0;
}

static int incarnation_check(const struct peer *p, const struct seat *seat,
                             const struct peer_member *m, struct err *e)
{
    if (seat->state.state != PEER_HERE || seat->incarnation == m->incarnation)
        return 0;
    return err_set(e, RS_EEXIST,
                   "another daemon is node %s (incarnation %016" PRIx64
                   ", heard %.1f s ago); stop it, or give this one another --node",
                   node_name(p, seat), seat->incarnation,
                   (double)(peer_now(p) - seat->heard_ns) / 1e9);
}

/* All that may refuse it, before anything changes. */
static int join_check(struct session *s, const struct frame_join *j, struct seat **ret,
                      struct err *e)
{
    struct peer *p = s->p;
    const struct peer_events *ev = &p->options.events;
    uint32_t node = UINT32_MAX;
    int r = coordinator_identify(p, s->call, j->name, e);
    if (r == 0)
        r = admit_check(&p->options, j, &node, e);
    if (r == 0)
        r = incarnation_check(p, &p->seats[node], &j->member, e);
    if (r == 0 && ev->admit != NULL)
        r = ev->admit(ev->arg, node, &j->member, e);
    if (r == 0)
        *ret = &p->seats[node];
    return r;
}

/* What it had before is over: its own word, or its process's end. */
static void seat_succeed(struct peer *p, struct seat *seat, bool again)
{
    const char *why = again ? "it joins anew" : "its daemon was started anew";
    if (seat->session != NULL) {
        struct session *old = seat->session;
        session_over(old, why);
        session_finish(old, RS_EABORTED, "a newer stream of this node took its place");
    }
    if (seat->state.state == PEER_SILENT)
        seat_lost(p, seat, why);
}

static int session_send(struct session *s, const struct frame *f, struct err *e);

static void welcome(struct session *s, struct seat *seat)
{
    struct peer *p = s->p;
    struct frame f = {.type = FRAME_WELCOME};
    struct err e = {0};
    f.welcome.incarnation = p->options.incarnation;
    f.welcome.number = seat->node;
    f.welcome.lease_ms = p->options.lease_ms;
    f.welcome.beat_ms = p->options.beat_ms;
    random_bytes(s->token, sizeof s->token);
    memcpy(f.welcome.token, s->token, sizeof s->token);
    (void)snprintf(f.welcome.release, sizeof f.welcome.release, "%s",
                   p->options.release != NULL ? p->options.release : "");
    int r = session_send(s, &f, &e);
    if (r != 0)
        session_doom(s, r, err_text(&e, r));
}

static void joined(struct session *s, struct seat *seat, const struct peer_member *m, bool again)
{
    struct peer *p = s->p;
    seat->session = s;
    s->seat = seat;
    seat->heard_ns = seat->beat_ns = peer_now(p);
    seat->round_trip_ns = 0;
    seat->joins++;
    seat->why[0] = '\0';
    sm_move(&seat->state, PEER_HERE, "node %s", node_name(p, seat));
    log_info("node %s has joined: incarnation %016" PRIx64 "%s, release %s, devices %u, data "
             "address %s",
             node_name(p, seat), m->incarnation, again ? " again" : "", m->release, m->n_devices,
             m->data_address);
    if (p->options.release != NULL && strcmp(m->release, p->options.release) != 0)
        log_warn("node %s runs release %s, this coordinator %s", node_name(p, seat), m->release,
                 p->options.release);
    welcome(s, seat);
    if (p->options.events.joined != NULL)
        p->options.events.joined(p->options.events.arg, seat->node, m, again);
}

static void on_join(struct session *s, const struct frame_join *j)
{
    struct peer *p = s->p;
    struct seat *seat = NULL;
    struct err e = {0};
    int r = join_check(s, j, &seat, &e);
    if (r != 0) {
        uint32_t node = admit_find(&p->options, j->name);
        if (node != UINT32_MAX)
            p->seats[node].refused++;
        session_fault(s, r, err_text(&e, r));
        return;
    }
    bool again = seat->incarnation == j->member.incarnation;
    seat_succeed(p, seat, again);
    if ((r = seat_remember(p, seat, &j->member, &e)) != 0)
        session_fault(s, r, err_text(&e, r));
    else
        joined(s, seat, &j->member, again);
}

/* --- messages of a member ------------------------------------------------------------------------ */

static int send_bytes(void *arg, const void *data, size_t n_bytes)
{
    struct session *s = arg;
    return rpc_call_send(s->call, data, n_bytes);
}

static int session_send(struct session *s, const struct frame *f, struct err *e)
{
    int r = frame_send(f, false, peer_now(s->p), send_bytes, s, e);
    if (r == RS_EEXHAUSTED)
        (void)err_set(e, r, "it does not read what it is sent");
    return r;
}

static void on_beat(struct session *s, const struct frame *f)
{
    struct frame answer = {.type = FRAME_BEAT, .beat = {.sequence = f->beat.sequence}};
    struct err e = {0};
    s->seat->beat_ns = peer_now(s->p);
    s->seat->round_trip_ns = f->beat.round_trip_ns;
    s->seat->strangers = f->beat.strangers;
    (void)session_send(s, &answer, &e); /* one that can't go is one that was lost: the next may */
}

static void on_goodbye(struct session *s)
{
    struct seat *seat = s->seat;
    struct peer *p = s->p;
    session_finish(s, 0, NULL);
    session_over(s, "it has stopped");
    seat_away(p, seat, "it has stopped");
}

static void deliver(struct session *s, struct node_report *r)
{
    const struct peer_events *ev = &s->p->options.events;
    if (r->type == NODE_REPORT_EVENT && r->event.type == REFIT_EV_ATTACHED)
        r->event.attached.node = s->seat->node;
    else if (r->type == NODE_REPORT_EVENT && r->event.type >= REFIT_EV_PREPARED &&
             r->event.type <= REFIT_EV_NODE_LOST)
        r->event.node.node = s->seat->node;
    if (ev->report != NULL)
        ev->report(ev->arg, s->seat->node, r);
}

/* Waits behind the probe of its data port, so that the order holds. */
static void hold(struct session *s, const void *data, size_t n_bytes)
{
    struct held_report *h = NULL;
    if (n_bytes <= HELD_MOST_BYTES - s->held_bytes)
        h = mem_alloc(sizeof *h + n_bytes);
    if (h == NULL) {
        session_fault(s, RS_EEXHAUSTED, "more reports than fit while its data port was tried");
        return;
    }
    h->arrived_ns = peer_now(s->p);
    h->n_bytes = n_bytes;
    memcpy(h->data, data, n_bytes);
    s->held_bytes += n_bytes;
    queue_push(&s->held, &h->link);
}

/* A NODE_UP with a port: nobody hears of it before that port was reached. True: it waits. */
static bool probe_wanted(struct session *s, const struct node_report *r)
{
    struct err e = {0};
    if (r->type != NODE_REPORT_EVENT || r->event.type != REFIT_EV_NODE_UP || r->data_port == 0)
        return false;
    int x = probe_start(s, s->seat->data_address, r->data_port, &e);
    if (x != 0)
        session_fault(s, x, err_text(&e, x));
    return true;
}

static void on_report(struct session *s, struct node_report *r, const void *data, size_t n_bytes)
{
    if (s->probe != NULL || (probe_wanted(s, r) && s->probe != NULL))
        hold(s, data, n_bytes);
    else if (s->seat != NULL)
        deliver(s, r);
}

static void release_one(struct session *s, struct held_report *h)
{
    struct frame f;
    struct err e = {0};
    int r = frame_decode(h->data, h->n_bytes, true, h->arrived_ns, &f, &e);
    if (r != 0) {
        session_fault(s, r, err_text(&e, r));
        return;
    }
    deliver(s, &f.report);
    frame_close(&f);
}

void coordinator_probed(struct session *s, const char *text)
{
    struct queue *q;
    s->probe = NULL;
    if (s->seat == NULL)
        return;
    if (text != NULL) {
        s->seat->refused++;
        session_fault(s, RS_EPRECOND, text);
        return;
    }
    while (s->seat != NULL && s->doomed == NULL && s->probe == NULL &&
           (q = queue_pop(&s->held)) != NULL) {
        struct held_report *h = container_of(q, struct held_report, link);
        s->held_bytes -= h->n_bytes;
        release_one(s, h);
        mem_free(h);
    }
}

/* A bucket of messages: what a member may say at most. */
static bool flooding(struct session *s)
{
    uint64_t now = peer_now(s->p);
    s->tokens += (double)(now - s->tokens_ns) * PEER_FLOOD_PER_S / 1e9;
    s->tokens_ns = now;
    if (s->tokens > PEER_FLOOD_BURST)
        s->tokens = PEER_FLOOD_BURST;
    return (s->tokens -= 1) < 0;
}

static void on_frame(struct session *s, struct frame *f, const void *data, size_t n_bytes)
{
    if ((f->type == FRAME_JOIN) != (s->seat == NULL))
        session_fault(s, RS_EPROTO,
                      s->seat == NULL ? "the first message must be JOIN"
                                      : "a second JOIN on one stream");
    else if (f->type == FRAME_JOIN)
        on_join(s, &f->join);
    else if (f->type == FRAME_BEAT)
        on_beat(s, f);
    else if (f->type == FRAME_GOODBYE)
        on_goodbye(s);
    else
        on_report(s, &f->report, data, n_bytes);
}

static void on_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct session *s = rpc_call_arg(call);
    struct frame f;
    struct err e = {0};
    if (s == NULL || s->p == NULL || s->finished || s->doomed != NULL)
        return;
    if (s->seat != NULL)
        s->seat->heard_ns = peer_now(s->p);
    if (flooding(s)) {
        session_fault(s, RS_EEXHAUSTED, "it sends more messages than a node has to say");
        return;
    }
    int r = frame_take(&s->parts, data, n_bytes, true, peer_now(s->p), &f, &e);
    if (r < 0)
        session_fault(s, r, err_text(&e, r));
    if (r != 0)
        return;
    on_frame(s, &f, data, n_bytes);
    frame_close(&f);
}

/* --- calls --------------------------------------------------------------------------------------- */

/* From rpc_server's context to the peer: set once, before the server starts. */
static struct peer *(*resolver)(void *rpc_context);

void peer_set_resolver(struct peer *(*of)(void *rpc_context))
{
    resolver = of;
}

struct peer *peer_of(void *rpc_context)
{
    return resolver != NULL ? resolver(rpc_context) : NULL;
}

struct peer *coordinator_of(struct rpc_call *call)
{
    struct peer *p = peer_of(rpc_call_context(call));
    char text[256];
    if (p == NULL || p->stopping) {
        rpc_call_finish(call, RS_EUNAVAIL, "this daemon is starting or stopping");
        return NULL;
    }
    if (peer_is_coordinator(p))
        return p;
    const struct peer_node *c = &p->options.nodes[p->options.coordinator];
    (void)snprintf(
        text, sizeof text,
        "this is node %s, a member; the coordinator is %s at %s: give all nodes the same "
        "[cluster]",
        p->options.nodes[p->options.me].name, c->name, c->address);
    rpc_call_finish(call, RS_EPRECOND, text);
    return NULL;
}

int coordinator_identify(const struct peer *p, const struct rpc_call *call, const char *name,
                         struct err *e)
{
    const struct rpc_identity *who = rpc_call_identity(call);
    const char *role = p->options.peer_role;
    if (p->options.tls_ca == NULL)
        return 0;
    if (who->kind != RPC_TLS || who->name[0] == '\0')
        return err_set(e, RS_EPERM, "daemons prove who they are by a certificate with a name");
    if (role != NULL && role[0] != '\0')
        return admit_matches(role, who->name)
                   ? 0
                   : err_set(e, RS_EPERM,
                             "certificate '%.128s' does not have the role peer ([roles] "
                             "peer = %.128s)",
                             who->name, role);
    if (name != NULL ? strcmp(who->name, name) == 0
                     : admit_find(&p->options, who->name) != UINT32_MAX)
        return 0;
    return err_set(
        e, RS_EPERM,
        "certificate '%.128s' is not that of node %.63s; name it in [roles] peer, or make "
        "one with the node's name",
        who->name, name != NULL ? name : "(any)");
}

static void on_open(struct rpc_call *call)
{
    struct peer *p = coordinator_of(call);
    if (p == NULL)
        return;
    struct session *s = mem_zalloc(sizeof *s);
    if (s == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for a session");
        return;
    }
    s->p = p;
    s->call = call;
    s->opened_ns = s->tokens_ns = peer_now(p);
    s->tokens = PEER_FLOOD_BURST;
    queue_init(&s->held);
    frame_parts_init(&s->parts);
    queue_push(&p->sessions, &s->link);
    rpc_call_set_queue(call, PEER_QUEUE_MESSAGES, PEER_QUEUE_BYTES);
    rpc_call_set_arg(call, s);
}

static void on_half_close(struct rpc_call *call)
{
    struct session *s = rpc_call_arg(call);
    if (s != NULL)
        session_finish(s, 0, NULL);
}

static const char *end_text(int reason)
{
    return reason == RS_EPEER ? "it does not read what it is sent" : "its stream broke";
}

static void on_end(struct rpc_call *call, int reason)
{
    struct session *s = rpc_call_arg(call);
    if (s == NULL)
        return;
    session_over(s, s->doomed != NULL ? s->doomed : end_text(reason));
    session_clear(s);
    queue_remove(&s->link);
    mem_free(s->doomed);
    frame_parts_close(&s->parts);
    mem_free(s);
}

static const struct rpc_method methods[] = {
    {.path = "/reshard.v1.Peer/Join",
     .kind = RPC_BIDI,
     .max_request_bytes = FRAME_WIRE_BYTES,
     .on_open = on_open,
     .on_message = on_message,
     .on_half_close = on_half_close,
     .on_end = on_end},
    {.path = "/reshard.v1.Peer/GetLayout",
     .kind = RPC_SERVER_STREAM,
     .max_request_bytes = 1024,
     .on_message = fetch_serve},
};

const struct rpc_method *peer_methods(size_t *ret_n)
{
    *ret_n = sizeof methods / sizeof *methods;
    return methods;
}

/* --- time ---------------------------------------------------------------------------------------- */

static void seat_tick(struct peer *p, struct seat *seat, uint64_t now_ns)
{
    char why[96];
    uint64_t lease_ns = p->options.lease_ms * MS;
    if (seat->state.state == PEER_HERE && seat->session->doomed == NULL &&
        now_ns - seat->heard_ns > lease_ns) {
        struct session *s = seat->session;
        (void)snprintf(why, sizeof why, "nothing was heard of it for %.1f s",
                       (double)(now_ns - seat->heard_ns) / 1e9);
        session_over(s, why);
        session_finish(s, RS_EDEADLINE, why);
    }
    if (seat->state.state == PEER_SILENT &&
        now_ns - seat->beat_ns > lease_ns + p->options.slack_ms * MS)
        seat_away(p, seat, "its lease is over");
}

static void session_tick(struct session *s, uint64_t now_ns)
{
    if (s->seat != NULL && (s->doomed != NULL || s->tokens < 0))
        session_over(s, s->doomed != NULL ? s->doomed : "no memory");
    if (s->seat == NULL && !s->finished && now_ns - s->opened_ns > PEER_JOIN_MS * MS)
        session_fault(s, RS_EDEADLINE, "no JOIN came");
}

/* Where this loop itself stood still, beats may lie unread: they are read before anyone is called silent. */
static void forgive(struct peer *p, uint64_t now_ns)
{
    uint64_t stood = now_ns - p->ticked_ns;
    if (stood < 2 * p->options.beat_ms * MS)
        return;
    for (uint32_t i = 0; i < p->options.n_nodes; i++)
        if (p->seats[i].state.state == PEER_HERE)
            p->seats[i].heard_ns +=
                stood < now_ns - p->seats[i].heard_ns ? stood : now_ns - p->seats[i].heard_ns;
}

void coordinator_tick(struct peer *p, uint64_t now_ns)
{
    forgive(p, now_ns);
    queue_foreach_safe (q, tmp, &p->sessions)
        session_tick(container_of(q, struct session, link), now_ns);
    for (uint32_t i = 0; i < p->options.n_nodes; i++)
        seat_tick(p, &p->seats[i], now_ns);
}

/* --- what the service asks ----------------------------------------------------------------------- */

int peer_order(struct peer *p, uint32_t node, const struct node_order *o)
{
    rs_assert(p->seats != NULL && node < p->options.n_nodes && node != p->options.me);
    struct session *s = p->seats[node].session;
    struct frame f = {.type = FRAME_ORDER, .order = *o};
    struct err e = {0};
    if (p->stopping || s == NULL || s->doomed != NULL || s->finished)
        return RS_EUNAVAIL;
    int r = session_send(s, &f, &e);
    if (r == RS_EINVAL)
        log_error("an order to node %s is not sent: %s", p->options.nodes[node].name, e.text);
    if (r != 0)
        session_doom(s, r, err_text(&e, r));
    return r == RS_ECANCELED ? RS_EUNAVAIL : r;
}

void peer_sever(struct peer *p, uint32_t node, const char *why)
{
    rs_assert(p->seats != NULL && node < p->options.n_nodes);
    struct session *s = p->seats[node].session;
    if (s != NULL)
        session_doom(s, RS_EABORTED, why);
}

void peer_look(const struct peer *p, uint32_t node, struct peer_view *ret)
{
    *ret = (struct peer_view){.name = p->options.nodes[node].name, .why = ""};
    if (p->seats == NULL)
        return;
    const struct seat *seat = &p->seats[node];
    ret->state = node == p->options.me ? PEER_HERE : (enum peer_state)seat->state.state;
    ret->incarnation = node == p->options.me ? p->options.incarnation : seat->incarnation;
    ret->n_devices = seat->n_devices;
    ret->domain_of_device = (const char *const *)seat->domains;
    ret->data_address = node == p->options.me ? p->options.data_address : seat->data_address;
    ret->release = node == p->options.me ? p->options.release : seat->release;
    ret->heard_ns = seat->heard_ns;
    ret->round_trip_ns = seat->round_trip_ns;
    ret->why = seat->joins == 0 && seat->why[0] == '\0' && node != p->options.me
                   ? "it has not joined yet"
                   : seat->why;
    ret->joins = seat->joins;
    ret->refused = seat->refused;
    ret->strangers = seat->strangers;
}

static bool hex_bytes(const char *text, uint8_t *ret, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned high, low;
        const char digits[] = "0123456789abcdef";
        const char *h = text[2 * i] != '\0' ? strchr(digits, text[2 * i]) : NULL;
        const char *l =
            h != NULL && text[2 * i + 1] != '\0' ? strchr(digits, text[2 * i + 1]) : NULL;
        if (l == NULL)
            return false;
        high = (unsigned)(h - digits);
        low = (unsigned)(l - digits);
        ret[i] = (uint8_t)(high << 4 | low);
    }
    return text[2 * n] == '\0';
}

bool peer_vouches(const struct peer *p, const char *token, uint32_t *ret_node)
{
    uint8_t bytes[PEER_TOKEN_BYTES];
    if (token == NULL || p->seats == NULL || !hex_bytes(token, bytes, sizeof bytes))
        return false;
    for (uint32_t i = 0; i < p->options.n_nodes; i++) {
        const struct session *s = p->seats[i].session;
        uint8_t differ = s != NULL && s->doomed == NULL ? 0 : 1;
        for (size_t k = 0; s != NULL && k < sizeof bytes; k++)
            differ |= (uint8_t)(bytes[k] ^ s->token[k]); /* in a time that tells nothing */
        if (differ == 0) {
            *ret_node = i;
            return true;
        }
    }
    return false;
}

uint64_t peer_n_refused(const struct peer *p)
{
    return p->refused;
}

void peer_set_layouts(struct peer *p,
                      const struct layout *(*find)(void *arg, const uint8_t digest[16]), void *arg)
{
    p->find_layout = find;
    p->find_arg = arg;
}

/* --- start, stop --------------------------------------------------------------------------------- */

int coordinator_start(struct peer *p, struct err *e)
{
    p->seats = mem_calloc(p->options.n_nodes, sizeof *p->seats);
    if (p->seats == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the nodes");
    for (uint32_t i = 0; i < p->options.n_nodes; i++) {
        sm_init(&p->seats[i].state, seat_states, PEER_AWAY);
        p->seats[i].node = i;
    }
    return 0;
}

void coordinator_stop(struct peer *p)
{
    queue_foreach_safe (q, tmp, &p->sessions) {
        struct session *s = container_of(q, struct session, link);
        queue_remove(&s->link);
        session_clear(s);
        s->seat = NULL;
        s->p = NULL;
        session_finish(s, RS_EUNAVAIL, "the coordinator stops");
    }
    peer_timer_close(p);
}

void coordinator_free(struct peer *p)
{
    for (uint32_t i = 0; p->seats != NULL && i < p->options.n_nodes; i++)
        domains_free(p->seats[i].domains, p->seats[i].n_devices);
    mem_free(p->seats);
    p->seats = NULL;
}
