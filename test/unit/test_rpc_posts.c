/* Posting to a loop from other threads by base/mailbox and libuv's wake, as daemon/rpc and daemon/service do. */
#include <check.h>
#include <pthread.h>
#include <stdlib.h>
#include <uv.h>

#include "base/mailbox.h"

#define N_POSTERS 4

#define N_POSTS 25000

struct posted {
    struct mailbox_item item;
    struct posts *posts;
};

struct posts {
    struct mailbox mailbox;
    uv_async_t async;
    unsigned n_seen, n_accepted[N_POSTERS], shut_after;
    struct posted *items[N_POSTERS];
};

static void count_post(struct mailbox_item *item)
{
    struct posts *p = container_of(item, struct posted, item)->posts;
    if (++p->n_seen == p->shut_after && !uv_is_closing((uv_handle_t *)&p->async)) {
        mailbox_shut(&p->mailbox);
        uv_close((uv_handle_t *)&p->async, NULL);
    }
}

static void wake_posts(void *arg)
{
    (void)uv_async_send(&((struct posts *)arg)->async);
}

static void drain_posts(uv_async_t *async)
{
    (void)mailbox_drain(&((struct posts *)async->data)->mailbox);
}

struct poster {
    struct posts *posts;
    int index;
};

static void *post_all(void *arg)
{
    struct poster *me = arg;
    for (int i = 0; i < N_POSTS; i++) {
        struct posted *item = &me->posts->items[me->index][i];
        me->posts->n_accepted[me->index] += mailbox_post(&me->posts->mailbox, &item->item);
    }
    return NULL;
}

static void post_from_threads(unsigned shut_after)
{
    struct posts p = {.shut_after = shut_after};
    struct poster poster[N_POSTERS];
    pthread_t thread[N_POSTERS];
    uv_loop_t loop;
    unsigned n_accepted = 0;
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    ck_assert_int_eq(uv_async_init(&loop, &p.async, drain_posts), 0);
    p.async.data = &p;
    mailbox_init(&p.mailbox, wake_posts, &p);
    for (int i = 0; i < N_POSTERS; i++) {
        p.items[i] = calloc(N_POSTS, sizeof *p.items[i]);
        for (int k = 0; k < N_POSTS; k++)
            p.items[i][k] = (struct posted){.item = {.fn = count_post}, .posts = &p};
        poster[i] = (struct poster){&p, i};
        ck_assert_int_eq(pthread_create(&thread[i], NULL, post_all, &poster[i]), 0);
    }
    ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    for (int i = 0; i < N_POSTERS; i++) {
        (void)pthread_join(thread[i], NULL);
        n_accepted += p.n_accepted[i];
    }
    (void)mailbox_drain(&p.mailbox); /* what was posted before the shut is still there */
    ck_assert_uint_eq(p.n_seen, n_accepted);
    ck_assert_uint_ge(p.n_seen, shut_after);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    mailbox_close(&p.mailbox);
    for (int i = 0; i < N_POSTERS; i++)
        free(p.items[i]);
}

START_TEST(every_post_of_every_thread_arrives)
{
    post_from_threads(N_POSTERS * N_POSTS);
}
END_TEST

START_TEST(posts_that_race_with_the_close_are_refused_or_arrive)
{
    post_from_threads(N_POSTS);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_post_of_every_thread_arrives)                                                          \
    X(posts_that_race_with_the_close_are_refused_or_arrive)

#include "test/lib/main.h"
