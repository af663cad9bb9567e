#include "base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/banned.h"

static const struct {
    int code;
    enum err_class class;
    int status;
    const char *text;
} errors[] = {
#define X(name, value, class, status, text) {value, class, status, text},
    RS_ERRORS(X)
#undef X
};

#define N_ERRORS (sizeof errors / sizeof *errors)

const char *err_name(int code)
{
    if (code == 0)
        return "ok";
    for (size_t i = 0; i < N_ERRORS; i++)
        if (errors[i].code == code)
            return errors[i].text;
    return "unknown error";
}

enum err_class err_class(int code)
{
    for (size_t i = 0; i < N_ERRORS; i++)
        if (errors[i].code == code)
            return errors[i].class;
    return ERR_BUG;
}

int err_status(int code)
{
    if (code == 0)
        return 0;
    for (size_t i = 0; i < N_ERRORS; i++)
        if (errors[i].code == code)
            return errors[i].status;
    return 13;
}

int err_from_status(int status)
{
    if (status == 0)
        return 0;
    for (size_t i = 0; i < N_ERRORS; i++)
        if (errors[i].status == status)
            return errors[i].code;
    return RS_EINTERNAL;
}

int err_from_errno(int errno_value)
{
    switch (errno_value) {
    case 0:
        return 0;
    case ENOMEM:
        return RS_ENOMEM;
    case ENOENT:
        return RS_ENOTFOUND;
    case EEXIST:
        return RS_EEXIST;
    case EACCES:
    case EPERM:
        return RS_EPERM;
    case EINVAL:
        return RS_EINVAL;
    case EMFILE:
    case ENFILE:
        return RS_EEXHAUSTED;
    case ENOSPC:
    case EDQUOT:
        return RS_EEXHAUSTED;
    case ETIMEDOUT:
        return RS_EDEADLINE;
    case ECANCELED:
        return RS_ECANCELED;
    case ECONNREFUSED:
        return RS_EUNAVAIL;
    case EPIPE:
    case ECONNRESET:
        return RS_EPEER;
    default:
        return RS_EIO;
    }
}

/* Cuts a truncated text back to a whole UTF-8 character. */
static void trim_utf8(char *text)
{
    size_t n = strlen(text);
    size_t back = 0;
    if (n + 1 < ERR_TEXT_BYTES)
        return;
    while (back < 4 && back < n && ((unsigned char)text[n - 1 - back] & 0xC0U) == 0x80U)
        back++;
    if (back < n && ((unsigned char)text[n - 1 - back] & 0x80U) != 0)
        text[n - 1 - back] = '\0';
}

int err_set(struct err *e, int code, const char *format, ...)
{
    if (e == NULL)
        return code;
    e->code = code;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
    trim_utf8(e->text);
    return code;
}

int err_prefix(struct err *e, int code, const char *format, ...)
{
    if (e == NULL)
        return code;
    char tail[ERR_TEXT_BYTES];
    const char *text = e->code == 0 || e->text[0] == '\0' ? err_name(code) : e->text;
    (void)snprintf(tail, sizeof tail, "%s", text);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
    bool stands = n > 0 && (size_t)n < sizeof tail && strncmp(tail, e->text, (size_t)n) == 0 &&
                  tail[n] == ':';
    if (stands)
        (void)snprintf(e->text, sizeof e->text, "%s", tail);
    else if (n >= 0 && (size_t)n < sizeof e->text)
        (void)snprintf(e->text + n, sizeof e->text - (size_t)n, ": %s", tail);
    trim_utf8(e->text);
    e->code = code;
    return code;
}

const char *err_text(const struct err *e, int code)
{
    return e != NULL && e->code != 0 && e->text[0] != '\0' ? e->text : err_name(code);
}

void err_assert_failed(const char *file, int line, const char *func, const char *cond)
{
    (void)fprintf(stderr, "%s:%d: %s: assertion failed: %s\n", file, line, func, cond);
    abort();
}
