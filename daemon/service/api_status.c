/* Status: this daemon, the nodes, and the models (api_status_model.c). */
#include <string.h>

#include "base/clock.h"
#include "service/api_status.h"
#include "service/nodes.h"
#include "service/release.h"

#include "base/banned.h"

/* --- this daemon ------------------------------------------------------------------------------ */

static Reshard__V1__Strangers *strangers_make(struct arena *a, const struct peer_strangers *from)
{
    Reshard__V1__Strangers *x = arena_take(a, 1, sizeof *x);
    if (x == NULL)
        return NULL;
    reshard__v1__strangers__init(x);
    x->connections = from->connections;
    x->peers = from->peers;
    x->data = from->data;
    return x;
}

static void gpu_fill(Reshard__V1__GpuMemory *to, const char *name,
                     const struct wire_gpu_memory *from)
{
    reshard__v1__gpu_memory__init(to);
    to->name = (char *)(uintptr_t)name;
    to->limit_bytes = from->limit_bytes;
    to->context_bytes = from->context_bytes;
    to->communicator_bytes = from->communicator_bytes;
    to->work_bytes = from->work_bytes;
    to->ring_bytes = from->ring_bytes;
    to->scratch_bytes = from->scratch_bytes;
    to->worker_bytes = from->worker_bytes;
    to->free_bytes = from->free_bytes;
    to->total_bytes = from->total_bytes;
    to->context_measured = from->context_measured != 0;
    to->communicator_measured = from->communicator_measured != 0;
    to->peak_bytes = from->peak_bytes;
    to->registrations = from->registrations;
    to->refused_registrations = from->refused_registrations;
    to->registered_bytes = from->registered_bytes;
    to->registered_messages = from->hits;
    to->registered_message_bytes = from->hit_bytes;
}

static void gpus_fill(struct arena *a, Reshard__V1__StatusReply *to, const struct service *s)
{
    const struct wire_gpu_memory *gpus = NULL;
    uint32_t n = s->link != NULL ? link_gpu_memory(s->link, &gpus) : 0;
    to->gpu_memory = (Reshard__V1__GpuMemory **)arena_list(a, n, sizeof **to->gpu_memory);
    for (uint32_t d = 0; to->gpu_memory != NULL && d < n; d++)
        gpu_fill(to->gpu_memory[to->n_gpu_memory++], link_device_name(s->link, d), &gpus[d]);
}

static void daemon_fill(struct arena *a, Reshard__V1__StatusReply *to, const struct service *s)
{
    const struct config *c = s->config;
    to->node = (char *)(uintptr_t)c->node;
    to->release = (char *)(uintptr_t)RESHARD_RELEASE;
    to->incarnation = s->incarnation;
    to->uptime_ns = clock_mono_ns() - s->start_ns;
    to->backend = (char *)(uintptr_t)c->backend;
    to->state_dir = (char *)(uintptr_t)c->state_dir;
    to->devices = c->devices;
    to->domain_of_device = arena_take(a, c->devices, sizeof *to->domain_of_device);
    for (uint32_t d = 0; to->domain_of_device != NULL && d < c->devices; d++)
        to->domain_of_device[to->n_domain_of_device++] = c->domain_of_device[d];
    to->data_plane = arena_text(a, s->link != NULL ? link_text(s->link) : "stopping");
    to->data_plane_restarts = s->link != NULL ? link_restarts(s->link) : 0;
    to->clients = s->memory != NULL ? memory_server_n_clients(s->memory) : 0;
    struct peer_strangers strangers = service_strangers(s);
    to->strangers = strangers_make(a, &strangers);
    gpus_fill(a, to, s);
    if (s->link != NULL)
        to->local_pairs = arena_text(a, link_about(s->link)->local);
}

/* --- nodes ------------------------------------------------------------------------------------ */

static char *data_plane_text(struct arena *a, const struct coordinator *c, uint32_t i)
{
    const struct service *s = c->service;
    if (i == s->node)
        return arena_text(a, s->link != NULL ? link_text(s->link) : "stopping");
    return arena_text(a, c->nodes[i].up ? "ready" : c->nodes[i].broken);
}

static const char *node_state(const struct peer_view *v)
{
    static const char *const names[] = {
        [PEER_AWAY] = "away", [PEER_HERE] = "here", [PEER_SILENT] = "silent"};
    return names[v->state];
}

/* The deciders know of a node alike, as far as they have heard of it; ours may be none yet. */
static const char *node_lacks_any(const struct coordinator *c, uint32_t i)
{
    queue_foreach (q, &c->deciders) {
        const char *lacks = api_node_lacks(container_of(q, struct decider, in)->refit, i);
        if (lacks[0] != '\0')
            return lacks;
    }
    return c->nodes[i].drained_wall_ns != 0 ? "drained" : "";
}

/* Of a wall time, where it is known and past; else 0. */
static uint64_t age_ns(uint64_t wall_ns)
{
    uint64_t now = clock_wall_ns();
    return wall_ns != 0 && now > wall_ns ? now - wall_ns : 0;
}

static void node_fill(struct arena *a, Reshard__V1__NodeStatus *to, const struct coordinator *c,
                      uint32_t i)
{
    const struct service *s = c->service;
    const struct config *config = s->config;
    struct peer_view v;
    nodes_look(c, i, &v);
    reshard__v1__node_status__init(to);
    to->name = (char *)(uintptr_t)coordinator_node_name(c, i);
    to->coordinator = i == s->node;
    to->state = (char *)(uintptr_t)node_state(&v);
    to->incarnation = v.incarnation;
    to->address = config->n_nodes > 0 ? config->nodes[i].address : (char *)(uintptr_t) "";
    to->data_address = arena_text(a, v.data_address != NULL ? v.data_address : "");
    to->data_port = c->nodes[i].data_port;
    to->release = arena_text(a, v.release != NULL ? v.release : "");
    to->devices = v.n_devices;
    to->domains = (char **)arena_take(a, v.n_devices, sizeof(char *));
    for (uint32_t d = 0; to->domains != NULL && d < v.n_devices; d++)
        to->domains[to->n_domains++] =
            arena_text(a, v.domain_of_device[d][0] != '\0' ? v.domain_of_device[d] : to->name);
    to->data_plane = data_plane_text(a, c, i);
    to->lost = c->nodes[i].n_lost;
    if (v.heard_ns != 0)
        to->heard_age_ns = clock_mono_ns() - v.heard_ns;
    to->round_trip_ns = v.round_trip_ns;
    to->joins = v.joins;
    to->refused = v.refused;
    to->draining = c->nodes[i].drained_wall_ns != 0;
    to->drained_wall_ns = c->nodes[i].drained_wall_ns;
    to->drained_age_ns = age_ns(to->drained_wall_ns);
    struct peer_strangers strangers = i == s->node ? service_strangers(s) : v.strangers;
    to->strangers = strangers_make(a, &strangers);
    to->lacks = (char *)(uintptr_t)node_lacks_any(c, i);
    to->why = arena_text(a, v.state != PEER_HERE && v.why != NULL ? v.why : "");
}

static void nodes_fill(struct arena *a, Reshard__V1__StatusReply *to, const struct coordinator *c)
{
    to->nodes = (Reshard__V1__NodeStatus **)arena_list(a, c->n_nodes, sizeof **to->nodes);
    for (uint32_t i = 0; to->nodes != NULL && i < c->n_nodes; i++)
        node_fill(a, to->nodes[to->n_nodes++], c, i);
}

/* What a node that is not the coordinator knows by itself: of use when the coordinator can't be asked. */
static void own_models_fill(struct arena *a, Reshard__V1__StatusReply *to, struct service *s,
                            const char *only)
{
    to->models = (Reshard__V1__ModelStatus **)arena_list(a, s->n_models, sizeof **to->models);
    queue_foreach (q, &s->models) {
        const struct model *m = container_of(q, struct model, in);
        if (to->models == NULL)
            return;
        if (only[0] != '\0' && strcmp(only, m->name) != 0)
            continue;
        Reshard__V1__ModelStatus *x = to->models[to->n_models++];
        reshard__v1__model_status__init(x);
        x->model = m->name;
        x->committed = m->committed.version;
        x->committed_wall_ns = m->committed.wall_ns;
        x->committed_age_ns = m->committed.version != 0 ? age_ns(m->committed.wall_ns) : 0;
    }
}

static void models_fill(struct arena *a, Reshard__V1__StatusReply *to, const struct coordinator *c,
                        const struct decider *only)
{
    to->models = (Reshard__V1__ModelStatus **)arena_list(a, c->n_deciders, sizeof **to->models);
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        if (to->models != NULL && (only == NULL || only == d))
            api_model_fill(a, to->models[to->n_models++], d);
    }
}

static int status(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__StatusRequest *q = request;
    Reshard__V1__StatusReply reply = RESHARD__V1__STATUS_REPLY__INIT;
    struct service *s = c->service;
    struct arena a = {0};
    struct decider *only = NULL;
    int r = q->model[0] != '\0' ? api_decider(c, q->model, &only, e) : 0;
    if (r != 0)
        return r;
    daemon_fill(&a, &reply, s);
    if (s->coordinator != NULL) {
        nodes_fill(&a, &reply, s->coordinator);
        models_fill(&a, &reply, s->coordinator, only);
    } else {
        reply.session = arena_text(&a, s->peer != NULL ? peer_text(s->peer) : "");
        own_models_fill(&a, &reply, s, "");
    }
    arena_finish(c->call, &a, &reply.base);
    return 0;
}

/* What is about this daemon is its own; nodes and models are the coordinator's, as long as it answers. */
void api_status_member(struct rpc_call *call, const void *answer, size_t n_bytes, const char *model,
                       const char *why)
{
    struct service *s = rpc_call_context(call);
    Reshard__V1__StatusReply reply = RESHARD__V1__STATUS_REPLY__INIT;
    const struct pb_limits limits = {.max_repeated = 1 << 20};
    struct arena a = {0};
    struct err e = {0};
    void *theirs = NULL;
    if (answer != NULL && pb_unpack(&reshard__v1__status_reply__descriptor, answer, n_bytes,
                                    &limits, &theirs, &e) != 0)
        why = e.text;
    daemon_fill(&a, &reply, s);
    if (theirs != NULL) {
        const Reshard__V1__StatusReply *t = theirs;
        reply.nodes = t->nodes;
        reply.n_nodes = t->n_nodes;
        reply.models = t->models;
        reply.n_models = t->n_models;
        reply.session = arena_text(&a, s->peer != NULL ? peer_text(s->peer) : "");
    } else {
        reply.session = arena_text(&a, why);
        own_models_fill(&a, &reply, s, model);
    }
    arena_finish(call, &a, &reply.base);
    pb_free(theirs);
}

void api_status(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__status_request__descriptor, false, status);
}
