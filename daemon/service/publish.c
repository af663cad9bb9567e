/* Publish: may it? → fingerprinted → PUBLISHED. */
#include <inttypes.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "service/blame.h"
#include "service/lease.h"
#include "service/mix.h"

#include "base/banned.h"

void publication_unref(struct publication *p)
{
    if (p == NULL || --p->refs > 0)
        return;
    mem_free(p->fingerprints);
    mem_free(p->expected);
    mem_free(p->event);
    mem_free(p);
}

static uint64_t publication_name(const struct lease *l, const struct publication *p)
{
    const struct layout *layout = l->layout->layout;
    if (p->fingerprints == NULL)
        return 0; /* nothing is known of the content */
    uint64_t id = mix_bytes(p->version, layout->digest, sizeof layout->digest);
    id = mix_word(id, l->rank);
    id = mix_bytes(id, p->fingerprints, p->n_tensors * sizeof *p->fingerprints);
    return id != 0 ? id : 1;
}

/* Tensors of which this rank holds nothing have nothing to tell. */
static struct publication_print *prints_make(const struct lease *l, const struct publication *p,
                                             uint32_t *ret_n)
{
    struct box box[1];
    struct publication_print *prints = mem_calloc(p->n_tensors, sizeof *prints);
    for (uint32_t t = 0; prints != NULL && t < p->n_tensors; t++)
        if (layout_shards(l->layout->layout, t, l->rank, box, 1) > 0)
            prints[(*ret_n)++] = (struct publication_print){t, p->fingerprints[t]};
    return prints;
}

/* cookie 0: nobody waits for the answer. */
static int published_tell(struct lease *l, uint64_t cookie)
{
    struct publication *p = l->published;
    struct node_report r = lease_report(l, REFIT_EV_PUBLISHED);
    uint32_t n = 0;
    struct publication_print *prints = p->fingerprints != NULL ? prints_make(l, p, &n) : NULL;
    if (p->fingerprints != NULL && prints == NULL)
        return RS_ENOMEM;
    r.event.cookie = cookie;
    r.event.published.worker = l->id;
    r.event.published.version = p->version;
    r.event.published.publication = p->id;
    r.event.published.push = l->waits_for == p->version ? p->push : 0;
    r.has_prints = prints != NULL;
    r.prints = prints;
    r.n_prints = n;
    r.expected = p->expected;
    r.n_expected = p->n_expected;
    p->refs++; /* it may be released at once */
    int code = node_tell(l->service, &r);
    publication_unref(p);
    mem_free(prints);
    return code;
}

void lease_publish_ends(struct lease *l, uint64_t version)
{
    if (l->published == NULL || l->published->version > version)
        return;
    publication_unref(l->published);
    l->published = NULL;
}

void lease_publish_again(struct lease *l)
{
    if (l->published != NULL && published_tell(l, 0) == RS_ENOMEM)
        log_error("model %s: no memory to report what layout %s rank %u has published",
                  l->model->name, l->layout->layout->name, l->rank);
}

void lease_publish_refuse(struct lease *l, int code, const char *text)
{
    struct publication *p = l->publishing;
    l->publishing = NULL;
    publication_unref(p);
    service_answer(l->service, l->publish_cookie, code, text);
}

static void publish_finish(struct lease *l, int code, const char *text)
{
    struct publication *p = l->publishing;
    uint64_t cookie = l->publish_cookie;
    if (code != 0) {
        lease_publish_refuse(l, code, text);
        return;
    }
    l->publishing = NULL;
    p->id = publication_name(l, p);
    publication_unref(l->published);
    l->published = p;
    l->published_before = l->waits_for = p->version;
    l->waits_push = p->push;
    code = published_tell(l, cookie);
    if (code != 0)
        service_answer(l->service, cookie, code,
                       "the coordinator could not be told; publish again");
}

/* With verification off nothing is fingerprinted. */
static bool unread(const struct lease *l)
{
    return l->service->config->verify[0] == 'o';
}

static void on_published(struct link_request *r, int code, struct wire_packet *packet,
                         const struct err *e)
{
    struct lease *l = container_of(r, struct lease, publish);
    struct err mine = {0};
    if (code != 0) {
        mine = *e;
        blame_names(&mine, l->layout->layout, NULL);
        publish_finish(l, code == RS_EPEER ? RS_EUNAVAIL : code, err_text(&mine, code));
        return;
    }
    if (!unread(l))
        code = lease_table(l, packet, &l->publishing->fingerprints, &mine);
    publish_finish(l, code, err_text(&mine, code));
}

static int expected_copy(struct lease *l, struct publication *p, const struct op_expected *expected,
                         size_t n, struct err *e)
{
    p->expected = mem_calloc(n, sizeof *p->expected);
    if (p->expected == NULL)
        return err_set(e, RS_ENOMEM, "no memory to publish");
    for (; p->n_expected < n; p->n_expected++) {
        int64_t t = layout_find(l->layout->layout, expected[p->n_expected].tensor);
        if (t < 0)
            return err_set(e, RS_EINVAL,
                           "expected fingerprint of tensor '%s': layout '%s' has no such tensor",
                           expected[p->n_expected].tensor, l->layout->layout->name);
        p->expected[p->n_expected].tensor = (uint32_t)t;
        p->expected[p->n_expected].fingerprint = expected[p->n_expected].fingerprint;
    }
    return 0;
}

/* This worker's place in the program that the next attempt most likely has: then its cells are fingerprinted in the
 * same pass, and PREPARE need not read the memory again. PROGRAM_NONE: none is known. */
static uint32_t place_likely(const struct lease *l)
{
    const struct plan_entry *plan = l->model->last_plan;
    for (uint32_t i = 0; plan != NULL && plan->source == l->layout && i < plan->program.n_places;
         i++)
        if (plan->program.places[i].side == PROGRAM_SOURCE &&
            plan->program.places[i].rank == l->rank)
            return i;
    return PROGRAM_NONE;
}

static int publish_send(struct lease *l, struct err *e)
{
    uint32_t place = place_likely(l);
    bool known = place != PROGRAM_NONE && !unread(l);
    const struct publication *p = l->publishing;
    struct wire_publish body = {.has_program = known,
                                .place = known ? place : 0,
                                .has_event = p->event != NULL,
                                .event_ms = l->service->config->memory_timeout_ms / 2,
                                .unread = unread(l)};
    if (p->event != NULL)
        memcpy(body.event, p->event, sizeof body.event);
    struct wire_header h = {.type = WIRE_PUBLISH,
                            .model = l->model->id,
                            .worker = l->id,
                            .version = l->publishing->version};
    l->publish = (struct link_request){.done = on_published};
    return link_submit(l->service->link, &l->publish, h, &body, sizeof body, NULL, 0,
                       known ? &l->model->last_plan->program_fd : NULL, known ? 1 : 0,
                       l->service->config->memory_timeout_ms, e);
}

static void publish_begin(struct lease *l)
{
    struct err e = {0};
    if (unread(l) && l->publishing->event == NULL) {
        publish_finish(l, 0, "");
        return;
    }
    int r = l->bound
                ? publish_send(l, &e)
                : err_set(&e, RS_EUNAVAIL, "the data plane is %s; try again", lease_unbound(l));
    if (r != 0)
        lease_publish_refuse(l, r, err_text(&e, r));
}

/* Of one version published twice: the second time it says of its tensors what it has not said before. */
static bool expects_otherwise(const struct publication *now, const struct publication *before)
{
    if (now->n_expected == 0 || before == NULL || before->version != now->version)
        return false;
    bool same = now->n_expected == before->n_expected;
    for (uint32_t i = 0; same && i < now->n_expected; i++)
        same = now->expected[i].tensor == before->expected[i].tensor &&
               now->expected[i].fingerprint == before->expected[i].fingerprint;
    return !same;
}

/* What stands already is now of this push. */
static void publish_another_push(struct lease *l, const struct publication *again)
{
    if (l->published == NULL || l->published->version != again->version || again->push == 0)
        return;
    l->published->push = l->waits_push = again->push;
    lease_publish_again(l);
}

/* Whether it may publish: 1 where it has done so already. */
static void on_may_publish(struct waiter *w, const struct op_reply *reply)
{
    struct lease *l = container_of(w, struct lease, ask);
    const struct publication *before = l->published;
    if (reply->code != 0) {
        lease_publish_refuse(l, reply->code, reply->text);
        return;
    }
    if (reply->value == 0) {
        publish_begin(l);
        return;
    }
    if (expects_otherwise(l->publishing, before)) {
        lease_publish_refuse(
            l, RS_EEXIST,
            "this version is published already, without these expected fingerprints; "
            "they go with its first Publish");
        return;
    }
    struct op_reply done = {
        .text = "",
        .value = before != NULL && before->version == l->publishing->version ? before->id : 0};
    struct publication *p = l->publishing;
    l->publishing = NULL;
    publish_another_push(l, p);
    publication_unref(p);
    service_reply(l->service, l->publish_cookie, &done);
}

static int publish_ask(struct lease *l, struct waiter *w, struct err *e)
{
    struct node_report r = {.type = NODE_REPORT_PUBLISH_ASK,
                            .model = l->model->name,
                            .worker = l->id,
                            .version = l->publishing->version};
    l->ask.done = on_may_publish;
    l->publish_cookie = waiter_add(l->service, w);
    w->asked = true; /* from now on the coordinator has the last word */
    int code = node_ask(l->service, &r, &l->ask, e);
    if (code != 0)
        waiter_forget(w);
    return code;
}

static int event_copy(struct publication *p, const uint8_t *event, struct err *e)
{
    p->event = mem_alloc(WIRE_HANDLE_BYTES);
    if (p->event == NULL)
        return err_set(e, RS_ENOMEM, "no memory to publish");
    memcpy(p->event, event, WIRE_HANDLE_BYTES);
    return 0;
}

/* What is being fingerprinted is what `p` asks for, and who asked first has gone: its session, or its connection, has broken
 * meanwhile, and it asks again. */
static bool asks_again(const struct lease *l, const struct publication *p)
{
    const struct publication *now = l->publishing;
    bool waits = p->event == NULL ||
                 (now->event != NULL && memcmp(p->event, now->event, WIRE_HANDLE_BYTES) == 0);
    return now->version == p->version && waits && !expects_otherwise(p, now) &&
           !waiter_waits(l->service, l->publish_cookie);
}

static void publish_join(struct lease *l, struct waiter *w)
{
    l->publish_cookie = waiter_add(l->service, w);
    w->asked = true;
}

static int publish_new(struct lease *l, struct publication *p, struct waiter *w, struct err *e)
{
    struct publication *before = l->publishing;
    if (before != NULL && !asks_again(l, p))
        return err_set(e, RS_EPRECOND,
                       "version %" PRIu64 " of this worker is being fingerprinted; wait for it",
                       before->version);
    if (before != NULL) {
        before->push = p->push > before->push ? p->push : before->push;
        publish_join(l, w);
        publication_unref(p);
        return 0;
    }
    l->publishing = p;
    int r = publish_ask(l, w, e);
    if (r != 0)
        l->publishing = NULL;
    return r;
}

int lease_publish(struct lease *l, uint64_t version, uint32_t push, const uint8_t *event,
                  const struct op_expected *expected, size_t n_expected, struct waiter *w,
                  struct err *e)
{
    if (n_expected > 0 && unread(l))
        return err_set(e, RS_EPRECOND,
                       "expected fingerprints can't be checked: this daemon takes none ([refit] "
                       "verify = off); set it to sampled or full, or expect nothing");
    struct publication *p = mem_zalloc(sizeof *p);
    if (p == NULL)
        return err_set(e, RS_ENOMEM, "no memory to publish");
    *p = (struct publication){
        .refs = 1, .version = version, .push = push, .n_tensors = l->layout->layout->n_tensors};
    int r = expected_copy(l, p, expected, n_expected, e);
    if (r == 0 && event != NULL)
        r = event_copy(p, event, e);
    if (r == 0)
        r = publish_new(l, p, w, e);
    if (r != 0)
        publication_unref(p);
    return r;
}
