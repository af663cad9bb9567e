/* The rows that a benchmark measures, as scripts/bench reads them and as people do. Header only. */
#ifndef RS_TEST_BENCH_ROWS_H
#define RS_TEST_BENCH_ROWS_H

#include <stdbool.h>
#include <stdio.h>

enum { MAX_ROWS = 16 };

struct row {
    const char *name, *unit, *against;
    double value, ratio, aim;
    enum { AT_MOST, AT_LEAST, NO_AIM } kind;
    char note[400];
};

struct row_table {
    struct row rows[MAX_ROWS];
    int n_rows;
};

/* against: what the ratio is to. Without an aim until set_aim; the note is the caller's to fill. */
static inline struct row *add_row(struct row_table *b, const char *name, double value,
                                  const char *unit, const char *against, double ratio)
{
    struct row *row = &b->rows[b->n_rows++];
    *row = (struct row){.name = name,
                        .unit = unit,
                        .against = against,
                        .value = value,
                        .ratio = ratio,
                        .kind = NO_AIM};
    return row;
}

static inline void set_aim(struct row *row, double aim, bool at_least)
{
    row->aim = aim;
    row->kind = at_least ? AT_LEAST : AT_MOST;
}

static inline bool holds(const struct row *row, double figure)
{
    return row->kind == AT_LEAST ? figure >= row->aim : figure <= row->aim;
}

/* get_committed's aim is a ratio, the others' a value. */
static inline double judged(const struct row *row)
{
    return row->kind == AT_LEAST ? row->ratio : row->value;
}

static inline void print_rows(const struct row_table *b, bool json)
{
    for (int i = 0; i < b->n_rows; i++) {
        const struct row *x = &b->rows[i];
        const char *held = x->kind == NO_AIM ? "null" : holds(x, judged(x)) ? "true" : "false";
        char aim[64] = "null";
        if (x->kind != NO_AIM)
            (void)snprintf(aim, sizeof aim, "\"%s %g%s%s\"",
                           x->kind == AT_LEAST ? ">=" : "<=", x->aim,
                           x->kind == AT_LEAST ? "" : " ", x->kind == AT_LEAST ? "" : x->unit);
        if (json)
            (void)printf("%s\n  {\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"against\": "
                         "\"%s\", \"ratio\": %.6g, \"aim\": %s, \"holds\": %s, \"note\": \"%s\"}%s",
                         i == 0 ? "[" : ",", x->name, x->value, x->unit, x->against, x->ratio, aim,
                         held, x->note, i + 1 == b->n_rows ? "\n]\n" : "");
        else
            (void)printf("%-28s %10.4g %-8s ratio %7.3f  aim %-14s holds %-5s %s (%s)\n", x->name,
                         x->value, x->unit, x->ratio, aim, held, x->against, x->note);
    }
}

#endif
