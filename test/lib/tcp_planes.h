/* Data planes over TCP, for tests with Check: one in which some devices are here, and a pair that exchanges. Header only; one
 * test program includes it. */
#ifndef RS_TEST_TCP_PLANES_H
#define RS_TEST_TCP_PLANES_H

#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "test/lib/waited.h"
#include "transport/transport.h"

/* SILENCE_MS: of tests about peers that fall silent; nobody else's silence counts, since threads of a busy machine may sleep for
 * seconds. ALIVE_MS: of tests about peers that are alive and say so, four times in that time; LONG_MS is longer than that.
 * PATIENCE_MS: a guard against hangs. Sanitized binaries are slower. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SILENCE_MS = 2000, ALIVE_MS = 4000 };
#else
enum { SILENCE_MS = 250, ALIVE_MS = 2000 };
#endif
enum { LONG_MS = ALIVE_MS * 3 / 2, PATIENCE_MS = 60000 };

enum { EPOCH = 9, MAX_DEVICES = 4 };

/* A data plane: an endpoint, and a transport in which some devices are here. */
struct plane {
    struct transport_tcp_node *node;
    struct transport *t;
    struct device *devices[MAX_DEVICES];
    struct device_stream *streams[MAX_DEVICES];
    struct transport_tcp_device table[MAX_DEVICES];
    struct fence fence;
};

static const uint8_t TOKEN[TRANSPORT_TOKEN_BYTES] = "between a and b";

static inline void plane_listen(struct plane *p)
{
    memset(p, 0, sizeof(*p));
    ck_assert_int_eq(transport_tcp_node_open("127.0.0.1", 0, &p->node, NULL), 0);
}

static inline void plane_local(struct plane *p, uint32_t device)
{
    struct device_host_options options = {0};
    ck_assert_int_eq(device_host_open(device, &options, &p->devices[device], NULL), 0);
    ck_assert_int_eq(device_stream_new(p->devices[device], "net", &p->streams[device], NULL), 0);
    p->table[device].device = p->devices[device];
}

static inline void plane_remote(struct plane *p, uint32_t device, uint16_t port)
{
    p->table[device].address = "127.0.0.1";
    p->table[device].port = port;
    memcpy(p->table[device].token, TOKEN, sizeof(TOKEN));
}

static inline void plane_open_within(struct plane *p, uint32_t n, double bytes_per_s,
                                     uint32_t silence_ms)
{
    struct transport_tcp_options options = {.silence_ms = silence_ms,
                                            .streams = 2,
                                            .network_bytes_per_s = bytes_per_s,
                                            .fence = &p->fence};
    struct err e = {0};
    int r = transport_tcp_open(p->node, p->table, n, EPOCH, &options, &p->t, &e);
    ck_assert_msg(r == 0, "%s", e.text);
    ck_assert_int_eq(transport_begin(p->t, 1, NULL), 0);
}

static inline void plane_close(struct plane *p)
{
    for (uint32_t i = 0; i < MAX_DEVICES; i++)
        if (p->streams[i] != NULL)
            device_stream_free(p->streams[i]);
    transport_close(p->t);
    transport_tcp_node_close(p->node);
    for (uint32_t i = 0; i < MAX_DEVICES; i++)
        device_close(p->devices[i]);
}

static inline int waited_status(struct waited *w)
{
    return waited_status_in(w, PATIENCE_MS);
}

static inline void submit(struct plane *p, uint32_t device, struct waited *w,
                          const struct transport_message *messages, uint32_t n)
{
    waited_init(w, messages, n);
    ck_assert_int_eq(transport_enqueue(p->t, device, p->streams[device], &w->group), 0);
}

static inline void fill(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)random_next(&seed);
}

/* --- two data planes -------------------------------------------------------------------------- */

struct pair {
    struct plane a, b;
};

/* Devices 0 and 1 at a, 2 and 3 at b. */
static inline void pair_open_within(struct pair *x, double bytes_per_s, uint32_t silence_ms)
{
    plane_listen(&x->a);
    plane_listen(&x->b);
    for (uint32_t d = 0; d < 4; d++) {
        plane_local(d < 2 ? &x->a : &x->b, d);
        plane_remote(d < 2 ? &x->b : &x->a, d,
                     transport_tcp_node_port(d < 2 ? x->a.node : x->b.node));
    }
    plane_open_within(&x->a, 4, bytes_per_s, silence_ms);
    plane_open_within(&x->b, 4, bytes_per_s, silence_ms);
}

static inline void pair_open(struct pair *x, double bytes_per_s)
{
    pair_open_within(x, bytes_per_s, PATIENCE_MS);
}

static inline void pair_close(struct pair *x)
{
    plane_close(&x->a);
    plane_close(&x->b);
}

/* Each device sends to each other and receives from it. */
static inline void exchange(struct pair *x, uint64_t seed)
{
    enum { N = 4, MOST = 3 << 20 };
    struct waited w[N];
    struct transport_message m[N][2 * N];
    uint8_t *sent = malloc(N * N * MOST), *landed = calloc(N * N, MOST);
    size_t bytes[N][N];
    for (uint32_t a = 0; a < N; a++)
        for (uint32_t b = 0; b < N; b++) {
            bytes[a][b] = 1 + random_next(&seed) % MOST;
            fill(sent + (a * N + b) * MOST, bytes[a][b], seed + a * N + b);
        }
    for (uint32_t d = 0; d < N; d++) {
        for (uint32_t k = 0; k < N; k++) {
            m[d][2 * k] = (struct transport_message){
                sent + (d * N + k) * MOST, bytes[d][k], k, true, true, 0, NULL, 0};
            m[d][2 * k + 1] = (struct transport_message){
                landed + (k * N + d) * MOST, bytes[k][d], k, false, true, 0, NULL, 0};
        }
        submit(d < 2 ? &x->a : &x->b, d, &w[d], m[d], 2 * N);
    }
    for (uint32_t d = 0; d < N; d++)
        ck_assert_msg(waited_status(&w[d]) == 0, "%s", w[d].err.text);
    for (uint32_t i = 0; i < N * N; i++)
        ck_assert_int_eq(memcmp(sent + i * MOST, landed + i * MOST, bytes[i / N][i % N]), 0);
    free(sent);
    free(landed);
}

#endif
