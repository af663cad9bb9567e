#include "service/plan_store.h"

#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "exec/wire.h"
#include "plan/planner.h"
#include "service/attempt_input.h"

#include "base/banned.h"

/* --- orders ------------------------------------------------------------------------------------- */

static void layouts_release(struct layout_entry *source, struct layout_entry **destinations,
                            uint32_t n)
{
    layout_entry_unref(source);
    for (uint32_t i = 0; destinations != NULL && i < n; i++)
        layout_entry_unref(destinations[i]);
    mem_free(destinations);
}

void plan_order_close(struct plan_order *o)
{
    layouts_release(o->source, o->destinations, o->n_destinations);
    for (uint32_t i = 0; o->destination_device != NULL && i < o->n_destinations; i++)
        mem_free(o->destination_device[i]);
    mem_free(o->destination_device);
    mem_free(o->source_device);
    topology_free(o->topology);
    for (uint32_t i = 0; i < o->options.n_rules; i++)
        mem_free((char *)(uintptr_t)o->options.rules[i].glob);
    mem_free((struct plan_rule *)(uintptr_t)o->options.rules);
    memset(o, 0, sizeof *o);
}

/* The planner's view of an order; *ret_layouts is the caller's to mem_free. */
static int order_input(const struct plan_order *o, struct plan_input *ret,
                       const struct layout ***ret_layouts)
{
    const struct layout **layouts = mem_calloc(o->n_destinations, sizeof *layouts);
    if (layouts == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < o->n_destinations; i++)
        layouts[i] = o->destinations[i]->layout;
    *ret = (struct plan_input){.source = o->source->layout,
                               .source_device = o->source_device,
                               .n_destinations = o->n_destinations,
                               .destinations = layouts,
                               .destination_device = (const int32_t *const *)o->destination_device,
                               .topology = o->topology,
                               .options = o->options};
    *ret_layouts = layouts;
    return 0;
}

int plan_order_key(struct plan_order *o)
{
    struct plan_input input;
    const struct layout **layouts;
    int r = order_input(o, &input, &layouts);
    if (r != 0)
        return r;
    r = plan_input_digest(&input, o->key);
    mem_free(layouts);
    return r;
}

/* --- entries ------------------------------------------------------------------------------------ */

static void entry_free(struct plan_entry *entry)
{
    plan_free(entry->plan);
    if (entry->program_data != NULL)
        wire_unmap(entry->program_data, entry->program_bytes);
    if (entry->program_fd >= 0)
        (void)close(entry->program_fd);
    if (entry->tensors_fd >= 0)
        (void)close(entry->tensors_fd);
    mem_free(entry->tensor_of);
    topology_free(entry->topology);
    layouts_release(entry->source, entry->destinations, entry->n_destinations);
    mem_free(entry);
}

static int program_make(struct plan_entry *entry, uint32_t node, struct err *e)
{
    struct buf b;
    buf_init(&b);
    int r = plan_program(entry->plan, node, &b, e);
    if (r == 0 && buf_error(&b) != 0)
        r = err_set(e, RS_ENOMEM, "no memory for the program");
    if (r == 0) {
        entry->program_fd = wire_memfd("reshard-program", b.data, b.n_bytes, e);
        r = entry->program_fd < 0 ? entry->program_fd : 0;
    }
    buf_close(&b);
    if (r == 0)
        r = wire_map_fd(entry->program_fd, &entry->program_data, &entry->program_bytes, e);
    if (r == 0)
        r = program_open(entry->program_data, entry->program_bytes, &entry->program, e);
    return r;
}

const char *plan_entry_tensor(const struct plan_entry *entry, uint32_t tensor)
{
    const struct program_tensor *t = &entry->program.tensors[tensor];
    if (t->value != PROGRAM_SCALES)
        return entry->source->layout->tensors[t->index].name;
    return entry->destinations[t->named_layout]->layout->tensors[t->named_tensor].name;
}

/* The program's tensor in a layout, made as that one declares; UINT32_MAX. */
static uint32_t tensor_in(const struct plan_entry *entry, uint32_t layout, uint32_t tensor)
{
    const struct program_tensor *p = &entry->program.tensors[tensor];
    const struct layout *l = entry->destinations[layout]->layout;
    int64_t i = layout_find(l, plan_entry_tensor(entry, tensor));
    if (i < 0)
        return UINT32_MAX;
    const struct tensor *t = &l->tensors[i];
    const struct tensor *d = t->derived_from != NULL ? t
                             : t->scaled_by != 0     ? &l->tensors[t->scaled_by - 1]
                                                     : NULL;
    uint8_t value = d == NULL ? PROGRAM_AS_SOURCE : d == t ? PROGRAM_SCALES : PROGRAM_QUANTISED;
    bool same = value == p->value &&
                (d == NULL || memcmp(d->derived_block, p->block, sizeof p->block) == 0);
    return same ? (uint32_t)i : UINT32_MAX;
}

static int tensors_make(struct plan_entry *entry, struct err *e)
{
    const struct program *p = &entry->program;
    size_t n = (size_t)entry->n_destinations * p->n_tensors;
    entry->tensor_of = mem_calloc(n, sizeof *entry->tensor_of);
    if (entry->tensor_of == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the program's tensors");
    for (uint32_t l = 0; l < entry->n_destinations; l++)
        for (uint32_t t = 0; t < p->n_tensors; t++)
            entry->tensor_of[(size_t)l * p->n_tensors + t] = tensor_in(entry, l, t);
    entry->tensors_fd =
        wire_memfd("reshard-tensors", entry->tensor_of, n * sizeof *entry->tensor_of, e);
    return entry->tensors_fd < 0 ? entry->tensors_fd : 0;
}

int plan_entry_make(struct plan_order *o, struct plan_entry **ret, struct err *e)
{
    struct plan_input input;
    const struct layout **layouts = NULL;
    uint64_t begin = clock_mono_ns();
    struct plan_entry *entry = mem_zalloc(sizeof *entry);
    if (entry == NULL || order_input(o, &input, &layouts) != 0) {
        mem_free(entry);
        return err_set(e, RS_ENOMEM, "no memory to plan");
    }
    queue_init(&entry->in);
    entry->refs = 1;
    entry->program_fd = entry->tensors_fd = -1;
    int r = plan_make(&input, &entry->plan, e);
    entry->made_ns = clock_mono_ns() - begin;
    if (r == 0 && (r = plan_check(entry->plan, &input, false, e)) != 0)
        (void)err_prefix(e, r, "the plan proves wrong and is not used");
    mem_free(layouts);
    entry->node = o->node;
    if (r == 0 && entry->node != PLAN_NO_NODE)
        r = program_make(entry, o->node, e);
    if (r != 0) {
        entry_free(entry);
        return r;
    }
    memcpy(entry->key, o->key, sizeof entry->key);
    entry->source = o->source;
    entry->destinations = o->destinations;
    entry->n_destinations = o->n_destinations;
    r = entry->node != PLAN_NO_NODE ? tensors_make(entry, e) : 0;
    if (r != 0) {
        entry->source = NULL; /* still the order's */
        entry->destinations = NULL;
        entry_free(entry);
        return r;
    }
    /* The destination_device arrays stay the order's, which counts them by n_destinations. */
    o->source = NULL;
    o->destinations = NULL;
    entry->topology = o->topology;
    o->topology = NULL;
    *ret = entry;
    return 0;
}

struct plan_entry *plan_entry_ref(struct plan_entry *entry)
{
    entry->refs++;
    return entry;
}

void plan_entry_unref(struct plan_entry *entry)
{
    if (entry != NULL && --entry->refs == 0)
        entry_free(entry);
}

/* --- the store ---------------------------------------------------------------------------------- */

void plan_store_init(struct plan_store *s)
{
    queue_init(&s->entries);
    s->n = 0;
}

static void oldest_drop(struct plan_store *s)
{
    struct plan_entry *entry = container_of(queue_pop(&s->entries), struct plan_entry, in);
    s->n--;
    plan_entry_unref(entry);
}

void plan_store_close(struct plan_store *s)
{
    while (s->n > 0)
        oldest_drop(s);
}

struct plan_entry *plan_store_find(struct plan_store *s, const uint8_t key[16], uint32_t node)
{
    queue_foreach (q, &s->entries) {
        struct plan_entry *entry = container_of(q, struct plan_entry, in);
        if (memcmp(entry->key, key, sizeof entry->key) != 0 || entry->node != node)
            continue;
        queue_remove(&entry->in);
        queue_push(&s->entries, &entry->in);
        return plan_entry_ref(entry);
    }
    return NULL;
}

void plan_store_add(struct plan_store *s, struct plan_entry *entry)
{
    if (s->n == PLAN_STORE_MOST)
        oldest_drop(s);
    queue_push(&s->entries, &plan_entry_ref(entry)->in);
    s->n++;
}
