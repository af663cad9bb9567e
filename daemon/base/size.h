/* Sizes as people write them. Pure. */
#ifndef RS_BASE_SIZE_H
#define RS_BASE_SIZE_H

#include <stdint.h>

/* "8388608", "8 MiB", "8MiB"; KiB, MiB, GiB, TiB. RS_EINVAL: none of these, or beyond 64 bits. */
int size_parse(const char *text, uint64_t *ret);

#endif
