#include "service/landed.h"

#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

bool landed_key_equal(const struct landed_key *a, const struct landed_key *b)
{
    return a->version == b->version && a->content == b->content &&
           memcmp(a->plan, b->plan, sizeof a->plan) == 0;
}

void landed_free(struct attempt_landed *x, uint32_t n)
{
    for (uint32_t i = 0; x != NULL && i < n; i++)
        mem_free((void *)(uintptr_t)x[i].holds);
    mem_free(x);
}

static int one_copy(const struct attempt_landed *from, struct attempt_landed *to)
{
    uint8_t *holds = mem_calloc(from->n_bytes, 1);
    if (holds == NULL)
        return RS_ENOMEM;
    memcpy(holds, from->holds, from->n_bytes);
    *to = *from;
    to->holds = holds;
    return 0;
}

struct attempt_landed *landed_copy(const struct attempt_landed *from, uint32_t n)
{
    struct attempt_landed *copy = mem_calloc(n, sizeof *copy);
    for (uint32_t i = 0; copy != NULL && i < n; i++)
        if (one_copy(&from[i], &copy[i]) != 0) {
            landed_free(copy, i);
            return NULL;
        }
    return copy;
}

const struct attempt_landed *landed_of(const struct attempt_landed *x, uint32_t n, uint32_t node)
{
    for (uint32_t i = 0; i < n; i++)
        if (x[i].node == node)
            return &x[i];
    return NULL;
}

void landed_clear(struct landed_store *s)
{
    landed_free(s->nodes, s->n_nodes);
    *s = (struct landed_store){0};
}

void landed_drop(struct landed_store *s, uint32_t node)
{
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        if (s->nodes[i].node != node)
            continue;
        mem_free((void *)(uintptr_t)s->nodes[i].holds);
        s->nodes[i] = s->nodes[--s->n_nodes];
        break;
    }
    if (s->n_nodes == 0)
        landed_clear(s);
}

void landed_note(struct landed_store *s, const struct landed_key *key,
                 const struct attempt_landed *said)
{
    if (s->n_nodes > 0 && (!landed_key_equal(&s->key, key) || s->nodes[0].attempt != said->attempt))
        landed_clear(s);
    if (said->n_bytes == 0 || landed_of(s->nodes, s->n_nodes, said->node) != NULL)
        return;
    struct attempt_landed *more = mem_calloc(s->n_nodes + (size_t)1, sizeof *more);
    if (more == NULL || one_copy(said, &more[s->n_nodes]) != 0) {
        mem_free(more);
        landed_clear(s);
        return;
    }
    if (s->n_nodes > 0)
        memcpy(more, s->nodes, s->n_nodes * sizeof *more);
    mem_free(s->nodes);
    s->nodes = more;
    s->n_nodes++;
    s->key = *key;
}

const struct attempt_landed *landed_find(const struct landed_store *s, const struct landed_key *key,
                                         uint32_t *ret_n)
{
    *ret_n = s->n_nodes > 0 && landed_key_equal(&s->key, key) ? s->n_nodes : 0;
    return *ret_n > 0 ? s->nodes : NULL;
}
