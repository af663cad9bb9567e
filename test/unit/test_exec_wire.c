/* Packets of the control socket and the memfds that ride along. */
#include <check.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "exec/wire.h"

static void pair_open(int pair[2], int flags)
{
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0, pair), 0);
}

static void pair_close(const int pair[2])
{
    close(pair[0]);
    close(pair[1]);
}

START_TEST(a_packet_arrives_whole_with_table_and_descriptors)
{
    int pair[2], fds[3];
    struct wire_packet *p = calloc(1, sizeof(*p));
    struct wire_header h = {.type = WIRE_PREPARE, .request = 7, .model = 8, .worker = UINT64_MAX};
    uint8_t *table = malloc(40000);
    for (int i = 0; i < 40000; i++)
        table[i] = (uint8_t)(i * 7);
    for (int i = 0; i < 3; i++)
        fds[i] = wire_memfd("x", "abc", (size_t)i, NULL);
    pair_open(pair, 0);
    ck_assert_int_eq(wire_send(pair[0], &h, "body", 4, table, 40000, fds, 3, NULL), 0);
    ck_assert_int_eq(wire_receive(pair[1], p, NULL), 0);
    ck_assert_uint_eq(p->header.protocol, WIRE_PROTOCOL);
    ck_assert_uint_eq(p->header.type, WIRE_PREPARE);
    ck_assert_uint_eq(p->header.request, 7);
    ck_assert_uint_eq(p->header.worker, UINT64_MAX);
    ck_assert_uint_eq(p->header.body_bytes, 40004);
    ck_assert_int_eq(memcmp(p->body, "body", 4), 0);
    ck_assert_int_eq(memcmp((const char *)p->body + 4, table, 40000), 0);
    ck_assert_uint_eq(p->n_fds, 3);
    for (int i = 0; i < 3; i++) {
        const void *data;
        size_t n;
        ck_assert_int_ne(fcntl(p->fds[i], F_GETFD) & FD_CLOEXEC, 0);
        ck_assert_int_eq(wire_map_fd(p->fds[i], &data, &n, NULL), 0);
        ck_assert_uint_eq(n, (size_t)i);
        ck_assert_int_eq(memcmp(data, "abc", n), 0);
        wire_unmap(data, n);
        close(fds[i]);
    }
    int taken = p->fds[1];
    p->fds[1] = -1;
    wire_packet_close(p);
    ck_assert_int_ne(fcntl(taken, F_GETFD), -1);
    close(taken);
    pair_close(pair);
    free(table);
    free(p);
}
END_TEST

START_TEST(nothing_there_gone_and_too_large_are_told_apart)
{
    int pair[2];
    struct wire_packet *p = calloc(1, sizeof(*p));
    struct wire_header h = {.type = WIRE_START};
    char *big = calloc(1, WIRE_MAX_BYTES);
    int fds[WIRE_MAX_FDS + 1] = {0};
    pair_open(pair, SOCK_NONBLOCK);
    ck_assert_int_eq(wire_receive(pair[1], p, NULL), 1);
    ck_assert_int_eq(wire_send(pair[0], &h, big, WIRE_MAX_BYTES, NULL, 0, NULL, 0, NULL),
                     RS_EINVAL);
    ck_assert_int_eq(wire_send(pair[0], &h, big, 8, big, SIZE_MAX, NULL, 0, NULL), RS_EINVAL);
    ck_assert_int_eq(wire_send(pair[0], &h, NULL, 0, NULL, 0, fds, WIRE_MAX_FDS + 1, NULL),
                     RS_EINVAL);
    size_t most = WIRE_MAX_BYTES - sizeof(h);
    ck_assert_int_eq(wire_send(pair[0], &h, big, most, NULL, 0, NULL, 0, NULL), 0);
    ck_assert_int_eq(wire_receive(pair[1], p, NULL), 0);
    ck_assert_uint_eq(p->header.body_bytes, most);
    close(pair[0]);
    ck_assert_int_eq(wire_receive(pair[1], p, NULL), RS_EPEER);
    ck_assert_int_eq(wire_send(pair[1], &h, NULL, 0, NULL, 0, NULL, 0, NULL), RS_EPEER);
    close(pair[1]);
    free(big);
    free(p);
}
END_TEST

/* How many descriptors this process has open. */
static int open_fds(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) != -1;
    return n;
}

START_TEST(malformed_packets_are_refused_and_leak_no_descriptor)
{
    int pair[2];
    struct wire_packet *p = calloc(1, sizeof(*p));
    char *raw = calloc(1, 2 * WIRE_MAX_BYTES);
    struct wire_header h = {.protocol = WIRE_PROTOCOL, .type = WIRE_START};
    pair_open(pair, 0);
    int before = open_fds();
    enum { MORE_FDS = WIRE_MAX_FDS + 1 };
    int fds[MORE_FDS];
    for (int i = 0; i < MORE_FDS; i++)
        fds[i] = wire_memfd("x", "y", 1, NULL);
    /* Short; another protocol; a body that its header does not tell; more bytes than any has. */
    struct wire_header wrong = h;
    wrong.protocol++;
    struct wire_header body = h;
    body.body_bytes = 5;
    const struct {
        const void *data;
        size_t bytes;
    } bad[] = {{&h, 3}, {&wrong, sizeof(wrong)}, {&body, sizeof(body)}, {raw, WIRE_MAX_BYTES + 1}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        union {
            struct cmsghdr align;
            char data[CMSG_SPACE(MORE_FDS * sizeof(int))];
        } control = {0};
        unsigned n = i == 0 ? MORE_FDS : 2; /* the first has more than a packet can hold, too */
        struct iovec part = {(void *)(uintptr_t)bad[i].data, bad[i].bytes};
        struct msghdr m = {.msg_iov = &part,
                           .msg_iovlen = 1,
                           .msg_control = control.data,
                           .msg_controllen = CMSG_SPACE(n * sizeof(int))};
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n * sizeof(int));
        ck_assert_int_eq(sendmsg(pair[0], &m, 0), (ssize_t)bad[i].bytes);
        ck_assert_int_eq(wire_receive(pair[1], p, NULL), RS_EPROTO);
    }
    for (int i = 0; i < MORE_FDS; i++)
        close(fds[i]);
    ck_assert_int_eq(open_fds(), before);
    pair_close(pair);
    free(raw);
    free(p);
}
END_TEST

START_TEST(only_sealed_memfds_are_mapped)
{
    const void *data;
    size_t n;
    struct err e = {0};
    int plain = memfd_create("x", MFD_ALLOW_SEALING), file = open("/dev/zero", O_RDONLY);
    ck_assert_int_eq(write(plain, "x", 1), 1);
    ck_assert_int_eq(wire_map_fd(plain, &data, &n, &e), RS_EPROTO);
    ck_assert_int_eq(fcntl(plain, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    ck_assert_int_eq(wire_map_fd(plain, &data, &n, NULL), RS_EPROTO);
    ck_assert_int_eq(wire_map_fd(file, &data, &n, NULL), RS_EPROTO);
    ck_assert_int_eq(wire_map_fd(-1, &data, &n, NULL), RS_EPROTO);
    int sealed = wire_memfd("x", "content", 7, NULL);
    ck_assert_int_eq(ftruncate(sealed, 0), -1);
    ck_assert_int_eq(write(sealed, "y", 1), -1);
    close(plain);
    close(file);
    close(sealed);
}
END_TEST

START_TEST(types_have_names)
{
    for (uint32_t t = WIRE_HELLO; t <= WIRE_FAILED; t++)
        ck_assert_str_ne(wire_type_name(t), "unknown");
    ck_assert_str_eq(wire_type_name(0), "unknown");
    ck_assert_str_eq(wire_type_name(WIRE_COMM_ID_MADE + 1), "unknown");
    ck_assert_str_eq(wire_type_name(WIRE_QUIESCED), "QUIESCED");
}
END_TEST

START_TEST(about_one_cell_in_sixteen_is_sampled_and_plans_differ)
{
    uint8_t a[16] = {1, 2, 3}, b[16] = {3, 2, 1};
    int n_a = 0, n_both = 0;
    for (uint64_t cell = 0; cell < 16000; cell++) {
        n_a += wire_sampled(a, cell);
        n_both += wire_sampled(a, cell) && wire_sampled(b, cell);
    }
    ck_assert_int_gt(n_a, 850);
    ck_assert_int_lt(n_a, 1150);
    ck_assert_int_lt(n_both, 150);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_packet_arrives_whole_with_table_and_descriptors)                                           \
    X(nothing_there_gone_and_too_large_are_told_apart)                                             \
    X(malformed_packets_are_refused_and_leak_no_descriptor)                                        \
    X(only_sealed_memfds_are_mapped)                                                               \
    X(types_have_names)                                                                            \
    X(about_one_cell_in_sixteen_is_sampled_and_plans_differ)

#include "test/lib/main.h"
