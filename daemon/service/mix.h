/* Folding of words and bytes into numbers that name content: publications, contents of versions, sums of fingerprints.
 * Not for secrets and not against forgery; the same bytes give the same number in every start of the daemon. */
#ifndef RS_SERVICE_MIX_H
#define RS_SERVICE_MIX_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/random.h"

static inline uint64_t mix_word(uint64_t state, uint64_t word)
{
    state ^= word;
    return random_next(&state);
}

static inline uint64_t mix_bytes(uint64_t state, const void *data, size_t n_bytes)
{
    const uint8_t *p = data;
    state = mix_word(state, n_bytes);
    for (; n_bytes >= sizeof(uint64_t); p += sizeof(uint64_t), n_bytes -= sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, p, sizeof word);
        state = mix_word(state, word);
    }
    uint64_t tail = 0;
    if (n_bytes > 0)
        memcpy(&tail, p, n_bytes);
    return mix_word(state, tail);
}

#endif
