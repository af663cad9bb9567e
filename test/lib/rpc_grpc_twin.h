/* What tests of the gRPC side alone share (test/lib/rpc_twins.h): the service over gRPC, a look at it from outside. Header only;
 * one test program includes it. */
#ifndef RS_TEST_RPC_GRPC_TWIN_H
#define RS_TEST_RPC_GRPC_TWIN_H

#include <sys/socket.h>
#include <sys/un.h>

#include "test/lib/rpc_twins.h"

#define T "/test.v1.Twins/"

static inline void open_grpc(struct twin *t)
{
    twin_open(t, false);
}

static inline uint64_t now_ms(void)
{
    return clock_mono_ns() / 1000000;
}

static inline void echo_works(struct twin *t)
{
    void *reply = NULL;
    size_t n = 0;
    struct err e = {0};
    int r = rpc_call_unary(t->channel, T "Echo", "ping", 4, WAIT_MS, &reply, &n, &e);
    ck_assert_msg(r == 0, "echo: %s", err_text(&e, r));
    ck_assert_uint_eq(n, 4);
    ck_assert_int_eq(memcmp(reply, "ping", 4), 0);
    mem_free(reply);
}

static inline void get_n_calls(void *arg)
{
    struct twin *t = ((void **)arg)[0];
    *(uint32_t *)((void **)arg)[1] = rpc_server_n_calls(t->server);
}

static inline uint32_t n_calls(struct twin *t)
{
    uint32_t n = 0;
    void *args[2] = {t, &n};
    twin_run(t, get_n_calls, args);
    return n;
}

/* An answer may be read before the server has seen its call's end: waits for that. */
static inline void expect_no_calls(struct twin *t)
{
    uint64_t until = now_ms() + WAIT_MS;
    uint32_t n;
    while ((n = n_calls(t)) != 0 && now_ms() < until)
        ;
    ck_assert_uint_eq(n, 0);
}

/* What a stop leaves on purpose. */
static inline void remove_lock(const char *path)
{
    char lock[128];
    (void)snprintf(lock, sizeof lock, "%s.lock", path);
    ck_assert_int_eq(unlink(lock), 0);
}

static inline int connect_raw(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    (void)close(fd);
    return -1;
}

#endif
