/* reshardctl timeline: time marks of versions, what they add up to, and a Chrome trace. */
#include <errno.h>
#include <string.h>

#include <jansson.h>

#include "client/cmd_compare.h"
#include "client/cmd_online.h"
#include "client/ctl.h"
#include "client/ctl_phases.h"

#include "base/banned.h"

enum { SLOWEST_SHOWN = 8, LINE_CHARACTERS = 100 };

static const char *const usage =
    "usage: reshardctl timeline [MODEL [VERSION]] [--last N] [--compare A-B,C-D] [--chrome FILE]\n"
    "Marks of VERSION, or of the newest --last N versions (default 1), in order, and apart from "
    "each\n"
    "other: wire time, trainer stall, and each worker's pause to resume (from its own marks "
    "`pause`\n"
    "and `resume`); the phases, slowest first, and the instances and workers that were slowest in "
    "them.\n"
    "Phases from the submission to the end add up to the total: queue (until it is in the ledger, "
    "and\n"
    "behind the version in flight), retry (attempts before the newest), gather (publications,\n"
    "receivers), plan, prepare, ready (instances pause), start (to the first byte), wire, verify,\n"
    "accept, commit; apply comes after. Trainer stall is from the first source's publication of "
    "the "
    "version,\n"
    "be it before the submission, to the release of the sources.\n"
    "ATTEMPT ID numbers the attempts of the whole model, catch-ups and rehearsals too: it is no "
    "count of\n"
    "this version's.\n"
    "With two versions or more: each phase's distribution over them, firsts of an epoch apart, the "
    "refit's\n"
    "share of the cycle, and what a faster one could still save.\n"
    "  --compare A-B,C-D  distributions of two sets of versions side by side, firsts of an epoch "
    "apart\n"
    "  --chrome FILE  writes a trace for chrome://tracing or Perfetto instead (-: stdout)\n";

static double seconds(json_int_t ns)
{
    return (double)ns / 1e9;
}

static json_int_t at_ns(const json_t *mark)
{
    return json_integer_value(json_object_get(mark, "at_ns"));
}

/* "1.23 ms" with a sign: a client's mark may lie before the submission. */
static void time_cell(struct cmd_table *t, json_int_t ns)
{
    char text[32];
    cmd_table_cell(t, "%s%s", ns < 0 ? "-" : "",
                   cmd_duration_text(seconds(ns < 0 ? -ns : ns), text, sizeof text));
}

static int print_marks(const json_t *marks)
{
    if (json_array_size(marks) == 0) {
        (void)printf(
            "  no marks: the newest, up to a second of them, are lost when the daemon is killed\n");
        return 0;
    }
    struct cmd_table t;
    cmd_table_init(&t, "rrrll");
    static const char *const heads[] = {"AT", "SINCE", "ATTEMPT ID", "MARK", "WHO"};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    size_t i;
    json_t *m;
    json_int_t before = 0;
    json_array_foreach(marks, i, m)
    {
        time_cell(&t, at_ns(m));
        time_cell(&t, i == 0 ? 0 : at_ns(m) - before);
        before = at_ns(m);
        cmd_table_cell(&t, "%llu", (unsigned long long)jnum(m, "attempt"));
        cmd_table_cell(&t, "%s", jstr(m, "name"));
        cmd_table_cell(&t, "%s", jstr(m, "who")[0] != '\0' ? jstr(m, "who") : "-");
    }
    return cmd_table_print(&t, stdout, 2);
}

/* The first mark `name` of `who` after place i; NULL: none. */
static const json_t *later_mark(const json_t *marks, size_t i, const char *name, const char *who)
{
    for (i++; i < json_array_size(marks); i++) {
        const json_t *m = json_array_get(marks, i);
        if (strcmp(jstr(m, "name"), name) == 0 && strcmp(jstr(m, "who"), who) == 0)
            return m;
    }
    return NULL;
}

/* The longest pause and how many there are; `ret_who` is borrowed. */
static size_t pauses(const json_t *marks, json_int_t *ret_longest_ns, const char **ret_who)
{
    size_t i, n = 0;
    json_t *m;
    *ret_longest_ns = -1;
    *ret_who = "";
    json_array_foreach(marks, i, m)
    {
        if (strcmp(jstr(m, "name"), "pause") != 0)
            continue;
        const json_t *end = later_mark(marks, i, "resume", jstr(m, "who"));
        if (end == NULL)
            continue;
        n++;
        if (at_ns(end) - at_ns(m) > *ret_longest_ns) {
            *ret_longest_ns = at_ns(end) - at_ns(m);
            *ret_who = jstr(m, "who");
        }
    }
    return n;
}

static void print_times(const json_t *record, const json_t *marks)
{
    json_int_t longest;
    const char *who;
    size_t n = pauses(marks, &longest, &who);
    (void)printf("  total %s; wire %s; trainer stall %s; ", ctl_took(jnum(record, "total_ns")),
                 ctl_took(jnum(record, "wire_ns")), ctl_took(jnum(record, "stall_ns")));
    if (n == 0)
        (void)printf("pause to resume: no worker has marked it\n");
    else
        (void)printf("pause to resume %s at most, of %zu (%s)\n", ctl_ns((uint64_t)longest), n,
                     who);
    (void)printf("  ");
    cmd_print_bytes(json_object_get(record, "bytes"));
    (void)printf("\n");
}

/* "wire 1.20 s (61 %), verify 0.40 s (20 %), …": slowest first; the share is of the total, of which apply is no part. */
static void print_phases(const json_t *v)
{
    json_t *phases = phases_of(v), *p;
    uint64_t total = jnum(json_object_get(v, "record"), "total_ns");
    static const char head[] = "  phases, slowest first: ";
    size_t i, column = sizeof head - 1;
    json_array_foreach(phases, i, p)
    {
        uint64_t took = jnum(p, "took_ns");
        char text[96], share[16] = "";
        if (took == 0 && i > 0)
            break; /* nor did those that follow take any */
        if (total > 0 && strcmp(jstr(p, "phase"), "apply") != 0)
            (void)snprintf(share, sizeof share, " (%.0f %%)", 100.0 * (double)took / (double)total);
        int n = snprintf(text, sizeof text, "%s %s%s", jstr(p, "phase"), ctl_ns(took), share);
        bool fits = column + 3 + (size_t)n <= LINE_CHARACTERS; /* between commas */
        (void)printf("%s%s", i == 0 ? head : fits ? ", " : ",\n    ", text);
        column = (fits ? column + 2 : 4) + (size_t)n;
    }
    if (json_array_size(phases) > 0)
        (void)printf("\n");
    json_decref(phases);
}

static int print_slowest(const json_t *v)
{
    json_t *slowest = phases_slowest(v), *s;
    size_t n = json_array_size(slowest), i;
    struct cmd_table t;
    if (n == 0) {
        json_decref(slowest);
        return 0;
    }
    cmd_table_init(&t, "rll");
    static const char *const heads[] = {"TOOK", "PHASE", "SLOWEST"};
    for (i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    json_array_foreach(slowest, i, s)
    {
        if (i == SLOWEST_SHOWN)
            break;
        cmd_table_cell(&t, "%s", ctl_ns(jnum(s, "took_ns")));
        cmd_table_cell(&t, "%s", jstr(s, "phase"));
        cmd_table_cell(&t, "%s", jstr(s, "who"));
    }
    int r = cmd_table_print(&t, stdout, 2);
    if (n > SLOWEST_SHOWN)
        (void)printf("  and %zu more (--json tells all)\n", n - SLOWEST_SHOWN);
    json_decref(slowest);
    return r;
}

/* All zeros: it ended before it was planned. */
static const char *plan_text(const json_t *record)
{
    const char *digest = jstr(record, "plan_digest");
    return digest[strspn(digest, "0")] == '\0' ? "-" : digest;
}

static int print_version(const char *model, const json_t *v)
{
    const json_t *record = json_object_get(v, "record"), *marks = json_object_get(v, "marks");
    unsigned long long attempts = jnum(record, "attempts");
    (void)printf("model %s version %llu: %s, %llu attempt%s in all, strategy %s, plan %s, epoch "
                 "%llu\n",
                 model, (unsigned long long)jnum(record, "version"), jstr(record, "phase"),
                 attempts, attempts == 1 ? "" : "s", ctl_word(jstr(record, "strategy")),
                 plan_text(record), (unsigned long long)jnum(record, "epoch"));
    if (jstr(record, "reason")[0] != '\0')
        (void)printf("  %s\n", jstr(record, "reason"));
    print_times(record, marks);
    print_phases(v);
    int r = print_marks(marks);
    if (r == 0)
        r = print_slowest(v);
    (void)printf("\n");
    return r;
}

/* ---- over versions ---- */

static void over_rows(struct cmd_table *t, const char *kind, const json_t *group)
{
    static const char *const columns[] = {"least_ns", "median_ns", "p90_ns", "p99_ns", "most_ns"};
    size_t i;
    json_t *p;
    json_array_foreach(json_object_get(group, "phases"), i, p)
    {
        cmd_table_cell(t, "%s", kind);
        cmd_table_cell(t, "%s", jstr(p, "phase"));
        cmd_table_cell(t, "%llu", (unsigned long long)jnum(p, "n"));
        for (size_t k = 0; k < sizeof columns / sizeof *columns; k++)
            cmd_table_cell(t, "%s", ctl_ns(jnum(p, columns[k])));
    }
}

static int print_over(const json_t *versions)
{
    json_t *over = phases_over(versions);
    struct cmd_table t;
    static const char *const heads[] = {"", "PHASE", "N", "LEAST", "MEDIAN", "P90", "P99", "MOST"};
    (void)printf("phases of the committed versions\n");
    cmd_table_init(&t, "llrrrrrr");
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    over_rows(&t, "first of an epoch", json_object_get(over, "first_of_epoch"));
    over_rows(&t, "steady", json_object_get(over, "steady"));
    json_decref(over);
    return cmd_table_print(&t, stdout, 2);
}

/* ---- the cycle ---- */

/* Sums over steady versions (of the same epoch as the one before): from submission to submission is
 * a cycle; a refit that outlasts its cycle overlaps the next one and counts as the whole of it. */
static size_t cycles(const json_t *versions, double *ret_cycle_s, double *ret_refit_s)
{
    size_t n = 0;
    double cycle = 0, refit = 0;
    for (size_t i = 0; i + 1 < json_array_size(versions); i++) {
        const json_t *a = json_object_get(json_array_get(versions, i), "record");
        const json_t *b = json_object_get(json_array_get(versions, i + 1), "record");
        const json_t *older = jnum(a, "version") < jnum(b, "version") ? a : b;
        const json_t *newer = older == a ? b : a;
        if (jnum(a, "epoch") != jnum(b, "epoch") ||
            jnum(newer, "submitted_wall_ns") <= jnum(older, "submitted_wall_ns"))
            continue;
        double c = seconds(
            (json_int_t)(jnum(newer, "submitted_wall_ns") - jnum(older, "submitted_wall_ns")));
        double r = seconds((json_int_t)jnum(older, "total_ns"));
        cycle += c;
        refit += r < c ? r : c;
        n++;
    }
    *ret_cycle_s = cycle;
    *ret_refit_s = refit;
    return n;
}

static void print_cycle(const json_t *versions)
{
    double cycle, refit;
    size_t n = cycles(versions, &cycle, &refit);
    if (n == 0)
        return;
    char text[32], text2[32];
    double f = refit / cycle;
    (void)printf("cycle: %s on average over %zu, of which the refit %s (%.1f %%); ",
                 cmd_duration_text(cycle / (double)n, text, sizeof text), n,
                 cmd_duration_text(refit / (double)n, text2, sizeof text2), 100 * f);
    (void)printf("a refit twice as fast makes cycles %.2f times as fast", 1 / (1 - f + f / 2));
    if (f < 0.999)
        (void)printf(", one without cost %.2f times", 1 / (1 - f));
    (void)printf("\n");
}

/* ---- Chrome trace ---- */

static bool is_phase(const json_t *mark)
{
    static const char *const names[] = {"submitted", "begun",     "gathered",   "planned",
                                        "prepared",  "started",   "first_byte", "last_byte",
                                        "verified",  "committed", "aborted",    "superseded"};
    for (size_t i = 0; jstr(mark, "who")[0] == '\0' && i < sizeof names / sizeof *names; i++)
        if (strcmp(jstr(mark, "name"), names[i]) == 0)
            return true;
    return false;
}

static double trace_us(const json_t *record, const json_t *mark)
{
    return ((double)jnum(record, "submitted_wall_ns") + (double)at_ns(mark)) / 1e3;
}

/* "queue: submitted → begun"; without the phase where more than one lies between these marks. */
static void trace_span_name(const json_t *from, const json_t *to, char *ret, size_t capacity)
{
    bool submitted = strcmp(jstr(from, "name"), "submitted") == 0;
    bool accepted = strcmp(jstr(from, "name"), "verified") == 0;
    const char *phase = accepted ? NULL : phases_ended_by(jstr(to, "name"), submitted);
    (void)snprintf(ret, capacity, "%s%s%s → %s", phase != NULL ? phase : "",
                   phase != NULL ? ": " : "", jstr(from, "name"), jstr(to, "name"));
}

/* Events of one version: a span between one phase mark and the next, an instant for the rest. */
static int trace_version(json_t *events, const char *model, const json_t *v)
{
    const json_t *record = json_object_get(v, "record"), *marks = json_object_get(v, "marks");
    json_int_t version = (json_int_t)jnum(record, "version");
    size_t i;
    json_t *m;
    const json_t *phase = NULL;
    json_array_foreach(marks, i, m)
    {
        json_t *e = json_pack(
            "{sssssfsssssI}", "name", jstr(m, "name"), "ph", "i", "ts", trace_us(record, m), "s",
            "t", "tid", jstr(m, "who")[0] != '\0' ? jstr(m, "who") : "version", "pid", version);
        if (json_array_append_new(events, e) != 0)
            return RS_ENOMEM;
        if (!is_phase(m))
            continue;
        if (phase != NULL) {
            char name[160];
            trace_span_name(phase, m, name, sizeof name);
            e = json_pack("{sssssfsfsssIs{sssI}}", "name", name, "ph", "X", "ts",
                          trace_us(record, phase), "dur", (double)(at_ns(m) - at_ns(phase)) / 1e3,
                          "tid", "version", "pid", version, "args", "model", model, "attempt",
                          (json_int_t)jnum(m, "attempt"));
            if (json_array_append_new(events, e) != 0)
                return RS_ENOMEM;
        }
        phase = m;
    }
    return 0;
}

static int write_trace(const struct ctl *c, const char *path, const char *model,
                       const json_t *versions)
{
    json_t *events = json_array();
    size_t i;
    json_t *v;
    int r = events == NULL ? RS_ENOMEM : 0;
    json_array_foreach(versions, i, v) if (r == 0) r = trace_version(events, model, v);
    json_t *trace = json_pack("{soss}", "traceEvents", events, "displayTimeUnit", "ms");
    if (r != 0 || trace == NULL) {
        json_decref(trace);
        return ctl_fail(c, RS_ENOMEM, NULL);
    }
    bool standard = strcmp(path, "-") == 0;
    /* All digits: a time since 1970 in us has sixteen. */
    r = standard ? json_dumpf(trace, stdout, JSON_INDENT(1))
                 : json_dump_file(trace, path, JSON_INDENT(1));
    json_decref(trace);
    if (standard)
        return cmd_flush(c->command, r == 0 ? CMD_OK : CMD_FAILED);
    if (r == 0)
        return CMD_OK;
    struct err err = {0};
    (void)err_set(&err, RS_EINVAL, "%s: %s", path, strerror(errno));
    return ctl_fail(c, RS_EINVAL, &err);
}

static int print_all(const struct ctl *c, const char *model, const json_t *versions)
{
    size_t i;
    json_t *v;
    int r = 0;
    json_array_foreach(versions, i, v) if (r == 0) r = print_version(model, v);
    if (r == 0 && json_array_size(versions) > 1)
        r = print_over(versions);
    print_cycle(versions);
    return cmd_flush(c->command, r == 0 ? CMD_OK : CMD_FAILED);
}

static int show(struct ctl *c, const char *chrome, const char *model, json_t *reply)
{
    const json_t *versions = json_object_get(reply, "versions");
    if (chrome != NULL)
        return write_trace(c, chrome, model, versions);
    if (c->json) {
        phases_add(reply);
        return ctl_print_json(c, json_incref(reply));
    }
    return print_all(c, model, versions);
}

int cmd_timeline(int argc, char **argv)
{
    struct ctl c;
    const char *last = "1", *chrome = NULL, *compare = NULL, *model;
    struct compare_set sets[2];
    uint64_t n, version;
    const struct ctl_option own[] = {
        {"last", &last, NULL}, {"chrome", &chrome, NULL}, {"compare", &compare, NULL}};
    if (!ctl_begin(&c, "timeline", usage, own, 3, 0, 2, argc, argv))
        return c.exit;
    json_t *reply;
    if (!cmd_parse_u64(last, 1, 10000, &n)) {
        c.exit = ctl_bad(&c, "--last '%s': use a whole number, 1 … 10000", last);
    } else if (compare != NULL && (!compare_parse(compare, sets) || c.n_args > 1)) {
        c.exit =
            ctl_bad(&c, "--compare %s: use A-B,C-D, two sets of versions, and no VERSION", compare);
    } else if (compare != NULL) {
        if (ctl_model(&c, &model))
            c.exit = compare_versions(&c, model, sets);
    } else if (ctl_version(&c, 1, &version) && ctl_model(&c, &model) &&
               ctl_ask(&c, CTL_TIMELINE,
                       json_pack("{sssIsI}", "model", model, "version", (json_int_t)version, "last",
                                 (json_int_t)n),
                       &reply)) {
        c.exit = show(&c, chrome, model, reply);
        json_decref(reply);
    }
    ctl_end(&c);
    return c.exit;
}
