/* An axis-aligned part of a tensor: offset and size per tensor dim, in elements. */
#ifndef RS_LAYOUT_BOX_H
#define RS_LAYOUT_BOX_H

#include <stdbool.h>
#include <stdint.h>

enum { BOX_MAX_DIMS = 8 };

struct box {
    uint8_t n_dims;
    uint64_t offset[BOX_MAX_DIMS];
    uint64_t size[BOX_MAX_DIMS];
};

/* All zero but for its number of dims. By a loop: of an initialiser this long compilers make a string instruction, which
 * takes longer than what is done with the box. */
static inline struct box box_blank(uint8_t n_dims)
{
    struct box b;
    b.n_dims = n_dims;
    for (unsigned d = 0; d < BOX_MAX_DIMS; d++)
        b.offset[d] = b.size[d] = 0;
    return b;
}

/* The whole of a tensor of that shape. */
static inline struct box box_whole(uint8_t n_dims, const uint64_t *shape)
{
    struct box b = box_blank(n_dims);
    for (unsigned d = 0; d < n_dims && d < BOX_MAX_DIMS; d++)
        b.size[d] = shape[d];
    return b;
}

/* Product of the sizes; 1 for 0 dims. Checked layouts cannot overflow it. */
static inline uint64_t box_elements(const struct box *b)
{
    uint64_t n = 1;
    for (unsigned d = 0; d < b->n_dims; d++)
        n *= b->size[d];
    return n;
}

bool box_empty(const struct box *b);
bool box_equal(const struct box *a, const struct box *b);
/* True where `inner` lies within `outer` (same n_dims). */
bool box_contains(const struct box *outer, const struct box *inner);
/* True and the common part where a and b share an element. 0-d boxes always do. */
bool box_intersect(const struct box *a, const struct box *b, struct box *ret);
/* The elements [begin, end) of b in row-major order, as boxes (at most 2 * n_dims - 1, at least 1
 * where begin < end). Returns how many; `ret` has room for 2 * BOX_MAX_DIMS. The one function by
 * which both sides of a message cut a piece. */
unsigned box_range(const struct box *b, uint64_t begin, uint64_t end, struct box *ret);
/* "[0:4, 2:8]", for people; the part after `capacity` is cut. Returns ret_text. */
char *box_text(const struct box *b, char *ret_text, unsigned capacity);

#endif
