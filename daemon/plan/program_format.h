/* How a program lies in its bytes: this header, then the arrays in the order of PROGRAM_ARRAYS,
 * each beginning at a multiple of 8 (the gap is zero), and nothing behind the last. */
#ifndef RS_PLAN_PROGRAM_FORMAT_H
#define RS_PLAN_PROGRAM_FORMAT_H

#include "plan/program.h"

#define PROGRAM_MAGIC UINT64_C(0x33474f5250687372) /* "rshPROG3" on a little-endian machine */

/* X(field of struct program, type, count field) */
#define PROGRAM_ARRAYS(X)                                                                          \
    X(tensors, struct program_tensor, n_tensors)                                                   \
    X(boxes, struct box, n_boxes)                                                                  \
    X(cell_runs, struct program_cell_run, n_cell_runs)                                             \
    X(cell_marks, uint32_t, n_cell_marks)                                                          \
    X(places, struct program_place, n_places)                                                      \
    X(lists, uint32_t, n_lists)                                                                    \
    X(item_runs, struct program_item_run, n_item_runs)                                             \
    X(item_marks, uint32_t, n_item_marks)                                                          \
    X(streams, struct program_stream, n_streams)                                                   \
    X(messages, struct program_message, n_messages)                                                \
    X(devices, struct program_device, n_devices)                                                   \
    X(hold_runs, struct program_hold_run, n_hold_runs)                                             \
    X(hold_marks, uint32_t, n_hold_marks)

struct program_header {
    uint64_t magic;
    uint8_t digest[16];
    uint64_t chunk_bytes;
    uint64_t scratch_bytes;
    uint32_t ring_slots;
    uint32_t n_plan_devices;
    uint32_t n_cells, n_items, n_holds;
#define X(name, type, count) uint32_t count;
    PROGRAM_ARRAYS(X)
#undef X
};

#endif
