#include "plan/plan_cache.h"

#include <string.h>

#include "base/mem.h"
#include "base/queue.h"

#include "base/banned.h"

struct entry {
    struct queue link; /* in `kept` (newest use last) or, once fallen out, in `leaving` */
    uint8_t digest[16];
    struct plan *plan;
    void (*drop)(void *arg);
    void *arg;
    uint32_t in_use;
};

struct plan_cache {
    struct queue kept, leaving;
    uint32_t most, n;
    uint64_t hits, misses;
};

struct plan_cache *plan_cache_new(uint32_t n_plans)
{
    struct plan_cache *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return NULL;
    queue_init(&c->kept);
    queue_init(&c->leaving);
    c->most = n_plans > 0 ? n_plans : 1;
    return c;
}

static void entry_free(struct entry *x)
{
    rs_assert(x->in_use == 0);
    queue_remove(&x->link);
    plan_free(x->plan);
    if (x->drop != NULL)
        x->drop(x->arg);
    mem_free(x);
}

void plan_cache_free(struct plan_cache *c)
{
    if (c == NULL)
        return;
    queue_move(&c->kept, &c->leaving);
    queue_foreach_safe (q, tmp, &c->leaving)
        entry_free(container_of(q, struct entry, link));
    mem_free(c);
}

static struct entry *find(struct plan_cache *c, const uint8_t digest[16])
{
    queue_foreach (q, &c->kept) {
        struct entry *x = container_of(q, struct entry, link);
        if (memcmp(x->digest, digest, sizeof x->digest) == 0)
            return x;
    }
    return NULL;
}

static const struct plan *use(struct plan_cache *c, struct entry *x)
{
    x->in_use++;
    queue_remove(&x->link);
    queue_push(&c->kept, &x->link);
    return x->plan;
}

const struct plan *plan_cache_get(struct plan_cache *c, const uint8_t digest[16])
{
    struct entry *x = find(c, digest);
    if (x == NULL) {
        c->misses++;
        return NULL;
    }
    c->hits++;
    return use(c, x);
}

/* The oldest goes: at once, or with its last user. */
static void evict(struct plan_cache *c)
{
    struct entry *x = container_of(c->kept.next, struct entry, link);
    queue_remove(&x->link);
    queue_push(&c->leaving, &x->link);
    c->n--;
    if (x->in_use == 0)
        entry_free(x);
}

int plan_cache_put(struct plan_cache *c, const uint8_t digest[16], struct plan *plan,
                   void (*drop)(void *arg), void *arg, const struct plan **ret)
{
    struct entry *there = find(c, digest);
    if (there != NULL) {
        plan_free(plan);
        if (drop != NULL)
            drop(arg);
        *ret = use(c, there);
        return 0;
    }
    struct entry *x = mem_zalloc(sizeof *x);
    if (x == NULL)
        return RS_ENOMEM;
    queue_init(&x->link);
    memcpy(x->digest, digest, sizeof x->digest);
    x->plan = plan;
    x->drop = drop;
    x->arg = arg;
    if (c->n == c->most)
        evict(c);
    c->n++;
    *ret = use(c, x);
    return 0;
}

static struct entry *of_plan(struct queue *head, const struct plan *plan)
{
    queue_foreach (q, head) {
        struct entry *x = container_of(q, struct entry, link);
        if (x->plan == plan)
            return x;
    }
    return NULL;
}

void plan_cache_release(struct plan_cache *c, const struct plan *plan)
{
    struct entry *kept = of_plan(&c->kept, plan);
    struct entry *x = kept != NULL ? kept : of_plan(&c->leaving, plan);
    rs_assert(x != NULL && x->in_use > 0);
    x->in_use--;
    if (kept == NULL && x->in_use == 0)
        entry_free(x);
}

uint32_t plan_cache_size(const struct plan_cache *c)
{
    return c->n;
}

void plan_cache_counts(const struct plan_cache *c, uint64_t *ret_hits, uint64_t *ret_misses)
{
    *ret_hits = c->hits;
    *ret_misses = c->misses;
}
