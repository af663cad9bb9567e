/* Whole refits through the data plane's device and exec code, as the control process drives it, with
 * backend cuda: all ranks on one GPU, and on several where there are. Workers' memory is host
 * memory that the GPU reaches. */
#include <check.h>
#include <cuda_runtime_api.h>

#include "test/lib/scaled_cases.h"

#include "device/device_cuda.h"

static void cuda_rig(struct rig *r, uint64_t seed, uint32_t n_devices)
{
    uint64_t state = seed;
    memset(r, 0, sizeof(*r));
    r->o.n_devices = n_devices;
    for (uint32_t i = 0; i < n_devices; i++)
        r->o.domain[i] = i % 2;
    r->o.plan = plan_options_default();
    r->o.plan.ring_slots = 1 + (uint32_t)(random_next(&state) % 4);
    r->o.plan.chunk_bytes = 64U << (random_next(&state) % 8);
    r->o.plan.least_piece_bytes = 64;
    r->o.fused = random_next(&state) % 2 == 0;
    r->o.shadow = random_next(&state) % 2 == 0;
    r->o.seed = seed;
    (void)snprintf(r->o.hello.backend, sizeof(r->o.hello.backend), "cuda");
    (void)snprintf(r->o.hello.transport, sizeof(r->o.hello.transport), "nccl");
}

/* Ranks of both sides, dealt out over the devices. */
static void sides(struct rig *r, uint64_t seed, bool cast, uint32_t n_source, uint32_t n_dest)
{
    char *source = rig_random_json(seed, seed + 1, "s", n_source, 6, false);
    char *dest = rig_random_json(seed, seed + 2, "d", n_dest, 6, cast);
    rig_side(r, 0, source, 0, n_source);
    rig_side(r, 1, dest, 0, n_dest);
    for (uint32_t side = 0; side < 2; side++)
        for (uint32_t i = 0; i < (side == 0 ? n_source : n_dest); i++)
            r->rank_device[side][i] = (int32_t)((i + side) % r->o.n_devices);
    mem_free(source);
    mem_free(dest);
}

static void refit_twice(struct rig *r)
{
    rig_open(r);
    for (uint64_t version = 1; version <= 2; version++) {
        r->version = version;
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
        uint64_t *table = rig_refit(r, WIRE_VERIFY_FULL);
        ck_assert_uint_eq(rig_wrong(r, rig_target(r), version), 0);
        for (uint32_t i = 0; i < r->program.n_holds; i++)
            for (uint32_t k = i + 1; k < r->program.n_holds; k++)
                if (program_hold(&r->program, i).cell == program_hold(&r->program, k).cell)
                    ck_assert_uint_eq(table[i], table[k]);
        free(table);
    }
    rig_close(r);
}

START_TEST(a_colocated_refit_lands_every_element_on_one_gpu)
{
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct rig r;
        cuda_rig(&r, seed, 1);
        sides(&r, seed, seed % 2 == 0, 1 + (uint32_t)seed % 4, 1 + (uint32_t)seed % 3);
        refit_twice(&r);
    }
}
END_TEST

START_TEST(a_refit_between_gpus_lands_every_element)
{
    uint32_t n = 0;
    struct err e = {0};
    ck_assert_msg(device_cuda_count(&n, &e) == 0, "%s", e.text);
    n = n > 4 ? 4 : n;
    for (uint64_t seed = 21; n > 1 && seed <= 28; seed++) {
        struct rig r;
        cuda_rig(&r, seed, n);
        sides(&r, seed, seed % 2 == 0, n, n);
        refit_twice(&r);
    }
}
END_TEST

/* All ranks on one. */
START_TEST(a_colocated_refit_makes_float8_with_its_scales_on_one_gpu)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct rig r;
        const struct side_case sides[] = {{2, "2", ROWS, NULL, false, false},
                                          {2, "2", ROWS, REPLICATE, false, false}};
        model_add("v", 256, 301, 128, 128, seed % 2 == 0 ? DTYPE_FLOAT32 : DTYPE_BFLOAT16);
        if (seed % 3 == 0)
            model_add("w", 800, 500, 400, 500, DTYPE_BFLOAT16);
        scaled_rig(&r, sides, 2);
        odd_sizes(&r, seed);
        r.o.n_devices = 1;
        for (uint32_t side = 0; side < 2; side++)
            for (uint32_t i = 0; i < 2; i++)
                r.rank_device[side][i] = 0;
        refit_scaled(&r);
        refit_close(&r);
    }
}
END_TEST

/* CASES.md C16: a client and the data plane in one process. What is mapped is the client's memory itself: a publication by it
 * has the fingerprints of the same bytes in host memory. */
START_TEST(a_client_in_the_data_planes_own_process_is_read_where_its_memory_lies)
{
    struct rig r;
    void *mine = NULL;
    cudaIpcMemHandle_t handle;
    cuda_rig(&r, 16, 1);
    sides(&r, 16, false, 1, 1);
    rig_open(&r);
    rig_fill_sources(&r, 1);
    struct rig_worker *host = &r.workers[0], own = *host;
    const size_t n = host->memory[WIRE_LIVE].bytes;
    const uint32_t n_tensors = r.layouts[0]->n_tensors;
    ck_assert_uint_eq(host->layout, 0);
    ck_assert_int_eq(cudaSetDevice(0), cudaSuccess);
    ck_assert_int_eq(cudaMalloc(&mine, n), cudaSuccess);
    ck_assert_int_eq(cudaMemcpy(mine, host->memory[WIRE_LIVE].data, n, cudaMemcpyHostToDevice),
                     cudaSuccess);
    ck_assert_int_eq(cudaIpcGetMemHandle(&handle, mine), cudaSuccess);
    struct wire_map m = {.bytes = n,
                         .segment = WIRE_LIVE,
                         .kind = WIRE_SEGMENT_CUDA_IPC,
                         .allocation_bytes = n,
                         .address = (uintptr_t)mine};
    memcpy(m.handle, &handle, sizeof m.handle);
    ck_assert(process_id_self(&m.owner));
    own.id = 16161616;
    own.device = 0;
    rig_expect(&r, rig_send(&r, WIRE_MAP, own.id, &m, sizeof m, NULL, 0, NULL, 0), WIRE_MAPPED);
    ck_assert_msg(r.packet->header.code == 0, "%s", rig_failure(&r)->text);
    rig_bind(&r, &own, WIRE_LIVE);
    uint64_t *tables[2];
    const uint64_t ids[] = {host->id, own.id};
    r.version = 1;
    for (unsigned i = 0; i < 2; i++) {
        const struct wire_publish publish = {0};
        rig_expect(&r,
                   rig_send(&r, WIRE_PUBLISH, ids[i], &publish, sizeof publish, NULL, 0, NULL, 0),
                   WIRE_PUBLISHED);
        tables[i] = rig_table(&r, n_tensors);
    }
    ck_assert_mem_eq(tables[0], tables[1], n_tensors * sizeof **tables);
    uint64_t any = 0;
    for (uint32_t t = 0; t < n_tensors; t++)
        any |= tables[0][t];
    ck_assert_uint_ne(any, 0);

    rig_expect(&r, rig_send(&r, WIRE_UNBIND, own.id, NULL, 0, NULL, 0, NULL, 0), WIRE_UNBOUND);
    m.owner.start++;
    rig_expect(&r, rig_send(&r, WIRE_MAP, own.id, &m, sizeof m, NULL, 0, NULL, 0), WIRE_MAPPED);
    ck_assert_int_eq(r.packet->header.code, RS_EINVAL);
    char *back = malloc(n);
    ck_assert_int_eq(cudaMemcpy(back, mine, n, cudaMemcpyDeviceToHost), cudaSuccess);
    ck_assert_mem_eq(back, host->memory[WIRE_LIVE].data, n);
    ck_assert_int_eq(cudaFree(mine), cudaSuccess);
    free(back);
    free(tables[0]);
    free(tables[1]);
    rig_close(&r);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_colocated_refit_lands_every_element_on_one_gpu)                                            \
    X(a_client_in_the_data_planes_own_process_is_read_where_its_memory_lies)                       \
    X(a_refit_between_gpus_lands_every_element)                                                    \
    X(a_colocated_refit_makes_float8_with_its_scales_on_one_gpu)
#include "test/lib/main.h"
