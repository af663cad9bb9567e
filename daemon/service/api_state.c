/* What a refit and a version look like from outside. */
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "service/api_common.h"

#include "base/banned.h"

enum { MOST_WAITING = sizeof((struct api_refit_state *)0)->waiting / sizeof(char *) };

void api_bytes_fill(Reshard__V1__Bytes *to, const struct refit_bytes *from)
{
    reshard__v1__bytes__init(to);
    to->landed = from->landed;
    to->network = from->network;
    to->domain = from->domain;
    to->device = from->device;
    to->skipped = from->skipped;
    to->total = from->total;
    to->network_minimum = from->network_minimum;
}

void api_record_fill(Reshard__V1__VersionRecord *to, Reshard__V1__Bytes *bytes,
                     const struct decider *d, const struct refit_version *v)
{
    struct refit_bytes moved = refit_version_bytes(d->refit, v);
    reshard__v1__version_record__init(to);
    api_bytes_fill(bytes, &moved);
    to->version = v->version;
    to->phase = API_PHASE(v->phase.state);
    to->attempts = v->n_attempts;
    to->reason = (char *)(uintptr_t)v->reason;
    to->submitted_wall_ns = v->submitted_wall_ns;
    to->total_ns = v->total_ns;
    to->wire_ns = v->wire_ns;
    to->stall_ns = v->stall_ns;
    to->bytes = bytes;
    to->strategy = (char *)(uintptr_t)v->strategy;
    to->plan_digest.data = (uint8_t *)(uintptr_t)v->plan_digest;
    to->plan_digest.len = sizeof v->plan_digest;
    to->epoch = v->epoch;
}

static void waiting_add(const char *who, void *arg)
{
    struct api_refit_state *s = arg;
    char *copy = s->n_waiting < MOST_WAITING ? mem_strdup(who) : NULL;
    if (copy != NULL)
        s->waiting[s->n_waiting++] = copy;
}

/* How many more there are than are named. */
static void waiting_rest(struct api_refit_state *s, size_t n)
{
    if (n <= s->n_waiting || s->n_waiting == 0)
        return;
    char *rest =
        mem_printf("and %zu more", n - s->n_waiting + (s->n_waiting == MOST_WAITING ? 1 : 0));
    if (rest == NULL)
        return;
    if (s->n_waiting == MOST_WAITING)
        mem_free(s->waiting[--s->n_waiting]);
    s->waiting[s->n_waiting++] = rest;
}

void api_refit_state_fill(struct api_refit_state *s, const struct decider *d,
                          const struct refit_version *v)
{
    memset(s, 0, sizeof *s);
    reshard__v1__refit_state__init(&s->state);
    struct refit_bytes bytes = refit_version_bytes(d->refit, v);
    api_bytes_fill(&s->bytes, &bytes);
    bool final = refit_phase_final(v->phase.state);
    if (!final)
        waiting_rest(s, refit_waiting_for(d->refit, v, MOST_WAITING, waiting_add, s));
    if (!final && v == d->refit->in_flight && d->run.wants_devices)
        waiting_add("devices that a refit of another model uses", s);
    s->state.model = d->model;
    s->state.version = v->version;
    s->state.attempt = v->attempt;
    s->state.phase = API_PHASE(v->phase.state);
    s->state.bytes = &s->bytes;
    s->state.source_released = v->source_released;
    s->state.reason = (char *)(uintptr_t)v->reason;
    s->state.waiting_for = s->waiting;
    s->state.n_waiting_for = s->n_waiting;
    s->state.elapsed_ns = final                  ? v->total_ns
                          : v->submitted_ns != 0 ? clock_mono_ns() - v->submitted_ns
                                                 : 0;
}

/* A rehearsal is no version: what is left of it when it has ended is its outcome. */
static void outcome_fill(struct api_refit_state *s, const struct decider *d)
{
    const struct refit_outcome *o = &d->refit->rehearsed;
    memset(s, 0, sizeof *s);
    reshard__v1__refit_state__init(&s->state);
    api_bytes_fill(&s->bytes, &o->bytes);
    s->state.model = d->model;
    s->state.version = o->version;
    s->state.attempt = o->attempt;
    s->state.phase = API_PHASE(o->phase);
    s->state.bytes = &s->bytes;
    s->state.source_released = true;
    s->state.elapsed_ns = o->total_ns;
    s->state.reason = (char *)(uintptr_t)o->reason;
}

bool api_refit_state_find(struct api_refit_state *s, const struct decider *d, uint64_t version)
{
    const struct refit *r = d->refit;
    const struct refit_version *v = refit_find_version(r, version);
    if (v == NULL && r->in_flight != NULL && r->in_flight->kind == REFIT_KIND_REHEARSAL &&
        r->in_flight->version == version)
        v = r->in_flight;
    if (v != NULL)
        api_refit_state_fill(s, d, v);
    else if (r->rehearsed.phase != REFIT_NONE && r->rehearsed.version == version)
        outcome_fill(s, d);
    else
        return false;
    return true;
}

void api_refit_state_close(struct api_refit_state *s)
{
    for (uint32_t i = 0; i < s->n_waiting; i++)
        mem_free(s->waiting[i]);
    s->n_waiting = 0;
}
