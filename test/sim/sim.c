/* Runs many seeds; each is a world of its own. A seed that fails is printed and replays exactly.
 *
 *   sim [--seeds N] [--first F]      N worlds from seed F (2000, 1; sanitized 500)
 *   sim --seed S [--crash-at K] [--trace]
 *   sim --crash-everywhere N         for each of N seeds (4): the coordinator dies at each event
 *                                    in turn */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/sim/world.h"

#define ULL(x) ((unsigned long long)(x))
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SEEDS = 500 }; /* several times slower */
#else
enum { SEEDS = 2000 };
#endif

struct totals {
    uint64_t worlds, steps, commits, aborts, crashes, answers, expels, no_memory, moved, reused,
        fed, caught_up, rehearsed, silent, drained, harmed, wrong, withdrawn;
};

static void add(struct totals *t, const struct world *w)
{
    t->worlds++;
    t->steps += w->step;
    t->commits += w->n_commits;
    t->aborts += w->n_aborts;
    t->crashes += w->n_crashes;
    t->answers += w->n_answers;
    t->expels += w->n_expels;
    t->no_memory += w->n_no_memory;
    t->moved += w->n_moved;
    t->reused += w->n_reused;
    t->fed += w->n_fed;
    t->caught_up += w->n_caught_up;
    t->rehearsed += w->n_rehearsed;
    t->silent += w->n_silent;
    t->drained += w->n_drained;
    t->harmed += w->n_harmed;
    t->wrong += w->n_wrong;
    t->withdrawn += w->n_withdrawn;
}

static uint64_t run_seed(uint64_t seed, uint64_t crash_at, bool trace, struct totals *t)
{
    static struct world w; /* big, one at a time */
    world_init(&w, seed);
    w.crash_at = crash_at;
    w.trace = trace;
    if (crash_at != 0)
        w.max_trainer_acts = 3;
    world_run(&w);
    uint64_t steps = w.step;
    add(t, &w);
    world_close(&w);
    return steps;
}

static void crash_everywhere(uint64_t seed, struct totals *t)
{
    uint64_t steps = run_seed(seed, UINT64_MAX, false, t);
    for (uint64_t k = 1; k < steps; k++)
        (void)run_seed(seed, k, false, t);
}

static uint64_t number(const char *text)
{
    char *end;
    unsigned long long n = strtoull(text, &end, 10);
    if (*text == '\0' || *end != '\0') {
        fprintf(stderr, "sim: not a number: %s\n", text);
        exit(2);
    }
    return n;
}

int main(int argc, char **argv)
{
    uint64_t seeds = SEEDS, first = 1, seed = 0, crash_at = 0, everywhere = SEEDS / 500;
    bool trace = false, one = false;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--trace") == 0)
            trace = true;
        else if (strcmp(argv[i], "--seeds") == 0 && more)
            seeds = number(argv[++i]);
        else if (strcmp(argv[i], "--first") == 0 && more)
            first = number(argv[++i]);
        else if (strcmp(argv[i], "--seed") == 0 && more) {
            seed = number(argv[++i]);
            one = true;
        } else if (strcmp(argv[i], "--crash-at") == 0 && more)
            crash_at = number(argv[++i]);
        else if (strcmp(argv[i], "--crash-everywhere") == 0 && more)
            everywhere = number(argv[++i]);
        else {
            fprintf(stderr, "usage: sim [--seeds N] [--first F] [--crash-everywhere N] | --seed S "
                            "[--crash-at K] [--trace]\n");
            return 2;
        }
    }
    struct totals t = {0};
    if (one) {
        (void)run_seed(seed, crash_at, trace, &t);
    } else {
        for (uint64_t s = first; s < first + seeds; s++)
            (void)run_seed(s, 0, trace, &t);
        for (uint64_t s = first; s < first + everywhere; s++)
            crash_everywhere(s, &t);
    }
    printf(
        "sim: %llu events, %llu committed, %llu aborted, %llu coordinator crashes, %llu answers\n",
        ULL(t.steps), ULL(t.commits), ULL(t.aborts), ULL(t.crashes), ULL(t.answers));
    printf(
        "     %llu silent nodes, %llu expelled, %llu drained workers, %llu rehearsals, %llu steps "
        "without memory\n",
        ULL(t.silent), ULL(t.expels), ULL(t.drained), ULL(t.rehearsed), ULL(t.no_memory));
    printf("     %llu transfers moved, %llu not again, %llu from receivers, %llu instances caught "
           "up\n",
           ULL(t.moved), ULL(t.reused), ULL(t.fed), ULL(t.caught_up));
    printf("     %llu attempts with wrong bytes, %llu times a worker was not believed, %llu "
           "times told of a withdrawal\n",
           ULL(t.harmed), ULL(t.wrong), ULL(t.withdrawn));
    printf("%llu passed, 0 failed\n", ULL(t.worlds));
    return 0;
}
