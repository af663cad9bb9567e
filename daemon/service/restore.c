#include "service/restore.h"

#include <inttypes.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "service/coordinator.h"
#include "service/held.h"

#include "base/banned.h"

/* That a layout belongs to a model; told to the decider once all of its rows are back. */
struct membership {
    struct queue in;
    struct decider *decider;
    enum refit_side side;
    uint8_t digest[16];
};

struct restoring {
    struct service *service;
    struct queue members;
    struct err *e;
    uint32_t n_layouts, n_versions;
};

static int restore_layout(struct restoring *r, const struct ledger_layout *row)
{
    struct layout *layout;
    struct layout_entry *entry;
    int code = layout_from_json(row->json, strlen(row->json), &layout, r->e);
    if (code == 0 && (code = layout_digest(layout)) == 0 &&
        memcmp(layout->digest, row->digest, 16) != 0) {
        layout_free(layout);
        code =
            err_set(r->e, RS_EDISK, "its content is not that of its digest; the file was changed");
    } else if (code == 0) {
        code = layouts_add(&r->service->layouts, layout, &entry, r->e);
        if (code == 0)
            entry->durable = true;
    }
    if (code == RS_EEXHAUSTED) { /* more than may be in use now; clients put theirs again */
        log_warn("layout %s not taken up: %s", row->name, err_text(r->e, code));
        return 0;
    }
    r->n_layouts++;
    return code == 0 ? 0 : err_prefix(r->e, code, "layout %s", row->name);
}

static int restore_member(struct restoring *r, struct decider *d, const struct ledger_member *row)
{
    struct membership *member;
    if (!row->active)
        return 0;
    member = mem_zalloc(sizeof *member);
    if (member == NULL)
        return err_set(r->e, RS_ENOMEM, "no memory to read the ledger");
    member->decider = d;
    member->side = (enum refit_side)row->side;
    memcpy(member->digest, row->digest, sizeof member->digest);
    queue_push(&r->members, &member->in);
    return 0;
}

static int restore_row(const struct ledger_record *row, void *arg)
{
    struct restoring *r = arg;
    struct decider *d;
    if (row->kind == LEDGER_LAYOUT)
        return restore_layout(r, &row->layout);
    if (row->kind == LEDGER_DRAIN)
        drain_restore(r->service->coordinator, &row->drain);
    if (row->model == NULL)
        return 0;
    int code = decider_open(r->service->coordinator, row->model, &d, r->e);
    if (code != 0)
        return code;
    if (row->kind == LEDGER_MEMBER)
        return restore_member(r, d, &row->member);
    if (row->kind == LEDGER_VERSION) {
        r->n_versions++;
        code = row->version.phase != REFIT_COMMITTED
                   ? 0
                   : held_load(d->held, row->version.version, row->version.fingerprints,
                               row->version.n_fingerprints_bytes);
        if (code != 0)
            return err_set(r->e, code, "no memory to read the ledger");
    }
    code = refit_restore(d->refit, row, r->e);
    return code == 0 ? 0 : err_prefix(r->e, code, "model %s", row->model);
}

static int members_tell(struct restoring *r)
{
    int code = 0;
    while (!queue_empty(&r->members)) {
        struct membership *member = container_of(queue_pop(&r->members), struct membership, in);
        struct layout_entry *entry = layouts_find(&r->service->layouts, member->digest);
        if (entry != NULL && code == 0)
            code = layout_event(member->decider, member->side, entry->layout, true, 0);
        mem_free(member);
    }
    return code;
}

/* Whatever was in flight is ended; our own node learns what is committed. */
static int deciders_restored(struct coordinator *c)
{
    int code = 0;
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        struct refit_event ev = {.type = REFIT_EV_RESTORED};
        if (code == 0 && (code = decider_event(d, &ev)) == 0)
            coordinator_announce(d);
    }
    return code;
}

int restore(struct service *s, struct err *e)
{
    struct restoring r = {.service = s, .e = e};
    queue_init(&r.members);
    int code = ledger_load(s->ledger, restore_row, &r, e);
    if (code == 0)
        code = members_tell(&r);
    else
        while (!queue_empty(&r.members))
            mem_free(container_of(queue_pop(&r.members), struct membership, in));
    if (code == 0)
        code = deciders_restored(s->coordinator);
    if (code != 0)
        return err_prefix(e, code, "ledger in %s", s->config->state_dir);
    if (!s->ledger->created)
        log_info("ledger read: models %u, layouts %u, versions %u", s->coordinator->n_deciders,
                 r.n_layouts, r.n_versions);
    return 0;
}
