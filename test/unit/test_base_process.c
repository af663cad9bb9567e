/* Who a process is: CASES C24 and C16 (a pid alone names another process in another namespace, and later). */
#include <check.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/process.h"

static double boot_seconds(void)
{
    struct timespec t;
    ck_assert_int_eq(clock_gettime(CLOCK_BOOTTIME, &t), 0);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Waits for its end, under a name that would end fields of /proc/PID/stat early. */
static _Noreturn void be_child(int ready)
{
    (void)prctl(PR_SET_NAME, "a) 1 (b");
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (write(ready, "x", 1) == 1)
        pause();
    _exit(0);
}

static pid_t child_new(void)
{
    int ready[2];
    char byte;
    ck_assert_int_eq(pipe(ready), 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0)
        be_child(ready[1]);
    ck_assert_int_eq(read(ready[0], &byte, 1), 1);
    (void)close(ready[0]);
    (void)close(ready[1]);
    return pid;
}

static void child_end(pid_t pid)
{
    (void)kill(pid, SIGKILL);
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
}

START_TEST(a_process_is_known_by_namespace_pid_and_start)
{
    struct process_id self, again, child, none = {0};
    ck_assert(process_id_self(&self));
    ck_assert(process_id_of((int32_t)getpid(), &again));
    ck_assert(process_id_equal(&self, &again));
    ck_assert_int_eq(self.pid, getpid());
    double before = boot_seconds(), tick = 1.0 / (double)sysconf(_SC_CLK_TCK);
    pid_t pid = child_new();
    ck_assert(process_id_of(pid, &child));
    ck_assert_double_ge((double)child.start * tick, before - tick);
    ck_assert_double_le((double)child.start * tick, boot_seconds());
    ck_assert_uint_eq(child.pid_namespace, self.pid_namespace);
    ck_assert(!process_id_equal(&self, &child));
    again = self;
    again.start++;
    ck_assert(!process_id_equal(&self, &again));
    again = self;
    again.pid_namespace++;
    ck_assert(!process_id_equal(&self, &again));
    ck_assert(!process_id_equal(&none, &none));
    child_end(pid);
}
END_TEST

START_TEST(what_is_no_process_is_not_known)
{
    struct process_id id = {.pid = 77};
    pid_t pid = child_new();
    child_end(pid);
    const int32_t none[] = {0, -1, (int32_t)pid};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        ck_assert(!process_id_of(none[i], &id));
    ck_assert_int_eq(id.pid, 77);
}
END_TEST

/* A process whose children are in a namespace of their own, so not this one (whose sanitizer makes threads). It tells the
 * child's pid, 0 where it has no right to, and ends with that one. */
static _Noreturn void be_parent_elsewhere(int told)
{
    pid_t pid = 0;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    int ready[2];
    char byte;
    if (unshare(CLONE_NEWPID) == 0 && pipe(ready) == 0) {
        pid = fork();
        if (pid == 0)
            be_child(ready[1]);
        if (read(ready[0], &byte, 1) != 1)
            _exit(1);
    }
    if (write(told, &pid, sizeof pid) != (ssize_t)sizeof pid)
        _exit(1);
    if (pid > 0)
        (void)waitpid(pid, NULL, 0);
    _exit(0);
}

START_TEST(a_process_of_another_pid_namespace_is_seen_to_be_of_another)
{
    struct process_id self, child;
    int told[2], status = -1;
    pid_t pid = -1;
    ck_assert_int_eq(pipe(told), 0);
    pid_t parent = fork();
    ck_assert_int_ge(parent, 0);
    if (parent == 0)
        be_parent_elsewhere(told[1]);
    ck_assert_int_eq(read(told[0], &pid, sizeof pid), sizeof pid);
    if (pid > 0) {
        ck_assert(process_id_self(&self));
        ck_assert(process_id_of(pid, &child));
        ck_assert_uint_ne(child.pid_namespace, self.pid_namespace);
        (void)kill(pid, SIGKILL);
    }
    ck_assert_int_eq(waitpid(parent, &status, 0), parent);
    ck_assert_int_eq(status, 0);
    (void)close(told[0]);
    (void)close(told[1]);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_process_is_known_by_namespace_pid_and_start)                                               \
    X(what_is_no_process_is_not_known)                                                             \
    X(a_process_of_another_pid_namespace_is_seen_to_be_of_another)
#include "test/lib/main.h"
