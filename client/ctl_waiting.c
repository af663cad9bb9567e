#include "client/ctl_waiting.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/buf.h"

#include "base/banned.h"

enum { MOST_SAID = 8 };

/* "train/rank 3 (why)" in its parts. */
struct wait {
    const char *text;
    size_t n_layout; /* bytes of `text` */
    unsigned long rank;
    const char *why; /* " (why)" */
    bool of_rank;    /* else it is some other text, and has none of these */
};

static struct wait wait_at(const json_t *waiting_for, size_t i)
{
    static const char mark[] = "/rank ";
    struct wait w = {.text = json_string_value(json_array_get(waiting_for, i))};
    const char *at = strstr(w.text, mark);
    if (at == NULL || !isdigit((unsigned char)at[sizeof mark - 1]))
        return w;
    char *end;
    w.n_layout = (size_t)(at - w.text);
    w.rank = strtoul(at + sizeof mark - 1, &end, 10);
    w.why = end;
    w.of_rank = true;
    return w;
}

static bool alike(const struct wait *a, const struct wait *b)
{
    return a->of_rank && b->of_rank && a->n_layout == b->n_layout &&
           memcmp(a->text, b->text, a->n_layout) == 0 && strcmp(a->why, b->why) == 0;
}

static bool said_before(const json_t *waiting_for, size_t i)
{
    struct wait w = wait_at(waiting_for, i);
    for (size_t k = 0; k < i; k++) {
        struct wait x = wait_at(waiting_for, k);
        if (alike(&w, &x))
            return true;
    }
    return false;
}

/* Appends a run of ranks: "0-3", "5", after others with a comma. */
static void put_run(struct buf *to, bool first, unsigned long from, unsigned long last)
{
    buf_printf(to, "%s%lu", first ? "" : ",", from);
    if (last > from)
        buf_printf(to, "-%lu", last);
}

static size_t count_alike(const json_t *waiting_for, const struct wait *w)
{
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(waiting_for); i++) {
        struct wait x = wait_at(waiting_for, i);
        n += alike(w, &x);
    }
    return n;
}

/* The ranks of all that are like the i-th, which is the first of them. */
static void put_ranks(struct buf *to, const json_t *waiting_for, size_t i)
{
    const struct wait w = wait_at(waiting_for, i);
    unsigned long from = w.rank, last = w.rank;
    bool first = true;
    for (size_t k = i + 1; k < json_array_size(waiting_for); k++) {
        struct wait x = wait_at(waiting_for, k);
        if (!alike(&w, &x))
            continue;
        if (x.rank != last + 1) {
            put_run(to, first, from, last);
            first = false;
            from = x.rank;
        }
        last = x.rank;
    }
    put_run(to, first, from, last);
}

/* Returns how many of the texts it says. */
static size_t put_alike(struct buf *to, const json_t *waiting_for, size_t i)
{
    struct wait w = wait_at(waiting_for, i);
    size_t n = count_alike(waiting_for, &w);
    if (n < 2) {
        buf_printf(to, "%s", w.text);
        return 1;
    }
    buf_printf(to, "%.*s/ranks ", (int)w.n_layout, w.text);
    put_ranks(to, waiting_for, i);
    buf_printf(to, "%s", w.why);
    return n;
}

void waiting_put(struct buf *to, const struct json_t *waiting_for)
{
    size_t n_said = 0, n_told = 0, n = json_array_size(waiting_for);
    for (size_t i = 0; i < n && n_said < MOST_SAID; i++) {
        if (said_before(waiting_for, i))
            continue;
        buf_printf(to, "%s", n_said++ == 0 ? "; waiting for " : ", ");
        n_told += put_alike(to, waiting_for, i);
    }
    if (n_told < n)
        buf_printf(to, " and %zu more", n - n_told);
}
