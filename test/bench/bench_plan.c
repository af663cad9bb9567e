/* Planning time, memory, balance and makespan over the model zoo, built in memory (public configs).
 *
 * bench_plan [--json] [--check] [--large] [NAME-PART]. With --large only the cases of up to 16,384 devices, planned and
 * simulated once. Plan time is plan_make alone in CPU time, the best of three; memory is the greatest
 * size of all blocks that plan_make has at one time (counted by malloc_usable_size), beyond layouts. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plan/plan_simulate.h"
#include "plan/planner.h"
#include "test/lib/plan_zoo.h"

/* --- the greatest amount of heap in use, by wrapping the allocator -------------------------------------- */

static size_t in_use, most_in_use;

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void __libc_free(void *p);

static void *count(void *p)
{
    in_use += p == NULL ? 0 : malloc_usable_size(p);
    most_in_use = in_use > most_in_use ? in_use : most_in_use;
    return p;
}

void *malloc(size_t n)
{
    return count(__libc_malloc(n));
}

void *calloc(size_t n, size_t size)
{
    return count(__libc_calloc(n, size));
}

void *realloc(void *p, size_t n)
{
    size_t before = p == NULL ? 0 : malloc_usable_size(p);
    void *q = __libc_realloc(p, n);
    if (q == NULL)
        return NULL;
    in_use -= before;
    /* Old and new live side by side while a block moves. */
    if (q != p && in_use + before + malloc_usable_size(q) > most_in_use)
        most_in_use = in_use + before + malloc_usable_size(q);
    return count(q);
}

void free(void *p)
{
    in_use -= p == NULL ? 0 : malloc_usable_size(p);
    __libc_free(p);
}

/* --- models ---------------------------------------------------------------------------------------------- */

struct model {
    const char *name;
    uint32_t layers, dense_layers, experts;
    uint64_t hidden, vocab, expert_ffn, dense_ffn, shared_ffn;
    uint64_t q_a, q_b, kv_a, kv_b, q, kv, o; /* 0 where the model has none */
};

static const struct model KIMI_K2 = {.name = "Kimi-K2",
                                     .layers = 61,
                                     .dense_layers = 1,
                                     .experts = 384,
                                     .hidden = 7168,
                                     .vocab = 163840,
                                     .expert_ffn = 2048,
                                     .dense_ffn = 18432,
                                     .shared_ffn = 2048,
                                     .q_a = 1536,
                                     .q_b = 12288,
                                     .kv_a = 576,
                                     .kv_b = 16384,
                                     .o = 8192};
static const struct model DEEPSEEK_V3 = {.name = "DeepSeek-V3",
                                         .layers = 61,
                                         .dense_layers = 3,
                                         .experts = 256,
                                         .hidden = 7168,
                                         .vocab = 129280,
                                         .expert_ffn = 2048,
                                         .dense_ffn = 18432,
                                         .shared_ffn = 2048,
                                         .q_a = 1536,
                                         .q_b = 24576,
                                         .kv_a = 576,
                                         .kv_b = 32768,
                                         .o = 16384};
static const struct model QWEN3_235B = {.name = "Qwen3-235B",
                                        .layers = 94,
                                        .experts = 128,
                                        .hidden = 4096,
                                        .vocab = 151936,
                                        .expert_ffn = 1536,
                                        .q = 8192,
                                        .kv = 512,
                                        .o = 8192};

enum kind { REPLICATED, ROWS, COLUMNS, EXPERT_ROWS, EXPERT_COLUMNS };

/* One side: how layers spread over stages, and the meshes of each stage. */
struct deployment {
    uint32_t n_ranks, stages, layers_per_stage;
    uint32_t tp, ep;
    bool expert_tp;  /* experts are cut over tp like the rest, instead of spread by ep */
    bool fsdp;       /* everything is cut in dim 0 over tp */
    int32_t *dense;  /* mesh per stage: (replicas, tp) */
    int32_t *expert; /* mesh per stage and ep rank */
};

static void deploy(struct layout *l, struct deployment *d)
{
    uint32_t per_stage = d->n_ranks / d->stages;
    d->dense = mem_calloc(d->stages, sizeof *d->dense);
    d->expert = mem_calloc((size_t)d->stages * (d->ep + 1), sizeof *d->expert);
    for (uint32_t s = 0; s < d->stages; s++) {
        uint32_t shape[] = {per_stage / d->tp, d->tp};
        d->dense[s] = case_mesh(l, 2, shape, NULL, s * per_stage, 1);
        for (uint32_t e = 0; e < d->ep && !d->expert_tp; e++) {
            uint32_t replicas = per_stage / d->ep;
            d->expert[s * d->ep + e] = case_mesh(l, 1, &replicas, NULL, s * per_stage + e, d->ep);
        }
    }
}

static void put(struct layout *l, const struct deployment *d, const char *name, uint32_t layer,
                uint32_t expert, uint32_t n_experts, enum kind kind, uint64_t rows,
                uint64_t columns)
{
    static const char *const placements[] = {"RR", "R0", "R1", "R0", "R1"};
    uint32_t stage = layer / d->layers_per_stage;
    stage = stage < d->stages ? stage : d->stages - 1;
    uint64_t shape[] = {rows, columns};
    uint8_t n_dims = columns == 0 ? 1 : 2;
    if (kind >= EXPERT_ROWS && !d->expert_tp) {
        uint32_t rank = expert / (n_experts / d->ep);
        case_tensor(l, name, DTYPE_BFLOAT16, n_dims, shape, d->expert[stage * d->ep + rank], "R");
        return;
    }
    case_tensor(l, name, DTYPE_BFLOAT16, n_dims, shape, d->dense[stage],
                d->fsdp ? "R0" : placements[kind]);
}

#define PUT(kind, rows, columns, expert, ...)                                                      \
    do {                                                                                           \
        snprintf(name, sizeof name, __VA_ARGS__);                                                  \
        put(l, d, name, layer, expert, m->experts, kind, rows, columns);                           \
    } while (0)

static void put_attention(struct layout *l, const struct deployment *d, const struct model *m,
                          uint32_t layer)
{
    char name[96];
    if (m->q > 0) {
        PUT(ROWS, m->q, m->hidden, 0, "model.layers.%u.self_attn.q_proj.weight", layer);
        PUT(ROWS, m->kv, m->hidden, 0, "model.layers.%u.self_attn.k_proj.weight", layer);
        PUT(ROWS, m->kv, m->hidden, 0, "model.layers.%u.self_attn.v_proj.weight", layer);
        PUT(REPLICATED, 128, 0, 0, "model.layers.%u.self_attn.q_norm.weight", layer);
        PUT(REPLICATED, 128, 0, 0, "model.layers.%u.self_attn.k_norm.weight", layer);
    } else {
        PUT(REPLICATED, m->q_a, m->hidden, 0, "model.layers.%u.self_attn.q_a_proj.weight", layer);
        PUT(REPLICATED, m->q_a, 0, 0, "model.layers.%u.self_attn.q_a_layernorm.weight", layer);
        PUT(ROWS, m->q_b, m->q_a, 0, "model.layers.%u.self_attn.q_b_proj.weight", layer);
        PUT(REPLICATED, m->kv_a, m->hidden, 0, "model.layers.%u.self_attn.kv_a_proj.weight", layer);
        PUT(REPLICATED, 512, 0, 0, "model.layers.%u.self_attn.kv_a_layernorm.weight", layer);
        PUT(ROWS, m->kv_b, 512, 0, "model.layers.%u.self_attn.kv_b_proj.weight", layer);
    }
    PUT(COLUMNS, m->hidden, m->o, 0, "model.layers.%u.self_attn.o_proj.weight", layer);
    PUT(REPLICATED, m->hidden, 0, 0, "model.layers.%u.input_layernorm.weight", layer);
    PUT(REPLICATED, m->hidden, 0, 0, "model.layers.%u.post_attention_layernorm.weight", layer);
}

static void put_mlp(struct layout *l, const struct deployment *d, const struct model *m,
                    uint32_t layer)
{
    char name[96];
    if (layer < m->dense_layers) {
        PUT(ROWS, m->dense_ffn, m->hidden, 0, "model.layers.%u.mlp.gate_proj.weight", layer);
        PUT(ROWS, m->dense_ffn, m->hidden, 0, "model.layers.%u.mlp.up_proj.weight", layer);
        PUT(COLUMNS, m->hidden, m->dense_ffn, 0, "model.layers.%u.mlp.down_proj.weight", layer);
        return;
    }
    PUT(REPLICATED, m->experts, m->hidden, 0, "model.layers.%u.mlp.gate.weight", layer);
    if (m->shared_ffn > 0) {
        PUT(ROWS, m->shared_ffn, m->hidden, 0, "model.layers.%u.mlp.shared.gate_proj.weight",
            layer);
        PUT(ROWS, m->shared_ffn, m->hidden, 0, "model.layers.%u.mlp.shared.up_proj.weight", layer);
        PUT(COLUMNS, m->hidden, m->shared_ffn, 0, "model.layers.%u.mlp.shared.down_proj.weight",
            layer);
    }
    for (uint32_t x = 0; x < m->experts; x++) {
        PUT(EXPERT_ROWS, m->expert_ffn, m->hidden, x,
            "model.layers.%u.mlp.experts.%u.gate_proj.weight", layer, x);
        PUT(EXPERT_ROWS, m->expert_ffn, m->hidden, x,
            "model.layers.%u.mlp.experts.%u.up_proj.weight", layer, x);
        PUT(EXPERT_COLUMNS, m->hidden, m->expert_ffn, x,
            "model.layers.%u.mlp.experts.%u.down_proj.weight", layer, x);
    }
}

static void put_model(struct layout *l, const struct deployment *d, const struct model *m)
{
    char name[96];
    uint32_t layer = 0;
    PUT(ROWS, m->vocab, m->hidden, 0, "model.embed_tokens.weight");
    for (; layer < m->layers; layer++) {
        put_attention(l, d, m, layer);
        put_mlp(l, d, m, layer);
    }
    layer = m->layers - 1;
    PUT(ROWS, m->vocab, m->hidden, 0, "lm_head.weight");
    PUT(REPLICATED, m->hidden, 0, 0, "model.norm.weight");
}

static void model_sides(struct zoo_case *c, const struct model *m, struct deployment train,
                        struct deployment serve)
{
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", train.n_ranks);
    c->destinations[0] = case_layout("rollout", serve.n_ranks);
    deploy(c->source, &train);
    deploy(c->destinations[0], &serve);
    put_model(c->source, &train, m);
    put_model(c->destinations[0], &serve, m);
    mem_free(train.dense);
    mem_free(train.expert);
    mem_free(serve.dense);
    mem_free(serve.expert);
}

/* Trainer and engines on devices of their own, eight a node. */
static void model_case(struct zoo_case *c, const struct model *m, struct deployment train,
                       struct deployment serve)
{
    uint32_t first = train.n_ranks;
    model_sides(c, m, train, serve);
    case_topology(c, (train.n_ranks + serve.n_ranks) / 8, 8, 1);
    case_finish(c, 0, &first);
}

static void kimi(struct zoo_case *c)
{
    model_case(
        c, &KIMI_K2,
        (struct deployment){.n_ranks = 1024, .stages = 8, .layers_per_stage = 8, .tp = 8, .ep = 32},
        (struct deployment){
            .n_ranks = 1024, .stages = 1, .layers_per_stage = 61, .tp = 32, .ep = 32});
}

static void kimi_tp(struct zoo_case *c)
{
    model_case(
        c, &KIMI_K2,
        (struct deployment){.n_ranks = 1024, .stages = 8, .layers_per_stage = 8, .tp = 8, .ep = 32},
        (struct deployment){.n_ranks = 1024,
                            .stages = 1,
                            .layers_per_stage = 61,
                            .tp = 32,
                            .ep = 32,
                            .expert_tp = true});
}

static void kimi_4096(struct zoo_case *c)
{
    model_case(
        c, &KIMI_K2,
        (struct deployment){.n_ranks = 4096, .stages = 8, .layers_per_stage = 8, .tp = 8, .ep = 32},
        (struct deployment){
            .n_ranks = 4096, .stages = 1, .layers_per_stage = 61, .tp = 32, .ep = 32});
}

static void kimi_8192(struct zoo_case *c)
{
    model_case(
        c, &KIMI_K2,
        (struct deployment){.n_ranks = 8192, .stages = 8, .layers_per_stage = 8, .tp = 8, .ep = 32},
        (struct deployment){
            .n_ranks = 8192, .stages = 1, .layers_per_stage = 61, .tp = 32, .ep = 32});
}

/* Rows over all ranks: a part of each tensor for each of them, that one rank of every instance needs. */
static void kimi_fsdp_1024(struct zoo_case *c)
{
    model_case(c, &KIMI_K2,
               (struct deployment){.n_ranks = 1024,
                                   .stages = 1,
                                   .layers_per_stage = 61,
                                   .tp = 1024,
                                   .expert_tp = true,
                                   .fsdp = true},
               (struct deployment){
                   .n_ranks = 1024, .stages = 1, .layers_per_stage = 61, .tp = 32, .ep = 32});
}

static void deepseek(struct zoo_case *c)
{
    model_case(
        c, &DEEPSEEK_V3,
        (struct deployment){.n_ranks = 128, .stages = 4, .layers_per_stage = 16, .tp = 8, .ep = 32},
        (struct deployment){.n_ranks = 128,
                            .stages = 1,
                            .layers_per_stage = 61,
                            .tp = 32,
                            .ep = 32,
                            .expert_tp = true});
}

static void qwen(struct zoo_case *c)
{
    model_case(
        c, &QWEN3_235B,
        (struct deployment){.n_ranks = 64, .stages = 4, .layers_per_stage = 24, .tp = 4, .ep = 16},
        (struct deployment){.n_ranks = 64, .stages = 1, .layers_per_stage = 94, .tp = 8, .ep = 8});
}

/* FSDP over 64 devices to eight TP8 engines on the same devices. */
static void qwen_colocated(struct zoo_case *c)
{
    uint32_t first = 0;
    model_sides(
        c, &QWEN3_235B,
        (struct deployment){.n_ranks = 64,
                            .stages = 1,
                            .layers_per_stage = 94,
                            .tp = 64,
                            .expert_tp = true,
                            .fsdp = true},
        (struct deployment){
            .n_ranks = 64, .stages = 1, .layers_per_stage = 94, .tp = 8, .expert_tp = true});
    case_topology(c, 8, 8, 1);
    case_finish(c, 0, &first);
}

/* n tensors, the same shape and placements each. */
static void plain_case(struct zoo_case *c, uint32_t n, uint64_t rows, uint64_t columns,
                       uint32_t sources, const char *source_placement, uint32_t replicas,
                       uint32_t tp, const char *placement)
{
    uint64_t shape[] = {rows, columns};
    uint32_t dims[] = {replicas, tp};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", sources);
    c->destinations[0] = case_layout("rollout", replicas * tp);
    int32_t sm = case_mesh(c->source, 1, &sources, NULL, 0, 1);
    int32_t dm = case_mesh(c->destinations[0], 2, dims, NULL, 0, 1);
    for (uint32_t i = 0; i < n; i++) {
        char name[32];
        snprintf(name, sizeof name, "w%04u", i);
        case_tensor(c->source, name, DTYPE_BFLOAT16, 2, shape, sm, source_placement);
        case_tensor(c->destinations[0], name, DTYPE_BFLOAT16, 2, shape, dm, placement);
    }
}

static void one_to_64(struct zoo_case *c)
{
    uint32_t first = 1;
    plain_case(c, 1024, 4096, 4096, 1, "R", 64, 1, "RR");
    case_topology(c, 65, 1, 1);
    case_finish(c, 0, &first);
}

static void one_to_64_of_8(struct zoo_case *c)
{
    uint32_t first = 8;
    plain_case(c, 1024, 4096, 4096, 1, "R", 64, 8, "R0");
    case_topology(c, 65, 8, 1);
    case_finish(c, 0, &first);
}

static void four_to_8_of_4(struct zoo_case *c)
{
    uint32_t first = 4;
    plain_case(c, 128, 4096, 4096, 4, "0", 8, 4, "R0");
    case_topology(c, 9, 4, 1);
    case_finish(c, 0, &first);
}

static void straddling(struct zoo_case *c)
{
    uint32_t first = 8;
    plain_case(c, 256, 6144, 4096, 8, "0", 4, 6, "R1");
    case_topology(c, 8, 4, 1);
    case_finish(c, 0, &first);
}

/* FSDP over 16 devices to two TP8 engines on the same devices. */
static void colocated(struct zoo_case *c)
{
    uint32_t first = 0;
    plain_case(c, 512, 8192, 4096, 16, "0", 2, 8, "R1");
    case_topology(c, 2, 8, 1);
    case_finish(c, 0, &first);
}

/* NVLink domains of 4 nodes: fan-out inside the domain crosses nodes. */
static void wide_domains(struct zoo_case *c)
{
    uint32_t first = 32;
    plain_case(c, 512, 8192, 4096, 32, "0", 4, 16, "R1");
    case_topology(c, 12, 8, 4);
    case_finish(c, 0, &first);
}

/* Experts over 24 ranks, on nodes of 8, 4, 8, 4. */
static void uneven_ep24(struct zoo_case *c)
{
    uint32_t first = 16;
    uint64_t up[] = {768, 2048}, down[] = {2048, 768};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", 16);
    c->destinations[0] = case_layout("rollout", 24);
    int32_t sm[8], dm[24];
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t two = 2;
        sm[i] = case_mesh(c->source, 1, &two, NULL, i, 8);
    }
    for (uint32_t i = 0; i < 24; i++) {
        uint32_t one = 1;
        dm[i] = case_mesh(c->destinations[0], 1, &one, NULL, i, 1);
    }
    for (uint32_t x = 0; x < 48 * 120; x++) {
        char name[32];
        for (uint32_t k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "l%02u.e%03u.%u", x / 120, x % 120, k);
            case_tensor(c->source, name, DTYPE_BFLOAT16, 2, k == 2 ? down : up, sm[x % 120 / 15],
                        "R");
            case_tensor(c->destinations[0], name, DTYPE_BFLOAT16, 2, k == 2 ? down : up,
                        dm[x % 120 / 5], "R");
        }
    }
    case_topology(c, 10, 4, 1);
    uint32_t of_pair[] = {0, 1, 2, 2, 3,
                          4, 4, 5, 6, 6}; /* domains: two nodes of four are one of eight */
    for (uint32_t d = 0; d < 40; d++)
        c->topology.devices[d].domain = of_pair[d / 4] + (d / 4 < 4 ? 0 : 0);
    case_finish(c, 0, &first);
}

/* Every shape different, odd sizes, on the meshes of a large deployment. */
static void distinct(struct zoo_case *c)
{
    uint32_t first = 1024;
    struct deployment train = {
        .n_ranks = 1024, .stages = 8, .layers_per_stage = 2500, .tp = 8, .ep = 32};
    struct deployment serve = {
        .n_ranks = 1024, .stages = 1, .layers_per_stage = 20000, .tp = 32, .ep = 32};
    memset(c, 0, sizeof *c);
    c->source = case_layout("train", 1024);
    c->destinations[0] = case_layout("rollout", 1024);
    deploy(c->source, &train);
    deploy(c->destinations[0], &serve);
    for (uint32_t i = 0; i < 20000; i++) {
        char name[32];
        snprintf(name, sizeof name, "w%05u", i);
        enum kind kind = (enum kind)(1 + i % 2);
        put(c->source, &train, name, i, 0, 32, kind, 2048 + i, 1024 + i * 7 % 4001);
        put(c->destinations[0], &serve, name, i, 0, 32, kind, 2048 + i, 1024 + i * 7 % 4001);
    }
    case_topology(c, 256, 8, 1);
    case_finish(c, 0, &first);
    mem_free(train.dense);
    mem_free(train.expert);
    mem_free(serve.dense);
    mem_free(serve.expert);
}

/* --- measuring ---------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*build)(struct zoo_case *c);
    bool large;
} CASES[] = {
    {"Kimi-K2 1024 to 1024, EP to EP", kimi, false},
    {"Kimi-K2 1024 to 1024, EP to TP", kimi_tp, false},
    {"Kimi-K2 4096 to 4096", kimi_4096, false},
    {"DeepSeek-V3 128 to 128, EP to TP32", deepseek, false},
    {"Qwen3-235B 64 to 64", qwen, false},
    {"Qwen3-235B FSDP64 to 8 x TP8, coloc.", qwen_colocated, false},
    {"1 source to 64 domains", one_to_64, false},
    {"1 source to 64 domains of 8", one_to_64_of_8, false},
    {"4 sources to 8 domains of 4", four_to_8_of_4, false},
    {"TP6 on nodes of 4", straddling, false},
    {"EP24 on uneven domains", uneven_ep24, false},
    {"FSDP16 to 2 x TP8, colocated", colocated, false},
    {"TP16 in domains of 4 nodes", wide_domains, false},
    {"20,000 different shapes", distinct, false},
    {"Kimi-K2 8192 to 8192", kimi_8192, true},
    {"Kimi-K2 FSDP1024 to 32 x TP32", kimi_fsdp_1024, true},
};

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* planning is one thread and waits for nothing */
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

struct figures {
    double plan_ms, peak_mib, balance, makespan, program_ms, program_mib, check_ms, cached_ms;
    struct plan_totals totals;
};

static int measure_program(const struct zoo_case *c, const struct plan *p, struct figures *f)
{
    struct err e = {0};
    struct buf b;
    uint32_t node = c->topology.devices[c->destination_device[0][0]].node;
    buf_init(&b);
    double begin = now_ms();
    int r = plan_program(p, node, &b, &e);
    f->program_ms = now_ms() - begin;
    f->program_mib = (double)b.n_bytes / 1048576;
    buf_close(&b);
    return r;
}

/* The same input again, as the daemon asks for it (service/plan_store.h): the digest is the key of a short list. */
static int measure_cached(const struct zoo_case *c, struct figures *f)
{
    uint8_t first[16], again[16];
    int r = plan_input_digest(&c->input, first);
    double begin = now_ms();
    if (r == 0)
        r = plan_input_digest(&c->input, again);
    f->cached_ms = now_ms() - begin;
    return r == 0 && memcmp(first, again, sizeof first) != 0 ? RS_EINTERNAL : r;
}

static int measure_large(struct zoo_case *c, const char *name)
{
    struct plan *p = NULL;
    struct plan_simulation s = {0};
    struct err e = {0};
    struct plan_model m = plan_model_of(&c->topology);
    size_t base = most_in_use = in_use;
    double begin = now_ms();
    int r = plan_make(&c->input, &p, &e);
    double plan_ms = now_ms() - begin, plan_mib = (double)(most_in_use - base) / 1048576;
    base = most_in_use = in_use;
    begin = now_ms();
    if (r == 0)
        r = plan_simulate(p, &m, &s, &e);
    if (r == 0)
        printf("%-32s %u devices: planned in %.0f ms, %.0f MiB; simulated in %.0f ms, %.0f MiB; "
               "busiest %.4f, makespan %.4f\n",
               name, c->topology.n_devices, plan_ms, plan_mib, now_ms() - begin,
               (double)(most_in_use - base) / 1048576,
               (double)plan_totals(p)->busiest_bytes / (double)plan_totals(p)->lower_bound,
               s.makespan_s / s.bound_s);
    else
        fprintf(stderr, "%s\n", e.text);
    plan_simulation_close(&s);
    plan_free(p);
    return r;
}

static int measure(struct zoo_case *c, bool full, struct figures *f)
{
    struct plan *p = NULL;
    struct err e = {0};
    f->plan_ms = 1e30;
    for (int i = 0; i < 3; i++) {
        plan_free(p);
        size_t base = in_use;
        most_in_use = in_use;
        double begin = now_ms();
        if (plan_make(&c->input, &p, &e) != 0) {
            fprintf(stderr, "%s\n", e.text);
            return 1;
        }
        double ms = now_ms() - begin;
        f->plan_ms = ms < f->plan_ms ? ms : f->plan_ms;
        f->peak_mib = (double)(most_in_use - base) / 1048576;
    }
    const struct plan_totals *t = plan_totals(p);
    f->totals = *t;
    f->balance = (double)t->busiest_bytes / (double)t->lower_bound;
    double bound_s =
        (double)t->lower_bound /
        (t->network_bytes > 0 ? c->topology.network_bytes_per_s : c->topology.domain_bytes_per_s);
    f->makespan = plan_predict_s(p, &c->topology) / bound_s;
    double begin = now_ms();
    int r = plan_check(p, &c->input, full, &e);
    f->check_ms = now_ms() - begin;
    if (r == 0)
        r = measure_program(c, p, f);
    if (r != 0) {
        fprintf(stderr, "%s\n", e.text);
        plan_free(p);
        return r;
    }
    plan_free(p);
    r = measure_cached(c, f);
    if (r != 0)
        fprintf(stderr, "the same input has no digest, or another one: %s\n", err_name(r));
    return r;
}

static void print_row(const char *name, const struct figures *f, bool json, bool first)
{
    if (!json) {
        printf("%-36s %10.1f %9.1f %12llu %9.4f %9.4f %6u %9u %10.1f %9.1f %9.1f\n", name,
               f->plan_ms, f->peak_mib, (unsigned long long)f->totals.transfers, f->balance,
               f->makespan, f->totals.max_relay_depth, f->totals.n_rounds, f->program_mib,
               f->program_ms, f->check_ms);
        return;
    }
    printf("%s{\"case\": \"%s\", \"plan_ms\": %.3f, \"peak_mib\": %.3f, \"transfers\": %llu, "
           "\"busiest_over_bound\": %.5f, \"makespan_over_bound\": %.5f, \"relay_depth\": %u, "
           "\"rounds\": %u, \"program_mib\": %.3f, \"program_ms\": %.3f, \"check_ms\": %.3f, "
           "\"cached_ms\": %.5f}",
           first ? "[" : ",\n ", name, f->plan_ms, f->peak_mib,
           (unsigned long long)f->totals.transfers, f->balance, f->makespan,
           f->totals.max_relay_depth, f->totals.n_rounds, f->program_mib, f->program_ms,
           f->check_ms, f->cached_ms);
}

int main(int argc, char **argv)
{
    bool json = false, full = false, first = true, large = false;
    const char *only = "";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            json = true;
        else if (strcmp(argv[i], "--check") == 0)
            full = true;
        else if (strcmp(argv[i], "--large") == 0)
            large = true;
        else
            only = argv[i];
    }
    if (!json && !large)
        printf("%-36s %10s %9s %12s %9s %9s %6s %9s %10s %9s %9s\n", "case", "plan ms", "peak MiB",
               "transfers", "busiest", "makespan", "depth", "rounds", "node MiB", "node ms",
               "check ms");
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct zoo_case c;
        struct figures f = {0};
        if (CASES[i].large != large || strstr(CASES[i].name, only) == NULL)
            continue;
        CASES[i].build(&c);
        if (large) {
            int r = measure_large(&c, CASES[i].name);
            case_close(&c);
            if (r != 0)
                return 1;
            continue;
        }
        if (measure(&c, full, &f) != 0)
            return 1;
        print_row(CASES[i].name, &f, json, first);
        fflush(stdout);
        first = false;
        case_close(&c);
    }
    if (json && !large)
        puts(first ? "[]" : "]");
    return 0;
}
