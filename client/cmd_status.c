/* reshardctl status: everything that an operator sees, per model. */
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"
#include "client/cmd_online.h"
#include "client/ctl.h"
#include "client/ctl_waiting.h"

#include "base/banned.h"

static const char *const usage =
    "usage: reshardctl status [MODEL]\n"
    "The nodes of the cluster, newest committed version and its age, what is in flight, the "
    "states of instances and workers,\n"
    "the queue, and the last refit's bytes per tier and times.\n";

/* The whole text: timeline, --json. */
enum { REASON_CHARACTERS = 160, CELL_CHARACTERS = 48 };

static size_t n_domains(const json_t *domain_of_device)
{
    json_int_t most = -1;
    size_t i;
    json_t *d;
    json_array_foreach(domain_of_device, i, d) most =
        json_integer_value(d) > most ? json_integer_value(d) : most;
    return (size_t)(most + 1);
}

/* Nothing where nobody was. */
static void print_strangers(const json_t *x)
{
    uint64_t connections = jnum(x, "connections"), peers = jnum(x, "peers"), data = jnum(x, "data");
    if (connections + peers + data > 0)
        (void)printf("strangers refused since it began: %llu connection%s (all addresses "
                     "together), %llu as daemon%s, %llu at the data port\n",
                     (unsigned long long)connections, connections == 1 ? "" : "s",
                     (unsigned long long)peers, peers == 1 ? "" : "s", (unsigned long long)data);
}

static void print_daemon(const json_t *s)
{
    (void)printf("node %s: reshardd %s, up %s, incarnation %s, %llu client%s (with this one)\n",
                 jstr(s, "node"), jstr(s, "release"), ctl_ns(jnum(s, "uptime_ns")),
                 jstr(s, "incarnation"), (unsigned long long)jnum(s, "clients"),
                 jnum(s, "clients") == 1 ? "" : "s");
    size_t domains = n_domains(json_object_get(s, "domain_of_device"));
    (void)printf("backend %s: %llu device%s in %zu domain%s; data plane %s, replaced %llu time%s\n",
                 jstr(s, "backend"), (unsigned long long)jnum(s, "devices"),
                 jnum(s, "devices") == 1 ? "" : "s", domains, domains == 1 ? "" : "s",
                 jstr(s, "data_plane"), (unsigned long long)jnum(s, "data_plane_restarts"),
                 jnum(s, "data_plane_restarts") == 1 ? "" : "s");
    if (jstr(s, "local_pairs")[0] != '\0')
        (void)printf("messages between devices of this node: %s\n", jstr(s, "local_pairs"));
    print_strangers(json_object_get(s, "strangers"));
}

static void bytes_cell(struct cmd_table *t, const json_t *x, const char *key, const char *measured)
{
    char text[24];
    bool estimated = measured != NULL && !json_is_true(json_object_get(x, measured));
    cmd_table_cell(t, "%s%s", estimated && jnum(x, key) > 0 ? "<= " : "",
                   cmd_bytes_text(jnum(x, key), text, sizeof text));
}

/* What the daemon has of each GPU. An estimate is an upper bound. */
static int print_gpus(const json_t *s)
{
    const json_t *gpus = json_object_get(s, "gpu_memory");
    struct cmd_table t;
    size_t i;
    json_t *g;
    if (json_array_size(gpus) == 0)
        return 0;
    cmd_table_init(&t, "llrrrrrrrrr");
    static const char *const heads[] = {"DEVICE",  "GPU",     "CONTEXT", "COMMUNICATORS",
                                        "STREAMS", "STAGING", "SCRATCH", "PEAK",
                                        "LIMIT",   "WORKERS", "FREE"};
    for (i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    json_array_foreach(gpus, i, g)
    {
        cmd_table_cell(&t, "%zu", i);
        cmd_table_cell(&t, "%s", jstr(g, "name"));
        bytes_cell(&t, g, "context_bytes", "context_measured");
        bytes_cell(&t, g, "communicator_bytes", "communicator_measured");
        bytes_cell(&t, g, "work_bytes", NULL);
        bytes_cell(&t, g, "ring_bytes", NULL);
        bytes_cell(&t, g, "scratch_bytes", NULL);
        bytes_cell(&t, g, "peak_bytes", NULL);
        if (jnum(g, "limit_bytes") == 0)
            cmd_table_cell(&t, "-");
        else
            bytes_cell(&t, g, "limit_bytes", NULL);
        bytes_cell(&t, g, "worker_bytes", NULL);
        bytes_cell(&t, g, "free_bytes", NULL);
    }
    return cmd_table_print(&t, stdout, 2);
}

/* "3", or "-" for none. */
static void number_cell(struct cmd_table *t, uint64_t number)
{
    if (number == 0)
        cmd_table_cell(t, "-");
    else
        cmd_table_cell(t, "%llu", (unsigned long long)number);
}

/* The one domain of all its devices, or how many there are. */
static void domains_cell(struct cmd_table *t, const json_t *domains)
{
    const char *last = "";
    size_t i, n = 0;
    json_t *d;
    json_array_foreach(domains, i, d)
    {
        n += i == 0 ||
             strcmp(json_string_value(d), last) != 0; /* a domain's devices stand together */
        last = json_string_value(d);
    }
    if (n == 1)
        cmd_table_cell(t, "%s", last);
    else
        cmd_table_cell(t, "%zu", n);
}

static void node_row(struct cmd_table *t, const json_t *n)
{
    char cell[4 * REASON_CHARACTERS + 4];
    bool coordinator = json_is_true(json_object_get(n, "coordinator"));
    cmd_table_cell(t, "%s%s", jstr(n, "name"), coordinator ? " *" : "");
    if (json_is_true(json_object_get(n, "draining")))
        cmd_table_cell(t, "%s, drained for %s", jstr(n, "state"),
                       ctl_ns(jnum(n, "drained_age_ns")));
    else
        cmd_table_cell(t, "%s", jstr(n, "state"));
    cmd_table_cell(t, "%s", ctl_word(jstr(n, "address")));
    number_cell(t, jnum(n, "devices"));
    domains_cell(t, json_object_get(n, "domains"));
    cmd_table_cell(
        t, "%s", cmd_cut_text(ctl_word(jstr(n, "data_plane")), CELL_CHARACTERS, cell, sizeof cell));
    number_cell(t, jnum(n, "lost"));
    cmd_table_cell(t, "%s", jnum(n, "heard_age_ns") == 0 ? "-" : ctl_ns(jnum(n, "heard_age_ns")));
    number_cell(t, jnum(n, "joins"));
    number_cell(t, jnum(n, "refused"));
    const json_t *x = json_object_get(n, "strangers");
    number_cell(t, jnum(x, "connections") + jnum(x, "peers") + jnum(x, "data"));
    const char *why = jstr(n, "why")[0] != '\0' ? jstr(n, "why") : jstr(n, "lacks");
    cmd_table_cell(t, "%s", cmd_cut_text(ctl_word(why), REASON_CHARACTERS, cell, sizeof cell));
}

/* A node alone has no table of nodes that could say so. */
static void print_drained_alone(const json_t *node)
{
    if (json_is_true(json_object_get(node, "draining")))
        (void)printf("drained for %s: workers are refused until reshardctl drain --undo\n",
                     ctl_ns(jnum(node, "drained_age_ns")));
}

/* Of a cluster; `*` is the coordinator, which sees it so, whichever node was asked. */
static int print_nodes(const json_t *s)
{
    const json_t *nodes = json_object_get(s, "nodes");
    if (jstr(s, "session")[0] != '\0')
        (void)printf("%s%s; what follows is what %s\n",
                     json_array_size(nodes) > 0 ? "coordinator: " : "", jstr(s, "session"),
                     json_array_size(nodes) > 0 ? "it has" : "this node knows by itself");
    if (json_array_size(nodes) < 2) {
        print_drained_alone(json_array_get(nodes, 0));
        return 0;
    }
    struct cmd_table t;
    cmd_table_init(&t, "lllrllrrrrrl");
    static const char *const heads[] = {"NODE",    "STATE",      "ADDRESS",   "DEVICES",
                                        "DOMAINS", "DATA PLANE", "LOST",      "HEARD",
                                        "JOINS",   "REFUSED",    "STRANGERS", "WHY"};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    size_t i;
    json_t *n;
    json_array_foreach(nodes, i, n) node_row(&t, n);
    return cmd_table_print(&t, stdout, 2);
}

static void print_committed(const json_t *m)
{
    if (jnum(m, "committed") == 0)
        (void)printf("  committed    none yet\n");
    else
        (void)printf("  committed    version %llu, %s ago\n",
                     (unsigned long long)jnum(m, "committed"), ctl_ns(jnum(m, "committed_age_ns")));
    if (jnum(m, "known_committed") != 0)
        (void)printf("  ledger       is behind: a node knows version %llu as committed; was an old "
                     "file restored?\n",
                     (unsigned long long)jnum(m, "known_committed"));
    if (jnum(m, "worker_committed") != 0)
        (void)printf(
            "  ledger       is behind, by a worker's word: %s came with version %llu, which "
            "is not known as committed here; was an\n"
            "               old file restored? No word of a worker counts: numbers up to %llu "
            "may come again\n",
            jstr(m, "worker_committed_by"), (unsigned long long)jnum(m, "worker_committed"),
            (unsigned long long)jnum(m, "worker_committed"));
    if (jstr(m, "newcomers")[0] != '\0')
        (void)printf("  newcomers    %s\n", jstr(m, "newcomers"));
}

/* What commits nothing. */
static void print_sides(const json_t *m)
{
    const json_t *c = json_object_get(m, "catch_ups"), *r = json_object_get(m, "rehearsed");
    char reason[4 * REASON_CHARACTERS + 4];
    if (jnum(c, "instances") > 0 || jnum(json_object_get(c, "bytes"), "landed") > 0) {
        (void)printf("  caught up    %llu instance%s in %llu attempt%s; ",
                     (unsigned long long)jnum(c, "instances"), jnum(c, "instances") == 1 ? "" : "s",
                     (unsigned long long)jnum(c, "attempts"), jnum(c, "attempts") == 1 ? "" : "s");
        cmd_print_bytes(json_object_get(c, "bytes"));
        (void)printf("\n");
    }
    if (r == NULL)
        return;
    (void)printf("  rehearsal    as version %llu: %s, %s; ", (unsigned long long)jnum(r, "version"),
                 jstr(r, "phase"),
                 cmd_cut_text(jstr(r, "reason"), REASON_CHARACTERS, reason, sizeof reason));
    cmd_print_bytes(json_object_get(r, "bytes"));
    (void)printf("\n");
}

static void print_waiting(const json_t *state)
{
    struct buf text;
    buf_init(&text);
    waiting_put(&text, json_object_get(state, "waiting_for"));
    if (buf_error(&text) != 0)
        (void)printf("; waiting (out of memory: for whom is not said)");
    else
        (void)printf("%.*s", (int)text.n_bytes, text.n_bytes > 0 ? (const char *)text.data : "");
    buf_close(&text);
}

static void print_in_flight(const json_t *m)
{
    const json_t *f = json_object_get(m, "in_flight");
    if (f == NULL) {
        (void)printf("  in flight    none\n");
        return;
    }
    const json_t *b = json_object_get(f, "bytes");
    (void)printf("  in flight    version %llu attempt %llu: %s for %s",
                 (unsigned long long)jnum(f, "version"), (unsigned long long)jnum(f, "attempt"),
                 jstr(f, "phase"), ctl_ns(jnum(f, "elapsed_ns")));
    if (jnum(b, "total") > 0)
        (void)printf(", %.1f %%, %s of %s",
                     100.0 * (double)jnum(b, "landed") / (double)jnum(b, "total"),
                     ctl_bytes(jnum(b, "landed")), ctl_bytes(jnum(b, "total")));
    if (jstr(f, "reason")[0] != '\0')
        (void)printf(", %s", jstr(f, "reason"));
    print_waiting(f);
    (void)printf("\n");
}

static void print_queue(const json_t *m)
{
    const json_t *queued = json_object_get(m, "queued");
    size_t i;
    json_t *v;
    (void)printf("  queue        ");
    json_array_foreach(queued, i, v)(void)
        printf("%s%lld", i == 0 ? "version " : ", ", (long long)json_integer_value(v));
    (void)printf("%s; %llu superseded, %llu aborted since the daemon's start\n",
                 json_array_size(queued) == 0 ? "empty" : "",
                 (unsigned long long)jnum(m, "superseded"), (unsigned long long)jnum(m, "aborted"));
}

void cmd_print_bytes(const json_t *b)
{
    uint64_t network = jnum(b, "network"), least = jnum(b, "network_minimum");
    (void)printf("landed %s: network %s", ctl_bytes(jnum(b, "landed")), ctl_bytes(network));
    if (least > 0)
        (void)printf(" (%.3f of the minimum)", (double)network / (double)least);
    (void)printf(", domain %s, device %s, skipped %s", ctl_bytes(jnum(b, "domain")),
                 ctl_bytes(jnum(b, "device")), ctl_bytes(jnum(b, "skipped")));
}

static void print_last(const json_t *m)
{
    const json_t *r = json_object_get(m, "last");
    if (r == NULL)
        return;
    char reason[4 * REASON_CHARACTERS + 4];
    (void)printf("  last refit   version %llu %s", (unsigned long long)jnum(r, "version"),
                 jstr(r, "phase"));
    if (jstr(r, "reason")[0] != '\0')
        (void)printf(": %s",
                     cmd_cut_text(jstr(r, "reason"), REASON_CHARACTERS, reason, sizeof reason));
    (void)printf("; total %s, wire %s, trainer stall %s, strategy %s\n",
                 ctl_took(jnum(r, "total_ns")), ctl_took(jnum(r, "wire_ns")),
                 ctl_took(jnum(r, "stall_ns")), ctl_word(jstr(r, "strategy")));
    (void)printf("               ");
    cmd_print_bytes(json_object_get(r, "bytes"));
    (void)printf("\n");
}

static void print_layouts(const json_t *m)
{
    size_t i;
    json_t *d;
    (void)printf("  layouts      %s →",
                 jstr(m, "source_layout")[0] != '\0' ? jstr(m, "source_layout") : "(no source)");
    json_array_foreach(json_object_get(m, "destination_layouts"), i, d)(void)
        printf("%s %s", i == 0 ? "" : ",", json_string_value(d));
    (void)printf("%s; epoch %llu\n", i == 0 ? " (no destination)" : "",
                 (unsigned long long)jnum(m, "epoch"));
}

static void ranks_text(const json_t *ranks, char *to, size_t capacity)
{
    size_t i, at = 0;
    json_t *r;
    to[0] = '\0';
    json_array_foreach(ranks, i, r)
    {
        int n = snprintf(to + at, capacity - at, "%s%lld", i == 0 ? "" : ",",
                         (long long)json_integer_value(r));
        if (n < 0 || (size_t)n >= capacity - at) {
            memcpy(to + capacity - 4, "...", 4);
            return;
        }
        at += (size_t)n;
    }
}

static int print_instances(const json_t *m)
{
    const json_t *instances = json_object_get(m, "instances");
    if (json_array_size(instances) == 0)
        return 0;
    struct cmd_table t;
    cmd_table_init(&t, "lrllrl");
    static const char *const heads[] = {"LAYOUT", "INSTANCE", "RANKS",
                                        "STATE",  "APPLIED",  "VERDICT"};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    size_t i;
    json_t *x;
    json_array_foreach(instances, i, x)
    {
        char ranks[48], cell[4 * CELL_CHARACTERS + 4];
        ranks_text(json_object_get(x, "ranks"), ranks, sizeof ranks);
        cmd_table_cell(&t, "%s", jstr(x, "layout_name"));
        cmd_table_cell(&t, "%llu", (unsigned long long)jnum(x, "instance"));
        cmd_table_cell(&t, "%s", ranks);
        cmd_table_cell(&t, "%s", jstr(x, "state"));
        number_cell(&t, jnum(x, "applied"));
        cmd_table_cell(
            &t, "%s",
            cmd_cut_text(ctl_word(jstr(x, "verdict")), CELL_CHARACTERS, cell, sizeof cell));
    }
    return cmd_table_print(&t, stdout, 2);
}

/* `with_node`: there are several, and the device is one of its node. */
static void worker_row(struct cmd_table *t, const json_t *w, bool with_node)
{
    bool source = strcmp(jstr(w, "side"), "source") == 0;
    char cell[4 * CELL_CHARACTERS + 4];
    cmd_table_cell(t, "%s", jstr(w, "worker"));
    cmd_table_cell(t, "%s", jstr(w, "side"));
    cmd_table_cell(t, "%s", jstr(w, "layout_name"));
    cmd_table_cell(t, "%llu", (unsigned long long)jnum(w, "rank"));
    if (jnum(w, "pid") == 0) /* nobody is there to have one */
        cmd_table_cell(t, "-");
    else
        cmd_table_cell(t, "%s%s%llu", with_node ? jstr(w, "node") : "", with_node ? ":" : "",
                       (unsigned long long)jnum(w, "device"));
    number_cell(t, jnum(w, "pid"));
    cmd_table_cell(t, "%s", source ? "-" : jstr(w, "receive"));
    cmd_table_cell(t, "%s",
                   source && strcmp(jstr(w, "state"), "gone") != 0 &&
                           strcmp(jstr(w, "state"), "asleep") != 0
                       ? "-"
                       : jstr(w, "state"));
    number_cell(t, jnum(w, "published"));
    number_cell(t, jnum(w, "held"));
    number_cell(t, jnum(w, "applied"));
    cmd_table_cell(t, "%s",
                   jnum(w, "segment_bytes") == 0 ? "-" : ctl_bytes(jnum(w, "segment_bytes")));
    cmd_table_cell(t, "%s",
                   cmd_cut_text(ctl_word(jstr(w, "doing")), CELL_CHARACTERS, cell, sizeof cell));
}

/* Sources first, then by layout and rank; the daemon keeps no order. */
static int by_place(const void *a, const void *b)
{
    const json_t *x = *(const json_t *const *)a, *y = *(const json_t *const *)b;
    int r = strcmp(jstr(y, "side"), jstr(x, "side")); /* "source" is above "destination" */
    if (r == 0)
        r = strcmp(jstr(x, "layout_name"), jstr(y, "layout_name"));
    if (r != 0)
        return r;
    return jnum(x, "rank") < jnum(y, "rank") ? -1 : jnum(x, "rank") > jnum(y, "rank");
}

static int worker_rows(struct cmd_table *t, const json_t *workers, bool with_node)
{
    size_t n = json_array_size(workers);
    const json_t **sorted = mem_calloc(n, sizeof(const json_t *));
    if (sorted == NULL)
        return RS_ENOMEM;
    for (size_t i = 0; i < n; i++)
        sorted[i] = json_array_get(workers, i);
    qsort(sorted, n, sizeof *sorted, by_place);
    for (size_t i = 0; i < n; i++)
        worker_row(t, sorted[i], with_node);
    mem_free(sorted);
    return 0;
}

static int print_workers(const json_t *m, bool with_node)
{
    const json_t *workers = json_object_get(m, "workers");
    if (json_array_size(workers) == 0)
        return 0;
    struct cmd_table t;
    cmd_table_init(&t, "lllrrrllrrrrl");
    static const char *const heads[] = {"WORKER",  "SIDE",    "LAYOUT", "RANK",      "DEVICE",
                                        "PID",     "RECEIVE", "STATE",  "PUBLISHED", "HELD",
                                        "APPLIED", "MEMORY",  "DOING"};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    int r = worker_rows(&t, workers, with_node);
    int printed = cmd_table_print(&t, stdout, 2);
    return r != 0 ? r : printed;
}

/* `whole`: by the coordinator; a node by itself knows what is committed and nothing else. */
static int print_model(const json_t *m, bool whole, bool with_node)
{
    (void)printf("\nmodel %s\n", jstr(m, "model"));
    print_committed(m);
    if (!whole)
        return 0;
    print_in_flight(m);
    print_queue(m);
    print_layouts(m);
    print_last(m);
    print_sides(m);
    int r = print_instances(m);
    return r != 0 ? r : print_workers(m, with_node);
}

static int print_status(const struct ctl *c, const json_t *s)
{
    size_t i;
    json_t *m;
    size_t n_nodes = json_array_size(json_object_get(s, "nodes"));
    bool with_node = n_nodes > 1;
    print_daemon(s);
    int r = print_gpus(s);
    if (r == 0)
        r = print_nodes(s);
    json_array_foreach(json_object_get(s, "models"), i, m) if (r == 0) r =
        print_model(m, n_nodes > 0, with_node);
    if (i == 0)
        (void)printf("\nno model yet\n");
    return cmd_flush(c->command, r == 0 ? CMD_OK : CMD_FAILED);
}

int cmd_status(int argc, char **argv)
{
    struct ctl c;
    json_t *status;
    if (!ctl_begin(&c, "status", usage, NULL, 0, 0, 1, argc, argv))
        return c.exit;
    json_t *request = c.n_args > 0 ? json_pack("{ss}", "model", c.args[0]) : json_object();
    if (ctl_ask(&c, CTL_STATUS, request, &status)) {
        if (c.json)
            json_incref(status);
        c.exit = c.json ? ctl_print_json(&c, status) : print_status(&c, status);
        json_decref(status);
    }
    ctl_end(&c);
    return c.exit;
}
