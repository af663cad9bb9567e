#include "rpc/pb_arena.h"

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/queue.h"
#include "rpc/pb_budget.h"

#include "base/banned.h"

#if defined(__SANITIZE_ADDRESS__)
#define PIECES_APART 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PIECES_APART 1
#endif
#endif
#ifndef PIECES_APART
#define PIECES_APART 0
#endif

/* What protobuf-c gives back while it unpacks, its lists of a message's fields, has 640 bytes and more. */
#define SMALL_BYTES (PIECES_APART ? 0U : 512U)
#define BLOCK_BYTES (32U << 10)
#define ALIGNMENT   sizeof(uint64_t) /* of everything that a message holds */

/* In front of every piece. */
struct piece {
    uint64_t apart; /* in a block of its own */
    uint64_t data[];
};

struct block {
    struct queue in;
    uint64_t data[];
};

struct pb_arena {
    struct pb_budget budget;
    struct queue blocks;
    uint8_t *at;
    size_t left; /* from `at` on */
    bool begun;
    uint64_t first[]; /* struct piece */
};

static size_t piece_bytes(size_t n_bytes)
{
    return sizeof(struct piece) + (n_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

struct pb_arena *pb_arena_new(size_t most_bytes, size_t first_bytes, size_t about_bytes)
{
    struct pb_budget budget = {.max_bytes = most_bytes};
    size_t room = piece_bytes(first_bytes);
    if (!PIECES_APART && about_bytes > room)
        room = about_bytes < BLOCK_BYTES ? about_bytes : BLOCK_BYTES;
    struct pb_arena *a = pb_budget_alloc(&budget, offsetof(struct pb_arena, first) + room);
    if (a == NULL)
        return NULL;
    a->budget = budget;
    queue_init(&a->blocks);
    a->at = (uint8_t *)a->first;
    a->left = room;
    a->begun = false;
    return a;
}

static void *block_new(struct pb_arena *a, size_t n_bytes)
{
    struct block *b = pb_budget_alloc(&a->budget, sizeof *b + n_bytes);
    if (b == NULL)
        return NULL;
    queue_init(&b->in);
    queue_push(&a->blocks, &b->in);
    return b->data;
}

static void *take(struct pb_arena *a, size_t n_bytes)
{
    struct piece *p = (struct piece *)(void *)a->at;
    a->at += n_bytes;
    a->left -= n_bytes;
    p->apart = 0;
    return p->data;
}

static void *take_apart(struct pb_arena *a, size_t n_bytes)
{
    struct piece *p = block_new(a, n_bytes);
    if (p == NULL)
        return NULL;
    p->apart = 1;
    return p->data;
}

void *pb_arena_alloc(void *arena, size_t n_bytes)
{
    struct pb_arena *a = arena;
    if (n_bytes > a->budget.max_bytes)
        return NULL;
    size_t n = piece_bytes(n_bytes);
    bool first = !a->begun;
    a->begun = true;
    rs_assert(!first || n <= a->left);
    if (first || (n_bytes <= SMALL_BYTES && n <= a->left))
        return take(a, n);
    if (n_bytes > SMALL_BYTES)
        return take_apart(a, n);
    uint8_t *at = block_new(a, BLOCK_BYTES);
    if (at == NULL)
        return NULL;
    a->at = at;
    a->left = BLOCK_BYTES;
    return take(a, n);
}

void pb_arena_free(void *arena, void *data)
{
    struct pb_arena *a = arena;
    if (data == NULL)
        return;
    struct piece *p = container_of(data, struct piece, data);
    if (p->apart == 0)
        return;
    struct block *b = container_of((void *)p, struct block, data);
    queue_remove(&b->in);
    pb_budget_free(&a->budget, b);
}

struct pb_arena *pb_arena_of(void *first_piece)
{
    struct piece *p = container_of(first_piece, struct piece, data);
    return container_of((void *)p, struct pb_arena, first);
}

void pb_arena_close(struct pb_arena *a)
{
    while (!queue_empty(&a->blocks))
        mem_free(container_of(queue_pop(&a->blocks), struct block, in));
    mem_free(a);
}
