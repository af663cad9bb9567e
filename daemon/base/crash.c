#include "base/crash.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"

#include "base/banned.h"

#define VARIABLE "RESHARD_CRASH"

static const struct {
    const char *name, *process, *where;
} points[] = {
#define X(id, name, process, where) {name, process, where},
    CRASH_POINTS(X)
#undef X
};

/* Set once before other threads run; the count goes down at each passage. */
static _Atomic int armed = -1;
static atomic_long passages_left;

int crash_init(void)
{
    const char *text = getenv(VARIABLE);
    if (text == NULL)
        return 0;
    size_t n = strcspn(text, ":");
    char *end = NULL;
    long passages = text[n] == '\0' ? 1 : strtol(text + n + 1, &end, 10);
    if (passages < 1 || (end != NULL && (*end != '\0' || end == text + n + 1)))
        return RS_EINVAL;
    for (int i = 0; i < CRASH_N_POINTS; i++) {
        if (strlen(points[i].name) != n || strncmp(points[i].name, text, n) != 0)
            continue;
        atomic_store(&passages_left, passages);
        atomic_store(&armed, i);
        return 0;
    }
    return RS_EINVAL;
}

void crash_spent(void)
{
    (void)unsetenv(VARIABLE);
}

void crash_point(enum crash_point p)
{
    if (atomic_load_explicit(&armed, memory_order_relaxed) != (int)p ||
        atomic_fetch_sub(&passages_left, 1) != 1)
        return;
    (void)kill(getpid(), SIGKILL);
    for (;;)
        (void)pause(); /* the signal may be a moment on its way to this thread */
}

void crash_print(void)
{
    for (int i = 0; i < CRASH_N_POINTS; i++)
        (void)printf("%-16s %-11s %s\n", points[i].name, points[i].process, points[i].where);
}
