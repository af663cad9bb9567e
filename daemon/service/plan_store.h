/* Plans that were made: looked up by all of their input, made off the loop thread, checked before their first use.
 *
 * An entry is immutable once made: the plan, this node's program (where it takes part) in a sealed memfd and opened, and the table that tells
 * the data plane which tensor of which destination layout each program tensor is. Counted; the store itself keeps the
 * last few. */
#ifndef RS_SERVICE_PLAN_STORE_H
#define RS_SERVICE_PLAN_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/queue.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "service/layouts.h"

enum { PLAN_STORE_MOST = 8 };
#define PLAN_NO_NODE UINT32_MAX

struct plan_entry {
    struct queue in; /* least recently used first; a list of its own once it is out of the store */
    uint32_t refs;
    uint8_t key[16];
    struct plan *plan;
    struct layout_entry *source;
    struct layout_entry **destinations;
    uint32_t n_destinations;
    struct topology *topology;
    uint32_t node; /* whose program it is: index into the topology; PLAN_NO_NODE: none */
    int program_fd, tensors_fd; /* sealed memfds; -1: none */
    const void *program_data;   /* program_fd, mapped */
    size_t program_bytes;
    struct program program;
    uint32_t *tensor_of; /* [n_destinations][program.n_tensors]; UINT32_MAX: not in that layout */
    uint64_t made_ns;    /* how long planning took */
};

/* The name of a tensor of its program. */
const char *plan_entry_tensor(const struct plan_entry *entry, uint32_t tensor);

struct plan_store {
    struct queue entries;
    uint32_t n;
};

/* What a plan is made from; owns copies of all, and counts the layouts. */
struct plan_order {
    struct layout_entry *source;
    struct layout_entry **destinations;
    uint32_t n_destinations;
    int32_t *source_device;
    int32_t **destination_device;
    struct topology *topology;
    struct plan_options options; /* rules and globs owned */
    uint32_t node; /* index into the topology; PLAN_NO_NODE: the plan alone, no program */
    uint8_t key[16];
};

void plan_order_close(struct plan_order *o);
/* Fills key. Loop thread or any. */
int plan_order_key(struct plan_order *o);
/* Plans, checks, encodes: any thread. Takes layouts and topology out of the order on success. */
int plan_entry_make(struct plan_order *o, struct plan_entry **ret, struct err *e);

void plan_store_init(struct plan_store *s);
void plan_store_close(struct plan_store *s);
/* Counted for the caller, or NULL. */
struct plan_entry *plan_store_find(struct plan_store *s, const uint8_t key[16], uint32_t node);
void plan_store_add(struct plan_store *s, struct plan_entry *entry);
struct plan_entry *plan_entry_ref(struct plan_entry *entry);
void plan_entry_unref(struct plan_entry *entry); /* NULL is fine */

#endif
