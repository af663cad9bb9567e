/* TLS at the start and later: what is said of bad files and addresses, certificates that are replaced, and scripts/dev-certs. */
#include <fcntl.h>
#include <sys/wait.h>

#include "test/lib/rpc_secure.h"

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
    X(bad_files_are_named_with_their_fault_and_remedy)                                             \
    X(server_and_link_say_so_at_their_start)                                                       \
    X(certificates_can_be_replaced_while_connections_stand)                                        \
    X(a_link_takes_other_certificates_at_its_next_connection)                                      \
    X(plaintext_beyond_loopback_wants_a_word)                                                      \
    X(addresses_that_can_not_be_are_named)                                                         \
    X(every_failed_allocation_of_a_start_with_tls_is_an_error)                                     \
    X(dev_certs_make_a_pair_that_talks_and_stay_as_they_are)

#include "test/lib/main.h"
