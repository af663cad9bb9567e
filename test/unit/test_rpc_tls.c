/* TLS: who is let in and under which name, who is not, what start-up says of bad files, and a server that
 * goes on whatever strangers do. */
#include "test/lib/link_twins.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/random.h"
#include "test/lib/certs.h"

#define T "/test.v1.Twins/"

/* --- a server with TLS, and links to it ------------------------------------------------------- */

struct secure {
    struct certs certs;
    struct cert_files server, client;
    struct rpc_address address[2];
    struct linked p; /* its link is the one under test */
    uint16_t port;
    uint32_t handshake_timeout_ms; /* 0: WAIT_MS, so that a busy machine's handshakes end well */
};

/* As long as strangers are waited for, who never end a handshake, and as short as others must have ended it. */
#define STRANGER_MS 3000

/* Certificates, and a server on 127.0.0.1 and ::1; no link. */
static void secure_open(struct secure *s, bool anonymous)
{
    certs_open(&s->certs);
    certs_make_good(&s->certs, "n0", &s->server);
    certs_make_good(&s->certs, "n1", &s->client);
    linked_init(&s->p, false);
    s->address[0] = (struct rpc_address){"127.0.0.1:0", true};
    s->address[1] = (struct rpc_address){"[::1]:0", true};
    s->p.server_options.addresses = s->address;
    s->p.server_options.n_addresses = 2;
    s->p.server_options.tls = &s->server.files;
    s->p.server_options.tls_anonymous = anonymous;
    s->p.server_options.handshake_timeout_ms =
        s->handshake_timeout_ms == 0 ? WAIT_MS : s->handshake_timeout_ms;
    linked_serve(&s->p);
    s->port = rpc_server_address_port(s->p.server, 0);
    ck_assert_uint_ne(s->port, 0);
    ck_assert_uint_ne(rpc_server_address_port(s->p.server, 1), 0);
    ck_assert_uint_eq(rpc_server_address_port(s->p.server, 2), 0);
    (void)snprintf(s->p.target, sizeof s->p.target, "127.0.0.1:%u", s->port);
    s->p.options.tls = &s->client.files;
}

static void secure_close(struct secure *s)
{
    if (s->p.link != NULL)
        linked_disconnect(&s->p);
    linked_fini(&s->p);
    certs_close(&s->certs);
}

/* A new link; the old one's counts are forgotten. */
static void reconnect(struct secure *s)
{
    if (s->p.link != NULL)
        linked_disconnect(&s->p);
    s->p.n_up = s->p.n_down = s->p.n_closed = 0;
    s->p.up = false;
    linked_connect(&s->p);
}

static void expect_name(struct secure *s, const char *expected)
{
    struct heard h = {0};
    call_ask(&s->p, &h, T "Who", "x", 1);
    call_await_end(&h, 0);
    ck_assert_str_eq(h.last, expected);
}

/* A good client is still served. */
static void expect_service(struct secure *s)
{
    s->p.options.tls = &s->client.files;
    s->p.options.server_name = NULL;
    reconnect(s);
    expect_name(s, "2 0 0 0 n1");
}

/* The link as its options stand gets nowhere; down_text says why. */
static void expect_refused(struct secure *s)
{
    struct heard h = {0};
    reconnect(s);
    call_ask(&s->p, &h, T "Who", "x", 1);
    call_await_end(&h, RS_EUNAVAIL);
    linked_until(&s->p, &s->p.n_down, 1);
    ck_assert_uint_eq(s->p.n_up, 0);
    ck_assert_uint_eq(h.n_messages, 0);
}

static uint64_t n_refused(struct secure *s)
{
    return rpc_server_n_refused(s->p.server);
}

static void expect_refusal(struct secure *s, const char *part)
{
    char text[RPC_REFUSAL_BYTES];
    rpc_server_last_refusal(s->p.server, text);
    ck_assert_msg(strstr(text, part) != NULL, "'%s' lacks '%s'", text, part);
    ck_assert_ptr_null(strchr(text, '{'));
}

/* Turns until that many were refused, and more. */
static void await_refused(struct secure *s, uint64_t n)
{
    uint64_t until = clock_mono_ns() + WAIT_MS * 1000000ULL;
    while (n_refused(s) < n && clock_mono_ns() < until)
        linked_turn(&s->p);
    ck_assert_uint_ge(n_refused(s), n);
}

/* --- who is let in ---------------------------------------------------------------------------- */

START_TEST(a_caller_is_known_by_its_certificate_s_dns_name)
{
    struct secure s = {0};
    secure_open(&s, false);
    s.p.options.token = "token-of-7"; /* counts nothing here */
    linked_connect(&s.p);
    expect_name(&s, "2 0 0 0 n1");
    linked_until(&s.p, &s.p.n_up, 1);
    ck_assert_uint_eq(n_refused(&s), 0);
    secure_close(&s);
}
END_TEST

START_TEST(the_common_name_counts_where_there_is_no_dns_name)
{
    struct secure s = {0};
    struct cert_files files;
    secure_open(&s, false);
    certs_make(&s.certs, &(struct cert){.name = "x", .cn = "trainer one"}, &files);
    s.p.options.tls = &files.files;
    linked_connect(&s.p);
    expect_name(&s, "2 0 0 0 trainer one");
    certs_make(&s.certs,
               &(struct cert){.name = "y", .cn = "cn", .san = "IP:192.0.2.1,DNS:first,DNS:second"},
               &files);
    reconnect(&s);
    expect_name(&s, "2 0 0 0 first");
    secure_close(&s);
}
END_TEST

START_TEST(ipv6_is_served_and_verified_too)
{
    struct secure s = {0};
    secure_open(&s, false);
    (void)snprintf(s.p.target, sizeof s.p.target, "[::1]:%u",
                   rpc_server_address_port(s.p.server, 1));
    linked_connect(&s.p);
    expect_name(&s, "2 0 0 0 n1");
    secure_close(&s);
}
END_TEST

START_TEST(without_certificate_one_is_anonymous_where_that_is_allowed)
{
    struct secure s = {0};
    struct rpc_tls_files only_ca = {0};
    secure_open(&s, true);
    only_ca.ca = s.client.ca;
    s.p.options.tls = &only_ca;
    linked_connect(&s.p);
    expect_name(&s, "0 0 0 0");
    expect_service(&s);
    secure_close(&s);
}
END_TEST

START_TEST(the_unix_socket_stays_as_it_is_beside)
{
    struct secure s = {0};
    secure_open(&s, false);
    (void)snprintf(s.p.target, sizeof s.p.target, "unix:%s", s.p.path);
    s.p.options.tls = NULL;
    s.p.options.token = "token-of-7";
    linked_connect(&s.p);
    expect_name(&s, "1 7 1000 4242");
    secure_close(&s);
}
END_TEST

/* --- who is not ------------------------------------------------------------------------------- */

START_TEST(a_foreign_client_is_refused_and_counted)
{
    struct secure s = {0};
    struct cert_files files;
    secure_open(&s, false);
    certs_make(&s.certs, &(struct cert){.name = "n2", .san = "DNS:n1", .foreign = true}, &files);
    s.p.options.tls = &files.files;
    expect_refused(&s);
    await_refused(&s, 1);
    expect_refusal(&s, "certificate verify failed");
    ck_assert_msg(strstr(s.p.down_text, "may not trust our certificate") != NULL, "%s",
                  s.p.down_text);
    ck_assert_uint_eq(s.p.service.seen.n_opened, 0);
    expect_service(&s);
    secure_close(&s);
}
END_TEST

START_TEST(a_client_without_certificate_is_refused_and_counted)
{
    struct secure s = {0};
    struct rpc_tls_files only_ca = {0};
    secure_open(&s, false);
    only_ca.ca = s.client.ca;
    s.p.options.tls = &only_ca;
    expect_refused(&s);
    await_refused(&s, 1);
    expect_refusal(&s, "peer did not return a certificate");
    expect_service(&s);
    secure_close(&s);
}
END_TEST

START_TEST(plaintext_on_a_tls_port_is_refused_and_counted)
{
    struct secure s = {0};
    secure_open(&s, false);
    s.p.options.tls = NULL;
    expect_refused(&s);
    await_refused(&s, 1);
    expect_refusal(&s, "wrong version number");
    ck_assert_msg(strstr(s.p.down_text, "may want TLS") != NULL, "%s", s.p.down_text);
    expect_service(&s);
    secure_close(&s);
}
END_TEST

START_TEST(a_server_of_a_foreign_authority_is_not_believed)
{
    struct secure s = {0};
    struct rpc_tls_files files;
    char foreign[96];
    secure_open(&s, false);
    files = s.client.files;
    cert_path(&s.certs, "foreign-ca", ".pem", foreign);
    files.ca = foreign;
    s.p.options.tls = &files;
    expect_refused(&s);
    ck_assert_msg(strstr(s.p.down_text, "CERTIFICATE_VERIFY_FAILED") != NULL ||
                      strstr(s.p.down_text, "certificate verify failed") != NULL,
                  "%s", s.p.down_text);
    expect_service(&s);
    secure_close(&s);
}
END_TEST

START_TEST(a_server_of_another_name_is_not_believed)
{
    struct secure s = {0};
    secure_open(&s, false);
    s.p.options.server_name = "n7";
    expect_refused(&s);
    ck_assert_msg(strstr(s.p.down_text, "n7") != NULL, "%s", s.p.down_text);
    s.p.options.server_name = "n0";
    reconnect(&s);
    expect_name(&s, "2 0 0 0 n1");
    secure_close(&s);
}
END_TEST

START_TEST(tls_to_a_plaintext_port_gets_nowhere)
{
    struct secure s = {0};
    struct rpc_address plain = {"127.0.0.1:0", false};
    certs_open(&s.certs);
    certs_make_good(&s.certs, "n1", &s.client);
    linked_init(&s.p, false);
    s.p.server_options.addresses = &plain;
    s.p.server_options.n_addresses = 1;
    linked_serve(&s.p);
    (void)snprintf(s.p.target, sizeof s.p.target, "127.0.0.1:%u",
                   rpc_server_address_port(s.p.server, 0));
    s.p.options.tls = &s.client.files;
    expect_refused(&s);
    s.p.options.tls = NULL;
    reconnect(&s);
    expect_name(&s, "0 0 0 0");
    secure_close(&s);
}
END_TEST

/* --- strangers -------------------------------------------------------------------------------- */

static int connect_port(uint16_t port)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* Turns until the server has hung up. */
static void await_hang_up(struct secure *s, int fd)
{
    char bytes[512];
    uint64_t until = clock_mono_ns() + WAIT_MS * 1000000ULL;
    ssize_t n = 1;
    while (clock_mono_ns() < until) {
        n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            break;
        linked_turn(&s->p);
    }
    ck_assert_int_le(n, 0);
    ck_assert(n == 0 || errno == ECONNRESET);
    (void)close(fd);
}

START_TEST(random_bytes_are_refused_and_counted_and_hurt_nobody)
{
    struct secure s = {.handshake_timeout_ms = STRANGER_MS};
    uint64_t seed = 11;
    enum { N = 40 };
    int fd[N];
    secure_open(&s, false);
    for (int i = 0; i < N; i++) {
        uint8_t bytes[2048];
        for (size_t k = 0; k < sizeof bytes; k++)
            bytes[k] = (uint8_t)random_next(&seed);
        if (i % 2 == 0) /* looks like a ClientHello at first */
            memcpy(bytes, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
        fd[i] = connect_port(s.port);
        (void)!send(fd[i], bytes, 1 + random_next(&seed) % sizeof bytes, MSG_NOSIGNAL);
    }
    for (int i = 0; i < N; i++)
        await_hang_up(&s, fd[i]);
    await_refused(&s, N);
    expect_service(&s);
    secure_close(&s);
}
END_TEST

START_TEST(who_connects_and_says_nothing_is_hung_up_on)
{
    struct secure s = {.handshake_timeout_ms = STRANGER_MS};
    secure_open(&s, false);
    uint64_t begun = clock_mono_ns();
    await_hang_up(&s, connect_port(s.port));
    ck_assert_uint_ge(clock_mono_ns() - begun, STRANGER_MS * 900000ULL);
    await_refused(&s, 1);
    int gone = connect_port(s.port); /* or goes at once */
    (void)close(gone);
    await_refused(&s, 2);
    expect_service(&s);
    secure_close(&s);
}
END_TEST

/* Opens n connections to the port, says so, waits, closes them, says so. */
static void crowd(int go, int ready, int n)
{
    uint16_t port = 0;
    char byte;
    int fd[128];
    (void)!read(go, &port, sizeof port);
    for (int i = 0; i < n; i++)
        fd[i] = connect_port(port);
    (void)!write(ready, "r", 1);
    (void)!read(go, &byte, 1);
    for (int i = 0; i < n; i++)
        (void)close(fd[i]);
    _exit(0);
}

/* gRPC's own listener would stop accepting for good here. */
START_TEST(a_crowd_beyond_the_descriptors_is_turned_away_and_the_port_lives_on)
{
    struct secure s = {.handshake_timeout_ms = STRANGER_MS};
    struct rlimit limit = {96, 96};
    int go[2], ready[2];
    char byte;
    ck_assert_int_eq(pipe(go), 0);
    ck_assert_int_eq(pipe(ready), 0);
    pid_t child = fork(); /* before gRPC starts here */
    if (child == 0)
        crowd(go[0], ready[1], 120);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    secure_open(&s, false);
    ck_assert_int_eq(write(go[1], &s.port, sizeof s.port), (ssize_t)sizeof s.port);
    ck_assert_int_eq(read(ready[0], &byte, 1), 1); /* all are in the backlog */
    await_refused(&s, 90);
    int spare[8], n_spare = 0; /* the ledger and others still find descriptors */
    while (n_spare < 8 && (spare[n_spare] = dup(0)) >= 0)
        n_spare++;
    ck_assert_int_eq(n_spare, 8);
    while (n_spare > 0)
        (void)close(spare[--n_spare]);
    ck_assert_int_eq(write(go[1], "g", 1), 1);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    await_refused(&s, 120); /* those that were let in said nothing */
    expect_service(&s);
    secure_close(&s);
}
END_TEST

/* --- bytes through the relay ------------------------------------------------------------------ */

START_TEST(large_messages_and_long_streams_pass_whole)
{
    struct secure s = {0};
    struct heard size = {0}, count = {0};
    unsigned n = 1000;
    char *big = calloc(1, 4U << 20);
    secure_open(&s, false);
    linked_connect(&s.p);
    call_ask(&s.p, &size, T "Size", big, 4U << 20);
    call_ask(&s.p, &count, T "Count", &n, sizeof n);
    call_await_end(&size, 0);
    ck_assert_str_eq(size.last, "4194304");
    call_await_end(&count, 0);
    ck_assert_uint_eq(count.n_messages, 1000);
    ck_assert(count.in_order);
    free(big);
    secure_close(&s);
}
END_TEST

static void hold_self(struct heard *h)
{
    call_hold(h, true);
}

/* Held, it takes no more than what the windows hold. */
START_TEST(a_reader_that_does_not_read_is_cut_off_over_tls_too)
{
    struct secure s = {0};
    struct heard h = {.then = hold_self};
    secure_open(&s, false);
    linked_connect(&s.p);
    call_ask(&s.p, &h, T "Flood", "x", 1);
    linked_until(&s.p, &s.p.service.seen.n_ended, 1);
    ck_assert_int_eq(s.p.service.seen.last_reason, RS_EPEER);
    ck_assert_int_eq(s.p.service.seen.flood_result, RS_EEXHAUSTED);
    h.then = NULL;
    if (h.call != NULL)
        call_hold(&h, false);
    call_await_end(&h, RS_EEXHAUSTED);
    expect_service(&s);
    secure_close(&s);
}
END_TEST

START_TEST(a_stop_says_goodbye_through_the_relay)
{
    struct secure s = {0};
    struct heard watch[20] = {{0}};
    secure_open(&s, false);
    linked_connect(&s.p);
    for (int i = 0; i < 20; i++)
        call_ask(&s.p, &watch[i], T "Watch", "x", 1);
    linked_until(&s.p, &s.p.service.seen.n_messages, 20);
    linked_unserve_within(&s.p, WAIT_MS);
    for (int i = 0; i < 20; i++) {
        call_await_end(&watch[i], RS_EUNAVAIL);
        ck_assert_str_eq(watch[i].text, "the daemon stops");
    }
    secure_close(&s);
}
END_TEST

/* Strangers that sit there don't hold up a stop. */
START_TEST(a_stop_waits_for_no_stranger)
{
    struct secure s = {0};
    int fd[5];
    secure_open(&s, false);
    for (int i = 0; i < 5; i++)
        fd[i] = connect_port(s.port);
    linked_connect(&s.p);
    expect_name(&s, "2 0 0 0 n1");
    uint64_t begun = clock_mono_ns();
    linked_unserve(&s.p);
    ck_assert_uint_lt(clock_mono_ns() - begun, 3000000000U);
    for (int i = 0; i < 5; i++)
        (void)close(fd[i]);
    secure_close(&s);
}
END_TEST

/* --- a cut link ------------------------------------------------------------------------------- */

/* 1 s to the ping, 2 s for its answer, and a busy machine. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define MOST_NS 7000000000ULL
#else
#define MOST_NS 4000000000ULL
#endif

static bool set_loopback(bool up)
{
    struct ifreq r = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool done = fd >= 0 && ioctl(fd, SIOCGIFFLAGS, &r) == 0;
    r.ifr_flags = (short)(up ? r.ifr_flags | IFF_UP : r.ifr_flags & ~IFF_UP);
    done = done && ioctl(fd, SIOCSIFFLAGS, &r) == 0;
    (void)close(fd);
    return done;
}

/* In a network of its own, whose only link goes down: no packet, no reset, as a pulled cable. */
START_TEST(a_cut_link_shows_at_both_ends_and_heals)
{
    struct secure s = {0};
    struct heard watch = {0}, after = {0};
    if (unshare(CLONE_NEWNET) != 0 || !set_loopback(true)) {
        printf("skipped: a network namespace is not permitted here\n");
        return;
    }
    secure_open(&s, false);
    linked_connect(&s.p);
    linked_until(&s.p, &s.p.n_up, 1);
    call_ask(&s.p, &watch, T "Watch", "x", 1);
    linked_until(&s.p, &s.p.service.seen.n_messages, 1);
    ck_assert(set_loopback(false));
    uint64_t cut = clock_mono_ns();
    linked_until(&s.p, &s.p.n_down, 1);
    uint64_t link = clock_mono_ns() - cut;
    call_await_end(&watch, RS_EUNAVAIL);
    linked_until(&s.p, &s.p.service.seen.n_ended, 1);
    uint64_t server = clock_mono_ns() - cut;
    printf("cut link: the link saw it after %.0f ms, the server within %.0f ms\n",
           (double)link / 1e6, (double)server / 1e6);
    ck_assert_uint_lt(link, MOST_NS);
    ck_assert_uint_lt(server, MOST_NS);
    ck_assert(set_loopback(true));
    linked_until(&s.p, &s.p.n_up, 2);
    call_ask(&s.p, &after, T "Who", "x", 1);
    call_await_end(&after, 0);
    ck_assert_str_eq(after.last, "2 0 0 0 n1");
    secure_close(&s);
}
END_TEST

/* --- the blocking channel --------------------------------------------------------------------- */

START_TEST(a_blocking_channel_takes_tls_too)
{
    struct certs certs;
    struct cert_files server, client;
    struct twin t;
    struct rpc_address address = {"127.0.0.1:0", true};
    struct rpc_channel *c = NULL;
    char target[64];
    void *reply = NULL;
    size_t n = 0;
    struct err e = {0};
    certs_open(&certs);
    certs_make_good(&certs, "n0", &server);
    certs_make_good(&certs, "operator", &client);
    memset(&t, 0, sizeof t);
    seen_init(&t.service.seen);
    struct rpc_server_options o = twin_options(&t);
    o.addresses = &address;
    o.n_addresses = 1;
    o.tls = &server.files;
    twin_open_with(&t, false, &o, NULL);
    (void)snprintf(target, sizeof target, "127.0.0.1:%u", rpc_server_address_port(t.server, 0));
    ck_assert_int_eq(rpc_channel_open_tls(target, &client.files, NULL, NULL, &c, &e), 0);
    int r = rpc_call_unary(c, T "Who", "x", 1, WAIT_MS, &reply, &n, &e);
    ck_assert_msg(r == 0, "%s", err_text(&e, r));
    ck_assert_uint_eq(n, 16);
    ck_assert_int_eq(memcmp(reply, "2 0 0 0 operator", 16), 0);
    mem_free(reply);
    rpc_channel_close(c);
    ck_assert_int_eq(rpc_channel_open_tls(target, &client.files, "n9", NULL, &c, &e), 0);
    ck_assert_int_eq(rpc_call_unary(c, T "Who", "x", 1, WAIT_MS, &reply, &n, &e), RS_EUNAVAIL);
    rpc_channel_close(c);
    char missing[96];
    cert_path(&certs, "missing", ".pem", missing);
    struct rpc_tls_files bad = {.ca = missing};
    ck_assert_int_eq(rpc_channel_open_tls(target, &bad, NULL, NULL, &c, &e), RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(e.text, missing));
    twin_close(&t);
    certs_close(&certs);
}
END_TEST

/* --- files ------------------------------------------------------------------------------------ */

static void expect_bad_files(const struct rpc_tls_files *files, int code, const char *path,
                             const char *part)
{
    struct rpc_tls_pems pems = {0};
    struct err e = {0};
    int r = rpc_tls_load(files, &pems, &e);
    ck_assert_msg(r == code, "%d, not %d: %s", r, code, e.text);
    ck_assert_msg(strstr(e.text, path) != NULL && strstr(e.text, part) != NULL,
                  "'%s' lacks '%s' or '%s'", e.text, path, part);
    ck_assert_ptr_null(pems.ca);
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_ge(fputs(text, f), 0);
    ck_assert_int_eq(fchmod(fileno(f), 0600), 0);
    ck_assert_int_eq(fclose(f), 0);
}

START_TEST(bad_files_are_named_with_their_fault_and_remedy)
{
    struct certs c;
    struct cert_files good, other, old, young;
    struct rpc_tls_files f;
    char path[96];
    certs_open(&c);
    certs_make_good(&c, "n0", &good);
    certs_make_good(&c, "n1", &other);
    certs_make(&c, &(struct cert){.name = "old", .from_s = -7200, .until_s = -3600}, &old);
    certs_make(&c, &(struct cert){.name = "young", .from_s = 3600, .until_s = 7200}, &young);
    cert_path(&c, "bad", ".pem", path);

    f = good.files, f.ca = path;
    expect_bad_files(&f, RS_ENOTFOUND, path, "authority");
    f = good.files, f.certificate = path;
    expect_bad_files(&f, RS_ENOTFOUND, path, "certificate");
    f = good.files, f.key = path;
    expect_bad_files(&f, RS_ENOTFOUND, path, "key");
    f = good.files, f.key = NULL;
    expect_bad_files(&f, RS_EINVAL, good.certificate, "together");
    f = good.files, f.certificate = NULL;
    expect_bad_files(&f, RS_EINVAL, good.key, "together");
    f = good.files, f.ca = NULL;
    expect_bad_files(&f, RS_EINVAL, "", "authority");
    f = good.files, f.key = other.key;
    expect_bad_files(&f, RS_EINVAL, other.key, "does not belong to");
    expect_bad_files(&old.files, RS_EPRECOND, old.certificate, "expired at");
    expect_bad_files(&young.files, RS_EPRECOND, young.certificate, "not valid before");
    f = good.files, f.ca = old.certificate; /* an authority alone that has expired */
    expect_bad_files(&f, RS_EPRECOND, old.certificate, "expired");
    f = good.files, f.ca = c.directory;
    expect_bad_files(&f, RS_EINVAL, c.directory, "no PEM file");

    write_text(path, "-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n");
    f = good.files, f.ca = path;
    expect_bad_files(&f, RS_EINVAL, path, "holds no certificate");
    f = good.files, f.certificate = path;
    expect_bad_files(&f, RS_EINVAL, path, "holds no certificate");
    f = good.files, f.key = path;
    expect_bad_files(&f, RS_EINVAL, path, "private key");
    write_text(path, "");
    expect_bad_files(&f, RS_EINVAL, path, "no PEM file");

    EVP_PKEY *key = EVP_EC_gen("P-256");
    write_key(path, key, EVP_aes_128_cbc());
    EVP_PKEY_free(key);
    expect_bad_files(&f, RS_EINVAL, path, "without passphrase");

    ck_assert_int_eq(chmod(good.key, 0644), 0);
    expect_bad_files(&good.files, RS_EPERM, good.key, "chmod 600");
    ck_assert_int_eq(chmod(good.key, 0640), 0); /* a group of its own may read it */
    struct rpc_tls_pems pems = {0};
    ck_assert_int_eq(rpc_tls_load(&good.files, &pems, NULL), 0);
    rpc_tls_free(&pems);
    rpc_tls_free(&pems);
    if (geteuid() != 0) {
        ck_assert_int_eq(chmod(good.ca, 0000), 0);
        expect_bad_files(&good.files, RS_EPERM, good.ca, "read it");
    }
    certs_close(&c);
}
END_TEST

START_TEST(server_and_link_say_so_at_their_start)
{
    struct certs c;
    struct cert_files old;
    struct linked p;
    struct err e = {0};
    struct rpc_server *server = NULL;
    struct rpc_address address = {"127.0.0.1:0", true};
    certs_open(&c);
    certs_make(&c, &(struct cert){.name = "old", .from_s = -7200, .until_s = -3600}, &old);
    linked_init(&p, false);
    struct rpc_server_options o = {.addresses = &address, .n_addresses = 1, .tls = &old.files};
    ck_assert_int_eq(rpc_server_start(&p.loop, &o, methods, N_METHODS, &server, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "rpc server: TLS: certificate '"));
    ck_assert_ptr_nonnull(strstr(e.text, "expired at"));
    o.tls = NULL;
    ck_assert_int_eq(rpc_server_start(&p.loop, &o, methods, N_METHODS, &server, &e), RS_EINVAL);
    struct rpc_tls_files only_ca = {.ca = old.ca};
    o.tls = &only_ca;
    ck_assert_int_eq(rpc_server_start(&p.loop, &o, methods, N_METHODS, &server, &e), RS_EINVAL);
    struct rpc_link_options lo = {.target = "127.0.0.1:7000", .tls = &old.files};
    ck_assert_int_eq(rpc_link_open(&p.loop, &lo, &link_events, &p, &p.link, &e), RS_EPRECOND);
    ck_assert_ptr_nonnull(strstr(e.text, "link: TLS: certificate '"));
    lo = (struct rpc_link_options){.target = "unix:/tmp/x", .tls = &only_ca};
    ck_assert_int_eq(rpc_link_open(&p.loop, &lo, &link_events, &p, &p.link, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "server's name"));
    linked_fini(&p);
    certs_close(&c);
}
END_TEST

/* The authority is replaced too: who trusts the old one alone is out. */
START_TEST(certificates_can_be_replaced_while_connections_stand)
{
    struct secure s = {0};
    struct cert_files server, client;
    struct heard chat = {0};
    struct err e = {0};
    char foreign[96];
    secure_open(&s, false);
    linked_connect(&s.p);
    call_open(&s.p, &chat, T "Chat", 0);
    ck_assert_int_eq(call_send(&chat, "x", 1), 0);
    linked_until(&s.p, &chat.n_messages, 1);
    certs_make(&s.certs, &(struct cert){.name = "n0b", .san = "IP:127.0.0.1", .foreign = true},
               &server);
    certs_make(&s.certs, &(struct cert){.name = "n1b", .san = "DNS:n1b", .foreign = true}, &client);
    cert_path(&s.certs, "foreign-ca", ".pem", foreign);
    server.files.ca = client.files.ca = foreign;
    struct rpc_tls_files bad = server.files;
    bad.key = client.key;
    ck_assert_int_eq(rpc_server_reload_tls(s.p.server, &bad, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "does not belong to"));
    bad = (struct rpc_tls_files){.ca = foreign};
    ck_assert_int_eq(rpc_server_reload_tls(s.p.server, &bad, &e), RS_EINVAL);
    ck_assert_int_eq(rpc_server_reload_tls(s.p.server, &server.files, &e), 0);
    ck_assert_int_eq(call_send(&chat, "y", 1), 0); /* the old connection */
    linked_until(&s.p, &chat.n_messages, 2);
    s.p.options.tls = &client.files;
    reconnect(&s);
    expect_name(&s, "2 0 0 0 n1b");
    s.p.options.tls = &s.client.files;
    expect_refused(&s);
    await_refused(&s, 1);
    secure_close(&s);
}
END_TEST

START_TEST(a_link_takes_other_certificates_at_its_next_connection)
{
    struct secure s = {0};
    struct cert_files server, client;
    struct heard chat = {0};
    struct err e = {0};
    char foreign[96];
    secure_open(&s, false);
    linked_connect(&s.p);
    call_open(&s.p, &chat, T "Chat", 0);
    ck_assert_int_eq(call_send(&chat, "x", 1), 0);
    linked_until(&s.p, &chat.n_messages, 1);
    certs_make(&s.certs, &(struct cert){.name = "n0b", .san = "IP:127.0.0.1", .foreign = true},
               &server);
    certs_make(&s.certs, &(struct cert){.name = "n1b", .san = "DNS:n1b", .foreign = true}, &client);
    cert_path(&s.certs, "foreign-ca", ".pem", foreign);
    server.files.ca = client.files.ca = foreign;
    struct rpc_tls_files bad = client.files;
    bad.key = server.key;
    struct rpc_link_options o = s.p.options;
    o.tls = &bad;
    ck_assert_int_eq(rpc_link_reload_tls(s.p.link, &o, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "does not belong to"));
    o.tls = NULL;
    ck_assert_int_eq(rpc_link_reload_tls(s.p.link, &o, &e), RS_EPRECOND);
    o.tls = &client.files;
    for (int i = 0; i < 2; i++) /* the newest counts */
        ck_assert_int_eq(rpc_link_reload_tls(s.p.link, &o, &e), 0);
    ck_assert_int_eq(call_send(&chat, "y", 1), 0); /* on the old connection */
    linked_until(&s.p, &chat.n_messages, 2);
    expect_name(&s, "2 0 0 0 n1");

    linked_unserve(&s.p);
    s.address[0].address = s.p.target;
    s.p.server_options.tls = &server.files;
    linked_serve(&s.p);
    linked_until(&s.p, &s.p.n_up, 2);
    expect_name(&s, "2 0 0 0 n1b");

    linked_unserve(&s.p); /* and while it is down, from then on */
    linked_until_down(&s.p);
    o.tls = &s.client.files;
    ck_assert_int_eq(rpc_link_reload_tls(s.p.link, &o, &e), 0);
    s.p.server_options.tls = &s.server.files;
    linked_serve(&s.p);
    linked_until(&s.p, &s.p.n_up, 3);
    expect_name(&s, "2 0 0 0 n1");
    ck_assert_int_eq(rpc_link_reload_tls(s.p.link, &o, &e), 0); /* not taken before the close */
    secure_close(&s);
}
END_TEST

/* --- addresses -------------------------------------------------------------------------------- */

static int try_address(const char *address, bool insecure, struct err *e)
{
    uv_loop_t loop;
    struct service v = {0};
    struct rpc_server *s = NULL;
    struct rpc_address a = {address, false};
    struct rpc_server_options o = {
        .addresses = &a, .n_addresses = 1, .insecure_network = insecure, .context = &v};
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    int r = rpc_server_start(&loop, &o, methods, N_METHODS, &s, e);
    if (r == 0) {
        ck_assert_uint_ne(rpc_server_address_port(s, 0), 0);
        rpc_server_stop(s, 0, NULL, NULL);
    }
    ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    return r;
}

START_TEST(plaintext_beyond_loopback_wants_a_word)
{
    struct err e = {0};
    ck_assert_int_eq(try_address("0.0.0.0:0", false, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "needs TLS"));
    ck_assert_int_eq(try_address("[::]:0", false, &e), RS_EINVAL);
    ck_assert_int_eq(try_address("127.0.0.1:0", false, NULL), 0);
    ck_assert_int_eq(try_address("[::1]:0", false, NULL), 0);
    ck_assert_int_eq(try_address("0.0.0.0:0", true, NULL), 0);
    ck_assert_int_eq(try_address("[::]:0", true, NULL), 0);
}
END_TEST

START_TEST(addresses_that_can_not_be_are_named)
{
    struct err e = {0};
    ck_assert_int_eq(try_address("192.0.2.77:0", true, &e), RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "'192.0.2.77:0' is none of this machine's"));
    ck_assert_int_eq(try_address("[fe80::1%rs-none]:0", true, &e), RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "'rs-none'"));
    ck_assert_int_eq(try_address("127.0.0.1", true, &e), RS_EINVAL);
    ck_assert_int_eq(try_address("::1:7000", true, &e), RS_EINVAL);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    char text[32];
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, n), 0);
    ck_assert_int_eq(listen(fd, 1), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    (void)snprintf(text, sizeof text, "127.0.0.1:%u", ntohs(a.sin_port));
    ck_assert_int_eq(try_address(text, true, &e), RS_EEXIST);
    ck_assert_ptr_nonnull(strstr(e.text, "in use"));
    (void)close(fd);
}
END_TEST

/* --- memory ----------------------------------------------------------------------------------- */

START_TEST(every_failed_allocation_of_a_start_with_tls_is_an_error)
{
    struct certs c;
    struct cert_files files;
    struct rpc_address address = {"127.0.0.1:0", true};
    long i = 1;
    certs_open(&c);
    certs_make_good(&c, "n0", &files);
    for (bool struck = true; struck; i++) {
        uv_loop_t loop;
        struct rpc_server *s = NULL;
        struct service v = {0};
        struct rpc_server_options o = {
            .addresses = &address, .n_addresses = 1, .tls = &files.files, .context = &v};
        ck_assert_int_eq(uv_loop_init(&loop), 0);
        mem_fail_at(i);
        int r = rpc_server_start(&loop, &o, methods, N_METHODS, &s, NULL);
        struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        if (r == 0)
            rpc_server_stop(s, 0, NULL, NULL);
        ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
        ck_assert_int_eq(uv_loop_close(&loop), 0);
    }
    ck_assert_int_gt(i, 5);
    certs_close(&c);
}
END_TEST

/* --- scripts/dev-certs ------------------------------------------------------------------------ */

static int run_script(const char *directory, const char *names)
{
    char command[256];
    (void)snprintf(command, sizeof command, "scripts/dev-certs %s %s >%s.out 2>&1", directory,
                   names, directory);
    return system(command);
}

static ino_t inode_of(const char *directory, const char *file)
{
    char path[128];
    struct stat st;
    (void)snprintf(path, sizeof path, "%s/%s", directory, file);
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777U, 0600);
    return st.st_ino;
}

START_TEST(dev_certs_make_a_pair_that_talks_and_stay_as_they_are)
{
    char directory[] = "/tmp/rs-dev-certs-XXXXXX", command[64];
    char path[5][64];
    struct linked p;
    struct heard h = {0};
    struct rpc_address address = {"127.0.0.1:0", true};
    ck_assert_ptr_nonnull(mkdtemp(directory));
    if (run_script(directory, "n0") != 0) {
        printf("skipped: scripts/dev-certs does not run here\n");
        return;
    }
    ino_t before[2] = {inode_of(directory, "ca.pem"), inode_of(directory, "n0.key")};
    ck_assert_int_eq(run_script(directory, "n0 n1.example"), 0);
    ck_assert_uint_eq(inode_of(directory, "ca.pem"), before[0]);
    ck_assert_uint_eq(inode_of(directory, "n0.key"), before[1]);
    (void)inode_of(directory, "n1.example.key");
    ck_assert_int_ne(run_script(directory, "../evil"), 0);
    ck_assert_int_ne(run_script(directory, "ca"), 0);
    static const char *const names[5] = {"ca.pem", "n0.pem", "n0.key", "n1.example.pem",
                                         "n1.example.key"};
    for (int i = 0; i < 5; i++)
        (void)snprintf(path[i], sizeof path[i], "%s/%s", directory, names[i]);
    const struct rpc_tls_files n0 = {path[0], path[1], path[2]}, n1 = {path[0], path[3], path[4]};
    linked_init(&p, false);
    p.server_options.addresses = &address;
    p.server_options.n_addresses = 1;
    p.server_options.tls = &n0;
    linked_serve(&p);
    (void)snprintf(p.target, sizeof p.target, "127.0.0.1:%u", rpc_server_address_port(p.server, 0));
    p.options.tls = &n1;
    p.options.server_name = "n0";
    linked_connect(&p);
    call_ask(&p, &h, T "Who", "x", 1);
    call_await_end(&h, 0);
    ck_assert_str_eq(h.last, "2 0 0 0 n1.example");
    linked_close(&p);
    (void)snprintf(command, sizeof command, "rm -rf %s %s.out", directory, directory);
    (void)!system(command);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_caller_is_known_by_its_certificate_s_dns_name)                                             \
    X(the_common_name_counts_where_there_is_no_dns_name)                                           \
    X(ipv6_is_served_and_verified_too)                                                             \
    X(without_certificate_one_is_anonymous_where_that_is_allowed)                                  \
    X(the_unix_socket_stays_as_it_is_beside)                                                       \
    X(a_foreign_client_is_refused_and_counted)                                                     \
    X(a_client_without_certificate_is_refused_and_counted)                                         \
    X(plaintext_on_a_tls_port_is_refused_and_counted)                                              \
    X(a_server_of_a_foreign_authority_is_not_believed)                                             \
    X(a_server_of_another_name_is_not_believed)                                                    \
    X(tls_to_a_plaintext_port_gets_nowhere)                                                        \
    X(random_bytes_are_refused_and_counted_and_hurt_nobody)                                        \
    X(who_connects_and_says_nothing_is_hung_up_on)                                                 \
    X(a_crowd_beyond_the_descriptors_is_turned_away_and_the_port_lives_on)                         \
    X(large_messages_and_long_streams_pass_whole)                                                  \
    X(a_reader_that_does_not_read_is_cut_off_over_tls_too)                                         \
    X(a_stop_says_goodbye_through_the_relay)                                                       \
    X(a_stop_waits_for_no_stranger)                                                                \
    X(a_cut_link_shows_at_both_ends_and_heals)                                                     \
    X(a_blocking_channel_takes_tls_too)                                                            \
    X(bad_files_are_named_with_their_fault_and_remedy)                                             \
    X(server_and_link_say_so_at_their_start)                                                       \
    X(certificates_can_be_replaced_while_connections_stand)                                        \
    X(a_link_takes_other_certificates_at_its_next_connection)                                      \
    X(plaintext_beyond_loopback_wants_a_word)                                                      \
    X(addresses_that_can_not_be_are_named)                                                         \
    X(every_failed_allocation_of_a_start_with_tls_is_an_error)                                     \
    X(dev_certs_make_a_pair_that_talks_and_stay_as_they_are)

#include "test/lib/main.h"
