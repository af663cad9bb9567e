#include "base/crash.h"

#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"

#include "base/banned.h"

/* A variable of the environment that arms one of several points. Set once before other threads run; the
 * passages are counted from then on. */
struct trigger {
    const char *variable;
    atomic_int armed; /* the point's number; -1: none */
    long first, last; /* passages that count */
    atomic_long passages;
};

static const struct {
    const char *name, *process, *where;
} points[] = {
#define X(id, name, process, where) {name, process, where},
    CRASH_POINTS(X)
#undef X
};

static const char *const damages[] = {
#define X(id, name, where) name,
    DAMAGE_POINTS(X)
#undef X
};

static struct trigger crash = {.variable = "RESHARD_CRASH", .armed = -1};
static struct trigger damage = {.variable = "RESHARD_DAMAGE", .armed = -1};

/* ":N" at *at, which moves behind it; 1 where there is none. 0: no number from 1 on. */
static long read_count(const char **at)
{
    char *end;
    if (**at == '\0')
        return 1;
    long n = **at == ':' ? strtol(*at + 1, &end, 10) : 0;
    if (n < 1 || end == *at + 1)
        return 0;
    *at = end;
    return n;
}

/* NAME[:N] or, with spans, NAME[:N[:M]]; name: the name of point number i. */
static int trigger_init(struct trigger *t, bool spans, int n_points, const char *(*name)(int i))
{
    const char *text = getenv(t->variable);
    if (text == NULL)
        return 0;
    size_t n = strcspn(text, ":");
    const char *at = text + n;
    long first = read_count(&at), span = spans && first > 0 ? read_count(&at) : 1;
    if (first < 1 || span < 1 || *at != '\0')
        return RS_EINVAL;
    for (int i = 0; i < n_points; i++) {
        if (strlen(name(i)) != n || strncmp(name(i), text, n) != 0)
            continue;
        t->first = first;
        t->last = span - 1 > LONG_MAX - first ? LONG_MAX : first + span - 1;
        atomic_store(&t->armed, i);
        return 0;
    }
    return RS_EINVAL;
}

static bool trigger_due(struct trigger *t, int point)
{
    if (atomic_load_explicit(&t->armed, memory_order_relaxed) != point)
        return false;
    long passage = atomic_fetch_add(&t->passages, 1) + 1;
    return passage >= t->first && passage <= t->last;
}

static const char *crash_name(int i)
{
    return points[i].name;
}

static const char *damage_name(int i)
{
    return damages[i];
}

int crash_init(const char **ret_variable)
{
    int r = trigger_init(&crash, false, CRASH_N_POINTS, crash_name);
    if (r < 0) {
        *ret_variable = crash.variable;
        return r;
    }
    r = trigger_init(&damage, true, DAMAGE_N_POINTS, damage_name);
    if (r < 0)
        *ret_variable = damage.variable;
    return r;
}

void crash_spent(void)
{
    (void)unsetenv(crash.variable);
    (void)unsetenv(damage.variable);
}

void crash_point(enum crash_point p)
{
    if (!trigger_due(&crash, (int)p))
        return;
    (void)kill(getpid(), SIGKILL);
    for (;;)
        (void)pause(); /* the signal may be a moment on its way to this thread */
}

bool damage_due(enum damage_point p)
{
    return trigger_due(&damage, (int)p);
}

void crash_print(void)
{
    for (int i = 0; i < CRASH_N_POINTS; i++)
        (void)printf("%-16s %-11s %s\n", points[i].name, points[i].process, points[i].where);
}
