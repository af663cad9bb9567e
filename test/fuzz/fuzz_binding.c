/* Any bytes as an encoded binding: refused with a reason, or a binding that encodes to the same
 * again; and what binding_check then accepts is written through its views into memory of exactly
 * the size that was declared, each byte at most once. */
#include <stdlib.h>
#include <string.h>

#include "memory/memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Rank 0 holds all of "a", half of "b" in two regions, and the scalar "c". */
static const char LAYOUT[] =
    "{\"name\": \"f\", \"ranks\": 2, \"meshes\": [{\"name\": \"m\", \"shape\": [1], \"ranks\": "
    "[0], "
    "\"dim_names\": [\"tp\"]}], \"tensors\": [{\"name\": \"a\", \"shape\": [4, 6], \"dtype\": "
    "\"bfloat16\", \"mesh\": \"m\", \"placements\": [\"Shard(0)\"]}, {\"name\": \"b\", \"shape\": "
    "[9], "
    "\"dtype\": \"float32\", \"regions\": [{\"rank\": 0, \"offset\": [0], \"size\": [3]}, "
    "{\"rank\": 1, "
    "\"offset\": [3], \"size\": [4]}, {\"rank\": 0, \"offset\": [7], \"size\": [2]}]}, {\"name\": "
    "\"c\", "
    "\"shape\": [], \"dtype\": \"uint8\", \"mesh\": \"m\", \"placements\": [\"Replicate\"]}]}";

enum { N_TENSORS = 3, N_SEGMENTS = 2 };
static const uint64_t SEGMENT_BYTES[N_SEGMENTS] = {200, 64};
static const uint32_t ELEMENT_BYTES[N_TENSORS] = {2, 4, 1};

/* Writes by stepping through the part, element by element; a byte that is not 0 was written. */
static int mark_part(const struct box *part, const struct kernel_view *view, void *arg)
{
    uint32_t element_bytes = *(const uint32_t *)arg;
    uint64_t at[BOX_MAX_DIMS] = {0};
    for (;;) {
        uint8_t *p = view->base;
        for (unsigned d = 0; d < part->n_dims; d++)
            p += (int64_t)at[d] * view->stride_bytes[d];
        for (uint32_t k = 0; k < element_bytes; k++)
            if (p[k]++ != 0)
                abort();
        unsigned d = part->n_dims;
        while (d > 0 && ++at[d - 1] == part->size[d - 1])
            at[--d] = 0;
        if (d == 0)
            return 0;
    }
}

static void use(const struct binding *b, const struct layout *l)
{
    void *bases[N_SEGMENTS];
    struct box shards[2];
    for (unsigned i = 0; i < N_SEGMENTS; i++)
        bases[i] = calloc(1, SEGMENT_BYTES[i]);
    for (uint32_t t = 0; t < N_TENSORS; t++) {
        uint32_t n = layout_shards(l, t, 0, shards, 2), element_bytes = ELEMENT_BYTES[t];
        for (uint32_t s = 0; s < n; s++)
            if (binding_views(b, t, &shards[s], bases, mark_part, &element_bytes) != 0)
                abort();
    }
    for (unsigned i = 0; i < N_SEGMENTS; i++)
        free(bases[i]);
}

static void encode_again(const struct binding *b)
{
    struct buf first, second;
    struct binding *again = NULL;
    buf_init(&first);
    buf_init(&second);
    if (binding_encode(b, &first) != 0 ||
        binding_decode(first.data, first.n_bytes, &again, NULL) != 0 ||
        binding_encode(again, &second) != 0 || first.n_bytes != second.n_bytes ||
        memcmp(first.data, second.data, first.n_bytes) != 0)
        abort();
    binding_free(again);
    buf_close(&first);
    buf_close(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct layout *l = NULL;
    struct binding *b = NULL;
    struct err e = {0};
    int r = binding_decode(data, size, &b, &e);
    if ((r == 0) != (b != NULL) || (r != 0 && e.text[0] == '\0'))
        abort();
    if (b == NULL)
        return 0;
    encode_again(b);
    if (layout_from_json(LAYOUT, sizeof LAYOUT - 1, &l, &e) != 0)
        abort();
    e = (struct err){0};
    r = binding_check(b, l, 0, SEGMENT_BYTES, N_SEGMENTS, false, &e);
    if (r != 0 && e.text[0] == '\0')
        abort();
    if (r == 0)
        use(b, l);
    binding_free(b);
    layout_free(l);
    return 0;
}
