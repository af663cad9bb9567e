/* A real reshardd for benchmarks: both processes, in a folder of its own, looked at from outside.
 *
 * Test code: failures end the process with a line on stderr. */
#ifndef RS_TEST_BENCH_DAEMON_H
#define RS_TEST_BENCH_DAEMON_H

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/memory_socket.h"

extern char **environ;

/* What test/bench/fsync_clock.c counts inside the daemon. */
struct fsync_clock {
    _Atomic uint64_t n_calls, ns;
};

struct bench_daemon {
    char folder[128], socket[160], config[160], log[160]; /* the ledger lies in folder too */
    pid_t pid, child;                                     /* control process, data plane */
    struct fsync_clock *fsyncs;
};

__attribute__((noreturn, format(printf, 1, 2))) static inline void bench_die(const char *format,
                                                                             ...)
{
    va_list args;
    va_start(args, format);
    (void)fprintf(stderr, "bench: ");
    (void)vfprintf(stderr, format, args);
    (void)fprintf(stderr, "\n");
    va_end(args);
    exit(1);
}

static inline void bench_write(const char *path, const char *format, ...)
{
    va_list args;
    FILE *f = fopen(path, "w");
    if (f == NULL)
        bench_die("%s: %s", path, strerror(errno));
    va_start(args, format);
    (void)vfprintf(f, format, args);
    va_end(args);
    if (fclose(f) != 0)
        bench_die("%s: %s", path, strerror(errno));
}

static inline struct fsync_clock *bench_fsync_clock(const char *folder, char *ret_path, size_t n)
{
    (void)snprintf(ret_path, n, "%s/fsyncs", folder);
    int fd = open(ret_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(struct fsync_clock)) != 0)
        bench_die("%s: %s", ret_path, strerror(errno));
    void *p = mmap(NULL, sizeof(struct fsync_clock), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        bench_die("%s: %s", ret_path, strerror(errno));
    (void)close(fd);
    return p;
}

static inline pid_t bench_spawn(const char *program, char **argv, const char *log)
{
    pid_t pid;
    posix_spawn_file_actions_t actions;
    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawn_file_actions_addopen(&actions, 2, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    int r = posix_spawn(&pid, program, &actions, NULL, argv, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    if (r != 0)
        bench_die("%s: %s", program, strerror(r));
    return pid;
}

/* The process whose parent is `parent`; 0: none yet. */
static inline pid_t bench_child_of(pid_t parent)
{
    DIR *proc = opendir("/proc");
    pid_t found = 0;
    for (struct dirent *d; proc != NULL && found == 0 && (d = readdir(proc)) != NULL;) {
        char path[300], text[512] = "";
        if (!isdigit((unsigned char)d->d_name[0]))
            continue;
        (void)snprintf(path, sizeof path, "/proc/%s/stat", d->d_name);
        FILE *f = fopen(path, "r");
        size_t n = f == NULL ? 0 : fread(text, 1, sizeof text - 1, f);
        if (f != NULL)
            (void)fclose(f);
        text[n] = '\0';
        const char *end = strrchr(text, ')'); /* "pid (name) state ppid" */
        if (end != NULL && strlen(end) > 4 && strtol(end + 4, NULL, 10) == (long)parent)
            found = (pid_t)strtol(d->d_name, NULL, 10);
    }
    if (proc != NULL)
        (void)closedir(proc);
    return found;
}

static inline void bench_daemon_end(struct bench_daemon *d, int signal_number)
{
    char command[192];
    (void)kill(d->pid, signal_number);
    (void)waitpid(d->pid, NULL, 0);
    (void)snprintf(command, sizeof command, "rm -rf '%s'", d->folder);
    if (system(command) != 0)
        (void)fprintf(stderr, "bench: %s stays behind\n", d->folder);
    d->pid = 0;
}

/* The one that runs, for bench_die's exit; NULL: none. */
static struct bench_daemon *bench_running;

static inline void bench_at_exit(void)
{
    if (bench_running != NULL)
        bench_daemon_end(bench_running, SIGKILL);
}

static inline void bench_daemon_stop(struct bench_daemon *d)
{
    bench_running = NULL;
    (void)munmap(d->fsyncs, sizeof *d->fsyncs);
    bench_daemon_end(d, SIGTERM);
}

/* build: the folder of reshardd. settings: lines of config beyond node, socket and state_dir,
 * which stand in [daemon]. The ledger lies below `build`, on a disk rather than in memory. */
static inline void bench_daemon_start(struct bench_daemon *d, const char *build,
                                      const char *settings)
{
    char program[256], preload[300], clock[192], option[] = "--config";
    *d = (struct bench_daemon){0};
    if ((size_t)snprintf(d->folder, sizeof d->folder, "%s/bench-daemon-XXXXXX", build) >= 90)
        (void)snprintf(d->folder, sizeof d->folder, "/tmp/bench-daemon-XXXXXX");
    if (mkdtemp(d->folder) == NULL)
        bench_die("%s: %s", d->folder, strerror(errno));
    (void)snprintf(d->socket, sizeof d->socket, "%s/d", d->folder);
    (void)snprintf(d->config, sizeof d->config, "%s/conf", d->folder);
    (void)snprintf(d->log, sizeof d->log, "%s/log", d->folder);
    (void)snprintf(program, sizeof program, "%s/reshardd", build);
    (void)snprintf(preload, sizeof preload, "%s/bench/fsync_clock.so", build);
    bench_write(d->config, "[daemon]\nnode = n0\nsocket = %s\nstate_dir = %s\n%s", d->socket,
                d->folder, settings);
    d->fsyncs = bench_fsync_clock(d->folder, clock, sizeof clock);
    (void)setenv("LD_PRELOAD", preload, 1);
    (void)setenv("RESHARD_FSYNC_CLOCK", clock, 1);
    d->pid = bench_spawn(program, (char *[]){program, option, d->config, NULL}, d->log);
    bench_running = d;
    (void)unsetenv("LD_PRELOAD");
    (void)unsetenv("RESHARD_FSYNC_CLOCK");
}

/* --- memory --- */

/* Memory of both processes of a daemon, MiB. Clients' segments are the clients' memory, mapped. What
 * several processes share counts by parts (Pss); sealed memfds that only a descriptor keeps count
 * for the process that has it. */
struct bench_memory {
    double control, plane, segments;
};

enum { BENCH_MAX_MEMFDS = 4096 };

struct bench_inodes {
    unsigned long at[BENCH_MAX_MEMFDS];
    size_t n;
};

static inline bool bench_seen(struct bench_inodes *seen, unsigned long inode)
{
    for (size_t i = 0; i < seen->n; i++)
        if (seen->at[i] == inode)
            return true;
    if (seen->n < BENCH_MAX_MEMFDS)
        seen->at[seen->n++] = inode;
    return false;
}

static inline bool bench_is_segment(const char *name)
{
    return strstr(name, "/memfd:reshard (") != NULL; /* client/segment.c's name */
}

/* Kibibytes of what is mapped; notes the memfds among it. */
static inline double bench_mapped(pid_t pid, struct bench_inodes *mapped, double *segments)
{
    char path[64], line[512];
    bool segment = false;
    unsigned long from, to, inode, kib;
    double own = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/smaps", (int)pid);
    FILE *f = fopen(path, "r");
    if (f == NULL)
        bench_die("%s: %s", path, strerror(errno));
    while (fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &inode) == 3) {
            segment = bench_is_segment(line);
            if (strstr(line, "/memfd:") != NULL)
                (void)bench_seen(mapped, inode);
        } else if (sscanf(line, "Pss: %lu kB", &kib) == 1) {
            *(segment ? segments : &own) += (double)kib;
        }
    }
    (void)fclose(f);
    return own;
}

/* Kibibytes of memfds that are open and not in `seen`, each once. */
static inline double bench_unmapped(pid_t pid, struct bench_inodes *seen)
{
    char path[64], file[400], name[256];
    struct stat s;
    double kib = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *fds = opendir(path);
    for (struct dirent *d; fds != NULL && (d = readdir(fds)) != NULL;) {
        (void)snprintf(file, sizeof file, "%s/%s", path, d->d_name);
        ssize_t n = readlink(file, name, sizeof name - 1);
        name[n > 0 ? n : 0] = '\0';
        if (strncmp(name, "/memfd:", 7) == 0 && !bench_is_segment(name) && stat(file, &s) == 0 &&
            !bench_seen(seen, s.st_ino))
            kib += (double)s.st_blocks / 2;
    }
    if (fds != NULL)
        (void)closedir(fds);
    return kib;
}

static inline struct bench_memory bench_memory(pid_t control, pid_t plane)
{
    struct bench_inodes seen = {.n = 0};
    struct bench_memory m = {0};
    m.control = bench_mapped(control, &seen, &m.segments);
    m.plane = bench_mapped(plane, &seen, &m.segments);
    m.control += bench_unmapped(control, &seen);
    m.plane += bench_unmapped(plane, &seen);
    return (struct bench_memory){m.control / 1024, m.plane / 1024, m.segments / 1024};
}

/* CPU time that a process has used so far, in microseconds. */
static inline double bench_cpu_us(pid_t pid)
{
    char path[64], text[512] = "";
    unsigned long user = 0, kernel = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    if (f == NULL || fgets(text, sizeof text, f) == NULL)
        bench_die("%s: %s", path, strerror(errno));
    (void)fclose(f);
    char *end = strrchr(text, ')');
    if (end == NULL ||
        sscanf(end + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &kernel) != 2)
        bench_die("%s: not understood", path);
    return (double)(user + kernel) * 1e6 / (double)sysconf(_SC_CLK_TCK);
}

/* --- identity --- */

/* Says hello on the memory socket, as every local client does. The connection stays open. */
static inline void bench_hello(const char *socket_path, char ret_token[MEMORY_SOCKET_TOKEN_BYTES])
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct memory_record hello = {
        .magic = MEMORY_SOCKET_MAGIC, .type = MEMORY_HELLO, .protocol = MEMORY_SOCKET_PROTOCOL};
    struct memory_record welcome;
    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s.mem", socket_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) != 0 ||
        send(fd, &hello, sizeof hello, 0) != (ssize_t)sizeof hello ||
        recv(fd, &welcome, sizeof welcome, MSG_WAITALL) != (ssize_t)sizeof welcome ||
        welcome.type != MEMORY_WELCOME)
        bench_die("%s: no welcome", a.sun_path);
    (void)snprintf(ret_token, MEMORY_SOCKET_TOKEN_BYTES, "%s", welcome.token);
}

#endif
