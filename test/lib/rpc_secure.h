/* A server of rpc.h with TLS and certificates of its own, and a link to it (test/lib/link_twins.h). For tests with Check; header
 * only; one test program includes it. */
#ifndef RS_TEST_RPC_SECURE_H
#define RS_TEST_RPC_SECURE_H

#include "test/lib/certs.h"
#include "test/lib/link_twins.h"

#define T "/test.v1.Twins/"

struct secure {
    struct certs certs;
    struct cert_files server, client;
    struct rpc_address address[2];
    struct linked p; /* its link is the one under test */
    uint16_t port;
    uint32_t handshake_timeout_ms; /* 0: WAIT_MS, so that a busy machine's handshakes end well */
    bool default_keepalive;        /* else PATIENT_MS */
};

/* As long as strangers are waited for, who never end a handshake, and as short as others must have ended it. */
#define STRANGER_MS 3000

/* Certificates, and a server on 127.0.0.1 and ::1; no link. */
static inline void secure_open(struct secure *s, bool anonymous)
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
    if (s->default_keepalive)
        s->p.server_options.keepalive_timeout_ms = s->p.options.keepalive_timeout_ms =
            s->p.options.connect_timeout_ms = 0;
    linked_serve(&s->p);
    s->port = rpc_server_address_port(s->p.server, 0);
    ck_assert_uint_ne(s->port, 0);
    ck_assert_uint_ne(rpc_server_address_port(s->p.server, 1), 0);
    ck_assert_uint_eq(rpc_server_address_port(s->p.server, 2), 0);
    (void)snprintf(s->p.target, sizeof s->p.target, "127.0.0.1:%u", s->port);
    s->p.options.tls = &s->client.files;
}

static inline void secure_close(struct secure *s)
{
    if (s->p.link != NULL)
        linked_disconnect(&s->p);
    linked_fini(&s->p);
    certs_close(&s->certs);
}

/* A new link; the old one's counts are forgotten. */
static inline void reconnect(struct secure *s)
{
    if (s->p.link != NULL)
        linked_disconnect(&s->p);
    s->p.n_up = s->p.n_down = s->p.n_closed = 0;
    s->p.up = false;
    linked_connect(&s->p);
}

static inline void expect_name(struct secure *s, const char *expected)
{
    struct heard h = {0};
    call_ask(&s->p, &h, T "Who", "x", 1);
    call_await_end(&h, 0);
    ck_assert_str_eq(h.last, expected);
}

/* A good client is still served. */
static inline void expect_service(struct secure *s)
{
    s->p.options.tls = &s->client.files;
    s->p.options.server_name = NULL;
    reconnect(s);
    expect_name(s, "2 0 0 0 n1");
}

/* The link as its options stand gets nowhere; down_text says why. */
static inline void expect_refused(struct secure *s)
{
    struct heard h = {0};
    reconnect(s);
    call_ask(&s->p, &h, T "Who", "x", 1);
    call_await_end(&h, RS_EUNAVAIL);
    linked_until(&s->p, &s->p.n_down, 1);
    ck_assert_uint_eq(s->p.n_up, 0);
    ck_assert_uint_eq(h.n_messages, 0);
}

static inline uint64_t n_refused(struct secure *s)
{
    return rpc_server_n_refused(s->p.server);
}

static inline void expect_refusal(struct secure *s, const char *part)
{
    char text[RPC_REFUSAL_BYTES];
    rpc_server_last_refusal(s->p.server, text);
    ck_assert_msg(strstr(text, part) != NULL, "'%s' lacks '%s'", text, part);
    ck_assert_ptr_null(strchr(text, '{'));
}

/* Turns until that many were refused, and more. */
static inline void await_refused(struct secure *s, uint64_t n)
{
    uint64_t until = clock_mono_ns() + WAIT_MS * 1000000ULL;
    while (n_refused(s) < n && clock_mono_ns() < until)
        linked_turn(&s->p);
    ck_assert_uint_ge(n_refused(s), n);
}

#endif
