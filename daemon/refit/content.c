/* What a version is asked to be: its layouts and options, as a digest (equal or not) and in words, a line each. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "refit/private.h"

#include "base/banned.h"

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

/* Each line of `text` but the source layouts' is in `other`. */
static bool lines_within(const char *text, const char *other, bool *ret_source)
{
    static const char source[] = "source layout ";
    bool all = true;
    *ret_source = false;
    for (; *text != '\0'; text += strcspn(text, "\n"), text += *text == '\n') {
        size_t n = strcspn(text, "\n");
        if (strncmp(text, source, sizeof source - 1) == 0)
            *ret_source = true;
        else if (n > 0 && !has_line(other, text, n))
            all = false;
    }
    return all;
}

/* Its trainers have left for good since it was committed: that makes it no other version. */
static bool only_source_left(const struct refit *r, const struct refit_version *v,
                             const struct refit_event *ev)
{
    const char *then = v->words, *now = ev->submit.words;
    bool had, has;
    if (v->phase.state != REFIT_COMMITTED || then == NULL || now == NULL || !same_options(v, ev))
        return false;
    foreach_layout (l, r)
        if (l->side == REFIT_SOURCE && l->wanted)
            return false;
    return lines_within(then, now, &had) && lines_within(now, then, &has) && had && !has;
}

bool content_same(const struct refit *r, const struct refit_version *v,
                  const struct refit_event *ev)
{
    return memcmp(v->content, ev->submit.content, sizeof v->content) == 0 ||
           only_source_left(r, v, ev);
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
    const char *then = v->words, *now = ev->submit.words;
    bool had;
    if (v->phase.state != REFIT_SUBMITTED || then == NULL || now == NULL || !same_options(v, ev))
        return false;
    return lines_within(then, now, &had) && !had;
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
