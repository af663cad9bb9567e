/* Upper bounds on time that hold on a busy machine, too. For tests with Check. */
#ifndef RS_TEST_BEST_OF_H
#define RS_TEST_BEST_OF_H

#include <check.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"

enum { MOST_TRIES = 10 };

/* What is always late is never in time; what a busy machine held up once is in time in another try. `once` does it and
 * says how long it took. */
static inline void in_time_once(uint64_t (*once)(void *arg), void *arg, uint64_t most_ns)
{
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < MOST_TRIES && best >= most_ns; i++) {
        uint64_t took = once(arg);
        best = took < best ? took : best;
    }
    ck_assert_uint_lt(best, most_ns);
}

struct apart {
    uint64_t (*once)(void *arg);
    void *arg;
};

/* `once` of in_time_once, for what forks and must not have used CUDA or gRPC before: does it in a process of its own. */
static inline uint64_t apart(void *arg)
{
    const struct apart *a = arg;
    uint64_t took = 0;
    int ends[2], status = -1;
    ck_assert_int_eq(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        took = a->once(a->arg);
        _exit(write(ends[1], &took, sizeof took) == sizeof took ? 0 : 1);
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_int_eq(status, 0);
    ck_assert_int_eq(read(ends[0], &took, sizeof took), sizeof took);
    (void)close(ends[0]);
    (void)close(ends[1]);
    return took;
}

#endif
