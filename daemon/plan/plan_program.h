/* What the files that make a program share. plan_program.c goes through the plan's parts in order; each adds what this
 * node has of them.
 *
 *   plan_program.c           the node's devices, the steps in order, the bytes
 *   plan_program_intern.c    what there is one of each: tensors, boxes, cells, places, lists
 *   plan_program_entries.c   what is added: holds, items, copies, streams, messages; their order
 *   plan_program_runs.c      runs and the streams of legs
 *   plan_program_casts.c     gather-broadcast
 *
 * int: 0, RS_ENOMEM or RS_EEXHAUSTED (too many of a kind). */
#ifndef RS_PLAN_PLAN_PROGRAM_H
#define RS_PLAN_PLAN_PROGRAM_H

#include "plan/plan_private.h"
#include "plan/program_format.h"

/* Open addressing from 64-bit keys to indices. */
struct map {
    uint64_t *key;
    uint32_t *value; /* NONE32: empty */
    size_t size, n;
};

/* Items that a device copies: of a cell and those after it. */
struct routed_copies {
    uint32_t device, n;
    struct program_item item; /* the first */
};

struct routed_message {
    struct program_message m;
    uint32_t device;
    uint32_t order;
};

struct marks {
    uint32_t *at;
    size_t n, capacity;
};

/* Holds of one place: of a cell and those after it. */
struct hold_stretch {
    uint32_t place, cell, n;
};

/* A cast leg that this node has an end of; sorted, those of one stream stand together. */
struct cast_record {
    uint32_t order;
    uint32_t send;
    uint32_t cast;
    uint32_t hop; /* 0: the gather from `giver` */
    uint32_t giver;
};

struct encoder {
    const struct plan *p;
    uint32_t node;
    uint32_t *local;   /* per plan device: its number on the node, NONE32 elsewhere */
    uint8_t *set_here; /* per set: an end is on the node */
    uint32_t *
        run_cells; /* per run: the cell of its first member, those of the others follow; NONE32: none is here */
    uint32_t *unit_tensor; /* per unit: NONE32: none */
    struct map cells;      /* of casts */
    struct map boxes, places, lists;
    VEC(struct program_tensor) v_tensors;
    VEC(struct box) v_boxes;
    uint32_t n_cells, n_items, n_holds;
    VEC(struct program_cell_run) v_cell_runs;
    VEC(struct program_place) v_places;
    VEC(uint32_t) v_lists;
    VEC(struct program_item_run) v_item_runs;
    VEC(struct program_stream) v_streams;
    VEC(struct program_message) v_messages;
    VEC(struct routed_message) messages;
    VEC(struct routed_copies) copies;
    VEC(struct hold_stretch) holds; /* ascending cells */
    VEC(struct program_hold_run) v_hold_runs;
    struct marks v_cell_marks, v_item_marks, v_hold_marks;
    VEC(struct program_device) v_devices;
    VEC(uint32_t) list;        /* under construction */
    VEC(uint32_t) hold_places; /* of a run's or cast's cells */
    VEC(struct cast_record) v_records;
};

static inline bool end_here(const struct encoder *x, uint32_t end)
{
    return x->local[x->p->ends.at[end].device] != NONE32;
}

/* The node holds or takes its cells. */
static inline bool run_here(const struct encoder *x, uint32_t run)
{
    const struct plan_group *g = &x->p->groups.at[x->p->runs.at[run].group];
    return x->set_here[g->source] || x->set_here[g->takers];
}

/* --- plan_program_intern.c -------------------------------------------------------------------- */

/* Gives the tensors of this node's runs their numbers, in the order of members: so those of a run follow one another. */
int encoder_run_tensors(struct encoder *x);
/* Each cell belongs to one run: they are made run by run, and a run's first says where the others are. */
int encoder_run_cells(struct encoder *x, uint32_t run, uint32_t *ret_first);
int encoder_cast_cell(struct encoder *x, uint32_t unit, uint32_t cell, uint32_t *ret);
/* layout and rank: 0 for the scratch. */
int encoder_place(struct encoder *x, uint8_t side, uint32_t device, uint32_t layout, uint32_t rank,
                  uint32_t *ret);
int encoder_end_place(struct encoder *x, uint32_t end, uint8_t side, uint32_t *ret);
/* Into the list under construction (x->list.n = 0 begins it); then that list, of which equal ones are one. */
int encoder_list_add(struct encoder *x, uint32_t place);
int encoder_list_add_end(struct encoder *x, uint32_t end);
int encoder_list(struct encoder *x, uint32_t *ret);
void encoder_intern_close(struct encoder *x);

/* --- plan_program_entries.c ------------------------------------------------------------------- */

/* All places of the group hold cells [first, first + count). */
int encoder_holds(struct encoder *x, const struct plan_group *g, uint32_t first, uint32_t count);
/* n items of the stream opened last: of item's cell and those after it. */
int encoder_items(struct encoder *x, struct program_item item, uint32_t n);
/* The same as copies of a device (local number). */
int encoder_copies(struct encoder *x, uint32_t device, struct program_item item, uint32_t n);
int encoder_message(struct encoder *x, struct program_message m, uint32_t order);
int encoder_stream(struct encoder *x, uint32_t from, uint32_t to, uint32_t order, bool send,
                   uint8_t tier);
/* Copies behind the streams' items, by device; messages by device in their order; holds sorted; marks. */
int encoder_lay_out(struct encoder *x);

/* --- plan_program_runs.c, plan_program_casts.c ------------------------------------------------ */

int encoder_runs(struct encoder *x);
/* In the order of (stream, receive before send). */
int encoder_streams(struct encoder *x);
int encoder_casts(struct encoder *x);

#endif
