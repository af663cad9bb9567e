/* Makes plans. Pure: the same input gives the same bytes on every daemon; no clock, no I/O, nothing
 * random. Plan digests are compared before any byte moves.
 *
 * Words
 *   cell         part of a tensor with one set of holders and one set of takers, in one wire dtype
 *   transfer     one cell (or a piece of it) from one device to another
 *   tier         network: between domains; domain: inside one; device: on one device
 *   ingest rank  the one destination device through which a cell enters a domain
 *   relay        a transfer whose sender is an ingest rank of another destination domain
 *   value        what a cell's elements are: the source's, quantised by block, or the blocks' scales
 *   staging      memory of a device that takes a cell in for others and does not need it itself
 *
 * Rules of the strategy `reshard`
 *   1. A tensor is cut at every source and destination boundary into cells. Different wire dtypes
 *      are different cells: a cast is done once, by the sender, and relays pass on what was cast.
 *   2. A domain that holds a cell takes nothing in. Any other takes in each cell that it needs by
 *      exactly one network transfer, so network bytes = unique bytes needed and not held, by
 *      construction. Cells are split where that balances ingest.
 *   3. The sender is the least loaded among the source's holders and the relays.
 *      Where a source is cut so finely, and so many domains need every part, that a plan would have
 *      over half a million of such transfers of parts (FSDP over thousands of ranks), parts with the same
 *      takers go to one domain from their own holders, and from there on together.
 *   4. Inside the domain the ingest rank hands the cell on to its other takers.
 *   5. Messages lie in globally numbered rounds; what a transfer depends on lies in an earlier one.
 *      A round is an order, not a barrier (program.h says why it can't deadlock).
 * `direct` sends each taker its intersections separately. `gather-broadcast` gathers each tensor
 * once, on the source device that holds most of it (ties: the lowest), and broadcasts it whole to
 * every destination device in a chunked chain that enters each domain once.
 *
 * A tensor with block scales is cast by whoever sends it from a source's memory, and so are its scales
 * made: a block must lie wholly in one source rank's part, and who holds one part of a block holds it all. Both are
 * cells as any others: relayed, handed on and verified as what was made.
 *
 * The lower bound of the busiest device is the greatest of: for each domain, the bytes that it is
 * missing over its destination devices; for each set of source devices that alone holds some needed
 * cells, those cells' bytes over the devices of the set.
 *
 * Files, in reading order
 *   plan_spec.c            how one side cuts and places tensors: leaf boxes and their ranks
 *   plan_derive.c          derived tensors of the destinations
 *   plan_class.c           tensors that are cut alike share one geometry
 *   plan_overlay.c         cells where a side has explicit regions
 *   plan_cells.c           geometry of cells, by formula from the cuts
 *   plan_runs.c            how much there is to move, the lower bound, units of assignment
 *   plan_ingest.c          which destination device takes each run into its domain
 *   plan_senders.c         which source holder, or relay, sends it
 *   plan_edges.c           what crosses from one site to another, parents before children
 *   plan_broadcast.c       gather-broadcast instead of the three before
 *   plan_rounds.c          the timetable: streams, legs and when each starts
 *   plan_messages.c        a leg's messages, by formula; their rounds
 *   plan_hops.c            what a run's cells do, hop by hop
 *   planner.c              plan_make: the steps above, in order
 *   plan_totals.c          bytes by tier and device; numbers of transfers
 *   plan_transfers.c       the stream of transfers (plan_transfers)
 *   plan_simulate.c, plan_links.c         the plan run on a model of the links (plan_simulate.h)
 *   plan_check.c, plan_check_messages.c   the proof, from input and streams alone (plan_check.h)
 *   plan_program*.c, program*.c           one node's part, written and read (program.h)
 *   plan_digest.c          digests of plan and input
 *   plan.c, plan_sort.c                   the plan's own life; stable sorts
 * plan_private.h has what they share. */
#ifndef RS_PLAN_PLANNER_H
#define RS_PLAN_PLANNER_H

#include "plan/plan.h"

/* RS_EINVAL, RS_EPRECOND (layout_check_pair; a rank with no device), a block over two source
 * shards), RS_ENOMEM. *ret is the caller's to plan_free. CPU-bound: tens of milliseconds for 70,000 tensors
 * on 1024 ranks; call it off the loop thread. */
int plan_make(const struct plan_input *input, struct plan **ret, struct err *e);

/* Digest of all of the input: the key by which service/plan_store finds a plan again. */
int plan_input_digest(const struct plan_input *input, uint8_t ret_digest[16]);

#endif
