/* Ids that nobody can guess (getrandom), and a seeded generator for tests and delays. */
#ifndef RS_BASE_RANDOM_H
#define RS_BASE_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Fills `out` from the kernel; aborts if the kernel has none, since no id may repeat. */
void random_bytes(void *out, size_t n_bytes);
/* A random non-zero id (incarnations, publication ids). */
uint64_t random_id(void);

/* splitmix64: the next value of the seeded sequence; *state is the seed. */
static inline uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

#endif
