/* A link of rpc/rpc_link.h and the server it calls, in one loop over gRPC or in memory: what the link's
 * contract test is written against. Header only. */
#ifndef RS_TEST_LINK_TWINS_H
#define RS_TEST_LINK_TWINS_H

#include "rpc/rpc_link.h"
#include "rpc/rpc_link_mem.h"
#include "test/lib/rpc_twins.h"

/* --- what callbacks saw ----------------------------------------------------------------------- */

struct linked {
    bool in_memory;
    struct service service;
    struct rpc_server_options server_options;
    struct rpc_link_options options;
    struct rpc_link *link;
    unsigned busy; /* in a function of the link: no callback may run */
    unsigned n_up, n_down, n_closed;
    bool up;
    char down_text[512];
    struct rpc_mem *mem;
    /* gRPC: */
    uv_loop_t loop;
    uv_timer_t tick;
    struct rpc_server *server;
    char directory[64], path[96], target[128];
};

#define HEARD_BYTES 256

struct heard {
    struct linked *p;
    struct rpc_link_call *call;
    unsigned n_messages, n_writable, n_end;
    size_t n_bytes;         /* of all messages */
    uint64_t sum;           /* of their first four bytes, as unsigned */
    bool in_order;          /* those were 0, 1, 2 … */
    char last[HEARD_BYTES]; /* NUL behind it */
    size_t n_last;
    int code;
    char text[512];
    char details[64];
    size_t n_details;
    /* What a test does in a callback. */
    void (*then)(struct heard *h);
    void (*at_end)(struct heard *h);
};

static void heard_message(struct rpc_link_call *c, void *arg, const void *data, size_t n_bytes)
{
    struct heard *h = arg;
    unsigned first = 0;
    ck_assert_ptr_eq(c, h->call);
    ck_assert_uint_eq(h->p->busy, 0);
    ck_assert_uint_eq(h->n_end, 0);
    h->n_last = n_bytes < HEARD_BYTES ? n_bytes : HEARD_BYTES - 1;
    memcpy(h->last, data, h->n_last);
    h->last[h->n_last] = '\0';
    if (n_bytes >= sizeof first)
        memcpy(&first, data, sizeof first);
    h->in_order = (h->n_messages == 0 || h->in_order) && first == h->n_messages;
    h->sum += first;
    h->n_bytes += n_bytes;
    h->n_messages++;
    if (h->then != NULL)
        h->then(h);
}

static void heard_writable(struct rpc_link_call *c, void *arg)
{
    struct heard *h = arg;
    ck_assert_ptr_eq(c, h->call);
    ck_assert_uint_eq(h->p->busy, 0);
    ck_assert_uint_eq(h->n_end, 0);
    h->n_writable++;
}

static void heard_end(struct rpc_link_call *c, void *arg, int code, const char *text,
                      const void *details, size_t n_details)
{
    struct heard *h = arg;
    ck_assert_ptr_eq(c, h->call);
    ck_assert_uint_eq(h->p->busy, 0);
    ck_assert_uint_eq(h->p->n_closed, 0);
    ck_assert_ptr_nonnull(text);
    h->n_end++;
    h->code = code;
    (void)snprintf(h->text, sizeof h->text, "%s", text);
    h->n_details = n_details;
    if (n_details > 0 && n_details <= sizeof h->details)
        memcpy(h->details, details, n_details);
    h->call = NULL;
    if (h->at_end != NULL)
        h->at_end(h);
}

static const struct rpc_link_call_events heard_events = {
    .on_message = heard_message, .on_writable = heard_writable, .on_end = heard_end};

static void link_up(struct rpc_link *l, void *arg)
{
    struct linked *p = arg;
    ck_assert_uint_eq(p->busy, 0);
    ck_assert(!p->up);
    ck_assert(rpc_link_is_up(l));
    p->up = true;
    p->n_up++;
}

static void link_down(struct rpc_link *l, void *arg, const char *text)
{
    struct linked *p = arg;
    ck_assert_uint_eq(p->busy, 0);
    ck_assert(!rpc_link_is_up(l));
    p->up = false;
    p->n_down++;
    (void)snprintf(p->down_text, sizeof p->down_text, "%s", text);
}

static void link_closed(void *arg)
{
    struct linked *p = arg;
    ck_assert_uint_eq(p->busy, 0);
    p->n_closed++;
    p->link = NULL;
}

static const struct rpc_link_events link_events = {
    .on_up = link_up, .on_down = link_down, .on_closed = link_closed};

/* --- both ends -------------------------------------------------------------------------------- */

static void on_tick(uv_timer_t *timer)
{
    (void)timer; /* so that a turn ends where nothing happens */
}

/* Delivers what is there; over gRPC waits up to 10 ms for something. */
static inline void linked_turn(struct linked *p)
{
    if (!p->in_memory) {
        (void)uv_run(&p->loop, UV_RUN_ONCE);
        return;
    }
    if (p->link != NULL)
        (void)rpc_link_mem_run(p->link);
    if (p->mem != NULL)
        rpc_mem_run(p->mem);
}

/* Turns until *counter reaches n. */
static inline void linked_until(struct linked *p, const unsigned *counter, unsigned n)
{
    uint64_t until = clock_mono_ns() + WAIT_MS * 1000000ULL;
    while (*counter < n && clock_mono_ns() < until)
        linked_turn(p);
    ck_assert_uint_ge(*counter, n);
}

/* Turns until the link has told that it is down. Not by n_down: a link that stays down says so again
 * for each other reason. */
static inline void linked_until_down(struct linked *p)
{
    uint64_t until = clock_mono_ns() + WAIT_MS * 1000000ULL;
    while (p->up && clock_mono_ns() < until)
        linked_turn(p);
    ck_assert(!p->up && p->n_down > 0);
}

static void linked_server_stopped(void *arg)
{
    struct linked *p = arg;
    p->server = NULL;
}

/* Starts a server where the link's target is. */
static inline void linked_serve(struct linked *p)
{
    struct err e = {0};
    int r;
    if (p->in_memory)
        r = rpc_mem_new(&p->server_options, methods, N_METHODS, &p->mem, &e);
    else
        r = rpc_server_start(&p->loop, &p->server_options, methods, N_METHODS, &p->server, &e);
    ck_assert_msg(r == 0, "%s", err_text(&e, r));
}

/* Ends it; the link's calls break, what has not ended by itself within grace_ms (rpc_server_stop) too. */
static inline void linked_unserve_within(struct linked *p, uint32_t grace_ms)
{
    uint64_t until = clock_mono_ns() + WAIT_MS * 1000000ULL;
    if (p->in_memory) {
        if (p->mem != NULL && p->link != NULL)
            rpc_link_mem_cut(p->link, "the connection broke");
        rpc_mem_free(p->mem);
        p->mem = NULL;
        return;
    }
    if (p->server != NULL)
        rpc_server_stop(p->server, grace_ms, linked_server_stopped, p);
    while (p->server != NULL && clock_mono_ns() < until)
        linked_turn(p);
    ck_assert_ptr_null(p->server);
}

static inline void linked_unserve(struct linked *p)
{
    linked_unserve_within(p, 0);
}

static inline void linked_connect(struct linked *p)
{
    struct err e = {0};
    int r = p->in_memory ? rpc_link_mem_open(p->mem, &p->options, &link_events, p, &p->link, &e)
                         : rpc_link_open(&p->loop, &p->options, &link_events, p, &p->link, &e);
    ck_assert_msg(r == 0, "%s", err_text(&e, r));
}

/* Sets up loop, paths and options; neither server nor link. */
static inline void linked_init(struct linked *p, bool in_memory)
{
    memset(p, 0, sizeof *p);
    p->in_memory = in_memory;
    seen_init(&p->service.seen);
    p->server_options = (struct rpc_server_options){
        .identify = identify, .context = &p->service, .keepalive_timeout_ms = PATIENT_MS};
    p->options.keepalive_timeout_ms = p->options.connect_timeout_ms = PATIENT_MS;
    if (in_memory)
        return;
    (void)snprintf(p->directory, sizeof p->directory, "/tmp/rs-link-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(p->directory));
    (void)snprintf(p->path, sizeof p->path, "%s/s", p->directory);
    (void)snprintf(p->target, sizeof p->target, "unix:%s", p->path);
    p->server_options.unix_path = p->path;
    p->options.target = p->target;
    ck_assert_int_eq(uv_loop_init(&p->loop), 0);
    ck_assert_int_eq(uv_timer_init(&p->loop, &p->tick), 0);
    ck_assert_int_eq(uv_timer_start(&p->tick, on_tick, 10, 10), 0);
}

static inline void linked_open(struct linked *p, bool in_memory)
{
    linked_init(p, in_memory);
    linked_serve(p);
    linked_connect(p);
}

/* Closes the link and waits for on_closed. */
static inline void linked_disconnect(struct linked *p)
{
    if (p->link != NULL) {
        p->busy++;
        rpc_link_close(p->link);
        p->busy--;
    }
    linked_until(p, &p->n_closed, 1);
    ck_assert_uint_eq(p->n_closed, 1);
}

/* What is left of it; the link must be closed or never opened. */
static inline void linked_fini(struct linked *p)
{
    char lock[128];
    ck_assert_ptr_null(p->link);
    linked_unserve(p);
    if (p->in_memory)
        return;
    uv_close((uv_handle_t *)&p->tick, NULL);
    ck_assert_int_eq(uv_run(&p->loop, UV_RUN_DEFAULT), 0);
    ck_assert_int_eq(uv_loop_close(&p->loop), 0);
    (void)snprintf(lock, sizeof lock, "%s.lock", p->path);
    (void)unlink(lock);
    ck_assert_int_eq(rmdir(p->directory), 0);
}

static inline void linked_close(struct linked *p)
{
    linked_disconnect(p);
    linked_fini(p);
    ck_assert_uint_eq(p->service.seen.n_opened, p->service.seen.n_ended);
}

/* --- calls ------------------------------------------------------------------------------------ */

static inline void call_open_with(struct linked *p, struct heard *h,
                                  const struct rpc_link_call_options *options)
{
    struct err e = {0};
    h->p = p;
    p->busy++;
    int r = rpc_link_call_open(p->link, options, &heard_events, h, &h->call, &e);
    p->busy--;
    ck_assert_msg(r == 0, "%s", err_text(&e, r));
}

static inline void call_open(struct linked *p, struct heard *h, const char *path,
                             uint32_t deadline_ms)
{
    struct rpc_link_call_options o = {.path = path, .deadline_ms = deadline_ms};
    call_open_with(p, h, &o);
}

static inline int call_send(struct heard *h, const void *data, size_t n_bytes)
{
    h->p->busy++;
    int r = rpc_link_call_send(h->call, data, n_bytes);
    h->p->busy--;
    return r;
}

static inline void call_half_close(struct heard *h)
{
    h->p->busy++;
    rpc_link_call_half_close(h->call);
    h->p->busy--;
}

static inline void call_cancel(struct heard *h)
{
    h->p->busy++;
    rpc_link_call_cancel(h->call);
    h->p->busy--;
}

static inline void call_hold(struct heard *h, bool hold)
{
    h->p->busy++;
    rpc_link_call_hold(h->call, hold);
    h->p->busy--;
}

/* One request. */
static inline void call_ask(struct linked *p, struct heard *h, const char *path, const void *data,
                            size_t n_bytes)
{
    call_open(p, h, path, 0);
    ck_assert_int_eq(call_send(h, data, n_bytes), 0);
    call_half_close(h);
}

static inline void call_await_end(struct heard *h, int code)
{
    linked_until(h->p, &h->n_end, 1);
    ck_assert_uint_eq(h->n_end, 1);
    ck_assert_msg(h->code == code, "ended with %d (%s), not %d", h->code, h->text, code);
}

#endif
