#include "client/progress.h"

#include <string.h>

#include "base/banned.h"

static const struct progress_point *point(const struct progress *p, unsigned i)
{
    return &p->points[(p->first + i) % PROGRESS_POINTS];
}

static void drop_first(struct progress *p)
{
    p->first = (p->first + 1) % PROGRESS_POINTS;
    p->n--;
}

void progress_add(struct progress *p, uint64_t at_ns, uint64_t landed, uint64_t total)
{
    if (p->n > 0 && landed < point(p, p->n - 1)->landed)
        p->n = 0;
    if (landed == 0)
        p->n = 0; /* the clock starts with the first byte */
    /* Points closer than a ring's share of the window take the newest one's place. */
    uint64_t step_ns = (uint64_t)PROGRESS_WINDOW_MS * 1000000 / (PROGRESS_POINTS / 2);
    if (p->n > 1 && at_ns - point(p, p->n - 2)->at_ns < step_ns)
        p->n--;
    if (p->n == PROGRESS_POINTS)
        drop_first(p);
    p->points[(p->first + p->n++) % PROGRESS_POINTS] = (struct progress_point){at_ns, landed};
    while (p->n > 2 && at_ns - point(p, 1)->at_ns > (uint64_t)PROGRESS_WINDOW_MS * 1000000)
        drop_first(p);
    p->total = total;
}

double progress_share(const struct progress *p)
{
    if (p->n == 0 || p->total == 0)
        return 0;
    double share = (double)point(p, p->n - 1)->landed / (double)p->total;
    return share > 1 ? 1 : share;
}

double progress_rate(const struct progress *p)
{
    if (p->n < 2)
        return 0;
    const struct progress_point *a = point(p, 0), *b = point(p, p->n - 1);
    if (b->at_ns <= a->at_ns)
        return 0;
    return (double)(b->landed - a->landed) * 1e9 / (double)(b->at_ns - a->at_ns);
}

double progress_eta_s(const struct progress *p)
{
    double rate = progress_rate(p);
    if (p->n == 0 || p->total == 0 || rate <= 0)
        return -1;
    uint64_t landed = point(p, p->n - 1)->landed;
    return landed >= p->total ? 0 : (double)(p->total - landed) / rate;
}

char *progress_bar(double share, unsigned width, char *ret_text)
{
    unsigned full = share <= 0 ? 0 : share >= 1 ? width : (unsigned)(share * width);
    ret_text[0] = '[';
    memset(ret_text + 1, '#', full);
    memset(ret_text + 1 + full, '.', width - full);
    ret_text[width + 1] = ']';
    ret_text[width + 2] = '\0';
    return ret_text;
}
