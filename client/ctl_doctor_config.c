/* The settings, as reshardd itself reads them: it is run with --check-config, so that nothing is parsed twice. */
#include <errno.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/ctl_doctor.h"

#include "base/banned.h"

extern char **environ;

/* The reshardd beside this program, where it was built or installed; else the one on PATH. */
static void find_daemon(char *ret, size_t capacity)
{
    char self[400];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    char *slash = NULL;
    if (n > 0) {
        self[n] = '\0';
        slash = strrchr(self, '/');
    }
    if (slash != NULL)
        *slash = '\0';
    (void)snprintf(ret, capacity, "%s/reshardd", slash != NULL ? self : ".");
    if (slash == NULL || access(ret, X_OK) != 0)
        (void)snprintf(ret, capacity, "reshardd");
}

/* Runs it with stdout and stderr into one pipe; 0 or an errno. */
static int run(const char *program, char *const argv[], int *ret_fd, pid_t *ret_pid)
{
    int fd[2];
    posix_spawn_file_actions_t actions;
    if (pipe(fd) != 0)
        return errno;
    int r = posix_spawn_file_actions_init(&actions);
    if (r == 0) {
        (void)posix_spawn_file_actions_adddup2(&actions, fd[1], STDOUT_FILENO);
        (void)posix_spawn_file_actions_adddup2(&actions, fd[1], STDERR_FILENO);
        (void)posix_spawn_file_actions_addclose(&actions, fd[0]);
        (void)posix_spawn_file_actions_addclose(&actions, fd[1]);
        r = posix_spawnp(ret_pid, program, &actions, NULL, argv, environ);
        (void)posix_spawn_file_actions_destroy(&actions);
    }
    (void)close(fd[1]);
    if (r != 0)
        (void)close(fd[0]);
    *ret_fd = fd[0];
    return r;
}

static void read_all(int fd, char *ret, size_t capacity)
{
    size_t at = 0;
    for (ssize_t n = 1; n > 0;) {
        char rest[256]; /* what does not fit is read all the same: it must not wait for us */
        n = at + 1 < capacity ? read(fd, ret + at, capacity - 1 - at) : read(fd, rest, sizeof rest);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n > 0 && at + 1 < capacity)
            at += (size_t)n;
    }
    ret[at] = '\0';
    (void)close(fd);
}

/* "settings are good: …, state_dir DIR" */
static void take_answer(struct doctor *d, int status, char *says)
{
    static const char key[] = ", state_dir ";
    says[strcspn(says, "\n")] = '\0';
    const char *dir = strstr(says, key);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || dir == NULL) {
        doctor_add(d, DOCTOR_FAILED, "config", "mend it: reshardd does not start with it", "%s",
                   says[0] != '\0' ? says : "reshardd --check-config failed and said nothing");
        return;
    }
    doctor_add(d, DOCTOR_OK, "config", NULL, "%s: %s", d->config, says);
    (void)snprintf(d->state_dir_text, sizeof d->state_dir_text, "%s", dir + sizeof key - 1);
    if (d->state_dir == NULL)
        d->state_dir = d->state_dir_text;
}

void doctor_config(struct doctor *d)
{
    char program[420], says[2048];
    int fd = -1, status = 0;
    pid_t pid = -1;
    if (d->config == NULL)
        return;
    find_daemon(program, sizeof program);
    const char *argv[] = {program, "--check-config", "--config", d->config, NULL, NULL, NULL};
    if (d->node != NULL) {
        argv[4] = "--node";
        argv[5] = d->node;
    }
    int r = run(program, (char *const *)(uintptr_t)argv, &fd, &pid);
    if (r != 0) {
        doctor_add(d, DOCTOR_FAILED, "config", "install reshardd beside reshardctl, or on PATH",
                   "%s could not be run: %s", program, strerror(r));
        return;
    }
    read_all(fd, says, sizeof says);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    take_answer(d, status, says);
}
