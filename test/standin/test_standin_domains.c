/* NVLink domains as NVML of the stand-in tells them. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "device/device_domains.h"

enum { N = 6 };

/* Device i of the stand-in is GPU-<i><anything>. */
static const char *const uuids[N] = {
    "GPU-00000000-0000-0000-0000-000000000000", "GPU-10000000-0000-0000-0000-000000000000",
    "GPU-20000000-0000-0000-0000-000000000000", "GPU-30000000-0000-0000-0000-000000000000",
    "GPU-40000000-0000-0000-0000-000000000000", "GPU-50000000-0000-0000-0000-000000000000"};

static bool pairs(void *arg, uint32_t a, uint32_t b)
{
    (void)arg;
    return a / 2 == b / 2;
}

static bool one_way(void *arg, uint32_t a, uint32_t b)
{
    (void)arg;
    return a < b;
}

static void expect(const struct device_domain *d, const uint32_t *islands)
{
    for (uint32_t i = 0; i < N; i++)
        ck_assert_msg(d[i].island == islands[i], "device %u is in island %u, not %u", i,
                      d[i].island, islands[i]);
}

/* Each test is a process of its own. */
static void devices(void)
{
    setenv("STANDIN_DEVICES", "6", 1);
}

START_TEST(what_nvlink_connects_is_one_island)
{
    struct device_domain d[N];
    char how[DEVICE_HOW_BYTES];
    devices();
    setenv("STANDIN_NVLINK", "4", 1);
    device_domains(uuids, N, pairs, NULL, d, how);
    expect(d, (uint32_t[]){0, 0, 0, 0, 1, 1});
    ck_assert_str_eq(how, "NVLink");
    ck_assert_str_eq(d[0].fabric, "");
}
END_TEST

START_TEST(without_nvlink_peer_access_both_ways_connects)
{
    struct device_domain d[N];
    char how[DEVICE_HOW_BYTES];
    devices();
    device_domains(uuids, N, pairs, NULL, d, how);
    expect(d, (uint32_t[]){0, 0, 1, 1, 2, 2});
    ck_assert_str_eq(how, "peer access");
    device_domains(uuids, N, one_way, NULL, d, how);
    expect(d, (uint32_t[]){0, 1, 2, 3, 4, 5});
}
END_TEST

START_TEST(a_fabric_is_named_by_cluster_and_clique)
{
    struct device_domain d[N];
    char how[DEVICE_HOW_BYTES];
    devices();
    setenv("STANDIN_CLIQUE", "32766", 1);
    device_domains(uuids, N, pairs, NULL, d, how);
    for (int i = 0; i < N; i++)
        ck_assert_str_eq(d[i].fabric, "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a.32766");
    ck_assert_str_eq(how, "fabric");
}
END_TEST

START_TEST(an_nvml_that_fails_is_said_and_peer_access_stands_in)
{
    static const char *const calls[] = {"nvmlDeviceGetHandleByUUID:1", "nvmlInit_v2:2"};
    struct device_domain d[N];
    char how[DEVICE_HOW_BYTES];
    devices();
    setenv("STANDIN_NVLINK", "6", 1);
    for (int i = 0; i < 2; i++) {
        setenv("STANDIN_FAIL", calls[i], 1);
        device_domains(uuids, N, pairs, NULL, d, how);
        expect(d, (uint32_t[]){0, 0, 1, 1, 2, 2});
        ck_assert_msg(strstr(how, "peer access (NVML") == how, "%s", how);
    }
}
END_TEST

static bool all(void *arg, uint32_t a, uint32_t b)
{
    (void)arg, (void)a, (void)b;
    return true;
}

/* A chain of links: each reaches its neighbours. */
static bool neighbours(void *arg, uint32_t a, uint32_t b)
{
    (void)arg;
    return a + 1 == b || b + 1 == a;
}

START_TEST(an_island_is_parted_where_devices_do_not_reach_each_other)
{
    static const uint32_t together[N] = {0, 0, 0, 0, 1, 1};
    struct device_domain d[N];
    char how[DEVICE_HOW_BYTES];
    devices();
    setenv("STANDIN_NVLINK", "4", 1);
    device_domains(uuids, N, pairs, NULL, d, how);
    expect(d, together);
    ck_assert(!device_islands_part(N, all, NULL, d));
    expect(d, together);
    ck_assert(device_islands_part(N, neighbours, NULL, d));
    expect(d, (uint32_t[]){0, 0, 1, 1, 2, 2});
    device_domains(uuids, N, pairs, NULL, d, how);
    ck_assert(device_islands_part(N, one_way, NULL, d));
    expect(d, (uint32_t[]){0, 1, 2, 3, 4, 5});
}
END_TEST

#define TESTS(X)                                                                                   \
    X(an_island_is_parted_where_devices_do_not_reach_each_other)                                   \
    X(what_nvlink_connects_is_one_island)                                                          \
    X(without_nvlink_peer_access_both_ways_connects)                                               \
    X(a_fabric_is_named_by_cluster_and_clique)                                                     \
    X(an_nvml_that_fails_is_said_and_peer_access_stands_in)
#include "test/lib/main.h"
