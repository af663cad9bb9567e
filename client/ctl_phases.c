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

/* Marks in the order of a version's life, and the phase that each ends. */
static const struct point {
    const char *mark, *phase;
    enum { NEWEST, FIRST } attempt; /* of those since it was submitted */
    bool each;                      /* several set it, the last one counts */
} points[] = {{"submitted", NULL, FIRST, false},    {"begun", "queue", FIRST, false},
              {"begun", "retry", NEWEST, false},    {"gathered", "gather", NEWEST, false},
              {"planned", "plan", NEWEST, false},   {"prepared", "prepare", NEWEST, false},
              {"started", "ready", NEWEST, false},  {"first_byte", "start", NEWEST, false},
              {"last_byte", "wire", NEWEST, false}, {"verified", "verify", NEWEST, false},
              {"accepted", "accept", NEWEST, true}, {"committed", "commit", NEWEST, false},
              {"applied", "apply", NEWEST, true}};
enum { N_POINTS = sizeof points / sizeof *points };

const char *phases_ended_by(const char *mark, bool since_submitted)
{
    for (size_t i = 1; i < N_POINTS; i++)
        if (strcmp(points[i].mark, mark) == 0 && (points[i].attempt == NEWEST || since_submitted))
            return points[i].phase;
    return NULL;
}

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

/* The first attempt since it was submitted: one of an earlier submission may have gone before. */
static uint64_t first_attempt(const json_t *marks)
{
    uint64_t first = 0;
    size_t i;
    json_t *m;
    json_array_foreach(marks, i, m) if (strcmp(jstr(m, "name"), "submitted") == 0 &&
                                        jnum(m, "attempt") > first) first = jnum(m, "attempt");
    return first;
}

/* The last mark of that name in an attempt; NULL: there is none. */
static const json_t *find_in(const json_t *marks, const char *name, bool each, uint64_t attempt)
{
    const json_t *found = NULL;
    size_t i;
    json_t *m;
    json_array_foreach(marks, i, m)
    {
        bool right = each || jstr(m, "who")[0] == '\0';
        if (jnum(m, "attempt") == attempt && right && strcmp(jstr(m, "name"), name) == 0)
            found = m;
    }
    return found;
}

static const json_t *find(const json_t *marks, const struct point *p)
{
    return find_in(marks, p->mark, p->each,
                   p->attempt == FIRST ? first_attempt(marks) : newest_attempt(marks));
}

/* The mark of an end that is no commit; NULL: there is none. */
static const json_t *find_end(const json_t *marks)
{
    uint64_t newest = newest_attempt(marks);
    const json_t *aborted = find_in(marks, "aborted", false, newest);
    return aborted != NULL ? aborted : find_in(marks, "superseded", false, newest);
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

static void put_phase(json_t *phases, const char *phase, const json_t *from, const json_t *to)
{
    (void)json_array_append_new(phases, json_pack("{sssIsI}", "phase", phase, "from_ns",
                                                  at_ns(from), "took_ns", at_ns(to) - at_ns(from)));
}

/* In their order in time. What is between the first mark and the last is in exactly one phase, so they add up. */
static json_t *phases_in_order(const json_t *version)
{
    const json_t *marks = json_object_get(version, "marks"), *before = NULL;
    const json_t *end = find_end(marks);
    json_t *phases = json_array();
    const char *next = NULL; /* the phase that was not ended by its own mark */
    for (size_t i = 0; i < N_POINTS; i++) {
        const json_t *m = end != NULL && points[i].each ? NULL : find(marks, &points[i]);
        bool retried = before != NULL && m == before; /* no: it is the first attempt still */
        if (m != NULL && before != NULL && !retried && at_ns(m) >= at_ns(before))
            put_phase(phases, points[i].phase, before, m);
        if (m != NULL && (before == NULL || at_ns(m) >= at_ns(before)))
            before = m;
        next = m != NULL ? NULL : next == NULL ? points[i].phase : next;
    }
    if (end != NULL && before != NULL && next != NULL && at_ns(end) >= at_ns(before))
        put_phase(phases, next, before, end);
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
    static const struct point verified = {"verified", "verify", NEWEST, false},
                              committed = {"committed", "commit", NEWEST, false};
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
