#include "client/ctl_phases.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"
#include "client/ctl_api.h"
#include "client/ctl_compare.h"

#include "base/banned.h"

/* Marks in the order of a version's life, and the phase that each ends. `each`: several set it, the last one counts. */
static const struct point {
    const char *mark, *phase;
    bool each;
} points[] = {
    {"submitted", NULL, false},     {"planned", "plan", false},     {"prepared", "prepare", false},
    {"first_byte", "start", false}, {"last_byte", "wire", false},   {"verified", "verify", false},
    {"accepted", "accept", true},   {"committed", "commit", false}, {"applied", "apply", true}};
enum { N_POINTS = sizeof points / sizeof *points };

static json_int_t at_ns(const json_t *mark)
{
    return json_integer_value(json_object_get(mark, "at_ns"));
}

static uint64_t newest_attempt(const json_t *marks)
{
    uint64_t newest = 0;
    size_t i;
    json_t *m;
    json_array_foreach(marks, i, m) if (jnum(m, "attempt") > newest) newest = jnum(m, "attempt");
    return newest;
}

/* The last mark of that name in the newest attempt (the submission comes before any); NULL: there is none. */
static const json_t *find(const json_t *marks, const struct point *p)
{
    uint64_t newest = newest_attempt(marks);
    const json_t *found = NULL;
    size_t i;
    json_t *m;
    json_array_foreach(marks, i, m)
    {
        bool mine = p->phase == NULL || jnum(m, "attempt") == newest;
        bool right = p->each || jstr(m, "who")[0] == '\0';
        if (mine && right && strcmp(jstr(m, "name"), p->mark) == 0)
            found = m;
    }
    return found;
}

static int slower_first(const void *a, const void *b)
{
    uint64_t x = jnum(*(json_t *const *)a, "took_ns"), y = jnum(*(json_t *const *)b, "took_ns");
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Takes `array`; equal ones keep no order. NULL: out of memory. */
static json_t *sorted(json_t *array)
{
    size_t n = json_array_size(array), i;
    json_t **items = mem_calloc(n > 0 ? n : 1, sizeof *items), *ret = json_array(), *item;
    if (items == NULL || ret == NULL) {
        mem_free(items);
        json_decref(ret);
        json_decref(array);
        return NULL;
    }
    json_array_foreach(array, i, item) items[i] = item;
    qsort(items, n, sizeof *items, slower_first);
    for (i = 0; i < n; i++)
        (void)json_array_append(ret, items[i]);
    mem_free(items);
    json_decref(array);
    return ret;
}

/* In their order in time. */
static json_t *phases_in_order(const json_t *version)
{
    const json_t *marks = json_object_get(version, "marks"), *before = NULL;
    json_t *phases = json_array();
    for (size_t i = 0; i < N_POINTS; i++) {
        const json_t *m = find(marks, &points[i]);
        if (m == NULL)
            continue;
        if (before != NULL && at_ns(m) >= at_ns(before))
            (void)json_array_append_new(phases, json_pack("{sssI}", "phase", points[i].phase,
                                                          "took_ns", at_ns(m) - at_ns(before)));
        before = m;
    }
    return phases;
}

json_t *phases_of(const json_t *version)
{
    return sorted(phases_in_order(version));
}

/* --- who was slowest ---------------------------------------------------------------------------- */

static void add_who(json_t *to, const char *phase, const json_t *m, json_int_t since_ns)
{
    if (at_ns(m) >= since_ns)
        (void)json_array_append_new(to, json_pack("{sssssI}", "phase", phase, "who", jstr(m, "who"),
                                                  "took_ns", at_ns(m) - since_ns));
}

static const json_t *resume_of(const json_t *marks, size_t pause)
{
    const char *who = jstr(json_array_get(marks, pause), "who");
    for (size_t i = pause + 1; i < json_array_size(marks); i++) {
        const json_t *m = json_array_get(marks, i);
        if (strcmp(jstr(m, "name"), "resume") == 0 && strcmp(jstr(m, "who"), who) == 0)
            return m;
    }
    return NULL;
}

json_t *phases_slowest(const json_t *version)
{
    static const struct point verified = {"verified", "verify", false},
                              committed = {"committed", "commit", false};
    const json_t *marks = json_object_get(version, "marks");
    const json_t *from_verified = find(marks, &verified), *from_commit = find(marks, &committed);
    uint64_t newest = newest_attempt(marks);
    json_t *who = json_array(), *m;
    size_t i;
    json_array_foreach(marks, i, m)
    {
        const char *name = jstr(m, "name");
        bool mine = jnum(m, "attempt") == newest && jstr(m, "who")[0] != '\0';
        if (mine && strcmp(name, "published") == 0)
            add_who(who, "publish", m, 0);
        else if (mine && from_verified != NULL &&
                 (strcmp(name, "accepted") == 0 || strcmp(name, "rejected") == 0))
            add_who(who, "accept", m, at_ns(from_verified));
        else if (mine && from_commit != NULL && strcmp(name, "applied") == 0)
            add_who(who, "apply", m, at_ns(from_commit));
        else if (strcmp(name, "pause") == 0 && resume_of(marks, i) != NULL)
            add_who(who, "pause", resume_of(marks, i), at_ns(m));
    }
    return sorted(who);
}

/* --- over versions ------------------------------------------------------------------------------ */

/* What each of `versions` (an array) spent in a phase. */
static json_t *phase_distribution(const json_t *versions, const char *phase)
{
    uint64_t *values = mem_calloc(json_array_size(versions) + 1, sizeof *values);
    size_t n = 0, i, k;
    json_t *v, *p, *d = NULL;
    if (values == NULL)
        return NULL;
    json_array_foreach(versions, i, v)
    {
        json_t *phases = phases_in_order(v);
        json_array_foreach(phases, k, p) if (strcmp(jstr(p, "phase"), phase) == 0) values[n++] =
            jnum(p, "took_ns");
        json_decref(phases);
    }
    struct compare_quantiles q = compare_quantiles(values, n);
    if (n > 0)
        d = json_pack("{sssIsIsIsIsIsI}", "phase", phase, "n", (json_int_t)n, "least_ns",
                      (json_int_t)q.least, "median_ns", (json_int_t)q.median, "p90_ns",
                      (json_int_t)q.p90, "p99_ns", (json_int_t)q.p99, "most_ns",
                      (json_int_t)q.most);
    mem_free(values);
    return d;
}

/* Takes versions. */
static json_t *phase_group(json_t *versions)
{
    json_t *phases = json_array();
    for (size_t i = 1; i < N_POINTS; i++) {
        json_t *d = phase_distribution(versions, points[i].phase);
        if (d != NULL)
            (void)json_array_append_new(phases, d);
    }
    json_t *g = json_pack("{sIso}", "n", (json_int_t)json_array_size(versions), "phases", phases);
    json_decref(versions);
    return g;
}

json_t *phases_over(const json_t *versions)
{
    json_t *first = json_array(), *steady = json_array(), *records = json_array(), *v;
    size_t i;
    json_array_foreach(versions, i, v)(void)
        json_array_append(records, json_object_get(v, "record"));
    json_array_foreach(versions, i, v)
    {
        if (strcmp(jstr(json_object_get(v, "record"), "phase"), "committed") == 0)
            (void)json_array_append(compare_first_of_epoch(records, i) ? first : steady, v);
    }
    json_decref(records);
    return json_pack("{soso}", "first_of_epoch", phase_group(first), "steady", phase_group(steady));
}

void phases_add(json_t *timeline)
{
    json_t *versions = json_object_get(timeline, "versions"), *v;
    size_t i;
    json_array_foreach(versions, i, v)
    {
        (void)json_object_set_new(v, "phases", phases_of(v));
        (void)json_object_set_new(v, "slowest", phases_slowest(v));
    }
    if (json_array_size(versions) > 1)
        (void)json_object_set_new(timeline, "over", phases_over(versions));
}
