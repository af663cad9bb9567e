/* What a version is asked to be: its layouts and options, as a digest (equal or not) and in words, a line each. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "refit/private.h"

#include "base/banned.h"

bool content_same(const struct refit_version *v, const struct refit_event *ev)
{
    return memcmp(v->content, ev->submit.content, sizeof v->content) == 0;
}

static bool has_line(const char *text, const char *line, size_t n)
{
    for (const char *at = text; at != NULL; at = strchr(at, '\n')) {
        at += *at == '\n';
        if (strcspn(at, "\n") == n && strncmp(at, line, n) == 0)
            return true;
    }
    return false;
}

/* Puts the lines of `of` that are not in `in`: "then verify off, release at read". */
static void put_lines(char *to, size_t room, const char *when, const char *of, const char *in)
{
    bool first = true;
    for (const char *at = of; *at != '\0';) {
        size_t n = strcspn(at, "\n"), used = strlen(to);
        if (n > 0 && !has_line(in, at, n)) {
            (void)snprintf(to + used, room - used, "%s%s%.*s",
                           !first      ? ", "
                           : used == 0 ? ""
                                       : "; ",
                           first ? when : "", (int)(n < 300 ? n : 300), at);
            first = false;
        }
        at += n + (at[n] == '\n');
    }
}

static bool same_options(const struct refit_version *v, const struct refit_event *ev)
{
    return v->n_options_bytes == ev->submit.n_options_bytes &&
           (v->n_options_bytes == 0 ||
            memcmp(v->options, ev->submit.options, v->n_options_bytes) == 0);
}

const char *content_difference(struct step *s, const struct refit_version *v)
{
    const struct refit_event *ev = s->ev;
    char text[700] = "";
    if (v->words != NULL && ev->submit.words != NULL) {
        put_lines(text, sizeof text, "then ", v->words, ev->submit.words);
        put_lines(text, sizeof text, "now ", ev->submit.words, v->words);
    }
    if (text[0] != '\0')
        return step_text(s, "%s", text);
    return same_options(v, ev) ? "the model's layouts were others then"
                               : "the options were others then";
}

/* It was submitted before any trainer had attached, and waits: what is submitted now is the same, with the source that was not
 * known then, and layouts that have come since. */
static bool completes(const struct refit_version *v, const struct refit_event *ev)
{
    static const char source[] = "source layout ";
    const char *line = v->words, *now = ev->submit.words;
    if (v->phase.state != REFIT_SUBMITTED || line == NULL || now == NULL || !same_options(v, ev))
        return false;
    for (; *line != '\0'; line += strcspn(line, "\n"), line += *line == '\n') {
        size_t n = strcspn(line, "\n");
        if (strncmp(line, source, sizeof source - 1) == 0 || (n > 0 && !has_line(now, line, n)))
            return false;
    }
    return true;
}

int content_complete(struct refit_version *v, const struct refit_event *ev)
{
    char *words = NULL;
    if (v == NULL || !completes(v, ev))
        return 0;
    if ((words = mem_strdup(ev->submit.words)) == NULL)
        return RS_ENOMEM;
    mem_free(v->words);
    v->words = words;
    memcpy(v->content, ev->submit.content, sizeof v->content);
    return 0;
}
