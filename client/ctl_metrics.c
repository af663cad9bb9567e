#include "client/ctl_metrics.h"

#include <stdbool.h>
#include <string.h>

#include <jansson.h>

#include "client/ctl_api.h"

#include "base/banned.h"

/* What a family's writer is given: the whole answer, and where its samples go. */
struct family {
    const char *name, *type, *help;
    void (*write)(const struct family *f, const json_t *status, struct buf *to);
    const char *key; /* of the field that it shows, where one writer serves many */
    const char *const
        *parts;     /* several fields, each a sample with its name as a label; ends with NULL */
    const char *of; /* write_model: where in a model the field stands; NULL: in itself */
};

/* --- samples ------------------------------------------------------------------------------------- */

static void put_label(struct buf *to, bool first, const char *name, const char *value)
{
    buf_printf(to, "%s%s=\"", first ? "{" : ",", name);
    for (const char *p = value; *p != '\0'; p++) {
        if (*p == '\\' || *p == '"')
            buf_printf(to, "\\%c", *p);
        else if (*p == '\n')
            buf_printf(to, "\\n");
        else
            buf_put(to, p, 1);
    }
    buf_printf(to, "\"");
}

/* Labels are pairs of name and value, `n` texts in all. */
static void put_name(const struct family *f, struct buf *to, const char *const *labels, size_t n)
{
    buf_printf(to, "%s", f->name);
    for (size_t i = 0; i + 1 < n; i += 2)
        put_label(to, i == 0, labels[i], labels[i + 1]);
    buf_printf(to, n > 0 ? "} " : " ");
}

static void put_count(const struct family *f, struct buf *to, const char *const *labels, size_t n,
                      uint64_t value)
{
    put_name(f, to, labels, n);
    buf_printf(to, "%llu\n", (unsigned long long)value);
}

static void put_seconds(const struct family *f, struct buf *to, const char *const *labels, size_t n,
                        uint64_t ns)
{
    put_name(f, to, labels, n);
    buf_printf(to, "%.9g\n", (double)ns / 1e9);
}

#define COUNT(labels) (sizeof(labels) / sizeof *(labels))

static bool ends_in_seconds(const char *key)
{
    size_t n = strlen(key);
    return n > 3 && strcmp(key + n - 3, "_ns") == 0;
}

static void put_field(const struct family *f, struct buf *to, const char *const *labels, size_t n,
                      const json_t *o, const char *key)
{
    if (ends_in_seconds(key))
        put_seconds(f, to, labels, n, jnum(o, key));
    else
        put_count(f, to, labels, n, jnum(o, key));
}

/* --- the daemon and its nodes -------------------------------------------------------------------- */

static void write_info(const struct family *f, const json_t *s, struct buf *to)
{
    const char *labels[] = {"node",    jstr(s, "node"),    "release",     jstr(s, "release"),
                            "backend", jstr(s, "backend"), "incarnation", jstr(s, "incarnation")};
    put_count(f, to, labels, COUNT(labels), 1);
}

static void write_own(const struct family *f, const json_t *s, struct buf *to)
{
    put_field(f, to, NULL, 0, s, f->key);
}

static void write_ready(const struct family *f, const json_t *s, struct buf *to)
{
    put_count(f, to, NULL, 0, strcmp(jstr(s, "data_plane"), "ready") == 0);
}

static void write_strangers(const struct family *f, const json_t *s, struct buf *to)
{
    for (size_t i = 0; f->parts[i] != NULL; i++) {
        const char *labels[] = {"door", f->parts[i]};
        put_count(f, to, labels, COUNT(labels), jnum(json_object_get(s, "strangers"), f->parts[i]));
    }
}

static void write_gpus(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i;
    json_t *g;
    json_array_foreach(json_object_get(s, "gpu_memory"), i, g)
    {
        for (size_t k = 0; f->parts[k] != NULL; k++) {
            char part[32];
            (void)snprintf(part, sizeof part, "%s", f->parts[k]);
            part[strlen(part) - strlen("_bytes")] = '\0';
            const char *labels[] = {"gpu", jstr(g, "name"), "part", part};
            put_count(f, to, labels, COUNT(labels), jnum(g, f->parts[k]));
        }
    }
}

/* One number of each GPU, f->key. */
static void write_gpu(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i;
    json_t *g;
    json_array_foreach(json_object_get(s, "gpu_memory"), i, g)
    {
        const char *labels[] = {"gpu", jstr(g, "name")};
        put_count(f, to, labels, COUNT(labels), jnum(g, f->key));
    }
}

static void write_node_up(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i;
    json_t *n;
    json_array_foreach(json_object_get(s, "nodes"), i, n)
    {
        const char *labels[] = {"node", jstr(n, "name")};
        put_count(f, to, labels, COUNT(labels), strcmp(jstr(n, "state"), "here") == 0);
    }
}

static void write_node(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i;
    json_t *n;
    json_array_foreach(json_object_get(s, "nodes"), i, n)
    {
        const char *labels[] = {"node", jstr(n, "name")};
        const json_t *flag = json_object_get(n, f->key);
        if (json_is_boolean(flag))
            put_count(f, to, labels, COUNT(labels), json_is_true(flag));
        else
            put_field(f, to, labels, COUNT(labels), n, f->key);
    }
}

/* --- models --------------------------------------------------------------------------------------- */

/* A field of each model, or of what it has under the family's `of`. What is in flight shows 0 where nothing is, so that a series
 * does not end between refits; what has never been is left out. */
static void write_model(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i;
    json_t *m;
    json_array_foreach(json_object_get(s, "models"), i, m)
    {
        const char *labels[] = {"model", jstr(m, "model")};
        const json_t *of = f->of != NULL ? json_object_get(m, f->of) : m;
        if (of != NULL || strcmp(f->of, "in_flight") == 0)
            put_field(f, to, labels, COUNT(labels), of, f->key);
    }
}

static void write_queued(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i;
    json_t *m;
    json_array_foreach(json_object_get(s, "models"), i, m)
    {
        const char *labels[] = {"model", jstr(m, "model")};
        put_count(f, to, labels, COUNT(labels), json_array_size(json_object_get(m, "queued")));
    }
}

static void write_phase(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i;
    json_t *m;
    json_array_foreach(json_object_get(s, "models"), i, m)
    {
        const char *now = jstr(json_object_get(m, "in_flight"), "phase");
        for (size_t k = 0; f->parts[k] != NULL; k++) {
            const char *labels[] = {"model", jstr(m, "model"), "phase", f->parts[k]};
            put_count(f, to, labels, COUNT(labels), strcmp(now, f->parts[k]) == 0);
        }
    }
}

/* Bytes of the refit in flight, or of the newest that ended. */
static void write_bytes(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i;
    json_t *m;
    json_array_foreach(json_object_get(s, "models"), i, m)
    {
        const json_t *of = json_object_get(m, f->key);
        for (size_t k = 0; f->parts[k] != NULL; k++) {
            const char *labels[] = {"model", jstr(m, "model"), "tier", f->parts[k]};
            put_count(f, to, labels, COUNT(labels),
                      jnum(json_object_get(of, "bytes"), f->parts[k]));
        }
    }
}

/* Of each model's last refit. A phase that it had not shows nothing. */
static void write_phases(const struct family *f, const json_t *s, struct buf *to)
{
    const char *model;
    json_t *phases, *p;
    size_t i;
    json_object_foreach(json_object_get(s, "last_phases"), model, phases)
    {
        json_array_foreach(phases, i, p)
        {
            const char *labels[] = {"model", model, "phase", jstr(p, "phase")};
            put_seconds(f, to, labels, COUNT(labels), jnum(p, "took_ns"));
        }
    }
}

/* How many of a model's `key` ("workers", "instances") are in each state; `parts` are the states. */
static void write_states(const struct family *f, const json_t *s, struct buf *to)
{
    size_t i, k, n;
    json_t *m, *x;
    json_array_foreach(json_object_get(s, "models"), i, m)
    {
        for (size_t p = 0; f->parts[p] != NULL; p++) {
            const char *labels[] = {"model", jstr(m, "model"), "state", f->parts[p]};
            n = 0;
            json_array_foreach(json_object_get(m, f->key), k, x) n +=
                strcmp(jstr(x, "state"), f->parts[p]) == 0 &&
                strcmp(jstr(x, "side"), "source") != 0;
            put_count(f, to, labels, COUNT(labels), n);
        }
    }
}

/* --- all of them ----------------------------------------------------------------------------------- */

static const char *const doors[] = {"connections", "peers", "data", NULL};
static const char *const gpu_parts[] = {
    "context_bytes", "communicator_bytes", "work_bytes",  "ring_bytes",  "scratch_bytes",
    "worker_bytes",  "free_bytes",         "total_bytes", "limit_bytes", NULL};
static const char *const phases[] = {"submitted", "planned",   "prepared", "transferring",
                                     "staged",    "accepting", "aborting", NULL};
static const char *const tiers[] = {"landed", "total",   "network",         "domain",
                                    "device", "skipped", "network_minimum", NULL};
static const char *const states[] = {"empty",       "current", "stale",  "torn",
                                     "uncommitted", "gone",    "asleep", NULL};

static const struct family families[] = {
    {"reshard_info", "gauge", "What the daemon is; always 1.", write_info, NULL, NULL, NULL},
    {"reshard_uptime_seconds", "gauge", "Since the daemon was started.", write_own, "uptime_ns",
     NULL, NULL},
    {"reshard_clients", "gauge", "Connections of clients.", write_own, "clients", NULL, NULL},
    {"reshard_data_plane_ready", "gauge", "1 where this node's data plane serves.", write_ready,
     NULL, NULL, NULL},
    {"reshard_data_plane_restarts_total", "counter", "Times that the data plane was replaced.",
     write_own, "data_plane_restarts", NULL, NULL},
    {"reshard_strangers_refused_total", "counter",
     "Turned away since the daemon began: door connections (failed TLS handshakes at all of its "
     "addresses "
     "together, and beyond the limit), peers (joins refused), data (data port).",
     write_strangers, NULL, doors, NULL},
    {"reshard_gpu_memory_bytes", "gauge", "Of each GPU: the daemon's parts, workers', free.",
     write_gpus, NULL, gpu_parts, NULL},
    {"reshard_gpu_memory_peak_bytes", "gauge", "Greatest sum of the daemon's parts so far.",
     write_gpu, "peak_bytes", NULL, NULL},
    {"reshard_nccl_registrations_total", "counter", "Buffers that NCCL has registered.", write_gpu,
     "registrations", NULL, NULL},
    {"reshard_nccl_registrations_refused_total", "counter", "Buffers that NCCL would not register.",
     write_gpu, "refused_registrations", NULL, NULL},
    {"reshard_nccl_registered_bytes", "gauge", "Registered with NCCL now.", write_gpu,
     "registered_bytes", NULL, NULL},
    {"reshard_nccl_registered_messages_total", "counter", "Messages in registered buffers.",
     write_gpu, "registered_messages", NULL, NULL},
    {"reshard_nccl_registered_message_bytes_total", "counter", "Their bytes.", write_gpu,
     "registered_message_bytes", NULL, NULL},
    {"reshard_node_up", "gauge", "1 where the coordinator hears the node.", write_node_up, NULL,
     NULL, NULL},
    {"reshard_node_draining", "gauge", "1 where the node is drained.", write_node, "draining", NULL,
     NULL},
    {"reshard_node_heard_age_seconds", "gauge", "Since the node's newest message.", write_node,
     "heard_age_ns", NULL, NULL},
    {"reshard_node_round_trip_seconds", "gauge", "Between coordinator and node.", write_node,
     "round_trip_ns", NULL, NULL},
    {"reshard_node_lost_total", "counter", "Times that the node or its data plane was lost.",
     write_node, "lost", NULL, NULL},
    {"reshard_node_joins_total", "counter", "Times that the node joined.", write_node, "joins",
     NULL, NULL},
    {"reshard_committed_version", "gauge", "Newest committed version; 0: none.", write_model,
     "committed", NULL, NULL},
    {"reshard_committed_age_seconds", "gauge", "Since it was committed.", write_model,
     "committed_age_ns", NULL, NULL},
    {"reshard_epoch", "counter", "The model's epoch.", write_model, "epoch", NULL, NULL},
    {"reshard_queued_versions", "gauge", "Submitted behind the one in flight.", write_queued, NULL,
     NULL, NULL},
    {"reshard_superseded_versions_total", "counter",
     "Times that a newer version replaced a queued one, since the daemon's start.", write_model,
     "superseded", NULL, NULL},
    {"reshard_aborted_versions_total", "counter",
     "Times that a version ended aborted, since the daemon's start.", write_model, "aborted", NULL,
     NULL},
    {"reshard_in_flight_version", "gauge", "The version in flight; 0: none.", write_model,
     "version", NULL, "in_flight"},
    {"reshard_in_flight_seconds", "gauge", "Since it was submitted.", write_model, "elapsed_ns",
     NULL, "in_flight"},
    {"reshard_in_flight_phase", "gauge", "1 at its phase.", write_phase, NULL, phases, NULL},
    {"reshard_in_flight_bytes", "gauge", "Its bytes so far, by tier.", write_bytes, "in_flight",
     tiers, NULL},
    {"reshard_last_version", "gauge", "The version whose attempt ended last.", write_model,
     "version", NULL, "last"},
    {"reshard_last_attempts", "gauge", "Attempts that it took.", write_model, "attempts", NULL,
     "last"},
    {"reshard_last_total_seconds", "gauge", "From its submit to its end.", write_model, "total_ns",
     NULL, "last"},
    {"reshard_last_wire_seconds", "gauge", "From its first byte to its last.", write_model,
     "wire_ns", NULL, "last"},
    {"reshard_last_stall_seconds", "gauge",
     "From the first source's publication to the release of the sources.", write_model, "stall_ns",
     NULL, "last"},
    {"reshard_last_phase_seconds", "gauge",
     "Its phases (reshardctl timeline --help); all but apply add up to its total.", write_phases,
     NULL, NULL, NULL},
    {"reshard_last_bytes", "gauge", "Its bytes, by tier.", write_bytes, "last", tiers, NULL},
    {"reshard_catch_up_instances_total", "counter", "Instances brought up to a committed version.",
     write_model, "instances", NULL, "catch_ups"},
    {"reshard_catch_up_attempts_total", "counter", "Attempts that it took.", write_model,
     "attempts", NULL, "catch_ups"},
    {"reshard_instances", "gauge", "Instances by state.", write_states, "instances", states, NULL},
    {"reshard_workers", "gauge", "Workers of destinations by state.", write_states, "workers",
     states, NULL},
};

static void put_head(const struct family *f, struct buf *to)
{
    buf_printf(to, "# HELP %s %s\n# TYPE %s %s\n", f->name, f->help, f->name, f->type);
}

void metrics_write(const json_t *status, struct buf *to)
{
    static const struct family up = {
        "reshard_up", "gauge", "1 where the daemon answers.", NULL, NULL, NULL, NULL};
    put_head(&up, to);
    put_count(&up, to, NULL, 0, status != NULL);
    for (size_t i = 0; status != NULL && i < COUNT(families); i++) {
        put_head(&families[i], to);
        families[i].write(&families[i], status, to);
    }
}
