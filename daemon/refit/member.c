/* One node's part of an attempt: drawing, table, invariants, and the one function that moves.
 *
 *             PREPARE        plan, data plane           START           all is here
 *        IDLE ──────▶ PREPARING ──────▶ PREPARED ──────▶ STARTED ──────▶ STAGED ──END──▶ IDLE
 *         ▲               │  ABORT, a failure, the session or the lease is over │  ABORT
 *         │               ▼                  ▼                  ▼               ▼
 *         └──── quiet, or the data plane is dead ──────────  ABORTING (at its deadline: KILL)
 *
 * The data plane's death brings every state but STAGED to IDLE: nothing of it moves, and the node says
 * NODE_LOST once for all models. STAGED outlives it: the bytes are in the workers' memory. The end of
 * the session leaves STAGED too: nothing moves, and whether it was committed is told after the next JOIN.
 *
 * What is refused, silently unless said otherwise:
 *   orders of another session (another coordinator, or an earlier stream)
 *   attempts up to `fence`: they are over here (ABORT is answered QUIESCED: it is true)
 *   PREPARE of an epoch before one that was seen: FAILED
 *   PREPARE for a data plane that has died since: FAILED
 *   PREPARE while an older attempt has not let go: FAILED, and that one is aborted
 *   START of what was not prepared: FAILED
 *   answers of an attempt that is not the present one, or out of turn
 * A repeated PREPARE or START is answered again where the answer has been given, else not at all: it is
 * on its way.
 *
 * Invariants, proved by member_check:
 *  1. There is an attempt in every state but IDLE, and none in IDLE.
 *  2. The attempt is above the fence until it is ABORTING; from then on it is not.
 *  3. Without a session the state is IDLE or ABORTING.
 *  4. Where the data plane is dead the state is IDLE or STAGED.
 *  5. There is a deadline in ABORTING, and only there.
 *  6. Past PREPARING the plan was compared with the coordinator's. */
#include "refit/member.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))
enum { MS = 1000 * 1000, DIGEST = 16 };

static const struct sm_state table[] = {
    [MEMBER_IDLE] = {"IDLE", SM_TO(MEMBER_PREPARING)},
    [MEMBER_PREPARING] = {"PREPARING",
                          SM_TO(MEMBER_PREPARED) | SM_TO(MEMBER_ABORTING) | SM_TO(MEMBER_IDLE)},
    [MEMBER_PREPARED] = {"PREPARED",
                         SM_TO(MEMBER_STARTED) | SM_TO(MEMBER_ABORTING) | SM_TO(MEMBER_IDLE)},
    [MEMBER_STARTED] = {"STARTED",
                        SM_TO(MEMBER_STAGED) | SM_TO(MEMBER_ABORTING) | SM_TO(MEMBER_IDLE)},
    [MEMBER_STAGED] = {"STAGED", SM_TO(MEMBER_ABORTING) | SM_TO(MEMBER_IDLE)},
    [MEMBER_ABORTING] = {"ABORTING", SM_TO(MEMBER_IDLE)},
};

const char *member_state_name(int state)
{
    return state >= MEMBER_IDLE && state <= MEMBER_ABORTING ? table[state].name : "unknown";
}

void member_init(struct member *m, const char *model, uint32_t quiesce_timeout_ms)
{
    *m = (struct member){.quiesce_timeout_ms = quiesce_timeout_ms, .deadline_ns = MEMBER_NEVER};
    (void)snprintf(m->model, sizeof m->model, "%s", model);
    sm_init(&m->state, table, MEMBER_IDLE);
}

bool member_quiet(const struct member *m)
{
    return m->state.state == MEMBER_IDLE;
}

bool member_moves(const struct member *m)
{
    return m->state.state == MEMBER_STARTED || m->state.state == MEMBER_ABORTING;
}

void member_check(const struct member *m)
{
    int state = m->state.state;
    rs_assert((m->attempt == 0) == (state == MEMBER_IDLE));
    if (state == MEMBER_ABORTING)
        rs_assert(m->attempt <= m->fence);
    else if (state != MEMBER_IDLE)
        rs_assert(m->attempt > m->fence);
    rs_assert(m->session != 0 || state == MEMBER_IDLE || state == MEMBER_ABORTING);
    rs_assert(m->data_plane_up || state == MEMBER_IDLE || state == MEMBER_STAGED);
    rs_assert((m->deadline_ns != MEMBER_NEVER) == (state == MEMBER_ABORTING));
    rs_assert(m->planned || state < MEMBER_PREPARED || state == MEMBER_ABORTING);
}

/* --- a step's parts --- */

struct step {
    struct member *m;
    const struct member_event *ev;
    struct member_update *u;
};

static struct member_action *put(struct step *s, enum member_action_type type)
{
    rs_assert(s->u->n_actions < MEMBER_MOST_ACTIONS);
    struct member_action *a = &s->u->actions[s->u->n_actions++];
    *a = (struct member_action){.type = type, .attempt = s->m->attempt, .text = ""};
    return a;
}

__attribute__((format(printf, 2, 3))) static const char *text(struct step *s, const char *format,
                                                              ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(s->u->text, sizeof s->u->text, format, args);
    va_end(args);
    return s->u->text;
}

static void report(struct step *s, enum member_report what, uint64_t attempt)
{
    struct member_action *a = put(s, MEMBER_DO_REPORT);
    a->report = what;
    a->attempt = attempt;
    a->session = s->m->session;
}

static void report_failed(struct step *s, uint64_t attempt, int code, const char *why)
{
    report(s, MEMBER_REPORT_FAILED, attempt);
    struct member_action *a = &s->u->actions[s->u->n_actions - 1];
    a->code = code;
    a->text = why;
}

static void move(struct step *s, enum member_state next)
{
    sm_move(&s->m->state, (int)next, "model %s version %llu attempt %llu, here", s->m->model,
            ULL(s->m->version), ULL(s->m->attempt));
}

static void set_deadline(struct step *s, uint64_t at_ns)
{
    s->m->deadline_ns = at_ns;
    put(s, MEMBER_DO_SET_DEADLINE)->at_ns = at_ns;
}

static void raise_fence(struct member *m, uint64_t attempt)
{
    if (attempt > m->fence)
        m->fence = attempt;
}

/* Nothing of the attempt moves: it is over here. */
static void end(struct step *s)
{
    struct member *m = s->m;
    if (m->state.state == MEMBER_ABORTING)
        set_deadline(s, MEMBER_NEVER);
    (void)put(s, MEMBER_DO_END);
    move(s, MEMBER_IDLE);
    raise_fence(m, m->attempt);
    m->version = m->attempt = m->epoch = m->asked = 0;
    m->planned = false;
}

static void kill_data_plane(struct step *s)
{
    (void)put(s, MEMBER_DO_KILL);
    set_deadline(s, s->ev->now_ns + (uint64_t)s->m->quiesce_timeout_ms * MS);
}

/* From any state with an attempt, ABORTING included. */
static void begin_abort(struct step *s, const char *why)
{
    struct member *m = s->m;
    if (m->state.state == MEMBER_ABORTING)
        return;
    if (!m->data_plane_up) { /* STAGED, and its data plane has died since */
        end(s);
        return;
    }
    put(s, MEMBER_DO_ABORT)->text = why;
    move(s, MEMBER_ABORTING);
    raise_fence(m, m->attempt);
    set_deadline(s, s->ev->now_ns + (uint64_t)m->quiesce_timeout_ms * MS);
}

/* This node can't: it says so, and lets go without waiting to be told. */
static void fail(struct step *s, int code, const char *why)
{
    report_failed(s, s->m->attempt, code, why);
    begin_abort(s, why);
}

static const char *said(const struct step *s)
{
    return s->ev->text != NULL && s->ev->text[0] != '\0' ? s->ev->text : err_name(s->ev->code);
}

/* --- the session --- */

static void on_over(struct step *s)
{
    struct member *m = s->m;
    m->session = 0;
    if (m->state.state == MEMBER_IDLE)
        return;
    m->owed = m->attempt > m->asked ? m->attempt : m->asked;
    m->asked = 0;
    if (m->state.state == MEMBER_STAGED)
        end(s);
    else
        begin_abort(s,
                    s->ev->text != NULL ? s->ev->text : "the session with the coordinator is over");
}

static void on_joined(struct step *s)
{
    struct member *m = s->m;
    const struct member_event *ev = s->ev;
    if (m->session != 0)
        on_over(s);                          /* nobody said that it was */
    if (ev->coordinator != m->coordinator) { /* its attempts are counted by a ledger of its own */
        m->fence = m->state.state == MEMBER_ABORTING ? m->attempt : 0;
        m->newest_epoch = m->owed = 0;
    }
    m->session = ev->session;
    m->coordinator = ev->coordinator;
    if (m->owed != 0 && m->state.state == MEMBER_ABORTING)
        m->asked = m->owed; /* said once it is true */
    else if (m->owed != 0)
        report(s, MEMBER_REPORT_QUIESCED, m->owed);
    m->owed = 0;
}

static void on_data_plane_dead(struct step *s)
{
    s->m->data_plane_up = false;
    if (s->m->state.state != MEMBER_IDLE && s->m->state.state != MEMBER_STAGED)
        end(s);
}

/* --- orders --- */

static void begin(struct step *s)
{
    struct member *m = s->m;
    const struct member_event *ev = s->ev;
    m->version = ev->version;
    m->attempt = ev->attempt;
    m->epoch = m->newest_epoch = ev->epoch;
    memcpy(m->digest, ev->digest, DIGEST);
    move(s, MEMBER_PREPARING);
    (void)put(s, MEMBER_DO_PLAN);
}

static void on_prepare_again(struct step *s)
{
    if (s->m->state.state == MEMBER_PREPARED)
        report(s, MEMBER_REPORT_PREPARED, s->m->attempt);
    else if (s->m->state.state == MEMBER_STAGED)
        report(s, MEMBER_REPORT_STAGED, s->m->attempt);
}

static void on_prepare(struct step *s)
{
    struct member *m = s->m;
    const struct member_event *ev = s->ev;
    if (ev->attempt <= m->fence || ev->attempt < m->attempt)
        return;
    if (ev->attempt == m->attempt) {
        on_prepare_again(s);
        return;
    }
    if (m->state.state == MEMBER_STAGED) /* the coordinator goes on: that one has ended */
        end(s);
    if (m->state.state != MEMBER_IDLE) {
        report_failed(s, ev->attempt, RS_EUNAVAIL,
                      text(s, "attempt %llu has not let go here yet", ULL(m->attempt)));
        begin_abort(s, "a newer attempt has come");
    } else if (ev->epoch < m->newest_epoch) {
        report_failed(s, ev->attempt, RS_EPRECOND,
                      text(s, "epoch %llu is over: this node is in epoch %llu", ULL(ev->epoch),
                           ULL(m->newest_epoch)));
    } else if (!m->data_plane_up || (ev->data_plane != 0 && ev->data_plane != m->data_plane)) {
        report_failed(s, ev->attempt, RS_EUNAVAIL, "the data plane has been replaced");
    } else {
        begin(s);
        return;
    }
    raise_fence(m, ev->attempt);
}

static void on_start(struct step *s)
{
    struct member *m = s->m;
    if (s->ev->attempt <= m->fence || s->ev->attempt < m->attempt)
        return;
    if (s->ev->attempt != m->attempt) {
        report_failed(s, s->ev->attempt, RS_EINTERNAL, "START of an attempt that was not prepared");
    } else if (m->state.state == MEMBER_PREPARED) {
        (void)put(s, MEMBER_DO_START);
        move(s, MEMBER_STARTED);
    } else if (m->state.state == MEMBER_STAGED) {
        report(s, MEMBER_REPORT_STAGED, m->attempt);
    }
}

static void on_abort(struct step *s)
{
    struct member *m = s->m;
    uint64_t attempt = s->ev->attempt;
    if (attempt < m->attempt || m->state.state == MEMBER_IDLE) {
        raise_fence(m, attempt);
        report(s, MEMBER_REPORT_QUIESCED, attempt);
        return;
    }
    if (attempt > m->asked)
        m->asked = attempt;
    begin_abort(s, said(s));
    raise_fence(m, attempt);
    if (m->state.state == MEMBER_IDLE) /* it was over at once */
        report(s, MEMBER_REPORT_QUIESCED, attempt);
}

static void on_end(struct step *s)
{
    struct member *m = s->m;
    uint64_t attempt = s->ev->attempt;
    if (attempt < m->attempt)
        return;
    if (m->state.state == MEMBER_STAGED)
        end(s);
    else if (m->state.state != MEMBER_IDLE) /* the coordinator took this node for lost */
        begin_abort(s, "the attempt is over");
    raise_fence(m, attempt);
}

static void on_expel(struct step *s)
{
    struct member *m = s->m;
    if (s->ev->attempt < m->attempt || m->state.state == MEMBER_IDLE) {
        raise_fence(m, s->ev->attempt);
        report(s, MEMBER_REPORT_QUIESCED, s->ev->attempt);
        return;
    }
    if (s->ev->attempt > m->asked)
        m->asked = s->ev->attempt;
    begin_abort(s, "this node is expelled");
    raise_fence(m, s->ev->attempt);
    if (m->state.state == MEMBER_ABORTING)
        kill_data_plane(s);
}

/* --- answers --- */

static void hex(const uint8_t *digest, char *to)
{
    for (int i = 0; i < DIGEST; i++)
        (void)snprintf(to + 2 * i, 3, "%02x", digest[i]);
}

static void on_planned(struct step *s)
{
    struct member *m = s->m;
    char mine[2 * DIGEST + 1], its[2 * DIGEST + 1];
    if (m->planned)
        return;
    if (s->ev->code != 0) {
        fail(s, s->ev->code, text(s, "planning: %s", said(s)));
        return;
    }
    if (memcmp(s->ev->digest, m->digest, DIGEST) != 0) {
        hex(s->ev->digest, mine);
        hex(m->digest, its);
        fail(s, RS_EPRECOND,
             text(s, "this node's plan is %s, the coordinator's is %s%s%s", mine, its,
                  s->ev->text == NULL ? "" : ": ", s->ev->text == NULL ? "" : s->ev->text));
        return;
    }
    m->planned = true;
    (void)put(s, MEMBER_DO_PREPARE);
}

static void on_made_ready(struct step *s)
{
    if (!s->m->planned)
        return;
    if (s->ev->code != 0) {
        fail(s, s->ev->code, text(s, "%s", said(s)));
        return;
    }
    move(s, MEMBER_PREPARED);
    report(s, MEMBER_REPORT_PREPARED, s->m->attempt);
}

static void on_landed(struct step *s)
{
    if (s->ev->code != 0) {
        fail(s, s->ev->code, text(s, "%s", said(s)));
        return;
    }
    move(s, MEMBER_STAGED);
    report(s, MEMBER_REPORT_STAGED, s->m->attempt);
}

static void on_quiet(struct step *s)
{
    struct member *m = s->m;
    uint64_t asked = m->asked;
    if (s->ev->code != 0) { /* it could not: its death proves the same */
        kill_data_plane(s);
        return;
    }
    end(s);
    if (asked != 0)
        report(s, MEMBER_REPORT_QUIESCED, asked);
}

static void on_answer(struct step *s)
{
    int state = s->m->state.state;
    if (s->ev->attempt != s->m->attempt || s->m->attempt == 0)
        return;
    if (s->ev->type == MEMBER_EV_PLANNED && state == MEMBER_PREPARING)
        on_planned(s);
    else if (s->ev->type == MEMBER_EV_MADE_READY && state == MEMBER_PREPARING)
        on_made_ready(s);
    else if (s->ev->type == MEMBER_EV_PROGRESS && state == MEMBER_STARTED)
        report(s, MEMBER_REPORT_PROGRESS, s->m->attempt);
    else if (s->ev->type == MEMBER_EV_LANDED && state == MEMBER_STARTED)
        on_landed(s);
    else if (s->ev->type == MEMBER_EV_QUIET && state == MEMBER_ABORTING)
        on_quiet(s);
}

/* --- dispatch --- */

static void on_order(struct step *s)
{
    if (s->m->session == 0 || s->ev->session != s->m->session)
        return;
    if (s->ev->type == MEMBER_EV_PREPARE)
        on_prepare(s);
    else if (s->ev->type == MEMBER_EV_START)
        on_start(s);
    else if (s->ev->type == MEMBER_EV_ABORT)
        on_abort(s);
    else if (s->ev->type == MEMBER_EV_END)
        on_end(s);
    else
        on_expel(s);
}

void member_step(struct member *m, const struct member_event *ev, struct member_update *u)
{
    struct step s = {m, ev, u};
    u->n_actions = 0;
    u->text[0] = '\0';
    switch (ev->type) {
    case MEMBER_EV_JOINED:
        on_joined(&s);
        break;
    case MEMBER_EV_BROKEN:
    case MEMBER_EV_LEASE_OVER:
        on_over(&s);
        break;
    case MEMBER_EV_DATA_PLANE_UP:
        m->data_plane_up = true;
        m->data_plane = ev->data_plane;
        break;
    case MEMBER_EV_DATA_PLANE_DEAD:
        on_data_plane_dead(&s);
        break;
    case MEMBER_EV_PREPARE:
    case MEMBER_EV_START:
    case MEMBER_EV_ABORT:
    case MEMBER_EV_END:
    case MEMBER_EV_EXPEL:
        on_order(&s);
        break;
    case MEMBER_EV_PLANNED:
    case MEMBER_EV_MADE_READY:
    case MEMBER_EV_PROGRESS:
    case MEMBER_EV_LANDED:
    case MEMBER_EV_QUIET:
        on_answer(&s);
        break;
    case MEMBER_EV_TICK:
        if (m->state.state == MEMBER_ABORTING && ev->now_ns >= m->deadline_ns)
            kill_data_plane(&s);
        break;
    }
}
