#include "service/layouts.h"

#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

void layouts_init(struct layouts *l, uint32_t most)
{
    queue_init(&l->entries);
    l->n = 0;
    l->most = most;
}

static void entry_free(struct layouts *l, struct layout_entry *entry)
{
    queue_remove(&entry->in);
    l->n--;
    layout_free(entry->layout);
    mem_free(entry);
}

void layouts_close(struct layouts *l)
{
    queue_foreach_safe (q, tmp, &l->entries)
        entry_free(l, container_of(q, struct layout_entry, in));
}

struct layout_entry *layouts_find(struct layouts *l, const uint8_t digest[16])
{
    queue_foreach (q, &l->entries) {
        struct layout_entry *entry = container_of(q, struct layout_entry, in);
        if (memcmp(entry->layout->digest, digest, 16) != 0)
            continue;
        queue_remove(&entry->in);
        queue_push(&l->entries, &entry->in);
        return entry;
    }
    return NULL;
}

static bool room_make(struct layouts *l)
{
    if (l->n < l->most)
        return true;
    queue_foreach (q, &l->entries) {
        struct layout_entry *entry = container_of(q, struct layout_entry, in);
        if (entry->refs > 0)
            continue;
        entry_free(l, entry);
        return true;
    }
    return false;
}

int layouts_add(struct layouts *l, struct layout *layout, struct layout_entry **ret, struct err *e)
{
    struct layout_entry *entry = layouts_find(l, layout->digest);
    if (entry != NULL) {
        layout_free(layout);
        *ret = entry;
        return 0;
    }
    int r = room_make(l)
                ? 0
                : err_set(e, RS_EEXHAUSTED, "%u layouts in use: max_layouts is reached", l->n);
    if (r == 0 && (entry = mem_zalloc(sizeof *entry)) == NULL)
        r = err_set(e, RS_ENOMEM, "no memory for the layout");
    if (r != 0) {
        layout_free(layout);
        return r;
    }
    entry->layout = layout;
    queue_push(&l->entries, &entry->in);
    l->n++;
    *ret = entry;
    return 0;
}

struct layout_entry *layout_entry_ref(struct layout_entry *l)
{
    l->refs++;
    return l;
}

void layout_entry_unref(struct layout_entry *l)
{
    if (l != NULL)
        l->refs--;
}
