/* Stable sorts of index lists by counting: the same order on every machine, and linear time. */
#include <string.h>

#include "plan/plan_private.h"

#include "base/banned.h"

int sort_count(const uint32_t *key, const uint32_t *from, uint32_t n, uint32_t n_keys,
               uint32_t *ret_order)
{
    uint32_t *at = mem_calloc((size_t)n_keys + 1, sizeof *at);
    if (at == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < n; i++)
        at[key[i] + 1]++;
    for (uint32_t k = 0; k < n_keys; k++)
        at[k + 1] += at[k];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t index = from != NULL ? from[i] : i;
        ret_order[at[key[index]]++] = index;
    }
    mem_free(at);
    return 0;
}

/* One pass by 16 bits of the complement, so that ascending order of digits is descending order of
 * keys. */
static void digit_pass(const uint64_t *key, const uint32_t *from, uint32_t n, unsigned shift,
                       uint32_t *count, uint32_t *ret_order)
{
    memset(count, 0, (1U << 16) * sizeof *count);
    for (uint32_t i = 0; i < n; i++)
        count[(~key[i] >> shift) & 0xFFFF]++;
    uint32_t sum = 0;
    for (uint32_t k = 0; k < 1U << 16; k++) {
        uint32_t c = count[k];
        count[k] = sum;
        sum += c;
    }
    for (uint32_t i = 0; i < n; i++)
        ret_order[count[(~key[from[i]] >> shift) & 0xFFFF]++] = from[i];
}

int sort_descending(const uint64_t *key, uint32_t n, uint32_t *ret_order)
{
    uint32_t *other = mem_alloc((size_t)n * sizeof *other);
    uint32_t *count = mem_alloc((1U << 16) * sizeof *count);
    uint64_t bits = 0;
    if (other == NULL || count == NULL) {
        mem_free(other);
        mem_free(count);
        return RS_ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++) {
        bits |= key[i];
        ret_order[i] = i;
    }
    for (unsigned shift = 0; shift < 64 && bits >> shift != 0; shift += 16) {
        digit_pass(key, ret_order, n, shift, count, other);
        memcpy(ret_order, other, (size_t)n * sizeof *other);
    }
    mem_free(other);
    mem_free(count);
    return 0;
}
