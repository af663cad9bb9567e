/* A member's side: one link to the coordinator, one session at a time.
 *
 *                 stream opened, JOIN sent            WELCOME
 *      SEEKING ───────────────────────────> JOINING ──────────> JOINED
 *         ^                                    │                  │
 *         └────────── refused, broke, silent ──┴──────────────────┘
 *
 * Invariants: orders are handed over in JOINED alone; `welcomed` and `severed` alternate; a new stream is opened only
 * when the end of the one before has been heard, so nothing of an earlier session can come after. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "peer/private.h"

#include "base/banned.h"

#define MS UINT64_C(1000000)

static const struct sm_state member_states[] = {
    [MEMBER_SEEKING] = {"SEEKING", SM_TO(MEMBER_JOINING)},
    [MEMBER_JOINING] = {"JOINING", SM_TO(MEMBER_JOINED) | SM_TO(MEMBER_SEEKING)},
    [MEMBER_JOINED] = {"JOINED", SM_TO(MEMBER_SEEKING)},
};

static const struct peer_node *coordinator(const struct peer *p)
{
    return &p->options.nodes[p->options.coordinator];
}

static void move(struct peer *p, int state)
{
    sm_move(&p->member->state, state, "member %s", p->options.nodes[p->options.me].name);
    p->member->since_ns = peer_now(p);
}

/* --- ends ---------------------------------------------------------------------------------------- */

/* The next try, half to all of the back-off from now. */
static void back_off(struct peer *p)
{
    struct member *m = p->member;
    uint64_t whole = m->backoff_ms * MS;
    m->try_ns = peer_now(p) + whole / 2 + random_next(&m->random) % (whole / 2 + 1);
    m->backoff_ms *= 2;
    if (m->backoff_ms > PEER_BACKOFF_MOST_MS)
        m->backoff_ms = PEER_BACKOFF_MOST_MS;
}

/* Any state → SEEKING. The call, where it lives, is cancelled; its on_end is awaited before another is opened. */
static void session_over(struct peer *p, const char *why)
{
    struct member *m = p->member;
    bool was_joined = m->state.state == MEMBER_JOINED;
    if (m->state.state == MEMBER_SEEKING)
        return;
    if (!p->stopping && !was_joined && strcmp(m->why, why) != 0) /* else told by `severed` */
        log_warn("could not join the coordinator %s at %s: %s", coordinator(p)->name,
                 coordinator(p)->address, why);
    (void)snprintf(m->why, sizeof m->why, "%s", why);
    move(p, MEMBER_SEEKING);
    m->broken = false;
    frame_parts_close(&m->parts);
    frame_parts_init(&m->parts);
    if (m->call != NULL)
        rpc_link_call_cancel(m->call);
    back_off(p);
    if (was_joined && !p->stopping && p->options.events.severed != NULL)
        p->options.events.severed(p->options.events.arg, m->why);
}

/* --- beats --------------------------------------------------------------------------------------- */

static int send_bytes(void *arg, const void *data, size_t n_bytes)
{
    struct member *m = arg;
    return rpc_link_call_send(m->call, data, n_bytes);
}

static int send_frame(struct peer *p, const struct frame *f, struct err *e)
{
    int r = frame_send(f, true, peer_now(p), send_bytes, p->member, e);
    if (r == RS_EEXHAUSTED)
        (void)err_set(e, r, "it does not read what it is sent");
    return r;
}

static void beat(struct peer *p, uint64_t now_ns)
{
    struct member *m = p->member;
    struct frame f = {.type = FRAME_BEAT};
    struct err e = {0};
    m->beat_due_ns = now_ns + m->beat_ms * MS;
    if (m->sequence - m->answered >= PEER_BEATS - 1)
        return; /* nobody answers: the lease ends this session */
    m->sequence++;
    m->sent_ns[m->sequence % PEER_BEATS] = now_ns;
    f.beat.sequence = m->sequence;
    f.beat.round_trip_ns = m->round_trip_ns;
    f.beat.strangers = m->strangers;
    if (send_frame(p, &f, &e) != 0)
        m->broken = true;
}

static void lease_tell(struct peer *p)
{
    struct member *m = p->member;
    const struct peer_events *ev = &p->options.events;
    if (ev->lease != NULL)
        ev->lease(ev->arg, m->sent_ns[m->answered % PEER_BEATS] + m->lease_ms * MS);
}

static void on_answer(struct peer *p, const struct frame *f)
{
    struct member *m = p->member;
    if (f->beat.sequence <= m->answered || f->beat.sequence > m->sequence) {
        session_over(p, "it answered a beat that was not sent");
        return;
    }
    m->answered = f->beat.sequence;
    m->round_trip_ns = peer_now(p) - m->sent_ns[m->answered % PEER_BEATS];
    lease_tell(p);
}

/* --- the stream ---------------------------------------------------------------------------------- */

static void on_welcome(struct peer *p, const struct frame *f)
{
    struct member *m = p->member;
    const struct peer_events *ev = &p->options.events;
    if (f->welcome.number != p->options.me) {
        session_over(p, "it takes this node for another number of its list");
        return;
    }
    m->lease_ms = f->welcome.lease_ms;
    m->beat_ms = f->welcome.beat_ms;
    memcpy(m->token, f->welcome.token, sizeof m->token);
    m->backoff_ms = PEER_BACKOFF_MS;
    m->why[0] = '\0';
    m->round_trip_ns = peer_now(p) - m->sent_ns[0];
    m->beat_due_ns = peer_now(p);
    move(p, MEMBER_JOINED);
    log_info("joined the coordinator %s at %s: incarnation %016" PRIx64 ", release %s",
             coordinator(p)->name, coordinator(p)->address, f->welcome.incarnation,
             f->welcome.release);
    if (ev->welcomed != NULL)
        ev->welcomed(ev->arg, f->welcome.incarnation);
    lease_tell(p);
}

static void on_frame(struct peer *p, const struct frame *f)
{
    const struct peer_events *ev = &p->options.events;
    bool welcome = f->type == FRAME_WELCOME;
    if (welcome != (p->member->state.state == MEMBER_JOINING))
        session_over(p, welcome ? "a second WELCOME" : "the first message must be WELCOME");
    else if (welcome)
        on_welcome(p, f);
    else if (f->type == FRAME_BEAT)
        on_answer(p, f);
    else if (ev->order != NULL)
        ev->order(ev->arg, &f->order);
}

static void on_message(struct rpc_link_call *call, void *arg, const void *data, size_t n_bytes)
{
    struct peer *p = arg;
    struct member *m = p->member;
    struct frame f;
    struct err e = {0};
    if (m->call != call || m->state.state == MEMBER_SEEKING || m->broken || p->stopping)
        return;
    m->heard_ns = peer_now(p);
    int r = frame_take(&m->parts, data, n_bytes, false, m->heard_ns, &f, &e);
    if (r < 0)
        session_over(p, err_text(&e, r));
    if (r != 0)
        return;
    on_frame(p, &f);
    frame_close(&f);
}

static void on_end(struct rpc_link_call *call, void *arg, int code, const char *text,
                   const void *details, size_t n_details)
{
    struct peer *p = arg;
    (void)call;
    (void)details;
    (void)n_details;
    p->member->call = NULL;
    session_over(p, code == 0 ? "it ended the stream" : text[0] != '\0' ? text : err_name(code));
}

static const struct rpc_link_call_events call_events = {.on_message = on_message, .on_end = on_end};

/* --- joining ------------------------------------------------------------------------------------- */

/* What introduce left open is told by the options. */
static void introduction_fill(const struct peer *p, struct peer_member *m)
{
    const struct peer_options *o = &p->options;
    if (m->incarnation == 0)
        m->incarnation = o->incarnation;
    if (m->protocol == 0)
        m->protocol = PEER_PROTOCOL;
    if (m->release[0] == '\0' && o->release != NULL)
        (void)snprintf(m->release, sizeof m->release, "%s", o->release);
    if (m->data_address[0] == '\0' && o->data_address != NULL)
        (void)snprintf(m->data_address, sizeof m->data_address, "%s", o->data_address);
    if (m->environment[0] == '\0' && o->environment != NULL)
        (void)snprintf(m->environment, sizeof m->environment, "%s", o->environment);
}

static int join_open(struct peer *p, const struct peer_member *who, struct err *e)
{
    struct member *m = p->member;
    const struct rpc_link_call_options call = {.path = "/reshard.v1.Peer/Join"};
    struct frame f = {.type = FRAME_JOIN,
                      .join = {.name = p->options.nodes[p->options.me].name,
                               .number = p->options.me,
                               .coordinator = coordinator(p)->name,
                               .member = *who}};
    m->sequence = m->answered = 0;
    m->sent_ns[0] = peer_now(p);
    int r = rpc_link_call_open(m->link, &call, &call_events, p, &m->call, e);
    if (r != 0)
        return r;
    move(p, MEMBER_JOINING);
    return send_frame(p, &f, e);
}

static void try_join(struct peer *p)
{
    struct member *m = p->member;
    const struct peer_events *ev = &p->options.events;
    struct peer_member who = {0};
    struct err e = {0};
    int r = ev->introduce != NULL ? ev->introduce(ev->arg, &who) : 0;
    if (r == RS_EUNAVAIL) {
        m->waits_ready = true;
        return;
    }
    if (r != 0)
        (void)err_set(&e, r, "this node can't say what it is: %s", err_name(r));
    introduction_fill(p, &who);
    if (r == 0)
        r = join_open(p, &who, &e);
    if (r == 0)
        return;
    if (m->state.state == MEMBER_SEEKING) {
        (void)snprintf(m->why, sizeof m->why, "%s", err_text(&e, r));
        back_off(p);
    } else {
        session_over(p, err_text(&e, r));
    }
}

static void seek(struct peer *p, uint64_t now_ns)
{
    struct member *m = p->member;
    if (m->state.state == MEMBER_SEEKING && m->call == NULL && m->link_up && !m->waits_ready &&
        !p->stopping && now_ns >= m->try_ns)
        try_join(p);
}

void peer_ready(struct peer *p)
{
    if (p->member == NULL)
        return;
    p->member->waits_ready = false;
}

/* --- the link ------------------------------------------------------------------------------------ */

static void on_up(struct rpc_link *l, void *arg)
{
    struct peer *p = arg;
    (void)l;
    p->member->link_up = true;
    p->member->link_text[0] = '\0';
    seek(p, peer_now(p));
}

/* Before the first JOIN, each cause once: a wrong authority, say, would else be told by status alone. What ends a
 * session is told by `severed`. */
static void tell_unreached(const struct peer *p)
{
    struct member *m = p->member;
    if (p->stopping || m->heard_ns != 0 || strcmp(m->link_told, m->link_text) == 0)
        return;
    (void)snprintf(m->link_told, sizeof m->link_told, "%s", m->link_text);
    log_warn("the coordinator %s at %s is not reachable, and is tried again: %s",
             coordinator(p)->name, coordinator(p)->address, m->link_text);
}

static void on_down(struct rpc_link *l, void *arg, const char *text)
{
    struct peer *p = arg;
    (void)l;
    p->member->link_up = false;
    (void)snprintf(p->member->link_text, sizeof p->member->link_text, "%s", text);
    tell_unreached(p);
}

static void on_closed(void *arg)
{
    struct peer *p = arg;
    p->link_open = false;
    p->member->link = NULL;
    peer_timer_close(p);
}

static const struct rpc_link_events link_events = {
    .on_up = on_up, .on_down = on_down, .on_closed = on_closed};

/* --- time ---------------------------------------------------------------------------------------- */

static void joined_tick(struct peer *p, uint64_t now_ns)
{
    struct member *m = p->member;
    char why[96];
    uint64_t answered_ns = m->sent_ns[m->answered % PEER_BEATS];
    if (m->broken) {
        session_over(p, "it does not read what it is sent, or there is no memory to send it");
    } else if (now_ns - answered_ns > m->lease_ms * MS) {
        (void)snprintf(why, sizeof why, "it has not answered for %.1f s",
                       (double)(now_ns - answered_ns) / 1e9);
        session_over(p, why);
    } else if (now_ns >= m->beat_due_ns) {
        beat(p, now_ns);
    }
}

void member_tick(struct peer *p, uint64_t now_ns)
{
    struct member *m = p->member;
    if (p->stopping) {
        if (m->link != NULL && (m->call == NULL || now_ns - p->stop_ns > PEER_GOODBYE_MS * MS))
            rpc_link_close(m->link);
        return;
    }
    if (m->state.state == MEMBER_JOINING && now_ns - m->since_ns > PEER_JOIN_MS * MS)
        session_over(p, "it does not answer the JOIN");
    if (m->state.state == MEMBER_JOINED)
        joined_tick(p, now_ns);
    seek(p, now_ns);
}

/* --- what the service asks ----------------------------------------------------------------------- */

int peer_report(struct peer *p, const struct node_report *r)
{
    struct frame f = {.type = FRAME_REPORT, .report = *r};
    struct err e = {0};
    rs_assert(p->member != NULL);
    struct member *m = p->member;
    if (p->stopping || m->state.state != MEMBER_JOINED || m->broken)
        return RS_EUNAVAIL;
    int x = send_frame(p, &f, &e);
    if (x == 0)
        return 0;
    log_error("a report to the coordinator is not sent: %s", err_text(&e, x));
    m->broken = true;
    return RS_EUNAVAIL;
}

bool peer_joined(const struct peer *p)
{
    return p->member != NULL && p->member->state.state == MEMBER_JOINED && !p->member->broken;
}

const char *peer_text(const struct peer *p)
{
    struct member *m = p->member;
    if (m == NULL)
        return "coordinator";
    if (m->state.state == MEMBER_JOINED)
        return "joined";
    const char *why = !m->link_up && m->link_text[0] != '\0' ? m->link_text
                      : m->waits_ready                       ? "its own data plane is not ready"
                      : m->why[0] != '\0'                    ? m->why
                                                             : "not reached yet";
    (void)snprintf(m->text, sizeof m->text, "%s %s at %s: %s",
                   m->state.state == MEMBER_JOINING ? "joining" : "seeking", coordinator(p)->name,
                   coordinator(p)->address, why);
    return m->text;
}

uint64_t peer_age_ns(const struct peer *p)
{
    if (p->member == NULL)
        return 0;
    return p->member->heard_ns == 0 ? UINT64_MAX : peer_now(p) - p->member->heard_ns;
}

void peer_token(const struct peer *p, char ret_text[PEER_TOKEN_TEXT])
{
    ret_text[0] = '\0';
    for (size_t i = 0; peer_joined(p) && i < PEER_TOKEN_BYTES; i++)
        (void)snprintf(ret_text + 2 * i, 3, "%02x", p->member->token[i]);
}

struct rpc_link *peer_channel(struct peer *p)
{
    return p->member != NULL && p->member->link_up && !p->stopping ? p->member->link : NULL;
}

/* --- start, stop --------------------------------------------------------------------------------- */

static struct rpc_tls_files tls_files(const struct peer *p)
{
    const struct peer_options *o = &p->options;
    return (struct rpc_tls_files){
        .ca = o->tls_ca, .certificate = o->tls_certificate, .key = o->tls_key};
}

/* The beats are to tell of silence first, by the lease. */
static struct rpc_link_options link_options(const struct peer *p, const struct rpc_tls_files *tls)
{
    uint32_t lease_ms = p->options.lease_ms;
    return (struct rpc_link_options){.target = coordinator(p)->address,
                                     .tls = tls->ca != NULL ? tls : NULL,
                                     .server_name = coordinator(p)->name,
                                     .keepalive_ms = 1000,
                                     .keepalive_timeout_ms = lease_ms > 2000 ? lease_ms : 2000,
                                     .max_queued_messages = PEER_QUEUE_MESSAGES,
                                     .max_queued_bytes = PEER_QUEUE_BYTES};
}

int peer_reload_tls(struct peer *p, struct err *e)
{
    const struct rpc_tls_files tls = tls_files(p);
    if (p->member == NULL || p->stopping || tls.ca == NULL)
        return 0;
    const struct rpc_link_options link = link_options(p, &tls);
    return rpc_link_reload_tls(p->member->link, &link, e);
}

static int link_open(struct peer *p, struct err *e)
{
    const struct peer_options *o = &p->options;
    const struct rpc_tls_files tls = tls_files(p);
    const struct rpc_link_options link = link_options(p, &tls);
    if (o->open_link != NULL)
        return o->open_link(o->loop, &link, &link_events, p, &p->member->link, e);
    return rpc_link_open(o->loop, &link, &link_events, p, &p->member->link, e);
}

int member_start(struct peer *p, struct err *e)
{
    struct member *m = p->member = mem_zalloc(sizeof *m);
    if (m == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the cluster");
    sm_init(&m->state, member_states, MEMBER_SEEKING);
    frame_parts_init(&m->parts);
    m->backoff_ms = PEER_BACKOFF_MS;
    m->random = random_id();
    m->lease_ms = p->options.lease_ms;
    m->beat_ms = p->options.beat_ms;
    int r = link_open(p, e);
    p->link_open = r == 0;
    return r != 0 ? err_prefix(e, r, "link to the coordinator %s", coordinator(p)->name) : 0;
}

void member_stop(struct peer *p)
{
    struct member *m = p->member;
    struct frame f = {.type = FRAME_GOODBYE};
    struct err e = {0};
    bool joined = m->state.state == MEMBER_JOINED && !m->broken;
    if (joined && send_frame(p, &f, &e) == 0)
        rpc_link_call_half_close(m->call);
    else
        rpc_link_close(m->link);
}

void member_free(struct peer *p)
{
    if (p->member == NULL)
        return;
    frame_parts_close(&p->member->parts);
    mem_free(p->member);
    p->member = NULL;
}

void peer_set_strangers(struct peer *p, const struct peer_strangers *refused)
{
    if (p->member != NULL)
        p->member->strangers = *refused;
}
