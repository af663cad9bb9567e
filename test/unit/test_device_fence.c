/* The lease at the device: copies that come to their turn when it is over are left out. */
#include <check.h>
#include <pthread.h>
#include <string.h>

#include "device/device.h"

static void wait_at(void *arg)
{
    pthread_mutex_t *gate = arg;
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
}

static void copy_byte(struct device_stream *s, uint8_t *from, uint8_t *to)
{
    struct kernel_copy c = {.size = {1}, .n_targets = 1, .n_dims = 1};
    c.from_dtype = c.to_dtype = 11; /* uint8 */
    c.from = (struct kernel_view){.base = from, .stride_bytes = {1}};
    c.to[0] = (struct kernel_view){.base = to, .stride_bytes = {1}};
    ck_assert_int_eq(device_copy(s, &c, 1), 0);
}

static void wait_idle(struct device_stream *s, struct device_event *ev)
{
    ck_assert_int_eq(device_event_record(ev, s), 0);
    while (!device_event_done(ev))
        ;
}

START_TEST(copies_queued_before_the_end_of_the_lease_do_not_land_after_it)
{
    struct fence fence = {0};
    struct device_host_options options = {.fence = &fence};
    struct device *d;
    struct device_stream *s;
    struct device_event *ev;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    uint8_t from = 7, to[3] = {0};
    struct err e = {0};
    ck_assert_int_eq(device_host_open(0, &options, &d, NULL), 0);
    ck_assert_int_eq(device_stream_new(d, "copy", &s, NULL), 0);
    ck_assert_int_eq(device_event_new(d, &ev), 0);
    copy_byte(s, &from, &to[0]);
    wait_idle(s, ev);
    ck_assert_int_eq(to[0], 7);
    pthread_mutex_lock(&gate);
    ck_assert_int_eq(device_call(s, wait_at, &gate), 0);
    copy_byte(s, &from, &to[1]);
    fence_prolong(&fence, 1);
    pthread_mutex_unlock(&gate);
    wait_idle(s, ev); /* completions come all the same */
    ck_assert_int_eq(to[1], 0);
    ck_assert_int_eq(device_error(d, &e), RS_EDEADLINE);
    ck_assert_ptr_nonnull(strstr(e.text, "lease"));
    fence_prolong(&fence, UINT64_MAX); /* too late: what was left out is known only by the error */
    ck_assert_int_eq(device_error(d, NULL), RS_EDEADLINE);
    copy_byte(s, &from, &to[1]);
    wait_idle(s, ev);
    ck_assert_int_eq(to[1], 0);
    fence_reopen(&fence);
    ck_assert_int_eq(device_error(d, NULL), 0);
    copy_byte(s, &from, &to[2]);
    wait_idle(s, ev);
    ck_assert_int_eq(to[2], 7);
    device_stream_free(s);
    device_event_free(ev);
    device_close(d);
}
END_TEST

START_TEST(a_lease_that_was_over_unseen_counts_as_over)
{
    struct fence fence = {0};
    ck_assert(fence_holds(NULL));
    ck_assert(fence_holds(&fence));
    atomic_store(&fence.until_ns, 1);
    fence_prolong(&fence, UINT64_MAX);
    ck_assert(!fence_holds(&fence));
    fence_reopen(&fence);
    ck_assert(fence_holds(&fence));
    fence_prolong(&fence, 1);
    fence_reopen(&fence); /* it is over now, too */
    ck_assert(!fence_holds(&fence));
}
END_TEST

#define TESTS(X)                                                                                   \
    X(copies_queued_before_the_end_of_the_lease_do_not_land_after_it)                              \
    X(a_lease_that_was_over_unseen_counts_as_over)

#include "test/lib/main.h"
