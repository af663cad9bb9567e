/* Two sets of a model's versions as distributions. Pure. */
#ifndef RS_CLIENT_CTL_COMPARE_H
#define RS_CLIENT_CTL_COMPARE_H

#include <stdint.h>

struct json_t; /* jansson's */

struct compare_set {
    uint64_t from, to; /* versions, both included */
};

/* From records as Versions gives them, newest first: {"sets": [{"from", "to", "not_committed", "strategies", "plans",
 * "first_of_epoch": group, "steady": group}, …]}; a group is {"n", "total_ns": {"least", "median", "p90", "most"},
 * "wire_ns": …, "stall_ns": …} of committed versions, quantiles by nearest rank. NULL: out of memory. */
struct json_t *compare_records(const struct json_t *versions, const struct compare_set sets[2]);

#endif
