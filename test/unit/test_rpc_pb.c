/* Hostile protobuf bytes: malformed, small but of huge memory, deep, broken strings. Bytes are written
 * by hand. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "reshard.pb-c.h"
#include "rpc/pb_budget.h"

#define TENSOR  (&reshard__v1__tensor__descriptor)
#define REQUEST (&reshard__v1__put_layout_request__descriptor)

static struct err error;

/* Prescan and unpack must say the same; and whatever is accepted, protobuf-c can unpack. */
static int scan(const ProtobufCMessageDescriptor *type, const void *data, size_t n,
                const struct pb_limits *limits)
{
    void *message = NULL;
    error = (struct err){0};
    int r = pb_prescan(type, data, n, limits, &error);
    ck_assert_int_eq(pb_unpack(type, data, n, limits, &message, NULL), r);
    ck_assert_int_eq(message != NULL, r == 0);
    pb_free(message);
    return r;
}

#define SCAN(type, literal) scan(type, literal, sizeof(literal) - 1, NULL)

START_TEST(an_ordinary_message_comes_out_as_it_went_in)
{
    /* Tensor {name "w", shape [8, 300] packed, mesh "tp", placements [{SHARD, 1}]} */
    static const char bytes[] = "\x0a\x01w\x12\x03\x08\xac\x02\x22\x02tp\x2a\x04\x08\x01\x10\x02";
    void *message = NULL;
    ck_assert_int_eq(pb_unpack(TENSOR, bytes, sizeof bytes - 1, NULL, &message, NULL), 0);
    const Reshard__V1__Tensor *t = message;
    ck_assert_str_eq(t->name, "w");
    ck_assert_uint_eq(t->n_shape, 2);
    ck_assert_uint_eq(t->shape[0], 8);
    ck_assert_uint_eq(t->shape[1], 300);
    ck_assert_str_eq(t->mesh, "tp");
    ck_assert_uint_eq(t->n_placements, 1);
    ck_assert_int_eq(t->placements[0]->dim, 1);
    pb_free(message);
}
END_TEST

START_TEST(nothing_at_all_is_an_empty_message)
{
    ck_assert_int_eq(scan(TENSOR, NULL, 0, NULL), 0);
}
END_TEST

START_TEST(packed_runs_may_be_empty_and_several)
{
    ck_assert_int_eq(SCAN(TENSOR, "\x12\x00"), 0);
    ck_assert_int_eq(SCAN(TENSOR, "\x6a\x00"), 0); /* (b), unknown field 13 */
    ck_assert_int_eq(SCAN(TENSOR, "\x12\x01\x08\x12\x01\x09"), 0);
    ck_assert_int_eq(SCAN(TENSOR, "\x10\x08\x12\x01\x09"), 0); /* unpacked and packed */
}
END_TEST

START_TEST(malformed_bytes_are_refused)
{
    ck_assert_int_eq(SCAN(TENSOR, "\x88\x80\x80\x80\x41\x00"), RS_EINVAL); /* tag beyond 32 bits */
    ck_assert_int_eq(SCAN(TENSOR, "\x88\x80\x80\x80\x80\x00\x00"),
                     RS_EINVAL); /* a tag of six bytes */
    ck_assert_int_eq(SCAN(TENSOR, "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
                     RS_EINVAL); /* (d) */
    ck_assert_int_eq(SCAN(TENSOR, "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02"),
                     RS_EINVAL); /* 65 bits */
    ck_assert_int_eq(SCAN(TENSOR, "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
                     0);                                                    /* 2^64 - 1 */
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\xff\xff\xff\xff\x0fx"), RS_EINVAL); /* (e) */
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x03xy"), RS_EINVAL);                /* (f) */
    ck_assert_int_eq(SCAN(TENSOR, "\x0b\x0c"), RS_EINVAL);                  /* (h): a group */
    ck_assert_int_eq(SCAN(TENSOR, "\x0c"), RS_EINVAL);
    ck_assert_int_eq(SCAN(TENSOR, "\x0e\x00"), RS_EINVAL);
    ck_assert_int_eq(SCAN(TENSOR, "\x0f\x00"), RS_EINVAL);
    ck_assert_int_eq(SCAN(TENSOR, "\xa3\x06\xa4\x06"), RS_EINVAL); /* an unknown group, field 100 */
    ck_assert_int_eq(SCAN(TENSOR, "\x00\x00"), RS_EINVAL);         /* (i) */
    ck_assert_int_eq(SCAN(TENSOR, "\x08\x01"), RS_EINVAL);         /* name as a varint */
    ck_assert_int_eq(SCAN(TENSOR, "\x12\x02\x08\x80"), RS_EINVAL); /* packed, cut inside */
    ck_assert_ptr_nonnull(strstr(error.text, "reshard.v1.Tensor.shape"));
}
END_TEST

START_TEST(a_singular_message_given_twice_is_refused)
{
    ck_assert_int_eq(SCAN(TENSOR, "\x4a\x00"), 0);
    ck_assert_int_eq(SCAN(TENSOR, "\x4a\x00\x4a\x00"), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(error.text, "derived: given twice"));
}
END_TEST

START_TEST(every_prefix_is_accepted_or_refused_cleanly)
{
    static const char bytes[] =
        "\x12\x14\x0a\x01w\x12\x03\x08\xac\x02\x22\x02tp\x2a\x04\x08\x01\x10\x02\x4a\x00"
        "\x0a\x09\x0a\x03"
        "abc"
        "\x10\x04\x28\x01";
    size_t n_good = 0;
    for (size_t n = 0; n < sizeof bytes; n++) {
        uint8_t *exact = malloc(n == 0 ? 1 : n); /* so that a read past the end shows under ASan */
        memcpy(exact, bytes, n);
        n_good += scan(REQUEST, exact, n, NULL) == 0;
        free(exact);
    }
    ck_assert_uint_eq(
        n_good, 3); /* nothing, the tensor, and the whole; one byte more is the literal's NUL */
}
END_TEST

START_TEST(text_must_be_utf8_without_nul)
{
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x02\xf0\x80"), RS_EINVAL); /* protobuf-c/protobuf-c#726 */
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x03"
                                  "a\x00"
                                  "b"),
                     RS_EINVAL);
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x02\xc0\x80"), RS_EINVAL);         /* overlong NUL */
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x03\xe0\x9f\xbf"), RS_EINVAL);     /* overlong */
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x03\xed\xa0\x80"), RS_EINVAL);     /* surrogate */
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x04\xf4\x90\x80\x80"), RS_EINVAL); /* beyond U+10FFFF */
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x01\x80"), RS_EINVAL);
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x02\xe2\x82"), RS_EINVAL); /* cut inside */
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x02\xc3\xa4"), 0);
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x03\xed\x9f\xbf"), 0);
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x03\xe2\x82\xac"), 0);
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x04\xf4\x8f\xbf\xbf"), 0);
    ck_assert_int_eq(SCAN(TENSOR, "\x0a\x04\xf0\x90\x80\x80"), 0);
}
END_TEST

START_TEST(text_has_a_longest)
{
    char bytes[3 + 4097] = "\x0a\x81\x20"; /* 4097 */
    memset(bytes + 3, 'a', 4097);
    ck_assert_int_eq(scan(TENSOR, bytes, sizeof bytes, NULL), RS_EEXHAUSTED);
    struct pb_limits l = {.max_string_bytes = 4097};
    ck_assert_int_eq(scan(TENSOR, bytes, sizeof bytes, &l), 0);
}
END_TEST

START_TEST(elements_of_a_repeated_field_are_counted_over_all_spellings)
{
    struct pb_limits l = {.max_repeated = 4};
    ck_assert_int_eq(scan(TENSOR, "\x12\x04\x01\x01\x01\x01", 6, &l), 0);
    ck_assert_int_eq(scan(TENSOR, "\x12\x05\x01\x01\x01\x01\x01", 7, &l), RS_EEXHAUSTED);
    ck_assert_int_eq(scan(TENSOR, "\x12\x03\x01\x01\x01\x10\x01\x10\x01", 9, &l), RS_EEXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.text, "reshard.v1.Tensor.shape: more than 4"));
    struct pb_field_limit more[] = {{"reshard.v1.Tensor.placements", 9},
                                    {"reshard.v1.Tensor.shape", 5}};
    l.fields = more;
    l.n_fields = 2;
    ck_assert_int_eq(scan(TENSOR, "\x12\x05\x01\x01\x01\x01\x01", 7, &l), 0);
    ck_assert_int_eq(scan(TENSOR, "\x12\x06\x01\x01\x01\x01\x01\x01", 8, &l), RS_EEXHAUSTED);
}
END_TEST

START_TEST(depth_is_limited)
{
    /* PutLayoutRequest > Tensor > Region > Box: four. */
    static const char bytes[] = "\x12\x04\x3a\x02\x12\x00";
    struct pb_limits l = {.max_depth = 3};
    ck_assert_int_eq(scan(REQUEST, bytes, sizeof bytes - 1, &l), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(error.text, "deeper than 3"));
    l.max_depth = 4;
    ck_assert_int_eq(scan(REQUEST, bytes, sizeof bytes - 1, &l), 0);
}
END_TEST

/* 4 MiB of one-byte varints, and two million empty messages of two bytes. */
START_TEST(small_bytes_that_would_be_huge_memory_are_refused_unpacked)
{
    size_t n = (size_t)4 << 20;
    uint8_t *bytes = malloc(n);
    struct pb_field_limit any[] = {{"reshard.v1.PutLayoutRequest.tensors", UINT32_MAX},
                                   {"reshard.v1.Tensor.shape", UINT32_MAX}};
    struct pb_limits l = {.max_memory_bytes = (size_t)16 << 20, .fields = any, .n_fields = 2};
    for (size_t i = 0; i < n; i += 2) {
        bytes[i] = 0x12; /* tensors */
        bytes[i + 1] = 0;
    }
    ck_assert_int_eq(scan(REQUEST, bytes, n, NULL), RS_EEXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.text, "PutLayoutRequest.tensors: more than 1024"));
    ck_assert_int_eq(scan(REQUEST, bytes, n, &l), RS_EEXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.text, "16777216 bytes of memory"));
    memset(bytes, 1, n);
    memcpy(bytes, "\x12\xfb\xff\xff\x01", 5); /* shape, 4 MiB less five bytes */
    ck_assert_int_eq(scan(TENSOR, bytes, n, &l), RS_EEXHAUSTED);
    l.max_memory_bytes = (size_t)64 << 20;
    ck_assert_int_eq(scan(TENSOR, bytes, n, &l), 0);
    for (size_t i = 0; i < n; i += 2) {
        bytes[i] = 0x72; /* unknown field 14, kept by protobuf-c: 44 times the bytes */
        bytes[i + 1] = 0;
    }
    ck_assert_int_eq(scan(TENSOR, bytes, n, &l), RS_EEXHAUSTED);
    free(bytes);
}
END_TEST

/* Depth: what has no limit in protobuf-c has none to need, since no message holds itself. */
static void expect_no_cycle(const ProtobufCMessageDescriptor *type,
                            const ProtobufCMessageDescriptor **above, unsigned depth)
{
    ck_assert_uint_lt(depth, 16);
    for (unsigned i = 0; i < depth; i++)
        ck_assert_msg(above[i] != type, "%s holds itself", type->name);
    above[depth] = type;
    ck_assert_uint_le(type->n_fields, 256);
    for (unsigned i = 0; i < type->n_fields; i++)
        if (type->fields[i].type == PROTOBUF_C_TYPE_MESSAGE)
            expect_no_cycle(type->fields[i].descriptor, above, depth + 1);
}

START_TEST(no_message_of_the_schema_holds_itself)
{
    static const ProtobufCServiceDescriptor *const services[] = {&reshard__v1__refit__descriptor,
                                                                 &reshard__v1__admin__descriptor};
    const ProtobufCMessageDescriptor *above[16];
    for (size_t s = 0; s < 2; s++)
        for (unsigned i = 0; i < services[s]->n_methods; i++) {
            expect_no_cycle(services[s]->methods[i].input, above, 0);
            expect_no_cycle(services[s]->methods[i].output, above, 0);
        }
}
END_TEST

/* Noise, and good messages with a few bytes changed; what passes the scan unpacks
 * within its budget. */
START_TEST(noise_never_gets_further_than_the_scan_allows)
{
    static const char good[] =
        "\x12\x14\x0a\x01w\x12\x03\x08\xac\x02\x22\x02tp\x2a\x04\x08\x01\x10\x02\x4a\x00"
        "\x0a\x09\x0a\x03"
        "abc"
        "\x10\x04\x28\x01";
    uint8_t bytes[256];
    uint64_t seed = 1;
    unsigned n_good = 0, n_bad = 0;
    for (int round = 0; round < 60000; round++) {
        size_t n = sizeof good - 1;
        memcpy(bytes, good, n);
        if (round % 2 == 0) {
            n = random_next(&seed) % sizeof bytes;
            for (size_t i = 0; i < n; i++)
                bytes[i] = (uint8_t)random_next(&seed);
        } else {
            for (int k = 0; k < 1 + round % 3; k++)
                bytes[random_next(&seed) % n] = (uint8_t)random_next(&seed);
        }
        int r = scan(REQUEST, bytes, n, NULL);
        ck_assert(r == 0 || r == RS_EINVAL || r == RS_EEXHAUSTED);
        n_good += r == 0;
        n_bad += r != 0;
    }
    ck_assert_uint_gt(n_good, 3000);
    ck_assert_uint_gt(n_bad, 30000);
}
END_TEST

START_TEST(the_budget_counts_live_bytes)
{
    struct pb_budget b = {.max_bytes = 1000};
    void *p = pb_budget_alloc(&b, 600);
    ck_assert_ptr_nonnull(p);
    ck_assert_ptr_null(pb_budget_alloc(&b, 600));
    ck_assert_ptr_null(pb_budget_alloc(&b, SIZE_MAX));
    pb_budget_free(&b, p);
    ck_assert_uint_eq(b.live_bytes, 0);
    ck_assert_uint_ge(b.peak_bytes, 600);
    p = pb_budget_alloc(&b, 600);
    ck_assert_ptr_nonnull(p);
    pb_budget_free(&b, p);
    pb_budget_free(&b, NULL);
}
END_TEST

/* A tensor with long texts and n placements, the i-th Shard(i): both kinds of pieces that a message's memory comes in. */
static size_t long_tensor(uint32_t n, uint8_t *ret)
{
    uint8_t *at = ret;
    for (int text = 0; text < 2; text++) {
        *at++ = text == 0 ? 0x0a : 0x22; /* name, mesh */
        *at++ = 700 % 128 | 0x80;
        *at++ = 700 / 128;
        memset(at, text == 0 ? 'w' : 'm', 700);
        at += 700;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t placement[] = {0x2a, 6, 0x08, 0x01, 0x10, 0, 0, 0};
        memcpy(at, placement, sizeof placement);
        at[5] = (uint8_t)(2 * i % 128 | 0x80); /* sint32 */
        at[6] = (uint8_t)(2 * i / 128 % 128 | 0x80);
        at[7] = (uint8_t)(2 * i / 128 / 128);
        at += sizeof placement;
    }
    return (size_t)(at - ret);
}

START_TEST(a_message_of_many_pieces_comes_out_whole)
{
    enum { N = 20000 };
    static uint8_t bytes[2048 + 8 * N];
    const struct pb_limits limits = {.max_repeated = N};
    void *message = NULL;
    struct err e = {0};
    size_t n = long_tensor(N, bytes);
    int r = pb_unpack(TENSOR, bytes, n, &limits, &message, &e);
    ck_assert_msg(r == 0, "%s", err_text(&e, r));
    const Reshard__V1__Tensor *t = message;
    ck_assert_uint_eq(strlen(t->name), 700);
    ck_assert_uint_eq(strspn(t->name, "w"), 700);
    ck_assert_uint_eq(strspn(t->mesh, "m"), 700);
    ck_assert_uint_eq(t->n_placements, N);
    for (uint32_t i = 0; i < N; i++) {
        ck_assert_int_eq(t->placements[i]->kind, 1);
        ck_assert_int_eq(t->placements[i]->dim, (int)i);
    }
    pb_free(message);
}
END_TEST

START_TEST(a_failed_allocation_of_an_unpack_leaves_nothing)
{
    enum { N = 1000 }; /* more than a block of small pieces */
    static uint8_t bytes[2048 + 8 * N];
    size_t n = long_tensor(N, bytes);
    for (long i = 1;; i++) {
        void *message = NULL;
        mem_fail_at(i);
        int r = pb_unpack(TENSOR, bytes, n, NULL, &message, NULL);
        int struck = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_EEXHAUSTED : 0);
        pb_free(message);
        if (!struck) {
            ck_assert_int_gt(i, 4);
            break;
        }
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(an_ordinary_message_comes_out_as_it_went_in)                                                 \
    X(a_message_of_many_pieces_comes_out_whole)                                                    \
    X(nothing_at_all_is_an_empty_message)                                                          \
    X(packed_runs_may_be_empty_and_several)                                                        \
    X(malformed_bytes_are_refused)                                                                 \
    X(a_singular_message_given_twice_is_refused)                                                   \
    X(every_prefix_is_accepted_or_refused_cleanly)                                                 \
    X(text_must_be_utf8_without_nul)                                                               \
    X(text_has_a_longest)                                                                          \
    X(elements_of_a_repeated_field_are_counted_over_all_spellings)                                 \
    X(depth_is_limited)                                                                            \
    X(small_bytes_that_would_be_huge_memory_are_refused_unpacked)                                  \
    X(no_message_of_the_schema_holds_itself)                                                       \
    X(noise_never_gets_further_than_the_scan_allows)                                               \
    X(the_budget_counts_live_bytes)                                                                \
    X(a_failed_allocation_of_an_unpack_leaves_nothing)

#include "test/lib/main.h"
