/* A program, and what has been proved of it: kept from one attempt (or publication) to the next.
 *
 * An RL loop refits by one plan, version after version. The control process sends the same sealed memfds each time, whose
 * content nobody can have changed: what PREPARE and PUBLISH prove of them needs proving once. What depends on a worker's
 * memory is remembered with the number of its binding (worker.bound), which no other binding ever has. Loop thread. */
#ifndef RS_EXEC_PROOF_H
#define RS_EXEC_PROOF_H

#include <sys/types.h>

#include "exec/move.h"

/* Which file: the number is not given to another one while this one is mapped. */
struct proof_file {
    dev_t device;
    ino_t number;
    off_t bytes;
};

struct proof {
    struct queue link; /* plane.proofs */
    uint32_t uses;     /* 0: kept for the next */
    struct proof_file file, tensors_file;
    const void *data; /* mapped */
    size_t data_bytes;
    struct program program;
    uint32_t *source_index; /* program tensor → tensor of the source layout */
    uint32_t *
        tensors; /* [n_layouts][n_tensors]: → tensor of destination layout l; NULL: not needed so far */
    uint32_t n_layouts;
    uint64_t
        *covered; /* per place: the binding that all that it holds lies in; 0: not known of any */
    bool items_proved;
    /* What the items come to, once they are proved. */
    uint64_t n_reads;                           /* items that read a source */
    uint64_t n_destinations, destination_bytes; /* destination holds that are not empty */
};

/* One use more of the program in that memfd (PREPARE's, with its tensor indices of n_layouts layouts, or, tensors_fd < 0,
 * PUBLISH's). RS_EPROTO, RS_ENOMEM. The descriptors stay the caller's. */
int proof_get(struct plane *p, int program_fd, int tensors_fd, uint32_t n_layouts,
              struct proof **ret, struct err *e);
/* One use less; NULL is fine. A few are kept for the next. */
void proof_put(struct plane *p, struct proof *x);
/* Those that nobody uses are not kept any longer: a worker has gone. */
void proofs_forget(struct plane *p);

/* All that place `number` holds is bound at `place`; as prints_check_holds. */
int proof_place(struct proof *x, const struct place *place, uint32_t number, struct err *e);
/* Each item reads and writes scratch or what its places hold, and together they bring every destination hold. */
int proof_items(struct proof *x, struct err *e);

#endif
