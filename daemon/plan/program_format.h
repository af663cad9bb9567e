/* How a program lies in its bytes: this header, then the arrays in the order of PROGRAM_ARRAYS,
 * each beginning at a multiple of 8 (the gap is zero), and nothing behind the last. */
#ifndef RS_PLAN_PROGRAM_FORMAT_H
#define RS_PLAN_PROGRAM_FORMAT_H

#include "plan/program.h"

#define PROGRAM_MAGIC UINT64_C(0x32474f5250687372) /* "rshPROG2" on a little-endian machine */

/* X(field of struct program, type, count field) */
#define PROGRAM_ARRAYS(X)                                                                          \
    X(tensors, struct program_tensor, n_tensors)                                                   \
    X(boxes, struct box, n_boxes)                                                                  \
    X(cells, struct program_cell, n_cells)                                                         \
    X(places, struct program_place, n_places)                                                      \
    X(lists, uint32_t, n_lists)                                                                    \
    X(items, struct program_item, n_items)                                                         \
    X(streams, struct program_stream, n_streams)                                                   \
    X(messages, struct program_message, n_messages)                                                \
    X(devices, struct program_device, n_devices)                                                   \
    X(holds, struct program_hold, n_holds)

struct program_header {
    uint64_t magic;
    uint8_t digest[16];
    uint64_t chunk_bytes;
    uint64_t scratch_bytes;
    uint32_t ring_slots;
    uint32_t n_plan_devices;
#define X(name, type, count) uint32_t count;
    PROGRAM_ARRAYS(X)
#undef X
};

#endif
