#include "client/cmd_compare.h"

#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "client/ctl_compare.h"

#include "base/banned.h"

enum { ASK_MOST = 100000 };

static const char *const times[] = {"total_ns", "wire_ns", "stall_ns"};
enum { N_TIMES = sizeof times / sizeof *times };

static bool parse_set(const char *text, size_t n, struct compare_set *ret)
{
    char part[48];
    if (n == 0 || n >= sizeof part)
        return false;
    memcpy(part, text, n);
    part[n] = '\0';
    char *dash = strchr(part, '-');
    if (dash != NULL)
        *dash++ = '\0';
    return cmd_parse_u64(part, 1, INT64_MAX, &ret->from) &&
           cmd_parse_u64(dash != NULL ? dash : part, ret->from, INT64_MAX, &ret->to);
}

bool compare_parse(const char *text, struct compare_set ret_sets[2])
{
    const char *comma = strchr(text, ',');
    return comma != NULL && parse_set(text, (size_t)(comma - text), &ret_sets[0]) &&
           parse_set(comma + 1, strlen(comma + 1), &ret_sets[1]);
}

/* ---- printing ---- */

static void row(struct cmd_table *t, const char *kind, const json_t *g, const char *key)
{
    static const char *const columns[] = {"least", "median", "p90", "most"};
    const json_t *d = json_object_get(g, key);
    cmd_table_cell(t, "%s", kind);
    cmd_table_cell(t, "%.*s", (int)(strlen(key) - 3), key); /* without "_ns" */
    cmd_table_cell(t, "%llu", (unsigned long long)jnum(g, "n"));
    for (size_t i = 0; i < 4; i++)
        cmd_table_cell(t, "%s", ctl_ns(jnum(d, columns[i])));
}

static void print_texts(const char *what, const json_t *texts)
{
    size_t i;
    json_t *s;
    (void)printf("%s", what);
    json_array_foreach(texts, i, s)(void) printf("%s %s", i == 0 ? "" : ",", json_string_value(s));
}

static int print_set(const json_t *set)
{
    static const char *const heads[] = {"", "TIME", "N", "LEAST", "MEDIAN", "P90", "MOST"};
    static const char *const kinds[] = {"first_of_epoch", "steady"};
    struct cmd_table t;
    (void)printf("versions %llu to %llu", (unsigned long long)jnum(set, "from"),
                 (unsigned long long)jnum(set, "to"));
    print_texts("; strategy", json_object_get(set, "strategies"));
    print_texts("; plan", json_object_get(set, "plans"));
    print_texts("; config", json_object_get(set, "configs"));
    (void)printf("; %llu not committed\n", (unsigned long long)jnum(set, "not_committed"));
    cmd_table_init(&t, "llrrrrr");
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    for (size_t k = 0; k < 2; k++) {
        const json_t *g = json_object_get(set, kinds[k]);
        for (size_t i = 0; jnum(g, "n") > 0 && i < N_TIMES; i++)
            row(&t, k == 0 ? "first of an epoch" : "steady", g, times[i]);
    }
    return cmd_table_print(&t, stdout, 2);
}

static uint64_t steady_median(const json_t *set, const char *key)
{
    return jnum(json_object_get(json_object_get(set, "steady"), key), "median");
}

/* A ratio says something of one thing only where one thing changed. */
static void print_changed(const json_t *changed)
{
    size_t n = json_array_size(changed);
    if (n == 0) {
        (void)printf("strategy, membership, plan and config are alike in both\n");
        return;
    }
    print_texts("changed between them:", changed);
    (void)printf("%s\n",
                 n > 1 ? "; more than one thing, so the ratio is due to no single one" : "");
}

static int print_comparison(const struct ctl *c, const json_t *comparison)
{
    const json_t *sets = json_object_get(comparison, "sets");
    const json_t *a = json_array_get(sets, 0), *b = json_array_get(sets, 1);
    int r = print_set(a);
    if (r == 0)
        r = print_set(b);
    for (size_t i = 0; i < N_TIMES; i++) {
        uint64_t x = steady_median(a, times[i]), y = steady_median(b, times[i]);
        if (x > 0 && y > 0)
            (void)printf("%s%.*s %.3f",
                         i == 0 ? "median of the second over the first, steady: " : ", ",
                         (int)(strlen(times[i]) - 3), times[i], (double)y / (double)x);
    }
    (void)printf("\n");
    print_changed(json_object_get(comparison, "changed"));
    return cmd_flush(c->command, r == 0 ? CMD_OK : CMD_FAILED);
}

/* A set of which nothing was committed has nothing to compare. */
static int check_sets(const struct ctl *c, const json_t *comparison)
{
    size_t i;
    json_t *set;
    struct err err = {0};
    json_array_foreach(json_object_get(comparison, "sets"), i, set)
    {
        if (jnum(json_object_get(set, "first_of_epoch"), "n") > 0 ||
            jnum(json_object_get(set, "steady"), "n") > 0)
            continue;
        return ctl_fail(c,
                        err_set(&err, RS_ENOTFOUND,
                                "versions %llu to %llu: none was committed (%llu %s not); see "
                                "reshardctl versions",
                                (unsigned long long)jnum(set, "from"),
                                (unsigned long long)jnum(set, "to"),
                                (unsigned long long)jnum(set, "not_committed"),
                                jnum(set, "not_committed") == 1 ? "was" : "were"),
                        &err);
    }
    return CMD_OK;
}

int compare_versions(struct ctl *c, const char *model, const struct compare_set sets[2])
{
    json_t *reply;
    if (!ctl_ask(c, CTL_VERSIONS, json_pack("{sssI}", "model", model, "last", (json_int_t)ASK_MOST),
                 &reply))
        return c->exit;
    json_t *comparison = compare_records(json_object_get(reply, "versions"), sets);
    json_decref(reply);
    if (comparison == NULL)
        return ctl_fail(c, RS_ENOMEM, NULL);
    int refused = check_sets(c, comparison);
    if (refused != CMD_OK) {
        json_decref(comparison);
        return refused;
    }
    if (c->json)
        return ctl_print_json(c, comparison);
    int code = print_comparison(c, comparison);
    json_decref(comparison);
    return code;
}
