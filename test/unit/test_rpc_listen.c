/* The listening sockets: whose socket file it is, its path, one port for one daemon,
 * loopback only. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rpc/rpc_listen.h"

static char directory[64];

static const char *in_directory(const char *name)
{
    static char path[256];
    if (directory[0] == '\0') {
        (void)snprintf(directory, sizeof directory, "/tmp/rs-listen-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(directory));
    }
    (void)snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static void remove_directory(void)
{
    char command[128];
    (void)snprintf(command, sizeof command, "rm -rf '%s'", directory);
    ck_assert_int_eq(system(command), 0);
}

/* A bound socket file, made without the code under test; listening where n_backlog >= 0. */
static int foreign_socket(const char *path, int n_backlog)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    if (n_backlog >= 0)
        ck_assert_int_eq(listen(fd, n_backlog), 0);
    return fd;
}

static int connect_to(const char *path, int flags)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | flags, 0);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    (void)close(fd);
    return -1;
}

static void expect_refused(const char *path, int code, const char *part)
{
    struct rpc_listener l;
    struct err e = {0};
    ck_assert_int_eq(rpc_listen_unix(&l, path, 0660, &e), code);
    ck_assert_msg(strstr(e.text, part) != NULL, "'%s' lacks '%s'", e.text, part);
    ck_assert_int_eq(l.fd, -1);
}

START_TEST(a_fresh_path_is_bound_with_its_mode_and_removed_at_close)
{
    const char *path = in_directory("s");
    struct rpc_listener l;
    struct stat st;
    (void)umask(077); /* the mode asked for holds whatever the umask */
    ck_assert_int_eq(rpc_listen_unix(&l, path, 0660, NULL), 0);
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777, 0660);
    int fd = connect_to(path, 0);
    ck_assert_int_ge(fd, 0);
    (void)close(fd);
    rpc_listener_close(&l);
    rpc_listener_close(&l);
    ck_assert_int_ne(access(path, F_OK), 0);
    remove_directory();
}
END_TEST

START_TEST(a_left_over_socket_is_replaced)
{
    const char *path = in_directory("s");
    struct rpc_listener l;
    (void)close(foreign_socket(path, 1)); /* its daemon died */
    ck_assert_int_eq(rpc_listen_unix(&l, path, 0660, NULL), 0);
    rpc_listener_close(&l);
    remove_directory();
}
END_TEST

START_TEST(a_living_daemon_s_socket_is_never_taken)
{
    const char *path = in_directory("s");
    struct stat before, after;
    int fd = foreign_socket(path, 4); /* lives, but never accepts: slow */
    ck_assert_int_eq(stat(path, &before), 0);
    expect_refused(path, RS_EEXIST, "another daemon lives there");
    ck_assert_int_eq(stat(path, &after), 0);
    ck_assert_uint_eq(before.st_ino, after.st_ino);
    (void)close(fd);
    remove_directory();
}
END_TEST

START_TEST(a_full_backlog_is_a_sign_of_life)
{
    const char *path = in_directory("s");
    int fd = foreign_socket(path, 0);
    int waiting[8];
    unsigned n = 0;
    while (n < 8 && (waiting[n] = connect_to(path, SOCK_NONBLOCK)) >= 0)
        n++;
    ck_assert_uint_lt(n, 8); /* the backlog is full, a further connect gets EAGAIN */
    expect_refused(path, RS_EEXIST, "another daemon lives there");
    ck_assert_int_eq(access(path, F_OK), 0);
    while (n > 0)
        (void)close(waiting[--n]);
    (void)close(fd);
    remove_directory();
}
END_TEST

START_TEST(of_two_starts_at_once_one_wins)
{
    const char *path = in_directory("s");
    int ready[2];
    unsigned n_won = 0;
    pid_t child[4];
    (void)close(foreign_socket(path, 1)); /* all of them find a left-over */
    ck_assert_int_eq(pipe(ready), 0);
    for (int i = 0; i < 4; i++) {
        child[i] = fork();
        if (child[i] != 0)
            continue;
        struct rpc_listener l;
        char go;
        (void)close(ready[1]);
        (void)!read(ready[0], &go, 1); /* end of file: all start */
        int r = rpc_listen_unix(&l, path, 0660, NULL);
        if (r == 0)
            (void)pause();
        _exit(r == RS_EEXIST ? 3 : 4);
    }
    (void)close(ready[1]);
    for (int i = 0; i < 3; i++) { /* three lose; the winner holds the lock until it is killed */
        int status;
        ck_assert_int_gt(wait(&status), 0);
        ck_assert_int_eq(WEXITSTATUS(status), 3);
    }
    int fd = connect_to(path, 0);
    ck_assert_int_ge(fd, 0);
    for (int i = 0; i < 4; i++)
        n_won += kill(child[i], SIGKILL) == 0;
    ck_assert_uint_eq(n_won, 1);
    remove_directory();
}
END_TEST

START_TEST(an_old_daemon_removes_its_own_socket_only)
{
    const char *path = in_directory("s");
    char lock[300];
    struct rpc_listener old, new;
    struct stat before, after;
    ck_assert_int_eq(rpc_listen_unix(&old, path, 0660, NULL), 0);
    (void)snprintf(lock, sizeof lock, "%s.lock", path);
    ck_assert_int_eq(unlink(path), 0); /* somebody cleaned up behind the old one's back */
    ck_assert_int_eq(unlink(lock), 0);
    ck_assert_int_eq(rpc_listen_unix(&new, path, 0660, NULL), 0);
    ck_assert_int_eq(stat(path, &before), 0);
    rpc_listener_close(&old);
    ck_assert_int_eq(stat(path, &after), 0);
    ck_assert_uint_eq(before.st_ino, after.st_ino);
    rpc_listener_close(&new);
    remove_directory();
}
END_TEST

START_TEST(what_is_no_socket_is_left_alone)
{
    const char *path = in_directory("file");
    char text[8] = {0};
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    ck_assert_int_eq(write(fd, "keep me", 7), 7);
    expect_refused(path, RS_EINVAL, "no socket");
    ck_assert_int_eq(pread(fd, text, 7, 0), 7);
    ck_assert_str_eq(text, "keep me");
    ck_assert_int_eq(symlink("file", in_directory("link")), 0);
    expect_refused(in_directory("link"), RS_EINVAL, "no socket");
    ck_assert_int_eq(symlink("nowhere", in_directory("dangling")), 0);
    expect_refused(in_directory("dangling"), RS_EINVAL, "no socket");
    ck_assert_int_eq(mkdir(in_directory("dir"), 0700), 0);
    expect_refused(in_directory("dir"), RS_EINVAL, "no socket");
    (void)close(fd);
    remove_directory();
}
END_TEST

START_TEST(a_locked_path_names_the_lock)
{
    struct rpc_listener l;
    const char *path = in_directory("s");
    ck_assert_int_eq(rpc_listen_unix(&l, path, 0660, NULL), 0);
    expect_refused(path, RS_EEXIST, "s.lock'");
    int fd = connect_to(path, 0); /* the loser left the winner's socket alone */
    ck_assert_int_ge(fd, 0);
    (void)close(fd);
    rpc_listener_close(&l);
    remove_directory();
}
END_TEST

START_TEST(paths_of_107_bytes_work_and_of_108_do_not)
{
    char name[128];
    struct rpc_listener l;
    size_t n = strlen(in_directory(""));
    memset(name, 'p', sizeof name);
    name[107 - n] = '\0';
    const char *path = in_directory(name);
    ck_assert_uint_eq(strlen(path), 107);
    ck_assert_int_eq(rpc_listen_unix(&l, path, 0600, NULL), 0);
    int fd = connect_to(path, 0);
    ck_assert_int_ge(fd, 0);
    (void)close(fd);
    rpc_listener_close(&l);
    name[107 - n] = 'p';
    name[108 - n] = '\0';
    expect_refused(in_directory(name), RS_EINVAL, "has 108 bytes, at most 107");
    remove_directory();
}
END_TEST

START_TEST(other_bad_paths_are_refused_with_the_cause)
{
    expect_refused("", RS_EINVAL, "a path in the file system");
    expect_refused("@abstract", RS_EINVAL, "a path in the file system");
    expect_refused(in_directory("missing/s"), RS_ENOTFOUND, "directory does not exist");
    remove_directory();
}
END_TEST

START_TEST(a_port_has_one_daemon)
{
    struct rpc_listener a, b;
    struct err e = {0};
    char address[32];
    ck_assert_int_eq(rpc_listen_tcp(&a, "127.0.0.1:0", NULL), 0);
    ck_assert_uint_ne(a.port, 0);
    (void)snprintf(address, sizeof address, "localhost:%u", a.port);
    ck_assert_int_eq(rpc_listen_tcp(&b, address, &e), RS_EEXIST);
    ck_assert_ptr_nonnull(strstr(e.text, "in use"));
    rpc_listener_close(&a);
    ck_assert_int_eq(rpc_listen_tcp(&b, address, &e), 0);
    rpc_listener_close(&b);
}
END_TEST

static int option_of(int fd, int level, int name)
{
    int value = -1;
    socklen_t n = sizeof value;
    ck_assert_int_eq(getsockopt(fd, level, name, &value, &n), 0);
    return value;
}

START_TEST(the_kernel_looks_after_a_connection_over_tcp)
{
    struct rpc_listener l;
    ck_assert_int_eq(rpc_listen_tcp(&l, "127.0.0.1:0", NULL), 0);
    rpc_listener_limit(&l, 0);
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons(l.port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int client = socket(AF_INET, SOCK_STREAM, 0);
    ck_assert_int_eq(connect(client, (struct sockaddr *)&a, sizeof a), 0);
    int fd = rpc_listener_accept(&l);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(option_of(fd, SOL_SOCKET, SO_KEEPALIVE), 1);
    ck_assert_int_le(option_of(fd, IPPROTO_TCP, TCP_KEEPIDLE) +
                         option_of(fd, IPPROTO_TCP, TCP_KEEPCNT) *
                             option_of(fd, IPPROTO_TCP, TCP_KEEPINTVL),
                     3); /* s, in which a cut is to be seen */
    ck_assert_int_ne(option_of(fd, IPPROTO_TCP, TCP_NODELAY), 0);
    (void)close(fd);
    (void)close(client);
    rpc_listener_close(&l);
}
END_TEST

START_TEST(only_loopback_is_served_without_tls)
{
    static const char *const refused[] = {"0.0.0.0:0", "10.0.0.1:7070", "[::]:0",
                                          "[2001:db8::1]:1"};
    static const char *const malformed[] = {"127.0.0.1",       "127.0.0.1:",   ":7070",
                                            "127.0.0.1:65536", "127.0.0.1:7x", "host:1",
                                            "[::1:7070",       "127.0.0.1:-1"};
    struct rpc_listener l;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        struct err e = {0};
        ck_assert_int_eq(rpc_listen_tcp(&l, refused[i], &e), RS_EINVAL);
        ck_assert_msg(strstr(e.text, "needs TLS") != NULL, "%s: %s", refused[i], e.text);
    }
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++)
        ck_assert_msg(rpc_listen_tcp(&l, malformed[i], NULL) == RS_EINVAL, "%s", malformed[i]);
    ck_assert_int_eq(rpc_listen_tcp(&l, "127.9.9.9:0", NULL), 0);
    rpc_listener_close(&l);
}
END_TEST

START_TEST(connections_near_the_descriptor_limit_are_turned_away)
{
    const char *path = in_directory("s");
    struct rlimit limit = {64, 64};
    struct rpc_listener l;
    int client[40];
    unsigned n_taken = 0;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    ck_assert_int_eq(rpc_listen_unix(&l, path, 0600, NULL), 0);
    rpc_listener_limit(&l, 0);
    ck_assert_int_eq(l.max_fd, 48); /* a quarter of 64 is kept for others */
    for (int i = 0; i < 26; i++) {
        client[i] = connect_to(path, 0);
        ck_assert_int_ge(client[i], 0);
        n_taken += rpc_listener_accept(&l) >= 0;
    }
    ck_assert_uint_gt(n_taken, 10); /* two descriptors each in this process */
    ck_assert_uint_lt(n_taken, 26);
    /* None left at all: still no connection stays in the backlog to wake us again and again. */
    int hoard[64], n_hoard = 0, waiting = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path, path, strlen(path) + 1);
    while ((hoard[n_hoard] = dup(0)) >= 0)
        n_hoard++;
    ck_assert_int_eq(errno, EMFILE);
    ck_assert_int_eq(connect(waiting, (struct sockaddr *)&a, sizeof a), 0);
    ck_assert_int_eq(rpc_listener_accept(&l), -1);
    ck_assert_int_eq(errno, EAGAIN);
    char byte;
    ck_assert_int_le(read(waiting, &byte, 1), 0); /* closed, not hanging */
    while (n_hoard > 0)
        (void)close(hoard[--n_hoard]);
    rpc_listener_close(&l);
    remove_directory();
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_fresh_path_is_bound_with_its_mode_and_removed_at_close)                                    \
    X(a_left_over_socket_is_replaced)                                                              \
    X(a_living_daemon_s_socket_is_never_taken)                                                     \
    X(a_full_backlog_is_a_sign_of_life)                                                            \
    X(of_two_starts_at_once_one_wins)                                                              \
    X(an_old_daemon_removes_its_own_socket_only)                                                   \
    X(what_is_no_socket_is_left_alone)                                                             \
    X(a_locked_path_names_the_lock)                                                                \
    X(paths_of_107_bytes_work_and_of_108_do_not)                                                   \
    X(other_bad_paths_are_refused_with_the_cause)                                                  \
    X(a_port_has_one_daemon)                                                                       \
    X(the_kernel_looks_after_a_connection_over_tcp)                                                \
    X(only_loopback_is_served_without_tls)                                                         \
    X(connections_near_the_descriptor_limit_are_turned_away)

#include "test/lib/main.h"
