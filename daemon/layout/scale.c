#include "layout/scale.h"

#include "base/banned.h"

bool scale_whole(const uint32_t block[2], const uint64_t shape[2])
{
    return block[0] >= shape[0] && block[1] >= shape[1];
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

bool scale_known(const uint32_t block[2], const uint64_t shape[2])
{
    uint64_t rows = least(block[0], shape[0]), columns = least(block[1], shape[1]); /* < 2^32 */
    return scale_whole(block, shape) || rows * columns <= SCALE_MAX_BLOCK;
}

uint64_t scale_count(uint32_t block, uint64_t length)
{
    return length / block + (length % block != 0);
}

struct box scale_touched(const uint32_t block[2], const struct box *part)
{
    struct box r = {.n_dims = 2};
    for (unsigned d = 0; d < 2; d++) {
        r.offset[d] = part->offset[d] / block[d];
        r.size[d] = part->size[d] == 0
                        ? 0
                        : scale_count(block[d], part->offset[d] + part->size[d]) - r.offset[d];
    }
    return r;
}

struct box scale_elements(const uint32_t block[2], const uint64_t shape[2],
                          const struct box *scales)
{
    struct box r = {.n_dims = 2};
    for (unsigned d = 0; d < 2; d++) {
        r.offset[d] = least(scales->offset[d] * block[d], shape[d]);
        r.size[d] = least((scales->offset[d] + scales->size[d]) * block[d], shape[d]) - r.offset[d];
    }
    return r;
}

bool scale_inside(const uint32_t block[2], const uint64_t shape[2], const struct box *part,
                  struct box *ret)
{
    struct box r = {.n_dims = 2};
    for (unsigned d = 0; d < 2; d++) {
        uint64_t end = part->offset[d] + part->size[d];
        uint64_t last = end == shape[d] ? scale_count(block[d], end) : end / block[d];
        r.offset[d] = scale_count(block[d], part->offset[d]);
        if (last <= r.offset[d])
            return false;
        r.size[d] = last - r.offset[d];
    }
    *ret = r;
    return true;
}
