/* A block of a cell that its source place makes (scaled.h), made by the device's kernels and by the plain scalar twin, which shares no
 * code with them (sample.c). Both take a copy of the block's elements as a block of its own. */
#ifndef RS_EXEC_SAMPLE_SCALED_H
#define RS_EXEC_SAMPLE_SCALED_H

#include "exec/move.h"

struct sample_scaled {
    const struct program_tensor *tensor; /* quantised values, or scales */
    struct box elements;                 /* of the source: global coordinates */
    uint64_t scale[2];                   /* the block's own */
    const uint8_t *from; /* the elements, dense, row-major, aligned; the CPU reaches it, too */
    uint8_t *made;       /* room for one byte per element and for one float32; aligned */
    uint8_t from_dtype;
};

/* By the device's kernels, behind what is in the batch: adds to *fingerprint that of the values, or of the scale, when the batch's
 * stream has run so far. Loop thread. RS_ENOMEM, a device's error. */
int sample_scaled_fast(struct batch *b, const struct sample_scaled *x, uint64_t *fingerprint);
/* The same by the scalar twin, here and now. Any thread. */
void sample_scaled_reference(const struct sample_scaled *x, uint64_t *fingerprint);

#endif
