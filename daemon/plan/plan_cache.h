/* A few plans by the digest of their input, least recently used out first.
 *
 * A plan points to its layouts and its topology, so an entry holds what keeps those alive: `drop(arg)` is called once
 * after its plan is freed. Plans in use are counted: one that falls out of the cache while somebody holds it is
 * freed when the last holder releases it. Thread: one (the loop); plans themselves may be read anywhere. */
#ifndef RS_PLAN_PLAN_CACHE_H
#define RS_PLAN_PLAN_CACHE_H

#include "plan/planner.h"

struct plan_cache;

/* Keeps up to n_plans (at least 1). NULL: no memory. */
struct plan_cache *plan_cache_new(uint32_t n_plans);
/* NULL is fine. No plan may be in use. */
void plan_cache_free(struct plan_cache *c);

/* The plan for that input, in use until plan_cache_release; NULL where there is none. */
const struct plan *plan_cache_get(struct plan_cache *c, const uint8_t digest[16]);

/* Takes `plan`, which is in use until plan_cache_release. Where the digest is there already, that plan is kept and
 * given back in *ret, and the new one is dropped. RS_ENOMEM: the plan and arg are still the caller's. `drop` may be
 * NULL. */
int plan_cache_put(struct plan_cache *c, const uint8_t digest[16], struct plan *plan,
                   void (*drop)(void *arg), void *arg, const struct plan **ret);

/* Ends one use of a plan that get or put gave. */
void plan_cache_release(struct plan_cache *c, const struct plan *plan);

/* Plans that are kept (in use or not), and calls of get that found one or not. */
uint32_t plan_cache_size(const struct plan_cache *c);
void plan_cache_counts(const struct plan_cache *c, uint64_t *ret_hits, uint64_t *ret_misses);

#endif
