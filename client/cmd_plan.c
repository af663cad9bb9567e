/* reshardctl plan: what would move where, without a daemon. */
#include "client/cmd_plan.h"

#include <fnmatch.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/size.h"

#include "base/banned.h"

enum { MAX_TOPOLOGY_BYTES = 1 << 26, MAX_DESTINATIONS = 64, MAX_RULES = 256 };

static const char usage[] =
    "usage: reshardctl plan --source S.json --destination D.json [--destination D2.json …]\n"
    "                       --topology T.json [options]\n"
    "\n"
    "  --strategy reshard|direct|gather-broadcast   default reshard\n"
    "  --rule GLOB=STRATEGY   strategy of the tensors whose names match; the first match counts\n"
    "  --no-relay             only source holders send\n"
    "  --no-staging-ingest    only devices that need a cell take it in\n"
    "  --least-piece-bytes N  cells are not split below this (default 256KiB)\n"
    "  --chunk-bytes N        greatest message (default 8MiB)\n"
    "  --ring-slots N         staging slots per device (default 8)\n"
    "  --explain TENSOR [RANK]  in words, where that tensor (of that rank) comes from, and why\n"
    "  --simulate             runs the plan on a model of the links: time line, busiest devices\n"
    "  --chunk-latency-us X   of --simulate: what each message costs beside its bytes (default 0)\n"
    "  --peers N              of --simulate: messages a device sends, or receives, at a time\n"
    "                         (default 1)\n"
    "  --json                 the plan (or what --explain tells) as JSON; --summary: totals "
    "alone\n";

struct options {
    const char *source, *topology, *explain;
    const char *destinations[MAX_DESTINATIONS];
    uint32_t n_destinations;
    int64_t rank; /* of --explain; -1: all */
    bool json, summary, help, simulate, model_set;
    double chunk_latency_us;
    uint32_t peers;
    struct plan_options plan;
    struct plan_rule rules[MAX_RULES];
    char *globs[MAX_RULES]; /* owned */
};

/* --- arguments ----------------------------------------------------------- */

static int add_rule(struct options *o, const char *text)
{
    const char *equals = strrchr(text, '=');
    enum plan_strategy strategy;
    if (equals == NULL || equals == text || plan_strategy_parse(equals + 1, &strategy) != 0)
        return cmd_usage("plan", o->json,
                         "--rule must be GLOB=STRATEGY with reshard, direct or gather-broadcast, "
                         "not '%s'",
                         text);
    if (o->plan.n_rules == MAX_RULES)
        return cmd_usage("plan", o->json, "more than %d rules", MAX_RULES);
    char *glob = mem_strndup(text, (size_t)(equals - text));
    if (glob == NULL)
        return cmd_fail("plan", o->json, RS_ENOMEM, NULL);
    o->globs[o->plan.n_rules] = glob;
    o->rules[o->plan.n_rules++] = (struct plan_rule){glob, strategy};
    return CMD_OK;
}

static int set_number(const struct options *o, const char *option, uint64_t least,
                      uint64_t greatest, uint64_t *ret)
{
    if (cmd_parse_u64(optarg, least, greatest, ret))
        return CMD_OK;
    return cmd_usage("plan", o->json, "--%s '%s': use a whole number, %" PRIu64 " … %" PRIu64,
                     option, optarg, least, greatest);
}

static int set_bytes(const struct options *o, const char *option, uint64_t least, uint64_t greatest,
                     uint64_t *ret)
{
    uint64_t bytes;
    if (size_parse(optarg, &bytes) != 0 || bytes < least || bytes > greatest)
        return cmd_usage("plan", o->json,
                         "--%s '%s': use bytes, or KiB, MiB, GiB, TiB, %" PRIu64 " … %" PRIu64,
                         option, optarg, least, greatest);
    *ret = bytes;
    return CMD_OK;
}

enum long_option {
    OPT_SOURCE = 1,
    OPT_DESTINATION,
    OPT_TOPOLOGY,
    OPT_STRATEGY,
    OPT_RULE,
    OPT_NO_RELAY,
    OPT_NO_STAGING,
    OPT_LEAST_PIECE,
    OPT_CHUNK,
    OPT_RING,
    OPT_EXPLAIN,
    OPT_SIMULATE,
    OPT_LATENCY,
    OPT_PEERS,
    OPT_JSON,
    OPT_SUMMARY,
    OPT_HELP
};

static const struct option known[] = {
    {"source", required_argument, NULL, OPT_SOURCE},
    {"destination", required_argument, NULL, OPT_DESTINATION},
    {"topology", required_argument, NULL, OPT_TOPOLOGY},
    {"strategy", required_argument, NULL, OPT_STRATEGY},
    {"rule", required_argument, NULL, OPT_RULE},
    {"no-relay", no_argument, NULL, OPT_NO_RELAY},
    {"no-staging-ingest", no_argument, NULL, OPT_NO_STAGING},
    {"least-piece-bytes", required_argument, NULL, OPT_LEAST_PIECE},
    {"chunk-bytes", required_argument, NULL, OPT_CHUNK},
    {"ring-slots", required_argument, NULL, OPT_RING},
    {"explain", required_argument, NULL, OPT_EXPLAIN},
    {"simulate", no_argument, NULL, OPT_SIMULATE},
    {"chunk-latency-us", required_argument, NULL, OPT_LATENCY},
    {"peers", required_argument, NULL, OPT_PEERS},
    {"json", no_argument, NULL, OPT_JSON},
    {"summary", no_argument, NULL, OPT_SUMMARY},
    {"help", no_argument, NULL, OPT_HELP},
    {0}};

static int add_destination(struct options *o)
{
    if (o->n_destinations == MAX_DESTINATIONS)
        return cmd_usage("plan", o->json, "more than %d destinations", MAX_DESTINATIONS);
    o->destinations[o->n_destinations++] = optarg;
    return CMD_OK;
}

static int set_ring(struct options *o)
{
    uint64_t slots;
    int code = set_number(o, "ring-slots", 1, 1 << 16, &slots);
    if (code == CMD_OK)
        o->plan.ring_slots = (uint32_t)slots;
    return code;
}

static int set_peers(struct options *o)
{
    uint64_t peers;
    int code = set_number(o, "peers", 1, MODEL_MOST_PEERS, &peers);
    if (code == CMD_OK)
        o->peers = (uint32_t)peers;
    o->model_set = true;
    return code;
}

static int set_latency(struct options *o)
{
    char *end;
    double us = strtod(optarg, &end);
    if (end == optarg || *end != '\0' || !(us >= 0 && us <= 1e6))
        return cmd_usage("plan", o->json, "--chunk-latency-us '%s': use a number, 0 … 1000000",
                         optarg);
    o->chunk_latency_us = us;
    o->model_set = true;
    return CMD_OK;
}

static int set_strategy(struct options *o)
{
    if (plan_strategy_parse(optarg, &o->plan.strategy) == 0)
        return CMD_OK;
    return cmd_usage("plan", o->json,
                     "--strategy must be reshard, direct or gather-broadcast, not "
                     "'%s'",
                     optarg);
}

/* One option; CMD_OK, or the exit code. */
static int take_option(struct options *o, int c, char **argv)
{
    switch ((enum long_option)c) {
    case OPT_SOURCE:
        o->source = optarg;
        return CMD_OK;
    case OPT_DESTINATION:
        return add_destination(o);
    case OPT_TOPOLOGY:
        o->topology = optarg;
        return CMD_OK;
    case OPT_STRATEGY:
        return set_strategy(o);
    case OPT_RULE:
        return add_rule(o, optarg);
    case OPT_NO_RELAY:
        o->plan.relay = false;
        return CMD_OK;
    case OPT_NO_STAGING:
        o->plan.staging_ingest = false;
        return CMD_OK;
    case OPT_LEAST_PIECE:
        return set_bytes(o, "least-piece-bytes", 1, UINT64_C(1) << 40, &o->plan.least_piece_bytes);
    case OPT_CHUNK:
        return set_bytes(o, "chunk-bytes", 16, UINT64_C(1) << 32, &o->plan.chunk_bytes);
    case OPT_RING:
        return set_ring(o);
    case OPT_EXPLAIN:
        o->explain = optarg;
        return CMD_OK;
    case OPT_SIMULATE:
        o->simulate = true;
        return CMD_OK;
    case OPT_LATENCY:
        return set_latency(o);
    case OPT_PEERS:
        return set_peers(o);
    case OPT_JSON:
        o->json = true;
        return CMD_OK;
    case OPT_SUMMARY:
        o->summary = true;
        return CMD_OK;
    case OPT_HELP:
        o->help = true;
        return CMD_OK;
    }
    return cmd_bad_option("plan", o->json, c, argv);
}

static int bad_rank(const struct options *o, const char *text)
{
    return cmd_usage("plan", o->json, "the RANK to explain '%s': use a rank id, 0 … %d", text,
                     LAYOUT_MAX_RANKS - 1);
}

static int parse_options(int argc, char **argv, struct options *o)
{
    uint64_t rank;
    int code = CMD_OK, left;
    opterr = 0;
    optind = 0;
    for (int c;
         code == CMD_OK && !o->help && (c = getopt_long(argc, argv, ":", known, NULL)) != -1;)
        code = c == '?' && optopt >= '0' && optopt <= '9' && o->explain != NULL
                   ? bad_rank(o, argv[optind - 1])
                   : take_option(o, c, argv);
    left = argc - optind;
    if (code != CMD_OK || o->help)
        return code;
    if (left > (o->explain != NULL ? 1 : 0))
        return cmd_usage("plan", o->json, "unexpected argument '%s'", argv[optind]);
    if (left == 1 && !cmd_parse_u64(argv[optind], 0, LAYOUT_MAX_RANKS - 1, &rank))
        return bad_rank(o, argv[optind]);
    if (left == 1)
        o->rank = (int64_t)rank;
    if (o->source == NULL || o->n_destinations == 0 || o->topology == NULL)
        return cmd_usage("plan", o->json, "--source, --destination and --topology are needed");
    if (o->explain != NULL && o->simulate)
        return cmd_usage("plan", o->json, "--explain has no --simulate");
    if (o->model_set && !o->simulate)
        return cmd_usage("plan", o->json, "--chunk-latency-us and --peers are for --simulate");
    if (o->explain != NULL && o->summary)
        return cmd_usage("plan", o->json, "--explain has no --summary");
    o->plan.rules = o->rules;
    return CMD_OK;
}

/* --- input --------------------------------------------------------------- */

static int read_topology(const char *path, struct topology_file **ret, struct err *e)
{
    char *text;
    size_t n;
    int r = cmd_read_file(path, MAX_TOPOLOGY_BYTES, &text, &n, e);
    if (r != 0)
        return r;
    r = topology_from_json(text, n, ret, e);
    mem_free(text);
    return r == 0 ? 0 : err_prefix(e, r, "%s", path);
}

/* The device of each of a layout's ranks: the list's, and none for ids beyond its end. */
static int place_ranks(const struct placement_map *m, const struct layout *l, const char *side,
                       int32_t **ret, struct err *e)
{
    for (uint32_t r = l->n_ranks; r < m->n_ranks; r++)
        if (m->device[r] != TOPOLOGY_NONE)
            return err_set(e, RS_EINVAL,
                           "the topology places %s rank %" PRIu32
                           ", but layout '%s' has ranks 0 to "
                           "%" PRIu32,
                           side, r, l->name, l->n_ranks - 1);
    *ret = mem_calloc(l->n_ranks, sizeof **ret);
    if (*ret == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    for (uint32_t r = 0; r < l->n_ranks; r++)
        (*ret)[r] = r < m->n_ranks ? m->device[r] : TOPOLOGY_NONE;
    return 0;
}

/* The list of a destination layout: by its name, or the only plain one. */
static const struct placement_map *find_map(const struct topology_file *f, const struct layout *l,
                                            uint32_t n_destinations)
{
    if (f->n_destinations == 1 && f->destination_names[0] == NULL)
        return n_destinations == 1 ? &f->destinations[0] : NULL;
    for (uint32_t i = 0; i < f->n_destinations; i++)
        if (strcmp(f->destination_names[i], l->name) == 0)
            return &f->destinations[i];
    return NULL;
}

static int place_destination(struct plan_run *run, uint32_t i, struct err *e)
{
    const struct layout *l = run->destinations[i];
    for (uint32_t k = 0; k < i; k++)
        if (strcmp(run->destinations[k]->name, l->name) == 0)
            return err_set(e, RS_EINVAL, "two destination layouts are named '%s'", l->name);
    const struct placement_map *m = find_map(run->file, l, run->n_destinations);
    if (m == NULL)
        return err_set(e, RS_EINVAL,
                       "the topology has no destination list for layout '%s'; with several layouts "
                       "'destination' is an object from layout name to list",
                       l->name);
    return place_ranks(m, l, "destination", &run->destination_device[i], e);
}

static int read_inputs(const struct options *o, struct plan_run *run, struct err *e)
{
    int r = cmd_read_layout(o->source, &run->source, e);
    run->destinations = mem_calloc(o->n_destinations, sizeof(struct layout *));
    run->destination_device = mem_calloc(o->n_destinations, sizeof(int32_t *));
    if (r == 0 && (run->destinations == NULL || run->destination_device == NULL))
        r = err_set(e, RS_ENOMEM, "out of memory");
    if (r != 0)
        return r;
    run->n_destinations = o->n_destinations;
    for (uint32_t i = 0; r == 0 && i < o->n_destinations; i++)
        r = cmd_read_layout(o->destinations[i], &run->destinations[i], e);
    if (r == 0)
        r = read_topology(o->topology, &run->file, e);
    if (r == 0)
        r = place_ranks(&run->file->source, run->source, "source", &run->source_device, e);
    for (uint32_t i = 0; r == 0 && i < o->n_destinations; i++)
        r = place_destination(run, i, e);
    return r;
}

static void run_close(struct plan_run *run)
{
    plan_simulation_close(&run->simulation);
    plan_free(run->plan);
    for (uint32_t i = 0; i < run->n_destinations; i++) {
        layout_free(run->destinations[i]);
        mem_free(run->destination_device[i]);
    }
    mem_free(run->destinations);
    mem_free(run->destination_device);
    mem_free(run->source_device);
    topology_file_free(run->file);
    layout_free(run->source);
}

static int make_plan(const struct options *o, struct plan_run *run, struct err *e)
{
    const struct plan_input input = {
        .source = run->source,
        .source_device = run->source_device,
        .n_destinations = run->n_destinations,
        .destinations = (const struct layout *const *)run->destinations,
        .destination_device = (const int32_t *const *)run->destination_device,
        .topology = &run->file->topology,
        .options = o->plan,
    };
    cmd_plan_stage_begin(&run->planning);
    int r = plan_make(&input, &run->plan, e);
    cmd_plan_stage_end(&run->planning);
    run->simulated = o->simulate;
    if (r == 0 && o->simulate) {
        struct plan_model m = plan_model_of(&run->file->topology);
        m.chunk_latency_s = o->chunk_latency_us / 1e6;
        m.peers = o->peers;
        r = cmd_plan_run_simulation(run, &m, e);
    } else if (r == 0)
        run->predicted_s = plan_predict_s(run->plan, &run->file->topology);
    return r;
}

/* Likely a slip of the pen: the plan is made all the same, but not without a word. */
static void warn_of_idle_rules(const struct options *o, const struct layout *l)
{
    for (uint32_t i = 0; i < o->plan.n_rules; i++) {
        uint32_t t = 0;
        while (t < l->n_tensors && fnmatch(o->globs[i], l->tensors[t].name, 0) != 0)
            t++;
        if (t == l->n_tensors)
            (void)fprintf(stderr, "reshardctl plan: warning: --rule '%s=%s' matches no tensor\n",
                          o->globs[i], plan_strategy_name(o->rules[i].strategy));
    }
}

static int plan_and_print(const struct options *o, struct plan_run *run, struct err *e)
{
    int r = read_inputs(o, run, e);
    if (r == 0)
        warn_of_idle_rules(o, run->source);
    if (r == 0)
        r = make_plan(o, run, e);
    if (r != 0)
        return r;
    if (o->explain != NULL)
        return cmd_plan_explain(run, o->explain, o->rank, o->json, e);
    return o->json ? cmd_plan_json(run, o->summary || o->simulate, e)
                   : cmd_plan_text(run, o->summary, e);
}

int cmd_plan(int argc, char **argv)
{
    struct options o = {
        .rank = -1, .json = cmd_wants_json(argc, argv), .peers = 1, .plan = plan_options_default()};
    struct plan_run run = {0};
    struct err e = {0};
    int code = parse_options(argc, argv, &o);
    if (o.help) {
        (void)fputs(usage, stdout);
        code = cmd_flush("plan", CMD_OK);
    } else if (code == CMD_OK) {
        int r = plan_and_print(&o, &run, &e);
        code = r == 0 ? cmd_flush("plan", CMD_OK) : cmd_fail("plan", o.json, r, &e);
    }
    run_close(&run);
    for (uint32_t i = 0; i < o.plan.n_rules; i++)
        mem_free(o.globs[i]);
    return code;
}
