#include "client/ctl_compare.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"
#include "client/ctl_api.h"

#include "base/banned.h"

static const char *const times[] = {"total_ns", "wire_ns", "stall_ns"};
enum { N_TIMES = sizeof times / sizeof *times };

/* ---- distributions ---- */

static int ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The value below which a share q lies, by nearest rank. */
static uint64_t quantile(const uint64_t *sorted, size_t n, double q)
{
    size_t rank = (size_t)(q * (double)n + 0.999999);
    return sorted[rank == 0 ? 0 : rank > n ? n - 1 : rank - 1];
}

struct compare_quantiles compare_quantiles(uint64_t *values, size_t n)
{
    if (n == 0)
        return (struct compare_quantiles){0};
    qsort(values, n, sizeof *values, ascending);
    return (struct compare_quantiles){.least = values[0],
                                      .median = quantile(values, n, 0.5),
                                      .p90 = quantile(values, n, 0.9),
                                      .p99 = quantile(values, n, 0.99),
                                      .most = values[n - 1]};
}

/* {"least": …, "median": …, "p90": …, "most": …} of one time of the records. */
static json_t *distribution(const json_t *records, const char *key)
{
    size_t n = json_array_size(records);
    uint64_t *values = mem_calloc(n, sizeof *values);
    if (values == NULL)
        return NULL;
    for (size_t i = 0; i < n; i++)
        values[i] = jnum(json_array_get(records, i), key);
    struct compare_quantiles q = compare_quantiles(values, n);
    json_t *d =
        json_pack("{sIsIsIsI}", "least", (json_int_t)q.least, "median", (json_int_t)q.median, "p90",
                  (json_int_t)q.p90, "most", (json_int_t)q.most);
    mem_free(values);
    return d;
}

/* Takes records. */
static json_t *group(json_t *records)
{
    json_t *g = json_pack("{sI}", "n", (json_int_t)json_array_size(records));
    for (size_t i = 0; g != NULL && json_array_size(records) > 0 && i < N_TIMES; i++)
        (void)json_object_set_new(g, times[i], distribution(records, times[i]));
    json_decref(records);
    return g;
}

/* Adds `text` to an array of distinct strings. */
static void add_distinct(json_t *array, const char *text)
{
    size_t i;
    json_t *s;
    json_array_foreach(array, i, s) if (strcmp(json_string_value(s), text) == 0) return;
    (void)json_array_append_new(array, json_string(text));
}

bool compare_first_of_epoch(const json_t *versions, size_t i)
{
    uint64_t epoch = jnum(json_array_get(versions, i), "epoch");
    for (i++; i < json_array_size(versions); i++) {
        const json_t *v = json_array_get(versions, i);
        if (strcmp(jstr(v, "phase"), "committed") == 0)
            return jnum(v, "epoch") != epoch;
    }
    return true;
}

static json_t *compare_set(const json_t *versions, const struct compare_set *set)
{
    json_t *first = json_array(), *steady = json_array(), *strategies = json_array(),
           *plans = json_array(), *epochs = json_array(), *configs = json_array();
    json_int_t other = 0;
    for (size_t i = 0; i < json_array_size(versions); i++) {
        json_t *v = json_array_get(versions, i);
        uint64_t version = jnum(v, "version");
        if (version < set->from || version > set->to)
            continue;
        if (strcmp(jstr(v, "phase"), "committed") != 0) {
            other++;
            continue;
        }
        (void)json_array_append(compare_first_of_epoch(versions, i) ? first : steady, v);
        add_distinct(strategies, jstr(v, "strategy"));
        add_distinct(plans, jstr(v, "plan_digest"));
        if (jstr(v, "config_digest")[0] != '\0') /* a release before knew none */
            add_distinct(configs, jstr(v, "config_digest"));
        char epoch[24];
        (void)snprintf(epoch, sizeof epoch, "%llu", (unsigned long long)jnum(v, "epoch"));
        add_distinct(epochs, epoch);
    }
    return json_pack("{sIsIsIsosososososo}", "from", (json_int_t)set->from, "to",
                     (json_int_t)set->to, "not_committed", other, "strategies", strategies, "plans",
                     plans, "epochs", epochs, "configs", configs, "first_of_epoch", group(first),
                     "steady", group(steady));
}

/* Whether two arrays of distinct strings have the same members. */
static bool same_members(const json_t *a, const json_t *b)
{
    size_t i, k;
    json_t *x, *y;
    if (json_array_size(a) != json_array_size(b))
        return false;
    json_array_foreach(a, i, x)
    {
        bool found = false;
        json_array_foreach(b, k, y) found =
            found || strcmp(json_string_value(x), json_string_value(y)) == 0;
        if (!found)
            return false;
    }
    return true;
}

/* What is not alike in both sets. Another strategy makes another plan by itself; so does another membership. */
static json_t *changes(const json_t *a, const json_t *b)
{
    static const char *const keys[][2] = {{"strategies", "strategy"}, {"epochs", "epoch"}};
    const json_t *x = json_object_get(a, "configs"), *y = json_object_get(b, "configs");
    json_t *changed = json_array();
    if (json_array_size(x) > 0 && json_array_size(y) > 0 && !same_members(x, y))
        (void)json_array_append_new(changed, json_string("config"));
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!same_members(json_object_get(a, keys[i][0]), json_object_get(b, keys[i][0])))
            (void)json_array_append_new(changed, json_string(keys[i][1]));
    bool config = json_array_size(changed) > 0 &&
                  strcmp(json_string_value(json_array_get(changed, 0)), "config") == 0;
    if (json_array_size(changed) == (config ? 1U : 0U) &&
        !same_members(json_object_get(a, "plans"), json_object_get(b, "plans")))
        (void)json_array_append_new(changed, json_string("plan"));
    return changed;
}

json_t *compare_records(const json_t *versions, const struct compare_set sets[2])
{
    json_t *a = compare_set(versions, &sets[0]), *b = compare_set(versions, &sets[1]);
    json_t *changed = changes(a, b);
    return json_pack("{s[oo]so}", "sets", a, b, "changed", changed);
}
