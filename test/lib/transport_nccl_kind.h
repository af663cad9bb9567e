/* NCCL as a kind of test_transport, with TEST_DEVICE=cuda on the stand-in. */
#ifndef RS_TEST_TRANSPORT_NCCL_KIND_H
#define RS_TEST_TRANSPORT_NCCL_KIND_H

#include <check.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "transport/transport_nccl.h"

static inline bool test_on_cuda(void)
{
    const char *kind = getenv("TEST_DEVICE");
    return kind != NULL && strcmp(kind, "cuda") == 0;
}

/* Buffers of the contract test are plain memory, which NCCL itself could not reach. */
static inline struct device *test_device_open(uint32_t local, struct fence *fence, uint64_t seed)
{
    struct device_host_options host = {
        .seed = seed, .max_delay_us = seed != 0 ? 300 : 0, .fence = fence};
    struct device_cuda_options cuda = {.seed = seed, .fence = fence};
    struct device *d = NULL;
    struct err e = {0};
    ck_assert_int_eq(setenv("STANDIN_DEVICES", "8", 1), 0);
    ck_assert_int_eq(setenv("STANDIN_PAGEABLE", "1", 1), 0);
    ck_assert_msg(device_open(test_on_cuda() ? "cuda" : "host", local, &host, &cuda, &d, &e) == 0,
                  "%s", e.text);
    return d;
}

#if defined(RS_CUDA)
static inline struct transport *test_open_nccl(struct device *const *devices, uint32_t n,
                                               uint64_t seed, struct fence *fence)
{
    static struct transport_nccl_node *node; /* never closed, as the TCP endpoint */
    struct transport_nccl_options options = {.fence = fence};
    struct transport *t = NULL;
    struct err e = {0};
    bool takes_part[16] = {0};
    char text[32];
    (void)snprintf(text, sizeof text, "%llu", (unsigned long long)seed);
    ck_assert_int_eq(setenv("STANDIN_SEED", text, 1), 0);
    if (node == NULL)
        ck_assert_msg(transport_nccl_node_open(&node, &e) == 0, "%s", e.text);
    for (uint32_t i = 0; i < n; i++)
        takes_part[i] = devices[i] != NULL;
    ck_assert_msg(transport_nccl_open(node, devices, takes_part, n, 7, NULL, &options, &t, &e) == 0,
                  "%s", e.text);
    return t;
}
#endif

#endif
