/* From what this node's data plane fingerprinted: the cells that other nodes saw too. */
#ifndef RS_SERVICE_CELLS_COLLECT_H
#define RS_SERVICE_CELLS_COLLECT_H

#include <stdint.h>

#include "peer/message.h"
#include "service/compare.h"
#include "service/plan_store.h"

/* Which of them: what sources sent is told before the rest. */
enum cells_part { CELLS_ALL, CELLS_OF_SOURCES, CELLS_OF_THE_REST };

/* One print per cell that goes to another node or comes from one, as far as `mode` has it fingerprinted and this node
 * holds or takes it; a source's where there is one. The node's own holders agree on each (compare_landed). holds as there.
 * Of sources `holds` need hold no others' values. *ret is the caller's to mem_free. RS_ENOMEM. Pure. */
int cells_collect(const struct plan_entry *plan, const uint64_t *holds, enum compare_mode mode,
                  enum cells_part which, struct cell_print **ret, uint32_t *ret_n);

#endif
