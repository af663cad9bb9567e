/* Models with tensors that become float8 with block scales, and refits of them: every byte of values
 * and scales is that of a brute force, which knows blocks, scales and float8 by their definitions
 * alone. With TEST_DEVICE=cuda on CUDA devices, one for each rank. */
#ifndef RS_TEST_SCALED_CASES_H
#define RS_TEST_SCALED_CASES_H

#include <check.h>
#include <math.h>

#include "test/lib/rig.h"

/* --- the brute force -------------------------------------------------------------------------- */

enum { MODEL_TENSORS = 3, MODEL_MOST = 400 * 1024 };

/* One tensor of a model: what the source holds of it, and what that becomes. */
struct model_tensor {
    char name[16];
    uint64_t rows, columns, block[2];
    uint8_t dtype; /* of the source */
    float *value;
    uint32_t *scale; /* per block */
    uint8_t *quantised, *plain;
};

static struct {
    struct model_tensor t[MODEL_TENSORS];
    uint32_t n;
    uint64_t version; /* of what has been made */
} model;

static inline double e4m3_value(uint32_t bits)
{
    return bits < 8 ? ldexp(bits, -9) : ldexp(8 + bits % 8, (int)(bits / 8) - 10);
}

/* e4m3_value of 0 … 0x7E, worked out once: hundreds of thousands of elements are searched for among them. */
RIG_COMPUTES static inline const double *e4m3_values(void)
{
    static double values[0x7F];
    for (uint32_t i = 0; i < 0x7F && values[0x7E] == 0; i++)
        values[i] = e4m3_value(i);
    return values;
}

/* The nearest of the 127 finite magnitudes, the even one where two are as near. */
RIG_COMPUTES static inline uint8_t e4m3(double v)
{
    const double *values = e4m3_values();
    uint8_t sign = signbit(v) ? 0x80 : 0;
    uint32_t low = 0, high = 0x7E;
    double a = fabs(v);
    if (isnan(v))
        return 0x7F;
    if (a >= values[0x7E])
        return sign | 0x7E;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        *(values[middle] <= a ? &low : &high) = middle;
    }
    double down = a - values[low], up = values[high] - a;
    return (uint8_t)(sign | (down < up || (down == up && low % 2 == 0) ? low : high));
}

static inline uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* Of many magnitudes; some NaN, infinities, zeros of both signs; the second row of blocks is all
 * zero, and the third has nothing finite. */
static inline float source_value(const struct model_tensor *t, uint64_t i, uint64_t version)
{
    uint64_t state = i * 2654435761U + version * 977 + t->rows, row = i / t->columns / t->block[0];
    uint64_t r = random_next(&state);
    uint32_t bits = (uint32_t)(r >> 32 & 0x807F0000) | (uint32_t)(115 + r % 20) << 23;
    if (t->dtype == DTYPE_FLOAT32)
        bits |= (uint32_t)(r >> 8 & 0xFFFF);
    float v = float_of(bits);
    v = r % 211 == 1 ? NAN : r % 211 == 2 ? -INFINITY : r % 211 == 3 ? -0.0F : v;
    return row == 1 ? copysignf(0.0F, v) : row == 2 ? copysignf(INFINITY, v) : v;
}

static inline uint64_t across(const struct model_tensor *t)
{
    return (t->columns + t->block[1] - 1) / t->block[1];
}

static inline float block_scale(const struct model_tensor *t, uint64_t row, uint64_t column)
{
    double amax = 0;
    for (uint64_t i = row * t->block[0]; i < (row + 1) * t->block[0] && i < t->rows; i++)
        for (uint64_t k = column * t->block[1]; k < (column + 1) * t->block[1] && k < t->columns;
             k++) {
            double a = fabs((double)t->value[i * t->columns + k]);
            amax = isfinite(a) && a > amax ? a : amax;
        }
    return amax == 0 ? 1.0F : (float)(amax / 448.0);
}

static inline void model_make(struct model_tensor *t, uint64_t version)
{
    uint64_t n = t->rows * t->columns;
    for (uint64_t i = 0; i < n; i++)
        t->value[i] = source_value(t, i, version);
    for (uint64_t row = 0; row * t->block[0] < t->rows; row++)
        for (uint64_t column = 0; column < across(t); column++)
            t->scale[row * across(t) + column] = bits_of(block_scale(t, row, column));
    for (uint64_t i = 0; i < n; i++) {
        uint64_t row = i / t->columns / t->block[0], column = i % t->columns / t->block[1];
        double scale = (double)float_of(t->scale[row * across(t) + column]);
        t->quantised[i] = e4m3((double)(float)((double)t->value[i] / scale));
        t->plain[i] = e4m3((double)t->value[i]);
    }
}

static inline void model_add(const char *name, uint64_t rows, uint64_t columns, uint64_t block_rows,
                             uint64_t block_columns, uint8_t dtype)
{
    struct model_tensor *t = &model.t[model.n++];
    uint64_t n = rows * columns;
    ck_assert_uint_le(n, MODEL_MOST);
    *t = (struct model_tensor){
        .rows = rows, .columns = columns, .block = {block_rows, block_columns}, .dtype = dtype};
    (void)snprintf(t->name, sizeof(t->name), "%s", name);
    t->value = malloc(n * sizeof(float));
    t->scale = malloc(n * sizeof(uint32_t));
    t->quantised = malloc(n);
    t->plain = malloc(n);
    model.version = 0;
}

static inline void model_close(void)
{
    for (uint32_t i = 0; i < model.n; i++) {
        free(model.t[i].value);
        free(model.t[i].scale);
        free(model.t[i].quantised);
        free(model.t[i].plain);
    }
    model.n = 0;
}

static inline uint64_t model_value(const struct layout *l, uint32_t tensor, uint64_t linear,
                                   uint64_t version)
{
    const struct tensor *x = &l->tensors[tensor];
    const char *name = x->derived_from != NULL ? x->derived_from : x->name;
    const struct model_tensor *t = model.t;
    for (uint32_t i = 0; version != model.version && i < model.n; i++)
        model_make(&model.t[i], version);
    model.version = version;
    while (strcmp(t->name, name) != 0)
        t++;
    if (x->derived_from != NULL)
        return t->scale[linear];
    if (x->dtype == DTYPE_FLOAT8_E4M3FN)
        return x->scaled_by != 0 ? t->quantised[linear] : t->plain[linear];
    if (x->dtype == DTYPE_FLOAT32)
        return bits_of(t->value[linear]);
    return isnan(t->value[linear]) ? 0x7FC0 : bits_of(t->value[linear]) >> 16;
}

/* --- layouts ---------------------------------------------------------------------------------- */

/* Ranks 0 … of a mesh of that shape; the tensors follow. */
static inline void layout_begin(struct buf *b, const char *name, uint32_t n_ranks,
                                const char *shape)
{
    buf_init(b);
    buf_printf(b, "{'name': '%s', 'ranks': %u, 'meshes': [{'name': 'm', 'shape': [%s], 'ranks': [",
               name, n_ranks, shape);
    for (uint32_t i = 0; i < n_ranks; i++)
        buf_printf(b, i == 0 ? "%u" : ", %u", i);
    buf_printf(b, "]}], 'tensors': [");
}

static inline void put_tensor(struct buf *b, const char *name, uint64_t rows, uint64_t columns,
                              const char *rest)
{
    buf_printf(b, "%s{'name': '%s', 'shape': [%llu, %llu], %s}",
               ((const char *)b->data)[b->n_bytes - 1] == '}' ? ", " : "", name,
               (unsigned long long)rows, (unsigned long long)columns, rest);
}

static inline void layout_end(struct rig *r, uint32_t number, struct buf *b, uint32_t first,
                              uint32_t n)
{
    buf_printf(b, "]}");
    buf_put(b, "", 1);
    for (char *c = (char *)b->data; *c != '\0'; c++)
        *c = *c == '\'' ? '"' : *c;
    rig_side(r, number, (const char *)b->data, first, n);
    buf_close(b);
}

/* How a side places weights ('mesh' and so on), and their scales. */
struct side_case {
    uint32_t ranks;
    const char *mesh, *weights, *scales;
    bool plain;    /* a destination that casts without scales */
    bool as_given; /* one that takes the source's dtype */
};

static inline void put_weight(struct buf *b, const struct model_tensor *t,
                              const struct side_case *side, bool source)
{
    char rest[512], scale[32];
    const char *given = t->dtype == DTYPE_FLOAT32 ? "'dtype': 'float32'" : "'dtype': 'bfloat16'";
    bool cast = !source && !side->as_given;
    (void)snprintf(rest, sizeof(rest), "%s, %s",
                   cast ? "'dtype': 'float8_e4m3fn', 'cast': true" : given, side->weights);
    put_tensor(b, t->name, t->rows, t->columns, rest);
    if (!cast || side->plain)
        return;
    (void)snprintf(rest, sizeof(rest),
                   "'dtype': 'float32', 'derived': {'from': '%s', 'rule': 'block_scale', 'block': "
                   "[%llu, %llu]}, %s",
                   t->name, (unsigned long long)t->block[0], (unsigned long long)t->block[1],
                   side->scales);
    (void)snprintf(scale, sizeof(scale), "%s_scale", t->name);
    put_tensor(b, scale, (t->rows + t->block[0] - 1) / t->block[0], across(t), rest);
}

static inline void put_side(struct rig *r, uint32_t number, const struct side_case *side,
                            uint32_t first)
{
    struct buf b;
    char name[8];
    (void)snprintf(name, sizeof(name), "l%u", number);
    layout_begin(&b, name, side->ranks, side->mesh);
    for (uint32_t i = 0; i < model.n; i++)
        put_weight(&b, &model.t[i], side, number == 0);
    layout_end(r, number, &b, first, side->ranks);
}

#define REPLICATE "'mesh': 'm', 'placements': ['Replicate']"
#define ROWS      "'mesh': 'm', 'placements': ['Shard(0)']"
#define COLUMNS   "'mesh': 'm', 'placements': ['Shard(1)']"

static inline void on_gpus(struct rig *r)
{
    const char *kind = getenv("TEST_DEVICE");
    if (kind == NULL || strcmp(kind, "cuda") != 0)
        return;
    ck_assert_int_eq(setenv("STANDIN_DEVICES", "16", 1), 0);
    (void)snprintf(r->o.hello.backend, sizeof(r->o.hello.backend), "cuda");
    (void)snprintf(r->o.hello.transport, sizeof(r->o.hello.transport), "nccl");
}

/* The source on devices 0 …, the destinations behind it; each device in a domain of its own but for
 * pairs of destination ranks. */
static inline void scaled_rig(struct rig *r, const struct side_case *sides, uint32_t n)
{
    memset(r, 0, sizeof(*r));
    r->o.plan = plan_options_default();
    r->o.value = model_value;
    for (uint32_t i = 0; i < n; i++) {
        put_side(r, i, &sides[i], r->o.n_devices);
        r->o.n_devices += sides[i].ranks;
    }
    for (uint32_t d = 0; d < r->o.n_devices; d++)
        r->o.domain[d] = d < sides[0].ranks ? d : sides[0].ranks + (d - sides[0].ranks) / 2;
    on_gpus(r);
}

static inline void check_holds(const struct rig *r, const uint64_t *table)
{
    for (uint32_t i = 0; i < r->program.n_holds; i++)
        for (uint32_t k = i + 1; k < r->program.n_holds; k++)
            if (program_hold(&r->program, i).cell == program_hold(&r->program, k).cell)
                ck_assert_uint_eq(table[i], table[k]);
}

static inline void check_plan(struct rig *r)
{
    const struct layout *destinations[RIG_MAX_LAYOUTS];
    const int32_t *devices[RIG_MAX_LAYOUTS];
    struct err e = {0};
    for (uint32_t l = 0; l < r->n_layouts; l++) {
        destinations[l] = r->layouts[1 + l];
        devices[l] = r->rank_device[1 + l];
    }
    struct plan_input input = {.source = r->layouts[0],
                               .source_device = r->rank_device[0],
                               .n_destinations = r->n_layouts,
                               .destinations = destinations,
                               .destination_device = devices,
                               .topology = &r->topology,
                               .options = r->o.plan};
    ck_assert_msg(plan_check(r->plan, &input, true, &e) == 0, "%s", e.text);
}

/* Two versions land whole: values, scales, and nothing beside them. */
static inline void refit_scaled(struct rig *r)
{
    rig_open(r);
    check_plan(r);
    for (uint64_t version = 1; version <= 2; version++) {
        r->version = version;
        rig_fill_sources(r, version);
        rig_poison_destinations(r);
        uint64_t *table = rig_refit(r, version == 1 ? WIRE_VERIFY_FULL : WIRE_VERIFY_OFF);
        ck_assert_uint_eq(rig_wrong(r, rig_target(r), version), 0);
        if (version == 1)
            check_holds(r, table);
        free(table);
    }
}

static inline void refit_close(struct rig *r)
{
    rig_close(r);
    model_close();
}

/* Chunks, slots and bindings of every kind; `seed` picks. */
static inline void odd_sizes(struct rig *r, uint64_t seed)
{
    uint64_t state = seed;
    r->o.plan.ring_slots = 1 + (uint32_t)(random_next(&state) % 4);
    r->o.plan.chunk_bytes = 512U << (random_next(&state) % 8);
    r->o.plan.least_piece_bytes = 4096;
    r->o.fused = random_next(&state) % 2 == 0;
    r->o.shadow = random_next(&state) % 2 == 0;
    r->o.seed = seed;
    r->o.hello.n_threads = random_next(&state) % 2 == 0 ? 20 : 0;
}

#endif
