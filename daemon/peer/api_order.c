/* Orders to nodes as protobuf. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "peer/address.h"
#include "peer/api_private.h"

#include "base/banned.h"

enum { VERIFY_MOST = 2 /* enum wire_verify */ };

/* --- encoding ------------------------------------------------------------------------------------ */

static void topology_fill(Reshard__V1__AttemptTopology *to, const struct topology *t,
                          struct api_scratch *s)
{
    reshard__v1__attempt_topology__init(to);
    to->nodes = t->nodes;
    to->n_nodes = t->n_nodes;
    to->domains = t->domains;
    to->n_domains = t->n_domains;
    to->network_bytes_per_s = t->network_bytes_per_s;
    to->domain_bytes_per_s = t->domain_bytes_per_s;
    to->device_nodes = api_scratch_array(s, t->n_devices, sizeof *to->device_nodes);
    to->device_locals = api_scratch_array(s, t->n_devices, sizeof *to->device_locals);
    to->device_domains = api_scratch_array(s, t->n_devices, sizeof *to->device_domains);
    if (s->failed)
        return;
    to->n_device_nodes = to->n_device_locals = to->n_device_domains = t->n_devices;
    for (uint32_t d = 0; d < t->n_devices; d++) {
        to->device_nodes[d] = t->devices[d].node;
        to->device_locals[d] = t->devices[d].local;
        to->device_domains[d] = t->devices[d].domain;
    }
}

static void participants_fill(Reshard__V1__AttemptParticipants *to, const struct attempt_input *i,
                              struct api_scratch *s)
{
    uint32_t n = i->n_participants;
    reshard__v1__attempt_participants__init(to);
    to->workers = api_scratch_array(s, n, sizeof *to->workers);
    to->nodes = api_scratch_array(s, n, sizeof *to->nodes);
    to->devices = api_scratch_array(s, n, sizeof *to->devices);
    to->layouts = api_scratch_array(s, n, sizeof *to->layouts);
    to->ranks = api_scratch_array(s, n, sizeof *to->ranks);
    to->held = api_scratch_array(s, n, sizeof *to->held);
    to->shadow = api_scratch_array(s, n, sizeof *to->shadow);
    if (s->failed)
        return;
    to->n_workers = to->n_nodes = to->n_devices = to->n_layouts = to->n_ranks = to->n_held =
        to->n_shadow = n;
    for (uint32_t k = 0; k < n; k++) {
        const struct participant *p = &i->participants[k];
        to->workers[k] = p->worker;
        to->nodes[k] = p->node;
        to->devices[k] = p->device;
        to->layouts[k] = p->layout;
        to->ranks[k] = p->rank;
        to->held[k] = p->held;
        to->shadow[k] = p->shadow;
    }
}

static void options_fill(Reshard__V1__AttemptOptions *to, const struct plan_options *o,
                         struct api_scratch *s)
{
    reshard__v1__attempt_options__init(to);
    to->strategy = o->strategy;
    to->relay = o->relay;
    to->staging_ingest = o->staging_ingest;
    to->least_piece_bytes = o->least_piece_bytes;
    to->chunk_bytes = o->chunk_bytes;
    to->ring_slots = o->ring_slots;
    to->rule_globs = api_scratch_array(s, o->n_rules, sizeof *to->rule_globs);
    to->rule_strategies = api_scratch_array(s, o->n_rules, sizeof *to->rule_strategies);
    if (s->failed)
        return;
    to->n_rule_globs = to->n_rule_strategies = o->n_rules;
    for (uint32_t i = 0; i < o->n_rules; i++) {
        to->rule_globs[i] = api_borrow(o->rules[i].glob);
        to->rule_strategies[i] = o->rules[i].strategy;
    }
}

static void input_fill(struct api_order *a, const struct attempt_input *i, struct api_scratch *s)
{
    Reshard__V1__AttemptInput *to = &a->input;
    reshard__v1__attempt_input__init(to);
    topology_fill(&a->topology, i->topology, s);
    participants_fill(&a->participants, i, s);
    options_fill(&a->options, &i->options, s);
    to->topology = &a->topology;
    to->participants = &a->participants;
    to->options = &a->options;
    to->nodes = (uint32_t *)(uintptr_t)i->nodes;
    to->n_nodes = i->topology->n_nodes;
    to->source.data = (uint8_t *)(uintptr_t)i->source;
    to->source.len = sizeof i->source;
    to->verify = i->verify;
    to->destinations = api_scratch_array(s, i->n_destinations, sizeof *to->destinations);
    to->n_destinations = s->failed ? 0 : i->n_destinations;
    for (size_t d = 0; d < to->n_destinations; d++) {
        to->destinations[d].data = (uint8_t *)(uintptr_t)i->destinations[d];
        to->destinations[d].len = 16;
    }
}

static void peers_fill(Reshard__V1__PrepareOrder *to, const struct node_order *o,
                       struct api_scratch *s)
{
    Reshard__V1__AttemptPeer *peers = api_scratch_array(s, o->n_peers, sizeof *peers);
    to->peers = api_scratch_array(s, o->n_peers, sizeof *to->peers);
    to->n_peers = s->failed ? 0 : o->n_peers;
    for (size_t i = 0; i < to->n_peers; i++) {
        reshard__v1__attempt_peer__init(&peers[i]);
        peers[i].node = o->peers[i].node;
        peers[i].address = api_borrow(o->peers[i].address);
        peers[i].port = o->peers[i].port;
        peers[i].token.data = (uint8_t *)(uintptr_t)o->peers[i].token;
        peers[i].token.len = sizeof o->peers[i].token;
        to->peers[i] = &peers[i];
    }
}

static void landed_fill(Reshard__V1__PrepareOrder *to, const struct node_order *o,
                        struct api_scratch *s)
{
    Reshard__V1__AttemptLanded *landed = api_scratch_array(s, o->n_landed, sizeof *landed);
    to->landed = api_scratch_array(s, o->n_landed, sizeof *to->landed);
    to->n_landed = s->failed ? 0 : o->n_landed;
    for (size_t i = 0; i < to->n_landed; i++) {
        reshard__v1__attempt_landed__init(&landed[i]);
        landed[i].node = o->landed[i].node;
        landed[i].attempt = o->landed[i].attempt;
        landed[i].holds.data = (uint8_t *)(uintptr_t)o->landed[i].holds;
        landed[i].holds.len = o->landed[i].n_bytes;
        to->landed[i] = &landed[i];
    }
}

static void prepare_fill(struct api_order *a, const struct node_order *o, uint64_t now_ns,
                         struct api_scratch *s)
{
    Reshard__V1__PrepareOrder *to = &a->prepare;
    reshard__v1__prepare_order__init(to);
    to->deadline_left_ns = api_left(o->deadline_ns, now_ns);
    to->transfer_timeout_ms = o->transfer_timeout_ms;
    input_fill(a, o->input, s);
    to->input = &a->input;
    to->plan_digest.data = (uint8_t *)(uintptr_t)o->plan_digest;
    to->plan_digest.len = sizeof o->plan_digest;
    to->input_digests = (uint64_t *)(uintptr_t)o->input_digests;
    to->n_input_digests = ATTEMPT_PARTS;
    peers_fill(to, o, s);
    landed_fill(to, o, s);
    if (o->has_comm_id) {
        to->comm_id.data = (uint8_t *)(uintptr_t)o->comm_id;
        to->comm_id.len = sizeof o->comm_id;
    }
    if (o->has_comm_id && o->shrink.n_excluded > 0) {
        to->comm_parent.data = (uint8_t *)(uintptr_t)o->shrink.parent;
        to->comm_parent.len = sizeof o->shrink.parent;
        to->comm_excluded = (uint32_t *)(uintptr_t)o->shrink.excluded;
        to->n_comm_excluded = o->shrink.n_excluded;
    }
}

int api_order_fill(struct api_order *to, const struct node_order *from, uint64_t now_ns,
                   struct api_scratch *s, struct err *e)
{
    Reshard__V1__NodeOrder *m = &to->m;
    if (from->type == NODE_ORDER_PREPARE && (from->input == NULL || from->input->topology == NULL))
        return err_set(e, RS_EINVAL, "a PREPARE without its input");
    reshard__v1__node_order__init(m);
    m->type = from->type;
    m->model = api_borrow(from->model);
    m->version = from->version;
    m->attempt = from->attempt;
    m->epoch = from->epoch;
    m->worker = from->worker;
    m->cookie = from->cookie;
    m->value = from->value;
    m->wall_ns = from->wall_ns;
    m->content = from->content;
    m->data_plane = from->data_plane;
    m->held = from->held;
    m->applied = from->applied;
    m->phase = (Reshard__V1__Phase)from->phase;
    m->tell = from->tell;
    m->code = from->code;
    m->text = api_scratch_text(s, from->text);
    if (from->type == NODE_ORDER_PREPARE) {
        prepare_fill(to, from, now_ns, s);
        m->prepare = &to->prepare;
    }
    return s->failed ? err_set(e, RS_ENOMEM, "no memory for an order") : 0;
}

/* --- decoding ------------------------------------------------------------------------------------ */

static int no_memory(struct err *e)
{
    return err_set(e, RS_ENOMEM, "no memory for an order");
}

static int devices_read(const Reshard__V1__AttemptTopology *from, struct topology *to,
                        struct err *e)
{
    for (uint32_t d = 0; d < to->n_devices; d++) {
        struct device_place p = {from->device_nodes[d], from->device_locals[d],
                                 from->device_domains[d]};
        const struct device_place *last = d > 0 ? &to->devices[d - 1] : NULL;
        if (p.node >= to->n_nodes || p.domain >= to->n_domains ||
            (last != NULL &&
             (p.node < last->node || (p.node == last->node && p.local <= last->local))))
            return err_set(e, RS_EPROTO,
                           "topology: device %u (node %u, local %u, domain %u) of %u nodes and %u "
                           "domains",
                           d, p.node, p.local, p.domain, to->n_nodes, to->n_domains);
        to->devices[d] = p;
    }
    return 0;
}

static bool rate_valid(double v)
{
    return isfinite(v) && v >= 0;
}

static int topology_read(struct frame *f, const Reshard__V1__AttemptTopology *from,
                         struct topology **ret, struct err *e)
{
    struct topology *to = api_frame_array(f, 1, sizeof *to);
    struct device_place *devices = api_frame_array(f, from->n_device_nodes, sizeof *devices);
    if (to == NULL || devices == NULL)
        return no_memory(e);
    if (from->n_nodes > NODE_MAX || from->n_device_locals != from->n_device_nodes ||
        from->n_device_domains != from->n_device_nodes)
        return err_set(e, RS_EPROTO, "topology: columns of devices differ in length");
    if (!rate_valid(from->network_bytes_per_s) || !rate_valid(from->domain_bytes_per_s))
        return err_set(e, RS_EPROTO, "topology: a rate is no number");
    *to = (struct topology){.nodes = from->nodes,
                            .n_nodes = (uint32_t)from->n_nodes,
                            .domains = from->domains,
                            .n_domains = (uint32_t)from->n_domains,
                            .devices = devices,
                            .n_devices = (uint32_t)from->n_device_nodes,
                            .network_bytes_per_s = from->network_bytes_per_s,
                            .domain_bytes_per_s = from->domain_bytes_per_s};
    *ret = to;
    return devices_read(from, to, e);
}

static int participants_read(struct frame *f, const Reshard__V1__AttemptParticipants *from,
                             struct attempt_input *to, struct err *e)
{
    size_t n = from->n_workers;
    if (from->n_nodes != n || from->n_devices != n || from->n_layouts != n || from->n_ranks != n ||
        from->n_held != n || from->n_shadow != n)
        return err_set(e, RS_EPROTO, "columns of participants differ in length");
    struct participant *p = api_frame_array(f, n, sizeof *p);
    if (p == NULL)
        return no_memory(e);
    for (size_t i = 0; i < n; i++) {
        p[i] = (struct participant){.worker = from->workers[i],
                                    .node = from->nodes[i],
                                    .device = from->devices[i],
                                    .layout = from->layouts[i],
                                    .rank = from->ranks[i],
                                    .held = from->held[i],
                                    .shadow = from->shadow[i]};
        if (p[i].node >= NODE_MAX || p[i].layout > to->n_destinations)
            return err_set(e, RS_EPROTO, "participant %zu: node %u, layout %u", i, p[i].node,
                           p[i].layout);
    }
    to->participants = p;
    to->n_participants = (uint32_t)n;
    return 0;
}

static int options_read(struct frame *f, const Reshard__V1__AttemptOptions *from,
                        struct plan_options *to, struct err *e)
{
    struct plan_rule *rules = api_frame_array(f, from->n_rule_globs, sizeof *rules);
    if (rules == NULL)
        return no_memory(e);
    if (from->n_rule_globs != from->n_rule_strategies || from->strategy > PLAN_GATHER_BROADCAST)
        return err_set(e, RS_EPROTO, "options: strategy %u, %zu globs, %zu strategies",
                       from->strategy, from->n_rule_globs, from->n_rule_strategies);
    for (size_t i = 0; i < from->n_rule_globs; i++) {
        if (from->rule_strategies[i] > PLAN_GATHER_BROADCAST)
            return err_set(e, RS_EPROTO, "options: strategy %u", from->rule_strategies[i]);
        rules[i] =
            (struct plan_rule){from->rule_globs[i], (enum plan_strategy)from->rule_strategies[i]};
    }
    *to = (struct plan_options){.strategy = (enum plan_strategy)from->strategy,
                                .rules = rules,
                                .n_rules = (uint32_t)from->n_rule_globs,
                                .relay = from->relay,
                                .staging_ingest = from->staging_ingest,
                                .least_piece_bytes = from->least_piece_bytes,
                                .chunk_bytes = from->chunk_bytes,
                                .ring_slots = from->ring_slots};
    return 0;
}

static int nodes_check(const Reshard__V1__AttemptInput *from, struct err *e)
{
    if (from->n_nodes != from->topology->n_nodes)
        return err_set(e, RS_EPROTO, "input: %zu numbers for %zu nodes", from->n_nodes,
                       from->topology->n_nodes);
    for (size_t i = 0; i < from->n_nodes; i++)
        if (from->nodes[i] >= NODE_MAX || (i > 0 && from->nodes[i] <= from->nodes[i - 1]))
            return err_set(e, RS_EPROTO, "input: node number %u", from->nodes[i]);
    return 0;
}

static int digests_read(struct frame *f, const Reshard__V1__AttemptInput *from,
                        struct attempt_input *to, struct err *e)
{
    uint8_t(*digests)[16] = api_frame_array(f, from->n_destinations, sizeof *digests);
    int r = digests == NULL ? no_memory(e) : api_digest_check("input.source", &from->source, 16, e);
    for (size_t i = 0; r == 0 && i < from->n_destinations; i++)
        if ((r = api_digest_check("input.destinations", &from->destinations[i], 16, e)) == 0)
            memcpy(digests[i], from->destinations[i].data, 16);
    if (r != 0)
        return r;
    memcpy(to->source, from->source.data, 16);
    to->destinations = (const uint8_t(*)[16])digests;
    to->n_destinations = (uint32_t)from->n_destinations;
    return 0;
}

static int input_read(struct frame *f, const Reshard__V1__AttemptInput *from, struct err *e)
{
    struct attempt_input *to = api_frame_array(f, 1, sizeof *to);
    if (to == NULL)
        return no_memory(e);
    if (from->topology == NULL || from->participants == NULL || from->options == NULL ||
        from->verify > VERIFY_MOST)
        return err_set(e, RS_EPROTO, "input: something is missing, or verify %u", from->verify);
    int r = nodes_check(from, e);
    if (r == 0)
        r = topology_read(f, from->topology, &to->topology, e);
    if (r == 0)
        r = digests_read(f, from, to, e);
    if (r == 0)
        r = participants_read(f, from->participants, to, e);
    if (r == 0)
        r = options_read(f, from->options, &to->options, e);
    to->nodes = from->nodes;
    to->verify = from->verify;
    f->order.input = to;
    return r;
}

/* `listens`: it is reached at its port; else by the communicator. */
static int peer_read(const Reshard__V1__AttemptPeer *from, bool listens, struct attempt_peer *to,
                     struct err *e)
{
    struct address a;
    int r = api_digest_check("peer.token", &from->token, sizeof to->token, e);
    if (r != 0)
        return r;
    if (from->node >= NODE_MAX || (listens && from->port == 0) || from->port > UINT16_MAX)
        return err_set(e, RS_EPROTO, "peer: node %u, port %u", from->node, from->port);
    if ((r = address_parse(from->address, false, &a, e)) != 0)
        return err_prefix(e, RS_EPROTO, "peer of node %u", from->node);
    to->node = from->node;
    to->port = (uint16_t)from->port;
    memcpy(to->address, a.host, sizeof to->address);
    memcpy(to->token, from->token.data, sizeof to->token);
    return 0;
}

static int landed_read(struct frame *f, const Reshard__V1__PrepareOrder *from, struct err *e)
{
    struct attempt_landed *landed = api_frame_array(f, from->n_landed, sizeof *landed);
    if (landed == NULL)
        return no_memory(e);
    for (size_t i = 0; i < from->n_landed; i++) {
        const Reshard__V1__AttemptLanded *x = from->landed[i];
        if (x->node >= NODE_MAX || x->holds.len == 0)
            return err_set(e, RS_EPROTO, "landed: node %u, %zu bytes", x->node, x->holds.len);
        landed[i] = (struct attempt_landed){.node = x->node,
                                            .attempt = x->attempt,
                                            .holds = x->holds.data,
                                            .n_bytes = (uint32_t)x->holds.len};
    }
    f->order.landed = landed;
    f->order.n_landed = (uint32_t)from->n_landed;
    return 0;
}

static int shrink_read(struct node_comm_shrink *to, const Reshard__V1__PrepareOrder *from,
                       struct err *e)
{
    if (from->comm_parent.len == 0 && from->n_comm_excluded == 0)
        return 0;
    if (from->comm_id.len == 0 || from->n_comm_excluded == 0 ||
        from->n_comm_excluded > NODE_MAX_EXCLUDED)
        return err_set(e, RS_EPROTO, "prepare.comm_excluded: %zu ranks", from->n_comm_excluded);
    int r = api_digest_check("prepare.comm_parent", &from->comm_parent, sizeof to->parent, e);
    if (r != 0)
        return r;
    memcpy(to->parent, from->comm_parent.data, sizeof to->parent);
    memcpy(to->excluded, from->comm_excluded, from->n_comm_excluded * sizeof to->excluded[0]);
    to->n_excluded = (uint32_t)from->n_comm_excluded;
    return 0;
}

static int prepare_read(struct frame *f, const Reshard__V1__PrepareOrder *from, uint64_t now_ns,
                        struct err *e)
{
    struct node_order *to = &f->order;
    struct attempt_peer *peers = api_frame_array(f, from->n_peers, sizeof *peers);
    if (peers == NULL)
        return no_memory(e);
    if (from->input == NULL || from->n_input_digests != ATTEMPT_PARTS)
        return err_set(e, RS_EPROTO, "prepare: no input, or %zu digests of its parts",
                       from->n_input_digests);
    int r = api_digest_check("prepare.plan_digest", &from->plan_digest, sizeof to->plan_digest, e);
    to->has_comm_id = from->comm_id.len != 0;
    for (size_t i = 0; r == 0 && i < from->n_peers; i++)
        r = peer_read(from->peers[i], !to->has_comm_id, &peers[i], e);
    if (r == 0 && to->has_comm_id)
        r = api_digest_check("prepare.comm_id", &from->comm_id, sizeof to->comm_id, e);
    if (r == 0)
        r = shrink_read(&to->shrink, from, e);
    if (r != 0)
        return r;
    to->deadline_ns = api_deadline(from->deadline_left_ns, now_ns);
    to->transfer_timeout_ms = from->transfer_timeout_ms;
    memcpy(to->plan_digest, from->plan_digest.data, sizeof to->plan_digest);
    memcpy(to->input_digests, from->input_digests, sizeof to->input_digests);
    if (to->has_comm_id)
        memcpy(to->comm_id, from->comm_id.data, sizeof to->comm_id);
    to->peers = peers;
    to->n_peers = (uint32_t)from->n_peers;
    r = landed_read(f, from, e);
    return r == 0 ? input_read(f, from->input, e) : r;
}

int api_order_read(const Reshard__V1__NodeOrder *from, uint64_t now_ns, struct frame *ret,
                   struct err *e)
{
    struct node_order *to = &ret->order;
    if (from->type < NODE_ORDER_PREPARE || from->type > NODE_ORDER_CELLS)
        return err_set(e, RS_EPROTO, "order.type: %u", from->type);
    if ((from->type == NODE_ORDER_PREPARE) != (from->prepare != NULL))
        return err_set(e, RS_EPROTO, "order of type %u %s what PREPARE needs", from->type,
                       from->prepare != NULL ? "has" : "lacks");
    if ((int)from->phase < 0 || from->phase >= (Reshard__V1__Phase)REFIT_N_PHASES ||
        from->tell > REFIT_TELL_WITHDRAWN)
        return err_set(e, RS_EPROTO, "order: phase %d, tell %u", (int)from->phase, from->tell);
    to->type = (enum node_order_type)from->type;
    to->model = from->model;
    to->version = from->version;
    to->attempt = from->attempt;
    to->epoch = from->epoch;
    to->worker = from->worker;
    to->cookie = from->cookie;
    to->value = from->value;
    to->wall_ns = from->wall_ns;
    to->content = from->content;
    to->data_plane = from->data_plane;
    to->held = from->held;
    to->applied = from->applied;
    to->phase = (enum refit_phase)from->phase;
    to->tell = (enum refit_tell)from->tell;
    to->code = from->code;
    to->text = from->text;
    return from->prepare != NULL ? prepare_read(ret, from->prepare, now_ns, e) : 0;
}
