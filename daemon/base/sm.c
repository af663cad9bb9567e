#include "base/sm.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/err.h"
#include "base/log.h"

#include "base/banned.h"

void sm_init(struct sm *m, const struct sm_state *table, int state)
{
    m->table = table;
    m->state = state;
}

int sm_can(const struct sm *m, int next)
{
    return (m->table[m->state].allowed & SM_TO(next)) != 0;
}

void sm_move(struct sm *m, int next, const char *format, ...)
{
    rs_assert(sm_can(m, next));
    char what[256];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(what, sizeof what, format, args);
    va_end(args);
    log_debug("%s: %s to %s", what, m->table[m->state].name, m->table[next].name);
    m->state = next;
}

const char *sm_name(const struct sm *m)
{
    return m->table[m->state].name;
}
