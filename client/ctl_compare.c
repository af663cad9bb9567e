#include "client/ctl_compare.h"

#include <stdbool.h>
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

/* {"least": …, "median": …, "p90": …, "most": …} of one time of the records. */
static json_t *distribution(const json_t *records, const char *key)
{
    size_t n = json_array_size(records);
    uint64_t *values = mem_calloc(n, sizeof *values);
    if (values == NULL)
        return NULL;
    for (size_t i = 0; i < n; i++)
        values[i] = jnum(json_array_get(records, i), key);
    qsort(values, n, sizeof *values, ascending);
    json_t *d = json_pack("{sIsIsIsI}", "least", (json_int_t)values[0], "median",
                          (json_int_t)quantile(values, n, 0.5), "p90",
                          (json_int_t)quantile(values, n, 0.9), "most", (json_int_t)values[n - 1]);
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

/* Whether no committed version below it in the list is of its epoch. */
static bool first_of_epoch(const json_t *versions, size_t i)
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
           *plans = json_array();
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
        (void)json_array_append(first_of_epoch(versions, i) ? first : steady, v);
        add_distinct(strategies, jstr(v, "strategy"));
        add_distinct(plans, jstr(v, "plan_digest"));
    }
    return json_pack("{sIsIsIsosososo}", "from", (json_int_t)set->from, "to", (json_int_t)set->to,
                     "not_committed", other, "strategies", strategies, "plans", plans,
                     "first_of_epoch", group(first), "steady", group(steady));
}

json_t *compare_records(const json_t *versions, const struct compare_set sets[2])
{
    return json_pack("{s[oo]}", "sets", compare_set(versions, &sets[0]),
                     compare_set(versions, &sets[1]));
}
