#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/err.h"

#include "base/banned.h"

static atomic_int max_level = LOG_INFO;
static const char *_Atomic process_name = "reshard";

static const char *const level_names[] = {"error", "warn", "info", "debug"};

void log_init(enum log_level level, const char *process)
{
    atomic_store(&max_level, (int)level);
    atomic_store(&process_name, process);
}

int log_level_parse(const char *text, enum log_level *ret_level)
{
    for (unsigned i = 0; i < sizeof level_names / sizeof *level_names; i++)
        if (strcmp(text, level_names[i]) == 0) {
            *ret_level = (enum log_level)i;
            return 0;
        }
    return RS_EINVAL;
}

/* Texts from outside (a client's reason, SQLite's words) can't begin a line of their own. */
static void control_characters_blank(char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 0x7F)
            text[i] = ' ';
}

const char *log_level_name(enum log_level level)
{
    return level_names[level];
}

void log_line(enum log_level level, const char *format, ...)
{
    if ((int)level > atomic_load_explicit(&max_level, memory_order_relaxed))
        return;
    char line[2048];
    struct timespec now;
    struct tm utc;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (void)gmtime_r(&now.tv_sec, &utc);
    size_t n = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &utc);
    n += (size_t)snprintf(line + n, sizeof line - n, ".%03ldZ %-5s %s: ", now.tv_nsec / 1000000,
                          level_names[level], atomic_load(&process_name));
    va_list args;
    va_start(args, format);
    int text = vsnprintf(line + n, sizeof line - n - 1, format, args);
    va_end(args);
    if (text < 0)
        return;
    n += (size_t)text < sizeof line - n - 1 ? (size_t)text : sizeof line - n - 2;
    control_characters_blank(line, n);
    line[n++] = '\n';
    /* One write per line, so that lines of several processes don't mix. */
    ssize_t written = write(STDERR_FILENO, line, n);
    (void)written;
}
