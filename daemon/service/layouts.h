/* Layouts by digest: parsed once, shared by all who name them, remembered by the ledger.
 *
 * An entry that is referred to stays. One that nobody refers to stays too (clients put before they attach) until the
 * limit is reached; then the one that was used longest ago makes room. Loop thread; the layout itself is immutable and
 * may be read on any thread while a reference is held. */
#ifndef RS_SERVICE_LAYOUTS_H
#define RS_SERVICE_LAYOUTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/queue.h"
#include "layout/layout.h"

struct layout_entry {
    struct queue in; /* least recently used first */
    struct layout *layout;
    uint32_t refs;
    bool durable; /* the ledger has it */
};

struct layouts {
    struct queue entries;
    uint32_t n, most;
};

void layouts_init(struct layouts *l, uint32_t most);
void layouts_close(struct layouts *l);
struct layout_entry *layouts_find(struct layouts *l, const uint8_t digest[16]);
/* Takes the layout (its digest filled in), also on failure; an equal one that is there is given instead. RS_ENOMEM;
 * RS_EEXHAUSTED: max_layouts, all in use. */
int layouts_add(struct layouts *l, struct layout *layout, struct layout_entry **ret, struct err *e);
struct layout_entry *layout_entry_ref(struct layout_entry *l);
void layout_entry_unref(struct layout_entry *l); /* NULL is fine */

#endif
