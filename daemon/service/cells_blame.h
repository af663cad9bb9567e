/* Differences between nodes, and cells that a source's node has kept to itself, off the loop: words for the first (tensor, box, layouts and ranks, found in the plan), and
 * everybody whose memory has got one of the cells. */
#ifndef RS_SERVICE_CELLS_BLAME_H
#define RS_SERVICE_CELLS_BLAME_H

#include "base/err.h"
#include "service/cells.h"
#include "service/plan_store.h"

struct cells_blame;
struct service;

/* RS_EDATALOSS "tensor 'w' [0:4]: layout 'rollout' rank 2 holds fingerprint … where layout 'train' rank 0 sent …". Pure;
 * any thread. */
int cells_blame(const struct plan_entry *plan, const struct cells_difference *x, struct err *e);

/* A cell that is wrong on a node: an index in the plan's topology. */
struct cells_place {
    uint64_t cell;
    uint32_t node;
};
/* A destination rank. */
struct cells_holder {
    uint32_t layout; /* as in participant */
    uint32_t rank;
};
/* A node reports one print for all of its holders of a cell, since they agree: all ranks that take one of those cells there,
 * each once. `wrong` is sorted by it. *ret is the caller's to mem_free. RS_ENOMEM. Pure; any thread. */
int cells_holders(const struct plan_entry *plan, struct cells_place *wrong, size_t n_wrong,
                  struct cells_holder **ret, size_t *ret_n);

/* What a job has found. */
struct cells_blamed {
    int code; /* RS_EDATALOSS; RS_ENOMEM: some of what follows is missing */
    const char *text;
    struct cells_difference first;
    const struct cells_holder *holders;
    size_t n_holders;
    bool all;       /* the holders are everybody who takes one of the cells that it was given */
    size_t n_wrong; /* as it was given */
    uint32_t node;  /* of cells_untold_start */
};

/* cells_blame of the first and cells_holders of all, as a job; done runs once, later. Takes `wrong` (mem_free), also on
 * failure; n_wrong: how many differences there were then, comes back. RS_ENOMEM. */
int cells_blame_start(struct service *s, struct plan_entry *plan,
                      const struct cells_difference *first, struct cells_place *wrong,
                      size_t n_places, size_t n_wrong,
                      void (*done)(void *arg, const struct cells_blamed *x), void *arg,
                      struct cells_blame **ret);
/* RS_EPROTO "tensor 'w' [0:4], which layout 'rollout' rank 2 holds: …" of a cell that no source's node has told of; *ret_node:
 * an index in the topology, of who sends it. Pure; any thread. */
int cells_untold_blame(const struct plan_entry *plan, const struct cell_print *told,
                       uint32_t *ret_node, struct err *e);
/* The same as a job: done's x has code, text and node. RS_ENOMEM. */
int cells_untold_start(struct service *s, struct plan_entry *plan, const struct cell_print *told,
                       void (*done)(void *arg, const struct cells_blamed *x), void *arg,
                       struct cells_blame **ret);
void cells_blame_forget(struct cells_blame *b); /* NULL is fine */

#endif
