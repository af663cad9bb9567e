/* GPU memory that the daemon takes beside its clients' own: by part, and the limit that it keeps.
 *
 * One account for each device, of the loop thread. What is taken is asked for here first, so that
 * what would leave the limit is refused before anything is allocated. */
#ifndef RS_EXEC_BUDGET_H
#define RS_EXEC_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

enum budget_part {
    BUDGET_CONTEXT,      /* CUDA's own, with the kernels */
    BUDGET_COMMUNICATOR, /* NCCL's buffers */
    BUDGET_WORK,         /* of the streams: fingerprints on their way, casts */
    BUDGET_RING,
    BUDGET_SCRATCH,
    BUDGET_PARTS
};

struct budget {
    uint64_t limit_bytes; /* 0: none */
    uint64_t bytes[BUDGET_PARTS];
    uint64_t peak_bytes;         /* greatest total so far */
    bool measured[BUDGET_PARTS]; /* else estimated; ring, scratch and work are what was allocated */
};

/* What the settings alone decide, of one device. */
struct budget_settings {
    uint64_t limit_bytes; /* 0: none */
    uint32_t n_devices, ring_slots;
    uint64_t slot_bytes;
    uint32_t n_threads; /* as in struct wire_hello */
    uint32_t max_ctas;  /* 0: the default */
};

/* Ways per device (plane.h): as many over all devices as threads asked for (0: as cores), at least
 * one per device. */
uint32_t budget_ways(uint32_t n_threads, uint32_t n_devices);
/* An estimate, by the sizes of NCCL 2.28 and NCCL_BUFFSIZE: of a communicator over so many devices of
 * this node, and others elsewhere or none. */
uint64_t budget_communicator_bytes(uint32_t n_local, bool elsewhere, uint32_t max_ctas);
/* RS_EEXHAUSTED: what each device needs in any case is more than the limit; names the parts and what to
 * change. For start-up, before there is a device. */
int budget_check(const struct budget_settings *s, struct err *e);
/* As budget_check; then *ret has context and work, which are taken from the start. */
int budget_open(const struct budget_settings *s, struct budget *ret, struct err *e);

/* More of a part. RS_EEXHAUSTED as above. */
int budget_take(struct budget *b, enum budget_part part, uint64_t bytes, struct err *e);
void budget_give(struct budget *b, enum budget_part part, uint64_t bytes);
/* What a part that was estimated really is; 0: could not be measured. Never less than the estimate for
 * a communicator, whose buffers come with their first use. RS_EEXHAUSTED: it leaves the limit. */
int budget_measured(struct budget *b, enum budget_part part, uint64_t bytes, struct err *e);
uint64_t budget_total(const struct budget *b);

#endif
