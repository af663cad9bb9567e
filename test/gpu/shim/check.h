/* As much of Check as our tests use, for machines that have no Check (scripts/gpu-check): a process
 * per test, a limit, the same closing line. */
#ifndef RS_TEST_GPU_SHIM_CHECK_H
#define RS_TEST_GPU_SHIM_CHECK_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct shim_test {
    const char *name;
    void (*fn)(int);
};
typedef struct shim_test TTest;
typedef struct {
    const TTest *tests[256];
    unsigned timeout_s[256];
    int n, failed;
} Suite, SRunner;
typedef struct {
    const TTest *test;
    unsigned timeout_s;
} TCase;

enum print_output { CK_NORMAL };

#define START_TEST(name)                                                                           \
    static void name##_fn(int);                                                                    \
    static const TTest name##_test = {#name, name##_fn};                                           \
    static const TTest *const name = &name##_test;                                                 \
    static void name##_fn(int shim_unused)                                                         \
    {                                                                                              \
        (void)shim_unused;
#define END_TEST }

#define ck_assert_msg(condition, ...)                                                              \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                  \
            (void)fprintf(stderr, __VA_ARGS__);                                                    \
            (void)fputc('\n', stderr);                                                             \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)
#define ck_assert(condition) ck_assert_msg(condition, "%s", #condition)
#define ck_abort_msg(...)    ck_assert_msg(false, __VA_ARGS__)
#define SHIM_COMPARE(type, format, a, op, b)                                                       \
    do {                                                                                           \
        type shim_a = (a);                                                                         \
        type shim_b = (b);                                                                         \
        ck_assert_msg(shim_a op shim_b, "%s " #op " %s: " format ", " format, #a, #b, shim_a,      \
                      shim_b);                                                                     \
    } while (0)
#define ck_assert_int_eq(a, b)    SHIM_COMPARE(intmax_t, "%jd", a, ==, b)
#define ck_assert_int_ne(a, b)    SHIM_COMPARE(intmax_t, "%jd", a, !=, b)
#define ck_assert_int_lt(a, b)    SHIM_COMPARE(intmax_t, "%jd", a, <, b)
#define ck_assert_int_le(a, b)    SHIM_COMPARE(intmax_t, "%jd", a, <=, b)
#define ck_assert_int_gt(a, b)    SHIM_COMPARE(intmax_t, "%jd", a, >, b)
#define ck_assert_int_ge(a, b)    SHIM_COMPARE(intmax_t, "%jd", a, >=, b)
#define ck_assert_uint_eq(a, b)   SHIM_COMPARE(uintmax_t, "%ju", a, ==, b)
#define ck_assert_uint_ne(a, b)   SHIM_COMPARE(uintmax_t, "%ju", a, !=, b)
#define ck_assert_uint_lt(a, b)   SHIM_COMPARE(uintmax_t, "%ju", a, <, b)
#define ck_assert_uint_le(a, b)   SHIM_COMPARE(uintmax_t, "%ju", a, <=, b)
#define ck_assert_uint_gt(a, b)   SHIM_COMPARE(uintmax_t, "%ju", a, >, b)
#define ck_assert_uint_ge(a, b)   SHIM_COMPARE(uintmax_t, "%ju", a, >=, b)
#define ck_assert_ptr_eq(a, b)    SHIM_COMPARE(const void *, "%p", a, ==, b)
#define ck_assert_ptr_nonnull(a)  SHIM_COMPARE(const void *, "%p", a, !=, NULL)
#define ck_assert_ptr_null(a)     SHIM_COMPARE(const void *, "%p", a, ==, NULL)
#define ck_assert_str_eq(a, b)    ck_assert_msg(strcmp(a, b) == 0, "'%s' is not '%s'", a, b)
#define ck_assert_mem_eq(a, b, n) ck_assert_msg(memcmp(a, b, n) == 0, "%s differs from %s", #a, #b)

static inline Suite *suite_create(const char *name)
{
    (void)printf("Running suite(s): %s\n", name);
    return calloc(1, sizeof(Suite));
}

static inline TCase *tcase_create(const char *name)
{
    (void)name;
    return calloc(1, sizeof(TCase));
}

static inline void tcase_set_timeout(TCase *c, double seconds)
{
    c->timeout_s = (unsigned)seconds;
}

static inline void tcase_add_test(TCase *c, const TTest *test)
{
    c->test = test;
}

static inline void suite_add_tcase(Suite *s, TCase *c)
{
    s->timeout_s[s->n] = c->timeout_s;
    s->tests[s->n++] = c->test;
    free(c);
}

static inline SRunner *srunner_create(Suite *s)
{
    return s;
}

/* CK_RUN_CASE picks one, as with Check. */
static inline void srunner_run_all(SRunner *r, enum print_output how)
{
    const char *only = getenv("CK_RUN_CASE");
    int n = 0;
    (void)how;
    for (int i = 0; i < r->n; i++) {
        int status = 0;
        if (only != NULL && strcmp(only, r->tests[i]->name) != 0)
            continue;
        (void)fflush(NULL);
        pid_t pid = fork();
        if (pid == 0) {
            (void)alarm(r->timeout_s[i]);
            r->tests[i]->fn(0);
            _exit(0);
        }
        n++;
        if (waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        r->failed++;
        (void)printf("FAIL %s (%s %d)\n", r->tests[i]->name,
                     WIFEXITED(status) ? "exit status" : "signal",
                     WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    }
    (void)printf("%d%%: Checks: %d, Failures: %d, Errors: 0\n",
                 n == 0 ? 0 : 100 * (n - r->failed) / n, n, r->failed);
}

static inline int srunner_ntests_failed(const SRunner *r)
{
    return r->failed;
}

static inline void srunner_free(SRunner *r)
{
    free(r);
}

#endif
