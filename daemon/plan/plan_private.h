/* What a plan is made of, for the files of this folder alone.
 *
 * From the tensors down to the messages:
 *   spec    how one side cuts and places tensors (mesh, placements, order): leaf boxes and their
 *           ranks
 *   set     the ranks (ends) that hold, or take, the same part; sorted by (domain, site, device, …)
 *   class   structure: which leaves of both sides overlap. Sizes do not matter, so tensors of
 *           different shapes share one
 *   shape   tensors of a class with equal sizes: where the cuts lie
 *   unit    a tensor in one wire dtype; the members of a shape
 *   group   a cell of a class: one set of holders, one set of takers, over all members
 *   run     a range of a group's members, or a piece of one: the unit of assignment
 *   batch   small runs with the same holders and takers, of any classes: assigned together
 *   bundle  a batch; or, where a plan would have too many edges, several with the same takers: each comes from its
 *           own holders to one domain, which passes them on together
 *   edge    neighbouring batches sent from one device to another (anything inside one site is no edge)
 *   leg     edges of one stream that are sent together, with the time at which they start
 *   stream  all legs from one device to another at one relay depth
 *
 * A site is the devices of one node in one domain: they copy between each other without messages.
 */
#ifndef RS_PLAN_PRIVATE_H
#define RS_PLAN_PRIVATE_H

#include "base/mem.h"
#include "plan/plan.h"
#include "plan/program.h"

#define NONE32 UINT32_MAX

#define VEC(type)                                                                                  \
    struct {                                                                                       \
        type *at;                                                                                  \
        size_t n;                                                                                  \
        size_t capacity;                                                                           \
    }
/* 0 or RS_ENOMEM. */
#define vec_reserve(v, need)                                                                       \
    ((need) <= (v)->capacity                                                                       \
         ? 0                                                                                       \
         : mem_grow((void **)(void *)&(v)->at, &(v)->capacity, (need), sizeof *(v)->at))

struct end {
    uint32_t device;
    uint32_t domain;
    uint32_t site;
    uint32_t layout; /* 0 on the source side */
    uint32_t rank;
};

struct set {
    uint32_t first; /* into plan.ends */
    uint32_t n;
};

struct plan_class {
    uint32_t structure; /* into plan.structures; NONE32: explicit cells */
    uint32_t first_box; /* explicit cells: into plan.boxes */
    uint32_t n_cells;
    uint32_t first_group; /* one per cell */
    uint32_t first_member, n_members;
    uint32_t first_shape, n_shapes; /* into plan.class_shapes */
    uint32_t n_sides;               /* the source and the destinations that take part */
    uint8_t n_dims;
    uint8_t strategy;
    uint32_t intervals[BOX_MAX_DIMS]; /* merged intervals per dim */
};

struct plan_shape {
    uint32_t class;
    uint32_t first_member, n_members; /* into plan.members */
    uint32_t cuts;                    /* into plan.cuts: per dim intervals + 1 points */
    uint32_t first_piece; /* into plan.pieces: n_cells + 1 sums; NONE32: no cell is split */
    uint8_t n_dims;
    uint8_t source_dtype;
    uint8_t wire;
    uint8_t wire_bytes;
    uint8_t value;      /* enum plan_value */
    uint32_t block[2];  /* unless PLAN_SOURCE */
    uint64_t origin[2]; /* unless PLAN_SOURCE: the source tensor's shape */
    uint64_t size[BOX_MAX_DIMS];
};

/* A derived tensor, made in one way: destinations that agree in it share it. */
struct plan_derived {
    uint32_t layout, tensor; /* of the first destination that has it */
    uint32_t origin;         /* tensor of the source layout */
    uint32_t first, n;       /* into plan.derived_of */
};
struct plan_derived_of {
    uint32_t layout, tensor;
};

struct plan_unit {
    uint32_t tensor;
    uint32_t shape;
    uint32_t member; /* its place in plan.members */
    uint32_t cast;   /* gather-broadcast: into plan.casts */
    uint64_t first_cell;
    uint64_t first_transfer;
};

struct plan_group {
    uint32_t class;
    uint32_t cell;
    uint32_t source; /* sets */
    uint32_t takers;
    uint64_t bytes; /* of all members */
    uint32_t first_run;
    uint32_t n_runs;
};

struct plan_run {
    uint32_t group;
    uint32_t member; /* into plan.members */
    uint32_t count;
    uint32_t piece; /* NONE32: whole cells; else that piece of one member */
    uint64_t bytes;
    uint64_t offset; /* of its bytes in its batch */
    uint32_t batch;
    uint32_t reserved;
};

struct plan_batch {
    uint32_t source, takers;    /* sets */
    uint32_t first_run, n_runs; /* into plan.batch_runs */
    uint32_t bundle;
    uint32_t reserved;
    uint64_t offset; /* of its bytes in its bundle */
    uint64_t bytes;
};

struct plan_bundle {
    uint32_t first_batch, n_batches;
    uint32_t first_edge, n_edges; /* parents stand before their children */
    uint64_t bytes;
};

struct plan_edge {
    uint32_t first_batch, n_batches; /* of one bundle: one, or all */
    uint32_t from, to;               /* devices */
    /* The edge that brings the bytes to `from`; NONE32: from is a source holder. Where that one has fewer batches it is
     * the first of as many edges as there are batches (plan_edge_parent). */
    uint32_t parent;
    uint32_t taker; /* end that it is for; NONE32: for all takers of to's site */
    uint32_t leg;
    uint64_t offset; /* of its bytes in the leg */
    uint8_t depth;   /* 1: from a source holder */
    uint8_t hops;    /* network hops so far */
    uint8_t tier;
    uint8_t staging; /* `to` is no taker */
    uint8_t reserved[4];
};

struct plan_leg {
    uint64_t bytes;
    uint64_t start; /* in bytes at network rate */
    uint64_t base;  /* where it begins in its stream */
    uint32_t stream;
    uint32_t first_edge, n_edges; /* into plan.leg_edges */
    uint32_t next;                /* of its stream, in the order of start */
};

struct plan_stream {
    uint64_t bytes;
    uint32_t from, to;
    uint32_t first_leg, last_leg;
    uint8_t depth;
    uint8_t tier;
    uint8_t reserved[6];
};

/* A unit that is gathered and broadcast, plan_broadcast.h. */
struct plan_cast {
    uint32_t unit;
    uint32_t gather; /* device */
    uint64_t bytes;
    uint64_t gather_start, start; /* as plan_leg.start */
    uint64_t scratch_offset;
};

struct plan {
    const struct layout *source;
    const struct topology *topology;
    const struct layout **destinations;
    uint32_t n_destinations;
    struct plan_options options;
    struct plan_totals totals;
    uint32_t *device_site;
    uint64_t *egress, *ingress; /* network, per device */

    uint64_t run_bytes; /* greatest run, unless one element is more */
    /* cells are split in pieces of at most this, unless one element is more */
    uint64_t piece_bytes;
    bool chains;            /* relays pass runs on from domain to domain in a ring */
    uint64_t message_bytes; /* greatest message: chunk_bytes or less */
    uint64_t message_step;  /* nominal distance of two cuts in a leg */
    uint64_t cut_bytes;     /* rows up to this size are not cut */
    uint32_t domain_speed;  /* eighths of the network rate */
    bool apart;             /* messages of both tiers: each in rounds of its own */

    VEC(struct end) ends;
    VEC(struct set) sets;
    VEC(uint32_t) structures;
    VEC(struct box) boxes;
    VEC(struct plan_class) classes;
    VEC(struct plan_shape) shapes;
    VEC(uint32_t) class_shapes;
    VEC(uint64_t) cuts;
    VEC(uint32_t) pieces;
    VEC(struct plan_unit) units;
    VEC(uint32_t) members;
    VEC(struct plan_group) groups;
    VEC(struct plan_run) runs;
    VEC(struct plan_batch) batches;
    VEC(uint32_t) batch_runs;
    VEC(struct plan_bundle) bundles;
    VEC(struct plan_edge) edges;
    VEC(uint32_t) leg_edges;
    VEC(struct plan_leg) legs;
    VEC(struct plan_stream) streams;
    VEC(struct plan_cast) casts;
    VEC(struct plan_derived) derived;       /* by name */
    VEC(struct plan_derived_of) derived_of; /* the destinations' tensors that they are */
    VEC(uint32_t) chain;                    /* destination devices by (domain, device) */
    uint64_t scratch_bytes;
};

/* --- plan_derive.c: fills plan.derived. 0 or RS_ENOMEM ----------------------------------------- */
int plan_derive(struct plan *p);
/* --- plan_class.c: specs, classes, shapes, units, groups (bytes not yet) ---------------------- */
int plan_classes(struct plan *p, const struct plan_input *input, struct err *e);
/* --- plan_overlay.c: cells of a tensor that is declared by regions on some side --------------- */
struct overlay_box {
    struct box box;
    uint32_t set; /* ranks that hold or take it */
    bool source;
};
/* Appends class cells (boxes), groups and sets for the overlay of `boxes`. */
int plan_overlay(struct plan *p, uint32_t class, const struct overlay_box *boxes, uint32_t n,
                 struct err *e);
/* Appends a set with the ends of all of `sets`, sorted, without repeats. 0 or RS_ENOMEM. */
int plan_set_union(struct plan *p, const uint32_t *sets, uint32_t n, uint32_t *ret_set);
int plan_end_compare(const void *a, const void *b);

/* --- plan_cells.c: geometry ------------------------------------------------------------------- */
void plan_cell_box(const struct plan *p, const struct plan_shape *s, uint32_t cell,
                   struct box *ret);
uint64_t plan_cell_bytes(const struct plan *p, const struct plan_shape *s, uint32_t cell);
uint32_t plan_cell_pieces(const struct plan *p, const struct plan_shape *s, uint32_t cell);
/* `piece` NONE32: the whole cell. */
void plan_piece_box(const struct plan *p, const struct plan_shape *s, uint32_t cell, uint32_t piece,
                    struct box *ret);
uint64_t plan_piece_bytes(const struct plan *p, const struct plan_shape *s, uint32_t cell,
                          uint32_t piece);
static inline const struct plan_shape *plan_member_shape(const struct plan *p, uint32_t member)
{
    return &p->shapes.at[p->units.at[p->members.at[member]].shape];
}
/* Global number of a cell (piece NONE32: of an unsplit one). */
uint64_t plan_cell_number(const struct plan *p, uint32_t unit, uint32_t cell, uint32_t piece);
/* Walks the stretches of equal shape in a run. */
struct run_walk {
    uint32_t member, end; /* this stretch starts at member; the run ends at end */
    uint32_t n;           /* members in the stretch */
    const struct plan_shape *shape;
    uint64_t bytes; /* of each member */
};
void run_walk_init(const struct plan *p, const struct plan_run *r, struct run_walk *ret);
bool run_walk_next(const struct plan *p, const struct plan_run *r, struct run_walk *w);

/* --- plan_runs.c: lower bound, run size, runs ------------------------------------------------- */
int plan_runs(struct plan *p, struct err *e);

/* --- plan_ingest.c, plan_senders.c ------------------------------------------------------------ */
/* A need's sender where each batch of its bundle comes from a holder of its own. */
#define EACH_HOLDER (UINT32_MAX - 1)
/* A domain's need of a bundle: which no holder inside can serve. */
struct need {
    uint32_t bundle;
    uint32_t domain;
    uint32_t first_end, n_ends; /* its takers */
    uint32_t device;            /* ingest device */
    uint32_t from;              /* sender, or EACH_HOLDER */
    uint32_t via;               /* the need that feeds the sender, NONE32 for a source holder */
    uint8_t hops;               /* from a source holder: 1 */
    bool staging;
};
struct needs {
    VEC(struct need) v;        /* those of a bundle stand together, ascending domain */
    uint32_t *first_of_bundle; /* one more than bundles */
    uint32_t *order;           /* bundles of the strategy reshard, largest first */
    uint32_t n_reshard;        /* those bundles are the first ones */
    uint32_t *batch_from; /* EACH_HOLDER: the holder that sends a batch; NONE32: not chosen yet */
    uint64_t *domain_ingress; /* bytes per device that come from its own domain */
    uint64_t *domain_egress;
    uint64_t relay_limit; /* bytes that a relay sends at most of its own accord */
    uint32_t n_domains;   /* that need anything */
};
int plan_needs(struct plan *p, struct needs *ret);
/* More needs than this are put together in bundles. 2^19; tests lower it before they plan. */
extern uint64_t plan_bundle_from;
void needs_close(struct needs *n);
int plan_ingest(struct plan *p, struct needs *n);
int plan_senders(struct plan *p, struct needs *n);
/* plan_edges.c: edges of all runs: network, inside domains, and those of direct. */
int plan_edges(struct plan *p, struct needs *n, struct err *e);
static inline uint64_t plan_edge_bytes(const struct plan *p, const struct plan_edge *e)
{
    const struct plan_batch *b = &p->batches.at[e->first_batch];
    return e->n_batches == 1 ? b->bytes : p->bundles.at[b->bundle].bytes;
}
/* Where a batch begins in an edge that has it. */
static inline uint64_t plan_batch_offset(const struct plan *p, const struct plan_edge *e,
                                         uint32_t batch)
{
    return p->batches.at[batch].offset - p->batches.at[e->first_batch].offset;
}
/* How many edges bring what `e` sends on. */
static inline uint32_t plan_edge_parents(const struct plan *p, const struct plan_edge *e)
{
    return e->parent == NONE32                                ? 0
           : p->edges.at[e->parent].n_batches == e->n_batches ? 1
                                                              : e->n_batches;
}
/* The one that brings the batch; NONE32: from is a source holder. */
static inline uint32_t plan_edge_parent(const struct plan *p, const struct plan_edge *e,
                                        uint32_t batch)
{
    if (e->parent == NONE32 || p->edges.at[e->parent].n_batches == e->n_batches)
        return e->parent;
    return e->parent + (batch - e->first_batch);
}
/* Legs hold several edges, and batches several runs, up to this many bytes. */
uint64_t plan_leg_bytes(const struct plan *p);
/* plan_rounds.c: streams, legs, and when each starts. */
int plan_rounds(struct plan *p, struct err *e);

/* --- plan_hops.c: what a run's cells do, step by step ----------------------------------------- */
/* One transfer of each cell of a run. Hops stand in an order in which parents come first. */
struct hop {
    uint32_t from; /* end; NONE32: the staging memory of from_device */
    uint32_t to;   /* end; NONE32: staging memory */
    uint32_t from_device, to_device;
    uint32_t edge;  /* NONE32: inside a site, no message */
    uint32_t after; /* hop; NONE32: from is a source holder */
    enum plan_side from_side;
    uint8_t tier;
};
struct hops {
    VEC(struct hop) v;
    VEC(uint32_t) of_edge; /* hop of each edge of the run */
};
int plan_run_hops(const struct plan *p, uint32_t run, struct hops *h);
void hops_close(struct hops *h);
/* Ends of a set at a site: the first, and how many. */
uint32_t set_site(const struct plan *p, const struct set *s, uint32_t domain, uint32_t site,
                  uint32_t *ret_first);
/* The runs of a member's cell: the first, and how many (one per piece). */
uint32_t plan_find_runs(const struct plan *p, uint32_t group, uint32_t member, uint32_t *ret_first);
/* Bytes of the run before member m of it. */
uint64_t plan_run_offset(const struct plan *p, const struct plan_run *r, uint32_t member);

/* --- messages (plan_messages.c) --------------------------------------------------------------- */
uint64_t leg_messages(const struct plan *p, const struct plan_leg *l);
/* Where in a leg the last cut was found, so that the next one is not looked for from the start. Zeroed: nowhere. */
struct leg_cursor {
    uint32_t edge;  /* of the leg */
    uint32_t batch; /* of the edge: 0 is its first */
    uint32_t run;   /* of the batch */
    bool started;   /* walk is in that run */
    uint64_t begin; /* of the stretch, in the leg */
    struct run_walk walk;
};
/* Message i of a leg: bytes [begin, end) of the leg, and its round. Ascending i with one cursor. */
void leg_message(const struct plan *p, const struct plan_leg *l, uint64_t i, struct leg_cursor *c,
                 uint64_t *ret_begin, uint64_t *ret_end, uint32_t *ret_round);
/* The round in which byte `at` of the leg moves; `at` is where an item begins. */
uint32_t leg_round_of(const struct plan *p, const struct plan_leg *l, uint64_t at);
uint32_t leg_last_round(const struct plan *p, const struct plan_leg *l);
/* Bytes that cuts inside the box are multiples of: its longest suffix of dims of at most cut_bytes;
 * of block-scaled tensors a block's rows, where those are no more. */
uint64_t plan_cut_unit(const struct plan *p, const struct plan_shape *s, const struct box *b);
/* The round of what moves at `time` (in bytes at network rate). Where a plan has messages of both tiers those inside
 * domains have rounds of their own, each behind the network's of the same time: else short messages would share groups
 * with long ones, and hold slots until those are through. */
static inline uint64_t plan_round(const struct plan *p, uint8_t tier, uint64_t time)
{
    uint64_t round = time / p->message_bytes;
    return p->apart ? 2 * round + (tier == TIER_DOMAIN) : round;
}
/* Time that `bytes` take in a tier, in bytes at network rate. */
static inline uint64_t plan_time(const struct plan *p, uint8_t tier, uint64_t bytes)
{
    return tier == TIER_NETWORK ? bytes : bytes * 8 / p->domain_speed;
}

/* --- plan_totals.c ---------------------------------------------------------------------------- */
int plan_count(struct plan *p);

/* --- plan_digest.c (xxHash) ------------------------------------------------------------------- */
int plan_digest(const struct plan *p, uint8_t ret_digest[16]);

/* --- plan_sort.c ------------------------------------------------------------------------------ */
/* Stable: ret_order (n of them) lists the indices 0 … n-1, or those of `from` (may be NULL), by
 * ascending key[index] < n_keys. RS_ENOMEM. */
int sort_count(const uint32_t *key, const uint32_t *from, uint32_t n, uint32_t n_keys,
               uint32_t *ret_order);
/* Stable, descending by 64-bit key. */
int sort_descending(const uint64_t *key, uint32_t n, uint32_t *ret_order);

#endif
