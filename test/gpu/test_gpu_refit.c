/* Whole refits through the data plane's device and exec code, as the control process drives it, with
 * backend cuda: all ranks on one GPU, and on several where there are. Workers' memory is host
 * memory that the GPU reaches. */
#include <check.h>

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
                if (r->program.holds[i].cell == r->program.holds[k].cell)
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

#define TESTS(X)                                                                                   \
    X(a_colocated_refit_lands_every_element_on_one_gpu)                                            \
    X(a_refit_between_gpus_lands_every_element)                                                    \
    X(a_colocated_refit_makes_float8_with_its_scales_on_one_gpu)
#include "test/lib/main.h"
