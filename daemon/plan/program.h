/* One node's part of a plan, as the data plane runs it: flat, position independent, checked on
 * opening.
 *
 * The control process encodes it (plan_program), the data plane maps it from a sealed memfd and
 * opens it. libc alone. All multi-byte fields are host order: it never leaves the machine.
 *
 *   cell     tensor, box, wire dtype, global number
 *   place    memory of one local worker, (side, layout, rank), or a device's scratch
 *   item     a cell with the place that it is read from, or the places that it is written to
 *   stream   the items that one device sends to another at one relay depth, in a fixed order; its
 *            bytes are the items' elements, each item row-major in wire dtype, one after another,
 *            no padding
 *   message  bytes [begin, end) of a stream, whole elements, in one round; a stream may have
 *            several in one round, in the order of their bytes
 *   copy     an item that a device copies from one local place to others: no message
 *   hold     a cell that a place holds or takes
 *
 * Cells, items and holds are numbered, and looked up by number: program_cell, program_item, program_hold. They are kept
 * as runs of entries that follow one another by a rule, some thousands where there are millions of entries.
 *
 * Order and why it cannot deadlock: each device runs its messages in the order (round,
 * stream.order), in groups of consecutive messages that need at most ring_slots slots. That order
 * is the same total order on all devices, and a message comes after all that it depends on; so the
 * least unfinished message always has both of its ends at the front. A transport may let a device go
 * on before what it has sent is received, as long as it keeps the order: that waits for less, so the
 * same holds. A group never spans two rounds. */
#ifndef RS_PLAN_PROGRAM_H
#define RS_PLAN_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "layout/box.h"
#include "layout/dtype.h"

#define PROGRAM_NONE UINT32_MAX

/* What the elements of a tensor's cells are (enum plan_value). Whoever reads a source makes them; all
 * other places hold them as they are. */
enum program_value { PROGRAM_AS_SOURCE, PROGRAM_QUANTISED, PROGRAM_SCALES };

/* One entry per tensor, wire dtype and block: a tensor that goes out in two dtypes is here twice. */
struct program_tensor {
    uint64_t shape[BOX_MAX_DIMS];
    uint64_t scratch_offset; /* where the whole tensor lies in each device's scratch; UINT64_MAX:
                                nowhere */
    uint64_t first_cell;     /* the plan's number of its first cell: the others' follow */
    uint64_t origin[2];      /* scales: shape of the tensor that they are derived from */
    uint32_t block[2];       /* quantised, scales */
    uint32_t index;          /* in the source layout, of what it is made from */
    /* Scales: a destination layout, and the index in it of the tensor that they are there: their
     * name's. Else PROGRAM_NONE */
    uint32_t named_layout, named_tensor;
    uint8_t n_dims;
    uint8_t source_dtype; /* enum dtype */
    uint8_t value;        /* enum program_value */
    uint8_t reserved;
};

struct program_cell {
    uint64_t id;     /* the plan's cell number */
    uint32_t tensor; /* index into program.tensors */
    uint32_t box;    /* index into program.boxes */
    uint8_t wire;    /* enum dtype */
};

enum program_side { PROGRAM_SOURCE, PROGRAM_DESTINATION, PROGRAM_SCRATCH };

struct program_place {
    uint32_t device; /* local number on this node */
    uint32_t layout; /* destination layout's index; 0 for the source and scratch */
    uint32_t rank;
    uint8_t side; /* enum program_side */
    uint8_t reserved[3];
};

/* `places` is an index into program.lists: a count, then that many place indices. */
struct program_item {
    uint32_t cell;
    uint32_t from;   /* place: sends and copies; PROGRAM_NONE on the receiving end */
    uint32_t places; /* list: receives and copies; PROGRAM_NONE on the sending end */
};

struct program_stream {
    uint64_t bytes;      /* of all its items */
    uint32_t device;     /* local number: whose program it is in */
    uint32_t peer;       /* the plan's device index at the other end */
    uint32_t order;      /* ties within a round; the same number at both ends, unique in the plan */
    uint32_t first_item; /* into program.items */
    uint32_t n_items;
    uint8_t send; /* 1: this device sends, 0: receives */
    uint8_t tier; /* enum plan_tier: 1 domain, 2 network */
    uint8_t reserved[2];
};

struct program_message {
    uint64_t begin, end; /* bytes of the stream */
    uint32_t stream;
    uint32_t round;
};

/* Per local device: slices of messages (ascending (round, order)) and of copies (items). */
struct program_device {
    uint32_t device; /* the plan's device index */
    uint32_t first_message, n_messages;
    uint32_t first_copy, n_copies; /* into program.items */
};

/* For verification: the cells that a place holds (source: all of its replicas) or takes. */
struct program_hold {
    uint32_t place;
    uint32_t cell;
};

/* --- runs: for program.c, program_check.c and what encodes -------------------------------------- */

/* Entries of one kind are in runs: `first` is the number of a run's first entry, and a run ends where the next one
 * begins. For each PROGRAM_MARK entries a mark says which run the first of them is in; one more is the last run. */
#define PROGRAM_MARK 256U
/* The most cells, items or holds of a program: an attempt keeps some 20 bytes of each. */
#define PROGRAM_MOST (UINT32_C(1) << 30)

/* Each cell is of the tensor after the last one's, in the same box and with the same number in its tensor; or of the same
 * tensor, with the next box and the next number. */
struct program_cell_run {
    uint32_t first;
    uint32_t tensor, box, number; /* of the first cell; id = tensor's first_cell + number */
    uint8_t wire;
    uint8_t along_tensors; /* 1, or 0: along boxes */
    uint8_t reserved[2];
};

/* All with the same ends, of a cell and those after it. */
struct program_item_run {
    uint32_t first;
    uint32_t cell, from, places; /* of the first item */
};

/* In one place, a cell and those after it. */
struct program_hold_run {
    uint32_t first;
    uint32_t place, cell; /* of the first hold */
};

/* --- the program ------------------------------------------------------------------------------ */

/* Views into the encoded bytes; the bytes must outlive it. */
struct program {
    uint8_t digest[16]; /* of the whole plan */
    uint64_t chunk_bytes;
    uint64_t scratch_bytes; /* per device; 0 unless gather-broadcast is used */
    uint32_t ring_slots;
    uint32_t n_plan_devices;
    uint32_t n_cells, n_items, n_holds; /* holds ascend by (place, cell) */
    const struct program_tensor *tensors;
    const struct box *boxes;
    const struct program_place *places;
    const uint32_t *lists;
    const struct program_stream *streams;
    const struct program_message *messages;
    const struct program_device *devices;
    const struct program_cell_run *cell_runs;
    const struct program_item_run *item_runs;
    const struct program_hold_run *hold_runs;
    const uint32_t *cell_marks, *item_marks, *hold_marks;
    uint32_t n_tensors, n_boxes, n_places, n_lists, n_streams, n_messages, n_devices;
    uint32_t n_cell_runs, n_item_runs, n_hold_runs, n_cell_marks, n_item_marks, n_hold_marks;
};

/* Checks every index, range, order and sum, so that running it needs no checks. RS_EPROTO says
 * what. */
int program_open(const void *data, size_t n_bytes, struct program *ret, struct err *e);

/* The run that entry i is in. A run begins with `first`. */
static inline uint32_t program_run(const void *runs, size_t run_bytes, const uint32_t *marks,
                                   uint32_t i)
{
    uint32_t low = marks[i / PROGRAM_MARK], high = marks[i / PROGRAM_MARK + 1];
    while (low < high) {
        uint32_t mid = high - (high - low) / 2;
        if (*(const uint32_t *)(const void *)((const char *)runs + mid * run_bytes) <= i)
            low = mid;
        else
            high = mid - 1;
    }
    return low;
}

/* Entries by number; one step where runs are long. */
static inline struct program_cell program_cell(const struct program *p, uint32_t cell)
{
    const struct program_cell_run *r =
        &p->cell_runs[program_run(p->cell_runs, sizeof *r, p->cell_marks, cell)];
    uint32_t k = cell - r->first, tensor = r->tensor, box = r->box, number = r->number;
    if (r->along_tensors) {
        tensor += k;
    } else {
        box += k;
        number += k;
    }
    return (struct program_cell){p->tensors[tensor].first_cell + number, tensor, box, r->wire};
}

static inline struct program_item program_item(const struct program *p, uint32_t item)
{
    const struct program_item_run *r =
        &p->item_runs[program_run(p->item_runs, sizeof *r, p->item_marks, item)];
    return (struct program_item){r->cell + (item - r->first), r->from, r->places};
}

static inline struct program_hold program_hold(const struct program *p, uint32_t hold)
{
    const struct program_hold_run *r =
        &p->hold_runs[program_run(p->hold_runs, sizeof *r, p->hold_marks, hold)];
    return (struct program_hold){r->place, r->cell + (hold - r->first)};
}

/* Its cell. */
static inline struct program_cell program_item_cell(const struct program *p, uint32_t item)
{
    return program_cell(p, program_item(p, item).cell);
}

static inline struct program_cell program_hold_cell(const struct program *p, uint32_t hold)
{
    return program_cell(p, program_hold(p, hold).cell);
}

/* How many of the cells (of items: of the items and their cells) from this one on, this one included and `most` at most,
 * follow one another in one run and have one box and wire dtype. At least 1 where most is. */
uint32_t program_like_cells(const struct program *p, uint32_t cell, uint32_t most);
uint32_t program_like_items(const struct program *p, uint32_t item, uint32_t most);
uint32_t program_like_holds(const struct program *p, uint32_t hold, uint32_t most);

/* The holds of a place: [*ret_first, *ret_end). */
void program_holds_of(const struct program *p, uint32_t place, uint32_t *ret_first,
                      uint32_t *ret_end);
/* The hold of a cell in a place, or PROGRAM_NONE. */
uint32_t program_hold_at(const struct program *p, uint32_t place, uint32_t cell);

/* True where the tensor's cells in wire dtype `wire` are the source's elements, bit by bit: what a
 * source has published of it can be compared with them. */
static inline bool program_unchanged(const struct program_tensor *t, uint8_t wire)
{
    return t->value == PROGRAM_AS_SOURCE && t->source_dtype == wire;
}
/* What a place of a source is read at for a box of the tensor: whole blocks where it is scaled. */
struct box program_source_box(const struct program_tensor *t, const struct box *box);

/* Elements and wire bytes of a cell. */
static inline uint64_t program_cell_elements(const struct program *p, uint32_t cell)
{
    return box_elements(&p->boxes[program_cell(p, cell).box]);
}

static inline uint64_t program_cell_bytes(const struct program *p, uint32_t cell)
{
    struct program_cell c = program_cell(p, cell);
    return box_elements(&p->boxes[c.box]) * dtype_bytes((enum dtype)c.wire);
}

#endif
