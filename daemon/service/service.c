#include "service/service.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "service/coordinator.h"
#include "service/nodes.h"
#include "service/peers.h"
#include "service/restore.h"

#include "base/banned.h"

/* --- waiters ------------------------------------------------------------------------------------ */

uint64_t waiter_add(struct service *s, struct waiter *w)
{
    w->cookie = ++s->next_cookie;
    w->asked = false;
    queue_push(&s->waiters, &w->in);
    return w->cookie;
}

void waiter_forget(struct waiter *w)
{
    if (w->cookie == 0)
        return;
    queue_remove(&w->in);
    w->cookie = 0;
    w->asked = false;
}

void waiter_end(struct waiter *w, int code, const char *text)
{
    struct op_reply reply = {.code = code, .text = text != NULL ? text : ""};
    waiter_forget(w);
    w->done(w, &reply);
}

static struct waiter *waiter_find(struct service *s, uint64_t cookie)
{
    /* From the newest: most answers come at once. */
    for (struct queue *q = s->waiters.prev; q != &s->waiters; q = q->prev) {
        struct waiter *w = container_of(q, struct waiter, in);
        if (w->cookie == cookie)
            return w;
    }
    return NULL;
}

bool waiter_waits(struct service *s, uint64_t cookie)
{
    return waiter_find(s, cookie) != NULL;
}

void service_reply(struct service *s, uint64_t cookie, const struct op_reply *reply)
{
    struct waiter *w = waiter_find(s, cookie);
    if (w == NULL)
        return; /* its call has ended */
    waiter_forget(w);
    w->done(w, reply);
}

void service_answer(struct service *s, uint64_t cookie, int code, const char *text)
{
    struct waiter *w = waiter_find(s, cookie);
    if (w != NULL)
        waiter_end(w, code, text);
}

/* --- identity ----------------------------------------------------------------------------------- */

bool service_identify(void *context, const char *token, struct rpc_identity *ret)
{
    const struct service *s = context;
    const struct memory_client *c = s->memory != NULL ? memory_server_find(s->memory, token) : NULL;
    *ret = (struct rpc_identity){.kind = RPC_ANONYMOUS};
    if (c == NULL) /* a token of another start: not the same as none (api.c) */
        (void)snprintf(ret->name, sizeof ret->name, "unknown token");
    else
        *ret =
            (struct rpc_identity){.kind = RPC_LOCAL, .client = c->id, .uid = c->uid, .pid = c->pid};
    return true;
}

/* --- outside ------------------------------------------------------------------------------------ */

/* ", pinned memory near NUMA nodes 0 0 1 1"; "" where no GPU has one. */
static const char *numa_text(const struct link_about *about, char *ret, size_t capacity)
{
    bool any = false;
    size_t at = (size_t)snprintf(ret, capacity, ", pinned memory near NUMA nodes");
    for (uint32_t i = 0; i < about->n_devices && at < capacity; i++) {
        int node = about->devices[i].numa_node;
        any = any || node >= 0;
        at += node >= 0 ? (size_t)snprintf(ret + at, capacity - at, " %d", node)
                        : (size_t)snprintf(ret + at, capacity - at, " -");
    }
    return any ? ret : "";
}

/* What the data plane found is the topology's from now on. */
static void gpus_found(struct service *s)
{
    const struct link_about *about = link_about(s->link);
    char text[1024], numa[512];
    char **domains = about->nccl_version != 0 ? nodes_own_domains(s->config, about) : NULL;
    if (domains == NULL)
        return; /* no GPUs; without memory: one domain, as before */
    log_info("GPUs: %u devices, NCCL %d.%d.%d, CUDA %d.%d, domains %s by %s%s", about->n_devices,
             about->nccl_version / 10000, about->nccl_version % 10000 / 100,
             about->nccl_version % 100, about->cuda_version / 1000, about->cuda_version % 1000 / 10,
             nodes_domains_text(s->config, domains, text, sizeof text),
             s->config->domains[0] != '\0' ? "config" : about->how,
             numa_text(about, numa, sizeof numa));
    if (s->coordinator == NULL) {
        nodes_domains_free(domains, s->config->devices);
        return;
    }
    nodes_domains_free(s->coordinator->own_domains, s->config->devices);
    s->coordinator->own_domains = domains;
}

static void on_data_plane_ready(void *arg)
{
    struct service *s = arg;
    const struct link_about *about = link_about(s->link);
    if (about->local[0] != '\0')
        log_info("messages between devices of this node: %s", about->local);
    gpus_found(s);
    peers_about(s->peers);
    leases_rebind(s);
}

static void on_data_plane_lost(void *arg, const char *why)
{
    node_lost(arg, why);
}

static void on_client_ended(void *arg, struct memory_client *client)
{
    leases_client_ended(arg, client);
}

static void on_wake(void *arg)
{
    struct service *s = arg;
    (void)uv_async_send(&s->wake);
}

static void on_mailbox(uv_async_t *wake)
{
    struct service *s = wake->data;
    (void)mailbox_drain(&s->mailbox);
}

/* --- start -------------------------------------------------------------------------------------- */

static int ledger_open(struct service *s, struct err *e)
{
    char path[CONFIG_MAX_PATH + 16];
    if (mkdir(s->config->state_dir, 0700) != 0 && errno != EEXIST)
        return err_set(e, err_from_errno(errno), "state_dir %s: %s", s->config->state_dir,
                       strerror(errno));
    (void)snprintf(path, sizeof path, "%s/reshard.db", s->config->state_dir);
    return ledger_sqlite_open(path, &s->mailbox, &s->ledger, e);
}

static void service_free(struct service *s)
{
    void (*done)(void *) = s->stopped;
    void *arg = s->stopped_arg;
    plan_store_close(&s->plans);
    coordinator_close(s->coordinator);
    layouts_close(&s->layouts);
    mailbox_close(&s->mailbox);
    mem_free(s);
    if (done != NULL)
        done(arg);
}

int service_new(uv_loop_t *loop, const struct config *config, struct service **ret, struct err *e)
{
    struct service *s = mem_zalloc(sizeof *s);
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the service");
    s->loop = loop;
    s->config = config;
    s->incarnation = random_id();
    s->random = s->incarnation;
    s->start_ns = clock_mono_ns();
    queue_init(&s->models);
    queue_init(&s->leases);
    queue_init(&s->waiters);
    layouts_init(&s->layouts, config->max_layouts);
    plan_store_init(&s->plans);
    mailbox_init(&s->mailbox, on_wake, s);
    rs_assert(uv_async_init(loop, &s->wake, on_mailbox) == 0);
    s->wake.data = s;
    s->n_handles = 1;
    *ret = s;
    s->node = config->me;
    bool coordinator = config->me == config->coordinator_index;
    int r = coordinator ? coordinator_new(s, &s->coordinator, e) : 0;
    if (r == 0)
        r = ledger_open(s, e);
    if (r != 0)
        return r;
    return coordinator ? restore(s, e) : remember_load(s, e);
}

static int device_of(void *arg, const char *name, uint32_t *ret, struct err *e)
{
    const struct service *s = arg;
    return link_device_of(s->link, name, ret, e);
}

int service_start(struct service *s, struct err *e)
{
    struct link_events events = {
        .ready = on_data_plane_ready, .lost = on_data_plane_lost, .arg = s};
    int r =
        memory_server_start(s->loop, s->config, s->incarnation, on_client_ended, s, &s->memory, e);
    if (r == 0)
        r = link_new(s->loop, s->config, &events, &s->link, e);
    if (r == 0)
        memory_server_devices(s->memory, device_of, s);
    if (r == 0 && s->coordinator != NULL)
        node_welcomed(s, s->incarnation);
    return r == 0 && s->config->n_nodes > 1 ? peers_start(s, &s->peers, e) : r;
}

void service_on_failure(struct service *s, void (*fn)(void *arg), void *arg)
{
    s->failed = fn;
    s->failed_arg = arg;
}

void service_check_ledger(struct service *s, int code)
{
    void (*fn)(void *) = s->failed;
    if (code != RS_EDISK || fn == NULL)
        return;
    s->failed = NULL;
    fn(s->failed_arg);
}

/* --- stop --------------------------------------------------------------------------------------- */

void service_handle_closed(struct service *s)
{
    if (--s->n_handles == 0)
        service_free(s);
}

static void on_wake_closed(uv_handle_t *h)
{
    service_handle_closed(h->data);
}

/* The clients and the data plane are gone and no job runs: what is left is ours alone. */
static void stop_finish(struct service *s)
{
    s->stop_finished = true;
    leases_sweep(s);
    ledger_close(s->ledger); /* finishes what is being written */
    s->ledger = NULL;
    while (s->coordinator != NULL && !queue_empty(&s->coordinator->deciders))
        decider_close(container_of(s->coordinator->deciders.next, struct decider, in));
    queue_foreach_safe (q, tmp, &s->models)
        model_close(container_of(q, struct model, in));
    mailbox_shut(&s->mailbox);
    uv_close((uv_handle_t *)&s->wake, on_wake_closed);
}

void service_stop_if_idle(struct service *s)
{
    if (s->stopping && !s->stop_finished && s->n_jobs == 0 && s->memory == NULL &&
        s->link == NULL && s->peers == NULL)
        stop_finish(s);
}

static void on_peers_stopped(void *arg)
{
    struct service *s = arg;
    s->peers = NULL;
    service_stop_if_idle(s);
}

/* Nothing moves here any more: the goodbye is true. */
static void peers_goodbye(struct service *s)
{
    if (s->peers != NULL)
        peers_stop(s->peers, on_peers_stopped, s);
    else
        service_stop_if_idle(s);
}

static void on_link_stopped(void *arg)
{
    struct service *s = arg;
    s->link = NULL;
    peers_goodbye(s);
}

static void on_memory_stopped(void *arg)
{
    struct service *s = arg;
    s->memory = NULL;
    if (s->link != NULL)
        link_stop(s->link, on_link_stopped, s);
    else
        peers_goodbye(s);
}

void service_stop(struct service *s, void (*done)(void *arg), void *arg)
{
    s->stopping = true;
    s->stopped = done;
    s->stopped_arg = arg;
    queue_foreach (q, &s->models)
        polls_close(container_of(q, struct model, in));
    if (s->coordinator != NULL)
        queue_foreach (q, &s->coordinator->deciders)
            watchers_close(container_of(q, struct decider, in));
    if (s->memory != NULL)
        memory_server_stop(s->memory, on_memory_stopped,
                           s); /* ends the leases: their streams first */
    else
        on_memory_stopped(s);
}

/* --- strangers ----------------------------------------------------------------------------------- */

int service_reload_tls(struct service *s, struct err *e)
{
    return s->peer != NULL ? peer_reload_tls(s->peer, e) : 0;
}

bool service_retry_data_plane(struct service *s)
{
    return link_retry(s->link);
}

void service_set_refused(struct service *s, uint64_t (*n_refused)(void *arg), void *arg)
{
    s->n_refused = n_refused;
    s->n_refused_arg = arg;
}

struct peer_strangers service_strangers(const struct service *s)
{
    return (struct peer_strangers){.connections =
                                       s->n_refused != NULL ? s->n_refused(s->n_refused_arg) : 0,
                                   .peers = s->peer != NULL ? peer_n_refused(s->peer) : 0,
                                   .data = s->link != NULL ? link_strangers(s->link) : 0};
}
