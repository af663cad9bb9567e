/* An arena for one reply. */
#include "service/api_arena.h"

#include <stdint.h>
#include <string.h>

#include "base/mem.h"
#include "service/api_common.h"

#include "base/banned.h"

struct chunk {
    struct chunk *next;
    max_align_t data[];
};

void *arena_take(struct arena *a, size_t n, size_t bytes)
{
    struct chunk *c =
        bytes != 0 && n > SIZE_MAX / 2 / bytes ? NULL : mem_zalloc(sizeof *c + n * bytes);
    if (c == NULL) {
        a->failed = true;
        return NULL;
    }
    c->next = a->chunks;
    a->chunks = c;
    return c->data;
}

char *arena_text(struct arena *a, const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = arena_take(a, n, 1);
    if (copy != NULL)
        memcpy(copy, text, n);
    return copy;
}

void arena_close(struct arena *a)
{
    for (struct chunk *c = a->chunks, *next; c != NULL; c = next) {
        next = c->next;
        mem_free(c);
    }
}

void **arena_list(struct arena *a, size_t n, size_t bytes)
{
    void **list = arena_take(a, n, sizeof(void *));
    char *items = arena_take(a, n, bytes);
    for (size_t i = 0; list != NULL && items != NULL && i < n; i++)
        list[i] = items + i * bytes;
    return items != NULL ? list : NULL;
}

void arena_finish(struct rpc_call *call, struct arena *a, const ProtobufCMessage *m)
{
    if (a->failed)
        rpc_call_finish(call, RS_ENOMEM, "no memory for the answer");
    else
        api_finish(call, m);
    arena_close(a);
}
