/* main() of a unit test: define TESTS(X) as a list of X(test_name), then include this last.
 *
 * Check forks per test: threads, gRPC and CUDA start inside a test, never in main. CK_RUN_CASE and
 * the other variables of Check work. */
#include <check.h>
#include <stdlib.h>

/* A test's limit, a guard against hangs that a machine with twenty times more to do does not meet. Sanitized binaries are several
 * times slower. */
#ifndef TEST_TIMEOUT_S
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_TIMEOUT_S 600
#else
#define TEST_TIMEOUT_S 300
#endif
#endif

int main(void)
{
    Suite *suite = suite_create(__BASE_FILE__);
    TCase *tcase;
#define X(name)                                                                                    \
    tcase = tcase_create(#name);                                                                   \
    tcase_set_timeout(tcase, TEST_TIMEOUT_S);                                                      \
    tcase_add_test(tcase, name);                                                                   \
    suite_add_tcase(suite, tcase);
    TESTS(X)
#undef X
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
