#include "service/blame.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"

#include "base/banned.h"

/* Where text begins with `word` and a number: the number, and what follows it. */
static bool number_after(const char *text, const char *word, unsigned long *ret,
                         const char **ret_rest)
{
    size_t n = strlen(word);
    char *end;
    if (strncmp(text, word, n) != 0 || text[n] < '0' || text[n] > '9')
        return false;
    *ret = strtoul(text + n, &end, 10);
    *ret_rest = end;
    return true;
}

static const char *tensor_put(struct buf *out, const char *text, const struct layout *layout)
{
    unsigned long number;
    const char *rest;
    if (!number_after(text, "tensor ", &number, &rest) || number >= layout->n_tensors)
        return NULL;
    buf_printf(out, "tensor '%s'", layout->tensors[number].name);
    return strncmp(rest, " of its layout", 14) == 0 ? rest + 14 : rest;
}

static const char *place_put(struct buf *out, const char *text, const struct plan_entry *plan)
{
    unsigned long number;
    const char *rest;
    if (plan == NULL || !number_after(text, "place ", &number, &rest) ||
        number >= plan->program.n_places || plan->program.places[number].side == PROGRAM_SCRATCH)
        return NULL;
    const struct program_place *p = &plan->program.places[number];
    const struct layout *layout =
        p->side == PROGRAM_SOURCE ? plan->source->layout : plan->destinations[p->layout]->layout;
    buf_printf(out, "layout '%s' rank %u", layout->name, p->rank);
    const char *close = rest[0] == ' ' && rest[1] == '(' ? strchr(rest, ')') : NULL;
    return close != NULL ? close + 1 : rest;
}

void blame_names(struct err *e, const struct layout *layout, const struct plan_entry *plan)
{
    struct buf out;
    buf_init(&out);
    for (const char *p = e->text; *p != '\0';) {
        const char *next = tensor_put(&out, p, layout);
        if (next == NULL)
            next = place_put(&out, p, plan);
        if (next == NULL)
            buf_put(&out, p, 1);
        p = next != NULL ? next : p + 1;
    }
    buf_put_u8(&out, 0);
    if (buf_error(&out) == 0)
        (void)err_set(e, e->code, "%s", (const char *)out.data);
    buf_close(&out);
}
