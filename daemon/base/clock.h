/* The two clocks: monotonic for deadlines, wall for what people read. Pure code never calls these.
 */
#ifndef RS_BASE_CLOCK_H
#define RS_BASE_CLOCK_H

#include <stdint.h>

uint64_t clock_mono_ns(void); /* CLOCK_MONOTONIC; never stored across restarts */
uint64_t clock_wall_ns(void); /* CLOCK_REALTIME, ns since 1970; shown, never compared */

#endif
